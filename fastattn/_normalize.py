"""The edge: array_like arguments to a `Problem`, and the one place that raises on them.

Every rule on types, shapes and values of an attention call is checked here, before any work. What comes
out is views: an array is converted only when its dtype or byte order is not the one of the computation,
and broadcast axes are never expanded.

Arrays on a GPU go through it as `DeviceArray`, in the place of ndarrays: only their shapes and dtypes matter
here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from math import gcd, isfinite, prod, sqrt
from operator import index
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, ParamSpec, TypeVar

import numpy as np

from fastattn import masks
from fastattn._device import DeviceArray, as_device_array, broadcast_to, place
from fastattn._mask_map import UNBOUNDED, Band, Size, make_intervals
from fastattn._problem import FLOAT32, FLOAT64, MAX_DIM, MAX_ROWS, Problem
from fastattn._storage import REAL, Paged, Quantized, Rows, storage_code, storage_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import ArrayLike

    from fastattn._dropout import Dropout
    from fastattn._gradients import Backward
    from fastattn._options import RowsLike

Arguments = ParamSpec("Arguments")
Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")

_AXES = {"bhsd": "(..., heads, length, dim)", "bshd": "(..., length, heads, dim)"}
_HEAD_DIMS = (32, 64, 80, 96, 128, 256)  # that models have
_OVERLAP_WORK = 1000  # candidates tried to tell whether two strided arrays share memory, some microseconds


class Request(NamedTuple):
    """A problem to solve, and how its results go back to the caller."""

    problem: Problem[Any]
    results: tuple[Any, ...]  #: out, then lse and weights where asked for, in the caller's shapes
    staged: np.ndarray | None  #: what the backend fills instead of an `out` that overlaps an input, or that
    #: must not be written to if the work fails
    swapped: bool  #: the caller's length axis stands before the head axis

    def finish(self) -> Any:
        """The results as the caller wants them; to be called when the problem is solved."""
        if self.staged is not None:
            self.results[0][...] = self.staged
        results = self.results
        if type(results[0]) is DeviceArray:
            results = tuple(result.memory.owner for result in results)
        return results[0] if len(results) == 1 else results


class _Inputs:
    """Query, key and value as ``(*lead, heads, length, dim)`` views, in the dtype of the computation or in 16
    bits."""

    __slots__ = ("dtype", "flat", "key", "query", "result", "sizes", "swapped", "value")

    def __init__(
        self,
        query: np.ndarray,
        key: np.ndarray | Rows,
        value: np.ndarray | Rows,
        *,
        dtype: np.dtype,
        result: np.dtype,
        flat: bool,
        swapped: bool,
    ):
        self.query, self.key, self.value = query, key, value
        self.dtype, self.result = dtype, result  #: of the computation, and of its results
        self.flat = flat  #: the caller gave matrices: one head without an axis of its own
        self.swapped = swapped  #: the caller's length axis stands before the head axis
        *_, H, L, _ = query.shape
        self.sizes = Size(query.shape[:-3], H, L, key.shape[-2])

    def locate(self, lengths: np.ndarray | None) -> None:
        """Finds the pages that hold the first `lengths` keys of each item, where there are any."""
        for name in ("key", "value"):
            rows = getattr(self, name)
            if isinstance(rows, Rows):
                try:
                    setattr(self, name, rows.located(lengths))
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None


def _naming_shapes(normalize: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Ends every complaint about arguments with the shapes of query, key and value, and hints."""

    @wraps(normalize)
    def naming(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return normalize(*args, **kwargs)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            shapes = [_shape(array) for array in args[:3]]
            named = zip(("query", "key", "value"), args, shapes, strict=False)
            listed = ", ".join(f"{name} {_described(given, shape)}" for name, given, shape in named)
            hints = _shape_hints(shapes, kwargs) if "layout" in kwargs else []
            raise kind("; ".join([str(error), listed, *hints])) from None

    return naming


def _described(given: Any, shape: tuple[int, ...] | None) -> Any:
    if isinstance(given, (Paged, Quantized)):
        return given
    return "of no shape" if shape is None else shape


def _shape(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, (Paged, Quantized, Rows)):
        return None
    try:
        return tuple(np.shape(value))
    except (TypeError, ValueError):
        return None


def refuse_arguments(
    function: Callable[..., Any], extra: tuple[Any, ...], unknown: dict[str, Any]
) -> NoReturn:
    """Raises on arguments that a public function does not have."""
    from fastattn._hints import refusal  # what only a message needs is no part of an import

    raise TypeError(refusal(function, extra, unknown))


def clean_signature(function: Function) -> Function:
    """The function itself, which `help` shows without the ``*extra`` and ``**unknown`` that it refuses.

    `inspect.signature` looks at what a function says that it wraps, and only when it is asked: to make three
    signatures here would be 900 of the 10,000 calls of an import of the package.
    """
    code = function.__code__
    shown = FunctionType(
        code.replace(co_flags=code.co_flags & ~(inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)), {}
    )
    shown.__defaults__, shown.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    shown.__annotations__ = function.__annotations__
    function.__wrapped__ = shown  # type: ignore[attr-defined]
    return function


@_naming_shapes
def normalize(
    query: ArrayLike,
    key: RowsLike,
    value: RowsLike,
    *,
    mask: masks.Mask | ArrayLike | None,
    function_mask: masks.Mask | None = None,
    bias: ArrayLike | None,
    causal: bool | str,
    window: tuple[int | None, int | None] | None,
    key_lengths: ArrayLike | None,
    scale: float | None,
    softcap: float | None,
    sinks: ArrayLike | None,
    layout: str,
    out: np.ndarray | None,
    return_lse: bool,
    return_weights: bool,
    dropout: float = 0.0,
    seed: int | None = None,
    may_fail: bool = False,
    keep_first: int = 0,
) -> Request:
    """The arguments of `attention` as a `Request`; see there for what they mean and what is raised.

    `function_mask` is one more mask. It fits any size, and evaluating it takes long. `may_fail`: the work may
    raise, or read arrays that are not here, so that nothing is written to `out` before its end. `keep_first`
    keys are in the window of every query, where they are in pages.
    """
    inputs = _inputs(query, key, value, swapped=_is_swapped(layout))
    band = _band(inputs, causal, window, key_lengths)
    inputs.locate(None if band is None else band.lengths)
    if band is not None and keep_first:
        band = band._replace(keep_first=keep_first)
    if mask is not None:
        mask = _mask(mask, inputs.flat)
    if function_mask is not None:
        mask = function_mask if mask is None else function_mask & mask
    lowered = _NO_MASK if mask is None else masks.lower(mask, *inputs.sizes, _without_lengths(band))
    bias = _bias_of_scores(bias, inputs)
    return _assemble(
        inputs, band, lowered, bias, scale, softcap, sinks, out, return_lse, return_weights, may_fail,
        check_dropout(dropout, seed),
    )  # fmt: skip


@_naming_shapes
def normalize_backward(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    grad_out: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    grad_lse: ArrayLike | None,
    wrt: Iterable[str],
    mask: masks.Mask | ArrayLike | None,
    bias: ArrayLike | None,
    causal: bool | str,
    window: tuple[int | None, int | None] | None,
    key_lengths: ArrayLike | None,
    scale: float | None,
    softcap: float | None,
    sinks: ArrayLike | None,
    layout: str,
    dropout: float,
    seed: int | None,
) -> Backward:
    """The arguments of `attention_backward` as a `Backward`; see there for what they mean and what is
    raised."""
    from fastattn._gradients import DIFFERENTIABLE, Backward  # no part of an import of the package

    arrays = [as_array(x, name) for x, name in ((query, "query"), (key, "key"), (value, "value"))]
    others = {
        "grad_out": grad_out,
        "out": out,
        "lse": lse,
        "grad_lse": grad_lse,
        "bias": bias,
        "sinks": sinks,
    }
    for x, name in (*_named(*arrays), *((x, name) for name, x in others.items())):
        if (array := as_device_array(x, name)) is not None:
            raise TypeError(
                f"{name} is on {place(array)}, and gradients are computed on the host: copy it there"
            )
    inputs = _inputs(*arrays, swapped=_is_swapped(layout))
    band = _band(inputs, causal, window, key_lengths)
    lowered = _NO_MASK
    if mask is not None:
        lowered = masks.lower(_mask(mask, inputs.flat), *inputs.sizes, _without_lengths(band))
    given = None if bias is None else as_array(bias, "bias")
    bias = _bias_of_scores(bias, inputs)
    scale, softcap, sinks = _numbers(inputs, scale, softcap, sinks)
    shape, rows = _result_shapes(inputs)

    def outputs(given: ArrayLike, name: str) -> np.ndarray:
        array: Any = as_array(given, name)
        check_number_dtype(array, name)
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
        if not _is_stored(array):
            array = _as_dtype(array, inputs.dtype, name)
        if inputs.flat:
            return array[None]
        return array.swapaxes(-3, -2) if inputs.swapped else array

    def sums(given: ArrayLike, name: str) -> np.ndarray:
        array = as_array(given, name)
        check_number_dtype(array, name)
        if array.shape != rows:
            raise ValueError(f"{name} must have shape {rows}, got {array.shape}")
        array = np.ascontiguousarray(array, inputs.dtype)
        return array[None] if inputs.flat else array

    problem = Problem(
        query=inputs.query,
        key=inputs.key,
        value=inputs.value,
        out=outputs(out, "out"),
        lse=None,
        weights=None,
        dtype=inputs.dtype,
        scale=scale,
        softcap=softcap,
        bias=bias,
        sinks=sinks,
        band=band,
        key_start=lowered.key_start,
        key_stop=lowered.key_stop,
        dense=lowered.dense,
        mask_map=lowered.mask_map,
        dropout=check_dropout(dropout, seed),
    )
    names = [wrt] if isinstance(wrt, str) else list(wrt)
    for name in names:
        if name not in DIFFERENTIABLE:
            raise ValueError(f"wrt must name some of {', '.join(DIFFERENTIABLE)}, got {name!r}")
        if getattr(problem, name) is None:
            raise ValueError(f"wrt names {name}, which is not given")
    return Backward(
        problem=problem,
        lse=sums(lse, "lse"),
        grad_out=outputs(grad_out, "grad_out"),
        grad_lse=None if grad_lse is None else sums(grad_lse, "grad_lse"),
        wrt=frozenset(names),
        bias_shape=() if given is None else (1,) * (inputs.query.ndim - given.ndim) + given.shape,
    )


def _is_swapped(layout: str) -> bool:
    if layout not in ("bhsd", "bshd"):
        raise ValueError(f'layout must be "bhsd" or "bshd", got {layout!r}')
    return layout == "bshd"


@_naming_shapes
def normalize_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None,
    *,
    causal: bool | str,
    window: tuple[int | None, int | None] | None,
    scale: float | None,
    softcap: float | None,
    sinks: ArrayLike | None,
    out: np.ndarray | None,
    return_lse: bool,
) -> Request:
    """The arguments of `varlen_attention` as one call whose rows read the keys of their document."""
    arrays = [as_array(x, name) for x, name in ((query, "query"), (key, "key"), (value, "value"))]
    for array, name in zip(arrays, ("query", "key", "value"), strict=True):
        if array.ndim != 3:
            raise ValueError(f"{name} must have shape (T, heads, dim), got {array.shape}")
    inputs = _inputs(*arrays, swapped=True)
    _, _, L, S = inputs.sizes
    starts_q = _cu_seqlens(cu_seqlens_q, "cu_seqlens_q", L)
    starts_k = starts_q
    if cu_seqlens_k is not None:
        starts_k = _cu_seqlens(cu_seqlens_k, "cu_seqlens_k", S)
    elif S != L:
        raise ValueError("cu_seqlens_k is needed where key has another length than query")
    if len(starts_q) != len(starts_k):
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must have the same length, "
            f"got {len(starts_q)} and {len(starts_k)}"
        )
    lengths_q, lengths_k = np.diff(starts_q), np.diff(starts_k)
    causal = _causal(causal)
    if causal is True and (differ := np.flatnonzero(lengths_q != lengths_k)).size:
        d = differ[0]
        raise ValueError(
            f"causal=True needs as many keys as queries in each document, got {lengths_q[d]} queries and "
            f'{lengths_k[d]} keys in document {d}; say causal="top_left" or causal="bottom_right"'
        )
    document = np.repeat(np.arange(len(lengths_q)), lengths_q)
    position = np.arange(L) - starts_q[document]
    first, last = starts_k[document], starts_k[document + 1]
    left, right, at_end = _reach(causal, check_window(window))
    if at_end:
        position = position + (lengths_k - lengths_q)[document]
    start, stop = first + np.maximum(position - left, 0), np.minimum(first + position + (right + 1), last)
    bounds = make_intervals(start, stop, S)
    lowered = masks.Lowered(bounds.start, bounds.stop, None, None)
    return _assemble(inputs, None, lowered, None, scale, softcap, sinks, out, return_lse, False)


