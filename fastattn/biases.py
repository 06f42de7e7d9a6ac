"""Bias objects: what is added to the scores, without an array of all of them.

Small frozen objects, siblings of those of `fastattn.masks`. They are given as ``bias=``, in the place of an
array of ``H * L * S`` numbers, and hold as many as their formula has.

Letters: ``H`` query heads, ``L`` query length, ``S`` key length; ``i`` a query, ``j`` a key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import as_strided

from fastattn._machine.device import host_array
from fastattn.masks.arguments import as_integer, whole_number
from fastattn.masks.base import Value

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike

__all__ = ["Bias", "Relative"]


def is_bias_dtype(dtype: np.dtype) -> bool:
    return (dtype.kind == "f" and dtype.itemsize in (2, 4, 8)) or dtype.name == "bfloat16"  # no float8


def check_dtype(array: np.ndarray, name: str) -> np.ndarray:
    if not is_bias_dtype(array.dtype):
        hint = "; to allow keys use mask=" if name == "bias" and array.dtype.kind in "biu" else ""
        raise TypeError(
            f"{name} must be a float16, bfloat16, float32 or float64 array, got dtype {array.dtype}{hint}"
        )
    return array


class Bias(Value):
    """What all bias objects share: ``==`` and `materialize`."""

    __slots__ = ()

    def materialize(self, H: int, L: int, S: int) -> np.ndarray:
        """The bias as an array, for tests and teaching.

        Parameters
        ----------
        H, L, S : int
            Query heads, query length and key length.

        Returns
        -------
        ndarray, shape (H, L, S)
            In the dtype of the object's own array.

        Examples
        --------
        >>> from fastattn.biases import Relative
        >>> Relative([[-2.0, -1.0, 0.0, -10.0]], offset=2).materialize(1, 3, 3)
        array([[[  0.,  -1.,  -2.],
                [-10.,   0.,  -1.],
                [-10., -10.,   0.]]])
        """
        H, L, S = (whole_number(n, name) for n, name in ((H, "H"), (L, "L"), (S, "S")))
        return np.broadcast_to(self._lower(H, L, S), (H, L, S)).copy()

    def _lower(self, H: int, L: int, S: int, dtype: DTypeLike | None = None) -> np.ndarray:
        """A view that broadcasts to ``(H, L, S)``, of this dtype; None: its own."""
        raise NotImplementedError

    def _diagonals(self, L: int, S: int) -> tuple[int, int]:
        """The shape of the sums that `_gradient` takes."""
        raise NotImplementedError

    def _gradient(self, diagonals: np.ndarray, L: int, S: int) -> np.ndarray:
        """The gradient of the object's own array, of float64 sums along the diagonals of the scores: entry
        ``m`` is of those with ``j - i = m + 1 - L``."""
        raise NotImplementedError


class Relative(Bias):
    """A number for each distance: ``bias[h, i, j] = table[h, i + S - L - j + offset]``.

    The last query is at the last of ``S`` keys, whatever `key_lengths` say. Distances beyond the ends of the
    table have its nearest entry.

    Parameters
    ----------
    table : array_like of float, shape (H, n), (1, n) or (n,)
        One row for each query head, or one for all; ``n >= 1``. It is copied. ``-inf`` masks.
    offset : int, default 0
        The entry of distance 0, where a query is at the key.

    Raises
    ------
    TypeError
        A table of another dtype than float16, bfloat16, float32 or float64, or an offset that is no integer.
    ValueError
        A table of another shape.

    Notes
    -----
    Memory and time to prepare a call: ``H * (L + S)`` numbers, which kernels read in place. Results are those
    of the array that `materialize` gives, bit for bit. The gradient ``"bias"`` of
    `fastattn.attention_backward` has the shape of the table: sums along the diagonals of the scores, those of
    a tile in the type of the computation and all others in float64, in an order that the sizes alone decide.

    References
    ----------
    .. [1] Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer",
       2020 (T5), whose buckets are ``table[:, buckets(distances)]``.
    .. [2] Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length
       Extrapolation", 2022 (ALiBi).

    Examples
    --------
    ALiBi, for as many keys as 4096:

    >>> import numpy as np
    >>> import fastattn
    >>> slopes = 2.0 ** -np.arange(1, 9)
    >>> alibi = fastattn.biases.Relative(-slopes[:, None] * np.arange(4096))
    >>> x = np.random.default_rng(0).standard_normal((8, 100, 16))
    >>> out = fastattn.attention(x, x, x, bias=alibi, causal=True)
    >>> distance = np.arange(100)[:, None] - np.arange(100)
    >>> stored = -slopes[:, None, None] * np.maximum(distance, 0)
    >>> np.array_equal(out, fastattn.attention(x, x, x, bias=stored, causal=True))
    True
    """

    __slots__ = ("table", "offset")
    table: np.ndarray  #: ``(H or 1, n)``, read-only
    offset: int

    def __init__(self, table: ArrayLike, offset: int = 0) -> None:
        own = np.array(check_dtype(host_array(table, "table"), "table"), order="C", ndmin=2)
        if own.ndim != 2 or not own.size:
            raise ValueError(f"table must have shape (H, n), (1, n) or (n,), n >= 1, got {np.shape(table)}")
        own.flags.writeable = False
        self._set(own, as_integer(offset, "offset"))

    def _entries(self, L: int, S: int) -> np.ndarray:
        """Which entry each diagonal has, from that of the last query and the first key on."""
        last = len(self.table[0]) - 1
        # An offset may be any integer; sizes of arrays are far below 2**62.
        offset = min(max(self.offset, -(1 << 62)), 1 << 62)
        distances: np.ndarray = np.arange(S - 1, -L, -1)
        return np.clip(distances, -offset, last - offset) + offset

    def _lower(self, H: int, L: int, S: int, dtype: DTypeLike | None = None) -> np.ndarray:
        heads = len(self.table)
        if heads not in (1, H):
            raise ValueError(f"bias: the table of {self!r} must have a row for each of H = {H} heads, or one")
        if not L or not S:
            return np.zeros((heads, L, S), dtype or self.table.dtype)
        diagonals = self.table.astype(dtype or self.table.dtype, copy=False)[:, self._entries(L, S)]
        head, column = diagonals.strides
        return as_strided(
            diagonals[:, L - 1 :], (heads, L, S), (head, -column, column), subok=False, writeable=False
        )

    def _diagonals(self, L: int, S: int) -> tuple[int, int]:
        return len(self.table), max(L + S - 1, 0)

    def _gradient(self, diagonals: np.ndarray, L: int, S: int) -> np.ndarray:
        """The gradient of the table, of sums ``(H or 1, L + S - 1)`` along the diagonals."""
        sums = np.zeros(self.table.shape)
        np.add.at(sums.T, self._entries(L, S), diagonals.T)
        with np.errstate(over="ignore"):
            return sums.astype(self.table.dtype.newbyteorder("="))
