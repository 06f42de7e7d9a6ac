"""The stages of `kernel.attend_kernel`: score, softmax, accumulate and finish."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from fastattn.backends.cuda import tensor, tiles
from fastattn.backends.cuda.form import Form
from fastattn.backends.cuda.intrinsics import U, larger, memory, power_of_two, read_as, write_as
from fastattn.backends.cuda.pairs import pairs_of
from fastattn.backends.cuda.tiles import element, layout


@cache
def power(dtype: str, is_natural: bool) -> Any:
    """The weight of a score that is x below the largest one: 2^x, or e^x where scores are natural."""
    LOG2E = np.dtype(dtype).type(math.log2(math.e))
    exp2 = power_of_two(dtype)

    @cuda.jit(device=True)
    def power(x):
        return exp2(x * LOG2E if is_natural else x)

    return power


def natural_unit(dtype: str, is_natural: bool) -> Any:
    """The factor that turns scores into natural units, which sinks always have."""
    return np.dtype(dtype).type(1 if is_natural else math.log(2))


def score(form: Form) -> Any:
    """S = Q K^T.

    The rows of queries begin at `lines`, the first of n_keys keys at at_k. q, k and their views are as in
    `kernel.attend_kernel`. is_ahead: the first piece is fetched already.
    """
    shape, where = form.shape, layout(form.shape)
    ROWS, KEYS, DEPTH, BUFFERS, UNIT = shape.rows, shape.keys, shape.depth, shape.buffers, form.unit
    TO_KEYS, HALF, ZERO, IS_TENSOR = where.to_keys, where.half, form.real(0), shape.is_tensor
    fetch_scores, put_scores = tiles.fetch_scores(form), tiles.put_scores(form)
    add_scores = tensor.add_scores(form) if IS_TENSOR else tiles.add_scores(form)
    add_odd_scores, put_without_odd = tensor.add_odd_scores(form), tiles.put_scores(form, False)
    #: Nothing else is put where queries and keys are, and there are barriers before they are put again.
    IS_APART = IS_TENSOR and form.result != "weights"

    @cuda.jit(device=True)
    def put(staged, shared, half, thread):
        """Whether any of the piece is odd, where tensor cores multiply."""
        is_odd = put_scores(staged, shared, half, thread)
        if not IS_TENSOR:
            cuda.syncthreads()
            return False
        if cuda.syncthreads_or(is_odd) == 0:
            return False
        put_without_odd(staged, shared, half, thread)
        cuda.syncthreads()
        return True

    @cuda.jit(device=True)
    def score(s, q, k, lines, q_view, k_view, at_k, n_keys, head_dim, thread, shared, staged, is_ahead):
        for i in range(ROWS):
            for c in range(KEYS):
                s[i, c] = ZERO
        if not is_ahead:
            fetch_scores(
                q, k, lines, q_view[4], at_k, k_view[3], k_view[4], n_keys, 0, head_dim, thread.number, staged
            )
        if not IS_APART:
            cuda.syncthreads()
        is_odd = put(staged, shared, 0, thread.number)
        half, column, n_columns = 0, np.int32(DEPTH), (head_dim + (UNIT - 1)) // UNIT
        while column < n_columns + DEPTH:  # Numba counts a range twice, in four registers more
            if column < n_columns:
                fetch_scores(
                    q, k, lines, q_view[4], at_k, k_view[3], k_view[4], n_keys, column, head_dim,
                    thread.number, staged,
                )  # fmt: skip
            add_scores(shared, U(half * HALF), U(half * HALF + TO_KEYS), thread, s)
            if BUFFERS == 1:
                cuda.syncthreads()
            else:
                half = 1 - half
            if column < n_columns:
                is_odd |= put(staged, shared, half, thread.number)
            elif not IS_APART:
                cuda.syncthreads()
            column = np.int32(column + DEPTH)
        if IS_TENSOR and is_odd:
            column = np.int32(0)
            while column < n_columns:
                fetch_scores(
                    q, k, lines, q_view[4], at_k, k_view[3], k_view[4], n_keys, column, head_dim,
                    thread.number, staged,
                )  # fmt: skip
                cuda.syncthreads()
                put_scores(staged, shared, 0, thread.number)
                cuda.syncthreads()
                add_odd_scores(shared, U(0), U(TO_KEYS), thread, s)
                column = np.int32(column + DEPTH)
            cuda.syncthreads()

    return score


def softmax(form: Form) -> Any:
    """One step of the online softmax.

    row_max is updated with the scores. s becomes the weights power(s - row_max). acc and row_sum are rescaled
    to the new row_max; the weights of the thread's own keys are added to row_sum. Scores of -inf give exactly
    0, also while row_max is -inf. tile_max has room for a maximum per row.
    """
    shape, ZERO, MASKED = form.shape, form.real(0), form.real(-math.inf)
    ROWS, KEYS, COLUMNS = shape.rows, shape.keys, shape.columns
    weigh, larger_one = power(form.dtype, form.is_natural), larger(form.dtype)
    largest = tiles.reduce_rows(shape, larger_one)

    @cuda.jit(device=True)
    def softmax(s, acc, row_max, row_sum, tile_max, thread, shared):
        for i in range(ROWS):
            tile_max[i] = MASKED
            for c in range(KEYS):
                tile_max[i] = larger_one(tile_max[i], s[i, c])
        largest(tile_max, shared, thread.number)
        for i in range(ROWS):
            top = larger_one(row_max[i], tile_max[i])
            base = top if top > MASKED else ZERO  # in an empty row, as -inf less -inf would be NaN
            rescale = weigh(row_max[i] - base)
            row_max[i] = top
            sum_here = ZERO
            for c in range(KEYS):
                s[i, c] = weigh(s[i, c] - base)
                sum_here += s[i, c]
            row_sum[i] = cuda.fma(row_sum[i], rescale, sum_here)
            for c in range(COLUMNS):
                acc[i, c] *= rescale

    return softmax


def _put_weights(form: Form) -> Any:
    """Puts the weights into shared memory, transposed.

    In a partial tile, weights with a bit in `masked` become -0. No other weight is -0.
    """
    shape, Q_LINE, MINUS_ZERO = form.shape, layout(form.shape).q_line, form.real(-0.0)
    ROWS, KEYS, ROW_VECTOR = shape.rows, shape.keys, shape.row_vector
    THREADS_Q, THREADS_K = shape.threads_q, shape.threads_k
    place, apart = tiles.place(shape.vector), tiles.apart(ROW_VECTOR)

    @cuda.jit(device=True)
    def put_weights(s, masked, is_partial, thread, shared):
        if is_partial:
            for i in range(ROWS):
                for c in range(KEYS):
                    if (masked >> U(i * KEYS + c)) & U(1) != U(0):
                        s[i, c] = MINUS_ZERO
        for c in range(KEYS):
            for i in range(ROWS):
                line = U(place(c, thread.x, THREADS_K) * Q_LINE)
                shared[line + U(thread.y * ROW_VECTOR) + apart(i, THREADS_Q)] = s[i, c]

    return put_weights


def accumulate(form: Form) -> Any:
    """O += P V, `value_keys` keys at a time.

    The first of the tile's n_keys keys begins at at_v. The first piece of values is fetched already. v and
    v_view are as in `kernel.attend_kernel`. The weights are in s; those with a bit in `masked` add nothing,
    whatever the value.
    """
    shape, where = form.shape, layout(form.shape)
    TILE_KEYS, VALUE_KEYS, BUFFERS = shape.tile_k, shape.value_keys, shape.buffers
    VECTOR, ROW_VECTOR, IS_TENSOR = shape.column_vector, shape.row_vector, shape.is_tensor
    Q_LINE, V_LINE, TO_VALUES, VALUES_HALF = where.q_line, where.v_line, where.to_values, where.values_half
    ROWS, COLUMNS, ZERO, ONE = shape.rows, shape.columns, form.real(0), form.real(1)
    THREADS_Q, THREADS_K = shape.threads_q, shape.threads_k
    row_apart, apart, PAIRS, PAIR = tiles.apart(ROW_VECTOR), tiles.apart(VECTOR), shape.pairs, shape.pair
    first, second = pairs_of(PAIRS)[:2] if PAIRS else (None, None)
    fetch_values, put_values = tiles.fetch_values(form), tiles.put_values(form)
    put_weights = _put_weights(form)
    add_values = tiles.add_products(form, VALUE_KEYS, COLUMNS, V_LINE, VECTOR)

    @cuda.jit(device=True)
    def value(element, c):
        """The number of the thread's c-th column: pairs are of two columns."""
        if not PAIRS:
            return element
        return second(element) if c % 2 else first(element)

    @cuda.jit(device=True)
    def add_nonfinite_values(acc, own_rows, own_columns, shared):
        """Masked weights add nothing, so that a nonfinite value reaches no row that may not read it."""
        for j in range(VALUE_KEYS):
            for i in range(ROWS):
                weight = shared[own_rows + U(j * Q_LINE) + row_apart(i, THREADS_Q)]
                if weight != ZERO or math.copysign(ONE, weight) > ZERO:
                    for c in range(COLUMNS):
                        x = shared[own_columns + U(j * V_LINE) + apart(c, THREADS_K) // U(PAIR)]
                        acc[i, c] = cuda.fma(weight, value(x, c), acc[i, c])

    @cuda.jit(device=True)
    def places(thread, j0, half):
        """Where a thread's weights and values of a piece begin."""
        own_rows, own_columns = U(thread.y * ROW_VECTOR), U(thread.x * (VECTOR // PAIR))
        return own_rows + U(j0 * Q_LINE), own_columns + U(TO_VALUES + half * VALUES_HALF)

    @cuda.jit(device=True)
    def accumulate(
        acc, s, masked, v, v_view, at_v, n_keys, is_partial, block, value_dim, thread, shared, staged
    ):  # fmt: skip
        put_weights(s, masked, is_partial, thread, shared)
        has_nonfinite = cuda.syncthreads_or(put_values(staged, shared, 0, thread.number)) != 0
        half, j0 = 0, np.int32(0)
        while j0 < TILE_KEYS:
            if j0 + VALUE_KEYS < TILE_KEYS:
                at_v += VALUE_KEYS * v_view[3]
                n_keys -= VALUE_KEYS
                fetch_values(
                    v, at_v, v_view[3], v_view[4], n_keys, block.column0, value_dim, thread.number, staged
                )
            to_weights, to_values = places(thread, j0, half)
            if has_nonfinite and is_partial:
                add_nonfinite_values(acc, to_weights, to_values, shared)
            else:
                add_values(shared, to_weights, to_values, acc)
            if BUFFERS == 1:
                cuda.syncthreads()
            else:
                half = 1 - half
            if j0 + VALUE_KEYS < TILE_KEYS:
                has_nonfinite = cuda.syncthreads_or(put_values(staged, shared, half, thread.number)) != 0
            j0 = np.int32(j0 + VALUE_KEYS)

    if not IS_TENSOR:
        return accumulate
    add_piece, NUM_THREADS = tensor.add_values(form), shape.num_threads
    put_without_odd = tiles.put_values(form, keeps_odd=False)
    put_odd = tiles.put_values(form, keeps_others=False)

    @cuda.jit(device=True)
    def put(staged, shared, half, thread):
        """Whether any of the piece is odd."""
        if cuda.syncthreads_or(put_values(staged, shared, half, thread)) == 0:
            return False
        put_without_odd(staged, shared, half, thread)
        cuda.syncthreads()
        return True

    @cuda.jit(device=True)
    def accumulate_by_tensor_cores(
        acc, s, masked, v, v_view, at_v, n_keys, is_partial, block, value_dim, thread, shared, staged
    ):  # fmt: skip
        is_odd = put(staged, shared, 0, thread.number)
        half, j0 = 0, np.int32(0)
        # Not known to compilers, which would write the loop out: see `tensor.add_values`.
        tile_keys = np.int32(cuda.blockDim.x * TILE_KEYS // NUM_THREADS)
        while j0 < tile_keys:
            if j0 + VALUE_KEYS < tile_keys:
                fetch_values(
                    v, at_v + (j0 + VALUE_KEYS) * v_view[3], v_view[3], v_view[4], n_keys - (j0 + VALUE_KEYS),
                    block.column0, value_dim, thread.number, staged,
                )  # fmt: skip
            add_piece(shared, U(TO_VALUES + half * VALUES_HALF), thread, s, acc)
            half = 1 - half
            if j0 + VALUE_KEYS < tile_keys:
                is_odd |= put(staged, shared, half, thread.number)
            j0 = np.int32(j0 + VALUE_KEYS)
        if is_odd:
            put_weights(s, masked, is_partial, thread, shared)
            j0 = np.int32(0)
            while j0 < TILE_KEYS:
                fetch_values(
                    v, at_v + j0 * v_view[3], v_view[3], v_view[4], n_keys - j0, block.column0, value_dim,
                    thread.number, staged,
                )  # fmt: skip
                cuda.syncthreads()
                put_odd(staged, shared, 0, thread.number)
                cuda.syncthreads()
                to_weights, to_values = places(thread, j0, 0)
                add_nonfinite_values(acc, to_weights, to_values, shared)
                j0 = np.int32(j0 + VALUE_KEYS)
            cuda.syncthreads()  # the next queries and keys go where the weights are

    return accumulate_by_tensor_cores


def write_weights(form: Form) -> Any:
    """Writes the softmax of the scores of the keys from key0 on to the weights, which hold zeros."""
    shape, MASKED, reals = form.shape, form.real(-math.inf), memory(form.dtype)
    weights_of, write = memory(form.stored.out), write_as(form.stored.out)
    ROWS, KEYS, THREADS_Q, THREADS_K = shape.rows, shape.keys, shape.threads_q, shape.threads_k
    weigh = power(form.dtype, form.is_natural)
    row_place, place = tiles.place(shape.row_vector), tiles.place(shape.vector)

    @cuda.jit(device=True)
    def write_weights(s, results, rows, block, sizes, key0, thread):
        _, num_heads, _, len_q, _, _, _ = sizes
        out_view, _, max_view, sum_view = results
        weights, row_max, row_sum = weights_of(out_view), reals(max_view), reals(sum_view)
        for i in range(ROWS):
            row = row_place(i, thread.y, THREADS_Q)
            if block.row0 + row < block.n_rows:
                head, query = rows.heads[row], rows.queries[row]
                line = (block.item * num_heads + head) * len_q + query
                base, whole_sum = row_max[U(line)], row_sum[U(line)]
                line = element(out_view, block.item, head, query)
                for c in range(KEYS):
                    key = key0 + place(c, thread.x, THREADS_K)
                    if s[i, c] != MASKED:
                        one = weigh(s[i, c] - base) / whole_sum
                        write(weights, U(line + key * out_view[4]), one)

    return write_weights


def finish(form: Form) -> Any:
    """The results of a thread's rows and columns, from the state after all keys.

    sink_view and results are as in `kernel.attend_kernel`.
    """
    real, shape, reals = form.real, form.shape, memory(form.dtype)
    sinks_of, read_sink = memory(form.stored.sinks), read_as(form.dtype, form.stored.sinks)
    stored = form.dtype if form.result == "parts" else form.stored.out
    out_of, write = memory(stored), write_as(stored)
    KEEPS_SUMS = form.keeps_sums or form.result == "parts"
    ROWS, COLUMNS, THREADS_Q, THREADS_K = shape.rows, shape.columns, shape.threads_q, shape.threads_k
    HAS_SINKS, IS_EVEN, IS_PARTS = form.has_sinks, form.is_even, form.result == "parts"
    ZERO, ONE, MASKED, UNIT = real(0), real(1), real(-math.inf), natural_unit(form.dtype, form.is_natural)
    weigh = power(form.dtype, form.is_natural)
    row_place, place = tiles.place(shape.row_vector), tiles.place(shape.column_vector)

    @cuda.jit(device=True)
    def add(x, y):
        return x + y

    sum_rows = tiles.reduce_rows(shape, add)

    @cuda.jit(device=True)
    def finish(acc, row_max, row_sum, sink_view, results, rows, block, sizes, thread, shared):
        batch, num_heads, _, len_q, _, _, value_dim = sizes
        out_view, lse_view, max_view, sum_view = results
        out = out_of(out_view)
        item = block.item
        sum_rows(row_sum, shared, thread.number)
        for i in range(ROWS):
            row = row_place(i, thread.y, THREADS_Q)
            if block.row0 + row < block.n_rows:
                head, query = rows.heads[row], rows.queries[row]
                base, whole_sum, factor = row_max[i], row_sum[i], ONE
                line = ((block.split * batch + item) * num_heads + head) * len_q + query
                at, step = line * value_dim, 1
                if not IS_PARTS:
                    sink = MASKED
                    if HAS_SINKS:
                        sink = read_sink(sinks_of(sink_view), U(head * sink_view[1]))
                    top = max(row_max[i], sink)
                    base = top if top > MASKED else ZERO
                    rescale = weigh(row_max[i] - base)
                    is_empty = whole_sum == ZERO  # of weights, the largest of which is 1
                    whole_sum = cuda.fma(whole_sum, rescale, weigh(sink - base))
                    factor = ZERO if is_empty else rescale / whole_sum
                    at, step = element(out_view, item, head, query), out_view[4]
                    if block.column_tile == 0 and thread.x == 0:
                        one = sink if is_empty else base * UNIT + real(math.log(whole_sum))
                        reals(lse_view)[U(element(lse_view, item, head, query))] = one
                if KEEPS_SUMS and block.column_tile == 0 and thread.x == 0:
                    reals(max_view)[U(line)], reals(sum_view)[U(line)] = base, whole_sum
                for c in range(COLUMNS):
                    column = block.column0 + place(c, thread.x, THREADS_K)
                    if IS_EVEN or column < value_dim:
                        # +0 for a zero of either sign: a masked value may have given it that.
                        write(out, U(at + column * step), cuda.fma(acc[i, c], factor, ZERO))

    return finish
