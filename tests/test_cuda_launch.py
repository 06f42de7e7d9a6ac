"""Calls of the CUDA backend down to a fake driver: what it is asked for, and what that costs."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.process import ROOT, python
from tests.test_cuda_ptx import can_compile

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")

SETUP = """
import threading, warnings
from itertools import pairwise
import numpy as np
import fastattn
from fastattn.masks import Causal, Dense, Window
from tests.fake_cuda import *

warnings.simplefilter("error")
def addresses(launched):
    "Of query, key, value; these come first."
    return [int.from_bytes(launched.arguments[n], "little") for n in (0, 5, 10)]
def of(arrays):
    return [array.__cuda_array_interface__["data"][0] for array in arrays]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs code on the fake driver, and keeps what it compiles for other tests."""
    if not can_compile():
        pytest.skip("NVIDIA's compiler is not installed: pip install 'fastattn[cuda]'")
    folder = tmp_path_factory.mktemp("driver")
    source, library = ROOT / "tests" / "fake_cuda.c", folder / "libcuda.so.1"
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    env = {"LD_LIBRARY_PATH": str(folder), "NUMBA_CACHE_DIR": str(folder)}
    return lambda code, **more: python(SETUP + code, env=env | more, timeout=600)


ARGUMENTS = """
launch_twice()
rng = np.random.default_rng(0)
def check(name, *arrays, kernels, calls=3, **options):
    for _ in range(calls):  # of which all but the first find the plan, if that is kept
        log.clear()
        moved = [TorchLike(array.hidden.copy(), stream=7) for array in arrays]
        results = fastattn.attention(*moved, **options)
        assert len(log) == 2 * kernels, (name, len(log))
        for ours, numbas in zip(log[::2], log[1::2]):
            assert ours == numbas, (name, ours, numbas)
            assert ours.stream == 7 and ours.grid[-1] == 0
        if "merge" not in log[0].name:
            assert addresses(log[0]) == of(moved), name
    print(name, [len(launched.arguments) for launched in log[::2]])

def on_gpu(*shape, dtype=np.float32):
    return TorchLike(np.ones(shape, dtype), stream=7)

check("plain", *arrays(200, 200), kernels=1)
check("decode", *arrays(1, 3000), kernels=2)
check("strides", *[x[..., ::2, 1:] for x in arrays(200, 200)], kernels=1)
check("lead", *arrays(200, 200, lead=(2, 2, 3)), kernels=4)
check("causal", *arrays(200, 200), causal=True, kernels=1)
check(
    "everything", *arrays(60, 60), return_lse=True, return_weights=True, bias=on_gpu(60, 60), softcap=9.0,
    sinks=on_gpu(2), mask=on_gpu(60, 60, dtype=bool), key_lengths=[50], causal=True, window=(9, 0), kernels=2,
)
check("mask map", *arrays(200, 200), mask=Window(9, 0) | Causal(), kernels=1)
def odd(array):
    moved = np.ones(array.hidden.size + 1, np.float32)[1:].reshape(array.shape)
    return TorchLike(moved, stream=7)
log.clear()
fastattn.attention(*arrays(200, 200))
plain = log[0].name
log.clear()
fastattn.attention(*map(odd, arrays(200, 200)))
assert log[0] == log[1] and log[0].name != plain, "spans are read at multiples of their size"
def score_mod(score, b, h, i, j, table, factor):
    return score * factor + table[h]
aux = on_gpu(2), np.float32(0.5)
for _ in range(2):
    log.clear()
    fastattn.flex_attention(*arrays(200, 200), score_mod=score_mod, aux=aux)
    assert len(log) == 2 and log[0] == log[1]
"""


@pytest.mark.slow
def test_arguments_are_those_that_numba_passes(run):
    """As many as the kernel has in PTX, of the same bytes; on the same grid, stream and device."""
    print(run(ARGUMENTS, NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS="0"))


HOST = """
def few(name, most, *arrays, **options):
    for _ in range(2):
        fastattn.attention(*arrays, **options)
    counted = calls_of(lambda: fastattn.attention(*arrays, **options))
    print(name, counted.total())
    assert counted.total() <= most, counted.most_common(40)

