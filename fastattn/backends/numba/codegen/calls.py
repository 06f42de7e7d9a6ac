"""Functions that are compiled when a call first needs them, and that call each other by address.

Numba compiles a function together with all that it calls, once more at each level of calls. By address each
is compiled alone, once, and only if it is needed; `cache` keeps each on disk. There is a table of addresses
for each dtype, whose address is in the record of a call. Functions are in the table in the order in which
they are declared.

Parameters are addresses and counts (`intp`), except those named in `REALS` and the records `job` and `block`.
They return an integer, most often 0 for nothing.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.ccallback import CFunc
from numba.core.dispatcher import Dispatcher

from fastattn.backends.jit.compiling import compiling
from fastattn.backends.numba.codegen.cache import cached
from fastattn.backends.numba.codegen.intrinsics import intrinsic_of
from fastattn.backends.numba.layout import BLOCK, JOB

#: Parameters that are reals, always double.
REALS = frozenset({"high", "low", "root", "softcap", "factor", "x"})

#: No fast-math: NaN and inf are valid data, and fused multiply-adds are written as such.
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}

Function = Callable[..., Any]

_logger = logging.getLogger("fastattn")
_compiling = threading.RLock()
_makers: dict[str, Callable[[Any], Function]] = {}  # of each function, given a zero of the dtype
_callees: dict[str, frozenset[str]] = {}  # of each function, names that include all functions that it calls


def _new_lock() -> None:
    # The thread that held it in the parent, between two functions, does not exist in a forked child.
    global _compiling
    _compiling = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


def routine(function: Function) -> Any:
    """Declares a function that is the same for every dtype; its first argument is `job`."""
    return _declare(function, lambda zero: function)


def kernel(define: Callable[[Any], Function]) -> Any:
    """Declares the function that `define` makes for a zero of some dtype.

    In compiled code `job` goes before the arguments that it has.
    """
    return _declare(define(np.float32(0)), define)


def _declare(function: Function, make: Callable[[Any], Function]) -> Any:
    """The intrinsic that calls the function in compiled code."""
    name, index = function.__name__, len(_makers)
    _makers[name] = make
    _callees[name] = _names_in(function)
    parameters = list(inspect.signature(function).parameters)
    takes_job = parameters[0] == "job"

    def definition(context: Any, job: Any, *arguments: Any) -> Any:
        signature = _signature(function)
        at_calls = job.offset("kernels")

        def codegen(context: Any, builder: Any, call: Any, values: Any) -> Any:
            word, byte = ir.IntType(64), ir.IntType(8)
            record = builder.bitcast(values[0], byte.as_pointer())
            table = builder.load(builder.bitcast(builder.gep(record, [word(at_calls)]), word.as_pointer()))
            address = builder.load(builder.inttoptr(builder.add(table, word(8 * index)), word.as_pointer()))
            kind = ir.FunctionType(word, [context.get_value_type(it) for it in signature.args])
            return builder.call(builder.inttoptr(address, kind.as_pointer()), values[0 if takes_job else 1 :])

        return types.intp(*(() if takes_job else (job,)), *signature.args), codegen

    return intrinsic_of(definition, name, parameters if takes_job else ["job", *parameters])


def _names_in(function: Function) -> frozenset[str]:
    """All global names and attributes in a function's code, and in that of Numba functions that it uses."""
    names = set(function.__code__.co_names)
    for name in function.__code__.co_names:
        used = function.__globals__.get(name)
        if isinstance(used, Dispatcher):
            names |= _names_in(used.py_func)
    return frozenset(names)


@cache
def reached(root: str, without: frozenset[str]) -> frozenset[str]:
    """The function `root` and all that it calls, but for those in `without` and what they alone call."""
    found, waiting = set(), [root]
    while waiting:
        name = waiting.pop()
        if name in _makers and name not in found and name not in without:
            found.add(name)
            waiting += _callees[name]
    return frozenset(found)


@cache
def _record(dtype: np.dtype) -> Any:
    return numba.from_dtype(dtype)


def _signature(function: Function) -> Any:
    def kind(name: str) -> Any:
        if name in ("job", "block"):
            return _record(JOB if name == "job" else BLOCK)
        return types.float64 if name in REALS else types.intp

    return types.intp(*map(kind, inspect.signature(function).parameters))


class Table:
    """The addresses of all functions for one dtype; 0 for those that no call needed so far."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._zero = np.dtype(dtype).type(0)
        self._index = {name: index for index, name in enumerate(_makers)}
        self._compiled: dict[str, CFunc] = {}
        self._ready: set[frozenset[str]] = set()
        self._addresses = np.zeros(len(_makers), np.int64)
        self.address = self._addresses.ctypes.data

    def need(self, names: frozenset[str]) -> None:
        """Compiles those of these functions that are not compiled yet."""
        if names in self._ready:
            return
        with _compiling:
            missing = sorted(names - set(self._compiled), key=self._index.__getitem__)
            start, is_logged = time.perf_counter(), False
            for done, name in enumerate(missing):
                if not is_logged and time.perf_counter() - start > 1:
                    is_logged = True
                    _logger.info(
                        "compiling kernels for %s, %d of %d done; NUMBA_CACHE_DIR says where they are kept",
                        self._dtype,
                        done,
                        len(missing),
                    )
                compiled = compile_function(_makers[name](self._zero))
                self._addresses[self._index[name]] = int(compiled.address or 0)
                self._compiled[name] = compiled
            self._ready.add(names)
            if is_logged:
                _logger.info("compiled for %s in %.1f s", self._dtype, time.perf_counter() - start)

    def address_of(self, name: str) -> int:
        """The address of a function that has been compiled."""
        return int(self._addresses[self._index[name]])


def compile_function(function: Function) -> CFunc:
    """The function with an address that C can call, kept on disk."""
    signature = _signature(function)
    with compiling():
        compiled = cached(CFunc(function, (signature.args, signature.return_type), {}, dict(OPTIONS)))
        compiled.compile()
    return compiled


@cache
def table(dtype: str) -> Table:
    """The functions for "float32" or "float64"."""
    return Table(dtype)
