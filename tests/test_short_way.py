"""A call without options may go a shorter way through the package: nothing but its time may show it.

Every other test names its backend, which is the general way; here the same calls name none.
"""

from __future__ import annotations

import numpy as np
import pytest

import fastattn
from tests.cases import FLOATS, MEMORY_LAYOUTS, Case, random_arrays, solve
from tests.tolerances import assert_answer, assert_same_bits

SHAPES = {
    "rank_two": {"heads": 1},
    "rank_three": {"heads": 3},
    "rank_four": {"lead": (2,), "heads": 3},
    "rank_six": {"lead": (2, 1, 3), "heads": 2},
    "grouped": {"lead": (2,), "heads": 6, "kv_heads": 2},
    "one_kv_head": {"lead": (2,), "heads": 5, "kv_heads": 1},
    "wide_values": {"lead": (2,), "value_dim": 40},
    "no_values": {"value_dim": 0},
    "no_items": {"lead": (0,)},
    "no_heads": {"heads": 0, "kv_heads": 1},
    "no_queries": {"len_q": 0},
    "no_keys": {"len_k": 0},
    "nothing": {"lead": (0,), "heads": 0, "len_q": 0, "len_k": 0},
    "one_of_each": {"heads": 1, "len_q": 1, "len_k": 1, "head_dim": 1},
    "many_keys": {"heads": 1, "len_q": 1, "len_k": 3000},
    "several_tiles": {"heads": 2, "len_q": 200, "len_k": 600, "head_dim": 40},
}


def arrays_of(shape, dtype):
    arrays = random_arrays(**SHAPES[shape], dtype=dtype)
    return tuple(array[0] for array in arrays) if shape == "rank_two" else arrays


@pytest.fixture
def short(engine, monkeypatch):
    """A call that names no backend, with the engine's as the default."""
    monkeypatch.setenv("FASTATTN_BACKEND", engine.backend)
    return fastattn.attention


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"scale": -1}, {"scale": np.float32(0.5)}], ids=str)
def test_same_bits_as_the_general_way(engine, short, shape, options, dtype):
    arrays = arrays_of(shape, dtype)
    got = short(*arrays, **options)
    assert got.flags.c_contiguous
    assert got.flags.writeable
    assert_same_bits(got, engine.attention(*arrays, **options))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", [1, 2, 17, 64, 129, 300])
def test_same_bits_causal(engine, short, length, dtype):
    arrays = random_arrays(lead=(2,), heads=4, kv_heads=2, len_q=length, len_k=length, dtype=dtype)
    assert_same_bits(short(*arrays, causal=True), engine.attention(*arrays, causal=True))


