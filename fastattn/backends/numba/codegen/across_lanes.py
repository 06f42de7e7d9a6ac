"""Operations across the lanes of vectors, written with an `Emitter`. Sums are trees of one shape."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from fastattn.backends.numba.codegen.emit import Emitter

#: Two vectors to one, lane by lane.
Combine = Callable[[ir.Value, ir.Value], ir.Value]


def transpose(e: Emitter, x: list[ir.Value]) -> list[ir.Value]:
    """Rows to columns: `lanes` vectors, in rounds of swapping off-diagonal blocks."""
    n = e.lanes
    half = n // 2
    while half:
        low = [n + i - half if i & half else i for i in range(n)]
        high = [n + i if i & half else i + half for i in range(n)]
        x = list(x)
        for i in range(n):
            if i & half:
                continue
            a, b = x[i], x[i + half]
            x[i] = e.builder.shuffle_vector(a, b, e.indices(low))
            x[i + half] = e.builder.shuffle_vector(a, b, e.indices(high))
        half //= 2
    return x


def sum_vectors(e: Emitter, x: list[ir.Value]) -> ir.Value:
    """The vector whose lane i is the sum of all lanes of the i-th of `lanes` vectors."""
    half = e.lanes // 2
    while half:
        x = [_fold(e, x[i], x[i + half], half, e.add) for i in range(half)]
        half //= 2
    return x[0]


def reduce_lanes(e: Emitter, x: ir.Value, combine: Combine) -> ir.Value:
    """All lanes of x combined, in every lane."""
    half = e.lanes // 2
    while half:
        x = _fold(e, x, x, half, combine)
        half //= 2
    return x


def _fold(e: Emitter, a: ir.Value, b: ir.Value, half: int, combine: Combine) -> ir.Value:
    """Lane i of the pair (a, b) folded at distance `half`: both halves of a where that bit of i is clear,
    else of b."""
    n = e.lanes
    own = [n + i if i & half else i for i in range(n)]
    other = [n + i - half if i & half else i + half for i in range(n)]
    return combine(
        e.builder.shuffle_vector(a, b, e.indices(own)),
        e.builder.shuffle_vector(a, b, e.indices(other)),
    )
