"""Mask objects: which key each query may attend to.

Small frozen objects that say what they mean, combine with ``&``, ``|`` and ``~``, and know no backend.
``objects.lower`` turns one into the two forms that kernels understand:

- **intervals**: one ``[key_start, key_stop)`` per query row. Causal, window, lengths, contiguous
  documents, prefixes and every ``&`` of them need nothing else.
- **tiles**: a map of EMPTY, FULL and PARTIAL tiles of the ``(L, S)`` plane, with bits for the PARTIAL
  ones. Time and memory grow with the PARTIAL tiles, not with ``L * S``.

A lone array (`Dense`) stays what it is, a strided view that the kernels stream.

Letters: ``*lead`` the leading batch axes, ``H`` query heads, ``L`` query length, ``S`` key length;
``i`` a query row, ``j`` a key.
"""

from fastattn.masks.objects import (  # noqa: F401  # where pickles look for them
    BlockMask,
    Causal,
    Dense,
    GlobalTokens,
    KeyLengths,
    Mask,
    NotSelf,
    PrefixLM,
    Segments,
    Window,
    _And,
    _Not,
    _Or,
    _Shifted,
)

__all__ = [
    "BlockMask",
    "Causal",
    "Dense",
    "GlobalTokens",
    "KeyLengths",
    "Mask",
    "NotSelf",
    "PrefixLM",
    "Segments",
    "Window",
]

for _name in __all__:
    globals()[_name].__module__ = __name__


def __dir__() -> list[str]:
    return [name for name in globals() if name in __all__ or name.startswith("__")]
