"""`kernel_regression` and `kernel_logsumexp` against loops in extended precision, and what must not matter.

Bounds: a coordinate in bandwidths is rounded some times on its way, which moves a score by ``eps * R * d``,
with R the distance from the centre and d that of the observation, where R is up to 256; the exponent itself
by ``eps * d**2``; and up to 32 bandwidths from the centre products are rounded as they are, ``eps * R**2``.
`SLACK` roundings of each are allowed, and of the terms of a density's constant.
"""

from __future__ import annotations

import tracemalloc
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest

import fastattn
from fastattn._api.kernel_methods import _CUT_REACH, _PLAIN_REACH, _ROWS
from fastattn.backends import registry
from tests.cases import MEMORY_LAYOUTS
from tests.refusals import assert_named
from tests.tolerances import assert_all_same, assert_same_bits

WIDE = np.longdouble
EPS = float(np.finfo(np.float64).eps)
SLACK = 8


class Sums(NamedTuple):
    out: np.ndarray
    lse: np.ndarray
    log_density: np.ndarray
    out_reach: np.ndarray  #: how far a relative rounding moves each
    lse_reach: np.ndarray


@np.errstate(divide="ignore", invalid="ignore")
def loops(points, x, y, bandwidth, weights=None, leave_one_out=False):
    """One point and one observation after the other."""
    num_points, (num_keys, dim) = len(points), x.shape
    h = np.broadcast_to(np.asarray(bandwidth, WIDE), dim)
    w = np.ones(num_keys, WIDE) if weights is None else weights.astype(WIDE)
    points, x, y = (array.astype(WIDE) for array in (points, x, y))
    seen = [j for j in range(num_keys) if w[j] > 0]
    middle = np.mean([x[j] for j in seen], axis=0) if seen else np.zeros(dim, WIDE)
    far = max((float(np.sqrt((((x[j] - middle) / h) ** 2).sum())) for j in seen), default=0.0)
    out, lse = np.zeros((num_points, y.shape[1]), WIDE), np.full(num_points, -np.inf, WIDE)
    density, out_reach, lse_reach = lse.copy(), np.zeros(out.shape), np.zeros(num_points)
    for i in range(num_points):
        others = [j for j in seen if not (leave_one_out and i == j)]
        if not others:
            continue
        squares = np.array([(((points[i] - x[j]) / h) ** 2).sum() for j in others])
        scores = np.log(w[others]) - squares / 2
        top = scores.max()
        kernels = np.exp(scores - top)
        share = kernels / kernels.sum()
        lse[i] = top + np.log(kernels.sum())
        density[i] = lse[i] - np.log(w[others].sum()) - np.log(h * np.sqrt(2 * WIDE(np.pi))).sum()
        out[i] = share @ y[others]
        reach = max(far, float(np.sqrt((((points[i] - middle) / h) ** 2).sum())))
        moved = 1 + np.abs(np.log(w[others])) + min(reach, 2 * _CUT_REACH) * np.sqrt(squares) + squares
        moved = (moved + min(reach, 2 * _PLAIN_REACH) ** 2).astype(float)
        lse_reach[i] = share @ moved + abs(lse[i]) + abs(density[i])
        out_reach[i] = (share * moved) @ np.abs(y[others]) + (share @ moved) * (share @ np.abs(y[others]))
    return Sums(out, lse, density, out_reach, lse_reach)


def assert_right(points, x, y, bandwidth, weights=None, leave_one_out=False):
    exact = loops(points, x, y, bandwidth, weights, leave_one_out)
    out, density = fastattn.kernel_regression(
        points,
        x,
        y,
        bandwidth=bandwidth,
        weights=weights,
        leave_one_out=leave_one_out,
        return_log_density=True,
    )
    assert out.dtype == density.dtype == np.float64
    constant = np.abs(np.log(np.broadcast_to(bandwidth, x.shape[1]))).sum()  # its terms may cancel
    found = [(out, exact.out, exact.out_reach), (density, exact.log_density, exact.lse_reach + constant)]
    if not leave_one_out:
        with np.errstate(divide="ignore"):
            log_weights = None if weights is None else np.log(weights)
        lse = fastattn.kernel_logsumexp(points, x, bandwidth=bandwidth, log_weights=log_weights)
        found.append((lse, exact.lse, exact.lse_reach))
    for got, wanted, reach in found:
        assert got.shape == wanted.shape
        finite = np.isfinite(wanted)
        np.testing.assert_array_equal(got[~finite], wanted[~finite].astype(float))
        error = np.abs(got[finite] - wanted[finite])
        assert (error <= SLACK * EPS * reach[finite]).all(), float((error / (EPS * reach[finite])).max())


