"""The register tile of both products, and the transposition of a tile, written as LLVM IR.

Scores are S^T = K Q^T, with a key in each row and a query row in each lane. Outputs are O^T = V^T P^T, with a
column of the values in each row. Both are `multiply_rows`: the left factor lies in the caller's memory with
any strides, and is broadcast from there; the right factor and the product are tiles of lanes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from fastattn.backends.jit.codegen.emit import INTP, Emitter, Variable
from fastattn.backends.jit.codegen.target import TARGET
from fastattn.backends.numba.calls import OPTIONS

LINE_NBYTES = 64
VECTORS, ROWS = TARGET.tile_vectors, TARGET.tile_rows  #: of a register tile


def _register_tile(rows: int, vectors: int) -> Any:
    """The product of `rows` rows and `vectors` vectors of lanes."""

    @intrinsic
    def register_tile(
        context: Any, c: Any, a: Any, b: Any, row: Any, lane: Any, start: Any, stop: Any, adds: Any
    ) -> Any:
        """`multiply_rows` for this tile, from `lane` on."""
        size = c.dtype.bitwidth // 8
        name = f"fastattn.register_tile.{c.dtype}.{rows}.{vectors}"

        def codegen(context: Any, builder: Any, call: Any, values: Any) -> Any:
            to, left, right = (
                make_array(kind)(context, builder, value)
                for kind, value in zip(call.args[:3], values[:3], strict=True)
            )
            row, lane, start, stop, adds = values[3:]
            (c_row, _), (a_row, a_step), (b_row, _) = (
                cgutils.unpack_tuple(builder, array.strides) for array in (to, left, right)
            )
            e = Emitter(builder, size)
            c_at, a_at, b_at = (builder.ptrtoint(array.data, INTP) for array in (to, left, right))
            n_rows = builder.sub(cgutils.unpack_tuple(builder, left.shape)[0], row)
            arguments = [
                e.at(c_at, (row, c_row), (lane, size)), c_row,
                e.at(a_at, (row, a_row), (start, a_step)), a_row, a_step,
                e.at(b_at, (start, b_row), (lane, size)), b_row,
                n_rows, builder.sub(stop, start), builder.zext(adds, INTP),
            ]  # fmt: skip
            builder.call(_function(builder.module, name, size, rows, vectors), arguments)
            return context.get_dummy_value()

        return types.void(c, a, b, *[types.intp] * 4, types.boolean), codegen

    return register_tile


def _function(module: Any, name: str, itemsize: int, rows: int, vectors: int) -> Any:
    """A function of its own: inlined, its addresses would take the registers of its caller's loops."""
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [INTP] * 10), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    e = Emitter(builder, itemsize)
    c, c_row, a, a_row, a_step, b, b_row, n_rows, n_steps, adds = function.args
    last = builder.sub(n_rows, e.count(1))
    starts = [e.opaque(e.at(a, (e.least(e.count(r), last), a_row))) for r in range(rows)]
    sums = [[Variable(builder, e.zero()) for _ in range(vectors)] for _ in range(rows)]
    offset, right = Variable(builder, e.count(0)), Variable(builder, b)
    nbytes = e.lanes * itemsize

    def step() -> None:
        at, line = offset.get(), right.get()
        x = [e.load(e.at(line, (v, nbytes)), itemsize) for v in range(vectors)]
        for r in range(rows):
            y = e.splat(e.load_scalar(builder.add(starts[r], at)))
            for v in range(vectors):
                sums[r][v].set(e.fma(x[v], y, sums[r][v].get()))
        offset.set(e.opaque(builder.add(at, a_step)))
        right.set(e.opaque(builder.add(line, b_row)))

    with cgutils.for_range(builder, builder.sdiv(n_steps, e.count(2))):
        step()
        step()
    with builder.if_then(builder.trunc(n_steps, ir.IntType(1))):
        step()
    is_new = builder.icmp_signed("==", adds, e.count(0))
    for r in range(rows):
        for v in range(vectors):
            to = e.at(c, (c_row, r), (v, nbytes))
            before = builder.select(is_new, e.zero(), e.load(to, itemsize))
            e.store(to, e.add(sums[r][v].get(), before), itemsize)
    builder.ret_void()
    return function


