"""Powers of two and tanh of vectors of reals, written with an `Emitter`, as in ``cython/kernels/vec.h``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from fastattn._machine.constants import EXP2_COEFFICIENTS, EXPONENT_MIN, LOG2E, MANTISSA_BITS
from fastattn.backends.jit.codegen.emit import Emitter
from fastattn.backends.jit.codegen.target import TARGET


def exp2(e: Emitter, xs: Sequence[ir.Value], factor: ir.Value, lowest: ir.Value) -> list[ir.Value]:
    """2^(factor * x) for each x <= 0, about 1 ULP of what the product rounds to.

    0 for -inf and where no normal number is left, NaN for NaN, exactly 1 for 0. factor > 0 and `lowest`,
    which is EXPONENT_MIN / factor, are vectors.
    """
    fs, powers = _split_exponent(e, xs, factor, lowest)
    ys = twice_exp2m1_over_f(e, fs)
    ys = [e.fma(y, f, e.constant(2.0)) for y, f in zip(ys, fs, strict=True)]
    return [e.mul(y, power) for y, power in zip(ys, powers, strict=True)]


def exp2_of_difference(e: Emitter, x: ir.Value, largest: ir.Value, factor: ir.Value) -> ir.Value:
    """`exp2` of factor * (x - largest), all vectors."""
    lowest = e.builder.fdiv(e.constant(float(EXPONENT_MIN[e.itemsize])), factor)
    return exp2(e, [e.builder.fsub(x, largest)], factor, lowest)[0]


def exp2m1(e: Emitter, x: ir.Value) -> ir.Value:
    """2^x - 1 for x <= 0, a few ULP relative."""
    lowest = e.constant(float(EXPONENT_MIN[e.itemsize]))
    (f,), (power,) = _split_exponent(e, [x], e.constant(1.0), lowest)
    (y,) = twice_exp2m1_over_f(e, [f])
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


def twice_exp2m1_over_f(e: Emitter, fs: Sequence[ir.Value]) -> list[ir.Value]:
    """2 (2^f - 1) / f, |f| <= 1/2; step by step for all fs, as the steps of one wait for each other."""
    c = EXP2_COEFFICIENTS[e.itemsize]
    ys = [e.fma(f, e.constant(c[-1]), e.constant(c[-2])) for f in fs]
    for coefficient in reversed(c[:-2]):
        ys = [e.fma(y, f, e.constant(coefficient)) for y, f in zip(ys, fs, strict=True)]
        ys = _together(e, ys)
    return ys


def _split_exponent(
    e: Emitter, xs: Sequence[ir.Value], factor: ir.Value, lowest: ir.Value
) -> tuple[list[ir.Value], list[ir.Value]]:
    """factor * x = n + f with |f| <= 1/2, for x <= 0 < factor: each f, and each 2^(n - 1).

    The power is exactly 0 where 2^(factor * x) would be below 2^(EXPONENT_MIN + 1/2); `lowest` is
    EXPONENT_MIN / factor. NaN gives f = NaN.
    """
    builder, bits = e.builder, MANTISSA_BITS[e.itemsize]
    shift = e.constant(1.5 * 2.0**bits - EXPONENT_MIN[e.itemsize])
    xs = [e.maximum(lowest, x) for x in xs]
    rounded = [e.fma(x, factor, shift) for x in xs]
    whole = [e.sub(y, shift) for y in rounded]
    minus = e.constant(-0.0)
    fs = [e.fma(x, factor, e.sub(minus, n)) for x, n in zip(xs, whole, strict=True)]
    shifted = [builder.shl(builder.bitcast(y, e.integers), e.integer_constant(bits)) for y in rounded]
    return fs, [builder.bitcast(y, e.vector) for y in shifted]


def _together(e: Emitter, xs: Sequence[ir.Value]) -> list[ir.Value]:
    """xs, each of which LLVM takes to depend on all of them.

    Without that it saves registers where they are few by writing one long chain behind the other: softmax in
    float64 took 1.3 times as long (Zen 3, 2026-11-22).
    """
    if not TARGET.few_registers or len(xs) == 1:
        return list(xs)
    kinds = [e.vector] * len(xs)
    kind = ir.FunctionType(ir.LiteralStructType(kinds), kinds)
    constraint = ",".join(["=x"] * len(xs) + [str(i) for i in range(len(xs))])
    outputs = e.builder.asm(kind, "", constraint, xs, side_effect=False)
    return [e.builder.extract_value(outputs, i) for i in range(len(xs))]
