"""Register tiles: the operations of `kernels` on one of them, or on vectors of lanes, written with an
`Emitter`.

Each becomes an intrinsic of Numba whose first argument, `zero`, is a number of the dtype. Addresses are
integers, `ld` and counts are in elements; all else is as in `kernels`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from fastattn._machine.constants import (
    EXP2_KEYS,
    EXPONENT_MIN,
    KEY_CHUNK,
    LOG2E,
    PREFETCH_KEYS,
    PREFETCH_PACKED,
    PREFETCH_VALUES,
)
from fastattn.backends.numba.codegen.across_lanes import transpose
from fastattn.backends.numba.codegen.emit import INT32, Emitter
from fastattn.backends.numba.codegen.exponential import exp2, exp2m1
from fastattn.backends.numba.codegen.intrinsics import stage
from fastattn.backends.numba.codegen.target import TARGET

LANE_BYTES = TARGET.vector_bytes
LINE_BYTES = 64
#: Frozen into the compiled code as plain numbers.
SCORE_ROWS, SCORE_VECTORS, SCORE_CHAIN = TARGET.score_rows, TARGET.score_vectors, TARGET.score_chain
TILE_ROWS, TILE_VECTORS = TARGET.tile_rows, TARGET.tile_vectors
#: Register tiles of one or two vectors have more keys, to hide latencies; see ``blocking.h``.
NARROW_ROWS = 2 * SCORE_ROWS
LAST_ROWS = SCORE_ROWS // 2  #: keys in a register tile of `score` for the last keys
WIDE_ROWS = TARGET.wide_rows  #: columns of the values in a register tile of one vector
HAS_NARROW = TARGET.block_vectors == TARGET.score_vectors


@stage()
def pack_block(e: Emitter, to, ld, rows, at, high, low) -> None:
    """The `lanes` columns from byte `at` of `lanes` rows, times high + low."""
    x = [e.load(e.at(e.load_address(e.at(rows, (i, 8))), (at, 1))) for i in range(e.lanes)]
    high, low = e.splat(high), e.splat(low)
    for i, column in enumerate(transpose(e, x)):
        e.store(e.at(to, (ld, i * e.itemsize)), e.multiply_exactly(column, high, low), LANE_BYTES)


@stage()
def pack_column(e: Emitter, to, rows, at, high, low) -> None:
    """One column from byte `at` of `lanes` rows."""
    x = e.gather([e.at(e.load_address(e.at(rows, (i, 8))), (at, 1)) for i in range(e.lanes)])
    e.store(to, e.multiply_exactly(x, e.splat(high), e.splat(low)), LANE_BYTES)


@stage(returns_bool=True)
def unpack_block(e: Emitter, rows, at, tile, ld, high, low) -> Any:
    """`lanes` columns of the tile to byte `at` of `lanes` rows; whether any is nonfinite."""
    high, low = e.load(high), e.load(low)
    x = [e.multiply_exactly(e.load(e.at(tile, (ld, i * e.itemsize))), high, low) for i in range(e.lanes)]
    nonfinite = e.is_nonfinite(x[0])
    for column in x[1:]:
        nonfinite = e.builder.or_(nonfinite, e.is_nonfinite(column))
    for i, row in enumerate(transpose(e, x)):
        e.store(e.at(e.load_address(e.at(rows, (i, 8))), (at, 1)), row)
    return e.any(nonfinite)


@stage(returns_bool=True)
def unpack_column(e: Emitter, rows, at, tile, high, low) -> Any:
    """One column of the tile to byte `at` of `lanes` rows."""
    x = e.multiply_exactly(e.load(tile), e.load(high), e.load(low))
    for i in range(e.lanes):
        e.store_scalar(e.at(e.load_address(e.at(rows, (i, 8))), (at, 1)), e.lane(x, i))
    return e.any(e.is_nonfinite(x))


# Scores.


def _score_tile(rows: int, vectors: int) -> Any:
    chain = SCORE_CHAIN
    rest = min(chain, 8)
    distance = max(rows, PREFETCH_KEYS)

    def score_tile(e: Emitter, s, top, q, ld, k, k_row, n_cols, n_keys, is_first) -> None:
        """S^T = K Q^T for `rows` keys, of which n_keys exist: the last one is repeated for the others.

        Each score is a sum of partial sums over `chain` columns, or `rest` where fewer are left: short chains
        round less. Added to s unless is_first; `top` becomes the maximum of itself and the scores.
        """
        builder = e.builder
        line = builder.mul(ld, e.count(e.itemsize))
        key = [
            e.variable(e.opaque(e.at(k, (e.least(e.count(r), builder.sub(n_keys, e.count(1))), k_row))))
            for r in range(rows)
        ]
        query = e.variable(q)
        total = [[e.variable(e.zero()) for _ in range(vectors)] for _ in range(rows)]
        sums = [[e.variable(e.zero()) for _ in range(vectors)] for _ in range(rows)]

        def step() -> None:
            at = query.get()
            x = [e.load(e.at(at, (v * e.lanes, e.itemsize)), LANE_BYTES) for v in range(vectors)]
            for r in range(rows):
                y = e.splat(e.load_scalar(key[r].get()))
                for v in range(vectors):
                    sums[r][v].set(e.fma(x[v], y, sums[r][v].get()))
                key[r].set(builder.add(key[r].get(), e.count(e.itemsize)))
            query.set(e.opaque(builder.add(at, line)))

        def end_sums() -> None:
            for r in range(rows):
                for v in range(vectors):
                    total[r][v].set(e.add(total[r][v].get(), sums[r][v].get()))
                    sums[r][v].set(e.zero())

        whole = builder.sdiv(n_cols, e.count(chain))
        with e.loop(e.count(0), whole):
            for line_of_keys in range(0, chain * e.itemsize, LINE_BYTES):
                for r in range(rows):
                    # Later rows, into L1: they are read column by column, which no prefetcher follows.
                    e.prefetch(e.at(key[r].get(), (distance, k_row), (line_of_keys, 1)))
            for _ in range(chain):
                step()
            end_sums()
        left = builder.sub(n_cols, builder.mul(whole, e.count(chain)))
        n_rests = builder.sdiv(builder.add(left, e.count(rest - 1)), e.count(rest))
        with e.loop(e.count(0), n_rests) as i:
            done = builder.mul(i, e.count(rest))
            with e.loop(e.count(0), e.least(builder.sub(left, done), e.count(rest))):
                step()
            end_sums()

        fresh = builder.icmp_signed("!=", is_first, e.count(0))
        for v in range(vectors):
            at_top = e.at(top, (v * e.lanes, e.itemsize))
            highest = e.load(at_top)
            for r in range(rows):
                to = e.at(s, (ld, r * e.itemsize), (v * e.lanes, e.itemsize))
                before = builder.select(fresh, e.zero(), e.load(to))
                x = e.add(total[r][v].get(), before)
                e.store(to, x)
                highest = e.maximum(highest, x)
            e.store(at_top, highest)

    score_tile.__qualname__ += f"_{rows}_{vectors}"
    return stage()(score_tile)


score_tile_1, score_tile_2, score_tile_3 = (_score_tile(SCORE_ROWS, vectors) for vectors in (1, 2, 3))
score_last_tile_1, score_last_tile_2, score_last_tile_3 = (
    _score_tile(LAST_ROWS, vectors) for vectors in (1, 2, 3)
)
score_narrow_tile_1, score_narrow_tile_2 = (_score_tile(NARROW_ROWS, vectors) for vectors in (1, 2))


@stage()
def prefetch_rows(e: Emitter, at, row, n, nbytes) -> None:
    """Prefetches the first nbytes bytes of n rows into L2: L1 has no room for a tile of them."""
    builder = e.builder
    lines = builder.sdiv(builder.add(nbytes, e.count(LINE_BYTES - 1)), e.count(LINE_BYTES))
    with e.loop(e.count(0), n) as i, e.loop(e.count(0), lines) as line:
        e.prefetch(e.at(at, (i, row), (line, LINE_BYTES)), locality=2)


# Adjustments of raw scores, one vector of lanes at a time; `top` becomes the maximum of itself and the
# results.


def hyperbolic_tangent(e: Emitter, x: Any) -> Any:
    """A few ULP relative for small x too: with e = exp(-2|x|) - 1, tanh|x| = -e / (2 + e)."""
    builder = e.builder
    sign_bit = e.integer_constant(1 << (8 * e.itemsize - 1))
    x = builder.bitcast(x, e.integers)
    sign = builder.and_(x, sign_bit)
    magnitude = builder.bitcast(builder.xor(x, sign), e.vector)
    grown = exp2m1(e, e.mul(magnitude, e.constant(-2 * LOG2E)))
    ratio = builder.fdiv(grown, e.add(e.constant(2.0), grown))
    # -e / (2 + e) with the sign of x
    negative = builder.xor(builder.bitcast(ratio, e.integers), sign_bit)
    return builder.bitcast(builder.xor(negative, sign), e.vector)


def add_in_tree(e: Emitter, x: list[Any]) -> Any:
    """The sum of a power of two of vectors."""
    while len(x) > 1:
        half = len(x) // 2
        x = [e.add(a, b) for a, b in zip(x[:half], x[half:], strict=True)]
    return x[0]


@contextmanager
def each_chunk(e: Emitter, n_keys: Any, first_chunk: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The number, the start and the stop of each chunk of keys, over which partial sums run. The first has
    first_chunk keys, and is yielded even where there are no keys."""
    builder = e.builder
    past = builder.sub(n_keys, first_chunk)
    more = builder.sdiv(builder.add(past, e.count(KEY_CHUNK - 1)), e.count(KEY_CHUNK))
    more = builder.select(builder.icmp_signed(">", past, e.count(0)), more, e.count(0))
    with e.loop(e.count(0), builder.add(more, e.count(1))) as chunk:
        stop = builder.add(first_chunk, builder.mul(chunk, e.count(KEY_CHUNK)))
        is_first = builder.icmp_signed("==", chunk, e.count(0))
        start = builder.select(is_first, e.count(0), builder.sub(stop, e.count(KEY_CHUNK)))
        yield chunk, start, e.least(stop, n_keys)


