"""Kernels on tiles of scores and of outputs: the softmax, the sums of values, and the outputs of a block.

Rows of a tile are keys, or columns of the values. Lanes are query rows. A kernel works on whole vectors of
lanes. The result in a lane depends on no other lane.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from fastattn._machine.constants import KEY_CHUNK, LN2
from fastattn.backends.numba.blocks import (
    acc_of,
    copy_row,
    counts_of,
    first_chunk,
    head_of,
    lanes_of,
    rows_of,
    scores_of,
    values_of,
    view_of,
)
from fastattn.backends.numba.calls import OPTIONS, stage
from fastattn.backends.numba.epilogue import is_allowed
from fastattn.backends.numba.layout import LSE, OUT, VALUE
from fastattn.backends.numba.register_tile import ROWS, multiply_rows, transpose
from fastattn.backends.numba.vectors import (
    any_lane,
    exp2,
    fma,
    load,
    maximum,
    one_minus_product,
    splat,
    store,
    tile_at,
    where,
)


@njit(**OPTIONS)
def fill(job, tile, n_rows, x):
    for row in range(n_rows):
        for lane in range(0, tile.shape[1], job.lanes):
            store(tile, (row, lane), splat(x))


@njit(**OPTIONS)
def start_rows(job, block):
    """The state of the rows before any key."""
    row_max, row_sum = lanes_of(job, block, block.row_max), lanes_of(job, block, block.row_sum)
    kept = lanes_of(job, block, block.kept_max)
    for lane in range(block.n_lanes):
        row_max[lane] = kept[lane] if block.has_headroom else type(job.zero)(-np.inf)
        row_sum[lane] = job.zero


@njit(**OPTIONS)
def keep_largest(job, block):
    """Keeps row_max for the sums with headroom."""
    block.has_headroom = 1
    row_max, kept = lanes_of(job, block, block.row_max), lanes_of(job, block, block.kept_max)
    for lane in range(block.n_lanes):
        kept[lane] = row_max[lane]


@njit(**OPTIONS)
def softmax(job, block, key0, n_keys):
    """One step of the online softmax. Returns whether any factor in rescale is not 1.

    row_max becomes the maximum of itself and the scores. Scores become weights exp2(factor * (s - row_max)).
    rescale = exp2(factor * (old - new row_max)), and row_sum = rescale * row_sum + the sum of the weights.
    Scores of -inf give exactly 0, also while row_max is -inf.
    """
    scores, row_max = scores_of(job, block), lanes_of(job, block, block.row_max)
    row_sum, rescale = lanes_of(job, block, block.row_sum), lanes_of(job, block, block.rescale)
    empty, zero, factor = splat(type(job.zero)(-np.inf)), splat(job.zero), splat(job.exponent_factor)
    one, rescales = splat(type(job.zero)(1)), False
    for lane in range(0, block.n_lanes, job.lanes):
        old = top = load(row_max, (lane,))
        for j in range(n_keys):
            top = maximum(top, load(scores, (j, lane)))
        # -inf - 0 where the row is still empty: -inf - -inf would be NaN.
        base, total = where(top == empty, zero, top), zero
        start, stop = 0, min(first_chunk(key0, KEY_CHUNK), n_keys)
        while start < n_keys:
            # Four sums of every fourth key each, as short chains round less.
            a = b = c = d = zero
            for j in range(start, stop):
                weight = exp2(load(scores, (j, lane)), base, factor)
                store(scores, (j, lane), weight)
                a, b, c, d = b, c, d, a + weight
            total = total + ((a + c) + (b + d))
            start, stop = stop, min(stop + KEY_CHUNK, n_keys)
        scale = exp2(old, base, factor)
        rescales |= any_lane(scale < one)
        store(rescale, (lane,), scale)
        store(row_max, (lane,), top)
        store(row_sum, (lane,), fma(load(row_sum, (lane,)), scale, total))
    return rescales


@njit(**OPTIONS)
def multiply_lanes(job, tile, n_rows, factors):
    """Multiplies each lane of a tile by its factor."""
    for lane in range(0, tile.shape[1], job.lanes):
        factor = load(factors, (lane,))
        for row in range(n_rows):
            store(tile, (row, lane), load(tile, (row, lane)) * factor)


@njit(**OPTIONS)
def accumulate(job, block, key0, n_keys, adds):
    """O^T = V^T P^T, added to what is there if `adds`, in sums over KEY_CHUNK keys at a time."""
    acc, scores = acc_of(job, block), scores_of(job, block)
    columns = values_of(job, block, key0, n_keys).T
    start, stop = 0, min(first_chunk(key0, KEY_CHUNK), n_keys)
    while start < n_keys:
        for row in range(0, job.value_dim, ROWS):
            multiply_rows(acc, columns, scores, row, block.n_vectors, start, stop, adds or start > 0)
        start, stop = stop, min(stop + KEY_CHUNK, n_keys)


@njit(**OPTIONS)
def merge(job, block, other):
    """Merges a partial result over other keys into the block's.

    `other` has the addresses of its row_max, row_sum and acc. Rows without any of those keys do not change.
    """
    at_max, at_sum, at_acc = other
    acc, acc_2 = acc_of(job, block), tile_at(job.zero, at_acc, (job.value_dim, block.n_lanes))
    row_max, row_max_2 = lanes_of(job, block, block.row_max), lanes_of(job, block, at_max)
    row_sum, row_sum_2 = lanes_of(job, block, block.row_sum), lanes_of(job, block, at_sum)
    empty, zero, factor = splat(type(job.zero)(-np.inf)), splat(job.zero), splat(job.exponent_factor)
    for lane in range(0, block.n_lanes, job.lanes):
        top, top_2 = load(row_max, (lane,)), load(row_max_2, (lane,))
        largest = maximum(top, top_2)
        base = where(largest == empty, zero, largest)
        one, two = exp2(top, base, factor), exp2(top_2, base, factor)
        store(row_max, (lane,), largest)
        sums = load(row_sum_2, (lane,)) * two
        store(row_sum, (lane,), fma(load(row_sum, (lane,)), one, sums))
        for column in range(job.value_dim):
            sums = load(acc_2, (column, lane)) * two
            store(acc, (column, lane), fma(load(acc, (column, lane)), one, sums))


# The end of a block.


@stage
def add_sinks(job, block, x, y):
    """Takes in each head's sink, which is a logit without a value."""
    sinks = tile_at(job.zero, job.sinks, (job.num_kv_heads * job.group_size,))
    row_max, row_sum = lanes_of(job, block, block.row_max), lanes_of(job, block, block.row_sum)
    rescale, row_h = lanes_of(job, block, block.rescale), counts_of(block, block.row_h)
    unit = np.float64(job.exponent_factor)
    for lane in range(block.n_lanes):
        sink, top = sinks[row_h[lane]], row_max[lane]
        rescale[lane] = 1
        if math.isfinite(sink):
            largest = max(sink, top) if top == top else top
            old = type(job.zero)(2.0 ** (unit * (np.float64(top) - np.float64(largest))))
            new = type(job.zero)(2.0 ** (unit * (np.float64(sink) - np.float64(largest))))
            row_max[lane], row_sum[lane] = largest, row_sum[lane] * old + new
            rescale[lane] = old
        elif not sink < math.inf:
            # A row with keys becomes NaN, as inf - inf is. A row without keys has its sink alone. The sum of
            # a row with keys is never 0: the weight of its largest score is 1.
            row_max[lane] = sink
            row_sum[lane] = type(job.zero)(1 if row_sum[lane] == 0 else math.nan)
    multiply_lanes(job, acc_of(job, block), job.value_dim, rescale)
    return 0


