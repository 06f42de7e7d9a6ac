"""``precision="storage"``: weights rounded to bfloat16 where the CPU, or a model of it, multiplies it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import fastattn
from fastattn import masks
from fastattn._machine.constants import EXTENDED
from tests import naive
from tests.cases import random_arrays
from tests.conftest import ENGINES, READS_STORAGE
from tests.process import python
from tests.tolerances import assert_all_same, assert_same_bits

ROUNDING = [engine for engine in ENGINES if engine.isa in EXTENDED]
needs_products = pytest.mark.skipif(not ROUNDING, reason="no products of bfloat16 here")
on_rounding = pytest.mark.parametrize("engine", ROUNDING, ids=lambda engine: engine.name, indirect=True)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LEN_Q, LEN_K, DIM = 100, 330, 32


def arrays_of(seed=0, **sizes):
    sizes = {"heads": 2, "len_q": LEN_Q, "len_k": LEN_K, "head_dim": DIM} | sizes
    return [array.astype(BFLOAT16) for array in random_arrays(seed, **sizes)]


def solve(engine, query, key, value, precision="storage", **options):
    """The output before it is rounded to 16 bits, and the lse."""
    value_dim = (value.pages if isinstance(value, fastattn.Paged) else value).shape[-1]
    out = np.empty((*query.shape[:-1], value_dim), np.float32)
    return engine.attention(query, key, value, out=out, return_lse=True, precision=precision, **options)


CALLS = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (77, 3)},
    "bias": {"bias": np.random.default_rng(1).standard_normal((2, LEN_Q, LEN_K)).astype(np.float32)},
    "mask": {"mask": np.random.default_rng(2).random((LEN_Q, LEN_K)) < 0.7},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": np.array([1.0, -2.0], np.float32)},
    "lengths": {"key_lengths": 211},
    "dropout": {"dropout": 0.3, "seed": 5},
    # The rows of the last query block, which is computed first, read 21 keys, and others those after them.
    "documents": {"mask": masks.Segments(np.arange(LEN_Q) // 50, 1 * (np.arange(LEN_K) < 21))},
    "first keys": {"mask": masks.Window(40, 0) | masks.GlobalTokens([0, 9])},
}


def naive_options(options):
    options = dict(options)
    if isinstance(options.get("mask"), masks.Mask):
        options["mask"] = options["mask"].materialize(2, LEN_Q, LEN_K)
    return options


@needs_products
@on_rounding
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("value_dim", [1, 7, 32, 33, 70])
def test_the_error_is_that_of_rounded_weights(engine, name, value_dim):
    """At most half a unit in the last place of each weight, 2**-8 of it. The lse is the same."""
    query, key, value = arrays_of(3, value_dim=value_dim)
    wide = [array.astype(np.float32) for array in (query, key, value)]
    out, lse = solve(engine, query, key, value, **CALLS[name])
    exact, exact_lse = solve(engine, query, key, value, "exact", **CALLS[name])
    assert_same_bits(lse, exact_lse)
    want = naive.attention(*wide, **naive_options(CALLS[name])).out
    reach = naive.attention(wide[0], wide[1], np.abs(wide[2]), **naive_options(CALLS[name])).out
    error = np.abs(out - want)
    assert (error <= reach * (2.0**-8 + 2.0**-16)).all()
    assert error.max() > 16 * np.abs(exact - want).max(), "the weights were not rounded"


@needs_products
@on_rounding
def test_few_rows_are_exact(engine):
    """Keys and values are read from memory once for them, which takes longer than their products."""
    arrays = arrays_of(4, len_q=1)
    assert_all_same(solve(engine, *arrays), solve(engine, *arrays, "exact"))


@pytest.mark.engines(READS_STORAGE)
def test_other_types_and_machines_are_exact(engine):
    """Where an array has another type, or the CPU no products of bfloat16, and of values of both."""
    query, key, value = arrays_of(5, len_q=40)
    wide = [array.astype(np.float32) for array in (query, key, value)]
    half = [array.astype(np.float16) for array in (query, key, value)]
    cases = [wide, half, (wide[0], key, value), (query, wide[1], value), (query, key, wide[2])]
    if engine not in ROUNDING:
        cases.append((query, key, value))
    for given in cases:
        expected = engine.attention(*given, return_lse=True)
        assert_all_same(engine.attention(*given, return_lse=True, precision="storage"), expected)


@needs_products
@on_rounding
@pytest.mark.parametrize("name", ["plain", "causal", "mask", "dropout"])
def test_bits_depend_on_the_row_and_its_keys_alone(engine, name):
    """Not on other rows, heads and items, on threads, strides, layout or pages."""
    query, key, value = arrays_of(6, lead=(2,), heads=4, kv_heads=2, len_k=320, value_dim=40)
    options = CALLS[name] if name != "mask" else {"mask": np.random.default_rng(7).random((LEN_Q, 320)) < 0.7}
    together = solve(engine, query, key, value, **options, num_threads=3)
    swapped = [array.swapaxes(-2, -3) for array in (query, key, value)]
    again = solve(engine, *swapped, layout="bshd", **options, num_threads=1)
    assert_same_bits(again[0].swapaxes(-2, -3), together[0])
    strided = [np.asfortranarray(array) for array in (query, key, value)]
    paged = []
    for size in (20, 64):  # copied, and read in place
        for array in (key, value):
            pages = array.reshape(2, 2, -1, size, array.shape[-1]).swapaxes(1, 2)
            pages = np.ascontiguousarray(pages.reshape(-1, 2, size, array.shape[-1]))
            paged.append(fastattn.Paged(pages, np.arange(len(pages)).reshape(2, -1)))
    for given in ((query, key, value), strided, (query, *paged[:2]), (query, *paged[2:])):
        assert_all_same(solve(engine, *given, **options, num_threads=1), together)
    if name != "dropout":  # whose bits belong to items and heads
        alone = solve(engine, query[1:, 2:], key[1:, 1:], value[1:, 1:], **options)
        for got, wanted in zip(alone, together, strict=True):
            assert_same_bits(got, wanted[1:, 2:])


@needs_products
@on_rounding
@pytest.mark.parametrize("len_q", [40, 700])  # tiles of values, and those of a head at once
@pytest.mark.parametrize("len_k", [63, 257, 512])
def test_keys_at_the_end_of_a_pair(engine, len_q, len_k):
    """An odd number of keys, and rows that end at each: those past it may be anything, and are not read."""
    query, key, value = arrays_of(8, heads=1, len_q=len_q, len_k=len_k)
    expected = solve(engine, query, key, value, causal="bottom_right" if len_q <= len_k else "top_left")
    options = {"causal": "bottom_right"} if len_q <= len_k else {"mask": masks.Causal("top_left")}
    longer = [np.concatenate([x, np.full((1, 3, DIM), np.nan, BFLOAT16)], axis=-2) for x in (key, value)]
    if len_q <= len_k:
        got = solve(engine, query, *longer, **options, key_lengths=len_k)
    else:
        got = solve(engine, query, *(x[:, :len_k] for x in longer), **options)
    assert_all_same(got, expected)


@needs_products
@on_rounding
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite(engine, number):
    """A masked value changes nothing; one that is read makes the outputs those of the exact call."""
    query, key, value = arrays_of(9)
    mask = np.ones((LEN_Q, LEN_K), bool)
    mask[::3, 41] = False
    clean = solve(engine, query, key, value, mask=mask)
    value[1, 41, 5] = key[0, 41, 5] = number
    got = solve(engine, query, key, value, mask=mask)
    exact = solve(engine, query, key, value, "exact", mask=mask)
    for now, before in zip(got, clean, strict=True):
        assert_same_bits(now[:, ::3], before[:, ::3])
    others = np.ones(DIM, bool)
    others[5] = False
    assert_same_bits(got[0][1][:, others], clean[0][1][:, others])
    np.testing.assert_array_equal(np.isnan(got[0]), np.isnan(exact[0]))
    np.testing.assert_array_equal(np.isinf(got[0]), np.isinf(exact[0]))


@needs_products
@on_rounding
def test_values_near_the_largest_number(engine):
    """Weights of 1/2 and a little more, which round up: a mean of the largest number would round to inf."""
    query, key, value = arrays_of(10)
    query, key = query * 0, key * 0
    query[..., 0], key[:, 1:, 0] = np.sqrt(DIM), -0.6875
    value[0], value[1] = 3.3895e38, np.where(np.arange(LEN_K) % 2, 3.3895e38, -3.3895e38)[:, None]
    assert 0.5 < np.exp(-0.6875) < 0.5 * (1 + 2.0**-7), "of the keys but the first"
    out, _ = solve(engine, query, key, value)
    assert np.isfinite(out).all()
    assert (np.abs(out) <= (1 + 2.0**-8) * np.abs(value.astype(np.float64)).max()).all()
    assert np.isfinite(engine.attention(query, key, value, precision="storage").astype(np.float32)).all()


@needs_products
@on_rounding
def test_weights_are_those_of_the_exact_call(engine):
    query, key, value = arrays_of(11)
    *_, weights = engine.everything(query, key, value, precision="storage")
    *_, exact = engine.everything(query, key, value)
    assert_same_bits(weights.view(np.uint16), exact.view(np.uint16))


@pytest.mark.engines(READS_STORAGE)
def test_a_cache(engine):
    query, key, value = arrays_of(12, lead=(1,))
    cache = fastattn.KVCache(1, 2, DIM, dtype="bfloat16")
    cache.append(key, value)
    got = cache.attend(query, precision="storage", backend=engine.backend)
    expected = engine.attention(query, key, value, causal="bottom_right", precision="storage")
    assert_same_bits(got.view(np.uint16), expected.view(np.uint16))


@needs_products
@pytest.mark.slow
@pytest.mark.parametrize("isa", [engine.isa for engine in ROUNDING])
def test_the_c_entry_and_jax(isa):
    code = """
