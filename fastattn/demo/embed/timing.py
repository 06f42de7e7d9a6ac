"""The same texts through the same model twice: with fastattn, and with the plain NumPy formula."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import numpy as np

from fastattn._quiet import CoreProbes
from fastattn.demo.embed.attention import Attend, Floats, Ints, fast_attention, plain_attention
from fastattn.demo.embed.model import SentenceEncoder

# As many rounds as fit into the time, within these bounds: medians of fewer are not worth printing.
MIN_ROUNDS, MAX_ROUNDS, SECONDS = 3, 15, 10.0

Batches = Sequence[Sequence[Ints]]


@dataclass
class Contender:
    """An attention function with a stopwatch around it, so that the model can be timed in one piece."""

    attend: Attend
    attention_seconds: list[float] = field(default_factory=list)  #: one per run, all its calls together
    model_seconds: list[float] = field(default_factory=list)  #: one per run

    def __call__(self, query: Floats, key: Floats, value: Floats, lengths: Ints) -> Floats:
        start = perf_counter()
        out = self.attend(query, key, value, lengths)
        self.attention_seconds[-1] += perf_counter() - start
        return out

    def run(self, model: SentenceEncoder, batches: Batches) -> Floats:
        """Encode all the batches, and note the time that attention took and the time that all of it took."""
        self.attention_seconds.append(0.0)
        start = perf_counter()
        embeddings = [model.encode(batch, self) for batch in batches]
        self.model_seconds.append(perf_counter() - start)
        return np.concatenate(embeddings)


@dataclass(frozen=True)
class Times:
    """Median seconds over the rounds, of one set of texts."""

    fast_attention: float
    fast_model: float
    plain_attention: float
    plain_model: float


@dataclass(frozen=True)
class Comparison:
    """What the rounds gave."""

    rounds: int
    times: dict[str, Times]  #: of each set of texts
    largest_difference: float  #: between the two, in any number of any embedding
    warning: str | None  #: that the machine was too busy to be timed


def compare(
    model: SentenceEncoder,
    sets: Mapping[str, Batches],
    track: Callable[[Sequence[int]], Iterable[int]],
) -> Comparison:
    """Run both on every set, turn and turn about.

    The first round warms up and compares the results; it is not counted. `track` may show the progress of
    the others. The cores are probed before each round and after the last.
    """
    pairs = {name: (Contender(fast_attention), Contender(plain_attention)) for name in sets}
    differences = [
        float(np.abs(fast.run(model, sets[name]) - plain.run(model, sets[name])).max())
        for name, (fast, plain) in pairs.items()
    ]
    one_round = sum(contender.model_seconds[0] for pair in pairs.values() for contender in pair)
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(SECONDS / one_round)))
    probes = CoreProbes()
    for number in track(range(rounds)):
        probes.take()
        for name, (fast, plain) in pairs.items():
            # Whoever goes first changes from round to round, so that neither always has the warmer cache.
            for contender in (fast, plain) if number % 2 else (plain, fast):
                contender.run(model, sets[name])
    probes.take()
    return Comparison(
        rounds=rounds,
        times={name: _medians(fast, plain) for name, (fast, plain) in pairs.items()},
        largest_difference=max(differences),
        warning=probes.warning(),
    )


def _medians(fast: Contender, plain: Contender) -> Times:
    return Times(
        fast_attention=median(fast.attention_seconds[1:]),
        fast_model=median(fast.model_seconds[1:]),
        plain_attention=median(plain.attention_seconds[1:]),
        plain_model=median(plain.model_seconds[1:]),
    )
