"""Attention of Hugging Face transformers on the CPU: ``attn_implementation="fastattn"``."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from fastattn.integrations.torch import attention

#: Arguments of single models that change what attention is, or what it returns.
UNSUPPORTED = ("block_indices", "indices", "output_attentions", "sinks")


def register(name: str = "fastattn") -> None:
    """Let models of transformers take ``attn_implementation=name``, for tensors of the CPU.

    Results are those of ``"sdpa"`` up to rounding, with gradients, for every model that calls transformers'
    `AttentionInterface`: causal or not, with padding, grouped heads, caches, sliding windows and biases of
    positions. Beside that, soft-caps (Gemma 2) and sinks of heads (gpt-oss), which ``"sdpa"`` has not.
    Keys and values of grouped heads are read as they are, never repeated.

    Notes
    -----
    The masks are those of ``"sdpa"``: none where causality or nothing says it all, else bool. Dropout in
    training takes its seed from ``torch.manual_seed``. Attention weights (``output_attentions=True``) and
    attention over chosen keys or with sinks of each query, which a few models have, are a ValueError; tensors
    of a GPU a TypeError. Models whose attention is their own code never ask for it. Under ``torch.compile``
    the graph is broken here, so ``fullgraph=True`` is refused by it.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from fastattn.integrations.transformers import register
    >>> register()
    >>> sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 99}
    >>> config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    >>> model = LlamaForCausalLM._from_config(config, attn_implementation="fastattn")
    >>> model(torch.arange(7)[None]).logits.shape
    torch.Size([1, 7, 99])
    """
    AttentionInterface.register(name, _attention_forward)
    AttentionMaskInterface.register(name, sdpa_mask)


@torch.compiler.disable
def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """(B, L, H, E) of query (B, H, L, D), key (B, K, S, D) and value (B, K, S, E), as transformers asks."""
    for name in UNSUPPORTED:
        if (got := kwargs.get(name)) is not None and got is not False:
            raise ValueError(f'{name} is not supported by fastattn; attn_implementation="eager" may have it')
    mask, bias = attention_mask, position_bias
    if mask is not None and mask.is_floating_point():
        mask, bias = None, mask if bias is None else mask + bias
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    # As in sdpa_attention_forward: a mask says all, and one query is the last of the cache.
    is_causal = is_causal and attention_mask is None and query.shape[2] > 1
    out = attention(
        *(x.transpose(1, 2) for x in (query, key, value)),
        bias=bias,
        sinks=s_aux,
        mask=mask,
        causal="top_left" if is_causal else False,
        scale=scaling,
        softcap=softcap,
        layout="bshd",
        dropout=dropout,
        seed=int(torch.randint(2**63 - 1, ())) if dropout else None,
    )
    return out, None
