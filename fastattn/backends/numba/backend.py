"""The Numba backend, float32 and float64: the Cython backend's design, compiled on first use."""

from __future__ import annotations

from functools import cache

from fastattn._call.problem import Problem
from fastattn._machine.threads import no_fork
from fastattn.backends import _base
from fastattn.backends.jit.loading import reasons_no_compiler


class NumbaBackend(_base.Backend):
    """Tiles of keys by lanes of queries, on every core; see `fastattn.backends.numba`."""

    name = "numba"

    def unavailable_reasons(self) -> list[str]:
        return _missing()

    def unsupported_reasons(self, problem: Problem) -> list[str]:
        reasons = [] if problem.dropout is None else ["it drops no weights"]
        reasons += problem.summed_bias()
        stored = problem.stored()
        if stored:
            reasons.append(f"it reads no 16-bit numbers, and {', '.join(stored)}")
        return reasons

    def thread_limit(self, num_threads: int) -> int:
        from fastattn.backends.numba.threads import thread_limit

        return thread_limit(num_threads)

    def prepare(self, problem: Problem, num_threads: int) -> _base.Prepared:
        from fastattn.backends.numba.prepared import Prepared

        return Prepared(problem, num_threads)

    def run(self, problem: Problem, num_threads: int) -> None:
        self.prepare(problem, num_threads).run(problem.arrays(), problem.score_mod)


backend = NumbaBackend()


@cache
def _missing() -> list[str]:
    if reasons := reasons_no_compiler():
        return reasons
    with no_fork:
        try:
            from fastattn.backends.numba import prepared  # noqa: F401  (whether it loads)
            from fastattn.backends.numba.threads import reason_no_pool
        except ImportError as error:
            return [f"numba does not load ({error})"]
        reason = reason_no_pool()
    return [] if reason is None else [reason]
