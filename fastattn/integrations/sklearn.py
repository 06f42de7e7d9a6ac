"""Kernel regression and density as estimators of scikit-learn."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

import fastattn
from fastattn._api.kernel_methods import check_reach, covariance_hint
from fastattn._call.arguments import check_bool, check_number_dtype, count
from fastattn._call.options import refusing
from fastattn.integrations._common import extra

with extra("sklearn"):
    from scipy.optimize import minimize
    from sklearn.base import BaseEstimator, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

_FLOATS = [np.float64, np.float32]
_STARTS = np.log(2.0) * np.arange(-4, 5)  # of a search, around Scott's rule
_SPAN = np.log(1e4)  # how far from it a search goes


class KernelRegressor(RegressorMixin, BaseEstimator):
    """Nadaraya-Watson regression with a Gaussian kernel, by `fastattn.kernel_regression`.

    Parameters
    ----------
    bandwidth : float, array_like of shape (n_features,) or "leave_one_out", default 1.0
        The standard deviation of the Gaussian, of all features or of each. ``"leave_one_out"`` minimises the
        weighted mean squared error of predicting each sample from all others.
    per_feature : bool, default True
        Whether ``"leave_one_out"`` chooses a bandwidth for each feature, or one for all.
    max_steps : int, default 100
        Of that search: L-BFGS-B on the logarithms of the bandwidths.

    Attributes
    ----------
    bandwidth_ : float or ndarray of shape (n_features,)
        The bandwidth that is used.
    leave_one_out_error_ : float
        The least error, with ``"leave_one_out"``.
    n_features_in_, feature_names_in_
        As scikit-learn's.

    Notes
    -----
    The error may have several minima: the search starts from the best of nine multiples of Scott's rule. It
    computes the error some 20 to 60 times, each time by one `fastattn.kernel_regression` of all samples; for
    the gradient its targets have ``(2 * D + 1) * (E + 1) - 1`` columns, with D features and E targets of y.
    No step needs memory for all pairs of samples, but the time grows with their number: 10,000 samples of 3
    features take 6 seconds of CPU time, and 20,000 take 22 (Xeon with AVX-512, 2026-11-27). With many more,
    search on a subsample.

    Samples of weight 0 are ignored, but may not be NaN: scikit-learn checks them first. For
    ``"leave_one_out"`` two equal samples differ from one of twice the weight: each predicts the other.

    References
    ----------
    .. [1] Nadaraya, "On Estimating Regression", Theory of Probability and Its Applications 9, 1964.
    .. [2] Watson, "Smooth Regression Analysis", Sankhya A 26, 1964.
    .. [3] Haerdle and Marron, "Optimal Bandwidth Selection in Nonparametric Regression Function Estimation",
       Annals of Statistics 13, 1985.

    Examples
    --------
    >>> import numpy as np
    >>> from fastattn.integrations.sklearn import KernelRegressor
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-3, 3, (400, 2))
    >>> y = np.sin(X[:, 0]) + 0.1 * rng.standard_normal(400)  # the second feature does not matter
    >>> model = KernelRegressor(bandwidth="leave_one_out").fit(X, y)
    >>> bool(model.bandwidth_[1] > 10 * model.bandwidth_[0])
    True
    >>> np.abs(model.predict([[0.5, 0.0]]) - np.sin(0.5)).item() < 0.1
    True

    A search on a subsample. The best bandwidth for n samples is about ``n ** (-1 / (D + 4))`` times a number:

    >>> some = rng.choice(400, 200, replace=False)
    >>> found = KernelRegressor(bandwidth="leave_one_out").fit(X[some], y[some])
    >>> model = KernelRegressor(bandwidth=found.bandwidth_ * (200 / 400) ** (1 / (2 + 4))).fit(X, y)
    >>> np.abs(model.predict([[0.5, 0.0]]) - np.sin(0.5)).item() < 0.1
    True
    """

    @refusing
    def __init__(
        self,
        *,
        bandwidth: float | Any | Literal["leave_one_out"] = 1.0,
        per_feature: bool = True,
        max_steps: int = 100,
    ) -> None:
        self.bandwidth = bandwidth
        self.per_feature = per_feature
        self.max_steps = max_steps

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> KernelRegressor:
        """Keep the samples, and choose the bandwidth.

        Parameters
        ----------
        X : array_like, shape (n_samples, n_features)
        y : array_like, shape (n_samples,) or (n_samples, n_outputs)
        sample_weight : array_like, shape (n_samples,), optional
            Not negative.

        Returns
        -------
        self
        """
        X, y = validate_data(self, X, y, dtype=_FLOATS, multi_output=True, y_numeric=True)
        check_number_dtype(y, "y")
        weights = _weights(sample_weight, X)
        if isinstance(self.bandwidth, str):
            if self.bandwidth != "leave_one_out":
                raise ValueError(
                    f'bandwidth must be positive numbers or "leave_one_out", got {self.bandwidth!r}'
                )
            w = np.ones(len(X)) if weights is None else weights
            samples, targets, w = (array[w > 0].astype(np.float64) for array in (X, y.reshape(len(y), -1), w))
            check_bool(self.per_feature, "per_feature")
            max_steps = count(self.max_steps, "max_steps", 0, 2**31 - 1)
            found = _search(samples, targets, w, self.per_feature, max_steps)
            self.bandwidth_, self.leave_one_out_error_ = found
        else:
            self.bandwidth_ = _bandwidth(self.bandwidth, X, weights)
            if hasattr(self, "leave_one_out_error_"):  # of an earlier fit
                del self.leave_one_out_error_
        self._X, self._y, self._weights = X, y, weights
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The weighted mean of the samples' targets, for each row of X.

        Parameters
        ----------
        X : array_like, shape (n_queries, n_features)

        Returns
        -------
        ndarray, shape (n_queries,) or (n_queries, n_outputs)
        """
        check_is_fitted(self)
        X = validate_data(self, X, dtype=_FLOATS, reset=False)
        return fastattn.kernel_regression(
            X, self._X, self._y, bandwidth=self.bandwidth_, weights=self._weights
        )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = True
        return tags


