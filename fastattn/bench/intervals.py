"""Medians and their bootstrap intervals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Resamples, and the share of them inside the interval that is given.
RESAMPLES, COVERAGE = 2000, 0.95

#: The fewest values that an interval is taken of. The interval of five values is their range, which misses
#: the true median one time in sixteen; that of three misses it one time in four. Five are also the fewest
#: rounds with which two equal runs look different, on one side, no more often than `COVERAGE` allows, 2.5 %:
#: 1.9 % with five rounds, 3.2 % with four, 5.3 % with three (normal noise, 1500 pairs; tests count again).
ENOUGH = 5


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
    return _estimate(np.median(values), np.median(_resampled(values, seed=0), axis=1))


def change_interval(then: np.ndarray, now: np.ndarray) -> Estimate:
    """Median of `now` over the median of `then`, two independent samples, each resampled on its own."""
    before, after = (np.median(_resampled(it, seed), axis=1) for seed, it in enumerate((then, now)))
    return _estimate(np.median(now) / np.median(then), after / before)


def geometric_mean_interval(values: np.ndarray) -> Estimate:
    """Geometric mean of `values`, with its bootstrap interval."""
    logs = np.log(values)
    return _estimate(np.exp(logs.mean()), np.exp(_resampled(logs, seed=0).mean(axis=1)))


def _resampled(values: np.ndarray, seed: int) -> np.ndarray:
    """`RESAMPLES` rows, each drawn from `values` and as long."""
    return values[np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))]


def _estimate(center: float, resampled: np.ndarray) -> Estimate:
    low, high = np.quantile(resampled, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Estimate(float(center), float(low), float(high))
