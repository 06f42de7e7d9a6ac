"""The disk cache of compiled kernels.

Numba's own compares the one file a function stands in; a kernel is made of several. This one compares the
contents of them all, and never fails a call: a folder that cannot be written or a damaged file only means to
compile again.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import llvmlite
from numba.core import caching

from fastattn import _constants
from fastattn.backends.numba.codegen.target import ISA, TARGET


@cache
def _stamp() -> str:
    """What compiled code depends on beside its signature, and the CPU and Numba version, which Numba compares
    itself."""
    contents = hashlib.sha256()
    for source in (*sorted(Path(__file__).parents[1].rglob("*.py")), Path(str(_constants.__file__))):
        contents.update(source.name.encode())
        contents.update(source.read_bytes())
    contents.update(repr((ISA, TARGET, llvmlite.__version__)).encode())
    return contents.hexdigest()


def _locator(base: type) -> type:
    class Locator(base):
        def get_source_stamp(self) -> str:
            return _stamp()

    return Locator


class _Impl(caching.CompileResultCacheImpl):
    _locator_classes: ClassVar = [
        _locator(base)
        for base in (
            caching.UserProvidedCacheLocator,
            caching.InTreeCacheLocator,
            caching.UserWideCacheLocator,
        )
    ]

    def get_filename_base(self, fullname: str, abiflags: str) -> str:
        return f"fastattn-{ISA}-{super().get_filename_base(fullname, abiflags)}"


class _Cache(caching.FunctionCache):
    _impl_class = _Impl

    def load_overload(self, signature: Any, target: Any) -> Any:
        try:
            return super().load_overload(signature, target)
        except Exception:  # whatever a damaged file makes of itself
            return None

    def save_overload(self, signature: Any, data: Any) -> None:
        try:
            super().save_overload(signature, data)
        except Exception:  # a damaged index, of which nothing is lost, or no place to write to
            with suppress(Exception):
                self.flush()
                super().save_overload(signature, data)


def cached(dispatcher: Any) -> Any:
    """The same Numba function, with its compiled code kept on disk where there is a place for it."""
    with suppress(RuntimeError, OSError):  # no folder to write to
        dispatcher._cache = _Cache(getattr(dispatcher, "py_func", None) or dispatcher._pyfunc)
    return dispatcher