class KernelDensity(BaseEstimator):
    """Kernel density estimation with a Gaussian kernel, exact: scikit-learn's estimator of that name.

    Parameters
    ----------
    bandwidth : float, array_like of shape (n_features,), "scott" or "silverman", default 1.0
        The standard deviation of the Gaussian, of all features or of each. The rules are scikit-learn's, a
        number that depends on the sizes of X alone. ``scipy.stats.gaussian_kde`` scales the covariance of X
        by its square: for these densities whiten X first, as docs/coming-from.md shows.

    Attributes
    ----------
    bandwidth_ : float or ndarray of shape (n_features,)
        The bandwidth that is used.
    n_features_in_, feature_names_in_
        As scikit-learn's.

    Notes
    -----
    The densities are those of `fastattn.kernel_regression`: there is no tree, and no tolerance to choose.

    Samples of weight 0 are ignored, but may not be NaN: scikit-learn checks them first.

    Examples
    --------
    >>> import numpy as np
    >>> from fastattn.integrations.sklearn import KernelDensity
    >>> X = np.random.default_rng(0).standard_normal((1000, 2))
    >>> model = KernelDensity(bandwidth="scott").fit(X)
    >>> np.round(model.score_samples([[0.0, 0.0]]), 1)
    array([-2.])
    >>> model.sample(3, random_state=0).shape
    (3, 2)
    """

    @refusing
    def __init__(self, *, bandwidth: float | Any | Literal["scott", "silverman"] = 1.0) -> None:
        self.bandwidth = bandwidth

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> KernelDensity:
        """Keep the samples.

        Parameters
        ----------
        X : array_like, shape (n_samples, n_features)
        y : None
            Not used.
        sample_weight : array_like, shape (n_samples,), optional
            Not negative.

        Returns
        -------
        self
        """
        X = validate_data(self, X, dtype=_FLOATS)
        n, dim = X.shape
        rules = {"scott": n ** (-1 / (dim + 4)), "silverman": (n * (dim + 2) / 4) ** (-1 / (dim + 4))}
        if isinstance(self.bandwidth, str) and self.bandwidth not in rules:
            raise ValueError(
                f'bandwidth must be positive numbers, "scott" or "silverman", got {self.bandwidth!r}'
            )
        weights = _weights(sample_weight, X)
        value = rules[self.bandwidth] if isinstance(self.bandwidth, str) else self.bandwidth
        self.bandwidth_ = _bandwidth(value, X, weights)
        self._X, self._weights = X, weights
        return self

    def score_samples(self, X: Any) -> np.ndarray:
        """The log of the density at each row of X, ``(n_queries,)``."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=_FLOATS, reset=False)
        _, log_density = fastattn.kernel_regression(
            X,
            self._X,
            np.empty((len(self._X), 0), X.dtype),
            bandwidth=self.bandwidth_,
            weights=self._weights,
            return_log_density=True,
        )
        return log_density

    def score(self, X: Any, y: Any = None) -> float:
        """The log of the likelihood of X, the sum of its `score_samples`."""
        return float(self.score_samples(X).sum(dtype=np.float64))

    def sample(self, n_samples: int = 1, random_state: Any = None) -> np.ndarray:
        """Samples from the density, ``(n_samples, n_features)``."""
        check_is_fitted(self)
        rng = check_random_state(random_state)
        share = None if self._weights is None else _shares(self._weights)
        centres = self._X[rng.choice(len(self._X), n_samples, p=share)]
        return centres + rng.normal(size=centres.shape) * self.bandwidth_


def _bandwidth(value: Any, X: np.ndarray, weights: np.ndarray | None) -> Any:
    h, dim = np.asarray(value, dtype=np.float64), X.shape[1]
    is_flag = isinstance(value, bool)
    if is_flag or h.shape not in ((), (dim,)) or not ((h > 0) & (h < np.inf)).all():
        raise ValueError(
            f"bandwidth must be a positive number, or one for each of {dim} features, got {value!r}"
            f"{covariance_hint(h, dim, 'X')}"
        )
    check_reach(X, h, weights)
    return h if h.ndim else float(h)


def _weights(sample_weight: Any, X: np.ndarray) -> np.ndarray | None:
    if sample_weight is None:
        return None
    return _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)


def _shares(weights: np.ndarray) -> np.ndarray:
    """The weights over their sum, which itself may overflow."""
    weights = weights / weights.max()
    return weights / weights.sum()


def _in_units(array: np.ndarray, axis: int | None = None) -> tuple[np.ndarray, Any]:
    """The array divided by a power of two near its largest magnitude, of all or along an axis; that power."""
    unit = np.ldexp(1.0, np.frexp(np.abs(array).max(axis=axis))[1])
    return array / unit, unit


def _search(
    X: np.ndarray, y: np.ndarray, weights: np.ndarray, per_feature: bool, max_steps: int
) -> tuple[Any, float]:
    """The bandwidth of the least leave-one-out error, and that error."""
    n, dim = X.shape
    if n < 2:
        raise ValueError(f"leave_one_out needs at least 2 samples with a weight, got n_samples = {n}")
    # In units in which no square overflows or underflows.
    X, unit_of_x = _in_units(X - X.mean(axis=0), axis=0)
    weights = _shares(weights)
    y, unit_of_y = _in_units(y - weights @ y)
    spread = X.std(axis=0)
    log_scott = np.log(np.where(spread > 0, spread, 1.0)) + np.log(unit_of_x) - np.log(n) / (dim + 4)
    if not per_feature:
        log_scott = np.full(dim, log_scott.mean())
    unit = float(weights @ (y * y).sum(axis=1)) or 1.0

    def bandwidth_at(change: Any) -> np.ndarray:
        """In units of X; `change` is the log of the bandwidths over Scott's rule."""
        return np.exp(log_scott - np.log(unit_of_x) + change)

    def error(change: np.ndarray) -> tuple[float, np.ndarray]:
        """In units of the variance, with its gradient."""
        value, slope = _leave_one_out(X, bandwidth_at(change), y, weights)
        return value / unit, (slope if per_feature else slope.sum(keepdims=True)) / unit

    num = dim if per_feature else 1
    start = min(
        _STARTS, key=lambda step: _error(_from_others(X, bandwidth_at(step), y, weights) - y, weights)
    )
    bounds = [(-_SPAN, _SPAN)] * num
    found = minimize(
        error, np.full(num, start), jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": max_steps}
    )
    bandwidth = np.exp(log_scott + found.x)
    with np.errstate(over="ignore"):
        least = float(found.fun * unit * unit_of_y * unit_of_y)
    return bandwidth if per_feature else float(bandwidth[0]), least


