"""What compiled code works on: one call's arrays, sizes and options as a record, and a block of its rows as
another.

Compiled code is the same for any number of axes and any strides: it is specialised on the dtype alone. `job`
fills the records in.
"""

from __future__ import annotations

import numpy as np

WORD = 32  #: keys whose mask bits are in one word
KEY_STEP = 4  #: a block's keys start at a multiple of this

#: Rows of the table of views, and its columns: an array's address and its strides in bytes; leading axes
#: follow.
QUERY, KEY, VALUE, OUT, LSE, WEIGHTS, BIAS, DENSE, KEY_START, KEY_STOP, TILE_INDEX = range(11)
ADDRESS, HEAD, ROW, COL, LEAD = range(5)

#: Tiles of a thread, each from a line of its scratch memory on: `to_...` in a job is how far from the start.
SCRATCH = (
    "query", "scores", "acc", "tile_max", "spare", "row_max", "row_sum", "rescale", "inverse", "lse",
    "words", "rows", "out_rows", "bias_rows", "start", "stop", "stops", "part_stops", "row_i", "row_h",
    "converted", "clean", "key_copy", "value_copy", "block", "stack", "prefetch", "allowed", "chosen",
)  # fmt: skip

_COUNTS = (
    "calls",  # address of the table of addresses, see `calls`
    "views", "view_size", "lead_shape", "n_lead",
    "num_kv_heads", "group_size", "len_q", "len_k", "head_dim", "value_dim",
    "sinks", "has_lse", "has_weights", "has_bias", "has_dense", "has_intervals", "has_mask_map", "is_masked",
    "bias_size", "bias_swapped", "convert_bias", "dense_size", "tile_bits", "tile_q", "tile_k",
    "acc_columns", "block_k", "n_vectors", "n_blocks", "n_tasks", "max_lanes", "lanes", "itemsize",
    "has_score_mod", "score_mod", "aux",  # addresses of the loop and of what it reads, see `jit.functions`
    "read_outside",  # set by a thread: what that loop returned
    "adjusts_all",  # by soft-cap, score_mod or bias: every score is touched once more, masked or not
    "may_mask",  # bias or score_mod, where no words say so
    "saw_nan",  # set by a thread: NaN came out where some rows may not read every value
    "is_nonfinite_safe",  # NaN and inf in values are kept from rows that may not read them
    "uses_split_kv", "query_ld", "acc_ld", "key_prefetch", "value_prefetch", "split_tiles", "n_splits",
    "n_partials", "partial_nbytes", "partials", "left",
    "scratch", "scratch_nbytes",
    "spread", "cores", "n_cpus",  # addresses of the region's record and of the CPUs' cores, see `spread`
    "copies_keys", "packs_values",  # a thread has one head's keys without gaps, or its values in panels
)  # fmt: skip
_REALS = (
    "query_high", "query_low",  # the factor of the packed query, in two parts
    "softcap",  # 0 when there is none; in the domain of the scores
    "exponent_factor",  # 1 where scores are held times log2(e), log2(e) where they are natural
)  # fmt: skip

#: One call. Addresses are those of arrays that outlive it.
JOB = np.dtype(
    [(name, np.int64) for name in (*_COUNTS, *(f"to_{name}" for name in SCRATCH))]
    + [(name, np.float64) for name in _REALS]
)

#: The query rows of one task, where the head's keys and values start in the caller's memory (`key`, `value`)
#: and where the kernels read them (`keys`, `values`), and what a thread knows from one task to the next.
#: `depth` is that of the stack of parts of `rows`.
BLOCK = np.dtype(
    [
        (name, np.int64)
        for name in (
            "item", "kv", "first_row", "n_rows", "ld", "n_vectors", "low", "high", "all_start", "all_stop",
            "key", "value", "plain", "plain_stop", "depth", "keys", "key_row", "values", "value_row", "panel",
            "seen_key", "seen_value", "seen_start", "seen_stop", "new_start", "new_stop",
            "n_prefetch", "prefetch_nbytes",
        )
    ]
)  # fmt: skip

#: The softmax and the values of some key tiles of keys, see `rows`.
PARTIAL = np.dtype(
    [
        ("data", np.int64),  # address of row_max, row_sum and acc, each from a line of memory on
        ("key_tile", np.int64),  # one of those key tiles; -1 where no row may attend a key of them
        ("has_masked", np.int64),  # whether in any of them only some rows may read a key
    ]
)

#: The tasks of one thread: the next, and the end of its share. A line of memory each: threads count at once.
SHARE = np.dtype({"names": ["next", "stop"], "formats": [np.int64, np.int64], "itemsize": 64})
