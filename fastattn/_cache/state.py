"""What caches are made with, given and hold, checked: of a caller's arguments, or of a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._cache.pages import PageShape
from fastattn._call.arguments import as_array, count, host_numbers, is_swapped, per_item
from fastattn._call.problem import MAX_DIM, MAX_ROWS
from fastattn._call.storage import BFLOAT16, REAL, storage_of
from fastattn.masks.arguments import integers

if TYPE_CHECKING:
    from fastattn._call.options import LayoutName

PAGE_SIZE = 256  #: by default: one key tile of the kernels, so that no tile crosses from page to page
_STORAGES = "float64, float32, float16, bfloat16 or int8"


@dataclass(frozen=True)
class Sizes:
    """What caches of both kinds are made with, and the checks of what they are given."""

    batch: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    rollback: int
    layout: LayoutName

    @staticmethod
    def of(
        batch: Any, num_kv_heads: Any, head_dim: Any, value_dim: Any, rollback: Any, layout: Any
    ) -> dict[str, Any]:
        is_swapped(layout)  # which checks it
        head_dim = count(head_dim, "head_dim", 1, MAX_DIM)
        return {
            "batch": count(batch, "batch", 0, MAX_ROWS),
            "num_kv_heads": count(num_kv_heads, "num_kv_heads", 1, MAX_ROWS),
            "head_dim": head_dim,
            "value_dim": head_dim if value_dim is None else count(value_dim, "value_dim", 0, MAX_DIM),
            "rollback": count(rollback, "rollback", 0, MAX_ROWS),
            "layout": layout,
        }

    def rows(self, key: Any, value: Any) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values to append, as ``(batch, K, T, dim)``."""
        keys = self._rows(key, "key", self.head_dim)
        values = self._rows(value, "value", self.value_dim)
        if values.shape[2] != keys.shape[2]:
            raise ValueError(
                f"key and value must have as many tokens, got {keys.shape[2]} and {values.shape[2]}"
            )
        return keys, values

    def _rows(self, rows: Any, name: str, dim: int) -> np.ndarray:
        array = host_numbers(rows, name)
        batch, heads = self.batch, self.num_kv_heads
        swapped = self.layout == "bshd"
        view = array.swapaxes(1, 2) if swapped and array.ndim == 4 else array
        if view.ndim != 4 or view.shape[:2] != (batch, heads) or view.shape[3] != dim:
            expected = f"({batch}, T, {heads}, {dim})" if swapped else f"({batch}, {heads}, T, {dim})"
            raise ValueError(f"{name} must have shape {expected}, got {array.shape}")
        return view

    def check_query(self, query: np.ndarray) -> None:
        if query.ndim != 4 or query.shape[0] != self.batch:
            axes = "(batch, H, L, D)" if self.layout == "bhsd" else "(batch, L, H, D)"
            raise ValueError(f"query must have shape {axes}, with batch={self.batch}, got {query.shape}")

    def counts(self, lengths: Any, key: Any, value: Any, T: int) -> np.ndarray:
        """How many of the T rows of each item are tokens."""
        counts = self._per_item(lengths, T)
        if (wrong := np.flatnonzero((counts < 0) | (counts > T))).size:
            raise ValueError(
                f"lengths must be in 0..T={T}, got {counts[wrong[0]]} for item {wrong[0]}; "
                f"key {np.shape(key)}, value {np.shape(value)}"
            )
        return counts

    def truncated(self, lengths: Any, present: np.ndarray) -> np.ndarray:
        """New lengths, none above the present ones."""
        new = self._per_item(lengths)
        if (wrong := np.flatnonzero((new < 0) | (new > present))).size:
            b = wrong[0]
            raise ValueError(f"lengths: item {b} has {present[b]} tokens, got {new[b]}")
        return new

    def chosen(self, items: Any) -> np.ndarray:
        """The numbers of some items."""
        chosen = integers(as_array(items, "items"), "items")
        if chosen.ndim != 1:
            raise ValueError(f"items must have shape (n,), got {chosen.shape}")
        if (wrong := chosen[(chosen < 0) | (chosen >= self.batch)]).size:
            raise ValueError(f"items must be in 0..{self.batch - 1}, got {wrong[0]}")
        return chosen

    def _per_item(self, lengths: Any, length: int = -1) -> np.ndarray:
        lead = (self.batch,)
        return np.broadcast_to(per_item(lengths, "lengths", lead, length), lead).astype(np.int64)