@stage()
def multiply_scores(e: Emitter, s, top, ld, n_keys, root) -> None:
    """s = root * (root * s)."""
    line = e.builder.mul(ld, e.count(e.itemsize))
    highest = e.variable(e.load(top))
    root = e.splat(root)
    with e.loop(e.count(0), n_keys) as j:
        at = e.at(s, (j, line))
        y = e.mul(root, e.mul(root, e.load(at)))
        e.store(at, y)
        highest.set(e.maximum(highest.get(), y))
    e.store(top, highest.get())


@stage()
def cap_scores(e: Emitter, s, top, ld, n_keys, cap) -> None:
    """s = cap * tanh(s)."""
    line = e.builder.mul(ld, e.count(e.itemsize))
    highest = e.variable(e.load(top))
    cap = e.splat(cap)
    with e.loop(e.count(0), n_keys) as j:
        at = e.at(s, (j, line))
        y = e.mul(cap, hyperbolic_tangent(e, e.load(at)))
        e.store(at, y)
        highest.set(e.maximum(highest.get(), y))
    e.store(top, highest.get())


@stage()
def add_bias(e: Emitter, s, top, ld, n_keys, rows, at) -> None:
    """s += bias, -inf where that is -inf: the bias of a lane starts at byte `at` of its row."""
    builder = e.builder
    masked = e.constant(-math.inf)
    highest = e.variable(e.load(top))
    addresses = [e.at(e.load_address(e.at(rows, (i, 8))), (at, 1)) for i in range(e.lanes)]

    def add(j: Any, bias: Any) -> None:
        to = e.at(s, (builder.mul(j, ld), e.itemsize))
        x = e.select(e.equal(bias, masked), masked, e.add(e.load(to), bias))
        e.store(to, x)
        highest.set(e.maximum(highest.get(), x))

    blocks = builder.sdiv(n_keys, e.count(e.lanes))
    with e.loop(e.count(0), blocks) as block:
        j = builder.mul(block, e.count(e.lanes))
        x = transpose(e, [e.load(e.at(address, (j, e.itemsize))) for address in addresses])
        for i, bias in enumerate(x):
            add(builder.add(j, e.count(i)), bias)
    with e.loop(builder.mul(blocks, e.count(e.lanes)), n_keys) as j:
        add(j, e.gather([e.at(address, (j, e.itemsize)) for address in addresses]))
    e.store(top, highest.get())


