"""Rule 8: errors come before any work and name the argument, what it got, what it needs and all shapes."""

from __future__ import annotations

import re
from importlib import import_module

import numpy as np
import pytest

import fastattn
from fastattn import masks
from tests.cases import random_arrays
from tests.process import python
from tests.refusals import one_at_a_time
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


def shapes_of(arguments):
    """What every message ends with."""
    return "; " + ", ".join(f"{name} {np.shape(arguments[name])}" for name in ("query", "key", "value"))


#: Arguments made wrong one at a time. A message names the argument.
WRONG_SHAPES = {
    "query": [floats(), floats(6), floats(5, 6), floats(2, 5, 5, 6), floats(2, 1, 5, 6), floats(3, 4, 5, 6)],
    "key": [floats(9), floats(2, 2, 9, 7)],
    "value": [floats(3), floats(2, 2, 8, 3), floats(2, 4, 9, 3)],
}
WRONG_TYPES = {
    "query": [np.zeros((2, 4, 5, 6), complex)],
    "key": [np.zeros((2, 2, 9, 6), object)],
    "value": [np.zeros((2, 2, 9, 3), "U2")],
    "bias": [*(np.zeros((5, 9), dtype) for dtype in (complex, bool, np.longdouble)), masks.NotSelf(), abs],
    "mask": [
        *(np.zeros((5, 9), dtype) for dtype in ("f4", "f8", complex, object)),
        "causal",
        0,
        1,
        True,
        [masks.Window(1, 1), masks.NotSelf()],
    ],
    "sinks": [np.zeros(4, complex)],
    "key_lengths": [[3.0, 4.0]],
    "scale": ["big", 1j, np.complex64(1j), np.ones(4, complex)],
    "softcap": ["big", np.complex128(2)],
    "return_lse": [1, np.ones(2)],
    "return_weights": [None, 1],
    "window": [3, (1.5, 0)],
}
ONES = [np.ones(shape, bool) for shape in ((5, 8), (3, 5, 9), (1, 2, 4, 5, 9), (2, 5, 9))]
WRONG_VALUES = {
    "mask": [*ONES, masks.Causal(), masks.KeyLengths([1, 2, 3]), masks.GlobalTokens([9])],
    "bias": [floats(2, 9), floats(5, 8), floats(3, 1, 5, 9)],
    "causal": [True, "left", None],
    "window": [(1, 2, 3), (-1, 0), (0, -5)],
    "key_lengths": [[3, 10], [-1, 3], [1, 2, 3], [[1, 2]]],
    "scale": [np.nan, np.inf, floats(2), [1.0, 1.0, np.inf, 1.0]],
    "softcap": [0.0, -3.0, np.nan, np.inf],
    "sinks": [floats(2), np.float32(1)],
    "layout": ["sbhd", None, np.array(["bhsd"])],
    "return_weights": ["max"],
}
SEVERAL_SHAPES = [
    {"key": floats(9, 6), "value": floats(9, 3)},
    {"key": floats(2, 0, 9, 6), "value": floats(2, 0, 9, 3)},
    {"query": floats(2, 4, 5, 0), "key": floats(2, 2, 9, 0)},
]


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        (ValueError, [*one_at_a_time(WRONG_SHAPES), *SEVERAL_SHAPES]),
        (TypeError, one_at_a_time(WRONG_TYPES)),
        (ValueError, one_at_a_time(WRONG_VALUES)),
    ],
    ids=["shapes", "types", "values"],
)
def test_arguments_are_named_before_any_work(backend, error, changes):
    for change in changes:
        out = np.full((LEAD, HEADS, LEN_Q, VALUE_DIM), 7.0, np.float32)
        for given in ({}, {"out": out}):
            arguments = good() | change
            with pytest.raises(error) as caught:
                backend.attention(**arguments, **given)
            message, shapes = str(caught.value), shapes_of(arguments)
            assert message.endswith(shapes), message
            said = message.removesuffix(shapes)
            assert all(re.search(rf"\b{name}\b", said) for name in change), message
        assert (out == 7).all(), change


