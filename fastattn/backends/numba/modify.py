"""Functions of the user's, compiled into loops over tiles: `score_mod` over scores, `mask_mod` over mask
bits.

A compiled loop is remembered for the function, the types of what it reads and the dtype. Functions are the
same if their code is and what they use from outside: that is compiled in, while `aux` is read from memory at
each call.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dis import get_instructions
from itertools import product
from types import CellType, CodeType, FunctionType
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.dispatcher import Dispatcher
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

from fastattn._constants import SCORE_KEYS
from fastattn._mask_map import TILE_K, WORDS
from fastattn._problem import Mod
from fastattn.backends.numba.codegen import vector_math
from fastattn.backends.numba.codegen.calls import OPTIONS, compile_function
from fastattn.backends.numba.codegen.intrinsics import (
    dense_word_1,
    int64s,
    prefer_whole_vectors,
    reals,
    uint8s,
    uint32s,
)
from fastattn.backends.numba.codegen.register_tiles import LANE_BYTES, raise_top
from fastattn.backends.numba.codegen.weak_numbers import WeakNumbers

#: Of a user's arithmetic: a product may be rounded with a sum, and a division may be a product.
FASTMATH = {"contract", "arcp"}

_MAX_CHECKED = 1024
_checked: set[Any] = set()
_compiled: dict[Any, Any] = {}


def aux_words(aux: Sequence[Any]) -> np.ndarray:
    """What compiled code reads `aux` from: of an array the address, the shape and the strides, of a number
    itself."""
    words: list[int] = []
    for value in aux:
        if isinstance(value, np.ndarray):
            words += [value.ctypes.data, *value.shape, *value.strides]
        else:
            wide = np.float64(value) if value.dtype.kind == "f" else np.int64(value)
            words.append(int(wide.view(np.int64)))
    return np.array(words or [0], dtype=np.int64)


def score_loop(mod: Mod, dtype: np.dtype, uses_split_kv: bool, is_grouped: bool) -> int:
    """The address of a score_mod over tiles of scores, by rows or by lanes of rows, which are of several
    heads if is_grouped; compiled if it was not yet.

    Raises
    ------
    TypeError, ValueError
        The function cannot be compiled, or raises.
    """
    define = _score_rows if uses_split_kv else _score_grouped_lanes if is_grouped else _score_lanes
    return _address("score_mod", mod.function, mod.aux, dtype, define)


def mask_loop(function: Callable[..., Any], aux: Sequence[Any]) -> int:
    """The address of a mask_mod over the rows of one tile of the mask; raises as `score_loop` does."""
    return _address("mask_mod", function, aux, np.dtype(np.int64), _mask_rows)


def _address(kind: str, function: Any, aux: Sequence[Any], dtype: np.dtype, define: Any) -> int:
    kinds = tuple(kind_of(value) for value in aux)
    key = (kind, identity(function), kinds, dtype.char, define)
    found = _compiled.get(key)
    if found is None:
        # The first of several threads is kept: its address may be in use.
        found = _compiled.setdefault(key, _compile(kind, function, kinds, dtype, define))
    return int(found.address)


def kind_of(value: Any) -> Any:
    """The type that a value of `aux` has in compiled code."""
    if not value.ndim:
        return numba.from_dtype(value.dtype)
    layout = "C" if isinstance(value, np.ndarray) and value.flags.c_contiguous else "A"
    return types.Array(numba.from_dtype(value.dtype), value.ndim, layout, readonly=True)


class _Same:
    """Equal to itself: an object by which it is, kept alive so that no other takes its place."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def identity(function: Any) -> Any:
    """Equal for functions that do the same: of one code, with equal values from outside."""
    plain = function.py_func if isinstance(function, Dispatcher) else function
    code = getattr(plain, "__code__", None)
    if not isinstance(code, CodeType):
        return function
    cells = [*(cell.cell_contents for cell in plain.__closure__ or ()), *(plain.__defaults__ or ())]
    outside = [plain.__globals__.get(name) for name in code.co_names]
    found = (isinstance(function, Dispatcher), code, *cells, *outside)
    try:
        hash(found)
    except TypeError:
        # Something that may change, an array say, is told apart by which one it is.
        return (found[0], code, *map(_Same, (*cells, *outside)))
    # 1 and 1.0 and True are equal, and of different types.
    return (*found, *map(type, found))


