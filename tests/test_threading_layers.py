"""Numba's three kinds of thread pools, each in its own process: nothing aborts, hangs or changes a bit."""

from __future__ import annotations

import os

import pytest

from tests.process import python

pytest.importorskip("numba")
pytest.importorskip("fastattn.backends.cython.driver")

PROBLEMS = """
import numba, os, signal, sys, threading
import numpy as np
from concurrent.futures import ThreadPoolExecutor
import fastattn

rng = np.random.default_rng(0)
options = [
    {}, {"causal": True}, {"window": (9, 9)}, {"bias": rng.standard_normal((220, 220)).astype(np.float32)},
    {"softcap": 3.0}, {"mask": rng.random((300, 300)) < 0.5}, {}, {"causal": True},
]
lengths = [100, 140, 180, 220, 260, 300, 340, 380]
arrays = [rng.standard_normal((2, 4, length, 32)).astype(np.float32) for length in lengths]

def solve(number, **more):
    x = arrays[number]
    return fastattn.attention(x, x, x, **options[number], **more).tobytes()

expected = [solve(number, num_threads=1) for number in range(8)]
compiled = [solve(number, num_threads=1, backend="cython") for number in range(8)]
"""

SIDE_BY_SIDE = (
    PROBLEMS
    + """
def work(number):
    for turn in range(200):
        assert solve(number, num_threads=1 + turn % 4) == expected[number]
        if turn % 10 == 0:
            assert solve(number, num_threads=2, backend="cython") == compiled[number]

with ThreadPoolExecutor(8) as pool:
    for future in [pool.submit(work, number) for number in range(8)]:
        future.result(timeout=100)
print(numba.threading_layer())
"""
)


@pytest.mark.slow
def test_eight_threads_beside_the_compiled_backend(pool_environment):
    assert python(SIDE_BY_SIDE, env=pool_environment).split() == [pool_environment["NUMBA_THREADING_LAYER"]]


FORKED = (
    PROBLEMS
    + """
assert solve(3, num_threads=4) == expected[3]
solve(3, num_threads=2, backend="cython")
for turn in range(50):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # ends a child that hangs
        right = all(solve(n) == expected[n] and solve(n, backend="cython") == compiled[n] for n in (0, 1, 2))
        os._exit(0 if right else 2)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, f"child ended with {status}"
    assert solve(turn % 8) == expected[turn % 8]
print("done")
"""
)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fifty_forked_children(pool_environment):
    assert python(FORKED, env={**pool_environment, "PYTHONWARNINGS": "ignore"}).split()[-1] == "done"


THREAD_COUNTS = """
import numba
import numpy as np
import fastattn
from fastattn.backends.numba.threads import thread_limit

x = np.random.default_rng(0).standard_normal((2, 8, 300, 32)).astype(np.float32)
fastattn.attention(x, x, x, num_threads=3)
numba.set_num_threads(2)  # what Numba's own functions use is left as it is
assert thread_limit(3) == 3 and thread_limit(9) == 4, (thread_limit(3), thread_limit(9))
fastattn.attention(x, x, x, num_threads=3)
print(numba.get_num_threads())
"""


@pytest.mark.slow
def test_thread_counts(pool_environment):
    assert python(THREAD_COUNTS, env=pool_environment).split() == ["2"]
