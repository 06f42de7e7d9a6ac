"""From a problem to launches: arrays to the device, the specialisation of the kernels, results back.

What depends on no address is a `Plan`, which is kept for other calls: these make memory, wait for what fills
it, and launch.
"""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from fastattn._call.problem import AnyProblem
from fastattn._call.schedule import needs_natural_scores
from fastattn._call.storage import REAL, storage_of
from fastattn._machine.constants import LOG2E
from fastattn._machine.device import DeviceArray, c_strides
from fastattn.backends.cuda.form import Form, Shape, Stored, choose_shape, keys_of_a_split
from fastattn.backends.cuda.functions import check_indices, device_function
from fastattn.backends.cuda.kernel import attend_kernel, merge_kernel
from fastattn.backends.cuda.launch import launch_of
from fastattn.backends.cuda.pairs import PARTS
from fastattn.backends.cuda.stream import SIMULATED, Stream, View, caller_stream

#: Threads of a block of `merge`.
MERGE_THREADS = 4 if SIMULATED else 256

#: A plan depends on addresses by their remainders of this, which the bytes of every span divide.
ALIGNMENT = 64

ROOM_ALIGNMENT = 256  #: of arrays that share an allocation

#: Plans that are kept, the oldest goes first; those of more launches are not.
MAX_PLANS, MAX_LAUNCHES = 256, 64


class Arrays(NamedTuple):
    """The arrays of a problem, by whose numbers a plan knows their memory."""

    query: Any
    key: Any
    value: Any
    bias: Any
    sinks: Any
    lengths: Any
    start: Any
    stop: Any
    dense: Any
    index: Any
    bits: Any
    out: Any
    lse: Any
    weights: Any


#: The dtypes of copies of those that are not converted to the problem's.
COPIED_AS: dict[str, Any] = {
    "lengths": np.int64, "start": np.int64, "stop": np.int64, "dense": bool, "index": np.int32,
    "bits": np.uint32,
}  # fmt: skip

SCRATCH = len(Arrays._fields)  #: the number of what else is written
RESULTS = Arrays._fields.index("out")


class Plan(NamedTuple):
    """A call without its addresses."""

    launches: list[Any]
    scratch_nbytes: int
    held: Any  #: what the functions read, which must live as long


_plans: dict[Any, Plan] = {}


def run(problem: AnyProblem) -> None:
    """Fill ``problem.out``, and ``problem.lse`` and ``problem.weights`` where present."""
    arrays = _arrays(problem)
    made: list[Any] = [
        array for array in arrays[RESULTS:] if type(array) is DeviceArray and array.memory.address is None
    ]
    aux = [value for mod in (problem.score_mod, problem.mask_mod) if mod is not None for value in mod.aux]
    is_empty = 0 in problem.query.shape[:-1]
    with caller_stream(problem.query) as stream:
        if not is_empty:
            given = [array.memory for array in (*arrays, *aux) if type(array) is DeviceArray]
            stream.wait_for([memory for memory in given if memory.address is not None])
        for array in made:
            stream.make(array.memory, filled_with_zeros=array is problem.weights)
        if not is_empty:
            _solve(problem, arrays, stream)
        for array in made:
            stream.hand_over(array.memory)


def _arrays(problem: AnyProblem) -> Arrays:
    band, mask_map = problem.band, problem.mask_map
    return Arrays(
        problem.query, problem.key, problem.value, problem.plain_bias, problem.sinks,
        None if band is None else band.lengths, problem.key_start, problem.key_stop, problem.dense,
        None if mask_map is None else mask_map.index, None if mask_map is None else mask_map.bits,
        problem.out, problem.lse, problem.weights,
    )  # fmt: skip


