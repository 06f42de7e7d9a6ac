"""The right answer of a case, in a higher precision than the case's own.

float32 and 16-bit cases are computed in float64, float64 cases in NumPy's long double (80 bits on x86; where
long double is only 64 bits wide the check of float64 cases is that much weaker). A block of query rows at a
time, by the textbook formula, from gathered and decoded keys and values, with nothing of `fastattn` in it.

Large cases are checked on a sample of their query rows, `checked_rows`, so that checking takes no longer
than measuring. Every library still computes all rows.
"""

from __future__ import annotations

import numpy as np

from fastattn.bench.case import Case, Inputs, numpy_dtype

#: Query rows per block: bounds the memory to a few MB per 8192 keys, changes no value.
ROWS = 128

#: Cases with more scores than this are checked on a sample of rows: about a second of work in each
#: precision. There is no BLAS for long double.
MOST_SCORES = {**dict.fromkeys(("float16", "bfloat16", "float32"), 1 << 26), "float64": 1 << 22}

#: Bounds of the sample: as few rows as this where the scores would allow for less, and never more than that.
FEWEST_ROWS, MOST_ROWS = 32, 512

#: A result is right when its largest error is below this many eps of its dtype, times the largest
#: absolute value of ``value``. Attention averages values, so an error of a few eps is what rounding makes;
#: bfloat16 or float32 arithmetic behind a wider type is off by far more.
TOLERANCE_EPS = 32

#: 16-bit types are so coarse that the largest value says nothing about an average of thousands: there it is
#: this many eps, times the largest absolute value of the answer. Rounding the answer makes half of one, and
#: scores or weights that were rounded in between about as much again.
TOLERANCE_EPS_16_BIT = 4


def oracle_dtype(case: Case) -> np.dtype:
    """The precision the case is checked in."""
    return np.dtype(np.longdouble if case.dtype == "float64" else np.float64)


def tolerance(case: Case, inputs: Inputs, answer: np.ndarray) -> float:
    """The largest absolute error of a result that counts as right, where `answer` is."""
    eps = float(np.spacing(numpy_dtype(case.dtype).type(1)))
    if case.dtype in ("float16", "bfloat16"):
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
    dtype = oracle_dtype(case)
    query, key, value = inputs.bhsd(case)
    scale = 1 / np.sqrt(np.asarray(case.head_dim, dtype))
    group = case.heads // case.kv_heads
    full = (case.batch, case.heads, case.len_q, case.len_k)
    mask = None if inputs.mask is None else np.broadcast_to(inputs.mask, full)
    bias = None if inputs.bias is None else np.broadcast_to(inputs.bias, full)
    bounds = [np.broadcast_to(bound, full[:1] + full[2:3]) for bound in case.intervals()]
    checked = checked_rows(case)

    out = np.empty((case.batch, case.heads, len(checked), case.value_dim), dtype)
    for b, h in np.ndindex(case.batch, case.heads):
        keys = key[b, h // group].astype(dtype)
        values = value[b, h // group].astype(dtype)
        for first in range(0, len(checked), ROWS):
            rows = checked[first : first + ROWS]
            start, stop = (bound[b, rows, None] for bound in bounds)
            scores = (query[b, h, rows].astype(dtype) @ keys.T) * scale
            if case.softcap is not None:
                scores = case.softcap * np.tanh(scores / case.softcap)
            if bias is not None:
                scores += bias[b, h, rows]
            if mask is not None:
                scores[~mask[b, h, rows]] = -np.inf
            columns = np.arange(case.len_k)
            scores[(columns < start) | (columns >= stop)] = -np.inf
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[b, h, first : first + ROWS] = (weights @ values) / weights.sum(axis=-1, keepdims=True)
    return out
