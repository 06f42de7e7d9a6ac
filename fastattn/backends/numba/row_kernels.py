"""Both products for few query rows, whose lanes would stay empty: vectors are of columns here.

A row's result does not depend on the other rows. `job` and `block` are the records of `layout`; keys and
values have no gaps between their columns, whose number fills vectors.
"""

from __future__ import annotations

from fastattn._constants import KEY_CHUNK
from fastattn.backends.numba.blocks import acc_of, first_chunk, head_of, rows_of, scores_of, values_of
from fastattn.backends.numba.calls import stage
from fastattn.backends.numba.layout import KEY
from fastattn.backends.numba.register_tile import prefetch, prefetch_row, transpose, transpose_block
from fastattn.backends.numba.vectors import fma, load, splat, store, tile_at

PREFETCHED_ROWS = 32  #: ahead of those that are read


@stage
def score_rows(job, block, key0, n_keys):
    """Scores of the keys, as `score_keys` of `mask_tile`: of as many keys at a time as a vector has lanes."""
    keys, scores, lanes = head_of(job, block, KEY), scores_of(job, block), job.lanes
    query = tile_at(job.zero, block.query, (block.n_lanes, job.head_dim))
    parts = tile_at(job.zero, block.rows, (3 * lanes, lanes))  # sums of columns, and scores, in blocks
    for start in range(0, n_keys, lanes):
        for row in range(block.n_rows):
            for i in range(0, lanes, 2):
                # Past the last key that one is repeated.
                one, two = key0 + min(start + i, n_keys - 1), key0 + min(start + i + 1, n_keys - 1)
                if row == 0:
                    prefetch_row(keys, one + PREFETCHED_ROWS)
                    prefetch_row(keys, two + PREFETCHED_ROWS)
                sum_1 = sum_2 = splat(job.zero)
                for column in range(0, job.head_dim, lanes):
                    x = load(query, (row, column))
                    sum_1 = fma(x, load(keys, (one, column)), sum_1)
                    sum_2 = fma(x, load(keys, (two, column)), sum_2)
                store(parts, (i, 0), sum_1)
                store(parts, (i + 1, 0), sum_2)
            transpose_block(parts, lanes, 0, parts, 0, 0)
            total, other = load(parts, (lanes, 0)), load(parts, (lanes + 1, 0))
            for i in range(lanes + 2, 2 * lanes, 2):
                total, other = total + load(parts, (i, 0)), other + load(parts, (i + 1, 0))
            store(parts, (2 * lanes + row, 0), total + other)
        transpose_block(scores, start, 0, parts, 2 * lanes, 0)
    return 0


@stage
def accumulate_rows(job, block, key0, n_keys):
    """Weights times values of the keys, as `accumulate` of `kernels` without anything to add to."""
    values = values_of(job, block, key0, n_keys)
    scores, rows = scores_of(job, block), rows_of(job, block)
    lanes, start, stop = job.lanes, 0, min(first_chunk(key0), n_keys)
    while start < n_keys:
        for row in range(block.n_rows):
            for column in range(0, job.value_dim, 4 * lanes):
                # Past the last vector of columns that one is repeated.
                at_2 = min(column + lanes, job.value_dim - lanes)
                at_3 = min(column + 2 * lanes, job.value_dim - lanes)
                at_4 = min(column + 3 * lanes, job.value_dim - lanes)
                sum_1 = sum_2 = sum_3 = sum_4 = splat(job.zero)
                for j in range(start, stop):
                    if row == 0:
                        prefetch(values, j + PREFETCHED_ROWS, column * job.itemsize)
                        prefetch(values, j + PREFETCHED_ROWS, at_2 * job.itemsize)
                        prefetch(values, j + PREFETCHED_ROWS, at_3 * job.itemsize)
                        prefetch(values, j + PREFETCHED_ROWS, at_4 * job.itemsize)
                    weight = splat(scores[j, row])
                    sum_1 = fma(weight, load(values, (j, column)), sum_1)
                    sum_2 = fma(weight, load(values, (j, at_2)), sum_2)
                    sum_3 = fma(weight, load(values, (j, at_3)), sum_3)
                    sum_4 = fma(weight, load(values, (j, at_4)), sum_4)
                if start > 0:
                    sum_1, sum_2 = sum_1 + load(rows, (row, column)), sum_2 + load(rows, (row, at_2))
                    sum_3, sum_4 = sum_3 + load(rows, (row, at_3)), sum_4 + load(rows, (row, at_4))
                store(rows, (row, column), sum_1)
                store(rows, (row, at_2), sum_2)
                store(rows, (row, at_3), sum_3)
                store(rows, (row, at_4), sum_4)
        start, stop = stop, min(stop + KEY_CHUNK, n_keys)
    transpose(acc_of(job, block), rows, lanes, job.value_dim)
    return 0
