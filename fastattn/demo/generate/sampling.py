"""Which token comes next."""

from __future__ import annotations

import numpy as np

from fastattn.demo.generate.attention import Floats


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
