"""Rule 5: mask, causal, window, key_lengths and -inf in bias compose by AND, in any combination."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fastattn import masks
from tests.cases import random_arrays
from tests.conftest import OF_ONE_ISA
from tests.tolerances import assert_attention

engines = OF_ONE_ISA  # kernels see which keys are left, and not why
LEN_Q, LEN_K = 70, 140
RNG_BIAS = np.random.default_rng(1).standard_normal((LEN_Q, LEN_K)).astype(np.float32)
RNG_BIAS[np.random.default_rng(2).random((LEN_Q, LEN_K)) < 0.3] = -np.inf
LONGFORMER = masks.Window(20, 5) | masks.GlobalTokens([0, 77])

PARTS = {
    "mask": {"mask": np.random.default_rng(0).random((2, 1, LEN_Q, LEN_K)) < 0.7},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (60, 30)},
    "key_lengths": {"key_lengths": np.array([101, 140])},
    "bias": {"bias": RNG_BIAS},
}
COMBINATIONS = [names for count in range(6) for names in itertools.combinations(PARTS, count)]


@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_every_combination(engine, names):
    options = {name: part for key in names for name, part in PARTS[key].items()}
    arrays = random_arrays(lead=(2,), heads=2, len_q=LEN_Q, len_k=LEN_K, head_dim=8)
    assert_attention(engine.everything(*arrays, **options), *arrays, **options)


@pytest.mark.parametrize("names", [names for names in COMBINATIONS if "mask" in names], ids="+".join)
def test_every_combination_with_a_tile_mask(engine, names):
    options = {name: part for key in names for name, part in PARTS[key].items()}
    arrays = random_arrays(lead=(2,), heads=2, len_q=LEN_Q, len_k=LEN_K, head_dim=8)
    allowed = LONGFORMER.materialize(2, LEN_Q, LEN_K)
    assert_attention(
        engine.everything(*arrays, **options | {"mask": LONGFORMER}), *arrays, **options | {"mask": allowed}
    )


def test_array_and_tiles_and_intervals_at_once(engine):
    array = np.random.default_rng(4).random((LEN_Q, LEN_K)) < 0.8
    mask = masks.Dense(array) & LONGFORMER & masks.KeyLengths([100, 139])
    arrays = random_arrays(lead=(2,), heads=2, len_q=LEN_Q, len_k=LEN_K, head_dim=8)
    allowed = array & LONGFORMER.materialize(2, LEN_Q, LEN_K)
    rest = {"bias": RNG_BIAS, "causal": "bottom_right"}
    lengths = np.arange(LEN_K) < np.array([100, 139])[:, None, None, None]
    assert_attention(engine.everything(*arrays, mask=mask, **rest), *arrays, mask=allowed & lengths, **rest)


def test_objects_keep_their_own_alignment(engine):
    """`causal="bottom_right"` and `window` follow key_lengths, mask objects do not."""
    arrays = random_arrays(lead=(2,), heads=2, len_q=10, len_k=30)
    lengths = np.array([15, 30])
    i, j = np.arange(10)[:, None], np.arange(30)
    follows = engine.everything(*arrays, causal="bottom_right", key_lengths=lengths)
    stays = engine.everything(*arrays, mask=masks.Causal("bottom_right"), key_lengths=lengths)
    by_item = j <= i + lengths[:, None, None, None] - 10
    real = j < lengths[:, None, None, None]
    assert_attention(follows, *arrays, mask=by_item & real)
    assert_attention(stays, *arrays, mask=(j <= i + 20) & real)
    offset = engine.everything(*arrays, mask=masks.Causal(offset=lengths - 10), key_lengths=lengths)
    assert_attention(offset, *arrays, mask=by_item & real)
    window = engine.everything(*arrays, window=(2, 1), key_lengths=lengths)
    centre = i + lengths[:, None, None, None] - 10
    assert_attention(window, *arrays, mask=real & (j >= centre - 2) & (j <= centre + 1))
