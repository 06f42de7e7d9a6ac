"""A call of the causal convolution."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class ConvolutionCall(NamedTuple):
    """The arrays of a call, as views, and its options.

    x, earlier and out have one dtype, native, and leading axes. Their memory is contiguous along channels, or
    else along time.
    """

    x: np.ndarray  #: ``(*lead, C, L)``
    weight: np.ndarray  #: ``(C, W)``, in the dtype of the computation
    bias: np.ndarray | None  #: ``(C,)``, likewise
    earlier: np.ndarray  #: ``(*lead, C, W - 1)``: the inputs before x
    along_channels: bool
    silu: bool
    out: np.ndarray  #: ``(*lead, C, L)``
