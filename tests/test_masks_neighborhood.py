"""`masks.Neighborhood`: NATTEN's windows in one to three dimensions, and what they cost."""

from __future__ import annotations

import tracemalloc
from math import prod

import numpy as np
import pytest

from fastattn.masks import Causal, Neighborhood, Window, base
from fastattn.masks.map import INDEX_EMPTY, TILE_K, TILE_Q, Neighbors
from tests import naive
from tests.cases import random_arrays
from tests.conftest import computes_gradients
from tests.masks_as_arrays import as_array
from tests.test_backward import check
from tests.tolerances import assert_attention


def allowed_by(shape, kernel, dilation, causal):
    """A mask as an array, for the numbers of queries and keys that it is for."""
    n_tokens = prod(shape)
    mask = Neighborhood(shape, kernel, dilation=dilation, causal=causal)
    return mask.materialize(1, n_tokens, n_tokens)[0]


class TestDefinition:
    @pytest.mark.parametrize("causal", [False, True])
    def test_every_axis_of_few_tokens(self, causal):
        """Odd and even kernels, groups of two lengths, and windows that are whole."""
        for size in range(1, 15):
            for dilation in range(1, size + 1):
                for kernel in range(1, size // dilation + 1):
                    rule = (size,), (kernel,), (dilation,), (causal,)
                    np.testing.assert_array_equal(allowed_by(*rule), naive.neighborhood(*rule), str(rule))

    @pytest.mark.parametrize("seed", range(60))
    def test_any_layout(self, seed):
        """Rows that tiles do not end with, and tiles that have many rows."""
        rng = np.random.default_rng(seed)
        shape = tuple(rng.integers(1, ((600,), (25, 25), (9, 9, 9))[seed % 3]).tolist())
        dilation = tuple(int(rng.integers(1, n + 1)) if rng.random() < 0.5 else 1 for n in shape)
        kernel = tuple(int(rng.integers(1, n // d + 1)) for n, d in zip(shape, dilation, strict=True))
        rule = shape, kernel, dilation, tuple((rng.random(len(shape)) < 0.4).tolist())
        np.testing.assert_array_equal(allowed_by(*rule), naive.neighborhood(*rule), str(rule))

    def test_each_token_has_the_same_number_of_neighbors(self):
        for shape, kernel, dilation in [((40,), 7, 3), ((9, 14), (4, 5), (2, 1)), ((5, 6, 7), 3, (1, 2, 2))]:
            n_tokens = prod(shape)
            counts = Neighborhood(shape, kernel, dilation=dilation).materialize(1, n_tokens, n_tokens).sum(-1)
            assert (counts == np.prod(np.broadcast_to(kernel, len(shape)))).all()

    def test_along_causal_axes_there_are_fewer_at_the_start(self):
        counts = Neighborhood((6, 7), 3, causal=(True, False)).materialize(1, 42, 42).sum(-1).reshape(6, 7)
        np.testing.assert_array_equal(counts, np.repeat([[3], [6], [9], [9], [9], [9]], 7, axis=1))

    def test_one_for_all_axes_is_one_for_each(self):
        one = Neighborhood((6, 8, 4), 2, dilation=2, causal=True)
        each = Neighborhood([6, 8, 4], np.array([2, 2, 2]), dilation=(2, 2, 2), causal=[True] * 3)
        np.testing.assert_array_equal(one.materialize(1, 192, 192), each.materialize(1, 192, 192))

    def test_a_window_far_from_both_ends(self):
        got = Neighborhood(100, 8).materialize(1, 100, 100)[0, 4:-4]
        np.testing.assert_array_equal(got, Window(4, 3).materialize(1, 100, 100)[0, 4:-4])

    def test_a_causal_window(self):
        got, wanted = Neighborhood(100, 8, causal=True), Window(7, 0)
        np.testing.assert_array_equal(got.materialize(1, 100, 100), wanted.materialize(1, 100, 100))


class TestAttention:
    """On every backend; `tests.test_every_mask` has the same of some layouts under all rules."""

    RULES = (
        ((150,), (9,), (1,), (False,)),
        ((150,), (9,), (4,), (True,)),
        ((10, 13), (3, 4), (1, 1), (False, False)),
        ((10, 13), (3, 4), (3, 1), (False, True)),
        ((10, 13), (3, 4), (1, 3), (True, False)),
        ((5, 6, 7), (3, 2, 5), (1, 1, 1), (False, False, False)),
        ((5, 6, 7), (2, 3, 3), (2, 1, 2), (True, False, True)),
    )

    @pytest.mark.parametrize("rule", RULES, ids=str)
    def test_is_that_of_its_definition(self, engine, rule):
        shape, kernel, dilation, causal = rule
        n_tokens = prod(shape)
        arrays = random_arrays(lead=(2,), heads=2, kv_heads=1, len_q=n_tokens, len_k=n_tokens, head_dim=8)
        mask = Neighborhood(shape, kernel, dilation=dilation, causal=causal)
        assert_attention(engine.everything(*arrays, mask=mask), *arrays, mask=naive.neighborhood(*rule))

    @computes_gradients
    @pytest.mark.parametrize("rule", RULES[1:], ids=str)
    def test_gradients(self, engine, rule):
        shape, kernel, dilation, causal = rule
        n_tokens = prod(shape)
        arrays = random_arrays(3, heads=1, len_q=n_tokens, len_k=n_tokens, head_dim=8)
        mask = Neighborhood(shape, kernel, dilation=dilation, causal=causal)
        check(engine, arrays, {"mask": mask}, {"mask": naive.neighborhood(*rule)})


class TestCost:
    @pytest.mark.parametrize(
        ("shape", "kernel", "causal"),
        [
            ((300,), 7, False),
            ((300,), 7, True),
            ((1, 300, 1), (1, 8, 1), True),
            ((6, 50), (3, 50), (True, False)),
            ((1, 6, 50), (1, 3, 50), False),
            ((4, 5, 15), (4, 5, 15), False),
            ((300,), 300, False),
        ],
        ids=str,
    )
    def test_one_axis_beside_whole_ones_is_intervals(self, shape, kernel, causal):
        lowered = base.lower(Neighborhood(shape, kernel, causal=causal) & Causal(), (1,), 1, 300, 300)
        assert lowered.mask_map is None
        each = (np.broadcast_to(of, len(shape)).tolist() for of in (kernel, 1, causal))
        wanted = naive.neighborhood(shape, *map(tuple, each)) & np.tri(300, dtype=bool)
        np.testing.assert_array_equal(as_array(lowered, (1, 1, 300, 300))[0, 0], wanted)

    @pytest.mark.parametrize(
        ("dilation", "most_tiles"),
        # Of 512 key tiles, for a query block of a quarter of a row: in 7 rows 64 + 6 keys, or 7 apart by 32.
        [(1, 14), ((30, 1), 14), ((1, 32), 14), (30, 14)],
        ids=str,
    )
    def test_an_image_of_65_536_tokens(self, dilation, most_tiles):
        mask = Neighborhood((256, 256), 7, dilation=dilation)
        tracemalloc.start()
        mask_map = base.lower(mask, (), 1, 2**16, 2**16).mask_map
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (np.count_nonzero(mask_map.index != INDEX_EMPTY, axis=-1) <= most_tiles).all()
        one_bit_per_score = 2**32 // 8
        assert mask_map.bits.nbytes <= most_tiles * 2**16 // TILE_Q * TILE_Q * TILE_K // 8
        assert peak < one_bit_per_score // 8, f"{peak} bytes"

    @pytest.mark.parametrize(
        ("shape", "kernel", "dilation"),
        [
            ((250, 250), 7, 1),
            ((2**16,), 7, 9000),
            ((36, 42, 41), 5, (1, 4, 1)),
            ((2, 4096), (1, 3600), 1),
            ((4, 2048), (2, 1800), (2, 1)),
        ],
        ids=str,
    )
    def test_bits_are_computed_for_few_more_tiles_than_need_them(self, monkeypatch, shape, kernel, dilation):
        """Most of the others, up to half a million, are found empty or full at sight."""
        computed, words = [], Neighbors.words
        monkeypatch.setattr(
            Neighbors, "words", lambda self, batch: computed.append(len(batch.tile_key)) or words(self, batch)
        )
        n_tokens = prod(shape)
        mask = Neighborhood(shape, kernel, dilation=dilation)
        mask_map = base.lower(mask, (), 1, n_tokens, n_tokens).mask_map
        assert len(mask_map.bits) <= sum(computed) < 2 * len(mask_map.bits)


@pytest.mark.parametrize("sizes", [(12, 12), (24, 24), (20, 19)], ids=str)
def test_other_numbers_of_tokens_are_refused(sizes):
    with pytest.raises(ValueError) as caught:
        Neighborhood((4, 5), 3).materialize(1, *sizes)
    wanted = f"is for L=20 and S=20, got L={sizes[0]} and S={sizes[1]}"
    assert str(caught.value) == f"mask Neighborhood(shape=(4, 5), kernel=3) {wanted}"
