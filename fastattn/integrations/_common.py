"""What the integrations share: missing packages, refused options, the caller's names in errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np


@contextmanager
def extra(name: str, hint: str = "") -> Iterator[None]:
    """Around imports of other packages: an ImportError names the extra of fastattn that installs them.

    It replaces every kind of error: packages that do not fit each other, or NumPy, may raise any.
    """
    try:
        yield
    except Exception as error:
        kind = ModuleNotFoundError if isinstance(error, ModuleNotFoundError) else ImportError
        raise kind(
            f"fastattn.integrations.{name} needs packages that are missing, too old or broken ({error}): "
            f"pip install 'fastattn[{name}]'{hint}",
            name=getattr(error, "name", None),
        ) from error


def check_options(options: Mapping[str, Any], *refused: str) -> None:
    """Raise TypeError for options of `fastattn.attention` that say what it returns, or where."""
    for name in refused:
        if name in options:
            raise TypeError(f"no {name}= where attention is differentiated; fastattn.attention has it")


def stand_in(array: Any) -> np.ndarray:
    """An array of this shape and dtype, for checks that do not read its numbers; it takes no memory."""
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


@contextmanager
def caller_names(names: Mapping[str, str], kind: type[Exception] | None = None) -> Iterator[None]:
    """Errors raised within name arguments as `names` says, and are of `kind` if it is given.

    Hints at `layout` are left out: these callers do not have it.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        parts = (part for part in str(error).split("; ") if "layout=" not in part)
        text = re.sub(rf"\b({'|'.join(names)})\b", lambda found: names[found[0]], "; ".join(parts))
        raise (kind or (TypeError if isinstance(error, TypeError) else ValueError))(text) from None


class Methods:
    """Methods of a class of another library, for which ours are put, and which are put back."""

    def __init__(self, owner: type, ours: type, *names: str) -> None:
        self._owner = owner
        self._ours = {name: getattr(ours, name) for name in names}
        self.theirs = self._present()

    def _present(self) -> dict[str, Any]:
        return {name: getattr(self._owner, name) for name in self._ours}

    def _set(self, methods: Mapping[str, Any]) -> None:
        for name, method in methods.items():
            setattr(self._owner, name, method)

    def install(self) -> None:
        self._set(self._ours)

    def uninstall(self) -> None:
        self._set(self.theirs)

    @contextmanager
    def installed(self) -> Iterator[None]:
        before = self._present()
        self.install()
        try:
            yield
        finally:
            self._set(before)
