"""How many threads of Numba's pool a call may use, and when it may use the pool at all."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numba

from fastattn import _host

#: Numba's own pool, "workqueue", ends the process when two threads use it at once.
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


@contextmanager
def pool(wanted: int) -> Iterator[int]:
    """Has Numba use `wanted` threads, if this thread may use its pool now; how many there are."""
    if wanted == 1:
        yield 1
        return
    before = numba.get_num_threads()
    numba.set_num_threads(wanted)  # starts the pool where it has not been
    locks = numba.threading_layer() == "workqueue"
    try:
        if locks and not _workqueue.acquire(blocking=False):
            yield 1
            return
        try:
            yield wanted
        finally:
            if locks:
                _workqueue.release()
    finally:
        numba.set_num_threads(before)


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
