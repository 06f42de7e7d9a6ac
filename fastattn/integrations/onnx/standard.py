"""Operators of the domain ai.onnx, and those of its preview."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np

import fastattn
from fastattn.integrations._common import extra
from fastattn.integrations.onnx._common import (
    bound,
    check_choice,
    check_groups,
    check_shape,
    flat,
    heads,
    names_of_attention,
    names_of_rope,
    rules,
    with_past,
)

with extra("onnx"):
    from onnx.reference.op_run import OpRun
    from onnx.reference.ops.aionnx_preview.op_flex_attention import FlexAttention as _FlexAttention


class Attention(OpRun):
    """``Attention`` of opsets 23 to 25, with all four outputs.

    Y is computed without an L by S matrix, in float32 for 16-bit inputs. It is at least as exact as ONNX's
    own, whatever ``softmax_precision`` says. Only a graph with ``qk_matmul_output`` computes the matrix.
    """

    def _run(
        self,
        Q: np.ndarray,
        K: np.ndarray,
        V: np.ndarray,
        attn_mask: np.ndarray | None = None,
        past_key: np.ndarray | None = None,
        past_value: np.ndarray | None = None,
        nonpad_kv_seqlen: np.ndarray | None = None,
        is_causal: int | None = None,
        kv_num_heads: int | None = None,
        left_window_size: int | None = None,
        q_num_heads: int | None = None,
        qk_matmul_output_mode: int | None = None,
        right_window_size: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        softmax_precision: int | None = None,
    ) -> tuple[np.ndarray, ...]:
        if past_key is not None and nonpad_kv_seqlen is not None:
            raise ValueError("nonpad_kv_seqlen and past_key must not both be given")
        check_choice("qk_matmul_output_mode", qk_matmul_output_mode or 0, (0, 1, 2, 3))
        check_choice("softmax_precision", softmax_precision, (None, 1, 10, 11, 16))
        if attn_mask is not None and not attn_mask.ndim:
            raise ValueError("attn_mask must have an axis at least, got a number")
        if not Q.ndim == K.ndim == V.ndim:
            raise ValueError(f"Q, K and V must have as many axes, got {Q.shape}, {K.shape} and {V.shape}")
        is_flat = Q.ndim == 3
        if is_flat and not (q_num_heads and kv_num_heads):
            raise ValueError("q_num_heads and kv_num_heads must be given for inputs of three axes")
        Q = heads(Q, q_num_heads, "Q", "q_num_heads")
        K, V = (heads(x, kv_num_heads, name, "kv_num_heads") for x, name in ((K, "K"), (V, "V")))
        K, V, past = with_past(K, V, past_key, past_value)
        if nonpad_kv_seqlen is not None:
            check_shape("nonpad_kv_seqlen", nonpad_kv_seqlen, Q.shape[:1])
        options = rules(
            attn_mask, K.shape[2], past, nonpad_kv_seqlen, bool(is_causal),
            bound(left_window_size, "left_window_size"), bound(right_window_size, "right_window_size"),
        )  # fmt: skip
        options |= {"scale": scale, "softcap": softcap or None}
        mode = qk_matmul_output_mode or 0
        wants_scores = len(self.onnx_node.output) > 3 and self.onnx_node.output[3] != ""
        # V may be of another 16-bit type than Q.
        values = V if Q.dtype == V.dtype or V.itemsize != 2 else V.astype(np.float32)
        with names_of_attention():
            found = fastattn.attention(Q, K, values, **options, return_weights=wants_scores and mode == 3)
        out, scores = found if isinstance(found, tuple) else (found, np.empty(0, Q.dtype))
        if wants_scores and mode != 3:
            scores = _scores(Q, K, mode, **options)
        out = flat(out) if is_flat else out
        with np.errstate(over="ignore"):
            return out.astype(Q.dtype, copy=False), K, V, scores.astype(Q.dtype, copy=False)


def _scores(
    Q: np.ndarray, K: np.ndarray, mode: int, *, scale: float | None, softcap: float | None, **options: Any
) -> np.ndarray:
    """Scores: of mode 1 with the soft-cap, of mode 2 with mask and bias, of mode 0 as they are."""
    B, H, L, D = Q.shape
    wide = np.result_type(Q, np.float32)
    q = Q.astype(wide, copy=False).reshape(B, K.shape[1], -1, L, D)
    scores = (q @ K.astype(wide, copy=False)[:, :, None].swapaxes(-1, -2)).reshape(B, H, L, -1)
    scores *= 1 / sqrt(D) if scale is None else scale
    if softcap is not None and mode > 0:
        scores = np.tanh(scores / softcap) * softcap
    if mode == 2:
        zeros = np.zeros((B, H, L, 1), wide), np.zeros((B, K.shape[1], K.shape[2], 1), wide)
        bias = options.pop("bias", None)
        weights = fastattn.attention(*zeros, zeros[1], **options, return_weights=True)[1]
        scores += 0 if bias is None else bias
        scores[weights == 0] = -np.inf
    return scores.astype(Q.dtype, copy=False)


class RotaryEmbedding(OpRun):
    """``RotaryEmbedding`` of opset 23 on."""

    def _run(
        self,
        X: np.ndarray,
        cos_cache: np.ndarray,
        sin_cache: np.ndarray,
        position_ids: np.ndarray | None = None,
        interleaved: int | None = None,
        num_heads: int | None = None,
        rotary_embedding_dim: int | None = None,
    ) -> tuple[np.ndarray]:
        x = heads(X, num_heads, "X", "num_heads")
        B, _, L, D = x.shape
        half, is_odd = divmod(rotary_embedding_dim or D, 2)
        if is_odd or not 0 < 2 * half <= D:
            raise ValueError(
                f"rotary_embedding_dim must be even and at most the head size, or 0 where that is even; "
                f"got {rotary_embedding_dim or 0} and a head size of {D}"
            )
        if position_ids is None:  # a table for each item
            given, tables = "without", [(B, L, half), (1, L, half)]
        else:
            given, tables = "with", [(*cos_cache.shape[:1], half)]
            check_shape("position_ids", position_ids, (B, L), (1, L))
        because = f" {given} position_ids and for rotary_embedding_dim {2 * half}"
        check_shape("cos_cache", cos_cache, *tables, because=because)
        check_shape("sin_cache", sin_cache, cos_cache.shape)
        if position_ids is None:
            position_ids = np.arange(len(cos_cache) * L).reshape(len(cos_cache), L)
        cos_cache, sin_cache = (table.reshape(-1, half) for table in (cos_cache, sin_cache))
        with names_of_rope():
            rotated = fastattn.rope(
                x, cos_cache, sin_cache, positions=position_ids, interleaved=bool(interleaved)
            )
        return (flat(rotated) if X.ndim == 3 else rotated,)


class TensorScatter(OpRun):
    """``TensorScatter`` of opset 24 on: rows of each batch item into a cache."""

    def _run(
        self,
        past_cache: np.ndarray,
        update: np.ndarray,
        write_indices: np.ndarray | None = None,
        axis: int | None = None,
        mode: str | None = None,
    ) -> tuple[np.ndarray]:
        check_choice("mode", mode, (None, "linear", "circular"))
        shape, given = past_cache.shape, -2 if axis is None else axis
        if not -len(shape) <= given < len(shape) or given % len(shape) == 0:
            raise ValueError(f"axis must be one of past_cache's behind the first, got {given} for {shape}")
        at = given % len(shape)
        n, count = shape[at], update.shape[at] if update.ndim > at else 0
        if update.shape != (*shape[:at], count, *shape[at + 1 :]) or count > n:
            raise ValueError(f"update must fit past_cache {shape} on axis {at}, got {update.shape}")
        if update.dtype != past_cache.dtype:
            raise ValueError(f"update must have past_cache's dtype {past_cache.dtype}, got {update.dtype}")
        if write_indices is None:
            write_indices = np.zeros(shape[0], np.int64)
        check_shape("write_indices", write_indices, shape[:1])
        if write_indices.dtype.kind not in "iu":
            raise ValueError(f"write_indices must be integers, got dtype {write_indices.dtype}")
        starts = write_indices.tolist()
        if mode == "circular":
            starts = [start % max(n, 1) for start in starts]
        elif any(not 0 <= start <= n - count for start in starts):
            raise ValueError(
                f"write_indices must be in 0..{n - count} in linear mode, for {count} rows of {n}, got "
                f"{starts}; past_cache {shape}, update {update.shape}"
            )
        present = past_cache.copy()
        for cache, rows, start in zip(present, update, starts, strict=True):
            places = (start + np.arange(count)) % max(n, 1)
            cache.swapaxes(0, at - 1)[places] = rows.swapaxes(0, at - 1)
        return (present,)


class FlexAttention(_FlexAttention):
    """The preview of ``FlexAttention``. ONNX's own code runs graphs that change scores or weights."""

    def _run(
        self,
        Q: np.ndarray,
        K: np.ndarray,
        V: np.ndarray,
        scale: float | None = None,
        score_mod: Any = None,
        prob_mod: Any = None,
        softmax_precision: int | None = None,
        **others: Any,
    ) -> tuple[np.ndarray]:
        if score_mod is not None or prob_mod is not None:
            found: tuple[np.ndarray] = super()._run(
                Q, K, V, scale, score_mod, prob_mod, softmax_precision, **others
            )
            return found
        with names_of_attention():
            return (fastattn.attention(Q, K, V, scale=scale).astype(V.dtype, copy=False),)


