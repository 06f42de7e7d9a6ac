"""Every option of `attention` on the CUDA backend, at sizes that leave ragged tiles in the simulator."""

from __future__ import annotations

import numpy as np
import pytest

import fastattn
from fastattn.masks import Causal, GlobalTokens, Segments, Window
from tests.cases import FLOATS, Case, random_arrays, solve
from tests.tolerances import assert_answer, assert_attention, assert_same_bits


def options(**keywords):
    return tuple(keywords.items())


SMALL = {"heads": 2, "len_q": 5, "len_k": 9, "head_dim": 6}
CASES = [
    Case("plain", **SMALL),
    Case("mha", lead=(2,), heads=3, len_q=5, len_k=4, head_dim=4),
    Case("gqa", heads=4, kv_heads=2, len_q=3, len_k=7, head_dim=5),
    Case("mqa_decode", heads=3, kv_heads=1, len_q=1, len_k=11, head_dim=6),
    Case("split_sinks_causal", lead=(2,), heads=4, kv_heads=2, len_q=2, len_k=21, head_dim=5, sinks=True,
         options=options(causal="bottom_right", key_lengths=(5, 21))),
    Case("split_bias", heads=2, len_q=1, len_k=14, head_dim=4, value_dim=5, bias=(2, 1, 14)),
    Case("wide_values", len_q=5, len_k=6, head_dim=3, value_dim=11),
    Case("one_value", len_q=5, len_k=6, head_dim=7, value_dim=1),
    Case("even", heads=1, len_q=4, len_k=8, head_dim=8, value_dim=8),
    Case("no_scale", **SMALL, options=options(scale=0.0)),
    Case("negative_scale", **SMALL, options=options(scale=-0.7)),
    Case("softcap", **SMALL, spread=8.0, options=options(softcap=5.0)),
    Case("softcap_bias", **SMALL, spread=4.0, bias=(5, 9), options=options(softcap=3.0)),
    Case("sinks", **SMALL, sinks=True),
    Case("sinks_causal", **SMALL, sinks=True, options=options(causal="bottom_right")),
    Case("bias", **SMALL, bias=(5, 9)),
    Case("bias_per_head", lead=(2,), **SMALL, bias=(2, 5, 9)),
    Case("bias_per_key", lead=(2,), **SMALL, bias=(2, 1, 1, 9)),
    Case("bias_half", **SMALL, bias=(5, 9), bias_dtype="float16"),
    Case("bias_swapped", **SMALL, bias=(5, 9), bias_dtype=">f8"),
    Case("mask", **SMALL, mask=(5, 9)),
    Case("mask_per_head", lead=(2,), **SMALL, mask=(2, 5, 9)),
    Case("mask_per_query", lead=(2,), **SMALL, mask=(5, 1)),
    Case("mask_bias_causal", heads=2, len_q=6, len_k=6, head_dim=4, bias=(6, 6), mask=(6, 6),
         options=options(causal=True)),
    Case("causal", heads=1, len_q=9, len_k=9, head_dim=4, options=options(causal=True)),
    Case("causal_top_left", heads=1, len_q=5, len_k=9, head_dim=4, options=options(causal="top_left")),
    Case("causal_tall", heads=1, len_q=9, len_k=5, head_dim=4, options=options(causal="bottom_right")),
    Case("causal_gqa", heads=4, kv_heads=2, len_q=5, len_k=7, head_dim=4,
         options=options(causal="bottom_right")),
    Case("window", heads=1, len_q=7, len_k=11, head_dim=4, options=options(window=(3, 1))),
    Case("window_causal", heads=1, len_q=9, len_k=9, head_dim=4, options=options(window=(3, 1), causal=True)),
    Case("lengths", lead=(3,), **SMALL, options=options(key_lengths=(0, 5, 9))),
    Case("lengths_causal", lead=(2,), **SMALL, options=options(key_lengths=(3, 9), causal="bottom_right")),
    Case("lead", lead=(2, 2), heads=1, len_q=3, len_k=5, head_dim=4),
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(engine, case, dtype):
    solved = solve(case.as_dtype(dtype))
    assert_answer(engine.everything(*solved.arrays, **solved.keywords), solved.exact, solved.plain)


@pytest.mark.parametrize("len_k", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("len_q", [1, 2, 3, 4, 5])
def test_ragged_lengths(engine, len_q, len_k):
    arrays = random_arrays(heads=1, len_q=len_q, len_k=len_k, head_dim=3, value_dim=5)
    assert_attention(engine.everything(*arrays), *arrays)


MASKS = {
    "or": Window(1, 1) | GlobalTokens([0]),
    "segments": Segments([0, 1, 0, 2, 1, 0], [1, 0, 0, 2, 1, 1, 0]),
    "and": (Window(2, 0) | GlobalTokens([3])) & Causal("bottom_right"),
    "nothing": (Window(0, 0) | GlobalTokens([])) & Segments([5] * 6, [4] * 7),
}


@pytest.mark.parametrize("name", MASKS)
def test_mask_objects(engine, name):
    arrays = random_arrays(heads=2, len_q=6, len_k=7, head_dim=4)
    results = engine.everything(*arrays, mask=MASKS[name])
    assert_attention(results, *arrays, mask=MASKS[name].materialize(2, 6, 7))


@pytest.mark.parametrize("tile", [0, 1, 2])
def test_tiles_of_the_map(engine, tile):
    """A map has tiles of 128 keys: empty, partial and full ones."""
    arrays = random_arrays(heads=1, len_q=2, len_k=300, head_dim=2)
    allowed = np.zeros((2, 300), bool)
    allowed[:, 128 * tile + 5 : 128 * tile + 40 : 7] = True
    keys = np.flatnonzero(allowed[0])
    mask = GlobalTokens(keys) & Window(None, None)
    assert_attention(engine.everything(*arrays, mask=mask), *arrays, mask=allowed)


@pytest.mark.parametrize("options", [{}, {"window": (20, None)}], ids=["alone", "window"])
def test_a_full_tile_of_the_map(engine, options):
    """Between an empty and a partial one; a window may cut it nevertheless."""
    arrays = random_arrays(heads=1, len_q=3, len_k=140, head_dim=2)
    allowed = np.zeros((3, 140), bool)
    allowed[:, :128] = True
    allowed[:, 130:135:2] = True
    mask = GlobalTokens(np.flatnonzero(allowed[0])) & Window(None, None)
    if options:
        allowed &= np.arange(140) >= np.arange(3)[:, None] + 117
    assert_attention(engine.everything(*arrays, mask=mask, **options), *arrays, mask=allowed)


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)], ids=str)
def test_empty_sizes(engine, sizes):
    B, H, L, S = sizes
    query, key, value = np.ones((B, H, L, 4)), np.ones((B, H, S, 4)), np.ones((B, H, S, 3))
    out, lse, weights = engine.everything(query, key, value)
    assert out.shape == (B, H, L, 3) and not out.any()
    assert lse.shape == (B, H, L) and weights.shape == (B, H, L, S)
    if S == 0:
        assert (lse == -np.inf).all()


