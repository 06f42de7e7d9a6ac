"""Register tiles for few query rows, too few to fill vectors of lanes; see `row_kernels`.

Lanes run along columns in products and along keys in the softmax. A row's result does not depend on the other
rows: register tiles of any number of rows do the same operations on each, and lanes are added in a tree of
fixed shape.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir

from fastattn._machine.constants import EXP2_KEYS, EXPONENT_MIN
from fastattn.backends.numba.codegen.across_lanes import reduce_lanes, sum_vectors
from fastattn.backends.numba.codegen.emit import INT32, Emitter
from fastattn.backends.numba.codegen.exponential import exp2
from fastattn.backends.numba.codegen.intrinsics import stage
from fastattn.backends.numba.codegen.register_tiles import (
    LINE_BYTES,
    add_in_tree,
    hyperbolic_tangent,
)
from fastattn.backends.numba.codegen.target import TARGET

ROW_SUMS = TARGET.row_sums  #: vectors of sums in a register tile of `accumulate_rows`, at most 8 for a row


@stage()
def pack_row(e: Emitter, to, row, n, high, low) -> None:
    """The first n of one vector of columns, times high + low, padded with zeros."""
    e.store(to, e.multiply_exactly(e.load_first(row, n), e.splat(high), e.splat(low)))


def _score_rows_tile(rows: int) -> Any:
    def score_rows_tile(e: Emitter, s, ld, q, q_ld, k, k_row, n_keys, head_dim, distance, prefetch_from,
                        prefetch_to) -> None:  # fmt: skip
        """Scores of `rows` rows and as many keys as give e.dots sums, of which n_keys exist and the last one
        is repeated for the others. Prefetches the lines prefetch_from .. prefetch_to - 1 of the rows
        `distance` bytes after the keys'."""
        builder = e.builder
        keys = e.dots // rows
        last = builder.sub(n_keys, e.count(1))
        key = [e.at(k, (e.least(e.count(j), last), k_row)) for j in range(keys)]
        sums = [[e.variable(e.zero()) for _ in range(keys)] for _ in range(rows)]

        def step(at: Any, load: Any) -> None:
            x = [e.load(e.at(q, (q_ld, r * e.itemsize), (at, 1)), e.itemsize) for r in range(rows)]
            for j in range(keys):
                y = load(e.at(key[j], (at, 1)))
                for r in range(rows):
                    sums[r][j].set(e.fma(x[r], y, sums[r][j].get()))

        width = e.lanes * e.itemsize
        whole = builder.sdiv(head_dim, e.count(e.lanes))
        with e.loop(e.count(0), whole) as i:
            at = builder.mul(i, e.count(width))
            line = builder.sdiv(at, e.count(LINE_BYTES))
            is_prefetched = builder.and_(
                builder.icmp_signed(">=", line, prefetch_from), builder.icmp_signed("<", line, prefetch_to)
            )
            with builder.if_then(is_prefetched):
                for j in range(keys):
                    e.prefetch(e.at(key[j], (distance, 1), (at, 1)), locality=2)
            step(at, e.load)
        tail = builder.sub(head_dim, builder.mul(whole, e.count(e.lanes)))
        with builder.if_then(builder.icmp_signed(">", tail, e.count(0))):
            step(builder.mul(whole, e.count(width)), lambda address: e.load_first(address, tail))

        flat = [one.get() for row in sums for one in row]
        totals = [sum_vectors(e, flat[i : i + e.lanes]) for i in range(0, len(flat), e.lanes)]
        n = min(keys, e.lanes)  # scores of one row in adjacent lanes of a vector
        for r in range(rows):
            for j in range(0, keys, n):
                vector, first = divmod(r * keys + j, e.lanes)
                picked = builder.shuffle_vector(
                    totals[vector], totals[vector], e.indices(range(first, first + n))
                )
                to = builder.inttoptr(
                    e.at(s, (ld, r * e.itemsize), (j, e.itemsize)), ir.VectorType(e.real, n).as_pointer()
                )
                builder.store(picked, to, align=e.itemsize)

    score_rows_tile.__qualname__ += f"_{rows}"
    return stage()(score_rows_tile)


score_rows_tile_1, score_rows_tile_2, score_rows_tile_4 = (_score_rows_tile(rows) for rows in (1, 2, 4))


@stage()
def multiply_row(e: Emitter, s, n_vectors, root) -> None:
    """s = root * (root * s)."""
    root = e.splat(root)
    with e.loop(e.count(0), n_vectors) as i:
        at = e.at(s, (i, e.lanes * e.itemsize))
        e.store(at, e.mul(root, e.mul(root, e.load(at))))


