"""statsmodels' kernel regression by its own rules, and by its definition in extended precision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fastattn
from tests.process import python

pytest.importorskip("statsmodels")

from statsmodels.nonparametric import kernel_regression

from fastattn.integrations.statsmodels import KernelReg, install, installed, uninstall

THEIRS = kernel_regression.KernelReg

# Its searches make objects without rng=.
pytestmark = pytest.mark.filterwarnings("ignore:After 0.17:FutureWarning")


def data(dim: int, n: int = 150) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Targets, observations, and points among them and somewhat beside."""
    rng = np.random.default_rng(dim)
    x = rng.standard_normal((n, dim)) * np.arange(1, dim + 1) + 5
    y = np.sin(x.sum(axis=1)) + 0.1 * rng.standard_normal(n)
    return y, x, np.concatenate([x[:20] + 0.1, 5 + 1.5 * (x[20:30] - 5)])


def both(y: np.ndarray, x: np.ndarray, reg_type: str, bw, var_type: str | None = None, **options) -> list:
    """Our model and statsmodels'."""
    var_type = var_type or "c" * x.shape[1]
    return [kind(y, x, var_type, reg_type, bw, rng=0, **options) for kind in (KernelReg, THEIRS)]


def solved(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """By elimination, in the dtype of the arrays."""
    rows = np.concatenate([a, b[:, None]], axis=1)
    for i in range(len(rows)):
        largest = i + np.abs(rows[i:, i]).argmax()
        rows[[i, largest]] = rows[[largest, i]]
        rows[i] /= rows[i, i]
        for j in range(len(rows)):
            if j != i:
                rows[j] -= rows[j, i] * rows[i]
    return rows[:, -1]


def defined(y: np.ndarray, x: np.ndarray, h, points: np.ndarray, reg_type: str) -> tuple:
    """Means and effects, in extended precision."""
    y, x, h, points = (np.asarray(array, np.longdouble) for array in (y, x, h, points))
    means, effects = [], []
    for point in points:
        away = x - point
        kernels = np.exp(-0.5 * np.square(away / h).sum(axis=1))
        kernels /= kernels.sum()
        if reg_type == "ll":
            columns = np.concatenate([np.ones((len(x), 1), np.longdouble), away], axis=1)
            weighted = kernels[:, None] * columns
            mean, *slopes = solved(columns.T @ weighted, y @ weighted)
        else:
            mean = kernels @ y
            product = np.prod(2 * away / h**2, axis=1)
            slopes = [kernels @ ((y - mean) * (product - kernels @ product)) / len(x)] * x.shape[1]
        means.append(mean)
        effects.append(slopes)
    return np.array(means), np.array(effects)


def assert_near(found: np.ndarray, expected: np.ndarray, exact: np.ndarray) -> None:
    """To the exact numbers; where statsmodels' own rounds further, it may be as far."""
    assert found.shape == expected.shape == exact.shape
    wrong = np.abs(found - exact)
    assert (wrong <= np.maximum(1e-8 * np.abs(exact), 2 * np.abs(expected - exact))).all()
    assert np.median(wrong / np.abs(exact)) < 1e-11


@pytest.mark.parametrize("h", [0.3, 1.0, 40.0])
@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("reg_type", ["lc", "ll"])
def test_fit(reg_type: str, dim: int, h: float) -> None:
    y, x, points = data(dim)
    bw = h * np.arange(1, dim + 1)
    ours, theirs = both(y, x, reg_type, bw)
    mean, effects = defined(y, x, bw, points, reg_type)
    for found, expected, exact in zip(ours.fit(points), theirs.fit(points), (mean, effects), strict=True):
        assert_near(found, expected, exact)
    for found, expected in zip(ours.fit(), theirs.fit(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-9 * np.abs(expected).max())
    assert ours.r_squared() == pytest.approx(theirs.r_squared(), rel=1e-9)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("reg_type", ["lc", "ll"])
def test_losses(reg_type: str, dim: int) -> None:
    y, x, _ = data(dim, n=60)
    for h in (0.5, 2.0, -2.0):  # a search may try negative ones
        bw = h * np.arange(1, dim + 1)
        others = [
            defined(np.delete(y, i), np.delete(x, i, 0), bw, x[i : i + 1], reg_type)[0][0] for i in range(60)
        ]
        ours, theirs = both(y, x, reg_type, bw)
        for model in (ours, theirs):
            loss = model.cv_loo(bw, model.est[reg_type])
            np.testing.assert_allclose(loss, [np.mean((y - others) ** 2)], rtol=1e-9)
        np.testing.assert_allclose(ours.aic_hurvich(bw), theirs.aic_hurvich(bw), rtol=1e-9)
        assert ours.aic_hurvich(bw).shape == theirs.aic_hurvich(bw).shape


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gets the name of each call that is made of fastattn, and of statsmodels for a single point."""
    names: list[str] = []

    def note(owner, name):
        function = getattr(owner, name)

        def noting(*args, **options):
            names.append(name)
            return function(*args, **options)

        monkeypatch.setattr(owner, name, noting)

    note(fastattn, "kernel_regression")
    note(fastattn, "kernel_logsumexp")
    note(kernel_regression, "gpke")
    return names


@pytest.mark.parametrize("reg_type", ["lc", "ll"])
@pytest.mark.parametrize("bw", ["cv_ls", "aic"])
def test_bandwidths(reg_type: str, bw: str, calls: list) -> None:
    y, x, _ = data(2, n=50)
    theirs = THEIRS(y, x, "cc", reg_type, bw, rng=0).bw
    calls.clear()
    ours = KernelReg(y, x, "cc", reg_type, bw, rng=0).bw
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)  # each is found up to 1e-4
    by_point = calls.count("gpke") / 50
    assert calls.count("kernel_regression") > 20
    assert by_point < 0.2 * calls.count("kernel_regression")


@pytest.mark.parametrize("reg_type", ["lc", "ll"])
def test_points_that_cancel_are_statsmodels(reg_type: str, calls: list) -> None:
    """Two groups, and a point between them that sees one observation alone."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.standard_normal(50), [500.0], 1000 + rng.standard_normal(50)])[:, None]
    y = np.sin(x[:, 0])
    ours, theirs = both(y, x, reg_type, [0.5])
    points = np.array([[0.1], [500.1], [1000.3]])
    expected = theirs.fit(points)
    calls.clear()
    found = ours.fit(points)
    for ours_, theirs_ in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours_, theirs_, rtol=1e-7, atol=1e-12)
    assert "kernel_regression" in calls and "gpke" in calls


def test_a_column_without_spread_is_statsmodels() -> None:
    y, x, _ = data(2, n=40)
    x[:, 1] = 3.0
    ours, theirs = both(y, x, "ll", [1.0, 1.0])
    for found, expected in zip(ours.fit(), theirs.fit(), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_the_nearest_decide_where_kernels_underflow() -> None:
    y, x, _ = data(1)
    ours, theirs = both(y, x, "lc", [0.01])
    with np.errstate(invalid="ignore"):
        assert np.isnan(theirs.fit([[100.0]])[0])
        assert ours.fit([[100.0]])[0] == pytest.approx(y[x[:, 0].argmax()], rel=1e-12)


@pytest.mark.parametrize("reg_type", ["lc", "ll"])
@pytest.mark.parametrize("case", ["discrete", "tricube", "nan", "nan point", "zero"])
def test_what_is_left_to_statsmodels(case: str, reg_type: str, calls: list) -> None:
    if case == "tricube" and reg_type == "lc":
        pytest.skip("statsmodels has it for local linear alone")
    y, x, points = data(2, n=40)
    bw, options = [0.5, 0.5], {}
    if case == "discrete":
        x[:, 1] = x[:, 1] > 5
        options["var_type"] = "cu"
    elif case == "tricube":
        bw, options["ckertype"] = [4.0, 4.0], "tricube"
    elif case == "nan":
        y[3] = np.nan
    elif case == "nan point":
        points[3] = np.nan
    else:
        bw = [0.5, 0.0]
    ours, theirs = both(y, x, reg_type, bw, **options)

    def results(model):
        found = []
        with np.errstate(all="ignore"):
            for call in (
                lambda: model.fit(points),
                lambda: model.cv_loo(np.array(bw), model.est[reg_type]),
                lambda: model.aic_hurvich(np.array(bw)),
            ):
                try:
                    found += list(call())
                except Exception as error:
                    found.append(repr(error))
        return found

    expected = results(theirs)
    calls.clear()
    found = results(ours)
    for one, other in zip(found, expected, strict=True):
        if case == "nan point" and not isinstance(other, str):
            np.testing.assert_allclose(one, other, rtol=1e-7)
        else:
            np.testing.assert_equal(one, other)
    assert case == "nan point" or set(calls) <= {"gpke"}


def test_estimators_of_a_subclass_are_its_own(calls: list) -> None:
    class Halved(KernelReg):
        def _est_loc_constant(self, *args, **options):
            mean, effects = super()._est_loc_constant(*args, **options)
            return mean / 2, effects

    y, x, points = data(1, n=40)
    found = Halved(y, x, "c", "lc", [0.5], rng=0).fit(points)
    assert set(calls) == {"gpke"}
    np.testing.assert_allclose(found[0], both(y, x, "lc", [0.5])[0].fit(points)[0] / 2, rtol=1e-12)


def test_install_and_uninstall(calls: list) -> None:
    y, x, points = data(2, n=40)
    model = THEIRS(y, x, "cc", "ll", [1.0, 1.0], rng=0)
    censored = kernel_regression.KernelCensoredReg(y, x, "cc", "ll", [1.0, 1.0], rng=0)
    expected, of_censored = model.fit(points)[0], censored.fit(points)[0]

    def are_ours() -> bool:
        calls.clear()
        np.testing.assert_allclose(model.fit(points)[0], expected, rtol=1e-7)
        return "kernel_regression" in calls

    assert not are_ours()
    install()
    try:
        with installed():
            assert are_ours()
        assert are_ours()
        np.testing.assert_array_equal(censored.fit(points)[0], of_censored)
    finally:
        uninstall()
    assert not are_ours()
    with pytest.raises(ZeroDivisionError), installed():
        raise ZeroDivisionError
    assert not are_ours()


def test_significance(calls: list) -> None:
    y, x, _ = data(2, n=60)
    model = THEIRS(y, x, "cc", "ll", [1.0, 2.0], rng=0)
    expected = model.sig_test([1], nboot=5)
    calls.clear()
    with installed():
        assert model.sig_test([1], nboot=5) == expected
    assert "kernel_regression" in calls


@pytest.mark.slow
def test_statsmodels_own_tests() -> None:
    """But one that asks for a warning of a second object, which is not made here."""
    tests = Path(kernel_regression.__file__).parent / "tests" / "test_kernel_regression.py"
    if not tests.exists():
        pytest.skip("this statsmodels comes without its tests")
    code = f"""
import os
import sys
import pytest
from fastattn.integrations.statsmodels import install
install()
chosen = ["-k", "not test_aic_hurvich_matches_hand_computed_trace", {str(tests)!r}]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-c", os.devnull, *chosen]))
"""
    assert " passed" in python(code, timeout=600)
