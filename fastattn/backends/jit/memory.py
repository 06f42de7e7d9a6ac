"""How `aux` and captured arrays are passed to compiled code: as words at an address, read once per tile.

An array is its address, shape and strides, a number is its value. So a loop is compiled for dtypes and
numbers of axes only, not for sizes or addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.np.arrayobj import make_array, populate_array

WORD = ir.IntType(64)

#: Read instead of an array without elements.
_ZERO = np.zeros(1, np.float64)


def type_key(value: Any) -> tuple[Any, ...]:
    """The properties of a value that decide its type in compiled code."""
    if not value.ndim:
        return (value.dtype,)
    return (
        value.dtype,
        value.ndim,
        type(value) is np.ndarray and value.flags.c_contiguous and value.size > 0,
    )


def kind_of(value: Any) -> Any:
    """The type that a value of `aux` or a captured array has in compiled code."""
    dtype, *axes = type_key(value)
    if not axes:
        return numba.from_dtype(dtype)
    return types.Array(numba.from_dtype(dtype), axes[0], "C" if axes[1] else "A", readonly=True)


def as_value(captured: Any, dtype: np.dtype) -> Any:
    """A captured array, or a captured float in the type that literals have."""
    if type(captured) is not float:
        return captured
    return np.float32(captured) if dtype == np.float32 else np.float64(captured)


def words_of(values: Sequence[Any]) -> Any:
    """What `read_words` reads, as a ctypes array; the values' arrays must outlive it."""
    words: list[int] = []
    for value in values:
        if isinstance(value, np.ndarray):
            if value.size:
                words += [value.__array_interface__["data"][0], *value.shape, *value.strides]
            else:
                words += [_ZERO.ctypes.data, *value.shape, *[0] * value.ndim]
        else:
            wide = np.float64(value) if value.dtype.kind == "f" else np.int64(value)
            words.append(int(wide.view(np.int64)))
    return (ctypes.c_int64 * len(words))(*words)


def read_words(context: Any, builder: Any, at: Any, kinds: Sequence[Any]) -> list[Any]:
    """Writes IR that makes Numba's values of the words at a pointer."""
    index = 0

    def take() -> Any:
        nonlocal index
        index += 1
        return builder.load(builder.gep(at, [WORD(index - 1)]))

    values = []
    for kind in kinds:
        first = take()
        if isinstance(kind, types.Array):
            shape = [take() for _ in range(kind.ndim)]
            strides = [take() for _ in range(kind.ndim)]
            array = make_array(kind)(context, builder)
            element = context.get_data_type(kind.dtype)
            populate_array(
                array,
                builder.inttoptr(first, element.as_pointer()),
                cgutils.pack_array(builder, shape, WORD),
                cgutils.pack_array(builder, strides, WORD),
                context.get_constant(types.intp, context.get_abi_sizeof(element)),
                None,
            )
            values.append(array._getvalue())
        elif isinstance(kind, types.Float):
            wide = builder.bitcast(first, ir.DoubleType())
            values.append(context.cast(builder, wide, types.float64, kind))
        else:
            values.append(context.cast(builder, first, types.int64, kind))
    return values
