"""Dropout: which weights are dropped, by the contract's definition, and what that does to outputs."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastattn
from fastattn import masks
from fastattn.backends.registry import load
from tests import cases, naive
from tests.cases import Case
from tests.conftest import FLOAT32_FIRST, computes_gradients, on_cython
from tests.refusals import assert_named
from tests.test_backward import check
from tests.tolerances import assert_all_same, assert_attention, assert_same_bits, computes_as_upcast

#: What drops weights is what computes gradients.
drops_weights = computes_gradients

DROP = {"dropout": 0.3, "seed": 5}

# ---------------------------------------------------------------- which weights


SEEDS = [0, 1, 2**63, 2**64 - 1, 2**64, 2**128 - 1, np.int64(7), np.uint64(2**64 - 1)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 5, 15), (2, 3, 5, 16), (1, 2, 9, 17), (2, 1, 33, 99)])
def test_the_mask_is_that_of_the_contract(shape, seed):
    for p in (2**-16, 0.1, 0.5, 1 - 2**-16):
        mask = fastattn.dropout_mask(shape, p, seed)
        assert mask.dtype == bool
        assert mask.flags.c_contiguous
        np.testing.assert_array_equal(mask, naive.kept_weights(shape, p, int(seed))[0])


def test_a_large_mask_is_drawn_in_parts_as_the_whole_is():
    shape = (2, 3, 1500, 700)
    np.testing.assert_array_equal(fastattn.dropout_mask(shape, 0.2, 3), naive.kept_weights(shape, 0.2, 3)[0])


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0), (2, 0, 5), (0,), (3, 4), [5], (2, 2, 2, 3, 4)], ids=str)
def test_shapes_of_masks(shape):
    mask = fastattn.dropout_mask(shape, 0.5, 1)
    assert mask.shape == tuple(shape)
    *rows, len_k = shape
    flat = fastattn.dropout_mask((1, 1, int(np.prod(rows)), len_k), 0.5, 1)
    np.testing.assert_array_equal(mask.ravel(), flat.ravel())


def test_no_dropout_keeps_all():
    for p in (0, 0.0, 2**-18):  # less than half a step of 2**-16
        assert fastattn.dropout_mask((3, 50), p, 0).all()


def test_the_share_that_is_kept():
    """Of a million weights, within five standard deviations."""
    for p in (0.001, 0.1, 0.5, 0.99):
        share = 1 - fastattn.dropout_mask((1000, 1000), p, 11).mean()
        assert abs(share - p) < 5 * np.sqrt(p * (1 - p) / 1e6)


# ---------------------------------------------------------------- attention with it

SIZES = [(1, 1), (1, 300), (3, 33), (8, 20), (17, 16), (47, 49), (49, 95), (130, 257), (16, 600)]


@drops_weights
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(engine, sizes, dtype):
    len_q, len_k = sizes
    arrays = cases.random_arrays(1, lead=(2,), heads=2, len_q=len_q, len_k=len_k, head_dim=20, dtype=dtype)
    assert_attention(engine.everything(*arrays, **DROP), *arrays, **DROP)


MEDIUM = Case("medium", lead=(2, 2), heads=4, kv_heads=2, len_q=35, len_k=70, head_dim=12, value_dim=9)
FEW = Case("few", lead=(3,), heads=4, kv_heads=2, len_q=2, len_k=150, head_dim=12, value_dim=9)
OPTIONS = {
    "plain": {},
    "causal": {"causal": "top_left"},
    "bottom_right": {"causal": "bottom_right"},
    "window": {"window": (9, 3)},
    "lengths": {"key_lengths": 41},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": 25.0},
    "bias": {"bias": np.linspace(-2, 1, 70)},
}


@drops_weights
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("case", [MEDIUM, FEW], ids=lambda case: case.name)
def test_options(engine, case, option, dtype):
    arrays = case.as_dtype(dtype).arrays()
    options = dict(OPTIONS[option])
    if option == "bias":
        options["bias"] = np.linspace(-2, 1, case.len_k).astype(dtype)
    assert_attention(engine.everything(*arrays, **options, **DROP), *arrays, **options, **DROP)
    check(engine, arrays, options | DROP)


@drops_weights
@pytest.mark.parametrize("p", [2**-16, 0.02, 0.5, 0.97, 1 - 2**-16])
def test_shares(engine, p):
    arrays = cases.random_arrays(3, heads=2, len_q=50, len_k=200, head_dim=8)
    check(engine, arrays, {"dropout": p, "seed": 2**100 + 1, "causal": "bottom_right"})


@drops_weights
@pytest.mark.parametrize("case", [MEDIUM, FEW], ids=lambda case: case.name)
def test_what_is_dropped_is_0_and_nothing_else_changes(engine, case):
    arrays = case.arrays()
    _, lse, weights = engine.everything(*arrays)
    out, lse_after, after = engine.everything(*arrays, **DROP)
    keep = fastattn.dropout_mask(weights.shape, DROP["dropout"], DROP["seed"])
    assert_same_bits(lse_after, lse)
    assert not after[~keep].any()
    share = 1 - round(65536 * DROP["dropout"]) / 65536
    np.testing.assert_allclose(after[keep], weights[keep] / share, rtol=3e-7)
    value = np.repeat(arrays[2], case.heads // case.kv_heads, axis=-3)
    np.testing.assert_allclose(out, after @ value, rtol=1e-4, atol=1e-5)


@drops_weights
def test_all_weights_of_a_row_may_be_dropped(engine):
    arrays = cases.random_arrays(4, heads=1, len_q=60, len_k=3, head_dim=8)
    keep = fastattn.dropout_mask((1, 60, 3), 0.9, 1)
    out, lse = engine.attention(*arrays, return_lse=True, dropout=0.9, seed=1)
    gone = ~keep.any(axis=-1)
    assert gone.any()
    assert not out[gone].any()
    assert np.isfinite(lse).all()


@drops_weights
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("case", [MEDIUM, FEW], ids=lambda case: case.name)
def test_bits_do_not_depend_on_threads_or_memory(engine, case, layout):
    arrays = case.arrays()
    wanted = engine.everything(*arrays, num_threads=1, **DROP)
    if layout == "bshd":
        arrays = tuple(array.swapaxes(-2, -3).copy() for array in arrays)
    for place in ("fortran", "reversed", "every_other"):
        moved = [cases.MEMORY_LAYOUTS[place](array) for array in arrays]
        out, *others = engine.everything(*moved, num_threads=3, layout=layout, **DROP)
        out = np.ascontiguousarray(out.swapaxes(-2, -3)) if layout == "bshd" else out
        assert_all_same((out, *others), wanted)


@drops_weights
def test_one_head_without_an_axis_is_the_same_head_with_one(engine):
    query, key, value = cases.random_arrays(5, heads=1, len_q=40, len_k=50, head_dim=8)
    wanted = engine.attention(query, key, value, **DROP)
    assert_same_bits(engine.attention(query[0], key[0], value[0], **DROP), wanted[0])


@drops_weights
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bits(engine, dtype):
    arrays = tuple(array.astype(dtype) for array in MEDIUM.arrays())
    upcast = tuple(array.astype(np.float32) for array in arrays)
    expected = engine.attention(*upcast, **DROP)
    out, stored = np.empty_like(expected), engine.attention(*arrays, **DROP)
    _, lse = engine.attention(*arrays, out=out, return_lse=True, **DROP)
    assert_same_bits(stored, out.astype(dtype))
    if computes_as_upcast(engine.isa, dtype):
        assert_same_bits(out, expected)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    grad_out = np.random.default_rng(0).standard_normal(out.shape).astype(dtype)
    got = engine.backward(grad_out, *arrays, stored, lse, **DROP)
    wanted = engine.backward(*(x.astype(np.float32) for x in (grad_out, *arrays, stored)), lse, **DROP)
    for name in ("query", "key", "value"):
        assert_same_bits(getattr(got, name), getattr(wanted, name).astype(dtype), name)


@drops_weights
@settings(max_examples=40)
@given(
    len_q=st.integers(1, 70), len_k=st.integers(1, 200), heads=st.integers(1, 3), lead=st.integers(1, 3),
    p=st.floats(0, 0.999), seed=st.integers(0, 2**128 - 1), causal=st.sampled_from([False, "bottom_right"]),
    window=st.sampled_from([None, (5, 0), (40, 7)]), tiles=st.booleans(),
)  # fmt: skip
def test_any_problem(engine, len_q, len_k, heads, lead, p, seed, causal, window, tiles):
    arrays = cases.random_arrays(
        seed % 2**32, lead=(lead,), heads=heads, len_q=len_q, len_k=len_k, head_dim=5, dtype="float64"
    )
    options = {"causal": causal, "window": window, "dropout": p, "seed": seed}
    mask = (masks.Window(30, 3) | masks.GlobalTokens([0])) if tiles else None
    results = engine.everything(*arrays, mask=mask, num_threads=2, **options)
    i, j = np.arange(len_q)[:, None] + (len_k - len_q), np.arange(len_k)
    allowed = ((j >= i - 30) & (j <= i + 3)) | (j == 0) | (i == 0) if tiles else None
    assert_attention(results, *arrays, mask=allowed, **options)


@drops_weights
def test_nan_behind_masks_is_never_seen(engine):
    query, key, value = cases.random_arrays(6, lead=(2,), heads=2, len_q=60, len_k=90, head_dim=8)
    options = {"key_lengths": [70, 33], "causal": "top_left", **DROP}
    wanted = engine.everything(query, key, value, **options)
    key, value = key.copy(), value.copy()
    for item, length in enumerate((70, 33)):
        key[item, :, min(60, length) :] = np.nan
        value[item, :, min(60, length) :] = np.inf
    assert_all_same(engine.everything(query, key, value, **options), wanted)


@drops_weights
def test_nan_of_an_allowed_key_reaches_its_readers(engine):
    """Dropped or not, as 0 times NaN is NaN in the formula."""
    query, key, value = cases.random_arrays(7, heads=1, len_q=50, len_k=50, head_dim=8)
    value[:, 20] = np.nan
    out = engine.attention(query, key, value, causal=True, **DROP)
    assert np.isnan(out[0, 20:]).all()
    assert np.isfinite(out[0, :20]).all()


@drops_weights
@pytest.mark.parametrize("where", ["grad_out", "value"])
def test_nan_reaches_the_gradients_that_it_does_without_dropout(engine, where):
    query, key, value = cases.random_arrays(8, heads=1, len_q=50, len_k=50, head_dim=8)
    if where == "value":
        value[:, 20] = np.nan
    out, lse = engine.attention(query, key, value, causal=True, return_lse=True, **DROP)
    grad_out = np.ones_like(out)
    if where == "grad_out":
        grad_out[:, 20] = np.nan
    found = engine.backward(grad_out, query, key, value, out, lse, causal=True, **DROP)
    readers = slice(20, None) if where == "value" else slice(20, 21)
    for name, nan in {"query": readers, "key": slice(None) if where == "value" else slice(0, 21)}.items():
        expected = np.zeros(50, bool)
        expected[nan] = True
        np.testing.assert_array_equal(np.isnan(getattr(found, name)[0]).any(axis=-1), expected, name)


# ---------------------------------------------------------------- functions of the caller


def identity(score, b, h, q_idx, kv_idx):
    return score


def biased(score, b, h, q_idx, kv_idx, table):
    return score + table[h, q_idx, kv_idx]


def at_most_9_apart(b, h, q_idx, kv_idx):
    return abs(q_idx - kv_idx) <= 9


FLEX_SIZES = [(3, 33), (49, 95), (130, 257)]
RESULTS = {"return_lse": True, "return_weights": True}


@drops_weights
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("size", FLEX_SIZES, ids=str)
@pytest.mark.parametrize("kind", ["mask_mod", "block_mask", "neither"])
def test_flex_attention_drops_the_same_weights(engine, kind, size, dtype):
    """Bit for bit those of `attention` with the mask that the function makes."""
    pytest.importorskip("numba")
    arrays = cases.random_arrays(3, lead=(2,), heads=4, kv_heads=2, len_q=size[0], len_k=size[1], dtype=dtype)
    own = {"mask_mod": {"mask_mod": at_most_9_apart}, "neither": {}}.get(kind)
    if own is None:
        own = {"block_mask": fastattn.create_block_mask(at_most_9_apart, None, None, *size)}
    mask = {} if kind == "neither" else {"mask": masks.Window(9, 9, "top_left")}
    for seed in (5, 5, 6):  # the second call is a prepared one, and the third has another seed
        options = {"causal": "bottom_right", "dropout": 0.3, "seed": seed} | RESULTS
        got = fastattn.flex_attention(*arrays, **own, **options, backend=engine.backend)
        assert_all_same(got, engine.attention(*arrays, **mask, **options))


@on_cython
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("size", FLEX_SIZES, ids=str)
def test_weights_are_dropped_after_a_score_function(engine, size, dtype):
    pytest.importorskip("numba")
    arrays = cases.random_arrays(3, heads=4, kv_heads=2, len_q=size[0], len_k=size[1], dtype=dtype)
    table = np.random.default_rng(2).standard_normal((4, *size)).astype(dtype)
    call = partial(fastattn.flex_attention, *arrays, backend=engine.backend, **RESULTS)
    for mod, same in (
        ({"score_mod": identity}, {}),
        ({"score_mod": biased, "aux": (table,)}, {"bias": table}),
    ):
        for seed in (5, 5, 6):
            drop = {"dropout": 0.3, "seed": seed}
            one = call(**mod, **drop)
            assert_attention(one, *arrays, **same, **drop)
            kept = np.broadcast_to(fastattn.dropout_mask((4, *size), 0.3, seed), one[2].shape)
            np.testing.assert_array_equal(one[2] != 0, kept)
            assert_all_same(call(**mod, **drop, num_threads=3), one)
            assert_same_bits(call(**mod)[1], one[1])  # dropout leaves the lse


# ---------------------------------------------------------------- errors


def call(name, **options):
    query = np.ones((1, 2, 4, 8))
    if name != "attention_backward":
        return getattr(fastattn, name)(query, query, query, **options)
    return fastattn.attention_backward(query, query, query, query, query, np.ones((1, 2, 4)), **options)


@pytest.mark.parametrize("name", ["attention", "flex_attention", "attention_backward"])
def test_errors(name):
    drops, seeded = partial(call, name, seed=0), partial(call, name, dropout=0.1)
    assert_named(drops, ValueError, {"dropout": [1.0, -0.1, 1 - 2**-18, np.nan]})
    assert_named(drops, TypeError, {"dropout": ["0.1", True, np.complex64(0.1), np.ones(2)]})
    assert_named(seeded, TypeError, {"seed": [1.0, True]})
    assert_named(seeded, ValueError, {"seed": [-1, 2**128]})
    assert_named(partial(call, name), TypeError, {"dropout": [np.ones(2)], "seed": ["1"]})
    with pytest.raises(ValueError, match="dropout needs a seed"):
        call(name, dropout=0.1)


@pytest.mark.parametrize(
    ("shape", "p", "seed", "error"),
    [
        ((), 0.1, 0, ValueError), ((2, -1), 0.1, 0, ValueError), ((2.0, 3), 0.1, 0, TypeError),
        (5, 0.1, 0, TypeError), ((2, 3), 1.0, 0, ValueError), ((2, 3), 0.0, None, ValueError),
    ],
    ids=str,
)  # fmt: skip
def test_errors_of_masks(shape, p, seed, error):
    with pytest.raises(error):
        fastattn.dropout_mask(shape, p, seed)


@pytest.mark.parametrize("name", ["numba", "cuda"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_other_backends_say_why_they_refuse(name, dtype, monkeypatch):
    """With whatever else they refuse."""
    backend = load(name)
    monkeypatch.setattr(type(backend), "unavailable_reasons", lambda self: [])
    query = np.ones((1, 2, 4, 8), dtype)
    with pytest.raises(fastattn.BackendError, match="it drops no weights") as caught:
        fastattn.attention(query, query, query, backend=name, **DROP)
    with pytest.raises(fastattn.BackendError, match="it drops no weights"):
        fastattn.flex_attention(query, query, query, score_mod=identity, backend=name, **DROP)
    assert ("16-bit" in str(caught.value)) == (name == "numba" and dtype == np.float16)


def test_a_seed_without_dropout_drops_nothing():
    assert_same_bits(call("attention", seed=3), call("attention"))


def test_pytorchs_argument_says_what_takes_its_place():
    with pytest.raises(TypeError, match="say dropout="):
        call("attention", dropout_p=0.1)
    query = np.ones((1, 2, 4, 8))
    with pytest.raises(ValueError, match=r"dropout=0.1, seed="):
        fastattn.scaled_dot_product_attention(query, query, query, dropout_p=0.1)
