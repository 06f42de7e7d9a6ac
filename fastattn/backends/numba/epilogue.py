"""The epilogues of a tile of raw scores, before the softmax. Their order is that of
`fastattn.backends.cpu.fields.EPILOGUES`.

Bias and masks are one tile, `extra`: see `mask_tile`.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from fastattn.backends.cpu.fields import MARK_BITS, MARKS
from fastattn.backends.numba.blocks import INTP, counts_of, extra_of, scores_of
from fastattn.backends.numba.calls import OPTIONS, call_address, stage
from fastattn.backends.numba.vectors import load, splat, store, tanh, tile_at, where

MARK_32, MARK_64, ARRAY_BITS = MARKS[4], MARKS[8], (1 << MARK_BITS) - 1


@njit(**OPTIONS)
def adjust_scores(job, block, key0, n_keys):
    """Raw scores become those that the softmax takes: scale, softcap, score_mod, bias, mask."""
    marks = modify_scores(job, block, key0, n_keys)
    if block.is_partial:
        mask_scores(job, block, n_keys, 0)
    if marks != 0:
        note_outside(job, block, key0, n_keys)


@njit(**OPTIONS)
def modify_scores(job, block, key0, n_keys):
    """scale, softcap, score_mod. Returns nonzero if score_mod left marks."""
    if job.is_adjusted:
        adjust(job, block, n_keys, 0)
    return call_score_mod(job, block, key0, n_keys) if job.has_score_mod else 0


@stage
def adjust(job, block, n_keys, y):
    """scale, softcap: s = root * (root * s), as root * root may overflow; then softcap * tanh(s)."""
    scores, root, cap = scores_of(job, block), splat(job.score_root), splat(job.softcap)
    for j in range(n_keys):
        for lane in range(0, block.n_lanes, job.lanes):
            x = root * (root * load(scores, (j, lane)))
            store(scores, (j, lane), cap * tanh(x) if job.softcap > 0 else x)
    return 0


@stage
def mask_scores(job, block, n_keys, y):
    """bias, mask: s += extra, -inf where that is -inf."""
    scores, extra, masked = scores_of(job, block), extra_of(job, block), splat(type(job.zero)(-np.inf))
    for j in range(n_keys):
        if block.plain <= j < block.plain_stop:
            continue
        for lane in range(0, block.n_lanes, job.lanes):
            x = load(extra, (j, lane))
            store(scores, (j, lane), where(x == masked, masked, load(scores, (j, lane)) + x))
    return 0


@intrinsic
def call_loop(context, address, scores, top, ld, n_vectors, stops, key0, item, row_h, row_i, aux):
    """Calls the loop at an address, see `jit.loops`."""

    def codegen(context, builder, signature, values):
        return call_address(builder, values[0], values[1:])

    return types.intp(*[types.intp] * 11), codegen


@stage
def call_score_mod(job, block, key0, n_keys):
    """score_mod; not 0 if it left marks."""
    stops = counts_of(block, block.stops)
    for vector in range(block.n_vectors):
        stops[vector] = n_keys
    return call_loop(job.score_mod, block.scores, block.tile_max, block.n_lanes, block.n_vectors, block.stops,
                     key0, block.item, block.row_h, block.row_i, job.aux)  # fmt: skip


@stage
def note_outside(job, block, key0, n_keys):
    """Sets job.read_outside where a score, masked by now, is still the mark of a score_mod that read out of
    bounds."""
    shape = (job.block_k, block.n_lanes)
    wide, narrow = tile_at(INTP, block.scores, shape), tile_at(np.uint32(0), block.scores, shape)
    row_i, row_h = counts_of(block, block.row_i), counts_of(block, block.row_h)
    for lane in range(block.n_rows):
        head = block.item * job.num_kv_heads * job.group_size + row_h[lane]
        for j in range(n_keys):
            bits = wide[j, lane] if job.itemsize == 8 else np.int64(narrow[j, lane])
            if bits & ~ARRAY_BITS != (MARK_64 if job.itemsize == 8 else MARK_32):
                continue
            place = (head * job.len_q + row_i[lane]) * job.len_k + key0 + j + 1
            if job.outside_at == 0 or place < job.outside_at:
                job.outside_at = place
                job.read_outside = bits & ARRAY_BITS
            break
    return 0


@stage
def note_masked(job, block, n_keys, y):
    """Makes `extra` -inf where a score_mod made the score -inf."""
    scores, extra, masked = scores_of(job, block), extra_of(job, block), type(job.zero)(-np.inf)
    for j in range(n_keys):
        for lane in range(block.n_lanes):
            if scores[j, lane] == masked:
                extra[j, lane] = masked
            elif not block.is_partial:
                extra[j, lane] = job.zero
    block.is_partial = 1
    return 0


@njit(**OPTIONS)
def is_allowed(job, block, j, lane):
    """Whether mask and bias let a lane attend to the tile's key j."""
    is_plain = block.plain <= j < block.plain_stop
    return is_plain or not block.is_partial or extra_of(job, block)[j, lane] != -np.inf
