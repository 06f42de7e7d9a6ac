"""Pages of keys and values that caches share: where they lie, how many tables name them, rows in and out.

A page holds the keys and the values of `page_size` tokens, all heads. Its memory is in four arrays, the
parts: keys, their scales, values, their scales; only int8 has scales. Arrays of many pages, slabs, are added
as more are needed, and never move: a page has an address for as long as the pool lives.
"""

from __future__ import annotations

from _thread import allocate_lock  # `threading` takes long to import
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from fastattn._call.problem import FLOAT32, FLOAT64
from fastattn._call.storage import BFLOAT16, GROUP, INT8, REAL, decode_rows, encode_rows, storage_of
from fastattn._machine.threads import no_fork
from fastattn.backends.cpu.record import address_of

try:
    import fastattn.backends.cython.backend  # noqa: F401  # which chooses the kernels that the driver calls
    from fastattn.backends.cython.driver import write_page_rows as write_page_rows
except ImportError:
    write_page_rows = None

IS_COMPILED = write_page_rows is not None

NO_PAGE = 0  #: the number of no page; where it is read, it is one of zeros
KEYS, KEY_SCALES, VALUES, VALUE_SCALES = range(4)  #: the parts of a page
PART_NAMES = ("keys", "key_scales", "values", "value_scales")

MIN_SLAB = 4  #: pages
_LINE, _ALIGNMENT = 64, 4096  # of a cache; of memory that is touched for the first time
_FOREVER = 1 << 40  # holders of a page that is never written or reused

#: Of all pools, for some microseconds at a time; a fork waits for it.
_lock = allocate_lock()
no_fork.hold_at_fork(_lock.acquire, _lock.release)

Slab = tuple[Any, ...]  #: of each part an array ``(pages, K, page_size, columns)``, or None


