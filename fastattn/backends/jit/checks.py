"""Array reads with a bounds check.

An index out of bounds sets a bit and reads the first element instead: without a branch, so that LLVM still
vectorises the loop. The bits are returned by the loop (see `loops`), and the call raises.
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

#: The bit of all other errors: of arrays without a bit of their own, and of Numba's own checks.
OTHER = 31
BITS = ir.IntType(32)


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
        strides = cgutils.unpack_tuple(builder, view.strides, count=array.ndim)
        slot = builder.inttoptr(values[2], BITS.as_pointer())
        checked = []
        # One check per axis, so that LLVM can hoist those of indices that a loop does not change.
        for kind, number, length in zip(indices, given, shape, strict=True):
            at = context.cast(builder, number, kind, types.intp)
            if kind.signed:
                is_negative = builder.icmp_signed("<", at, at.type(0))
                at = builder.select(is_negative, builder.add(at, length), at)
            is_inside = builder.icmp_unsigned("<", at, length)
            error = builder.select(is_inside, BITS(0), BITS(1 << bit))
            builder.store(builder.or_(builder.load(slot), error), slot)
            checked.append(builder.select(is_inside, at, at.type(0)))
        element = cgutils.get_item_pointer2(
            context, builder, view.data, shape, strides, array.layout, checked
        )
        return load_item(context, builder, array, element)

    return array.dtype(array, index, checks), codegen


#: ``CHECKED[bit](array, index, checks)``: the element; `bit` is set at the address `checks` where the index
#: is out of bounds.
CHECKED = [_checked(bit) for bit in range(OTHER + 1)]
