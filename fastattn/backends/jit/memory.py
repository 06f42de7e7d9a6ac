"""How `aux` and captured arrays are passed to compiled code: as words at an address, read once per tile.

An array is its address, shape and strides, a number is its value. So a loop is compiled for dtypes and
numbers of axes only, not for sizes or addresses.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.np.arrayobj import make_array, populate_array

from fastattn.backends.cpu.record import address_of

WORD = ir.IntType(64)

#: The most rounds of a loop that LLVM unrolls. The loop over scores around it can then be made of vectors.
MAX_UNROLLED = 16

_REAL, _BITS = struct.Struct("=d"), struct.Struct("=q")

#: Read in the place of an array without elements.
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


def words_of(values: Sequence[Any]) -> array[int]:
    """What `read_words` reads; arrays among the values must live as long."""
    words: list[int] = []
    for value in values:
        if isinstance(value, np.ndarray):
            if value.size:
                words += (address_of(value), *value.shape, *value.strides)
            else:
                words += (address_of(_ZERO), *value.shape, *[0] * value.ndim)
        elif isinstance(value, (float, np.floating)):
            words += _BITS.unpack(_REAL.pack(value))
        else:
            words.append(int(np.int64(value)))
    return array("q", words)


def n_words(kinds: Sequence[Any]) -> int:
    """How many words values of these types have."""
    return sum(1 + 2 * kind.ndim if isinstance(kind, types.Array) else 1 for kind in kinds)


def small_counts(values: Sequence[Any]) -> dict[int, int]:
    """The sizes and integers among the words that may be how often a function loops: those of up to
    `MAX_UNROLLED`, by their number."""
    counts: dict[int, int] = {}
    first = 0
    for value in values:
        if isinstance(value, np.ndarray):
            counts.update(enumerate(value.shape, first + 1))
            first += 1 + 2 * value.ndim
        else:
            if isinstance(value, np.integer):
                counts[first] = int(value)
            first += 1
    return {number: count for number, count in counts.items() if 0 < count <= MAX_UNROLLED}


def read_words(
    context: Any, builder: Any, at: Any, kinds: Sequence[Any], known: Mapping[int, int]
) -> list[Any]:
    """Writes code that reads the words at a pointer. Returns the values in the types of Numba.

    known: words whose values are compiled in, by their number.
    """
    place = 0

    def take() -> Any:
        nonlocal place
        place += 1
        if place - 1 in known:
            return WORD(known[place - 1])
        return builder.load(builder.gep(at, [WORD(place - 1)]))

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
