"""`Mask.shifted`: the mask of a block of a problem says of it what the whole mask does."""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest

import fastattn
from fastattn.masks import (
    Causal,
    Dense,
    GlobalTokens,
    KeyLengths,
    Neighborhood,
    NotSelf,
    PrefixLM,
    Segments,
    Window,
    base,
)
from fastattn.masks.map import FULL, TILE_K, TILE_Q, UNBOUNDED, Band
from tests.cases import mask_pair, random_arrays
from tests.fake_gpu import FakeArray
from tests.masks_as_arrays import BLOCKS, block_mask, part_of, parts_of
from tests.refusals import assert_named
from tests.test_masks_lowering import INTERVAL_MASKS

BATCH, HEADS = 2, 2
CASES = [(whole, block) for whole, blocks in BLOCKS.items() for block in blocks]


@pytest.mark.parametrize(("whole", "block"), CASES, ids=str)
@pytest.mark.parametrize("name", ["dense", "dense_integer_per_head", "segments_any_order", "window"])
def test_a_block_of_a_map_of_tiles(name, whole, block):
    pair = mask_pair(name, BATCH, HEADS, *whole)
    part = block_mask(pair.allowed).shifted(*block[:2])
    got = part.materialize(HEADS, *block[2:])
    np.testing.assert_array_equal(got, part_of(pair.allowed, block))


@pytest.mark.slow
def test_a_map_of_tiles_at_every_bit():
    allowed = np.random.default_rng(0).random((BATCH, HEADS, 70, 400)) < 0.5
    mask = block_mask(allowed)
    for key in range(0, 270):
        got = mask.shifted(key % 5, key).materialize(HEADS, 65, 130)
        np.testing.assert_array_equal(got, part_of(allowed, (key % 5, key, 65, 130)))


def test_tiles_of_a_map_that_agree_need_no_bits():
    allowed = np.zeros((BATCH, HEADS, 4 * TILE_Q, 4 * TILE_K), bool)
    allowed[..., 2 * TILE_K :] = True
    allowed[..., :TILE_K, 0] = True  # two intervals in some rows, so that there are tiles
    part = block_mask(allowed).shifted(5, TILE_K + 7)
    lowered = base.lower(part, (BATCH,), HEADS, 2 * TILE_Q, 2 * TILE_K)
    assert lowered.mask_map.index[0, 0].tolist() == [[0, -1], [1, -1]]


