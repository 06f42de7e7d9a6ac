"""The disk cache of compiled kernels.

Numba's own cache cannot know a kernel again: it compares the pickled closure, in which intrinsics have random
names. This one compares the specialisation and the contents of all sources. It never fails a call.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from numba import config

from fastattn.masks import map as mask_map


@cache
def _stamp() -> str:
    """A hash of all that kernels are made of, and by what. Numba itself compares GPU and signature."""
    contents = hashlib.sha256(version("numba-cuda").encode())
    for source in (*sorted(Path(__file__).parent.glob("*.py")), Path(mask_map.__file__)):
        contents.update(source.read_bytes())
    return contents.hexdigest()


def cached(kernel: Any, specialisation: Any) -> Any:
    """The same kernel, with its machine code kept on disk where there is a folder for it."""
    if config.ENABLE_CUDASIM:
        return kernel
    from numba.cuda.dispatcher import CUDACache

    class Cache(CUDACache):
        def _index_key(self, signature: Any, codegen: Any) -> Any:
            return signature, codegen.magic_tuple(), _stamp(), repr(specialisation), self._launch_config_key

        def load_overload(self, signature: Any, target: Any) -> Any:
            with suppress(Exception):  # whatever loading a damaged file raises
                return super().load_overload(signature, target)

        def save_overload(self, signature: Any, data: Any) -> None:
            with suppress(Exception):  # no folder to write to
                super().save_overload(signature, data)

    with suppress(RuntimeError, OSError):  # no folder at all
        kernel._cache = Cache(kernel.py_func)
    return kernel
