"""The signature of a call where the extension is not there; see `fastattn._api.prepared`."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._call.options import (
    ARRAY,
    BOUNDS,
    CHOICE,
    COUNT,
    DEFAULTS,
    LENGTHS,
    MASK,
    NEVER,
    OPTIONS,
    REAL,
    SEED,
)  # fmt: skip
from fastattn.masks import Mask

calls: dict[Any, Any] = {}
tokens: dict[Any, int] = {}


def signature(
    function: int,
    query: Any,
    key: Any,
    value: Any,
    given: dict[str, Any],
    backend: Any,
    token: int = 0,
    others: tuple[Any, ...] = (),
) -> tuple[Any, ...] | None:
    """What is the same for all calls which are done alike, or None for a call with unusual arguments.

    The arguments are those of ``signature.pxi``, which gives bytes.
    """
    values = DEFAULTS | given
    if len(values) > len(DEFAULTS):
        return None
    if values["backend"] is None:
        values["backend"] = backend
    parts: list[Any] = [
        function,
        token,
        *(_described(ARRAY, array) for array in (query, key, value, *others)),
    ]
    parts += [_described(o.part, values[o.name], o.choices) for o in OPTIONS]
    return None if None in parts else tuple(parts)


def _described(part: str, x: Any, choices: tuple[Any, ...] = ()) -> Any:
    """An option as a part of a signature; None where it has no place in one."""
    is_in_it = True
    if part in (ARRAY, MASK, LENGTHS) and x is not None:
        if type(x) is np.ndarray:
            described = (x.dtype, x.shape)
            return described if part == LENGTHS else (*described, x.strides, x.flags.writeable)
        return tokens.get(x) if isinstance(x, Mask) else None
    if part == REAL:
        is_in_it = x is None or isinstance(x, float) or type(x) is int
    elif part == COUNT:
        is_in_it = x is None or type(x) is int
    elif part == BOUNDS:
        is_pair = type(x) is tuple and len(x) == 2 and all(n is None or type(n) is int for n in x)
        is_in_it = x is None or is_pair
    elif part == CHOICE:
        is_in_it = any(x is choice or (type(x) is str and x == choice) for choice in choices)
    elif part == SEED and x is not None:
        return (True,) if type(x) is int and 0 <= x < 2**128 else None
    return (None if part == NEVER else x,) if is_in_it else None


def recall(*arguments: Any) -> None:
    """In the place of ``recall.pxi``: no call is small beside what it takes here."""
