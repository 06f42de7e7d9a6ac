"""The C entry, as `fastattn.h` documents it: what it asks of Python, and where others find it.

The design, in ten lines:

1. One flat struct, `fastattn_call`, and one function; the header knows neither NumPy nor Python.
2. What is decided stays in Python: a call of a new kind comes to `solve`, which builds arrays over the
   caller's memory and goes through `_call.normalize`, `registry` and `prepared` as `attention` does.
3. What the driver keeps of it is the record alone, beside the struct without addresses, in a table in C
   (``backends/cython/entry.pxi``). A call found there runs without the GIL, with its own addresses.
4. What depends on addresses and numbers is checked each time: `out` and `lse` must not overlap what is read,
   and key lengths are copied and compared. Where one does not hold, the call comes to `solve`.
5. Readers of the table take no lock, so no fork can leave one held. Writers hold `_machine.threads.no_fork`.
6. How many threads a call may have is asked for once per OS thread, and again when a setting changed.
7. The address is handed out as a capsule, `attention` of this module: to C, Cython, Numba and XLA alike.
"""

from __future__ import annotations

from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._api import prepared as _prepared
from fastattn._call.normalize import normalize
from fastattn._machine import host
from fastattn._machine.threads import no_fork
from fastattn.backends.registry import BackendError, load, select, usable

if TYPE_CHECKING:
    from collections.abc import Sequence

OK, VALUE_ERROR, TYPE_ERROR, NO_BACKEND, NO_MEMORY, ABI_ERROR, FAILED = range(7)  #: as in ``fastattn.h``

_CODES = {
    MemoryError: NO_MEMORY,
    BackendError: NO_BACKEND,
    TypeError: TYPE_ERROR,
    ValueError: VALUE_ERROR,
    OverflowError: VALUE_ERROR,
}
FLOAT32, FLOAT64, FLOAT16, BFLOAT16, BOOL, INT64 = range(1, 7)  #: as in ``fastattn.h``
_DTYPES = {FLOAT32: "f4", FLOAT64: "f8", FLOAT16: "f2", BOOL: "?", INT64: "i8"}
_CAUSAL = (False, "top_left", "bottom_right")
_PRECISIONS = ("exact", "storage")

_NAMES = ("query", "key", "value", "out", "lse", "mask", "bias", "key_lengths", "sinks")
_ONLY = {"mask": BOOL, "key_lengths": INT64}


def get_include() -> str:
    """The folder of ``fastattn.h``, for compilers of code that calls fastattn from C or Cython.

    Returns
    -------
    str

    Notes
    -----
    The header documents the struct of a call and the one function. Cython finds ``fastattn/__init__.pxd`` by
    itself, so that ``cimport fastattn`` has the same names.

    Examples
    --------
    >>> from pathlib import Path
    >>> import fastattn
    >>> Path(fastattn.get_include(), "fastattn.h").exists()
    True
    """
    return str(Path(__file__).parents[1] / "include")


@cache
def _driver() -> Any:
    """The extension module, told what to call here."""
    usable("cython", "the C entry is part of the compiled kernels")
    from fastattn.backends.cython import driver

    driver.install_entry(solve, limit, code_of)
    host.on_threads_changed.append(driver.threads_changed)
    return driver


def address() -> int:
    """Where the C entry is in this process. BackendError where the kernels were not built."""
    return int(_driver().entry_address())


@cache
def _capsule() -> Any:
    return _driver().entry_capsule()


def __getattr__(name: str) -> Any:
    if name == "attention":
        return _capsule()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# What the C entry calls ----------------------------------------------------------------------------


def limit(wanted: int) -> int:
    """How many threads a call of this thread may have; 0 wants the default."""
    return load("cython").thread_limit(wanted or host.get_num_threads())


def code_of(error: BaseException) -> int:
    """What the C entry returns for an exception."""
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), FAILED)


