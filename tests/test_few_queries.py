"""Split-KV: few query rows over many keys, see ``fastattn/backends/cython/splitkv.pxi``.

The keys are cut into key tiles of 256, which threads share; their partial results are merged in a binary
tree. So the sizes here are around whole key tiles and on both sides of the limit of few rows, and some key
tiles are fully masked.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from hypothesis import strategies as st

import fastattn
from fastattn import dropout_mask, masks
from fastattn._call.schedule import Target, make_schedule
from fastattn._machine.constants import BLOCK_K, FEW_ROWS, PIECE_ROWS, PIECE_TILES, UNCACHED_NBYTES
from fastattn.backends.cython import backend as cython_backend
from tests import naive
from tests.cases import FLOATS, MEMORY_LAYOUTS, Case, few_rows, problem_of, random_arrays, solve
from tests.conftest import drawn, on_compiled, on_cython
from tests.test_options_hypothesis import problems
from tests.tolerances import assert_all_same, assert_answer, assert_attention, assert_same_bits

#: Around one key tile and two, and trees that are not full.
LENGTHS = (1, 2, 63, 64, 65, 255, 256, 257, 511, 512, 513, 769, 1025, 2049)
#: Few rows are at most `FEW_ROWS`, or fewer than a vector has lanes, which is at most this; those of a group
#: also exactly as many.
MOST_ROWS = 16
LONG_Q = 19  #: queries of the sweep, whatever the instruction set
COLUMNS = 40  #: head_dim and value_dim of `many_key_tiles` together


def many_key_tiles(dtype="float32", *, heads=2, kv_heads=1, len_q=3, len_k=2500, lead=(1,)):
    """A problem with so many keys that threads share the key tiles of one head."""
    arrays = random_arrays(
        len_k,
        lead=lead,
        heads=heads,
        kv_heads=kv_heads,
        len_q=len_q,
        len_k=len_k,
        head_dim=17,
        value_dim=COLUMNS - 17,
        dtype=dtype,
    )
    return arrays


def schedule_of(len_q, len_k, lanes, heads=1, num_threads=3, **target):
    """The schedule of one key/value head."""
    columns = {"head_dim": 17, "value_dim": COLUMNS - 17}
    arrays = random_arrays(heads=heads, kv_heads=1, len_q=len_q, len_k=len_k, **columns)
    return make_schedule(problem_of(*arrays), Target(lanes, 3, 8, **target), num_threads)


def rows_of_path(path, dtype):
    """The least and the most rows here of split-KV, or of the sweep with pieces."""
    return (1, few_rows(dtype)) if path == "split-KV" else (MOST_ROWS + 1, 2 * MOST_ROWS + 5)


def test_the_shapes_of_this_file_use_split_kv():
    """Rows on both sides of the limit, and one call whose keys are many tasks."""
    for lanes, most in ((2, FEW_ROWS), (8, FEW_ROWS), (16, 15)):
        assert schedule_of(most, 2500, lanes).uses_split_kv
        assert not schedule_of(most + 1, 2500, lanes).uses_split_kv
    for len_k in (1, 100_000):  # the number of keys does not decide
        assert schedule_of(1, len_k, 16, heads=16).uses_split_kv
        assert schedule_of(8, len_k, 16, heads=2).uses_split_kv
        assert not schedule_of(16, len_k, 16).uses_split_kv
        assert not schedule_of(1, len_k, 16, heads=17).uses_split_kv
    schedule = schedule_of(6, 2500, 4)
    assert schedule.num_threads == 3
    assert schedule.block_k == BLOCK_K == 256
    assert schedule.n_splits == schedule.n_tasks == 10
    assert schedule_of(5, 2500, 8, few_rows=5).uses_split_kv
    assert not schedule_of(6, 2500, 8, few_rows=5).uses_split_kv


def test_pieces_depend_on_rows_alone():
    """Tasks share the pieces of few query blocks; neither threads nor keys decide what a piece is."""
    for len_k, n_splits in ((100, 1), (1024, 1), (1025, 2), (5000, 5)):
        schedule = schedule_of(17, len_k, 8, has_pieces=True)
        assert schedule.piece_tiles == PIECE_TILES
        assert schedule.n_splits == n_splits
        assert schedule.n_tasks == n_splits * schedule.n_blocks
    assert schedule_of(PIECE_ROWS, 5000, 8, has_pieces=True).piece_tiles == PIECE_TILES
    assert schedule_of(PIECE_ROWS + 1, 5000, 8, has_pieces=True).n_splits == 1
    assert schedule_of(17, 5000, 8, has_pieces=True, num_threads=1).n_splits == 1


# ---------------------------------------------------------------- the definition


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("len_k", LENGTHS)
def test_lengths(engine, len_k, dtype):
    case = Case("lengths", heads=3, kv_heads=1, len_q=2, len_k=len_k, head_dim=33, value_dim=19, dtype=dtype)
    solved = solve(case)
    assert_answer(engine.everything(*solved.arrays, num_threads=2), solved.exact, solved.plain)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", range(1, MOST_ROWS + 3))
@pytest.mark.parametrize("kind", ["queries", "group", "both"])
def test_rows(engine, kind, rows, dtype):
    """Queries, the heads of a group, or both: rows of one key/value head, in each number on both sides."""
    heads, len_q = {"queries": (1, rows), "group": (rows, 1), "both": (2, (rows + 1) // 2)}[kind]
    case = Case(
        kind,
        lead=(2,),
        heads=heads,
        kv_heads=1,
        len_q=len_q,
        len_k=300,
        head_dim=7,
        value_dim=33,
        dtype=dtype,
    )
    solved = solve(case)
    assert_answer(engine.everything(*solved.arrays), solved.exact, solved.plain)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "dims", [(1, 1), (3, 130), (128, 1), (65, 64), (16, 257), (257, 16), (8, 0)], ids=str
)
def test_columns(engine, dims, dtype):
    head_dim, value_dim = dims
    case = Case(
        "columns",
        heads=5,
        kv_heads=1,
        len_q=1,
        len_k=259,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=dtype,
    )
    solved = solve(case)
    assert_answer(engine.everything(*solved.arrays), solved.exact, solved.plain)


LEN_Q, LEN_K, HEADS = 3, 700, 4


@lru_cache(maxsize=1)
def options():
    """Each option alone, and those that meet in one kernel.

    "ours" is what the package is given as a mask where the definition is given its array.
    """
    rng = np.random.default_rng(3)
    full = (2, HEADS, LEN_Q, LEN_K)
    bias = rng.standard_normal(full)
    holes = np.where(rng.random(full) < 0.3, -np.inf, bias)
    allowed = rng.random((LEN_Q, LEN_K)) < 0.5
    one_masked = np.ones((LEN_Q, LEN_K), bool)
    one_masked[:, BLOCK_K : 2 * BLOCK_K] = False
    ragged = one_masked.copy()
    ragged[1] = ~one_masked[1]  # a row with one key tile, beside rows with the others
    j, shift = np.arange(LEN_K), LEN_K - LEN_Q + np.arange(LEN_Q)[:, None]
    anchored = ((shift - 300 <= j) & (j <= shift)) | (j == 5) | (shift == 5)
    return {
        "plain": {},
        "causal_top_left": {"causal": "top_left"},
        "causal_bottom_right": {"causal": "bottom_right"},
        "window": {"window": (300, 0)},
        "window_one_key_tile": {"window": (100, None), "causal": "bottom_right"},
        "lengths": {"key_lengths": np.array([0, 513])},
        "lengths_causal": {"key_lengths": np.array([257, 2]), "causal": "bottom_right"},
        "mask": {"mask": allowed},
        "mask_per_head": {"mask": rng.random(full) < 0.5},
        "masked_key_tile": {"mask": one_masked},
        "masked_key_tile_of_some_rows": {"mask": ragged},
        "nothing": {"mask": np.zeros(LEN_K, bool)},
        "tiles": {"mask": anchored, "ours": masks.Window(300, 0) | masks.GlobalTokens([5])},
        "tiles_dense": {"mask": allowed & one_masked, "ours": masks.Dense(allowed) & masks.Dense(one_masked)},
        "bias": {"bias": bias},
        "bias_float16": {"bias": bias[1].astype(np.float16)},
        "bias_float32": {"bias": bias[:, :1, :1].astype(np.float32)},
        "bias_strided": {"bias": MEMORY_LAYOUTS["every_other"](bias[0, 0])},
        "bias_swapped": {"bias": MEMORY_LAYOUTS["byte_swapped"](bias[0, 0])},
        "bias_reversed": {"bias": MEMORY_LAYOUTS["reversed"](bias)},
        "bias_with_holes": {"bias": holes, "mask": allowed},
        "softcap": {"softcap": 2.0},
        "softcap_bias_mask": {"softcap": 2.0, "bias": bias, "mask": ragged},
        "sinks": {"sinks": rng.standard_normal(HEADS)},
        "sinks_alone": {"sinks": rng.standard_normal(HEADS), "key_lengths": np.array([0, 0])},
        "sinks_above_all": {"sinks": np.full(HEADS, 60.0), "mask": one_masked},
        "everything": {
            "causal": "bottom_right",
            "window": (600, None),
            "key_lengths": np.array([260, 700]),
            "mask": ragged,
            "bias": holes,
            "softcap": 3.0,
            "sinks": rng.standard_normal(HEADS),
            "scale": 0.5,
        },
    }


def options_for_both(name):
    """For the package, and for the definition."""
    theirs = dict(options()[name])
    ours = theirs | ({"mask": theirs.pop("ours")} if "ours" in theirs else {})
    ours.pop("ours", None)
    return ours, theirs


OPTION_NAMES = tuple(options())


@lru_cache(maxsize=64)
def solved_options(name, dtype):
    arrays = random_arrays(
        5, lead=(2,), heads=HEADS, kv_heads=2, len_q=LEN_Q, len_k=LEN_K, head_dim=9, value_dim=21, dtype=dtype
    )
    theirs = options_for_both(name)[1]
    return arrays, naive.attention(*arrays, **theirs), naive.formula(*arrays, **theirs)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", OPTION_NAMES)
def test_options(engine, name, dtype):
    arrays, exact, plain = solved_options(name, dtype)
    ours = options_for_both(name)[0]
    results = engine.everything(*arrays, **ours)
    assert_answer(results, exact, plain)
    out = np.full((*results[0].shape[:-1], 2 * results[0].shape[-1]), 7.0, dtype)[..., ::-2]
    engine.attention(*arrays, num_threads=1, out=out, **ours)
    assert_same_bits(np.ascontiguousarray(out), results[0])
    swapped = [array.swapaxes(1, 2) for array in arrays]
    assert_same_bits(engine.attention(*swapped, layout="bshd", **ours).swapaxes(1, 2), results[0])


@st.composite
def few_row_problems(draw):
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, MOST_ROWS + 1))
    return {
        "lead": (draw(st.integers(1, 2)),),
        "heads": kv_heads * group,
        "kv_heads": kv_heads,
        "len_q": draw(st.integers(1, (MOST_ROWS + 1) // group)),
        "len_k": draw(st.one_of(st.sampled_from([255, 256, 257, 511, 513, 770]), st.integers(1, 600))),
        "head_dim": draw(st.integers(1, 33)),
        "value_dim": draw(st.integers(1, 33)),
    }


@drawn(12, 50, problem=problems(few_row_problems()), num_threads=st.sampled_from([1, 2, 3]))
def test_all_options_together(engine, problem, num_threads):
    arrays, ours, theirs = problem
    assert_attention(engine.everything(*arrays, num_threads=num_threads, **ours), *arrays, **theirs)


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", MEMORY_LAYOUTS)
def test_anywhere_in_memory(engine, layout, dtype):
    """Keys and values with gaps between elements are copied key tile by key tile, each by itself."""
    arrays = dict(zip(("query", "key", "value"), many_key_tiles(dtype, len_k=600), strict=True))
    expected = engine.everything(**arrays, causal="bottom_right")
    for name in arrays:
        moved = arrays | {name: MEMORY_LAYOUTS[layout](arrays[name])}
        assert_all_same(engine.everything(**moved, causal="bottom_right"), expected)
    moved = {name: MEMORY_LAYOUTS[layout](array) for name, array in arrays.items()}
    assert_all_same(engine.everything(**moved, causal="bottom_right"), expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", ["last_axis_slow", "reversed", "every_other"])
def test_copies_of_poisoned_key_tiles(engine, layout, dtype):
    """Copied values with NaN at masked keys, which take the nonfinite-safe kernels."""
    query, key, value = many_key_tiles(dtype, len_k=600)
    value[..., [0, 300, 599], :] = np.nan
    mask = np.ones((3, 600), bool)
    mask[1, [0, 300, 599]] = False
    expected = engine.everything(query, key, value, mask=mask)
    moved = MEMORY_LAYOUTS[layout]
    assert_all_same(engine.everything(query, moved(key), moved(value), mask=mask), expected)
    assert np.isfinite(expected[0][..., 1, :]).all()


THREAD_OPTIONS = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (1100, 0)},
    "lengths": {"key_lengths": np.array([1500])},
    "mask": {"mask": np.random.default_rng(0).random((LONG_Q, 2500)) < 0.6},
    "one_key_tile": {"mask": np.arange(2500) // 256 == 7},
    "every_other_key_tile": {"mask": np.arange(2500) // 256 % 2 == 0},
    "some_key_tiles_of_some_rows": {"mask": np.arange(2500) // 256 % 3 != np.arange(LONG_Q)[:, None] % 3},
    "nothing": {"mask": np.zeros(2500, bool)},
    "tiles": {"mask": masks.Window(600, 0) | masks.GlobalTokens([0])},
    "bias": {"bias": np.random.default_rng(0).standard_normal((LONG_Q, 2500)).astype(np.float16)},
    "sinks": {"sinks": np.array([0.5, -1.0]), "softcap": 4.0},
    "sinks_alone": {"sinks": np.array([0.5, -1.0]), "mask": np.zeros(2500, bool)},
}


def thread_options(option, len_q):
    """For as many queries: arrays are of the most."""
    return {
        name: x[:len_q] if np.shape(x)[:1] == (LONG_Q,) else x for name, x in THREAD_OPTIONS[option].items()
    }


def thread_arrays(len_q, dtype="float32", **sizes):
    """Values of one column whose sums overflow: they are computed again."""
    query, key, value = many_key_tiles(dtype, len_q=len_q, **sizes)
    value[..., 3] = np.finfo(dtype).max * np.sign(value[..., 3])
    return query, key, value


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("option", THREAD_OPTIONS)
@pytest.mark.parametrize(("len_q", "heads"), [(2, 1), (2, 2), (LONG_Q, 1)])
def test_number_of_threads(engine, len_q, heads, option, dtype):
    """With more threads a task has fewer key tiles, or pieces."""
    arrays, options = thread_arrays(len_q, dtype, heads=2, kv_heads=heads), thread_options(option, len_q)
    one = engine.everything(*arrays, num_threads=1, **options)
    for num_threads in (2, 3, 5, 16):
        assert_all_same(engine.everything(*arrays, num_threads=num_threads, **options), one)
    assert_same_bits(engine.attention(*arrays, num_threads=3, **options), one[0], "out alone")
    assert np.isfinite(one[0]).all()
    if option != "tiles":
        with np.errstate(over="ignore"):  # of the formula
            assert_attention(one, *arrays, **options)


@on_cython
@pytest.mark.parametrize("len_q", [2, LONG_Q])
def test_dropout(engine, len_q):
    """Which weights are dropped depends on the keys' places, not on their tiles and pieces."""
    query, key, value = many_key_tiles(len_q=len_q)
    kept = dropout_mask((1, 2, len_q, 2500), 0.3, 5)
    whole = engine.attention(query, key, value, return_weights=True)[1].astype(np.longdouble)
    out, weights = engine.attention(
        query, key, value, return_weights=True, dropout=0.3, seed=5, num_threads=3
    )
    np.testing.assert_allclose(
        weights, np.where(kept, whole / (1 - round(0.3 * 65536) / 65536), 0), rtol=1e-5
    )
    np.testing.assert_allclose(out, weights.astype(np.longdouble) @ value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("option", THREAD_OPTIONS)
@pytest.mark.parametrize("len_q", [2, LONG_Q])
def test_other_items_of_the_batch(engine, len_q, option):
    """With more items in the batch the keys of each are split into fewer tasks, finally into one."""
    arrays, options = thread_arrays(len_q, lead=(9,)), thread_options(option, len_q)
    together = engine.everything(*arrays, num_threads=3, **options)
    for item in (0, 8):
        alone = engine.everything(*(array[item : item + 1] for array in arrays), num_threads=3, **options)
        assert_all_same([got[item : item + 1] for got in together], alone)


@pytest.mark.parametrize("spoilt", [False, True], ids=["finite", "nonfinite"])
@pytest.mark.parametrize("len_q", [2, 5], ids=["split-KV", "pieces"])
def test_again_and_again(engine, len_q, spoilt):
    """The thread that ends last writes the outputs: a race would show as a run that differs."""
    query, key, value = many_key_tiles(heads=8, kv_heads=2, len_q=len_q)
    if spoilt:
        value[..., 1300, 3] = np.nan
    first = engine.everything(query, key, value, causal="top_left", num_threads=1)
    for turn in range(40):
        options = {"causal": "top_left", "num_threads": 3 + turn % 3}
        assert_all_same(engine.everything(query, key, value, **options), first)


@on_compiled
@pytest.mark.parametrize("spoilt", [False, True], ids=["finite", "nonfinite"])
def test_many_heads_again_and_again(engine, spoilt):
    """The same without weights, over many heads that are all shared."""
    query, key, value = many_key_tiles(lead=(4,), len_q=2, len_k=1100)
    if spoilt:
        value[..., 600, :] = np.inf
        key[..., 700, :] = np.nan
    mask = np.ones((2, 1100), bool)
    mask[0, [600, 700]] = False
    first = engine.attention(query, key, value, mask=mask, num_threads=1)
    assert np.isfinite(first[..., 0, :]).all()
    for _ in range(200):
        assert_same_bits(engine.attention(query, key, value, mask=mask, num_threads=4), first)


@on_compiled
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("path", ["split-KV", "pieces"])
def test_a_row_alone_and_among_others(engine, path, dtype):
    """Its sums depend neither on the number of other rows, nor on key tiles that only those may attend."""
    rng = np.random.default_rng(0)
    (least, most), len_k = rows_of_path(path, dtype), 1100 if path == "split-KV" else 4200
    query, key, value = many_key_tiles(dtype, heads=1, len_q=most, len_k=len_k)
    mask = rng.random((most, len_k)) < 0.7
    j, piece = (
        np.arange(len_k),
        np.arange(len_k) // (BLOCK_K if path == "split-KV" else PIECE_TILES * BLOCK_K),
    )
    kept = (piece == 2, piece == 4, piece % 2 == 0, piece % 2 == 1, np.zeros(len_k, bool), j == 767)
    mask[: len(kept)] = kept[:most]
    bias = rng.standard_normal((most, len_k)).astype(dtype)
    together = engine.everything(query, key, value, mask=mask, bias=bias)
    for first in range(most - least + 1):
        for stop in {min(first + least + n, most) for n in (0, 1, 4)}:
            rows = slice(first, stop)
            alone = engine.everything(query[..., rows, :], key, value, mask=mask[rows], bias=bias[rows])
            for got, wanted in zip(alone, together, strict=True):
                assert_same_bits(got, wanted[:, :, rows], f"rows {first} to {stop}")


def test_as_many_rows_as_lanes(engine):
    """Those of a group use split-KV, as fewer do: each has the bits that it has alone."""
    case = Case("lanes", heads=16, kv_heads=1, len_q=1, len_k=2048, head_dim=128, value_dim=128)
    solved = solve(case)
    together = engine.everything(*solved.arrays)
    assert_answer(together, solved.exact, solved.plain)
    if cython_backend.driver.target(4)["lanes"] != 16 or engine.backend == "reference":
        return
    query, key, value = solved.arrays
    for head in (0, 7, 15):
        alone = engine.everything(query[:, head : head + 1], key, value)
        for got, wanted in zip(alone, together, strict=True):
            assert_same_bits(got, wanted[:, head : head + 1])


@on_cython  # the only one whose kernels prefetch
@pytest.mark.parametrize("dims", [(128, 128), pytest.param((64, 200), marks=pytest.mark.slow), (80, 64)],
                         ids="{0[0]},{0[1]}".format)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float16", "float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_rows_of_keys_from_memory(engine, dims, dtype):
    """Keys and values too large for a cache are prefetched, in another order for few rows than for more: each
    row has the bits that it has alone, and of 16-bit keys those of their float32 array."""
    len_k = UNCACHED_NBYTES // (2 * min(dims)) + 77
    query, key, value = random_arrays(
        heads=6, kv_heads=1, len_q=1, len_k=len_k, head_dim=dims[0], value_dim=dims[1], dtype=dtype
    )
    query = query.astype(np.result_type(query, np.float32))
    assert 0 not in make_schedule(problem_of(query, key, value), Target(16, 3, 8), 2).prefetch_rows
    alone = [engine.attention(query[head : head + 1], key, value) for head in range(6)]
    most = few_rows(query.dtype)
    for first, n in ((0, 2), (1, 3), (0, 4), (1, 5)):
        heads = slice(first, first + min(n, most))
        assert_same_bits(engine.attention(query[heads], key, value), np.concatenate(alone[heads]))
    upcast = [array.astype(query.dtype) for array in (key, value)]
    heads = slice(0, min(4, most))
    assert_same_bits(engine.attention(query[heads], *upcast), np.concatenate(alone[heads]))
    assert_attention(engine.everything(query[5:], *upcast), query[5:], *upcast)


@on_compiled
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_row_of_one_document_alone_and_among_others(engine, dtype):
    """The computed keys are those of all rows together; where they begin and end changes no partial sum."""
    _, most = rows_of_path("split-KV", dtype)
    most = min(most, 10)
    query, key, value = many_key_tiles(dtype, heads=1, len_q=most, len_k=1100)
    documents = np.searchsorted([5, 77, 95, 221, 300, 427, 591, 703, 1033], np.arange(1100), side="right")
    together = engine.everything(query, key, value, mask=masks.Segments(np.arange(most), documents))
    for first in range(most):
        for stop in range(first + 1, most + 1):
            rows = slice(first, stop)
            mask = masks.Segments(np.arange(most)[rows], documents)
            alone = engine.everything(query[..., rows, :], key, value, mask=mask)
            for got, wanted in zip(alone, together, strict=True):
                assert_same_bits(got, wanted[:, :, rows], f"rows {first} to {stop}")


@on_compiled
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("path", ["split-KV", "pieces"])
def test_a_head_alone_and_in_its_group(engine, path, dtype):
    least, most = rows_of_path(path, dtype)
    query, key, value = many_key_tiles(dtype, heads=most, len_q=1, len_k=1100)
    together = engine.everything(query, key, value, causal="bottom_right")
    for first, stop in ((0, least), (most - least, most), (0, most), (most // 3, most // 3 + least)):
        heads = slice(first, min(stop, most))
        alone = engine.everything(query[:, heads], key, value, causal="bottom_right")
        for got, wanted in zip(alone, together, strict=True):
            assert_same_bits(got, wanted[:, heads])


@on_compiled
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("option", ["plain", "causal", "window", "mask", "tiles", "bias", "sinks"])
def test_room_behind_the_keys(engine, option, dtype):
    """A cache with room for more keys, full of NaN: the tree over its key tiles changes no bit."""
    rng = np.random.default_rng(1)
    mask, bias = rng.random((3, 2600)) < 0.6, rng.standard_normal((2, 3, 2600)).astype(dtype)

    def options(len_k):
        return {
            "plain": {},
            "causal": {"causal": "bottom_right"},
            "window": {"window": (270, 1)},
            "mask": {"mask": mask[:, :len_k]},
            "tiles": {"mask": masks.Dense(mask[:, :len_k]) | masks.Causal(offset=300)},
            "bias": {"bias": bias[..., :len_k]},
            "sinks": {"sinks": np.array([0.5, -1.0]), "softcap": 4.0},
        }[option]

    for length in (0, 1, 31, 64, 255, 256, 257, 513, 770, 1025):
        query, key, value = many_key_tiles(dtype, len_k=length)
        expected = engine.everything(query, key, value, **options(length))
        for len_k in (length + 1, max(300, length + 64), max(600, length + 256), 2600):
            room = [np.full((1, 1, len_k, array.shape[-1]), np.nan, dtype) for array in (key, value)]
            room[0][..., :length, :], room[1][..., :length, :] = key, value
            results = engine.everything(query, *room, key_lengths=length, **options(len_k))
            weights = np.ascontiguousarray(results[2][..., :length])
            for got, wanted in zip((*results[:2], weights), expected, strict=True):
                assert_same_bits(got, wanted, f"{length} keys in room for {len_k}")
            assert not results[2][..., length:].any()


# ---------------------------------------------------------------- what may not be seen

PLACES = {"first": 3, "at_an_edge": 255, "behind_an_edge": 256, "middle": 1300, "last": 2499}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ["mask", "bias", "tiles", "sinks"])
@pytest.mark.parametrize("place", PLACES)
def test_poison_reaches_the_rows_that_read_it(engine, place, kind, dtype):
    """One key is masked for the middle row and read by the others, in one key tile of ten."""
    query, key, value = many_key_tiles(dtype)
    where = PLACES[place]
    allowed = np.random.default_rng(0).random((3, 2500)) < 0.9
    allowed[:, where] = [True, False, True]
    given_options = {
        "mask": {"mask": allowed},
        "bias": {"bias": np.where(allowed, 0.25, -np.inf)},
        "tiles": {"mask": masks.Dense(allowed) | masks.Dense(allowed)},
        "sinks": {"mask": allowed, "sinks": np.array([0.5, 9.0])},
    }[kind]
    clean = engine.everything(query, key, value, **given_options)
    for poison_key, poison_value in [(np.nan, 1.0), (0.0, np.nan), (0.0, np.inf), (np.inf, -np.inf)]:
        bad_key, bad_value = key.copy(), value.copy()
        bad_key[..., where, :] *= poison_key
        bad_value[..., where, 4] *= poison_value
        for num_threads in (1, 3):
            results = engine.everything(query, bad_key, bad_value, num_threads=num_threads, **given_options)
            for got, wanted in zip(results, clean, strict=True):
                assert_same_bits(got[:, :, 1], wanted[:, :, 1])
            if poison_key == 0:
                readers = results[0][:, :, ::2]
                assert not np.isfinite(readers[..., 4]).any()
                assert np.isfinite(np.delete(readers, 4, axis=-1)).all()
            elif np.isnan(poison_key):
                assert np.isnan(results[0][:, :, ::2]).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_key_tiles_that_no_row_may_see(engine, number, dtype):
    """Whole key tiles in the middle, and some keys of the next."""
    query, key, value = many_key_tiles(dtype)
    hidden = slice(500, 1400)
    mask = np.ones(2500, bool)
    mask[hidden] = False
    clean = engine.everything(query, key, value, mask=mask)
    key[..., hidden, :], value[..., hidden, :] = number, -number
    for num_threads in (1, 3):
        assert_all_same(engine.everything(query, key, value, mask=mask, num_threads=num_threads), clean)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sinks", [None, np.array([0.5, -1.0])], ids=["no_sinks", "sinks"])
def test_rows_without_keys_among_rows_with(engine, sinks, dtype):
    """They are 0 even where the key tiles of the others are full of NaN and inf."""
    query, key, value = many_key_tiles(dtype)
    mask = np.ones((3, 2500), bool)
    mask[[0, 2]] = False
    value[..., 7], key[..., 1000:1010, :] = np.nan, np.inf
    query[:, :, 0] = np.nan
    for num_threads in (1, 3):
        out, lse, weights = engine.everything(
            query, key, value, mask=mask, sinks=sinks, num_threads=num_threads
        )
        assert not out[:, :, ::2].any()
        assert not weights[:, :, ::2].any()
        expected = np.full((1, 2, 2), -np.inf) if sinks is None else np.repeat(sinks, 2).reshape(1, 2, 2)
        np.testing.assert_array_equal(lse[:, :, ::2], expected.astype(dtype))
        assert np.isnan(out[:, :, 1, 7]).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_query_row_is_nan_alone(engine, dtype):
    query, key, value = many_key_tiles(dtype)
    options = {"causal": "bottom_right", "window": (1200, None)}
    clean = engine.everything(query, key, value, **options)
    query[0, 1, 1, 5] = np.nan
    results = engine.everything(query, key, value, num_threads=3, **options)
    here = np.zeros((1, 2, 3), bool)
    here[0, 1, 1] = True
    reads = naive.allowed_keys((), 1, 3, 2500, **options)[0, 1]
    assert np.isnan(results[0][here]).all()
    assert (np.isnan(results[2][here]) == reads).all()
    assert not results[2][here][:, ~reads].any()
    for got, wanted in zip(results, clean, strict=True):
        assert_same_bits(got[~here], wanted[~here])


@pytest.mark.parametrize("backend", ["cython", "numba"])
@pytest.mark.parametrize("L", [1, 3, 40])
@pytest.mark.parametrize("strides", [(0, 0), (64, 0), (0, 4), (4, 8)])
def test_rows_of_one_number_and_rows_that_overlap(backend, L, strides):
    """Columns of stride 0 were read as if they were contiguous."""
    rng = np.random.default_rng(L)
    query, memory = (rng.standard_normal(shape, dtype=np.float32) for shape in ((1, L, 16), 4000))
    key, value = (
        np.lib.stride_tricks.as_strided(x, (1, 40, 16), (0, *strides)) for x in (memory, memory[5:])
    )
    out = fastattn.attention(query, key, value, backend=backend)
    assert_same_bits(out, fastattn.attention(query, key.copy(), value.copy(), backend=backend))


@pytest.mark.parametrize("backend", ["cython", "numba"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_other_numbers_in_the_same_arrays_of_any_order(backend, layout):
    """A call like one before has its arrays as they are given, not as views in another layout."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((2, n, 16), dtype=np.float32) for n in (2, 2, 2))
    key, value = np.asfortranarray(key), value[..., ::-1]
    for _ in range(3):
        key[...], value[...] = rng.standard_normal((2, *key.shape))
        out = fastattn.attention(query, key, value, backend=backend, layout=layout)
        copies = np.ascontiguousarray(key), np.ascontiguousarray(value)
        assert_same_bits(out, fastattn.attention(query, *copies, backend=backend, layout=layout))
