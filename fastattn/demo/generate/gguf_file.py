"""A GGUF file: metadata by key and tensors by name. Every size is checked before anything is read by it.

Numbers are little-endian. A file is: ``GGUF``, the version, the number of tensors, the number of keys; each
key with its type and value; each tensor's name, sizes, type and offset; and, from the next multiple of the
alignment on, the tensors one after another, each from a multiple of the alignment. A string is its length
and UTF-8. An array is the type of its elements, their number, and the elements.

References
----------
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from fastattn.demo._decoding import Floats
from fastattn.demo._errors import DemoError
from fastattn.demo._files import open_file

T = TypeVar("T")

#: The types of values by their numbers: bools, strings and arrays; and as NumPy has them, bools as bytes.
BOOL, STRING, ARRAY = 7, 8, 9
NUMBERS = dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "u1")))
NUMBERS |= {10: "<u8", 11: "<i8", 12: "<f8"}

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_AXES = 4
#: No vocabulary, list of merges or text is larger. A file that says so is refused before it takes memory.
MAX_STRINGS, MAX_TEXT = 2**21, 2**26


class Tensor(NamedTuple):
    """Where a tensor is in a file."""

    kind: int  #: by which numbers are stored, of `gguf.GGMLQuantizationType`
    shape: tuple[int, ...]  #: rows before columns
    start: int  #: in bytes, from the beginning of the file
    stop: int


class GGUFFile:
    """A GGUF file whose every complaint names the file, the key, what is there and what was expected.

    Raises
    ------
    DemoError
        If the file cannot be read, is of another kind, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_file(path) as file:
            magic = file.read(4)
            if magic != b"GGUF":
                raise DemoError(f"{path} is not a GGUF file: it begins with {magic!r}")
            self._memory = np.memmap(file, np.uint8, "r")
        self._bytes = memoryview(self._memory.data)
        self._at = 4
        version = self._number(4)
        if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            raise DemoError(
                f"{path} is big-endian, and the demo reads little-endian files only: gguf-convert-endian, "
                "which comes with the package gguf, converts it"
            )
        if version not in VERSIONS:
            raise DemoError(f"{path} is of GGUF's version {version}, and the demo can do 2, 3 only")
        num_tensors, num_keys = self._number(8), self._number(8)
        self.values: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("a key")
            if key in self.values:
                self._fail(f"it has {key!r:.80} twice")
            self.values[key] = self._value(key)
        parts = self.get("split.count", int, _parts_in_name(path))
        if parts > 1:
            raise DemoError(
                f"{path} is one of {parts} parts of a model, and the demo reads whole ones only: "
                "llama-gguf-split --merge, of llama.cpp, joins them"
            )
        self.tensors = self._tensors(num_tensors)

    # ---- what it says

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The metadata under `key`, which must be of the type `kind`; an error where it is missing."""
        value: Any = self.values.get(key, default)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            self._mistake(key, kind.__name__)
        return value

    def array(self, key: str, kind: type[T], default: list[T] | None = None) -> list[T]:
        """The array under `key`, whose elements must be of the type `kind`; an error where it is missing."""
        value: Any = self.values.get(key, default)
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if not isinstance(value, list) or not all(type(element) is kind for element in value):
            self._mistake(key, f"an array of {kind.__name__}")
        return value

    def _mistake(self, key: str, expected: str) -> NoReturn:
        found = f"{self.values[key]!r:.60}" if key in self.values else "missing"
        raise DemoError(f"{self.path}: {key} is {found}, expected {expected}")

    def matrix(self, name: str) -> Floats:
        """One tensor as float32; its numbers are finite."""
        from gguf import GGMLQuantizationType, dequantize

        tensor = self.tensors[name]
        stored = self._memory[tensor.start : tensor.stop].reshape(*tensor.shape[:-1], -1)
        kind = GGMLQuantizationType(tensor.kind)
        try:
            with np.errstate(all="ignore"):  # what is not finite is told below
                values: Floats = np.ascontiguousarray(dequantize(stored, kind), np.float32)
        except NotImplementedError:
            raise DemoError(f"{self.path}: {name} is stored as {kind.name}, which gguf cannot read") from None
        if not (math.isfinite(values.min()) and math.isfinite(values.max())):
            self._fail(f"{name} has numbers that are not finite")
        return values

    # ---- reading on, never beyond the end

    def _fail(self, what: str) -> NoReturn:
        raise DemoError(f"{self.path} is damaged: {what}")

    def _take(self, size: int, what: str) -> memoryview:
        left = len(self._bytes) - self._at
        if size > left:
            self._fail(f"{what} takes {size} bytes, and it ends after {left}")
        self._at += size
        return self._bytes[self._at - size : self._at]

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size, "a number"), "little")

    def _string(self, what: str) -> str:
        size = self._number(8)
        if size > MAX_TEXT:
            self._fail(f"{what} has {size} bytes, expected {MAX_TEXT} at most")
        try:
            return str(self._take(size, what), "utf-8")
        except UnicodeDecodeError as error:
            self._fail(f"{what} is not UTF-8: byte 0x{error.object[error.start]:02x}")

    def _value(self, key: str) -> Any:
        """Of a key: an int, a float, a bool or a string, or an array of them."""
        kind = self._number(4)
        if kind == STRING:
            return self._string(f"{key!r:.80}")
        if kind != ARRAY:
            return self._numbers(kind, 1, key)[0].item()
        kind, count = self._number(4), self._number(8)
        if kind != STRING:
            return self._numbers(kind, count, key)
        if count > MAX_STRINGS:
            self._fail(f"{key!r:.80} has {count} strings, expected {MAX_STRINGS} at most")
        what = f"one of {count} strings of {key!r:.80}"
        return [self._string(what) for _ in range(count)]

    def _numbers(self, kind: int, count: int, key: str) -> np.ndarray:
        """Numbers or bools as they are in the file."""
        if kind not in NUMBERS:
            self._fail(f"{key!r:.80} is of the type {kind}, which is none, or cannot be in an array")
        dtype = np.dtype(NUMBERS[kind])
        numbers = np.frombuffer(self._take(count * dtype.itemsize, f"{key!r:.80}"), dtype)
        if kind == BOOL:
            if (numbers > 1).any():
                self._fail(f"{key!r:.80} is a bool other than 0 and 1")
            return numbers.view(np.bool_)
        return numbers

    def _tensors(self, count: int) -> dict[str, Tensor]:
        """The tensors' names, sizes and places: these must be in order, without gaps, as far as the end."""
        from gguf import GGML_QUANT_SIZES

        blocks = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
        places: dict[str, tuple[int, tuple[int, ...], int, int]] = {}
        alignment = self.get("general.alignment", int, DEFAULT_ALIGNMENT)
        if alignment < 1 or alignment & (alignment - 1):
            self._fail(f"general.alignment is {alignment}, expected a power of 2")
        end = 0
        for _ in range(count):
            name = self._string("the name of a tensor")
            if name in places:
                self._fail(f"it has the tensor {name!r:.80} twice")
            num_axes = self._number(4)
            if not 1 <= num_axes <= MAX_AXES:
                self._fail(f"{name!r:.80} has {num_axes} axes, expected 1 to {MAX_AXES}")
            shape = tuple(self._number(8) for _ in range(num_axes))[::-1]
            kind, offset = self._number(4), self._number(8)
            if kind not in blocks:
                self._fail(f"{name!r:.80} is stored as the type {kind}, which gguf does not know")
            block, nbytes = blocks[kind]
            if 0 in shape or shape[-1] % block:
                self._fail(f"{name!r:.80} has shape {shape}, in blocks of {block}")
            start = -(-end // alignment) * alignment
            if offset != start:
                self._fail(f"{name!r:.80} begins at {offset}, expected {start}, after the tensor before")
            end = start + math.prod(shape) // block * nbytes
            places[name] = (kind, shape, start, end)
        data = -(-self._at // alignment) * alignment
        if not end <= len(self._bytes) - data < end + alignment:
            self._fail(f"its tensors take {end} bytes, and it has {len(self._bytes) - data} for them")
        return {
            name: Tensor(kind, shape, data + start, data + stop)
            for name, (kind, shape, start, stop) in places.items()
        }


def _parts_in_name(path: Path) -> int:
    """How many parts of a model there are, by the name of one: ``NAME-00001-of-00003.gguf``."""
    parts = re.search(r"-\d{5}-of-(\d{5})\.gguf$", path.name)
    return int(parts[1]) if parts else 1
