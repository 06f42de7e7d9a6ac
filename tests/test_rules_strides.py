"""Rule 2: any strides, and no copy that grows with S times L."""

from __future__ import annotations

import numpy as np
import pytest

from fastattn import masks
from tests.cases import FLOATS, MEMORY_LAYOUTS, random_arrays
from tests.conftest import reference_is_slow
from tests.tolerances import assert_all_same, assert_same_bits


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", MEMORY_LAYOUTS)
@pytest.mark.parametrize("argument", ["query", "key", "value", "all"])
def test_inputs_anywhere_in_memory(engine, argument, layout, dtype):
    arrays = dict(zip(("query", "key", "value"), random_arrays(lead=(2,), heads=3, dtype=dtype), strict=True))
    expected = engine.everything(*arrays.values())
    place = MEMORY_LAYOUTS[layout]
    moved = {name: place(array) if argument in (name, "all") else array for name, array in arrays.items()}
    assert_all_same(engine.everything(*moved.values()), expected)


@pytest.mark.parametrize("layout", MEMORY_LAYOUTS)
@pytest.mark.parametrize("argument", ["mask", "bias", "sinks", "key_lengths"])
def test_options_anywhere_in_memory(engine, argument, layout):
    rng = np.random.default_rng(2)
    arrays = random_arrays(lead=(2,), heads=3)
    options = {
        "mask": rng.random((2, 3, 17, 33)) < 0.6,
        "bias": rng.standard_normal((2, 3, 17, 33)).astype(np.float32),
        "sinks": rng.standard_normal(3).astype(np.float32),
        "key_lengths": np.array([20, 33]),
    }[argument]
    moved = MEMORY_LAYOUTS[layout](options)
    expected = engine.everything(*arrays, **{argument: options})
    assert_all_same(engine.everything(*arrays, **{argument: moved}), expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "layout", [name for name in MEMORY_LAYOUTS if name not in ("read_only", "byte_swapped")]
)
def test_out_anywhere_in_memory(engine, layout, dtype):
    arrays = random_arrays(lead=(2,), heads=3, len_q=50, value_dim=20, dtype=dtype)
    expected = engine.attention(*arrays)
    out = MEMORY_LAYOUTS[layout](np.full(expected.shape, 7.0, dtype))
    got = engine.attention(*arrays, out=out)
    assert got is out
    assert_same_bits(np.ascontiguousarray(got), expected)


@pytest.mark.parametrize("step", [2, 3, -1, -2])
def test_strided_out_writes_between_no_elements(engine, step):
    arrays = random_arrays(len_q=50, value_dim=20)
    expected = engine.attention(*arrays)
    buffer = np.full((2 * 3, 50 * 3, 20 * 3), 7.0, np.float32)
    out = buffer[::3, ::3, ::step][..., :20]
    engine.attention(*arrays, out=out)
    assert_same_bits(np.ascontiguousarray(out), expected)
    out[...] = 7.0
    np.testing.assert_array_equal(buffer, 7.0)


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2), (3,), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("argument", ["query", "key", "value", "all"])
def test_zero_strides(engine, argument, axes):
    arrays = dict(zip(("query", "key", "value"), random_arrays(lead=(2,), heads=3), strict=True))
    broadcast, written_out = {}, {}
    for name, array in arrays.items():
        if argument in (name, "all"):
            one = array[tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(4))]
            broadcast[name] = np.broadcast_to(one, array.shape)
            assert 0 in broadcast[name].strides
            written_out[name] = broadcast[name].copy()
        else:
            broadcast[name] = written_out[name] = array
    assert_all_same(engine.everything(**broadcast), engine.everything(**written_out))


@pytest.mark.parametrize(
    "shape", [(33,), (1, 33), (17, 1), (3, 1, 33), (2, 1, 17, 33), (1, 3, 1, 1), ()], ids=str
)
@pytest.mark.parametrize("argument", ["mask", "bias"])
def test_zero_strides_of_mask_and_bias(engine, argument, shape):
    arrays = random_arrays(lead=(2,), heads=3)
    small = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    small = np.asarray(small > -0.5) if argument == "mask" else np.asarray(small)
    whole = np.broadcast_to(small, (2, 3, 17, 33)).copy()
    expected = engine.everything(*arrays, **{argument: whole})
    assert_all_same(engine.everything(*arrays, **{argument: small}), expected)


@pytest.mark.parametrize("argument", ["query", "key", "value", "mask", "bias"])
def test_memory_mapped_files(engine, argument, tmp_path):
    arrays = dict(zip(("query", "key", "value"), random_arrays(), strict=True))
    rng = np.random.default_rng(3)
    arrays |= {"mask": rng.random((17, 33)) < 0.6, "bias": rng.standard_normal((17, 33)).astype(np.float32)}
    expected = engine.attention(**arrays)
    np.save(tmp_path / "array.npy", arrays[argument])
    arrays[argument] = np.load(tmp_path / "array.npy", mmap_mode="r")
    got = engine.attention(**arrays)
    assert type(got) is np.ndarray
    assert_same_bits(got, expected)


