"""Mask objects: which key each query may attend to.

Small frozen objects that say what they mean, combine with ``&`` and ``|``, and know no backend.
`lower` turns one into the two forms that kernels understand:

- **intervals**: one ``[key_start, key_stop)`` per query row. Causal, window, lengths, contiguous
  documents, prefixes and every ``&`` of them need nothing else.
- **tiles**: a map of EMPTY, FULL and PARTIAL tiles of the ``(L, S)`` plane, with bits for the PARTIAL
  ones. Time and memory grow with the PARTIAL tiles, not with ``L * S``.

A lone array (`Dense`) stays what it is, a strided view that the kernels stream.

Letters: ``*lead`` the leading batch axes, ``H`` query heads, ``L`` query length, ``S`` key length;
``i`` a query row, ``j`` a key.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["Causal", "Dense", "GlobalTokens", "KeyLengths", "Mask", "PrefixLM", "Segments", "Window"]

TILE_Q = 64  #: query rows of a tile
TILE_K = 128  #: keys of a tile, a multiple of 32
EMPTY = -2  #: in `Tiles.index`: no key of the tile is allowed
FULL = -1  #: in `Tiles.index`: every key of the tile is allowed

_WORDS = TILE_K // 32
_CHUNK_TILES = 512  # tiles evaluated at once: 4 MiB of bools, which bounds the working memory
_NONE, _SOME, _EVERY = 0, 1, 2  # what a tile allows; `&` is their minimum, `|` their maximum
_LOW_BITS = np.array([(1 << n) - 1 for n in range(33)], dtype=np.uint32)  # word with the n lowest bits set


class Mask:
    """What all masks share: ``&``, ``|`` and `materialize`."""

    __slots__ = ()
    __array_ufunc__ = None  # so that `array & mask` is a TypeError, not an object array

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        return _And((*_parts(self, _And), *_parts(other, _And)))

    def __or__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        return _Or((*_parts(self, _Or), *_parts(other, _Or)))

    def __repr__(self) -> str:
        given = ((field, getattr(self, field.name)) for field in fields(self))  # type: ignore[arg-type]
        shown = (f"{field.name}={_show(value)}" for field, value in given if value is not field.default)
        return f"{type(self).__name__}({', '.join(shown)})"

    def materialize(self, H: int, L: int, S: int) -> np.ndarray:
        """The mask as an array, for tests and teaching.

        Parameters
        ----------
        H, L, S : int
            Query heads, query length and key length.

        Returns
        -------
        ndarray of bool, shape (..., H, L, S)
            True where query ``i`` may attend to key ``j``. The leading axes are those of the mask's own
            per-item parts (lengths, offsets, ids, a dense array); most often there are none.

        Examples
        --------
        >>> import fastattn
        >>> fastattn.masks.Causal().materialize(1, 3, 3).astype(int)
        array([[[1, 0, 0],
                [1, 1, 0],
                [1, 1, 1]]])
        """
        lead = self._lead
        lowered = lower(self, lead, H, L, S)
        allowed = np.ones((*lead, H, L, S), dtype=bool)
        if lowered.key_start is not None and lowered.key_stop is not None:
            key = np.arange(S)
            inside = (lowered.key_start[..., None] <= key) & (key < lowered.key_stop[..., None])
            allowed &= inside[..., None, :, :]
        if lowered.dense is not None:
            allowed &= lowered.dense != 0
        if lowered.tiles is not None:
            for item in np.ndindex(*lead, H):
                allowed[item] &= lowered.tiles.rows(item, 0, L, S)
        return allowed

    @property
    def _lead(self) -> tuple[int, ...]:
        """Shape of the leading batch axes along which the mask itself varies."""
        return ()

    def _bind(self, size: _Size) -> _Node:
        """The mask for one problem size; raises ValueError where it does not fit."""
        raise NotImplementedError


# The masks -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Causal(Mask):
    """Key ``j`` is allowed for query ``i`` when ``j <= i + offset``.

    Parameters
    ----------
    align : {"top_left", "bottom_right"}, optional
        ``"top_left"`` is offset 0, ``"bottom_right"`` is offset ``S - L``. With neither `align` nor
        `offset` the offset is 0 and `L` must equal `S`.
    offset : int or array_like of int, optional
        The offset itself, one number or one per batch item (broadcast to the leading batch axes).

    Notes
    -----
    ``L = 3`` queries and ``S = 5`` keys::

        top_left      bottom_right
        x . . . .     x x x . .
        x x . . .     x x x x .
        x x x . .     x x x x x
    """

    align: str | None = None
    offset: Any = None

    def __post_init__(self) -> None:
        if self.align is not None:
            _check_align(self.align)
        if self.offset is not None:
            if self.align is not None:
                raise ValueError(
                    f"Causal takes align or offset, not both; "
                    f"got align={self.align!r}, offset={self.offset!r}"
                )
            object.__setattr__(self, "offset", integers(self.offset, "Causal: offset"))

    @property
    def _lead(self) -> tuple[int, ...]:
        return () if self.offset is None else self.offset.shape

    def _bind(self, size: _Size) -> _Node:
        if self.offset is not None:
            _check_fit(self, self.offset.shape, size.lead)
            # Clipped so that no sum overflows: beyond these bounds nothing changes any more.
            offset = np.clip(self.offset, -size.L, size.S)[..., None]
        elif self.align == "bottom_right":
            offset = size.S - size.L
        else:
            offset = 0
            if self.align is None and size.L != size.S:
                raise ValueError(
                    f"mask {self!r} needs L == S, got L={size.L} and S={size.S}; say "
                    f'Causal(align="top_left") or Causal(align="bottom_right")'
                )
        return make_intervals(0, np.arange(1, size.L + 1) + offset, size.S)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Window(Mask):
    """Key ``j`` is allowed for query ``i`` when ``p - left <= j <= p + right``.

    Parameters
    ----------
    left, right : int or None
        How many keys to each side of ``p``, both ends included; None is unbounded.
    align : {"bottom_right", "top_left"}, default "bottom_right"
        ``p = i + S - L``, or ``p = i``.
    """

    left: int | None
    right: int | None
    align: str = "bottom_right"

    def __post_init__(self) -> None:
        object.__setattr__(self, "left", window_bound(self.left, "Window: left"))
        object.__setattr__(self, "right", window_bound(self.right, "Window: right"))
        _check_align(self.align)

    def _bind(self, size: _Size) -> _Node:
        position = np.arange(size.L) + (0 if self.align == "top_left" else size.S - size.L)
        return make_intervals(*window_interval(position, self.left, self.right, size.L + size.S), size.S)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class KeyLengths(Mask):
    """Key ``j`` is allowed when ``j < length`` of the batch item.

    Parameters
    ----------
    lengths : int or array_like of int
        In ``0..S``, broadcast to the leading batch axes.
    """

    lengths: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", integers(self.lengths, "KeyLengths: lengths", minimum=0))

    @property
    def _lead(self) -> tuple[int, ...]:
        return self.lengths.shape

    def _bind(self, size: _Size) -> _Node:
        _check_fit(self, self.lengths.shape, size.lead)
        if self.lengths.size and self.lengths.max() > size.S:
            raise ValueError(f"mask {self!r}: lengths must be in 0..S={size.S}, got {self.lengths.max()}")
        return make_intervals(0, self.lengths[..., None], size.S)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Segments(Mask):
    """Key ``j`` is allowed for query ``i`` when ``q_ids[i] == k_ids[j]``.

    Parameters
    ----------
    q_ids : array_like of int, shape (..., L)
        The segment of each query: any integers in any order, shared or per batch item (leading axes
        broadcast to the leading batch axes).
    k_ids : array_like of int, shape (..., S), optional
        The segment of each key; `q_ids` when not given, and then `L` must equal `S`.

    Notes
    -----
    Where the keys of each id lie next to each other (packed documents), this costs nothing: it lowers to
    intervals. Scattered ids lower to tiles.
    """

    q_ids: Any
    k_ids: Any = None

    def __post_init__(self) -> None:
        for name in ("q_ids", "k_ids"):
            ids = getattr(self, name)
            if ids is not None:
                ids = integers(ids, f"Segments: {name}")
                if ids.ndim == 0:
                    raise ValueError(f"Segments: {name} must have shape (..., length), got a single number")
                object.__setattr__(self, name, ids)
        _ = self._lead  # raises where the two do not broadcast

    @property
    def _lead(self) -> tuple[int, ...]:
        if self.k_ids is None:
            return self.q_ids.shape[:-1]
        try:
            return np.broadcast_shapes(self.q_ids.shape[:-1], self.k_ids.shape[:-1])
        except ValueError:
            raise ValueError(
                f"Segments: the leading axes of q_ids {self.q_ids.shape} and k_ids {self.k_ids.shape} "
                f"do not broadcast"
            ) from None

    def _bind(self, size: _Size) -> _Node:
        q_ids, k_ids = self.q_ids, self.q_ids if self.k_ids is None else self.k_ids
        _check_fit(self, self._lead, size.lead)
        if q_ids.shape[-1] != size.L or k_ids.shape[-1] != size.S:
            raise ValueError(
                f"mask {self!r} is for L={q_ids.shape[-1]} and S={k_ids.shape[-1]}, "
                f"got L={size.L} and S={size.S}"
            )
        runs = _segment_runs(q_ids, k_ids)
        return _SameId(q_ids, k_ids) if runs is None else make_intervals(*runs, size.S)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PrefixLM(Mask):
    """Key ``j`` is allowed for query ``i`` when ``j < prefix`` or ``j <= i + S - L``.

    Parameters
    ----------
    prefix_lengths : int or array_like of int
        Not negative, broadcast to the leading batch axes. A prefix longer than `S` is all of `S`.
    """

    prefix_lengths: Any

    def __post_init__(self) -> None:
        lengths = integers(self.prefix_lengths, "PrefixLM: prefix_lengths", minimum=0)
        object.__setattr__(self, "prefix_lengths", lengths)

    @property
    def _lead(self) -> tuple[int, ...]:
        return self.prefix_lengths.shape

    def _bind(self, size: _Size) -> _Node:
        _check_fit(self, self.prefix_lengths.shape, size.lead)
        causal_stop = np.arange(1, size.L + 1) + (size.S - size.L)
        return make_intervals(0, np.maximum(self.prefix_lengths[..., None], causal_stop), size.S)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GlobalTokens(Mask):
    """Key ``j`` is allowed for query ``i`` when ``j`` or ``i + S - L`` is one of the global tokens.

    Parameters
    ----------
    index : array_like of int, shape (n,)
        Positions of the global tokens among the keys, not negative. One that is not below `S` is a token
        that is not there yet: it allows nothing.

    Examples
    --------
    Longformer: a sliding window, and one token that sees and is seen by all.

    >>> from fastattn.masks import GlobalTokens, Window
    >>> Window(1, 1) | GlobalTokens([0])
    Window(left=1, right=1) | GlobalTokens(index=[0])
    """

    index: Any

    def __post_init__(self) -> None:
        index = integers(self.index, "GlobalTokens: index", minimum=0)
        if index.ndim != 1:
            raise ValueError(f"GlobalTokens: index must have shape (n,), got {index.shape}")
        object.__setattr__(self, "index", index)

    def _bind(self, size: _Size) -> _Node:
        index = self.index[self.index < size.S]
        keys = np.zeros(size.S, dtype=bool)
        keys[index] = True
        row = index - (size.S - size.L)
        rows = np.zeros(size.L, dtype=bool)
        rows[row[row >= 0]] = True
        return _Cross(rows, keys)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Dense(Mask):
    """Key ``j`` is allowed for query ``i`` where the array is not zero.

    Parameters
    ----------
    array : array_like of bool or integer
        Broadcast to ``(..., H, L, S)`` by NumPy's rules. An ndarray is not copied, so what is written into
        it later is seen.
    """

    array: Any

    def __post_init__(self) -> None:
        array = np.asarray(self.array)
        if array.dtype.kind not in "biu":
            hint = "; for numbers added to the scores use bias=, else .astype(bool)"
            raise TypeError(
                f"mask must be a fastattn.masks object or a bool or integer array, got dtype {array.dtype}"
                f"{hint if array.dtype.kind == 'f' else ''}"
            )
        object.__setattr__(self, "array", array)

    @property
    def _lead(self) -> tuple[int, ...]:
        return self.array.shape[:-3]

    def _bind(self, size: _Size) -> _Node:
        shape = (*size.lead, size.H, size.L, size.S)
        if self.array.shape == shape:
            return _Array(self.array)
        if not broadcasts(self.array.shape, shape):
            raise ValueError(
                f"mask of shape {self.array.shape} does not broadcast to (..., H, L, S) = {shape}"
            )
        return _Array(np.broadcast_to(self.array, shape))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _And(Mask):
    """What every part allows."""

    parts: tuple[Mask, ...]

    def __repr__(self) -> str:
        return " & ".join(f"({part})" if isinstance(part, _Or) else repr(part) for part in self.parts)

    @property
    def _lead(self) -> tuple[int, ...]:
        return np.broadcast_shapes(*(part._lead for part in self.parts))

    def _bind(self, size: _Size) -> _Node:
        nodes = [part._bind(size) for part in self.parts]
        intervals = [node for node in nodes if isinstance(node, _Intervals)]
        others = [node for node in nodes if not isinstance(node, _Intervals)]
        merged = [_intersect(intervals, size.S)] if intervals else []
        return _All([*merged, *others]) if others else merged[0]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Or(Mask):
    """What any part allows."""

    parts: tuple[Mask, ...]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))

    @property
    def _lead(self) -> tuple[int, ...]:
        return np.broadcast_shapes(*(part._lead for part in self.parts))

    def _bind(self, size: _Size) -> _Node:
        return _Any([part._bind(size) for part in self.parts])


# What kernels get ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """A tile map of ``(L, S)`` planes, with bits for the tiles that are neither empty nor full.

    The tile at ``(t, u)`` covers queries ``TILE_Q * t`` onward and keys ``TILE_K * u`` onward.
    """

    #: ``(*lead, H, ceil(L / TILE_Q), ceil(S / TILE_K))`` int32 view: EMPTY, FULL or a row of `bits`
    index: np.ndarray
    #: ``(n, TILE_Q, TILE_K // 32)`` uint32: bit t of word w is key ``32 * w + t`` of the tile, 0 past the end
    bits: np.ndarray

    def rows(self, item: tuple[int, ...], start: int, stop: int, len_k: int) -> np.ndarray:
        """Bool ``(stop - start, len_k)``: the rows ``start..stop`` of the plane ``item = (*lead, head)``."""
        row = np.arange(start, stop)
        tile = self.index[item][row // TILE_Q]
        words = np.zeros((*tile.shape, _WORDS), dtype="<u4")
        words[tile == FULL] = _LOW_BITS[32]
        at_row, at_tile = np.nonzero(tile >= 0)
        words[at_row, at_tile] = self.bits[tile[at_row, at_tile], row[at_row] % TILE_Q]
        bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
        return bits.reshape(len(row), -1)[:, :len_k].view(bool)


class Lowered(NamedTuple):
    """A mask as kernels know it: what every part that is present allows."""

    key_start: np.ndarray | None  #: ``(*lead, L)`` int64 view, in 0..S
    key_stop: np.ndarray | None  #: ``(*lead, L)`` int64 view, ``key_start <= key_stop <= S``
    dense: np.ndarray | None  #: ``(*lead, H, L, S)`` view; bool or integer, non-zero = allowed
    tiles: Tiles | None


def lower(
    mask: Mask | None, lead: tuple[int, ...], H: int, L: int, S: int, bounds: _Intervals | None = None
) -> Lowered:
    """Lower a mask, and intervals that hold beside it, for one problem size.

    Parameters
    ----------
    mask : Mask or None
    lead : tuple of int
        The leading batch axes.
    H, L, S : int
        Query heads, query length, key length.
    bounds : intervals, optional
        From `make_intervals`; combined with the mask by AND.

    Raises
    ------
    ValueError
        Where the mask does not fit the sizes.
    """
    node = None if mask is None else mask._bind(_Size(lead, H, L, S))
    nodes = node.parts if isinstance(node, _All) else [] if node is None else [node]
    intervals = [part for part in nodes if isinstance(part, _Intervals)]
    others = [part for part in nodes if not isinstance(part, _Intervals)]
    if bounds is not None:
        intervals.append(bounds)

    key_start = key_stop = dense = tiles = band = None
    if intervals:
        band = intervals[0] if len(intervals) == 1 else _intersect(intervals, S)
        key_start = np.broadcast_to(band.start, (*lead, L))
        key_stop = np.broadcast_to(band.stop, (*lead, L))
    arrays = [part for part in others if isinstance(part, _Array)]
    if len(arrays) == 1:
        dense = arrays[0].array
        others.remove(arrays[0])
    if others and L and S:
        tiles = _build_tiles(others[0] if len(others) == 1 else _All(others), (*lead, H), L, S, band)
    return Lowered(key_start, key_stop, dense, tiles)


def make_intervals(start: Any, stop: Any, S: int) -> _Intervals:
    """Per-row key intervals from numbers or arrays that broadcast to ``(*lead, L)``, clipped to 0..S."""
    start = np.minimum(np.maximum(start, 0), S)
    return _Intervals(start, np.maximum(np.minimum(stop, S), start))


def window_interval(position: Any, left: int | None, right: int | None, far: int) -> tuple[Any, Any]:
    """``start, stop`` of the keys from ``position - left`` to ``position + right``, both included.

    No key is further than `far` from any position, so bounds are cut there and no sum overflows.
    """
    start = 0 if left is None else position - min(left, far)
    stop = far if right is None else position + (min(right, far) + 1)
    return start, stop


def window_bound(value: Any, name: str) -> int | None:
    """A window's bound as an int or None; raises where it is neither or negative."""
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be a non-negative integer or None, got {value!r}")
    try:
        bound = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a non-negative integer or None, got {value!r}") from None
    if bound < 0:
        raise ValueError(f"{name} must be a non-negative integer or None, got {value!r}")
    return bound


