"""What an adapter is: a version, the ways in which its library computes a case, and its matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fastattn.bench.case import Case, Inputs, Layer, itemsize, numpy_dtype
from fastattn.bench.cases import MEMORY_CASES

#: A library that stores the scores is refused when they would take more than this share of the machine's
#: memory, or of its free memory: most libraries hold the scores more than once, and several hold a case at
#: the same time. On a machine that does nothing else the first share decides, so that whether a library is
#: refused does not depend on the other libraries.
SHARE_OF_ALL, SHARE_OF_FREE = 1 / 8, 1 / 4

#: Up to this many query rows, as in decoding, a library may be quicker without its fused operator.
FEW_ROWS = 16


class Unable(Exception):
    """A library cannot express a case; the message says why."""


class Redundant(Unable):
    """A way that would do the same as another way of the same library; it is left out without a word."""


#: Keys and values as a library holds them after a call, ``(B, K, S, D)``.
Held = Callable[[], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, slots=True)
class Call:
    """A case made ready in one library."""

    run: Callable[[], object]  #: what is timed; does all of the work, and nothing but it
    #: runs it and gives the output as ``(B, H, L, E)``, or what else a case asks for as `joined`; not timed
    result: Callable[[], np.ndarray]
    #: of a library that holds other numbers than the case, in an int8 of its own: it is checked against the
    #: right answer for these
    held: Held | None = None


#: Makes a case ready; raises `Unable`, or its library's own error, when the library cannot do the case.
Way = Callable[[Case, Inputs], Call]


@dataclass(frozen=True, slots=True)
class Products:
    """The matrix products before and after attention in a model, made ready in one library."""

    before: Callable[[], object]  #: ``rows @ w_qkv``; what it gives can be made a NumPy array
    after: Callable[[], object]  #: ``attended @ w_o``


def _no_gradients(case: Case, inputs: Inputs) -> Call:
    raise Unable("no gradients")


def _no_recurrence(case: Case, inputs: Inputs) -> Call:
    raise Unable("no gated linear attention")


def _no_reduction(case: Case, inputs: Inputs) -> Call:
    raise Unable("no scores without values")


class Peer:
    """What `worker` drives. The module has ``load(num_threads) -> Peer``."""

    version: str
    ways: Mapping[str, Way]  #: each by its label; all are checked; the fastest right one is timed
    backward_ways: Mapping[str, Way] = {"backward": _no_gradients}  #: those of backward cases
    recurrent_ways: Mapping[str, Way] = {"recurrence": _no_recurrence}  #: those of cases with a `rule`
    reduction_ways: Mapping[str, Way] = {"reduction": _no_reduction}  #: those of cases with a reduction

    def products(self, layer: Layer) -> Products:
        """The products of the process's NumPy, which a library without matrix products of its own meets."""
        return Products(lambda: layer.rows @ layer.w_qkv, lambda: layer.attended @ layer.w_o)


def joined(results: Iterable[np.ndarray]) -> np.ndarray:
    """The elements of all results one after another.

    Gradients by query, key, value and, where there is one, bias; those of the first three are
    ``(B, heads, length, dim)``. By a `rule` the output ``(B, H, L, E)``, then the state ``(B, K, D, E)``.
    """
    return np.concatenate([result.reshape(-1) for result in results])


