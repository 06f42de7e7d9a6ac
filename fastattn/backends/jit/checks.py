"""Array reads with a bounds check.

An index out of bounds sets a bit and reads the first element instead: without a branch, so that LLVM still
vectorises the loop. `loops` says what becomes of the bits.

Elements of `Tracked` arrays are counted. The one whose number is asked for has the derivative 1, the others
have 0: see `SLOT`.
"""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.np.arrayobj import load_item, make_array, make_array_flat_cls

from fastattn.backends.cpu.fields import MARK_BITS
from fastattn.backends.jit.codegen.intrinsics import intrinsic_of
from fastattn.backends.jit.literals import fallback
from fastattn.backends.jit.pairs import Pair, Tracked, make

#: The bit of all other errors: of arrays without a bit of their own, and of Numba's own checks.
OTHER = MARK_BITS - 1
BITS = ir.IntType(32)

WORD = ir.IntType(64)

#: What is at the address ``checks``: the bits, as a word; and with `Tracked` arrays how many of their
#: elements were read so far, which one is asked for, its array and its address.
SLOT = ("bits", "n_read", "wanted", "array", "address")


def _checked(bit: int) -> Any:
    def definition(context: Any, array: Any, index: Any, checks: Any) -> Any:
        indices = tuple(index) if isinstance(index, types.BaseTuple) else (index,)
        is_one_element = (
            isinstance(array, types.Array)
            and len(indices) == array.ndim
            and all(isinstance(it, types.Integer) for it in indices)
        )
        if is_one_element:
            return _element(array, index, indices, checks, bit)
        if isinstance(array, types.NumpyFlatType) and isinstance(index, types.Integer):
            return _element_of_flat(array, index, checks, bit)
        if isinstance(array, (types.Number, types.Boolean)) and not indices:  # an array without axes
            return array(array, index, checks), lambda context, builder, signature, values: values[0]
        signature, write = fallback(context, operator.getitem, (array, index))
        if signature is None:
            return None, None

        def codegen(context: Any, builder: Any, _: Any, values: Any) -> Any:
            return write(context, builder, signature, values[:2])

        return signature.return_type(*signature.args, checks), codegen

    return intrinsic_of(definition, "checked", ["array", "index", "checks"])


def _element(array: Any, index: Any, indices: Any, checks: Any, bit: int) -> tuple[Any, Any]:
    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        view = make_array(array)(context, builder, values[0])
        given = (
            cgutils.unpack_tuple(builder, values[1]) if isinstance(index, types.BaseTuple) else [values[1]]
        )
        shape = cgutils.unpack_tuple(builder, view.shape, count=array.ndim)
        # One check per axis, so that LLVM can hoist those of indices that a loop does not change.
        checked = [
            _inside(context, builder, number, kind, length, values[2], bit)
            for kind, number, length in zip(indices, given, shape, strict=True)
        ]
        return _load(context, builder, array, view, shape, checked, values[2])

    return _type_read(array)(array, index, checks), codegen


def _element_of_flat(flat: Any, index: Any, checks: Any, bit: int) -> tuple[Any, Any]:
    array = flat.array_type

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        iterator = make_array_flat_cls(flat)(context, builder, values[0])
        view = make_array(array)(context, builder, iterator.array)
        shape = cgutils.unpack_tuple(builder, view.shape, count=array.ndim)
        rest = _inside(context, builder, values[1], index, view.nitems, values[2], bit)
        indices: list[Any] = []
        for length in reversed(shape[1:]):
            # Without elements the first is read, as ever; nothing is divided by 0.
            divisor = builder.select(builder.icmp_signed(">", length, length.type(0)), length, length.type(1))
            indices.insert(0, builder.srem(rest, divisor))
            rest = builder.sdiv(rest, divisor)
        return _load(context, builder, array, view, shape, [rest, *indices], values[2])

    return _type_read(array)(flat, index, checks), codegen


def _inside(context: Any, builder: Any, number: Any, kind: Any, length: Any, checks: Any, bit: int) -> Any:
    """The index, counted from the start. Out of bounds it is 0, and the bit is set at `checks`."""
    at = context.cast(builder, number, kind, types.intp)
    if kind.signed:
        is_negative = builder.icmp_signed("<", at, at.type(0))
        at = builder.select(is_negative, builder.add(at, length), at)
    is_inside = builder.icmp_unsigned("<", at, length)
    slot = builder.inttoptr(checks, BITS.as_pointer())
    error = builder.select(is_inside, BITS(0), BITS(1 << bit))
    builder.store(builder.or_(builder.load(slot), error), slot)
    return builder.select(is_inside, at, at.type(0))


def _type_read(array: Any) -> Any:
    return Pair(array.dtype.real) if isinstance(array.dtype, Tracked) else array.dtype


def _load(context: Any, builder: Any, array: Any, view: Any, shape: Any, indices: Any, checks: Any) -> Any:
    strides = cgutils.unpack_tuple(builder, view.strides, count=array.ndim)
    element = cgutils.get_item_pointer2(context, builder, view.data, shape, strides, array.layout, indices)
    value = load_item(context, builder, array, element)
    if not isinstance(array.dtype, Tracked):
        return value
    slots = slots_at(builder, checks)
    n_read = builder.load(slots["n_read"])
    is_wanted = builder.icmp_signed("==", n_read, builder.load(slots["wanted"]))
    builder.store(builder.add(n_read, WORD(1)), slots["n_read"])
    for name, found in (("array", WORD(array.dtype.number)), ("address", builder.ptrtoint(element, WORD))):
        builder.store(builder.select(is_wanted, found, builder.load(slots[name])), slots[name])
    slope = builder.select(is_wanted, value.type(1), value.type(0))
    return make(context, builder, Pair(array.dtype.real), value, slope)


def slots_at(builder: Any, checks: Any) -> dict[str, Any]:
    """Where each word of the `SLOT` at an address is."""
    words = builder.inttoptr(checks, WORD.as_pointer())
    return {name: builder.gep(words, [WORD(i)]) for i, name in enumerate(SLOT)}


#: ``CHECKED[bit](array, index, checks)``: the element; `bit` is set at the address `checks` where the index
#: is out of bounds.
CHECKED = [_checked(bit) for bit in range(OTHER + 1)]


@cache
def static_item(number: int) -> Any:
    """An item of a tuple or of an array by a constant: ``static_item(number)(value, index, checks)``."""

    def definition(context: Any, value: Any, index: Any, checks: Any) -> Any:
        signature = context.resolve_static_getitem(value, number)
        if signature is None:
            return CHECKED[OTHER]._defn(context, value, index, checks)
        literal = signature.return_type(value, types.literal(number))

        def codegen(target: Any, builder: Any, _: Any, values: Any) -> Any:
            return target.get_function("static_getitem", literal)(builder, (values[0], number))

        return signature.return_type(value, index, checks), codegen

    return intrinsic_of(definition, "item", ["value", "index", "checks"])
