"""Kernel regression and density, label propagation and mean shift, as estimators of scikit-learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

import fastattn
from fastattn._api.kernel_methods import check_reach, covariance_hint, log_norm
from fastattn._call.arguments import check_bool, check_number_dtype, count
from fastattn._call.options import refusing
from fastattn.integrations._common import extra

with extra("sklearn"):
    from scipy.optimize import minimize
    from scipy.sparse import issparse
    from sklearn import cluster, semi_supervised
    from sklearn.base import BaseEstimator, RegressorMixin, _fit_context
    from sklearn.metrics import pairwise_distances_argmin_min
    from sklearn.utils import check_array, check_random_state
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

_FLOATS = [np.float64, np.float32]
_STARTS = np.log(2.0) * np.arange(-4, 5)  # of a search, around Scott's rule
_SPAN = np.log(1e4)  # how far from it a search goes


class KernelRegressor(RegressorMixin, BaseEstimator):
    """Nadaraya-Watson regression with a Gaussian kernel, by `fastattn.kernel_regression`.

    Parameters
    ----------
    bandwidth : float, array_like of shape (n_features,), or str, default 1.0
        The standard deviation of the Gaussian, of all features or of each. ``"leave_one_out"`` minimises the
        weighted mean squared error of predicting each sample from all others. ``"scott"`` and ``"silverman"``
        are the rules of `KernelDensity`, which look at the sizes of X alone.
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
        bandwidth: float | Any | Literal["leave_one_out", "scott", "silverman"] = 1.0,
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
        if isinstance(self.bandwidth, str) and self.bandwidth == "leave_one_out":
            w = np.ones(len(X)) if weights is None else weights
            samples, targets, w = (array[w > 0].astype(np.float64) for array in (X, y.reshape(len(y), -1), w))
            check_bool(self.per_feature, "per_feature")
            max_steps = count(self.max_steps, "max_steps", 0, 2**31 - 1)
            found = _search(samples, targets, w, self.per_feature, max_steps)
            self.bandwidth_, self.leave_one_out_error_ = found
        else:
            self.bandwidth_ = _bandwidth(self.bandwidth, X, weights, "leave_one_out")
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
        by its square: `fastattn.integrations.scipy.gaussian_kde` has these densities.

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
        weights = _weights(sample_weight, X)
        self.bandwidth_ = _bandwidth(self.bandwidth, X, weights)
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


class _Product(NamedTuple):
    """What scikit-learn multiplies labels by in place of a matrix, or of the transpose of one.

    A tuple, because scikit-learn's dispatch on array libraries refuses other objects that are no arrays.
    """

    of: Callable[[np.ndarray], np.ndarray]
    ndim: int = 2

    def __matmul__(self, labels: np.ndarray) -> np.ndarray:
        return self.of(labels)

    @property
    def T(self) -> _Product:
        return self