#: Which inputs each update rule of `LinearAttention` needs beside query, key and value.
_GATES = {"linear": set(), "gated": {"decay"}, "delta": {"beta"}, "gated_delta": {"decay", "beta"}}


class LinearAttention(OpRun):
    """``LinearAttention`` of opset 27 on, by `fastattn.gated_linear_attention`."""

    def _run(
        self,
        query: np.ndarray,
        key: np.ndarray,
        value: np.ndarray,
        past_state: np.ndarray | None = None,
        decay: np.ndarray | None = None,
        beta: np.ndarray | None = None,
        chunk_size: int | None = None,
        kv_num_heads: int | None = None,
        q_num_heads: int | None = None,
        scale: float | None = None,
        update_rule: str | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        H, K = q_num_heads or 0, kv_num_heads or 0
        rule = update_rule or "gated_delta"
        check_choice("update_rule", rule, tuple(_GATES))
        check_groups("q_num_heads", H, K)
        for name, gate in {"decay": decay, "beta": beta}.items():
            if (gate is not None) != (name in _GATES[rule]):
                how = "needs" if gate is None else "takes no"
                raise ValueError(f"update_rule {rule!r} {how} {name}")
        for name, x in (("query", query), ("key", key), ("value", value)):
            check_shape(name, x, (*query.shape[:2], x.shape[-1]))
        B, T, _ = query.shape
        k, v = (heads(x, K, name, "kv_num_heads") for x, name in ((key, "key"), (value, "value")))
        D, E = k.shape[-1], v.shape[-1]
        check_shape("query", query, (B, T, H * D))
        if decay is not None:
            check_shape("decay", decay, (B, T, K), (B, T, K * D))
            decay = heads(decay, K, "decay", "kv_num_heads")
            decay = decay if decay.shape[-1] > 1 else decay[..., 0]
        if beta is not None:
            check_shape("beta", beta, (B, T, 1), (B, T, K))
            beta = beta.swapaxes(1, 2)
        if past_state is not None:
            check_shape("past_state", past_state, (B, K, D, E))
        out, state = fastattn.gated_linear_attention(
            heads(query, H, "query", "q_num_heads"), k, v, decay=decay, beta=beta, scale=scale or None,
            state=past_state, return_state=True,
        )  # fmt: skip
        return flat(out), state.astype(query.dtype if past_state is None else past_state.dtype)


class CausalConvWithState(OpRun):
    """``CausalConvWithState`` of opset 27 on, by `fastattn.causal_conv1d`."""

    def _run(
        self,
        input: np.ndarray,
        weight: np.ndarray,
        bias: np.ndarray | None = None,
        past_state: np.ndarray | None = None,
        activation: str | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        check_choice("activation", activation, (None, "none", "silu", "swish"))
        if input.ndim != 3 or weight.ndim != 3:
            raise ValueError(f"input and weight must have three axes, got {input.shape} and {weight.shape}")
        B, C, width = *input.shape[:2], weight.shape[2]
        check_shape("weight", weight, (C, 1, width))
        if bias is not None:
            check_shape("bias", bias, (C,))
        if past_state is not None:
            check_shape("past_state", past_state, (B, C, width - 1))
        chosen: Any = None if activation == "none" else activation
        return fastattn.causal_conv1d(
            input, weight[:, 0], bias, activation=chosen, state=past_state, return_state=True
        )
