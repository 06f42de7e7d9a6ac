"""The record of a call: all that compiled code reads of it, as words of 8 bytes.

Sizes, strides, options, the schedule, and where the tiles of a thread lie in its scratch memory. It is written
here and nowhere else, from a `Problem` and its `Schedule`; the Cython driver reads it as ``struct Job`` of
``cython/record.pxi``, the Numba driver by the names of `FIELDS`, and a test holds the two against each other.
Addresses are 0: a driver fills them into its own copy, one for each call.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._schedule import WORD, Schedule, Target

if TYPE_CHECKING:
    from fastattn._problem import Problem

LINE_NBYTES = 64
MAX_PARTIALS = 64  #: of the stack of split-KV: deeper than the tree over any number of keys

#: The arrays of a call, each a row of the table of views: the address, and the strides of head, row and column.
VIEWS = (
    "query", "key", "value", "out", "lse", "weights", "bias", "dense", "key_start", "key_stop", "mask_index",
    "key_lengths",
)  # fmt: skip
ADDRESS, HEAD, ROW, COL = range(4)

#: Tiles of a thread, each from a line of its scratch memory on.
SCRATCH = (
    "query", "scores", "acc", "empty", "tile_max", "row_max", "row_sum", "rescale", "inverse", "lse", "words",
    "rows", "out_rows", "bias_rows", "prefetch", "start", "stop", "stops", "part_stops", "row_i", "row_h",
    "converted", "key_copy", "value_copy",
)  # fmt: skip

COUNTS = (
    "kernels",  # address of the driver's table of kernels
    "n_lead", "batch", "num_kv_heads", "group_size", "len_q", "len_k", "head_dim", "value_dim", "itemsize",
    "sinks", "mask_bits", "score_mod", "aux",  # addresses
    "has_lse", "has_weights", "has_bias", "has_dense", "has_intervals", "has_mask_map", "has_band",
    "has_score_mod",
    "is_masked",  # by a band, intervals, an array or a mask map
    "may_mask",  # bias or score_mod: a key may be masked where no word says so
    "adjusts_all",  # by soft-cap, score_mod or bias: every score is touched once more, masked or not
    "band_left", "band_right", "band_at_end", "has_lengths",  # see `Band`
    "bias_nbytes", "bias_swapped", "convert_bias", "dense_nbytes",  # of an element
    "tile_q", "tile_k",  # of the mask map
    "lanes", "uses_split_kv", "block_k", "n_vectors", "n_blocks", "max_lanes", "n_tasks",
    "query_ld", "acc_ld",  # row tiles: elements from one row to the next
    "copies_keys", "packs_values", "panel",  # bytes of a panel of packed values
    "key_prefetch", "value_prefetch",  # split-KV: prefetch distance in bytes, or 0
    "split_tiles", "n_splits", "n_key_tiles", "n_partials", "partial_nbytes",
    "partials", "left",  # addresses: the partial result of each task, and tasks of each head that are not done
    "failed",  # set by a thread that could not have its memory
    "scratch_nbytes",
)  # fmt: skip
REALS = ("query_factor", "softcap", "exponent_factor")  #: see `Schedule`

#: Every field, in order; the table of views follows, then `n_lead` strides of each view, and the leading axes.
FIELDS = (*COUNTS, *(f"to_{name}" for name in SCRATCH), *REALS)
_HEADER = struct.Struct(f"={len(FIELDS) - len(REALS)}q{len(REALS)}d")


def write_record(problem: Problem, schedule: Schedule, target: Target, **own: int) -> tuple[bytes, bytes]:
    """The record's fields, and what follows them: the table of views, their leading strides, the leading axes.

    `own` are bytes of tiles of which the driver needs more than is said here.
    """
    fields = _fields(problem, schedule, target)
    _lay_out(fields, problem, schedule, target, own)
    views, leads = [], []
    lead = problem.lead
    for array in arrays_of(problem)[: len(VIEWS)]:
        if array is None:
            views += [0, 0, 0, 0]
            leads += [0] * len(lead)
        else:
            strides = array.strides
            # (*lead, head, row, column); the column, then the head, is what arrays with fewer axes lack.
            inner = strides[len(lead) :]
            head, row, col = (
                inner
                if len(inner) == 3
                else (*inner, 0)
                if len(inner) == 2
                else (0, *inner, 0)
                if inner
                else (0, 0, 0)
            )
            views += [0, head, row, col]
            leads += strides[: len(lead)]
    tail = [*views, *leads, *lead]
    return _HEADER.pack(*fields.values()), struct.pack(f"={len(tail)}q", *tail)


def arrays_of(problem: Problem) -> tuple[np.ndarray | None, ...]:
    """The arrays in the order of `VIEWS`, then the sinks and the bits of the mask map."""
    mask_map, band = problem.mask_map, problem.band
    return (
        problem.query, problem.key, problem.value, problem.out, problem.lse, problem.weights, problem.bias,
        problem.dense, problem.key_start, problem.key_stop, None if mask_map is None else mask_map.index,
        None if band is None else band.lengths, problem.sinks, None if mask_map is None else mask_map.bits,
    )  # fmt: skip


def _fields(problem: Problem, schedule: Schedule, target: Target) -> dict[str, Any]:
    itemsize = problem.query.itemsize
    fields: dict[str, Any] = dict.fromkeys(FIELDS, 0)
    fields["n_lead"] = len(problem.lead)
    fields["batch"] = problem.batch
    fields["num_kv_heads"] = problem.num_kv_heads
    fields["group_size"] = problem.group_size
    fields["len_q"] = problem.len_q
    fields["len_k"] = problem.len_k
    fields["head_dim"] = head_dim = problem.head_dim
    fields["value_dim"] = value_dim = problem.value_dim
    fields["itemsize"] = itemsize
    fields["has_lse"] = problem.lse is not None
    fields["has_weights"] = problem.weights is not None
    fields["has_intervals"] = problem.key_start is not None
    if problem.bias is not None:
        bias = problem.bias
        fields["has_bias"] = True
        fields["bias_nbytes"] = bias.itemsize
        fields["bias_swapped"] = not bias.dtype.isnative
        fields["convert_bias"] = bias.dtype != problem.query.dtype or bias.strides[-1] != itemsize
    if problem.dense is not None:
        fields["has_dense"] = True
        fields["dense_nbytes"] = problem.dense.itemsize
    if problem.mask_map is not None:
        fields["has_mask_map"] = True
        _, fields["tile_q"], words = problem.mask_map.bits.shape
        fields["tile_k"] = words * WORD
    if problem.band is not None:
        fields["has_band"] = True
        fields["band_left"], fields["band_right"], fields["band_at_end"], lengths = problem.band
        fields["has_lengths"] = lengths is not None
    fields["has_score_mod"] = problem.score_mod is not None
    fields["may_mask"] = problem.bias is not None or problem.score_mod is not None
    fields["adjusts_all"] = fields["may_mask"] or problem.softcap is not None
    fields["is_masked"] = (
        fields["has_intervals"] or fields["has_dense"] or fields["has_mask_map"] or fields["has_band"]
    )

    fields["lanes"] = lanes = target.lanes
    fields["uses_split_kv"] = schedule.uses_split_kv
    fields["block_k"] = schedule.block_k
    fields["n_vectors"] = schedule.n_vectors
    fields["n_blocks"] = schedule.n_blocks
    fields["max_lanes"] = schedule.max_lanes
    fields["n_tasks"] = schedule.n_tasks
    fields["copies_keys"] = schedule.copies_keys
    fields["packs_values"] = schedule.packs_values
    fields["panel"] = _lines(problem.len_k * target.panel_columns * itemsize)
    fields["n_splits"] = schedule.n_splits
    fields["split_tiles"] = schedule.split_tiles
    if schedule.uses_split_kv:
        n_rows = problem.len_q * problem.group_size
        n_key_tiles = -(-problem.len_k // schedule.block_k)
        fields["query_ld"] = -(-head_dim // lanes) * lanes
        fields["acc_ld"] = acc_ld = -(-value_dim // lanes) * lanes
        fields["key_prefetch"] = schedule.prefetch_rows[0] * problem.key.strides[-2]
        fields["value_prefetch"] = schedule.prefetch_rows[1] * problem.value.strides[-2]
        fields["n_key_tiles"] = n_key_tiles
        fields["n_partials"] = (
            2 + max(0, n_key_tiles - 1).bit_length()
        )  # the depth of the stack, and the sinks
        fields["partial_nbytes"] = 2 * _lines(schedule.max_lanes * itemsize) + _lines(
            n_rows * acc_ld * itemsize
        )
    fields["query_factor"] = schedule.query_factor
    fields["softcap"] = schedule.softcap
    fields["exponent_factor"] = schedule.exponent_factor
    return fields


def _lay_out(
    fields: dict[str, Any], problem: Problem, schedule: Schedule, target: Target, own: dict[str, int]
) -> None:
    """Places a thread's tiles in its scratch memory, each from a line of memory on."""
    itemsize, block_k, ld = problem.query.itemsize, schedule.block_k, schedule.max_lanes
    head_dim, value_dim, len_k = problem.head_dim, problem.value_dim, problem.len_k
    line, pointers = ld * itemsize, 8 * ld
    nbytes = dict.fromkeys(SCRATCH, line)
    for name in ("rows", "out_rows", "bias_rows", "start", "stop", "stops", "part_stops", "row_i", "row_h"):
        nbytes[name] = pointers
    columns = -(-value_dim // target.panel_columns) * target.panel_columns
    nbytes["query"] = (fields["query_ld"] if schedule.uses_split_kv else head_dim) * line
    nbytes["scores"] = block_k * line
    nbytes["acc"] = (
        fields["n_partials"] * fields["partial_nbytes"] if schedule.uses_split_kv else columns * line
    )
    nbytes["inverse"] = 2 * line
    nbytes["words"] = block_k // WORD * ld * 4
    nbytes["prefetch"] = 2 * pointers + 8 * block_k
    nbytes["converted"] = block_k * line if fields["convert_bias"] else 0
    # A copy of the whole head, or of one tile where row tiles need elements without gaps.
    tile = block_k * itemsize if schedule.uses_split_kv else 0
    nbytes["key_copy"] = tile * head_dim if problem.key.strides[-1] != itemsize else 0
    nbytes["value_copy"] = tile * value_dim if problem.value.strides[-1] != itemsize else 0
    if schedule.copies_keys:
        nbytes["key_copy"] = len_k * head_dim * itemsize
    if schedule.packs_values:
        nbytes["value_copy"] = columns // target.panel_columns * fields["panel"]
    nbytes.update(own)
    at = 0
    for name in SCRATCH:
        fields[f"to_{name}"] = at
        at += _lines(nbytes[name])
    fields["scratch_nbytes"] = at


def _lines(nbytes: int) -> int:
    """Bytes, or an address, rounded up to whole lines of memory."""
    return -(-nbytes // LINE_NBYTES) * LINE_NBYTES
