"""What was measured, as plain records: `measure` fills them, everything below reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastattn.bench.case import Case
from fastattn.bench.limits import Kind, Limits


@dataclass(slots=True)
class LibraryRun:
    """What one library did on one case; no times when there is a `reason`."""

    reason: str | None = None  #: why it was not timed
    wrong: bool = False  #: whether that is because no way was right and one was wrong
    version: str | None = None
    chosen: str | None = None  #: the way that was timed
    error: float | None = (
        None  #: largest error of that way, or of the first wrong one; see `tasks.Task.errors`
    )
    rms_error: float | None = None
    copies: int = 1  #: sets of inputs that the calls cycle through; more than one where they are cold
    ways: dict[str, dict[str, Any]] = field(default_factory=dict)  #: what `LibraryWorker.prepare` found
    medians: list[float] = field(
        default_factory=list
    )  #: seconds per call, one per round; of slow peers, of the first ones
    mins: list[float] = field(default_factory=list)
    products: list[float] = field(default_factory=list)  #: seconds of the products around a call, in a model
    #: of fastattn's builds only, from all rounds: a share of the limit, the limit (FLOP/s or bytes/s) and
    #: the integer peak (1/s), both as measured beside the call
    limit_shares: list[tuple[float, float, float]] = field(default_factory=list)


@dataclass(slots=True)
class CaseRun:
    """What was measured on one case."""

    case: Case
    threads: int
    oracle: str  #: the precision it was checked in
    rounds: int = 0  #: finished ones
    interrupted: bool = False  #: whether more rounds were wanted
    tolerance: float | None = None
    libraries: dict[str, LibraryRun] = field(default_factory=dict)
    baseline: LibraryRun | None = None  #: fastattn on the case's baseline, in the same rounds
    kind: Kind | None = None  #: the limit that `limit_shares` are shares of
    limits: list[Limits] = field(default_factory=list)  #: before each round and after the last
    no_limits: dict[str, str] = field(default_factory=dict)  #: which limits could not be measured, and why
