"""SciPy's `gaussian_kde`, and all that is built on it, as seaborn's density plots."""

from __future__ import annotations

from contextlib import AbstractContextManager
from math import log, pi
from typing import Any

import numpy as np

import fastattn
from fastattn.integrations._common import Methods, extra

with extra("scipy"):
    from scipy import linalg, stats


class gaussian_kde(stats.gaussian_kde):
    """`scipy.stats.gaussian_kde`, whose sums over pairs of points and data are `fastattn.kernel_logsumexp`.

    Parameters, attributes, methods and errors are SciPy's.

    Parameters
    ----------
    dataset : array_like, shape (D, S) or (S,)
        The data, each column an observation.
    bw_method : {"scott", "silverman"}, float or callable, optional
        What scales the covariance of the data, by its square.
    weights : array_like, shape (S,), optional
        Not negative.

    Notes
    -----
    ``evaluate``, ``pdf``, ``logpdf``, a call and ``integrate_kde`` compute here, on data and points divided
    by the Cholesky factor of the kernel's covariance. Accuracy, determinism and memory are those of
    `fastattn.kernel_logsumexp`, threads those of `fastattn.set_num_threads`. All else is SciPy's code, which
    looks at each observation once; so is a result in extended precision.

    A kernel so narrow that observations lie 1e120 standard deviations from their mean is a ValueError.

    References
    ----------
    .. [1] Scott, "Multivariate Density Estimation: Theory, Practice, and Visualization", Wiley, 1992.
    .. [2] Silverman, "Density Estimation for Statistics and Data Analysis", Chapman and Hall, 1986.

    Examples
    --------
    >>> import numpy as np
    >>> from scipy import stats
    >>> from fastattn.integrations.scipy import gaussian_kde
    >>> data = np.random.default_rng(0).standard_normal((2, 1000))
    >>> kde = gaussian_kde(data, bw_method="silverman")
    >>> expected = stats.gaussian_kde(data, bw_method="silverman")
    >>> np.allclose(kde(data[:, :5]), expected(data[:, :5]), rtol=1e-12)
    True
    >>> float(kde([40.0, 40.0])[0]), kde.logpdf([40.0, 40.0]).round(-2)  # where the density underflows
    (0.0, array([-13200.]))
    """

    def evaluate(self, points: Any) -> np.ndarray:
        """The density at each point, ``(L,)`` for points ``(D, L)``."""
        points = np.atleast_2d(np.asarray(points))
        if np.common_type(self.covariance, points) != np.float64:
            return _methods.theirs["evaluate"](self, points)
        return np.exp(_log_density(self, points))

    __call__ = evaluate

    def logpdf(self, x: Any) -> np.ndarray:
        """The log of the density at each point; finite also where the density is too small for a number."""
        points = np.atleast_2d(x)
        if np.common_type(self.covariance, points) != np.float64:
            return _methods.theirs["logpdf"](self, points)
        return _log_density(self, points)

    def integrate_kde(self, other: Any) -> float:
        """The integral of the product of two densities; the other may be SciPy's."""
        if other.d != self.d:
            raise ValueError("KDEs are not the same dimensionality")
        factor = linalg.cholesky(self.covariance + other.covariance, lower=True)
        return other.weights @ np.exp(_log_sums(other.dataset, self.dataset, self.weights, factor))

    def marginal(self, dimensions: Any) -> gaussian_kde:
        """The density of some of the dimensions."""
        kept = super().marginal(dimensions)
        return gaussian_kde(kept.dataset, bw_method=kept.factor, weights=kept.weights)


def _log_density(kde: Any, points: np.ndarray) -> np.ndarray:
    d, m = points.shape
    if d != kde.d:
        if (d, m) != (1, kde.d):
            raise ValueError(f"points have dimension {d}, dataset has dimension {kde.d}")
        points = points.T  # a single one, given as a row
    return _log_sums(points, kde.dataset, kde.weights, kde.cho_cov)


def _log_sums(points: np.ndarray, dataset: np.ndarray, weights: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """The log of a mixture of Gaussians around ``dataset``, their covariance ``factor @ factor.T``."""
    centre = dataset.mean(axis=1, keepdims=True)  # without it a shift common to both would round
    white_points, white = (
        linalg.solve_triangular(factor, array - centre, lower=True).T for array in (points, dataset)
    )
    with np.errstate(divide="ignore"):
        log_weights = np.log(weights)
    sums = fastattn.kernel_logsumexp(white_points, white, bandwidth=1.0, log_weights=log_weights)
    return sums - np.log(np.diag(factor)).sum() - 0.5 * len(factor) * log(2 * pi)


_methods = Methods(stats.gaussian_kde, gaussian_kde, "evaluate", "__call__", "logpdf", "integrate_kde")


def install() -> None:
    """Let `scipy.stats.gaussian_kde` itself compute as `gaussian_kde` does, also for libraries that use it.

    It holds for the process, until `uninstall`, for objects that there are already, and for whoever imported
    the class before: seaborn's ``kdeplot``, ``displot`` and ``violinplot``, pandas' ``plot.kde``.

    Examples
    --------
    >>> import numpy as np
    >>> from scipy import stats
    >>> from fastattn.integrations.scipy import installed
    >>> kde = stats.gaussian_kde(np.random.default_rng(0).standard_normal(1000))
    >>> with installed():
    ...     density = kde([0.0, 1.0])
    >>> np.allclose(density, kde([0.0, 1.0]), rtol=1e-12)
    True
    """
    _methods.install()


def uninstall() -> None:
    """Give SciPy's class its own methods back."""
    _methods.uninstall()


def installed() -> AbstractContextManager[None]:
    """`install` for the length of a ``with``, in all threads. The previous methods are restored after it."""
    return _methods.installed()
