"""Literals in a function take the dtype of its scores, as Python's numbers do beside NumPy arrays.

Numba itself computes ``score * 0.5`` and ``score * kv_idx`` in float64, which has half as many lanes as
float32.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numba import types
from numba.core import ir

from fastattn.backends.jit.codegen.intrinsics import intrinsic_of


def fallback(typing: Any, function: Any, arguments: Any) -> tuple[Any, Any]:
    """For an intrinsic: Numba's own signature and code of the function."""
    signature = typing.resolve_function_type(function, arguments, {})
    if signature is None:
        return None, None
    star = signature.args[0] if len(signature.args) == 1 else None  # of ``*args``
    if not isinstance(star, (types.StarArgTuple, types.StarArgUniTuple)):
        star = None

    def codegen(context: Any, builder: Any, _: Any, values: Any) -> Any:
        if star is not None:
            values = [context.make_tuple(builder, star, values)]
        return context.get_function(context.typing_context.resolve_value_type(function), signature)(
            builder, values
        )

    return signature if star is None else signature.return_type(*star.types), codegen


def _weak(operate: Any) -> Any:
    """The operation with integers beside a float32 converted to float32."""

    def definition(context: Any, a: Any, b: Any) -> Any:
        if a == types.float32 and isinstance(b, (types.Integer, types.Boolean)):
            b = a
        elif b == types.float32 and isinstance(a, (types.Integer, types.Boolean)):
            a = b
        return fallback(context, operate, (a, b))

    return intrinsic_of(definition, operate.__name__, ["a", "b"])


def _division(operate: Any, is_weak: bool) -> Any:
    """``//`` or ``%``, of integers without a branch, so that LLVM can hoist it. 0 where it would trap,
    as in Numba."""
    is_quotient = operate is operator.floordiv

    def definition(context: Any, a: Any, b: Any) -> Any:
        if not (isinstance(a, types.Integer) and isinstance(b, types.Integer)):
            is_ours = is_weak and not is_quotient
            return _WEAK[operate]._defn(context, a, b) if is_ours else fallback(context, operate, (a, b))
        signature, _ = fallback(context, operate, (a, b))
        kind = signature.return_type

        def codegen(target: Any, builder: Any, _: Any, values: Any) -> Any:
            x, y = (target.cast(builder, value, it, kind) for value, it in zip(values, (a, b), strict=True))
            zero, one = x.type(0), x.type(1)
            traps = builder.icmp_unsigned("==", y, zero)
            if kind.signed:
                is_least = builder.icmp_signed("==", x, x.type(kind.minval))
                overflows = builder.and_(is_least, builder.icmp_signed("==", y, x.type(-1)))
                traps = builder.or_(traps, overflows)
            y = builder.select(traps, one, y)
            if not kind.signed:
                found = (builder.udiv if is_quotient else builder.urem)(x, y)
                return builder.select(traps, zero, found)
            # Truncated; rounded down, it is 1 less where the signs of the remainder and of y differ.
            rest = builder.srem(x, y)
            differ = builder.icmp_signed("<", builder.xor(rest, y), zero)
            is_less = builder.and_(builder.icmp_signed("!=", rest, zero), differ)
            if is_quotient:
                found = builder.sub(builder.sdiv(x, y), builder.zext(is_less, x.type))
            else:
                found = builder.add(rest, builder.select(is_less, y, zero))
            return builder.select(traps, zero, found)

        return signature, codegen

    return intrinsic_of(definition, operate.__name__, ["a", "b"])


_WEAK = {
    operate: _weak(operate)
    for operate in (operator.add, operator.sub, operator.mul, operator.truediv, operator.mod)
}


_DIVISIONS = {
    (operate, is_weak): _division(operate, is_weak)
    for operate in (operator.floordiv, operator.mod)
    for is_weak in (False, True)
}


def _where(is_weak: bool) -> Any:
    """``np.where`` of numbers as a number, where Numba makes an array without axes."""

    def definition(context: Any, condition: Any, x: Any, y: Any) -> Any:
        numbers = (types.Number, types.Boolean)
        if not all(isinstance(kind, numbers) for kind in (condition, x, y)):
            return fallback(context, np.where, (condition, x, y))
        x, y = types.unliteral(x), types.unliteral(y)
        has_integer = isinstance(x, types.Integer) or isinstance(y, types.Integer)
        is_float32 = is_weak and has_integer and types.float32 in (x, y)
        result = types.float32 if is_float32 else context.unify_types(x, y)

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            chosen = context.cast(builder, values[0], condition, types.boolean)
            of_x = context.cast(builder, values[1], x, result)
            of_y = context.cast(builder, values[2], y, result)
            return builder.select(chosen, of_x, of_y)

        return result(condition, x, y), codegen

    return intrinsic_of(definition, "where", ["condition", "x", "y"])


#: Of three arguments, by whether literals are weak.
WHERE = {is_weak: _where(is_weak) for is_weak in (False, True)}


def operator_of(expression: ir.Expr) -> Any:
    """The operator of an operation of Numba's IR, or None."""
    if expression.op == "inplace_binop":
        return expression.immutable_fn
    return expression.fn if expression.op in ("unary", "binop") else None


def operation(operate: Any, is_weak: bool) -> Any:
    """The replacement of a binary operator, or None."""
    return _DIVISIONS.get((operate, is_weak)) or (_WEAK.get(operate) if is_weak else None)


def number(value: Any) -> Any:
    """A literal as float32 if it is a float."""
    return np.float32(value) if type(value) is float else value
