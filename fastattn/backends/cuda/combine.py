"""`merge_attention` of arrays on a GPU: pieces are merged one after another, in float64."""

from __future__ import annotations

import math
from functools import cache
from itertools import chain, product
from typing import Any

import numpy as np
from numba import cuda

from fastattn._machine.device import DeviceArray
from fastattn.backends.cuda.intrinsics import U, memory, read_as, write_as
from fastattn.backends.cuda.launch import launch_of
from fastattn.backends.cuda.stream import SIMULATED, Stream, View, caller_stream
from fastattn.backends.cuda.tiles import element

THREADS = 4 if SIMULATED else 256


def combine(pieces: list[tuple[DeviceArray, DeviceArray]], out: DeviceArray, lse: DeviceArray) -> None:
    """Makes `out` and `lse`, the merged pieces; each piece is an out and its lse."""
    with caller_stream(pieces[0][0]) as stream:
        stream.make(out.memory)
        stream.make(lse.memory)
        if lse.size:
            stream.wait_for([array.memory for array in chain.from_iterable(pieces)])
            _fold(stream, pieces, [stream.view(out), stream.view(lse)])
        stream.hand_over(out.memory)
        stream.hand_over(lse.memory)


def _fold(stream: Stream, pieces: list[tuple[DeviceArray, DeviceArray]], results: list[View]) -> None:
    shapes = [result.shape for result in results]
    nothing = np.zeros(()), np.full((), -np.inf)
    so_far = [
        stream.upload(np.broadcast_to(array, shape), np.float64)
        for array, shape in zip(nothing, shapes, strict=True)
    ]
    for piece in pieces:
        together = (
            [stream.room(shape, np.float64) for shape in shapes] if piece is not pieces[-1] else results
        )
        _two(stream, [*so_far, *map(stream.view, piece), *together], shapes[1], shapes[0][-1])
        so_far = together


def _two(stream: Stream, views: list[View], rows: tuple[int, ...], columns: int) -> None:
    """Launches the merge of two pieces; `views` are their out and lse, and those of the result."""
    views = [view.with_axes(max(0, 3 - len(rows))) for view in views]
    rows = (1,) * (3 - len(rows)) + rows
    inner = rows[-3:]
    blocks = -(-math.prod(inner) * max(columns, 1) // THREADS)
    for outer in product(*map(range, rows[:-3])):
        words = tuple(view.at(outer).words() for view in views)
        kernel = combine_kernel(*(str(view.dtype) for view in views))
        launch_of(kernel, blocks, THREADS, words, inner, columns)(stream)


@cache
def combine_kernel(*dtypes: str) -> Any:
    """``combine_two(views, rows, columns)``: a thread for each column of three axes of rows.

    views: of an out and an lse merged already (a), of a piece (b), and of the result. dtypes: theirs.
    """
    EMPTY = -math.inf
    of_a, of_lse_a, of_b, of_lse_b, of_out, of_lse = map(memory, dtypes)
    a_at, lse_a_at, b_at, lse_b_at = (read_as("float64", dtype) for dtype in dtypes[:4])
    write_out, write_lse = map(write_as, dtypes[4:])

    def combine_two(views, rows, columns):
        thread, n_columns = cuda.grid(1), max(columns, 1)
        row, column = thread // n_columns, thread % n_columns
        if row >= rows[0] * rows[1] * rows[2]:
            return
        i, j, k = row // rows[2] // rows[1], row // rows[2] % rows[1], row % rows[2]
        view_a, view_lse_a, view_b, view_lse_b, view_out, view_lse = views
        out_a, out_b, out = of_a(view_a), of_b(view_b), of_out(view_out)
        a = lse_a_at(of_lse_a(view_lse_a), U(element(view_lse_a, i, j, k)))
        b = lse_b_at(of_lse_b(view_lse_b), U(element(view_lse_b, i, j, k)))
        base = a if a > b else b
        if not EMPTY < base < math.inf:
            base = 0.0
        weight_a, weight_b = math.exp(a - base), math.exp(b - base)
        total = weight_a + weight_b
        if columns > 0:
            acc = weight_a * a_at(out_a, U(element(view_a, i, j, k) + column * view_a[4]))
            # A piece without keys is ignored, whatever its out holds.
            if b != EMPTY:
                acc += weight_b * b_at(out_b, U(element(view_b, i, j, k) + column * view_b[4]))
            at = element(view_out, i, j, k) + column * view_out[4]
            write_out(out, U(at), acc if total == 0.0 else acc / total)
        if column == 0:
            one = EMPTY if total == 0.0 else base + math.log(total)
            write_lse(of_lse(view_lse), U(element(view_lse, i, j, k)), one)

    return cuda.jit(combine_two)
