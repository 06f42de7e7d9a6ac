"""Attention of Hugging Face transformers on the CPU: ``attn_implementation="fastattn"``."""

from __future__ import annotations

import sys
from typing import Any

from fastattn.integrations._common import caller_names, extra

with extra("transformers"):
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.masking_utils import eager_mask, sdpa_mask

from fastattn.integrations.torch import attention

#: Arguments of single models that change what attention is, or what it returns.
UNSUPPORTED = ("block_indices", "indices", "output_attentions", "sinks")


def register(name: str = "fastattn") -> None:
    """Let models of transformers take ``attn_implementation=name``, for tensors of the CPU.

    Results are those of ``"sdpa"`` up to rounding, with gradients, for every model that calls transformers'
    ``AttentionInterface``: causal or not, with padding, grouped heads, caches, sliding windows and position
    biases. Unlike ``"sdpa"`` it has soft-caps (Gemma 2) and sinks of heads (gpt-oss). Keys and values of
    grouped heads are never repeated.

    Notes
    -----
    Masks are those of ``"sdpa"``: bool, or none where causality suffices or all keys are allowed. Models that
    change masks themselves get floats. Dropout in training takes its seed from ``torch.manual_seed``. These
    are a ValueError: attention weights (``output_attentions=True``), and what a few models have, attention
    over chosen keys and sinks of each query. Tensors of a GPU are a TypeError. Models with attention code of
    their own (MPNet, Falcon, BLOOM) keep it silently. ``torch.compile`` breaks its graph here.

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
    AttentionMaskInterface.register(name, _attention_mask)


def _attention_mask(
    *,
    q_length: int,
    kv_length: int,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **given: Any,
) -> torch.Tensor | None:
    """The (B, 1, L, S) mask of a model: bool, or floats where the model itself may add it to scores.

    None means no mask, and in a causal layer ``"bottom_right"``, as a model may drop all but the last queries
    after the mask is made. So a static cache, whose last keys are not filled yet, needs a mask.
    """
    given |= {"q_length": q_length, "kv_length": kv_length, "config": config}
    if not _leaves_masks_alone(config):
        return eager_mask(**given)
    return sdpa_mask(allow_is_causal_skip=allow_is_causal_skip and q_length in (1, kv_length), **given)


def _leaves_masks_alone(config: Any) -> bool:
    """Whether a model only hands masks on to `AttentionInterface`, as flash attention and sdpa demand.

    Other models add masks to scores, unless the implementation is one of these two.
    """
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    names = vars(sys.modules.get(name, torch))
    models = [
        it
        for it in names.values()
        if isinstance(it, type) and issubclass(it, PreTrainedModel) and it.config_class is type(config)
    ]
    hand_on = (it._supports_sdpa or it._supports_flash_attn for it in models)
    return "ALL_ATTENTION_FUNCTIONS" in names and bool(models) and all(hand_on)


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
        bias = mask if bias is None else mask + bias
        mask = None
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    # A mask includes causality. A single query sees the whole cache.
    is_causal = is_causal and attention_mask is None and query.shape[2] > 1
    names = {"mask": "attention_mask", "scale": "scaling", "sinks": "s_aux"}
    names["bias"] = "attention_mask" if position_bias is None else "position_bias"
    with caller_names(names):
        out = attention(
            *(x.transpose(1, 2) for x in (query, key, value)),
            bias=bias,
            sinks=s_aux,
            mask=mask,
            causal="bottom_right" if is_causal else False,
            scale=scaling,
            softcap=softcap,
            layout="bshd",
            dropout=dropout,
            seed=int(torch.randint(2**63 - 1, ())) if dropout else None,
        )
    return out, None