def problem(num_points=23, num_keys=57, dim=3, targets=2, seed=0):
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((num_keys, dim)), rng.standard_normal((num_keys, targets))
    return x[rng.integers(0, num_keys, num_points)] + 0.3 * rng.standard_normal((num_points, dim)), x, y


@pytest.fixture
def chosen(backend, monkeypatch):
    """Each backend, as these functions take the default."""
    monkeypatch.setenv("FASTATTN_BACKEND", backend.backend)


class TestAccuracy:
    @pytest.mark.parametrize("dim", [1, 3, 14, 15, 40])
    @pytest.mark.parametrize("bandwidth", [30.0, 1.0, 0.05, 1e-3, 1e-6, 1e-10, 1e-14])
    @pytest.mark.parametrize("num_points", [1, 5, 40])
    def test_like_loops(self, chosen, dim, bandwidth, num_points):
        """Bandwidths from beyond the data to far below it, near observations and between them."""
        points, x, y = problem(num_points, dim=dim)
        points[::2] = x[: len(points[::2])] + bandwidth * (points[::2] - x[: len(points[::2])])
        assert_right(points, x, y, bandwidth)

    # Around what the kernels sum in one go, SCORE_COLUMNS, less the two columns of the squares.
    @pytest.mark.parametrize("dim", [3, 126, 127, 128, 200, 254, 255, 300])
    @pytest.mark.parametrize("bandwidth", [1e-4, 1e-8, 1e-12])
    def test_at_observations(self, chosen, dim, bandwidth):
        """Where the distance to the observation that matters is 0."""
        points, x, y = problem(dim=dim)
        points[:] = x[: len(points)]
        assert_right(points, x, y, bandwidth)

    @pytest.mark.parametrize("bandwidth", [0.5, 1e-4, 1e-10, np.array([1.0, 1e-12, 1e-5])], ids=str)
    def test_a_bandwidth_for_each_feature(self, chosen, bandwidth):
        points, x, y = problem()
        x[1::2] = x[:-1:2] + bandwidth * x[1::2]
        points[:20] = x[:20] + bandwidth * points[:20]
        scales = np.array([1e-3, 1.0, 1e4])
        assert_right(points * scales, x * scales, y, bandwidth * scales)

    def test_a_year_of_time_stamps(self, chosen):
        """Seconds, and a bandwidth of a tenth of a millisecond."""
        rng = np.random.default_rng(0)
        bursts = 1.7e9 + rng.uniform(0, 365 * 86400, 40)
        x = (bursts[:, None] + rng.normal(0, 3e-4, (40, 5))).reshape(-1, 1)
        points, y = x[::3] + rng.normal(0, 1e-4, (67, 1)), rng.normal(size=(200, 1))
        assert_right(points, x, y, 1e-4)
        assert_right(x[:60], x[:60], y[:60], 1e-4, leave_one_out=True)

    @pytest.mark.parametrize("bandwidth", [1e-4, 1e-9])
    @pytest.mark.parametrize("dim", [1, 3])
    def test_between_observations_the_nearer_decides(self, chosen, bandwidth, dim):
        """Half way, squares are equal but for less than they are rounded by: in rational numbers."""
        rng = np.random.default_rng(0)
        x, y = rng.standard_normal((12, dim)), np.arange(12.0)
        points = np.concatenate([(x[i] + x[i + 1 :]) / 2 for i in range(11)])
        out = fastattn.kernel_regression(points, x, y, bandwidth=bandwidth)
        rational = [[Fraction(float(number)) for number in row] for row in x]
        for point, got in zip(points, out, strict=True):
            p = [Fraction(float(number)) for number in point]
            squares = [sum((a - b) ** 2 for a, b in zip(p, row, strict=True)) for row in rational]
            scores = [float((min(squares) - square) / Fraction(bandwidth) ** 2 / 2) for square in squares]
            kernels = np.exp(np.maximum(scores, -800))
            assert abs(got - kernels @ y / kernels.sum()) < 1e-6

    def test_bits_of_a_row_are_its_own(self, chosen):
        points, x, y = problem(num_points=60, num_keys=300, dim=1)
        points[::2] = x[:30] + 1e-4 * points[::2]
        whole = fastattn.kernel_regression(points, x, y, bandwidth=1e-4, return_log_density=True)
        for rows in (slice(7, 8), slice(20, 60)):
            some = fastattn.kernel_regression(points[rows], x, y, bandwidth=1e-4, return_log_density=True)
            for a, b in zip(some, whole, strict=True):
                assert_same_bits(a, b[rows])

    def test_targets_that_are_not_finite_are_read_by_all(self, chosen):
        """Whatever the bandwidth; but not by the point that leaves them out."""
        _, x, y = problem()
        y[5, 1] = np.nan
        for bandwidth in (1.0, 1e-2, 1e-6):
            out = fastattn.kernel_regression(x, x, y, bandwidth=bandwidth)
            assert np.isnan(out).all(axis=0).tolist() == [False, True]
            out = fastattn.kernel_regression(x, x, y, bandwidth=bandwidth, leave_one_out=True)
            assert np.flatnonzero(~np.isnan(out[:, 1])).tolist() == [5]

    @pytest.mark.parametrize("away", [1e2, 1e8, 1e100])
    @pytest.mark.parametrize("bandwidth", [1.0, 1e-3])
    def test_far_from_all_data(self, chosen, away, bandwidth):
        points, x, y = problem()
        points[1::2] *= away
        assert_right(points, x, y, bandwidth)

    def test_beyond_what_squares_can_be(self):
        """The nearest decides; the log density is below all that float64 has."""
        x, y = np.array([[0.0], [1.0], [2.0]]), np.array([10.0, 20.0, 30.0])
        points = np.array([[-1e300], [1e300], [0.9]])
        out, density = fastattn.kernel_regression(points, x, y, bandwidth=1e-30, return_log_density=True)
        assert out.tolist() == [10.0, 30.0, 20.0]
        assert density.tolist()[:2] == [-np.inf, -np.inf]
        assert np.isfinite(density[2])

    @pytest.mark.parametrize("bandwidth", [1.0, 1e-3])
    def test_weights(self, chosen, bandwidth):
        points, x, y = problem()
        weights = np.random.default_rng(1).random(57) ** 20
        assert_right(points, x, y, bandwidth, weights)
        weights[::3] = 0
        assert_right(points, x, y, bandwidth, weights)

    def test_weights_of_any_size(self):
        points, x, y = problem()
        for size in (1e-300, 1e300):
            assert_right(points, x, y, 0.5, np.random.default_rng(1).random(57) * size)

    @pytest.mark.parametrize("num_points", [1, 40])
    @pytest.mark.parametrize("bandwidth", [2.0, 0.05, 1e-2])
    def test_targets_near_the_largest_number(self, chosen, num_points, bandwidth):
        points, x, y = problem(num_points, num_keys=300, dim=1)
        largest = np.finfo(float).max
        y = np.where(np.arange(300)[:, None] % 3, y / np.abs(y).max(), [1.0, -1.0]) * 0.999
        out, wanted = (
            fastattn.kernel_regression(points, x, it, bandwidth=bandwidth) for it in (y * largest, y)
        )
        np.testing.assert_allclose(out / largest, wanted, rtol=0, atol=1e-14)
        equal = np.full(300, largest)
        for same in (equal, -equal):
            out = fastattn.kernel_regression(points, x, same, bandwidth=bandwidth)
            np.testing.assert_allclose(out / largest, same[: len(out)] / largest, rtol=1e-14)

    @pytest.mark.parametrize("unit", [1e-140, 1e-170, 1e-290])
    def test_units_of_a_feature(self, unit):
        """However small, at the centre of it too."""
        points, x, _ = problem(dim=2)
        x = np.concatenate([x, -x])
        points[::2, 1] = 0
        units = np.array([1.0, unit])
        for scale in (1.0, 0.02):
            got = fastattn.kernel_logsumexp(points * units, x * units, bandwidth=scale * units)
            wanted = fastattn.kernel_logsumexp(points, x, bandwidth=scale)
            np.testing.assert_allclose(got, wanted, rtol=1e-12)

    def test_a_single_observation(self):
        points, x, y = problem(num_keys=1)
        assert_right(points, x, y, 0.1)
        assert_right(x, x, y, 1e-9)
        assert_right(x, x, y, 1.0, leave_one_out=True)


