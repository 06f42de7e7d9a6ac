"""What compiled code works on: one call's arrays, sizes and options as a record, and a block of its rows as
another.

Compiled code is the same for any number of axes and any strides: it is specialised on the dtype alone. `job`
fills the records in.
"""

from __future__ import annotations

import numpy as np

from fastattn._schedule import WORD
from fastattn.backends.cpu.record import ADDRESS, COL, COUNTS, HEAD, LEAD, REALS, ROW, SCRATCH, VIEWS

__all__ = ["ADDRESS", "COL", "HEAD", "LEAD", "ROW", "WORD"]

KEY_STEP = 4  #: a block's keys start at a multiple of this

#: Rows of the table of views.
(QUERY, KEY, VALUE, OUT, LSE, WEIGHTS, BIAS, DENSE, KEY_START, KEY_STOP, MASK_INDEX, KEY_LENGTHS) = range(
    len(VIEWS)
)

#: What this driver has beyond the record that both have: addresses of the table of views and of the leading
#: axes, of the scratch memory of all threads, and for `spread` of the region's record and of the CPUs' cores;
#: whether NaN came out where some rows may not read every value, and whether NaN and inf in values are kept
#: from rows that may not read them; more tiles of a thread; the factor of the query in two parts.
OWN_TILES = ("spare", "block", "stack", "allowed", "chosen")
_OWN = (
    "views",
    "lead_shape",
    "scratch",
    "spread",
    "cores",
    "n_cpus",
    "saw_nan",
    "is_nonfinite_safe",
)

#: One call. Addresses are those of arrays that outlive it.
JOB = np.dtype(
    [(name, np.int64) for name in (*COUNTS, *(f"to_{name}" for name in SCRATCH))]
    + [(name, np.float64) for name in REALS]
    + [(name, np.int64) for name in (*_OWN, *(f"to_{name}" for name in OWN_TILES))]
    + [(name, np.float64) for name in ("query_high", "query_low")]
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

#: The softmax and the values of some key tiles, see `splitkv`.
PARTIAL = np.dtype(
    [
        ("data", np.int64),  # address of row_max, row_sum and acc, each from a line of memory on
        ("key_tile", np.int64),  # one of those key tiles; -1 where no row may attend a key of them
        ("has_masked", np.int64),  # whether in any of them only some rows may read a key
    ]
)

#: The tasks of one thread: the next, and the end of its share. A line of memory each: threads count at once.
SHARE = np.dtype({"names": ["next", "stop"], "formats": [np.int64, np.int64], "itemsize": 64})
