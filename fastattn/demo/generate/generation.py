"""A prompt through a model, then one token after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice

from fastattn.demo._decoding import Floats, LibraryAttention
from fastattn.demo._timing import Track
from fastattn.demo.generate.attention import Attention
from fastattn.demo.generate.clock import Clock
from fastattn.demo.generate.model import Llama

#: The prompt goes through the model in pieces of so many tokens, which keeps the memory small.
CHUNK = 512


@dataclass
class Clocks:
    """Prefill is the prompt up to the logits of the first token, decode everything after it."""

    prefill: Clock = field(default_factory=Clock)
    decode: Clock = field(default_factory=Clock)

    @property
    def total(self) -> float:
        return self.prefill.total + self.decode.total

    @classmethod
    def median(cls, runs: Sequence[Clocks]) -> Clocks:
        """Medians over runs of the same tokens."""
        return cls(Clock.median([it.prefill for it in runs]), Clock.median([it.decode for it in runs]))


def generate(
    model: Llama,
    prompt: Sequence[int],
    attention: Attention,
    choose: Callable[[Floats], int],
    clocks: Clocks,
    track: Track = iter,
) -> Iterator[int]:
    """Tokens after `prompt` and what `attention` has already seen, until the context is full.

    `choose` gets the logits, ``(vocabulary,)``, and gives the next token. The time that the receiver of the
    tokens takes is not counted. `track` may show the progress in the prompt.
    """
    for start in track(range(0, len(prompt), CHUNK)):
        state = model(prompt[start : start + CHUNK], attention, clocks.prefill)
    logits = model.logits(state[-1:], clocks.prefill)[0]
    while True:
        token = choose(logits)
        yield token
        if attention.length == model.context_length:
            return
        state = model([token], attention, clocks.decode)
        logits = model.logits(state, clocks.decode)[0]


def until_end(tokens: Iterator[int], max_tokens: int, ends: Set[int], noted: list[int]) -> Iterator[int]:
    """The first `max_tokens` of `tokens`, or those as far as one of `ends`; added to `noted`, too."""
    for token in islice(tokens, max_tokens):
        noted.append(token)
        yield token
        if token in ends:
            return


def new_cache(model: Llama, kv_dtype: str) -> LibraryAttention:
    """The empty cache of a model."""
    return LibraryAttention(len(model.layers), model.num_kv_heads, model.head_dim, model.value_dim, kv_dtype)
