"""The steps of training, what is noted of them, and samples of what the model writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from fastattn.demo._decoding import LibraryAttention, Sampler
from fastattn.demo._timing import Track
from fastattn.demo.train.attention import FastAttention, Floats
from fastattn.demo.train.model import Ints, Model, Tensors
from fastattn.demo.train.optimizer import AdamW, Settings
from fastattn.demo.train.text import Text

#: Characters that one step reads, in pieces as long as the context.
CHARACTERS_PER_STEP = 1024

#: So many pieces of the held-out text are enough to watch the loss, spread evenly over it.
WATCHED = 16

#: The temperature of samples, and the total probability of the likeliest characters: others are not drawn.
TEMPERATURE, TOP_P = 0.8, 0.95


@dataclass
class Progress:
    """What was noted of the steps."""

    losses: list[float] = field(default_factory=list)  #: of each step's batch, before it
    held_out: list[tuple[int, float]] = field(default_factory=list)  #: steps done, and the loss then
    seconds: float = 0.0  #: in all steps, without looking at the held-out text
    characters: int = 0  #: read in them

    @property
    def characters_per_second(self) -> float:
        return self.characters / self.seconds


class Trainer:
    """A model, its text, its optimizer, and the batches, which the seed alone decides."""

    def __init__(self, model: Model, text: Text, steps: int, seed: int) -> None:
        self.model = model
        self.text = text
        self.steps = steps
        self.progress = Progress()
        self.settings = Settings()
        self.gradients = Tensors(model.sizes.shapes(), model.weights.flat.dtype)
        self.optimizer = AdamW(model.weights, self.settings)
        self._attention = FastAttention(model.sizes.num_layers)
        self._rng = np.random.default_rng(seed)

    @property
    def batch_size(self) -> int:
        return max(1, CHARACTERS_PER_STEP // self.model.sizes.context)

    def batch(self) -> Ints:
        """Pieces of the training text, ``(batch_size, context + 1)``: each id predicts the next."""
        return self.text.batch(self.batch_size, self.model.sizes.context + 1, self._rng)

    def run(self, steps: Iterable[int], watch: Callable[[int], None]) -> None:
        """Take `steps`, numbers from 0; `watch` gets how many are done, before the first and after each."""
        watch(0)
        for step in steps:
            start = perf_counter()
            ids = self.batch()
            loss = self.model.loss_and_gradients(ids, self._attention, self.gradients)
            self.optimizer.step(self.gradients, self.settings.rate(step, self.steps))
            self.progress.seconds += perf_counter() - start
            self.progress.characters += ids.shape[0] * (ids.shape[1] - 1)
            self.progress.losses.append(loss)
            watch(step + 1)

    def held_out_loss(self, *, whole: bool, track: Track = iter) -> float:
        """The mean loss on the held-out text, or on `WATCHED` pieces of it; `track` may show the progress."""
        windows = self.text.held_out_windows(self.model.sizes.context + 1)
        if not whole:
            windows = windows[:: -(-len(windows) // WATCHED)]
        starts = range(0, len(windows), self.batch_size)
        parts = [windows[start : start + self.batch_size] for start in starts]
        losses = [self.model.loss(part, self._attention) for part in track(parts)]
        return float(np.average(losses, weights=[len(part) for part in parts]))


def write(model: Model, prompt: Ints, length: int, seed: int) -> list[int]:
    """`length` ids after `prompt`, each drawn from what the model says of those before, in a `KVCache`."""
    sizes = model.sizes
    dtype = str(model.weights.flat.dtype)
    cache = LibraryAttention(sizes.num_layers, sizes.num_heads, sizes.head_dim, sizes.head_dim, dtype)

    def attend(layer: int, query: Floats, key: Floats, value: Floats) -> Floats:
        return cache.step(layer, query[0], key[0], value[0])[None]

    sampler = Sampler(TEMPERATURE, TOP_P, seed)
    written: list[int] = []
    ids = prompt
    while len(written) < length:
        logits = model.logits(ids[None], attend, cache.length)[-1]
        written.append(sampler(logits))
        ids = np.array(written[-1:])
    return written
