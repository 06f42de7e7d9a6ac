"""The two records that compiled code works on: one of a call, one of a thread's query block.

Compiled code is the same for any number of axes and any strides: it is specialised on the dtype alone.
`prepared` fills in both records; addresses are those of memory that outlives the call.
"""

from __future__ import annotations

from functools import cache

import numpy as np

#: Rows of the table of views, one for each array. A row has the address, the sizes of head, row and column,
#: their strides, and the strides of the leading axes, innermost first. One row more, the last, has the sizes
#: of the leading axes.
VIEWS = (
    QUERY, KEY, VALUE, OUT, LSE, WEIGHTS, BIAS, DENSE, KEY_START, KEY_STOP, MASK_INDEX, KEY_LENGTHS,
) = range(12)  # fmt: skip
ADDRESS, SHAPE, STRIDES, LEAD = 0, 1, 4, 7

#: The integers of the record of a call. `REALS` follow. The last of these is 0: compiled code takes the dtype
#: from it.
COUNTS = (
    "stages",  # address of the table of stages, see `calls`
    "views", "n_lead",  # address of the table of views, and its leading axes
    "num_kv_heads", "group_size", "len_q", "len_k", "head_dim", "value_dim", "itemsize",
    "has_lse", "has_weights", "has_sinks", "has_bias", "has_dense", "has_intervals", "has_mask_map",
    "has_band", "has_lengths", "has_score_mod",
    "has_rows",  # bias, mask array or mask map: `extra` is made from rows
    "has_extra",  # bias or mask: scores have a tile `extra`, see `mask_tile`
    "is_adjusted",  # by soft-cap or factor
    "is_natural",  # scores are in natural units, not times log2(e)
    "band_left", "band_right", "band_at_end",  # see `Band`
    "tile_q", "tile_k",  # of the mask map
    "sinks", "mask_bits", "score_mod", "aux",  # addresses; the last two: a loop and what it reads, see `jit`
    "read_outside",  # set by a thread to the bits of a mark, unless the score is masked
    "outside_at",  # 1 + the place of that score among B, H, L and S, the least of those seen
    "lanes", "block_k", "n_vectors", "n_blocks", "n_tasks", "rows_ld",
    "uses_rows",  # products of `row_kernels`
    "uses_split_kv", "split_tiles", "n_splits", "n_key_tiles",
    "partials", "partial_nbytes",  # split-KV: address and size of the partial result of each task
    "merges",  # split-KV: tasks are the merges of heads
    "next_task",
    "saw_nonfinite",  # set by a thread: an output is NaN or inf
    # A second run, after a nonfinite output. It keeps nonfinite values from rows that may not read them.
    "is_safe",
)  # fmt: skip
#: The factor of the query is query_high + query_low. Factors of `Schedule` follow, then the largest number of
#: the dtype and the one before 1. A product with `no_low` is too small to change the rounded sum.
REALS = (
    "query_high", "query_low", "score_root", "softcap", "exponent_factor", "largest", "below_one", "no_low",
    "zero",
)  # fmt: skip

#: Tiles of a thread. Fields of a block have their addresses. `rows` has one row for each query row, on its
#: way between a tile of lanes and the caller's memory. `columns` has keys as lanes. `flags` is a row of a
#: mask array; for `extra` see `mask_tile`. `clean` has values with 0 for NaN and inf. `stack` has the partial
#: results of `splitkv`.
TILES = (
    "query", "columns", "scores", "extra", "rows", "flags", "clean", "row_max", "row_sum", "acc", "rescale",
    "inverse", "start", "stop", "row_i", "row_h", "stops", "tile_max", "kept_max", "stack",
)  # fmt: skip

#: A thread's query block: its rows, the keys that any of them may attend, and those that all may.
BLOCK_COUNTS = (
    "item", "kv", "first_row", "n_rows", "n_lanes", "n_vectors", "low", "high", "all_start", "all_stop",
    "is_partial",  # scores have a tile `extra`, except those of the keys plain .. plain_stop - 1
    "plain", "plain_stop",
    # kept_max is the row_max of all keys, and sums have the `kernels.headroom` of their row.
    "has_headroom",
)  # fmt: skip

_FIELDS = (*BLOCK_COUNTS, *TILES)
#: Whole cache lines, against false sharing.
BLOCK = np.dtype(
    {
        "names": list(_FIELDS),
        "formats": [np.int64] * len(_FIELDS),
        "itemsize": -(-8 * len(_FIELDS) // 64) * 64,
    }
)


@cache
def job_of(dtype: np.dtype) -> np.dtype:
    """The record of a call for one dtype."""
    return np.dtype([(name, np.int64) for name in COUNTS] + [(name, dtype) for name in REALS], align=True)