few("plain", 400, *arrays(600, 600))
few("causal", 400, *arrays(600, 600), causal=True)

torch = fake_torch()
tensors = [torch.Tensor(array.hidden, device=1) for array in arrays(600, 600)]
few("tensors", 340, *tensors)
torch.asked.clear()
out = fastattn.attention(*tensors)
assert torch.asked == [1] and log[-1].stream == 41 and log[-1].device == 1
assert addresses(log[-1]) == [tensor.data_ptr() for tensor in tensors]
assert '"dltensor_versioned"' in repr(out), out
tensors[1] = TorchLike(tensors[1].hidden, device=1, stream=9)
for order, events in (((0, 1, 0), 1), ((1, 0, 0), 1)):
    before = DRIVER.fake_events()
    fastattn.attention(*[tensors[n] for n in order])
    assert log[-1].stream == (41, 9)[order[0]] and DRIVER.fake_events() == before + events
del out

# Memory, contexts and events of such calls.
before = DRIVER.fake_made()
result_of_one = fastattn.attention(*arrays(600, 600))
assert DRIVER.fake_made() - before == 2, "the result, and the lse"
assert DRIVER.fake_live() == 1

# The GPU of the arrays, and again that of before.
cuda.current_context()
depth = DRIVER.fake_depth()
log.clear()
for device in (1, 0, 1):
    fastattn.attention(*arrays(600, 600, device=device))
    assert log[-1].device == device and DRIVER.fake_depth() == depth
    assert cuda.current_context().device.id == 0
assert len({launched.name for launched in log}) == 1, "it is compiled once"

# Streams: that of the query, which waits once for each other.
query, key, value = arrays(600, 600)
query.stream, key.stream, value.stream = 7, 9, 9
events = DRIVER.fake_events()
fastattn.attention(query, key, value)
assert log[-1].stream == 7 and DRIVER.fake_events() == events + 1

# Errors: nothing stays.
result.code = 719
try:
    fastattn.attention(query, key, value)
except RuntimeError as error:
    assert "CUDA_ERROR_FAKE" in str(error) and "this is a fake" in str(error), error
else:
    raise AssertionError
result.code = 0
assert DRIVER.fake_depth() == depth
fastattn.attention(query, key, value)
assert DRIVER.fake_live() == 1

# Arrays on the host are copied there.
def watch(launched):
    seen.extend(np.frombuffer(ctypes.string_at(at, 4 * 600), np.float32) for at in addresses(launched))
seen, result.watch = [], watch
on_host = [np.full((1, 2, 600, 64), n, np.float32) for n in (1, 2, 3)]
out = fastattn.attention(*on_host, backend="cuda")
assert log[-1].stream == 2 and [set(x) for x in seen] == [{1.0}, {2.0}, {3.0}] and not out.any()
result.watch = None
assert DRIVER.fake_live() == 1

# Threads: each launches with its own arrays.
log.clear()
problems = [arrays(600, 600) for _ in range(8)]
def work(problem):
    for _ in range(100):
        fastattn.attention(*problem)
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=work, args=(problem,)) for problem in problems]
for thread in threads: thread.start()
for thread in threads: thread.join()
found = [tuple(addresses(launched)) for launched in log]
assert len(found) == 800 and all(found.count(tuple(of(problem))) == 100 for problem in problems)
"""


@pytest.mark.slow
def test_what_calls_cost_the_host_and_leave_behind(run):
    print(run(HOST))


PER_THREAD = """
from tests.fake_gpu import LoneArray
lone = [LoneArray(array.hidden) for array in arrays(600, 600)]
for array in lone: array.stream = None
out = fastattn.attention(*lone)
assert log[-1].stream == 2, log[-1].stream
assert DRIVER.fake_live() == 1 and out.shape == (1, 2, 600, 64)
"""


@pytest.mark.slow
def test_the_stream_of_each_thread(run):
    run(PER_THREAD, NUMBA_CUDA_PER_THREAD_DEFAULT_STREAM="1")
