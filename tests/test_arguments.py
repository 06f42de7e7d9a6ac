"""Arguments that a function does not have: what the message says, and what editors and `help` see instead."""

from __future__ import annotations

import inspect
import re
import typing

import numpy as np
import pytest

import fastattn
from fastattn import _options, _registry
from fastattn.masks import Align, Causal
from tests.process import python

X = np.ones((1, 2, 5, 4), np.float32)
FUNCTIONS = {
    "attention": (fastattn.attention, (X, X, X), _options.AttentionOptions),
    "flex_attention": (fastattn.flex_attention, (X, X, X), _options.FlexOptions),
    "varlen_attention": (fastattn.varlen_attention, (X[0], X[0], X[0], [0, 2]), _options.SharedOptions),
}
SAY_MASK = (
    "say mask= for a bool mask (True = may attend) and bias= for a float one (added to the scores), "
    "or call fastattn.scaled_dot_product_attention, which has PyTorch's arguments and conventions"
)
SAY_CAUSAL = 'say causal=True, or causal="top_left" where L != S, as PyTorch does'
SAY_PADDING = (
    "say key_lengths= where the padding stands at the end, or mask=~padding[:, None, None, :], "
    "as True means ignore there and may attend here"
)
AVERAGE = "say return_weights=True, which gives the weights of each head, and average them by .mean(axis=-3)"
IN_ATTENTION = "in fastattn.attention "


def message_of(name, *extra, **options):
    function, arguments, _ = FUNCTIONS[name]
    with pytest.raises(TypeError) as caught:
        function(*arguments, *extra, **options)
    return str(caught.value)


class TestByName:
    @pytest.mark.parametrize(
        ("function", "argument", "hint"),
        [
            ("attention", "attn_mask", SAY_MASK),
            ("attention", "is_causal", SAY_CAUSAL),
            ("attention", "key_padding_mask", SAY_PADDING),
            ("attention", "dropout_p", "say dropout=, and seed=, as there is no global random state"),
            (
                "attention",
                "enable_gqa",
                "leave it out, for query may always have a multiple of the heads of key and value",
            ),
            ("attention", "need_weights", "say return_weights=True"),
            ("attention", "average_attn_weights", AVERAGE),
            ("flex_attention", "attn_mask", IN_ATTENTION + SAY_MASK),
            ("flex_attention", "is_causal", SAY_CAUSAL),
            ("flex_attention", "need_weights", "say return_weights=True"),
            ("varlen_attention", "key_padding_mask", IN_ATTENTION + SAY_PADDING),
            ("varlen_attention", "is_causal", SAY_CAUSAL),
            ("varlen_attention", "average_attn_weights", IN_ATTENTION + AVERAGE),
        ],
    )
    def test_names_of_pytorch(self, function, argument, hint):
        message = message_of(function, **{argument: None})
        assert message == f"{function}() got an unexpected keyword argument {argument!r}: {hint}"

    def test_the_advice_is_right(self):
        """The arguments that the messages suggest have the meaning of PyTorch's."""
        torch = pytest.importorskip("torch")
        rng = np.random.default_rng(0)
        query, key, value = rng.standard_normal((3, 2, 2, 4, 8))
        tensors = [torch.from_numpy(array) for array in (query, key[..., :3, :], value[..., :3, :])]
        arrays = [tensor.numpy() for tensor in tensors]
        theirs = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True).numpy()
        np.testing.assert_allclose(fastattn.attention(*arrays, causal="top_left"), theirs, atol=1e-12)
        padding = np.array([[False, False, True, True], [False, True, False, True]])
        module = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
        x = rng.standard_normal((2, 4, 8))
        with torch.no_grad():
            there = torch.from_numpy(x)
            options = {"key_padding_mask": torch.from_numpy(padding), "need_weights": True}
            _, averaged = module(there, there, there, **options)
            projected = torch.nn.functional.linear(there, module.in_proj_weight, module.in_proj_bias).numpy()
        q, k, v = (part.reshape(2, 4, 2, 4) for part in np.split(projected, 3, axis=-1))
        mask = ~padding[:, None, None, :]
        _, weights = fastattn.attention(q, k, v, layout="bshd", mask=mask, return_weights=True)
        np.testing.assert_allclose(weights.mean(axis=-3), averaged.numpy(), atol=1e-12)

    @pytest.mark.parametrize(
        ("function", "argument", "close"),
        [
            ("attention", "maks", "mask"),
            ("attention", "key_length", "key_lengths"),
            ("attention", "soft_cap", "softcap"),
            ("flex_attention", "score_fn", "score_mod"),
            ("varlen_attention", "cu_seqlen_k", "cu_seqlens_k"),
        ],
    )
    def test_a_close_match(self, function, argument, close):
        message = message_of(function, **{argument: None})
        expected = f"{function}() got an unexpected keyword argument {argument!r}. Did you mean {close!r}?"
        assert message == expected

    @pytest.mark.parametrize("function", FUNCTIONS)
    def test_nothing_like_it(self, function):
        assert message_of(function, xyz=1) == f"{function}() got an unexpected keyword argument 'xyz'"

    def test_all_of_them_at_once(self):
        assert message_of("attention", dropout_p=0.0, xyz=1, is_causal=True) == (
            "attention() got an unexpected keyword argument 'dropout_p': say dropout=, and seed=, as "
            f"there is no global random state, and 'xyz', and 'is_causal': {SAY_CAUSAL}"
        )

    def test_difflib_is_not_loaded_before(self):
        code = """
import sys, numpy
before = "difflib" in sys.modules
import fastattn
x = numpy.ones((2, 3))
fastattn.attention(x, x, x)
assert before or "difflib" not in sys.modules
"""
        python(code)

    def test_out_is_untouched(self):
        out = np.full_like(X, 7)
        message_of("attention", out=out, maks=None)
        assert (out == 7).all()


