"""The edge: array_like arguments to a `Problem`.

This and `fastattn._call.arguments` are the one place that raises on them, before any work: how the arguments
of a call fit together is checked here, what each may be by itself there. What packed documents, gradients and
functions of scores have of their own is in `varlen`, `backward` and `scores`. What comes out is views: an
array is converted only when its dtype or byte order is not the one of the computation, and broadcast axes are
never expanded.

Arrays on a GPU go through it as `DeviceArray`, in the place of ndarrays: only their shapes and dtypes matter
here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from math import gcd, prod, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from fastattn import masks
from fastattn._call.arguments import (
    as_array,
    as_bias,
    as_dtype,
    as_mask,
    as_rows,
    as_shape,
    bias_parts,
    broadcast_scores,
    check_bool,
    check_causal,
    check_dropout,
    check_finite,
    check_key_lengths,
    check_out,
    check_per_head,
    check_places,
    check_precision,
    check_return_weights,
    check_scale,
    check_window,
    computation_dtypes,
    is_stored,
    is_swapped,
    named,
    overlap,
)
from fastattn._call.options import DEFAULTS
from fastattn._call.problem import MAX_DIM, MAX_ROWS, Problem, mean_over_heads
from fastattn._call.storage import Paged, Quantized, Rows
from fastattn._machine.device import (
    DeviceArray,
    broadcast_to,
    in_library_of,
    place,
)
from fastattn.biases import Bias, Term, arrays_of, is_bias_dtype
from fastattn.masks import base
from fastattn.masks.map import Band, Block, Size, bounded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import ArrayLike

    from fastattn._call.options import RowsLike

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_AXES = {"bhsd": "(..., heads, length, dim)", "bshd": "(..., length, heads, dim)"}
_HEAD_DIMS = (32, 64, 80, 96, 128, 256)  # that models have


class Request(NamedTuple):
    """A problem to solve, and how its results go back to the caller."""

    problem: Problem[Any]
    results: tuple[Any, ...]  #: out, then lse and weights where asked for, in the caller's shapes
    staged: np.ndarray | None  #: what the backend fills instead of an `out` that overlaps an input, or that
    #: must not be written to if the work fails
    swapped: bool  #: the caller's length axis stands before the head axis

    def finish(self, query: Any, out: Any) -> Any:
        """The results as the caller wants them, of the library of its query; to be called when the problem is
        solved."""
        if self.staged is not None:
            self.results[0][...] = self.staged
        results = self.results
        mean_dtype = self.problem.mean_dtype
        if mean_dtype is not None:
            results = (*results[:-1], mean_over_heads(results[-1], mean_dtype))
        if type(results[0]) is DeviceArray:
            results = tuple(result.memory.owner for result in results)
        elif type(query) is not np.ndarray:
            results = tuple(in_library_of(query, array) for array in results)
        if out is not None:
            results = (out, *results[1:])
        return results[0] if len(results) == 1 else results

    def with_lse(self, lse: np.ndarray, others: Mapping[str, np.ndarray | None]) -> Request:
        """The same request, whose lse goes to the array `lse` of the caller, as the `others` are."""
        own = self.results[1]
        check_out(lse, own.shape, own.dtype, own.dtype, "lse")
        for name, array in others.items():
            if array is not None and overlap(lse, array):
                raise ValueError(f"lse must not share memory with {name}")
        return self._replace(problem=self.problem._replace(lse=lse), results=(self.results[0], lse))


class Inputs(NamedTuple):
    """Query, key and value as ``(*lead, heads, length, dim)`` views, in the dtype of the computation or in 16
    bits."""

    query: Any
    key: Any  #: an array or `Rows`
    value: Any
    dtype: np.dtype  #: of the computation
    result: np.dtype  #: of its results
    sizes: Size
    flat: bool  #: the caller gave matrices: one head without an axis of its own
    swapped: bool  #: the caller's length axis stands before the head axis

    def located(self, lengths: np.ndarray | None) -> Inputs:
        """With the addresses of the pages that hold the first `lengths` keys of each item."""
        found: dict[str, Any] = {}
        for name, rows in (("key", self.key), ("value", self.value)):
            if isinstance(rows, Rows):
                try:
                    found[name] = rows.located(lengths)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
        return self._replace(**found) if found else self


def naming_shapes(
    normalize: Callable[Arguments, Result], names: tuple[str, ...] = ("query", "key", "value")
) -> Callable[Arguments, Result]:
    """Appends the shapes of `names`, the first arguments, to every error. Where the options, the fourth, have
    a layout, it also hints at another."""

    @wraps(normalize)
    def naming(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return normalize(*args, **kwargs)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            options: Any = args[3] if len(args) > 3 else {}
            inputs: Any = args[: len(names)]
            shapes = [_shape(x) for x in inputs]
            described = zip(names, map(_described, inputs, shapes), strict=True)
            listed = ", ".join(f"{name} {text}" for name, text in described)
            hints = _shape_hints(shapes, options) if isinstance(options, dict) and "layout" in options else []
            raise kind("; ".join([str(error), listed, *hints])) from None

    return naming


def _described(given: Any, shape: tuple[int, ...] | None) -> Any:
    if isinstance(given, (Paged, Quantized)):
        return given
    if isinstance(given, Rows):
        *lead, _, dim = given.shape  # whose length is that of any item, rounded up
        return f"({', '.join(map(str, lead))}, ..., {dim}) in a cache"
    return "of no shape" if shape is None else shape


def _shape(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, (Paged, Quantized, Rows)):
        return None
    try:
        return tuple(np.shape(value))
    except (TypeError, ValueError):
        return None


def as_request(
    query: ArrayLike,
    key: RowsLike,
    value: RowsLike,
    options: dict[str, Any],
    *,
    function_mask: masks.Mask | None = None,
    may_fail: bool = False,
    keep_first: int = 0,
) -> Request:
    """The arguments of `attention` as a `Request`; see there for what they mean and what is raised.

    `function_mask` is one more mask. It fits any size, and evaluating it takes long. `may_fail`: the work may
    raise, or read arrays that are not here, so that nothing is written to `out` before its end. `keep_first`
    keys are in the window of every query, where they are in pages.
    """
    options = DEFAULTS | options
    inputs = as_inputs(query, key, value, swapped=is_swapped(options["layout"]))
    band = band_of(inputs, options)
    inputs = inputs.located(None if band is None else band.lengths)
    if band is not None and keep_first:
        band = band._replace(keep_first=keep_first)
    lowered = lowered_for(both(function_mask, mask_given(inputs, options)), inputs, band)
    bias = bias_of_scores(options["bias"], inputs)
    return assemble(inputs, band, lowered, bias, options, may_fail)


normalize = naming_shapes(as_request)


def _outline(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, options: dict[str, Any]
) -> tuple[Inputs, masks.Mask | None, Band | None, float, float | None]:
    """What `normalize` checks, without room for results: sizes and dtypes, mask, band, scale and soft-cap.

    An array of strides of 0, of the same shape and dtype, may take the place of one that is not there yet.
    """
    options = DEFAULTS | options
    inputs = as_inputs(query, key, value, swapped=is_swapped(options["layout"]))
    band = band_of(inputs, options)
    mask = mask_given(inputs, options)
    if mask is not None:
        mask._bind(Block(*inputs.sizes, whole=inputs.sizes[2:]))
    bias_of_scores(options["bias"], inputs)
    numbers = numbers_of(inputs, options)
    return inputs, mask, band, numbers["scale"], numbers["softcap"]


outline = naming_shapes(_outline)


@naming_shapes
def normalize_sdpa(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    options: dict[str, Any],
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> Request:
    """The arguments of `scaled_dot_product_attention`, by PyTorch's conventions."""
    if check_finite(dropout_p, "dropout_p") != 0:
        raise ValueError(
            f"dropout_p must be 0, got {dropout_p!r}: there is no global random state here; "
            f"fastattn.attention drops weights by a seed, dropout={dropout_p!r}, seed=..."
        )
    check_bool(is_causal, "is_causal")
    check_bool(enable_gqa, "enable_gqa")
    q, k, v = as_array(query, "query"), as_array(key, "key"), as_array(value, "value")
    if not enable_gqa and min(q.ndim, k.ndim, v.ndim) >= 3:
        q, k, v = _matched_heads(q, k, v)
    inputs = as_inputs(q, k, v, swapped=False)
    lead, H, L, S = inputs.sizes
    attn_mask, options = options["mask"], DEFAULTS | options
    band = band_of(inputs, options)
    mask: masks.Mask | None = None
    bias: tuple[Term, ...] = ()
    if attn_mask is not None:
        if isinstance(attn_mask, (bool, int, float, str)):  # an argument that was given one place too early
            raise TypeError(f"attn_mask must be an array, got {attn_mask!r}; is_causal and scale go by name")
        array = as_array(attn_mask, "attn_mask")
        if array.dtype.kind != "b" and not is_bias_dtype(array.dtype):
            raise TypeError(
                f"attn_mask must be bool (True = may attend), or float16, bfloat16, float32 or float64 "
                f"(added), got dtype {array.dtype}"
            )
        array = broadcast_scores(array, (*lead, H, L, S), "attn_mask", inputs.flat)
        if array.dtype.kind == "b":
            mask = masks.Dense(array)
        else:
            bias = (array,)
    return assemble(inputs, band, lowered_for(mask, inputs, band), bias, options)


