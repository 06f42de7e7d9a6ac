"""Two runs side by side: did fastattn become slower?

Times of two runs say little: the clock, the caches and the neighbours of a shared machine were others. So
our time is held against a yardstick that was measured in the same rounds, and the two figures are compared:

- **peers**: our time over the geometric mean of the peers' times, taken round by round, over the peers
  that both runs timed in every round, in the same version, through the same way;
- **limit**: our time over the least that the machine allowed just then, the inverse of the share of the
  limit.

Two runs of the same code differ by more than their rounds show, as a neighbour may be there for the whole of
a case. The cases that became faster show how large this effect is, because it slows down as many cases as it
speeds up. The mean over many cases is known well, however few rounds each has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fastattn.bench.intervals import ENOUGH, Estimate, change_interval, geometric_mean_interval
from fastattn.bench.peers import OURS
from fastattn.bench.summary import trusted_shares

#: A change below this is none. Equal runs differ by a few percent in what no round sees: where the arrays
#: lie in memory, which neighbours the machine has.
MIN_CHANGE = 0.05

#: A case is only judged when its change is so many times the scatter of those in the other direction.
SCATTER_FACTOR = 2.0

#: Fields of a case that change nothing of what is computed.
IRRELEVANT = frozenset({"group", "origin", "quick", "baseline", "options", "shape"})

Judgement = Literal["slower", "same", "faster", "unsure"]


#: What stands in place of a case's name for all of them together.
ALL_CASES = "all cases"


@dataclass(frozen=True, slots=True)
class Change:
    """Our time in units of a yardstick, in two runs."""

    then: float
    now: float
    ratio: Estimate  #: now over then: above 1 we became slower
    #: the typical factors, above 1, by which cases became faster and by which they became slower
    scatter: tuple[float, float] = (1.0, 1.0)

    @property
    def slower(self) -> bool:
        """Whether the growth is beyond `MIN_CHANGE`, beyond both intervals, and beyond the scatter."""
        beyond = self.ratio.median > self.scatter[0] ** SCATTER_FACTOR
        return beyond and self.ratio.low > 1 + MIN_CHANGE

    @property
    def faster(self) -> bool:
        """The same in the other direction."""
        beyond = self.ratio.median < 1 / self.scatter[1] ** SCATTER_FACTOR
        return beyond and self.ratio.high < 1 / (1 + MIN_CHANGE)


@dataclass(frozen=True, slots=True)
class CaseChange:
    """One case in two runs, or all of them."""

    name: str
    peers: Change | None  #: by the yardstick of the peers
    limit: Change | None  #: by the yardstick of the limit
    samples: int  #: rounds of the run that has fewer; of all cases together, their number
    used: tuple[str, ...] = ()  #: the peers of the yardstick

    @property
    def judgement(self) -> Judgement:
        """By the peers, unless the limit contradicts it; by the limit alone where no peer can be used.

        "unsure" with fewer samples than are `ENOUGH`, if it would be slower or faster with more.

        A neighbour that slows us down more than the peers makes us look slower beside the peers, but it slows
        down the probes of the limit, too. A change of ours moves both yardsticks.
        """
        found = self._first_judgement
        if found == "same" or not self._confirmed:
            return "same"
        return found if self.samples >= ENOUGH else "unsure"

    @property
    def reason(self) -> str:
        """What the judgement rests on, in words; empty where no yardstick sees a change."""
        found = self._first_judgement
        if found == "same":
            return ""
        if self.peers is not None:
            peers = ", ".join(self.used) or "the peers of each case"
            words = [f"our time over that of {peers}: {_percent(self.peers)}"]
        else:
            words = ["the runs share no peer"]
        if self.limit is not None:
            verdict = "which agrees" if self._confirmed else "which contradicts"
            limit = f"our time over the least that the machine allowed: {_percent(self.limit)}"
            words.append(limit if self.peers is None else f"{limit}, {verdict}")
        if self.judgement == "unsure":
            samples = "cases" if self.name == ALL_CASES else "rounds in each run"
            words.append(f"a verdict takes {ENOUGH} {samples}")
        return "; ".join(words)

    @property
    def _first_judgement(self) -> Judgement:
        """That of the peers, or of the limit where there are none."""
        first = self.peers if self.peers is not None else self.limit
        if first is None or not (first.slower or first.faster):
            return "same"
        return "slower" if first.slower else "faster"

    @property
    def _confirmed(self) -> bool:
        """Whether the limit does not contradict the peers."""
        if self.peers is None or self.limit is None:
            return True
        least = 1 + MIN_CHANGE
        median = self.limit.ratio.median
        return median > least if self._first_judgement == "slower" else median < 1 / least


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs, case by case."""

    changes: tuple[CaseChange, ...]
    overall: CaseChange | None  #: the geometric mean over the cases
    left_out: dict[str, str]  #: cases that cannot be compared, and why
    peers_left_out: tuple[str, ...]  #: peers that no case could use
    warnings: tuple[str, ...]  #: what else differs between the runs

    @property
    def slower(self) -> list[str]:
        every = [*self.changes, *([self.overall] if self.overall is not None else [])]
        return [it.name for it in every if it.judgement == "slower"]