# Masks bound to one problem size -------------------------------------------------------------------
#
# A node answers for tiles in two steps. `classes` says of every tile whether it allows no key, every key,
# or perhaps some, from bounds alone. `words` gives the bits of the tiles that are left.


class _Size(NamedTuple):
    lead: tuple[int, ...]
    H: int
    L: int
    S: int


class _Grid:
    """The tiles of an ``(L, S)`` plane."""

    def __init__(self, L: int, S: int) -> None:
        self.L, self.S = L, S
        self.row_starts = np.arange(0, L, TILE_Q)
        self.key_starts = np.arange(0, S, TILE_K)
        self.key_stops = np.minimum(self.key_starts + TILE_K, S)
        self.shape = (len(self.row_starts), len(self.key_starts))


class _Chunk:
    """Some tiles, to be evaluated at once: tile n lies in plane ``item[:, n]`` of `outer`."""

    def __init__(self, flat: np.ndarray, outer: tuple[int, ...], grid: _Grid) -> None:
        *item, tile_row, tile_key = np.unravel_index(flat, (*outer, *grid.shape))
        self.outer, self.item, self.grid = outer, item, grid
        self.tile_key = tile_key
        self.row_start, self.key_start = tile_row * TILE_Q, tile_key * TILE_K
        # Rows and keys past the end repeat the last one; `inside` clears their bits.
        self.row = np.minimum(self.row_start[:, None] + np.arange(TILE_Q), grid.L - 1)

    def inside(self) -> np.ndarray:
        """Words of the tiles' part that lies inside the plane."""
        rows_left = (self.grid.L - self.row_start)[:, None]
        keys_left = np.where(np.arange(TILE_Q) < rows_left, (self.grid.S - self.key_start)[:, None], 0)
        return _interval_words(np.zeros((1, 1), dtype=np.int64), keys_left)

    def per_batch(self, array: np.ndarray, position: np.ndarray) -> np.ndarray:
        """``array[item, position]`` for an array that broadcasts to ``(*lead, n)``."""
        array = np.broadcast_to(array, (*self.outer[:-1], array.shape[-1]))
        return array[(*(axis[:, None] for axis in self.item[:-1]), position)]


