"""Masks bound to one problem size: intervals of keys per query, and mask maps.

A node is evaluated in two steps. `states` says of every tile whether it is EMPTY, FULL or may be PARTIAL,
from bounds alone. `words` computes the bits of the possibly partial tiles. The mask objects are in
`fastattn.masks`, and make nodes; nothing here knows them.

Letters: ``*lead`` the leading batch axes, ``H`` query heads, ``L`` query length, ``S`` key length.
"""

from __future__ import annotations

import sys
from functools import reduce
from typing import Any, NamedTuple, NoReturn

import numpy as np

from fastattn._machine.device import DeviceArray

TILE_Q = 64  #: query rows of a tile
TILE_K = 128  #: keys of a tile, a multiple of 32
INDEX_EMPTY = -2  #: in `MaskMap.index`: no key of the tile is allowed
INDEX_FULL = -1  #: in `MaskMap.index`: every key of the tile is allowed

WORDS = TILE_K // 32
BATCH_TILES = 512  # tiles of a batch: 4 MiB of bools, which bounds the working memory
EMPTY, PARTIAL, FULL = 0, 1, 2  # states of a tile; `&` is their minimum, `|` their maximum
#: Of a `Band`: beyond any key. Sums of twice this with a position do not overflow an index.
UNBOUNDED = 1 << (60 if sys.maxsize > 1 << 32 else 29)
LOW_BITS = np.array([(1 << n) - 1 for n in range(33)], dtype=np.uint32)  # words with the n lowest bits set


class Frozen:
    """An object whose slots are set once, by its ``__init__``.

    It is pickled as a frozen dataclass with slots is, whose import takes too long; see `Memory`.
    """

    __slots__: tuple[str, ...] = ()

    def _set(self, *values: Any) -> None:
        for name, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"cannot delete field {name!r}")

    def __getstate__(self) -> list[Any]:
        return [getattr(self, name) for name in self.__slots__]

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple):  # of a release in which its class was none of these
            state = [state[1][name] for name in self.__slots__]
        self._set(*state)


