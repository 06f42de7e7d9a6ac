"""What one head of the model reads in the prompt while it writes: the one that copies most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import fastattn
from fastattn.demo._decoding import Floats, LibraryAttention

#: How many generated tokens' queries are kept: more rows cannot be told apart on one page.
MAX_ROWS = 40


@dataclass(frozen=True)
class Head:
    """The attention of one head, a row for each token that it helped to write, from the second on."""

    layer: int  #: counted from 1
    number: int  #: counted from 1
    weights: Floats  #: ``(rows, len_prompt)``; the rest of a row's 1 goes to generated tokens


class QueryRecorder:
    """`LibraryAttention` that also keeps the queries of single tokens: those that are generated."""

    def __init__(self, attention: LibraryAttention) -> None:
        self.attention = attention
        self._queries: list[list[Floats]] = [[] for _ in attention.caches]

    @property
    def length(self) -> int:
        return self.attention.length

    def step(self, layer: int, query: Floats, key: Floats, value: Floats) -> Floats:
        queries = self._queries[layer]
        if len(query) == 1 and len(queries) < MAX_ROWS:
            queries.append(query[0].copy())
        return self.attention.step(layer, query, key, value)

    def copying_head(self, prompt: Sequence[int], tokens: Sequence[int]) -> Head | None:
        """The head, of all layers, that most reads the token written next, beyond what it reads anyway.

        Such a head looks for earlier places of the last token and reads what came after it (Olsson et al.,
        "In-context Learning and Induction Heads", 2022). None where only one of `tokens` was generated.
        """
        if not self._queries[-1]:
            return None
        best, best_score = None, -np.inf
        rows = len(self._queries[-1])
        copied = (np.asarray(prompt) == np.asarray(tokens)[1 : 1 + rows, None]).astype(np.float32)
        copied -= copied.mean(axis=0)  # a head that reads the same places in every row gets 0
        for layer, (queries, cache) in enumerate(zip(self._queries, self.attention.caches, strict=True), 1):
            query = np.stack(queries, axis=1)  # (H, rows, D)
            keys = cache.keys(0)[:, : len(prompt) + rows].astype(np.float32, copy=False)
            _, weights = fastattn.attention(query, keys, keys, causal="bottom_right", return_weights=True)
            weights = weights[..., : len(prompt)]
            scores = (weights * copied).sum(axis=(-2, -1))
            number = int(scores.argmax())
            if scores[number] > best_score:
                best_score = float(scores[number])
                best = Head(layer, number + 1, weights[number].copy())
        return best