@stage()
def mask_scores(e: Emitter, s, top, ld, n_keys, words) -> None:
    """s = -inf where bit j % 32 of words[j / 32][lane] is 0."""
    builder = e.builder
    masked = e.constant(-math.inf)
    highest = e.variable(e.load(top))
    n_words = builder.sdiv(builder.add(n_keys, e.count(31)), e.count(32))
    line = builder.mul(ld, e.count(e.itemsize))
    row = e.variable(s)
    with e.loop(e.count(0), n_words) as word:
        bits = e.load_words(e.at(words, (builder.mul(word, ld), 4)))
        first = builder.mul(word, e.count(32))
        with e.loop(e.count(0), e.least(e.count(32), builder.sub(n_keys, first))) as bit:
            at = row.get()
            x = e.select(e.words_allow(bits, builder.trunc(bit, INT32)), e.load(at), masked)
            # Opaque, or LLVM stores the masked lanes alone: a random mask then cost 24 % of a call on a Zen
            # 3, not 10 % (2 cores, 2026-11-22).
            at = e.opaque(at)
            e.store(at, x)
            highest.set(e.maximum(highest.get(), x))
            row.set(builder.add(at, line))
    e.store(top, highest.get())


# The online softmax.


@stage()
def softmax_lanes(e: Emitter, s, tile_max, row_max, row_sum, rescale, ld, n_vectors, stops, first_chunk,
                  factor) -> None:  # fmt: skip
    """One step for all vectors of lanes, as `softmax` of the kernel contract."""
    builder = e.builder
    empty = e.constant(-math.inf)
    line = builder.mul(ld, e.count(e.itemsize))
    lowest = e.splat(builder.fdiv(ir.Constant(e.real, float(EXPONENT_MIN[e.itemsize])), factor))
    factor = e.splat(factor)
    with e.loop(e.count(0), n_vectors) as vector:
        lane = (vector, LANE_BYTES)
        old = e.load(e.at(row_max, lane))
        top = e.maximum(old, e.load(e.at(tile_max, lane)))
        # -inf - 0 where the row is still empty: -inf - -inf would be NaN.
        base = e.select(e.equal(top, empty), e.zero(), top)
        total = e.variable(e.zero())
        row = e.variable(e.at(s, lane))

        def weigh(addresses: list[Any]) -> list[Any]:
            x = exp2(e, [e.sub(e.load(address), base) for address in addresses], factor, lowest)
            for address, weight in zip(addresses, x, strict=True):
                e.store(address, weight)
            return x

        with each_chunk(e, e.load_address(e.at(stops, (vector, 8))), first_chunk) as (_, start, stop):
            some = e.variable(e.zero())
            n = builder.sub(stop, start)
            with e.loop(e.count(0), builder.sdiv(n, e.count(EXP2_KEYS))):
                at = row.get()
                x = weigh([e.at(at, (i, line)) for i in range(EXP2_KEYS)])
                some.set(e.add(some.get(), add_in_tree(e, x)))
                row.set(e.opaque(e.at(at, (EXP2_KEYS, line))))
            left = builder.srem(n, e.count(EXP2_KEYS))
            with builder.if_then(builder.icmp_signed(">", left, e.count(0))):
                # As if the missing keys were masked: where a vector's keys end depends on its other lanes.
                rest = [e.variable(e.zero()) for _ in range(EXP2_KEYS)]
                for i, one in enumerate(rest[:-1]):
                    with builder.if_then(builder.icmp_signed("<", e.count(i), left)):
                        at = row.get()
                        one.set(weigh([at])[0])
                        row.set(e.at(at, (line, 1)))
                some.set(e.add(some.get(), add_in_tree(e, [one.get() for one in rest])))
            total.set(e.add(total.get(), some.get()))
        scale = exp2(e, [e.sub(old, base)], factor, lowest)[0]
        e.store(e.at(rescale, lane), scale)
        e.store(e.at(row_sum, lane), e.fma(e.load(e.at(row_sum, lane)), scale, total.get()))
        e.store(e.at(row_max, lane), top)


