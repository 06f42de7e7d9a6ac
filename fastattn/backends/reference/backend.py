"""The `Backend` of plain NumPy, which has all functions and takes all calls but those with a score_mod."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastattn.backends._base import Backend
from fastattn.backends.reference import attention, conv, linear, recurrent, reductions, rope

if TYPE_CHECKING:
    import numpy as np

    from fastattn._call.conv import ConvolutionCall
    from fastattn._call.gradients import Backward, Gradients
    from fastattn._call.linear import LinearCall, LinearState
    from fastattn._call.problem import Problem
    from fastattn._call.recurrent import RecurrentBackward, RecurrentCall, RecurrentGradients
    from fastattn._call.reductions import ReductionCall, SimilarityCall
    from fastattn._call.rope import Rotation


class ReferenceBackend(Backend):
    """One thread, some rows at a time, so that memory stays a few MB for any length."""

    name = "reference"

    def unavailable_reasons(self) -> list[str]:
        return []

    def unsupported_reasons(self, problem: Problem) -> list[str]:
        return [] if problem.score_mod is None else ["it runs no score_mod"]

    def thread_limit(self, num_threads: int) -> int:
        return 1

    def run(self, problem: Problem, num_threads: int) -> None:
        attention.attend(problem)

    def gradient_reasons(self) -> list[str]:
        return []

    def differentiate(self, backward: Backward, num_threads: int) -> Gradients:
        return attention.differentiate(backward)

    def function_reasons(self, name: str, call: Any) -> list[str]:
        return []

    def rope(self, rotation: Rotation, num_threads: int | None) -> None:
        rope.rotate(rotation)

    def linear_attention(self, call: LinearCall, num_threads: int | None) -> LinearState | None:
        return linear.attend(call)

    def gated_linear_attention(self, call: RecurrentCall, num_threads: int | None) -> np.ndarray | None:
        return recurrent.attend(call)

    def gated_linear_attention_backward(
        self, backward: RecurrentBackward, num_threads: int | None
    ) -> RecurrentGradients:
        return recurrent.differentiate(backward)

    def causal_conv1d(self, call: ConvolutionCall, num_threads: int | None) -> None:
        conv.convolve(call)

    def reduce_scores(self, call: ReductionCall, num_threads: int | None) -> None:
        reductions.reduce_scores(call)

    def max_similarity(self, call: SimilarityCall, num_threads: int | None) -> None:
        reductions.max_similarity(call)


backend = ReferenceBackend()
