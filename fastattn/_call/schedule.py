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
from fastattn._machine import constants

WORD = 32  #: keys whose mask bits are in one word; a key tile has a multiple of it


class Target(NamedTuple):
    """The sizes of a driver's kernels for one dtype."""

    lanes: int  #: elements of a vector, or query rows of a vector of lanes
    max_vectors: int  #: vectors of lanes in a query block at most
    panel_columns: int  #: columns of value in a packed panel, and of whole register tiles
    has_fused: bool = False  #: whether there are kernels of the fused sweep, see `_fuses`
    has_pairs: bool = False  #: and those of pairs of bfloat16, see `_keeps_query`
    has_pieces: bool = False  #: whether the sweep can merge partial results
    few_rows: int = 0  #: query rows of a head up to which split-KV is used; 0: see `constants.FEW_ROWS`


class Factors(NamedTuple):
    """Where the scale and the soft-cap are applied; `score_factors` says why."""

    query_factor: float  #: the packed query is multiplied by it
    score_root: float  #: raw scores are multiplied by it twice; 1: they are not
    softcap: float  #: in the domain of the scores; 0: none
    exponent_factor: float  #: the weight of a score s is ``2^(exponent_factor * (s - largest))``


class Schedule(NamedTuple):
    """How a call is divided. The paths, `block_k` and `piece_tiles` decide the order of summation: they
    depend on the problem alone, not on threads. The other fields change no bit of a result."""

    num_threads: int
    uses_split_kv: bool  #: the path: split-KV for few query rows, else the sweep
    block_k: int  #: keys of a key tile
    n_vectors: int  #: vectors of lanes for the query rows of a key/value head
    n_blocks: int  #: query blocks that they are divided into, of nearly the same size
    max_lanes: int  #: lanes of the largest query block, whole vectors
    n_tasks: int
    query_factor: float  #: this and the next three are `Factors`
    score_root: float
    softcap: float
    exponent_factor: float
    piece_tiles: int = 0  #: key tiles of a piece, which has a partial result; 0: there are none
    split_tiles: int = 1  #: key tiles of a task, whole pieces
    n_splits: int = 1  #: tasks that share the keys of a query block
    #: Of `make_schedule`: too small for more than one thread, however many there may be; done before a thread
    #: that sleeps would begin.
    is_small: bool = False
    is_short: bool = False
    copies_keys: bool = False  #: each thread copies the keys of a head to contiguous memory
    packs_values: bool = False  #: each thread packs the values of a head into panels
    packs_chunks: bool = False  #: or those of a partial sum, for each query block
    converts_keys: bool = False  #: keys are converted, or copied as pairs, tile by tile
    converts_values: bool = False  #: values in 16 bits likewise
    reads_values: bool = False  #: those in bfloat16 are read as they are stored, two columns at a time
    prefetch_rows: tuple[int, int] = (0, 0)  #: split-KV: prefetch distance, in keys and in values; 0: none
    keeps_query: bool = False  #: all numbers are bfloat16, and the query's are multiplied by a power of two
    uses_pairs: bool = False  #: the path: the sweep with scores of pairs
    #: The weights of pairs or of the fused sweep are rounded to bfloat16. Of gradients: the path of pairs,
    #: with gradients of scores that are rounded as well.
    rounds_weights: bool = False
    uses_fused: bool = False  #: the path: the fused sweep, whose query blocks have FUSED_LANES lanes
    task_blocks: int = 0  #: fused sweep: query blocks of a task at most, and heads that they are of
    task_heads: int = 0
    scores_on_tiles: bool = False  #: gradients: scores as the fused sweep has them, whose lse they belong to