@pytest.mark.parametrize(
    "mask",
    [
        Causal(),
        Causal("top_left"),
        Causal(offset=[3, -4]),
        Window(2, 3, align="top_left"),
        KeyLengths([3, 30]),
        Segments(np.arange(30) // 7),
        Dense(np.random.default_rng(0).random((30, 30)) < 0.5),
        Dense(np.random.default_rng(0).random(30) < 0.5),
        Dense(np.random.default_rng(0).random((30, 1)) < 0.5),
        NotSelf(),
        Neighborhood(30, 4),
        Neighborhood((5, 6), 3, dilation=(1, 2)),
        ~(NotSelf() & Window(None, 4, align="top_left")) | KeyLengths(3),
    ],
    ids=repr,
)
def test_without_the_size_of_the_problem(mask):
    """That of a mask which no end of the problem matters to, or whose array knows it."""
    whole = np.broadcast_to(mask.materialize(1, 30, 30), (2, 1, 30, 30))
    got = mask.shifted(4, 9).materialize(1, 11, 13)
    np.testing.assert_array_equal(np.broadcast_to(got, (2, 1, 11, 13)), whole[..., 4:15, 9:22])


class TestParts:
    """A part of a problem along all axes, as `fastattn.integrations.dask` divides one."""

    @pytest.mark.parametrize("name", INTERVAL_MASKS)
    def test_intervals_are_known_to_be_full(self, name):
        states_of_keys = pytest.importorskip("fastattn.integrations.dask")._states_of_keys
        pair = mask_pair(name, BATCH, HEADS, 200, 300)
        for part, blocks in parts_of((200, 300), 30):
            for keys, state in zip(blocks, states_of_keys(pair.mask, part, blocks), strict=True):
                wanted = pair.allowed[part.items[0], part.heads, part.queries, keys]
                assert (state == FULL) == wanted.all()

    @pytest.mark.parametrize("at_end", [False, True])
    @pytest.mark.parametrize("lengths", [None, [3, 9], [0, 1]])
    def test_bands(self, lengths, at_end):
        of_band = pytest.importorskip("fastattn.integrations.dask")._of_band
        lengths = None if lengths is None else np.array(lengths)
        for left, right in product([0, 1, 4, UNBOUNDED], repeat=2):
            band = Band(left, right, at_end, lengths)
            inside = band.intervals(7, 9)
            key = np.arange(9)
            wanted = (inside.start[..., None] <= key) & (key < inside.stop[..., None])
            mask = of_band(band, 7, 9)
            got = np.ones((1, 7, 9), bool) if mask is None else mask.materialize(1, 7, 9)
            np.testing.assert_array_equal(*np.broadcast_arrays(got[..., 0, :, :], wanted))


def test_offsets_beyond_int64_do_not_wrap_around():
    far = 2**60 - 1
    assert Causal(offset=2**63 - 1).shifted(0, far).materialize(1, 3, 4).all()
    assert not Causal(offset=-(2**63)).shifted(far, 0).materialize(1, 3, 4).any()
    assert Causal().shifted(far, 0).materialize(1, 3, 4).all()
    assert not Causal().shifted(0, far).materialize(1, 3, 4).any()
    np.testing.assert_array_equal(
        NotSelf().shifted(far, far).materialize(1, 3, 4), NotSelf().materialize(1, 3, 4)
    )
    assert Window(2**70, 2**70, "top_left").shifted(far, 0).materialize(1, 3, 4).all()
    assert Window(None, None, "top_left").shifted(0, far).materialize(1, 3, 4).all()
    image = Neighborhood((2**20, 2**39), (3, 2), dilation=(2**18, 2**37))  # a row and a column away, by that
    part = image.shifted(2**58, 2**57 + 2**37).materialize(1, 3, 4)
    np.testing.assert_array_equal(part[0], np.eye(3, 4, dtype=bool))
    assert not KeyLengths(5).shifted(0, far).materialize(1, 3, 4).any()


class TestCost:
    @pytest.mark.parametrize("name", INTERVAL_MASKS)
    def test_intervals_stay_intervals(self, name):
        pair = mask_pair(name, BATCH, HEADS, 200, 300)
        lowered = base.lower(pair.mask.shifted(30, 40, size=(200, 300)), (BATCH,), HEADS, 100, 150)
        assert lowered.mask_map is None
        assert lowered.dense is None

    def test_an_array_is_a_view(self):
        array = np.ones((300, 200), bool)
        lowered = base.lower(Dense(array).shifted(10, 20), (2,), 3, 100, 150)
        assert np.shares_memory(lowered.dense, array)

    def test_what_is_written_into_an_array_is_seen(self):
        array = np.zeros((30, 20), bool)
        part = Dense(array).shifted(10, 5)
        assert not part._is_frozen
        array[10, 5] = True
        assert part.materialize(1, 3, 4).sum() == 1

    def test_an_array_on_a_gpu_stays_there(self):
        array = np.random.default_rng(0).random((2, 30, 20)) < 0.5
        fake = FakeArray(array)
        lowered = base.lower(Dense(fake).shifted(10, 5), (), 2, 7, 11)
        expected = array[:, 10:17, 5:16]
        assert lowered.dense.shape == expected.shape
        assert lowered.dense.strides == expected.strides
        whole = Dense(fake).array.memory.address
        assert lowered.dense.memory.address - whole == expected.ctypes.data - array.ctypes.data


@pytest.mark.parametrize(
    "name", ["causal_bottom_right", "longformer", "dense", "segments_any_order_per_item"]
)
def test_blocks_of_keys_and_queries_are_the_whole(backend, name):
    arrays = random_arrays(lead=(BATCH,), heads=HEADS, len_q=150, len_k=140, dtype="float64")
    mask = mask_pair(name, BATCH, HEADS, 150, 140).mask
    exact, exact_lse = backend.attention(*arrays, mask=mask, return_lse=True)
    query, key, value = arrays
    for first, last in pairwise((0, 61, 150)):
        pieces = []
        for start, stop in pairwise((0, 33, 128, 140)):
            part = mask.shifted(first, start, size=(150, 140))
            rows, keys = np.s_[..., first:last, :], np.s_[..., start:stop, :]
            pieces.append(backend.attention(query[rows], key[keys], value[keys], mask=part, return_lse=True))
        out, lse = fastattn.merge_attention(*zip(*pieces, strict=True))
        np.testing.assert_allclose(out, exact[..., first:last, :], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(lse, exact_lse[..., first:last], rtol=1e-12, atol=1e-14)


class TestAlgebra:
    def test_each_part_of_a_combined_mask_is_shifted(self):
        a, b = NotSelf(), Window(2, 2, "top_left")
        assert (a & b).shifted(1, 2) == a.shifted(1, 2) & b.shifted(1, 2)
        assert (a | b).shifted(1, 2) == a.shifted(1, 2) | b.shifted(1, 2)
        assert (~a).shifted(1, 2) == ~a.shifted(1, 2)

    def test_offsets_add_up(self):
        assert NotSelf().shifted(1, 2).shifted(3, 4) == NotSelf().shifted(4, 6)
        part = Window(2, 2).shifted(1, 2, size=(20, 30))
        assert part.shifted(3, 4) == Window(2, 2).shifted(4, 6, size=(20, 30))

    def test_no_depth(self):
        """As blocks of blocks are blocks of the whole."""
        mask = Window(2, 2, "top_left") & ~NotSelf()
        for _ in range(2000):
            mask = mask.shifted(1, 1)
        assert mask == (Window(2, 2, "top_left") & ~NotSelf()).shifted(2000, 2000)


class TestRefused:
    @pytest.mark.parametrize(
        "mask", [Causal("bottom_right"), Window(1, 1), PrefixLM(3), GlobalTokens([1])], ids=repr
    )
    def test_no_size(self, mask):
        for whole in (mask, mask & NotSelf(), ~(mask | NotSelf())):
            with pytest.raises(ValueError, match="shifted needs its size=") as caught:
                whole.shifted(1, 1)
            assert str(caught.value).startswith(f"mask {mask!r} is aligned to the end")

    def test_offsets_and_sizes(self):
        shifted = partial(NotSelf().shifted, k_offset=0)
        assert_named(shifted, ValueError, {"q_offset": [-1, 2**60]})
        assert_named(shifted, TypeError, {"q_offset": [1.0, True]})
        assert_named(partial(NotSelf().shifted, 0), ValueError, {"k_offset": [2**60]})
        assert_named(partial(NotSelf().shifted, 0, 0), TypeError, {"size": [3]})
        assert_named(partial(NotSelf().shifted, 0, 0), ValueError, {"size": [(3,), (3, -1)]})
        with pytest.raises(ValueError, match=r"below 2\*\*60"):
            NotSelf().shifted(2**59, 0).shifted(2**59, 0)

    def test_a_block_that_is_not_there(self):
        """The message has the mask, or its shape, and the sizes that it is of."""
        of_map = block_mask(np.ones((2, 2, 28, 28), bool))
        for mask, whole, sizes in [
            (Window(1, 1), (16, 40), "16 40"),
            (Dense(np.ones((20, 28), bool)), None, "20 28"),
            (Segments(np.zeros(28, int)), None, "28 28"),
            (Segments(np.zeros(40, int)), (41, 41), "40 40"),
            (Dense(np.ones((40, 40), bool)), (41, 41), "40 40"),
            (Causal(), (41, 42), "41 42"),
            (KeyLengths(50), (41, 42), "50 42"),
            (Neighborhood((4, 7), 3), None, "28 28"),
            (Neighborhood((4, 7), 3), (41, 42), "28 28 41 42"),
            (of_map, None, "28 28"),
        ]:
            with pytest.raises(ValueError) as caught:
                base.lower(mask.shifted(10, 20, size=whole), (), 1, 7, 9)
            said = str(caught.value)
            assert said.startswith((f"mask {mask!r}", "mask of shape ")), said
            assert all(re.search(rf"\b{n}\b", said) for n in sizes.split()), said
