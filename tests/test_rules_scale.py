"""No scale or soft-cap overflows or underflows where the formula does not."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import pytest

from tests import naive
from tests.cases import FLOATS, random_arrays
from tests.tolerances import assert_answer, assert_same_bits

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
