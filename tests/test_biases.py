"""Bias objects: the same results as the array that they stand for, and gradients of their own arrays."""

from __future__ import annotations

import pickle
from itertools import product

import ml_dtypes
import numpy as np
import pytest

import fastattn
from fastattn import masks
from fastattn.biases import Grid, Relative, Sum
from fastattn.masks.map import Size
from tests.cases import FLOATS
from tests.conftest import ENGINES, computes_gradients, on, on_cython
from tests.tolerances import assert_same_bits

#: Heads of queries and keys, lengths, entries of the table, offset, rows of the table.
PROBLEMS = [
    (1, 1, 1, 1, 1, 0, 1),
    (4, 2, 37, 130, 9, 4, 4),
    (4, 2, 150, 70, 600, 299, 1),
    (2, 1, 1, 300, 50, 49, 2),
    (3, 3, 200, 200, 33, -3, 3),
    (2, 2, 5, 40, 7, 10**30, 2),
]


def inputs(H, K, L, S, n, heads, dtype, lead=(2,), seed=0):
    rng = np.random.default_rng(seed)
    shapes = (*lead, H, L, 16), (*lead, K, S, 16), (*lead, K, S, 24)
    return [rng.standard_normal(shape).astype(dtype) for shape in (*shapes, (heads, n))]


def entries(L, S, n, offset):
    """Which entry of the table each query and key have, in Python's integers."""
    return np.array(
        [[min(max(i + S - L - j + offset, 0), n - 1) for j in range(S)] for i in range(L)], int
    ).reshape(L, S)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_relative_is_its_definition(problem):
    H, _, L, S, n, offset, heads = problem
    table = np.random.default_rng(0).standard_normal((heads, n))
    wanted = np.broadcast_to(table[:, entries(L, S, n, offset)], (H, L, S))
    np.testing.assert_array_equal(Relative(table, offset).materialize(H, L, S), wanted)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_results_are_those_of_the_array(engine, problem, dtype):
    H, K, L, S, n, offset, heads = problem
    query, key, value, table = inputs(H, K, L, S, n, heads, dtype)
    bias = Relative(table, offset)
    for options in ({}, {"softcap": 3.0, "causal": "bottom_right"}, {"mask": masks.Window(9, 9)}):
        got = engine.everything(query, key, value, bias=bias, **options)
        wanted = engine.everything(query, key, value, bias=bias.materialize(H, L, S), **options)
        for ours, stored in zip(got, wanted, strict=True):
            assert_same_bits(ours, stored)
    swapped = [x.swapaxes(-3, -2) for x in (query, key, value)]
    got = engine.attention(*swapped, bias=bias, layout="bshd")
    assert_same_bits(got.swapaxes(-3, -2), engine.attention(query, key, value, bias=bias))


@computes_gradients
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_are_sums_of_those_of_the_array(engine, problem, dtype):
    H, K, L, S, n, offset, heads = problem
    query, key, value, table = inputs(H, K, L, S, n, heads, dtype)
    grad_out = np.random.default_rng(1).standard_normal((2, H, L, 24)).astype(dtype)
    bias, wrt = Relative(table, offset), ("query", "key", "value", "bias")
    stored = np.stack([bias.materialize(H, L, S)] * 2)  # of each item, whose gradients are then not summed
    # Of the last the scores are in the thousands: each row then has an lse of its own.
    for options in ({}, {"causal": "top_left"}, {"softcap": 2.0, "window": (5, 20)}, {"scale": 300.0}):
        got = engine.gradients(grad_out, query, key, value, bias=bias, wrt=wrt, **options)
        wanted = engine.gradients(grad_out, query, key, value, bias=stored, wrt=wrt, **options)
        for ours, theirs in zip(got[:3], wanted[:3], strict=True):
            assert_same_bits(ours, theirs)
        assert got.bias.shape == table.shape and got.bias.dtype == dtype and got.bias.flags.c_contiguous
        sums, sizes = np.zeros(table.shape, np.longdouble), np.zeros(table.shape)
        rows = np.arange(H)[:, None, None] % heads
        for item in wanted.bias:
            np.add.at(sums, (rows, entries(L, S, n, offset)), item.astype(np.longdouble))
            np.add.at(sizes, (rows, entries(L, S, n, offset)), np.abs(item))
        assert (np.abs(got.bias - sums) <= 8 * np.finfo(dtype).eps * sizes).all()


