"""Numba's lowering, and what it refuses there: Python objects, and memory that no check covers.

A loop runs without the interpreter: what takes the GIL needs Numba's environment of the function, which a
loop has not. Both are seen as each statement is lowered, when types are known and the line is, too.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import errors, ir, lowering
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import BaseNativeLowering, NativeLowering

#: The call that ends all code that takes the GIL, except BLAS wrappers. They take it only before they abort.
_RELEASES_GIL = "numba_gil_release"

#: Functions that Numba compiles without a check of what they read, or that write to arrays of the caller's.
_UNCHECKED = {
    np.lib.stride_tricks.as_strided: "reads whatever memory the strides lead to",
    np.take_along_axis: "does not check its indices here: read the elements one by one",
    np.fill_diagonal: "writes to an array",
    numba.carray: "reads whatever memory the address leads to",
    numba.farray: "reads whatever memory the address leads to",
}

#: What is called but not inlined: compiled apart, or by address.
_SEPARATE = (types.Dispatcher, types.FunctionType, types.UndefinedFunctionType)

#: How many arguments `take` has without an axis, as a function and as a method.
_TAKES = {np.take: 2, (types.Array, "take"): 1}

_PYTHON_API = 4  # FUNCFLAG_PYTHONAPI of ctypes


def refuse(what: str, loc: Any) -> None:
    """Raises Numba's error with the line."""
    raise errors.UnsupportedError(what, loc=loc)


def refuse_python(function: Any, loc: Any) -> None:
    """Raises where a function of ctypes is Python's: compiled code calls it without the GIL, or it takes the
    GIL."""
    if isinstance(function, ctypes._CFuncPtr):  # type: ignore[attr-defined]
        held = (type(it).__name__ for it in (function._objects or {}).values())
        if function._flags_ & _PYTHON_API or "CThunkObject" in held:
            refuse("calls Python by way of ctypes, and compiled code holds no GIL", loc)


class _Lower(lowering.Lower):
    """Lowers one function, statement by statement."""

    _n_libraries = 0

    def lower_inst(self, inst: Any) -> None:
        if self.flags.boundscheck:
            self._refuse_unchecked(inst)
        super().lower_inst(inst)
        # Libraries are those of the functions called: they are complete, with all that they call.
        libraries = list(self.library._linking_libraries)
        new, self._n_libraries = libraries[self._n_libraries :], len(libraries)
        called = self.module.globals
        if _RELEASES_GIL in called or any(_takes_gil(library._final_module, called) for library in new):
            what = "print" if isinstance(inst, ir.Print) else "what is called here"
            refuse(f"{what} takes the GIL: compiled code runs on many threads, without Python", self.loc)
        self._refuse_separate(inst)

    def _refuse_separate(self, inst: Any) -> None:
        """Refuses calls of functions that are not inlined: their reads are not checked."""
        value: Any = inst.value if isinstance(inst, ir.Assign) else None
        is_call = isinstance(value, ir.Expr) and value.op == "call"
        if is_call and isinstance(self.typeof(value.func.name), _SEPARATE):
            refuse(
                "a function called by its address, as one in a tuple, reads unchecked: call it by its name",
                self.loc,
            )

    def _refuse_unchecked(self, inst: Any) -> None:
        value = inst.value if isinstance(inst, ir.Assign) else inst
        is_item = isinstance(value, (ir.SetItem, ir.StaticSetItem)) or (
            isinstance(value, ir.Expr) and value.op in ("getitem", "static_getitem")
        )
        if is_item:
            array = value.value if isinstance(value, ir.Expr) else value.target
            if isinstance(self.typeof(array.name), types.NumpyFlatType):
                refuse("an index of .flat is not checked here: index the array itself", self.loc)
        elif isinstance(value, ir.Expr) and value.op == "call":
            function: Any = getattr(self.typeof(value.func.name), "typing_key", None)
            if len(value.args) + len(value.kws) > _TAKES.get(function, math.inf):
                refuse("take with an axis does not check its indices: index the array itself", self.loc)
            if function in _UNCHECKED:
                refuse(f"{function.__name__} {_UNCHECKED[function]}", self.loc)


def _takes_gil(module: Any, names: Iterable[str]) -> bool:
    """Whether functions of these names, as far as the module has them, or what they call takes the GIL."""
    bodies = {function.name: function for function in module.functions}
    waiting, seen = [name for name in names if name in bodies], set()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in bodies:
            continue
        seen.add(name)
        instructions = (it for block in bodies[name].blocks for it in block.instructions)
        waiting += [operand.name for it in instructions if it.opcode == "call" for operand in it.operands]
    return _RELEASES_GIL in seen


@register_pass(mutates_CFG=True, analysis_only=False)
class Lowering(BaseNativeLowering):
    """In the place of Numba's."""

    _name = "fastattn_lowering"
    replaced = NativeLowering

    @property
    def lowering_class(self) -> Any:
        return _Lower
