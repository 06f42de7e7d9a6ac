"""Products by tensor cores: float32 numbers as sums of two of TF32, as in PyTorch's kernel.

x = high + low, each of 11 bits: three products are a float32 one but for 2^-22 of it. Arrays in 16 bits have
no low part, and take fewer. Tensor cores truncate their sums. So each piece, 8 or 16 numbers long, is summed
from zero, its small products first, and added to a thread's sums by a rounded addition.

A warp multiplies a tile of 16 rows by one of 8 columns, 8 numbers of each at a time. Its thread (y, x), y of
8 and x of 4, holds the sums of rows y and y + 8 and columns 2 x and 2 x + 1; it gives the numbers x and x + 4
of both rows and of column y. Which row, column and number of an array these are is ours to choose. So those
of a thread are adjacent in memory, and its weights are those that it gives to the second product.

A product takes four times as long as the next one has to wait for it, if it adds to other sums. So a thread
works on a group of tiles at a time.

TF32 has the range of float32, but the largest numbers round to infinity, and infinity has no low part. Such
numbers are *odd*: tensor cores get 0 in their place, and their products are added one by one. So other rows
and keys have the same bits, whatever these are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda

from fastattn.backends.cuda.form import Form
from fastattn.backends.cuda.intrinsics import U, multiply_tile, to_tf32
from fastattn.backends.cuda.tiles import apart, find_odd, layout

#: Numbers that are multiplied at once, columns of a tile, and threads along both.
STEP, COLUMNS, LANES = 8, 8, 4

#: What has no low part.
EXACT = {"float16", "bfloat16"}


def in_turn(parts: list[Any]) -> Any:
    """A function that calls all of these with its arguments: a loop whose counter each of them knows, as
    registers cannot be indexed."""
    if len(parts) == 1:
        return parts[0]
    first, rest = in_turn(parts[: len(parts) // 2]), in_turn(parts[len(parts) // 2 :])

    @cuda.jit(device=True)
    def both(*arguments):
        first(*arguments)
        rest(*arguments)

    return both


@cache
def split(has_low: bool) -> Any:
    """``split(x, high, low, i, e)``: sets an element of both to the parts of x, which may have no low one."""
    rounded = to_tf32()

    @cuda.jit(device=True)
    def split(x, high, low, i, e):
        high[i, e] = x
        if has_low:
            high[i, e] = rounded(x)
            low[i, e] = x - high[i, e]

    return split


def add_groups(
    form: Form, numbers: int, columns: int, apart: tuple[int, int], stored: tuple[str, str], read: Any
) -> Any:
    """``add_groups(left, sums, shared, at)``: adds the products of a thread's rows with all tiles.

    left: the rows' numbers, (rows, numbers), two for each step. ``read(raw, first, shared, at, group)`` reads
    those of a column of each tile of a group into raw[first : first + form.shape.group]; those of the next
    group are on their way while one is multiplied. Of tile j of a group the thread has the columns
    ``2 * group * form.shape.group + j * apart[0]`` and the one ``apart[1]`` behind it; of all it has
    `columns`. stored: the dtypes of both in memory.
    """
    shape, real, multiply, ZERO = form.shape, form.real, multiply_tile(), form.real(0)
    ROWS, PAIRS, GROUP, STEPS = shape.rows, shape.rows // 2, shape.group, numbers // 2
    HAS_LEFT_LOW, HAS_RIGHT_LOW = stored[0] not in EXACT, stored[1] not in EXACT
    split_left, split_right = split(HAS_LEFT_LOW), split(HAS_RIGHT_LOW)
    COUNT, TILES, TWO_GROUPS = columns // (2 * GROUP), GROUP * PAIRS, 2 * GROUP
    NEXT_TILE, NEXT_COLUMN = apart

    @cuda.jit(device=True)
    def add_step(new, left, right, step):
        a, b = 2 * step, 2 * step + 1
        for j in range(GROUP):
            for pair in range(PAIRS):
                at, i = j * PAIRS + pair, 2 * pair
                so_far = (new[at, 0], new[at, 1], new[at, 2], new[at, 3])
                new[at, 0], new[at, 1], new[at, 2], new[at, 3] = multiply(
                    so_far, left[i, a], left[i + 1, a], left[i, b], left[i + 1, b], right[j, a], right[j, b]
                )

    def add_group(group: int) -> Any:
        COLUMN, FIRST, NEXT = 2 * GROUP * group, group % 2 * GROUP, (group + 1) % 2 * GROUP

        @cuda.jit(device=True)
        def add_group(left, left_low, sums, raw, shared, at):
            right = cuda.local.array((GROUP, numbers), real)
            right_low = cuda.local.array((GROUP, numbers), real)
            new = cuda.local.array((TILES, 4), real)
            if group + 1 < COUNT:
                read(raw, NEXT, shared, at, group + 1)
            for j in range(GROUP):
                for e in range(numbers):
                    split_right(raw[FIRST + j, e], right, right_low, j, e)
            for tile in range(TILES):
                for n in range(4):
                    new[tile, n] = ZERO
            for step in range(STEPS):
                if HAS_LEFT_LOW:
                    add_step(new, left_low, right, step)
                if HAS_RIGHT_LOW:
                    add_step(new, left, right_low, step)
            for step in range(STEPS):
                add_step(new, left, right, step)
            for j in range(GROUP):
                for pair in range(PAIRS):
                    tile, i, c = j * PAIRS + pair, 2 * pair, COLUMN + j * NEXT_TILE
                    sums[i, c] += new[tile, 0]
                    sums[i, c + NEXT_COLUMN] += new[tile, 1]
                    sums[i + 1, c] += new[tile, 2]
                    sums[i + 1, c + NEXT_COLUMN] += new[tile, 3]

        return add_group

    add_all = in_turn([add_group(group) for group in range(COUNT)])

    @cuda.jit(device=True)
    def add_groups(left, sums, shared, at):
        high, low = cuda.local.array((ROWS, numbers), real), cuda.local.array((ROWS, numbers), real)
        raw = cuda.local.array((TWO_GROUPS, numbers), real)
        read(raw, 0, shared, at, 0)
        for i in range(ROWS):
            for e in range(numbers):
                split_left(left[i, e], high, low, i, e)
        add_all(high, low, sums, raw, shared, at)

    return add_groups


def add_scores(form: Form) -> Any:
    """``add_scores(shared, queries, keys, thread, s)``: adds a piece's products to the scores.

    The piece of the queries begins at `queries` in shared memory, that of the keys at `keys`.
    """
    shape, real = form.shape, form.real
    ROWS, DEPTH, THREADS_Q, GROUP, NUMBERS = (
        shape.rows, shape.depth, shape.threads_q, shape.group, shape.depth // LANES,
    )  # fmt: skip

    @cuda.jit(device=True)
    def read(raw, first, shared, at, group):
        for j in range(GROUP):
            for e in range(NUMBERS):
                raw[first + j, e] = shared[at + U((group * GROUP + j) * COLUMNS * DEPTH + e)]

    add = add_groups(form, NUMBERS, shape.keys, (2, 1), (form.stored.q, form.stored.k), read)

    @cuda.jit(device=True)
    def add_scores(shared, queries, keys, thread, s):
        left = cuda.local.array((ROWS, NUMBERS), real)
        to_queries = queries + U(thread.y) * U(DEPTH) + U(thread.x) * U(NUMBERS)
        for i in range(ROWS):
            for e in range(NUMBERS):
                left[i, e] = shared[to_queries + U(i * THREADS_Q * DEPTH + e)]
        add(left, s, shared, keys + U(thread.y) % U(COLUMNS) * U(DEPTH) + U(thread.x) * U(NUMBERS))

    return add_scores


def add_odd_scores(form: Form) -> Any:
    """Adds those products of a piece one by one of which a number is odd."""
    shape, find, ZERO = form.shape, find_odd(form), form.real(0)
    ROWS, KEYS, DEPTH, THREADS_Q = shape.rows, shape.keys, shape.depth, shape.threads_q
    THREADS_K, VECTOR, key_apart = shape.threads_k, shape.vector, apart(shape.vector)

    @cuda.jit(device=True)
    def add_odd_scores(shared, queries, keys, thread, s):
        to_queries, to_keys = queries + U(thread.y) * U(DEPTH), keys + U(thread.x * VECTOR) * U(DEPTH)
        for column in range(DEPTH):
            for i in range(ROWS):
                x = shared[to_queries + U(i * THREADS_Q * DEPTH) + U(column)]
                for c in range(KEYS):
                    y = shared[to_keys + key_apart(c, THREADS_K) * U(DEPTH) + U(column)]
                    if find(x, find(y, ZERO)) != ZERO:
                        s[i, c] = cuda.fma(x, y, s[i, c])

    return add_odd_scores


def add_values(form: Form) -> Any:
    """``add_values(shared, values, thread, s, acc)``: adds the products of a thread's first weights with a
    piece of values, which begins at `values` in shared memory, and moves the weights to the end of s.

    A loop over pieces takes other weights each time, and registers cannot be indexed. Written out, ptxas
    puts the products of a sum one behind the other.
    """
    shape, real, LINE = form.shape, form.real, layout(form.shape).v_line
    ROWS, GROUP, NUMBERS = shape.rows, shape.group, shape.value_keys // LANES
    REST = shape.keys - NUMBERS

    @cuda.jit(device=True)
    def read(raw, first, shared, at, group):
        for e in range(NUMBERS):
            line = at + U((e // 2 * STEP + e % 2) * LINE + group * GROUP * COLUMNS)
            for j in range(GROUP):
                raw[first + j, e] = shared[line + U(j)]

    add = add_groups(form, NUMBERS, shape.columns, (1, GROUP), ("weights", form.stored.v), read)

    @cuda.jit(device=True)
    def add_values(shared, values, thread, s, acc):
        left = cuda.local.array((ROWS, NUMBERS), real)
        for i in range(ROWS):
            for e in range(NUMBERS):
                left[i, e] = s[i, e]
            for c in range(REST):
                s[i, c] = s[i, c + NUMBERS]
            for e in range(NUMBERS):
                s[i, REST + e] = left[i, e]
        add(left, acc, shared, values + U(2 * thread.x) * U(LINE) + U(thread.y) % U(COLUMNS) * U(GROUP))

    return add_values
