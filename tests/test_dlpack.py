"""Arrays of other libraries on the host: read where they are, and answered in their library."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import fastattn
from fastattn._machine import device
from tests.cases import random_arrays
from tests.conftest import without
from tests.tolerances import assert_same_bits

DTYPES = ["float32", "float64", "float16", "bfloat16"]


class Strict:
    """An array that says what it holds by DLPack alone, with a library that takes arrays by it."""

    def __init__(self, array):
        self.held = array

    def __dlpack__(self, **options):
        return self.held.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.held.__dlpack_device__()

    def __array_namespace__(self):
        return Strict

    @staticmethod
    def from_dlpack(other):
        return Strict(np.from_dlpack(other))


def of_torch(array):
    torch = pytest.importorskip("torch")
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def of_jax(array):
    jax = pytest.importorskip("jax")
    return jax.numpy.asarray(array)


def of_strict(array):
    return Strict(array)


LIBRARIES = {"torch": of_torch, "jax": of_jax, "strict": of_strict}


@pytest.fixture(params=LIBRARIES)
def library(request):
    if request.param != "jax":
        yield LIBRARIES[request.param]
        return
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):  # JAX has no float64 without
        yield LIBRARIES["jax"]


def back(array):
    """As an ndarray, whatever library it is of."""
    assert not isinstance(array, np.ndarray)
    return device.on_host(array)


def arrays(dtype, **sizes):
    return [np.ascontiguousarray(x.astype(dtype)) for x in random_arrays(3, **sizes)]


@pytest.mark.parametrize("dtype", DTYPES)
@without(lambda library, dtype: library == "strict" and dtype == "bfloat16")  # NumPy exports none
def test_results_are_of_the_library(library, dtype):
    given = arrays(dtype)
    theirs = [library(x) for x in given]
    options = {"causal": "bottom_right", "return_lse": True, "return_weights": True}
    results = fastattn.attention(*theirs, **options)
    assert all(type(result) is type(theirs[0]) for result in results)
    expected = fastattn.attention(*given, **options)
    for result, array in zip(results, expected, strict=True):
        assert_same_bits(back(result), array)
    # A mixture is of the query's.
    assert type(fastattn.attention(theirs[0], *given[1:])) is type(theirs[0])
    assert type(fastattn.attention(given[0], *theirs[1:])) is np.ndarray


def test_every_function(library):
    q, k, v = arrays("float32", lead=(1,), len_q=6, len_k=6)
    theirs = [library(x) for x in (q, k, v)]
    kind, offsets = type(theirs[0]), [0, 2, 6]
    packed, their_packed = q[0].swapaxes(0, 1).copy(), library(q[0].swapaxes(0, 1).copy())
    cos, sin = fastattn.rope_tables(6, q.shape[-1])
    out, lse = fastattn.attention(q, k, v, return_lse=True)
    for function, ours, given in [
        (fastattn.scaled_dot_product_attention, (q, k, v), theirs),
        (fastattn.linear_attention, (q, k, v), theirs),
        (lambda x: fastattn.rope(x, cos, sin), (q,), theirs[:1]),
        (lambda x: fastattn.varlen_attention(x, x, x, offsets, offsets), (packed,), (their_packed,)),
        (lambda *x: fastattn.flex_attention(*x, score_mod=lambda s, b, h, i, j: s + i), (q, k, v), theirs),
    ]:
        result = function(*given)
        assert type(result) is kind
        assert_same_bits(back(result), function(*ours))
    cache = fastattn.KVCache(1, k.shape[1], k.shape[-1], v.shape[-1])
    cache.append(*theirs[1:])
    expected = cache.attend(q)
    for result in (cache.attend(theirs[0]), cache.attend(theirs[0], return_lse=True)[0]):  # prepared, or not
        assert type(result) is kind
        assert_same_bits(back(result), expected)
    assert type(cache.attend(theirs[0], return_lse=True)[1]) is kind
    own = np.empty_like(expected)
    assert cache.attend(theirs[0], out=own) is own
    merged = fastattn.merge_attention([library(out)] * 2, [library(lse)] * 2)
    gradients = fastattn.attention_backward(library(out), *theirs, library(out), library(lse))
    found = [*merged, gradients.query, gradients.key, gradients.value]
    assert all(type(result) is kind for result in found) and gradients.bias is None
    expected = fastattn.attention_backward(out, q, k, v, out, lse)
    assert_same_bits(back(gradients.value), expected.value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_copied(dtype):
    torch = pytest.importorskip("torch")
    tensor = of_torch(arrays(dtype)[0])
    array = device.on_host(tensor)
    assert array.ctypes.data == tensor.data_ptr() and array.strides[-1] == tensor.element_size()
    assert device.in_library_of(tensor, array).data_ptr() == tensor.data_ptr()
    assert device.from_dlpack(tensor[:, 1:, ::2]).shape == tensor[:, 1:, ::2].shape
    assert device.in_library_of(torch.ones(1), array).dtype == tensor.dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_place", [False, True])
def test_out(dtype, in_place):
    torch = pytest.importorskip("torch")
    given = arrays(dtype, len_q=5, len_k=5)
    theirs = [of_torch(x.copy()) for x in given]
    out = theirs[0] if in_place else torch.empty_like(theirs[0])
    lse = fastattn.attention(*theirs, out=out, return_lse=True)
    assert lse[0] is out and type(lse[1]) is torch.Tensor
    assert_same_bits(back(out), fastattn.attention(*given))
    cos, sin = fastattn.rope_tables(5, given[0].shape[-1])
    expected = fastattn.rope(back(out).copy(), cos, sin)
    assert fastattn.rope(out, cos, sin, out=out) is out
    assert_same_bits(back(out), expected)


def test_out_of_what_is_never_changed():
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((1, 2, 3, 4))
    with pytest.raises(ValueError, match="out must be writeable, got a read-only array"):
        fastattn.attention(x, x, x, out=x)


def test_a_library_that_takes_no_arrays():
    class Mute(Strict):
        def __array_namespace__(self):
            return object()

    x = np.ones((1, 2, 3, 4))
    assert type(fastattn.attention(Mute(x), Mute(x), Mute(x))) is np.ndarray


def test_errors():
    class Broken(Strict):
        def __dlpack__(self, **_):
            return "no capsule"

    x = np.ones((1, 2, 3, 4))
    with pytest.raises((TypeError, ValueError), match="key does not convert to an array"):
        fastattn.attention(x, Broken(x), x)
    with pytest.raises(TypeError, match="out must be an ndarray, got list"):
        fastattn.attention(x, x, x, out=[1.0])
    assert fastattn.attention([[1.0]], [[1.0]], [[1.0]]) == 1.0
