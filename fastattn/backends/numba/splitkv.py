"""Few query rows over many keys, as when tokens are generated: the work is to read keys and values once.

All rows of a key/value head stand side by side in row tiles, and the keys are cut into key tiles. Their
partial results are merged two by two, as the leaves of a binary tree over all keys: the cut and the tree
depend on the position of a key alone, so the bits of a result do not depend on how many of them a thread
takes at a time. Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023), with a tree where it has one sum.

`job` and `block` are the records of `layout`, `w` is the address of the thread's scratch memory. The stack
there has partials that wait to be merged, in the order of their keys; each stands higher in the tree than the
next.
"""

from __future__ import annotations

from numba import njit

from fastattn._constants import KEY_CHUNK
from fastattn.backends.numba import kernels, row_kernels
from fastattn.backends.numba.blocks import column_stride, find_block, find_rows, row_stride
from fastattn.backends.numba.codegen.calls import OPTIONS, routine
from fastattn.backends.numba.codegen.intrinsics import call_modify, fetch_add, int64s, record_at
from fastattn.backends.numba.layout import KEY, LSE, OUT, PARTIAL, QUERY, VALUE, WEIGHTS
from fastattn.backends.numba.mask_tile import (
    TILE_EMPTY,
    TILE_PARTIAL,
    bias_rows_of,
    find_bias_rows,
    note_masked,
    tile_state,
    words_of,
)

PARTIAL_NBYTES = PARTIAL.itemsize
LINE = 63

_partial_at = record_at(PARTIAL)


@njit(**OPTIONS)
def stacked(job, w, place):
    return _partial_at(w + job.to_stack + place * PARTIAL_NBYTES)


@njit(**OPTIONS)
def n_rows_of(job):
    return job.len_q * job.group_size


@njit(**OPTIONS)
def sums_of(job, data):
    """Where a partial's row_sum stands behind its row_max."""
    return data + (job.max_lanes * job.itemsize + LINE) // 64 * 64