class TestByPosition:
    @pytest.mark.parametrize(
        ("function", "given", "hint"),
        [
            ("attention", (Causal(),), ", here mask=..."),
            ("attention", (np.ones((5, 5), bool),), ", here mask=..."),
            ("attention", (np.ones((5, 5), np.int8), 0.0), ", here mask=..."),
            ("attention", (np.zeros((5, 5), np.float32),), ", here bias=..."),
            ("attention", (None, 0.0, True), ""),
            ("attention", (True,), ""),
            ("attention", (abs,), ""),
            ("flex_attention", (Causal(),), ", here block_mask=..."),
            ("flex_attention", (lambda score, b, h, i, j: score,), ", here score_mod=..."),
            ("varlen_attention", (None, Causal()), ""),
        ],
    )
    def test_message(self, function, given, hint):
        places = ["query", "key", "value"]
        places += ["cu_seqlens_q", "cu_seqlens_k"] if function == "varlen_attention" else []
        total = len(FUNCTIONS[function][1]) + len(given)
        assert message_of(function, *given) == (
            f"{function}() takes {len(places)} positional arguments ({', '.join(places)}), but {total} were "
            f"given: the others go by name{hint}"
        )

    def test_a_tensor_of_pytorch(self):
        torch = pytest.importorskip("torch")
        assert message_of("attention", torch.ones(5, 5) > 0).endswith("by name, here mask=...")
        assert message_of("attention", torch.zeros(5, 5)).endswith("by name, here bias=...")


@pytest.mark.parametrize("function", [function for function, _, _ in FUNCTIONS.values()])
class TestSignature:
    def test_shows_the_options_alone(self, function):
        kinds = {p.kind for p in inspect.signature(function).parameters.values()}
        assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}

    def test_overloads_have_the_same_options(self, function):
        """The checker would not see one that is missing there: the definition takes any name."""
        overloads = typing.get_overloads(function)
        assert len(overloads) >= 3
        for overload in overloads:
            parameters = dict(inspect.signature(overload).parameters)
            options = re.fullmatch(r"Unpack\[(\w+)\]", parameters.pop("options").annotation)[1]
            names = [*parameters, *getattr(_options, options).__annotations__]
            assert len(names) == len(set(names))
            assert set(names) == set(inspect.signature(function).parameters)


