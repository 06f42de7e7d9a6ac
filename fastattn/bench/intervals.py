"""Medians and their bootstrap intervals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Resamples, and the share of them inside the interval that is given.
RESAMPLES, COVERAGE = 2000, 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median and its bootstrap interval."""

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
    return _estimate(np.median(values), _resampled_medians(values, seed=0))


def change_interval(then: np.ndarray, now: np.ndarray) -> Estimate:
    """Median of `now` over the median of `then`, two independent samples, each resampled on its own."""
    resampled = _resampled_medians(now, seed=0) / _resampled_medians(then, seed=1)
    return _estimate(np.median(now) / np.median(then), resampled)


def _resampled_medians(values: np.ndarray, seed: int) -> np.ndarray:
    picks = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    return np.median(values[picks], axis=1)


def _estimate(median: float, resampled: np.ndarray) -> Estimate:
    low, high = np.quantile(resampled, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Estimate(float(median), float(low), float(high))
