"""What takes the place of attention in the models of KerasHub that compute it themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial, update_wrapper
from importlib import import_module
from inspect import signature
from typing import Any

import numpy as np
from keras import ops
from keras.src.backend.numpy import nn

import fastattn
from fastattn.biases import Grid
from fastattn.integrations.keras._attention import Fused, dot_product_attention, fused, inference, zeros


def _softcapped(own: Callable[..., Any], query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
    """Keras's function, which refuses soft-caps on this backend."""
    function = own if options.get("attn_logits_soft_cap") is None else nn.dot_product_attention
    return function(query, key, value, *args, **options)


def _windowed(own: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """`fused` of classes that leave out their sliding window on GPUs."""
    given = signature(own).bind(Fused(self), *args, **kwargs)
    if getattr(self, "use_sliding_window_attention", self.sliding_window_size):
        mask, start = map(given.arguments.get, ("attention_mask", "cache_update_index"))
        given.arguments["attention_mask"] = self._mask_sliding_window(mask, cache_update_index=start or 0)
    return own(*given.args, **given.kwargs)


def _gpt_oss(
    own: Any, self: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, start_index: int = 0
) -> Any:
    mask = True if attention_mask is None else np.asarray(attention_mask, bool)[:, None]
    if self.sliding_window:
        rows = np.arange(query.shape[1])[:, None] + start_index
        mask = mask & (np.arange(key.shape[1]) >= rows - self.sliding_window)
    scale = self._inv_norm_factor
    return dot_product_attention(query, key, value, mask=mask, scale=scale, sinks=self.sinks)


def _gemma3n(
    own: Any, self: Any, query: Any, key: Any, value: Any, attention_mask: Any, training: bool = False
) -> Any:
    zeros.set(False)
    mask = None if attention_mask is None else attention_mask[:, None, :, : key.shape[2]]
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    return dot_product_attention(query, key, value, mask=mask, scale=1.0), None


def _gemma4_vision(
    own: Any, self: Any, q: Any, k: Any, v: Any, attention_mask: Any, training: bool = False
) -> Any:
    mask = None if attention_mask is None else attention_mask[:, None, None, :]
    return dot_product_attention(q, k, v, mask=mask, scale=1.0, attn_logits_soft_cap=self.logit_soft_cap)


def _flux(own: Any, query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False) -> Any:
    if dropout_p:  # of inference, too
        return own(query, key, value, dropout_p=dropout_p, is_causal=is_causal)
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    return dot_product_attention(query, key, value, is_causal=is_causal).swapaxes(1, 2)


def _gemma_image(
    own: Any,
    self: Any,
    inputs: Any,
    attention_mask: Any = None,
    return_attention_scores: Any = None,
    training: bool = False,
) -> Any:
    if return_attention_scores:
        return own(self, inputs, attention_mask, return_attention_scores)
    projected = (dense(inputs) for dense in (self.query_proj, self.key_proj, self.value_proj))
    query, key, value = (ops.reshape(x, (*x.shape[:2], self.num_heads, self.head_dim)) for x in projected)
    out = dot_product_attention(query, key, value, bias=attention_mask)
    return self.out_proj(ops.reshape(out, (*out.shape[:2], -1))), None


def _deberta(own: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    layer: Any = Fused(self)
    if not signature(own).bind(self, *args, **kwargs).arguments.get("return_attention_scores"):
        layer._compute_attention = partial(_disentangled, self)
    return own(layer, *args, **kwargs)


def _disentangled(
    layer: Any,
    query: Any,
    key: Any,
    value: Any,
    rel_embeddings: Any,
    attention_mask: Any = None,
    training: Any = None,
) -> Any:
    bias = layer._compute_disentangled_attention(query=query, key=key, rel_embeddings=rel_embeddings)
    mask = None if attention_mask is None else ops.reshape(attention_mask, (len(query), 1, -1, key.shape[1]))
    return dot_product_attention(query, key, value, bias, mask, layer.scale_factor), None


def _xlnet(own: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    given = signature(own).bind(self, *args, **kwargs).arguments
    query, key, segments = given["query"], given["key"], given.get("segment_matrix")
    scores = ops.einsum("bsnd,btnd->bnts", given["position"], query + given["positional_attention_bias"])
    bias = own.__globals__["_rel_shift"](scores, klen=key.shape[1])
    if segments is not None:
        query_of_segments = query + given["segment_attention_bias"]
        of_segments = ops.einsum("bind,snd->bnis", query_of_segments, given["segment_encoding"])
        bias = bias + ops.where(segments[:, None], of_segments[..., 1:], of_segments[..., :1])
    mask, scale = given.get("attention_mask"), self._key_dim**-0.5
    mask = None if mask is None else mask.reshape(len(mask), -1, *mask.shape[-2:])
    query = query + given["content_attention_bias"]
    return dot_product_attention(query, key, given["value"], bias * scale, mask, scale)


def _with_cache(cache: Any, index: Any, key_value: Callable[[], Any]) -> tuple[Any, Any, Any]:
    """Keys, values and the cache that a decoder's layer goes on with."""
    if cache is None:
        return *key_value(), None
    if index is not None:
        cache = np.array(cache)
        new = np.stack(key_value(), 1)
        cache[:, :, index : index + new.shape[2]] = new
    return cache[:, 0], cache[:, 1], cache


def _t5(
    own: Any,
    self: Any,
    hidden_states: Any,
    mask: Any = None,
    key_value_states: Any = None,
    position_bias: Any = None,
    cache: Any = None,
    cache_update_index: Any = None,
    training: Any = False,
) -> Any:
    def heads(x: Any) -> Any:
        return ops.reshape(x, (*x.shape[:2], self.num_heads, self.key_value_dim))

    x = hidden_states if key_value_states is None else key_value_states
    key, value, cache = _with_cache(
        cache, cache_update_index, lambda: (heads(self.key_projector(x)), heads(self.value_projector(x)))
    )
    if position_bias is None:
        position_bias = np.zeros((1, 1, 1, 1), self.compute_dtype)
        if self.use_relative_attention_bias:
            lengths = hidden_states.shape[1], key.shape[1]
            position_bias = self.compute_bias(*lengths, query_start_index=cache_update_index or 0)
        if mask is not None:
            position_bias = position_bias + (1.0 - ops.cast(mask[:, None], position_bias.dtype)) * -1e9
    out = dot_product_attention(
        heads(self.query_projector(hidden_states)), key, value, position_bias, scale=1.0
    )
    return self.output_projector(ops.reshape(out, (*out.shape[:2], -1))), position_bias, cache


def _bloom(own: Any, self: Any, hidden_states: Any, *args: Any, **given: Any) -> Any:
    dense = self._query_dense, self._key_dense, self._value_dense, self._output_dense
    return _alibi(dense, hidden_states, self._alibi_layer, self.inv_norm_factor, *args, **given)


def _falcon(own: Any, self: Any, inputs: Any, alibi: Any, *args: Any, **given: Any) -> Any:
    dense = self.query_dense, self.key_dense, self.value_dense, self.output_dense
    scale = self.inv_norm_factor
    return _alibi(dense, inputs, lambda scores: alibi * scale, scale, *args, **given)


def _alibi(
    dense: tuple[Any, ...],
    x: Any,
    bias: Callable[[Any], Any],
    scale: float,
    attention_mask: Any = None,
    cache: Any = None,
    cache_update_index: Any = None,
) -> Any:
    query_dense, key_dense, value_dense, output_dense = dense
    query = query_dense(x)
    key, value, new_cache = _with_cache(cache, cache_update_index, lambda: (key_dense(x), value_dense(x)))
    added = bias(np.zeros((1, query.shape[2], 1, key.shape[1]), query.dtype))
    mask = None if attention_mask is None else attention_mask[:, None]
    out = dot_product_attention(query, key, value, added, mask, scale)
    out = output_dense(ops.reshape(out, (*out.shape[:2], -1)))
    return out if cache is None else (out, new_cache)


def _sam(own: Any, self: Any, query: Any, value: Any, key: Any) -> Any:
    projected = self.query_proj(query), self.key_proj(key), self.value_proj(value)
    out = dot_product_attention(*(ops.reshape(x, (*x.shape[:2], self.num_heads, -1)) for x in projected))
    return self.out_proj(ops.reshape(out, (*out.shape[:2], -1)))


def _vit_det(own: Any, self: Any, x: Any) -> Any:
    batch, height, width, _ = x.shape
    qkv = ops.reshape(self.qkv(x), (batch, height * width, 3, self.num_heads, self.key_dim))
    query, key, value = (qkv[:, :, i] for i in range(3))
    bias = None
    if self.use_rel_pos:
        added = self.add_decomposed_relative_pe
        grid = ops.reshape(query.swapaxes(1, 2), (batch, self.num_heads, height, width, self.key_dim))
        tables = (
            added._get_rel_pos(n, n, t) for n, t in ((height, added.rel_pos_h), (width, added.rel_pos_w))
        )
        terms = map(ops.einsum, ("bnhwc,hkc->bnhwk", "bnhwc,wkc->bnhwk"), (grid, grid), tables)
        bias = Grid(*(ops.reshape(t, (batch, self.num_heads, height * width, -1)) for t in terms))
    out = fastattn.attention(query, key, value, bias=bias, scale=self.scale, layout="bshd")
    return self.projection(ops.reshape(out, x.shape))


def _mit(own: Any, self: Any, x: Any) -> Any:
    query, reduced = self.q(x), x
    if self.sr_ratio > 1:
        side = math.isqrt(x.shape[1])
        reduced = self.sr(ops.reshape(x, (len(x), side, side, -1)))
        reduced = self.norm(ops.reshape(reduced, (len(x), -1, x.shape[2])))
    projected = query, self.k(reduced), self.v(reduced)
    query, key, value = (ops.reshape(p, (*p.shape[:2], self.num_heads, -1)) for p in projected)
    return self.proj(ops.reshape(dot_product_attention(query, key, value, scale=self.scale), x.shape))


_FUSED = (
    "gemma.gemma_attention:CachedGemmaAttention",
    "gemma3.gemma3_attention:CachedGemma3Attention",
    "gemma4.gemma4_attention:Gemma4TextAttention",
    "gpt_neo_x.gpt_neo_x_attention:GPTNeoXAttention",
    "llama.llama_attention:LlamaAttention",
    "mistral.mistral_attention:CachedMistralAttention",
    "mixtral.mixtral_attention:CachedMixtralAttention",
    "phi3.phi3_attention:Phi3Attention",
    "smollm3.smollm3_layers:SmolLM3Attention",
    "stable_diffusion_3.mmdit:MMDiTBlock",
    "t5gemma.t5gemma_attention:T5GemmaAttention",
    "t5gemma2.t5gemma2_attention:T5Gemma2Attention",
    "t5gemma2.t5gemma2_attention:T5Gemma2MergedAttention",
)
_WINDOWED = (
    "qwen.qwen_attention:QwenAttention",
    "qwen_moe.qwen_moe_attention:QwenMoeAttention",
    "qwen3.qwen3_attention:Qwen3Attention",
    "qwen3_moe.qwen3_moe_attention:Qwen3MoeAttention",
    "qwen3_5.qwen3_5_attention:Qwen3_5Attention",
)
#: Modules of KerasHub, the name in each that computes attention, and what does so in its place.
MODELS: dict[str, Callable[..., Any]] = {
    **{f"{name}._compute_attention": fused for name in _FUSED},
    **{f"{name}._compute_attention": _windowed for name in _WINDOWED},
    "bloom.bloom_attention:BloomAttention.call": _bloom,
    "deberta_v3.disentangled_self_attention:DisentangledSelfAttention.call": _deberta,
    "falcon.falcon_attention:FalconAttention.call": _falcon,
    "flux.flux_maths:scaled_dot_product_attention": _flux,
    "gemma3.gemma3_vision_encoder:Gemma3VisionAttention.call": _gemma_image,
    "gemma3n.gemma3n_attention:Gemma3nTextAttention._compute_attention": _gemma3n,
    "gemma4.gemma4_attention:Gemma4VisionAttention._compute_attention": _gemma4_vision,
    "gpt_oss.gpt_oss_attention:GptOssAttention._compute_attention": _gpt_oss,
    "mit.mit_layers:SegFormerMultiheadAttention.call": _mit,
    "pali_gemma.pali_gemma_vit:PaliGemmaVitAttention.call": _gemma_image,
    "sam.sam_layers:MultiHeadAttentionWithDownsampling.call": _sam,
    "t5.t5_multi_head_attention:T5MultiHeadAttention.call": _t5,
    "vit_det.vit_layers:MultiHeadAttentionWithRelativePE.call": _vit_det,
    "xlnet.relative_attention:TwoStreamRelativeAttention.compute_attention": _xlnet,
}


def replaced_of_models() -> Iterator[tuple[Any, str, Any]]:
    """Owner, name and replacement."""
    own = ops.dot_product_attention
    yield ops, "dot_product_attention", update_wrapper(partial(_softcapped, own), own)
    for path, adapter in MODELS.items():
        module_name, names = path.split(":")
        module = owner = import_module(f"keras_hub.src.models.{module_name}")
        *owners, name = names.split(".")
        for it in owners:
            owner = getattr(owner, it)
        yield owner, name, inference(getattr(owner, name), adapter)
        if hasattr(module, "fused_attention_op_available"):  # asks for a GPU
            yield module, "fused_attention_op_available", lambda: True
