"""What Numba cannot express: arrays by address, loads of 16 bytes, the hardware's power of two and maximum.

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


@cache
def memory(dtype: str) -> Any:
    """``memory(view)``: the elements in memory from the first one of a view on.

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

    kind = from_dtype(np.dtype(dtype))

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
def vector_fetch(count: int) -> Any:
    """``fetch(array, at, staged, to)``: `count` adjacent elements, at a multiple of 16 bytes, in one load."""
    if config.ENABLE_CUDASIM:

        @cuda.jit(device=True)
        def fetch_each(array, at, staged, to):
            for e in range(count):
                staged[to + e] = array[at + np.uint64(e)]

        return fetch_each

    from numba.cuda import types
    from numba.cuda.extending import intrinsic
    from numba.cuda.np.arrayobj import make_array

    @intrinsic
    def fetch_vector(context, array, at, staged, to):
        def codegen(context, builder, signature, arguments):
            target = make_array(signature.args[2])(context, builder, arguments[2])
            vector = ir.VectorType(context.get_data_type(array.dtype), count)
            first = builder.gep(arguments[0], [arguments[1]])
            loaded = builder.load(builder.bitcast(first, vector.as_pointer()), align=16)
            for e in range(count):
                place = builder.add(arguments[3], ir.Constant(arguments[3].type, e))
                lane = builder.extract_element(loaded, ir.Constant(ir.IntType(32), e))
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
