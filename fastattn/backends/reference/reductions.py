"""Reductions of scores in NumPy."""

from __future__ import annotations

import numpy as np

from fastattn._call.reductions import ReductionCall, SimilarityCall
from fastattn._call.storage import decode_rows
from fastattn.backends.reference.attention import score_blocks


def reduce_scores(call: ReductionCall) -> None:
    """Fills the weights of the problem with the largest scores of each row, and `keys` with their keys."""
    values = call.problem.weights
    if values is None:
        return
    k = values.shape[-1]
    with np.errstate(all="ignore"):
        for place, first_key, scores in score_blocks(call.problem):
            for r, row in enumerate(scores):
                # NaN before all numbers, which fall; equal ones keep their order.
                order = np.lexsort((-row, ~np.isnan(row)))[:k]
                largest = row[order]
                values[place][r, : len(order)] = largest
                call.keys[place][r, : len(order)] = np.where(largest == -np.inf, -1, order + first_key)


def max_similarity(call: SimilarityCall) -> None:
    """Fills ``call.out``, a pair of query and document at a time."""
    dtype = call.dtype
    with np.errstate(all="ignore"):
        for n, (start, length) in enumerate(zip(call.starts, call.lengths, strict=True)):
            if length == 0:
                call.out[:, n] = -np.inf
                continue
            where = np.s_[start : start + length] if call.document.ndim == 2 else np.s_[start, :length]
            rows = call.document[where]
            if call.scale is not None:
                rows = decode_rows(rows, call.scale[where])
            tokens = np.array(rows, dtype, order="C")
            for q, query_length in enumerate(call.query_lengths):
                query = np.array(call.query[q, :query_length], dtype, order="C")
                call.out[q, n] = (query @ tokens.T).max(axis=-1).sum(dtype=np.float64)