@njit(**OPTIONS)
def acc_of(job, data):
    return data + 2 * ((job.max_lanes * job.itemsize + LINE) // 64 * 64)


@routine
def merge_before(job, w, block, key_tile):
    """Merges what the tree joins before `key_tile` comes in; everything where key_tile is -1.

    Two key tiles meet in the tree at the height of the highest bit in which their numbers differ.
    """
    while block.depth >= 2:
        last, before = stacked(job, w, block.depth - 1), stacked(job, w, block.depth - 2)
        if key_tile >= 0 and (before.key_tile ^ last.key_tile) > (last.key_tile ^ key_tile):
            break
        row_kernels.merge_rows(job, acc_of(job, before.data), before.data, sums_of(job, before.data),
                                acc_of(job, last.data), last.data, sums_of(job, last.data), n_rows_of(job),
                                job.acc_ld, job.exponent_factor)  # fmt: skip
        before.has_masked |= last.has_masked
        block.depth -= 1
    return 0


@routine
def score_key_tile(job, w, block, state, key0, n_keys):
    """Scores of the keys key0 .. key0 + n_keys - 1 for all rows, masked; the state of their words."""
    key_row = row_stride(job, KEY)
    keys, distance, scores = block.key + key0 * key_row, job.key_prefetch, w + job.to_scores
    if column_stride(job, KEY) != job.itemsize:
        kernels.copy_rows(
            job, w + job.to_key_copy, keys, key_row, column_stride(job, KEY), n_keys, job.head_dim
        )
        keys, key_row, distance = w + job.to_key_copy, job.head_dim * job.itemsize, 0
    row_kernels.score_rows(job, scores, job.block_k, w + job.to_query, job.query_ld, block.n_rows, keys,
                            key_row, n_keys, job.head_dim, distance)  # fmt: skip
    root, softcap = job.score_root, job.softcap
    if job.has_score_mod:
        if softcap > 0 or root != 1:
            row_kernels.adjust_rows(job, scores, job.block_k, block.n_rows, n_keys, root, softcap, 0, 0)
            root, softcap = 1.0, 0.0
        outside = call_modify(job.score_mod, scores, 0, job.block_k, block.n_rows, n_keys, key0, block.item,
                              w + job.to_row_h, w + job.to_row_i, job.aux)  # fmt: skip
        if outside != 0:
            job.read_outside = outside
    if job.has_bias:
        find_bias_rows(job, w, block, key0, n_keys)
    if job.has_bias or softcap > 0 or root != 1 or state == TILE_PARTIAL:
        row_kernels.adjust_rows(job, scores, job.block_k, block.n_rows, n_keys, root, softcap,
                                bias_rows_of(job, w), words_of(job, w, state))  # fmt: skip
    if job.has_score_mod and job.is_nonfinite_safe:
        return note_masked(job, w, block.n_rows, job.block_k * job.itemsize, job.itemsize, n_keys, state)
    return state


@njit(**OPTIONS)
def key_tile_start(job, block, key_tile):
    # In whole chunks of keys, which are summed up together: what is left out in front changes no bit.
    return max(key_tile * job.block_k, block.low // KEY_CHUNK * KEY_CHUNK)


@routine
def add_leaf_values(job, w, block, acc, state, key0, n_keys):
    """Weights times values of one key_tile."""
    value_row, value_col = row_stride(job, VALUE), column_stride(job, VALUE)
    at = block.value + key0 * value_row
    values, row, distance, nonfinite = at, value_row, job.value_prefetch, 0
    if job.is_nonfinite_safe:
        nonfinite = kernels.clean_values(
            job, w + job.to_clean, at, value_row, value_col, n_keys, job.value_dim
        )
        values, row, distance = w + job.to_clean, job.value_dim * job.itemsize, 0
    elif value_col != job.itemsize:
        kernels.copy_rows(job, w + job.to_value_copy, at, value_row, value_col, n_keys, job.value_dim)
        values, row, distance = w + job.to_value_copy, job.value_dim * job.itemsize, 0
    row_kernels.accumulate_rows(job, acc, job.acc_ld, w + job.to_scores, job.block_k, block.n_rows, values,
                                 row, n_keys, job.value_dim, distance)  # fmt: skip
    if nonfinite != 0:
        kernels.add_nonfinite_values(job, acc, job.itemsize, job.acc_ld * job.itemsize, w + job.to_scores,
                                job.itemsize, job.block_k * job.itemsize, block.n_rows, at, value_row,
                                value_col, n_keys, job.value_dim, bias_rows_of(job, w), words_of(job, w,
                                state), block.n_rows)  # fmt: skip
    return 0


@njit(**OPTIONS)
def attend_key_tile(job, w, block, key_tile, partial):
    """Softmax and values over one key_tile into partial; whether any row may attend any of its keys."""
    key0 = key_tile_start(job, block, key_tile)
    n_keys = min((key_tile + 1) * job.block_k, block.high) - key0
    state = tile_state(job, w, block, key0, n_keys, 1)
    if state == TILE_EMPTY:
        return False
    state = score_key_tile(job, w, block, state, key0, n_keys)
    row_kernels.softmax_rows(job, w + job.to_scores, job.block_k, partial.data, sums_of(job, partial.data),
                              block.n_rows, n_keys, job.exponent_factor, 0)  # fmt: skip
    add_leaf_values(job, w, block, acc_of(job, partial.data), state, key0, n_keys)
    partial.key_tile = key_tile
    partial.has_masked = 1 if state == TILE_PARTIAL or job.may_mask else 0
    return True


@routine
def attend_key_tiles(job, w, block, first, stop):
    """The key tiles first .. stop - 1 into one partial result on the stack, or none if all are masked."""
    block.depth = 0
    first = max(first, block.low // job.block_k)
    stop = min(stop, (block.high + job.block_k - 1) // job.block_k)
    for key_tile in range(first, stop):
        merge_before(job, w, block, key_tile)
        partial = stacked(job, w, block.depth)
        partial.data = w + job.to_acc + block.depth * job.partial_nbytes
        if attend_key_tile(job, w, block, key_tile, partial):
            block.depth += 1
    merge_before(job, w, block, -1)
    return 0


@routine
def add_sinks(job, w, block):
    """What is left on the stack, if anything, and the sinks in one partial: logits without a value."""
    partial = stacked(job, w, block.depth)
    partial.data = w + job.to_acc + (job.n_partials - 1) * job.partial_nbytes
    partial.key_tile = 0
    partial.has_masked = 0
    kernels.start_rows(
        job, partial.data, sums_of(job, partial.data), n_rows_of(job), job.sinks, w + job.to_row_h
    )
    kernels.fill(job, acc_of(job, partial.data), n_rows_of(job) * job.acc_ld, 0.0)
    block.depth += 1
    merge_before(job, w, block, -1)
    if job.sinks != 0:
        partial = stacked(job, w, 0)
        kernels.end_rows(
            job, partial.data, sums_of(job, partial.data), n_rows_of(job), job.sinks, w + job.to_row_h
        )
    return 0


@routine
def write_row_weights(job, w, block):
    """The weights of all rows: their scores once more, against the row_max now known.

    Whether any of a tile in which only some may be read is NaN.
    """
    nan, partial = 0, stacked(job, w, 0)
    find_rows(job, WEIGHTS, block, 0, block.n_rows, w + job.to_out_rows)
    rows = int64s(w + job.to_out_rows)
    for r in range(block.n_rows):
        kernels.fill(job, rows[r], job.len_k, 0.0)
    for key_tile in range(block.low // job.block_k, (block.high + job.block_k - 1) // job.block_k):
        key0 = key_tile_start(job, block, key_tile)
        n_keys = min((key_tile + 1) * job.block_k, block.high) - key0
        state = tile_state(job, w, block, key0, n_keys, 1)
        if state == TILE_EMPTY:
            continue
        state = score_key_tile(job, w, block, state, key0, n_keys)
        row_kernels.softmax_rows(job, w + job.to_scores, job.block_k, partial.data, w + job.to_row_sum,
                                  block.n_rows, n_keys, job.exponent_factor, 1)  # fmt: skip
        find_rows(job, WEIGHTS, block, key0 * job.itemsize, block.n_rows, w + job.to_rows)
        if row_kernels.unpack_rows(job, w + job.to_rows, job.itemsize, block.n_rows, w + job.to_scores,
                                    job.block_k, n_keys, w + job.to_inverse, job.max_lanes) != 0:  # fmt: skip
            if state == TILE_PARTIAL or job.may_mask:
                nan = 1
            if job.is_nonfinite_safe:
                kernels.clear_masked(job, w + job.to_rows, block.n_rows, n_keys, bias_rows_of(job, w),
                                     words_of(job, w, state), block.n_rows)  # fmt: skip
    return nan


@routine
def finish_rows(job, w, block):
    """All outputs of one key/value head, from what is on the stack."""
    if block.depth == 0 or job.sinks != 0:
        add_sinks(job, w, block)
    partial = stacked(job, w, 0)
    find_rows(job, OUT, block, 0, block.n_rows, w + job.to_out_rows)
    kernels.finish(job, w + job.to_inverse, w + job.to_lse if job.has_lse else 0, partial.data, sums_of(job,
                   partial.data), job.max_lanes, job.exponent_factor)  # fmt: skip
    nan = row_kernels.unpack_rows(job, w + job.to_out_rows, column_stride(job, OUT), block.n_rows,
                                   acc_of(job, partial.data), job.acc_ld, job.value_dim, w + job.to_inverse,
                                   job.max_lanes)  # fmt: skip
    if nan != 0 and partial.has_masked != 0:
        # It may be 0 * NaN of a masked key.
        job.saw_nan = 1
    if job.has_lse:
        find_rows(job, LSE, block, 0, block.n_rows, w + job.to_rows)
        kernels.scatter(job, w + job.to_rows, w + job.to_lse, block.n_rows)
    if job.has_weights and write_row_weights(job, w, block) != 0:
        job.saw_nan = 1
    return 0


@routine
def leave_partial(job, w, block, task):
    """Hands in the partial result of one task; whether it was the last of its head, whose partial results are
    then all on the stack."""
    head = task // job.n_splits
    mine = _partial_at(job.partials + task * PARTIAL_NBYTES)
    mine.key_tile = -1
    if block.depth > 0:
        partial = stacked(job, w, 0)
        kernels.copy_rows(
            job,
            mine.data,
            partial.data,
            job.partial_nbytes,
            job.itemsize,
            1,
            job.partial_nbytes // job.itemsize,
        )
        mine.has_masked = partial.has_masked
        mine.key_tile = partial.key_tile
    if fetch_add(job.left + head * 8, -1) > 1:
        return 0
    block.depth = 0
    for other in range(head * job.n_splits, (head + 1) * job.n_splits):
        partial = _partial_at(job.partials + other * PARTIAL_NBYTES)
        if partial.key_tile >= 0:
            merge_before(job, w, block, partial.key_tile)
            top = stacked(job, w, block.depth)
            top.data, top.key_tile, top.has_masked = partial.data, partial.key_tile, partial.has_masked
            block.depth += 1
    merge_before(job, w, block, -1)
    return 1


@routine
def run_split_task(job, w, block, task):
    """Some key tiles of one key/value head; the thread that does the last of a head writes its outputs."""
    head, first = task // job.n_splits, task % job.n_splits * job.split_tiles
    find_block(job, w, block, head)
    find_rows(job, QUERY, block, 0, block.n_rows, w + job.to_rows)
    row_kernels.pack_rows(job, w + job.to_query, job.query_ld, w + job.to_rows, block.n_rows,
                           column_stride(job, QUERY), job.head_dim, job.query_high,
                           job.query_low)  # fmt: skip
    attend_key_tiles(job, w, block, first, first + job.split_tiles)
    if job.n_splits == 1 or leave_partial(job, w, block, task) != 0:
        finish_rows(job, w, block)
    return 0
