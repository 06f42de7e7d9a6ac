"""Rule 8: errors come before any work and name the argument, what it got, what it needs and all shapes."""

from __future__ import annotations

import re

import numpy as np
import pytest

import fastattn
from fastattn import masks
from tests.cases import random_arrays
from tests.conftest import without
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


def wrong(change, error, said):
    """One argument made wrong, and all that its message says ahead of the shapes."""
    name = "-".join(re.findall(r"[\w.]+", said.rpartition("got")[2] or said))
    return pytest.param(change, error, said, id="-".join([*change, name[:30]]))


def shapes_of(arguments):
    """What every message ends with."""
    return "; " + ", ".join(f"{name} {np.shape(arguments[name])}" for name in ("query", "key", "value"))


TWO_AXES = "query, key and value must have at least 2 axes"
ONE_HEAD = "two axes stand for one head, and then query, key and value all have two"
MULTIPLE = "the heads of query must be a multiple of those of key and value, got "
DTYPES = (
    "; supported are float32, float64, float16 and bfloat16, and integers and bools, which count as float64"
)
BIAS = "bias must be a float16, bfloat16, float32 or float64 array, got dtype "
MASK = "mask must be a fastattn.masks object or a bool or integer array, got dtype "
NOT_A_BIAS = "; for numbers added to the scores use bias=, else .astype(bool)"
CAUSAL = 'causal must be False, True, "top_left" or "bottom_right", got '
SCORES = "(..., H, L, S) = (2, 4, 5, 9)"
SOFTCAP = "softcap must be positive, and a normal number in float32, got "

SHAPE_ERRORS = [
    wrong({"query": floats()}, ValueError, TWO_AXES),
    wrong({"query": floats(6)}, ValueError, TWO_AXES),
    wrong({"key": floats(9)}, ValueError, TWO_AXES),
    wrong({"value": floats(3)}, ValueError, TWO_AXES),
    wrong({"query": floats(5, 6)}, ValueError, ONE_HEAD),
    wrong({"key": floats(9, 6), "value": floats(9, 3)}, ValueError, ONE_HEAD),
    wrong({"key": floats(2, 2, 9, 7)}, ValueError, "query and key must have the same head_dim, got 6 and 7"),
    wrong({"value": floats(2, 2, 8, 3)}, ValueError, "key and value must have the same length, got 9 and 8"),
    wrong(
        {"value": floats(2, 4, 9, 3)},
        ValueError,
        "key and value must have the same number of heads, got 2 and 4",
    ),
    wrong({"query": floats(2, 5, 5, 6)}, ValueError, MULTIPLE + "5 and 2"),
    wrong({"query": floats(2, 1, 5, 6)}, ValueError, MULTIPLE + "1 and 2"),
    wrong({"key": floats(2, 0, 9, 6), "value": floats(2, 0, 9, 3)}, ValueError, MULTIPLE + "4 and 0"),
    wrong(
        {"query": floats(3, 4, 5, 6)},
        ValueError,
        "the leading batch axes of query, key and value do not broadcast",
    ),
    wrong(
        {"query": floats(2, 4, 5, 0), "key": floats(2, 2, 9, 0)},
        ValueError,
        "head_dim of query and key must be at least 1, got 0",
    ),
]

