"""The two ways the demo computes attention: with fastattn, and with the formula in plain NumPy.

Letters: ``B`` texts in a batch, ``L`` tokens per text after padding, ``H`` heads, ``D`` head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

import fastattn

Floats = np.ndarray  # of float32
Ints = np.ndarray  # of int64

#: ``(query, key, value, lengths) -> output``: four ``(B, L, H, D)`` arrays, and ``lengths`` of shape ``(B,)``
#: with the number of real tokens of each text.
Attend = Callable[[Floats, Floats, Floats, Ints], Floats]


def fast_attention(query: Floats, key: Floats, value: Floats, lengths: Ints) -> Floats:
    """Attention with `fastattn.attention`, which never reads the padding and stores no scores."""
    out: Floats = fastattn.attention(query, key, value, key_lengths=lengths, layout="bshd")
    return out


def plain_attention(query: Floats, key: Floats, value: Floats, lengths: Ints) -> Floats:
    """Attention with the textbook formula on the whole ``(B, H, L, L)`` array of scores."""
    query, key, value = (x.transpose(0, 2, 1, 3) for x in (query, key, value))
    scores = query @ key.swapaxes(-1, -2)
    scores *= 1 / math.sqrt(query.shape[-1])
    padding = np.arange(key.shape[-2]) >= lengths[:, None, None, None]
    np.copyto(scores, -np.inf, where=padding)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    out: Floats = scores @ value
    return out.transpose(0, 2, 1, 3)


class WeightRecorder:
    """`fast_attention` that also keeps the weights of every call, one call per layer of the model."""

    def __init__(self) -> None:
        self.weights: list[Floats] = []  #: each ``(B, H, L, L)``

    def __call__(self, query: Floats, key: Floats, value: Floats, lengths: Ints) -> Floats:
        out: Floats
        out, weights = fastattn.attention(
            query, key, value, key_lengths=lengths, layout="bshd", return_weights=True
        )
        self.weights.append(weights)
        return out