def solve(
    key_of_call: int,
    described: Sequence[tuple[int, int, tuple[int, ...], tuple[int, ...]]],
    causal: int,
    window: tuple[int, int],
    scale: float,
    softcap: float,
    precision: int,
    num_threads: int,
) -> None:
    """Does a call of the C entry, and has it kept for others of its kind.

    `described` are the arrays of the struct: address, dtype, shape and strides of each.
    """
    query: Any
    key: Any
    value: Any
    arrays = {name: _array(name, *of) for name, of in zip(_NAMES, described, strict=True)}
    query, key, value, out, lse, mask, bias, key_lengths, sinks = arrays.values()
    left, right = (None if bound == -1 else bound for bound in window)
    if not 0 <= causal < len(_CAUSAL):
        raise ValueError(f"causal must be 0, 1 or 2, got {causal}")
    if not 0 <= precision < len(_PRECISIONS):
        raise ValueError(f"precision must be 0 or 1, got {precision}")
    options = {
        "mask": mask, "bias": bias, "causal": _CAUSAL[causal], "key_lengths": key_lengths, "sinks": sinks,
        "window": None if left is right is None else (left, right),
        "scale": None if np.isnan(scale) else scale, "softcap": softcap or None, "out": out,
        "return_lse": lse is not None, "precision": _PRECISIONS[precision],
    }  # fmt: skip
    request = normalize(query, key, value, options)
    if lse is not None:
        request = request.with_lse(lse, {name: x for name, x in arrays.items() if name != "lse"})
    backend = select(request.problem)
    found = _prepared.run_once(request, (query, key, value), options, backend, num_threads or None)
    request.finish(query, out)
    if found is not None and isinstance(found[0], _driver().Prepared):
        prepared, threads = found
        with no_fork:
            _driver().keep_call(key_of_call, prepared, 0 if prepared.is_small else threads)


def _array(
    name: str, data: int, dtype: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> np.ndarray | None:
    """An array of the struct; None where there is none."""
    is_needed = name in ("query", "key", "value", "out")
    if min(shape) < 0:
        raise ValueError(f"sizes must not be negative, got {shape} for {name}")
    if not data and not is_needed:
        return None
    if not data and min(shape) > 0:
        raise ValueError(f"{name} must be an address, got NULL")
    if name in _ONLY:
        if dtype != _ONLY[name]:
            raise TypeError(f"{name} must have dtype {_ONLY[name]} of fastattn.h, got {dtype}")
    elif not FLOAT32 <= dtype <= BFLOAT16:
        raise TypeError(f"{name} must have one of the float dtypes of fastattn.h, got {dtype}")
    axes = {"lse": slice(3), "key_lengths": slice(1), "sinks": slice(1, 2)}.get(name, slice(4))
    shape, strides = shape[axes], strides[axes]
    # Along an axis of one element no step is taken, and none at all in an empty array.
    strides = tuple(step if n > 1 and 0 not in shape else 0 for n, step in zip(shape, strides, strict=True))
    steps = list(zip(shape, strides, strict=True))
    first = data + sum((n - 1) * step for n, step in steps if step < 0)
    last = data + sum((n - 1) * step for n, step in steps if step > 0)
    nbytes = _dtype(dtype).itemsize * prod(max(n, 1) for n in shape)  # as NumPy counts, empty or not
    reach = sum(n * abs(step) for n, step in steps)
    if max(nbytes, reach) >= 2**63 or first < 0 or last >= 2**64:
        raise ValueError(f"{name} must lie within the address space, got sizes {shape} and strides {strides}")
    return _driver().array_at(data, _dtype(dtype), shape, strides, name in ("out", "lse"))


def _dtype(code: int) -> np.dtype:
    if code != BFLOAT16:
        return np.dtype(_DTYPES[code])
    try:
        import ml_dtypes  # which NumPy's bfloat16 comes from
    except ImportError as error:
        raise TypeError(f"bfloat16 needs the package ml_dtypes: {error}") from None
    return np.dtype(ml_dtypes.bfloat16)
