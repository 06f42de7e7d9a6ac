"""SciPy's density by its own rules, and by a loop in extended precision."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest

import fastattn
from tests.process import python

pytest.importorskip("scipy")

from scipy import stats

from fastattn.integrations.scipy import gaussian_kde, install, installed, uninstall

BANDWIDTHS = {
    "default": None,
    "scott": "scott",
    "silverman": "silverman",
    "number": 0.3,
    "callable": lambda kde: 0.5 * kde.scotts_factor(),
}


def data(dim: int, n: int = 200, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((dim, dim)) @ rng.standard_normal((dim, n)) + rng.standard_normal((dim, 1))


def log_density(kde: stats.gaussian_kde, points: np.ndarray) -> np.ndarray:
    """Its definition, in extended precision but for the Cholesky factor."""
    factor = kde.cho_cov.astype(np.longdouble)
    rest = points.astype(np.longdouble)[:, :, None] - kde.dataset.astype(np.longdouble)[:, None]
    squares = 0
    for i in range(kde.d):  # solved forwards
        white = rest[i] / factor[i, i]
        rest = rest - factor[:, i, None, None] * white
        squares = squares + white**2
    top = -0.5 * squares[:, kde.weights > 0].min(axis=1, keepdims=True)
    sums = (kde.weights * np.exp(-0.5 * squares - top)).sum(axis=1)
    norm = np.log(np.diag(factor)).sum() + 0.5 * kde.d * np.log(2 * np.longdouble(np.pi))
    return top[:, 0] + np.log(sums) - norm


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dim", [1, 2, 5])
@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
def test_densities(bandwidth: str, dim: int, weighted: bool) -> None:
    x = data(dim)
    weights = np.random.default_rng(1).random(200) if weighted else None
    options = {"bw_method": BANDWIDTHS[bandwidth], "weights": weights}
    ours, theirs = (kind(x, **options) for kind in (gaussian_kde, stats.gaussian_kde))
    for name in ("d", "n", "neff", "factor", "covariance", "cho_cov", "inv_cov", "weights", "dataset"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    points = np.concatenate([x[:, :30] + 0.1, 3 * x[:, 30:40], 1e3 * x[:, 40:45], 1e12 * x[:, 45:50]], axis=1)
    exact = log_density(ours, points)
    np.testing.assert_allclose(ours.logpdf(points), exact.astype(float), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(theirs.logpdf(points), exact.astype(float), rtol=1e-11, atol=1e-12)
    for density in (ours, ours.evaluate, ours.pdf):
        np.testing.assert_allclose(density(points), np.exp(exact).astype(float), rtol=1e-12)


def test_a_shift_common_to_all_changes_nothing() -> None:
    x = np.rint(2**20 * data(3)) / 2**20
    points = x[:, :20] + 0.5
    near, far = gaussian_kde(x), gaussian_kde(x + 2.0**30)
    far.cho_cov = near.cho_cov  # which SciPy computes from the shifted data
    np.testing.assert_allclose(far.logpdf(points + 2.0**30), near.logpdf(points), rtol=1e-14)


def test_weights_of_zero_exclude() -> None:
    x, weights = data(2), np.random.default_rng(1).random(200)
    weights[::3] = 0
    kde = gaussian_kde(x, weights=weights)
    np.testing.assert_allclose(kde.logpdf(x), log_density(kde, x).astype(float), rtol=1e-12)


def test_what_looks_at_each_observation_once_is_scipys() -> None:
    x = data(1)
    ours, theirs = gaussian_kde(x, 0.4), stats.gaussian_kde(x, 0.4)
    for name, arguments in {
        "integrate_gaussian": (0.5, 2.0),
        "integrate_box_1d": (-1.0, 0.5),
        "integrate_box": (-1.0, 0.5),
        "resample": (7, 0),
        "silverman_factor": (),
    }.items():
        result = getattr(ours, name)(*arguments)
        np.testing.assert_array_equal(result, getattr(theirs, name)(*arguments), err_msg=name)


@pytest.mark.parametrize("dim", [1, 3])
def test_integral_of_a_product(dim: int) -> None:
    x, y, weights = data(dim), data(dim, n=90, seed=5), np.random.default_rng(2).random(90)
    first, second = gaussian_kde(x, 0.4), gaussian_kde(y, 0.2, weights)
    theirs = stats.gaussian_kde(y, 0.2, weights)
    expected = stats.gaussian_kde(x, 0.4).integrate_kde(theirs)
    for one, other in ((first, second), (second, first), (first, theirs)):
        assert one.integrate_kde(other) == pytest.approx(expected, rel=1e-12)


def test_marginal_and_set_bandwidth() -> None:
    x, weights = data(3), np.random.default_rng(1).random(200)
    ours, theirs = gaussian_kde(x, weights=weights), stats.gaussian_kde(x, weights=weights)
    for kde in (ours, theirs):
        kde.set_bandwidth(kde.factor * 0.5)
    first, second = ours.marginal([0, -1]), theirs.marginal([0, -1])
    assert type(first) is gaussian_kde
    np.testing.assert_array_equal(first.covariance, second.covariance)
    np.testing.assert_allclose(first(x[[0, 2]]), second(x[[0, 2]]), rtol=1e-12)


def test_a_subclass_chooses_its_factor() -> None:
    class Half(gaussian_kde):
        def covariance_factor(self) -> float:
            return 0.5 * self.scotts_factor()

    x = data(2)
    np.testing.assert_array_equal(Half(x)(x), gaussian_kde(x, BANDWIDTHS["callable"])(x))


def test_a_row_is_one_point_and_types_are_scipys() -> None:
    x = data(2)
    ours, theirs = gaussian_kde(x), stats.gaussian_kde(x)
    assert ours([0.5, 1.0]) == pytest.approx(theirs([0.5, 1.0]), rel=1e-13)
    for points in (x.astype("f4"), x.astype(int), x.tolist(), x[:, :0], x.astype(np.longdouble)):
        for name in ("evaluate", "logpdf"):
            first, second = getattr(ours, name)(points), getattr(theirs, name)(points)
            assert (first.dtype, first.shape) == (second.dtype, second.shape)
            np.testing.assert_allclose(first, second, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    "call",
    [
        lambda kind: kind([1.0]),
        lambda kind: kind(np.ones((2, 5))),  # singular
        lambda kind: kind(np.ones((5, 2))),
        lambda kind: kind(data(2), "best"),
        lambda kind: kind(data(2), weights=np.ones(3)),
        lambda kind: kind(data(2))(np.ones((3, 4))),
        lambda kind: kind(data(2)).logpdf(np.ones(3)),
        lambda kind: kind(data(2))(np.full((2, 4), np.nan)),
        lambda kind: kind(data(2)).logpdf([np.inf, 0.0]),
        lambda kind: kind(data(2))(["a", "b"]),
        lambda kind: kind(data(2)).integrate_kde(kind(data(1))),
        lambda kind: kind(data(2)).marginal([5]),
    ],
    ids=lambda call: inspect.getsource(call).strip()[13:-1],
)
def test_errors_are_scipys(call) -> None:
    with pytest.raises(Exception) as theirs:
        call(stats.gaussian_kde)
    with pytest.raises(theirs.type) as ours:
        call(gaussian_kde)
    assert type(ours.value) is theirs.type
    assert str(ours.value) == str(theirs.value)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Gets the shape of the points of each call that is made of fastattn."""
    shapes: list[tuple[int, ...]] = []
    logsumexp = fastattn.kernel_logsumexp

    def noting(points, *args, **options):
        shapes.append(points.shape)
        return logsumexp(points, *args, **options)

    monkeypatch.setattr(fastattn, "kernel_logsumexp", noting)
    return shapes