class MaskMap(Frozen):
    """The map of tiles of ``(L, S)`` planes, with bits for the partial tiles.

    The tile at ``(t, u)`` covers queries ``TILE_Q * t`` onward and keys ``TILE_K * u`` onward.
    """

    __slots__ = ("index", "bits")
    #: ``(*lead, H, ceil(L / TILE_Q), ceil(S / TILE_K))`` int32: INDEX_EMPTY, INDEX_FULL or a row of `bits`
    index: np.ndarray
    #: ``(n, TILE_Q, TILE_K // 32)`` uint32: bit t of word w is key ``32 * w + t`` of the tile, 0 past the end
    bits: np.ndarray

    def __init__(self, index: np.ndarray, bits: np.ndarray) -> None:
        self._set(index, bits)

    def rows(self, item: tuple[int, ...], start: int, stop: int, len_k: int) -> np.ndarray:
        """Bool ``(stop - start, len_k)``: the rows ``start..stop`` of the plane ``item = (*lead, head)``."""
        row = np.arange(start, stop)
        tile = self.index[item][row // TILE_Q]
        words = np.zeros((*tile.shape, WORDS), dtype="<u4")
        words[tile == INDEX_FULL] = LOW_BITS[32]
        at_row, at_tile = np.nonzero(tile >= 0)
        words[at_row, at_tile] = self.bits[tile[at_row, at_tile], row[at_row] % TILE_Q]
        bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
        return bits.reshape(len(row), -1)[:, :len_k].view(bool)


def bounded(bound: int | None, far: int = UNBOUNDED) -> int:
    """A bound of a window. All from `far` on, and None, are `far`, so that no sum overflows."""
    return far if bound is None else min(bound, far)


def make_intervals(start: Any, stop: Any, S: int) -> Intervals:
    """Per-row key intervals (int64) from numbers or arrays that broadcast to ``(*lead, L)``, within 0..S."""
    start = np.minimum(np.maximum(start, np.int64(0)), S)
    return Intervals(start, np.maximum(np.minimum(stop, S), start))


def intervals_of(mask_map: MaskMap, L: int, S: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Start and stop of each row's keys, ``(B, L)``, if they are one interval in every row of a mask map
    with index ``(B, 1, ...)``.

    None where a row has more than one interval, or where heads differ.
    """
    index = mask_map.index
    if index.shape[1] != 1:
        return None
    if 0 in (len(index), L, S):
        return np.zeros((len(index), L), dtype=np.int64), np.zeros((len(index), L), dtype=np.int64)
    grid = Grid(L, S)
    rows = (len(index), len(grid.row_starts), TILE_Q)
    start, stop, count = (np.full(rows, n, dtype=np.int64) for n in (S, 0, 0))
    full = index[:, 0] == INDEX_FULL
    first = np.where(full, grid.key_starts, S).min(axis=-1)
    last = np.where(full, grid.key_stops, 0).max(axis=-1)
    start[:], stop[:] = first[..., None], last[..., None]
    count[:] = np.where(full, grid.key_stops - grid.key_starts, 0).sum(axis=-1)[..., None]
    item, row, key = np.nonzero(index[:, 0] >= 0)
    for at in range(0, len(item), BATCH_TILES):
        here = item[at : at + BATCH_TILES], row[at : at + BATCH_TILES]
        key_start = grid.key_starts[key[at : at + BATCH_TILES], None]
        words = mask_map.bits[index[:, 0][(*here, key[at : at + BATCH_TILES])]].astype("<u4", copy=False)
        bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").view(bool)
        some, n = bits.any(axis=-1), bits.sum(axis=-1)
        low = np.where(some, bits.argmax(axis=-1), 0)
        high = np.where(some, TILE_K - bits[..., ::-1].argmax(axis=-1), 0)
        if (high - low != n).any():
            return None
        np.minimum.at(start, here, np.where(some, key_start + low, S))
        np.maximum.at(stop, here, np.where(some, key_start + high, 0))
        np.add.at(count, here, n)
    start, stop, count = (array.reshape(len(index), -1)[:, :L] for array in (start, stop, count))
    if (np.maximum(stop - start, 0) != count).any():
        return None
    return start, np.maximum(stop, start)


class Band(NamedTuple):
    """What `causal`, `window` and `key_lengths` allow: the keys ``p - left .. p + right`` of query i, both
    included, among the first ``S_b`` of its batch item, where ``p = i`` or ``i + S_b - L``."""

    left: int  #: at most `UNBOUNDED`, which is no bound
    right: int
    at_end: bool  #: the last query is aligned with the item's last key: ``p = i + S_b - L``
    lengths: np.ndarray | None  #: ``S_b`` as ``(*lead,)`` int64 view, in 0..S; None: ``S`` for every item
    keep_first: int = 0  #: so many keys from 0 on are allowed whatever `left` says; of keys in pages alone

    def n_pairs(self, L: int, S: int) -> int:
        """Pairs of a query and a key that an item with all keys allows."""
        if self.left == self.right == UNBOUNDED:
            return L * S
        interval = self._replace(lengths=None).intervals(L, S)
        return int(np.sum(interval.stop - interval.start))

    def intervals(self, L: int, S: int) -> Intervals:
        """The same as an interval of keys per query."""
        lengths: Any = S if self.lengths is None else self.lengths[..., None]
        if self.left == self.right == UNBOUNDED:
            return make_intervals(0, lengths, S)
        position = np.arange(L)
        if self.at_end:
            position = position + (lengths - L)
        return make_intervals(position - self.left, np.minimum(position + (self.right + 1), lengths), S)


class Size(NamedTuple):
    lead: tuple[int, ...]
    H: int
    L: int
    S: int


class Documents(NamedTuple):
    """Packed documents as each of their queries sees them."""

    keys: Intervals  #: of its document, those that `causal` and `window` allow
    first: np.ndarray  #: the first of all keys of its document
    queries: np.ndarray  #: its position among all keys, where the first ones of its document are aligned
    at_end: np.ndarray  #: what to add to that, where the last ones are


class Block(NamedTuple):
    """What a mask is bound to: a problem, or a block of a larger one."""

    lead: tuple[int, ...]
    H: int
    L: int
    S: int
    q_start: int = 0  #: the block's first query and key in the whole problem
    k_start: int = 0
    whole: tuple[int, int] | None = None  #: ``(L, S)`` of that problem, None where nobody said
    documents: Documents | None = None  #: of that problem, each of which is aligned by itself

    @property
    def at_end(self) -> Any:
        """What to add to the position of a query for that of a key, where the last ones are aligned."""
        if self.documents is not None:
            return self.documents.at_end
        return 0 if self.whole is None else self.whole[1] - self.whole[0]

    @property
    def queries(self) -> np.ndarray:
        """Their positions in the whole problem."""
        if self.documents is not None:
            return self.documents.queries
        return np.arange(self.q_start, self.q_start + self.L)


class Part(NamedTuple):
    """A part of a problem along all of its axes; every slice has a start and a stop."""

    lead: tuple[int, ...]  #: the leading batch axes of the problem
    items: tuple[slice, ...]  #: of each of those
    heads: slice
    queries: slice
    keys: slice
    whole: tuple[int, int] | None  #: ``(L, S)`` of the problem, None where nobody said

    def of_items(self, array: np.ndarray, more: int = 0) -> np.ndarray:
        """What an array has of the items. All its axes but `more` broadcast to the leading ones."""
        n_axes = array.ndim - more
        own = zip(array.shape, self.items[len(self.items) - n_axes :], strict=False)
        place: Any = (*(slice(None) if n == 1 else cut for n, cut in own), ...)
        return array[place]


class Grid:
    """The tiles of an ``(L, S)`` plane."""

    def __init__(self, L: int, S: int) -> None:
        self.L, self.S = L, S
        self.row_starts = np.arange(0, L, TILE_Q)
        self.key_starts = np.arange(0, S, TILE_K)
        self.key_stops = np.minimum(self.key_starts + TILE_K, S)
        self.shape = (len(self.row_starts), len(self.key_starts))


class TileBatch:
    """A batch of tiles to evaluate: tile n lies in plane ``item[:, n]`` of `outer`."""

    def __init__(self, flat: np.ndarray, outer: tuple[int, ...], grid: Grid) -> None:
        *item, tile_row, tile_key = np.unravel_index(flat, (*outer, *grid.shape))
        self.outer, self.item, self.grid = outer, item, grid
        self.tile_key = tile_key
        self.row_start, self.key_start = tile_row * TILE_Q, tile_key * TILE_K
        # Rows and keys past the end repeat the last one; `inside` clears their bits.
        self.row = np.minimum(self.row_start[:, None] + np.arange(TILE_Q), grid.L - 1)

    def inside(self) -> np.ndarray:
        """Words with the bits inside the plane set."""
        rows_left = (self.grid.L - self.row_start)[:, None]
        keys_left = np.where(np.arange(TILE_Q) < rows_left, (self.grid.S - self.key_start)[:, None], 0)
        return interval_words(np.zeros((1, 1), dtype=np.int64), keys_left)

    def per_batch(self, array: np.ndarray, position: np.ndarray) -> np.ndarray:
        """``array[item, position]`` for an array that broadcasts to ``(*lead, n)``."""
        array = np.broadcast_to(array, (*self.outer[:-1], array.shape[-1]))
        return array[(*(axis[:, None] for axis in self.item[:-1]), position)]


class Node:
    """A mask bound to one problem size."""

    #: shape that broadcasts to ``(*lead, H)``: the planes among which the mask varies
    outer: tuple[int, ...]

    def states(self, grid: Grid) -> np.ndarray:
        """``EMPTY``, ``PARTIAL`` or ``FULL`` of each tile, broadcastable to ``(*outer, *grid.shape)``."""
        raise NotImplementedError

    def words(self, batch: TileBatch) -> np.ndarray:
        """The bits of a batch of tiles, ``(n, TILE_Q, TILE_K // 32)``; bits past the end are arbitrary."""
        raise NotImplementedError

    def complement(self, S: int) -> Node:
        """The node that allows what this one does not."""
        return Not(self)


class Intervals(Node):
    """One interval of keys per row; `start` and `stop` broadcast to ``(*lead, L)``."""

    def __init__(self, start: Any, stop: Any) -> None:
        self.start, self.stop = start, stop

    @property
    def outer(self) -> tuple[int, ...]:  # type: ignore[override]
        return (*np.broadcast_shapes(self.start.shape, self.stop.shape, (1,))[:-1], 1)

    def states(self, grid: Grid) -> np.ndarray:
        start, stop = self._rows(grid.L)
        empty = start >= stop
        # The union's hull and the intersection of the intervals of the rows of each row of tiles.
        start_min = np.minimum.reduceat(np.where(empty, grid.S, start), grid.row_starts, axis=-1)[..., None]
        stop_max = np.maximum.reduceat(np.where(empty, 0, stop), grid.row_starts, axis=-1)[..., None]
        start_max = np.maximum.reduceat(start, grid.row_starts, axis=-1)[..., None]
        stop_min = np.minimum.reduceat(stop, grid.row_starts, axis=-1)[..., None]
        none = (start_min >= grid.key_stops) | (stop_max <= grid.key_starts)
        every = (start_max <= grid.key_starts) & (stop_min >= grid.key_stops)
        return states_of(none, every)[..., None, :, :]

    def words(self, batch: TileBatch) -> np.ndarray:
        start, stop = self._rows(batch.grid.L)
        key_start = batch.key_start[:, None]
        return interval_words(
            batch.per_batch(start, batch.row) - key_start, batch.per_batch(stop, batch.row) - key_start
        )

    def complement(self, S: int) -> Node:
        """Intervals if each row's keys are none or reach an end of the row, else `Not`."""
        empty, first = self.start >= self.stop, self.start == 0
        if not (empty | first | (self.stop == S)).all():
            return Not(self)
        start = np.where(first, self.stop, 0)
        return make_intervals(start, np.where(first | empty, S, self.start), S)

    def _rows(self, L: int) -> tuple[np.ndarray, np.ndarray]:
        shape = (*self.outer[:-1], L)
        return np.broadcast_to(self.start, shape), np.broadcast_to(self.stop, shape)


class SameId(Node):
    """Ids of queries ``(*lead, L)`` and of keys ``(*lead, S)``: a query may attend keys with its own id."""

    def __init__(self, q_ids: np.ndarray, k_ids: np.ndarray) -> None:
        self.q_ids, self.k_ids = q_ids, k_ids
        self.outer = (*np.broadcast_shapes(q_ids.shape[:-1], k_ids.shape[:-1]), 1)

    def states(self, grid: Grid) -> np.ndarray:
        q_min, q_max = (ids[..., :, None] for ids in bounds(self.q_ids, grid.row_starts))
        k_min, k_max = (ids[..., None, :] for ids in bounds(self.k_ids, grid.key_starts))
        none = (q_max < k_min) | (k_max < q_min)
        every = (q_min == q_max) & (k_min == k_max) & (q_min == k_min)
        return states_of(none, every)[..., None, :, :]

    def words(self, batch: TileBatch) -> np.ndarray:
        key = np.minimum(batch.key_start[:, None] + np.arange(TILE_K), batch.grid.S - 1)
        q_ids = batch.per_batch(self.q_ids, batch.row)
        k_ids = batch.per_batch(self.k_ids, key)
        return pack_words(q_ids[:, :, None] == k_ids[:, None, :])


class Cross(Node):
    """Whole rows or whole columns: bool `rows` ``(L,)``, `keys` ``(S,)``; key j is allowed if rows[i] or
    keys[j]."""

    outer = (1,)

    def __init__(self, rows: np.ndarray, keys: np.ndarray) -> None:
        self.rows, self.keys = rows, keys

    def states(self, grid: Grid) -> np.ndarray:
        rows, keys = (
            states_of(~np.logical_or.reduceat(allowed, starts), np.logical_and.reduceat(allowed, starts))
            for allowed, starts in ((self.rows, grid.row_starts), (self.keys, grid.key_starts))
        )
        return np.maximum(rows[:, None], keys)

    def words(self, batch: TileBatch) -> np.ndarray:
        n_keys = batch.grid.shape[1]
        padded = np.zeros(n_keys * TILE_K, dtype=bool)
        padded[: batch.grid.S] = self.keys
        key_words = pack_words(padded.reshape(n_keys, TILE_K))[batch.tile_key]
        return np.where(self.rows[batch.row][:, :, None], LOW_BITS[32], key_words[:, None, :])


class Axis(NamedTuple):
    """One axis of a layout of tokens in C order, and which coordinates along it are near each other."""

    size: int
    stride: int  #: tokens from one coordinate to the next
    kernel: int  #: coordinates of a window: at most ``size // dilation``
    dilation: int  #: a window has every so many of the coordinates
    causal: bool

    @property
    def is_whole(self) -> bool:
        """Whether each window has all coordinates."""
        return self.size == 1 or (self.kernel == self.size and not self.causal)

    def coordinates(self, tokens: np.ndarray) -> np.ndarray:
        return tokens // self.stride % self.size

    def window(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Start and stop of the window of each coordinate, which has every `dilation`-th from its start.

        NATTEN's rule: coordinates with the same remainder modulo `dilation` are a group, numbered from 0. A
        window has `kernel` numbers, the first of them ``kernel // 2`` before the coordinate's own, and is
        shifted inward at the ends of the group. A causal one ends with its own, and is cut off at the start.
        """
        number, group = at // self.dilation, at % self.dilation
        if self.causal:
            first = np.maximum(number - (self.kernel - 1), 0)
            return first * self.dilation + group, at + 1
        count = (self.size - 1 - group) // self.dilation + 1
        first = np.clip(number - self.kernel // 2, 0, count - self.kernel) * self.dilation + group
        return first, first + ((self.kernel - 1) * self.dilation + 1)


class Neighbors(Node):
    """Keys in the window of a query along each of some axes of the layout that both lie on."""

    outer = (1,)

    def __init__(self, axes: list[Axis], q_start: int, k_start: int) -> None:
        self.axes, self.q_start, self.k_start = axes, q_start, k_start

    def states(self, grid: Grid) -> np.ndarray:
        """From the least and greatest coordinates of the tokens of a tile, along each axis."""
        queries = np.arange(self.q_start, self.q_start + grid.L)
        keys = np.arange(self.k_start, self.k_start + grid.S)
        none, every = np.zeros(grid.shape, dtype=bool), np.ones(grid.shape, dtype=bool)
        for axis in self.axes:
            at = axis.coordinates(queries)
            (q_min, q_max), (start_min, start_max), (stop_min, stop_max) = (
                (least[:, None], most[:, None])
                for least, most in (bounds(x, grid.row_starts) for x in (at, *axis.window(at)))
            )
            k_min, k_max = bounds(axis.coordinates(keys), grid.key_starts)
            none |= (start_min > k_max) | (stop_max <= k_min)
            every &= (start_max <= k_min) & (stop_min > k_max)
            if axis.dilation > 1:
                # A multiple of the dilation has to be among the distances of the keys, and be the only one.
                none |= (k_max - q_min) // axis.dilation * axis.dilation < k_min - q_max
                every &= (k_max - q_min == k_min - q_max) & ((k_min - q_max) % axis.dilation == 0)
        return states_of(none, every)

    def words(self, batch: TileBatch) -> np.ndarray:
        queries = self.q_start + batch.row
        keys = self.k_start + batch.key_start[:, None] + np.arange(TILE_K)
        allowed = np.ones((*queries.shape, TILE_K), dtype=bool)
        for axis in self.axes:
            unsigned = np.min_scalar_type(axis.size)  # a key before the start wraps around, past the stop
            start, stop = axis.window(axis.coordinates(queries))
            first, length = (x.astype(unsigned)[:, :, None] for x in (start, stop - start))
            key = axis.coordinates(keys)
            allowed &= key.astype(unsigned)[:, None, :] - first < length
            if axis.dilation > 1:
                group, key_group = (x % axis.dilation for x in (start, key))
                allowed &= group.astype(unsigned)[:, :, None] == key_group.astype(unsigned)[:, None, :]
        return pack_words(allowed)


class DenseArray(Node):
    """An array ``(*lead, H, L, S)``, stride 0 where it is broadcast."""

    def __init__(self, array: Any) -> None:
        self.array = array
        planes = zip(array.shape[:-2], array.strides[:-2], strict=True)
        self.outer = tuple(n if stride else min(n, 1) for n, stride in planes)

    def states(self, grid: Grid) -> np.ndarray:
        if isinstance(self.array, DeviceArray):
            raise ValueError(
                f"a mask array on {self.array.device} stays there: it combines by & with masks that are not "
                f"arrays, not by | or ~"
            )
        return np.full(grid.shape, PARTIAL, dtype=np.int8)

    def words(self, batch: TileBatch) -> np.ndarray:
        allowed = np.zeros((len(batch.tile_key), TILE_Q, TILE_K), dtype=bool)
        # Slices, one tile at a time: fancy indexing over the whole batch takes ten times as long.
        for n, (*item, row, key) in enumerate(
            zip(*batch.item, batch.row_start, batch.key_start, strict=True)
        ):
            tile = self.array[(*item, slice(row, row + TILE_Q), slice(key, key + TILE_K))]
            allowed[n, : tile.shape[0], : tile.shape[1]] = tile
        return pack_words(allowed)


class Mapped(Node):
    """An existing mask map, its index ``(*outer, ...)``."""

    def __init__(self, mask_map: MaskMap) -> None:
        self.mask_map = mask_map
        self.outer = mask_map.index.shape[:-2]

    def states(self, grid: Grid) -> np.ndarray:
        index = self.mask_map.index
        return states_of(index == INDEX_EMPTY, index == INDEX_FULL)

    def words(self, batch: TileBatch) -> np.ndarray:
        grid = batch.grid
        index = np.broadcast_to(self.mask_map.index, (*batch.outer, *grid.shape))
        tile = index[(*batch.item, batch.row_start // TILE_Q, batch.tile_key)]
        words = np.zeros((len(tile), TILE_Q, WORDS), dtype=np.uint32)
        words[tile == INDEX_FULL] = LOW_BITS[32]
        words[tile >= 0] = self.mask_map.bits[tile[tile >= 0]]
        return words


class MappedPart(Node):
    """A block of an existing mask map, whose first query and key are at any position of it."""

    def __init__(self, mask_map: MaskMap, q_start: int, k_start: int) -> None:
        self.mask_map, self.q_start, self.k_start = mask_map, q_start, k_start
        self.outer = mask_map.index.shape[:-2]

    def states(self, grid: Grid) -> np.ndarray:
        """A tile of the block overlaps up to four tiles of the map. It has their state where they agree."""
        index = self.mask_map.index
        there = states_of(index == INDEX_EMPTY, index == INDEX_FULL)
        rows = (self.q_start + grid.row_starts) // TILE_Q
        last_rows = (self.q_start + np.minimum(grid.row_starts + TILE_Q, grid.L) - 1) // TILE_Q
        keys = (self.k_start + grid.key_starts) // TILE_K
        last_keys = (self.k_start + grid.key_stops - 1) // TILE_K
        corners = [there[..., r[:, None], k] for r in (rows, last_rows) for k in (keys, last_keys)]
        none = np.logical_and.reduce([corner == EMPTY for corner in corners])
        every = np.logical_and.reduce([corner == FULL for corner in corners])
        return states_of(none, every)

    def words(self, batch: TileBatch) -> np.ndarray:
        n_keys = self.mask_map.index.shape[-1]
        index = np.broadcast_to(self.mask_map.index, (*batch.outer, *self.mask_map.index.shape[-2:]))
        item = tuple(axis[:, None] for axis in batch.item)
        row = self.q_start + batch.row
        first = (self.k_start + batch.key_start[:, None]) // TILE_K
        words = np.zeros((len(first), TILE_Q, 2 * WORDS + 1), dtype=np.uint32)
        for side in (0, 1):  # the tiles on both sides of the first key that is a multiple of TILE_K
            tile = index[(*item, row // TILE_Q, np.minimum(first + side, n_keys - 1))]
            half = words[..., side * WORDS : (side + 1) * WORDS]
            half[tile == INDEX_FULL] = LOW_BITS[32]
            half[tile >= 0] = self.mask_map.bits[tile[tile >= 0], row[tile >= 0] % TILE_Q]
        word, bit = divmod(self.k_start % TILE_K, 32)
        low = words[..., word : word + WORDS] >> np.uint32(bit)
        high = words[..., word + 1 : word + 1 + WORDS].astype(np.uint64) << np.uint64(32 - bit)
        return low | high.astype(np.uint32)


class Several(Node):
    """Nodes combined, tile by tile and bit by bit."""

    of_states: np.ufunc
    of_words: np.ufunc

    def __init__(self, parts: list[Node]) -> None:
        self.parts = parts
        self.outer = np.broadcast_shapes(*(part.outer for part in parts))

    def states(self, grid: Grid) -> np.ndarray:
        return reduce(self.of_states, (part.states(grid) for part in self.parts))

    def words(self, batch: TileBatch) -> np.ndarray:
        return reduce(self.of_words, (part.words(batch) for part in self.parts))


class All(Several):
    """The intersection of nodes."""

    of_states, of_words = np.minimum, np.bitwise_and


class AnyOf(Several):
    """The union of nodes."""

    of_states, of_words = np.maximum, np.bitwise_or

    def complement(self, S: int) -> Node:
        """By De Morgan, so that nodes which are intervals stay intervals, whose tiles need no bits."""
        return all_of([part.complement(S) for part in self.parts], S)


class Not(Node):
    """The complement of a node."""

    def __init__(self, part: Node) -> None:
        self.part = part
        self.outer = part.outer

    def states(self, grid: Grid) -> np.ndarray:
        return np.int8(FULL) - self.part.states(grid)

    def words(self, batch: TileBatch) -> np.ndarray:
        return ~self.part.words(batch)

    def complement(self, S: int) -> Node:
        return self.part


def all_of(nodes: list[Node], S: int) -> Node:
    """The intersection of nodes, flattened, with all intervals merged into one node."""
    parts = [part for node in nodes for part in (node.parts if isinstance(node, All) else [node])]
    intervals = [part for part in parts if isinstance(part, Intervals)]
    others = [part for part in parts if not isinstance(part, Intervals)]
    merged = [intersect(intervals, S)] if intervals else []
    return All([*merged, *others]) if others else merged[0]


def build_mask_map(node: Node, outer: tuple[int, ...], L: int, S: int, reach: Intervals | None) -> MaskMap:
    """The mask map of `node`; tiles that are empty in `reach` in all planes get no bits."""
    grid = Grid(L, S)
    planes = (1,) * (len(outer) - len(node.outer)) + tuple(node.outer)
    states = np.broadcast_to(node.states(grid), (*planes, *grid.shape))
    if reach is not None:
        reached = reach.states(grid) != EMPTY
        reached = reached.reshape((1,) * (states.ndim - reached.ndim) + reached.shape)
        shared = tuple(axis for axis, n in enumerate(planes) if n == 1)
        states = np.where(reached.any(axis=shared, keepdims=True), states, EMPTY)

    index = np.full(states.shape, INDEX_EMPTY, dtype=np.int32)
    index[states == FULL] = INDEX_FULL
    flat_index = index.reshape(-1)
    partial = np.flatnonzero(states == PARTIAL)
    bits = np.empty((len(partial), TILE_Q, WORDS), dtype=np.uint32)  # pages never written take no memory
    count = 0
    for first in range(0, len(partial), BATCH_TILES):
        flat = partial[first : first + BATCH_TILES]
        batch = TileBatch(flat, planes, grid)
        inside = batch.inside()
        words = node.words(batch) & inside
        empty = ~words.any(axis=(1, 2))
        full = (words == inside).all(axis=(1, 2))
        mixed = np.flatnonzero(~(empty | full))
        flat_index[flat[full]] = INDEX_FULL
        flat_index[flat[mixed]] = np.arange(count, count + len(mixed))
        bits[count : count + len(mixed)] = words[mixed]
        count += len(mixed)
    return MaskMap(np.broadcast_to(index, (*outer, *grid.shape)), bits[:count])


def interval_state(start: np.ndarray, stop: np.ndarray, first: int, last: int) -> int:
    """The state of the keys ``first .. last - 1`` of all rows under one interval of keys per row."""
    if not (np.maximum(start, first) < np.minimum(stop, last)).any():
        return EMPTY
    return FULL if ((start <= first) & (stop >= last)).all() else PARTIAL


def plane_state(node: Node, L: int, S: int) -> int:
    """The state of whole planes. Bits are computed until one is set, so that EMPTY is exact."""
    if isinstance(node, Intervals):
        return interval_state(node.start, node.stop, 0, S)
    grid = Grid(L, S)
    states = np.broadcast_to(node.states(grid), (*node.outer, *grid.shape))
    if (states == states.flat[0]).all() and states.flat[0] != PARTIAL:
        return int(states.flat[0])
    if (states == FULL).any():
        return PARTIAL
    partial, first, n_tiles = np.flatnonzero(states == PARTIAL), 0, 1
    while first < len(partial):
        batch = TileBatch(partial[first : first + n_tiles], node.outer, grid)
        if (node.words(batch) & batch.inside()).any():
            return PARTIAL
        first, n_tiles = first + n_tiles, BATCH_TILES
    return EMPTY


def intersect(intervals: list[Intervals], S: int) -> Intervals:
    start, stop = intervals[0].start, intervals[0].stop
    for other in intervals[1:]:
        start, stop = np.maximum(start, other.start), np.minimum(stop, other.stop)
    return make_intervals(start, stop, S)


def segment_runs(q_ids: np.ndarray, k_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Each query's keys as one interval, or None when some query's keys are not consecutive."""
    lead = np.broadcast_shapes(q_ids.shape[:-1], k_ids.shape[:-1])
    start = np.zeros((*lead, q_ids.shape[-1]), dtype=np.int64)
    stop = np.zeros_like(start)
    q_ids = np.broadcast_to(q_ids, start.shape)
    k_ids = np.broadcast_to(k_ids, (*lead, k_ids.shape[-1]))
    for item in np.ndindex(lead):
        keys, queries = k_ids[item], q_ids[item]
        order = np.argsort(keys, kind="stable")
        first = np.searchsorted(keys, queries, "left", sorter=order)
        count = np.searchsorted(keys, queries, "right", sorter=order) - first
        has = count > 0
        start[item][has] = order[first[has]]
        stop[item][has] = order[first[has] + count[has] - 1] + 1
        if not np.array_equal(stop[item] - start[item], count):
            return None
    return start, stop


def interval_words(start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Words ``(..., TILE_K // 32)`` with the bits ``start <= t < stop`` of a tile row set."""
    word = np.arange(0, TILE_K, 32)
    low = LOW_BITS[np.clip(start[..., None] - word, 0, 32)]
    return LOW_BITS[np.clip(stop[..., None] - word, 0, 32)] & ~low


def pack_words(allowed: np.ndarray) -> np.ndarray:
    """Bools ``(..., TILE_K)`` as words ``(..., TILE_K // 32)``."""
    return np.packbits(allowed, axis=-1, bitorder="little").view("<u4").astype(np.uint32, copy=False)


def bounds(numbers: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The least and the greatest number from each of `starts` to the next, along the last axis."""
    return np.minimum.reduceat(numbers, starts, axis=-1), np.maximum.reduceat(numbers, starts, axis=-1)


def states_of(none: np.ndarray, every: np.ndarray) -> np.ndarray:
    return every.astype(np.int8) - none.astype(np.int8) + np.int8(PARTIAL)
