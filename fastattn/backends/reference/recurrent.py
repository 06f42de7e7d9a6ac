"""Gated linear attention in NumPy: a chunk of tokens at a time, products by BLAS.

The recurrences of a chunk in closed form: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta
Rule", ICLR 2025, section 3.3, with the triangular system solved rather than inverted. Sums of decays are in
float64.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

import numpy as np

from fastattn._call.problem import FLOAT64
from fastattn._call.recurrent import RecurrentBackward, RecurrentCall, RecurrentGradients

#: Tokens of a chunk; by column, scores have a factor for each pair of tokens and each column.
_CHUNK, _CHUNK_OF_COLUMNS = 64, 16
#: Of what is as good as -inf: a sum of a chunk of it is no infinity, whose differences were NaN.
_NO_TRACE = -1e4
#: Beyond 0 and 2, of beta times a key's product with itself: rounding gives keys of norm 1 far less.
_GROWTH_MARGIN = 0.01


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


def _stop(call: RecurrentCall, item: Any) -> int:
    """So many tokens of an item are read."""
    return call.query.shape[-2] if call.lengths is None else int(call.lengths[item])


def _attend_item(call: RecurrentCall, item: Any, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """The results of an item ``(H, L, E)``, and its state ``(K, D, E)``."""
    H, L, D = call.query.shape[-3:]
    n, dtype = _stop(call, item), call.dtype
    K, E = call.key.shape[-3], call.value.shape[-1]
    # Axes (K, G, L, ...) with G = 1 but for queries.
    q = call.query[item].astype(dtype, order="C").reshape(K, H // K if K else 1, L, D)
    out = np.empty((*q.shape[:-1], E), dtype)
    k, v = (x[item][:, None, :n].astype(dtype, order="C") for x in (call.key, call.value))
    decay, beta = (None if x is None else x[item][:, None, :n] for x in (call.decay, call.beta))
    if beta is not None:
        rates = beta * np.square(k).sum(-1, keepdims=True)
        if rates.min(initial=0) < -_GROWTH_MARGIN or rates.max(initial=0) > 2 + _GROWTH_MARGIN:
            chunk = 1  # the state may grow: results of chunks would be differences of much larger numbers
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


class _Chunk:
    """Some tokens of one or several heads, and the factors that decays leave between them.

    The state at token t is ``kept(0, t) * state + sum_{s <= t} kept(s, t) * k_s v_s^T``. By the delta rule
    the state's own answer, which depends on the tokens before, is first subtracted from v.
    """

    def __init__(
        self, k: np.ndarray, v: np.ndarray, decay: np.ndarray | None, beta: np.ndarray | None
    ) -> None:
        self.k, self.v, self.beta, dtype = k, v, beta, k.dtype
        if decay is None:
            self.from_start = self.to_end = np.ones((1, 1), dtype)
            self.between = np.ones((1, 1, 1), dtype)
        else:
            # Of each token t and s the sum of the decays after s, up to t: differences of sums would cancel.
            later = np.tri(decay.shape[-2], k=-1, dtype=bool)[..., None]
            sums = np.where(later, decay[..., :, None, :], 0).cumsum(-3)
            self.between = np.exp(sums).astype(dtype)
            self.from_start = np.exp(decay.cumsum(-2)).astype(dtype)
            self.to_end = self.between[..., -1, :, :]

    def scores(self, x: np.ndarray, diagonal: int) -> np.ndarray:
        if self.between.shape[-1] == 1:
            products = (x @ self.k.swapaxes(-1, -2)) * self.between[..., 0]
        else:
            products = np.einsum("...tsd,...sd->...ts", x[..., :, None, :] * self.between, self.k)
        return np.tril(products, diagonal)

    def added(self, state: np.ndarray) -> np.ndarray:
        """What the state gets with each key."""
        if self.beta is None:
            return self.v
        left = self.v - (self.k * self.from_start) @ state
        return _solve(self.system(), self.beta * left)

    def system(self) -> np.ndarray:
        return np.eye(self.k.shape[-2], dtype=self.k.dtype) + self.beta * self.scores(self.k, -1)

    def after(self, state: np.ndarray, added: np.ndarray) -> np.ndarray:
        """The state after the chunk."""
        decayed = state * self.from_start[..., -1:, :].swapaxes(-1, -2)
        return decayed + (self.k * self.to_end).swapaxes(-1, -2) @ added


def _advance(
    state: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    decay: np.ndarray | None,
    beta: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """The results of a chunk, without the scale, and the state after it."""
    chunk = _Chunk(k, v, decay, beta)
    added = chunk.added(state)
    return (q * chunk.from_start) @ state + chunk.scores(q, 0) @ added, chunk.after(state, added)


def differentiate(backward: RecurrentBackward) -> RecurrentGradients:
    """The gradients that are asked for."""
    found = backward.zeros()
    heads = backward.call.key.shape[:-2]
    with np.errstate(all="ignore"):
        for index in np.ndindex(heads):
            _differentiate_head(backward, index, found)
    return found


def _differentiate_head(backward: RecurrentBackward, index: Any, found: RecurrentGradients) -> None:
    """Fills the gradients of one key/value head, and of the queries that read it."""
    call, (*item, head) = backward.call, index
    n, dtype, decay, beta = _stop(call, tuple(item)), call.dtype, call.decay, call.beta
    group = call.query.shape[-3] // call.key.shape[-3]
    heads = (*item, slice(head * group, (head + 1) * group))
    chunk = _CHUNK_OF_COLUMNS if decay is not None and decay.shape[-1] > 1 else _CHUNK
    starts = range(0, n, chunk)

    def tokens(start: int) -> slice:
        return slice(start, min(start + chunk, n))

    def chunk_of(rows: slice) -> _Chunk:
        k, v = (np.ascontiguousarray(x[*index, rows], dtype) for x in (call.key, call.value))
        g = None if decay is None else np.maximum(decay[*index, rows].astype(FLOAT64, "C"), _NO_TRACE)
        return _Chunk(k, v, g, None if beta is None else beta[*index, rows])

    def queries(rows: slice) -> tuple[np.ndarray, np.ndarray]:
        q, g = (np.ascontiguousarray(x[*heads, rows], dtype) for x in (call.query, call.out))
        return q, g * dtype.type(call.scale)

    def next_state(state: np.ndarray, rows: slice) -> np.ndarray:
        here = chunk_of(rows)
        return here.after(state, here.added(state.astype(dtype)))

    def store(name: str, where: Any, gradient: np.ndarray) -> None:
        if name in backward.wrt:
            getattr(found, name)[where] = gradient

    # The states before some chunks, which those before the others follow from.
    per_segment = isqrt(max(len(starts) - 1, 0)) + 1
    segments = [starts[first : first + per_segment] for first in range(0, len(starts), per_segment)]
    state = np.zeros(call.key.shape[-1:] + call.value.shape[-1:])
    if call.earlier is not None:
        state += call.earlier[index]
    saved = []
    for segment in segments:
        saved.append(state)
        for start in segment:
            state = next_state(state, tokens(start))

    change = (
        np.zeros_like(state) if backward.grad_state is None else backward.grad_state[index].astype(FLOAT64)
    )
    for start in range(n, call.query.shape[-2], chunk):
        rows = slice(start, start + chunk)
        q, g = queries(rows)
        store("query", (*heads, rows), g @ state.astype(dtype).T)
        change += (q.swapaxes(-1, -2) @ g).sum(0)
    for segment, state in zip(reversed(segments), reversed(saved), strict=True):
        states = [state]
        for start in segment[:-1]:
            states.append(next_state(states[-1], tokens(start)))
        for start in reversed(segment):
            rows = tokens(start)
            *gradients, change = _differentiate_chunk(states.pop(), change, *queries(rows), chunk_of(rows))
            store("query", (*heads, rows), gradients[0])
            for name, gradient in zip(("key", "value", "decay", "beta"), gradients[1:], strict=True):
                store(name, (*index, rows), gradient)
    store("state", index, change)


def _differentiate_chunk(
    state: np.ndarray, change: np.ndarray, q: np.ndarray, g: np.ndarray, chunk: _Chunk
) -> tuple[np.ndarray, ...]:
    """The gradients of the queries (group, tokens, D), keys, values, decays and rates of a chunk, and of the
    state before it.

    change: with respect to the state after it. g: to the results, times the scale. A token adds ``beta *
    left`` with its key, where ``left = v - k S`` and S is the decayed state before it. Later tokens read what
    it adds: the gradients with respect to it solve the transposed system.
    """
    dtype, k, from_start, to_end, between = q.dtype, chunk.k, chunk.from_start, chunk.to_end, chunk.between
    before, after = state.astype(dtype), change.astype(dtype)
    added = chunk.added(before)
    grad_added = (k * to_end) @ after + (chunk.scores(q, 0).swapaxes(-1, -2) @ g).sum(0)
    # What reads the state: queries, and keys by the delta rule. Of each the rows, the gradients with respect
    # to the answers, and the diagonal: a query reads its own token.
    readers = [*((*one, 0) for one in zip(q, g, strict=True))]
    grad_value, grad_beta = grad_added, np.zeros(1, dtype)
    if chunk.beta is not None:
        left = chunk.v - (k * from_start) @ before - chunk.scores(k, -1) @ added
        grad_added = _solve(chunk.system().T, grad_added)
        grad_value = chunk.beta * grad_added
        grad_beta = (grad_added * left).sum(-1, keepdims=True)
        readers.append((k, -grad_value, -1))
    ends = to_end * (added @ after.T)
    starts, pairs = np.zeros_like(k), np.zeros((1, 1, from_start.shape[-1]), dtype)
    grad_key, grad_state, grad_rows = ends, from_start[-1:].T * change, []
    for x, row_gradient, diagonal in readers:
        products = np.tril(row_gradient @ added.T, diagonal)
        weights = products[..., None] * between
        from_state = from_start * (row_gradient @ before.T)
        grad_rows.append(from_state + _weighted(weights, k))
        grad_key = grad_key + _weighted(weights.swapaxes(0, 1), x)
        grad_state = grad_state + (x * from_start).T @ row_gradient
        starts += x * from_state
        if pairs.shape[-1] == 1:
            pairs = pairs + (chunk.scores(x, diagonal) * products)[..., None]
        else:
            pairs = pairs + weights * x[:, None] * k
    if chunk.beta is not None:
        grad_key = grad_key + grad_rows.pop()
    # A decay is a factor of what goes from a token before its own, or the start, to its own or a later one,
    # or the end. Sums of other terms, which cancel, would leave their rounding errors.
    within = np.tril(pairs[::-1].cumsum(0)[::-1].T.swapaxes(-1, -2), -1).sum(-1).T
    grad_decay = from_start[-1] * (state * change).sum(-1) + starts[::-1].cumsum(0)[::-1]
    grad_decay[1:] += (ends * k)[:-1].cumsum(0)
    if within.shape[-1] == 1:
        grad_decay = grad_decay.sum(-1, keepdims=True)
    return np.stack(grad_rows), grad_key, grad_value, grad_decay + within, grad_beta, grad_state


def _solve(system: np.ndarray, rows: np.ndarray) -> np.ndarray:
    try:
        return np.linalg.solve(system, rows)
    except np.linalg.LinAlgError:  # numbers are not finite, or overflow; one token has none to solve for
        return np.full_like(rows, np.nan)


def _weighted(weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The sums over s of ``weights[t, s] * rows[s]``; weights are ``(t, s, 1)``, or of columns."""
    return weights[..., 0] @ rows if weights.shape[-1] == 1 else np.einsum("tsd,sd->td", weights, rows)
