"""Mask objects: what they allow, and how `&`, `|` and `~` combine them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from fastattn.masks import Causal, Dense, GlobalTokens, KeyLengths, Segments, Window
from tests.cases import mask_pairs, random_arrays
from tests.conftest import drawn
from tests.tolerances import assert_attention

FUNCTION = (
    "got a function: fastattn.create_block_mask makes a mask of it, "
    "and fastattn.flex_attention takes it as mask_mod="
)


def test_two_leading_axes(engine):
    rng = np.random.default_rng(0)
    arrays = random_arrays(lead=(2, 3), heads=2)
    lengths, offsets = rng.integers(0, 34, (2, 3)), rng.integers(0, 20, (3,))
    ids_q, ids_k = rng.integers(0, 3, (2, 1, 17)), rng.integers(0, 3, (3, 33))
    i, j = np.arange(17)[:, None], np.arange(33)
    for mask, allowed in [
        (KeyLengths(lengths), j < lengths[..., None, None, None]),
        (Causal(offset=offsets), j <= i + offsets[:, None, None, None]),
        (Segments(ids_q, ids_k), ids_q[..., None, :, None] == ids_k[..., None, None, :]),
        (KeyLengths(lengths) | Causal(offset=offsets), None),
    ]:
        if allowed is None:
            allowed = (j < lengths[..., None, None, None]) | (j <= i + offsets[:, None, None, None])
        assert_attention(engine.everything(*arrays, mask=mask), *arrays, mask=allowed)


class TestDefinitions:
    """The cases where a definition is easy to get wrong."""

    def test_causal_without_alignment_is_for_squares(self):
        np.testing.assert_array_equal(Causal().materialize(1, 4, 4)[0], np.tri(4, dtype=bool))

    def test_segments_of_one_set_of_ids(self):
        ids = np.array([3, -1, 3, 7])
        np.testing.assert_array_equal(Segments(ids).materialize(1, 4, 4)[0], ids[:, None] == ids)

    def test_segments_absent_among_keys_allow_nothing(self):
        got = Segments([0, 5, 1], [0, 0, 1, 1]).materialize(1, 3, 4)[0]
        np.testing.assert_array_equal(got, [[1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1]])

    def test_bottom_right_is_aligned_to_the_last_key(self):
        assert Causal("bottom_right").materialize(1, 2, 5)[0].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
        assert Causal("bottom_right").materialize(1, 3, 2)[0].tolist() == [[0, 0], [1, 0], [1, 1]]

    def test_window_defaults_to_bottom_right(self):
        np.testing.assert_array_equal(
            Window(1, 0).materialize(1, 2, 5), Window(1, 0, align="bottom_right").materialize(1, 2, 5)
        )
        assert Window(1, 0).materialize(1, 2, 5)[0].tolist() == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]

    def test_huge_numbers_do_not_wrap_around(self):
        most = np.iinfo(np.int64).max
        everything, nothing = np.ones((1, 3, 4), bool), np.zeros((1, 3, 4), bool)
        np.testing.assert_array_equal(Window(most, most).materialize(1, 3, 4), everything)
        np.testing.assert_array_equal(Window(2**70, 2**70).materialize(1, 3, 4), everything)
        np.testing.assert_array_equal(Causal(offset=most).materialize(1, 3, 4), everything)
        np.testing.assert_array_equal(Causal(offset=-most).materialize(1, 3, 4), nothing)

    def test_global_tokens_see_and_are_seen(self):
        got = GlobalTokens([1]).materialize(1, 3, 4)[0]
        # Query i stands at key i + 1, so query 0 is the global token.
        np.testing.assert_array_equal(got, [[1, 1, 1, 1], [0, 1, 0, 0], [0, 1, 0, 0]])

    def test_dense_takes_any_integer_as_its_truth(self):
        array = np.array([[0, 256], [-1, 2**40]])
        np.testing.assert_array_equal(Dense(array).materialize(1, 2, 2)[0], array != 0)


class TestAlgebra:
    """`&` intersects, `|` unites and `~` complements, however they are nested."""

    @drawn(30, 200, data=st.data())
    def test_any_expression(self, data):
        sizes = data.draw(st.sampled_from([(5, 9), (9, 5), (6, 6), (70, 140)]))
        leaves = mask_pairs(2, 2, *sizes, seed=data.draw(st.integers(0, 5)))
        mask, allowed = self.expression(data, leaves, depth=3)
        got = np.broadcast_to(mask.materialize(2, *sizes), allowed.shape)
        np.testing.assert_array_equal(got, allowed)

    def expression(self, data, leaves, depth):
        kind = data.draw(st.sampled_from(["leaf", "and", "or", "not"])) if depth else "leaf"
        if kind == "leaf":
            pair = data.draw(st.sampled_from(leaves))
            return pair.mask, pair.allowed
        if kind == "not":
            mask, allowed = self.expression(data, leaves, depth - 1)
            return ~mask, ~allowed
        left, right = (self.expression(data, leaves, depth - 1) for _ in range(2))
        if kind == "and":
            return left[0] & right[0], left[1] & right[1]
        return left[0] | right[0], left[1] | right[1]

    @pytest.mark.parametrize(
        ("other", "words"),
        [
            (3, "got int"),
            ("x", "got str"),
            (np.ones((3, 3), bool), "got ndarray: make a mask of it, Dense(array)"),
            ([[True]], "got list: make a mask of it, Dense(array)"),
            (None, "got None: leave it out, or say Window(None, None), which allows every key"),
            (Window, "got the class Window: make a mask of it, Window(...)"),
            (int, "got the class int"),
            (lambda b, h, i, j: True, FUNCTION),
        ],
        ids=lambda item: item if isinstance(item, str) else "",
    )
    def test_only_masks_combine(self, other, words):
        for sign, combine in [
            ("&", lambda: Causal() & other),
            ("|", lambda: Causal() | other),
            ("&", lambda: other & Causal()),
            ("|", lambda: other | Causal()),
        ]:
            with pytest.raises(TypeError) as caught:
                combine()
            assert str(caught.value) == f"{sign} combines two masks, {words}"

    @pytest.mark.parametrize(
        "combine",
        [
            lambda: Causal() and Window(1, 1),
            lambda: Causal() or Window(1, 1),
            lambda: not Causal(),
            lambda: bool(Causal()),
        ],
        ids=["and", "or", "not", "bool"],
    )
    def test_a_mask_has_no_truth_value(self, combine):
        """`and` would answer with the second mask alone, without a word."""
        with pytest.raises(TypeError) as caught:
            combine()
        assert str(caught.value) == (
            "mask Causal() has no truth value, so `and`, `or` and `not` do not combine masks: "
            "use & (both), | (either) and ~ (not)"
        )

    def test_twice_not_is_the_mask_itself(self):
        causal = Causal()
        assert ~~causal is causal

    def test_operands_are_left_alone(self):
        window, causal = Window(2, 2), Causal("top_left")
        before = window.materialize(1, 5, 9).copy()
        _ = (window & causal) | window
        np.testing.assert_array_equal(window.materialize(1, 5, 9), before)
