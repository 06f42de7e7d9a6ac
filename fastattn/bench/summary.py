"""What the rounds say: ratios with intervals, shares of the peak, verdicts against the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastattn.bench.measure import CaseRun, LibraryRun
from fastattn.bench.peers import OURS

#: Resamples of the rounds, and the share of them inside the interval that is given.
RESAMPLES, COVERAGE = 2000, 0.95


#: A machine that nothing else uses keeps its peak to within this share of the best probe.
QUIET = 0.9

#: A call is undisturbed when both peaks beside it are at least this share of the best ones of the case; a
#: neighbour on a core leaves 50 to 80 % of the integer peak.
UNDISTURBED = 0.95

#: A share of the peak is taken from the undisturbed calls when there are so many of them, else from all.
ENOUGH_UNDISTURBED = 5


@dataclass(frozen=True, slots=True)
class Estimate:
    """The median over the rounds and its bootstrap interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PeakShare:
    """A share of the FMA peak."""

    estimate: Estimate  #: of the undisturbed calls if they are enough, else of all
    undisturbed: int  #: calls during which no neighbour was on the cores
    calls: int

    @property
    def enough(self) -> bool:
        return self.undisturbed >= ENOUGH_UNDISTURBED


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target of a case, and whether it was met."""

    name: str
    value: float | None  #: None when it could not be measured
    bound: float
    at_least: bool

    @property
    def met(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.bound if self.at_least else self.value <= self.bound


@dataclass(frozen=True, slots=True)
class CaseSummary:
    """The figures of one case, as the table prints them."""

    seconds: dict[str, float]  #: median time per call of each library that was timed
    ratios: dict[str, Estimate]  #: each peer's time over ours
    best: str | None  #: the fastest peer
    peak: dict[str, PeakShare]  #: of fastattn
    slowdown: Estimate | None  #: our time over our time of the baseline
    verdicts: tuple[Verdict, ...]


def median_interval(values: np.ndarray) -> Estimate:
    """Median of `values`, with the bootstrap interval that covers `COVERAGE`."""
    rng = np.random.default_rng(0)
    picks = rng.integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(np.median(values[picks], axis=1), [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Estimate(float(np.median(values)), float(low), float(high))


def summarise(run: CaseRun) -> CaseSummary:
    """Ratios are taken round by round, so that a drift of the machine falls on both sides."""
    timed = {
        name: np.array(library.medians)
        for name, library in run.libraries.items()
        if library.reason is None and library.medians
    }
    ours = timed.get(OURS[0])
    ratios = {}
    if ours is not None:
        ratios = {name: median_interval(theirs / ours) for name, theirs in timed.items() if name != OURS[0]}
    peers = [name for name in ratios if name not in OURS]
    best = min(peers, key=lambda name: ratios[name].median, default=None)

    peak = _peak_shares(run)
    slowdown = None
    if ours is not None and run.baseline is not None and run.baseline.reason is None:
        slowdown = median_interval(ours / np.array(run.baseline.medians))

    return CaseSummary(
        seconds={name: float(np.median(theirs)) for name, theirs in timed.items()},
        ratios=ratios,
        best=best,
        peak=peak,
        slowdown=slowdown,
        verdicts=_verdicts(run, ratios, best, peak, slowdown),
    )


def _peak_shares(run: CaseRun) -> dict[str, PeakShare]:
    samples = {name: np.array(it.peak_shares) for name, it in run.libraries.items() if it.peak_shares}
    if not samples:
        return {}
    best = np.max([it[:, 1:].max(axis=0) for it in samples.values()], axis=0)
    found = {}
    for name, measured in samples.items():
        shares, probes = measured[:, 0], measured[:, 1:]
        undisturbed = shares[np.all(probes >= UNDISTURBED * best, axis=1)]
        chosen = undisturbed if len(undisturbed) >= ENOUGH_UNDISTURBED else shares
        found[name] = PeakShare(median_interval(chosen), len(undisturbed), len(shares))
    return found


def _verdicts(
    run: CaseRun,
    ratios: dict[str, Estimate],
    best: str | None,
    peak: dict[str, PeakShare],
    slowdown: Estimate | None,
) -> tuple[Verdict, ...]:
    targets = run.case.targets
    rows = (
        ("best peer", ratios.get(best) if best else None, targets.best, True),
        ("torch", ratios.get("torch"), targets.torch, True),
        ("peak", peak[OURS[0]].estimate if OURS[0] in peak else None, targets.peak, True),
        ("peak, AVX2", peak[OURS[1]].estimate if OURS[1] in peak else None, targets.peak_avx2, True),
        ("over baseline", slowdown, targets.slowdown, False),
    )
    return tuple(
        Verdict(name, None if estimate is None else estimate.median, bound, at_least)
        for name, estimate, bound, at_least in rows
        if bound is not None
    )


def disturbed_probes(runs: Sequence[CaseRun], num_threads: int) -> tuple[int, int]:
    """How many probes of the float32 peak fell below `QUIET` of the best one, and how many there are."""
    probes = np.array([probe["float32"][str(num_threads)] for run in runs for probe in run.peaks])
    return int(np.count_nonzero(probes < QUIET * probes.max(initial=0.0))), len(probes)


def error_ratios(libraries: dict[str, LibraryRun]) -> tuple[float, float] | None:
    """fastattn's largest and root-mean-square error over torch's; None when either has none."""
    ours, theirs = (libraries.get(name, LibraryRun()) for name in (OURS[0], "torch"))
    if not (ours.error is not None and ours.rms_error is not None and theirs.error and theirs.rms_error):
        return None
    return ours.error / theirs.error, ours.rms_error / theirs.rms_error
