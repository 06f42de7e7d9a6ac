"""Bias objects: what is added to the scores, without an array of all of them.

Small frozen objects, siblings of those of `fastattn.masks`. They are given as ``bias=``, in the place of an
array of ``H * L * S`` numbers, and hold as many as their formula has.

Letters: ``H`` query heads, ``L`` query length, ``S`` key length; ``i`` a query, ``j`` a key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from fastattn._machine.device import broadcast_to, host_array
from fastattn.masks.arguments import as_integer, broadcasts, whole_number
from fastattn.masks.base import Value
from fastattn.masks.map import UNBOUNDED, Size

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["Bias", "Grid", "Relative", "Sum"]


class Gridded(NamedTuple):
    """What is added to scores whose keys are on a grid: ``rows[..., j // Sw] + columns[..., j % Sw]``."""

    rows: np.ndarray  #: ``(*lead, H, L, Sh)`` view, of the dtype of the computation
    columns: np.ndarray  #: ``(*lead, H, L, Sw)`` view, likewise, without gaps between its columns


#: One of the terms that a bias is the sum of: ``(*lead, H, L, S)``, or a grid.
Term: TypeAlias = Any  # np.ndarray | DeviceArray | Gridded


def arrays_of(term: Term) -> tuple[Any, ...]:
    """The arrays that are read, each with an axis of heads before the last two."""
    return term if isinstance(term, Gridded) else (term,)


def block_of(term: Term, place: tuple[int, ...], queries: slice, keys: slice, dtype: np.dtype) -> np.ndarray:
    """A term for some queries and keys of the head at this place, ``(*lead, H)``."""
    if not isinstance(term, Gridded):
        return np.asarray(term[place][queries, keys].astype(dtype))
    rows, columns = (array[place][queries] for array in term)
    key = np.arange(keys.start, keys.stop)
    width = max(columns.shape[-1], 1)
    block: np.ndarray = rows[:, key // width] + columns[:, key % width]
    return block


class Sums(NamedTuple):
    """What the gradients of the scores are added up to, of which the gradient of a bias is made."""

    #: That broadcasts to the scores; of a grid ``(*lead, H, L, Sh + Sw)``, of diagonals ``(H, L + S - 1)``
    shape: tuple[int, ...]
    run: int | None = None  #: of a grid: ``Sw``
    by_diagonals: bool = False  #: entry ``m`` is of the scores with ``j - i = m + 1 - L``


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
    """What all bias objects share: ``+``, ``==`` and `materialize`.

    Notes
    -----
    ``+`` is of bias objects alone. With an array they are given as a tuple, ``bias=(object, array)``: what is
    in it is added up in the type of the computation, in its order.
    """

    __slots__ = ()
    __array_ufunc__ = None  # an array has no `+` of its own for them

    def __add__(self, other: Bias) -> Sum:
        if not isinstance(other, Bias):
            raise TypeError(
                f"a bias object is added to others alone, got {type(other).__name__}: "
                f"say bias=(object, array)"
            )
        return Sum(self, other)

    def __radd__(self, other: object) -> Sum:
        if not isinstance(other, Bias):
            raise TypeError(
                f"a bias object is added to others alone, got {type(other).__name__}: "
                f"say bias=(array, object)"
            )
        return Sum(other, self)

    def materialize(self, H: int, L: int, S: int) -> np.ndarray:
        """The bias as an array, for tests and teaching.

        Parameters
        ----------
        H, L, S : int
            Query heads, query length and key length.

        Returns
        -------
        ndarray, shape (H, L, S)
            In the dtype of the object's own array, or that to which its arrays promote; with leading axes
            where they have some.

        Examples
        --------
        >>> from fastattn.biases import Relative
        >>> Relative([[-2.0, -1.0, 0.0, -10.0]], offset=2).materialize(1, 3, 3)
        array([[[  0.,  -1.,  -2.],
                [-10.,   0.,  -1.],
                [-10., -10.,   0.]]])
        """
        H, L, S = (whole_number(n, name) for n, name in ((H, "H"), (L, "L"), (S, "S")))
        arrays = [array for term in self._terms() for array in term._arrays()]
        lead = np.broadcast_shapes(*(array.shape[:-3] for array in arrays))
        try:
            dtype = np.result_type(*arrays) if len(arrays) > 1 else arrays[0].dtype
        except TypeError:  # two 16-bit types
            dtype = np.dtype(np.float32)
        result = np.zeros((*lead, H, L, S), dtype)
        for number, bias in enumerate(self._terms()):
            term = bias._lower(Size(lead, H, L, S), dtype)
            for place in np.ndindex(*lead, H):
                block = block_of(term, place, slice(0, L), slice(0, S), dtype)
                result[place] = result[place] + block if number else block
        return result

    def _terms(self) -> tuple[Bias, ...]:
        """The objects that it is the sum of."""
        return (self,)

    def _arrays(self) -> tuple[np.ndarray, ...]:
        """Its own arrays, which have gradients."""
        raise NotImplementedError

    def _lower(self, sizes: Size, dtype: np.dtype) -> Term:
        """What is added to the scores, of this dtype."""
        raise NotImplementedError

    def _sums(self, sizes: Size) -> Sums:
        """What `_gradients` are made of."""
        raise NotImplementedError

    def _gradients(self, sums: np.ndarray, sizes: Size) -> tuple[np.ndarray, ...]:
        """The gradients of `_arrays`, or what is to be summed to their shapes; of float64 sums."""
        raise NotImplementedError


class Sum(Bias):
    """The sum of bias objects, which their ``+`` makes.

    Parameters
    ----------
    *terms : Bias
        They are added up in this order, in the type of the computation, and sums among them are taken apart.
        ``-inf`` of one masks, unless another has ``+inf`` or NaN there: their sum is NaN.

    Notes
    -----
    The gradient ``"bias"`` of `fastattn.attention_backward` is a tuple of those of the terms.

    Examples
    --------
    >>> from fastattn.biases import Relative
    >>> both = Relative([[-1.0, 0.0, -1.0]], offset=1) + Relative([[0.0, 5.0]])
    >>> both.materialize(1, 2, 2)
    array([[[ 0., -1.],
            [ 4.,  0.]]])
    """

    __slots__ = ("terms",)
    terms: tuple[Bias, ...]

    def __init__(self, *terms: Bias) -> None:
        for term in terms:
            if not isinstance(term, Bias):
                raise TypeError(f"the terms must be bias objects, got {type(term).__name__}")
        self._set(tuple(part for term in terms for part in term._terms()))

    def _terms(self) -> tuple[Bias, ...]:
        return self.terms

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.terms))


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
        # An offset may be any integer; sizes of arrays are below `UNBOUNDED`.
        offset = min(max(self.offset, -UNBOUNDED), UNBOUNDED)
        distances: np.ndarray = np.arange(S - 1, -L, -1)
        return np.clip(distances, -offset, last - offset) + offset

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return (self.table,)

    def _lower(self, sizes: Size, dtype: np.dtype) -> Term:
        lead, H, L, S = sizes
        heads = len(self.table)
        if heads not in (1, H):
            raise ValueError(f"bias: the table of {self!r} must have a row for each of H = {H} heads, or one")
        if not L or not S:
            view = np.zeros((heads, L, S), dtype)
        else:
            # By `take`, whose rows have no gaps.
            diagonals = _as_dtype(self.table, dtype).take(self._entries(L, S), axis=1)
            head, column = diagonals.strides
            view = as_strided(
                diagonals[:, L - 1 :], (heads, L, S), (head, -column, column), subok=False, writeable=False
            )
        return broadcast_to(view, (*lead, H, L, S), "bias")

    def _sums(self, sizes: Size) -> Sums:
        return Sums((sizes.H, max(sizes.L + sizes.S - 1, 0)), by_diagonals=True)

    def _gradients(self, sums: np.ndarray, sizes: Size) -> tuple[np.ndarray, ...]:
        gradient = np.zeros((len(sums), self.table.shape[1]))
        np.add.at(gradient.T, self._entries(sizes.L, sizes.S), sums.T)
        return (gradient,)


