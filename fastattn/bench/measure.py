"""Check every library on a case, then time those that are right in interleaved rounds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from fastattn.bench.cases import CASES, Case
from fastattn.bench.peers import OURS
from fastattn.bench.process import Worker, WorkerError
from fastattn.bench.worker import LIMITS, ORACLE

#: A burst of one library takes about this long: many clock ticks, and short beside the drift of the machine.
BURST_SECONDS = 0.08

#: A burst for the share of the peak: longer, because only the calls that nobody disturbed count.
PEAK_SECONDS = 0.4

#: A burst has at least this many calls, however long they are.
MIN_CALLS = 2

#: Peaks of one probe: ``{dtype: {threads: FLOP/s}}``.
Peaks = dict[str, dict[str, float]]

#: Told what happens next while nothing is being timed.
Notify = Callable[[str], None]


def ignore(_: str) -> None:
    """Tell nobody."""


@dataclass(slots=True)
class LibraryRun:
    """What one library did on one case; no times when there is a `reason`."""

    reason: str | None = None  #: why it was not timed
    wrong: bool = False  #: whether that is because no way was right and one was wrong
    version: str | None = None
    chosen: str | None = None  #: the way that was timed
    error: float | None = None  #: largest absolute error of that way, or of the first wrong one
    rms_error: float | None = None
    ways: dict[str, dict[str, Any]] = field(default_factory=dict)  #: what `LibraryWorker.prepare` found
    medians: list[float] = field(default_factory=list)  #: seconds per call, one per round
    mins: list[float] = field(default_factory=list)
    #: of ours only, from all rounds: a share of the FMA peak, and beside it the FMA and the integer peak, 1/s
    peak_shares: list[tuple[float, float, float]] = field(default_factory=list)


@dataclass(slots=True)
class CaseRun:
    """What was measured on one case."""

    case: Case
    rounds: int
    oracle: str  #: the precision it was checked in
    tolerance: float | None = None
    libraries: dict[str, LibraryRun] = field(default_factory=dict)
    baseline: LibraryRun | None = None  #: fastattn on the case's baseline, in the same rounds
    peaks: list[Peaks] = field(default_factory=list)  #: before each round and after the last
    no_peaks: str | None = None  #: why there are none


class Crew:
    """The workers: started when first needed, started again when they died, ended together."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._workers: dict[str, Worker] = {}
        self._answers = tempfile.TemporaryDirectory(prefix="fastattn-benchmarks-")

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers.values():
            worker.close()
        self._answers.cleanup()

    def worker(self, name: str) -> Worker:
        """The worker called `name`, running or new."""
        worker = self._workers.get(name)
        if worker is None or not worker.alive:
            if worker is not None:
                worker.close()
            worker = self._workers[name] = Worker(name, self.num_threads)
        return worker

    def expected(self, case: Case) -> tuple[str, str]:
        """The file with the right answer of `case`, and the precision it is in."""
        path = str(Path(self._answers.name) / f"{case.name}.npy")
        # A worker for each answer: its memory is given back, and the long double ones are few.
        with Worker(ORACLE, self.num_threads) as oracle:
            return path, oracle.ask("expected", case=case.name, path=path)["dtype"]

    def forget(self, path: str) -> None:
        """Delete the right answer at `path`."""
        Path(path).unlink()

    def release(self, names: Sequence[str]) -> None:
        """Have the workers in `names` forget what they prepared."""
        for name in names:
            if self._workers[name].alive:
                self._workers[name].ask("release")


def check(case: Case, crew: Crew, names: Sequence[str], notify: Notify = ignore) -> CaseRun:
    """Compare every library in `names` with the right answer; those that are right stay ready to be timed."""
    notify("computing the right answer")
    path, oracle = crew.expected(case)
    run = CaseRun(case, 0, oracle)
    for name in names:
        notify(f"checking {name}")
        run.libraries[name] = _check_one(case.name, crew, name, path, run)
    crew.forget(path)
    return run


def _check_one(case: str, crew: Crew, name: str, path: str, run: CaseRun) -> LibraryRun:
    try:
        found = crew.worker(name).ask("prepare", case=case, expected=path)
    except WorkerError as problem:
        return LibraryRun(reason=str(problem))
    run.tolerance = found["tolerance"]
    library = LibraryRun(version=found["version"], chosen=found["chosen"], ways=found["ways"])
    shown = library.ways.get(library.chosen or "")
    if shown is None:
        library.reason = "; ".join(f"{label}: {way['reason']}" for label, way in library.ways.items())
        wrong = [way for way in library.ways.values() if "error" in way]
        library.wrong = bool(wrong)
        shown = wrong[0] if wrong else {}
    library.error, library.rms_error = shown.get("error"), shown.get("rms_error")
    return library


@dataclass(slots=True)
class _Contestant:
    """One library on one case, in the rounds."""

    worker: Worker
    case: str
    library: LibraryRun
    seconds: float

    def burst(self) -> None:
        calls = max(MIN_CALLS, round(BURST_SECONDS / self.seconds))
        try:
            took = self.worker.ask("time", case=self.case, calls=calls, seconds=self.seconds)
            self.seconds = took["median"]
            self.library.medians.append(took["median"])
            self.library.mins.append(took["min"])
            if self.worker.name in OURS:
                shares = self.worker.ask("peak_shares", case=self.case, seconds=PEAK_SECONDS)
                self.library.peak_shares += map(tuple, shares)
        except WorkerError as problem:
            self.library.reason = str(problem)


def measure(case: Case, crew: Crew, names: Sequence[str], rounds: int, notify: Notify = ignore) -> CaseRun:
    """Check `case`, then time every right library once in each of `rounds` rounds.

    The order rotates by one from round to round, so that no library always follows the same one. The
    machine's peak is measured before each round and after the last.
    """
    run = check(case, crew, names, notify)
    contestants = [
        _Contestant(crew.worker(name), case.name, library, library.ways[library.chosen]["seconds"])
        for name, library in run.libraries.items()
        if library.chosen is not None
    ]
    if case.baseline is not None and any(it.worker.name == OURS[0] for it in contestants):
        contestants.append(_baseline(case.baseline, crew, run, notify))

    run.peaks = _peaks(crew, run)
    for number in range(rounds):
        notify(f"round {number + 1} of {rounds}")
        turn = number % max(1, len(contestants))
        for contestant in contestants[turn:] + contestants[:turn]:
            if contestant.library.reason is None:
                contestant.burst()
        run.peaks += _peaks(crew, run)
        run.rounds = number + 1

    crew.release(names)
    return run


def _baseline(name: str, crew: Crew, run: CaseRun, notify: Notify) -> _Contestant:
    """fastattn on the baseline case, to be timed in the same rounds."""
    notify(f"preparing {name}")
    path, _ = crew.expected(CASES[name])
    run.baseline = _check_one(name, crew, OURS[0], path, run)
    crew.forget(path)
    seconds = 1.0
    if run.baseline.chosen is not None:
        seconds = run.baseline.ways[run.baseline.chosen]["seconds"]
    return _Contestant(crew.worker(OURS[0]), name, run.baseline, seconds)


def _peaks(crew: Crew, run: CaseRun) -> list[Peaks]:
    if run.no_peaks is not None:
        return []
    try:
        return [crew.worker(LIMITS).ask("peaks")]
    except WorkerError as problem:
        run.no_peaks = str(problem)
        return []
