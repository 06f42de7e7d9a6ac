"""`show_config`: what fastattn found in this process and on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import numpy as np

from fastattn import _blas, _host, _registry, _threads
from fastattn._version import __version__

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
    if reasons := _registry.load("cython").unavailable_reasons():
        print(f"NO COMPILED KERNELS: {'; '.join(reasons)}")
    elif not _has_openmp():
        print("ONE THREAD: the compiled kernels were built without OpenMP; more threads need a build with it")
    print(f"fastattn {__version__}, Python {sys.version.split()[0]}, NumPy {np.__version__}")
    caches = ", ".join(f"{level} {size}" for level, size in _host.cache_sizes().items())
    quota = _host.cpu_quota()
    print(f"cpu       {_host.cpu_name()}{f' ({caches})' if caches else ''}")
    print(f"isa       {_or_error(_isa)}")
    print(f"cores     {_host.available_cores()} usable, CPU quota {'none' if quota is None else quota}")
    print(f"threads   {_or_error(_num_threads)}")
    for label, text in _blas_lines().items():
        print(f"{label:<9} {text}")
    preferred = f"the first of {', '.join(_registry.PREFERRED)} that can take a problem"
    print(f"backend   {_or_error(_registry.requested) or preferred}")
    for name in _registry.MODULES:
        print(f"  {name:<11} {_or_error(partial(_usable, name))}")


def _num_threads() -> str:
    count, source = _host.num_threads_and_source()
    limit = _threads.limit_by_threadpoolctl()
    limited = "" if limit is None else f", at most {limit} (threadpoolctl)"
    return f"{count} (from {source}){limited}"


def _isa() -> str:
    from fastattn.backends import cython_cpu

    forced = " (FASTATTN_ISA)" if _host.forced_isa() else ""
    return f"{cython_cpu.isa()}{forced}, of {', '.join(cython_cpu.available_isas()) or 'none that is built'}"


def _has_openmp() -> bool:
    from fastattn.backends import cython_cpu

    return cython_cpu.has_openmp()


def _blas_lines() -> dict[str, str]:
    """Which BLAS NumPy has, and whether its threads and fastattn's are in each other's way."""
    blas = _blas.numpy_blas()
    threads = "" if blas.num_threads is None else f", {blas.num_threads} threads"
    timeout = blas.timeout
    if timeout is not None and blas.num_threads != 1 and not _blas.is_shared():
        threads += f", idle ones spin for 2**{timeout} clock ticks after a product (OPENBLAS_THREAD_TIMEOUT)"
    reason = blas.reason_not_shared()
    if _blas.is_shared():
        shared = "products run on fastattn's threads"
    elif reason is not None:
        shared = f"not possible: {reason}"
    else:
        shared = "possible, by fastattn.share_threads_with_blas()"
        if timeout is not None and timeout > _BRIEF_TIMEOUT:
            shared += f"; OPENBLAS_THREAD_TIMEOUT={_BRIEF_TIMEOUT} in the environment would help as well"
    return {"blas": f"{blas.name}{threads}", "  sharing": shared}


def _usable(name: str) -> str:
    reasons = _registry.load(name).unavailable_reasons()
    return f"not usable: {'; '.join(reasons)}" if reasons else "usable"


def _or_error(read: Callable[[], object]) -> object:
    """What `read` returns, or its complaint about a bad environment variable."""
    try:
        return read()
    except ValueError as error:
        return f"error: {error}"