@dataclass(frozen=True)
class Settings(Sizes, PageShape):
    """What a `KVCache` was made with, checked."""

    window: int | None
    keep_first: int

    @classmethod
    def checked(
        cls,
        batch: Any,
        num_kv_heads: Any,
        head_dim: Any,
        value_dim: Any,
        dtype: Any,
        window: Any,
        keep_first: Any,
        rollback: Any,
        page_size: Any,
        layout: Any,
    ) -> Settings:
        """Those of a caller; raises where they are none."""
        sizes = cls.of(batch, num_kv_heads, head_dim, value_dim, rollback, layout)
        key_dtype, value_dtype = storages(dtype)
        settings = cls(
            **sizes,
            key_dtype=key_dtype,
            value_dtype=value_dtype,
            window=None if window is None else count(window, "window", 1, MAX_ROWS),
            keep_first=count(keep_first, "keep_first", 0, MAX_ROWS),
            page_size=PAGE_SIZE if page_size is None else count(page_size, "page_size", 1, MAX_ROWS),
        )
        if (rows := settings.num_kv_heads * settings.page_size) > MAX_ROWS:
            raise ValueError(f"num_kv_heads * page_size must be at most {MAX_ROWS}, got {rows}")
        return settings


class State(NamedTuple):
    """What a cache holds, each ``(batch,)`` int64."""

    lengths: np.ndarray
    greatest: np.ndarray  #: the greatest length that an item has had
    retained: np.ndarray  #: 0 where every row is held, else more than keep_first

    def held(self, item: int, keep_first: int) -> list[tuple[int, int]]:
        """The ranges of positions whose rows an item holds."""
        length, retained = int(self.lengths[item]), int(self.retained[item])
        return [(0, keep_first), (retained, length)] if retained else [(0, length)]


def storages(dtype: Any) -> tuple[np.dtype, np.dtype]:
    """The storage of keys and of values that `dtype` says; raises where it says none."""
    if isinstance(dtype, (tuple, list)):
        if len(dtype) != 2:
            raise ValueError(f"dtype must be one storage or a pair (key, value), got {dtype!r}")
        key, value = _storage(dtype[0]), _storage(dtype[1])
        if key != value and REAL not in (storage_of(key), storage_of(value)):
            raise ValueError(f"dtype: two different 16-bit types do not go together, got {key} and {value}")
        return key, value
    return (_storage(dtype),) * 2


def _storage(given: Any) -> np.dtype:
    if isinstance(given, str) and given == "bfloat16":
        try:
            from ml_dtypes import bfloat16
        except ImportError:
            raise ImportError('dtype="bfloat16" needs the package ml_dtypes: pip install ml_dtypes') from None
        return np.dtype(bfloat16)
    try:
        dtype = None if given is None else np.dtype(given).newbyteorder("=")
    except (TypeError, ValueError):
        dtype = None
    is_float = dtype is not None and dtype.kind == "f" and dtype.itemsize in (2, 4, 8)
    if dtype is None or not (is_float or dtype == np.int8 or storage_of(dtype) == BFLOAT16):
        raise TypeError(f"dtype must be {_STORAGES}, or a pair of them, got {given!r}")
    return dtype


def rounded_length(length: int) -> int:
    """A length rounded up to a multiple of an eighth of a power of two, and of 8.

    The prepared calls of a cache depend on it, and last until it changes.
    """
    step = max(8, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step
