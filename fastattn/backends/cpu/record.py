"""The record of a call: all that compiled code reads of it, as words of 8 bytes.

Sizes, strides, options, the schedule, and the offsets of a thread's tiles in its scratch memory: the fields
of `fields`, written here and nowhere else, from a `Problem` and its `Schedule`. The Cython driver reads them
as ``struct Job``. Addresses are 0: for each call the driver fills them into a copy of its own.
"""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING, Any

from fastattn._call.problem import Sizes
from fastattn._call.schedule import WORD, Schedule, Target
from fastattn._call.storage import BFLOAT16, Rows, storage_code
from fastattn._machine.constants import KEY_CHUNK, PAIR_COLUMNS
from fastattn.backends.cpu.fields import (
    EPILOGUES,
    FIELDS,
    GROUP_KEYS,
    IN_PIPELINE,
    OFFSETS,
    REALS,
    SCRATCH,
    TERM,
    VIEWS,
)
from fastattn.biases import Gridded

if TYPE_CHECKING:
    import numpy as np

    from fastattn._call.problem import Problem

#: Where an ndarray holds the address of its elements: first behind the head that every object has. It is part
#: of NumPy's binary interface, on which compiled extensions rely.
_AT_DATA = object.__basicsize__

LINE_NBYTES = 64
GROUP_NBYTES = 3 * 2 * 1024  #: of the fused sweep, see ``kernels/fused.h``

_HEADER = struct.Struct(f"={len(FIELDS) - len(REALS)}q{len(REALS)}d")
_ZEROS = dict.fromkeys(FIELDS, 0)
_ZEROS_OF_VIEW = (0, 0, 0, 0)
#: Fields with the same names in `Sizes` and in `Schedule`.
_OF_SIZES = tuple(name for name in Sizes.__slots__ if name in _ZEROS)
_OF_SCHEDULE = tuple(name for name in Schedule._fields if name in _ZEROS)
_NO_TILES = dict.fromkeys(SCRATCH, 0)
_REAL_EACH_LANE = ("empty", "tile_max", "row_max", "row_sum", "rescale", "lse")
_WORD_EACH_LANE = (
    "rows", "out_rows", "bias_rows", "start", "stop", "kept_start", "kept_stop", "stops", "part_stops",
    "row_i", "row_h",
)  # fmt: skip


def write_record(problem: Problem, schedule: Schedule, target: Target, **larger: int) -> tuple[bytes, bytes]:
    """The record's fields; and the table of views with the leading axes, innermost first.

    `larger`: bytes of the tiles for which the driver needs more than is computed here.
    """
    fields: dict[str, Any] = _ZEROS.copy()
    _set_problem(fields, problem)
    _set_schedule(fields, problem, schedule, target)
    _lay_out(fields, problem, schedule, target, larger)
    n_lead = fields["n_lead"]
    views: list[int] = []
    for strides in _strides(problem, n_lead):
        strides = strides[::-1]
        missing = 3 + n_lead - len(strides)  # of (head, row, column)
        if missing == 2:
            views += (0, 0, strides[0], 0, *strides[1:])
        else:
            views += (*_ZEROS_OF_VIEW[: 1 + missing], *strides)
    views += problem.lead[::-1]
    if fields["n_bias_terms"]:
        for term in problem.bias:
            views += _words_of_term(term, problem)
    return _HEADER.pack(*fields.values()), struct.pack(f"={len(views)}q", *views)


def _strides(problem: Problem, n_lead: int) -> list[tuple[int, ...]]:
    """The strides of each of the `VIEWS`."""
    arrays = problem.arrays()[: len(VIEWS)]
    strides = [(0,) * (3 + n_lead) if array is None else array.strides for array in arrays]
    for name, rows in (("key", problem.key), ("value", problem.value)):
        if isinstance(rows, Rows):
            strides[VIEWS.index(name)] = rows.strides
            strides[VIEWS.index(f"{name}_scale")] = rows.scale_strides
    return strides


