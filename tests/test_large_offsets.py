"""Element offsets beyond 2^31: strides that large, and broadcast arrays that large, in little memory."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import pytest

from fastattn import masks
from tests.cases import FLOATS, random_arrays
from tests.conftest import on_compiled, reference_is_slow
from tests.tolerances import assert_all_same, assert_attention, assert_same_bits

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or sys.maxsize < 2**40, reason="needs a large, sparse address space"
)

MAP_NORESERVE = 0x4000
BEYOND = 2**31 + 11  # elements: past what a 32-bit signed index can hold
HALF_WAY = 2**30 + 11  # twice this is past it, and once is not


def sparse(array, axis, step):
    """The same numbers, `step` elements apart along `axis`; pages that are never accessed take no memory."""
    moved = np.ascontiguousarray(np.moveaxis(array, axis, 0))
    count = step * (len(moved) - 1) + moved[0].size
    memory = mmap.mmap(
        -1, count * array.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    )
    flat = np.frombuffer(memory, array.dtype)
    inner = moved[0].strides
    view = np.lib.stride_tricks.as_strided(flat, moved.shape, (step * array.itemsize, *inner))
    view[...] = moved
    return np.moveaxis(view, 0, axis)


def small(dtype):
    return dict(
        zip(
            ("query", "key", "value"),
            random_arrays(lead=(3,), heads=3, len_q=3, len_k=3, head_dim=3, value_dim=3, dtype=dtype),
            strict=True,
        )
    )


@pytest.mark.parametrize("step", [HALF_WAY, BEYOND])
@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("argument", ["query", "key", "value"])
def test_inputs(engine, argument, axis, step):
    arrays = small("float32")
    expected = engine.everything(**arrays)
    arrays[argument] = sparse(arrays[argument], axis, step)
    assert_all_same(engine.everything(**arrays), expected)


def test_double(engine):
    arrays = small("float64")
    expected = engine.everything(**arrays)
    for axis in range(4):
        moved = {name: sparse(array, axis, BEYOND) for name, array in arrays.items()}
        assert_all_same(engine.everything(**moved), expected)


@pytest.mark.parametrize("axis", range(4))
def test_backwards(engine, axis):
    arrays = small("float32")
    expected = engine.everything(**arrays)
    flipped = {
        name: np.flip(sparse(np.flip(array, axis), axis, BEYOND), axis) for name, array in arrays.items()
    }
    assert all(array.strides[axis] < -(2**32) for array in flipped.values())
    assert_all_same(engine.everything(**flipped), expected)


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("dtype", FLOATS)
def test_out(engine, axis, dtype):
    arrays = small(dtype)
    expected = engine.attention(**arrays)
    out = sparse(np.zeros_like(expected), axis, BEYOND)
    engine.attention(**arrays, out=out)
    assert_same_bits(out.copy(), expected)


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("argument", ["mask", "integer_mask", "bias", "half_bias"])
def test_mask_and_bias(engine, argument, axis):
    arrays = small("float32")
    rng = np.random.default_rng(0)
    name, array = {
        "mask": ("mask", rng.random((3, 3, 3, 3)) < 0.6),
        "integer_mask": ("mask", rng.integers(0, 2, (3, 3, 3, 3))),
        "bias": ("bias", rng.standard_normal((3, 3, 3, 3)).astype(np.float32)),
        "half_bias": ("bias", rng.standard_normal((3, 3, 3, 3)).astype(np.float16)),
    }[argument]
    expected = engine.everything(**arrays, **{name: array})
    for got, wanted in zip(
        engine.everything(**arrays, **{name: sparse(array, axis, BEYOND)}), expected, strict=True
    ):
        assert_same_bits(got, wanted)


LONG = 2**16 + 3  # its square does not fit into 32 bits


@reference_is_slow
def test_more_scores_than_a_32_bit_index_counts(engine):
    """L * S beyond 2^32 with few keys to read: wherever i * S is computed, it must not overflow."""
    query = np.random.default_rng(0).standard_normal((1, LONG, 2)).astype(np.float32)
    key, value = np.random.default_rng(1).standard_normal((2, 1, LONG, 2)).astype(np.float32)
    rows = [0, 1, LONG // 2, LONG - 1]
    out = engine.attention(query, key, value, window=(1, 1))
    allowed = np.abs(np.arange(LONG) - np.array(rows)[:, None]) <= 1
    assert_attention((out[:, rows],), query[:, rows], key, value, mask=allowed)

    # Broadcast arrays of as many elements, stored as three numbers.
    keep = np.broadcast_to(np.arange(LONG) < 3, (LONG, LONG))
    out = engine.attention(query, key, value, mask=keep, key_lengths=5)
    assert_attention((out[:, rows],), query[:, rows], key[:, :3], value[:, :3])
    bias = np.broadcast_to(np.linspace(0, 1, LONG, dtype=np.float32)[:, None], (LONG, LONG))
    out, lse = engine.attention(query, key, value, bias=bias, key_lengths=4, return_lse=True)
    assert_attention(
        (out[:, rows], lse[:, rows]), query[:, rows], key[:, :4], value[:, :4], bias=bias[rows, :4].copy()
    )


@on_compiled  # the reference unpacks whole rows of the tile map, and takes a minute
def test_tiles_over_more_scores_than_a_32_bit_index_counts(engine):
    query = np.random.default_rng(0).standard_normal((1, LONG, 2)).astype(np.float32)
    key, value = np.random.default_rng(1).standard_normal((2, 1, LONG, 2)).astype(np.float32)
    rows = [1, LONG // 2, LONG - 1]
    mask = masks.Window(1, 1) | masks.Window(4, 0)
    out = engine.attention(query, key, value, mask=mask)
    distance = np.array(rows)[:, None] - np.arange(LONG)
    assert_attention((out[:, rows],), query[:, rows], key, value, mask=(distance >= -1) & (distance <= 4))


@reference_is_slow
def test_a_batch_beyond_2_31_elements_by_zero_strides(engine):
    """Every item is the same key: an offset computed as item * size would run far away."""
    query = np.random.default_rng(0).standard_normal((5_500, 1, 1, 1)).astype(np.float32)
    key = np.random.default_rng(1).standard_normal((1, 400_000, 1)).astype(np.float32)
    spread = np.broadcast_to(key, (5_500, 1, 400_000, 1))
    assert spread.size > 2**31
    out = engine.attention(query, spread, spread, key_lengths=2)
    rows = [0, 5_369, 5_499]
    assert_attention((out[rows],), query[rows], key[:, :2], key[:, :2])
