"""All tasks of a call, on all its threads."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from numba import njit, prange

from fastattn.backends.numba.cache import cached
from fastattn.backends.numba.calls import call_stage, fetch_next, stage
from fastattn.backends.numba.layout import BLOCK
from fastattn.backends.numba.splitkv import run_merge, run_split_task
from fastattn.backends.numba.sweep import run_task

BLOCK_NBYTES = BLOCK.itemsize


@stage
def run_tasks(job, block, x, y):
    """Runs tasks until none is left. The result does not depend on which thread runs which task."""
    while True:
        task = fetch_next(job)
        if task >= job.n_tasks:
            return 0
        if job.merges:
            run_merge(job, block, task, 0)
        elif job.uses_split_kv:
            run_split_task(job, block, task, 0)
        else:
            run_task(job, block, task, 0)


@cached
@njit(parallel=True, nogil=True)
def _run_parallel(address: Any, job: Any, blocks: Any, num_threads: Any) -> None:
    """Runs `run_tasks`, whose address this is, on every thread."""
    for thread in prange(num_threads):
        call_stage(address, job, blocks + thread * BLOCK_NBYTES)


@cache
def _callable(address: int) -> Any:
    """The stage at an address, for Python."""
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)(address)


def run_on_threads(address: int, job: int, blocks: int, num_threads: int) -> None:
    """Runs every task of a call on num_threads threads.

    All addresses: `address` of the stage `run_tasks`, `job` of the record of the call, `blocks` of a record
    per thread.
    """
    if num_threads == 1:
        _callable(address)(job, blocks, 0, 0)
    else:
        _run_parallel(address, job, blocks, num_threads)