# What shapes that do not fit may be ----------------------------------------------------------------


def _shape_hints(shapes: list[Any], options: dict[str, Any]) -> list[str]:
    """Hints at another layout of query, key and value, where they do not fit each other or the options."""
    ranks = {0 if shape is None else len(shape) for shape in shapes}
    layout = options["layout"]
    if min(ranks) < 3 or not isinstance(layout, str) or layout not in _AXES:
        return []
    hints = []
    wrong = not _fits(shapes, options)
    other = "bshd" if layout == "bhsd" else "bhsd"
    if wrong and _fits(shapes, options | {"layout": other}):
        hints.append(f'where the arrays are {_AXES[other]}, say layout="{other}"')
    head_dim = shapes[0][-1]
    is_wide = head_dim > max(_HEAD_DIMS) and any(head_dim % usual == 0 for usual in _HEAD_DIMS)
    if ranks == {3} and (is_wide or (wrong and _fits_unsplit(shapes, options))):
        hints.append(
            "where the last axis holds all heads, (B, L, H * D), reshape to (B, L, H, D) "
            'and say layout="bshd"'
        )
    return hints


def _fits(shapes: Sequence[Any], options: dict[str, Any]) -> bool:
    """Whether arrays of these shapes fit together, and with the options whose shapes depend on them."""
    query, key, value = (np.broadcast_to(np.float32(0), shape) for shape in shapes)
    try:
        _outline(query, key, value, options | {"scale": None, "softcap": None, "dropout": 0.0, "seed": None})
    except Exception:  # of any kind: a hint must not put an error of its own in the place of the first
        return False
    return True


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


