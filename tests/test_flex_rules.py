"""What holds of every call holds of those with functions."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

import fastattn
from fastattn import masks
from tests import naive
from tests.flex_gallery import GALLERY, B, H, L, S, arrays, aux_of, indices, options_of
from tests.process import python
from tests.tolerances import assert_all_same, assert_answer, assert_same_bits

pytest.importorskip("numba")


class TestRules:
    """What holds of every call holds here."""

    @pytest.mark.parametrize("len_q", [3, L])
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_same_bits(self, dtype, len_q):
        given = arrays(dtype, len_q)
        options = {"score_mod": indices, "mask_mod": GALLERY["tree"], "aux": aux_of("tree")}

        def both(score, b, h, q_idx, kv_idx, *aux):
            return indices_compiled(score, b, h, q_idx, kv_idx)

        import numba

        indices_compiled = numba.njit(indices)
        options["score_mod"] = both
        expected = fastattn.flex_attention(*given, num_threads=1, **options)
        for num_threads in (2, 3):
            assert_same_bits(fastattn.flex_attention(*given, num_threads=num_threads, **options), expected)
        strided = [np.repeat(array, 2, axis=-1)[..., ::2] for array in given]
        assert_same_bits(fastattn.flex_attention(*strided, **options), expected)

    @pytest.mark.parametrize("len_q", [2, L])
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_what_a_score_masks_is_never_seen(self, dtype, len_q):
        def first_keys(score, b, h, q_idx, kv_idx):
            return score if kv_idx < 20 + q_idx else -math.inf

        query, key, value = arrays(dtype, len_q)
        expected = fastattn.flex_attention(query, key, value, score_mod=first_keys, return_weights=True)
        poisoned = [array.copy() for array in (key, value)]
        for array in poisoned:
            array[:, :, 19 + len_q :] = np.nan
        value_only = value.copy()
        value_only[:, :, 19 + len_q :] = np.inf
        for keys, values in ((poisoned[0], poisoned[1]), (key, value_only)):
            got = fastattn.flex_attention(query, keys, values, score_mod=first_keys, return_weights=True)
            assert_all_same(got, expected)
        # A value that some rows may read reaches those alone.
        value[:, :, 20] = np.nan
        got = fastattn.flex_attention(query, key, value, score_mod=first_keys)
        np.testing.assert_array_equal(
            np.isnan(got).any(-1), np.broadcast_to(np.arange(len_q) > 0, got.shape[:-1])
        )

    def test_rows_without_keys(self):
        def none(score, b, h, q_idx, kv_idx):
            return -math.inf if q_idx == 3 else score

        out, lse, weights = fastattn.flex_attention(
            *arrays(), score_mod=none, return_lse=True, return_weights=True
        )
        assert (out[:, :, 3] == 0).all()
        assert (lse[:, :, 3] == -np.inf).all()
        assert (weights[:, :, 3] == 0).all()
        assert np.isfinite(out).all()

    @pytest.mark.parametrize("len_q", [4, L])
    def test_nan_is_a_nan_score(self, len_q):
        def broken(score, b, h, q_idx, kv_idx):
            return math.nan if (q_idx == 2) & (kv_idx == 7) else score

        given = arrays(len_q=len_q)
        out = fastattn.flex_attention(*given, score_mod=broken)
        assert np.isnan(out[:, :, 2]).all()
        plain = fastattn.attention(*given)
        others = np.arange(len_q) != 2
        np.testing.assert_allclose(out[:, :, others], plain[:, :, others], rtol=1e-12, atol=1e-13)
        masked = fastattn.flex_attention(*given, score_mod=broken, block_mask=masks.Dense(np.arange(S) != 7))
        assert np.isfinite(masked).all()

    @pytest.mark.slow
    def test_first_calls_of_many_threads(self):
        """All compile at once, and Numba's own state is one for all."""
        code = """
import sys, threading
import numpy as np
import fastattn
sys.setswitchinterval(1e-5)
x, bias, mask = np.ones((1, 2, 9, 8)), np.zeros((9, 9)), np.ones((9, 9), bool)
options = {"score_mod": lambda score, b, h, i, j, t: score + t[i, j], "aux": (bias,)}, {
    "mask_mod": lambda b, h, i, j, t: t[i, j], "aux": (mask,)}
together, failed = threading.Barrier(8), []
def work(i):
    together.wait()
    try:
        fastattn.flex_attention(x, x, x, **options[i % 2])
    except Exception as error:
        failed.append(error)
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(failed)
"""
        for _ in range(4):
            assert python(code).strip() == "[]"

    def test_with_the_other_options(self):
        rng = np.random.default_rng(3)
        bias, sinks = rng.standard_normal((H, L, S)), rng.standard_normal(H)
        options = {"softcap": 3.0, "bias": bias, "sinks": sinks, "window": (20, 10), "scale": 0.3}
        options["key_lengths"] = np.array([60, 70])
        aux = aux_of("alibi")
        results = fastattn.flex_attention(
            *arrays(), score_mod=GALLERY["alibi"], aux=aux, return_lse=True, return_weights=True, **options
        )
        options["score_mod"] = lambda *arguments: GALLERY["alibi"](*arguments, *aux)
        assert_answer(results, naive.attention(*arrays(), **options), naive.formula(*arrays(), **options))

    def test_memory_does_not_grow_with_scores(self):
        """A window's map over 16384 queries and keys, where one bit for each pair would be 32 MB."""
        block_mask = fastattn.create_block_mask(
            GALLERY["sliding_window"], None, None, 16384, 16384, aux=(256,)
        )
        assert block_mask.mask_map.index.nbytes + block_mask.mask_map.bits.nbytes < 2**21

    @pytest.mark.parametrize("name", ["alibi", "sliding_window"])
    def test_empty_sizes(self, name):
        for shape_q, shape_k in (
            ((2, 3, 0, 4), (2, 3, 5, 4)),
            ((2, 3, 5, 4), (2, 3, 0, 4)),
            ((0, 3, 5, 4),) * 2,
        ):
            out = fastattn.flex_attention(
                np.ones(shape_q), np.ones(shape_k), np.ones(shape_k), **options_of(name, np.float64)
            )
            assert out.shape == shape_q
            assert (out == 0).all()


