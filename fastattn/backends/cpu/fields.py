"""The record of a call, as tables: the fields, the arrays and the tiles that compiled code and Python share.

`record` fills in the fields, and the Numba driver reads them by name. ``cython/declarations.py`` declares
them to Cython when the package is built. A new field or tile is one more line here, besides where it is
computed and where it is used. This file imports nothing of the package: a build runs it on its own.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_PARTIALS = 64  #: size of a stack of partial results: deeper than the tree over any number of keys
GROUP_KEYS = 32  #: rows and columns of a group of the fused sweep, see ``kernels/fused.h``
IN_PIPELINE = 3  #: units of the fused sweep that are worked on at once

#: The mark that a score_mod leaves in the place of a score for which it read out of bounds, a NaN of
#: these bits. The MARK_BITS lowest bits say which arrays, see `fastattn.backends.jit.loops`. No arithmetic
#: makes such a NaN, and the addition of a bias keeps it.
MARK_FLOAT32 = 0x7FE00000
MARK_FLOAT64 = 0x7FFC000000000000
MARK_BITS = 21
MARKS = {4: MARK_FLOAT32, 8: MARK_FLOAT64}  #: by itemsize

#: What the gradients of scores are added up to for that of a bias, see `fastattn.biases.Sums`: each itself,
#: or those of one key, of one row and column of a grid of keys, or of one diagonal. A bias for each query is
#: a grid of one row and no column. Sums over heads and items are made later, but of BIAS_OF_SCORES.
BIAS_OF_SCORES, BIAS_OF_KEYS, BIAS_OF_GRID, BIAS_OF_DIAGONALS = range(4)


class Epilogue(NamedTuple):
    """A step on a tile of scores between the two products."""

    field: str  #: of the record
    without: int = 0  #: the value of the field in calls without this epilogue
    adjusts_all: bool = False  #: it changes all scores, not only those with a mask word
    may_mask: bool = False  #: it may mask keys that no mask masks


#: In this order, on every path and backend; dropout is of the weights, after the softmax.
EPILOGUES = {
    "scale": Epilogue("score_root", without=1, adjusts_all=True),
    "softcap": Epilogue("softcap", adjusts_all=True),
    "score_mod": Epilogue("has_score_mod", adjusts_all=True, may_mask=True),
    "bias": Epilogue("has_bias", adjusts_all=True, may_mask=True),
    "mask": Epilogue("is_masked"),
    "dropout": Epilogue("drop_threshold"),
}

#: The words of the record: whole numbers, then the offset of each tile of `SCRATCH` in a thread's scratch
#: memory, then `REALS`.
COUNTS = (
    "kernels",  # address of the driver's table of kernels
    "n_lead", "batch", "num_kv_heads", "group_size", "len_q", "len_k", "head_dim", "value_dim", "itemsize",
    "sinks", "mask_bits", "drop_key",  # addresses
    "score_mod", "aux",  # addresses of a loop and of what it reads, see `jit`
    "read_outside",  # set by a thread to the bits of a mark, unless the score is masked
    "outside_at",  # 1 + the place of that score among B, H, L and S, the least of those seen
    "has_lse", "has_weights", "has_bias", "has_dense", "has_intervals", "has_mask_map", "has_band",
    "has_score_mod",
    "is_masked",  # by a band, intervals, an array or a mask map
    "may_mask",  # by one of the `EPILOGUES`: keys may be masked without a mask word
    "adjusts_all",  # by one of them: a pass over all scores, masked or not
    "band_left", "band_right", "band_at_end", "has_lengths", "keep_first",  # see `Band`
    "drop_threshold",  # see `Dropout`; 0: none
    "query_storage", "key_storage", "value_storage", "out_storage", "weights_storage", "bias_storage",
    "key_page_size", "value_page_size",  # keys of a page; 0 where they are not in pages
    "out_nbytes", "weights_nbytes", "bias_nbytes", "dense_nbytes",  # of an element
    "bias_swapped", "convert_bias",
    "n_bias_terms",  # of a bias that is a sum, see `TERM`; else 0
    "tile_q", "tile_k",  # of the mask map
    "lanes", "uses_split_kv", "block_k", "n_vectors", "n_blocks", "max_lanes", "n_tasks",
    "is_short",
    "query_ld", "acc_ld",  # row tiles: elements from one row to the next
    "copies_keys", "packs_values", "packs_chunks", "converts_keys", "converts_values", "reads_values",
    "panel",  # bytes of a panel of packed values
    "key_prefetch", "value_prefetch",  # split-KV: prefetch distance in keys, or 0
    "piece_tiles", "split_tiles", "n_splits",  # see `Schedule`
    "n_pieces",  # of the keys of a head, each of which has a partial result
    "n_partials", "partial_nbytes",  # of a thread, and the bytes of each
    # Fused sweep: groups of keys in a key tile, bytes of its groups of keys and values, and bytes of a query
    # block's accumulators.
    "uses_pairs", "uses_fused",
    "pairs_values",  # the sweep's weights are rounded, and its products with values are of pairs, too
    "scores_on_tiles",  # gradients: scores of the fused kernels
    "n_parts",  # bfloat16 numbers that a key or value is the sum of: 3, or 1 where it is one
    "query_parts",  # likewise; 1 only where n_parts is
    "weight_parts",  # of a weight: 3, or 1 where it is rounded, and n_parts and query_parts are 1
    "tile_groups", "tile_nbytes", "acc_nbytes",
    "partials", "left",  # addresses: each task's partial result, and the unfinished tasks of each query block
    "scratch_nbytes",
)  # fmt: skip
REALS = (
    "query_factor", "score_root", "softcap", "exponent_factor",  # see `Schedule`
    "kept_share",  # of `Dropout`; 1 without
)  # fmt: skip

#: The arrays of a call, each a row of the table of views: the address, the strides of column, row and head,
#: and those of the leading axes, innermost first.
VIEWS = (
    "query", "key", "value", "out", "lse", "weights", "bias", "dense", "key_start", "key_stop", "mask_index",
    "key_lengths", "key_scale", "value_scale", "key_table", "value_table", "key_scale_table",
    "value_scale_table",
)  # fmt: skip

#: Of a bias that is a sum each term has these words, behind the lengths of the leading axes: an array, and of
#: a grid the rows that are added to it. `run` is the keys of a row, which are as many as the array's columns.
#: Then follow the strides of the leading axes, innermost first, of the array and of the rows.
TERM = (
    "data", "col", "row", "head", "rows_data", "rows_col", "rows_row", "rows_head",
    "run", "storage", "nbytes", "swapped", "converts",
)  # fmt: skip

#: Tiles of a thread, each aligned to a cache line of its scratch memory, and the C type of their elements.
#: "char" stands for numbers of the compute type, or for bytes in a layout of the kernels.
SCRATCH = {
    "query": "char",
    "scores": "char",
    "acc": "char",
    "empty": "char",  # -inf in every lane
    "tile_max": "char",
    "row_max": "char",
    "row_sum": "char",
    "rescale": "char",
    "inverse": "char",
    "lse": "char",
    "words": "uint32_t",
    "rows": "char *",  # addresses of the rows being packed, masked or written
    "out_rows": "char *",
    "bias_rows": "char *",
    "prefetch": "const char *",  # addresses to prefetch
    "start": "Py_ssize_t",
    "stop": "Py_ssize_t",
    "kept_start": "Py_ssize_t",  # the kept first keys of each lane, where the band has some
    "kept_stop": "Py_ssize_t",
    "stops": "Py_ssize_t",  # where each vector's keys end in the current tile, see kernels.h
    "part_stops": "Py_ssize_t",  # the same within the keys being scored
    "row_i": "Py_ssize_t",
    "row_h": "Py_ssize_t",
    "converted": "char",  # bias rows in the compute type
    "clean": "char",  # a tile of values with the nonfinite ones set to 0
    "key_copy": "char",  # keys without gaps: those of a head; split-KV: of a key tile
    "value_copy": "char",  # values: those of a head, packed; split-KV: of a key tile, without gaps
    # Rows of query, out or weights, or a tile of values, between 16 bits and the compute type.
    "staged": "char",
    "staged_rows": "char *",  # where those rows begin
    "drop_words": "uint32_t",  # bits of the weights of a tile that dropout keeps
    "drop_rows": "int64_t",  # the number of each lane's row of weights
    "index_rows": "int64_t *",  # reductions: the keys of each lane's largest scores
    # Fused sweep.
    "query_groups": "char",  # the groups of a task's query blocks, see kernels/fused.h
    "weight_groups": "char",  # of two tiles of weights
    "key_groups": "char",  # of the keys and values of some key tiles
    "score_tiles": "char",  # two tiles of scores
    "other_scores": "char",  # a tile of scores by the other kernels
    "kept_words": "uint32_t",  # which keys of three units each lane may attend
    # Pairs; "other_scores", too.
    "query_pairs": "char",  # the packed queries as pairs, see kernels/pairs.h
    "other_max": "char",  # the largest score of each lane by the other kernels
}

#: The offsets of the tiles, and every field in order; the table of views follows, and the leading axes.
OFFSETS = tuple(f"to_{name}" for name in SCRATCH)
FIELDS = (*COUNTS, *OFFSETS, *REALS)
