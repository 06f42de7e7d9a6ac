"""NumPy's BLAS: which one it is, and how its products run on fastattn's threads."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fastattn._call.arguments import check_bool
from fastattn._machine import host, threads

#: Prefixes and suffixes of OpenBLAS's functions, which depend on how it was built.
_AFFIXES = [(prefix, suffix) for prefix in ("scipy_", "") for suffix in ("64_", "_64", "")]

#: Functions that every OpenBLAS has.
_FUNCTIONS = frozenset({"get_config", "get_num_threads", "get_parallel", "set_num_threads"})

#: OpenBLAS's numbers for its threading; 0: none.
_PTHREADS, _OPENMP = 1, 2

#: In NumPy's wheels its idle threads spin for ``2**_TIMEOUT`` ticks of the CPU's clock, some 20 to 30 ms.
_TIMEOUT = 26


class Blas(NamedTuple):
    """NumPy's BLAS in this process."""

    name: str
    functions: dict[str, Any]  #: OpenBLAS's, by their names without affixes; empty for another BLAS

    @property
    def num_threads(self) -> int | None:
        """Threads of a product; None where this BLAS does not say."""
        return self.functions["get_num_threads"]() if self.functions else None

    def reason_not_shared(self) -> str | None:
        """Why its products cannot run on fastattn's threads; None where they can."""
        if not self.functions:
            return f"{self.name} does not let others run its threads' work; OpenBLAS 0.3.28 and later does"
        if _driver() is None or not _driver().can_share_threads():
            return "it needs the compiled backend, on Linux or another POSIX system"
        if "set_threads_callback_function" not in self.functions:
            return f"{self.name} is older than 0.3.28, the first that lets others run its threads' work"
        threading = self.functions["get_parallel"]()
        if threading == _OPENMP:
            return f"{self.name} runs on OpenMP; where both load one runtime, its threads are shared as it is"
        if threading != _PTHREADS:
            return f"{self.name} was built without threads"
        if threads.is_forked():
            return "this process was forked off one with threads, which are not here"
        num_threads = self.functions["get_num_threads"]()
        if 2 * num_threads - 1 > self._max_threads:
            return (
                f"{self.name} was built for {self._max_threads} threads, of which {num_threads} are its own: "
                f"with OPENBLAS_NUM_THREADS={(self._max_threads + 1) // 2} in the environment there is room"
            )
        return None

    @property
    def timeout(self) -> int | None:
        """Its idle threads spin for ``2**timeout`` ticks of the CPU's clock after a product. None for another
        BLAS, or on OpenMP's threads."""
        if not self.functions or self.functions["get_parallel"]() != _PTHREADS:
            return None
        return host.blas_timeout() or _TIMEOUT

    @property
    def _max_threads(self) -> int:
        found = re.search(r"MAX_THREADS=(\d+)", self.functions["get_config"]().decode())
        return int(found[1]) if found else 0


@cache
def numpy_blas() -> Blas:
    """The BLAS of the NumPy that is loaded."""
    described = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    name = str(described.get("name", "an unknown BLAS"))
    functions = _openblas_functions()
    if not functions:
        return Blas(name, {})
    version = re.search(r"OpenBLAS ([\d.]*\d)", functions["get_config"]().decode())
    return Blas(f"OpenBLAS {version[1]}" if version else "OpenBLAS", functions)


def _openblas_functions() -> dict[str, Any]:
    """The functions of the OpenBLAS that NumPy is linked with; the process may have others."""
    try:
        # A library's handle also finds the symbols of the libraries that it is linked with.
        numpy = ctypes.CDLL(np._core._multiarray_umath.__file__)  # type: ignore[attr-defined]
    except (AttributeError, OSError, TypeError):
        return {}
    for prefix, suffix in _AFFIXES:
        functions = {
            name: getattr(numpy, f"{prefix}openblas_{name}{suffix}")
            for name in (*_FUNCTIONS, "set_threads_callback_function")
            if hasattr(numpy, f"{prefix}openblas_{name}{suffix}")
        }
        if functions.keys() >= _FUNCTIONS:
            functions["get_config"].restype = ctypes.c_char_p
            return functions
    return {}


def share_threads_with_blas(enable: bool = True) -> bool:
    """Run NumPy's matrix products on fastattn's threads, or on its BLAS's own again.

    OpenBLAS's idle threads spin for tens of milliseconds after a product. A call of `attention` right after
    it shares a core with a spinning thread. With one pool for both no thread spins, and calls between
    products take as long as alone.

    Parameters
    ----------
    enable : bool, default True
        False gives OpenBLAS its own threads again.

    Returns
    -------
    bool
        Whether NumPy's products now run where `enable` wants them. If not, `show_config` says why. It takes
        OpenBLAS 0.3.28 or later with its own threads, as in NumPy's wheels, and the compiled backend.

    Raises
    ------
    TypeError
        `enable` is not a bool.

    Notes
    -----
    It applies to the whole process, and to OpenBLAS's routines of level 1 to 3. Factorisations in
    `numpy.linalg` may use OpenBLAS's own threads. A product keeps OpenBLAS's number of threads
    (OPENBLAS_NUM_THREADS, threadpoolctl) and its bits. Forks, and products of several Python threads or
    inside another parallel region: docs/promises.md.

    Examples
    --------
    >>> import fastattn
    >>> if fastattn.share_threads_with_blas():
    ...     pass  # a model of NumPy products and attention
    >>> fastattn.share_threads_with_blas(False)
    True
    """
    check_bool(enable, "enable")
    if not enable:
        if is_shared():
            _driver().stop_sharing_threads()
        return True
    if is_shared():
        return True
    blas = numpy_blas()
    if blas.reason_not_shared() is not None:
        return False
    _driver().share_threads(
        _address(blas.functions["set_threads_callback_function"]),
        _address(blas.functions["get_num_threads"]),
        _address(blas.functions["set_num_threads"]),
        blas._max_threads,
    )
    return True


def is_shared() -> bool:
    """Whether NumPy's products run on fastattn's threads."""
    return _driver() is not None and bool(_driver().shares_threads())


def _driver() -> Any:
    """The compiled extension, or None; loaded on first use."""
    from fastattn.backends.cython import backend as cython_backend

    return cython_backend.driver  # type: ignore[attr-defined]


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value