@computes_gradients
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_bits_of_gradients_depend_on_no_thread(engine, dtype):
    for heads in (1, 6):
        query, key, value, table = inputs(6, 3, 300, 700, 400, heads, dtype)
        grad_out = np.random.default_rng(1).standard_normal((2, 6, 300, 24)).astype(dtype)
        bias = Relative(table, 200)
        one, two, four = (
            engine.gradients(grad_out, query, key, value, bias=bias, wrt="bias", num_threads=n).bias
            for n in (1, 2, 4)
        )
        assert_same_bits(one, two)
        assert_same_bits(one, four)


@computes_gradients
def test_gradients_by_finite_differences(engine):
    query, key, value, table = inputs(4, 2, 20, 30, 11, 4, np.float64, lead=())
    grad_out = np.random.default_rng(1).standard_normal((4, 20, 24))

    def loss(table):
        out = engine.attention(query, key, value, bias=Relative(table, 5), causal="bottom_right")
        return (out * grad_out).sum()

    options = {"causal": "bottom_right", "wrt": "bias"}
    got = engine.gradients(grad_out, query, key, value, bias=Relative(table, 5), **options).bias
    for at in np.ndindex(table.shape):
        step = np.zeros_like(table)
        step[at] = 1e-5
        difference = (loss(table + step) - loss(table - step)) / 2e-5
        np.testing.assert_allclose(got[at], difference, rtol=1e-6, atol=1e-8)


@computes_gradients
@pytest.mark.parametrize("nonfinite", [np.nan, np.inf])
def test_a_masked_number_reaches_no_gradient(engine, nonfinite):
    query, key, value, table = inputs(2, 2, 70, 70, 139, 2, np.float32)
    grad_out = np.ones((2, 2, 70, 24), np.float32)
    bias, options = Relative(table, 69), {"causal": True, "wrt": "bias"}
    clean = engine.gradients(grad_out, query, key, value, bias=bias, **options).bias
    table[:, :69] = nonfinite  # of keys after the query
    got = engine.gradients(grad_out, query, key, value, bias=Relative(table, 69), **options).bias
    assert_same_bits(got, clean)
    assert not got[:, :69].any()


def test_minus_infinity_masks():
    query, key, value, _ = inputs(2, 2, 50, 50, 1, 1, np.float32)
    table = np.where(np.arange(99) < 49, -np.inf, 0)
    got = fastattn.attention(query, key, value, bias=Relative(table, 49))
    np.testing.assert_allclose(got, fastattn.attention(query, key, value, causal=True), atol=1e-6)


@pytest.mark.parametrize("storage", [np.float16, ml_dtypes.bfloat16, np.float32, ">f8"])
def test_tables_of_any_dtype(storage):
    query, key, value, table = inputs(4, 2, 30, 40, 20, 4, np.float32)
    bias = Relative(table.astype(storage), 10)
    assert bias.materialize(4, 30, 40).dtype == np.dtype(storage)
    stored = bias.materialize(4, 30, 40).astype(np.float32)
    got, lse = fastattn.attention(query, key, value, bias=bias, return_lse=True)
    assert_same_bits(got, fastattn.attention(query, key, value, bias=stored))
    gradients = fastattn.attention_backward(got, query, key, value, got, lse, bias=bias, wrt="bias")
    assert gradients.bias.dtype == np.dtype(storage).newbyteorder("=")


def test_other_functions_take_it():
    query, key, value, table = inputs(4, 2, 40, 40, 30, 4, np.float32, lead=(1,))
    bias = Relative(table, 15)
    wanted = fastattn.attention(query, key, value, bias=bias, causal=True)
    flexed = fastattn.flex_attention(query, key, value, bias=bias, causal=True)
    np.testing.assert_allclose(flexed, wanted, atol=1e-6)
    cache = fastattn.KVCache(1, 2, 16, value_dim=24)
    steps = [cache.step(*(x[..., i : i + 1, :] for x in (query, key, value)), bias=bias) for i in range(40)]
    np.testing.assert_allclose(np.concatenate(steps, axis=-2), wanted, atol=1e-6)
    packed = [x[0].swapaxes(0, 1) for x in (query, key, value)]
    starts = np.array([0, 13, 13, 40])
    got = fastattn.varlen_attention(*packed, starts, bias=bias, causal=True)
    for first, last in ((0, 13), (13, 40)):
        part = [x[:, :, first:last] for x in (query, key, value)]
        alone = fastattn.attention(*part, bias=bias, causal=True)[0].swapaxes(0, 1)
        np.testing.assert_allclose(got[first:last], alone, atol=1e-6)
    with pytest.raises(ValueError, match="as many keys as queries in each document"):
        fastattn.varlen_attention(*packed, starts, np.array([0, 12, 13, 40]), bias=bias)


