"""`rope` and `rope_tables`: rotary position embedding.

The oracle turns one pair at a time, as a complex number, in extended precision. The NumPy way and the kernels
of every instruction set are held to it, and to each other: they give the same bits.
"""

from __future__ import annotations

import math
import threading
from itertools import product

import ml_dtypes
import numpy as np
import pytest

import fastattn
from fastattn.backends import registry
from fastattn.layers import MultiHeadAttention
from tests.cases import MEMORY_LAYOUTS
from tests.conftest import ISAS, without, without_kernels
from tests.fake_gpu import FakeArray
from tests.process import GuardedArrays, python
from tests.refusals import assert_named
from tests.tolerances import assert_same_bits

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(np.float32), np.dtype(np.float64)]
STORAGES = [np.dtype(np.float16), BFLOAT16]
#: head_dim and rotary_dim: vectors that are whole and that are not, one pair, none, an odd head_dim.
DIMS = [(64, 64), (128, 64), (80, 80), (36, 20), (7, 6), (2, 2), (5, 0), (33, 2)]


def numbers(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def real(dtype):
    """What is computed in."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def tables(n, rotary_dim, dtype=np.float32):
    """Any numbers: nothing makes of them the cosine and the sine of one angle."""
    return tuple(numbers(2, n, rotary_dim // 2, dtype=real(np.dtype(dtype)), seed=1))


def turned(x, cos, sin, *, positions=None, interleaved=False, inverse=False, layout="bhsd"):
    """The result in extended precision, and for each element the sum of the sizes of its two products."""
    x, cos, sin = (np.asarray(array, np.longdouble) for array in (x, cos, sin))
    moved = x.swapaxes(-3, -2) if layout == "bshd" and x.ndim > 2 else x
    length, half = moved.shape[-2], cos.shape[1]
    if positions is None:
        positions = range(length)
    rows = np.broadcast_to(positions, (*moved.shape[:-3], length))
    out, reach = moved.copy(), np.zeros(moved.shape, np.longdouble)
    for i in range(half):
        one, other = (2 * i, 2 * i + 1) if interleaved else (i, half + i)
        for item in np.ndindex(*rows.shape):
            p = rows[item]
            at = (*item[:-1], Ellipsis, item[-1])  # all heads
            turn = cos[p, i] + (-1j if inverse else 1j) * sin[p, i]
            pair = (moved[(*at, one)] + 1j * moved[(*at, other)]) * turn
            out[(*at, one)], out[(*at, other)] = pair.real, pair.imag
            sizes = [abs(moved[(*at, c)]) for c in (one, other)]
            reach[(*at, one)] = sizes[0] * abs(cos[p, i]) + sizes[1] * abs(sin[p, i])
            reach[(*at, other)] = sizes[1] * abs(cos[p, i]) + sizes[0] * abs(sin[p, i])
    if moved is not x:
        out, reach = out.swapaxes(-3, -2), reach.swapaxes(-3, -2)
    return out, reach


def assert_turned(got, x, cos, sin, **options):
    """Two products and their sum, each rounded: half an eps of each product, and half of their sum."""
    exact, reach = turned(x, cos, sin, **options)
    assert got.shape == x.shape and got.flags.c_contiguous
    limits = np.finfo(got.dtype)
    error = np.abs(got - exact)
    assert np.all(error <= float(limits.eps) * (1 + float(limits.eps)) * reach)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_definition(way, dtype, dims, interleaved, inverse, layout):
    x = numbers(2, 3, 5, dims[0], dtype=dtype)
    cos, sin = tables(9, dims[1], dtype)
    options = {"interleaved": interleaved, "inverse": inverse, "layout": layout}
    assert_turned(fastattn.rope(x, cos, sin, **options), x, cos, sin, **options)


def test_a_turn_by_a_right_angle():
    """By hand."""
    cos, sin = np.zeros((1, 2)), np.ones((1, 2))
    x = np.array([[1.0, 2.0, 3.0, 4.0, 5.0]])
    assert fastattn.rope(x, cos, sin).tolist() == [[-3, -4, 1, 2, 5]]
    assert fastattn.rope(x, cos, sin, interleaved=True).tolist() == [[-2, 1, -4, 3, 5]]
    assert fastattn.rope(x, cos, sin, inverse=True).tolist() == [[3, 4, -1, -2, 5]]


@pytest.mark.parametrize("dtype", [*FLOATS, *STORAGES], ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_all_ways_give_the_same_bits(dtype, dims, interleaved, monkeypatch):
    from fastattn.backends.cython import backend as cython_backend

    x = numbers(2, 3, 50, dims[0], dtype=dtype)
    cos, sin = tables(60, dims[1], dtype)
    positions = np.random.default_rng(2).integers(0, 60, (2, 50))
    options = {"interleaved": interleaved, "positions": positions}
    results = []
    for isa in ISAS:
        with cython_backend.use_isa(isa):
            results.append(fastattn.rope(x, cos, sin, **options))
    without_kernels(monkeypatch)
    expected = fastattn.rope(x, cos, sin, **options)
    for got in results:
        assert_same_bits(got, expected)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (36, 20)], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_16_bits_are_float32_rounded_once(way, storage, dims, interleaved):
    with np.errstate(over="ignore"):  # from subnormal numbers to inf
        x = (numbers(2, 3, 40, dims[0]) * np.float32(3e-6) ** numbers(2, 3, 40, 1)).astype(storage)
    cos, sin = tables(40, dims[1])
    wide = fastattn.rope(x.astype(np.float32), cos, sin, interleaved=interleaved)
    with np.errstate(over="ignore"):
        expected = wide.astype(storage)
    got = fastattn.rope(x, cos, sin, interleaved=interleaved)
    assert got.dtype == storage
    assert_same_bits(got.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_positions(way, lead, layout):
    """Of each item, of all, of some axes; consecutive or not."""
    x = numbers(*lead, 4, 4, 12)
    cos, sin = tables(30, 12)
    rng = np.random.default_rng(3)
    shapes = {(4,), (*lead, 4), (*(1,) * len(lead), 4), (*lead[1:], 4), (*lead[:1], *(1,) * len(lead[1:]), 4)}
    for shape in sorted(shapes, key=len):
        for positions in (
            rng.integers(0, 30, shape),
            np.zeros(shape, int),
            np.arange(7, 11) + np.zeros(shape, int),
        ):
            for given in (positions, positions.tolist(), positions.astype(np.uint8), positions.astype(">i4")):
                got = fastattn.rope(x, cos, sin, positions=given, layout=layout)
                assert_turned(got, x, cos, sin, positions=positions, layout=layout)


def test_positions_of_one_token(way):
    x = numbers(2, 4, 1, 12)
    cos, sin = tables(30, 12)
    expected = fastattn.rope(x, cos, sin, positions=np.array([[29], [29]]))
    for given in (29, np.int64(29), [29], [[29]], np.array(29)):
        assert_same_bits(fastattn.rope(x, cos, sin, positions=given), expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_distances_alone(interleaved):
    query, key = numbers(2, 1, 64, dtype=np.float64)
    cos, sin = fastattn.rope_tables(500, 64, dtype=np.float64)

    def score(i, j):
        turned = [
            fastattn.rope(x, cos, sin, positions=p, interleaved=interleaved)
            for x, p in ((query, i), (key, j))
        ]
        return (turned[0] @ turned[1].T).item()

    assert score(107, 100) == pytest.approx(score(7, 0), abs=1e-9)
    assert score(499, 400) == pytest.approx(score(99, 0), abs=1e-9)
    assert abs(score(499, 400) - score(98, 0)) > 1e-3


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_inverse(way, dtype, interleaved):
    x = numbers(2, 3, 50, 64, dtype=dtype)
    cos, sin = fastattn.rope_tables(50, 48, dtype=dtype)
    there = fastattn.rope(x, cos, sin, interleaved=interleaved)
    back = fastattn.rope(there, cos, sin, interleaved=interleaved, inverse=True)
    np.testing.assert_allclose(back, x, rtol=0, atol=16 * np.finfo(dtype).eps)
    assert np.abs(there[..., 1:, :48] - x[..., 1:, :48]).max() > 0.1
    # It is the transpose, and so the gradient: <rope(x), y> = <x, inverse(y)>, whatever the tables hold.
    cos, sin = tables(50, 48, dtype)
    y = numbers(2, 3, 50, 64, dtype=dtype, seed=5)
    one = np.vdot(fastattn.rope(x, cos, sin, interleaved=interleaved), y)
    other = np.vdot(x, fastattn.rope(y, cos, sin, interleaved=interleaved, inverse=True))
    assert one == pytest.approx(other, rel=1e-3 if dtype == np.float32 else 1e-11)


def test_one_pairing_is_the_other_permuted(way):
    x = numbers(2, 3, 5, 16)
    cos, sin = fastattn.rope_tables(5, 12)
    order = [*range(0, 12, 2), *range(1, 12, 2), *range(12, 16)]
    interleaved = fastattn.rope(x, cos, sin, interleaved=True)
    assert_same_bits(fastattn.rope(x[..., order], cos, sin), interleaved[..., order])


# Memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", MEMORY_LAYOUTS)
@pytest.mark.parametrize("dtype", [*FLOATS, *STORAGES], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@without(lambda memory, dtype: memory == "byte_swapped" and dtype == BFLOAT16)  # it has one byte order
def test_any_memory_layout(way, memory, dtype, layout):
    move = MEMORY_LAYOUTS[memory]
    x, (cos, sin) = numbers(2, 3, 5, 36, dtype=dtype), tables(9, 32, dtype)
    positions = np.random.default_rng(4).integers(0, 9, (2, 5 if layout == "bhsd" else 3))
    expected = fastattn.rope(x, cos, sin, positions=positions, layout=layout)
    got = fastattn.rope(move(x), move(cos), move(sin), positions=move(positions), layout=layout)
    assert got.dtype == dtype
    assert_same_bits(got.view(f"u{dtype.itemsize}"), expected.view(f"u{dtype.itemsize}"))


@pytest.mark.parametrize(
    "memory", [name for name in MEMORY_LAYOUTS if name not in ("read_only", "byte_swapped")]
)
@pytest.mark.parametrize("dtype", [*FLOATS, *STORAGES], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_out(way, memory, dtype, in_place):
    x, (cos, sin) = numbers(2, 3, 5, 36, dtype=dtype), tables(9, 32, dtype)
    expected = fastattn.rope(x, cos, sin)
    out = MEMORY_LAYOUTS[memory](x)
    around = None if out.base is None else out.base.copy()
    assert fastattn.rope(out if in_place else x, cos, sin, out=out) is out
    assert_same_bits(np.ascontiguousarray(out).view(np.uint8), expected.view(np.uint8))
    if memory in ("padded", "every_other"):  # nothing between and around the elements
        again = MEMORY_LAYOUTS[memory](expected)
        assert out.base.tobytes() == again.base.tobytes() != around.tobytes()


@pytest.mark.parametrize("interleaved", [False, True])
def test_out_that_overlaps_otherwise(way, interleaved):
    cos, sin = tables(9, 32)
    memory = numbers(4000)
    x = memory[:960].reshape(1, 6, 5, 32)
    expected = fastattn.rope(x.copy(), cos, sin, interleaved=interleaved)
    views = {
        "later": lambda m: (m[:960].reshape(x.shape), m[40:1000].reshape(x.shape)),
        "earlier": lambda m: (m[40:1000].reshape(x.shape), m[:960].reshape(x.shape)),
        "backwards": lambda m: (m[:960].reshape(x.shape), m[:960].reshape(x.shape)[:, ::-1]),
        "heads_swapped": lambda m: (
            m[:800].reshape(1, 5, 5, 32),
            m[:800].reshape(1, 5, 5, 32).swapaxes(1, 2),
        ),
    }
    for name, view in views.items():
        given, out = view(memory.copy())
        given[...] = x[:, : given.shape[1]]
        fastattn.rope(given, cos, sin, interleaved=interleaved, out=out)
        assert_same_bits(np.ascontiguousarray(out), expected[:, : out.shape[1]].copy(), name)
    # The tables' memory.
    both = np.concatenate([cos.ravel(), sin.ravel(), np.zeros(1000, np.float32)])
    tables_there = both[:144].reshape(9, 16), both[144:288].reshape(9, 16)
    out = both[100 : 100 + 960].reshape(x.shape)
    fastattn.rope(x, *tables_there, interleaved=interleaved, out=out)
    assert_same_bits(out.copy(), expected)


def test_positions_that_are_overwritten(way):
    """out may be their memory, too."""
    cos, sin = tables(9, 32, np.float64)
    x = numbers(5, 32, dtype=np.float64)
    expected = fastattn.rope(x, cos, sin, positions=[8, 1, 5, 2, 0])
    out = np.empty((5, 32))
    positions = out.view(np.int64).reshape(-1)[:5]
    positions[:] = [8, 1, 5, 2, 0]
    fastattn.rope(x, cos, sin, positions=positions, out=out)
    assert_same_bits(out, expected)


@pytest.mark.parametrize("dtype", [*FLOATS, *STORAGES], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_nothing_outside_the_arrays(way, dtype, interleaved):
    for head_dim, rotary_dim in DIMS:
        x, (cos, sin) = numbers(2, 3, head_dim, dtype=dtype), tables(3, rotary_dim, dtype)
        expected = fastattn.rope(x, cos, sin, interleaved=interleaved)
        for at_end in (False, True):
            guarded = GuardedArrays()
            placed = [guarded.place(array, at_end=at_end) for array in (x, cos, sin)]
            fastattn.rope(*placed, interleaved=interleaved, out=placed[0])
            assert placed[0].tobytes() == expected.tobytes()


def test_broadcast_and_mapped_arrays(way, tmp_path):
    cos, sin = tables(9, 32)
    row = numbers(1, 1, 5, 32)
    expected = fastattn.rope(np.repeat(row, 6, axis=1), cos, sin)
    assert_same_bits(fastattn.rope(np.broadcast_to(row, (1, 6, 5, 32)), cos, sin), expected)
    np.save(tmp_path / "x.npy", row)
    np.save(tmp_path / "cos.npy", cos)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    got = fastattn.rope(mapped, np.load(tmp_path / "cos.npy", mmap_mode="r"), sin)
    assert_same_bits(got, expected[:, :1])


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8), (0, 8), (3, 0)], ids=str)
def test_empty(way, shape):
    cos, sin = tables(5, min(shape[-1], 8))
    for positions in (None, np.zeros(shape[-2], int)):
        got = fastattn.rope(np.zeros(shape, np.float32), cos, sin, positions=positions)
        assert got.shape == shape and got.dtype == np.float32


# Types -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int8, np.uint64, np.bool_])
def test_integers_count_as_float64(way, dtype):
    x = (numbers(2, 5, 8) > 0).astype(dtype)
    cos, sin = tables(5, 8, np.float64)
    got = fastattn.rope(x, cos, sin)
    assert_same_bits(got, fastattn.rope(x.astype(np.float64), cos, sin))
    assert fastattn.rope([[1, 2]], [[0.0]], [[1.0]]).tolist() == [[-2, 1]]


@pytest.mark.parametrize("dtype", [*FLOATS, *STORAGES], ids=str)
@pytest.mark.parametrize("of_tables", [*FLOATS, *STORAGES], ids=str)
def test_tables_are_read_in_the_type_of_the_computation(way, dtype, of_tables):
    x = numbers(2, 5, 36, dtype=dtype)
    cos, sin = (table.astype(of_tables) for table in tables(9, 32, np.float64))
    for positions in (None, [3, 4, 8, 8, 0]):
        expected = fastattn.rope(x, cos.astype(real(dtype)), sin.astype(real(dtype)), positions=positions)
        got = fastattn.rope(x, cos, sin, positions=positions)
        assert got.dtype == dtype
        assert_same_bits(got.view(np.uint8), expected.view(np.uint8))


def test_nan_and_inf_stay_in_their_pair(way):
    x = numbers(3, 40)
    cos, sin = fastattn.rope_tables(3, 36)
    expected = fastattn.rope(x, cos, sin)
    x[1, 2], x[2, 20], x[0, 38] = np.nan, np.inf, np.nan
    got = fastattn.rope(x, cos, sin)
    touched = np.zeros(x.shape, bool)
    touched[1, [2, 20]] = touched[2, [2, 20]] = touched[0, 38] = True
    assert_same_bits(got[~touched], expected[~touched])
    assert np.isnan(got[1, [2, 20]]).all() and np.isinf(got[2, [2, 20]]).all() and np.isnan(got[0, 38])


# Errors ------------------------------------------------------------------------------------------

X, (COS, SIN) = numbers(2, 4, 5, 8), fastattn.rope_tables(9, 8)
READ_ONLY = X.copy()
READ_ONLY.flags.writeable = False
OVERLAPPING = np.lib.stride_tricks.as_strided(X, X.shape, (0, 0, 32, 4))
WRONG_TYPES = {
    "interleaved": [1],
    "inverse": ["no"],
    "x": [*map(X.astype, (np.complex64, object, np.longdouble)), np.full((2, 8), "abc")],
    "cos": [COS.astype(int)],
    "sin": [SIN.astype(complex)],
    "positions": [np.arange(5.0), np.zeros(5, bool)],
    "out": [X.tolist(), X.astype(np.float64), X.astype(X.dtype.newbyteorder())],
}
WRONG_VALUES = {
    "layout": ["sbhd"],
    "x": [[[1.0, 2.0], [3.0]], X[0, 0, 0], X[..., :6]],
    "cos": [COS[0]],
    "sin": [SIN[:5]],
    "positions": [
        [0, 1, 2, 3, 9], np.array([[0, 1, 2, 3, -1]]), np.array([0, 1, 2, 3, 2**63], np.uint64), [0, 1, 2], 3,
        np.zeros((3, 5), int), np.zeros((2, 1, 5), int),
    ],
    "out": [X[:1].copy(), READ_ONLY, OVERLAPPING],
}  # fmt: skip


def test_errors():
    def call(x=X, cos=COS, sin=SIN, **options):
        out = options.get("out")
        before = out.tobytes() if isinstance(out, np.ndarray) else None
        try:
            fastattn.rope(x, cos, sin, **options)
        finally:
            assert before is None or out.tobytes() == before

    for error, wrong in [(TypeError, WRONG_TYPES), (ValueError, WRONG_VALUES)]:
        for message in assert_named(call, error, wrong):
            assert "; x " in message and ", cos " in message
    several = [{"out": X, "x": X.astype(np.float16)}]
    assert_named(call, TypeError, several)
    with pytest.raises(ValueError, match=r"positions are 0 \.\. L - 1 .* 4 rows, .* length 5"):
        call(cos=COS[:4], sin=SIN[:4])


def test_a_position_for_each_item_is_told_how_to_be_written():
    x, starts = np.ones((2, 3, 1, 4), np.float32), np.array([5, 3])  # as `KVCache.lengths` has them
    cos, sin = fastattn.rope_tables(6, 4)
    with pytest.raises(ValueError, match=r"got \(2,\); .* say positions\[\.\.\., None\] \+ np\.arange\(L\)"):
        fastattn.rope(x, cos, sin, positions=starts)
    got = fastattn.rope(x, cos, sin, positions=starts[..., None] + np.arange(1))
    assert_same_bits(got[1], fastattn.rope(x[1], cos, sin, positions=[3]))
    with pytest.raises(ValueError, match=r"got \(3,\); x"):
        fastattn.rope(x, cos, sin, positions=[1, 2, 3])


def test_in_place_errors_leave_x_alone(way):
    x = X.copy()
    with pytest.raises(ValueError, match="positions"):
        fastattn.rope(x, COS, SIN, positions=[0, 1, 2, 3, 9], out=x)
    assert_same_bits(x, X)


# Tables with each column twice -------------------------------------------------------------------

DOUBLED = {
    ":4": lambda table: np.concatenate([table, table], axis=-1),  # Hugging Face's
    "::2": lambda table: np.repeat(table, 2, axis=-1),  # of neighbouring pairs
}


@pytest.mark.parametrize("once", DOUBLED)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, BFLOAT16], ids=str)
@pytest.mark.parametrize("head_dim", [8, 16, 20])
@pytest.mark.parametrize("interleaved", [False, True])
def test_doubled_tables_are_refused(way, once, dtype, head_dim, interleaved):
    """And the message says what to write; they may be of any dtype and strides."""
    x = numbers(2, 3, 12, head_dim, dtype=dtype)
    cos, sin = fastattn.rope_tables(12, 8)
    of_rows = [slice(None), slice(1, None), slice(11, None), slice(None, None, -1)]
    for rows in of_rows if head_dim > 16 else of_rows[:2] + of_rows[3:]:
        doubled = [DOUBLED[once](table)[rows] for table in (cos, sin)]
        for cos_cache, sin_cache in (doubled, [np.asfortranarray(table) for table in doubled],
                                     [table.astype(dtype) for table in doubled]):  # fmt: skip
            positions = np.zeros(12, int)
            out = np.full_like(x, 7)
            with pytest.raises(ValueError) as caught:
                fastattn.rope(x, cos_cache, sin_cache, positions=positions, interleaved=interleaved, out=out)
            assert f": say cos[..., {once}] and sin[..., {once}]; x (2, 3, 12, {head_dim})" in str(
                caught.value
            )
            assert (out == 7).all()
            index = np.s_[..., :4] if once == ":4" else np.s_[..., ::2]
            got = fastattn.rope(x, cos_cache[index], sin_cache[index], positions=positions)
            assert got.shape == x.shape


def test_a_layer_refuses_doubled_tables():
    w = np.eye(32, dtype=np.float32)
    tables = fastattn.rope_tables(9, 8)
    MultiHeadAttention(w, w, w, w, num_heads=2, rope=tables)
    with pytest.raises(ValueError, match=r"columns twice, .* say cos\[..., :4\] and sin\[..., :4\]"):
        MultiHeadAttention(w, w, w, w, num_heads=2, rope=[DOUBLED[":4"](table) for table in tables])


def test_tables_of_several_items_are_refused(way):
    """As Hugging Face's (batch, positions, r); what the message says to write is then told to be doubled."""
    x, (cos, sin) = numbers(2, 3, 12, 16), (DOUBLED[":4"](table) for table in fastattn.rope_tables(12, 8))
    for lead, index in (((1,), "0"), ((2,), "0"), ((2, 1), "0, 0")):
        tables = [np.broadcast_to(table, (*lead, 12, 8)) for table in (cos, sin)]
        with pytest.raises(ValueError, match=rf"those of items, say cos\[{index}\]: one table is for all"):
            fastattn.rope(x, *tables)
        of_one = np.zeros(len(lead), int)
        with pytest.raises(ValueError, match=r"say cos\[..., :4\] and sin\[..., :4\]"):
            fastattn.rope(x, *(table[tuple(of_one)] for table in tables))


@pytest.mark.parametrize("base", [1.5, 1e4, 5e5, 1e30])
@pytest.mark.parametrize("rotary_dim", [2, 4, 6, 8, 64])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16], ids=str)
def test_tables_as_they_are_to_be_are_taken(way, base, rotary_dim, dtype):
    """All of them, each row alone, and the first few."""
    cos, sin = (table.astype(dtype) for table in fastattn.rope_tables(40, rotary_dim, base=base))
    x = numbers(1, 1, 1, 2 * rotary_dim)
    for n in (1, 2, 40):
        fastattn.rope(x, cos[:n], sin[:n])
    for p in range(40):
        fastattn.rope(x, cos[p : p + 1], sin[p : p + 1])


