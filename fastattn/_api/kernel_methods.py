"""Kernel regression and sums of Gaussian kernels: attention whose scores are squared distances."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from math import log, pi
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from fastattn._api.attention import attention
from fastattn._call.arguments import as_dtype, check_bool, computed_in, host_numbers, promote
from fastattn._call.options import refusing
from fastattn._call.problem import FLOAT64
from fastattn._machine.constants import SCORE_COLUMNS
from fastattn._machine.host import check_threads_of_call
from fastattn.masks import Dense, Mask, NotSelf

if TYPE_CHECKING:
    from typing import Generic, TypedDict, Unpack

    from numpy.typing import ArrayLike

    from fastattn._call.options import Flag, No, Pair, Yes

    class _Options(TypedDict, Generic[Flag], total=False):
        weights: ArrayLike | None
        leave_one_out: bool
        return_log_density: Flag
        num_threads: int | None


_ROWS = 8192  # points worked on at once, which bounds the memory for their columns
_PLAIN_REACH = 32.0  # plain products round to some 1e-13 up to this distance from the centre, in bandwidths
_CUT_REACH = 256.0  # the same for products of coordinates cut in two
_GRID_BITS = 25  # of a coordinate: products of two, and all their sums, are exact in float64
_CHAIN = 16  # columns of a kernel's partial sum: only the whole sum mixes exact and rounded terms
_FEW_ROWS = 32  # for fewer rows the kernels may sum the columns in another order
_EPS = float(np.finfo(np.float64).eps)
_PRODUCT = 1 << 18  # multiply-adds of a product: OpenBLAS computes no larger one on a single thread
_RANGE = 45.0  # a score so far below the largest one plus log(S) changes no bit of a sum
_LARGEST = 400  # exponent of the largest coordinate of an observation, in bandwidths
_FAR = 500  # the same of a point: squares do not overflow, and it is still far from all observations


@overload
def kernel_regression(
    points: ArrayLike, x: ArrayLike, y: ArrayLike, *, bandwidth: ArrayLike, **options: Unpack[_Options[No]]
) -> np.ndarray: ...
@overload
def kernel_regression(
    points: ArrayLike, x: ArrayLike, y: ArrayLike, *, bandwidth: ArrayLike, **options: Unpack[_Options[Yes]]
) -> Pair: ...
@overload
def kernel_regression(
    points: ArrayLike, x: ArrayLike, y: ArrayLike, *, bandwidth: ArrayLike, **options: Unpack[_Options[bool]]
) -> np.ndarray | Pair: ...
@refusing
def kernel_regression(
    points: ArrayLike,
    x: ArrayLike,
    y: ArrayLike,
    *,
    bandwidth: ArrayLike,
    weights: ArrayLike | None = None,
    leave_one_out: bool = False,
    return_log_density: bool = False,
    num_threads: int | None = None,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """Nadaraya-Watson regression: the mean of `y`, weighted by a Gaussian of the distance from each point.

    Letters: ``...`` leading batch axes, which broadcast; ``L`` points, ``S`` observations, ``D`` features,
    ``E`` targets.

    Parameters
    ----------
    points : array_like, shape (..., L, D)
        Where to predict.
    x : array_like, shape (..., S, D)
        The observations.
    y : array_like, shape (..., S) or (..., S, E)
        Their targets: with one axis less than `x` they have no axis ``E``, with as many or more they have.
    bandwidth : float or array_like, shape (D,)
        The standard deviation of the Gaussian, of all features or of each; positive.
    weights : array_like, shape (..., S), optional
        Not negative. An observation of weight 0 is never seen, even if it is NaN.
    leave_one_out : bool, default False
        Predict each observation from all others; `points` must then be `x`.
    return_log_density : bool, default False
        Also return the log of the density of `x` at the points.
    num_threads : int, optional
        As in `attention`.

    Returns
    -------
    out : ndarray, shape (..., L) or (..., L, E)
        In the dtype that points, x and y promote to. 0 where no observation has a weight.
    log_density : ndarray, shape (..., L)
        When asked for: the natural log of the mixture of Gaussians around the observations, with weights that
        sum to 1, as scikit-learn's `KernelDensity.score_samples` gives it. float32 where `out` has 16 bits.
        ``-inf`` where no observation has a weight, or below the range of the dtype: some 1e19 bandwidths from
        all observations in float32, 1e154 in float64.

    Raises
    ------
    TypeError
        A dtype that is not supported, an array on a GPU, a flag that is no bool.
    ValueError
        Shapes that do not fit; D = 0; a bandwidth that is not positive, or so small that squared distances
        overflow; negative or infinite weights; `leave_one_out` with points other than `x`.

    Notes
    -----
    The same in NumPy, with its ``L * S * D`` memory::

        distances = (points[:, None, :] - x) / bandwidth
        kernels = weights * np.exp(-0.5 * (distances**2).sum(-1))
        out = kernels @ y / kernels.sum(-1, keepdims=True)
        log_density = np.log(kernels.sum(-1) / weights.sum()) - np.log(bandwidth * np.sqrt(2 * np.pi)).sum()

    Far from all observations the nearest ones decide, where this formula gives 0 / 0.

    It is attention with points as queries and observations as keys. Scores are sums of products. Where these
    would cancel, scores are computed from coordinates cut in two [3]_, or from differences. All is computed
    in float64, relative to the mean of `x`, and rounded once. The bits of a row do not depend on other points
    or items, strides or threads; up to 32 points may be summed in another order than more points are. Memory:
    copies of the observations and of 8192 points, never ``L * S``. Accuracy: docs/promises.md.

    NaN in a point makes its row NaN; NaN in an observation makes all rows NaN.

    References
    ----------
    .. [1] Nadaraya, "On Estimating Regression", Theory of Probability and Its Applications 9, 1964.
    .. [2] Watson, "Smooth Regression Analysis", Sankhya A 26, 1964.
    .. [3] Ozaki, Ogita, Oishi and Rump, "Error-free transformations of matrix multiplication by using fast
       routines of matrix multiplication and its applications", Numerical Algorithms 59, 2012.

    Examples
    --------
    >>> import numpy as np
    >>> import fastattn
    >>> x = np.linspace(0, 1, 200)[:, None]
    >>> y = np.sin(6 * x[:, 0])
    >>> out = fastattn.kernel_regression([[0.25], [0.5]], x, y, bandwidth=0.01)
    >>> np.round(out, 3)
    array([0.996, 0.141])

    Choose a bandwidth by the leave-one-out error:

    >>> noisy = y + 0.1 * np.random.default_rng(0).standard_normal(200)
    >>> errors = [
    ...     np.mean((fastattn.kernel_regression(x, x, noisy, bandwidth=h, leave_one_out=True) - noisy) ** 2)
    ...     for h in (0.001, 0.02, 0.5)
    ... ]
    >>> int(np.argmin(errors))
    1

    A density needs no targets, which `y` of shape (S, 0) says:

    >>> no_targets = np.empty((200, 0))
    >>> _, log_density = fastattn.kernel_regression(
    ...     [[0.5], [3.0]], x, no_targets, bandwidth=0.05, return_log_density=True
    ... )
    >>> np.round(np.exp(log_density), 1)
    array([1., 0.])
    """
    check_bool(leave_one_out, "leave_one_out")
    check_bool(return_log_density, "return_log_density")
    num_threads = check_threads_of_call(num_threads)
    points, x, y = host_numbers(points, "points"), host_numbers(x, "x"), host_numbers(y, "y")
    try:
        h = _check_points(points, x, bandwidth)
        has_targets = y.ndim >= x.ndim
        if y.ndim < x.ndim - 1:
            raise ValueError("y must have one axis less than x, (..., S), or as many or more, (..., S, E)")
        targets = y if has_targets else y[..., None]
        if targets.shape[-2] != x.shape[-2]:
            hint = _transposed_hint(targets.shape[-2] == x.shape[-1])
            raise ValueError(
                f"y must have the S={x.shape[-2]} observations of x, got {targets.shape[-2]}{hint}"
            )
        w = None if weights is None else _check_weights(weights, x.shape[-2])
        lead = _lead(points=points.shape[:-2], x=x.shape[:-2], y=targets.shape[:-2], weights=_items(w))
        if leave_one_out and not _equal(points, x):
            raise ValueError("leave_one_out leaves out the observation at each point: points must be x")
        with np.errstate(divide="ignore"):
            log_weights = None if w is None else np.log(w)
        keys = _Keys.of(x, h, log_weights)
    except (TypeError, ValueError) as error:
        raise _with_shapes(error, points=points, x=x, y=y) from None
    result = promote(points=points, x=x, y=y)

    value = np.asarray(as_dtype(targets, FLOAT64, "y"))
    out, lse = _attend(points, keys, value, lead, leave_one_out, num_threads)
    out = out.astype(result, copy=False)
    out = out if has_targets else out[..., 0]
    if not return_log_density:
        return out
    log_density = np.subtract(lse, log_norm(w, x.shape[-2], h, leave_one_out), where=lse > -np.inf, out=lse)
    with np.errstate(over="ignore"):
        return out, log_density.astype(computed_in(result), copy=False)


@refusing
def kernel_logsumexp(
    points: ArrayLike,
    x: ArrayLike,
    *,
    bandwidth: ArrayLike,
    log_weights: ArrayLike | None = None,
    num_threads: int | None = None,
) -> np.ndarray:
    """The log of a weighted sum of Gaussian kernels: a smooth minimum of the squared distances from `x`.

    Letters as in `kernel_regression`.

    Parameters
    ----------
    points : array_like, shape (..., L, D)
    x : array_like, shape (..., S, D)
    bandwidth : float or array_like, shape (D,)
        As in `kernel_regression`.
    log_weights : array_like, shape (..., S), optional
        Added to each observation's exponent; not NaN or ``inf``. With ``-inf`` an observation is never seen,
        even if it is NaN.
    num_threads : int, optional
        As in `attention`.

    Returns
    -------
    ndarray, shape (..., L)
        In the dtype that points and x promote to, float32 for 16-bit arrays. ``-inf`` where there is no
        observation.

    Raises
    ------
    TypeError, ValueError
        As in `kernel_regression`.

    Notes
    -----
    The same in NumPy, with its ``L * S * D`` memory::

        distances = (points[:, None, :] - x) / bandwidth
        out = scipy.special.logsumexp(log_weights - 0.5 * (distances**2).sum(-1), axis=-1)

    No constant is added. A step of Sinkhorn's algorithm for the squared distance is ``-epsilon * out``, with
    ``bandwidth = sqrt(epsilon / 2)``, and as `log_weights` the other potential over epsilon plus the log of
    the masses. Accuracy, determinism and memory are those of `kernel_regression`.

    References
    ----------
    .. [1] Cuturi, "Sinkhorn Distances: Lightspeed Computation of Optimal Transport", NeurIPS 2013.

    Examples
    --------
    >>> import numpy as np
    >>> import fastattn
    >>> x = np.array([[0.0], [1.0]])
    >>> np.round(fastattn.kernel_logsumexp([[0.0], [100.0]], x, bandwidth=0.5), 3)
    array([ 1.2700e-01, -1.9602e+04])
    """
    num_threads = check_threads_of_call(num_threads)
    points, x = host_numbers(points, "points"), host_numbers(x, "x")
    try:
        h = _check_points(points, x, bandwidth)
        added = None if log_weights is None else _check_weights(log_weights, x.shape[-2], "log_weights")
        lead = _lead(points=points.shape[:-2], x=x.shape[:-2], log_weights=_items(added))
        keys = _Keys.of(x, h, added)
    except (TypeError, ValueError) as error:
        raise _with_shapes(error, points=points, x=x) from None
    nothing = np.zeros((x.shape[-2], 0))
    _, lse = _attend(points, keys, nothing, lead, False, num_threads)
    with np.errstate(over="ignore"):
        return lse.astype(computed_in(promote(points=points, x=x)), copy=False)


# Scores as products ---------------------------------------------------------------------------------


class _Keys(NamedTuple):
    """The observations as keys. The leading axes are those of x and the weights."""

    centre: np.ndarray  #: ``(..., 1, D)``
    bandwidth: np.ndarray  #: ``(D,)``
    reach: np.ndarray  #: ``(..., 1)``: the largest distance from the centre, in bandwidths
    grid: np.ndarray  #: ``(..., 1, 1)``: a power of two, of which cut coordinates are multiples
    x: np.ndarray  #: ``(..., S, D)``: the observations, 0 for what is excluded
    at: np.ndarray  #: the same, centred and in bandwidths
    log_weights: np.ndarray | None  #: ``(..., S)``, 0 for what is excluded
    seen: np.ndarray | None  #: ``(..., S)``: which are not excluded; None if all are

    @classmethod
    def of(cls, x: np.ndarray, bandwidth: np.ndarray, log_weights: np.ndarray | None) -> _Keys:
        x = _as_float64(x)
        seen, is_seen = None, np.True_
        if log_weights is not None and (excluded := log_weights == -np.inf).any():
            seen, is_seen = ~excluded, ~excluded[..., None]
            log_weights = np.where(excluded, 0.0, log_weights)
            x = np.where(is_seen, x, 0.0)
        with np.errstate(all="ignore"):
            count = np.count_nonzero(np.broadcast_to(is_seen, (*x.shape[:-1], 1)), axis=-2, keepdims=True)
            centre = x.sum(axis=-2, keepdims=True) / np.maximum(count, 1)
            # Rounded to few bits of the spread: differences from it are then exact more often, and the same
            # for shifted data.
            spread = np.abs(np.where(is_seen, x - centre, 0.0)).max(axis=-2, keepdims=True, initial=0)
            step = np.frexp(spread)[1] - 4
            rounded = np.ldexp(np.rint(np.ldexp(centre, -step)), step)
            centre = np.where(spread > 0, rounded, centre)
            at = np.where(is_seen, (x - centre) / bandwidth, 0.0)
            reach = np.sqrt(_squares(at)).max(axis=-1, initial=0, keepdims=True)
            if (reach >= 2.0**_LARGEST).any():
                raise ValueError(
                    f"bandwidth is too small: an observation lies {reach.max():.2g} bandwidths from the "
                    f"mean, and must be less than {2.0**_LARGEST:.2g} from it"
                )
            grid = np.ldexp(1.0, np.maximum(np.frexp(2 * reach)[1], -_LARGEST) - _GRID_BITS)[..., None]
        return cls(centre, bandwidth, reach, grid, x, at, log_weights, seen)

    def plain(self) -> tuple[np.ndarray, None]:
        """Columns, and no bias."""
        columns = np.empty((*self._shape(), self.at.shape[-1] + 2))
        columns[..., :-2], columns[..., -2] = self.at, 1.0
        columns[..., -1] = -0.5 * _squares(self.at)
        if self.log_weights is not None:
            columns[..., -1] += self.log_weights
        return columns, None

    def cut(self) -> tuple[np.ndarray, np.ndarray]:
        """Columns, exact and rounded, and a bias. With a bias the kernels do not scale the columns."""
        high = np.rint(self.at / self.grid) * self.grid
        low = self.at - high
        exact, dim = _exact_columns(self.at.shape[-1]), self.at.shape[-1]
        columns = np.zeros((*self._shape(), exact + 2 * dim))
        columns[..., :dim], columns[..., dim], columns[..., dim + 1] = high, 1.0, -0.5 * _squares(high)
        columns[..., exact : exact + dim], columns[..., exact + dim :] = low, self.at
        bias = np.zeros(self._shape()) if self.log_weights is None else self.log_weights
        return columns, bias - np.einsum("...d,...d->...", high + 0.5 * low, low)

    def item(self, at: tuple[int, ...], lead: tuple[int, ...]) -> _Keys:
        """Those of one item of the batch."""

        def one(array: np.ndarray | None, axes: int) -> Any:
            if array is None:
                return None
            return np.broadcast_to(array, (*lead, *array.shape[array.ndim - axes :]))[at]

        return _Keys(
            one(self.centre, 2), self.bandwidth, one(self.reach, 1), one(self.grid, 2), one(self.x, 2),
            one(self.at, 2), one(self.log_weights, 1), one(self.seen, 1),
        )  # fmt: skip

    def _shape(self) -> tuple[int, ...]:
        """``(..., S)``"""
        weights = () if self.log_weights is None else self.log_weights.shape
        return np.broadcast_shapes(self.at.shape[:-1], weights)


class _Points(NamedTuple):
    """Some of the points, in bandwidths from the centre of the keys, as queries."""

    at: np.ndarray  #: ``(..., L, D)``, times ``2**-exponent``
    exponent: np.ndarray  #: ``(..., L)``: 0, but for points whose squares would overflow
    own: np.ndarray  #: ``(..., L)``: half of each square, the same for every key
    is_near: np.ndarray  #: whether `own` goes into the products, where it cancels

    @classmethod
    def of(cls, points: np.ndarray, keys: _Keys) -> _Points:
        at = _as_float64(points) - keys.centre
        # Where squares would overflow, the direction alone tells the nearest observation.
        exponent = np.frexp(at)[1] - np.frexp(keys.bandwidth)[1]
        exponent = np.where(at == 0, 0, exponent - _FAR).max(axis=-1, initial=0)
        at = np.ldexp(at, -exponent[..., None]) / keys.bandwidth
        own = _squares(at)
        return cls(at, exponent, np.ldexp(0.5 * own, 2 * exponent), np.sqrt(own) <= 2 * keys.reach)

    def plain(self) -> tuple[np.ndarray, np.ndarray]:
        """Columns, and the number to add to each row's lse."""
        columns = np.empty((*self.at.shape[:-1], self.at.shape[-1] + 2))
        columns[..., :-2], columns[..., -1] = self.at, 1.0
        columns[..., -2] = np.where(self.is_near, -self.own, 0.0)
        return columns, np.where(self.is_near, 0.0, -self.own)

    def cut(self, grid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        high = np.rint(self.at / grid) * grid
        low = self.at - high
        exact, dim = _exact_columns(self.at.shape[-1]), self.at.shape[-1]
        columns = np.zeros((*self.at.shape[:-1], exact + 2 * dim))
        columns[..., :dim], columns[..., dim + 1] = high, 1.0
        columns[..., dim] = np.where(self.is_near, -0.5 * _squares(high), 0.0)
        columns[..., exact : exact + dim], columns[..., exact + dim :] = high, low
        rest = np.einsum("...d,...d->...", high + 0.5 * low, low)
        return columns, -np.where(self.is_near, rest, self.own)


def _exact_columns(dim: int) -> int:
    """How many columns the exact products of cut coordinates take; the last ones are 0.

    The kernels sum chains of columns into sums of SCORE_COLUMNS, and those into the whole. In the first of
    these sums rounded chains may follow the exact ones, which have cancelled by then. Exact terms of later
    sums cancel only in the whole, so these sums must hold nothing else.
    """
    run = _CHAIN if dim + 2 <= SCORE_COLUMNS else SCORE_COLUMNS
    return -(-(dim + 2) // run) * run


def _attend(
    points: np.ndarray,
    keys: _Keys,
    value: np.ndarray,
    lead: tuple[int, ...],
    leave_one_out: bool,
    num_threads: int | None,
) -> tuple[np.ndarray, np.ndarray]:
    """The means of `value`, and the logs of the sums of the kernels."""
    num_points = points.shape[-2]
    out, lse = np.empty((*lead, num_points, value.shape[-1])), np.empty((*lead, num_points))
    # Each item of a batch is computed as it would be alone.
    way = 0 + (keys.reach > _PLAIN_REACH) + (keys.reach > _CUT_REACH)
    n_parts = max(1, -(-num_points // _ROWS))
    bounds = [num_points * n // n_parts for n in range(n_parts + 1)]
    products = partial(_by_products, num_threads=num_threads)
    with np.errstate(all="ignore"):
        for this_way in np.unique(way):
            is_own = way == this_way
            compute = (products, partial(products, cut=True), _by_differences)[this_way]
            for start, stop in pairwise(bounds):
                here = np.s_[..., start:stop]
                own = start if leave_one_out else None
                found, total = compute(points[..., start:stop, :], keys, value, own)
                np.copyto(out[(*here, slice(None))], found, where=is_own[..., None])
                np.copyto(lse[here], total, where=is_own)
    return out, lse


def _by_products(
    points: np.ndarray,
    keys: _Keys,
    value: np.ndarray,
    first_own: int | None,
    *,
    num_threads: int | None,
    cut: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """The results of some points. Point n leaves out observation ``first_own + n``."""
    n = points.shape[-2]
    if cut and 0 < n < _FEW_ROWS:
        points = points[..., np.arange(_FEW_ROWS) % n, :]
    near = _Points.of(points, keys)
    rows, added = near.cut(keys.grid) if cut else near.plain()
    columns, bias = keys.cut() if cut else keys.plain()
    mask: Mask | None = None if keys.seen is None else Dense(keys.seen[..., None, None, :])
    if first_own is not None:
        others = NotSelf().shifted(first_own, 0)
        mask = others if mask is None else mask & others
    out, lse = attention(
        rows[..., None, :, :],
        columns[..., None, :, :],
        value[..., None, :, :],
        mask=mask,
        bias=None if bias is None else bias[..., None, None, :],
        scale=1.0,
        return_lse=True,
        num_threads=num_threads,
    )
    return out[..., 0, :n, :], (lse[..., 0, :] + added)[..., :n]


def _by_differences(
    points: np.ndarray, keys: _Keys, value: np.ndarray, first_own: int | None
) -> tuple[np.ndarray, np.ndarray]:
    lead = np.broadcast_shapes(
        points.shape[:-2], keys.x.shape[:-2], value.shape[:-2], _items(keys.log_weights)
    )
    out, lse = np.empty((*lead, points.shape[-2], value.shape[-1])), np.empty((*lead, points.shape[-2]))
    points, value = (np.broadcast_to(array, (*lead, *array.shape[-2:])) for array in (points, value))
    for at in np.ndindex(*lead):
        item = keys.item(at, lead)
        if item.reach > _CUT_REACH:
            out[at], lse[at] = _item_by_differences(points[at], item, value[at], first_own)
    return out, lse


def _item_by_differences(
    points: np.ndarray, keys: _Keys, value: np.ndarray, first_own: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """One item, from the differences of the pairs whose products say that they may matter."""
    n, (num_keys, dim) = len(points), keys.x.shape
    queries, (columns, _) = _Points.of(points, keys), keys.plain()
    query, _ = queries.plain()
    out, lse = np.full((n, value.shape[-1]), np.nan), np.full(n, np.nan)
    added = np.zeros(num_keys) if keys.log_weights is None else keys.log_weights
    # How far a product may be from the score: some roundings of all its terms.
    far = np.sqrt(_squares(queries.at)) + keys.reach
    terms = far * np.where(queries.is_near, far, keys.reach) + np.abs(added).max()
    wrong = 4 * (dim + 4) * _EPS * terms
    range_ = _RANGE + log(num_keys + 1)
    step = max(1, _PRODUCT // max(1, num_keys * max(columns.shape[-1], value.shape[-1])))
    for start in range(0, n, step):
        here = np.arange(start, min(start + step, n))
        scores = query[here] @ columns.T
        if keys.seen is not None:
            scores[:, ~keys.seen] = -np.inf
        if first_own is not None:
            scores[here - start, first_own + here] = -np.inf
        largest = scores.max(axis=-1)
        out[here[largest == -np.inf]], lse[here[largest == -np.inf]] = 0, -np.inf
        least = largest - range_ - 5 - 2 * wrong[here]
        row, j = np.nonzero((scores >= least[:, None]) & (scores > -np.inf))
        if not len(row):
            continue
        row += start
        first, pair_of = _segments(row)
        # Far from observations, squares are relative to 4**exponent, and differences of them to 2**exponent.
        p, x, exponent, w = points[row], keys.x[j], queries.exponent[row], added[j]
        away, rounded = _difference(np.ldexp(p, -exponent[:, None]), np.ldexp(x, -exponent[:, None]))
        squares = _squares(away / keys.bandwidth)
        score = np.ldexp(w, -2 * exponent) - 0.5 * squares
        is_best = score == np.maximum.reduceat(score, first)[pair_of]
        best = np.minimum.reduceat(np.where(is_best, np.arange(len(row)), len(row)), first)
        other = best[pair_of]
        # d_j**2 - d_best**2 = (d_j - d_best) (d_j + d_best); the first factor does not depend on the point.
        both = (away + away[other]) + (rounded + rounded[other])
        apart = np.einsum("pd,pd->p", (x[other] - x) / keys.bandwidth, both / keys.bandwidth)
        change = np.ldexp(w - w[other], -exponent) - 0.5 * apart
        most = np.maximum.reduceat(change, first)
        least_square = squares[best] - 2 * np.ldexp(most, -exponent[best])
        top = w[best] - np.ldexp(0.5 * least_square, 2 * exponent[best])
        change = np.ldexp(change - most[pair_of], exponent)
        # So no bit depends on how many pairs were found.
        kept = change >= -range_
        row, j, kernels = row[kept], j[kept], np.exp(change[kept])
        first, pair_of = _segments(row)
        total = np.add.reduceat(kernels, first)
        share = kernels / total[pair_of]
        lse[row[first]] = top + np.log(total)
        terms_of_mean = share[:, None] * value[j]
        mean = np.add.reduceat(terms_of_mean, first, axis=0)
        if not np.isfinite(mean).all():
            # Rounded shares may add up to more than 1. Sums of halves are finite where the targets are.
            half = np.add.reduceat(0.5 * terms_of_mean, first, axis=0)
            limit = np.finfo(FLOAT64).max
            has_passed = np.isfinite(half) & ~np.isfinite(mean)
            mean = np.where(has_passed, np.clip(2 * half, -limit, limit), mean)
        out[row[first]] = mean
    # All points read targets that are NaN or inf, as products do.
    nonfinite = ~np.isfinite(value) if keys.seen is None else ~np.isfinite(value) & keys.seen[:, None]
    if nonfinite.any():
        others = nonfinite.sum(axis=0) - (0 if first_own is None else nonfinite[first_own : first_own + n])
        out[(others > 0) & np.isfinite(out)] = np.nan
    return out, lse


def _difference(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``a - b`` rounded, and its rounding error [Knuth, The Art of Computer Programming 2, 4.2.2]."""
    rounded = a - b
    of_b = rounded - a
    return rounded, (a - (rounded - of_b)) - (b + of_b)


def _segments(row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For pairs sorted by row: where each row begins, and the number of each pair's row among them."""
    begins = np.diff(row, prepend=-1) > 0
    return np.flatnonzero(begins), np.cumsum(begins) - 1


def _as_float64(array: np.ndarray) -> np.ndarray:
    """In one layout, as the order of sums depends on it."""
    return np.require(array, FLOAT64, ["C", "A"])


def _squares(array: np.ndarray) -> np.ndarray:
    return np.einsum("...d,...d->...", array, array)


def log_norm(
    weights: np.ndarray | None, num_keys: int, bandwidth: np.ndarray, leave_one_out: bool
) -> np.ndarray | float:
    """The log of the divisor that makes the sum of the kernels a density; ``(..., L)`` or less."""
    constant = float(np.log(bandwidth).sum()) + 0.5 * len(bandwidth) * log(2 * pi)
    with np.errstate(divide="ignore"):
        if weights is None:
            return float(np.log(np.float64(max(num_keys - leave_one_out, 0)))) + constant
        # Scaled up: no weight underflows, and their sum does not overflow.
        exponent = 900 - np.frexp(weights.max(axis=-1, initial=0, keepdims=True))[1]
        weights = np.ldexp(weights, exponent)
        total = weights.sum(axis=-1, keepdims=True)
        if leave_one_out and num_keys:
            # Subtracting cancels nothing where a weight is less than half of the sum.
            largest = weights.argmax(axis=-1, keepdims=True)
            rest = weights.copy()
            np.put_along_axis(rest, largest, 0.0, axis=-1)
            total = total - weights
            np.put_along_axis(total, largest, rest.sum(axis=-1, keepdims=True), axis=-1)
        mantissa, power = np.frexp(total)
        return np.log(mantissa) + (power - exponent) * log(2) + constant


# Checks ---------------------------------------------------------------------------------------------


def _check_points(points: np.ndarray, x: np.ndarray, bandwidth: Any) -> np.ndarray:
    """The bandwidth of each feature."""
    for name, array, axes in (("points", points, "(..., L, D)"), ("x", x, "(..., S, D)")):
        if array.ndim < 2:
            hint = f"; with one feature it is {name}[:, None], one row is {name}[None]" if array.ndim else ""
            raise ValueError(f"{name} must have shape {axes}, got {array.shape}{hint}")
    dim = x.shape[-1]
    if points.shape[-1] != dim or not dim:
        hint = _transposed_hint(points.shape[-1] == x.shape[-2] or points.shape[-2] == dim)
        raise ValueError(f"points and x must have the same number of features, and at least one{hint}")
    if isinstance(bandwidth, (str, bool)) or bandwidth is None:
        hint = "; the estimators of fastattn.integrations.sklearn have rules by name"
        raise TypeError(
            f"bandwidth must be a number, or have shape (D,) = ({dim},), got {bandwidth!r}"
            f"{hint if isinstance(bandwidth, str) else ''}"
        )
    h = host_numbers(bandwidth, "bandwidth").astype(FLOAT64)
    if h.shape not in ((), (dim,)):
        raise ValueError(
            f"bandwidth must be a number, or have shape (D,) = ({dim},), got {h.shape}"
            f"{covariance_hint(h, dim, 'points and x')}"
        )
    if not ((h > 0) & (h < np.inf)).all():
        raise ValueError(f"bandwidth must be positive and finite, got {bandwidth!r}")
    return np.broadcast_to(h, dim)


def covariance_hint(bandwidth: np.ndarray, dim: int, whitened: str) -> str:
    """What to add to the refusal of a bandwidth that is a matrix, as of other libraries."""
    if bandwidth.shape != (dim, dim):
        return ""
    return f"; for a covariance whiten {whitened} by its Cholesky factor, as docs/coming-from.md shows"


def check_reach(x: np.ndarray, bandwidth: np.ndarray, weights: np.ndarray | None) -> None:
    """ValueError where a bandwidth is too small for `x`, of ``(S, D)``, whatever the points."""
    with np.errstate(divide="ignore"):
        _Keys.of(x, np.broadcast_to(bandwidth, x.shape[-1]), None if weights is None else np.log(weights))


def _transposed_hint(may_be: bool) -> str:
    return "; arrays (D, S), as SciPy has them, go as points.T and x.T" if may_be else ""


def _check_weights(value: Any, num_keys: int, name: str = "weights") -> np.ndarray:
    array = host_numbers(value, name)
    if not array.ndim or array.shape[-1] != num_keys:
        raise ValueError(f"{name} must have shape (..., S) with S={num_keys}, got {array.shape}")
    weights = array.astype(FLOAT64)
    least, allowed = (0, "finite and not negative") if name == "weights" else (-np.inf, "finite or -inf")
    is_right = (weights >= least) & (weights < np.inf)
    if not is_right.all():
        raise ValueError(f"{name} must be {allowed}, got {weights[~is_right].flat[0]}")
    return weights


def _items(weights: np.ndarray | None) -> tuple[int, ...]:
    return () if weights is None else weights.shape[:-1]


def _lead(**shapes: tuple[int, ...]) -> tuple[int, ...]:
    """What the leading axes of all arrays broadcast to."""
    try:
        return np.broadcast_shapes(*shapes.values())
    except ValueError:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"the leading axes do not broadcast: {listed}") from None


def _equal(points: np.ndarray, x: np.ndarray) -> bool:
    """Whether the points are the observations, for each item."""
    if points.shape[-2:] != x.shape[-2:]:
        return False
    return points is x or bool(np.all((points == x) | ((points != points) & (x != x))))


def _with_shapes(error: Exception, **arrays: np.ndarray) -> Exception:
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(f"{error}; {', '.join(f'{name} {array.shape}' for name, array in arrays.items())}")
