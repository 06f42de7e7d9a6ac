"""Problem and host to `Schedule`: every decision on how a call is divided, once, for all CPU drivers.

Pure functions of sizes, strides and options; no array is read. The drivers make no decisions of their own.
The tuning constants are in `fastattn._machine.constants`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fastattn._call.problem import AnyProblem, Problem
from fastattn._call.storage import BFLOAT16, REAL, Rows, storage_code
from fastattn._machine.constants import (
    BACKWARD_BLOCK_K,
    BACKWARD_ROW_NBYTES,
    BACKWARD_TASK_TILES,
    BLOCK_K,
    COPY_BLOCKS,
    COPY_NBYTES,
    FEW_ROWS,
    FUSED_COLUMN,
    FUSED_COLUMNS,
    FUSED_FACTOR,
    FUSED_KEYS,
    FUSED_LANES,
    FUSED_LEAST_BLOCKS,
    FUSED_LEAST_GAIN,
    FUSED_MOST_GAIN,
    FUSED_OVERHEAD,
    FUSED_ROWS,
    FUSED_TASK_BLOCKS,
    FUSED_TASK_COLUMNS,
    FUSED_TASK_KEYS,
    FUSED_UNPADDED_GAIN,
    FUSED_WEIGHT,
    GAP_BLOCKS,
    KEY_CHUNK,
    LEAST_CAPPED_FACTOR,
    LOG2E,
    PREFETCH_DISTANCE,
    SMALL_WORK,
    SPLIT_TASKS,
    STORED_BLOCKS,
    SWEEP_WEIGHT,
    UNCACHED_NBYTES,
)

WORD = 32  #: keys whose mask bits are in one word; a key tile has a multiple of it


class Target(NamedTuple):
    """The sizes of a driver's kernels for one dtype."""

    lanes: int  #: elements of a vector, or query rows of a vector of lanes
    max_vectors: int  #: vectors of lanes in a query block at most
    panel_columns: int  #: columns of value in a packed panel, and of whole register tiles
    has_fused: bool = False  #: whether there are kernels of the fused sweep, see `_fuses`
    has_pairs: bool = False  #: and those of pairs of bfloat16, see `_keeps_query`


class Schedule(NamedTuple):
    """How a call is divided. The paths and `block_k` decide the order of summation: they depend on the
    problem alone, not on threads; the other fields change no bit of a result."""

    num_threads: int
    is_small: bool  #: too small for more than one thread, however many there may be
    uses_split_kv: bool  #: the path: split-KV for few query rows, else the sweep
    block_k: int  #: keys of a key tile
    n_vectors: int  #: vectors of lanes for the query rows of a key/value head
    n_blocks: int  #: query blocks that they are divided into, of nearly the same size
    max_lanes: int  #: lanes of the largest query block, whole vectors
    n_tasks: int
    split_tiles: int  #: split-KV: key tiles of a task
    n_splits: int  #: split-KV: tasks that share a key/value head
    copies_keys: bool  #: each thread copies the keys of a head to contiguous memory
    packs_values: bool  #: each thread packs the values of a head into panels
    converts_keys: bool  #: keys are converted, or copied as pairs, tile by tile
    converts_values: bool  #: values in 16 bits likewise
    prefetch_rows: tuple[int, int]  #: split-KV: prefetch distance in rows of keys and of values; 0: none
    query_factor: float  #: this and the others are those of `score_factors`
    score_root: float
    softcap: float
    exponent_factor: float
    keeps_query: bool = False  #: all numbers are bfloat16, and the query's are multiplied by a power of two
    uses_pairs: bool = False  #: the path: the sweep with scores of pairs
    uses_fused: bool = False  #: the path: the fused sweep, whose query blocks have FUSED_LANES lanes
    task_blocks: int = 0  #: fused sweep: query blocks of a task at most, and heads that they are of
    task_heads: int = 0
    scores_on_tiles: bool = False  #: gradients: scores as the fused sweep has them, whose lse they belong to


