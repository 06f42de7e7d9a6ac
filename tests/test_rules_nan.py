"""Rule 4: a masked key is never seen, bit for bit; an allowed NaN goes where the formula sends it."""

from __future__ import annotations

import numpy as np
import pytest

from fastattn import masks
from tests.cases import FLOATS, random_arrays
from tests.conftest import reference_is_slow
from tests.naive import allowed_keys
from tests.tolerances import assert_all_same, assert_attention, assert_same_bits

#: What to put into masked keys, and into the values beside them.
POISONS = [(np.nan, np.nan), (np.inf, np.nan), (-np.inf, np.inf), (0.0, -np.inf)]
SIZES = [(5, 9), (70, 150), (130, 300)]
BATCH, HEADS, KV_HEADS = 2, 4, 2


def problem(len_q, len_k, dtype="float32"):
    return random_arrays(
        lead=(BATCH,),
        heads=HEADS,
        kv_heads=KV_HEADS,
        len_q=len_q,
        len_k=len_k,
        head_dim=8,
        value_dim=11,
        dtype=dtype,
    )


def rows_to_try(len_q):
    return sorted({0, len_q // 3, len_q // 2, len_q - 1})


def assert_row_sees_nothing_masked(engine, arrays, allowed, options, poisons=POISONS):
    """Poison all that one row may not see, for several rows one after another, and compare that row's bits.

    The other rows do see poison, so a masked key and an allowed one share tiles, vectors and memory.
    """
    query, key, value = arrays
    clean = engine.everything(query, key, value, **options)
    allowed = np.broadcast_to(allowed, (BATCH, HEADS, query.shape[-2], key.shape[-2]))
    for row in rows_to_try(query.shape[-2]):
        for head in (0, HEADS - 1):
            for in_key, in_value in poisons:
                bad_key, bad_value = key.copy(), value.copy()
                for item in range(BATCH):
                    hidden = ~allowed[item, head, row]
                    bad_key[item, head * KV_HEADS // HEADS, hidden] = in_key
                    bad_value[item, head * KV_HEADS // HEADS, hidden] = in_value
                results = engine.everything(query, bad_key, bad_value, **options)
                for name, got, wanted in zip(("out", "lse", "weights"), results, clean, strict=True):
                    what = f"{name} of row {row}, head {head}, with keys {in_key} and values {in_value}"
                    assert_same_bits(got[:, head, row], wanted[:, head, row], what)


OPTIONS = {
    "causal_top_left": {"causal": "top_left"},
    "causal_bottom_right": {"causal": "bottom_right"},
    "window": {"window": (6, 2)},
    "window_causal": {"window": (6, None), "causal": "top_left"},
    "key_lengths": {"key_lengths": np.array([3, 8])},
    "key_lengths_causal": {"key_lengths": np.array([7, 5]), "causal": "bottom_right"},
    "softcap": {"causal": "bottom_right", "softcap": 3.0},
    "sinks": {"causal": "bottom_right", "sinks": np.arange(4.0)},
}


@reference_is_slow
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(engine, name, sizes, dtype):
    options = OPTIONS[name]
    rules = {key: part for key, part in options.items() if key not in ("softcap", "sinks")}
    allowed = allowed_keys((BATCH,), HEADS, *sizes, **rules)
    assert_row_sees_nothing_masked(engine, problem(*sizes, dtype), allowed, options)


@reference_is_slow
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ["bool", "integer", "per_key", "per_head", "bias"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_arrays(engine, kind, sizes, dtype):
    shape = {"per_key": (1, sizes[1]), "per_head": (BATCH, HEADS, *sizes)}.get(kind, sizes)
    allowed = np.random.default_rng(0).random(shape) < 0.5
    if kind == "bias":
        bias = np.where(allowed, np.random.default_rng(1).standard_normal(shape), -np.inf).astype(dtype)
        options = {"bias": bias}
    else:
        options = {"mask": allowed.astype(np.int32) * 256 if kind == "integer" else allowed}
    assert_row_sees_nothing_masked(engine, problem(*sizes, dtype), allowed, options)


@pytest.mark.parametrize("len_q", [1, 2, 70])
@pytest.mark.parametrize("len_k", [40, 1500])
def test_padding_behind_the_lengths_of_a_cache(engine, len_q, len_k):
    """Whole tiles of it, and the rest of the tile in which the length falls."""
    query, key, value = problem(len_q, len_k)
    for lengths in ([0, 1], [len_k - 1, len_k // 2], [33, 17]):
        options = {"key_lengths": np.array(lengths), "causal": "bottom_right"}
        clean = engine.everything(query, key, value, **options)
        bad_key, bad_value = key.copy(), value.copy()
        for item, length in enumerate(lengths):
            bad_key[item, :, length:], bad_value[item, :, length:] = np.nan, np.inf
        results = engine.everything(query, bad_key, bad_value, **options)
        assert_all_same(results, clean)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", [(1, 40), (2, 300), (20, 40), (20, 300)], ids=str)
def test_the_sign_of_a_masked_value_is_not_that_of_a_zero(engine, sizes, dtype):
    """Weights that a sink or another key makes small, times values below all normal numbers: results that
    underflow to zero, beside zeros that are exact. A masked value adds 0 or -0 to both."""
    query, key, value = problem(*sizes, dtype)
    value[...] = -8 * np.finfo(dtype).smallest_subnormal
    value[..., 3] = 0.0
    value[..., 4] = -0.0
    masked = np.random.default_rng(0).random(sizes[1]) < 0.3
    masked[-1] = True
    bias = np.where(np.arange(sizes[1]) == 1, 20.0, 0.0).astype(dtype)
    value[..., 1, :] = 0
    masked[1] = False
    for extra in (*({"sinks": np.full(HEADS, sink, dtype)} for sink in (3.0, 20.0, 60.0)), {"bias": bias}):
        options = {"mask": ~masked, **extra}
        results = []
        for number in (-1.0, 1.0, -0.0, np.nan, -np.inf):
            value[:, :, masked] = number
            results.append(engine.attention(query, key, value, **options))
        for other in results[1:]:
            assert_same_bits(other, results[0])
        assert not np.signbit(results[0][..., 3:5]).any(), "an exact zero is +0.0"


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("bias_dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_bias_at_a_masked_key_is_never_seen(engine, dtype, bias_dtype, number):
    arrays = problem(70, 150, dtype)
    rng = np.random.default_rng(0)
    allowed = rng.random((70, 150)) < 0.5
    bias = rng.standard_normal((70, 150)).astype(bias_dtype)
    spoilt = np.where(allowed, bias, number).astype(bias_dtype)
    clean = engine.everything(*arrays, mask=allowed, bias=bias)
    assert_all_same(engine.everything(*arrays, mask=allowed, bias=spoilt), clean)
    causal = np.tri(70, 150, dtype=bool)
    clean = engine.everything(*arrays, causal="top_left", bias=bias)
    spoilt = np.where(causal, bias, number).astype(bias_dtype)
    assert_all_same(engine.everything(*arrays, causal="top_left", bias=spoilt), clean)


def test_nan_in_bias_at_an_allowed_key_makes_its_row_nan(engine):
    arrays = problem(70, 150)
    bias = np.zeros((70, 150), np.float32)
    bias[[3, 40], [100, 0]] = np.nan
    out, lse, _ = engine.everything(*arrays, bias=bias)
    clean_out, clean_lse, _ = engine.everything(*arrays, bias=np.zeros_like(bias))
    spoilt = np.isin(np.arange(70), [3, 40])
    assert np.isnan(out[..., spoilt, :]).all()
    assert np.isnan(lse[..., spoilt]).all()
    assert_same_bits(out[..., ~spoilt, :], clean_out[..., ~spoilt, :])
    assert_same_bits(lse[..., ~spoilt], clean_lse[..., ~spoilt])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("options", [{}, {"causal": "top_left"}, {"softcap": 3.0}], ids=str)
def test_nan_query_row_is_nan_alone(engine, options, dtype):
    query, key, value = problem(70, 150, dtype)
    clean = engine.everything(query, key, value, **options)
    bad = query.copy()
    bad[1, 2, 33, 5] = np.nan
    results = engine.everything(bad, key, value, **options)
    here = np.zeros((BATCH, HEADS, 70), bool)
    here[1, 2, 33] = True
    assert np.isnan(results[0][here]).all()
    assert np.isnan(results[1][here]).all()
    for got, wanted in zip(results, clean, strict=True):
        assert_same_bits(got[~here], wanted[~here])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ["causal", "window", "mask", "objects", "bias", "both", "value"])
def test_weights_of_a_row_of_nan_are_0_at_masked_keys(engine, kind, dtype):
    """The weights of allowed keys are NaN; that of a masked key is 0 whatever the query is."""
    query, key, value = problem(70, 150, dtype)
    allowed = np.random.default_rng(0).random((70, 150)) < 0.5
    bias = np.where(np.random.default_rng(1).random((70, 150)) < 0.7, 0.5, -np.inf).astype(dtype)
    causal = np.tri(70, 150, dtype=bool)
    options, allowed = {
        "causal": ({"causal": "top_left"}, causal),
        "window": ({"window": (9, 3)}, allowed_keys((), 1, 70, 150, window=(9, 3))[0]),
        "mask": ({"mask": allowed}, allowed),
        "objects": ({"mask": masks.Causal(offset=0) | masks.Dense(allowed)}, causal | allowed),
        "bias": ({"bias": bias}, bias == 0.5),
        "both": ({"bias": bias, "mask": allowed}, (bias == 0.5) & allowed),
        "value": ({"causal": "top_left"}, causal),
    }[kind]
    if kind == "value":  # the weights themselves do not change
        value[1, 1, 0, 3] = np.nan
    else:
        query[1, 2, 33, 5] = np.nan
    weights = engine.everything(query, key, value, **options)[2][1, 2, 33]
    assert (np.isnan(weights) == (allowed[33] & (kind != "value"))).all()
    assert (weights[~allowed[33]] == 0).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("options", [{}, {"causal": "top_left"}, {"window": (60, 20)}], ids=str)
def test_nan_in_an_allowed_key_reaches_the_rows_that_read_it(engine, options, where, dtype):
    query, key, value = problem(70, 150, dtype)
    clean = engine.everything(query, key, value, **options)
    bad = {"key": key.copy(), "value": value.copy()}
    bad[where][1, 0, 37, 4] = np.nan
    results = engine.everything(query, bad["key"], bad["value"], **options)
    reads = np.zeros((BATCH, HEADS, 70), bool)
    reads[1, :2] = allowed_keys((), 1, 70, 150, **options)[0, :, 37]
    assert reads.any()
    for got, wanted in zip(results, clean, strict=True):
        assert_same_bits(got[~reads], wanted[~reads])
    if where == "key":
        assert np.isnan(results[0][reads]).all()
        assert np.isnan(results[1][reads]).all()
    else:
        assert np.isnan(results[0][reads][:, 4]).all()
        assert_attention(results, query, key, bad["value"], **options)  # the other value columns are right


def test_infinite_values_at_allowed_keys_do_what_the_formula_does(engine):
    query, key, value = problem(20, 30)
    value[0, 0, 3, 2], value[1, 1, 4, 5] = np.inf, -np.inf
    results = engine.everything(query, key, value, causal="top_left")
    assert np.isposinf(results[0]).any()
    assert np.isneginf(results[0]).any()
    assert_attention(results, query, key, value, causal="top_left")


def test_infinite_keys_at_allowed_places_do_what_the_formula_does(engine):
    """A score of -inf has weight 0; one of +inf makes its row NaN."""
    query, key, value = problem(20, 30)
    key[0, 0, 3, 2], key[1, 1, 4, 5] = np.inf, -np.inf
    out = engine.attention(query, key, value)
    assert np.isnan(out).any()
    assert_attention((out,), query, key, value)
