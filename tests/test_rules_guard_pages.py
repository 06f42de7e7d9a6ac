"""Rules 4 and 7, the hard way: nothing is read or written one byte outside the arrays.

Each array ends right before, or begins right after, a page that may not be touched. A stray vector load
is then a crash, which is why this runs in a process of its own.
"""

from __future__ import annotations

import sys

import pytest

from tests.conftest import ENGINES, on, reference_is_slow
from tests.process import python

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")

SCRIPT = """
import faulthandler
import itertools
import os

import numpy as np

import fastattn
from fastattn import masks
from fastattn.biases import Grid
from tests.process import GuardedArrays

faulthandler.enable()
rng = np.random.default_rng(0)
sizes = [
    # H, K, L, S, D, E
    (1, 1, 1, 1, 1, 1), (2, 1, 3, 5, 7, 9), (1, 1, 17, 33, 16, 16),
    (4, 2, 33, 129, 24, 40), (1, 1, 49, 47, 64, 63), (2, 2, 1, 700, 64, 64),
    (1, 1, 130, 257, 37, 53), (3, 1, 16, 128, 80, 96), (1, 1, 5, 31, 128, 128), (4, 1, 3, 600, 33, 65),
]
calls = 0
for dtype, (H, K, L, S, D, E) in itertools.product(("float32", "float64"), sizes):
    arrays = {
        "query": rng.standard_normal((H, L, D)).astype(dtype),
        "key": rng.standard_normal((K, S, D)).astype(dtype),
        "value": rng.standard_normal((K, S, E)).astype(dtype),
        "out": np.zeros((H, L, E), dtype),
    }
    allowed = rng.random((H, L, S)) < 0.6
    extras = [
        {},
        {"mask": allowed},
        {"mask": allowed[:1, :1] * np.int32(3)},
        {"mask": allowed.astype(np.int64)},
        {"bias": rng.standard_normal((H, L, S)).astype(dtype)},
        {"bias": rng.standard_normal((L, S)).astype(np.float16)},
        {"bias": rng.standard_normal((1, S)).astype(np.float64)},
        {"sinks": rng.standard_normal(H).astype(dtype)},
        {"causal": "bottom_right"},
        {"key_lengths": S // 2, "window": (5, 5)},
        {"mask": masks.Window(3, 3) | masks.GlobalTokens([0])},
    ]
    if os.environ["FASTATTN_BACKEND"] != "numba":
        extras.append({"bias": Grid(*(rng.standard_normal((H, L, n)).astype(dtype) for n in (1, S)))})
    for extra, at_end, slow_axis in itertools.product(extras, (False, True), (False, True)):
        guarded = GuardedArrays()
        placed = {}
        for name, array in (arrays | extra).items():
            if isinstance(array, Grid):
                placed[name] = Grid(*(guarded.place(x, at_end=at_end) for x in (array.rows, array.columns)))
            elif not isinstance(array, np.ndarray):
                placed[name] = array
            elif slow_axis and array.ndim > 1:
                placed[name] = guarded.place(array.swapaxes(-1, -2).copy(), at_end=at_end).swapaxes(-1, -2)
            else:
                placed[name] = guarded.place(array, at_end=at_end)
        expected = fastattn.attention(**{name: a for name, a in (arrays | extra).items() if name != "out"})
        fastattn.attention(**placed)
        assert placed["out"].tobytes() == expected.tobytes(), (dtype, H, K, L, S, D, E, list(extra))
        fastattn.attention(**placed, return_lse=True, return_weights=True, num_threads=2)
        if not extra:
            short = {name: placed[name] for name in ("query", "key", "value")}
            assert fastattn.attention(**short).tobytes() == expected.tobytes()  # the short way
        calls += 2
print(calls)
"""


@pytest.mark.slow
@reference_is_slow
def test_nothing_outside_the_arrays_is_touched(engine):
    printed = python(SCRIPT, env=engine.environment(), timeout=240)
    assert int(printed) == 2 * 2 * 10 * (11 + (engine.backend != "numba")) * 2 * 2


HIDDEN = """
import faulthandler

import numpy as np

import fastattn
from tests.process import GuardedArrays

faulthandler.enable()
rng = np.random.default_rng(0)
for dtype in ("float32", "float64"):
    for length, S in ((1, 40), (16, 17), (33, 300), (128, 129), (130, 5000), (0, 7)):
        for L in (1, 2, 70):
            query = rng.standard_normal((2, L, 16)).astype(dtype)
            short = rng.standard_normal((2, 1, length, 16)).astype(dtype)
            expected = fastattn.attention(query, short[0], short[1])
            guarded = GuardedArrays()
            real = [guarded.place(array, at_end=True) for array in short]
            # The same memory seen as S keys: all but the first `length` rows lie in the forbidden page.
            strides = (0, 16 * short.itemsize, short.itemsize)
            seen = [np.lib.stride_tricks.as_strided(array, (1, S, 16), strides) for array in real]
            got = fastattn.attention(query, *seen, key_lengths=length)
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
print("done")
"""


@on(pytest.param(it, marks=pytest.mark.slow if it.backend == "numba" else ()) for it in ENGINES)
def test_keys_past_key_lengths_are_never_read(engine):
    """The contract says never, so here it would crash."""
    assert python(HIDDEN, env=engine.environment(), timeout=120).strip() == "done"


def test_the_guard_works():
    """A read past the end does end the process, or the tests above prove nothing."""
    code = """
import ctypes
import numpy as np
from tests.process import GuardedArrays
array = GuardedArrays().place(np.ones(8, np.float32), at_end={at_end})
elements = array.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
print("inside", sum(elements[n] for n in range(8)), flush=True)
elements[{index}]
print("outside")
"""
    for at_end, index in ((True, 8), (False, -1)):
        with pytest.raises(AssertionError, match=r"^exit status -\d+\ninside 8.0\n\n"):
            python(code.format(at_end=at_end, index=index))
