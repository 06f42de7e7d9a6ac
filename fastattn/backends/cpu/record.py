"""The record of a call: all that compiled code reads of it, as words of 8 bytes.

Sizes, strides, options, the schedule, and the offsets of a thread's tiles in its scratch memory. It is
written here and nowhere else, from a `Problem` and its `Schedule`; the Cython driver reads it as
``struct Job`` of ``cython/record.pxi``, and a test compares the two. Addresses are 0: for each call the
driver fills them into a copy of its own.
"""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING, Any

from fastattn._schedule import WORD, Schedule, Target
from fastattn._storage import BFLOAT16, Rows, storage_code

if TYPE_CHECKING:
    import numpy as np

    from fastattn._problem import Problem

#: Where an ndarray holds the address of its elements: first behind the head that every object has. It is part
#: of NumPy's binary interface, on which compiled extensions rely.
_AT_DATA = object.__basicsize__

LINE_NBYTES = 64
GROUP = 32  #: rows and columns of a group of the fused sweep, see ``kernels/fused.h``
GROUP_NBYTES = 3 * 2 * 1024
IN_PIPELINE = 3  #: units of the fused sweep that are worked on at once
MAX_PARTIALS = 64  #: size of the stack of split-KV: deeper than the tree over any number of keys

#: The arrays of a call, each a row of the table of views: the address, the strides of column, row and head,
#: and those of the leading axes, innermost first.
VIEWS = (
    "query", "key", "value", "out", "lse", "weights", "bias", "dense", "key_start", "key_stop", "mask_index",
    "key_lengths", "key_scale", "value_scale", "key_table", "value_table", "key_scale_table",
    "value_scale_table",
)  # fmt: skip
ADDRESS, COL, ROW, HEAD, LEAD = range(5)

#: Tiles of a thread, each aligned to a cache line of its scratch memory.
SCRATCH = (
    "query", "scores", "acc", "empty", "tile_max", "row_max", "row_sum", "rescale", "inverse", "lse", "words",
    "rows", "out_rows", "bias_rows", "prefetch", "start", "stop", "kept_start", "kept_stop", "stops",
    "part_stops", "row_i", "row_h",
    "converted", "clean", "key_copy", "value_copy", "staged", "staged_rows", "drop_words",
    "drop_rows",
    "query_groups", "weight_groups", "key_groups", "score_tiles", "other_scores", "kept_words",  # fused sweep
    "query_pairs", "other_max",  # pairs; "other_scores", too
)  # fmt: skip

#: The mark that a score_mod leaves in the place of a score for which it read out of bounds, by itemsize: a
#: NaN of these bits, and below them one for each array, see `fastattn.backends.jit.loops`. No arithmetic
#: makes such a NaN, and the addition of a bias keeps it.
MARKS = {4: 0x7FE00000, 8: 0x7FFC000000000000}
MARK_BITS = 21

COUNTS = (
    "kernels",  # address of the driver's table of kernels
    "n_lead", "batch", "num_kv_heads", "group_size", "len_q", "len_k", "head_dim", "value_dim", "itemsize",
    "sinks", "mask_bits", "score_mod", "aux",  # addresses; the last two: a loop and what it reads, see `jit`
    "read_outside",  # set by a thread to the bits of a mark, unless the score is masked
    "outside_at",  # 1 + the place of that score among B, H, L and S, the least of those seen
    "has_lse", "has_weights", "has_bias", "has_dense", "has_intervals", "has_mask_map", "has_band",
    "has_score_mod",
    "is_masked",  # by a band, intervals, an array or a mask map
    "may_mask",  # by bias or score_mod: keys may be masked without a mask word
    "adjusts_all",  # by factor, soft-cap, score_mod or bias: a pass over all scores, masked or not
    "band_left", "band_right", "band_at_end", "has_lengths", "keep_first",  # see `Band`
    "drop_key_low", "drop_key_high", "drop_threshold",  # see `Dropout`; threshold 0: none
    "query_storage", "key_storage", "value_storage", "out_storage", "weights_storage", "bias_storage",
    "key_page_size", "value_page_size",  # keys of a page; 0 where they are not in pages
    "out_nbytes", "weights_nbytes", "bias_nbytes", "dense_nbytes",  # of an element
    "bias_swapped", "convert_bias",
    "tile_q", "tile_k",  # of the mask map
    "lanes", "uses_split_kv", "block_k", "n_vectors", "n_blocks", "max_lanes", "n_tasks",
    "query_ld", "acc_ld",  # row tiles: elements from one row to the next
    "copies_keys", "packs_values", "converts_keys", "converts_values",
    "panel",  # bytes of a panel of packed values
    "key_prefetch", "value_prefetch",  # split-KV: prefetch distance in keys, or 0
    "split_tiles", "n_splits", "n_key_tiles", "n_partials", "partial_nbytes",
    # Fused sweep: groups of keys in a key tile, bytes of its groups of keys and values, and bytes of a query
    # block's accumulators.
    "uses_pairs", "uses_fused",
    "scores_on_tiles",  # gradients: scores of the fused kernels
    "n_parts",  # bfloat16 numbers that a key or value is the sum of: 3, or 1 where it is one
    "query_parts",  # likewise; 1 only where n_parts is
    "tile_groups", "tile_nbytes", "acc_nbytes",
    "partials", "left",  # addresses: each task's partial result, and the count of unfinished tasks per head
    "failed",  # no thread could allocate its scratch memory
    "scratch_nbytes",
)  # fmt: skip
REALS = (
    "query_factor", "score_root", "softcap", "exponent_factor",  # see `Schedule`
    "kept_share",  # of `Dropout`; 1 without
)  # fmt: skip