def test_memory_mapped_out(engine, tmp_path):
    arrays = random_arrays()
    out = np.memmap(tmp_path / "out.bin", np.float32, "w+", shape=(2, 17, 16))
    assert engine.attention(*arrays, out=out) is out
    assert_same_bits(np.array(out), engine.attention(*arrays))


def test_inputs_are_never_written(engine):
    rng = np.random.default_rng(4)
    arrays = dict(zip(("query", "key", "value"), random_arrays(lead=(2,)), strict=True))
    arrays |= {
        "mask": rng.random((17, 33)) < 0.6,
        "bias": rng.standard_normal((17, 33)).astype(np.float32),
        "sinks": rng.standard_normal(2).astype(np.float32),
        "key_lengths": np.array([20, 33]),
    }
    before = {name: array.copy() for name, array in arrays.items()}
    engine.everything(**arrays, causal="bottom_right", softcap=4.0)
    for name, array in arrays.items():
        assert_same_bits(array, before[name], name)


class TestLayout:
    """`layout="bshd"` is a view of the same problem."""

    @pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
    def test_same_bits_in_both_layouts(self, engine, lead):
        arrays = random_arrays(lead=lead, heads=4, kv_heads=2, value_dim=20)
        expected = engine.everything(*arrays)
        swapped = [np.ascontiguousarray(array.swapaxes(-2, -3)) for array in arrays]
        out, lse, weights = engine.everything(*swapped, layout="bshd")
        assert out.flags.c_contiguous
        assert_same_bits(np.ascontiguousarray(out.swapaxes(-2, -3)), expected[0], "out")
        assert_same_bits(lse, expected[1], "lse")
        assert_same_bits(weights, expected[2], "weights")

    def test_mask_and_bias_do_not_follow_the_layout(self, engine):
        rng = np.random.default_rng(5)
        arrays = random_arrays(lead=(2,), heads=3)
        options = {"mask": rng.random((2, 3, 17, 33)) < 0.6, "bias": rng.standard_normal((3, 17, 33))}
        expected = engine.attention(*arrays, **options)
        swapped = [array.swapaxes(-2, -3) for array in arrays]
        got = engine.attention(*swapped, layout="bshd", **options)
        assert_same_bits(np.ascontiguousarray(got.swapaxes(-2, -3)), expected)

    def test_out_follows_the_layout(self, engine):
        arrays = random_arrays(lead=(2,), heads=3)
        swapped = [array.swapaxes(-2, -3) for array in arrays]
        out = np.zeros((2, 17, 3, 16), np.float32)
        assert engine.attention(*swapped, layout="bshd", out=out) is out
        assert_same_bits(np.ascontiguousarray(out.swapaxes(-2, -3)), engine.attention(*arrays))

    def test_rank_two_has_no_heads_axis_to_move(self, engine):
        arrays = [array[0] for array in random_arrays(heads=1)]
        assert_same_bits(engine.attention(*arrays, layout="bshd"), engine.attention(*arrays))


