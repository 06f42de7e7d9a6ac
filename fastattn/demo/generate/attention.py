"""Attention with what came before: what the model calls, and the formula in plain NumPy.

The other way, with fastattn's cache, is `fastattn.demo._decoding.LibraryAttention`.

Letters: ``L`` new tokens, ``S`` tokens in the cache with the new ones, ``H`` query heads, ``K`` key/value
heads, ``D`` head_dim.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from fastattn.demo._decoding import Floats


class Attention(Protocol):
    """Causal attention of every layer of a model, each with the keys and values of all tokens so far."""

    @property
    def length(self) -> int:
        """How many tokens every layer has seen."""

    def step(self, layer: int, query: Floats, key: Floats, value: Floats) -> Floats:
        """Add ``L`` tokens to a layer, ``(L, K, D)`` each; the attention of their queries, ``(L, H, D)``."""


class PlainAttention:
    """What one writes without a library: concatenate, repeat, multiply, mask, softmax, multiply."""

    def __init__(self, num_layers: int) -> None:
        self.keys: list[Floats | None] = [None] * num_layers
        self.values: list[Floats | None] = [None] * num_layers

    @property
    def length(self) -> int:
        last = self.keys[-1]
        return 0 if last is None else last.shape[1]

    def step(self, layer: int, query: Floats, key: Floats, value: Floats) -> Floats:
        query, key, value = (x.transpose(1, 0, 2) for x in (query, key, value))
        key = self.keys[layer] = _extended(self.keys[layer], key)
        value = self.values[layer] = _extended(self.values[layer], value)
        group_size = len(query) // len(key)
        key, value = np.repeat(key, group_size, axis=0), np.repeat(value, group_size, axis=0)

        scores = query @ key.swapaxes(-1, -2)
        scores *= 1 / math.sqrt(query.shape[-1])
        len_q, len_k = scores.shape[-2:]
        if len_q > 1:
            scores += np.triu(np.full((len_q, len_k), -np.inf, np.float32), len_k - len_q + 1)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        out: Floats = scores @ value
        return out.transpose(1, 0, 2)


def _extended(before: Floats | None, new: Floats) -> Floats:
    return new if before is None else np.concatenate([before, new], axis=1)
