"""Mask functions of a known form: packed documents, whose map of tiles needs no look at each pair.

A function that does nothing but compare runs once on stand-ins, which know the comparisons below. Any other
one is None here, and is evaluated for all pairs.
"""

from __future__ import annotations

import dis
from types import CellType, FunctionType
from typing import Any

import numpy as np

from fastattn._call.problem import Mod
from fastattn.masks import Causal, Segments
from fastattn.masks.map import Block, Intervals

#: Instructions without a jump, a call or an effect, by how their names begin.
_PLAIN = (
    "BINARY_", "CACHE", "COMPARE_OP", "COPY_FREE_VARS", "EXTENDED_ARG", "LOAD_DEREF", "LOAD_FAST",
    "LOAD_GLOBAL", "NOP", "RESUME", "RETURN_VALUE", "STORE_FAST",
)  # fmt: skip


def documents(mod: Mod, L: int, S: int) -> Intervals | None:
    """The keys of each query where the function is ``ids[q_idx] == ids[kv_idx]``, alone or with ``q_idx >=
    kv_idx`` by ``&``, and equal ids follow each other; else None."""
    function = getattr(mod.function, "py_func", mod.function)
    found = _traced(function, mod.aux) if isinstance(function, FunctionType) else None
    if not isinstance(found, _Known) or found.kind != "result" or found.ids is None:
        return None
    if not 0 < min(L, S) <= max(L, S) <= len(found.ids):
        return None
    mask = Segments(found.ids[:L], found.ids[:S])
    node = (mask & Causal("top_left") if found.causal else mask)._bind(Block((), 1, L, S, whole=(L, S)))
    return node if isinstance(node, Intervals) else None


def _traced(function: FunctionType, aux: tuple[Any, ...]) -> Any:
    """What it returns for stand-ins; None where it does more than these know."""
    code = function.__code__
    if not all(instruction.opname.startswith(_PLAIN) for instruction in dis.get_instructions(code)):
        return None
    known = {name: _array(function.__globals__.get(name)) for name in code.co_names}
    indices = (_Known("index", of) for of in ("item", "head", "query", "key"))
    try:
        cells = tuple(CellType(_array(cell.cell_contents)) for cell in function.__closure__ or ())
        return FunctionType(code, known, closure=cells)(*indices, *map(_array, aux))
    except Exception:  # of any kind: what is wrong with it, if anything is, its compiler says
        return None


class _Known:
    """An index, an array, its entry at an index, or a result. All else that is made of them is None."""

    __bool__: Any = None  # it is neither

    def __init__(self, kind: str, of: str = "", ids: np.ndarray | None = None, causal: bool = False) -> None:
        self.kind, self.of, self.ids, self.causal = kind, of, ids, causal

    def __getitem__(self, index: Any) -> Any:
        is_known = (self.kind, index.kind) == ("array", "index")
        return _Known("entry", index.of, self.ids) if is_known else None

    def __eq__(self, other: Any) -> Any:
        is_known = self.kind == other.kind == "entry" and self.ids is other.ids
        return (
            _Known("result", ids=self.ids) if is_known and {self.of, other.of} == {"query", "key"} else None
        )

    def __ge__(self, other: Any) -> Any:
        is_known = self.kind == other.kind == "index" and (self.of, other.of) == ("query", "key")
        return _Known("result", causal=True) if is_known else None

    def __le__(self, other: Any) -> Any:
        return _Known.__ge__(other, self)

    def __and__(self, other: Any) -> Any:
        is_known = self.kind == other.kind == "result" and (self.ids is None or other.ids is None)
        ids = other.ids if self.ids is None else self.ids
        return _Known("result", ids=ids, causal=self.causal or other.causal) if is_known else None


def _array(value: Any) -> _Known | None:
    is_plain = type(value) is np.ndarray and value.ndim == 1 and value.dtype.isnative
    return (
        _Known("array", ids=value) if is_plain and value.dtype.kind in "iu" and value.dtype != "u8" else None
    )
