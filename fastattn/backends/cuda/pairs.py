"""Pairs of numbers in 16 bits: tensor cores multiply twice as many of these at a time as of TF32.

A pair is two columns of a row as they lie in memory, the first in the lower bits of a float32. Kernels fetch,
keep and multiply pairs as if they were single numbers, of which a row has half as many.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from fastattn.backends.cuda.intrinsics import U, round_pair, same_bits

#: The bits of the exponents of a pair's numbers, and the lowest of each: their sum has a carry where a number
#: is nonfinite.
EXPONENTS = {"float16": (0x7C007C00, 0x04000400), "bfloat16": (0x7F807F80, 0x00800080)}
CARRIES = U(0x80008000)

#: Of how many numbers of a type a weight is the sum, but for 2^-23 of it, or 2^-40 of the largest weight.
PARTS = {"float16": 2, "bfloat16": 3}

#: float16 has no numbers below 2^-24: of weights times this, what is lost is below 2^-40 of the largest one.
FACTORS = {"float16": 2.0**15, "bfloat16": 1.0}


class Pairs(NamedTuple):
    """Device functions of pairs of one type."""

    first: Any  #: ``first(pair)``: a float32
    second: Any
    has_odd: Any  #: ``has_odd(pairs)``: 1 if any number of the first `count` is nonfinite, else 0
    keep: Any  #: ``keep(pair, odd)``: 0 in the place of the numbers that are odd, or, if `odd`, of the others


@cache
def pairs_of(kind: str, count: int = 1) -> Pairs:
    bits_of, number_of = same_bits("float32", "uint32"), same_bits("uint32", "float32")
    half_of = same_bits("uint16", "float16")
    EXPONENT, LOWEST = map(U, EXPONENTS[kind])
    LOWER, UPPER, SHIFT, TOP = U(0xFFFF), U(0xFFFF0000), U(16), U(15)
    IS_FLOAT16 = kind == "float16"

    @cuda.jit(device=True)
    def first(pair):
        bits = U(bits_of(pair))
        if IS_FLOAT16:
            return np.float32(half_of(np.uint16(bits & LOWER)))
        return number_of(np.uint32(bits << SHIFT & UPPER))

    @cuda.jit(device=True)
    def second(pair):
        bits = U(bits_of(pair))
        if IS_FLOAT16:
            return np.float32(half_of(np.uint16(bits >> SHIFT)))
        return number_of(np.uint32(bits & UPPER))

    @cuda.jit(device=True)
    def with_carries(pair):
        return np.uint32((U(bits_of(pair)) & EXPONENT) + LOWEST)

    @cuda.jit(device=True)
    def has_odd(pairs):
        any_bits = np.uint32(0)
        for n in range(count):
            any_bits = np.uint32(any_bits | with_carries(pairs[n]))
        return np.int32(U(any_bits) & CARRIES != U(0))

    @cuda.jit(device=True)
    def keep(pair, odd):
        kept = ((U(with_carries(pair)) & CARRIES) >> TOP) * LOWER
        if not odd:
            kept ^= U(0xFFFFFFFF)
        return number_of(np.uint32(U(bits_of(pair)) & kept))

    return Pairs(first, second, has_odd, keep)


def split_weights(kind: str, numbers: int) -> Any:
    """``split_weights(s, i, parts)``: the first weights of row i, times `FACTORS`, as pairs: each of their
    `PARTS` is what the ones before it lack, parts[n, i, e] of the weights 2 e and 2 e + 1."""
    pairs, pair, COUNT, FACTOR = pairs_of(kind), round_pair(kind), PARTS[kind], np.float32(FACTORS[kind])
    first, second = pairs.first, pairs.second

    @cuda.jit(device=True)
    def split_weights(s, i, parts):
        for e in range(numbers):
            x, y = s[i, 2 * e] * FACTOR, s[i, 2 * e + 1] * FACTOR
            for n in range(COUNT):
                part = pair(x, y)
                parts[n, i, e] = part
                x -= first(part)
                y -= second(part)

    return split_weights