def test_what_was_given_is_in_the_message():
    for change, given in [
        ({"key": floats(2, 2, 9, 7)}, "7"),
        ({"value": floats(2, 2, 8, 3)}, "8"),
        ({"query": np.zeros((2, 4, 5, 6), complex)}, "complex128"),
        ({"value": np.zeros((2, 2, 9, 3), "U2")}, "<U2"),
        ({"bias": floats(5, 8)}, "(5, 8)"),
        ({"mask": masks.KeyLengths([1, 2, 3])}, "KeyLengths(lengths=[1, 2, 3])"),
        ({"scale": "big"}, "'big'"),
        ({"window": (1.5, 0)}, "1.5"),
        ({"key_lengths": [3, 10]}, "10"),
        ({"key_lengths": [-1, 3]}, "-1"),
        ({"sinks": floats(2)}, "(2,)"),
        ({"layout": np.array(["bhsd"])}, repr(np.array(["bhsd"]))),
        ({"out": [1.0]}, "list"),
    ]:
        with pytest.raises((TypeError, ValueError)) as caught:
            fastattn.attention(**good() | change)
        assert given in str(caught.value).partition("; query")[0], change


#: Words that readers act upon: of these alone is every one asserted.
KEPT = [
    (
        {"query": floats(2, 5, 5, 6)},
        "the heads of query must be a multiple of those of key and value, got 5 and 2",
    ),
    (
        {"query": np.zeros((2, 4, 5, 6), complex)},
        "query has dtype complex128; supported are float32, float64, float16 and bfloat16, and integers and "
        "bools, which count as float64",
    ),
    (
        {"mask": floats(5, 9)},
        "mask must be a fastattn.masks object or a bool or integer array, got dtype float32; for numbers "
        "added to the scores use bias=, else .astype(bool)",
    ),
    (
        {"bias": np.zeros((5, 9), bool)},
        "bias must be a float16, bfloat16, float32 or float64 array, got dtype bool; to allow keys use mask=",
    ),
    (
        {"mask": np.ones((2, 5, 9), bool)},
        "mask of shape (2, 5, 9) does not broadcast to (..., H, L, S) = (2, 4, 5, 9); "
        "where its leading axes are those of the items, say mask[:, None]",
    ),
    (
        {"bias": floats(2, 9)},
        "bias of shape (2, 9) does not broadcast to (..., H, L, S) = (2, 4, 5, 9); "
        "where its leading axes are those of the items, say bias[:, None, None, :]",
    ),
    (
        {"mask": masks.Causal()},
        'mask Causal() needs L == S, got L=5 and S=9; say Causal(align="top_left") or '
        'Causal(align="bottom_right")',
    ),
    (
        {"causal": True},
        'causal=True needs L == S, got L=5 and S=9; say causal="top_left" (query i reads keys j <= i) '
        'or causal="bottom_right" (the last query reads up to the last key)',
    ),
    ({"key_lengths": [3, 10]}, "key_lengths must be in 0..S=9, got 10"),
    (
        {"key_lengths": np.ones((2, 9), bool)},
        "key_lengths of shape (2, 9) does not broadcast to the leading batch axes (2,); where it is a "
        "mask of padding at the end, say key_lengths.sum(-1)",
    ),
    (
        {"mask": [masks.Window(1, 1), masks.NotSelf()]},
        "mask must be a fastattn.masks object or a bool or integer array, got a list of them: combine them "
        "by & (both) or | (either)",
    ),
    (
        {"bias": masks.NotSelf()},
        "bias must be an array or a bias object, got NotSelf(); a mask goes to mask=",
    ),
    (
        {"softcap": 0.0},
        "softcap must be positive, and a normal number in float32, got 0.0; leave it out for none",
    ),
    ({"layout": "sbhd"}, 'layout must be "bhsd" or "bshd", got \'sbhd\''),
]


