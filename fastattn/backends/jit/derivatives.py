"""Functions and operators on pairs of value and derivative: forward differentiation, rule by rule.

The frontend puts these in the place of those that a function calls, when its derivative is asked for. Beside
plain numbers each does what it does without a derivative. One without a rule has no type for pairs.

At kinks the derivatives are PyTorch's: 0 of ``abs`` at 0, a half for each of two equal operands of ``min``
and ``max``, that of the operand chosen by ``where`` and ``if``, 0 of what is piecewise constant.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import from_dtype, types

from fastattn.backends.jit import literals, vector_math
from fastattn.backends.jit.codegen.intrinsics import intrinsic_of
from fastattn.backends.jit.literals import fallback
from fastattn.backends.jit.pairs import Pair, make, plain_of, slope_of, value_of

#: The exponents of powers whose derivatives are products.
PRODUCTS = range(-16, 17)


class _Real:
    """A float of compiled code, with Python's operators."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any) -> None:
        self.context, self.builder, self.kind, self.value = context, builder, kind, value

    def _new(self, value: Any) -> _Real:
        return _Real(self.context, self.builder, self.kind, value)

    def _of(self, other: Any) -> Any:
        return other.value if isinstance(other, _Real) else ir.Constant(self.value.type, float(other))

    def constant(self, number: float) -> _Real:
        return self._new(self._of(number))

    def __add__(self, other: Any) -> _Real:
        return self._new(self.builder.fadd(self.value, self._of(other)))

    def __sub__(self, other: Any) -> _Real:
        return self._new(self.builder.fsub(self.value, self._of(other)))

    def __rsub__(self, other: Any) -> _Real:
        return self._new(self.builder.fsub(self._of(other), self.value))

    def __mul__(self, other: Any) -> _Real:
        if isinstance(other, int) and abs(other) == 1:
            return self if other == 1 else -self
        return self._new(self.builder.fmul(self.value, self._of(other)))

    def __truediv__(self, other: Any) -> _Real:
        return self._new(self.builder.fdiv(self.value, self._of(other)))

    def __rtruediv__(self, other: Any) -> _Real:
        return self._new(self.builder.fdiv(self._of(other), self.value))

    def __neg__(self) -> _Real:
        return self._new(self.builder.fneg(self.value))

    __radd__, __rmul__ = __add__, __mul__

    def where(self, sign: str, other: Any, yes: Any, no: Any) -> _Real:
        """`yes` where the comparison with `other` holds, else `no`."""
        holds = self.builder.fcmp_ordered(sign, self.value, self._of(other))
        return self._new(self.builder.select(holds, self._of(yes), self._of(no)))

    def apply(self, function: Any, *others: Any) -> _Real:
        """A function of this and of others."""
        kinds = (self.kind,) * (1 + len(others))
        signature, write = _plain(function, False)(self.context.typing_context, *kinds)
        given = (self.value, *map(self._of, others))
        result = write(self.context, self.builder, signature, given)
        return self._new(self.context.cast(self.builder, result, signature.return_type, self.kind))


def _plain(function: Any, is_weak: bool) -> Callable[..., Any]:
    """What gives signature and code of a function for plain numbers."""
    ours = vector_math.instead_of(function)
    if ours is function:
        ours = literals.operation(function, is_weak)
    if ours is not None:
        return ours._defn
    return lambda context, *arguments: fallback(context, function, arguments)


def _power(z: _Real, x: _Real, y: _Real) -> _Real:
    return y.where("==", 0, 0, y * x.apply(operator.pow, y - 1))


def _sign(z: _Real, x: _Real) -> _Real:
    return x.where(">", 0, 1, x.where("<", 0, -1, 0))


def _quotient(function: Any) -> Callable[[_Real, _Real, _Real], _Real]:
    return lambda z, x, y: -(x / y).apply(function)


def _one(*_: Any) -> int:
    return 1


def _minus(*_: Any) -> int:
    return -1


def _zero(*_: Any) -> int:
    return 0


_LN2, _LN10, _ERF = math.log(2), math.log(10), 2 / math.sqrt(math.pi)

#: The partial derivative in each operand, of the result and the operands.
_PARTIALS: dict[Any, tuple[Callable[..., Any], ...]] = {}


def _have(functions: tuple[Any, ...], *partials: Callable[..., Any]) -> None:
    _PARTIALS.update(dict.fromkeys(functions, partials))