# Values.


def _accumulate_tile(rows: int, vectors: int, is_whole: bool) -> Any:
    def accumulate_tile(e: Emitter, acc, p, scale, is_first, ld, v, v_row, n_cols, stops, first_chunk,
                        prefetch, n_prefetch, prefetch_byte) -> None:  # fmt: skip
        """acc = scale * acc + V^T P^T, or V^T P^T alone if is_first, for `rows` columns if is_whole, else for
        n_cols columns, the last of which is repeated. Each of the first n_prefetch keys prefetches the cache
        line at prefetch_byte of one of the addresses `prefetch`, two where the register tile is wide; the
        others prefetch values."""
        builder = e.builder
        sums = [[e.variable(e.zero()) for _ in range(vectors)] for _ in range(rows)]
        if is_whole:
            columns = [e.count(r * e.itemsize) for r in range(rows)]
        else:
            last = builder.sub(n_cols, e.count(1))
            columns = [builder.mul(e.least(e.count(r), last), e.count(e.itemsize)) for r in range(rows)]
        ends = [e.load_address(e.at(stops, (i, 8))) for i in range(vectors)]
        line = builder.mul(ld, e.count(e.itemsize))
        fresh = builder.icmp_signed("!=", is_first, e.count(0))

        def most(a: Any, b: Any) -> Any:
            return builder.select(builder.icmp_signed(">", a, b), a, b)

        def add_keys(first: int, begin: Any, end: Any, is_listed: bool) -> None:
            value, weight = e.variable(e.at(v, (begin, v_row))), e.variable(e.at(p, (begin, line)))

            def add_key(j: Any = None) -> None:
                at, weights = value.get(), weight.get()
                if is_listed:
                    listed = e.at(e.load_address(e.at(prefetch, (j, 8))), (prefetch_byte, 1))
                    for i in range(rows // TILE_ROWS):
                        e.prefetch(e.at(listed, (i, LINE_BYTES)))
                else:
                    e.prefetch(e.at(at, (PREFETCH_VALUES, v_row)))
                x = {
                    i: e.load(e.at(weights, (i * e.lanes, e.itemsize)), LANE_BYTES)
                    for i in range(first, vectors)
                }
                for r in range(rows):
                    y = e.splat(e.load_scalar(builder.add(at, columns[r])))
                    for i in range(first, vectors):
                        sums[r][i].set(e.fma(x[i], y, sums[r][i].get()))
                value.set(e.opaque(builder.add(at, v_row)))
                weight.set(e.opaque(builder.add(weights, line)))

            if first == 0 and not is_listed:
                # Unrolled twice: the loop over single keys took 2 to 5 % longer on a core whose other
                # hyper-thread was busy (Emerald Rapids, 2026-11-22). In the loop over listed rows no gain
                # could be seen.
                n = most(builder.sub(end, begin), e.count(0))
                with e.loop(e.count(0), builder.sdiv(n, e.count(2))):
                    add_key()
                    add_key()
                begin = builder.sub(end, builder.and_(n, e.count(1)))
            with e.loop(begin, end) as j:
                add_key(j)

        with each_chunk(e, ends[-1], first_chunk) as (chunk, start, stop):
            for r in range(rows):
                for i in range(vectors):
                    sums[r][i].set(e.zero())
            begin = start
            for first in range(vectors):
                # The vectors before `first` have no more keys in this chunk.
                end = e.least(ends[first], stop)
                if first == 0:
                    middle = e.least(end, n_prefetch)
                    add_keys(first, begin, middle, True)
                    begin = most(begin, middle)
                add_keys(first, begin, end, False)
                begin = most(begin, end)  # a stop may lie before the chunk
            to = [
                [e.at(acc, (r, line), (i * e.lanes, e.itemsize)) for i in range(vectors)] for r in range(rows)
            ]
            with builder.if_else(builder.icmp_signed("==", chunk, e.count(0))) as (first_sum, other_sum):
                with first_sum:
                    for i in range(vectors):
                        factor = e.load(e.at(scale, (i * e.lanes, e.itemsize)), LANE_BYTES)
                        for r in range(rows):
                            x = sums[r][i].get()
                            both = e.fma(e.load(to[r][i], LANE_BYTES), factor, x)
                            e.store(to[r][i], builder.select(fresh, x, both), LANE_BYTES)
                with other_sum:
                    for i in range(vectors):
                        for r in range(rows):
                            before = e.load(to[r][i], LANE_BYTES)
                            e.store(to[r][i], e.add(before, sums[r][i].get()), LANE_BYTES)

    accumulate_tile.__qualname__ += f"_{rows}_{vectors}_{is_whole}"
    return stage()(accumulate_tile)


accumulate_tile_1, accumulate_tile_2, accumulate_tile_3 = (
    _accumulate_tile(TILE_ROWS, vectors, True) for vectors in (1, 2, 3)
)
accumulate_last_tile_1, accumulate_last_tile_2, accumulate_last_tile_3 = (
    _accumulate_tile(TILE_ROWS, vectors, False) for vectors in (1, 2, 3)
)
accumulate_wide_tile = _accumulate_tile(WIDE_ROWS, 1, True)


@stage()
def pack_panels(e: Emitter, panels, panel, v, v_row, n_keys, n_panels) -> None:
    """Rows of values without gaps into panels that all have TILE_ROWS columns."""
    columns = ir.VectorType(e.real, TILE_ROWS).as_pointer()
    nbytes = TILE_ROWS * e.itemsize
    with e.loop(e.count(0), n_keys) as j:
        at = e.at(v, (j, v_row))
        with e.loop(e.count(0), n_panels) as i:
            source = e.at(at, (i, nbytes))
            e.prefetch(e.at(source, (PREFETCH_PACKED, v_row)))
            x = e.builder.load(e.builder.inttoptr(source, columns), align=1)
            to = e.at(panels, (i, panel), (j, nbytes))
            e.builder.store(x, e.builder.inttoptr(to, columns), align=e.itemsize)


# The end of a block.


@stage()
def invert_sums(e: Emitter, inverse, row_sum, ld) -> None:
    """1 / row_sum rounded towards 0, 0 for an empty row, and ld elements behind it the remainder."""
    builder = e.builder
    sums = e.load(row_sum)
    one = e.constant(1.0)
    some = builder.fcmp_unordered("!=", sums, e.zero())
    high = builder.fdiv(one, sums)
    down = builder.sext(builder.fcmp_ordered("<", e.one_minus_product(high, sums), e.zero()), e.integers)
    # Down by one ULP where it was rounded up: for a positive float that is 1 less as an integer.
    high = builder.bitcast(builder.add(builder.bitcast(high, e.integers), down), e.vector)
    left = e.one_minus_product(high, sums)
    nothing = e.equal(left, e.zero())
    low = e.select(nothing, e.mul(high, e.constant(NO_LOW[e.itemsize])), e.mul(left, high))
    e.store(inverse, e.select(some, high, e.zero()))
    e.store(e.at(inverse, (ld, e.itemsize)), e.select(some, low, e.zero()))


#: Times `high` it is the `low` where the remainder is 0: too small to change a result.
NO_LOW = {4: 2.0**-60, 8: 2.0**-118}
