"""Parts of mask objects beside parts of their arrays, of problems of 2 items and 2 heads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

import numpy as np

from fastattn.masks import BlockMask, Dense, base
from fastattn.masks.map import INDEX_EMPTY, INDEX_FULL, TILE_K, TILE_Q, Part

#: Sizes of a whole problem, and of blocks of it: its first query and key, and its own sizes.
BLOCKS = {
    (9, 7): [(0, 0, 9, 7), (1, 2, 3, 4), (8, 6, 1, 1), (4, 0, 0, 7), (9, 7, 0, 0)],
    (200, 300): [
        (0, 0, 64, 128),
        (TILE_Q, TILE_K, 70, 130),
        (3, 1, 130, 260),
        (77, 45, 123, 255),
        (130, 250, 70, 50),
        (199, 299, 1, 1),
    ],
}


def part_of(allowed: np.ndarray, block: tuple[int, int, int, int]) -> np.ndarray:
    row, key, len_q, len_k = block
    return allowed[..., row : row + len_q, key : key + len_k]


def block_mask(allowed: np.ndarray) -> BlockMask:
    """The same as a map of tiles, as `create_block_mask` makes it."""
    batch, heads, len_q, len_k = allowed.shape
    lowered = base.lower(Dense(allowed) | Dense(allowed), (batch,), heads, len_q, len_k)
    return BlockMask(lowered.mask_map, batch, heads, len_q, len_k)


def as_array(lowered: base.Lowered, shape: tuple[int, ...]) -> np.ndarray:
    """What `base.lower` gives as an array ``(B, H, L, S)``, from its documented format alone."""
    allowed, key = np.ones(shape, bool), np.arange(shape[-1])
    if lowered.key_start is not None:
        inside = (lowered.key_start[..., None] <= key) & (key < lowered.key_stop[..., None])
        allowed &= inside[:, None]
    if lowered.dense is not None:
        allowed &= lowered.dense != 0
    if lowered.mask_map is not None:
        bits = np.unpackbits(lowered.mask_map.bits.astype("<u4").view(np.uint8), axis=-1, bitorder="little")
        for (b, h, t, u), index in np.ndenumerate(lowered.mask_map.index):
            tile = allowed[b, h, t * TILE_Q : (t + 1) * TILE_Q, u * TILE_K : (u + 1) * TILE_K]
            if index == INDEX_EMPTY:
                tile[...] = False
            elif index != INDEX_FULL:
                tile &= bits[index][: tile.shape[0], : tile.shape[1]] != 0
    return allowed


def parts_of(whole: tuple[int, int], n_keys: int = 3) -> Iterator[tuple[Part, list[slice]]]:
    """Parts whose bounds are no tile's, with the slices of blocks of keys."""
    len_q, len_k = whole
    rows = [slice(0, len_q), slice(len_q // 3, len_q // 3 + 1), slice(len_q // 2, len_q)]
    ends = np.linspace(0, len_k, n_keys + 1).astype(int).tolist()
    blocks = [slice(*ends) for ends in pairwise(ends)]
    for items, heads, queries in product([slice(0, 2), slice(1, 2)], [slice(0, 2), slice(1, 2)], rows):
        yield Part((2,), (items,), heads, queries, slice(0, len_k), whole), blocks
