"""Check every library on a case, then time those that are right in interleaved rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fastattn.bench.case import Case
from fastattn.bench.cases import CASES
from fastattn.bench.intervals import ENOUGH, median_interval
from fastattn.bench.limits import Kind, Limits, bounds
from fastattn.bench.peers import OURS, taking_part
from fastattn.bench.process import Crew, Worker, WorkerError
from fastattn.bench.records import CaseRun, LibraryRun
from fastattn.bench.summary import best_peer, ratios_to_ours
from fastattn.bench.worker import LIMITS, LONG_CALL_SECONDS

#: A burst of one library takes about this long, with the products of a model where it stands in one: many
#: clock ticks, and short beside the drift of the machine.
BURST_SECONDS = 0.08

#: A burst has at least this many calls, but for those of `LONG_CALL_SECONDS` and more, which are called once.
MIN_CALLS = 2

#: A peer that takes this many times as long as the fastest one is timed in the first `TRIAL_ROUNDS` only: a
#: call of a second in each of forty rounds would leave the others without time for more rounds.
LAGGING, TRIAL_ROUNDS = 4.0, 3

#: Told what happens next while nothing is being timed.
Notify = Callable[[str], None]


def ignore(_: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class Patience:
    """When a case ends."""

    seconds: float  #: no round begins that would end so long after the case began to be checked
    least: int = ENOUGH  #: the fewest rounds, however long they take
    most: int = 40
    precision: float = 0.02  #: half the width of the interval over the median, from `ENOUGH` on
    share_seconds: float = 0.4  #: per round, for the share of the limit: only undisturbed calls count there

    def ended(self, rounds: int, round_seconds: float, elapsed: float, precision: float) -> bool:
        """Whether `rounds` rounds are enough.

        Parameters
        ----------
        rounds
            How many are finished.
        round_seconds
            How long one takes.
        elapsed
            Seconds since the case began.
        precision
            What the rounds gave.
        """
        if rounds >= self.most:
            return True
        if rounds < self.least:
            return False
        if elapsed + round_seconds > self.seconds:
            return True
        return rounds >= ENOUGH and precision <= self.precision


def check(case: Case, crew: Crew, names: Sequence[str], notify: Notify = ignore) -> CaseRun:
    """Compare every library in `names` with the right answer; those that are right stay ready to be timed."""
    notify("computing the right answer")
    path, oracle = crew.expected(case)
    run = CaseRun(case, crew.threads(case), oracle)
    for name in taking_part(names, case):
        notify(f"checking {name}")
        run.libraries[name], tolerance = _check_one(case, crew.worker(name, run.threads), path)
        run.tolerance = run.tolerance if tolerance is None else tolerance
    crew.forget(path)
    return run


def _check_one(case: Case, worker: Worker, path: str) -> tuple[LibraryRun, float | None]:
    """What the check found, and the error that it allowed."""
    try:
        found = worker.ask("prepare", case=asdict(case), expected=path)
    except WorkerError as problem:
        return LibraryRun(reason=str(problem)), None
    library = LibraryRun(
        version=found["version"], chosen=found["chosen"], copies=found["copies"], ways=found["ways"]
    )
    shown = library.ways.get(library.chosen or "")
    if shown is None:
        library.reason = "; ".join(f"{label}: {way['reason']}" for label, way in library.ways.items())
        wrong = [way for way in library.ways.values() if "error" in way]
        library.wrong = bool(wrong)
        shown = wrong[0] if wrong else {}
    library.error, library.rms_error = shown.get("error"), shown.get("rms_error")
    return library, found["tolerance"]


@dataclass(slots=True)
class _Contestant:
    """One library on one case, in the rounds."""

    worker: Worker
    case: str
    library: LibraryRun
    seconds: float
    products: float  #: seconds of the products around a call, in a model
    kind: Kind | None  #: the limit of which it is asked for its share, if it is

    def burst(self, share_seconds: float) -> None:
        fewest = MIN_CALLS if self.seconds < LONG_CALL_SECONDS else 1
        calls = max(fewest, round(BURST_SECONDS / (self.seconds + self.products)))
        try:
            took = self.worker.ask("time", case=self.case, calls=calls, seconds=self.seconds)
            self.seconds = took["median"]
            self.library.medians.append(took["median"])
            self.library.mins.append(took["min"])
            if took["products"] is not None:
                self.library.products.append(took["products"])
            if self.kind is not None:
                shares = self.worker.ask(
                    "limit_shares", case=self.case, kind=self.kind, seconds=share_seconds
                )
                self.library.limit_shares += map(tuple, shares)
        except WorkerError as problem:
            self.library.reason = str(problem)


def measure(
    case: Case, crew: Crew, names: Sequence[str], patience: Patience, notify: Notify = ignore
) -> CaseRun:
    """Check `case`, then time every right library once in each round, until `patience` ends.

    The order rotates by one from round to round, so that no library always follows the same one. The
    machine's limits are measured before each round and after the last. Ctrl-C in the rounds ends them; what
    it returns then is marked `interrupted` and has the finished ones.
    """
    start = time.monotonic()
    run = check(case, crew, names, notify)
    notify("measuring the machine's limits")
    _probe_limits(crew, run, bandwidth=True)
    seconds = bounds(case, run.threads, run.limits[0])
    if seconds:
        _, run.kind = max((longest, kind) for kind, longest in seconds.items())

    contestants = [
        _contestant(crew, name, case, library, run)
        for name, library in run.libraries.items()
        if library.chosen is not None
    ]
    if case.baseline is not None and any(it.worker.name == OURS[0] for it in contestants):
        contestants.append(_baseline(CASES[case.baseline], crew, run, notify))

    try:
        _rounds(run, contestants, crew, patience, start, notify)
    except KeyboardInterrupt:  # a worker may be in the middle of its answer: ask none of them again
        run.interrupted = True
    else:
        crew.release()
    # What the last round left undone is dropped: figures of one round stand side by side.
    for library in filter(None, (*run.libraries.values(), run.baseline)):
        del library.medians[run.rounds :], library.mins[run.rounds :], library.products[run.rounds :]
    return run


def _rounds(
    run: CaseRun,
    contestants: list[_Contestant],
    crew: Crew,
    patience: Patience,
    start: float,
    notify: Notify,
) -> None:
    first = time.monotonic()
    done = not contestants
    while not done:
        notify(f"round {run.rounds + 1}, {patience.most} at most")
        turn = run.rounds % len(contestants)
        for contestant in contestants[turn:] + contestants[:turn]:
            if contestant.library.reason is None:
                contestant.burst(patience.share_seconds)
        _probe_limits(crew, run, bandwidth=run.case.cold)
        run.rounds += 1
        if run.rounds == TRIAL_ROUNDS:
            contestants = _in_the_race(contestants)
        now = time.monotonic()
        done = patience.ended(run.rounds, (now - first) / run.rounds, now - start, _precision(run))


def _in_the_race(contestants: list[_Contestant]) -> list[_Contestant]:
    """Those of them that are ours, or not far slower than the fastest peer."""
    peers = [it.seconds for it in contestants if it.worker.name not in OURS and it.library.reason is None]
    slowest = LAGGING * min(peers, default=0.0)
    return [it for it in contestants if it.worker.name in OURS or it.seconds <= slowest]


def _precision(run: CaseRun) -> float:
    """How well the figure that matters is known: the best peer's ratio; without peers, the first time."""
    ratios = ratios_to_ours(run)
    best = best_peer(ratios)
    if best is not None:
        return ratios[best].precision
    timed = [it.medians for it in run.libraries.values() if it.reason is None and it.medians]
    return median_interval(np.array(timed[0])).precision if timed else 0.0


