"""Errors of functions and of what they read name the function, the line and the argument."""

from __future__ import annotations

import ctypes
import functools
import time
from pathlib import Path

import numpy as np
import pytest

import fastattn
from tests.flex_gallery import GALLERY, B, D, H, L, S, arrays, aux_of, indices
from tests.process import python

numba = pytest.importorskip("numba")


def too_few(score, b):
    return score


def text(score, b, h, q_idx, kv_idx):
    return "score"


def nothing(score, b, h, q_idx, kv_idx):
    pass


def unsupported(score, b, h, q_idx, kv_idx):
    with open("file") as file:
        return file


def undefined(score, b, h, q_idx, kv_idx):
    more = score + 1
    return never_defined(more)  # noqa: F821


def raising(score, b, h, q_idx, kv_idx):
    if kv_idx > 3:
        raise ValueError("too far")
    return score


def asserting(score, b, h, q_idx, kv_idx):
    assert kv_idx < 3
    return score


def beyond(score, b, h, q_idx, kv_idx, table):
    return score + table[kv_idx]


def printing(score, b, h, q_idx, kv_idx, table):
    if q_idx > 10**9:
        print(score)
    return score


def tell(x):
    print("x", x)
    return x


def calls_a_printing_one(score, b, h, q_idx, kv_idx, table):
    more = score + 1
    return tell(more)


def in_python(score, b, h, q_idx, kv_idx, table):
    with numba.objmode(y="float64"):
        y = score + 1
    return y


callback = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(lambda x: x)
error_of_python = ctypes.pythonapi.PyErr_Occurred


def calls_back(score, b, h, q_idx, kv_idx, table):
    return callback(score)


def asks_python(score, b, h, q_idx, kv_idx, table):
    error_of_python()
    return score


@numba.njit
def element(array, index):
    return array[index]


compiled_functions = (element,)


@numba.vectorize
def element_of_corners(index):
    return corners[index]


corners = np.arange(4.0)


def reads_by_ufunc(score, b, h, q_idx, kv_idx):
    return score + element_of_corners(kv_idx)


def reads_by_compiled(score, b, h, q_idx, kv_idx):
    return score + element(corners, kv_idx)


@numba.cfunc("float64(float64)")
def compiled_for_c(x):
    return x


def calls_by_address(score, b, h, q_idx, kv_idx, table):
    return compiled_for_c(score)


def calls_out_of_a_tuple(score, b, h, q_idx, kv_idx, table):
    return score + compiled_functions[0](table, kv_idx + 99)


def strided(score, b, h, q_idx, kv_idx, table):
    return np.lib.stride_tricks.as_strided(table, (100,), (8,))[99]


def taken_along(score, b, h, q_idx, kv_idx, table):
    return np.take_along_axis(table, np.array([99]), 0)[0]


def taken_by_a_method(score, b, h, q_idx, kv_idx, table):
    return table.take(kv_idx + 99, 0)


def taken_of_an_axis(score, b, h, q_idx, kv_idx, table):
    return np.take(table, np.array([99]), axis=0)[0]


def written_flat(score, b, h, q_idx, kv_idx, table):
    table.flat[99] = 3.0
    return score


def written_diagonal(score, b, h, q_idx, kv_idx, table):
    np.fill_diagonal(table.reshape(3, 4), 3.0)
    return score