@dataclass(frozen=True)
class PageShape:
    """What all pages of a pool have in common."""

    num_kv_heads: int
    page_size: int  #: tokens
    head_dim: int
    value_dim: int
    key_dtype: np.dtype  #: float64, float32, float16, bfloat16 or int8, native
    value_dtype: np.dtype

    def stored(self, part: int) -> np.dtype:
        """The dtype of keys or of values."""
        return self.value_dtype if part == VALUES else self.key_dtype

    @cached_property
    def parts(self) -> list[tuple[tuple[int, ...], np.dtype] | None]:
        """Shape and dtype of each part of a page."""
        parts: list[tuple[tuple[int, ...], np.dtype] | None] = []
        for dtype, dim in ((self.key_dtype, self.head_dim), (self.value_dtype, self.value_dim)):
            rows = (self.num_kv_heads, self.page_size)
            parts.append(((*rows, dim), dtype))
            parts.append(((*rows, -(-dim // GROUP)), FLOAT32) if dtype == np.int8 else None)
        return parts

    def empty(self, pages: int) -> Slab:
        """Memory of so many pages, in one piece: of small caches malloc keeps it for the next one."""
        sizes = [-(-pages * _nbytes(part) // _LINE) * _LINE for part in self.parts]
        memory = np.empty(sum(sizes) + _ALIGNMENT, np.uint8)
        offset = -address_of(memory) % _ALIGNMENT
        slab: list[np.ndarray | None] = []
        for part, size in zip(self.parts, sizes, strict=True):
            slab.append(None if part is None else np.ndarray((pages, *part[0]), part[1], memory, offset))
            offset += size
        return tuple(slab)

    @cached_property
    def like(self) -> Slab:
        """Arrays with the shape, the strides and the dtype of one page, and no memory behind them."""
        return tuple(None if part is None else _without_memory(*part) for part in self.parts)


def _nbytes(part: tuple[tuple[int, ...], np.dtype] | None) -> int:
    return 0 if part is None else prod(part[0]) * part[1].itemsize


@lru_cache(maxsize=64)
def _without_memory(page: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    heads, rows, columns = page
    row = columns * dtype.itemsize
    strides = (heads * rows * row, rows * row, row, dtype.itemsize)
    return as_strided(np.empty((), dtype), (1, *page), strides)


class PagePool:
    """Pages by number, from 1 on. Each counts the places in tables that name it; one that none names is free.

    A page may be written by the cache that alone names it, once. The methods may be called from any thread.
    """

    def __init__(self, shape: PageShape) -> None:
        self.shape = shape
        self.page_nbytes = sum(map(_nbytes, shape.parts))
        #: ``(4, 1 + pages)`` int64: where each part of a page begins
        self.addresses = np.zeros((4, 1), np.int64)
        self._holders = np.full(1, _FOREVER, np.int64)
        self._slabs: list[Slab] = []
        self._starts: list[int] = []  # the first page of each slab
        self._free: list[int] = []
        self._zeros: Slab | None = None
        self._left: deque[np.ndarray] = deque()  # pages named by tables that are gone

    def take(self, n: int) -> list[int]:
        """The numbers of `n` pages that nobody else has."""
        with _lock:
            self._collect()
            missing = n - len(self._free)
            if missing > 0:
                self._add(self.shape.empty(max(missing, (self._holders.size - 1) // 2, MIN_SLAB)), 0)
            taken = [self._free.pop() for _ in range(n)]
            self._holders[taken] = 1
            return taken

    def hold(self, numbers: np.ndarray) -> None:
        """Counts tables' entries that name these pages as well."""
        with _lock:
            self._collect()
            np.add.at(self._holders, numbers, 1)

    def release(self, numbers: np.ndarray) -> None:
        """The opposite of `hold` and `take`."""
        with _lock:
            self._release(numbers)

    def release_later(self, numbers: np.ndarray) -> None:
        """`release` when pages are next asked for: for finalisers, which may interrupt any method."""
        self._left.append(numbers)

    def are_own(self, numbers: Any) -> bool:
        """Whether one entry of a table alone names each of these pages, so that they may be written."""
        if self._left:
            with _lock:
                self._collect()
        return bool((self._holders[numbers] == 1).all())

    def add(self, slab: Slab, *, forever: bool) -> None:
        """Takes memory for pages, each held once; or read-only memory, for pages that stay for good."""
        with _lock:
            self._add(slab, _FOREVER if forever else 1)

    def need_zeros(self) -> None:
        """Gives `NO_PAGE` an address, from which zeros are read."""
        with _lock:
            if self._zeros is None:
                zeros = tuple(None if part is None else np.zeros(*part) for part in self.shape.parts)
                self.addresses[:, NO_PAGE] = [0 if part is None else part.ctypes.data for part in zeros]
                self._zeros = zeros

    def page(self, number: int) -> Slab:
        """The memory of a page: of each part ``(K, page_size, columns)``, or None."""
        slab = bisect_right(self._starts, number) - 1
        at = number - self._starts[slab]
        return tuple(None if part is None else part[at] for part in self._slabs[slab])

    def _add(self, slab: Slab, holders: int) -> None:
        pages, first = len(slab[KEYS]), self._holders.size
        numbers = np.arange(pages)
        addresses = [0 * numbers if x is None else address_of(x) + x.strides[0] * numbers for x in slab]
        self.addresses = np.concatenate([self.addresses, addresses], axis=1)
        self._holders = np.concatenate([self._holders, np.full(pages, holders)])
        self._slabs.append(slab)
        self._starts.append(first)
        if not holders:
            self._free += range(first + pages - 1, first - 1, -1)

    def _collect(self) -> None:
        while self._left:
            self._release(self._left.popleft())

    def _release(self, numbers: np.ndarray) -> None:
        numbers = numbers[numbers != NO_PAGE]
        np.subtract.at(self._holders, numbers, 1)
        self._free += sorted(set(numbers[self._holders[numbers] == 0].tolist()))  # np.unique imports numpy.ma


def _cast(rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Rows in a float storage, each number rounded once."""
    with np.errstate(all="ignore"):
        if rows.dtype == FLOAT64 and storage_of(dtype) == BFLOAT16:
            rows = _to_odd(rows)
        return rows.astype(dtype, copy=False)


def _to_odd(rows: np.ndarray) -> np.ndarray:
    """float64 in float32, rounded to odd: rounding that to 16 bits is as rounding the float64, once.

    `ml_dtypes` converts float64 to bfloat16 by way of float32, to nearest both times.
    """
    nearest = rows.astype(np.float32)
    inexact = (nearest != rows) & ~np.isnan(rows)
    bits = nearest.view(np.uint32)
    # Toward zero: the bits of a float32 without its sign are in the order of its magnitude.
    bits = np.where(inexact, (bits - (np.abs(nearest) > np.abs(rows))) | 1, bits)
    return bits.astype(np.uint32).view(np.float32)


def write_rows(
    rows: np.ndarray,
    pool: PagePool,
    ids: np.ndarray,
    tables: list[Any],
    starts: np.ndarray,
    counts: np.ndarray,
    part: int,
) -> None:
    """Writes the first ``counts[b]`` rows of an item ``(B, K, T, columns)``, from its row ``starts[b]`` on.

    `ids` and `tables` are the pages ``(B, n)`` and the addresses of their parts; `part` is KEYS or VALUES.
    """
    rows = _convertible(rows, pool.shape.stored(part))
    if write_page_rows is None:
        _write_rows_by_numpy(rows, pool, ids, starts, counts, part)
    else:
        write_page_rows(rows, *target(pool, tables, part), starts, counts)


def target(pool: PagePool, tables: list[Any], part: int) -> tuple[Any, ...]:
    """What compiled code has to know of the pages that it writes rows to."""
    dtype = pool.shape.stored(part)
    storage = INT8 if dtype == np.int8 else storage_of(dtype)
    return dtype.itemsize, storage, tables[part], tables[part + 1], pool.shape.page_size


def _convertible(rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Rows of float32, float64 or the 16-bit storage as they are, others in one of the first two."""
    given = rows.dtype
    if given in (FLOAT32, FLOAT64) or (given == dtype and given != np.int8):
        return rows
    is_short = given.kind == "b" or storage_of(given) != REAL or (given.kind == "f" and given.itemsize == 4)
    return rows.astype(FLOAT32 if is_short else FLOAT64)


def _write_rows_by_numpy(
    rows: np.ndarray, pool: PagePool, ids: np.ndarray, starts: np.ndarray, counts: np.ndarray, part: int
) -> None:
    """`write_rows` of convertible rows without the extension, with the same bits."""
    size = pool.shape.page_size
    for item in np.flatnonzero(counts):
        start, count, done = int(starts[item]), int(counts[item]), 0
        while done < count:
            entry, row = divmod(start + done, size)
            n = min(size - row, count - done)
            data, scale = pool.page(int(ids[item, entry]))[part : part + 2]
            given = rows[item, :, done : done + n]
            if scale is not None:
                encode_rows(given, data[:, row : row + n], scale[:, row : row + n])
            else:
                data[:, row : row + n] = _cast(given, data.dtype)
            done += n


def read_rows(pool: PagePool, ids: np.ndarray, start: int, stop: int, part: int) -> np.ndarray:
    """The rows start .. stop - 1 of an item, decoded: a copy ``(K, stop - start, columns)``."""
    shape, stored, at = pool.shape, pool.shape.stored(part), start
    dim = shape.value_dim if part == VALUES else shape.head_dim
    dtype = FLOAT32 if stored == np.int8 else stored
    result = np.empty((shape.num_kv_heads, stop - start, dim), dtype)
    while at < stop:
        entry, row = divmod(at, shape.page_size)
        n = min(shape.page_size - row, stop - at)
        data, scale = pool.page(int(ids[entry]))[part : part + 2]
        rows = data[:, row : row + n]
        result[:, at - start : at - start + n] = (
            rows if scale is None else decode_rows(rows, scale[:, row : row + n])
        )
        at += n
    return result
