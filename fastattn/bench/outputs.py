"""Names and tables that ``python -m fastattn`` shows, and files that its commands write at their end."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def printable(name: object) -> str:
    """A path, or a name in a file, on one line, with characters that command the terminal as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(name))


def new_console(file_width: int, *, stderr: bool = False) -> Console:
    """Where the benchmark's tables go: to the terminal, or `file_width` columns wide to a file or a pipe."""
    try:
        from rich.console import Console
    except ImportError:
        print("The benchmark needs rich and the peers: pip install 'fastattn[bench]'", file=sys.stderr)
        sys.exit(2)
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(width=file_width, stderr=stderr)


def new_table(columns: Sequence[str], left: Collection[str]) -> Table:
    """An empty table; the columns in `left` hold words, the others numbers. Cells wrap where it is narrow."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(escape(column), justify="left" if column in left else "right", overflow="fold")
    return table


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
