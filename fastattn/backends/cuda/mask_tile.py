"""One tile of keys: which of them each row may attend to. No other part of the kernel knows masks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from fastattn.backends.cuda.form import Form
from fastattn.backends.cuda.tiles import U, element, place
from fastattn.masks.map import INDEX_FULL, TILE_K, TILE_Q, WORDS


def maps_to_keys(form: Form) -> Any:
    """Whether the mask map lets any row of the block attend to any of n_keys keys."""
    TILE_ROWS, THREADS = form.shape.tile_q, form.shape.num_threads

    @cuda.jit(device=True)
    def maps_to_keys(masks, mask_views, rows, block, key0, n_keys, thread):
        tile_index, view = masks[3], mask_views[3]
        found = np.int32(0)
        for row in range(thread.number, TILE_ROWS, THREADS):
            line = element(view, block.item, rows.heads[row], rows.queries[row] // TILE_Q)
            for key in range(key0 // TILE_K, (key0 + n_keys - 1) // TILE_K + 1):
                if tile_index[U(line + key * view[4])] >= INDEX_FULL:
                    found = np.int32(1)
        return cuda.syncthreads_or(found) != 0

    return maps_to_keys


def allowed_bits(form: Form, mask_mod: Any) -> Any:
    """Which of a thread's scores are allowed: a bit for each, row by row.

    Bits, because this loop is not unrolled and so cannot index registers.
    """
    shape, HAS_DENSE, HAS_MASK_MAP = form.shape, form.has_dense, form.has_mask_map
    ROWS, KEYS, THREADS_Q, THREADS_K = shape.rows, shape.keys, shape.threads_q, shape.threads_k
    HAS_MASK_MOD, in_tile = form.has_mask_mod, place(shape)

    @cuda.jit(device=True)
    def allowed_bits(masks, mask_views, aux, rows, block, keys, key0, thread):
        _, _, dense, tile_index, tile_bits = masks
        _, _, dense_view, index_view = mask_views
        bits = U(0)
        for n in range(ROWS * KEYS):
            row, key = in_tile(n // KEYS, thread.y, THREADS_Q), key0 + in_tile(n % KEYS, thread.x, THREADS_K)
            head, query = np.int64(rows.heads[row]), np.int64(rows.queries[row])
            allowed = max(rows.starts[row], keys.low) <= key < min(rows.stops[row], keys.high)
            if HAS_DENSE and allowed:
                line = element(dense_view, block.item, head, query)
                allowed = dense[U(line + key * dense_view[4])] != 0
            if HAS_MASK_MAP and allowed:
                line = element(index_view, block.item, head, query // TILE_Q)
                entry = tile_index[U(line + key // TILE_K * index_view[4])]
                allowed = entry == INDEX_FULL
                if entry >= 0:
                    word = tile_bits[U((entry * TILE_Q + query % TILE_Q) * WORDS + key % TILE_K // 32)]
                    allowed = (word >> np.uint32(key % 32)) & np.uint32(1) != 0
            if HAS_MASK_MOD and allowed:
                allowed = mask_mod(block.named_item, head, query, key, *aux)
            if allowed:
                bits |= U(1) << U(n)
        return bits

    return allowed_bits
