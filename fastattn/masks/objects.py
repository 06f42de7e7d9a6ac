"""The mask objects, and how one is lowered; `fastattn.masks` has the public names."""

from __future__ import annotations

import operator
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import numpy as np

from fastattn._machine.device import DeviceArray, as_device_array, broadcast_to, cut, host_array
from fastattn.masks.map import (
    INDEX_EMPTY,
    INDEX_FULL,
    TILE_K,
    TILE_Q,
    UNBOUNDED,
    All,
    AnyOf,
    Band,
    Block,
    Cross,
    DenseArray,
    Frozen,
    Intervals,
    Mapped,
    MappedPart,
    MaskMap,
    Node,
    Part,
    SameId,
    all_of,
    build_mask_map,
    intersect,
    intervals_of,
    make_intervals,
    segment_runs,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

Align = Literal["top_left", "bottom_right"]

_MAX_DEPTH = 100  # of masks inside of each other: each takes a few of the 1000 calls that Python nests


class Mask(Frozen):
    """What all masks share: ``&``, ``|``, ``~``, ``==``, `shifted` and `materialize`.

    Notes
    -----
    ``&`` allows what both masks allow, ``|`` what either allows, ``~`` what the mask does not. A mask has no
    truth value, since Python's ``and`` and ``or`` would keep one mask and drop the other.

    Masks are equal when they are written alike: of the same kind, with the same arguments (arrays by shape
    and values), and with the same parts in the same order. ``Window(0, 0) & Causal()`` and ``Causal() &
    Window(0, 0)`` allow the same and yet are different. Equal masks have equal hashes; a hash looks at no
    more than a few numbers of an array.

    Examples
    --------
    >>> from fastattn.masks import Causal, Window
    >>> Causal() & Window(1, 1) == Causal() & Window(1, 1)
    True
    >>> (~Causal()).materialize(1, 3, 3).astype(int)
    array([[[0, 1, 1],
            [0, 0, 1],
            [0, 0, 0]]])
    """

    __slots__ = ()
    __array_ufunc__ = None  # so that `array & mask` comes here, and is no object array

    def __and__(self, other: Mask) -> Mask:
        _check_operand("&", other)
        return _combined(_And, self, other)

    def __or__(self, other: Mask) -> Mask:
        _check_operand("|", other)
        return _combined(_Or, self, other)

    def __rand__(self, other: Any) -> NoReturn:
        raise _not_a_mask("&", other)

    def __ror__(self, other: Any) -> NoReturn:
        raise _not_a_mask("|", other)

    def __invert__(self) -> Mask:
        return _combined(_Not, self)

    def __bool__(self) -> NoReturn:
        raise TypeError(
            f"mask {self!r} has no truth value, so `and`, `or` and `not` do not combine masks: "
            f"use & (both), | (either) and ~ (not)"
        )

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return False if isinstance(other, Mask) else NotImplemented
        if self is not other:
            for a, b in zip(self._values(), other._values(), strict=True):
                if a is not b and not _same(a, b):
                    return False
        return True

    def __hash__(self) -> int:
        return hash((type(self), *map(_hashable, self._values())))

    def _values(self) -> Sequence[Any]:
        """What two equal masks have in common."""
        return self.__getstate__()

    def __repr__(self) -> str:
        defaults = getattr(type(self).__init__, "__defaults__", None) or ()
        default_of = dict(zip(self.__slots__[::-1], defaults[::-1], strict=False))
        given: Any = zip(self.__slots__, self._values(), strict=True)
        shown = (f"{name}={_show(value)}" for name, value in given if value is not default_of.get(name, self))
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
        H, L, S = (whole_number(n, name) for n, name in ((H, "H"), (L, "L"), (S, "S")))
        lowered = lower(self, lead, H, L, S)
        allowed = np.ones((*lead, H, L, S), dtype=bool)
        if lowered.key_start is not None and lowered.key_stop is not None:
            key = np.arange(S)
            inside = (lowered.key_start[..., None] <= key) & (key < lowered.key_stop[..., None])
            allowed &= inside[..., None, :, :]
        if lowered.dense is not None:
            allowed &= host_array(lowered.dense, "the mask's array") != 0
        if lowered.mask_map is not None:
            for item in np.ndindex(*lead, H):
                allowed[item] &= lowered.mask_map.rows(item, 0, L, S)
        return allowed

    def shifted(self, q_offset: int, k_offset: int, *, size: tuple[int, int] | None = None) -> Mask:
        """The mask of a block of a larger problem, whose first query and key these are.

        Parameters
        ----------
        q_offset, k_offset : int
            Not negative. Of query ``i`` and key ``j`` the result says what the mask says of ``i + q_offset``
            and ``j + k_offset``.
        size : (int, int), optional
            ``(L, S)`` of the larger problem. Masks that are aligned to its end need it: `PrefixLM`,
            `GlobalTokens`, and `Causal` and `Window` with ``align="bottom_right"``.

        Returns
        -------
        Mask
            For any sizes of the block; where the larger problem is known, by `size` or by the mask's own
            array, the block has to lie inside. Of a combined mask each part is shifted.

        Raises
        ------
        TypeError
            An offset or a size that is not an integer.
        ValueError
            One that is negative, or no `size` where a mask needs it.

        Notes
        -----
        Blocks of queries and keys can be worked on one after the other, with `fastattn.merge_attention` for
        blocks of keys. A block costs what the mask does: intervals stay intervals, and an array is a view.

        Examples
        --------
        The queries from 100 on, two at a time, of a problem of 200 queries and 200 keys; the keys from 98 on:

        >>> from fastattn.masks import Causal, Window
        >>> Causal().shifted(100, 98).materialize(1, 2, 6).astype(int)
        array([[[1, 1, 1, 0, 0, 0],
                [1, 1, 1, 1, 0, 0]]])
        >>> Window(1, 0).shifted(100, 98, size=(200, 200)).materialize(1, 2, 6).astype(int)
        array([[[0, 1, 1, 0, 0, 0],
                [0, 0, 1, 1, 0, 0]]])
        """
        offsets = whole_number(q_offset, "q_offset"), whole_number(k_offset, "k_offset")
        return self._shift(*offsets, None if size is None else _sizes(size))

    def _shift(self, q_offset: int, k_offset: int, whole: tuple[int, int] | None) -> Mask:
        if whole is None and self._is_aligned_to_end():
            raise ValueError(
                f"mask {self!r} is aligned to the end of the larger problem: shifted needs its size=(L, S)"
            )
        return _Shifted(self, q_offset, k_offset, whole)

    def _cut(self, part: Part) -> Mask:
        """The mask of a part of a problem that this mask fits, with nothing of the other parts in it."""
        return _Shifted(self, part.queries.start, part.keys.start, part.whole)

    def _is_aligned_to_end(self) -> bool:
        """Whether a block of a problem depends on the sizes of the problem."""
        return False

    @property
    def _is_frozen(self) -> bool:
        """Whether no array of the caller's is in it, whose numbers may change."""
        return True

    @property
    def _lead(self) -> tuple[int, ...]:
        """Shape of the leading batch axes along which the mask itself varies."""
        return ()

    def _bind(self, block: Block) -> Node:
        """The mask for a problem, or for a block of one; raises ValueError where it does not fit."""
        raise NotImplementedError


# The masks -----------------------------------------------------------------------------------------


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

    __slots__ = ("align", "offset")
    align: Align | None
    offset: Any

    def __init__(self, align: Align | None = None, offset: Any = None) -> None:
        if align is not None:
            _check_align(align)
        if offset is not None:
            if align is not None:
                raise ValueError(
                    f"Causal takes align or offset, not both; got align={align!r}, offset={offset!r}"
                )
            offset = integers(offset, "Causal: offset", saturate=True)
        self._set(align, offset)

    @property
    def _lead(self) -> tuple[int, ...]:
        return () if self.offset is None else self.offset.shape

    def _bind(self, block: Block) -> Node:
        if self.offset is not None:
            _check_fit(self, self.offset.shape, block.lead)
            # Clipped so that no sum overflows: beyond these bounds nothing changes any more.
            offset = np.clip(self.offset, -(block.q_start + block.L), block.k_start + block.S)[..., None]
        elif self.align == "bottom_right":
            offset = block.at_end
        else:
            offset = 0
            if self.align is None and block.whole is not None and block.at_end:
                L, S = block.whole
                raise ValueError(
                    f"mask {self!r} needs L == S, got L={L} and S={S}; say "
                    f'Causal(align="top_left") or Causal(align="bottom_right")'
                )
        return make_intervals(0, block.queries + (1 - block.k_start) + offset, block.S)

    def _cut(self, part: Part) -> Mask:
        own = self if self.offset is None else Causal(offset=part.of_items(self.offset))
        return _Shifted(own, part.queries.start, part.keys.start, part.whole)

    def _is_aligned_to_end(self) -> bool:
        return self.align == "bottom_right"


class Window(Mask):
    """Key ``j`` is allowed for query ``i`` when ``p - left <= j <= p + right``.

    Parameters
    ----------
    left, right : int or None
        How many keys to each side of ``p``, both ends included; None is unbounded.
    align : {"bottom_right", "top_left"}, default "bottom_right"
        ``p = i + S - L``, or ``p = i``.
    """

    __slots__ = ("left", "right", "align")
    left: int | None
    right: int | None
    align: Align

    def __init__(self, left: int | None, right: int | None, align: Align = "bottom_right") -> None:
        left, right = window_bound(left, "Window: left"), window_bound(right, "Window: right")
        _check_align(align)
        self._set(left, right, align)

    def _bind(self, block: Block) -> Node:
        offset = (0 if self.align == "top_left" else block.at_end) - block.k_start
        far = block.q_start + block.L + block.S + abs(offset)
        return make_intervals(*window_interval(block.queries + offset, self.left, self.right, far), block.S)

    def _is_aligned_to_end(self) -> bool:
        return self.align == "bottom_right"


class KeyLengths(Mask):
    """Key ``j`` is allowed when ``j < length`` of the batch item.

    Parameters
    ----------
    lengths : int or array_like of int
        In ``0..S``, broadcast to the leading batch axes.
    """

    __slots__ = ("lengths",)
    lengths: Any

    def __init__(self, lengths: Any) -> None:
        self._set(integers(lengths, "KeyLengths: lengths", minimum=0))

    @property
    def _lead(self) -> tuple[int, ...]:
        return self.lengths.shape

    def _bind(self, block: Block) -> Node:
        _check_fit(self, self.lengths.shape, block.lead)
        if block.whole is not None and self.lengths.size and self.lengths.max() > block.whole[1]:
            raise ValueError(
                f"mask {self!r}: lengths must be in 0..S={block.whole[1]}, got {self.lengths.max()}"
            )
        return make_intervals(0, self.lengths[..., None] - block.k_start, block.S)

    def _cut(self, part: Part) -> Mask:
        own = KeyLengths(part.of_items(self.lengths))
        return _Shifted(own, part.queries.start, part.keys.start, part.whole)


def _segment_ids(ids: Any, name: str) -> np.ndarray:
    ids = integers(ids, f"Segments: {name}")
    if ids.ndim == 0:
        raise ValueError(f"Segments: {name} must have shape (..., length), got a single number")
    return ids


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

    __slots__ = ("q_ids", "k_ids")
    q_ids: Any
    k_ids: Any

    def __init__(self, q_ids: Any, k_ids: Any = None) -> None:
        self._set(_segment_ids(q_ids, "q_ids"), None if k_ids is None else _segment_ids(k_ids, "k_ids"))
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

    def _bind(self, block: Block) -> Node:
        q_ids, k_ids = self.q_ids, self.q_ids if self.k_ids is None else self.k_ids
        _check_fit(self, self._lead, block.lead)
        _check_block(self, block, q_ids.shape[-1], k_ids.shape[-1])
        q_ids = q_ids[..., block.q_start : block.q_start + block.L]
        k_ids = k_ids[..., block.k_start : block.k_start + block.S]
        runs = segment_runs(q_ids, k_ids)
        return SameId(q_ids, k_ids) if runs is None else make_intervals(*runs, block.S)

    def _cut(self, part: Part) -> Mask:
        q_ids, k_ids = self.q_ids, self.q_ids if self.k_ids is None else self.k_ids
        return Segments(part.of_items(q_ids, 1)[..., part.queries], part.of_items(k_ids, 1)[..., part.keys])


class PrefixLM(Mask):
    """Key ``j`` is allowed for query ``i`` when ``j < prefix`` or ``j <= i + S - L``.

    Parameters
    ----------
    prefix_lengths : int or array_like of int
        Not negative, broadcast to the leading batch axes. A prefix longer than `S` is all of `S`.
    """

    __slots__ = ("prefix_lengths",)
    prefix_lengths: Any

    def __init__(self, prefix_lengths: Any) -> None:
        self._set(integers(prefix_lengths, "PrefixLM: prefix_lengths", minimum=0, saturate=True))

    @property
    def _lead(self) -> tuple[int, ...]:
        return self.prefix_lengths.shape

    def _bind(self, block: Block) -> Node:
        _check_fit(self, self.prefix_lengths.shape, block.lead)
        stop = np.maximum(self.prefix_lengths[..., None], block.queries + (block.at_end + 1))
        return make_intervals(0, stop - block.k_start, block.S)

    def _cut(self, part: Part) -> Mask:
        own = PrefixLM(part.of_items(self.prefix_lengths))
        return _Shifted(own, part.queries.start, part.keys.start, part.whole)

    def _is_aligned_to_end(self) -> bool:
        return True


class GlobalTokens(Mask):
    """Key ``j`` is allowed for query ``i`` when ``j`` or ``i + S - L`` is one of the global tokens.

    Parameters
    ----------
    index : array_like of int, shape (n,)
        Positions of the global tokens among the keys, in ``0 .. S - 1``.

    Examples
    --------
    Longformer: a sliding window, and one token that sees and is seen by all.

    >>> from fastattn.masks import GlobalTokens, Window
    >>> Window(1, 1) | GlobalTokens([0])
    Window(left=1, right=1) | GlobalTokens(index=[0])
    """

    __slots__ = ("index",)
    index: Any

    def __init__(self, index: Any) -> None:
        index = integers(index, "GlobalTokens: index", minimum=0)
        if index.ndim != 1:
            raise ValueError(f"GlobalTokens: index must have shape (n,), got {index.shape}")
        self._set(index)

    def _bind(self, block: Block) -> Node:
        if block.whole is not None and self.index.size and self.index.max() >= block.whole[1]:
            raise ValueError(f"mask {self!r}: index must be below S={block.whole[1]}, got {self.index.max()}")
        keys, rows = np.zeros(block.S, dtype=bool), np.zeros(block.L, dtype=bool)
        key, row = self.index - block.k_start, self.index - (block.at_end + block.q_start)
        keys[key[(key >= 0) & (key < block.S)]] = True
        rows[row[(row >= 0) & (row < block.L)]] = True
        return Cross(rows, keys)

    def _is_aligned_to_end(self) -> bool:
        return True


class NotSelf(Mask):
    """Key ``j`` is allowed for query ``i`` when ``j != i``: leave-one-out.

    Notes
    -----
    It lowers to tiles, with bits for those on the diagonal.

    Examples
    --------
    >>> from fastattn.masks import NotSelf
    >>> NotSelf().materialize(1, 3, 4).astype(int)
    array([[[0, 1, 1, 1],
            [1, 0, 1, 1],
            [1, 1, 0, 1]]])
    """

    __slots__ = ()

    def _bind(self, block: Block) -> Node:
        own = block.queries - block.k_start
        return make_intervals(own, own + 1, block.S).complement(block.S)


class Dense(Mask):
    """Key ``j`` is allowed for query ``i`` where the array is not zero.

    Parameters
    ----------
    array : array_like of bool or integer
        Broadcast to ``(..., H, L, S)`` by NumPy's rules. An ndarray is not copied, so what is written into
        it later is seen. One on a GPU stays there: it combines with other masks by ``&``, not by ``|`` or
        ``~``.

    Notes
    -----
    Two are equal when their arrays have equal shapes and, at that moment, equal values; arrays on a GPU are
    not read for that, and are equal when they are the same memory. The hash is that of the shape alone, so
    that writing into the array does not change it.
    """

    __slots__ = ("array",)
    array: Any

    def __init__(self, array: Any) -> None:
        on_gpu: Any = as_device_array(array, "mask")
        array = np.asarray(array) if on_gpu is None else on_gpu
        if array.dtype.kind not in "biu":
            raise TypeError(
                f"mask must be a fastattn.masks object or a bool or integer array, got dtype {array.dtype}"
                f"{_float_hint(array)}"
            )
        self._set(array)

    def __hash__(self) -> int:
        return hash((Dense, self.array.shape))

    @property
    def _is_frozen(self) -> bool:
        return False

    @property
    def _lead(self) -> tuple[int, ...]:
        return self.array.shape[:-3]

    def _bind(self, block: Block) -> Node:
        array, shape = self.array, (*block.lead, block.H, block.L, block.S)
        if array.shape == shape and block.whole == shape[-2:]:
            return DenseArray(array)
        whole = (*shape[:-2], *self._whole(block))
        if not broadcasts(array.shape, whole):
            raise ValueError(
                f"mask of shape {array.shape} does not broadcast to (..., H, L, S) = {whole}"
                f"{axes_hint(array.shape, whole, 'mask')}"
            )
        starts = {-2: block.q_start, -1: block.k_start}
        for axis, start in starts.items():
            if -axis <= array.ndim and array.shape[axis] not in (1, shape[axis]):
                array = cut(array, axis, start, shape[axis])
        return DenseArray(broadcast_to(array, shape, "mask"))

    def _cut(self, part: Part) -> Mask:
        axes = (*part.items, part.heads, part.queries, part.keys)[-self.array.ndim :]
        own = zip(self.array.strides, self.array.shape, axes, strict=False)
        # One element stands for all of an axis that is broadcast, in a part of any size.
        return Dense(
            self.array[tuple(slice(0, 1) if not stride or n == 1 else cut for stride, n, cut in own)]
        )

    def _whole(self, block: Block) -> tuple[int, int]:
        """``(L, S)`` of the problem that the array is for, in which the block has to lie."""
        ends = block.q_start + block.L, block.k_start + block.S
        given = block.whole or ends
        spread = (1, 1, *self.array.shape)[-2:]
        L, S = (n if block.whole is None and n != 1 else m for n, m in zip(spread, given, strict=True))
        if ends[0] > L or ends[1] > S:
            raise _outside(self, block, L, S)
        return L, S


class BlockMask(Mask):
    """What a function allowed for one problem size; `fastattn.create_block_mask` makes it.

    Parameters
    ----------
    mask_map : MaskMap
        The map of tiles, its index of shape ``(B or 1, H or 1, ...)``.
    B, H : int
        Batch items (the product of the leading batch axes) and query heads that it is for; 1: for any number.
    L, S : int
        Query length and key length.

    Notes
    -----
    As text it is a drawing of the first batch item's first head: ``#`` where every key is allowed, ``+``
    where some are, ``.`` where none is, each sign for one tile of 64 queries and 128 keys, or for several.

    Where each query has one interval of keys, as in a window or documents, it costs what those masks do.
    """

    __slots__ = ("mask_map", "B", "H", "L", "S", "_intervals")
    mask_map: MaskMap
    B: int
    H: int
    L: int
    S: int
    _intervals: tuple[np.ndarray, np.ndarray] | None

    def __init__(self, mask_map: MaskMap, B: int, H: int, L: int, S: int) -> None:
        self._set(mask_map, B, H, L, S, intervals_of(mask_map, L, S))

    def __repr__(self) -> str:
        index = self.mask_map.index
        share = 100 * np.count_nonzero(index == INDEX_EMPTY) / max(1, index.size)
        return (
            f"BlockMask(B={self.B}, H={self.H}, L={self.L}, S={self.S}: {share:.1f} % of the tiles are empty)"
        )

    def __str__(self) -> str:
        return (
            "\n".join([repr(self), *_drawing(self.mask_map.index[0, 0])])
            if self.mask_map.index.size
            else repr(self)
        )

    def _values(self) -> tuple[Any, ...]:
        return (self.B, self.H, self.L, self.S, self.mask_map.index, self.mask_map.bits)

    @property
    def _lead(self) -> tuple[int, ...]:
        return () if self.B == 1 else (self.B,)

    def _bind(self, block: Block) -> Node:
        items = prod(block.lead)
        L, S = block.whole or (self.L, self.S)
        fits = self.B in (1, items) and self.H in (1, block.H) and (self.L, self.S) == (L, S)
        if not fits:
            raise ValueError(
                f"mask {self!r} does not fit B={items} batch items, H={block.H}, L={L} and S={S}"
            )
        _check_block(self, block, L, S)
        index = self.mask_map.index
        lead = block.lead if len(index) == items else (1,) * len(block.lead)
        if self._intervals is not None:
            start, stop = (
                bound.reshape(*lead, L)[..., block.q_start : block.q_start + block.L] - block.k_start
                for bound in self._intervals
            )
            return make_intervals(start, stop, block.S)
        mask_map = MaskMap(index.reshape(*lead, *index.shape[1:]), self.mask_map.bits)
        if (block.L, block.S) == (L, S):
            return Mapped(mask_map)
        return MappedPart(mask_map, block.q_start, block.k_start)

    def _cut(self, part: Part) -> Mask:
        row, key = part.queries.start // TILE_Q, part.keys.start // TILE_K
        stops = -(-part.queries.stop // TILE_Q), -(-part.keys.stop // TILE_K)
        index = self.mask_map.index[:, :, row : stops[0], key : stops[1]]
        if len(index) != 1:
            index = index.reshape(*part.lead, *index.shape[1:])[part.items].reshape(-1, *index.shape[1:])
        if index.shape[1] != 1:
            index = index[:, part.heads]
        mixed = index >= 0
        bits = self.mask_map.bits[index[mixed]]
        index = index.copy()
        index[mixed] = np.arange(len(bits))
        L = min(self.L, stops[0] * TILE_Q) - row * TILE_Q
        S = min(self.S, stops[1] * TILE_K) - key * TILE_K
        own = BlockMask(MaskMap(index, bits), index.shape[0], index.shape[1], L, S)
        return _Shifted(own, part.queries.start - row * TILE_Q, part.keys.start - key * TILE_K, None)


class _Shifted(Mask):
    """What `Mask.shifted` gives for one that is not combined of others."""

    __slots__ = ("_mask", "_q_offset", "_k_offset", "_whole")
    _mask: Mask
    _q_offset: int
    _k_offset: int
    _whole: tuple[int, int] | None

    def __init__(self, mask: Mask, q_offset: int, k_offset: int, whole: tuple[int, int] | None) -> None:
        self._set(mask, q_offset, k_offset, whole)

    def __repr__(self) -> str:
        size = "" if self._whole is None else f", size={self._whole}"
        return f"{self._mask!r}.shifted({self._q_offset}, {self._k_offset}{size})"

    @property
    def _is_frozen(self) -> bool:
        return self._mask._is_frozen

    @property
    def _lead(self) -> tuple[int, ...]:
        return self._mask._lead

    def _shift(self, q_offset: int, k_offset: int, whole: tuple[int, int] | None) -> Mask:
        q_offset = whole_number(self._q_offset + q_offset, "the sum of all q_offset")
        k_offset = whole_number(self._k_offset + k_offset, "the sum of all k_offset")
        return _Shifted(self._mask, q_offset, k_offset, self._whole)

    def _cut(self, part: Part) -> Mask:
        queries, keys = (
            slice(cut.start + offset, cut.stop + offset)
            for cut, offset in ((part.queries, self._q_offset), (part.keys, self._k_offset))
        )
        return self._mask._cut(Part(part.lead, part.items, part.heads, queries, keys, self._whole))

    def _bind(self, block: Block) -> Node:
        part = Block(block.lead, block.H, block.L, block.S, self._q_offset, self._k_offset, self._whole)
        if self._whole is not None:
            ends = self._q_offset + block.L, self._k_offset + block.S
            if ends[0] > self._whole[0] or ends[1] > self._whole[1]:
                raise _outside(self._mask, part, *self._whole)
        return self._mask._bind(part)


class _Combined(Mask):
    """What `_And`, `_Or` and `_Not` share."""

    __slots__ = ("parts", "depth")
    parts: tuple[Mask, ...]
    depth: int  #: how many combined masks lie in each other, this one among them

    def __init__(self, parts: tuple[Mask, ...], depth: int) -> None:
        self._set(parts, depth)

    @property
    def _is_frozen(self) -> bool:
        return all(part._is_frozen for part in self.parts)

    @property
    def _lead(self) -> tuple[int, ...]:
        return np.broadcast_shapes(*(part._lead for part in self.parts))

    def _shift(self, q_offset: int, k_offset: int, whole: tuple[int, int] | None) -> Mask:
        return type(self)(tuple(part._shift(q_offset, k_offset, whole) for part in self.parts), self.depth)

    def _cut(self, part: Part) -> Mask:
        return type(self)(tuple(mask._cut(part) for mask in self.parts), self.depth)


class _And(_Combined):
    """What every part allows."""

    def __repr__(self) -> str:
        return " & ".join(f"({part})" if isinstance(part, _Or) else repr(part) for part in self.parts)

    def _bind(self, block: Block) -> Node:
        return all_of([part._bind(block) for part in self.parts], block.S)


class _Or(_Combined):
    """What any part allows."""

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))

    def _bind(self, block: Block) -> Node:
        return AnyOf([part._bind(block) for part in self.parts])


