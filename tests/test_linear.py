"""`linear_attention` and `random_features`: against the formula over all pairs, in extended precision."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise, product

import ml_dtypes
import numpy as np
import pytest

import fastattn
from fastattn import LinearState, linear_attention, random_features
from fastattn._machine import host
from fastattn.backends import registry
from tests.cases import MEMORY_LAYOUTS, once, random_arrays
from tests.conftest import without
from tests.refusals import assert_named
from tests.tolerances import assert_close, assert_same_bits

FLOATS = ["float32", "float64"]
WIDE = np.longdouble
MIXING = np.random.default_rng(5).standard_normal((16, 24))


def elu_plus_one(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def squares(x):
    """More features than dimensions, some of them 0."""
    return np.maximum(x @ MIXING.astype(x.dtype), 0) ** 2


FAVOR = random_features(16, 40, seed=3)


def favor(x):
    """Its definition, in the type of x: `RandomFeatures` computes in float64 at most."""
    scaled = x / x.dtype.type(2)  # 16**(1/4)
    e = scaled @ FAVOR.projection.T.astype(x.dtype) - (scaled**2).sum(-1, keepdims=True) / 2
    return np.exp(e) / np.sqrt(x.dtype.type(40))


#: What is passed, the formula, and by how much a rounding of an exponent counts more than one of a feature.
MAPS = {"elu+1": ("elu+1", elu_plus_one, 1), "squares": (squares, squares, 8), "favor": (FAVOR, favor, 40)}


def weights_of(query, key, phi, *, causal=False, key_lengths=None, dtype=WIDE):
    """``(*lead, H, L, S)``, before they are divided by their sum."""
    q, k = (np.asarray(x).astype(dtype) for x in (query, key))
    k = np.repeat(phi(k), q.shape[-3] // k.shape[-3], axis=-3)
    weights = phi(q) @ k.swapaxes(-1, -2)
    if causal:
        weights = np.tril(weights)
    if key_lengths is not None:
        lengths = np.broadcast_to(key_lengths, weights.shape[:-3])[..., None, None, None]
        weights = np.where(np.arange(weights.shape[-1]) < lengths, weights, 0)
    return weights


def formula(query, key, value, phi, *, dtype=WIDE, relative=False, **options):
    """`relative` rounds weights to `dtype` that are relative to the largest of their row."""
    weights = weights_of(query, key, phi, dtype=WIDE if relative else dtype, **options)
    if relative:
        largest = weights.max(-1, keepdims=True, initial=0)
        weights = (weights / np.where(largest == 0, 1, largest)).astype(dtype)
    v = np.repeat(np.asarray(value).astype(dtype), weights.shape[-3] // np.shape(value)[-3], axis=-3)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        share = np.where(total == 0, 0, weights / total)
    return share @ v, share @ np.abs(v)


def formula_by_sums(query, key, value, phi, *, dtype, causal=False, key_lengths=None):
    """The same, and rounded as, sums over keys of products with features, relative to the largest of each."""
    q, k = (phi(np.asarray(x).astype(WIDE)) for x in (query, key))
    if key_lengths is not None:
        lengths = np.broadcast_to(key_lengths, k.shape[:-3])[..., None, None, None]
        k = np.where(np.arange(k.shape[-2])[:, None] < lengths, k, 0)
    group = q.shape[-3] // k.shape[-3]
    k, v = (np.repeat(x, group, axis=-3) for x in (k, np.asarray(value).astype(dtype)))
    largest = k.max(-2, keepdims=True, initial=0)
    k = (k / np.where(largest == 0, 1, largest)).astype(dtype)
    q = q * largest
    largest = q.max(-1, keepdims=True, initial=0)
    q = (q / np.where(largest == 0, 1, largest)).astype(dtype)
    columns = np.concatenate([v, np.ones_like(v[..., :1])], axis=-1)  # the last adds up the features
    if causal:
        sums = np.cumsum(k[..., :, None] * columns[..., None, :], axis=-3)
        products = (q[..., None, :] @ sums)[..., 0, :]
    else:
        products = q @ (k.swapaxes(-1, -2) @ columns)
    with np.errstate(invalid="ignore"):
        return np.where(products[..., -1:] == 0, 0, products[..., :-1] / products[..., -1:])


@once
def solve(name, dtype, *arrays, **options):
    """The exact answer, its reach and the formula's answer."""
    phi = MAPS[name][1]
    return *formula(*arrays, phi, **options), formula(*arrays, phi, dtype=dtype, **options)[0]


def assert_linear(got, query, key, value, name, **options):
    """Within twice the error of the formula in the same type, and some roundings of each feature."""
    exact, reach, plain = solve(name, got.dtype, query, key, value, **options)
    assert_close("out", got, exact, (2 * MAPS[name][2] * reach).astype(float), plain)


def arrays(seed=0, **sizes):
    return random_arrays(seed, **({"head_dim": 16, "heads": 4, "kv_heads": 2, "lead": (2,)} | sizes))


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 150])
def test_the_definition(way, name, dtype, causal, length):
    q, k, v = arrays(len_q=length, len_k=length, value_dim=9, dtype=dtype)
    out = linear_attention(q, k, v, feature_map=MAPS[name][0], causal=causal)
    assert out.dtype == dtype and out.flags.c_contiguous and out.flags.writeable
    assert_linear(out, q, k, v, name, causal=causal)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("len_q, len_k", [(1, 500), (260, 3), (140, 130)])
