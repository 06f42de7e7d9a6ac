"""Constants that more than one file uses, and tuning constants, with machine, date and script.

The compiled kernels take those of the dtypes and of the instruction sets from here and define the others in
their own source; `tests/test_constants.py` compares the two.
"""

from __future__ import annotations

from typing import Any

# ------------------------------------------------------------------ numbers

LOG2E = 1.4426950408889634074
LN2 = 0.69314718055994530942

MANTISSA_BITS = {4: 23, 8: 52}  #: by bytes of a float
EXPONENT_MIN = {4: -126, 8: -1022}  #: of a normal number

#: 2 (2^f - 1) / f on [-1/2, 1/2] as a polynomial, lowest power first, by bytes of a float; minimax in the
#: relative error of 2^f (Lawson iteration at 40 digits): 2.0e-9 for float32, 3.4e-18 for float64, so the rest
#: of the error is rounding.
EXP2_COEFFICIENTS = {
    4: (
        1.386294405711940786,
        0.4804529582699803028,
        0.11100664939387825982,
        0.019236874732831904476,
        0.002679774973317259018,
        0.0003070672126048424178,
    ),
    8: (
        1.3862943611198906516,
        0.4804530139182026252,
        0.11100821732964016804,
        0.019236258215188238088,
        0.002666711629354889396,
        0.0003080706091422534998,
        0.000030505466986563373,
        0.000002643087056470190644,
        2.035639902501223256e-7,
        1.4147566389765493892e-8,
        8.869559076315603354e-10,
    ),
}

# ------------------------------------------------------------------ instruction sets

_X86, _ARM64 = ("x86_64", "amd64"), ("aarch64", "arm64")

#: By instruction set, best first: what the build, the dispatch, the kernels and the Numba backend know of it.
#: A build runs this file on its own, and writes ``backends/cython/generated/isas.h`` for C.
#:
#: flags: the compiler's, by machine. A machine that no flags name has the portable kernels alone, and so has
#: macOS's universal2, which is two. WebAssembly has one kind of vectors, which no compiler uses unasked.
#: features: what a CPU must have, see FEATURE in ``kernels/dispatch.c``; an AArch64 always has NEON.
#: blocking: the registers, and the register tiles that fill them. The measurements are in
#: ``kernels/blocking.h``, the meanings in `Target` of the Numba backend.
#: few_rows: in the place of FEW_ROWS for the compiled kernels, by bytes of an element.
#: other: numbers of the compiled kernels that differ from those further down.
VECTORS: dict[str, dict[str, Any]] = {
    "avx512": {
        "flags": dict.fromkeys(
            _X86, "-mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma -mprefer-vector-width=512"
        ),
        "features": ("avx512f", "avx512dq", "avx512bw", "avx512vl"),
        "blocking": {
            "vector_bytes": 64, "tile_rows": 8, "tile_vectors": 3, "wide_rows": 16, "score_rows": 4,
            "score_vectors": 3, "score_chain": 16, "block_vectors": 3, "row_sums": 16,
        },
    },
    "avx2": {
        "flags": dict.fromkeys(_X86, "-mavx2 -mfma -mf16c"),
        "features": ("avx2", "fma", "f16c"),
        "blocking": {
            "vector_bytes": 32, "tile_rows": 6, "tile_vectors": 2, "wide_rows": 6, "score_rows": 4,
            "score_vectors": 3, "score_chain": 16, "block_vectors": 6, "row_sums": 8,
        },
        "few_rows": {4: 5, 8: 2},
    },
    "neon": {
        "flags": dict.fromkeys(_ARM64, ""),
        "features": (),
        "blocking": {
            "vector_bytes": 16, "tile_rows": 8, "tile_vectors": 3, "wide_rows": 8, "score_rows": 4,
            "score_vectors": 3, "score_chain": 8, "block_vectors": 12, "row_sums": 16,
        },
    },
    "portable": {
        "flags": {"wasm32": "-msimd128"},
        "features": (),
        "blocking": {
            "vector_bytes": 16, "tile_rows": 4, "tile_vectors": 2, "wide_rows": 4, "score_rows": 4,
            "score_vectors": 2, "score_chain": 4, "block_vectors": 6, "row_sums": 8,
        },
        # Without fused multiply-adds every product rounds too.
        "other": {"score_columns": 16, "exp2_keys": 2},
    },
}  # fmt: skip

#: Instruction sets with kernels of their own for some problems, and the one whose kernels each falls back to.
#: ``fused.c`` has kernels for float32 on a tile unit. ``pairs.c`` has kernels for pairs of bfloat16, which
#: `amx` has as well where the CPU does. The models are for tests: the same sources on models in C.
EXTENDED = {
    "amx": {"source": "fused.c", "vectors": "avx512", "flags": "-mamx-tile -mamx-bf16"},
    "avx512_bf16": {"source": "pairs.c", "vectors": "avx512", "flags": "-mavx512bf16"},
    "amx_model": {"source": "fused.c", "vectors": "avx2", "flags": "-O2 -DFASTATTN_MODEL -Wno-psabi"},
    "bf16_model": {"source": "pairs.c", "vectors": "avx2", "flags": "-DFASTATTN_MODEL -Wno-psabi"},
}

