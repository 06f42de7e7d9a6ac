"""Arguments of masks: checks that raise, and how values are compared, hashed and shown."""

from __future__ import annotations

import operator
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._machine.device import DeviceArray, host_array
from fastattn.masks.map import UNBOUNDED

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike

LIMIT = f"2**{UNBOUNDED.bit_length() - 1}"  # as errors say it


def same(a: Any, b: Any) -> bool:
    """Whether two arguments of masks are equal: arrays by shape and values, and tuples of such."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and (a is b or np.array_equal(a, b))
    if isinstance(a, DeviceArray) and isinstance(b, DeviceArray):
        return a.same_view(b)
    return bool(a == b)


def hashable(value: Any) -> Any:
    """What stands for an argument in a hash: of an array its shape and first numbers."""
    return (value.shape, value.flat[:8].tobytes()) if isinstance(value, np.ndarray) else value


def show(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return repr(value)
    return str(value.tolist()) if value.size <= 8 and value.ndim <= 1 else show_shape(value)


def show_shape(value: Any) -> str:
    """An array of any library by its dtype and shape; anything else as it is."""
    if isinstance(value, tuple):
        return f"({', '.join(map(show_shape, value))})"
    return f"<{value.dtype} {tuple(value.shape)}>" if hasattr(value, "dtype") else repr(value)


def show_shapes(record: Any) -> str:
    """A named tuple of arrays."""
    fields = (f"{name}={show_shape(value)}" for name, value in record._asdict().items())
    return f"{type(record).__name__}({', '.join(fields)})"


def as_integer(value: Any, name: str, kind: str = "an integer") -> int:
    """`value` as an int; raises where it is none, or a bool."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be {kind}, got {value!r}") from None


def whole_number(value: Any, name: str) -> int:
    """An offset or a size as an int; raises where it is none."""
    number = as_integer(value, name, "a non-negative integer")
    if not 0 <= number < UNBOUNDED:
        raise ValueError(f"{name} must be a non-negative integer below {LIMIT}, got {value!r}")
    return number


def window_bound(value: Any, name: str) -> int | None:
    """A window's bound as an int or None; raises where it is neither or negative."""
    if value is None:
        return None
    bound = as_integer(value, name, "a non-negative integer or None")
    if bound < 0:
        raise ValueError(f"{name} must be a non-negative integer or None, got {value!r}")
    return bound


def per_axis(value: Any, name: str, check: Callable[[Any, str], Any], n_axes: int) -> Any:
    """What `check` makes of `value`, for all axes, or a tuple with one for each; raises where it does."""
    if np.ndim(value) == 0:
        return check(value, name)
    if len(value) != n_axes:
        raise ValueError(f"{name} must be one, or one for each axis of shape, {n_axes}, got {value!r}")
    return tuple(check(one, name) for one in value)


def positive_integer(value: Any, name: str) -> int:
    number = as_integer(value, name, "a positive integer, or one for each axis")
    if not 0 < number < UNBOUNDED:
        raise ValueError(f"{name} must be positive and below {LIMIT}, got {value!r}")
    return number


def true_or_false(value: Any, name: str) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be a bool, or one for each axis, got {value!r}")
    return bool(value)


def sizes(size: Any) -> tuple[int, int]:
    try:
        L, S = size
    except (TypeError, ValueError) as error:
        raise type(error)(f"size must be a pair (L, S), got {size!r}") from None
    return whole_number(L, "size: L"), whole_number(S, "size: S")


def check_align(align: Any) -> None:
    if not isinstance(align, str) or align not in ("top_left", "bottom_right"):
        raise ValueError(f'align must be "top_left" or "bottom_right", got {align!r}')


def integers(value: ArrayLike, name: str, minimum: int | None = None, saturate: bool = False) -> np.ndarray:
    """A read-only, C-contiguous int64 copy of an integer array_like. Numbers beyond int64 are refused, or
    clipped where `saturate` is set."""
    array = host_array(value, name)
    if array.dtype.kind in "uO" and array.size:
        array = _within_int64(array, name, saturate)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name} must be integers, got dtype {array.dtype}")
    array = array.astype(np.int64, order="C")
    if minimum is not None and array.size and array.min() < minimum:
        raise ValueError(f"{name} must not be below {minimum}, got {array.min()}")
    array.flags.writeable = False
    return array


def _within_int64(array: np.ndarray, name: str, saturate: bool) -> np.ndarray:
    """Integers beyond int64, which NumPy holds as uint64 or as Python's; arrays without any as they are."""
    limits = np.iinfo(np.int64)
    if array.dtype.kind == "u" and array.max() <= limits.max:
        return array
    numbers = array.astype(object)
    if not all(isinstance(number, int) for number in numbers.flat):
        return array
    inside = np.asarray(np.clip(numbers, limits.min, limits.max), dtype=object)
    outside = numbers[inside != numbers]
    if outside.size and not saturate:
        raise ValueError(f"{name} must be in -2**63..2**63 - 1, got {outside[0]}")
    return inside.astype(np.int64) if outside.size else array


def broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether `shape` broadcasts to exactly `target`."""
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(n in (1, m) for n, m in pairs)


def axes_hint(shape: tuple[int, ...], scores: tuple[int, ...], name: str) -> str:
    """What to write for an array that does not broadcast to the scores, ``(*lead, H, L, S)``, where it would
    with more axes."""
    *lead, H, L, S = scores
    for kept, missing in ((2, 1), (1, 2)):  # (*lead, L, S) lacks H, and (*lead, S) lacks H and L
        items, rest = shape[:-kept], shape[-kept:]
        if items and broadcasts((*items, *(1,) * missing, *rest), scores):
            index = [":"] * len(items) + ["None"] * missing + [":"] * (kept == 1)
            return f"; where its leading axes are those of the items, say {name}[{', '.join(index)}]"
    if lead and len(shape) == 3 and shape[0] == prod(lead) * H and broadcasts(shape[1:], (L, S)):
        split = ", ".join(map(str, (*lead, H, *shape[1:])))
        return f"; where its first axis is that of items and heads, say {name}.reshape({split})"
    return ""


def has_zeros_and_ones(array: Any) -> bool:
    """Whether an array of floats is a mask in their guise; zeros alone may as well be a bias."""
    if isinstance(array, DeviceArray):
        return False
    ones = array == 1
    return bool(ones.any() and (ones | (array == 0)).all())


def float_hint(array: Any) -> str:
    """What to write where a mask is an array of floats."""
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        return ""
    if has_zeros_and_ones(array):
        return "; a mask of zeros and ones is mask.astype(bool)"
    return "; for numbers added to the scores use bias=, else .astype(bool)"
