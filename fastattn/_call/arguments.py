"""The edge, one argument at a time: what each may be, and the error that says what it is instead.

`fastattn._call.normalize` puts them together to a call. What other public functions take as `attention` does
is checked here too.
"""

from __future__ import annotations

from math import isfinite
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn import masks
from fastattn._call.problem import FLOAT32, FLOAT64
from fastattn._call.storage import INT8, REAL, Paged, Quantized, Rows, storage_code, storage_of
from fastattn._machine.device import (
    DeviceArray,
    as_device_array,
    broadcast_to,
    converted,
    from_dlpack,
    host_array,
    place,
)
from fastattn._machine.threads import no_fork
from fastattn.biases import Bias, Sum, check_dtype
from fastattn.masks.arguments import as_integer, axes_hint, broadcasts, integers, show, window_bound
from fastattn.masks.base import describe

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import ArrayLike

    from fastattn._call.dropout import Dropout

_OVERLAP_WORK = 1000  # candidates tried to tell whether two strided arrays share memory, some microseconds


#: Codes of the dtypes that functions of the caller's read as they are, in native byte order.
PLAIN_DTYPES = "?bBhHiIlLqQfd"


def readable(value: np.ndarray) -> Any:
    """An array as functions of the caller's read it: of native byte order, float16 as float32; without axes
    it is a NumPy scalar."""
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    if value.dtype == np.float16:
        value = value.astype(np.float32)
    return value if value.ndim else value[()]


# Arrays and dtypes --------------------------------------------------------------------------------


def as_array(value: Any, name: str) -> np.ndarray:
    """`value` as an ndarray, a view where it is one already."""
    if type(value) is np.ndarray:
        return value
    if isinstance(value, (Paged, Quantized)):
        raise TypeError(f"{name} must be an array here, got {value}")
    if (array := as_device_array(value, name)) is not None:
        return array  # type: ignore[return-value]  # what is asked of it here it has, too
    return converted(value, name)


def host_numbers(value: Any, name: str) -> np.ndarray:
    """`value` as an ndarray of numbers on the host."""
    array = value if type(value) is np.ndarray else host_array(as_array(value, name), name)
    check_number_dtype(array, name)
    return array


def as_rows(value: Any, name: str) -> np.ndarray | Rows:
    """Keys or values as an ndarray, or as `Rows` where they are in int8 or in pages."""
    if isinstance(value, (Paged, Quantized, Rows)):
        return Rows.of(value)
    return as_array(value, name)


def named(q: Any, k: Any, v: Any) -> tuple[tuple[Any, str], ...]:
    return (q, "query"), (k, "key"), (v, "value")


def check_places(**arrays: Any) -> None:
    """ValueError unless all arrays, None aside, are on the host or all on one GPU."""
    places = {name: place(array) for name, array in arrays.items() if array is not None}
    if len(set(places.values())) > 1:
        listed = ", ".join(f"{name} on {where}" for name, where in places.items())
        raise ValueError(f"all arrays must be on the host, or all on one GPU; got {listed}")


def computation_dtypes(
    q: np.ndarray, k: np.ndarray | Rows, v: np.ndarray | Rows
) -> tuple[np.dtype, np.dtype]:
    """What is computed in, and what the results are of: 16-bit types are computed in float32."""
    dtype = q.dtype
    if dtype == k.dtype == v.dtype and dtype in (FLOAT32, FLOAT64):
        return dtype, dtype
    counting = {name: array for array, name in named(q, k, v) if storage_code(array) != INT8}
    for name, array in counting.items():
        check_number_dtype(array, name)
    result = promote(**counting)
    return computed_in(result), result


def computed_in(dtype: np.dtype) -> np.dtype:
    """What arrays that promote to `dtype` are computed in: float32 for 16-bit types."""
    return dtype if storage_of(dtype) == REAL else FLOAT32


def promote(**arrays: np.ndarray | Rows) -> np.dtype:
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


def is_stored(array: np.ndarray | Rows) -> bool:
    """Whether an array is in 16 bits or in int8, which kernels read as they are."""
    return not isinstance(array, DeviceArray) and storage_code(array) != REAL


def check_number_dtype(array: np.ndarray | Rows, name: str) -> None:
    dtype = array.dtype
    if dtype.kind in "biu" or (dtype.kind == "f" and dtype.itemsize in (4, 8)) or storage_of(dtype) != REAL:
        return
    hint = "; a DataFrame of mixed or nullable columns: df.to_numpy(float)" if dtype.kind == "O" else ""
    raise TypeError(
        f"{name} has dtype {dtype}; supported are float32, float64, float16 and bfloat16, "
        f"and integers and bools, which count as float64{hint}"
    )


