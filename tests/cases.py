"""Shared problems: named cases, random arrays, odd memory layouts, mask objects beside their bool arrays."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, wraps
from math import prod
from typing import Any

import numpy as np

from fastattn import masks
from fastattn._call.normalize import normalize
from fastattn._call.problem import Problem
from fastattn._machine.constants import FEW_ROWS
from fastattn.backends.cython import backend as cython_backend
from tests import naive

FLOATS = ("float32", "float64")

#: One less than, equal to and one more than the usual vector and tile sizes.
ODD_LENGTHS = (1, 2, 3, 15, 16, 17, 31, 33, 47, 48, 49, 127, 128, 129, 200, 257)


def random_arrays(
    seed: int = 0,
    *,
    lead: tuple[int, ...] = (),
    heads: int = 2,
    kv_heads: int | None = None,
    len_q: int = 17,
    len_k: int = 33,
    head_dim: int = 16,
    value_dim: int | None = None,
    dtype: str = "float32",
    spread: float = 1.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Normal query ``(*lead, H, L, D)``, key ``(*lead, K, S, D)`` and value ``(*lead, K, S, E)``."""
    rng = np.random.default_rng(seed)
    kv_heads = heads if kv_heads is None else kv_heads
    value_dim = head_dim if value_dim is None else value_dim
    query = rng.standard_normal((*lead, heads, len_q, head_dim)) * spread
    key = rng.standard_normal((*lead, kv_heads, len_k, head_dim))
    value = rng.standard_normal((*lead, kv_heads, len_k, value_dim))
    return query.astype(dtype), key.astype(dtype), value.astype(dtype)


def few_rows(dtype: str, backend: str = "cython") -> int:
    """The most rows of a head for which split-KV is used, on the instruction set in use."""
    if backend == "numba":
        return FEW_ROWS
    target = cython_backend.driver.target(np.dtype(dtype).itemsize)
    return target["few_rows"] or max(FEW_ROWS, target["lanes"] - 1)


def problem_of(*arrays: np.ndarray, **options: Any) -> Problem:
    """What a call of `fastattn.attention` becomes."""
    return normalize(*arrays, options).problem


@dataclass(frozen=True)
class Case:
    """A problem by its sizes and options; hashable, so that its exact answer is computed once."""

    name: str
    lead: tuple[int, ...] = ()
    heads: int = 2
    kv_heads: int | None = None
    len_q: int = 17
    len_k: int = 33
    head_dim: int = 16
    value_dim: int | None = None
    dtype: str = "float32"
    spread: float = 1.0
    bias: tuple[int, ...] | None = None  #: shape of a random bias
    bias_dtype: str | None = None
    mask: tuple[int, ...] | None = None  #: shape of a random bool mask
    sinks: bool = False
    options: tuple[tuple[str, Any], ...] = field(default=())

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return random_arrays(
            len(self.name) + 7 * self.len_q + self.len_k,
            lead=self.lead,
            heads=self.heads,
            kv_heads=self.kv_heads,
            len_q=self.len_q,
            len_k=self.len_k,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            dtype=self.dtype,
            spread=self.spread,
        )

    def keywords(self) -> dict[str, Any]:
        rng = np.random.default_rng(1)
        keywords: dict[str, Any] = dict(self.options)
        if self.bias is not None:
            keywords["bias"] = rng.standard_normal(self.bias).astype(self.bias_dtype or self.dtype)
        if self.mask is not None:
            keywords["mask"] = rng.random(self.mask) < 0.6
        if self.sinks:
            keywords["sinks"] = rng.standard_normal(self.heads).astype(self.dtype)
        return keywords

    def as_dtype(self, dtype: str) -> Case:
        return replace(self, dtype=dtype)


@dataclass(frozen=True)
class Solved:
    """A case with its arrays, its options, the exact answer and the plain formula's answer."""

    arrays: tuple[np.ndarray, np.ndarray, np.ndarray]
    keywords: dict[str, Any]
    exact: naive.Answer
    plain: naive.Baseline


@lru_cache(maxsize=256)
def solve(case: Case) -> Solved:
    """Compute a case once for all backends and instruction sets."""
    arrays, keywords = case.arrays(), case.keywords()
    return Solved(arrays, keywords, naive.attention(*arrays, **keywords), naive.formula(*arrays, **keywords))


