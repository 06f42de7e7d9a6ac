"""GGUF files written byte by byte, by the format's description alone: what they say need not be so."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import gguf
import numpy as np

from tests.demo_generate_models import SIZES, byte_level_vocabulary, random_tensors, sentence_piece_vocabulary

F32, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0
CODES = {"I": 4, "i": 5, "f": 6, "?": 7, "Q": 10}
STRING, ARRAY = 8, 9


class Field(NamedTuple):
    """A number in a file."""

    at: int
    code: str  #: of `struct`
    means: str  #: "length", "count", "type", "axis", "offset", "value", "element" or "version"


class Writer:
    """A GGUF file, byte by byte."""

    def __init__(self, *, order: str = "<", version: int = 3) -> None:
        self.order = order
        self.content = bytearray(b"GGUF")
        self.fields: list[Field] = []
        self.strings: list[tuple[int, int]] = []
        self.number("I", version, "version")

    def number(self, code: str, value: Any, means: str) -> None:
        self.fields.append(Field(len(self.content), code, means))
        self.content += struct.pack(self.order + code, value)

    def string(self, text: str | bytes) -> None:
        raw = text if isinstance(text, bytes) else text.encode()
        self.number("Q", len(raw), "length")
        self.strings.append((len(self.content), len(raw)))
        self.content += raw

    def value(self, value: Any) -> None:
        match value:
            case str():
                self.number("I", STRING, "type")
                self.string(value)
            case list():
                self.number("I", ARRAY, "type")
                code = code_of(value[0]) if value else "I"
                self.number("I", STRING if code == "s" else CODES[code], "type")
                self.number("Q", len(value), "count")
                for element in value:
                    if code == "s":
                        self.string(element)
                    else:
                        self.number(code, element, "element")
            case _:
                self.number("I", CODES[code_of(value)], "type")
                self.number(code_of(value), value, "value")

    def file(
        self,
        values: Mapping[str, Any],
        tensors: Mapping[str, np.ndarray],
        stored: gguf.GGMLQuantizationType = F32,
        alignment: int = 32,
    ) -> bytearray:
        """All of it; matrices of tensors are stored as `stored`."""
        self.number("Q", len(tensors), "count")
        self.number("Q", len(values), "count")
        for key, value in values.items():
            self.string(key)
            self.value(value)
        data = bytearray()
        for name, tensor in tensors.items():
            kind = F32 if tensor.ndim == 1 else stored
            self.string(name)
            self.number("I", tensor.ndim, "count")
            for size in reversed(tensor.shape):
                self.number("Q", size, "axis")
            self.number("I", int(kind), "type")
            self.number("Q", len(data), "offset")
            data += gguf.quantize(tensor, kind).astype(f"{self.order}f4" if kind == F32 else "u1").tobytes()
            data += bytes(-len(data) % alignment)
        self.content += bytes(-len(self.content) % alignment)
        self.weights_at = len(self.content)
        self.names = set(tensors) | obeyed(values)
        self.content += data
        return self.content


def code_of(value: Any) -> str:
    if type(value) is int:
        return "i" if value < 0 else "I" if value < 2**32 else "Q"
    return {bool: "?", float: "f", str: "s"}[type(value)]


def obeyed(keys: Iterable[str]) -> set[str]:
    """Those of `keys` that say something about what is computed."""
    return {key for key in keys if not key.startswith("general.")}


#: Files that nothing is wrong with: text as bytes or as pieces, and weights as bytes with scales.
KINDS = ("bytes", "pieces", "quantised")


def contents(kind: str = "bytes") -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The metadata and the tensors of a file, of one of `KINDS`."""
    vocabulary = sentence_piece_vocabulary() if kind == "pieces" else byte_level_vocabulary()
    values: dict[str, Any] = {"general.architecture": "llama", "general.name": "tiny", "general.file_type": 0}
    values |= {f"llama.{key}": value for key, value in SIZES.items()}
    for key, value in vocabulary.items():
        values[f"tokenizer.{'' if key == 'chat_template' else 'ggml.'}{key}"] = value
    return values, random_tensors(SIZES, len(vocabulary["tokens"]), tied=kind != "quantised")


def whole(kind: str = "bytes") -> Writer:
    writer = Writer()
    writer.file(*contents(kind), Q8_0 if kind == "quantised" else F32)
    return writer
