"""What a model needs to write: attention with the keys and values of earlier tokens, and the next token."""

from __future__ import annotations

import numpy as np

import fastattn

Floats = np.ndarray  # of float32


class LibraryAttention:
    """Causal attention of every layer with `fastattn.KVCache`, one per layer, of a storage type.

    Letters: ``L`` new tokens, ``H`` query heads, ``K`` key/value heads, ``D`` head_dim.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, value_dim: int, dtype: str) -> None:
        self.caches = [
            fastattn.KVCache(1, num_kv_heads, head_dim, value_dim, dtype=dtype, layout="bshd")
            for _ in range(num_layers)
        ]

    @property
    def length(self) -> int:
        """How many tokens every layer has seen."""
        return int(self.caches[-1].lengths[0])

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def step(self, layer: int, query: Floats, key: Floats, value: Floats) -> Floats:
        """Add ``L`` tokens to a layer, ``(L, K, D)`` each; the attention of their queries, ``(L, H, D)``."""
        out: Floats = self.caches[layer].step(query[None], key[None], value[None])[0]
        return out

    def truncate(self, length: int) -> None:
        """Forget all tokens but the first `length`."""
        for cache in self.caches:
            cache.truncate(length)


class Sampler:
    """The likeliest token, or a random one of the likeliest: the same ones for the same logits and seed.

    Parameters
    ----------
    temperature : float
        0 takes the likeliest token. Otherwise logits are divided by it before they become probabilities.
    top_p : float, in (0, 1]
        Draw among the fewest likeliest tokens whose probabilities add up to at least so much.
    seed : int

    References
    ----------
    Holtzman et al., "The Curious Case of Neural Text Degeneration" (2020): nucleus sampling.
    """

    def __init__(self, temperature: float, top_p: float, seed: int) -> None:
        self.temperature = temperature
        self.top_p = top_p
        self._rng = np.random.default_rng(seed)

    def __call__(self, logits: Floats) -> int:
        """A token's id, from logits of shape ``(vocabulary,)``; one random number a call."""
        if self.temperature == 0:
            return int(np.argmax(logits))
        order = np.argsort(-logits, kind="stable")
        scaled = logits[order].astype(np.float64) / self.temperature
        weights = np.exp(scaled - scaled[0])
        cumulative = np.cumsum(weights)
        kept = 1 + int(np.searchsorted(cumulative, self.top_p * cumulative[-1]))
        drawn = self._rng.random() * cumulative[:kept][-1]
        return int(order[:kept][np.searchsorted(cumulative[:kept], drawn, side="right")])
