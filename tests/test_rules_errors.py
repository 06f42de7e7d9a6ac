"""Rule 8: errors come before any work and name the argument, what it got, what it needs and all shapes."""

from __future__ import annotations

import numpy as np
import pytest

import fastattn
from fastattn import masks
from tests.cases import random_arrays
from tests.process import python
from tests.tolerances import assert_same_bits

LEAD, HEADS, LEN_Q, LEN_K, DIM, VALUE_DIM = 2, 4, 5, 9, 6, 3


def good():
    """Arguments that are right, to be made wrong one at a time."""
    query, key, value = random_arrays(
        lead=(LEAD,), heads=HEADS, kv_heads=2, len_q=LEN_Q, len_k=LEN_K, head_dim=DIM, value_dim=VALUE_DIM
    )
    return {"query": query, "key": key, "value": value}


def floats(*shape):
    return np.zeros(shape, np.float32)


def wrong(change, error, *words):
    return pytest.param(change, error, words, id="-".join([*change, *words[:2]]).replace(" ", ""))


SHAPE_ERRORS = [
    wrong({"query": floats()}, ValueError, "query", "axes"),
    wrong({"query": floats(6)}, ValueError, "query", "(6,)"),
    wrong({"key": floats(9)}, ValueError, "key", "(9,)"),
    wrong({"value": floats(3)}, ValueError, "value", "(3,)"),
    wrong({"query": floats(5, 6)}, ValueError, "(5, 6)", "one head"),
    wrong({"key": floats(9, 6), "value": floats(9, 3)}, ValueError, "(9, 6)", "one head"),
    wrong({"key": floats(2, 2, 9, 7)}, ValueError, "head_dim", "6", "7"),
    wrong({"value": floats(2, 2, 8, 3)}, ValueError, "length", "9", "8"),
    wrong({"value": floats(2, 4, 9, 3)}, ValueError, "heads", "2", "4"),
    wrong({"query": floats(2, 5, 5, 6)}, ValueError, "heads", "5", "2", "multiple"),
    wrong({"query": floats(2, 1, 5, 6)}, ValueError, "heads", "1", "2"),
    wrong({"key": floats(2, 0, 9, 6), "value": floats(2, 0, 9, 3)}, ValueError, "heads", "4", "0"),
    wrong({"query": floats(3, 4, 5, 6)}, ValueError, "broadcast", "(3, 4, 5, 6)"),
    wrong({"query": floats(2, 4, 5, 0), "key": floats(2, 2, 9, 0)}, ValueError, "head_dim", "0"),
]

TYPE_ERRORS = [
    wrong({"query": np.zeros((2, 4, 5, 6), complex)}, TypeError, "query", "complex128", "float32"),
    wrong({"key": np.zeros((2, 2, 9, 6), object)}, TypeError, "key", "object", "float32"),
    wrong({"value": np.zeros((2, 2, 9, 3), "U2")}, TypeError, "value", "<U2", "float32"),
    wrong({"bias": np.zeros((5, 9), complex)}, TypeError, "bias", "complex128", "float32"),
    wrong({"bias": np.zeros((5, 9), bool)}, TypeError, "bias", "bool", "mask="),
    wrong({"bias": np.zeros((5, 9), np.longdouble)}, TypeError, "bias", str(np.dtype(np.longdouble))),
    wrong({"mask": floats(5, 9)}, TypeError, "mask", "float32", "bias=", ".astype(bool)"),
    wrong({"mask": np.zeros((5, 9))}, TypeError, "mask", "float64", "bias=", ".astype(bool)"),
    wrong({"mask": np.zeros((5, 9), complex)}, TypeError, "mask", "complex128"),
    wrong({"mask": np.zeros((5, 9), object)}, TypeError, "mask", "object"),
    wrong({"mask": "causal"}, TypeError, "mask", "<U6"),
    wrong({"sinks": np.zeros(4, complex)}, TypeError, "sinks", "complex128"),
    wrong({"key_lengths": [3.0, 4.0]}, TypeError, "key_lengths", "float64", "integers"),
    wrong({"scale": "big"}, TypeError, "scale", "'big'"),
    wrong({"scale": 1j}, TypeError, "scale", "1j"),
    wrong({"scale": floats(2)}, TypeError, "scale"),
    wrong({"softcap": "big"}, TypeError, "softcap", "'big'"),
    wrong({"window": 3}, TypeError, "window", "(left, right)", "3"),
    wrong({"window": (1.5, 0)}, TypeError, "window", "1.5"),
    wrong({"out": [1.0]}, TypeError, "out", "list"),
]

