"""How well a model predicts a text, with keys and values stored in different types."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fastattn.demo._decoding import Floats, LibraryAttention
from fastattn.demo.generate.clock import Clock
from fastattn.demo.generate.generation import CHUNK
from fastattn.demo.generate.model import Llama

#: The logits of so many tokens are held at a time: a vocabulary is large.
ROWS = 64


def log_likelihoods(model: Llama, ids: Sequence[int], attention: LibraryAttention, clock: Clock) -> Floats:
    """Natural logarithm of the probability of each token but the first, given those before it, in float64."""
    parts = []
    for start in range(0, len(ids) - 1, CHUNK):
        piece = ids[start : min(start + CHUNK, len(ids) - 1)]
        state = model(piece, attention, clock)
        for row in range(0, len(piece), ROWS):
            logits = model.logits(state[row : row + ROWS], clock)
            following = np.asarray(ids[start + row + 1 : start + row + 1 + len(logits)])
            parts.append(_log_softmax_at(logits, following))
    return np.concatenate(parts)


def perplexity(likelihoods: Sequence[Floats]) -> float:
    """exp of the mean negative log-likelihood: how many equally likely tokens would be as hard to predict."""
    return math.exp(-float(np.concatenate(likelihoods).mean()))


def _log_softmax_at(logits: Floats, chosen: Floats) -> Floats:
    """The log-probability of one token in each row of logits."""
    largest = logits.max(axis=-1)
    sums = np.exp(logits - largest[:, None]).sum(axis=-1, dtype=np.float64)
    of_chosen = logits[np.arange(len(logits)), chosen].astype(np.float64)
    log_probabilities: Floats = of_chosen - largest - np.log(sums)
    return log_probabilities
