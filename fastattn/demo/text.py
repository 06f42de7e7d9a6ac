"""The lines of text that the demo works on: its own, or the user's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastattn.demo._errors import DemoError
from fastattn.demo.corpus import PASSAGES, QUERIES, SENTENCES


@dataclass(frozen=True)
class Line:
    """One text, a sentence or a passage, and where it came from."""

    text: str
    source: str  #: for messages, such as "line 12 of notes.txt"


def built_in_texts() -> dict[str, list[Line]]:
    """What the demo searches when it is given no file, by kind."""
    return {"sentences": _built_in("sentence", SENTENCES), "passages": _built_in("passage", PASSAGES)}


def built_in_queries() -> list[Line]:
    """What it looks for when it is given neither a file nor a query."""
    return _built_in("query", QUERIES)


def _built_in(kind: str, texts: Sequence[str]) -> list[Line]:
    return [Line(text, f"built-in {kind} {number}") for number, text in enumerate(texts, 1)]


def read_lines(path: Path) -> list[Line]:
    """The lines of a UTF-8 text file that are not blank, without surrounding white space.

    Raises
    ------
    DemoError
        If the file is missing, cannot be read, is not text, or has only blank lines.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DemoError(
            f"--file {path} is not UTF-8 text: byte 0x{byte:02x} at position {error.start} "
            "cannot be decoded. Save it as UTF-8 first."
        ) from None
    except OSError as error:
        raise DemoError(f"--file {path} cannot be read: {error.strerror}") from None
    if "\0" in text:
        raise DemoError(f"--file {path} is not text: it contains NUL bytes")

    lines = [
        Line(line.strip(), f"line {number} of {path.name}")
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]
    if not lines:
        raise DemoError(f"--file {path} has no text in it: it is empty, or every line is blank")
    return lines
