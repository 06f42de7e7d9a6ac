"""The lines of text that the demo works on: its own, or the user's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastattn.demo._files import read_text
from fastattn.demo.embed.corpus import PASSAGES, QUERIES, SENTENCES


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
    return [
        Line(line.strip(), f"line {number} of {path.name}")
        for number, line in enumerate(read_text(path, "--file").split("\n"), 1)
        if line.strip()
    ]
