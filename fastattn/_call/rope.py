"""A call of `rope`, after its arguments were checked."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Rotation(NamedTuple):
    """What to rotate, by which rows of the tables, and where to."""

    out: np.ndarray  #: ``(*lead, H, L, D)``, rows contiguous; the memory of `x`, or apart from it
    x: np.ndarray  #: of the same shape and dtype, rows contiguous
    cos: np.ndarray  #: ``(n, r / 2)``, contiguous, of the dtype of the computation
    sin: np.ndarray
    positions: np.ndarray  #: int64, contiguous, rows of the tables; broadcasts to ``(*lead, L)``
    interleaved: bool
    inverse: bool