def _words_of_term(term: Any, problem: Problem) -> list[int]:
    """A term of a bias as the words of `TERM`."""
    n_lead = problem.query.ndim - 3
    rows, array = term if isinstance(term, Gridded) else (None, term)
    head, row, col = array.strides[n_lead:]
    words = dict.fromkeys(TERM, 0) | {
        "data": address_of(array), "col": col, "row": row, "head": head, "run": array.shape[-1],
        "storage": storage_code(array), "nbytes": array.itemsize, "swapped": not array.dtype.isnative,
        "converts": rows is None and (array.dtype != problem.dtype or col != array.itemsize),
    }  # fmt: skip
    leads = array.strides[:n_lead][::-1]
    if rows is None:
        return [*words.values(), *leads, *(0,) * n_lead]
    head, row, col = rows.strides[n_lead:]
    words |= {"rows_data": address_of(rows), "rows_col": col, "rows_row": row, "rows_head": head}
    return [*words.values(), *leads, *rows.strides[:n_lead][::-1]]


def _set_problem(fields: dict[str, Any], problem: Problem) -> None:
    """Sets sizes, options, and which arrays there are."""
    itemsize = problem.dtype.itemsize
    fields["n_lead"] = problem.query.ndim - 3
    sizes = problem.sizes
    for name in _OF_SIZES:
        fields[name] = getattr(sizes, name)
    fields["itemsize"] = itemsize
    fields["query_storage"] = storage_code(problem.query)
    fields["key_storage"] = storage_code(problem.key)
    fields["value_storage"] = storage_code(problem.value)
    fields["out_storage"] = storage_code(problem.out)
    for name, rows in (("key", problem.key), ("value", problem.value)):
        if isinstance(rows, Rows):
            fields[f"{name}_page_size"] = rows.page_size
    fields["out_nbytes"] = problem.out.itemsize
    if problem.weights is not None:
        fields["weights_storage"] = storage_code(problem.weights)
        fields["weights_nbytes"] = problem.weights.itemsize
    fields["has_lse"] = problem.lse is not None
    fields["has_weights"] = problem.weights is not None
    if problem.bias:
        fields["has_bias"] = True
        if (bias := problem.plain_bias) is None:
            fields["n_bias_terms"] = fields["convert_bias"] = len(problem.bias)
        else:
            fields["bias_nbytes"] = bias.itemsize
            fields["bias_storage"] = storage_code(bias)
            fields["bias_swapped"] = not bias.dtype.isnative
            fields["convert_bias"] = bias.dtype != problem.dtype or bias.strides[-1] != itemsize
    fields["has_score_mod"] = problem.score_mod is not None
    if problem.key_start is not None:
        fields["has_intervals"] = fields["is_masked"] = True
    if problem.dense is not None:
        fields["has_dense"] = fields["is_masked"] = True
        fields["dense_nbytes"] = problem.dense.itemsize
    if problem.mask_map is not None:
        fields["has_mask_map"] = fields["is_masked"] = True
        _, fields["tile_q"], words = problem.mask_map.bits.shape
        fields["tile_k"] = words * WORD
    if problem.band is not None:
        fields["has_band"] = fields["is_masked"] = True
        band = problem.band
        fields["band_left"], fields["band_right"], fields["band_at_end"] = band.left, band.right, band.at_end
        fields["has_lengths"], fields["keep_first"] = band.lengths is not None, band.keep_first
    fields["kept_share"] = 1.0
    if problem.dropout is not None:
        fields["kept_share"] = problem.dropout.kept_share
        fields["drop_threshold"] = problem.dropout.threshold


