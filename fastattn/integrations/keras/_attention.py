"""Keras's function of attention, and the layers that are led to it at inference."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

import numpy as np
from keras.src.backend.common.global_state import get_global_attribute
from keras.src.backend.numpy import nn

import fastattn
from fastattn.integrations._common import caller_names

_keras_attention = nn.dot_product_attention
#: Whether a query without keys gets 0, as by Keras's Softmax layer, and not the mean of all values.
zeros: ContextVar[bool] = ContextVar("zeros", default=False)


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
    flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
    sinks: Any = None,
) -> Any:
    """What Keras's function of this name returns, for (B, T, N, H) arrays; and `sinks`, (N,)."""
    query, key, value = map(nn.convert_to_tensor, (query, key, value))
    if flash_attention or query.ndim != 4 or not nn.backend.is_float_dtype(query.dtype):
        # Keras's own errors, and its results for integers.
        return _keras_attention(query, key, value, bias, mask, scale, is_causal, flash_attention)
    dtype = nn.backend.result_type(query.dtype, key.dtype, value.dtype)
    with caller_names({"softcap": "attn_logits_soft_cap"}):
        out, lse = fastattn.attention(
            *(x.astype(dtype, copy=False) for x in (query, key, value)),
            bias=None if bias is None else nn.convert_to_tensor(bias, dtype),
            mask=None if mask is None else np.asarray(mask, bool),
            scale=scale,
            causal="top_left" if is_causal else False,
            softcap=attn_logits_soft_cap,
            sinks=None if sinks is None else nn.convert_to_tensor(sinks, dtype),
            layout="bshd",
            return_lse=True,
        )
    without_keys = np.isneginf(lse).swapaxes(1, 2)  # (B, T, N)
    if without_keys.any() and not zeros.get():
        mean = np.mean(value, axis=1, keepdims=True, dtype=lse.dtype).astype(out.dtype)
        group_size = out.shape[2] // mean.shape[2]
        np.copyto(out, mean.repeat(group_size, axis=2), where=without_keys[..., None])
    return out


class Fused:
    """A view of a layer: without dropout, and free to call ``keras.ops.dot_product_attention``."""

    dropout = _dropout = 0.0

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def _use_fused_attention_op(self) -> bool:
        return True


def inference(own: Callable[..., Any], adapter: Callable[..., Any]) -> Callable[..., Any]:
    """`adapter` of a method `own` with a Softmax layer. In training `own` computes itself."""

    @wraps(own)
    def method(*args: Any, **kwargs: Any) -> Any:
        if getattr(get_global_attribute("current_call_ctx"), "training", False):
            return own(*args, **kwargs)
        before = zeros.set(True)
        try:
            return adapter(own, *args, **kwargs)
        finally:
            zeros.reset(before)

    return method


def fused(own: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """What the method computes on GPUs, by ``keras.ops.dot_product_attention``."""
    return own(Fused(self), *args, **kwargs)


def of_layer(own: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """`fused` of Keras's layers, which have a Softmax layer where they have dropout."""
    zeros.set(bool(vars(self).get("_dropout") or vars(self).get("dropout")))
    return fused(own, self, *args, **kwargs)
