"""Attention in plain NumPy: every feature, written to be read, and the last fallback.

One block of query rows at a time of one head, so that memory stays a few MB for any length. Each head's
arrays are copied to contiguous, aligned memory first: the bits of a result then depend on its own numbers
alone, not on strides or on the rest of the batch.
"""

from __future__ import annotations

import numpy as np

from fastattn._plan import Plan
from fastattn._problem import Problem

_BLOCK_BYTES = 2**21  # scores of one block; some four arrays of this size live at once


class ReferenceBackend:
    """The `Backend` of plain NumPy."""

    name = "reference"

    def unavailable_reasons(self) -> list[str]:
        return []

    def unsupported_reasons(self, problem: Problem) -> list[str]:
        return []

    def plan(self, problem: Problem, num_threads: int) -> Plan:
        row_bytes = max(1, problem.len_k) * problem.query.itemsize
        block_q = max(1, min(_BLOCK_BYTES // row_bytes, problem.len_q))
        return Plan(
            block_q=block_q,
            block_k=max(1, problem.len_k),
            score_chunk=problem.head_dim,
            num_threads=1,
        )

    def run(self, problem: Problem, plan: Plan) -> None:
        # inf - inf, 0 * inf and overflow are data here, not surprises.
        with np.errstate(all="ignore"):
            for item in np.ndindex(problem.lead):
                for kv_head in range(problem.num_kv_heads):
                    key = np.array(problem.key[item][kv_head], order="C")
                    value = np.array(problem.value[item][kv_head], order="C")
                    # Rows that would turn a weight of 0 into NaN are taken out, and added by hand.
                    wild = {int(j): value[j].copy() for j in np.flatnonzero(~np.isfinite(value).all(axis=-1))}
                    value[list(wild)] = 0
                    for head in range(kv_head * problem.group_size, (kv_head + 1) * problem.group_size):
                        for start in range(0, problem.len_q, plan.block_q):
                            rows = slice(start, min(start + plan.block_q, problem.len_q))
                            _attend(problem, item, head, rows, key, value, wild)


backend = ReferenceBackend()


def allowed_block(problem: Problem, item: tuple[int, ...], head: int, rows: slice, keys: slice) -> np.ndarray:
    """Bool: which of `keys` the query `rows` of one head may read, as far as the masks say."""
    allowed = np.ones((rows.stop - rows.start, keys.stop - keys.start), dtype=bool)
    if problem.key_start is not None and problem.key_stop is not None:
        j = np.arange(keys.start, keys.stop)
        allowed &= (problem.key_start[item][rows, None] <= j) & (j < problem.key_stop[item][rows, None])
    if problem.dense is not None:
        allowed &= problem.dense[item][head, rows, keys] != 0
    if problem.tiles is not None:
        allowed &= problem.tiles.rows((*item, head), rows.start, rows.stop, problem.len_k)[:, keys]
    return allowed


def _attend(
    problem: Problem,
    item: tuple[int, ...],
    head: int,
    rows: slice,
    key: np.ndarray,
    value: np.ndarray,
    wild: dict[int, np.ndarray],
) -> None:
    """softmax(scores) V for some query rows of one head; `wild` are the value rows missing in `value`."""
    dtype = key.dtype.type
    keys = _key_range(problem, item, rows)
    allowed = allowed_block(problem, item, head, rows, keys)
    query = np.array(problem.query[item][head, rows], order="C")

    scores = (query @ key[keys].T) * dtype(problem.scale)
    if problem.softcap is not None:
        cap = dtype(problem.softcap)
        scores = cap * np.tanh(scores / cap)
    if problem.bias is not None:
        bias = problem.bias[item][head, rows, keys].astype(dtype)
        allowed &= bias != -np.inf
        scores += bias
    scores[~allowed] = -np.inf

    sink = dtype(-np.inf) if problem.sinks is None else problem.sinks[head]
    row_max = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    row_max[row_max == -np.inf] = 0  # a row without keys: all its weights are exp(-inf) = 0
    weights = np.exp(scores - row_max)
    weights[~allowed] = 0
    row_sum = weights.sum(axis=-1, keepdims=True) + np.exp(sink - row_max)

    acc = weights @ value[keys]
    for j, row in wild.items():
        if keys.start <= j < keys.stop:
            readers = allowed[:, j - keys.start]
            acc[readers] += weights[readers, j - keys.start, None] * row

    divisor = np.where(row_sum == 0, 1, row_sum)
    problem.out[item][head, rows] = acc / divisor
    if problem.lse is not None:
        problem.lse[item][head, rows] = (row_max + np.log(row_sum))[:, 0]
    if problem.weights is not None:
        problem.weights[item][head, rows] = 0
        problem.weights[item][head, rows, keys] = np.where(allowed, weights / divisor, 0)  # 0 / NaN is NaN


def _key_range(problem: Problem, item: tuple[int, ...], rows: slice) -> slice:
    """The smallest range of keys that holds the intervals of all `rows`."""
    if problem.key_start is None or problem.key_stop is None:
        return slice(0, problem.len_k)
    start, stop = problem.key_start[item][rows], problem.key_stop[item][rows]
    read = start < stop
    return slice(start[read].min(), stop[read].max()) if read.any() else slice(0, 0)
