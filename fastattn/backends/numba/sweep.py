"""The driver: a block of query rows over the key tiles that any of them may attend, with the online softmax.

FlashAttention-2's Algorithm 1 (Dao, 2023) with query rows as lanes, in the same stages and with the same
walls as the compiled driver (``backends/cython/driver.pyx``): it knows tiles and tasks, the kernels that it
calls know registers. `job` and `block` are the records of `layout`, `w` is the address of the thread's
scratch memory.
"""

from __future__ import annotations

import numpy as np

from fastattn.backends.numba import kernels
from fastattn.backends.numba.blocks import column_stride, find_block, find_rows, row_stride
from fastattn.backends.numba.calls import routine
from fastattn.backends.numba.intrinsics import int64s
from fastattn.backends.numba.layout import LSE, OUT, QUERY, VALUE, WEIGHTS
from fastattn.backends.numba.scores import TILE_EMPTY, TILE_PARTIAL, bias_rows_of, score_tile, words_of
from fastattn.backends.numba.tiles import KEY_CHUNK, TILE_ROWS


@routine
def add_values(job, w, block, state, key0, n_keys):
    """Weights times values of one tile."""
    value_row, value_col = row_stride(job, VALUE), column_stride(job, VALUE)
    at = block.value + key0 * value_row
    values, row, panel, wild = block.values + key0 * block.value_row, block.value_row, block.panel, 0
    if job.is_isolated:
        wild = kernels.clean_values(job, w + job.to_clean, at, value_row, value_col, n_keys, job.value_dim)
        values = w + job.to_clean
    elif value_col != job.itemsize and not job.packs_values:
        kernels.copy_rows(job, w + job.to_value_copy, at, value_row, value_col, n_keys, job.value_dim)
        values = w + job.to_value_copy
    if job.is_isolated or (value_col != job.itemsize and not job.packs_values):
        row, panel = job.value_dim * job.itemsize, TILE_ROWS * job.itemsize
    kernels.accumulate(job, w + job.to_acc, w + job.to_scores, w + job.to_rescale, block.ld, block.n_vectors,
                       values, row, panel, w + job.to_stops, KEY_CHUNK - key0 % KEY_CHUNK,
                       job.value_dim)  # fmt: skip
    if wild != 0:
        kernels.add_wild_values(job, w + job.to_acc, block.ld * job.itemsize, job.itemsize, w + job.to_scores,
                                block.ld * job.itemsize, job.itemsize, block.ld, at, value_row, value_col,
                                n_keys, job.value_dim, bias_rows_of(job, w), words_of(job, w, state),
                                block.ld)  # fmt: skip
    return 0


@routine
def attend(job, w, block):
    """The online softmax and value accumulation over every key tile of the block.

    Whether any tile was one where only some lanes may read a key.
    """
    partial = 0
    kernels.start_rows(job, w + job.to_row_max, w + job.to_row_sum, w + job.to_acc, block.ld, job.acc_columns,
                       job.sinks, w + job.to_row_h)  # fmt: skip
    tile = block.low // job.block_k * job.block_k
    while tile < block.high:
        key0 = max(tile, block.low)
        tile += job.block_k
        n_keys = min(tile, block.high) - key0
        state = score_tile(job, w, block, key0, n_keys, job.is_isolated)
        if state == TILE_EMPTY:
            continue
        if state == TILE_PARTIAL or job.has_bias:
            partial = 1
        kernels.softmax(job, w + job.to_scores, w + job.to_tile_max, w + job.to_row_max, w + job.to_row_sum,
                        w + job.to_rescale, block.ld, block.n_vectors, w + job.to_stops,
                        KEY_CHUNK - key0 % KEY_CHUNK, job.exponent_factor)  # fmt: skip
        add_values(job, w, block, state, key0, n_keys)
    return partial


@routine
def write_weights(job, w, block):
    """The weights of the block's rows: its scores once more, against the row_max now known.

    Whether any of a tile in which only some may be read is NaN.
    """
    ld, nan = block.ld, 0
    find_rows(job, w, WEIGHTS, block, 0, ld, w + job.to_out_rows)
    rows = int64s(w + job.to_out_rows)
    for lane in range(block.n_rows):
        kernels.fill(job, rows[lane], job.len_k, 0.0)
    tile = block.low // job.block_k * job.block_k
    while tile < block.high:
        key0 = max(tile, block.low)
        tile += job.block_k
        n_keys = min(tile, block.high) - key0
        state = score_tile(job, w, block, key0, n_keys, 1)
        if state == TILE_EMPTY:
            continue
        # Against an empty tile_max row_max stays; what softmax does to row_sum no longer matters.
        kernels.fill(job, w + job.to_tile_max, ld, -np.inf)
        kernels.softmax(job, w + job.to_scores, w + job.to_tile_max, w + job.to_row_max, w + job.to_row_sum,
                        w + job.to_rescale, ld, block.n_vectors, w + job.to_stops, KEY_CHUNK,
                        job.exponent_factor)  # fmt: skip
        find_rows(job, w, WEIGHTS, block, key0 * job.itemsize, ld, w + job.to_rows)
        if (
            kernels.unpack(
                job, w + job.to_rows, job.itemsize, w + job.to_scores, ld, n_keys, w + job.to_inverse
            )
            != 0
        ):
            if state == TILE_PARTIAL or job.has_bias:
                nan = 1
            if job.is_isolated:
                kernels.clear_masked(job, w + job.to_rows, block.n_rows, n_keys, bias_rows_of(job, w),
                                     words_of(job, w, state), ld)  # fmt: skip
    return nan


@routine
def run_task(job, w, block, task):
    """One block of query rows of one key/value head of one batch item, from its query to its outputs."""
    find_block(job, w, block, task)
    find_rows(job, w, QUERY, block, 0, block.ld, w + job.to_rows)
    kernels.pack(job, w + job.to_query, block.ld, w + job.to_rows, column_stride(job, QUERY), job.head_dim,
                 job.query_high, job.query_low)  # fmt: skip
    partial = attend(job, w, block)
    find_rows(job, w, OUT, block, 0, block.ld, w + job.to_out_rows)
    kernels.finish(job, w + job.to_inverse, w + job.to_lse if job.has_lse else 0, w + job.to_row_max,
                   w + job.to_row_sum, block.ld, job.exponent_factor)  # fmt: skip
    nan = kernels.unpack(job, w + job.to_out_rows, column_stride(job, OUT), w + job.to_acc, block.ld,
                         job.value_dim, w + job.to_inverse)  # fmt: skip
    if nan != 0 and partial != 0:
        # It may be 0 * NaN of a masked key.
        job.saw_nan = 1
    if job.has_lse:
        find_rows(job, w, LSE, block, 0, block.n_rows, w + job.to_rows)
        kernels.scatter(job, w + job.to_rows, w + job.to_lse, block.n_rows)
    if job.has_weights and write_weights(job, w, block) != 0:
        job.saw_nan = 1
    return 0