class _Not(_Combined):
    """What its one part does not allow."""

    def __repr__(self) -> str:
        (part,) = self.parts
        return f"~({part!r})" if isinstance(part, (_And, _Or)) else f"~{part!r}"

    def __invert__(self) -> Mask:
        return self.parts[0]

    def _bind(self, block: Block) -> Node:
        return self.parts[0]._bind(block).complement(block.S)


# Lowering -----------------------------------------------------------------------------------------


class Lowered(NamedTuple):
    """A mask as kernels know it: what every part that is present allows."""

    key_start: np.ndarray | None  #: ``(*lead, L)`` int64 view, in 0..S
    key_stop: np.ndarray | None  #: ``(*lead, L)`` int64 view, ``key_start <= key_stop <= S``
    dense: Any  #: ``(*lead, H, L, S)`` view, or None; bool or integer, non-zero = allowed; also on a GPU
    mask_map: MaskMap | None


def lower(mask: Mask, lead: tuple[int, ...], H: int, L: int, S: int, band: Band | None = None) -> Lowered:
    """Lower a mask for one problem size.

    Parameters
    ----------
    mask : Mask
    lead : tuple of int
        The leading batch axes.
    H, L, S : int
        Query heads, query length, key length.
    band : Band, optional
        What else holds: tiles of the map that it leaves empty may be EMPTY there too.

    Raises
    ------
    ValueError
        Where the mask does not fit the sizes.
    """
    node = mask._bind(Block(lead, H, L, S, whole=(L, S)))
    nodes = node.parts if isinstance(node, All) else [node]
    intervals = [part for part in nodes if isinstance(part, Intervals)]
    others = [part for part in nodes if not isinstance(part, Intervals)]

    key_start = key_stop = dense = mask_map = None
    if intervals:
        intervals = [intersect(intervals, S)]
        key_start = np.broadcast_to(intervals[0].start, (*lead, L))
        key_stop = np.broadcast_to(intervals[0].stop, (*lead, L))
    arrays = [part for part in others if isinstance(part, DenseArray)]
    if len(arrays) == 1:
        dense = arrays[0].array
        others.remove(arrays[0])
    if len(others) == 1 and isinstance(others[0], Mapped):
        there = others[0].mask_map
        mask_map = MaskMap(np.broadcast_to(there.index, (*lead, H, *there.index.shape[-2:])), there.bits)
    elif others and L and S:
        if band is not None:
            intervals.append(band.intervals(L, S))
        reach = intersect(intervals, S) if intervals else None
        mask_map = build_mask_map(others[0] if len(others) == 1 else All(others), (*lead, H), L, S, reach)
    return Lowered(key_start, key_stop, dense, mask_map)


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
    bound = as_integer(value, name, "a non-negative integer or None")
    if bound < 0:
        raise ValueError(f"{name} must be a non-negative integer or None, got {value!r}")
    return bound