def _solve(problem: AnyProblem, arrays: Arrays, stream: Stream) -> None:
    copies: dict[int, View] = {}  # on the device, of arrays on the host
    addresses = []
    for number, array in enumerate(arrays):
        address = 0
        if type(array) is DeviceArray:
            address = array.memory.address or 0
            address -= address % ALIGNMENT
        elif array is not None:
            if number < RESULTS:
                copy = stream.upload(array, _copied_as(Arrays._fields[number], array, problem.dtype))
            else:
                copy = stream.room(array.shape, array.dtype, filled_with_zeros=True)
            address, copies[number] = copy.address, copy
        addresses.append(address)

    signature = _signature(problem, arrays, stream.device)
    plan = _plans.get(signature) if signature else None
    if plan is None:
        plan = _plan(problem, arrays, copies, stream)
        if signature and len(plan.launches) <= MAX_LAUNCHES:
            if len(_plans) >= MAX_PLANS:
                with suppress(RuntimeError):  # another thread keeps one at the same time
                    _plans.pop(next(iter(_plans)), None)
            _plans[signature] = plan
    if plan.scratch_nbytes:
        scratch = stream.room((plan.scratch_nbytes,), np.uint8)
        addresses.append(scratch.address)
    for launch in plan.launches:
        launch(stream, addresses)
    for number in range(RESULTS, SCRATCH):
        if number in copies:
            stream.download(copies[number], arrays[number])


def _copied_as(name: str, array: Any, dtype: np.dtype) -> Any:
    """The dtype of a copy on the device."""
    if storage_of(array.dtype) != REAL:
        return array.dtype.newbyteorder("=")
    return COPIED_AS.get(name, dtype)


def _signature(problem: AnyProblem, arrays: Arrays, device: int) -> Any:
    """All that a plan depends on; None where it depends on more, as on functions."""
    if problem.score_mod is not None or problem.mask_mod is not None:
        return None
    band = problem.band
    return (
        device, problem.dtype, problem.scale, problem.softcap,
        None if band is None else (band.left, band.right, band.at_end),
        *[
            None if x is None
            else (x.shape, x.strides, x.stored, (x.memory.address or 0) % ALIGNMENT) if type(x) is DeviceArray
            else (x.shape, x.strides, x.dtype)
            for x in arrays
        ],
    )  # fmt: skip


