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

from fastattn.backends.numba.codegen.intrinsics import intrinsic_of


def fallback(typing: Any, function: Any, arguments: Any) -> tuple[Any, Any]:
    """For an intrinsic: Numba's own signature and code of the function."""
    signature = typing.resolve_function_type(function, arguments, {})
    if signature is None:
        return None, None

    def codegen(context: Any, builder: Any, _: Any, values: Any) -> Any:
        return context.get_function(context.typing_context.resolve_value_type(function), signature)(
            builder, values
        )

    return signature, codegen


def _weak(operate: Any) -> Any:
    """The operation with integers beside a float32 converted to float32."""

    def definition(context: Any, a: Any, b: Any) -> Any:
        if a == types.float32 and isinstance(b, (types.Integer, types.Boolean)):
            b = a
        elif b == types.float32 and isinstance(a, (types.Integer, types.Boolean)):
            a = b
        return fallback(context, operate, (a, b))

    return intrinsic_of(definition, operate.__name__, ["a", "b"])


_WEAK = {
    operate: _weak(operate)
    for operate in (operator.add, operator.sub, operator.mul, operator.truediv, operator.mod)
}


def operation(expression: ir.Expr) -> Any:
    """The replacement of a binary operation of Numba's IR, or None."""
    if expression.op not in ("binop", "inplace_binop"):
        return None
    return _WEAK.get(expression.fn if expression.op == "binop" else expression.immutable_fn)


def number(value: Any) -> Any:
    """A literal as float32 if it is a float."""
    return np.float32(value) if type(value) is float else value
