"""A `KVCache` as a file, in the safetensors layout: the header's length, the header in JSON, the numbers.

The header holds the settings, the lengths, and checksums of each tensor and of itself. `read` takes a file
only if its header is byte for byte what `write` gives such a cache, and its length is what the header says.
So each field is checked before it decides how much memory is allocated.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from hashlib import blake2b
from itertools import chain
from math import prod
from stat import S_ISFIFO
from typing import IO, NamedTuple

import numpy as np

from fastattn._cache.pages import NO_PAGE, PART_NAMES, PagePool, PageShape
from fastattn._cache.state import Settings, State, rounded_length
from fastattn._call.problem import MAX_ROWS

_FORMAT = "fastattn.KVCache 1"
_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8"}
_CHECKSUM = 32  # bytes
_ALIGNMENT = 64  # of the first tensor
_MAX_HEADER = 10**8  # bytes, as the package safetensors has it
_SPARSE = 2**24  # most entries without a page in the tables of a loaded cache: 256 MB

_NUMBERS = ("batch", "num_kv_heads", "head_dim", "value_dim", "window", "keep_first", "rollback", "page_size")


class _Damaged(ValueError):
    """What is wrong with a file."""


class _Tensor(NamedTuple):
    part: int
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  #: from the end of the header
    stop: int


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
    tensors = _tensors(settings, pages)
    checksums = {tensor.name: "0" * 2 * _CHECKSUM for tensor in tensors}
    path = os.fsdecode(path)
    temporary = f"{path}.{secrets.token_hex(8)}"
    try:
        with open(temporary, "xb") as file:
            file.write(_header(settings, state, tensors, checksums))
            for tensor in tensors:
                digest = blake2b(digest_size=_CHECKSUM)
                for page in _pages(settings, state, pool, ids, entries, tensor):
                    digest.update(page)
                    file.write(page)
                checksums[tensor.name] = digest.hexdigest()
            file.seek(0)
            file.write(_header(settings, state, tensors, checksums))  # of the same length
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise


def read(path: str | os.PathLike[str], mmap: bool) -> tuple[Settings, State, PagePool, np.ndarray]:
    """What `KVCache.load` makes a cache of."""
    if S_ISFIFO(os.stat(path).st_mode):  # opening one waits for who writes it
        raise ValueError(f"{os.fsdecode(path)} is no file of a KVCache: it is a pipe")
    with open(path, "rb") as file:
        try:
            return _read(file, mmap)
        except _Damaged as error:
            raise ValueError(f"{os.fsdecode(path)} is no file of a KVCache, or damaged: {error}") from None


def _read(file: IO[bytes], mmap: bool) -> tuple[Settings, State, PagePool, np.ndarray]:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(_bytes(file, 8), "little")
    if length > min(size - 8, _MAX_HEADER):
        raise _Damaged(f"a header of {length} bytes in a file of {size}")
    header = _bytes(file, length)
    settings, state, checksums = _parse(header)
    entries = [_entries(settings, state, item) for item in range(settings.batch)]
    pages = sum(map(len, chain(*entries)))
    tensors = _tensors(settings, pages)
    if set(checksums) != {tensor.name for tensor in tensors}:
        raise _Damaged("the checksums are not those of its tensors")
    start = 8 + length
    if start + tensors[-1].stop != size:
        raise _Damaged(f"{size} bytes, and its header says {start + tensors[-1].stop}")
    if _header(settings, state, tensors, checksums)[8:] != header:
        raise _Damaged("its header is not what its fields and their checksum say")
    if _empty_entries(settings, state, pages) > _SPARSE:
        raise _Damaged(
            f"{pages} pages for a batch of {settings.batch} with up to {state.lengths.max()} tokens"
        )
    ids = np.full((settings.batch, _width(settings, state)), NO_PAGE, np.int64)
    number = NO_PAGE + 1
    for item, of_item in enumerate(entries):
        for run in of_item:
            ids[item, run.start : run.stop] = np.arange(number, number + len(run))
            number += len(run)

    pool = PagePool(settings)
    slab: list[np.ndarray | None] = [None] * len(PART_NAMES)
    if mmap:
        # The whole file: a tensor without bytes cannot be mapped.
        memory = np.memmap(file, np.uint8, "r")
        for tensor in tensors:
            part = memory[start + tensor.start : start + tensor.stop]
            slab[tensor.part] = np.asarray(part).view(tensor.dtype).reshape(tensor.shape)
    else:
        for tensor in tensors:
            part = np.empty(tensor.stop - tensor.start, np.uint8)
            if file.readinto(part.data) != len(part):  # type: ignore[attr-defined]  # a buffered reader has it
                raise _Damaged("it ends early")
            if blake2b(part.data, digest_size=_CHECKSUM).hexdigest() != checksums[tensor.name]:
                raise _Damaged(f"{tensor.name} do not have the checksum in its header")
            slab[tensor.part] = part.view(tensor.dtype).reshape(tensor.shape)
    if pages:
        pool.add(tuple(slab), forever=mmap)
    return settings, state, pool, ids


def _bytes(file: IO[bytes], n: int) -> bytes:
    content = file.read(n)
    if len(content) != n:
        raise _Damaged("it ends early")
    return content


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


def _tensors(shape: PageShape, pages: int) -> list[_Tensor]:
    """The tensors of a file with so many pages: the widest numbers first, so that all are aligned."""
    parts = [(number, *part) for number, part in enumerate(shape.parts) if part is not None]
    tensors, at = [], 0
    for number, page, dtype in sorted(parts, key=lambda part: (-part[2].itemsize, part[0])):
        nbytes = pages * prod(page) * dtype.itemsize
        tensors.append(_Tensor(number, PART_NAMES[number], dtype, (pages, *page), at, at + nbytes))
        at += nbytes
    return tensors


def _pages(
    settings: Settings,
    state: State,
    pool: PagePool,
    ids: np.ndarray,
    entries: list[list[range]],
    tensor: _Tensor,
) -> Iterator[memoryview]:
    """The bytes of a tensor, a page at a time, with zeros where no row is held."""
    size = settings.page_size
    for item, of_item in enumerate(entries):
        held = state.held(item, settings.keep_first)
        for entry in chain(*of_item):
            stored = pool.page(int(ids[item, entry]))[tensor.part]
            page = np.zeros(tensor.shape[1:], tensor.dtype)
            for start, stop in held:
                rows = slice(max(start - entry * size, 0), max(min(stop - entry * size, size), 0))
                if stored is not None:
                    page[:, rows] = stored[:, rows]
            yield page.view(np.uint8).reshape(-1).data


# The header ---------------------------------------------------------------------------------------


def _header(settings: Settings, state: State, tensors: list[_Tensor], checksums: dict[str, str]) -> bytes:
    """The length of the header, and the header."""
    numbers = {name: getattr(settings, name) for name in _NUMBERS}
    metadata = {
        "format": _FORMAT,
        "settings": json.dumps(
            numbers
            | {"dtype": [settings.key_dtype.name, settings.value_dtype.name], "layout": settings.layout}
        ),
        "state": json.dumps({name: array.tolist() for name, array in state._asdict().items()}),
        "checksums": json.dumps(checksums),
        "header": "",
    }
    described = {
        tensor.name: {
            "dtype": _DTYPES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [tensor.start, tensor.stop],
        }
        for tensor in tensors
    }
    blank = json.dumps({"__metadata__": metadata} | described)
    metadata["header"] = blake2b(blank.encode(), digest_size=_CHECKSUM).hexdigest()
    text = json.dumps({"__metadata__": metadata} | described).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _parse(header: bytes) -> tuple[Settings, State, dict[str, str]]:
    """Settings, state and checksums that a header gives, each in its range.

    What else is wrong shows where the header is compared with what `write` gives such a cache.
    """
    try:
        metadata = json.loads(header)["__metadata__"]
        if metadata["format"] != _FORMAT:
            raise ValueError(f"its format is not {_FORMAT!r}")
        given, of_items, checksums = (
            json.loads(metadata[name]) for name in ("settings", "state", "checksums")
        )
        if not all(name in _DTYPES for name in given["dtype"]):
            raise ValueError(f"a cache has no dtype {given['dtype']}")
        settings = Settings.checked(**given)
        state = State(*(np.array(of_items[name], np.int64) for name in State._fields))
        if not all(isinstance(x, str) and len(x) == 2 * _CHECKSUM for x in checksums.values()):
            raise ValueError("a checksum is none")
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise _Damaged(f"its header is none of a cache: {error!r}") from None
    lengths, greatest, retained = state
    if not all(x.shape == (settings.batch,) and ((x >= 0) & (x <= MAX_ROWS)).all() for x in state):
        raise _Damaged("its lengths are not numbers, one for each item")
    longest = int(lengths.max(initial=0))
    if (lengths > greatest).any() or settings.batch * settings.num_kv_heads * longest > MAX_ROWS:
        raise _Damaged("lengths that no cache has")
    window = settings.window
    if retained.any() and window is None:
        raise _Damaged("rows were dropped, and there is no window")
    if window is not None:
        moved = retained > 0
        possible = (retained > settings.keep_first) & (retained + window <= lengths)
        possible &= retained + window + settings.rollback <= greatest
        if (moved & ~possible).any():
            raise _Damaged("rows were dropped that no window drops")
    return settings, state, checksums
