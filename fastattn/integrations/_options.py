"""What a differentiable `attention` refuses, and errors that name arguments as the caller does."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def check_options(options: Mapping[str, Any], *refused: str) -> None:
    """Raise TypeError for options of `fastattn.attention` that say what it returns, or where."""
    for name in refused:
        if name in options:
            raise TypeError(f"no {name}= where attention is differentiated; fastattn.attention has it")


@contextmanager
def caller_names(names: Mapping[str, str], kind: type[Exception] | None = None) -> Iterator[None]:
    """Errors from within name arguments by what `names` has for them, and are of `kind`, or as they were.

    Without hints at `layout`, which these callers do not have.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        parts = (part for part in str(error).split("; ") if "layout=" not in part)
        text = re.sub(rf"\b({'|'.join(names)})\b", lambda found: names[found[0]], "; ".join(parts))
        raise (kind or (TypeError if isinstance(error, TypeError) else ValueError))(text) from None
