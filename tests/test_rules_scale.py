"""No scale or soft-cap overflows or underflows where the formula does not."""

from __future__ import annotations

import math
from functools import lru_cache

import ml_dtypes
import numpy as np
import pytest

import fastattn
from tests import naive
from tests.cases import FLOATS, random_arrays
from tests.conftest import READS_STORAGE, computes_gradients, on
from tests.tolerances import assert_answer, assert_same_bits, solve, solve_gradients

SIZES = {"few": (2, 300), "many": (20, 40)}
TOP = {"float32": 126, "float64": 1022}


@lru_cache(maxsize=256)
def solved(size, dtype, query_power, key_power, name, scale=None, softcap=None):
    """Arrays, options, the exact answer and the formula's, once for all backends."""
    query, key, value = problem(size, dtype)
    arrays = np.ldexp(query, query_power).astype(dtype), np.ldexp(key, key_power).astype(dtype), value
    options = options_of(name, size, dtype) | ({} if scale is None else {"scale": scale})
    options |= {} if softcap is None else {"softcap": softcap}
    return arrays, options, naive.attention(*arrays, **options), naive.formula(*arrays, **options)


def assert_solves(engine, *named, **also):
    """Hold the engine to the exact answer, where the formula has one."""
    arrays, options, exact, plain = solved(*named, **also)
    assert np.isfinite(plain.out).all()
    assert_answer(engine.everything(*arrays, **options), exact, plain)


def problem(size, dtype):
    len_q, len_k = SIZES[size]
    return random_arrays(heads=2, len_q=len_q, len_k=len_k, head_dim=9, dtype=dtype)


#: Powers of two, in shares of the largest, of the query, the key and the scale: together about 2^0.
#: Keys below the normal numbers have fewer bits, but those count.
POWERS = {
    "large_scale": (0.9, -1.0, 0.1),
    "larger_scale": (0.0, -0.9, 0.9),
    "largest_scale": (-0.2, -0.75, 0.95),
    "subnormal_keys": (0.5, -1.06, 0.56),
    "more_subnormal_keys": (0.1, -1.06, 0.96),
    "large_query": (0.95, -0.95, 0.0),
    "small_scale": (-0.5, 0.95, -0.45),
    "small_query": (-0.9, 0.95, -0.05),
    "least_scale": (0.4, 0.5, -0.9),
}
OPTIONS = ("plain", "causal", "sinks", "bias", "mask", "softcap", "softcap_bias")


def options_of(name, size, dtype):
    len_q, len_k = SIZES[size]
    rng = np.random.default_rng(3)
    bias = rng.standard_normal((len_q, len_k)).astype(dtype)
    return {
        "plain": {},
        "causal": {"causal": "bottom_right"},
        "sinks": {"sinks": np.array([0.3, -1.0], dtype)},
        "bias": {"bias": bias},
        "mask": {"mask": bias < 1},
        "softcap": {"softcap": 2.5},
        "softcap_bias": {"softcap": 2.5, "bias": bias, "sinks": np.array([0.3, -1.0], dtype)},
    }[name]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("powers", POWERS)
def test_scale_of_any_size(engine, powers, dtype):
    query_power, key_power, scale_power = (round(share * TOP[dtype]) for share in POWERS[powers])
    key_power = max(key_power, -TOP[dtype] - 8)
    scale = -0.7 * 2.0**-2 * 2.0 ** -(query_power + key_power)
    assert abs(math.log2(abs(scale)) - scale_power) < 70
    for size in SIZES:
        for name in OPTIONS:
            assert_solves(engine, size, dtype, query_power, key_power, name, scale=scale)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("share", [-0.95, -0.7, -0.2, 0.2, 0.7, 0.95])
def test_softcap_of_any_size(engine, share, dtype):
    """A small one makes all scores the same size; a large one changes none."""
    softcap, some = 0.9 * 2.0 ** round(share * TOP[dtype]), round(0.3 * TOP[dtype])
    for size in SIZES:
        for name in ("softcap", "softcap_bias"):
            for power in (0, some, -some):
                assert_solves(engine, size, dtype, power, -power, name, softcap=softcap)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", SIZES)
def test_scale_over_softcap_beyond_the_largest_number(engine, size, dtype):
    """A query of 0 stays a score of 0."""
    query, key, value = problem(size, dtype)
    query[..., 1:] = 0
    key[..., 0] = 0
    options = {"scale": 2.0 ** (0.5 * TOP[dtype]), "softcap": 2.0 ** (-0.9 * TOP[dtype])}
    np.testing.assert_allclose(
        engine.attention(query, key, value, **options),
        np.broadcast_to(value.mean(axis=-2, keepdims=True), (*query.shape[:-1], value.shape[-1])),
        atol=20 * np.finfo(dtype).eps,
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_power_of_two_moves_between_scale_and_query(engine, sign, dtype):
    """No bit depends on which of the two has it: the way that a large scale takes rounds nowhere else."""
    for size in SIZES:
        query, key, value = problem(size, dtype)
        for name in OPTIONS:
            options = options_of(name, size, dtype)
            usual = engine.everything(query, key, value, scale=0.3 * sign, **options)
            for power in (3, 40, -3):
                moved = np.ldexp(query, -power).astype(dtype)
                results = engine.everything(moved, key, value, scale=0.3 * sign * 2.0**power, **options)
                for got, wanted in zip(results, usual, strict=True):
                    assert_same_bits(got, wanted, f"{name}, 2**{power}")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [1.0, -1.0, 0.7, 3.0])
