"""Masks are values: frozen, compared and hashed by what they hold, printed in full, nested at will."""

from __future__ import annotations

import copy
import operator
import pickle

import numpy as np
import pytest

from fastattn import masks
from fastattn.masks import (
    BlockMask,
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
from tests.fake_gpu import FakeArray


class TestObjects:
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
            NotSelf(),
            Neighborhood(4, 3),
            Neighborhood((2, 2), (2, 1), dilation=(1, 2), causal=(True, False)),
            NotSelf().shifted(1, 0),
            Window(1, 0).shifted(2, 1, size=(9, 8)),
            ~(Causal() | Window(1, 0)).shifted(2, 1, size=(8, 8)),
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
        NotSelf(),
        Neighborhood(4, 2),
        Neighborhood(4, 3),
        Neighborhood(4, 2, dilation=2),
        Neighborhood(4, 2, causal=True),
        Neighborhood((2, 2), 2),
        Neighborhood((2, 2), (2, 2)),
        Neighborhood((2, 2), (2, 2), causal=(False, True)),
        NotSelf().shifted(0, 0),
        NotSelf().shifted(0, 1),
        NotSelf().shifted(1, 0),
        NotSelf().shifted(1, 0, size=(8, 8)),
        (NotSelf() & Causal()).shifted(1, 0),
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
    tiles = base.lower(mask, (1,), 1, 70, 70).mask_map
    return BlockMask(
        base.lower(mask | mask, (1,), 1, 70, 70).mask_map if tiles is None else tiles, 1, 1, 70, 70
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
