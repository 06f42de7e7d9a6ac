"""The same training steps twice: with fastattn's attention and gradients, and with the plain formula's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np

from fastattn.demo._timing import Track, take_turns
from fastattn.demo.train.attention import Attention, FastAttention, Floats, PlainAttention
from fastattn.demo.train.model import Ints
from fastattn.demo.train.training import Trainer

#: Rounds of both that are timed.
ROUNDS = 9


class Stopwatch:
    """An attention whose calls are timed."""

    def __init__(self, attention: Attention) -> None:
        self._attention = attention
        self.seconds = {"forward": 0.0, "backward": 0.0}

    def forward(self, layer: int, query: Floats, key: Floats, value: Floats) -> Floats:
        start = perf_counter()
        out = self._attention.forward(layer, query, key, value)
        self.seconds["forward"] += perf_counter() - start
        return out

    def backward(self, layer: int, grad_out: Floats) -> tuple[Floats, Floats, Floats]:
        start = perf_counter()
        gradients = self._attention.backward(layer, grad_out)
        self.seconds["backward"] += perf_counter() - start
        return gradients

    @property
    def nbytes_kept(self) -> int:
        return self._attention.nbytes_kept


@dataclass(frozen=True)
class Times:
    """Median seconds of one training step."""

    forward: float  #: attention of all layers
    backward: float  #: its gradients
    step: float  #: everything
    nbytes_kept: int  #: for the gradients of attention

    @property
    def rest(self) -> float:
        return self.step - self.forward - self.backward

    @property
    def attention_share(self) -> float:
        return (self.forward + self.backward) / self.step


@dataclass(frozen=True)
class Comparison:
    """What the rounds gave."""

    rounds: int
    fast: Times
    plain: Times
    largest_difference: float  #: between any number of the gradients of the two
    largest_gradient: float
    warning: str | None  #: that the machine was too busy to be timed


def compare(trainer: Trainer, track: Track) -> Comparison:
    """Time steps of a trained model, interleaved, on the same batches. The model is not changed.

    The first round warms up and compares the gradients; it is not counted. `track` may show the progress.
    """
    num_layers = trainer.model.sizes.num_layers
    fast, plain = FastAttention(num_layers), PlainAttention(num_layers)
    ids = trainer.batch()
    gradients = []
    for attention in track((fast, plain)):
        trainer.model.loss_and_gradients(ids, attention, trainer.gradients)
        gradients.append(trainer.gradients.flat.copy())

    batches = [trainer.batch() for _ in range(ROUNDS)]
    notes: dict[Attention, list[Times]] = {fast: [], plain: []}

    def note(attention: Attention) -> None:
        times = notes[attention]
        times.append(_one_step(trainer, batches[len(times)], attention))

    warning = take_turns([[partial(note, fast), partial(note, plain)]], ROUNDS, track)
    return Comparison(
        rounds=ROUNDS,
        fast=_median(notes[fast]),
        plain=_median(notes[plain]),
        largest_difference=float(np.abs(gradients[0] - gradients[1]).max()),
        largest_gradient=float(np.abs(gradients[0]).max()),
        warning=warning,
    )


def _one_step(trainer: Trainer, ids: Ints, attention: Attention) -> Times:
    watch = Stopwatch(attention)
    start = perf_counter()
    trainer.model.loss_and_gradients(ids, watch, trainer.gradients)
    trainer.optimizer.step(trainer.gradients, 0.0)  # a rate of 0 moves nothing
    step = perf_counter() - start
    return Times(watch.seconds["forward"], watch.seconds["backward"], step, watch.nbytes_kept)


def _median(times: Sequence[Times]) -> Times:
    return Times(
        forward=median(it.forward for it in times),
        backward=median(it.backward for it in times),
        step=median(it.step for it in times),
        nbytes_kept=times[0].nbytes_kept,
    )
