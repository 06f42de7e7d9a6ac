"""How keys and values lie in memory: in 16 bits, in int8 with scales, in pages.

`Paged` and `Quantized` are what callers give instead of an array of keys or values. In a `Problem` each is a
`Rows`, which has the shape, the strides and the dtype that such an array would have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._machine.device import at_address, host_array

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fastattn._machine.device import DeviceArray

#: How an array is stored, in the record of a call and for the kernels: in the dtype of the computation, or in
#: a type in which nothing is computed, numbered as in ``kernels.h``. SWAPPED is added where bytes are in the
#: other order.
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
    `fastattn.attention` takes it as key or value, or as the pages of a `Paged`. Kernels convert rows where
    they read them. Results have the bits of the call on `decode()`, and the dtype that the other arrays
    decide.

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
        self.data, self.scale = host_array(data, "Quantized: data"), host_array(scale, "Quantized: scale")
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
        """Quantises rows of floats ``(..., n, D)``.

        Each group of 64 elements has ``scale = float32(max|x| / 127)`` and ``rint(x / scale)``, within +-127.
        A scale of 0 gives zeros. A NaN or inf makes the scale of its group NaN, and so all of the group.
        """
        array = host_array(rows, "Quantized.encode: rows")
        if not array.ndim:
            raise ValueError("Quantized.encode: rows must have shape (..., n, D), got ()")
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
    another. No copy is made. Results have the bits of the call on that array. Pages of a multiple of 64 rows
    are read in place, others are copied tile by tile.

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
        self.pages = pages if isinstance(pages, Quantized) else host_array(pages, "Paged: pages")
        self.table = host_array(table, "Paged: table")
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
        "data", "dtype", "index", "length", "owner", "page_size", "scale", "scale_table", "shape", "strides",
        "table",
    )  # fmt: skip

    def __init__(
        self,
        data: np.ndarray,
        scale: np.ndarray | None,
        *,
        index: np.ndarray | None = None,
        table: np.ndarray | None = None,
        scale_table: np.ndarray | None = None,
        length: int | None = None,
        owner: Any = None,
    ) -> None:
        self.data = data  #: ``(*lead, K, S, D)``; pages ``(P, K, page, D)``
        self.scale = scale  #: float32, with ``ceil(D / 64)`` in the place of D; None unless in int8
        self.index = index  #: ``(*lead, n)``: which of the pages; None where addresses are known
        self.table = table  #: ``(*lead, n)`` int64: the address of each page, all with the strides of `data`
        self.scale_table = scale_table  #: the address of each page's scales
        self.owner = owner  #: of the memory at the addresses, where it is not `data`
        self.dtype = data.dtype
        self.page_size = 0  #: keys of a page; 0 where they are not in pages
        self.shape: tuple[int, ...] = data.shape
        self.strides: tuple[int, ...] = data.strides
        order = table if index is None else index
        if order is not None:
            lead, n = order.shape[:-1], order.shape[-1]
            self.page_size = data.shape[2]
            length = n * self.page_size if length is None else length
            self.shape = (*lead, data.shape[1], length, data.shape[3])
            self.strides = (0,) * len(lead) + data.strides[1:]

    @classmethod
    def of(cls, given: Quantized | Paged | Rows) -> Rows:
        """What a caller gave in place of an array, with its axes in the caller's order."""
        if isinstance(given, Rows):
            return given
        pages, index = (given.pages, given.table) if isinstance(given, Paged) else (given, None)
        if isinstance(pages, Quantized):
            return cls(pages.data, native_scale(pages.scale), index=index)
        return cls(pages, None, index=index)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def is_quantized(self) -> bool:
        return self.scale is not None

    @property
    def scale_strides(self) -> tuple[int, ...]:
        """As `strides`; zeros unless in int8."""
        if self.scale is None:
            return (0,) * self.ndim
        return (0,) * (self.ndim - 3) + self.scale.strides[1:] if self.page_size else self.scale.strides

    def arrays(self) -> tuple[np.ndarray | None, ...]:
        """Data, scale, and the tables of both."""
        if self.page_size:
            return None, None, self.table, self.scale_table
        return self.data, self.scale, None, None

    def memory(self) -> list[np.ndarray]:
        """The caller's arrays that are read, to tell whether a result overlaps them."""
        return [array for array in (self.data, self.scale) if array is not None and self.owner is None]

    def signature(self) -> tuple[Any, ...]:
        """What two calls with the same preparation have in common."""
        return (self.dtype, self.shape, self.strides, self.scale_strides, self.page_size)

    def with_heads(self) -> Rows:
        """Rows without an axis of heads as those of one head."""
        return Rows(self.data[None], None if self.scale is None else self.scale[None])

    def swapped(self) -> Rows:
        """The axes of heads and rows swapped."""
        scale = None if self.scale is None else self.scale.swapaxes(-3, -2)
        return Rows(self.data.swapaxes(-3, -2), scale, index=self.index)

    def astype(self, dtype: np.dtype) -> Rows:
        """Pages of floats in another dtype, all of them."""
        return Rows(self.data.astype(dtype), None, index=self.index)

    def broadcast_to(self, lead: tuple[int, ...]) -> Rows:
        """With other leading axes."""
        if self.shape[:-3] == lead:
            return self

        def spread(array: np.ndarray | None, axes: int) -> np.ndarray | None:
            return None if array is None else np.broadcast_to(array, (*lead, *array.shape[-axes:]))

        if not self.page_size:
            return Rows(np.broadcast_to(self.data, (*lead, *self.data.shape[-3:])), spread(self.scale, 3))
        tables = {name: spread(getattr(self, name), 1) for name in ("index", "table", "scale_table")}
        return Rows(self.data, self.scale, **tables, length=self.shape[-2], owner=self.owner)

    def located(self, lengths: np.ndarray | None) -> Rows:
        """With the addresses of pages. Those of the first `lengths` keys ``(*lead,)`` of each item, of all if
        None, must be numbers of pages: else ValueError."""
        if self.index is None:
            return self
        tables = locate_pages(self.index, self.data, self.scale, self.page_size, lengths)
        return Rows(self.data, self.scale, table=tables[0], scale_table=tables[1], length=self.shape[-2])


