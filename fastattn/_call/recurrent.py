"""A call of gated linear attention, one for its gradients, and what comes back."""

from __future__ import annotations

from typing import Generic, NamedTuple

import numpy as np

from fastattn._call.gradients import Gradient, in_one_block
from fastattn.masks.arguments import show_shapes

#: What gradients there are with respect to.
DIFFERENTIABLE = ("query", "key", "value", "decay", "beta", "state")


class RecurrentCall(NamedTuple):
    """The arrays of a call, as views, and its options."""

    query: np.ndarray  #: ``(*lead, H, L, D)``, in the dtype of the computation or in 16 bits
    key: np.ndarray  #: ``(*lead, K, L, D)``
    value: np.ndarray  #: ``(*lead, K, L, E)``
    decay: np.ndarray | None  #: ``(*lead, K, L, 1)``, or one of each column, ``(*lead, K, L, D)``
    beta: np.ndarray | None  #: ``(*lead, K, L, 1)``
    lengths: np.ndarray | None  #: int64 ``lead``: so many tokens are read; None: all
    earlier: np.ndarray | None  #: ``(*lead, K, D, E)``, the state before
    dtype: np.dtype  #: of the computation
    scale: float
    return_state: bool
    out: np.ndarray  #: ``(*lead, H, L, E)``; in a call for gradients the gradient with respect to it
    result: np.ndarray  #: the same in the layout of the call, as the caller gets it
    staged: np.ndarray | None = None  #: what is filled in the place of `result`, see `room_for_out`


class RecurrentBackward(NamedTuple):
    """One validated call for gradients."""

    call: RecurrentCall
    grad_state: np.ndarray | None  #: ``(*lead, K, D, E)``, of the dtype of the computation, C-contiguous
    wrt: frozenset[str]  #: some of `DIFFERENTIABLE`

    def zeros(self) -> RecurrentGradients:
        """Room for the gradients that are asked for."""
        given = self.call._asdict() | {"state": self.call.earlier}
        names = [name for name in DIFFERENTIABLE if name in self.wrt]
        room = in_one_block(np.zeros, self.call.dtype, [given[name].shape for name in names])
        return RecurrentGradients(**dict.fromkeys(DIFFERENTIABLE) | dict(zip(names, room, strict=True)))


class RecurrentGradients(NamedTuple, Generic[Gradient]):
    """Gradients with respect to the arguments of `gated_linear_attention`; None for what was not asked for.

    Each has its argument's shape and dtype, float64 for one of integers, and is C-contiguous. They may lie in
    one block of memory, which lives as long as one of them.
    """

    # What a backend returns is of a `RecurrentCall`: shapes with all leading axes, in its dtype.

    query: Gradient  # an array where `wrt` is its default
    key: Gradient
    value: Gradient
    decay: np.ndarray | None
    beta: np.ndarray | None
    state: np.ndarray | None

    def __repr__(self) -> str:
        return show_shapes(self)
