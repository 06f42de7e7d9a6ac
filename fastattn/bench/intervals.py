"""Medians and their bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Resamples, and the share of them inside the interval that is given.
RESAMPLES, COVERAGE = 2000, 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median, or a geometric mean of medians, and its bootstrap interval."""

    median: float
    low: float
    high: float

    @property
    def precision(self) -> float:
        """Half of the interval's width over the median."""
        return (self.high - self.low) / 2 / self.median


def median_interval(values: np.ndarray) -> Estimate:
    """Median of `values`, with the bootstrap interval that covers `COVERAGE`.

    Of five values or fewer it reaches from the least to the largest.
    """
    return _estimate(np.median(values), _resampled_medians(values, np.random.default_rng(0)))


def change_interval(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Estimate:
    """Median of the later sample over that of the earlier one; the geometric mean of it over all `pairs`.

    All samples are independent of one another, and each is resampled on its own: what is off in one
    pair stands for nothing in the next, so the interval of many pairs is narrower than that of each.
    """
    rng = np.random.default_rng(0)
    changes = [np.log(np.median(now) / np.median(then)) for then, now in pairs]
    resampled = [np.log(_resampled_medians(now, rng) / _resampled_medians(then, rng)) for then, now in pairs]
    return _estimate(np.exp(np.mean(changes)), np.exp(np.mean(resampled, axis=0)))


def _resampled_medians(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    picks = rng.integers(len(values), size=(RESAMPLES, len(values)))
    return np.median(values[picks], axis=1)


def _estimate(median: float, resampled: np.ndarray) -> Estimate:
    low, high = np.quantile(resampled, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Estimate(float(median), float(low), float(high))
