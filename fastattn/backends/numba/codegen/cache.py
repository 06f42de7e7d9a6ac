"""The disk cache of compiled kernels.

Numba's own compares only the file that defines a function; a kernel depends on several. This one compares the
contents of all of them, and never fails a call: where a folder cannot be written, or a file is damaged, the
kernel is compiled again.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import llvmlite
from numba.core import caching

from fastattn.backends.numba.codegen.target import ISA, TARGET


@cache
def _stamp() -> str:
    """A hash of all that compiled code depends on, but its signature, the CPU and the Numba version, which
    Numba compares itself."""
    contents = hashlib.sha256()
    package = Path(__file__).parents[3]
    folders = ("backends/numba", "backends/cpu", "backends/jit")
    inside = (source for folder in folders for source in (package / folder).rglob("*.py"))
    for source in sorted(
        [*inside, package / "_constants.py", package / "_schedule.py", package / "_mask_map.py"]
    ):
        contents.update(str(source.relative_to(package)).encode())
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
        except Exception:  # whatever loading a damaged file raises
            return None

    def save_overload(self, signature: Any, data: Any) -> None:
        try:
            super().save_overload(signature, data)
        except Exception:  # a damaged index, which can be rebuilt, or no folder to write to
            with suppress(Exception):
                self.flush()
                super().save_overload(signature, data)


def cached(dispatcher: Any) -> Any:
    """The same Numba function, with its compiled code kept on disk where there is a folder for it."""
    with suppress(RuntimeError, OSError):  # no folder to write to
        dispatcher._cache = _Cache(getattr(dispatcher, "py_func", None) or dispatcher._pyfunc)
    return dispatcher