class TestShifts:
    @pytest.mark.parametrize("bandwidth", [1.0, 1e-3])
    def test_of_a_million(self, bandwidth):
        """The numbers are multiples of 2**-20, so that the shift rounds none of them."""
        points, x, y = (np.rint(array * 2**20) / 2**20 for array in problem())
        results = [
            fastattn.kernel_regression(points + by, x + by, y, bandwidth=bandwidth, return_log_density=True)
            for by in (0.0, 1e6, -3e7)
        ]
        for shifted in results[1:]:
            assert_all_same(shifted, results[0])

    def test_float32_far_from_zero(self):
        points, x, y = (array.astype(np.float32) + np.float32(1e3) for array in problem())
        out, density = fastattn.kernel_regression(points, x, y, bandwidth=0.1, return_log_density=True)
        exact = loops(points, x, y, 0.1)
        assert out.dtype == density.dtype == np.float32
        np.testing.assert_array_equal(density, exact.log_density.astype(np.float32))
        np.testing.assert_allclose(out, exact.out.astype(np.float32), rtol=2e-7)


class TestLeaveOneOut:
    @pytest.mark.parametrize("bandwidth", [1.0, 0.01])
    def test_like_loops(self, chosen, bandwidth):
        _, x, y = problem(num_keys=70)
        weights = np.random.default_rng(1).random(70)
        weights[3] = 0
        for w in (None, weights):
            assert_right(x, x, y, bandwidth, w, leave_one_out=True)

    def test_like_fits_without_each(self):
        _, x, y = problem(num_keys=12)
        weights = np.random.default_rng(1).random(12)
        weights[4] = 1e9  # more than all others, whose sum is not what is left of a difference
        given = {"bandwidth": 0.7, "return_log_density": True}
        out, density = fastattn.kernel_regression(x, x, y, weights=weights, leave_one_out=True, **given)
        for i in range(12):
            keep = np.arange(12) != i
            wanted = fastattn.kernel_regression(x[[i]], x[keep], y[keep], weights=weights[keep], **given)
            np.testing.assert_allclose(out[[i]], wanted[0], rtol=1e-13)
            np.testing.assert_allclose(density[[i]], wanted[1], rtol=1e-13)

    @pytest.mark.slow
    def test_over_several_blocks_of_points(self):
        num = _ROWS + 100
        x = np.random.default_rng(0).standard_normal((num, 1))
        out = fastattn.kernel_regression(x, x, np.arange(num), bandwidth=1e-9, leave_one_out=True)
        order = np.argsort(x[:, 0])
        gaps = np.diff(x[order, 0])
        right = np.r_[gaps, np.inf] < np.r_[np.inf, gaps]
        nearest = order[np.where(right, np.arange(num) + 1, np.arange(num) - 1).clip(0, num - 1)]
        np.testing.assert_array_equal(out, nearest[np.argsort(order)])

    def test_points_must_be_x(self):
        points, x, y = problem(num_points=57)
        with pytest.raises(ValueError, match=r"^leave_one_out leaves out the observation at each point"):
            fastattn.kernel_regression(points, x, y, bandwidth=1.0, leave_one_out=True)
        fastattn.kernel_regression(x.copy(), x, y, bandwidth=1.0, leave_one_out=True)


