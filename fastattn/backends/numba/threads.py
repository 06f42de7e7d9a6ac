"""How many threads of Numba's pool a call may use, and when it may use the pool at all."""

from __future__ import annotations

import _thread
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module

import numba

from fastattn._machine import host, threads

#: Numba's threading layers, and by the value of NUMBA_THREADING_LAYER those of which one must load.
#: "workqueue" always does.
_MODULES = {name: f"numba.np.ufunc.{name}pool" for name in ("tbb", "omp")} | {
    "workqueue": "numba.np.ufunc.workqueue"
}
_LAYERS = {name: (name,) for name in _MODULES} | {
    "default": ("workqueue",),
    "safe": ("tbb",),
    "threadsafe": ("tbb", "omp"),
    "forksafe": ("workqueue",),
}

#: `_startable` waits at most so long for ended threads to exit.
_LEAVE_SECONDS = 1.0

_workqueue = threading.Lock()
_has_started = False  # Numba's pool, by a call
_tried = threading.local()  # .all: whether a pool's threads could be started, for this Python thread


def thread_limit(wanted: int) -> int:
    """How many threads a call that wants `wanted` may use: that of `fastattn._machine.threads`, and no
    more than Numba's pool has.

    One in a forked child, which does not have the parent's threads. A pool starts all its threads when it is
    first used, and aborts the process where one cannot be started: because of a limit on the user's or the
    container's processes (RLIMIT_NPROC, pids.max), or of missing address space for its stack. So it is tried
    first, once for each Python thread, as each has its own threads of OpenMP; without them a call gets one.
    """
    if threads.is_forked():
        return 1
    limit = threads.thread_limit(min(wanted, numba.config.NUMBA_NUM_THREADS))
    if limit > 1 and not getattr(_tried, "all", False):
        _tried.all = _startable(numba.config.NUMBA_NUM_THREADS) == numba.config.NUMBA_NUM_THREADS
    return limit if limit == 1 or _tried.all else 1


def _startable(count: int) -> int:
    """How many more threads the process can start now, `count` at most."""
    gate, numbers, started = threading.Lock(), [], 0

    def wait() -> None:
        numbers.append(threading.get_native_id())
        with gate:
            pass

    with gate:
        with suppress(RuntimeError, MemoryError):
            for _ in range(count):
                _thread.start_new_thread(wait, ())
                started += 1
        deadline = time.monotonic() + _LEAVE_SECONDS
        while len(numbers) < started and time.monotonic() < deadline:
            time.sleep(0)
    # Until they have exited they count against the limits.
    for number in numbers:
        while os.path.exists(f"/proc/self/task/{number}") and time.monotonic() < deadline:
            time.sleep(0)
    return started


def reason_no_pool() -> str | None:
    """Why Numba's pool cannot be started, None where it can."""
    layer = str(numba.config.THREADING_LAYER).lower()
    candidates = _LAYERS.get(layer)
    if candidates is None:
        return f"NUMBA_THREADING_LAYER must be one of {', '.join(_LAYERS)}, got {layer!r}"
    priority = numba.config.THREADING_LAYER_PRIORITY
    if sorted(priority) != sorted(_MODULES):
        return f"NUMBA_THREADING_LAYER_PRIORITY must name {', '.join(_MODULES)} once each, got {priority}"
    absent = []
    for name in candidates:
        try:
            import_module(_MODULES[name])
        except ImportError as error:
            absent.append(str(error))
        else:
            return None
    return f"no threading layer for NUMBA_THREADING_LAYER={layer} loads ({'; '.join(absent)})"


def on_pool(wanted: int, run: Callable[[int], object]) -> None:
    """Calls run(n) with the number of threads of Numba's pool that it may use: `wanted`, or 1 while another
    thread uses a pool that allows one user at a time."""
    global _has_started
    if wanted == 1:
        run(1)
        return
    if not _has_started:
        with threads.no_fork:
            numba.get_num_threads()  # starts the pool
        _has_started = True
    before = numba.get_num_threads()
    if before != wanted:
        numba.set_num_threads(wanted)
    try:
        if not _is_exclusive():
            run(wanted)
        elif _workqueue.acquire(blocking=False):
            try:
                run(wanted)
            finally:
                _workqueue.release()
        else:
            run(1)
    finally:
        if before != wanted:
            numba.set_num_threads(before)


@cache
def _is_exclusive() -> bool:
    """Whether the pool aborts the process when two threads use it at once.

    In such a pool the caller does none of the work.
    """
    return numba.threading_layer() == "workqueue"


with suppress(ImportError), host.brief_openmp_spin():
    # Loads the OpenMP runtime of Numba's pool of that name.
    import_module(_MODULES["omp"])