def test_scores_near_the_largest_number(engine, scale, size, dtype):
    """They are numbers, and so they are times log2(e)."""
    query, key, value = problem(size, dtype)
    largest = np.finfo(dtype).max * np.sign(scale) * 0.9 / max(1, abs(scale))
    query[...] = np.arange(9) == 0
    key[..., 0] = largest * np.linspace(-1, 1, key.shape[-2])
    key[..., -2:, 0] = largest
    out = engine.attention(query, key, value, scale=scale)
    expected = np.broadcast_to(value[..., -2:, :].mean(axis=-2, keepdims=True), out.shape)
    np.testing.assert_allclose(out, expected, atol=4 * np.finfo(dtype).eps)


#: One for each of four query heads.
SCALES = np.array([0.3, 0.0, -1.7, 2.5])


def grouped(dtype, lead=(2,), len_q=20, len_k=40):
    return random_arrays(lead=lead, heads=4, kv_heads=2, len_q=len_q, len_k=len_k, head_dim=9, dtype=dtype)


def times(query, scales, dtype=None):
    """The query as it is computed with, of axes (..., heads, length, dim)."""
    dtype = query.dtype if dtype is None else dtype
    return query.astype(dtype) * scales.astype(dtype)[:, None, None]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", OPTIONS[:-1])
