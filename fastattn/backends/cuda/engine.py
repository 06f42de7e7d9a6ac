"""From a problem to launches: arrays to the device, the forms of the kernels, and results back."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numba import config, cuda

from fastattn._problem import Problem
from fastattn.backends.cuda.form import Form, choose_shape, keys_of_a_split
from fastattn.backends.cuda.kernel import attend_kernel, merge_kernel

#: Threads of a block of `merge`.
MERGE_THREADS = 4 if config.ENABLE_CUDASIM else 256


class View(NamedTuple):
    """An array on the device: all its memory in a row, and where its elements are in that."""

    flat: Any
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  #: in elements

    def at(self, outer: tuple[int, ...]) -> View:
        """The rest of the array at an index on its first axes."""
        start = self.start + sum(n * stride for n, stride in zip(outer, self.strides, strict=False))
        return View(self.flat, start, self.shape[len(outer) :], self.strides[len(outer) :])

    def words(self) -> tuple[int, int, int, int, int]:
        """What kernels read: the start and four strides."""
        one, two, three, four = (*self.strides, 0, 0, 0, 0)[:4]
        return self.start, one, two, three, four


def run(problem: Problem) -> None:
    """Fill ``problem.out``, and ``problem.lse`` and ``problem.weights`` where present."""
    if problem.batch * problem.num_heads * problem.len_q == 0:
        return
    dtype = problem.query.dtype
    H, K, L = problem.num_heads, problem.num_kv_heads, problem.len_q
    S, D, E = problem.len_k, problem.head_dim, problem.value_dim
    n_lead = len(problem.lead)
    empty = np.zeros((1,) * (n_lead + 4))

    def staged(array: np.ndarray | None, kind: Any) -> View:
        return _to_device(empty if array is None else array, np.dtype(kind))

    tiles = problem.tiles
    arrays = [
        staged(problem.query, dtype), staged(problem.key, dtype), staged(problem.value, dtype),
        staged(problem.key_start, np.int32), staged(problem.key_stop, np.int32),
        staged(problem.dense, bool),
        staged(None if tiles is None else tiles.index, np.int32), staged(problem.bias, dtype),
    ]  # fmt: skip
    bits = cuda.to_device(
        np.zeros(1, np.uint32) if tiles is None or not tiles.bits.size else tiles.bits.reshape(-1)
    )
    sinks = np.full(H, -np.inf, dtype) if problem.sinks is None else problem.sinks
    to_sinks = cuda.to_device(np.ascontiguousarray(sinks))
    head_rows = H // K * L
    simulated = bool(config.ENABLE_CUDASIM)
    shape = choose_shape(str(dtype), head_rows, E, simulated)
    form = Form(
        str(dtype), shape, problem.key_start is not None, problem.dense is not None, tiles is not None,
        problem.bias is not None, problem.softcap is not None,
        D % shape.depth == 0 and E > 0 and E % shape.tile_columns == 0,
    )  # fmt: skip
    split_keys = keys_of_a_split(head_rows, S, simulated)
    n_splits = max(1, -(-S // split_keys))
    cut = (-(-head_rows // shape.tile_q), max(1, -(-E // shape.tile_columns)), n_splits, split_keys)
    factor = 1.0 if form.is_natural else math.log2(math.e)
    real = form.real
    scale, softcap = real(problem.scale * factor), real(problem.softcap or 0)

    outer_shape, B = problem.lead[:-1], problem.lead[-1] if n_lead else 1
    for outer in product(*map(range, outer_shape)):
        q, k, v, start, stop, dense, index, bias = (_batched(array.at(outer), n_lead) for array in arrays)
        sizes = (B, H, K, L, S, D, E)
        rows = B * H * L
        parts = cuda.device_array(max(1, n_splits * rows * E), dtype)
        maxima, sums = (cuda.device_array(n_splits * rows, dtype) for _ in range(2))
        row_max, row_sum, to_lse = (cuda.device_array(rows, dtype) for _ in range(3))
        to_out = cuda.device_array(max(1, rows * E), dtype)
        views = [array.words() for array in (q, k, v, start, stop, dense, index, bias)]
        masks = (start.flat, stop.flat, dense.flat, index.flat, bits, bias.flat)
        blocks = math.prod((*cut[:3], K, B))
        attend_kernel(form)[blocks, shape.num_threads](
            q.flat, k.flat, v.flat, parts, maxima, sums, *masks, sizes, cut, *views, scale, softcap
        )  # fmt: skip
        merge_kernel(form.dtype, form.is_natural)[-(-rows * max(E, 1) // MERGE_THREADS), MERGE_THREADS](
            parts, maxima, sums, to_sinks, to_out, to_lse, row_max, row_sum, sizes, n_splits
        )  # fmt: skip
        problem.out[outer] = to_out.copy_to_host()[: rows * E].reshape(problem.out[outer].shape)
        if problem.lse is not None:
            problem.lse[outer] = to_lse.copy_to_host().reshape(problem.lse[outer].shape)
        if problem.weights is not None and S > 0:
            to_weights = cuda.to_device(np.zeros(rows * S, dtype))
            once = (cut[0], 1, 1, S)
            attend_kernel(form._replace(is_weights=True))[math.prod((once[0], K, B)), shape.num_threads](
                q.flat, k.flat, v.flat, to_weights, row_max, row_sum, *masks, sizes, once, *views, scale,
                softcap,
            )  # fmt: skip
            problem.weights[outer] = to_weights.copy_to_host().reshape(problem.weights[outer].shape)


def _to_device(array: np.ndarray, dtype: np.dtype) -> View:
    """A copy on the device that is as large as the array's memory, not as its broadcast shape."""
    stored = array[tuple(slice(None) if stride else slice(0, 1) for stride in array.strides)]
    stored = np.ascontiguousarray(stored, dtype)
    if dtype.kind == "b":
        stored = stored.view(np.uint8)
    strides = tuple(
        step // stored.itemsize if stride else 0
        for step, stride in zip(stored.strides, array.strides, strict=True)
    )
    flat = cuda.to_device(stored.reshape(-1) if stored.size else np.zeros(1, stored.dtype))
    return View(flat, 0, array.shape, strides)


def _batched(view: View, n_lead: int) -> View:
    """With an axis of batch items, where the problem has none."""
    return view if n_lead else View(view.flat, view.start, (1, *view.shape), (0, *view.strides))