TYPE_ERRORS = [
    wrong({"query": np.zeros((2, 4, 5, 6), complex)}, TypeError, "query has dtype complex128" + DTYPES),
    wrong({"key": np.zeros((2, 2, 9, 6), object)}, TypeError, "key has dtype object" + DTYPES),
    wrong({"value": np.zeros((2, 2, 9, 3), "U2")}, TypeError, "value has dtype <U2" + DTYPES),
    wrong({"bias": np.zeros((5, 9), complex)}, TypeError, BIAS + "complex128"),
    wrong({"bias": np.zeros((5, 9), bool)}, TypeError, BIAS + "bool; to allow keys use mask="),
    wrong({"bias": np.zeros((5, 9), np.longdouble)}, TypeError, f"{BIAS}{np.dtype(np.longdouble)}"),
    wrong({"mask": floats(5, 9)}, TypeError, f"{MASK}float32{NOT_A_BIAS}"),
    wrong({"mask": np.zeros((5, 9))}, TypeError, f"{MASK}float64{NOT_A_BIAS}"),
    wrong({"mask": np.zeros((5, 9), complex)}, TypeError, MASK + "complex128"),
    wrong({"mask": np.zeros((5, 9), object)}, TypeError, MASK + "object"),
    wrong({"mask": "causal"}, TypeError, MASK + "<U6"),
    wrong({"sinks": np.zeros(4, complex)}, TypeError, "sinks must be a float array, got dtype complex128"),
    wrong({"key_lengths": [3.0, 4.0]}, TypeError, "key_lengths must be integers, got dtype float64"),
    wrong({"scale": "big"}, TypeError, "scale must be a finite number, got 'big'"),
    wrong({"scale": 1j}, TypeError, "scale must be a finite number, got 1j"),
    wrong({"scale": np.complex64(1j)}, TypeError, f"scale must be a finite number, got {np.complex64(1j)!r}"),
    wrong(
        {"softcap": np.complex128(2)}, TypeError, f"softcap must be a finite number, got {np.complex128(2)!r}"
    ),
    wrong({"return_lse": 1}, TypeError, "return_lse must be a bool, got 1"),
    wrong({"return_lse": np.ones(2)}, TypeError, "return_lse must be a bool, got array([1., 1.])"),
    wrong({"return_weights": None}, TypeError, "return_weights must be a bool, got None"),
    wrong({"scale": floats(2)}, TypeError, f"scale must be a finite number, got {floats(2)!r}"),
    wrong({"softcap": "big"}, TypeError, "softcap must be a finite number, got 'big'"),
    wrong({"window": 3}, TypeError, "window must be a pair (left, right), got 3"),
    wrong({"window": (1.5, 0)}, TypeError, "window: left must be a non-negative integer or None, got 1.5"),
    wrong({"out": [1.0]}, TypeError, "out must be an ndarray, got list"),
]

