"""Split-KV: few query rows over many keys, as in decoding, where reading keys and values takes most of the
time.

The query rows of a key/value head are consecutive rows of row tiles, and its keys are cut into key tiles. The
partial results of the key tiles are merged pairwise in a binary tree: tiles and tree depend on the positions
of the keys alone, so the bits of a result do not depend on the number of key tiles of a task. Flash-Decoding
(Dao, Haziza, Massa and Sizov, 2023), with a tree where it has one sum.

`job` and `block` are the records of `layout`, `w` is the address of the thread's scratch memory. Its stack
holds the partial results to be merged, in the order of their keys; each is the root of a larger subtree than
the next.
"""

from __future__ import annotations

from numba import njit

from fastattn._machine.constants import KEY_CHUNK
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
    note_outside,
    tile_state,
    words_of,
)

PARTIAL_NBYTES = PARTIAL.itemsize
LINE = 63

_partial_at = record_at(PARTIAL)


@njit(**OPTIONS)
def stacked(job, w, depth):
    return _partial_at(w + job.to_stack + depth * PARTIAL_NBYTES)


@njit(**OPTIONS)
def n_rows_of(job):
    return job.len_q * job.group_size


@njit(**OPTIONS)
def sums_of(job, data):
    """The address of the row_sum of a partial result, which follows its row_max."""
    return data + (job.max_lanes * job.itemsize + LINE) // 64 * 64


