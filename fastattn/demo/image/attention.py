"""The two ways the demo computes attention: with fastattn, and with the formula in plain NumPy.

Letters: ``L`` tokens, ``H`` heads, ``D`` head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

import fastattn

Floats = np.ndarray  # of float32

#: ``(query, key, value) -> output``: four ``(L, H, D)`` arrays; every token attends to all of them.
Attend = Callable[[Floats, Floats, Floats], Floats]


def fast_attention(query: Floats, key: Floats, value: Floats) -> Floats:
    """Attention with `fastattn.attention`, which stores no scores."""
    out: Floats = fastattn.attention(query, key, value, layout="bshd")
    return out


def plain_attention(query: Floats, key: Floats, value: Floats) -> Floats:
    """Attention with the textbook formula on the whole ``(H, L, L)`` array of scores."""
    query, key, value = (x.transpose(1, 0, 2) for x in (query, key, value))
    scores = query @ key.swapaxes(-1, -2)
    scores *= 1 / math.sqrt(query.shape[-1])
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    out: Floats = scores @ value
    return out.transpose(1, 0, 2)


class ClassRecorder:
    """`fast_attention` that also keeps the weights of the class token, the first, in the latest call."""

    def __init__(self) -> None:
        self.weights: Floats = np.empty((0, 0), np.float32)  #: ``(H, L)``; a head's weights add up to 1

    def __call__(self, query: Floats, key: Floats, value: Floats) -> Floats:
        _, weights = fastattn.attention(query[:1], key, value, layout="bshd", return_weights=True)
        self.weights = weights[:, 0]
        return fast_attention(query, key, value)
