"""The signature of a call where the extension is not there; see `fastattn._prepared`."""

from __future__ import annotations

from typing import Any

import numpy as np


def signature(function: int, *arguments: Any) -> tuple[Any, ...] | None:
    """What is the same for all calls which are done alike, or None for a call with unusual arguments.

    The arguments are those of ``signature.pxi``, which gives bytes.
    """
    query, key, value, mask, bias, causal, window, key_lengths, scale, softcap, sinks, layout, out = (
        arguments[:13]
    )
    return_lse, return_weights, num_threads, backend = arguments[13:]
    described: list[Any] = []
    for array in (query, key, value, mask, bias, sinks, out):
        if array is None:
            described.append(None)
        elif type(array) is np.ndarray:
            described += (array.dtype, array.shape, array.strides, array.flags.writeable)
        else:
            return None
    if key_lengths is not None:
        if type(key_lengths) is not np.ndarray:
            return None
        key_lengths = (key_lengths.dtype, key_lengths.shape)
    if not (
        (
            causal is False
            or causal is True
            or (type(causal) is str and causal in ("top_left", "bottom_right"))
        )
        and (type(layout) is str and layout in ("bhsd", "bshd"))
        and type(return_lse) is type(return_weights) is bool
        and all(
            number is None or isinstance(number, float) or type(number) is int for number in (scale, softcap)
        )
        and (
            window is None
            or (
                type(window) is tuple
                and len(window) == 2
                and all(n is None or type(n) is int for n in window)
            )
        )
        and (num_threads is None or type(num_threads) is int)
        and backend in (None, "numba")
    ):
        return None
    options = (causal, window, scale, softcap, layout, return_lse, return_weights, num_threads)
    return (function, *described, key_lengths, *options, backend)


def recall(function: int, *arguments: Any) -> None:
    """In the place of ``recall.pxi``: no call is small beside what it takes here."""
