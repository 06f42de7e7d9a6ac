"""What a block of threads works on: its query rows, and the keys that they may attend to."""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import cuda

from fastattn.backends.cuda.form import Form, Shape
from fastattn.backends.cuda.intrinsics import U, memory
from fastattn.backends.cuda.tiles import element


class Block(NamedTuple):
    """The task of a block of threads: a tile of the query rows that read one key/value head, and a tile of
    the value's columns, over a split of the keys."""

    item: int
    named_item: int  #: the item's number for the caller's functions
    kv_head: int
    group: int  #: query heads that read the key/value head
    split: int
    column_tile: int
    row0: int  #: first row of the tile, among those of all query heads that read the key/value head
    n_rows: int  #: how many these are
    column0: int  #: first column of the values


class Rows(NamedTuple):
    """The query rows of a block, in shared memory. Rows past the last repeat it, and are not stored."""

    heads: Any
    queries: Any
    lines: Any  #: where each row begins in the queries
    starts: Any  #: first key of its interval
    stops: Any  #: behind the last key of its interval


class Keys(NamedTuple):
    """No row of a block may attend to a key outside of low .. high - 1. The intervals of all its rows contain
    all_start .. all_stop - 1."""

    low: int
    high: int
    all_start: int
    all_stop: int


def find_block(shape: Shape) -> Any:
    """The `Block` of the thread that asks."""
    TILE_ROWS, TILE_COLUMNS = shape.tile_q, shape.tile_columns

    @cuda.jit(device=True)
    def find_block(sizes, cut):
        batch, num_heads, num_kv_heads, len_q, _, _, _ = sizes
        n_tiles, n_column_tiles, _, first_item = cut
        rest = cuda.blockIdx.x
        kv_head, rest = rest % num_kv_heads, rest // num_kv_heads
        column_tile, rest = rest % n_column_tiles, rest // n_column_tiles
        item, rest = rest % batch, rest // batch
        tile, split = rest % n_tiles, rest // n_tiles  # tiles that read the same keys run together
        row0 = (n_tiles - 1 - tile) * TILE_ROWS  # the last first: a causal mask leaves them the most keys
        group = num_heads // num_kv_heads
        return Block(
            item, first_item + item, kv_head, group, split, column_tile, row0, group * len_q,
            column_tile * TILE_COLUMNS,
        )  # fmt: skip

    return find_block


def find_rows(form: Form) -> Any:
    """Fills in the `Rows` of a block; all its threads take part."""
    TILE_ROWS, HAS_INTERVALS, HAS_BAND, HAS_LENGTHS = (
        form.shape.tile_q, form.has_intervals, form.has_band, form.has_lengths,
    )  # fmt: skip
    numbers = memory("int64")

    @cuda.jit(device=True)
    def find_rows(rows, block, thread, sizes, q_view, masks):
        _, _, _, len_q, len_k, _, _ = sizes
        band, lengths_view, intervals, _, _, _ = masks
        heads, queries, lines, starts, stops = rows
        item = block.item
        row = thread.number
        if row < TILE_ROWS:
            at = min(block.row0 + row, block.n_rows - 1)
            head, query = block.kv_head * block.group + at // len_q, at % len_q
            heads[row], queries[row] = head, query
            lines[row] = element(q_view, item, head, query)
            start, stop = 0, len_k
            if HAS_BAND:
                left, right, is_at_end = band
                if HAS_LENGTHS:
                    stop = numbers(lengths_view)[U(item * lengths_view[1])]
                position = query + is_at_end * (stop - len_q)
                start, stop = min(max(start, position - left), len_k), min(stop, position + right + 1)
            if HAS_INTERVALS:
                start_view, stop_view = intervals
                start = max(start, numbers(start_view)[U(item * start_view[1] + query * start_view[2])])
                stop = min(stop, numbers(stop_view)[U(item * stop_view[1] + query * stop_view[2])])
            starts[row], stops[row] = start, max(stop, start)

    return find_rows


def find_keys(form: Form) -> Any:
    """The `Keys` of these rows in a split, one of split_keys keys of len_k."""
    TILE_ROWS, IS_BOUNDED = form.shape.tile_q, form.has_intervals or form.has_band

    @cuda.jit(device=True)
    def find_keys(rows, len_k, split, split_keys):
        starts, stops = rows.starts, rows.stops
        low, high, all_start, all_stop = 0, len_k, 0, len_k
        if IS_BOUNDED:
            low, high = len_k, 0
            for row in range(TILE_ROWS):
                if starts[row] < stops[row]:
                    low, high = min(low, starts[row]), max(high, stops[row])
                all_start, all_stop = max(all_start, starts[row]), min(all_stop, stops[row])
        low, high = max(low, split * split_keys), min(high, (split + 1) * split_keys)
        return Keys(low, high, all_start, all_stop)

    return find_keys
