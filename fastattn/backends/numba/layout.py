"""The records that compiled code works on: a call's arrays, sizes and options, a query block, a partial
result.

Compiled code is the same for any number of axes and any strides: it is specialised on the dtype alone.
`prepared` fills in the record of a call.
"""

from __future__ import annotations

import numpy as np

from fastattn._call.schedule import WORD
from fastattn.backends.cpu.record import ADDRESS, COL, COUNTS, HEAD, LEAD, REALS, ROW, SCRATCH

__all__ = ["ADDRESS", "COL", "HEAD", "LEAD", "ROW", "WORD"]

KEY_STEP = 4  #: a block's keys start at a multiple of this

#: Rows of the table of views; the others are of keys in int8 or in pages, which this driver refuses.
(QUERY, KEY, VALUE, OUT, LSE, WEIGHTS, BIAS, DENSE, KEY_START, KEY_STOP, MASK_INDEX, KEY_LENGTHS) = range(12)

#: This driver's fields after those that both drivers have: addresses of the table of views and of the leading
#: axes, of the scratch memory of all threads, and for `spread` of the region's record and of the CPUs' cores;
#: whether a result is nonfinite, whether the call runs again as one was, and whether it keeps nonfinite
#: values from rows that may not read them; more tiles of a thread; the factor of the query as high + low.
OWN_TILES = ("spare", "block", "stack", "allowed", "chosen")
_OWN = (
    "views",
    "lead_shape",
    "scratch",
    "spread",
    "cores",
    "n_cpus",
    "saw_nonfinite",
    "runs_again",
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
#: and where the kernels read them (`keys`, `values`), and the rows that the thread has seen (`seen_*`).
#: `depth` is that of the stack of partial results of `splitkv`; `has_headroom` says that row_max and
#: `inverse` are those of all keys, and that the sums are those of `kernels.write_large`.
BLOCK = np.dtype(
    [
        (name, np.int64)
        for name in (
            "item", "kv", "first_row", "n_rows", "ld", "n_vectors", "low", "high", "all_start", "all_stop",
            "key", "value", "plain", "plain_stop", "depth", "keys", "key_row", "values", "value_row", "panel",
            "seen_key", "seen_value", "seen_start", "seen_stop", "new_start", "new_stop",
            "n_prefetch", "prefetch_nbytes", "has_headroom",
        )
    ]
)  # fmt: skip

#: The softmax and the values of some key tiles, see `splitkv`.
PARTIAL = np.dtype(
    [
        ("data", np.int64),  # address of row_max, row_sum and acc, each aligned to a cache line
        ("key_tile", np.int64),  # one of those key tiles; -1 where no row may attend any of their keys
    ]
)

#: The share of one thread: its next task, and the end. A cache line each, against false sharing.
SHARE = np.dtype({"names": ["next", "stop"], "formats": [np.int64, np.int64], "itemsize": 64})
