"""Prepared calls: what a call's signature decides is kept for the next one, which differs in its time only.

The first call of a signature takes the general path, later ones use the prepared call.
"""

from __future__ import annotations

import contextlib
from functools import partial

import numpy as np
import pytest

import fastattn
from fastattn import masks
from fastattn._api import attention as _api
from fastattn._api import prepared, signature
from fastattn.backends.cpu import record
from tests.cases import FLOATS, MEMORY_LAYOUTS, Case, random_arrays, solve
from tests.conftest import OF_ONE_ISA, on_compiled
from tests.refusals import one_at_a_time
from tests.tolerances import assert_all_same, assert_answer, assert_attention, assert_same_bits

engines = OF_ONE_ISA  # no kernel knows how its call was prepared

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
    """The second of two equal calls that name no backend, with the engine's as the default."""
    monkeypatch.setenv("FASTATTN_BACKEND", engine.backend)

    def second(*args, **kwargs):
        with contextlib.suppress(ValueError, TypeError):  # the second call says it again
            fastattn.attention(*args, **kwargs)
        return fastattn.attention(*args, **kwargs)

    return second


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


WRONG = {
    "query": [
        *(floats(6), floats(4, 6), floats(2, 4, 5, 7), floats(3, 4, 5, 6), floats(2, 3, 5, 6)),
        np.zeros((2, 4, 5, 6), complex),
    ],
    "key": [np.zeros((2, 2, 9, 6), object)],
    "value": [floats(2, 2, 8, 3), floats(2, 4, 9, 3)],
    "causal": [True, "left", 1],
    "scale": [np.nan, float("inf"), "1", True],
}
SEVERAL_WRONG = [
    {"query": floats(2, 4, 5, 0), "key": floats(2, 2, 9, 0)},
    {"key": floats(2, 0, 9, 6), "value": floats(2, 0, 9, 3)},
]


def test_the_same_errors(engine, short):
    for change in [*one_at_a_time(WRONG), *SEVERAL_WRONG]:
        arrays = {"query": floats(2, 4, 5, 6), "key": floats(2, 2, 9, 6), "value": floats(2, 2, 9, 3)}
        with pytest.raises((TypeError, ValueError)) as general:
            engine.attention(**arrays | change)
        with pytest.raises(general.type) as caught:
            short(**arrays | change)
        assert str(caught.value) == str(general.value)


def test_bad_settings_are_errors_here_too(short, monkeypatch):
    arrays = random_arrays()
    monkeypatch.setenv("FASTATTN_BACKEND", "nonsense")
    with pytest.raises(ValueError, match=r"FASTATTN_BACKEND.*nonsense"):
        short(*arrays)
    monkeypatch.delenv("FASTATTN_BACKEND")
    monkeypatch.setenv("FASTATTN_NUM_THREADS", "none")
    monkeypatch.setattr("fastattn._machine.host._num_threads", None)  # set_num_threads has priority
    big = random_arrays(lead=(8,), heads=8, len_q=200, len_k=200)
    with pytest.raises(ValueError, match=r"FASTATTN_NUM_THREADS.*none"):
        short(*big)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", [5, 100])
def test_a_call_leaves_nothing_to_the_next(engine, short, length, dtype):
    """Calls of one signature, between which NaN appears behind the causal mask and disappears."""
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
            assert_all_same(pool.map(lambda arrays: short(*arrays), problems), expected)


# ---------------------------------------------------------------- the prepared call