VALUE_ERRORS = [
    wrong(
        {"mask": np.ones((5, 8), bool)}, ValueError, f"mask of shape (5, 8) does not broadcast to {SCORES}"
    ),
    wrong(
        {"mask": np.ones((3, 5, 9), bool)},
        ValueError,
        f"mask of shape (3, 5, 9) does not broadcast to {SCORES}",
    ),
    wrong(
        {"mask": np.ones((1, 2, 4, 5, 9), bool)},
        ValueError,
        f"mask of shape (1, 2, 4, 5, 9) does not broadcast to {SCORES}",
    ),
    wrong(
        {"mask": masks.Causal()},
        ValueError,
        "mask Causal() needs L == S, got L=5 and S=9; "
        'say Causal(align="top_left") or Causal(align="bottom_right")',
    ),
    wrong(
        {"mask": masks.KeyLengths([1, 2, 3])},
        ValueError,
        "mask KeyLengths(lengths=[1, 2, 3]) of shape (3,) does not broadcast to the leading batch axes (2,)",
    ),
    wrong(
        {"mask": np.ones((2, 5, 9), bool)},
        ValueError,
        f"mask of shape (2, 5, 9) does not broadcast to {SCORES}; where its leading axes are those of the "
        f"items, say mask[:, None]",
    ),
    wrong(
        {"bias": floats(2, 9)},
        ValueError,
        f"bias of shape (2, 9) does not broadcast to {SCORES}; where its leading axes are those of the "
        f"items, say bias[:, None, None, :]",
    ),
    wrong(
        {"mask": masks.GlobalTokens([9])},
        ValueError,
        "mask GlobalTokens(index=[9]): index must be below S=9, got 9",
    ),
    wrong({"bias": floats(5, 8)}, ValueError, f"bias of shape (5, 8) does not broadcast to {SCORES}"),
    wrong(
        {"bias": floats(3, 1, 5, 9)}, ValueError, f"bias of shape (3, 1, 5, 9) does not broadcast to {SCORES}"
    ),
    wrong(
        {"causal": True},
        ValueError,
        'causal=True needs L == S, got L=5 and S=9; say causal="top_left" (query i reads keys j <= i) '
        'or causal="bottom_right" (the last query reads up to the last key)',
    ),
    wrong({"causal": "left"}, ValueError, CAUSAL + "'left'"),
    wrong({"causal": None}, ValueError, CAUSAL + "None"),
    wrong({"window": (1, 2, 3)}, ValueError, "window must be a pair (left, right), got (1, 2, 3)"),
    wrong({"window": (-1, 0)}, ValueError, "window: left must be a non-negative integer or None, got -1"),
    wrong({"window": (0, -5)}, ValueError, "window: right must be a non-negative integer or None, got -5"),
    wrong({"key_lengths": [3, 10]}, ValueError, "key_lengths must be in 0..S=9, got 10"),
    wrong({"key_lengths": [-1, 3]}, ValueError, "key_lengths must be in 0..S=9, got -1"),
    wrong(
        {"key_lengths": [1, 2, 3]},
        ValueError,
        "key_lengths of shape (3,) does not broadcast to the leading batch axes (2,)",
    ),
    wrong(
        {"key_lengths": [[1, 2]]},
        ValueError,
        "key_lengths of shape (1, 2) does not broadcast to the leading batch axes (2,)",
    ),
    wrong({"scale": np.nan}, ValueError, "scale must be a finite number, got nan"),
    wrong({"scale": np.inf}, ValueError, "scale must be a finite number, got inf"),
    wrong({"softcap": 0.0}, ValueError, SOFTCAP + "0.0"),
    wrong({"softcap": -3.0}, ValueError, SOFTCAP + "-3.0"),
    wrong({"softcap": np.nan}, ValueError, "softcap must be a finite number, got nan"),
    wrong({"softcap": np.inf}, ValueError, "softcap must be a finite number, got inf"),
    wrong({"sinks": floats(2)}, ValueError, "sinks must have shape (H,) = (4,), got (2,)"),
    wrong({"sinks": np.float32(1)}, ValueError, "sinks must have shape (H,) = (4,), got ()"),
    wrong({"layout": "sbhd"}, ValueError, 'layout must be "bhsd" or "bshd", got \'sbhd\''),
    wrong({"layout": None}, ValueError, 'layout must be "bhsd" or "bshd", got None'),
    wrong(
        {"layout": np.array(["bhsd"])},
        ValueError,
        'layout must be "bhsd" or "bshd", got ' + repr(np.array(["bhsd"])),
    ),
]


@pytest.mark.parametrize(("change", "error", "said"), [*SHAPE_ERRORS, *TYPE_ERRORS, *VALUE_ERRORS])
def test_message(backend, change, error, said):
    arguments = good() | change
    with pytest.raises(error) as caught:
        backend.attention(**arguments)
    assert str(caught.value) == said + shapes_of(arguments)


@pytest.mark.parametrize(("change", "error", "said"), [*SHAPE_ERRORS, *TYPE_ERRORS, *VALUE_ERRORS])
@without(lambda change: "out" in change)
def test_out_is_untouched(backend, change, error, said):
    out = np.full((LEAD, HEADS, LEN_Q, VALUE_DIM), 7.0, np.float32)
    with pytest.raises(error, match=re.escape(said)):
        backend.attention(**good() | {"out": out} | change)
    assert (out == 7).all()


OUT_SHAPE = "out must have shape (2, 4, 5, 3), got "
OUT_DTYPE = "out must have the result's dtype float32, got "
SWAPPED = np.dtype(np.float32).newbyteorder()


def read_only():
    out = floats(LEAD, HEADS, LEN_Q, VALUE_DIM)
    out.flags.writeable = False
    return out


