"""The disk cache of compiled stages.

Numba's own cache compares only the file that defines a function. A stage depends on several files, and this
cache compares the contents of all. It never fails a call: where a folder cannot be written, or a file is
damaged, the stage is compiled again.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import llvmlite
from numba.core import caching

from fastattn.backends.jit.codegen.target import ISA, TARGET


@cache
def _stamp() -> str:
    """A hash of all that compiled code depends on. Its signature, the CPU and the Numba version are not in
    it: Numba compares these itself."""
    contents = hashlib.sha256(repr((ISA, TARGET, llvmlite.__version__)).encode())
    package = Path(__file__).parents[2]
    inside = (
        source for name in ("numba", "cpu", "jit") for source in (package / "backends" / name).rglob("*.py")
    )
    read = [package / "_machine" / "constants.py", package / "masks" / "map.py"]
    for source in sorted([*inside, *read]):
        contents.update(str(source.relative_to(package)).encode() + source.read_bytes())
    return contents.hexdigest()


def _locator(base: type) -> type:
    return type("Locator", (base,), {"get_source_stamp": lambda self: _stamp()})


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
        with suppress(Exception):  # whatever loading a damaged file raises
            return super().load_overload(signature, target)

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
