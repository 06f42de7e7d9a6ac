"""One key tile: which of its keys each lane may attend, and their scores. The only file of the driver that
knows masks and bias.

`job` and `block` are the records of `layout`, `w` is the address of the thread's scratch memory.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from fastattn.backends.cpu.record import MARK_BITS, MARKS
from fastattn.backends.numba import kernels
from fastattn.backends.numba.blocks import (
    at_item,
    column_stride,
    find_rows,
    job_entry,
    row_stride,
    stride_of,
)
from fastattn.backends.numba.codegen.calls import OPTIONS, routine
from fastattn.backends.numba.codegen.emit import INTP
from fastattn.backends.numba.codegen.intrinsics import call_modify, int32s, int64s, uint32s
from fastattn.backends.numba.layout import BIAS, COL, DENSE, HEAD, KEY, MASK_INDEX, ROW, VALUE, WORD

TILE_EMPTY, TILE_FULL, TILE_PARTIAL = 0, 1, 2
INDEX_FULL, INDEX_EMPTY = -1, -2  #: entries of a mask map without bits
ALL_BITS = np.uint32(0xFFFFFFFF)
MARK_32, MARK_64, ARRAY_BITS = MARKS[4], MARKS[8], (1 << MARK_BITS) - 1


@njit(**OPTIONS)
def span_word(start, stop):
    """Bits start .. stop - 1 of a word; bounds outside 0..32 are clipped."""
    start, stop = max(start, 0), min(stop, WORD)
    if start >= stop:
        return np.uint32(0)
    return (ALL_BITS >> np.uint32(WORD - (stop - start))) << np.uint32(start)


@routine
def span_words(job, w, block, key0, n_words, first, last):
    """Writes the mask words of the intervals, except the words first .. last - 1."""
    words, start, stop = uint32s(w + job.to_words), int64s(w + job.to_start), int64s(w + job.to_stop)
    for j in range(n_words):
        if first <= j < last:
            continue
        key = key0 + j * WORD
        for lane in range(block.ld):
            words[j * block.ld + lane] = span_word(start[lane] - key, stop[lane] - key)
    return 0


@routine
def read_dense(job, w, block, key0, n_keys):
    """Clears the bits of the mask words where the mask array is 0."""
    col = column_stride(job, DENSE)
    find_rows(job, DENSE, block, key0 * col, block.ld, w + job.to_rows)
    kernels.mask_words(job, w + job.to_words, block.ld, w + job.to_rows, col, job.dense_nbytes, n_keys)
    return 0


@routine
def read_mask_map(job, w, block, key0, n_keys):
    """Clears the bits of the mask words that are 0 in the mask map; key0 is a multiple of 32."""
    words, bits = uint32s(w + job.to_words), uint32s(job.mask_bits)
    row_i, row_h = int64s(w + job.to_row_i), int64s(w + job.to_row_h)
    head, row, col = (
        stride_of(job, MASK_INDEX, HEAD),
        stride_of(job, MASK_INDEX, ROW),
        stride_of(job, MASK_INDEX, COL),
    )
    item, tile_words = at_item(job, MASK_INDEX, block.item), job.tile_k // WORD
    for lane in range(block.ld):
        at = item + row_h[lane] * head + row_i[lane] // job.tile_q * row
        for j in range(0, n_keys, WORD):
            key, word = key0 + j, j // WORD * block.ld + lane
            entry = np.int64(int32s(at + key // job.tile_k * col)[0])
            if entry == INDEX_EMPTY:
                words[word] = np.uint32(0)
            elif entry != INDEX_FULL:
                line = (entry * job.tile_q + row_i[lane] % job.tile_q) * tile_words
                words[word] &= bits[line + key % job.tile_k // WORD]
    return 0


@routine
def words_state(job, w, block, n_keys):
    """Whether the mask words allow none of the keys, all of them, or some."""
    words, ld = uint32s(w + job.to_words), block.ld
    every, some = ALL_BITS, np.uint32(0)
    for j in range((n_keys + WORD - 1) // WORD):
        valid = span_word(0, n_keys - j * WORD)
        for lane in range(ld):
            word = words[j * ld + lane] & valid
            some |= word
            every &= word | ~valid
    if some == 0:
        return TILE_EMPTY
    return TILE_FULL if every == ALL_BITS else TILE_PARTIAL


@routine
def mask_tile(job, w, block, key0, n_keys, whole):
    """The state of the n_keys keys from key0 on; where that is TILE_PARTIAL, the mask words hold each lane's
    allowed keys.

    The scores block.plain .. block.plain_stop - 1 need no mask, and have no words. The stops are set to where
    each vector's keys end; whole: every vector has all keys of the tile. With a mask map key0 is a multiple
    of 32, so that no word covers two of its tiles.
    """
    stops, stop = int64s(w + job.to_stops), int64s(w + job.to_stop)
    intervals_only = not job.has_dense and not job.has_mask_map
    first = last = 0  # words of the plain scores
    if intervals_only:
        if block.all_start <= key0 and block.all_stop >= key0 + n_keys:
            return TILE_FULL
        if not job.adjusts_all and not whole:
            first = (max(block.all_start - key0, 0) + WORD - 1) // WORD
            last = min(block.all_stop - key0, n_keys) // WORD
            if first >= last:
                first = last = 0

    span_words(job, w, block, key0, (n_keys + WORD - 1) // WORD, first, last)
    if job.has_dense:
        read_dense(job, w, block, key0, n_keys)
    if job.has_mask_map:
        read_mask_map(job, w, block, key0, n_keys)
    if first == last:
        state = words_state(job, w, block, n_keys)
        if state != TILE_PARTIAL:
            return state
    block.plain, block.plain_stop = first * WORD, last * WORD
    if not whole:
        # Stops do not decrease from one vector to the next.
        most = 0
        for lane in range(block.ld):
            most = max(most, stop[lane] - key0)
            stops[lane // job.lanes] = min(most, n_keys)
    return TILE_PARTIAL


@njit(**OPTIONS)
def tile_state(job, w, block, key0, n_keys, whole):
    """`mask_tile`, where there is a mask."""
    stops = int64s(w + job.to_stops)
    block.plain = 0
    block.plain_stop = 0 if job.adjusts_all else n_keys
    for vector in range(block.n_vectors):
        stops[vector] = n_keys
    if job.is_masked:
        return mask_tile(job, w, block, key0, n_keys, whole)
    return TILE_FULL


@routine
def find_bias_rows(job, w, block, key0, n_keys):
    """The bias of each lane at the tile's keys, in the compute type without gaps: in place, or converted."""
    col = column_stride(job, BIAS)
    find_rows(job, BIAS, block, key0 * col, block.ld, w + job.to_bias_rows)
    if job.convert_bias:
        rows = int64s(w + job.to_bias_rows)
        for lane in range(block.ld):
            to = w + job.to_converted + lane * n_keys * job.itemsize
            kernels.convert_row(job, to, rows[lane], col, n_keys, job.bias_nbytes, job.bias_swapped)
            rows[lane] = to
    return 0


