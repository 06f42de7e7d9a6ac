"""`show_config`: what fastattn found in this process and on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from fastattn._api import blas as _blas
from fastattn._machine import host
from fastattn._machine import threads as _threads
from fastattn._version import __version__
from fastattn.backends import registry

#: With this as OPENBLAS_THREAD_TIMEOUT idle threads spin for half a millisecond.
_BRIEF_TIMEOUT = 20


def show_config() -> None:
    """Print version, CPU, instruction set, threads, NumPy's BLAS, and why each backend is or is not usable.

    Examples
    --------
    >>> import fastattn
    >>> fastattn.show_config()  # doctest: +ELLIPSIS
    fastattn ...
    """
    if shortcoming := _or_error(_shortcoming):
        print(shortcoming)
    print(f"fastattn {__version__}, Python {sys.version.split()[0]}, NumPy {np.__version__}")
    caches = ", ".join(f"{level} {size}" for level, size in host.cache_sizes().items())
    quota = host.cpu_quota()
    print(f"cpu       {host.cpu_name()}{f' ({caches})' if caches else ''}")
    print(f"isa       {_or_error(_isa)}")
    print(f"cores     {host.available_cores()} usable, CPU quota {'none' if quota is None else quota}")
    print(f"threads   {_or_error(_num_threads)}")
    print(f"blas      {_or_error(_blas_line)}")
    print(f"  sharing {_or_error(_sharing)}")
    preferred = f"the first of {', '.join(registry.PREFERRED)} that can take a problem"
    print(f"backend   {_or_error(registry.requested) or preferred}")
    for name in registry.MODULES:
        print(f"  {name:<11} {_or_error(partial(_usable, name))}")


def _shortcoming() -> str:
    if reasons := registry.load("cython").unavailable_reasons():
        return f"NO COMPILED KERNELS: {'; '.join(reasons)}"
    return ""


def _num_threads() -> str:
    count, source = host.num_threads_and_source()
    limit = _threads.limit_by_threadpoolctl()
    limited = "" if limit is None else f", at most {limit} (threadpoolctl)"
    return f"{count} (from {source}){limited}"


def _isa() -> str:
    cython_backend = _cython_backend()
    forced = " (FASTATTN_ISA)" if host.forced_isa() else ""
    if not (available := cython_backend.available_isas()):
        return "none: no kernels were built"
    return f"{cython_backend.isa()}{forced}, of {', '.join(available)}"


def _cython_backend() -> Any:
    from fastattn.backends.cython import backend  # an import of fastattn does without it

    return backend


def _blas_line() -> str:
    """Which BLAS NumPy has, and how its threads may be in the way of fastattn's."""
    blas = _blas.numpy_blas()
    threads = "" if blas.num_threads is None else f", {blas.num_threads} threads"
    if blas.timeout is not None and blas.num_threads != 1 and not _blas.is_shared():
        ticks = f"2**{blas.timeout} clock ticks"
        threads += f", idle ones spin for {ticks} after a product (OPENBLAS_THREAD_TIMEOUT)"
    return f"{blas.name}{threads}"


def _sharing() -> str:
    blas = _blas.numpy_blas()
    if _blas.is_shared():
        return "products run on fastattn's threads"
    if (reason := blas.reason_not_shared()) is not None:
        return f"not possible: {reason}"
    possible = "possible, by fastattn.share_threads_with_blas()"
    if blas.timeout is not None and blas.timeout > _BRIEF_TIMEOUT:
        possible += f"; OPENBLAS_THREAD_TIMEOUT={_BRIEF_TIMEOUT} in the environment would help as well"
    return possible


def _usable(name: str) -> str:
    reasons = registry.load(name).unavailable_reasons()
    return f"not usable: {'; '.join(reasons)}" if reasons else "usable"


def _or_error(read: Callable[[], object]) -> object:
    """What `read` returns, or its complaint about a bad environment variable."""
    try:
        return read()
    except ValueError as error:
        return f"error: {error}"