def test_words():
    for change, said in KEPT:
        arguments = good() | change
        with pytest.raises((TypeError, ValueError)) as caught:
            fastattn.attention(**arguments)
        assert str(caught.value) == said + shapes_of(arguments)


def test_out_that_does_not_fit(backend):
    """Another shape, dtype or byte order, read-only, or elements that share memory."""
    right = (LEAD, HEADS, LEN_Q, VALUE_DIM)
    read_only = floats(*right)
    read_only.flags.writeable = False
    for out, error in [
        (floats(LEAD, HEADS, LEN_Q, VALUE_DIM + 1), ValueError),
        (floats(1, *right), ValueError),
        (floats(*right[1:]), ValueError),
        (np.zeros(right), TypeError),
        (floats(*right).astype(np.dtype(np.float32).newbyteorder()), TypeError),
        (np.zeros(right, np.int32), TypeError),
        (read_only, ValueError),
        (np.lib.stride_tricks.as_strided(floats(60), right, (0, 0, 0, 4)), ValueError),
        ([1.0], TypeError),
    ]:
        with pytest.raises(error) as caught:
            backend.attention(**good(), out=out)
        assert str(caught.value).startswith("out ") and str(caught.value).endswith(shapes_of(good()))
        assert not np.any(out) or isinstance(out, list)


@pytest.mark.parametrize(
    ("number", "error"),
    [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("2", TypeError), (True, TypeError)],
)
def test_num_threads(backend, number, error):
    said = "^num_threads must be a positive integer"
    with pytest.raises(error, match=said):
        backend.attention(**good(), num_threads=number)
    with pytest.raises(error, match=said):
        fastattn.set_num_threads(number)


def test_ragged_lists():
    with pytest.raises(ValueError, match=r"^query .*; query of no shape, key \(1, 2\), value \(1, 1\)$"):
        fastattn.attention([[1.0, 2.0], [3.0]], [[1.0, 2.0]], [[1.0]])