def test_no_columns(engine):
    arrays = random_arrays(heads=1, len_q=3, len_k=5, head_dim=4, value_dim=0)
    out, lse, _ = engine.everything(*arrays)
    assert out.shape == (1, 3, 0) and np.isfinite(lse).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the simulator computes with NumPy
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("how", ["causal", "mask", "bias", "tiles", "lengths"])
def test_masked_keys_are_never_seen(engine, how, poison):
    query, key, value = random_arrays(heads=1, len_q=5, len_k=7, head_dim=4)
    hidden = 4  # from some rows, or from all
    rows = slice(None)
    if how == "causal":
        keywords, rows = {"causal": "top_left"}, slice(0, hidden)
    elif how == "mask":
        keywords = {"mask": np.arange(7) != hidden}
    elif how == "bias":
        keywords = {"bias": np.where(np.arange(7) == hidden, -np.inf, 0.5).astype(np.float32)}
    elif how == "tiles":
        keywords = {"mask": Segments([0] * 5, (np.arange(7) == hidden).astype(int))}
    else:
        keywords, hidden = {"key_lengths": 6}, 6
    clean = engine.everything(query, key, value, **keywords)
    key[:, hidden], value[:, hidden] = poison, poison
    for got, wanted in zip(engine.everything(query, key, value, **keywords), clean, strict=True):
        assert_same_bits(got[:, rows], wanted[:, rows])


def test_allowed_nan_goes_where_the_formula_sends_it(engine):
    query, key, value = random_arrays(heads=1, len_q=5, len_k=7, head_dim=4)
    value[:, 2, 1] = np.nan
    out = engine.attention(query, key, value, causal="top_left")
    assert np.isnan(out[0, 2:, 1]).all() and np.isfinite(out[0, :2]).all()
    assert np.isfinite(out[0, :, [0, 2, 3]]).all()
    query[0, 3] = np.nan
    out = engine.attention(query, key, np.ones_like(value))
    assert np.isnan(out[0, 3]).all() and np.isfinite(out[0, [0, 1, 2, 4]]).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("len_k", [9, 14], ids=["whole", "split"])
@pytest.mark.parametrize("sink", [np.inf, -np.inf, np.nan, 3e38])
def test_rows_without_keys_have_their_sink_alone(engine, sink, len_k):
    """Whatever it is, and whatever rows stand beside them; the others do what the formula does."""
    len_q = 2 if len_k == 14 else 5
    arrays = random_arrays(heads=2, len_q=len_q, len_k=len_k, head_dim=3)
    sinks = np.array([sink, 0.5], np.float32)
    for mask in (np.arange(len_q)[:, None] % 2 > np.zeros(len_k), np.zeros((len_q, len_k), bool)):
        out, lse, weights = engine.everything(*arrays, mask=mask, sinks=sinks)
        empty = ~mask.any(axis=-1)
        assert not out[:, empty].any() and not weights[:, empty].any()
        np.testing.assert_array_equal(lse[:, empty], np.broadcast_to(sinks[:, None], lse[:, empty].shape))
        assert_attention((out, lse, weights), *arrays, mask=mask, sinks=sinks)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("len_k", [9, 14], ids=["whole", "split"])
