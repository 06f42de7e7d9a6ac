"""Attention of Tokamax on the CPU: one more of its implementations."""

from __future__ import annotations

from typing import Any

from fastattn.integrations._common import extra

with extra("tokamax"):
    import jax
    import jax.numpy as jnp
    from tokamax._src.ops.attention import api, base

from fastattn.integrations.jax import attention

_OWN = (api.IMPLEMENTATIONS, api._DEFAULT_IMPLEMENTATION)
_DTYPES = ("float16", "bfloat16", "float32", "float64")


def register() -> None:
    """Let ``tokamax.dot_product_attention`` know ``implementation="fastattn"``, and take it first by default.

    Results are those of ``implementation="xla"`` up to rounding, but for a query without any allowed key,
    which gets 0. By default Tokamax's own code follows where this one has no answer: on a GPU or TPU, for
    quantized arrays, a sharding, symbolic sizes, or a bias under a soft-cap, which here is added after it.

    Notes
    -----
    It is `fastattn.integrations.jax.attention`: differentiable once, in reverse mode. `precision` is ignored.
    A `local_window_size` is an ``L x S`` mask.

    Examples
    --------
    >>> import jax
    >>> import tokamax
    >>> from fastattn.integrations.tokamax import register
    >>> register()
    >>> x = jax.random.normal(jax.random.key(0), (1, 128, 4, 32))
    >>> tokamax.dot_product_attention(x, x, x, is_causal=True, implementation="fastattn").shape
    (1, 128, 4, 32)
    """
    implementations, default = _OWN
    api.IMPLEMENTATIONS = implementations | {"fastattn": _attend}
    api._DEFAULT_IMPLEMENTATION = ("fastattn", *default)


def unregister() -> None:
    """Leave Tokamax with its own implementations."""
    api.IMPLEMENTATIONS, api._DEFAULT_IMPLEMENTATION = _OWN


def _attend(
    query: Any,
    key: Any,
    value: Any,
    *,
    bias: Any,
    mask: Any,
    logits_scale: Any,
    logits_soft_cap: float | None,
    q_sharding: Any,
    **_: Any,
) -> jax.Array:
    """As `api.dot_product_attention` calls an implementation; NotImplementedError hands on to the next."""
    arrays = (query, key, value)
    for reason, is_so in {
        "a device that is no CPU": jax.default_backend() != "cpu",
        "q_sharding": q_sharding is not None,
        "quantized arrays": any(isinstance(x, base.QArray) or x.dtype not in _DTYPES for x in arrays),
        "a bias under a soft-cap": bias is not None and logits_soft_cap is not None,
    }.items():
        if is_so:
            raise NotImplementedError(f"fastattn does not take {reason}")
    mask, is_causal = mask.take("is_causal")
    lengths = None
    if mask.k_end is not None and mask.k_end.shape[-2:] == (1, 1):  # the same for all heads and queries
        mask, ends = mask.take("k_end")
        lengths = jnp.clip(ends[..., 0, 0], 0, key.shape[-3])
    out = attention(
        *(x.swapaxes(-3, -2) for x in arrays),
        mask=mask.as_array(query.shape[-3], key.shape[-3]),
        bias=bias,
        key_lengths=lengths,
        causal="top_left" if is_causal else False,
        scale=None if logits_scale is base.AUTO else logits_scale,
        softcap=logits_soft_cap,
    )
    return out.swapaxes(-3, -2).astype(query.dtype)
