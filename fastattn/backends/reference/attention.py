"""Attention in plain NumPy: every feature, written to be read, and the last fallback.

One block of query rows at a time of one head, so that memory stays a few MB for any length. What goes into
a matrix product is contiguous and aligned, copied where it is not: the bits of a result then depend on its
own numbers alone, not on strides or on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from fastattn._call.gradients import LARGE_NORMS, LARGE_SCORE, Backward, Gradients, score_roundings
from fastattn._call.problem import Problem
from fastattn._call.storage import HeadRows, Rows
from fastattn._machine.constants import SCORE_COLUMNS
from fastattn.biases import Sums, block_of
from fastattn.masks.map import UNBOUNDED

_BLOCK_BYTES = 2**20  # scores of one block of rows; some four arrays of this size live at once
_CHUNK_BYTES = 2**19  # keys or values that are copied at once
_SMALL = 2.0**-64  # by which norms are multiplied: no such product overflows


def attend(problem: Problem) -> None:
    """Fills ``problem.out``, and ``problem.lse`` and ``problem.weights`` where present."""
    # inf - inf, 0 * inf and overflow are data here, not surprises.
    with np.errstate(all="ignore"):
        for block in _query_blocks(problem):
            _attend(block)


def differentiate(backward: Backward) -> Gradients:
    """The gradients that are asked for."""
    gradients = backward.zeros()
    with np.errstate(all="ignore"):
        for block in _query_blocks(backward.problem):
            _differentiate(backward, gradients, block)
    return gradients


class _QueryBlock(NamedTuple):
    """Some query rows of one head, and the smallest range of keys that holds the intervals of all of them."""

    problem: Problem  #: with intervals in the place of its band
    window_start: np.ndarray | None  #: ``(*lead, L)``, of a window beside which the first keys stay visible
    keep_first: int  #: how many these are
    item: tuple[int, ...]
    head: int
    kv_head: int
    rows: slice
    keys: slice
    source: _Source


def _query_blocks(problem: Problem) -> Iterator[_QueryBlock]:
    """Every query block of a problem. Heads of a group follow each other, and share a source."""
    band, window_start, keep_first = problem.band, None, 0
    if band is not None and band.keep_first:  # which intervals cannot say
        window_start, keep_first = band.intervals(problem.len_q, problem.len_k).start, band.keep_first
        window_start = np.broadcast_to(window_start, (*problem.lead, problem.len_q))
        problem = problem._replace(band=band._replace(left=UNBOUNDED))
    start, stop = problem.intervals()
    problem = problem._replace(band=None, key_start=start, key_stop=stop)
    row_bytes = max(1, problem.len_k) * problem.dtype.itemsize
    block_q = max(1, min(_BLOCK_BYTES // row_bytes, problem.len_q))
    for item in np.ndindex(problem.lead):
        span = _key_range(problem, item, slice(0, problem.len_q))
        for kv_head in range(problem.num_kv_heads):
            key, value = (
                HeadRows(array, item, kv_head) if isinstance(array, Rows) else array[item][kv_head]
                for array in (problem.key, problem.value)
            )
            source = _Source(key, value, problem.dtype, span)
            for head in range(kv_head * problem.group_size, (kv_head + 1) * problem.group_size):
                for first in range(0, problem.len_q, block_q):
                    rows = slice(first, min(first + block_q, problem.len_q))
                    keys = _key_range(problem, item, rows)
                    yield _QueryBlock(
                        problem, window_start, keep_first, item, head, kv_head, rows, keys, source
                    )


class _Source:
    """Keys and values of one head, of which nothing outside `span` is read.

    A value row that holds NaN or inf would turn a weight of 0 into NaN: `values` gives zeros in its place,
    and `nonfinite` lists its position, for it to be added by hand to the rows that may read it.
    """

    def __init__(
        self, key: np.ndarray | HeadRows, value: np.ndarray | HeadRows, dtype: np.dtype, span: slice
    ) -> None:
        self.key, self.value, self.dtype = key, value, dtype
        row_bytes = max(1, key.shape[1], value.shape[1]) * dtype.itemsize
        self.chunk = max(1, _CHUNK_BYTES // row_bytes)
        self.nonfinite = [
            part.start + int(n)
            for part in self.parts(span)
            for n in np.flatnonzero(~np.isfinite(value[part].astype(dtype)).all(axis=-1))
        ]

    def parts(self, keys: slice) -> Iterator[slice]:
        """`keys`, some at a time."""
        for start in range(keys.start, keys.stop, self.chunk):
            yield slice(start, min(start + self.chunk, keys.stop))

    def keys(self, part: slice) -> np.ndarray:
        return _contiguous(self.key[part], self.dtype)

    def values(self, part: slice) -> np.ndarray:
        values = _contiguous(self.value[part], self.dtype)
        nonfinite = [j - part.start for j in self.nonfinite if part.start <= j < part.stop]
        if nonfinite:
            values = values.copy()
            values[nonfinite] = 0
        return values


def _allowed(block: _QueryBlock) -> np.ndarray:
    """Bool: which keys of the block each of its rows may read, as far as the masks say."""
    problem, window_start, keep_first, item, head, _, rows, keys, _ = block
    allowed = np.ones((rows.stop - rows.start, keys.stop - keys.start), dtype=bool)
    j = np.arange(keys.start, keys.stop)
    if problem.key_start is not None and problem.key_stop is not None:
        allowed &= (problem.key_start[item][rows, None] <= j) & (j < problem.key_stop[item][rows, None])
    if window_start is not None:
        allowed &= (j < keep_first) | (j >= window_start[item][rows, None])
    if problem.dense is not None:
        allowed &= problem.dense[item][head, rows, keys] != 0
    if problem.mask_map is not None:
        allowed &= problem.mask_map.rows((*item, head), rows.start, rows.stop, problem.len_k)[:, keys]
    return allowed


def score_blocks(problem: Problem) -> Iterator[tuple[tuple[Any, ...], int, np.ndarray]]:
    """A block at a time: where its rows are among ``(*lead, H, L)``, its first key, and its scores, -inf
    where masked."""
    for block in _query_blocks(problem):
        scores, _, _ = _masked_scores(block)
        yield (*block.item, block.head, block.rows), block.keys.start, scores


def _masked_scores(block: _QueryBlock) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores, -inf where masked; those before bias and masks; and which keys are allowed."""
    problem, _, _, item, head, _, rows, _, _ = block
    allowed = _allowed(block)
    # A copy even where it is contiguous: NumPy multiplies a matrix with its own transpose in another way.
    query = np.array(problem.query[item][head, rows], problem.dtype, order="C")
    return (*_scores(block, query, allowed), allowed)