def as_inputs(query: ArrayLike, key: RowsLike, value: RowsLike, *, swapped: bool) -> Inputs:
    q: Any = as_array(query, "query")
    k: Any = as_rows(key, "key")
    v: Any = as_rows(value, "value")
    if not (type(q) is type(k) is type(v) is np.ndarray):
        check_places(query=q, key=k, value=v)
    dtype, result = computation_dtypes(q, k, v)
    if not (q.dtype == k.dtype == v.dtype == dtype):
        q, k, v = (
            array if is_stored(array) else as_dtype(array, dtype, name) for array, name in named(q, k, v)
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
            for array, name in named(q, k, v)
        )
    sizes = Size(q.shape[:-3], H, q.shape[-2], S)
    inputs = Inputs(q, k, v, dtype, result, sizes, flat=min(ranks) == 2, swapped=swapped)
    _check_sizes(inputs)
    return inputs


def _swapped(array: np.ndarray | Rows, given: Any) -> np.ndarray | Rows:
    """The axes of heads and rows swapped; those of a cache's `Rows` are in one order in either layout."""
    if not isinstance(array, Rows):
        return array.swapaxes(-3, -2)
    return array if array is given else array.swapped()


def _check_sizes(inputs: Inputs) -> None:
    """ValueError where a size is beyond what any backend counts with; see `fastattn._call.problem`."""
    lead, H, L, S = inputs.sizes
    for name, array in (("query and key", inputs.query), ("value", inputs.value)):
        if (dim := array.shape[-1]) > MAX_DIM:
            raise ValueError(f"head_dim of {name} must be at most {MAX_DIM}, got {dim}")
    batch, K = prod(lead), inputs.key.shape[-3]
    for name, product, heads, length in (("query", "B * H * L", H, L), ("key", "B * K * S", K, S)):
        if (rows := max(1, batch * heads) * length) > MAX_ROWS:
            raise ValueError(
                f"{name} must have at most {MAX_ROWS} rows over all items and heads, {product}, got {rows}"
            )


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
    q, k, v = (broadcast_to(x, (*x.shape[:-3], num_heads, *x.shape[-2:]), name) for x, name in named(q, k, v))
    return q, k, v


# Masks and bias ------------------------------------------------------------------------------------


def mask_given(inputs: Inputs, options: dict[str, Any]) -> masks.Mask | None:
    return None if options["mask"] is None else as_mask(options["mask"], inputs.flat)


def both(one: masks.Mask | None, other: masks.Mask | None) -> masks.Mask | None:
    return other if one is None else one if other is None else one & other