def masked_by(name, len_q):
    """The options of a mask, and those that say the same to `attention`."""
    rng = np.random.default_rng(0)
    random, tri = rng.random((H, len_q, S)) < 0.5, np.tri(len_q, S, 5, dtype=bool)
    some = fastattn.create_block_mask(lambda b, h, i, j: (i * 7 + j * 3 + b + h) % 5 < 2, B, H, len_q, S)
    segments = masks.Segments(np.arange(len_q) // 30, np.arange(S) // 30)
    options = {
        "causal": {"causal": "bottom_right"},
        "window": {"window": (3, 2)},
        "both": {"causal": "bottom_right", "window": (5, 0), "softcap": 50.0},
        "key_lengths": {"key_lengths": np.array([40, 70])},
        "segments": {"block_mask": segments},
        "dense": {"block_mask": masks.Dense(random)},
        "union": {"block_mask": masks.Window(2, 2) | masks.GlobalTokens([0])},
        "block_mask": {"block_mask": some},
        "mask_mod": {"mask_mod": lambda b, h, i, j, at, table: j <= i + 5},
        "bias": {"bias": np.where(random, -np.inf, 0.5)},
        "bias in 16 bits": {"bias": np.where(tri, 0.5, -np.inf).astype(np.float16), "key_lengths": 60},
    }[name]
    others = {"mask" if key == "block_mask" else key: value for key, value in options.items()}
    return options, {"mask": tri} if name == "mask_mod" else others


class TestMaskedPairs:
    """What a score_mod reads for a masked pair is never seen: not the value, nor that it is out of bounds."""

    @pytest.mark.parametrize(
        "name",
        ["causal", "window", "both", "key_lengths", "segments", "dense", "union", "block_mask", "mask_mod",
         "bias", "bias in 16 bits"],
    )  # fmt: skip
    @pytest.mark.parametrize("len_q", [2, L])
    @pytest.mark.parametrize(("dtype", "kv_heads"), [(np.float32, H), (np.float64, 1)], ids=str)
    @pytest.mark.parametrize("backend", ["cython", "numba"])
    def test_may_read_beyond(self, backend, dtype, kv_heads, len_q, name):
        given = arrays(dtype, len_q, kv_heads)
        options, others = masked_by(name, len_q)
        plain = {key: value for key, value in others.items() if key != "softcap"}
        allowed = fastattn.attention(*given, return_weights=True, **plain)[1] > 0
        rng = np.random.default_rng(2)
        at = np.where(
            allowed, rng.integers(-10, 10, allowed.shape), rng.choice([10, -11, 10**12], allowed.shape)
        )
        table = rng.standard_normal(10).astype(dtype)

        def added(score, b, h, q_idx, kv_idx, at, table):
            return score + table[at[b, h, q_idx, kv_idx]]

        options |= {"score_mod": added, "backend": backend}
        got = fastattn.flex_attention(*given, aux=(at, table), **options)
        bias = np.where(allowed, table[np.where(allowed, at, 0)], 0).astype(dtype)
        others["bias"] = bias + others["bias"].astype(dtype) if "bias" in others else bias
        tolerance = 2e-5 if dtype == np.float32 else 1e-12
        np.testing.assert_allclose(got, fastattn.attention(*given, **others), rtol=tolerance, atol=tolerance)
        # One allowed pair that reads beyond is found among them, and named.
        wrong = tuple(map(int, rng.choice(np.argwhere(allowed))))
        at[wrong] = 10
        said = f"reads outside of aux[1] of shape (10,) for (b, h, q_idx, kv_idx) = {wrong}\n"
        with pytest.raises(IndexError, match=re.escape(said)):
            fastattn.flex_attention(*given, aux=(at, table), **options)
