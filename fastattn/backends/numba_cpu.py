"""The Numba backend: the compiled backend's design in code that is compiled on first use, float32 and
float64."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from fastattn._plan import Plan, plan_tiles
from fastattn._problem import Problem


class NumbaBackend:
    """Tiles of keys by lanes of queries, on every core; see `fastattn.backends.numba`."""

    name = "numba"

    def unavailable_reasons(self) -> list[str]:
        return _missing()

    def unsupported_reasons(self, problem: Problem) -> list[str]:
        return []

    def plan(self, problem: Problem, num_threads: int) -> Plan:
        from fastattn.backends.numba.target import TARGET
        from fastattn.backends.numba.threads import thread_limit

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
        from fastattn.backends.numba.threads import pool

        job = Job(problem, plan)
        with pool(job.num_threads) as num_threads:
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
