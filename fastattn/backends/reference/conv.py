"""The causal convolution in NumPy."""

from __future__ import annotations

import numpy as np

from fastattn._call.conv import ConvolutionCall


def convolve(call: ConvolutionCall) -> None:
    """Fills ``call.out``."""
    length, dtype = call.x.shape[-1], call.weight.dtype
    with np.errstate(all="ignore"):
        padded = np.concatenate((call.earlier, call.x), axis=-1).astype(dtype)
        bias = np.full(1, -0.0, dtype) if call.bias is None else call.bias
        total = np.broadcast_to(bias[:, None], call.x.shape)
        for j in range(call.weight.shape[1]):
            total = total + call.weight[:, j, None] * padded[..., j : j + length]
        if call.silu:  # its limit at -inf is -0
            total = np.maximum(total, -np.finfo(dtype).max) / (1 + np.exp(-total))
        call.out[...] = total
