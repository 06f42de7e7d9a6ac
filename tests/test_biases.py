"""Bias objects: the same results as the array that they stand for, and gradients of their own arrays."""

from __future__ import annotations

import pickle

import ml_dtypes
import numpy as np
import pytest

import fastattn
from fastattn import masks
from fastattn.biases import Relative
from fastattn.masks.map import Size
from tests.cases import FLOATS
from tests.conftest import computes_gradients
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
def test_the_bits_of_gradients_depend_on_no_thread(engine):
    for heads in (1, 6):
        query, key, value, table = inputs(6, 3, 300, 700, 400, heads, np.float32)
        grad_out = np.ones((2, 6, 300, 24), np.float32)
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
