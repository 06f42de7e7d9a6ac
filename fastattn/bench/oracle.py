"""The right answer of a case, in a higher precision than the case's own.

float32 cases are computed in float64, float64 cases in NumPy's long double (80 bits on x86; where long
double is only 64 bits wide the check of float64 cases is that much weaker). A block of query rows at a
time, by the textbook formula, with nothing of `fastattn` in it.
"""

from __future__ import annotations

import numpy as np

from fastattn.bench.cases import Case, Inputs

#: Query rows per block: bounds the memory to a few MB per 8192 keys, changes no value.
ROWS = 128


def oracle_dtype(case: Case) -> np.dtype:
    """The precision the case is checked in."""
    return np.dtype(np.float64 if case.dtype == "float32" else np.longdouble)


def expected_output(case: Case, inputs: Inputs) -> np.ndarray:
    """Attention of `inputs` as ``(B, H, L, E)`` in `oracle_dtype`."""
    dtype = oracle_dtype(case)
    query, key, value = inputs.bhsd(case)
    scale = 1 / np.sqrt(np.asarray(case.head_dim, dtype))
    group = case.heads // case.kv_heads
    full = (case.batch, case.heads, case.len_q, case.len_k)
    allowed = None if inputs.allowed is None else np.broadcast_to(inputs.allowed, full)
    bias = None if inputs.bias is None else np.broadcast_to(inputs.bias, full)

    out = np.empty((case.batch, case.heads, case.len_q, case.value_dim), dtype)
    for b, h in np.ndindex(case.batch, case.heads):
        keys = key[b, h // group].astype(dtype)
        values = value[b, h // group].astype(dtype)
        for start in range(0, case.len_q, ROWS):
            rows = np.arange(start, min(start + ROWS, case.len_q))
            scores = (query[b, h, rows].astype(dtype) @ keys.T) * scale
            if bias is not None:
                scores += bias[b, h, rows]
            if allowed is not None:
                scores[~allowed[b, h, rows]] = -np.inf
            if case.causal:
                scores[np.arange(case.len_k) > rows[:, None]] = -np.inf
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[b, h, rows] = (weights @ values) / weights.sum(axis=-1, keepdims=True)
    return out
