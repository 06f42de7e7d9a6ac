"""What an installed wheel must do on any platform. It needs NumPy and pytest alone."""

from __future__ import annotations

import numpy as np
import pytest

import fastattn
from fastattn.backends.cython import backend as cython_backend

DTYPES = [np.float32, np.float64]


def formula(query, key, value, allowed):
    """Attention and its log-sum-exp by the formula, in float64."""
    query, key, value = (x.astype(np.float64) for x in (query, key, value))
    group = query.shape[-3] // key.shape[-3]
    key, value = (np.repeat(x, group, axis=-3) for x in (key, value))
    scores = np.where(allowed, query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1]), -np.inf)
    lse = np.log(np.exp(scores).sum(-1))
    return np.exp(scores - lse[..., None]) @ value, lse


def inputs(dtype, len_q=67, len_k=130):
    """Two heads of keys for six of queries."""
    rng = np.random.default_rng(7)
    sizes = ((2, 6, len_q, 24), (2, 2, len_k, 24), (2, 2, len_k, 40))
    return [rng.standard_normal(size).astype(dtype) for size in sizes]


def test_the_kernels_are_there(capsys):
    fastattn.show_config()
    printed = capsys.readouterr().out
    assert "NO COMPILED KERNELS" not in printed
    assert "portable" in cython_backend.available_isas()


@pytest.mark.parametrize("isa", cython_backend.available_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("len_q", [1, 67])
def test_attention_is_the_formula(isa, dtype, len_q):
    query, key, value = inputs(dtype, len_q)
    allowed = np.arange(130) <= np.arange(len_q)[:, None] + 130 - len_q
    with cython_backend.use_isa(isa):
        out, lse = fastattn.attention(
            query, key, value, causal="bottom_right", return_lse=True, backend="cython"
        )
    expected, expected_lse = formula(query, key, value, allowed)
    assert out.dtype == lse.dtype == dtype
    np.testing.assert_allclose(out, expected, atol=30 * np.finfo(dtype).eps)
    np.testing.assert_allclose(lse, expected_lse, atol=30 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype):
    arrays = inputs(dtype)
    one, several = (fastattn.attention(*arrays, num_threads=n, backend="cython") for n in (1, 4))
    np.testing.assert_array_equal(one, several)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_the_formula(dtype):
    """By the derivative along a direction."""
    query, key, value = (x[:, :2] for x in inputs(dtype, 20, 30))
    out, lse = fastattn.attention(query, key, value, return_lse=True)
    grad_out = np.cos(np.arange(out.size)).reshape(out.shape).astype(dtype)
    gradients = fastattn.attention_backward(grad_out, query, key, value, out, lse)
    step = 1e-6
    for number, gradient in enumerate((gradients.query, gradients.key, gradients.value)):
        given = [x.astype(np.float64) for x in (query, key, value)]
        along = np.sin(np.arange(given[number].size)).reshape(given[number].shape)
        ends = []
        for sign in (1, -1):
            moved = [x + sign * step * along if n == number else x for n, x in enumerate(given)]
            ends.append((formula(*moved, True)[0] * grad_out).sum())
        slope = (ends[0] - ends[1]) / (2 * step)
        tolerance = 1e-6 if dtype == np.float64 else 1e-3
        assert slope == pytest.approx(float((gradient * along).sum()), abs=tolerance)


def test_a_cache_attends_as_its_keys_do():
    query, key, value = inputs(np.float32, 5, 5)
    cache = fastattn.KVCache(2, 2, 24, 40)
    steps = [
        cache.step(*(np.ascontiguousarray(x[:, :, t : t + 1]) for x in (query, key, value))) for t in range(5)
    ]
    whole = fastattn.attention(query, key, value, causal=True)
    np.testing.assert_allclose(np.concatenate(steps, 2), whole, atol=1e-6)


def test_rotation_and_its_inverse():
    x = inputs(np.float64)[0]
    tables = fastattn.rope_tables(100, 24, dtype=np.float64)
    there = fastattn.rope(x, *tables)
    assert not np.allclose(there, x)
    np.testing.assert_allclose(fastattn.rope(there, *tables, inverse=True), x, atol=1e-14)
