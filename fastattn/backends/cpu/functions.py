"""The caller's function on scores, as both CPU drivers run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastattn._problem import Problem
    from fastattn._schedule import Schedule


def loop_of(problem: Problem, schedule: Schedule) -> Any:
    """The loop over a tile that a score_mod compiles to, or None; raises where it cannot be compiled."""
    if problem.score_mod is None:
        return None
    from fastattn.backends.jit.functions import score_loop

    is_grouped = problem.group_size > 1
    return score_loop(problem.score_mod, problem.query.dtype, schedule.uses_split_kv, is_grouped)
