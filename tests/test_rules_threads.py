"""Rule 9: threads. How many, who decides, and that forks and concurrent callers are safe."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import fastattn
from fastattn import masks
from tests.cases import random_arrays
from tests.conftest import USABLE, quick_on_cython
from tests.process import python
from tests.tolerances import assert_all_same, assert_same_bits

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")

# Enough tasks for every thread, little enough work to take milliseconds.
COUNT_THREADS = """
import os
import numpy as np
import fastattn
x = np.random.default_rng(0).standard_normal((16, 4, 128, 32)).astype(np.float32)
def threads():
    return len(os.listdir("/proc/self/task"))
def more_threads(**options):
    before = threads()
    fastattn.attention(x, x, x, **options)
    return threads() - before
"""


def count(code, **variables):
    environment = {"FASTATTN_BACKEND": "cython"} | variables
    return [int(word) for word in python(COUNT_THREADS + code, env=environment).split()]


@linux_only
@pytest.mark.usefixtures("compiled")
class TestWhoDecides:
    def test_the_call(self):
        """Each time so many more than before: those that were started stay."""
        code = "for n in (1, 2, 3, 5): print(more_threads(num_threads=n))"
        assert count(code) == [0, 1, 1, 2]

    @pytest.mark.parametrize(
        "num_threads",
        [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)],
    )
    def test_the_environment_variable(self, num_threads):
        assert count("print(more_threads())", FASTATTN_NUM_THREADS=str(num_threads)) == [num_threads - 1]

    def test_set_num_threads(self):
        code = "for n in (1, 2, 3, 5): fastattn.set_num_threads(n); print(more_threads())"
        assert count(code) == [0, 1, 1, 2]

    def test_set_num_threads_goes_before_the_environment_variable(self):
        code = "fastattn.set_num_threads(3); print(more_threads(), fastattn.get_num_threads())"
        assert count(code, FASTATTN_NUM_THREADS="2") == [2, 3]

    def test_the_call_goes_before_all(self):
        code = "fastattn.set_num_threads(4); print(more_threads(num_threads=2))"
        assert count(code, FASTATTN_NUM_THREADS="3") == [1]

    def test_affinity(self):
        code = """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(more_threads(), fastattn.get_num_threads())
"""
        assert count(code) == [0, 1]

    def test_small_problems_wake_nobody(self):
        code = "x = x[:1, :1, :4, :8]; print(more_threads(num_threads=4))"
        assert count(code) == [0]


def test_bad_environment_variable_is_an_error_of_the_call_not_of_the_import():
    texts = ["two", "0", "-2", "1.5"]
    code = f"""
import os
import numpy as np, fastattn
for text in {texts}:
    os.environ["FASTATTN_NUM_THREADS"] = text
    try:
        fastattn.attention(np.ones((2, 3)), np.ones((4, 3)), np.ones((4, 2)))
    except ValueError as error:
        print(error)
"""
    messages = python(code, env={"FASTATTN_NUM_THREADS": texts[0]}).splitlines()
    for message, text in zip(messages, texts, strict=True):
        assert "FASTATTN_NUM_THREADS" in message
        assert repr(text) in message


def test_bad_isa_in_the_environment_lists_the_names():
    code = """
import numpy as np, fastattn
try:
    fastattn.attention(np.ones((2, 3)), np.ones((4, 3)), np.ones((4, 2)), backend="cython")
except (ValueError, fastattn.BackendError) as error:
    print(error)
"""
    message = python(code, env={"FASTATTN_ISA": "mmx"})
    for word in ("FASTATTN_ISA", "mmx", "portable"):
        assert word in message
    lines = python("import fastattn; fastattn.show_config()", env={"FASTATTN_ISA": "mmx"}).splitlines()
    assert any(line.startswith("isa       error: FASTATTN_ISA") for line in lines)
    assert lines[-1].startswith("  cuda"), "the other lines are there"


@linux_only
@pytest.mark.usefixtures("compiled")
class TestThreadpoolctl:
    SETUP = """
import threadpoolctl
def pools():
    return [pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "openmp"]
"""

    def test_sees_the_pool(self):
        code = self.SETUP + "more_threads(num_threads=2); print(len(pools()), pools()[0]['num_threads'])"
        pools, num_threads = count(code)
        assert pools >= 1
        assert num_threads >= 1

    @pytest.mark.parametrize("user_api", [None, "openmp", "blas"])
    def test_limits_the_pool(self, user_api):
        """To one thread, and to one more than the cores; to just the cores is what it is without a limit."""
        cores = len(os.sched_getaffinity(0))
        code = (
            self.SETUP
            + f"""
more_threads(num_threads=1)
for limit in (1, {cores + 1}):
    with threadpoolctl.threadpool_limits(limits=limit, user_api={user_api!r}):
        print(more_threads())
print(more_threads())
"""
        )
        wanted = cores + 2
        # Once the limit is gone there are `wanted` threads in all, of which all but one are there already.
        assert count(code, FASTATTN_NUM_THREADS=str(wanted)) == [0, cores, 1]

    def test_limits_the_very_first_call(self):
        code = (
            self.SETUP
            + """
with threadpoolctl.threadpool_limits(limits=1):
    print(more_threads())
"""
        )
        assert count(code, FASTATTN_NUM_THREADS="4") == [0]


FORK = """
import os, signal, sys, time
import numpy as np
import fastattn

x = np.random.default_rng(0).standard_normal((2, 4, 130, 16)).astype(np.float32)
options = dict(num_threads=3, causal=True)
expected = fastattn.attention(x, x, x, **options).tobytes()

