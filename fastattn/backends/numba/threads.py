"""How many threads of Numba's pool a call may use, and when it may use the pool at all."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import numba

from fastattn import _host

_workqueue = threading.Lock()


def thread_limit(num_threads: int) -> int:
    """num_threads, less where this process may not have so many.

    One in a forked child, where the threads of the parent's pool do not exist. Where Numba runs on OpenMP a
    limit set on that since the import (threadpoolctl, or omp_set_num_threads) holds; OpenMP's own default
    does not.
    """
    if num_threads == 1 or _host.is_forked():
        return 1
    limit = min(num_threads, numba.config.NUMBA_NUM_THREADS)
    if _openmp is not None and (most := _openmp.omp_get_max_threads()) != _openmp_default:
        limit = min(limit, most)
    return limit


def on_pool(wanted: int, run: Callable[[int], object]) -> None:
    """Calls run with how many threads of Numba's pool there are for it: `wanted`, or 1 where another thread
    holds a pool that only one may use at a time."""
    if wanted == 1:
        run(1)
        return
    before = numba.get_num_threads()  # starts the pool where it has not been
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


def caller_takes_part() -> bool:
    """Whether the thread that uses the pool is one of those that do the work."""
    return not _is_exclusive()


@cache
def _is_exclusive() -> bool:
    """Whether the pool ends the process when two threads use it at once; its user waits for it."""
    return numba.threading_layer() == "workqueue"


def _load_openmp() -> Any:
    """The OpenMP runtime of Numba's pool of that name, if that can be used here at all."""
    try:
        omppool = import_module("numba.np.ufunc.omppool")
    except ImportError:
        return None
    library = ctypes.CDLL(omppool.__file__)  # symbols of what it is linked with are found through it
    return library if hasattr(library, "omp_get_max_threads") else None


with _host.brief_openmp_spin():
    _openmp = _load_openmp()
_openmp_default: int = 0 if _openmp is None else _openmp.omp_get_max_threads()
