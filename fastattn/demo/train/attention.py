"""Causal attention and its gradients, with fastattn and with the formula in plain NumPy.

Letters: ``B`` texts in a batch, ``L`` characters per text, ``H`` heads, ``D`` head_dim. Queries, keys,
values, outputs and the gradients of all of them are ``(B, L, H, D)``.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

import fastattn

Floats = np.ndarray  # of float32 or float64


class Attention(Protocol):
    """The attention of each layer of a model, forward and then backward."""

    def forward(self, layer: int, query: Floats, key: Floats, value: Floats) -> Floats:
        """The output of a layer; what its gradients need is kept until the next call."""

    def backward(self, layer: int, grad_out: Floats) -> tuple[Floats, Floats, Floats]:
        """The gradients of query, key and value, from that of the output."""

    @property
    def nbytes_kept(self) -> int:
        """Memory that is kept for the gradients beside queries, keys, values and outputs."""


class FastAttention:
    """With `fastattn.attention` and `fastattn.attention_backward`, which keep a number per query."""

    def __init__(self, num_layers: int) -> None:
        self._kept: list[tuple[Floats, ...]] = [()] * num_layers

    def forward(self, layer: int, query: Floats, key: Floats, value: Floats) -> Floats:
        out, lse = fastattn.attention(query, key, value, causal=True, return_lse=True, layout="bshd")
        self._kept[layer] = query, key, value, out, lse
        return out

    def backward(self, layer: int, grad_out: Floats) -> tuple[Floats, Floats, Floats]:
        gradients = fastattn.attention_backward(grad_out, *self._kept[layer], causal=True, layout="bshd")
        return gradients.query, gradients.key, gradients.value

    @property
    def nbytes_kept(self) -> int:
        return sum(lse.nbytes for *_, lse in self._kept)


class PlainAttention:
    """With the textbook formula and its derivative, which keep the ``(B, H, L, L)`` weights of each layer."""

    def __init__(self, num_layers: int) -> None:
        self._kept: list[tuple[Floats, ...]] = [()] * num_layers

    def forward(self, layer: int, query: Floats, key: Floats, value: Floats) -> Floats:
        query, key, value = (x.transpose(0, 2, 1, 3) for x in (query, key, value))
        length = query.shape[-2]
        weights = query @ key.swapaxes(-1, -2)
        weights *= 1 / math.sqrt(query.shape[-1])
        weights += np.triu(np.full((length, length), -np.inf, weights.dtype), 1)
        weights -= weights.max(axis=-1, keepdims=True)
        np.exp(weights, out=weights)
        weights /= weights.sum(axis=-1, keepdims=True)
        self._kept[layer] = query, key, value, weights
        return (weights @ value).transpose(0, 2, 1, 3)

    def backward(self, layer: int, grad_out: Floats) -> tuple[Floats, Floats, Floats]:
        query, key, value, weights = self._kept[layer]
        grad_out = grad_out.transpose(0, 2, 1, 3)
        grad_scores = grad_out @ value.swapaxes(-1, -2)
        grad_scores -= np.einsum("bhij,bhij->bhi", weights, grad_scores)[..., None]
        grad_scores *= weights
        grad_scores *= 1 / math.sqrt(query.shape[-1])
        gradients = (
            grad_scores @ key,
            grad_scores.swapaxes(-1, -2) @ query,
            weights.swapaxes(-1, -2) @ grad_out,
        )
        grad_query, grad_key, grad_value = (x.transpose(0, 2, 1, 3) for x in gradients)
        return grad_query, grad_key, grad_value

    @property
    def nbytes_kept(self) -> int:
        return sum(weights.nbytes for *_, weights in self._kept)
