"""What Numba cannot express: arrays by address, loads of whole spans, bfloat16, tensor cores, and the
hardware's power of two and maximum.

In the simulator each is a Python function with the same result. Modules that only numba-cuda has are imported
inside functions, as Numba's own CUDA target takes its place where it is not installed.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, cuda

U = np.uint64

#: What bfloat16 is in kernels: its bits, which are the upper half of a float32.
BITS = {"bfloat16": "uint16"}


@cache
def memory(dtype: str) -> Any:
    """``memory(view)``: the elements in memory from the first one of a view on, of bfloat16 the bits.

    `read_as` and `write_as` convert them.

    A Numba array would be seven arguments of a kernel, each of which takes time at every launch.
    """
    if config.ENABLE_CUDASIM:

        @cuda.jit(device=True)
        def simulated_memory(view):
            return view[0]

        return simulated_memory

    from numba.cuda import types
    from numba.cuda.extending import intrinsic
    from numba.cuda.np.numpy_support import from_dtype

    kind = from_dtype(np.dtype(BITS.get(dtype, dtype)))

    @intrinsic
    def pointer(context, address):
        def codegen(context, builder, signature, arguments):
            stored = context.get_data_type(kind)
            on_device = builder.inttoptr(arguments[0], ir.PointerType(stored, addrspace=1))
            return builder.addrspacecast(on_device, stored.as_pointer())

        return types.CPointer(kind)(address), codegen

    @cuda.jit(device=True)
    def memory(view):
        return pointer(view[0])

    return memory


@cache
def read_as(dtype: str, stored: str) -> Any:
    """``read(array, at)``: an element of `memory(stored)`, converted to `dtype`."""
    real = np.dtype(dtype).type
    if stored != "bfloat16":

        @cuda.jit(device=True)
        def read(array, at):
            return real(array[at])

        return read
    from_bits = same_bits("uint32", "float32")

    @cuda.jit(device=True)
    def read_bfloat16(array, at):
        return real(from_bits(np.uint32(U(array[at]) << U(16))))

    return read_bfloat16


@cache
def write_as(stored: str) -> Any:
    """``write(array, at, x)``: sets an element of `memory(stored)` to x, rounded to nearest, ties to even."""
    if stored != "bfloat16":
        kind = np.dtype(stored).type

        @cuda.jit(device=True)
        def write(array, at, x):
            array[at] = kind(x)

        return write
    to_bits = same_bits("float32", "uint32")

    @cuda.jit(device=True)
    def write_bfloat16(array, at, x):
        bits = U(to_bits(np.float32(x)))
        if x == x:
            bits += U(0x7FFF) + (bits >> U(16) & U(1))
        else:
            bits |= U(0x400000)  # quiet: the lower half may be all that makes it a NaN
        array[at] = np.uint16(bits >> U(16))

    return write_bfloat16


@cache
def same_bits(dtype: str, other: str) -> Any:
    """``same_bits(x)``: the number of the other dtype, of the same size, with the bits of x."""
    if config.ENABLE_CUDASIM:

        @cuda.jit(device=True)
        def same_bits_in_python(x):
            return np.dtype(dtype).type(x).view(other)

        return same_bits_in_python

    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    result = getattr(types, other)

    @intrinsic
    def same_bits(context, x):
        def codegen(context, builder, signature, arguments):
            return builder.bitcast(arguments[0], context.get_value_type(result))

        return result(x), codegen

    return same_bits


@cache
def vector_fetch(count: int, dtype: str, stored: str) -> Any:
    """``fetch(array, at, staged, to)``: `count` adjacent elements, at a multiple of their bytes, in one load,
    converted as by `read_as`."""
    if config.ENABLE_CUDASIM:
        read = read_as(dtype, stored)

        @cuda.jit(device=True)
        def fetch_each(array, at, staged, to):
            for e in range(count):
                staged[to + e] = read(array, at + U(e))

        return fetch_each

    from numba.cuda import types
    from numba.cuda.extending import intrinsic
    from numba.cuda.np.arrayobj import make_array

    nbytes = count * np.dtype(BITS.get(stored, stored)).itemsize

    @intrinsic
    def fetch_vector(context, array, at, staged, to):
        def codegen(context, builder, signature, arguments):
            target = make_array(signature.args[2])(context, builder, arguments[2])
            vector = ir.VectorType(context.get_data_type(array.dtype), count)
            first = builder.gep(arguments[0], [arguments[1]])
            loaded = builder.load(builder.bitcast(first, vector.as_pointer()), align=nbytes)
            for e in range(count):
                place = builder.add(arguments[3], ir.Constant(arguments[3].type, e))
                lane = builder.extract_element(loaded, ir.Constant(ir.IntType(32), e))
                kind = array.dtype
                if stored == "bfloat16":
                    bits = builder.shl(builder.zext(lane, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
                    lane, kind = builder.bitcast(bits, ir.FloatType()), types.float32
                lane = context.cast(builder, lane, kind, staged.dtype)
                builder.store(lane, builder.gep(target.data, [place]))
            return context.get_dummy_value()

        return types.void(array, at, staged, to), codegen

    return fetch_vector


@cache
def power_of_two(dtype: str) -> Any:
    """``exp2(x)``. In float32 it is the hardware's, exact to 2 ULP. It is 0 below the normal numbers,
    which is negligible beside the weight 1 that each row has."""
    real = np.dtype(dtype).type
    if config.ENABLE_CUDASIM or dtype == "float64":

        @cuda.jit(device=True)
        def exp2(x):
            return real(math.exp2(x))

        return exp2
    return _one_call("llvm.nvvm.ex2.approx.ftz.f", 1)


@cache
def larger(dtype: str) -> Any:
    """``larger(x, y)``, which ignores a NaN."""
    if config.ENABLE_CUDASIM:

        @cuda.jit(device=True)
        def larger_in_python(x, y):
            return y if y > x or x != x else x

        return larger_in_python
    return _one_call("llvm.nvvm.fmax.f" if dtype == "float32" else "llvm.nvvm.fmax.d", 2)


@cache
def to_tf32() -> Any:
    """``to_tf32(x)``: x rounded to TF32, 11 bits, ties away from zero. Nonfinite numbers and the largest ones
    become any."""
    if config.ENABLE_CUDASIM:

        @cuda.jit(device=True)
        def to_tf32_in_python(x):
            bits = np.float32(x).view(np.uint32)
            return np.uint32(int(bits) + 0x1000 & 0xFFFFE000).view(np.float32)

        return to_tf32_in_python

    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    @intrinsic
    def to_tf32(context, x):
        def codegen(context, builder, signature, arguments):
            word = ir.IntType(32)
            bits = builder.bitcast(arguments[0], word)
            bits = builder.and_(builder.add(bits, word(0x1000)), word(0xFFFFE000))
            return builder.bitcast(bits, ir.FloatType())

        return types.float32(x), codegen

    return to_tf32


@cache
def round_pair(kind: str) -> Any:
    """``pair(x, y)``: both rounded to a 16-bit type, in the bits of a float32, x in the lower ones."""
    if config.ENABLE_CUDASIM:
        write = write_as(kind)

        @cuda.jit(device=True)
        def round_in_python(x, y):
            halves = np.empty(2, BITS.get(kind, kind))
            write(halves, 0, x)
            write(halves, 1, y)
            return halves.view(np.float32)[0]

        return round_in_python

    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    code = {"float16": "cvt.rn.f16x2.f32 $0, $2, $1;", "bfloat16": "cvt.rn.bf16x2.f32 $0, $2, $1;"}[kind]

    @intrinsic
    def pair(context, x, y):
        def codegen(context, builder, signature, arguments):
            word, real = ir.IntType(32), ir.FloatType()
            made = builder.call(ir.InlineAsm(ir.FunctionType(word, [real] * 2), code, "=r,f,f"), arguments)
            return builder.bitcast(made, real)

        return types.float32(x, y), codegen

    return pair


@cache
def load_tiles() -> Any:
    """``load(shared, at)``: of four tiles of 8 keys and 8 columns of values in 16 bits, the pairs of two keys
    that the second argument of a product by a warp has: `ldmatrix` of PTX. Thread n gives the place in shared
    memory, a multiple of 16 bytes, of row n % 8 of tile n / 8. In the simulator a block is a warp."""
    if config.ENABLE_CUDASIM:

        @cuda.jit(device=True)
        def load_in_python(shared, at):
            places = cuda.shared.array(32, np.int64)
            lane = cuda.threadIdx.x
            places[lane] = at
            cuda.syncthreads()
            row, column = 2 * (lane % 4), lane // 4
            loaded = []
            for tile in range(4):
                keys = [np.asarray(shared[places[8 * tile + n] + column // 2]) for n in (row, row + 1)]
                pair = np.array([key.reshape(1).view(np.uint16)[column % 2] for key in keys])
                loaded.append(pair.view(np.float32)[0])
            cuda.syncthreads()
            return tuple(loaded)

        return load_in_python

    from numba.cuda import types
    from numba.cuda.extending import intrinsic
    from numba.cuda.np.arrayobj import make_array

    four = types.UniTuple(types.float32, 4)

    @intrinsic
    def load(context, shared, at):
        def codegen(context, builder, signature, arguments):
            word, real = ir.IntType(32), ir.FloatType()
            array = make_array(signature.args[0])(context, builder, arguments[0])
            place = builder.gep(array.data, [arguments[1]])
            place = builder.ptrtoint(builder.addrspacecast(place, real.as_pointer(3)), word)
            function = ir.FunctionType(ir.LiteralStructType([word] * 4), [word])
            code = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];"
            asm = ir.InlineAsm(function, code, "=r,=r,=r,=r,r,~{memory}", side_effect=True)
            loaded = builder.call(asm, [place])
            numbers = [builder.bitcast(builder.extract_value(loaded, n), real) for n in range(4)]
            return context.make_tuple(builder, four, numbers)

        return four(shared, at), codegen

    return load


#: A warp's products in PTX.
TILES = {"tf32": "m16n8k8.row.col.f32.tf32.tf32", "float16": "m16n8k16.row.col.f32.f16.f16"}
TILES["bfloat16"] = TILES["float16"].replace("f16", "bf16")


@cache
def multiply_tile(kind: str) -> Any:
    """``multiply(sums, a0, a1, a2, a3, b0, b1)``: a warp's tile of sums with products added, `mma` of PTX,
    which says which number each argument is. kind: TF32, or the type of pairs that take the place of numbers.
    In the simulator a block is a warp."""
    if config.ENABLE_CUDASIM:

        @cuda.jit(device=True)
        def multiply_in_python(sums, *numbers):
            given = cuda.shared.array((32, 6), np.float32)
            lane = cuda.threadIdx.x
            for n, x in enumerate(numbers):
                given[lane, n] = x
            cuda.syncthreads()
            y, x = lane // 4, lane % 4
            new = []
            for n, so_far in enumerate(sums):
                row, column, one = y, 2 * x + n % 2, float(so_far)
                for k in range(8):
                    left = given[4 * row + k % 4, 2 * (k // 4) + n // 2]
                    right = given[4 * column + k % 4, 4 + k // 4]
                    one += np.dot(_multiplied(kind, left), _multiplied(kind, right))
                rounded = np.float32(one)
                is_larger = abs(one) < abs(rounded) < math.inf  # sums are truncated
                new.append(np.nextafter(rounded, np.float32(0)) if is_larger else rounded)
            cuda.syncthreads()
            return tuple(new)

        return multiply_in_python

    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    four, tile = types.UniTuple(types.float32, 4), TILES[kind]

    @intrinsic
    def multiply(context, sums, a0, a1, a2, a3, b0, b1):
        def codegen(context, builder, signature, arguments):
            word, real = ir.IntType(32), ir.FloatType()
            function = ir.FunctionType(ir.LiteralStructType([real] * 4), [word] * 6 + [real] * 4)
            code = (
                f"mma.sync.aligned.{tile}.f32 "
                "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
            )
            constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
            numbers = [builder.bitcast(x, word) for x in arguments[1:]]
            so_far = [builder.extract_value(arguments[0], n) for n in range(4)]
            made = builder.call(ir.InlineAsm(function, code, constraints), numbers + so_far)
            return context.make_tuple(builder, four, [builder.extract_value(made, n) for n in range(4)])

        return four(four, *[types.float32] * 6), codegen

    return multiply


def _multiplied(kind: str, x: np.float32) -> np.ndarray:
    """The numbers that an argument is to tensor cores, which of TF32 do not look at the lower 13 bits."""
    bits = np.float32(x).view(np.uint32)
    if kind == "tf32":
        return np.array([bits & np.uint32(0xFFFFE000)]).view(np.float32).astype(np.float64)
    if kind == "float16":
        return np.array([bits]).view(np.float16).astype(np.float64)
    return np.array([bits << np.uint32(16), bits & np.uint32(0xFFFF0000)]).view(np.float32).astype(np.float64)


def _one_call(name: str, n_arguments: int) -> Any:
    """An intrinsic of LLVM's on numbers of one type."""
    from numba.cuda.extending import intrinsic

    def typed(x, *others):
        def codegen(context, builder, signature, arguments):
            real = context.get_data_type(x)
            declared = builder.module.globals.get(name)
            if declared is None:
                declared = ir.Function(builder.module, ir.FunctionType(real, [real] * n_arguments), name)
            return builder.call(declared, arguments)

        return x(x, *others), codegen

    if n_arguments == 1:
        return intrinsic(lambda context, x: typed(x))
    return intrinsic(lambda context, x, y: typed(x, y))
