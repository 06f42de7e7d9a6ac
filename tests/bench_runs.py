"""A run of one case with given figures."""

from __future__ import annotations

from dataclasses import replace

from fastattn.bench.cases import CASES
from fastattn.bench.limits import Limits
from fastattn.bench.records import CaseRun, LibraryRun

CASE = replace(CASES["tiny-16"], name="case")


def limits(peak: float = 1e9, bandwidth: float | None = 1e9) -> Limits:
    """A probe with one and two threads."""
    return {
        "fma": {dtype: {"1": peak / 2, "2": peak} for dtype in ("float32", "float64")},
        "read_bandwidth": {} if bandwidth is None else {"1": bandwidth, "2": bandwidth},
    }


def case_run(**times: list[float]) -> CaseRun:
    """A run of two threads whose libraries took `times`, one figure per round."""
    rounds = max(map(len, times.values()))
    run = CaseRun(CASE, 2, "float64", rounds, kind="compute", limits=[limits()] * (rounds + 1))
    run.libraries = {
        name: LibraryRun(version="1", chosen="way", medians=list(it), mins=list(it))
        for name, it in times.items()
    }
    run.libraries["fastattn"].limit_shares = [(0.25, 1.0, 1.0), (0.1, 1.0, 1.0), (0.75, 1.0, 1.0)]
    return run
