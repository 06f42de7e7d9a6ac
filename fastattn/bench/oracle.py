"""The right answer of a case, in a higher precision than the case's own.

float32 and 16-bit cases are computed in float64, float64 cases in NumPy's long double (80 bits on x86; where
long double is only 64 bits wide the check of float64 cases is that much weaker). A block of query rows at a
time, by the textbook formula, from gathered and decoded keys and values, with nothing of `fastattn` in it.

Large cases are checked on a sample of their query rows, `checked_rows`, so that checking takes no longer
than measuring. Every library still computes all rows. Gradients are checked in full, as that of one key takes
every row. Gated linear attention is computed token by token, and checked on a sample of its heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from fastattn.bench.case import TOPK, Case, Inputs, numpy_dtype

#: Query rows per block: bounds the memory to a few MB per 8192 keys, changes no value.
ROWS = 128

#: Cases with more scores than this are checked on a sample of rows: about a second of work in each
#: precision. There is no BLAS for long double.
MOST_SCORES = {**dict.fromkeys(("float16", "bfloat16", "float32"), 1 << 26), "float64": 1 << 22}

#: The fewest rows of the sample, even where they have more scores than the bound above, and the most.
FEWEST_ROWS, MOST_ROWS = 32, 512

#: A result is right when its largest error is below this many eps of its dtype, times the largest
#: absolute value of ``value``. Attention averages values, so an error of a few eps is what rounding makes;
#: bfloat16 or float32 arithmetic behind a wider type is off by far more.
TOLERANCE_EPS = 32

#: 16-bit types are so coarse that the largest value says nothing about an average of thousands: there it is
#: this many eps, times the largest absolute value of the answer. Rounding the answer makes half of one, and
#: scores or weights that were rounded in between about as much again.
TOLERANCE_EPS_16_BIT = 4


#: Gated linear attention with more multiply-adds of states than this is checked on a sample of heads, about
#: a second of work, but never on fewer than two.
MOST_UPDATES, FEWEST_HEADS = 1 << 28, 2

#: A gradient is right when its largest error is below this many eps of its dtype, times its largest absolute
#: value; in 16-bit types see above. Each row is a sum over all keys, or over all queries: of 128 to 8192 of
#: them honest rounding made 2 to 19 eps (PyTorch's and ours, 2026-11-23).
RELATIVE_TOLERANCE_EPS = 64


def oracle_dtype(case: Case) -> np.dtype:
    """The precision the case is checked in."""
    return np.dtype(np.longdouble if case.dtype == "float64" else np.float64)


def tolerance(case: Case, inputs: Inputs, answer: np.ndarray) -> float:
    """The largest absolute error of a result that counts as right, where `answer` is."""
    eps = _eps(case)
    if _is_16_bit(case):
        return TOLERANCE_EPS_16_BIT * eps * float(np.abs(answer).max())
    _, _, value = inputs.bhsd(case)
    return TOLERANCE_EPS * eps * float(np.abs(value).max())


def checked_rows(case: Case) -> np.ndarray:
    """The query rows that are compared, of every head and item: all, or an evenly spaced sample.

    Returns
    -------
    np.ndarray
        Rising row numbers; the first and the last row are always among them.
    """
    scores_per_row = case.batch * case.heads * case.len_k
    budget = MOST_SCORES[case.dtype] // scores_per_row
    if case.len_q <= max(budget, FEWEST_ROWS):
        return np.arange(case.len_q)
    count = min(max(budget, FEWEST_ROWS), MOST_ROWS)
    return np.linspace(0, case.len_q - 1, count).round().astype(np.int64)


def expected_output(case: Case, inputs: Inputs) -> np.ndarray:
    """Attention of `inputs`, the `checked_rows` of it: ``(B, H, checked rows, E)`` in `oracle_dtype`."""
    dtype, checked = oracle_dtype(case), checked_rows(case)
    _, _, value = inputs.bhsd(case)
    group = case.heads // case.kv_heads
    out = np.empty((case.batch, case.heads, len(checked), case.value_dim), dtype)
    for it in _blocks(case, inputs, checked):
        values = value[it.item, it.head // group, it.keys].astype(dtype)
        out[it.item, it.head, it.place] = it.weights @ values
    return out


def output_errors(case: Case, result: np.ndarray, answer: np.ndarray) -> tuple[float, float]:
    """Largest and root-mean-square absolute error of the checked rows of a result ``(B, H, L, E)``."""
    shape = (case.batch, case.heads, case.len_q, case.value_dim)
    if result.shape != shape:
        raise ValueError(f"the result has shape {result.shape}, expected {shape}")
    return _largest_and_rms(result[:, :, checked_rows(case)].astype(answer.dtype) - answer)


def expected_gradients(case: Case, inputs: Inputs) -> np.ndarray:
    """The gradients by query, key, value and, where there is one, bias: all elements, one after another."""
    dtype = oracle_dtype(case)
    query, key, value = inputs.bhsd(case)
    grad_out = inputs.grad_out_bhsd(case)
    scale = 1 / np.sqrt(np.asarray(case.head_dim, dtype))
    group = case.heads // case.kv_heads
    by_query, by_key, by_value = (np.zeros(array.shape, dtype) for array in (query, key, value))
    by_bias = np.zeros((0, case.len_q, case.len_k) if inputs.bias is None else inputs.bias.shape, dtype)
    for it in _blocks(case, inputs, np.arange(case.len_q)):
        rows = it.item, it.head, it.place
        keys = it.item, it.head // group, it.keys
        grads = grad_out[rows].astype(dtype)
        by_value[keys] += it.weights.T @ grads
        change = grads @ value[keys].astype(dtype).T
        change = it.weights * (change - (it.weights * change).sum(axis=-1, keepdims=True))
        if case.bias is not None:
            of_head = by_bias[it.head] if case.bias == "per_head" else by_bias
            of_head[it.place, it.keys] += change
        change *= scale * it.slope
        by_query[rows] = change @ key[keys].astype(dtype)
        by_key[keys] += change.T @ query[rows].astype(dtype)
    return np.concatenate([array.reshape(-1) for array in (by_query, by_key, by_value, by_bias)])


def checked_heads(case: Case) -> np.ndarray:
    """The heads of all items that are compared of gated linear attention: all, or an evenly spaced sample."""
    heads = case.batch * case.heads
    budget = MOST_UPDATES // (case.len_q * case.head_dim * case.value_dim)
    return np.linspace(0, heads - 1, min(heads, max(budget, FEWEST_HEADS))).round().astype(np.int64)


def expected_recurrence(case: Case, inputs: Inputs) -> np.ndarray:
    """Gated linear attention, one token after another.

    Of the `checked_heads` the outputs ``(n, L, E)``, then the states after, ``(n, D, E)``: all elements, one
    after another.
    """
    dtype, heads = oracle_dtype(case), checked_heads(case)
    item, head = np.divmod(heads, case.heads)
    of_keys = item, head // (case.heads // case.kv_heads)
    query, key, value = inputs.bhsd(case)
    q = query[item, head].astype(dtype)
    arrays: Any = key, value, *inputs.gates(case), inputs.state
    read: Any = (it if it is None else it[of_keys].astype(dtype) for it in arrays)
    k, v, decay, beta, state = read
    out = np.empty((len(heads), case.len_q, case.value_dim), dtype)
    for t in range(case.len_q):
        if decay is not None:
            state *= np.exp(decay[:, t, :, None])
        added = v[:, t]
        if beta is not None:
            added = beta[:, t] * (added - np.einsum("nd,nde->ne", k[:, t], state))
        state += k[:, t, :, None] * added[:, None]
        out[:, t] = np.einsum("nd,nde->ne", q[:, t], state)
    out /= np.sqrt(np.asarray(case.head_dim, dtype))
    return np.concatenate([out.reshape(-1), state.reshape(-1)])


def recurrence_errors(case: Case, result: np.ndarray, answer: np.ndarray) -> tuple[float, float]:
    """Of the outputs or of the states after, whichever are worse: as `gradient_errors`.

    `result` has all outputs ``(B, H, L, E)``, then all states ``(B, K, D, E)``.
    """
    shape = case.batch, case.heads, case.len_q, case.value_dim
    size = int(np.prod(shape))
    states = case.batch, case.kv_heads, case.head_dim, case.value_dim
    if result.size != size + np.prod(states):
        raise ValueError(f"the result has {result.size} elements, expected those of {shape} and {states}")
    item, head = np.divmod(checked_heads(case), case.heads)
    out = result[:size].reshape(shape)[item, head]
    state = result[size:].reshape(states)[item, head // (case.heads // case.kv_heads)]
    exact = np.split(answer, [out.size])
    return _worst((out.reshape(-1), exact[0]), (state.reshape(-1), exact[1]))


def expected_reduction(case: Case, inputs: Inputs) -> np.ndarray:
    """What the scores are reduced to, in `oracle_dtype`.

    "max_similarity" ``(B, H)`` and "key_weights" ``(B, H, S)``; of "topk" the scores ``(B, H, L, k)`` in
    falling order, and those of the keys that are given beside them, all one after another.
    """
    dtype = oracle_dtype(case)
    query, key, _ = inputs.bhsd(case)
    if case.reduction == "max_similarity":
        tokens = query[0].astype(dtype)
        products = (tokens @ document.astype(dtype).swapaxes(-1, -2) for document in key)
        return np.stack([it.max(axis=-1).sum(axis=-1) for it in products])
    full, allowed = (case.batch, case.heads, case.len_q, case.len_k), inputs.allowed(case)
    allowed = np.broadcast_to(True if allowed is None else allowed, full)
    found = []
    for b, h in np.ndindex(full[:2]):
        scores = query[b, h].astype(dtype) @ key[b, h // (case.heads // case.kv_heads)].astype(dtype).T
        scores = np.where(allowed[b, h], scores / np.sqrt(dtype.type(case.head_dim)), -np.inf)
        if case.reduction == "topk":
            found.append(-np.sort(-scores)[:, :TOPK])
        else:
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            found.append((weights / weights.sum(axis=-1, keepdims=True)).sum(axis=0))
    whole = np.stack(found).reshape(case.batch, case.heads, *found[0].shape)
    return np.stack([whole, whole]) if case.reduction == "topk" else whole


def reduction_errors(case: Case, result: np.ndarray, answer: np.ndarray) -> tuple[float, float]:
    """The largest and the root-mean-square error, over the largest right value."""
    if result.shape != answer.shape:
        raise ValueError(f"the result has shape {result.shape}, expected {answer.shape}")
    return _worst((result, answer))


def relative_tolerance(case: Case, inputs: Inputs, answer: np.ndarray) -> float:
    """The largest error, over the largest value, of all but outputs that counts as right."""
    return (TOLERANCE_EPS_16_BIT if _is_16_bit(case) else RELATIVE_TOLERANCE_EPS) * _eps(case)


def gradient_errors(case: Case, result: np.ndarray, answer: np.ndarray) -> tuple[float, float]:
    """Of the gradient where it is largest: the largest and the root-mean-square error.

    Each over the largest absolute value of that gradient's answer, as the one by the values is many times as
    large as the others.
    """
    if result.shape != answer.shape:
        raise ValueError(f"the gradients have {result.size} elements, expected {answer.size}")
    rows, keys = case.batch * case.heads * case.len_q, case.batch * case.kv_heads * case.len_k
    sizes = rows * case.head_dim, keys * case.head_dim, keys * case.value_dim
    parts = (np.split(array, np.cumsum(sizes)) for array in (result, answer))
    return _worst(*(pair for pair in zip(*parts, strict=True) if pair[1].size))


def _worst(*pairs: tuple[np.ndarray, np.ndarray]) -> tuple[float, float]:
    """Of results and what is right the largest errors, each over the largest right value of its pair."""
    errors = [
        _largest_and_rms((found.astype(exact.dtype) - exact) / np.abs(exact).max()) for found, exact in pairs
    ]
    largest, rms = np.max(errors, axis=0).tolist()
    return largest, rms


def _eps(case: Case) -> float:
    return float(np.spacing(numpy_dtype(case.dtype).type(1)))


def _is_16_bit(case: Case) -> bool:
    return case.dtype in ("float16", "bfloat16")


def _largest_and_rms(errors: np.ndarray) -> tuple[float, float]:
    return float(np.abs(errors).max()), float(np.sqrt(np.square(errors).mean()))


class _Block(NamedTuple):
    """Some query rows of one head, and all the keys that they may attend."""

    item: int
    head: int
    place: slice  #: among the rows that were asked for
    keys: slice
    weights: np.ndarray  #: (rows, keys)
    slope: np.ndarray | float  #: what the soft-cap multiplies a change of a score with


def _blocks(case: Case, inputs: Inputs, wanted: np.ndarray) -> Iterator[_Block]:
    """The weights of the query rows `wanted`, a block at a time."""
    dtype = oracle_dtype(case)
    query, key, _ = inputs.bhsd(case)
    scale = 1 / np.sqrt(np.asarray(case.head_dim, dtype))
    group = case.heads // case.kv_heads
    full = (case.batch, case.heads, case.len_q, case.len_k)
    mask = None if inputs.mask is None else np.broadcast_to(inputs.mask, full)
    bias = None if inputs.bias is None else np.broadcast_to(inputs.bias, full)
    bounds = [np.broadcast_to(bound, full[:1] + full[2:3]) for bound in case.intervals()]
    for b, h in np.ndindex(case.batch, case.heads):
        every_key = key[b, h // group].astype(dtype)
        for first in range(0, len(wanted), ROWS):
            place = slice(first, min(first + ROWS, len(wanted)))
            rows = wanted[place]
            start, stop = (bound[b, rows, None] for bound in bounds)
            keys = slice(int(start.min()), int(stop.max()))
            scores = (query[b, h, rows].astype(dtype) @ every_key[keys].T) * scale
            slope: np.ndarray | float = 1.0
            if case.softcap is not None:
                capped = np.tanh(scores / case.softcap)
                scores, slope = case.softcap * capped, 1 - capped**2
            if bias is not None:
                scores += bias[b, h, rows, keys]
            if mask is not None:
                scores[~mask[b, h, rows, keys]] = -np.inf
            columns = np.arange(keys.start, keys.stop)
            scores[(columns < start) | (columns >= stop)] = -np.inf
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            yield _Block(b, h, place, keys, weights, slope)
