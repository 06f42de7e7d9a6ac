"""Reading an array at an index that may lie outside of it.

An index outside sets a bit and reads the first element in its place: without a branch, so that LLVM still
makes vectors of the loop. The bits are returned by the loop (see `loops`), and the call raises.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.np.arrayobj import load_item, make_array

from fastattn.backends.jit.literals import fallback
from fastattn.backends.numba.codegen.intrinsics import intrinsic_of

#: The bit of whatever went wrong elsewhere: an array that has no bit of its own, or what Numba itself checks.
OTHER = 31
BITS = ir.IntType(32)


def _checked(place: int) -> Any:
    def definition(context: Any, array: Any, index: Any, checks: Any) -> Any:
        indices = tuple(index) if isinstance(index, types.BaseTuple) else (index,)
        is_one_element = (
            isinstance(array, types.Array)
            and len(indices) == array.ndim
            and all(isinstance(it, types.Integer) for it in indices)
        )
        if is_one_element:
            return _element(array, index, indices, checks, place)
        signature, write = fallback(context, operator.getitem, (array, index))
        if signature is None:
            return None, None

        def codegen(context: Any, builder: Any, _: Any, values: Any) -> Any:
            return write(context, builder, signature, values[:2])

        return signature.return_type(*signature.args, checks), codegen

    return intrinsic_of(definition, "checked", ["array", "index", "checks"])


def _element(array: Any, index: Any, indices: Any, checks: Any, place: int) -> tuple[Any, Any]:
    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        view = make_array(array)(context, builder, values[0])
        given = (
            cgutils.unpack_tuple(builder, values[1]) if isinstance(index, types.BaseTuple) else [values[1]]
        )
        shape = cgutils.unpack_tuple(builder, view.shape, count=array.ndim)
        strides = cgutils.unpack_tuple(builder, view.strides, count=array.ndim)
        slot = builder.inttoptr(values[2], BITS.as_pointer())
        places = []
        # Axis by axis: of those that a loop does not change nothing is left in it.
        for kind, number, length in zip(indices, given, shape, strict=True):
            at = context.cast(builder, number, kind, types.intp)
            if kind.signed:
                is_negative = builder.icmp_signed("<", at, at.type(0))
                at = builder.select(is_negative, builder.add(at, length), at)
            is_inside = builder.icmp_unsigned("<", at, length)
            bit = builder.select(is_inside, BITS(0), BITS(1 << place))
            builder.store(builder.or_(builder.load(slot), bit), slot)
            places.append(builder.select(is_inside, at, at.type(0)))
        element = cgutils.get_item_pointer2(context, builder, view.data, shape, strides, array.layout, places)
        return load_item(context, builder, array, element)

    return array.dtype(array, index, checks), codegen


#: ``CHECKED[place](array, index, checks)``: the element, with bit `place` set at the address `checks` where
#: it is not one.
CHECKED = [_checked(place) for place in range(OTHER + 1)]
