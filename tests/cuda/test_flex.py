"""`flex_attention` on the CUDA backend: functions of the caller's inside the kernels."""

from __future__ import annotations

import math

import numpy as np
import pytest

import fastattn
from fastattn.masks import Causal
from tests import naive
from tests.cases import FLOATS, random_arrays
from tests.cuda.libraries import LIBRARIES, SIMULATED
from tests.flex_gallery import GALLERY, in_python
from tests.tolerances import assert_answer, assert_same_bits

B, H, L, S, D = 2, 2, 5, 9, 4


def aux_of(name, dtype):
    rng = np.random.default_rng(0)
    is_global = np.zeros(S, bool)
    is_global[[0, 4]] = True
    return {
        "alibi": (2.0 ** -np.arange(1, H + 1, dtype=dtype),),
        "t5_bias": (np.minimum(np.abs(np.arange(-L, S)), 3), rng.standard_normal((4, H)).astype(dtype), L),
        "soft_cap": (2.0,),
        "distance_decay": (rng.random(S).astype(dtype), 20.0),
        "additive": tuple(rng.standard_normal(n).astype(dtype) for n in ((L, 4), (S, 4), 4)),
        "sliding_window": (2,),
        "prefix_lm": (np.array([1, 3]),),
        "documents": (np.repeat(np.arange(4), [2, 3, 1, 3]),),
        "longformer": (1, is_global),
        "big_bird": (1, is_global, rng.random((3, 5)) < 0.3, 2),
        "dilated_window": (2, 2),
        "neighbourhood": (3, 1),
        "tree": (np.tri(L, 4, dtype=bool), S - 4),
    }[name]


def given(dtype=np.float32):
    return random_arrays(lead=(B,), heads=H, len_q=L, len_k=S, head_dim=D, dtype=dtype)


def oracle(name, function, aux):
    if function.__code__.co_varnames[0] == "score":
        return {"score_mod": lambda *arguments: function(*arguments, *aux)}
    return {"mask": in_python(function, aux, B, H, L, S)}


@pytest.mark.parametrize("library", list(LIBRARIES)[:1] if SIMULATED else LIBRARIES, indirect=True)
@pytest.mark.parametrize("dtype", FLOATS[:1] if SIMULATED else FLOATS)
@pytest.mark.parametrize("name", GALLERY)
def test_gallery(library, name, dtype):
    function, aux = GALLERY[name], aux_of(name, dtype)
    kind = "score_mod" if function.__code__.co_varnames[0] == "score" else "mask_mod"
    on_gpu = [library.put(x) if isinstance(x, np.ndarray) else x for x in aux]
    results = fastattn.flex_attention(
        *map(library.put, given(dtype)), **{kind: function}, aux=on_gpu, return_lse=True, return_weights=True
    )
    assert all(isinstance(result, library.result) for result in results)
    options = oracle(name, function, aux)
    exact, plain = naive.attention(*given(dtype), **options), naive.formula(*given(dtype), **options)
    assert_answer(tuple(library.get(result) for result in results), exact, plain)


def indices(score, b, h, q_idx, kv_idx):
    return score + 1.5 * b - 0.25 * h + 0.125 * q_idx - 0.0625 * kv_idx + 0.001 * q_idx * kv_idx


@pytest.mark.parametrize("len_q", [1, 2, 3, 7])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_indices(engine, kv_heads, len_q):
    """From the host, too; leading axes are counted flat, and splits of the keys have their own."""
    arrays = random_arrays(
        lead=(2, 2), heads=2, kv_heads=kv_heads, len_q=len_q, len_k=11, head_dim=3, dtype="float64"
    )
    results = fastattn.flex_attention(*arrays, score_mod=indices, backend="cuda", return_lse=True)
    expected = fastattn.flex_attention(*arrays, score_mod=indices, return_lse=True)
    for result, host in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, host, atol=1e-13)


