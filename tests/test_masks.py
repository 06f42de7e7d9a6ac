"""Mask objects: what they allow, how they combine, what they lower to, what they cost."""

from __future__ import annotations

import copy
import dataclasses
import operator
import pickle
import tracemalloc
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastattn
from fastattn import masks
from fastattn._mask_map import INDEX_EMPTY, INDEX_FULL, TILE_K, TILE_Q
from fastattn.masks import (
    BlockMask,
    Causal,
    Dense,
    GlobalTokens,
    KeyLengths,
    PrefixLM,
    Segments,
    Window,
)
from tests import naive
from tests.cases import MASK_NAMES, mask_pair, mask_pairs, random_arrays
from tests.fake_gpu import FakeArray
from tests.tolerances import assert_answer, assert_attention

SIZES = [
    (1, 1),
    (1, 5),
    (5, 1),
    (4, 4),
    (7, 12),
    (12, 7),
    (64, 128),
    (65, 129),
    (63, 127),
    (130, 260),
    (200, 100),
]

# These cost nothing: one key interval per row, whatever the sizes.
INTERVAL_MASKS = [
    "causal_top_left",
    "causal_bottom_right",
    "causal_offset",
    "causal_offset_negative",
    "causal_offset_per_item",
    "window",
    "window_left_open",
    "window_right_open",
    "window_top_left",
    "key_lengths",
    "segments_sorted",
    "prefix",
    "and_intervals",
    "and_documents_causal",
    "not_causal",
    "not_causal_per_item",
    "not_key_lengths",
    "not_window_right_open",
    "not_and_nothing",
    "not_or_intervals",
]


FUNCTION = (
    "got a function: fastattn.create_block_mask makes a mask of it, "
    "and fastattn.flex_attention takes it as mask_mod="
)


def spread(array, batch, heads, len_q, len_k):
    return np.broadcast_to(array, (batch, heads, len_q, len_k))