@pytest.mark.parametrize(
    ("out", "error", "said"),
    [
        (floats(LEAD, HEADS, LEN_Q, VALUE_DIM + 1), ValueError, OUT_SHAPE + "(2, 4, 5, 4)"),
        (floats(1, LEAD, HEADS, LEN_Q, VALUE_DIM), ValueError, OUT_SHAPE + "(1, 2, 4, 5, 3)"),
        (floats(HEADS, LEN_Q, VALUE_DIM), ValueError, OUT_SHAPE + "(4, 5, 3)"),
        (np.zeros((LEAD, HEADS, LEN_Q, VALUE_DIM)), TypeError, OUT_DTYPE + "float64"),
        (floats(LEAD, HEADS, LEN_Q, VALUE_DIM).astype(SWAPPED), TypeError, f"{OUT_DTYPE}{SWAPPED}"),
        (np.zeros((LEAD, HEADS, LEN_Q, VALUE_DIM), np.int32), TypeError, OUT_DTYPE + "int32"),
        (read_only(), ValueError, "out must be writeable, got a read-only array"),
        (
            np.lib.stride_tricks.as_strided(floats(60), (2, 4, 5, 3), (0, 0, 0, 4)),
            ValueError,
            "out has elements that share memory: shape (2, 4, 5, 3) with strides (0, 0, 0, 4)",
        ),
    ],
    ids=["dim", "rank", "no_lead", "double", "swapped", "integer", "read_only", "overlapping_itself"],
)
def test_out_that_does_not_fit(backend, out, error, said):
    with pytest.raises(error) as caught:
        backend.attention(**good(), out=out)
    assert str(caught.value) == said + shapes_of(good())
    assert not out.any()


@pytest.mark.parametrize(
    ("num_threads", "error"),
    [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("2", TypeError), (True, TypeError)],
)
def test_num_threads(backend, num_threads, error):
    bound = " below 2**31" if error is ValueError else ""
    said = re.escape(f"num_threads must be a positive integer{bound}, got {num_threads!r}")
    with pytest.raises(error, match=f"^{said}$"):
        backend.attention(**good(), num_threads=num_threads)
    with pytest.raises(error, match=f"^{said}$"):
        fastattn.set_num_threads(num_threads)


def test_ragged_lists():
    said = r"^query does not convert to an array: .*; query of no shape, key \(1, 2\), value \(1, 1\)$"
    with pytest.raises(ValueError, match=said):
        fastattn.attention([[1.0, 2.0], [3.0]], [[1.0, 2.0]], [[1.0]])


def test_masked_arrays_are_not_silently_unmasked():
    """The library reads a masked array's data; its mask would be lost without a word."""
    arguments = good()
    arguments["key"] = np.ma.masked_array(arguments["key"], mask=arguments["key"] > 0)
    with pytest.raises(
        TypeError, match=r"^key is a masked array, whose mask would be lost: pass a plain array"
    ):
        fastattn.attention(**arguments)


BSHD = 'where the arrays are (..., length, heads, dim), say layout="bshd"'
BHSD = 'where the arrays are (..., heads, length, dim), say layout="bhsd"'
UNSPLIT = 'where the last axis holds all heads, (B, L, H * D), reshape to (B, L, H, D) and say layout="bshd"'


def hints_of(query, key, function=fastattn.attention, **options):
    """What stands behind the shapes in the message of a call that fails."""
    arrays = floats(*query), floats(*key), floats(*key)
    with pytest.raises((ValueError, TypeError)) as caught:
        function(*arrays, **options)
    return str(caught.value).partition(f"value {tuple(key)}")[2].removeprefix("; ")


