"""Attention of Hugging Face transformers on the CPU: ``attn_implementation="fastattn"``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import fastattn
from fastattn.integrations._common import caller_names, extra

with extra("transformers"):
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.masking_utils import eager_mask, sdpa_mask

from fastattn.integrations.torch import attention

#: Arguments of single models that change what attention is, or what it returns.
UNSUPPORTED = ("block_indices", "indices", "output_attentions", "sinks")
#: Models whose recurrent layers take these functions from their modules.
RECURRENT = (
    *("glm5_next", "kimi_linear", "lara_mini", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next"),
    "qwen4_exp",
)


def register(name: str = "fastattn", *, recurrent: bool = False) -> None:
    """Let models of transformers take ``attn_implementation=name``, for tensors of the CPU.

    Results are those of ``"sdpa"`` up to rounding, with gradients, for every model that calls transformers'
    ``AttentionInterface``: causal or not, with padding, grouped heads, caches, sliding windows and position
    biases. Unlike ``"sdpa"`` it has soft-caps (Gemma 2) and sinks of heads (gpt-oss). Keys and values of
    grouped heads are never repeated.

    Parameters
    ----------
    name : str, default "fastattn"
        ``"sdpa"`` or ``"paged|eager"`` replaces that of transformers: ``generate_batch`` accepts these two.
    recurrent : bool, default False
        Let recurrent layers (gated delta rule, Kimi delta attention) of every model in this process call
        `fastattn.gated_linear_attention` and `fastattn.causal_conv1d`, except where gradients are asked for.

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
    for model in RECURRENT if recurrent else ():
        module = import_module(f"transformers.models.{model}.modeling_{model}")
        for function, adapter in RECURRENT_FUNCTIONS.items():
            own = getattr(module, function, None)
            if own is not None and not isinstance(own, partial):
                setattr(module, function, partial(adapter, own))


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


def _needs_torch(*tensors: Any) -> bool:
    """Whether gradients are asked for, or tensors are on another device."""
    given = [x for x in tensors if x is not None]
    with_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    return with_gradients or not all(x.is_cpu for x in given)


@torch.compiler.disable
def _delta_rule(
    own: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(B, L, H, E) and the state, of query and key (B, L, K, D), value (B, L, H, E), g and beta (B, L, H).

    Kimi's g is (B, L, H, D). All is computed in float32, as there.
    """
    tensors = query, key, value, g, beta, initial_state
    if kwargs.get("cu_seqlens") is not None or _needs_torch(*tensors):
        kwargs |= {"initial_state": initial_state, "output_final_state": output_final_state}
        kwargs["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
        return own(query, key, value, g=g, beta=beta, **kwargs)
    dtype = query.dtype
    query, key, value, g, beta = (x.float() for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    groups = value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(groups, dim=2) for x in (query, key))
    options: dict[str, Any] = {"decay": g, "beta": beta, "state": initial_state, "return_state": True}
    out, state = fastattn.gated_linear_attention(query, key, value, layout="bshd", **options)
    return torch.as_tensor(out).to(dtype), torch.as_tensor(state) if output_final_state else None


@torch.compiler.disable
def _causal_conv1d(
    own: Callable[..., Any],
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    """(B, C, L) of hidden_states (B, C, L) and weight (C, W)."""
    if activation not in (None, "silu", "swish") or _needs_torch(hidden_states, weight, bias):
        return own(hidden_states, weight, bias, activation=activation, **kwargs)
    given: list[Any] = [None if x is None else x.detach() for x in (hidden_states, weight, bias)]
    out = fastattn.causal_conv1d(*given, activation=activation)
    return torch.as_tensor(out).to(hidden_states.dtype)


RECURRENT_FUNCTIONS = {
    "causal_conv1d_fn": _causal_conv1d,
    "chunk_kimi_delta_attention": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_rule,
}
