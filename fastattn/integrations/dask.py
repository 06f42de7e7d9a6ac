"""`attention` on Dask arrays: lazy, with one task for each block of queries and keys that the mask allows.

Letters as in `fastattn.attention`; ``*lead`` are the leading batch axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, reduce
from itertools import accumulate, pairwise, product
from math import isnan
from operator import and_
from typing import Any, NamedTuple

import numpy as np

import fastattn
from fastattn._call.arguments import as_array, check_bool, check_key_lengths, check_single, check_wrt
from fastattn._call.gradients import Gradients
from fastattn._call.normalize import outline
from fastattn._call.options import refusing
from fastattn.integrations._common import extra, stand_in
from fastattn.masks import Causal, Dense, KeyLengths, Mask
from fastattn.masks.map import (
    EMPTY,
    FULL,
    TILE_K,
    UNBOUNDED,
    Band,
    Block,
    Grid,
    Intervals,
    Node,
    Part,
    interval_state,
    plane_state,
)

with extra("dask"):
    import dask.array as da
    from dask.base import tokenize
    from dask.highlevelgraph import HighLevelGraph
    from dask.task_spec import DataNode, Task, TaskRef

Chunks = tuple[tuple[int, ...], ...]
Index = tuple[Any, ...]
Key = Any  #: of a task
Layer = dict[Key, Any]

#: What gradients there are with respect to.
DIFFERENTIABLE = ("query", "key", "value")

#: The axes of each array behind the leading ones, which all but the sinks have.
_ROWS = ("heads", "queries")
_AXES: dict[str, tuple[Any, ...]] = {
    "query": (*_ROWS, "dim"),
    "key": ("kv_heads", "keys", "dim"),
    "value": ("kv_heads", "keys", "value_dim"),
    "mask": (*_ROWS, "keys"),
    "bias": (*_ROWS, "keys"),
    "key_lengths": (),
    "sinks": ("heads",),
    "out": (*_ROWS, "value_dim"),
    "lse": _ROWS,
    "grad_out": (*_ROWS, "value_dim"),
    "grad_lse": _ROWS,
}


@refusing
def attention(
    query: da.Array,
    key: da.Array,
    value: da.Array,
    *,
    mask: Any = None,
    bias: Any = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    layout: str = "bhsd",
    return_lse: bool = False,
) -> Any:
    """`fastattn.attention` of Dask arrays, block by block and lazy.

    Letters, shapes and dtypes as in `fastattn.attention`.

    Parameters
    ----------
    query : dask.array.Array, shape (..., H, L, D)
        The result has its chunks.
    key : dask.array.Array, shape (..., K, S, D)
    value : dask.array.Array, shape (..., K, S, E)
    mask, bias, key_lengths, sinks : optional
        As in `fastattn.attention`, or Dask arrays. Mask objects and NumPy arrays are read when the graph is
        built: a chunk of keys that they hide from a whole chunk of queries gets no task. Dask arrays are read
        in the tasks alone.
    causal, window, scale, softcap, layout, return_lse
        As in `fastattn.attention`.

    Returns
    -------
    out : dask.array.Array, shape (..., H, L, E)
    lse : dask.array.Array, shape (..., H, L)
        When asked for; the two are then a tuple.

    Raises
    ------
    TypeError, ValueError
        As in `fastattn.attention`, when this is called; for a query, key or value that is no Dask array; for
        chunks of unknown size. Dask `key_lengths` outside ``0..S`` are a ValueError when they are computed.

    Notes
    -----
    Chunks: along batch axes and lengths, query, key and value get the chunks that they have in common. Heads
    are divided where key and value divide them, and where query does so between whole groups. D and E are in
    one chunk. Arrays with other chunks are rechunked. A task is `fastattn.attention` of one chunk of queries
    with one of keys. `fastattn.merge_attention` merges the partial results, in float32 or float64, two by two
    in the order of the keys. Results in 16 bits are rounded once, at the end.

    Determinism: the bits of a result depend on the chunks, not on the scheduler, its workers or threads.

    Memory: a task holds its chunks and one partial result. Nothing of size ``L * S``.

    There is no dropout: whether a weight is dropped depends on its place in the whole, which a chunk does not
    know.

    Examples
    --------
    >>> import dask.array as da
    >>> from fastattn.integrations.dask import attention
    >>> query, key, value = da.random.default_rng(0).standard_normal((3, 8, 1000, 64), chunks=(1, 4, 250, 64))
    >>> out = attention(query, key, value, causal=True)
    >>> out.chunks
    ((4, 4), (250, 250, 250, 250), (64,))
    >>> out[:, :1].compute().shape  # of the first chunk of queries: one task for each chunk of heads
    (8, 1, 64)
    """
    options = {
        "mask": mask, "bias": bias, "causal": causal, "window": window, "key_lengths": key_lengths,
        "scale": scale, "softcap": softcap, "sinks": sinks, "layout": layout,
    }  # fmt: skip
    check_bool(return_lse, "return_lse")
    call = _Call(query, key, value, options)
    pieces, name = f"attention-piece-{call.token}", f"attention-merged-{call.token}"
    (value_dim,) = call.chunks["value_dim"]
    layer: Layer = {}
    ends: dict[Index, Key] = {}
    for rows, blocks in call.rows():
        sinks_of_row = call.ref("sinks", rows)
        parts: list[Key] = []
        for block in blocks:
            # The sinks are in the first piece of a row and in no other.
            own_sinks = None if parts else sinks_of_row
            parts.append((pieces, *rows, block.keys))
            layer[parts[-1]] = Task(
                parts[-1], partial(_attend, call.options), *call.inputs(rows, block), own_sinks
            )
        if not parts:
            parts.append((f"attention-no-keys-{call.token}", *rows))
            layer[parts[0]] = Task(
                parts[0], _no_keys, call.sizes(rows), value_dim, call.options.dtype, sinks_of_row
            )
        ends[rows] = _tree(layer, (name, *rows), parts, _merge)
    layer |= call.shared
    graph = HighLevelGraph.from_collections(name, layer, dependencies=list(call.arrays.values()))
    at_end = {(*rows, 0): end for rows, end in ends.items()}
    out = _array(graph, name, f"attention-{call.token}", at_end, 0, call.result, call.grid("out"))
    if not return_lse:
        return call.as_given("out", out)
    lse = _array(graph, name, f"attention-lse-{call.token}", ends, 1, call.options.dtype, call.grid("lse"))
    return call.as_given("out", out), call.as_given("lse", lse)


@refusing
def attention_backward(
    grad_out: da.Array,
    query: da.Array,
    key: da.Array,
    value: da.Array,
    out: da.Array,
    lse: da.Array,
    *,
    grad_lse: da.Array | None = None,
    mask: Any = None,
    bias: Any = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    layout: str = "bhsd",
    wrt: Iterable[str] = DIFFERENTIABLE,
) -> Gradients:
    """`fastattn.attention_backward` of Dask arrays, by the chunks of the forward call, and lazy.

    Letters as in `attention`.

    Parameters
    ----------
    grad_out, query, key, value, out, lse, grad_lse : dask.array.Array
        As in `fastattn.attention_backward`.
    mask, bias, causal, window, key_lengths, scale, softcap, sinks, layout
        As in the forward call.
    wrt : iterable of str, default ("query", "key", "value")
        Which gradients to compute, of these three.

    Returns
    -------
    Gradients
        As in `fastattn.attention_backward`, of Dask arrays; bias and sinks are None.

    Raises
    ------
    TypeError, ValueError
        As in `attention`; for a `grad_out`, `out`, `lse` or `grad_lse` of another shape; for a name in `wrt`
        that is none of the three.

    Notes
    -----
    `out` and `lse` are those over all keys, so each chunk of queries and keys gives its share of the
    gradients by itself. Shares are in float32 or float64. They are added two by two in the order of the
    chunks, also over items along which an argument is broadcast. 16-bit gradients are rounded once.

    Determinism: as in `attention`.

    Examples
    --------
    >>> import dask.array as da
    >>> from fastattn.integrations.dask import attention, attention_backward
    >>> query, key, value = da.random.default_rng(0).standard_normal((3, 8, 90, 16), chunks=(1, 4, 30, 16))
    >>> out, lse = attention(query, key, value, causal=True, return_lse=True)
    >>> gradients = attention_backward(out, query, key, value, out, lse, causal=True)
    >>> gradients.key.chunks
    ((4, 4), (30, 30, 30), (16,))
    """
    names = check_wrt(wrt, DIFFERENTIABLE)
    options = {
        "mask": mask, "bias": bias, "causal": causal, "window": window, "key_lengths": key_lengths,
        "scale": scale, "softcap": softcap, "sinks": sinks, "layout": layout,
    }  # fmt: skip
    results = {"grad_out": grad_out, "out": out, "lse": lse, "grad_lse": grad_lse}
    call = _Call(query, key, value, options, results, names)
    pieces, name = f"attention-backward-{call.token}", f"attention-shares-{call.token}"
    layer: Layer = {}
    #: The shares of each chunk of an argument, in the order of items, heads, queries and keys.
    found: dict[str, dict[Index, list[Key]]] = {one: {} for one in names}
    for rows, blocks in call.rows():
        of_row = [call.ref(one, rows) for one in results]
        for block in blocks:
            here = (pieces, *rows, block.keys)
            function = partial(_differentiate, call.options, names)
            layer[here] = Task(here, function, *call.inputs(rows, block), *of_row)
            for number, one in enumerate(names):
                share = (f"{name}-{one}", *rows, block.keys)
                layer[share] = Task(share, _take, TaskRef(here), number, None)
                found[one].setdefault(call.index(one, rows, block.keys), []).append(share)
    ends: dict[str, dict[Index, Key]] = {}
    for one in names:
        ends[one] = {}
        for index in np.ndindex(*call.arrays[one].numblocks):
            parts = found[one].get(index, [])
            if not parts:
                parts.append((f"{name}-{one}-none", *index))
                shape = tuple(sizes[n] for sizes, n in zip(call.arrays[one].chunks, index, strict=True))
                layer[parts[0]] = Task(parts[0], np.zeros, shape, call.options.dtype)
            ends[one][index] = _tree(layer, (f"{name}-{one}-sum", *index), parts, np.add)
    layer |= call.shared
    graph = HighLevelGraph.from_collections(name, layer, dependencies=list(call.arrays.values()))
    gradients: dict[str, Any] = {}
    for one in names:
        array = call.arrays[one]
        dtype = np.dtype(np.float64) if array.dtype.kind in "biu" else array.dtype.newbyteorder("=")
        label = f"attention-gradient-{one}-{call.token}"
        gradients[one] = call.as_given(one, _array(graph, name, label, ends[one], None, dtype, array.chunks))
    return Gradients(*(gradients.get(one) for one in Gradients._fields))


# A call as chunks ----------------------------------------------------------------------------------


class _Options(NamedTuple):
    """What all tasks of a call share."""

    scale: float
    softcap: float | None
    dtype: np.dtype  #: of the computation
    whole: tuple[int, int]  #: L and S
    band: Band | None  #: where `key_lengths` are not known before a task runs


class _Block(NamedTuple):
    """A chunk of keys that queries of a chunk may read."""

    keys: int  #: which one
    mask: Any  #: a mask, where to find one, or None


class _Call:
    """A call as ``(*lead, heads, length, dim)`` arrays that are divided alike.

    An index of a row of chunks is ``(*items, heads, queries)``.
    """

    def __init__(
        self,
        query: Any,
        key: Any,
        value: Any,
        options: dict[str, Any],
        results: dict[str, Any] | None = None,
        wrt: tuple[str, ...] = (),
    ) -> None:
        results = {name: x for name, x in (results or {}).items() if x is not None}
        main = {"query": query, "key": key, "value": value}
        for name, x in (main | results).items():
            if not isinstance(x, da.Array):
                raise TypeError(f"{name} must be a dask.array.Array, got {type(x).__name__}")
        for name, x in (main | results | options).items():
            if isinstance(x, da.Array) and any(map(isnan, x.shape)):
                raise ValueError(f"{name} has chunks of unknown size: call its compute_chunk_sizes() first")
        check_single(options["bias"], options["scale"])
        known, known_mask, band, number, softcap = outline(
            stand_in(query), stand_in(key), stand_in(value),
            {name: stand_in(x) if isinstance(x, da.Array) else x for name, x in options.items()},
        )  # fmt: skip
        is_late = isinstance(options["key_lengths"], da.Array)
        self.token = tokenize(main, options, results, wrt)
        self.size, self.result, self.flat = known.sizes, known.result, known.flat
        self.is_swapped = known.swapped and not known.flat
        self.options = _Options(number, softcap, known.dtype, known.sizes[-2:], band if is_late else None)
        self._divide({name: self._inside(name, x) for name, x in main.items()})
        for name in ("mask", "bias", "key_lengths", "sinks"):
            x = options[name]
            if isinstance(x, da.Array) or (x is not None and name in ("bias", "sinks")):
                self._add(name, x)
        for name, x in results.items():
            shape = tuple(map(sum, self.grid(name)))
            expected = self.as_given(name, np.broadcast_to(0, shape)).shape
            if x.shape != expected:
                raise ValueError(f"{name} must have shape {expected}, got {x.shape}")
            self._add(name, self._inside(name, x))
        self._set_mask(None if "mask" in self.arrays else known_mask, band, is_late)

    def _inside(self, name: str, array: Any) -> Any:
        """An array of rows or keys with the axes that it has here."""
        if self.flat:
            return array[None]
        return array.swapaxes(-3, -2) if self.is_swapped and len(_AXES[name]) == 3 else array

    def as_given(self, name: str, array: Any) -> Any:
        """An array of rows or keys as the caller has it."""
        return array[0] if self.flat else self._inside(name, array)

    def _axes(self, name: str) -> tuple[Any, ...]:
        return (*(() if name == "sinks" else range(len(self.size.lead))), *_AXES[name])

    def grid(self, name: str) -> Chunks:
        """The chunks of an array."""
        return tuple(self.chunks[axis] for axis in self._axes(name))

    def _divide(self, main: dict[str, da.Array]) -> None:
        """Gives query, key and value the chunks that they have in common."""
        pairs: list[Any] = []
        for name, array in main.items():
            pairs += [array.rechunk({-1: -1}), self._axes(name)[-array.ndim :]]
        self.chunks: dict[Any, tuple[int, ...]] = da.core.unify_chunks(*pairs, warn=False)[0]
        heads, kv_heads = self.chunks["heads"], self.chunks["kv_heads"]
        kv_heads, heads = _whole_groups(heads, kv_heads, self.size.H // max(1, sum(kv_heads)))
        self.chunks |= {"heads": heads, "kv_heads": kv_heads}
        self._slices = [_slices(sizes) for sizes in self.grid("lse")]
        self._key_slices = _slices(self.chunks["keys"])
        self.arrays: dict[str, Any] = {}
        self._places: dict[str, list[int]] = {}
        for name, array in main.items():
            self._add(name, array)

    def _add(self, name: str, array: Any) -> None:
        """Keeps an array in its chunks, and which of ``(*rows, keys, 0)`` is its chunk along each axis."""
        if not isinstance(array, da.Array):
            array = as_array(array, name)
        axes = self._axes(name)[len(self._axes(name)) - array.ndim :]
        grid = [self.chunks[axis] for axis in axes]
        chunks = tuple(sizes if n == sum(sizes) else (n,) for n, sizes in zip(array.shape, grid, strict=True))
        array = array.rechunk(chunks) if isinstance(array, da.Array) else da.from_array(array, chunks)
        self.arrays[name] = array
        numbered = [*self._axes("lse"), "keys"]
        # A single chunk holds all, or one item that is broadcast.
        self._places[name] = [
            -1 if n == 1 else numbered.index("heads" if axis == "kv_heads" else axis)
            for axis, n in zip(axes, array.numblocks, strict=True)
        ]

    def _set_mask(self, mask: Mask | None, band: Band | None, is_late: bool) -> None:
        """All that is known of the mask before the tasks run, and along which axes it varies."""
        lead, H, L, S = self.size
        if band is not None and is_late:
            # The lengths are at most S: no row reads further than it would with length S.
            band = band._replace(lengths=None, left=UNBOUNDED if band.at_end else band.left)
        parts = [mask, None if band is None else _of_band(band, L, S)]
        present = [part for part in parts if part is not None]
        self._mask = reduce(and_, present) if present else None
        self._found: dict[Index, list[_Block]] = {}
        self.shared: Layer = {}
        if self._mask is not None:
            outer = self._mask._bind(Block(lead, H, L, S, whole=(L, S))).outer
            self._varies = [n != 1 for n in (1,) * (len(lead) + 1 - len(outer)) + tuple(outer)]

    # What tasks need ----

    def sizes(self, rows: Index) -> tuple[int, ...]:
        return tuple(sizes[n] for sizes, n in zip(self.grid("lse"), rows, strict=True))

    def index(self, name: str, rows: Index, keys: int = 0) -> Index:
        """The chunk of an array that queries of a chunk need, with keys of a chunk."""
        places = (*rows, keys, 0)
        return tuple(places[at] for at in self._places[name])

    def ref(self, name: str, rows: Index, keys: int = 0) -> TaskRef | None:
        if name not in self.arrays:
            return None
        return TaskRef((self.arrays[name].name, *self.index(name, rows, keys)))

    def inputs(self, rows: Index, block: _Block) -> tuple[Any, ...]:
        """The arguments of `_attend` and `_differentiate` that they share."""
        names = ("query", "key", "value", "mask", "bias", "key_lengths")
        starts = None
        if self.options.band is not None:
            starts = (self._slices[-1][rows[-1]].start, self._key_slices[block.keys].start)
        return (*(self.ref(name, rows, block.keys) for name in names), block.mask, starts)

    def rows(self) -> Iterator[tuple[Index, list[_Block]]]:
        """Every row of chunks, and the chunks of keys that it may read."""
        for rows in product(*(range(len(sizes)) for sizes in self.grid("lse"))):
            yield rows, self._blocks(rows)

    def _blocks(self, rows: Index) -> list[_Block]:
        if 0 in self.sizes(rows):
            return []
        if self._mask is None:
            return [_Block(n, None) for n, size in enumerate(self.chunks["keys"]) if size]
        # Rows of chunks along which the mask does not vary share one result.
        place = (*(n if varies else 0 for n, varies in zip(rows, self._varies, strict=False)), rows[-1])
        if place not in self._found:
            self._found[place] = self._allowed_blocks(self._mask, rows, place)
        return self._found[place]

    def _allowed_blocks(self, mask: Mask, rows: Index, place: Index) -> list[_Block]:
        *items, heads, queries = (own[n] for own, n in zip(self._slices, rows, strict=True))
        part = Part(self.size.lead, tuple(items), heads, queries, slice(0, 0), self.options.whole)
        present = [n for n, size in enumerate(self.chunks["keys"]) if size]
        slices = [self._key_slices[n] for n in present]
        blocks = []
        for n, keys, state in zip(present, slices, _states_of_keys(mask, part, slices), strict=True):
            if state == EMPTY:
                continue
            allowed: Any = None if state == FULL else mask._cut(part._replace(keys=keys))
            if allowed is not None and not mask._is_frozen:  # it has an array, which goes to a worker once
                name = (f"attention-mask-{self.token}", *place, n)
                self.shared[name] = DataNode(name, allowed)
                allowed = TaskRef(name)
            blocks.append(_Block(n, allowed))
        return blocks


def _slices(sizes: tuple[int, ...]) -> list[slice]:
    ends = list(accumulate(sizes, initial=0))
    return [slice(start, stop) for start, stop in pairwise(ends)]


def _whole_groups(
    heads: tuple[int, ...], kv_heads: tuple[int, ...], group: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Chunks of key/value heads and of query heads: divided where either is, but never inside a group."""
    ends = {*accumulate(kv_heads), *(end // group for end in accumulate(heads) if group and end % group == 0)}
    sizes = tuple(np.diff(sorted({0, *ends})).tolist()) or (0,)
    return sizes, tuple(n * group for n in sizes)


def _tree(layer: Layer, name: Index, parts: list[Key], function: Callable[..., Any]) -> Key:
    """Combines neighbours until one is left, and returns where that is."""
    level = 0
    while len(parts) > 1:
        combined: list[Key] = []
        for number, (left, right) in enumerate(zip(parts[::2], parts[1::2], strict=False)):
            combined.append((*name, level, number))
            layer[combined[-1]] = Task(combined[-1], function, TaskRef(left), TaskRef(right))
        parts = combined + parts[len(parts) - len(parts) % 2 :]
        level += 1
    return parts[0]


def _array(
    graph: HighLevelGraph,
    below: str,
    name: str,
    ends: Mapping[Index, Key],
    number: int | None,
    dtype: np.dtype,
    chunks: Chunks,
) -> da.Array:
    """The array whose chunks are what tasks of the layer `below` end in."""
    layer = {
        (name, *index): Task((name, *index), _take, TaskRef(end), number, dtype)
        for index, end in ends.items()
    }
    layers: dict[str, Any] = {**graph.layers, name: layer}
    dependencies = {**graph.dependencies, name: {below}}
    return da.Array(HighLevelGraph(layers, dependencies), name, chunks, dtype=dtype)


# Which keys a mask allows ---------------------------------------------------------------------------


def _of_band(band: Band, L: int, S: int) -> Mask | None:
    """A mask of what `causal`, `window` and `key_lengths` allow; None where they allow every key."""
    offset = (S if band.lengths is None else band.lengths) - L if band.at_end else 0
    parts: list[Mask] = []
    if band.right != UNBOUNDED:
        parts.append(Causal(offset=offset + band.right))
    if band.left != UNBOUNDED:
        parts.append(~Causal(offset=offset - band.left - 1))
    if band.lengths is not None:
        parts.append(KeyLengths(band.lengths))
    return reduce(and_, parts) if parts else None


def _states_of_keys(mask: Mask, part: Part, keys: list[slice]) -> list[int]:
    """EMPTY, PARTIAL or FULL for each chunk of keys, over all items, heads and queries of a part.

    EMPTY is exact. FULL is exact for masks that lower to intervals; others may have PARTIAL in its place.
    """
    *lead, H, L = (cut.stop - cut.start for cut in (*part.items, part.heads, part.queries))

    def bound(cut: slice) -> Node:
        return mask._cut(part._replace(keys=cut))._bind(Block(tuple(lead), H, L, cut.stop - cut.start))

    if not keys:
        return []
    first, last = keys[0].start, keys[-1].stop
    node = bound(slice(first, last))
    if isinstance(node, Intervals):
        start, stop = node.start + first, node.stop + first
        return [interval_state(start, stop, cut.start, cut.stop) for cut in keys]
    states = node.states(Grid(L, last - first))

    def state_of(cut: slice) -> int:
        """By the tiles that the chunk touches where they agree, else by its own."""
        touched = states[..., (cut.start - first) // TILE_K : -((first - cut.stop) // TILE_K)]
        for state in (EMPTY, FULL):
            if (touched == state).all():
                return state
        return plane_state(bound(cut), L, cut.stop - cut.start)

    return [state_of(cut) for cut in keys]


# Tasks ---------------------------------------------------------------------------------------------


def _attend(options: _Options, query: Any, key: Any, value: Any, *others: Any) -> Any:
    """Out and lse of one chunk of queries over one of keys."""
    *shared_inputs, sinks = others
    lead = np.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    # In this dtype also where the result is in 16 bits: partial results are not.
    out = np.empty((*lead, *query.shape[-3:-1], value.shape[-1]), options.dtype)
    shared = _shared_options(options, lead, *shared_inputs)
    return fastattn.attention(query, key, value, sinks=sinks, out=out, return_lse=True, **shared)


def _differentiate(options: _Options, wrt: tuple[str, ...], *arrays: Any) -> tuple[np.ndarray, ...]:
    """Shares of gradients, of the dtype of the computation, by one chunk of queries and one of keys."""
    *inputs, grad_out, out, lse, grad_lse = arrays
    query, key, value = (np.asarray(x).astype(options.dtype, copy=False) for x in inputs[:3])
    lead = np.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    shared = _shared_options(options, lead, *inputs[3:])
    gradients = fastattn.attention_backward(
        grad_out, query, key, value, out, lse, grad_lse=grad_lse, wrt=wrt, **shared
    )
    return tuple(getattr(gradients, name) for name in wrt)


def _shared_options(
    options: _Options,
    lead: tuple[int, ...],
    array: np.ndarray | None,
    bias: np.ndarray | None,
    key_lengths: np.ndarray | None,
    mask: Mask | None,
    starts: tuple[int, int] | None,
) -> dict[str, Any]:
    """The options of `fastattn.attention` for a chunk of these leading axes; `array` is one of the mask,
    `starts` its place."""
    masks = [] if mask is None else [mask]
    if array is not None:
        masks.append(Dense(array))
    if options.band is not None and starts is not None and key_lengths is not None:
        lengths = check_key_lengths(key_lengths, lead, options.whole[1])
        known = _of_band(options.band._replace(lengths=lengths), *options.whole)
        if known is not None:
            masks.append(known.shifted(*starts))
    return {
        "mask": reduce(and_, masks) if masks else None,
        "bias": bias,
        "scale": options.scale,
        "softcap": options.softcap,
    }


def _no_keys(rows: tuple[int, ...], value_dim: int, dtype: np.dtype, sinks: np.ndarray | None) -> Any:
    """Out and lse of queries that may read no key."""
    lse = np.full(rows, -np.inf, dtype)
    if sinks is not None:
        lse[...] = sinks[:, None]
    return np.zeros((*rows, value_dim), dtype), lse


def _merge(left: tuple[np.ndarray, np.ndarray], right: tuple[np.ndarray, np.ndarray]) -> Any:
    return fastattn.merge_attention(*zip(left, right, strict=True))


def _take(result: Any, number: int | None, dtype: np.dtype | None) -> np.ndarray:
    """One of a task's results, in this dtype."""
    array: np.ndarray = result if number is None else result[number]
    with np.errstate(over="ignore"):
        return array if dtype is None else array.astype(dtype, copy=False)
