"""What a case asks of a library: outputs of attention, gradients, reductions, or gated linear attention.

Only this module and a case's own FLOPs, bytes and inputs tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from fastattn.bench import oracle
from fastattn.bench.case import Case, Inputs
from fastattn.bench.peers import Peer
from fastattn.bench.peers._base import Way


@dataclass(frozen=True, slots=True)
class Task:
    """How it is done, and what is right."""

    ways: Callable[[Peer], Mapping[str, Way]]
    answer: Callable[[Case, Inputs], np.ndarray]
    #: of a result, against the answer: the largest error, and the root-mean-square one
    errors: Callable[[Case, np.ndarray, np.ndarray], tuple[float, float]]
    tolerance: Callable[[Case, Inputs, np.ndarray], float]  #: the largest error that counts as right


_FORWARD = Task(lambda peer: peer.ways, oracle.expected_output, oracle.output_errors, oracle.tolerance)
_BACKWARD = Task(
    lambda peer: peer.backward_ways,
    oracle.expected_gradients,
    oracle.gradient_errors,
    oracle.relative_tolerance,
)
_RECURRENT = Task(
    lambda peer: peer.recurrent_ways,
    oracle.expected_recurrence,
    oracle.recurrence_errors,
    oracle.relative_tolerance,
)
_REDUCTION = Task(
    lambda peer: peer.reduction_ways,
    oracle.expected_reduction,
    oracle.reduction_errors,
    oracle.relative_tolerance,
)


def task_of(case: Case) -> Task:
    """What `case` asks."""
    if case.reduction is not None:
        return _REDUCTION
    return _BACKWARD if case.backward else _FORWARD if case.rule is None else _RECURRENT
