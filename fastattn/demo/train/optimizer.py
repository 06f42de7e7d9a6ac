"""AdamW: how the weights follow the gradients.

References
----------
Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019).
Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks" (2013): clipping.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fastattn.demo.train.model import Tensors


@dataclass(frozen=True)
class Settings:
    """Of the optimizer; the learning rate rises to `peak` and falls along a cosine to `last`."""

    peak: float = 3e-3
    last: float = 1e-4
    warm_up: float = 0.05  #: share of the steps in which it rises
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8
    decay: float = 0.1  #: of matrices; vectors scale, and do not decay
    largest_norm: float = 1.0  #: of all gradients together; longer ones are made that long

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 0, of so many."""
        rising = max(1, round(self.warm_up * steps))
        if step < rising:
            return self.peak * (step + 1) / rising
        done = (step - rising + 1) / (steps - rising)
        return self.last + (self.peak - self.last) * (1 + math.cos(math.pi * done)) / 2


class AdamW:
    """The state of the optimizer of some weights, whose matrices lie before their vectors."""

    def __init__(self, weights: Tensors, settings: Settings) -> None:
        self._weights = weights
        self._settings = settings
        self._mean = np.zeros_like(weights.flat)
        self._square = np.zeros_like(weights.flat)
        self._num_steps = 0
        self._num_decaying = sum(weight.size for weight in weights.named.values() if weight.ndim > 1)

    def step(self, gradients: Tensors, rate: float) -> None:
        """Move the weights; `gradients` are overwritten."""
        it, grad = self._settings, gradients.flat
        self._num_steps += 1
        # As torch.nn.utils.clip_grad_norm_ does, to the last bit of its 1e-6.
        grad *= min(1.0, it.largest_norm / (math.sqrt(grad @ grad) + 1e-6))
        self._mean += (1 - it.beta1) * (grad - self._mean)
        self._square *= it.beta2
        grad *= grad
        grad *= 1 - it.beta2
        self._square += grad
        self._weights.flat[: self._num_decaying] *= 1 - rate * it.decay
        np.sqrt(self._square, out=grad)
        grad /= math.sqrt(1 - it.beta2**self._num_steps)
        grad += it.eps
        np.divide(self._mean, grad, out=grad)
        grad *= rate / (1 - it.beta1**self._num_steps)
        self._weights.flat -= grad
