"""Problem and host to Plan: pure functions, and the room of every tuning constant."""

from __future__ import annotations

from dataclasses import dataclass

# Keys of a tile. 256 keeps scores, keys and values of a tile inside a 1 MB L2 up to head_dim 256 and
# amortises the update of the accumulators; 128 lost 1.5 % at head_dim 64.
# 2 cores of Zen 4 EPYC, 2026-11-20, `python -m benchmarks --group dense`.
BLOCK_K = 256

# Below this many multiply-adds one thread is faster than waking a second: the region costs about 5 us.
# 2 cores of Zen 4 EPYC, 2026-11-20, `python -m benchmarks --group small`.
SERIAL_WORK = 400_000


@dataclass(frozen=True, slots=True)
class Plan:
    """How a problem is cut up. Results do not depend on any of it but ``block_k``."""

    block_q: int  #: query rows of a tile
    block_k: int  #: keys of a tile
    num_threads: int


def plan_tiles(work: int, widest_block: int, num_threads: int) -> Plan:
    """The plan of a tiled CPU backend.

    Parameters
    ----------
    work : int
        Multiply-adds of the whole problem without masks, B·H·L·S·(D + E).
    widest_block : int
        Query rows that fill the register tile of the instruction set in use.
    num_threads : int
        How many threads there may be.
    """
    return Plan(widest_block, BLOCK_K, 1 if work < SERIAL_WORK else num_threads)
