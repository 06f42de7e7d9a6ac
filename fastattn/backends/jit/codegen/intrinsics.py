"""Functions of compiled code that are written as LLVM IR."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from numba.extending import intrinsic


def intrinsic_of(definition: Callable[..., Any], name: str, parameters: Sequence[str]) -> Any:
    """The intrinsic of this name and these parameters that a function (context, *types) defines."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(it, kind) for it in ("context", *parameters)])
    definition.__signature__ = signature  # type: ignore[attr-defined]
    definition.__name__ = name
    return intrinsic(definition)