def test_lengths_that_differ(way, name, len_q, len_k):
    q, k, v = arrays(len_q=len_q, len_k=len_k, value_dim=5)
    assert_linear(linear_attention(q, k, v, feature_map=MAPS[name][0]), q, k, v, name)


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (6, 1), (6, 3), (6, 6)])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (70,)])
@pytest.mark.parametrize("causal", [False, True])
def test_heads_and_batch(way, heads, kv_heads, lead, causal):
    """70 items are more than are worked on together."""
    length = 40 if lead == (70,) else 80
    q, k, v = arrays(heads=heads, kv_heads=kv_heads, lead=lead, len_q=length, len_k=length, value_dim=5)
    out, state = linear_attention(q, k, v, causal=causal, return_state=True)
    assert_linear(out, q, k, v, "elu+1", causal=causal)
    assert state.key_value_sum.shape == (*lead, kv_heads, 16, 5)
    assert state.key_sum.shape == (*lead, kv_heads, 16) and state.log_scale is None
    phi = elu_plus_one(k.astype(float))
    np.testing.assert_allclose(state.key_sum, phi.sum(-2), rtol=1e-6)
    np.testing.assert_allclose(state.key_value_sum, phi.swapaxes(-1, -2) @ v, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("which", [*product([(), (1,), (5,), (2, 1)], repeat=2)], ids=str)
def test_leading_axes_broadcast(way, name, causal, which):
    sizes = {"heads": 2, "kv_heads": 1, "len_q": 40, "len_k": 40, "value_dim": 5}
    q, _, _ = arrays(lead=(2, 5), **sizes)
    (_, k, _), (_, _, v) = (arrays(lead=lead, **sizes) for lead in which)
    out, state = linear_attention(q, k, v, feature_map=MAPS[name][0], causal=causal, return_state=True)
    assert state.key_sum.shape[:-2] == state.key_value_sum.shape[:-3] == (2, 5)
    full = [np.broadcast_to(x, (2, 5, *x.shape[-3:])) for x in (k, v)]
    assert_linear(out, q, *full, name, causal=causal)
    few = linear_attention(q[0, :1], *full, feature_map=MAPS[name][0], causal=causal)  # and those of queries
    assert_linear(few, np.broadcast_to(q[0, :1], q.shape), *full, name, causal=causal)


@pytest.mark.parametrize("dtype", FLOATS)
def test_matrices_are_one_head(dtype):
    q, k, v = (x[0] for x in arrays(lead=(), heads=1, kv_heads=1, len_q=50, len_k=50, dtype=dtype))
    out, state = linear_attention(q, k, v, causal=True, return_state=True)
    same, of_heads = linear_attention(q[None], k[None], v[None], causal=True, return_state=True)
    assert_same_bits(out, same[0])
    assert_same_bits(state.key_value_sum, of_heads.key_value_sum[0])
    more = linear_attention(q, k, v, state=state)
    assert_same_bits(more, linear_attention(q[None], k[None], v[None], state=of_heads)[0])


# The state -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cuts", [[100], [64, 128], [1, 2, 3], [70, 70, 140], list(range(130, 150))], ids=str)
def test_where_a_sequence_is_cut_does_not_matter(way, name, dtype, cuts):
    q, k, v = arrays(heads=2, kv_heads=1, len_q=150, len_k=150, value_dim=5, dtype=dtype)
    whole, last = linear_attention(q, k, v, feature_map=MAPS[name][0], causal=True, return_state=True)
    state, pieces = None, []
    for start, stop in pairwise([0, *cuts, 150]):
        rows = np.s_[..., start:stop, :]
        out, state = linear_attention(
            q[rows], k[rows], v[rows],
            feature_map=MAPS[name][0], causal=True, state=state, return_state=True,
        )  # fmt: skip
        pieces.append(out)
    assert_linear(np.concatenate(pieces, axis=-2), q, k, v, name, causal=True)
    scale = [1 if it.log_scale is None else np.exp(it.log_scale) for it in (state, last)]
    rtol = 40 * MAPS[name][2] * np.finfo(dtype).eps
    np.testing.assert_allclose(state.key_sum * scale[0], last.key_sum * scale[1], rtol=rtol)
    assert np.isfinite(whole).all()


@pytest.mark.parametrize("name", MAPS)
def test_keys_of_a_state_are_read_by_all(way, name):
    q, k, v = arrays(len_q=20, len_k=200)
    state = None
    for start, stop in pairwise([0, 7, 100, 200, 200]):  # the last has no keys
        rows = np.s_[..., start:stop, :]
        out, state = linear_attention(
            q, k[rows], v[rows], feature_map=MAPS[name][0], state=state, return_state=True
        )
        assert_linear(out, q, k[..., :stop, :], v[..., :stop, :], name)


def test_one_state_for_all_items(way):
    q, k, v = arrays(lead=(3,), len_q=20, len_k=20)
    _, prompt_key, prompt_value = arrays(seed=1, lead=(), len_k=90)
    for feature_map in ("elu+1", FAVOR):
        options = {"feature_map": feature_map, "causal": True}
        _, state = linear_attention(
            np.zeros((4, 90, 16), np.float32), prompt_key, prompt_value, **options, return_state=True
        )
        before = [None if x is None else x.copy() for x in state]
        out, new = linear_attention(q, k, v, **options, state=state, return_state=True)
        for item in range(3):
            alone = linear_attention(q[item], k[item], v[item], **options, state=state)
            np.testing.assert_allclose(out[item], alone, rtol=1e-5, atol=1e-6)
        for old, kept, result in zip(before, state, new, strict=True):
            assert old is None or (np.array_equal(old, kept) and not np.shares_memory(kept, result))


@pytest.mark.parametrize("feature_map", ["elu+1", np.ones_like])
def test_a_state_counts_beyond_float32(way, feature_map):
    """2**24 + 1 is no float32."""
    state = LinearState(np.full((1, 1, 1), 2.0**24), np.full((1, 1), 2.0**24))
    zero, one = np.zeros((1, 1, 1), np.float32), np.ones((1, 1, 1), np.float32)  # both features of 0 are 1
    _, state = linear_attention(zero, zero, one, feature_map=feature_map, state=state, return_state=True)
    assert state.key_sum.tolist() == [[2**24 + 1]] and state.key_value_sum.tolist() == [[[2**24 + 1]]]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads, shared", [(1, False), (2, True), (11, True)])
def test_long_sequences_are_divided(way, dtype, causal, kv_heads, shared):
    """Few heads into segments, whose sums are of use to many items where they share keys."""
    q, k, v = arrays(heads=kv_heads, kv_heads=kv_heads, len_q=2200, len_k=2200, head_dim=5, dtype=dtype)
    if shared:
        k, v = k[:1], v[:1]
    out, state = linear_attention(q, k, v, causal=causal, return_state=True)
    rows = np.r_[:3, 1022:1027, 2045:2050, 2197:2200]
    if causal:
        for row in rows:
            seen = np.s_[..., : row + 1, :]
            assert_linear(out[..., [row], :], q[..., [row], :], k[seen], v[seen], "elu+1")
    else:
        assert_linear(out[..., rows, :], q[..., rows, :], k, v, "elu+1")
    phi = elu_plus_one(np.broadcast_to(k, (2, *k.shape[1:])).astype(np.float64))
    np.testing.assert_allclose(state.key_sum, phi.sum(-2), rtol=1e-6)
    np.testing.assert_allclose(state.key_value_sum, phi.swapaxes(-1, -2) @ v, rtol=1e-6, atol=1e-4)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [1, 9, 40])