VALUE_ERRORS = [
    wrong({"mask": np.ones((5, 8), bool)}, ValueError, "mask", "(5, 8)", "(2, 4, 5, 9)"),
    wrong({"mask": np.ones((3, 5, 9), bool)}, ValueError, "mask", "(3, 5, 9)", "(2, 4, 5, 9)"),
    wrong({"mask": np.ones((1, 2, 4, 5, 9), bool)}, ValueError, "mask", "(1, 2, 4, 5, 9)", "(2, 4, 5, 9)"),
    wrong({"mask": masks.Causal()}, ValueError, "mask", "Causal", "5", "9"),
    wrong({"mask": masks.KeyLengths([1, 2, 3])}, ValueError, "mask", "(3,)", "(2,)"),
    wrong({"bias": floats(5, 8)}, ValueError, "bias", "(5, 8)", "(2, 4, 5, 9)"),
    wrong({"bias": floats(3, 1, 5, 9)}, ValueError, "bias", "(3, 1, 5, 9)", "(2, 4, 5, 9)"),
    wrong({"causal": True}, ValueError, "causal", "5", "9", "top_left", "bottom_right"),
    wrong({"causal": "left"}, ValueError, "causal", "'left'", "top_left", "bottom_right"),
    wrong({"causal": None}, ValueError, "causal", "None"),
    wrong({"window": (1, 2, 3)}, ValueError, "window", "(1, 2, 3)", "(left, right)"),
    wrong({"window": (-1, 0)}, ValueError, "window", "left", "-1"),
    wrong({"window": (0, -5)}, ValueError, "window", "right", "-5"),
    wrong({"key_lengths": [3, 10]}, ValueError, "key_lengths", "10", "9"),
    wrong({"key_lengths": [-1, 3]}, ValueError, "key_lengths", "-1"),
    wrong({"key_lengths": [1, 2, 3]}, ValueError, "key_lengths", "(3,)", "(2,)"),
    wrong({"key_lengths": [[1, 2]]}, ValueError, "key_lengths", "(1, 2)", "(2,)"),
    wrong({"scale": np.nan}, ValueError, "scale", "nan", "finite"),
    wrong({"scale": np.inf}, ValueError, "scale", "inf", "finite"),
    wrong({"softcap": 0.0}, ValueError, "softcap", "0.0", "positive"),
    wrong({"softcap": -3.0}, ValueError, "softcap", "-3.0", "positive"),
    wrong({"softcap": np.nan}, ValueError, "softcap", "nan"),
    wrong({"softcap": np.inf}, ValueError, "softcap", "inf"),
    wrong({"sinks": floats(2)}, ValueError, "sinks", "(2,)", "(4,)"),
    wrong({"sinks": np.float32(1)}, ValueError, "sinks", "()", "(4,)"),
    wrong({"layout": "sbhd"}, ValueError, "layout", "'sbhd'", "bhsd", "bshd"),
    wrong({"layout": None}, ValueError, "layout", "None"),
]


@pytest.mark.parametrize(("change", "error", "words"), [*SHAPE_ERRORS, *TYPE_ERRORS, *VALUE_ERRORS])
def test_message(backend, change, error, words):
    arguments = good() | change
    with pytest.raises(error) as caught:
        backend.attention(**arguments)
    message = str(caught.value)
    shapes = [str(np.shape(arguments[name])) for name in ("query", "key", "value")]
    for word in [*words, *shapes]:
        assert word in message, f"{word!r} is missing in: {message}"


@pytest.mark.parametrize(("change", "error", "words"), [*SHAPE_ERRORS, *TYPE_ERRORS, *VALUE_ERRORS])
def test_out_is_untouched(backend, change, error, words):
    if "out" in change:
        pytest.skip("this error is about out itself")
    out = np.full((LEAD, HEADS, LEN_Q, VALUE_DIM), 7.0, np.float32)
    with pytest.raises(error):
        backend.attention(**good() | {"out": out} | change)
    assert (out == 7).all()


