"""Linear attention in NumPy: features and sums of a chunk of rows at a time, products by BLAS."""

from __future__ import annotations

from collections.abc import Iterator
from math import log, prod
from typing import Any

import numpy as np

from fastattn._call.linear import (
    LEAST,
    MOST,
    LinearCall,
    LinearState,
    RandomFeatures,
    broadcast,
    each,
    elu_plus_one,
    shared,
)
from fastattn._call.problem import FLOAT32, FLOAT64

#: Rows worked on together. A row takes C (M + E) multiply-adds for scores within a causal chunk, and 2 M E
#: for sums: as many where C = M = E. And 64**3 is the largest product that OpenBLAS computes on one thread:
#: on busy cores several take a thousand times as long to meet. Causal, 8 heads of 4096 by 64, one thread: 99,
#: 150, 159 and 206 ms for 32, 64, 128 and 256; without causal 63, 39, 34 and 39 (Xeon 2.5 GHz, AVX-512, with
#: busy neighbours; 2026-11-23).
_CHUNK = 64
#: Elements of one array of a chunk, over the items worked on together: some hundred kilobytes.
_BLOCK = 1 << 17
#: How far below the greatest of a chunk the logarithms of its first key's features may be: those of a row
#: that sees only this key are above the smallest float32 by a factor of e**47.
_MAX_RANGE = 40.0
#: What values are multiplied by where sums of them in float64 overflow.
_UNIT = 2.0**-512
#: The largest logarithm that exponentials are taken of, and of factors that are taken out.
_MAX_LOG = 700.0
#: The scale of a feature that no key has yet: below that of any key, of random features and of others.
_NO_SCALE, _NONE = -1e30, -1e300


def attend(call: LinearCall) -> LinearState | None:
    """Fills ``call.out`` and ``call.lost``; returns the state if asked to."""
    states, kind = [], _ScaledFeatures if isinstance(call.feature_map, RandomFeatures) else _Features
    with np.errstate(all="ignore"):  # NaN and inf pass through, and padding is computed too
        for items in _blocks(call):
            block = _Block(call, items, kind)
            block.attend(call.out[items], call.lost[items])
            if call.return_state:
                states.append(block.features.state(block.lead))
    if len(states) <= 1:
        return states[0] if states else None
    key_value_sums, key_sums, scales = zip(*states, strict=True)
    whole = LinearState(*map(np.concatenate, (key_value_sums, key_sums)))
    return whole if scales[0] is None else whole._replace(log_scale=np.concatenate(scales))


