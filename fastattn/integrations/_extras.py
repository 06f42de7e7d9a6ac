"""What a module says where its library is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str, hint: str = "") -> Iterator[None]:
    """Around imports of other packages: an ImportError says which extra of fastattn's has them.

    Whatever they raise: packages that do not fit each other, or NumPy, end in errors of any kind.
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