class TestErrors:
    @pytest.mark.parametrize(
        ("function", "line", "said"),
        [
            (too_few, 0, "5 arguments"),
            (text, 0, "must return one real number"),
            (nothing, 0, "must return one real number"),
            (unsupported, 0, "not supported"),
            (undefined, None, "never_defined"),
            (raising, 2, "may raise"),
            (asserting, 1, "may raise"),
        ],
    )
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_names_the_function_and_the_line(self, function, line, said, dtype):
        out = np.full((B, H, L, D), 7, dtype)
        with pytest.raises((TypeError, ValueError)) as caught:
            fastattn.flex_attention(*arrays(dtype), score_mod=function, out=out)
        message = str(caught.value)
        assert len(message.splitlines()) == 3, message
        assert repr(function.__name__) in message
        assert said in message
        assert Path(__file__).name in message
        if line is not None:
            assert f"line {function.__code__.co_firstlineno + line}" in message
        assert (out == 7).all()

    @pytest.mark.filterwarnings("ignore:First-class function type")
    @pytest.mark.parametrize(
        ("function", "line", "said"),
        [
            (printing, 2, "print takes the GIL"),
            pytest.param(calls_a_printing_one, None, "print takes the GIL", marks=pytest.mark.slow),
            pytest.param(in_python, 1, "takes the GIL", marks=pytest.mark.slow),
            (calls_back, 1, "calls Python by way of ctypes"),
            pytest.param(asks_python, 1, "calls Python by way of ctypes", marks=pytest.mark.slow),
            (calls_by_address, 1, "takes the GIL"),
            (calls_out_of_a_tuple, 1, "called by its address, as one in a tuple"),
            (strided, 1, "as_strided reads whatever memory"),
            pytest.param(taken_along, 1, "take_along_axis does not check", marks=pytest.mark.slow),
            pytest.param(taken_by_a_method, 1, "take with an axis does not check", marks=pytest.mark.slow),
            (taken_of_an_axis, 1, "take with an axis does not check"),
            (written_flat, 1, "an index of .flat is not checked"),
            pytest.param(written_diagonal, 1, "fill_diagonal writes to an array", marks=pytest.mark.slow),
        ],
    )
    def test_refuses_what_takes_the_gil_and_what_no_check_covers(self, function, line, said):
        table = np.arange(100.0)[:12]
        with pytest.raises(TypeError) as caught:
            fastattn.flex_attention(*arrays(), score_mod=function, aux=(table,))
        message = str(caught.value)
        assert len(message.splitlines()) == 3, message
        assert said in message
        assert Path(__file__).name in message
        line = tell.__code__.co_firstlineno + 1 if line is None else function.__code__.co_firstlineno + line
        assert f"line {line}" in message
        assert (table == np.arange(12)).all()

    @pytest.mark.parametrize("function", [reads_by_ufunc, reads_by_compiled])
    def test_what_compiled_functions_read_is_checked(self, function):
        few = [x[..., :4, :] for x in arrays()]
        for called in (function, functools.partial(function)):
            fastattn.flex_attention(*few, score_mod=called)
            with pytest.raises(IndexError, match=r"reads outside of corners of shape \(4,\) .*0, 4\)"):
                fastattn.flex_attention(*arrays(), score_mod=called)

    def test_a_mask_that_prints(self):
        def printing_mask(b, h, q_idx, kv_idx):
            print(q_idx)
            return kv_idx <= q_idx

        with pytest.raises(TypeError, match="print takes the GIL"):
            fastattn.create_block_mask(printing_mask, None, None, 4, 4)

    def test_what_calls_blas_is_taken(self):
        pytest.importorskip("scipy")
        row = np.ones(3)
        got = fastattn.flex_attention(*arrays(), score_mod=lambda s, b, h, i, j: s + np.dot(row, row) * j)
        expected = fastattn.attention(*arrays(), bias=3.0 * np.arange(S))
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)

    def test_a_module_that_numba_does_not_know(self):
        said = "Unknown attribute 'time' .*; functions of numpy and of math are compiled$"
        with pytest.raises(TypeError, match=said):
            fastattn.flex_attention(*arrays(), score_mod=lambda s, b, h, i, j: s + time.time())

    def test_what_cannot_be_captured(self):
        held, a_class, far = {"a": 1.0}, type("Rates", (), {"rate": 0.5}), 2**70
        wide, wide_number = np.ones(3, np.longdouble), np.longdouble(0.5)
        objects, masked = np.ones(3, object), np.ma.array([5.0, 6.0], mask=[True, False])
        pair, small = (masked, 1), np.ones(3, pytest.importorskip("ml_dtypes").bfloat16)
        for function, said in (
            (
                lambda s, b, h, i, j: s + held["a"],
                r"held, from outside of the function, is of <class 'dict'>",
            ),
            (lambda s, b, h, i, j: s + a_class.rate, "a_class, from outside"),
            (lambda s, b, h, i, j: s + far, "far, from outside"),
            (lambda s, b, h, i, j: s + wide_number, "wide_number, from outside"),
            (
                lambda s, b, h, i, j: s + wide[0],
                r"wide, which '<lambda>' reads, .* got dtype (float128|longdouble)",
            ),
            (lambda s, b, h, i, j: s + small[0], "small, which .* got dtype bfloat16"),
            (lambda s, b, h, i, j: s + objects[0], "objects, which .* got dtype object"),
            (lambda s, b, h, i, j: s + masked[0], "masked, which '<lambda>' reads, is a masked array"),
            (lambda s, b, h, i, j: s + pair[0][0], "pair, which '<lambda>' reads, is a masked array"),
        ):
            with pytest.raises(TypeError, match=said):
                fastattn.flex_attention(*arrays(), score_mod=function)
        with pytest.raises(TypeError, match=r"aux\[0\] is a masked array"):
            fastattn.flex_attention(*arrays(), score_mod=beyond, aux=(masked,))

    @pytest.mark.parametrize(
        ("function", "returned"),
        [
            (lambda b, h, i, j: i - j, "int64"),
            (lambda b, h, i, j: 1.0, "float64"),
            (lambda b, h, i, j: None, "none"),
        ],
        ids=["integer", "float", "nothing"],
    )
    def test_masks_are_bools(self, function, returned):
        said = f"^mask_mod '<lambda>' must return a bool, and returns {returned}\n"
        with pytest.raises(TypeError, match=said) as caught:
            fastattn.create_block_mask(function, None, None, L, S)
        assert len(str(caught.value).splitlines()) == 3
        with pytest.raises(TypeError, match=said):
            fastattn.flex_attention(*arrays(), mask_mod=function)

    def test_the_whole_message_is_chained(self):
        with pytest.raises(TypeError) as caught:
            fastattn.flex_attention(*arrays(), score_mod=undefined)
        assert "nopython" in str(caught.value.__cause__)

    def test_an_index_outside_of_aux(self):
        with pytest.raises(
            IndexError, match=r"'beyond' reads outside of aux\[0\] of shape \(69,\)"
        ) as caught:
            fastattn.flex_attention(*arrays(), score_mod=beyond, aux=(np.zeros(S - 1),))
        assert "(b, h, q_idx, kv_idx) = (0, 0, 0, 69)" in str(caught.value)
        assert isinstance(caught.value.__cause__, IndexError)

        def outside(b, h, q_idx, kv_idx, table):
            return table[h, q_idx]

        with pytest.raises(
            IndexError, match=r"^mask_mod 'outside' reads outside of aux\[0\] of shape \(3, 70\) "
        ):
            fastattn.create_block_mask(outside, None, 4, L, S, aux=(np.zeros((3, L), bool),))

    def test_what_raises_within_numba(self):
        def shaped(score, b, h, q_idx, kv_idx, table):
            return score + table.reshape(5)[0]

        with pytest.raises(IndexError, match="reads outside of an array, or raises, for"):
            fastattn.flex_attention(*arrays(), score_mod=shaped, aux=(np.ones(3),))

    @pytest.mark.parametrize(
        ("aux", "said"),
        [
            (5, "aux must be a tuple or list of arrays and numbers, got int"),
            (np.zeros(3), "aux must be a tuple or list of arrays and numbers, got ndarray"),
            ((1j,), r"aux\[0\] must be of .* dtype, got dtype complex128"),
            ((1, "a"), r"aux\[1\] must be of .* dtype, got dtype <U1"),
            ((np.zeros(3, object),), r"aux\[0\] must be of .* dtype, got dtype object"),
        ],
    )
    def test_aux(self, aux, said):
        with pytest.raises(TypeError, match=f"^{said}"):
            fastattn.flex_attention(*arrays(), score_mod=GALLERY["alibi"], aux=aux)

    @pytest.mark.parametrize("name", ["score_mod", "mask_mod"])
    def test_not_a_function(self, name):
        with pytest.raises(TypeError, match=f"{name} must be a function, got int"):
            fastattn.flex_attention(*arrays(), **{name: 5})

    def test_not_a_mask(self):
        with pytest.raises(TypeError, match=r"block_mask must be a fastattn\.masks object, got ndarray"):
            fastattn.flex_attention(*arrays(), block_mask=np.ones((L, S), bool))

    @pytest.mark.parametrize(
        ("sizes", "kind", "said"),
        [
            ((1, 1, -1, 5), ValueError, r"L must be a non-negative integer below 2\*\*60, got -1"),
            ((1, 1, 5, 2**60), ValueError, rf"S must be a non-negative integer below 2\*\*60, got {2**60}"),
            ((1, 1, 5.0, 5), TypeError, "L must be a non-negative integer, got 5.0"),
            ((1, True, 5, 5), TypeError, "H must be a non-negative integer, got True"),
        ],
    )
    def test_sizes(self, sizes, kind, said):
        with pytest.raises(kind, match=f"^{said}$"):
            fastattn.create_block_mask(lambda b, h, i, j: j <= i, *sizes)

    def test_shapes_are_named(self):
        query, key, value = arrays()
        with pytest.raises(ValueError, match=r"^query and key must have the same head_dim, got .*; query "):
            fastattn.flex_attention(
                query[..., 1:], key, value, score_mod=GALLERY["alibi"], aux=aux_of("alibi")
            )

    def test_backends_that_cannot(self):
        with pytest.raises(
            fastattn.BackendError, match=r"^backend 'reference' cannot .*\n  reference: it runs no score_mod$"
        ):
            fastattn.flex_attention(*arrays(), score_mod=indices, backend="reference")

    def test_without_numba(self):
        code = """
import sys
sys.modules["numba"] = None
import numpy as np, fastattn
x = np.ones((1, 1, 4, 4))
for call in (
    lambda: fastattn.flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: s),
    lambda: fastattn.flex_attention(x, x, x, mask_mod=lambda b, h, i, j: j <= i),
    lambda: fastattn.create_block_mask(lambda b, h, i, j: j <= i, None, None, 4, 4),
    lambda: fastattn.attention(x, x, x, backend="numba"),
):
    try:
        call()
    except fastattn.BackendError as error:
        print("fastattn[numba]" in str(error))
print(fastattn.flex_attention(x, x, x, block_mask=fastattn.masks.Causal()).shape)
"""
        assert python(code).split("\n")[:5] == ["True"] * 4 + ["(1, 1, 4, 4)"]