def lowered_for(mask: masks.Mask | None, inputs: Inputs, band: Band | None) -> base.Lowered:
    """The mask for this problem. Mask maps are kept for other calls, so that no array decides on them."""
    if mask is None:
        return base.Lowered()
    return base.lower(mask, *inputs.sizes, None if band is None or band.lengths is not None else band)


def band_of(inputs: Inputs, options: dict[str, Any]) -> Band | None:
    """What `causal`, `window` and `key_lengths` leave of each row, or None for all of it."""
    causal, window = check_causal(options["causal"]), check_window(options["window"])
    key_lengths = options["key_lengths"]
    if causal is False and window is None and key_lengths is None:
        return None
    lead, _, L, S = inputs.sizes
    if causal is True and L != S:
        raise ValueError(
            f'causal=True needs L == S, got L={L} and S={S}; say causal="top_left" (query i reads keys '
            f'j <= i) or causal="bottom_right" (the last query reads up to the last key)'
        )
    lengths = None if key_lengths is None else np.broadcast_to(check_key_lengths(key_lengths, lead, S), lead)
    return Band(*reach(causal, window), lengths)


def reach(causal: bool | str, window: tuple[int | None, int | None] | None) -> tuple[int, int, bool]:
    """``left, right, at_end`` of a `Band`; a window alone is aligned as ``causal="bottom_right"`` is."""
    left, right = map(bounded, window or (None, None))
    at_end = causal == "bottom_right" or (causal is False and window is not None)
    return left, right if causal is False else 0, at_end


def bias_of_scores(bias: Any, inputs: Inputs) -> tuple[Term, ...]:
    """The terms of a bias, as views of the shape of the scores."""
    if bias is None:
        return ()
    lead, H, L, S = inputs.sizes
    terms: list[Term] = []
    for name, part in bias_parts(bias):
        if not isinstance(part, Bias):
            terms.append(broadcast_scores(as_bias(part, name), (*lead, H, L, S), name, inputs.flat))
        elif isinstance(inputs.query, DeviceArray):
            raise TypeError(
                f"{name}: {part!r} is read on the host, and query is on {place(inputs.query)}: "
                f"say bias=bias.materialize({H}, {L}, {S}), there"
            )
        else:
            terms.append(part._lower(inputs.sizes, inputs.dtype))
    return tuple(terms)


# Numbers, sinks and results ------------------------------------------------------------------------


def assemble(
    inputs: Inputs,
    band: Band | None,
    lowered: base.Lowered,
    bias: tuple[Term, ...],
    options: dict[str, Any],
    may_fail: bool = False,
) -> Request:
    """Checks the remaining options, and makes room for the results."""
    numbers = numbers_of(inputs, options)
    return_lse, return_weights = options["return_lse"], check_return_weights(options["return_weights"])
    check_bool(return_lse, "return_lse")
    of_bias = [array for term in bias for array in arrays_of(term)]
    reads = {f"bias[{n}]" if n else "bias": array for n, array in enumerate(of_bias)}
    reads |= {"mask": lowered.dense, "sinks": numbers["sinks"]}
    out, staged, target = room_for_out(inputs, options["out"], reads, may_fail)
    query, dtype, flat = inputs.query, inputs.dtype, inputs.flat
    _, rows = result_shapes(inputs)
    lse = _empty(rows, dtype, query, "the lse") if return_lse else None
    mean_dtype, weights = inputs.result if return_weights == "mean" and not flat else None, None
    if return_weights:
        kind = inputs.result if mean_dtype is None else dtype
        weights = _empty((*rows, inputs.sizes.S), kind, query, "the weights")
    results = (out,) if lse is None else (out, lse)
    if weights is not None:
        results = (*results, weights)
    if flat:
        lse, weights = (None if array is None else array[None] for array in (lse, weights))
    problem = as_problem(inputs, (target, lse, weights), band, lowered, bias, numbers)
    return Request(problem._replace(mean_dtype=mean_dtype), results, staged, inputs.swapped)


