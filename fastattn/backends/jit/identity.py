"""What makes two functions equal, and which values a function captures.

Two functions are equal if their code is, and all that it uses from outside: defaults, closures, globals and
attributes of modules, also those of nested and of called functions. Integers and strings are compared by
value, other objects by identity. Arrays and floats are captured: they are compared by the type that is
compiled for them, and their values are read at each call. So are arrays in tuples and namedtuples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dis import get_instructions, hasjabs, hasjrel
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from numba.core.dispatcher import Dispatcher
from numba.np.ufunc.dufunc import DUFunc
from numba.np.ufunc.ufuncbuilder import UFuncDispatcher

#: Code objects whose names are cached.
MAX_CODES = 1024

#: Modules of these packages do not change.
_FIXED = frozenset({"numpy", "math", "numba", "builtins", "operator"})

_PLAIN = frozenset({int, bool, str, bytes, type(None)})


class Identity(NamedTuple):
    """The cache key of a function, and what it captures."""

    key: Any  #: hashable, equal for equal functions
    captured: tuple[Any, ...]  #: arrays and floats from outside


def identify(function: Any) -> Identity:
    """The identity of a function, or of a `functools.partial` of one."""
    walk = Walk(function)
    return Identity(tuple(walk.key), tuple(walk.captured))


def has_loop(function: Any) -> bool:
    """Whether the function, or one that it calls by name, jumps back."""
    return any(_code(called.__code__).has_loop for called in Walk(function).functions)


def as_function(value: Any) -> FunctionType | None:
    """The Python function to inline for a call of this value, or None."""
    if isinstance(value, DUFunc):  # numba.vectorize
        value = value._dispatcher
    if isinstance(value, (Dispatcher, UFuncDispatcher)):
        return value.py_func
    if isinstance(value, FunctionType) and (value.__module__ or "").partition(".")[0] not in _FIXED:
        return value
    return None


def holds_array(value: Any) -> bool:
    """Whether a value is a tuple with an array in it, at any depth."""
    return isinstance(value, tuple) and any(isinstance(it, np.ndarray) or holds_array(it) for it in value)


class Same:
    """Wraps an object for comparison by identity; keeps it alive so that its id is not reused."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _Code:
    """The names that a code object and those nested in it read, and whether they loop.

    Equal code objects share one `_Code`, which is equal to itself only."""

    def __init__(self, code: CodeType) -> None:
        self.globals: list[str] = []
        self.attributes: list[str] = []
        self.has_loop = False
        for part in nested(code):
            for instruction in get_instructions(part):
                name = instruction.argval
                is_jump = instruction.opcode in hasjrel or instruction.opcode in hasjabs
                self.has_loop |= is_jump and name <= instruction.offset
                if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and name not in self.globals:
                    self.globals.append(name)
                elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and name not in self.attributes:
                    self.attributes.append(name)


_by_id: dict[int, tuple[CodeType, _Code]] = {}
_by_value: dict[CodeType, _Code] = {}


def _code(code: CodeType) -> _Code:
    found = _by_id.get(id(code))
    if found is None:
        if len(_by_id) >= MAX_CODES:
            _by_id.clear()
            _by_value.clear()
        known = _by_value.get(code) or _by_value.setdefault(code, _Code(code))
        found = _by_id[id(code)] = (code, known)
    return found[1]


def nested(code: CodeType) -> Iterator[CodeType]:
    """A code object and all those nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)


class Walk:
    """All that a function, or a `functools.partial` of one, uses from outside."""

    def __init__(self, function: Any) -> None:
        self.key: list[Any] = []  #: see `Identity`
        self.captured: list[Any] = []
        self.names: list[str] = []  #: of what is captured
        self.functions: list[FunctionType] = []  #: the function and all that it calls by name
        self.calls_compiled = False  #: whether one of these calls one that Numba has compiled
        self._add(function)

    def _add(self, value: Any, name: str = "", attributes: Any = ()) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self.key.append((kind, value))
        elif kind is float:
            self._capture(float, value, name)
        elif isinstance(value, tuple):
            self.key.append((kind, len(value)))
            for item in value:
                self._add_constant(item, name)
        elif isinstance(value, np.ndarray):
            self._capture((value.dtype, value.ndim, value.flags.c_contiguous, value.size > 0), value, name)
        elif isinstance(value, partial):
            self.key.append((partial, len(value.args)))
            self.key += value.keywords.keys()
            for item in (*value.args, *value.keywords.values()):
                self._add(item, "an argument of a functools.partial")
            self._add(value.func)
        elif (function := as_function(value)) is not None:
            self.calls_compiled |= function is not value
            self._add_function(function)
        elif kind is Same:
            self.key.append(value)
        else:
            self.key.append(Same(value))
            if isinstance(value, ModuleType) and value.__name__.partition(".")[0] not in _FIXED:
                for attribute in attributes:
                    self._add_constant(getattr(value, attribute, None), f"{name}.{attribute}", attributes)

    def _add_constant(self, value: Any, name: str, attributes: Any = ()) -> None:
        """`_add` where Numba compiles floats in as constants."""
        if type(value) is float:
            self.key.append(value.hex())
        else:
            self._add(value, name, attributes)

    def _capture(self, kind: Any, value: Any, name: str) -> None:
        # Several names of one object share one argument.
        for index, known in enumerate(self.captured):
            if known is value:
                self.key.append(index)
                return
        self.key.append(kind)
        self.captured.append(value)
        self.names.append(name)

    def _add_function(self, function: FunctionType) -> None:
        if function in self.functions:
            self.key.append(self.functions.index(function))
            return
        self.functions.append(function)
        code = _code(function.__code__)
        self.key.append(code)
        for value in function.__defaults__ or ():
            self._add_constant(value, "a default argument")
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._add(cell.cell_contents, name, code.attributes)
        for name in code.globals:
            self._add(function.__globals__.get(name), name, code.attributes)
