"""What functions of a score or a mask are given: indices, and arrays and numbers beside them."""

from __future__ import annotations

import numpy as np
import pytest

import fastattn
from tests import naive
from tests.flex_gallery import GALLERY, B, D, H, L, S, arrays, indices
from tests.tolerances import assert_answer, assert_same_bits

pytest.importorskip("numba")


class TestWhatFunctionsAreGiven:
    @pytest.mark.parametrize("kv_heads", [3, 1])
    @pytest.mark.parametrize("len_q", [1, 2, 5, 8, 17, 70])
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_indices(self, dtype, len_q, kv_heads):
        """Each index, where rows are lanes and where they are few, with heads that share keys."""
        given = arrays(dtype, len_q, kv_heads, value_dim=5)
        results = fastattn.flex_attention(*given, score_mod=indices, return_lse=True, return_weights=True)
        options = {"score_mod": indices}
        assert_answer(results, naive.attention(*given, **options), naive.formula(*given, **options))

    def test_leading_axes_are_counted_flat(self):
        rng = np.random.default_rng(0)
        query = rng.standard_normal((2, 3, 2, 9, 4))
        key = rng.standard_normal((3, 2, 11, 4))
        table = rng.standard_normal(6)

        def by_item(score, b, h, q_idx, kv_idx, table):
            return score * table[b]

        def some(b, h, q_idx, kv_idx, table):
            return (table[b] > 0) | (kv_idx < 5)

        out = fastattn.flex_attention(query, key, key, score_mod=by_item, mask_mod=some, aux=(table,))
        for b, item in enumerate(np.ndindex(2, 3)):
            keys = key[item[1]]
            mask = np.full((9, 11), table[b] > 0) | (np.arange(11) < 5)
            alone = fastattn.attention(query[item], keys, keys, scale=table[b] / 2, mask=mask)
            np.testing.assert_allclose(out[item], alone, rtol=1e-12, atol=1e-13)

    def test_matrices_and_bshd(self):
        query, key, value = arrays()
        one = fastattn.flex_attention(query[0, 0], key[0, 0], value[0, 0], score_mod=indices)
        whole = fastattn.flex_attention(query, key, value, score_mod=indices)
        np.testing.assert_allclose(one, whole[0, 0], rtol=1e-12, atol=1e-13)
        swapped = [np.ascontiguousarray(array.swapaxes(1, 2)) for array in (query, key, value)]
        out = np.empty_like(swapped[0])
        got = fastattn.flex_attention(*swapped, score_mod=indices, layout="bshd", out=out)
        assert got is out
        assert_same_bits(np.ascontiguousarray(out.swapaxes(1, 2)), whole)

    def test_out_may_overlap_aux(self):
        given = arrays()
        table = np.random.default_rng(2).standard_normal((B, H, L, D))

        def shifted(score, b, h, q_idx, kv_idx, table):
            return score + table[b, h, q_idx, kv_idx % 16]

        expected = fastattn.flex_attention(*given, score_mod=shifted, aux=(table,))
        got = fastattn.flex_attention(*given, score_mod=shifted, aux=(table,), out=table)
        assert_same_bits(got, expected)

    @pytest.mark.parametrize(
        "kind", [np.float64, np.float32, np.float16, np.int8, np.uint64, bool, ">f8", ">f2", ">i4"]
    )
    def test_aux_of_any_dtype(self, kind):
        table = (np.random.default_rng(0).random((H, S)) * 3).astype(kind)

        def added(score, b, h, q_idx, kv_idx, table):
            return score + table[h, kv_idx]

        got = fastattn.flex_attention(*arrays(), score_mod=added, aux=[table])
        expected = fastattn.attention(*arrays(), bias=table.astype(np.float64)[:, None])
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)

    @pytest.mark.parametrize("flag", [True, np.bool_(False), np.array(True)], ids=repr)
    def test_aux_of_bools(self, flag):
        def chosen(score, b, h, q_idx, kv_idx, flag):
            return score + kv_idx if flag else score

        got = fastattn.flex_attention(*arrays(), score_mod=chosen, aux=(flag,))
        expected = fastattn.attention(*arrays(), bias=np.arange(S) * float(flag))
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)
        mask = fastattn.create_block_mask(lambda b, h, i, j, flag: (j <= i) or flag, 1, 1, 9, 9, aux=(flag,))
        np.testing.assert_array_equal(mask.materialize(1, 9, 9)[0], np.tri(9, dtype=bool) | bool(flag))

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_where_of_numbers_is_a_number(self, dtype):
        def causal(score, b, h, q_idx, kv_idx):
            return np.where(kv_idx <= q_idx, score, -np.inf)

        def clipped(score, b, h, q_idx, kv_idx):
            return score * np.where(score > 0, 1, kv_idx % 2)

        def same(score, b, h, q_idx, kv_idx):
            return score * (1 if score > 0 else kv_idx % 2)

        given = arrays(dtype)
        expected = fastattn.attention(*given, causal=True)
        got = fastattn.flex_attention(*given, score_mod=causal)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
        got, expected = (fastattn.flex_attention(*given, score_mod=function) for function in (clipped, same))
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("integer", [np.int8, np.int32, np.int64, np.uint8, np.uint64])
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_divisions_of_integers_round_down(self, dtype, integer):
        """As in Python; 0 by 0, and where the quotient does not fit, as in Numba."""

        def divided(score, b, h, q_idx, kv_idx, table):
            x, y = table[q_idx], table[kv_idx]
            return score + (x // y) % 16 + x % y % 16

        limits = np.iinfo(integer)
        table = np.arange(S).astype(integer) - integer(S // 2 if limits.min else 0)
        table[0], table[-1] = limits.min, limits.max
        bias = np.zeros((L, S))
        for i, j in np.ndindex(L, S):
            x, y = int(table[i]), int(table[j])
            fits = y and not (x == -(2**63) and y == -1)
            bias[i, j] = x // y % 16 + x % y % 16 if fits else 0
        got = fastattn.flex_attention(*arrays(dtype), score_mod=divided, aux=(table,))
        expected = fastattn.attention(*arrays(dtype), bias=bias.astype(dtype))
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("backend", ["cython", "numba"])
    def test_divisions_under_a_condition(self, backend):
        """LLVM's vectors would divide in the first lane alone, which is masked here while others are not."""
        two = np.arange(1.0, 5).reshape(2, 2)

        def corner(score, b, h, q_idx, kv_idx):
            if min(b, h) != max(b, kv_idx):
                return -np.inf
            return two.flat[3]  # two divisions by its shape, which is not known when this is compiled

        query, key = np.ones((2, 2, 3, 4)), np.ones((2, 1, 4, 4))
        _, lse = fastattn.flex_attention(query, key, key, score_mod=corner, return_lse=True, backend=backend)
        expected = [[4, 4], [-np.inf, 4 + np.log(2)]]
        np.testing.assert_allclose(lse, np.repeat(expected, 3).reshape(2, 2, 3), rtol=1e-12)

    def test_exponentials_of_small_integers_are_of_float64(self):
        table = np.arange(S, dtype=np.int8) % 5

        def scaled(score, b, h, q_idx, kv_idx, table):
            return score + np.tanh(table[kv_idx])

        got = fastattn.flex_attention(*arrays(), score_mod=scaled, aux=(table,))
        expected = fastattn.attention(*arrays(), bias=np.tanh(table.astype(float)))
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)

    @pytest.mark.parametrize(
        "cut", [(slice(None, None, -1), slice(None)), (slice(None), slice(None, None, 2))]
    )
    def test_strided_aux(self, cut):
        table = np.random.default_rng(0).standard_normal((H, 2 * S))[cut]

        def added(score, b, h, q_idx, kv_idx, table):
            return score + table[h, kv_idx]

        got = fastattn.flex_attention(*arrays(), score_mod=added, aux=[table])
        expected = fastattn.attention(*arrays(), bias=table[:, None, :S])
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)

    def test_aux_is_read_at_each_call(self):
        """Without another compilation, be it changed in place, another array or another number."""
        from fastattn.backends.jit.functions import loops

        table, known = np.zeros(H), None
        for slope in (0.0, 0.5, 3.0):
            table[:] = slope
            for aux in ((table,), (table.copy(),)):
                got = fastattn.flex_attention(*arrays(), score_mod=GALLERY["alibi"], aux=aux)
                known = known or len(loops)
                bias = -slope * np.abs(np.subtract.outer(np.arange(L), np.arange(S)))
                expected = fastattn.attention(*arrays(), bias=bias)
                np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)
                assert len(loops) == known

    def test_functions_that_differ_only_outside(self):
        def by_default(factor):
            def scaled(score, b, h, q_idx, kv_idx, factor=factor):
                return score * factor

            return scaled

        def in_closure(factor):
            def scaled(score, b, h, q_idx, kv_idx):
                return score * factor

            return scaled

        for factor in (2.0, 3.0):
            for function in (by_default(factor), in_closure(factor)):
                got = fastattn.flex_attention(*arrays(), score_mod=function)
                expected = fastattn.attention(*arrays(), scale=factor / 4)
                np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)

    def test_functions_over_arrays_that_are_gone(self):
        """Another array in the place of one that was freed is another array."""

        def over(factor):
            table = np.full(S, factor)
            return lambda score, b, h, q_idx, kv_idx: score * table[kv_idx]

        for factor in (1.0, 2.0, 3.0, 4.0):
            got = fastattn.flex_attention(*arrays(), score_mod=over(factor))
            expected = fastattn.attention(*arrays(), scale=factor / 4)
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)

    def test_compiled_functions(self):
        import numba

        @numba.njit
        def half(x):
            return x / 2

        @numba.njit
        def halved(score, b, h, q_idx, kv_idx):
            return half(score)

        @numba.njit
        def even(b, h, q_idx, kv_idx):
            return kv_idx % 2 == 0

        got = fastattn.flex_attention(*arrays(), score_mod=halved, mask_mod=even)
        expected = fastattn.attention(*arrays(), scale=1 / 8, mask=np.arange(S) % 2 == 0)
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)
