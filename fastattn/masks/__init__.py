"""Mask objects: which key each query may attend to.

Small frozen objects that say what they mean, combine with ``&``, ``|`` and ``~``, and know no backend.
``base.lower`` turns one into the two forms that kernels understand:

- **intervals**: one ``[key_start, key_stop)`` per query row. Causal, window, lengths, contiguous
  documents, prefixes and every ``&`` of them need nothing else.
- **tiles**: a map of EMPTY, FULL and PARTIAL tiles of the ``(L, S)`` plane, with bits for the PARTIAL
  ones. Time and memory grow with the PARTIAL tiles, not with ``L * S``.

A lone array (`Dense`) stays what it is, a strided view that the kernels stream.

Letters: ``*lead`` the leading batch axes, ``H`` query heads, ``L`` query length, ``S`` key length;
``i`` a query row, ``j`` a key.
"""

from typing import NoReturn

from fastattn.masks.base import Mask, _And, _Not, _Or, _Shifted
from fastattn.masks.objects import (
    BlockMask,
    Causal,
    Dense,
    GlobalTokens,
    KeyLengths,
    Neighborhood,
    NotSelf,
    PrefixLM,
    Segments,
    Window,
)

__all__ = [
    "BlockMask",
    "Causal",
    "Dense",
    "GlobalTokens",
    "KeyLengths",
    "Mask",
    "Neighborhood",
    "NotSelf",
    "PrefixLM",
    "Segments",
    "Window",
]

for _kind in (*(globals()[name] for name in __all__), _And, _Not, _Or, _Shifted):
    _kind.__module__ = __name__  # where pickles look for it

#: What stands here in the place of masks of other libraries.
_INSTEAD = {
    **dict.fromkeys(("CausalMask", "LowerTriangularMask"), "Causal()"),
    "LowerTriangularFromBottomRightMask": 'Causal("bottom_right")',
    **dict.fromkeys(("LocalMask", "SlidingWindow", "SlidingWindowMask"), "Window(left, right)"),
    **dict.fromkeys(("BlockDiagonalMask", "DocumentMask"), "Segments(ids)"),
    "BlockDiagonalCausalMask": "Segments(ids) & Causal()",
    "PaddingMask": "KeyLengths(lengths)",
}


def __getattr__(name: str) -> NoReturn:
    hint = f": say {_INSTEAD[name]}" if name in _INSTEAD else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return [name for name in globals() if name in __all__ or name.startswith("__")]
