"""From a problem to launches: arrays to the device, the specialisation of the kernels, results back."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np

from fastattn._call.problem import AnyProblem
from fastattn._call.schedule import needs_natural_scores
from fastattn._machine.constants import LOG2E
from fastattn._machine.device import DeviceArray
from fastattn.backends.cuda.form import Form, Shape, choose_shape, keys_of_a_split
from fastattn.backends.cuda.functions import check_indices, device_function
from fastattn.backends.cuda.kernel import attend_kernel, merge_kernel
from fastattn.backends.cuda.stream import SIMULATED, Stream, View, caller_stream

#: Threads of a block of `merge`.
MERGE_THREADS = 4 if SIMULATED else 256


def run(problem: AnyProblem) -> None:
    """Fill ``problem.out``, and ``problem.lse`` and ``problem.weights`` where present."""
    results: tuple[Any, ...] = problem.out, problem.lse, problem.weights
    made: list[Any] = [
        array for array in results if isinstance(array, DeviceArray) and array.memory.address is None
    ]
    with caller_stream(problem.query) as stream:
        for array in made:
            stream.make(array.memory, filled_with_zeros=array is problem.weights)
        if problem.batch * problem.num_heads * problem.len_q > 0:
            read = problem.query, problem.key, problem.value, problem.plain_bias, problem.dense, problem.sinks
            mods = (mod for mod in (problem.score_mod, problem.mask_mod) if mod is not None)
            for array in (*read, problem.out, *(value for mod in mods for value in mod.aux)):
                if isinstance(array, DeviceArray):
                    stream.wait_for(array.memory)
            _solve(problem, stream)
        for array in made:
            stream.hand_over(array.memory)


def _solve(problem: AnyProblem, stream: Stream) -> None:
    dtype = problem.dtype
    H, K, L = problem.num_heads, problem.num_kv_heads, problem.len_q
    S, D, E, n_lead = problem.len_k, problem.head_dim, problem.value_dim, len(problem.lead)

    def staged(array: Any, kind: Any) -> View:
        if array is None:
            return stream.nothing(kind, n_lead + 4)
        return stream.view(array) if isinstance(array, DeviceArray) else stream.upload(array, kind)

    def result(array: Any, shape: tuple[int, ...]) -> View:
        """Where kernels write it: in place, or where the host copies it from."""
        return stream.view(array) if isinstance(array, DeviceArray) else stream.room(shape, dtype, True)

    mask_map = problem.mask_map
    key_start, key_stop = problem.intervals()
    q, k, v = (staged(array, dtype) for array in (problem.query, problem.key, problem.value))
    start, stop = (staged(array, np.int32) for array in (key_start, key_stop))
    dense, bias = staged(problem.dense, bool), staged(problem.plain_bias, dtype)
    sinks = staged(problem.sinks, dtype)
    index = staged(None if mask_map is None else mask_map.index, np.int32)
    bits = staged(None if mask_map is None else mask_map.bits, np.uint32)
    out, lse = result(problem.out, problem.out.shape), result(problem.lse, problem.out.shape[:-1])

    head_rows = H // K * L
    shape = choose_shape(str(dtype), head_rows, E, SIMULATED)
    split_keys = keys_of_a_split(head_rows, SIMULATED)
    n_splits = max(1, -(-S // split_keys))
    are_packed = all(x.is_packed(dtype, shape.span) for x in (q, k, v))
    form = _form(problem, shape, key_start is not None, are_packed, "out" if n_splits == 1 else "parts")
    n_tiles = -(-head_rows // shape.tile_q)
    tiles_and_splits = (n_tiles, max(1, -(-E // shape.tile_columns)), n_splits, split_keys)
    factor = 1.0 if form.is_natural else LOG2E
    scale, softcap = form.real(problem.scale * factor), form.real(problem.softcap or 0)

    B = problem.lead[-1] if n_lead else 1
    sizes = (B, H, K, L, S, D, E)
    n_rows = B * H * L
    row_max, row_sum = stream.empty(n_rows, dtype), stream.empty(n_rows, dtype)
    parts = maxima = sums = None
    if n_splits > 1:
        parts = stream.empty(n_splits * n_rows * E, dtype)
        maxima, sums = stream.empty(n_splits * n_rows, dtype), stream.empty(n_splits * n_rows, dtype)
    weights = out if problem.weights is None else result(problem.weights, problem.weights.shape)

    mods, aux = _functions(problem, stream)
    masks = (start.flat, stop.flat, dense.flat, index.flat, bits.flat)

    def attend(form: Form, cut: tuple[int, ...], views: Any, to: Any, to_max: Any, to_sum: Any) -> None:
        blocks = math.prod((*cut[:3], K, B))
        attend_kernel(form, **mods)[blocks, form.shape.num_threads, stream.launch](
            q.flat, k.flat, v.flat, masks, bias.flat, sinks.flat, aux, to, lse.flat, to_max, to_sum,
            sizes, cut, views, scale, softcap,
        )  # fmt: skip

    for n, outer in enumerate(product(*map(range, problem.lead[:-1]))):

        def words(*views: View, outer: tuple[int, ...] = outer) -> tuple[Any, ...]:
            return tuple(view.at(outer).with_axes(0 if n_lead else 1).words() for view in views)

        inputs = (*words(q, k, v, start, stop, dense, index, bias), sinks.words())
        to_results = words(out, lse)
        cut = (*tiles_and_splits, n * B)
        if n_splits == 1:
            attend(form, cut, (*inputs, *to_results), out.flat, row_max, row_sum)
        else:
            attend(form, cut, (*inputs, *to_results), parts, maxima, sums)
            merge = merge_kernel(form.dtype, form.is_natural, form.has_sinks)
            merge[-(-n_rows * max(E, 1) // MERGE_THREADS), MERGE_THREADS, stream.launch](
                parts, maxima, sums, sinks.flat, out.flat, lse.flat, row_max, row_sum, sizes,
                (inputs[-1], *to_results), n_splits,
            )  # fmt: skip
        if problem.weights is not None and S > 0:
            attend(
                form._replace(result="weights"), (n_tiles, 1, *cut[2:]), (*inputs, *words(weights, lse)),
                weights.flat, row_max, row_sum,
            )  # fmt: skip
    for array, view in ((problem.out, out), (problem.lse, lse), (problem.weights, weights)):
        if isinstance(array, np.ndarray):
            stream.download(view.flat, array)


def _functions(problem: AnyProblem, stream: Stream) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The caller's functions on the device, and what they read."""
    both = {"score_mod": problem.score_mod, "mask_mod": problem.mask_mod}
    given = {kind: mod for kind, mod in both.items() if mod is not None}
    mods = {kind: device_function(kind, mod, problem.dtype) for kind, mod in given.items()}
    for kind, mod in given.items():
        sizes = (problem.batch, problem.num_heads, problem.len_q, problem.len_k)
        check_indices(kind, mod, problem.dtype, sizes)
    return mods, tuple(map(stream.argument, next((mod.aux for mod in given.values()), ())))


def _form(problem: AnyProblem, shape: Shape, has_intervals: bool, are_packed: bool, result: str) -> Form:
    """How the kernel is cut."""
    D, E = problem.head_dim, problem.value_dim
    # Times log2(e), a large scale or soft-cap would make infinite what is not.
    is_natural = (
        needs_natural_scores(problem) or problem.softcap is not None or abs(problem.scale) * LOG2E > 1
    )
    return Form(
        str(problem.dtype), shape, has_intervals, problem.dense is not None, problem.mask_map is not None,
        bool(problem.bias), problem.softcap is not None, problem.sinks is not None,
        problem.score_mod is not None, problem.mask_mod is not None, is_natural,
        D % shape.depth == 0 and E > 0 and E % shape.tile_columns == 0,
        D % shape.span == E % shape.span == 0 and are_packed, result,
    )  # fmt: skip
