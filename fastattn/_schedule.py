"""Problem and host to Schedule: pure functions. What they are tuned by is in `_constants`."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from fastattn._constants import (
    BLOCK_K,
    COPY_BLOCKS,
    COPY_NBYTES,
    FEW_ROWS,
    GAP_BLOCKS,
    LEAST_CAPPED_FACTOR,
    LOG2E,
    LONG_HEAD,
    PREFETCH_DISTANCE,
    SMALL_WORK,
    SPLIT_TASKS,
    UNCACHED_NBYTES,
)


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


@lru_cache(maxsize=1024)
def score_factors(
    scale: float, softcap: float | None, itemsize: int, is_natural: bool
) -> tuple[float, float, float, float]:
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

    Returns
    -------
    query : float
        The packed query is multiplied by it.
    root : float
        Raw scores are multiplied by it twice; a power of two, 1 where they are not.
    softcap : float
        In the domain of the scores; 0 when there is none.
    exponent : float
        The weight of a score s is ``2^(exponent * (s - largest))``.
    """
    largest = 127 if itemsize == 4 else 1023  # exponent of the largest power of two
    unit, exponent = LOG2E, 1.0
    if is_natural or (softcap is not None and softcap >= 2.0**largest / 2):
        unit, exponent = 1.0, LOG2E
    factor = scale * unit if softcap is None else scale / softcap
    least = 0.0 if softcap is None or scale == 0 else LEAST_CAPPED_FACTOR
    cap = 0.0 if softcap is None else softcap * unit
    if least <= abs(factor) <= 1:
        return factor, 1.0, cap, exponent

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
        return part, 1.0, cap, math.ldexp(1.0, power)
    root = min(max((power + 1) // 2, 1 - largest), largest)
    return math.ldexp(part, power % -2), math.ldexp(1.0, root), cap, exponent


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
