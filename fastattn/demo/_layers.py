"""What encoders are made of beside attention: linear layers, layer norms and GELU, on rows of float32."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

Floats = np.ndarray  # of float32


class Linear(NamedTuple):
    """``x @ weight.T + bias``, with ``weight`` of shape ``(outputs, inputs)`` as PyTorch stores it."""

    weight: Floats
    bias: Floats

    def __call__(self, x: Floats) -> Floats:
        out: Floats = x @ self.weight.T
        out += self.bias
        return out


class LayerNorm(NamedTuple):
    """Shift and scale each row to mean 0 and variance 1, then by the learned ``weight`` and ``bias``."""

    weight: Floats
    bias: Floats
    eps: float

    def __call__(self, x: Floats) -> Floats:
        x = x - x.mean(axis=-1, keepdims=True)
        variance = np.einsum("ij,ij->i", x, x) / x.shape[-1]
        x /= np.sqrt(variance + self.eps)[:, None]
        x *= self.weight
        x += self.bias
        return x


#: GELU takes so many rows at a time: what lies between its steps then stays in the cache.
GELU_ROWS = 32


def gelu(x: Floats) -> Floats:
    """``x * Phi(x)`` with the normal distribution function ``Phi``; absolute error below 1e-6.

    NumPy has no erf. This is ``max(x, 0) - |x| / 2 * erfc(|x| / sqrt(2))`` with formula 7.1.26 of
    Abramowitz and Stegun, "Handbook of Mathematical Functions", for erfc: a polynomial in ``t`` times
    ``exp(-x**2 / 2)``, accurate to 1.5e-7.
    """
    result = np.empty_like(x)
    for start in range(0, len(x), GELU_ROWS):
        rows = slice(start, start + GELU_ROWS)
        _gelu_into(x[rows], result[rows])
    return result


def _gelu_into(x: Floats, result: Floats) -> None:
    magnitude = np.abs(x)
    t = magnitude * (0.3275911 / math.sqrt(2))
    t += 1
    np.reciprocal(t, out=t)
    tail = t * 1.061405429
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        tail += coefficient
        tail *= t
    np.multiply(x, x, out=t)
    t *= -0.5
    tail *= np.exp(t, out=t)
    tail *= magnitude
    tail *= 0.5
    np.maximum(x, 0, out=result)
    result -= tail


def gelu_tanh(x: Floats) -> Floats:
    """The approximation of `gelu` through tanh, which some models were trained with."""
    out: Floats = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))
    out += 1
    out *= 0.5 * x
    return out
