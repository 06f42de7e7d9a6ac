"""Rotary position embedding (RoPE): tables of cosines and sines, and rotation of queries and keys by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import ceil, floor, isfinite, log, pi
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._api.prepared import counts
from fastattn._call.arguments import (
    as_array,
    as_number,
    check_bool,
    check_out,
    count,
    host_numbers,
    is_swapped,
    overlap,
)
from fastattn._call.normalize import naming_shapes
from fastattn._call.options import public, refuse_arguments, refusing
from fastattn._call.problem import FLOAT32, FLOAT64, MAX_ROWS
from fastattn._call.rope import Rotation
from fastattn._call.storage import REAL, storage_of
from fastattn._machine import host
from fastattn._machine.device import host_array, in_library_of
from fastattn.backends.registry import function, load
from fastattn.masks.arguments import broadcasts, integers

if TYPE_CHECKING:
    from typing import Never

    from numpy.typing import ArrayLike, DTypeLike

    from fastattn._call.options import LayoutName

try:
    #: For plain arrays: checks and rotation in one, None where it takes another way.
    from fastattn.backends.cython.driver import rope as _rope_at_once
except ImportError:
    _rope_at_once = None

_CHUNK = 1024  # positions whose angles are in memory at once
_SCALINGS = {
    "linear": '("linear", factor)',
    "ntk": '("ntk", factor)',
    "yarn": '("yarn", factor, original_length) or ("yarn", factor, original_length, {options})',
    "llama3": '("llama3", factor, low, high, original_length)',
}
_YARN_OPTIONS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")


@public()
def rope(
    x: ArrayLike,
    cos: ArrayLike,
    sin: ArrayLike,
    *extra: Never,
    positions: ArrayLike | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    layout: LayoutName = "bhsd",
    out: np.ndarray | None = None,
    num_threads: int | None = None,
    **unknown: Never,
) -> np.ndarray:
    """Rotary position embedding: turn each pair of a row's elements by an angle that grows with its position.

    Letters as in `attention`; ``n`` positions of the tables, ``r <= D`` how many columns are rotated.

    Parameters
    ----------
    x : array_like, shape (..., H, L, D)
        Queries or keys, of the dtypes of `attention`. Two axes are ``(L, D)``, three ``(H, L, D)``.
    cos, sin : array_like of float, shape (n, r / 2)
        The tables, of `rope_tables` or others; read in the type of the computation. The columns from ``r``
        on pass through. Tables that have each column twice, as Hugging Face's ``(n, r)``, are refused.
    positions : array_like of int, shape (..., L), optional
        The row of the tables for each row of `x`; the leading axes broadcast to those of `x`. ``0 .. L - 1``
        when not given. One int will do where L is 1.
    interleaved : bool, default False
        Which elements are a pair, with r = 8 and a letter for each::

            False   a b c d a b c d    i and i + r / 2      (NeoX, Hugging Face, ONNX's default)
            True    a a b b c c d d    2 i and 2 i + 1      (Meta, GPT-J, GGUF)

    inverse : bool, default False
        Rotate back: the inverse, the transpose, and so the gradient of the rotation by the same tables.
    layout : {"bhsd", "bshd"}, default "bhsd"
        ``"bshd"``: `x` and the result are ``(..., L, H, D)``.
    out : ndarray, optional
        Where to write the result: exactly its shape and dtype, any strides. ``out=x`` rotates in place; it
        may overlap an argument in any other way, too.
    num_threads : int, optional
        As in `attention`.

    Returns
    -------
    ndarray
        `out`, or a new C-contiguous array, of the shape and the dtype of `x`, in native byte order.

    Raises
    ------
    TypeError
        A dtype that is not supported, tables that are not float, positions that are not integers, an `out`
        of another dtype or byte order, `interleaved` or `inverse` that is no bool, an array on a GPU.
    ValueError
        Shapes that do not fit, tables with each column twice, positions outside the tables (L beyond ``n``
        where there are none), an `out` that is read-only or overlaps itself, an unknown layout.

    All are raised before any work; `out` is then untouched.

    Notes
    -----
    The same in NumPy, for ``r = D`` and pairs that are not interleaved::

        a, b = np.split(x, 2, axis=-1)
        c, s = cos[positions], sin[positions]
        out = np.concatenate([a * c - b * s, b * c + a * s], axis=-1)

    Both products are rounded, and then their sum, without fused multiply-adds: the error is at most
    ``eps * (|a cos| + |b sin|)``. The bits are those of the NumPy above, on every instruction set and with or
    without the compiled extension, and do not depend on threads, strides, layout or other rows. Rows whose
    elements are contiguous are read and written in place; others are copied.

    The pairing belongs to the weights of a model. To use weights of a model with interleaved pairs with the
    others, put the columns of each head's query and key projections in the order below; attention scores stay
    the same, as both are permuted alike.

    References
    ----------
    .. [1] Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, equation 34.

    Examples
    --------
    >>> import numpy as np
    >>> import fastattn
    >>> cos, sin = fastattn.rope_tables(100, 8)
    >>> query = np.random.default_rng(0).standard_normal((2, 4, 6, 8), dtype=np.float32)  # 4 heads, 6 queries
    >>> rotated = fastattn.rope(query, cos, sin)
    >>> np.allclose(fastattn.rope(rotated, cos, sin, inverse=True), query, atol=1e-6)
    True

    The next token of two sequences, at positions 6 and 3:

    >>> token = np.ones((2, 4, 1, 8), np.float32)
    >>> fastattn.rope(token, cos, sin, positions=[[6], [3]]).shape
    (2, 4, 1, 8)

    From interleaved pairs to the others: columns of a projection, in the order of their pairs' halves.

    >>> order = [0, 2, 4, 6, 1, 3, 5, 7]
    >>> weights = np.ones((16, 4 * 8), np.float32)  # (model_dim, heads * head_dim)
    >>> permuted = weights.reshape(16, 4, 8)[:, :, order].reshape(16, 4 * 8)
    >>> interleaved = fastattn.rope(query, cos, sin, interleaved=True)
    >>> bool(np.all(interleaved[..., order] == fastattn.rope(query[..., order], cos, sin)))
    True
    """
    if extra or unknown:
        refuse_arguments(rope, extra, unknown)
    kind: Any = type(positions)
    if kind is list or kind is tuple:
        positions = counts(positions)
    if num_threads is not None:
        num_threads = host.check_num_threads(num_threads, "num_threads")
    if _rope_at_once is not None:
        limit = _limit if num_threads is None else partial(_limit, num_threads)
        done = _rope_at_once(x, cos, sin, positions, interleaved, inverse, layout, out, limit)
        if done is not None:
            return done
    rotation, result, staged = _normalize(x, cos, sin, positions, interleaved, inverse, layout, out)
    function("rope", rotation)(rotation, num_threads)
    if staged is not None:
        result[...] = staged
    return in_library_of(x, result) if out is None else out


def _limit(num_threads: int | None = None) -> int:
    return load("cython").thread_limit(host.threads_for(num_threads))


@partial(naming_shapes, names=("x", "cos", "sin"))
def _normalize(
    x: Any, cos: Any, sin: Any, positions: Any, interleaved: Any, inverse: Any, layout: Any, out: Any
) -> tuple[Rotation, np.ndarray, np.ndarray | None]:
    """What to rotate, the result, and what is filled in its place where its rows are not contiguous."""
    swapped = is_swapped(layout)
    check_bool(interleaved, "interleaved")
    check_bool(inverse, "inverse")
    x = host_numbers(x, "x")
    dtype = FLOAT64 if x.dtype.kind in "biu" else x.dtype.newbyteorder("=")
    if x.ndim < 2:
        raise ValueError("x must have at least 2 axes")
    cos, sin = _table(cos, "cos"), _table(sin, "sin")
    if cos.shape != sin.shape:
        raise ValueError("cos and sin must have the same shape")
    _check_width(cos, sin, x.shape[-1])
    if cos.size and not cos[0].any() and sin[0].all() and cos.any():
        raise ValueError("cos and sin are swapped: the first row, of position 0, is 0 in cos and not in sin")
    swapped = swapped and x.ndim > 2
    lead, length = x.shape[:-3], x.shape[-3 if swapped else -2]
    positions = _positions(positions, lead, length, len(cos))
    if out is not None:
        out = host_array(check_out(out, x.shape, dtype, dtype), "out")

    result = np.empty(x.shape, dtype) if out is None else out
    if out is not None:
        is_x = (out.ctypes.data, out.strides, out.dtype) == (x.ctypes.data, x.strides, x.dtype)
        if not is_x and overlap(out, x):
            x = x.copy()
        cos, sin = (table.copy() if overlap(out, table) else table for table in (cos, sin))
    real = FLOAT64 if dtype == FLOAT64 else FLOAT32
    if not all(table.dtype == real and table.flags.carray for table in (cos, sin)):
        with np.errstate(over="ignore"):
            shape = positions.size, cos.shape[1]
            cos, sin = (table[positions].reshape(shape).astype(real) for table in (cos, sin))
        positions = np.arange(positions.size, dtype=np.int64).reshape(positions.shape)
    staged = None if _has_contiguous_rows(result) else np.empty(x.shape, dtype)
    filled = result if staged is None else staged
    if x.dtype != dtype or not _has_contiguous_rows(x):
        filled[...] = x
        x = filled
    filled, x = (_with_heads(array, swapped) for array in (filled, x))
    return Rotation(filled, x, cos, sin, positions, interleaved, inverse), result, staged


def _table(value: Any, name: str) -> np.ndarray:
    table = host_array(as_array(value, name), name)
    if storage_of(table.dtype) == REAL and not (table.dtype.kind == "f" and table.dtype.itemsize in (4, 8)):
        raise TypeError(
            f"{name} must be a float16, bfloat16, float32 or float64 array, got dtype {table.dtype}"
        )
    if table.ndim != 2:
        hint = ""
        if table.ndim > 2:  # (batch, positions, columns), as Hugging Face's
            axes = ", ".join("0" * (table.ndim - 2))
            hint = f"; where the first axes are those of items, say {name}[{axes}]: "
            hint += "one table is for all, and the positions of each item's tokens choose its rows"
        raise ValueError(f"{name} must have shape (positions, rotary_dim / 2), got {table.shape}{hint}")
    return table


def _check_width(cos: np.ndarray, sin: np.ndarray, head_dim: int) -> None:
    """ValueError where tables rotate more columns than there are, or have each column twice.

    A single row is no proof where it would rotate all of x: the row of a position on the diagonal, in two
    dimensions, has the same angles twice, and is meant so.
    """
    width = cos.shape[1]
    once = _each_once(cos, sin)
    hint = "" if once is None else (
        f"cos and sin have each of their {width} columns twice, and are to have it once: "
        f"say cos[..., {once}] and sin[..., {once}]"
    )  # fmt: skip
    if 2 * width > head_dim:
        means = f"cos and sin rotate 2 * {width} columns, and head_dim of x is {head_dim}"
        raise ValueError(f"{means}; {hint}" if hint else means)
    if hint and (2 * width < head_dim or (cos != cos[0]).any()):
        raise ValueError(hint)


def _each_once(cos: np.ndarray, sin: np.ndarray) -> str | None:
    """The index of the columns that are there twice, as halves or side by side, where all of them are.

    None where all columns are alike, as at position 0.
    """
    width = cos.shape[1]
    if width % 2 or not len(cos):
        return None
    for first, second, once in (
        (slice(0, width // 2), slice(width // 2, width), f":{width // 2}"),
        (slice(0, width, 2), slice(1, width, 2), "::2"),
    ):
        # The last row first, which tells for most tables.
        if all(
            np.array_equal(table[rows, first], table[rows, second])
            for rows in (slice(-1, None), slice(None))
            for table in (cos, sin)
        ):
            is_told = any((table != table[:, :1]).any() for table in (cos, sin))
            return once if is_told else None
    return None


def _positions(value: Any, lead: tuple[int, ...], length: int, rows: int) -> np.ndarray:
    """Rows of the tables, contiguous, that broadcast to (*lead, length)."""
    if value is None:
        if length > rows:
            raise ValueError(
                f"positions are 0 .. L - 1 when not given: cos and sin have {rows} rows, "
                f"and x has length {length}"
            )
        return np.arange(length, dtype=np.int64)
    positions = np.atleast_1d(integers(as_array(value, "positions"), "positions"))
    if positions.shape[-1] != length or not broadcasts(positions.shape[:-1], lead):
        hint = "; where each item has its own, say positions[..., None] + np.arange(L)"
        raise ValueError(
            f"positions must have shape (..., L) = {(*lead, length)}, or leading axes that broadcast to it, "
            f"got {np.shape(value)}{hint if positions.shape == lead else ''}"
        )
    if positions.size and not 0 <= positions.min() <= positions.max() < rows:
        wrong = positions[(positions < 0) | (positions >= rows)].flat[0]
        raise ValueError(f"positions must be in 0..{rows - 1}, the rows of cos and sin, got {wrong}")
    return positions


def _has_contiguous_rows(array: np.ndarray) -> bool:
    return array.strides[-1] == array.itemsize


def _with_heads(array: np.ndarray, swapped: bool) -> np.ndarray:
    """The array as (*lead, H, L, D)."""
    if array.ndim == 2:
        return array[None]
    return array.swapaxes(-3, -2) if swapped else array


# Tables --------------------------------------------------------------------------------------------


@refusing
def rope_tables(
    n_positions: int,
    rotary_dim: int,
    *,
    base: float = 10000.0,
    scaling: Sequence[str | float | Mapping[str, float]] | None = None,
    dtype: DTypeLike = np.float32,
) -> tuple[np.ndarray, np.ndarray]:
    """The cosines and sines by which `rope` rotates: of ``p * base**(-2 i / r)``, p a position, i a pair.

    Parameters
    ----------
    n_positions : int
        ``n``, for the positions ``0 .. n - 1``.
    rotary_dim : int
        ``r``, even: how many columns are rotated; head_dim, or less.
    base : float, default 10000.0
        Above 1; ``rope_theta`` of Hugging Face's configurations.
    scaling : sequence, optional
        How a model was extended beyond the length that it was trained for, by Hugging Face's formulas and
        names; the factors are positive:

        ``("linear", factor)``
            All frequencies divided by factor [2]_.
        ``("ntk", factor)``
            The base times ``factor**(r / (r - 2))``, so that the lowest frequency is divided by factor.
        ``("yarn", factor, original_length, {options})``
            Low frequencies divided by factor, high ones kept, between them a ramp [3]_. It starts where a
            pair turns ``beta_fast`` times (32) in the original length and ends where it turns ``beta_slow``
            times (1), both at whole pairs unless ``truncate`` is False. Cosines and sines are multiplied by
            ``attention_factor``, by default ``0.1 * log(factor) + 1``, or with ``mscale`` and
            ``mscale_all_dim`` the quotient of ``0.1 * m * log(factor) + 1`` of the two. All are optional.
        ``("llama3", factor, low, high, original_length)``
            The same idea: frequencies of fewer than `low` turns in the original length are divided by
            factor, those of more than `high` are kept, between them it is linear in the number of turns [4]_.
    dtype : {float32, float64}, default float32

    Returns
    -------
    cos, sin : ndarray, shape (n_positions, rotary_dim / 2)

    Raises
    ------
    TypeError, ValueError
        A number of the wrong kind or out of its range, a dtype other than those two, a scaling that there is
        not, or with other numbers than it takes.

    Notes
    -----
    Without scaling this is, in NumPy::

        angle = np.outer(np.arange(n), base ** (-np.arange(0, r, 2) / r))
        cos, sin = np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)

    Angles are computed in float64 and the results rounded once. Libraries that compute angles in float32
    differ from this by about ``6e-8 * p``.

    References
    ----------
    .. [1] Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    .. [2] Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation",
       2023.
    .. [3] Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", ICLR 2024.
    .. [4] Grattafiori et al., "The Llama 3 Herd of Models", 2024; the formula is `transformers`'s.

    Examples
    --------
    >>> import fastattn
    >>> cos, sin = fastattn.rope_tables(4, 4)
    >>> sin.round(3)  # the angles of the first pair are 0, 1, 2, 3, those of the second 0.01 of that
    array([[0.   , 0.   ],
           [0.841, 0.01 ],
           [0.909, 0.02 ],
           [0.141, 0.03 ]], dtype=float32)
    >>> tables = fastattn.rope_tables(8192, 128, base=500000.0, scaling=("llama3", 8, 1, 4, 8192))
    """
    n = count(n_positions, "n_positions", 0, MAX_ROWS)
    r = count(rotary_dim, "rotary_dim", 2, MAX_ROWS)
    if r % 2:
        raise ValueError(f"rotary_dim must be even, got {rotary_dim!r}")
    base = _positive(base, "base")
    if base <= 1:
        raise ValueError(f"base must be above 1, got {base!r}")
    dtype = _table_dtype(dtype)
    try:
        with np.errstate(all="ignore"):
            frequencies, factor = _scaled(r, base, scaling)
            is_finite = isfinite(factor) and bool(np.isfinite(frequencies * max(n - 1, 0)).all())
    except OverflowError:
        is_finite = False
    if not is_finite:
        raise ValueError(f"base and scaling must give finite angles, got base={base!r}, scaling={scaling!r}")
    cos, sin = np.empty((2, n, r // 2), dtype)
    for start in range(0, n, _CHUNK):
        rows = slice(start, min(start + _CHUNK, n))
        angle = np.outer(np.arange(rows.start, rows.stop), frequencies)
        cos[rows], sin[rows] = factor * np.cos(angle), factor * np.sin(angle)
    return cos, sin


def _scaled(r: int, base: float, scaling: Any) -> tuple[np.ndarray, float]:
    """The frequency of each pair, and what its cosines and sines are multiplied by."""
    if scaling is None:
        return _frequencies(r, base), 1.0
    if not isinstance(scaling, (tuple, list)):
        raise TypeError(f"scaling must be None or a tuple such as {_SCALINGS['linear']}, got {scaling!r}")
    name = scaling[0] if scaling else None
    if not isinstance(name, str) or name not in _SCALINGS:
        raise ValueError(f"scaling must be one of {', '.join(_SCALINGS.values())}, got {scaling!r}")
    numbers, options = list(scaling[1:]), {}
    if name == "yarn" and len(numbers) == 3:
        options = _yarn_options(numbers.pop())
    if len(numbers) != {"linear": 1, "ntk": 1, "yarn": 2, "llama3": 4}[name]:
        raise ValueError(f"scaling {name!r} must be {_SCALINGS[name]}, got {scaling!r}")
    factor, *rest = (_positive(number, f"scaling {name!r}: each number") for number in numbers)
    if name == "linear":
        return _frequencies(r, base) / factor, 1.0
    if name == "ntk":
        if r == 2:
            raise ValueError("scaling 'ntk' needs a rotary_dim above 2, got 2")
        return _frequencies(r, base * factor ** (r / (r - 2))), 1.0
    if name == "yarn":
        return _yarn(r, base, factor, *rest, **options)
    low, high, original_length = rest
    if low >= high:
        raise ValueError(f"scaling 'llama3' must have low < high, got {low} and {high}")
    frequency = _frequencies(r, base)
    turns = original_length * frequency / (2 * pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - kept) * frequency / factor + kept * frequency, 1.0


def _frequencies(r: int, base: float) -> np.ndarray:
    return base ** (-np.arange(0, r, 2) / r)


def _yarn(
    r: int,
    base: float,
    factor: float,
    original_length: float,
    *,
    beta_fast: float | None = None,
    beta_slow: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    attention_factor: float | None = None,
    truncate: bool | None = None,
) -> tuple[np.ndarray, float]:
    def pair_that_turns(times: float) -> float:
        return r * float(np.log(original_length / (times * 2 * pi))) / (2 * log(base))

    def magnitude(scale: float) -> float:
        return 0.1 * scale * log(factor) + 1 if factor > 1 else 1.0

    fast, slow = 32 if beta_fast is None else beta_fast, 1 if beta_slow is None else beta_slow
    if fast < slow:
        raise ValueError(f"scaling 'yarn' must have beta_fast >= beta_slow, got {fast} and {slow}")
    first, last = pair_that_turns(fast), pair_that_turns(slow)
    if truncate is None or truncate:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, r - 1)
    if first == last:
        last += 0.001
    divided = np.clip((np.arange(r // 2) - first) / (last - first), 0, 1)
    frequency = _frequencies(r, base)
    if attention_factor is None:
        attention_factor = magnitude(1)
        if mscale and mscale_all_dim:
            attention_factor = magnitude(mscale) / magnitude(mscale_all_dim)
    return divided * frequency / factor + (1 - divided) * frequency, attention_factor


def _yarn_options(options: Any) -> dict[str, Any]:
    """The options of YaRN that are given."""
    if not isinstance(options, dict):
        raise TypeError(f"scaling 'yarn': options must be a dict, got {options!r}")
    if unknown := [name for name in options if name not in _YARN_OPTIONS]:
        raise ValueError(
            f"scaling 'yarn': options must be among {', '.join(_YARN_OPTIONS)}, got {unknown[0]!r}"
        )
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name != "truncate":
            given[name] = _positive(value, f"scaling 'yarn': {name}", or_zero=name.startswith("mscale"))
        else:
            check_bool(value, "scaling 'yarn': truncate")
    return given


def _positive(value: Any, name: str, or_zero: bool = False) -> float:
    number = as_number(value, name)
    if not isfinite(number) or number < 0 or (number == 0 and not or_zero):
        raise ValueError(f"{name} must be finite and positive, got {value!r}")
    return number


def _table_dtype(value: Any) -> np.dtype:
    if value is not None:  # NumPy's own name for float64
        with suppress(TypeError):
            if (dtype := np.dtype(value)) in (FLOAT32, FLOAT64):
                return dtype
    raise TypeError(f"dtype must be float32 or float64, got {value!r}")
