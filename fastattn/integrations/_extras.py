"""What a module says where its library is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str, hint: str = "") -> Iterator[None]:
    """Around imports of other packages: an ImportError says which extra of fastattn's has them."""
    try:
        yield
    except ImportError as error:
        raise type(error)(
            f"fastattn.integrations.{name} needs packages that are missing or too old ({error}): "
            f"pip install 'fastattn[{name}]'{hint}",
            name=error.name,
        ) from error
