"""Powers of two and tanh of vectors of reals, written with an `Emitter`, as in ``cython/kernels/vec.h``."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from fastattn._machine.constants import EXP2_COEFFICIENTS, EXPONENT_MIN, LOG2E, MANTISSA_BITS
from fastattn.backends.jit.codegen.emit import Emitter


def exp2_of_difference(e: Emitter, x: ir.Value, largest: ir.Value, factor: ir.Value) -> ir.Value:
    """2^(factor * (x - largest)), about 1 ULP of what the product rounds to; largest >= x, factor > 0.

    0 for -inf and where no normal number is left, NaN for NaN, exactly 1 for 0.
    """
    f, power = _split_exponent(e, e.sub(x, largest), factor)
    return e.mul(e.fma(twice_exp2m1_over_f(e, f), f, e.constant(2.0)), power)


def exp2m1(e: Emitter, x: ir.Value) -> ir.Value:
    """2^x - 1 for x <= 0, a few ULP relative."""
    f, power = _split_exponent(e, x, e.constant(1.0))
    y = twice_exp2m1_over_f(e, f)
    rest = e.fma(e.constant(2.0), power, e.constant(-1.0))
    return e.fma(power, e.mul(f, y), rest)


def hyperbolic_tangent(e: Emitter, x: Any) -> Any:
    """A few ULP relative for small x too: with e = exp(-2|x|) - 1, tanh|x| = -e / (2 + e)."""
    builder = e.builder
    sign_bit = e.integer_constant(1 << (8 * e.itemsize - 1))
    x = builder.bitcast(x, e.integers)
    sign = builder.and_(x, sign_bit)
    magnitude = builder.bitcast(builder.xor(x, sign), e.vector)
    grown = exp2m1(e, e.mul(magnitude, e.constant(-2 * LOG2E)))
    ratio = builder.fdiv(grown, e.add(e.constant(2.0), grown))
    # -e / (2 + e) with the sign of x
    negative = builder.xor(builder.bitcast(ratio, e.integers), sign_bit)
    return builder.bitcast(builder.xor(negative, sign), e.vector)


def twice_exp2m1_over_f(e: Emitter, f: ir.Value) -> ir.Value:
    """2 (2^f - 1) / f, |f| <= 1/2."""
    *coefficients, last = EXP2_COEFFICIENTS[e.itemsize]
    y = e.constant(last)
    for coefficient in reversed(coefficients):
        y = e.fma(y, f, e.constant(coefficient))
    return y


def _split_exponent(e: Emitter, x: ir.Value, factor: ir.Value) -> tuple[ir.Value, ir.Value]:
    """factor * x = n + f with |f| <= 1/2, for x <= 0 < factor: f, and 2^(n - 1).

    The power is exactly 0 where 2^(factor * x) would be below 2^(EXPONENT_MIN + 1/2). NaN gives f = NaN.
    """
    builder, bits, least = e.builder, MANTISSA_BITS[e.itemsize], EXPONENT_MIN[e.itemsize]
    shift = e.constant(1.5 * 2.0**bits - least)
    x = e.maximum(builder.fdiv(e.constant(float(least)), factor), x)
    rounded = e.fma(x, factor, shift)
    f = e.fma(x, factor, e.sub(e.constant(-0.0), e.sub(rounded, shift)))
    shifted = builder.shl(builder.bitcast(rounded, e.integers), e.integer_constant(bits))
    return f, builder.bitcast(shifted, e.vector)
