"""The Numba backend: the compiled backend's design in code that is compiled on first use, float32 and
float64."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

from fastattn._plan import Plan, plan_tiles
from fastattn._problem import Problem

_forked = False


def _in_child() -> None:
    # The threads of Numba's pool do not exist in a forked child.
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)

#: Numba's own thread pool, "workqueue", ends the process when two threads use it at once.
_workqueue = threading.Lock()


class NumbaBackend:
    """Tiles of keys by lanes of queries, on every core; see `fastattn.backends.numba`."""

    name = "numba"

    def unavailable_reasons(self) -> list[str]:
        return _missing()

    def unsupported_reasons(self, problem: Problem) -> list[str]:
        return []

    def plan(self, problem: Problem, num_threads: int) -> Plan:
        from fastattn.backends.numba.target import TARGET

        lanes = TARGET.vector_bytes // problem.query.itemsize
        return plan_tiles(
            problem.batch * problem.num_kv_heads,
            problem.len_q * problem.group_size,
            problem.len_k,
            problem.head_dim + problem.value_dim,
            lanes * TARGET.block_vectors,
            lanes,
            thread_limit(num_threads),
        )

    def run(self, problem: Problem, plan: Plan) -> None:
        if problem.batch == 0 or problem.num_heads == 0 or problem.len_q == 0:
            return
        from fastattn.backends.numba.job import Job

        job = Job(problem, plan)
        with _threads(job.num_threads) as num_threads:
            job.run(num_threads)


backend = NumbaBackend()


@cache
def _missing() -> list[str]:
    if find_spec("numba") is None:
        return ["numba is not installed: pip install 'fastattn[numba]'"]
    try:
        import fastattn.backends.numba.job  # noqa: F401
    except ImportError as error:
        return [f"numba does not load ({error})"]
    return []


def thread_limit(num_threads: int) -> int:
    """num_threads, less where this process may not have so many: one in a forked child."""
    import numba

    return 1 if _forked else min(num_threads, numba.config.NUMBA_NUM_THREADS)


@contextmanager
def _threads(wanted: int) -> Iterator[int]:
    """Has Numba use `wanted` threads, if this thread may use its pool now; how many there are."""
    if wanted == 1:
        yield 1
        return
    import numba

    before = numba.get_num_threads()
    numba.set_num_threads(wanted)
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
