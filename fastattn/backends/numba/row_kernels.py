"""The kernels of few query rows, where lanes of queries would stay empty; see "Row tiles" in
``backends/cython/kernels/kernels.h``.

Row tiles hold one row per query row, tile[r * ld + x], where ld is a multiple of the lanes and x a column or
a key; a second tile has its own, as q_ld and p_ld. A row of scores ends in -inf up to a whole vector, a
packed row in zeros. Keys and values lie without gaps between their elements. `distance` is how many bytes
behind each key's row another is prefetched, 0 for none. All else, the form of this file too, is as in
`kernels`.
"""

from __future__ import annotations

import math

from numba import njit

from fastattn._machine.constants import KEY_CHUNK
from fastattn.backends.numba.codegen import calls, row_tiles
from fastattn.backends.numba.codegen.intrinsics import int64s, load_real, reals, store_real
from fastattn.backends.numba.codegen.register_tiles import LANE_BYTES, LINE_BYTES
from fastattn.backends.numba.codegen.row_tiles import WIDE_1, WIDE_2, WIDE_4

# Module functions, not closures of the kernels: the disk cache's key includes what a function has in its
# closure, and Numba functions compare by identity.


@njit(**calls.OPTIONS)
def lines_before(r, n_rows, row_nbytes):
    """How many cache lines of a row of row_nbytes are prefetched before row r of n_rows is computed: the
    prefetches are spread over the rows, as a core has few outstanding loads."""
    return (row_nbytes + LINE_BYTES - 1) // LINE_BYTES * r // n_rows


@njit(**calls.OPTIONS)
def accumulate_group(
    zero, size, count, acc, ld, p, p_ld, v, v_row, n_keys, value_dim, is_first, prefetch, n_lines
):
    """Accumulates `count` rows, 1, 2 or 4, over one chunk of n_keys keys, all columns.

    Added to acc unless is_first. For each key n_lines lines from `prefetch` on, v_row further each, are
    prefetched. size is that of an element; all else is as in `accumulate_rows`.
    """
    lanes = LANE_BYTES // size
    wide = WIDE_4 if count == 4 else WIDE_2 if count == 2 else WIDE_1
    c = prefetched = 0
    while c < value_dim:
        left = value_dim - c
        vectors = wide if left >= wide * lanes else wide // 2 if left >= wide // 2 * lanes else 1
        stop = min(value_dim, c + vectors * lanes)
        prefetch_to = n_lines * stop // value_dim
        to, at = acc + c * size, v + c * size
        start, lines = prefetch + prefetched * LINE_BYTES, prefetch_to - prefetched
        if vectors == wide:
            if count == 4:
                row_tiles.accumulate_rows_wide_4(zero, to, ld, p, p_ld, at, v_row, n_keys, left,
                                                 is_first, start, lines)  # fmt: skip
            elif count == 2:
                row_tiles.accumulate_rows_wide_2(zero, to, ld, p, p_ld, at, v_row, n_keys, left,
                                                 is_first, start, lines)  # fmt: skip
            else:
                row_tiles.accumulate_rows_wide_1(zero, to, ld, p, p_ld, at, v_row, n_keys, left,
                                                 is_first, start, lines)  # fmt: skip
        elif vectors == wide // 2 and left >= vectors * lanes:
            if count == 4:
                row_tiles.accumulate_rows_half_4(zero, to, ld, p, p_ld, at, v_row, n_keys, left,
                                                 is_first, start, lines)  # fmt: skip
            elif count == 2:
                row_tiles.accumulate_rows_half_2(zero, to, ld, p, p_ld, at, v_row, n_keys, left,
                                                 is_first, start, lines)  # fmt: skip
            else:
                row_tiles.accumulate_rows_half_1(zero, to, ld, p, p_ld, at, v_row, n_keys, left,
                                                 is_first, start, lines)  # fmt: skip
        elif count == 4:
            row_tiles.accumulate_rows_last_4(zero, to, ld, p, p_ld, at, v_row, n_keys, left, is_first,
                                             start, lines)  # fmt: skip
        elif count == 2:
            row_tiles.accumulate_rows_last_2(zero, to, ld, p, p_ld, at, v_row, n_keys, left, is_first,
                                             start, lines)  # fmt: skip
        else:
            row_tiles.accumulate_rows_last_1(zero, to, ld, p, p_ld, at, v_row, n_keys, left, is_first,
                                             start, lines)  # fmt: skip
        c, prefetched = stop, prefetch_to