class TestOtherReadings:
    """An error says in what other layout the shapes would fit, and only then."""

    #: In the other layout 128 queries and keys, or 100 keys, and 8 heads for the query.
    QUERY, KEY, CROSS = (2, 128, 8, 64), (2, 128, 8, 64), (2, 100, 2, 64)

    @pytest.mark.parametrize(
        ("key", "options"),
        [
            (CROSS, {}),
            (KEY, {"mask": np.ones((128, 128), bool)}),
            (KEY, {"mask": np.ones((2, 1, 1, 128), bool), "causal": True}),
            (KEY, {"bias": floats(8, 1, 128)}),
            (KEY, {"sinks": floats(8)}),
            (KEY, {"key_lengths": [100, 128]}),
            (KEY, {"mask": masks.Segments(np.zeros(128, int)) & masks.Causal()}),
            ((2, 128, 2, 64), {"causal": True}),
            ((2, 128, 2, 64), {"mask": masks.Causal()}),
        ],
        ids=lambda item: "-".join(item) if isinstance(item, dict) else "",
    )
    def test_the_other_layout(self, key, options):
        assert hints_of(self.QUERY, key, **options) == BSHD

    def test_heads_outside_are_named_as_well(self):
        assert hints_of((2, 8, 128, 64), (2, 2, 100, 64), layout="bshd") == BHSD

    def test_one_item(self):
        assert hints_of((128, 8, 64), (100, 2, 64)) == BSHD

    def test_the_hint_is_right(self):
        fastattn.attention(floats(*self.QUERY), floats(*self.CROSS), floats(*self.CROSS), layout="bshd")

    @pytest.mark.parametrize(
        ("key", "options"),
        [
            (CROSS, {"layout": "sbhd"}),
            (CROSS, {"layout": ["bshd"]}),
            (CROSS, {"mask": np.ones((5, 5), bool)}),
            (CROSS, {"sinks": floats(5)}),
            (KEY, {"scale": np.nan}),
            (KEY, {"mask": floats(128, 128)}),
            (KEY, {"out": floats(3)}),
            (KEY, {"mask": np.ones((5, 5), bool)}),
            ((2, 128, 8, 63), {}),
            ((2, 3, 5, 64), {}),
        ],
        ids=lambda item: "-".join(item) if isinstance(item, dict) else "",
    )
    def test_none_where_it_does_not_fit_either(self, key, options):
        assert hints_of(self.QUERY, key, **options) == ""

    @pytest.mark.parametrize(
        ("query", "key", "options"),
        [
            ((2, 10, 48), (2, 10, 16), {}),
            ((1, 10, 32), (4, 12, 32), {}),
            ((2, 10, 32), (2, 10, 32), {"mask": np.ones((2, 1, 10, 10), bool)}),
            ((2, 10, 32), (2, 10, 32), {"key_lengths": [3, 4]}),
            ((2, 10, 192), (2, 10, 192), {"sinks": floats(3)}),
            ((2, 10, 512), (2, 10, 512), {"mask": np.ones((2, 8, 10, 10), bool)}),
            ((2, 10, 512), (2, 12, 512), {"causal": True}),
            ((2, 10, 768), (2, 10, 768), {"scale": np.nan}),
        ],
        ids=str,
    )
    def test_heads_that_are_not_split(self, query, key, options):
        assert hints_of(query, key, **options) == UNSPLIT

    @pytest.mark.parametrize(
        ("query", "key", "options"),
        [
            ((4, 10, 64), (3, 12, 64), {}),
            ((4, 10, 64), (4, 12, 64), {"causal": True}),
            ((4, 10, 64), (4, 10, 64), {"scale": np.nan}),
            ((4, 10, 300), (4, 10, 300), {"scale": np.nan}),
            ((4, 10, 0), (4, 10, 0), {}),
            ((2, 4, 10, 512), (2, 4, 10, 512), {"scale": np.nan}),
            ((10, 512), (10, 512), {"scale": np.nan}),
        ],
        ids=str,
    )
    def test_heads_that_are(self, query, key, options):
        assert hints_of(query, key, **options) == ""

    def test_functions_for_masks_are_not_evaluated(self, monkeypatch):
        """That would take long, and they fit any size."""
        pytest.importorskip("numba")
        evaluated = []
        monkeypatch.setattr("fastattn._flex._evaluate", lambda *arguments: evaluated.append(arguments))
        hints = hints_of(
            self.QUERY,
            self.CROSS,
            fastattn.flex_attention,
            mask_mod=lambda b, h, q_idx, kv_idx: kv_idx <= q_idx,
        )
        assert hints == BSHD
        assert not evaluated


