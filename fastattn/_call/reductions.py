"""Calls of what scores are reduced to without values, `reduce_scores` and `max_similarity`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fastattn._call.problem import Problem


class ReductionCall(NamedTuple):
    """The largest scores of each query. The values of the problem have no columns, and `out` has none."""

    problem: Problem  #: whose ``weights`` are the k scores, ``(*lead, H, L, k)``, of its dtype, all -inf
    keys: np.ndarray  #: theirs, int64, of the same shape, C-contiguous, all -1


class SimilarityCall(NamedTuple):
    """Documents in one array of rows, and how many tokens are read of each.

    query and document are in the dtype of the computation, or stored in 16 bits or in int8.
    """

    query: np.ndarray  #: ``(Q, T, D)``, any strides
    query_lengths: np.ndarray  #: ``(Q,)`` int64: so many tokens are read
    document: np.ndarray  #: ``(N, S, D)``, or packed ``(total, D)``; any strides
    scale: np.ndarray | None  #: of a `Quantized` document: float32, ``ceil(D / 64)`` in the place of D
    starts: np.ndarray  #: ``(N,)`` int64: the number of the document, or the row where it begins
    lengths: np.ndarray  #: ``(N,)`` int64: so many tokens of it are read
    dtype: np.dtype  #: of the products, float32 or float64
    out: np.ndarray  #: ``(Q, N)``, float32 or float64, C-contiguous

    @property
    def work(self) -> int:
        """Multiply-adds."""
        return int(self.query_lengths.sum()) * int(self.lengths.sum()) * self.query.shape[-1]
