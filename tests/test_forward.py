"""Every backend, type and instruction set computes the definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

import fastattn
from fastattn.backends import registry
from tests.cases import FLOATS, ODD_LENGTHS, Case, random_arrays, solve
from tests.conftest import drawn
from tests.test_options_hypothesis import problems
from tests.tolerances import assert_answer, assert_attention, assert_same_bits

LENGTHS = st.one_of(st.sampled_from(ODD_LENGTHS), st.integers(1, 300))


@drawn(
    20, 60,
    len_q=LENGTHS, len_k=LENGTHS, dims=st.tuples(*[st.integers(1, 40)] * 2), dtype=st.sampled_from(FLOATS),
)  # fmt: skip
def test_any_lengths(engine, len_q, len_k, dims, dtype):
    head_dim, value_dim = dims
    case = Case(
        "lengths", heads=1, len_q=len_q, len_k=len_k, head_dim=head_dim, value_dim=value_dim, dtype=dtype
    )
    solved = solve(case)
    assert_answer(engine.everything(*solved.arrays), solved.exact, solved.plain)


@drawn(
    25, 100,
    problem=problems(), num_threads=st.sampled_from([1, 2, 3]), layout=st.sampled_from(["bhsd", "bshd"]),
)  # fmt: skip
def test_all_options_together(engine, problem, num_threads, layout):
    arrays, ours, theirs = problem
    if layout == "bshd":
        arrays = tuple(array.swapaxes(-2, -3) for array in arrays)
    results = engine.everything(*arrays, layout=layout, num_threads=num_threads, **ours)
    plain_layout = tuple(array.swapaxes(-2, -3) for array in arrays) if layout == "bshd" else arrays
    out = results[0].swapaxes(-2, -3) if layout == "bshd" else results[0]
    assert_attention((out, *results[1:]), *plain_layout, **theirs)


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


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_weights_averaged_over_the_heads(engine, dtype, layout):
    """Whatever else is returned, and in a first call as in a prepared one."""
    arrays = random_arrays(lead=(2,), heads=6, kv_heads=3, len_q=9, len_k=40, dtype=dtype)
    if layout == "bshd":
        arrays = tuple(array.swapaxes(-2, -3) for array in arrays)
    options = {"causal": "bottom_right", "layout": layout}
    out, lse, weights = engine.everything(*arrays, **options)
    mean = weights.mean(axis=-3, dtype=np.longdouble)
    for _ in range(2):
        results = engine.attention(*arrays, return_lse=True, return_weights="mean", **options)
        got = engine.attention(*arrays, return_weights="mean", **options)[1]
        assert got.shape == (2, 9, 40) and got.dtype == dtype and got.flags.c_contiguous
        # Six numbers from 0 on are added and divided, each step with one rounding.
        np.testing.assert_allclose(got, mean.astype(np.float64), rtol=6 * np.finfo(dtype).eps, atol=0)
        for result, expected in zip(results, (out, lse, got), strict=True):
            assert_same_bits(result, expected)
    # An item's bits do not depend on the others, and no row of NaN gets beyond its own.
    arrays[0][0, 3, 3] = np.nan
    again = engine.attention(*arrays, return_weights="mean", **options)[1]
    assert_same_bits(again[1], got[1])
    alone = engine.attention(*(array[1] for array in arrays), return_weights="mean", **options)[1]
    assert_same_bits(alone, got[1])


def test_weights_averaged_over_one_head_or_none(engine):
    arrays = random_arrays(heads=1)
    weights = engine.attention(*arrays, return_weights=True)[1]
    assert_same_bits(engine.attention(*arrays, return_weights="mean")[1], weights[0])
    flat = engine.attention(*(array[0] for array in arrays), return_weights="mean")[1]
    assert_same_bits(flat, weights[0])
    none = [array[:0] for array in arrays]
    assert_same_bits(engine.attention(*none, return_weights="mean")[1], np.zeros_like(weights[0]))


def test_a_gpu_averages_no_weights(monkeypatch):
    monkeypatch.setattr(type(registry.load("cuda")), "unavailable_reasons", lambda self: [])
    query = np.ones((1, 2, 4, 8), np.float32)
    with pytest.raises(fastattn.BackendError, match="averages no weights: return_weights=True"):
        fastattn.attention(query, query, query, backend="cuda", return_weights="mean")


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
