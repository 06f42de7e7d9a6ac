"""`linear_attention`: weights that are products of features, not a softmax, in time linear in the length.

What keys add up to is a `LinearState`. The compiled kernels run calls with features ``elu(x) + 1``. Other
features, and all without the extension, are computed for `_CHUNK` rows of all heads at a time; the rest is
products of matrices by BLAS. Rows whose denominators are far from 1, or whose results are nonfinite, are
computed again, from features that are relative to the largest, as random features always are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import log, prod, sqrt
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np

from fastattn._call.arguments import (
    as_array,
    check_bool,
    check_key_lengths,
    check_number_dtype,
    check_seed,
    count,
)
from fastattn._call.normalize import as_inputs, naming_shapes
from fastattn._call.options import refusing
from fastattn._call.problem import FLOAT32, FLOAT64, MAX_DIM
from fastattn._call.storage import SWAPPED, storage_of
from fastattn._machine.device import host_array, in_library_of
from fastattn.backends.registry import load, thread_limit
from fastattn.masks.objects import broadcasts

if TYPE_CHECKING:
    from typing import TypeAlias

    from numpy.typing import ArrayLike

    FeatureMap: TypeAlias = "Literal['elu+1'] | Callable[[np.ndarray], ArrayLike]"

try:
    import fastattn.backends.cython.driver as driver
except ImportError:
    driver = None

#: Lanes to which the kernels pad features, of any instruction set.
_LANES = 16
#: Rows worked on together. Scores within a causal chunk take C (M + E) multiply-adds a row, and sums 2 M E:
#: as many where C = M = E. And 64**3 is the largest product that OpenBLAS does not share out among threads,
#: which on busy cores take a thousand times as long to meet. Causal, 8 heads of 4096 by 64, one thread: 99,
#: 150, 159 and 206 ms for 32, 64, 128 and 256; without causal 63, 39, 34 and 39 (Xeon 2.5 GHz, AVX-512, with
#: busy neighbours; 2026-11-23).
_CHUNK = 64
#: Elements of one array of a chunk, over the items worked on together: some hundred kilobytes.
_BLOCK = 1 << 17
#: How far below the greatest of a chunk the logarithms of its first key's features may be: those of a row
#: that sees only this key are above the smallest float32 by a factor of e**47.
_MAX_RANGE = 40.0
#: Denominators from products of features as they are: beyond, features or products may have left their range.
_LEAST, _MOST = 2.0**-40, 2.0**60
#: What values are multiplied by where sums of them in float64 overflow.
_UNIT = 2.0**-512
#: The largest logarithm that exponentials are taken of, and of factors that are taken out.
_MAX_LOG = 700.0
#: The scale of a feature that no key has yet: below that of any key, of random features and of others.
_NO_SCALE, _NONE = -1e30, -1e300


class LinearState(NamedTuple):
    """What the keys and values so far add up to: all that later queries need of them.

    Letters: ``...`` leading batch axes, ``K`` key/value heads, ``M`` features, ``E`` value head_dim; none of
    the axis ``K`` for arrays of two axes.

    Attributes
    ----------
    key_value_sum : ndarray, shape (..., K, M, E)
        ``sum_j phi(k_j) v_j``, float64.
    key_sum : ndarray, shape (..., K, M)
        ``sum_j phi(k_j)``, float64.
    log_scale : ndarray, shape (..., K, M), or None
        The sums are these times ``exp(log_scale)``, float64. Given with random features, and with others
        where the sum of a feature is too small or too large; None stands for 0.
    """

    key_value_sum: np.ndarray
    key_sum: np.ndarray
    log_scale: np.ndarray | None = None


@overload
def linear_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    feature_map: FeatureMap = ...,
    causal: bool = ...,
    key_lengths: ArrayLike | None = ...,
    state: LinearState | None = ...,
    return_state: Literal[False] = ...,
) -> np.ndarray: ...
@overload
def linear_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    feature_map: FeatureMap = ...,
    causal: bool = ...,
    key_lengths: ArrayLike | None = ...,
    state: LinearState | None = ...,
    return_state: Literal[True],
) -> tuple[np.ndarray, LinearState]: ...
@refusing
def linear_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    feature_map: FeatureMap = "elu+1",
    causal: bool = False,
    key_lengths: ArrayLike | None = None,
    state: LinearState | None = None,
    return_state: bool = False,
) -> np.ndarray | tuple[np.ndarray, LinearState]:
    """Attention whose weights are products of features of queries and keys, in time linear in the lengths.

    Letters: ``...`` any leading batch axes, ``H`` query heads, ``K`` key/value heads, ``L`` query length,
    ``S`` key length, ``D`` head_dim, ``E`` value head_dim, ``M`` features; ``i`` a query, ``j`` a key.

    Parameters
    ----------
    query : array_like, shape (..., H, L, D)
        Types and axes are those of `attention`: two axes stand for one head, the leading ones broadcast,
        16-bit arrays are computed in float32.
    key : array_like, shape (..., K, S, D)
        ``H % K == 0``: query head ``h`` reads key/value head ``h // (H // K)``.
    value : array_like, shape (..., K, S, E)
    feature_map : {"elu+1"} or callable, default "elu+1"
        ``"elu+1"`` is ``x + 1`` above 0 and ``exp(x)`` below [1]_, with ``M = D``. What `random_features`
        gives approximates softmax attention [2]_. Any other callable gets rows ``(..., heads, n, D)`` of
        queries or of keys, in the dtype of the computation and ``n`` at a time, and returns
        ``(..., heads, n, M)``: each row a function of its row alone. It may be called for the same rows
        again. Features are best not negative.
    causal : bool, default False
        Key ``j <= i``, for ``L = S``. The keys of `state` stand before all.
    key_lengths : array_like of int, optional
        Broadcasts to the leading batch axes; keys at or past it are never read.
    state : LinearState, optional
        That of earlier keys, which each query reads as well, with or without `causal`. Its leading axes
        broadcast. It is not changed.
    return_state : bool, default False
        Also return the state after all keys.

    Returns
    -------
    out : ndarray, shape (..., H, L, E)
        In the dtype that query, key and value promote to; C-contiguous.
    state : LinearState
        When asked for.

    Raises
    ------
    TypeError
        A dtype that `attention` does not take; a feature_map that is no callable, or whose result is no array
        of numbers; a state that is none; arrays on a GPU.
    ValueError
        Shapes that do not fit, ``causal=True`` with ``L != S``, `key_lengths` outside ``0..S``, an unknown
        name of a feature map, features whose shape is not that of their rows, a state of other sizes or of
        another kind of features.

    See Also
    --------
    attention : the softmax, exactly, in time ``L * S``.
    random_features : features for which this approximates it.

    Notes
    -----
    The same in NumPy::

        weights = phi(query) @ phi(key).swapaxes(-1, -2)
        if causal:
            weights = np.tril(weights)
        out = weights @ value / weights.sum(-1, keepdims=True)

    Without `causal` the products are taken in the order ``phi(query) @ (phi(key).T @ value)``. With it, rows
    are worked on in chunks: within a chunk by the formula above, and with all earlier keys by their sums.
    Cutting a sequence and passing the state on gives the same result to rounding, wherever it is cut. Where
    the denominator and the numerator are 0, as for a query without any key, the result is 0.

    Compiled kernels compute ``"elu+1"`` and the products, on all threads. A callable computes its own, and
    NumPy the products, which takes the same function some five times as long.

    Masks: NaN or inf in a key or value past its item's length changes no bit. With `causal`, NaN in a key or
    value reaches the rows from its own on, and makes all later ones NaN; rows before it keep their bits, but
    of random features.

    Accuracy: products are in the dtype of the computation, and sums over chunks of keys in float64. Of a
    callable's features, denominators and the division are in float64 as well. A factor common to a row of
    queries, or to a feature of all keys so far, cancels, whatever its size: ``elu(x) + 1`` of -1000 is
    e**-1000. Rows with a denominator below 2**-40 or above 2**60 are computed again, in float64, from
    features relative to the largest, which takes several times as long, and so are rows with NaN or inf: no
    sum of finite values overflows, nor a state.

    Determinism: with ``"elu+1"`` the same bits on every number of threads, for arrays of these sizes. With a
    callable BLAS may round products of other sizes, or on another number of threads, differently.

    Memory: inputs, output, the state, and features and scores of some hundred rows a thread, or of 64 rows of
    some heads; results of an item, where rows are computed again. With ``"elu+1"``, where there are few
    heads or items share their keys, a state for each 1024 positions of a head, and at most 64 of them.

    References
    ----------
    .. [1] Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers with Linear
       Attention", ICML 2020, equations 5 and 9.
    .. [2] Choromanski et al., "Rethinking Attention with Performers", ICLR 2021.

    Examples
    --------
    >>> import numpy as np
    >>> import fastattn
    >>> rng = np.random.default_rng(0)
    >>> query = rng.standard_normal((2, 8, 300, 16), dtype=np.float32)  # 2 items, 8 heads, 300 queries
    >>> key, value = rng.standard_normal((2, 2, 2, 300, 16), dtype=np.float32)  # 2 heads
    >>> out = fastattn.linear_attention(query, key, value, causal=True)
    >>> out.shape
    (2, 8, 300, 16)

    A recurrent network: 200 tokens, and then the others with what those add up to.

    >>> first, rest = np.s_[..., :200, :], np.s_[..., 200:, :]
    >>> _, state = fastattn.linear_attention(
    ...     query[first], key[first], value[first], causal=True, return_state=True
    ... )
    >>> state.key_value_sum.shape
    (2, 2, 16, 16)
    >>> last = fastattn.linear_attention(query[rest], key[rest], value[rest], causal=True, state=state)
    >>> np.allclose(last, out[rest], atol=1e-5)
    True
    """
    function = _checked_map(feature_map)
    call = _checked(query, key, value, causal=causal, key_lengths=key_lengths)
    earlier = None if state is None else _checked_state(state, call, function)
    out = np.empty((*call.query.shape[:-1], call.value.shape[-1]), call.result)
    whole = _run(call, function, bool(causal), earlier, return_state, out)
    if call.lengths is not None and earlier is None:
        out[call.lengths == 0] = 0  # where a query is NaN as well
    result = in_library_of(query, out[0] if call.flat else out)
    if whole is None:
        return result
    return result, _each(whole, lambda array, _: array[0]) if call.flat else whole


def _each(state: LinearState, change: Callable[[np.ndarray, int], np.ndarray]) -> LinearState:
    """The state with each array changed by a function of it and of how many axes it has beside the leading
    ones."""
    key_value_sum, key_sum, log_scale = state
    scaled = None if log_scale is None else change(log_scale, 2)
    return LinearState(change(key_value_sum, 3), change(key_sum, 2), scaled)


# The edge ------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """The arrays of a call as views."""

    query: np.ndarray  #: ``(*lead, H, L, D)``, in the dtype of the computation or in 16 bits
    key: np.ndarray  #: ``(*lead, K, S, D)``
    value: np.ndarray  #: ``(*lead, K, S, E)``
    lengths: np.ndarray | None  #: of keys, ``lead``
    dtype: np.dtype  #: of the computation
    result: np.dtype
    flat: bool  #: the caller gave matrices: one head without an axis of its own


@naming_shapes
def _checked(query: Any, key: Any, value: Any, *, causal: Any, key_lengths: Any) -> _Call:
    given = ((query, "query"), (key, "key"), (value, "value"))
    inputs: Any = as_inputs(*(host_array(as_array(x, name), name) for x, name in given), swapped=False)
    lead, _, L, S = inputs.sizes
    if not isinstance(causal, (bool, np.bool_)):
        raise ValueError(f"causal must be True or False, got {causal!r}: earlier keys are in state=")
    if causal and L != S:
        raise ValueError(f"causal=True needs L == S, got L={L} and S={S}: earlier keys are in state=")
    lengths = None if key_lengths is None else np.broadcast_to(check_key_lengths(key_lengths, lead, S), lead)
    return _Call(
        inputs.query, inputs.key, inputs.value, lengths, inputs.dtype, inputs.result, inputs.flat
    )  # fmt: skip


def _checked_map(feature_map: Any) -> Callable[[np.ndarray], Any]:
    if isinstance(feature_map, str):
        if feature_map != "elu+1":
            raise ValueError(f'feature_map must be "elu+1" or a callable, got {feature_map!r}')
        return _elu_plus_one
    if not callable(feature_map):
        raise TypeError(f'feature_map must be "elu+1" or a callable, got {feature_map!r}')
    return feature_map


def _checked_state(state: Any, call: _Call, function: Any) -> LinearState:
    """The state in float64, with an axis of heads."""
    if not isinstance(state, LinearState):
        raise TypeError(f"state must be a LinearState, got {type(state).__name__}")
    if state.log_scale is None and isinstance(function, RandomFeatures):
        raise ValueError("state must be of random features, as feature_map is, got that of other features")
    K, E = call.key.shape[-3], call.value.shape[-1]
    M = np.shape(state.key_sum)[-1] if np.ndim(state.key_sum) else 0
    if function is _elu_plus_one:
        M = call.key.shape[-1]

    def checked(given: Any, axes: int) -> np.ndarray:
        name = next(f"state.{name}" for name, array in state._asdict().items() if array is given)
        array = host_array(as_array(given, name), name)
        check_number_dtype(array, name)
        held = array[None] if call.flat else array
        own = (K, M, E)[:axes]
        if held.shape[-axes:] != own or not broadcasts(held.shape, (*call.key.shape[:-3], *own)):
            expected = own[1:] if call.flat else (*call.key.shape[:-3], *own)
            raise ValueError(f"{name} must have shape {expected}, got {array.shape}")
        return held.astype(FLOAT64)

    return _each(state, checked)


# Features as they are, and relative to the largest where that is not enough -------------------------------


def _run(
    call: _Call, function: Any, causal: bool, earlier: LinearState | None, return_state: bool, out: np.ndarray
) -> LinearState | None:
    """Fills `out`; returns the state if asked to."""
    is_random, is_elu = isinstance(function, RandomFeatures), function is _elu_plus_one
    plain = earlier if earlier is None or is_random else _unscaled(earlier)
    is_compiled = is_elu and driver is not None and all((out.size, *call.key.shape[-2:]))
    lost = np.zeros(out.shape[:-1], bool)
    run = _run_compiled if is_compiled else _run_in_blocks
    whole = run(call, function, causal, plain, return_state, out, lost)
    if call.lengths is not None and earlier is None:
        lost[call.lengths == 0] = False
    if is_random and lost.any():  # relative to the largest already: no denominator is out of range
        lost &= ~np.isfinite(out).all(axis=-1)
    lost_sums: Any = np.False_
    if whole is not None:
        lost_sums = ~np.isfinite(whole.key_value_sum).all(axis=(-2, -1))
        if not is_random:
            lost_sums |= _lost_sums(whole.key_sum, is_elu)
    if not (lost.any() or lost_sums.any()):
        return whole
    return _run_again(call, function, causal, earlier, whole, out, lost, lost_sums)


def _unscaled(state: LinearState) -> LinearState:
    if state.log_scale is None:
        return state
    with np.errstate(all="ignore"):
        factor = np.exp(state.log_scale)
        return LinearState(state.key_value_sum * factor[..., None], state.key_sum * factor)


def _lost_sums(key_sum: np.ndarray, has_no_zeros: bool) -> np.ndarray:
    """Of which heads, ``(..., K)``, sums of a feature may be made of what has left its range."""
    size = np.abs(key_sum)
    is_lost = ~((size >= _LEAST**2) & (size <= _MOST**2))
    return (is_lost if has_no_zeros else is_lost & (size != 0)).any(axis=-1)


def _run_again(
    call: _Call,
    function: Any,
    causal: bool,
    earlier: LinearState | None,
    whole: LinearState | None,
    out: np.ndarray,
    lost: np.ndarray,
    lost_sums: np.ndarray,
) -> LinearState | None:
    """Replaces lost rows of `out`, and lost sums of the state, by those of scaled features and values."""
    scales: Any = None
    if whole is not None:
        scales = np.zeros(whole.key_sum.shape) if whole.log_scale is None else whole.log_scale
    if isinstance(function, RandomFeatures):
        call = call._replace(dtype=FLOAT64)
    for items in np.ndindex(lost.shape[:-2]):  # alone: where a chunk is cut depends on all that is in it
        if not (lost[items].any() or (whole is not None and lost_sums[items].any())):
            continue
        rows, new = _run_scaled(call, items, function, causal, earlier, 1.0)
        if not (np.isfinite(rows).all() and np.isfinite(new.key_value_sum).all()):
            again, state = _run_scaled(call, items, function, causal, earlier, _UNIT)
            np.copyto(rows, again, where=~np.isfinite(rows))  # others keep what is small beside _UNIT
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


def _run_scaled(
    call: _Call, items: Any, function: Any, causal: bool, earlier: LinearState | None, unit: float
) -> tuple[np.ndarray, Any]:
    """The results and the state of an item in float64, from scaled features and values times the unit."""
    rows = np.empty((*call.query[items].shape[:-1], call.value.shape[-1]))
    with np.errstate(all="ignore"):
        block = _Block(call, items, function, earlier, _ScaledFeatures, unit)
        (_attend_causal if causal else _attend)(block, rows, np.empty(rows.shape[:-1], bool))
        # By rounding a mean of the largest number may be above it.
        limit = np.finfo(FLOAT64 if call.result.itemsize == 8 else FLOAT32).max * unit
        np.clip(rows, -limit, limit, out=rows, where=np.abs(rows) * (1 - 2.0**-40) <= limit)
        rows /= unit
        state: Any = block.features.state(block.lead)
        key_value_sum, key_sum, scale = state
        if np.isfinite(key_value_sum / unit).all():
            return rows, LinearState(key_value_sum / unit, key_sum, scale)
    return rows, LinearState(key_value_sum, key_sum * unit, scale - log(unit))


def _run_compiled(
    call: _Call,
    _: Any,
    causal: bool,
    earlier: LinearState | None,
    return_state: bool,
    out: np.ndarray,
    lost: np.ndarray,
) -> LinearState | None:
    """Fills `out`, and `lost` of rows to compute again; no size is 0. The state, if asked for."""
    load("cython")  # which chooses the instruction set
    lead, (K, S, M), E = call.query.shape[:-3], call.key.shape[-3:], call.value.shape[-1]
    key, value, key_lead = call.key, call.value, lead
    if call.lengths is None and earlier is None:  # sums of keys that items share are computed once
        key, value = _shared(key), _shared(value)
        key_lead = np.broadcast_shapes(key.shape[:-3], value.shape[:-3])
    sums: Any = None
    if return_state or earlier is not None:
        sums = np.zeros((*key_lead, K, E + 1, -(-M // _LANES) * _LANES))
    if earlier is not None:
        sums[..., :E, :M] = earlier.key_value_sum.swapaxes(-1, -2)
        sums[..., E, :M] = earlier.key_sum
    item_of_keys = np.arange(prod(key_lead)).reshape(key_lead)
    arrays = call.query, key, value, out
    driver.linear_attention(
        arrays,
        tuple(map(_item_offsets, arrays, (lead, key_lead, key_lead, lead))),
        tuple(storage_of(x.dtype) | (0 if x.dtype.isnative else SWAPPED) for x in arrays),
        np.broadcast_to(item_of_keys, lead).flatten(),
        np.full(item_of_keys.size, S) if call.lengths is None else call.lengths.flatten(),
        sums,
        lost,
        _LEAST,
        _MOST,
        causal,
        call.dtype.itemsize,
        thread_limit,
    )
    if not return_state:
        return None
    state = LinearState(sums[..., :E, :M].swapaxes(-1, -2), sums[..., E, :M])
    return _broadcast(state, lead)


def _item_offsets(array: np.ndarray, lead: tuple[int, ...]) -> np.ndarray:
    """The bytes from the start of an array to each item, all of `lead` in C order."""
    offsets = np.zeros(1, np.int64)
    for n, own, stride in zip(lead, array.shape, array.strides, strict=False):
        if n > 1:
            offsets = np.add.outer(offsets, np.arange(n) * (stride if own > 1 else 0)).ravel()
    return offsets


def _broadcast(state: LinearState, lead: tuple[int, ...]) -> LinearState:
    """A copy for all items."""
    return _each(state, lambda x, axes: np.array(np.broadcast_to(x, (*lead, *x.shape[-axes:])), order="C"))


# Chunks --------------------------------------------------------------------------------------------


def _run_in_blocks(
    call: _Call,
    function: Any,
    causal: bool,
    earlier: LinearState | None,
    return_state: bool,
    out: np.ndarray,
    lost: np.ndarray,
) -> LinearState | None:
    """Fills `out`, and `lost` of rows to compute again; returns the state if asked to."""
    states, kind = [], _ScaledFeatures if isinstance(function, RandomFeatures) else _Features
    with np.errstate(all="ignore"):  # NaN and inf pass through, and padding is computed too
        for items in _blocks(call):
            block = _Block(call, items, function, earlier, kind)
            (_attend_causal if causal else _attend)(block, out[items], lost[items])
            if return_state:
                states.append(block.features.state(block.lead))
    if len(states) <= 1:
        return states[0] if states else None
    key_value_sums, key_sums, scales = zip(*states, strict=True)
    whole = LinearState(*map(np.concatenate, (key_value_sums, key_sums)))
    return whole if scales[0] is None else whole._replace(log_scale=np.concatenate(scales))


def _blocks(call: _Call) -> Iterator[Any]:
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
        self,
        call: _Call,
        items: Any,
        function: Any,
        earlier: LinearState | None,
        kind: type[_Features],
        unit: float | None = None,
    ) -> None:
        self.dtype, self.unit = call.dtype, unit
        self.query, self.key, self.value = call.query[items], call.key[items], call.value[items]
        self.lengths = None if call.lengths is None else call.lengths[items]
        self.lead = self.query.shape[:-3]
        self.heads = self.key.shape[-3]
        self.group = self.query.shape[-3] // self.heads if self.heads else 1
        S = self.key.shape[-2]
        self.least = self.most = S
        if self.lengths is None:  # what is shared by items is worked on once
            self.key, self.value = _shared(self.key), _shared(self.value)
            lead = np.broadcast_shapes(self.key.shape[:-3], self.value.shape[:-3])
        else:
            lead = self.lead
            self.least, self.most = int(self.lengths.min(initial=S)), int(self.lengths.max(initial=0))
        if earlier is not None:
            lead, whole = self.lead, call.key.shape[:-3]
            earlier = _each(
                earlier, lambda x, axes: np.broadcast_to(x, (*whole, *x.shape[-axes:]))[items].copy()
            )
            if unit is not None:
                earlier.key_value_sum[...] *= unit
        rows = (self.heads, self.key.shape[-1])
        self.features = kind(function, self.dtype, lead, rows, self.value.shape[-1], earlier)

    def keys(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """A chunk of keys, and of values times the unit, and which of them are padding, which is 0 then."""
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


def _shared(array: np.ndarray) -> np.ndarray:
    """One item of each leading axis along which all are the same memory."""
    kept = (slice(None) if stride else slice(1) for stride in array.strides[:-3])
    return array[tuple(kept)]


def _chunk(array: np.ndarray, start: int, stop: int, dtype: np.dtype) -> np.ndarray:
    """Rows in the dtype of the computation, packed: NumPy rounds products of strided ones in other ways."""
    rows = array[..., start:stop, :]
    width = rows.shape[-1] * rows.itemsize
    is_packed = rows.strides[-2:] == (width, rows.itemsize) and rows.flags.aligned
    if rows.dtype != dtype or not is_packed:
        return np.array(rows, dtype, order="C")
    rows.flags.writeable = False  # a feature map has no business to write to them
    return rows


def _attend(block: _Block, out: np.ndarray, lost: np.ndarray) -> None:
    """Every query reads every key. `lost` becomes True for rows to compute again."""
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
    """The quotient as rows ``(..., H, n, E)``, 0 where both are 0; where denominators are out of range, or
    results are nonfinite."""
    numerator = numerator.reshape(out.shape)
    denominator = denominator.reshape(*out.shape[:-1], 1)
    size = np.abs(denominator[..., 0])
    lost[...] = ~((size >= _LEAST) & (size <= _MOST))
    np.divide(numerator, denominator, out=out, casting="unsafe")
    if not denominator.all():
        np.copyto(out, 0, where=(denominator == 0) & (numerator == 0))
    lost |= ~np.isfinite(out).all(axis=-1)


# Features ------------------------------------------------------------------------------------------


def _elu_plus_one(x: np.ndarray) -> np.ndarray:
    phi = np.minimum(x, 0)
    np.exp(phi, out=phi)
    phi += np.maximum(x, 0)
    return phi


class _Features:
    """Features of chunks of rows, and the sums of those of keys."""

    def __init__(
        self,
        function: Any,
        dtype: np.dtype,
        lead: tuple[int, ...],
        rows: tuple[int, int],
        value_dim: int,
        earlier: LinearState | None,
    ) -> None:
        self.function, self.dtype = function, dtype
        self.lead, self.rows, self.value_dim = lead, rows, value_dim  #: of the sums; ``(K, D)``; ``E``
        self.sums = earlier  #: None: of no key yet
        self.rows_dtype = dtype

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
        """What numerators and denominators are made of, for all of a group; None where there is no key."""
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
        return _broadcast(sums, lead)


class _ScaledFeatures(_Features):
    """Features relative to the greatest of all keys so far: random ones, and others that are out of range.

    A feature is ``a * exp(e)``, with ``a`` 1 for random features, and its size ``e + log|a|``. That of a key
    becomes ``a * exp(e - c)``, with ``c`` the greatest size of this feature, and that of a query
    ``a * exp(e + c - r)``, with ``r`` the greatest of its row, which is in numerator and denominator. A
    denominator is 1 at least, then, where all keys are read and no feature is negative. Where ``c`` grows the
    sums are scaled to it: to rounding, they do not depend on how the keys were cut.
    """

    def __init__(self, function: Any, dtype: np.dtype, *others: Any) -> None:
        super().__init__(function, dtype, *others)
        self.is_random = isinstance(function, RandomFeatures)
        if self.is_random:
            return
        self.dtype = FLOAT64
        if self.sums is not None:
            key_value_sum, key_sum, log_scale = self.sums
            # Sums that were given as they are may be out of range as well.
            size = np.abs(key_sum)
            is_far = (size > 0) & (size < np.inf) & ~((size >= _LEAST) & (size <= _MOST))
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
        if self.function is _elu_plus_one:
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
        """With -inf for hidden keys, and for what is NaN or inf: it changes no other feature."""
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


# Random features -----------------------------------------------------------------------------------


class RandomFeatures:
    """What `random_features` gives: a feature map, which `linear_attention` takes.

    Letters: ``D`` head_dim, ``M`` features.

    Attributes
    ----------
    projection : ndarray, shape (M, D)
        The random vectors, float64; read-only.
    """

    __slots__ = ("_scaled", "projection")

    def __init__(self, projection: np.ndarray) -> None:
        self.projection = projection
        self.projection.flags.writeable = False
        scaled = projection.T * projection.shape[1] ** -0.25
        self._scaled = {dtype: scaled.astype(dtype) for dtype in (FLOAT32, FLOAT64)}

    def __repr__(self) -> str:
        M, D = self.projection.shape
        return f"RandomFeatures(head_dim={D}, num_features={M})"

    def __call__(self, x: ArrayLike) -> np.ndarray:
        """The features of rows ``(..., D)``: ``(..., M)``, as they are, so that large ones may overflow."""
        with np.errstate(all="ignore"):
            return np.exp(self.log(x))

    def log(self, x: ArrayLike, *, up_to_a_factor: bool = False) -> np.ndarray:
        """Their logarithms; or those but for one factor of each row, by which less is lost of long rows."""
        x = host_array(as_array(x, "x"), "x")
        check_number_dtype(x, "x")
        M, D = self.projection.shape
        if x.ndim == 0 or x.shape[-1] != D:
            raise ValueError(f"rows must have head_dim {D}, as random_features was told, got shape {x.shape}")
        x = x.astype(FLOAT64 if x.dtype.kind in "biu" or x.dtype.itemsize == 8 else FLOAT32, copy=False)
        with np.errstate(all="ignore"):
            logs = x @ self._scaled[x.dtype]
            if up_to_a_factor:
                return logs
            logs -= (np.vecdot(x, x) * x.dtype.type(0.5 / sqrt(D)) + x.dtype.type(0.5 * log(M)))[..., None]
        return logs


@refusing
def random_features(
    head_dim: int, num_features: int, *, seed: int, orthogonal: bool = True
) -> RandomFeatures:
    """Positive random features whose products are the exponentials of attention in the mean (FAVOR+).

    Parameters
    ----------
    head_dim : int
        ``D`` of the queries and keys.
    num_features : int
        ``M``: the error falls as ``1 / sqrt(M)``, and time and memory grow with M.
    seed : int
        In ``[0, 2**128)``: the key of a NumPy Philox stream. The same seed gives the same features.
    orthogonal : bool, default True
        Random vectors at right angles to each other, D at a time, of which fewer give the same error.

    Returns
    -------
    RandomFeatures
        A callable for `linear_attention`, which also knows the logarithms of its features: there nothing
        overflows. Of a key its error is relative to ``|k|**2 / (2 * sqrt(D))``; a key for which that is above
        1e30 is not seen.

    Raises
    ------
    TypeError
        A number that is not an integer, an `orthogonal` that is no bool.
    ValueError
        A number below 1, a seed outside of its range.

    See Also
    --------
    linear_attention : attention with these features, causal as well.

    Notes
    -----
    With random vectors ``w``, each normally distributed, and ``y = x / D**0.25``::

        phi(x) = np.exp(w @ y - y @ y / 2) / np.sqrt(M)

    and the mean of ``phi(q) @ phi(k)`` over the vectors is ``exp(q @ k / sqrt(D))``: the scale of attention
    is included. The standard deviation is about ``exp(|q + k|**2 / (2 * sqrt(D))) / sqrt(M)`` times that, so
    that attention which is nearly even is approximated well, and sharp attention badly.

    References
    ----------
    .. [1] Choromanski et al., "Rethinking Attention with Performers", ICLR 2021, lemma 1 and section 2.4.

    Examples
    --------
    >>> import numpy as np
    >>> import fastattn
    >>> rng = np.random.default_rng(0)
    >>> query, key, value = rng.standard_normal((3, 4, 500, 16)) * 0.5
    >>> exact = fastattn.attention(query, key, value)
    >>> for num_features in (64, 256, 1024, 4096):
    ...     features = fastattn.random_features(16, num_features, seed=0)
    ...     out = fastattn.linear_attention(query, key, value, feature_map=features)
    ...     print(f"{num_features:4} {np.linalg.norm(out - exact) / np.linalg.norm(exact):.2f}")
      64 0.29
     256 0.15
    1024 0.08
    4096 0.04
    """
    D, M = count(head_dim, "head_dim", 1, MAX_DIM), count(num_features, "num_features", 1, MAX_DIM)
    check_bool(orthogonal, "orthogonal")
    rng = np.random.Generator(np.random.Philox(key=check_seed(seed)))
    if not orthogonal:
        return RandomFeatures(rng.standard_normal((M, D)))
    blocks = []
    for _ in range(-(-M // D)):
        q, r = np.linalg.qr(rng.standard_normal((D, D)))
        directions = (q * np.sign(np.diagonal(r))).T  # so that all are as likely
        blocks.append(directions * np.linalg.norm(rng.standard_normal((D, D)), axis=1)[:, None])
    return RandomFeatures(np.concatenate(blocks)[:M])
