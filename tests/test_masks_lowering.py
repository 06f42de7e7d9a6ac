"""What masks lower to, intervals or tiles, and what that costs."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from fastattn.masks import (
    Causal,
    Dense,
    GlobalTokens,
    KeyLengths,
    NotSelf,
    PrefixLM,
    Segments,
    Window,
    base,
)
from fastattn.masks.map import INDEX_EMPTY, INDEX_FULL, TILE_K, TILE_Q
from tests.cases import mask_pair

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
    "shifted_window",
    "shifted_and_per_item",
    "not_not_self",
    "neighborhood_line",
    "not_causal",
    "not_causal_per_item",
    "not_key_lengths",
    "not_window_right_open",
    "not_and_nothing",
    "not_or_intervals",
]


class TestLowering:
    @pytest.mark.parametrize("name", INTERVAL_MASKS)
    @pytest.mark.parametrize("sizes", [(5, 9), (300, 200), (200, 300)], ids=str)
    def test_these_are_intervals_alone(self, name, sizes):
        pair = mask_pair(name, 2, 3, *sizes)
        lowered = base.lower(pair.mask, (2,), 3, *sizes)
        assert lowered.mask_map is None
        assert lowered.dense is None
        start, stop = lowered.key_start, lowered.key_stop
        assert start.dtype == stop.dtype == np.int64
        assert start.shape == stop.shape == (2, sizes[0])
        assert ((start >= 0) & (start <= stop) & (stop <= sizes[1])).all()
        key = np.arange(sizes[1])
        inside = (start[..., None] <= key) & (key < stop[..., None])
        np.testing.assert_array_equal(np.broadcast_to(inside[:, None], pair.allowed.shape), pair.allowed)

    @pytest.mark.parametrize(
        "name",
        [
            "or_intervals",
            "or_dense",
            "segments_any_order",
            "global_tokens",
            "longformer",
            "not_window",
            "not_self",
            "or_not_self",
            "shifted_not_self",
            "neighborhood_image",
            "neighborhood_video",
            "not_neighborhood",
            "not_segments",
            "not_and",
            "not_longformer",
        ],
    )
    @pytest.mark.parametrize("sizes", [(64, 128), (65, 129), (300, 700), (700, 300)], ids=str)
    def test_tiles_are_classed_exactly(self, name, sizes):
        """Empty where nothing is allowed, full where everything is, and bits for nothing else."""
        pair = mask_pair(name, 2, 3, *sizes)
        tiles = base.lower(pair.mask, (2,), 3, *sizes).mask_map
        for (b, h, t, u), index in np.ndenumerate(tiles.index):
            tile = pair.allowed[b, h, t * TILE_Q : (t + 1) * TILE_Q, u * TILE_K : (u + 1) * TILE_K]
            expected = INDEX_FULL if tile.all() else "bits" if tile.any() else INDEX_EMPTY
            assert (index if index < 0 else "bits") == expected, f"tile {(b, h, t, u)}"

    def test_planes_that_are_alike_share_their_bits(self):
        mask = Window(3, 2) | GlobalTokens([0])
        alone = base.lower(mask, (), 1, 300, 300).mask_map
        many = base.lower(mask, (7,), 5, 300, 300).mask_map
        assert many.index.shape[:2] == (7, 5)
        assert many.bits.shape == alone.bits.shape
        assert many.index.strides[:2] == (0, 0)

    def test_bits_past_the_end_are_zero(self):
        tiles = base.lower(Window(None, None) | Causal("top_left"), (), 1, 65, 129).mask_map
        assert (tiles.index == INDEX_FULL).all()
        # Two queries and one key reach into the last tile, and only the second of them sees the key.
        tiles = base.lower(Window(0, 0) | GlobalTokens([0]), (), 1, TILE_Q + 2, TILE_K + 1).mask_map
        assert tiles.index[0, 1, 1] >= 0
        corner = np.unpackbits(tiles.bits[tiles.index[0, 1, 1]].view(np.uint8))
        assert corner.sum() == 1

    def test_parts_of_a_complement_keep_their_forms(self):
        """Not (not array, or causal) is the array and an interval, as kernels stream them without a copy."""
        array = np.ones((300, 200), bool)
        lowered = base.lower(~(~Dense(array) | Causal("top_left")), (), 3, 300, 200)
        assert np.shares_memory(lowered.dense, array)
        assert lowered.mask_map is None
        np.testing.assert_array_equal(lowered.key_start, np.minimum(np.arange(300) + 1, 200))

    def test_a_lone_array_is_not_copied(self):
        array = np.ones((300, 200), bool)
        lowered = base.lower(Dense(array), (2,), 3, 300, 200)
        assert np.shares_memory(lowered.dense, array)
        assert lowered.mask_map is None


class TestMemory:
    """Lowering costs what the PARTIAL tiles cost, not what the scores would."""

    LENGTH = 32768

    def peak(self, mask):
        tracemalloc.start()
        lowered = base.lower(mask, (), 1, self.LENGTH, self.LENGTH)
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

    def test_leave_one_out(self):
        """Bits for the tiles on the diagonal, and none for the others."""
        peak, lowered = self.peak(NotSelf())
        assert len(lowered.mask_map.bits) == self.LENGTH // TILE_Q
        assert peak < self.LENGTH**2 // 8 // 16, f"{peak} bytes"

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