def _blocks(call: LinearCall) -> Iterator[Any]:
    """Which items are worked on together: an index into the leading axes."""
    lead, (H, L, D), (S, E) = call.query.shape[:-3], call.query.shape[-3:], call.value.shape[-2:]
    if not lead:
        yield ()
        return
    elements = prod(lead[1:]) * H * min(_CHUNK, max(L, S)) * max(D, E)
    step = max(1, _BLOCK // max(1, elements))
    for start in range(0, max(1, lead[0]), step):
        yield slice(start, start + step)


class _Block:
    """Some items of a call."""

    def __init__(
        self, call: LinearCall, items: Any, kind: type[_Features], unit: float | None = None
    ) -> None:
        self.dtype, self.unit, self.causal = call.dtype, unit, call.causal
        self.query, self.key, self.value = call.query[items], call.key[items], call.value[items]
        self.lengths = None if call.lengths is None else call.lengths[items]
        self.lead = self.query.shape[:-3]
        self.heads = self.key.shape[-3]
        self.group = self.query.shape[-3] // self.heads if self.heads else 1
        S = self.key.shape[-2]
        self.least = self.most = S
        if self.lengths is None:  # what is shared by items is worked on once
            self.key, self.value = shared(self.key), shared(self.value)
            lead = np.broadcast_shapes(self.key.shape[:-3], self.value.shape[:-3])
        else:
            lead = self.lead
            self.least, self.most = int(self.lengths.min(initial=S)), int(self.lengths.max(initial=0))
        earlier = call.earlier
        if earlier is not None:
            lead, whole = self.lead, call.key.shape[:-3]
            earlier = each(
                earlier, lambda x, axes: np.broadcast_to(x, (*whole, *x.shape[-axes:]))[items].copy()
            )
            if unit is not None:
                earlier.key_value_sum[...] *= unit
        self.features = kind(self, call.feature_map, lead, earlier)

    def attend(self, out: np.ndarray, lost: np.ndarray) -> None:
        """Fills `out`; `lost` becomes True for rows to compute again."""
        (_attend_causal if self.causal else _attend_all)(self, out, lost)

    def keys(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """A chunk of keys, of values times the unit, both 0 in padding, and which keys are padding."""
        k, v = _chunk(self.key, start, stop, self.dtype), _chunk(self.value, start, stop, self.dtype)
        if self.unit is not None:
            v = v.astype(FLOAT64) * self.unit
        if self.lengths is None or stop <= self.least:
            return k, v, None
        hidden = (np.arange(start, stop) >= self.lengths[..., None])[..., None, :, None]
        return np.where(hidden, 0, k), np.where(hidden, 0, v), hidden

    def queries(self, start: int, stop: int) -> np.ndarray:
        """Features of a chunk of queries, ``(..., K, G, n, M)`` with ``G`` queries of a group."""
        return self.features.of_queries(_chunk(self.query, start, stop, self.dtype), self.group)


def _chunk(array: np.ndarray, start: int, stop: int, dtype: np.dtype) -> np.ndarray:
    """Rows in the dtype of the computation, packed: NumPy rounds products of strided ones in other ways."""
    rows = array[..., start:stop, :]
    width = rows.shape[-1] * rows.itemsize
    is_packed = rows.strides[-2:] == (width, rows.itemsize) and rows.flags.aligned
    if rows.dtype != dtype or not is_packed:
        return np.array(rows, dtype, order="C")
    rows.flags.writeable = False  # a feature map must not write to the caller's array
    return rows


def _attend_all(block: _Block, out: np.ndarray, lost: np.ndarray) -> None:
    """Every query reads every key."""
    features = block.features
    for start in range(0, block.most, _CHUNK):
        k, v, hidden = block.keys(start, min(start + _CHUNK, block.most))
        features.add(features.of_keys(k, hidden), v)
    sums = features.rounded()
    for start in range(0, out.shape[-2], _CHUNK):
        rows = out[..., start : start + _CHUNK, :]
        if sums is None:
            rows[...] = 0
        else:
            phi = block.queries(start, start + rows.shape[-2])
            _divide(phi @ sums[0], _denominators(phi, sums[1]), rows, lost[..., start : start + _CHUNK])


def _attend_causal(block: _Block, out: np.ndarray, lost: np.ndarray) -> None:
    """A query reads the keys up to its own: those of its chunk one by one, all before by their sums."""
    features, L = block.features, out.shape[-2]
    chunks = [(start, min(start + _CHUNK, L)) for start in range(0, L, _CHUNK)][::-1]
    while chunks:
        start, stop = chunks.pop()
        rows, stop_keys = out[..., start:stop, :], min(stop, block.most)
        if start < stop_keys:
            k, v, hidden = block.keys(start, stop)
            if not features.fits(k, hidden):
                middle = (start + stop) // 2
                chunks += [(middle, stop), (start, middle)]
                continue
            phi_k = features.of_keys(k, hidden)
        earlier = features.rounded()
        if start >= stop_keys and earlier is None:
            rows[...] = 0
            continue
        phi = block.queries(start, stop)
        numerator: Any = 0
        denominator: Any = 0
        if earlier is not None:
            numerator, denominator = phi @ earlier[0], _denominators(phi, earlier[1])
        if start < stop_keys:
            scores = _lower(phi @ phi_k[..., None, :, :].swapaxes(-1, -2))
            numerator = numerator + _weighted(scores, v[..., None, :, :])
            denominator = denominator + scores.sum(axis=-1, dtype=FLOAT64)
            features.add(phi_k, v)
        _divide(numerator, denominator, rows, lost[..., start:stop])


def _lower(scores: np.ndarray) -> np.ndarray:
    """The scores ``(..., n, n)``, in place, with 0 for keys after a query, be they NaN or inf."""
    n = scores.shape[-1]
    bits = scores.view(f"u{scores.itemsize}")
    bits &= np.tril(np.full((n, n), ~np.uint64(0))).astype(bits.dtype)
    return scores


def _weighted(scores: np.ndarray, v: np.ndarray) -> np.ndarray:
    """``scores @ v``, in which NaN and inf of a value reach the rows from its own on alone."""
    product = scores @ v
    if np.isfinite(product.sum()):
        return product
    finite = np.isfinite(v)
    if finite.all():
        return product
    product = scores @ np.where(finite, v, 0)
    beyond = np.where(finite, 0, v)
    for j in np.flatnonzero(~finite.all(axis=(*range(v.ndim - 2), -1))).tolist():
        product[..., j:, :] += scores[..., j:, j, None] * beyond[..., j, None, :]
    return product


def _denominators(phi: np.ndarray, key_sum: np.ndarray) -> np.ndarray:
    return (phi.astype(FLOAT64, copy=False) @ key_sum[..., None])[..., 0]


def _divide(numerator: np.ndarray, denominator: np.ndarray, out: np.ndarray, lost: np.ndarray) -> None:
    """`out` becomes the quotient ``(..., H, n, E)``, 0 where both are 0. `lost` becomes True where a
    denominator is out of range or a result is nonfinite."""
    numerator = numerator.reshape(out.shape)
    denominator = denominator.reshape(*out.shape[:-1], 1)
    size = np.abs(denominator[..., 0])
    lost[...] = ~((size >= LEAST) & (size <= MOST))
    np.divide(numerator, denominator, out=out, casting="unsafe")
    if not denominator.all():
        np.copyto(out, 0, where=(denominator == 0) & (numerator == 0))
    lost |= ~np.isfinite(out).all(axis=-1)


# Rows that are computed again -------------------------------------------------------------------------


def attend_again(call: LinearCall, whole: LinearState | None, lost_sums: np.ndarray) -> LinearState | None:
    """Replaces lost rows of ``call.out``, and lost sums ``(*lead, K)`` of the state, by those of scaled
    features and values."""
    out, lost = call.out, call.lost
    scales: Any = None
    if whole is not None:
        scales = np.zeros(whole.key_sum.shape) if whole.log_scale is None else whole.log_scale
    if isinstance(call.feature_map, RandomFeatures):
        call = call._replace(dtype=FLOAT64)
    for items in np.ndindex(lost.shape[:-2]):  # one by one, as all items of a block decide where it is cut
        if not (lost[items].any() or (whole is not None and lost_sums[items].any())):
            continue
        rows, new = _attend_scaled(call, items, 1.0)
        if not (np.isfinite(rows).all() and np.isfinite(new.key_value_sum).all()):
            again, state = _attend_scaled(call, items, _UNIT)
            np.copyto(rows, again, where=~np.isfinite(rows))  # others lose no small numbers
            if np.isfinite(state.key_value_sum).all() and not np.isfinite(new.key_value_sum).all():
                new = state
        with np.errstate(all="ignore"):
            np.copyto(out[items], rows, where=lost[items][..., None], casting="unsafe")
        if whole is not None:
            is_lost = lost_sums[items][..., None]
            np.copyto(whole.key_value_sum[items], new.key_value_sum, where=is_lost[..., None])
            np.copyto(whole.key_sum[items], new.key_sum, where=is_lost)
            np.copyto(scales[items], new.log_scale, where=is_lost & (new.log_scale != _NONE))
    return whole if whole is None or not scales.any() else whole._replace(log_scale=scales)


def _attend_scaled(call: LinearCall, items: Any, unit: float) -> tuple[np.ndarray, Any]:
    """The results and the state of an item in float64, from scaled features and values times the unit."""
    rows = np.empty((*call.query[items].shape[:-1], call.value.shape[-1]))
    with np.errstate(all="ignore"):
        block = _Block(call, items, _ScaledFeatures, unit)
        block.attend(rows, np.empty(rows.shape[:-1], bool))
        # By rounding a mean of the largest number may be above it.
        limit = np.finfo(FLOAT64 if call.out.itemsize == 8 else FLOAT32).max * unit
        np.clip(rows, -limit, limit, out=rows, where=np.abs(rows) * (1 - 2.0**-40) <= limit)
        rows /= unit
        state: Any = block.features.state(block.lead)
        key_value_sum, key_sum, scale = state
        if np.isfinite(key_value_sum / unit).all():
            return rows, LinearState(key_value_sum / unit, key_sum, scale)
    return rows, LinearState(key_value_sum, key_sum * unit, scale - log(unit))


# Features ------------------------------------------------------------------------------------------


class _Features:
    """Features of chunks of rows, and the sums of those of keys."""

    def __init__(
        self, block: _Block, function: Any, lead: tuple[int, ...], earlier: LinearState | None
    ) -> None:
        self.function, self.lead = function, lead  #: the feature map; leading axes of the sums
        self.dtype = self.rows_dtype = block.dtype
        self.rows, self.value_dim = (block.heads, block.key.shape[-1]), block.value.shape[-1]
        self.sums = earlier  #: None: of no key yet

    def of(self, x: np.ndarray) -> np.ndarray:
        """What the function gives, checked."""
        phi = np.asarray(self.function(x))
        if phi.dtype.kind not in "biuf":
            raise TypeError(f"feature_map must give an array of numbers, got dtype {phi.dtype}")
        if phi.ndim != x.ndim or phi.shape[:-1] != x.shape[:-1]:
            expected = ", ".join(map(str, x.shape[:-1]))
            raise ValueError(f"feature_map must give ({expected}, M) for rows {x.shape}, got {phi.shape}")
        if self.sums is not None and self.sums.key_sum.shape[-1] != phi.shape[-1]:
            M = self.sums.key_sum.shape[-1]
            raise ValueError(f"feature_map gives {phi.shape[-1]} features, and had given {M} to earlier keys")
        return np.ascontiguousarray(phi, self.dtype)

    def fits(self, k: np.ndarray, hidden: np.ndarray | None) -> bool:
        """Whether a chunk of keys may be worked on at once where each query reads a part of it."""
        return True

    def of_keys(self, k: np.ndarray, hidden: np.ndarray | None) -> np.ndarray:
        """Features of a chunk of keys, 0 for hidden ones."""
        phi = self.of(k)
        return phi if hidden is None else np.where(hidden, 0, phi)

    def of_queries(self, x: np.ndarray, group: int) -> np.ndarray:
        """``(..., K, G, n, M)``, of rows ``(..., H, n, D)``."""
        return _grouped(self.of(x), group)

    def add(self, phi: np.ndarray, v: np.ndarray) -> None:
        sums = self.begun(phi.shape[-1])
        sums.key_value_sum[...] += phi.swapaxes(-1, -2) @ v
        sums.key_sum[...] += phi.sum(axis=-2, dtype=FLOAT64)

    def begun(self, M: int) -> LinearState:
        if self.sums is None:
            shape = (*self.lead, self.rows[0], M)
            self.sums = LinearState(np.zeros((*shape, self.value_dim)), np.zeros(shape), self.no_scale(shape))
        return self.sums

    def no_scale(self, shape: tuple[int, ...]) -> np.ndarray | None:
        return None

    def rounded(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The sums, with an axis for the queries of a group, as products take them; None without any key."""
        if self.sums is None:
            return None
        key_value_sum, key_sum, _ = self.sums
        return key_value_sum.astype(self.dtype, copy=False)[..., None, :, :], key_sum[..., None, :]

    def state(self, lead: tuple[int, ...]) -> LinearState:
        """The sums, of all items."""
        if self.sums is None:
            K, D = self.rows
            self.begun(self.of(np.zeros((K, 1, D), self.rows_dtype)).shape[-1])
        sums: Any = self.sums
        return broadcast(sums, lead)


class _ScaledFeatures(_Features):
    """Features relative to the greatest of all keys so far: random ones, and others that are out of range.

    A feature is ``a * exp(e)``, with ``a`` 1 for random features, and its size ``e + log|a|``. That of a key
    becomes ``a * exp(e - c)``, with ``c`` the greatest size of this feature, and that of a query
    ``a * exp(e + c - r)``, with ``r`` the greatest of its row, which is in numerator and denominator. A
    denominator is 1 at least, then, where all keys are read and no feature is negative. Where ``c`` grows the
    sums are scaled to it: to rounding, they do not depend on how the keys were cut.
    """

    def __init__(self, block: _Block, function: Any, *others: Any) -> None:
        super().__init__(block, function, *others)
        self.is_random = isinstance(function, RandomFeatures)
        if self.is_random:
            return
        self.dtype = FLOAT64
        if self.sums is not None:
            key_value_sum, key_sum, log_scale = self.sums
            # Sums that were given as they are may be out of range as well.
            size = np.abs(key_sum)
            is_far = (size > 0) & (size < np.inf) & ~((size >= LEAST) & (size <= MOST))
            shift = np.log(np.where(is_far, size, 1))
            scale = shift if log_scale is None else shift + log_scale
            is_none = (size == 0) & ~key_value_sum.any(axis=-1)
            factor = np.exp(-shift)
            self.sums = LinearState(
                key_value_sum * factor[..., None], key_sum * factor, np.where(is_none, _NONE, scale)
            )

    def no_scale(self, shape: tuple[int, ...]) -> np.ndarray | None:
        return np.full(shape, _NO_SCALE if self.is_random else _NONE)

    def of(self, x: np.ndarray) -> np.ndarray:
        return self.function.log(x) if self.is_random else super().of(x)

    def terms(self, x: np.ndarray, *, are_queries: bool = False) -> tuple[Any, np.ndarray, np.ndarray]:
        """Of each feature a, or None where it is 1; e; and the size."""
        if self.is_random:
            e = self.function.log(x, up_to_a_factor=are_queries)
            return None, e, e
        if self.function is elu_plus_one:
            x = x.astype(FLOAT64)
            a, e = 1 + np.maximum(x, 0), np.minimum(x, 0)
        else:
            a = self.of(x)
            e = np.zeros(a.shape)
        # Subnormal numbers are relative to a normal one; what is 0 has no size.
        size = e + np.where(a == 0, -np.inf, np.clip(np.log(np.abs(a)), -_MAX_LOG, _MAX_LOG))
        return a, e, size

    def fits(self, k: np.ndarray, hidden: np.ndarray | None) -> bool:
        if k.shape[-2] == 1:
            return True
        size = self.sizes(self.terms(k)[2], hidden)
        greatest = np.maximum(np.maximum.accumulate(size, axis=-2), self.scale(size)[..., None, :])
        ranges = greatest[..., -1:, :] - np.where(greatest > self.no_scale(()), greatest, np.inf)
        return not np.any(ranges > _MAX_RANGE)

    def of_keys(self, k: np.ndarray, hidden: np.ndarray | None) -> np.ndarray:
        a, e, size = self.terms(k)
        scale = self.scale(e)
        greatest = np.maximum(scale, self.sizes(size, hidden).max(axis=-2))
        sums: Any = self.sums
        factor = np.exp(scale - greatest)
        sums.key_value_sum[...] *= factor[..., None]
        sums.key_sum[...] *= factor
        sums.log_scale[...] = greatest
        phi = np.exp(np.minimum(e - greatest.astype(self.dtype)[..., None, :], _MAX_LOG))
        if a is not None:
            phi *= a
        return phi if hidden is None else np.where(hidden, 0, phi)

    def sizes(self, size: np.ndarray, hidden: np.ndarray | None) -> np.ndarray:
        """`size`, but -inf for hidden keys and for NaN and inf, so that these change no other feature."""
        is_seen = size < np.inf
        return np.where(is_seen if hidden is None else is_seen & ~hidden, size, -np.inf)

    def scale(self, features: np.ndarray) -> np.ndarray:
        scale: Any = self.begun(features.shape[-1]).log_scale
        return scale

    def of_queries(self, x: np.ndarray, group: int) -> np.ndarray:
        """Relative to the largest of each row, in differences from its exponent and scale."""
        a, e, size = self.terms(x, are_queries=True)
        e, size = _grouped(e, group), _grouped(size, group)
        c = self.scale(size).astype(self.dtype)
        c = np.broadcast_to(
            (c - c.max(axis=-1, keepdims=True, initial=-np.inf))[..., None, None, :], size.shape
        )
        at = np.argmax((size - size.max(axis=-1, keepdims=True)) + c, axis=-1)[..., None]
        top, top_e, top_c = (np.take_along_axis(array, at, axis=-1) for array in (size, e, c))
        has_size = top > -np.inf
        phi = np.exp(np.minimum((e - np.where(has_size, top_e, 0)) + (c - top_c), _MAX_LOG))
        if a is not None:
            a = _grouped(a, group)
            phi *= a / np.where(has_size, np.abs(np.take_along_axis(a, at, axis=-1)), 1)
        return phi


def _grouped(array: np.ndarray, group: int) -> np.ndarray:
    """``(..., H, n, M)`` as ``(..., K, G, n, M)``"""
    H, n, M = array.shape[-3:]
    return array.reshape(*array.shape[:-3], H // max(group, 1), group, n, M)