def test_install_and_uninstall(calls: list) -> None:
    kde = stats.gaussian_kde(data(2))

    def are_ours() -> set[bool]:
        found = set()
        for call in (kde, kde.evaluate, kde.pdf, kde.logpdf, lambda _: kde.integrate_kde(kde)):
            calls.clear()
            call(data(2))
            found.add(bool(calls))
        return found

    install()
    try:
        with installed():
            assert are_ours() == {True}
        assert are_ours() == {True}
    finally:
        uninstall()
    assert are_ours() == {False}
    with pytest.raises(ZeroDivisionError), installed():
        raise ZeroDivisionError
    assert are_ours() == {False}
    longs = data(2).astype(np.longdouble)
    expected = kde(longs)
    with installed():
        np.testing.assert_array_equal(kde(longs), expected)


@pytest.mark.parametrize("dim", [1, 2])
def test_seaborn(dim: int, calls: list) -> None:
    seaborn = pytest.importorskip("seaborn")
    figure = pytest.importorskip("matplotlib.figure").Figure
    x = data(dim)

    def drawn() -> list[np.ndarray]:
        axes = figure().subplots()
        seaborn.kdeplot(**dict(zip("xy", x, strict=False)), ax=axes, bw_adjust=0.7)
        curves = [line.get_xydata() for line in axes.lines]
        return curves + [path.vertices for each in axes.collections for path in each.get_paths()]

    expected = drawn()
    assert expected and not calls
    with installed():
        curves = drawn()
    assert len(calls) == 1
    for curve, other in zip(curves, expected, strict=True):
        np.testing.assert_allclose(curve, other, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_scipys_own_tests() -> None:
    """But those with a tolerance of 5e-14, which densities of 1e-14 miss by a rounding."""
    tests = Path(stats.__file__).parent / "tests" / "test_kdeoth.py"
    if not tests.exists():
        pytest.skip("this SciPy comes without its tests")
    code = f"""
import os
import sys
import pytest
from fastattn.integrations.scipy import install
install()
chosen = ["-k", "not test_kde_1d and not test_kde_2d", {str(tests)!r}]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-c", os.devnull, *chosen]))
"""
    assert " passed" in python(code, timeout=600)
