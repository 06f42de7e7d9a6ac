"""Rows of past tokens in pages: appended, taken back, shared. `KVCache` is this with checks and attention."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._api.prepared import token_of
from fastattn._cache.pages import (
    IS_COMPILED,
    KEY_SCALES,
    KEYS,
    NO_PAGE,
    VALUE_SCALES,
    VALUES,
    PagePool,
    target,
    write_page_rows,
    write_rows,
)
from fastattn._cache.state import Settings, State, rounded_length
from fastattn._call.problem import FLOAT32, FLOAT64, parts_of_rows
from fastattn._call.storage import Rows

if TYPE_CHECKING:
    from typing import Self


class Undo(NamedTuple):
    """What an append changed."""

    state: State  #: as it was
    last: np.ndarray | None
    replaced: list[tuple[int, int, int]]  #: item, entry of its table, and the page that was there


class PageStore:
    """Keys and values of some items, each of its own length, as rows of pages that stores may share."""

    _pool: PagePool
    _settings: Settings
    _state: State
    _ids: np.ndarray  # (batch, n) int64: the page of each page_size tokens, NO_PAGE where there is none
    _tables: list[Any]  # of each part, the addresses of those pages
    _freed: np.ndarray  # (batch,) int64: the first entry that the window has not freed
    _last: np.ndarray | None  # where an append began that `retained` does not count yet
    _room: int  # so many tokens can be appended to each item in place: in pages that it has to itself
    _longest: int  # tokens of the longest item
    _capacity: int  # that length rounded up
    _keep_first: int  # 0 where there is no window
    # What is looked up at each step:
    _sizes: tuple[int, int, int, int]
    _direct: tuple[tuple[np.dtype, ...], ...]  # of what dtypes keys and values are stored without a copy
    _counts: tuple[int, np.ndarray]  # a number of tokens, and that for each item
    _targets: tuple[Any, ...]  # where keys and values are written
    _kind: int  # a number for what has these settings
    _token: int  # and this capacity: of the signature of calls on all keys and values of it
    _rows: tuple[Any, ...]  # the tables as those calls read them, see `parts_of_rows`

    def _begin(self, settings: Settings, state: State, pool: PagePool, ids: np.ndarray) -> None:
        self._settings, self._state, self._pool = settings, state, pool
        self._freed = np.full(settings.batch, -(-settings.keep_first // settings.page_size))
        stored = (settings.key_dtype, settings.value_dtype)
        self._direct = tuple((FLOAT32, FLOAT64, FLOAT32 if dtype == np.int8 else dtype) for dtype in stored)
        self._last, self._counts = None, (0, ids)
        self._sizes = settings.batch, settings.num_kv_heads, settings.head_dim, settings.value_dim
        self._keep_first = 0 if settings.window is None else settings.keep_first
        self._set_tables(ids)
        self._capacity, self._kind = 0, token_of(settings)
        self._fit(int(state.lengths.max(initial=0)))
        self._room = self._find_room()

    def __del__(self) -> None:
        if hasattr(self, "_ids"):
            self._pool.release_later(self._ids)

    def _append_in_place(self, key: Any, value: Any) -> bool:
        """`append` in the usual case: as many tokens for each item, whose last page has room for them.

        False in other cases, and where something is wrong, for the checks to find out.
        """
        if not (type(key) is type(value) is np.ndarray and key.ndim == value.ndim == 4):
            return False
        if self._settings.layout == "bshd":
            key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
        T = key.shape[2]
        batch, heads, head_dim, value_dim = self._sizes
        if (
            not 0 < T <= self._room
            or key.shape != (batch, heads, T, head_dim)
            or value.shape != (batch, heads, T, value_dim)
            or key.dtype not in self._direct[0]
            or value.dtype not in self._direct[1]
        ):
            return False
        longest = self._longest + T
        if longest > self._capacity:
            self._fit(longest)
        starts, greatest, retained = self._state
        if self._counts[0] != T:
            self._counts = T, np.full(batch, T, dtype=np.int64)
        counts = self._counts[1]
        write_page_rows(key, *self._targets[0], starts, counts)
        write_page_rows(value, *self._targets[1], starts, counts)
        lengths = starts + counts
        greatest = lengths if greatest is starts else np.maximum(greatest, lengths)
        self._state, self._last = State(lengths, greatest, retained), starts
        self._room -= T
        self._longest = longest
        return True

    def _add(self, keys: np.ndarray, values: np.ndarray, counts: np.ndarray) -> Undo:
        """Appends so many of the rows ``(batch, K, T, D or E)`` of each item, and gives up nothing yet."""
        starts, greatest, retained = self._settle()
        undo = Undo(self._state, None, [])
        try:
            lengths = starts + counts
            greatest = lengths if greatest is starts else np.maximum(greatest, lengths)
            passed = self._passed(starts, greatest, retained)
            self._state = State(lengths, greatest, np.where(counts > 0, passed, retained))
            self._fit(int(lengths.max(initial=0)))
            self._make_room(starts, counts, undo)
            pages = (self._pool, self._ids, self._tables, starts, counts)
            write_rows(keys, *pages, KEYS)
            write_rows(values, *pages, VALUES)
        except BaseException:
            self._take_back(undo)
            raise
        return undo

    def _passed(self, starts: np.ndarray, greatest: np.ndarray, retained: np.ndarray) -> np.ndarray:
        """The first position that is needed after an append from `starts` on."""
        settings = self._settings
        if settings.window is None:
            return retained
        needed = np.minimum(starts, greatest - settings.rollback) - settings.window
        return np.where(needed > settings.keep_first, np.maximum(retained, needed), retained)

    def _settle(self) -> State:
        """The state, in which all appends count for `retained`: those in place do when it is asked for."""
        last = self._last  # read once: of threads that attend, another may settle at the same time
        if last is not None:
            _, greatest, retained = state = self._state
            self._state = state._replace(retained=self._passed(last, greatest, retained))
            self._last = None
        return self._state

    def _take_back(self, undo: Undo) -> None:
        """Makes the cache what it was before `_extend`, but for rows past its lengths."""
        self._state, self._last = undo.state, undo.last
        self._room = 0
        if undo.replaced:
            items, entries, pages = np.array(undo.replaced).T
            taken = self._ids[items, entries]
            self._put_pages(items, entries, pages)
            self._pool.release(taken)
        self._fit(int(undo.state.lengths.max(initial=0)))

    def _keep(self, undo: Undo) -> None:
        """Gives up what an append has put out of use."""
        if undo.replaced:
            self._pool.release(np.array([page for _, _, page in undo.replaced]))
        if self._settings.window is not None:
            self._free_passed()
        self._room = self._find_room()

    def _cut_off(self, lengths: np.ndarray) -> None:
        """Takes tokens back from the end of each item."""
        self._state = self._state._replace(lengths=lengths)
        ends = -(-lengths // self._settings.page_size)
        is_unused = np.arange(self._ids.shape[1]) >= ends[:, None]
        unused = self._ids[is_unused]
        self._ids[is_unused] = NO_PAGE
        self._fit(int(lengths.max(initial=0)))
        self._pool.release(unused)
        self._room = self._find_room()

    def _find_room(self) -> int:
        """How many tokens each item can be given before a page is needed, or passed."""
        size, window = self._settings.page_size, self._settings.window
        lengths, greatest, _ = self._state
        if not lengths.size or not IS_COMPILED or self._longest // size == self._ids.shape[1]:
            return 0
        entries = lengths // size
        if not self._pool.are_own(self._ids[np.arange(len(lengths)), entries]):
            return 0
        room = int((size - lengths % size).min())
        if window is not None:
            next_page = (self._freed + 1) * size + window
            passing = np.maximum(next_page - lengths, next_page + self._settings.rollback - greatest)
            room = min(room, int(passing.min()) - 1)
        return max(0, room)

    def _make_room(self, starts: np.ndarray, counts: np.ndarray, undo: Undo) -> None:
        """Gives each item pages of its own for new rows."""
        size = self._settings.page_size
        wanted = []
        for item in np.flatnonzero(counts).tolist():
            start, stop = int(starts[item]), int(starts[item] + counts[item])
            for entry in range(start // size, -(-stop // size)):
                page = int(self._ids[item, entry])
                if not self._pool.are_own(page):
                    wanted.append((item, entry, page))
        if not wanted:
            return
        taken = self._pool.take(len(wanted))
        items, entries, _ = np.array(wanted).T
        self._put_pages(items, entries, np.array(taken))
        undo.replaced.extend(wanted)
        for (item, entry, page), copy in zip(wanted, taken, strict=True):
            rows = int(starts[item]) - size * entry
            if page != NO_PAGE and rows > 0:
                for old, new in zip(self._pool.page(page), self._pool.page(copy), strict=True):
                    if old is not None and new is not None:
                        new[:, :rows] = old[:, :rows]

    def _free_passed(self) -> None:
        """Frees pages that the window has passed, but for those of the first rows that are kept."""
        stops = self._state.retained // self._settings.page_size
        passed = np.flatnonzero(stops > self._freed)
        if not passed.size:
            return
        self._pool.need_zeros()
        for item in passed:
            entries = np.arange(self._freed[item], stops[item])
            pages = self._ids[item, entries]
            self._put_pages(item, entries, NO_PAGE)
            self._freed[item] = stops[item]
            self._pool.release(pages)

    def _fit(self, longest: int) -> None:
        """Makes the tables as wide as the longest item needs: their width depends on nothing else."""
        capacity = rounded_length(max(1, longest))
        if capacity != self._capacity:
            width = -(-capacity // self._settings.page_size)
            if width != self._ids.shape[1]:
                ids = np.zeros((self._settings.batch, width), np.int64)
                both = min(width, self._ids.shape[1])
                ids[:, :both] = self._ids[:, :both]
                self._set_tables(ids)
            self._capacity, self._token = capacity, token_of((self._kind, capacity))
        self._longest = longest

    def _set_tables(self, ids: np.ndarray) -> None:
        addresses = self._pool.addresses
        parts = zip(self._pool.shape.parts, addresses, strict=True)
        self._tables = [None if part is None else of_part[ids] for part, of_part in parts]
        self._ids, tables = ids, self._tables
        self._rows = parts_of_rows(*((None, *tables[part : part + 2]) for part in (KEYS, VALUES)))
        self._targets = tuple(target(self._pool, self._tables, part) for part in (KEYS, VALUES))

    def _put_pages(self, items: Any, entries: np.ndarray, pages: Any) -> None:
        self._ids[items, entries] = pages
        for table, addresses in zip(self._tables, self._pool.addresses, strict=True):
            if table is not None:
                table[items, entries] = addresses[pages]

    def _view(self, length: int) -> tuple[Rows, Rows]:
        """Keys and values, of which items have this length at most.

        `_capacity` is one that many calls have in common. Compiled code reads the tokens alone.
        """
        pages, tables = self._pool.shape.like, self._tables
        key, value = (
            Rows(
                pages[data],
                pages[scale],
                table=tables[data],
                scale_table=tables[scale],
                length=length,
                owner=self._pool,
            )
            for data, scale in ((KEYS, KEY_SCALES), (VALUES, VALUE_SCALES))
        )
        return key, value

    def _of_items(self, items: np.ndarray) -> Self:
        cache = object.__new__(type(self))
        state = State(*(array[items] for array in self._settle()))
        ids = self._ids[items]
        self._pool.hold(ids[ids != NO_PAGE])
        self._room = 0  # its last pages are shared now
        cache._begin(replace(self._settings, batch=len(items)), state, self._pool, ids)
        cache._freed = self._freed[items]
        return cache
