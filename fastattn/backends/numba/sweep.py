"""The sweep, for many query rows: one query block over the key tiles that any of its rows may attend, with
the online softmax.

FlashAttention-2's Algorithm 1 (Dao, 2023) with query rows as lanes, in the same stages as the compiled driver
(``backends/cython/driver.pyx``): it knows tiles and tasks, the kernels that it calls know registers. `job`
and `block` are the records of `layout`, `w` is the address of the thread's scratch memory.
"""

from __future__ import annotations

import numpy as np

from fastattn._machine.constants import KEY_CHUNK
from fastattn.backends.numba import kernels
from fastattn.backends.numba.blocks import column_stride, find_block, find_queries, find_rows, row_stride
from fastattn.backends.numba.codegen.calls import routine
from fastattn.backends.numba.codegen.intrinsics import int64s
from fastattn.backends.numba.codegen.register_tiles import LINE_BYTES, TILE_ROWS
from fastattn.backends.numba.layout import BIAS, DENSE, LSE, OUT, QUERY, VALUE, WEIGHTS
from fastattn.backends.numba.mask_tile import TILE_EMPTY, TILE_PARTIAL, bias_rows_of, score_tile, words_of

PREFETCH_PER_COLUMN = 8  #: bytes at each address that `accumulate` is sure to prefetch, per column of value


@routine
def add_values(job, w, block, state, key0, n_keys, is_first):
    """Adds weights times values of one key tile to acc, or overwrites acc if is_first."""
    value_row, value_col = row_stride(job, VALUE), column_stride(job, VALUE)
    at = block.value + key0 * value_row
    values, row, panel, nonfinite = block.values + key0 * block.value_row, block.value_row, block.panel, 0
    if job.is_nonfinite_safe:
        nonfinite = kernels.clean_values(
            job, w + job.to_clean, at, value_row, value_col, n_keys, job.value_dim
        )
        values = w + job.to_clean
    elif value_col != job.itemsize and not job.packs_values:
        kernels.copy_rows(job, w + job.to_value_copy, at, value_row, value_col, n_keys, job.value_dim)
        values = w + job.to_value_copy
    if job.is_nonfinite_safe or (value_col != job.itemsize and not job.packs_values):
        row, panel = job.value_dim * job.itemsize, TILE_ROWS * job.itemsize
    first_chunk, n_tiles = KEY_CHUNK - key0 % KEY_CHUNK, job.value_dim // TILE_ROWS
    kernels.accumulate(job, w + job.to_acc, w + job.to_scores, w + job.to_rescale, is_first, block.ld,
                       block.n_vectors, values, row, panel, w + job.to_stops, first_chunk, job.value_dim,
                       w + job.to_prefetch, block.n_prefetch, block.prefetch_nbytes)  # fmt: skip
    n_left = job.value_dim - n_tiles * TILE_ROWS
    if n_left > 0:
        byte = n_tiles * LINE_BYTES
        kernels.accumulate_last(job, w + job.to_acc + n_tiles * TILE_ROWS * block.ld * job.itemsize,
                                w + job.to_scores, w + job.to_rescale, is_first, block.ld, block.n_vectors,
                                values + n_tiles * panel, row, w + job.to_stops, first_chunk, n_left,
                                w + job.to_prefetch, block.n_prefetch if byte < block.prefetch_nbytes else 0,
                                byte)  # fmt: skip
    block.n_prefetch = 0
    if nonfinite != 0:
        kernels.add_nonfinite_values(job, w + job.to_acc, block.ld * job.itemsize, job.itemsize,
                                     w + job.to_scores, block.ld * job.itemsize, job.itemsize, block.ld, at,
                                     value_row, value_col, n_keys, job.value_dim, bias_rows_of(job, w),
                                     words_of(job, w, state), block.ld)  # fmt: skip
    return 0


@routine
def prefetch_rows(job, w, block, view, itemsize, key0, n_keys):
    """Adds the elements of a bias or mask for the keys key0 .. to the block's prefetch list, as far as it has
    room."""
    nbytes, step = n_keys * itemsize, PREFETCH_PER_COLUMN * job.value_dim
    if column_stride(job, view) != itemsize or step == 0:
        return 0
    block.prefetch_nbytes = max(block.prefetch_nbytes, min(step, nbytes))
    find_rows(job, view, block, key0 * itemsize, block.n_rows, w + job.to_rows)
    prefetch, rows, n = int64s(w + job.to_prefetch), int64s(w + job.to_rows), block.n_prefetch
    for lane in range(block.n_rows):
        if lane > 0 and rows[lane] == rows[lane - 1]:
            continue
        for at in range(0, nbytes, step):
            if n < job.block_k:
                prefetch[n] = rows[lane] + at
                n += 1
    block.n_prefetch = n
    return 0


