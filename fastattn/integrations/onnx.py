"""Operators of ONNX, for its reference evaluator: attention without matrices of scores.

>>> import numpy as np
>>> from onnx import parser
>>> from onnx.reference import ReferenceEvaluator
>>> from fastattn.integrations.onnx import operators
>>> model = parser.parse_model(
...     "<ir_version: 10, opset_import: ['' : 23]> g (float[2,8,100,64] x) => (float[2,8,100,64] y)"
...     "{ y = Attention<is_causal=1>(x, x, x) }".replace("'", '"')
... )
>>> x = np.random.default_rng(0).standard_normal((2, 8, 100, 64), dtype=np.float32)
>>> ours = ReferenceEvaluator(model, new_ops=operators).run(None, {"x": x})
>>> np.allclose(ours, ReferenceEvaluator(model).run(None, {"x": x}), atol=1e-5)
True
"""

from __future__ import annotations

from functools import partial, reduce
from math import sqrt
from operator import and_
from typing import Any

import numpy as np

import fastattn
from fastattn import masks
from fastattn.integrations._common import caller_names, extra

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
        if (past_key is None) != (past_value is None):
            raise ValueError("past_key and past_value must be given together")
        if past_key is not None and nonpad_kv_seqlen is not None:
            raise ValueError("nonpad_kv_seqlen and past_key must not both be given")
        _check_choice("qk_matmul_output_mode", qk_matmul_output_mode or 0, (0, 1, 2, 3))
        _check_choice("softmax_precision", softmax_precision, (None, 1, 10, 11, 16))
        if attn_mask is not None and not attn_mask.ndim:
            raise ValueError("attn_mask must have an axis at least, got a number")
        if not Q.ndim == K.ndim == V.ndim:
            raise ValueError(f"Q, K and V must have as many axes, got {Q.shape}, {K.shape} and {V.shape}")
        is_flat = Q.ndim == 3
        if is_flat and not (q_num_heads and kv_num_heads):
            raise ValueError("q_num_heads and kv_num_heads must be given for inputs of three axes")
        Q = _heads(Q, q_num_heads, "Q", "q_num_heads")
        K, V = (_heads(x, kv_num_heads, name, "kv_num_heads") for x, name in ((K, "K"), (V, "V")))
        past = 0
        if past_key is not None and past_value is not None:
            past = past_key.shape[2] if past_key.ndim == 4 else 0
            for name, x, new in (("past_key", past_key, K), ("past_value", past_value, V)):
                _check_shape(name, x, (*new.shape[:2], past, new.shape[3]))
            K, V = (np.concatenate(parts, axis=2) for parts in ((past_key, K), (past_value, V)))
        if nonpad_kv_seqlen is not None:
            _check_shape("nonpad_kv_seqlen", nonpad_kv_seqlen, Q.shape[:1])
        options = _masks(
            attn_mask, K.shape[2], past, nonpad_kv_seqlen, bool(is_causal),
            _bound(left_window_size, "left_window_size"), _bound(right_window_size, "right_window_size"),
        )  # fmt: skip
        options |= {"scale": scale, "softcap": softcap or None}
        mode = qk_matmul_output_mode or 0
        wants_scores = len(self.onnx_node.output) > 3 and self.onnx_node.output[3] != ""
        # V may be of another 16-bit type than Q.
        values = V if Q.dtype == V.dtype or V.itemsize != 2 else V.astype(np.float32)
        with _names_of_attention():
            found = fastattn.attention(Q, K, values, **options, return_weights=wants_scores and mode == 3)
        out, scores = found if isinstance(found, tuple) else (found, np.empty(0, Q.dtype))
        if wants_scores and mode != 3:
            scores = _scores(Q, K, mode, **options)
        if is_flat:
            B, H, L, E = out.shape
            out = out.swapaxes(1, 2).reshape(B, L, H * E)
        with np.errstate(over="ignore"):
            return out.astype(Q.dtype, copy=False), K, V, scores.astype(Q.dtype, copy=False)


#: The operators' names of fastattn's arguments. A ValueError, as ONNX hides the text of a TypeError.
_names_of_attention = partial(
    caller_names,
    {
        "query": "Q", "key": "K", "value": "V", "mask": "attn_mask", "bias": "attn_mask",
        "key_lengths": "nonpad_kv_seqlen",
    },
    ValueError,
)  # fmt: skip
_names_of_rope = partial(
    caller_names, {"x": "X", "cos": "cos_cache", "sin": "sin_cache", "positions": "position_ids"}, ValueError
)


def _heads(x: np.ndarray, num_heads: int | None, name: str, attribute: str) -> np.ndarray:
    """(B, H, L, D) as it is, or a view of (B, L, H * D), with H from an attribute."""
    if x.ndim == 4:
        if num_heads and num_heads != x.shape[1]:
            raise ValueError(
                f"{attribute} is {num_heads}, and {name} has {x.shape[1]} heads; {name} {x.shape}"
            )
        return x
    if x.ndim != 3:
        raise ValueError(f"{name} must have three axes or four, got {x.shape}")
    if not num_heads:
        raise ValueError(f"{attribute} must be given for an input of three axes; {name} {x.shape}")
    if num_heads < 0 or x.shape[2] % num_heads:
        raise ValueError(
            f"{attribute} must divide the last axis of {name}, got {num_heads} and {x.shape[2]}; "
            f"{name} {x.shape}"
        )
    return x.reshape(*x.shape[:2], num_heads, x.shape[2] // num_heads).swapaxes(1, 2)


def _check_shape(name: str, x: np.ndarray, *expected: tuple[int, ...], because: str = "") -> None:
    if x.shape not in expected:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, expected))}{because}, got {x.shape}")


