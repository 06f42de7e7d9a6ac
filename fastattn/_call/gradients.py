"""A call for gradients on its way from validation to a backend, and what comes back.

Letters as in `fastattn._call.problem`. `import fastattn` does not import this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import numpy as np

from fastattn._call.problem import FLOAT64, Mod, Problem
from fastattn._machine.constants import SCORE_COLUMNS
from fastattn.biases import Sums
from fastattn.masks.arguments import show_shape, show_shapes

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # which every checker has

    Gradient = TypeVar("Gradient", covariant=True, default=np.ndarray | None)
else:
    from typing import TypeVar

    Gradient = TypeVar("Gradient", covariant=True)

#: What gradients of `attention` there are with respect to.
DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")
ROWS = DIFFERENTIABLE[:3]


#: An lse of at least this size is replaced by the lse of the scores that the weights are computed from, if
#: the two agree: half a unit of such a float32 score moves a weight by 1.5e-5.
LARGE_SCORE = 256.0
#: So is the lse of a row where the scale times the norms of the query and of its largest key is at least
#: this: scores that cancel to a small lse have the roundings of their products. Usual products are 10 to 20.
#: The limit is far above `LARGE_SCORE`, as scores are then computed twice.
LARGE_NORMS = 4096.0


def score_roundings(problem: Problem) -> tuple[float, float]:
    """By how much two ways to compute an lse may differ: at most, and usually.

    Relative to the lse, and to the product of the norms of query and key.
    In half units: four for the scale, products and last sums; eight for a soft-cap's tanh; for a chain of n
    sums of numbers of one sign n / 4, or less than sqrt(n) where roundings are independent. The chains of
    kernels have at most SCORE_COLUMNS sums.
    """
    half_unit, chain = float(np.finfo(problem.dtype).eps) / 2, min(problem.head_dim, SCORE_COLUMNS)
    few = 4 if problem.softcap is None else 12
    return half_unit * (few + chain / 4), half_unit * (few + chain**0.5)


class Backward(NamedTuple):
    """One validated call for gradients."""

    problem: Problem  #: whose ``out`` is what the forward call gave, in the problem's `dtype` or in 16 bits
    lse: np.ndarray  #: ``(*lead, H, L)``, of `dtype`, C-contiguous
    grad_out: np.ndarray  #: ``(*lead, H, L, E)``, of the problem's `dtype` or in 16 bits; any strides
    grad_lse: np.ndarray | None  #: ``(*lead, H, L)``, of `dtype`, C-contiguous
    wrt: frozenset[str]  #: some of `DIFFERENTIABLE`, and ``"aux"`` beside a score_mod
    bias: tuple[Sums, ...]  #: what the gradient of each part of the bias is made of
    query_factors: np.ndarray | None  #: ``(H,)``, by which the caller's query was multiplied
    score_grad: Mod | None = None  #: the derivative of the problem's score_mod, where the caller gives it
    #: Of each of `aux`, zeros of its shape to be filled, which are float32 where it is and float64 for all
    #: others; None where there is no gradient
    grad_aux: tuple[np.ndarray | None, ...] = ()

    @property
    def sums_by_task(self) -> bool:
        """Whether some gradient is the sum of what tasks have, rather than of tiles in their order."""
        by_diagonals = any(sums.by_diagonals for sums in self.bias)
        return "aux" in self.wrt or ("bias" in self.wrt and by_diagonals)

    def of_heads(self, heads: slice) -> Backward:
        """The call of some query heads, as many of each key/value head."""
        grad_lse = None if self.grad_lse is None else np.ascontiguousarray(self.grad_lse[..., heads, :])
        return self._replace(
            problem=self.problem.of_heads(heads),
            lse=np.ascontiguousarray(self.lse[..., heads, :]),
            grad_out=self.grad_out[..., heads, :, :],
            grad_lse=grad_lse,
        )

    def zeros(self) -> Gradients:
        """Room for the gradients that are asked for."""
        found: dict[str, Any] = dict.fromkeys(Gradients._fields)
        for name in self.wrt - {"bias", "aux"}:
            dtype = FLOAT64 if name == "sinks" else self.problem.dtype
            found[name] = np.zeros(getattr(self.problem, name).shape, dtype)
        if "bias" in self.wrt:
            found["bias"] = {sums: np.zeros(sums.shape) for sums in self.bias}
        return Gradients(**found)


def in_one_block(
    make: Callable[..., np.ndarray], dtype: np.dtype, shapes: Sequence[tuple[int, ...]]
) -> Iterator[np.ndarray]:
    """Arrays of these shapes in one that `make` makes, each at a multiple of 64 bytes in it.

    glibc returns memory to the system where more than twice the largest block was dropped at once, and
    writing new pages took 40 % of the next call for gradients.
    """
    nbytes = [prod(shape) * dtype.itemsize for shape in shapes]
    starts = list(accumulate((-(-n // 64) * 64 for n in nbytes), initial=0))
    block = make(starts[-1], np.uint8)
    for shape, start, n in zip(shapes, starts, nbytes, strict=False):
        yield block[start : start + n].view(dtype).reshape(shape)


def sum_to(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """An array summed in float64 over the axes along which `shape` broadcasts to its own."""
    extra = array.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(
        extra + axis for axis, (n, m) in enumerate(zip(array.shape[extra:], shape, strict=True)) if n != m
    )
    if not axes:
        return array
    with np.errstate(all="ignore"):  # NaN and inf pass through
        return array.sum(axis=axes, dtype=np.float64, keepdims=True).reshape(shape)


def as_given(gradient: np.ndarray, given: np.ndarray, swapped: bool) -> np.ndarray:
    """A gradient in the layout, shape and dtype of its argument."""
    if swapped and given.ndim > 2:
        gradient = gradient.swapaxes(-3, -2)
    missing = gradient.ndim - given.ndim
    if missing > 0 and gradient.shape[:missing] == (1,) * missing:
        gradient = gradient.reshape(gradient.shape[missing:])
    elif missing < 0:
        gradient = gradient.reshape((1,) * -missing + gradient.shape)
    if gradient.shape == given.shape and gradient.dtype is given.dtype:
        return np.ascontiguousarray(gradient).reshape(given.shape)
    dtype = FLOAT64 if given.dtype.kind in "biu" else given.dtype.newbyteorder("=")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(sum_to(gradient, given.shape), dtype).reshape(given.shape)


class Gradients(NamedTuple, Generic[Gradient]):
    """Gradients with respect to the arguments of `attention`; None for what was not asked for.

    Each has its argument's shape and dtype, float64 for one of integers, and is C-contiguous. Those of query,
    key and value may lie in one block of memory, which lives as long as one of them.
    """

    # What a backend returns is of a `Problem`, with all leading axes and of its dtype. Of the bias it is a
    # dict of arrays by `Sums`, those of `Backward.bias`, which may be float64, as that of the sinks is.

    query: Gradient  # an array where `wrt` is its default
    key: Gradient
    value: Gradient
    bias: np.ndarray | Any | None  #: an array, or tuples of them for a tuple, a sum or a `biases.Grid`
    sinks: np.ndarray | None

    def __repr__(self) -> str:
        return show_shapes(self)


class FlexGradients(NamedTuple, Generic[Gradient]):
    """Gradients with respect to the arguments of `flex_attention`; None for what was not asked for.

    The first five are those of `Gradients`. `aux` is a tuple with one for each of `aux`: an array of its
    shape and dtype, or None for integers and bools.
    """

    query: Gradient
    key: Gradient
    value: Gradient
    bias: np.ndarray | None
    sinks: np.ndarray | None
    aux: tuple[np.ndarray | None, ...] | None

    def __repr__(self) -> str:
        text = show_shapes(self._replace(aux=None))
        if self.aux is None:
            return text
        listed = ", ".join(map(show_shape, self.aux)) + "," * (len(self.aux) == 1)
        return f"{text.removesuffix('None)')}({listed}))"
