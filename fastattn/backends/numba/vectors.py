"""Vectors of lanes as values of compiled code: `Vector`, with arithmetic, comparisons and a few functions.

A vector of reals fills a register of the host; comparing two gives `LaneBits`. Arrays are read and written
at the index of the first lane. So a kernel is plain Python with a step of `job.lanes` elements.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model
from numba.np.arrayobj import make_array, populate_array

from fastattn.backends.jit.codegen.emit import INTP, Emitter
from fastattn.backends.jit.codegen.exponential import exp2_of_difference, hyperbolic_tangent
from fastattn.backends.jit.codegen.intrinsics import intrinsic_of
from fastattn.backends.jit.codegen.target import TARGET


class Vector(types.Type):
    """Elements in a register, one for each lane."""

    def __init__(self, element: Any) -> None:
        self.element = element
        self.lanes = 8 * TARGET.vector_bytes // element.bitwidth
        super().__init__(f"vector({element})")


class LaneBits(types.Type):
    """One bit for each lane."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(f"bits({lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        element = manager.lookup(kind.element).get_value_type()
        super().__init__(manager, kind, ir.VectorType(element, kind.lanes))


@register_model(LaneBits)
class _LaneBitsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: LaneBits) -> None:
        super().__init__(manager, kind, ir.VectorType(ir.IntType(1), kind.lanes))


def _declare(function: Any, write: Any, returns: Any = None) -> None:
    """Makes an operator work on two vectors, of which `returns` makes the type of the result."""

    @infer_global(function)
    class Operator(AbstractTemplate):
        def generic(self, arguments: Any, keywords: Any) -> Any:
            kind = arguments[0]
            if not isinstance(kind, Vector) or arguments != (kind, kind):
                return None
            return signature(returns(kind.lanes) if returns else kind, kind, kind)

    @lower_builtin(function, Vector, Vector)
    def lower(context: Any, builder: Any, call: Any, values: Any) -> Any:
        return write(builder, *values)


_declare(operator.add, ir.IRBuilder.fadd)
_declare(operator.sub, ir.IRBuilder.fsub)
_declare(operator.mul, ir.IRBuilder.fmul)
_declare(operator.truediv, ir.IRBuilder.fdiv)
_declare(operator.lt, lambda builder, a, b: builder.fcmp_ordered("<", a, b), LaneBits)
_declare(operator.eq, lambda builder, a, b: builder.fcmp_ordered("==", a, b), LaneBits)
_declare(operator.ne, lambda builder, a, b: builder.fcmp_unordered("!=", a, b), LaneBits)


# Arrays.


@intrinsic
def array_at(context: Any, zero: Any, address: Any, shape: Any, strides: Any) -> Any:
    """The array of this shape and these strides at an address, of the type of `zero`."""
    return _array(types.Array(zero, len(shape), "A"), address, shape, strides)


@intrinsic
def tile_at(context: Any, zero: Any, address: Any, shape: Any) -> Any:
    """The same without gaps between elements."""
    return _array(types.Array(zero, len(shape), "C"), address, shape)


def _array(kind: Any, address: Any, shape: Any, strides: Any = None) -> Any:
    n, size = kind.ndim, (kind.dtype.bitwidth + 7) // 8
    arguments = [kind.dtype, address, types.UniTuple(types.intp, n)]
    if strides is not None:
        arguments.append(types.UniTuple(types.intp, n))

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array = make_array(kind)(context, builder)
        shape = cgutils.unpack_tuple(builder, values[2])
        if strides is not None:
            steps = cgutils.unpack_tuple(builder, values[3])
        else:
            steps = [INTP(size)]
            for length in shape[:0:-1]:
                steps.insert(0, builder.mul(steps[0], length))
        data = builder.inttoptr(values[1], array.data.type)
        populate_array(array, data, shape, steps, INTP(size), None)
        return array._getvalue()

    return kind(*arguments), codegen


@intrinsic
def without_gaps(context: Any, row: Any) -> Any:
    """The same array of one axis, whose elements have no gaps, with a type that says so."""

    def codegen(context: Any, builder: Any, call: Any, values: Any) -> Any:
        return values[0]

    return row.copy(layout="C")(row), codegen


@intrinsic
def load(context: Any, array: Any, index: Any) -> Any:
    """The vector that begins at the index, a tuple."""
    kind = Vector(array.dtype)

    def codegen(context: Any, builder: Any, call: Any, values: Any) -> Any:
        return builder.load(_pointer(context, builder, call.args, values), align=array.dtype.bitwidth // 8)

    return kind(array, types.UniTuple(types.intp, array.ndim)), codegen


@intrinsic
def store(context: Any, array: Any, index: Any, x: Any) -> Any:
    """Writes the vector x from the index on, a tuple."""

    def codegen(context: Any, builder: Any, call: Any, values: Any) -> Any:
        pointer = _pointer(context, builder, call.args, values)
        builder.store(values[2], pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.UniTuple(types.intp, array.ndim), Vector(array.dtype)), codegen


def _pointer(context: Any, builder: Any, kinds: Any, values: Any) -> Any:
    """Of a vector in an array without gaps along its last axis."""
    array = kinds[0]
    view = make_array(array)(context, builder, values[0])
    at = builder.ptrtoint(view.data, INTP)
    steps = [*cgutils.unpack_tuple(builder, view.strides)[:-1], INTP(array.dtype.bitwidth // 8)]
    for n, step in zip(cgutils.unpack_tuple(builder, values[1]), steps, strict=True):
        at = builder.add(at, builder.mul(n, step))
    return builder.inttoptr(at, context.get_value_type(Vector(array.dtype)).as_pointer())


# Functions.


@intrinsic
def splat(context: Any, x: Any) -> Any:
    """The number x in every lane."""

    def codegen(context: Any, builder: Any, call: Any, values: Any) -> Any:
        return Emitter(builder, x.bitwidth // 8).splat(values[0])

    return Vector(x)(x), codegen


@intrinsic
def where(context: Any, mask: Any, a: Any, b: Any) -> Any:
    """a in the lanes of the mask, b in the others."""

    def codegen(context: Any, builder: Any, call: Any, values: Any) -> Any:
        return builder.select(*values)

    return a(mask, a, a), codegen


@intrinsic
def any_lane(context: Any, mask: Any) -> Any:
    """Whether a lane of the mask is set."""

    def codegen(context: Any, builder: Any, call: Any, values: Any) -> Any:
        bits = ir.IntType(mask.lanes)
        return builder.icmp_unsigned("!=", builder.bitcast(values[0], bits), bits(0))

    return types.boolean(mask), codegen


def _of_reals(name: str, write: Any) -> Any:
    """The function of vectors of reals that an `Emitter` writes."""

    def definition(context: Any, *arguments: Any) -> Any:
        def codegen(context: Any, builder: Any, call: Any, values: Any) -> Any:
            return write(Emitter(builder, arguments[0].element.bitwidth // 8), *values)

        return arguments[0](*arguments), codegen

    return intrinsic_of(definition, name, list(inspect.signature(write).parameters)[1:])


maximum = _of_reals("maximum", Emitter.maximum)  #: b where either is NaN
fma = _of_reals("fma", Emitter.fma)
one_minus_product = _of_reals("one_minus_product", Emitter.one_minus_product)
tanh = _of_reals("tanh", hyperbolic_tangent)
exp2 = _of_reals("exp2", exp2_of_difference)
