"""What a backend is: a name, reasons why it cannot take a problem, and a way to run one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from fastattn._call.problem import Mod, Problem

if TYPE_CHECKING:
    import numpy as np

    from fastattn._call.gradients import Backward, Gradients
    from fastattn._call.problem import Arrays


class Prepared(Protocol):
    """A problem but for its arrays: any of the same dtypes, shapes and strides will do."""

    is_small: bool  #: one thread does it, however many there may be

    def run(self, arrays: tuple[Any, ...], score_mod: Mod | None = None) -> None:
        """Fill ``out``, and ``lse`` and ``weights`` where present, among the arrays of a problem.

        score_mod: of the same key as the problem's; what it reads may differ.
        """
        ...


class PreparedGradients(Protocol):
    """The gradients of a problem but for its arrays: any of the same dtypes, shapes and strides will do."""

    is_small: bool  #: one thread does it, however many there may be

    def run(self, arrays: Arrays, out: np.ndarray, lse: np.ndarray, grad_lse: np.ndarray | None) -> Gradients:
        """Those of query, key and value; `arrays` are of the problem, with the gradient of the outputs as
        `out`."""
        ...

    def run_on(self, backward: Backward) -> Gradients:
        """All that the call asks for."""
        ...


class Backend(Protocol):
    """The interface that `registry` selects by and the public functions call; every backend inherits it.

    A backend module is imported only when it is asked for, and importing it must not fail for want
    of an optional dependency: what is missing is one of its reasons.
    """

    name: str

    def unavailable_reasons(self) -> list[str]:
        """Why this backend cannot run anything in this process; empty when it can."""
        ...

    def unsupported_reasons(self, problem: Problem[Any]) -> list[str]:
        """Why this backend cannot take `problem`; empty when it can."""
        ...

    def thread_limit(self, num_threads: int) -> int:
        """How many of `num_threads` threads this process may use here."""
        ...

    def prepare(self, problem: Problem[Any], num_threads: int) -> Prepared | None:
        """What the problem's signature decides, for `num_threads` threads, to be kept for its next call; None
        where nothing is worth keeping."""
        return None

    def run(self, problem: Problem[Any], num_threads: int) -> None:
        """Fill ``problem.out``, and ``problem.lse`` and ``problem.weights`` where present."""
        ...

    def gradient_reasons(self) -> list[str]:
        """Why this backend cannot compute gradients; empty when it can."""
        return ["it computes no gradients"]

    def prepare_gradients(self, backward: Backward, num_threads: int) -> PreparedGradients | None:
        """What the signature of a call for gradients decides, as `prepare` does."""
        return None

    def differentiate(self, backward: Backward, num_threads: int) -> Gradients:
        """The gradients that are asked for, on a backend without `gradient_reasons`."""
        reason = f"backend {self.name!r}: {'; '.join(self.gradient_reasons())}"
        raise NotImplementedError(reason)

    def function_reasons(self, name: str, call: Any) -> list[str]:
        """Why this backend cannot run `call` of a function beside attention; empty when it can.

        The functions are methods of a call and of its `num_threads`, which may be None: `rope` fills
        ``call.out``, `linear_attention` fills ``call.out`` and ``call.lost`` and returns the `LinearState`,
        if that is asked for; `gated_linear_attention` fills ``call.out`` and returns the state likewise, and
        `gated_linear_attention_backward` returns `RecurrentGradients`; `causal_conv1d` and `max_similarity`
        fill ``call.out``, `reduce_scores` the scores and their keys.
        """
        return [f"it has no {name}"]
