"""Problem and host to Schedule: pure functions, and the room of every tuning constant."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

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


class Schedule(NamedTuple):
    """How a problem is cut up. ``block_k`` and ``uses_split_kv`` say where sums are rounded: they depend on
    the problem alone; the others change no bit of a result."""

    block_q: int  #: query rows of a tile
    block_k: int  #: keys of a tile
    num_threads: int
    copy_blocks: int = 0  #: query tiles that make a thread's copy of one head worth its while
    gap_blocks: int = 0  #: the same for values with gaps between them
    copy_nbytes: int = 0  #: bytes of such a copy at most, of the keys and again of the values
    uses_split_kv: bool = False  #: rows stand side by side, and lanes run along keys and columns
    split_tasks: int = 1  #: tasks for each thread that the keys of a head are then cut into at most
    prefetch_distance: int = 0  #: then memory is asked for keys and values so many bytes ahead of their use
    uncached_nbytes: int = 0  #: where they have so many bytes or more


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


LOG2E = 1.4426950408889634074

# Below this a factor is not packed into the query where there is a soft-cap: see `score_factors`. Common ones
# are above 2^-9, as 1/8 over 30 to 50.
LEAST_CAPPED_FACTOR = 2.0**-24


class ScoreFactors(NamedTuple):
    """What makes scores of queries and keys, and weights of scores; see `score_factors`."""

    query: float  #: the packed query is multiplied by it
    root: float  #: raw scores are multiplied by it twice, a power of two; 1 where they are not
    softcap: float  #: in the domain of the scores; 0 when there is none
    exponent: float  #: the weight of a score s is 2^(exponent * (s - largest))


@lru_cache(maxsize=1024)
def score_factors(scale: float, softcap: float | None, itemsize: int, is_natural: bool) -> ScoreFactors:
    """Where the scale and the soft-cap are applied, so that no call loses what the formula would keep.

    The formula is ``s = scale * (q @ k)``, ``s = softcap * tanh(s / softcap)``, ``exp(s - largest)``. A
    factor of the query costs nothing per key, so all factors of the score go there: ``scale * log2(e)``, for
    weights that are powers of two; ``scale`` alone where scores are natural; ``scale / softcap`` before a
    tanh.

    *Overflow.* A factor of at most 1 makes no product larger than those of ``q @ k``. A larger one is written
    as ``m * 2^n`` with ``1/4 <= m <= 1``: m goes into the query, and 2^n to where nothing is lost. That is
    the exponent, a difference of scores times a factor, where scores need not be natural; else the scores, in
    an additional pass, as two factors, for 2^n may itself be too large.

    *Underflow.* A packed query is rounded to a multiple of the smallest subnormal number t, which moves a
    score by ``t / 2 * sum(abs(k))`` at most: ``head_dim * 2^-22`` where keys are as large as float32 goes. A
    weight does not notice. But behind a tanh it is multiplied by the soft-cap. So a factor below 2^-24 is
    split, too; a larger one moves a score by less than ``abs(scale) * sum(abs(k))`` times the smallest normal
    number, as if that had been added to the query.

    A power of two rounds nothing: where neither way overflows they give the same bits.

    Parameters
    ----------
    scale : float
    softcap : float or None
    itemsize : int
        Of a score, 4 or 8.
    is_natural : bool
        Whether something given in natural units must stay exact: a bias of any finite size must not
        overflow, a row with a sink alone has just that as its lse, and the user's function sees scores as
        they are.
    """
    largest = 127 if itemsize == 4 else 1023  # exponent of the largest power of two
    unit, exponent = LOG2E, 1.0
    if is_natural or (softcap is not None and softcap >= 2.0**largest / 2):
        unit, exponent = 1.0, LOG2E
    factor = scale * unit if softcap is None else scale / softcap
    least = 0.0 if softcap is None or scale == 0 else LEAST_CAPPED_FACTOR
    cap = 0.0 if softcap is None else softcap * unit
    if least <= abs(factor) <= 1:
        return ScoreFactors(factor, 1.0, cap, exponent)

    # The factor may be no number, but its parts are.
    part, power = math.frexp(scale)
    if softcap is None:
        part, more = math.frexp(part * unit)
    else:
        below, less = math.frexp(softcap)
        part, more = math.frexp(part / below)
        power -= less
    power += more
    if softcap is None and exponent == 1 and power < largest:
        return ScoreFactors(part, 1.0, cap, math.ldexp(1.0, power))
    root = min(max((power + 1) // 2, 1 - largest), largest)
    return ScoreFactors(math.ldexp(part, power % -2), math.ldexp(1.0, root), cap, exponent)


def is_small(heads: int, head_rows: int, len_k: int, columns: int) -> bool:
    """Whether a problem is too small for more than one thread; letters as in `make_schedule`."""
    return heads * head_rows * len_k * columns < SMALL_WORK


@lru_cache(maxsize=1024)
def make_schedule(
    heads: int, head_rows: int, len_k: int, columns: int, block_q: int, lanes: int, num_threads: int
) -> Schedule:
    """The plan of a tiled CPU backend.

    Parameters
    ----------
    heads : int
        Key/value heads of all batch items, B·K.
    head_rows : int
        Query rows that read one of them, L·H/K.
    len_k : int
        Keys, S.
    columns : int
        Of key and value together, D + E: rows times keys times columns is the work without masks.
    block_q : int
        Query rows that fill the tile of the instruction set in use.
    lanes : int
        Elements that fill a vector of it.
    num_threads : int
        How many threads there may be.
    """
    small = is_small(heads, head_rows, len_k, columns)
    few = head_rows <= FEW_ROWS or head_rows < lanes
    return Schedule(
        block_q,
        BLOCK_K,
        1 if small else num_threads,
        COPY_BLOCKS,
        GAP_BLOCKS,
        COPY_NBYTES,
        uses_split_kv=few or (head_rows == lanes and len_k * columns >= LONG_HEAD),
        split_tasks=SPLIT_TASKS,
        prefetch_distance=PREFETCH_DISTANCE,
        uncached_nbytes=UNCACHED_NBYTES,
    )
