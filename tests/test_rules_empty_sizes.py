"""Rule 6: empty is legal."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fastattn import masks
from tests.cases import FLOATS, random_arrays
from tests.conftest import OF_ONE_ISA

engines = OF_ONE_ISA  # no kernel is called with nothing

SIZES = [sizes for sizes in itertools.product((0, 2), (0, 4), (0, 5), (0, 7), (0, 3)) if 0 in sizes]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "B{}-H{}-L{}-S{}-E{}".format(*sizes))
def test_every_size_of_zero(engine, sizes, dtype):
    batch, heads, len_q, len_k, value_dim = sizes
    arrays = random_arrays(
        lead=(batch,), heads=heads, len_q=len_q, len_k=len_k, value_dim=value_dim, head_dim=6, dtype=dtype
    )
    options = [
        {},
        {"causal": "bottom_right"},
        {"window": (2, 1)},
        {"key_lengths": np.full(batch, len_k)},
        {"mask": np.ones((len_q, len_k), bool)},
        {"mask": masks.Window(1, 1) | masks.KeyLengths(0)},
        {"bias": np.zeros((heads, 1, len_k))},
        {"softcap": 3.0},
    ]
    for chosen in options:
        out, lse, weights = engine.everything(*arrays, **chosen)
        assert out.shape == (batch, heads, len_q, value_dim)
        assert lse.shape == (batch, heads, len_q)
        assert weights.shape == (batch, heads, len_q, len_k)
        assert out.dtype == lse.dtype == weights.dtype == np.dtype(dtype)
        if len_k == 0:
            assert not out.any()
            assert (lse == -np.inf).all()
        elif chosen == {}:
            assert np.isfinite(lse).all()


def test_no_keys_with_sinks(engine):
    arrays = random_arrays(len_k=0)
    sinks = np.array([1.5, -3.0], np.float32)
    out, lse, _ = engine.everything(*arrays, sinks=sinks)
    assert not out.any()
    np.testing.assert_array_equal(lse, np.broadcast_to(sinks[:, None], lse.shape))


def test_no_keys_overwrites_out(engine):
    arrays = random_arrays(len_k=0)
    out = np.full((2, 17, 16), 7.0, np.float32)
    assert engine.attention(*arrays, out=out) is out
    assert not out.any()


def test_value_dim_of_zero_still_has_lse(engine):
    query, key, value = random_arrays(value_dim=3)
    lse = engine.everything(query, key, value)[1]
    out, empty_lse, _ = engine.everything(query, key, value[..., :0])
    assert out.shape == (2, 17, 0)
    np.testing.assert_array_equal(empty_lse, lse)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("lead", [(), (0,), (2, 0), (0, 3)], ids=str)
def test_layouts_and_leads(engine, lead, layout):
    arrays = random_arrays(lead=lead, len_q=0 if lead == () else 5)
    if layout == "bshd":
        arrays = [array.swapaxes(-2, -3) for array in arrays]
    out, lse = engine.attention(*arrays, layout=layout, return_lse=True)
    assert out.shape == arrays[0].shape
    assert lse.shape == (*lead, 2, 0 if lead == () else 5)


def test_rank_two(engine):
    out = engine.attention(np.zeros((0, 3)), np.zeros((4, 3)), np.zeros((4, 2)))
    assert out.shape == (0, 2)
    out = engine.attention(np.zeros((3, 3)), np.zeros((0, 3)), np.zeros((0, 2)))
    np.testing.assert_array_equal(out, np.zeros((3, 2)))