def as_shape(given: Any, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array of numbers of this shape and no other."""
    array = as_array(given, name)
    check_number_dtype(array, name)
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    return array


def as_dtype(array: np.ndarray | Rows, dtype: np.dtype, name: str) -> np.ndarray | Rows:
    """The array in another dtype. A copy is as large as the array's memory, not as its broadcast shape."""
    if array.dtype == dtype:
        return array
    if isinstance(array, Rows):
        return array.astype(dtype)
    if isinstance(array, DeviceArray):
        return array.read_as(dtype)
    stored = array[tuple(slice(None) if stride else slice(1) for stride in array.strides)]
    return broadcast_to(stored.astype(dtype), array.shape, name)


# Masks and bias -----------------------------------------------------------------------------------


def as_mask(mask: Any, flat: bool) -> masks.Mask:
    if isinstance(mask, masks.Mask):
        return mask
    got = describe(mask) if callable(mask) else ""
    if np.isscalar(mask) and not isinstance(mask, np.generic):  # those of NumPy are arrays without axes
        got = f"{mask!r}; for causal attention say causal=True"
    if isinstance(mask, (list, tuple)) and any(isinstance(part, masks.Mask) for part in mask):
        got = f"a {type(mask).__name__} of them: combine them by & (both) or | (either)"
    if got:
        raise TypeError(f"mask must be a fastattn.masks object or a bool or integer array, got {got}")
    dense = masks.Dense(as_array(mask, "mask"))
    if flat and dense.array.ndim > 2:
        raise ValueError(f"mask must broadcast to (L, S), got shape {dense.array.shape}")
    return dense


def check_causal(causal: Any) -> bool | str:
    if isinstance(causal, (bool, np.bool_)):
        return bool(causal)
    if isinstance(causal, str) and causal in ("top_left", "bottom_right"):
        return causal
    raise ValueError(f'causal must be False, True, "top_left" or "bottom_right", got {causal!r}')


def check_return_weights(wanted: Any) -> bool | str:
    if isinstance(wanted, (bool, np.bool_)):
        return bool(wanted)
    if isinstance(wanted, str) and wanted == "mean":
        return wanted
    kind = ValueError if isinstance(wanted, str) else TypeError
    raise kind(f'return_weights must be False, True or "mean", got {wanted!r}')


def check_precision(precision: Any) -> str:
    if isinstance(precision, str) and precision in ("exact", "storage"):
        return precision
    raise ValueError(f'precision must be "exact" or "storage", got {precision!r}')


def check_window(window: Any) -> tuple[int | None, int | None] | None:
    if window is None:
        return None
    try:
        left, right = window
    except (TypeError, ValueError) as error:
        raise type(error)(f"window must be a pair (left, right), got {window!r}") from None
    return window_bound(left, "window: left"), window_bound(right, "window: right")


def per_item(value: ArrayLike, name: str, lead: tuple[int, ...], length: int = -1) -> np.ndarray:
    """Integers that broadcast to the leading batch axes. Of `length` more they may be a mask of padding."""
    given = as_array(value, name)
    fits, hint = broadcasts(given.shape, lead), ""
    if given.shape == (*lead, length) and not fits:
        hint = f"; where it is a mask of padding at the end, say {name}.sum(-1)"
    else:
        given = integers(given, name)
    if not fits:
        raise ValueError(
            f"{name} of shape {given.shape} does not broadcast to the leading batch axes {lead}{hint}"
        )
    return given


def check_key_lengths(key_lengths: ArrayLike, lead: tuple[int, ...], len_k: int) -> np.ndarray:
    lengths = per_item(key_lengths, "key_lengths", lead, len_k)
    if lengths.size and (lengths.min() < 0 or lengths.max() > len_k):
        wrong = lengths[(lengths < 0) | (lengths > len_k)].flat[0]
        raise ValueError(f"key_lengths must be in 0..S={len_k}, got {wrong}")
    return lengths


def check_cu_seqlens(value: ArrayLike, name: str, total: int) -> np.ndarray:
    starts = integers(as_array(value, name), name)
    if starts.ndim != 1 or not starts.size:
        raise ValueError(f"{name} must have shape (documents + 1,), got {starts.shape}")
    if starts[0] != 0 or starts[-1] != total or (np.diff(starts) < 0).any():
        shown = starts.tolist() if starts.size <= 8 else f"{starts[:4].tolist()} ... {starts[-4:].tolist()}"
        raise ValueError(f"{name} must rise from 0 to T={total}, got {shown}")
    return starts


def _is_sum(bias: Any) -> bool:
    """Whether it is a tuple of arrays and objects that are added up, not one of numbers in the place of an
    array."""
    is_tuple = isinstance(bias, tuple)
    return is_tuple and any(isinstance(x, (Bias, masks.Mask)) or getattr(x, "shape", ()) for x in bias)


def bias_parts(bias: Any, name: str = "bias") -> list[tuple[str, Any]]:
    """The arrays and the objects other than sums that a bias is the sum of, by the names that errors give."""
    if bias is None and name == "bias":
        return []
    if _is_sum(bias):
        return [part for n, x in enumerate(bias) for part in bias_parts(x, f"{name}[{n}]")]
    return [(name, part) for part in bias._terms()] if isinstance(bias, Bias) else [(name, bias)]


def as_given_bias(bias: Any, parts: Iterator[Any]) -> Any:
    """What there is of each part, as the bias is given: tuples for tuples and sums."""
    if _is_sum(bias):
        return tuple(as_given_bias(x, parts) for x in bias)
    return tuple(next(parts) for _ in bias.terms) if isinstance(bias, Sum) else next(parts)


def as_bias(bias: ArrayLike, name: str) -> np.ndarray:
    if isinstance(bias, masks.Mask):
        raise TypeError(f"{name} must be an array or a bias object, got {bias!r}; a mask goes to mask=")
    return check_dtype(as_array(bias, name), name)


def check_single(bias: Any, scale: Any) -> None:
    """TypeError for biases that are added up, bias objects and scales of heads, which few callers take."""
    if isinstance(bias, (Bias, tuple)):
        raise TypeError(
            f"bias must be one array here, got {type(bias).__name__}: add up what it is the sum of; "
            f"that of an object is its materialize(H, L, S)"
        )
    if np.ndim(scale):
        raise TypeError(
            "scale must be one number here: multiply query by those of its heads, and say scale=1.0"
        )


def broadcast_scores(array: np.ndarray, shape: tuple[int, ...], name: str, flat: bool) -> np.ndarray:
    if array.shape == shape:
        return array
    if not broadcasts(array.shape, shape[-2:] if flat else shape):
        expected = f"(L, S) = {shape[-2:]}" if flat else f"(..., H, L, S) = {shape}"
        raise ValueError(
            f"{name} of shape {array.shape} does not broadcast to {expected}"
            f"{axes_hint(array.shape, shape, name)}"
        )
    return broadcast_to(array, shape, name)


# Numbers, sinks and results -----------------------------------------------------------------------


def is_swapped(layout: str) -> bool:
    if not isinstance(layout, str) or layout not in ("bhsd", "bshd"):
        raise ValueError(f'layout must be "bhsd" or "bshd", got {layout!r}')
    return layout == "bshd"


def count(value: Any, name: str, least: int, most: int) -> int:
    """An integer in least..most; raises where it is not one."""
    number = as_integer(value, name)
    if not least <= number <= most:
        raise ValueError(f"{name} must be in {least}..{most}, got {number}")
    return number


def check_bool(value: Any, name: str) -> None:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be a bool, got {value!r}")


def as_number(value: Any, name: str, kind: str = "a number") -> float:
    """`value` as a float, inf where it is an integer beyond all floats."""
    try:
        if isinstance(value, (str, bytes, bool, np.bool_, np.complexfloating)) or np.ndim(value):
            raise TypeError
        return float(value)
    except TypeError:
        raise TypeError(f"{name} must be {kind}, got {value!r}") from None
    except OverflowError:
        return float("inf")


def check_scale(scale: Any, num_heads: int, dtype: np.dtype) -> float | np.ndarray:
    """A number, or one for each query head."""
    if not np.ndim(scale):
        return check_finite(scale, "scale")
    array = check_per_head(scale, "scale", num_heads, dtype)
    if isinstance(array, DeviceArray):
        raise TypeError(
            "scale must be on the host: multiply query by scale[:, None, None], and say scale=1.0"
        )
    if not np.isfinite(array).all():
        raise ValueError(f"scale must be finite in {dtype}, got {show(np.asarray(scale))}")
    return array


def check_finite(value: Any, name: str) -> float:
    number = as_number(value, name, "a finite number")
    if not isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return number


def check_dropout(
    p: float, seed: int | None, *, name: str = "dropout", is_needed: bool = False
) -> Dropout | None:
    """The share `p`, which the caller knows by this name, and the seed as a `Dropout`; None if nothing is
    dropped. `is_needed`: the seed is required even then."""
    share = check_finite(p, name)
    if not 0 <= share < 1:
        raise ValueError(f"{name} must be at least 0 and less than 1, got {p!r}")
    threshold = round(65536 * share)
    if threshold == 65536:
        raise ValueError(f"{name} must be less than 1 - 2**-17, as it is counted in 2**-16, got {p!r}")
    if seed is None:
        if threshold or is_needed:
            raise ValueError(f"{name} needs a seed, seed=<int>: there is no global random state")
        return None
    checked = check_seed(seed)
    if not threshold:
        return None
    with no_fork:
        from fastattn._call.dropout import Dropout  # no part of an import of the package

    return Dropout(threshold, checked)


def check_seed(seed: Any) -> int:
    """The key of a Philox stream."""
    if isinstance(seed, (bool, np.bool_)) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed must be an int, got {seed!r}")
    if not 0 <= int(seed) < 2**128:
        raise ValueError(f"seed must be at least 0 and less than 2**128, got {seed!r}")
    return int(seed)


def check_shape(shape: Iterable[int]) -> tuple[int, ...]:
    """The shape of weights, ``(..., S)``."""
    try:
        sizes = tuple(index(n) for n in shape)
    except TypeError:
        raise TypeError(f"shape must be a sequence of integers, got {shape!r}") from None
    if not sizes or min(sizes) < 0:
        raise ValueError(f"shape must have at least one axis, and none below 0, got {shape!r}")
    return sizes


def check_per_head(given: ArrayLike, name: str, num_heads: int, dtype: np.dtype) -> np.ndarray:
    """A number for each query head, in the dtype of the computation."""
    array = as_array(given, name)
    is_number = array.dtype.kind in "iuf" or storage_of(array.dtype) != REAL
    if not is_number or array.dtype.itemsize > 8:
        raise TypeError(f"{name} must be a float array, got dtype {array.dtype}")
    if array.shape != (num_heads,):
        raise ValueError(f"{name} must have shape (H,) = ({num_heads},), got {array.shape}")
    if isinstance(array, DeviceArray):
        return array.read_as(dtype)
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array, dtype)