def _attend(block: _QueryBlock) -> None:
    """softmax(scores) V."""
    problem, _, _, item, head, _, rows, keys, _ = block
    dtype = problem.dtype.type
    scores, _, allowed = _masked_scores(block)
    sink = dtype(-np.inf) if problem.sinks is None else problem.sinks[head]
    row_max = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    empty = row_max == -np.inf  # a row without keys: its weights are exp(-inf - 0) = 0, whatever its sink is
    row_max = np.where(empty, dtype(0), np.maximum(row_max, sink))
    weights = np.exp(scores - row_max)
    weights[~allowed] = 0
    row_sum = weights.sum(axis=-1, keepdims=True) + np.exp(sink - row_max)
    kept = _kept(block)
    if kept is not None:
        weights *= kept

    divisor = np.where(empty, dtype(1), row_sum)
    out = _weighted_values(block, weights, allowed) / divisor
    if not np.isfinite(out).all():
        # Sums of finite values may have overflowed. Times a power of two, the weights of a row add up to at
        # most 1/2, and sums do not overflow. Rounding may take a mean past the largest number, to which it is
        # then clipped; with dropout a mean may really be larger.
        share = 1.0 if problem.dropout is None else problem.dropout.kept_share
        headroom = np.ldexp(dtype(0.5), -np.frexp(divisor / dtype(share))[1])
        means = _weighted_values(block, weights * headroom, allowed)
        is_finite = np.isfinite(means)
        means = means / divisor / headroom
        if problem.dropout is None:
            most = np.finfo(dtype).max
            np.clip(means, -most, most, out=means, where=is_finite)
        np.copyto(out, means, where=~np.isfinite(out) & ~np.isnan(means))
    problem.out[item][head, rows] = out
    if problem.lse is not None:
        problem.lse[item][head, rows] = np.where(empty, sink, row_max + np.log(row_sum))[:, 0]
    if problem.weights is not None:
        weights /= divisor
        weights[~allowed] = 0  # also in a row of NaN, where 0 / NaN is NaN
        problem.weights[item][head, rows] = 0
        problem.weights[item][head, rows, keys] = weights