def test_masked_arrays_are_not_silently_unmasked():
    """The library reads a masked array's data; its mask would be lost without a word."""
    key = np.ma.masked_array(good()["key"], mask=good()["key"] > 0)
    with pytest.raises(TypeError, match=r"^key is a masked array, whose mask would be lost"):
        fastattn.attention(**good() | {"key": key})


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

    def test_the_other_layout(self):
        fits = [
            (self.CROSS, {}),
            (self.KEY, {"mask": np.ones((128, 128), bool)}),
            (self.KEY, {"mask": np.ones((2, 1, 1, 128), bool), "causal": True}),
            (self.KEY, {"bias": floats(8, 1, 128)}),
            (self.KEY, {"sinks": floats(8)}),
            (self.KEY, {"key_lengths": [100, 128]}),
            (self.KEY, {"mask": masks.Segments(np.zeros(128, int)) & masks.Causal()}),
            ((2, 128, 2, 64), {"causal": True}),
            ((2, 128, 2, 64), {"mask": masks.Causal()}),
        ]
        for key, options in fits:
            assert hints_of(self.QUERY, key, **options) == BSHD, (key, options)
        assert hints_of((2, 8, 128, 64), (2, 2, 100, 64), layout="bshd") == BHSD
        assert hints_of((128, 8, 64), (100, 2, 64)) == BSHD  # one item
        fastattn.attention(floats(*self.QUERY), floats(*self.CROSS), floats(*self.CROSS), layout="bshd")

    def test_none_where_it_does_not_fit_either(self):
        for key, options in [
            (self.CROSS, {"layout": "sbhd"}),
            (self.CROSS, {"layout": ["bshd"]}),
            (self.CROSS, {"mask": np.ones((5, 5), bool)}),
            (self.CROSS, {"sinks": floats(5)}),
            (self.KEY, {"scale": np.nan}),
            (self.KEY, {"mask": floats(128, 128)}),
            (self.KEY, {"out": floats(3)}),
            (self.KEY, {"mask": np.ones((5, 5), bool)}),
            ((2, 128, 8, 63), {}),
            ((2, 3, 5, 64), {}),
        ]:
            assert hints_of(self.QUERY, key, **options) == "", (key, options)

    def test_heads_that_are_not_split(self):
        for query, key, options in [
            ((2, 10, 48), (2, 10, 16), {}),
            ((1, 10, 32), (4, 12, 32), {}),
            ((2, 10, 32), (2, 10, 32), {"mask": np.ones((2, 1, 10, 10), bool)}),
            ((2, 10, 32), (2, 10, 32), {"key_lengths": [3, 4]}),
            ((2, 10, 192), (2, 10, 192), {"sinks": floats(3)}),
            ((2, 10, 512), (2, 10, 512), {"mask": np.ones((2, 8, 10, 10), bool)}),
            ((2, 10, 512), (2, 12, 512), {"causal": True}),
            ((2, 10, 768), (2, 10, 768), {"scale": np.nan}),
        ]:
            assert hints_of(query, key, **options) == UNSPLIT, (query, key, options)

    def test_heads_that_are(self):
        for query, key, options in [
            ((4, 10, 64), (3, 12, 64), {}),
            ((4, 10, 64), (4, 12, 64), {"causal": True}),
            ((4, 10, 64), (4, 10, 64), {"scale": np.nan}),
            ((4, 10, 300), (4, 10, 300), {"scale": np.nan}),
            ((4, 10, 0), (4, 10, 0), {}),
            ((2, 4, 10, 512), (2, 4, 10, 512), {"scale": np.nan}),
            ((10, 512), (10, 512), {"scale": np.nan}),
        ]:
            assert hints_of(query, key, **options) == "", (query, key, options)

    def test_functions_for_masks_are_not_evaluated(self, monkeypatch):
        """That would take long, and they fit any size."""
        pytest.importorskip("numba")
        evaluated = []
        monkeypatch.setattr("fastattn._api.flex._evaluate", lambda *arguments: evaluated.append(arguments))
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
            said = str(caught.value)
            assert said.startswith(f"block_mask must be a fastattn.masks object, got {words}; query (")

    def test_block_mask_of_pytorch(self):
        flex = pytest.importorskip("torch.nn.attention.flex_attention")
        mask = flex.create_block_mask(lambda b, h, q, k: k <= q, 1, 1, 5, 9, device="cpu")
        with pytest.raises(TypeError, match="create_block_mask makes a mask of its mask_mod"):
            fastattn.flex_attention(**good(), block_mask=mask)


TABLES = fastattn.rope_tables(5, 4)
POINTS = np.random.default_rng(0).standard_normal((9, 2))


