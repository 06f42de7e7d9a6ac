"""One process that holds one library: ``python -m fastattn.bench.worker PEER THREADS``.

It reads one JSON command per line on stdin and answers with one JSON line: ``{"ok": ...}`` or
``{"error": reason}``. `process` is the other end. What the library itself prints goes to stderr.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fastattn.bench.cases import CASES, MEMORY_CASES, MEMORY_WARM_UP, Case, Inputs, make_inputs
from fastattn.bench.oracle import checked_rows, expected_output
from fastattn.bench.peers import Call, Peer, Redundant, Unable, load_peer
from fastattn.bench.peers._base import available_memory

#: Names of workers that hold no library: the oracle, and the probe of the machine's limits.
ORACLE, LIMITS = "oracle", "limits"

#: A result is right when its largest error is below this many eps of its dtype, times the largest
#: absolute value of ``value``. Attention averages values, so an error of a few eps is what rounding makes;
#: bfloat16 or float32 arithmetic behind a wider type is off by far more.
TOLERANCE_EPS = 32

#: Before each burst a library is called for this long, at least once: its pool was stopped, its data
#: left the caches.
WARM_UP_SECONDS = 0.02

#: Ways of one library are tried this far apart: each may have a pool of its own, which spins for a while.
SETTLE_SECONDS = 0.15

#: Calls are timed in blocks of at least this length, so that reading the clock costs below 1 %.
BLOCK_SECONDS = 50e-6

#: A probe of the FMA peak takes about this long. The machine's limit is the best of so many of them.
PROBE_SECONDS, PROBE_TRIES = 0.004, 8

#: ``--memory`` lets a library take this share of the free memory before it fails.
MEMORY_SHARE = 0.8


def _reason(error: BaseException) -> str:
    """The error in one line that fits a table."""
    text = " ".join(str(error).split())
    if not isinstance(error, Unable):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def _block_size(seconds: float) -> int:
    return max(1, round(BLOCK_SECONDS / max(seconds, 1e-9)))


def _time_blocks(run: Callable[[], object], calls: int, block: int) -> list[float]:
    """Seconds per call, one figure for each block of `block` calls."""
    clock = time.perf_counter
    times = []
    gc.disable()
    for _ in range(max(1, calls // block)):
        start = clock()
        for _ in range(block):
            run()
        times.append((clock() - start) / block)
    gc.enable()
    return times


def _warm_up(run: Callable[[], object]) -> float:
    """Call for `WARM_UP_SECONDS`; the seconds of the fastest call."""
    clock = time.perf_counter
    fastest = float("inf")
    end = clock() + WARM_UP_SECONDS
    while True:
        start = clock()
        run()
        now = clock()
        fastest = min(fastest, now - start)
        if now >= end:
            return fastest


class LibraryWorker:
    """The commands of a worker that holds a library."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._threads = num_threads
        self._peer: Peer | None = None
        self._ready: dict[str, Call] = {}

    def _load(self) -> Peer:
        if self._peer is None:
            self._peer = load_peer(self._name, self._threads)
        return self._peer

    def prepare(self, case: str, expected: str) -> dict[str, Any]:
        """Make `case` ready every way the library has, check each, keep the fastest right one.

        Parameters
        ----------
        case
            Its name.
        expected
            The `.npy` file with the right answer.

        Returns
        -------
        dict
            ``version`` of the library, ``chosen`` (label or None), ``tolerance``, and ``ways``: for each
            label its ``error`` (largest), ``rms_error`` and ``seconds``, or the ``reason`` it cannot be used.
        """
        named = CASES[case]
        inputs = make_inputs(named)
        answer = np.load(expected, mmap_mode="r")
        tolerance = TOLERANCE_EPS * float(np.finfo(named.dtype).eps) * float(np.abs(inputs.value).max())
        peer = self._load()
        ways: dict[str, dict[str, Any]] = {}
        calls: dict[str, Call] = {}
        for label, make in peer.ways.items():
            try:
                call = make(named, inputs)
                ways[label] = _errors(named, call.result(), answer)
            except Redundant:
                continue
            except Exception as problem:  # whatever a library raises is its reason
                ways[label] = {"reason": _reason(problem)}
                continue
            error = ways[label]["error"]
            if error is None or error > tolerance:
                found = "NaN or inf" if error is None else f"largest error {error:.1e}"
                ways[label]["reason"] = f"wrong: {found}, allowed {tolerance:.1e}"
            else:
                calls[label] = call
        for label in calls if len(calls) == 1 else [*calls, *calls]:
            time.sleep(SETTLE_SECONDS)
            seconds = _warm_up(calls[label].run)
            ways[label]["seconds"] = min(seconds, ways[label].get("seconds", seconds))
        chosen = min(calls, key=lambda label: ways[label]["seconds"], default=None)
        if chosen is not None:
            self._ready[case] = calls[chosen]
        return {"version": peer.version, "chosen": chosen, "tolerance": tolerance, "ways": ways}

    def time(self, case: str, calls: int, seconds: float) -> dict[str, float]:
        """One burst of `case`: warm up, then `calls` calls that take about `seconds` each."""
        run = self._ready[case].run
        _warm_up(run)
        times = _time_blocks(run, calls, _block_size(seconds))
        return {"median": float(np.median(times)), "min": min(times), "samples": len(times)}

    def peak_shares(self, case: str, seconds: float) -> list[tuple[float, float, float]]:
        """The share of the FMA peak that `case` reaches: calls and probes of the peak in turn, for `seconds`.

        The machine is shared, so the limit moves: every call is held against the probes just before and just
        after it, of this process and these threads. Beside each share stand the slower of the probes of the
        FMA peak and of the integer peak around it.
        """
        from fastattn.backends.cython_cpu import fma_peak, integer_peak

        def probe() -> tuple[float, float]:
            integer = integer_peak(self._threads, PROBE_SECONDS / 4)
            return fma_peak(named.dtype, self._threads, PROBE_SECONDS), integer

        named, run = CASES[case], self._ready[case].run
        block = max(1, round(PROBE_SECONDS / _warm_up(run)))
        shares: list[tuple[float, float, float]] = []
        end = time.perf_counter() + seconds
        before = probe()
        while not shares or time.perf_counter() < end:
            (took,) = _time_blocks(run, block, block)
            after = probe()
            share = named.flops / took / ((before[0] + after[0]) / 2)
            shares.append((share, min(before[0], after[0]), min(before[1], after[1])))
            before = after
        return shares

    def release(self) -> None:
        """Forget what was prepared, arrays and all."""
        self._ready.clear()
        gc.collect()

    def memory(self, case: str, warm: bool) -> dict[str, Any]:
        """Peak memory of the first call of `case` over its inputs and its output, in bytes.

        Meant for a fresh process. With `warm` a tiny call comes first, so that what a library loads or
        allocates once, whatever the size, is left out. The first way that works is measured.
        """
        named = MEMORY_CASES[case]
        inputs = make_inputs(named)
        _limit_memory()
        peer = self._load()
        reasons = []
        for label, make in peer.ways.items():
            try:
                if warm:
                    make(MEMORY_WARM_UP, make_inputs(MEMORY_WARM_UP)).run()
                return {"version": peer.version, "way": label, **_measure_memory(make, named, inputs)}
            except Exception as problem:  # whatever a library raises is its reason
                reasons.append(f"{label}: {_reason(problem)}")
        raise MemoryError("; ".join(reasons))


