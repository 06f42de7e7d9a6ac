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
from fastattn.backends.cpu.record import address_of
from fastattn.backends.jit import messages
from fastattn.backends.jit.compiling import compiling
from fastattn.backends.jit.frontend import Typed, typed
from fastattn.backends.jit.identity import Walk, has_loop, identify
from fastattn.backends.jit.loops import Machine, over_aux, over_lanes, over_mask, over_rows, over_slopes
from fastattn.backends.jit.memory import as_value, kind_of, small_counts, type_key, words_of
from fastattn.backends.jit.pairs import Pair, plain_of, tracked

if TYPE_CHECKING:
    from array import array

    from fastattn._call.gradients import Backward

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
    """A compiled loop, for any function of the same key: what a call reads is given at the call.

    wrt: what its derivative is compiled for, ``"score"``, ``"aux"`` or nothing.
    """

    def __init__(
        self, kind: str, mod: Mod, dtype: np.dtype, write: Callable[..., Machine], wrt: str = ""
    ) -> None:
        values = (*mod.aux, *(as_value(value, dtype) for value in mod.captured))
        key = (mod.key, tuple(map(type_key, values)), dtype.char, write, wrt)

        def compiled() -> Machine:
            kinds = list(map(kind_of, values))
            given = list(kinds)
            if wrt == "aux":
                for i, value in enumerate(mod.aux):
                    if is_floating(value):
                        given[i] = tracked(kinds[i], i)
                        kinds[i] = given[i] if value.ndim else kinds[i]
            checks_indices = host.checks_indices()
            with compiling():
                made = _typed(kind, mod.function, len(mod.aux), given, dtype, checks_indices, wrt)
                known = small_counts(values) if has_loop(mod.function) and wrt != "aux" else {}
                return write(made, tuple(kinds), dtype, known)

        self._kind, self._dtype = kind, dtype
        self._machine: Machine = loops.get(key, compiled)
        self.address, self.reads = self._machine.address, self._machine.reads
        self.indices = self._machine.indices

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


_over_slopes = {is_grouped: over_slopes(is_grouped) for is_grouped in (False, True)}

#: The most float64 numbers of all partial sums of the gradients of `aux`, and the most partial sums.
MAX_SUMS, MAX_PARTIAL_SUMS = 1 << 22, 64


