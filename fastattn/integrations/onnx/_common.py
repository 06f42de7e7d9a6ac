"""What the operators share: their errors, heads out of three axes, masks as fastattn's options."""

from __future__ import annotations

from functools import partial, reduce
from operator import and_
from typing import Any

import numpy as np

from fastattn import masks
from fastattn.integrations._common import caller_names

#: The operators' names of fastattn's arguments. A ValueError, as ONNX hides the text of a TypeError.
names_of_attention = partial(
    caller_names,
    {
        "query": "Q", "key": "K", "value": "V", "mask": "attn_mask", "bias": "attn_mask",
        "key_lengths": "nonpad_kv_seqlen",
    },
    ValueError,
)  # fmt: skip
names_of_rope = partial(
    caller_names, {"x": "X", "cos": "cos_cache", "sin": "sin_cache", "positions": "position_ids"}, ValueError
)


def heads(x: np.ndarray, num_heads: int | None, name: str, attribute: str) -> np.ndarray:
    """(B, H, L, D) as it is, or a view of (B, L, H * D), with H from an attribute."""
    if x.ndim == 4:
        if num_heads and num_heads != x.shape[1]:
            raise ValueError(
                f"{attribute} is {num_heads}, and {name} has {x.shape[1]} heads; {name} {x.shape}"
            )
        return x
    if x.ndim != 3:
        raise ValueError(f"{name} must have three axes or four, got {x.shape}")
    if not num_heads:
        raise ValueError(f"{attribute} must be given for an input of three axes; {name} {x.shape}")
    if num_heads < 0 or x.shape[2] % num_heads:
        raise ValueError(
            f"{attribute} must divide the last axis of {name}, got {num_heads} and {x.shape[2]}; "
            f"{name} {x.shape}"
        )
    return x.reshape(*x.shape[:2], num_heads, x.shape[2] // num_heads).swapaxes(1, 2)


def flat(x: np.ndarray) -> np.ndarray:
    """(B, L, H * D) of (B, H, L, D)."""
    B, H, L, D = x.shape
    return x.swapaxes(1, 2).reshape(B, L, H * D)


def with_past(
    key: np.ndarray, value: np.ndarray, past_key: np.ndarray | None, past_value: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, int]:
    """Keys and values behind those before them, and how many there were; all of four axes."""
    if (past_key is None) != (past_value is None):
        raise ValueError("past_key and past_value must be given together")
    if past_key is None or past_value is None:
        return key, value, 0
    past = past_key.shape[2] if past_key.ndim == 4 else 0
    for name, x, new in (("past_key", past_key, key), ("past_value", past_value, value)):
        check_shape(name, x, (*new.shape[:2], past, new.shape[3]))
    return np.concatenate((past_key, key), axis=2), np.concatenate((past_value, value), axis=2), past


def check_shape(name: str, x: np.ndarray, *expected: tuple[int, ...], because: str = "") -> None:
    if x.shape not in expected:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, expected))}{because}, got {x.shape}")


def check_groups(name: str, num_heads: int, kv_num_heads: int) -> None:
    if kv_num_heads <= 0 or num_heads <= 0 or num_heads % kv_num_heads:
        raise ValueError(f"{name} must be a multiple of kv_num_heads, got {num_heads} and {kv_num_heads}")


def check_choice(name: str, given: Any, choices: tuple[Any, ...]) -> None:
    if given not in choices:
        listed = ", ".join(str(choice) for choice in choices if choice is not None)
        raise ValueError(f"{name} must be one of {listed}, got {given!r}")


def bound(size: int | None, name: str) -> int | None:
    if size is not None and size < -1:
        raise ValueError(f"{name} must be -1 or nonnegative, got {size}")
    return None if size == -1 else size


def rules(
    attn_mask: np.ndarray | None,
    S: int,
    past: int,
    lengths: np.ndarray | None,
    is_causal: bool,
    left: int | None,
    right: int | None,
) -> dict[str, Any]:
    """fastattn's options. Query i is at key ``i + past``, or with `lengths` at the end of its item's keys."""
    options: dict[str, Any] = {}
    has_window = left is not None or right is not None
    if attn_mask is not None:
        if attn_mask.dtype.kind in "iu":
            attn_mask = attn_mask.astype(np.float64)  # added to the scores, as floats are
        if (missing := S - attn_mask.shape[-1]) > 0:
            hidden = False if attn_mask.dtype == np.bool_ else -np.inf
            widths = [(0, 0)] * (attn_mask.ndim - 1) + [(0, missing)]
            attn_mask = np.pad(attn_mask, widths, constant_values=hidden)
        options["mask" if attn_mask.dtype == np.bool_ else "bias"] = attn_mask
    if lengths is not None:
        options["key_lengths"] = lengths.reshape(-1)
        options["causal"] = "bottom_right" if is_causal else False
        options["window"] = (left, right) if has_window else None
    elif is_causal or has_window:
        parts: list[masks.Mask] = [masks.Causal(offset=past)] if is_causal else []
        if has_window:
            parts.append(masks.Window(left, right, "top_left").shifted(past, 0))
        if "mask" in options:
            parts.append(masks.Dense(options["mask"]))
        options["mask"] = reduce(and_, parts)
    return options