@routine
def attend(job, w, block):
    """The online softmax and value accumulation over every key tile of the block."""
    is_first = 1
    if not block.has_headroom:
        kernels.start_rows(job, w + job.to_row_max, w + job.to_row_sum, block.ld, job.sinks, w + job.to_row_h)
    tile = block.low // job.block_k * job.block_k
    while tile < block.high:
        key0 = max(tile, block.low)
        tile += job.block_k
        n_keys = min(tile, block.high) - key0
        state = score_tile(job, w, block, key0, n_keys, job.is_nonfinite_safe)
        if state == TILE_EMPTY:
            continue
        kernels.softmax(job, w + job.to_scores, w + job.to_tile_max, w + job.to_row_max, w + job.to_row_sum,
                        w + job.to_rescale, block.ld, block.n_vectors, w + job.to_stops,
                        KEY_CHUNK - key0 % KEY_CHUNK, job.exponent_factor)  # fmt: skip
        n_next = min(tile + job.block_k, block.high) - tile
        if n_next > 0 and job.has_bias:
            prefetch_rows(job, w, block, BIAS, job.bias_nbytes, tile, n_next)
        if n_next > 0 and job.has_dense:
            prefetch_rows(job, w, block, DENSE, job.dense_nbytes, tile, n_next)
        if block.has_headroom:
            kernels.leave_headroom(job, w + job.to_scores, job.itemsize, block.ld * job.itemsize,
                                   block.n_rows, n_keys, w + job.to_inverse)  # fmt: skip
        add_values(job, w, block, state, key0, n_keys, is_first)
        is_first = 0
    if is_first:
        kernels.fill(job, w + job.to_acc, job.value_dim * block.ld, 0.0)
    if job.sinks != 0 and not block.has_headroom:
        kernels.end_rows(job, w + job.to_row_max, w + job.to_row_sum, block.ld, job.sinks, w + job.to_row_h)
    return 0


@routine
def write_weights(job, w, block):
    """The weights of the block's rows, recomputed from their scores with the final row_max and row_sum.

    Whether any is NaN in a tile where keys are masked for only some rows.
    """
    ld, nan = block.ld, 0
    find_rows(job, WEIGHTS, block, 0, ld, w + job.to_out_rows)
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
        # With a tile_max of -inf row_max does not change; row_sum is not used any more.
        kernels.fill(job, w + job.to_tile_max, ld, -np.inf)
        kernels.softmax(job, w + job.to_scores, w + job.to_tile_max, w + job.to_row_max, w + job.to_row_sum,
                        w + job.to_rescale, ld, block.n_vectors, w + job.to_stops, KEY_CHUNK,
                        job.exponent_factor)  # fmt: skip
        find_rows(job, WEIGHTS, block, key0 * job.itemsize, ld, w + job.to_rows)
        if (
            kernels.unpack(
                job, w + job.to_rows, job.itemsize, w + job.to_scores, ld, n_keys, w + job.to_inverse
            )
            != 0
        ):
            if state == TILE_PARTIAL or job.may_mask:
                nan = 1
            if job.is_nonfinite_safe:
                kernels.clear_masked(job, w + job.to_rows, block.n_rows, n_keys, bias_rows_of(job, w),
                                     words_of(job, w, state), ld)  # fmt: skip
    return nan


@routine
def find_prefetches(job, w, block, task):
    """The rows to prefetch while the block is computed: its outputs, and the next task's queries.

    Both are far apart and accessed in one burst, in which a core would do nothing but wait for memory.
    """
    prefetch, n = w + job.to_prefetch, 0
    block.prefetch_nbytes = max(job.head_dim, job.value_dim) * job.itemsize
    if column_stride(job, OUT) == job.itemsize:
        find_rows(job, OUT, block, 0, block.n_rows, prefetch)
        n = block.n_rows
    if column_stride(job, QUERY) == job.itemsize and task < job.n_tasks:
        n += find_queries(job, task, prefetch + n * 8)
    block.n_prefetch = n
    return 0


@routine
def run_task(job, w, block, task):
    """One query block of one key/value head of one batch item, from its queries to its outputs."""
    find_block(job, w, block, task)
    find_rows(job, QUERY, block, 0, block.ld, w + job.to_rows)
    kernels.pack(job, w + job.to_query, block.ld, w + job.to_rows, column_stride(job, QUERY), job.head_dim,
                 job.query_high, job.query_low)  # fmt: skip
    find_rows(job, OUT, block, 0, block.ld, w + job.to_out_rows)
    find_prefetches(job, w, block, task + 1)
    attend(job, w, block)
    kernels.finish(job, w + job.to_inverse, w + job.to_lse if job.has_lse else 0, w + job.to_row_max,
                   w + job.to_row_sum, block.ld, job.exponent_factor)  # fmt: skip
    nonfinite = kernels.unpack(job, w + job.to_out_rows, column_stride(job, OUT), w + job.to_acc, block.ld,
                               job.value_dim, w + job.to_inverse)  # fmt: skip
    if nonfinite != 0:
        job.saw_nonfinite = 1
    if nonfinite != 0 and job.runs_again:
        # Sums of finite values may have overflowed.
        block.has_headroom = 1
        attend(job, w, block)
        kernels.write_large(job, w + job.to_out_rows, column_stride(job, OUT), block.n_rows, job.value_dim,
                            w + job.to_acc, job.itemsize, block.ld * job.itemsize, w + job.to_inverse,
                            block.ld)  # fmt: skip
    if job.has_lse:
        find_rows(job, LSE, block, 0, block.n_rows, w + job.to_rows)
        kernels.scatter(job, w + job.to_rows, w + job.to_lse, block.n_rows)
    if job.has_weights and write_weights(job, w, block) != 0:
        job.saw_nonfinite = 1
    return 0