L, S = 12, 20
NUMBERS = np.random.default_rng(0)
OPTIONS = {
    "nothing": {},
    "top_left": {"causal": "top_left"},
    "bottom_right": {"causal": "bottom_right"},
    "window": {"window": (3, None)},
    "causal_window": {"causal": "top_left", "window": (4, 2)},
    "scale": {"scale": 0.3},
    "integer_scale": {"scale": 2},
    "softcap": {"softcap": 3.0},
    "lengths": {"key_lengths": np.array([5, 20])},
    "int32_lengths": {"key_lengths": np.array([[7], [0]], np.int32)[:, 0]},
    "list_of_lengths": {"key_lengths": [20, 3]},
    "one_length": {"key_lengths": 9},
    "mask": {"mask": NUMBERS.random((L, S)) > 0.5},
    "integer_mask": {"mask": NUMBERS.integers(0, 2, (2, 1, 1, S))},
    "mask_object": {"mask": masks.Window(2, 1) | masks.GlobalTokens([0])},
    "intervals": {"mask": masks.Causal(offset=3) & masks.KeyLengths([4, 18])},
    "dense_object": {"mask": masks.Dense(NUMBERS.random((3, L, S)) > 0.5)},
    "bias": {"bias": NUMBERS.standard_normal((L, S), dtype=np.float32)},
    "half_bias": {"bias": NUMBERS.standard_normal((3, 1, S)).astype(np.float16)},
    "sinks": {"sinks": np.arange(3, dtype=np.float32)},
    "lse": {"return_lse": True},
    "weights": {"return_weights": True},
    "mean_weights": {"return_weights": "mean"},
    "num_threads": {"num_threads": 2},
    "everything": {
        "mask": NUMBERS.random((L, S)) > 0.3,
        "bias": NUMBERS.standard_normal((L, S), dtype=np.float32),
        "causal": "bottom_right",
        "window": (15, 4),
        "key_lengths": np.array([20, 13]),
        "softcap": 5.0,
        "sinks": np.zeros(3, np.float32),
        "return_lse": True,
        "return_weights": True,
    },
}

#: What is checked, looked up or averaged at each call, whatever it is.
LEFT_TO_PYTHON = [
    "lengths", "int32_lengths", "list_of_lengths", "one_length", "dense_object", "mean_weights", "everything",
]  # fmt: skip


@pytest.fixture
def no_general_path(monkeypatch):
    """From now on a call that is not prepared fails."""

    def refuse():
        monkeypatch.setattr(_api, "select", lambda *_: pytest.fail("this call took the general path"))

    return refuse


def results_of(got):
    return got if isinstance(got, tuple) else (got,)


@on_compiled
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_call_is_prepared_once(engine, no_general_path, name, layout):
    """The next call of a signature, on other numbers, uses the prepared call, with the bits of the general
    path."""
    options = OPTIONS[name] | {"layout": layout}
    first, second = (random_arrays(seed, lead=(2,), heads=3, len_q=L, len_k=S) for seed in range(2))
    if layout == "bshd":
        first, second = ([array.swapaxes(1, 2) for array in arrays] for arrays in (first, second))
    fresh = dict(options)
    if isinstance(fresh.get("mask"), np.ndarray):
        fresh["mask"] = fresh["mask"][::-1].copy()
    engine.attention(*first, **options)
    expected = results_of(engine.attention(*(array.copy() for array in second), **fresh))
    no_general_path()
    results = results_of(engine.attention(*second, **fresh))
    assert_all_same(results, expected)
    assert all(got.flags.c_contiguous and got.flags.writeable for got in results)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.5}, {"enable_gqa": True}], ids=str)
@pytest.mark.parametrize("operand", [None, "mask", "bias"])
def test_scaled_dot_product_attention_is_prepared(no_general_path, options, operand):
    arrays = random_arrays(lead=(2,), heads=3, len_q=L, len_k=S)
    given = None if operand is None else OPTIONS[operand][operand]
    expected = fastattn.scaled_dot_product_attention(*arrays, given, **options)
    no_general_path()
    assert_same_bits(fastattn.scaled_dot_product_attention(*arrays, given, **options), expected)


@pytest.mark.parametrize(
    "wrong",
    [{"is_causal": 1}, {"is_causal": 1.0}, {"enable_gqa": 0}, {"dropout_p": False}, {"dropout_p": 0j}],
    ids=str,
)
def test_a_repeated_call_is_judged_as_the_first(wrong):
    x = np.ones((1, 2, 6, 8), np.float32)
    for name, equal in (("is_causal", True), ("dropout_p", 0.0)):
        fastattn.scaled_dot_product_attention(x, x, x, **({name: equal} if name in wrong else {}))
    with pytest.raises(TypeError, match=next(iter(wrong))):
        fastattn.scaled_dot_product_attention(x, x, x, **wrong)


