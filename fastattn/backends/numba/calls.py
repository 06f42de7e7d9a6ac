"""Stages: functions that are compiled when a call first needs them, and that call each other by address.

Numba compiles a function together with all that it calls, once more at each level of calls. A stage is
compiled alone, once for each dtype, and only if a call needs it; `cache` keeps it on disk. The addresses of
the stages of a dtype are a table, whose address is in the record of a call.

Every stage takes ``(job, block, x, y)``: the records of `layout`, and two integers, which the stage names. It
returns an integer: 0 where it has no result.
"""

from __future__ import annotations

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
from numba.extending import intrinsic

from fastattn.backends.jit.codegen.emit import INTP
from fastattn.backends.jit.compiling import compiling
from fastattn.backends.numba.cache import cached
from fastattn.backends.numba.layout import BLOCK, job_of

#: Options of all compiled functions. No fast-math: NaN and inf are valid data, and fused multiply-adds are
#: written as such. Compiled functions allocate nothing, and Python calls only stages. Other functions are
#: inlined before they are typed. Otherwise Numba would compile each by itself and again with every caller.
OPTIONS: dict[str, Any] = {
    "nogil": True, "error_model": "numpy", "boundscheck": False, "_nrt": False,
    "no_cpython_wrapper": True, "no_cfunc_wrapper": True, "inline": "always",
}  # fmt: skip

Function = Callable[..., Any]

_logger = logging.getLogger("fastattn")
_compiling = threading.RLock()
_stages: dict[str, Function] = {}


def _new_lock() -> None:
    # In a forked child the thread that held the lock in the parent does not exist.
    global _compiling
    _compiling = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


def stage(function: Function) -> Any:
    """Makes a stage of a function. Returns the intrinsic by which compiled code calls it."""
    index = len(_stages)
    _stages[function.__name__] = function

    @intrinsic
    def call(context: Any, job: Any, block: Any, x: Any, y: Any) -> Any:
        at_stages = job.offset("stages")

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            record = builder.ptrtoint(values[0], INTP)
            table = _load(builder, builder.add(record, INTP(at_stages)))
            address = _load(builder, builder.add(table, INTP(8 * index)))
            return call_address(builder, address, values)

        return types.intp(job, block, types.intp, types.intp), codegen

    return call


def _load(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, INTP.as_pointer()))


def call_address(builder: Any, address: Any, values: Any) -> Any:
    """Writes a call of the C function at an address, which returns an integer."""
    kind = ir.FunctionType(INTP, [value.type for value in values])
    return builder.call(builder.inttoptr(address, kind.as_pointer()), values)


@intrinsic
def call_stage(context: Any, address: Any, job: Any, block: Any) -> Any:
    """Calls the stage at an address with records at these addresses."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return call_address(builder, values[0], [*values[1:], INTP(0), INTP(0)])

    return types.intp(address, job, block), codegen


@intrinsic
def fetch_next(context: Any, job: Any) -> Any:
    """Adds 1 to job.next_task atomically. Returns its value before."""
    at = job.offset("next_task")

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        address = builder.add(builder.ptrtoint(values[0], INTP), INTP(at))
        return builder.atomic_rmw("add", builder.inttoptr(address, INTP.as_pointer()), INTP(1), "acq_rel")

    return types.intp(job), codegen


@cache
def reached(root: str, without: frozenset[str]) -> frozenset[str]:
    """The stage `root` and all that it calls, except those in `without` and what only they call."""
    found, waiting = set(), [root]
    while waiting:
        name = waiting.pop()
        if name in _stages and name not in found and name not in without:
            found.add(name)
            waiting += _names_in(_stages[name])
    return frozenset(found)


def _names_in(function: Function) -> set[str]:
    """All global names in a function's code, and in that of Numba functions that it uses."""
    names = set(function.__code__.co_names)
    for name in function.__code__.co_names:
        used = function.__globals__.get(name)
        if isinstance(used, Dispatcher):
            names |= _names_in(used.py_func)
    return names


class Table:
    """The addresses of all stages for one dtype; 0 for those that no call needed so far."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        records = (numba.from_dtype(record) for record in (job_of(np.dtype(dtype)), BLOCK))
        self._signature = types.intp(*records, types.intp, types.intp)
        self._index = {name: index for index, name in enumerate(_stages)}
        self._compiled: dict[str, CFunc] = {}
        self._ready: set[frozenset[str]] = set()
        self._addresses = np.zeros(len(_stages), np.int64)
        self.address = self._addresses.ctypes.data

    def need(self, names: frozenset[str]) -> None:
        """Compiles the stages of these names that are not compiled yet."""
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
                compiled = compile_stage(_stages[name], self._signature)
                self._addresses[self._index[name]] = int(compiled.address or 0)
                self._compiled[name] = compiled
            self._ready.add(names)
            if is_logged:
                _logger.info("compiled for %s in %.1f s", self._dtype, time.perf_counter() - start)

    def address_of(self, name: str) -> int:
        """The address of a stage that has been compiled."""
        return int(self._addresses[self._index[name]])


def compile_stage(function: Function, signature: Any) -> CFunc:
    """Compiles a stage to a function that C can call, or loads it from the disk cache."""
    with compiling():
        compiled = cached(
            CFunc(
                function,
                (signature.args, signature.return_type),
                {},
                {**OPTIONS, "inline": "never"},
            )
        )
        compiled.compile()
    return compiled


@cache
def table(dtype: str) -> Table:
    """The stages for "float32" or "float64"."""
    return Table(dtype)