class _Node:
    """A mask bound to one problem size."""

    #: shape that broadcasts to ``(*lead, H)``: the planes among which the mask varies
    outer: tuple[int, ...]

    def classes(self, grid: _Grid) -> np.ndarray:
        """``_NONE``, ``_SOME`` or ``_EVERY`` of each tile, broadcastable to ``(*outer, *grid.shape)``."""
        raise NotImplementedError

    def words(self, chunk: _Chunk) -> np.ndarray:
        """The bits of some tiles, ``(n, TILE_Q, TILE_K // 32)``, with any bits past the end."""
        raise NotImplementedError


class _Intervals(_Node):
    """One interval of keys per row; `start` and `stop` broadcast to ``(*lead, L)``."""

    def __init__(self, start: Any, stop: Any) -> None:
        self.start, self.stop = start, stop

    @property
    def outer(self) -> tuple[int, ...]:  # type: ignore[override]
        return (*np.broadcast_shapes(self.start.shape, self.stop.shape, (1,))[:-1], 1)

    def classes(self, grid: _Grid) -> np.ndarray:
        start, stop = self._rows(grid.L)
        empty = start >= stop
        # The smallest interval that holds all rows of the tile row, and the largest inside all of them.
        start_min = np.minimum.reduceat(np.where(empty, grid.S, start), grid.row_starts, axis=-1)[..., None]
        stop_max = np.maximum.reduceat(np.where(empty, 0, stop), grid.row_starts, axis=-1)[..., None]
        start_max = np.maximum.reduceat(start, grid.row_starts, axis=-1)[..., None]
        stop_min = np.minimum.reduceat(stop, grid.row_starts, axis=-1)[..., None]
        none = (start_min >= grid.key_stops) | (stop_max <= grid.key_starts)
        every = (start_max <= grid.key_starts) & (stop_min >= grid.key_stops)
        return _classes(none, every)[..., None, :, :]

    def words(self, chunk: _Chunk) -> np.ndarray:
        start, stop = self._rows(chunk.grid.L)
        key_start = chunk.key_start[:, None]
        return _interval_words(
            chunk.per_batch(start, chunk.row) - key_start, chunk.per_batch(stop, chunk.row) - key_start
        )

    def _rows(self, L: int) -> tuple[np.ndarray, np.ndarray]:
        shape = (*self.outer[:-1], L)
        return np.broadcast_to(self.start, shape), np.broadcast_to(self.stop, shape)


