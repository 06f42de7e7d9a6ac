"""One key tile: which of its keys each row may attend to, and its scores.

What bias and masks add to scores is a tile of its own, `extra`: the bias, or 0, and -inf where the key is
masked or the bias is -inf. Scores become -inf there, whatever they were.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from fastattn.backends.numba.blocks import copy_row, counts_of, extra_of, head_of, rows_of, scores_of, view_of
from fastattn.backends.numba.calls import OPTIONS, stage
from fastattn.backends.numba.epilogue import adjust_scores, note_masked
from fastattn.backends.numba.kernels import fill
from fastattn.backends.numba.layout import BIAS, DENSE, KEY, MASK_INDEX, VALUE
from fastattn.backends.numba.register_tile import ROWS, multiply_rows, prefetch_row, transpose
from fastattn.backends.numba.row_kernels import PREFETCHED_ROWS, SCORE_COLUMNS, score_rows
from fastattn.backends.numba.vectors import tile_at
from fastattn.masks.map import INDEX_EMPTY, INDEX_FULL

WORD = 32  #: keys whose mask bits are in one word


@stage
def score_tile(job, block, key0, n_keys):
    """Scores of the keys from key0 on, -inf where masked. Returns 0 where no row may attend any of them."""
    block.is_partial = 0
    if job.has_extra and mask_tile(job, block, key0, n_keys) == 0:
        return 0
    if job.uses_rows:
        score_rows(job, block, key0, n_keys)
    else:
        score_keys(job, block, key0, n_keys)
    adjust_scores(job, block, key0, n_keys)
    if job.has_score_mod and (job.is_safe or job.has_weights):
        note_masked(job, block, n_keys, 0)
    return 1


@stage
def score_keys(job, block, key0, n_keys):
    """S^T = K Q^T in register tiles."""
    keys = head_of(job, block, KEY)[key0 : key0 + n_keys]
    values = head_of(job, block, VALUE)[key0 : key0 + n_keys]
    scores, query = scores_of(job, block), tile_at(job.zero, block.query, (job.head_dim, block.n_lanes))
    if job.head_dim == 0:
        fill(job, scores, n_keys, job.zero)
    for row in range(0, n_keys, ROWS):
        # Register tiles read rows column by column. No hardware prefetcher follows that.
        for ahead in range(row, min(row + ROWS, n_keys)):
            prefetch_row(keys, ahead + PREFETCHED_ROWS)
            prefetch_row(values, ahead)
        for column in range(0, job.head_dim, SCORE_COLUMNS):
            stop = min(column + SCORE_COLUMNS, job.head_dim)
            multiply_rows(scores, keys, query, row, block.n_vectors, column, stop, column > 0)
    return 0


@stage
def mask_tile(job, block, key0, n_keys):
    """Makes the tile `extra` of the keys, or leaves block.is_partial 0 where it would be 0 throughout.
    Returns 0 where no row may attend any of the keys."""
    block.plain = block.plain_stop = 0
    is_inside = block.all_start <= key0 and block.all_stop >= key0 + n_keys
    if job.has_mask_map:
        state = map_state(job, block, key0, n_keys)
        if state == INDEX_EMPTY:
            return 0
        if state == INDEX_FULL and is_inside and not (job.has_bias or job.has_dense):
            return 1
    if job.has_rows:
        n_allowed = mask_rows(job, block, key0, n_keys)
        if n_allowed == 0:
            return 0
        if is_inside and not job.has_bias and n_allowed == n_keys * block.n_lanes:
            return 1
    elif is_inside:
        return 1
    elif not job.has_score_mod:
        block.plain = min(max(block.all_start - key0, 0), n_keys)
        block.plain_stop = max(min(block.all_stop - key0, n_keys), block.plain)
    block.is_partial = 1
    if not is_inside:
        mask_intervals(job, block, key0, n_keys)
    return 1


@stage
def mask_rows(job, block, key0, n_keys):
    """Makes the tile `extra` of bias, mask array and mask map. Returns how many elements the masks allow."""
    rows, n_allowed = rows_of(job, block), n_keys * block.n_lanes
    row_i, row_h = counts_of(block, block.row_i), counts_of(block, block.row_h)
    bias = view_of(job, BIAS, block.item, job.zero)
    dense = view_of(job, DENSE, block.item, np.uint8(0))
    flags, masked = tile_at(np.uint8(0), block.flags, (job.block_k,)), type(job.zero)(-np.inf)
    for lane in range(block.n_lanes):
        to = rows[lane]
        if job.has_bias:
            copy_row(to, bias[row_h[lane], row_i[lane], key0 : key0 + n_keys], n_keys)
        else:
            for j in range(n_keys):
                to[j] = 0
        if job.has_dense:
            copy_row(flags, dense[row_h[lane], row_i[lane], key0 : key0 + n_keys], n_keys)
            n_masked = np.int32(0)
            for j in range(n_keys):
                to[j] = to[j] if flags[j] else masked
                n_masked += np.int32(flags[j] == 0)
            n_allowed -= n_masked
        if job.has_mask_map:
            n_allowed -= mask_mapped(job, block, lane, to, key0, n_keys)
    if n_allowed > 0:
        transpose(extra_of(job, block), rows, block.n_lanes, n_keys)
    return n_allowed


@njit(**OPTIONS)
def map_state(job, block, key0, n_keys):
    """INDEX_FULL or INDEX_EMPTY where the mask map says so for all rows and keys, else 0."""
    row_i, row_h = counts_of(block, block.row_i), counts_of(block, block.row_h)
    index, some, every = view_of(job, MASK_INDEX, block.item, np.int32(0)), False, True
    for lane in range(block.n_lanes):
        entries = index[row_h[lane], row_i[lane] // job.tile_q]
        for tile in range(key0 // job.tile_k, (key0 + n_keys - 1) // job.tile_k + 1):
            some |= entries[tile] != INDEX_EMPTY
            every &= entries[tile] == INDEX_FULL
    return INDEX_FULL if every else 0 if some else INDEX_EMPTY


@njit(**OPTIONS)
def mask_mapped(job, block, lane, to, key0, n_keys):
    """Masks the keys of a lane that the mask map does not allow. Returns how many it newly masked."""
    row, head, count = counts_of(block, block.row_i)[lane], counts_of(block, block.row_h)[lane], 0
    index = view_of(job, MASK_INDEX, block.item, np.int32(0))[head, row // job.tile_q]
    j, masked, n_words = 0, type(job.zero)(-np.inf), job.tile_k // WORD
    while j < n_keys:
        tile, first = (key0 + j) // job.tile_k, (key0 + j) % job.tile_k
        stop, entry = min(n_keys, j + job.tile_k - first), np.int64(index[tile])
        if entry != INDEX_FULL:
            line = max(entry, 0) * job.tile_q + row % job.tile_q
            words = tile_at(np.uint32(0), job.mask_bits + 4 * n_words * line, (n_words,))
            for at in range(j, stop):
                key = first + at - j
                if entry == INDEX_EMPTY or words[key // WORD] >> np.uint32(key % WORD) & np.uint32(1) == 0:
                    count += to[at] != masked
                    to[at] = masked
        j = stop
    return count


@stage
def mask_intervals(job, block, key0, n_keys):
    """Makes `extra` -inf outside of each lane's interval."""
    start, stop = counts_of(block, block.start), counts_of(block, block.stop)
    extra, masked = extra_of(job, block), type(job.zero)(-np.inf)
    has_rows = job.has_rows  # read once: LLVM cannot know that the loop does not write it
    for j in range(n_keys):
        if block.plain <= j < block.plain_stop:
            continue
        row = extra[j]
        for lane in range(block.n_lanes):
            x = row[lane] if has_rows else job.zero
            is_masked = (key0 + j < start[lane]) | (key0 + j >= stop[lane])
            row[lane] = masked if is_masked else x
    return 0
