"""Products by tensor cores: float32 numbers as sums of two of TF32, as in PyTorch's kernel, or `pairs`.

x = high + low, each of 11 bits: three products are a float32 one but for 2^-22 of it. Numbers in 16 bits have
no low part. Where all are of one 16-bit type, a pair takes the place of a number, and a weight is a sum of
two or three numbers of that type. Tensor cores truncate their sums. So each piece, 8 to 64 numbers long, is
summed from zero, its small products first, and added to a thread's sums by a rounded addition.

A warp multiplies a tile of 16 rows by one of 8 columns, 8 numbers or pairs of each at a time. Its thread (y,
x), y of 8 and x of 4, holds the sums of rows y and y + 8 and columns 2 x and 2 x + 1; it gives the numbers x
and x + 4 of both rows and of column y. Which row, column and number of an array these are is ours to choose.
So those of a thread are adjacent in memory, and its weights are those that it gives to the second product.
Pairs of values are of a column and two keys, which lie apart: an instruction (`load_tiles`) brings them
together.

A product takes four times as long as the next one has to wait for it, if it adds to other sums. So a thread
works on a group of tiles at a time. It reads the four numbers of two rows in the order in which a product
takes them, else ptxas copies them for each.

TF32 has the range of float32, but the largest numbers round to infinity, and infinity has no low part. Such
numbers, and of pairs those that are nonfinite, are *odd*: tensor cores get 0 in their place, and their
products are added one by one. So other rows and keys have the same bits, whatever these are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda

from fastattn.backends.cuda.form import Form
from fastattn.backends.cuda.intrinsics import U, load_tiles, multiply_tile, to_tf32
from fastattn.backends.cuda.pairs import FACTORS, PARTS, pairs_of, split_weights
from fastattn.backends.cuda.tiles import apart, find_odd, layout

#: Numbers that are multiplied at once, columns of a tile, and threads along both.
STEP, COLUMNS, LANES = 8, 8, 4

#: In the place of a dtype, of what the second product has on the left.
WEIGHTS = "weights"


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
def split(parts: int) -> Any:
    """``split(x, to, i, e)``: sets an element of to[0] and, of two parts, to[1] to those of x."""
    rounded = to_tf32()

    @cuda.jit(device=True)
    def split(x, to, i, e):
        to[0, i, e] = x
        if parts == 2:
            to[0, i, e] = rounded(x)
            to[1, i, e] = x - to[0, i, e]

    return split


def parts_of(form: Form, stored: str) -> int:
    """How many parts a number of an array of this dtype has, or a weight."""
    if not form.shape.pairs:
        return 1 if stored in PARTS else 2
    return PARTS[form.shape.pairs] if stored == WEIGHTS else 1


def add_groups(
    form: Form, numbers: int, columns: int, apart: tuple[int, int], stored: tuple[str, str], read: Any
) -> Any:
    """``add_groups(left, sums, shared, at)``: adds the products of a thread's rows with all tiles.

    left: the rows' numbers in parts, (parts, rows, numbers), two for each step. ``read(raw, first, shared,
    at, group)`` reads those of a column of each tile of a group into raw[first : first + form.shape.group];
    those of the next group are on their way while one is multiplied. Of tile j of a group the thread has the
    columns ``2 * group * form.shape.group + j * apart[0]`` and the one ``apart[1]`` behind it; of all it has
    `columns`. stored: the dtypes of both in memory.
    """
    shape, real, ZERO = form.shape, form.real, form.real(0)
    multiply = multiply_tile(shape.pairs or "tf32")
    PAIRS, GROUP, STEPS = shape.rows // 2, shape.group, numbers // 2
    LEFT_PARTS, RIGHT_PARTS = (parts_of(form, each) for each in stored)
    split_right = split(RIGHT_PARTS)
    COUNT, TILES, TWO_GROUPS = columns // (2 * GROUP), GROUP * PAIRS, 2 * GROUP
    FACTOR = real(1 / FACTORS[shape.pairs] if WEIGHTS in stored and shape.pairs else 1)
    NEXT_TILE, NEXT_COLUMN = apart

    @cuda.jit(device=True)
    def add_step(new, left, left_part, right, right_part, step):
        a, b = 2 * step, 2 * step + 1
        for j in range(GROUP):
            for pair in range(PAIRS):
                at, i, m, n = j * PAIRS + pair, 2 * pair, left_part, right_part
                so_far = (new[at, 0], new[at, 1], new[at, 2], new[at, 3])
                new[at, 0], new[at, 1], new[at, 2], new[at, 3] = multiply(
                    so_far, left[m, i, a], left[m, i + 1, a], left[m, i, b], left[m, i + 1, b],
                    right[n, j, a], right[n, j, b],
                )  # fmt: skip

    @cuda.jit(device=True)
    def add_new(sums, i, column, x):
        sums[i, column] = sums[i, column] + x if FACTOR == 1 else cuda.fma(x, FACTOR, sums[i, column])

    def add_group(group: int) -> Any:
        COLUMN, FIRST, NEXT = 2 * GROUP * group, group % 2 * GROUP, (group + 1) % 2 * GROUP

        @cuda.jit(device=True)
        def add_group(left, sums, raw, shared, at):
            right = cuda.local.array((RIGHT_PARTS, GROUP, numbers), real)
            new = cuda.local.array((TILES, 4), real)
            if group + 1 < COUNT:
                read(raw, NEXT, shared, at, group + 1)
            for j in range(GROUP):
                for e in range(numbers):
                    split_right(raw[FIRST + j, e], right, j, e)
            for tile in range(TILES):
                for n in range(4):
                    new[tile, n] = ZERO
            for step in range(STEPS):
                for part in range(LEFT_PARTS - 1, 0, -1):
                    add_step(new, left, part, right, 0, step)
                if RIGHT_PARTS == 2:
                    add_step(new, left, 0, right, 1, step)
            for step in range(STEPS):
                add_step(new, left, 0, right, 0, step)
            for j in range(GROUP):
                for pair in range(PAIRS):
                    tile, i, c = j * PAIRS + pair, 2 * pair, COLUMN + j * NEXT_TILE
                    add_new(sums, i, c, new[tile, 0])
                    add_new(sums, i, c + NEXT_COLUMN, new[tile, 1])
                    add_new(sums, i + 1, c, new[tile, 2])
                    add_new(sums, i + 1, c + NEXT_COLUMN, new[tile, 3])

        return add_group

    add_all = in_turn([add_group(group) for group in range(COUNT)])

    @cuda.jit(device=True)
    def add_groups(left, sums, shared, at):
        raw = cuda.local.array((TWO_GROUPS, numbers), real)
        read(raw, 0, shared, at, 0)
        add_all(left, sums, raw, shared, at)

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
    LEFT_PARTS = parts_of(form, form.stored.q)
    split_left = split(LEFT_PARTS)

    @cuda.jit(device=True)
    def add_scores(shared, queries, keys, thread, s):
        left = cuda.local.array((LEFT_PARTS, ROWS, NUMBERS), real)
        to_queries = queries + (U(thread.y) * U(DEPTH) + U(thread.x) * U(NUMBERS)) * U(2)
        for i in range(ROWS):
            for e in range(NUMBERS):
                at = to_queries + U(i // 2 * (2 * THREADS_Q * DEPTH) + 2 * e + i % 2)
                split_left(shared[at], left, i, e)
        add(left, s, shared, keys + U(thread.y) % U(COLUMNS) * U(DEPTH) + U(thread.x) * U(NUMBERS))

    return add_scores


def add_odd_scores(form: Form) -> Any:
    """Adds those products of a piece one by one of which a number is odd."""
    shape, find, ZERO = form.shape, find_odd(form), form.real(0)
    ROWS, KEYS, DEPTH, THREADS_Q = shape.rows, shape.keys, shape.depth, shape.threads_q
    THREADS_K, VECTOR, key_apart = shape.threads_k, shape.vector, apart(shape.vector)
    first, second = pairs_of(shape.pairs)[:2] if shape.pairs else (None, None)

    @cuda.jit(device=True)
    def add_one(x, y, s, i, c):
        if find(x, find(y, ZERO)) != ZERO:
            s[i, c] = cuda.fma(x, y, s[i, c])

    @cuda.jit(device=True)
    def add_pair(x, y, s, i, c):
        add_one(first(x), first(y), s, i, c)
        add_one(second(x), second(y), s, i, c)

    add = add_pair if shape.pairs else add_one

    @cuda.jit(device=True)
    def add_odd_scores(shared, queries, keys, thread, s):
        to_queries, to_keys = queries + U(thread.y * 2 * DEPTH), keys + U(thread.x * VECTOR) * U(DEPTH)
        for column in range(DEPTH):
            for i in range(ROWS):
                x = shared[to_queries + U(i // 2 * (2 * THREADS_Q * DEPTH) + i % 2) + U(2 * column)]
                for c in range(KEYS):
                    add(x, shared[to_keys + key_apart(c, THREADS_K) * U(DEPTH) + U(column)], s, i, c)

    return add_odd_scores


def add_values(form: Form) -> Any:
    """``add_values(shared, values, thread, s, acc)``: adds the products of a thread's first weights with a
    piece of values, which begins at `values` in shared memory, and moves the weights to the end of s.

    A loop over pieces takes other weights each time, and registers cannot be indexed. Where compilers write
    that loop out, ptxas puts the products of a sum one behind the other.
    """
    shape, real, LINE = form.shape, form.real, layout(form.shape).v_line
    ROWS, GROUP, KEYS = shape.rows, shape.group, shape.value_keys // LANES
    NUMBERS = KEYS // shape.pair
    REST, LEFT_PARTS, load = shape.keys - KEYS, parts_of(form, WEIGHTS), load_tiles()

    @cuda.jit(device=True)
    def read_singles(raw, first, shared, at, group):
        for e in range(NUMBERS):
            line = at + U((e // 2 * STEP + e % 2) * LINE + group * GROUP * COLUMNS)
            for j in range(GROUP):
                raw[first + j, e] = shared[line + U(j)]

    @cuda.jit(device=True)
    def read_pairs(raw, first, shared, at, group):
        for step in range(NUMBERS // 2):
            a, b = 2 * step, 2 * step + 1
            for j in range(0, GROUP, 2):
                place = at + U(2 * step * STEP * LINE + (group * GROUP + j) * COLUMNS // 2)
                raw[first + j, a], raw[first + j, b], raw[first + j + 1, a], raw[first + j + 1, b] = load(
                    shared, place
                )

    @cuda.jit(device=True)
    def own_singles(thread):
        return U(2 * thread.x) * U(LINE) + U(thread.y) % U(COLUMNS) * U(GROUP)

    @cuda.jit(device=True)
    def own_pairs(thread):
        """In each of four tiles, two below each other and two beside them, a row."""
        lane = U(thread.number) % U(COLUMNS * LANES)
        return lane % U(2 * COLUMNS) * U(LINE) + lane // U(2 * COLUMNS) * U(COLUMNS // 2)

    read, own, next_columns = (
        (read_pairs, own_pairs, (2, 1)) if shape.pairs else (read_singles, own_singles, (1, GROUP))
    )
    add = add_groups(form, NUMBERS, shape.columns, next_columns, (WEIGHTS, form.stored.v), read)
    split_one, split_pairs = split(2), split_weights(shape.pairs, NUMBERS) if shape.pairs else None

    @cuda.jit(device=True)
    def split_singles(s, i, left):
        for e in range(NUMBERS):
            split_one(s[i, e], left, i, e)

    split_row = split_pairs if shape.pairs else split_singles

    @cuda.jit(device=True)
    def add_values(shared, values, thread, s, acc):
        left = cuda.local.array((LEFT_PARTS, ROWS, NUMBERS), real)
        moved = cuda.local.array((ROWS, KEYS), real)
        for i in range(ROWS):
            split_row(s, i, left)
            for c in range(KEYS):
                moved[i, c] = s[i, c]
            for c in range(REST):
                s[i, c] = s[i, c + KEYS]
            for c in range(KEYS):
                s[i, REST + c] = moved[i, c]
        add(left, acc, shared, values + own(thread))

    return add_values
