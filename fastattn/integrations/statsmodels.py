"""statsmodels' kernel regression, its bandwidths by cross-validation, and its tests of significance."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

import fastattn
from fastattn.integrations._common import Methods, extra

with extra("statsmodels"):
    from statsmodels.nonparametric import kernel_regression
    from statsmodels.nonparametric._kernel_base import _adjust_shape

_EPS = float(np.finfo(np.float64).eps)
_KEPT = 1e8  # roundings that a covariance must be apart from 0
_MOST_PRODUCTS = 6  # variables, all of whose products are 2**6
_LEAST_SPREAD = 1e-6  # of weighted observations, relative to all: their covariance rounds by some 1e-16


class KernelReg(kernel_regression.KernelReg):
    """statsmodels' `KernelReg`, whose sums over pairs of points and data are `fastattn.kernel_regression`.

    Parameters, attributes, methods and errors are statsmodels'.

    Parameters
    ----------
    endog : array_like, shape (S,)
        The targets.
    exog : array_like, shape (S, D)
        The observations.
    var_type : str
        A letter for each variable. With one that is not ``"c"``, continuous, all is statsmodels' code.
    reg_type : {"ll", "lc"}, default "ll"
        Local linear, or local constant: Nadaraya and Watson's.
    bw : {"cv_ls", "aic"} or array_like of shape (D,), default "cv_ls"
        The standard deviation of the Gaussian for each variable, or how it is chosen.
    ckertype : str, default "gaussian"
        With another kernel, all is statsmodels' code.
    okertype, ukertype, defaults, rng
        As statsmodels'.

    Notes
    -----
    ``fit``, ``cv_loo`` and ``aic_hurvich`` compute here, in float64, and so do the searches for bandwidths
    and ``r_squared``. Local linear estimates and marginal effects follow from weighted means of products of
    variables, and agree to some 1e-8. Where these would cancel further, as around a point with too few
    observations for its slopes, statsmodels' own code computes that point; so it does marginal effects of
    local constant fits in more than 6 variables. Memory is that of `fastattn.kernel_regression`, where
    statsmodels' ``aic_hurvich`` has a matrix of all pairs.

    The searches compare losses: they go statsmodels' way, except where two losses differ by a rounding alone.
    Where all kernels underflow, statsmodels gives NaN, or 0; here the nearest observations decide.
    The marginal effects of local constant fits are by statsmodels' formula, one number for all variables.

    A bandwidth so small that an observation lies 1e120 of them from the mean is a ValueError.

    References
    ----------
    .. [1] Li and Racine, "Cross-Validated Local Linear Nonparametric Regression", Statistica Sinica 14, 2004.
    .. [2] Hurvich, Simonoff and Tsai, "Smoothing Parameter Selection in Nonparametric Regression Using an
       Improved Akaike Information Criterion", Journal of the Royal Statistical Society B 60, 1998.

    Examples
    --------
    >>> import numpy as np
    >>> from statsmodels.nonparametric import kernel_regression
    >>> from fastattn.integrations.statsmodels import KernelReg
    >>> rng = np.random.default_rng(0)
    >>> x = rng.uniform(-3, 3, 100)
    >>> y = np.sin(x) + 0.1 * rng.standard_normal(100)
    >>> model = KernelReg(y, x, "c", reg_type="lc", rng=rng)
    >>> expected = kernel_regression.KernelReg(y, x, "c", reg_type="lc", bw=model.bw, rng=rng)
    >>> np.allclose(model.fit()[0], expected.fit()[0], rtol=1e-10)
    True
    """

    def fit(self, data_predict: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """The means, ``(L,)``, and their marginal effects, ``(L, D)``; by default at the observations."""
        points = self.exog if data_predict is None else _adjust_shape(data_predict, self.k_vars)
        func = self.est[self.reg_type]
        if not _is_ours(self, func, self.bw, points):
            return _methods.theirs["fit"](self, data_predict)
        if _is_linear(func):
            return _local_linear(self, self.bw, points)
        return _local_constant(self, self.bw, points), _effects_of_constant(self, self.bw, points)

    def cv_loo(self, bw: Any, func: Any) -> np.ndarray:
        """The mean squared error of predicting each observation from all others, ``(1,)``."""
        if not _is_ours(self, func, bw, self.exog):
            return _methods.theirs["cv_loo"](self, bw, func)
        if _is_linear(func):
            mean, _ = _local_linear(self, bw, self.exog, leave_one_out=True)
        else:
            mean = _local_constant(self, bw, self.exog, leave_one_out=True)
        return np.square(self.endog - mean[:, None]).mean(axis=0)

    def aic_hurvich(self, bw: Any, func: Any = None) -> np.ndarray:
        """The information criterion of Hurvich, Simonoff and Tsai, ``(1,)``, as statsmodels has it."""
        func = self.est[self.reg_type]
        if not _is_ours(self, func, bw, self.exog):
            return _methods.theirs["aic_hurvich"](self, bw)
        is_linear = _is_linear(func)
        mean = _local_linear(self, bw, self.exog)[0] if is_linear else _local_constant(self, bw, self.exog)
        # The share that each observation has in its own mean.
        trace = np.exp(-fastattn.kernel_logsumexp(self.exog, self.exog, bandwidth=np.abs(bw))).mean()
        error = np.square(self.endog - mean[:, None]).mean(axis=0)
        return np.log(error) + (1 + trace) / (1 - (trace + 2 / self.nobs))


def _is_linear(func: Any) -> bool:
    return func.__func__ is kernel_regression.KernelReg._est_loc_linear


def _is_ours(model: Any, func: Any, bw: Any, points: np.ndarray) -> bool:
    """Whether statsmodels' estimate by `func` is a Gaussian regression of numbers."""
    own = kernel_regression.KernelReg
    return (
        getattr(func, "__func__", None) in (own._est_loc_linear, own._est_loc_constant)
        and model.ckertype == "gaussian"
        and set(model.var_type) == {"c"}
        and bool(np.isfinite(bw).all() and np.all(bw))
        and all(np.isfinite(array).all() for array in (model.endog, model.exog, points))
    )


