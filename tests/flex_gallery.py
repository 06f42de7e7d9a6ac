"""The functions that the recipes show, with arrays and what they read, and their answers in Python."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np

from tests.test_docs import DOCS, cells

L, S, D, B, H = 70, 70, 16, 2, 3


def gallery() -> dict[str, Callable[..., Any]]:
    """The functions that the recipes show."""
    namespace: dict[str, Any] = {"np": np}
    code = next(cell for cell in cells(DOCS / "recipes.md") if "def alibi" in cell)
    exec(compile(code, "recipes.md", "exec"), namespace)
    return {name: value for name, value in namespace.items() if isinstance(value, FunctionType)}


GALLERY = gallery()


def aux_of(name: str, dtype: Any = np.float64) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    is_global = np.zeros(S, bool)
    is_global[[0, 40]] = True
    return {
        "alibi": lambda: (2.0 ** -np.arange(1, H + 1, dtype=dtype),),
        "t5_bias": lambda: (
            np.minimum(np.abs(np.arange(-L, S)), 9),
            rng.standard_normal((10, H)).astype(dtype),
            L,
        ),
        "soft_cap": lambda: (2.0,),
        "distance_decay": lambda: (rng.random(S).astype(dtype), 20.0),
        "additive": lambda: tuple(rng.standard_normal(n).astype(dtype) for n in ((L, 4), (S, 4), 4)),
        "sliding_window": lambda: (10,),
        "prefix_lm": lambda: (np.array([5, 33]),),
        "documents": lambda: (np.repeat(np.arange(5), [10, 20, 5, 30, 5]),),
        "longformer": lambda: (7, is_global),
        "big_bird": lambda: (7, is_global, rng.random((9, 9)) < 0.2, 8),
        "dilated_window": lambda: (5, 3),
        "neighbourhood": lambda: (10, 2),
        "tree": lambda: (np.tri(L, 20, dtype=bool) & (rng.random((L, 20)) < 0.6), S - 20),
    }[name]()


SCORES = [name for name, function in GALLERY.items() if function.__code__.co_varnames[0] == "score"]
MASKS = [name for name in GALLERY if name not in SCORES]


def arrays(
    dtype: Any = np.float64, len_q: int = L, kv_heads: int = H, value_dim: int = D
) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(1)
    shapes = ((B, H, len_q, D), (B, kv_heads, S, D), (B, kv_heads, S, value_dim))
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def options_of(name: str, dtype: Any) -> dict[str, Any]:
    kind = "score_mod" if name in SCORES else "mask_mod"
    return {kind: GALLERY[name], "aux": aux_of(name, dtype)}


def oracle_options(name: str, dtype: Any) -> dict[str, Any]:
    function, aux = GALLERY[name], aux_of(name, dtype)
    if name in SCORES:
        return {"score_mod": lambda *arguments: function(*arguments, *aux)}
    return {"mask": in_python(function, aux, B, H, L, S)}


def in_python(function: Any, aux: Any, *shape: int) -> np.ndarray:
    return np.array([bool(function(*place, *aux)) for place in np.ndindex(*shape)]).reshape(shape)


def indices(score, b, h, q_idx, kv_idx):
    return score + 1.5 * b - 0.25 * h + 0.125 * q_idx - 0.0625 * kv_idx + 0.001 * q_idx * kv_idx