#: All that users can choose, best first.
ISAS = ("amx", "avx512_bf16", *VECTORS)
#: What tests can choose as well: the sources of the first two on models of their instructions in C.
MODEL_ISAS = ("amx_model", "bf16_model")

# The longest partial sums of the kernels; the measurements are in ``blocking.h``.
KEY_CHUNK = 64  #: keys of one of `softmax` and `accumulate`
SCORE_COLUMNS = 128  #: columns of one of `score`

PAIR_COLUMNS = 32  #: of values that are paired at once, see ``pairs.h``

# ------------------------------------------------------------------ the schedule

# Keys of a key tile. 256 keeps scores, keys and values of a tile inside a 1 MB L2 up to head_dim 256 and
# amortises the update of the accumulators; 128 lost 1.5 % at head_dim 64.
# 2 cores of Zen 4 EPYC, 2026-11-20, `python -m fastattn bench --group square`.
BLOCK_K = 256

# Below this many multiply-adds one thread is faster than two: a parallel region costs about 5 us.
# 2 cores of Zen 4 EPYC, 2026-11-20, `python -m fastattn bench --group small`.
SMALL_WORK = 400_000

# Below this many multiply-adds, and bytes of keys and values, a call wakes no thread that sleeps: that takes
# 16 us of it. Calls of (n, 4, 16, 64) every millisecond, and between products of NumPy, two threads over one:
# 1.7 of the time with n = 4, 1.25 with 8, 0.9 with 16. 2 cores of Zen 5 EPYC, virtual, 2026-11-29.
SHORT_WORK = 1_500_000
SHORT_NBYTES = 1 << 21
SCORE_WORK = 32  #: multiply-adds that a score counts for, with a soft-cap and dropout; an estimate

# Gradients: keys of a key tile, and bytes of a row of a score tile, whole register tiles of three vectors.
# The sums over a tile's queries and keys then pay for reading and writing the accumulators, and the two score
# tiles and the rows of both blocks fit a 1 MB L2; others were not tried. The row is FASTATTN_GRADIENT_ROW
# of ``kernels.h``, whose products took 5 to 7 % off a call. 4 tiles of keys to a task instead of 1, for which
# rows of queries are packed once, took 8 % off 2048 keys and head_dim 64 together with fewer addresses in a
# register tile. 2 cores of Cascade Lake, 2026-11-23, medians of `attention_backward`, build after build.
BACKWARD_BLOCK_K = 128
BACKWARD_ROW_NBYTES = 384
BACKWARD_TASK_TILES = 4  #: of keys, at most

# Query rows of a block whose products are of pairs: as many as `pack` of ``pairs.h`` takes,
# FASTATTN_PAIR_LANES there. Such calls need more than half of them: with 33, 40, 48, 64 and 80 rows and
# 1024 keys they take 0.86, 0.83, 0.83, 0.79 and 0.76 of the time of an exact call; fewer were not tried.
# 2 cores of Zen 5 EPYC, virtual, 2026-11-29, (4, 8, rows, 64), interleaved.
BACKWARD_PAIR_LANES = 64

# Where many query blocks read one head, a thread copies keys with gaps between their rows, which map to only
# some of the sets of a cache, and packs values in the order in which they are read. At 1024 keys that takes
# 15 % off layout "bshd" with 8 heads of 64, 5 % off float64, 2 to 5 % off other calls. With 6 query blocks
# copies of keys gain nothing, with 3 they lose 5 %; with 3, packing gains 9 % for values with gaps, nothing
# for others. With 1 MB each, both copies leave some of an L2 of 2 MB free; layout "bshd" gained 15 % so at
# 4096 keys, and 5 % at 8192 with 2 MB each. 2 cores of Emerald Rapids, 2026-11-21, interleaved A/B. Values
# may take what keys do not: 2 MB of them take 7 % off 512 queries in bfloat16 by 4096 keys of 128, 5 % in
# float16, where they are converted once, and 1 to 2 % in float32. 2 cores of Zen 5 (1 MB L2), 2026-11-25.
COPY_BLOCKS = 8
GAP_BLOCKS = 3
# Keys and values in 16 bits are converted in any case: once for two query blocks is less than twice. Not
# measured otherwise.
STORED_BLOCKS = 2
COPY_NBYTES = 1 << 20

# Otherwise values of at least this many columns are packed for a partial sum at a time, where a query block
# has more vectors of lanes than this, several register tiles wide: calls with 512 columns then take 6 to 20 %
# less, with 128 and 256 columns 0 to 10 %, with 64 the same. Blocks of AVX-512 have no more vectors. 2 cores
# of a Zen 3 EPYC, 2026-11-28, one thread, interleaved A/B.
CHUNK_VECTORS = 3
CHUNK_COLUMNS = 128