@stage()
def cap_row(e: Emitter, s, n_vectors, cap) -> None:
    """s = cap * tanh(s)."""
    cap = e.splat(cap)
    with e.loop(e.count(0), n_vectors) as i:
        at = e.at(s, (i, e.lanes * e.itemsize))
        e.store(at, e.mul(cap, hyperbolic_tangent(e, e.load(at))))


@stage()
def bias_row(e: Emitter, s, n_keys, bias) -> None:
    """s += bias, -inf where that is -inf."""
    builder, masked = e.builder, e.constant(-math.inf)
    n_vectors = builder.sdiv(builder.add(n_keys, e.count(e.lanes - 1)), e.count(e.lanes))
    with e.loop(e.count(0), n_vectors) as i:
        first = builder.mul(i, e.count(e.lanes))
        at = e.at(s, (first, e.itemsize))
        x = e.load_first(e.at(bias, (first, e.itemsize)), builder.sub(n_keys, first))
        e.store(at, e.select(e.equal(x, masked), masked, e.add(e.load(at), x)))


@stage()
def mask_row(e: Emitter, s, n_vectors, words, words_ld) -> None:
    """s = -inf where bit j % 32 of words[j / 32] is 0."""
    builder, masked = e.builder, e.constant(-math.inf)
    with e.loop(e.count(0), n_vectors) as i:
        first = builder.mul(i, e.count(e.lanes))
        at = e.at(words, (builder.mul(builder.sdiv(first, e.count(32)), words_ld), 4))
        word = builder.load(builder.inttoptr(at, INT32.as_pointer()), align=4)
        bits = builder.lshr(word, builder.trunc(builder.srem(first, e.count(32)), INT32))
        to = e.at(s, (first, e.itemsize))
        e.store(to, e.select(e.bits_allow(bits), e.load(to), masked))


@stage()
def softmax_row(e: Emitter, s, row_max, row_sum, n_vectors, factor, has_max) -> None:
    """s becomes exp2(factor * (s - row_max)), row_sum their sum; row_max is computed here unless has_max.
    Whole vectors: scores past the last key are -inf."""
    builder = e.builder
    empty = e.constant(-math.inf)
    lowest = e.splat(builder.fdiv(ir.Constant(e.real, float(EXPONENT_MIN[e.itemsize])), factor))
    factor = e.splat(factor)
    width = e.lanes * e.itemsize
    top = e.variable(empty)
    with e.loop(e.count(0), n_vectors) as i:
        top.set(e.maximum(top.get(), e.load(e.at(s, (i, width)))))
    known = builder.icmp_signed("!=", has_max, e.count(0))
    highest = builder.select(known, e.splat(e.load_scalar(row_max)), reduce_lanes(e, top.get(), e.maximum))
    e.store_scalar(row_max, e.lane(highest, 0))
    # -inf - 0 where the row is empty: -inf - -inf would be NaN.
    base = e.select(e.equal(highest, empty), e.zero(), highest)
    total = e.variable(e.zero())

    def weights(at: list[Any]) -> list[Any]:
        x = exp2(e, [e.sub(e.load(address), base) for address in at], factor, lowest)
        for address, weight in zip(at, x, strict=True):
            e.store(address, weight)
        return x

    groups = builder.sdiv(n_vectors, e.count(EXP2_KEYS))
    with e.loop(e.count(0), groups) as group:
        first = builder.mul(group, e.count(EXP2_KEYS))
        x = weights([e.at(s, (builder.add(first, e.count(i)), width)) for i in range(EXP2_KEYS)])
        total.set(e.add(total.get(), add_in_tree(e, x)))
    # The rest as if padded with masked vectors: where a row's keys end must change no bit.
    first = builder.mul(groups, e.count(EXP2_KEYS))
    rest = [e.variable(e.zero()) for _ in range(EXP2_KEYS)]
    for i, one in enumerate(rest):
        with builder.if_then(builder.icmp_signed("<", builder.add(first, e.count(i)), n_vectors)):
            one.set(weights([e.at(s, (builder.add(first, e.count(i)), width))])[0])
    total.set(e.add(total.get(), add_in_tree(e, [one.get() for one in rest])))
    e.store_scalar(row_sum, e.lane(reduce_lanes(e, total.get(), e.add), 0))


