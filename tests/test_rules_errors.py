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
        monkeypatch.setattr(fastattn._flex, "_evaluate", lambda *arguments: evaluated.append(arguments))
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
                fastattn.attention(**arrays | {name: tensor.detach()}),
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
