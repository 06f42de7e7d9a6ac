"""``precision="storage"`` in gradients: weights and gradients of scores are rounded to bfloat16."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import fastattn
from fastattn import masks
from tests import naive
from tests.cases import random_arrays
from tests.conftest import ENGINES, computes_gradients
from tests.tolerances import assert_same_bits

ROUNDING = [engine for engine in ENGINES if engine.isa in ("avx512_bf16", "bf16_model")]
needs_products = pytest.mark.skipif(not ROUNDING, reason="no products of bfloat16 pairs here")
on_rounding = pytest.mark.parametrize("engine", ROUNDING, ids=lambda engine: engine.name, indirect=True)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LEN_Q, LEN_K, DIM = 100, 330, 32
NUMBERS = np.random.default_rng(1)
CALLS = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (77, 3)},
    "bias": {"bias": NUMBERS.standard_normal((2, LEN_Q, LEN_K)).astype(np.float32)},
    "mask": {"mask": NUMBERS.random((LEN_Q, LEN_K)) < 0.7},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": np.array([1.0, -2.0], np.float32)},
    "lengths": {"key_lengths": 211},
    "dropout": {"dropout": 0.3, "seed": 5},
    "scale": {"scale": -0.3},
    "grad_lse": {"grad_lse": NUMBERS.standard_normal((2, LEN_Q)).astype(np.float32)},
    "documents": {"mask": masks.Segments(np.arange(LEN_Q) // 50, 1 * (np.arange(LEN_K) < 21))},
}


def call_of(seed=0, **sizes):
    """The gradient of the outputs, and query, key and value, in bfloat16."""
    sizes = {"heads": 2, "len_q": LEN_Q, "len_k": LEN_K, "head_dim": DIM} | sizes
    query, key, value = random_arrays(seed, **sizes)
    grad_out = random_arrays(seed + 100, **sizes | {"head_dim": value.shape[-1]})[0]
    return [array.astype(BFLOAT16) for array in (grad_out, query, key, value)]


def solve(engine, *arrays, precision="storage", **options):
    """The gradients of arrays in bfloat16, whose forward call had the same precision."""
    return engine.gradients(*arrays, precision=precision, **options)


def assert_same_gradients(got, expected):
    for name in ("query", "key", "value"):
        x, y = getattr(got, name), getattr(expected, name)
        assert_same_bits(x.view(np.uint16), y.view(np.uint16), name)


def reach_of_rounding(grad_out, query, key, value, options, exact):
    """The sums of the absolute products of each gradient of query, key and value: a number that is rounded by
    the share u of itself moves them by at most u times that."""
    options = {name: x for name, x in options.items() if name != "grad_lse"}
    weights = np.abs(naive.attention(query, key, value, **options).weights)
    change = np.abs(exact.bias)
    scale = abs(options.get("scale", query.shape[-1] ** -0.5))
    return {
        "query": scale * change @ np.abs(key),
        "key": scale * change.swapaxes(-1, -2) @ np.abs(query),
        "value": weights.swapaxes(-1, -2) @ np.abs(grad_out),
    }


@needs_products
@on_rounding
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(32, 32), (64, 33), (7, 70), (80, 1)])
def test_the_error_is_that_of_rounded_factors(engine, name, head_dim, value_dim):
    """Half a unit in the last place, 2**-8, of each weight and gradient of a score, and of the result."""
    arrays = call_of(3, head_dim=head_dim, value_dim=value_dim)
    options = dict(CALLS[name])
    forward = {name: x for name, x in options.items() if name != "grad_lse"}
    out = np.empty(arrays[0].shape, np.float32)  # or its own rounding would move `delta`
    _, lse = engine.attention(*arrays[1:], out=out, return_lse=True, **forward)
    got, rounded = (
        engine.backward(*arrays, out, lse, precision=it, **options) for it in ("storage", "exact")
    )
    if isinstance(options.get("mask"), masks.Mask):
        options["mask"] = options["mask"].materialize(2, LEN_Q, LEN_K)
    wide = [array.astype(np.float32) for array in arrays]
    with_bias = {"bias": np.zeros((2, LEN_Q, LEN_K), np.float32)} | options
    exact, reach = naive.gradients(*wide, **with_bias)
    products = reach_of_rounding(*wide, options, exact)
    for of in ("query", "key", "value"):
        want = getattr(exact, of)
        error = np.abs(getattr(got, of).astype(np.float64) - want)
        allowed = 2.0**-8 * (products[of] * (1 + 2.0**-8) + np.abs(want)) + 2.0**-20 * getattr(reach, of)
        assert (error <= allowed).all(), of
        assert (getattr(got, of) != getattr(rounded, of)).any(), f"{of}: nothing was rounded"


@needs_products
@on_rounding
@pytest.mark.parametrize("len_q", [33, 63, 64, 65, 129, 200])
@pytest.mark.parametrize("len_k", [1, 2, 127, 129, 700])
@pytest.mark.parametrize("grouped", [False, True])
def test_sizes(engine, len_q, len_k, grouped):
    heads = {"heads": 6, "kv_heads": 2} if grouped else {}
    arrays = call_of(4, len_q=len_q, len_k=len_k, **heads)
    got, exact = (solve(engine, *arrays, precision=it) for it in ("storage", "exact"))
    for of in ("query", "key", "value"):
        x, y = (getattr(found, of).astype(np.float64) for found in (got, exact))
        assert np.linalg.norm(x - y) <= 2.0**-7 * np.linalg.norm(y) + 1e-3, of


@computes_gradients
def test_other_types_and_few_rows_are_exact(engine):
    """Where an array has another type, or the CPU no products of pairs, and of few query rows."""
    arrays = call_of(5)
    cases = [[x.astype(np.float32) for x in arrays], [x.astype(np.float16) for x in arrays]]
    for place in range(4):
        cases.append([x.astype(np.float32) if n == place else x for n, x in enumerate(arrays)])
    cases.append(call_of(5, len_q=20))
    if engine not in ROUNDING:
        cases.append(arrays)
    for given in cases:
        out, lse = engine.attention(*given[1:], return_lse=True)
        calls = (engine.backward(*given, out, lse, precision=it) for it in ("storage", "exact"))
        for x, y in zip(*(found[:3] for found in calls), strict=True):
            assert_same_bits(x.view(f"u{x.itemsize}"), y.view(f"u{y.itemsize}"))


@needs_products
@on_rounding
@pytest.mark.parametrize("name", ["plain", "causal", "mask", "bias"])
def test_bits_depend_on_no_thread_stride_or_layout(engine, name):
    arrays = call_of(6, lead=(2,), value_dim=40)
    options = CALLS[name]
    expected = solve(engine, *arrays, **options, num_threads=3)
    assert_same_gradients(solve(engine, *arrays, **options, num_threads=1), expected)
    swapped = [array.swapaxes(-2, -3) for array in arrays]
    got = solve(engine, *swapped, layout="bshd", **options)
    for of in ("query", "key", "value"):
        x, y = getattr(got, of).swapaxes(-2, -3), getattr(expected, of)
        assert_same_bits(x.view(np.uint16), y.view(np.uint16), of)
    for given in ([np.asfortranarray(x) for x in arrays], [x[..., ::-1].copy()[..., ::-1] for x in arrays]):
        assert_same_gradients(solve(engine, *given, **options), expected)
    alone = solve(engine, *(array[1:] for array in arrays), **options)
    for of in ("query", "key", "value"):
        x, y = getattr(alone, of), getattr(expected, of)[1:]
        assert_same_bits(x.view(np.uint16), y.view(np.uint16), of)


@needs_products
@on_rounding
@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("len_k", [63, 129, 257, 512])
def test_masked_keys_may_hold_anything(engine, number, len_k):
    """Also the one that the last of an odd number of keys is paired with."""
    grad_out, query, key, value = call_of(8, len_k=len_k + 3)
    key[..., len_k:, :] = value[..., len_k:, :] = 0
    expected = solve(engine, grad_out, query, key, value, key_lengths=len_k)
    key[..., len_k:, :] = value[..., len_k:, :] = number
    assert_same_gradients(solve(engine, grad_out, query, key, value, key_lengths=len_k), expected)
    assert not np.any(expected.key[..., len_k:, :]) and not np.any(expected.value[..., len_k:, :])


@needs_products
@on_rounding
@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("place", ["grad_out", "query", "key", "value"])
def test_what_is_not_finite_reaches_what_may_read_it(engine, place, number):
    names = ("grad_out", "query", "key", "value")
    arrays = dict(zip(names, call_of(9), strict=True))
    mask = np.ones((LEN_Q, LEN_K), bool)
    mask[::3, 41] = mask[7, ::2] = False
    arrays[place][1, 7 if place in ("grad_out", "query") else 41, 5] = number
    got, exact = (solve(engine, *arrays.values(), precision=it, mask=mask) for it in ("storage", "exact"))
    for of in ("query", "key", "value"):
        x, y = (getattr(found, of).astype(np.float32) for found in (got, exact))
        np.testing.assert_array_equal(np.isnan(x), np.isnan(y), of)
        np.testing.assert_array_equal(np.isinf(x), np.isinf(y), of)
        assert np.isfinite(y).any()


@needs_products
@on_rounding
@pytest.mark.parametrize(
    ("head_dim", "scale"), [(24, None), (32, None), (96, None), (32, -0.3), (32, 2.7)], ids=str
)
def test_an_odd_row_that_overflows(engine, head_dim, scale):
    """The last row is paired with none: its infinite gradients of scores are not multiplied by 0. Those of
    keys are multiplied by what a power of two leaves of the scale, in two parts of one sign."""
    grad_out, query, key, value = call_of(13, len_q=65, head_dim=head_dim)
    grad_out[..., -1, :] = 0
    grad_out[..., -1, 0] = 1e38
    value[..., 0] = np.where(np.arange(LEN_K) % 2, 100, -100)
    arrays = grad_out, query, key, value
    got, exact = (solve(engine, *arrays, precision=it, scale=scale) for it in ("storage", "exact"))
    x, y = (found.key.astype(np.float32) for found in (got, exact))
    assert np.isinf(y).any()
    np.testing.assert_array_equal(np.isinf(x), np.isinf(y))
    np.testing.assert_array_equal(np.isnan(x), np.isnan(y))


@needs_products
@on_rounding
@pytest.mark.parametrize("place", ["query", "grad_out"])
def test_rows_whose_products_are_not_those_of_pairs(engine, place):
    """Denormal numbers beside very large ones: products of usual size. Other rows keep their bits."""
    arrays = dict(zip(("grad_out", "query", "key", "value"), call_of(10), strict=True))
    large = {"query": "key", "grad_out": "value"}[place]
    arrays[large] = (arrays[large].astype(np.float32) * 2.0**122).astype(BFLOAT16)
    signs = np.sign(arrays[place][:, 30].astype(np.float32))
    arrays[place] = arrays[place] * 0
    expected = solve(engine, *arrays.values())
    arrays[place][:, 30] = (signs * 2.0**-122 * 0.125).astype(BFLOAT16)
    usual = solve(engine, *arrays.values())
    arrays[place][:, 30] = (signs * 2.0**-130).astype(BFLOAT16)
    got, exact = (solve(engine, *arrays.values(), precision=it) for it in ("storage", "exact"))
    others = np.arange(LEN_Q) != 30
    for found in (got, usual):
        x, y = found.query[:, others], expected.query[:, others]
        assert_same_bits(x.view(np.uint16), y.view(np.uint16))
    of = {"query": "value", "grad_out": "key"}[place]
    x, y = (getattr(found, of).astype(np.float64) for found in (got, exact))
    assert np.any(y) and np.linalg.norm(x - y) <= 2.0**-7 * np.linalg.norm(y)


@needs_products
@on_rounding
def test_large_scores(engine):
    """The lse of their own scores replaces the one given, as in an exact call."""
    grad_out, query, key, value = call_of(11)
    query[:, ::2] = (query[:, ::2].astype(np.float32) * 2.0**9).astype(BFLOAT16)
    got, exact = (solve(engine, grad_out, query, key, value, precision=it) for it in ("storage", "exact"))
    for of in ("query", "key", "value"):
        x, y = (getattr(found, of).astype(np.float64) for found in (got, exact))
        assert np.linalg.norm(x - y) <= 2.0**-6 * np.linalg.norm(y), of


@needs_products
@on_rounding
@pytest.mark.parametrize("scale", [1.0, 20000.0])
def test_large_scores_that_cancel(engine, scale):
    """Weights add up to 1, also beside an lse of scores that were added up in another order, as float32."""
    rng = np.random.default_rng(14)
    query, key = np.ones((2, 100, 64)), 0.3 * rng.standard_normal((2, 300, 64))
    key[..., 0], key[..., 40] = 2.0**21, -(2.0**21)  # by which the others lose what makes up their sums
    query, key = query.astype(BFLOAT16), (key / scale).astype(BFLOAT16)
    value = np.zeros((2, 300, 8), BFLOAT16)
    wide = [x.astype(np.float32) for x in (query, key, value)]
    out, lse = engine.attention(*wide, scale=scale, return_lse=True)
    grad_out = np.ones(out.shape, BFLOAT16)
    got = engine.backward(grad_out, query, key, value, out, lse, scale=scale, precision="storage")
    sums = got.value.astype(np.float64).sum(axis=-2)
    np.testing.assert_allclose(sums, 100.0, rtol=2.0**-7)


@needs_products
@on_rounding
def test_functions_of_scores_and_documents(engine):
    grad_out, query, key, value = call_of(12, len_k=LEN_Q)

    def plus_distance(score, b, h, q_idx, kv_idx):
        return score + 0.01 * (kv_idx - q_idx)

    found = []
    for precision in ("storage", "exact"):
        options = {"backend": engine.backend, "precision": precision}
        out, lse = fastattn.flex_attention(
            query, key, value, score_mod=plus_distance, return_lse=True, **options
        )
        flex = fastattn.flex_attention_backward(
            grad_out, query, key, value, out, lse, score_mod=plus_distance, **options
        )
        packed = [x.swapaxes(0, 1) for x in (grad_out, query, key, value)]
        out, lse = fastattn.varlen_attention(*packed[1:], [0, 41, LEN_Q], return_lse=True, **options)
        documents = fastattn.varlen_attention_backward(*packed, out, lse, [0, 41, LEN_Q], **options)
        found.append((*flex[:3], *documents[:3]))
    for x, y in zip(*found, strict=True):
        assert (x != y).any()
        x, y = x.astype(np.float64), y.astype(np.float64)
        assert np.linalg.norm(x - y) <= 2.0**-7 * np.linalg.norm(y)