def _check_choice(name: str, given: Any, choices: tuple[Any, ...]) -> None:
    if given not in choices:
        listed = ", ".join(str(choice) for choice in choices if choice is not None)
        raise ValueError(f"{name} must be one of {listed}, got {given!r}")


def _bound(size: int | None, name: str) -> int | None:
    if size is not None and size < -1:
        raise ValueError(f"{name} must be -1 or nonnegative, got {size}")
    return None if size == -1 else size


def _masks(
    attn_mask: np.ndarray | None,
    S: int,
    past: int,
    lengths: np.ndarray | None,
    is_causal: bool,
    left: int | None,
    right: int | None,
) -> dict[str, Any]:
    """fastattn's options. Query i is at key ``i + past``, or with `lengths` at the end of its item's keys."""
    options: dict[str, Any] = {}
    has_window = left is not None or right is not None
    if attn_mask is not None:
        if attn_mask.dtype.kind in "iu":
            attn_mask = attn_mask.astype(np.float64)  # added to the scores, as floats are
        if (missing := S - attn_mask.shape[-1]) > 0:
            hidden = False if attn_mask.dtype == np.bool_ else -np.inf
            widths = [(0, 0)] * (attn_mask.ndim - 1) + [(0, missing)]
            attn_mask = np.pad(attn_mask, widths, constant_values=hidden)
        options["mask" if attn_mask.dtype == np.bool_ else "bias"] = attn_mask
    if lengths is not None:
        options["key_lengths"] = lengths.reshape(-1)
        options["causal"] = "bottom_right" if is_causal else False
        options["window"] = (left, right) if has_window else None
    elif is_causal or has_window:
        rules: list[masks.Mask] = [masks.Causal(offset=past)] if is_causal else []
        if has_window:
            rules.append(masks.Window(left, right, "top_left").shifted(past, 0))
        if "mask" in options:
            rules.append(masks.Dense(options["mask"]))
        options["mask"] = reduce(and_, rules)
    return options


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
        x = _heads(X, num_heads, "X", "num_heads")
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
            _check_shape("position_ids", position_ids, (B, L), (1, L))
        because = f" {given} position_ids and for rotary_embedding_dim {2 * half}"
        _check_shape("cos_cache", cos_cache, *tables, because=because)
        _check_shape("sin_cache", sin_cache, cos_cache.shape)
        if position_ids is None:
            position_ids = np.arange(len(cos_cache) * L).reshape(len(cos_cache), L)
        cos_cache, sin_cache = (table.reshape(-1, half) for table in (cos_cache, sin_cache))
        with _names_of_rope():
            rotated = fastattn.rope(
                x, cos_cache, sin_cache, positions=position_ids, interleaved=bool(interleaved)
            )
        return (rotated.swapaxes(1, 2).reshape(X.shape) if X.ndim == 3 else rotated,)


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
        _check_choice("mode", mode, (None, "linear", "circular"))
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
        _check_shape("write_indices", write_indices, shape[:1])
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
        with _names_of_attention():
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
        _check_choice("update_rule", rule, tuple(_GATES))
        if K <= 0 or H <= 0 or H % K:
            raise ValueError(f"q_num_heads must be a multiple of kv_num_heads, got {H} and {K}")
        for name, gate in {"decay": decay, "beta": beta}.items():
            if (gate is not None) != (name in _GATES[rule]):
                how = "needs" if gate is None else "takes no"
                raise ValueError(f"update_rule {rule!r} {how} {name}")
        for name, x in (("query", query), ("key", key), ("value", value)):
            _check_shape(name, x, (*query.shape[:2], x.shape[-1]))
        B, T, _ = query.shape
        k, v = (_heads(x, K, name, "kv_num_heads") for x, name in ((key, "key"), (value, "value")))
        D, E = k.shape[-1], v.shape[-1]
        _check_shape("query", query, (B, T, H * D))
        if decay is not None:
            _check_shape("decay", decay, (B, T, K), (B, T, K * D))
            decay = _heads(decay, K, "decay", "kv_num_heads")
            decay = decay if decay.shape[-1] > 1 else decay[..., 0]
        if beta is not None:
            _check_shape("beta", beta, (B, T, 1), (B, T, K))
            beta = beta.swapaxes(1, 2)
        if past_state is not None:
            _check_shape("past_state", past_state, (B, K, D, E))
        out, state = fastattn.gated_linear_attention(
            _heads(query, H, "query", "q_num_heads"), k, v, decay=decay, beta=beta, scale=scale or None,
            state=past_state, return_state=True,
        )  # fmt: skip
        packed = out.swapaxes(1, 2).reshape(B, T, H * E)
        return packed, state.astype(query.dtype if past_state is None else past_state.dtype)


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
        _check_choice("activation", activation, (None, "none", "silu", "swish"))
        if input.ndim != 3 or weight.ndim != 3:
            raise ValueError(f"input and weight must have three axes, got {input.shape} and {weight.shape}")
        B, C, width = *input.shape[:2], weight.shape[2]
        _check_shape("weight", weight, (C, 1, width))
        if bias is not None:
            _check_shape("bias", bias, (C,))
        if past_state is not None:
            _check_shape("past_state", past_state, (B, C, width - 1))
        chosen: Any = None if activation == "none" else activation
        return fastattn.causal_conv1d(
            input, weight[:, 0], bias, activation=chosen, state=past_state, return_state=True
        )


#: For ``onnx.reference.ReferenceEvaluator(model, new_ops=operators)``.
operators = [
    Attention, RotaryEmbedding, TensorScatter, FlexAttention, LinearAttention, CausalConvWithState
]  # fmt: skip
