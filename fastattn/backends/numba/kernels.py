"""The kernels: what ``backends/cython/kernels/kernels.h`` promises, as functions of addresses and counts.

Each function below makes one kernel: given `zero`, a zero of the dtype, it returns the function that Numba
compiles for that dtype. Its docstring is the kernel's. A kernel returns 0 unless its docstring says
otherwise. These arguments mean the same everywhere:

==================  ==================================================================================
acc                 accumulators of the outputs, a tile with one line per column of the values
s, p                scores of a key tile, and the weights that `softmax` makes of them in their place
ld                  lanes of a tile, one per query row: element x of a lane is tile[x * ld + lane]
n_vectors           vectors of lanes in use; they are the first of the ld lanes
stops               for each vector of lanes, how many of the tile's keys it has; they never decrease
top                 a maximum for each lane, raised to the scores that the kernel leaves
row_max, row_sum    the running state of the online softmax, one per lane or row
rescale             for each lane, what its sums so far are multiplied with
first_chunk         keys in the first of the chunks that sums over keys are formed in, see `KEY_CHUNK`
factor              of `softmax` and `finish`: what makes exponents of 2 of scores
k, k_row            the first key of the tile, and bytes from one key to the next
v, v_row, v_col     the first value of the tile, and bytes from one key, and one column, to the next
rows                a list of addresses, one for each lane or row
bias_rows, words    the bias and the mask of a tile as `adjust` takes them; 0 where there is none
prefetch...         memory to bring into the cache ahead of its use
==================  ==================================================================================

All tiles are given by their addresses and are aligned to vectors; `ld` is in elements, other strides are in
bytes.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from fastattn._machine.constants import LN2, LOG2E, SCORE_COLUMNS, SCORE_KEYS
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
    """Whether row r may not read key j of a tile.

    bias_rows and words, of words_ld lanes, are as in `adjust`; size is that of an element.
    """
    if words != 0 and not (uint32s(words)[j // 32 * words_ld + r] >> np.uint32(j % 32)) & np.uint32(1):
        return True
    return bias_rows != 0 and load_real(zero, int64s(bias_rows)[r] + j * size) == -math.inf


@calls.kernel
def fill(zero):
    """to[i] = x for the n elements at `to`."""
    real = type(zero)

    def fill(to, n, x):
        elements = reals(zero, to)
        for i in range(n):
            elements[i] = real(x)
        return 0

    return fill


@calls.kernel
def pack(zero):
    """tile[c][lane] = (high + low) * rows[lane][c * stride] for c < n_cols; `rows` has ld addresses."""
    real = type(zero)
    size = zero.itemsize
    lanes = LANE_BYTES // zero.itemsize

    def pack(tile, ld, rows, stride, n_cols, high, low):
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

    return pack


@calls.kernel
def unpack(zero):
    """rows[lane][c * stride] = tile[c][lane] * factor for c < n_cols; 1 if any is nonfinite, else 0.

    A factor has two parts, factors[lane] and factors[ld + lane], as `finish` makes them. Lanes may share a
    row.
    """
    size = zero.itemsize
    lanes = LANE_BYTES // zero.itemsize

    def unpack(rows, stride, tile, ld, n_cols, factors):
        nonfinite = False
        for lane in range(0, ld, lanes):
            at, group, high = tile + lane * size, rows + lane * 8, factors + lane * size
            low = high + ld * size
            if stride == size and n_cols >= lanes:
                for c in range(0, n_cols - lanes + 1, lanes):
                    nonfinite |= tiles.unpack_block(zero, group, c * size, at + c * ld * size, ld, high, low)
                if n_cols % lanes:
                    c = n_cols - lanes
                    nonfinite |= tiles.unpack_block(zero, group, c * size, at + c * ld * size, ld, high, low)
            else:
                for c in range(n_cols):
                    nonfinite |= tiles.unpack_column(zero, group, c * stride, at + c * ld * size, high, low)
        return 1 if nonfinite else 0

    return unpack


@calls.kernel
def score(zero):
    """S^T = K Q^T: s[j][lane] = sum over d < head_dim of k[j * k_row + d * size] * q[d][lane].

    It does so up to the stops; `top` may take in scores past a vector's stop. `spare` has the size of `top`,
    and its contents are undefined. Of each key j the first prefetch_nbytes bytes at prefetch + j *
    prefetch_row are prefetched.
    """
    size = zero.itemsize

    def score(
        s, top, spare, q, ld, n_vectors, k, stops, head_dim, k_row, prefetch, prefetch_row, prefetch_nbytes
    ):
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

    return score


@calls.kernel
def adjust(zero):
    """Turns raw scores into scores.

    s = root * (root * s), in two steps as root * root may not be a number; then s = softcap * tanh(s) when
    softcap > 0; then + bias; then -inf where the bias is -inf or bit j % 32 of words[j / 32][lane] is 0.
    `top` takes in the result, `spare` is as in `score`. bias_rows has an address for each lane.
    """
    real = type(zero)
    lanes = LANE_BYTES // zero.itemsize

    def adjust(s, top, spare, ld, n_vectors, stops, root, softcap, bias_rows, words):
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

    return adjust


@calls.kernel
def softmax(zero):
    """One step of the online softmax.

    row_max takes in tile_max, s becomes exp2(factor * (s - row_max)), rescale = exp2(factor * (old - new
    row_max)), and row_sum = rescale * row_sum + the sum of the new s. Scores of -inf give exactly 0, also
    while row_max is -inf.
    """
    real = type(zero)

    def softmax(s, tile_max, row_max, row_sum, rescale, ld, n_vectors, stops, first_chunk, factor):
        tiles.softmax_lanes(zero, s, tile_max, row_max, row_sum, rescale, ld, n_vectors, stops, first_chunk,
                            real(factor))  # fmt: skip
        return 0

    return softmax


@calls.kernel
def accumulate(zero):
    """O^T = rescale * O^T + V^T P^T, or V^T P^T alone if is_first, in sums over KEY_CHUNK keys at a time.

    acc has room for whole register tiles of columns. In the values it is `panel` bytes from the columns of
    one register tile to those of the next: TILE_ROWS columns in the caller's rows, more where `pack_values`
    made panels. The first prefetch_nbytes bytes at each of the n_prefetch addresses in `prefetch` are
    prefetched. Columns of value_dim past the last whole register tile are left to `accumulate_last`.
    """
    size = zero.itemsize

    def accumulate(acc, p, rescale, is_first, ld, n_vectors, v, v_row, panel, stops, first_chunk, value_dim,
                   prefetch, n_prefetch, prefetch_nbytes):  # fmt: skip
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

    return accumulate


@calls.kernel
def accumulate_last(zero):
    """`accumulate` for the n_cols columns past the last whole register tile, at which acc and v begin.

    What is prefetched is byte prefetch_byte of each address in `prefetch`.
    """

    def accumulate_last(acc, p, rescale, is_first, ld, n_vectors, v, v_row, stops, first_chunk, n_cols,
                        prefetch, n_prefetch, prefetch_byte):  # fmt: skip
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

    return accumulate_last


@calls.kernel
def pack_values(zero):
    """Copies the values of n_keys keys into panels of TILE_ROWS columns, `panel` bytes apart.

    A panel has its columns of one key, then of the next: `accumulate` reads it in the order of memory.
    """
    size = zero.itemsize

    def pack_values(panels, panel, v, v_row, v_col, n_keys, value_dim):
        whole = value_dim // TILE_ROWS if v_col == size else 0
        if whole > 0:
            tiles.pack_panels(zero, panels, panel, v, v_row, n_keys, whole)
        for j in range(n_keys):
            for c in range(whole * TILE_ROWS, value_dim):
                to = panels + c // TILE_ROWS * panel + (j * TILE_ROWS + c % TILE_ROWS) * size
                store_real(zero, to, load_real(zero, v + j * v_row + c * v_col))
        return 0

    return pack_values


@calls.kernel
def copy_rows(zero):
    """to[i][c] = rows[i * row + c * col] for i < n_rows, c < n_cols; `to` is without gaps."""
    size = zero.itemsize

    def copy_rows(to, rows, row, col, n_rows, n_cols):
        for i in range(n_rows):
            for c in range(n_cols):
                store_real(zero, to + (i * n_cols + c) * size, load_real(zero, rows + i * row + c * col))
        return 0

    return copy_rows


@calls.kernel
def clean_values(zero):
    """clean[j][c] = the value of key j and column c, or 0 where that is nonfinite; 1 if any is.

    `clean` is without gaps; n_keys and value_dim are its sizes.
    """

    def clean_values(clean, v, v_row, v_col, n_keys, value_dim):
        to, found = reals(zero, clean), 0
        for j in range(n_keys):
            for c in range(value_dim):
                x = load_real(zero, v + j * v_row + c * v_col)
                nonfinite = not math.isfinite(x)
                to[j * value_dim + c] = zero if nonfinite else x
                if nonfinite:
                    found = 1
        return found

    return clean_values


@calls.kernel
def add_nonfinite_values(zero):
    """Adds p * v for the nonfinite values to the rows that may read them.

    Tiles of either layout: acc_col and acc_row are bytes from one column, and one query row, to the next,
    p_col and p_row from one key, and one query row. bias_rows and words, of words_ld lanes, are as in
    `adjust`.
    """
    size = zero.itemsize

    def add_nonfinite_values(acc, acc_col, acc_row, p, p_col, p_row, n_rows, v, v_row, v_col, n_keys,
                             value_dim, bias_rows, words, words_ld):  # fmt: skip
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

    return add_nonfinite_values


@njit(**calls.OPTIONS)
def headroom(inverse):
    """A power of two that makes the weights of a row add up to at most 1/2; `inverse` is that of the sum."""
    return math.ldexp(0.25, math.frexp(inverse)[1])


@calls.kernel
def leave_headroom(zero):
    """Multiplies the weights p by their row's `headroom`; p_row, p_key are strides. inverse: see `finish`."""
    real = type(zero)
    size = zero.itemsize

    def leave_headroom(p, p_row, p_key, n_rows, n_keys, inverse):
        for r in range(n_rows):
            scale = real(headroom(np.float64(load_real(zero, inverse + r * size))))
            for j in range(n_keys):
                at = p + r * p_row + j * p_key
                store_real(zero, at, load_real(zero, at) * scale)
        return 0

    return leave_headroom