def test_varlen_attention_is_prepared_for_its_lengths(no_general_path):
    query, key, value = (array.swapaxes(0, 1) for array in random_arrays(heads=3, len_q=L, len_k=L))
    calls = [([0, 5, 12], None), (np.array([0, 3, 12]), None), ([0, 5, 12], [0, 6, 12])]
    expected = [fastattn.varlen_attention(query, key, value, *starts) for starts in calls]
    assert not np.array_equal(expected[0], expected[1]) and not np.array_equal(expected[0], expected[2])
    no_general_path()
    for starts, wanted in zip(calls, expected, strict=True):
        assert_same_bits(fastattn.varlen_attention(query, key, value, *starts), wanted)


def test_varlen_attention_is_prepared_for_its_options(no_general_path):
    """The later call has other values in its arrays, and another seed."""
    query, key, value = (array.swapaxes(0, 1) for array in random_arrays(heads=3, len_q=L, len_k=L))
    rng = np.random.default_rng(2)
    arrays = [{"mask": rng.random((3, L, L)) < 0.6, "bias": rng.standard_normal((L, L))} for _ in range(2)]
    arrays[1]["mask"] = masks.Dense(arrays[1]["mask"])  # which stands for its array
    mask = masks.NotSelf() | masks.Window(1, 1)
    objects = [{"mask": mask, "dropout": 0.3, "seed": seed, "return_weights": True} for seed in (1, 2)]

    def call(options, starts=(0, 5, L), **more):
        return fastattn.varlen_attention(query, key, value, list(starts), return_lse=True, **options, **more)

    expected = [call(later, backend="reference") for _, later in (arrays, objects)]
    for first, _ in (arrays, objects):
        for starts in ((0, 5, L), (0, 3, L), (0, 5, 9, L)):
            call(first, starts)
    no_general_path()
    for (_, later), wanted in zip((arrays, objects), expected, strict=True):
        for x, y in zip(call(later), wanted, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


@on_compiled
def test_out_is_prepared_where_it_overlaps_nothing(engine, no_general_path):
    query, key, value = random_arrays(lead=(2,), heads=3, len_q=L, len_k=L, head_dim=8, value_dim=8)
    expected = engine.attention(query, key, value)
    for out in (np.empty_like(expected), np.empty((2, 3, L, 16), np.float32)[..., ::2]):
        for _ in range(2):
            assert engine.attention(query, key, value, out=out) is out
            assert_same_bits(np.ascontiguousarray(out), expected)
    # An overlap after a call of the same signature without one.
    inplace = query.copy()
    assert_same_bits(engine.attention(inplace, key, value, out=inplace), expected)
    no_general_path()
    engine.attention(query, key, value, out=np.empty_like(expected))
    with pytest.raises(pytest.fail.Exception):
        engine.attention(query, key, value, out=query)


SLOPE, TABLE = 0.25, np.arange(40.0)


def plain_mod(score, b, h, q_idx, kv_idx):
    return score + (kv_idx - q_idx)


def global_mod(score, b, h, q_idx, kv_idx):
    return score * SLOPE + TABLE[kv_idx]


def aux_mod(score, b, h, q_idx, kv_idx, table, factor):
    return score + table[h, kv_idx] * factor


def number_mask(b, h, q_idx, kv_idx):
    return kv_idx - q_idx < 8 * SLOPE


def array_mask(b, h, q_idx, kv_idx):
    return TABLE[kv_idx] <= q_idx


FLEX = {
    "neither": {},
    "score_mod": {"score_mod": plain_mod},
    "globals": {"score_mod": global_mod},
    "aux": {"score_mod": aux_mod, "aux": (np.arange(60.0).reshape(3, 20), 0.5)},
    "mask_mod": {"mask_mod": number_mask},
    "both": {"score_mod": global_mod, "mask_mod": number_mask},
    "block_mask": {"score_mod": plain_mod, "block_mask": masks.Causal("top_left")},
    "mask": {"score_mod": plain_mod, "mask": NUMBERS.random((L, S)) > 0.5},
    "two_masks": {"block_mask": masks.Causal("top_left"), "mask": masks.Window(3, 3)},
    "out": {"score_mod": plain_mod, "out": np.empty((2, 3, L, 8), np.float32)},
    "options": {"score_mod": plain_mod, "causal": "top_left", "key_lengths": [4, 9], "return_lse": True},
}


@on_compiled
@pytest.mark.parametrize("name", FLEX)
def test_flex_attention_is_prepared(engine, no_general_path, name):
    arrays = random_arrays(lead=(2,), heads=3, len_q=L, len_k=S, head_dim=8, value_dim=8)
    attend = partial(fastattn.flex_attention, *arrays, backend=engine.backend, **FLEX[name])
    expected = [result.copy() for result in results_of(attend())]
    no_general_path()
    assert_all_same(results_of(attend()), expected)


@on_compiled
def test_what_functions_read_is_read_at_each_call(engine, no_general_path, monkeypatch):
    arrays = random_arrays(lead=(2,), heads=3, len_q=L, len_k=S)
    attend = partial(fastattn.flex_attention, *arrays, backend=engine.backend)
    aux = np.random.default_rng(0).standard_normal((3, S))
    attend(score_mod=aux_mod, aux=(np.zeros((3, S)), 0.5))
    attend(score_mod=global_mod)
    no_general_path()
    biased = attend(score_mod=aux_mod, aux=(aux, 2.0))
    assert_attention((biased,), *arrays, bias=2.0 * aux[:, None])
    monkeypatch.setitem(globals(), "SLOPE", 0.5)
    monkeypatch.setitem(globals(), "TABLE", -TABLE)
    got = attend(score_mod=global_mod)
    scale = 0.5 / np.sqrt(arrays[0].shape[-1])
    monkeypatch.undo()
    assert_attention((got,), *arrays, scale=scale, bias=-TABLE[None, :S])


@on_compiled
def test_a_mask_function_is_evaluated_for_what_it_reads(engine, monkeypatch):
    """Numbers are part of the signature; where it reads an array, the function is evaluated at each call."""
    arrays = random_arrays(lead=(2,), heads=3, len_q=L, len_k=S)
    attend = partial(fastattn.flex_attention, *arrays, backend=engine.backend)
    query, key = np.ogrid[:L, :S]
    for _ in range(2):
        assert_same_bits(attend(mask_mod=number_mask), engine.attention(*arrays, mask=key - query < 2))
        assert_same_bits(attend(mask_mod=array_mask), engine.attention(*arrays, mask=key <= query))
    monkeypatch.setitem(globals(), "SLOPE", 0.5)
    assert_same_bits(attend(mask_mod=number_mask), engine.attention(*arrays, mask=key - query < 4))
    monkeypatch.setitem(globals(), "TABLE", TABLE[::-1].copy())
    assert_same_bits(attend(mask_mod=array_mask), engine.attention(*arrays, mask=39 - key <= query))
    TABLE[:] = 0
    assert_same_bits(attend(mask_mod=array_mask), engine.attention(*arrays))


@on_compiled
def test_out_that_functions_read(engine):
    """As aux or captured, after a call of the same signature without an overlap."""
    arrays = random_arrays(heads=3, len_q=L, len_k=S, value_dim=S, dtype=np.float64)
    table = np.random.default_rng(1).standard_normal((3, L, S))

    def captured_mod(score, b, h, q_idx, kv_idx):
        return score + table[h, q_idx, kv_idx]

    def given_mod(score, b, h, q_idx, kv_idx, table):
        return score + table[h, q_idx, kv_idx]

    attend = partial(fastattn.flex_attention, *arrays, backend=engine.backend)
    expected = attend(score_mod=captured_mod)
    before = table.copy()
    for options in ({"score_mod": captured_mod}, {"score_mod": given_mod, "aux": (table,)}):
        attend(**options, out=np.empty_like(table))
        assert_same_bits(attend(**options, out=table), expected)
        table[:] = before


@pytest.mark.parametrize("lengths", [[21, 3], [4, -1], [2**40, 1]])
def test_lengths_are_checked_at_each_call(engine, lengths):
    arrays = random_arrays(lead=(2,), heads=3, len_q=L, len_k=S)
    engine.attention(*arrays, key_lengths=np.array([4, 3]))
    with pytest.raises(ValueError, match=r"^key_lengths must be in 0\.\.S=20, got -?\d+; "):
        engine.attention(*arrays, key_lengths=np.array(lengths))
    with pytest.raises(TypeError, match=r"^key_lengths must be integers, got dtype float64"):
        engine.attention(*arrays, key_lengths=np.array([4.0, 3.0]))


def test_lengths_of_any_layout(engine):
    """Their strides are no part of a signature: rows of items, then the same numbers column by column."""
    arrays = random_arrays(lead=(2, 3), heads=2, len_q=L, len_k=S)
    lengths = np.arange(3, 9).reshape(2, 3)
    expected = [engine.attention(*arrays, key_lengths=lengths[::step]) for step in (1, -1)]
    for given in (lengths, np.asfortranarray(lengths), lengths.astype(np.int32, order="F")):
        for step, wanted in zip((1, -1), expected, strict=True):
            assert_same_bits(engine.attention(*arrays, key_lengths=given[::step]), wanted)


def test_out_is_checked_at_each_call(engine):
    arrays = random_arrays(lead=(2,), heads=3)
    out = np.empty_like(engine.attention(*arrays))
    engine.attention(*arrays, out=out)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out must be writeable"):
        engine.attention(*arrays, out=out)


def test_what_is_written_into_a_mask_is_seen(engine):
    """Of an array, of `Dense`, which does not copy it, and of a mask made of that."""
    arrays = random_arrays(lead=(2,), heads=3, len_q=L, len_k=S)
    allowed = np.ones((L, S), bool)
    for mask in (allowed, masks.Dense(allowed), masks.Dense(allowed) | masks.Dense(allowed)):
        allowed[:] = True
        before = engine.attention(*arrays, mask=mask)
        allowed[:, 5:] = False
        after = engine.attention(*arrays, mask=mask)
        assert not np.array_equal(before, after)
        expected = engine.attention(arrays[0], *(array[..., :5, :] for array in arrays[1:]))
        np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-6)