class GradientLoops:
    """The loops of a call for gradients, and the sums of the gradients of `aux`.

    Task t adds to the partial sum t % n_partial of them, after task t - n_partial. Their number depends on
    the problem alone, and so does the order in which everything is added up.

    An array of which each score reads an element of its own, as of a bias, has no sums: the gradients are
    stored, and no task waits for another.
    """

    def __init__(self, backward: Backward, n_tasks: int, lanes: int) -> None:
        problem = backward.problem
        mod: Any = problem.score_mod
        dtype, is_grouped, wrt = problem.dtype, problem.group_size > 1, backward.wrt
        self._sizes = (problem.batch, problem.num_heads, problem.len_q, problem.len_k)
        self._mod, self._slope_mod, self._backward = mod, backward.score_grad or mod, backward
        self._score = score_loop(mod, dtype, is_grouped, lanes)
        self.score, self.aux = self._score.address, self._score.words(mod)
        self.slope = self.of_aux = 0  #: addresses of loops; 0: nobody asks
        self.aux_of_slope = self.aux_of_aux = self.aux
        self.sums: np.ndarray | None = None
        self.turns: np.ndarray | None = None
        self._summed: list[np.ndarray | None] = []  #: what `finish` fills
        self.max_threads = max(n_tasks, 1)  #: more would wait for one another
        if wrt & {"query", "key"}:
            kind, of = ("score_mod", "score") if backward.score_grad is None else ("score_grad", "")
            self._slope = Loop(kind, self._slope_mod, dtype, _over_slopes[is_grouped], of)
            self.slope, self.aux_of_slope = self._slope.address, self._slope.words(self._slope_mod)
        if "aux" in wrt:
            # The place of an element is told by its address.
            aux = tuple(np.ascontiguousarray(x) if x.ndim and is_floating(x) else x for x in mod.aux)
            self._kept = mod._replace(aux=aux)
            self._of_aux = Loop("score_mod", self._kept, dtype, over_aux, "aux")
            self.of_aux, self.aux_of_aux = self._of_aux.address, self._of_aux.words(self._kept)
            self._make_sums(n_tasks)

    def _make_sums(self, n_tasks: int) -> None:
        """Adds to `aux_of_aux` where the gradients of each of `aux` are added up, or stored as they are."""
        n_sums = 0
        for number, (x, room) in enumerate(zip(self._kept.aux, self._backward.grad_aux, strict=True)):
            base, own = self._kept_address(x), 0
            if room is not None and self._is_own(number, room.dtype):
                room[...] = 0  # a first attempt, with an lse that is not exact enough, may have written
                own = address_of(room)
            self.aux_of_aux.extend((base, x.itemsize.bit_length() - 1 if base else 0, n_sums, own))
            self._summed.append(None if own else room)
            n_sums += 0 if self._summed[-1] is None else x.size
        n_partial = max(1, min(n_tasks, MAX_PARTIAL_SUMS, max(2, MAX_SUMS // max(n_sums, 1))))
        if n_sums:
            self.turns, self.max_threads = np.zeros(n_partial, np.int64), n_partial
        # Whole cache lines, which no two threads share but the first and the last.
        self.sums = np.zeros((n_partial, -(-n_sums // 8) * 8 + 8))

    def _is_own(self, number: int, dtype: np.dtype) -> bool:
        """Whether each score reads an element of its own, once, and this is the dtype of its gradient."""
        x, function = self._kept.aux[number], self._mod.function
        names = {name for name, size in zip(_INDICES, self._sizes, strict=True) if size > 1}
        indices = self._of_aux.indices.get(f"a{number}", ())
        is_element = 0 < x.ndim == len(indices) and {"", *_INDICES}.issuperset(indices)
        return is_element and names.issubset(indices) and x.dtype == dtype and not has_loop(function)

    @staticmethod
    def _kept_address(x: Any) -> int:
        return address_of(x) if x.ndim and x.size else 0

    def finish(self, outside: int, at: int, outside_of_slope: int) -> None:
        """Fills the gradients of `aux`; raises IndexError for bits that the loops left."""
        self._score.check(outside, self._sizes, self._mod, at)
        if self.slope:
            self._slope.check(outside_of_slope, self._sizes, self._slope_mod)
        if self.sums is not None:
            first = 0
            for room in self._summed:
                if room is not None:
                    sums = self.sums[:, first : first + room.size].reshape(len(self.sums), *room.shape)
                    with np.errstate(over="ignore"):
                        # Two need no memory for their total, which may be as large as all else together.
                        if len(sums) == 2:
                            np.add(sums[0], sums[1], out=room, casting="same_kind")
                        else:
                            room[...] = np.add.reduce(sums, axis=0)
                    first += room.size


def is_floating(value: Any) -> bool:
    """Whether there is a gradient with respect to a value of `aux`."""
    return value.dtype.kind == "f"


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


def score_loop(mod: Mod, dtype: np.dtype, is_grouped: bool, lanes: int) -> Loop:
    """A score_mod over tiles of scores, with query rows as lanes, so many to a vector, which are of several
    heads if is_grouped; or as rows (split-KV), where lanes is 0. Compiled on first use.

    Raises
    ------
    TypeError, ValueError
        The function cannot be compiled, or raises.
    """
    write = over_lanes(is_grouped, lanes) if lanes else over_rows
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
    score = [] if kind == "mask_mod" else ["score"]
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
    kind: str,
    function: Any,
    n_aux: int,
    kinds: Sequence[Any],
    dtype: np.dtype,
    checks_indices: bool,
    wrt: str = "",
) -> Typed:
    """The function in its wrapper, typed and lowered for its arguments; wrt: see `Loop`."""
    messages.check_raises(kind, function)
    captured = identify(function).captured
    real = numba.from_dtype(dtype)
    score = () if kind == "mask_mod" else (Pair(real),) if wrt == "score" else (real,)
    call = wrapper(kind, function, n_aux, len(captured), "checks")
    arguments = (*score, *[types.intp] * len(_INDICES), types.intp, *kinds)
    first_value = len(arguments) - len(kinds)
    is_weak = dtype == np.float32
    try:
        made = typed(
            call, arguments, first_value, first_value + n_aux, captured, checks_indices, is_weak, bool(wrt)
        )
    except Exception as error:  # Numba's errors have no common base class
        raise TypeError(messages.not_compiled(kind, function, error, wrt)) from error
    returned = plain_of(made.signature.return_type)
    wanted = types.Boolean if kind == "mask_mod" else types.Number
    if not isinstance(returned, wanted) or isinstance(returned, types.Complex):
        shown = (*score, *[types.intp] * len(_INDICES), *kinds[:n_aux])
        raise TypeError(messages.wrong_result(kind, function, returned, shown))
    return made