def test_choices_are_the_contract():
    assert typing.get_args(_options.BackendName) == tuple(_registry.MODULES)
    assert typing.get_args(_options.LayoutName) == ("bhsd", "bshd")
    assert typing.get_args(Align) == ("top_left", "bottom_right")
    assert typing.get_args(_options.CausalRule) == (bool, Align)
    for align in typing.get_args(Align):
        fastattn.attention(X, X, X, causal=align, mask=Causal(align))


SNIPPET = """
from typing import assert_type

import numpy as np

import fastattn
from fastattn.masks import Causal, Mask, Window

x = np.ones((1, 2, 5, 4))
flag = bool(x.any())

assert_type(fastattn.attention(x, x, x), np.ndarray)
assert_type(fastattn.attention(x, x, x, causal="top_left", window=(3, None), backend="numba"), np.ndarray)
assert_type(fastattn.attention(x, x, x, mask=Causal() & ~Window(1, 1), out=x, return_lse=False), np.ndarray)
assert_type(fastattn.attention(x, x, x, return_lse=True), tuple[np.ndarray, np.ndarray])
assert_type(fastattn.attention(x, x, x, return_weights=True, mask=[[True]]), tuple[np.ndarray, np.ndarray])
assert_type(
    fastattn.attention(x, x, x, return_lse=True, return_weights=True, layout="bshd"),
    tuple[np.ndarray, np.ndarray, np.ndarray],
)
assert_type(fastattn.attention(x, x, x, return_lse=flag), np.ndarray | tuple[np.ndarray, ...])
assert_type(fastattn.varlen_attention(x, x, x, [0, 1], causal=True), np.ndarray)
assert_type(fastattn.varlen_attention(x, x, x, [0], [0], return_lse=True), tuple[np.ndarray, np.ndarray])
assert_type(
    fastattn.varlen_attention(x, x, x, [0], return_lse=flag), np.ndarray | tuple[np.ndarray, np.ndarray]
)
assert_type(fastattn.flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: s), np.ndarray)
assert_type(
    fastattn.flex_attention(x, x, x, block_mask=Causal(), return_lse=True), tuple[np.ndarray, np.ndarray]
)
assert_type(fastattn.flex_attention(x, x, x, return_weights=flag), np.ndarray | tuple[np.ndarray, ...])
assert_type(Causal() & Window(1, 1) | ~Causal("top_left"), Mask)
"""
WRONG = """
import fastattn
from fastattn.masks import Causal, Window

x = [[1.0]]
fastattn.attention(x, x, x, causal="topleft")
fastattn.attention(x, x, x, layout="sbhd")
fastattn.attention(x, x, x, backend="Cython")
fastattn.attention(x, x, x, attn_mask=x)
fastattn.attention(x, x, x, Causal())
fastattn.varlen_attention(x, x, x, [0, 1], mask=Causal())
fastattn.flex_attention(x, x, x, mask=Causal())
fastattn.flex_attention(x, x, x, block_mask=x)
Causal("left")
Window(1, 1, align="middle")
Causal() & None
"""


@pytest.mark.slow
def test_types_as_a_checker_sees_them(tmp_path):
    """Right calls have the right types, and each wrong line is an error."""
    pytest.importorskip("mypy")
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(SNIPPET)
    wrong.write_text(WRONG)
    code = f"""
import sys
from mypy import api
options = ["--strict", "--config-file=", "--cache-dir={tmp_path}", "--follow-imports=silent"]
print(*api.run([*options, "--ignore-missing-imports", {str(right)!r}, {str(wrong)!r}]), sep="\\n")
"""
    said = python(code, timeout=300)
    errors = re.findall(r"(right|wrong)\.py:(\d+): error", said)
    lines = WRONG.splitlines()
    expected = {("wrong", str(n)) for n, line in enumerate(lines, 1) if n > lines.index("x = [[1.0]]") + 1}
    assert set(errors) == expected, said