def test_tables_that_may_be_meant_are_taken(way):
    """No rotation, one angle for all pairs, and positions in two dimensions: there a row on the diagonal has
    the same angles twice, and all rows of a grid do not."""
    x = numbers(2, 3, 16, 8)
    ones, zeros = np.ones((16, 4), np.float32), np.zeros((16, 4), np.float32)
    assert_same_bits(fastattn.rope(x, ones, zeros), x)
    assert_same_bits(fastattn.rope(x[..., :1, :], ones[:1, :2], zeros[:1, :2]), x[..., :1, :])
    angle = np.arange(16, dtype=np.float32)[:, None] * np.ones(4, np.float32)
    assert_turned(fastattn.rope(x, np.cos(angle), np.sin(angle)), x, np.cos(angle), np.sin(angle))
    frequency = np.float32([1, 0.1])
    row, column = (np.repeat(np.arange(4), 4)[:, None], np.tile(np.arange(4), 4)[:, None])
    angle = np.concatenate([row * frequency, column * frequency], axis=-1).astype(np.float32)
    cos, sin = np.cos(angle), np.sin(angle)
    assert_turned(fastattn.rope(x, cos, sin), x, cos, sin)
    for p in range(16):
        one = x[..., :1, :], cos[p : p + 1], sin[p : p + 1]
        assert_turned(fastattn.rope(*one), *one)


