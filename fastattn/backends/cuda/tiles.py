"""What a block of threads does with tiles: fetch a piece of the arrays, put it into shared memory, multiply.

A piece is fetched into registers while the one before it is multiplied, and put into the other half of its
place in shared memory: so loads are on the way during the arithmetic, and a piece takes one barrier.

Shared memory is one array, cut by hand: queries and keys share their place with the weights. Lines of its
tiles have `vector` elements more than they need, so that a column of them lies in different banks.

Elements of a thread lie `vector` together, and the next of them past those of all other threads, so that
threads side by side read shared memory side by side. An index into it is not signed, as else Numba looks at
each whether it counts from the end.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numba import config, cuda

from fastattn.backends.cuda.form import Form, Shape
from fastattn.backends.cuda.intrinsics import larger, vector_fetch

U = np.uint64

#: Threads whose registers the hardware exchanges. In the simulator none does: all goes by shared memory.
LANES = 1 if config.ENABLE_CUDASIM else 32


class Layout(NamedTuple):
    """Where what is in shared memory, in elements. Queries and the weights begin at 0."""

    q_line: int
    k_line: int
    to_keys: int  #: behind the queries
    half: int  #: of queries and keys
    to_values: int
    values_half: int
    to_parts: int  #: of what is summed up over threads
    size: int


def layout(shape: Shape) -> Layout:
    q_line, k_line = shape.tile_q + shape.vector, shape.tile_k + shape.vector
    half = shape.depth * (q_line + k_line)
    to_values = max(shape.buffers * half, shape.tile_k * q_line)
    values_half = shape.value_keys * shape.tile_columns
    to_parts = to_values + shape.buffers * values_half
    parts = shape.tile_q * (shape.threads_k // LANES if shape.threads_k > LANES else 0)
    size = to_parts + parts
    return Layout(q_line, k_line, shape.depth * q_line, half, to_values, values_half, to_parts, size)


def tile_functions(form: Form) -> Any:
    """Device functions, by name, for one form."""
    real, shape = form.real, form.shape
    ROWS, KEYS, COLUMNS, VECTOR, SPAN = shape.rows, shape.keys, shape.columns, shape.vector, shape.span
    THREADS_Q, THREADS_K, THREADS = shape.threads_q, shape.threads_k, shape.num_threads
    TILE_ROWS, TILE_COLUMNS = shape.tile_q, shape.tile_columns
    GROUPS, COLUMN_GROUPS = shape.depth // SPAN, shape.tile_columns // SPAN
    Q_TURNS = -(-TILE_ROWS * GROUPS // THREADS)
    Q_FILLS = TILE_ROWS * GROUPS % THREADS == 0
    K_TURNS = shape.tile_k * GROUPS // THREADS
    V_TURNS = shape.value_keys * COLUMN_GROUPS // THREADS
    IS_EVEN, IS_PACKED, ZERO = form.is_even, form.is_packed, real(0)
    Q_LINE, K_LINE, TO_KEYS, HALF, TO_VALUES, VALUES_HALF, TO_PARTS, _ = layout(shape)
    fetch_vector = vector_fetch(SPAN)

    @cuda.jit(device=True)
    def place(i, thread, threads):
        """Where the i-th of a thread's elements is in a tile."""
        return i // VECTOR * (VECTOR * threads) + thread * VECTOR + i % VECTOR

    @cuda.jit(device=True)
    def apart(i, threads):
        """How far that is from the first."""
        return U(i // VECTOR * (VECTOR * threads) + i % VECTOR)

    @cuda.jit(device=True)
    def fetch(array, at, step, count, staged, to):
        """SPAN elements, of which `count` are there; zeros for those that are not."""
        if IS_PACKED:
            if count > 0:
                fetch_vector(array, U(at), staged, to)
            else:
                for e in range(SPAN):
                    staged[to + e] = ZERO
        else:
            for e in range(SPAN):
                x = ZERO
                if e < count:
                    x = real(array[U(at + e * step)])
                staged[to + e] = x

    @cuda.jit(device=True)
    def fetch_scores(q, k, lines, q_step, k_at, k_row, k_step, n_keys, column, head_dim, thread, staged):
        """Some columns of queries and keys."""
        if IS_PACKED:
            q_step, k_step = 1, 1
        for turn in range(Q_TURNS):
            n = turn * THREADS + thread
            if Q_FILLS or n < TILE_ROWS * GROUPS:
                at = column + n % GROUPS * SPAN
                count = SPAN if IS_EVEN else head_dim - at
                fetch(q, lines[n // GROUPS] + at * q_step, q_step, count, staged, turn * SPAN)
        for turn in range(K_TURNS):
            n = turn * THREADS + thread
            key, at = n // GROUPS, column + n % GROUPS * SPAN
            count = (SPAN if IS_EVEN else head_dim - at) if key < n_keys else 0
            fetch(k, k_at + key * k_row + at * k_step, k_step, count, staged, (Q_TURNS + turn) * SPAN)

    @cuda.jit(device=True)
    def put_scores(staged, shared, half, thread):
        """Those, transposed, into a half of their place."""
        for turn in range(Q_TURNS):
            n = turn * THREADS + thread
            if Q_FILLS or n < TILE_ROWS * GROUPS:
                for e in range(SPAN):
                    at = (n % GROUPS * SPAN + e) * Q_LINE + n // GROUPS
                    shared[U(half * HALF + at)] = staged[turn * SPAN + e]
        for turn in range(K_TURNS):
            n = turn * THREADS + thread
            for e in range(SPAN):
                at = TO_KEYS + (n % GROUPS * SPAN + e) * K_LINE + n // GROUPS
                shared[U(half * HALF + at)] = staged[(Q_TURNS + turn) * SPAN + e]

    @cuda.jit(device=True)
    def fetch_values(v, v_at, v_row, v_step, key0, n_keys, column0, value_dim, thread, staged):
        """The values of some keys; whether there is a NaN or an infinity among them."""
        wild = np.int32(0)
        if IS_PACKED:
            v_step = 1
        for turn in range(V_TURNS):
            n = turn * THREADS + thread
            key, column = key0 + n // COLUMN_GROUPS, column0 + n % COLUMN_GROUPS * SPAN
            count = (SPAN if IS_EVEN else value_dim - column) if key < n_keys else 0
            fetch(v, v_at + key * v_row + column * v_step, v_step, count, staged, turn * SPAN)
            for e in range(SPAN):
                x = staged[turn * SPAN + e]
                if x - x != ZERO:
                    wild = np.int32(1)
        return wild

    @cuda.jit(device=True)
    def put_values(staged, shared, half, thread):
        for turn in range(V_TURNS):
            n = turn * THREADS + thread
            at = U(TO_VALUES + half * VALUES_HALF) + U(n * SPAN)
            for e in range(SPAN):
                shared[at + U(e)] = staged[turn * SPAN + e]

    def products(LINES, WIDTH, LINE):
        """The device function that adds to a thread's sums, ROWS x WIDTH, the products of its rows with its
        columns in each of LINES lines; they begin at `left` and `right`, where the latter are LINE long."""

        @cuda.jit(device=True)
        def add_line(shared, left, right, line, sums):
            rows = cuda.local.array(ROWS, real)
            columns = cuda.local.array(WIDTH, real)
            for i in range(ROWS):
                rows[i] = shared[left + line * U(Q_LINE) + apart(i, THREADS_Q)]
            for c in range(WIDTH):
                columns[c] = shared[right + line * U(LINE) + apart(c, THREADS_K)]
            for i in range(ROWS):
                for c in range(WIDTH):
                    sums[i, c] = cuda.fma(rows[i], columns[c], sums[i, c])

        @cuda.jit(device=True)
        def add_products(shared, left, right, sums):
            if LINES % 4 == 0:
                # LLVM does not unroll a loop of this size.
                for line in range(0, LINES, 4):
                    add_line(shared, left, right, U(line), sums)
                    add_line(shared, left, right, U(line + 1), sums)
                    add_line(shared, left, right, U(line + 2), sums)
                    add_line(shared, left, right, U(line + 3), sums)
            else:
                for line in range(LINES):
                    add_line(shared, left, right, U(line), sums)

        return add_products

    def over_threads(operate):
        """The device function that puts together, over the threads of its rows, each of a thread's ROWS
        numbers; all of them get the same bits."""
        WIDTH, GROUP = min(THREADS_K, LANES), THREADS_K // min(THREADS_K, LANES)
        STEPS = WIDTH.bit_length() - 1

        @cuda.jit(device=True)
        def put_together(values, shared, thread):
            for i in range(ROWS):
                for n in range(STEPS):
                    values[i] = operate(values[i], cuda.shfl_xor_sync(0xFFFFFFFF, values[i], 1 << n))
            if GROUP > 1:
                first = TO_PARTS + thread // THREADS_K * GROUP * ROWS
                if thread % WIDTH == 0:
                    for i in range(ROWS):
                        shared[U(first + thread % THREADS_K // WIDTH * ROWS + i)] = values[i]
                cuda.syncthreads()
                for i in range(ROWS):
                    values[i] = shared[U(first + i)]
                    for other in range(1, GROUP):
                        values[i] = operate(values[i], shared[U(first + other * ROWS + i)])

        return put_together

    @cuda.jit(device=True)
    def add(x, y):
        return x + y

    return SimpleNamespace(
        largest=over_threads(larger(form.dtype)), summed=over_threads(add),
        place=place, apart=apart, fetch_scores=fetch_scores, put_scores=put_scores,
        fetch_values=fetch_values, put_values=put_values, score_registers=(Q_TURNS + K_TURNS) * SPAN,
        value_registers=V_TURNS * SPAN, add_scores=products(shape.depth, KEYS, K_LINE),
        add_values=products(shape.value_keys, COLUMNS, TILE_COLUMNS),
    )  # fmt: skip