@njit(**OPTIONS)
def invert_sums(job, block):
    """1 / row_sum as two numbers: rounded towards 0, and the remainder. Both are 0 for an empty row."""
    row_sum = lanes_of(job, block, block.row_sum)
    inverse = tile_at(job.zero, block.inverse, (2, block.n_lanes))
    one, zero = splat(type(job.zero)(1)), splat(job.zero)
    below_one, no_low = splat(job.below_one), splat(job.no_low)
    for lane in range(0, block.n_lanes, job.lanes):
        sums = load(row_sum, (lane,))
        high = one / sums
        high = where(one_minus_product(high, sums) < zero, high * below_one, high)
        left = one_minus_product(high, sums)
        low = where(left == zero, high * no_low, left * high)
        store(inverse, (0, lane), where(sums == zero, zero, high))
        store(inverse, (1, lane), where(sums == zero, zero, low))


@njit(**OPTIONS)
def scale_to_rows(job, block, tile, n_cols):
    """Writes the tile times the inverse sums to `rows`. Returns whether any element is nonfinite."""
    rows, inverse = rows_of(job, block), tile_at(job.zero, block.inverse, (2, block.n_lanes))
    zero, nonfinite = splat(job.zero), False
    for lane in range(0, block.n_lanes, job.lanes):
        high, low = load(inverse, (0, lane)), load(inverse, (1, lane))
        for column in range(n_cols):
            x = load(tile, (column, lane))
            x = fma(x, high, fma(x, low, zero))
            store(tile, (column, lane), x)
            nonfinite |= any_lane(x - x != zero)
    transpose(rows, tile, n_cols, block.n_lanes)
    return nonfinite


