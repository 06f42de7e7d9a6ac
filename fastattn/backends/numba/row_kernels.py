"""Both products for few query rows, which would leave vectors partly empty. So lanes are keys in the first
product, and columns of the values in the second.

A row's result does not depend on the other rows. `job` and `block` are the records of `layout`; keys and
values have no gaps between their columns, whose number fills vectors.
"""

from __future__ import annotations

from fastattn.backends.numba.blocks import (
    acc_of,
    copy_row,
    first_chunk,
    head_of,
    rows_of,
    scores_of,
    values_of,
)
from fastattn.backends.numba.calls import stage
from fastattn.backends.numba.layout import KEY
from fastattn.backends.numba.register_tile import (
    multiply_few,
    prefetch,
    prefetch_row,
    transpose,
    transpose_block,
)
from fastattn.backends.numba.vectors import tile_at

STEP_KEYS = 8  #: keys that one partial sum of outputs runs over
PREFETCHED_ROWS = 32  #: prefetch distance, in rows of keys and values
SCORE_COLUMNS = 16  #: over which one partial sum of a score runs: short chains round less


@stage
def score_rows(job, block, key0, n_keys):
    """Scores of the keys, as of `mask_tile.score_keys`. A step takes as many keys as a vector has lanes."""
    keys, scores, lanes = head_of(job, block, KEY)[key0 : key0 + n_keys], scores_of(job, block), job.lanes
    query = tile_at(job.zero, block.query, (block.n_lanes, job.head_dim))[: block.n_rows]
    rows = tile_at(job.zero, block.rows, (block.n_lanes + lanes, job.head_dim))  # scores, then the last keys
    columns = tile_at(job.zero, block.columns, (job.head_dim, lanes))
    for start in range(0, n_keys, lanes):
        n = min(lanes, n_keys - start)
        if n < lanes:
            for i in range(n):
                copy_row(rows[block.n_lanes + i], keys[start + i], job.head_dim)
        for column in range(0, job.head_dim, lanes):
            for key in range(start, start + n):
                prefetch(keys, key + PREFETCHED_ROWS, column * job.itemsize)
            if n < lanes:
                transpose_block(columns, column, 0, rows, block.n_lanes, column)
            else:
                transpose_block(columns, column, 0, keys, start, column)
        for column in range(0, job.head_dim, SCORE_COLUMNS):
            stop = min(column + SCORE_COLUMNS, job.head_dim)
            multiply_few(rows, query, columns, 1, column, stop, column > 0)
        for lane in range(0, block.n_lanes, lanes):
            transpose_block(scores, start, lane, rows, lane, 0)
    return 0


@stage
def accumulate_rows(job, block, key0, n_keys):
    """Weights times values of the keys, as `kernels.accumulate` without anything to add to."""
    values = values_of(job, block, key0, n_keys)
    weights, rows = scores_of(job, block).T[: block.n_rows], rows_of(job, block)
    start, stop = 0, min(first_chunk(key0, STEP_KEYS), n_keys)
    while start < n_keys:
        for key in range(start, stop):
            prefetch_row(values, key + PREFETCHED_ROWS)
        multiply_few(rows, weights, values, job.value_dim // job.lanes, start, stop, start > 0)
        start, stop = stop, min(stop + STEP_KEYS, n_keys)
    transpose(acc_of(job, block), rows, block.n_lanes, job.value_dim)
    return 0