def test_reductions_and_gradients_of_packed_documents_take_it():
    query, key, _, table = inputs(4, 2, 40, 40, 9, 4, np.float64, lead=())
    bias = Relative(table, 4)
    stored = bias.materialize(4, 40, 40)
    wanted = fastattn.key_weights(query, key, bias=stored)
    assert_same_bits(fastattn.key_weights(query, key, bias=bias), wanted)
    for reduction in ("max", "logsumexp"):
        ours, theirs = (
            fastattn.reduce_scores(query, key, reduction=reduction, bias=x) for x in (bias, stored)
        )
        np.testing.assert_array_equal(ours, theirs)
    packed, starts = query.swapaxes(0, 1), [0, 13, 13, 40]
    out, lse = fastattn.varlen_attention(packed, packed, packed, starts, bias=bias, return_lse=True)
    got, wanted = (
        fastattn.varlen_attention_backward(
            out, packed, packed, packed, out, lse, starts, bias=x, wrt=("query", "bias")
        )
        for x in (bias, stored)
    )
    assert_same_bits(got.query, wanted.query)
    sums = np.zeros(table.shape)
    np.add.at(sums, (np.arange(4)[:, None, None], entries(40, 40, 9, 4)), wanted.bias)
    np.testing.assert_allclose(got.bias, sums, rtol=0, atol=1e-12)


def test_memory_does_not_grow_with_the_scores():
    import tracemalloc

    length = 20_000
    bias = Relative(np.zeros((2, 64)), 32)
    query = np.zeros((2, 1, 8), np.float32)
    key = np.zeros((2, length, 8), np.float32)
    tracemalloc.start()
    try:
        view = bias._lower(Size((), 2, length, length), np.dtype(np.float32))
        fastattn.attention(query, key, key, bias=bias)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert view.shape == (2, length, length)
    assert peak < 10 * 2 * 2 * length * 4


def test_it_is_a_value():
    table = np.arange(6.0).reshape(2, 3)
    bias = Relative(table, 1)
    table[:] = 9
    assert bias == Relative([[0.0, 1, 2], [3, 4, 5]], offset=1) != Relative(bias.table, 2)
    assert hash(bias) == hash(Relative(bias.table, 1)) and pickle.loads(pickle.dumps(bias)) == bias
    assert repr(Relative([1.0])) == "Relative(table=<float64 (1, 1)>)"
    with pytest.raises(AttributeError, match="cannot assign to field 'offset'"):
        bias.offset = 3
    with pytest.raises(ValueError, match="read-only"):
        bias.table[0] = 0


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ((np.zeros((2, 3, 4)),), ValueError, r"table must have shape \(H, n\), .*, got \(2, 3, 4\)"),
        ((np.zeros((2, 0)),), ValueError, r"n >= 1, got \(2, 0\)"),
        ((np.zeros(3, int),), TypeError, "table must be a float16, .* got dtype int64"),
        ((np.zeros(3), 1.5), TypeError, "offset must be an integer, got 1.5"),
    ],
)
def test_what_is_refused(arguments, error, said):
    with pytest.raises(error, match=said):
        Relative(*arguments)


def test_refused_by_a_call():
    x = np.zeros((4, 5, 8))
    with pytest.raises(ValueError, match="a row for each of H = 4 heads, or one"):
        fastattn.attention(x, x, x, bias=Relative(np.zeros((2, 9))))
    with pytest.raises(TypeError, match="bias must be an array or a bias object, got Causal"):
        fastattn.attention(x, x, x, bias=masks.Causal())


#: Heads of queries and keys, length of queries, rows and columns of keys, and the axes before the last of
#: the two arrays.
GRIDS = [
    (1, 1, 1, 1, 1, (1, 1), (1,)),
    (4, 2, 37, 5, 26, (2, 4, 37), (2, 4, 37)),
    (4, 2, 150, 70, 1, (150,), (4, 150)),
    (4, 4, 100, 14, 14, (4, 100), (1, 100)),
    (2, 1, 1, 40, 50, (2, 1, 1), (2, 2, 1)),
    (2, 2, 40, 2, 333, (1, 40), (2, 1, 1)),
    (3, 3, 129, 1, 200, (3, 129), (3, 1)),
]

adds_biases = on(it for it in ENGINES if it.backend != "numba")


