"""What a call costs the host: arguments of kernels, copies and allocations. Each takes microseconds."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import fastattn
from fastattn.backends.cuda import engine, stream
from tests.cuda.libraries import SIMULATED
from tests.fake_gpu import FakeArray

pytestmark = pytest.mark.skipif(not SIMULATED, reason="launches are counted, and not done")


def arguments_of(value):
    """A kernel's own arguments for one of these: a tuple has those of its items, an array has seven."""
    if isinstance(value, tuple):
        return sum(map(arguments_of, value))
    return 7 if np.ndim(value) else 1


@pytest.fixture
def counted(monkeypatch):
    """Arguments of each launch by kernel, and the numbers of copies and allocations."""
    found = {"attend_kernel": [], "merge_kernel": [], "copies": 0, "allocations": 0}

    def counts(name, function):
        def counting(*arguments):
            found[name] += 1
            return function(*arguments)

        return counting

    class Launcher:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, launch):
            return lambda *arguments: found[self.name].append(arguments_of(arguments))

    for name in ("attend_kernel", "merge_kernel"):
        monkeypatch.setattr(engine, name, lambda *form, _name=name, **mods: Launcher(_name))
    monkeypatch.setattr(engine, "_plans", {})
    simulated = stream.SimulatedStream
    monkeypatch.setattr(simulated, "upload", counts("copies", simulated.upload))
    monkeypatch.setattr(simulated, "_allocate", counts("allocations", simulated._allocate))
    return found


@pytest.mark.parametrize(
    ("len_q", "options", "copies", "allocations"),
    [
        (50, {}, 0, 2),
        (50, {"causal": True}, 0, 2),
        (50, {"causal": "bottom_right", "window": (9, 0)}, 0, 2),
        (50, {"key_lengths": np.array([20])}, 1, 3),
        (1, {}, 0, 2),
    ],
    ids=["plain", "causal", "window", "lengths", "decode"],
)
def test_a_call_of_arrays_on_the_gpu(counted, len_q, options, copies, allocations):
    """Allocated are out, and together lse and partial results; a rule for the keys needs no array."""
    query, key, value = (FakeArray(np.ones((1, 2, n, 4), np.float32)) for n in (len_q, 50, 50))
    fastattn.attention(query, key, value, **options)
    (arguments,) = counted["attend_kernel"]
    assert arguments <= 45 and sum(counted["merge_kernel"]) <= 25
    assert len(counted["merge_kernel"]) == (len_q == 1)
    assert counted["copies"] == copies and counted["allocations"] == allocations


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_loads_of_whole_spans_are_at_multiples_of_their_bytes(dtype):
    """The simulator knows no alignment, so this is said of a view alone."""
    dtype = np.dtype(dtype)
    nbytes = 4 * dtype.itemsize
    view = stream.View(None, 10 * nbytes, 999, dtype, 8, (1, 2, 9, 12), (216, 108, 12, 1))

    def is_packed(**changed):
        return view._replace(**changed).is_packed(np.dtype(np.float32), 4)

    assert is_packed() and is_packed(address=11 * nbytes) and is_packed(start=12)
    assert not is_packed(address=10 * nbytes + dtype.itemsize)
    assert not is_packed(start=9)
    assert not is_packed(strides=(216, 108, 13, 1))
    assert not is_packed(strides=(216, 108, 24, 2))
    assert not is_packed(dtype=np.dtype(np.float64))
