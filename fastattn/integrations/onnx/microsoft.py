"""Operators of the domain com.microsoft, which onnxruntime's optimizer, Olive and optimum write.

They compute what onnxruntime 1.32 does on the CPU, in float32 for float16. Inputs, attributes and outputs
that are not taken raise a NotImplementedError with their name.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np

import fastattn
from fastattn.integrations._common import caller_names, extra
from fastattn.integrations.onnx._cached import cached, lengths_of
from fastattn.integrations.onnx._common import (
    check_choice,
    check_groups,
    check_shape,
    flat,
    heads,
    rules,
    with_past,
)

with extra("onnx"):
    from onnx.reference.op_run import OpRun

#: A ValueError, as ONNX hides the text of a TypeError.
_names = partial(
    caller_names,
    {
        "bias": "attention_bias", "sinks": "head_sink", "key_lengths": "seqlens_k", "x": "query",
        "cos": "cos_cache", "sin": "sin_cache", "positions": "position_ids",
    },
    ValueError,
)  # fmt: skip


class _Operator(OpRun):
    op_domain = "com.microsoft"
    op_schema = None  # that of ai.onnx is of another operator

    def _refuse(self, num_outputs: int, **given: Any) -> None:
        """Raise for inputs and attributes that are given, and for outputs beyond these."""
        outputs = {f"output {n}": name for n, name in enumerate(self.onnx_node.output) if n >= num_outputs}
        for name, x in {**given, **outputs}.items():
            # Without weights of a norm its epsilon says nothing.
            if isinstance(x, np.ndarray) or (x and not name.endswith("norm_epsilon")):
                raise NotImplementedError(f"{name} of com.microsoft's {type(self).__name__} is not computed")


class Attention(_Operator):
    """``Attention``: projections, and attention of each item to itself and to what was before it.

    Keys that `mask_index` hides have ``mask_filter_value`` added to their scores. A query that sees no others
    attends to them, as in onnxruntime. `do_rotary`, `past_present_share_buffer` and masks of four axes are
    not taken, neither here nor there.
    """

    def _run(
        self,
        input: np.ndarray,
        weights: np.ndarray,
        bias: np.ndarray | None = None,
        mask_index: np.ndarray | None = None,
        past: np.ndarray | None = None,
        attention_bias: np.ndarray | None = None,
        past_sequence_length: np.ndarray | None = None,
        mask_filter_value: float | None = None,
        num_heads: int | None = None,
        qkv_hidden_sizes: list[int] | None = None,
        rotary_embedding_dim: int | None = None,
        scale: float | None = None,
        unidirectional: int | None = None,
        **others: Any,
    ) -> tuple[np.ndarray, ...]:
        # past_sequence_length belongs to past_present_share_buffer, rotary_embedding_dim to do_rotary.
        self._refuse(2, **others)
        if input.ndim != 3 or weights.ndim != 2:
            raise ValueError(
                f"input must have three axes and weights two, got {input.shape} and {weights.shape}"
            )
        B, L, size = input.shape
        sizes = tuple(qkv_hidden_sizes or [weights.shape[1] // 3] * 3)
        if len(sizes) != 3 or sizes[0] != sizes[1] or min(sizes) <= 0:
            raise ValueError(f"qkv_hidden_sizes must be three, the first two equal, got {sizes}")
        check_shape("weights", weights, (size, sum(sizes)), because=f" for qkv_hidden_sizes {sizes}")
        wide = np.result_type(input, np.float32)
        qkv = input.astype(wide, copy=False) @ weights.astype(wide, copy=False)
        if bias is not None:
            check_shape("bias", bias, (sum(sizes),))
            qkv += bias
        query, key, value = (
            _heads(x, num_heads, f"the projected {name}")
            for name, x in zip(
                ("query", "key", "value"), np.split(qkv, np.cumsum(sizes)[:2], axis=2), strict=True
            )
        )
        if past is not None:
            P = past.shape[3] if past.ndim == 5 else 0
            for x in (key, value):
                check_shape("past", past, (2, *x.shape[:2], P, x.shape[3]))
        key, value, before = with_past(key, value, *((None, None) if past is None else past))
        T = before + L
        padding = None
        if mask_index is not None:
            one = ((B, 1), (1, 1))  # one value for all keys, which says nothing
            shapes = (B,), (2 * B,), (3 * B + 2,), (B, T), (B, L, T)
            check_shape("mask_index", mask_index, *shapes, *one)
            if T == 1 or mask_index.shape not in one:
                padding = _padding(mask_index, B, T, mask_filter_value)
        out = _attend(query, key, value, before, attention_bias, padding, scale, unidirectional)
        results = [flat(out)]
        if any(self.onnx_node.output[1:]):
            if sizes[1] != sizes[2]:
                raise ValueError(f"qkv_hidden_sizes must be equal where present is asked for, got {sizes}")
            results.append(np.stack((key, value)))
        return _as(input.dtype, *results)


class MultiHeadAttention(_Operator):
    """``MultiHeadAttention``: of queries, keys and values that are apart or packed.

    Keys that `key_padding_mask` hides have ``mask_filter_value`` added to their scores. A query that sees no
    others attends to them, as in onnxruntime. `past_sequence_length`, `cache_indirection` and the output `qk`
    are not taken.
    """

    def _run(
        self,
        query: np.ndarray,
        key: np.ndarray | None = None,
        value: np.ndarray | None = None,
        bias: np.ndarray | None = None,
        key_padding_mask: np.ndarray | None = None,
        attention_bias: np.ndarray | None = None,
        past_key: np.ndarray | None = None,
        past_value: np.ndarray | None = None,
        past_sequence_length: np.ndarray | None = None,
        cache_indirection: np.ndarray | None = None,
        mask_filter_value: float | None = None,
        num_heads: int | None = None,
        scale: float | None = None,
        unidirectional: int | None = None,
        **others: Any,
    ) -> tuple[np.ndarray, ...]:
        self._refuse(
            3, past_sequence_length=past_sequence_length, cache_indirection=cache_indirection, **others
        )
        H = num_heads or 0
        q, k, v = _unpacked(query, key, value, H)
        if not (len(q) == len(k) == len(v) and k.shape[2] == v.shape[2] and k.shape[3] == q.shape[3]):
            raise ValueError(
                f"query, key and value must have one batch size, query and key one head size, key and value "
                f"one length, got as heads {q.shape}, {k.shape} and {v.shape}"
            )
        is_cached = key is not None and key.ndim == 4
        if is_cached and past_key is not None:
            raise ValueError(f"past_key must not be given with a key of four axes, got key {k.shape}")
        if bias is not None:
            D, E = q.shape[3], v.shape[3]
            check_shape("bias", bias, (H * (2 * D + E),))
            wide = np.result_type(query, np.float32)
            of_q, of_k, of_v = (x.astype(wide).reshape(H, 1, -1) for x in np.split(bias, [H * D, 2 * H * D]))
            # Keys and values of four axes are of an earlier call, which has added theirs.
            q, k, v = (q + of_q, k, v) if is_cached else (q + of_q, k + of_k, v + of_v)
        k, v, before = with_past(k, v, past_key, past_value)
        B, _, L, _ = q.shape
        T = k.shape[2]
        padding = None
        if key_padding_mask is not None:
            check_shape("key_padding_mask", key_padding_mask, (B,), (3 * B + 2,), (B, T), (B, L, T))
            padding = _padding(key_padding_mask, B, T, mask_filter_value)
        out = _attend(q, k, v, before, attention_bias, padding, scale, unidirectional)
        return _as(query.dtype, flat(out), k, v)


class GroupQueryAttention(_Operator):
    """``GroupQueryAttention``: attention to a cache of keys and values, which may be 8-bit or 4-bit.

    Rows of present_key and present_value behind the new ones are zeros. `query_seqlens`,
    `sliding_window_cache`, weights of norms and the output `output_qk` are not taken.
    """

    def _run(
        self,
        query: np.ndarray,
        key: np.ndarray | None,
        value: np.ndarray | None,
        past_key: np.ndarray | None,
        past_value: np.ndarray | None,
        seqlens_k: np.ndarray,
        total_sequence_length: np.ndarray,
        cos_cache: np.ndarray | None = None,
        sin_cache: np.ndarray | None = None,
        position_ids: np.ndarray | None = None,
        attention_bias: np.ndarray | None = None,
        head_sink: np.ndarray | None = None,
        k_scale: np.ndarray | None = None,
        v_scale: np.ndarray | None = None,
        q_norm_weight: np.ndarray | None = None,
        k_norm_weight: np.ndarray | None = None,
        query_seqlens: np.ndarray | None = None,
        causal: int | None = None,
        do_rotary: int | None = None,
        k_quant_type: str | None = None,
        kv_cache_bit_width: int | None = None,
        kv_num_heads: int | None = None,
        local_window_size: int | None = None,
        num_heads: int | None = None,
        rotary_interleaved: int | None = None,
        scale: float | None = None,
        smooth_softmax: int | None = None,
        softcap: float | None = None,
        v_quant_type: str | None = None,
        **others: Any,
    ) -> tuple[np.ndarray, ...]:
        self._refuse(
            3, q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight, query_seqlens=query_seqlens, **others
        )
        H, K = num_heads or 0, kv_num_heads or 0
        check_groups("num_heads", H, K)
        if (key is None) != (value is None) or (past_key is None) != (past_value is None):
            raise ValueError("key and value must be given together, and past_key and past_value")
        if key is None or value is None:
            qkv = _heads(query, H + 2 * K, "query", "num_heads + 2 * kv_num_heads")
            q, k, v = np.split(qkv, [H, H + K], axis=1)
        else:
            q = _heads(query, H, "query")
            for name, x in (("key", key), ("value", value)):
                check_shape(name, x, (*query.shape[:2], K * q.shape[3]))
            k, v = (_heads(x, K, "key", "kv_num_heads") for x in (key, value))
        B, _, L, _ = q.shape
        total, lengths, starts = lengths_of(seqlens_k, total_sequence_length, B, L)
        is_first = total == L
        if do_rotary:
            if cos_cache is None or sin_cache is None:
                raise ValueError("cos_cache and sin_cache must be given for do_rotary")
            positions = starts[:, None] + np.arange(L)
            if position_ids is not None:
                check_shape("position_ids", position_ids, (B, L))
                # As in onnxruntime: the first of all is where a prompt starts.
                positions = position_ids[:1, :1] + positions if is_first else position_ids
            with _names():
                q, k = (
                    fastattn.rope(
                        x, cos_cache, sin_cache, positions=positions, interleaved=bool(rotary_interleaved)
                    )
                    for x in (q, k)
                )
        store = partial(cached, starts=starts, total=total, bits=kv_cache_bit_width or 0)
        present_key, k = store("k", k, past_key, k_scale, k_quant_type)
        present_value, v = store("v", v, past_value, v_scale, v_quant_type)
        _check_bias(attention_bias, B, H, L, total)
        window = -1 if local_window_size is None else local_window_size
        check_choice("causal", causal, (None, 0, 1))
        if window != -1 and (window <= 0 or causal == 0):
            raise ValueError(f"local_window_size must be -1, or positive and with causal, got {window}")
        aligned: Literal["top_left", "bottom_right"] = "top_left" if is_first else "bottom_right"
        if head_sink is None and smooth_softmax == 1:
            head_sink = np.zeros(H, np.float32)
        with _names():
            out = fastattn.attention(
                q, k, v, key_lengths=lengths, causal=False if causal == 0 else aligned,
                window=None if window == -1 else (window - 1, None), bias=attention_bias, scale=scale or None,
                softcap=softcap or None, sinks=head_sink,
            )  # fmt: skip
        return *_as(query.dtype, flat(out)), present_key, present_value


def _heads(x: np.ndarray, num_heads: int | None, name: str, attribute: str = "num_heads") -> np.ndarray:
    if x.ndim != 3:
        raise ValueError(f"{name} must have three axes, got {x.shape}")
    return heads(x, num_heads, name, attribute)


def _check_packed(name: str, x: np.ndarray, num_heads: int, count: int, **others: np.ndarray | None) -> None:
    check_shape(name, x, (*x.shape[:2], num_heads, count, x.shape[4]))
    for other, given in others.items():
        if given is not None:
            raise ValueError(f"{other} must not be given with a {name} of five axes, {name} {x.shape}")


def _unpacked(
    query: np.ndarray, key: np.ndarray | None, value: np.ndarray | None, num_heads: int
) -> tuple[np.ndarray, ...]:
    """Each as (B, H, L, D), from (B, L, H * D), (B, H, L, D) or together as (B, L, H, 3 or 2, D)."""
    if query.ndim == 5:
        _check_packed("query", query, num_heads, 3, key=key, value=value)
        return tuple(query.transpose(3, 0, 2, 1, 4))
    q = _heads(query, num_heads, "query")
    if key is not None and key.ndim == 5:
        _check_packed("key", key, num_heads, 2, value=value)
        return q, *key.transpose(3, 0, 2, 1, 4)
    if key is None or value is None or key.ndim != value.ndim:
        raise ValueError("key and value must be given, with as many axes, unless one input packs them")
    return q, *(heads(x, num_heads, name, "num_heads") for name, x in (("key", key), ("value", value)))


def _padding(mask: np.ndarray, B: int, T: int, filter_value: float | None) -> np.ndarray:
    """A bias, (B, 1, 1 or L, T): `filter_value` at keys that lengths, starts or a mask leave out."""
    if mask.ndim > 1:
        allowed = mask > 0
    else:
        allowed = np.arange(T) < mask[:B, None]
        if len(mask) == 2 * B:
            allowed &= np.arange(T) >= mask[B:, None]
    hidden = np.float32(-10000.0 if filter_value is None else filter_value)
    return np.where(allowed[:, None, None] if allowed.ndim == 2 else allowed[:, None], np.float32(0), hidden)


def _check_bias(bias: np.ndarray | None, B: int, H: int, L: int, T: int) -> None:
    if bias is not None:
        check_shape("attention_bias", bias, *((b, h, L, T) for b in (B, 1) for h in (H, 1)))


def _attend(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    before: int,
    attention_bias: np.ndarray | None,
    padding: np.ndarray | None,
    scale: float | None,
    unidirectional: int | None,
) -> np.ndarray:
    """What Attention and MultiHeadAttention share; `before` keys stand before the first query."""
    B, H, L, _ = query.shape
    T = key.shape[2]
    is_causal = unidirectional == 1 and L > 1
    if is_causal and T - before != L:
        raise ValueError(f"unidirectional must be 0 for {L} queries and {T - before} keys")
    _check_bias(attention_bias, B, H, L, T)
    biases = tuple(x for x in (attention_bias, padding) if x is not None)
    with _names():
        return fastattn.attention(
            query, key, value, bias=biases or None, scale=scale or None,
            **rules(None, T, before, None, is_causal, None, None),
        )  # fmt: skip


def _as(dtype: np.dtype, *results: np.ndarray) -> tuple[np.ndarray, ...]:
    with np.errstate(over="ignore"):
        return tuple(x.astype(dtype, copy=False) for x in results)