class TestOtherFunctions:
    @pytest.mark.parametrize(
        ("call", "said"),
        [
            (lambda x: fastattn.rope(x, *TABLES[::-1]), "cos and sin are swapped"),
            (lambda x: fastattn.rope(x.astype(np.float64), *TABLES[::-1]), "cos and sin are swapped"),
            (
                lambda x: fastattn.linear_attention(x, x, x, return_state="False"),
                "return_state must be a bool",
            ),
            (lambda x: masks.Causal() + masks.NotSelf(), "use & (both), | (either) and ~ (not)"),
            (lambda x: x * masks.Causal(), "use & (both), | (either) and ~ (not)"),
            (lambda x: masks.Dense([[True], [True, False]]), "mask does not convert to an array"),
            (lambda x: masks.KeyLengths([[1], [1, 2]]), "KeyLengths: lengths does not convert to an array"),
            (lambda x: fastattn.kernel_logsumexp(POINTS, POINTS, bandwidth="scott"), "must be a number, or"),
            (lambda x: fastattn.kernel_logsumexp(POINTS, POINTS, bandwidth=True), "must be a number, or"),
            (lambda x: fastattn.KVCache(2, 1, 4).append(x, x, lengths=x[:, 0, :, 0] > 0), "lengths.sum(-1)"),
            (lambda x: fastattn.KVCache(2, 1, 4).append(fastattn.Quantized.encode(x), x), "got Quantized"),
        ],
    )
    def test_message(self, call, said):
        with pytest.raises((TypeError, ValueError), match=re.escape(said)):
            call(random_arrays(lead=(2,), heads=1, len_q=5, head_dim=4)[0])

    @pytest.mark.parametrize(
        ("module", "call", "said"),
        [
            ("sklearn", lambda it: it.KernelRegressor(bandwidth=True), "bandwidth must be a positive number"),
            (
                "sklearn",
                lambda it: it.KernelRegressor(bandwidth="leave_one_out", per_feature="no"),
                "per_feature",
            ),
            ("sklearn", lambda it: it.KernelRegressor(bandwidth="leave_one_out", max_steps=-1), "max_steps"),
        ],
    )
    def test_estimators(self, module, call, said):
        estimators = pytest.importorskip(f"fastattn.integrations.{module}", exc_type=ImportError)
        with pytest.raises((TypeError, ValueError), match=said):
            call(estimators).fit(POINTS, POINTS[:, 0])

    def test_targets_that_are_text(self):
        estimators = pytest.importorskip("fastattn.integrations.sklearn", exc_type=ImportError)
        with pytest.raises(TypeError, match=r"^y has dtype <U"):
            estimators.KernelRegressor().fit(POINTS, POINTS[:, 0].astype(str))

    def test_flags_of_integrations(self):
        torch, dask = pytest.importorskip("torch"), pytest.importorskip("dask.array")
        attention_of_torch = import_module("fastattn.integrations.torch").attention
        attention_of_dask = import_module("fastattn.integrations.dask").attention
        x = torch.ones(1, 2, 3, requires_grad=True)
        for attention, array in [(attention_of_torch, x), (attention_of_dask, dask.ones((1, 2, 3)))]:
            with pytest.raises(TypeError, match="return_lse must be a bool"):
                attention(array, array, array, return_lse="False")

    def test_what_looks_alike_is_taken(self):
        """A rotation by a right angle, integers of which all bits are set, and no numbers at all."""
        x = random_arrays(lead=(2,), heads=1, len_q=5, head_dim=4)[0]
        turned = fastattn.rope(x, np.zeros((5, 2), np.float32), np.ones((5, 2), np.float32))
        np.testing.assert_array_equal(turned, np.concatenate([-x[..., 2:], x[..., :2]], axis=-1))
        allowed = np.tri(5, 5, dtype=bool)
        assert_same_bits(
            fastattn.attention(x, x, x, mask=-allowed.astype(np.int8)),
            fastattn.attention(x, x, x, mask=allowed),
        )
        assert fastattn.attention(x[:, :, :0], x, x, mask=np.zeros((0, 5), int)).shape == (2, 1, 0, 4)

    @pytest.mark.parametrize("kind", ["csr_array", "coo_matrix"])
    def test_sparse_arrays(self, kind):
        sparse = pytest.importorskip("scipy.sparse")
        matrix = getattr(sparse, kind)(np.eye(5, 9, dtype=np.float32))
        for name in ("mask", "bias"):
            with pytest.raises(
                TypeError, match=rf"^{name} must be an array, got {kind}; say {name}.toarray\(\)"
            ):
                fastattn.attention(**good(), **{name: matrix})

    def test_a_demo_that_there_is_not(self, capsys):
        main = pytest.importorskip("fastattn.demo", exc_type=ImportError).main
        assert main(["gen"]) == 2
        assert "no demo called gen; there are: generate, embed, train, image" in capsys.readouterr().err


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
from fastattn.backends.reference import backend as reference
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