@_naming_shapes
def normalize_sdpa(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Request:
    """The arguments of `scaled_dot_product_attention`, by PyTorch's conventions."""
    if _finite(dropout_p, "dropout_p") != 0:
        raise ValueError(
            f"dropout_p must be 0, got {dropout_p!r}: there is no global random state here; "
            f"fastattn.attention drops weights by a seed, dropout={dropout_p!r}, seed=..."
        )
    if not isinstance(is_causal, (bool, np.bool_)):
        raise TypeError(f"is_causal must be a bool, got {is_causal!r}")
    q, k, v = as_array(query, "query"), as_array(key, "key"), as_array(value, "value")
    if not enable_gqa and min(q.ndim, k.ndim, v.ndim) >= 3:
        q, k, v = _matched_heads(q, k, v)
    inputs = _inputs(q, k, v, swapped=False)
    lead, H, L, S = inputs.sizes
    band = _band(inputs, "top_left" if is_causal else False, None, None)
    mask = bias = None
    if attn_mask is not None:
        array = as_array(attn_mask, "attn_mask")
        if array.dtype.kind != "b" and not _is_bias_dtype(array.dtype):
            raise TypeError(
                f"attn_mask must be bool (True = may attend), or float16, bfloat16, float32 or float64 "
                f"(added), got dtype {array.dtype}"
            )
        array = _broadcast_scores(array, (*lead, H, L, S), "attn_mask", inputs.flat)
        if array.dtype.kind == "b":
            mask = masks.Dense(array)
        else:
            bias = array
    lowered = _NO_MASK if mask is None else masks.lower(mask, *inputs.sizes, _without_lengths(band))
    return _assemble(inputs, band, lowered, bias, scale, None, None, None, False, False)


def as_pieces(
    outs: Sequence[ArrayLike], lses: Sequence[ArrayLike]
) -> tuple[list[tuple[Any, Any]], np.dtype, np.dtype]:
    """The arguments of `merge_attention` as pairs, and the dtypes of its results."""
    pieces = [as_array(out, f"outs[{n}]") for n, out in enumerate(outs)]
    sums = [as_array(lse, f"lses[{n}]") for n, lse in enumerate(lses)]
    if not pieces or len(pieces) != len(sums):
        raise ValueError(
            f"merge_attention needs as many outs as lses, and at least one; got {len(pieces)} and {len(sums)}"
        )
    for n, (out, lse) in enumerate(zip(pieces, sums, strict=True)):
        check_number_dtype(out, f"outs[{n}]")
        check_number_dtype(lse, f"lses[{n}]")
        if out.ndim < 1 or out.shape != pieces[0].shape or lse.shape != out.shape[:-1]:
            raise ValueError(
                f"every out must have one shape (..., E) and every lse its (...); "
                f"got outs {[x.shape for x in pieces]}, lses {[x.shape for x in sums]}"
            )
    check_places(**{f"outs[{n}]": out for n, out in enumerate(pieces)})
    check_places(**{"outs[0]": pieces[0]}, **{f"lses[{n}]": lse for n, lse in enumerate(sums)})
    named = ({f"{name}[{n}]": array for n, array in enumerate(given)} for name, given in
             (("outs", pieces), ("lses", sums)))  # fmt: skip
    out_dtype, lse_dtype = (_promote(**arrays) for arrays in named)
    return list(zip(pieces, sums, strict=True)), out_dtype, lse_dtype


# What shapes that do not fit may be ----------------------------------------------------------------


def _shape_hints(shapes: list[tuple[int, ...] | None], options: dict[str, Any]) -> list[str]:
    """How query, key and value may be meant, where they do not fit together or with the options as read."""
    ranks = {0 if shape is None else len(shape) for shape in shapes}
    layout = options["layout"]
    if min(ranks) < 3 or not isinstance(layout, str) or layout not in _AXES:
        return []
    hints = []
    wrong = not _fits(shapes, options)
    other = "bshd" if layout == "bhsd" else "bhsd"
    if wrong and _fits(shapes, options | {"layout": other}):
        hints.append(f'where the arrays are {_AXES[other]}, say layout="{other}"')
    if ranks == {3} and (_is_wide(shapes) or (wrong and _fits_unsplit(shapes, options))):
        hints.append(
            "where the last axis holds all heads, (B, L, H * D), reshape to (B, L, H, D) "
            'and say layout="bshd"'
        )
    return hints


def _fits(shapes: Sequence[Any], options: dict[str, Any]) -> bool:
    """Whether arrays of these shapes fit together, and with the options whose shapes depend on them."""
    mask, bias, sinks = options["mask"], options["bias"], options["sinks"]
    stand_ins = (np.broadcast_to(np.float32(0), shape) for shape in shapes)
    try:
        inputs = _inputs(*stand_ins, swapped=options["layout"] == "bshd")
        lead, H, L, S = inputs.sizes
        _band(inputs, options["causal"], options["window"], options["key_lengths"])
        if mask is not None:
            _mask(mask, inputs.flat)._bind(Size(*inputs.sizes))
        if bias is not None:
            _broadcast_scores(_bias(bias), (*lead, H, L, S), "bias", inputs.flat)
        if sinks is not None:
            _sinks(sinks, H, FLOAT32)
    except Exception:  # of any kind: a hint must not put an error of its own in the place of the first
        return False
    return True


def _is_wide(shapes: Sequence[Any]) -> bool:
    """Whether the last axis is more than one head is likely to have, and whole heads."""
    head_dim = shapes[0][-1]
    return head_dim > max(_HEAD_DIMS) and any(head_dim % usual == 0 for usual in _HEAD_DIMS)


def _fits_unsplit(shapes: Sequence[Any], options: dict[str, Any]) -> bool:
    """Whether the arrays fit as ``(B, L, H * D)``, for a usual D or the widest possible."""
    q_dim, k_dim, v_dim = (shape[-1] for shape in shapes)
    if not q_dim or not k_dim:
        return False
    for head_dim in (gcd(q_dim, k_dim), *_HEAD_DIMS):
        num_heads, num_kv_heads = q_dim // head_dim, k_dim // head_dim
        if q_dim % head_dim or k_dim % head_dim or v_dim % num_kv_heads:
            continue
        heads = (num_heads, num_kv_heads, num_kv_heads)
        split = [(*shape[:2], n, shape[2] // n) for shape, n in zip(shapes, heads, strict=True)]
        if _fits(split, options | {"layout": "bshd"}):
            return True
    return False


# Query, key and value ------------------------------------------------------------------------------


def _inputs(query: ArrayLike, key: RowsLike, value: RowsLike, *, swapped: bool) -> _Inputs:
    q: Any = as_array(query, "query")
    k: Any = _as_rows(key, "key")
    v: Any = _as_rows(value, "value")
    if not (type(q) is type(k) is type(v) is np.ndarray):
        check_places(query=q, key=k, value=v)
    dtype, result = _dtypes(q, k, v)
    if not (q.dtype == k.dtype == v.dtype == dtype):
        q, k, v = (
            array if _is_stored(array) else _as_dtype(array, dtype, name) for array, name in _named(q, k, v)
        )

    ranks = (q.ndim, k.ndim, v.ndim)
    if min(ranks) < 2:
        raise ValueError("query, key and value must have at least 2 axes")
    if min(ranks) == 2:
        if max(ranks) != 2:
            raise ValueError("two axes stand for one head, and then query, key and value all have two")
        q = q[None]
        k, v = (array.with_heads() if isinstance(array, Rows) else array[None] for array in (k, v))
    elif swapped:
        q = q.swapaxes(-3, -2)
        k, v = (_swapped(array, given) for array, given in ((k, key), (v, value)))

    *q_lead, H, _, D = q.shape
    *k_lead, K, S, key_dim = k.shape
    *v_lead, value_heads, value_length, _ = v.shape
    if key_dim != D:
        raise ValueError(f"query and key must have the same head_dim, got {D} and {key_dim}")
    if D == 0:
        raise ValueError("head_dim of query and key must be at least 1, got 0")
    if value_length != S:
        raise ValueError(f"key and value must have the same length, got {S} and {value_length}")
    if value_heads != K:
        raise ValueError(f"key and value must have the same number of heads, got {K} and {value_heads}")
    if H % K if K else H:
        raise ValueError(f"the heads of query must be a multiple of those of key and value, got {H} and {K}")
    if not (q_lead == k_lead == v_lead):
        try:
            lead = np.broadcast_shapes(tuple(q_lead), tuple(k_lead), tuple(v_lead))
        except ValueError:
            raise ValueError("the leading batch axes of query, key and value do not broadcast") from None
        q, k, v = (
            array.broadcast_to(lead)
            if isinstance(array, Rows)
            else broadcast_to(array, (*lead, *array.shape[-3:]), name)
            for array, name in _named(q, k, v)
        )
    inputs = _Inputs(q, k, v, dtype=dtype, result=result, flat=min(ranks) == 2, swapped=swapped)
    _check_sizes(inputs)
    return inputs


def _swapped(array: np.ndarray | Rows, given: Any) -> np.ndarray | Rows:
    """The axes of heads and rows swapped; those of a cache's `Rows` are in one order in either layout."""
    if not isinstance(array, Rows):
        return array.swapaxes(-3, -2)
    return array if array is given else array.swapped()


def _named(q: Any, k: Any, v: Any) -> tuple[tuple[Any, str], ...]:
    return (q, "query"), (k, "key"), (v, "value")


def _check_sizes(inputs: _Inputs) -> None:
    """ValueError where a size is beyond what any backend counts with; see `fastattn._problem`."""
    lead, H, L, S = inputs.sizes
    head_dim, value_dim = inputs.query.shape[-1], inputs.value.shape[-1]
    if head_dim > MAX_DIM:
        raise ValueError(f"head_dim of query and key must be at most {MAX_DIM}, got {head_dim}")
    if value_dim > MAX_DIM:
        raise ValueError(f"head_dim of value must be at most {MAX_DIM}, got {value_dim}")
    batch, K = prod(lead), inputs.key.shape[-3]
    too_many = "must have at most {} rows over all items and heads, {}, got {}"
    if (rows := max(1, batch * H) * L) > MAX_ROWS:
        raise ValueError(f"query {too_many.format(MAX_ROWS, 'B * H * L', rows)}")
    if (rows := max(1, batch * K) * S) > MAX_ROWS:
        raise ValueError(f"key {too_many.format(MAX_ROWS, 'B * K * S', rows)}")


def _matched_heads(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Views in which a head axis of 1 is broadcast, where it must be, to the others' heads."""
    heads = {q.shape[-3], k.shape[-3], v.shape[-3]} - {1}
    if len(heads) > 1:
        raise ValueError(
            "query, key and value must have the same number of heads, or 1, unless enable_gqa=True"
        )
    if k.shape[-3] == v.shape[-3] == 1:
        return q, k, v  # one key/value head for all is what `attention` knows itself
    num_heads = heads.pop() if heads else 1
    q, k, v = (
        broadcast_to(x, (*x.shape[:-3], num_heads, *x.shape[-2:]), name) for x, name in _named(q, k, v)
    )
    return q, k, v


def _as_rows(value: Any, name: str) -> np.ndarray | Rows:
    """Keys or values as an ndarray, or as `Rows` where they are in int8 or in pages."""
    if isinstance(value, (Paged, Quantized, Rows)):
        return Rows.of(value)
    return as_array(value, name)


def as_array(value: Any, name: str) -> np.ndarray:
    """`value` as an ndarray, a view where it is one already."""
    if type(value) is np.ndarray:
        return value
    if isinstance(value, (Paged, Quantized)):
        raise TypeError(f"{name} must be an array here, got {value}")
    if (array := as_device_array(value, name)) is not None:
        return array  # type: ignore[return-value]  # what is asked of it here it has, too
    try:
        return np.asarray(value)
    except TypeError as error:
        raise TypeError(f"{name} does not convert to an array: {error}") from error
    except ValueError as error:
        raise ValueError(f"{name} does not convert to an array: {error}") from error


def check_places(**arrays: Any) -> None:
    """ValueError unless all arrays, None aside, are on the host or all on one GPU."""
    places = {name: place(array) for name, array in arrays.items() if array is not None}
    if len(set(places.values())) > 1:
        listed = ", ".join(f"{name} on {where}" for name, where in places.items())
        raise ValueError(f"all arrays must be on the host, or all on one GPU; got {listed}")


def _dtypes(q: np.ndarray, k: np.ndarray | Rows, v: np.ndarray | Rows) -> tuple[np.dtype, np.dtype]:
    """What is computed in, and what the results are of: 16-bit types are computed in float32."""
    dtype = q.dtype
    if dtype == k.dtype == v.dtype and dtype in (FLOAT32, FLOAT64):
        return dtype, dtype
    counting = {name: array for array, name in _named(q, k, v) if not _is_quantized(array)}
    for name, array in counting.items():
        check_number_dtype(array, name)
    result = _promote(**counting)
    return (result if storage_of(result) == REAL else FLOAT32), result


def _promote(**arrays: np.ndarray | Rows) -> np.dtype:
    """The native float dtype that the arrays promote to, where integers and bools count as float64.

    A 16-bit type is that of arrays that all have it, and leaves others as they are. (`numpy.result_type`
    knows no rule for bfloat16.)
    """
    stored = {name: array.dtype for name, array in arrays.items() if storage_of(array.dtype) != REAL}
    if len({storage_of(dtype) for dtype in stored.values()}) > 1:
        listed = ", ".join(f"{name} is {dtype.name}" for name, dtype in stored.items())
        last = list(stored)[-1]
        other = next(dtype.name for dtype in stored.values() if storage_of(dtype) != storage_of(stored[last]))
        raise TypeError(f"two 16-bit types do not promote: {listed}; cast one, {last}.astype({other!r})")
    others = [array.dtype for name, array in arrays.items() if name not in stored]
    counted = (FLOAT64 if dtype.kind in "biu" else dtype for dtype in others or stored.values())
    return np.result_type(*counted).newbyteorder("=")


def _is_stored(array: np.ndarray | Rows) -> bool:
    """Whether an array is in 16 bits or in int8, which kernels read as they are."""
    return not isinstance(array, DeviceArray) and storage_code(array) != REAL


def _is_quantized(array: np.ndarray | Rows) -> bool:
    return isinstance(array, Rows) and array.is_quantized


def check_number_dtype(array: np.ndarray | Rows, name: str) -> None:
    dtype = array.dtype
    if dtype.kind in "biu" or (dtype.kind == "f" and dtype.itemsize in (4, 8)) or storage_of(dtype) != REAL:
        return
    raise TypeError(
        f"{name} has dtype {dtype}; supported are float32, float64, float16 and bfloat16, "
        f"and integers and bools, which count as float64"
    )


def _as_dtype(array: np.ndarray | Rows, dtype: np.dtype, name: str) -> np.ndarray | Rows:
    """A copy in another dtype that is as large as the array's memory, not as its broadcast shape."""
    if array.dtype == dtype:
        return array
    if isinstance(array, Rows):
        return array.astype(dtype)
    if isinstance(array, DeviceArray):
        return array.read_as(dtype)
    stored = array[tuple(slice(None) if stride else slice(1) for stride in array.strides)]
    return broadcast_to(stored.astype(dtype), array.shape, name)


# Masks and bias ------------------------------------------------------------------------------------

_NO_MASK = masks.Lowered(None, None, None, None)


def _mask(mask: Any, flat: bool) -> masks.Mask:
    if isinstance(mask, masks.Mask):
        return mask
    if callable(mask):
        raise TypeError(
            f"mask must be a fastattn.masks object or a bool or integer array, got {masks.describe(mask)}"
        )
    dense = masks.Dense(as_array(mask, "mask"))
    if flat and dense.array.ndim > 2:
        raise ValueError(f"mask must broadcast to (L, S), got shape {dense.array.shape}")
    return dense


def _band(inputs: _Inputs, causal: Any, window: Any, key_lengths: Any) -> Band | None:
    """What `causal`, `window` and `key_lengths` leave of each row, or None for all of it."""
    causal, window = _causal(causal), check_window(window)
    if causal is False and window is None and key_lengths is None:
        return None
    lead, _, L, S = inputs.sizes
    if causal is True and L != S:
        raise ValueError(
            f'causal=True needs L == S, got L={L} and S={S}; say causal="top_left" (query i reads keys '
            f'j <= i) or causal="bottom_right" (the last query reads up to the last key)'
        )
    lengths = None if key_lengths is None else np.broadcast_to(_key_lengths(key_lengths, lead, S), lead)
    return Band(*_reach(causal, window), lengths)


def _without_lengths(band: Band | None) -> Band | None:
    """The band where it depends on no array, as a mask map must not, which is kept for other calls."""
    return None if band is None or band.lengths is not None else band


def _reach(causal: bool | str, window: tuple[int | None, int | None] | None) -> tuple[int, int, bool]:
    """``left, right, at_end`` of a `Band`; a window alone is aligned as ``causal="bottom_right"`` is."""
    left, right = (UNBOUNDED if bound is None else min(bound, UNBOUNDED) for bound in window or (None, None))
    at_end = causal == "bottom_right" or (causal is False and window is not None)
    return left, right if causal is False else 0, at_end


def _causal(causal: Any) -> bool | str:
    if isinstance(causal, (bool, np.bool_)):
        return bool(causal)
    if isinstance(causal, str) and causal in ("top_left", "bottom_right"):
        return causal
    raise ValueError(f'causal must be False, True, "top_left" or "bottom_right", got {causal!r}')


def check_window(window: Any) -> tuple[int | None, int | None] | None:
    if window is None:
        return None
    try:
        left, right = window
    except TypeError:
        raise TypeError(f"window must be a pair (left, right), got {window!r}") from None
    except ValueError:
        raise ValueError(f"window must be a pair (left, right), got {window!r}") from None
    return masks.window_bound(left, "window: left"), masks.window_bound(right, "window: right")


def _key_lengths(key_lengths: ArrayLike, lead: tuple[int, ...], len_k: int) -> np.ndarray:
    lengths = masks.integers(as_array(key_lengths, "key_lengths"), "key_lengths")
    if not masks.broadcasts(lengths.shape, lead):
        raise ValueError(
            f"key_lengths of shape {lengths.shape} does not broadcast to the leading batch axes {lead}"
        )
    if lengths.size and (lengths.min() < 0 or lengths.max() > len_k):
        wrong = lengths[(lengths < 0) | (lengths > len_k)].flat[0]
        raise ValueError(f"key_lengths must be in 0..S={len_k}, got {wrong}")
    return lengths


def _cu_seqlens(value: ArrayLike, name: str, total: int) -> np.ndarray:
    starts = masks.integers(as_array(value, name), name)
    if starts.ndim != 1 or not starts.size:
        raise ValueError(f"{name} must have shape (documents + 1,), got {starts.shape}")
    if starts[0] != 0 or starts[-1] != total or (np.diff(starts) < 0).any():
        shown = starts.tolist() if starts.size <= 8 else f"{starts[:4].tolist()} ... {starts[-4:].tolist()}"
        raise ValueError(f"{name} must rise from 0 to T={total}, got {shown}")
    return starts


def _bias(bias: ArrayLike) -> np.ndarray:
    array = as_array(bias, "bias")
    if not _is_bias_dtype(array.dtype):
        hint = "; to allow keys use mask=" if array.dtype.kind in "biu" else ""
        raise TypeError(
            f"bias must be a float16, bfloat16, float32 or float64 array, got dtype {array.dtype}{hint}"
        )
    return array


def _bias_of_scores(bias: ArrayLike | None, inputs: _Inputs) -> np.ndarray | None:
    """A bias as a view of the shape of the scores."""
    if bias is None:
        return None
    lead, H, L, S = inputs.sizes
    return _broadcast_scores(_bias(bias), (*lead, H, L, S), "bias", inputs.flat)


def _is_bias_dtype(dtype: np.dtype) -> bool:
    return (dtype.kind == "f" and dtype.itemsize <= 8) or storage_of(dtype) != REAL


def _broadcast_scores(array: np.ndarray, shape: tuple[int, ...], name: str, flat: bool) -> np.ndarray:
    if array.shape == shape:
        return array
    if not masks.broadcasts(array.shape, shape[-2:] if flat else shape):
        expected = f"(L, S) = {shape[-2:]}" if flat else f"(..., H, L, S) = {shape}"
        raise ValueError(f"{name} of shape {array.shape} does not broadcast to {expected}")
    return broadcast_to(array, shape, name)


# Numbers, sinks and results ------------------------------------------------------------------------


def _assemble(
    inputs: _Inputs,
    band: Band | None,
    lowered: masks.Lowered,
    bias: np.ndarray | None,
    scale: float | None,
    softcap: float | None,
    sinks: ArrayLike | None,
    out: np.ndarray | None,
    return_lse: bool,
    return_weights: bool,
    may_fail: bool = False,
    dropout: Dropout | None = None,
) -> Request:
    """Checks the remaining options, and makes room for the results."""
    q, k, v, flat, swapped = inputs.query, inputs.key, inputs.value, inputs.flat, inputs.swapped
    S, dtype, result = inputs.sizes.S, inputs.dtype, inputs.result
    scale, softcap, sinks = _numbers(inputs, scale, softcap, sinks)
    shape, rows = _result_shapes(inputs)
    given = None if out is None else check_out(out, shape, result, dtype)
    others = (bias, lowered.dense, sinks, given)
    if not (type(q) is np.ndarray and all(a is None or type(a) is np.ndarray for a in others)):
        check_places(query=q, bias=bias, mask=lowered.dense, sinks=sinks, out=given)
    staged = None
    if given is None:
        out = target = _empty(shape, result, q, "the result")
    else:
        target = given
        parts = (part for x in (k, v) for part in (x.memory() if isinstance(x, Rows) else [x]))
        reads = (q, *parts, bias, sinks, lowered.dense)
        if may_fail or any(array is not None and overlap(given, array) for array in reads):
            if isinstance(given, DeviceArray):
                raise ValueError(f"out must not share memory with what is read on {given.device}")
            staged = target = np.empty(shape, given.dtype)
    lse = _empty(rows, dtype, q, "the lse") if return_lse else None
    weights = _empty((*rows, S), result, q, "the weights") if return_weights else None
    results = (out,) if lse is None else (out, lse)
    if weights is not None:
        results = (*results, weights)
    if flat:
        target, lse, weights = (None if array is None else array[None] for array in (target, lse, weights))
    elif swapped:
        target = target.swapaxes(-3, -2)

    problem = Problem(
        query=q,
        key=k,
        value=v,
        out=target,
        lse=lse,
        weights=weights,
        dtype=dtype,
        scale=scale,
        softcap=softcap,
        bias=bias,
        sinks=sinks,
        band=band,
        key_start=lowered.key_start,
        key_stop=lowered.key_stop,
        dense=lowered.dense,
        mask_map=lowered.mask_map,
        dropout=dropout,
    )
    return Request(problem, results, staged, swapped)


def _numbers(
    inputs: _Inputs, scale: float | None, softcap: float | None, sinks: ArrayLike | None
) -> tuple[float, float | None, np.ndarray | None]:
    """Scale, soft-cap and sinks, checked."""
    scale = 1 / sqrt(inputs.query.shape[-1]) if scale is None else _finite(scale, "scale")
    if softcap is not None:
        softcap = _finite(softcap, "softcap")
        limits = np.finfo(inputs.dtype)
        if not float(limits.tiny) <= softcap <= float(limits.max):
            raise ValueError(
                f"softcap must be positive, and a normal number in {inputs.dtype}, got {softcap!r}"
            )
    return scale, softcap, None if sinks is None else _sinks(sinks, inputs.sizes.H, inputs.dtype)


def check_shape(shape: Iterable[int]) -> tuple[int, ...]:
    """The shape of weights, ``(..., S)``."""
    try:
        sizes = tuple(index(n) for n in shape)
    except TypeError:
        raise TypeError(f"shape must be a sequence of integers, got {shape!r}") from None
    if not sizes or min(sizes) < 0:
        raise ValueError(f"shape must have at least one axis, and none below 0, got {shape!r}")
    return sizes


def check_dropout(
    p: float, seed: int | None, *, name: str = "dropout", is_needed: bool = False
) -> Dropout | None:
    """What `dropout`, which has this name, and `seed` say; None where nothing is dropped.

    `is_needed`: the seed, even then.
    """
    share = _finite(p, name)
    if not 0 <= share < 1:
        raise ValueError(f"{name} must be at least 0 and less than 1, got {p!r}")
    threshold = round(65536 * share)
    if threshold == 65536:
        raise ValueError(f"{name} must be less than 1 - 2**-17, as it is counted in 2**-16, got {p!r}")
    if seed is None:
        if threshold or is_needed:
            raise ValueError(f"{name} needs a seed, seed=<int>: there is no global random state")
        return None
    if isinstance(seed, (bool, np.bool_)) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed must be an int, got {seed!r}")
    if not 0 <= int(seed) < 2**128:
        raise ValueError(f"seed must be at least 0 and less than 2**128, got {seed!r}")
    if not threshold:
        return None
    from fastattn._dropout import Dropout  # no part of an import of the package

    return Dropout(threshold, int(seed))


def _result_shapes(inputs: _Inputs) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of out and lse as the caller sees them."""
    lead, H, L, _ = inputs.sizes
    E = inputs.value.shape[-1]
    if inputs.flat:
        return (L, E), (L,)
    return (*lead, L, H, E) if inputs.swapped else (*lead, H, L, E), (*lead, H, L)


def _finite(value: Any, name: str) -> float:
    try:
        if isinstance(value, (str, bytes, bool, np.bool_)) or np.ndim(value):
            raise TypeError
        number = float(value)
    except TypeError:
        raise TypeError(f"{name} must be a finite number, got {value!r}") from None
    except OverflowError:
        number = float("inf")
    if not isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return number


def _sinks(sinks: ArrayLike, num_heads: int, dtype: np.dtype) -> np.ndarray:
    array = as_array(sinks, "sinks")
    is_number = array.dtype.kind in "iuf" or storage_of(array.dtype) != REAL
    if not is_number or array.dtype.itemsize > 8:
        raise TypeError(f"sinks must be a float array, got dtype {array.dtype}")
    if array.shape != (num_heads,):
        raise ValueError(f"sinks must have shape (H,) = ({num_heads},), got {array.shape}")
    if isinstance(array, DeviceArray):
        return array.read_as(dtype)
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array, dtype)


def _empty(shape: tuple[int, ...], dtype: np.dtype, beside: Any, name: str) -> Any:
    """Room for a result where the array `beside` is; on a GPU the backend makes it."""
    if isinstance(beside, DeviceArray):
        return beside.new(shape, dtype)
    try:
        return np.empty(shape, dtype)
    except ValueError:
        raise ValueError(f"{name} would have shape {shape}, and more than 2**63 bytes") from None


def check_out(out: Any, shape: tuple[int, ...], dtype: np.dtype, computed: np.dtype) -> Any:
    """`out` as an array to write to, of the result's dtype or of that of the computation."""
    array = as_device_array(out, "out")
    if array is None and not isinstance(out, np.ndarray):
        raise TypeError(f"out must be an ndarray, got {type(out).__name__}")
    out = np.asarray(out) if array is None else array
    if out.dtype != dtype and out.dtype != computed:
        wide = "" if computed == dtype else f", or {computed}"
        raise TypeError(f"out must have the result's dtype {dtype}{wide}, got {out.dtype}")
    if out.shape != shape:
        raise ValueError(f"out must have shape {shape}, got {out.shape}")
    if out.memory.readonly if isinstance(out, DeviceArray) else not out.flags.writeable:
        raise ValueError("out must be writeable, got a read-only array")
    if _may_overlap_itself(out):
        raise ValueError(f"out has elements that share memory: shape {out.shape} with strides {out.strides}")
    return out


def _may_overlap_itself(array: Any) -> bool:
    """Whether some axis steps by less than the axes inside it span (no array of NumPy's own making does)."""
    if not array.size:
        return False
    span = array.dtype.itemsize
    for stride, n in sorted((abs(stride), n) for stride, n in zip(array.strides, array.shape, strict=True)):
        if n > 1:
            if stride < span:
                return True
            span += stride * (n - 1)
    return False


def overlap(a: Any, b: Any) -> bool:
    if isinstance(a, DeviceArray):
        a, b = a.addresses(), b.addresses()
    try:
        return np.shares_memory(a, b, max_work=_OVERLAP_WORK)  # type: ignore[arg-type]  # any int will do
    except np.exceptions.TooHardError:
        return True
