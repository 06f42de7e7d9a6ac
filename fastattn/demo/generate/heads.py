"""What one head of the model reads in the prompt while it writes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import fastattn
from fastattn.demo.generate.attention import Floats, LibraryAttention

#: The queries of so many generated tokens are kept: more rows cannot be told apart on one page.
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

    def most_reading_head(self, len_prompt: int) -> Head | None:
        """Of all layers' heads the one whose weights have the highest peaks inside the prompt.

        Its ends do not count: much of the attention goes to the first token, and to those just written.
        """
        if not self._queries[-1]:
            return None
        best, best_score = None, -1.0
        inside = slice(len_prompt // 20 + 1, len_prompt - len_prompt // 20)
        for layer, (queries, cache) in enumerate(zip(self._queries, self.attention.caches, strict=True), 1):
            query = np.stack(queries, axis=1)  # (H, rows, D)
            keys = cache.keys(0)[:, : len_prompt + len(queries)].astype(np.float32, copy=False)
            _, weights = fastattn.attention(query, keys, keys, causal="bottom_right", return_weights=True)
            scores = weights[..., inside].max(axis=-1, initial=0).mean(axis=-1)
            number = int(scores.argmax())
            if scores[number] > best_score:
                best_score = float(scores[number])
                best = Head(layer, number + 1, weights[number, :, :len_prompt].copy())
        return best
