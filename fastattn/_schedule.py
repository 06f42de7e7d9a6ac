"""Problem and host to `Schedule`: every decision on how a call is cut up, once, for all CPU drivers.

Pure functions of sizes, strides and options; no array is read. The drivers look decisions up and make none.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fastattn._problem import Problem, Sizes

LOG2E = 1.4426950408889634074
WORD = 32  #: keys whose mask bits are in one word; a block of keys is a multiple of it

# Keys of a tile. 256 keeps scores, keys and values of a tile inside a 1 MB L2 up to head_dim 256 and
# amortises the update of the accumulators; 128 lost 1.5 % at head_dim 64.
# 2 cores of Zen 4 EPYC, 2026-11-20, `python -m fastattn bench --group square`.
BLOCK_K = 256

# Below this many multiply-adds one thread is faster than waking a second: the region costs about 5 us.
# 2 cores of Zen 4 EPYC, 2026-11-20, `python -m fastattn bench --group small`.
SMALL_WORK = 400_000

# Where many blocks of query rows read one head, a thread copies keys with gaps between their rows, which fill
# only some of the places in a cache, and packs values in the order in which they are read. At 1024 keys that
# takes 15 % off layout "bshd" with 8 heads of 64, 5 % off float64, 2 to 5 % off other calls. With 6 blocks
# keys gain nothing, with 3 they lose 5 %; with 3 blocks values with gaps gain 9 %, others nothing. 1 MB each
# leaves a part of an L2 of 2 MB where both are copied; layout "bshd" gained 15 % so at 4096 keys, and 5 % at
# 8192 with 2 MB each. 2 cores of Emerald Rapids, 2026-11-21, calls in turns with and without.
COPY_BLOCKS = 8
GAP_BLOCKS = 3
COPY_NBYTES = 1 << 20

# So many query rows of a key/value head, or fewer than a vector has lanes, stand side by side; for more,
# lanes of queries are filled well enough. Times over those with lanes of queries, 1024 keys in the cache,
# head_dim 64, two threads:
#                     1 row      4      8
#   AVX-512 float32   0.41    0.53   0.69
#   AVX-512 float64                  0.88
#   AVX2 float32      0.52    0.73   1.11
#   AVX2 float64              1.03   1.27
# From memory, or with fewer heads than threads, few rows win by more: the threads share the keys of a head.
# Just as many rows as lanes, 16, take 1 to 1.3 of the time in the cache, but 0.85 to 0.93 at 4096 keys and
# head_dim 128 from memory, and half where one head has 65536 keys. So they stand side by side where key and
# value of a head have so many elements, 2 MB of float32, the size of a core's cache; other bounds were not
# measured. 2 cores of Emerald Rapids, 2026-11-21, calls in turns.
FEW_ROWS = 8
LONG_HEAD = 1 << 19

# A thread gets about this many tasks out of the keys of few heads, so that none waits long for the last.
# Other counts were not measured.
SPLIT_TASKS = 8

# Few rows leave a core to wait for memory, of which it sees by itself no further than to the end of a page.
# Asking for it 8 KB ahead instead of 16 takes 1.5 times as long at 1500 keys and head_dim 64; not at all 1.4
# times at 4096 keys and head_dim 128 with 4 rows, 1.15 with one; 32 and 64 KB are no better. In the cache it
# costs up to 13 %; where the cache ends was taken from its size, 2 MB. 2 cores of Emerald Rapids, 2026-11-21,
# keys and values from memory, calls in turns.
PREFETCH_DISTANCE = 1 << 14
UNCACHED_NBYTES = 1 << 21


class Target(NamedTuple):
    """What the kernels of a driver look like for one dtype."""

    lanes: int  #: elements of a vector, or query rows of a vector of lanes
    max_vectors: int  #: vectors of lanes in a block of query rows at most
    panel_columns: int  #: columns of value in a packed panel, and of whole register tiles


class Schedule(NamedTuple):
    """How a call is cut up. `uses_split_kv` and `block_k` say where sums are rounded: they depend on the
    problem alone, not on threads; the others change no bit of a result."""

    num_threads: int
    is_small: bool  #: too small for more than one thread, however many there may be
    uses_split_kv: bool  #: the path: split-KV for few query rows, else the sweep over tiles of queries
    block_k: int  #: keys of a tile
    n_vectors: int  #: vectors of lanes that the query rows of a key/value head fill
    n_blocks: int  #: query blocks that they are cut into, of nearly the same size
    max_lanes: int  #: lanes of the largest block, whole vectors
    n_tasks: int
    split_tiles: int  #: split-KV: key tiles of a task
    n_splits: int  #: split-KV: tasks that share a key/value head
    copies_keys: bool  #: each thread copies the keys of a head, without gaps
    packs_values: bool  #: each thread packs the values of a head into panels
    prefetch_rows: tuple[int, int]  #: split-KV: prefetch distance in rows of keys and of values; 0: none
    query_factor: float  #: what the packed query is multiplied by
    softcap: float  #: in the domain of the scores; 0: none
    exponent_factor: float  #: 1 where scores are held times log2(e), log2(e) where they are natural


def make_schedule(problem: Problem, target: Target, num_threads: int) -> Schedule:
    """The schedule of a problem for at most so many threads."""
    sizes = problem.sizes
    heads, rows, len_k, lanes = sizes.heads, sizes.rows, sizes.len_k, target.lanes
    small = sizes.rows * heads * len_k * (sizes.head_dim + sizes.value_dim) < SMALL_WORK
    if small:
        num_threads = 1
    block_k = BLOCK_K if len_k > BLOCK_K else max(WORD, _up(len_k, WORD))  # no larger than the keys need
    n_vectors = -(-rows // lanes)
    factors = _factors(problem)
    columns = sizes.head_dim + sizes.value_dim
    if rows <= FEW_ROWS or rows < lanes or (rows == lanes and len_k * columns >= LONG_HEAD):
        tiles, n_splits = _splits(heads, -(-len_k // block_k), num_threads)
        prefetch_rows = (0, 0)
        itemsize = problem.query.itemsize
        if heads * len_k * columns * itemsize >= UNCACHED_NBYTES:
            prefetch_rows = (
                PREFETCH_DISTANCE // max(1, sizes.head_dim * itemsize) + 1,
                PREFETCH_DISTANCE // max(1, sizes.value_dim * itemsize) + 1,
            )
        n_tasks = heads * n_splits
        return Schedule(
            min(num_threads, n_tasks), small, True, block_k, n_vectors, 1, n_vectors * lanes, n_tasks, tiles,
            n_splits, False, False, prefetch_rows, *factors,
        )  # fmt: skip
    n_blocks = -(-n_vectors // target.max_vectors)
    copies_keys = packs_values = False
    if n_blocks > 1:
        # Query blocks that one thread works on for each copy that it makes.
        copies_keys, packs_values = _copies(
            problem, sizes, target, min(n_blocks, heads * n_blocks // num_threads)
        )
    return Schedule(
        min(num_threads, heads * n_blocks), small, False, block_k, n_vectors, n_blocks, -(-n_vectors // n_blocks) * lanes,
        heads * n_blocks, 1, 1, copies_keys, packs_values, (0, 0), *factors,
    )  # fmt: skip


def _copies(problem: Problem, sizes: Sizes, target: Target, blocks: int) -> tuple[bool, bool]:
    """Whether a thread copies the keys of a head, and packs its values, for so many query blocks."""
    itemsize, len_k = problem.query.itemsize, sizes.len_k
    value_nbytes = len_k * _up(sizes.value_dim, target.panel_columns) * itemsize
    packs_values = (
        blocks >= (GAP_BLOCKS if _has_gaps(problem.value) else COPY_BLOCKS) and value_nbytes <= COPY_NBYTES
    )
    copies_keys = (
        blocks >= COPY_BLOCKS and _has_gaps(problem.key) and len_k * sizes.head_dim * itemsize <= COPY_NBYTES
    )
    return copies_keys, packs_values


def _splits(heads: int, n_key_tiles: int, num_threads: int) -> tuple[int, int]:
    """Split-KV: key tiles of a task, a power of two, and tasks of a head."""
    tiles = 1
    while tiles < n_key_tiles and (
        num_threads == 1 or heads * -(-n_key_tiles // tiles) > SPLIT_TASKS * num_threads
    ):
        tiles *= 2
    return tiles, max(1, -(-n_key_tiles // tiles))


def _factors(problem: Problem) -> tuple[float, float, float]:
    """The factor of the packed query, the soft-cap and the factor of the exponents.

    Scores are held times log2(e), with factor 1, unless something given in natural units must stay exact: a
    bias of any finite size must not overflow, a row with a sink alone has just that as its lse, and a
    score_mod sees the scores as they are.
    """
    natural = problem.bias is not None or problem.sinks is not None or problem.score_mod is not None
    unit = 1.0 if natural else LOG2E
    exponent_factor = LOG2E if natural else 1.0
    if problem.softcap is None:
        return problem.scale * unit, 0.0, exponent_factor
    return problem.scale / problem.softcap, problem.softcap * unit, exponent_factor


def _has_gaps(array: np.ndarray) -> bool:
    """Whether the elements or the rows of one head lie apart."""
    n_cols, itemsize = array.shape[-1], array.itemsize
    return (n_cols > 1 and array.strides[-1] != itemsize) or abs(array.strides[-2]) > n_cols * itemsize


def _up(n: int, step: int) -> int:
    """n rounded up to a multiple of step."""
    return -(-n // step) * step