class TestExcluded:
    @pytest.mark.parametrize("bandwidth", [1.0, 1e-3])
    def test_nan_is_never_seen(self, chosen, bandwidth):
        points, x, y = problem()
        weights = np.arange(57) % 3 * 1.0
        wanted = fastattn.kernel_regression(
            points, x, y, bandwidth=bandwidth, weights=weights, return_log_density=True
        )
        with np.errstate(divide="ignore"):
            lse = fastattn.kernel_logsumexp(points, x, bandwidth=bandwidth, log_weights=np.log(weights))
        x[::3], y[::3] = np.nan, np.inf
        got = fastattn.kernel_regression(
            points, x, y, bandwidth=bandwidth, weights=weights, return_log_density=True
        )
        assert_same_bits(got[0], wanted[0])
        assert_same_bits(got[1], wanted[1])
        with np.errstate(divide="ignore"):
            again = fastattn.kernel_logsumexp(points, x, bandwidth=bandwidth, log_weights=np.log(weights))
        assert_same_bits(again, lse)

    def test_all(self):
        points, x, y = problem()
        out, density = fastattn.kernel_regression(
            points, x * np.nan, y, bandwidth=1.0, weights=np.zeros(57), return_log_density=True
        )
        assert (out == 0).all()
        assert (density == -np.inf).all()

    @pytest.mark.parametrize("bandwidth", [1.0, 1e-3])
    def test_nan_in_a_point_stays_in_its_row(self, bandwidth):
        points, x, y = problem()
        wanted = fastattn.kernel_regression(points, x, y, bandwidth=bandwidth)
        points[3] = np.nan
        got, density = fastattn.kernel_regression(points, x, y, bandwidth=bandwidth, return_log_density=True)
        assert np.isnan(got[3]).all()
        assert np.isnan(density).tolist() == [i == 3 for i in range(len(points))]
        assert_same_bits(np.delete(got, 3, 0), np.delete(wanted, 3, 0))

    def test_nan_in_an_observation_is_in_all_rows(self):
        points, x, y = problem()
        x[3, 1] = np.nan
        assert np.isnan(fastattn.kernel_regression(points, x, y, bandwidth=1.0)).all()


