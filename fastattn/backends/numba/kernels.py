"""The kernels: what ``backends/cython/kernels/kernels.h`` promises, as functions of addresses and counts.

Tiles hold one lane per query row, tile[x * ld + lane]; all are given by their addresses, `ld` in elements,
rows of the caller's as lists of addresses. `stops` has an entry for each vector of lanes: where its keys end
in the tile. What a kernel returns is 0 unless it says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from fastattn._constants import LN2, LOG2E, SCORE_COLUMNS, SCORE_KEYS
from fastattn.backends.numba.codegen import calls
from fastattn.backends.numba.codegen import register_tiles as tiles
from fastattn.backends.numba.codegen.intrinsics import (
    bits_to_float32,
    bits_to_float64,
    dense_word_1,
    dense_word_2,
    dense_word_4,
    dense_word_8,
    int64s,
    load_real,
    reals,
    store_real,
    uint8s,
    uint32s,
)
from fastattn.backends.numba.codegen.register_tiles import (
    HAS_NARROW,
    LANE_BYTES,
    LAST_ROWS,
    LINE_BYTES,
    NARROW_ROWS,
    SCORE_ROWS,
    SCORE_VECTORS,
    TILE_ROWS,
    TILE_VECTORS,
    WIDE_ROWS,
)


@njit(**calls.OPTIONS)
def is_masked(zero, size, bias_rows, words, words_ld, r, j):
    """Whether row r may not read key j, as the arguments of `adjust` say."""
    if words != 0 and not (uint32s(words)[j // 32 * words_ld + r] >> np.uint32(j % 32)) & np.uint32(1):
        return True
    return bias_rows != 0 and load_real(zero, int64s(bias_rows)[r] + j * size) == -math.inf


def _define(zero: Any) -> tuple[Callable[..., Any], ...]:
    """The kernels of the dtype of which zero is a number."""
    real = type(zero)
    size = zero.itemsize
    lanes = LANE_BYTES // size

    def fill(to, n, x):
        """to[i] = x."""
        elements = reals(zero, to)
        for i in range(n):
            elements[i] = real(x)
        return 0

    def pack(tile, ld, rows, stride, n_cols, high, low):
        """tile[c][lane] = (high + low) * rows[lane][c * stride]; `rows` has ld addresses."""
        for lane in range(0, ld, lanes):
            to, group = tile + lane * size, rows + lane * 8
            if stride == size and n_cols >= lanes:
                for c in range(0, n_cols - lanes + 1, lanes):
                    tiles.pack_block(zero, to + c * ld * size, ld, group, c * size, real(high), real(low))
                if n_cols % lanes:  # the last `lanes` columns, some of them once more
                    c = n_cols - lanes
                    tiles.pack_block(zero, to + c * ld * size, ld, group, c * size, real(high), real(low))
            else:
                for c in range(n_cols):
                    tiles.pack_column(zero, to + c * ld * size, group, c * stride, real(high), real(low))
        return 0

    def unpack(rows, stride, tile, ld, n_cols, factors):
        """rows[lane][c * stride] = tile[c][lane] * factor; 1 if any is NaN, else 0. Lanes may share a row.

        A factor is in two parts: the second stands ld elements behind the first.
        """
        nan = False
        for lane in range(0, ld, lanes):
            at, group, high = tile + lane * size, rows + lane * 8, factors + lane * size
            low = high + ld * size
            if stride == size and n_cols >= lanes:
                for c in range(0, n_cols - lanes + 1, lanes):
                    nan |= tiles.unpack_block(zero, group, c * size, at + c * ld * size, ld, high, low)
                if n_cols % lanes:
                    c = n_cols - lanes
                    nan |= tiles.unpack_block(zero, group, c * size, at + c * ld * size, ld, high, low)
            else:
                for c in range(n_cols):
                    nan |= tiles.unpack_column(zero, group, c * stride, at + c * ld * size, high, low)
        return 1 if nan else 0

    def score(
        s, top, spare, q, ld, n_vectors, k, stops, head_dim, k_row, prefetch, prefetch_row, prefetch_nbytes
    ):
        """S^T = K Q^T: s[j][lane] = sum over d of k[j * k_row + d * size] * q[d][lane], as far as the stops
        go.

        `top` takes the scores in, maybe some past a vector's stop; `spare` is as long, and nobody's to read.
        For each key j it prefetches the first prefetch_nbytes bytes at prefetch + j * prefetch_row.
        """
        ends = int64s(stops)
        n_keys = ends[n_vectors - 1]
        for j0 in range(0, n_keys, SCORE_KEYS):
            stop = min(n_keys, j0 + SCORE_KEYS)
            for start in range(0, head_dim, SCORE_COLUMNS):
                n_cols = min(SCORE_COLUMNS, head_dim - start)
                is_first = 1 if start == 0 else 0
                tops = top if start + n_cols == head_dim else spare
                columns, keys, j, first = q + start * ld * size, k + start * size, j0, 0
                if HAS_NARROW and n_vectors < SCORE_VECTORS:
                    while j + NARROW_ROWS <= min(stop, ends[0]):
                        to, key = s + j * ld * size, keys + j * k_row
                        if prefetch_nbytes > 0 and start == 0:
                            tiles.prefetch_rows(
                                zero, prefetch + j * prefetch_row, prefetch_row, NARROW_ROWS, prefetch_nbytes
                            )
                        if n_vectors == 2:
                            tiles.score_narrow_tile_2(zero, to, tops, columns, ld, key, k_row, n_cols,
                                                      NARROW_ROWS, is_first)  # fmt: skip
                        else:
                            tiles.score_narrow_tile_1(zero, to, tops, columns, ld, key, k_row, n_cols,
                                                      NARROW_ROWS, is_first)  # fmt: skip
                        j += NARROW_ROWS
                # All lanes for a few keys before the next keys: K stays in L1 for them.
                while j < stop:
                    while ends[first] <= j:
                        first += 1
                    key, i, is_last = keys + j * k_row, first, stop - j <= LAST_ROWS
                    if prefetch_nbytes > 0 and start == 0:
                        n_prefetched = min(SCORE_ROWS, stop - j)
                        tiles.prefetch_rows(
                            zero, prefetch + j * prefetch_row, prefetch_row, n_prefetched, prefetch_nbytes
                        )
                    while i < n_vectors:
                        at = i * LANE_BYTES
                        to, column, top_at = s + j * ld * size + at, columns + at, tops + at
                        left = n_vectors - i
                        if SCORE_VECTORS == 3 and left >= 3 and is_last:
                            tiles.score_last_tile_3(zero, to, top_at, column, ld, key, k_row, n_cols,
                                                    stop - j, is_first)  # fmt: skip
                        elif SCORE_VECTORS == 3 and left >= 3:
                            tiles.score_tile_3(zero, to, top_at, column, ld, key, k_row, n_cols, stop - j,
                                               is_first)  # fmt: skip
                        elif left >= 2 and is_last:
                            tiles.score_last_tile_2(zero, to, top_at, column, ld, key, k_row, n_cols,
                                                    stop - j, is_first)  # fmt: skip
                        elif left >= 2:
                            tiles.score_tile_2(zero, to, top_at, column, ld, key, k_row, n_cols, stop - j,
                                               is_first)  # fmt: skip
                        elif is_last:
                            tiles.score_last_tile_1(zero, to, top_at, column, ld, key, k_row, n_cols,
                                                    stop - j, is_first)  # fmt: skip
                        else:
                            tiles.score_tile_1(zero, to, top_at, column, ld, key, k_row, n_cols, stop - j,
                                               is_first)  # fmt: skip
                        i += min(left, SCORE_VECTORS)
                    j += SCORE_ROWS
        return 0

    def adjust(s, top, spare, ld, n_vectors, stops, root, softcap, bias_rows, words):
        """Turns raw scores into scores: s = root * (root * s), in two steps as root * root may not be a
        number; then s = softcap * tanh(s) when softcap > 0, then + bias, then -inf where the bias is -inf or
        bit j % 32 of words[j / 32][lane] is 0; `top` takes them in. bias_rows and words may be 0."""
        ends = int64s(stops)
        for i in range(n_vectors):
            at = i * LANE_BYTES
            if root != 1:
                top_at = top if softcap == 0 and bias_rows == 0 and words == 0 else spare
                tiles.multiply_scores(zero, s + at, top_at + at, ld, ends[i], real(root))
            if softcap > 0:
                top_at = top if bias_rows == 0 and words == 0 else spare
                tiles.cap_scores(zero, s + at, top_at + at, ld, ends[i], real(softcap))
            if bias_rows != 0:
                top_at = top if words == 0 else spare
                tiles.add_bias(zero, s + at, top_at + at, ld, ends[i], bias_rows + i * lanes * 8, 0)
            if words != 0:
                tiles.mask_scores(zero, s + at, top + at, ld, ends[i], words + i * lanes * 4)
        return 0

    def softmax(s, tile_max, row_max, row_sum, rescale, ld, n_vectors, stops, first_chunk, factor):
        """One step of the online softmax: row_max takes in tile_max, s becomes exp2(factor * (s - row_max)),
        row_sum = rescale * row_sum + the sum of the new s, rescale = exp2(factor * (old - new max)).
        -inf scores give exactly 0, also while row_max is -inf."""
        tiles.softmax_lanes(zero, s, tile_max, row_max, row_sum, rescale, ld, n_vectors, stops, first_chunk,
                            real(factor))  # fmt: skip
        return 0

    def accumulate(acc, p, rescale, is_first, ld, n_vectors, v, v_row, panel, stops, first_chunk, value_dim,
                   prefetch, n_prefetch, prefetch_nbytes):  # fmt: skip
        """O^T = rescale * O^T + V^T P^T, or the second part alone if it is_first, with sums over KEY_CHUNK
        keys at a time, the first over first_chunk.

        acc has room for whole register tiles of columns. There are `panel` bytes from one of them to the next
        in the values: as many as the columns have, or as `pack_values` leaves them. It prefetches the first
        prefetch_nbytes bytes at each of the n_prefetch addresses `prefetch`. What is left of value_dim
        behind whole register tiles it leaves to `accumulate_last`.
        """
        is_packed = panel != TILE_ROWS * size
        i = 0
        while i < n_vectors:
            group = min(TILE_VECTORS, n_vectors - i)
            weights, scale, ends, c, byte = p + i * LANE_BYTES, rescale + i * LANE_BYTES, stops + i * 8, 0, 0
            while c + TILE_ROWS <= value_dim:
                to, left = acc + c * ld * size + i * LANE_BYTES, value_dim - c
                values = v + c // TILE_ROWS * panel
                n = n_prefetch if byte < prefetch_nbytes else 0
                if TILE_VECTORS == 3 and group == 3:
                    tiles.accumulate_tile_3(zero, to, weights, scale, is_first, ld, values, v_row, left, ends,
                                            first_chunk, prefetch, n, byte)  # fmt: skip
                elif group == 2:
                    tiles.accumulate_tile_2(zero, to, weights, scale, is_first, ld, values, v_row, left, ends,
                                            first_chunk, prefetch, n, byte)  # fmt: skip
                elif WIDE_ROWS > TILE_ROWS and left >= WIDE_ROWS and not is_packed:
                    tiles.accumulate_wide_tile(zero, to, weights, scale, is_first, ld, values, v_row, left,
                                               ends, first_chunk, prefetch, n, byte)  # fmt: skip
                    c, byte = c + WIDE_ROWS - TILE_ROWS, byte + LINE_BYTES
                else:
                    tiles.accumulate_tile_1(zero, to, weights, scale, is_first, ld, values, v_row, left, ends,
                                            first_chunk, prefetch, n, byte)  # fmt: skip
                c, byte = c + TILE_ROWS, byte + LINE_BYTES
            i, n_prefetch = i + group, 0
        return 0

    def accumulate_last(acc, p, rescale, is_first, ld, n_vectors, v, v_row, stops, first_chunk, n_cols,
                        prefetch, n_prefetch, prefetch_byte):  # fmt: skip
        """`accumulate` for the n_cols columns behind whole register tiles, all addresses being theirs."""
        i = 0
        while i < n_vectors:
            group, at = min(TILE_VECTORS, n_vectors - i), i * LANE_BYTES
            if TILE_VECTORS == 3 and group == 3:
                tiles.accumulate_last_tile_3(zero, acc + at, p + at, rescale + at, is_first, ld, v, v_row,
                                             n_cols, stops + i * 8, first_chunk, prefetch, n_prefetch,
                                             prefetch_byte)  # fmt: skip
            elif group == 2:
                tiles.accumulate_last_tile_2(zero, acc + at, p + at, rescale + at, is_first, ld, v, v_row,
                                             n_cols, stops + i * 8, first_chunk, prefetch, n_prefetch,
                                             prefetch_byte)  # fmt: skip
            else:
                tiles.accumulate_last_tile_1(zero, acc + at, p + at, rescale + at, is_first, ld, v, v_row,
                                             n_cols, stops + i * 8, first_chunk, prefetch, n_prefetch,
                                             prefetch_byte)  # fmt: skip
            i, n_prefetch = i + group, 0
        return 0

    def pack_values(panels, panel, v, v_row, v_col, n_keys, value_dim):
        """Rows of values in panels of as many columns as `accumulate` takes at once, each with all its
        columns of a key, then of the next: they are read so in the order of memory."""
        whole = value_dim // TILE_ROWS if v_col == size else 0
        if whole > 0:
            tiles.pack_panels(zero, panels, panel, v, v_row, n_keys, whole)
        for j in range(n_keys):
            for c in range(whole * TILE_ROWS, value_dim):
                to = panels + c // TILE_ROWS * panel + (j * TILE_ROWS + c % TILE_ROWS) * size
                store_real(zero, to, load_real(zero, v + j * v_row + c * v_col))
        return 0

    def copy_rows(to, rows, row, col, n_rows, n_cols):
        """Rows with `row` and `col` bytes between rows and elements, one behind the other without gaps."""
        for i in range(n_rows):
            for c in range(n_cols):
                store_real(zero, to + (i * n_cols + c) * size, load_real(zero, rows + i * row + c * col))
        return 0

    def clean_values(clean, v, v_row, v_col, n_keys, value_dim):
        """Values without gaps, 0 where they are NaN or inf; 1 if any is."""
        to, found = reals(zero, clean), 0
        for j in range(n_keys):
            for c in range(value_dim):
                x = load_real(zero, v + j * v_row + c * v_col)
                nonfinite = not math.isfinite(x)
                to[j * value_dim + c] = zero if nonfinite else x
                if nonfinite:
                    found = 1
        return found

    def add_nonfinite_values(acc, acc_col, acc_row, p, p_col, p_row, n_rows, v, v_row, v_col, n_keys,
                             value_dim, bias_rows, words, words_ld):  # fmt: skip
        """Values that are NaN or inf, to the rows that may read them as `adjust` says. Tiles of any layout:
        from a query row to the next there are acc_row and p_row bytes, from a column or key to the next
        acc_col and p_col."""
        for j in range(n_keys):
            for c in range(value_dim):
                x = load_real(zero, v + j * v_row + c * v_col)
                if math.isfinite(x):
                    continue
                for r in range(n_rows):
                    if is_masked(zero, size, bias_rows, words, words_ld, r, j):
                        continue
                    at = acc + c * acc_col + r * acc_row
                    store_real(zero, at, load_real(zero, at) + load_real(zero, p + j * p_col + r * p_row) * x)
        return 0

    def clear_masked(rows, n_rows, n_keys, bias_rows, words, words_ld):
        """0 for the keys that a row may not read: in a row of NaN their weights came out as 0 * NaN."""
        for r in range(n_rows):
            for j in range(n_keys):
                if is_masked(zero, size, bias_rows, words, words_ld, r, j):
                    store_real(zero, int64s(rows)[r] + j * size, zero)
        return 0

    def start_rows(row_max, row_sum, n_rows, sinks, row_h):
        """The state before any key: a finite sink is one logit already seen, without a value. sinks may be
        0."""
        tops, sums = reals(zero, row_max), reals(zero, row_sum)
        for r in range(n_rows):
            tops[r], sums[r] = real(-math.inf), zero
        if sinks != 0:
            for r in range(n_rows):
                sink = reals(zero, sinks)[int64s(row_h)[r]]
                if math.isfinite(sink):
                    tops[r], sums[r] = sink, real(1)
        return 0

    def end_rows(row_max, row_sum, n_rows, sinks, row_h):
        """The state after all keys, with sinks that are inf or NaN: a row is NaN where it has a key, as
        inf - inf is; else it has its sink alone. During the sweep they would make NaN of a row without keys
        where another row of its block has some."""
        tops, sums = reals(zero, row_max), reals(zero, row_sum)
        for r in range(n_rows):
            sink = reals(zero, sinks)[int64s(row_h)[r]]
            if not sink < math.inf:
                # No sum of a row with keys is 0: the weight of its largest score is 1.
                tops[r], sums[r] = sink, real(1 if sums[r] == 0 else math.nan)
        return 0

    def finish(inverse, lse, row_max, row_sum, ld, factor):
        """The factors of the outputs, for `unpack`, and the natural log of the sums; lse may be 0."""
        for lane in range(0, ld, lanes):
            tiles.invert_sums(zero, inverse + lane * size, row_sum + lane * size, ld)
        if lse != 0:
            tops, sums, logs = reals(zero, row_max), reals(zero, row_sum), reals(zero, lse)
            # Back to natural units from whichever domain the scores were in.
            unit = 1.0 if factor == LOG2E else factor * LN2
            for lane in range(ld):
                logs[lane] = real(np.float64(tops[lane]) * unit + math.log(np.float64(sums[lane])))
        return 0

    def scatter(rows, elements, n):
        """rows[i][0] = elements[i]."""
        for i in range(n):
            store_real(zero, int64s(rows)[i], reals(zero, elements)[i])
        return 0

    def fill_words(words, n):
        """All bits set in n mask words."""
        for i in range(n):
            uint32s(words)[i] = np.uint32(0xFFFFFFFF)
        return 0

    def clear_words(words, n_rows, s, row_nbytes, key_nbytes, n_keys):
        """Clears bit j % 32 of words[j / 32][r] where the score of row r and key j is -inf."""
        for r in range(n_rows):
            for j in range(n_keys):
                if load_real(zero, s + r * row_nbytes + j * key_nbytes) == -math.inf:
                    uint32s(words)[j // 32 * n_rows + r] &= ~(np.uint32(1) << np.uint32(j % 32))
        return 0

    def convert_row(to, row, stride, n, itemsize, is_swapped):
        """A row of a bias of 2, 4 or 8 bytes an element, of either byte order, in the compute type without
        gaps."""
        elements = reals(zero, to)
        for j in range(n):
            source, bits = uint8s(row + j * stride), np.uint64(0)
            for byte in range(itemsize):
                bits = (bits << np.uint64(8)) | np.uint64(source[byte if is_swapped else itemsize - 1 - byte])
            if itemsize == 4:
                elements[j] = real(bits_to_float32(np.uint32(bits)))
            elif itemsize == 8:
                elements[j] = real(bits_to_float64(bits))
            else:
                exponent, fraction = np.int64((bits >> np.uint64(10)) & np.uint64(31)), bits & np.uint64(1023)
                if exponent == 31:
                    x = math.inf if fraction == 0 else math.nan
                elif exponent == 0:
                    x = np.float64(fraction) * 2.0**-24
                else:
                    x = (1024.0 + np.float64(fraction)) * 2.0 ** np.float64(exponent - 25)
                elements[j] = real(-x if bits & np.uint64(0x8000) else x)
        return 0

    def mask_words(words, n_lanes, rows, stride, itemsize, n_cols):
        """Clears bit j % 32 of words[j / 32][lane] where element j of rows[lane] is zero, any integer of
        itemsize bytes."""
        for lane in range(n_lanes):
            row, n_whole = int64s(rows)[lane], 0
            if itemsize == 1 and stride == 1:
                n_whole = n_cols // 32
                for j in range(n_whole):
                    uint32s(words)[j * n_lanes + lane] &= dense_word_1(row + 32 * j)
            for j in range(32 * n_whole, n_cols, 32):
                at, n = row + j * stride, min(32, n_cols - j)
                word = np.uint32(0)
                if n == 32 and stride == itemsize and itemsize == 2:
                    word = dense_word_2(at)
                elif n == 32 and stride == itemsize and itemsize == 4:
                    word = dense_word_4(at)
                elif n == 32 and stride == itemsize:
                    word = dense_word_8(at)
                else:
                    for i in range(n):
                        element, some = uint8s(at + i * stride), np.uint8(0)
                        for byte in range(itemsize):
                            some |= element[byte]
                        if some != 0:
                            word = np.uint32(word | (np.uint32(1) << np.uint32(i)))
                uint32s(words)[j // 32 * n_lanes + lane] &= word
        return 0

    return (fill, pack, unpack, score, adjust, softmax, accumulate, accumulate_last, pack_values, copy_rows,
            clean_values, add_nonfinite_values, clear_masked, start_rows, end_rows, finish, scatter,
            fill_words, clear_words, convert_row, mask_words)  # fmt: skip


(fill, pack, unpack, score, adjust, softmax, accumulate, accumulate_last, pack_values, copy_rows,
 clean_values, add_nonfinite_values, clear_masked, start_rows, end_rows, finish, scatter, fill_words,
 clear_words, convert_row, mask_words) = calls.kernels(_define)  # fmt: skip