def child():
    signal.alarm(20)  # ends a child that hangs
    for _ in range(3):
        if fastattn.attention(x, x, x, **options).tobytes() != expected:
            os._exit(2)
    os._exit(0)

for _ in range(20):
    pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(3)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, f"child ended with {status}"
    assert fastattn.attention(x, x, x, **options).tobytes() == expected  # the parent goes on

pid = os.fork()  # and a child of a child
if pid == 0:
    grandchild = os.fork()
    if grandchild == 0:
        child()
    os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) % 256)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@quick_on_cython
def test_forked_children(backend):
    environment = {"FASTATTN_BACKEND": backend.backend, "PYTHONWARNINGS": "ignore"}
    assert python(FORK, env=environment, timeout=100).strip() == "done"


MULTIPROCESSING = """
import multiprocessing
import numpy as np
import fastattn

def work(seed):
    x = np.random.default_rng(seed).standard_normal((2, 2, 150, 32)).astype(np.float32)
    return fastattn.attention(x, x, x, num_threads=2).tobytes()

if __name__ == "__main__":
    expected = [work(seed) for seed in range(8)]
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert pool.map_async(work, range(8)).get(timeout=60) == expected
    print("done")
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_multiprocessing_pool(backend):
    environment = {"FASTATTN_BACKEND": backend.backend, "PYTHONWARNINGS": "ignore"}
    assert python(MULTIPROCESSING, env=environment, timeout=100).strip() == "done"


FORK_UNDER_LOAD = """
import os, signal, threading
import numpy as np
import fastattn

x = np.random.default_rng(0).standard_normal((2, 4, 300, 32)).astype(np.float32)
expected = fastattn.attention(x, x, x, num_threads=2).tobytes()
stop = threading.Event()

def busy():
    while not stop.is_set():
        assert fastattn.attention(x, x, x, num_threads=2).tobytes() == expected

worker = threading.Thread(target=busy)
worker.start()
for _ in range(10):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os._exit(0 if fastattn.attention(x, x, x, num_threads=2).tobytes() == expected else 2)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != 0:
        stop.set()
        raise SystemExit(f"child ended with {status}")
stop.set()
worker.join()
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.usefixtures("compiled")
def test_fork_while_another_thread_computes():
    environment = {"FASTATTN_BACKEND": "cython", "PYTHONWARNINGS": "ignore"}
    assert python(FORK_UNDER_LOAD, env=environment, timeout=100).strip() == "done"


FEWER_THREADS = """
import numpy as np
import fastattn
query, key, value = np.random.default_rng(0).standard_normal((3, 2, 8, 200, 64), dtype=np.float32)
one = fastattn.attention(query, key, value, num_threads=1)
many = fastattn.attention(query, key, value, num_threads=7)
assert one.tobytes() == many.tobytes()
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", [name for name in USABLE if name == "numba"], indirect=True)
@pytest.mark.parametrize("limit", ["1", "2"])
def test_fewer_threads_than_asked_for(backend, limit):
    """OpenMP, where it is Numba's pool, may give a call fewer: those that run do the work of the others."""
    environment = {"FASTATTN_BACKEND": backend.backend, "OMP_THREAD_LIMIT": limit}
    assert python(FEWER_THREADS, env=environment).strip() == "done"


def test_eight_python_threads_at_once(engine):
    """Different problems concurrently, each many times, each with the bits it has alone."""
    rng = np.random.default_rng(0)
    problems = []
    for seed in range(8):
        len_q, len_k = rng.integers(1, 150, 2)
        arrays = random_arrays(
            seed, lead=(2,), heads=2, len_q=int(len_q), len_k=int(len_k), head_dim=8 + 3 * seed
        )
        options = [
            {},
            {"causal": "bottom_right"},
            {"mask": rng.random((len_q, len_k)) < 0.5},
            {"bias": rng.standard_normal((len_q, len_k))},
            {"mask": masks.Window(3, 3) | masks.GlobalTokens([0])},
            {"softcap": 3.0},
            {"sinks": np.ones(2)},
            {"window": (5, 5)},
        ][seed]
        problems.append((arrays, options, engine.everything(*arrays, **options)))
    together = threading.Barrier(8)

    def work(number):
        arrays, options, expected = problems[number]
        together.wait()
        for turn in range(40):
            results = engine.everything(*arrays, num_threads=1 + turn % 3, **options)
            assert_all_same(results, expected)

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, number) for number in range(8)]:
            future.result(timeout=120)


def test_one_pair_of_arrays_shared_by_all_threads(engine):
    arrays = random_arrays(lead=(2,), heads=4, len_q=100, len_k=100)
    expected = engine.attention(*arrays)
    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(engine.attention, *arrays) for _ in range(100)]:
            assert_same_bits(future.result(timeout=120), expected)


@pytest.mark.usefixtures("compiled")
def test_the_gil_is_released():
    """Another Python thread makes progress during one long call."""
    x = np.random.default_rng(0).standard_normal((1, 4, 3000, 64)).astype(np.float32)
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(None)
            stop.wait(0.0005)

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        before = len(ticks)
        fastattn.attention(x, x, x, backend="cython", num_threads=1)
        during = len(ticks) - before
    finally:
        stop.set()
        ticker.join()
    # The call takes tens of milliseconds; with the GIL held there would be one tick at most.
    assert during >= 5


def test_get_num_threads_says_what_was_set():
    before = fastattn.get_num_threads()
    try:
        fastattn.set_num_threads(3)
        assert fastattn.get_num_threads() == 3
    finally:
        fastattn.set_num_threads(before)
