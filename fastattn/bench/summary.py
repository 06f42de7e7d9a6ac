"""What the rounds say: ratios with intervals, shares of the limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fastattn.bench.intervals import Estimate, median_interval
from fastattn.bench.limits import Kind, bounds, medians
from fastattn.bench.peers import OURS
from fastattn.bench.quiet import count_disturbed
from fastattn.bench.records import CaseRun, LibraryRun

#: A call is undisturbed when both probes beside it are at least this share of the best ones of the case; a
#: neighbour on a core leaves 50 to 80 % of the integer peak.
UNDISTURBED = 0.95

#: How many undisturbed calls a share of the limit needs; with fewer it is taken from all calls.
ENOUGH_UNDISTURBED = 5


@dataclass(frozen=True, slots=True)
class Share(Estimate):
    """A share of the limit: of the undisturbed calls if they are enough, else of all."""

    undisturbed: int  #: calls during which no neighbour was on the cores
    calls: int

    @property
    def enough(self) -> bool:
        return self.undisturbed >= ENOUGH_UNDISTURBED


@dataclass(frozen=True, slots=True)
class CaseLimit:
    """What the machine allows a case at most."""

    kind: Kind
    seconds: float  #: by the medians of the probes around the rounds
    share: Share | None  #: of fastattn, by the probes beside its calls; None when it was not timed


@dataclass(frozen=True, slots=True)
class CaseSummary:
    """The figures of one case, as the table prints them."""

    seconds: dict[str, float]  #: median time per call of each library that was timed
    ratios: dict[str, Estimate]  #: each peer's time over ours
    best: str | None  #: the fastest peer
    limit: CaseLimit | None
    shares: dict[str, Share]  #: of the limit, of each build of fastattn
    slowdown: Estimate | None  #: our time over our time of the baseline


def _timed(run: CaseRun) -> dict[str, np.ndarray]:
    """Seconds per call of every library that was timed, in all rounds or in the first ones."""
    return {
        name: np.array(library.medians)
        for name, library in run.libraries.items()
        if library.reason is None and library.medians
    }


def ratios_to_ours(run: CaseRun) -> dict[str, Estimate]:
    """Each library's time over ours, taken round by round: a drift of the machine falls on both sides."""
    timed = _timed(run)
    if OURS[0] not in timed:
        return {}
    ours = timed.pop(OURS[0])
    return {name: median_interval(theirs / ours[: len(theirs)]) for name, theirs in timed.items()}


def best_peer(ratios: dict[str, Estimate]) -> str | None:
    """The fastest library that is not this project."""
    peers = [name for name in ratios if name not in OURS]
    return min(peers, key=lambda name: ratios[name].median, default=None)


def summarise(run: CaseRun) -> CaseSummary:
    """The figures of `run`, which has finished rounds or was only checked."""
    timed, ratios = _timed(run), ratios_to_ours(run)
    best = best_peer(ratios)
    shares = _shares(run)
    limit = None
    if run.kind is not None:
        at_most = bounds(run.case, run.threads, medians(run.limits))[run.kind]
        limit = CaseLimit(run.kind, at_most, shares.get(OURS[0]))
    slowdown = None
    if OURS[0] in timed and run.baseline is not None and run.baseline.reason is None:
        slowdown = median_interval(timed[OURS[0]] / np.array(run.baseline.medians))
    return CaseSummary(
        seconds={name: float(np.median(theirs)) for name, theirs in timed.items()},
        ratios=ratios,
        best=best,
        limit=limit,
        shares=shares,
        slowdown=slowdown,
    )


def trusted_shares(samples: Mapping[str, np.ndarray]) -> dict[str, tuple[np.ndarray, int]]:
    """Of the `limit_shares` of each build: the shares that count, and how many calls were undisturbed."""
    if not samples:
        return {}
    best = np.max([it[:, 1:].max(axis=0) for it in samples.values()], axis=0)
    found = {}
    for name, measured in samples.items():
        quiet = np.all(measured[:, 1:] >= UNDISTURBED * best, axis=1)
        count = int(np.count_nonzero(quiet))
        found[name] = (measured[quiet, 0] if count >= ENOUGH_UNDISTURBED else measured[:, 0], count)
    return found


def _shares(run: CaseRun) -> dict[str, Share]:
    samples = {name: np.array(it.limit_shares) for name, it in run.libraries.items() if it.limit_shares}
    found = {}
    for name, (shares, undisturbed) in trusted_shares(samples).items():
        estimate = median_interval(shares)
        found[name] = Share(estimate.median, estimate.low, estimate.high, undisturbed, len(samples[name]))
    return found


def geometric_means(summaries: Sequence[CaseSummary]) -> dict[str, tuple[float, int, int]]:
    """Of each peer, and of the best of each case: the geometric mean of its time over ours, the number of
    cases on which it took longer than ours, and the number of cases."""
    ratios: dict[str, list[float]] = {}
    for summary in summaries:
        if summary.best is not None:
            ratios.setdefault("best peer", []).append(summary.ratios[summary.best].median)
        for name, ratio in summary.ratios.items():
            if name not in OURS:
                ratios.setdefault(name, []).append(ratio.median)
    return {
        name: (float(np.exp(np.mean(np.log(it)))), sum(ratio > 1 for ratio in it), len(it))
        for name, it in ratios.items()
    }


def disturbed_probes(runs: Sequence[CaseRun]) -> tuple[int, int]:
    """How many probes of the float32 peak were disturbed, and how many there are."""
    probes: dict[int, list[float]] = {}
    for run in runs:
        for probe in run.limits:
            if "float32" in probe["fma"]:
                probes.setdefault(run.threads, []).append(probe["fma"]["float32"][str(run.threads)])
    return sum(map(count_disturbed, probes.values())), sum(map(len, probes.values()))


def error_ratios(libraries: dict[str, LibraryRun]) -> tuple[float, float] | None:
    """fastattn's largest and root-mean-square error over torch's; None when either has none."""
    ours, theirs = (libraries.get(name, LibraryRun()) for name in (OURS[0], "torch"))
    if not (ours.error is not None and ours.rms_error is not None and theirs.error and theirs.rms_error):
        return None
    return ours.error / theirs.error, ours.rms_error / theirs.rms_error