def check_out(
    out: Any, shape: tuple[int, ...], dtype: np.dtype, computed: np.dtype, name: str = "out"
) -> Any:
    """`out` as an array to write to, of the result's dtype or of that of the computation."""
    if (array := as_device_array(out, name)) is not None:
        out = array
    elif isinstance(out, np.ndarray):
        out = np.asarray(out)
    elif hasattr(out, "__dlpack__"):
        out = from_dlpack(out)
    else:
        raise TypeError(f"{name} must be an ndarray, got {type(out).__name__}")
    if out.dtype != dtype and out.dtype != computed:
        wide = "" if computed == dtype else f", or {computed}"
        raise TypeError(f"{name} must have the result's dtype {dtype}{wide}, got {out.dtype}")
    if out.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {out.shape}")
    if out.memory.readonly if isinstance(out, DeviceArray) else not out.flags.writeable:
        raise ValueError(f"{name} must be writeable, got a read-only array")
    if _may_overlap_itself(out):
        raise ValueError(
            f"{name} has elements that share memory: shape {out.shape} with strides {out.strides}"
        )
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


def check_wrt(wrt: Any, among: tuple[str, ...]) -> tuple[str, ...]:
    """The arguments that `wrt` names, one or several; raises where it names another."""
    try:
        names = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    except TypeError:
        raise TypeError(f"wrt must name some of {', '.join(among)}, got {wrt!r}") from None
    for name in names:
        if not isinstance(name, str) or name not in among:
            raise ValueError(f"wrt must name some of {', '.join(among)}, got {name!r}")
    return names