def _contestant(crew: Crew, name: str, case: Case, library: LibraryRun, run: CaseRun) -> _Contestant:
    way = library.ways[library.chosen] if library.chosen is not None else {"seconds": 1.0, "products": 0.0}
    # None is taken in a model: threads that spin after a product would slow the probes down, too.
    asked = name in OURS and case is run.case and case.model_dim is None
    kind = run.kind if asked else None
    return _Contestant(
        crew.worker(name, run.threads), case.name, library, way["seconds"], way["products"], kind
    )


def _baseline(case: Case, crew: Crew, run: CaseRun, notify: Notify) -> _Contestant:
    """fastattn on the baseline case, to be timed in the same rounds."""
    notify(f"preparing {case.name}")
    path, _ = crew.expected(case)
    run.baseline, _ = _check_one(case, crew.worker(OURS[0], run.threads), path)
    crew.forget(path)
    return _contestant(crew, OURS[0], case, run.baseline, run)


def _probe_limits(crew: Crew, run: CaseRun, *, bandwidth: bool) -> None:
    """One probe more; a limit that could not be measured once is not tried again in this case."""
    probe: Limits = {
        "fma": _ask_limit("fma", crew, run),
        "read_bandwidth": _ask_limit("read_bandwidth", crew, run) if bandwidth else {},
    }
    run.limits.append(probe)


def _ask_limit(command: str, crew: Crew, run: CaseRun) -> dict[str, Any]:
    if command in run.no_limits:
        return {}
    try:
        found: dict[str, Any] = crew.worker(LIMITS, run.threads).ask(command)
    except WorkerError as problem:
        run.no_limits[command] = str(problem)
        return {}
    return found


def measure_memory(case: Case, name: str, num_threads: int) -> dict[str, dict[str, Any]]:
    """Peak memory of a library's first call, and of one after a tiny call; each in a fresh process."""
    found: dict[str, dict[str, Any]] = {}
    for kind in ("first", "warm"):
        with Worker(name, num_threads) as worker:
            try:
                found[kind] = worker.ask("memory", case=asdict(case), warm=kind == "warm")
            except WorkerError as problem:
                found[kind] = {"reason": str(problem)}
    return found
