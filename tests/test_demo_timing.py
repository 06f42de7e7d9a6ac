"""How the demos time two kinds of attention, with a clock that only the work moves."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

pytest.importorskip("rich", reason="the demo extra is not installed")

from fastattn.backends.cython import backend as cython_backend
from fastattn.demo import _timing

X = np.ones(3, np.float32)


class Clock:
    """Seconds that pass when `spend` is called; every call is noted."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def spend(self, name: str, seconds: float, x: np.ndarray) -> np.ndarray:
        self.calls.append(name)
        self.now += seconds
        return x


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_timing, "perf_counter", clock)
    monkeypatch.setattr(cython_backend.backend, "unavailable_reasons", lambda: ["no probes in tests"])
    return clock


def test_attention_is_counted_within_the_model(clock: Clock) -> None:
    def work(num_layers: int, attend: _timing.Attend) -> np.ndarray:
        x = X
        for _ in range(num_layers):
            x = attend(clock.spend("rest", 0.25, x))
        return x

    fast, plain = partial(clock.spend, "fast", 1.0), lambda x: clock.spend("plain", 2.0, x) + 0.5
    works = {"deep": partial(work, 3), "shallow": partial(work, 1)}
    tracked: list[object] = []
    result = _timing.compare(works, fast, plain, lambda steps: tracked.extend(steps) or steps)
    assert result.rounds == _timing.MIN_ROUNDS
    assert len(tracked) == len(works) + result.rounds  # the first round, by works, and the others
    assert result.times == {
        "deep": _timing.Times(fast_attention=3, fast_model=3.75, plain_attention=6, plain_model=6.75),
        "shallow": _timing.Times(fast_attention=1, fast_model=1.25, plain_attention=2, plain_model=2.25),
    }
    assert result.largest_difference == 1.5
    assert result.warning is None


@pytest.mark.parametrize(("seconds", "rounds"), [(0.001, 15), (0.5, 10), (7.0, 3)])
def test_rounds_fit_into_the_time(clock: Clock, seconds: float, rounds: int) -> None:
    attend = partial(clock.spend, "either", seconds)
    result = _timing.compare({"one": lambda attend: attend(X)}, attend, attend, list)
    assert result.rounds == rounds
    assert len(clock.calls) == 2 * (rounds + 1)  # the first warms up


def test_who_goes_first_changes(clock: Clock) -> None:
    pairs = [[partial(clock.calls.append, name) for name in pair] for pair in ("aA", "bB")]
    _timing.take_turns(pairs, 3, list)
    assert "".join(clock.calls) == "AaBbaAbBAaBb"
