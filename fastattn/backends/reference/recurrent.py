"""Gated linear attention in NumPy: a chunk of tokens at a time, products by BLAS.

The recurrences of a chunk in closed form: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta
Rule", ICLR 2025, section 3.3, with the triangular system solved rather than inverted. Sums of decays are in
float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._call.problem import FLOAT64
from fastattn._call.recurrent import RecurrentCall

#: Tokens of a chunk; by column, scores have a factor for each pair of tokens and each column.
_CHUNK, _CHUNK_OF_COLUMNS = 64, 16
#: Of what is as good as -inf: a sum of a chunk of it is no infinity, whose differences were NaN.
_NO_TRACE = -1e4


def attend(call: RecurrentCall) -> np.ndarray | None:
    """Fills ``call.out``; returns the state ``(*lead, K, D, E)`` if asked to."""
    states = np.empty((*call.key.shape[:-2], call.key.shape[-1], call.value.shape[-1]), call.dtype)
    has_columns = call.decay is not None and call.decay.shape[-1] > 1
    with np.errstate(all="ignore"):
        for item in np.ndindex(call.query.shape[:-3]):
            out, states[item] = _attend_item(call, item, _CHUNK_OF_COLUMNS if has_columns else _CHUNK)
            # Token by token nonfinite numbers, and what overflows, reach no earlier token.
            if not (np.isfinite(out).all() and np.isfinite(states[item]).all()):
                out, states[item] = _attend_item(call, item, 1)
            call.out[item] = out
    return states if call.return_state else None


def _attend_item(call: RecurrentCall, item: Any, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """The results of an item ``(H, L, E)``, and its state ``(K, D, E)``."""
    H, L, D = call.query.shape[-3:]
    n, dtype = L if call.lengths is None else int(call.lengths[item]), call.dtype
    K, E = call.key.shape[-3], call.value.shape[-1]
    # Axes (K, G, L, ...) with G = 1 but for queries.
    q = call.query[item].astype(dtype, order="C").reshape(K, H // K if K else 1, L, D)
    out = np.empty((*q.shape[:-1], E), dtype)
    k, v = (x[item][:, None, :n].astype(dtype, order="C") for x in (call.key, call.value))
    decay, beta = (None if x is None else x[item][:, None, :n] for x in (call.decay, call.beta))
    state = np.zeros((K, 1, D, E), dtype) if call.earlier is None else call.earlier[item][:, None]
    if decay is not None:
        decay = np.maximum(decay.astype(FLOAT64), _NO_TRACE)
    for start in range(0, n, chunk):
        rows = np.s_[..., start : min(start + chunk, n), :]
        gates = (None if x is None else x[rows] for x in (decay, beta))
        out[rows], state = _advance(state, q[rows], k[rows], v[rows], *gates)
    out[..., n:, :] = q[..., n:, :] @ state
    out *= dtype.type(call.scale)
    return out.reshape(H, L, E), state[:, 0]


def _advance(
    state: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    decay: np.ndarray | None,
    beta: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """The results of a chunk, without the scale, and the state after it.

    The state at token t is ``kept(0, t) * state + sum_{s <= t} kept(s, t) * k_s v_s^T``. By the delta rule
    the state's own answer, which depends on the tokens before, is first subtracted from v.
    """
    dtype = k.dtype
    if decay is None:
        from_start = to_end = np.ones((1, 1), dtype)
        between = np.ones((1, 1, 1), dtype)
    else:
        # Of each token t and s the sum of the decays after s, up to t: differences of sums would cancel.
        later = np.tri(decay.shape[-2], k=-1, dtype=bool)[..., None]
        between = np.exp(np.where(later, decay[..., :, None, :], 0).cumsum(-3)).astype(dtype)
        from_start, to_end = np.exp(decay.cumsum(-2)).astype(dtype), between[..., -1, :, :]

    def scores(x: np.ndarray, diagonal: int) -> np.ndarray:
        if between.shape[-1] == 1:
            products = (x @ k.swapaxes(-1, -2)) * between[..., 0]
        else:
            products = np.einsum("...tsd,...sd->...ts", x[..., :, None, :] * between, k)
        return np.tril(products, diagonal)

    if beta is not None:
        system = np.eye(k.shape[-2], dtype=dtype) + beta * scores(k, -1)
        v = np.linalg.solve(system, beta * (v - (k * from_start) @ state))
    out = (q * from_start) @ state + scores(q, 0) @ v
    decayed = state * from_start[..., -1:, :].swapaxes(-1, -2)
    return out, decayed + (k * to_end).swapaxes(-1, -2) @ v
