"""One tile of keys: which of them each row may attend to. No other part of the kernel knows masks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from fastattn.backends.cuda.form import Form
from fastattn.backends.cuda.intrinsics import U, memory
from fastattn.backends.cuda.tiles import apart, element
from fastattn.masks.map import EMPTY, FULL, INDEX_EMPTY, INDEX_FULL, PARTIAL, TILE_K, TILE_Q, WORDS


def map_state(form: Form) -> Any:
    """What the mask map lets the rows of the block attend to in a tile of keys: EMPTY, PARTIAL or FULL."""
    TILE_ROWS, entries = form.shape.tile_q, memory("int32")

    @cuda.jit(device=True)
    def map_state(masks, rows, block, key0, thread):
        view = masks[4]
        tile_index = entries(view)
        row = U(thread.number % TILE_ROWS)
        line = element(view, block.item, rows.heads[row], rows.queries[row] // TILE_Q)
        entry = tile_index[U(line + key0 // TILE_K * view[4])]
        if cuda.syncthreads_or(np.int32(entry != INDEX_EMPTY)) == 0:
            return EMPTY
        return PARTIAL if cuda.syncthreads_or(np.int32(entry != INDEX_FULL)) != 0 else FULL

    return map_state


def map_bits(form: Form) -> Any:
    """Which keys of a thread the mask map allows a row: a bit for each. The first of them is `first`."""
    shape = form.shape
    VECTOR, GROUPS, APART = shape.vector, shape.keys // shape.vector, shape.vector * shape.threads_k
    GROUP = U((1 << VECTOR) - 1)  # adjacent keys, in one word
    entries, words = memory("int32"), memory("uint32")

    @cuda.jit(device=True)
    def map_bits(masks, block, head, query, first):
        view = masks[4]
        tile_index, tile_bits = entries(view), words(masks[5])
        line = element(view, block.item, head, query // TILE_Q)
        entry = tile_index[U(line + first // TILE_K * view[4])]
        bits = U(0)
        for group in range(GROUPS):
            here = GROUP if entry == INDEX_FULL else U(0)
            if entry >= 0:
                key = first % TILE_K + group * APART
                word = tile_bits[U((entry * TILE_Q + query % TILE_Q) * WORDS + key // 32)]
                here = U(word >> np.uint32(key % 32)) & GROUP
            bits |= here << U(group * VECTOR)
        return bits

    return map_bits


def allowed_bits(form: Form, mask_mod: Any) -> Any:
    """Which of a thread's scores are allowed: a bit for each, row by row.

    Bits, because the loop over rows is not unrolled and so cannot index registers.
    """
    shape, HAS_DENSE, HAS_MASK_MAP = form.shape, form.has_dense, form.has_mask_map
    ROWS, KEYS, THREADS_Q, THREADS_K = shape.rows, shape.keys, shape.threads_q, shape.threads_k
    VECTOR, ROW_VECTOR = shape.vector, shape.row_vector
    HAS_MASK_MOD, row_offset, offset = form.has_mask_mod, apart(ROW_VECTOR), apart(VECTOR)
    bits_of_map, ALL, elements = map_bits(form), U((1 << shape.keys) - 1), memory(form.stored.dense)

    @cuda.jit(device=True)
    def allowed_bits(masks, aux, rows, block, keys, key0, thread):
        view, bits = masks[3], U(0)
        first, low, high = key0 + thread.x * VECTOR, np.int32(keys.low), np.int32(keys.high)
        for i in range(ROWS):
            row = U(thread.y * ROW_VECTOR) + row_offset(i, THREADS_Q)
            head, query = np.int64(rows.heads[row]), np.int64(rows.queries[row])
            start = np.int32(max(rows.starts[row], low) - first)
            stop = np.int32(min(rows.stops[row], high) - first)
            line, given = 0, ALL
            if HAS_DENSE:
                line = element(view, block.item, head, query) + first * view[4]
            if HAS_MASK_MAP:
                given = bits_of_map(masks, block, head, query, first)
            here = U(0)
            for c in range(KEYS):
                key = np.int64(offset(c, THREADS_K))  # from `first` on
                allowed = start <= np.int32(key) < stop and given >> U(c) & U(1) != U(0)
                if HAS_DENSE and allowed:
                    allowed = elements(view)[U(line + key * view[4])] != 0
                if HAS_MASK_MOD and allowed:
                    allowed = mask_mod(block.named_item, head, query, first + key, *aux)
                if allowed:
                    here |= U(1) << U(c)
            bits |= here << U(i * KEYS)
        return bits

    return allowed_bits
