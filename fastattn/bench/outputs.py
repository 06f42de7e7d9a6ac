"""Names that the commands of ``python -m fastattn`` show, and files that they write at their end."""

from __future__ import annotations

import os
from pathlib import Path


def printable(name: object) -> str:
    """A path, or a name in a file, on one line, with characters that command the terminal as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(name))


def why_not_writable(path: Path) -> str:
    """Why no file can be written at `path`; empty where one can.

    It is opened, as only that tells; a file that is there stays as it is.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.is_fifo():  # opening one waits for who reads it
            return "it is a pipe"
        is_new = not target.exists()
        with target.open("ab"):
            pass
        if is_new:
            target.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""
