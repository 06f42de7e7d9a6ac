"""The one exception of the demo: something its user can put right."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class DemoError(Exception):
    """A mistake in the input or the installation; shown as a short message, never as a traceback.

    Parameters
    ----------
    message : str
        One line. It may quote files and paths: what is shown has no characters that command the terminal.
    hint : str, default ""
        What to do about it, on lines of its own if need be.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@contextmanager
def tokenizers_errors(what: str) -> Iterator[None]:
    """What the package tokenizers raises within it, as a `DemoError` that begins with `what`.

    Its Rust code panics on files that it does not expect, and a panic is no `Exception`. What a panic writes
    to stderr is suppressed.
    """
    sys.stderr.flush()
    stderr = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    except DemoError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DemoError(f"{what}: {error!s:.200}") from None
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