def grid_inputs(grid, dtype):
    H, K, L, Sh, Sw, rows, columns = grid
    *arrays, _ = inputs(H, K, L, Sh * Sw, 1, 1, dtype)
    rng = np.random.default_rng(5)
    made = rng.standard_normal((*rows, Sh)).astype(dtype), rng.standard_normal((*columns, Sw)).astype(dtype)
    return (*arrays, *made)


def stored_grid(rows, columns, shape):
    """The definition, for scores of this shape."""
    *lead, S = shape
    Sh, Sw = rows.shape[-1], columns.shape[-1]
    rows, columns = np.broadcast_to(rows, (*lead, Sh)), np.broadcast_to(columns, (*lead, Sw))
    return np.stack([rows[..., j // Sw] + columns[..., j % Sw] for j in range(S)], axis=-1)


def biases_of(grid, dtype):
    """Query, key and value, and biases beside the array that each stands for."""
    H, _, L, Sh, Sw, *_ = grid
    *arrays, rows, columns = grid_inputs(grid, dtype)
    S, rng = Sh * Sw, np.random.default_rng(6)
    of_grid, stored = Grid(rows, columns), stored_grid(rows, columns, (2, H, L, S))
    relative = Relative(rng.standard_normal((H, 30)).astype(dtype), 12)
    distances = relative.materialize(H, L, S)
    array = rng.standard_normal((2, 1, L, S)).astype(dtype)
    per_key = rng.standard_normal(S).astype(dtype)
    per_key[S // 2 :: 7] = -np.inf
    return arrays, {
        "grid": (of_grid, stored),
        "grid + relative": (of_grid + relative, stored + distances),
        "relative + grid": (relative + of_grid, distances + stored),
        "array, grid": ((array, of_grid), array + stored),
        "grid, per key, relative": ((of_grid, per_key, relative), (stored + per_key) + distances),
        "two arrays": ((per_key, array), per_key + array),
        "sum and array": ((of_grid + relative, array), (stored + distances) + array),
        "one": ((array,), array),
    }


NAMES = [*biases_of(GRIDS[0], "float32")[1]]


@pytest.mark.parametrize("grid", GRIDS)
def test_grid_is_its_definition(grid):
    H, _, L, Sh, Sw, *_ = grid
    *_, rows, columns = grid_inputs(grid, "float64")
    got = Grid(rows, columns).materialize(H, L, Sh * Sw)
    wanted = stored_grid(rows, columns, (2, H, L, Sh * Sw))
    assert got.shape[-3:] == (H, L, Sh * Sw)
    np.testing.assert_array_equal(np.broadcast_to(got, wanted.shape), wanted)


@adds_biases
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_a_sum_of_biases_is_that_of_the_array(engine, grid, dtype, name):
    arrays, biases = biases_of(grid, dtype)
    bias, stored = biases[name]
    L, S = arrays[0].shape[-2], arrays[1].shape[-2]
    some = {"mask": masks.Window(9, 9) | masks.GlobalTokens([0]), "key_lengths": [S, S // 2]}
    for options in (
        {},
        {"softcap": 3.0, "causal": "bottom_right"},
        some,
        {"window": (S // 3, L), "scale": -2.0},
    ):
        got = engine.everything(*arrays, bias=bias, **options)
        wanted = engine.everything(*arrays, bias=stored, **options)
        for ours, theirs in zip(got, wanted, strict=True):
            assert_same_bits(ours, theirs)
    swapped = [x.swapaxes(-3, -2) for x in arrays]
    got = engine.attention(*swapped, bias=bias, layout="bshd", num_threads=1)
    assert_same_bits(got.swapaxes(-3, -2), engine.attention(*arrays, bias=bias, num_threads=2))


@adds_biases
def test_nonfinite_values_behind_a_bias_that_masks(engine):
    """A masked key is never seen, whichever of the terms masks it."""
    (query, key, value), _ = biases_of(GRIDS[1], "float32")
    columns = np.zeros((37, 26), np.float32)
    columns[:, 3] = -np.inf
    of_grid, zeros = Grid(np.ones((37, 5), np.float32), columns), np.zeros((37, 130), np.float32)
    for bias in (of_grid, (zeros, of_grid), (of_grid, zeros)):
        wanted = engine.everything(query, key, value, bias=bias)
        for nonfinite in (np.nan, np.inf):
            spoilt = value.copy(), key.copy()
            for array in spoilt:
                array[..., 3::26, :] = nonfinite
            got = engine.everything(query, spoilt[1], spoilt[0], bias=bias)
            for ours, theirs in zip(got, wanted, strict=True):
                assert_same_bits(ours, theirs)
            assert not got[2][..., 3::26].any()
    # +inf and -inf add up to NaN, as in the formula.
    beside = np.where(np.arange(130) == 3, np.inf, 0).astype(np.float32)
    assert np.isnan(engine.attention(query, key, value, bias=(of_grid, beside))).all()


FORMS = {
    "float16": lambda x: x.astype(np.float16),
    "bfloat16": lambda x: x.astype(ml_dtypes.bfloat16),
    "float64": lambda x: x.astype(np.float64),
    "swapped": lambda x: x.astype(">f4"),
    "swapped float16": lambda x: x.astype(">f2"),
    "reversed": lambda x: x[..., ::-1],
    "slow": lambda x: x.swapaxes(-1, -2).copy().swapaxes(-1, -2),
    "one for all": lambda x: np.broadcast_to(x[..., :1], x.shape),
    "unaligned": lambda x: np.frombuffer(b"-" + x.tobytes(), np.float32, offset=1).reshape(x.shape),
}


@adds_biases
@pytest.mark.parametrize("form", FORMS)
def test_biases_of_any_form(engine, form):
    (query, key, value), _ = biases_of(GRIDS[1], "float32")
    rng = np.random.default_rng(7)
    shapes = (4, 37, 5), (2, 4, 37, 26), (37, 130)
    rows, columns, array = (FORMS[form](rng.standard_normal(shape).astype(np.float32)) for shape in shapes)
    stored = stored_grid(rows.astype(np.float32), columns.astype(np.float32), (2, 4, 37, 130))
    wanted = engine.attention(query, key, value, bias=stored)
    assert_same_bits(engine.attention(query, key, value, bias=Grid(rows, columns)), wanted)
    wanted = engine.attention(query, key, value, bias=array.astype(np.float32) + stored)
    assert_same_bits(engine.attention(query, key, value, bias=(array, Grid(rows, columns))), wanted)
    grad_out = np.ones((2, 4, 37, 24), np.float32)
    of_array, of_grid = engine.gradients(
        grad_out, query, key, value, bias=(array, Grid(rows, columns)), wrt="bias"
    ).bias
    for gradient, given in zip((of_array, *of_grid), (array, rows, columns), strict=True):
        assert gradient.shape == given.shape and gradient.dtype == given.dtype.newbyteorder("=")


def expected_gradient(change, part, exact=np.longdouble):
    """The gradient of a part of a bias, of those of all scores, and the sum of their sizes."""
    if isinstance(part, Grid):
        Sh, Sw = part.rows.shape[-1], part.columns.shape[-1]
        grid = change.reshape(*change.shape[:-1], Sh, Sw)
        return tuple(
            expected_gradient(grid.astype(exact).sum(axis), array)
            for axis, array in ((-1, part.rows), (-2, part.columns))
        )
    if isinstance(part, Sum):
        return tuple(expected_gradient(change, term) for term in part.terms)
    if isinstance(part, tuple):
        return tuple(expected_gradient(change, term) for term in part)
    if isinstance(part, Relative):
        _, H, L, S = change.shape
        sums = np.zeros(part.table.shape, exact)
        for item in change:
            rows = np.arange(H)[:, None, None] % len(part.table)
            np.add.at(sums, (rows, entries(L, S, part.table.shape[1], part.offset)), item.astype(exact))
        return sums
    extra = tuple(range(change.ndim - part.ndim))
    summed = change.astype(exact).sum(extra)
    axes = tuple(axis for axis, n in enumerate(part.shape) if n != summed.shape[axis])
    return summed.sum(axes, keepdims=True)


def assert_near(got, wanted, sizes, dtype):
    """Gradients that are nested as the bias is; `sizes`: the same of the magnitudes."""
    if isinstance(wanted, tuple):
        assert type(got) is tuple and len(got) == len(wanted)
        for parts in zip(got, wanted, sizes, strict=True):
            assert_near(*parts, dtype)
        return
    assert got.dtype == dtype and got.shape == wanted.shape and got.flags.c_contiguous
    assert (np.abs(got - wanted) <= 16 * np.finfo(dtype).eps * sizes).all()


@computes_gradients
@pytest.mark.parametrize(
    ("grid", "dtype"),
    [
        pytest.param(grid, dtype, marks=[pytest.mark.slow] if n % 2 else [])
        for n, (dtype, grid) in enumerate(product(FLOATS, GRIDS))
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_each_term_are_sums_of_those_of_the_array(engine, grid, dtype, name):
    arrays, biases = biases_of(grid, dtype)
    bias, stored = biases[name]
    L, S = arrays[0].shape[-2], arrays[1].shape[-2]
    grad_out = np.random.default_rng(1).standard_normal((*arrays[0].shape[:-1], 24)).astype(dtype)
    wrt, stored = (
        ("query", "key", "value", "bias"),
        np.broadcast_to(stored, (*arrays[0].shape[:-1], S)).copy(),
    )
    for options in ({}, {"softcap": 2.0, "window": (S // 2, L)}, {"causal": "bottom_right", "scale": 100.0}):
        got = engine.gradients(grad_out, *arrays, bias=bias, wrt=wrt, **options)
        wanted = engine.gradients(grad_out, *arrays, bias=stored, wrt=wrt, **options)
        for ours, theirs in zip(got[:3], wanted[:3], strict=True):
            assert_same_bits(ours, theirs)
        sums, sizes = (expected_gradient(x, bias) for x in (wanted.bias, np.abs(wanted.bias)))
        assert_near(got.bias, sums, sizes, dtype)
    alone = engine.gradients(grad_out, *arrays, bias=bias, wrt="bias", **options)
    assert alone.query is None
    assert_nested_bits(alone.bias, got.bias)


def assert_nested_bits(ours, theirs):
    if isinstance(ours, tuple):
        for pair in zip(ours, theirs, strict=True):
            assert_nested_bits(*pair)
    else:
        assert_same_bits(ours, theirs)


@computes_gradients
def test_the_bits_of_gradients_of_sums_depend_on_no_thread(engine):
    rng = np.random.default_rng(0)
    query, key, value, _ = inputs(6, 3, 90, 24 * 12, 1, 1, np.float32)
    grad_out = np.ones((2, 6, 90, 24), np.float32)
    shapes = (1, 90, 24), (2, 6, 90, 12), (90, 288), (6, 90, 1), (288,)
    rows, columns, *plain = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    bias = (*plain, Grid(rows, columns) + Relative(rng.standard_normal((6, 50)).astype(np.float32)))
    one, two, four = (
        engine.gradients(grad_out, query, key, value, bias=bias, wrt=("bias", "query"), num_threads=n)
        for n in (1, 2, 4)
    )
    for other in (two, four):
        assert_same_bits(one.query, other.query)
        assert_nested_bits(one.bias, other.bias)
    # The rows and columns of an item are its own, whatever the others are.
    alone = engine.gradients(
        grad_out[1:], query[1:], key[1:], value[1:],
        bias=(*plain, Grid(rows, columns[1:]) + bias[-1].terms[1]), wrt="bias",
    ).bias  # fmt: skip
    assert_same_bits(alone[-1][0][1], one.bias[-1][0][1][1:])


@computes_gradients
def test_gradients_of_a_grid_by_finite_differences(engine):
    query, key, value, _ = inputs(4, 2, 7, 12, 1, 1, np.float64, lead=())
    rng = np.random.default_rng(1)
    grad_out, rows, columns = (rng.standard_normal(shape) for shape in ((4, 7, 24), (4, 7, 3), (1, 7, 4)))
    array = rng.standard_normal((4, 1, 12))

    def loss(rows, columns, array):
        out = engine.attention(query, key, value, bias=(array, Grid(rows, columns)), causal="bottom_right")
        return (out * grad_out).sum()

    options = {"causal": "bottom_right", "wrt": "bias"}
    of_array, (of_rows, of_columns) = engine.gradients(
        grad_out, query, key, value, bias=(array, Grid(rows, columns)), **options
    ).bias
    given = rows, columns, array
    for number, gradient in enumerate((of_rows, of_columns, of_array)):
        for at in np.ndindex(gradient.shape):
            step = [np.zeros_like(x) for x in given]
            step[number][at] = 1e-5
            high, low = (loss(*(x + sign * s for x, s in zip(given, step, strict=True))) for sign in (1, -1))
            np.testing.assert_allclose(gradient[at], (high - low) / 2e-5, rtol=1e-6, atol=1e-8)


@computes_gradients
@pytest.mark.parametrize(("L", "Sh", "Sw"), [(0, 2, 3), (5, 0, 3), (5, 2, 0), (0, 0, 0)])
def test_sums_of_no_scores(engine, L, Sh, Sw):
    query, key, value, table = inputs(4, 2, L, Sh * Sw, 3, 4, np.float32)
    bias = np.zeros(Sh * Sw), Grid(np.zeros((L, Sh)), np.zeros((4, L, Sw))) + Relative(table)
    out, lse = engine.attention(query, key, value, bias=bias, return_lse=True)
    assert not out.any() and (lse == -np.inf).all()
    got = engine.backward(out, query, key, value, out, lse, bias=bias, wrt=("query", "bias"))
    of_array, ((of_rows, of_columns), of_table) = got.bias
    assert (of_array.shape, of_rows.shape, of_columns.shape) == ((Sh * Sw,), (L, Sh), (4, L, Sw))
    assert of_table.shape == table.shape and not of_table.any()


@on_cython
def test_memory_of_gradients_of_a_grid(engine):
    import tracemalloc

    side, length = 64, 64 * 64
    query, key, value, _ = inputs(1, 1, length, length, 1, 1, np.float32, lead=())
    bias = Grid(*np.zeros((2, length, side), np.float32))
    out, lse = engine.attention(query, key, value, bias=bias, return_lse=True)
    tracemalloc.start()
    try:
        engine.backward(out, query, key, value, out, lse, bias=bias, wrt="bias")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * length * 2 * side * 8  # sums in float64, and the gradients made of them


def test_other_functions_take_sums():
    query, key, value, table = inputs(4, 2, 40, 40, 9, 4, np.float64, lead=())
    rng = np.random.default_rng(3)
    bias = Grid(rng.standard_normal((4, 40, 5)), rng.standard_normal((1, 40, 8))) + Relative(table, 4)
    bias = rng.standard_normal(40), bias
    of_grid, relative = bias[1].terms
    stored = (bias[0] + of_grid.materialize(4, 40, 40)) + relative.materialize(4, 40, 40)
    wanted, lse = fastattn.attention(query, key, value, bias=stored, return_lse=True)
    assert_same_bits(fastattn.flex_attention(query, key, value, bias=bias), wanted)
    one = [x[0] for x in (query, key, value)]  # of two axes
    assert_same_bits(
        fastattn.attention(*one, bias=(bias[0], Grid(of_grid.rows[0], of_grid.columns[0]))),
        fastattn.attention(*one, bias=bias[0] + of_grid.materialize(4, 40, 40)[0]),
    )
    for reduction in ("max", "logsumexp"):
        ours, theirs = (
            fastattn.reduce_scores(query, key, reduction=reduction, bias=x) for x in (bias, stored)
        )
        np.testing.assert_array_equal(ours, theirs)
    weights = fastattn.key_weights(query, key, bias=stored)
    assert_same_bits(fastattn.key_weights(query, key, bias=bias), weights)
    packed, starts = [x.swapaxes(0, 1) for x in (query, key, value)], [0, 13, 13, 40]
    (out, lse), (same, _) = (
        fastattn.varlen_attention(*packed, starts, bias=x, return_lse=True) for x in (bias, stored)
    )
    assert_same_bits(out, same)
    got, theirs = (
        fastattn.varlen_attention_backward(out, *packed, out, lse, starts, bias=x, wrt=("query", "bias"))
        for x in (bias, stored)
    )
    assert_same_bits(got.query, theirs.query)
    change = theirs.bias[None]
    exact = expected_gradient(change, bias)
    np.testing.assert_allclose(got.bias[0], exact[0], atol=1e-12)
    np.testing.assert_allclose(got.bias[1][0][0], exact[1][0][0], atol=1e-12)
    np.testing.assert_allclose(got.bias[1][1], exact[1][1], atol=1e-12)
    # Of documents whose numbers of queries and keys differ a grid counts keys as they are packed.
    others = [0, 20, 20, 40]
    assert_same_bits(
        fastattn.varlen_attention(*packed, starts, others, bias=of_grid),
        fastattn.varlen_attention(*packed, starts, others, bias=of_grid.materialize(4, 40, 40)),
    )


def test_a_score_mod_beside_a_sum():
    pytest.importorskip("numba")
    (query, key, value), biases = biases_of(GRIDS[1], "float32")

    def twice(score, b, h, q_idx, kv_idx):
        return 2 * score

    for name in ("grid", "grid, per key, relative"):
        bias, stored = biases[name]
        got, wanted = (
            fastattn.flex_attention(query, key, value, score_mod=twice, bias=x, return_lse=True)
            for x in (bias, stored)
        )
        for ours, theirs in zip(got, wanted, strict=True):
            assert_same_bits(ours, theirs)


def test_backends_that_add_no_biases_say_so():
    x = np.zeros((4, 6, 8), np.float32)
    with pytest.raises(fastattn.BackendError, match="it reads one array as a bias, and this one is a sum"):
        fastattn.attention(x, x, x, bias=Grid(np.zeros((6, 2)), np.zeros((6, 3))), backend="numba")
    one = (np.ones((6, 6), np.float32),)
    assert_same_bits(fastattn.attention(x, x, x, bias=one, backend="numba"), x)


def test_sums_are_values():
    rows, columns = np.arange(6.0).reshape(3, 2), np.arange(12.0).reshape(3, 4)
    grid, relative = Grid(rows, columns), Relative([1.0, 2.0])
    assert grid == Grid(rows.tolist(), columns) != Grid(columns, rows)
    assert hash(grid) == hash(Grid(rows, columns)) and pickle.loads(pickle.dumps(grid)) == grid
    assert repr(grid) == "Grid(rows=<float64 (3, 2)>, columns=<float64 (3, 4)>)"
    assert repr(grid + relative) == f"{grid!r} + {relative!r}"
    assert grid + relative == Sum(grid, relative) != relative + grid
    assert (grid + relative) + grid == grid + (relative + grid) == Sum(grid, relative, grid)
    assert hash(grid + relative) == hash(Sum(grid, relative))
    assert pickle.loads(pickle.dumps(grid + relative)) == grid + relative
    for bias, field in ((grid, "rows"), (grid + relative, "terms")):
        with pytest.raises(AttributeError, match=f"cannot assign to field {field!r}"):
            setattr(bias, field, None)
    with pytest.raises(ValueError, match="read-only"):
        grid.rows[0] = 0
    rows[:] = 7  # they are not copied
    assert (grid.materialize(1, 3, 8)[0, 0] == 7 + np.tile(columns[0], 2)).all()
    half = Grid(np.ones((3, 2), np.float16), np.ones((3, 4), ml_dtypes.bfloat16))
    assert half.materialize(1, 3, 8).dtype == np.float32
    assert (grid + relative).materialize(2, 3, 8).shape == (2, 3, 8)


def test_what_is_refused_of_sums():
    x, grid = np.zeros((4, 6, 8)), Grid(np.zeros((6, 2)), np.zeros((6, 3)))
    for call, error, said in (
        (lambda: Grid(np.zeros(3), np.zeros((2, 3))), ValueError, r"rows must have shape .* got \(3,\)"),
        (lambda: Grid(np.zeros((2, 3)), [1.0]), ValueError, r"columns must have shape .* got \(1,\)"),
        (lambda: Grid(np.zeros((2, 3), int), x[0]), TypeError, "rows must be a float16, .* got dtype int64"),
        (
            lambda: Grid(np.zeros((2, 3)), np.zeros((3, 3))),
            ValueError,
            r"that broadcast .*\(2, 3\) and \(3, 3\)",
        ),
        (lambda: grid + x, TypeError, r"added to others alone, got ndarray: say bias=\(object, array\)"),
        (lambda: x + grid, TypeError, r"added to others alone, got ndarray: say bias=\(array, object\)"),
        (lambda: grid + 1.0, TypeError, "added to others alone, got float"),
        (lambda: Sum(grid, x), TypeError, "the terms must be bias objects, got ndarray"),
        (lambda: grid.materialize(1, 6, 7), ValueError, r"Sh \* Sw = 2 \* 3 = 6 keys, and there are S = 7"),
        (
            lambda: fastattn.attention(x, x[:, :5], x[:, :5], bias=grid),
            ValueError,
            "= 6 keys, .* S = 5; query",
        ),
        (
            lambda: fastattn.attention(x[:, :5], x, x, bias=grid),
            ValueError,
            "the rows of Grid.* do not broadcast",
        ),
        (
            lambda: fastattn.attention(x, x, x, bias=(grid, x)),
            ValueError,
            r"bias\[1\] of shape \(4, 6, 8\) does not",
        ),
        (
            lambda: fastattn.attention(x, x, x, bias=(grid, masks.Causal())),
            TypeError,
            r"bias\[1\] must be .* Causal",
        ),
        (
            lambda: fastattn.attention(x, x, x, bias=(grid, None)),
            TypeError,
            r"bias\[1\] must be an array, got NoneType",
        ),
        (lambda: fastattn.attention_backward(x, x, x, x, x, x[..., 0], wrt="bias"), ValueError, "not given"),
    ):
        with pytest.raises(error, match=said):
            call()


def test_a_tuple_of_numbers_is_an_array():
    x = np.random.default_rng(0).standard_normal((2, 3, 8))
    rows = ((0.0, 1.0, 2.0), (3.0, 4.0, 5.0), (6.0, 7.0, 8.0))
    assert_same_bits(fastattn.attention(x, x, x, bias=rows), fastattn.attention(x, x, x, bias=np.array(rows)))