def signature_of_rows(given: Quantized | Paged | Rows) -> tuple[Any, ...]:
    """What two calls with the same preparation have in common."""
    if isinstance(given, Rows):
        return given.signature()
    pages = given if isinstance(given, Quantized) else given.pages
    arrays = [pages] if isinstance(pages, np.ndarray) else [pages.data, pages.scale]
    table = None if isinstance(given, Quantized) else given.table.shape
    return (table, *[(array.dtype, array.shape, array.strides) for array in arrays])


def native_scale(scale: np.ndarray) -> np.ndarray:
    """Scales as kernels read them."""
    return scale if scale.dtype.isnative else scale.astype(np.float32)


def locate_pages(
    index: np.ndarray,
    pages: np.ndarray,
    scales: np.ndarray | None,
    page_size: int,
    lengths: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """The addresses of pages and of their scales by their numbers; see `Rows.located`."""
    if index.size and not (index.min() >= 0 and index.max() < len(pages)):
        wrong: np.ndarray = (index < 0) | (index >= len(pages))
        if lengths is not None:
            wrong &= np.arange(index.shape[-1]) * page_size < lengths[..., None]
        if wrong.any():
            where = tuple(int(n) for n in np.argwhere(wrong)[0])
            named = ", ".join(map(str, where))
            raise ValueError(f"table[{named}] must be one of the {len(pages)} pages, got {index[where]}")
        index = np.clip(index, 0, max(len(pages) - 1, 0))
    # In C order, which a broadcast table would lose: kernels read an item's pages one after another.
    index = index.astype(np.int64, order="C", copy=False)
    table = index * pages.strides[0] + pages.ctypes.data
    return table, None if scales is None else index * scales.strides[0] + scales.ctypes.data


class HeadRows:
    """The rows of one key/value head of `Rows`, which are indexed as an array ``(S, D)`` and decoded then.

    For the reference backend, not for speed.
    """

    def __init__(self, rows: Rows, item: tuple[int, ...], kv_head: int) -> None:
        self.rows, self.item, self.kv_head = rows, item, kv_head
        self.shape = rows.shape[-2:]

    def __getitem__(self, keys: slice | int) -> np.ndarray:
        if not isinstance(keys, slice):
            return self[keys : keys + 1][0]
        rows, size = self.rows, self.rows.page_size
        if rows.table is None:
            place: Any = (*self.item, self.kv_head, keys)
            data = rows.data[place]
            return data if rows.scale is None else decode_rows(data, rows.scale[place])
        parts = []
        for number in range(keys.start // size, -(-keys.stop // size)):
            here = slice(max(keys.start - number * size, 0), min(keys.stop - number * size, size))
            part = self._page(rows.table, number, rows.data)[here]
            if rows.scale is not None:
                part = decode_rows(part, self._page(rows.scale_table, number, rows.scale)[here])
            parts.append(part)
        return np.concatenate(parts) if parts else np.empty((0, self.shape[1]), rows.dtype)

    def _page(self, table: Any, number: int, pages: np.ndarray) -> np.ndarray:
        page = at_address(int(table[self.item][number]), pages.shape[1:], pages.strides[1:], pages.dtype)
        return page[self.kv_head]