def test_each_head_has_its_scale(engine, dtype, name):
    query, key, value = grouped(dtype)
    options = options_of(name, "many", dtype) | (
        {"sinks": np.float32([1, 0, -1, 2])} if name == "sinks" else {}
    )
    got = engine.everything(query, key, value, scale=SCALES, **options)
    for ours, same in zip(
        got, engine.everything(times(query, SCALES), key, value, scale=1.0, **options), strict=True
    ):
        assert_same_bits(ours, same)
    for h, scale in enumerate(SCALES):
        one, alone = slice(h, h + 1), slice(h // 2, h // 2 + 1)
        own = options | ({"sinks": options["sinks"][one]} if name == "sinks" else {})
        exact, plain = solve(query[:, one], key[:, alone], value[:, alone], scale=float(scale), **own)
        assert_answer(tuple(x[:, one] for x in got), exact, plain)


def test_scales_of_heads_in_any_form(engine):
    query, key, value = grouped("float32")
    wanted = engine.attention(query, key, value, scale=SCALES.astype(np.float32), causal="bottom_right")
    swapped = [x.swapaxes(1, 2) for x in (query, key, value)]
    for scale in (SCALES, SCALES.tolist(), SCALES.astype(">f8"), np.repeat(SCALES, 3)[::3]):
        assert_same_bits(engine.attention(query, key, value, scale=scale, causal="bottom_right"), wanted)
    got = engine.attention(*swapped, scale=SCALES, causal="bottom_right", layout="bshd")
    assert_same_bits(got.swapaxes(1, 2), wanted)
    for scale in (0.7, -3.0):  # of one head, and after others of its signature
        one = engine.attention(query[0, 0], key[0, 0], value[0, 0], scale=[scale])
        assert_same_bits(
            one, engine.attention(query[0, 0] * np.float32(scale), key[0, 0], value[0, 0], scale=1.0)
        )
    same = np.broadcast_to(query[:1], query.shape)
    assert_same_bits(
        engine.attention(same, key, value, scale=SCALES),
        engine.attention(same.copy(), key, value, scale=SCALES),
    )
    out = query[..., :8]  # which is read
    wanted = engine.attention(query, key, value[..., :8], scale=SCALES)
    assert_same_bits(engine.attention(query, key, value[..., :8], scale=SCALES, out=out), wanted)


@on(READS_STORAGE)
@pytest.mark.parametrize("storage", [np.float16, ml_dtypes.bfloat16])
def test_scales_of_heads_of_16_bit_queries(engine, storage):
    query, key, value = (x.astype(storage) for x in grouped("float32"))
    got, lse = engine.attention(query, key, value, scale=SCALES, return_lse=True)
    assert got.dtype == storage and lse.dtype == np.float32
    wide = (x.astype(np.float32) for x in (key, value))
    wanted = engine.attention(times(query, SCALES, np.float32), *wide, scale=1.0)
    assert_same_bits(got, wanted.astype(storage))


def test_nonfinite_queries_keep_to_their_rows_beside_scales_of_heads(engine):
    query, key, value = grouped("float32")
    wanted = engine.attention(query, key, value, scale=SCALES)
    query[:, :, 3, 2], query[:, :, 5, 0] = np.nan, np.inf
    got = engine.attention(query, key, value, scale=SCALES)
    assert np.isnan(got[:, :, 3]).all() and np.isnan(got[:, 1, 5]).all()
    others = np.delete(np.arange(20), [3, 5])
    assert_same_bits(got[:, :, others], wanted[:, :, others])


@computes_gradients
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("options", [{}, {"softcap": 2.5}, {"causal": "bottom_right"}], ids=str)
def test_gradients_beside_scales_of_heads(engine, dtype, options):
    query, key, value = grouped(dtype)
    grad_out = np.random.default_rng(1).standard_normal((2, 4, 20, value.shape[-1])).astype(dtype)
    got = engine.gradients(grad_out, query, key, value, scale=SCALES, **options)
    moved = engine.gradients(grad_out, times(query, SCALES), key, value, scale=1.0, **options)
    assert_same_bits(got.query, times(moved.query, SCALES))
    assert_same_bits(got.key, moved.key)
    assert_same_bits(got.value, moved.value)
    exact = np.zeros(key.shape, np.longdouble)
    for h, scale in enumerate(SCALES):
        one, alone = slice(h, h + 1), slice(h // 2, h // 2 + 1)
        answer, *_ = solve_gradients(
            grad_out[:, one], query[:, one], key[:, alone], value[:, alone], scale=float(scale), **options
        )
        np.testing.assert_allclose(got.query[:, one], answer.query, atol=100 * np.finfo(dtype).eps)
        exact[:, alone] += answer.key
    np.testing.assert_allclose(got.key, exact, atol=200 * np.finfo(dtype).eps)


def test_other_functions_take_scales_of_heads():
    query, key, value = grouped("float32", lead=(), len_q=40)
    moved, options = times(query, SCALES), {"scale": 1.0}
    wanted = fastattn.attention(moved, key, value, scale=1.0, causal=True)
    for function in (fastattn.attention, fastattn.flex_attention):
        for _ in range(2):
            assert_same_bits(function(query, key, value, scale=SCALES, causal=True), wanted)
        assert_same_bits(
            function(query, key, value, scale=2 * SCALES, causal=True),
            function(2 * moved, key, value, causal=True, **options),
        )
    for reduction in ("max", "logsumexp"):
        ours = fastattn.reduce_scores(query, key, scale=SCALES, reduction=reduction, causal=True)
        theirs = fastattn.reduce_scores(moved, key, scale=1.0, reduction=reduction, causal=True)
        np.testing.assert_array_equal(ours, theirs)
    got = fastattn.key_weights(query, key, scale=SCALES)
    assert_same_bits(got, fastattn.key_weights(moved, key, scale=1.0))
    cache = fastattn.KVCache(1, 2, 9, value_dim=value.shape[-1])
    steps = [
        cache.step(*(x[None, :, i : i + 1] for x in (query, key, value)), scale=SCALES)[0] for i in range(40)
    ]
    np.testing.assert_allclose(np.concatenate(steps, axis=-2), wanted, atol=1e-5)
    packed, starts = [x.swapaxes(0, 1) for x in (query, key, value)], [0, 13, 13, 40]
    there = [moved.swapaxes(0, 1), *packed[1:]]
    out, sums = fastattn.varlen_attention(*packed, starts, scale=SCALES, return_lse=True)
    assert_same_bits(out, fastattn.varlen_attention(*there, starts, scale=1.0))
    ours = fastattn.varlen_attention_backward(out, *packed, out, sums, starts, scale=SCALES)
    theirs = fastattn.varlen_attention_backward(out, *there, out, sums, starts, scale=1.0)
    assert_same_bits(ours.query, theirs.query * SCALES.astype(np.float32)[:, None])
    assert_same_bits(ours.key, theirs.key)


@pytest.mark.parametrize(
    ("scale", "error", "said"),
    [
        (SCALES[:3], ValueError, r"scale must have shape \(H,\) = \(4,\), got \(3,\)"),
        (SCALES[:, None], ValueError, r"scale must have shape \(H,\) = \(4,\), got \(4, 1\)"),
        ([1.0, np.nan, 1.0, 1.0], ValueError, r"scale must be finite in float32, got \[1.0, nan, 1.0, 1.0\]"),
        (SCALES * 1e100, ValueError, "scale must be finite in float32, got"),
        (SCALES.astype(complex), TypeError, "scale must be a float array, got dtype complex128"),
        (["a"] * 4, TypeError, "scale must be a float array, got dtype <U1"),
    ],
)
def test_scales_of_heads_that_are_refused(scale, error, said):
    query, key, value = grouped("float32")
    with pytest.raises(error, match=said):
        fastattn.attention(query, key, value, scale=scale)
