"""Run Python in a process of its own, where a crash or a hang is only a failing test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent


def python(
    code: str, *, env: dict[str, str | None] | None = None, timeout: float = 120, cwd: Path | None = None
) -> str:
    """Run `code`, assert that it ends with status 0, and return what it printed.

    The child imports the same package, and has none of the package's own environment variables but those in
    `env`, where None stands for none of that name. OpenBLAS has one thread unless `env` says otherwise: more
    would spin on the cores of the other workers.
    """
    variables = {name: text for name, text in os.environ.items() if not name.startswith("FASTATTN_")}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), variables.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    variables |= {"OPENBLAS_NUM_THREADS": "1"} | (env or {})
    given = {name: text for name, text in variables.items() if text is not None}
    done = subprocess.run(
        [sys.executable, "-c", code], env=given, timeout=timeout, cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


class GuardedArrays:
    """Arrays next to guard pages, so that an access one byte out of bounds crashes."""

    def __init__(self) -> None:
        import ctypes
        import mmap

        self._mmap = mmap
        self._ctypes = ctypes
        self._mprotect = ctypes.CDLL(None, use_errno=True).mprotect
        self._mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._kept: list[tuple[mmap.mmap, np.ndarray]] = []

    def place(self, array: np.ndarray, *, at_end: bool) -> np.ndarray:
        """Copy `array` so that it ends right before a guard page, or begins right after one."""
        page = self._mmap.PAGESIZE
        room = -(-max(array.nbytes, 1) // page) * page
        guard = 128 * page  # many, so that a read far out of bounds still hits them
        memory = self._mmap.mmap(-1, room + 2 * guard, self._mmap.MAP_PRIVATE | self._mmap.MAP_ANONYMOUS)
        raw = np.frombuffer(memory, np.uint8)
        self._kept.append((memory, raw))
        start = guard + (room - array.nbytes if at_end else 0)
        placed = np.ndarray(array.shape, array.dtype, raw, start)
        placed[...] = array
        for offset in (0, guard + room):
            if self._mprotect(raw.ctypes.data + offset, guard, 0) != 0:
                raise OSError(self._ctypes.get_errno(), "mprotect")
        return placed