def make_schedule(problem: Problem, target: Target, num_threads: int) -> Schedule:
    """The schedule of a problem for at most num_threads threads."""
    sizes = problem.sizes
    heads, rows, len_k, lanes = sizes.heads, sizes.rows, sizes.len_k, target.lanes
    scores = rows * heads * len_k
    work = scores * (sizes.head_dim + sizes.value_dim)
    key_nbytes, value_nbytes = (x.shape[-1] * x.itemsize for x in (problem.key, problem.value))
    nbytes = heads * len_k * (key_nbytes + value_nbytes)
    is_short = (
        problem.score_mod is None  # which may take any time
        and work + scores * constants.SCORE_WORK < constants.SHORT_WORK
        and nbytes < constants.SHORT_NBYTES
    )
    is_small = work < constants.SMALL_WORK
    if is_small:
        num_threads = 1
    block_k = _block_k(len_k)
    n_vectors = -(-rows // lanes)
    factors = factors_of(problem)
    few_rows = target.few_rows or max(constants.FEW_ROWS, lanes - 1)
    if rows <= few_rows or (rows == lanes == few_rows + 1 and sizes.group_size > 1):
        tiles, n_splits = _splits(heads, -(-len_k // block_k), 1, num_threads, constants.SPLIT_TASKS)
        prefetch_rows = (0, 0)
        if nbytes >= constants.UNCACHED_NBYTES:
            distance = constants.PREFETCH_DISTANCE
            prefetch_rows = distance // max(1, key_nbytes) + 1, distance // max(1, value_nbytes) + 1
        n_tasks = heads * n_splits
        schedule = Schedule(
            num_threads=min(num_threads, n_tasks), uses_split_kv=True, block_k=block_k,
            n_vectors=n_vectors, n_blocks=1, max_lanes=n_vectors * lanes, n_tasks=n_tasks,
            piece_tiles=1, split_tiles=tiles, n_splits=n_splits, prefetch_rows=prefetch_rows,
            converts_keys=_needs_tile(problem.key, problem),
            converts_values=_needs_tile(problem.value, problem), **factors._asdict(),
        )  # fmt: skip
    elif target.has_fused and _fuses(problem, factors):
        schedule = _fused_schedule(problem, target, num_threads)
    else:
        pieces = None
        if target.has_pieces and rows <= constants.PIECE_ROWS:
            pieces = constants.PIECE_TILES, constants.SPLIT_TASKS
        uses_pairs = target.has_pairs and sizes.head_dim % 2 == 0 and _keeps_query(problem)
        if uses_pairs:
            factors = exact_factors(problem)
        schedule = _sweep_schedule(problem, target, num_threads, factors, uses_pairs, pieces)
    return schedule._replace(is_small=is_small, is_short=is_short)


def make_reduction_schedule(problem: Problem, target: Target, num_threads: int, k: int) -> Schedule:
    """The schedule of a problem whose scores are reduced to the k largest: the sweep, without values, over
    natural scores. Bits do not depend on the pieces."""
    small = problem.sizes.rows * problem.sizes.heads * problem.len_k * problem.head_dim < constants.SMALL_WORK
    factors = score_factors(problem.scale, problem.softcap, problem.dtype.itemsize, True)
    # Each task of a query block inserts into a list of k scores of its own.
    piece = constants.PIECE_TILES * -(-2 * k * k // (constants.PIECE_TILES * constants.BLOCK_K))
    pieces = piece, constants.REDUCTION_TASKS
    schedule = _sweep_schedule(problem, target, 1 if small else num_threads, factors, pieces=pieces)
    return schedule._replace(packs_values=False, converts_values=False)


def _sweep_schedule(
    problem: Problem,
    target: Target,
    num_threads: int,
    factors: Factors,
    uses_pairs: bool = False,
    pieces: tuple[int, int] | None = None,
) -> Schedule:
    """The schedule of the sweep, by scores of pairs or of the compute type.

    pieces: the key tiles of a piece, and the tasks of each thread that share keys; None: one piece.
    """
    sizes = problem.sizes
    heads, lanes = sizes.heads, target.lanes
    n_vectors = -(-sizes.rows // lanes)
    n_blocks = -(-n_vectors // target.max_vectors)
    converts_keys, converts_values = (_is_stored(x) or _is_scattered(x) for x in (problem.key, problem.value))
    if uses_pairs:
        converts_keys = problem.key.strides[-1] != problem.key.itemsize or _is_scattered(problem.key)
    rounds_weights = uses_pairs and problem.rounds_weights
    reads_values = (
        uses_pairs
        and not rounds_weights
        and sizes.value_dim % 2 == 0
        and not (_has_gaps(problem.value) or _is_scattered(problem.value))
    )
    block_k = _block_k(sizes.len_k)
    n_key_tiles = max(1, -(-sizes.len_k // block_k))
    piece_tiles, tasks = pieces or (n_key_tiles, 1)
    split_tiles, n_splits = _splits(heads * n_blocks, n_key_tiles, piece_tiles, num_threads, tasks)
    n_tasks = heads * n_blocks * n_splits
    copies_keys = packs_values = False
    if n_blocks > 1 and n_splits == 1:
        # Query blocks that one thread computes per copy that it makes.
        blocks = min(n_blocks, heads * n_blocks // num_threads)
        key_nbytes = _key_copy_nbytes(problem, blocks, uses_pairs)
        copies_keys = key_nbytes > 0
        packs_values = not reads_values and _packs_values(
            problem, target, blocks, 2 * constants.COPY_NBYTES - key_nbytes, rounds_weights
        )
    packs_chunks = (
        not (packs_values or converts_values)
        and n_vectors > constants.CHUNK_VECTORS * n_blocks
        and sizes.value_dim >= constants.CHUNK_COLUMNS
    )
    return Schedule(
        num_threads=min(num_threads, n_tasks), uses_split_kv=False, block_k=block_k,
        n_vectors=n_vectors, n_blocks=n_blocks, max_lanes=-(-n_vectors // n_blocks) * lanes, n_tasks=n_tasks,
        piece_tiles=piece_tiles, split_tiles=split_tiles, n_splits=n_splits,
        copies_keys=copies_keys, packs_values=packs_values, packs_chunks=packs_chunks,
        converts_keys=converts_keys and not copies_keys,
        converts_values=converts_values and not (packs_values or reads_values), reads_values=reads_values,
        keeps_query=uses_pairs, uses_pairs=uses_pairs, rounds_weights=rounds_weights, **factors._asdict(),
    )  # fmt: skip


def _block_k(len_k: int) -> int:
    """Keys of a key tile, no more than there are."""
    return min(constants.BLOCK_K, max(WORD, _up(len_k, WORD)))


def _keeps_query(problem: Problem) -> bool:
    """Whether a problem is in bfloat16 throughout, also its query times the factor of `exact_factors`.

    Its products are then exact. This decides the order of their summation: it depends on the problem alone.
    """
    if any(storage_code(x) != BFLOAT16 for x in (problem.query, problem.key, problem.value)):
        return False
    factors = exact_factors(problem)
    return problem.sizes.head_dim > 0 and factors.query_factor != 0 and _loses_nothing(factors)


def _loses_nothing(factors: Factors) -> bool:
    """Whether products below 2^-126 change no weight. The tile unit and pairs flush them to 0: see
    ``fused.h`` and ``pairs.h``."""
    _, root, softcap, exponent = factors
    return root >= 1 and root * root * exponent * max(1.0, softcap) <= constants.FUSED_FACTOR


def _fuses(problem: Problem, factors: Factors) -> bool:
    """Whether a problem uses the fused sweep, where the kernels have one. This decides the order of
    summation: it depends on the problem alone."""
    sizes, band = problem.sizes, problem.band
    # The lengths of other items must not decide.
    has_lengths = band is not None and band.lengths is not None
    len_k = sizes.rows if has_lengths else sizes.len_k
    return (
        sizes.rows >= constants.FUSED_ROWS
        and len_k >= constants.FUSED_KEYS
        and sizes.len_k > 0
        and 0 < sizes.value_dim <= constants.FUSED_COLUMNS
        and sizes.head_dim <= constants.FUSED_COLUMNS
        and _loses_nothing(factors)
        and _fused_gain(problem, len_k) >= constants.FUSED_LEAST_GAIN
    )


def _fused_gain(problem: Problem, len_k: int) -> float:
    """An estimate for `len_k` keys: the time of the sweep over that of the fused sweep."""
    sizes, band = problem.sizes, problem.band
    columns = sizes.head_dim + sizes.value_dim
    padded = _up(sizes.head_dim, WORD) + _up(sizes.value_dim, WORD)
    gain = min(
        constants.FUSED_MOST_GAIN,
        constants.FUSED_UNPADDED_GAIN * columns / padded,
        (columns + constants.SWEEP_WEIGHT) / (padded * constants.FUSED_COLUMN + constants.FUSED_WEIGHT),
    )
    n_pairs = sizes.len_q * len_k if band is None else band.n_pairs(sizes.len_q, len_k)
    keys_of_a_row, rows_of_a_key = n_pairs / sizes.len_q, n_pairs * sizes.group_size / len_k
    return gain / (1 + constants.FUSED_OVERHEAD / keys_of_a_row + constants.FUSED_OVERHEAD / rows_of_a_key)


def _fused_schedule(problem: Problem, target: Target, num_threads: int) -> Schedule:
    """The schedule of the fused sweep: its tasks are consecutive query blocks of all heads."""
    keeps_query = _keeps_query(problem)
    factors = exact_factors(problem) if keeps_query else factors_of(problem)
    sizes = problem.sizes
    lanes = constants.FUSED_LANES
    n_blocks = -(-sizes.rows // lanes)  # of a head
    all_blocks = sizes.heads * n_blocks
    columns = _up(sizes.head_dim, WORD) + _up(sizes.value_dim, WORD)
    most = max(1, min(constants.FUSED_TASK_BLOCKS, constants.FUSED_TASK_COLUMNS // columns))
    # Keys and values of a task's heads must stay in L2, too.
    most_heads = max(1, constants.FUSED_TASK_KEYS // min(sizes.len_k, constants.BLOCK_K))
    most = min(most, max(1, most_heads * n_blocks))
    n_tasks = -(-all_blocks // most)
    if num_threads > 1:
        n_tasks = max(n_tasks, min(4 * num_threads, all_blocks // constants.FUSED_LEAST_BLOCKS))
        n_tasks = min(_up(max(n_tasks, 1), num_threads), all_blocks)
    task_blocks = -(-all_blocks // n_tasks)
    # A task may hold the last blocks of one head and the first of another.
    task_heads = min(sizes.heads, (task_blocks - 1) // n_blocks + 1 + (n_blocks > 1))
    # Outputs that overflow are computed again by the sweep's kernels, which convert values.
    converts_values = _is_stored(problem.value) or _is_scattered(problem.value)
    return Schedule(
        num_threads=min(num_threads, n_tasks), uses_split_kv=False, block_k=constants.BLOCK_K,
        n_vectors=n_blocks * lanes // target.lanes, n_blocks=n_blocks, max_lanes=lanes, n_tasks=n_tasks,
        converts_values=converts_values, keeps_query=keeps_query, uses_fused=True, task_blocks=task_blocks,
        task_heads=task_heads, rounds_weights=keeps_query and problem.rounds_weights, **factors._asdict(),
    )  # fmt: skip


def make_backward_schedule(
    problem: Problem, target: Target, num_threads: int, sums_by_task: bool
) -> Schedule:
    """The schedule of the gradients of a problem, whose `out` is the gradient of the outputs: tasks are key
    tiles, each over all query blocks.

    sums_by_task: each task has sums of its own, so that the tasks decide the order of summation.
    """
    sizes = problem.sizes
    rounds_weights = (
        problem.rounds_weights
        and target.has_pairs
        and not target.has_fused
        and storage_code(problem.out) == BFLOAT16
        and sizes.rows > constants.BACKWARD_PAIR_LANES // 2
        and _keeps_query(problem)
    )
    factors = exact_factors(problem) if rounds_weights else factors_of(problem)
    scores_on_tiles = target.has_fused and _fuses(problem, factors)
    heads, lanes = sizes.heads, constants.FUSED_LANES if scores_on_tiles else target.lanes
    small = sizes.rows * heads * sizes.len_k * (sizes.head_dim + sizes.value_dim) < constants.SMALL_WORK
    # Query blocks of about the same size. Tiles of large blocks have rows of a length fixed in the kernels.
    row_lanes = constants.BACKWARD_ROW_NBYTES // problem.dtype.itemsize
    max_lanes = constants.BACKWARD_PAIR_LANES if rounds_weights else row_lanes
    n_blocks = max(1, -(-sizes.rows // max_lanes))
    block_q = _up(-(-sizes.rows // n_blocks), lanes)
    if n_blocks == 1 and 2 * block_q <= max_lanes:
        max_lanes = block_q
    block_k = min(constants.BACKWARD_BLOCK_K, max(WORD, _up(sizes.len_k, WORD)))
    n_tiles = -(-sizes.len_k // block_k)
    # A task packs the queries once.
    task_tiles = 1 if sums_by_task else min(n_tiles, constants.BACKWARD_TASK_TILES)
    while task_tiles > 1 and heads * -(-n_tiles // task_tiles) < constants.SPLIT_TASKS * num_threads:
        task_tiles -= 1
    n_tasks = heads * -(-n_tiles // task_tiles)
    return Schedule(
        num_threads=1 if small else min(num_threads, n_tasks), uses_split_kv=False,
        block_k=block_k, n_vectors=block_q // target.lanes, n_blocks=n_blocks, max_lanes=max_lanes,
        n_tasks=n_tasks, split_tiles=task_tiles, scores_on_tiles=scores_on_tiles, is_small=small,
        rounds_weights=rounds_weights, **factors._asdict(),
    )  # fmt: skip


def _key_copy_nbytes(problem: Problem, blocks: int, uses_pairs: bool) -> int:
    """Bytes of a thread's copy of the keys of a head that `blocks` query blocks read; 0: no copy. The copy is
    in the dtype of the computation, or in pairs as stored."""
    sizes, converts = problem.sizes, _is_stored(problem.key) and not uses_pairs
    itemsize = problem.key.itemsize if uses_pairs else problem.dtype.itemsize
    nbytes = sizes.len_k * sizes.head_dim * itemsize
    gains = converts or _has_gaps(problem.key)
    is_worth = (
        gains
        and blocks >= (constants.STORED_BLOCKS if converts else constants.COPY_BLOCKS)
        and nbytes <= constants.COPY_NBYTES
    )
    return nbytes if is_worth else 0


def _packs_values(problem: Problem, target: Target, blocks: int, most: int, rounds_weights: bool) -> bool:
    """Whether a thread packs the values of a head, for `blocks` query blocks, into `most` bytes at most: in
    the dtype of the computation, or in pairs as stored."""
    sizes = problem.sizes
    nbytes = sizes.len_k * _up(sizes.value_dim, target.panel_columns) * problem.dtype.itemsize
    if rounds_weights:
        nbytes = _up(sizes.len_k, 2) * _up(sizes.value_dim, constants.PAIR_COLUMNS) * problem.value.itemsize
    if _is_stored(problem.value):
        least = constants.STORED_BLOCKS
    else:
        least = constants.GAP_BLOCKS if _has_gaps(problem.value) else constants.COPY_BLOCKS
    return blocks >= least and nbytes <= most


def _is_stored(array: np.ndarray | Rows) -> bool:
    """Whether an array is in 16 bits or in int8."""
    return storage_code(array) != REAL


def _is_scattered(array: np.ndarray | Rows) -> bool:
    """Whether partial sums over KEY_CHUNK keys cross the pages of an array."""
    return isinstance(array, Rows) and array.page_size % constants.KEY_CHUNK != 0


def _needs_tile(array: np.ndarray | Rows, problem: Problem) -> bool:
    """Whether the split-KV kernels cannot read it in place: it is not contiguous, in small pages, stored but
    computed in float64, or its bytes are swapped."""
    if array.strides[-1] != array.itemsize or _is_scattered(array):
        return True
    if isinstance(array, Rows) and array.is_quantized and array.scale_strides[-1] != 4:
        return True
    return not (array.dtype.isnative and problem.dtype.itemsize == 4) and _is_stored(array)


def needs_natural_scores(problem: AnyProblem) -> bool:
    """Whether scores are held as they are, not times log2(e).

    A bias of any finite size must not overflow. A row with a sink alone has that sink as its lse, exactly.
    The caller's function sees scores as they are.
    """
    return bool(problem.bias) or problem.sinks is not None or problem.score_mod is not None


@lru_cache(maxsize=1024)
def score_factors(scale: float, softcap: float | None, itemsize: int, is_natural: bool) -> Factors:
    """Where the scale and the soft-cap are applied, so that no call loses what the formula would keep.

    The formula is ``s = scale * (q @ k)``, ``s = softcap * tanh(s / softcap)``, ``exp(s - largest)``. A
    factor of the query costs nothing per key, so all factors of the score are applied there:
    ``scale * log2(e)``, as weights are powers of two; ``scale`` alone where scores are natural (is_natural,
    see `needs_natural_scores`); ``scale / softcap`` before a tanh. itemsize: of a score, 4 or 8.

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
    """
    largest = 127 if itemsize == 4 else 1023  # exponent of the largest power of two
    unit, exponent = constants.LOG2E, 1.0
    if is_natural or (softcap is not None and softcap >= 2.0**largest / 2):
        unit, exponent = 1.0, constants.LOG2E
    factor = scale * unit if softcap is None else scale / softcap
    least = 0.0 if softcap is None or scale == 0 else constants.LEAST_CAPPED_FACTOR
    cap = 0.0 if softcap is None else softcap * unit
    if least <= abs(factor) <= 1:
        return Factors(factor, 1.0, cap, exponent)

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
        return Factors(mantissa, 1.0, cap, math.ldexp(1.0, power))
    root = min(max((power + 1) // 2, 1 - largest), largest)
    return Factors(math.ldexp(mantissa, power % -2), math.ldexp(1.0, root), cap, exponent)


def factors_of(problem: AnyProblem) -> Factors:
    """The `score_factors` of a problem."""
    is_natural = needs_natural_scores(problem)
    return score_factors(problem.scale, problem.softcap, problem.dtype.itemsize, is_natural)


def exact_factors(problem: AnyProblem) -> Factors:
    """The same with a power of two for the query, so that its numbers are not rounded.

    The remainder goes to the exponent or, where scores are natural or soft-capped, to the root, which then
    rounds scores twice.
    """
    factors = factors_of(problem)
    query, root, softcap, exponent = factors
    mantissa, power = math.frexp(query)
    if abs(mantissa) in (0, 0.5):
        return factors
    exact = math.copysign(math.ldexp(1.0, power - 1), query)
    if needs_natural_scores(problem) or softcap:
        return Factors(exact, root * math.sqrt(query / exact), softcap, exponent)
    return Factors(exact, root, softcap, exponent * (query / exact))


def _splits(blocks: int, n_key_tiles: int, piece_tiles: int, num_threads: int, tasks: int) -> tuple[int, int]:
    """Key tiles of a task, a power of two of pieces, and the tasks of each of so many query blocks, with
    about `tasks` of them for each thread."""
    most = tasks * num_threads if num_threads > 1 else 0
    tiles = piece_tiles
    while tiles < n_key_tiles and blocks * -(-n_key_tiles // tiles) > most:
        tiles *= 2
    return tiles, max(1, -(-n_key_tiles // tiles))


def _has_gaps(array: np.ndarray | Rows) -> bool:
    """Whether there are gaps between the elements or the rows of one head."""
    n_cols, itemsize = array.shape[-1], array.itemsize
    return (n_cols > 1 and array.strides[-1] != itemsize) or abs(array.strides[-2]) > n_cols * itemsize


def _up(n: int, step: int) -> int:
    """n rounded up to a multiple of step."""
    return -(-n // step) * step
