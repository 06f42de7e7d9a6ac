"""The estimators by scikit-learn's rules: its checks, its results, and the leave-one-out bandwidth."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import fastattn
from fastattn._call.hints import ANSWERS, refusal
from tests.process import python

pytest.importorskip("sklearn")

from scipy.optimize import check_grad
from scipy.sparse import csr_array
from scipy.special import logsumexp
from sklearn import cluster, neighbors, semi_supervised
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.utils.estimator_checks import parametrize_with_checks

from fastattn.integrations.sklearn import (
    GaussianMeanShift,
    KernelDensity,
    KernelRegressor,
    LabelPropagation,
    LabelSpreading,
    _leave_one_out,
)

#: Two equal samples predict each other where one is left out: they are not one of twice the weight.
EXPECTED = {"check_sample_weight_equivalence_on_dense_data": "leave_one_out looks at samples, not weights"}


@parametrize_with_checks(
    [KernelRegressor(), KernelDensity(), LabelPropagation(), LabelSpreading(), GaussianMeanShift()]
)
def test_by_scikit_learns_checks(estimator, check):
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks(
    [KernelRegressor(bandwidth="leave_one_out")], expected_failed_checks=lambda _: EXPECTED
)
def test_by_scikit_learns_checks_with_a_search(estimator, check):
    check(estimator)


def data(n=300, dim=3, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, dim))
    return X, np.sin(2 * X[:, 0]) + 0.2 * rng.standard_normal(n), rng.random(n)


class TestDensity:
    @pytest.mark.parametrize("bandwidth", [0.05, 0.7, 20.0, "scott", "silverman"])
    @pytest.mark.parametrize("dim", [1, 3, 8])
    @pytest.mark.parametrize("weighted", [False, True])
    def test_scores_are_scikit_learns(self, bandwidth, dim, weighted):
        X, _, weights = data(dim=dim)
        weights = weights if weighted else None
        ours = KernelDensity(bandwidth=bandwidth).fit(X, sample_weight=weights)
        theirs = neighbors.KernelDensity(bandwidth=bandwidth, rtol=1e-14).fit(X, sample_weight=weights)
        assert ours.bandwidth_ == pytest.approx(theirs.bandwidth_, rel=1e-15)
        h = ours.bandwidth_
        points = np.r_[X[:50] + 0.3 * h, 3 * X[50:100]]
        squares = ((points[:, None] - X) ** 2).sum(axis=-1)
        share = np.full(len(X), 1 / len(X)) if weights is None else weights / weights.sum()
        exact = logsumexp(-squares / (2 * h**2), b=share, axis=1) - dim * np.log(h * np.sqrt(2 * np.pi))
        np.testing.assert_allclose(ours.score_samples(points), exact, rtol=1e-12)
        assert ours.score(points) == pytest.approx(exact.sum(), rel=1e-12)
        # Far from the data scikit-learn's trees lose digits, and among weights the nearest sample.
        is_near = squares.min(axis=1) < (2 * h) ** 2
        got, wanted = ours.score_samples(points[is_near]), theirs.score_samples(points[is_near])
        np.testing.assert_allclose(got, wanted, rtol=1e-6)

    @pytest.mark.parametrize("ratio", range(15), ids=lambda n: f"1e{n}")
    @pytest.mark.parametrize("dtype", ["float64", "float32"])
    def test_scores_are_scikit_learns_at_any_ratio(self, ratio, dtype):
        """Of spread to bandwidth; near samples, and between them."""
        rng = np.random.default_rng(ratio)
        for dim in (1, 3):
            h = 10.0**-ratio
            X = rng.standard_normal((150, dim))
            X = np.concatenate([X, X + h * rng.standard_normal(X.shape)]).astype(dtype)
            points = np.concatenate([X[:50] + h * rng.standard_normal((50, dim)), 2 * X[50:70]]).astype(dtype)
            ours = KernelDensity(bandwidth=h).fit(X).score_samples(points)
            theirs = (
                neighbors.KernelDensity(bandwidth=h, leaf_size=300).fit(X).score_samples(points)
            )  # a single leaf
            assert ours.dtype == dtype
            np.testing.assert_allclose(ours, theirs, rtol=1e-12 if dtype == "float64" else 1e-7, atol=1e-12)

    def test_a_bandwidth_for_each_feature(self):
        X, _, _ = data()
        h = np.array([0.1, 1.0, 10.0])
        got = KernelDensity(bandwidth=h).fit(X).score_samples(X[:9])
        alike = KernelDensity(bandwidth=1.0).fit(X / h).score_samples(X[:9] / h) - np.log(h).sum()
        np.testing.assert_allclose(got, alike, rtol=1e-13)

    def test_samples_have_the_moments_of_the_mixture(self):
        X, _, weights = data()
        weights[X[:, 0] < 0] = 0
        model = KernelDensity(bandwidth=[0.1, 0.5, 2.0]).fit(X, sample_weight=weights)
        drawn = model.sample(200_000, random_state=0)
        mean = np.average(X, axis=0, weights=weights)
        variance = np.average((X - mean) ** 2, axis=0, weights=weights) + np.array([0.1, 0.5, 2.0]) ** 2
        np.testing.assert_allclose(drawn.mean(axis=0), mean, atol=5 * np.sqrt(variance.max() / 200_000))
        np.testing.assert_allclose(drawn.var(axis=0), variance, rtol=0.02)
        np.testing.assert_array_equal(drawn[:5], model.sample(200_000, random_state=0)[:5])


class TestRegressor:
    def test_predicts_by_kernel_regression(self):
        X, y, weights = data()
        for targets in (y, np.c_[y, -y, y**2]):
            model = KernelRegressor(bandwidth=[0.3, 1.0, 2.0]).fit(X, targets, sample_weight=weights)
            wanted = fastattn.kernel_regression(X[:7], X, targets, bandwidth=[0.3, 1.0, 2.0], weights=weights)
            np.testing.assert_array_equal(model.predict(X[:7]), wanted)

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_keeps_the_type(self, dtype):
        X, y, _ = (array.astype(dtype) for array in data())
        assert KernelRegressor().fit(X, y).predict(X).dtype == dtype

    @pytest.mark.parametrize("rule", ["scott", "silverman"])
    def test_rules_are_scikit_learns(self, rule):
        X, y, _ = data(dim=2)
        model = KernelRegressor(bandwidth=rule).fit(X, y)
        assert model.bandwidth_ == neighbors.KernelDensity(bandwidth=rule).fit(X).bandwidth_
        np.testing.assert_array_equal(
            model.predict(X), KernelRegressor(bandwidth=model.bandwidth_).fit(X, y).predict(X)
        )


class TestLeaveOneOut:
    def test_gradient(self):
        X, y, weights = data(40)
        y, weights = np.c_[y, y**2], weights / weights.sum()

        def value(log_h):
            return _leave_one_out(X, np.exp(log_h), y, weights)[0]

        def slope(log_h):
            return _leave_one_out(X, np.exp(log_h), y, weights)[1]

        for log_h in (np.zeros(3), np.array([-1.0, 0.5, 1.0])):
            assert check_grad(value, slope, log_h) < 1e-6 * (1e-3 + np.abs(slope(log_h)).max())

    @pytest.mark.parametrize("bandwidth", [1.0, 1e-6, 1e-12])
    def test_error_at_small_bandwidths(self, bandwidth):
        """Samples a bandwidth apart, whose squares cancel in products."""
        X, y, weights = data(60)
        X = X[np.arange(60) % 12] + bandwidth * X
        scores = -0.5 * (((X[:, None] - X) / bandwidth) ** 2).sum(axis=-1)
        scores[np.diag_indices(60)] = -np.inf
        kernels = weights * np.exp(scores - scores.max(axis=1, keepdims=True))
        others = kernels @ y / kernels.sum(axis=1)
        error, _ = _leave_one_out(X, np.full(3, bandwidth), y[:, None], weights)
        assert error == pytest.approx(weights @ (others - y) ** 2, rel=1e-12)

    def test_error_is_that_of_fits_without_each(self):
        X, y, weights = data(30)
        model = KernelRegressor(bandwidth="leave_one_out").fit(X, y, sample_weight=weights)
        errors = []
        for i in range(30):
            keep = np.arange(30) != i
            without = KernelRegressor(bandwidth=model.bandwidth_)
            without.fit(X[keep], y[keep], sample_weight=weights[keep])
            errors.append((without.predict(X[[i]])[0] - y[i]) ** 2)
        assert model.leave_one_out_error_ == pytest.approx(np.average(errors, weights=weights), rel=1e-10)

    def test_one_for_all_is_the_least_of_a_grid(self):
        X, y, _ = data()
        model = KernelRegressor(bandwidth="leave_one_out", per_feature=False).fit(X, y)
        assert isinstance(model.bandwidth_, float)
        grid = np.geomspace(0.02, 5, 200)
        errors = [
            np.mean((fastattn.kernel_regression(X, X, y, bandwidth=h, leave_one_out=True) - y) ** 2)
            for h in grid
        ]
        assert model.leave_one_out_error_ <= min(errors) * (1 + 1e-6)
        assert abs(np.log(model.bandwidth_ / grid[np.argmin(errors)])) < 0.1

    @pytest.mark.parametrize("seed", range(3))
    def test_one_for_each_is_the_least_of_a_grid(self, seed):
        X, y, _ = data(150, dim=2, seed=seed)
        y = y + X[:, 1] ** 2
        model = KernelRegressor(bandwidth="leave_one_out").fit(X, y)
        grid = model.bandwidth_ * np.stack(np.meshgrid(*2 * [np.geomspace(0.2, 5, 25)]), -1).reshape(-1, 2)
        errors = [
            np.mean((fastattn.kernel_regression(X, X, y, bandwidth=h, leave_one_out=True) - y) ** 2)
            for h in grid
        ]
        assert model.leave_one_out_error_ <= min(errors) * (1 + 1e-4)

    def test_features_that_do_not_matter_are_smoothed_over(self):
        X, y, _ = data()
        one = KernelRegressor(bandwidth="leave_one_out", per_feature=False).fit(X, y)
        each = KernelRegressor(bandwidth="leave_one_out").fit(X, y)
        assert each.leave_one_out_error_ < 0.7 * one.leave_one_out_error_
        assert each.bandwidth_[1:].min() > 3 * each.bandwidth_[0]

    def test_units_and_zero_weights_do_not_matter(self):
        X, y, weights = data(80)
        weights[::4] = 0
        fitted = KernelRegressor(bandwidth="leave_one_out").fit(X, y, sample_weight=weights)
        seen = weights > 0
        alone = KernelRegressor(bandwidth="leave_one_out").fit(X[seen], y[seen], sample_weight=weights[seen])
        np.testing.assert_allclose(fitted.bandwidth_, alone.bandwidth_, rtol=1e-12)
        units = np.array([1e-3, 1.0, 1e3])
        other = KernelRegressor(bandwidth="leave_one_out").fit(
            X * units + 1e3, 1e3 * y, sample_weight=weights
        )
        assert other.leave_one_out_error_ == pytest.approx(1e6 * fitted.leave_one_out_error_, rel=1e-3)

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize(
        "of_x, of_y, of_weights",
        [(1, 1e155, 1), (1, 1e-160, 1), (1, 1, 1e306), (1e200, 1, 1), (1e-200, 1, 1e-300)],
    )
    def test_units_whose_squares_overflow(self, of_x, of_y, of_weights):
        X, y, weights = data(40)
        first, other = (
            KernelRegressor(bandwidth="leave_one_out").fit(x * X, z * y, sample_weight=w * weights)
            for x, z, w in ((1, 1, 1), (of_x, of_y, of_weights))
        )
        np.testing.assert_allclose(other.bandwidth_ / of_x, first.bandwidth_, rtol=1e-6)
        if of_weights > 1:
            density = KernelDensity(bandwidth=1.0).fit(X, sample_weight=of_weights * weights)
            assert density.sample(5, random_state=0).shape == (5, X.shape[1])

    def test_an_error_is_of_the_last_fit(self):
        X, y, _ = data(20)
        estimator = KernelRegressor(bandwidth="leave_one_out").fit(X, y)
        assert estimator.leave_one_out_error_ > 0
        assert not hasattr(estimator.set_params(bandwidth=1.0).fit(X, y), "leave_one_out_error_")


def labelled(n=300, share=0.1, seed=0):
    """Three clusters; most samples are not labelled."""
    rng = np.random.default_rng(seed)
    classes = rng.integers(0, 3, n)
    X = rng.standard_normal((n, 3)) + 3 * np.eye(3)[classes]
    return X, np.where(rng.random(n) < share, classes, -1)


def expected_labels(kind, X, y, gamma, alpha, n_iter):
    """The algorithm with its matrix, in extended precision."""
    X = X.astype(np.longdouble)
    kernels = np.exp(-gamma * ((X[:, None] - X) ** 2).sum(axis=-1))
    start = labels = (y[:, None] == np.unique(y)[1:]).astype(np.longdouble)
    if kind == "LabelSpreading":
        np.fill_diagonal(kernels, 0)
        roots = np.sqrt(kernels.sum(axis=1))
        for _ in range(n_iter):
            labels = alpha * (kernels / roots / roots[:, None] @ labels) + (1 - alpha) * start
    else:
        for _ in range(n_iter):
            labels = kernels @ labels
            labels = np.where(y[:, None] < 0, labels / labels.sum(axis=1, keepdims=True), start)
    return labels / labels.sum(axis=1, keepdims=True)


@pytest.mark.filterwarnings("ignore:max_iter", "ignore:invalid value")
@pytest.mark.parametrize("kind", ["LabelPropagation", "LabelSpreading"])
class TestLabels:
    def both(self, kind, X, y, **options):
        estimators = globals()[kind](**options), getattr(semi_supervised, kind)(**options)
        return [estimator.fit(X, y) for estimator in estimators]

    @pytest.mark.parametrize("gamma", [0.05, 0.5, 4.0])
    def test_labels_by_the_definition(self, kind, gamma):
        X, y = labelled()
        options = {"alpha": 0.7} if kind == "LabelSpreading" else {}
        model = globals()[kind](gamma=gamma, max_iter=40, tol=1e-6, **options).fit(X, y)
        exact = expected_labels(kind, X, y, gamma, 0.7, model.n_iter_)
        np.testing.assert_allclose(model.label_distributions_, exact.astype(float), rtol=1e-11, atol=1e-14)

    @pytest.mark.parametrize("gamma", [0.05, 1, 20, 1000.0])
    @pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
    def test_all_is_scikit_learns(self, kind, gamma, share):
        """But where kernels are 0 in floating point, and scikit-learn finds no label."""
        X, y = labelled(share=share)
        X[:2], y[:2] = [[50, 50, 50], [50, 50.3, 50]], -1
        ours, theirs = self.both(kind, X, y, gamma=gamma)
        assert ours.n_iter_ == theirs.n_iter_
        np.testing.assert_array_equal(ours.classes_, theirs.classes_)
        found, wanted = ours.label_distributions_, theirs.label_distributions_
        is_found = wanted.any(axis=1)
        assert is_found.sum() > (280 if gamma < 1000 else 100)
        np.testing.assert_allclose(found[is_found], wanted[is_found], rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(ours.transduction_[is_found], theirs.transduction_[is_found])
        points = X + 0.1
        found, wanted = ours.predict_proba(points), theirs.predict_proba(points)
        is_found &= np.isfinite(wanted).all(axis=1)
        np.testing.assert_allclose(found[is_found], wanted[is_found], rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(ours.predict(points)[is_found], theirs.predict(points)[is_found])

    def test_a_new_sample_far_from_all_has_the_nearest_label(self, kind):
        X, y = labelled(share=1.0)
        model = globals()[kind]().fit(X, y)
        nearest = model.transduction_[((X - 1e3) ** 2).sum(axis=1).argmin()]
        np.testing.assert_array_equal(model.predict([[1e3, 1e3, 1e3]]), nearest)

    @pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "bool", "longdouble"])
    def test_all_types_are_computed_as_float64(self, kind, dtype):
        X, y = labelled()
        X = X.astype(dtype)
        one, other = (globals()[kind](max_iter=20).fit(array, y) for array in (X, X.astype(np.float64)))
        np.testing.assert_array_equal(one.label_distributions_, other.label_distributions_)
        np.testing.assert_array_equal(one.predict_proba(X), other.predict_proba(X))

    @pytest.mark.parametrize(
        "options",
        [{"kernel": "knn"}, {"kernel": rbf_kernel}, {"gamma": 0}, {}],
        ids=["knn", "f", "0", "sparse"],
    )
    def test_the_rest_is_scikit_learns_code(self, kind, options):
        X, y = labelled()
        X = X if options else csr_array(X)
        ours, theirs = self.both(kind, X, y, **options)
        np.testing.assert_array_equal(ours.label_distributions_, theirs.label_distributions_)
        np.testing.assert_array_equal(ours.predict_proba(X), theirs.predict_proba(X))

    def test_there_is_no_matrix(self, kind):
        X, y = labelled(3000)
        tracemalloc.start()
        try:
            globals()[kind](max_iter=2).fit(X, y).predict_proba(X)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 3000 * 3000


class TestMeanShift:
    def climbed(self, X, point, bandwidth, steps):
        """From a point by so many steps, and its density, in extended precision."""
        X, point = X.astype(np.longdouble), point.astype(np.longdouble)
        for left in range(steps, -1, -1):
            kernels = np.exp(-0.5 * (((X - point) / bandwidth) ** 2).sum(axis=1))
            point = kernels @ X / kernels.sum() if left else point
        return point.astype(float), float(kernels.sum())

    @pytest.mark.parametrize("bandwidth", [0.3, 0.6, 1.5])
    def test_centres_are_the_modes(self, bandwidth):
        X, _ = labelled(200)
        model = GaussianMeanShift(bandwidth=bandwidth).fit(X)
        ends, heights = zip(
            *(self.climbed(X, centre, bandwidth, 1) for centre in model.cluster_centers_), strict=True
        )
        np.testing.assert_allclose(ends, model.cluster_centers_, atol=1e-3 * bandwidth)
        assert list(heights) == sorted(heights, reverse=True)
        apart = np.linalg.norm(model.cluster_centers_[:, None] - model.cluster_centers_, axis=-1)
        assert (apart[~np.eye(len(apart), dtype=bool)] > bandwidth).all()
        for sample in X[:20]:  # each climbs to a mode near a centre that is no lower
            end, height = self.climbed(X, sample, bandwidth, model.n_iter_)
            near = np.linalg.norm(model.cluster_centers_ - end, axis=1) <= 1.05 * bandwidth
            assert max(np.array(heights)[near]) >= height * (1 - 1e-4)

    def test_clusters_and_labels(self):
        rng = np.random.default_rng(0)
        classes = np.repeat([0, 1, 2], [150, 100, 50])
        X = rng.standard_normal((300, 2)) + np.array([[0, 0], [8, 0], [0, 8]])[classes]
        for options in ({}, {"bin_seeding": True}, {"seeds": X[::30]}, {"bandwidth": 1.0}):
            model = GaussianMeanShift(**options).fit(X)
            np.testing.assert_array_equal(model.labels_, classes)
            np.testing.assert_array_equal(model.predict(X), classes)
        radius = cluster.estimate_bandwidth(X)
        model = GaussianMeanShift(cluster_all=False, bandwidth=radius / np.sqrt(6)).fit(X)
        distance = np.linalg.norm(X - model.cluster_centers_[classes], axis=1)
        assert (distance > radius).any()
        np.testing.assert_array_equal(model.labels_, np.where(distance > radius, -1, classes))
        default = GaussianMeanShift().fit(X)
        np.testing.assert_array_equal(default.cluster_centers_, model.cluster_centers_)

    def test_seeds_and_steps(self):
        X, _ = labelled(200)
        seeds = np.array([[0.0, 0.0, 0.0], [3.0, 0.0, 0.0]])
        model = GaussianMeanShift(bandwidth=0.5, seeds=seeds, max_iter=0).fit(X)
        assert model.n_iter_ == 0
        np.testing.assert_array_equal(np.sort(model.cluster_centers_, axis=0), seeds)
        for steps in (1, 3):
            model.set_params(max_iter=steps).fit(X)
            ends = [self.climbed(X, seed, 0.5, steps)[0] for seed in seeds]
            assert model.n_iter_ == steps
            np.testing.assert_allclose(
                np.sort(model.cluster_centers_, axis=0), np.sort(ends, axis=0), rtol=1e-12
            )
        np.testing.assert_array_equal(seeds, [[0, 0, 0], [3, 0, 0]])

    def test_refused(self):
        X, _ = labelled(5)
        with pytest.raises(ValueError, match=r"say bandwidth=; n_samples = 5"):
            GaussianMeanShift().fit(X)
        with pytest.raises(ValueError, match=r"same number of features"):
            GaussianMeanShift(bandwidth=1.0, seeds=[[0.0]]).fit(X)
        with pytest.raises(ValueError, match=r"'bandwidth' parameter"):
            GaussianMeanShift(bandwidth=0.0).fit(X)


@pytest.mark.slow
def test_scikit_learns_own_tests():
    """Of label propagation, but those that look at the matrix."""
    tests = Path(semi_supervised.__file__).parent / "tests" / "test_label_propagation.py"
    if not tests.exists():
        pytest.skip("this scikit-learn comes without its tests")
    code = f"""
