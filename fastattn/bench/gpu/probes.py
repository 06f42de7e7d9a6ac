"""What the GPU can do at most: multiply-adds per second, and bytes read from its memory per second."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

#: Independent multiply-adds of a thread, and how often it does them: many in a pass of the loop, as its
#: counter would take a quarter of the instructions.
CHAINS, REPEATS, TURNS = 16, 8, 512
THREADS = 256

#: Loads of a thread on the way at once.
READS = 8
BLOCKS_PER_PROCESSOR = 16

#: What is read: more than any cache of a GPU holds.
READ_BYTES = 2**31

#: The limit is the best of this many measurements: what the GPU can reach, not what it usually does.
TRIES = 10


def milliseconds(run: Callable[[], object], calls: int = 1) -> float:
    """Of one of some calls on the default stream, between two events."""
    start, stop = cuda.event(), cuda.event()
    start.record()
    for _ in range(calls):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / calls


@cache
def fma_kernel(dtype: str) -> Any:
    """``chains(out, x, y)``: multiply-adds in registers, `CHAINS` of them side by side."""
    real = np.dtype(dtype).type

    def chains(out: Any, x: Any, y: Any) -> None:
        sums = cuda.local.array(CHAINS, real)
        for i in range(CHAINS):
            sums[i] = real(cuda.threadIdx.x + i)
        for _ in range(TURNS):
            for _ in range(REPEATS):
                for i in range(CHAINS):
                    sums[i] = cuda.fma(sums[i], x, y)
        total = real(0)
        for i in range(CHAINS):
            total += sums[i]
        if total == real(-1):  # never, which the compiler cannot know
            out[0] = total

    return cuda.jit(chains)


def read_kernel() -> Any:
    """``read(array, out)``: every element of whole rounds of all threads."""

    def read(array: Any, out: Any) -> None:
        step = cuda.gridsize(1)
        total = np.float32(0)
        for at in range(cuda.grid(1), array.size - READS * step, READS * step):
            for i in range(READS):
                total += array[np.uint64(at + i * step)]
        if total == np.float32(-1):
            out[0] = total

    return cuda.jit(read)


def fma_peak(dtype: str) -> float:
    """FLOP/s of multiply-adds in registers, two for each."""
    kernel, blocks, out = fma_kernel(dtype), _blocks(), cuda.device_array(1, dtype)
    real = np.dtype(dtype).type

    def run() -> None:
        kernel[blocks, THREADS](out, real(0.5), real(0.25))

    run()
    fastest = min(milliseconds(run) for _ in range(TRIES))
    return 2.0 * CHAINS * REPEATS * TURNS * THREADS * blocks / (fastest / 1e3)


def read_bandwidth() -> float:
    """Bytes/s that a kernel reads from memory."""
    kernel, blocks, out = read_kernel(), _blocks(), cuda.device_array(1, np.float32)
    array = cuda.to_device(np.zeros(READ_BYTES // 4, np.float32))
    of_a_turn = READS * blocks * THREADS
    count = -(-(array.size - of_a_turn) // of_a_turn) * of_a_turn

    def run() -> None:
        kernel[blocks, THREADS](array, out)

    run()
    return 4 * count / (min(milliseconds(run) for _ in range(TRIES)) / 1e3)


def _blocks() -> int:
    return BLOCKS_PER_PROCESSOR * cuda.get_current_device().MULTIPROCESSOR_COUNT
