"""A query block's addresses, in the caller's arrays and the thread's copies, and the keys each of its rows
may attend.

`job` and `block` are the records of `layout`, `w` is the address of the thread's scratch memory. The lists of
a block have an entry for each lane, or in split-KV for each row.
"""

from __future__ import annotations

from numba import njit, types
from numba.extending import intrinsic

from fastattn.backends.numba.codegen.calls import OPTIONS, routine
from fastattn.backends.numba.codegen.emit import INTP
from fastattn.backends.numba.codegen.intrinsics import int64s
from fastattn.backends.numba.codegen.register_tiles import TILE_ROWS
from fastattn.backends.numba.layout import (
    ADDRESS,
    COL,
    HEAD,
    KEY,
    KEY_LENGTHS,
    KEY_START,
    KEY_STEP,
    KEY_STOP,
    LEAD,
    QUERY,
    ROW,
    VALUE,
    WORD,
)

# In IR, as all files use them, and a Numba function is compiled again wherever it is used.


def _load(builder, address):
    return builder.load(builder.inttoptr(address, INTP.as_pointer()))


def job_entry(builder, job, record, name):
    """An integer field of the record `job`."""
    return _load(builder, builder.add(builder.ptrtoint(record, INTP), INTP(job.offset(name))))


def _view_entry(builder, job, record, view, column):
    """An entry of the table of views."""
    width = builder.add(job_entry(builder, job, record, "n_lead"), INTP(LEAD))
    entry = builder.add(builder.mul(view, width), column)
    return _load(builder, builder.add(job_entry(builder, job, record, "views"), builder.mul(entry, INTP(8))))


@intrinsic
def stride_of(context, job, view, column):
    def codegen(context, builder, signature, values):
        return _view_entry(builder, job, *values)

    return types.intp(job, types.intp, types.intp), codegen


@intrinsic
def column_stride(context, job, view):
    def codegen(context, builder, signature, values):
        return _view_entry(builder, job, *values, INTP(COL))

    return types.intp(job, types.intp), codegen


@intrinsic
def row_stride(context, job, view):
    def codegen(context, builder, signature, values):
        return _view_entry(builder, job, *values, INTP(ROW))

    return types.intp(job, types.intp), codegen


@routine
def at_item(job, view, item):
    """Where a batch item starts in an array."""
    address = stride_of(job, view, ADDRESS)
    shape, last = int64s(job.lead_shape), job.n_lead - 1  # axes from the innermost out
    for axis in range(last):
        address += item % shape[axis] * stride_of(job, view, LEAD + axis)
        item //= shape[axis]
    if last >= 0:
        address += item * stride_of(job, view, LEAD + last)
    return address


@routine
def list_rows(job, start, head, row, first_row, n_rows, n_lanes, to):
    """Writes to the list at `to`, for each of n_rows rows of a key/value head from first_row on,
    start + g * head + i * row, where row r is query row i = r // group_size of query head g = r % group_size.
    Entries up to n_lanes repeat the last."""
    entries, group_size = int64s(to), job.group_size
    if group_size == 1:
        for r in range(n_rows):
            entries[r] = start + (first_row + r) * row
    else:
        i, g = first_row // group_size, first_row % group_size
        for r in range(n_rows):
            entries[r] = start + g * head + i * row
            g += 1
            if g == group_size:
                g = 0
                i += 1
    for lane in range(n_rows, n_lanes):
        entries[lane] = entries[n_rows - 1]
    return 0


@routine
def find_rows(job, view, block, byte, n_lanes, to):
    """Writes the address of every lane's row in an array, plus an offset of `byte`, to the list at `to`."""
    head, row = stride_of(job, view, HEAD), stride_of(job, view, ROW)
    start = at_item(job, view, block.item) + block.kv * job.group_size * head + byte
    list_rows(job, start, head, row, block.first_row, block.n_rows, n_lanes, to)
    return 0


