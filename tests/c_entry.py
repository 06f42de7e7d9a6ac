"""The C entry by ctypes, for tests: the struct of ``fastattn.h`` and a call of it, without the GIL."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from fastattn._api import c_entry

DTYPES = {"float32": 1, "float64": 2, "float16": 3, "bfloat16": 4, "bool": 5, "int64": 6}
CAUSAL = {False: 0, "top_left": 1, "bottom_right": 2}
ARRAYS = ("query", "key", "value", "out", "lse", "mask", "bias", "key_lengths", "sinks")

RNG = np.random.default_rng(1)
#: Of calls of 2 items, 4 heads, 17 queries and 33 keys.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": -0.3},
    "scale_0": {"scale": 0.0},
    "softcap": {"softcap": 2.0},
    "precision": {"precision": "storage"},
    "top_left": {"causal": "top_left"},
    "bottom_right": {"causal": "bottom_right"},
    "window": {"window": (4, 2)},
    "half_window": {"window": (None, 0), "causal": "top_left"},
    "mask": {"mask": RNG.random((2, 4, 17, 33)) > 0.3},
    "mask_of_keys": {"mask": RNG.random((2, 1, 1, 33)) > 0.3},
    "bias": {"bias": RNG.standard_normal((1, 4, 17, 33)).astype("f4")},
    "bias_in_16_bits": {"bias": RNG.standard_normal((2, 1, 17, 33)).astype("f2")},
    "lengths": {"key_lengths": np.array([33, 9])},
    "lengths_at_end": {"key_lengths": np.array([1, 0]), "causal": "bottom_right"},
    "sinks": {"sinks": np.linspace(-1, 1, 4, dtype="f4")},
    "all": {
        "mask": RNG.random((2, 4, 17, 33)) > 0.3,
        "bias": np.where(RNG.random((2, 4, 17, 33)) > 0.1, 0.5, -np.inf).astype("f4"),
        "key_lengths": np.array([20, 31]),
        "sinks": np.linspace(-1, 1, 4, dtype="f4"),
        "causal": "bottom_right",
        "window": (9, None),
        "scale": 0.4,
        "softcap": 3.0,
        "num_threads": 1,
    },
}


class Array(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("dtype", ctypes.c_int64), ("strides", ctypes.c_int64 * 4))


class Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("abi_version", "struct_size", "batch", "num_heads")),
        *((name, ctypes.c_int64) for name in ("num_kv_heads", "len_q", "len_k", "head_dim", "value_dim")),
        *((name, Array) for name in ARRAYS),
        *((name, ctypes.c_int64) for name in ("causal", "window_left", "window_right")),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
        ("precision", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
        ("message", ctypes.c_char_p),
        ("message_size", ctypes.c_int64),
    )


def function() -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Call))(c_entry.address())


def described(array: np.ndarray | None, axes: tuple[int, ...] = (0, 1, 2, 3)) -> Array:
    """An array of the struct, whose axes stand for those of the four."""
    if array is None:
        return Array()
    strides = [0] * 4
    for axis, stride, n in zip(axes, array.strides, array.shape, strict=True):
        strides[axis] = stride if n > 1 else 0
    return Array(array.ctypes.data, DTYPES[array.dtype.name], (ctypes.c_int64 * 4)(*strides))


def make_call(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    out: np.ndarray,
    *,
    lse: np.ndarray | None = None,
    mask: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    key_lengths: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    precision: str = "exact",
    num_threads: int = 0,
) -> Call:
    """A call on arrays with four axes; mask and bias have an axis of 1 where they are broadcast."""
    call = Call(
        abi_version=1, struct_size=ctypes.sizeof(Call), causal=CAUSAL[causal], num_threads=num_threads
    )
    call.batch, call.num_heads, call.len_q, call.head_dim = query.shape
    _, call.num_kv_heads, call.len_k, call.value_dim = value.shape
    for name, array in (("query", query), ("key", key), ("value", value), ("out", out)):
        setattr(call, name, described(array))
    call.lse, call.mask, call.bias = described(lse, (0, 1, 2)), described(mask), described(bias)
    call.key_lengths, call.sinks = described(key_lengths, (0,)), described(sinks, (1,))
    left, right = window or (None, None)
    call.window_left, call.window_right = (-1 if bound is None else bound for bound in (left, right))
    call.scale = float("nan") if scale is None else scale
    call.softcap = softcap or 0.0
    call.precision = ("exact", "storage").index(precision)
    return call


def attend(*arrays: np.ndarray, **options: Any) -> tuple[int, str]:
    """The return code of a call, and its message."""
    call = make_call(*arrays, **options)
    message = ctypes.create_string_buffer(500)
    call.message, call.message_size = ctypes.cast(message, ctypes.c_char_p), len(message)
    return function()(ctypes.byref(call)), message.value.decode()