def once(oracle: Callable[..., Any]) -> Callable[..., Any]:
    """Answers that are kept by the contents of what is given: several ways meet the same problems."""

    @lru_cache(maxsize=256)
    def solve(problem: bytes) -> Any:
        arguments, options = pickle.loads(problem)
        return oracle(*arguments, **options)

    @wraps(oracle)
    def kept(*arguments: Any, **options: Any) -> Any:
        return solve(pickle.dumps((arguments, options)))

    return kept


# ---------------------------------------------------------------- memory layouts


def _fortran(array: np.ndarray) -> np.ndarray:
    return np.asfortranarray(array)


def _reversed(array: np.ndarray) -> np.ndarray:
    backwards = (slice(None, None, -1),) * array.ndim
    return np.ascontiguousarray(array[backwards])[backwards]


def _poisoned(shape: list[int], dtype: np.dtype) -> np.ndarray:
    """NaN in a float array, True or a large number in any other: any read of it changes the result."""
    return np.full(shape, np.nan if dtype.kind == "f" else 101, dtype)


def _padded(array: np.ndarray) -> np.ndarray:
    """A view into a poisoned buffer with three spare elements around every axis."""
    buffer = _poisoned([n + 6 for n in array.shape], array.dtype)
    inner = buffer[tuple(slice(3, 3 + n) for n in array.shape)]
    inner[...] = array
    return inner


def _every_other(array: np.ndarray) -> np.ndarray:
    buffer = _poisoned([2 * n + 1 for n in array.shape], array.dtype)
    inner = buffer[tuple(slice(1, 1 + 2 * n, 2) for n in array.shape)]
    inner[...] = array
    return inner


def _last_axis_slow(array: np.ndarray) -> np.ndarray:
    if array.ndim < 2:
        return _every_other(array)
    return np.ascontiguousarray(array.swapaxes(-1, -2)).swapaxes(-1, -2)


def _heads_inside(array: np.ndarray) -> np.ndarray:
    if array.ndim < 3:
        return _last_axis_slow(array)
    return np.ascontiguousarray(array.swapaxes(-2, -3)).swapaxes(-2, -3)


def _unaligned(array: np.ndarray) -> np.ndarray:
    raw = np.full(array.nbytes + 1, 0xFF, np.uint8)
    view = np.ndarray(array.shape, array.dtype, buffer=raw.data, offset=1)
    view[...] = array
    return view


def _read_only(array: np.ndarray) -> np.ndarray:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def _byte_swapped(array: np.ndarray) -> np.ndarray:
    return array.astype(array.dtype.newbyteorder())


#: Functions that copy an array to another memory layout.
MEMORY_LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "contiguous": np.ascontiguousarray,
    "fortran": _fortran,
    "reversed": _reversed,
    "padded": _padded,
    "every_other": _every_other,
    "last_axis_slow": _last_axis_slow,
    "heads_inside": _heads_inside,
    "unaligned": _unaligned,
    "read_only": _read_only,
    "byte_swapped": _byte_swapped,
}


# ---------------------------------------------------------------- mask objects

#: Queries and keys within one tile of the map of a mask, at its edges and over several.
MASK_SIZES = [
    (1, 1),
    (1, 5),
    (5, 1),
    (4, 4),
    (7, 12),
    (12, 7),
    (64, 128),
    (65, 129),
    (63, 127),
    (130, 260),
    (200, 100),
]


@dataclass(frozen=True)
class MaskPair:
    """A mask object and, worked out by hand from its definition, its array for ``(B, H, L, S)``."""

    name: str
    mask: Any
    allowed: np.ndarray