_have((operator.add, np.add), _one, _one)
_have((operator.sub, np.subtract), _one, _minus)
_have((operator.mul, np.multiply), lambda z, x, y: y, lambda z, x, y: x)
_have((operator.truediv, np.true_divide), lambda z, x, y: 1 / y, lambda z, x, y: -(z / y))
_have((operator.mod, np.remainder), _one, _quotient(np.floor))
_have((np.fmod,), _one, _quotient(np.trunc))
_have(
    (operator.pow, pow, math.pow, np.power),
    _power, lambda z, x, y: z.where("==", 0, 0, z * x.apply(np.log)),
)  # fmt: skip
_have((math.hypot, np.hypot), lambda z, x, y: x / z, lambda z, x, y: y / z)
_have(
    (math.atan2, np.arctan2),
    lambda z, x, y: y / (x * x + y * y), lambda z, x, y: -(x / (x * x + y * y)),
)  # fmt: skip
_have((math.copysign, np.copysign), lambda z, x, y: x.where("==", 0, 0, z / x), _zero)
_have(
    (np.logaddexp,),
    lambda z, x, y: (x - z).apply(np.exp), lambda z, x, y: (y - z).apply(np.exp)
)  # fmt: skip
_have((operator.pos, np.positive), _one)
_have((operator.neg, np.negative), _minus)
_have((abs, math.fabs, np.fabs, np.absolute), _sign)
_have((np.square,), lambda z, x: 2 * x)
_have((np.reciprocal,), lambda z, x: -(z * z))
_have((math.sqrt, np.sqrt), lambda z, x: 0.5 / z)
_have((np.cbrt,), lambda z, x: 1 / (3 * z * z))
_have((math.exp, np.exp), lambda z, x: z)
_have((np.exp2, getattr(math, "exp2", np.exp2)), lambda z, x: _LN2 * z)
_have((math.expm1, np.expm1), lambda z, x: z + 1)
_have((math.log, np.log), lambda z, x: 1 / x)
_have((math.log2, np.log2), lambda z, x: 1 / (_LN2 * x))
_have((math.log10, np.log10), lambda z, x: 1 / (_LN10 * x))
_have((math.log1p, np.log1p), lambda z, x: 1 / (1 + x))
_have((math.sin, np.sin), lambda z, x: x.apply(np.cos))
_have((math.cos, np.cos), lambda z, x: -x.apply(np.sin))
_have((math.tan, np.tan), lambda z, x: 1 + z * z)
_have((math.asin, np.arcsin), lambda z, x: 1 / ((1 - x) * (1 + x)).apply(np.sqrt))
_have((math.acos, np.arccos), lambda z, x: -(1 / ((1 - x) * (1 + x)).apply(np.sqrt)))
_have((math.atan, np.arctan), lambda z, x: 1 / (1 + x * x))
_have((math.sinh, np.sinh), lambda z, x: x.apply(np.cosh))
_have((math.cosh, np.cosh), lambda z, x: x.apply(np.sinh))
_have((math.tanh, np.tanh), lambda z, x: (1 - z) * (1 + z))
_have((math.asinh, np.arcsinh), lambda z, x: 1 / x.apply(np.hypot, 1))
_have((math.acosh, np.arccosh), lambda z, x: 1 / ((x - 1) * (x + 1)).apply(np.sqrt))
_have((math.atanh, np.arctanh), lambda z, x: 1 / ((1 - x) * (1 + x)))
_have((math.erf,), lambda z, x: _ERF * (-(x * x)).apply(np.exp))
_have((math.erfc,), lambda z, x: -(_ERF * (-(x * x)).apply(np.exp)))
_have((math.degrees, np.degrees, np.rad2deg), lambda z, x: x.where("==", x, 180 / math.pi, x))
_have((math.radians, np.radians, np.deg2rad), lambda z, x: x.where("==", x, math.pi / 180, x))

#: Which of two operands has the derivative, by the sign of a comparison.
_EXTREMES = {
    **dict.fromkeys((max, np.maximum, np.fmax), ">"), **dict.fromkeys((min, np.minimum, np.fmin), "<")
}  # fmt: skip

#: Piecewise constant: of values alone, and no pairs.
_FLAT = {
    operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne, operator.not_,
    operator.floordiv, np.floor_divide, np.less, np.less_equal, np.greater,
    np.greater_equal, np.equal, np.not_equal, np.logical_and, np.logical_or, np.logical_not, np.logical_xor,
    math.floor, math.ceil, math.trunc, np.floor, np.ceil, np.trunc, np.rint, np.sign, round, math.isnan,
    math.isinf, math.isfinite, np.isnan, np.isinf, np.isfinite, np.signbit,
}  # fmt: skip


@cache
def replacement(called: Any, n: int, is_weak: bool) -> Any:
    """What stands for a function or an operator of n operands, or None."""
    if called is np.where and n == 3:
        definition = _on_pairs(literals.WHERE[is_weak]._defn, _chosen)
    elif isinstance(called, type) and issubclass(called, (int, float, np.number, np.bool_)) and n == 1:
        definition = _conversion(called)
    elif called in _EXTREMES and n == 2:
        definition = _on_pairs(_plain(called, is_weak), partial(_extreme, _EXTREMES[called]))
    elif len(_PARTIALS.get(called, ())) == n:
        definition = _on_pairs(_plain(called, is_weak), partial(_by_partials, _PARTIALS[called]))
    elif called in _FLAT:
        definition = _on_pairs(_plain(called, is_weak), None)
    else:
        return None
    return intrinsic_of(definition, getattr(called, "__name__", str(called)), [f"x{i}" for i in range(n)])


