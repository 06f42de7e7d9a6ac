"""A case: one call of attention or of its gradients, what it costs at least, its inputs, and its neighbours.

Letters: ``B`` batch, ``H`` query heads, ``K`` key/value heads, ``L`` query length, ``S`` key length,
``D`` head_dim, ``E`` value head_dim.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

#: Bool masks of the kind "padding" leave this share of the keys (a batch padded to its longest text).
PADDING_KEPT = 0.75

#: The shortest item of a "ragged" batch has this share of the keys, the longest all of them.
SHORTEST = 1 / 8

#: Gated linear attention: whether a rule has decays, of each "token" or of each "column" of a state, and
#: whether it has the rates of the delta rule.
RULES: dict[str, tuple[str | None, bool]] = {
    "linear": (None, False),
    "gated": ("token", False),
    "gla": ("column", False),
    "delta": (None, True),
    "gated_delta": ("token", True),
    "kimi": ("column", True),
}

#: Tokens that are worked on at once, where FLOPs of gated linear attention are counted.
CHUNK = 48

#: Elements of a row of int8 that share one float32 scale, and the largest magnitude of an element.
INT8_GROUP, INT8_LARGEST = 64, 127


def numpy_dtype(name: str) -> np.dtype:
    """The dtype called `name`; bfloat16 is that of the package ml_dtypes, as NumPy has none."""
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def itemsize(name: str) -> int:
    """Bytes of a number of the dtype called `name`; ml_dtypes need not be installed."""
    return 2 if name == "bfloat16" else np.dtype(name).itemsize


def _relative(case: Case, table: np.ndarray) -> np.ndarray:
    """An entry for each distance, from that of the first query to the last key on."""
    return table[:, np.arange(case.len_q)[:, None] - np.arange(case.len_k) + case.len_k - 1]


def _grid(case: Case, table: np.ndarray) -> np.ndarray:
    """Of each query the entries of the rows of a square, and then of its columns."""
    rows, columns = np.split(table, 2, axis=-1)
    return (rows[..., :, None] + columns[..., None, :]).reshape(case.heads, case.len_q, case.len_k)


#: Bias objects: the shape of the array that each is made of, and the bias ``(H, L, S)`` that it stands for.
BIAS_OBJECTS: dict[
    str, tuple[Callable[[Case], tuple[int, ...]], Callable[[Case, np.ndarray], np.ndarray]]
] = {
    "relative": (lambda case: (case.heads, case.len_q + case.len_k - 1), _relative),
    "grid": (lambda case: (case.heads, case.len_q, 2 * round(case.len_k**0.5)), _grid),
}

#: Tokens of an image's row and column that a query of the mask "neighborhood" attends, as NAT's.
NEIGHBORHOOD = 7

#: How many scores of each query "topk" keeps.
TOPK = 16


@dataclass(frozen=True, slots=True)
class Case:
    """One call with a name.

    Query row i of an item with S_b keys stands at position p = i + S_b - L, so that the last query stands at
    the last key: that is where ``causal`` ends and where ``window`` lies. For L = S it is p = i.
    Everything that restricts attention applies together.
    """

    name: str
    group: str
    origin: str  #: where the shape comes from and what it shows
    batch: int
    heads: int
    kv_heads: int
    len_q: int
    len_k: int
    head_dim: int
    value_dim: int
    dtype: str = "float32"  #: of query and result, and of keys and values unless `storage` says otherwise
    storage: str | None = None  #: of keys and values: "float16", "bfloat16", "int8" with scales, see `Stored`
    page_size: int | None = None  #: keys and values in pages of so many rows, in no order; S is a multiple
    step: bool = False  #: the last L keys and values come with the call, which appends them before it attends
    backward: bool = (
        False  #: the gradients are timed, by all arrays but the mask; the outputs are there before
    )
    rule: str | None = None  #: gated linear attention by one of `RULES`, with a state before and after; L = S
    #: In the place of outputs, of no values, E = 1: "topk", "key_weights", or "max_similarity" of the first
    #: item's queries, each head one of L tokens, with B documents of S tokens
    reduction: str | None = None
    value_in_key: bool = False  #: the value is a view of the key's first E columns, as MLA's latent has it
    causal: bool = False  #: no key after position p: "bottom_right"
    #: "random" (L, S) or "padding" (B, 1, 1, S), an array for all; or "neighborhood", of a square image:
    #: an array (L, S) for who cannot say it
    mask: str | None = None
    bias: str | None = None  #: "shared" (L, S), "per_head" (H, L, S), or one of `BIAS_OBJECTS`, likewise
    window: tuple[int, int] | None = None  #: keys from p - left to p + right
    document_length: int | None = None  #: texts of this length in a row, each attending to itself; L = S
    key_lengths: str | None = None  #: "ragged": items end early, see `lengths`
    softcap: float | None = None  #: scaled scores x become c · tanh(x / c)
    flex: bool = False  #: where the library takes functions of scores, soft-cap and bias are one
    layout: str = "bhsd"  #: "bshd" stores (B, L, H, D)
    rank: int = 4  #: 3 drops the batch axis
    strided: bool = False  #: every second element of the last axis of wider arrays; rank 4 "bhsd" only
    cold: bool = False  #: keys and values shall come from memory: time it over copies that no cache holds
    model_dim: int | None = None  #: timed between the products of a model whose rows are so wide, see `Layer`
    threads: int | None = None  #: None: as many as the run was asked for
    quick: bool = False  #: part of ``--quick``
    baseline: str | None = None  #: our time is also given over our time of this case

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Case:
        """The case whose `dataclasses.asdict` went through JSON."""
        window = fields["window"]
        return cls(**fields | {"window": None if window is None else tuple(window)})

    @property
    def shape(self) -> str:
        """``B,H[/K],L,S,D[/E]``, as the tables print it."""
        heads = f"{self.heads}/{self.kv_heads}" if self.kv_heads != self.heads else f"{self.heads}"
        dims = f"{self.head_dim}/{self.value_dim}" if self.value_dim != self.head_dim else f"{self.head_dim}"
        return f"{self.batch},{heads},{self.len_q},{self.len_k},{dims}"

    @property
    def compute_dtype(self) -> str:
        """In what products are summed: 16-bit types are only stored."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def is_plain(self) -> bool:
        """Whether query, keys and values are three arrays of one dtype that are there before the call."""
        return self.storage is None and self.page_size is None and not self.step

    @property
    def lengths(self) -> np.ndarray | None:
        """Keys of each item, ``(B,)``; None where all have S.

        "ragged" lengths are evenly spread from `SHORTEST` of S to S and then shuffled, always in the same
        way: sorted ones would suit those who hand out the batch in two halves badly, or too well.
        """
        if self.key_lengths is None:
            return None
        spread = np.linspace(SHORTEST * self.len_k, self.len_k, self.batch).round().astype(np.int64)
        return np.random.default_rng(0).permutation(spread)

    def intervals(self, *, causal: bool | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The keys that each query row may attend; arrays (``mask``, ``bias``) may forbid more.

        Parameters
        ----------
        causal
            False leaves the case's ``causal`` out, for libraries that have a flag for it.

        Returns
        -------
        start, stop
            Keys ``start`` to ``stop - 1``; both ``(B or 1, L or 1)``, 1 where all items or rows are alike.
        """
        causal = self.causal if causal is None else causal
        lengths = self.lengths
        stop = np.array([[self.len_k]]) if lengths is None else lengths[:, None]
        start = np.zeros_like(stop)
        if causal or self.window is not None or self.document_length is not None:
            position = np.arange(self.len_q) + stop - self.len_q
            start, stop = np.broadcast_arrays(start, stop, position)[:2]
            if causal:
                stop = np.minimum(stop, position + 1)
            if self.window is not None:
                left, right = self.window
                start, stop = np.maximum(start, position - left), np.minimum(stop, position + right + 1)
            if self.document_length is not None:
                first = position // self.document_length * self.document_length
                start, stop = np.maximum(start, first), np.minimum(stop, first + self.document_length)
        return start, np.maximum(start, stop)

    @property
    def pairs(self) -> int:
        """(query, key) pairs that have to be computed, over all items, for one head.

        Exactly those that causal, windows, documents and key lengths allow: L·(L + 1) / 2 for causal with
        L = S. Arrays count in full, whatever is in them.
        """
        return _pairs(self)

    @property
    def flops(self) -> float:
        """Two per multiply-add of the products: ``2 · H · pairs · (D + E)``. Nothing else counts.

        Gradients take five products, ``2 · H · pairs · (3 D + 2 E)``: the scores once more, the gradient of
        the weights, and those of query, key and value.

        A reduction takes one, ``2 · H · pairs · D``, however often it computes the scores.

        By a `rule` each query reads the state, and each key adds to it, D · E; a query also meets half of C
        tokens, 48 or all L, C / 2 · (D + E). By the delta rule a key does what a query does, too.
        """
        if self.rule is not None:
            state, pairs = self.head_dim * self.value_dim, self.head_dim + self.value_dim
            reading = state + min(CHUNK, self.len_q) / 2 * pairs
            adding = state + (reading if RULES[self.rule][1] else 0)
            return 2.0 * self.batch * self.len_q * (self.heads * reading + self.kv_heads * adding)
        times = (3, 2) if self.backward else (1, 0) if self.reduction else (1, 1)
        return 2.0 * self.heads * self.pairs * (times[0] * self.head_dim + times[1] * self.value_dim)

    @property
    def nbytes(self) -> int:
        """Bytes that have to be read or written at least once.

        Query and output; of keys and values each key/value head once, and only the keys that some query may
        attend; mask and bias as the case gives them. Not the few bytes that say lengths, windows and pages.
        For gradients also lse, the gradient of the output, and each gradient in full. By a `rule` also the
        gates, and the state, which is read and written.
        """
        return _nbytes(self)

    @property
    def intensity(self) -> float:
        """FLOPs per byte: below the machine's own ratio the memory is the limit, above it the arithmetic."""
        return self.flops / self.nbytes

    @property
    def options(self) -> str:
        """The options in a few words, as the tables print them."""
        words = [self.dtype] if self.dtype != "float32" else []
        words += [f"{self.storage} keys and values"] if self.storage else []
        words += [f"pages of {self.page_size}"] if self.page_size else []
        words += ["step"] if self.step else []
        words += ["backward"] if self.backward else []
        words += [f"rule {self.rule}"] if self.rule else []
        words += [self.reduction] if self.reduction else []
        words += ["value in key"] if self.value_in_key else []
        words += ["causal"] if self.causal else []
        words += [f"{self.mask} mask"] if self.mask else []
        words += [f"bias {self.bias}"] if self.bias else []
        words += [f"window {self.window}"] if self.window else []
        words += [f"documents of {self.document_length}"] if self.document_length else []
        words += [f"{self.key_lengths} keys"] if self.key_lengths else []
        words += [f"soft-cap {self.softcap:g}"] if self.softcap else []
        words += ["by a function"] if self.flex else []
        words += [self.layout] if self.layout != "bhsd" else []
        words += [f"rank {self.rank}"] if self.rank != 4 else []
        words += ["strided"] if self.strided else []
        words += ["cold"] if self.cold else []
        words += [f"in a model of {self.model_dim}"] if self.model_dim else []
        words += [f"{self.threads} thread{'s' if self.threads > 1 else ''}"] if self.threads else []
        return ", ".join(words)


@cache
def _pairs(case: Case) -> int:
    if case.mask == "neighborhood":
        return case.batch * case.len_q * NEIGHBORHOOD**2
    start, stop = case.intervals()
    return int(np.broadcast_to(stop - start, (case.batch, case.len_q)).sum())


@cache
def _nbytes(case: Case) -> int:
    element = itemsize(case.dtype)
    start, stop = case.intervals()
    attended = 0
    for item in range(len(start)):
        # +1 where an interval begins, -1 where it ends: a key is attended where the running sum is positive.
        edges = np.zeros(case.len_k + 1, np.int64)
        used = stop[item] > start[item]
        np.add.at(edges, start[item][used], 1)
        np.add.at(edges, stop[item][used], -1)
        keys = np.cumsum(edges[:-1]) > 0
        if case.mask == "padding":
            keys[int(case.len_k * PADDING_KEPT) :] = False
        attended += int(np.count_nonzero(keys)) * (case.batch // len(start))
    rows = case.batch * case.heads * case.len_q
    dims = case.head_dim + case.value_dim
    pairs = case.len_q * case.len_k
    mask = {None: 0, "random": pairs, "padding": case.batch * case.len_k, "neighborhood": 0}[case.mask]
    sizes: dict[str | None, int] = {None: 0, "shared": pairs, "per_head": case.heads * pairs}
    sizes |= {name: int(np.prod(shape(case))) for name, (shape, _) in BIAS_OBJECTS.items()}
    bias = sizes[case.bias]
    read_dims = (case.head_dim,) if case.value_in_key or case.reduction else (case.head_dim, case.value_dim)
    row = sum(_row_nbytes(case.storage or case.dtype, dim) for dim in read_dims)
    if case.reduction is not None:
        similar = case.reduction == "max_similarity"
        results = {"max_similarity": case.batch * case.heads, "topk": 3 * rows * TOPK}
        written = 4 * results.get(case.reduction, case.batch * case.heads * case.len_k)
        queries = rows // case.batch if similar else rows
        return element * queries * case.head_dim + case.kv_heads * attended * row + written
    forward = element * (rows * dims + bias) + case.kv_heads * attended * row + mask
    if case.rule is not None:
        decays, has_rates = RULES[case.rule]
        gates = {None: 0, "token": 1, "column": case.head_dim}[decays] + has_rates
        heads = case.batch * case.kv_heads
        states = 2 * itemsize(case.compute_dtype) * heads * case.head_dim * case.value_dim
        return forward + element * heads * case.len_k * gates + states
    if not case.backward:
        return forward
    written = rows * dims + bias + case.batch * case.kv_heads * case.len_k * dims
    return forward + element * written + itemsize(case.compute_dtype) * rows


def _row_nbytes(storage: str, dim: int) -> int:
    """Bytes of one key or value of one head, with its scales."""
    scales = 4 * -(-dim // INT8_GROUP) if storage == "int8" else 0
    return dim * itemsize(storage) + scales


@dataclass(frozen=True, slots=True)
class Stored:
    """Keys or values that are not one array of numbers: in int8, in pages, or both."""

    data: np.ndarray  #: (B, K, S, D); in pages (P, K, page, D)
    scale: np.ndarray | None = None  #: of int8: (..., ceil(D / 64)) float32, what to multiply each group with
    table: np.ndarray | None = None  #: of pages: (B, n), those of each item in their order

    @classmethod
    def quantised(cls, rows: np.ndarray) -> Stored:
        """`rows` ``(..., D)`` in int8: the largest magnitude of each group becomes 127."""
        firsts = np.arange(0, rows.shape[-1], INT8_GROUP)
        scale = np.maximum.reduceat(np.abs(rows), firsts, axis=-1) / np.float32(INT8_LARGEST)
        return cls(np.rint(rows / _spread(scale, rows.shape[-1])).astype(np.int8), scale)

    def paged(self, page_size: int, table: np.ndarray) -> Stored:
        """The same in the pages that `table` names, each of them once."""

        def cut(array: np.ndarray) -> np.ndarray:
            batch, heads, _, dim = array.shape
            pages = np.empty((table.size, heads, page_size, dim), array.dtype)
            pages[table] = array.reshape(batch, heads, -1, page_size, dim).swapaxes(1, 2)
            return pages

        return Stored(cut(self.data), None if self.scale is None else cut(self.scale), table)

    def array(self) -> np.ndarray:
        """The numbers that it stands for, ``(B, K, S, D)``: gathered and decoded."""
        data = self._gathered(self.data)
        if self.scale is None:
            return data
        scale = _spread(self._gathered(self.scale), data.shape[-1])
        return np.multiply(data, scale, dtype=np.float32)

    def _gathered(self, array: np.ndarray) -> np.ndarray:
        if self.table is None:
            return array
        batch, count = self.table.shape
        _, heads, page_size, dim = array.shape
        return array[self.table].swapaxes(1, 2).reshape(batch, heads, count * page_size, dim)


def _spread(scale: np.ndarray, dim: int) -> np.ndarray:
    """The scale of each of the `dim` elements of a row."""
    return np.repeat(scale, INT8_GROUP, axis=-1)[..., :dim]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arrays of a case; the same in every process."""

    query: np.ndarray  #: in the layout and rank of the case; C-contiguous unless the case is strided
    key: np.ndarray | Stored
    value: np.ndarray | Stored
    mask: np.ndarray | None  #: bool, True = may attend: the case's ``mask`` and nothing else
    bias: np.ndarray | None  #: of a bias object the array that it stands for
    grad_out: np.ndarray | None = (
        None  #: of a backward case, like the output: the gradient with respect to it
    )
    #: Of a case with a `rule`: logarithms of factors and rates of the delta rule, as `gated_linear_attention`
    #: takes them in the layout of the case, and the state before, ``(B, K, D, E)`` in `compute_dtype`.
    decay: np.ndarray | None = None
    beta: np.ndarray | None = None
    state: np.ndarray | None = None
    table: np.ndarray | None = None  #: what a bias object is made of

    def with_views(self, case: Case) -> Inputs:
        """The same, with a value in the key where `case` has it there."""
        if not case.value_in_key or isinstance(self.key, Stored):
            return self
        return replace(self, value=self.key[..., : case.value_dim])

    def bhsd(self, case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Query, key and value as ``(B, heads, length, dim)``, whatever the case's layout.

        Views, but of what is `Stored`: that is gathered and decoded.
        """
        rows = (it.array() if isinstance(it, Stored) else it for it in (self.key, self.value))
        arrays = (self.query, *rows)
        if case.rank == 3:
            return tuple(array[None] for array in arrays)  # type: ignore[return-value]
        if case.layout == "bshd":
            return tuple(array.transpose(0, 2, 1, 3) for array in arrays)  # type: ignore[return-value]
        return arrays  # type: ignore[return-value]

    def grad_out_bhsd(self, case: Case) -> np.ndarray:
        """`grad_out` as ``(B, H, L, E)``; a view."""
        if self.grad_out is None:
            raise ValueError(f"{case.name} has no gradients")
        if case.rank == 3:
            return self.grad_out[None]
        return self.grad_out.transpose(0, 2, 1, 3) if case.layout == "bshd" else self.grad_out

    def gates(self, case: Case) -> tuple[np.ndarray | None, np.ndarray | None]:
        """`decay` and `beta` as ``(B, K, L, 1)``, or ``(B, K, L, D)`` for decays of columns; views."""
        whole = (it if it is None or it.ndim == 4 else it[..., None] for it in (self.decay, self.beta))
        swapped = case.layout == "bshd"
        decay, beta = (it.swapaxes(1, 2) if swapped and it is not None else it for it in whole)
        return decay, beta

    def wide(self, case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The arrays whose ``[..., ::2]`` a strided case has; of the others what `bhsd` gives."""
        if not case.strided:
            return self.bhsd(case)
        return tuple(array.base for array in self.bhsd(case))  # type: ignore[return-value]

    def allowed(self, case: Case, *, causal: bool | None = None) -> np.ndarray | None:
        """All that restricts attention as one bool array, for libraries that have no other way to say it.

        Parameters
        ----------
        causal
            False leaves the case's ``causal`` out, for libraries that have a flag for it.

        Returns
        -------
        np.ndarray or None
            True = may attend; ``(B or 1, 1, L or 1, S)``. None when every query may attend every key.
        """
        start, stop = (bound[:, None, :, None] for bound in case.intervals(causal=causal))
        allowed = None
        if np.any(start) or np.any(stop < case.len_k):
            keys = np.arange(case.len_k)
            allowed = keys < stop
            if np.any(start):
                allowed &= keys >= start
        if self.mask is None:
            return allowed
        mask = self.mask if self.mask.ndim == 4 else self.mask[None, None]
        return mask if allowed is None else mask & allowed

    def score_mask(self, case: Case, *, causal: bool | None = None) -> np.ndarray | None:
        """`allowed` and the bias as one array, as most libraries take them: bool, or float to be added.

        Broadcasts to ``(B, H, L, S)`` and has that rank; in the case's dtype with -inf where a key is not
        allowed when there is a bias; None when there is nothing to say.
        """
        allowed = self.allowed(case, causal=causal)
        if self.bias is None:
            return allowed
        bias = self.bias.reshape(1, -1, case.len_q, case.len_k)
        return bias if allowed is None else np.where(allowed, bias, bias.dtype.type(-np.inf))


def document_ids(case: Case) -> np.ndarray:
    """The document each position belongs to; all to one where the case is not packed."""
    return np.arange(case.len_k) // (case.document_length or case.len_k)


def make_inputs(case: Case) -> Inputs:
    """Standard normal inputs from a seed that depends on the case's name alone.

    By a `rule` keys have length 1, a state falls by a fifth at a token on average, and rates are in 0..1.
    """
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    drawn: Any = np.dtype(case.compute_dtype).type

    def draw(shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return rng.standard_normal(shape, dtype=drawn).astype(numpy_dtype(dtype), copy=False)

    def normal(heads: int, length: int, dim: int, dtype: str) -> np.ndarray:
        if case.layout == "bshd":
            shape: tuple[int, ...] = (case.batch, length, heads)
        else:
            shape = (case.batch, heads, length)
        shape = shape[4 - case.rank :]
        if case.strided:
            return draw((*shape, 2 * dim), dtype)[..., ::2]
        return draw((*shape, dim), dtype)

    def rows(dim: int) -> np.ndarray | Stored:
        in_int8 = case.storage == "int8"
        array = normal(case.kv_heads, case.len_k, dim, "float32" if in_int8 else case.storage or case.dtype)
        if not in_int8 and case.page_size is None:
            return array
        stored = Stored.quantised(array) if in_int8 else Stored(array)
        return stored if case.page_size is None else stored.paged(case.page_size, table)

    query = normal(case.heads, case.len_q, case.head_dim, case.dtype)
    count = case.len_k // (case.page_size or case.len_k)
    # One table for both, and pages in no order, as they are handed out while others are given back.
    order = rng.permutation(case.batch * count) if case.page_size else np.arange(case.batch)
    table = order.reshape(case.batch, count)
    key, value = rows(case.head_dim), rows(case.value_dim)

    mask = None
    if case.mask == "random":
        mask = rng.random((case.len_q, case.len_k), dtype=np.float32) < 0.5
    elif case.mask == "padding":
        mask = np.zeros((case.batch, 1, 1, case.len_k), bool)
        mask[..., : int(case.len_k * PADDING_KEPT)] = True
    elif case.mask == "neighborhood":
        mask = _near(round(case.len_q**0.5))

    bias = table_of_bias = None
    if case.bias in BIAS_OBJECTS:
        shape_of, stored = BIAS_OBJECTS[case.bias]
        table_of_bias = draw(shape_of(case), case.dtype)
        bias = stored(case, table_of_bias)
    elif case.bias is not None:
        heads = (case.heads,) if case.bias == "per_head" else ()
        bias = draw((*heads, case.len_q, case.len_k), case.dtype)
    grad_out = draw((*query.shape[:-1], case.value_dim), case.dtype) if case.backward else None
    if case.rule is None or isinstance(key, Stored):
        made = Inputs(query, key, value, mask, bias, grad_out, table=table_of_bias)
        return made.with_views(case)
    key[...] = key / np.linalg.norm(key.astype(drawn), axis=-1, keepdims=True)
    decays, has_rates = RULES[case.rule]
    decay = beta = None
    if decays is not None:
        shape = key.shape if decays == "column" else key.shape[:-1]
        decay = -np.exp(draw(shape, case.compute_dtype) - drawn(2)).astype(numpy_dtype(case.dtype))
    if has_rates:
        beta = rng.random(key.shape[:-1], dtype=drawn).astype(numpy_dtype(case.dtype))
    state = draw((case.batch, case.kv_heads, case.head_dim, case.value_dim), case.compute_dtype)
    return Inputs(query, key, value, mask, bias, grad_out, decay, beta, state)


def _near(side: int) -> np.ndarray:
    """Which tokens of an image are in the window of each, which lies around it inside of the image."""
    at = np.arange(side)
    first = np.clip(at - NEIGHBORHOOD // 2, 0, max(0, side - NEIGHBORHOOD))[:, None]
    near = (at >= first) & (at < first + NEIGHBORHOOD)
    return np.kron(near, near)


@dataclass(frozen=True, slots=True)
class Layer:
    """What the products around attention multiply in a layer of a model; the same in every process.

    They are there as neighbours only: attention does not read what the first one gives, so that a case has
    the same inputs and the same right answer in a model and alone.
    """

    rows: np.ndarray  #: (B · L, model_dim): what becomes queries, keys and values
    w_qkv: np.ndarray  #: (model_dim, H · D + K · (D + E))
    attended: np.ndarray  #: (B · L, H · E): as attention leaves it
    w_o: np.ndarray  #: (H · E, model_dim)


def make_layer(case: Case) -> Layer | None:
    """The layer around `case`; None where it is not timed in a model."""
    if case.model_dim is None:
        return None
    rng = np.random.default_rng(0)
    count, width = case.batch * case.len_q, case.heads * case.value_dim
    projected = case.heads * case.head_dim + case.kv_heads * (case.head_dim + case.value_dim)
    shapes = (count, case.model_dim), (case.model_dim, projected), (count, width), (width, case.model_dim)
    dtype: Any = np.dtype(case.compute_dtype).type
    return Layer(*(rng.standard_normal(shape, dtype=dtype) for shape in shapes))
