"""How keys and values lie in memory: in 16 bits, in int8 with scales, in pages.

`Paged` and `Quantized` are what callers give instead of an array of keys or values. In a `Problem` each is a
`Rows`, which has the shape, the strides and the dtype that such an array would have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fastattn._device import DeviceArray

#: How an array is stored, in the record of a call and for the kernels: in the dtype of the computation, or in a
#: type in which nothing is computed. SWAPPED is added where bytes are in the other order.
REAL, FLOAT16, BFLOAT16, INT8 = range(4)
SWAPPED = 1 << 8

GROUP = 64  #: elements of a row of int8 that share one scale

_LARGEST = 127  # the largest magnitude of a quantised element: -128 would have no opposite


def storage_of(dtype: np.dtype) -> int:
    """Which 16-bit type a dtype is, in whichever byte order; REAL for any other.

    bfloat16 is that of the package `ml_dtypes`, known by its name: whoever has such an array has imported it.
    """
    if dtype.itemsize != 2:
        return REAL
    if dtype.kind == "f":
        return FLOAT16
    return BFLOAT16 if dtype.name == "bfloat16" else REAL


def storage_code(array: np.ndarray | DeviceArray | Rows) -> int:
    """How the array of a problem is stored, with the byte order."""
    if isinstance(array, Rows) and array.is_quantized:
        return INT8
    storage = storage_of(array.dtype)
    return storage if storage == REAL or array.dtype.isnative else storage | SWAPPED


class Quantized:
    """Keys or values in int8, with one float32 scale for each 64 elements of a row.

    Letters: ``...`` leading axes, ``n`` rows, ``D`` elements of a row.

    Parameters
    ----------
    data : array_like of int8, shape (..., n, D)
    scale : array_like of float32, shape (..., n, ceil(D / 64))
        Element ``d`` of a row stands for ``data[..., d] * scale[..., d // 64]``, rounded to float32.

    Raises
    ------
    TypeError
        `data` is not int8, or `scale` not float32.
    ValueError
        Shapes that do not belong together.

    Notes
    -----
    `fastattn.attention` takes it as key or value, or as the pages of a `Paged`. The kernels convert rows where
    they read them, and the bits of a result are those of the call on `decode`\\ d arrays. For the dtype of a
    result it counts as nothing: that of the other arrays decides, or float32 where there is none.

    Examples
    --------
    >>> import numpy as np
    >>> import fastattn
    >>> key = fastattn.Quantized.encode(np.linspace(-1, 1, 130, dtype=np.float32).reshape(1, 130))
    >>> key.data.dtype, key.scale.shape
    (dtype('int8'), (1, 3))
    >>> float(np.abs(key.decode() - np.linspace(-1, 1, 130)).max()) < 1 / 127 / 2 * 1.01
    True
    """

    __slots__ = ("data", "scale")

    def __init__(self, data: ArrayLike, scale: ArrayLike) -> None:
        self.data, self.scale = np.asarray(data), np.asarray(scale)
        if self.data.dtype != np.int8:
            raise TypeError(f"Quantized: data must be int8, got {self.data.dtype}")
        if self.scale.dtype.newbyteorder("=") != np.float32:
            raise TypeError(f"Quantized: scale must be float32, got {self.scale.dtype}")
        expected = (*self.data.shape[:-1], -(-self.data.shape[-1] // GROUP)) if self.data.ndim else None
        if self.scale.shape != expected:
            raise ValueError(
                f"Quantized: data must have shape (..., n, D), and scale (..., n, ceil(D / {GROUP})), got "
                f"{self.data.shape} and {self.scale.shape}"
            )

    @classmethod
    def encode(cls, rows: ArrayLike) -> Quantized:
        """Quantises rows of floats ``(..., n, D)``: ``scale = float32(max|x| / 127)`` of each group of 64
        elements, and ``rint(x / scale)``, within +-127. A scale of 0 gives zeros. A NaN or inf makes the scale
        of its group NaN, so that all of it reads as NaN.
        """
        array = np.asarray(rows)
        if array.dtype.kind not in "biuf" and storage_of(array.dtype) == REAL:
            raise TypeError(f"Quantized.encode: rows must be floats, got dtype {array.dtype}")
        data = np.empty(array.shape, np.int8)
        scale = np.empty((*array.shape[:-1], -(-array.shape[-1] // GROUP)), np.float32)
        encode_rows(array, data, scale)
        return cls(data, scale)

    def decode(self) -> np.ndarray:
        """The numbers that it stands for, float32 ``(..., n, D)``."""
        return decode_rows(self.data, self.scale)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def __repr__(self) -> str:
        return f"Quantized(data {self.data.shape}, scale {self.scale.shape})"


class Paged:
    """Keys or values in pages, which a table puts in order for each batch item.

    Letters: ``P`` pages, ``K`` key/value heads, ``...`` leading batch axes, ``n`` pages of an item, ``D``
    elements of a row.

    Parameters
    ----------
    pages : array_like or Quantized, shape (P, K, page, D)
        ``(P, page, K, D)`` where the call says ``layout="bshd"``.
    table : array_like of int, shape (..., n)
        Key ``j`` of an item is row ``j % page`` of page ``table[..., j // page]``. A page may be in the table
        more than once. Entries past the `key_lengths` of the call are never read, whatever they hold.

    Raises
    ------
    TypeError
        A `table` that is not of integers.
    ValueError
        `pages` without 4 axes, or with a page of no rows; a `table` without axes.

    Notes
    -----
    It stands for an array ``(..., K, n * page, D)``: ``pages[table]`` with the rows of an item one after
    another, of which no copy is made. The bits of a result are those of the call on that array. Pages of a
    multiple of 64 rows are read in place; others tile by tile.

    Examples
    --------
    >>> import numpy as np
    >>> import fastattn
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 2, 4, 6, 8))
    >>> pages = [x.reshape(2, 4, 2, 3, 8).swapaxes(1, 2).reshape(4, 4, 3, 8) for x in (key, value)]
    >>> key_pages, value_pages = (fastattn.Paged(x, [[0, 1], [2, 3]]) for x in pages)
    >>> out = fastattn.attention(query, key_pages, value_pages)
    >>> np.array_equal(out, fastattn.attention(query, key, value))
    True
    """

    __slots__ = ("pages", "table")

    def __init__(self, pages: ArrayLike | Quantized, table: ArrayLike) -> None:
        self.pages = pages if isinstance(pages, Quantized) else np.asarray(pages)
        self.table = np.asarray(table)
        if len(self.pages.shape) != 4 or 0 in self.pages.shape[1:3]:
            raise ValueError(
                f"Paged: pages must have shape (P, K, page, D), with at least one row, got {self.pages.shape}"
            )
        if self.table.dtype.kind not in "iu":
            raise TypeError(f"Paged: table must be of integers, got dtype {self.table.dtype}")
        if self.table.ndim == 0:
            raise ValueError("Paged: table must have shape (..., n), got ()")

    def __repr__(self) -> str:
        return f"Paged(pages {self.pages.shape}, table {self.table.shape})"


def encode_rows(rows: np.ndarray, data: np.ndarray, scale: np.ndarray) -> None:
    """`Quantized.encode` into arrays."""
    dtype = np.float64 if rows.dtype.itemsize > 4 or rows.dtype.kind in "iu" else np.float32
    with np.errstate(all="ignore"):
        for group in range(scale.shape[-1]):
            columns = slice(group * GROUP, (group + 1) * GROUP)
            x = rows[..., columns].astype(dtype)
            largest = np.abs(x).max(axis=-1, initial=0)
            factor = np.where(np.isfinite(largest), largest / _LARGEST, np.nan).astype(np.float32)
            quotient = np.rint(x / factor[..., None].astype(dtype))
            quotient = np.where(factor[..., None] > 0, quotient, 0)  # 0 for a scale of 0 or NaN
            data[..., columns] = np.clip(quotient, -_LARGEST, _LARGEST)
            scale[..., group] = factor


def _native(scale: np.ndarray) -> np.ndarray:
    """A scale in this machine's byte order."""
    return scale if scale.dtype.isnative else scale.astype(np.float32)