# Checks of the masks' own arguments ----------------------------------------------------------------


def _combined(kind: type[_Combined], *masks: Mask) -> _Combined:
    """The masks combined, the parts of those of the same kind side by side with the others."""
    parts: list[Mask] = []
    depth = 0
    for mask in masks:
        parts += mask.parts if isinstance(mask, kind) else (mask,)
        if isinstance(mask, _Combined):
            depth = max(depth, mask.depth - isinstance(mask, kind))
    if depth == _MAX_DEPTH:
        raise ValueError(
            f"masks may be combined {_MAX_DEPTH} deep by &, | and ~ in turns; any number by & alone, or by | "
            f"alone, stands side by side"
        )
    return kind(tuple(parts), depth + 1)


def _check_operand(sign: str, other: Any) -> None:
    if not isinstance(other, Mask):
        raise _not_a_mask(sign, other)


def _not_a_mask(sign: str, other: Any) -> TypeError:
    return TypeError(f"{sign} combines two masks, got {describe(other)}")


def describe(value: Any) -> str:
    """What stands in the place of a mask, and how to make one of it."""
    if isinstance(value, type):
        hint = f": make a mask of it, {value.__name__}(...)" if issubclass(value, Mask) else ""
        return f"the class {value.__name__}{hint}"
    if value is None:
        return "None: leave it out, or say Window(None, None), which allows every key"
    if callable(value):
        return (
            "a function: fastattn.create_block_mask makes a mask of it, "
            "and fastattn.flex_attention takes it as mask_mod="
        )
    is_array = hasattr(value, "shape") or isinstance(value, (list, tuple))
    return f"{type(value).__name__}{': make a mask of it, Dense(array)' if is_array else ''}"