def make_schedule(problem: Problem, target: Target, num_threads: int) -> Schedule:
    """The schedule of a problem for at most num_threads threads."""
    sizes = problem.sizes
    heads, rows, len_k, lanes = sizes.heads, sizes.rows, sizes.len_k, target.lanes
    small = sizes.rows * heads * len_k * (sizes.head_dim + sizes.value_dim) < SMALL_WORK
    if small:
        num_threads = 1
    block_k = BLOCK_K if len_k > BLOCK_K else max(WORD, _up(len_k, WORD))  # no larger than the keys need
    n_vectors = -(-rows // lanes)
    factors = factors_of(problem)
    if rows <= FEW_ROWS or rows < lanes or (rows == lanes and sizes.group_size > 1):
        tiles, n_splits = _splits(heads, -(-len_k // block_k), num_threads)
        prefetch_rows = (0, 0)
        row_nbytes = sizes.head_dim * problem.key.itemsize, sizes.value_dim * problem.value.itemsize
        if heads * len_k * sum(row_nbytes) >= UNCACHED_NBYTES:
            prefetch_rows = (
                PREFETCH_DISTANCE // max(1, row_nbytes[0]) + 1,
                PREFETCH_DISTANCE // max(1, row_nbytes[1]) + 1,
            )
        n_tasks = heads * n_splits
        return Schedule(
            min(num_threads, n_tasks), small, True, block_k, n_vectors, 1, n_vectors * lanes, n_tasks, tiles,
            n_splits, False, False, _needs_tile(problem.key, problem), _needs_tile(problem.value, problem),
            prefetch_rows, *factors,
        )  # fmt: skip
    if target.has_fused and _fuses(problem, factors):
        return _fused_schedule(problem, target, num_threads, small)
    n_blocks = -(-n_vectors // target.max_vectors)
    converts_keys, converts_values = (_is_stored(x) or _is_scattered(x) for x in (problem.key, problem.value))
    uses_pairs = target.has_pairs and sizes.head_dim % 2 == 0 and _keeps_query(problem)
    if uses_pairs:
        factors = exact_factors(problem)
        converts_keys = problem.key.strides[-1] != problem.key.itemsize or _is_scattered(problem.key)
    copies_keys = packs_values = False
    if n_blocks > 1:
        # Query blocks that one thread computes per copy that it makes.
        blocks = min(n_blocks, heads * n_blocks // num_threads)
        key_nbytes = _key_copy_nbytes(problem, blocks, uses_pairs)
        copies_keys = key_nbytes > 0
        packs_values = _packs_values(problem, target, blocks, 2 * COPY_NBYTES - key_nbytes)
    return Schedule(
        min(num_threads, heads * n_blocks), small, False, block_k, n_vectors, n_blocks,
        -(-n_vectors // n_blocks) * lanes, heads * n_blocks, 1, 1, copies_keys, packs_values,
        converts_keys and not copies_keys, converts_values and not packs_values, (0, 0), *factors,
        keeps_query=uses_pairs, uses_pairs=uses_pairs,
    )  # fmt: skip


def _keeps_query(problem: Problem) -> bool:
    """Whether a problem is in bfloat16 throughout, and `exact_factors` keep its query so. Its products are
    exact then; this decides the order of their summation: it depends on the problem alone."""
    if any(storage_code(x) != BFLOAT16 for x in (problem.query, problem.key, problem.value)):
        return False
    factors = exact_factors(problem)
    return problem.sizes.head_dim > 0 and factors[0] != 0 and _loses_nothing(factors)


def _loses_nothing(factors: tuple[float, float, float, float]) -> bool:
    """Whether products below 2^-126 change no weight: of those the tile unit and pairs keep nothing, see
    ``fused.h`` and ``pairs.h``."""
    _, root, softcap, exponent = factors
    return root >= 1 and root * root * exponent * max(1.0, softcap) <= FUSED_FACTOR


def _fuses(problem: Problem, factors: tuple[float, float, float, float]) -> bool:
    """Whether a problem, for which the kernels have a fused sweep, uses it. This decides the order of
    summation: it depends on the problem alone."""
    sizes, band = problem.sizes, problem.band
    # Where items have lengths, those of the others must not decide.
    has_lengths = band is not None and band.lengths is not None
    len_k = sizes.rows if has_lengths else sizes.len_k
    return (
        sizes.rows >= FUSED_ROWS
        and len_k >= FUSED_KEYS
        and sizes.len_k > 0
        and 0 < sizes.value_dim <= FUSED_COLUMNS
        and sizes.head_dim <= FUSED_COLUMNS
        and _loses_nothing(factors)
        and _fused_gain(problem, len_k) >= FUSED_LEAST_GAIN
    )


def _fused_gain(problem: Problem, len_k: int) -> float:
    """The time of the sweep over that of the fused one, estimated for so many keys."""
    sizes, band = problem.sizes, problem.band
    columns = sizes.head_dim + sizes.value_dim
    padded = _up(sizes.head_dim, WORD) + _up(sizes.value_dim, WORD)
    gain = min(
        FUSED_MOST_GAIN,
        FUSED_UNPADDED_GAIN * columns / padded,
        (columns + SWEEP_WEIGHT) / (padded * FUSED_COLUMN + FUSED_WEIGHT),
    )
    n_pairs = sizes.len_q * len_k if band is None else band.n_pairs(sizes.len_q, len_k)
    keys_of_a_row, rows_of_a_key = n_pairs / sizes.len_q, n_pairs * sizes.group_size / len_k
    return gain / (1 + FUSED_OVERHEAD / keys_of_a_row + FUSED_OVERHEAD / rows_of_a_key)


def _fused_schedule(
    problem: Problem,
    target: Target,
    num_threads: int,
    small: bool,
) -> Schedule:
    """The schedule of the fused sweep: its tasks are consecutive query blocks of all heads."""
    keeps_query = _keeps_query(problem)
    factors = exact_factors(problem) if keeps_query else factors_of(problem)
    sizes = problem.sizes
    n_blocks = -(-sizes.rows // FUSED_LANES)  # of a head
    all_blocks = sizes.heads * n_blocks
    columns = _up(sizes.head_dim, WORD) + _up(sizes.value_dim, WORD)
    most = max(1, min(FUSED_TASK_BLOCKS, FUSED_TASK_COLUMNS // columns))
    # Keys and values of the heads of a task stay in L2, too.
    most_heads = max(1, FUSED_TASK_KEYS // min(sizes.len_k, BLOCK_K))
    most = min(most, max(1, most_heads * n_blocks))
    n_tasks = -(-all_blocks // most)
    if num_threads > 1:
        n_tasks = max(n_tasks, min(4 * num_threads, all_blocks // FUSED_LEAST_BLOCKS))
        n_tasks = min(_up(max(n_tasks, 1), num_threads), all_blocks)
    task_blocks = -(-all_blocks // n_tasks)
    # A head's blocks may begin within a task and end within it.
    task_heads = min(sizes.heads, (task_blocks - 1) // n_blocks + 1 + (n_blocks > 1))
    # Outputs that overflow are computed again, by the other kernels.
    converts_values = _is_stored(problem.value) or _is_scattered(problem.value)
    return Schedule(
        min(num_threads, n_tasks), small, False, BLOCK_K, n_blocks * FUSED_LANES // target.lanes, n_blocks,
        FUSED_LANES, n_tasks, 1, 1, False, False, False, converts_values, (0, 0), *factors,
        keeps_query=keeps_query, uses_fused=True, task_blocks=task_blocks, task_heads=task_heads,
    )  # fmt: skip


def make_backward_schedule(problem: Problem, target: Target, num_threads: int) -> Schedule:
    """The schedule of the gradients of a problem: tasks are key tiles, each over all query blocks."""
    sizes = problem.sizes
    factors = factors_of(problem)
    scores_on_tiles = target.has_fused and _fuses(problem, factors)
    heads, lanes = sizes.heads, FUSED_LANES if scores_on_tiles else target.lanes
    small = sizes.rows * heads * sizes.len_k * (sizes.head_dim + sizes.value_dim) < SMALL_WORK
    # Query blocks of about the same size; the tiles of large ones have rows of a length that kernels know.
    max_lanes = BACKWARD_ROW_NBYTES // problem.dtype.itemsize
    n_blocks = max(1, -(-sizes.rows // max_lanes))
    block_q = _up(-(-sizes.rows // n_blocks), lanes)
    if n_blocks == 1 and 2 * block_q <= max_lanes:
        max_lanes = block_q
    block_k = min(BACKWARD_BLOCK_K, max(WORD, _up(sizes.len_k, WORD)))
    n_tiles = -(-sizes.len_k // block_k)
    # Rows of queries are packed once a task; bits do not depend on the tasks.
    task_tiles = min(n_tiles, BACKWARD_TASK_TILES)
    while task_tiles > 1 and heads * -(-n_tiles // task_tiles) < SPLIT_TASKS * num_threads:
        task_tiles -= 1
    n_tasks = heads * -(-n_tiles // task_tiles)
    return Schedule(
        1 if small else min(num_threads, n_tasks), small, False, block_k, block_q // target.lanes, n_blocks,
        max_lanes, n_tasks, task_tiles, 1, False, False, False, False, (0, 0), *factors,
        scores_on_tiles=scores_on_tiles,
    )  # fmt: skip


def _key_copy_nbytes(problem: Problem, blocks: int, uses_pairs: bool) -> int:
    """Bytes of a thread's copy of the keys of a head, for so many query blocks; 0 where it makes none. The
    copy is of the type of the computation, or of pairs as they are."""
    sizes, converts = problem.sizes, _is_stored(problem.key) and not uses_pairs
    itemsize = problem.key.itemsize if uses_pairs else problem.dtype.itemsize
    nbytes = sizes.len_k * sizes.head_dim * itemsize
    gains = converts or _has_gaps(problem.key)
    is_worth = gains and blocks >= (STORED_BLOCKS if converts else COPY_BLOCKS) and nbytes <= COPY_NBYTES
    return nbytes if is_worth else 0


def _packs_values(problem: Problem, target: Target, blocks: int, most: int) -> bool:
    """Whether a thread packs the values of a head for so many query blocks, into at most so many bytes."""
    sizes = problem.sizes
    nbytes = sizes.len_k * _up(sizes.value_dim, target.panel_columns) * problem.dtype.itemsize
    if _is_stored(problem.value):
        least = STORED_BLOCKS
    else:
        least = GAP_BLOCKS if _has_gaps(problem.value) else COPY_BLOCKS
    return blocks >= least and nbytes <= most


def _is_stored(array: np.ndarray | Rows) -> bool:
    """Whether an array is in 16 bits or in int8."""
    return storage_code(array) != REAL


def _is_scattered(array: np.ndarray | Rows) -> bool:
    """Whether partial sums over KEY_CHUNK keys cross the pages of an array."""
    return isinstance(array, Rows) and array.page_size % KEY_CHUNK != 0


def _needs_tile(array: np.ndarray | Rows, problem: Problem) -> bool:
    """Whether the kernels of few rows cannot read it in place: not contiguous, in small pages, stored beside
    float64, or with swapped bytes."""
    if array.strides[-1] != array.itemsize or _is_scattered(array):
        return True
    if isinstance(array, Rows) and array.is_quantized and array.scale_strides[-1] != 4:
        return True
    return not (array.dtype.isnative and problem.dtype.itemsize == 4) and _is_stored(array)


def needs_natural_scores(problem: AnyProblem) -> bool:
    """Whether scores must not be held times log2(e), because something given in natural units must stay
    exact: a bias of any finite size must not overflow, a row with a sink alone has just that as its lse, and
    the user's function sees scores as they are."""
    return problem.bias is not None or problem.sinks is not None or problem.score_mod is not None


@lru_cache(maxsize=1024)
def score_factors(
    scale: float, softcap: float | None, itemsize: int, is_natural: bool
) -> tuple[float, float, float, float]:
    """Where the scale and the soft-cap are applied, so that no call loses what the formula would keep.

    The formula is ``s = scale * (q @ k)``, ``s = softcap * tanh(s / softcap)``, ``exp(s - largest)``. A
    factor of the query costs nothing per key, so all factors of the score are applied there:
    ``scale * log2(e)``, for weights computed as powers of two; ``scale`` alone where scores are natural;
    ``scale / softcap`` before a tanh.

    *Overflow.* A factor of at most 1 makes no product larger than those of ``q @ k``. A larger one is split
    into ``m * 2^n`` with ``1/4 <= m <= 1``: the query is multiplied by m, and 2^n is applied where nothing is
    lost. That is the exponent, a difference of scores times a factor, where scores need not be natural; else
    the scores, in an additional pass, as two factors, as 2^n itself may overflow.

    *Underflow.* A packed query is rounded to a multiple of the smallest subnormal number t, which changes a
    score by at most ``t / 2 * sum(abs(k))``: ``head_dim * 2^-22`` for keys as large as float32 has. That is
    too small to change a weight, but after a tanh it is multiplied by the soft-cap. So a factor below 2^-24
    is split, too; a larger one changes a score by less than ``abs(scale) * sum(abs(k))`` times the smallest
    normal number, as if that had been added to the query.

    Powers of two are exact: where neither way overflows both give the same bits.

    Parameters
    ----------
    scale : float
    softcap : float or None
    itemsize : int
        Of a score, 4 or 8.
    is_natural : bool
        See `needs_natural_scores`.

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

    # The factor may overflow or underflow; its mantissa and exponent do not.
    mantissa, power = math.frexp(scale)
    if softcap is None:
        mantissa, more = math.frexp(mantissa * unit)
    else:
        below, less = math.frexp(softcap)
        mantissa, more = math.frexp(mantissa / below)
        power -= less
    power += more
    if softcap is None and exponent == 1 and power < largest:
        return mantissa, 1.0, cap, math.ldexp(1.0, power)
    root = min(max((power + 1) // 2, 1 - largest), largest)
    return math.ldexp(mantissa, power % -2), math.ldexp(1.0, root), cap, exponent


def factors_of(problem: AnyProblem) -> tuple[float, float, float, float]:
    """The `score_factors` of a problem."""
    is_natural = needs_natural_scores(problem)
    return score_factors(problem.scale, problem.softcap, problem.dtype.itemsize, is_natural)


def exact_factors(problem: AnyProblem) -> tuple[float, float, float, float]:
    """The same with a power of two for the query, which multiplies its numbers without rounding. The exponent
    takes the rest; or the root does, which is then no power of two and rounds scores twice, where scores are
    natural or have a soft-cap."""
    query, root, softcap, exponent = factors_of(problem)
    mantissa, power = math.frexp(query)
    if abs(mantissa) in (0, 0.5):
        return query, root, softcap, exponent
    exact = math.copysign(math.ldexp(1.0, power - 1), query)
    if needs_natural_scores(problem) or softcap:
        return exact, root * math.sqrt(query / exact), softcap, exponent
    return exact, root, softcap, exponent * (query / exact)


def _splits(heads: int, n_key_tiles: int, num_threads: int) -> tuple[int, int]:
    """Split-KV: key tiles of a task, a power of two, and tasks of a head."""
    tiles = 1
    while tiles < n_key_tiles and (
        num_threads == 1 or heads * -(-n_key_tiles // tiles) > SPLIT_TASKS * num_threads
    ):
        tiles *= 2
    return tiles, max(1, -(-n_key_tiles // tiles))


def _has_gaps(array: np.ndarray | Rows) -> bool:
    """Whether there are gaps between the elements or the rows of one head."""
    n_cols, itemsize = array.shape[-1], array.itemsize
    return (n_cols > 1 and array.strides[-1] != itemsize) or abs(array.strides[-2]) > n_cols * itemsize


def _up(n: int, step: int) -> int:
    """n rounded up to a multiple of step."""
    return -(-n // step) * step
