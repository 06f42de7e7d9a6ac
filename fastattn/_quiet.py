"""Was the machine quiet while something was timed? The rule by which the benchmark and the demo judge it."""

from __future__ import annotations

from collections.abc import Sequence

#: A machine that nothing else uses keeps its peak to within this share of the best probe.
QUIET = 0.9


def count_disturbed(peaks: Sequence[float]) -> int:
    """How many of `peaks`, probes of one limit of the machine, fell below `QUIET` of the best one."""
    return sum(peak < QUIET * max(peaks) for peak in peaks)
