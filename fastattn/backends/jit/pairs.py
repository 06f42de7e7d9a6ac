"""Numbers with a derivative, as types of compiled code.

A `Pair` is a float and its derivative. A `Tracked` is what an array of `aux` holds, as it is in memory: a
float of which the gradient is asked for. An element that is read of such an array is a `Pair`; all else that
a function may do with one, as arithmetic on whole arrays, has no type, so that no derivative gets lost.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.core.typeconv import Conversion
from numba.extending import lower_cast, models, register_model

_NUMBERS = (types.Integer, types.Float, types.Boolean)


class Pair(types.Type):
    """A float and its derivative."""

    def __init__(self, real: Any) -> None:
        self.real = real
        super().__init__(name=f"derived({real})")

    def unify(self, typing: Any, other: Any) -> Any:
        """For a variable that is a pair on one path and a number on another, whose derivative is 0."""
        plain = types.unliteral(plain_of(other))
        return Pair(typing.unify_types(self.real, plain)) if isinstance(plain, _NUMBERS) else None

    def can_convert_from(self, typing: Any, other: Any) -> Any:
        if isinstance(types.unliteral(other), _NUMBERS):
            return Conversion.safe
        return typing.can_convert(other.real, self.real) if isinstance(other, Pair) else None


class Tracked(types.Type):
    """An element of the floating array `number` of `aux`."""

    def __init__(self, real: Any, number: int) -> None:
        self.real, self.number = real, number
        super().__init__(name=f"{real} of aux[{number}]")


def tracked(kind: Any, number: int) -> Any:
    """The type of the array or number `number` of aux, whose own type is `kind`, with its derivative."""
    return kind.copy(dtype=Tracked(kind.dtype, number)) if isinstance(kind, types.Array) else Pair(kind)


@register_model(Pair)
class _PairModel(models.StructModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, [("value", kind.real), ("slope", kind.real)])


@register_model(Tracked)
class _TrackedModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, manager.lookup(kind.real).get_value_type())


def plain_of(kind: Any) -> Any:
    """The type of a pair's value, or the type itself."""
    return kind.real if isinstance(kind, Pair) else kind


def make(context: Any, builder: Any, kind: Pair, value: Any, slope: Any) -> Any:
    """A pair of two reals of its type."""
    pair = cgutils.create_struct_proxy(kind)(context, builder)
    pair.value, pair.slope = value, slope
    return pair._getvalue()


def value_of(builder: Any, kind: Any, given: Any) -> Any:
    return builder.extract_value(given, 0) if isinstance(kind, Pair) else given


def slope_of(builder: Any, pair: Any) -> Any:
    return builder.extract_value(pair, 1)


def _from_number(context: Any, builder: Any, given: Any, to: Any, number: Any) -> Any:
    value = context.cast(builder, number, given, to.real)
    return make(context, builder, to, value, value.type(0))


def _from_pair(context: Any, builder: Any, given: Any, to: Any, pair: Any) -> Any:
    parts = (value_of(builder, given, pair), slope_of(builder, pair))
    return make(context, builder, to, *(context.cast(builder, part, given.real, to.real) for part in parts))


for _number in _NUMBERS:
    lower_cast(_number, Pair)(_from_number)
lower_cast(Pair, Pair)(_from_pair)
