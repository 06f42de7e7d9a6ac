"""A file in the safetensors layout: the header's length, the header in JSON, the numbers.

The header holds settings, a state, and checksums of each tensor and of itself. `read` takes a file only if
its header is byte for byte what `write` gives such a content, and its length is what the header says. So each
field is checked before it decides how much memory is allocated.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterable
from hashlib import blake2b
from math import prod
from stat import S_ISFIFO
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np

from fastattn._call.problem import MAX_ROWS

DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8"}
_CHECKSUM = 32  # bytes
_ALIGNMENT = 64  # of the first tensor
_MAX_HEADER = 10**8  # bytes, as the package safetensors has it

Made = TypeVar("Made")


class Damaged(ValueError):
    """What is wrong with a file."""


class Tensor(NamedTuple):
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  #: from the end of the header
    stop: int


def tensors_of(parts: Iterable[tuple[str, np.dtype, tuple[int, ...]]]) -> list[Tensor]:
    """One after another, the widest numbers first, so that all are aligned."""
    tensors, at = [], 0
    for name, dtype, shape in sorted(parts, key=lambda part: -part[1].itemsize):
        nbytes = prod(shape) * dtype.itemsize
        tensors.append(Tensor(name, dtype, shape, at, at + nbytes))
        at += nbytes
    return tensors


class Content(NamedTuple):
    """What the header of a file says, but for checksums."""

    kind: str  #: the name of the class
    settings: dict[str, Any]
    state: dict[str, Any]
    tensors: list[Tensor]

    def header(self, checksums: dict[str, str]) -> bytes:
        """The length of the header, and the header."""
        metadata = {
            "format": f"fastattn.{self.kind} 1",
            "settings": json.dumps(self.settings),
            "state": json.dumps(self.state),
            "checksums": json.dumps(checksums),
            "header": "",
        }
        described = {
            tensor.name: {
                "dtype": DTYPES[tensor.dtype.name],
                "shape": list(tensor.shape),
                "data_offsets": [tensor.start, tensor.stop],
            }
            for tensor in self.tensors
        }
        blank = json.dumps({"__metadata__": metadata} | described)
        metadata["header"] = blake2b(blank.encode(), digest_size=_CHECKSUM).hexdigest()
        text = json.dumps({"__metadata__": metadata} | described).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


def write(
    path: str | os.PathLike[str], content: Content, blocks: Callable[[Tensor], Iterable[np.ndarray]]
) -> None:
    """Writes a file, whose tensors are `blocks` one after another, each contiguous."""
    checksums = {tensor.name: "0" * 2 * _CHECKSUM for tensor in content.tensors}
    path = os.fsdecode(path)
    temporary = f"{path}.{secrets.token_hex(8)}"
    try:
        with open(temporary, "xb") as file:
            file.write(content.header(checksums))
            for tensor in content.tensors:
                digest = blake2b(digest_size=_CHECKSUM)
                for block in blocks(tensor):
                    octets = block.reshape(-1).view(np.uint8).data
                    digest.update(octets)
                    file.write(octets)
                checksums[tensor.name] = digest.hexdigest()
            file.seek(0)
            file.write(content.header(checksums))  # of the same length
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise


def read(
    path: str | os.PathLike[str], kind: str, parse: Callable[[Any, Any], tuple[Content, Made]], mmap: bool
) -> tuple[Made, dict[str, np.ndarray]]:
    """What `parse` makes of the settings and the state of a file's header, and the tensors.

    `parse` checks each by itself. What else is wrong shows where the header is compared with what `write`
    gives such a content.
    """
    if S_ISFIFO(os.stat(path).st_mode):  # opening one waits for who writes it
        raise ValueError(f"{os.fsdecode(path)} is no file of a {kind}: it is a pipe")
    with open(path, "rb") as file:
        try:
            return _read(file, kind, parse, mmap)
        except Damaged as error:
            raise ValueError(f"{os.fsdecode(path)} is no file of a {kind}, or damaged: {error}") from None


def _read(
    file: IO[bytes], kind: str, parse: Callable[[Any, Any], tuple[Content, Made]], mmap: bool
) -> tuple[Made, dict[str, np.ndarray]]:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(_bytes(file, 8), "little")
    if length > min(size - 8, _MAX_HEADER):
        raise Damaged(f"a header of {length} bytes in a file of {size}")
    header = _bytes(file, length)
    try:
        metadata = json.loads(header)["__metadata__"]
        if metadata["format"] != f"fastattn.{kind} 1":
            raise ValueError(f"its format is not 'fastattn.{kind} 1'")
        settings, state, checksums = (
            json.loads(metadata[name]) for name in ("settings", "state", "checksums")
        )
        if not all(isinstance(x, str) and len(x) == 2 * _CHECKSUM for x in checksums.values()):
            raise ValueError("a checksum is none")
        content, made = parse(settings, state)
    except Damaged:
        raise
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise Damaged(f"its header is none of a {kind}: {error!r}") from None
    tensors, start = content.tensors, 8 + length
    if set(checksums) != {tensor.name for tensor in tensors}:
        raise Damaged("the checksums are not those of its tensors")
    if start + tensors[-1].stop != size:
        raise Damaged(f"{size} bytes, and its header says {start + tensors[-1].stop}")
    if content.header(checksums)[8:] != header:
        raise Damaged("its header is not what its fields and their checksum say")
    # The whole file: a tensor without bytes cannot be mapped.
    memory = np.memmap(file, np.uint8, "r") if mmap else None
    arrays = {}
    for tensor in tensors:
        if memory is not None:
            part = np.asarray(memory[start + tensor.start : start + tensor.stop])
        else:
            part = np.empty(tensor.stop - tensor.start, np.uint8)
            if file.readinto(part.data) != len(part):  # type: ignore[attr-defined]  # a buffered reader has it
                raise Damaged("it ends early")
            if blake2b(part.data, digest_size=_CHECKSUM).hexdigest() != checksums[tensor.name]:
                raise Damaged(f"{tensor.name} do not have the checksum in its header")
        arrays[tensor.name] = part.view(tensor.dtype).reshape(tensor.shape)
    return made, arrays


def of_items(given: Any, names: Iterable[str], batch: int) -> list[np.ndarray]:
    """The int64 arrays ``(batch,)`` of a state that a header gives."""
    arrays = [np.array(given[name], np.int64) for name in names]
    if not all(x.shape == (batch,) and ((x >= 0) & (x <= MAX_ROWS)).all() for x in arrays):
        raise Damaged("its lengths are not numbers, one for each item")
    return arrays


def _bytes(file: IO[bytes], n: int) -> bytes:
    content = file.read(n)
    if len(content) != n:
        raise Damaged("it ends early")
    return content