def _compile(kind: str, function: Any, kinds: tuple[Any, ...], dtype: np.dtype, define: Any) -> Any:
    called = typed(kind, function, kinds, dtype)
    loop = define(called, _reader(kinds), dtype.type(0))
    n_arguments = len(inspect.signature(loop).parameters)
    return compile_function(loop, types.intp(*[types.intp] * n_arguments), keep=False)


def typed(kind: str, function: Any, kinds: tuple[Any, ...], dtype: np.dtype, **options: Any) -> Any:
    """The function as one of Numba's, compiled for its arguments, which says what it returns."""
    _check_raises(kind, function, function)
    called = _as_numba(function, dtype, **options)
    score = (numba.from_dtype(dtype),) if kind == "score_mod" else ()
    signature = (*score, *[types.intp] * 4, *kinds)
    try:
        called.get_call_template(signature, {})  # compiles, with default arguments and all
    except Exception as error:  # Numba has more kinds of them than a common base
        raise TypeError(_in_three_lines(kind, function, error)) from error
    returned = called.nopython_signatures[-1].return_type
    wanted = types.Boolean if kind == "mask_mod" else types.Number
    if not isinstance(returned, wanted) or isinstance(returned, types.Complex):
        promised = "a bool" if kind == "mask_mod" else "one real number"
        raise TypeError(
            f"{kind} {_name(function)} must return {promised}, and returns {returned}\n"
            f"for arguments of the types {', '.join(map(str, signature))}\nat {_place(function)}"
        )
    return called


def check_indices(
    kind: str, function: Any, aux: Sequence[Any], dtype: np.dtype, sizes: Sequence[int]
) -> None:
    """Calls the function for the first and the last of each index, with every index into `aux` checked.

    In compiled loops they are not: what lies outside of an array would be read. Once for each function and
    sizes.

    Raises
    ------
    ValueError
        An index is outside, or something else went wrong.
    """
    if not aux or 0 in sizes:
        return
    shapes = tuple(value.shape for value in aux)
    kinds = tuple(kind_of(value) for value in aux)
    key = (kind, identity(function), kinds, dtype.char, shapes, *sizes)
    if key in _checked:
        return
    called = typed(kind, function, kinds, dtype, boundscheck=True)
    first = (dtype.type(0),) if kind == "score_mod" else ()
    values = [value if not isinstance(value, np.ndarray) else _read_only(value) for value in aux]
    for indices in product(*[sorted({0, n - 1}) for n in sizes]):
        try:
            called(*first, *indices, *values)
        except Exception as error:
            raise ValueError(
                f"{kind} {_name(function)} fails for (b, h, q_idx, kv_idx) = {indices}\n"
                f"at {_place(function)}:\n{type(error).__name__}: {error}"
            ) from error
    if len(_checked) >= _MAX_CHECKED:
        _checked.clear()
    _checked.add(key)


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def _check_raises(kind: str, function: Any, part: Any) -> None:
    """Compiled loops have nowhere to raise to. `part` is the function, or one of Numba's that it calls."""
    plain = getattr(part, "py_func", part)
    if not isinstance(plain, FunctionType):
        return
    for instruction in get_instructions(plain):
        if instruction.opname == "RAISE_VARARGS":
            line = getattr(instruction.positions, "lineno", None) or plain.__code__.co_firstlineno
            raise ValueError(
                f"{kind} {_name(function)} may raise, and there is nobody to raise to\n"
                f"at {plain.__code__.co_filename}, line {line}:\nreturn -inf or False where nothing is read"
            )
    for name in plain.__code__.co_names:
        called = plain.__globals__.get(name)
        if isinstance(called, Dispatcher) and called is not part:
            _check_raises(kind, function, called)


