"""A compiler of user functions in which numbers that stand in the code, and integers, do not widen float32.

As with Python's numbers in NumPy: Numba itself makes float64 of ``score * 0.5``, with half as many lanes.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numba import types
from numba.core import compiler, ir
from numba.core.compiler_machinery import FunctionPass, register_pass
from numba.core.ir_utils import mk_unique_var
from numba.core.untyped_passes import IRProcessing
from numba.extending import overload


def _weak(operate: Any) -> Any:
    """The operation in which an integer takes the dtype of a float32."""

    def function(a, b):
        return operate(a, b)

    @overload(function)
    def _(a, b):
        if a == types.float32 and isinstance(b, (types.Integer, types.Boolean)):
            return lambda a, b: operate(a, np.float32(b))
        if b == types.float32 and isinstance(a, (types.Integer, types.Boolean)):
            return lambda a, b: operate(np.float32(a), b)
        return lambda a, b: operate(a, b)

    return function


_WEAK = {
    operate: _weak(operate)
    for operate in (operator.add, operator.sub, operator.mul, operator.truediv, operator.mod)
}


@register_pass(mutates_CFG=False, analysis_only=False)
class _WeakNumbers(FunctionPass):
    _name = "fastattn_weak_numbers"

    def __init__(self) -> None:
        super().__init__()

    def run_pass(self, state: Any) -> bool:
        for block in state.func_ir.blocks.values():
            body = []
            for statement in block.body:
                value = statement.value if isinstance(statement, ir.Assign) else None
                if isinstance(value, ir.Const) and type(value.value) is float:
                    statement.value = ir.Const(np.float32(value.value), value.loc)
                elif isinstance(value, ir.Expr) and value.op in ("binop", "inplace_binop"):
                    operate = _WEAK.get(value.fn if value.op == "binop" else value.immutable_fn)
                    if operate is not None:
                        name = ir.Var(block.scope, mk_unique_var("weak"), value.loc)
                        named = ir.Global(operate.__name__, operate, value.loc)
                        body.append(ir.Assign(named, name, value.loc))
                        statement.value = ir.Expr.call(name, (value.lhs, value.rhs), (), value.loc)
                body.append(statement)
            block.body = body
        return True


class WeakNumbers(compiler.CompilerBase):
    """Numba's compiler with this one step more."""

    def define_pipelines(self) -> list[Any]:
        steps = compiler.DefaultPassBuilder.define_nopython_pipeline(self.state)
        steps.add_pass_after(_WeakNumbers, IRProcessing)
        steps.finalize()
        return [steps]
