"""Vectors of reals, written as LLVM IR: the language of the register tiles.

An `Emitter` stands between a stage and the function that Numba is lowering just now. It knows one dtype and
the host's vector; it knows no tile. Addresses are integers of the width of a pointer, counts are `intp`, and
loops of the Python code that uses it are unrolled in what it writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from fastattn._constants import EXP2_COEFFICIENTS, EXPONENT_MIN, MANTISSA_BITS
from fastattn.backends.numba.codegen.target import TARGET

INTP = ir.IntType(64)
INT32 = ir.IntType(32)
BOOL = ir.IntType(1)


class Variable:
    """A value that changes from one turn of a loop to the next; LLVM makes a register of it."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self._builder = builder
        self._slot = cgutils.alloca_once_value(builder, value)

    def get(self) -> ir.Value:
        return self._builder.load(self._slot)

    def set(self, value: ir.Value) -> None:
        self._builder.store(value, self._slot)


class Emitter:
    """Writes operations on vectors of `itemsize` bytes an element through `builder`."""

    def __init__(self, builder: ir.IRBuilder, itemsize: int) -> None:
        self.builder = builder
        self.itemsize = itemsize
        self.real = ir.FloatType() if itemsize == 4 else ir.DoubleType()
        self.integer = ir.IntType(8 * itemsize)
        self.lanes = TARGET.vector_bytes // itemsize
        self.dots = max(8, self.lanes)  # sums of a tile of products of rows: fewer would wait for each other
        self.vector = ir.VectorType(self.real, self.lanes)
        self.integers = ir.VectorType(self.integer, self.lanes)

    def vector_name(self) -> str:
        """The vector in the names of LLVM's functions."""
        return f"v{self.lanes}f{8 * self.itemsize}"

    # Constants.

    def count(self, n: int) -> ir.Constant:
        return ir.Constant(INTP, n)

    def constant(self, x: float) -> ir.Constant:
        return ir.Constant(self.vector, [ir.Constant(self.real, x)] * self.lanes)

    def zero(self) -> ir.Constant:
        return self.constant(0.0)

    def integer_constant(self, n: int, vector: ir.VectorType | None = None) -> ir.Constant:
        kind = vector or self.integers
        return ir.Constant(kind, [ir.Constant(kind.element, n)] * kind.count)

    # Addresses and memory. Memory of the caller's has any alignment.

    def at(self, address: ir.Value, *steps: tuple[Any, Any]) -> ir.Value:
        """address + the sum of n * size over `steps`, each factor an IR value or an int."""
        builder = self.builder
        for n, size in steps:
            n, size = (self.count(x) if isinstance(x, int) else x for x in (n, size))
            address = builder.add(address, builder.mul(n, size))
        return address

    def opaque(self, n: ir.Value) -> ir.Value:
        """n, of which LLVM knows no more. Else it would compute addresses in a row each from the last, or
        keep one as two parts and add them at each use."""
        kind = ir.FunctionType(INTP, [INTP])
        return self.builder.asm(kind, "", "=r,0", [n], side_effect=False)

    def load(self, address: ir.Value, align: int = 1) -> ir.Value:
        pointer = self.builder.inttoptr(address, self.vector.as_pointer())
        return self.builder.load(pointer, align=align)

    def store(self, address: ir.Value, x: ir.Value, align: int = 1) -> None:
        pointer = self.builder.inttoptr(address, self.vector.as_pointer())
        self.builder.store(x, pointer, align=align)

    def load_scalar(self, address: ir.Value) -> ir.Value:
        return self.builder.load(self.builder.inttoptr(address, self.real.as_pointer()), align=1)

    def store_scalar(self, address: ir.Value, x: ir.Value) -> None:
        self.builder.store(x, self.builder.inttoptr(address, self.real.as_pointer()), align=1)

    def load_address(self, address: ir.Value) -> ir.Value:
        """An integer out of a list of them."""
        return self.builder.load(self.builder.inttoptr(address, INTP.as_pointer()), align=8)

    def load_words(self, address: ir.Value) -> ir.Value:
        """32 bits for each lane."""
        words = ir.VectorType(INT32, self.lanes)
        return self.builder.load(self.builder.inttoptr(address, words.as_pointer()), align=4)

    def _lanes_below(self, n: ir.Value) -> ir.Value:
        """The mask of the first n lanes."""
        numbers = ir.Constant(ir.VectorType(INT32, self.lanes), [INT32(i) for i in range(self.lanes)])
        first = self.builder.insert_element(numbers, self.builder.trunc(n, INT32), INT32(0))
        limit = self.builder.shuffle_vector(first, first, self.indices([0] * self.lanes))
        return self.builder.icmp_signed("<", numbers, limit)

    def _masked(self, name: str, returned: ir.Type, arguments: Sequence[ir.Value]) -> ir.Value:
        kind = ir.FunctionType(returned, [argument.type for argument in arguments])
        full = f"llvm.masked.{name}.{self.vector_name()}.p0"
        function = cgutils.get_or_insert_function(self.builder.module, kind, full)
        return self.builder.call(function, arguments)

    def load_first(self, address: ir.Value, n: ir.Value) -> ir.Value:
        """The first n lanes, or all where n is more, and zeros; touches nothing past them."""
        pointer = self.builder.inttoptr(address, self.vector.as_pointer())
        return self._masked("load", self.vector, [pointer, INT32(1), self._lanes_below(n), self.zero()])

    def store_first(self, address: ir.Value, x: ir.Value, n: ir.Value) -> None:
        """Writes the first n lanes alone."""
        pointer = self.builder.inttoptr(address, self.vector.as_pointer())
        self._masked("store", ir.VoidType(), [x, pointer, INT32(1), self._lanes_below(n)])

    def keep_first(self, x: ir.Value, n: ir.Value) -> ir.Value:
        """x with zeros past the first n lanes."""
        return self.select(self._lanes_below(n), x, self.zero())

    def bits_allow(self, bits: ir.Value) -> ir.Value:
        """The lanes whose bits are set in a word, the first lane's lowest."""
        few = self.builder.trunc(bits, ir.IntType(self.lanes))
        return self.builder.bitcast(few, ir.VectorType(BOOL, self.lanes))

    def prefetch(self, address: ir.Value, locality: int = 3) -> None:
        pointer_type = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer_type, INT32, INT32, INT32])
        prefetch = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        pointer = self.builder.inttoptr(address, pointer_type)
        self.builder.call(prefetch, [pointer, INT32(0), INT32(locality), INT32(1)])

    # Arithmetic.

    def splat(self, x: ir.Value) -> ir.Value:
        """x in every lane."""
        undefined = ir.Constant(self.vector, ir.Undefined)
        first = self.builder.insert_element(undefined, x, INT32(0))
        return self.builder.shuffle_vector(first, undefined, self.indices([0] * self.lanes))

    def gather(self, addresses: Sequence[ir.Value]) -> ir.Value:
        """One real from each address."""
        x: ir.Value = ir.Constant(self.vector, ir.Undefined)
        for lane, address in enumerate(addresses):
            x = self.builder.insert_element(x, self.load_scalar(address), INT32(lane))
        return x

    def lane(self, x: ir.Value, lane: int) -> ir.Value:
        return self.builder.extract_element(x, INT32(lane))

    def add(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.fadd(a, b)

    def sub(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.fsub(a, b)

    def mul(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.fmul(a, b)

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """a * b + c; rounded once where the host can."""
        if not TARGET.has_fma:
            return self.builder.fadd(self.builder.fmul(a, b), c)
        return self._call_fma(a, b, c)

    def _call_fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        name = f"llvm.fma.{self.vector_name()}"
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        fma = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(fma, [a, b, c])

    def maximum(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """The larger lane by lane; b where either is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def select(self, mask: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.select(mask, a, b)

    def equal(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.fcmp_ordered("==", a, b)

    def is_nan(self, x: ir.Value) -> ir.Value:
        return self.builder.fcmp_unordered("uno", x, x)

    def any(self, mask: ir.Value) -> ir.Value:
        """Whether a lane of the mask is set, as one bit."""
        bits = self.builder.bitcast(mask, ir.IntType(self.lanes))
        return self.builder.icmp_unsigned("!=", bits, ir.Constant(ir.IntType(self.lanes), 0))

    def multiply_exactly(self, x: ir.Value, high: ir.Value, low: ir.Value) -> ir.Value:
        """x * (high + low), rounded about once, and +0 for a zero of either sign; see `multiply_exactly` in
        ``cython/kernels/vec.h``."""
        return self.fma(x, high, self.fma(x, low, self.zero()))

    def words_allow(self, words: ir.Value, bit: ir.Value | int) -> ir.Value:
        """Lanes in whose word this bit is set."""
        builder = self.builder
        vector = words.type
        if isinstance(bit, int):
            mask = self.integer_constant(1 << bit, vector)
        else:
            shifted = builder.shl(INT32(1), bit)
            first = builder.insert_element(ir.Constant(vector, ir.Undefined), shifted, INT32(0))
            mask = builder.shuffle_vector(first, first, self.indices([0] * self.lanes))
        return builder.icmp_unsigned("!=", builder.and_(words, mask), self.integer_constant(0, vector))

    def one_minus_product(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """1 - a * b, rounded once on every host."""
        return self._call_fma(self.builder.fsub(self.constant(-0.0), a), b, self.constant(1.0))

    def _split_exponent(
        self, xs: Sequence[ir.Value], factor: ir.Value, lowest: ir.Value
    ) -> tuple[list[ir.Value], list[ir.Value]]:
        """factor * x = n + f with |f| <= 1/2, for x <= 0 < factor: each f, and each 2^(n - 1).

        The power is exactly 0 where 2^(factor * x) would be below 2^(EXPONENT_MIN + 1/2); `lowest` is
        EXPONENT_MIN / factor. NaN gives f = NaN.
        """
        builder, bits = self.builder, MANTISSA_BITS[self.itemsize]
        shift = self.constant(1.5 * 2.0**bits - EXPONENT_MIN[self.itemsize])
        xs = [self.maximum(lowest, x) for x in xs]
        rounded = [self.fma(x, factor, shift) for x in xs]
        whole = [self.sub(y, shift) for y in rounded]
        minus = self.constant(-0.0)
        fs = [self.fma(x, factor, self.sub(minus, n)) for x, n in zip(xs, whole, strict=True)]
        shifted = [
            builder.shl(builder.bitcast(y, self.integers), self.integer_constant(bits)) for y in rounded
        ]
        return fs, [builder.bitcast(y, self.vector) for y in shifted]

    def twice_exp2m1_over_f(self, fs: Sequence[ir.Value]) -> list[ir.Value]:
        """2 (2^f - 1) / f, |f| <= 1/2; step by step for all fs, as the steps of one wait for each other."""
        c = EXP2_COEFFICIENTS[self.itemsize]
        ys = [self.fma(f, self.constant(c[-1]), self.constant(c[-2])) for f in fs]
        for coefficient in reversed(c[:-2]):
            ys = [self.fma(y, f, self.constant(coefficient)) for y, f in zip(ys, fs, strict=True)]
            ys = self._together(ys)
        return ys

    def _together(self, xs: Sequence[ir.Value]) -> list[ir.Value]:
        """xs, each of which LLVM takes to depend on all of them. Without that it saves registers where they
        are few by writing one long chain behind the other: softmax in float64 took 1.3 times as long (Zen 3,
        2026-11-22)."""
        if not TARGET.few_registers or len(xs) == 1:
            return list(xs)
        kinds = [self.vector] * len(xs)
        kind = ir.FunctionType(ir.LiteralStructType(kinds), kinds)
        constraint = ",".join(["=x"] * len(xs) + [str(i) for i in range(len(xs))])
        outputs = self.builder.asm(kind, "", constraint, xs, side_effect=False)
        return [self.builder.extract_value(outputs, i) for i in range(len(xs))]

    def exp2(self, xs: Sequence[ir.Value], factor: ir.Value, lowest: ir.Value) -> list[ir.Value]:
        """2^(factor * x) for each x <= 0, about 1 ULP of what the product rounds to.

        0 for -inf and where no normal number is left, NaN for NaN, exactly 1 for 0.
        """
        fs, powers = self._split_exponent(xs, factor, lowest)
        ys = self.twice_exp2m1_over_f(fs)
        ys = [self.fma(y, f, self.constant(2.0)) for y, f in zip(ys, fs, strict=True)]
        return [self.mul(y, power) for y, power in zip(ys, powers, strict=True)]

    def exp2m1(self, x: ir.Value) -> ir.Value:
        """2^x - 1 for x <= 0, a few ULP relative."""
        lowest = self.constant(float(EXPONENT_MIN[self.itemsize]))
        (f,), (power,) = self._split_exponent([x], self.constant(1.0), lowest)
        (y,) = self.twice_exp2m1_over_f([f])
        rest = self.fma(self.constant(2.0), power, self.constant(-1.0))
        return self.fma(power, self.mul(f, y), rest)

    def transpose(self, x: list[ir.Value]) -> list[ir.Value]:
        """Rows to columns: `lanes` vectors, in rounds of swapping off-diagonal blocks."""
        n = self.lanes
        half = n // 2
        while half:
            low = [n + i - half if i & half else i for i in range(n)]
            high = [n + i if i & half else i + half for i in range(n)]
            x = list(x)
            for i in range(n):
                if i & half:
                    continue
                a, b = x[i], x[i + half]
                x[i] = self.builder.shuffle_vector(a, b, self.indices(low))
                x[i + half] = self.builder.shuffle_vector(a, b, self.indices(high))
            half //= 2
        return x

    def indices(self, indices: Sequence[int]) -> ir.Constant:
        return ir.Constant(ir.VectorType(INT32, len(indices)), [INT32(i) for i in indices])

    # Control.

    def variable(self, value: ir.Value) -> Variable:
        return Variable(self.builder, value)

    @contextmanager
    def loop(self, start: ir.Value, stop: ir.Value) -> Iterator[ir.Value]:
        """Every index from start to stop - 1."""
        with cgutils.for_range(self.builder, stop, start) as turn:
            yield turn.index

    def least(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)

    # Sums across lanes, in trees of one shape.

    def _fold(self, a: ir.Value, b: ir.Value, half: int, combine: Any) -> ir.Value:
        """Lane i of the pair (a, b) folded at distance `half`: both halves of a where that bit of i is clear,
        else of b."""
        n = self.lanes
        own = [n + i if i & half else i for i in range(n)]
        other = [n + i - half if i & half else i + half for i in range(n)]
        return combine(
            self.builder.shuffle_vector(a, b, self.indices(own)),
            self.builder.shuffle_vector(a, b, self.indices(other)),
        )

    def sum_vectors(self, x: list[ir.Value]) -> ir.Value:
        """The vector whose lane i is the sum of all lanes of the i-th of `lanes` vectors."""
        half = self.lanes // 2
        while half:
            x = [self._fold(x[i], x[i + half], half, self.add) for i in range(half)]
            half //= 2
        return x[0]

    def across(self, x: ir.Value, combine: Any) -> ir.Value:
        """All lanes combined, in every lane."""
        half = self.lanes // 2
        while half:
            x = self._fold(x, x, half, combine)
            half //= 2
        return x
