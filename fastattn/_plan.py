"""Problem and host to Plan: pure functions, and the room of every tuning constant."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

# Keys of a tile. 256 keeps scores, keys and values of a tile inside a 1 MB L2 up to head_dim 256 and
# amortises the update of the accumulators; 128 lost 1.5 % at head_dim 64.
# 2 cores of Zen 4 EPYC, 2026-11-20, `python -m benchmarks --group square`.
BLOCK_K = 256

# Below this many multiply-adds one thread is faster than waking a second: the region costs about 5 us.
# 2 cores of Zen 4 EPYC, 2026-11-20, `python -m benchmarks --group small`.
SMALL_WORK = 400_000

# Keys and values with gaps between their rows, as in layout "bshd", fill only some of the places in a cache.
# A copy of one head without gaps takes 15 % off a call at 1024 keys, 8 heads and head_dim 64, and as much at
# 4096 keys, where it has 2 MB; 4 MB gained 5 %. With 6 blocks of query rows it gains nothing, with 3 it costs
# 5 %. 2 cores of Emerald Rapids, 2026-11-21, calls in turns with and without.
COPY_BLOCKS = 8
COPY_NBYTES = 2 << 20


class Plan(NamedTuple):
    """How a problem is cut up. ``block_k`` says where sums are rounded, so it depends on the problem alone;
    the others change no bit of a result."""

    block_q: int  #: query rows of a tile
    block_k: int  #: keys of a tile
    num_threads: int
    copy_blocks: int = 0  #: query tiles that make a copy of keys and values with gaps worth its while
    copy_nbytes: int = 0  #: bytes of such a copy, one head for each thread, at most


def is_small(rows: int, len_k: int, columns: int) -> bool:
    """Whether a problem is too small for more than one thread; letters as in `plan_tiles`."""
    return rows * len_k * columns < SMALL_WORK


@lru_cache(maxsize=1024)
def plan_tiles(rows: int, len_k: int, columns: int, block_q: int, num_threads: int) -> Plan:
    """The plan of a tiled CPU backend.

    Parameters
    ----------
    rows : int
        All query rows, B·H·L.
    len_k : int
        Keys, S.
    columns : int
        Of key and value together, D + E: rows times keys times columns is the work without masks.
    block_q : int
        Query rows that fill the tile of the instruction set in use.
    num_threads : int
        How many threads there may be.
    """
    small = is_small(rows, len_k, columns)
    return Plan(block_q, BLOCK_K, 1 if small else num_threads, COPY_BLOCKS, COPY_NBYTES)
