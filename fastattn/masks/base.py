"""What all masks share, how they combine, and how one is lowered to what kernels know."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import numpy as np

from fastattn._machine.device import host_array
from fastattn.masks.arguments import hashable, same, show, sizes, whole_number
from fastattn.masks.map import (
    All,
    AnyOf,
    Band,
    Block,
    DenseArray,
    Documents,
    Frozen,
    Intervals,
    Mapped,
    MaskMap,
    Node,
    Part,
    all_of,
    build_mask_map,
    intersect,
)

_MAX_DEPTH = 100  # of masks inside of each other: each takes a few of the 1000 calls that Python nests


class Value(Frozen):
    """A frozen object that equals those of its kind with the same arguments, and is shown as written."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return False if isinstance(other, Value) else NotImplemented
        if self is not other:
            for a, b in zip(self._values(), other._values(), strict=True):
                if a is not b and not same(a, b):
                    return False
        return True

    def __hash__(self) -> int:
        return hash((type(self), *map(hashable, self._values())))

    def _values(self) -> list[Any] | tuple[Any, ...]:
        """What two equal masks have in common."""
        return self.__getstate__()

    def __repr__(self) -> str:
        defaults = getattr(type(self).__init__, "__defaults__", None) or ()
        default_of = dict(zip(self.__slots__[::-1], defaults[::-1], strict=False))
        default_of |= getattr(type(self).__init__, "__kwdefaults__", None) or {}
        given: Any = zip(self.__slots__, self._values(), strict=True)
        shown = (f"{name}={show(value)}" for name, value in given if value is not default_of.get(name, self))
        return f"{type(self).__name__}({', '.join(shown)})"


class Mask(Value):
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
        return _combined(_And, self, other)

    def __or__(self, other: Mask) -> Mask:
        return _combined(_Or, self, other)

    __rand__, __ror__ = __and__, __or__  # of what is no mask, and so raise

    def __add__(self, other: object) -> NoReturn:
        raise TypeError(f"mask {self!r} is no number: use & (both), | (either) and ~ (not)")

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __add__

    def __invert__(self) -> Mask:
        return _combined(_Not, self)

    def __bool__(self) -> NoReturn:
        raise TypeError(
            f"mask {self!r} has no truth value, so `and`, `or` and `not` do not combine masks: "
            f"use & (both), | (either) and ~ (not)"
        )

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
        """The mask of a block of a larger problem, for which this mask is.

        Parameters
        ----------
        q_offset, k_offset : int
            The block's first query and key, not negative: query ``i`` and key ``j`` of the block are
            ``i + q_offset`` and ``j + k_offset`` of the larger problem.
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
        return self._shift(*offsets, None if size is None else sizes(size))

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
            check_inside(self._mask, part, *self._whole)
        return self._mask._bind(part)


class _Combined(Mask):
    """What `_And`, `_Or` and `_Not` share."""

    __slots__ = ("parts", "depth")
    sign: str
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

    sign = "&"

    def __repr__(self) -> str:
        return " & ".join(f"({part})" if isinstance(part, _Or) else repr(part) for part in self.parts)

    def _bind(self, block: Block) -> Node:
        return all_of([part._bind(block) for part in self.parts], block.S)


class _Or(_Combined):
    """What any part allows."""

    sign = "|"

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


def _combined(kind: type[_Combined], *masks: Mask) -> _Combined:
    """The masks combined. The parts of a mask of the same kind join the others."""
    parts: list[Mask] = []
    depth = 0
    for mask in masks:
        if not isinstance(mask, Mask):
            raise TypeError(f"{kind.sign} combines two masks, got {describe(mask)}")
        parts += mask.parts if isinstance(mask, kind) else (mask,)
        if isinstance(mask, _Combined):
            depth = max(depth, mask.depth - isinstance(mask, kind))
    if depth == _MAX_DEPTH:
        raise ValueError(
            f"masks may be combined {_MAX_DEPTH} deep by &, | and ~ in turns; any number by & alone, or by | "
            f"alone, stands side by side"
        )
    return kind(tuple(parts), depth + 1)


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
    if hasattr(value, "mask_mod"):  # of PyTorch
        return f"{type(value).__name__}: fastattn.create_block_mask makes a mask of its mask_mod"
    is_array = hasattr(value, "shape") or isinstance(value, (list, tuple))
    return f"{type(value).__name__}{': make a mask of it, Dense(array)' if is_array else ''}"


def check_inside(mask: Mask, block: Block, L: int, S: int) -> None:
    """ValueError unless the mask of `L` queries and `S` keys has this block in it."""
    q_stop, k_stop = block.q_start + block.L, block.k_start + block.S
    if q_stop > L or k_stop > S:
        raise ValueError(
            f"mask {mask!r} is of a problem of L={L} and S={S}, and is shifted to queries "
            f"{block.q_start}..{q_stop} and keys {block.k_start}..{k_stop}"
        )


# Lowering -----------------------------------------------------------------------------------------


class Lowered(NamedTuple):
    """A mask as kernels know it: what every part that is present allows."""

    key_start: np.ndarray | None = None  #: ``(*lead, L)`` int64 view, in 0..S
    key_stop: np.ndarray | None = None  #: ``(*lead, L)`` int64 view, ``key_start <= key_stop <= S``
    dense: Any = None  #: ``(*lead, H, L, S)`` view; bool or integer, non-zero = allowed; also on a GPU
    mask_map: MaskMap | None = None


def lower(
    mask: Mask,
    lead: tuple[int, ...],
    H: int,
    L: int,
    S: int,
    band: Band | None = None,
    documents: Documents | None = None,
) -> Lowered:
    """A mask for one problem size, within the documents of a packed one; ValueError where it does not fit.

    The `band` holds as well: tiles of the mask map that it leaves empty may be EMPTY there too.
    """
    node = mask._bind(Block(lead, H, L, S, whole=(L, S), documents=documents))
    if documents is not None:
        node = all_of([documents.keys, node], S)
    nodes = node.parts if isinstance(node, All) else [node]
    intervals = [part for part in nodes if isinstance(part, Intervals)]  # at most one, see `all_of`
    others = [part for part in nodes if not isinstance(part, Intervals)]

    key_start = key_stop = dense = mask_map = None
    if intervals:
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