@njit(**OPTIONS)
def acc_of(job, data):
    return data + 2 * ((job.max_lanes * job.itemsize + LINE) // 64 * 64)


@routine
def merge_before(job, w, block, key_tile):
    """Merges the subtrees that are complete before `key_tile`; the whole stack where key_tile is -1.

    The lowest common ancestor of two key tiles has the height of the highest bit in which their numbers
    differ.
    """
    while block.depth >= 2:
        last, before = stacked(job, w, block.depth - 1), stacked(job, w, block.depth - 2)
        if key_tile >= 0 and (before.key_tile ^ last.key_tile) > (last.key_tile ^ key_tile):
            break
        row_kernels.merge_rows(job, acc_of(job, before.data), before.data, sums_of(job, before.data),
                                acc_of(job, last.data), last.data, sums_of(job, last.data), n_rows_of(job),
                                job.acc_ld, job.exponent_factor)  # fmt: skip
        block.depth -= 1
    return 0


@routine
def score_key_tile(job, w, block, state, key0, n_keys):
    """Scores of the keys key0 .. key0 + n_keys - 1 for all rows, masked; the state of their words."""
    key_row = row_stride(job, KEY)
    keys, distance, scores = block.key + key0 * key_row, job.key_prefetch * key_row, w + job.to_scores
    if column_stride(job, KEY) != job.itemsize:
        kernels.copy_rows(
            job, w + job.to_key_copy, keys, key_row, column_stride(job, KEY), n_keys, job.head_dim
        )
        keys, key_row, distance = w + job.to_key_copy, job.head_dim * job.itemsize, 0
    row_kernels.score_rows(job, scores, job.block_k, w + job.to_query, job.query_ld, block.n_rows, keys,
                            key_row, n_keys, job.head_dim, distance)  # fmt: skip
    root, softcap, marks = job.score_root, job.softcap, 0
    if job.has_score_mod:
        if softcap > 0 or root != 1:
            row_kernels.adjust_rows(job, scores, job.block_k, block.n_rows, n_keys, root, softcap, 0, 0)
            root, softcap = 1.0, 0.0
        marks = call_modify(job.score_mod, scores, 0, job.block_k, block.n_rows, n_keys, key0, block.item,
                            w + job.to_row_h, w + job.to_row_i, job.aux)  # fmt: skip
    if job.has_bias:
        find_bias_rows(job, w, block, key0, n_keys)
    if job.has_bias or softcap > 0 or root != 1 or state == TILE_PARTIAL:
        row_kernels.adjust_rows(job, scores, job.block_k, block.n_rows, n_keys, root, softcap,
                                bias_rows_of(job, w), words_of(job, w, state))  # fmt: skip
    if marks != 0:
        for row in range(block.n_rows):
            note_outside(job, w, block, row, scores + row * job.block_k * job.itemsize, job.itemsize, key0,
                         n_keys)  # fmt: skip
    if job.has_score_mod and job.is_nonfinite_safe:
        return note_masked(job, w, block.n_rows, job.block_k * job.itemsize, job.itemsize, n_keys, state)
    return state


@njit(**OPTIONS)
def key_tile_start(job, block, key_tile):
    # A multiple of KEY_CHUNK, the keys of a partial sum: to skip masked keys in front then changes no bit.
    return max(key_tile * job.block_k, block.low // KEY_CHUNK * KEY_CHUNK)


@routine
def add_key_tile_values(job, w, block, acc, state, key0, n_keys):
    """Weights times values of one key tile."""
    value_row, value_col = row_stride(job, VALUE), column_stride(job, VALUE)
    at = block.value + key0 * value_row
    values, row, distance, nonfinite = at, value_row, job.value_prefetch * value_row, 0
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
    """The partial result of one key tile; False where no row may attend any of its keys."""
    key0 = key_tile_start(job, block, key_tile)
    n_keys = min((key_tile + 1) * job.block_k, block.high) - key0
    state = tile_state(job, w, block, key0, n_keys, 1)
    if state == TILE_EMPTY:
        return False
    state = score_key_tile(job, w, block, state, key0, n_keys)
    if block.has_headroom:
        kernels.copy_rows(job, partial.data, w + job.to_row_max, 0, job.itemsize, 1, job.max_lanes)
    row_kernels.softmax_rows(job, w + job.to_scores, job.block_k, partial.data, sums_of(job, partial.data),
                              block.n_rows, n_keys, job.exponent_factor, block.has_headroom)  # fmt: skip
    if block.has_headroom:
        kernels.leave_headroom(job, w + job.to_scores, job.block_k * job.itemsize, job.itemsize,
                               block.n_rows, n_keys, w + job.to_inverse)  # fmt: skip
    add_key_tile_values(job, w, block, acc_of(job, partial.data), state, key0, n_keys)
    partial.key_tile = key_tile
    return True


@routine
def attend_key_tiles(job, w, block, first, stop):
    """One partial result of the key tiles first .. stop - 1 on the stack, or none where all their keys are
    masked."""
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
    """Merges the sinks, which are logits without a value, with the partial result on the stack, if there is
    one."""
    partial = stacked(job, w, block.depth)
    partial.data = w + job.to_acc + (job.n_partials - 1) * job.partial_nbytes
    partial.key_tile = 0
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
    """The weights of all rows, recomputed from their scores with the final row_max and row_sum.

    Whether any is NaN in a tile where keys are masked for only some rows.
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
    """Writes all outputs of one key/value head from the stack."""
    if block.depth == 0 or job.sinks != 0:
        add_sinks(job, w, block)
    partial = stacked(job, w, 0)
    find_rows(job, OUT, block, 0, block.n_rows, w + job.to_out_rows)
    kernels.finish(job, w + job.to_inverse, w + job.to_lse if job.has_lse else 0, partial.data, sums_of(job,
                   partial.data), job.max_lanes, job.exponent_factor)  # fmt: skip
    nonfinite = row_kernels.unpack_rows(job, w + job.to_out_rows, column_stride(job, OUT), block.n_rows,
                                        acc_of(job, partial.data), job.acc_ld, job.value_dim,
                                        w + job.to_inverse, job.max_lanes)  # fmt: skip
    if nonfinite != 0:
        job.saw_nonfinite = 1
    if nonfinite != 0 and job.runs_again:
        # Sums of finite values may have overflowed.
        kernels.copy_rows(job, w + job.to_row_max, partial.data, 0, job.itemsize, 1, job.max_lanes)
        block.has_headroom = 1
        attend_key_tiles(job, w, block, 0, job.n_key_tiles)
        acc = acc_of(job, stacked(job, w, 0).data)
        kernels.write_large(job, w + job.to_out_rows, column_stride(job, OUT), block.n_rows, job.value_dim,
                            acc, job.acc_ld * job.itemsize, job.itemsize, w + job.to_inverse,
                            job.max_lanes)  # fmt: skip
    if job.has_lse:
        find_rows(job, LSE, block, 0, block.n_rows, w + job.to_rows)
        kernels.scatter(job, w + job.to_rows, w + job.to_lse, block.n_rows)
    if job.has_weights and write_row_weights(job, w, block) != 0:
        job.saw_nonfinite = 1
    return 0


@routine
def publish_partial(job, w, block, task):
    """Stores the partial result of one task for the last task of its head to end, which merges those of all
    tasks on its stack; whether this task is the last."""
    head = task // job.n_splits
    own = _partial_at(job.partials + task * PARTIAL_NBYTES)
    own.key_tile = -1
    if block.depth > 0:
        partial = stacked(job, w, 0)
        kernels.copy_rows(
            job,
            own.data,
            partial.data,
            job.partial_nbytes,
            job.itemsize,
            1,
            job.partial_nbytes // job.itemsize,
        )
        own.key_tile = partial.key_tile
    if fetch_add(job.left + head * 8, -1) > 1:
        return 0
    block.depth = 0
    for other in range(head * job.n_splits, (head + 1) * job.n_splits):
        partial = _partial_at(job.partials + other * PARTIAL_NBYTES)
        if partial.key_tile >= 0:
            merge_before(job, w, block, partial.key_tile)
            top = stacked(job, w, block.depth)
            top.data, top.key_tile = partial.data, partial.key_tile
            block.depth += 1
    merge_before(job, w, block, -1)
    return 1


@routine
def run_split_task(job, w, block, task):
    """Some key tiles of one key/value head; the last task of a head to end writes its outputs."""
    head, first = task // job.n_splits, task % job.n_splits * job.split_tiles
    find_block(job, w, block, head)
    find_rows(job, QUERY, block, 0, block.n_rows, w + job.to_rows)
    row_kernels.pack_rows(job, w + job.to_query, job.query_ld, w + job.to_rows, block.n_rows,
                           column_stride(job, QUERY), job.head_dim, job.query_high,
                           job.query_low)  # fmt: skip
    attend_key_tiles(job, w, block, first, first + job.split_tiles)
    if job.n_splits == 1 or publish_partial(job, w, block, task) != 0:
        finish_rows(job, w, block)
    return 0