def _as_numba(function: Any, dtype: np.dtype, **options: Any) -> Any:
    """The function as one of Numba's. A plain one finds `math` and `numpy` functions that LLVM can vectorise,
    and its numbers are of the dtype of the scores."""
    if isinstance(function, Dispatcher):
        if not options:
            return function
        return numba.njit(**{**function.targetoptions, **options})(function.py_func)
    if not isinstance(function, FunctionType):
        function = function.__call__
    names = {
        name: vector_math.instead_of(value) for name, value in function.__globals__.items()
        if name in function.__code__.co_names
    }  # fmt: skip
    cells = tuple(CellType(vector_math.instead_of(cell.cell_contents)) for cell in function.__closure__ or ())
    copied = FunctionType(
        function.__code__, function.__globals__ | names, function.__name__, function.__defaults__, cells
    )
    special = {"pipeline_class": WeakNumbers} if dtype == np.float32 else {}
    return numba.njit(**{**OPTIONS, "fastmath": FASTMATH, **special, **options})(copied)


def _score_lanes(function: Any, read: Any, zero: Any) -> Callable[..., int]:
    """Where each query head has keys of its own: the lanes are rows that follow each other, of one head."""
    real, size = type(zero), zero.itemsize
    raise_tops = _raising_tops(zero)

    def modify(s, top, ld, n_vectors, stops, key0, b, row_h, row_i, aux):
        """The scores of one tile with rows as lanes; `top` takes them in."""
        prefer_whole_vectors()
        values, ends, lanes, first = read(aux), int64s(stops), ld // n_vectors, 0
        # Lanes past the last row repeat it.
        h, row, last = int64s(row_h)[0], int64s(row_i)[0], int64s(row_i)[ld - 1]
        n_keys = ends[n_vectors - 1]
        for j0 in range(0, n_keys, SCORE_KEYS):
            stop = min(n_keys, j0 + SCORE_KEYS)
            for j in range(j0, stop):
                while ends[first] <= j:
                    first += 1
                line, key = reals(zero, s + j * ld * size), key0 + j
                for lane in range(first * lanes, ld):
                    line[lane] = real(function(line[lane], b, h, min(row + lane, last), key, *values))
            raise_tops(s, top, ld, n_vectors, ends, j0, stop)
        return 0

    return modify


def _score_grouped_lanes(function: Any, read: Any, zero: Any) -> Callable[..., int]:
    """Where several query heads share their keys."""
    real, size = type(zero), zero.itemsize
    raise_tops = _raising_tops(zero)

    def modify(s, top, ld, n_vectors, stops, key0, b, row_h, row_i, aux):
        """The scores of one tile with rows as lanes; `top` takes them in."""
        prefer_whole_vectors()
        heads, rows, values = int64s(row_h), int64s(row_i), read(aux)
        ends, lanes, first = int64s(stops), ld // n_vectors, 0
        n_keys = ends[n_vectors - 1]
        for j0 in range(0, n_keys, SCORE_KEYS):
            stop = min(n_keys, j0 + SCORE_KEYS)
            for j in range(j0, stop):
                while ends[first] <= j:
                    first += 1
                line, key = reals(zero, s + j * ld * size), key0 + j
                for lane in range(first * lanes, ld):
                    line[lane] = real(function(line[lane], b, heads[lane], rows[lane], key, *values))
            raise_tops(s, top, ld, n_vectors, ends, j0, stop)
        return 0

    return modify


def _raising_tops(zero: Any) -> Any:
    """Has `top` take in the scores of some keys while they are in the cache. Among the user's operations a
    second array would have to be told apart from the scores."""
    size = zero.itemsize

    @numba.njit(**OPTIONS)
    def raise_tops(s, top, ld, n_vectors, ends, start, stop):
        for i in range(n_vectors):
            at = s + start * ld * size + i * LANE_BYTES
            raise_top(zero, at, top + i * LANE_BYTES, ld, min(ends[i], stop) - start)

    return raise_tops