def test_the_number_of_calls_that_are_kept_is_bounded(monkeypatch):
    prepared._calls.clear()
    arrays = random_arrays()
    for number in range(prepared.MAX_CALLS + 20):
        fastattn.attention(*arrays, scale=1.0 + number)
    assert len(prepared._calls) == prepared.MAX_CALLS
    wide = masks.Segments(np.arange(200_000) // 7)  # two numbers for each query
    query = np.zeros((1, 200_000, 1), np.float32)
    kept = len(prepared._calls)
    fastattn.attention(query, query[:, :4], query[:, :4], mask=masks.Segments(wide.q_ids, wide.q_ids[:4]))
    assert len(prepared._calls) == kept


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("head_dim", [16, 512], ids=["small", "large"])
@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in LEFT_TO_PYTHON])
def test_plain_calls_are_recalled(monkeypatch, name, head_dim, layout):
    """The next call runs compiled code alone, on what the arrays are by then, and makes new results."""
    pytest.importorskip("fastattn.backends.cython.driver")
    arrays = random_arrays(lead=(2,), heads=3, len_q=L, len_k=S, head_dim=head_dim)
    if layout == "bshd":
        arrays = [np.ascontiguousarray(array.swapaxes(-3, -2)) for array in arrays]
    attend = partial(fastattn.attention, *arrays, **OPTIONS[name], layout=layout, backend="cython")
    prepared._calls.clear()
    out = np.empty_like(arrays[0])
    into = results_of(attend(out=out))[0]
    first = results_of(attend())
    general, wanted = [result.copy() for result in first], results_of(attend())
    monkeypatch.setattr("fastattn._api.attention.reuse", lambda *_: pytest.fail("this call was not recalled"))
    second = results_of(attend())
    into[...] = np.nan
    assert results_of(attend(out=out))[0] is into is out
    assert_same_bits(out, second[0])
    for results in zip(second, general, wanted, first, strict=True):
        got, *others = results
        assert got.flags.c_contiguous and got.flags.writeable and got.flags.owndata
        assert not any(np.may_share_memory(got, other) for other in others)
        for other in others:
            assert_same_bits(got, other)
    arrays[1][:] *= 2
    changed = results_of(attend())
    assert not np.array_equal(changed[0], second[0])
    monkeypatch.undo()
    assert_all_same(changed, results_of(attend(num_threads=7)))


