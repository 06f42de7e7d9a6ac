"""The object that carries an attention call from validation to a backend.

`normalize` makes a `Problem` of the user's arguments; a backend sees nothing else. It holds views, sizes and
options; it checks nothing, copies nothing and knows no backend. Where the caller's arrays are on a GPU, they
and the results are `DeviceArray`; intervals and mask maps are on the host nevertheless.

Letters: ``*lead`` the broadcast leading batch axes (may be none), ``H`` query heads, ``K`` key/value
heads with ``H % K == 0``, ``L`` query length, ``S`` key length, ``D`` head_dim, ``E`` value head_dim.
Broadcast axes are views with stride 0, never expanded.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias

import numpy as np

from fastattn._call.storage import BFLOAT16, REAL, Rows, storage_code, storage_of
from fastattn.biases import Gridded, Term
from fastattn.masks.map import Band, Intervals, MaskMap, Size, intersect

# Bounds on the sizes of one call, far beyond what memory holds, but axes of stride 0 can reach them. Within
# them no number that a backend computes from sizes exceeds 63 bits: the largest is the bytes of all keys and
# values, MAX_ROWS * 2 * MAX_DIM * 8 = 2**62.
MAX_ROWS = 2**40  #: B·H·L, and B·K·S
MAX_DIM = 2**18  #: D, and E: at that size a thread's tiles take some 200 MB, and copies 1 GB at most

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # with a default, as Python's own has from 3.13 on

    from fastattn._call.dropout import Dropout
    from fastattn._machine.device import DeviceArray

    Array = TypeVar("Array", bound=np.ndarray | DeviceArray, default=np.ndarray)
else:
    from typing import TypeVar

    Array = TypeVar("Array")


class Mod(NamedTuple):
    """A function of the caller: ``score_mod(score, b, h, q_idx, kv_idx, *aux)`` returns the new score,
    ``mask_mod(b, h, q_idx, kv_idx, *aux)`` whether the key is allowed."""

    function: Callable[..., Any]
    aux: tuple[Any, ...]  #: arrays and NumPy scalars, of native bool, integer or float dtypes
    key: Any = None  #: what the function is compiled for: equal for functions that do the same
    captured: tuple[Any, ...] = ()  #: arrays and floats that it reads from its closure and its globals

    @property
    def reads_arrays(self) -> bool:
        return any(np.ndim(value) for value in (*self.aux, *self.captured))


#: The arrays of a call, which change from one to the next. A driver reads the last three without strides.
#: Of `Rows` there is more than key and value, see `Rows.arrays`.
Arrays = namedtuple(
    "Arrays",
    "query key value out lse weights bias dense key_start key_stop mask_index key_lengths "
    "key_scale value_scale key_table value_table key_scale_table value_scale_table sinks mask_bits drop_key",
)
NO_ARRAYS = Arrays(*[None] * 21)

PARTS_OF_ROWS = (
    "key_scale",
    "value_scale",
    "key_table",
    "value_table",
    "key_scale_table",
    "value_scale_table",
)


def parts_of_rows(key_parts: Sequence[Any], value_parts: Sequence[Any]) -> tuple[Any, ...]:
    """What `Arrays` have of `Rows` besides key and value, in the order of `PARTS_OF_ROWS`."""
    return tuple(part for pair in zip(key_parts, value_parts, strict=True) for part in pair)


def mean_over_heads(weights: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The mean of weights ``(*lead, H, L, S)`` over H, rounded to `dtype` once."""
    mean = np.add.reduce(weights, axis=-3)
    mean /= max(weights.shape[-3], 1)
    with np.errstate(over="ignore"):
        return mean.astype(dtype, copy=False)