def _same(a: Any, b: Any) -> bool:
    """Whether two arguments of masks are equal: arrays by shape and values, and tuples of such."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and (a is b or np.array_equal(a, b))
    if isinstance(a, DeviceArray) and isinstance(b, DeviceArray):
        return a.same_view(b)
    return bool(a == b)


def _hashable(value: Any) -> Any:
    """What stands for an argument in a hash: of an array its shape and first numbers."""
    return (value.shape, value.flat[:8].tobytes()) if isinstance(value, np.ndarray) else value


def _show(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return repr(value)
    return str(value.tolist()) if value.size <= 8 and value.ndim <= 1 else f"<{value.dtype} {value.shape}>"


def _drawing(index: np.ndarray) -> list[str]:
    """Lines of signs for a plane of tiles, 32 by 64 at most."""
    rows, keys = (-(-n // most) for n, most in zip(index.shape, (32, 64), strict=True))
    lines = []
    for row in range(0, index.shape[0], rows):
        parts = [index[row : row + rows, key : key + keys] for key in range(0, index.shape[1], keys)]
        signs = [
            "#" if (part == INDEX_FULL).all() else "." if (part == INDEX_EMPTY).all() else "+"
            for part in parts
        ]
        lines.append("".join(signs))
    return lines


def as_integer(value: Any, name: str, kind: str = "an integer") -> int:
    """`value` as an int; raises where it is none, or a bool."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be {kind}, got {value!r}") from None


