"""The mask map of a function: which keys each query may attend to, evaluated tile by tile on every core."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from fastattn._call.problem import Mod
from fastattn.backends.jit.functions import mask_loop
from fastattn.backends.jit.messages import needs_size
from fastattn.masks.map import INDEX_EMPTY, INDEX_FULL, TILE_K, TILE_Q, WORDS, MaskMap

#: Tiles of a batch, whose bits take 4 MB, and tiles that a thread takes at a time.
BATCH_TILES, STEP_TILES = 4096, 16

_LOOP = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 8)


def evaluate(mod: Mod, sizes: Sequence[int | None], num_threads: int) -> MaskMap:
    """The mask map of a mask_mod: one plane for all items or heads where it does not depend on their index.

    sizes: B, H, L and S; B and H may be None where it does not.

    Raises
    ------
    TypeError, ValueError
        The function cannot be compiled, or raises, or depends on the index of what is None.
    IndexError
        It reads outside of an array.
    """
    loop = mask_loop(mod)
    for name, n in zip("bh", sizes, strict=False):
        if n is None and name in loop.reads:
            raise ValueError(needs_size("mask_mod", mod.function, name))
    B, H, L, S = (1 if n is None else n for n in sizes)
    B, H = (n if name in loop.reads else min(n, 1) for name, n in (("b", B), ("h", H)))
    grid = (-(-L // TILE_Q), -(-S // TILE_K))
    n_tiles = B * H * grid[0] * grid[1]
    index = np.empty(n_tiles, np.int32)
    bits = np.empty((min(n_tiles, BATCH_TILES), TILE_Q, WORDS), np.uint32)
    call, words = _LOOP(loop.address), loop.words(mod)
    aux = words.buffer_info()[0]

    def tiles(start: int, stop: int) -> int:
        """Writes the bits of the tiles start .. stop - 1 of a batch to `bits`; what the loop returned."""
        flags = (ctypes.c_uint8 * TILE_K)()
        to = bits.ctypes.data + start % BATCH_TILES * bits.strides[0]
        return call(to, ctypes.addressof(flags), start, stop, H, *grid, L, S, aux)

    kept, count = [], 0
    full = _full_tiles(L - (grid[0] - 1) * TILE_Q, S - (grid[1] - 1) * TILE_K)
    for first in range(0, n_tiles, BATCH_TILES):
        stop = min(n_tiles, first + BATCH_TILES)
        loop.check(_on_threads(tiles, first, stop, num_threads), (B, H, L, S), mod)
        found = bits[: stop - first]
        entries = index[first:stop]
        is_empty = ~found.any((1, 2))
        is_full = (found == full[_shapes(grid, first, stop)]).all((1, 2))
        entries[is_empty], entries[is_full] = INDEX_EMPTY, INDEX_FULL
        partial = np.flatnonzero(~is_empty & ~is_full)
        entries[partial] = np.arange(count, count + len(partial))
        kept.append(found[partial])
        count += len(partial)
    together = np.concatenate(kept) if kept else bits[:0]
    return MaskMap(index.reshape(B, H, *grid), together)


def _on_threads(tiles: Callable[[int, int], int], first: int, stop: int, num_threads: int) -> int:
    """Evaluates the tiles first .. stop - 1 on num_threads threads; the OR of what the loops returned."""
    starts = itertools.count(first, STEP_TILES)  # next() on it is atomic
    returned = []

    def work() -> None:
        while (start := next(starts)) < stop:
            returned.append(tiles(start, min(start + STEP_TILES, stop)))

    others = min(num_threads, -(-(stop - first) // STEP_TILES)) - 1
    threads = [threading.Thread(target=work, daemon=True) for _ in range(others)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    return int(np.bitwise_or.reduce(returned, initial=0))


@lru_cache(maxsize=64)
def _full_tiles(last_rows: int, last_keys: int) -> np.ndarray:
    """The bits of a full tile: inside, at the last keys, at the last rows, and at both."""
    tiles = np.zeros((4, TILE_Q, TILE_K), np.uint8)
    for number, (rows, keys) in enumerate(itertools.product((TILE_Q, last_rows), (TILE_K, last_keys))):
        tiles[number, :rows, :keys] = 1
    return np.packbits(tiles, axis=-1, bitorder="little").view("<u4").astype(np.uint32)


def _shapes(grid: tuple[int, int], first: int, stop: int) -> np.ndarray:
    """Which of `_full_tiles` each of the tiles first .. stop - 1 is compared with."""
    tile = np.arange(first, stop)
    is_last_row = tile // max(grid[1], 1) % max(grid[0], 1) == grid[0] - 1
    return 2 * is_last_row + (tile % max(grid[1], 1) == grid[1] - 1)