@on_compiled
@pytest.mark.parametrize("name", ["query", "key", "value", "mask", "bias", "sinks"])
def test_out_over_what_is_read(engine, name):
    """After a call of the same signature whose `out` overlaps nothing."""
    query, key, value = random_arrays(heads=3, len_q=L, len_k=S, value_dim=24)
    bias = np.random.default_rng(1).standard_normal((L, S), np.float32)
    mask, sinks = np.tri(L, S, 8, bool), np.ones(3, np.float32)
    given = {"query": query, "key": key, "value": value, "mask": mask, "bias": bias, "sinks": sinks}
    expected = engine.attention(**given)
    assert_same_bits(engine.attention(**given, out=np.empty_like(expected)), expected)
    nbytes = given[name].nbytes
    memory = np.empty(expected.nbytes + 2 * nbytes, np.uint8)
    out = memory[nbytes : nbytes + expected.nbytes].view(np.float32).reshape(expected.shape)
    for start in (4, nbytes, expected.nbytes + nbytes - 4):  # over its start, its first bytes and its last
        read = memory[start : start + nbytes].view(given[name].dtype).reshape(given[name].shape)
        read[...] = given[name]
        assert_same_bits(engine.attention(**given | {name: read}, out=out), expected)


def test_the_oldest_plain_call_is_forgotten():
    pytest.importorskip("fastattn.backends.cython.driver")
    arrays = random_arrays()

    def recalled(number):
        answer = prepared.recall(prepared.ATTENTION, *arrays, {"scale": 3.0 + number}, "cython")
        return type(answer) is not bytes

    for number in range(prepared.MAX_CALLS + 1):
        assert not recalled(number)
        fastattn.attention(*arrays, scale=3.0 + number, backend="cython")
        assert recalled(number)
    assert not recalled(0) and recalled(1)


