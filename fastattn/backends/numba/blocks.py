"""A query block: its rows, the arrays and tiles that it works on, and the keys each of its rows may attend.

`job` and `block` are the records of `layout`. A block has a lane for each query row of a key/value head from
`first_row` on. Row r is query row r // group_size of query head r % group_size. Lanes past the last row
repeat it.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from fastattn.backends.numba.calls import OPTIONS, stage
from fastattn.backends.numba.layout import (
    ADDRESS,
    KEY_LENGTHS,
    KEY_START,
    KEY_STOP,
    LEAD,
    QUERY,
    SHAPE,
    STRIDES,
    VALUE,
    VIEWS,
)
from fastattn.backends.numba.register_tile import transpose
from fastattn.backends.numba.vectors import array_at, fma, load, splat, store, tile_at, without_gaps

N_VIEWS, KEY_STEP = len(VIEWS), 4
PAD = 16  #: rows past the last of a tile: register tiles and blocks of lanes are written whole
INTP = np.int64(0)


@njit(**OPTIONS)
def view_of(job, number, item, zero):
    """An array of the call at one batch item, ``(heads, rows, columns)``. zero: a 0 of its dtype."""
    table = tile_at(INTP, job.views, (N_VIEWS + 1, LEAD + job.n_lead))
    view, sizes = table[number], table[N_VIEWS]
    address = view[ADDRESS]
    for axis in range(LEAD, LEAD + job.n_lead):
        address += item % sizes[axis] * view[axis]
        item //= sizes[axis]
    shape = (view[SHAPE], view[SHAPE + 1], view[SHAPE + 2])
    return array_at(zero, address, shape, (view[STRIDES], view[STRIDES + 1], view[STRIDES + 2]))


@njit(**OPTIONS)
def head_of(job, block, number):
    """An array of the call at the block's key/value head, ``(rows, columns)``."""
    return view_of(job, number, block.item, job.zero)[block.kv]


@njit(**OPTIONS)
def values_of(job, block, key0, n_keys):
    """The values of the keys from key0 on. Where the call is safe: their copy by `kernels.clean_values`."""
    values = head_of(job, block, VALUE)
    shape, nbytes = (n_keys, job.value_dim), job.value_dim * job.itemsize
    if job.is_safe:
        return array_at(job.zero, block.clean, shape, (nbytes, job.itemsize))
    return values[key0 : key0 + n_keys]


@njit(**OPTIONS)
def scores_of(job, block):
    return tile_at(job.zero, block.scores, (job.block_k + PAD, block.n_lanes))


@njit(**OPTIONS)
def extra_of(job, block):
    return tile_at(job.zero, block.extra, (job.block_k, block.n_lanes))


@njit(**OPTIONS)
def acc_of(job, block):
    return tile_at(job.zero, block.acc, (job.value_dim + PAD, block.n_lanes))


@njit(**OPTIONS)
def lanes_of(job, block, address):
    """A number for each lane."""
    return tile_at(job.zero, address, (block.n_lanes,))


@njit(**OPTIONS)
def counts_of(block, address):
    """An integer for each lane."""
    return tile_at(INTP, address, (block.n_lanes,))


@njit(**OPTIONS)
def rows_of(job, block):
    return tile_at(job.zero, block.rows, (block.n_lanes, job.rows_ld))


@njit(**OPTIONS)
def find_block(job, block, task):
    """Fills in a task's query block: its rows and their keys."""
    number, head = task % job.n_blocks, task // job.n_blocks
    # The last block first: under a causal mask it takes longest, and short tasks at the end balance the
    # threads.
    number = job.n_blocks - 1 - number
    each, more = job.n_vectors // job.n_blocks, job.n_vectors % job.n_blocks
    first = number * each + min(number, more)
    block.n_vectors = each + (number < more)
    block.item, block.kv = head // job.num_kv_heads, head % job.num_kv_heads
    block.first_row, block.n_lanes = first * job.lanes, block.n_vectors * job.lanes
    block.n_rows = min(block.n_lanes, job.len_q * job.group_size - block.first_row)
    block.has_headroom = 0
    row_i, row_h = counts_of(block, block.row_i), counts_of(block, block.row_h)
    for lane in range(block.n_lanes):
        row = block.first_row + min(lane, block.n_rows - 1)
        row_i[lane] = row // job.group_size
        row_h[lane] = block.kv * job.group_size + row % job.group_size
    block.low = block.all_start = 0
    block.high = block.all_stop = job.len_k
    if job.has_band or job.has_intervals:
        find_intervals(job, block, 0, 0)