def _multiply(rows: int) -> Any:
    """`multiply_rows` in register tiles of so many rows."""
    whole, pair, single = (_register_tile(rows, vectors) for vectors in (VECTORS, 2, 1))

    @njit(**OPTIONS)
    def multiply(c, a, b, row, n_vectors, start, stop, adds):
        lanes = TARGET.vector_bytes // c.itemsize
        for vector in range(0, n_vectors, VECTORS):
            lane, left = vector * lanes, n_vectors - vector
            if left >= VECTORS:
                whole(c, a, b, row, lane, start, stop, adds)
            elif left == 2:
                pair(c, a, b, row, lane, start, stop, adds)
            else:
                single(c, a, b, row, lane, start, stop, adds)

    return multiply


#: c[i, lane] = the sum of a[i, x] * b[x, lane] over x from start to stop, for ROWS rows i from `row` on. It
#: is added to what is there if `adds`. Past the last row of a, that row is repeated.
multiply_rows = _multiply(ROWS)
_multiply_4, _multiply_2 = _multiply(4), _multiply(2)


@njit(**OPTIONS)
def multiply_few(c, a, b, n_vectors, start, stop, adds):
    """`multiply_rows` for all rows of a, of which there are few."""
    n_rows = a.shape[0]
    if n_rows <= 2:
        _multiply_2(c, a, b, 0, n_vectors, start, stop, adds)
    elif n_rows <= 4:
        _multiply_4(c, a, b, 0, n_vectors, start, stop, adds)
    else:
        for row in range(0, n_rows, ROWS):
            multiply_rows(c, a, b, row, n_vectors, start, stop, adds)


@intrinsic
def transpose_block(context: Any, to: Any, to_row: Any, to_col: Any, x: Any, row: Any, col: Any) -> Any:
    """to[to_row + i, to_col + j] = x[row + j, col + i] for as many i and j as a vector has lanes."""

    def codegen(context: Any, builder: Any, call: Any, values: Any) -> Any:
        e = Emitter(builder, to.dtype.bitwidth // 8)

        def lines(kind: Any, value: Any, row: Any, col: Any) -> list[Any]:
            array = make_array(kind)(context, builder, value)
            step, _ = cgutils.unpack_tuple(builder, array.strides)
            start = e.at(builder.ptrtoint(array.data, INTP), (row, step), (col, e.itemsize))
            return [e.at(start, (i, step)) for i in range(e.lanes)]

        vectors = [e.load(line) for line in lines(x, *values[3:])]
        half = e.lanes // 2
        while half:  # rounds of swapping off-diagonal blocks
            low = [e.lanes + i - half if i & half else i for i in range(e.lanes)]
            high = [e.lanes + i if i & half else i + half for i in range(e.lanes)]
            for i in range(e.lanes):
                if not i & half:
                    pair = vectors[i], vectors[i + half]
                    vectors[i] = builder.shuffle_vector(*pair, e.indices(low))
                    vectors[i + half] = builder.shuffle_vector(*pair, e.indices(high))
            half //= 2
        for line, vector in zip(lines(to, *values[:3]), vectors, strict=True):
            e.store(line, vector)
        return context.get_dummy_value()

    intp = types.intp
    return types.void(to, intp, intp, x, intp, intp), codegen


@intrinsic
def prefetch(context: Any, array: Any, row: Any, byte: Any) -> Any:
    """Prefetches the cache line at a byte of a row, into L2."""

    def codegen(context: Any, builder: Any, call: Any, values: Any) -> Any:
        e, view = Emitter(builder, 4), make_array(array)(context, builder, values[0])
        step = cgutils.unpack_tuple(builder, view.strides)[0]
        e.prefetch(e.at(builder.ptrtoint(view.data, INTP), (values[1], step), (values[2], 1)))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), codegen


@njit(**OPTIONS)
def prefetch_row(array, row):
    for byte in range(0, array.shape[1] * array.itemsize, LINE_NBYTES):
        prefetch(array, row, byte)


@njit(**OPTIONS)
def transpose(to, x, n_rows, n_cols):
    """to[j, i] = x[i, j] for the first rows and columns of x, in whole blocks."""
    lanes = TARGET.vector_bytes // to.itemsize
    for i in range(0, n_rows, lanes):
        for j in range(0, n_cols, lanes):
            transpose_block(to, j, i, x, i, j)
