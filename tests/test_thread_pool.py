"""The threads of the compiled backend, from Python: affinity, signals, other libraries' processes.

The pool itself is tested in C (kernels/test_pool.c, kernels/test_placement.c).
"""

from __future__ import annotations

import multiprocessing
import os
import sys

import numpy as np
import pytest

import fastattn
from tests.process import python

pytestmark = pytest.mark.usefixtures("compiled")
linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

MODEL = """
import os, signal, threading, time
import numpy as np
import fastattn

x = np.random.default_rng(0).standard_normal((4, 300, 32), dtype=np.float32)
expected = fastattn.attention(x, x, x, num_threads=1).tobytes()
def check(num_threads=3):
    assert fastattn.attention(x, x, x, num_threads=num_threads, backend="cython").tobytes() == expected
def workers():
    folder = "/proc/self/task/"
    names = {thread: open(f"{folder}{thread}/comm").read() for thread in os.listdir(folder)}
    return [int(thread) for thread, name in names.items() if name.startswith("fastattn-")]
def started(n, seconds=20):
    # A call may end before its workers have run, and set their names.
    until = time.monotonic() + seconds
    while len(workers()) < n and time.monotonic() < until:
        time.sleep(0.001)
    return workers()
"""


def given(number: int) -> np.ndarray:
    return np.random.default_rng(number).standard_normal((4, 300, 32), dtype=np.float32)


@linux_only
def test_one_pool_for_all_python_threads():
    code = """
for _ in range(20):
    threads = [threading.Thread(target=check) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(len(workers()) <= max(2, len(os.sched_getaffinity(0)) - 1))
"""
    assert python(MODEL + code).strip() == "True"


@linux_only
def test_workers_follow_the_affinity_of_the_caller():
    code = """
everywhere = os.sched_getaffinity(0)
for cpus in [*({cpu} for cpu in sorted(everywhere)[:4]), everywhere] * 10:
    os.sched_setaffinity(0, cpus)
    check()
    assert all(os.sched_getaffinity(worker) == cpus for worker in workers()), cpus
print(len(started(2)))
"""
    assert python(MODEL + code).strip() == "2"


@linux_only
def test_other_threads_keep_their_affinity():
    code = """
check()
core = {min(os.sched_getaffinity(0))}
found = []
def call_on_one_core():
    os.sched_setaffinity(0, core)
    for _ in range(20):
        check()
    found.append(os.sched_getaffinity(0))
before = os.sched_getaffinity(0)
thread = threading.Thread(target=call_on_one_core)
thread.start()
while thread.is_alive():
    check()
thread.join()
print(found == [core] and os.sched_getaffinity(0) == before)
"""
    assert python(MODEL + code).strip() == "True"


@pytest.mark.skipif(os.name != "posix", reason="sends signals to itself")
def test_signals_go_to_the_main_thread():
    """Ctrl-C ends no call halfway, and the next call is right."""
    code = """
interrupted, calls = 0, 0
signal.signal(signal.SIGINT, signal.default_int_handler)
check()
def interrupt():
    for _ in range(30):
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
other = threading.Thread(target=interrupt)
other.start()
while other.is_alive() or calls < 10:
    try:
        while other.is_alive():
            check()
            calls += 1
        break
    except KeyboardInterrupt:
        interrupted += 1
check()
print(interrupted > 0)
"""
    assert python(MODEL + code).strip() == "True"


@linux_only
def test_workers_take_no_signal():
    """So that one interrupts what the main thread waits for."""
    code = """
check()
masks = [open(f"/proc/self/task/{worker}/status").read() for worker in started(2)]
blocked = [int(mask.split("SigBlk:")[1].split()[0], 16) for mask in masks]
print([[it >> number - 1 & 1 for it in blocked] for number in (signal.SIGINT, signal.SIGSEGV)])
"""
    assert python(MODEL + code).strip() == "[[1, 1], [0, 0]]"


@linux_only
def test_a_forked_child_has_threads_of_its_own():
    code = """
check()
if os.fork() == 0:
    assert not workers()
    check()
    os._exit(10 + len(started(2)))
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    assert python(MODEL + code).strip() == "12"


def test_the_process_exits_with_calls_in_flight():
    code = """
for _ in range(4):
    threading.Thread(target=lambda: [check() for _ in range(100000)], daemon=True).start()
time.sleep(0.05)
print("done", flush=True)
"""
    assert python(MODEL + code).strip() == "done"


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(it, marks=pytest.mark.slow if it != "fork" else ())
        for it in multiprocessing.get_all_start_methods()
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_processes_of_every_start_method(method):
    arrays = [given(number) for number in range(6)]
    expected = [fastattn.attention(x, x, x, num_threads=2) for x in arrays]
    with multiprocessing.get_context(method).Pool(2) as pool:
        waiting = [
            pool.apply_async(fastattn.attention, (x, x, x), {"num_threads": 2, "backend": "cython"})
            for x in arrays
        ]
        for one, other in zip(waiting, expected, strict=True):
            assert one.get(timeout=60).tobytes() == other.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loky", "threading", "multiprocessing"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_joblib(kind):
    joblib = pytest.importorskip("joblib")
    arrays = [given(number) for number in range(8)]
    call = joblib.delayed(fastattn.attention)
    found = joblib.Parallel(n_jobs=3, backend=kind)(call(x, x, x, num_threads=2) for x in arrays)
    for x, one in zip(arrays, found, strict=True):
        assert one.tobytes() == fastattn.attention(x, x, x, num_threads=1).tobytes()


@linux_only
@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="root may become another user")
def test_threads_refused_while_calls_run():
    """As many as there are go on; none is started, and none is waited for."""
    code = """
import resource
check(num_threads=2)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
os.setresuid(54321, 54321, 54321)
for num_threads in (2, 3, 40, 2):
    check(num_threads)
print(len(started(1)))
"""
    assert python(MODEL + code).strip() == "1"