def decode_rows(data: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """`Quantized.decode` of arrays."""
    each = np.repeat(scale, GROUP, axis=-1)[..., : data.shape[-1]]
    with np.errstate(all="ignore"):
        return np.multiply(data, each, dtype=np.float32)


class Rows:
    """Keys or values of a problem that are more than one array of numbers: in int8, in pages, or both.

    It has what a problem asks of an array ``(*lead, K, S, D)``. Where they are in pages, `strides` are those
    inside a page, and 0 for the leading axes.
    """

    __slots__ = (
        "_index", "_memory", "_pages", "data", "dtype", "page_size", "scale", "scale_strides", "scale_table",
        "shape", "strides", "table",
    )  # fmt: skip

    data: np.ndarray | None  #: ``(*lead, K, S, D)``; None where they are in pages
    scale: np.ndarray | None  #: ``(*lead, K, S, ceil(D / 64))`` float32, likewise; None unless in int8
    table: np.ndarray | None  #: ``(*lead, n)`` int64: the address of each page; None unless in pages
    scale_table: np.ndarray | None  #: the address of each page's scales
    page_size: int  #: keys of a page; 0 where they are not in pages
    scale_strides: tuple[int, ...] | None  #: as `strides`; None unless in int8

    @classmethod
    def of(cls, given: Quantized | Paged | Rows) -> Rows:
        """What a caller gave in place of an array, with its axes in the caller's order."""
        if isinstance(given, Rows):
            return given
        if isinstance(given, Quantized):
            return cls._of_arrays(given.data, _native(given.scale))
        pages = given.pages
        if isinstance(pages, Quantized):
            return cls._of_index(pages.data, _native(pages.scale), given.table)
        return cls._of_index(pages, None, given.table)

    @classmethod
    def of_pages(
        cls,
        pages: np.ndarray,
        scales: np.ndarray | None,
        table: np.ndarray,
        scale_table: np.ndarray | None,
        length: int,
        memory: Any = None,
    ) -> Rows:
        """Rows in pages, whose addresses are known.

        pages : (_, K, page, D), whose dtype and strides all pages have; scales likewise
        table, scale_table : (*lead, n) int64, addresses
        length : S, at most the rows of n pages
        memory : what must live as long as the addresses are read
        """
        self = cls._of_index(pages, scales, table)
        self.shape = (*self.shape[:-2], length, self.shape[-1])
        self.table, self.scale_table, self._index, self._memory = table, scale_table, None, memory
        return self

    @classmethod
    def _of_arrays(cls, data: np.ndarray, scale: np.ndarray) -> Rows:
        self = cls()
        self.data, self.scale, self.table, self.scale_table, self.page_size = data, scale, None, None, 0
        self.shape, self.strides, self.dtype = data.shape, data.strides, data.dtype
        self.scale_strides, self._pages, self._index, self._memory = scale.strides, None, None, None
        return self

    @classmethod
    def _of_index(cls, pages: np.ndarray, scales: np.ndarray | None, index: np.ndarray) -> Rows:
        self = cls()
        lead = index.shape[:-1]
        self.data = self.scale = self.table = self.scale_table = self._memory = None
        self.page_size, self._pages, self._index = pages.shape[2], (pages, scales), index
        self.shape = (*lead, pages.shape[1], index.shape[-1] * self.page_size, pages.shape[3])
        self.strides, self.dtype = (0,) * len(lead) + pages.strides[1:], pages.dtype
        self.scale_strides = None if scales is None else (0,) * len(lead) + scales.strides[1:]
        return self

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def is_quantized(self) -> bool:
        return self.scale_strides is not None

    def arrays(self) -> tuple[np.ndarray | None, ...]:
        """Data, scale, and the tables of both."""
        return self.data, self.scale, self.table, self.scale_table

    def memory(self) -> list[np.ndarray]:
        """All that is read, to tell whether a result overlaps it; not that of addresses."""
        if self._memory is not None:
            return []
        return [array for array in (self._pages or (self.data, self.scale)) if array is not None]

    def signature(self) -> tuple[Any, ...]:
        """What two calls with the same preparation have in common."""
        return (self.dtype.str, self.dtype.name, self.shape, self.strides, self.scale_strides, self.page_size)

    def swapaxes(self, _first: int, _second: int) -> Rows:
        """The same with the axes of heads and rows swapped."""
        pages, scales = self._pages or (self.data, self.scale)
        assert pages is not None
        other = pages.swapaxes(-3, -2), None if scales is None else scales.swapaxes(-3, -2)
        if self._index is not None:
            return Rows._of_index(*other, self._index)
        assert other[1] is not None
        return Rows._of_arrays(other[0], other[1])

    def with_heads(self) -> Rows:
        """Rows without an axis of heads as those of one head."""
        assert self.data is not None and self.scale is not None
        return Rows._of_arrays(self.data[None], self.scale[None])

    def astype(self, dtype: np.dtype) -> Rows:
        """Pages of floats in another dtype, all of them."""
        assert self._pages is not None and self._index is not None
        return Rows._of_index(self._pages[0].astype(dtype), None, self._index)

    def broadcast_to(self, lead: tuple[int, ...]) -> Rows:
        """With other leading axes."""
        if self.shape[:-3] == lead:
            return self
        data, scale, table, scale_table = (
            None if array is None else np.broadcast_to(array, (*lead, *array.shape[-tail:]))
            for array, tail in zip(self.arrays(), (3, 3, 1, 1), strict=True)
        )
        if data is not None and scale is not None:
            return Rows._of_arrays(data, scale)
        assert self._pages is not None
        if self._index is not None:
            return Rows._of_index(*self._pages, np.broadcast_to(self._index, (*lead, self._index.shape[-1])))
        assert table is not None
        return Rows.of_pages(*self._pages, table, scale_table, self.shape[-2], self._memory)

    def located(self, lengths: np.ndarray | None) -> Rows | None:
        """With the addresses of the pages that hold the first `lengths` keys ``(*lead,)`` of each item, all if
        None; None where a number in the table is not that of a page."""
        if self._index is None:
            return self
        if self._wrong_pages(lengths).any():
            return None
        assert self._pages is not None
        pages, scales = self._pages
        index = np.clip(self._index, 0, max(len(pages) - 1, 0)).astype(np.int64)
        table = pages.ctypes.data + index * pages.strides[0]
        scale_table = None if scales is None else scales.ctypes.data + index * scales.strides[0]
        return Rows.of_pages(pages, scales, table, scale_table, self.shape[-2])

    def what_is_wrong(self, lengths: np.ndarray | None) -> str:
        """Why `located` gave None."""
        assert self._pages is not None and self._index is not None
        where = tuple(int(n) for n in np.argwhere(self._wrong_pages(lengths))[0])
        pages = len(self._pages[0])
        named = ", ".join(map(str, where))
        return f"table[{named}] must be one of the {pages} pages, got {self._index[where]}"

    def _wrong_pages(self, lengths: np.ndarray | None) -> np.ndarray:
        assert self._pages is not None and self._index is not None
        wrong = (self._index < 0) | (self._index >= len(self._pages[0]))
        if lengths is not None:
            wrong &= np.arange(self._index.shape[-1]) * self.page_size < lengths[..., None]
        return wrong

    def head(self, item: tuple[int, ...], kv_head: int) -> HeadRows:
        """The rows of one key/value head, as an array ``(S, D)`` would be indexed."""
        return HeadRows(self, item, kv_head)


def signature_of_rows(given: Quantized | Paged | Rows) -> tuple[Any, ...]:
    """What two calls with the same preparation have in common."""
    if isinstance(given, Rows):
        return given.signature()
    pages = given if isinstance(given, Quantized) else given.pages
    arrays = [pages] if isinstance(pages, np.ndarray) else [pages.data, pages.scale]
    table = None if isinstance(given, Quantized) else given.table.shape
    return (table, *((array.dtype.str, array.dtype.name, array.shape, array.strides) for array in arrays))


class HeadRows:
    """The rows of one head of `Rows`, decoded where they are asked for: for NumPy alone, not for speed."""

    def __init__(self, rows: Rows, item: tuple[int, ...], kv_head: int) -> None:
        self.rows, self.item, self.kv_head = rows, item, kv_head
        self.shape = rows.shape[-2:]

    def __getitem__(self, keys: slice | int) -> np.ndarray:
        if not isinstance(keys, slice):
            return self[keys : keys + 1][0]
        rows, item, kv = self.rows, self.item, self.kv_head
        if rows.data is not None and rows.scale is not None:
            return decode_rows(rows.data[item][kv, keys], rows.scale[item][kv, keys])
        assert rows._pages is not None and rows.table is not None
        pages, scales = rows._pages
        size, parts = rows.page_size, []
        for number in range(keys.start // size, -(-keys.stop // size)):
            here = slice(max(keys.start - number * size, 0), min(keys.stop - number * size, size))
            part = _at(int(rows.table[item][number]), pages)[kv, here]
            if scales is not None and rows.scale_table is not None:
                part = decode_rows(part, _at(int(rows.scale_table[item][number]), scales)[kv, here])
            parts.append(part)
        return np.concatenate(parts) if parts else np.empty((0, self.shape[1]), pages.dtype)


class _At:
    """An address, for NumPy to make an array of."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> None:
        self.__array_interface__ = {
            "version": 3, "data": (address, True), "shape": shape, "strides": strides, "typestr": f"|V{itemsize}",
        }  # fmt: skip


def _at(address: int, like: np.ndarray) -> np.ndarray:
    """The page at an address, of the shape, strides and dtype of ``like[0]``."""
    page = np.asarray(_At(address, like.shape[1:], like.strides[1:], like.itemsize))
    return page.view(like.dtype)