@intrinsic
def bias_rows_of(context, job, w):
    """The address of the list of the bias's rows; 0 without bias."""

    def codegen(context, builder, signature, values):
        to, has_bias = (job_entry(builder, job, values[0], name) for name in ("to_bias_rows", "has_bias"))
        return builder.select(
            builder.icmp_signed("!=", has_bias, INTP(0)), builder.add(values[1], to), INTP(0)
        )

    return types.intp(job, types.intp), codegen


@intrinsic
def words_of(context, job, w, state):
    """The address of the mask words; 0 where the tile is not partial."""

    def codegen(context, builder, signature, values):
        is_partial = builder.icmp_signed("==", values[2], INTP(TILE_PARTIAL))
        words = builder.add(values[1], job_entry(builder, job, values[0], "to_words"))
        return builder.select(is_partial, words, INTP(0))

    return types.intp(job, types.intp, types.intp), codegen


@routine
def find_new(job, w, block, start, stop):
    """Sets block.new_start and block.new_stop to the range of the head's rows start .. stop - 1 that are new
    to this thread, extended to adjoin the rows seen before; marks them as seen."""
    if block.seen_key != block.key or block.seen_value != block.value:
        block.seen_key, block.seen_value = block.key, block.value
        block.seen_start, block.seen_stop = start, stop
    else:
        if block.seen_start <= start:
            start = block.seen_stop
        elif stop <= block.seen_stop:
            stop = block.seen_start
        block.seen_start = min(block.seen_start, start)
        block.seen_stop = max(block.seen_stop, stop)
    block.new_start, block.new_stop = start, stop
    return 0