@pytest.mark.parametrize("layout", MEMORY_LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_same_bits_anywhere_in_memory(engine, short, layout, dtype):
    arrays = random_arrays(lead=(2,), heads=3, dtype=dtype)
    moved = [MEMORY_LAYOUTS[layout](array) for array in arrays]
    assert_same_bits(short(*moved), engine.attention(*arrays))


@pytest.mark.parametrize("batch_of", ["query", "key", "value"])
def test_broadcasting(engine, short, batch_of):
    arrays = dict(zip(("query", "key", "value"), random_arrays(lead=(2, 3), heads=2), strict=True))
    for name in arrays:
        if name != batch_of:
            arrays[name] = arrays[name][:1, :1]
    assert_same_bits(short(**arrays), engine.attention(**arrays))
    spread = {name: np.broadcast_to(array, (2, 3, *array.shape[2:])) for name, array in arrays.items()}
    assert_same_bits(short(**spread), engine.attention(**arrays))


def test_mixed_and_integer_types(engine, short):
    query, key, value = random_arrays()
    for arrays in (
        (query.astype(np.float64), key, value),
        (query, key.astype(np.int32), value),
        (query.astype(">f4"), key, value),
        (query.tolist(), key.tolist(), value.tolist()),
        (query.view(np.memmap), key, value),
    ):
        assert_same_bits(short(*arrays), engine.attention(*arrays))


@pytest.mark.parametrize("rank", [8, 20, 32, 33, 64])
def test_many_leading_axes(engine, short, rank):
    arrays = [array.reshape((1,) * (rank - 3) + array.shape) for array in random_arrays()]
    expected = engine.attention(*random_arrays()).reshape((1,) * (rank - 3) + (2, 17, 16))
    for call in (short, engine.attention):
        assert_same_bits(call(*arrays), expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("len_k", [5, 40, 300])
def test_the_definition(short, len_k, dtype):
    solved = solve(Case("short", lead=(2,), heads=4, kv_heads=2, len_q=33, len_k=len_k, dtype=dtype))
    assert_answer((short(*solved.arrays),), solved.exact, solved.plain)


def floats(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"query": floats(6)}, ValueError),
        ({"query": floats(4, 6)}, ValueError),
        ({"query": floats(2, 4, 5, 7)}, ValueError),
        ({"query": floats(3, 4, 5, 6)}, ValueError),
        ({"query": floats(2, 3, 5, 6)}, ValueError),
        ({"query": floats(2, 4, 5, 0), "key": floats(2, 2, 9, 0)}, ValueError),
        ({"value": floats(2, 2, 8, 3)}, ValueError),
        ({"value": floats(2, 4, 9, 3)}, ValueError),
        ({"key": floats(2, 0, 9, 6), "value": floats(2, 0, 9, 3)}, ValueError),
        ({"query": np.zeros((2, 4, 5, 6), complex)}, TypeError),
        ({"key": np.zeros((2, 2, 9, 6), object)}, TypeError),
        ({"causal": True}, ValueError),
        ({"causal": "left"}, ValueError),
        ({"causal": 1}, ValueError),
        ({"scale": np.nan}, ValueError),
        ({"scale": float("inf")}, ValueError),
        ({"scale": "1"}, TypeError),
        ({"scale": True}, TypeError),
    ],
    ids=str,
)
def test_the_same_errors(engine, short, change, error):
    arguments = {"query": floats(2, 4, 5, 6), "key": floats(2, 2, 9, 6), "value": floats(2, 2, 9, 3)} | change
    with pytest.raises(error) as general:
        engine.attention(**arguments)
    with pytest.raises(error) as caught:
        short(**arguments)
    assert str(caught.value) == str(general.value)


def test_bad_settings_are_errors_here_too(short, monkeypatch):
    arrays = random_arrays()
    monkeypatch.setenv("FASTATTN_BACKEND", "nonsense")
    with pytest.raises(ValueError, match=r"FASTATTN_BACKEND.*nonsense"):
        short(*arrays)
    monkeypatch.delenv("FASTATTN_BACKEND")
    monkeypatch.setenv("FASTATTN_NUM_THREADS", "none")
    monkeypatch.setattr("fastattn._host._num_threads", None)  # what set_num_threads said goes first
    big = random_arrays(lead=(8,), heads=8, len_q=200, len_k=200)
    with pytest.raises(ValueError, match=r"FASTATTN_NUM_THREADS.*none"):
        short(*big)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", [5, 100])
def test_a_call_leaves_nothing_to_the_next(engine, short, length, dtype):
    """Alike calls one after another, between which NaN turns up behind the causal mask and goes again."""
    calls = [random_arrays(seed, heads=2, len_q=length, len_k=length, dtype=dtype) for seed in range(4)]
    for place in (1, 2):
        calls[place][2][:, 3] = np.nan
    results = [short(*arrays, causal=True) for arrays in calls]
    for got, arrays in zip(results, calls, strict=True):
        assert np.isnan(got).any() == np.isnan(arrays[2]).any()
        assert_same_bits(got, engine.attention(*arrays, causal=True))


@pytest.mark.parametrize(("len_q", "step"), [(60, 0), (1, 13)], ids=["alike", "different"])
def test_many_threads_at_once(short, len_q, step):
    from concurrent.futures import ThreadPoolExecutor

    problems = [random_arrays(seed, lead=(2,), heads=2, len_q=len_q + step * seed) for seed in range(8)]
    expected = [short(*arrays) for arrays in problems]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            for got, wanted in zip(pool.map(lambda arrays: short(*arrays), problems), expected, strict=True):
                assert_same_bits(got, wanted)