class Grid(Bias):
    """A sum of two numbers, one for the row of a key in a grid and one for its column.

    Of a grid of ``Sh`` rows and ``Sw`` columns key ``j`` is in row ``j // Sw`` and column ``j % Sw``::

        bias[..., h, i, j] = rows[..., h, i, j // Sw] + columns[..., h, i, j % Sw]

    Parameters
    ----------
    rows : array_like of float, shape (..., H, L, Sh)
    columns : array_like of float, shape (..., H, L, Sw)
        ``S = Sh * Sw``. Axes before the last broadcast by NumPy's rules: ``(1, L, Sh)`` is for all heads.
        They are not copied: what is written into them later is seen. ``-inf`` masks.

    Raises
    ------
    TypeError
        An array of another dtype than float16, bfloat16, float32 or float64.
    ValueError
        Arrays whose axes before the last do not broadcast to each other, or that have less than two axes; in
        a call, or of `materialize`, where the number of keys is not ``Sh * Sw``.

    Notes
    -----
    Memory: ``H * L * (Sh + Sw)`` numbers of each item, those of the arrays, and no ``L * S``. Each number is
    read in the type of the computation, where the two are added. Results are those of the array that
    `materialize` gives: bit for bit where the arrays are of that type. The gradient ``"bias"`` of
    `fastattn.attention_backward` is a pair, of the rows and of the columns: sums in float64 over the keys of
    a row and of a column, in an order that the sizes alone decide.

    References
    ----------
    .. [1] Li et al., "MViTv2: Improved Multiscale Vision Transformers for Classification and Detection",
       2022, section 4.1: decomposed relative positions. Equation 4 has the products of queries and positions
       that the two arrays are.
    .. [2] Li, Mao, Girshick and He, "Exploring Plain Vision Transformer Backbones for Object Detection",
       2022, whose image encoder is that of Kirillov et al., "Segment Anything", 2023 (SAM).

    Examples
    --------
    Positions of 4 by 6 patches, decomposed as in SAM:

    >>> import numpy as np
    >>> import fastattn
    >>> rng = np.random.default_rng(0)
    >>> query, key, value = rng.standard_normal((3, 2, 24, 8))  # 2 heads
    >>> of_rows = rng.standard_normal((7, 8))[np.arange(4)[:, None] - np.arange(4) + 3]
    >>> of_columns = rng.standard_normal((11, 8))[np.arange(6)[:, None] - np.arange(6) + 5]
    >>> grid = query.reshape(2, 4, 6, 8)
    >>> rows = np.einsum("hywd,yrd->hywr", grid, of_rows).reshape(2, 24, 4)
    >>> columns = np.einsum("hywd,wcd->hywc", grid, of_columns).reshape(2, 24, 6)
    >>> out = fastattn.attention(query, key, value, bias=fastattn.biases.Grid(rows, columns))
    >>> stored = (rows[..., :, None] + columns[..., None, :]).reshape(2, 24, 24)
    >>> np.array_equal(out, fastattn.attention(query, key, value, bias=stored))
    True
    """

    __slots__ = ("rows", "columns")
    rows: np.ndarray  #: ``(..., H, L, Sh)``, read-only
    columns: np.ndarray  #: ``(..., H, L, Sw)``, read-only

    def __init__(self, rows: ArrayLike, columns: ArrayLike) -> None:
        arrays = []
        for name, given in (("rows", rows), ("columns", columns)):
            array = check_dtype(host_array(given, name), name).view()
            if array.ndim < 2:
                raise ValueError(f"{name} must have shape (..., H, L, n), or (L, n), got {array.shape}")
            array.flags.writeable = False
            arrays.append(array)
        try:
            np.broadcast_shapes(*(array.shape[:-1] for array in arrays))
        except ValueError:
            raise ValueError(
                f"rows and columns must have axes (..., H, L) that broadcast to each other, "
                f"got {arrays[0].shape} and {arrays[1].shape}"
            ) from None
        self._set(*arrays)

    def __hash__(self) -> int:
        return hash((Grid, self.rows.shape, self.columns.shape))

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return self.rows, self.columns

    def _lower(self, sizes: Size, dtype: np.dtype) -> Term:
        lead, H, L, S = sizes
        Sh, Sw = self.rows.shape[-1], self.columns.shape[-1]
        if Sh * Sw != S:
            raise ValueError(
                f"bias: {self!r} is for a grid of Sh * Sw = {Sh} * {Sw} = {Sh * Sw} keys, "
                f"and there are S = {S}"
            )
        views = []
        for name, array in (("rows", self.rows), ("columns", self.columns)):
            shape = (*lead, H, L, array.shape[-1])
            if not broadcasts(array.shape, shape):
                raise ValueError(f"bias: the {name} of {self!r} do not broadcast to (..., H, L, n) = {shape}")
            views.append(broadcast_to(_without_gaps(_as_dtype(array, dtype)), shape, "bias"))
        return Gridded(*views)

    def _sums(self, sizes: Size) -> Sums:
        Sh, Sw = self.rows.shape[-1], self.columns.shape[-1]
        return Sums((*sizes.lead, sizes.H, sizes.L, Sh + Sw), run=Sw)

    def _gradients(self, sums: np.ndarray, sizes: Size) -> tuple[np.ndarray, ...]:
        Sh = self.rows.shape[-1]
        return sums[..., :Sh], sums[..., Sh:]


def _as_dtype(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):  # a number below the range of the dtype masks
        return array.astype(dtype, copy=False)


def _without_gaps(array: np.ndarray) -> np.ndarray:
    """The array, or a copy of it that has no gaps in its last axis. Those that are broadcast stay so."""
    if array.flags.aligned and array.strides[-1] == array.itemsize:
        return array
    once = array[tuple(slice(None) if stride else slice(1) for stride in array.strides[:-1])]
    return np.broadcast_to(np.ascontiguousarray(once), array.shape)
