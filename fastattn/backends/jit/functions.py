"""The interface: a function, the values that it reads and a dtype give a compiled loop over a tile.

Loops are cached by the function's identity, the types of the values that it reads, the dtype and the kind of
tile; the `MAX_LOOPS` that were used last are kept. Sizes and the contents of arrays are read at each call.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from numba import types
from numba.core.errors import NumbaNotImplementedError

from fastattn._call.arguments import PLAIN_DTYPES, readable
from fastattn._call.problem import Mod
from fastattn._machine import host
from fastattn._machine.device import as_device_array
from fastattn.backends.jit import messages
from fastattn.backends.jit.compiling import compiling
from fastattn.backends.jit.frontend import Typed, typed
from fastattn.backends.jit.identity import Walk, has_loop, identify
from fastattn.backends.jit.loops import Machine, over_lanes, over_mask, over_rows
from fastattn.backends.jit.memory import as_value, kind_of, small_counts, type_key, words_of

if TYPE_CHECKING:
    from array import array

#: Loops that are kept: some 100 KB each, and a quarter of a second to compile again.
MAX_LOOPS = 256

_INDICES = ("b", "h", "q_idx", "kv_idx")
_MASK_DTYPE = np.dtype(np.int64)


class Kept:
    """A cache of the values that were used last (LRU), safe for threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Any, Any] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        """The value of this key, made where it is missing; the first one where several threads make it."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        made = make()
        with self._lock:
            value = self._values.setdefault(key, made)
            while len(self._values) > self._most:
                self._values.popitem(last=False)
            return value


loops = Kept(MAX_LOOPS)


class Loop:
    """A compiled loop, for any function of the same key: what a call reads is given at the call."""

    def __init__(self, kind: str, mod: Mod, dtype: np.dtype, write: Callable[..., Machine]) -> None:
        values = (*mod.aux, *(as_value(value, dtype) for value in mod.captured))
        key = (mod.key, tuple(map(type_key, values)), dtype.char, write)

        def compiled() -> Machine:
            kinds = tuple(map(kind_of, values))
            checks_indices = host.checks_indices()
            with compiling():
                made = _typed(kind, mod.function, len(mod.aux), kinds, dtype, checks_indices)
                known = small_counts(values) if has_loop(mod.function) else {}
                return write(made, kinds, dtype, known)

        self._kind, self._dtype = kind, dtype
        self._machine: Machine = loops.get(key, compiled)
        self.address, self.reads = self._machine.address, self._machine.reads

    def words(self, mod: Mod) -> array[int]:
        """What the loop reads in a call with this function; it holds addresses of arrays, not the arrays."""
        return words_of((*mod.aux, *mod.captured))

    def check(self, bits: int, sizes: Sequence[int], mod: Mod, at: int | None = None) -> None:
        """Raises IndexError for bits that the loop returned or that its marks hold, unless they are 0.

        sizes: B, H, L and S; at: the place of a mark among them.
        """
        if bits:
            where = None if at is None else tuple(map(int, np.unravel_index(at, sizes)))
            raise messages.outside(self._kind, mod.function, mod.aux, self._dtype, sizes, bits, where)


_over_lanes, _over_grouped_lanes = over_lanes(is_grouped=False), over_lanes(is_grouped=True)


def as_mod(function: Callable[..., Any], aux: Sequence[Any]) -> Mod:
    """A function of the caller's with what it reads, now."""
    found = identify(function)
    captured = tuple(_read(value, function, place) for place, value in enumerate(found.captured))
    return Mod(function, tuple(aux), (found.key, tuple(map(type_key, aux))), captured)


def _read(captured: Any, function: Any, place: int) -> Any:
    """What a call reads of a captured array or float; TypeError for arrays that compiled code cannot read."""
    if type(captured) is float:
        return captured
    if type(captured) is not np.ndarray or captured.dtype.char not in PLAIN_DTYPES:
        name = f"{Walk(function).names[place]}, which {messages.name_of(function)} reads,"
        as_device_array(captured, name)
        try:
            numba.from_dtype(captured.dtype.newbyteorder("="))
            is_known = captured.dtype.char != "O"
        except NumbaNotImplementedError:
            is_known = False
        if not is_known:
            raise TypeError(f"{name} must be of bool, integer or float dtype, got dtype {captured.dtype}")
    return readable(captured)


