"""Operations of compiled code that Python lacks: addresses as pointers, atomic addition, and functions
written as LLVM IR."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fastattn.backends.numba.codegen.emit import INT32, INTP, Emitter


def intrinsic_of(definition: Callable[..., Any], name: str, parameters: Sequence[str]) -> Any:
    """The intrinsic of this name and these parameters that a function (context, *types) defines."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(it, kind) for it in ("context", *parameters)])
    definition.__signature__ = signature  # type: ignore[attr-defined]
    definition.__name__ = name
    return intrinsic(definition)


def stage(returns_bool: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Makes an intrinsic of a function (Emitter, addresses, counts and reals) that writes its body.

    In Numba code it is called with `zero` instead of the Emitter.
    """

    returns = types.boolean if returns_bool else types.void

    def make(write: Callable[..., Any]) -> Any:
        names = list(inspect.signature(write).parameters)[1:]

        def definition(context: Any, zero: Any, *arguments: Any) -> Any:
            kinds = [zero if isinstance(argument, types.Float) else types.intp for argument in arguments]

            def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                function = _function(context, builder.module, write, signature)
                result = builder.call(function, values[1:])
                return context.get_dummy_value() if returns is types.void else result

            return returns(zero, *kinds), codegen

        return intrinsic_of(definition, write.__name__, ["zero", *names])

    return make


def _function(context: Any, module: Any, write: Callable[..., Any], signature: Any) -> Any:
    """What `write` writes, as a function of its own in the module: inlined into the loops of its caller LLVM
    would run out of registers for its addresses, and Numba would compile it again at each level of calls."""
    zero, *kinds = signature.args
    name = f"fastattn.{write.__qualname__}.{zero}"
    if name in module.globals:
        return module.globals[name]
    returned = ir.VoidType() if signature.return_type is types.void else ir.IntType(1)
    kind = ir.FunctionType(returned, [context.get_value_type(it) for it in kinds])
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    result = write(Emitter(builder, zero.bitwidth // 8), *function.args)
    if returned == ir.VoidType():
        builder.ret_void()
    else:
        builder.ret(result)
    return function


# Addresses as pointers of Numba, for plain code.


def _pointer_to(kind: Any) -> Any:
    @intrinsic
    def pointer(context: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.intp), codegen

    return pointer


int64s = _pointer_to(types.int64)
uint32s = _pointer_to(types.uint32)
int32s = _pointer_to(types.int32)
uint8s = _pointer_to(types.uint8)


def record_at(dtype: Any) -> Any:
    """The intrinsic that makes a record of this dtype out of its address."""
    record = numba.from_dtype(dtype)

    @intrinsic
    def record_of(context: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(record))

        return record(types.intp), codegen

    return record_of


@intrinsic
def reals(context: Any, zero: Any, address: Any) -> Any:
    """The dtype's elements at an aligned address."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[1], context.get_value_type(signature.return_type))

    return types.CPointer(zero)(zero, types.intp), codegen


@intrinsic
def load_real(context: Any, zero: Any, address: Any) -> Any:
    """The real at any address."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return Emitter(builder, zero.bitwidth // 8).load_scalar(values[1])

    return zero(zero, types.intp), codegen


@intrinsic
def store_real(context: Any, zero: Any, address: Any, x: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        Emitter(builder, zero.bitwidth // 8).store_scalar(values[1], values[2])
        return context.get_dummy_value()

    return types.void(zero, types.intp, zero), codegen


def _from_bits(kind: Any, bits: Any) -> Any:
    @intrinsic
    def real_of(context: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.bitcast(values[0], context.get_value_type(kind))

        return kind(bits), codegen

    return real_of


bits_to_float32 = _from_bits(types.float32, types.uint32)
bits_to_float64 = _from_bits(types.float64, types.uint64)


def _caller_at(name: str, parameters: Sequence[str]) -> Any:
    """In Numba code: calls a function of integers at the address that is the first argument."""

    def definition(context: Any, address: Any, *arguments: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            kind = ir.FunctionType(INTP, [INTP] * len(parameters))
            return builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])

        return types.intp(types.intp, *[types.intp] * len(parameters)), codegen

    return intrinsic_of(definition, name, ["address", *parameters])


call_work = _caller_at("call_work", ["job", "shares", "thread", "num_threads"])
call_modify = _caller_at(
    "call_modify", ["s", "top", "ld", "n", "stops", "key0", "b", "row_h", "row_i", "aux"]
)


@intrinsic
def fetch_add(context: Any, address: Any, n: Any) -> Any:
    """Adds n to the integer at the address, atomically; its value before."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(values[0], INTP.as_pointer()), values[1], "acq_rel")

    return types.intp(types.intp, types.intp), codegen


# Mask words from arrays of the caller's.


def _dense_word(itemsize: int) -> Any:
    @intrinsic
    def dense_word(context: Any, address: Any) -> Any:
        """Bit j says whether the j-th of 32 integers is not 0."""

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            vector = ir.VectorType(ir.IntType(8 * itemsize), 32)
            x = builder.load(builder.inttoptr(values[0], vector.as_pointer()), align=1)
            return builder.bitcast(builder.icmp_unsigned("!=", x, ir.Constant(vector, None)), INT32)

        return types.uint32(types.intp), codegen

    return dense_word


dense_word_1, dense_word_2, dense_word_4, dense_word_8 = (_dense_word(size) for size in (1, 2, 4, 8))
