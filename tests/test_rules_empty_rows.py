"""Rule 3: a row with no allowed key is 0, its lse -inf, its weights 0; with a sink, lse is the sink."""

from __future__ import annotations

import numpy as np
import pytest

from fastattn import masks
from tests.cases import FLOATS, random_arrays
from tests.tolerances import assert_attention

LEN_Q, LEN_K = 70, 140


def ways_to_empty_a_row():
    """Options that leave some rows with no key, and the bool mask that says the same."""
    i, j = np.arange(LEN_Q)[:, None], np.arange(LEN_K)
    some = np.random.default_rng(0).random((LEN_Q, LEN_K)) < 0.5
    some[[0, 5, 66, 69]] = False
    short = j < np.array([0, LEN_K])[:, None, None, None]
    return {
        "bool": ({"mask": some}, some),
        "all_false": ({"mask": np.zeros((LEN_Q, LEN_K), bool)}, np.zeros((LEN_Q, LEN_K), bool)),
        "per_query": ({"mask": some.any(axis=1, keepdims=True)}, some.any(axis=1, keepdims=True)),
        "bias": ({"bias": np.where(some, 0, -np.inf).astype(np.float32)}, some),
        "lengths": ({"key_lengths": np.array([0, LEN_K])}, short),
        "offset": ({"mask": masks.Causal(offset=-40)}, j <= i - 40),
        "segments": (
            {"mask": masks.Segments(np.arange(LEN_Q) % 3, np.arange(LEN_K) % 2)},
            (i % 3) == (j % 2),
        ),
        "tiles": ({"mask": masks.Dense(some) & (masks.Causal("top_left") | masks.Window(2, 2))}, None),
        "disjoint": (
            {"mask": masks.Window(0, 0, align="top_left"), "window": (3, 3)},
            np.zeros((LEN_Q, LEN_K), bool),
        ),
    }


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("way", ways_to_empty_a_row())
@pytest.mark.parametrize("dtype", FLOATS)
def test_empty_rows(engine, way, with_sinks, dtype):
    options, allowed = ways_to_empty_a_row()[way]
    if allowed is None:
        allowed = options["mask"].materialize(2, LEN_Q, LEN_K)
    arrays = random_arrays(lead=(2,), heads=2, len_q=LEN_Q, len_k=LEN_K, dtype=dtype)
    extra = {"sinks": np.array([0.5, -2.0], dtype)} if with_sinks else {}
    empty = np.broadcast_to(~allowed.any(axis=-1), (2, 2, LEN_Q))
    assert empty.any()
    out, lse, weights = engine.everything(*arrays, **options, **extra)
    assert not out[empty].any()
    assert not weights[empty].any()
    expected = np.broadcast_to(extra["sinks"][:, None], empty.shape)[empty] if with_sinks else -np.inf
    np.testing.assert_array_equal(lse[empty], expected)
    assert_attention((out, lse, weights), *arrays, mask=allowed, **extra)


def test_nan_query_row_without_keys_is_zero(engine):
    query, key, value = random_arrays(lead=(2,), heads=2, len_q=LEN_Q, len_k=LEN_K)
    query[:, :, 5] = np.nan
    mask = np.ones((LEN_Q, LEN_K), bool)
    mask[5] = False
    out, lse, weights = engine.everything(query, key, value, mask=mask)
    assert not out[:, :, 5].any()
    assert (lse[:, :, 5] == -np.inf).all()
    assert not weights[:, :, 5].any()
    assert np.isfinite(out).all()


@pytest.mark.parametrize("sink", [-np.inf, 0.0, 700.0])
def test_sink_of_any_size(engine, sink):
    arrays = random_arrays(dtype="float64")
    sinks = np.full(2, sink)
    results = engine.everything(*arrays, sinks=sinks)
    assert_attention(results, *arrays, sinks=sinks)


@pytest.mark.parametrize("len_q", [3, LEN_Q], ids=["few", "many"])
@pytest.mark.parametrize("sink", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", FLOATS)
def test_sink_that_is_not_finite(engine, dtype, sink, len_q):
    """A row without keys has it as its lse; a row with keys is NaN by the formula, or as without a sink where
    that is -inf. Neither depends on the rows beside it, nor on whether any of them has keys."""
    arrays = random_arrays(heads=2, len_q=len_q, len_k=LEN_K, dtype=dtype)
    i, j = np.arange(len_q)[:, None], np.arange(LEN_K)
    some = np.random.default_rng(1).random((len_q, LEN_K)) < 0.5
    ways = {
        "mask": {"mask": some & (i % 2 == 1)},
        "all but one": {"mask": (i == len_q - 1) & (j >= 0)},
        "none": {"mask": np.zeros((len_q, LEN_K), bool)},
        "bias": {"bias": np.where(some & (i % 2 == 1), 0.5, -np.inf).astype(dtype)},
        "intervals": {"mask": masks.Causal(offset=-1)},
    }
    sinks = np.array([sink, 0.5], dtype)
    for name, options in ways.items():
        results = out, lse, weights = engine.everything(*arrays, sinks=sinks, **options)
        allowed = options.get("mask", options.get("bias", 0) == 0.5)
        if name == "intervals":
            allowed = j <= i - 1
        empty = ~allowed.any(axis=-1)
        assert empty.any(), name
        assert not out[:, empty].any(), name
        assert not weights[:, empty].any(), name
        np.testing.assert_array_equal(lse[:, empty], np.broadcast_to(sinks[:, None], lse[:, empty].shape))
        rules = {"bias": options["bias"]} if name == "bias" else {"mask": allowed}
        assert_attention(results, *arrays, sinks=sinks, **rules)
        if sink != -np.inf:
            assert np.isnan(out[0, ~empty]).all(), name
            assert np.isnan(lse[0, ~empty]).all(), name
            np.testing.assert_array_equal(np.isnan(weights[0]), allowed, name)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_rows_whose_scores_are_all_minus_infinity(engine, dtype, with_sinks):
    """As if no key were allowed."""
    query, key, value = random_arrays(lead=(2,), heads=2, len_q=LEN_Q, len_k=LEN_K, dtype=dtype)
    key[..., 0] = np.inf
    query[..., 0] = -1
    extra = {"sinks": np.array([0.5, -2.0], dtype)} if with_sinks else {}
    out, lse, weights = engine.everything(query, key, value, **extra)
    assert not out.any()
    assert not weights.any()
    expected = extra["sinks"][:, None] if with_sinks else np.array(-np.inf)
    np.testing.assert_array_equal(lse, np.broadcast_to(expected, lse.shape))


def test_a_bias_below_the_range_of_float32_masks(engine):
    arrays = random_arrays(lead=(2,), heads=2, len_q=LEN_Q, len_k=LEN_K)
    allowed = np.random.default_rng(0).random((LEN_Q, LEN_K)) < 0.5
    allowed[7] = False
    results = engine.everything(*arrays, bias=np.where(allowed, 0, np.finfo(np.float64).min))
    assert_attention(results, *arrays, mask=allowed)
    assert not results[0][:, :, 7].any()
