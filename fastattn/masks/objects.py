"""The mask objects; `fastattn.masks` has the public names."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fastattn._machine.device import as_device_array, broadcast_to, converted, cut
from fastattn.masks.arguments import (
    LIMIT,
    axes_hint,
    broadcasts,
    check_align,
    float_hint,
    integers,
    per_axis,
    positive_integer,
    true_or_false,
    window_bound,
)
from fastattn.masks.base import Mask, _Shifted, check_inside
from fastattn.masks.map import (
    INDEX_EMPTY,
    INDEX_FULL,
    TILE_K,
    TILE_Q,
    UNBOUNDED,
    Axis,
    Block,
    Cross,
    DenseArray,
    Mapped,
    MappedPart,
    MaskMap,
    Neighbors,
    Node,
    Part,
    SameId,
    bounded,
    intervals_of,
    make_intervals,
    segment_runs,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

Align = Literal["top_left", "bottom_right"]


class _PerItem(Mask):
    """One whose last slot has a number for each batch item, or one for all, or is None."""

    __slots__ = ()

    @property
    def _lead(self) -> tuple[int, ...]:
        return np.shape(self._values()[-1])

    def _cut(self, part: Part) -> Mask:
        *others, numbers = self._values()
        own = type(self).__new__(type(self))
        own._set(*others, None if numbers is None else part.of_items(numbers))
        return _Shifted(own, part.queries.start, part.keys.start, part.whole)


class Causal(_PerItem):
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

    def __init__(self, align: Align | None = None, offset: ArrayLike | None = None) -> None:
        if align is not None:
            check_align(align)
        if offset is not None:
            if align is not None:
                raise ValueError(
                    f"Causal takes align or offset, not both; got align={align!r}, offset={offset!r}"
                )
            offset = integers(offset, "Causal: offset", saturate=True)
        self._set(align, offset)

    def _bind(self, block: Block) -> Node:
        if self.offset is not None:
            _check_fit(self, block)
            # Clipped so that no sum overflows: beyond these bounds nothing changes any more.
            offset = np.clip(self.offset, -(block.q_start + block.L), block.k_start + block.S)[..., None]
        elif self.align == "bottom_right":
            offset = block.at_end
        else:
            offset = 0
            if self.align is None and block.whole is not None and np.any(block.at_end):
                L, S = block.whole
                got = f", got L={L} and S={S}"
                if block.documents is not None:
                    got = f" in each document, got S - L = {block.at_end[block.at_end != 0][0]} in one"
                raise ValueError(
                    f"mask {self!r} needs L == S{got}; say "
                    f'Causal(align="top_left") or Causal(align="bottom_right")'
                )
        return make_intervals(0, block.queries + (1 - block.k_start) + offset, block.S)

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
        check_align(align)
        self._set(left, right, align)

    def _bind(self, block: Block) -> Node:
        position = block.queries + ((0 if self.align == "top_left" else block.at_end) - block.k_start)
        far = 2 * UNBOUNDED  # beyond any position: where a block begins is less than UNBOUNDED
        left, right = bounded(self.left, far), bounded(self.right, far)
        return make_intervals(position - left, position + (right + 1), block.S)

    def _is_aligned_to_end(self) -> bool:
        return self.align == "bottom_right"


class KeyLengths(_PerItem):
    """Key ``j`` is allowed when ``j < length`` of the batch item.

    Parameters
    ----------
    lengths : int or array_like of int
        In ``0..S``, broadcast to the leading batch axes.
    """

    __slots__ = ("lengths",)
    lengths: Any

    def __init__(self, lengths: ArrayLike) -> None:
        self._set(integers(lengths, "KeyLengths: lengths", minimum=0))

    def _bind(self, block: Block) -> Node:
        _check_items(self, block)
        if block.whole is not None and self.lengths.size and self.lengths.max() > block.whole[1]:
            raise ValueError(
                f"mask {self!r}: lengths must be in 0..S={block.whole[1]}, got {self.lengths.max()}"
            )
        return make_intervals(0, self.lengths[..., None] - block.k_start, block.S)


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

    def __init__(self, q_ids: ArrayLike, k_ids: ArrayLike | None = None) -> None:
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
        _check_fit(self, block)
        _check_block(self, block, q_ids.shape[-1], k_ids.shape[-1])
        q_ids = q_ids[..., block.q_start : block.q_start + block.L]
        k_ids = k_ids[..., block.k_start : block.k_start + block.S]
        runs = segment_runs(q_ids, k_ids)
        return SameId(q_ids, k_ids) if runs is None else make_intervals(*runs, block.S)

    def _cut(self, part: Part) -> Mask:
        q_ids, k_ids = self.q_ids, self.q_ids if self.k_ids is None else self.k_ids
        return Segments(part.of_items(q_ids, 1)[..., part.queries], part.of_items(k_ids, 1)[..., part.keys])


class PrefixLM(_PerItem):
    """Key ``j`` is allowed for query ``i`` when ``j < prefix`` or ``j <= i + S - L``.

    Parameters
    ----------
    prefix_lengths : int or array_like of int
        Not negative, broadcast to the leading batch axes. A prefix longer than `S` is all of `S`.
    """

    __slots__ = ("prefix_lengths",)
    prefix_lengths: Any

    def __init__(self, prefix_lengths: ArrayLike) -> None:
        self._set(integers(prefix_lengths, "PrefixLM: prefix_lengths", minimum=0, saturate=True))

    def _bind(self, block: Block) -> Node:
        _check_items(self, block)
        stop = np.maximum(self.prefix_lengths[..., None], block.queries + (block.at_end + 1))
        return make_intervals(0, stop - block.k_start, block.S)

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

    def __init__(self, index: ArrayLike) -> None:
        index = integers(index, "GlobalTokens: index", minimum=0)
        if index.ndim != 1:
            raise ValueError(f"GlobalTokens: index must have shape (n,), got {index.shape}")
        self._set(index)

    def _bind(self, block: Block) -> Node:
        if block.whole is not None and self.index.size and self.index.max() >= block.whole[1]:
            raise ValueError(f"mask {self!r}: index must be below S={block.whole[1]}, got {self.index.max()}")
        keys = np.arange(block.k_start, block.k_start + block.S)
        rows = block.queries + block.at_end
        if block.documents is not None:
            rows[rows < block.documents.first] = -1  # before its document's keys, among those of another
        return Cross(np.isin(rows, self.index), np.isin(keys, self.index))

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


class Neighborhood(Mask):
    """Key ``j`` is allowed for query ``i`` when it is in the window of ``i`` along each axis of an image.

    Neighborhood attention, by NATTEN's rule, for any layout of tokens in one to three dimensions.

    Parameters
    ----------
    shape : int or tuple of 1 to 3 ints
        The layout, whose tokens are in C order: ``L`` and ``S`` must be their number, ``prod(shape)``.
    kernel : int or tuple of int
        Size of the windows, along all axes or along each, odd or even; ``kernel * dilation`` is at most
        `shape`.
    dilation : int or tuple of int, default 1
        A window has every so many of the coordinates: those with the same remainder modulo `dilation` as the
        query's are a group, which holds the window, and to which the rule applies as to an axis of its own.
    causal : bool or tuple of bool, default False
        Along these axes a window ends with the query's coordinate.

    Raises
    ------
    TypeError
        A size that is not an integer, or `causal` that is not a bool.
    ValueError
        One that is not positive, more than three axes, a tuple for another number of axes than `shape` has,
        or windows that do not fit `shape`. When it is used: other numbers of queries or keys than
        ``prod(shape)``, and packed documents.

    Notes
    -----
    A window begins ``kernel // 2`` coordinates before the query's. At both ends of an axis it is shifted
    inward, so that each query has ``kernel`` keys along it. Along `causal` axes it has the last ``kernel``
    coordinates up to the query's, or as many as there are. This is the mask of natten 0.17 and later, with a
    stride of 1. One axis of 6 tokens, ``kernel=3``::

        dilation 1     dilation 2     causal
        x x x . . .    x . x . x .    x . . . . .
        x x x . . .    . x . x . x    x x . . . .
        . x x x . .    x . x . x .    x x x . . .
        . . x x x .    . x . x . x    . x x x . .
        . . . x x x    x . x . x .    . . x x x .
        . . . x x x    . x . x . x    . . . x x x

    One axis without dilation lowers to intervals, also as the first of several, if windows are as long as
    the others: frames of a video, each of which sees all of the last few. Others lower to tiles.

    References
    ----------
    Hassani et al., "Neighborhood Attention Transformer", CVPR 2023. Hassani and Shi, "Dilated Neighborhood
    Attention Transformer", 2022.

    Examples
    --------
    The keys of the first and the fifth token of a layout of 3 by 4:

    >>> from fastattn.masks import Neighborhood
    >>> Neighborhood((3, 4), 2).materialize(1, 12, 12)[0, [0, 5]].reshape(2, 3, 4).astype(int)
    array([[[1, 1, 0, 0],
            [1, 1, 0, 0],
            [0, 0, 0, 0]],
    <BLANKLINE>
           [[1, 1, 0, 0],
            [1, 1, 0, 0],
            [0, 0, 0, 0]]])
    """

    __slots__ = ("shape", "kernel", "dilation", "causal")
    shape: tuple[int, ...]
    kernel: int | tuple[int, ...]
    dilation: int | tuple[int, ...]
    causal: bool | tuple[bool, ...]

    def __init__(
        self,
        shape: int | Sequence[int],
        kernel: int | Sequence[int],
        *,
        dilation: int | Sequence[int] = 1,
        causal: bool | Sequence[bool] = False,
    ) -> None:
        n_axes = 1 if np.ndim(shape) == 0 else len(shape)  # type: ignore[arg-type]
        if not 1 <= n_axes <= 3:
            raise ValueError(f"Neighborhood: shape must have 1 to 3 axes, got {shape!r}")
        sizes, kernel, dilation = (
            per_axis(value, f"Neighborhood: {name}", positive_integer, n_axes)
            for name, value in (("shape", shape), ("kernel", kernel), ("dilation", dilation))
        )
        causal = per_axis(causal, "Neighborhood: causal", true_or_false, n_axes)
        self._set(sizes if isinstance(sizes, tuple) else (sizes,), kernel, dilation, causal)
        if prod(self.shape) >= UNBOUNDED:
            raise ValueError(f"Neighborhood: shape must have fewer than {LIMIT} tokens, got {shape!r}")
        if any(axis.kernel * axis.dilation > axis.size for axis in self._axes()):
            raise ValueError(
                f"Neighborhood: kernel * dilation must be at most shape along each axis, got "
                f"kernel={kernel}, dilation={dilation} and shape={self.shape}"
            )

    def _axes(self) -> list[Axis]:
        n_axes = len(self.shape)
        strides = [prod(self.shape[axis + 1 :]) for axis in range(n_axes)]
        others = (self.kernel, self.dilation, self.causal)
        spread = (value if isinstance(value, tuple) else (value,) * n_axes for value in others)
        return [Axis(*of_axis) for of_axis in zip(self.shape, strides, *spread, strict=True)]

    def _bind(self, block: Block) -> Node:
        if block.documents is not None:
            raise ValueError(
                f"mask {self!r} is of one layout of tokens, not of packed documents: say which keys it "
                f"means by Dense(array)"
            )
        n_tokens, axes = prod(self.shape), self._axes()
        _check_block(self, block, n_tokens, n_tokens)
        axes = [axis for axis in axes if not axis.is_whole] or axes[:1]
        first = axes[0]
        if len(axes) == 1 and first.dilation == 1 and first.size * first.stride == n_tokens:
            ends = first.window(first.coordinates(block.queries))
            start, stop = (end * first.stride - block.k_start for end in ends)
            return make_intervals(start, stop, block.S)
        return Neighbors(axes, block.q_start, block.k_start)


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

    def __init__(self, array: ArrayLike) -> None:
        on_gpu: Any = as_device_array(array, "mask")
        array = converted(array, "mask") if on_gpu is None else on_gpu
        if array.dtype.kind not in "biu":
            raise TypeError(
                f"mask must be a fastattn.masks object or a bool or integer array, got dtype {array.dtype}"
                f"{float_hint(array)}"
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
        check_inside(self, block, L, S)
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
        drawing = _drawing(self.mask_map.index[0, 0]) if self.mask_map.index.size else []
        return "\n".join([repr(self), *drawing])

    def _values(self) -> tuple[Any, ...]:
        return (self.B, self.H, self.L, self.S, self.mask_map.index, self.mask_map.bits)

    @property
    def _lead(self) -> tuple[int, ...]:
        return () if self.B == 1 else (self.B,)

    def _bind(self, block: Block) -> Node:
        items = prod(block.lead)
        L, S = block.whole or (self.L, self.S)
        if self.B not in (1, items) or self.H not in (1, block.H) or (self.L, self.S) != (L, S):
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


def _check_block(mask: Mask, block: Block, L: int, S: int) -> None:
    """ValueError unless a mask for `L` queries and `S` keys is for this problem, or has this block in it."""
    if block.whole is not None and block.whole != (L, S):
        raise ValueError(
            f"mask {mask!r} is for L={L} and S={S}, got L={block.whole[0]} and S={block.whole[1]}"
        )
    check_inside(mask, block, L, S)


def _check_fit(mask: Mask, block: Block) -> None:
    if not broadcasts(mask._lead, block.lead):
        raise ValueError(
            f"mask {mask!r} of shape {mask._lead} does not broadcast to the leading batch axes {block.lead}"
        )


def _check_items(mask: Mask, block: Block) -> None:
    """`_check_fit` for a mask that counts keys from the first of an item, which documents share."""
    if block.documents is not None:
        raise ValueError(
            f"mask {mask!r} counts keys from the first of a batch item, not of a document: for packed "
            f"documents say which keys it means by Dense(array), of shape (T_k,)"
        )
    _check_fit(mask, block)
