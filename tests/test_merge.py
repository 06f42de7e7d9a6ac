"""`merge_attention`: exact combination of attention over disjoint sets of keys."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest

import fastattn
from tests import naive
from tests.cases import FLOATS, random_arrays
from tests.refusals import assert_named
from tests.tolerances import assert_all_same, assert_close, assert_same_bits


def parts_over(cuts, query, key, value, **options):
    """Outputs and lses over the key ranges between `cuts`."""
    pairs = [
        fastattn.attention(query, key[..., a:b, :], value[..., a:b, :], return_lse=True, **options)
        for a, b in itertools.pairwise(cuts)
    ]
    return [out for out, _ in pairs], [lse for _, lse in pairs]


def assert_is_whole(out, lse, query, key, value):
    exact, plain = naive.attention(query, key, value), naive.formula(query, key, value)
    # Merging adds one more weighted mean on top of the parts: the reach of a row counts once more.
    assert_close("out", out, exact.out, 2 * exact.out_reach, plain.out)
    assert_close("lse", lse, exact.lse, 2 * exact.lse_reach, plain.lse)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cuts", [(0, 33), (0, 10, 33), (0, 1, 2, 33), (0, 0, 5, 5, 33, 33)], ids=str)
def test_parts_make_the_whole(cuts, dtype):
    query, key, value = random_arrays(lead=(2,), dtype=dtype)
    out, lse = fastattn.merge_attention(*parts_over(cuts, query, key, value))
    assert out.dtype == lse.dtype == np.dtype(dtype)
    assert_is_whole(out, lse, query, key, value)


def test_any_order():
    query, key, value = random_arrays()
    outs, lses = parts_over((0, 4, 20, 33), query, key, value)
    for order in itertools.permutations(range(3)):
        out, lse = fastattn.merge_attention([outs[n] for n in order], [lses[n] for n in order])
        assert_is_whole(out, lse, query, key, value)


def test_merging_merged_parts():
    query, key, value = random_arrays()
    outs, lses = parts_over((0, 4, 20, 33), query, key, value)
    first = fastattn.merge_attention(outs[:2], lses[:2])
    out, lse = fastattn.merge_attention([first[0], outs[2]], [first[1], lses[2]])
    assert_is_whole(out, lse, query, key, value)


def test_a_part_without_keys_changes_no_bit():
    query, key, value = random_arrays()
    outs, lses = parts_over((0, 33), query, key, value)
    nothing = np.zeros_like(outs[0]), np.full_like(lses[0], -np.inf)
    for place in (0, 1):
        with_nothing = list(outs), list(lses)
        with_nothing[0].insert(place, nothing[0])
        with_nothing[1].insert(place, nothing[1])
        out, lse = fastattn.merge_attention(*with_nothing)
        assert_same_bits(out, outs[0], "out")
        assert_same_bits(lse, lses[0], "lse")


def test_nothing_at_all_is_zero_and_minus_infinity():
    out, lse = fastattn.merge_attention([np.zeros((2, 3, 4))] * 3, [np.full((2, 3), -np.inf)] * 3)
    np.testing.assert_array_equal(out, np.zeros((2, 3, 4)))
    np.testing.assert_array_equal(lse, np.full((2, 3), -np.inf))


def test_rows_without_keys_beside_rows_with_some():
    query, key, value = random_arrays(len_q=8, len_k=8)
    allowed = np.tri(8, dtype=bool)
    left, right = allowed.copy(), allowed.copy()
    left[:, 4:], right[:, :4] = False, False
    pairs = [fastattn.attention(query, key, value, mask=mask, return_lse=True) for mask in (left, right)]
    out, lse = fastattn.merge_attention([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    exact, plain = (f(query, key, value, mask=allowed) for f in (naive.attention, naive.formula))
    assert_close("out", out, exact.out, 2 * exact.out_reach, plain.out)
    assert_close("lse", lse, exact.lse, 2 * exact.lse_reach, plain.lse)


@pytest.mark.parametrize("dtype", FLOATS)
def test_large_lses_do_not_overflow(dtype):
    outs = [np.full((1, 2, 3), number, dtype) for number in (1.0, 3.0)]
    high = 80.0 * (1 if dtype == "float32" else 10)
    lses = [np.array([[high, -high]], dtype), np.array([[high, high]], dtype)]
    out, lse = fastattn.merge_attention(outs, lses)
    np.testing.assert_allclose(out, np.array([[[2.0] * 3, [3.0] * 3]]), rtol=4 * np.finfo(dtype).eps)
    np.testing.assert_allclose(lse, np.array([[high + np.log(2), high]]), rtol=4 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [*FLOATS, "float16"])
def test_outs_near_the_largest_number_stay_between_them(dtype):
    largest = np.finfo(dtype).max
    ones, zeros = np.full((1, 2, 3), largest, dtype), np.zeros((1, 2), dtype)
    for outs, lses, expected in (
        ([ones, ones, ones], [zeros, zeros + 1, zeros - 2], 1.0),
        ([-ones, -ones], [zeros, zeros], -1.0),
        ([ones, -ones, ones], [zeros, zeros, zeros], 1 / 3),
        ([ones, ones / 1024, ones], [zeros - 30, zeros + 30, zeros - 30], 1 / 1024),
        ([ones, np.full_like(ones, np.inf)], [zeros, zeros - np.inf], 1.0),
        ([ones, np.full_like(ones, np.inf)], [zeros, zeros], np.inf),
    ):
        out, _ = fastattn.merge_attention(outs, lses)
        assert out.dtype == np.dtype(dtype)
        np.testing.assert_allclose(out / largest, expected, rtol=8 * np.finfo(dtype).eps)


def test_nan_in_one_row_stays_in_it():
    query, key, value = random_arrays()
    outs, lses = parts_over((0, 10, 33), query, key, value)
    clean = fastattn.merge_attention(outs, lses)
    outs[0][1, 5], lses[0][1, 5] = np.nan, np.nan
    out, lse = fastattn.merge_attention(outs, lses)
    assert np.isnan(out[1, 5]).all()
    assert np.isnan(lse[1, 5])
    others = np.ones(lse.shape, bool)
    others[1, 5] = False
    assert_same_bits(out[others], clean[0][others], "out")
    assert_same_bits(lse[others], clean[1][others], "lse")


def test_inputs_are_left_alone():
    query, key, value = random_arrays()
    outs, lses = parts_over((0, 10, 33), query, key, value)
    before = [array.copy() for array in outs + lses]
    fastattn.merge_attention(outs, lses)
    assert_all_same(outs + lses, before)


def test_refused():
    out, lse = np.zeros((2, 3, 4)), np.zeros((2, 3))
    several = [
        {"outs": [], "lses": []},
        {"outs": [out], "lses": []},
        {"outs": [out, np.zeros((2, 3, 5))], "lses": [lse] * 2},
        {"outs": [out] * 2, "lses": [lse, np.zeros((2, 4))]},
    ]
    assert_named(fastattn.merge_attention, ValueError, several)
    assert_named(partial(fastattn.merge_attention, lses=[lse]), TypeError, {"outs": [None, [out * 1j]]})
    assert_named(partial(fastattn.merge_attention, [out]), TypeError, {"lses": [3, [lse.astype("U1")]]})


def test_generators_are_refused():
    pieces = [np.zeros((2, 3, 4))]
    with pytest.raises(TypeError, match=r"^outs must be a sequence of arrays, got <generator"):
        fastattn.merge_attention((piece for piece in pieces), [piece[..., 0] for piece in pieces])
