"""exp, exp2 and tanh that LLVM can vectorise. It cannot vectorise calls of those in the C library.

They replace those of `math` and `numpy` in a user's function, for float32 and float64. Errors are within
2 ULP, those of tanh within 4.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from fastattn._machine.constants import MANTISSA_BITS
from fastattn.backends.jit.codegen.emit import Emitter
from fastattn.backends.jit.codegen.exponential import hyperbolic_tangent, twice_exp2m1_over_f
from fastattn.backends.jit.codegen.intrinsics import intrinsic_of
from fastattn.backends.jit.literals import fallback

#: log2(e) as the sum of two numbers of each dtype, by itemsize: the rounded value and the remainder.
_LOG2E = {4: (1.44269502162933349609375, 1.92596299e-8), 8: (1.4426950408889634074, 2.0355273740931033e-17)}
#: Beyond these e^x is 0 or inf.
_EXP_RANGE = {4: (-104.0, 88.9), 8: (-746.0, 710.0)}
_EXP2_RANGE = {4: (-151.0, 128.4), 8: (-1076.0, 1024.4)}


class ScalarEmitter(Emitter):
    """Emits the same operations on one number, for LLVM to vectorise."""

    def __init__(self, builder: Any, itemsize: int) -> None:
        super().__init__(builder, itemsize)
        self.lanes, self.vector, self.integers = 1, self.real, self.integer

    def constant(self, x: float) -> ir.Constant:
        return ir.Constant(self.real, x)

    def integer_constant(self, n: int) -> ir.Constant:
        return ir.Constant(self.integer, n)

    def vector_name(self) -> str:
        return f"f{8 * self.itemsize}"


def _power(e: Emitter, x: Any, low: float, high: float, split: Any) -> Any:
    """2^y, where ``split(x, None, shift)`` is y + shift and ``split(x, n, None)`` is y - n."""
    builder, bits = e.builder, MANTISSA_BITS[e.itemsize]
    x = e.maximum(
        e.constant(low), builder.select(builder.fcmp_ordered(">", x, e.constant(high)), e.constant(high), x)
    )
    shift = e.constant(1.5 * 2.0**bits)
    shifted = split(x, None, shift)
    n = e.sub(shifted, shift)
    f = split(x, n, None)
    y = e.fma(twice_exp2m1_over_f(e, f), e.mul(f, e.constant(0.5)), e.constant(1.0))
    whole = builder.sub(builder.bitcast(shifted, e.integers), builder.bitcast(shift, e.integers))
    # As two factors: 2^n alone may underflow or overflow.
    half = builder.ashr(whole, e.integer_constant(1))
    bias = (1 << (8 * e.itemsize - 2 - bits)) - 1
    for part in (half, builder.sub(whole, half)):
        raised = builder.shl(builder.add(part, e.integer_constant(bias)), e.integer_constant(bits))
        y = e.mul(y, builder.bitcast(raised, e.vector))
    return y


def _exp(e: Emitter, x: Any) -> Any:
    first, second = (e.constant(part) for part in _LOG2E[e.itemsize])

    def split(x: Any, n: Any, shift: Any) -> Any:
        if n is None:
            return e.fma(x, first, shift)
        return e.fma(x, second, e.fma(x, first, e.builder.fneg(n)))

    return _power(e, x, *_EXP_RANGE[e.itemsize], split)


def _exp2(e: Emitter, x: Any) -> Any:
    def split(x: Any, n: Any, shift: Any) -> Any:
        return e.add(x, shift) if n is None else e.sub(x, n)

    return _power(e, x, *_EXP2_RANGE[e.itemsize], split)


def _replacement(name: str, write: Any) -> Any:
    """An intrinsic that is `write` for a float, and for an integer as float64; NumPy's function for all other
    types."""

    def definition(context: Any, x: Any) -> Any:
        real = types.float64 if isinstance(x, (types.Integer, types.Boolean)) else x
        if not (isinstance(real, types.Float) and real.bitwidth in (32, 64)):
            return fallback(context, getattr(np, name), (x,))

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return write(
                ScalarEmitter(builder, real.bitwidth // 8), context.cast(builder, values[0], x, real)
            )

        return real(x), codegen

    return intrinsic_of(definition, name, ["x"])


FUNCTIONS = {
    name: _replacement(name, write)
    for name, write in (("exp", _exp), ("exp2", _exp2), ("tanh", hyperbolic_tangent))
}


def instead_of(value: Any) -> Any:
    """The replacement of a function of `math` or `numpy`, or the value itself."""
    name = getattr(value, "__name__", None)
    if name in FUNCTIONS and (value is getattr(math, name, None) or value is getattr(np, name)):
        return FUNCTIONS[name]
    return value
