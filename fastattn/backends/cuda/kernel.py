"""The kernels: `attend`, which is score, softmax and accumulate over tiles of keys, and `merge`. See the
package's docstring.

Arrays come as all their memory in a row, with where they begin and their strides in elements: an index is
then a sum.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import config, cuda

from fastattn._mask_map import INDEX_FULL, TILE_K, TILE_Q, WORDS
from fastattn.backends.cuda.form import Form
from fastattn.backends.cuda.intrinsics import larger, power_of_two
from fastattn.backends.cuda.tiles import U, layout, tile_functions

#: Of shared memory in bytes, for loads of several elements; the simulator takes none.
ALIGNMENT = None if config.ENABLE_CUDASIM else 16


def _power(dtype: str, is_natural: bool) -> Any:
    """The device function that makes a weight of a score below the largest one: 2^x, or e^x."""
    LOG2E = np.dtype(dtype).type(math.log2(math.e))
    exp2 = power_of_two(dtype)

    @cuda.jit(device=True)
    def power(x):
        return exp2(x * LOG2E if is_natural else x)

    return power


def _unit(dtype: str, is_natural: bool) -> Any:
    """What turns scores into natural logarithms; sinks always are."""
    return np.dtype(dtype).type(1 if is_natural else math.log(2))


@cache
def attend_kernel(form: Form, score_mod: Any = None, mask_mod: Any = None) -> Any:
    """``attend(q, k, v, masks, bias, sinks, aux, out, lse, row_max, row_sum, sizes, cut, views, scale,
    softcap)``.

    masks: start and stop, ``(B, L)``, dense, tile_index, tile_bits. aux: what the functions read. sizes: B,
    H, K, L, S, D, E. cut: query tiles, parts of the value's columns, splits of the keys, keys of a split,
    and which number the functions give the first item. views: where the array begins and its four strides,
    of q, k, v, start, stop, dense, tile_index, bias, sinks ``(H,)``, out ``(B, H, L, E)`` and lse ``(B, H,
    L)``. scale: times log2(e) unless the form is natural. What a form has not is never read; other dtypes
    than the form's are converted as they are read.

    A block for each tile, part, key/value head, split and batch item. `row_max` and `row_sum`, without gaps,
    take what the weights are relative to, and their sums. In a form of parts they are ``(splits, B, H, L)``,
    without sinks, and `out`, ``(splits, B, H, L, E)`` without gaps, takes sums of weights times values. A
    form of weights reads them instead, and writes the softmax to `out`, which is ``(B, H, L, S)`` and holds
    zeros.
    """
    real, shape = form.real, form.shape
    ROWS, KEYS, COLUMNS, VECTOR = shape.rows, shape.keys, shape.columns, shape.vector
    THREADS_Q, THREADS_K, THREADS = shape.threads_q, shape.threads_k, shape.num_threads
    TILE_ROWS, TILE_KEYS, TILE_COLUMNS = shape.tile_q, shape.tile_k, shape.tile_columns
    DEPTH, VALUE_KEYS, BUFFERS = shape.depth, shape.value_keys, shape.buffers
    HAS_INTERVALS, HAS_DENSE, HAS_MASK_MAP = form.has_intervals, form.has_dense, form.has_mask_map
    HAS_BIAS, HAS_SOFTCAP = form.has_bias, form.has_softcap
    HAS_SINKS, HAS_SCORE_MOD, HAS_MASK_MOD = form.has_sinks, form.has_score_mod, form.has_mask_mod
    HAS_BITS = HAS_DENSE or HAS_MASK_MAP or HAS_MASK_MOD  # beside intervals, which are known for a whole tile
    IS_EVEN, IS_WEIGHTS, IS_PARTS = form.is_even, form.result == "weights", form.result == "parts"
    ZERO, ONE, MASKED, MINUS_ZERO = real(0), real(1), real(-math.inf), real(-0.0)
    ALL = U(0xFFFF_FFFF_FFFF_FFFF)  # a bit for each score of a thread
    BACK = _unit(form.dtype, form.is_natural)

    Q_LINE, _, TO_KEYS, HALF, TO_VALUES, VALUES_HALF, _, SHARED = layout(shape)
    tile = tile_functions(form)
    place, apart, largest, summed = tile.place, tile.apart, tile.largest, tile.summed
    fetch_scores, put_scores, add_scores = tile.fetch_scores, tile.put_scores, tile.add_scores
    fetch_values, put_values, add_values = tile.fetch_values, tile.put_values, tile.add_values
    STAGED_SCORES, STAGED_VALUES = tile.score_registers, tile.value_registers

    power, larger_one = _power(form.dtype, form.is_natural), larger(form.dtype)

    @cuda.jit(device=True)
    def softmax_base(top):
        """What weights are relative to: 0 for an empty row, as -inf less -inf would be NaN."""
        return top if top > MASKED else ZERO

    @cuda.jit(device=True)
    def is_allowed(masks, dense_at, dense_col, index_at, index_col, start, stop, query, key):
        """Whether arrays let a row attend to a key; `dense_at` and `index_at` are where its lines begin."""
        _, _, dense, tile_index, tile_bits = masks
        allowed = start <= key < stop
        if HAS_DENSE and allowed:
            allowed = dense[U(dense_at + key * dense_col)] != 0
        if HAS_MASK_MAP and allowed:
            entry = tile_index[U(index_at + key // TILE_K * index_col)]
            allowed = entry == INDEX_FULL
            if entry >= 0:
                word = tile_bits[U((entry * TILE_Q + query % TILE_Q) * WORDS + key % TILE_K // 32)]
                allowed = (word >> np.uint32(key % 32)) & np.uint32(1) != 0
        return allowed

    @cuda.jit(device=True)
    def allowed_bits(masks, dense_view, index_view, aux, rows, item, b, first, last, key0, tx, ty):
        """Which of a thread's scores count, a bit for each: bits, as a loop that is not unrolled cannot touch
        what is in registers."""
        heads, queries, starts, stops = rows
        bits = U(0)
        for n in range(ROWS * KEYS):
            row, key = place(n // KEYS, ty, THREADS_Q), key0 + place(n % KEYS, tx, THREADS_K)
            head, query = np.int64(heads[row]), np.int64(queries[row])
            dense_at = dense_view[0] + item * dense_view[1] + head * dense_view[2] + query * dense_view[3]
            index_at = index_view[0] + item * index_view[1] + head * index_view[2]
            index_at += query // TILE_Q * index_view[3]
            start, stop = max(starts[row], first), min(stops[row], last)
            allowed = is_allowed(
                masks, dense_at, dense_view[4], index_at, index_view[4], start, stop, query, key
            )
            if HAS_MASK_MOD and allowed:
                allowed = mask_mod(b, head, query, key, *aux)
            if allowed:
                bits |= U(1) << U(n)
        return bits

    def attend(
        q, k, v, masks, bias, sinks, aux, out, lse, row_max, row_sum, sizes, cut, views, scale, softcap
    ):  # fmt: skip
        shared = cuda.shared.array(SHARED, real, alignment=ALIGNMENT)
        heads = cuda.shared.array(TILE_ROWS, np.int32)
        queries = cuda.shared.array(TILE_ROWS, np.int32)
        starts = cuda.shared.array(TILE_ROWS, np.int32)
        stops = cuda.shared.array(TILE_ROWS, np.int32)
        lines = cuda.shared.array(TILE_ROWS, np.int64)
        s = cuda.local.array((ROWS, KEYS), real)
        acc = cuda.local.array((ROWS, COLUMNS), real)
        peak = cuda.local.array(ROWS, real)
        tops = cuda.local.array(ROWS, real)
        total = cuda.local.array(ROWS, real)
        staged = cuda.local.array(STAGED_SCORES, real)
        staged_values = cuda.local.array(STAGED_VALUES, real)

        # What this block is to do.
        start, stop, _, tile_index, _ = masks
        rows = heads, queries, starts, stops
        q_view, k_view, v_view, start_view, stop_view, dense_view, index_view = views[:7]
        bias_view, sink_view, out_view, lse_view = views[7:]
        batch, num_heads, num_kv_heads, len_q, len_k, head_dim, value_dim = sizes
        n_tiles, n_parts, n_splits, split_keys, first_item = cut
        thread = cuda.threadIdx.x
        tx, ty = thread % THREADS_K, thread // THREADS_K
        own_rows, own_keys = U(ty * VECTOR), U(tx * VECTOR)
        block = cuda.blockIdx.x
        kv_head, block = block % num_kv_heads, block // num_kv_heads
        part, block = block % n_parts, block // n_parts
        split, block = block % n_splits, block // n_splits
        item, block = block % batch, block // batch
        b = first_item + item
        row0 = (n_tiles - 1 - block) * TILE_ROWS  # the last first: under a causal mask they have most to do
        column0 = part * TILE_COLUMNS
        group = num_heads // num_kv_heads
        n_rows = group * len_q

        # Rows past the last repeat it, and are not stored.
        for row in range(thread, TILE_ROWS, THREADS):
            at = min(row0 + row, n_rows - 1)
            head, query = kv_head * group + at // len_q, at % len_q
            heads[row], queries[row] = head, query
            lines[row] = q_view[0] + item * q_view[1] + head * q_view[2] + query * q_view[3]
            starts[row], stops[row] = 0, len_k
            if HAS_INTERVALS:
                starts[row] = start[U(start_view[0] + item * start_view[1] + query * start_view[2])]
                stops[row] = stop[U(stop_view[0] + item * stop_view[1] + query * stop_view[2])]
        for i in range(ROWS):
            peak[i], total[i] = MASKED, ZERO
            for c in range(COLUMNS):
                acc[i, c] = ZERO
        cuda.syncthreads()

        # The keys that any row may attend to, and those that all may.
        first, last, all_first, all_last = 0, len_k, 0, len_k
        if HAS_INTERVALS:
            first, last = len_k, 0
            for row in range(TILE_ROWS):
                if starts[row] < stops[row]:
                    first, last = min(first, starts[row]), max(last, stops[row])
                all_first, all_last = max(all_first, starts[row]), min(all_last, stops[row])
        first, last = max(first, split * split_keys), min(last, (split + 1) * split_keys)

        to_k = k_view[0] + item * k_view[1] + kv_head * k_view[2]
        to_v = v_view[0] + item * v_view[1] + kv_head * v_view[2]
        for key0 in range(first // TILE_KEYS * TILE_KEYS, last, TILE_KEYS):
            n_keys = min(TILE_KEYS, last - key0)
            is_inside = n_keys == TILE_KEYS and all_first <= key0 and key0 + TILE_KEYS <= all_last
            is_whole = is_inside
            if HAS_BIAS or HAS_BITS:
                is_whole = False
            allowed = ALL
            if HAS_MASK_MAP:
                some = np.int32(0)
                for row in range(thread, TILE_ROWS, THREADS):
                    line = index_view[0] + item * index_view[1] + heads[row] * index_view[2]
                    line += queries[row] // TILE_Q * index_view[3]
                    for key in range(key0 // TILE_K, (key0 + n_keys - 1) // TILE_K + 1):
                        if tile_index[U(line + key * index_view[4])] >= INDEX_FULL:
                            some = np.int32(1)
                if cuda.syncthreads_or(some) == 0:
                    continue
            if HAS_BITS:
                allowed = allowed_bits(
                    masks, dense_view, index_view, aux, rows, item, b, first, last, key0, tx, ty
                )
                if cuda.syncthreads_or(np.int32(1) if allowed != U(0) else np.int32(0)) == 0:
                    continue

            # Score.
            for i in range(ROWS):
                for c in range(KEYS):
                    s[i, c] = ZERO
            at_k = to_k + key0 * k_view[3]
            fetch_scores(
                q, k, lines, q_view[4], at_k, k_view[3], k_view[4], n_keys, 0, head_dim, thread, staged
            )
            cuda.syncthreads()
            put_scores(staged, shared, 0, thread)
            cuda.syncthreads()
            half = 0
            for column in range(DEPTH, head_dim + DEPTH, DEPTH):
                if column < head_dim:
                    fetch_scores(
                        q, k, lines, q_view[4], at_k, k_view[3], k_view[4], n_keys, column, head_dim, thread,
                        staged,
                    )  # fmt: skip
                add_scores(shared, own_rows + U(half * HALF), own_keys + U(half * HALF + TO_KEYS), s)
                if BUFFERS == 1:
                    cuda.syncthreads()
                else:
                    half = 1 - half
                if column < head_dim:
                    put_scores(staged, shared, half, thread)
                cuda.syncthreads()

            at_v = to_v + key0 * v_view[3]
            if not IS_WEIGHTS:
                wild = fetch_values(
                    v, at_v, v_view[3], v_view[4], 0, n_keys, column0, value_dim, thread, staged_values
                )

            # Softmax.
            for i in range(ROWS):
                for c in range(KEYS):
                    s[i, c] *= scale
                    if HAS_SOFTCAP:
                        s[i, c] = softcap * real(math.tanh(s[i, c] / softcap))
            if HAS_SCORE_MOD:
                for i in range(ROWS):
                    row = place(i, ty, THREADS_Q)
                    head, query = np.int64(heads[row]), np.int64(queries[row])
                    for c in range(KEYS):
                        # Past the last key it is given that one: `aux` may have nothing beyond.
                        key = min(key0 + place(c, tx, THREADS_K), len_k - 1)
                        s[i, c] = real(score_mod(s[i, c], b, head, query, key, *aux))
            if not is_whole:
                if not (HAS_BITS or is_inside):
                    allowed = allowed_bits(
                        masks, dense_view, index_view, aux, rows, item, b, first, last, key0, tx, ty
                    )
                for i in range(ROWS):
                    row = place(i, ty, THREADS_Q)
                    to_bias = bias_view[0] + item * bias_view[1]
                    to_bias += heads[row] * bias_view[2] + queries[row] * bias_view[3]
                    for c in range(KEYS):
                        x = MASKED
                        if (allowed >> U(i * KEYS + c)) & U(1) != U(0):
                            x = s[i, c]
                            if HAS_BIAS:
                                key = key0 + place(c, tx, THREADS_K)
                                one = real(bias[U(to_bias + key * bias_view[4])])
                                x = MASKED if one == MASKED else x + one
                        s[i, c] = x
            if IS_WEIGHTS:
                for i in range(ROWS):
                    row = place(i, ty, THREADS_Q)
                    if row0 + row < n_rows:
                        head, query = heads[row], queries[row]
                        line = (item * num_heads + head) * len_q + query
                        base, whole_sum = row_max[U(line)], row_sum[U(line)]
                        line = out_view[0] + item * out_view[1] + head * out_view[2] + query * out_view[3]
                        for c in range(KEYS):
                            key = key0 + place(c, tx, THREADS_K)
                            if s[i, c] != MASKED:
                                out[U(line + key * out_view[4])] = power(s[i, c] - base) / whole_sum
                continue
            masked = U(0)
            if HAS_SCORE_MOD or not is_whole:
                for i in range(ROWS):
                    for c in range(KEYS):
                        if s[i, c] == MASKED:
                            masked |= U(1) << U(i * KEYS + c)
            for i in range(ROWS):
                tops[i] = MASKED
                for c in range(KEYS):
                    tops[i] = larger_one(tops[i], s[i, c])
            largest(tops, shared, thread)
            for i in range(ROWS):
                top = larger_one(peak[i], tops[i])
                base = softmax_base(top)
                rescale = power(peak[i] - base)
                peak[i] = top
                sum_here = ZERO
                for c in range(KEYS):
                    s[i, c] = power(s[i, c] - base)
                    sum_here += s[i, c]
                total[i] = cuda.fma(total[i], rescale, sum_here)
                for c in range(COLUMNS):
                    acc[i, c] *= rescale
            if HAS_SCORE_MOD or not is_whole:
                for i in range(ROWS):
                    for c in range(KEYS):
                        if (masked >> U(i * KEYS + c)) & U(1) != U(0):
                            s[i, c] = MINUS_ZERO  # what no other weight is
            for c in range(KEYS):
                for i in range(ROWS):
                    at = U(place(c, tx, THREADS_K) * Q_LINE) + own_rows + apart(i, THREADS_Q)
                    shared[at] = s[i, c]

            # Accumulate.
            put_values(staged_values, shared, 0, thread)
            is_wild = cuda.syncthreads_or(wild) != 0
            half = 0
            for j0 in range(0, TILE_KEYS, VALUE_KEYS):
                wild = np.int32(0)
                if j0 + VALUE_KEYS < TILE_KEYS:
                    wild = fetch_values(
                        v, at_v, v_view[3], v_view[4], j0 + VALUE_KEYS, n_keys, column0, value_dim, thread,
                        staged_values,
                    )  # fmt: skip
                at = TO_VALUES + half * VALUES_HALF
                if is_wild and (HAS_SCORE_MOD or not is_whole):
                    # NaN and inf are kept from rows that may not read them.
                    for j in range(VALUE_KEYS):
                        for i in range(ROWS):
                            weight = shared[U((j0 + j) * Q_LINE) + own_rows + apart(i, THREADS_Q)]
                            if weight != ZERO or math.copysign(1.0, weight) > 0:
                                for c in range(COLUMNS):
                                    x = shared[U(at + j * TILE_COLUMNS) + own_keys + apart(c, THREADS_K)]
                                    acc[i, c] = cuda.fma(weight, x, acc[i, c])
                else:
                    add_values(shared, own_rows + U(j0 * Q_LINE), own_keys + U(at), acc)
                if BUFFERS == 1:
                    cuda.syncthreads()
                else:
                    half = 1 - half
                if j0 + VALUE_KEYS < TILE_KEYS:
                    put_values(staged_values, shared, half, thread)
                    is_wild = cuda.syncthreads_or(wild) != 0

        if IS_WEIGHTS:
            return
        summed(total, shared, thread)
        for i in range(ROWS):
            row = place(i, ty, THREADS_Q)
            if row0 + row < n_rows:
                head, query = heads[row], queries[row]
                base, whole_sum, factor = peak[i], total[i], ONE
                line = ((split * batch + item) * num_heads + head) * len_q + query
                at, step = line * value_dim, 1
                if not IS_PARTS:
                    sink = MASKED
                    if HAS_SINKS:
                        sink = real(sinks[U(sink_view[0] + head * sink_view[1])])
                    base = softmax_base(max(peak[i], sink))
                    rescale = power(peak[i] - base)
                    is_empty = whole_sum == ZERO  # of weights, the largest of which is 1
                    whole_sum = cuda.fma(whole_sum, rescale, power(sink - base))
                    factor = ZERO if is_empty else rescale / whole_sum
                    at = out_view[0] + item * out_view[1] + head * out_view[2] + query * out_view[3]
                    step = out_view[4]
                    if part == 0 and tx == 0:
                        to = lse_view[0] + item * lse_view[1] + head * lse_view[2] + query * lse_view[3]
                        lse[U(to)] = sink if is_empty else base * BACK + real(math.log(whole_sum))
                if part == 0 and tx == 0:
                    row_max[U(line)], row_sum[U(line)] = base, whole_sum
                for c in range(COLUMNS):
                    column = column0 + place(c, tx, THREADS_K)
                    if IS_EVEN or column < value_dim:
                        # +0 for a zero of either sign: a masked value may have given it that.
                        out[U(at + column * step)] = cuda.fma(acc[i, c], factor, ZERO)

    return cuda.jit(attend)


@cache
def merge_kernel(dtype: str, is_natural: bool, has_sinks: bool) -> Any:
    """``merge(parts, maxima, sums, sinks, out, lse, row_max, row_sum, sizes, views, n_splits)``: what
    `attend` left of the splits together, divided by the sum of its weights, with the sinks.

    A thread for each column of each row ``(B, H, L)``. views: of sinks, out and lse; all else is as `attend`
    has it.
    """
    real = np.dtype(dtype).type
    ZERO, MASKED = real(0), real(-math.inf)
    BACK = _unit(dtype, is_natural)
    power = _power(dtype, is_natural)

    def merge(parts, maxima, sums, sinks, out, lse, row_max, row_sum, sizes, views, n_splits):
        batch, num_heads, _, len_q, _, _, value_dim = sizes
        sink_view, out_view, lse_view = views
        n_rows, n_columns = batch * num_heads * len_q, max(value_dim, 1)
        thread = cuda.grid(1)
        row, column = thread // n_columns, thread % n_columns
        if row >= n_rows:
            return
        item, head, query = row // len_q // num_heads, row // len_q % num_heads, row % len_q
        sink = MASKED
        if has_sinks:
            sink = real(sinks[U(sink_view[0] + head * sink_view[1])])
        top = sink
        for split in range(n_splits):
            x = maxima[U(split * n_rows + row)]
            top = x if x > top else top
        base = top if top > MASKED else ZERO
        acc, whole_sum, is_empty = ZERO, power(sink - base), True
        for split in range(n_splits):
            line = split * n_rows + row
            weight = power(maxima[U(line)] - base)
            if sums[U(line)] != ZERO:
                is_empty = False
            whole_sum = cuda.fma(weight, sums[U(line)], whole_sum)
            if value_dim > 0:
                acc = cuda.fma(weight, parts[U(line * value_dim + column)], acc)
        if value_dim > 0:
            line = out_view[0] + item * out_view[1] + head * out_view[2] + query * out_view[3]
            # With + 0 for a zero of either sign, as in `attend`.
            out[U(line + column * out_view[4])] = ZERO if is_empty else acc / whole_sum + ZERO
        if column == 0:
            row_max[U(row)], row_sum[U(row)] = base, whole_sum
            line = lse_view[0] + item * lse_view[1] + head * lse_view[2] + query * lse_view[3]
            lse[U(line)] = sink if is_empty else base * BACK + real(math.log(whole_sum))

    return cuda.jit(merge)