@cache
def power(exponent: int, is_weak: bool) -> Any:
    """The replacement of a power whose exponent is a constant, one of `PRODUCTS`."""

    def product(x: _Real, n: int) -> Any:
        """x to the n, by squares: also of vectors of x."""
        if n < 0:
            return 1 / product(x, -n)
        half = product(x, n // 2) if n > 1 else x.constant(1)
        return half * half * (x if n % 2 else 1)

    def of_plain(context: Any, x: Any, y: Any) -> Any:
        if not isinstance(x, types.Float):
            return _plain(operator.pow, is_weak)(context, x, y)
        return x(
            x, y
        ), lambda target, builder, _, given: product(_Real(target, builder, x, given[0]), exponent).value

    def slope(z: _Real, x: _Real, y: _Real) -> Any:
        return exponent * product(x, exponent - 1) if exponent else 0

    definition = _on_pairs(of_plain, partial(_by_partials, (slope, _zero)))
    return intrinsic_of(definition, "pow", ["x", "y"])


def _on_pairs(of_plain: Callable[..., Any], of_pairs: Callable[..., Any] | None) -> Callable[..., Any]:
    """The definition of an intrinsic: `of_plain` beside numbers; `of_pairs` finds the derivative, and without
    it there is none."""

    def definition(context: Any, *kinds: Any) -> Any:
        plain = tuple(map(plain_of, kinds))
        signature, write = of_plain(context, *plain)
        if signature is None or plain == kinds:
            return signature, write
        real = signature.return_type
        has_slope = of_pairs is not None and isinstance(real, types.Float)
        result = Pair(real) if has_slope else real

        def codegen(target: Any, builder: Any, _: Any, given: Any) -> Any:
            def apply(numbers: Any) -> Any:
                cast = [target.cast(builder, *it) for it in zip(numbers, plain, signature.args, strict=True)]
                return write(target, builder, signature, cast)

            operands = list(zip(kinds, given, strict=True))
            values = [value_of(builder, kind, x) for kind, x in operands]
            value = apply(values)
            if of_pairs is None or not has_slope:
                return value
            slopes = [slope_of(builder, x) if isinstance(kind, Pair) else None for kind, x in operands]
            new = partial(_Real, target, builder, real)
            to_real = [
                [
                    None if x is None else new(target.cast(builder, x, kind, real))
                    for x, kind in zip(part, plain, strict=True)
                ]
                for part in (values, slopes)
            ]
            return make(target, builder, result, value, of_pairs(new(value), *to_real).value)

        return result(*kinds), codegen

    return definition


def _by_partials(partials: tuple[Callable[..., Any], ...], z: _Real, values: Any, slopes: Any) -> _Real:
    """The chain rule. A derivative of 0 stays 0, beside inf and NaN too: of what does not depend on the score
    nothing is seen."""
    terms = []
    for partial_of, slope in zip(partials, slopes, strict=True):
        if slope is not None and partial_of is not _zero:
            term = slope * partial_of(z, *values)
            terms.append(term if partial_of in (_one, _minus) else slope.where("==", 0, slope, term))
    return sum(terms[1:], terms[0]) if terms else z.constant(0)


def _extreme(sign: str, z: _Real, values: Any, slopes: Any) -> _Real:
    """That of the operand which comes first by `sign`, or the mean of both."""
    (x, y), (of_x, of_y) = values, (z.constant(0) if slope is None else slope for slope in slopes)
    other = "<" if sign == ">" else ">"
    return x.where(sign, y, of_x, x.where(other, y, of_y, 0.5 * of_x + 0.5 * of_y))


def _chosen(z: _Real, values: Any, slopes: Any) -> _Real:
    """That of the operand that ``where`` chooses."""
    yes, no = (0 if slope is None else slope for slope in slopes[1:])
    return values[0].where("==", 0, no, yes)


def _conversion(to: type) -> Callable[..., Any]:
    """Of ``float(x)``, ``np.float32(x)`` and the like; an integer or a bool has no derivative."""
    kind = from_dtype(np.dtype(to))

    def definition(context: Any, x: Any) -> Any:
        if not isinstance(plain_of(x), (types.Integer, types.Float, types.Boolean)):
            return fallback(context, to, (x,))
        keeps = isinstance(x, Pair) and isinstance(kind, types.Float)
        result = Pair(kind) if keeps else kind

        def codegen(target: Any, builder: Any, _: Any, given: Any) -> Any:
            if keeps:
                return target.cast(builder, given[0], x, result)
            return target.cast(builder, value_of(builder, x, given[0]), plain_of(x), kind)

        return result(x), codegen

    return definition
