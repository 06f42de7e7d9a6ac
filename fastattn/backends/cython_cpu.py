"""The compiled CPU backend: Cython driver over C micro-kernels, for float32 and float64, every feature."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from fastattn import _host, _threads
from fastattn._problem import Problem
from fastattn._schedule import Target, make_schedule
from fastattn.backends._base import Prepared
from fastattn.backends.cpu.functions import loop_of, reasons_no_compiler
from fastattn.backends.cpu.record import write_record

try:
    import fastattn.backends.cython.driver as driver
except ImportError as error:
    driver = None
    _missing = (
        f"its extension module is not built or does not load ({error}); a C compiler builds it on install"
    )
else:
    driver.choose_isa(_host.forced_isa() or driver.available_isas()[0])
    driver.set_cores(_host.cores_of_cpus())


#: What `read_bandwidth` reads: larger than any cache, 260 MB on some; and how many pieces of it at a time.
READ_NBYTES, READ_STEP_PIECES = 512 << 20, 16
_read_position = 0


class CythonBackend:
    """Tiles of keys by lanes of queries, on every core; see `fastattn.backends.cython.driver`."""

    name = "cython"

    def unavailable_reasons(self) -> list[str]:
        return [_missing] if driver is None else []

    def unsupported_reasons(self, problem: Problem) -> list[str]:
        if problem.score_mod is None or not (reasons := reasons_no_compiler()):
            return []
        return [f"a score_mod is compiled by Numba, and {'; '.join(reasons)}"]

    def thread_limit(self, num_threads: int) -> int:
        return _threads.thread_limit(num_threads) if driver.HAS_OPENMP else 1

    def prepare(self, problem: Problem, num_threads: int) -> Prepared:
        target = Target(*driver.target(problem.query.itemsize))
        schedule = make_schedule(problem, target, num_threads)
        loop = loop_of(problem, schedule)
        sizes = (problem.batch, problem.num_heads, problem.len_q, problem.len_k)
        record = write_record(problem, schedule, target)
        return driver.Prepared(*record, schedule.num_threads, schedule.is_small, loop, sizes)

    def run(self, problem: Problem, num_threads: int) -> None:
        self.prepare(problem, num_threads).run(problem.arrays(), problem.score_mod)


backend = CythonBackend()


def available_isas() -> list[str]:
    """Instruction sets that were built and that this CPU runs, best first."""
    return [] if driver is None else list(driver.available_isas())


def isa() -> str | None:
    """The instruction set in use, or None without the extension."""
    return None if driver is None else str(driver.chosen_isa())


@contextmanager
def use_isa(name: str) -> Iterator[None]:
    """For tests: other kernels for a while, in every thread."""
    before = driver.chosen_isa()
    driver.choose_isa(name)
    try:
        yield
    finally:
        driver.choose_isa(before)


def fma_peak(dtype: Any, num_threads: int, seconds: float) -> float:
    """FLOP/s of fused multiply-adds alone, over about `seconds`: the machine's limit for this dtype."""
    return _peak(np.dtype(dtype).itemsize, num_threads, seconds)


def integer_peak(num_threads: int, seconds: float) -> float:
    """Integer additions per second, over about `seconds`.

    They need all a core can issue and none of its memory. A neighbour on the same core, as virtual machines
    have, halves them while multiply-adds alone, which leave most of the core idle, still run at their peak.
    """
    return _peak(0, num_threads, seconds)


def read_bandwidth(num_threads: int, seconds: float) -> float:
    """Bytes per second that all threads read together from memory that no cache holds, over about `seconds`.

    The first call makes 512 MB of it, which stay; calls go on where the last one ended.
    """
    global _read_position
    memory, step = _read_buffer(), READ_STEP_PIECES * driver.READ_PIECE_NBYTES
    start = time.perf_counter()
    steps = 0
    while True:
        driver.read_memory(memory, _read_position, num_threads, READ_STEP_PIECES)
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


def _peak(itemsize: int, num_threads: int, seconds: float) -> float:
    steps = 20_000 * num_threads
    while True:
        start = time.perf_counter()
        operations = driver.peak_operations(itemsize, num_threads, steps)
        elapsed = time.perf_counter() - start
        if elapsed >= seconds / 2:
            return float(operations / elapsed)
        steps = int(steps * min(10.0, max(1.5, seconds / max(elapsed, 1e-6))))