#: Every field, in order; the table of views follows, and the leading axes.
FIELDS = (*COUNTS, *(f"to_{name}" for name in SCRATCH), *REALS)
_HEADER = struct.Struct(f"={len(FIELDS) - len(REALS)}q{len(REALS)}d")
_ZEROS = dict.fromkeys(FIELDS, 0)
_TO = tuple(f"to_{name}" for name in SCRATCH)
_ZEROS_OF_VIEW = (0, 0, 0, 0)


def write_record(problem: Problem, schedule: Schedule, target: Target, **larger: int) -> tuple[bytes, bytes]:
    """The record's fields; and the table of views with the leading axes, innermost first.

    `larger`: sizes in bytes of tiles that are larger in the driver than computed here.
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


def _set_problem(fields: dict[str, Any], problem: Problem) -> None:
    """Sets sizes, options, and which arrays there are."""
    sizes = problem.sizes
    itemsize = problem.dtype.itemsize
    fields["n_lead"] = problem.query.ndim - 3
    fields["batch"] = sizes.batch
    fields["num_kv_heads"] = sizes.num_kv_heads
    fields["group_size"] = sizes.group_size
    fields["len_q"] = sizes.len_q
    fields["len_k"] = sizes.len_k
    fields["head_dim"] = sizes.head_dim
    fields["value_dim"] = sizes.value_dim
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
    if (bias := problem.bias) is not None:
        fields["has_bias"] = fields["may_mask"] = fields["adjusts_all"] = True
        fields["bias_nbytes"] = bias.itemsize
        fields["bias_storage"] = storage_code(bias)
        fields["bias_swapped"] = not bias.dtype.isnative
        fields["convert_bias"] = bias.dtype != problem.dtype or bias.strides[-1] != itemsize
    if problem.score_mod is not None:
        fields["has_score_mod"] = fields["may_mask"] = fields["adjusts_all"] = True
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
        seed = problem.dropout.seed.to_bytes(16, "little")
        fields["drop_key_low"], fields["drop_key_high"] = struct.unpack("<2q", seed)


def _set_schedule(fields: dict[str, Any], problem: Problem, schedule: Schedule, target: Target) -> None:
    """Sets the fields of the schedule."""
    itemsize, lanes = fields["itemsize"], target.lanes
    fields["lanes"] = lanes
    fields["uses_split_kv"] = schedule.uses_split_kv
    fields["block_k"] = schedule.block_k
    fields["n_vectors"] = schedule.n_vectors
    fields["n_blocks"] = schedule.n_blocks
    fields["max_lanes"] = schedule.max_lanes
    fields["n_tasks"] = schedule.n_tasks
    fields["n_splits"] = schedule.n_splits
    fields["converts_keys"] = schedule.converts_keys
    fields["converts_values"] = schedule.converts_values
    fields["split_tiles"] = schedule.split_tiles
    fields["uses_pairs"] = schedule.uses_pairs
    fields["scores_on_tiles"] = schedule.scores_on_tiles
    stored = {fields["key_storage"], fields["value_storage"]}
    fields["n_parts"] = 1 if stored == {BFLOAT16} else 3
    fields["query_parts"] = 1 if schedule.keeps_query else 3
    if schedule.uses_split_kv:
        n_key_tiles = -(-fields["len_k"] // schedule.block_k)
        fields["n_key_tiles"] = n_key_tiles
        fields["query_ld"] = -(-fields["head_dim"] // lanes) * lanes
        fields["acc_ld"] = acc_ld = -(-fields["value_dim"] // lanes) * lanes
        fields["key_prefetch"], fields["value_prefetch"] = schedule.prefetch_rows
        fields["n_partials"] = 2 + max(0, n_key_tiles - 1).bit_length()  # the stack's depth, and the sinks
        rows = fields["len_q"] * fields["group_size"]
        fields["partial_nbytes"] = 2 * lines(schedule.max_lanes * itemsize) + lines(rows * acc_ld * itemsize)
    elif schedule.uses_fused:
        _set_fused(fields, schedule)
    else:
        fields["copies_keys"] = schedule.copies_keys
        fields["packs_values"] = schedule.packs_values
        fields["panel"] = lines(fields["len_k"] * target.panel_columns * itemsize)
    fields["query_factor"] = schedule.query_factor
    fields["score_root"] = schedule.score_root
    fields["softcap"] = schedule.softcap
    fields["exponent_factor"] = schedule.exponent_factor
    if schedule.softcap or schedule.score_root != 1:
        fields["adjusts_all"] = True


def _set_fused(fields: dict[str, Any], schedule: Schedule) -> None:
    """Sets the fields of the fused sweep."""
    key_groups, value_groups = (-(-fields[name] // GROUP) for name in ("head_dim", "value_dim"))
    fields["uses_fused"] = True
    fields["tile_groups"] = -(-min(fields["len_k"], schedule.block_k) // GROUP)
    group_nbytes = GROUP_NBYTES // 3 * fields["n_parts"]
    fields["tile_nbytes"] = fields["tile_groups"] * (key_groups + value_groups) * group_nbytes
    fields["acc_nbytes"] = value_groups * GROUP * schedule.max_lanes * fields["itemsize"]


def _fused_tiles(fields: dict[str, Any], schedule: Schedule) -> dict[str, int]:
    """Sizes of a thread's tiles in the fused sweep, where they differ from those of the sweep."""
    blocks, heads, lanes = schedule.task_blocks, schedule.task_heads, schedule.max_lanes
    itemsize, head_dim, value_dim = fields["itemsize"], fields["head_dim"], fields["value_dim"]
    tile_groups = schedule.block_k // GROUP
    # A tile of keys, a group of values or, of weights in 16 bits, the rows of a block.
    staged = max(schedule.block_k * head_dim, GROUP * value_dim)
    if fields["weights_storage"]:
        staged = max(staged, schedule.block_k * lanes)
    each_lane = ("start", "stop", "kept_start", "kept_stop", "row_i", "row_h")
    return dict.fromkeys(each_lane, 8 * lanes * blocks) | {
        "row_max": lanes * itemsize * blocks,
        "row_sum": lanes * itemsize * blocks,
        "acc": fields["acc_nbytes"] * blocks,
        "staged": staged * itemsize,
        "staged_rows": 8 * lanes,
        "query_groups": blocks * -(-head_dim // GROUP) * GROUP_NBYTES,
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
    key_copy = value_copy = 0
    if schedule.uses_split_kv:
        query, acc = fields["query_ld"] * line, fields["n_partials"] * fields["partial_nbytes"]
        # Row tiles need contiguous elements.
        if schedule.converts_keys:
            key_copy = tile * head_dim
        if schedule.converts_values or fields["value_storage"] or fields["value_page_size"]:
            value_copy = tile * value_dim
    else:
        query, acc = head_dim * line, panels * target.panel_columns * line
        copied_keys = fields["len_k"] if schedule.copies_keys else block_k * schedule.converts_keys
        key_copy = copied_keys * head_dim * (problem.key.itemsize if schedule.uses_pairs else itemsize)
        if schedule.packs_values:
            value_copy = panels * fields["panel"]
        elif schedule.converts_values or fields["value_page_size"]:
            value_copy = tile * value_dim
    converted = block_k * line if fields["convert_bias"] else 0
    clean = tile * value_dim if fields["is_masked"] or fields["may_mask"] else 0
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
    nbytes: Any = (
        query, block_k * line, acc, line, line, line, line, line, 2 * line, line, mask_words,
        pointers, pointers, pointers, 2 * pointers + 8 * block_k, pointers, pointers, pointers, pointers,
        pointers, pointers, pointers, pointers, converted, clean, key_copy, value_copy, staged,
        pointers if staged else 0, *((mask_words, pointers) if fields["drop_threshold"] else (0, 0)),
    )  # fmt: skip
    nbytes += (0,) * (len(SCRATCH) - len(nbytes))
    if schedule.uses_fused:
        larger = _fused_tiles(fields, schedule) | larger
    if schedule.uses_pairs:
        other = {"query_pairs": query // 2, "other_scores": block_k * line, "other_max": line}
        larger = other | {"staged": max(staged, tile * head_dim)} | larger
    if larger:
        nbytes = (dict(zip(SCRATCH, nbytes, strict=True)) | larger).values()
    at = 0
    for to, n in zip(_TO, nbytes, strict=False):
        fields[to] = at
        at += n + 63 & -64  # whole cache lines
    fields["scratch_nbytes"] = at


def address_of(array: np.ndarray) -> int:
    """Where the elements begin: ``array.ctypes.data`` in a fifth of its time."""
    return ctypes.c_size_t.from_address(id(array) + _AT_DATA).value


def lines(nbytes: int) -> int:
    """Bytes, or an address, rounded up to a multiple of a cache line."""
    return -(-nbytes // LINE_NBYTES) * LINE_NBYTES
