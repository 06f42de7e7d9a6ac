"""What a message says to those who know another library: its arguments, and what takes their place here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

import numpy as np

from fastattn.masks import Mask

_DROPOUT = "say dropout=, and seed=, as there is no global random state"

#: Argument of PyTorch's functions, or of other functions here -> the options that it needs, and what to say.
_PYTORCH = {
    "attn_mask": (
        ("mask", "bias"),
        "say mask= for a bool mask (True = may attend) and bias= for a float one (added to the scores), or "
        "call fastattn.scaled_dot_product_attention, which has PyTorch's arguments and conventions",
    ),
    "is_causal": (("causal",), 'say causal=True, or causal="top_left" where L != S, as PyTorch does'),
    "key_padding_mask": (
        ("key_lengths", "mask"),
        "say key_lengths= where the padding stands at the end, or mask=~padding[:, None, None, :], as True "
        "means ignore there and may attend here",
    ),
    "dropout_p": (("dropout", "seed"), _DROPOUT),
    "dropout": (("dropout", "seed"), _DROPOUT),
    "seed": (("dropout", "seed"), _DROPOUT),
    "enable_gqa": ((), "leave it out, for query may always have a multiple of the heads of key and value"),
    "need_weights": (("return_weights",), "say return_weights=True"),
    "average_attn_weights": (
        ("return_weights",),
        "say return_weights=True, which gives the weights of each head, and average them by .mean(axis=-3)",
    ),
}


def refusal(function: Callable[..., Any], extra: tuple[Any, ...], unknown: Iterable[str]) -> str:
    """Why `function` does not take some arguments by position and others by name, and what to say instead."""
    parameters = inspect.signature(function).parameters
    name = function.__name__
    if extra:
        places = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        option = _option_for(extra[0], parameters)
        return (
            f"{name}() takes {len(places)} positional arguments ({', '.join(places)}), but "
            f"{len(places) + len(extra)} were given: the others go by name"
            f"{'' if option is None else f', here {option}=...'}"
        )
    complaints = [f"{argument!r}{_instead(argument, parameters)}" for argument in unknown]
    return f"{name}() got an unexpected keyword argument {', and '.join(complaints)}"


def _option_for(value: Any, parameters: Iterable[str]) -> str | None:
    """The option that a value given by position was most likely meant for."""
    options: list[str] = []
    dtype = str(getattr(value, "dtype", ""))
    if isinstance(value, Mask):
        options = ["mask", "block_mask"]
    elif dtype and np.ndim(value):
        options = ["bias"] if "float" in dtype else ["mask"]
    elif callable(value):
        options = ["score_mod"]
    return next((option for option in options if option in parameters), None)


def _instead(argument: str, parameters: Iterable[str]) -> str:
    needed, hint = _PYTORCH.get(argument, ((), ""))
    if hint:
        here = set(needed) <= set(parameters)
        return f": {hint}" if here else f": in fastattn.attention {hint}"
    close = get_close_matches(argument, list(parameters), n=1)
    return f". Did you mean {close[0]!r}?" if close else ""
