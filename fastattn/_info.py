"""`show_config`: what fastattn found in this process and on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import numpy as np

from fastattn import _host, _registry
from fastattn._version import __version__


def show_config() -> None:
    """Print version, CPU, instruction set, threads, and why each backend is or is not usable.

    Examples
    --------
    >>> import fastattn
    >>> fastattn.show_config()  # doctest: +ELLIPSIS
    fastattn ...
    """
    print(f"fastattn {__version__}, Python {sys.version.split()[0]}, NumPy {np.__version__}")
    caches = ", ".join(f"{level} {size}" for level, size in _host.cache_sizes().items())
    quota = _host.cpu_quota()
    print(f"cpu       {_host.cpu_name()}{f' ({caches})' if caches else ''}")
    print(f"isa       {_or_error(_isa)}")
    print(f"cores     {_host.available_cores()} usable, CPU quota {'none' if quota is None else quota}")
    print(f"threads   {_or_error(_host.get_num_threads)}")
    preferred = f"the first of {', '.join(_registry.PREFERRED)} that can take a problem"
    print(f"backend   {_or_error(_registry.requested) or preferred}")
    for name in _registry.MODULES:
        print(f"  {name:<11} {_or_error(partial(_usable, name))}")


def _isa() -> str:
    from fastattn.backends import cython_cpu

    forced = " (FASTATTN_ISA)" if _host.forced_isa() else ""
    return f"{cython_cpu.isa()}{forced}, of {', '.join(cython_cpu.available_isas()) or 'none that is built'}"


def _usable(name: str) -> str:
    reasons = _registry.load(name).unavailable_reasons()
    return f"not usable: {'; '.join(reasons)}" if reasons else "usable"


def _or_error(read: Callable[[], object]) -> object:
    """What `read` returns, or its complaint about a bad environment variable."""
    try:
        return read()
    except ValueError as error:
        return f"error: {error}"