def _score_rows(function: Any, read: Any, zero: Any) -> Callable[..., int]:
    real, size = type(zero), zero.itemsize

    def modify(s, top, ld, n_rows, n_keys, key0, b, row_h, row_i, aux):
        """The scores of a row tile."""
        prefer_whole_vectors()
        values, heads, rows = read(aux), int64s(row_h), int64s(row_i)
        for r in range(n_rows):
            scores, h, i = reals(zero, s + r * ld * size), heads[r], rows[r]
            for j in range(n_keys):
                scores[j] = real(function(scores[j], b, h, i, key0 + j, *values))
        return 0

    return modify


def _mask_rows(function: Any, read: Any, zero: Any) -> Callable[..., int]:
    def allowed(words, flags, b, h, row0, n_rows, key0, n_keys, aux):
        """The bits of one tile of the mask; those past its keys are 0. `flags` has room for TILE_K bytes."""
        prefer_whole_vectors()
        values, flag, bits = read(aux), uint8s(flags), uint32s(words)
        for j in range(n_keys, TILE_K):
            flag[j] = 0
        for r in range(n_rows):
            for j in range(n_keys):
                flag[j] = 1 if function(b, h, row0 + r, key0 + j, *values) else 0
            for word in range(WORDS):
                bits[r * WORDS + word] = dense_word_1(flags + 32 * word)
        return 0

    return allowed


def _reader(kinds: tuple[Any, ...]) -> Any:
    """In compiled code: `aux` out of `aux_words` at an address."""
    together = types.Tuple(kinds)

    @intrinsic
    def read(context: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            word = ir.IntType(64)
            at = builder.inttoptr(arguments[0], word.as_pointer())
            place = 0

            def take() -> Any:
                nonlocal place
                place += 1
                return builder.load(builder.gep(at, [word(place - 1)]))

            values = []
            for kind in kinds:
                first = take()
                if isinstance(kind, types.Array):
                    shape = [take() for _ in range(kind.ndim)]
                    strides = [take() for _ in range(kind.ndim)]
                    array = make_array(kind)(context, builder)
                    pointer = builder.inttoptr(first, context.get_data_type(kind.dtype).as_pointer())
                    itemsize = context.get_abi_sizeof(context.get_data_type(kind.dtype))
                    populate_array(
                        array,
                        pointer,
                        cgutils.pack_array(builder, shape, word),
                        cgutils.pack_array(builder, strides, word),
                        context.get_constant(types.intp, itemsize),
                        None,
                    )
                    values.append(array._getvalue())
                elif isinstance(kind, types.Float):
                    wide = builder.bitcast(first, ir.DoubleType())
                    values.append(context.cast(builder, wide, types.float64, kind))
                else:
                    values.append(context.cast(builder, first, types.int64, kind))
            return context.make_tuple(builder, together, values)

        return together(types.intp), codegen

    return read


# What is said of functions that do not compile.


def _name(function: Any) -> str:
    return repr(getattr(function, "__name__", type(function).__name__))


def _place(function: Any) -> str:
    code = getattr(getattr(function, "py_func", function), "__code__", None)
    return "an unknown place" if code is None else f"{code.co_filename}, line {code.co_firstlineno}"


def _in_three_lines(kind: str, function: Any, error: Exception) -> str:
    """Which function, where, and what Numba objected; the whole of that is chained to it."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    about = [line for line in lines if not line.startswith(("Failed in", "During:", "File ", "<source", "^"))]
    objected = " ".join([*about[:1], *[line for line in about[1:4] if line.startswith(">>>")]])
    named = re.search(r'File "(.*?)", line (\d+)', text)
    place = f"{named[1]}, line {named[2]}" if named else _place(function)
    return (
        f"{kind} {_name(function)} cannot be compiled, see above for all that Numba says\n"
        f"at {place}:\n{objected}"
    )
