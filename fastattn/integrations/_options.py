"""What a differentiable `attention` refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check_options(options: Mapping[str, Any], *refused: str) -> None:
    """Raise TypeError for options of `fastattn.attention` that say what it returns, or where."""
    for name in refused:
        if name in options:
            raise TypeError(f"no {name}= where attention is differentiated; fastattn.attention has it")