def whole_number(value: Any, name: str) -> int:
    """An offset or a size as an int; raises where it is none."""
    number = as_integer(value, name, "a non-negative integer")
    if not 0 <= number < UNBOUNDED:
        raise ValueError(f"{name} must be a non-negative integer below 2**60, got {value!r}")
    return number


def _sizes(size: Any) -> tuple[int, int]:
    try:
        L, S = size
    except (TypeError, ValueError) as error:
        raise type(error)(f"size must be a pair (L, S), got {size!r}") from None
    return whole_number(L, "size: L"), whole_number(S, "size: S")


def _check_block(mask: Mask, block: Block, L: int, S: int) -> None:
    """ValueError unless a mask for `L` queries and `S` keys is for this problem, or has this block in it."""
    if block.whole is not None and block.whole != (L, S):
        raise ValueError(
            f"mask {mask!r} is for L={L} and S={S}, got L={block.whole[0]} and S={block.whole[1]}"
        )
    if block.q_start + block.L > L or block.k_start + block.S > S:
        raise _outside(mask, block, L, S)


def _outside(mask: Mask, block: Block, L: int, S: int) -> ValueError:
    return ValueError(
        f"mask {mask!r} is of a problem of L={L} and S={S}, and is shifted to queries "
        f"{block.q_start}..{block.q_start + block.L} and keys {block.k_start}..{block.k_start + block.S}"
    )


