"""Where the time of a model goes."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter

#: The parts of the model, in the order of a picture.
PARTS = ("attention", "rotary embedding", "projections", "feed-forward", "norms", "logits")


class Clock:
    """Seconds by part: `start`, and after each part a `lap` that names it."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.tokens = 0  #: that went through the model meanwhile
        self._last = 0.0

    def start(self) -> None:
        self._last = perf_counter()

    def lap(self, part: str) -> None:
        now = perf_counter()
        self.seconds[part] += now - self._last
        self._last = now

    @classmethod
    def median(cls, clocks: Sequence[Clock]) -> Clock:
        """The median of each part, of runs of the same tokens."""
        clock = cls()
        clock.tokens = clocks[0].tokens
        clock.seconds = {part: median(it.seconds[part] for it in clocks) for part in PARTS}
        return clock

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.total if self.tokens else 0.0

    @property
    def attention_share(self) -> float:
        return self.seconds["attention"] / self.total if self.tokens else 0.0
