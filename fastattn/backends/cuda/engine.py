"""From a problem to launches: arrays to the device, the specialisation of the kernels, results back."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from fastattn._call.problem import AnyProblem
from fastattn._call.schedule import needs_natural_scores
from fastattn._call.storage import REAL, storage_of
from fastattn._machine.constants import LOG2E
from fastattn._machine.device import DeviceArray
from fastattn.backends.cuda.form import Form, Shape, Stored, choose_shape, keys_of_a_split
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
    B = problem.lead[-1] if n_lead else 1

    def staged(array: Any, kind: Any) -> View | None:
        if array is None:
            return None
        if isinstance(array, DeviceArray):
            return stream.view(array)
        is_stored = storage_of(array.dtype) != REAL
        return stream.upload(array, array.dtype.newbyteorder("=") if is_stored else kind)

    def result(array: Any, shape: tuple[int, ...]) -> View:
        """Where kernels write it: in place, or where the host copies it from."""
        if isinstance(array, DeviceArray):
            return stream.view(array)
        return stream.room(shape, dtype if array is None else array.dtype, True)

    mask_map, band = problem.mask_map, problem.band
    inputs = [staged(array, dtype) for array in (problem.query, problem.key, problem.value)]
    inputs += [staged(array, dtype) for array in (problem.plain_bias, problem.sinks)]
    lengths = staged(None if band is None else band.lengths, np.int64)
    start, stop = (staged(array, np.int64) for array in (problem.key_start, problem.key_stop))
    dense = staged(problem.dense, bool)
    index = staged(None if mask_map is None else mask_map.index, np.int32)
    bits = staged(None if mask_map is None else mask_map.bits, np.uint32)
    out, lse = result(problem.out, problem.out.shape), result(problem.lse, problem.out.shape[:-1])
    weights = None if problem.weights is None else result(problem.weights, problem.weights.shape)

    head_rows = H // K * L
    shape = choose_shape(str(dtype), head_rows, E, SIMULATED, stream.has_tensor_cores)
    split_keys = keys_of_a_split(head_rows, SIMULATED)
    n_splits = max(1, -(-S // split_keys))
    form = _form(problem, shape, [*inputs, dense, out], "out" if n_splits == 1 else "parts")
    cut = (-(-head_rows // shape.tile_q), max(1, -(-E // shape.tile_columns)), split_keys)
    factor = 1.0 if form.is_natural else LOG2E
    scale, softcap = form.real(problem.scale * factor), form.real(problem.softcap or 0)

    sizes = (B, H, K, L, S, D, E)
    rows = (B * H * L,)
    state = [stream.room(rows, dtype) for _ in range(2)] if form.keeps_sums else [None, None]
    parts: list[View] = []
    if n_splits > 1:
        parts = [stream.room((n_splits, *rows, n), dtype) for n in (E, 1, 1)]
    mods, aux = _functions(problem, stream)

    def attend(form: Form, cut: tuple[int, int, int], first_item: int, *views: tuple[Any, ...]) -> None:
        blocks = cut[0] * cut[1] * n_splits * K * B
        attend_kernel(form, **mods)[blocks, form.shape.num_threads, stream.launch](
            *views, sizes, (*cut, first_item), aux, scale, softcap
        )

    for n, outer in enumerate(product(*map(range, problem.lead[:-1]))):

        def words(view: View | None, outer: tuple[int, ...] = outer) -> tuple[Any, ...]:
            return () if view is None else view.at(outer).with_axes(0 if n_lead else 1).words()

        sinks = _words(inputs[4])
        read = (*map(words, inputs[:4]), sinks)
        masks = (
            () if band is None else (band.left, band.right, int(band.at_end)), words(lengths),
            () if start is None else (words(start), words(stop)), words(dense), words(index),
            _words(bits)[:1],
        )  # fmt: skip
        results = (words(out), words(lse), *map(_words, state))
        if n_splits == 1:
            attend(form, cut, n * B, read, masks, results)
        else:
            part_words = tuple(part.words()[:1] for part in parts)
            attend(form, cut, n * B, read, masks, (part_words[0], (), *part_words[1:]))
            merge_kernel(form)[-(-rows[0] * max(E, 1) // MERGE_THREADS), MERGE_THREADS, stream.launch](
                part_words, sinks, results, sizes, n_splits
            )
        if weights is not None and S > 0:
            results = (words(weights), (), *map(_words, state))
            of_weights = form._replace(stored=form.stored._replace(out=str(weights.dtype)), result="weights")
            attend(of_weights, (cut[0], 1, cut[2]), n * B, read, masks, results)
    for array, view in ((problem.out, out), (problem.lse, lse), (problem.weights, weights)):
        if isinstance(array, np.ndarray) and view is not None:
            stream.download(view, array)


def _words(view: View | None) -> tuple[Any, ...]:
    return () if view is None else view.words()


def _functions(problem: AnyProblem, stream: Stream) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The caller's functions on the device, and what they read."""
    both = {"score_mod": problem.score_mod, "mask_mod": problem.mask_mod}
    given = {kind: mod for kind, mod in both.items() if mod is not None}
    mods = {kind: device_function(kind, mod, problem.dtype) for kind, mod in given.items()}
    for kind, mod in given.items():
        sizes = (problem.batch, problem.num_heads, problem.len_q, problem.len_k)
        check_indices(kind, mod, problem.dtype, sizes)
    return mods, tuple(map(stream.argument, next((mod.aux for mod in given.values()), ())))


def _form(problem: AnyProblem, shape: Shape, views: list[View | None], result: str) -> Form:
    """How the kernel is cut. views: those of the arrays of `Stored`."""
    D, E, dtype = problem.head_dim, problem.value_dim, problem.dtype
    # Times log2(e), a large scale or soft-cap would make infinite what is not.
    is_natural = (
        needs_natural_scores(problem) or problem.softcap is not None or abs(problem.scale) * LOG2E > 1
    )
    stored = Stored(*(str(dtype if view is None else view.dtype) for view in views))
    are_packed = all(view.is_packed(dtype, shape.span) for view in views[:3] if view is not None)
    band = problem.band
    return Form(
        str(dtype), shape, stored, band is not None, band is not None and band.lengths is not None,
        problem.key_start is not None, problem.dense is not None, problem.mask_map is not None,
        bool(problem.bias), problem.softcap is not None, problem.sinks is not None,
        problem.score_mod is not None, problem.mask_mod is not None, is_natural,
        D % shape.depth == 0 and E > 0 and E % shape.tile_columns == 0,
        D % shape.span == E % shape.span == 0 and are_packed, result, problem.weights is not None,
    )  # fmt: skip