class _SameId(_Node):
    """Ids of queries ``(*lead, L)`` and of keys ``(*lead, S)``: equal ones see each other."""

    def __init__(self, q_ids: np.ndarray, k_ids: np.ndarray) -> None:
        self.q_ids, self.k_ids = q_ids, k_ids
        self.outer = (*np.broadcast_shapes(q_ids.shape[:-1], k_ids.shape[:-1]), 1)

    def classes(self, grid: _Grid) -> np.ndarray:
        q_min = np.minimum.reduceat(self.q_ids, grid.row_starts, axis=-1)[..., :, None]
        q_max = np.maximum.reduceat(self.q_ids, grid.row_starts, axis=-1)[..., :, None]
        k_min = np.minimum.reduceat(self.k_ids, grid.key_starts, axis=-1)[..., None, :]
        k_max = np.maximum.reduceat(self.k_ids, grid.key_starts, axis=-1)[..., None, :]
        none = (q_max < k_min) | (k_max < q_min)
        every = (q_min == q_max) & (k_min == k_max) & (q_min == k_min)
        return _classes(none, every)[..., None, :, :]

    def words(self, chunk: _Chunk) -> np.ndarray:
        key = np.minimum(chunk.key_start[:, None] + np.arange(TILE_K), chunk.grid.S - 1)
        q_ids = chunk.per_batch(self.q_ids, chunk.row)
        k_ids = chunk.per_batch(self.k_ids, key)
        return _pack(q_ids[:, :, None] == k_ids[:, None, :])