def _errors(case: Case, result: np.ndarray, answer: np.ndarray) -> dict[str, float | None]:
    """Largest and root-mean-square absolute error of the checked rows; None for what is not finite."""
    shape = (case.batch, case.heads, case.len_q, case.value_dim)
    if result.shape != shape:
        raise ValueError(f"the result has shape {result.shape}, expected {shape}")
    difference = np.abs(result[:, :, checked_rows(case)].astype(answer.dtype) - answer)
    errors = {"error": float(difference.max()), "rms_error": float(np.sqrt(np.square(difference).mean()))}
    return {name: error if np.isfinite(error) else None for name, error in errors.items()}


def _memory_status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}: peak memory is measured on Linux only")


def _limit_memory() -> None:
    """Make a call that needs too much fail with an error of its own, rather than the machine."""
    import resource

    limit = _memory_status("VmSize") + int(MEMORY_SHARE * available_memory())
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _measure_memory(make: Callable[[Case, Inputs], Call], case: Case, inputs: Inputs) -> dict[str, Any]:
    call = make(case, inputs)
    output = case.batch * case.heads * case.len_q * case.value_dim * np.dtype(case.dtype).itemsize
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is resident now
    before = _memory_status("VmHWM")
    start = time.perf_counter()
    kept = call.run()
    seconds = time.perf_counter() - start
    extra = _memory_status("VmHWM") - before - output  # a reused output is touched first in this call too
    del kept
    return {"extra": extra, "seconds": seconds}


class OracleWorker:
    """The command of the worker that computes the right answers."""

    def expected(self, case: str, path: str) -> dict[str, str]:
        """Save the right answer of `case` at `path`."""
        answer = expected_output(CASES[case], make_inputs(CASES[case]))
        np.save(path, answer)
        return {"dtype": str(answer.dtype)}


class LimitsWorker:
    """The command of the worker that measures what the machine can do."""

    def __init__(self, num_threads: int) -> None:
        self._threads = num_threads

    def peaks(self) -> dict[str, dict[str, float]]:
        """FMA peak in FLOP/s: ``{dtype: {threads: peak}}`` for one thread and for all."""
        from fastattn.backends.cython_cpu import fma_peak

        # After a stop both threads may wake on one core; they part while this is discarded.
        fma_peak("float32", self._threads, WARM_UP_SECONDS)
        return {
            dtype: {
                str(threads): max(fma_peak(dtype, threads, PROBE_SECONDS) for _ in range(PROBE_TRIES))
                for threads in (1, self._threads)
            }
            for dtype in ("float32", "float64")
        }


def main(name: str, num_threads: int) -> None:
    """Answer commands until stdin closes."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    holder: object
    if name == ORACLE:
        holder = OracleWorker()
    elif name == LIMITS:
        holder = LimitsWorker(num_threads)
    else:
        holder = LibraryWorker(name, num_threads)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, Any] = {"ok": getattr(holder, request.pop("command"))(**request)}
        except Exception as problem:  # the other end reports it
            answer = {"error": _reason(problem)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