class _WithoutMatrix(BaseEstimator):
    """scikit-learn's label propagation, where a product with the matrix of kernels is a kernel regression."""

    def _is_without_matrix(self, *arrays: Any) -> bool:
        return self.kernel == "rbf" and self.gamma > 0 and not any(map(issparse, arrays))

    def _sums(
        self, points: Any, labels: np.ndarray, leave_one_out: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """The product of kernels and labels: its rows divided by their sums, and the logs of these sums.

        Samples without a label have weight 0, so the rows are right also where all kernels underflow.
        """
        X = np.asarray(self.X_, np.float64)
        points = X if points is self.X_ else np.asarray(points, np.float64)
        bandwidth = np.full(X.shape[1], (2 * self.gamma) ** -0.5)
        mass = labels.sum(axis=1)
        means, log_density = fastattn.kernel_regression(
            points,
            X,
            labels / np.where(mass > 0, mass, 1)[:, None],
            bandwidth=bandwidth,
            weights=mass,
            leave_one_out=leave_one_out,
            return_log_density=True,
        )
        return means, log_density + log_norm(mass, len(X), bandwidth, leave_one_out)

    def _build_graph(self) -> Any:
        return self._product() if self._is_without_matrix(self.X_) else super()._build_graph()

    def _get_kernel(self, X: Any, y: Any = None) -> Any:
        if y is None or not self._is_without_matrix(X, y):
            return super()._get_kernel(X, y)
        return _Product(lambda labels: self._sums(y, labels)[0])  # scikit-learn divides by the sums, too


class LabelPropagation(_WithoutMatrix, semi_supervised.LabelPropagation):
    """scikit-learn's `LabelPropagation`, whose Gaussian kernel takes no matrix of all pairs of samples.

    Parameters
    ----------
    kernel : {"rbf", "knn"} or callable, default "rbf"
        With another kernel than ``"rbf"``, all is scikit-learn's code.
    gamma : float, default 20
        The kernel is ``exp(-gamma * distance**2)``. 0 is left to scikit-learn.
    n_neighbors, max_iter, tol, n_jobs
        As scikit-learn's.

    Attributes
    ----------
    X_, classes_, label_distributions_, transduction_, n_iter_, n_features_in_, feature_names_in_
        As scikit-learn's.

    Notes
    -----
    A step is a `fastattn.kernel_regression` of the labels on the samples, in float64: it computes all kernels
    again, and needs memory for copies of the samples alone. Results are scikit-learn's up to rounding, and so
    is the number of steps; for float32 samples those of the same numbers in float64. Where all kernels
    underflow, scikit-learn finds no label, and NaN for new samples; here the nearest labels decide for new
    samples, and may for others. Sparse samples are left to scikit-learn.

    References
    ----------
    .. [1] Zhu and Ghahramani, "Learning from Labeled and Unlabeled Data with Label Propagation",
       CMU-CALD-02-107, 2002.

    Examples
    --------
    >>> import numpy as np
    >>> from fastattn.integrations.sklearn import LabelPropagation
    >>> rng = np.random.default_rng(0)
    >>> X = np.concatenate([rng.standard_normal((500, 2)), rng.standard_normal((500, 2)) + 6])
    >>> y = np.full(1000, -1)  # not labelled
    >>> y[[0, 999]] = 0, 1
    >>> model = LabelPropagation(gamma=2).fit(X, y)
    >>> int(model.transduction_[:500].sum()), int(model.transduction_[500:].sum())
    (0, 500)
    """

    def _product(self) -> _Product:
        """W over the sums of its rows."""
        _, log_rows = self._sums(self.X_, np.ones((len(self.X_), 1)))

        def product(labels: np.ndarray) -> np.ndarray:
            means, logs = self._sums(self.X_, labels)
            return means * np.exp(logs - log_rows)[:, None]

        return _Product(product)


class LabelSpreading(_WithoutMatrix, semi_supervised.LabelSpreading):
    """scikit-learn's `LabelSpreading`, whose Gaussian kernel takes no matrix of all pairs of samples.

    Parameters
    ----------
    kernel, gamma, n_neighbors, max_iter, tol, n_jobs
        As those of `LabelPropagation`; `max_iter` is 30 by default.
    alpha : float, default 0.2
        How much of a label comes from the others, above 0 and below 1.

    Attributes
    ----------
    X_, classes_, label_distributions_, transduction_, n_iter_, n_features_in_, feature_names_in_
        As scikit-learn's.

    Notes
    -----
    Those of `LabelPropagation`.

    References
    ----------
    .. [1] Zhou, Bousquet, Lal, Weston and Schoelkopf, "Learning with Local and Global Consistency", 2003.

    Examples
    --------
    >>> import numpy as np
    >>> from fastattn.integrations.sklearn import LabelSpreading
    >>> rng = np.random.default_rng(0)
    >>> X = np.concatenate([rng.standard_normal((500, 2)), rng.standard_normal((500, 2)) + 6])
    >>> y = np.full(1000, -1)  # not labelled
    >>> y[[0, 999]] = 0, 1
    >>> LabelSpreading(gamma=2, alpha=0.9).fit(X, y).predict([[1.0, 1.0], [5.0, 5.0]])
    array([0, 1])
    """

    def _product(self) -> _Product:
        """``D**-0.5 @ W @ D**-0.5``: W has a diagonal of 0, D the sums of its rows."""
        _, log_rows = self._sums(self.X_, np.ones((len(self.X_), 1)), leave_one_out=True)
        is_alone = np.exp(log_rows) == 0
        log_roots = np.where(is_alone, 0, 0.5 * log_rows)

        def product(labels: np.ndarray) -> np.ndarray:
            means, logs = self._sums(self.X_, labels * np.exp(-log_roots)[:, None], leave_one_out=True)
            return means * np.where(is_alone, 0, np.exp(logs - log_roots))[:, None]

        return _Product(product)


class GaussianMeanShift(cluster.MeanShift):
    """Mean shift clustering with a Gaussian kernel: each seed climbs to a mode of the density.

    Its interface is that of scikit-learn's `MeanShift`, whose kernel is flat.

    Parameters
    ----------
    bandwidth : float, optional
        The standard deviation of the Gaussian. By default ``estimate_bandwidth(X)`` of scikit-learn, the
        radius of a flat kernel, over ``sqrt(n_features + 4)``: both then climb densities of kernels of the
        same variance [1]_.
    seeds : array_like of shape (n_seeds, n_features), optional
        Where to start; by default at each sample.
    bin_seeding : bool, default False
        Start at the points of a grid near samples, a bandwidth from each other.
    min_bin_freq : int, default 1
        How many samples such a point must have.
    cluster_all : bool, default True
        Whether all samples belong to the nearest mode. If not, those farther from it than
        ``bandwidth * sqrt(n_features + 4)`` have the label -1.
    n_jobs : int, optional
        Of `estimate_bandwidth` alone.
    max_iter : int, default 300
        The most steps of a seed. It stops before when a step is shorter than a thousandth of the bandwidth.

    Attributes
    ----------
    cluster_centers_ : ndarray of shape (n_clusters, n_features)
        The modes, the densest first. Of those within a bandwidth of each other the densest is kept.
    labels_ : ndarray of shape (n_samples,)
    n_iter_ : int
        Steps of the seed that took most.
    n_features_in_, feature_names_in_
        As scikit-learn's.

    Notes
    -----
    A step of all seeds is one `fastattn.kernel_regression` of the samples on themselves. The time grows with
    samples times seeds, and memory with neither's product.

    References
    ----------
    .. [1] Cheng, "Mean Shift, Mode Seeking, and Clustering", IEEE Transactions on Pattern Analysis and
       Machine Intelligence 17, 1995. A flat kernel climbs a density of Epanechnikov's, a Gaussian its own.

    Examples
    --------
    >>> import numpy as np
    >>> from fastattn.integrations.sklearn import GaussianMeanShift
    >>> rng = np.random.default_rng(0)
    >>> X = np.concatenate([rng.standard_normal((300, 2)), rng.standard_normal((200, 2)) + 6])
    >>> model = GaussianMeanShift(bandwidth=1.0).fit(X)
    >>> len(model.cluster_centers_)
    2
    >>> model.predict([[1.0, 1.0], [5.0, 5.0]])
    array([0, 1])
    """

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: Any, y: Any = None) -> GaussianMeanShift:
        """Climb, and label the samples.

        Parameters
        ----------
        X : array_like, shape (n_samples, n_features)
        y : None
            Not used.

        Returns
        -------
        self
        """
        X = validate_data(self, X, dtype=_FLOATS)
        flat_radius = np.sqrt(X.shape[1] + 4)  # in bandwidths
        bandwidth = self.bandwidth
        if bandwidth is None:
            bandwidth = cluster.estimate_bandwidth(X, n_jobs=self.n_jobs) / flat_radius
            if not bandwidth:
                raise ValueError(f"samples are too few or equal, say bandwidth=; n_samples = {len(X)}")
        bandwidth = _bandwidth(bandwidth, X, None)
        seeds = self.seeds
        if seeds is None:
            seeds = cluster.get_bin_seeds(X, bandwidth, self.min_bin_freq) if self.bin_seeding else X
        points = check_array(seeds, dtype=X.dtype, copy=True)
        climbing = np.arange(len(points))
        self.n_iter_ = 0
        while len(climbing) and self.n_iter_ < self.max_iter:
            means = fastattn.kernel_regression(points[climbing], X, X, bandwidth=bandwidth)
            steps = np.linalg.norm(means - points[climbing], axis=1)
            points[climbing] = means
            climbing = climbing[steps > 1e-3 * bandwidth]
            self.n_iter_ += 1
        heights = fastattn.kernel_logsumexp(points, X, bandwidth=bandwidth)
        points = points[np.argsort(-heights, kind="stable")]
        modes = []
        while len(points):
            modes.append(points[0])
            points = points[np.linalg.norm(points - points[0], axis=1) > bandwidth]
        self.cluster_centers_ = np.stack(modes)
        self.labels_, distances = pairwise_distances_argmin_min(X, self.cluster_centers_)
        if not self.cluster_all:
            self.labels_[distances > flat_radius * bandwidth] = -1
        return self


def _bandwidth(value: Any, X: np.ndarray, weights: np.ndarray | None, *others: str) -> Any:
    """The number or numbers, by the rule of that name if it is one; `others` are named beside the rules."""
    n, dim = X.shape
    if isinstance(value, str):
        rules = {"scott": n ** (-1 / (dim + 4)), "silverman": (n * (dim + 2) / 4) ** (-1 / (dim + 4))}
        if value not in rules:
            names = ", ".join(f'"{name}"' for name in (*rules, *others))
            raise ValueError(f"bandwidth must be positive numbers, or one of {names}, got {value!r}")
        value = rules[value]
    h = np.asarray(value, dtype=np.float64)
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