def test_threads_are_determined_at_each_call(engine, monkeypatch):
    """As `set_num_threads` and a limit on OpenMP may change between two calls."""
    arrays = random_arrays(heads=8, len_q=200, len_k=200)
    expected = engine.attention(*arrays)
    for count in (1, 3, 2, 1):
        monkeypatch.setattr("fastattn._machine.host._num_threads", count)
        assert_same_bits(engine.attention(*arrays), expected)


@pytest.mark.parametrize("out", [False, True], ids=["new", "out"])
@pytest.mark.parametrize("length", [5, 300], ids=["small", "large"])
def test_a_prepared_call_reads_its_seed(length, out):
    """One call serves all seeds, and what it drops is what `dropout_mask` says of its own."""
    pytest.importorskip("fastattn.backends.cython.driver")
    arrays = random_arrays(lead=(2,), heads=3, len_q=length, len_k=length)
    shape = (2, 3, length, length)
    kept = {}
    for seed in (0, 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64 + 1, 2**127, 2**128 - 1):
        options = {"dropout": 0.5, "seed": seed, "return_weights": True, "backend": "cython"}
        if out:
            options["out"] = np.empty_like(arrays[0])
        before = len(prepared._calls)
        weights = [fastattn.attention(*arrays, **options)[1] for _ in range(2)]
        assert len(prepared._calls) <= before + (not kept)
        kept[seed] = fastattn.dropout_mask(shape, 0.5, seed)
        for found in weights:
            np.testing.assert_array_equal(found != 0, kept[seed])
    for wrong, error in ((-1, ValueError), (2**128, ValueError), ("1", TypeError), (None, ValueError)):
        with pytest.raises(error, match="seed"):
            fastattn.attention(*arrays, **options | {"seed": wrong})


def test_the_compiled_driver_reads_the_record_as_it_is_written():
    """It was built for these fields and arrays; `declarations.py` writes them down for it."""
    driver = pytest.importorskip("fastattn.backends.cython.driver")
    assert driver.RECORD.split() == [*record.FIELDS, *record.VIEWS]


