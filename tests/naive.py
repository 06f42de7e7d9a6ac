"""Attention by its definition, as the oracle of the tests.

`attention` loops over batch items, heads and query rows with plain loops and computes in extended
precision (``np.longdouble``): some rows at a time where all numbers are finite, else each row alone, which
touches only the keys that it may attend to. `formula` is
what a NumPy user would write in the arrays' own precision: it sets the error budget. `gradients` and
`gradient_formula` are the same two for what `fastattn.attention_backward` computes.

Nothing here imports the package under test, and the mask rules are spelled out a second time.

Letters: ``*lead`` batch axes, ``H`` query heads, ``K`` key/value heads, ``L`` queries, ``S`` keys,
``D`` head_dim, ``E`` value head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray
WIDE = np.longdouble


@dataclass(frozen=True)
class Answer:
    """The exact results, and for each of their elements how far one rounding of a score can move it.

    ``*_reach`` are first-order condition numbers in absolute terms: an algorithm that rounds every
    intermediate value once with relative error ``u`` moves an element by about ``u * reach``.
    """

    out: Array  #: ``(*lead, H, L, E)``
    lse: Array  #: ``(*lead, H, L)``
    weights: Array  #: ``(*lead, H, L, S)``
    out_reach: Array
    lse_reach: Array
    weights_reach: Array


@dataclass(frozen=True)
class Baseline:
    """The same three results from the plain formula in the arrays' own precision."""

    out: Array
    lse: Array
    weights: Array


def allowed_keys(
    lead: tuple[int, ...],
    num_heads: int,
    len_q: int,
    len_k: int,
    *,
    mask: Any = None,
    bias: Any = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Any = None,
) -> Array:
    """Bool array ``(*lead, H, L, S)``: True where every rule that is present allows the key."""
    i = np.arange(len_q)[:, None]
    j = np.arange(len_k)[None, :]
    lengths = np.broadcast_to(np.asarray(len_k if key_lengths is None else key_lengths), lead)
    lengths = lengths.astype(np.int64)[..., None, None, None]
    allowed = np.ones((*lead, num_heads, len_q, len_k), dtype=bool)
    allowed &= j < lengths
    if mask is not None:
        allowed &= np.asarray(mask) != 0
    if bias is not None:
        allowed &= ~(np.asarray(bias) == -np.inf)
    if causal is True or causal == "top_left":
        allowed &= j <= i
    elif causal == "bottom_right":
        allowed &= j <= i + lengths - len_q
    if window is not None:
        left, right = window
        centre = i if causal is True or causal == "top_left" else i + lengths - len_q
        if left is not None:
            allowed &= j >= centre - left
        if right is not None:
            allowed &= j <= centre + right
    return allowed


