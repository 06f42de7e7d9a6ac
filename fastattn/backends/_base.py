"""What a backend is: a name, reasons why it cannot take a problem, and a way to run one."""

from __future__ import annotations

from typing import Protocol

from fastattn._problem import Problem
from fastattn._schedule import Schedule


class Backend(Protocol):
    """The interface that `_registry` selects by and `_api` calls.

    A backend module is imported only when it is asked for, and importing it must not fail for want
    of an optional dependency: what is missing is one of its reasons.
    """

    name: str

    def unavailable_reasons(self) -> list[str]:
        """Why this backend cannot run anything in this process; empty when it can."""
        ...

    def unsupported_reasons(self, problem: Problem) -> list[str]:
        """Why this backend cannot take `problem`; empty when it can."""
        ...

    def plan(self, problem: Problem, num_threads: int) -> Schedule:
        """Block sizes and threads for `problem`, given at most `num_threads` threads."""
        ...

    def run(self, problem: Problem, plan: Schedule) -> None:
        """Fill ``problem.out``, and ``problem.lse`` and ``problem.weights`` where present."""
        ...
