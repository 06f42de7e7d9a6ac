"""The same tokens through the same model twice: with fastattn, and with the plain formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import numpy as np

from fastattn.bench.quiet import CoreProbes
from fastattn.demo._command import track
from fastattn.demo._decoding import Floats, Sampler
from fastattn.demo.generate.attention import Attention, PlainAttention
from fastattn.demo.generate.generation import Clocks, generate, new_cache, until_end
from fastattn.demo.generate.heads import Head, QueryRecorder
from fastattn.demo.generate.model import Llama

#: The most tokens that are generated both ways, as their logits are kept.
COMPARED = 256

WAYS = ("fastattn", "plain NumPy")

#: Both ways are timed once in each round. More rounds than one are done within so many seconds.
MAX_ROUNDS, SECONDS = 5, 8.0


@dataclass(frozen=True)
class Comparison:
    """What the runs gave."""

    tokens: list[int]  #: generated with fastattn
    rounds: list[tuple[Clocks, Clocks]]  #: with fastattn and with the plain formula
    compared: int  #: how many of the tokens both have generated in each round
    agreeing: int  #: how many of these the plain formula chooses, too, before the first other one
    largest_difference: float  #: between the logits of the two
    largest_logit: float
    cache_nbytes: int
    head: Head | None  #: the head that copies most; None where a single token was generated
    warning: str | None  #: that the machine was too busy to be timed

    @property
    def fast(self) -> Clocks:
        """Medians over the rounds."""
        return Clocks.median([fast for fast, _ in self.rounds])

    @property
    def plain(self) -> Clocks:
        return Clocks.median([plain for _, plain in self.rounds])


def compare(
    model: Llama,
    prompt: Sequence[int],
    max_tokens: int,
    ends: Set[int],
    kv_dtype: str,
    make_sampler: Callable[[], Sampler],
    show: Callable[[Iterator[int]], object],
) -> Comparison:
    """Generate with fastattn, which `show` receives token by token, then time the same tokens both ways.

    Generation ends with `max_tokens`, with a token of `ends`, or with the context. It warms up, and is not
    timed. The first of the timed runs is of the plain formula: its logits are compared. The order alternates
    from round to round. The cores are probed between rounds.
    """
    recorder = QueryRecorder(new_cache(model, kv_dtype))
    sampler = make_sampler()
    logits: list[Floats] = []
    tokens: list[int] = []

    def choose(given: Floats) -> int:
        if len(logits) < COMPARED:
            logits.append(given)
        return sampler(given)

    reading = partial(track, description="reading the prompt")
    generated = generate(model, prompt, recorder, choose, Clocks(), reading)
    show(until_end(generated, max_tokens, ends, tokens))

    own = make_sampler()
    differences: list[float] = []
    agreed: list[bool] = []

    def compare_logits(given: Floats, number: int) -> None:
        differences.append(float(np.abs(given - logits[number]).max()))
        agreed.append(own(given) == tokens[number])

    probes = CoreProbes()

    def timed(way: str, number: int) -> Clocks:
        """Clocks of the prompt and the tokens. In the first round the plain formula's logits are compared."""
        attention: Attention = (
            new_cache(model, kv_dtype) if way == WAYS[0] else PlainAttention(len(model.layers))
        )
        is_compared = number == 0 and way == WAYS[1]
        clocks, places = Clocks(), iter(range(len(logits)))

        def choose_the_same(given: Floats) -> int:
            place = next(places)
            if is_compared:
                compare_logits(given, place)
            return tokens[place]

        again = generate(model, prompt, attention, choose_the_same, clocks)
        for _ in track(range(len(logits)), f"timing {way}, round {number + 1}"):
            next(again)
        return clocks

    def run_round(number: int) -> tuple[Clocks, Clocks]:
        probes.take()
        found = {way: timed(way, number) for way in (WAYS if number % 2 else WAYS[::-1])}
        return found[WAYS[0]], found[WAYS[1]]

    start = perf_counter()
    rounds = [run_round(0)]
    took = perf_counter() - start
    rounds += [run_round(number) for number in range(1, min(MAX_ROUNDS, 1 + int(SECONDS / took)))]
    probes.take()
    return Comparison(
        tokens=tokens,
        rounds=rounds,
        compared=len(agreed),
        agreeing=agreed.index(False) if False in agreed else len(agreed),
        largest_difference=max(differences),
        largest_logit=max(float(np.abs(given).max()) for given in logits),
        cache_nbytes=recorder.attention.nbytes,
        head=recorder.copying_head(prompt, tokens),
        warning=probes.warning(),
    )