def as_pieces(
    outs: Sequence[ArrayLike], lses: Sequence[ArrayLike]
) -> tuple[list[tuple[Any, Any]], np.dtype, np.dtype]:
    """The arguments of `merge_attention` as pairs, and the dtypes of its results."""
    for given, name in ((outs, "outs"), (lses, "lses")):
        if not hasattr(given, "__getitem__"):
            raise TypeError(f"{name} must be a sequence of arrays, got {given!r}")
    pieces, sums = (
        {f"{name}[{n}]": as_array(x, f"{name}[{n}]") for n, x in enumerate(given)}
        for given, name in ((outs, "outs"), (lses, "lses"))
    )
    if not pieces or len(pieces) != len(sums):
        raise ValueError(
            f"merge_attention needs as many outs as lses, and at least one; got {len(pieces)} and {len(sums)}"
        )
    for name, array in (pieces | sums).items():
        check_number_dtype(array, name)
    shapes, lse_shapes = ([x.shape for x in arrays.values()] for arrays in (pieces, sums))
    if not shapes[0] or set(shapes) != {shapes[0]} or set(lse_shapes) != {shapes[0][:-1]}:
        raise ValueError(
            f"every out must have one shape (..., E) and every lse its (...); "
            f"got outs {shapes}, lses {lse_shapes}"
        )
    check_places(**pieces)
    check_places(**{"outs[0]": pieces["outs[0]"]}, **sums)
    return list(zip(pieces.values(), sums.values(), strict=True)), promote(**pieces), promote(**sums)