@calls.kernel
def write_large(zero):
    """Writes the nonfinite outputs again, from sums that have `headroom`. Others stay as they are, so that no
    bit of them depends on the rest of the block.

    A sum of finite values is then finite, and their mean rounds past the largest number at most, which it
    then is. What stays NaN has read NaN or inf. rows[r][c * stride] is column c of row r; acc_row and acc_col
    are strides of acc. inverse, of rows ld apart: see `finish`.
    """
    real = type(zero)
    size, most = zero.itemsize, float(np.finfo(zero.dtype).max)

    def write_large(rows, stride, n_rows, n_cols, acc, acc_row, acc_col, inverse, ld):
        for r in range(n_rows):
            first = np.float64(load_real(zero, inverse + r * size))
            rest = np.float64(load_real(zero, inverse + (ld + r) * size))
            for c in range(n_cols):
                to = int64s(rows)[r] + c * stride
                if math.isfinite(load_real(zero, to)):
                    continue
                total = np.float64(load_real(zero, acc + r * acc_row + c * acc_col))
                x = (total * first + total * rest) / headroom(first)
                if math.isnan(x):
                    continue
                if math.isfinite(total):
                    x = min(max(x, -most), most)
                store_real(zero, to, real(x))
        return 0

    return write_large


@calls.kernel
def clear_masked(zero):
    """rows[r][j] = 0 for the masked keys: in a row of NaN their weights came out as 0 * NaN.

    bias_rows and words, of words_ld lanes, are as in `adjust`.
    """
    size = zero.itemsize

    def clear_masked(rows, n_rows, n_keys, bias_rows, words, words_ld):
        for r in range(n_rows):
            for j in range(n_keys):
                if is_masked(zero, size, bias_rows, words, words_ld, r, j):
                    store_real(zero, int64s(rows)[r] + j * size, zero)
        return 0

    return clear_masked