@routine
def copy_new(job, w, block):
    """Copies the head's new rows for this thread, if the call has copies of keys or packed values."""
    start, n_keys = block.new_start, block.new_stop - block.new_start
    if job.copies_keys:
        kernels.copy_rows(job, block.keys + start * block.key_row, block.key + start * row_stride(job, KEY),
                          row_stride(job, KEY), column_stride(job, KEY), n_keys, job.head_dim)  # fmt: skip
    if job.packs_values:
        kernels.pack_values(job, block.values + start * block.value_row, block.panel,
                            block.value + start * row_stride(job, VALUE), row_stride(job, VALUE),
                            column_stride(job, VALUE), n_keys, job.value_dim)  # fmt: skip
    return 0


@routine
def score_keys(job, w, block, top, key0, first, n_keys):
    """Raw scores of the keys first .. first + n_keys - 1 of the tile at key0, as far as each vector has them.

    Sets part_stops to the vectors' stops within these keys. Keys and values that are new to the thread are
    copied first, if the call has copies. Values that are not packed are prefetched: `accumulate` reads them
    column by column, faster than memory delivers them.
    """
    stops, part_stops = int64s(w + job.to_stops), int64s(w + job.to_part_stops)
    for vector in range(block.n_vectors):
        part_stops[vector] = min(max(stops[vector] - first, 0), n_keys)
    if part_stops[block.n_vectors - 1] <= 0:
        return 0
    start, prefetch_nbytes = key0 + first, 0
    find_new(job, w, block, start, start + n_keys)
    if block.new_start < block.new_stop:
        if job.copies_keys or job.packs_values:
            copy_new(job, w, block)
        if not job.packs_values:
            prefetch_nbytes = job.value_dim * job.itemsize
    keys, key_row, value_row = block.keys + start * block.key_row, block.key_row, row_stride(job, VALUE)
    if not job.copies_keys and column_stride(job, KEY) != job.itemsize:
        kernels.copy_rows(
            job, w + job.to_key_copy, keys, key_row, column_stride(job, KEY), n_keys, job.head_dim
        )
        keys, key_row = w + job.to_key_copy, job.head_dim * job.itemsize
    kernels.score(job, w + job.to_scores + first * block.ld * job.itemsize, top, w + job.to_spare,
                  w + job.to_query, block.ld, block.n_vectors, keys, w + job.to_part_stops, job.head_dim,
                  key_row, block.value + start * value_row, value_row, prefetch_nbytes)  # fmt: skip
    return 0


@routine
def note_outside(job, w, block, lane, scores, key_nbytes, key0, n_keys):
    """Sets job.read_outside where a score of one lane, masked by now, is still the mark of a score_mod that
    read out of bounds."""
    for j in range(n_keys):
        at = scores + j * key_nbytes
        bits = int64s(at)[0] if job.itemsize == 8 else np.int64(uint32s(at)[0])
        if bits & ~ARRAY_BITS != (MARK_64 if job.itemsize == 8 else MARK_32):
            continue
        head = block.item * job.num_kv_heads * job.group_size + int64s(w + job.to_row_h)[lane]
        place = (head * job.len_q + int64s(w + job.to_row_i)[lane]) * job.len_k + key0 + j + 1
        if job.outside_at == 0 or place < job.outside_at:
            job.outside_at = place
            job.read_outside = bits & ARRAY_BITS
        return 0
    return 0