def test_the_sign_of_a_masked_value_is_not_that_of_a_zero(engine, len_k):
    query, key, value = random_arrays(heads=1, len_q=2, len_k=len_k, head_dim=3)
    value[...] = -1e-44
    value[..., 1], value[..., 2] = 0.0, -0.0
    value[:, 1] = 0
    bias = np.where(np.arange(len_k) == 1, 20.0, 0.0).astype(np.float32)
    results = []
    for number in (-1.0, 1.0, np.nan):
        value[:, -1] = number
        results.append(engine.attention(query, key, value, mask=np.arange(len_k) < len_k - 1, bias=bias))
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])
    assert not np.signbit(results[0][..., 1:]).any()


@pytest.mark.parametrize(
    "scale, cap",
    [(1.0, None), (3e38, None), (-3e38, None), (1e30, 1e-30), (1.0, 1e30), (1.0, 1.2e-38), (1.0, 3e38)],
)
def test_scale_of_any_size(engine, scale, cap):
    """Scores near the largest number, times log2(e), are beyond it."""
    query, key, value = random_arrays(heads=1, len_q=3, len_k=5, head_dim=3)
    query *= np.float32(2.0) ** -round(np.log2(abs(scale)))
    assert_attention(
        engine.everything(query, key, value, scale=scale, softcap=cap),
        query,
        key,
        value,
        scale=scale,
        softcap=cap,
    )


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_scores_near_the_largest_number(engine):
    query, key, value = random_arrays(heads=1, len_q=3, len_k=5, head_dim=3)
    query[...], key[...] = [1, 0, 0], 1
    key[:, :, 0] = np.float32([3e38, 2.9e38, -3e38, 3e38, 0])
    out = engine.attention(query, key, value, scale=1.0)
    np.testing.assert_allclose(
        out, np.broadcast_to(value[:, [0, 3]].mean(1, keepdims=True), out.shape), rtol=1e-6
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_lowest_numbers_are_numbers(engine, dtype):
    query, key, value = random_arrays(heads=1, len_q=3, len_k=5, head_dim=4, dtype=dtype)
    bias = np.full((3, 5), np.finfo(dtype).min, dtype)
    bias[1, 2:] = -np.inf
    bias[2] = -1e30
    out, lse, weights = engine.everything(query * 0, key, value, bias=bias)
    np.testing.assert_allclose(weights[0], [[0.2] * 5, [0.5, 0.5, 0, 0, 0], [0.2] * 5], rtol=1e-6)
    np.testing.assert_allclose(out[0, 0], value[0].mean(0), rtol=1e-5)
    assert (lse < -9e29).all() and np.isfinite(lse).all()


def test_same_bits(engine):
    """Not of the other items in the batch, the layout, nor the strides."""
    query, key, value = random_arrays(lead=(2,), heads=2, len_q=5, len_k=9, head_dim=6)
    out = engine.attention(query, key, value)
    assert_same_bits(engine.attention(query[1], key[1], value[1]), out[1])
    swapped = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (query, key, value)]
    assert_same_bits(engine.attention(*swapped, layout="bshd").swapaxes(1, 2), out, "layout")
    backwards = [np.ascontiguousarray(x[..., ::-1, ::-1])[..., ::-1, ::-1] for x in (query, key, value)]
    assert_same_bits(engine.attention(*backwards), out, "negative strides")
    one = engine.attention(query, key[:1], value[:1])
    many = engine.attention(query, np.repeat(key[:1], 2, 0), np.repeat(value[:1], 2, 0))
    assert_same_bits(one, many, "broadcast")


def test_out_and_dtypes(engine):
    query, key, value = random_arrays(heads=1, len_q=3, len_k=5, head_dim=4)
    out = np.full((1, 3, 8), 7.0, np.float32)
    view = out[..., ::2]
    assert engine.attention(query, key, value, out=view) is view
    assert_same_bits(out[..., ::2].copy(), engine.attention(query, key, value))
    assert (out[..., 1::2] == 7).all()
    assert engine.attention(query, key.astype(np.float64), value).dtype == np.float64


def test_sdpa_and_varlen_problems(engine):
    x = np.random.default_rng(0).standard_normal((7, 2, 4))
    out = fastattn.varlen_attention(x, x, x, [0, 3, 7], causal=True, backend="cuda")
    alone = fastattn.attention(x[3:], x[3:], x[3:], layout="bshd", causal=True, backend="reference")
    np.testing.assert_allclose(out[3:], alone, atol=1e-14)