import ml_dtypes, numpy as np
import fastattn
from tests import c_entry
from tests.test_precision import arrays_of
arrays = arrays_of(14, lead=(1,))
exact, rounded = (fastattn.attention(*arrays, precision=it) for it in ("exact", "storage"))
assert (exact != rounded).any()
for precision, wanted in (("exact", exact), ("storage", rounded), ("exact", exact)):
    out = np.empty_like(wanted)
    assert c_entry.attend(*arrays, out, precision=precision) == (0, "")
    assert (out == wanted).all()
try:
    from fastattn.integrations.jax import attention
except ImportError:
    pass
else:
    assert (np.asarray(attention(*arrays, precision="storage")) == rounded).all()
    assert (np.asarray(attention(*arrays)) == exact).all()
"""
    python(code, env={"FASTATTN_ISA": isa})


def test_who_takes_it():
    """Functions with values; of gradients, see test_precision_backward.py."""
    query, key, value = arrays_of(13, len_q=40)
    packed = [array[:, :40].swapaxes(0, 1) for array in (query, key, value)]
    fastattn.varlen_attention(*packed, [0, 15, 40], precision="storage")
    fastattn.flex_attention(query, key, value, precision="storage")
    with pytest.raises(ValueError, match=r'^precision must be "exact" or "storage", got \'half\''):
        fastattn.attention(query, key, value, precision="half")
    with pytest.raises(ValueError, match=r'^precision must be "exact" or "storage", got None'):
        fastattn.attention(query, key, value, precision=None)
    with pytest.raises(TypeError, match="precision"):
        fastattn.reduce_scores(query, key, reduction="max", precision="storage")