@routine
def modify_scores(job, w, block, top, key0):
    """Applies the score_mod to the scores, after the soft-cap, and updates `top`; not 0 if it left marks. See
    `jit`."""
    scores = w + job.to_scores
    if job.softcap > 0 or job.score_root != 1:
        kernels.adjust(job, scores, w + job.to_spare, w + job.to_spare, block.ld, block.n_vectors,
                       w + job.to_part_stops, job.score_root, job.softcap, 0, 0)  # fmt: skip
    return call_modify(job.score_mod, scores, top, block.ld, block.n_vectors, w + job.to_part_stops, key0,
                       block.item, w + job.to_row_h, w + job.to_row_i, job.aux)  # fmt: skip


@routine
def adjusted_scores(job, w, block, state, key0, first, n_keys):
    """`score_keys`, then the adjustments of raw scores; first is 0 where there is a bias or a score_mod."""
    score_keys(job, w, block, w + job.to_spare, key0, first, n_keys)
    words, root, softcap, marks = words_of(job, w, state), job.score_root, job.softcap, 0
    if job.has_score_mod:
        is_last = words == 0 and not job.has_bias
        marks = modify_scores(job, w, block, w + job.to_tile_max if is_last else w + job.to_spare, key0)
        root, softcap = 1.0, 0.0
    if words != 0:
        words += first // WORD * block.ld * 4
    kernels.adjust(job, w + job.to_scores + first * block.ld * job.itemsize, w + job.to_tile_max,
                   w + job.to_spare, block.ld, block.n_vectors, w + job.to_part_stops, root, softcap,
                   bias_rows_of(job, w), words)  # fmt: skip
    if marks != 0:
        part_stops = int64s(w + job.to_part_stops)
        for lane in range(block.n_rows):
            note_outside(job, w, block, lane, w + job.to_scores + lane * job.itemsize,
                         block.ld * job.itemsize, key0, part_stops[lane // job.lanes])  # fmt: skip
    return 0


@routine
def note_masked(job, w, n_rows, row_nbytes, key_nbytes, n_keys, state):
    """Clears the mask bits of scores that a score_mod made -inf; the new state of the tile."""
    if state != TILE_PARTIAL:
        kernels.fill_words(job, w + job.to_words, (n_keys + WORD - 1) // WORD * n_rows)
    kernels.clear_words(job, w + job.to_words, n_rows, w + job.to_scores, row_nbytes, key_nbytes, n_keys)
    return TILE_PARTIAL


@routine
def score_tile(job, w, block, key0, n_keys, whole):
    """Scores of one key tile, masked; nothing where the tile is empty. whole: see `mask_tile`."""
    state = tile_state(job, w, block, key0, n_keys, whole)
    if state == TILE_EMPTY:
        return state
    kernels.fill(job, w + job.to_tile_max, block.ld, -np.inf)
    if job.has_bias:
        find_bias_rows(job, w, block, key0, n_keys)
    plain, plain_stop = block.plain, block.plain_stop
    if plain > 0:
        adjusted_scores(job, w, block, state, key0, 0, plain)
    if plain_stop > plain:
        score_keys(job, w, block, w + job.to_tile_max, key0, plain, plain_stop - plain)
    if n_keys > plain_stop:
        adjusted_scores(job, w, block, state, key0, plain_stop, n_keys - plain_stop)
    if job.has_score_mod and job.is_nonfinite_safe:
        return note_masked(job, w, block.ld, job.itemsize, block.ld * job.itemsize, n_keys, state)
    return state
