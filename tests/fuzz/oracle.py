"""Attention by its definition, for many cases a second: whole arrays in a wider type.

`tests/naive.py` is the oracle of all tests. This one is the same definition without its loops; it imports
nothing of the package under test, and `tests/test_fuzz.py` holds it against that one. It also says what
neither can know: where the computation's own type overflows, the formula has no answer to compare with.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tests.tolerances import ROUNDINGS

Array = np.ndarray

#: Scores that are wrong by more than this, absolutely, move a weight by more than their first-order effect.
FIRST_ORDER = 0.05
#: Kernels multiply a score by log2(e) and hold sums of a few terms: an eighth of the largest number is left.
ROOM = 8
#: Squares of products of smaller numbers are in the range of float64.
SQUARES_FIT = 1e150


class Answer(NamedTuple):
    """As `tests.naive.Answer`, and what is not to be compared."""

    out: Array
    lse: Array
    weights: Array
    out_reach: Array
    lse_reach: Array
    weights_reach: Array
    unclear_out: Array | None  #: bool; None where all is clear
    unclear_rows: Array | None  #: of the lse
    unclear_weights: Array | None
    nonfinite_out: Array | None  #: NaN or inf, it is not said which


def wide_type(dtype: np.dtype) -> Any:
    """In which numbers of `dtype` are computed exactly enough, without overflow of a score."""
    return np.float64 if dtype.itemsize <= 4 else np.longdouble


class Scores(NamedTuple):
    """``(*lead, H, L, S)``, -inf where a key is masked."""

    exact: Array
    size: Array  #: what is rounded on the way to each, as `tests.tolerances` counts it; 0 where nothing is
    unclear: Array | None  #: bool ``(*lead, H, L)``: rows that overflow, or may; None where all is clear


def scores(
    query: Array,
    key: Array,
    allowed: Array,
    *,
    dtype: np.dtype,
    bias: Array | None,
    scale: float | None,
    softcap: float | None,
) -> Scores:
    """Of the arrays of `attention`."""
    wide, limits = wide_type(dtype), np.finfo(dtype)
    eps, tiny, largest = float(limits.eps), float(limits.tiny), float(limits.max) / ROOM
    *lead, H, L, D = query.shape
    K, S = key.shape[-3:-1]
    group = H // max(K, 1)
    q, k = query.astype(wide).reshape(*lead, K, group * L, D), key.astype(wide)
    factor = wide(1) / np.sqrt(wide(D)) if scale is None else wide(scale)
    strength = max(1.0, abs(float(factor)))
    q0, k0 = (x if np.isfinite(x).all() else np.where(np.isfinite(x), x, 0) for x in (q, k))
    k_infinite = np.isinf(k).astype(np.float32) if k0 is not k else None
    biggest_q, biggest_k = (float(np.abs(x).max(initial=0)) for x in (q0, k0))
    # The scale is applied to the query, or to the score: each number on the way must fit.
    bound = strength * max(biggest_q, 1.0) * max(biggest_k, 1.0) * D
    # What says how far an element may be away need not be wide, if it is in the range of float64.
    rough = np.float64 if bound < SQUARES_FIT else wide

    raw = (q @ k.swapaxes(-1, -2)).reshape(*lead, H, L, S) * factor
    q0, k0 = q0.astype(rough, copy=False), k0.astype(rough, copy=False)
    products = np.sqrt((q0 * q0) @ (k0 * k0).swapaxes(-1, -2)).reshape(*lead, H, L, S) * abs(rough(factor))
    found = raw if softcap is None else softcap * np.tanh(raw / softcap)
    size = np.abs(found).astype(rough, copy=False) + products
    bound_bias = 0.0
    if bias is not None:
        added = np.where(allowed, bias, 0).astype(wide)
        found = found + added
        bound_bias = float(np.abs(added[np.isfinite(added)]).max(initial=0))
        size = size + np.abs(added).astype(rough if bound_bias < SQUARES_FIT else wide)
    unclear: Array | None = None
    if bound + bound_bias > largest:
        reached = np.abs(q0) @ np.abs(k0).swapaxes(-1, -2)
        reached = reached.reshape(*lead, H, L, S) * strength
        reached = reached + np.abs(q0).max(axis=-1, initial=0).reshape(*lead, H, L, 1) * abs(factor)
        if bias is not None:
            reached = reached + np.where(np.isfinite(added), np.abs(added), 0)
        unclear = (np.where(allowed, reached, 0) > largest).any(axis=-1)
    if k_infinite is not None:
        # A query that is nothing once it is scaled, times infinity, is NaN or not by the order of products.
        nothing = ((q0 != 0) & (np.abs(q0) * min(1.0, abs(float(factor))) < tiny)).astype(np.float32)
        meets = (nothing @ k_infinite.swapaxes(-1, -2)).reshape(*lead, H, L, S) > 0
        rows = (meets & allowed).any(axis=-1)
        unclear = rows if unclear is None else unclear | rows
    if biggest_k * tiny * D * strength > eps * eps:
        # Products and scaled queries below all normal numbers are lost, and each costs as much.
        lost = tiny * (np.abs(k0).sum(axis=-1) + D * strength) / eps
        size = size + np.repeat(lost, group, axis=-2)[..., None, :]
    size = np.where(allowed & np.isfinite(size), size, 0)
    return Scores(np.where(allowed, found, -np.inf), size, unclear)


def attention(
    query: Array,
    key: Array,
    value: Array,
    allowed: Array,
    *,
    dtype: np.dtype,
    bias: Array | None,
    scale: float | None,
    softcap: float | None,
    sinks: Array | None,
    keep: Array | None = None,
    share_kept: float = 1.0,
    weight_error: float = 0.0,
) -> Answer:
    """Arrays ``(*lead, H, L, D)``, ``(*lead, K, S, D)``, ``(*lead, K, S, E)`` that hold numbers of `dtype`.

    weight_error: by what share of itself a weight may be off where it meets the values.
    `allowed` is ``(*lead, H, L, S)`` with -inf in the bias already out of it; `bias` is broadcast to it, and
    with `sinks` in `dtype`, as the contract has them read.
    """
    wide, limits = wide_type(dtype), np.finfo(dtype)
    eps, tiny = float(limits.eps), float(limits.tiny)
    *lead, H, L, _ = query.shape
    K, S, E = value.shape[-3:]
    group = H // max(K, 1)
    found, size, unclear = scores(query, key, allowed, dtype=dtype, bias=bias, scale=scale, softcap=softcap)
    v = value.astype(wide)
    v_finite = np.isfinite(v)
    v0 = v if v_finite.all() else np.where(v_finite, v, 0)
    # As of scores.
    rough = size.dtype.type if float(np.abs(v0).max(initial=0)) < SQUARES_FIT else wide

    top = found.max(axis=-1, initial=-np.inf)
    sink = None
    if sinks is not None:
        sink = sinks.astype(wide)[:, None]
        top = np.maximum(top, sink)  # NaN wins
    read = allowed.any(axis=-1)
    base = np.where(read & (top != -np.inf), top, 0)
    raised = np.exp(found - base[..., None])
    of_sink: Any = 0 if sink is None else np.exp(sink - base)
    total = raised.sum(axis=-1) + of_sink
    share = raised / np.where(total == 0, 1, total)[..., None]
    # Exact, too, where the sum is near 1: its largest term, which is 1, is left out.
    terms = np.concatenate([raised, np.broadcast_to(of_sink, base.shape)[..., None]], axis=-1)
    terms.partition(S, axis=-1)  # NaN is the largest
    lse = base + np.log1p(terms[..., :S].sum(axis=-1) + (terms[..., S] - 1))
    lse = np.where(read, lse, -np.inf if sink is None else sink)
    share = np.where(allowed, share, 0)
    all_lost = read & (found == -np.inf).all(axis=-1)  # allowed keys of score -inf: 0 / 0
    if all_lost.any():
        unclear = all_lost if unclear is None else unclear | all_lost
    nan_rows = read & np.isnan(total)

    weights = share
    if keep is not None:
        weights = share * keep / wide(share_kept)
    finite_weights = np.where(nan_rows[..., None], 0, weights) if nan_rows.any() else weights
    nonfinite_out = None
    if v0 is not v:
        reads = allowed.reshape(*lead, K, group * L, S).astype(np.float32) @ (~v_finite).astype(np.float32)
        nonfinite_out = reads.reshape(*lead, H, L, E) > 0

    def mean(w: Array, rows: Array) -> Array:
        return (w.reshape(*lead, K, group * L, S) @ rows).reshape(*lead, H, L, E)

    out = mean(finite_weights, v0)
    if nan_rows.any():
        out = np.where(nan_rows[..., None], np.nan, out)
    magnitude = np.abs(v0).astype(rough, copy=False)
    shares = np.where(nan_rows[..., None], 0, share).astype(rough, copy=False)
    wander = (shares * size).sum(axis=-1)
    if sink is not None:
        finite_sink = np.where(np.isfinite(sink), np.abs(sink), 0)
        wander = wander + np.where(read, of_sink / np.where(total == 0, 1, total), 0) * finite_sink
        wander = np.where(np.isfinite(wander), wander, 0).astype(rough, copy=False)
    heavy = finite_weights.astype(rough, copy=False)
    moved = heavy * (1 + size + wander[..., None])
    out_reach, weights_reach = mean(moved + heavy * (weight_error / (ROUNDINGS * eps)), magnitude), moved
    lse_reach = np.where(read, 1 + wander, 0) + np.where(np.isfinite(lse), np.abs(lse), 0)

    # A weight below all normal numbers is 0 in kernels: at most as much of each value is lost.
    lost = magnitude.sum(axis=-2)[..., None, :] * (tiny / (ROUNDINGS * eps * share_kept))
    out_reach = out_reach + np.repeat(lost, group, axis=-3)
    # So it is of the weights themselves: each budget has room for that where their share is 1.
    weights_reach = weights_reach + tiny * (1 / share_kept - 1) / (ROUNDINGS * eps)
    worst = ROUNDINGS * eps * size.max(axis=-1, initial=0)
    unclear_out, unclear_weights = None, unclear
    if float(worst.max(initial=0)) > FIRST_ORDER:
        wild = worst > FIRST_ORDER
        # The lse of a row moves by no more than the score that moves most.
        lse_reach = np.where(wild, lse_reach + worst / (ROUNDINGS * eps), lse_reach)
        unclear_weights = wild if unclear is None else unclear | wild
    if unclear_weights is not None:
        rows = unclear_weights[..., None]
        unclear_out = np.broadcast_to(rows, out.shape)
        unclear_weights = np.broadcast_to(rows, weights.shape)
    return Answer(
        out, lse, weights, out_reach, lse_reach, weights_reach, unclear_out, unclear, unclear_weights,
        nonfinite_out,
    )  # fmt: skip