def room_for_out(
    inputs: Inputs, out: Any, reads: Mapping[str, Any], may_fail: bool = False
) -> tuple[Any, np.ndarray | None, Any]:
    """The result as the caller gets it, `out` if that is given; what is filled in its place, where it is read
    as well or must not be written to if the work fails; and that which is filled as
    ``(*lead, heads, length, dim)``.

    `reads` are the arrays by name that are read beside query, key and value, or None.
    """
    q, k, v, dtype, result, *_ = inputs
    shape, _ = result_shapes(inputs)
    if out is not None:
        out = check_out(out, shape, result, dtype)
    read = [q, *reads.values()]
    if not all(x is None or type(x) is np.ndarray for x in (*read, out)):
        check_places(query=q, **reads, out=out)
    staged = None
    if out is None:
        out = _empty(shape, result, q, "the result")
    else:
        read += (part for x in (k, v) for part in (x.memory() if isinstance(x, Rows) else [x]))
        if may_fail or any(x is not None and overlap(out, x) for x in read):
            if isinstance(out, DeviceArray):
                raise ValueError(f"out must not share memory with what is read on {out.device}")
            staged = np.empty(shape, out.dtype)
    return out, staged, _with_heads(out if staged is None else staged, inputs)


def as_result(given: ArrayLike, name: str, inputs: Inputs) -> np.ndarray:
    """An array that has the shape of the result, as ``(*lead, heads, length, dim)``, in the dtype of the
    computation or in 16 bits."""
    array: Any = as_shape(given, name, result_shapes(inputs)[0])
    if not is_stored(array):
        array = as_dtype(array, inputs.dtype, name)
    return _with_heads(array, inputs)


def _with_heads(array: Any, inputs: Inputs) -> Any:
    """A result in the caller's shape as ``(*lead, heads, length, dim)``."""
    if inputs.flat:
        return array[None]
    return array.swapaxes(-3, -2) if inputs.swapped else array


def as_problem(
    inputs: Inputs,
    results: tuple[Any, Any, Any],
    band: Band | None,
    lowered: base.Lowered,
    bias: tuple[Term, ...],
    numbers: dict[str, Any],
) -> Problem[Any]:
    query, key, value, dtype, *_ = inputs
    key_start, key_stop, dense, mask_map = lowered
    if isinstance(numbers["scale"], np.ndarray):
        query, numbers = _times(query, numbers["scale"]), numbers | {"scale": 1.0}
    return Problem(
        query, key, value, *results, dtype, bias=bias, band=band, key_start=key_start, key_stop=key_stop,
        dense=dense, mask_map=mask_map, **numbers,
    )  # fmt: skip


def _times(query: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """The query, each head times its factor, in the dtype of the factors and rounded once. Axes that are
    broadcast stay so, but for that of the heads."""
    if isinstance(query, DeviceArray):
        raise TypeError(
            f"scale must be one number where query is on {place(query)}: multiply query by those of its "
            f"heads, there, and say scale=1.0"
        )
    stored = query[tuple(slice(None) if stride else slice(1) for stride in query.strides)]
    with np.errstate(all="ignore"):
        product = stored.astype(factors.dtype, copy=False) * factors[:, None, None]
    return np.broadcast_to(product, query.shape)


def numbers_of(inputs: Inputs, options: dict[str, Any]) -> dict[str, Any]:
    """The options that a `Problem` has under their names, checked."""
    scale, softcap, sinks = options["scale"], options["softcap"], options["sinks"]
    H = inputs.sizes.H
    scale = 1 / sqrt(inputs.query.shape[-1]) if scale is None else check_scale(scale, H, inputs.dtype)
    if softcap is not None:
        softcap = check_finite(softcap, "softcap")
        limits = np.finfo(inputs.dtype)
        if not float(limits.tiny) <= softcap <= float(limits.max):
            raise ValueError(
                f"softcap must be positive, and a normal number in {inputs.dtype}, got {softcap!r}"
                f"{'' if softcap else '; leave it out for none'}"
            )
    if sinks is not None:
        sinks = check_per_head(sinks, "sinks", H, inputs.dtype)
    dropout = check_dropout(options["dropout"], options["seed"])
    return {
        "scale": scale,
        "softcap": softcap,
        "sinks": sinks,
        "dropout": dropout,
        "rounds_weights": check_precision(options["precision"]) == "storage",
    }


def result_shapes(inputs: Inputs) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of out and lse as the caller sees them."""
    lead, H, L, _ = inputs.sizes
    E = inputs.value.shape[-1]
    if inputs.flat:
        return (L, E), (L,)
    return (*lead, L, H, E) if inputs.swapped else (*lead, H, L, E), (*lead, H, L)


def _empty(shape: tuple[int, ...], dtype: np.dtype, beside: Any, name: str) -> Any:
    """Room for a result where the array `beside` is; on a GPU the backend makes it."""
    if isinstance(beside, DeviceArray):
        return beside.new(shape, dtype)
    try:
        return np.empty(shape, dtype)
    except ValueError:
        raise ValueError(f"{name} would have shape {shape}, and more than 2**63 bytes") from None