class _Cross(_Node):
    """Whole rows and whole columns: bool `rows` ``(L,)`` and `keys` ``(S,)``, either of them enough."""

    outer = (1,)

    def __init__(self, rows: np.ndarray, keys: np.ndarray) -> None:
        self.rows, self.keys = rows, keys

    def classes(self, grid: _Grid) -> np.ndarray:
        rows = _classes(
            ~np.logical_or.reduceat(self.rows, grid.row_starts),
            np.logical_and.reduceat(self.rows, grid.row_starts),
        )
        keys = _classes(
            ~np.logical_or.reduceat(self.keys, grid.key_starts),
            np.logical_and.reduceat(self.keys, grid.key_starts),
        )
        return np.maximum(rows[:, None], keys)

    def words(self, chunk: _Chunk) -> np.ndarray:
        n_keys = chunk.grid.shape[1]
        padded = np.zeros(n_keys * TILE_K, dtype=bool)
        padded[: chunk.grid.S] = self.keys
        key_words = _pack(padded.reshape(n_keys, TILE_K))[chunk.tile_key]
        return np.where(self.rows[chunk.row][:, :, None], _LOW_BITS[32], key_words[:, None, :])


class _Array(_Node):
    """An array ``(*lead, H, L, S)``, stride 0 where it is broadcast."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        planes = zip(array.shape[:-2], array.strides[:-2], strict=True)
        self.outer = tuple(n if stride else min(n, 1) for n, stride in planes)

    def classes(self, grid: _Grid) -> np.ndarray:
        return np.full(grid.shape, _SOME, dtype=np.int8)

    def words(self, chunk: _Chunk) -> np.ndarray:
        allowed = np.zeros((len(chunk.tile_key), TILE_Q, TILE_K), dtype=bool)
        # Slices, one tile at a time: fancy indexing over the whole chunk takes ten times as long.
        for n, (*item, row, key) in enumerate(
            zip(*chunk.item, chunk.row_start, chunk.key_start, strict=True)
        ):
            tile = self.array[(*item, slice(row, row + TILE_Q), slice(key, key + TILE_K))]
            allowed[n, : tile.shape[0], : tile.shape[1]] = tile
        return _pack(allowed)


class _All(_Node):
    """What every part allows."""

    def __init__(self, parts: list[_Node]) -> None:
        self.parts = parts
        self.outer = np.broadcast_shapes(*(part.outer for part in parts))

    def classes(self, grid: _Grid) -> np.ndarray:
        result = self.parts[0].classes(grid)
        for part in self.parts[1:]:
            result = np.minimum(result, part.classes(grid))
        return result

    def words(self, chunk: _Chunk) -> np.ndarray:
        result = self.parts[0].words(chunk)
        for part in self.parts[1:]:
            result = result & part.words(chunk)
        return result


class _Any(_Node):
    """What any part allows."""

    def __init__(self, parts: list[_Node]) -> None:
        self.parts = parts
        self.outer = np.broadcast_shapes(*(part.outer for part in parts))

    def classes(self, grid: _Grid) -> np.ndarray:
        result = self.parts[0].classes(grid)
        for part in self.parts[1:]:
            result = np.maximum(result, part.classes(grid))
        return result

    def words(self, chunk: _Chunk) -> np.ndarray:
        result = self.parts[0].words(chunk)
        for part in self.parts[1:]:
            result = result | part.words(chunk)
        return result


def _build_tiles(node: _Node, outer: tuple[int, ...], L: int, S: int, band: _Intervals | None) -> Tiles:
    """The tile map of `node`; tiles that `band` leaves empty in all planes need no bits."""
    grid = _Grid(L, S)
    planes = (1,) * (len(outer) - len(node.outer)) + tuple(node.outer)
    classes = np.broadcast_to(node.classes(grid), (*planes, *grid.shape))
    if band is not None:
        reached = band.classes(grid) != _NONE
        reached = reached.reshape((1,) * (classes.ndim - reached.ndim) + reached.shape)
        shared = tuple(axis for axis, n in enumerate(planes) if n == 1)
        classes = np.where(reached.any(axis=shared, keepdims=True), classes, _NONE)

    index = np.full(classes.shape, EMPTY, dtype=np.int32)
    index[classes == _EVERY] = FULL
    flat_index = index.reshape(-1)
    partial = np.flatnonzero(classes == _SOME)
    bits = np.empty((len(partial), TILE_Q, _WORDS), dtype=np.uint32)  # untouched pages cost nothing
    count = 0
    for first in range(0, len(partial), _CHUNK_TILES):
        flat = partial[first : first + _CHUNK_TILES]
        chunk = _Chunk(flat, planes, grid)
        inside = chunk.inside()
        words = node.words(chunk) & inside
        empty = ~words.any(axis=(1, 2))
        full = (words == inside).all(axis=(1, 2))
        mixed = np.flatnonzero(~(empty | full))
        flat_index[flat[full]] = FULL
        flat_index[flat[mixed]] = np.arange(count, count + len(mixed))
        bits[count : count + len(mixed)] = words[mixed]
        count += len(mixed)
    return Tiles(np.broadcast_to(index, (*outer, *grid.shape)), bits[:count])


def _intersect(intervals: list[_Intervals], S: int) -> _Intervals:
    start, stop = intervals[0].start, intervals[0].stop
    for other in intervals[1:]:
        start, stop = np.maximum(start, other.start), np.minimum(stop, other.stop)
    return make_intervals(start, stop, S)


def _segment_runs(q_ids: np.ndarray, k_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Each query's keys as one interval, or None when some query's keys do not lie next to each other."""
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


