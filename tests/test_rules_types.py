"""Rule 1: types as in np.linalg."""

from __future__ import annotations

import numpy as np
import pytest

import fastattn
from tests import naive
from tests.cases import FLOATS, random_arrays
from tests.tolerances import assert_attention, assert_same_bits


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_keep_their_type(engine, dtype):
    for got in engine.everything(*random_arrays(dtype=dtype)):
        assert got.dtype == np.dtype(dtype)
        assert got.dtype.isnative


def test_double_is_computed_in_double(engine):
    """An error far below what single precision could reach, on scores and values alike."""
    arrays = random_arrays(len_k=200, dtype="float64")
    out, lse, weights = engine.everything(*arrays)
    exact = naive.attention(*arrays)
    for got, wanted in ((out, exact.out), (lse, exact.lse), (weights, exact.weights)):
        assert np.abs(got - wanted).max() < 1e-13


@pytest.mark.parametrize("double", [("query",), ("key",), ("value",), ("query", "value")], ids=str)
def test_mixed_floats_promote_to_the_wider(engine, double):
    arrays = dict(zip(("query", "key", "value"), random_arrays(), strict=True))
    for name in double:
        arrays[name] = arrays[name].astype(np.float64) + 1e-12
    results = engine.everything(*arrays.values())
    assert all(got.dtype == np.float64 for got in results)
    assert_attention(results, *(array.astype(np.float64) for array in arrays.values()))


INTEGERS = [np.bool_, np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64, ">i4"]


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda dtype: np.dtype(dtype).str)
def test_integers_and_bools_become_double(engine, dtype):
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 2 if dtype is np.bool_ else 5, (2, n, 8)).astype(dtype) for n in (5, 9, 9)]
    results = engine.everything(*arrays)
    assert all(got.dtype == np.float64 for got in results)
    assert_attention(results, *(array.astype(np.float64) for array in arrays))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_integer_array_makes_all_double(engine, which):
    arrays = list(random_arrays(spread=2.0))
    arrays[which] = np.rint(arrays[which] * 3).astype(np.int8)
    results = engine.everything(*arrays)
    assert all(got.dtype == np.float64 for got in results)
    assert_attention(results, *(array.astype(np.float64) for array in arrays))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("swapped", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_foreign_byte_order_gives_the_same_bits(engine, swapped, dtype):
    arrays = list(random_arrays(dtype=dtype))
    expected = engine.everything(*arrays)
    for which in swapped:
        arrays[which] = arrays[which].astype(arrays[which].dtype.newbyteorder())
    for got, wanted in zip(engine.everything(*arrays), expected, strict=True):
        assert got.dtype.isnative
        assert_same_bits(got, wanted)


def test_nested_lists(engine):
    query, key, value = [[1.0, 2.0]], [[0.5, -1.0], [2.0, 0.0]], [[1.0], [3.0]]
    results = engine.everything(query, key, value)
    assert results[0].dtype == np.float64
    assert_attention(results, *(np.array(rows) for rows in (query, key, value)))


class Wrapped:
    """What `np.asarray` understands without being an ndarray."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array if dtype is None else self.array.astype(dtype)


def test_array_likes_and_subclasses(engine):
    arrays = random_arrays()
    expected = engine.attention(*arrays)
    assert_same_bits(engine.attention(*map(Wrapped, arrays)), expected)


def test_matrix_subclass_gives_a_plain_array(engine):
    arrays = [array[0] for array in random_arrays(heads=1)]
    with pytest.warns(PendingDeprecationWarning):
        matrices = [np.matrix(array) for array in arrays]
    got = engine.attention(*matrices)
    assert type(got) is np.ndarray
    assert_same_bits(got, engine.attention(*arrays))


@pytest.mark.parametrize("bias_dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_bias_and_sinks_never_widen(engine, dtype, bias_dtype):
    arrays = random_arrays(dtype=dtype)
    extras = {"bias": np.full((17, 33), 0.5, bias_dtype), "sinks": np.full(2, 0.25, "float64")}
    for got in engine.everything(*arrays, **extras):
        assert got.dtype == np.dtype(dtype)


def test_double_bias_is_rounded_to_the_compute_type(engine):
    arrays = random_arrays()
    bias = np.random.default_rng(0).standard_normal((17, 33))
    assert_same_bits(
        engine.attention(*arrays, bias=bias), engine.attention(*arrays, bias=bias.astype(np.float32))
    )


def test_double_bias_beyond_single_precision_weighs_nothing(engine):
    """-1e300 has no single-precision neighbour but -inf; its key counts for nothing either way."""
    query, key, value = random_arrays(len_q=1, len_k=4)
    out = engine.attention(query, key, value, bias=np.array([[-1e300, 0, 0, 0]]))
    assert_attention((out,), query, key[:, 1:], value[:, 1:])


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint16, np.int64, np.uint64, ">i2"], ids=lambda d: np.dtype(d).str
)
def test_integer_masks_mean_non_zero(engine, dtype):
    arrays = random_arrays()
    allowed = np.random.default_rng(0).random((17, 33)) < 0.5
    # Numbers whose low bytes are zero, where the type has room: only a full test for zero is right.
    number = np.dtype(dtype).type(np.iinfo(dtype).max // 2 + 1)
    mask = np.where(allowed, number, 0).astype(dtype)
    assert_same_bits(engine.attention(*arrays, mask=mask), engine.attention(*arrays, mask=allowed))


@pytest.mark.parametrize("argument", ["query", "key", "value"])
@pytest.mark.parametrize(
    "dtype",
    [np.complex64, np.complex128, object, "U3", "S3", np.longdouble, "M8[s]", "m8[s]", [("a", "f4")]],
    ids=str,
)
def test_other_types_are_refused_by_name(backend, argument, dtype):
    if np.dtype(dtype) == np.float64:
        pytest.skip("longdouble is float64 here")
    arrays = dict(zip(("query", "key", "value"), random_arrays(), strict=True))
    arrays[argument] = np.zeros(arrays[argument].shape, dtype)
    with pytest.raises(TypeError) as caught:
        fastattn.attention(**arrays, backend=backend.backend)
    assert str(caught.value).startswith(f"{argument} has dtype {np.dtype(dtype)}; supported are float32, ")