@calls.kernel
def pack_rows(zero):
    """tile[r][c] = (high + low) * rows[r][c * stride] for r < n_rows, c < n_cols."""
    real = type(zero)
    size = zero.itemsize
    lanes = LANE_BYTES // zero.itemsize

    def pack_rows(tile, ld, rows, n_rows, stride, n_cols, high, low):
        for r in range(n_rows):
            row, to = int64s(rows)[r], tile + r * ld * size
            if stride != size:  # made contiguous first
                for c in range(n_cols):
                    store_real(zero, to + c * size, load_real(zero, row + c * stride))
                row = to
            for c in range(0, n_cols, lanes):
                row_tiles.pack_row(zero, to + c * size, row + c * size, n_cols - c, real(high), real(low))
        return 0

    return pack_rows


@calls.kernel
def unpack_rows(zero):
    """rows[r][c * stride] = tile[r][c] * factor for r < n_rows, c < n_cols; 1 if any is nonfinite, else 0.

    A factor has two parts: factors[r] and factors[factors_ld + r], as `finish` makes them.
    """
    size = zero.itemsize
    lanes = LANE_BYTES // zero.itemsize

    def unpack_rows(rows, stride, n_rows, tile, ld, n_cols, factors, factors_ld):
        nonfinite = False
        for r in range(n_rows):
            row, tile_row, high = int64s(rows)[r], tile + r * ld * size, factors + r * size
            low = high + factors_ld * size
            for c in range(0, n_cols, lanes):
                at, n = tile_row + c * size, n_cols - c
                if stride == size:
                    nonfinite |= row_tiles.unpack_row(zero, row + c * size, at, n, high, low)
                else:  # scaled in the tile first
                    nonfinite |= row_tiles.unpack_row(zero, at, at, n, high, low)
                    for i in range(min(lanes, n)):
                        store_real(zero, row + (c + i) * stride, load_real(zero, at + i * size))
        return 1 if nonfinite else 0

    return unpack_rows


