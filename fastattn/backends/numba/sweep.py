"""The sweep, for many query rows: one query block over the key tiles that any of its rows may attend, with
the online softmax.

FlashAttention-2's Algorithm 1 (Dao, 2023) with query rows as lanes, in the same stages as the compiled driver
(``backends/cython/driver.pyx``). `job` and `block` are the records of `layout`.
"""

from __future__ import annotations

import math

from numba import njit

from fastattn.backends.numba.blocks import (
    acc_of,
    counts_of,
    find_block,
    keys_of,
    lanes_of,
    pack_block,
    rows_of,
    scores_of,
    tiles_of,
    view_of,
)
from fastattn.backends.numba.calls import OPTIONS, stage
from fastattn.backends.numba.epilogue import is_allowed
from fastattn.backends.numba.kernels import (
    accumulate,
    add_nonfinite_values,
    clean_values,
    fill,
    keep_largest,
    leave_headroom,
    multiply_lanes,
    scale_to_rows,
    softmax,
    start_rows,
    write_large,
    write_outputs,
)
from fastattn.backends.numba.layout import WEIGHTS
from fastattn.backends.numba.mask_tile import score_tile
from fastattn.backends.numba.row_kernels import accumulate_rows
from fastattn.backends.numba.vectors import exp2, load, splat, store, where


@stage
def attend(job, block, first, stop):
    """The online softmax and the sums of values over the key tiles first .. stop - 1."""
    start_rows(job, block)
    is_first = True
    for tile in range(first, stop):
        key0, n_keys = keys_of(job, block, tile)
        if score_tile(job, block, key0, n_keys) == 0:
            continue
        rescales = softmax(job, block, key0, n_keys)
        if rescales and not is_first:
            multiply_lanes(job, acc_of(job, block), job.value_dim, lanes_of(job, block, block.rescale))
        if block.has_headroom:
            leave_headroom(job, block, n_keys, 0)
        add_values(job, block, key0, n_keys, not is_first)
        is_first = False
    if is_first:
        fill(job, acc_of(job, block), job.value_dim, job.zero)
    return 0


@njit(**OPTIONS)
def add_values(job, block, key0, n_keys, adds):
    """Weights times values of the keys."""
    found = clean_values(job, block, key0, n_keys) if job.is_safe else 0
    if job.uses_rows:
        accumulate_rows(job, block, key0, n_keys)
    else:
        accumulate(job, block, key0, n_keys, adds)
    if found != 0:
        add_nonfinite_values(job, block, key0, n_keys)


@stage
def write_weights(job, block, x, y):
    """The weights of the block's rows, recomputed from their scores with the final row_max and row_sum."""
    weights, rows = view_of(job, WEIGHTS, block.item, job.zero), rows_of(job, block)
    row_i, row_h = counts_of(block, block.row_i), counts_of(block, block.row_h)
    scores, row_max = scores_of(job, block), lanes_of(job, block, block.row_max)
    empty, zero, factor = splat(type(job.zero)(-math.inf)), splat(job.zero), splat(job.exponent_factor)
    for lane in range(block.n_rows):
        weights[row_h[lane], row_i[lane]][:] = 0
    first, stop = tiles_of(job, block)
    for tile in range(first, stop):
        key0, n_keys = keys_of(job, block, tile)
        if score_tile(job, block, key0, n_keys) == 0:
            continue
        for lane in range(0, block.n_lanes, job.lanes):
            top = load(row_max, (lane,))
            base = where(top == empty, zero, top)
            for j in range(n_keys):
                store(scores, (j, lane), exp2(load(scores, (j, lane)), base, factor))
        scale_to_rows(job, block, scores, n_keys)
        for lane in range(block.n_rows):
            row = weights[row_h[lane], row_i[lane]]
            for j in range(n_keys):
                # The weight of a masked key is 0 even in a row of NaN.
                row[key0 + j] = rows[lane, j] if is_allowed(job, block, j, lane) else job.zero
    return 0


@njit(**OPTIONS)
def finish(job, block):
    """Writes all outputs of the block. Returns whether to write them again, from sums with headroom: sums of
    finite values may have overflowed."""
    nonfinite = write_outputs(job, block)
    if job.has_weights:
        write_weights(job, block, 0, 0)
    if not nonfinite:
        return False
    job.saw_nonfinite = 1
    if job.is_safe:
        keep_largest(job, block)
    return job.is_safe != 0


@stage
def run_task(job, block, task, y):
    """One query block of one key/value head of one batch item, from its queries to its outputs."""
    find_block(job, block, task)
    pack_block(job, block)
    first, stop = tiles_of(job, block)
    attend(job, block, first, stop)
    if finish(job, block):
        attend(job, block, first, stop)
        write_large(job, block, 0, 0)
    return 0