def signatures():
    """Arguments of a signature, most of which differ from the first in one thing."""
    x, y = np.zeros((2, 3, 5, 4), np.float32), np.zeros((2, 3, 7, 4), np.float32)
    lengths, mask, bias = np.array([3, 7]), np.ones((5, 7), bool), np.zeros((5, 7), np.float32)
    plain = {"function": 0, "query": x, "key": y, "value": y, "backend": None, "token": 0}
    read_only = np.zeros_like(x)
    read_only.flags.writeable = False
    changes = [
        {}, {"function": 1}, {"query": x.copy()}, {"query": x.astype(np.float64)}, {"query": x[:1]},
        {"query": x[..., ::-1]}, {"query": x[0]}, {"key": y.astype(">f4")}, {"value": y.swapaxes(1, 2)},
        {"mask": mask}, {"mask": mask.copy()}, {"mask": mask.astype(np.int8)}, {"bias": bias},
        {"bias": bias.astype(np.float16)}, {"bias": mask}, {"sinks": np.zeros(3, np.float32)}, {"out": x},
        {"out": read_only}, {"causal": True}, {"causal": "top_left"}, {"causal": "bottom_right"},
        {"causal": "left"}, {"causal": 1}, {"window": (1, 2)}, {"window": (2, 1)}, {"window": (None, 1)},
        {"window": (1, None)}, {"window": [1, 2]}, {"window": (1, 2, 3)}, {"key_lengths": lengths},
        {"key_lengths": lengths + 1}, {"key_lengths": lengths.astype(np.int32)}, {"key_lengths": [3, 7]},
        {"key_lengths": lengths[:1]}, {"scale": 1.0}, {"scale": 1}, {"scale": 0.5},
        {"scale": np.float64(0.5)}, {"scale": np.float32(0.5)}, {"scale": "1"}, {"softcap": 1.0},
        {"softcap": 0.5}, {"layout": "bshd"},
        {"layout": "shbd"}, {"layout": None}, {"return_lse": True}, {"return_lse": 1},
        {"return_weights": True}, {"return_weights": "mean"}, {"num_threads": 1}, {"num_threads": 2},
        {"num_threads": True}, {"num_threads": "2"},
        {"backend": "numba"}, {"backend": "reference"}, {"backend": "none"}, {"backend": 3},
        {"token": 1}, {"dropout": 0.0}, {"dropout": 0}, {"dropout": 0.5}, {"dropout": False}, {"seed": 0},
        {"seed": 1}, {"seed": 2**64}, {"seed": 2**128 - 1}, {"seed": 2**128}, {"seed": -1}, {"seed": True},
        {"seed": 1.0}, {"nothing": 1},
    ]  # fmt: skip
    return [
        (
            *({**plain, **change}[name] for name in ("function", "query", "key", "value")),
            {name: x for name, x in change.items() if name not in plain or name == "backend"},
            None,
            change.get("token", 0),
        )
        for change in changes
    ]


def test_both_signatures_tell_the_same_calls_apart():
    """The compiled one and the one where there is no extension."""
    driver = pytest.importorskip("fastattn.backends.cython.driver")
    compiled, plain = (
        [make(*given) for given in signatures()] for make in (driver.signature, signature.signature)
    )
    assert [a is None for a in compiled] == [b is None for b in plain]
    for n, (a, b) in enumerate(zip(compiled, plain, strict=True)):
        for m in range(n):
            assert (a == compiled[m]) == (b == plain[m]), (n, m)


def test_an_array_beside_a_large_mask_of_a_function():
    """Such a call is not kept, and its array is no key of anything."""
    pytest.importorskip("numba")
    x = random_arrays(len_q=1500, len_k=1500, head_dim=8)[0]
    rows = np.arange(1500)
    array = np.ones((1500, 1500), bool)
    array[:, 7] = False

    def scattered(b, h, q_idx, kv_idx):
        return (q_idx * 7 + kv_idx * 3) % 5 > 1

    before = len(prepared._calls)
    got = fastattn.flex_attention(x, x, x, mask_mod=scattered, block_mask=masks.Dense(array))
    allowed = array & ((rows[:, None] * 7 + rows * 3) % 5 > 1)
    np.testing.assert_allclose(got, fastattn.attention(x, x, x, mask=allowed), rtol=1e-5, atol=1e-6)
    assert len(prepared._calls) <= before + 1
