"""What a `KVCache` is made with and what it holds, checked: of a caller's arguments, or of a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastattn._cache.pages import PageShape
from fastattn._call.arguments import count, is_swapped
from fastattn._call.problem import MAX_DIM, MAX_ROWS
from fastattn._call.storage import BFLOAT16, REAL, storage_of

if TYPE_CHECKING:
    from fastattn._call.options import LayoutName

PAGE_SIZE = 256  #: by default: one key tile of the kernels, so that no tile crosses from page to page
_STORAGES = "float64, float32, float16, bfloat16 or int8"


@dataclass(frozen=True)
class Settings(PageShape):
    """What a cache was made with, checked."""

    batch: int
    window: int | None
    keep_first: int
    rollback: int
    layout: LayoutName

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
        is_swapped(layout)  # which checks it
        head_dim = count(head_dim, "head_dim", 1, MAX_DIM)
        key_dtype, value_dtype = storages(dtype)
        settings = cls(
            batch=count(batch, "batch", 0, MAX_ROWS),
            num_kv_heads=count(num_kv_heads, "num_kv_heads", 1, MAX_ROWS),
            head_dim=head_dim,
            value_dim=head_dim if value_dim is None else count(value_dim, "value_dim", 0, MAX_DIM),
            key_dtype=key_dtype,
            value_dtype=value_dtype,
            window=None if window is None else count(window, "window", 1, MAX_ROWS),
            keep_first=count(keep_first, "keep_first", 0, MAX_ROWS),
            rollback=count(rollback, "rollback", 0, MAX_ROWS),
            page_size=PAGE_SIZE if page_size is None else count(page_size, "page_size", 1, MAX_ROWS),
            layout=layout,
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