def neighborhood(
    len_q: int,
    len_k: int,
    inner: tuple[int, ...],
    kernel: tuple[int, ...],
    dilation: tuple[int, ...],
    causal: tuple[bool, ...],
) -> tuple[masks.Mask, np.ndarray]:
    """The mask of a layout of so many tokens, or of more, of which a part, where L and S differ; its array.

    Inner axes have `inner` coordinates at most, and windows are cut to fit.
    """
    is_square = len_q == len_k > 0
    some = prod(inner)
    rest = len_q if is_square else some * -(-max(len_q + 1, len_k + 2) // some)
    shape: list[int] = []
    for most in reversed(inner):
        shape.insert(0, max(n for n in range(1, most + 1) if rest % n == 0))
        rest //= shape[0]
    shape.insert(0, rest)
    kernel = tuple(map(min, kernel, shape))
    dilation = tuple(min(n, size // of) for n, size, of in zip(dilation, shape, kernel, strict=True))
    mask = masks.Neighborhood(tuple(shape), kernel, dilation=dilation, causal=causal)
    allowed = _neighborhood_array(tuple(shape), kernel, dilation, causal)
    return (mask, allowed) if is_square else (mask.shifted(1, 2), allowed[1 : 1 + len_q, 2 : 2 + len_k])


_neighborhood_array = lru_cache(maxsize=64)(naive.neighborhood)


@lru_cache(maxsize=8)
def mask_pairs(batch: int, heads: int, len_q: int, len_k: int, seed: int = 0) -> tuple[MaskPair, ...]:
    """Every kind of mask and what they combine to, for one problem size (one batch axis)."""
    rng = np.random.default_rng(seed)
    i = np.arange(len_q)[:, None]
    j = np.arange(len_k)[None, :]
    shift = len_k - len_q
    lengths = rng.integers(0, len_k + 1, batch)
    offsets = rng.integers(-2, len_k + 1, batch)
    prefixes = rng.integers(0, len_k + 1, batch)
    q_ids, k_ids = rng.integers(0, 4, len_q), rng.integers(0, 4, len_k)
    q_ids_per_item, k_ids_per_item = rng.integers(0, 3, (batch, len_q)), rng.integers(0, 3, (batch, len_k))
    documents_q = np.sort(q_ids_per_item, axis=-1)
    documents_k = np.sort(k_ids_per_item, axis=-1)
    tokens = np.unique(rng.integers(0, len_k, 2)) if len_k else np.zeros(0, int)
    dense = rng.random((len_q, len_k)) < 0.5
    dense_per_head = rng.random((batch, heads, len_q, len_k)) < 0.5
    per_item = (slice(None), None, None, None)

    causal = j <= i
    decoder = j <= i + shift
    window = (i + shift - 3 <= j) & (j <= i + shift + 2)
    window_top = (i - 5 <= j) & (j <= i + 1)
    documents = documents_q[:, None, :, None] == documents_k[:, None, None, :]
    anchored = np.isin(j, tokens) | np.isin(i + shift, tokens)
    real = j < lengths[per_item]
    prefix = (j < prefixes[per_item]) | decoder
    line, line_array = neighborhood(len_q, len_k, (), (6,), (1,), (False,))
    image, image_array = neighborhood(len_q, len_k, (16,), (3, 5), (1, 1), (False, False))
    video, video_array = neighborhood(len_q, len_k, (3, 8), (2, 2, 3), (1, 1, 2), (True, False, False))

    pairs = [
        ("causal_top_left", masks.Causal("top_left"), causal),
        ("causal_bottom_right", masks.Causal("bottom_right"), decoder),
        ("causal_offset", masks.Causal(offset=3), j <= i + 3),
        ("causal_offset_negative", masks.Causal(offset=-2), j <= i - 2),
        ("causal_offset_per_item", masks.Causal(offset=offsets), j <= i + offsets[per_item]),
        ("window", masks.Window(3, 2), window),
        ("window_left_open", masks.Window(None, 0), j <= i + shift),
        ("window_right_open", masks.Window(2, None), j >= i + shift - 2),
        ("window_top_left", masks.Window(5, 1, align="top_left"), window_top),
        ("key_lengths", masks.KeyLengths(lengths), real),
        ("segments_any_order", masks.Segments(q_ids, k_ids), q_ids[:, None] == k_ids),
        (
            "segments_any_order_per_item",
            masks.Segments(q_ids_per_item, k_ids_per_item),
            q_ids_per_item[:, None, :, None] == k_ids_per_item[:, None, None, :],
        ),
        ("segments_sorted", masks.Segments(documents_q, documents_k), documents),
        ("prefix", masks.PrefixLM(prefixes), prefix),
        ("dense", masks.Dense(dense), dense),
        ("dense_integer_per_head", masks.Dense(dense_per_head * np.int16(256)), dense_per_head),
        ("and_intervals", masks.Window(3, 2) & masks.KeyLengths(lengths), window & real),
        (
            "and_documents_causal",
            masks.Segments(documents_q, documents_k) & masks.Causal("bottom_right"),
            documents & decoder,
        ),
        ("and_dense", masks.Dense(dense) & masks.Causal("top_left"), dense & causal),
        ("or_intervals", masks.Window(3, 2) | masks.Causal(offset=-2), window | (j <= i - 2)),
        ("or_dense", masks.Dense(dense) | masks.KeyLengths(lengths), dense | real),
        (
            "and_of_or",
            (masks.Window(3, 2) | masks.Dense(dense)) & masks.KeyLengths(lengths),
            (window | dense) & real,
        ),
        ("not_self", masks.NotSelf(), j != i),
        ("not_not_self", ~masks.NotSelf(), j == i),
        ("and_not_self", masks.NotSelf() & masks.KeyLengths(lengths), (j != i) & real),
        ("or_not_self", masks.NotSelf() | masks.Window(0, 0), (j != i) | (j == i + shift)),
        ("neighborhood_line", line, line_array),
        ("neighborhood_image", image, image_array),
        ("neighborhood_video", video, video_array),
        ("and_neighborhood", image & masks.KeyLengths(lengths), image_array & real),
        ("or_neighborhood", video | masks.Window(3, 2), video_array | window),
        ("not_neighborhood", ~image, ~image_array),
        ("shifted_not_self", masks.NotSelf().shifted(2, 3), j + 3 != i + 2),
        (
            "shifted_window",
            masks.Window(3, 2).shifted(2, 5, size=(len_q + 9, len_k + 8)),
            (i + shift - 7 <= j) & (j <= i + shift - 2),
        ),
        (
            "shifted_and_per_item",
            (masks.KeyLengths(lengths) & masks.Causal(offset=offsets)).shifted(1, 2),
            (j + 2 < lengths[per_item]) & (j <= i + offsets[per_item] - 1),
        ),
        ("not_causal", ~masks.Causal("bottom_right"), ~decoder),
        ("not_causal_per_item", ~masks.Causal(offset=offsets), ~(j <= i + offsets[per_item])),
        ("not_key_lengths", ~masks.KeyLengths(lengths), ~real),
        ("not_window_right_open", ~masks.Window(2, None), ~(j >= i + shift - 2)),
        ("not_window", ~masks.Window(3, 2), ~window),
        (
            "not_segments",
            ~masks.Segments(q_ids_per_item, k_ids_per_item),
            q_ids_per_item[:, None, :, None] != k_ids_per_item[:, None, None, :],
        ),
        ("not_dense_integer_per_head", ~masks.Dense(dense_per_head * np.int16(256)), ~dense_per_head),
        (
            "not_and",
            ~(masks.KeyLengths(lengths) & masks.Segments(documents_q, documents_k)),
            ~(real & documents),
        ),
        (
            "not_and_nothing",  # no key is left in the first item, at positions in the middle
            ~(masks.Window(0, None) & masks.KeyLengths(np.arange(batch) % 2 * len_k)),
            ~((j >= i + shift) & (j < (np.arange(batch) % 2 * len_k)[per_item])),
        ),
        ("not_or_intervals", ~(masks.KeyLengths(lengths) | masks.Causal("bottom_right")), ~(real | decoder)),
        (
            "and_not_or",
            masks.Window(3, 2) & ~(~masks.Dense(dense) | masks.Causal(offset=-2)),
            window & dense & ~(j <= i - 2),
        ),
    ]
    if len_k:
        pairs += [
            ("global_tokens", masks.GlobalTokens(tokens), anchored),
            ("longformer", masks.Window(3, 2) | masks.GlobalTokens(tokens), window | anchored),
            ("not_longformer", ~(masks.Window(3, 2) | masks.GlobalTokens(tokens)), ~(window | anchored)),
        ]
    shape = (batch, heads, len_q, len_k)
    return tuple(MaskPair(name, mask, np.broadcast_to(allowed, shape)) for name, mask, allowed in pairs)


MASK_NAMES = tuple(pair.name for pair in mask_pairs(1, 1, 2, 2))


def mask_pair(name: str, batch: int, heads: int, len_q: int, len_k: int, seed: int = 0) -> MaskPair:
    return next(p for p in mask_pairs(batch, heads, len_q, len_k, seed) if p.name == name)


def stored(arrays: Sequence[np.ndarray], storages: Sequence[Any]) -> list[np.ndarray]:
    """Each array in a dtype of its own."""
    return [array.astype(storage) for array, storage in zip(arrays, storages, strict=True)]


def upcast(arrays: Sequence[np.ndarray], dtype: Any = np.float32) -> list[np.ndarray]:
    """All arrays in one dtype."""
    return [array.astype(dtype) for array in arrays]
