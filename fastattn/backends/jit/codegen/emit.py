"""Vectors of reals, written as LLVM IR: the language of the register tiles.

An `Emitter` writes operations into the function that Numba is lowering. It knows one dtype and the host's
vector, and no tiles. Addresses are integers of the width of a pointer, and counts are `intp`. A loop in the
Python code that uses an `Emitter` is unrolled in what it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from fastattn.backends.jit.codegen.target import TARGET

INTP = ir.IntType(64)
INT32 = ir.IntType(32)


class Variable:
    """A value that changes from one turn of a loop to the next. LLVM makes a register of it.

    It is set to `value` at the place where `builder` is.
    """

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self._builder = builder
        self._slot = cgutils.alloca_once_value(builder, value)

    def get(self) -> ir.Value:
        return self._builder.load(self._slot)

    def set(self, value: ir.Value) -> None:
        self._builder.store(value, self._slot)


class Emitter:
    """Writes operations on vectors of reals of `itemsize` bytes, by default those of the host's registers.

    `builder` is at the place where instructions are to be written. Memory of the caller's has any alignment.
    """

    def __init__(self, builder: ir.IRBuilder, itemsize: int) -> None:
        self.builder = builder
        self.itemsize = itemsize
        self.real = ir.FloatType() if itemsize == 4 else ir.DoubleType()
        self.integer = ir.IntType(8 * itemsize)
        self.lanes = TARGET.vector_bytes // itemsize
        self.vector = ir.VectorType(self.real, self.lanes)
        self.integers = ir.VectorType(self.integer, self.lanes)

    def vector_name(self) -> str:
        """The vector in the names of LLVM's functions."""
        return f"v{self.lanes}f{8 * self.itemsize}"

    def count(self, n: int) -> ir.Constant:
        return ir.Constant(INTP, n)

    def constant(self, x: float) -> ir.Constant:
        """x in every lane."""
        return ir.Constant(self.vector, [ir.Constant(self.real, x)] * self.lanes)

    def zero(self) -> ir.Constant:
        return self.constant(0.0)

    def integer_constant(self, n: int) -> ir.Constant:
        """n in every lane of a vector of integers as wide as the reals."""
        return ir.Constant(self.integers, [ir.Constant(self.integer, n)] * self.lanes)

    def indices(self, indices: Sequence[int]) -> ir.Constant:
        """Which lanes a shuffle takes."""
        return ir.Constant(ir.VectorType(INT32, len(indices)), [INT32(i) for i in indices])

    def at(self, address: ir.Value, *steps: tuple[Any, Any]) -> ir.Value:
        """address + the sum of n * size over `steps`, each factor an IR value or an int."""
        builder = self.builder
        for n, size in steps:
            n, size = (self.count(x) if isinstance(x, int) else x for x in (n, size))
            address = builder.add(address, builder.mul(n, size))
        return address

    def opaque(self, n: ir.Value) -> ir.Value:
        """n, of which LLVM does not know how it was computed. Otherwise LLVM would compute each address from
        the one before, or keep an address as two parts and add them at each use."""
        kind = ir.FunctionType(INTP, [INTP])
        return self.builder.asm(kind, "", "=r,0", [n], side_effect=False)

    def load(self, address: ir.Value, align: int = 1) -> ir.Value:
        """The vector at an address that is a multiple of `align`."""
        pointer = self.builder.inttoptr(address, self.vector.as_pointer())
        return self.builder.load(pointer, align=align)

    def store(self, address: ir.Value, x: ir.Value, align: int = 1) -> None:
        """Writes the vector x to an address that is a multiple of `align`."""
        pointer = self.builder.inttoptr(address, self.vector.as_pointer())
        self.builder.store(x, pointer, align=align)

    def load_scalar(self, address: ir.Value) -> ir.Value:
        """The real at an address."""
        return self.builder.load(self.builder.inttoptr(address, self.real.as_pointer()), align=1)

    def prefetch(self, address: ir.Value) -> None:
        """Prefetches the cache line of an address into L2."""
        pointer_type = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer_type, INT32, INT32, INT32])
        prefetch = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        pointer = self.builder.inttoptr(address, pointer_type)
        self.builder.call(prefetch, [pointer, INT32(0), INT32(2), INT32(1)])

    # Arithmetic, lane by lane.

    def splat(self, x: ir.Value) -> ir.Value:
        """The real x in every lane."""
        undefined = ir.Constant(self.vector, ir.Undefined)
        first = self.builder.insert_element(undefined, x, INT32(0))
        return self.builder.shuffle_vector(first, undefined, self.indices([0] * self.lanes))

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
        """a * b + c, rounded once on every host."""
        name = f"llvm.fma.{self.vector_name()}"
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        fma = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(fma, [a, b, c])

    def one_minus_product(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """1 - a * b, rounded once on every host."""
        return self._call_fma(self.builder.fsub(self.constant(-0.0), a), b, self.constant(1.0))

    def maximum(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """The larger lane by lane; b where either is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def least(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)
