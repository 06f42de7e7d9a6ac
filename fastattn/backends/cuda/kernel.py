"""The kernels: `attend`, which is score, softmax and accumulate over tiles of keys, and `merge`. See the
package's docstring.

Each array is passed as the address of its first element and its strides in elements: an index is a sum.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import config, cuda

from fastattn.backends.cuda import blocks, epilogue, mask_tile, stages, tiles
from fastattn.backends.cuda.blocks import Rows
from fastattn.backends.cuda.cache import cached
from fastattn.backends.cuda.form import Form
from fastattn.backends.cuda.intrinsics import U, memory, read_as, write_as
from fastattn.backends.cuda.tiles import Thread, element
from fastattn.masks.map import EMPTY, FULL

#: Of shared memory in bytes, for loads of several elements; the simulator takes none.
ALIGNMENT = None if config.ENABLE_CUDASIM else 16


@cache
def attend_kernel(form: Form, score_mod: Any = None, mask_mod: Any = None) -> Any:
    """``attend(inputs, masks, results, sizes, cut, aux, scale, softcap)``.

    inputs: q, k, v, bias, sinks. masks: band, lengths, intervals, dense, tile_index, tile_bits. results: out,
    lse, row_max, row_sum. Each is a view, the address of its first element and its strides in elements, or
    empty where this specialisation has none. band: how many keys on the left and on the right of its own a
    query may attend to, and 1 where the last query is aligned with the last key, else 0. intervals: the views
    of starts and stops, ``(B, L)``. sizes: B, H, K, L, S, D, E; where q, k and v hold pairs, D is of
    pairs. cut: query tiles, tiles of the value's columns, keys of a split, and the functions' number of the
    first item. aux: what the functions read. scale: times log2(e) unless the scores are natural. Other dtypes
    are converted as they are read.

    There is a block of threads for each query tile, tile of columns, key/value head, split and batch item.
    row_max and row_sum, contiguous, receive the maxima that weights are relative to, and the sums of weights.
    For partial results these are ``(splits, B, H, L)``, without sinks, and `out`, contiguous ``(splits, B, H,
    L, E)``, receives sums of weights times values. A specialisation for weights reads row_max and row_sum,
    and writes the softmax to `out`, which is ``(B, H, L, S)`` and holds zeros. 16-bit
    results are rounded as they are written.
    """
    real, shape = form.real, form.shape
    ROWS, KEYS, COLUMNS = shape.rows, shape.keys, shape.columns
    TILE_ROWS, TILE_KEYS, THREADS_K = shape.tile_q, shape.tile_k, shape.threads_k
    SHARED, STAGED = tiles.layout(shape).size, tiles.turns(shape)
    STAGED_SCORES, STAGED_VALUES = (STAGED.queries + STAGED.keys) * shape.span, STAGED.values * shape.span
    HAS_BIAS, HAS_MASK_MAP = form.has_bias, form.has_mask_map
    HAS_TESTS = form.has_dense or form.has_mask_mod  # of each score
    HAS_MASKS = HAS_TESTS or HAS_MASK_MAP  # beside intervals
    CHANGES_SCORES = HAS_BIAS or form.has_score_mod  # perhaps to -inf
    FETCHES_AHEAD = shape.is_tensor and not HAS_MASKS and form.result != "weights"
    IS_WEIGHTS, ZERO, MASKED = form.result == "weights", real(0), real(-math.inf)
    ALL = U((1 << ROWS * KEYS) - 1)  # a bit for each score of a thread

    queries_of, keys_of, values_of = memory(form.stored.q), memory(form.stored.k), memory(form.stored.v)
    find_block, find_rows = blocks.find_block(shape), blocks.find_rows(form)
    find_keys, map_state = blocks.find_keys(form), mask_tile.map_state(form)
    allowed_bits = mask_tile.allowed_bits(form, mask_mod)
    modify_scores, masked_bits = epilogue.modify_scores(form, score_mod), epilogue.masked_bits(form)
    add_bias, mask_scores = epilogue.mask_scores(form, True), epilogue.mask_scores(form, False)
    score, fetch_scores, fetch_values = stages.score(form), tiles.fetch_scores(form), tiles.fetch_values(form)
    softmax, accumulate = stages.softmax(form), stages.accumulate(form)
    write_weights, finish = stages.write_weights(form), stages.finish(form)

    def attend(inputs, masks, results, sizes, cut, aux, scale, softcap):
        shared = cuda.shared.array(SHARED, real, alignment=ALIGNMENT)
        heads = cuda.shared.array(TILE_ROWS, np.int32)
        queries = cuda.shared.array(TILE_ROWS, np.int32)
        starts = cuda.shared.array(TILE_ROWS, np.int32)
        stops = cuda.shared.array(TILE_ROWS, np.int32)
        lines = cuda.shared.array(TILE_ROWS, np.int64)
        s = cuda.local.array((ROWS, KEYS), real)
        acc = cuda.local.array((ROWS, COLUMNS), real)
        own_max = cuda.local.array(ROWS, real)
        tile_max = cuda.local.array(ROWS, real)
        own_sum = cuda.local.array(ROWS, real)
        staged = cuda.local.array(STAGED_SCORES, real)
        staged_values = cuda.local.array(STAGED_VALUES, real)

        q_view, k_view, v_view, bias_view, sink_view = inputs
        q, k, v = queries_of(q_view), keys_of(k_view), values_of(v_view)
        _, _, _, _, len_k, head_dim, value_dim = sizes
        number = cuda.threadIdx.x
        thread, block = Thread(number, number % THREADS_K, number // THREADS_K), find_block(sizes, cut)
        rows = Rows(heads, queries, lines, starts, stops)
        find_rows(rows, block, thread, sizes, q_view, masks)
        for i in range(ROWS):
            own_max[i], own_sum[i] = MASKED, ZERO
            for c in range(COLUMNS):
                acc[i, c] = ZERO
        cuda.syncthreads()
        keys = find_keys(rows, len_k, block.split, cut[2])
        is_ahead = False

        for key0 in range(keys.low // TILE_KEYS * TILE_KEYS, keys.high, TILE_KEYS):
            n_keys = min(TILE_KEYS, keys.high - key0)
            # Whether all rows may attend to all keys.
            is_full = n_keys == TILE_KEYS and keys.all_start <= key0 and key0 + TILE_KEYS <= keys.all_stop
            if HAS_MASK_MAP:
                state = map_state(masks, rows, block, key0, thread)
                if state == EMPTY:
                    continue
                is_full = is_full and state == FULL
            if HAS_TESTS:
                is_full = False
            allowed = ALL
            if not is_full:
                allowed = allowed_bits(masks, aux, rows, block, keys, key0, thread)
                if HAS_MASKS and cuda.syncthreads_or(np.int32(allowed != U(0))) == 0:
                    continue
                if HAS_TESTS:
                    is_full = cuda.syncthreads_and(np.int32(allowed == ALL)) != 0

            at_k = element(k_view, block.item, block.kv_head, key0)
            score(s, q, k, lines, q_view, k_view, at_k, n_keys, head_dim, thread, shared, staged, is_ahead)
            modify_scores(s, scale, softcap, aux, rows, block, key0, len_k, thread)
            if is_full:
                if HAS_BIAS:
                    add_bias(s, allowed, bias_view, rows, block, key0, thread)
            else:
                mask_scores(s, allowed, bias_view, rows, block, key0, thread)
            if IS_WEIGHTS:
                write_weights(s, results, rows, block, sizes, key0, thread)
                continue
            at_v = element(v_view, block.item, block.kv_head, key0)
            fetch_values(  # the first of them, which are on their way during the softmax
                v, at_v, v_view[3], v_view[4], n_keys, block.column0, value_dim, number, staged_values
            )
            is_partial = CHANGES_SCORES or not is_full
            masked = U(0)
            if is_partial:
                masked = masked_bits(s)
            softmax(s, acc, own_max, own_sum, tile_max, thread, shared)
            if FETCHES_AHEAD:  # of the next tile
                is_ahead = key0 + TILE_KEYS < keys.high
                if is_ahead:
                    fetch_scores(
                        q, k, lines, q_view[4], at_k + TILE_KEYS * k_view[3], k_view[3], k_view[4],
                        min(TILE_KEYS, keys.high - key0 - TILE_KEYS), 0, head_dim, number, staged,
                    )  # fmt: skip
            accumulate(
                acc, s, masked, v, v_view, at_v, n_keys, is_partial, block, value_dim, thread, shared,
                staged_values,
            )  # fmt: skip
        if not IS_WEIGHTS:
            finish(acc, own_max, own_sum, sink_view, results, rows, block, sizes, thread, shared)

    kernel = cuda.jit(attend)
    return kernel if score_mod or mask_mod else cached(kernel, form)


@cache
def merge_kernel(form: Form) -> Any:
    """``merge(parts, sink_view, results, sizes, n_splits)``.

    Merges the partial results of the splits, with the sinks, and divides by the sums of the weights.

    parts: the views of what `attend` wrote to out, row_max and row_sum. All else is as in `attend_kernel`.
    There is a thread for each column of each row ``(B, H, L)``.
    """
    real, reals = form.real, memory(form.dtype)
    sinks_of, read_sink = memory(form.stored.sinks), read_as(form.dtype, form.stored.sinks)
    out_of, write = memory(form.stored.out), write_as(form.stored.out)
    HAS_SINKS, KEEPS_SUMS = form.has_sinks, form.keeps_sums
    ZERO, MASKED = real(0), real(-math.inf)
    UNIT = stages.natural_unit(form.dtype, form.is_natural)
    weigh = stages.power(form.dtype, form.is_natural)

    def merge(parts, sink_view, results, sizes, n_splits):
        batch, num_heads, _, len_q, _, _, value_dim = sizes
        acc_of, maxima, sums = reals(parts[0]), reals(parts[1]), reals(parts[2])
        out_view, lse_view, max_view, sum_view = results
        n_rows, n_columns = batch * num_heads * len_q, max(value_dim, 1)
        thread = cuda.grid(1)
        row, column = thread // n_columns, thread % n_columns
        if row >= n_rows:
            return
        item, head, query = row // len_q // num_heads, row // len_q % num_heads, row % len_q
        sink = MASKED
        if HAS_SINKS:
            sink = read_sink(sinks_of(sink_view), U(head * sink_view[1]))
        top = sink
        for split in range(n_splits):
            x = maxima[U(split * n_rows + row)]
            top = x if x > top else top
        base = top if top > MASKED else ZERO
        acc, whole_sum, is_empty = ZERO, weigh(sink - base), True
        for split in range(n_splits):
            line = split * n_rows + row
            weight = weigh(maxima[U(line)] - base)
            if sums[U(line)] != ZERO:
                is_empty = False
            whole_sum = cuda.fma(weight, sums[U(line)], whole_sum)
            if value_dim > 0:
                acc = cuda.fma(weight, acc_of[U(line * value_dim + column)], acc)
        if value_dim > 0:
            line = element(out_view, item, head, query)
            # + 0 turns -0 into 0, as in `attend`.
            one = ZERO if is_empty else acc / whole_sum + ZERO
            write(out_of(out_view), U(line + column * out_view[4]), one)
        if column == 0:
            if KEEPS_SUMS:
                reals(max_view)[U(row)], reals(sum_view)[U(row)] = base, whole_sum
            one = sink if is_empty else base * UNIT + real(math.log(whole_sum))
            reals(lse_view)[U(element(lse_view, item, head, query))] = one

    return cached(cuda.jit(merge), form)
