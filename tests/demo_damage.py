"""Damaged files of models: what a demo does with each, in a process of its own with limits.

``python -m tests.demo_damage generate|embed|image SEED COUNT`` prints what became of so many from a seed on.
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
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import gguf
import numpy as np

from tests import demo_embed_models, demo_image_models
from tests.gguf_bytes import KINDS, Writer, obeyed, whole

SECONDS, MEMORY = 5, 2 * 10**9

Rng = np.random.Generator

# ---- damages of any bytes, half of the times before `head`, where what is not weights ends


def place(rng: Rng, content: bytearray, head: int) -> int:
    return int(rng.integers(head if rng.random() < 0.5 else len(content)))


def flip(rng: Rng, content: bytearray, head: int) -> bytearray:
    """One to four bits."""
    for _ in range(rng.integers(1, 5)):
        content[place(rng, content, head)] ^= 1 << int(rng.integers(8))
    return content


def cut(rng: Rng, content: bytearray, head: int) -> bytearray:
    return content[: place(rng, content, head)]


def shift(rng: Rng, content: bytearray, head: int) -> bytearray:
    """Bytes lost, doubled or put in between."""
    start = place(rng, content, head)
    stop = start + int(rng.integers(1, 100))
    between = [b"", bytes(content[start:stop]) * 2, rng.bytes(stop - start) + bytes(content[start:stop])]
    return content[:start] + between[int(rng.integers(3))] + content[stop:]


def overwrite(rng: Rng, content: bytearray, head: int) -> bytearray:
    """A run of bytes: zeros, ones or noise."""
    start = place(rng, content, head)
    size = min(int(rng.integers(1, 5000)), len(content) - start)
    content[start : start + size] = [bytes(size), b"\xff" * size, rng.bytes(size)][int(rng.integers(3))]
    return content


BYTES = (flip, cut, shift, overwrite)

# ---- damages of a GGUF file


def lie(rng: Rng, writer: Writer) -> None:
    """One number that is not a weight, to another, often a very large one; each kind is as likely."""
    content = writer.content
    means = str(rng.choice(sorted({field.means for field in writer.fields})))
    some = [field for field in writer.fields if field.means == means]
    at, code, _ = some[int(rng.integers(len(some)))]
    (value,) = struct.unpack_from(f"<{code}", content, at)
    if code == "f":
        lies = [np.nan, np.inf, -np.inf, 0.0, -1.0, 1e-30, 1e30, -value]
    elif code == "?":
        lies, code = [2, 255], "B"
    else:
        bits = 8 * struct.calcsize(code)
        powers = [2**n for n in (16, 20, 26, 31, 40, 61)]
        lies = [0, 1, value - 1, value + 1, 2 * value, *powers, 2**bits - 1]
        lies = [number for number in lies if 0 <= number < 2**bits]
    struct.pack_into(f"<{code}", content, at, lies[int(rng.integers(len(lies)))])


def misspell(rng: Rng, writer: Writer) -> None:
    """A byte of a string that is no UTF-8, or that commands a terminal, or ends a line."""
    some = [(at, size) for at, size in writer.strings if size]
    at, size = some[int(rng.integers(len(some) if rng.random() < 0.5 else 60))]
    writer.content[at + int(rng.integers(size))] = b"\xff\xc0\x80\x1b\x07\n\r\x00"[int(rng.integers(8))]


def spoil(rng: Rng, writer: Writer) -> None:
    """A weight that is not finite, or so large that what is computed is not."""
    content = writer.content
    at = writer.weights_at + 4 * int(rng.integers((len(content) - writer.weights_at) // 4))
    value = [np.nan, np.inf, -np.inf, 3e38, -1e30, 1e20][int(rng.integers(6))]
    struct.pack_into("<f", content, at, np.float32(value))


# ---- damages of JSON


def mislead(rng: Rng, content: bytearray, head: int) -> bytearray:
    """One value anywhere, to another, often of another type."""
    value = json.loads(content)
    inner = value
    while True:
        key = list(inner if isinstance(inner, dict) else range(len(inner)))[int(rng.integers(len(inner)))]
        if not (isinstance(inner[key], (dict, list)) and inner[key]) or rng.random() < 0.2:
            break
        inner = inner[key]
    lies = [None, True, -1, 0, 1, 2**31, 10**30, 1.5, float("nan"), "", "\x1b[2J", "x" * 10**5, [], {}, [[]]]
    inner[key] = lies[int(rng.integers(len(lies)))]
    return bytearray(json.dumps(value).encode())


# ---- what is done to which file, and what may come of it


class Case(NamedTuple):
    what: str
    arguments: list[str]
    #: what is wrong, if anything, where the demo takes the files: they must be as good as whole ones
    difference: Callable[[], str | None]


def generate_case(rng: Rng, folder: Path) -> Case:
    kind = KINDS[int(rng.integers(len(KINDS)))]
    damage = [*BYTES, lie, misspell, spoil][int(rng.integers(len(BYTES) + 3))]
    writer = whole(kind)
    if damage in BYTES:
        writer.content = damage(rng, writer.content, writer.weights_at)
    else:
        damage(rng, writer)
    path = folder / "it.gguf"
    path.write_bytes(writer.content)
    arguments = ["--model", str(path), "--prompt", "the end", "--max-tokens", "2"]
    return Case(f"{damage.__name__} {kind}", arguments, lambda: difference(path, writer.names))


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


def embed_case(rng: Rng, folder: Path) -> Case:
    demo_embed_models.write_model(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = files[int(rng.integers(len(files)))]
    damages = [*BYTES, *([mislead] * 4 if path.suffix == ".json" else [])]
    damage = damages[int(rng.integers(len(damages)))]
    content = bytearray(path.read_bytes())
    head = len(content) if path.suffix == ".json" else 8 + int.from_bytes(content[:8], "little")
    path.write_bytes(damage(rng, content, head))
    return Case(f"{damage.__name__} {path.name}", ["--model", str(folder), "--query", "dog"], lambda: None)


def image_case(rng: Rng, folder: Path) -> Case:
    path = demo_image_models.write_model(folder / "it.onnx")
    damage = BYTES[int(rng.integers(len(BYTES)))]
    content = bytearray(path.read_bytes())
    path.write_bytes(damage(rng, content, len(content)))
    return Case(damage.__name__, ["--model", str(path), "--size", "32"], lambda: None)


CASES = {"generate": generate_case, "embed": embed_case, "image": image_case}

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


def mistake(case: Case, outcome: Outcome) -> str | None:
    """What is wrong with an outcome.

    Right is a message of one line that can be printed and the status 2. The status 0 is right as well where
    the damage left files that nothing is wrong with, but of other contents. Of a GGUF file that is: another
    library reads it, it has every key and every tensor that it had, and the demo reads the same values and
    finite numbers.
    """
    status, out, err, seconds, nbytes = outcome
    if seconds > SECONDS or nbytes > MEMORY:
        return f"took {seconds:.1f} s, {nbytes / 1e9:.1f} GB"
    if not all(c.isprintable() or c in "\n\t" for c in out + err):
        return f"prints {out!r} {err!r}"
    said = [line for line in err.splitlines() if not line.startswith("fastattn demo: warning: ")]
    if status == 2:
        one_line = len(said) == 1 and said[0].startswith("fastattn demo: ") and len(said[0]) < 1100
        return None if one_line else f"says {err[-2000:]!r}"
    return f"status {status}: {err[-600:]}" if status or said else case.difference()


def prepare(demo: str) -> None:
    """Import once what every case needs; the picture, timing and probes of the cores are left out."""
    import fastattn
    from fastattn.bench import quiet
    from fastattn.demo import _timing

    for name in import_module(f"fastattn.demo.{demo}.cli").EXTRAS:
        import_module(name)
    picture = import_module(f"fastattn.demo.{demo}.picture")
    for name in {"draw", "draw_attention"} & set(vars(picture)):
        setattr(picture, name, lambda *given: None)
    fastattn.share_threads_with_blas = lambda: False
    quiet.CoreProbes.take = lambda self: None
    quiet.CoreProbes.warning = lambda self: None
    _timing.MIN_ROUNDS, _timing.SECONDS = 1, 0.0


def main(demo: str, first: int, count: int) -> dict[str, Any]:
    """What became of the cases from seed `first` on."""
    prepare(demo)
    run = import_module(f"fastattn.demo.{demo}.cli").main
    outcomes: Counter[str] = Counter()
    mistakes: dict[int, str] = {}
    longest, largest = 0.0, 0
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as folder:
            case = CASES[demo](np.random.default_rng(seed), Path(folder))
            outcome = in_a_fork(lambda case=case: run(case.arguments))
            outcomes[f"{case.what}: status {outcome.status}"] += 1
            if wrong := mistake(case, outcome):
                mistakes[seed] = f"{case.what}: {wrong}"
        longest, largest = max(longest, outcome.seconds), max(largest, outcome.nbytes)
    return {
        "outcomes": dict(sorted(outcomes.items())),
        "seconds": round(longest, 3),
        "bytes": largest,
        "mistakes": mistakes,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])), indent=1))