@calls.kernel
def start_rows(zero):
    """The state of n_rows rows before any key: a finite sink is one logit already seen, without a value.

    sinks, one per head, may be 0; row_h has the head of each row.
    """
    real = type(zero)

    def start_rows(row_max, row_sum, n_rows, sinks, row_h):
        tops, sums = reals(zero, row_max), reals(zero, row_sum)
        for r in range(n_rows):
            tops[r], sums[r] = real(-math.inf), zero
        if sinks != 0:
            for r in range(n_rows):
                sink = reals(zero, sinks)[int64s(row_h)[r]]
                if math.isfinite(sink):
                    tops[r], sums[r] = sink, real(1)
        return 0

    return start_rows


@calls.kernel
def end_rows(zero):
    """The state after all keys, with the sinks that are nonfinite; arguments as in `start_rows`, sinks not 0.

    A row that has a key becomes NaN, as inf - inf is; else it has its sink alone. During the sweep such sinks
    would make NaN of a row without keys where another row of its block has some.
    """
    real = type(zero)

    def end_rows(row_max, row_sum, n_rows, sinks, row_h):
        tops, sums = reals(zero, row_max), reals(zero, row_sum)
        for r in range(n_rows):
            sink = reals(zero, sinks)[int64s(row_h)[r]]
            if not sink < math.inf:
                # No sum of a row with keys is 0: the weight of its largest score is 1.
                tops[r], sums[r] = sink, real(1 if sums[r] == 0 else math.nan)
        return 0

    return end_rows


