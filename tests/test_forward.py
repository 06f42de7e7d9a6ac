"""Every backend, type and instruction set computes the definition."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cases import FLOATS, ODD_LENGTHS, Case, random_arrays, solve
from tests.tolerances import assert_answer, assert_attention, assert_same_bits

# Every odd length on both axes, each combined with short, tile-sized and long ones.
SIZES = sorted(
    {
        (n, ODD_LENGTHS[(5 * place + step) % len(ODD_LENGTHS)])
        for place, n in enumerate(ODD_LENGTHS)
        for step in (0, 7)
    }
    | {(n, n) for n in ODD_LENGTHS}
    | {(1, 257), (257, 1), (2, 200), (200, 3)}
)


def options(**keywords: object) -> tuple[tuple[str, object], ...]:
    return tuple(keywords.items())


CASES = [
    Case("mha", lead=(2,), heads=3),
    Case("gqa", lead=(2,), heads=6, kv_heads=2),
    Case("mqa", lead=(2,), heads=5, kv_heads=1),
    Case("gqa_decode", lead=(3,), heads=8, kv_heads=2, len_q=1, len_k=300, head_dim=64),
    Case("gqa_causal", heads=4, kv_heads=2, len_q=37, len_k=61, options=options(causal="bottom_right")),
    Case("wide_values", head_dim=8, value_dim=40),
    Case("narrow_values", head_dim=40, value_dim=8),
    Case("one_value", head_dim=32, value_dim=1),
    Case("odd_dims", head_dim=37, value_dim=53, len_q=35, len_k=67),
    Case("wide_head", head_dim=300, value_dim=270),
    Case("no_scale", options=options(scale=0.0)),
    Case("negative_scale", options=options(scale=-0.7)),
    Case("large_scale", options=options(scale=5.0)),
    Case("tiny_scale", options=options(scale=1e-30)),
    Case("softcap", spread=8.0, options=options(softcap=5.0)),
    Case("softcap_wide", options=options(softcap=50.0)),
    Case("softcap_small", spread=8.0, options=options(softcap=0.01)),
    Case("sinks", lead=(2,), sinks=True),
    Case("sinks_causal", len_q=33, sinks=True, options=options(causal="bottom_right")),
    Case("sinks_gqa", heads=4, kv_heads=2, sinks=True),
    Case("bias", bias=(17, 33)),
    Case("bias_per_head", lead=(2,), bias=(2, 17, 33)),
    Case("bias_whole", lead=(2,), bias=(2, 2, 17, 33)),
    Case("bias_per_key", lead=(2,), bias=(2, 1, 1, 33)),
    Case("bias_per_query", lead=(2,), bias=(17, 1)),
    Case("bias_scalar", bias=()),
    Case("bias_large", len_q=65, len_k=300, bias=(65, 300)),
    Case("bias_half", bias=(17, 33), bias_dtype="float16"),
    Case("bias_single", bias=(17, 33), bias_dtype="float32"),
    Case("bias_double", bias=(17, 33), bias_dtype="float64"),
    Case("bias_swapped_half", bias=(17, 33), bias_dtype=">f2"),
    Case("bias_swapped_single", bias=(17, 33), bias_dtype=">f4"),
    Case("bias_swapped_double", bias=(17, 33), bias_dtype=">f8"),
    Case("softcap_bias", spread=4.0, bias=(17, 33), options=options(softcap=3.0)),
    Case("mask", mask=(17, 33)),
    Case("mask_per_head", lead=(2,), mask=(2, 17, 33)),
    Case("mask_per_key", lead=(2,), mask=(2, 1, 1, 33)),
    Case("mask_per_query", lead=(2,), mask=(17, 1)),
    Case("mask_large", len_q=131, len_k=300, mask=(131, 300)),
    Case("mask_bias_causal", len_q=33, bias=(33, 33), mask=(33, 33), options=options(causal=True)),
    Case("causal", len_q=130, len_k=130, options=options(causal=True)),
    Case("causal_top_left", len_q=40, len_k=70, options=options(causal="top_left")),
    Case("causal_top_left_tall", len_q=70, len_k=40, options=options(causal="top_left")),
    Case("causal_bottom_right", len_q=40, len_k=70, options=options(causal="bottom_right")),
    Case("causal_bottom_right_tall", len_q=70, len_k=40, options=options(causal="bottom_right")),
    Case("window", len_q=100, len_k=140, options=options(window=(17, 3))),
    Case("window_left", len_q=100, len_k=140, options=options(window=(17, None))),
    Case("window_right", len_q=100, len_k=140, options=options(window=(None, 0))),
    Case("window_open", options=options(window=(None, None))),
    Case("window_causal", len_q=140, len_k=140, options=options(window=(17, 3), causal=True)),
    Case("window_top_left", len_q=90, len_k=140, options=options(window=(17, 3), causal="top_left")),
    Case("lengths", lead=(3,), options=options(key_lengths=(0, 5, 33))),
    Case("lengths_scalar", lead=(3,), options=options(key_lengths=20)),
    Case("lengths_causal", lead=(3,), options=options(key_lengths=(3, 20, 33), causal="bottom_right")),
    Case("lengths_window", lead=(3,), options=options(key_lengths=(3, 20, 33), window=(4, 1))),
    Case("lengths_two_axes", lead=(2, 2), options=options(key_lengths=((1, 2), (20, 33)))),
    Case("deep_lead", lead=(2, 1, 3), heads=2),
    Case("steep", spread=30.0, len_k=300),
    Case("many_small", lead=(40,), heads=4, len_q=4, len_k=5, head_dim=8),
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"L{sizes[0]}-S{sizes[1]}")
def test_odd_lengths(engine, sizes, dtype):
    len_q, len_k = sizes
    solved = solve(Case("lengths", heads=1, len_q=len_q, len_k=len_k, head_dim=24, dtype=dtype))
    assert_answer(engine.everything(*solved.arrays), solved.exact, solved.plain)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("first", range(1, 257, 16))
def test_every_head_dim(engine, first, dtype):
    for head_dim in range(first, first + 16):
        value_dim = 257 - head_dim if head_dim % 5 == 0 else head_dim
        solved = solve(
            Case("dims", heads=1, len_q=5, len_k=19, head_dim=head_dim, value_dim=value_dim, dtype=dtype)
        )
        assert_answer(engine.everything(*solved.arrays), solved.exact, solved.plain)


@pytest.mark.parametrize("head_dim", [40, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", FLOATS)
def test_usual_head_dims_over_several_tiles(engine, head_dim, dtype):
    case = Case("tiles", heads=1, len_q=70, len_k=270, head_dim=head_dim, dtype=dtype)
    solved = solve(case)
    assert_answer(engine.everything(*solved.arrays), solved.exact, solved.plain)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_option(engine, case, dtype):
    solved = solve(case.as_dtype(dtype))
    assert_answer(engine.everything(*solved.arrays, **solved.keywords), solved.exact, solved.plain)


def test_rank_two_is_one_head(engine):
    query, key, value = (array[0] for array in random_arrays(heads=1))
    out, lse, weights = engine.everything(query, key, value)
    assert out.shape == (17, 16)
    assert lse.shape == (17,)
    assert weights.shape == (17, 33)
    assert_attention((out, lse, weights), query, key, value)


@pytest.mark.parametrize("batch_of", ["query", "key", "value"])
def test_other_leading_axes_broadcast(engine, batch_of):
    arrays = dict(zip(("query", "key", "value"), random_arrays(lead=(2, 3), heads=2), strict=True))
    for name in arrays:
        if name != batch_of:
            arrays[name] = arrays[name][:1, :1]
    results = engine.everything(*arrays.values())
    assert results[0].shape == (2, 3, 2, 17, 16)
    assert_attention(results, *arrays.values())


def test_leading_axes_of_different_rank_broadcast(engine):
    query, _, _ = random_arrays(1, lead=(3, 2))
    _, key, value = random_arrays(2, lead=(2,))
    assert_attention(engine.everything(query, key, value), query, key, value)


@pytest.mark.parametrize("want_lse", [False, True])
@pytest.mark.parametrize("want_weights", [False, True])
def test_what_is_returned_does_not_change_the_output(engine, want_lse, want_weights):
    arrays = random_arrays(len_q=40, len_k=150)
    alone = engine.attention(*arrays)
    assert isinstance(alone, np.ndarray)
    result = engine.attention(*arrays, return_lse=want_lse, return_weights=want_weights)
    if not (want_lse or want_weights):
        assert isinstance(result, np.ndarray)
        return
    assert isinstance(result, tuple)
    assert len(result) == 1 + want_lse + want_weights
    _, lse, weights = engine.everything(*arrays)
    assert_same_bits(result[0], alone, "out")
    if want_lse:
        assert_same_bits(result[1], lse, "lse")
    if want_weights:
        assert_same_bits(result[-1], weights, "weights")


def test_results_are_fresh_contiguous_and_writeable(engine):
    query, key, value = random_arrays(lead=(2,))
    for got in engine.everything(query, key, value):
        assert got.flags.c_contiguous
        assert got.flags.writeable
        assert not any(np.shares_memory(got, array) for array in (query, key, value))


@pytest.mark.parametrize("dtype", FLOATS)
def test_weights_rows_sum_to_one(engine, dtype):
    arrays = random_arrays(len_q=9, len_k=400, dtype=dtype)
    weights = engine.attention(*arrays, return_weights=True)[1]
    # A sum of S rounded weights, added in float64: each is off by a few eps of itself.
    np.testing.assert_allclose(weights.sum(axis=-1, dtype=np.float64), 1, rtol=8 * np.finfo(dtype).eps)


def test_huge_finite_negative_bias_is_an_ordinary_number(engine):
    query, key, value = random_arrays()
    lowest = float(np.finfo(np.float32).min)
    for number in (-1e30, lowest):
        # The same on all keys, it dominates the scores: all weights are equal.
        out = engine.attention(query, key, value, bias=np.full((17, 33), number, np.float32))
        mean = np.broadcast_to(value.mean(axis=-2, keepdims=True, dtype=np.float64), out.shape)
        np.testing.assert_allclose(out, mean, atol=16 * np.finfo(np.float32).eps)
        # On some keys only, their weights are exactly 0.
        bias = np.where(np.arange(33) % 3 == 0, number, 0).astype(np.float32)
        out, lse, weights = engine.everything(query, key, value, bias=bias)
        assert np.all(weights[..., ::3] == 0)
        kept = np.arange(33) % 3 != 0
        assert_attention((out, lse), query, key[:, kept], value[:, kept])


def test_plus_infinity_in_bias_does_what_the_formula_does(engine):
    query, key, value = random_arrays()
    bias = np.zeros((17, 33), np.float32)
    bias[4, 7] = np.inf
    out = engine.attention(query, key, value, bias=bias)
    assert np.isnan(out[:, 4]).all()
    others = np.arange(17) != 4
    assert_attention((out[:, others],), query[:, others], key, value)


@pytest.mark.parametrize("dtype", FLOATS)
def test_scores_near_the_largest_number_do_not_overflow_the_softmax(engine, dtype):
    query, key, value = random_arrays(head_dim=4, dtype=dtype)
    solid = float(np.finfo(dtype).max) ** 0.5 / 64
    query, key = query * dtype_of(dtype, solid), key * dtype_of(dtype, solid)
    out, lse, weights = engine.everything(query, key, value)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
    # Scores this far apart leave one winner per row, the largest product.
    winner = np.argmax(query.astype(np.longdouble) @ key.astype(np.longdouble).swapaxes(-1, -2), axis=-1)
    np.testing.assert_array_equal(weights.argmax(axis=-1), winner)
    np.testing.assert_array_equal(out, np.take_along_axis(value, winner[..., None], axis=-2))


def dtype_of(dtype: str, number: float) -> np.floating:
    return np.dtype(dtype).type(number)


def test_subnormal_weights_and_values_do_no_harm(engine):
    query = np.ones((1, 3, 1), np.float32)
    key = np.array([0, -80, -100, -103, -110, -200], np.float32)[None, :, None]
    value = np.full((1, 6, 3), 1e-39, np.float32)
    out, _, weights = engine.everything(query, key, value, scale=1.0)
    np.testing.assert_allclose(out, 1e-39, rtol=0, atol=4 * np.finfo(np.float32).tiny)
    assert (weights[..., 0] == 1).all()
    assert np.isfinite(weights).all()


def test_one_key_is_the_value_itself(engine):
    query, key, value = random_arrays(len_k=1)
    np.testing.assert_array_equal(engine.attention(query, key, value), np.broadcast_to(value, query.shape))
