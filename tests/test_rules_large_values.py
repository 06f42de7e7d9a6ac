"""Values near the largest number: finite values give a finite result, their mean up to rounding."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

import fastattn
from tests.cases import FLOATS, random_arrays
from tests.conftest import READS_STORAGE, without
from tests.naive import kept_weights
from tests.tolerances import assert_close, assert_same_bits, solve

#: Results are compared after a product with 2^-SHIFT, which is exact: sums of the formula then fit, too.
SHIFT = 40
#: Queries and keys: split-KV of one and of several key tiles, the sweep of one and of several query blocks.
SIZES = [(1, 2), (2, 700), (20, 33), (70, 300), (150, 300)]
HEADS, KV_HEADS = 2, 1
#: What a column of the values holds.
COLUMNS = ("equal", "positive", "mixed", "cancelling", "one", "ordinary", "small", "zero")
ENGINE_DTYPES = (*FLOATS, "float16", "bfloat16")


def largest_of(dtype) -> float:
    return float(ml_dtypes.finfo(dtype).max)


def problem(len_q: int, len_k: int, dtype="float32"):
    """Arrays of one batch item, whose values have a column of each kind."""
    rng = np.random.default_rng(len_q)
    query, key, _ = random_arrays(
        heads=HEADS, kv_heads=KV_HEADS, len_q=len_q, len_k=len_k, head_dim=8, dtype="float32", spread=2.0
    )
    shape = (KV_HEADS, len_k)
    part = rng.uniform(0.5, 1, shape)
    signs = rng.choice([-1.0, 1.0], shape)
    one = np.where(np.arange(len_k) == len_k // 2, 1.0, part * 1e-7)
    columns = {
        "equal": np.ones(shape), "positive": part, "mixed": part * signs,
        "cancelling": np.where(np.arange(len_k) % 2, 1.0, -1.0) * np.ones(shape), "one": one,
    }  # fmt: skip
    value = np.empty((*shape, len(COLUMNS)))
    for n, name in enumerate(COLUMNS):
        value[..., n] = columns[name] * largest_of(dtype) if name in columns else rng.standard_normal(shape)
    value[..., COLUMNS.index("small")] *= 1e-20 if dtype in FLOATS else 1e-2
    value[..., COLUMNS.index("zero")] = 0
    return query.astype(dtype), key.astype(dtype), value.astype(dtype)


def assert_means(out: np.ndarray, query, key, value, **options) -> None:
    """Each column has the budget of the tolerances for itself."""
    wide = [array.astype(out.dtype) for array in (query, key, value)]
    wide[2] = np.ldexp(wide[2], -SHIFT)
    exact, plain = solve(*wide, **options)
    assert np.isfinite(out).all()
    small = np.ldexp(out, -SHIFT)
    for n, name in enumerate(COLUMNS):
        assert_close(name, *(x[..., n] for x in (small, exact.out, exact.out_reach, plain.out)))


OPTIONS = {
    "none": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (100, 3)},
    "bool": {"mask": 0.3},
    "bias": {"bias": 0.3},
    "sinks": {"sinks": np.array([-3.0, 5.0], np.float32)},
    "softcap": {"softcap": 2.0, "causal": "top_left"},
}


def options_of(name: str, len_q: int, len_k: int) -> dict:
    rng = np.random.default_rng(3)
    options = dict(OPTIONS[name])
    for kind in ("mask", "bias"):
        if kind in options:
            hidden = rng.random((len_q, len_k)) < options[kind]
            bias = np.where(hidden, -np.inf, rng.standard_normal((len_q, len_k)))
            options[kind] = ~hidden if kind == "mask" else bias.astype(np.float32)
    return options


@pytest.mark.parametrize("dtype", ENGINE_DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@without(lambda engine, dtype: engine not in READS_STORAGE and dtype not in FLOATS)
def test_means_of_large_values(engine, name, sizes, dtype):
    arrays, options = problem(*sizes, dtype), options_of(name, *sizes)
    out = engine.attention(*arrays, **options)
    computed = np.dtype(dtype) if dtype in FLOATS else np.dtype("float32")
    wide = out
    if out.dtype != computed:
        wide = engine.attention(*arrays, out=np.empty(out.shape, computed), **options)
        assert_same_bits(out, wide.astype(dtype), "rounded once")
    assert_means(wide, *arrays, **options)
    # Lengths and weights are what they are without large values.
    plain = (*arrays[:2], np.zeros_like(arrays[2]))
    for got, wanted in zip(
        engine.everything(*arrays, **options)[1:], engine.everything(*plain, **options)[1:], strict=True
    ):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_bits_depend_on_nothing_else(engine, sizes, dtype):
    """Not on threads, another item, the layout, strides, columns that do not overflow, or a call before."""
    query, key, value = arrays = problem(*sizes, dtype)
    options = {"causal": "bottom_right", "sinks": np.zeros(HEADS, dtype)}
    out = engine.attention(*arrays, **options)
    others = random_arrays(
        heads=HEADS, kv_heads=KV_HEADS, len_q=sizes[0], len_k=sizes[1], head_dim=8, dtype=dtype
    )
    strided = np.empty((*out.shape[:-1], 2 * out.shape[-1]), dtype)[..., ::2]
    engine.attention(*arrays, out=strided, **options)
    swapped = [array.swapaxes(0, 1) for array in arrays]
    ordinary = [COLUMNS.index(name) for name in ("ordinary", "small", "zero")]
    plain = np.where(np.isin(np.arange(len(COLUMNS)), ordinary), value, value.dtype.type(1))
    alone = engine.attention(query, key, plain, **options)[..., ordinary]
    for what, got, wanted in (
        ("again", engine.attention(*arrays, **options), out),
        ("threads", engine.attention(*arrays, num_threads=3, **options), out),
        ("item", engine.attention(*map(np.stack, zip(others, arrays, strict=True)), **options)[1], out),
        ("layout", engine.attention(*swapped, layout="bshd", **options).swapaxes(0, 1), out),
        ("fortran", engine.attention(*map(np.asfortranarray, arrays), **options), out),
        ("out", strided, out),
        ("columns", out[..., ordinary], alone),
    ):
        assert_same_bits(np.ascontiguousarray(got), np.ascontiguousarray(wanted), what)


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", SIZES[1:], ids=str)
def test_a_masked_value_is_not_seen_and_an_allowed_one_is(engine, sizes, dtype, number):
    query, key, value = problem(*sizes, dtype)
    hidden = np.random.default_rng(5).random(sizes[1]) < 0.4
    rows = np.arange(sizes[0]) % 2 == 0
    mask = ~(rows[:, None] & hidden)
    clean = engine.attention(query, key, value, mask=mask)
    spoilt = value.copy()
    spoilt[:, hidden] = number
    out = engine.attention(query, key, spoilt, mask=mask)
    assert_same_bits(out[:, rows], clean[:, rows])
    np.testing.assert_array_equal(out[:, ~rows], np.full_like(out[:, ~rows], number))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_sink_of_nan_or_inf_makes_its_rows_nan(engine, sizes):
    out = engine.attention(*problem(*sizes), sinks=np.array([np.inf, np.nan], np.float32))
    assert np.isnan(out).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("len_q", [1, 20, 200])
def test_keys_that_overflow_and_are_outweighed_leave_nothing(engine, len_q, dtype):
    """Their sum overflows while the last key, whose weight is 1 beside theirs of 0, is not yet known."""
    largest = np.finfo(dtype).max
    query, key = np.ones((1, len_q, 1), dtype), np.zeros((1, 700, 1), dtype)
    key[0, -1] = 3000
    value = np.full((1, 700, 4), largest, dtype)
    value[0, ::2, 1] *= -1
    value[0, -1] = [1e-30, 1.0, -largest, 0.0]
    out = engine.attention(query, key, value, scale=1.0)
    np.testing.assert_array_equal(out, np.broadcast_to(value[0, -1], out.shape))


@pytest.mark.parametrize("sizes", [(2, 90), (70, 90)], ids=str)
def test_with_dropout_a_sum_past_the_largest_number_is_inf(sizes):
    """Kept weights are divided by their share, so that they may add up to more than 1."""
    len_q, len_k = sizes
    value = np.full((1, len_k, 3), np.finfo(np.float32).max / 1.1, np.float32)
    value[..., 1] *= -1
    value[..., 2] *= np.where(np.arange(len_k) % 2, 1, -1)
    zeros = np.zeros((1, len_q, 4), np.float32), np.zeros((1, len_k, 4), np.float32)
    keep, share = kept_weights((1, len_q, len_k), 0.5, 1)
    exact = (keep / share / len_k) @ value.astype(np.float64)
    fits = np.abs(exact) <= np.finfo(np.float32).max
    assert 0 < fits[..., 0].sum() < len_q or len_q == 2
    for backend in ("cython", "reference"):
        out = fastattn.attention(*zeros, value, dropout=0.5, seed=1, backend=backend)
        np.testing.assert_array_equal(out[~fits], np.copysign(np.inf, exact[~fits]))
        bound = 16 * np.finfo(np.float32).eps * np.finfo(np.float32).max
        np.testing.assert_allclose(out[fits], exact[fits], rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("len_q", [1, 70])
def test_values_in_pages(dtype, len_q):
    """What a cache reads."""
    query, key, value = problem(len_q, 192, dtype)
    pages = [np.ascontiguousarray(x.reshape(KV_HEADS, 12, 16, 8).swapaxes(0, 1)) for x in (key, value)]
    paged = [fastattn.Paged(x, np.arange(12)[None]) for x in pages]
    lengths = {"key_lengths": [171], "causal": "bottom_right"}
    got = fastattn.attention(query[None].astype(np.float32), *paged, **lengths)
    wanted = fastattn.attention(query.astype(np.float32), key, value, key_lengths=171, causal="bottom_right")
    assert_same_bits(got[0], wanted)
    assert np.isfinite(got).all()


def test_documents_and_functions():
    query, key, value = problem(70, 70)
    starts = [0, 30, 70]
    packed = [x.swapaxes(0, 1) for x in (query, key, value)]
    got = fastattn.varlen_attention(*packed, starts)
    for start, stop in pairwise(starts):
        rows = np.s_[:, start:stop]
        assert_means(got[start:stop].swapaxes(0, 1), query[rows], key[rows], value[rows])
    flexible = fastattn.flex_attention(
        query, key, value, mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    )
    assert_means(flexible, query, key, value, causal="top_left")