@calls.kernel
def finish(zero):
    """The factors of the outputs, for `unpack`, and the natural logs of the sums; lse may be 0.

    inverse[lane] = 1 / row_sum rounded towards 0, 0 for an empty row, and inverse[ld + lane] what that left.
    """
    real = type(zero)
    size = zero.itemsize
    lanes = LANE_BYTES // zero.itemsize

    def finish(inverse, lse, row_max, row_sum, ld, factor):
        for lane in range(0, ld, lanes):
            tiles.invert_sums(zero, inverse + lane * size, row_sum + lane * size, ld)
        if lse != 0:
            tops, sums, logs = reals(zero, row_max), reals(zero, row_sum), reals(zero, lse)
            # Back to natural units from whichever domain the scores were in.
            unit = 1.0 if factor == LOG2E else factor * LN2
            for lane in range(ld):
                logs[lane] = real(np.float64(tops[lane]) * unit + math.log(np.float64(sums[lane])))
        return 0

    return finish


@calls.kernel
def scatter(zero):
    """rows[i][0] = elements[i] for i < n."""

    def scatter(rows, elements, n):
        for i in range(n):
            store_real(zero, int64s(rows)[i], reals(zero, elements)[i])
        return 0

    return scatter


@calls.kernel
def fill_words(zero):
    """Sets all bits of n mask words."""

    def fill_words(words, n):
        for i in range(n):
            uint32s(words)[i] = np.uint32(0xFFFFFFFF)
        return 0

    return fill_words


@calls.kernel
def clear_words(zero):
    """Clears bit j % 32 of words[j / 32][r] where the score of row r and key j is -inf.

    Scores lie row_nbytes apart from one row to the next, key_nbytes from one key to the next.
    """

    def clear_words(words, n_rows, s, row_nbytes, key_nbytes, n_keys):
        for r in range(n_rows):
            for j in range(n_keys):
                if load_real(zero, s + r * row_nbytes + j * key_nbytes) == -math.inf:
                    uint32s(words)[j // 32 * n_rows + r] &= ~(np.uint32(1) << np.uint32(j % 32))
        return 0

    return clear_words


@calls.kernel
def convert_row(zero):
    """to[j] = row[j * stride] in the compute type, for j < n.

    The row is of floats of itemsize 2, 4 or 8 bytes, in the other byte order if is_swapped.
    """
    real = type(zero)

    def convert_row(to, row, stride, n, itemsize, is_swapped):
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

    return convert_row


@calls.kernel
def mask_words(zero):
    """Clears bit j % 32 of words[j / 32][lane] where element j < n_cols of rows[lane] is zero.

    An element is any integer of itemsize bytes, `stride` bytes behind the one before.
    """

    def mask_words(words, n_lanes, rows, stride, itemsize, n_cols):
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

    return mask_words