def _means(
    model: Any, bw: Any, points: np.ndarray, targets: np.ndarray, leave_one_out: bool = False
) -> np.ndarray:
    """Of a Gaussian kernel, whose square the sign of a bandwidth does not change."""
    return fastattn.kernel_regression(
        points, model.exog, targets, bandwidth=np.abs(bw), leave_one_out=leave_one_out
    )


def _local_constant(model: Any, bw: Any, points: np.ndarray, leave_one_out: bool = False) -> np.ndarray:
    return _means(model, bw, points, model.endog.astype(np.float64), leave_one_out)[:, 0]


def _centred(model: Any, bw: Any, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The observations and the points, in bandwidths."""
    centre = model.exog.mean(axis=0)
    return (model.exog - centre) / np.abs(bw), (points - centre) / np.abs(bw)


def _effects_of_constant(model: Any, bw: Any, points: np.ndarray) -> np.ndarray:
    """The covariance of targets and ``prod(2 * (x - point) / bw**2)``, over the number of observations.

    The product is a sum over all subsets of variables: of the product of x over one, of -point over the rest.
    """
    x, at = _centred(model, bw, points)
    y = model.endog - model.endog.mean()
    effects, is_plain = np.empty(points.shape), np.zeros(len(points), bool)
    if model.k_vars <= _MOST_PRODUCTS:
        products, rest = np.ones((model.nobs, 1)), np.ones((len(points), 1))
        for of_x, of_point in zip(x.T, at.T, strict=True):
            products = np.concatenate([products, products * of_x[:, None]], axis=1)
            rest = np.concatenate([rest * -of_point[:, None], rest], axis=1)
        means = _means(model, bw, points, np.concatenate([products, y * products], axis=1))
        of_products, with_y = np.split(means, 2, axis=1)
        covariance = np.einsum("ls,ls->l", with_y - with_y[:, :1] * of_products, rest)  # products[:, 0] is 1
        effects[:] = np.prod(2 / np.abs(bw)) / model.nobs * covariance[:, None]
        largest = np.abs(y).max() * np.prod(np.abs(x).max(axis=0) + np.abs(at), axis=1)
        is_plain = np.abs(covariance) > _KEPT * _EPS * largest
    for i in np.flatnonzero(~is_plain):
        effects[i] = model._est_loc_constant(bw, model.endog, model.exog, points[i])[1]
    return effects


def _local_linear(
    model: Any, bw: Any, points: np.ndarray, leave_one_out: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The means and their slopes, of each point by its weighted covariances."""
    x, at = _centred(model, bw, points)
    unit = np.abs(x).max(axis=0)
    unit[unit == 0] = 1.0
    x, at = x / unit, at / unit
    y = model.endog - (mean_of_y := model.endog.mean())
    first, second = np.triu_indices(model.k_vars)
    targets = np.concatenate([y, x, y * x, x[:, first] * x[:, second]], axis=1)
    means = _means(model, bw, points, targets, leave_one_out)
    of_y, of_x, of_yx, of_xx = np.split(means, [1, 1 + model.k_vars, 1 + 2 * model.k_vars], axis=1)
    covariance = np.empty((len(points), model.k_vars, model.k_vars))
    covariance[:, first, second] = covariance[:, second, first] = of_xx - of_x[:, first] * of_x[:, second]
    is_plain = np.linalg.eigvalsh(covariance)[:, 0] > _LEAST_SPREAD

    mean, slopes = np.empty(len(points)), np.empty(points.shape)
    of_y, of_x, of_yx = of_y[is_plain], of_x[is_plain], of_yx[is_plain]
    slope = np.linalg.solve(covariance[is_plain], (of_yx - of_y * of_x)[..., None])[..., 0]
    mean[is_plain] = mean_of_y + of_y[:, 0] + np.einsum("ld,ld->l", at[is_plain] - of_x, slope)
    slopes[is_plain] = slope / (unit * np.abs(bw))
    for i in np.flatnonzero(~is_plain):
        endog, exog = (np.delete(a, i, 0) if leave_one_out else a for a in (model.endog, model.exog))
        found, effects = model._est_loc_linear(bw, endog, exog, points[i])
        mean[i], slopes[i] = found[0], effects[:, 0]
    return mean, slopes


_methods = Methods(kernel_regression.KernelReg, KernelReg, "fit", "cv_loo", "aic_hurvich")


def install() -> None:
    """Let statsmodels' `KernelReg` itself compute as `KernelReg` does.

    It holds for the process, until `uninstall`, for objects that there are already, and for those that
    statsmodels makes itself: in ``sig_test``, and with ``EstimatorSettings(efficient=True, n_jobs=1)``.

    Examples
    --------
    >>> import numpy as np
    >>> from statsmodels.nonparametric.kernel_regression import KernelReg
    >>> from fastattn.integrations.statsmodels import installed
    >>> rng = np.random.default_rng(0)
    >>> x = rng.uniform(-3, 3, (100, 2))
    >>> y = np.sin(x[:, 0]) + 0.1 * rng.standard_normal(100)
    >>> model = KernelReg(y, x, "cc", bw=[0.5, 1.0], rng=0)
    >>> with installed():
    ...     model.sig_test([0]), model.sig_test([1])
    ('***', 'Not Significant')
    """
    _methods.install()


def uninstall() -> None:
    """Give statsmodels' class its own methods back."""
    _methods.uninstall()


def installed() -> AbstractContextManager[None]:
    """`install` for the length of a ``with``, in all threads. The previous methods are restored after it."""
    return _methods.installed()