class TestNotMasks:
    OBJECT = "mask must be a fastattn.masks object or a bool or integer array, got "

    @pytest.mark.parametrize(
        ("mask", "words"),
        [
            (masks.Causal, "the class Causal: make a mask of it, Causal(...); "),
            (masks.GlobalTokens, "the class GlobalTokens: make a mask of it, GlobalTokens(...); "),
            (
                lambda b, h, q_idx, kv_idx: kv_idx <= q_idx,
                "a function: fastattn.create_block_mask makes a mask of it, "
                "and fastattn.flex_attention takes it as mask_mod=; ",
            ),
        ],
        ids=["class", "class_with_arguments", "function"],
    )
    def test_mask(self, mask, words):
        with pytest.raises(TypeError) as caught:
            fastattn.attention(**good(), mask=mask)
        assert str(caught.value).startswith(self.OBJECT + words)

    def test_block_mask(self):
        for mask, words in [
            (masks.Causal, "the class Causal: make a mask of it, Causal(...)"),
            (np.ones((5, 9), bool), "ndarray: make a mask of it, Dense(array)"),
        ]:
            with pytest.raises(TypeError) as caught:
                fastattn.flex_attention(**good(), block_mask=mask)
            assert str(caught.value) == f"block_mask must be a fastattn.masks object, got {words}"


class TestTensorsThatRecordGradients:
    """PyTorch would say "Use tensor.detach().numpy()" of an argument that it does not name."""

    @pytest.mark.parametrize("name", ["query", "key", "value", "bias", "sinks", "out"])
    def test_attention(self, name):
        torch = pytest.importorskip("torch")
        shapes = {"bias": (LEN_Q, LEN_K), "sinks": (HEADS,), "out": (LEAD, HEADS, LEN_Q, VALUE_DIM)}
        arrays = good()
        shape = shapes.get(name) or arrays[name].shape
        tensor = torch.zeros(shape, requires_grad=True)
        with pytest.raises(TypeError) as caught:
            fastattn.attention(**arrays | {name: tensor})
        said = f"{name} requires grad, and gradients are not computed here: pass {name}.detach(); query "
        assert str(caught.value).startswith(said)
        if name != "out":
            assert_same_bits(
                np.asarray(fastattn.attention(**arrays | {name: tensor.detach()})),
                fastattn.attention(**arrays | {name: tensor.detach().numpy()}),
            )

    def test_its_relatives(self):
        torch = pytest.importorskip("torch")
        parameter = torch.nn.Parameter(torch.zeros(1, 2, 3))
        x = floats(1, 2, 3)
        for name, call in [
            ("query", lambda: fastattn.scaled_dot_product_attention(parameter, x, x)),
            ("attn_mask", lambda: fastattn.scaled_dot_product_attention(x, x, x, parameter)),
            ("key", lambda: fastattn.varlen_attention(x, parameter, x, [0, 1])),
            ("value", lambda: fastattn.flex_attention(x, x, parameter)),
            ("aux[0]", lambda: fastattn.flex_attention(x, x, x, aux=(parameter,))),
            ("outs[0]", lambda: fastattn.merge_attention([parameter], [floats(1, 2)])),
        ]:
            with pytest.raises(TypeError) as caught:
                call()
            said = f"{name} requires grad, and gradients are not computed here: pass {name}.detach()"
            assert str(caught.value).startswith(said)


class TestBackendChoice:
    @pytest.mark.parametrize("name", ["fast", "", "Cython"])
    def test_unknown_name_lists_the_names(self, name):
        said = f"backend must be one of cython, numba, reference, cuda, got {name!r}"
        with pytest.raises(ValueError, match=f"^{said}$"):
            fastattn.attention(**good(), backend=name)

    def test_not_a_name(self):
        with pytest.raises(ValueError, match=r"^backend must be one of .*, got 3$"):
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
        with pytest.raises(ValueError, match=r"^softcap must be positive"):
            backend.attention(**good(), softcap=0)
        assert_same_bits(backend.attention(**good()), expected)
