"""Damaged GGUF files: what the demo of generation does with each, in a process of its own with limits.

A file is written here byte by byte, and where each of its numbers is, is noted: so any of them can be made
to lie. Each case goes through the command's ``main`` in a fork, with limits of time and memory.

``python -m tests.demo_generate_damage SEED COUNT`` prints what became of them.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import gguf
import numpy as np

from tests.demo_generate_models import (
    SIZES,
    byte_level_vocabulary,
    random_tensors,
    sentence_piece_vocabulary,
)

SECONDS, MEMORY = 5, 2 * 10**9

F32, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0
CODES = {"I": 4, "f": 6, "?": 7}
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
    return {bool: "?", int: "I", float: "f", str: "s"}[type(value)]


def whole(kind: str = "bytes", **options: Any) -> Writer:
    """A file that nothing is wrong with, of one of `KINDS`; `options` of `Writer`."""
    vocabulary = sentence_piece_vocabulary() if kind == "pieces" else byte_level_vocabulary()
    values: dict[str, Any] = {"general.architecture": "llama", "general.name": "tiny", "general.file_type": 0}
    values |= {f"llama.{key}": value for key, value in SIZES.items()}
    for key, value in vocabulary.items():
        values[f"tokenizer.{'' if key == 'chat_template' else 'ggml.'}{key}"] = value
    writer = Writer(**options)
    tensors = random_tensors(SIZES, len(vocabulary["tokens"]), tied=kind != "quantised")
    writer.file(values, tensors, Q8_0 if kind == "quantised" else F32)
    return writer


KINDS = ("bytes", "pieces", "quantised")

# ---- damages


def flip(rng: np.random.Generator, writer: Writer) -> bytearray:
    """One to four bits, half of the times before the weights."""
    content = writer.content
    stop = writer.weights_at if rng.random() < 0.5 else len(content)
    for at in rng.integers(stop, size=rng.integers(1, 5)):
        content[at] ^= 1 << int(rng.integers(8))
    return content


def cut(rng: np.random.Generator, writer: Writer) -> bytearray:
    stop = writer.weights_at if rng.random() < 0.5 else len(writer.content)
    return writer.content[: int(rng.integers(stop))]


def lie(rng: np.random.Generator, writer: Writer) -> bytearray:
    """One number that is not a weight, to another, often a very large one; each kind is as likely."""
    content = writer.content
    means = str(rng.choice(sorted({field.means for field in writer.fields})))
    some = [field for field in writer.fields if field.means == means]
    at, code, _ = some[int(rng.integers(len(some)))]
    (value,) = struct.unpack_from(f"<{code}", content, at)
    if code == "f":
        lies = [np.nan, np.inf, -np.inf, 0.0, -1.0, 1e-30, 1e30, -value]
    elif code == "?":
        content[at] = int(rng.integers(2, 256))
        return content
    else:
        bits = 8 * struct.calcsize(code)
        powers = [2**n for n in (16, 20, 26, 31, 40, 61)]
        lies = [0, 1, value - 1, value + 1, 2 * value, *powers, 2**bits - 1]
        lies = [number for number in lies if 0 <= number < 2**bits]
    struct.pack_into(f"<{code}", content, at, lies[int(rng.integers(len(lies)))])
    return content


def shift(rng: np.random.Generator, writer: Writer) -> bytearray:
    """Bytes lost, doubled or put in between."""
    content = writer.content
    start = int(rng.integers(writer.weights_at if rng.random() < 0.5 else len(content)))
    stop = start + int(rng.integers(1, 100))
    between = [b"", bytes(content[start:stop]) * 2, rng.bytes(stop - start) + bytes(content[start:stop])]
    return content[:start] + between[int(rng.integers(3))] + content[stop:]


def overwrite(rng: np.random.Generator, writer: Writer) -> bytearray:
    """A run of bytes: zeros, ones or noise."""
    content = writer.content
    start = int(rng.integers(writer.weights_at if rng.random() < 0.5 else len(content)))
    size = min(int(rng.integers(1, 5000)), len(content) - start)
    content[start : start + size] = [bytes(size), b"\xff" * size, rng.bytes(size)][int(rng.integers(3))]
    return content


def misspell(rng: np.random.Generator, writer: Writer) -> bytearray:
    """A byte of a string that is no UTF-8, or that commands a terminal, or ends a line."""
    content = writer.content
    some = [(at, size) for at, size in writer.strings if size]
    at, size = some[int(rng.integers(len(some) if rng.random() < 0.5 else 60))]
    content[at + int(rng.integers(size))] = b"\xff\xc0\x80\x1b\x07\n\r\x00"[int(rng.integers(8))]
    return content


def spoil(rng: np.random.Generator, writer: Writer) -> bytearray:
    """A weight that is not finite, or so large that what is computed is not."""
    content = writer.content
    at = writer.weights_at + 4 * int(rng.integers((len(content) - writer.weights_at) // 4))
    value = [np.nan, np.inf, -np.inf, 3e38, -1e30, 1e20][int(rng.integers(6))]
    struct.pack_into("<f", content, at, np.float32(value))
    return content


DAMAGES: tuple[Callable[[np.random.Generator, Writer], bytearray], ...] = (
    flip,
    cut,
    lie,
    shift,
    overwrite,
    misspell,
    spoil,
)


class Damaged(NamedTuple):
    what: str
    content: bytearray
    names: set[str]  #: of the tensors, and of the keys that count, before


def damaged(seed: int) -> Damaged:
    rng = np.random.default_rng(seed)
    damage, kind = DAMAGES[int(rng.integers(len(DAMAGES)))], KINDS[int(rng.integers(len(KINDS)))]
    writer = whole(kind)
    return Damaged(f"{damage.__name__} {kind}", damage(rng, writer), writer.names)


# ---- what the demo does with it


class Outcome(NamedTuple):
    status: int  #: the exit status; the negative number of the signal that ended the process
    out: str
    err: str
    seconds: float
    nbytes: int  #: the most memory that was used


def in_a_fork(work: Callable[[], int]) -> Outcome:
    """What `work` did, in a copy of this process with limits of time and memory."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = perf_counter()
        child = os.fork()
        if child == 0:
            status = 70
            try:
                for number, file in ((1, out), (2, err)):
                    os.dup2(file.fileno(), number)
                sys.stdout = os.fdopen(1, "w", encoding="utf-8")
                sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace")
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_REAL, SECONDS)
                used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY,) * 2)
                status = work()
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, waited, usage = os.wait4(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return Outcome(
            os.waitstatus_to_exitcode(waited), *texts, perf_counter() - start, 1024 * usage.ru_maxrss
        )


def run(path: Path) -> Outcome:
    from fastattn.demo.generate.cli import main

    return in_a_fork(lambda: main(["--model", str(path), "--prompt", "the end", "--max-tokens", "2"]))


def mistake(path: Path, names: set[str], outcome: Outcome) -> str | None:
    """What is wrong with an outcome.

    Right is a message of one line that can be printed and the status 2. The status 0 is right as well where
    the damaged file is one that nothing is wrong with, but of other contents: another library reads it, it
    has every key and every tensor that it had, and the demo reads the same values and finite numbers.
    """
    status, out, err, seconds, nbytes = outcome
    if seconds > SECONDS or nbytes > MEMORY:
        return f"took {seconds:.1f} s, {nbytes / 1e9:.1f} GB"
    if not all(c.isprintable() or c in "\n\t" for c in out + err):
        return f"prints {out!r} {err!r}"
    if status == 2:
        one_line = err.count("\n") == 1 and err.startswith("fastattn demo: ") and len(err) < 1000
        return None if one_line else f"says {err!r}"
    return f"status {status}: {err[-600:]}" if status or err else difference(path, names)


def difference(path: Path, names: set[str]) -> str | None:
    """Between what the demo and the package gguf read; or to the keys and tensors of the whole file."""
    from fastattn.demo.generate.gguf_file import GGUFFile

    file, reader = GGUFFile(path), gguf.GGUFReader(path)
    expected = {name: field.contents() for name, field in reader.fields.items() if name[:5] != "GGUF."}
    found = {key: it.tolist() if isinstance(it, np.ndarray) else it for key, it in file.values.items()}
    if repr(found) != repr(expected):
        return "other metadata than gguf reads"
    tensors = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    if any(not np.array_equal(file.matrix(name), tensor) for name, tensor in tensors.items()):
        return "other weights than gguf reads"
    if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
        return "weights that are not finite"
    if set(tensors) | obeyed(found) != names:
        return "other keys or tensors than the whole file has"
    return None


def obeyed(keys: Iterable[str]) -> set[str]:
    """Those of `keys` that say something about what is computed."""
    return {key for key in keys if not key.startswith("general.")}


def prepare() -> None:
    """Import once what every case needs; the picture and the probes of the cores are left out."""
    import fastattn
    from fastattn import _quiet
    from fastattn.demo.generate import cli, picture

    for name in cli.EXTRAS:
        import_module(name)
    picture.draw = lambda *given: None
    fastattn.share_threads_with_blas = lambda: False
    _quiet.CoreProbes.take = lambda self: None
    _quiet.CoreProbes.warning = lambda self: None


def main(first: int, count: int) -> dict[str, Any]:
    """What became of the cases from seed `first` on."""
    prepare()
    outcomes: Counter[str] = Counter()
    mistakes: dict[int, str] = {}
    longest, largest = 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "it.gguf")
        for seed in range(first, first + count):
            what, content, names = damaged(seed)
            path.write_bytes(content)
            outcome = run(path)
            outcomes[f"{what}: status {outcome.status}"] += 1
            if wrong := mistake(path, names, outcome):
                mistakes[seed] = f"{what}: {wrong}"
            longest, largest = max(longest, outcome.seconds), max(largest, outcome.nbytes)
    return {
        "outcomes": dict(sorted(outcomes.items())),
        "seconds": round(longest, 3),
        "bytes": largest,
        "mistakes": mistakes,
    }


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2])), indent=1))