import os
import sys
import pytest
from sklearn.semi_supervised import _label_propagation as module
from fastattn.integrations import sklearn
module.LabelPropagation, module.LabelSpreading = sklearn.LabelPropagation, sklearn.LabelSpreading
chosen = ["-k", "not closed_form", {str(tests)!r}]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-c", os.devnull, *chosen]))
"""
    assert " passed" in python(code, timeout=600)


@pytest.mark.parametrize("bandwidth", [0, -1.0, np.inf, np.nan, [1.0, 2.0], "best"], ids=str)
@pytest.mark.parametrize("estimator", [KernelRegressor, KernelDensity])
def test_bandwidths_refused(estimator, bandwidth):
    X, y, _ = data()
    with pytest.raises(ValueError, match=r"^bandwidth must be "):
        estimator(bandwidth=bandwidth).fit(X, y)


@pytest.mark.parametrize("estimator", [KernelRegressor, KernelDensity])
class TestMessages:
    def test_a_matrix_is_to_whiten(self, estimator):
        X, y, _ = data(dim=2)
        with pytest.raises(ValueError, match=r"whiten X by its Cholesky factor"):
            estimator(bandwidth=np.eye(2)).fit(X, y)

    @pytest.mark.parametrize("weighted", [False, True])
    def test_a_bandwidth_too_small_is_refused_by_fit(self, estimator, weighted):
        X, y, weights = data()
        weights[0], X[0] = 0, 1e300  # which is not looked at
        call = {"sample_weight": weights} if weighted else {}
        X = X if weighted else X[1:]
        for bandwidth in (1e-150, [1.0, 1e-150, 1.0]):
            with pytest.raises(ValueError, match=r"^bandwidth is too small: .* bandwidths from the mean"):
                estimator(bandwidth=bandwidth).fit(X, y[len(y) - len(X) :], **call)
        estimator(bandwidth=1e-100).fit(X, y[len(y) - len(X) :], **call)

    @pytest.mark.parametrize(
        ("argument", "said"),
        [
            ("kernel", "leave it out: the kernel is Gaussian"),
            ("bw_method", "say bandwidth=, a standard deviation"),
            ("metric", "leave it out: distances are Euclidean"),
            ("atol", "leave it out: all pairs are computed"),
            ("sample_weight", "fit takes sample_weight"),
            ("gamma", "say bandwidth=(2 * gamma) ** -0.5"),
            ("bandwith", "Did you mean 'bandwidth'?"),
        ],
    )
    def test_arguments_of_others(self, estimator, argument, said):
        with pytest.raises(TypeError) as caught:
            estimator(**{argument: 1})
        message = str(caught.value)
        assert message.startswith(f"{estimator.__name__}() got an unexpected keyword argument {argument!r}")
        assert said in message

    def test_hints_name_what_it_takes(self, estimator):
        parameters = set(estimator().get_params())
        for argument in ANSWERS.keys() - parameters:
            message = refusal(estimator.__init__, (), [argument])
            assert set(re.findall(r"\b(\w+)=(?!=)", message)) <= parameters, message


def test_one_sample_leaves_none():
    with pytest.raises(ValueError, match=r"leave_one_out needs at least 2 samples"):
        KernelRegressor(bandwidth="leave_one_out").fit(np.ones((3, 2)), np.ones(3), sample_weight=[1, 0, 0])
