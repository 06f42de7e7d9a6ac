"""A call of gated linear attention."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


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
    out: np.ndarray  #: ``(*lead, H, L, E)``
    result: np.ndarray  #: the same memory in the layout of the call
