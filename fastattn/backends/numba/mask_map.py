"""The tile map of a function: which keys each query may attend to, evaluated tile by tile on every core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from numba import types

from fastattn._mask_map import EMPTY, FULL, INDEX_EMPTY, INDEX_FULL, PARTIAL, TILE_K, TILE_Q, WORDS, MaskMap
from fastattn.backends.numba.codegen.calls import compile_function
from fastattn.backends.numba.codegen.intrinsics import call_allowed, fetch_add, int8s, int64s, uint32s
from fastattn.backends.numba.mask_tile import span_word
from fastattn.backends.numba.modify import aux_words, mask_loop
from fastattn.backends.numba.threads import on_pool, thread_limit
from fastattn.backends.numba.work import run_work

#: MaskMap that are evaluated at a time: 4 MB of bits.
BATCH_TILES = 4096

#: Places in the words that `_evaluate` works on.
_LOOP, _AUX, _NEXT, _STOP, _HEADS, _GRID_Q, _GRID_K, _LEN_Q, _LEN_K, _FIRST, _BITS, _STATES, _FLAGS = range(
    13
)


def evaluate(
    function: Callable[..., Any], aux: Sequence[Any], B: int, H: int, L: int, S: int, num_threads: int
) -> MaskMap:
    """The tile map of ``function(b, h, q_idx, kv_idx, *aux)``, of index ``(B, H, ...)``.

    Raises
    ------
    TypeError, ValueError
        The function cannot be compiled, or raises.
    """
    grid = (-(-L // TILE_Q), -(-S // TILE_K))
    n_tiles = B * H * grid[0] * grid[1]
    index = np.empty(n_tiles, np.int32)
    bits = np.empty((min(n_tiles, BATCH_TILES), TILE_Q, WORDS), np.uint32)
    states = np.empty(len(bits), np.int8)
    values = aux_words(aux)
    wanted = max(1, min(thread_limit(num_threads), n_tiles))
    flags = np.zeros((wanted, TILE_K), np.uint8)
    words = np.zeros(13, np.int64)
    words[_LOOP], words[_AUX] = mask_loop(function, aux), values.ctypes.data
    words[_HEADS], words[_GRID_Q], words[_GRID_K], words[_LEN_Q], words[_LEN_K] = H, *grid, L, S
    words[_BITS], words[_STATES], words[_FLAGS] = (array.ctypes.data for array in (bits, states, flags))
    run = partial(run_work, _evaluate_address(), words.ctypes.data, 0)
    kept, count = [], 0
    for first in range(0, n_tiles, BATCH_TILES):
        stop = min(n_tiles, first + BATCH_TILES)
        words[_NEXT], words[_STOP], words[_FIRST] = first, stop, first
        on_pool(wanted, run)
        found = states[: stop - first]
        part = index[first:stop]
        part[found == EMPTY], part[found == FULL] = INDEX_EMPTY, INDEX_FULL
        some = np.flatnonzero(found == PARTIAL)
        part[some] = np.arange(count, count + len(some))
        kept.append(bits[some])
        count += len(some)
    together = np.concatenate(kept) if kept else bits[:0]
    return MaskMap(index.reshape(B, H, *grid), together)


@cache
def _evaluate_address() -> int:
    return int(compile_function(_evaluate, types.intp(*[types.intp] * 4)).address or 0)


def _evaluate(words, shares, thread, num_threads):
    """What one thread does, as `work`: tiles that no other has begun."""
    job, states = int64s(words), int8s(int64s(words)[_STATES])
    flags = job[_FLAGS] + thread * TILE_K
    while True:
        tile = fetch_add(words + 8 * _NEXT, 1)
        if tile >= job[_STOP]:
            return 0
        slot = tile - job[_FIRST]
        to = job[_BITS] + slot * TILE_Q * WORDS * 4
        u, rest = tile % job[_GRID_K], tile // job[_GRID_K]
        t, plane = rest % job[_GRID_Q], rest // job[_GRID_Q]
        n_rows = min(TILE_Q, job[_LEN_Q] - t * TILE_Q)
        n_keys = min(TILE_K, job[_LEN_K] - u * TILE_K)
        call_allowed(job[_LOOP], to, flags, plane // job[_HEADS], plane % job[_HEADS], t * TILE_Q, n_rows,
                     u * TILE_K, n_keys, job[_AUX])  # fmt: skip
        bits, some, every = uint32s(to), False, True
        for r in range(n_rows):
            for word in range(WORDS):
                one = bits[r * WORDS + word]
                some |= one != 0
                every &= one == span_word(0, n_keys - 32 * word)
        for i in range(n_rows * WORDS, TILE_Q * WORDS):
            bits[i] = 0
        states[slot] = FULL if every else PARTIAL if some else EMPTY