@pytest.mark.parametrize("name", MASK_NAMES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_materialize_is_the_definition(name, sizes):
    for seed in range(3):
        pair = mask_pair(name, 2, 3, *sizes, seed)
        got = pair.mask.materialize(3, *sizes)
        assert got.dtype == bool
        assert got.shape[-3:] == (3, *sizes)
        np.testing.assert_array_equal(spread(got, 2, 3, *sizes), pair.allowed)


@pytest.mark.parametrize("sizes", [(0, 0), (0, 5), (5, 0)], ids=str)
def test_materialize_of_nothing(sizes):
    for pair in mask_pairs(2, 3, *sizes):
        assert pair.mask.materialize(3, *sizes).shape[-3:] == (3, *sizes), pair.name


@lru_cache(maxsize=8)  # the engines of a case come one after another
def solve_with_mask(name, sizes):
    heads, kv_heads = (4, 2) if max(sizes) < 64 else (2, 1)  # the definition takes long over many rows
    pair = mask_pair(name, 2, heads, *sizes)
    arrays = random_arrays(
        lead=(2,), heads=heads, kv_heads=kv_heads, len_q=sizes[0], len_k=sizes[1], head_dim=8
    )
    answers = (solve(*arrays, mask=pair.allowed) for solve in (naive.attention, naive.formula))
    return arrays, pair.mask, *answers


@pytest.mark.parametrize("name", MASK_NAMES)
@pytest.mark.parametrize("sizes", [(5, 9), (70, 150), (129, 129), (150, 70)], ids=str)
def test_attention_takes_every_mask(engine, name, sizes):
    arrays, mask, exact, plain = solve_with_mask(name, sizes)
    assert_answer(engine.everything(*arrays, mask=mask), exact, plain)


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

    @given(st.data())
    def test_any_expression(self, data):
        sizes = data.draw(st.sampled_from([(5, 9), (9, 5), (6, 6), (70, 140)]))
        leaves = mask_pairs(2, 2, *sizes, seed=data.draw(st.integers(0, 5)))
        mask, allowed = self.expression(data, leaves, depth=3)
        np.testing.assert_array_equal(spread(mask.materialize(2, *sizes), 2, 2, *sizes), allowed)

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
            (
                np.ones((3, 3), bool),
                "got ndarray: make a mask of it, Dense(array)",
            ),
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
        for pair in mask_pairs(2, 2, 5, 9):
            assert (~~pair.mask) == pair.mask
            assert repr(~~pair.mask) == repr(pair.mask)
        causal = Causal()
        assert ~~causal is causal

    def test_operands_are_left_alone(self):
        window, causal = Window(2, 2), Causal("top_left")
        before = window.materialize(1, 5, 9).copy()
        _ = (window & causal) | window
        np.testing.assert_array_equal(window.materialize(1, 5, 9), before)


class TestLowering:
    @pytest.mark.parametrize("name", INTERVAL_MASKS)
    @pytest.mark.parametrize("sizes", [(5, 9), (300, 200), (200, 300)], ids=str)
    def test_these_are_intervals_alone(self, name, sizes):
        pair = mask_pair(name, 2, 3, *sizes)
        lowered = masks.lower(pair.mask, (2,), 3, *sizes)
        assert lowered.mask_map is None
        assert lowered.dense is None
        start, stop = lowered.key_start, lowered.key_stop
        assert start.dtype == stop.dtype == np.int64
        assert start.shape == stop.shape == (2, sizes[0])
        assert ((start >= 0) & (start <= stop) & (stop <= sizes[1])).all()
        key = np.arange(sizes[1])
        inside = (start[..., None] <= key) & (key < stop[..., None])
        np.testing.assert_array_equal(np.broadcast_to(inside[:, None], pair.allowed.shape), pair.allowed)

    @pytest.mark.parametrize("name", MASK_NAMES)
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_all_parts_together_are_the_mask(self, name, sizes):
        pair = mask_pair(name, 2, 3, *sizes)
        lowered = masks.lower(pair.mask, (2,), 3, *sizes)
        allowed = np.ones((2, 3, *sizes), bool)
        if lowered.key_start is not None:
            key = np.arange(sizes[1])
            inside = (lowered.key_start[..., None] <= key) & (key < lowered.key_stop[..., None])
            allowed &= inside[:, None]
        if lowered.dense is not None:
            allowed &= lowered.dense != 0
        if lowered.mask_map is not None:
            allowed &= self.unpack(lowered.mask_map, 2, 3, *sizes)
        np.testing.assert_array_equal(allowed, pair.allowed)

    @pytest.mark.parametrize(
        "name",
        [
            "or_intervals",
            "or_dense",
            "segments_any_order",
            "global_tokens",
            "longformer",
            "not_window",
            "not_segments",
            "not_and",
            "not_longformer",
        ],
    )
    @pytest.mark.parametrize("sizes", [(64, 128), (65, 129), (300, 700), (700, 300)], ids=str)
    def test_tiles_are_classed_exactly(self, name, sizes):
        """Empty where nothing is allowed, full where everything is, and bits for nothing else."""
        pair = mask_pair(name, 2, 3, *sizes)
        tiles = masks.lower(pair.mask, (2,), 3, *sizes).mask_map
        for (b, h, t, u), index in np.ndenumerate(tiles.index):
            tile = pair.allowed[b, h, t * TILE_Q : (t + 1) * TILE_Q, u * TILE_K : (u + 1) * TILE_K]
            expected = INDEX_FULL if tile.all() else "bits" if tile.any() else INDEX_EMPTY
            assert (index if index < 0 else "bits") == expected, f"tile {(b, h, t, u)}"

    def test_planes_that_are_alike_share_their_bits(self):
        mask = Window(3, 2) | GlobalTokens([0])
        alone = masks.lower(mask, (), 1, 300, 300).mask_map
        many = masks.lower(mask, (7,), 5, 300, 300).mask_map
        assert many.index.shape[:2] == (7, 5)
        assert many.bits.shape == alone.bits.shape
        assert many.index.strides[:2] == (0, 0)

    def test_bits_past_the_end_are_zero(self):
        tiles = masks.lower(Window(None, None) | Causal("top_left"), (), 1, 65, 129).mask_map
        assert (tiles.index == INDEX_FULL).all()
        # Two queries and one key reach into the last tile, and only the second of them sees the key.
        tiles = masks.lower(Window(0, 0) | GlobalTokens([0]), (), 1, TILE_Q + 2, TILE_K + 1).mask_map
        assert tiles.index[0, 1, 1] >= 0
        corner = np.unpackbits(tiles.bits[tiles.index[0, 1, 1]].view(np.uint8))
        assert corner.sum() == 1

    def test_parts_of_a_complement_keep_their_forms(self):
        """Not (not array, or causal) is the array and an interval, as kernels stream them without a copy."""
        array = np.ones((300, 200), bool)
        lowered = masks.lower(~(~Dense(array) | Causal("top_left")), (), 3, 300, 200)
        assert np.shares_memory(lowered.dense, array)
        assert lowered.mask_map is None
        np.testing.assert_array_equal(lowered.key_start, np.minimum(np.arange(300) + 1, 200))

    def test_a_lone_array_is_not_copied(self):
        array = np.ones((300, 200), bool)
        lowered = masks.lower(Dense(array), (2,), 3, 300, 200)
        assert np.shares_memory(lowered.dense, array)
        assert lowered.mask_map is None

    @staticmethod
    def unpack(tiles, batch, heads, len_q, len_k):
        """The bools of a tile map, from its documented format alone."""
        allowed = np.zeros((batch, heads, len_q, len_k), bool)
        bits = np.unpackbits(tiles.bits.astype("<u4").view(np.uint8), axis=-1, bitorder="little").astype(bool)
        for (b, h, t, u), index in np.ndenumerate(tiles.index):
            tile = allowed[b, h, t * TILE_Q : (t + 1) * TILE_Q, u * TILE_K : (u + 1) * TILE_K]
            if index == INDEX_FULL:
                tile[...] = True
            elif index != INDEX_EMPTY:
                tile[...] = bits[index][: tile.shape[0], : tile.shape[1]]
        return allowed


class TestMemory:
    """Lowering costs what the PARTIAL tiles cost, not what the scores would."""

    LENGTH = 32768

    def peak(self, mask):
        tracemalloc.start()
        lowered = masks.lower(mask, (), 1, self.LENGTH, self.LENGTH)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak, lowered

    def test_intervals(self):
        documents = np.repeat(np.arange(64), 512)
        for mask in (
            Causal(),
            Window(256, 0),
            PrefixLM(100),
            Segments(documents) & Causal(),
            KeyLengths(1000),
            ~Causal(),
            ~(KeyLengths(1000) | Causal()),
        ):
            peak, lowered = self.peak(mask)
            assert lowered.mask_map is None
            assert peak < 128 * self.LENGTH, f"{mask}: {peak} bytes"

    @pytest.mark.parametrize("complement", [False, True])
    def test_longformer(self, complement):
        mask = Window(256, 256) | GlobalTokens([0, 5])
        peak, lowered = self.peak(~mask if complement else mask)
        one_bit_per_score = self.LENGTH**2 // 8
        assert lowered.mask_map.bits.nbytes < one_bit_per_score // 16
        assert peak < one_bit_per_score // 4, f"{peak} bytes"

    def test_skipped_tiles_of_an_intersection_need_no_bits(self):
        ids = np.random.default_rng(0).integers(0, 3, self.LENGTH)
        peak, lowered = self.peak(Segments(ids) & Window(256, 0))
        assert lowered.mask_map.bits.nbytes < self.LENGTH**2 // 8 // 16
        assert peak < self.LENGTH**2 // 8 // 4, f"{peak} bytes"


class TestObjects:
    def test_fields_are_frozen(self):
        for pair in mask_pairs(2, 2, 5, 9):
            field = dataclasses.fields(pair.mask)[0].name
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(pair.mask, field, 1)

    def test_arrays_given_are_copied_except_dense(self):
        for build in (KeyLengths, PrefixLM, lambda array: Causal(offset=array), lambda a: Segments(a, a)):
            numbers = np.array([1, 2, 3])
            mask = build(numbers)
            before = mask.materialize(1, 3, 3)
            numbers[...] = 0
            np.testing.assert_array_equal(mask.materialize(1, 3, 3), before)

    @pytest.mark.parametrize(
        "mask",
        [
            Causal(),
            Causal("bottom_right"),
            Causal(offset=2),
            Causal(offset=[1, 2]),
            Window(3, None),
            Window(3, 1, "top_left"),
            KeyLengths([1, 2]),
            KeyLengths(4),
            Segments([0, 0, 1, 1]),
            Segments([0, 0, 1, 1], [1, 1, 0, 0]),
            PrefixLM([2, 3]),
            GlobalTokens([0, 2]),
            Window(1, 1) | GlobalTokens([0]),
            (Window(1, 1) | Causal()) & KeyLengths([3, 4]),
            Window(1, 1) | (Causal() & KeyLengths([3, 4])),
            ~Causal(),
            ~(Window(1, 1) | Causal()),
            ~(Window(1, 1) & Causal()) & ~KeyLengths([3, 4]),
        ],
        ids=repr,
    )
    def test_repr_says_it_all(self, mask):
        again = eval(repr(mask), vars(masks).copy())
        assert again == mask
        np.testing.assert_array_equal(again.materialize(2, 4, 4), mask.materialize(2, 4, 4))

    def test_repr_of_large_arrays_is_short(self):
        for mask in (
            Dense(np.ones((500, 500), bool)),
            Segments(np.zeros(10_000, int)),
            KeyLengths([3] * 1000),
        ):
            assert len(repr(mask)) < 100
            assert type(mask).__name__ in repr(mask)


def equal_masks():
    """Masks that are all different, each built anew by every call."""
    ids, dense = np.array([0, 0, 1, 1]), np.tri(4, dtype=bool)
    return [
        Causal(),
        Causal("top_left"),
        Causal("bottom_right"),
        Causal(offset=0),
        Causal(offset=[0, 0]),
        Causal(offset=[0, 1]),
        Window(1, 1),
        Window(1, None),
        Window(1, 1, "top_left"),
        KeyLengths(3),
        KeyLengths([3]),
        KeyLengths(np.r_[np.full(20, 3), 4]),
        KeyLengths(np.r_[np.full(20, 3), 5]),
        PrefixLM(3),
        Segments(ids),
        Segments(ids, ids),
        GlobalTokens([0, 1]),
        Dense(dense),
        Dense(~dense),
        Dense(dense[None]),
        Dense(FakeArray(DENSE_ON_GPU)),
        Dense(FakeArray(DENSE_ON_GPU[:2])),
        Dense(FakeArray(DENSE_ON_GPU, device=1)),
        block_mask(Causal()),
        block_mask(Window(1, 1)),
        Causal() & Window(1, 1),
        Window(1, 1) & Causal(),
        Causal() | Window(1, 1),
        Causal() & Window(1, 1) & KeyLengths(3),
        ~Causal(),
        ~(Causal() & Window(1, 1)),
    ]


DENSE_ON_GPU = np.ones((4, 4), bool)


def block_mask(mask):
    tiles = masks.lower(mask, (1,), 1, 70, 70).mask_map
    return BlockMask(
        masks.lower(mask | mask, (1,), 1, 70, 70).mask_map if tiles is None else tiles, 1, 1, 70, 70
    )


class TestEquality:
    def test_by_value(self):
        for n, mask in enumerate(equal_masks()):
            for m, other in enumerate(equal_masks()):
                assert (mask == other) is (n == m), f"{mask!r} and {other!r}"
                assert (mask != other) is (n != m)
                assert n != m or hash(mask) == hash(other)

    def test_masks_are_keys_of_a_dict(self):
        places = {mask: n for n, mask in enumerate(equal_masks())}
        assert [places[mask] for mask in equal_masks()] == list(range(len(places)))

    def test_hashes_tell_small_arguments_apart(self):
        """Else a dict of many masks would compare each of them with each."""
        hashes = {hash(Causal(offset=n)) for n in range(100)} | {hash(KeyLengths([n])) for n in range(100)}
        assert len(hashes) > 190

    def test_with_what_is_no_mask(self):
        assert Causal().__eq__(3) is NotImplemented
        for other in (3, None, "Causal()", Causal, np.ones((3, 3), bool)):
            assert (Causal() == other) is False
            assert (other == Causal()) is False
        assert Causal() in [Window(1, 1), Causal()]

    def test_an_array_that_is_written_into(self):
        """A dense mask sees what is written later; so does ==, and its hash does not change."""
        array = np.zeros((3, 3), bool)
        mask, before = Dense(array), Dense(array.copy())
        code = hash(mask)
        assert mask == before
        array[1] = True
        assert mask != before
        assert hash(mask) == code

    def test_a_hash_does_not_read_a_large_array(self):
        """An array of 16 TB: a view, whose elements nobody could read."""
        mask = Dense(np.broadcast_to(np.True_, (2**22, 2**22)))
        assert hash(mask) == hash(Dense(mask.array))
        assert mask == Dense(mask.array)


class TestRefused:
    ALIGN = 'align must be "top_left" or "bottom_right", got '
    DENSE = "mask must be a fastattn.masks object or a bool or integer array, got dtype "
    LEAD = "of shape (3,) does not broadcast to the leading batch axes (2,)"
    SCORES = "does not broadcast to (..., H, L, S) = (2, 2, 17, 33)"

    @pytest.mark.parametrize(
        ("build", "error", "said"),
        [
            (lambda: Causal("left"), ValueError, ALIGN + "'left'"),
            (lambda: Causal(True), ValueError, ALIGN + "True"),
            (
                lambda: Causal("top_left", 3),
                ValueError,
                "Causal takes align or offset, not both; got align='top_left', offset=3",
            ),
            (lambda: Causal(offset=1.5), TypeError, "Causal: offset must be integers, got dtype float64"),
            (
                lambda: Window(-1, 0),
                ValueError,
                "Window: left must be a non-negative integer or None, got -1",
            ),
            (
                lambda: Window(0, -2),
                ValueError,
                "Window: right must be a non-negative integer or None, got -2",
            ),
            (
                lambda: Window(1.0, 0),
                TypeError,
                "Window: left must be a non-negative integer or None, got 1.0",
            ),
            (lambda: Window(0, 0, "middle"), ValueError, ALIGN + "'middle'"),
            (lambda: KeyLengths(-1), ValueError, "KeyLengths: lengths must not be below 0, got -1"),
            (lambda: KeyLengths([1.5]), TypeError, "KeyLengths: lengths must be integers, got dtype float64"),
            (
                lambda: Segments(3),
                ValueError,
                "Segments: q_ids must have shape (..., length), got a single number",
            ),
            (lambda: Segments([0.5]), TypeError, "Segments: q_ids must be integers, got dtype float64"),
            (lambda: Segments([1], [0.5]), TypeError, "Segments: k_ids must be integers, got dtype float64"),
            (
                lambda: Segments(np.zeros((2, 3), int), np.zeros((3, 3), int)),
                ValueError,
                "Segments: the leading axes of q_ids (2, 3) and k_ids (3, 3) do not broadcast",
            ),
            (lambda: PrefixLM(-3), ValueError, "PrefixLM: prefix_lengths must not be below 0, got -3"),
            (lambda: PrefixLM("a"), TypeError, "PrefixLM: prefix_lengths must be integers, got dtype <U1"),
            (lambda: GlobalTokens([-1]), ValueError, "GlobalTokens: index must not be below 0, got -1"),
            (lambda: GlobalTokens(0), ValueError, "GlobalTokens: index must have shape (n,), got ()"),
            (
                lambda: GlobalTokens([0.0]),
                TypeError,
                "GlobalTokens: index must be integers, got dtype float64",
            ),
            (
                lambda: Dense(np.ones((2, 2), np.float32)),
                TypeError,
                DENSE + "float32; for numbers added to the scores use bias=, else .astype(bool)",
            ),
            (lambda: Dense(np.ones((2, 2), complex)), TypeError, DENSE + "complex128"),
            (lambda: Dense([["a"]]), TypeError, DENSE + "<U1"),
        ],
        ids=lambda item: item.rpartition("got ")[2] if isinstance(item, str) else "",
    )
    def test_when_built(self, build, error, said):
        with pytest.raises(error) as caught:
            build()
        assert str(caught.value) == said

    @pytest.mark.parametrize(
        ("mask", "said"),
        [
            (
                Causal(),
                "mask Causal() needs L == S, got L=17 and S=33; "
                'say Causal(align="top_left") or Causal(align="bottom_right")',
            ),
            (Causal(offset=[1, 2, 3]), f"mask Causal(offset=[1, 2, 3]) {LEAD}"),
            (KeyLengths([1, 2, 3]), f"mask KeyLengths(lengths=[1, 2, 3]) {LEAD}"),
            (KeyLengths([1, 34]), "mask KeyLengths(lengths=[1, 34]): lengths must be in 0..S=33, got 34"),
            (PrefixLM([1, 2, 3]), f"mask PrefixLM(prefix_lengths=[1, 2, 3]) {LEAD}"),
            (
                Segments(np.zeros(17, int)),
                "mask Segments(q_ids=<int64 (17,)>) is for L=17 and S=17, got L=17 and S=33",
            ),
            (
                Segments(np.zeros(17, int), np.zeros(32, int)),
                "mask Segments(q_ids=<int64 (17,)>, k_ids=<int64 (32,)>) is for L=17 and S=32, "
                "got L=17 and S=33",
            ),
            (
                Segments(np.zeros((3, 17), int), np.zeros(33, int)),
                f"mask Segments(q_ids=<int64 (3, 17)>, k_ids=<int64 (33,)>) {LEAD}",
            ),
            (Dense(np.ones((17, 32), bool)), f"mask of shape (17, 32) {SCORES}"),
            (Dense(np.ones((1, 2, 2, 17, 33), bool)), f"mask of shape (1, 2, 2, 17, 33) {SCORES}"),
            (
                Window(1, 1) | KeyLengths([1, 34]),
                "mask KeyLengths(lengths=[1, 34]): lengths must be in 0..S=33, got 34",
            ),
        ],
        ids=lambda item: "" if isinstance(item, str) else repr(item)[:40],
    )
    def test_when_it_does_not_fit(self, backend, mask, said):
        arrays = random_arrays(lead=(2,), heads=2)
        with pytest.raises(ValueError) as caught:
            fastattn.attention(*arrays, mask=mask, backend=backend.backend)
        shapes = "; query (2, 2, 17, 16), key (2, 2, 33, 16), value (2, 2, 33, 16)"
        assert str(caught.value) == said + shapes


class TestMaskedArrays:
    """Their mask says what is missing: as an argument they are refused, and so they are inside of a mask."""

    @pytest.mark.parametrize(
        "make",
        [
            masks.Dense,
            masks.KeyLengths,
            masks.PrefixLM,
            masks.GlobalTokens,
            masks.Segments,
            lambda array: masks.Segments([0, 1], array),
            lambda array: masks.Causal(offset=array),
        ],
    )
    def test_in_a_mask(self, make):
        with pytest.raises(TypeError, match="masked array"):
            make(np.ma.masked_array([1, 0], [True, False]))

    def test_among_what_functions_read(self):
        x = np.ones((1, 2, 3, 4), np.float32)
        array = np.ma.masked_array([1.0, 2.0], [True, False])
        with pytest.raises(TypeError, match=r"^aux\[0\] is a masked array"):
            fastattn.flex_attention(x, x, x, score_mod=lambda s, b, h, q, k, a: s * a[h], aux=(array,))


class TestIntegersBeyondInt64:
    @pytest.mark.parametrize("offset", [2**63 - 1, np.uint64(2**63), 2**63, 2**64, 2**100, [2**64]], ids=str)
    def test_an_offset_that_allows_all(self, offset):
        assert masks.Causal(offset=offset).materialize(1, 3, 4).all()
        assert not masks.Causal(offset=-np.array(offset).astype(object)).materialize(1, 3, 4).any()

    def test_a_prefix_and_tokens(self):
        assert masks.PrefixLM(np.uint64(2**64 - 1)).materialize(1, 3, 4).all()
        np.testing.assert_array_equal(
            masks.GlobalTokens([2**64, 1]).materialize(1, 3, 3), masks.GlobalTokens([1]).materialize(1, 3, 3)
        )

    @pytest.mark.parametrize("number", [np.uint64(2**63), 2**64, -(2**64)], ids=str)
    def test_where_no_such_number_has_a_meaning(self, number):
        for make in (masks.KeyLengths, lambda n: masks.Segments(np.array([0, int(n)], object))):
            with pytest.raises(ValueError, match=rf"must be in -2\*\*63\.\.2\*\*63 - 1, got {number}"):
                make(number)

    def test_objects_are_no_integers(self):
        with pytest.raises(TypeError, match="object"):
            masks.KeyLengths(np.array([1, 2], object))


class TestDepth:
    @pytest.mark.parametrize("combine", [operator.and_, operator.or_])
    def test_thousands_side_by_side(self, combine):
        mask = masks.Window(2, 2)
        for _ in range(3000):
            mask = combine(mask, masks.Window(2, 2))
        np.testing.assert_array_equal(mask.materialize(1, 4, 6), masks.Window(2, 2).materialize(1, 4, 6))
        assert len(repr(mask)) > 3000

    def test_thousands_inside_each_other(self):
        mask, count = masks.Window(2, 2), 0
        with pytest.raises(ValueError, match="100 deep"):
            for count in range(5000):  # noqa: B007
                mask = ~((mask | masks.Window(0, 0)) & masks.Window(2, 2))
        assert 30 <= count <= 34

    def test_the_deepest(self, backend):
        """Is used, compared, printed, copied and pickled by a caller that nests calls itself."""
        mask = masks.Window(2, 2)
        for _ in range(50):
            mask = (mask | masks.Window(0, 0)) & masks.Window(2, 2)
        x = np.random.default_rng(0).standard_normal((1, 1, 70, 4)).astype(np.float32)
        np.testing.assert_allclose(
            backend.attention(x, x, x, mask=mask),
            backend.attention(x, x, x, mask=masks.Window(2, 2)),
            rtol=1e-5,
        )
        assert pickle.loads(pickle.dumps(mask)) == copy.deepcopy(mask) == mask
        assert hash(mask) == hash(copy.deepcopy(mask))
        assert repr(mask).count("Window") == 101