@calls.kernel
def score_rows(zero):
    """s[r][j] = sum over d < head_dim of q[r][d] * k[j * k_row][d] for r < n_rows, j < n_keys."""
    size = zero.itemsize
    dots = max(8, LANE_BYTES // zero.itemsize)

    def score_rows(s, ld, q, q_ld, n_rows, k, k_row, n_keys, head_dim, distance):
        # All rows for as many keys as one row takes at once, which stay in L1.
        for start in range(0, n_keys, dots):
            stop, r, prefetched = min(n_keys, start + dots), 0, 0
            while r < n_rows:
                count = 4 if n_rows - r >= 4 else 2 if n_rows - r >= 2 else 1
                prefetch_to = lines_before(r + count, n_rows, head_dim * size) if distance != 0 else 0
                for j in range(start, stop, dots // count):
                    to, at, key = s + (r * ld + j) * size, q + r * q_ld * size, k + j * k_row
                    if count == 4:
                        row_tiles.score_rows_tile_4(zero, to, ld, at, q_ld, key, k_row, stop - j, head_dim,
                                                    distance, prefetched, prefetch_to)  # fmt: skip
                    elif count == 2:
                        row_tiles.score_rows_tile_2(zero, to, ld, at, q_ld, key, k_row, stop - j, head_dim,
                                                    distance, prefetched, prefetch_to)  # fmt: skip
                    else:
                        row_tiles.score_rows_tile_1(zero, to, ld, at, q_ld, key, k_row, stop - j, head_dim,
                                                    distance, prefetched, prefetch_to)  # fmt: skip
                r, prefetched = r + count, prefetch_to
        return 0

    return score_rows


@calls.kernel
def adjust_rows(zero):
    """As `adjust`, for n_rows rows and n_keys keys.

    The bit of key j for row r is bit j % 32 of words[(j / 32) * n_rows + r].
    """
    real = type(zero)
    size = zero.itemsize
    lanes = LANE_BYTES // zero.itemsize

    def adjust_rows(s, ld, n_rows, n_keys, root, softcap, bias_rows, words):
        n_vectors = (n_keys + lanes - 1) // lanes
        for r in range(n_rows):
            row = s + r * ld * size
            if root != 1:
                row_tiles.multiply_row(zero, row, n_vectors, real(root))
            if softcap > 0:
                row_tiles.cap_row(zero, row, n_vectors, real(softcap))
            if bias_rows != 0:
                row_tiles.bias_row(zero, row, n_keys, int64s(bias_rows)[r])
            if words != 0:
                row_tiles.mask_row(zero, row, n_vectors, words + r * 4, n_rows)
        return 0

    return adjust_rows


@calls.kernel
def softmax_rows(zero):
    """s becomes exp2(factor * (s - row_max)), and row_sum the sum of the row.

    row_max is found here unless has_max, and then is given.
    """
    real = type(zero)
    size = zero.itemsize
    lanes = LANE_BYTES // zero.itemsize

    def softmax_rows(s, ld, row_max, row_sum, n_rows, n_keys, factor, has_max):
        n_vectors = (n_keys + lanes - 1) // lanes
        for r in range(n_rows):
            row = s + r * ld * size
            for j in range(n_keys, n_vectors * lanes):
                reals(zero, row)[j] = real(-math.inf)
            row_tiles.softmax_row(
                zero, row, row_max + r * size, row_sum + r * size, n_vectors, real(factor), has_max
            )
        return 0

    return softmax_rows


@calls.kernel
def accumulate_rows(zero):
    """acc[r][e] = sum over j < n_keys of p[r][j] * v[j * v_row][e] for r < n_rows, e < value_dim."""
    size = zero.itemsize

    def accumulate_rows(acc, ld, p, p_ld, n_rows, v, v_row, n_keys, value_dim, distance):
        for start in range(0, n_keys, KEY_CHUNK):
            n, r, prefetched = min(KEY_CHUNK, n_keys - start), 0, 0
            values, is_first = v + start * v_row, 1 if start == 0 else 0
            while r < n_rows:
                count = 4 if n_rows - r >= 4 else 2 if n_rows - r >= 2 else 1
                prefetch_to = lines_before(r + count, n_rows, value_dim * size) if distance != 0 else 0
                accumulate_group(zero, size, count, acc + r * ld * size, ld, p + (r * p_ld + start) * size,
                                 p_ld, values, v_row, n, value_dim, is_first,
                                 values + distance + prefetched * LINE_BYTES,
                                 prefetch_to - prefetched)  # fmt: skip
                r, prefetched = r + count, prefetch_to
        return 0

    return accumulate_rows


@calls.kernel
def merge_rows(zero):
    """Adds the partial result acc_2, row_max_2, row_sum_2, of other keys, to acc, row_max, row_sum.

    Rows of both accumulators are ld elements long. Where a row has none of those keys this changes nothing.
    """
    real = type(zero)
    size = zero.itemsize
    lanes = LANE_BYTES // zero.itemsize

    def merge_rows(acc, row_max, row_sum, acc_2, row_max_2, row_sum_2, n_rows, ld, factor):
        for r in range(n_rows):
            row_tiles.merge_row(zero, acc + r * ld * size, row_max + r * size, row_sum + r * size,
                                acc_2 + r * ld * size, row_max_2 + r * size, row_sum_2 + r * size,
                                ld // lanes, real(factor))  # fmt: skip
        return 0

    return merge_rows