class TestShapes:
    def test_targets_with_and_without_an_axis(self):
        points, x, y = problem()
        both = fastattn.kernel_regression(points, x, y, bandwidth=1.0)
        assert both.shape == (23, 2)
        alone = fastattn.kernel_regression(points, x, y[:, 0], bandwidth=1.0)
        assert alone.shape == (23,)
        np.testing.assert_array_equal(alone, both[:, 0])
        assert fastattn.kernel_regression(points, x, y[:, :0], bandwidth=1.0).shape == (23, 0)

    @pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-4])
    def test_leading_axes_broadcast_and_items_have_bits_of_their_own(self, scale):
        rng = np.random.default_rng(0)
        points, x = rng.standard_normal((3, 1, 40, 2)), rng.standard_normal((2, 31, 2))
        x[1] /= scale  # of which products are cut in two, or differences taken, where the other's are not
        y, weights = rng.standard_normal((3, 2, 31, 1)), rng.integers(0, 3, (2, 31))
        out, density = fastattn.kernel_regression(
            points, x, y, bandwidth=0.5, weights=weights, return_log_density=True
        )
        assert out.shape == (3, 2, 40, 1)
        assert density.shape == (3, 2, 40)
        with np.errstate(divide="ignore"):
            lse = fastattn.kernel_logsumexp(points, x, bandwidth=0.5, log_weights=np.log(weights))
        for a, b in np.ndindex(3, 2):
            alone = fastattn.kernel_regression(
                points[a, 0], x[b], y[a, b], bandwidth=0.5, weights=weights[b], return_log_density=True
            )
            assert_same_bits(out[a, b], alone[0])
            assert_same_bits(density[a, b], alone[1])
            with np.errstate(divide="ignore"):
                log_weights = np.log(weights[b])
            alone = fastattn.kernel_logsumexp(points[a, 0], x[b], bandwidth=0.5, log_weights=log_weights)
            assert_same_bits(lse[a, b], alone)

    @pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)], ids=str)
    @pytest.mark.parametrize("lead", [(), (3,), (0, 2)], ids=str)
    def test_nothing(self, sizes, lead):
        points, x, y = (np.ones((*lead, n, 2)) for n in (*sizes, sizes[1]))
        out, density = fastattn.kernel_regression(points, x, y, bandwidth=1.0, return_log_density=True)
        assert out.shape == (*lead, sizes[0], 2)
        assert density.shape == (*lead, sizes[0])
        assert not out.any()
        assert (density == -np.inf).all()
        assert (fastattn.kernel_logsumexp(points, x, bandwidth=1.0) == -np.inf).all()

    @pytest.mark.parametrize("layout", MEMORY_LAYOUTS)
    @pytest.mark.parametrize("bandwidth", [1.0, 1e-3])
    def test_any_memory_layout(self, layout, bandwidth):
        points, x, y = problem(dim=7)
        weights = np.arange(57.0) % 5
        call = {"bandwidth": bandwidth, "return_log_density": True}
        wanted = fastattn.kernel_regression(points, x, y, weights=weights, **call)
        arrays = [MEMORY_LAYOUTS[layout](array) for array in (points, x, y, weights)]
        got = fastattn.kernel_regression(*arrays[:3], weights=arrays[3], **call)
        assert_all_same(got, wanted)

    def test_blocks_of_points_do_not_matter(self):
        points, x, y = problem(num_points=2 * _ROWS + 77)
        whole = fastattn.kernel_regression(points, x, y, bandwidth=0.01, return_log_density=True)
        some = slice(_ROWS - 50, _ROWS + 50)
        part = fastattn.kernel_regression(points[some], x, y, bandwidth=0.01, return_log_density=True)
        for a, b in zip(whole, part, strict=True):
            assert_same_bits(a[some], b)

    @pytest.mark.slow
    def test_memory_does_not_grow_with_both_lengths(self):
        points, x, y = problem(num_points=30_000, num_keys=3_000, dim=2, targets=1)
        fastattn.kernel_regression(points[:100], x, y, bandwidth=0.1)
        for bandwidth in (0.5, 1e-3):
            tracemalloc.start()
            fastattn.kernel_regression(points, x, y, bandwidth=bandwidth)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 30_000 * 3_000 // 8, f"{peak} bytes"