def compare(then: dict[str, Any], now: dict[str, Any]) -> Comparison:
    """Compare two documents, an earlier and a later one."""
    changes: list[CaseChange] = []
    left_out = {}
    for name in dict.fromkeys([*now["cases"], *then["cases"]]):
        reason = _incomparable(then["cases"].get(name), now["cases"].get(name))
        if reason is None:
            before, after = then["cases"][name], now["cases"][name]
            used = tuple(it for it in before["libraries"] if it not in OURS and _same_peer(it, before, after))
            peers = _change(_over_peers(before, used), _over_peers(after, used)) if used else None
            limit = _limit_change(before, after)
            if peers is not None or limit is not None:
                rounds = min(before["rounds"], after["rounds"])
                changes.append(CaseChange(name, peers, limit, rounds, used))
            else:
                reason = "neither a peer of the same version nor the limit is in both runs"
        if reason is not None:
            left_out[name] = reason
    overall = None
    if len(changes) > 1:
        means = _mean([it.peers for it in changes]), _mean([it.limit for it in changes])
        overall = CaseChange(ALL_CASES, *means, samples=len(changes))
    wanted = {peer for change in changes for peer in change.used} | set(OURS)
    names = [name for run in (then, now) for case in run["cases"].values() for name in case["libraries"]]
    unused = tuple(name for name in dict.fromkeys(names) if name not in wanted)
    return Comparison(tuple(_with_scatter(changes)), overall, left_out, unused, tuple(_warnings(then, now)))


def _incomparable(then: dict[str, Any] | None, now: dict[str, Any] | None) -> str | None:
    """Why a case cannot be compared; None when it can."""
    if then is None or now is None:
        return "only in the earlier run" if now is None else "only in this run"
    for run, which in ((then, "the earlier"), (now, "this")):
        if not len(_times(run, OURS[0])):
            return f"fastattn was not timed in {which} run"
    before, after = then["case"], now["case"]
    changed = [key for key in before if key in after and key not in IRRELEVANT and before[key] != after[key]]
    if changed:
        return f"another case by that name: {', '.join(changed)} changed"
    if then["threads"] != now["threads"]:
        return f"{then['threads']} threads then, {now['threads']} now"
    return None


def _times(run: dict[str, Any], name: str) -> np.ndarray:
    """Seconds per call by round, if the library was timed in every finished one; else empty."""
    library = run["libraries"].get(name, {"reason": "not asked for"})
    if library.get("reason") is not None or len(library["medians"]) != run["rounds"]:
        return np.array([])
    return np.array(library["medians"])


def _same_peer(name: str, then: dict[str, Any], now: dict[str, Any]) -> bool:
    if not len(_times(then, name)) or not len(_times(now, name)):
        return False
    before, after = then["libraries"][name], now["libraries"][name]
    return all(before.get(key) == after.get(key) for key in ("version", "chosen"))


def _over_peers(run: dict[str, Any], peers: Sequence[str]) -> np.ndarray:
    logs = [np.log(_times(run, name)) for name in peers]
    return _times(run, OURS[0]) / np.exp(np.mean(logs, axis=0))


def _over_limit(run: dict[str, Any]) -> np.ndarray | None:
    samples = {
        name: np.array(library["limit_shares"])
        for name, library in run["libraries"].items()
        if library["limit_shares"]
    }
    if OURS[0] not in samples:
        return None
    shares, _ = trusted_shares(samples)[OURS[0]]
    return 1 / shares


def _change(then: np.ndarray, now: np.ndarray) -> Change:
    return Change(float(np.median(then)), float(np.median(now)), change_interval(then, now))


def _limit_change(then: dict[str, Any], now: dict[str, Any]) -> Change | None:
    """By the yardstick of the limit; None where a run has none, or another one binds."""
    before, after = _over_limit(then), _over_limit(now)
    if before is None or after is None or then.get("kind") != now.get("kind"):
        return None
    return _change(before, after)


def _mean(changes: Sequence[Change | None]) -> Change | None:
    """The geometric mean; its interval comes from the cases, which scatter by all there is."""
    known = [it for it in changes if it is not None]
    if not known:
        return None
    then, now = (np.exp(np.mean(np.log([getattr(it, run) for it in known]))) for run in ("then", "now"))
    ratio = geometric_mean_interval(np.array([it.ratio.median for it in known]))
    return Change(float(then), float(now), ratio)


def _with_scatter(changes: Sequence[CaseChange]) -> list[CaseChange]:
    """`changes`, each with the typical factors of all of them."""
    by_peers = _scatter([it.peers for it in changes])
    by_limit = _scatter([it.limit for it in changes])
    return [
        replace(
            it,
            peers=it.peers and replace(it.peers, scatter=by_peers),
            limit=it.limit and replace(it.limit, scatter=by_limit),
        )
        for it in changes
    ]


def _percent(change: Change) -> str:
    return f"{change.ratio.median - 1:+.0%}"


def _scatter(changes: Sequence[Change | None]) -> tuple[float, float]:
    """The typical factor of the cases that became faster, and of those that became slower; 1 where none did.

    Of a factor f of all of these the logarithm is the root mean square of theirs.
    """
    logs = np.log([it.ratio.median for it in changes if it is not None])
    faster, slower = logs[logs < 0], logs[logs > 0]
    typical = (float(np.exp(np.sqrt(np.mean(it**2)))) if len(it) else 1.0 for it in (faster, slower))
    return next(typical), next(typical)


def _warnings(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between the runs besides fastattn, in words."""
    pairs = [
        ("threads", then["threads"], now["threads"]),
        *((key, then["machine"].get(key), now["machine"].get(key)) for key in ("cpu", "cores", "system")),
        *(
            (f"version of {name}", then["versions"][name], now["versions"][name])
            for name in then["versions"]
            if name in now["versions"] and name not in OURS
        ),
    ]
    return [f"{what}: {before} then, {after} now" for what, before, after in pairs if before != after]