def read_only():
    out = floats(LEAD, HEADS, LEN_Q, VALUE_DIM)
    out.flags.writeable = False
    return out


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (floats(LEAD, HEADS, LEN_Q, VALUE_DIM + 1), ["(2, 4, 5, 4)", "(2, 4, 5, 3)"]),
        (floats(1, LEAD, HEADS, LEN_Q, VALUE_DIM), ["(1, 2, 4, 5, 3)", "(2, 4, 5, 3)"]),
        (floats(HEADS, LEN_Q, VALUE_DIM), ["(4, 5, 3)", "(2, 4, 5, 3)"]),
        (np.zeros((LEAD, HEADS, LEN_Q, VALUE_DIM)), ["float64", "float32"]),
        (floats(LEAD, HEADS, LEN_Q, VALUE_DIM).astype(">f4"), [">f4", "float32"]),
        (np.zeros((LEAD, HEADS, LEN_Q, VALUE_DIM), np.int32), ["int32", "float32"]),
        (read_only(), ["read-only"]),
        (np.lib.stride_tricks.as_strided(floats(60), (2, 4, 5, 3), (0, 0, 0, 4)), ["share"]),
    ],
    ids=["dim", "rank", "no_lead", "double", "swapped", "integer", "read_only", "overlapping_itself"],
)
def test_out_that_does_not_fit(backend, out, words):
    with pytest.raises((ValueError, TypeError)) as caught:
        backend.attention(**good(), out=out)
    for word in ["out", *words, *(str(array.shape) for array in good().values())]:
        assert word in str(caught.value), f"{word!r} is missing in: {caught.value}"
    assert not out.any()


@pytest.mark.parametrize(
    ("num_threads", "error"),
    [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("2", TypeError), (True, TypeError)],
)
def test_num_threads(backend, num_threads, error):
    with pytest.raises(error, match="num_threads") as caught:
        backend.attention(**good(), num_threads=num_threads)
    assert repr(num_threads) in str(caught.value)
    with pytest.raises(error, match="num_threads") as caught:
        fastattn.set_num_threads(num_threads)
    assert repr(num_threads) in str(caught.value)


def test_ragged_lists():
    with pytest.raises((ValueError, TypeError), match="query"):
        fastattn.attention([[1.0, 2.0], [3.0]], [[1.0, 2.0]], [[1.0]])


def test_masked_arrays_are_not_silently_unmasked():
    """The library reads a masked array's data; its mask would be lost without a word."""
    arguments = good()
    arguments["key"] = np.ma.masked_array(arguments["key"], mask=arguments["key"] > 0)
    with pytest.raises(TypeError, match="key"):
        fastattn.attention(**arguments)


class TestBackendChoice:
    @pytest.mark.parametrize("name", ["fast", "", "Cython"])
    def test_unknown_name_lists_the_names(self, name):
        with pytest.raises(ValueError) as caught:
            fastattn.attention(**good(), backend=name)
        for word in ["backend", repr(name), "cython", "reference"]:
            assert word in str(caught.value)

    def test_not_a_name(self):
        with pytest.raises((TypeError, ValueError), match="backend"):
            fastattn.attention(**good(), backend=3)

    def test_environment_variable_sets_the_default(self):
        code = """
import numpy as np, fastattn
from fastattn.backends import reference
ran = []
run = type(reference.backend).run
type(reference.backend).run = lambda self, *a: (ran.append(1), run(self, *a))[1]
fastattn.attention(np.ones((2, 3)), np.ones((4, 3)), np.ones((4, 2)))
print(len(ran))
"""
        assert python(code, env={"FASTATTN_BACKEND": "reference"}).strip() == "1"

    def test_unknown_name_in_the_environment(self):
        code = """
import numpy as np, fastattn
try:
    fastattn.attention(np.ones((2, 3)), np.ones((4, 3)), np.ones((4, 2)))
except ValueError as error:
    print(error)
"""
        message = python(code, env={"FASTATTN_BACKEND": "nonsense"})
        for word in ("FASTATTN_BACKEND", "nonsense", "cython", "reference"):
            assert word in message

    def test_backend_error_is_public(self):
        assert issubclass(fastattn.BackendError, Exception)

    def test_a_good_call_after_a_bad_one(self, backend):
        expected = backend.attention(**good())
        with pytest.raises(ValueError):
            backend.attention(**good(), softcap=0)
        assert_same_bits(backend.attention(**good()), expected)
