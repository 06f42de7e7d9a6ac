"""The driver without memory: some of its `malloc` return NULL, and it must say so, or be right.

A small library is loaded before all others, whose `malloc` asks who calls: only calls from the compiled
driver are counted, and the n-th from now fails. The addresses of the driver are those of its file in
/proc/self/maps.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

from fastattn.backends.cython import backend as cython_backend
from tests.fuzz.records import Record

SOURCE = r"""
#include <stddef.h>
#include <stdint.h>
#include <stdatomic.h>

extern void *__libc_malloc(size_t size);

static uintptr_t first, end;
static atomic_long left = -1, failed, asked;

void fuzz_watch(uintptr_t from, uintptr_t to) { first = from; end = to; }
void fuzz_fail(long number) { atomic_store(&left, number); }
long fuzz_failed(void) { return atomic_load(&failed); }
long fuzz_asked(void) { return atomic_load(&asked); }

void *malloc(size_t size)
{
    uintptr_t caller = (uintptr_t)__builtin_return_address(0);
    if (caller >= first && caller < end) {
        atomic_fetch_add(&asked, 1);
        if (atomic_load(&left) >= 0 && atomic_fetch_sub(&left, 1) == 0) {
            atomic_fetch_add(&failed, 1);
            return NULL;
        }
    }
    return __libc_malloc(size);
}
"""


def build(folder: Path) -> Path:
    """Compiles the library."""
    source, library = folder / "mallocs.c", folder / "mallocs.so"
    source.write_text(SOURCE)
    command = [os.environ.get("CC", "gcc"), "-O1", "-fno-builtin-malloc", "-shared", "-fPIC", str(source)]
    subprocess.run([*command, "-o", str(library)], check=True)
    return library


class Mallocs:
    """Runs cases while some `malloc` of the driver fails."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.fuzz_watch.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
        self._library.fuzz_fail.argtypes = [ctypes.c_long]
        self._library.fuzz_failed.restype = self._library.fuzz_asked.restype = ctypes.c_long
        self._library.fuzz_watch(*_addresses(cython_backend.driver.__file__))
        self._refused = 0

    def manner_of(self, record: Record) -> tuple[str, str] | None:
        """As `tests.fuzz.worker.manner_of`, but MemoryError is right where a `malloc` failed."""
        from tests.fuzz.worker import manner_of

        before = self._library.fuzz_failed()
        self._library.fuzz_fail(record["data"] % 7)
        try:
            found = manner_of(record)
        finally:
            self._library.fuzz_fail(-1)
        if found is not None and found[0] == "MemoryError" and self._library.fuzz_failed() > before:
            self._refused += 1
            # And once more with memory: nothing is left of the call that failed.
            return manner_of(record)
        return found

    def counts(self) -> dict[str, int]:
        return {
            "mallocs": self._library.fuzz_asked(),
            "mallocs failed": self._library.fuzz_failed(),
            "MemoryErrors": self._refused,
        }


def _addresses(path: str) -> tuple[int, int]:
    lines = [
        line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(path)
    ]
    ends = [tuple(int(part, 16) for part in line.split("-")) for line in lines]
    return min(start for start, _ in ends), max(end for _, end in ends)
