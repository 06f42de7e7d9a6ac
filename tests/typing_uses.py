"""Typical uses. `test_arguments` runs them, and has mypy and pyright check the types that they assert.

Each line of `typing_misuses` is an error to both.
"""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np

import fastattn
from fastattn.biases import Grid, Relative
from fastattn.layers import MultiHeadAttention
from fastattn.masks import Causal, Mask, Segments, Window

Pair = tuple[np.ndarray, np.ndarray]
Triple = tuple[np.ndarray, np.ndarray, np.ndarray]

x = np.ones((1, 2, 5, 4))
flag = bool(x.any())  # which a checker does not know


def attention() -> None:
    assert_type(fastattn.attention(x, x, x), np.ndarray)
    assert_type(
        fastattn.attention(x, x, x, causal="top_left", window=(3, None), backend="reference"), np.ndarray
    )
    mask = Causal() & ~Window(1, 1)
    assert_type(fastattn.attention(x, x, x, mask=mask, out=np.empty_like(x), return_lse=False), np.ndarray)
    biases = Grid(np.ones((5, 1)), np.ones((5, 5))) + Relative([[1.0], [2.0]])
    assert_type(fastattn.attention(x, x, x, bias=(np.ones(5), biases), scale=[0.5, 2.0]), np.ndarray)
    assert_type(fastattn.attention(x, x, x, return_lse=True), Pair)
    assert_type(fastattn.attention(x, x, x, return_weights=True, mask=[[True]]), Pair)
    out, lse, weights = fastattn.attention(x, x, x, return_lse=True, return_weights=True)
    assert_type(weights, np.ndarray)
    assert_type(fastattn.attention(x, x, x, return_weights="mean"), Pair)
    assert_type(fastattn.attention(x, x, x, return_lse=True, return_weights="mean"), Triple)
    assert_type(fastattn.attention(x, x, x, return_lse=flag), np.ndarray | tuple[np.ndarray, ...])
    assert_type(fastattn.scaled_dot_product_attention(x, x, x, is_causal=True), np.ndarray)
    assert_type(fastattn.merge_attention([out, out], [lse, lse]), Pair)


def packed_documents() -> None:
    rows = x[0].swapaxes(0, 1)
    assert_type(fastattn.varlen_attention(rows, rows, rows, [0, 2, 5], causal=True), np.ndarray)
    assert_type(fastattn.varlen_attention(rows, rows, rows, [0, 5], [0, 5], return_lse=True), Pair)
    assert_type(fastattn.varlen_attention(rows, rows, rows, [0, 5], mask=Causal(), return_weights=True), Pair)
    both = fastattn.varlen_attention(
        rows, rows, rows, [0, 5], dropout=0.1, seed=1, return_lse=True, return_weights=True
    )
    assert_type(both, Triple)
    unknown = fastattn.varlen_attention(rows, rows, rows, [0, 5], return_lse=flag)
    assert_type(unknown, np.ndarray | tuple[np.ndarray, ...])


def scores_without_values() -> None:
    assert_type(fastattn.reduce_scores(x, x, reduction="max", causal=True), Pair)
    assert_type(fastattn.reduce_scores(x, x, reduction="topk", k=2, mask=Window(2, 0)), Pair)
    assert_type(fastattn.reduce_scores(x, x, reduction="logsumexp", sinks=[0.0, 1.0]), np.ndarray)
    assert_type(fastattn.key_weights(x, x, key_lengths=[4], num_threads=1), np.ndarray)
    assert_type(
        fastattn.max_similarity(x[0], fastattn.Quantized.encode(x[0]), document_lengths=[5, 3]), np.ndarray
    )


def functions_of_the_caller() -> None:
    assert_type(fastattn.flex_attention(x, x, x, score_mod=lambda score, b, h, i, j: -score), np.ndarray)
    block_mask = fastattn.create_block_mask(lambda b, h, i, j: i != j, None, None, 5, 5)
    assert_type(fastattn.flex_attention(x, x, x, block_mask=block_mask, return_lse=True), Pair)
    assert_type(fastattn.flex_attention(x, x, x, mask=Causal(), return_weights="mean"), Pair)
    found = fastattn.flex_attention(x, x, x, return_weights=flag)
    assert_type(found, np.ndarray | tuple[np.ndarray, ...])


def masks() -> None:
    assert_type(Causal(offset=[1, 2]) & Window(1, 1) | ~Segments([0, 0, 1]), Mask)