def neighborhood(
    shape: tuple[int, ...], kernel: tuple[int, ...], dilation: tuple[int, ...], causal: tuple[bool, ...]
) -> Array:
    """Bool ``(n, n)`` for the n tokens of a layout in C order: neighborhood attention by its definition.

    Along an axis the coordinates a multiple of the dilation away are listed. Of this list a token has the
    kernel's number of entries, half of them before its own, or the first or last ones where there are not so
    many on one side; a causal axis has those up to its own, as many as there are.
    """
    allowed = np.zeros(shape * 2, dtype=bool)
    for token in np.ndindex(shape):
        near = []
        for size, at, n, step, ends_here in zip(shape, token, kernel, dilation, causal, strict=True):
            group = list(range(at % step, size, step))
            own = group.index(at)
            if ends_here:
                near.append(group[: own + 1][-n:])
            elif own < n // 2:
                near.append(group[:n])
            else:
                near.append(group[own - n // 2 :][:n] if own - n // 2 + n <= len(group) else group[-n:])
        allowed[(*token, *np.ix_(*near))] = True
    n_tokens = int(np.prod(shape))
    return allowed.reshape(n_tokens, n_tokens)


def kept_weights(shape: tuple[int, ...], p: float, seed: int) -> tuple[Array, float]:
    """Which weights ``(*lead, H, L, S)`` dropout keeps, and what it divides them by."""
    *rows, len_k = shape
    threshold, n = round(65536 * p), -(-len_k // 16)
    if not threshold:
        return np.broadcast_to(True, shape), 1.0
    raw = np.random.Philox(key=seed).random_raw(int(np.prod(rows)) * n * 4)
    keep = raw.astype("<u8").view("<u2").reshape(*rows, n * 16)[..., :len_k] >= threshold
    return keep, 1 - threshold / 65536


@dataclass(frozen=True)
class _Parts:
    """The operands with every leading axis broadcast and the heads axis in third place from the end."""

    query: Array
    key: Array
    value: Array
    allowed: Array
    bias: Array | None
    single_head: bool

    @property
    def lead(self) -> tuple[int, ...]:
        return self.query.shape[:-3]


def _parts(query: Any, key: Any, value: Any, bias: Any, layout: str, rules: dict[str, Any]) -> _Parts:
    query, key, value = (np.asarray(array) for array in (query, key, value))
    single_head = query.ndim == 2
    if single_head:
        query, key, value = query[None], key[None], value[None]
    elif layout == "bshd":
        query, key, value = (np.swapaxes(array, -3, -2) for array in (query, key, value))
    lead = np.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    query, key, value = (np.broadcast_to(a, lead + a.shape[-3:]) for a in (query, key, value))
    num_heads, len_q, len_k = query.shape[-3], query.shape[-2], key.shape[-2]
    allowed = allowed_keys(lead, num_heads, len_q, len_k, bias=bias, **rules)
    if bias is not None:
        bias = np.broadcast_to(np.asarray(bias), allowed.shape)
    return _Parts(query, key, value, allowed, bias, single_head)


#: Rows of finite numbers that are worked on together.
TOGETHER = 48


def _some_rows(allowed: Array, *arrays: Array) -> Iterator[tuple[Array, Array, Array]]:
    """Of a head: rows that have a key, the keys that any of them reads, and which of these each reads."""
    height = TOGETHER if all(np.isfinite(array.astype(WIDE)).all() for array in arrays) else 1
    rows = np.flatnonzero(allowed.any(axis=-1))
    for start in range(0, len(rows), height):
        some = rows[start : start + height]
        read = np.flatnonzero(allowed[some].any(axis=0))
        yield some, read, allowed[np.ix_(some, read)]


@np.errstate(invalid="ignore", over="ignore")
def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    layout: str = "bhsd",
    dropout: float = 0.0,
    seed: int = 0,
    score_mod: Any = None,
) -> Answer:
    """The definition in extended precision. ``mask`` is an array; the rest is as in the contract.

    ``score_mod(score, b, h, q_idx, kv_idx)`` must not amplify a score's error.
    """
    rules = {"mask": mask, "causal": causal, "window": window, "key_lengths": key_lengths}
    parts = _parts(query, key, value, bias, layout, rules)
    lead, (num_heads, len_q, head_dim) = parts.lead, parts.query.shape[-3:]
    num_kv_heads, len_k, value_dim = parts.value.shape[-3:]
    factor = WIDE(1) / np.sqrt(WIDE(head_dim)) if scale is None else WIDE(scale)
    keep, share_kept = kept_weights(parts.allowed.shape, dropout, seed)

    rows = (*lead, num_heads, len_q)
    out = np.zeros((*rows, value_dim), WIDE)
    lse = np.full(rows, -np.inf, WIDE)
    weights = np.zeros((*rows, len_k), WIDE)
    out_reach, lse_reach, weights_reach = (np.zeros(array.shape) for array in (out, lse, weights))

    for place in np.ndindex(*lead, num_heads):
        *item, head = place
        kv_head = (*item, head // (num_heads // num_kv_heads))
        queries, keys, values = parts.query[place], parts.key[kv_head], parts.value[kv_head]
        sink = None if sinks is None else WIDE(np.asarray(sinks)[head])
        if sink is not None:  # of rows without keys
            lse[place], lse_reach[place] = sink, abs(float(sink))
        for rows, read, allowed in _some_rows(parts.allowed[place], queries, keys, values):
            q, k, v = queries[rows].astype(WIDE), keys[read].astype(WIDE), values[read].astype(WIDE)
            scores = factor * (q @ k.T)
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            size = np.abs(scores) + np.abs(factor) * np.sqrt(q**2 @ (k**2).T)
            if score_mod is not None:
                b = int(np.ravel_multi_index(item, lead)) if lead else 0
                for i, j in np.argwhere(allowed):
                    scores[i, j] = score_mod(scores[i, j], b, head, int(rows[i]), int(read[j]))
                size = size + np.abs(scores)
            if parts.bias is not None:
                added = parts.bias[place][np.ix_(rows, read)].astype(WIDE)
                scores = scores + added
                size = size + np.abs(added)
            scores = np.where(allowed, scores, -np.inf)
            if sink is not None:
                scores = np.pad(scores, ((0, 0), (0, 1)), constant_values=sink)
                size = np.pad(size, ((0, 0), (0, 1)), constant_values=np.abs(sink))
            seen = np.pad(allowed, ((0, 0), (0, scores.shape[1] - read.size)), constant_values=True)
            size = np.where(seen & ~np.isinf(size), size, 0)  # an infinite score is exact
            top = scores.max(axis=-1, keepdims=True)
            raised = np.where(seen, np.exp(scores - top), 0)
            share = np.where(seen, raised / raised.sum(axis=-1, keepdims=True), 0)
            rising = np.sort(raised)  # NaN is the largest
            # Exact where the sum is near 1.
            sums = top[:, 0] + np.log1p(rising[:, :-1].sum(axis=-1) + (rising[:, -1] - 1))
            wander = (share * size).sum(axis=-1, keepdims=True).astype(float)
            here = np.ix_(rows, read)
            weight = share[:, : read.size] * keep[place][here] / share_kept
            size = size[:, : read.size]
            lse[place][rows] = sums
            lse_reach[place][rows] = 1 + wander[:, 0] + np.abs(sums)
            out[place][rows] = weight @ v
            weights[place][here] = weight
            mass = (weight @ np.abs(v)).astype(float)
            out_reach[place][rows] = (weight * (1 + size)) @ np.abs(v) + wander * mass
            weights_reach[place][here] = np.where(allowed, weight * (1 + size + wander), 0)

    results = [out, lse, weights, out_reach, lse_reach, weights_reach]
    if parts.single_head:
        results = [array[0] for array in results]
    elif layout == "bshd":
        results[0], results[3] = np.swapaxes(out, -3, -2), np.swapaxes(out_reach, -3, -2)
    return Answer(*results)


@dataclass(frozen=True)
class _PlainScores:
    """Whole matrices of every query head, in the arrays' own precision."""

    dtype: Any
    query: Array
    key: Array  #: a copy for each query head, and so is `value`
    value: Array
    factor: Any  #: the scale
    capped: Array  #: the scores before score_mod, bias and masks
    scores: Array  #: with all three


def _plain_scores(parts: _Parts, scale: float | None, softcap: float | None, score_mod: Any) -> _PlainScores:
    dtype = np.result_type(parts.query, parts.key, parts.value).newbyteorder("=").type
    group = parts.query.shape[-3] // max(parts.key.shape[-3], 1)
    q = parts.query.astype(dtype)
    k, v = (np.repeat(array.astype(dtype), group, axis=-3) for array in (parts.key, parts.value))
    factor = dtype(1 / np.sqrt(q.shape[-1]) if scale is None else scale)

    capped = (q @ np.swapaxes(k, -1, -2)) * factor
    if softcap is not None:
        capped = dtype(softcap) * np.tanh(capped / dtype(softcap))
    scores = capped
    if score_mod is not None:
        planes = scores.reshape(-1, *scores.shape[-3:]).copy()
        for place in np.ndindex(*planes.shape):
            planes[place] = score_mod(planes[place], *place)
        scores = planes.reshape(scores.shape)
    if parts.bias is not None:
        scores = scores + np.where(parts.allowed, parts.bias, 0).astype(dtype)
    return _PlainScores(dtype, q, k, v, factor, capped, np.where(parts.allowed, scores, dtype(-np.inf)))


def _added_up(left: Array, right: Array) -> Array:
    """``left @ right``, a term after the other."""
    total = np.zeros_like(left[..., :1] @ right[..., :1, :]) if left.shape[-1] else left @ right
    for j in range(left.shape[-1]):
        total = total + left[..., j, None] * right[..., None, j, :]
    return total


def formula(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    layout: str = "bhsd",
    dropout: float = 0.0,
    seed: int = 0,
    score_mod: Any = None,
    in_order: bool = False,
) -> Baseline:
    """What a NumPy user writes: whole score matrices in the arrays' own precision, no blocking.

    `in_order`: the keys of a row are added one after the other, as a loop does it, not as BLAS does.
    """
    rules = {"mask": mask, "causal": causal, "window": window, "key_lengths": key_lengths}
    parts = _parts(query, key, value, bias, layout, rules)
    plain = _plain_scores(parts, scale, softcap, score_mod)
    dtype, v, scores = plain.dtype, plain.value, plain.scores
    with np.errstate(invalid="ignore", divide="ignore"):
        top = scores.max(axis=-1, initial=-np.inf, keepdims=True)
        if sinks is not None:
            sink = np.asarray(sinks).astype(dtype)[:, None, None]
            top = np.maximum(top, sink)
        safe_top = np.where(np.isneginf(top), dtype(0), top)
        raised = np.exp(scores - safe_top)
        total = (
            _added_up(raised, np.ones((raised.shape[-1], 1), dtype))
            if in_order
            else raised.sum(-1)[..., None]
        )
        if sinks is not None:
            total = total + np.exp(sink - safe_top)
        lse = (safe_top + np.log(total))[..., 0]
        keep, share_kept = kept_weights(raised.shape, dropout, seed)
        raised = raised * keep / dtype(share_kept)
        weights = np.where(total == 0, dtype(0), raised / total)
        out = np.where(total == 0, dtype(0), (_added_up(raised, v) if in_order else raised @ v) / total)
    if parts.single_head:
        return Baseline(out[0], lse[0], weights[0])
    return Baseline(np.swapaxes(out, -3, -2) if layout == "bshd" else out, lse, weights)


@dataclass(frozen=True)
class Gradients:
    """One number for each element of the arguments; None for those that are not given."""

    query: Array
    key: Array
    value: Array
    bias: Array | None
    sinks: Array | None


def _summed_like(array: Array, argument: Any) -> Array:
    """Sums over the axes along which `argument` is broadcast to the shape of `array`."""
    shape = np.shape(argument)
    axes = tuple(range(array.ndim - len(shape)))
    axes += tuple(a for a, n in enumerate(shape, len(axes)) if n == 1 and array.shape[a] != 1)
    return array.sum(axis=axes, keepdims=True).reshape(shape)


def _as_given(found: Gradients, parts: _Parts, layout: str, arguments: tuple[Any, ...]) -> Gradients:
    """Gradients of whole ``(*lead, heads, length, dim)`` arrays as those of the caller's."""

    def placed(array: Array) -> Array:
        if parts.single_head:
            return array[0]
        return np.swapaxes(array, -3, -2) if layout == "bshd" else array

    query, key, value, bias, sinks = arguments
    return Gradients(
        _summed_like(placed(found.query), query),
        _summed_like(placed(found.key), key),
        _summed_like(placed(found.value), value),
        None if bias is None else _summed_like(found.bias, bias),
        None if sinks is None else found.sinks,
    )


def _with_heads_third(array: Any, parts: _Parts, layout: str) -> Array:
    """An output, or a gradient of one, as ``(*lead, H, L, E)``."""
    array = np.asarray(array)
    if parts.single_head:
        return array[None]
    return np.swapaxes(array, -3, -2) if layout == "bshd" else array


@np.errstate(invalid="ignore", over="ignore")
def gradients(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    *,
    grad_lse: Any = None,
    mask: Any = None,
    bias: Any = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    layout: str = "bhsd",
    dropout: float = 0.0,
    seed: int = 0,
    score_mod: Any = None,
    score_grad: Any = None,
) -> tuple[Gradients, Gradients]:
    """The definition in extended precision, and the reach of a rounding as in `Answer`.

    ``score_grad`` is the derivative of ``score_mod``, of the same arguments. It and its own derivative must
    be at most 1.

    With ``m`` the size of what is rounded on the way to a score and to its row's lse, a weight moves by
    ``u * (1 + m)`` of itself, and ``dS = P * (dP - delta)`` moves by that and by ``P`` times the magnitudes
    that are summed in ``dP`` and ``delta``. Every gradient is a sum of products with one of these.
    """
    rules = {"mask": mask, "causal": causal, "window": window, "key_lengths": key_lengths}
    parts = _parts(query, key, value, bias, layout, rules)
    options = {"bias": bias, "scale": scale, "softcap": softcap, "sinks": sinks, "layout": layout} | rules
    options["score_mod"] = score_mod
    forward = attention(query, key, value, dropout=dropout, seed=seed, **options)
    undropped = attention(query, key, value, **options) if dropout else forward
    keep, share_kept = kept_weights(parts.allowed.shape, dropout, seed)
    lead, (num_heads, len_q, head_dim) = parts.lead, parts.query.shape[-3:]
    num_kv_heads = parts.value.shape[-3]
    factor = WIDE(1) / np.sqrt(WIDE(head_dim)) if scale is None else WIDE(scale)
    out, out_reach, grad_out = (
        _with_heads_third(array, parts, layout) for array in (forward.out, forward.out_reach, grad_out)
    )
    rows = (*lead, num_heads, len_q)
    lse, lse_reach, weights = (
        array[None] if parts.single_head else array
        for array in (forward.lse, forward.lse_reach, undropped.weights)
    )
    grad_lse = np.zeros(rows) if grad_lse is None else np.asarray(grad_lse).reshape(rows)

    def zeros() -> Gradients:
        shapes = parts.query.shape, parts.key.shape, parts.value.shape, parts.allowed.shape, (num_heads,)
        return Gradients(*(np.zeros(shape, WIDE) for shape in shapes))

    exact, reach = zeros(), zeros()
    for place in np.ndindex(*lead, num_heads):
        *item, head = place
        kv_head = (*item, head // (num_heads // num_kv_heads))
        of_head = parts.query[place], grad_out[place], parts.key[kv_head], parts.value[kv_head]
        for rows, read, allowed in _some_rows(parts.allowed[place], *of_head):
            here = np.ix_(rows, read)
            q, arriving = (array[rows].astype(WIDE) for array in of_head[:2])
            k, v = (array[read].astype(WIDE) for array in of_head[2:])
            row_out, row_reach, of_lse, row_lse_reach = (
                array[place][rows].reshape(len(rows), -1)
                for array in (out, out_reach, grad_lse.astype(WIDE), lse_reach)
            )

            raw = factor * (q @ k.T)
            products = np.abs(factor) * np.sqrt(q**2 @ (k**2).T)
            scores = raw if softcap is None else softcap * np.tanh(raw / softcap)
            added = 0 if parts.bias is None else np.abs(parts.bias[place][here].astype(WIDE))
            slopes = None
            if score_mod is not None:
                b = int(np.ravel_multi_index(item, lead)) if lead else 0
                before, scores, slopes = scores, scores.copy(), np.zeros_like(scores)
                for i, j in np.argwhere(allowed):
                    at = before[i, j], b, head, int(rows[i]), int(read[j])
                    scores[i, j], slopes[i, j] = score_mod(*at), score_grad(*at)
                products = products + np.abs(before)
            moves = np.where(allowed, 1 + np.abs(scores) + products + added + row_lse_reach, 0)
            weight, kept = weights[place][here], keep[place][here] / share_kept

            # Added up as ``arriving @ v.T`` is: of one key the difference is 0.
            delta = (arriving[:, None] @ row_out[:, :, None])[:, 0] - of_lse
            delta_size = np.abs(arriving) * (np.abs(row_out) + row_reach)
            delta_size = delta_size.sum(axis=-1, keepdims=True) + np.abs(of_lse)
            change = weight * (kept * (arriving @ v.T) - delta)
            change_size = moves * np.abs(change) + weight * (
                kept * (np.abs(arriving) @ np.abs(v).T) + delta_size
            )
            change, change_size = (np.where(allowed, x, 0) for x in (change, change_size))
            exact.bias[place][here], reach.bias[place][here] = change, change_size
            if sinks is not None:
                sink = WIDE(np.asarray(sinks)[head])
                share = np.exp(sink - lse[place][rows])[:, None]
                moved = (1 + np.abs(sink) + row_lse_reach) * np.abs(delta)
                exact.sinks[head] -= (share * delta).sum()
                reach.sinks[head] += np.where(share == 0, 0, share * (moved + delta_size)).sum()
            if slopes is not None:
                change_size = change_size * np.abs(slopes) + np.abs(change) * (np.abs(slopes) + products)
                change, scores = change * slopes, before
            if softcap is not None:
                slope = np.cosh(raw / softcap) ** -2
                ratio = np.abs(scores / softcap)
                of_slope = slope + 2 * ratio * (ratio + slope * (np.abs(raw) + products) / softcap)
                change_size = change_size * slope + np.abs(change) * of_slope
                change = change * slope
            change, change_size = factor * change, np.abs(factor) * change_size
            exact.query[place][rows] = change @ k
            reach.query[place][rows] = change_size @ np.abs(k)
            exact.key[kv_head][read] += change.T @ q
            reach.key[kv_head][read] += change_size.T @ np.abs(q)
            exact.value[kv_head][read] += (kept * weight).T @ arriving
            reach.value[kv_head][read] += (moves * kept * weight).T @ np.abs(arriving)

    given = (query, key, value, bias, sinks)
    return _as_given(exact, parts, layout, given), _as_given(reach, parts, layout, given)


@np.errstate(invalid="ignore", over="ignore")
def gradient_formula(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    *,
    grad_lse: Any = None,
    mask: Any = None,
    bias: Any = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    layout: str = "bhsd",
    dropout: float = 0.0,
    seed: int = 0,
    score_mod: Any = None,
    score_grad: Any = None,
) -> Gradients:
    """What a NumPy user writes from the outputs of `formula`: whole matrices in the arrays' own precision."""
    rules = {"mask": mask, "causal": causal, "window": window, "key_lengths": key_lengths}
    parts = _parts(query, key, value, bias, layout, rules)
    options = {"bias": bias, "scale": scale, "softcap": softcap, "sinks": sinks, "layout": layout} | rules
    options["score_mod"] = score_mod
    forward = formula(query, key, value, dropout=dropout, seed=seed, **options)
    plain = _plain_scores(parts, scale, softcap, score_mod)
    dtype = plain.dtype
    out, arriving = (_with_heads_third(array, parts, layout) for array in (forward.out, grad_out))
    arriving = arriving.astype(dtype)
    lse = forward.lse[None] if parts.single_head else forward.lse
    read = parts.allowed.any(axis=-1)

    delta = (arriving * out).sum(axis=-1)
    if grad_lse is not None:
        delta = delta - np.asarray(grad_lse, dtype).reshape(delta.shape)
    weights = np.where(parts.allowed, np.exp(plain.scores - np.where(read, lse, 0)[..., None]), dtype(0))
    keep, share_kept = kept_weights(weights.shape, dropout, seed)
    kept = keep / dtype(share_kept)
    change = weights * (kept * (arriving @ np.swapaxes(plain.value, -1, -2)) - delta[..., None])
    change = of_bias = np.where(parts.allowed, change, dtype(0))
    if score_mod is not None:
        before = plain.capped.reshape(-1, *change.shape[-3:])
        slopes = [score_grad(before[place], *place) for place in np.ndindex(*before.shape)]
        change = np.where(parts.allowed, change * np.asarray(slopes, dtype).reshape(change.shape), dtype(0))
    if softcap is not None:
        change = change * (1 - (plain.capped / dtype(softcap)) ** 2)
    change = change * plain.factor

    def of_groups(array: Array) -> Array:
        *before, num_heads, length, dim = array.shape
        kv_heads = parts.key.shape[-3]
        group = num_heads // max(kv_heads, 1)
        return array.reshape(*before, kv_heads, group, length, dim).sum(axis=-3)

    of_sinks = np.zeros(0)
    if sinks is not None:
        sink = np.asarray(sinks).astype(dtype)[:, None]
        terms = np.where(read, np.exp(sink - np.where(read, lse, 0)) * delta, dtype(0))
        of_sinks = -terms.sum(axis=(*range(terms.ndim - 2), -1))
    found = Gradients(
        change @ plain.key,
        of_groups(np.swapaxes(change, -1, -2) @ plain.query),
        of_groups(np.swapaxes(kept * weights, -1, -2) @ arriving),
        of_bias,
        of_sinks,
    )
    return _as_given(found, parts, layout, (query, key, value, bias, sinks))
