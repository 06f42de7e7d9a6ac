"""A `KVCache` as a file: which pages, in which order, and what its header may say."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._cache import container
from fastattn._cache.container import Content, Damaged, Tensor, tensors_of
from fastattn._cache.pages import NO_PAGE, PART_NAMES, PagePool, PageShape
from fastattn._cache.state import Settings, State, rounded_length
from fastattn._call.problem import MAX_ROWS

if TYPE_CHECKING:
    import os

_SPARSE = 2**24  # most entries without a page in the tables of a loaded cache: 256 MB

_NUMBERS = ("batch", "num_kv_heads", "head_dim", "value_dim", "window", "keep_first", "rollback", "page_size")


def write(
    path: str | os.PathLike[str], settings: Settings, state: State, pool: PagePool, ids: np.ndarray
) -> None:
    """`KVCache.save`."""
    entries = [_entries(settings, state, item) for item in range(settings.batch)]
    pages = sum(map(len, chain(*entries)))
    if _empty_entries(settings, state, pages) > _SPARSE:
        raise ValueError(
            f"page tables of {settings.batch} items with up to {state.lengths.max()} tokens have more than "
            f"{_SPARSE} entries without a page, which load() would refuse: select() and save the long items "
            "apart"
        )
    content = _content(settings, state, _tensors(settings, pages))
    container.write(path, content, lambda tensor: _pages(settings, state, pool, ids, entries, tensor))


def read(path: str | os.PathLike[str], mmap: bool) -> tuple[Settings, State, PagePool, np.ndarray]:
    """What `KVCache.load` makes a cache of."""
    (settings, state, entries), arrays = container.read(path, "KVCache", _parse, mmap)
    ids = np.full((settings.batch, _width(settings, state)), NO_PAGE, np.int64)
    number = NO_PAGE + 1
    for item, of_item in enumerate(entries):
        for run in of_item:
            ids[item, run.start : run.stop] = np.arange(number, number + len(run))
            number += len(run)
    pool = PagePool(settings)
    if number > NO_PAGE + 1:
        pool.add(tuple(arrays.get(name) for name in PART_NAMES), forever=mmap)
    return settings, state, pool, ids


# Which pages, in which order ----------------------------------------------------------------------


def _entries(settings: Settings, state: State, item: int) -> list[range]:
    """The entries of an item's table that have a page."""
    size, runs, after = settings.page_size, [], 0
    for start, stop in state.held(item, settings.keep_first):
        runs.append(range(max(start // size, after), -(-stop // size)))
        after = runs[-1].stop
    return runs


def _width(settings: Settings, state: State) -> int:
    """Entries of the page table of each item."""
    return -(-rounded_length(int(state.lengths.max(initial=0))) // settings.page_size)


def _empty_entries(settings: Settings, state: State, pages: int) -> int:
    return settings.batch * _width(settings, state) - pages


def _tensors(shape: PageShape, pages: int) -> list[Tensor]:
    """The tensors of a file with so many pages."""
    parts = zip(PART_NAMES, shape.parts, strict=True)
    return tensors_of((name, part[1], (pages, *part[0])) for name, part in parts if part is not None)


def _pages(
    settings: Settings,
    state: State,
    pool: PagePool,
    ids: np.ndarray,
    entries: list[list[range]],
    tensor: Tensor,
) -> Iterator[np.ndarray]:
    """A tensor, a page at a time, with zeros where no row is held."""
    size, part = settings.page_size, PART_NAMES.index(tensor.name)
    for item, of_item in enumerate(entries):
        held = state.held(item, settings.keep_first)
        for entry in chain(*of_item):
            stored = pool.page(int(ids[item, entry]))[part]
            page = np.zeros(tensor.shape[1:], tensor.dtype)
            for start, stop in held:
                rows = slice(max(start - entry * size, 0), max(min(stop - entry * size, size), 0))
                if stored is not None:
                    page[:, rows] = stored[:, rows]
            yield page


# The header ---------------------------------------------------------------------------------------


def _content(settings: Settings, state: State, tensors: list[Tensor]) -> Content:
    numbers = {name: getattr(settings, name) for name in _NUMBERS}
    others = {"dtype": [settings.key_dtype.name, settings.value_dtype.name], "layout": settings.layout}
    lists = {name: array.tolist() for name, array in state._asdict().items()}
    return Content("KVCache", numbers | others, lists, tensors)


def _parse(given: Any, state_given: Any) -> tuple[Content, tuple[Settings, State, list[list[range]]]]:
    """Settings, state and entries of tables that a header gives, each in its range."""
    if not all(name in container.DTYPES for name in given["dtype"]):
        raise ValueError(f"a cache has no dtype {given['dtype']}")
    settings = Settings.checked(**given)
    state = State(*container.of_items(state_given, State._fields, settings.batch))
    lengths, greatest, retained = state
    longest = int(lengths.max(initial=0))
    if (lengths > greatest).any() or settings.batch * settings.num_kv_heads * longest > MAX_ROWS:
        raise Damaged("lengths that no cache has")
    window = settings.window
    if retained.any() and window is None:
        raise Damaged("rows were dropped, and there is no window")
    if window is not None:
        moved = retained > 0
        possible = (retained > settings.keep_first) & (retained + window <= lengths)
        possible &= retained + window + settings.rollback <= greatest
        if (moved & ~possible).any():
            raise Damaged("rows were dropped that no window drops")
    entries = [_entries(settings, state, item) for item in range(settings.batch)]
    pages = sum(map(len, chain(*entries)))
    if _empty_entries(settings, state, pages) > _SPARSE:
        raise Damaged(f"{pages} pages for a batch of {settings.batch} with up to {longest} tokens")
    return _content(settings, state, _tensors(settings, pages)), (settings, state, entries)
