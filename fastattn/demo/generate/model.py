"""LLaMA in NumPy: everything between token ids and the logits of the next token.

The model is a stack of equal layers over ``x``, one row per token::

    x = x + attention(rms_norm(x)) @ w_o
    x = x + (silu(y @ w_gate) * (y @ w_up)) @ w_down        where y = rms_norm(x)

and the logits are ``rms_norm(x) @ output``. The attention, with the keys and values of earlier tokens, is
passed in, so that the same model runs with `fastattn` and without it.

Letters: ``L`` tokens, ``N`` numbers per token, ``H`` query heads, ``K`` key/value heads, ``D`` head_dim.

References
----------
Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023).
Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

import fastattn
from fastattn.demo._decoding import Floats
from fastattn.demo._errors import DemoError
from fastattn.demo.generate.attention import Attention
from fastattn.demo.generate.clock import Clock

#: Tables are computed for so many positions at first.
FIRST_POSITIONS = 2048

#: Rows of the feed-forward part that are gated at a time: 100 kB of 1536 columns. Others were not measured.
GATED_ROWS = 16


class RMSNorm(NamedTuple):
    """Scale each row to a mean square of 1, then by the learned ``weight``."""

    weight: Floats
    eps: float

    def __call__(self, x: Floats) -> Floats:
        mean_square = np.einsum("ij,ij->i", x, x) / x.shape[-1]
        scaled: Floats = x / np.sqrt(mean_square + self.eps)[:, None]
        scaled *= self.weight
        return scaled


def gate(up: Floats, given: Floats) -> None:
    """``up *= silu(given)``, some rows at a time, which stay in the cache between the passes.

    ``silu(x) = x * sigmoid(x)``, with a tanh, which does not overflow.
    """
    for first in range(0, len(up), GATED_ROWS):
        x = given[first : first + GATED_ROWS]
        factor = np.tanh(x * 0.5)
        factor += 1
        factor *= x
        factor *= 0.5
        up[first : first + GATED_ROWS] *= factor


class RotaryTables:
    """Cosines and sines, ``(positions, rotary_dim // 2)``, of twice as many positions where more are needed.

    Those of all positions that a model says it can read might take more memory than the model.
    """

    def __init__(self, compute: Callable[[int], tuple[Floats, Floats]], limit: int) -> None:
        self._compute, self._limit = compute, limit
        self._tables = compute(min(FIRST_POSITIONS, limit))

    def up_to(self, length: int) -> tuple[Floats, Floats]:
        """Of the first `length` positions or more."""
        if length > len(self._tables[0]):
            self._tables = self._compute(min(2 * length, self._limit))
        return self._tables


@dataclass(frozen=True)
class Layer:
    """The weights of a layer; matrices are ``(outputs, inputs)``, those with the same input in one."""

    attention_norm: RMSNorm
    query_key_value: Floats  #: ``((H + 2 K) D, N)``
    attention_output: Floats  #: ``(N, H D)``
    feed_forward_norm: RMSNorm
    gate_up: Floats  #: twice the inner size, ``N``
    down: Floats


@dataclass(frozen=True)
class Llama:
    """A language model of the LLaMA architecture."""

    name: str
    context_length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    embedding: Floats  #: ``(vocabulary, N)``
    layers: tuple[Layer, ...]
    norm: RMSNorm
    output: Floats  #: ``(vocabulary, N)``, often the same array as the embedding
    rope: RotaryTables

    @property
    def num_parameters(self) -> int:
        matrices = [self.embedding, *([] if self.output is self.embedding else [self.output])]
        for layer in self.layers:
            matrices += [layer.query_key_value, layer.attention_output, layer.gate_up, layer.down]
        return sum(matrix.size for matrix in matrices)

    def __call__(self, ids: Sequence[int], attention: Attention, clock: Clock) -> Floats:
        """The last layer's state, ``(L, N)``, of `ids`, which follow those that `attention` has seen."""
        positions = np.arange(attention.length, attention.length + len(ids))
        clock.tokens += len(ids)
        clock.start()
        x = self.embedding[np.asarray(ids)]
        clock.lap("projections")
        for number, layer in enumerate(self.layers):
            y = layer.attention_norm(x)
            clock.lap("norms")
            query, key, value = self._heads(y @ layer.query_key_value.T)
            clock.lap("projections")
            query, key = self._rotated(query, positions), self._rotated(key, positions)
            clock.lap("rotary embedding")
            out = attention.step(number, query, key, value)
            clock.lap("attention")
            x += out.reshape(len(ids), -1) @ layer.attention_output.T
            clock.lap("projections")
            y = layer.feed_forward_norm(x)
            clock.lap("norms")
            given, up = np.split(y @ layer.gate_up.T, 2, axis=-1)
            gate(up, given)
            x += up @ layer.down.T
            clock.lap("feed-forward")
        self._check_finite(np.vdot(x, x))
        x = self.norm(x)
        clock.lap("norms")
        return x

    def logits(self, x: Floats, clock: Clock) -> Floats:
        """Of the token after each row of the last layer's state, ``(L, vocabulary)``."""
        clock.start()
        logits: Floats = x @ self.output.T
        self._check_finite(logits.min(), logits.max())
        clock.lap("logits")
        return logits

    def _check_finite(self, *numbers: float) -> None:
        """Weights that are finite may still be so large that what is computed is not."""
        if not all(map(math.isfinite, numbers)):
            raise DemoError(f"the weights of {self.name} are too large: what is computed overflows float32")

    def _heads(self, together: Floats) -> tuple[Floats, Floats, Floats]:
        """Query, key and value as views of their common product, ``(L, heads, D)`` each."""
        of_query = self.num_heads * self.head_dim
        of_key = self.num_kv_heads * self.head_dim
        query, key, value = np.split(together, [of_query, of_query + of_key], axis=-1)
        length = len(together)
        return (
            query.reshape(length, self.num_heads, self.head_dim),
            key.reshape(length, self.num_kv_heads, self.head_dim),
            value.reshape(length, self.num_kv_heads, self.value_dim),
        )

    def _rotated(self, x: Floats, positions: Floats) -> Floats:
        cos, sin = self.rope.up_to(int(positions[-1]) + 1)
        # GGUF stores LLaMA's matrices for pairs of neighbours.
        return fastattn.rope(x, cos, sin, positions=positions, interleaved=True, layout="bshd", out=x)