class TestRowsFarApart:
    """Many queries read a head with gaps between its rows or elements: threads use copies of their own."""

    @staticmethod
    def arrays(dtype="float32", kv_heads=2):
        return random_arrays(
            lead=(3,), heads=8, kv_heads=kv_heads, len_q=110, len_k=300, value_dim=20, dtype=dtype
        )

    @staticmethod
    def rows_apart(array):
        return np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2)

    @staticmethod
    def elements_apart(array):
        return np.ascontiguousarray(array.swapaxes(2, 3)).swapaxes(2, 3)

    @staticmethod
    def options(name):
        rng = np.random.default_rng(6)
        return {
            "plain": {},
            "causal": {"causal": "bottom_right"},
            "window": {"window": (20, 3)},
            "lengths": {"key_lengths": np.array([300, 70, 257])},
            "mask": {"mask": rng.random((110, 300)) < 0.6},
            # Blocks of queries, the last first, read other keys each, and come back to those in between.
            "parts": {"mask": masks.Segments(np.repeat([1, 9, 2, 9, 0], 22), np.arange(300) // 100)},
            "tiles": {"mask": masks.Window(20, 1) | masks.GlobalTokens([0])},
            "bias": {"bias": rng.standard_normal((8, 110, 300)).astype(np.float32)},
        }[name]

    @reference_is_slow
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize(
        "option", ["plain", "causal", "window", "lengths", "mask", "parts", "tiles", "bias"]
    )
    @pytest.mark.parametrize("place", ["rows_apart", "elements_apart"])
    def test_same_bits(self, engine, place, option, dtype):
        query, key, value = self.arrays(dtype)
        options, move = self.options(option), getattr(self, place)
        expected = engine.everything(query, key, value, **options)
        for keys, values in ((move(key), move(value)), (move(key), value), (key, move(value))):
            for num_threads in (1, 3):
                results = engine.everything(query, keys, values, num_threads=num_threads, **options)
                assert_all_same(results, expected)

    @pytest.mark.parametrize("shared", ["key", "value"])
    def test_one_array_shared_by_the_batch(self, engine, shared):
        """Its address alone does not tell the items apart."""
        query, key, value = self.arrays(kv_heads=1)
        if shared == "key":
            key = np.broadcast_to(self.elements_apart(key[:1]), key.shape)
            value = self.elements_apart(value)
        else:
            key = self.elements_apart(key)
            value = np.broadcast_to(self.elements_apart(value[:1]), value.shape)
        expected = engine.everything(query, key.copy(), value.copy(), num_threads=1)
        assert_all_same(engine.everything(query, key, value, num_threads=1), expected)

    @pytest.mark.parametrize("place", ["rows_apart", "elements_apart"])
    def test_masked_nan_is_never_seen(self, engine, place):
        query, key, value = self.arrays()
        mask, move = self.options("mask")["mask"], getattr(self, place)
        mask[:, ::7] = False
        mask[0, ::7] = True
        expected = engine.attention(query, key, value, mask=mask)
        key[:, :, ::7] = value[:, :, ::7] = np.nan
        got = engine.attention(query, move(key), move(value), mask=mask)
        assert_same_bits(got[:, :, 1:], expected[:, :, 1:])
        assert np.isnan(got[:, :, 0]).all()


class TestOverlap:
    """`out=` over an input gives the right answer, on every CPU backend and wherever the two lie.

    An error would be allowed by the contract; the backends of the CPU need none, and so do not get away with
    one. On a GPU it is an error: `tests/cuda/test_device_arrays.py`.
    """

    @pytest.mark.parametrize("name", ["query", "key", "value"])
    def test_out_is_an_input(self, engine, name):
        arrays = dict(zip(("query", "key", "value"), random_arrays(heads=2, len_q=80, len_k=80), strict=True))
        expected = engine.attention(**arrays)
        self.check(engine, arrays, arrays[name], expected)

    @pytest.mark.parametrize("shift", [1, 16, 400, -1, -16])
    def test_out_is_shifted_over_query(self, engine, shift):
        count = 2 * 80 * 16
        room = np.zeros(count + 1000, np.float32)
        query, key, value = random_arrays(heads=2, len_q=80, len_k=80)
        inside = room[500 : 500 + count].reshape(query.shape)
        inside[...] = query
        out = room[500 + shift : 500 + shift + count].reshape(query.shape)
        expected = engine.attention(query, key, value)
        self.check(engine, {"query": inside, "key": key, "value": value}, out, expected)

    def test_out_is_the_bias(self, engine):
        arrays = dict(zip(("query", "key", "value"), random_arrays(heads=2, len_q=20, len_k=16), strict=True))
        arrays["bias"] = np.random.default_rng(0).standard_normal((2, 20, 16)).astype(np.float32)
        expected = engine.attention(**arrays)
        self.check(engine, arrays, arrays["bias"], expected)

    def test_out_holds_the_sinks(self, engine):
        arrays = dict(zip(("query", "key", "value"), random_arrays(heads=3), strict=True))
        out = np.full((3, 17, 16), 7.0, np.float32)
        arrays["sinks"] = out[:, 0, 0]
        arrays["sinks"][...] = [0.5, -1.0, 3.0]
        expected = engine.attention(**arrays | {"sinks": arrays["sinks"].copy()})
        self.check(engine, arrays, out, expected)
        # And as one row, which needs no copy to be contiguous.
        out = np.full((3, 17, 16), 7.0, np.float32)
        arrays["sinks"] = out[0, 0, :3]
        arrays["sinks"][...] = [0.5, -1.0, 3.0]
        self.check(engine, arrays, out, expected)

    def test_interleaved_out_that_shares_no_element_is_accepted(self, engine):
        query, key, value = random_arrays()
        both = np.zeros((2, 17, 32), np.float32)
        both[..., ::2] = query
        out = engine.attention(both[..., ::2], key, value, out=both[..., 1::2])
        assert_same_bits(np.ascontiguousarray(out), engine.attention(query, key, value))
        assert_same_bits(np.ascontiguousarray(both[..., ::2]), query)

    @staticmethod
    def check(engine, arrays, out, expected):
        assert any(np.shares_memory(out, array) for array in arrays.values())
        got = engine.attention(**arrays, out=out)
        assert got is out
        assert_same_bits(np.ascontiguousarray(out), expected)


def test_out_with_repeated_elements_is_refused(engine):
    """A broadcast `out` has one element for many results."""
    query, key, value = random_arrays()
    out = np.lib.stride_tricks.as_strided(np.zeros(16, np.float32), (2, 17, 16), (0, 0, 4))
    with pytest.raises(ValueError, match=r"^out has elements that share memory: shape \(2, 17, 16\)"):
        engine.attention(query, key, value, out=out)
    assert not out.any()