class TestTypes:
    @pytest.mark.parametrize(
        ("dtype", "result", "density"),
        [
            ("float64", "float64", "float64"),
            ("float32", "float32", "float32"),
            ("float16", "float16", "float32"),
            ("int64", "float64", "float64"),
            ("bool", "float64", "float64"),
        ],
    )
    def test_results(self, dtype, result, density):
        points, x, y = (array.astype(dtype) for array in problem())
        out, log_density = fastattn.kernel_regression(points, x, y, bandwidth=1, return_log_density=True)
        lse = fastattn.kernel_logsumexp(points, x, bandwidth=1)
        assert (out.dtype, log_density.dtype, lse.dtype) == (result, density, density)
        wide = (array.astype("float64") for array in (points, x, y))
        exact = fastattn.kernel_regression(*wide, bandwidth=1, return_log_density=True)
        assert_same_bits(out, exact[0].astype(result))
        assert_same_bits(log_density, exact[1].astype(density))

    def test_arguments_are_left_alone(self):
        arrays = [*problem(), np.arange(57.0) % 3]
        before = [array.copy() for array in arrays]
        fastattn.kernel_regression(*arrays[:3], bandwidth=1e-3, weights=arrays[3], return_log_density=True)
        assert_all_same(arrays, before)


class TestThreads:
    @pytest.mark.parametrize("bandwidth", [1.0, 0.03, 0.001])  # plain, cut and by differences
    def test_those_of_the_call(self, monkeypatch, bandwidth):
        cython = pytest.importorskip("fastattn.backends.cython.driver") and registry.load("cython")
        asked, limit = set(), cython.thread_limit
        monkeypatch.setattr(cython, "thread_limit", lambda n: asked.add(n) or limit(n))
        points, x, y = problem(num_points=301, num_keys=400)
        expected = fastattn.kernel_regression(points, x, y, bandwidth=bandwidth)
        lse = fastattn.kernel_logsumexp(points, x, bandwidth=bandwidth)
        asked.clear()
        for n in (1, 3):
            got = fastattn.kernel_regression(points, x, y, bandwidth=bandwidth, num_threads=n)
            assert_same_bits(got, expected)
            assert_same_bits(fastattn.kernel_logsumexp(points, x, bandwidth=bandwidth, num_threads=n), lse)
        assert asked == ({1, 3} if bandwidth > 0.01 else set())

    @pytest.mark.parametrize("bandwidth", [1.0, 0.001])
    def test_no_number_of_threads(self, bandwidth):
        points, x, y = problem()
        for wrong, error in ((0, ValueError), (1.5, TypeError)):
            with pytest.raises(error, match="num_threads must be a positive integer"):
                fastattn.kernel_regression(points, x, y, bandwidth=bandwidth, num_threads=wrong)
            with pytest.raises(error, match="num_threads must be a positive integer"):
                fastattn.kernel_logsumexp(points, x, bandwidth=bandwidth, num_threads=wrong)