@njit(**OPTIONS)
def task_rows(job, task):
    """The rows of a task: batch item, key/value head, first row, vectors of lanes and rows."""
    number, head_item = task % job.n_blocks, task // job.n_blocks
    # The last block first: under a causal mask it takes longest, and short tasks at the end balance the
    # threads.
    number = job.n_blocks - 1 - number
    each, more = job.n_vectors // job.n_blocks, job.n_vectors % job.n_blocks
    first = number * each + min(number, more)
    stop = first + each + (number < more)
    first_row = first * job.lanes
    n_rows = min(stop * job.lanes, job.len_q * job.group_size) - first_row
    return head_item // job.num_kv_heads, head_item % job.num_kv_heads, first_row, stop - first, n_rows


@routine
def find_block(job, w, block, task):
    """Fills in a task's query block: its rows, its addresses, and its key intervals."""
    item, kv, first_row, n_vectors, n_rows = task_rows(job, task)
    block.item, block.kv, block.first_row, block.has_headroom = item, kv, first_row, 0
    block.n_vectors, block.n_rows = n_vectors, n_rows
    block.ld = n_rows if job.uses_split_kv else n_vectors * job.lanes
    block.key = at_item(job, KEY, item) + kv * stride_of(job, KEY, HEAD)
    block.value = at_item(job, VALUE, item) + kv * stride_of(job, VALUE, HEAD)
    # Where the kernels read them: in place, or in the thread's copies.
    block.keys, block.key_row = block.key, row_stride(job, KEY)
    if job.copies_keys:
        block.keys, block.key_row = w + job.to_key_copy, job.head_dim * job.itemsize
    block.values, block.value_row, block.panel = block.value, row_stride(job, VALUE), TILE_ROWS * job.itemsize
    if job.packs_values:
        block.values, block.value_row = w + job.to_value_copy, TILE_ROWS * job.itemsize
        block.panel = job.panel

    list_rows(job, 0, 0, 1, first_row, n_rows, block.ld, w + job.to_row_i)
    list_rows(job, kv * job.group_size, 1, 0, first_row, n_rows, block.ld, w + job.to_row_h)
    block.low = block.all_start = 0
    block.high = block.all_stop = job.len_k
    if job.is_masked:
        find_intervals(job, w, block)
    return 0


@routine
def find_queries(job, task, to):
    """Writes the addresses of a task's query rows to the list at `to`; their number."""
    item, kv, first_row, _, n_rows = task_rows(job, task)
    head, row = stride_of(job, QUERY, HEAD), stride_of(job, QUERY, ROW)
    start = at_item(job, QUERY, item) + kv * job.group_size * head
    list_rows(job, start, head, row, first_row, n_rows, n_rows, to)
    return n_rows


@routine
def find_intervals(job, w, block):
    """Each lane's keys by band and intervals, the keys that any lane may attend, and those that all may."""
    start, stop, row_i = int64s(w + job.to_start), int64s(w + job.to_stop), int64s(w + job.to_row_i)
    low, high, all_start, all_stop = job.len_k, 0, 0, job.len_k
    starts = stops = start_row = stop_row = shift = 0
    len_k = job.len_k
    if job.has_lengths:
        len_k = int64s(at_item(job, KEY_LENGTHS, block.item))[0]
    if job.band_at_end:
        shift = len_k - job.len_q
    if job.has_intervals:
        starts, stops = at_item(job, KEY_START, block.item), at_item(job, KEY_STOP, block.item)
        start_row, stop_row = stride_of(job, KEY_START, ROW), stride_of(job, KEY_STOP, ROW)
    for lane in range(block.ld):
        start[lane], stop[lane] = 0, len_k
        if job.has_band:
            start[lane] = max(0, row_i[lane] + shift - job.band_left)
            stop[lane] = min(len_k, row_i[lane] + shift + job.band_right + 1)
        if job.has_intervals:
            start[lane] = max(start[lane], int64s(starts + row_i[lane] * start_row)[0])
            stop[lane] = min(stop[lane], int64s(stops + row_i[lane] * stop_row)[0])
        if start[lane] < stop[lane]:
            low, high = min(low, start[lane]), max(high, stop[lane])
        all_start, all_stop = max(all_start, start[lane]), min(all_stop, stop[lane])
    # Rounded down, so that partial sums cover the same keys whichever rows share the block.
    block.low = low - low % (WORD if job.has_mask_map else KEY_STEP)
    block.high, block.all_start, block.all_stop = high, all_start, all_stop
    return 0
