"""Was the machine quiet while something was timed? The rule by which the benchmark and the demo judge it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from fastattn._machine import host
from fastattn.backends.cython import backend as cython_backend
from fastattn.bench import probes

#: A machine that nothing else uses keeps its peak to within this share of the best probe.
QUIET = 0.9

#: Seconds between this process's last work and a probe: OpenBLAS's threads spin for about 100 ms after a
#: product, and would look like a neighbour.
SETTLE_SECONDS = 0.12

#: A probe is the median of this many measurements of this length, as one short interruption is no neighbour.
PROBE_TRIES, PROBE_SECONDS = 3, 0.01


def count_disturbed(peaks: Sequence[float]) -> int:
    """How many of `peaks`, probes of one limit of the machine, fell below `QUIET` of the best one."""
    return sum(peak < QUIET * max(peaks) for peak in peaks)


class CoreProbes:
    """Probes of the cores between rounds that are timed: they show a neighbour that comes or goes.

    One that takes the same share all the time is not seen: nobody knows what the cores do without it.
    """

    def __init__(self) -> None:
        self._peaks: list[float] = []

    def take(self) -> None:
        """One probe of all cores that the process may use; none where the compiled backend is missing."""
        if cython_backend.backend.unavailable_reasons():
            return
        time.sleep(SETTLE_SECONDS)
        threads = host.available_cores()
        tries = [probes.integer_peak(threads, PROBE_SECONDS) for _ in range(PROBE_TRIES)]
        self._peaks.append(median(tries))

    def warning(self) -> str | None:
        """What to tell the reader of the times; None where no probe was disturbed."""
        disturbed = count_disturbed(self._peaks)
        if not disturbed:
            return None
        return (
            f"Something else used the cores: {disturbed} of {len(self._peaks)} probes were over "
            f"{1 - QUIET:.0%} below the best, so the times are disturbed and the ratios may be off."
            f"{' Where few cores are free, try --threads 1.' if host.get_num_threads() > 1 else ''}"
        )