@njit(**OPTIONS)
def write_outputs(job, block):
    """Writes the block's outputs and lse from its sums. Returns whether any output is nonfinite."""
    if job.has_sinks:
        add_sinks(job, block, 0, 0)
    invert_sums(job, block)
    nonfinite = scale_to_rows(job, block, acc_of(job, block), job.value_dim)
    rows, out = rows_of(job, block), view_of(job, OUT, block.item, job.zero)
    row_i, row_h = counts_of(block, block.row_i), counts_of(block, block.row_h)
    for lane in range(block.n_rows):
        copy_row(out[row_h[lane], row_i[lane]], rows[lane], job.value_dim)
    if job.has_lse:
        lse = view_of(job, LSE, block.item, job.zero)
        row_max, row_sum = lanes_of(job, block, block.row_max), lanes_of(job, block, block.row_sum)
        # Back to natural units from whichever domain the scores were in.
        unit = 1.0 if job.is_natural else np.float64(job.exponent_factor) * LN2
        for lane in range(block.n_rows):
            top, total = np.float64(row_max[lane]), np.float64(row_sum[lane])
            lse[row_h[lane], row_i[lane], 0] = top * unit + math.log(total)
    return nonfinite


# A call with a nonfinite output runs again. The cause may be 0 times a masked NaN or inf, or an overflow.


@stage
def clean_values(job, block, key0, n_keys):
    """Copies the values of the keys, with 0 for NaN and inf. Returns 1 if there is any."""
    values, found = head_of(job, block, VALUE), 0
    clean = tile_at(job.zero, block.clean, (job.block_k, job.value_dim))
    for j in range(n_keys):
        for column in range(job.value_dim):
            x = values[key0 + j, column]
            is_finite = math.isfinite(x)
            clean[j, column] = x if is_finite else job.zero
            found |= not is_finite
    return found


@stage
def add_nonfinite_values(job, block, key0, n_keys):
    """Adds weights times the nonfinite values to the rows that may read them."""
    values, acc, scores = head_of(job, block, VALUE), acc_of(job, block), scores_of(job, block)
    for j in range(n_keys):
        for column in range(job.value_dim):
            x = values[key0 + j, column]
            if math.isfinite(x):
                continue
            for lane in range(block.n_lanes):
                if is_allowed(job, block, j, lane):
                    acc[column, lane] += scores[j, lane] * x
    return 0


@njit(**OPTIONS)
def headroom(job, block, lane):
    """A power of two that makes the weights of a row add up to at most 1/2."""
    inverse = tile_at(job.zero, block.inverse, (2, block.n_lanes))[0, lane]
    return math.ldexp(0.25, math.frexp(np.float64(inverse))[1])


@stage
def leave_headroom(job, block, n_keys, y):
    """Multiplies the weights by the `headroom` of their row."""
    rescale = lanes_of(job, block, block.rescale)
    for lane in range(block.n_lanes):
        rescale[lane] = headroom(job, block, lane)
    multiply_lanes(job, scores_of(job, block), n_keys, rescale)
    return 0


@stage
def write_large(job, block, x, y):
    """Writes the nonfinite outputs again, from sums that have `headroom`. Finite outputs stay as they are, so
    that none of their bits depends on the rest of the block.

    With headroom a sum of finite values is finite. Their mean may round past the largest number, and then
    becomes that number. An output that stays NaN has read NaN or inf.
    """
    acc, out = acc_of(job, block), view_of(job, OUT, block.item, job.zero)
    inverse = tile_at(job.zero, block.inverse, (2, block.n_lanes))
    row_i, row_h = counts_of(block, block.row_i), counts_of(block, block.row_h)
    for lane in range(block.n_rows):
        row, scale = out[row_h[lane], row_i[lane]], headroom(job, block, lane)
        for column in range(job.value_dim):
            if math.isfinite(row[column]):
                continue
            total = np.float64(acc[column, lane])
            x = (total * np.float64(inverse[0, lane]) + total * np.float64(inverse[1, lane])) / scale
            if math.isnan(x):
                continue
            if math.isfinite(total):
                x = min(max(x, -np.float64(job.largest)), np.float64(job.largest))
            row[column] = x
    return 0
