"""The same work with two kinds of attention, fastattn's and the plain NumPy formula's, timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from fastattn.bench.quiet import CoreProbes

# As many rounds as fit into the time, within these bounds: medians of fewer are not worth printing.
MIN_ROUNDS, MAX_ROUNDS, SECONDS = 3, 15, 10.0

Floats = np.ndarray  # of float32
Attend = Callable[..., Floats]
Track = Callable[[Sequence[Any]], Iterable[Any]]


@dataclass
class Contender:
    """An attention function with a stopwatch around it, so that a model can be timed in one piece."""

    attend: Attend
    attention_seconds: list[float] = field(default_factory=list)  #: one per run, all its calls together
    model_seconds: list[float] = field(default_factory=list)  #: one per run

    def __call__(self, *arrays: Floats) -> Floats:
        start = perf_counter()
        out = self.attend(*arrays)
        self.attention_seconds[-1] += perf_counter() - start
        return out

    def run(self, work: Callable[[Attend], Floats]) -> Floats:
        """Do all the work, and note the time that attention took and the time that all of it took."""
        self.attention_seconds.append(0.0)
        start = perf_counter()
        out = work(self)
        self.model_seconds.append(perf_counter() - start)
        return out


@dataclass(frozen=True)
class Times:
    """Median seconds over the rounds, of one piece of work."""

    fast_attention: float
    fast_model: float
    plain_attention: float
    plain_model: float


@dataclass(frozen=True)
class Comparison:
    """What the rounds gave."""

    rounds: int
    times: dict[str, Times]  #: of each piece of work
    largest_difference: float  #: between the two, in any number of any result
    warning: str | None  #: that the machine was too busy to be timed


def compare(
    works: Mapping[str, Callable[[Attend], Floats]], fast: Attend, plain: Attend, track: Track
) -> Comparison:
    """Do each piece of work, a function of the attention it uses, with both.

    The first round warms up and compares the results; it is not counted. `track` may show the progress.
    """
    pairs = {name: (Contender(fast), Contender(plain)) for name in works}
    differences = [
        float(np.abs(one.run(works[name]) - other.run(works[name])).max())
        for name, (one, other) in track(tuple(pairs.items()))
    ]
    one_round = sum(contender.model_seconds[0] for pair in pairs.values() for contender in pair)
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(SECONDS / one_round)))

    warning = take_turns(
        [[partial(one.run, works[name]) for one in pair] for name, pair in pairs.items()], rounds, track
    )
    return Comparison(
        rounds=rounds,
        times={name: _medians(*pair) for name, pair in pairs.items()},
        largest_difference=max(differences),
        warning=warning,
    )


def take_turns(pairs: Sequence[Sequence[Callable[[], object]]], rounds: int, track: Track) -> str | None:
    """Call each pair's functions, interleaved; return a complaint if the machine was too busy for timing.

    The cores are probed before each round and after the last.
    """
    probes = CoreProbes()
    for number in track(range(rounds)):
        probes.take()
        for pair in pairs:
            # The order alternates between rounds, so that neither always has the warmer cache.
            for call in pair if number % 2 else reversed(pair):
                call()
    probes.take()
    return probes.warning()


def _medians(fast: Contender, plain: Contender) -> Times:
    return Times(
        fast_attention=median(fast.attention_seconds[1:]),
        fast_model=median(fast.model_seconds[1:]),
        plain_attention=median(plain.attention_seconds[1:]),
        plain_model=median(plain.model_seconds[1:]),
    )