def _accumulate_rows_tile(rows: int, vectors: int) -> Any:
    def accumulate_rows_tile(e: Emitter, acc, ld, p, p_ld, v, v_row, n_keys, n_last, is_first, prefetch,
                             n_lines) -> None:  # fmt: skip
        """`rows` rows by `vectors` vectors of columns, or one of n_last columns where that is 0, over one
        chunk of keys; added to acc unless is_first. Prefetches for key j the n_lines cache lines from
        prefetch + j * v_row on."""
        builder = e.builder
        count = max(1, vectors)
        sums = [[e.variable(e.zero()) for _ in range(count)] for _ in range(rows)]
        with e.loop(e.count(0), n_keys) as j:
            with e.loop(e.count(0), n_lines) as line:
                e.prefetch(e.at(prefetch, (j, v_row), (line, LINE_BYTES)), locality=2)
            at = e.at(v, (j, v_row))
            if vectors:
                x = [e.load(e.at(at, (i * e.lanes, e.itemsize))) for i in range(vectors)]
            else:
                x = [e.load_first(at, n_last)]
            for r in range(rows):
                y = e.splat(
                    e.load_scalar(e.at(p, (builder.add(builder.mul(p_ld, e.count(r)), j), e.itemsize)))
                )
                for i in range(count):
                    sums[r][i].set(e.fma(x[i], y, sums[r][i].get()))
        fresh = builder.icmp_signed("!=", is_first, e.count(0))
        for r in range(rows):
            for i in range(count):
                to = e.at(acc, (ld, r * e.itemsize), (i * e.lanes, e.itemsize))
                before = builder.select(fresh, e.zero(), e.load(to))
                e.store(to, e.add(sums[r][i].get(), before))

    accumulate_rows_tile.__qualname__ += f"_{rows}_{vectors}"
    return stage()(accumulate_rows_tile)


#: Vectors in the widest register tile for 1, 2 and 4 rows.
WIDE_1, WIDE_2, WIDE_4 = (min(8, ROW_SUMS // rows) for rows in (1, 2, 4))
accumulate_rows_wide_1, accumulate_rows_wide_2, accumulate_rows_wide_4 = (
    _accumulate_rows_tile(rows, wide) for rows, wide in ((1, WIDE_1), (2, WIDE_2), (4, WIDE_4))
)
accumulate_rows_half_1, accumulate_rows_half_2, accumulate_rows_half_4 = (
    _accumulate_rows_tile(rows, wide // 2) for rows, wide in ((1, WIDE_1), (2, WIDE_2), (4, WIDE_4))
)
accumulate_rows_last_1, accumulate_rows_last_2, accumulate_rows_last_4 = (
    _accumulate_rows_tile(rows, 0) for rows in (1, 2, 4)
)


@stage()
def merge_row(e: Emitter, acc, row_max, row_sum, acc_2, row_max_2, row_sum_2, n_vectors, factor) -> None:
    """Merges a row's partial result (acc_2, row_max_2, row_sum_2) into (acc, row_max, row_sum)."""
    builder = e.builder
    empty = e.constant(-math.inf)
    lowest = e.splat(builder.fdiv(ir.Constant(e.real, float(EXPONENT_MIN[e.itemsize])), factor))
    tops = [e.splat(e.load_scalar(row_max)), e.splat(e.load_scalar(row_max_2))]
    top = e.maximum(*tops)
    base = e.select(e.equal(top, empty), e.zero(), top)
    one, two = exp2(e, [e.sub(x, base) for x in tops], e.splat(factor), lowest)
    e.store_scalar(row_max, e.lane(top, 0))
    sums = [e.splat(e.load_scalar(row_sum)), e.splat(e.load_scalar(row_sum_2))]
    e.store_scalar(row_sum, e.lane(e.fma(sums[0], one, e.mul(sums[1], two)), 0))
    with e.loop(e.count(0), n_vectors) as i:
        to, other = (e.at(at, (i, e.lanes * e.itemsize)) for at in (acc, acc_2))
        e.store(to, e.fma(e.load(to), one, e.mul(e.load(other), two)))


@stage(returns_bool=True)
def unpack_row(e: Emitter, row, tile, n, high, low) -> Any:
    """The first n of one vector of columns, times *high + *low; whether any is NaN."""
    high, low = e.splat(e.load_scalar(high)), e.splat(e.load_scalar(low))
    x = e.keep_first(e.multiply_exactly(e.load(tile), high, low), n)
    e.store_first(row, x, n)
    return e.any(e.is_nonfinite(x))
