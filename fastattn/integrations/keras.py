"""Attention of Keras 3 on its NumPy backend, computed by fastattn: layers and models stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import fastattn
from fastattn.integrations._common import caller_names, extra

with extra("keras", "; and KERAS_BACKEND=numpy in the environment"):
    import keras
    from keras.src.backend.numpy import nn

_keras_attention = nn.dot_product_attention


def install() -> Callable[..., Any]:
    """Let ``keras.ops.dot_product_attention`` of the NumPy backend call `fastattn.attention`.

    ``keras.layers.MultiHeadAttention`` and ``GroupQueryAttention`` use it, and so does every model of them.
    It holds for the process, until `uninstall`. Results are Keras's up to rounding. So a query without any
    allowed key gets the mean of all values.

    Returns
    -------
    callable
        The function that it replaced.

    Raises
    ------
    RuntimeError
        Keras runs on another backend: ``KERAS_BACKEND=numpy`` chooses this one before Keras is imported.

    Notes
    -----
    Keras's layers compute scores themselves where ``dropout`` is not 0 (even at inference) or
    ``return_attention_scores=True``. The same layer with ``dropout=0`` takes the same weights. Models with
    attention of their own, as Llama, Gemma and T5 of KerasHub, keep it; docs/coming-from.md lists them.

    Examples
    --------
    >>> import keras  # with KERAS_BACKEND=numpy
    >>> import numpy as np
    >>> from fastattn.integrations.keras import installed
    >>> layer = keras.layers.MultiHeadAttention(num_heads=4, key_dim=8)
    >>> x = np.random.default_rng(0).standard_normal((2, 9, 16), dtype=np.float32)
    >>> with installed():
    ...     out = layer(x, x, use_causal_mask=True)
    >>> np.allclose(out, layer(x, x, use_causal_mask=True), atol=1e-5)
    True
    """
    if keras.config.backend() != "numpy":
        raise RuntimeError(f"Keras's backend must be numpy, got {keras.config.backend()}")
    before: Callable[..., Any] = nn.dot_product_attention
    nn.dot_product_attention = _dot_product_attention
    return before


def uninstall() -> None:
    """Give Keras's NumPy backend its own attention back."""
    nn.dot_product_attention = _keras_attention


@contextmanager
def installed() -> Iterator[None]:
    """`install` for the length of a ``with``, in all threads. The previous function is restored after it."""
    before = install()
    try:
        yield
    finally:
        nn.dot_product_attention = before


def _dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
    flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
) -> Any:
    """What Keras's function of this name returns, for (B, T, N, H) arrays."""
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
            layout="bshd",
            return_lse=True,
        )
    without_keys = np.isneginf(lse).swapaxes(1, 2)  # (B, T, N)
    if without_keys.any():
        mean = np.mean(value, axis=1, keepdims=True, dtype=lse.dtype).astype(out.dtype)
        group_size = out.shape[2] // mean.shape[2]
        np.copyto(out, mean.repeat(group_size, axis=2), where=without_keys[..., None])
    return out
