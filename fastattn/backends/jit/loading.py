"""What drivers ask before Numba is loaded: whether it can compile here, and for the loop of a score_mod."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fastattn._machine.threads import no_fork

if TYPE_CHECKING:
    from fastattn._call.gradients import Backward
    from fastattn._call.problem import Problem
    from fastattn._call.schedule import Schedule


@cache
def reasons_no_compiler() -> list[str]:
    """Why Numba cannot compile a function here; empty where it can."""
    if find_spec("numba") is None:
        return ["numba is not installed: pip install 'fastattn[numba]'"]
    with no_fork:
        try:
            import numba
        except Exception as error:  # not ImportError alone: its extension modules may fail with another NumPy
            return [f"numba does not load ({type(error).__name__}: {error})"]
    return ["NUMBA_DISABLE_JIT is set, and then numba compiles nothing"] if numba.config.DISABLE_JIT else []


def loop_of(problem: Problem, lanes: int) -> Any:
    """The loop over a tile that a score_mod compiles to, or None; raises where it cannot be compiled.

    lanes: of a vector; 0: tiles of split-KV.
    """
    if problem.score_mod is None:
        return None
    from fastattn.backends.jit.functions import score_loop

    return score_loop(problem.score_mod, problem.dtype, problem.group_size > 1, lanes)


def gradient_loops_of(backward: Backward, schedule: Schedule, lanes: int) -> Any:
    """The loops of a call for gradients, or None without a score_mod; raises as `loop_of` does."""
    if backward.problem.score_mod is None:
        return None
    from fastattn.backends.jit.functions import GradientLoops

    return GradientLoops(backward, schedule.n_tasks, lanes)