class Sizes:
    """The sizes of a problem, and sizes derived from them."""

    __slots__ = (
        "batch", "group_size", "head_dim", "heads", "len_k", "len_q", "num_heads", "num_kv_heads", "rows",
        "value_dim",
    )  # fmt: skip

    head_dim: int
    len_k: int
    value_dim: int

    def __init__(self, query: np.ndarray | DeviceArray, value: np.ndarray | DeviceArray | Rows) -> None:
        *lead, num_heads, len_q, self.head_dim = query.shape
        *_, num_kv_heads, self.len_k, self.value_dim = value.shape
        self.len_q, self.num_heads, self.num_kv_heads = len_q, num_heads, num_kv_heads
        self.batch = batch = prod(lead)
        self.heads = batch * num_kv_heads  #: key/value heads of all batch items
        #: Query heads that read one key/value head; 1 when there is no head at all.
        self.group_size = group_size = num_heads // num_kv_heads if num_kv_heads else 1
        self.rows = len_q * group_size  #: query rows that read one key/value head


class Problem(NamedTuple, Generic[Array]):
    """One validated attention call: strided views, sizes and options.

    Key ``j`` is allowed for query ``i`` when all of these that are present allow it: the ``band``, the
    interval ``key_start <= j < key_stop``, ``dense`` non-zero, the bit in ``mask_map``, ``mask_mod``, and a
    ``bias`` above -inf. A score is ``scale * q @ k``, then soft-capped, then changed by ``score_mod``, and
    the ``bias`` is added.
    """

    query: Array  #: ``(*lead, H, L, D)``, of `dtype`, or float16 or bfloat16; any strides
    key: Array | Rows  #: ``(*lead, K, S, D)``, the same, or in int8 or in pages
    value: Array | Rows  #: ``(*lead, K, S, E)``, the same
    out: Array  #: ``(*lead, H, L, E)``, of `dtype` or in 16 bits, any strides, no overlap with inputs; output
    lse: Array | None  #: ``(*lead, H, L)``, of `dtype`, C-contiguous; output
    weights: Array | None  #: ``(*lead, H, L, S)``, of `dtype` or in 16 bits, C-contiguous; output
    dtype: np.dtype  #: of the computation, float32 or float64, native
    scale: float
    softcap: float | None
    #: What is added up to it: ``(*lead, H, L, S)`` views, bfloat16 or float16/32/64, of any byte order and
    #: strides, and grids
    bias: tuple[Term, ...]
    sinks: Array | None  #: ``(H,)``, of `dtype`, contiguous
    band: Band | None  #: of `causal`, `window` and `key_lengths`
    key_start: np.ndarray | None  #: ``(*lead, L)`` view, int64, in 0..S; None with key_stop
    key_stop: np.ndarray | None  #: ``(*lead, L)`` view, int64, in 0..S
    dense: Array | None  #: ``(*lead, H, L, S)`` view; bool or any integer, non-zero = allowed
    mask_map: MaskMap | None  #: mask map with bits for the partial tiles
    score_mod: Mod | None = None
    mask_mod: Mod | None = None  #: for arrays on a GPU only: else evaluated to ``mask_map`` or intervals
    dropout: Dropout | None = None  #: of the weights, after the softmax
    #: Weights may be rounded to the type of query, key and value, where all are in 16 bits.
    rounds_weights: bool = False
    mean_dtype: np.dtype | None = None  #: of the mean of `weights` over the heads, which the caller gets

    def arrays(self) -> Arrays:
        """The arguments of a prepared call."""
        mask_map, band = self.mask_map, self.band
        (key, *key_parts), (value, *value_parts) = (
            x.arrays() if isinstance(x, Rows) else (x, None, None, None) for x in (self.key, self.value)
        )
        parts = parts_of_rows(key_parts, value_parts)
        return Arrays(
            query=self.query,
            key=key,
            value=value,
            out=self.out,
            lse=self.lse,
            weights=self.weights,
            bias=self.plain_bias,
            dense=self.dense,
            key_start=self.key_start,
            key_stop=self.key_stop,
            mask_index=None if mask_map is None else mask_map.index,
            key_lengths=None if band is None else band.lengths,
            **dict(zip(PARTS_OF_ROWS, parts, strict=True)),
            sinks=self.sinks,
            mask_bits=None if mask_map is None else mask_map.bits,
            drop_key=None if self.dropout is None else self.dropout.key,
        )

    def of_heads(self, heads: slice) -> Problem[Any]:
        """That of some query heads, as many of each key/value head, without lse and weights; on the host."""

        def part(array: Any) -> Any:
            return None if array is None else array[..., heads, :, :]

        mask_map = self.mask_map
        sinks: Any = self.sinks
        if sinks is not None:
            sinks = np.ascontiguousarray(sinks[heads])
        return self._replace(
            query=part(self.query),
            out=part(self.out),
            bias=tuple(
                Gridded(*map(part, term)) if isinstance(term, Gridded) else part(term) for term in self.bias
            ),
            sinks=sinks,
            dense=part(self.dense),
            lse=None,
            weights=None,
            mask_map=None if mask_map is None else MaskMap(part(mask_map.index), mask_map.bits),
        )

    def stored(self) -> list[str]:
        """Which arrays are not plain float32 or float64, for backends that read no others; a float16 bias is
        read by all."""
        arrays: dict[str, Any] = {"query": self.query, "key": self.key, "value": self.value}
        for term in self.bias:
            if not isinstance(term, Gridded) and storage_of(term.dtype) == BFLOAT16:
                arrays["bias"] = term
        places = {n: " in pages" if isinstance(a, Rows) and a.page_size else "" for n, a in arrays.items()}
        return [
            f"{name} is {array.dtype.name}{places[name]}"
            for name, array in arrays.items()
            if storage_code(array) != REAL or places[name]
        ]

    @property
    def plain_bias(self) -> Array | None:
        """The bias where it is one array, which is read in place."""
        is_plain = len(self.bias) == 1 and not isinstance(self.bias[0], Gridded)
        return self.bias[0] if is_plain else None

    def summed_bias(self) -> list[str]:
        """Why a backend that reads one array alone as a bias cannot take this one."""
        is_sum = bool(self.bias) and self.plain_bias is None
        return ["it reads one array as a bias, and this one is a sum"] if is_sum else []

    @property
    def device(self) -> str:
        """``"cpu"``, or the GPU that the arrays are on: ``"cuda:0"``."""
        return str(self.query.device)

    def intervals(self) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
        """``key_start, key_stop`` including the band, for a backend that takes no band."""
        parts = [] if self.band is None else [self.band.intervals(self.len_q, self.len_k)]
        if self.key_start is not None:
            parts.append(Intervals(self.key_start, self.key_stop))
        if not parts:
            return None, None
        both = intersect(parts, self.len_k)
        shape = (*self.lead, self.len_q)
        return np.broadcast_to(both.start, shape), np.broadcast_to(both.stop, shape)

    @property
    def score_sizes(self) -> Size:
        return Size(self.lead, self.num_heads, self.len_q, self.len_k)

    @property
    def lead(self) -> tuple[int, ...]:
        return self.query.shape[:-3]

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.query, self.value)

    @property
    def batch(self) -> int:
        return prod(self.lead)

    @property
    def num_heads(self) -> int:
        return self.query.shape[-3]

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[-3]

    @property
    def group_size(self) -> int:
        """Query heads that read one key/value head; 1 when there is no head at all."""
        return self.num_heads // self.num_kv_heads if self.num_kv_heads else 1

    @property
    def len_q(self) -> int:
        return self.query.shape[-2]

    @property
    def len_k(self) -> int:
        return self.key.shape[-2]

    @property
    def head_dim(self) -> int:
        return self.query.shape[-1]

    @property
    def value_dim(self) -> int:
        return self.value.shape[-1]


#: A problem wherever its arrays are.
AnyProblem: TypeAlias = "Problem[np.ndarray] | Problem[DeviceArray]"