def _set_schedule(fields: dict[str, Any], problem: Problem, schedule: Schedule, target: Target) -> None:
    """Sets the fields of the schedule."""
    itemsize, lanes = fields["itemsize"], target.lanes
    fields["lanes"] = lanes
    for name in _OF_SCHEDULE:
        fields[name] = getattr(schedule, name)
    stored = {fields["key_storage"], fields["value_storage"]}
    fields["n_parts"] = 1 if stored == {BFLOAT16} else 3
    fields["query_parts"] = 1 if schedule.keeps_query else 3
    fields["weight_parts"] = 1 if schedule.rounds_weights else 3
    fields["pairs_values"] = schedule.uses_pairs and schedule.rounds_weights
    if schedule.uses_split_kv:
        fields["query_ld"] = -(-fields["head_dim"] // lanes) * lanes
        fields["acc_ld"] = acc_ld = -(-fields["value_dim"] // lanes) * lanes
        fields["key_prefetch"], fields["value_prefetch"] = schedule.prefetch_rows
        acc = fields["len_q"] * fields["group_size"] * acc_ld
    elif schedule.uses_fused:
        _set_fused(fields, schedule)
    else:
        fields["panel"] = lines(fields["len_k"] * target.panel_columns * itemsize)
        columns = PAIR_COLUMNS if fields["pairs_values"] else target.panel_columns  # whole register tiles
        acc = -(-fields["value_dim"] // columns) * columns * schedule.max_lanes
    if schedule.piece_tiles:
        n_key_tiles = -(-fields["len_k"] // schedule.block_k)
        fields["n_pieces"] = n_pieces = -(-n_key_tiles // schedule.piece_tiles)
        fields["n_partials"] = 2 + max(0, n_pieces - 1).bit_length()  # the stack's depth, and the sinks
        fields["partial_nbytes"] = 2 * lines(schedule.max_lanes * itemsize) + lines(acc * itemsize)
    for epilogue in EPILOGUES.values():
        if fields[epilogue.field] != epilogue.without:
            fields["adjusts_all"] |= epilogue.adjusts_all
            fields["may_mask"] |= epilogue.may_mask


def _set_fused(fields: dict[str, Any], schedule: Schedule) -> None:
    """Sets the fields of the fused sweep."""
    key_groups, value_groups = (-(-fields[name] // GROUP_KEYS) for name in ("head_dim", "value_dim"))
    fields["tile_groups"] = -(-min(fields["len_k"], schedule.block_k) // GROUP_KEYS)
    group_nbytes = GROUP_NBYTES // 3 * fields["n_parts"]
    fields["tile_nbytes"] = fields["tile_groups"] * (key_groups + value_groups) * group_nbytes
    fields["acc_nbytes"] = value_groups * GROUP_KEYS * schedule.max_lanes * fields["itemsize"]


def _fused_tiles(fields: dict[str, Any], schedule: Schedule) -> dict[str, int]:
    """Sizes of a thread's tiles in the fused sweep, where they differ from those of the sweep."""
    blocks, heads, lanes = schedule.task_blocks, schedule.task_heads, schedule.max_lanes
    itemsize, head_dim, value_dim = fields["itemsize"], fields["head_dim"], fields["value_dim"]
    tile_groups = schedule.block_k // GROUP_KEYS
    # A tile of keys, a group of values or, of weights in 16 bits, the rows of a block.
    staged = max(schedule.block_k * head_dim, GROUP_KEYS * value_dim)
    if fields["weights_storage"]:
        staged = max(staged, schedule.block_k * lanes)
    each_lane = ("start", "stop", "kept_start", "kept_stop", "row_i", "row_h")
    return dict.fromkeys(each_lane, 8 * lanes * blocks) | {
        "row_max": lanes * itemsize * blocks,
        "row_sum": lanes * itemsize * blocks,
        "acc": fields["acc_nbytes"] * blocks,
        "staged": staged * itemsize,
        "staged_rows": 8 * lanes,
        "query_groups": blocks * -(-head_dim // GROUP_KEYS) * GROUP_NBYTES,
        "weight_groups": 2 * tile_groups * GROUP_NBYTES,
        "key_groups": heads * IN_PIPELINE * fields["tile_nbytes"],
        "score_tiles": 2 * schedule.block_k * lanes * itemsize,
        "other_scores": schedule.block_k * lanes * itemsize,
        "kept_words": IN_PIPELINE * tile_groups * lanes * 4,
    }


def _lay_out(
    fields: dict[str, Any], problem: Problem, schedule: Schedule, target: Target, larger: dict[str, int]
) -> None:
    """Sets the offsets of a thread's tiles in its scratch memory, each aligned to a cache line."""
    itemsize, block_k, ld = fields["itemsize"], schedule.block_k, schedule.max_lanes
    head_dim, value_dim = fields["head_dim"], fields["value_dim"]
    line, pointers, tile = ld * itemsize, 8 * ld, block_k * itemsize
    panels = -(-value_dim // target.panel_columns)
    acc = fields["n_partials"] * fields["partial_nbytes"]
    key_copy = value_copy = 0
    if schedule.uses_split_kv:
        query = fields["query_ld"] * line
        # Row tiles need contiguous elements.
        if schedule.converts_keys:
            key_copy = tile * head_dim
        if schedule.converts_values or fields["value_storage"] or fields["value_page_size"]:
            value_copy = tile * value_dim
    else:
        query = head_dim * line
        copied_keys = fields["len_k"] if schedule.copies_keys else block_k * schedule.converts_keys
        key_copy = copied_keys * head_dim * (problem.key.itemsize if schedule.uses_pairs else itemsize)
        if fields["pairs_values"]:
            value_copy = _pairs_nbytes(fields["len_k"] if schedule.packs_values else block_k, value_dim)
        elif schedule.packs_values:
            value_copy = panels * fields["panel"]
        elif schedule.packs_chunks:
            value_copy = panels * target.panel_columns * KEY_CHUNK * itemsize
        elif fields["value_storage"] or fields["value_page_size"]:
            value_copy = tile * value_dim
    # Rows of query, out or weights on their way from or to 16 bits, and a tile of values to be packed.
    staged = 0
    if fields["query_storage"]:
        staged = head_dim
    if fields["out_storage"]:
        staged = max(staged, value_dim)
    if fields["weights_storage"]:
        staged = max(staged, block_k)
    staged *= line
    if fields["value_storage"] and fields["packs_values"]:
        staged = max(staged, tile * value_dim)
    mask_words = block_k // WORD * ld * 4
    converted = block_k * (line + itemsize) if fields["convert_bias"] else 0  # the bias, and a row of a term
    nbytes = _NO_TILES | dict.fromkeys(_REAL_EACH_LANE, line) | dict.fromkeys(_WORD_EACH_LANE, pointers)
    nbytes |= {
        "query": query, "scores": block_k * line, "acc": acc, "inverse": 2 * line, "words": mask_words,
        "prefetch": 2 * pointers + 8 * block_k, "converted": converted,
        "clean": tile * value_dim if fields["is_masked"] or fields["may_mask"] else 0, "key_copy": key_copy,
        "value_copy": value_copy, "staged": staged, "staged_rows": pointers if staged else 0,
    }  # fmt: skip
    if fields["drop_threshold"]:
        nbytes |= {"drop_words": mask_words, "drop_rows": pointers}
    if schedule.uses_fused:
        nbytes |= _fused_tiles(fields, schedule)
    if schedule.uses_pairs:
        nbytes |= {"query_pairs": query // 2, "other_scores": block_k * line, "other_max": line}
        nbytes["staged"] = max(staged, tile * max(head_dim, value_dim))
        if nbytes["clean"]:
            nbytes["clean"] = max(nbytes["clean"], _pairs_nbytes(block_k, value_dim))
    nbytes |= larger
    at = 0
    for to, n in zip(OFFSETS, nbytes.values(), strict=True):
        fields[to] = at
        at += n + 63 & -64  # whole cache lines
    fields["scratch_nbytes"] = at


def _pairs_nbytes(n_keys: int, value_dim: int) -> int:
    """Bytes of values as pairs of bfloat16, see ``kernels/pairs.h``."""
    return (n_keys + 1) // 2 * -(-value_dim // PAIR_COLUMNS) * PAIR_COLUMNS * 4


def address_of(array: np.ndarray) -> int:
    """Where the elements begin: ``array.ctypes.data`` in a fifth of its time."""
    return ctypes.c_size_t.from_address(id(array) + _AT_DATA).value


def lines(nbytes: int) -> int:
    """Bytes, or an address, rounded up to a multiple of a cache line."""
    return -(-nbytes // LINE_NBYTES) * LINE_NBYTES