def with_scores_of(case: Case, inputs: Inputs, values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The result of "topk": its scores, and beside them those of its keys, ``(2, B, H, L, k)``."""
    query, key, _ = inputs.bhsd(case)
    own = np.empty(values.shape)
    for b, h in np.ndindex(case.batch, case.heads):
        rows = key[b, h // (case.heads // case.kv_heads)].astype(np.float64)[index[b, h]]
        own[b, h] = np.einsum("ld,lkd->lk", query[b, h].astype(np.float64), rows) * case.head_dim**-0.5
    return np.stack([values, own])


def check_plain(case: Case) -> None:
    """Raise `Unable` for a way that takes three arrays of one dtype, and nothing else."""
    if case.storage is not None:
        raise Unable(f"no {case.dtype} queries over {case.storage} keys and values")
    if case.page_size is not None:
        raise Unable("no pages")
    if case.step:
        raise Unable("no cache to append to")


def take_new(case: Case, array: np.ndarray) -> np.ndarray:
    """The keys or values that a step appends: the last L of ``(..., S, dim)``, which become 0 in `array`."""
    new = array[..., case.len_k - case.len_q :, :]
    taken = new.copy()
    new[...] = 0
    return taken


def available_memory() -> int:
    """Bytes that can be had without swapping, as Linux estimates them; elsewhere OSError."""
    return _meminfo("MemAvailable")


def _meminfo(field: str) -> int:
    """A field of /proc/meminfo in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/meminfo has no {field}")


def check_scores_fit(case: Case) -> None:
    """Raise `Unable` for a library that stores the scores when they would fill the memory.

    To be called before anything large is made, a mask among it. `MEMORY_CASES` pass: what they need is the
    question there, and they run alone and under a limit.
    """
    needed = case.batch * case.heads * case.len_q * case.len_k * itemsize(case.dtype)
    needed *= 2 if case.backward else 1  # the weights are kept beside what becomes of them
    try:
        limit = min(SHARE_OF_ALL * _meminfo("MemTotal"), SHARE_OF_FREE * available_memory())
    except OSError:  # not on Linux: nobody knows
        return
    if needed > limit and case.name not in MEMORY_CASES:
        raise Unable(f"needs {needed / 1e9:.1f} GB for the scores; they may take {limit / 1e9:.1f} GB here")


def added_mask(case: Case, mask: np.ndarray) -> np.ndarray:
    """`mask` as numbers to be added to the scores: 0 and -inf for a bool one, a float one as it is."""
    if mask.dtype != bool:
        return mask
    dtype = numpy_dtype(case.dtype)
    zero, infinity = np.zeros((), dtype), np.array(-np.inf, dtype)
    return np.where(mask, zero, infinity)


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a case in which every query attends every key, or every key before its own."""

    items: slice  #: of the batch
    rows: slice  #: of the queries
    keys: slice
    causal: bool = False  #: as many rows as keys, each attends the keys up to its own


def blocks(case: Case) -> list[Block]:
    """The blocks of a case, for libraries that are quicker with a call for each than with a mask.

    A block for each document or each ragged item; of a single query the keys of its window, as a rolling
    cache holds no others. Their outputs are concatenated along `block_axis`. Raises `Redundant` where the
    case is one block or cannot be cut into any.
    """
    whole = slice(None)
    if case.mask is None and case.bias is None and case.window is None and case.document_length is not None:
        ends = range(case.document_length, case.len_k + case.document_length, case.document_length)
        parts = [slice(end - case.document_length, min(end, case.len_k)) for end in ends]
        return [Block(whole, part, part, case.causal) for part in parts]
    start, stop = case.intervals()
    alike = start.shape[1] == 1  # all rows of an item attend the same keys
    full = start.size == 1 and stop.item() - start.item() == case.len_k
    if case.mask is not None or case.bias is not None or not alike or full:
        raise Redundant
    items = [whole] if len(start) == 1 else [slice(item, item + 1) for item in range(case.batch)]
    bounds = zip(start[:, 0].tolist(), stop[:, 0].tolist(), strict=True)
    return [Block(item, whole, slice(*bound)) for item, bound in zip(items, bounds, strict=True)]


def block_axis(case: Case) -> int:
    """The axis of ``(B, H, L, E)`` along which the outputs of `blocks` are concatenated."""
    return 0 if case.document_length is None else 2


def folded(make: Way) -> Way:
    """`make` for a few queries over grouped heads, with the query heads of a group as rows of one head.

    Each key/value head is then read once, whatever the library makes of grouped heads. Keys that no query
    attends are cut off beforehand, as a rolling cache holds no others. Folding costs nothing: it is another
    view of the same query and output.
    """

    def way(case: Case, inputs: Inputs) -> Call:
        start, stop = case.intervals()
        arrays = inputs.mask is not None or inputs.bias is not None or case.document_length is not None
        if case.kv_heads == case.heads or case.len_q > FEW_ROWS or case.rank != 4 or case.strided or arrays:
            raise Redundant
        if not case.is_plain:
            raise Redundant
        if len(start) > 1 and (start.shape[1] > 1 or np.any(start)):
            raise Redundant  # the queries of each item attend keys of their own
        group = case.heads // case.kv_heads
        query, key, value = inputs.bhsd(case)
        first, last = (int(start.min()), int(stop.max())) if case.lengths is None else (0, case.len_k)
        mask = None
        if start.shape[1] > 1:
            keys = np.arange(first, last)
            allowed = (keys >= start[0, :, None]) & (keys < stop[0, :, None])
            mask = np.tile(allowed, (group, 1))
        as_rows = replace(
            case,
            heads=case.kv_heads,
            len_q=group * case.len_q,
            len_k=last - first,
            causal=False,
            window=None,
            mask=None if mask is None else "random",
            layout="bhsd",
        )
        rows = query.reshape(case.batch, case.kv_heads, group * case.len_q, case.head_dim)
        call = make(as_rows, Inputs(rows, key[:, :, first:last], value[:, :, first:last], mask, None))
        shape = (case.batch, case.heads, case.len_q, case.value_dim)
        return Call(call.run, lambda: call.result().reshape(shape))

    return way
