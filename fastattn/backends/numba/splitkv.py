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

from fastattn.backends.numba.blocks import find_block, pack_query, tiles_of
from fastattn.backends.numba.calls import OPTIONS, stage
from fastattn.backends.numba.kernels import merge, write_large
from fastattn.backends.numba.sweep import attend, finish


@njit(**OPTIONS)
def use_partial(job, block, number):
    """Makes a partial result that of the block: its row_max, row_sum and acc."""
    line = (block.n_lanes * job.itemsize + 63) // 64 * 64
    block.row_max = job.partials + number * job.partial_nbytes
    block.row_sum, block.acc = block.row_max + line, block.row_max + 2 * line


@njit(**OPTIONS)
def merge_tree(job, block, head, first, stop, step):
    """Merges the partial results of every `step`-th of the key tiles first .. stop - 1 into that of the
    first."""
    base = head * job.n_key_tiles
    while first + step < stop:
        for tile in range(first, stop - step, 2 * step):
            use_partial(job, block, base + tile + step)
            other = (block.row_max, block.row_sum, block.acc)
            use_partial(job, block, base + tile)
            merge(job, block, other)
        step *= 2


@njit(**OPTIONS)
def attend_tiles(job, block, head, first, stop):
    """The partial results of the key tiles first .. stop - 1, merged into that of the first."""
    low, high = tiles_of(job, block)
    for tile in range(first, stop):
        use_partial(job, block, head * job.n_key_tiles + tile)
        attend(job, block, tile, min(tile + 1, high) if tile >= low else tile)
    merge_tree(job, block, head, first, stop, 1)


@stage
def run_split_task(job, block, task, y):
    """Some key tiles of one key/value head, or the merge of all of them."""
    head = task // job.n_splits
    first = task % job.n_splits * job.split_tiles
    find_block(job, block, head)
    pack_query(job, block)
    attend_tiles(job, block, head, first, min(first + job.split_tiles, job.n_key_tiles))
    if job.n_splits == 1:
        finish_head(job, block, head)
    return 0


@stage
def run_merge(job, block, head, y):
    """The outputs of one key/value head from the partial results of its tasks."""
    find_block(job, block, head)
    merge_tree(job, block, head, 0, job.n_key_tiles, job.split_tiles)
    if job.is_safe or job.has_weights:
        pack_query(job, block)
    finish_head(job, block, head)
    return 0


@njit(**OPTIONS)
def finish_head(job, block, head):
    """Writes all outputs of one key/value head from its first partial result."""
    use_partial(job, block, head * job.n_key_tiles)
    if finish(job, block):
        # Sums of finite values may have overflowed.
        block.has_headroom = 1
        attend_tiles(job, block, head, 0, job.n_key_tiles)
        use_partial(job, block, head * job.n_key_tiles)
        write_large(job, block, 0, 0)