# Threads -----------------------------------------------------------------------------------------


@pytest.fixture
def threads():
    before = fastattn.get_num_threads()
    yield fastattn.set_num_threads
    fastattn.set_num_threads(before)


@pytest.mark.parametrize("shape", [(1, 8, 301, 64), (7, 2, 33, 256), (3, 500, 1, 64), (600, 200)], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_no_bit_depends_on_threads(threads, shape, layout):
    """More elements than one thread works on alone."""
    x = numbers(*shape)
    assert x.size > 1 << 16
    cos, sin = tables(1000, 64)
    length = shape[-3] if layout == "bshd" and len(shape) > 2 else shape[-2]
    positions = np.random.default_rng(0).integers(0, 1000, (*shape[:-3], length))
    threads(1)
    expected = fastattn.rope(x, cos, sin, positions=positions, layout=layout)
    for count in (2, 3, 7):
        threads(count)
        assert_same_bits(fastattn.rope(x, cos, sin, positions=positions, layout=layout), expected)
        options = {"positions": positions, "layout": layout, "num_threads": count + 1}
        assert_same_bits(fastattn.rope(x, cos, sin, **options), expected)
        y = x.copy()
        fastattn.rope(y, cos, sin, positions=positions, layout=layout, out=y)
        assert_same_bits(y, expected)


@pytest.mark.parametrize("dtype", ["float32", ">f4"])  # at once, or after a conversion
def test_threads_of_a_call(threads, monkeypatch, dtype):
    cython = pytest.importorskip("fastattn.backends.cython.driver") and registry.load("cython")
    asked, limit = [], cython.thread_limit
    monkeypatch.setattr(cython, "thread_limit", lambda n: asked.append(n) or limit(n))
    x, (cos, sin) = numbers(1, 8, 301, 64).astype(dtype), tables(301, 64)
    threads(2)
    fastattn.rope(x, cos, sin, num_threads=3)
    fastattn.rope(x, cos, sin)
    assert asked == [3, 2]
    for wrong, error in ((0, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="num_threads must be a positive integer"):
            fastattn.rope(x[..., :1, :], cos, sin, num_threads=wrong)


def test_other_items_change_nothing():
    x, (cos, sin) = numbers(3, 2, 40, 36), tables(40, 32)
    whole = fastattn.rope(x, cos, sin)
    for item, head, row in product(range(3), range(2), (0, 7, 39)):
        alone = fastattn.rope(x[item, head, row : row + 1], cos, sin, positions=row)
        assert_same_bits(alone[0], whole[item, head, row])


def test_many_python_threads():
    x, (cos, sin) = numbers(4, 8, 128, 64), tables(128, 64)
    expected = fastattn.rope(x, cos, sin)
    wrong = []

    def call():
        for _ in range(20):
            if fastattn.rope(x, cos, sin).tobytes() != expected.tobytes():
                wrong.append(1)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="no forks here")
def test_a_forked_child():
    code = """
import os, warnings
import numpy as np
import fastattn
warnings.simplefilter("ignore")
fastattn.set_num_threads(3)
x = np.random.default_rng(0).standard_normal((4, 8, 512, 64), dtype=np.float32)
tables = fastattn.rope_tables(512, 64)
expected = fastattn.rope(x, *tables)
child = os.fork()
if child == 0:
    os._exit(0 if fastattn.rope(x, *tables).tobytes() == expected.tobytes() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert python(code).split() == ["0"]


def test_a_first_call_of_a_process_and_a_bad_setting():
    code = """
import numpy as np
import fastattn
x, tables = np.ones((2, 1, 8), np.float32), fastattn.rope_tables(1, 8)
print(fastattn.rope(x, *tables).sum())
try:
    fastattn.rope(np.ones((300, 400, 8), np.float32), *fastattn.rope_tables(400, 8))
except ValueError as error:
    print(error)
"""
    first, *rest = python(code, env={"FASTATTN_NUM_THREADS": "many"}).splitlines()
    assert float(first) == 16
    assert not rest or "FASTATTN_NUM_THREADS" in rest[0]


# Tables ------------------------------------------------------------------------------------------


def frequencies_of(cos, sin, factor=1.0):
    """The angles of position 1: less than half a turn."""
    return np.arctan2(sin[1], cos[1]) * np.ones(1), np.hypot(cos[1], sin[1]) / factor


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("base", [10000.0, 500_000])
def test_tables(dtype, base):
    cos, sin = fastattn.rope_tables(3000, 20, base=base, dtype=dtype)
    assert cos.shape == sin.shape == (3000, 10) and cos.dtype == sin.dtype == dtype
    assert cos.flags.c_contiguous and cos.flags.writeable
    for p, i in product((0, 1, 2, 1023, 1024, 2999), range(10)):
        angle = p * base ** (-2 * i / 20)
        # One rounding to the type, and float64's of the angle.
        tolerance = np.finfo(dtype).eps / 2 + 4e-16 * max(1, angle)
        assert abs(cos[p, i] - math.cos(angle)) <= tolerance
        assert abs(sin[p, i] - math.sin(angle)) <= tolerance


def test_tables_are_rounded_once():
    wide, narrow = (fastattn.rope_tables(2000, 64, dtype=dtype) for dtype in (np.float64, np.float32))
    for one, other in zip(wide, narrow, strict=True):
        assert_same_bits(one.astype(np.float32), other)


def pairs(function, r=64):
    return np.array([function(i, r) for i in range(r // 2)])


def yarn(i, r, base, factor, original, fast=32, slow=1, truncate=True):
    """Peng et al., 2024, section 3.2 and appendix, with transformers' rounding of the ramp's ends."""

    def pair_of(turns):
        return r * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_of(fast), pair_of(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, r - 1)
    high += 0.001 * (low == high)
    ramp = min(max((i - low) / (high - low), 0), 1)
    own = base ** (-2 * i / r)
    return ramp * own / factor + (1 - ramp) * own


def llama3(i, r, base, factor, low, high, original):
    own = base ** (-2 * i / r)
    wavelength = 2 * math.pi / own
    if wavelength < original / high:
        return own
    if wavelength > original / low:
        return own / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * own / factor + smooth * own


SCALED = {
    ("linear", 4.0): lambda i, r: 10000.0 ** (-2 * i / r) / 4,
    ("ntk", 4.0): lambda i, r: (10000.0 * 4 ** (r / (r - 2))) ** (-2 * i / r),
    ("yarn", 4.0, 2048): lambda i, r: yarn(i, r, 10000.0, 4, 2048),
    ("yarn", 40, 4096): lambda i, r: yarn(i, r, 10000.0, 40, 4096),
    ("yarn", 4, 30): lambda i, r: yarn(i, r, 10000.0, 4, 30),
    ("llama3", 8, 1, 4, 8192): lambda i, r: llama3(i, r, 10000.0, 8, 1, 4, 8192),
    ("llama3", 32.0, 0.5, 3, 500): lambda i, r: llama3(i, r, 10000.0, 32, 0.5, 3, 500),
}


@pytest.mark.parametrize("scaling", SCALED, ids=str)
def test_scaled_frequencies(scaling):
    cos, sin = fastattn.rope_tables(2, 64, scaling=scaling, dtype=np.float64)
    angles, sizes = frequencies_of(cos, sin)
    np.testing.assert_allclose(angles, pairs(SCALED[scaling]), rtol=1e-12)
    expected = 0.1 * math.log(scaling[1]) + 1 if scaling[0] == "yarn" else 1
    np.testing.assert_allclose(sizes, expected, rtol=1e-12)


@pytest.mark.parametrize(
    "options, size, ramp",
    [
        ({"beta_fast": 16, "beta_slow": 2}, 0.1 * math.log(4) + 1, {"fast": 16, "slow": 2}),
        ({"truncate": False}, 0.1 * math.log(4) + 1, {"truncate": False}),
        ({"truncate": np.False_, "mscale": None}, 0.1 * math.log(4) + 1, {"truncate": False}),
        ({"mscale": 0.7}, 0.1 * math.log(4) + 1, {}),
        ({"mscale": 0.7, "mscale_all_dim": 1.2}, (0.07 * math.log(4) + 1) / (0.12 * math.log(4) + 1), {}),
        ({"mscale": 1, "mscale_all_dim": 1}, 1, {}),
        ({"mscale": 0.7, "mscale_all_dim": 1.2, "attention_factor": 0.5}, 0.5, {}),
    ],
    ids=str,
)
def test_options_of_yarn(options, size, ramp):
    cos, sin = fastattn.rope_tables(2, 64, scaling=("yarn", 4, 2048, options), dtype=np.float64)
    angles, sizes = frequencies_of(cos, sin)
    np.testing.assert_allclose(sizes, size, rtol=1e-12)
    np.testing.assert_allclose(angles, pairs(lambda i, r: yarn(i, r, 10000.0, 4, 2048, **ramp)), rtol=1e-12)
    assert fastattn.rope_tables(2, 64, scaling=("yarn", 0.5, 2048))[0][0, 0] == 1


#: What the tables are multiplied by, and frequencies, as transformers 5.23 gives them in float32.
PUBLISHED = [
    (("linear", 4), 1e4, 1,
     [0.25, 0.07905694, 0.025, 0.007905695, 0.0025, 0.0007905695, 0.00025, 7.905695e-05]),
    (("ntk", 4), 1e4, 1,
     [1.0, 0.2594128, 0.06729501, 0.01745719, 0.004528618, 0.001174782, 0.0003047534, 7.905695e-05]),
    (("yarn", 4, 2048), 1e4, 1.138629436111989,
     [1.0, 0.3162278, 0.1, 0.02569351, 0.00625, 0.001383497, 0.00025, 7.905695e-05]),
    (("yarn", 40, 4096, {"beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.2,
                         "truncate": False}), 1e4, 0.8721505655360163,
     [1.0, 0.3162278, 0.1, 0.03162278, 0.005790105, 0.0001239525, 2.5e-05, 7.905694e-06]),
    (("llama3", 8, 1, 4, 8192), 5e5, 1,
     [1.0, 0.1939228, 0.03760603, 0.007292665, 0.000524846, 3.428102e-05, 6.64787e-06, 1.289173e-06]),
]  # fmt: skip


@pytest.mark.parametrize("scaling, base, size, frequencies", PUBLISHED, ids=[str(it[0]) for it in PUBLISHED])
def test_frequencies_of_transformers(scaling, base, size, frequencies):
    """Theirs are of float32, whose powers have errors of some 1e-6."""
    angles, sizes = frequencies_of(*fastattn.rope_tables(2, 16, base=base, scaling=scaling, dtype=np.float64))
    np.testing.assert_allclose(angles, frequencies, rtol=3e-6)
    np.testing.assert_allclose(sizes, size, rtol=1e-12)


def test_errors_of_tables():
    def call(**wrong):
        fastattn.rope_tables(**({"n_positions": 4, "rotary_dim": 8} | wrong))

    def yarn(**options):
        return ("yarn", 2, 2048, options)

    types = {
        "n_positions": [4.0, True],
        "rotary_dim": ["8"],
        "base": [None],
        "dtype": [None, np.float16, "decimal"],
        "scaling": [
            "linear", {"rope_type": "linear", "factor": 2}, ("ntk", "2"), ("yarn", 2, 2048, 32),
            yarn(truncate=1),
        ],
    }  # fmt: skip
    values = {
        "n_positions": [-1],
        "rotary_dim": [0, 7],
        "base": [math.nan, 0.5, 1.0],
        "scaling": [
            (), ("longrope", 2), ("linear",), ("ntk", 2, 3), ("yarn", 2), ("llama3", 2, 1, 4),
            ("llama3", 2, 4, 4, 8192), ("linear", 0), ("linear", 10**400), yarn(beta=32), yarn(beta_fast=0),
            yarn(beta_fast=2, beta_slow=3),
            # Of these no angle is finite.
            ("linear", 1e-308), ("ntk", 1e300), ("ntk", 1e-300), ("yarn", 2, 100, {"beta_fast": 1e308}),
        ],
    }  # fmt: skip
    assert_named(call, TypeError, types)
    assert_named(call, ValueError, values)
    assert_named(call, ValueError, [{"rotary_dim": 2, "scaling": ("ntk", 2)}])


def test_out_on_a_gpu_is_refused():
    cos, sin = fastattn.rope_tables(4, 8)
    x = np.zeros((2, 4, 8), np.float32)
    with pytest.raises(TypeError, match=r"^out is on cuda:0, and is read on the host"):
        fastattn.rope(x, cos, sin, out=FakeArray(x))
