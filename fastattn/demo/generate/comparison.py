"""The same tokens through the same model twice: with fastattn, and with the plain formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import islice

import numpy as np

from fastattn.bench.quiet import CoreProbes
from fastattn.demo._command import track
from fastattn.demo._decoding import Floats, Sampler
from fastattn.demo.generate.attention import PlainAttention
from fastattn.demo.generate.generation import Clocks, generate, new_cache, until_end
from fastattn.demo.generate.heads import Head, QueryRecorder
from fastattn.demo.generate.model import Llama

#: The most tokens that are generated both ways, as their logits are kept.
COMPARED = 256


@dataclass(frozen=True)
class Comparison:
    """What the two runs gave."""

    tokens: list[int]  #: generated with fastattn
    fast: Clocks
    plain: Clocks
    compared: int  #: how many of the tokens the plain formula has generated as well
    agreeing: int  #: how many of these it would have chosen itself, before the first that it would not
    largest_difference: float  #: between the logits of the two
    largest_logit: float
    cache_nbytes: int
    head: Head | None  #: the head that copies most; None where a single token was generated
    warning: str | None  #: that the machine was too busy to be timed


def compare(
    model: Llama,
    prompt: Sequence[int],
    max_tokens: int,
    ends: Set[int],
    kv_dtype: str,
    make_sampler: Callable[[], Sampler],
    show: Callable[[Iterator[int]], object],
) -> Comparison:
    """Generate with fastattn, which `show` receives token by token, then force the same tokens the plain way.

    Generation ends with `max_tokens`, with a token of `ends`, or with the context. The cores are probed
    before, between and after.
    """
    probes = CoreProbes()
    _warm_up(model, kv_dtype)
    probes.take()
    fast, plain = Clocks(), Clocks()
    recorder = QueryRecorder(new_cache(model, kv_dtype))
    sampler = make_sampler()
    logits: list[Floats] = []
    tokens: list[int] = []

    def choose(given: Floats) -> int:
        if len(logits) < COMPARED:
            logits.append(given)
        return sampler(given)

    generated = generate(model, prompt, recorder, choose, fast)
    show(until_end(generated, max_tokens, ends, tokens))
    probes.take()

    own = make_sampler()
    differences: list[float] = []
    agreed: list[bool] = []

    def choose_the_same(given: Floats) -> int:
        number = len(differences)
        differences.append(float(np.abs(given - logits[number]).max()))
        agreed.append(own(given) == tokens[number])
        return tokens[number]

    again = generate(model, prompt, PlainAttention(len(model.layers)), choose_the_same, plain)
    for _ in track(range(len(logits)), "the same with the plain formula"):
        next(again)
    probes.take()
    return Comparison(
        tokens=tokens,
        fast=fast,
        plain=plain,
        compared=len(agreed),
        agreeing=agreed.index(False) if False in agreed else len(agreed),
        largest_difference=max(differences),
        largest_logit=max(float(np.abs(given).max()) for given in logits),
        cache_nbytes=recorder.attention.nbytes,
        head=recorder.copying_head(prompt, tokens),
        warning=probes.warning(),
    )


def _warm_up(model: Llama, kv_dtype: str) -> None:
    """A few tokens both ways, so that neither is timed while it is loaded or compiled."""
    prompt = range(min(32, len(model.embedding), model.context_length - 1))
    for attention in (new_cache(model, kv_dtype), PlainAttention(len(model.layers))):
        for _ in islice(generate(model, prompt, attention, lambda logits: 0, Clocks()), 2):
            pass