def test_threads_change_no_bit(monkeypatch, causal, heads):
    """As many as the call says, or by default."""
    monkeypatch.setattr(registry, "PREFERRED", ("cython",))  # the kernels, and no way beside them
    backend = registry.load("cython")
    asked, limit = [], backend.thread_limit
    monkeypatch.setattr(backend, "thread_limit", lambda n: asked.append(n) or limit(n))
    given = arrays(heads=heads, kv_heads=heads, len_q=1200, len_k=1200, head_dim=24)
    counts, results = [1, 2, 3, 7], []
    for num_threads in counts:
        results.append(linear_attention(*given, causal=causal, return_state=True, num_threads=num_threads))
    monkeypatch.setattr(host, "get_num_threads", lambda: 5)
    results.append(linear_attention(*given, causal=causal, return_state=True))
    assert asked == [*counts, 5]
    for out, state in results[1:]:
        assert_same_bits(out, results[0][0])
        assert_same_bits(state.key_value_sum, results[0][1].key_value_sum)


# Features of any size ------------------------------------------------------------------------------


def below_zero(length, dtype, **sizes):
    """Multiples of 1/16 below 0, where ``phi(x - c) = exp(-c) phi(x)`` and no difference is rounded."""
    q, k, v = arrays(len_q=length, len_k=length, dtype=dtype, value_dim=5, **sizes)
    return -np.abs(np.rint(q * 16) / 16), -np.abs(np.rint(k * 16) / 16), v


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 70])
@pytest.mark.parametrize("shift", [(88, 0), (0, 95), (50, 50), (800, 0), (0, 800), (1e5, 1e5)], ids=str)
def test_a_common_factor_cancels(way, dtype, causal, length, shift):
    """Whole, by tokens, and from a state."""
    q, k, v = below_zero(length, dtype)
    low = q - q.dtype.type(shift[0]), k - k.dtype.type(shift[1]), v
    assert_linear(linear_attention(*low, causal=causal), q, k, v, "elu+1", causal=causal)
    state, pieces = None, []
    for start, stop in pairwise([0, length // 3, length // 3 + 1, length]):
        rows = np.s_[..., start:stop, :]
        queries = low[0][rows] if causal else low[0]
        out, state = linear_attention(
            queries, low[1][rows], v[rows], causal=causal, state=state, return_state=True
        )
        pieces.append(out)
    out = np.concatenate(pieces, axis=-2) if causal else out
    assert_linear(out, q, k, v, "elu+1", causal=causal)
    assert (state.log_scale is None) == (shift[1] <= 50)
    factor = 1 if state.log_scale is None else np.exp(state.log_scale + shift[1])
    phi = np.exp(k.astype(float) - (shift[1] if state.log_scale is None else 0))
    np.testing.assert_allclose(
        state.key_sum * factor, phi.sum(-2), rtol=1e-6 if dtype == "float32" else 1e-14
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cut", [0, 20, 70])
def test_the_factor_is_that_of_all_keys_so_far(way, dtype, cut):
    """Rows that read small keys alone, and then much larger ones, in the same chunk; and small ones again."""
    q, k, v = below_zero(100, dtype)
    low = k.copy()
    low[:, :, :70] -= 900
    low[:, :, 85:] -= 2000
    first, rest = np.s_[..., :cut, :], np.s_[..., cut:, :]
    a, state = linear_attention(q[first], low[first], v[first], causal=True, return_state=True)
    b = linear_attention(q[rest], low[rest], v[rest], causal=True, state=state)
    out = np.concatenate([a, b], axis=-2)
    assert_linear(out[..., :70, :], q[..., :70, :], k[..., :70, :], v[..., :70, :], "elu+1", causal=True)
    seen = np.s_[..., 70:85, :]
    assert_linear(out[seen], q[seen], k[seen], v[seen], "elu+1", causal=True)
    rows = np.s_[..., 85:, :]
    assert_linear(out[rows], q[rows], k[seen], v[seen], "elu+1")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("causal", [False, True])
def test_products_of_large_and_small_features(way, dtype, causal):
    """Half of the features are small in the queries, and the others in the keys."""
    q, k, v = below_zero(70, dtype)
    small = np.where(np.arange(16) % 2, 900, 0).astype(dtype)
    out = linear_attention(q - small, k - small[::-1], v, causal=causal)
    assert_linear(out, q, k, v, "elu+1", causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_other_rows_keep_their_bits(way, causal):
    q, k, v = below_zero(150, "float32")
    expected = linear_attention(q, k, v, causal=causal)
    low = q.copy()
    low[1, 2, 70] -= 1000
    out = linear_attention(low, k, v, causal=causal)
    one = linear_attention(q[1, 2, 70][None], *(x[1, 1, : 71 if causal else 150] for x in (k, v)))
    np.testing.assert_allclose(out[1, 2, 70], one[0], rtol=1e-5, atol=1e-6)
    out[1, 2, 70] = expected[1, 2, 70]
    assert_same_bits(out, expected)


@pytest.mark.parametrize("feature_map", ["elu+1", np.exp], ids=["elu+1", "exp"])
@pytest.mark.parametrize("causal", [False, True])
def test_items_with_small_features_keep_their_bits(way, feature_map, causal):
    """Whatever the size of those of other items."""
    q, k, v = below_zero(130, "float64", lead=(5,))
    q, k = q - 80, k - 300
    k[1:, :, 40:] += np.random.default_rng(0).choice([0, 100, 300], (4, *k.shape[1:-2], 90, 1))
    options = {"feature_map": feature_map, "causal": causal, "return_state": True}
    out, state = linear_attention(q, k, v, **options)
    for item in range(5):
        alone, its = linear_attention(q[item], k[item], v[item], **options)
        assert_same_bits(out[item], alone)
        for whole, own in zip(state, its, strict=True):
            assert_same_bits(whole[item], np.zeros_like(whole[item]) if own is None else own)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", [*FLOATS, "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_values_near_the_largest_number(way, name, dtype, causal):
    """Sums of them are beyond all numbers, those of a state as well; other items keep their bits."""
    dtype, cut = np.dtype(dtype), 40
    q, k, v = (x.astype(dtype) for x in arrays(len_q=100, len_k=100, lead=(3,)))
    largest, down = float(ml_dtypes.finfo(dtype).max), 2.0**-64
    expected = linear_attention(q, k, v, feature_map=MAPS[name][0], causal=causal)
    v[1:] = np.where(np.arange(100) % 3, 1, -1)[:, None] * np.linspace(0.7, 1, 100)[:, None] * largest
    v[2] = largest
    out, state = linear_attention(q, k, v, feature_map=MAPS[name][0], causal=causal, return_state=True)
    assert_same_bits(out[0], expected[0])
    assert np.isfinite(out).all()
    error = 0.01 if dtype.itemsize == 2 else 4000 * np.finfo(dtype).eps
    tolerance = {"rtol": 0, "atol": largest * down * error}
    exact, _ = formula(q[1], k[1], v[1].astype(WIDE) * down, MAPS[name][1], causal=causal)
    np.testing.assert_allclose(out[1].astype(WIDE) * down, exact, **tolerance)
    np.testing.assert_allclose(out[2].astype(WIDE) * down, WIDE(largest) * down, **tolerance)
    first, rest = np.s_[..., :cut, :], np.s_[..., cut:, :]
    _, early = linear_attention(q[first], k[first], v[first], feature_map=MAPS[name][0], return_state=True)
    assert all(x is None or np.isfinite(x).all() for state in (state, early) for x in state)
    last = linear_attention(q[rest], k[rest], v[rest], feature_map=MAPS[name][0], causal=causal, state=early)
    np.testing.assert_allclose(last.astype(WIDE) * down, out[rest].astype(WIDE) * down, **tolerance)


@pytest.mark.parametrize("large", ["column", "later", "item", "padding"])
def test_results_near_the_least_number(way, large):
    """Beside values near the largest, wherever these stand, in rows that are computed again."""
    query, key = np.array([[-500.0], [-500.0], [-500.0]]), np.array([[-300.0], [-700.0], [-700.0]])
    value = np.repeat([[0.0], [1e-120], [0.0]], 2, axis=1)
    options = {"causal": large == "later"}
    if large == "column":
        value[:, 1] = 1.7e308
    elif large == "later":
        value[2] = 1.7e308
    else:
        query, key, value = (np.stack([x[None]] * 2) for x in (query, key, value))
        value[1 if large == "item" else slice(None), ..., 2, :] = 1.7e308
        options["key_lengths"] = [2, 3] if large == "padding" else [3, 3]
    out = linear_attention(query, key, value, **options)
    small = out[1] if large in ("column", "later") else out[0, 0, 1]
    np.testing.assert_allclose(small[0], math.exp(-400) * 1e-120, rtol=1e-12)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_small_features_of_16_bit_arrays(way, stored):
    q, k, v = (x.astype(stored) for x in arrays(len_q=70, len_k=70))
    low = np.full_like(q, -30000), np.full_like(k, -60000), v
    out = linear_attention(*low, causal=True)
    mean = np.cumsum(np.repeat(v, 2, axis=1).astype(float), axis=-2) / np.arange(1, 71)[:, None]
    np.testing.assert_allclose(
        out.astype(float), mean, rtol=2 * float(ml_dtypes.finfo(stored).eps), atol=1e-6
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(1e-30, 1e-30), (1e-38, 1.0), (1e30, 1e30), (1e-37, 1e30)], ids=str)
def test_maps_of_small_and_large_features(dtype, causal, sizes):
    """Powers of two, of 4 heads of queries and 2 of keys; some features are negative."""
    q, k, v = arrays(len_q=100, len_k=100, dtype=dtype)
    of_q, of_k = (x.dtype.type(2.0 ** np.rint(np.log2(size))) for x, size in zip((q, k), sizes, strict=True))
    signed = lambda x: squares(x) - x.dtype.type(1e-3)  # noqa: E731

    def sized(x):
        return signed(x) * (of_q if x.shape[-3] == 4 else of_k)

    expected, plain = linear_attention(q, k, v, feature_map=signed, causal=causal, return_state=True)
    first, rest = np.s_[..., :30, :], np.s_[..., 30:, :]
    options = {"feature_map": sized, "causal": causal}
    _, state = linear_attention(q[first] if causal else q, k[first], v[first], **options, return_state=True)
    cut, last = linear_attention(
        q[rest] if causal else q, k[rest], v[rest], **options, state=state, return_state=True
    )
    out = linear_attention(q, k, v, **options)
    rtol = 1e-4 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(out, expected, rtol=rtol, atol=rtol / 10)
    np.testing.assert_allclose(cut, expected[rest] if causal else expected, rtol=rtol, atol=rtol / 10)
    scale = 1 if last.log_scale is None else np.exp(last.log_scale)
    np.testing.assert_allclose(last.key_sum * scale / float(of_k), plain.key_sum, rtol=rtol)


# Lengths, NaN, empty sizes, types ------------------------------------------------------------------


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[150, 0, 1], [65, 64, 63], [5, 5, 5], 140, [0, 0, 0]], ids=str)
def test_key_lengths(way, name, causal, lengths):
    q, k, v = arrays(lead=(3,), heads=2, kv_heads=1, len_q=150, len_k=150, value_dim=5)
    options = {"causal": causal, "key_lengths": lengths}
    feature_map = MAPS[name][0]
    out, state = linear_attention(q, k, v, feature_map=feature_map, **options, return_state=True)
    assert_linear(out, q, k, v, name, **options)
    padding = np.arange(150) >= np.broadcast_to(lengths, 3)[:, None]
    for junk in (np.nan, np.inf, 1e30, 0):
        other_k, other_v = k.copy(), v.copy()
        other_k.swapaxes(1, 2)[padding] = junk
        other_v.swapaxes(1, 2)[padding] = junk
        other, same = linear_attention(
            q, other_k, other_v, feature_map=feature_map, **options, return_state=True
        )
        assert_same_bits(other, out)
        for one, two in zip(state, same, strict=True):
            assert one is None or np.array_equal(one, two)


def test_lengths_of_shared_keys(way):
    q, k, v = arrays(lead=(3,), len_q=10, len_k=150)
    out = linear_attention(q, k[0], v[0], key_lengths=[150, 3, 0])
    assert_linear(out, q, *(np.broadcast_to(x[0], x.shape) for x in (k, v)), "elu+1", key_lengths=[150, 3, 0])


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("junk", [np.nan, np.inf])
@pytest.mark.parametrize("row", [0, 100, 63, 64, 149])
def test_a_query_does_not_see_later_keys(way, name, junk, row):
    """To the bit, but for random features, whose scale is that of a chunk."""
    q, k, v = arrays(len_q=150, len_k=150)
    run = lambda k, v: linear_attention(q, k, v, feature_map=MAPS[name][0], causal=True)  # noqa: E731
    expected = run(k, v)
    for changed in ("key", "value"):
        other = {"key": k.copy(), "value": v.copy()}
        other[changed][:, 1, row, 3] = junk
        out = run(other["key"], other["value"])
        if name == "favor":
            np.testing.assert_allclose(out[:, 2:, :row], expected[:, 2:, :row], rtol=1e-4, atol=1e-5)
        else:
            assert_same_bits(out[..., :row, :], expected[..., :row, :])
            assert_same_bits(out[:, :2], expected[:, :2])
        seen = out[:, 2:, row:] if changed == "key" else out[:, 2:, row:, 3]
        if name == "elu+1":  # features that are 0 do not read
            assert not np.isfinite(seen).any() if changed == "value" or np.isnan(junk) else True


def test_a_query_that_is_nan(way):
    q, k, v = arrays(len_q=150, len_k=150)
    for causal in (False, True):
        expected = linear_attention(q, k, v, causal=causal)
        q_nan = q.copy()
        q_nan[1, 2, 140] = np.nan
        out = linear_attention(q_nan, k, v, causal=causal)
        assert np.isnan(out[1, 2, 140]).all()
        out[1, 2, 140] = expected[1, 2, 140]
        assert_same_bits(out, expected)
        none = linear_attention(np.full_like(q, np.nan), k, v, causal=causal, key_lengths=0)
        assert not none.any()


@pytest.mark.parametrize("causal", [False, True])
def test_nothing_over_nothing_is_nothing(way, causal):
    """Features that are all 0, for a query, and for the first keys."""
    q, k, v = arrays(len_q=200, len_k=200)
    q[0, 1, 7] = k[1, 1, :140] = 0
    out = linear_attention(q, k, v, feature_map=squares, causal=causal)
    assert not out[0, 1, 7].any() and not np.isnan(out).any()
    assert_linear(out, q, k, v, "squares", causal=causal)
    signed = linear_attention([[1.0]], [[1.0], [-1.0]], [[1.0], [2.0]], feature_map=lambda x: x)
    assert signed == -np.inf  # 1 - 2 over 0
    q[0, 1, 7] = k[1, 1, :140] = -np.inf
    out = linear_attention(q, k, v, causal=causal)
    assert not out[0, 1, 7].any()
    assert_linear(out, q, k, v, "elu+1", causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("empty", ["lead", "heads", "len_q", "len_k", "value_dim", "len"])
@without(lambda causal, empty: causal and empty in ("len_q", "len_k"))  # causal is for L == S
def test_empty_sizes(way, name, causal, empty):
    sizes = {"lead": (3,), "heads": 4, "kv_heads": 2, "len_q": 5, "len_k": 5, "head_dim": 16, "value_dim": 7}
    sizes |= {"lead": {"lead": (0,)}, "heads": {"heads": 0, "kv_heads": 0},
              "len": {"len_q": 0, "len_k": 0}}.get(empty, {empty: 0})  # fmt: skip
    q, k, v = random_arrays(**sizes)
    options = {"feature_map": MAPS[name][0], "causal": causal, "return_state": True}
    out, state = linear_attention(q, k, v, **options)
    assert out.shape == (*q.shape[:-1], v.shape[-1]) and out.dtype == np.float32
    assert empty == "value_dim" or not out.any()
    M = {"elu+1": 16, "squares": 24, "favor": 40}[name]
    assert state.key_sum.shape == (*k.shape[:-2], M)
    assert state.key_value_sum.shape == (*k.shape[:-2], M, v.shape[-1])
    again, _ = linear_attention(q, k, v, **options, state=state)
    assert again.shape == out.shape
    if empty == "len_k":  # a state of nothing is none
        full = random_arrays(**(sizes | {"len_k": 5}))
        started = linear_attention(*full, feature_map=MAPS[name][0], state=state)
        np.testing.assert_allclose(started, linear_attention(*full, feature_map=MAPS[name][0]), rtol=1e-5)


@pytest.mark.parametrize("layout", MEMORY_LAYOUTS)
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("causal", [False, True])
def test_strides_change_no_bit(way, layout, name, dtype, causal):
    given = arrays(len_q=140, len_k=140, dtype=dtype)
    options = {"feature_map": MAPS[name][0], "causal": causal}
    expected = linear_attention(*given, **options)
    moved = [MEMORY_LAYOUTS[layout](x) for x in given]
    before = [x.tobytes() for x in moved]
    assert_same_bits(linear_attention(*moved, **options), expected)
    assert before == [x.tobytes() for x in moved]


@pytest.mark.parametrize("memory", MEMORY_LAYOUTS)
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("causal", [False, True])
def test_layout_and_out_change_no_bit(way, memory, name, causal):
    given = arrays(len_q=140, len_k=140, value_dim=9)
    options = {"feature_map": MAPS[name][0], "causal": causal, "return_state": True}
    expected, state = linear_attention(*given, **options)
    swapped = [np.ascontiguousarray(x.swapaxes(-2, -3)) for x in given]
    out, of_swapped = linear_attention(*swapped, layout="bshd", **options)
    assert out.flags.c_contiguous
    assert_same_bits(out.swapaxes(-2, -3), expected)
    for a, b in zip(of_swapped, state, strict=True):
        assert (a is None and b is None) or np.array_equal(a, b)
    for layout, inputs in (("bhsd", given), ("bshd", swapped)):
        wanted = expected if layout == "bhsd" else expected.swapaxes(-2, -3)
        out = MEMORY_LAYOUTS[memory](np.full(wanted.shape, 7, np.float32))
        if out.flags.writeable and out.dtype == np.float32:
            assert linear_attention(*inputs, layout=layout, out=out, **options)[0] is out
            assert_same_bits(out, wanted)
    flat = [x[0, 0] for x in given]
    alone, out = linear_attention(*flat, **options)[0], np.empty((140, 9), np.float32)
    assert linear_attention(*flat, layout="bshd", out=out, **options)[0] is out
    assert_same_bits(out, alone)


def test_out_may_overlap_what_is_read(way):
    for name in MAPS:
        query, key, value = arrays(len_q=140, len_k=140, kv_heads=4)
        expected = linear_attention(query, key, value, feature_map=MAPS[name][0], causal=True)
        for out in (query, value):
            before = out.copy()
            linear_attention(query, key, value, feature_map=MAPS[name][0], causal=True, out=out)
            assert_same_bits(out, expected)
            out[...] = before


def test_out_of_a_map_that_raises_is_untouched():
    """It may raise at any rows."""
    given = arrays(len_q=400, len_k=400)

    def late(x):
        if (x == given[0][1, 0, 390]).all(axis=-1).any():
            raise ArithmeticError
        return squares(x)

    out = np.full((2, 4, 400, 16), 7, np.float32)
    with pytest.raises(ArithmeticError):
        linear_attention(*given, feature_map=late, causal=True, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_out_of_float32_for_16_bit_arrays(way, stored):
    given = [x.astype(stored) for x in arrays(len_q=140, len_k=140)]
    out = np.empty(given[0].shape, np.float32)
    linear_attention(*given, causal=True, out=out)
    assert_same_bits(out, linear_attention(*(x.astype(np.float32) for x in given), causal=True))


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("causal", [False, True])
def test_16_bit_arrays_are_rounded_once(way, stored, name, causal):
    given = [x.astype(stored) for x in arrays(len_q=140, len_k=140)]
    options = {"feature_map": MAPS[name][0], "causal": causal}
    out = linear_attention(*given, **options)
    assert out.dtype == stored
    wide = [x.astype(np.float32) for x in given]
    # Before the one rounding a result is a float64, the quotient: the float32 may lie on the other side.
    ulp = np.abs(
        out.astype(np.float32) - linear_attention(*wide, **options).astype(stored).astype(np.float32)
    )
    assert np.mean(ulp == 0) > 0.999
    mixed = linear_attention(wide[0], *given[1:], **options)
    assert_same_bits(mixed, linear_attention(*wide, **options))


def test_integers_count_as_float64(way):
    q, k, v = (np.random.default_rng(0).integers(-2, 3, (3, 4, 5)) for _ in range(3))
    out = linear_attention(q, k, v, causal=True)
    assert_same_bits(out, linear_attention(*(x.astype(float) for x in (q, k, v)), causal=True))


def test_a_map_for_each_head():
    """It gets queries and keys by their own heads; what it gives may be of another type."""
    q, k, v = arrays(len_q=9, len_k=9)
    seen = []

    def by_head(x):
        seen.append(x.shape[-3])
        return np.exp(x.astype(float) * (np.arange(x.shape[-3])[:, None, None] * 4 / x.shape[-3]))

    out = linear_attention(q, k, v, feature_map=by_head)
    assert set(seen) == {4, 2} and out.dtype == np.float32
    qs, ks = (np.exp(x * (np.arange(x.shape[-3]) * 4 / x.shape[-3])[:, None, None]) for x in (q, k))
    w = qs @ np.repeat(ks, 2, axis=-3).swapaxes(-1, -2)
    np.testing.assert_allclose(
        out, w @ np.repeat(v, 2, axis=-3) / w.sum(-1, keepdims=True), rtol=2e-4, atol=1e-5
    )


def test_a_map_cannot_change_its_argument():
    q, k, v = arrays(len_q=9, len_k=9)
    with pytest.raises(ValueError, match="read-only"):
        linear_attention(q, k, v, feature_map=lambda x: np.exp(x, out=x))


def test_errors():
    q, k, v = arrays(len_q=5, len_k=5, value_dim=3)
    state = linear_attention(q, k, v, return_state=True)[1]
    call = partial(linear_attention, query=q, key=k, value=v)
    quantized = fastattn.Quantized(np.zeros((2, 2, 5, 16), np.int8), np.ones((2, 2, 5, 1), np.float32))
    wide = LinearState(np.ones((2, 2, 40, 3)), np.ones((2, 2, 40)), np.ones((2, 2, 40)))
    types = {
        "feature_map": [None, lambda x: x.astype(str)],
        "query": [q.astype(complex)],
        "key": [quantized],
        "state": [tuple(state)],
        "out": [np.empty((2, 4, 5, 3)), [1.0]],
        "num_threads": [1.5, True],
    }
    values = {
        "feature_map": ["relu", lambda x: x.sum(-1)],
        "causal": ["bottom_right"],
        "key_lengths": [[6, 1], [1, 2, 3]],
        "query": [q[..., :3], q[:, :3]],
        "value": [np.concatenate([v, v[:1]])],
        "layout": ["sbhd", None],
        "out": [np.empty((2, 4, 3, 5), np.float32), np.broadcast_to(np.float32(0), (2, 4, 5, 3))],
        "num_threads": [0],
        "state": [
            *(state._replace(key_value_sum=[1]), state._replace(key_sum=np.ones((3, 2, 16)))),
            *(LinearState(*state[:2], 1), wide),
        ],
    }
    assert_named(call, TypeError, types)
    assert_named(call, ValueError, values)
    for error, said, wrong in [
        (TypeError, "two 16-bit types", {"query": q.astype("f2"), "key": k.astype(ml_dtypes.bfloat16)}),
        (ValueError, "causal=True needs L == S", {"causal": True, "query": q[..., :4, :]}),
        (
            ValueError,
            'say layout="bshd"',
            {"query": q.swapaxes(1, 2), "key": k.swapaxes(1, 2), "value": v.swapaxes(1, 2), "causal": True},
        ),
        (ValueError, "rows must have head_dim 8", {"feature_map": random_features(8, 8, seed=0)}),
        (ValueError, "state must be of random features", {"state": state, "feature_map": FAVOR}),
        (ValueError, "gives 24 features, and had given 16", {"state": state, "feature_map": squares}),
    ]:
        with pytest.raises(error, match=said):
            call(**wrong)


# Random features -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("head_dim", [1, 12])
def test_features_are_unbiased(orthogonal, head_dim):
    """The mean of 1500 seeds is within 5 of its own standard deviations."""
    x, y = np.random.default_rng(1).standard_normal((2, 3, head_dim)) * 0.6
    exact = np.exp(x @ y.T / np.sqrt(head_dim))
    products = []
    for seed in range(1500):
        features = random_features(head_dim, head_dim, seed=seed, orthogonal=orthogonal)
        products.append(features(x) @ features(y).T)
    spread = np.std(products, axis=0) / np.sqrt(len(products))
    assert np.all(spread < 0.1 * exact)
    assert np.all(np.abs(np.mean(products, axis=0) - exact) < 5 * spread)


def attention_error(num_features, orthogonal, seeds=range(8)):
    q, k, v = arrays(seed=2, len_q=100, len_k=100, dtype="float64", lead=())
    q, k = q * 0.5, k * 0.5
    exact = fastattn.attention(q, k, v)
    errors = []
    for seed in seeds:
        features = random_features(16, num_features, seed=seed, orthogonal=orthogonal)
        errors.append(linear_attention(q, k, v, feature_map=features) - exact)
    return np.sqrt(np.mean(np.square(errors)) / np.mean(exact**2))


@pytest.mark.slow
@pytest.mark.parametrize("orthogonal", [False, True])
def test_the_error_falls_as_one_over_the_root(orthogonal):
    errors = [attention_error(m, orthogonal) for m in (64, 256, 1024, 4096)]
    for more, less in pairwise(errors):
        assert 1.6 < more / less < 2.5  # 2, but for what 8 seeds leave to chance
    assert errors[-1] < 0.05


@pytest.mark.slow
def test_orthogonal_vectors_are_better():
    """Over 1000 seeds, in the median of pairs."""
    x, y = np.random.default_rng(1).standard_normal((2, 3, 16)) / 2

    def spread(orthogonal):
        maps = (random_features(16, 16, seed=seed, orthogonal=orthogonal) for seed in range(1000))
        return np.std([features(x) @ features(y).T for features in maps], axis=0)

    assert np.median(spread(True) / spread(False)) < 0.95


def test_directions_and_lengths():
    features = random_features(8, 20, seed=1)
    assert features.projection.shape == (20, 8)
    for start in (0, 8, 16):
        block = features.projection[start : start + 8]
        products = block @ block.T
        np.testing.assert_allclose(products, np.diag(np.diagonal(products)), atol=1e-12)
    squares = (random_features(8, 20_000, seed=0).projection ** 2).sum(axis=1)
    assert abs(squares.mean() - 8) < 0.2 and abs(squares.var() - 16) < 1.5  # chi-squared
    assert abs(random_features(8, 20_000, seed=0).projection.mean(axis=0)).max() < 0.03


def test_the_same_seed_gives_the_same_features():
    one, two, other = (random_features(8, 20, seed=seed) for seed in (7, 7, 8))
    assert_same_bits(one.projection, two.projection)
    assert not np.isclose(one.projection, other.projection).any()
    assert_same_bits(random_features(8, 20, seed=7, orthogonal=False).projection,
                     np.random.Generator(np.random.Philox(key=7)).standard_normal((20, 8)))  # fmt: skip
    with pytest.raises(ValueError, match="read-only"):
        one.projection[0] = 0


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1e-3, 3.0, 30.0, 300.0])
def test_features_of_any_size(dtype, causal, size):
    """Their exponentials have up to 10,000 digits, so that the definition is in logarithms."""
    q, k, v = arrays(len_q=150, len_k=150, dtype=dtype, lead=(), heads=2)
    q, k = q * q.dtype.type(size), k * k.dtype.type(size)
    k[:, ::7] *= k.dtype.type(0.01)  # features of one key are far above those of others
    out, state = linear_attention(q, k, v, feature_map=FAVOR, causal=causal, return_state=True)
    assert np.isfinite(out).all() and all(np.isfinite(x).all() for x in state)
    of_q, of_k = (FAVOR.log(x.astype(float)) for x in (q, k))
    logs = np.logaddexp.reduce(of_q[:, :, None] + of_k[:, None], axis=-1)
    if causal:
        logs = np.where(np.tri(150, dtype=bool), logs, -np.inf)
    weights = np.exp(logs - logs.max(-1, keepdims=True))
    exact = weights / weights.sum(-1, keepdims=True) @ v
    # An exponent is rounded to eps of its own size.
    largest = max(np.abs(of_q).max(), np.abs(of_k).max(), 1)
    tolerance = 4 * np.finfo(dtype).eps * largest * np.abs(v).max()
    assert np.abs(out - exact).max() < tolerance


def test_a_later_key_of_another_size_does_not_drown_earlier_ones():
    q, k, v = arrays(len_q=100, len_k=100, lead=(), heads=2)
    k[:, :60] *= 40  # exponents of some -10,000
    out = linear_attention(q, k, v, feature_map=FAVOR, causal=True)
    short = linear_attention(q[:, :60], k[:, :60], v[:, :60], feature_map=FAVOR, causal=True)
    assert np.abs(short).max(-1).min() > 0
    np.testing.assert_allclose(out[:, :60], short, atol=0.05)


def test_features_as_they_are():
    x = np.random.default_rng(0).standard_normal((2, 3, 16)).astype(np.float32)
    assert FAVOR(x).dtype == np.float32 and FAVOR(x.astype(np.float16)).dtype == np.float32
    assert FAVOR(np.ones((2, 16), int)).dtype == np.float64
    np.testing.assert_allclose(FAVOR(x), favor(x.astype(float)), rtol=1e-5)
    np.testing.assert_allclose(np.exp(FAVOR.log(x)), FAVOR(x))
    assert repr(FAVOR) == "RandomFeatures(head_dim=16, num_features=40)"
    assert math.isclose(FAVOR(np.zeros(16))[0], 40**-0.5)


@pytest.mark.parametrize("size", [1e2, 1e5, 1e10, 1e19])
def test_random_features_of_long_queries(size):
    """Which pick the nearest keys: what is common to a row is not in its exponents."""
    features = random_features(8, 64, seed=1)
    rng = np.random.default_rng(0)
    query = (size * rng.standard_normal((2, 5, 8))).astype(np.float32)
    key, value = rng.standard_normal((2, 2, 20, 8)).astype(np.float32)
    out = linear_attention(query, key, value, feature_map=features)
    wide = (x.astype(float) for x in (query, key, value))
    np.testing.assert_allclose(out, linear_attention(*wide, feature_map=features), atol=1e-5)


@pytest.mark.parametrize(
    "kind, message, wrong",
    [
        (TypeError, "head_dim must be an integer", {"head_dim": 8.0}),
        (ValueError, "num_features must be in 1", {"num_features": 0}),
        (TypeError, "seed must be an int, got None", {"seed": None}),
        (ValueError, "seed must be at least 0", {"seed": -1}),
        (TypeError, "orthogonal must be a bool, got 1", {"orthogonal": 1}),
    ],
)
def test_errors_of_random_features(kind, message, wrong):
    with pytest.raises(kind, match=message):
        random_features(**({"head_dim": 8, "num_features": 8, "seed": 0} | wrong))
