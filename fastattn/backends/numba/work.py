"""All tasks of a call, on all its threads."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from numba import njit, prange

from fastattn.backends.numba.codegen.cache import cached
from fastattn.backends.numba.codegen.calls import OPTIONS, routine
from fastattn.backends.numba.codegen.intrinsics import call_work, fetch_add, record_at
from fastattn.backends.numba.layout import BLOCK, SHARE
from fastattn.backends.numba.splitkv import run_split_task
from fastattn.backends.numba.spread import IS_LINUX, spread_enter, spread_leave
from fastattn.backends.numba.sweep import run_task

SHARE_NBYTES = SHARE.itemsize

_block_at = record_at(BLOCK)
_share_at = record_at(SHARE)


@routine
def work(job, shares, thread, num_threads):
    """Runs the tasks of a thread's own share, then those of the others' shares that have not begun."""
    w = job.scratch + thread * job.scratch_nbytes
    block = _block_at(w + job.to_block)
    block.seen_key = block.seen_value = 0
    if IS_LINUX and num_threads > 1:
        spread_enter(job, w)
    # Small tasks are taken a few at a time.
    grain = job.n_tasks if num_threads == 1 else max(1, job.n_tasks // (num_threads * 32))
    for turn in range(num_threads):
        at = shares + (thread + turn) % num_threads * SHARE_NBYTES
        stop = _share_at(at).stop
        while True:
            first = fetch_add(at, grain)  # of its `next`
            if first >= stop:
                break
            for task in range(first, min(first + grain, stop)):
                if job.uses_split_kv:
                    run_split_task(job, w, block, task)
                else:
                    run_task(job, w, block, task)
    if IS_LINUX and num_threads > 1:
        spread_leave(job, w)
    return 0


@cached
@njit(parallel=True, **OPTIONS)
def _run_parallel(address: Any, job: Any, shares: Any, num_threads: Any) -> None:
    """Runs `work`, whose address this is, on every thread."""
    for thread in prange(num_threads):
        call_work(address, job, shares, thread, num_threads)


@cache
def _alone(address: int) -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)(address)


def run_work(address: int, job: int, shares: int, num_threads: int) -> None:
    """Runs every task of the record at `job`, on num_threads threads with their shares; `address` is that of
    `work`.

    The result does not depend on which thread runs which task.
    """
    if num_threads == 1:
        _alone(address)(job, shares, 0, 1)
    else:
        _run_parallel(address, job, shares, num_threads)