@stage
def find_intervals(job, block, x, y):
    """Each lane's keys by band and intervals, the keys that any lane may attend, and those that all may."""
    start, stop = counts_of(block, block.start), counts_of(block, block.stop)
    row_i = counts_of(block, block.row_i)
    low, high, all_start, all_stop = job.len_k, 0, 0, job.len_k
    len_k = job.len_k
    if job.has_lengths:
        len_k = view_of(job, KEY_LENGTHS, block.item, INTP)[0, 0, 0]
    shift = len_k - job.len_q if job.band_at_end else 0
    starts, stops = view_of(job, KEY_START, block.item, INTP), view_of(job, KEY_STOP, block.item, INTP)
    for lane in range(block.n_lanes):
        first, last = 0, len_k
        if job.has_band:
            first = max(0, row_i[lane] + shift - job.band_left)
            last = min(len_k, row_i[lane] + shift + job.band_right + 1)
        if job.has_intervals:
            first = max(first, starts[0, row_i[lane], 0])
            last = min(last, stops[0, row_i[lane], 0])
        start[lane], stop[lane] = first, last
        if first < last:
            low, high = min(low, first), max(high, last)
        all_start, all_stop = max(all_start, first), min(all_stop, last)
    block.low, block.high = low - low % KEY_STEP, high
    block.all_start, block.all_stop = all_start, all_stop
    return 0


@njit(**OPTIONS)
def tiles_of(job, block):
    """The first and the stop of the key tiles with keys that a row may attend."""
    return block.low // job.block_k, (block.high + job.block_k - 1) // job.block_k


@njit(**OPTIONS)
def keys_of(job, block, tile):
    """The first key of a key tile that a row may attend, and how many from there on."""
    first = max(tile * job.block_k, block.low)
    return first, min((tile + 1) * job.block_k, block.high) - first


@njit(**OPTIONS)
def first_chunk(key0, size):
    """The number of keys from key0 to the end of its chunk. Chunks begin at multiples of `size`."""
    return size - key0 % size


@njit(**OPTIONS)
def copy_row(to, source, n):
    """to[i] = source[i] for i < n; faster where neither has gaps."""
    if to.strides[0] == to.itemsize and source.strides[0] == to.itemsize:
        line, from_line = without_gaps(to), without_gaps(source)
        for i in range(n):
            line[i] = from_line[i]
    else:
        for i in range(n):
            to[i] = source[i]


@njit(**OPTIONS)
def pack_block(job, block):
    """The block's queries times their factor: as lanes, or as rows for `row_kernels`."""
    query, rows = view_of(job, QUERY, block.item, job.zero), rows_of(job, block)
    row_i, row_h = counts_of(block, block.row_i), counts_of(block, block.row_h)
    shape = (block.n_lanes, job.head_dim) if job.uses_rows else (job.head_dim, block.n_lanes)
    tile = tile_at(job.zero, block.query, shape)
    for lane in range(block.n_lanes):
        to = tile[lane] if job.uses_rows else rows[lane]
        copy_row(to, query[row_h[lane], row_i[lane]], job.head_dim)
    if not job.uses_rows:
        transpose(tile, rows, block.n_lanes, job.head_dim)
    high, low = splat(job.query_high), splat(job.query_low)
    for i in range(shape[0]):
        for at in range(0, shape[1], job.lanes):
            x = load(tile, (i, at))
            # Rounded about once; +0 for a zero of either sign.
            store(tile, (i, at), fma(x, high, fma(x, low, splat(job.zero))))
