"""Split-KV: few query rows over many keys, as in decoding, where reading keys and values takes most of the
time.

The query rows of a key/value head are one block, and every key tile gives a partial result of its own. These
are merged pairwise in a binary tree: tiles and tree depend on the positions of the keys alone, so the bits of
a result do not depend on the number of key tiles of a task. Flash-Decoding (Dao, Haziza, Massa and Sizov,
2023), with a tree where it has one sum.

`job` and `block` are the records of `layout`.
"""

from __future__ import annotations

from numba import njit

from fastattn.backends.numba.blocks import find_block, pack_block, tiles_of
from fastattn.backends.numba.calls import OPTIONS, stage
from fastattn.backends.numba.kernels import merge, write_large
from fastattn.backends.numba.sweep import attend, finish


@njit(**OPTIONS)
def use_partial(job, block, address):
    """Makes the partial result at an address that of the block: its row_max, row_sum and acc."""
    line = (block.n_lanes * job.itemsize + 63) // 64 * 64
    block.row_max, block.row_sum, block.acc = address, address + line, address + 2 * line


@njit(**OPTIONS)
def merge_at(job, block, one, two):
    """Merges the partial result at the address `two` into that at `one`, which becomes the block's."""
    use_partial(job, block, two)
    other = (block.row_max, block.row_sum, block.acc)
    use_partial(job, block, one)
    merge(job, block, other)


@njit(**OPTIONS)
def partial_at(job, block, task, depth):
    """The address of an entry of the stack of partial results. The first is the result of the task."""
    first = job.partials + task * job.partial_nbytes
    return first if depth == 0 else block.stack + depth * job.partial_nbytes


@njit(**OPTIONS)
def attend_key_tiles(job, block, task, first, stop):
    """The partial results of the key tiles first .. stop - 1, merged into the task's.

    Each entry of the stack is the root of a larger subtree than the next.
    """
    low, high = tiles_of(job, block)
    begin, end = max(first, low), min(stop, high)
    if begin >= end:  # no key tile to read: the partial result is empty
        begin, end = first, first + 1
    depth = 0
    for tile in range(begin, end):
        use_partial(job, block, partial_at(job, block, task, depth))
        attend(job, block, tile, tile + 1 if low <= tile < high else tile)
        depth += 1
        left, is_last = tile - first, tile + 1 == end
        while depth > 1 and (left & 1 or is_last):
            depth -= 1
            merge_at(job, block, partial_at(job, block, task, depth - 1), partial_at(job, block, task, depth))
            left >>= 1


@stage
def run_split_task(job, block, task, y):
    """Some key tiles of one key/value head."""
    head = task // job.n_splits
    first = task % job.n_splits * job.split_tiles
    find_block(job, block, head)
    pack_block(job, block)
    attend_key_tiles(job, block, task, first, min(first + job.split_tiles, job.n_key_tiles))
    if job.n_splits == 1:
        finish_head(job, block, head)
    return 0


@stage
def run_merge(job, block, head, y):
    """The outputs of one key/value head from the partial results of its tasks."""
    find_block(job, block, head)
    step, first, nbytes = 1, job.partials + head * job.n_splits * job.partial_nbytes, job.partial_nbytes
    while step < job.n_splits:
        for task in range(0, job.n_splits - step, 2 * step):
            merge_at(job, block, first + task * nbytes, first + (task + step) * nbytes)
        step *= 2
    if job.is_safe or job.has_weights:
        pack_block(job, block)
    finish_head(job, block, head)
    return 0


@njit(**OPTIONS)
def finish_head(job, block, head):
    """Writes all outputs of one key/value head from its first partial result."""
    use_partial(job, block, partial_at(job, block, head * job.n_splits, 0))
    if finish(job, block):
        attend_key_tiles(job, block, head * job.n_splits, 0, job.n_key_tiles)
        write_large(job, block, 0, 0)
