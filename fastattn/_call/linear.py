"""A call of linear attention, and what it is about: feature maps and the state of earlier keys."""

from __future__ import annotations

from collections.abc import Callable
from math import log, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._call.arguments import as_array, check_number_dtype
from fastattn._call.problem import FLOAT32, FLOAT64
from fastattn._machine.device import host_array
from fastattn.masks.arguments import show_shapes

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

#: Denominators from products of features as they are: beyond, features or products may have left their range.
LEAST, MOST = 2.0**-40, 2.0**60


class LinearState(NamedTuple):
    """What the keys and values so far add up to: all that later queries need of them.

    Letters: ``...`` leading batch axes, ``K`` key/value heads, ``M`` features, ``E`` value head_dim; none of
    the axis ``K`` for arrays of two axes.

    Attributes
    ----------
    key_value_sum : ndarray, shape (..., K, M, E)
        ``sum_j phi(k_j) v_j``, float64.
    key_sum : ndarray, shape (..., K, M)
        ``sum_j phi(k_j)``, float64.
    log_scale : ndarray, shape (..., K, M), or None
        The sums are these times ``exp(log_scale)``, float64. Given with random features, and with others
        where the sum of a feature is too small or too large; None stands for 0.
    """

    key_value_sum: np.ndarray
    key_sum: np.ndarray
    log_scale: np.ndarray | None = None

    def __repr__(self) -> str:
        return show_shapes(self)


def each(state: LinearState, change: Callable[[np.ndarray, int], np.ndarray]) -> LinearState:
    """The state with ``change(array, n)`` for each array, whose last n axes are not leading ones."""
    key_value_sum, key_sum, log_scale = state
    scaled = None if log_scale is None else change(log_scale, 2)
    return LinearState(change(key_value_sum, 3), change(key_sum, 2), scaled)


def broadcast(state: LinearState, lead: tuple[int, ...]) -> LinearState:
    """A copy for all items."""
    return each(state, lambda x, axes: np.array(np.broadcast_to(x, (*lead, *x.shape[-axes:])), order="C"))


class LinearCall(NamedTuple):
    """The arrays of a call, as views, and its options."""

    query: np.ndarray  #: ``(*lead, H, L, D)``, in the dtype of the computation or in 16 bits
    key: np.ndarray  #: ``(*lead, K, S, D)``
    value: np.ndarray  #: ``(*lead, K, S, E)``
    lengths: np.ndarray | None  #: of keys, ``lead``
    dtype: np.dtype  #: of the computation
    feature_map: Callable[[np.ndarray], Any]
    causal: bool
    earlier: LinearState | None  #: float64, with an axis of heads
    return_state: bool
    out: np.ndarray  #: ``(*lead, H, L, E)``
    lost: np.ndarray  #: bool ``(*lead, H, L)``: becomes True for rows that have to be computed in another way


def shared(array: np.ndarray) -> np.ndarray:
    """One item of each leading axis along which all are the same memory."""
    kept = (slice(None) if stride else slice(1) for stride in array.strides[:-3])
    return array[tuple(kept)]


def elu_plus_one(x: np.ndarray) -> np.ndarray:
    phi = np.minimum(x, 0)
    np.exp(phi, out=phi)
    phi += np.maximum(x, 0)
    return phi


class RandomFeatures:
    """What `random_features` gives: a feature map, which `linear_attention` takes.

    Letters: ``D`` head_dim, ``M`` features.

    Attributes
    ----------
    projection : ndarray, shape (M, D)
        The random vectors, float64; read-only.
    """

    __slots__ = ("_scaled", "projection")

    def __init__(self, projection: np.ndarray) -> None:
        self.projection = projection
        self.projection.flags.writeable = False
        scaled = projection.T * projection.shape[1] ** -0.25
        self._scaled = {dtype: scaled.astype(dtype) for dtype in (FLOAT32, FLOAT64)}

    def __repr__(self) -> str:
        M, D = self.projection.shape
        return f"RandomFeatures(head_dim={D}, num_features={M})"

    def __call__(self, x: ArrayLike) -> np.ndarray:
        """The features of rows ``(..., D)``: ``(..., M)``, as they are, so that large ones may overflow."""
        with np.errstate(all="ignore"):
            return np.exp(self.log(x))

    def log(self, x: ArrayLike, *, up_to_a_factor: bool = False) -> np.ndarray:
        """Their logarithms, or these without what is common to a row, so that long rows lose less."""
        x = host_array(as_array(x, "x"), "x")
        check_number_dtype(x, "x")
        M, D = self.projection.shape
        if x.ndim == 0 or x.shape[-1] != D:
            raise ValueError(f"rows must have head_dim {D}, as random_features was told, got shape {x.shape}")
        x = x.astype(FLOAT64 if x.dtype.kind in "biu" or x.dtype.itemsize == 8 else FLOAT32, copy=False)
        with np.errstate(all="ignore"):
            logs = x @ self._scaled[x.dtype]
            if up_to_a_factor:
                return logs
            logs -= (np.vecdot(x, x) * x.dtype.type(0.5 / sqrt(D)) + x.dtype.type(0.5 * log(M)))[..., None]
        return logs
