"""Scores of pairs of bfloat16, by the instruction or its model: what they take, and what bits depend on."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import fastattn
from fastattn._machine.constants import EXTENDED
from tests.cases import random_arrays
from tests.conftest import ENGINES
from tests.tolerances import assert_all_same, assert_attention, assert_same_bits

PAIRS_ISAS = [isa for isa, own in EXTENDED.items() if own["source"] == "pairs.c"]
PAIRS = [engine for engine in ENGINES if engine.isa in PAIRS_ISAS]
pytestmark = [
    pytest.mark.skipif(not PAIRS, reason="no kernels of pairs here"),
    pytest.mark.parametrize("engine", PAIRS, ids=lambda engine: engine.name, indirect=True),
]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LEN_Q, LEN_K = 100, 300


def arrays_of(seed=0, **sizes):
    sizes = {"heads": 2, "len_q": LEN_Q, "len_k": LEN_K, "head_dim": 24} | sizes
    return [array.astype(BFLOAT16) for array in random_arrays(seed, **sizes)]


def solve(engine, query, *arrays, **options):
    """The output before it is rounded to 16 bits, and the lse."""
    out = np.empty((*query.shape[:-1], options.pop("value_dim", query.shape[-1])), np.float32)
    return engine.attention(query, *arrays, out=out, return_lse=True, **options)


def assert_right(got, *arrays, **options):
    assert_attention(got, *(array.astype(np.float32) for array in arrays), **options)


@pytest.mark.parametrize("scale", [None, 1.0, -1.0, -0.3, 0.25, 3.7, 100.0, 1e-30, 2.0**15])
@pytest.mark.parametrize("options", ["plain", "causal", "bias", "softcap"])
def test_any_scale(engine, scale, options):
    """A power of two multiplies the query, the rest the exponent, or all of it is done in float32."""
    query, key, value = arrays_of(1)
    if scale == 2.0**15:
        query = (query.astype(np.float32) / 2**15).astype(BFLOAT16)
    bias = np.random.default_rng(2).standard_normal((2, LEN_Q, LEN_K)).astype(np.float32)
    given = {
        "plain": {},
        "causal": {"causal": "bottom_right"},
        "bias": {"bias": bias},
        "softcap": {"softcap": 2.0},
    }
    options = {"scale": scale} | given[options]
    assert_right(solve(engine, query, key, value, **options), query, key, value, **options)


@pytest.mark.parametrize("head_dim", [1, 2, 3, 30, 31, 32, 34, 64, 66, 130, 258, 300])
def test_any_head_dim(engine, head_dim):
    arrays = arrays_of(3, head_dim=head_dim, value_dim=9)
    assert_right(solve(engine, *arrays, value_dim=9), *arrays)


@pytest.mark.parametrize("which", ["query", "key"])
@pytest.mark.parametrize(
    "number", [2.0**59, 2.0**63, 2.0**100, -3e30, 2.0**-124, 1e-38, 1e-40, np.inf, -np.inf, np.nan]
)
@pytest.mark.parametrize("name", ["plain", "bias", "mask"])
def test_a_number_that_has_no_pairs(engine, which, number, name):
    """Its scores are those of the kernels of float32; all other rows keep their bits."""
    query, key, value = arrays_of(4)
    rng = np.random.default_rng(12)
    bias, mask = rng.standard_normal((LEN_Q, LEN_K)).astype(np.float32), rng.random((LEN_Q, LEN_K)) < 0.8
    options = {"plain": {}, "bias": {"bias": bias}, "mask": {"mask": mask}}[name]
    before = solve(engine, query, key, value, **options)
    {"query": query, "key": key}[which][1, 41, 5] = number
    got = solve(engine, query, key, value, **options)
    with np.errstate(all="ignore"):
        assert_right(got, query, key, value, **options)
    if which == "query":
        others = np.ones((2, LEN_Q), bool)
        others[1, 41] = False
        for now, then in zip(got, before, strict=True):
            assert_same_bits(now[others], then[others])


@pytest.mark.parametrize(
    ("of_query", "of_key"), [(-124, 124), (-120, 100), (-60, 59), (100, -110), (70, -80), (110, -128)]
)
@pytest.mark.parametrize("masked", [False, True])
def test_scores_of_unlike_factors(engine, of_query, of_key, masked):
    """Where one is tiny, also denormal, and the other huge their product is not."""
    query, key, value = (array.astype(np.float32) for array in arrays_of(5))
    query, key = np.ldexp(query, of_query).astype(BFLOAT16), np.ldexp(key, of_key).astype(BFLOAT16)
    options = {"mask": np.random.default_rng(6).random((LEN_Q, LEN_K)) < 0.7} if masked else {}
    value = value.astype(BFLOAT16)
    assert_right(solve(engine, query, key, value, **options), query, key, value, **options)


def test_the_largest_score_of_a_query_without_pairs(engine):
    """Denormal keys, that pairs take as 0, and scores that overflow unless the largest is subtracted."""
    query, key, value = (array.astype(np.float32) for array in arrays_of(11))
    query, key = np.ldexp(query, 125).astype(BFLOAT16), np.ldexp(key, -128).astype(BFLOAT16)
    value = value.astype(BFLOAT16)
    assert_right(solve(engine, query, key, value, scale=1000.0), query, key, value, scale=1000.0)


def test_bits_depend_on_the_row_and_its_keys_alone(engine):
    """Not on the other rows, heads and items, one of them without pairs, on threads, strides or pages."""
    query, key, value = arrays_of(7, lead=(2,), heads=4, kv_heads=2, len_q=LEN_Q, len_k=320)
    query[:, :, 77] = np.nan
    together = solve(engine, query, key, value, causal="bottom_right", num_threads=3)
    strided = [np.asfortranarray(array) for array in (query, key, value)]
    paged = []
    for size in (40, 64):  # copied, and read in place
        for array in (key, value):
            pages = array.reshape(2, 2, -1, size, 24).swapaxes(1, 2).reshape(-1, 2, size, 24)
            table = np.arange(len(pages)).reshape(2, -1)
            paged.append(fastattn.Paged(np.ascontiguousarray(pages), table))
    for given in ((query, key, value), strided, (query, *paged[:2]), (query, *paged[2:])):
        again = solve(engine, *given, causal="bottom_right", num_threads=1)
        assert_all_same(again, together)
    alone = solve(engine, query[1:, 2:, 40:], key[1:, 1:], value[1:, 1:], causal="bottom_right")
    for got, wanted in zip(alone, together, strict=True):
        assert_same_bits(got, wanted[1:, 2:, 40:])


def test_only_calls_in_bfloat16_throughout(engine):
    """Beside another type the bits are those of the call on upcast arrays."""
    query, key, value = arrays_of(8)
    wide = [array.astype(np.float32) for array in (query, key, value)]
    expected = engine.attention(*wide, return_lse=True)
    for given in ((wide[0], key, value), (query, wide[1], value), (query, key, wide[2])):
        assert_all_same(engine.attention(*given, return_lse=True), expected)


def test_weights_belong_to_the_output(engine):
    query, key, value = arrays_of(9)
    query[0, 3, 3] = 2.0**70
    out, lse, weights = engine.everything(query, key, value, causal="bottom_right")
    plain = engine.attention(query, key, value, causal="bottom_right", return_lse=True)
    for got, wanted in zip(plain, (out, lse), strict=True):
        assert_same_bits(got.view(np.uint16), wanted.view(np.uint16))
    np.testing.assert_allclose(weights.astype(np.float64).sum(-1), 1, atol=2.0**-8)


def test_the_longest_copy_of_keys(engine):
    """Keys with gaps are copied whole where many blocks read them, and tile by tile elsewhere."""
    query, key, value = arrays_of(10, heads=1, len_q=700, len_k=600, head_dim=8)
    expected = solve(engine, query, key, value, num_threads=1)
    room = np.zeros((600, 3, 20), BFLOAT16)
    for moved in (room[:, 1, 3:11], room[:, 2, 1:17:2]):
        moved[:] = key[0]
        for got, wanted in zip(
            solve(engine, query, moved[None], value, num_threads=1), expected, strict=True
        ):
            assert_same_bits(got, wanted)
