"""What a block of threads does with tiles: fetch a piece of the arrays, put it into shared memory, multiply.

A piece is fetched into registers while the one before it is multiplied, then put into the other half of its
place in shared memory. So loads overlap the arithmetic, and a piece takes one barrier.

Shared memory is one array, cut by hand: the weights take the place of queries and keys. Lines of a tile are
padded by a vector, so that a column of it lies in different banks.

A thread's elements lie in vectors; between two of them lie those of all other threads. So
neighbouring threads read neighbouring memory. Indices are unsigned: Numba would test signed ones for
counting from the end.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import config, cuda

from fastattn.backends.cuda.form import Form, Shape
from fastattn.backends.cuda.intrinsics import U, read_as, same_bits, vector_fetch
from fastattn.backends.cuda.pairs import pairs_of

#: Threads that exchange registers. In the simulator none do: they use shared memory.
LANES = 1 if config.ENABLE_CUDASIM else 32


class Layout(NamedTuple):
    """The places in shared memory, in elements. Queries and the weights begin at 0."""

    q_line: int  #: of the weights, and of queries where they lie transposed
    k_line: int
    v_line: int
    to_keys: int  #: behind the queries
    half: int  #: of queries and keys
    to_values: int
    values_half: int
    to_sums: int  #: of reductions over threads
    size: int


def layout(shape: Shape) -> Layout:
    """How shared memory is cut for tiles of this shape."""
    q_line, k_line, v_line = shape.tile_q + shape.row_vector, shape.tile_k + shape.vector, shape.tile_columns
    to_keys = shape.depth * q_line
    half = to_keys + shape.depth * k_line
    if shape.is_tensor:  # rows of queries and keys; half of the banks are enough for a load of queries
        to_keys = shape.depth * shape.tile_q
        half, v_line = to_keys + shape.depth * shape.tile_k, v_line // shape.pair + 4
    to_values = max(shape.buffers * half, shape.tile_k * q_line)
    to_values += -to_values % 4  # for loads of 16 bytes
    values_half = shape.value_keys * v_line
    to_sums = to_values + shape.buffers * values_half
    sums = shape.tile_q * (shape.threads_k // LANES if shape.threads_k > LANES else 0)
    return Layout(q_line, k_line, v_line, to_keys, half, to_values, values_half, to_sums, to_sums + sums)


class Turns(NamedTuple):
    """How often all threads of a block fetch `span` elements each for one piece."""

    queries: int
    keys: int
    values: int


def turns(shape: Shape) -> Turns:
    """The turns for tiles of this shape. Queries alone may take a last turn with fewer threads."""
    groups, column_groups = shape.depth // shape.span, shape.tile_columns // shape.pair // shape.span
    return Turns(
        -(-shape.tile_q * groups // shape.num_threads),
        shape.tile_k * groups // shape.num_threads,
        shape.value_keys * column_groups // shape.num_threads,
    )


class Thread(NamedTuple):
    """A thread of a block of threads, and its place among them."""

    number: int
    x: int  #: along the keys, and along the columns of the values
    y: int  #: along the query rows


@cuda.jit(device=True)
def element(view, i, j, k):
    """Where the first of the elements [i, j, k] of an array is, from its first element on."""
    return i * view[1] + j * view[2] + k * view[3]


@cache
def place(VECTOR: int) -> Any:
    """Where the i-th element of a thread is in a tile that `threads` threads share, VECTOR elements each at a
    time."""

    @cuda.jit(device=True)
    def place(i, thread, threads):
        return i // VECTOR * (VECTOR * threads) + thread * VECTOR + i % VECTOR

    return place


@cache
def apart(VECTOR: int) -> Any:
    """How far the i-th element of a thread is from its first, in the tile of `place`."""

    @cuda.jit(device=True)
    def apart(i, threads):
        return U(i) // U(VECTOR) * U(VECTOR * threads) + U(i) % U(VECTOR)

    return apart


@cache
def fetch(form: Form, stored: str) -> Any:
    """Fetches `span` elements of an array, from element `at` on and `step` apart, into staged[to] and on.

    Those past the first `count` are 0. stored: the dtype of the array in memory, of the numbers of pairs that
    of their bits.
    """
    SPAN, UNIT, IS_PACKED, ZERO = form.shape.span, form.unit, form.is_packed, form.real(0)
    fetch_vector, read = vector_fetch(SPAN, form.dtype, stored), read_as(form.dtype, stored)
    pair_of = same_bits("uint32", "float32")

    @cuda.jit(device=True)
    def fetch(array, at, step, count, staged, to):
        if IS_PACKED:
            if count > 0:
                fetch_vector(array, U(at), staged, to)
            else:
                for e in range(SPAN):
                    staged[to + e] = ZERO
        elif UNIT == 2:
            for e in range(SPAN):
                bits = U(0)
                for half in range(2):
                    if 2 * e + half < count:
                        bits |= U(array[U(at + (2 * e + half) * step)]) << U(16 * half)
                staged[to + e] = pair_of(np.uint32(bits))
        else:
            for e in range(SPAN):
                x = ZERO
                if e < count:
                    x = read(array, U(at + e * step))
                staged[to + e] = x

    return fetch


def fetch_scores(form: Form) -> Any:
    """Fetches `depth` columns of queries and keys, from `column` on. head_dim counts elements in memory.

    The rows of queries begin at `lines`, the first of n_keys keys at k_at. There are k_row elements from one
    key to the next, q_step and k_step from one column to the next.
    """
    shape, fetch_queries, fetch_keys = form.shape, fetch(form, form.stored.q), fetch(form, form.stored.k)
    TILE_ROWS, SPAN, UNIT, IS_EVEN, IS_PACKED = (
        shape.tile_q, shape.span, form.unit, form.is_even, form.is_packed,
    )  # fmt: skip
    GROUPS, LINES = shape.depth // SPAN, shape.num_threads * SPAN // shape.depth  # per turn
    Q_TURNS, K_TURNS, _ = turns(shape)

    @cuda.jit(device=True)
    def fetch_scores(q, k, lines, q_step, k_at, k_row, k_step, n_keys, column, head_dim, thread, staged):
        if IS_PACKED:
            q_step, k_step = 1, 1
        first, at = np.int64(U(thread) // U(GROUPS)), (column + np.int64(U(thread) % U(GROUPS)) * SPAN) * UNIT
        left, keys_left = SPAN * UNIT if IS_EVEN else head_dim - at, np.int32(n_keys - first)
        for turn in range(Q_TURNS):
            row = first + turn * LINES
            if TILE_ROWS % LINES == 0 or row < TILE_ROWS:
                fetch_queries(q, lines[U(row)] + at * q_step, q_step, left, staged, turn * SPAN)
        k_at += first * k_row + at * k_step
        for turn in range(K_TURNS):
            count = left if np.int32(turn * LINES) < keys_left else 0
            fetch_keys(k, k_at + turn * LINES * k_row, k_step, count, staged, (Q_TURNS + turn) * SPAN)

    return fetch_scores


def put_scores(form: Form, keeps_odd: bool = True) -> Any:
    """Puts what `fetch_scores` fetched into a half of its place in shared memory, transposed; where tensor
    cores multiply, keys as they are, and two rows of queries that a thread has as one, a number of each in
    turn. 1 if any of it is odd, see `find_odd`, else 0, which only those use. Unless keeps_odd, 0 is put in
    the place of those that are."""
    shape, keep_others = form.shape, keep(form, False)
    TILE_ROWS, SPAN, DEPTH, IS_TENSOR = shape.tile_q, shape.span, shape.depth, shape.is_tensor
    GROUPS, LINES = shape.depth // SPAN, shape.num_threads * SPAN // shape.depth
    Q_TURNS, K_TURNS, _ = turns(shape)
    where = layout(shape)
    TO_KEYS, HALF, COUNT, Q_LINE = where.to_keys, where.half, (Q_TURNS + K_TURNS) * SPAN, where.q_line
    K_ROW, K_COLUMN = (DEPTH, 1) if IS_TENSOR else (1, where.k_line)  # how far they are apart
    find = has_odd(form, COUNT)

    @cuda.jit(device=True)
    def put_queries(staged, shared, to, first, column):
        to += column * U(Q_LINE) + first
        for turn in range(Q_TURNS):
            if TILE_ROWS % LINES == 0 or first + U(turn * LINES) < U(TILE_ROWS):
                for e in range(SPAN):
                    shared[to + U(e * Q_LINE + turn * LINES)] = staged[turn * SPAN + e]

    @cuda.jit(device=True)
    def put_rows_of_queries(staged, shared, to, first, column):
        to += (first * U(DEPTH) + column) * U(2)
        for turn in range(0, Q_TURNS, 2):
            for e in range(SPAN):
                for row in range(2):
                    at = to + U(turn * LINES * DEPTH + 2 * e + row)
                    shared[at] = staged[(turn + row) * SPAN + e]

    put_all_queries = put_rows_of_queries if IS_TENSOR else put_queries

    @cuda.jit(device=True)
    def put_scores(staged, shared, half, thread):
        is_odd = find(staged)
        if not keeps_odd:
            for e in range(COUNT):
                staged[e] = keep_others(staged[e])
        first, column = U(thread) // U(GROUPS), U(thread) % U(GROUPS) * U(SPAN)
        put_all_queries(staged, shared, U(half * HALF), first, column)
        to_keys = U(half * HALF + TO_KEYS) + column * U(K_COLUMN) + first * U(K_ROW)
        for turn in range(K_TURNS):
            for e in range(SPAN):
                at = to_keys + U(e * K_COLUMN + turn * LINES * K_ROW)
                shared[at] = staged[(Q_TURNS + turn) * SPAN + e]
        return is_odd

    return put_scores


@cache
def find_odd(form: Form) -> Any:
    """``find_odd(x, zeros)``: `zeros`, or NaN where x is odd: nonfinite or, where tensor cores multiply TF32,
    so large that it may be that."""
    ZERO, FOUR, IS_TF32 = form.real(0), form.real(4), form.shape.is_tensor and not form.shape.pairs

    @cuda.jit(device=True)
    def find_odd(x, zeros):
        return cuda.fma(x * FOUR if IS_TF32 else x, ZERO, zeros)

    return find_odd


@cache
def has_odd(form: Form, COUNT: int) -> Any:
    """``has_odd(staged)``: 1 if any number of the first COUNT elements is odd, see `find_odd`, else 0."""
    if form.shape.pairs:
        return pairs_of(form.shape.pairs, COUNT).has_odd
    find, ZERO = find_odd(form), form.real(0)

    @cuda.jit(device=True)
    def has_odd(staged):
        zeros = ZERO  # or NaN
        for e in range(COUNT):
            zeros = find(staged[e], zeros)
        return np.int32(zeros != ZERO)

    return has_odd


@cache
def keep(form: Form, odd: bool) -> Any:
    """``keep(element)``: 0 in the place of the numbers that are odd, or, if those are kept, of the others."""
    if form.shape.pairs:
        keep_of_pair = pairs_of(form.shape.pairs).keep

        @cuda.jit(device=True)
        def keep_in_pair(pair):
            return keep_of_pair(pair, odd)

        return keep_in_pair
    find, ZERO = find_odd(form), form.real(0)

    @cuda.jit(device=True)
    def keep(x):
        return x if (find(x, ZERO) != ZERO) == odd else ZERO

    return keep


@cache
def fetch_values(form: Form) -> Any:
    """Fetches the values of `value_keys` keys, in a tile's columns.

    The first of n_keys keys is at v_at; the columns are those from column0 on. There are v_row elements from
    one key to the next, v_step from one column to the next.
    """
    shape, fetch_span = form.shape, fetch(form, form.stored.v)
    SPAN, UNIT, IS_EVEN, IS_PACKED = shape.span, form.unit, form.is_even, form.is_packed
    GROUPS, V_TURNS = shape.tile_columns // shape.pair // SPAN, turns(shape).values
    LINES, NUMBERS = shape.num_threads // GROUPS, shape.pair // UNIT  # of an element in memory

    @cuda.jit(device=True)
    def fetch_values(v, v_at, v_row, v_step, n_keys, column0, value_dim, thread, staged):
        if IS_PACKED:
            v_step = 1
        first, column = np.int64(U(thread) // U(GROUPS)), np.int64(U(thread) % U(GROUPS)) * (SPAN * UNIT)
        column += column0 // NUMBERS
        left = SPAN * UNIT if IS_EVEN else value_dim // NUMBERS - column
        keys_left = np.int32(n_keys - first)
        v_at += first * v_row + column * v_step
        for turn in range(V_TURNS):
            count = left if np.int32(turn * LINES) < keys_left else 0
            fetch_span(v, v_at + turn * LINES * v_row, v_step, count, staged, turn * SPAN)

    return fetch_values


def put_values(form: Form, keeps_odd: bool = True, keeps_others: bool = True) -> Any:
    """Puts what `fetch_values` fetched into a half of its place in shared memory; 1 if any of it is odd, see
    `find_odd`, else 0. 0 is put in the place of those that are not kept."""
    shape, where = form.shape, layout(form.shape)
    SPAN, V_TURNS, LINE = shape.span, turns(shape).values, where.v_line
    GROUPS, COUNT = shape.tile_columns // shape.pair // SPAN, V_TURNS * SPAN
    LINES, TO_VALUES, VALUES_HALF = shape.num_threads // GROUPS, where.to_values, where.values_half
    KEEPS_ALL, find, keep_some = keeps_odd and keeps_others, has_odd(form, COUNT), keep(form, keeps_odd)

    @cuda.jit(device=True)
    def put_values(staged, shared, half, thread):
        first, column = U(thread) // U(GROUPS), U(thread) % U(GROUPS) * U(SPAN)
        at = U(TO_VALUES + half * VALUES_HALF) + first * U(LINE) + column
        is_odd = find(staged)
        for turn in range(V_TURNS):
            for e in range(SPAN):
                x = staged[turn * SPAN + e]
                shared[at + U(turn * LINES * LINE + e)] = x if KEEPS_ALL else keep_some(x)
        return is_odd

    return put_values


def add_products(form: Form, LINES: int, WIDTH: int, LINE: int, VECTOR: int) -> Any:
    """The register tile of a thread: adds products of ROWS rows with WIDTH columns to its sums.

    In each of LINES lines a thread's rows begin at `left`, in lines as long as those of queries, and its
    columns at `right`, in lines of LINE elements, VECTOR of them adjacent.
    """
    real, shape = form.real, form.shape
    ROWS, THREADS_Q, THREADS_K, Q_LINE = shape.rows, shape.threads_q, shape.threads_k, layout(shape).q_line
    row_offset, offset = apart(shape.row_vector), apart(VECTOR)

    @cuda.jit(device=True)
    def add_line(shared, left, right, line, sums):
        rows = cuda.local.array(ROWS, real)
        columns = cuda.local.array(WIDTH, real)
        for i in range(ROWS):
            rows[i] = shared[left + line * U(Q_LINE) + row_offset(i, THREADS_Q)]
        for c in range(WIDTH):
            columns[c] = shared[right + line * U(LINE) + offset(c, THREADS_K)]
        for i in range(ROWS):
            for c in range(WIDTH):
                sums[i, c] = cuda.fma(rows[i], columns[c], sums[i, c])

    @cuda.jit(device=True)
    def add_four(shared, left, right, sums):
        add_line(shared, left, right, U(0), sums)
        add_line(shared, left, right, U(1), sums)
        add_line(shared, left, right, U(2), sums)
        add_line(shared, left, right, U(3), sums)

    @cuda.jit(device=True)
    def add_products(shared, left, right, sums):
        if LINES % 8 == 0:
            # By hand, as LLVM does not unroll a loop of this size.
            for _ in range(LINES // 8):
                add_four(shared, left, right, sums)
                add_four(shared, left + U(4 * Q_LINE), right + U(4 * LINE), sums)
                left += U(8 * Q_LINE)
                right += U(8 * LINE)
        else:
            for line in range(LINES):
                add_line(shared, left, right, U(line), sums)

    return add_products


def add_scores(form: Form) -> Any:
    """``add_scores(shared, queries, keys, thread, s)``: adds a piece's products to the scores.

    The piece of the queries begins at `queries` in shared memory, that of the keys at `keys`.
    """
    shape, VECTOR, ROW_VECTOR = form.shape, form.shape.vector, form.shape.row_vector
    add = add_products(form, shape.depth, shape.keys, layout(shape).k_line, VECTOR)

    @cuda.jit(device=True)
    def add_scores(shared, queries, keys, thread, s):
        add(shared, queries + U(thread.y * ROW_VECTOR), keys + U(thread.x * VECTOR), s)

    return add_scores


def reduce_rows(shape: Shape, operate: Any) -> Any:
    """Reduces each of a thread's `values`, one per row, by `operate` over the threads of the row.

    All of them get the same bits.
    """
    ROWS, THREADS_K, TO_SUMS = shape.rows, shape.threads_k, layout(shape).to_sums
    WIDTH, GROUP = min(THREADS_K, LANES), THREADS_K // min(THREADS_K, LANES)
    STEPS = WIDTH.bit_length() - 1

    @cuda.jit(device=True)
    def reduce_rows(values, shared, thread):
        for i in range(ROWS):
            for n in range(STEPS):
                values[i] = operate(values[i], cuda.shfl_xor_sync(0xFFFFFFFF, values[i], 1 << n))
        if GROUP > 1:
            first = TO_SUMS + thread // THREADS_K * GROUP * ROWS
            if thread % WIDTH == 0:
                for i in range(ROWS):
                    shared[U(first + thread % THREADS_K // WIDTH * ROWS + i)] = values[i]
            cuda.syncthreads()
            for i in range(ROWS):
                values[i] = shared[U(first + i)]
                for other in range(1, GROUP):
                    values[i] = operate(values[i], shared[U(first + other * ROWS + i)])

    return reduce_rows
