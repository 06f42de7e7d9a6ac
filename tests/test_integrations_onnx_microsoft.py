"""`fastattn.integrations.onnx`: operators of com.microsoft, against onnxruntime and in extended precision.

onnxruntime and fastattn are held to one budget, that of `tests.tolerances`: the oracle is what onnxruntime
computes, and fastattn computes it. Where onnxruntime has no packed inputs on the CPU it gets them apart.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", minversion="1.23")
onnxruntime = pytest.importorskip("onnxruntime", minversion="1.32")

from onnx.helper import (  # noqa: E402
    make_graph,
    make_model,
    make_node,
    make_opsetid,
    make_tensor_value_info,
    np_dtype_to_tensor_dtype,
)
from onnx.reference import ReferenceEvaluator  # noqa: E402

from fastattn.integrations.onnx import operators  # noqa: E402
from tests.naive import WIDE, attention, formula  # noqa: E402
from tests.tolerances import assert_close, assert_same_bits  # noqa: E402

#: The inputs of operators, in their order, and the types of their outputs by that of an input.
INPUTS = {
    "Attention": [
        "input", "weights", "bias", "mask_index", "past", "attention_bias", "past_sequence_length"
    ],
    "MultiHeadAttention": [
        "query", "key", "value", "bias", "key_padding_mask", "attention_bias", "past_key", "past_value",
        "past_sequence_length", "cache_indirection",
    ],
    "GroupQueryAttention": [
        "query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos_cache",
        "sin_cache", "position_ids", "attention_bias", "head_sink", "k_scale", "v_scale", "q_norm_weight",
        "k_norm_weight", "query_seqlens",
    ],
}  # fmt: skip
LOWEST = float(np.finfo("f4").min)


def model_of(operator, inputs, num_outputs, **attributes):
    names = INPUTS[operator]
    given = [name for name in names if name in inputs]
    outputs = [f"output_{n}" for n in range(num_outputs)]
    node = make_node(
        operator,
        [name if name in inputs else "" for name in names],
        outputs,
        domain="com.microsoft",
        **attributes,
    )
    of_cache = inputs.get("past_key", inputs[given[0]]).dtype
    types = [inputs[given[0]].dtype, of_cache, of_cache, inputs[given[0]].dtype]
    graph = make_graph(
        [node],
        operator,
        [
            make_tensor_value_info(name, np_dtype_to_tensor_dtype(inputs[name].dtype), inputs[name].shape)
            for name in given
        ],
        [
            make_tensor_value_info(name, np_dtype_to_tensor_dtype(types[n]), None)
            for n, name in enumerate(outputs)
        ],
    )
    domains = [make_opsetid("", 20), make_opsetid("com.microsoft", 1)]
    return make_model(graph, opset_imports=domains, ir_version=10)


def ours(operator, inputs, num_outputs, **attributes):
    before = {name: x.tobytes() for name, x in inputs.items()}
    model = model_of(operator, inputs, num_outputs, **attributes)
    results = ReferenceEvaluator(model, new_ops=operators).run(None, inputs)
    assert {name: x.tobytes() for name, x in inputs.items()} == before
    return results


def theirs(operator, inputs, num_outputs, **attributes):
    model = model_of(operator, inputs, num_outputs, **attributes)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def seeds(count, few=20):
    """All of them in the slow run."""
    slow = pytest.mark.slow
    return pytest.mark.parametrize(
        "seed", [pytest.param(seed, marks=() if seed < few else slow) for seed in range(count)]
    )


class Draw:
    """Random arrays and choices of one case."""

    def __init__(self, seed, operator):
        self.rng = np.random.default_rng([seed, len(operator)])
        self.dtype = np.dtype("f4" if self.maybe(0.75) else "f2")

    def maybe(self, share=0.5):
        return bool(self.rng.random() < share)

    def count(self, least, most):
        return int(self.rng.integers(least, most + 1))

    def among(self, *choices):
        return choices[self.count(0, len(choices) - 1)]

    def numbers(self, *shape):
        return self.rng.standard_normal(shape).astype(self.dtype)

    def bias(self, B, H, L, T):
        x = self.numbers(self.among(B, 1), self.among(H, 1), L, T)
        if self.maybe(0.3):
            x[..., 1:][self.rng.random(x[..., 1:].shape) < 0.2] = -np.inf
        return x

    def padding(self, B, L, T, kinds, is_lowest):
        """A mask of a kind and the keys that it leaves, (B, 1, 1 or L, T): key 0 too where `is_lowest`."""
        least = 1 if is_lowest else 0
        keys, kind = np.arange(T), self.among(*kinds)
        if kind in ("ends", "ends and starts", "packed"):
            ends = self.rng.integers(least, T + 2, B)
            starts = self.rng.integers(0, 1 if is_lowest else T + 1, B)
            offsets = np.arange(2 * B + 2)  # which only CUDA reads
            others = {"ends": [], "ends and starts": [starts], "packed": [offsets]}[kind]
            allowed = keys < ends[:, None]
            if kind == "ends and starts":
                allowed &= keys >= starts[:, None]
            return np.concatenate([ends, *others]).astype(np.int32), allowed[:, None, None]
        if kind == "one":
            return np.zeros((self.among(B, 1), 1), np.int32), np.ones((B, 1, 1, T), bool)
        mask = self.rng.integers(-1, 3, (B, T) if kind == "keys" else (B, L, T)).astype(np.int32)
        mask[..., :least] = 1
        return mask, (mask > 0)[:, None, None] if kind == "keys" else (mask > 0)[:, None]


def heads(x, num_heads):
    B, L, size = x.shape
    return x.reshape(B, L, num_heads, size // num_heads).swapaxes(1, 2)


def flat(x):
    B, H, L, D = x.shape
    return x.swapaxes(1, 2).reshape(B, L, H * D)


def total_bias(given, hidden, filter_value):
    """What is added to scores, for the oracle and for the formula in float32."""
    parts = [np.float32(0)] if given is None else [given.astype("f4")]
    if hidden is not None:
        parts.append(np.where(hidden, np.float32(filter_value), np.float32(0)))
    return sum(x.astype(WIDE) for x in parts), sum(parts)


def assert_within(name, results, num_heads, arrays, narrow, rows=..., **options):
    """Hold outputs (B, L, H * E) to the oracle of `arrays`, with the formula of `narrow` in float32."""
    biases = options.pop("biases", (None, None))
    exact = attention(*arrays, bias=biases[0], **options)
    plain = formula(*narrow, bias=biases[1], **options)
    for who, out in results.items():
        got = heads(out, num_heads)
        assert got.dtype == out.dtype
        assert_close(f"{name} of {who}", got[rows], exact.out[rows], exact.out_reach[rows], plain.out[rows])


@seeds(500)
def test_multi_head_attention(seed):
    draw = Draw(seed, "MultiHeadAttention")
    B, H, L, D = draw.count(1, 3), draw.count(1, 4), draw.count(1, 7), draw.count(1, 16)
    form = draw.among("apart", "apart", "keys of four axes", "packed keys", "packed")
    has_past = form != "keys of four axes" and draw.maybe(0.4)
    S = L if form == "packed" or draw.maybe() else draw.count(1, 9)
    E = D if form != "apart" or has_past else draw.count(1, 16)
    P = draw.count(0, 5) if has_past else 0
    T = P + S
    q, k, v = draw.numbers(B, H, L, D), draw.numbers(B, H, S, D), draw.numbers(B, H, S, E)
    inputs = {"query": flat(q), "key": flat(k), "value": flat(v)}
    if form == "keys of four axes":
        inputs |= {"key": k, "value": v}
    attributes = {"num_heads": H}
    if draw.maybe():
        inputs["bias"] = draw.numbers(H * (2 * D + E))
    if has_past:
        inputs |= {"past_key": draw.numbers(B, H, P, D), "past_value": draw.numbers(B, H, P, D)}
    filter_value, hidden = draw.among(-10000.0, -30.0, LOWEST), None
    if draw.maybe():
        kinds = ("ends", "packed", "keys", "pairs")
        mask, allowed = draw.padding(B, L, T, kinds, filter_value == LOWEST)
        inputs["key_padding_mask"], hidden = mask, ~allowed
        if filter_value != -10000.0 or draw.maybe():
            attributes["mask_filter_value"] = filter_value
    if draw.maybe(0.3):
        inputs["attention_bias"] = draw.bias(B, H, L, T)
    if draw.maybe(0.3):
        attributes["scale"] = draw.among(0.3, -0.5, 0.0)
    is_causal = draw.maybe() and (L in (1, S))
    attributes |= {"unidirectional": 1} if is_causal else {}
    num_outputs = 3 if has_past else draw.among(1, 3)  # onnxruntime reads past the end without present
    packed = inputs
    if form in ("packed", "packed keys"):
        packed = {name: x for name, x in inputs.items() if name not in ("query", "key", "value")}
        together = np.stack((q, k, v) if form == "packed" else (k, v), axis=3).transpose(0, 2, 1, 3, 4)
        packed |= {"query": together} if form == "packed" else {"query": flat(q), "key": together}
    results = {
        "fastattn": ours("MultiHeadAttention", packed, num_outputs, **attributes),
        "onnxruntime": theirs("MultiHeadAttention", inputs, num_outputs, **attributes),
    }
    for one, other in zip(*(found[1:] for found in results.values()), strict=True):
        assert_same_bits(one, other)

    def arrays(dtype):
        found = [x.astype(dtype) for x in (q, k, v)]
        if "bias" in inputs:
            cut = np.split(inputs["bias"].astype(dtype), [H * D, 2 * H * D])
            added = [x.reshape(H, 1, -1) for x in cut]
            if form == "keys of four axes":
                added[1:] = [dtype(0), dtype(0)]
            found = [x + of for x, of in zip(found, added, strict=True)]
        if has_past:
            pasts = inputs["past_key"].astype(dtype), inputs["past_value"].astype(dtype)
            found[1:] = [np.concatenate((past, x), axis=2) for past, x in zip(pasts, found[1:], strict=True)]
        return found

    assert_within(
        f"{form} {attributes}", {who: found[0] for who, found in results.items()}, H, arrays(WIDE),
        arrays(np.float32), biases=total_bias(inputs.get("attention_bias"), hidden, filter_value),
        mask=np.arange(T) <= np.arange(L)[:, None] + P if is_causal and L > 1 else None,
        scale=attributes.get("scale") or None,
    )  # fmt: skip


@seeds(200)
def test_attention(seed):
    draw = Draw(seed, "Attention")
    B, H, L, D = draw.count(1, 3), draw.count(1, 4), draw.count(1, 7), draw.count(1, 16)
    size, has_past = draw.count(1, 24), draw.maybe(0.4)
    is_uneven = not has_past and draw.maybe(0.3)
    E = draw.count(1, 16) if is_uneven else D
    P = draw.count(0, 5) if has_past else 0
    T, columns = P + L, H * (2 * D + E)
    inputs = {
        "input": draw.numbers(B, L, size),
        "weights": draw.numbers(size, columns) / draw.dtype.type(size**0.5),
    }
    attributes = {"num_heads": H}
    if is_uneven or draw.maybe(0.3):
        attributes["qkv_hidden_sizes"] = [H * D, H * D, H * E]
    if draw.maybe(0.8):
        inputs["bias"] = draw.numbers(columns)
    if has_past:
        inputs["past"] = draw.numbers(2, B, H, P, D)
    filter_value, hidden = draw.among(-10000.0, -30.0, LOWEST), None
    if draw.maybe(0.7):
        kinds = ("ends", "ends and starts", "packed", "keys", "pairs", "one" if T > 1 else "keys")
        mask, allowed = draw.padding(B, L, T, kinds, filter_value == LOWEST)
        inputs["mask_index"], hidden = mask, ~allowed
        if filter_value != -10000.0 or draw.maybe():
            attributes["mask_filter_value"] = filter_value
    if not has_past and draw.maybe():
        inputs["attention_bias"] = draw.bias(B, H, L, T)
    if draw.maybe(0.3):
        attributes["scale"] = draw.among(0.3, -0.5, 0.0)
    is_causal = draw.maybe()
    attributes |= {"unidirectional": 1} if is_causal else {}
    num_outputs = 1 if is_uneven else 2 if has_past else draw.among(1, 2)
    results = {
        who: run("Attention", inputs, num_outputs, **attributes)
        for who, run in (("fastattn", ours), ("onnxruntime", theirs))
    }

    def projected(dtype, of=lambda x: x):
        x, w = (of(inputs[name]).astype(dtype) for name in ("input", "weights"))
        found = x @ w + (of(inputs["bias"]).astype(dtype) if "bias" in inputs else dtype(0))
        parts = [heads(x, H) for x in np.split(found, [H * D, 2 * H * D], axis=2)]
        if has_past:
            parts[1:] = [
                np.concatenate((of(past).astype(dtype), x), axis=2)
                for past, x in zip(inputs["past"], parts[1:], strict=True)
            ]
        return parts

    exact, plain, reach = projected(WIDE), projected(np.float32), projected(WIDE, np.abs)
    if num_outputs == 2:
        for who, found in results.items():
            assert_close(f"present of {who}", found[1], *(np.stack(x[1:]) for x in (exact, reach, plain)))
    assert_within(
        f"{attributes}", {who: found[0] for who, found in results.items()}, H, exact, plain,
        biases=total_bias(inputs.get("attention_bias"), hidden, filter_value),
        mask=np.arange(T) <= np.arange(L)[:, None] + P if is_causal else None,
        scale=attributes.get("scale") or None,
    )  # fmt: skip


def rotated(x, cos, sin, positions, is_interleaved):
    """The rotation in extended precision, and how far one rounding moves it."""
    r, wide = 2 * cos.shape[1], x.astype(WIDE)
    c, s = (table.astype(WIDE)[positions][:, None] for table in (cos, sin))
    left = slice(0, r, 2) if is_interleaved else slice(0, r // 2)
    right = slice(1, r, 2) if is_interleaved else slice(r // 2, r)
    a, b = wide[..., left], wide[..., right]
    out, reach = wide.copy(), np.abs(wide)
    out[..., left], out[..., right] = a * c - b * s, b * c + a * s
    reach[..., left], reach[..., right] = abs(a * c) + abs(b * s), abs(b * c) + abs(a * s)
    return out, reach


def unpacked(x, bits):
    """Numbers of a quantised cache."""
    if bits == 8:
        return x
    return np.stack((x & 15, x >> 4), axis=-1).reshape(*x.shape[:-1], 2 * x.shape[-1]).astype(int) - 8


@seeds(500)
def test_group_query_attention(seed):
    draw = Draw(seed, "GroupQueryAttention")
    K, G, D = draw.count(1, 3), draw.count(1, 3), draw.among(8, 16, 32)
    H = K * G
    step = draw.among("first", "first", "next", "chunk")
    B = 1 if step == "chunk" else draw.count(1, 3)
    L = {"first": draw.count(1, 7), "next": 1, "chunk": draw.count(2, 5)}[step]
    lengths = L + draw.rng.integers(0, 6, B)
    if step == "first":
        lengths = np.maximum(1, L - draw.rng.integers(0, 3, B) * draw.maybe())
    else:
        lengths[0] += lengths.max() == L  # else these are the first
    total = L if step == "first" else int(lengths.max())
    starts = np.zeros(B, int) if step == "first" else lengths - L
    q, k, v = (draw.numbers(B, n, L, D) for n in (H, K, K))
    inputs = {"query": flat(q), "key": flat(k), "value": flat(v)}
    if draw.maybe(0.4):
        inputs = {"query": flat(np.concatenate((q, k, v), axis=1))}
    attributes = {"num_heads": H, "kv_num_heads": K}
    bits, scales = 0, {}
    if draw.maybe(0.3):
        bits = draw.among(8, 4)
        attributes["kv_cache_bit_width"] = bits
        shape = draw.among((1,), (1, K, 1, D))
        for side in "kv":
            attributes[f"{side}_quant_type"] = "PER_TENSOR" if shape == (1,) else "PER_CHANNEL"
            scales[f"{side}_scale"] = draw.rng.uniform(0.5, 1, shape).astype("f4") * np.float32(
                3 / 2 ** (bits - 1)
            )
        inputs |= scales
    size = total - L if draw.maybe(0.3) else total + draw.count(0, 4)  # of a cache that grows, or has room
    if step != "first" or bits or draw.maybe():
        for side in ("past_key", "past_value"):
            inputs[side] = draw.numbers(B, K, size, D)
            if bits:
                levels = draw.rng.integers(0, 256, (B, K, size, D * bits // 8))
                inputs[side] = levels.astype(np.uint8).view(np.int8 if bits == 8 else np.uint8)
    else:
        size = 0
    inputs["seqlens_k"] = (lengths - 1).astype(np.int32)
    inputs["total_sequence_length"] = np.array(total if draw.maybe() else [total], np.int32)
    positions = starts[:, None] + np.arange(L)
    if D % 16 == 0 and draw.maybe(0.6):
        r = 2 * draw.among(8, D // 2)
        inputs |= {"cos_cache": draw.numbers(24, r // 2), "sin_cache": draw.numbers(24, r // 2)}
        attributes |= {"do_rotary": 1, "rotary_interleaved": draw.among(0, 1)}
        if draw.maybe(0.4):
            inputs["position_ids"] = draw.rng.integers(0, 17, (B, L))
            first = inputs["position_ids"][0, 0] + np.arange(L)
            positions = np.tile(first, (B, 1)) if step == "first" else inputs["position_ids"]
    if draw.maybe(0.3):
        inputs["attention_bias"] = draw.numbers(draw.among(B, 1), draw.among(H, 1), L, total)
    sinks = np.zeros(H, "f4") if draw.maybe(0.2) else None
    attributes |= {} if sinks is None else {"smooth_softmax": 1}
    if draw.maybe(0.2):
        inputs["head_sink"] = sinks = draw.numbers(H)
    window, is_causal = (draw.count(1, 6) if draw.maybe(0.3) else None), True
    if window is None:
        is_causal = draw.maybe(0.8)
        attributes |= {} if is_causal else {"causal": 0}
    else:
        attributes["local_window_size"] = window
    attributes |= {"softcap": 0.8} if draw.maybe(0.3) else {}
    attributes |= {"scale": draw.among(0.3, -0.5, 0.0)} if draw.maybe(0.3) else {}
    num_outputs = 3 if bits or starts.any() else draw.among(1, 3)
    results = {
        who: run("GroupQueryAttention", inputs, num_outputs, **attributes)
        for who, run in (("fastattn", ours), ("onnxruntime", theirs))
    }

    exact_q, exact_k, k_reach = q.astype(WIDE), k.astype(WIDE), abs(k.astype(WIDE))
    if "do_rotary" in attributes:
        tables = inputs["cos_cache"], inputs["sin_cache"], positions, attributes["rotary_interleaved"]
        exact_q, _ = rotated(q, *tables)
        exact_k, k_reach = rotated(k, *tables)
    capacity = max(total, size)
    stored = {}
    for n, (side, new, reach) in enumerate(
        (("past_key", exact_k, k_reach), ("past_value", v.astype(WIDE), abs(v.astype(WIDE)))), start=1
    ):
        scale = scales.get(f"{side[5]}_scale", np.float32(1)).astype(WIDE)
        kept = inputs.get(side, np.empty((B, K, 0, D * (bits or 8) // 8), new.dtype))
        past = (unpacked(kept, bits) if bits else kept).astype(WIDE)
        whole, far = np.zeros((2, B, K, capacity, D), WIDE)
        for b, start in enumerate(starts):
            whole[b, :, :start] = past[b, :, :start] * (scale[0] if scale.ndim == 4 else scale)
            whole[b, :, start : start + L], far[b, :, start : start + L] = new[b], reach[b]
        if bits:
            # Both rounded alike; the oracle reads what they stored.
            assert_same_bits(results["fastattn"][n], results["onnxruntime"][n])
            level = unpacked(results["fastattn"][n], bits)
            limit = 1 << (bits - 1)
            filled = np.zeros((B, 1, capacity, 1), bool)
            for b, start in enumerate(starts):
                filled[b, :, : start + L] = True
            error = (
                abs(np.clip(whole / scale, -limit, limit - 1) - level)
                - far / scale * np.finfo(draw.dtype).eps
            )
            assert np.all((error <= 0.5) | ~filled)
            whole = level * scale
        elif num_outputs == 3:
            for who, found in results.items():
                assert_close(f"{side} of {who}", found[n], whole, far, whole.astype(draw.dtype))
        stored[side] = whole[:, :, :total]
    i, j = starts[:, None, None, None] + np.arange(L)[:, None], np.arange(total)
    allowed = j < lengths[:, None, None, None]
    allowed = allowed & (j <= i) if is_causal else allowed & (i >= 0)
    if window is not None:
        allowed &= j > i - window
    arrays = exact_q, stored["past_key"], stored["past_value"]
    rows = np.arange(L) < np.minimum(lengths, L)[:, None]  # those behind are of no token
    assert_within(
        f"{step} {attributes}", {who: found[0] for who, found in results.items()}, H, arrays,
        [x.astype("f4") for x in arrays], rows=np.broadcast_to(rows[:, None], (B, H, L)), mask=allowed,
        biases=total_bias(inputs.get("attention_bias"), None, 0), scale=attributes.get("scale") or None,
        softcap=attributes.get("softcap"), sinks=sinks,
    )  # fmt: skip


#: Inputs and attributes that fit each other; shapes stand for zeros.
FITTING = {
    "Attention": {"input": (2, 5, 6), "weights": (6, 24), "bias": (24,), "num_heads": 2},
    "MultiHeadAttention": {"query": (2, 5, 8), "key": (2, 7, 8), "value": (2, 7, 6), "num_heads": 2},
    "GroupQueryAttention": {
        "query": (2, 5, 32), "key": (2, 5, 16), "value": (2, 5, 16), "num_heads": 4, "kv_num_heads": 2,
        "seqlens_k": np.array([4, 4], "i4"), "total_sequence_length": np.array([5], "i4"),
    },
}  # fmt: skip
PACKED = {"query": (2, 5, 2, 3, 4), "key": None, "value": None}
PAST = {"past_key": (2, 2, 3, 4), "past_value": (2, 2, 3, 4), "value": (2, 7, 8)}
NEXT = {
    "seqlens_k": np.array([5, 6], "i4"), "total_sequence_length": np.array([7], "i4"),
    "past_key": (2, 2, 3, 8), "past_value": (2, 2, 3, 8),
}  # fmt: skip
TABLES = {"do_rotary": 1, "cos_cache": (9, 4), "sin_cache": (9, 4)}
QUANTISED = {"k_quant_type": "PER_TENSOR", "k_scale": np.ones(1, "f4"), "kv_cache_bit_width": 8}
#: What each operator says, and what is changed in what fits it.
MISTAKES = {
    "Attention": [
        ("num_heads must be given", {"num_heads": None}),
        ("num_heads must divide the last axis of the projected query, got 3 and 8", {"num_heads": 3}),
        ("input must have three axes and weights two, got (2, 6)", {"input": (2, 6)}),
        ("weights must have shape (6, 21) for qkv_hidden_sizes (7, 7, 7)", {"weights": (6, 23)}),
        (
            "qkv_hidden_sizes must be three, the first two equal, got (8, 4, 12)",
            {"qkv_hidden_sizes": [8, 4, 12]},
        ),
        ("qkv_hidden_sizes must be three, the first two equal, got (8, 16)", {"qkv_hidden_sizes": [8, 16]}),
        (
            "qkv_hidden_sizes must be equal where present",
            {"weights": (6, 20), "bias": (20,), "qkv_hidden_sizes": [8, 8, 4]},
        ),
        ("bias must have shape (24,), got (8,)", {"bias": (8,)}),
        ("past must have shape (2, 2, 2, 0, 4), got (2, 2, 3, 4)", {"past": (2, 2, 3, 4)}),
        ("past must have shape (2, 2, 2, 3, 4), got (2, 2, 2, 3, 5)", {"past": (2, 2, 2, 3, 5)}),
        (
            "mask_index must have shape (2,) or (4,) or (8,) or (2, 5) or (2, 5, 5)",
            {"mask_index": np.ones((2, 1, 9, 9), "i4")},
        ),
        ("attention_bias must have shape (2, 2, 5, 5) or (2, 1, 5, 5)", {"attention_bias": (5, 5)}),
    ],
    "MultiHeadAttention": [
        ("num_heads must be given", {"num_heads": None}),
        ("num_heads must divide the last axis of value, got 4 and 6", {"num_heads": 4}),
        ("query must have three axes, got (2, 2, 5, 4)", {"query": (2, 2, 5, 4)}),
        ("key and value must be given, with as many axes", {"value": None}),
        ("key and value must be given, with as many axes", {"key": (2, 2, 7, 4)}),
        ("query must have shape (2, 5, 2, 3, 4), got (2, 5, 2, 2, 4)", PACKED | {"query": (2, 5, 2, 2, 4)}),
        ("value must not be given with a query of five axes", PACKED | {"value": (2, 5, 8)}),
        ("value must not be given with a key of five axes", {"key": (2, 7, 2, 2, 4)}),
        ("query, key and value must have one batch size", {"key": (3, 7, 8)}),
        ("query, key and value must have one batch size", {"value": (1, 7, 6)}),
        (
            "key and value one length, got as heads (2, 2, 5, 4), (2, 2, 7, 4) and (2, 2, 6, 3)",
            {"value": (2, 6, 6)},
        ),
        ("query and key one head size", {"key": (2, 7, 6)}),
        ("past_key and past_value must be given together", {"past_key": (2, 2, 3, 4)}),
        ("past_value must have shape (2, 2, 3, 3), got (2, 2, 3, 4)", PAST | {"value": (2, 7, 6)}),
        (
            "past_key must not be given with a key of four axes",
            PAST | {"key": (2, 2, 7, 4), "value": (2, 2, 7, 4)},
        ),
        ("bias must have shape (22,), got (24,)", {"bias": (24,)}),
        (
            "key_padding_mask must have shape (2,) or (8,) or (2, 7) or (2, 5, 7)",
            {"key_padding_mask": np.ones(4, "i4")},
        ),
        ("attention_bias must have shape (2, 2, 5, 7)", {"attention_bias": (2, 2, 5, 5)}),
        ("unidirectional must be 0 for 5 queries and 7 keys", {"unidirectional": 1}),
    ],
    "GroupQueryAttention": [
        ("num_heads must be a multiple of kv_num_heads, got 4 and 3", {"kv_num_heads": 3}),
        ("num_heads must be a multiple of kv_num_heads, got 0 and 2", {"num_heads": None}),
        ("key and value must be given together", {"value": None}),
        ("past_key and past_value", {"past_key": (2, 2, 3, 8)}),
        (
            "num_heads + 2 * kv_num_heads must divide the last axis of query, got 8 and 33",
            {"query": (2, 5, 33), "key": None, "value": None},
        ),
        ("key must have shape (2, 5, 16), got (2, 4, 16)", {"key": (2, 4, 16)}),
        ("seqlens_k must have shape (2,) or (2, 1), got (3,)", {"seqlens_k": np.array([4, 4, 4], "i4")}),
        ("seqlens_k must be in 0..4, for 5 new tokens", {"seqlens_k": np.array([4, 5], "i4")}),
        ("seqlens_k must be in 4..6, for 5 new tokens", NEXT | {"seqlens_k": np.array([3, 6], "i4")}),
        (
            "total_sequence_length must have shape () or (1,), got (2,)",
            {"total_sequence_length": np.array([5, 5], "i4")},
        ),
        ("past_key must hold the 2 tokens", NEXT | {"past_key": (2, 2, 1, 8)}),
        ("past_value must have shape (2, 2, 3, 8), got (2, 2, 3, 4)", NEXT | {"past_value": (2, 2, 3, 4)}),
        ("past_key must be of dtype float32, got int8", NEXT | {"past_key": np.zeros((2, 2, 3, 8), "i1")}),
        ("cos_cache and sin_cache must be given for do_rotary", {"do_rotary": 1}),
        ("position_ids must have shape (2, 5), got (1, 5)", TABLES | {"position_ids": np.zeros((1, 5), int)}),
        (
            "position_ids must be in 0..8, the rows of cos_cache",
            TABLES | {"position_ids": np.full((2, 5), 5)},
        ),
        ("local_window_size must be -1, or positive and with causal, got 0", {"local_window_size": 0}),
        (
            "local_window_size must be -1, or positive and with causal, got 3",
            {"local_window_size": 3, "causal": 0},
        ),
        ("causal must be one of 0, 1, got 2", {"causal": 2}),
        ("attention_bias must have shape (2, 4, 5, 5)", {"attention_bias": (2, 2, 5, 5)}),
        ("head_sink must", {"head_sink": (3,)}),
        ("softcap must be", {"softcap": -1.0}),
        ("k_quant_type must be one of NONE, PER_TENSOR, PER_CHANNEL, got 'FP8'", {"k_quant_type": "FP8"}),
        ("v_scale must be given for v_quant_type PER_TENSOR", {"v_quant_type": "PER_TENSOR"}),
        (
            "k_scale must have shape (1, 2, 1, 8) for k_quant_type PER_CHANNEL",
            QUANTISED | {"k_quant_type": "PER_CHANNEL"},
        ),
        ("k_scale must have shape (1,) for k_quant_type PER_TENSOR, got (8,)", QUANTISED | {"k_scale": (8,)}),
        ("kv_cache_bit_width must be one of 4, 8, got 2", QUANTISED | {"kv_cache_bit_width": 2}),
        (
            "kv_cache_bit_width must be 8 for a head size of 3",
            QUANTISED | {"kv_cache_bit_width": 4, "query": (2, 5, 24), "key": None, "value": None},
        ),
        ("past_key must be of dtype int8, got float32", NEXT | QUANTISED),
    ],
}
#: What onnxruntime's CPU kernels do not take, or what is not computed here.
REFUSED = {
    "Attention": [{"do_rotary": 1}, {"past_present_share_buffer": 1}, {"some_attribute": 1}],
    "MultiHeadAttention": [
        {"past_sequence_length": np.array([1], "i4")}, {"cache_indirection": np.zeros((2, 1, 3), "i4")}
    ],
    "GroupQueryAttention": [
        {"qk_output": 1}, {"sliding_window_cache": 1}, {"q_norm_weight": (8,)}, {"k_norm_weight": (8,)},
        {"query_seqlens": np.array([5, 5], "i4")},
    ],
}  # fmt: skip


def run_changed(operator, changed, num_outputs=2):
    given = {name: x for name, x in (FITTING[operator] | changed).items() if x is not None}
    given = {name: np.zeros(x, "f4") if isinstance(x, tuple) else x for name, x in given.items()}
    inputs = {name: given[name] for name in INPUTS[operator] if name in given}
    attributes = {name: x for name, x in given.items() if name not in inputs}
    return ours(operator, inputs, num_outputs, **attributes)


@pytest.mark.parametrize("operator", FITTING)
def test_what_fits_is_computed(operator):
    for changed in ({}, {"GroupQueryAttention": NEXT | TABLES, "MultiHeadAttention": PAST}.get(operator, {})):
        assert not np.any(run_changed(operator, changed)[0])


@pytest.mark.parametrize(
    "operator, message, changed", [(name, *mistake) for name, of in MISTAKES.items() for mistake in of]
)
def test_errors_name_inputs_and_attributes(operator, message, changed):
    with pytest.raises(ValueError) as error:
        run_changed(operator, changed)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "operator, changed", [(name, changed) for name, of in REFUSED.items() for changed in of]
)
def test_what_is_not_computed_is_named(operator, changed):
    with pytest.raises(NotImplementedError, match=f"{next(iter(changed))} of com.microsoft's {operator}"):
        run_changed(operator, changed)


@pytest.mark.parametrize("operator", FITTING)
def test_further_outputs_are_refused(operator):
    known = 2 if operator == "Attention" else 3
    run_changed(operator, {}, known)
    with pytest.raises(NotImplementedError, match=f"output {known} of com.microsoft's {operator}"):
        run_changed(operator, {}, known + 1)


def test_an_epsilon_without_weights_says_nothing():
    run_changed("GroupQueryAttention", {"qk_norm_epsilon": 1e-6, "sliding_window_cache": 0})


@pytest.mark.parametrize("operator", ["Attention", "MultiHeadAttention"])
def test_float16_is_rounded_once(operator):
    rng = np.random.default_rng(0)
    shapes = {"Attention": {"bias": (24,)}, "MultiHeadAttention": {"bias": (22,)}}[operator] | FITTING[
        operator
    ]
    halves = {name: rng.standard_normal(x).astype("f2") for name, x in shapes.items() if isinstance(x, tuple)}
    wide = {name: x.astype("f4") for name, x in halves.items()}
    (got,), (expected,) = (ours(operator, inputs, 1, num_heads=2) for inputs in (halves, wide))
    assert_same_bits(got, expected.astype("f2"))


def test_a_batch_of_chunks_is_its_items():
    """Which onnxruntime computes one by one only."""
    rng = np.random.default_rng(0)
    shapes = {
        "query": (3, 4, 32),
        "key": (3, 4, 16),
        "value": (3, 4, 16),
        "past_key": (3, 2, 6, 8),
        "past_value": (3, 2, 6, 8),
    }
    batch = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    batch["seqlens_k"] = np.array([5, 3, 8], "i4")
    total = {"total_sequence_length": np.array([9], "i4")}
    heads_of = {"num_heads": 4, "kv_num_heads": 2, "local_window_size": 3}
    whole = ours("GroupQueryAttention", batch | total, 3, **heads_of)
    for b in range(3):
        item = {name: x[b : b + 1] for name, x in batch.items()}
        for got, alone in zip(whole, ours("GroupQueryAttention", item | total, 3, **heads_of), strict=True):
            assert_same_bits(got[b : b + 1], alone)


@pytest.mark.parametrize("kind", [(2,), (4,), (2, 4096)])
def test_no_array_of_queries_by_keys(kind):
    """A quarter of such an array in float32, for one item, is more than all that is needed."""
    L = 4096
    inputs = {
        "input": np.ones((2, L, 4), "f4"),
        "weights": np.ones((4, 12), "f4"),
        "mask_index": np.ones(kind, "i4"),
    }
    tracemalloc.start()
    try:
        ours("Attention", inputs, 1, num_heads=1, unidirectional=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < L * L