# Up to this many query rows of a key/value head, or fewer than a vector has lanes, split-KV is used; more
# rows fill vectors of lanes well enough for the sweep. Times of split-KV over those of the sweep, 1024 keys
# in the cache, head_dim 64, two threads:
#                     1 row      4      8
#   AVX-512 float32   0.41    0.53   0.69
#   AVX-512 float64                  0.88
#   AVX2 float32      0.52    0.73   1.11
#   AVX2 float64              1.03   1.27
# From memory split-KV gained more, and with fewer heads than threads, which shared the keys of a head there
# alone. The sweep has pieces by now. On AVX2 its time over that of split-KV is 1.1 to 1.4 with 4 rows, 0.9 to
# 1.1 with 5, 0.8 to 1.0 with 6 and 0.7 to 0.9 with 8 (float64: 1.0 to 1.3 with 2, 0.85 to 1.0 with 3, 0.7 to
# 0.85 with 8), which `few_rows` of AVX2 says: one head and eight, head_dim 64 and 128, 512 to 32768 keys, one
# and two threads, 2 cores of a Zen 3 EPYC, 2026-11-28, interleaved A/B. AVX-512 was not measured again.
# With exactly as many rows as lanes, 16, it takes 1 to 1.3 times as long in the cache, but 0.85 to 0.93 at
# 4096 keys and head_dim 128 from memory, and half where one head has 65536 keys. So as many rows as lanes use
# split-KV if they are of several heads of a group, as in decoding. The number of keys does not decide: a
# cache gives the same bits whatever the lengths of its other items are. 2 cores of Emerald Rapids,
# 2026-11-21, interleaved A/B.
FEW_ROWS = 8

# The sweep with few query blocks: keys are cut into pieces, which tasks may share, for up to this many query
# rows of a key/value head. A piece has this many key tiles. Two threads then take 0.4 to 0.55 of the time
# with 16 and 32 query heads on one of 4096 to 65536 keys, and 0.6 with 128 heads, three blocks of which one
# thread had two. 2 cores of a Zen 3 EPYC, 2026-11-28, float32. Other numbers were not measured.
PIECE_ROWS = 512
PIECE_TILES = 4

# The fused sweep, on a tile unit: its limits.
FUSED_LANES = 32  #: query rows of a block
FUSED_ROWS = 64  #: query rows and keys of a head from which on it is used
FUSED_KEYS = 64
FUSED_COLUMNS = 512  #: of keys and of values at most
FUSED_FACTOR = 2.0**16  #: by which a score is multiplied at most

# It is used where an estimate says that it is faster than the sweep. Cost of a weight: 33 + columns in the
# sweep, 45 + padded columns / 3 here. The gain is capped at 1.85, which head_dim 64 and more reach, and at
# twice the share of columns that are not padding. Splitting keys and queries costs as much as 36 more rows
# for each key and 36 more keys for each row. Of 792 problems (head_dim 8 to 256, 48 to 1024 rows, 48 to 2048
# keys, with and without "causal") 3 lose more than 8 % by what this decides, and 14 could gain more than 8 %
# by the other path. The mean loss to the faster path is 0.4 %; it is 12 % where this path is never used, 20 %
# where it is always used. 2 cores of an Intel Xeon with AMX, 2026-11-24, interleaved A/B.
FUSED_MOST_GAIN = 1.85
FUSED_UNPADDED_GAIN = 2.0
SWEEP_WEIGHT = 33  #: time of a weight, in columns
FUSED_WEIGHT, FUSED_COLUMN = 45, 1 / 3  #: and of a weight and a padded column in the fused sweep
FUSED_OVERHEAD = 36
FUSED_LEAST_GAIN = 1.0

# The most query blocks, accumulators' columns and split keys of a task. A thread splits the keys and values
# of a task once. With these limits its accumulators and the split keys of its heads stay in an L2 of 2 MB.
# Others were not measured.
FUSED_TASK_BLOCKS = 32
FUSED_TASK_COLUMNS = 32 * 512
FUSED_TASK_KEYS = 256
FUSED_LEAST_BLOCKS = 8  #: of a task, where more threads would have tasks of fewer

# Split-KV makes about this many tasks per thread, to balance the threads. Other counts were not measured.
SPLIT_TASKS = 8
REDUCTION_TASKS = 2  #: of `reduce_scores`: 8 take 1.2 times as long with 6 query blocks of 8192 keys, k=16

# Prefetch distance of split-KV in bytes, and the size of keys and values from which it prefetches. With few
# rows a core mostly waits for memory, and hardware prefetchers stop at the end of a page. A distance of 8 KB
# instead of 16 takes 1.5 times as long at 1500 keys and head_dim 64; no prefetch takes 1.4 times as long at
# 4096 keys and head_dim 128 with 4 rows, 1.15 with one; 32 and 64 KB are no better. In the cache prefetches
# cost up to 13 %; the bound is the cache's size, 2 MB. 2 cores of Emerald Rapids, 2026-11-21, keys and values
# from memory, interleaved A/B.
PREFETCH_DISTANCE = 1 << 14
UNCACHED_NBYTES = 1 << 21

# With a soft-cap, a smaller factor is not packed into the query: see `score_factors`. Usual factors, 1/8 over
# 30 to 50, are above 2^-9.
LEAST_CAPPED_FACTOR = 2.0**-24
