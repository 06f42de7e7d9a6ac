"""Two runs side by side: did fastattn become slower?

Times of two runs say little: the clock, the caches and the neighbours of a shared machine were others. So
our time is held against a yardstick that was measured in the same rounds, and the two figures are compared:

- **peers**: our time over the geometric mean of the peers' times, taken round by round, over the peers
  that both runs timed in every round, in the same version, through the same way;
- **limit**: our time over the least that the machine allowed just then, the inverse of the share of the
  limit.

A case has few rounds in a quick run, and its interval is wide then; that of all cases together is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fastattn.bench.intervals import Estimate, change_interval
from fastattn.bench.peers import OURS
from fastattn.bench.summary import trusted_shares

#: A change below this is none. Equal runs differ by a few percent in what no round sees: where the arrays
#: lie in memory, which neighbours the machine has.
MIN_CHANGE = 0.05

#: Fields of a case that change nothing of what is computed.
IRRELEVANT = frozenset({"group", "origin", "quick", "targets", "baseline", "options", "shape"})

Judgement = Literal["slower", "same", "faster"]


#: Our time in units of one yardstick, sampled in the earlier run and in the later one.
_Samples = tuple[np.ndarray, np.ndarray]

#: What stands in place of a case's name for all of them together.
ALL_CASES = "all cases"


@dataclass(frozen=True, slots=True)
class Change:
    """Our time in units of a yardstick, in two runs."""

    then: float
    now: float
    ratio: Estimate  #: now over then: above 1 we became slower

    @property
    def slower(self) -> bool:
        """Whether the growth is beyond `MIN_CHANGE` and beyond what both intervals leave open."""
        return self.ratio.low > 1 + MIN_CHANGE

    @property
    def faster(self) -> bool:
        return self.ratio.high < 1 / (1 + MIN_CHANGE)


@dataclass(frozen=True, slots=True)
class CaseChange:
    """One case in two runs, or all of them."""

    name: str
    peers: Change | None  #: by the yardstick of the peers
    limit: Change | None  #: by the yardstick of the limit
    used: tuple[str, ...] = ()  #: the peers of the yardstick

    @property
    def judgement(self) -> Judgement:
        """By the peers, unless the limit contradicts it; by the limit alone where no peer can be used.

        A neighbour that hurts us more than the peers makes us look slower than them, but it takes the probes
        of the limit along; a change of ours moves both.
        """
        first, second = (self.peers, self.limit) if self.peers is not None else (self.limit, None)
        if first is None:
            return "same"
        if first.slower and (second is None or second.ratio.median > 1 + MIN_CHANGE):
            return "slower"
        if first.faster and (second is None or second.ratio.median < 1 / (1 + MIN_CHANGE)):
            return "faster"
        return "same"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs, case by case."""

    changes: tuple[CaseChange, ...]
    overall: CaseChange | None  #: the geometric mean over the cases, if they are several
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
    by_peers: list[_Samples] = []
    by_limit: list[_Samples] = []
    for name in dict.fromkeys([*now["cases"], *then["cases"]]):
        reason = _incomparable(then["cases"].get(name), now["cases"].get(name))
        if reason is None:
            before, after = then["cases"][name], now["cases"][name]
            used = tuple(it for it in before["libraries"] if it not in OURS and _same_peer(it, before, after))
            peers = [(_over_peers(before, used), _over_peers(after, used))] if used else []
            limit = _both_limits(before, after)
            if peers or limit:
                changes.append(CaseChange(name, _change(peers), _change(limit), used))
                by_peers += peers
                by_limit += limit
            else:
                reason = "neither a peer of the same version nor the limit is in both runs"
        if reason is not None:
            left_out[name] = reason
    overall = None
    if len(changes) > 1:
        overall = CaseChange(ALL_CASES, _change(by_peers), _change(by_limit))
    wanted = {peer for change in changes for peer in change.used} | set(OURS)
    names = [name for run in (then, now) for case in run["cases"].values() for name in case["libraries"]]
    unused = tuple(name for name in dict.fromkeys(names) if name not in wanted)
    return Comparison(tuple(changes), overall, left_out, unused, tuple(_warnings(then, now)))


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


def _both_limits(then: dict[str, Any], now: dict[str, Any]) -> list[_Samples]:
    """Our time over the same limit in both runs; empty where one of them has none."""
    before, after = _over_limit(then), _over_limit(now)
    if before is None or after is None or then.get("kind") != now.get("kind"):
        return []
    return [(before, after)]


def _change(samples: Sequence[_Samples]) -> Change | None:
    """The geometric mean of the changes in `samples`; None where there are none."""
    if not samples:
        return None
    then, now = (
        float(np.exp(np.mean([np.log(np.median(it)) for it in run]))) for run in zip(*samples, strict=True)
    )
    return Change(then, now, change_interval(samples))


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