def _plan(problem: AnyProblem, arrays: Arrays, copies: dict[int, View], stream: Stream) -> Plan:
    dtype = problem.dtype
    H, K, L = problem.num_heads, problem.num_kv_heads, problem.len_q
    S, D, E, n_lead = problem.len_k, problem.head_dim, problem.value_dim, len(problem.lead)
    B = problem.lead[-1] if n_lead else 1

    def placed(number: int) -> View | None:
        array = arrays[number]
        if array is None:
            return None
        if number in copies:
            return copies[number]._replace(owner=number, address=0)
        view, address = stream.view(array), array.memory.address or 0
        return view._replace(owner=number, address=view.address - address + address % ALIGNMENT)

    scratch_nbytes = 0

    def room(*shape: int) -> View:
        """A part of the scratch memory, C-contiguous."""
        nonlocal scratch_nbytes
        size, at = max(math.prod(shape), 1), scratch_nbytes
        scratch_nbytes += -(-size * dtype.itemsize // ROOM_ALIGNMENT) * ROOM_ALIGNMENT
        return View(SCRATCH, at, size, dtype, 0, shape, c_strides(shape))

    views = Arrays._make(map(placed, range(SCRATCH)))
    out, weights = views.out, views.weights
    lse = room(*problem.out.shape[:-1]) if views.lse is None else views.lse
    *qkv, bias = views[:4]
    band, head_rows = problem.band, H // K * L
    changes_scores = bool(problem.bias) or problem.score_mod is not None
    kinds = {view.dtype.name for view in qkv}
    pairs = next(iter(kinds)) if len(kinds) == 1 and kinds <= PARTS.keys() else ""
    shape = choose_shape(str(dtype), head_rows, E, SIMULATED, stream.has_tensor_cores, changes_scores, pairs)
    span = shape.span * shape.pair
    is_packed = D % span == E % span == 0 and all(view.is_packed(dtype, span) for view in qkv)
    if shape.pairs:
        qkv = [view.in_pairs(is_packed) for view in qkv]
    split_keys = keys_of_a_split(head_rows, SIMULATED)
    n_splits = max(1, -(-S // split_keys))
    inputs = [*qkv, bias]
    form = _form(
        problem,
        shape,
        is_packed,
        [*inputs, views.sinks, views.dense, out],
        "out" if n_splits == 1 else "parts",
    )
    cut = (-(-head_rows // shape.tile_q), max(1, -(-E // shape.tile_columns)), split_keys)
    factor = 1.0 if form.is_natural else LOG2E
    scale, softcap = form.real(problem.scale * factor), form.real(problem.softcap or 0)

    sizes, rows = (B, H, K, L, S, D // (shape.pair // form.unit), E), B * H * L
    state = [room(rows) for _ in range(2)] if form.keeps_sums else [None, None]
    parts = [room(n_splits, rows, n) for n in (E, 1, 1)] if n_splits > 1 else []
    mods, aux = _functions(problem, stream)
    launches: list[Any] = []

    def attend(form: Form, cut: tuple[int, int, int], first_item: int, *views: tuple[Any, ...]) -> None:
        blocks = cut[0] * cut[1] * n_splits * K * B
        kernel = attend_kernel(form, **mods)
        arguments = (*views, sizes, (*cut, first_item), aux, scale, softcap)
        launches.append(launch_of(kernel, blocks, form.shape.num_threads, *arguments))

    for n, outer in enumerate(product(*map(range, problem.lead[:-1]))):

        def words(view: View | None, outer: tuple[int, ...] = outer) -> tuple[Any, ...]:
            return () if view is None else view.at(outer).with_axes(0 if n_lead else 1).words()

        sinks = _words(views.sinks)
        read = (*map(words, inputs), sinks)
        masks = (
            () if band is None else (band.left, band.right, int(band.at_end)), words(views.lengths),
            () if views.start is None else (words(views.start), words(views.stop)), words(views.dense),
            words(views.index), _words(views.bits)[:1],
        )  # fmt: skip
        results = (words(out), words(lse), *map(_words, state))
        if n_splits == 1:
            attend(form, cut, n * B, read, masks, results)
        else:
            part_words = tuple(part.words()[:1] for part in parts)
            attend(form, cut, n * B, read, masks, (part_words[0], (), *part_words[1:]))
            blocks = -(-rows * max(E, 1) // MERGE_THREADS)
            arguments = part_words, sinks, results, sizes, n_splits
            launches.append(launch_of(merge_kernel(form), blocks, MERGE_THREADS, *arguments))
        if weights is not None and S > 0:
            results = (words(weights), (), *map(_words, state))
            of_weights = form._replace(stored=form.stored._replace(out=str(weights.dtype)), result="weights")
            attend(of_weights, (cut[0], 1, cut[2]), n * B, read, masks, results)
    return Plan(launches, scratch_nbytes, aux)


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


def _form(problem: AnyProblem, shape: Shape, is_packed: bool, views: list[View | None], result: str) -> Form:
    """How the kernel is cut. views: those of the arrays of `Stored`."""
    D, E, dtype = problem.head_dim, problem.value_dim, problem.dtype
    # Times log2(e), a large scale or soft-cap would make infinite what is not.
    is_natural = (
        needs_natural_scores(problem) or problem.softcap is not None or abs(problem.scale) * LOG2E > 1
    )
    stored = Stored(*(str(dtype if view is None else view.dtype) for view in views))
    band = problem.band
    return Form(
        str(dtype), shape, stored, band is not None, band is not None and band.lengths is not None,
        problem.key_start is not None, problem.dense is not None, problem.mask_map is not None,
        bool(problem.bias), problem.softcap is not None, problem.sinks is not None,
        problem.score_mod is not None, problem.mask_mod is not None, is_natural,
        D % (shape.depth * shape.pair) == 0 and E > 0 and E % shape.tile_columns == 0, is_packed, result,
        problem.weights is not None,
    )  # fmt: skip