def _weighted_values(block: _QueryBlock, weights: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """``weights @ values``, where a nonfinite value counts only for the rows that may read it."""
    keys, source = block.keys, block.source
    acc = np.zeros((len(weights), source.value.shape[1]), weights.dtype)
    for part in source.parts(keys):
        here = slice(part.start - keys.start, part.stop - keys.start)
        acc += weights[:, here] @ source.values(part)
    for j in source.nonfinite:
        if keys.start <= j < keys.stop:
            readers = allowed[:, j - keys.start]
            acc[readers] += weights[readers, j - keys.start, None] * source.value[j].astype(source.dtype)
    return acc


def _scores(block: _QueryBlock, query: np.ndarray, allowed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scores, -inf where masked, and those before bias and masks; `allowed` loses what a bias masks."""
    keys, source = block.keys, block.source
    scores = np.empty(allowed.shape, block.problem.dtype)
    for part in source.parts(keys):
        here = slice(part.start - keys.start, part.stop - keys.start)
        scores[:, here] = _products(query, source.keys(part))
    return _adjust_scores(block, scores, allowed)


def _adjust_scores(
    block: _QueryBlock, scores: np.ndarray, allowed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The `EPILOGUES` before the softmax: scale, softcap, bias, mask. The results are those of `_scores`."""
    problem = block.problem
    dtype = problem.dtype.type
    scores *= dtype(problem.scale)
    if problem.softcap is not None:
        cap = dtype(problem.softcap)
        scores = cap * np.tanh(scores / cap)
    capped = scores
    if problem.bias:
        place = (*block.item, block.head)
        bias: Any = None
        for term in problem.bias:
            part = block_of(term, place, block.rows, block.keys, problem.dtype)
            bias = part if bias is None else bias + part
        allowed &= bias != -np.inf
        scores = scores + bias
    return np.where(allowed, scores, dtype(-np.inf)), capped


def _products(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """``query @ key.T``, in sums of SCORE_COLUMNS columns as the kernels': BLAS orders each in its way."""
    products: np.ndarray = query[:, :SCORE_COLUMNS] @ key[:, :SCORE_COLUMNS].T
    for start in range(SCORE_COLUMNS, query.shape[1], SCORE_COLUMNS):
        columns = np.s_[:, start : start + SCORE_COLUMNS]
        products += query[columns] @ key[columns].T
    return products


def _kept(block: _QueryBlock) -> np.ndarray | None:
    """What dropout multiplies the weights by, None without."""
    problem, rows = block.problem, block.rows
    if problem.dropout is None:
        return None
    index = np.ravel_multi_index((*block.item, block.head), (*problem.lead, problem.num_heads))
    first = int(index) * problem.len_q + rows.start
    kept = problem.dropout.keep(first, rows.stop - rows.start, problem.len_k)[:, block.keys]
    return kept / problem.dtype.type(problem.dropout.kept_share)


def _product(factors: np.ndarray, rows: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """``factors @ rows``, where a row with NaN or inf counts only for those that may read it."""
    finite = np.isfinite(rows).all(axis=-1)
    if finite.all():
        return factors @ rows
    product = factors @ np.where(finite[:, None], rows, rows.dtype.type(0))
    for r in np.flatnonzero(~finite):
        readers = allowed[:, r]
        product[readers] += factors[readers, r, None] * rows[r]
    return product


def _differentiate(backward: Backward, gradients: Gradients, block: _QueryBlock) -> None:
    """Adds what a query block contributes to each gradient."""
    problem, _, _, item, head, kv_head, rows, keys, source = block
    dtype = problem.dtype.type
    allowed = _allowed(block)
    query = np.array(problem.query[item][head, rows], dtype, order="C")
    grad_out = np.array(backward.grad_out[item][head, rows], dtype, order="C")
    out = np.array(problem.out[item][head, rows], dtype, order="C")
    key, value = source.keys(keys), _contiguous(source.value[keys], problem.dtype)
    scores, capped = _scores(block, query, allowed)

    sink = None if problem.sinks is None else dtype(problem.sinks[head])
    # Bounds of the scores (Cauchy-Schwarz), by which the lse given may be off by rounding.
    key_norms = np.where(allowed, _norms(key), 0).max(axis=-1, initial=0)
    factors = np.sort([np.full(len(query), abs(problem.scale)), _norms(query), key_norms], axis=0)
    norms = factors[0] * factors[2] * factors[1] / _SMALL**2  # without overflow on the way
    share, lse = _own_lse(problem, backward.lse[item][head, rows], scores, sink, norms)
    weights = np.where(scores == -np.inf, dtype(0), np.exp(scores - lse[:, None]) * share[:, None])
    delta = (grad_out.astype(np.float64) * out).sum(axis=-1)
    if backward.grad_lse is not None:
        delta -= backward.grad_lse[item][head, rows]
    change, after = grad_out @ value.T, weights
    kept = _kept(block)
    if kept is not None:
        change, after = change * kept, weights * kept
    change = np.where(allowed, weights * (change - delta.astype(dtype)[:, None]), dtype(0))
    of_sums: Any = gradients.bias or {}
    for sums, array in of_sums.items():
        _add_to_bias(sums, array, block, change)
    if gradients.sinks is not None and problem.sinks is not None:
        some = allowed.any(axis=-1)
        gradients.sinks[head] -= (np.exp(sink - lse[some]) * share[some] * delta[some]).sum()
    if problem.softcap is not None:
        ratio = capped / dtype(problem.softcap)
        change = np.where(change == 0, change, change * ((1 - ratio) * (1 + ratio)))
    change *= dtype(problem.scale)
    if gradients.query is not None:
        gradients.query[item][head, rows] = _product(change, key, allowed)
    if gradients.key is not None:
        gradients.key[item][kv_head, keys] += _product(change.T, query, allowed.T)
    if gradients.value is not None:
        gradients.value[item][kv_head, keys] += _product(after.T, grad_out, allowed.T)


def _add_to_bias(sums: Sums, to: np.ndarray, block: _QueryBlock, change: np.ndarray) -> None:
    """Adds the gradients of a block's scores to what the gradient of a bias is made of."""
    problem, _, _, item, head, _, rows, keys, _ = block
    if sums.by_diagonals:
        for i, row in zip(range(rows.start, rows.stop), change, strict=True):
            to[head, problem.len_q - 1 - i :][keys] += row
    elif sums.run is not None:
        Sh, own = sums.shape[-1] - sums.run, to[item][head, rows]
        whole = np.zeros((len(change), Sh * sums.run))
        whole[:, keys] = change
        grid = whole.reshape(len(change), Sh, sums.run)
        own[:, :Sh] += grid.sum(axis=2)
        own[:, Sh:] += grid.sum(axis=1)
    else:
        full = np.broadcast_to(to, (*problem.lead, problem.num_heads, problem.len_q, problem.len_k))
        _add_broadcast(full[item][head, rows, keys], change)


def _own_lse(
    problem: Problem, given: np.ndarray, scores: np.ndarray, sink: np.floating | None, norms: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The share and the lse of weights ``share * exp(scores - lse)``.

    They are 1 and the lse given. Where that is large, and the lse of these scores but for rounding, they are
    1 / sum and the largest score instead, so that weights add up to 1. An lse above that of these scores may
    be of more keys, so only a usual difference is taken for rounding there.
    """
    top = scores.max(axis=-1, initial=-np.inf if sink is None else sink)
    sums = np.exp(scores - top[:, None]).sum(axis=-1) + (0 if sink is None else np.exp(sink - top))
    above = (top.astype(np.float64) - given) + np.log(sums.astype(np.float64))
    size = np.abs(given).astype(np.float64)
    most, usual = score_roundings(problem)
    # The slope of the soft-cap, at the largest scores.
    slope = 1 - np.minimum(size / (problem.softcap or np.inf), 1) ** 2
    is_own = (above <= most * (size + norms)) & (-above <= usual * (size + slope * norms / 4))
    is_own &= ((size >= LARGE_SCORE) | (norms >= LARGE_NORMS)) & (size + norms < np.inf)
    return np.where(is_own, 1 / sums, given.dtype.type(1)), np.where(is_own, top, given)


def _norms(rows: np.ndarray) -> np.ndarray:
    """_SMALL times the Euclidean norms of rows, of numbers of any size, in float64."""
    largest = np.abs(rows).max(axis=-1, keepdims=True).astype(np.float64)
    norms: np.ndarray = np.linalg.norm(rows / np.where(largest > 0, largest, 1), axis=-1)
    return norms * (_SMALL * largest[:, 0])


def _add_broadcast(to: np.ndarray, array: np.ndarray) -> None:
    """Adds to a view with strides of 0 the sums over those axes."""
    axes = tuple(axis for axis, stride in enumerate(to.strides) if stride == 0)
    kept = tuple(slice(1) if stride == 0 else slice(None) for stride in to.strides)
    to = to[kept]
    to.flags.writeable = True
    to += array.sum(axis=axes, keepdims=True, dtype=to.dtype)


def _key_range(problem: Problem, item: tuple[int, ...], rows: slice) -> slice:
    """The smallest range of keys that holds the intervals of all `rows`."""
    if problem.key_start is None or problem.key_stop is None:
        return slice(0, problem.len_k)
    start, stop = problem.key_start[item][rows], problem.key_stop[item][rows]
    read = start < stop
    return slice(int(start[read].min()), int(stop[read].max())) if read.any() else slice(0, 0)


def _contiguous(matrix: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`matrix` in this dtype, aligned and with a fresh array's strides, by which NumPy picks how to multiply.

    The flags do not tell: they ignore the stride of an axis of length 1.
    """
    fresh = matrix.strides == (matrix.shape[1] * matrix.itemsize, matrix.itemsize)
    is_ready = fresh and matrix.flags.aligned and matrix.dtype == dtype
    return matrix if is_ready else np.array(matrix, dtype, order="C")
