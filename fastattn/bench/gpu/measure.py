"""Check each library's result, then time them in turns."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from fastattn.bench.case import Case, make_inputs
from fastattn.bench.gpu.libraries import Way
from fastattn.bench.gpu.probes import milliseconds
from fastattn.bench.oracle import TOLERANCE_EPS, checked_rows, expected_output

#: How long a library is timed in each round: long beside the events, short beside the GPU's clocks.
BURST_MS = 20.0

#: The most calls of a burst: the host cannot queue more short calls ahead.
MOST_CALLS = 200


#: Calls whose median is the host's time.
HOST_CALLS = 300


@dataclass(slots=True)
class Timed:
    """What one way of one library did."""

    library: str
    label: str
    error: float | None = None  #: the largest, absolute
    reason: str | None = None  #: why it was not timed
    milliseconds: list[float] = field(default_factory=list)  #: of a call, one figure for each round

    @property
    def median(self) -> float:
        return median(self.milliseconds)


def measure(case: Case, ways: Sequence[Way], rounds: int, notify: Callable[[str], None]) -> list[Timed]:
    """All ways on one case, interleaved; those that are wrong or unable say why."""
    inputs = make_inputs(case)
    notify(f"{case.name}: the right answer")
    expected, rows = expected_output(case, inputs), checked_rows(case)
    tolerance = TOLERANCE_EPS * np.finfo(case.dtype).eps * float(np.abs(inputs.bhsd(case)[2]).max())
    found, ready = [], []
    for way in ways:
        notify(f"{case.name}: {way.library}, {way.label}")
        timed = Timed(way.library, way.label)
        found.append(timed)
        try:
            run = way.make(case, inputs)
            with way.within(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch says at length why a kernel cannot, and raises
                timed.error = _largest_error(way.get(run()), expected, rows)
        except Exception as problem:  # each library has its own
            timed.reason = " ".join(f"{type(problem).__name__}: {problem}".split())[:300]
            continue
        if not timed.error <= tolerance:
            timed.reason = f"wrong: largest error {timed.error:.2g}, allowed {tolerance:.2g}"
            continue
        ready.append((way, run, timed, _burst(way, run)))
    for number in range(rounds):
        notify(f"{case.name}: round {number + 1} of {rounds}")
        for way, run, timed, calls in ready:
            with way.within():
                run()
                timed.milliseconds.append(milliseconds(run, calls))
    gc.collect()
    return found


def host_microseconds(case: Case, way: Way) -> dict[str, float]:
    """Of a call on the host, the median of many: until it returns, and until the GPU is done."""
    from numba import cuda

    run = way.make(case, make_inputs(case))
    found = {}
    for name, wait in (("returned", lambda: None), ("done", cuda.synchronize)):
        run()
        cuda.synchronize()
        times = []
        for _ in range(HOST_CALLS):
            start = perf_counter()
            run()
            wait()
            times.append(perf_counter() - start)
        found[name] = 1e6 * median(times)
    return found


def _burst(way: Way, run: Callable[[], Any]) -> int:
    with way.within():
        once = min(milliseconds(run) for _ in range(3))
    return max(1, min(MOST_CALLS, round(BURST_MS / max(once, 1e-3))))


def _largest_error(out: np.ndarray, expected: np.ndarray, rows: np.ndarray) -> float:
    if not np.isfinite(out).all():
        return float("inf")
    return float(np.abs(out[:, :, rows] - expected).max())