def gradients() -> None:
    def of_any(gradients: fastattn.Gradients) -> None:
        assert_type(gradients.query, np.ndarray | None)

    out, lse = fastattn.attention(x, x, x, causal=True, return_lse=True)
    found = fastattn.attention_backward(out, x, x, x, out, lse, causal=True)
    assert_type(found, fastattn.Gradients[np.ndarray])
    query, key, value, bias, _ = found
    assert_type(query, np.ndarray)
    assert_type(found.key, np.ndarray)
    assert_type(bias, np.ndarray | Any | None)  # Any: of a tuple it is a tuple
    if bias is not None:
        bias.sum()
    some = fastattn.attention_backward(out, x, x, x, out, lse, causal=True, wrt=("query", "key"))
    assert_type(some.value, np.ndarray | None)

    def read(score: float, b: int, h: int, i: int, j: int, table: np.ndarray) -> float:
        return score * float(table[0, 0, 0, 0])

    of_flex = fastattn.flex_attention_backward(out, x, x, x, out, lse, score_mod=lambda s, b, h, i, j: -s)
    assert_type(of_flex, fastattn.FlexGradients[np.ndarray])
    of_some = fastattn.flex_attention_backward(out, x, x, x, out, lse, score_mod=read, aux=(x,), wrt=["aux"])
    assert_type(of_some.query, np.ndarray | None)
    assert_type(of_some.aux, tuple[np.ndarray | None, ...] | None)
    of_any(found)
    of_any(some)
    rows = np.ones((5, 2, 4))
    out, lse = fastattn.varlen_attention(rows, rows, rows, [0, 2, 5], return_lse=True)
    packed = fastattn.varlen_attention_backward(out, rows, rows, rows, out, lse, [0, 2, 5], window=(1, 0))
    assert_type(packed, fastattn.Gradients[np.ndarray])
    some = fastattn.varlen_attention_backward(out, rows, rows, rows, out, lse, [0, 2, 5], wrt=["key"])
    assert_type(some.value, np.ndarray | None)
    assert found.query.shape == key.shape == value.shape


def gradients_of_the_recurrent_form() -> None:
    found = fastattn.gated_linear_attention_backward(x, x, x, x, decay=[-1.0])
    assert_type(found, fastattn.RecurrentGradients[np.ndarray])
    assert_type(found.query, np.ndarray)
    assert_type(found.decay, np.ndarray | None)
    some = fastattn.gated_linear_attention_backward(x, x, x, x, beta=[1.0], wrt="beta")
    assert_type(some.query, np.ndarray | None)


def a_cache() -> None:
    cache = fastattn.KVCache(batch=1, num_kv_heads=2, head_dim=4)
    assert_type(cache.step(x, x, x, lengths=[5]), np.ndarray)
    assert_type(cache.step(x, x, x, return_lse=True, window=(3, None), mask=Window(1, 1)), Pair)
    assert_type(cache.step(x, x, x, return_weights=True), Pair)
    assert_type(cache.step(x, x, x, return_weights="mean"), Pair)
    assert_type(cache.attend(x, return_lse=True, return_weights=True, causal=False), Triple)
    assert_type(cache.attend(x, return_lse=flag), np.ndarray | tuple[np.ndarray, ...])
    assert_type(cache.fork().select([0]).lengths, np.ndarray)
    state = fastattn.RecurrentState(batch=1, num_kv_heads=2, head_dim=4, dtype="float64")
    assert_type(state.step(x, x, x, decay=-x[..., 0], scale=1.0, lengths=[5]), np.ndarray)
    assert_type(state.fork().select([0]).state, np.ndarray)


def a_layer() -> None:
    rows, w = x[0], np.eye(4)
    layer = MultiHeadAttention(w, w, w, w, num_heads=2, rope=fastattn.rope_tables(10, 2))
    assert_type(layer(rows, causal=True), np.ndarray)
    out, weights = layer(rows, rows, rows, return_weights="mean")
    assert_type(weights, np.ndarray)
    assert_type(layer(out, return_lse=True, return_weights="mean", key_lengths=[5, 3]), Triple)
    assert_type(layer(out, rows, return_weights=flag), np.ndarray | tuple[np.ndarray, ...])
    cache = fastattn.KVCache(batch=2, num_kv_heads=2, head_dim=2, layout="bshd")
    assert_type(layer(rows, cache=cache, return_lse=True), Pair)


def relatives() -> None:
    points, y = x[0, 0], x[0, 0, :, 0]
    assert_type(fastattn.kernel_regression(points, points, y, bandwidth=0.5), np.ndarray)
    out, log_density = fastattn.kernel_regression(points, points, y, bandwidth=1, return_log_density=True)
    assert_type(log_density, np.ndarray)
    found = fastattn.kernel_regression(points, points, out, bandwidth=[1, 2, 3, 4], return_log_density=flag)
    assert_type(found, np.ndarray | Pair)
    features = fastattn.random_features(4, 8, seed=0)
    assert_type(fastattn.linear_attention(x, x, x, feature_map=features), np.ndarray)
    out, state = fastattn.linear_attention(x, x, x, causal=True, return_state=True)
    assert_type(state, fastattn.LinearState)
    assert_type(
        fastattn.linear_attention(x, x, x, state=state, return_state=flag),
        np.ndarray | tuple[np.ndarray, fastattn.LinearState],
    )
    rows, filters = x[0, 0, :4], x[0, 0, :4]
    assert_type(fastattn.causal_conv1d(rows, filters, activation="silu"), np.ndarray)
    assert_type(fastattn.causal_conv1d(rows, filters, [0.0] * 4, state=None, return_state=True), Pair)
    assert_type(fastattn.causal_conv1d(rows, filters, return_state=flag), np.ndarray | Pair)
    cos, sin = fastattn.rope_tables(5, 4, scaling=("yarn", 2.0, 4096, {"beta_fast": 32}))
    assert_type(fastattn.rope(x, cos, sin), np.ndarray)