def _from_others(X: np.ndarray, bandwidth: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The weighted mean of the others' targets, for each sample."""
    return fastattn.kernel_regression(X, X, y, bandwidth=bandwidth, weights=weights, leave_one_out=True)


def _error(wrong: np.ndarray, weights: np.ndarray) -> float:
    return float(weights @ (wrong * wrong).sum(axis=1))


def _leave_one_out(
    X: np.ndarray, bandwidth: np.ndarray, y: np.ndarray, weights: np.ndarray
) -> tuple[float, np.ndarray]:
    """The error, and its gradient with respect to the logarithm of each bandwidth.

    The derivative of a prediction is the covariance, among the others, of targets and squared distances in
    bandwidths. It takes the means of X, X**2 and their products with y: more targets of the same regression.
    They round it by ``eps * R**2`` for samples R bandwidths from the mean.
    """
    (n, dim), num = X.shape, y.shape[1]
    powers = np.concatenate([X, X * X], axis=1)
    products = (y[:, :, None] * powers[:, None]).reshape(n, -1)
    means = _from_others(X, bandwidth, np.concatenate([y, powers, products], axis=1), weights)
    predicted, of_powers, of_products = np.split(means, [num, num + 2 * dim], axis=1)
    wrong = predicted - y
    covariance = of_products.reshape(n, num, 2 * dim) - predicted[:, :, None] * of_powers[:, None]
    change = 2 * np.einsum("n,ne,ned->nd", weights, wrong, covariance)
    slope = (change[:, dim:] - 2 * X * change[:, :dim]).sum(axis=0) / bandwidth**2
    return _error(wrong, weights), slope