def _interval_words(start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Words ``(..., TILE_K // 32)`` with the bits ``start <= t < stop`` of a tile row set."""
    word = np.arange(0, TILE_K, 32)
    low = _LOW_BITS[np.clip(start[..., None] - word, 0, 32)]
    return _LOW_BITS[np.clip(stop[..., None] - word, 0, 32)] & ~low


def _pack(allowed: np.ndarray) -> np.ndarray:
    """Bools ``(..., TILE_K)`` as words ``(..., TILE_K // 32)``."""
    return np.packbits(allowed, axis=-1, bitorder="little").view("<u4").astype(np.uint32, copy=False)


def _classes(none: np.ndarray, every: np.ndarray) -> np.ndarray:
    return every.astype(np.int8) - none.astype(np.int8) + np.int8(_SOME)


# Checks of the masks' own arguments ----------------------------------------------------------------


def _parts(mask: Mask, kind: type[_And] | type[_Or]) -> tuple[Mask, ...]:
    return mask.parts if isinstance(mask, kind) else (mask,)


def _show(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return repr(value)
    return str(value.tolist()) if value.size <= 8 and value.ndim <= 1 else f"<{value.dtype} {value.shape}>"


def _check_align(align: Any) -> None:
    if not isinstance(align, str) or align not in ("top_left", "bottom_right"):
        raise ValueError(f'align must be "top_left" or "bottom_right", got {align!r}')


def integers(value: ArrayLike, name: str, minimum: int | None = None) -> np.ndarray:
    """A read-only int64 copy of an integer array_like."""
    array = np.asarray(value)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name} must be integers, got dtype {array.dtype}")
    array = array.astype(np.int64)
    if minimum is not None and array.size and array.min() < minimum:
        raise ValueError(f"{name} must not be below {minimum}, got {array.min()}")
    array.flags.writeable = False
    return array


def broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether `shape` broadcasts to exactly `target`."""
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(n in (1, m) for n, m in pairs)


def _check_fit(mask: Mask, shape: tuple[int, ...], lead: tuple[int, ...]) -> None:
    if not broadcasts(shape, lead):
        raise ValueError(
            f"mask {mask!r} of shape {shape} does not broadcast to the leading batch axes {lead}"
        )
