"""What the CPU can do at most: multiply-adds and additions per second, and bytes read from memory per second.

Each with the instruction set that the compiled backend has chosen, so that a share of the limit is of what
its kernels could reach; the extension knows nothing of attention. `benchmarks/README.md` in the repository
says what the figures are for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from fastattn._machine.constants import EXTENDED
from fastattn.backends.cython import backend as cython_backend

try:
    import fastattn.bench.probes.driver as driver
except ImportError:  # nor is the compiled backend there: they are built together
    driver = None

#: What `read_bandwidth` reads: larger than any cache, 260 MB on some; and how many pieces of it at a time.
READ_NBYTES, READ_STEP_PIECES = 512 << 20, 16
_read_position = 0


def fma_peak(dtype: Any, num_threads: int, seconds: float) -> float:
    """FLOP/s of fused multiply-adds alone, over about `seconds`: the machine's limit for this dtype."""
    return _peak(
        partial(driver.peak_operations, cython_backend.vectors(), np.dtype(dtype).itemsize),
        num_threads,
        seconds,
    )


def integer_peak(num_threads: int, seconds: float) -> float:
    """Integer additions per second, over about `seconds`.

    They need all a core can issue and none of its memory. A neighbour on the same core, as virtual machines
    have, halves them while multiply-adds alone, which leave most of the core idle, still run at their peak.
    """
    return _peak(partial(driver.peak_operations, cython_backend.vectors(), 0), num_threads, seconds)


def has_tile_unit() -> bool:
    """Whether the kernels in use compute float32 on a tile unit."""
    isa = cython_backend.isa()
    return isa in EXTENDED and EXTENDED[isa]["source"] == "fused.c"


def tile_peak(num_threads: int, seconds: float) -> float:
    """FLOP/s of float32 on the tile unit alone, each in six products, over about `seconds`."""
    return _peak(cython_backend.tile_operations, num_threads, seconds)


def read_bandwidth(num_threads: int, seconds: float) -> float:
    """Bytes per second that all threads read together from memory that no cache holds, over about `seconds`.

    The first call makes 512 MB of it, which stay; calls go on where the last one ended.
    """
    global _read_position
    memory, step = _read_buffer(), READ_STEP_PIECES * driver.READ_PIECE_NBYTES
    isa, address = cython_backend.vectors(), memory.ctypes.data
    start = time.perf_counter()
    steps = 0
    while True:
        driver.read_memory(isa, address + _read_position, num_threads, READ_STEP_PIECES)
        _read_position = (_read_position + step) % memory.nbytes
        steps += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return steps * step / elapsed


@cache
def _read_buffer() -> np.ndarray:
    """Memory that is there, from a line of the cache on, as the kernel reads it."""
    memory = np.ones(READ_NBYTES + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + READ_NBYTES]


def _peak(operations_of: Callable[[int, int], float], num_threads: int, seconds: float) -> float:
    """Operations per second of what does some in a number of steps on so many threads."""
    steps = 20_000 * num_threads
    while True:
        start = time.perf_counter()
        operations = operations_of(num_threads, steps)
        elapsed = time.perf_counter() - start
        if elapsed >= seconds / 2:
            return float(operations / elapsed)
        steps = int(steps * min(10.0, max(1.5, seconds / max(elapsed, 1e-6))))