def _check_align(align: Any) -> None:
    if not isinstance(align, str) or align not in ("top_left", "bottom_right"):
        raise ValueError(f'align must be "top_left" or "bottom_right", got {align!r}')


def integers(value: ArrayLike, name: str, minimum: int | None = None, saturate: bool = False) -> np.ndarray:
    """A read-only, C-contiguous int64 copy of an integer array_like. Numbers beyond int64 are refused, or
    clipped where `saturate` is set."""
    array = host_array(value, name)
    if array.dtype.kind in "uO" and array.size:
        array = _within_int64(array, name, saturate)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name} must be integers, got dtype {array.dtype}")
    array = array.astype(np.int64, order="C")
    if minimum is not None and array.size and array.min() < minimum:
        raise ValueError(f"{name} must not be below {minimum}, got {array.min()}")
    array.flags.writeable = False
    return array


def _within_int64(array: np.ndarray, name: str, saturate: bool) -> np.ndarray:
    """Integers beyond int64, which NumPy holds as uint64 or as Python's; arrays without any as they are."""
    limits = np.iinfo(np.int64)
    if array.dtype.kind == "u" and array.max() <= limits.max:
        return array
    numbers = array.astype(object)
    if not all(isinstance(number, int) for number in numbers.flat):
        return array
    inside = np.asarray(np.clip(numbers, limits.min, limits.max), dtype=object)
    outside = numbers[inside != numbers]
    if outside.size and not saturate:
        raise ValueError(f"{name} must be in -2**63..2**63 - 1, got {outside[0]}")
    return inside.astype(np.int64) if outside.size else array


def broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether `shape` broadcasts to exactly `target`."""
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(n in (1, m) for n, m in pairs)


def axes_hint(shape: tuple[int, ...], scores: tuple[int, ...], name: str) -> str:
    """What to write for an array that does not broadcast to the scores, ``(*lead, H, L, S)``, where it would
    with more axes."""
    *lead, H, L, S = scores
    for kept, missing in ((2, 1), (1, 2)):  # (*lead, L, S) lacks H, and (*lead, S) lacks H and L
        items, rest = shape[:-kept], shape[-kept:]
        if items and broadcasts((*items, *(1,) * missing, *rest), scores):
            index = [":"] * len(items) + ["None"] * missing + [":"] * (kept == 1)
            return f"; where its leading axes are those of the items, say {name}[{', '.join(index)}]"
    if lead and len(shape) == 3 and shape[0] == prod(lead) * H and broadcasts(shape[1:], (L, S)):
        split = ", ".join(map(str, (*lead, H, *shape[1:])))
        return f"; where its first axis is that of items and heads, say {name}.reshape({split})"
    return ""


def has_zeros_and_ones(array: Any) -> bool:
    """Whether an array of floats is a mask in their guise; zeros alone may as well be a bias."""
    if isinstance(array, DeviceArray):
        return False
    ones = array == 1
    return bool(ones.any() and (ones | (array == 0)).all())


def _float_hint(array: Any) -> str:
    """What to write where a mask is an array of floats."""
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        return ""
    if has_zeros_and_ones(array):
        return "; a mask of zeros and ones is mask.astype(bool)"
    return "; for numbers added to the scores use bias=, else .astype(bool)"


def _check_fit(mask: Mask, shape: tuple[int, ...], lead: tuple[int, ...]) -> None:
    if not broadcasts(shape, lead):
        raise ValueError(
            f"mask {mask!r} of shape {shape} does not broadcast to the leading batch axes {lead}"
        )
