"""The Numba backend: the compiled backend's design in code that is compiled on first use, float32 and
float64."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from fastattn._problem import Problem
from fastattn._schedule import Schedule
from fastattn._threads import no_fork


class NumbaBackend:
    """Tiles of keys by lanes of queries, on every core; see `fastattn.backends.numba`."""

    name = "numba"

    def unavailable_reasons(self) -> list[str]:
        return _missing()

    def unsupported_reasons(self, problem: Problem) -> list[str]:
        return []

    def plan(self, problem: Problem, num_threads: int) -> Schedule:
        return _engine().plan(problem, num_threads)

    def run(self, problem: Problem, plan: Schedule) -> None:
        _engine().run(problem, plan)

    def plain_attention(self, query: Any, key: Any, value: Any, causal: Any, scale: Any) -> np.ndarray | None:
        """The short way for a call with no other option; None where it does not apply."""
        return _engine().plain_attention(query, key, value, causal, scale)


backend = NumbaBackend()


@cache
def _missing() -> list[str]:
    if find_spec("numba") is None:
        return ["numba is not installed: pip install 'fastattn[numba]'"]
    with no_fork:
        try:
            import numba
        except Exception as error:  # beside ImportError what another NumPy makes of its extension modules
            return [f"numba does not load ({type(error).__name__}: {error})"]
        if numba.config.DISABLE_JIT:
            return ["NUMBA_DISABLE_JIT is set, and then numba compiles nothing"]
        try:
            from fastattn.backends.numba.threads import reason_no_pool

            _engine()
        except ImportError as error:
            return [f"numba does not load ({error})"]
    reason = reason_no_pool()
    return [] if reason is None else [reason]


@cache
def _engine() -> Any:
    """The module that loads Numba."""
    import fastattn.backends.numba.engine as engine

    return engine