class TestRefused:
    SHAPES = "; points (5, 2), x (7, 2), y (7,)"

    def test_what_does_not_fit(self):
        def call(**wrong):
            given = {"points": np.ones((5, 2)), "x": np.arange(14.0).reshape(7, 2), "y": np.ones(7)} | wrong
            fastattn.kernel_regression(**{"bandwidth": 1.0} | given)

        values = {
            "bandwidth": [0, np.nan, [1.0, 2.0, 3.0], 1e-300],
            "weights": [np.ones(6), np.r_[-1e-9, np.ones(6)], np.r_[np.nan, np.ones(6)]],
            "y": [np.ones(6)],
            "x": [np.ones(7), np.ones((7, 3))],
        }
        several = [
            {"weights": np.ones((2, 7)), "points": np.ones((3, 5, 2))},
            {"y": np.ones(7), "x": np.ones((1, 1, 7, 2))},
            {"x": np.ones((7, 0)), "points": np.ones((5, 0))},
        ]
        for wrong in (values, several):
            for message in assert_named(call, ValueError, wrong):
                assert "; points (" in message and ", x (" in message and ", y (" in message
        assert_named(call, TypeError, {"x": [np.ones((7, 2), complex)], "leave_one_out": [1]})

    X, Y = np.arange(14.0).reshape(7, 2), np.arange(7.0)

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ({"bandwidth": "scott"}, r"^bandwidth must be a number, .*, got 'scott'; the estimators of"),
            ({"bandwidth": np.eye(2)}, r"whiten points and x by its Cholesky factor"),
            ({"points": Y}, r"^points must have shape \(\.\.\., L, D\), got \(7,\); .* points\[:, None\]"),
            (
                {"x": Y},
                r"^x must have shape \(\.\.\., S, D\), got \(7,\); with one feature it is x\[:, None\]",
            ),
            (
                {"points": X.T, "x": X.T},
                r"S=2 observations of x, got 7; arrays \(D, S\).* points\.T and x\.T",
            ),
            ({"x": X.T}, r"number of features.* points\.T and x\.T"),
            ({"x": X.astype(object)}, r"^x has dtype object.* columns: df\.to_numpy\(float\)$"),
        ],
    )
    def test_what_to_write(self, wrong, said):
        call = {"points": self.X, "x": self.X, "y": self.Y, "bandwidth": 1.0} | wrong
        with pytest.raises((TypeError, ValueError), match=said):
            fastattn.kernel_regression(**call)

    def test_shapes_are_named(self):
        with pytest.raises(ValueError) as caught:
            fastattn.kernel_regression(np.ones((5, 2)), np.ones((7, 2)), np.ones(7), bandwidth=-1.0)
        assert str(caught.value).endswith(self.SHAPES)
        with pytest.raises(ValueError) as caught:
            fastattn.kernel_logsumexp(np.ones((5, 2)), np.ones((7, 2)), bandwidth=1.0, log_weights=[1.0])
        with pytest.raises(ValueError, match=r"^log_weights must be finite or -inf, got nan"):
            fastattn.kernel_logsumexp(np.ones((5, 2)), np.ones((1, 2)), bandwidth=1.0, log_weights=[np.nan])
        said = "log_weights must have shape (..., S) with S=7, got (1,); points (5, 2), x (7, 2)"
        assert str(caught.value) == said
