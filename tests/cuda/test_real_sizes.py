"""Sizes around the tiles that a GPU has, which would take hours in the simulator."""

from __future__ import annotations

import ml_dtypes  # noqa: F401  # names bfloat16
import numpy as np
import pytest

import fastattn
from fastattn.masks import GlobalTokens, Segments, Window
from tests.cases import FLOATS, Case, solve, stored, upcast
from tests.cuda.libraries import SIMULATED
from tests.tolerances import assert_answer, assert_attention, assert_same_bits

pytestmark = pytest.mark.skipif(SIMULATED, reason="a GPU's own tiles are too large for the simulator")


def options(**keywords):
    return tuple(keywords.items())


#: One of every kind of kernel, for compute-sanitizer, which takes its time.
SANITIZED = [
    Case("sanitized_plain", heads=2, len_q=150, len_k=300, head_dim=64),
    Case("sanitized_causal", heads=2, len_q=200, len_k=200, head_dim=72, value_dim=40,
         options=options(causal=True)),
    Case("sanitized_wide", heads=1, len_q=70, len_k=90, head_dim=128),
    Case("sanitized_decode", heads=4, kv_heads=2, len_q=1, len_k=2500, head_dim=128, sinks=True),
    Case("sanitized_all", lead=(2,), heads=2, len_q=130, len_k=140, head_dim=40, bias=(130, 140), sinks=True,
         mask=(2, 130, 140), options=options(causal="bottom_right", key_lengths=(100, 140), softcap=9.0)),
]  # fmt: skip
CASES = [
    *SANITIZED,
    *(Case(f"rows_{n}", heads=1, len_q=n, len_k=129, head_dim=64) for n in (2, 8, 9, 127, 128, 129, 257)),
    *(Case(f"keys_{n}", heads=1, len_q=65, len_k=n, head_dim=64) for n in (1, 63, 64, 65, 127, 128, 511)),
    *(Case(f"dim_{n}", heads=1, len_q=66, len_k=67, head_dim=n) for n in (1, 15, 16, 17, 96, 192, 256)),
    *(Case(f"values_{n}", heads=1, len_q=66, len_k=67, value_dim=n) for n in (1, 63, 65, 127, 129, 256)),
    *(Case(f"split_{n}", heads=1, len_q=3, len_k=n, head_dim=40) for n in (511, 512, 513, 3000)),
    *(Case(f"split_rows_{n}", heads=1, len_q=n, len_k=3000, head_dim=64, sinks=True,
           options=options(causal="bottom_right")) for n in (16, 64, 65, 300)),
    Case("window", heads=2, len_q=300, len_k=300, head_dim=64, options=options(window=(40, 3))),
    Case("gqa", lead=(2,), heads=8, kv_heads=2, len_q=40, len_k=100, head_dim=64,
         options=options(causal="bottom_right")),
    Case("bias_wide", heads=1, len_q=70, len_k=150, head_dim=128, bias=(70, 150)),
    Case("bias_half", heads=2, len_q=100, len_k=150, head_dim=64, bias=(2, 1, 150), bias_dtype="float16"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(engine, case, dtype):
    solved = solve(case.as_dtype(dtype))
    assert_answer(engine.everything(*solved.arrays, **solved.keywords), solved.exact, solved.plain)


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_storage(engine, case, storage):
    """In 16 bits; the result not rounded to them."""
    arrays = stored(case.arrays(), [storage] * 3)
    out, keywords = np.empty((*arrays[0].shape[:-1], arrays[2].shape[-1]), np.float32), case.keywords()
    _, lse, weights = engine.everything(*arrays, **keywords, out=out)
    assert_attention((out, lse), *upcast(arrays), **keywords)
    exact = fastattn.attention(
        *upcast(arrays, np.float64), **keywords, backend="reference", return_weights=True
    )[1]
    half_ulp = 2.0**-8 if storage == "bfloat16" else 2.0**-11
    np.testing.assert_allclose(weights.astype(np.float64), exact, rtol=half_ulp + 1e-5, atol=1e-7)


@pytest.mark.parametrize("length", [100, 300])
def test_tile_maps(engine, length):
    arrays = Case("maps", heads=2, len_q=length, len_k=length, head_dim=64).arrays()
    ids = np.arange(length) * 7 % 5
    for mask in (Window(20, 0) | GlobalTokens([0, 90]), Segments(ids)):
        results = engine.everything(*arrays, mask=mask)
        assert_attention(results, *arrays, mask=mask.materialize(2, length, length))


def test_functions(engine, library):
    query, key, value = Case("functions", heads=2, len_q=140, len_k=150, head_dim=64).arrays()
    slopes = np.float32([0.5, 0.1])

    def alibi(score, b, h, q_idx, kv_idx, slopes):
        return score - slopes[h] * abs(q_idx - kv_idx)

    def even(b, h, q_idx, kv_idx, slopes):
        return (kv_idx - q_idx) % 2 == 0

    distance = np.abs(np.arange(140)[:, None] - np.arange(150))
    out = fastattn.flex_attention(*map(library.put, (query, key, value)), score_mod=alibi, mask_mod=even,
                                  aux=[library.put(slopes)])  # fmt: skip
    bias = -slopes[:, None, None] * distance
    expected = fastattn.attention(query, key, value, bias=bias, mask=distance % 2 == 0, backend="reference")
    np.testing.assert_allclose(library.get(out), expected, atol=2e-6)


@pytest.mark.filterwarnings("ignore:overflow")  # in float16 the largest is infinite
@pytest.mark.parametrize("odd", [np.nan, np.inf, 2.0**127])
@pytest.mark.parametrize("dtype", [*FLOATS, "float16", "bfloat16"])
def test_odd_numbers_that_are_not_read_change_no_bit(engine, dtype, odd):
    case = Case("masked", heads=2, len_q=140, len_k=150, head_dim=64)
    query, key, value = stored(case.arrays(), [dtype] * 3)
    expected = engine.everything(query, key, value, causal="top_left")
    for array in (key, value):
        array[..., 70:, 3] = odd  # some of the tile that all rows read
    for one, other in zip(engine.everything(query, key, value, causal="top_left"), expected, strict=True):
        assert_same_bits(one[:, :70], other[:, :70])


@pytest.mark.filterwarnings("ignore:overflow")  # in float16 the largest is infinite
@pytest.mark.parametrize("odd", [np.nan, -np.inf, 2.0**127])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_odd_numbers(engine, which, odd, dtype):
    """They reach the rows that read them, and no other."""
    arrays = stored(Case("odd", heads=2, len_q=140, len_k=150, head_dim=64).arrays(), [dtype] * 3)
    arrays[which][..., 77, 3] = odd
    if which < 2 and np.isfinite(odd) and dtype != "float16":  # scores of some size
        arrays[1 - which][:] *= np.asarray(1e-38, dtype)
    wide = [array.astype(np.float64) for array in arrays]
    out = np.empty(arrays[0].shape, np.float32)
    with np.errstate(all="ignore"):
        expected = fastattn.attention(*wide, causal="top_left", backend="reference")
        engine.attention(*arrays, causal="top_left", out=out)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_same_bits_on_every_launch(engine, library, dtype, head_dim):
    """No race between threads shows; nor does it depend on the other items, or on where rows lie."""
    case = Case("again", lead=(3,), heads=4, len_q=200, len_k=500, head_dim=head_dim)
    arrays = stored(case.arrays(), [dtype] * 3)
    on_gpu = [library.put(x) for x in arrays]
    first = library.get(fastattn.attention(*on_gpu, causal="bottom_right"))
    for _ in range(20):
        assert_same_bits(library.get(fastattn.attention(*on_gpu, causal="bottom_right")), first)
    assert_same_bits(engine.attention(*(x[1] for x in arrays), causal="bottom_right"), first[1])