def test_all_that_masks_holds_together(library):
    arrays = random_arrays(heads=1, len_q=6, len_k=6, head_dim=3, dtype="float64")
    arrays[2][0, 1] = np.nan  # of a key that nobody may read

    def lower(score, b, h, q_idx, kv_idx):
        return -math.inf if kv_idx == 1 else score / 2

    def not_three(b, h, q_idx, kv_idx):
        return kv_idx != 3

    allowed = np.tri(6, dtype=bool) & (np.arange(6) != 1) & (np.arange(6) != 3)
    bias = np.random.default_rng(0).standard_normal((6, 6))
    on_gpu = [library.put(x) for x in arrays]
    options = {"score_mod": lower, "mask_mod": not_three, "block_mask": Causal(), "return_weights": True}
    out, weights = fastattn.flex_attention(*on_gpu, bias=library.put(bias), **options)
    expected = fastattn.attention(*arrays, scale=0.5 / math.sqrt(3), bias=bias, mask=allowed,
                                  return_weights=True)  # fmt: skip
    np.testing.assert_allclose(library.get(out), expected[0], atol=1e-14)
    np.testing.assert_allclose(library.get(weights), expected[1], atol=1e-14)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("wild", [np.nan, np.inf])
def test_what_a_score_mod_masks_is_not_seen(engine, wild):
    """In a tile that nothing else masks."""
    arrays = random_arrays(heads=1, len_q=8, len_k=8, head_dim=4)
    arrays[1][0, 5] = wild
    arrays[2][0, 5] = wild

    def without_five(score, b, h, q_idx, kv_idx):
        return -math.inf if kv_idx == 5 else score

    others = np.arange(8) != 5
    out = fastattn.flex_attention(*arrays, score_mod=without_five, backend="cuda")
    np.testing.assert_allclose(out, fastattn.attention(*arrays, mask=others), atol=1e-6)


def test_functions_that_call_functions(library):
    import numba

    @numba.njit
    def half(x):
        return x / 2

    @numba.njit
    def halved(score, b, h, q_idx, kv_idx):
        return half(score)

    def halved_too(score, b, h, q_idx, kv_idx):
        return half(score)

    arrays = [library.put(x) for x in given()]
    expected = library.get(fastattn.attention(*arrays, scale=0.25, bias=library.put(np.zeros(1, "f4"))))
    for function in (halved, halved_too):
        assert_same_bits(library.get(fastattn.flex_attention(*arrays, score_mod=function)), expected)


def test_errors(library):
    arrays = [library.put(x) for x in given()]

    def added(score, b, h, q_idx, kv_idx, table):
        return score + table[kv_idx]

    def unknown(score, b, h, q_idx, kv_idx):
        return score + what_is_this  # noqa: F821

    def not_a_bool(b, h, q_idx, kv_idx):
        return 1.5

    table = np.zeros(S)
    flex = fastattn.flex_attention
    with pytest.raises(ValueError, match=r"on one GPU; got query on cuda:0, aux\[0\] on the host"):
        flex(*arrays, score_mod=added, aux=[table])
    with pytest.raises(ValueError, match=r"got query on the host, aux\[0\] on cuda:0"):
        flex(*given(), score_mod=added, aux=[library.put(table)])
    with pytest.raises(ValueError, match=r"got query on the host, aux\[0\] on cuda:0"):
        flex(*given(), mask_mod=GALLERY["prefix_lm"], aux=[library.put(np.array([1, 3]))])
    with pytest.raises(
        IndexError, match=r"'added' reads outside of .* \(b, h, q_idx, kv_idx\) = \(0, 0, 0, 8\)"
    ):
        flex(*arrays, score_mod=added, aux=[library.put(table[:-1])])
    with pytest.raises(TypeError, match=r"aux\[0\] is float16 on cuda:0"):
        flex(*arrays, score_mod=added, aux=[library.put(table.astype(np.float16))])
    with pytest.raises(TypeError, match=r"aux\[0\] is on cuda:0, and is read on the host"):
        fastattn.create_block_mask(GALLERY["prefix_lm"], B, H, L, S, aux=[library.put(np.array([1, 3]))])
    with pytest.raises(TypeError, match="score_mod 'unknown'"):
        flex(*arrays, score_mod=unknown)
    with pytest.raises(TypeError, match="mask_mod 'not_a_bool' must return a bool"):
        flex(*arrays, mask_mod=not_a_bool)
    out = library.put(np.zeros((B, H, L, D), np.float32))
    with pytest.raises(ValueError, match="out must not share memory with aux on cuda:0"):
        flex(*arrays, score_mod=lambda s, b, h, q, k, t: s + t[0, 0, 0, 0], aux=[out], out=out)
