"""Keeps the threads of a parallel region on different cores, as far as there are enough.

The same as ``backends/cython/spread.h``, which says why. Here a region's caller may be any of its threads, or
none where only the pool's own threads work.
"""

from __future__ import annotations

import sys

import numpy as np
from numba import types

from fastattn._machine import host
from fastattn.backends.numba.codegen.calls import routine
from fastattn.backends.numba.codegen.intrinsics import fetch_add, int32s, int64s, uint8s

IS_LINUX = sys.platform.startswith("linux")  #: elsewhere these functions do not exist, and no thread moves

CPU_SET_NBYTES = 128  #: of a cpu_set_t, for 1024 CPUs
CORES = np.array(host.cores_of_cpus()[: 8 * CPU_SET_NBYTES] if IS_LINUX else [], np.int32)

#: Words of a region's record: the thread that moved, the caller; then how often each core and CPU was
#: claimed.
MOVED, CALLER, CLAIMED = range(3)
SPREAD_WORDS = CLAIMED + 2 * len(CORES)

_pthread_self = types.ExternalFunction("pthread_self", types.intp())
_sched_getcpu = types.ExternalFunction("sched_getcpu", types.int32())
_affinity = types.int32(types.intp, types.intp, types.intp)
_getaffinity = types.ExternalFunction("pthread_getaffinity_np", _affinity)
_setaffinity = types.ExternalFunction("pthread_setaffinity_np", _affinity)


@routine
def claim_free(job, w, cpu):
    """Claims an allowed CPU for the thread that runs on `cpu`: one of a free core, or else its own, or else
    any free one; -1 where there are more threads than CPUs."""
    cores, allowed = int32s(job.cores), uint8s(w + job.to_allowed)
    claimed = job.spread + 8 * CLAIMED
    for step in range(1, job.n_cpus):
        other = (cpu + step) % job.n_cpus
        if allowed[other // 8] >> other % 8 & 1 and fetch_add(claimed + 8 * cores[other], 1) == 0:
            fetch_add(claimed + 8 * (job.n_cpus + other), 1)
            return other
    for step in range(job.n_cpus):
        other = (cpu + step) % job.n_cpus
        if allowed[other // 8] >> other % 8 & 1 and fetch_add(claimed + 8 * (job.n_cpus + other), 1) == 0:
            return other
    return -1


@routine
def move(job, w, thread, cpu):
    """Moves a thread to the CPU, if the set of allowed CPUs in scratch memory has it, then restores its
    affinity to that set; whether it moved."""
    allowed, chosen = uint8s(w + job.to_allowed), uint8s(w + job.to_chosen)
    if not allowed[cpu // 8] >> cpu % 8 & 1:
        return 0
    for at in range(CPU_SET_NBYTES):
        chosen[at] = 0
    chosen[cpu // 8] = 1 << cpu % 8
    if _setaffinity(thread, CPU_SET_NBYTES, w + job.to_chosen) != 0:
        return 0
    _setaffinity(thread, CPU_SET_NBYTES, w + job.to_allowed)
    return 1


@routine
def spread_start(job):
    """To be called before the region, by the thread that starts it, if it takes part in the work."""
    cpu = _sched_getcpu()
    int64s(job.spread)[CALLER] = _pthread_self()
    if cpu >= 0 and cpu < job.n_cpus:
        claimed = job.spread + 8 * CLAIMED
        fetch_add(claimed + 8 * int32s(job.cores)[cpu], 1)
        fetch_add(claimed + 8 * (job.n_cpus + cpu), 1)
    return 0


@routine
def spread_enter(job, w):
    """To be called by every thread of the region before its work: moves a worker to another core if its own
    is claimed."""
    cpu, thread, claimed = _sched_getcpu(), _pthread_self(), job.spread + 8 * CLAIMED
    if thread == int64s(job.spread)[CALLER] or cpu < 0 or cpu >= job.n_cpus:
        return 0
    if fetch_add(claimed + 8 * int32s(job.cores)[cpu], 1) == 0:
        fetch_add(claimed + 8 * (job.n_cpus + cpu), 1)
        return 0
    if _getaffinity(thread, CPU_SET_NBYTES, w + job.to_allowed) != 0:
        return 0
    other = claim_free(job, w, cpu)
    if other >= 0 and other != cpu and move(job, w, thread, other) != 0:
        int64s(job.spread)[MOVED] = thread
    return 0


@routine
def spread_leave(job, w):
    """To be called by every thread of the region after its work: moves a worker that has moved before, and
    still runs, to the caller's core."""
    spread = int64s(job.spread)
    worker = spread[MOVED]
    if worker == 0:
        return 0
    if _pthread_self() == worker:
        spread[MOVED] = 0
    elif _pthread_self() == spread[CALLER]:
        cpu = _sched_getcpu()
        if 0 <= cpu < job.n_cpus and _getaffinity(worker, CPU_SET_NBYTES, w + job.to_allowed) == 0:
            move(job, w, worker, cpu)
    return 0