def score_loop(mod: Mod, dtype: np.dtype, uses_split_kv: bool, is_grouped: bool) -> Loop:
    """A score_mod over tiles of scores, with query rows as rows (split-KV) or as lanes, which are of several
    heads if is_grouped; compiled on first use.

    Raises
    ------
    TypeError, ValueError
        The function cannot be compiled, or raises.
    """
    write = over_rows if uses_split_kv else _over_grouped_lanes if is_grouped else _over_lanes
    return Loop("score_mod", mod, dtype, write)


def mask_loop(mod: Mod) -> Loop:
    """A mask_mod over the tiles of a mask map; raises as `score_loop` does."""
    return Loop("mask_mod", mod, _MASK_DTYPE, over_mask)


def check_compiles(kind: str, function: Any, kinds: Sequence[Any], dtype: np.dtype) -> None:
    """TypeError or ValueError where a function cannot be compiled, for backends whose compiler explains
    less."""
    captured = as_mod(function, ()).captured
    all_kinds = (*kinds, *(kind_of(as_value(value, dtype)) for value in captured))
    with compiling():
        _typed(kind, function, len(kinds), all_kinds, dtype, checks_indices=True)


def wrapper(kind: str, function: Any, n_aux: int, n_captured: int = 0, before_aux: str = "") -> FunctionType:
    """A Python function that takes the arguments of compiled loops and calls the caller's function."""
    given: dict[str, Any] = {}
    first: list[str] = []
    last: list[str] = []
    while isinstance(function, partial):
        names = [f"p{len(given) + i}" for i in range(len(function.args))]
        given.update(zip(names, function.args, strict=True))
        first = [*names, *first]
        for keyword, value in function.keywords.items():
            if not any(argument.startswith(f"{keyword}=") for argument in last):
                given[f"k{len(given)}"] = value
                last.append(f"{keyword}=k{len(given) - 1}")
        function = function.func
    score = ["score"] if kind == "score_mod" else []
    aux = [f"a{i}" for i in range(n_aux)]
    arguments = [*first, *score, *_INDICES, *aux]
    if isinstance(function, FunctionType) and function.__code__.co_flags & inspect.CO_VARARGS:
        # Numba does not inline functions of *args: make it an ordinary parameter, which takes a tuple.
        code = function.__code__
        flags, n_named = code.co_flags & ~inspect.CO_VARARGS, code.co_argcount
        code = code.replace(co_argcount=n_named + 1, co_flags=flags)
        function = FunctionType(
            code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        arguments[n_named:] = [f"({''.join(f'{it}, ' for it in arguments[n_named:])})"]
    given["function"] = function
    parameters = [*score, *_INDICES, *([before_aux] if before_aux else []), *aux]
    parameters += [f"c{i}" for i in range(n_captured)]
    source = f"def call({', '.join(parameters)}):\n    return function({', '.join([*arguments, *last])})\n"
    exec(compile(source, messages.WRAPPER, "exec"), given)
    call: FunctionType = given["call"]
    return call


def _typed(
    kind: str, function: Any, n_aux: int, kinds: Sequence[Any], dtype: np.dtype, checks_indices: bool
) -> Typed:
    """The function in its wrapper, typed and lowered for its arguments."""
    messages.check_raises(kind, function)
    captured = identify(function).captured
    score = (numba.from_dtype(dtype),) if kind == "score_mod" else ()
    call = wrapper(kind, function, n_aux, len(captured), "checks")
    arguments = (*score, *[types.intp] * len(_INDICES), types.intp, *kinds)
    first_value = len(arguments) - len(kinds)
    is_weak = dtype == np.float32
    try:
        made = typed(call, arguments, first_value, first_value + n_aux, captured, checks_indices, is_weak)
    except Exception as error:  # Numba's errors have no common base class
        raise TypeError(messages.not_compiled(kind, function, error)) from error
    returned = made.signature.return_type
    wanted = types.Boolean if kind == "mask_mod" else types.Number
    if not isinstance(returned, wanted) or isinstance(returned, types.Complex):
        shown = (*score, *[types.intp] * len(_INDICES), *kinds[:n_aux])
        raise TypeError(messages.wrong_result(kind, function, returned, shown))
    return made
