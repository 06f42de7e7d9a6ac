"""Arguments that a function does not have: what the message says, and what editors and `help` see instead."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
import typing
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import fastattn
from fastattn import masks
from fastattn._call import options as _options
from fastattn._call.hints import ANSWERS, _is_slip, refusal
from fastattn.backends import registry
from fastattn.layers import MultiHeadAttention
from fastattn.masks import Causal
from fastattn.masks.objects import Align
from tests import typing_uses
from tests.process import ROOT, python

X = np.ones((1, 2, 5, 4), np.float32)
#: What `_call.options` has for checkers alone.
OPTION_TYPES: dict = {"__name__": "fastattn._call.options"}
exec(Path(_options.__file__).read_text().replace("\nif TYPE_CHECKING:", "\nif True:"), OPTION_TYPES)
FUNCTIONS = {
    "attention": (fastattn.attention, (X, X, X), "A"),
    "flex_attention": (fastattn.flex_attention, (X, X, X), "F"),
    "varlen_attention": (fastattn.varlen_attention, (X[0], X[0], X[0], [0, 2]), "V"),
}
SAY_MASK = (
    "say mask= for a bool mask (True = may attend) and bias= for a float one (added to the scores), "
    "or call fastattn.scaled_dot_product_attention, which has PyTorch's arguments and conventions"
)
SAY_CAUSAL = 'say causal=True, or causal="top_left" where L != S, as PyTorch does'
SAY_PADDING = (
    "say key_lengths= where the padding stands at the end, or mask=~key_padding_mask[:, None, None, :] "
    "where True means ignore, as in torch.nn.MultiheadAttention, and without ~ where it means keep"
)
AVERAGE = 'say return_weights="mean" for the mean over the heads, or return_weights=True for each head'

NEED = (
    'say return_weights="mean", which averages over the heads as there, or return_weights=True for each head'
)


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
            ("attention", "average_attn_weights", AVERAGE),
            ("flex_attention", "is_causal", SAY_CAUSAL),
            ("flex_attention", "need_weights", NEED),
            ("varlen_attention", "key_padding_mask", "leave the padding out of the packed arrays"),
        ],
    )
    def test_names_of_pytorch(self, function, argument, hint):
        message = message_of(function, **{argument: None})
        assert message == f"{function}() got an unexpected keyword argument {argument!r}: {hint}"

    def test_more_names_of_pytorch(self):
        for function, argument, place in [
            ("attention", "enable_gqa", "leave it out"),
            ("attention", "need_weights", "return_weights=True"),
            ("flex_attention", "attn_mask", "say mask= for a bool mask"),
            ("varlen_attention", "is_causal", "causal=True"),
            ("varlen_attention", "average_attn_weights", "return_weights=True"),
        ]:
            assert place in message_of(function, **{argument: None}), (function, argument)

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
        _, mean = fastattn.attention(q, k, v, layout="bshd", mask=mask, return_weights="mean")
        np.testing.assert_allclose(mean, averaged.numpy(), atol=1e-12)

    @pytest.mark.parametrize(
        ("function", "argument", "close"),
        [
            ("attention", "maks", "mask"),
            ("attention", "key_length", "key_lengths"),
            ("attention", "soft_cap", "softcap"),
            ("attention", "casual", "causal"),
            ("attention", "num_thread", "num_threads"),
            ("flex_attention", "scor_mod", "score_mod"),
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

    def test_what_only_a_message_needs_is_not_loaded_before(self):
        code = """
import sys, numpy
import fastattn
x = numpy.ones((2, 3))
fastattn.attention(x, x, x)
assert "fastattn._call.hints" not in sys.modules
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
            ("attention", (np.ones((5, 5), bool),), ", here mask=array (non-zero = may attend)"),
            ("attention", (np.ones((5, 5), np.int8), 0.0), ", here mask=array (non-zero = may attend)"),
            ("attention", (np.array([5, 3]),), ""),  # lengths, more likely than a mask
            ("attention", (np.ones((5, 5), complex),), ""),
            ("attention", ([[1], [1, 0]],), ""),
            ("attention", (np.zeros((5, 5), np.float32),), ", here bias=..."),
            ("attention", (np.full((5, 5), 0.5),), ", here bias=..."),
            ("attention", (np.tri(5),), ", here mask=array.astype(bool) (non-zero = may attend)"),
            ("attention", (np.ones(5, "f4"),), ", here mask=array.astype(bool) (non-zero = may attend)"),
            ("flex_attention", (np.tri(5),), ", here mask=array.astype(bool) (non-zero = may attend)"),
            ("attention", (None, 0.0, True), ""),
            ("attention", (True,), ""),
            ("attention", (abs,), ""),
            ("flex_attention", (Causal(),), ", here mask=..."),
            ("flex_attention", (lambda score, b, h, i, j: score,), ", here score_mod=..."),
            ("varlen_attention", (None, Causal()), ", here mask=..."),
            ("varlen_attention", (4, 4), "; a maximum length is left out"),
            ("attention", (4,), ""),
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
        mask = "by name, here mask=array (non-zero = may attend)"
        assert message_of("attention", torch.ones(5, 5) > 0).endswith(mask)
        assert message_of("attention", torch.zeros(5, 5)).endswith("by name, here bias=...")
        assert message_of("attention", torch.ones(5, 5)).endswith(mask.replace("array", "array.astype(bool)"))
        unknown = message_of("attention", torch.ones(5, 5, requires_grad=True))
        assert "here bias=..., unless it holds zeros and ones alone" in unknown


CACHE, STATE = fastattn.KVCache(1, 2, 4), fastattn.RecurrentState(1, 2, 4)
CALLABLES = {
    function.__qualname__.removesuffix(".__init__"): function
    for function in [
        fastattn.attention, fastattn.attention_backward, fastattn.create_block_mask, fastattn.dropout_mask,
        fastattn.flex_attention, fastattn.kernel_logsumexp, fastattn.kernel_regression,
        fastattn.linear_attention, fastattn.merge_attention, fastattn.random_features, fastattn.rope,
        fastattn.rope_tables, fastattn.scaled_dot_product_attention, fastattn.varlen_attention,
        fastattn.varlen_attention_backward,
        fastattn.KVCache.__init__, fastattn.KVCache.append, fastattn.KVCache.attend, fastattn.KVCache.load,
        fastattn.KVCache.select, fastattn.KVCache.truncate, fastattn.RecurrentState.__init__,
        fastattn.RecurrentState.append, fastattn.RecurrentState.step, MultiHeadAttention.__init__,
        MultiHeadAttention.__call__, MultiHeadAttention.from_torch,
    ]
}  # fmt: skip
W = np.eye(4, dtype=np.float32)
#: How each is called with a wrong name, and what it takes besides.
WRONG_CALLS = {
    "attention": lambda **k: fastattn.attention(X, X, X, **k),
    "attention_backward": lambda **k: fastattn.attention_backward(X, X, X, X, X, X[..., 0], **k),
    "create_block_mask": lambda **k: fastattn.create_block_mask(abs, 1, 1, **k),
    "dropout_mask": lambda **k: fastattn.dropout_mask((3,), **k),
    "flex_attention": lambda **k: fastattn.flex_attention(X, X, X, **k),
    "kernel_logsumexp": lambda **k: fastattn.kernel_logsumexp(X, X, **k),
    "kernel_regression": lambda **k: fastattn.kernel_regression(X, X, X, **k),
    "linear_attention": lambda **k: fastattn.linear_attention(X, **k),
    "merge_attention": lambda **k: fastattn.merge_attention([X], **k),
    "random_features": lambda **k: fastattn.random_features(3, **k),
    "rope": lambda **k: fastattn.rope(X, X[0, 0, :, :2], X[0, 0, :, :2], **k),
    "rope_tables": lambda **k: fastattn.rope_tables(3, **k),
    "scaled_dot_product_attention": lambda **k: fastattn.scaled_dot_product_attention(X, X, X, **k),
    "varlen_attention": lambda **k: fastattn.varlen_attention(X[0], X[0], X[0], [0, 2], **k),
    "varlen_attention_backward": lambda **k: fastattn.varlen_attention_backward(
        X[0], X[0], X[0], X[0], X[0], X[0, ..., 0].T, [0, 2], **k
    ),
    "KVCache": lambda **k: fastattn.KVCache(1, **k),
    "KVCache.append": lambda **k: CACHE.append(X, X, **k),
    "KVCache.attend": lambda **k: CACHE.step(X, X, X, **k),
    "KVCache.load": lambda **k: fastattn.KVCache.load("", **k),
    "KVCache.select": lambda **k: CACHE.select(**k),
    "KVCache.truncate": lambda **k: CACHE.truncate(**k),
    "RecurrentState": lambda **k: fastattn.RecurrentState(1, **k),
    "RecurrentState.append": lambda **k: STATE.append(X, X, **k),
    "RecurrentState.step": lambda **k: STATE.step(X, X, X, **k),
    "MultiHeadAttention": lambda **k: MultiHeadAttention(W, **k),
    "MultiHeadAttention.__call__": lambda **k: MultiHeadAttention(W, W, W, W, num_heads=1)(X[0], **k),
    "MultiHeadAttention.from_torch": lambda **k: MultiHeadAttention.from_torch({}, **k),
}
PARAMETERS = {
    name: set(inspect.signature(function).parameters) - {"self", "cls"}
    for name, function in CALLABLES.items()
}
OWN_NAMES = set().union(*PARAMETERS.values())


@pytest.mark.parametrize("name", CALLABLES)
class TestTheTable:
    def test_a_hint_names_what_the_function_takes(self, name):
        for argument in sorted((ANSWERS.keys() | OWN_NAMES) - PARAMETERS[name]):
            message = refusal(CALLABLES[name], (), [argument])
            said = f"{name}() got an unexpected keyword argument {argument!r}"
            assert message.startswith(said)
            # Names such as ``scale=``, but not of ``!=`` and ``==``.
            named = set(re.findall(r"\b(\w+)=(?!=)", message.replace("!=", "")))
            named |= {*re.findall(r"Did you mean '(\w+)'", message)}
            assert named <= PARAMETERS[name], message
            assert "Did you mean" not in message, message  # each of these means something

    @pytest.mark.parametrize(
        "argument", ["no_such_word", "softmax_scale", "num_heads", "need_weights", "mask"]
    )
    def test_each_says_it_when_called(self, name, argument):
        if argument in PARAMETERS[name]:
            argument = "no_such_word"
        with pytest.raises(TypeError) as caught:
            WRONG_CALLS[name](**{argument: 1})
        assert str(caught.value) == refusal(CALLABLES[name], (), [argument])

    def test_the_signature_is_clean(self, name):
        kinds = {p.kind for p in inspect.signature(CALLABLES[name]).parameters.values()}
        assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


class TestHints:
    #: One of each library and of each kind of answer; `TestTheTable` has the others.
    @pytest.mark.parametrize(
        ("name", "argument", "said"),
        [
            ("attention", "softmax_scale", "say scale="),
            ("attention", "num_heads", "read from the arrays' shapes, (..., H, L, D)"),
            ("attention", "attention_mask", "mask=attention_mask[:, None, None, :] for one of (B, S)"),
            ("attention", "window_size", "with None in the place of -1"),
            ("attention", "sliding_window", "window=(sliding_window - 1, 0)"),
            ("attention", "cu_seqlens_q", "call fastattn.varlen_attention"),
            ("attention", "past_key_values", "use a fastattn.KVCache"),
            ("attention", "block_table", "give fastattn.Paged(pages, table)"),
            ("attention", "num_sink_tokens", "| fastattn.masks.GlobalTokens(range(num_sink_tokens))"),
            ("attention", "keep_prob", "say dropout=1 - keep_prob, and seed="),
            ("attention", "seqlens_k", "onnxruntime's seqlens_k is one less"),
            ("scaled_dot_product_attention", "seqlens_k", "np.arange(S) <= seqlens_k[:, None, None, None]"),
            ("KVCache.append", "cache_seqlens", "leave it out where it counts what the cache has"),
            ("KVCache.attend", "key_lengths", "the cache knows"),
            ("rope", "is_neox_style", "say interleaved=not is_neox_style"),
            ("attention_backward", "softmax_lse", "say lse="),
            ("attention_backward", "cu_seqlens_q", "call fastattn.varlen_attention_backward"),
            ("attention_backward", "cu_seqlens_k", "call fastattn.varlen_attention_backward"),
            ("varlen_attention_backward", "cu_seqlens", "say cu_seqlens_q="),
            ("varlen_attention_backward", "softmax_lse", "say lse="),
            ("MultiHeadAttention", "interleaved", "permute the columns of w_q and w_k"),
            ("MultiHeadAttention.__call__", "attn_mask", "say mask=~attn_mask"),
            ("kernel_regression", "gamma", "say bandwidth=(2 * gamma) ** -0.5"),
        ],
    )
    def test_what_takes_the_place(self, name, argument, said):
        assert said in refusal(CALLABLES[name], (), [argument])

    def test_every_function_answers(self):
        for name, argument, place in [
            ("attention", "return_softmax_lse", "return_lse"),
            ("attention", "s_aux", "sinks"), ("attention", "n_jobs", "num_threads"),
            ("attention", "return_attention", "return_weights"), ("attention", "value_mask", "mask"),
            ("attention", "output_attentions", "return_weights"), ("attention", "seqused_q", "causal"),
            ("flex_attention", "custom_mask", "mask"),
            ("flex_attention", "kernel_options", "leave it out"),
            ("scaled_dot_product_attention", "mask", "attn_mask"),
            ("scaled_dot_product_attention", "causal", "is_causal"),
            ("linear_attention", "softcap", "attention"),
            ("linear_attention", "attention_mask", "key_lengths"), ("linear_attention", "cache", "state"),
            ("rope", "position_ids", "positions"), ("rope", "seqlen_offsets", "positions"),
            ("rope_tables", "rope_theta", "base"), ("rope_tables", "dim", "rotary_dim"),
            ("KVCache", "num_heads", "num_kv_heads"), ("KVCache", "sliding_window", "window"),
            ("KVCache", "num_sink_tokens", "keep_first"), ("KVCache", "s_aux", "sinks"),
            ("KVCache", "key_dim", "head_dim"), ("KVCache.append", "seq_lens", "lengths"),
            ("KVCache.append", "attention_mask", "lengths"), ("KVCache.append", "length", "lengths"),
            ("KVCache.attend", "seq_lens", "lengths"), ("KVCache.attend", "num_sink_tokens", "keep_first"),
            ("KVCache.load", "mmap_mode", "mmap"),
            ("varlen_attention", "attention_mask", "leave the padding out"),
            ("varlen_attention", "seqused_q", "leave the padding out"), ("create_block_mask", "KV_LEN", "S"),
            ("create_block_mask", "Q_LEN", "L"), ("create_block_mask", "device", "host"),
            ("create_block_mask", "BLOCK_SIZE", "leave it out"), ("attention", "device", "arrays"),
            ("create_block_mask", "num_key_value_heads", "leave it out"), ("merge_attention", "lse", "lses"),
            ("attention_backward", "head_mask", "grad_out"), ("attention_backward", "dout", "grad_out"),
            ("MultiHeadAttention", "dropout", "seed"), ("MultiHeadAttention", "embed_dim", "w_q"),
            ("MultiHeadAttention.__call__", "head_mask", "w_o"),
            ("MultiHeadAttention.__call__", "deterministic", "dropout"),
            ("MultiHeadAttention.__call__", "seq_lens", "cache"),
            ("MultiHeadAttention.__call__", "use_causal_mask", "causal"),
            ("attention", "attention_chunk", "Segments"), ("attention", "cache_leftpad", "mask"),
            ("attention", "cache_batch_idx", "key"), ("attention", "qk_output", "return_weights"),
            ("attention", "use_scale", "scale"), ("attention", "broadcast_dropout", "dropped"),
            ("attention", "encoder_attention_mask", "mask"), ("attention", "where", "mask"),
            ("attention", "slot_mapping", "KVCache"), ("attention", "kv_cache_dtype", "Quantized"),
            ("attention", "rope_theta", "rope"), ("attention", "qkv", "query"),
            ("attention", "precision", "float32"), ("attention", "attention_axes", "axis"),
            ("attention_backward", "output_mask", "wrt"), ("attention_backward", "philox_seed", "seed"),
            ("varlen_attention", "block_table", "Paged"), ("linear_attention", "layout", "H"),
            ("linear_attention", "normalize", "weights"), ("KVCache", "storage", "dtype"),
            ("RecurrentState", "key_dim", "head_dim"), ("RecurrentState.append", "seq_lens", "lengths"),
            ("RecurrentState.append", "attention_mask", "lengths"),
            ("RecurrentState.step", "key_lengths", "lengths"), ("RecurrentState.step", "layout", "made"),
            ("RecurrentState.step", "initial_state", "holds"), ("RecurrentState.step", "use_cache", "holds"),
            ("KVCache.append", "layer_idx", "each layer"), ("KVCache.append", "axis", "follow"),
            ("rope", "base", "rope_tables"), ("rope", "dims", "columns"), ("rope_tables", "scale", "scaling"),
            ("random_features", "ortho_scaling", "lengths"), ("kernel_logsumexp", "bw_method", "bandwidth"),
            ("kernel_logsumexp", "b", "log_weights"), ("kernel_logsumexp", "atol", "all pairs"),
            ("create_block_mask", "separate_full_blocks", "unmasked"),
            ("MultiHeadAttention.from_torch", "batch_first", "length"),
        ]:  # fmt: skip
            hint = refusal(CALLABLES[name], (), [argument]).partition(f"{argument!r}: ")[2]
            assert re.search(rf"\b{place}\b", hint), (name, argument, hint)

    @pytest.mark.parametrize(
        ("name", "argument"),
        [
            ("KVCache", "rotary_dim"),  # no head_dim, and neither is the dim of a model
            ("KVCache", "dim"),
            ("attention", "offset"),  # of the diagonal, more likely than of rotary positions
            ("attention", "temperature"),
        ],
    )
    def test_nothing_is_said_where_nothing_is_the_same(self, name, argument):
        message = refusal(CALLABLES[name], (), [argument])
        assert message == f"{name}() got an unexpected keyword argument {argument!r}"

    @pytest.mark.parametrize(
        "word", ["acausal", "dausal", "caussaal", "cos", "pos", "w_k", "cu_seqlens_v", ""]
    )
    def test_another_word_is_no_slip(self, word):
        assert not any(_is_slip(word, name) for name in OWN_NAMES - {word})

    def test_errors_from_inside_are_as_they_are(self):
        """Those of the function's own work, and of arguments that are missing."""

        def feature_map(x, *, scale):
            return x

        with pytest.raises(TypeError, match=r"missing 1 required keyword-only argument: 'scale'$"):
            fastattn.linear_attention(X, X, X, feature_map=feature_map)
        with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'head_dim'$"):
            fastattn.KVCache(1, 2)
        with pytest.raises(TypeError, match=r"multiple values for argument 'shape'$"):
            fastattn.dropout_mask((3,), 0.1, shape=(3,), seed=1)
        with pytest.raises(
            TypeError, match=r"takes 4 positional .* but 5 were given: the others go by name$"
        ):
            fastattn.KVCache(1, 2, 3, 4, "float32")

    def test_conversions_are_right(self):
        """Other libraries' numbers, converted as the hints say."""
        rng = np.random.default_rng(0)
        q, k, v = rng.standard_normal((3, 2, 2, 6, 4))
        i, j = np.arange(6)[:, None], np.arange(6)
        tokens = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])  # attention_mask of Hugging Face
        expected = fastattn.attention(q, k, v, key_lengths=[4, 6])
        np.testing.assert_array_equal(fastattn.attention(q, k, v, mask=tokens[:, None, None, :]), expected)
        attn_mask = tokens[:, None, None, :] != 0
        got = fastattn.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
        np.testing.assert_array_equal(got, expected)
        attn_mask = np.arange(6) < np.array([4, 6])[:, None, None, None]
        got = fastattn.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
        np.testing.assert_array_equal(got, expected)
        w = 3  # sliding_window: the token and two before it
        wanted = fastattn.attention(q, k, v, mask=(j <= i) & (i - j < w))
        np.testing.assert_allclose(fastattn.attention(q, k, v, causal=True, window=(w - 1, 0)), wanted)
        for slopes in (np.array([0.5, 0.25]), np.array([[0.5, 0.25], [1, 2]])):  # (H,) and (B, H)
            L, S = 2, 6
            bias = -slopes[..., None, None] * abs(np.arange(L)[:, None] + S - L - np.arange(S))
            wanted = fastattn.attention(q, k, v, bias=-slopes[..., None, None] * abs(i - j))[..., 4:, :]
            np.testing.assert_allclose(fastattn.attention(q[..., 4:, :], k, v, bias=bias), wanted)
        sinks = fastattn.masks.Window(w - 1, None) | fastattn.masks.GlobalTokens(range(2))
        wanted = fastattn.attention(q, k, v, mask=(j <= i) & ((i - j < w) | (j < 2)))  # num_sink_tokens=2
        np.testing.assert_allclose(fastattn.attention(q, k, v, causal=True, mask=sinks), wanted)
        attn_mask = np.arange(6) <= np.array([3, 5])[:, None, None, None]  # seqlens_k of onnxruntime
        got = fastattn.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
        np.testing.assert_array_equal(got, expected)
        chunks = masks.Segments((np.arange(2) + 6 - 2) // w, np.arange(6) // w)  # attention_chunk of FA3
        wanted = fastattn.attention(q, k, v, mask=(i // w == j // w) & (j <= i))[..., 4:, :]
        got = fastattn.attention(q[..., 4:, :], k, v, mask=chunks, causal="bottom_right")
        np.testing.assert_allclose(got, wanted)
        leftpad = np.array([0, 2])  # cache_leftpad of FA3: item 1 begins with two keys of padding
        got = fastattn.attention(q, k, v, mask=np.arange(6) >= leftpad[:, None, None, None])
        np.testing.assert_allclose(got[1], fastattn.attention(q[1], k[1, :, 2:], v[1, :, 2:]))
        cu_seqlens_q = np.array([0, 4, 6])
        x, y, z = (array[0].swapaxes(0, 1) for array in (q, k, v))
        out, lse = fastattn.varlen_attention(x, y, z, cu_seqlens_q, return_lse=True)
        got = fastattn.varlen_attention_backward(out, x, y, z, out, lse, cu_seqlens_q)
        x, y, z = (array[4:] for array in (x, y, z))
        out, lse = fastattn.attention(x, y, z, layout="bshd", return_lse=True)
        wanted = fastattn.attention_backward(out, x, y, z, out, lse, layout="bshd")
        np.testing.assert_allclose(got.key[4:], wanted.key)
        cos, sin = fastattn.rope_tables(6, 4, scaling=("linear", 1 / 0.5))  # scale=0.5 of MLX
        for table, of_half in zip((cos, sin), fastattn.rope_tables(3, 4), strict=True):
            np.testing.assert_allclose(table[::2], of_half, atol=1e-7)
        zero = np.zeros((2, 2, 1, 4))
        more_k, more_v = (np.concatenate([x, zero], axis=-2) for x in (k, v))
        wanted = fastattn.attention(q, more_k, more_v)  # add_zero_attn
        np.testing.assert_allclose(fastattn.attention(q, k, v, sinks=np.zeros(2)), wanted)
        out = fastattn.kernel_regression(q[0, 0], k[0, 0], v[0, 0], bandwidth=(2 * 0.3) ** -0.5)
        kernels = np.exp(-0.3 * ((q[0, 0][:, None] - k[0, 0]) ** 2).sum(-1))  # gamma = 0.3
        np.testing.assert_allclose(out, kernels @ v[0, 0] / kernels.sum(-1, keepdims=True))


class TestInPlaceOfWhatIsNeeded:
    """Python would say first that an argument is missing, and not what stands in its place."""

    @pytest.mark.parametrize(
        ("call", "said"),
        [
            (lambda: fastattn.attention(q=X, k=X, v=X), "'q': say query=, and 'k': say key=, and 'v': say"),
            (lambda: fastattn.attention(qkv=X), "'qkv': say query=, key= and value="),
            (lambda: fastattn.scaled_dot_product_attention(Q=X, K=X, V=X), "'Q': say query="),
            (lambda: fastattn.flex_attention(X, X, V=X), "'V': say value="),
            (lambda: fastattn.varlen_attention(X[0], X[0], X[0], cu_seq_q=[0, 2]), "say cu_seqlens_q="),
            (lambda: fastattn.attention_backward(dout=X), "'dout': say grad_out="),
            (lambda: fastattn.attention_backward(X, X, X, X, X, softmax_lse=X), "say lse="),
            (lambda: fastattn.rope(X, dims=4, base=1e4), "'base': give it to fastattn.rope_tables"),
            (lambda: CACHE.step(X, k=X, v=X), "'k': say key=, and 'v': say value="),
            (lambda: CACHE.attend(Q=X), "'Q': say query="),
            (lambda: MultiHeadAttention(W, W, W, W, num_heads=1)(hidden_states=X), "say query="),
        ],
    )
    def test_another_name(self, call, said):
        with pytest.raises(TypeError, match=re.escape(said)):
            call()

    @pytest.mark.parametrize(
        ("call", "name"),
        [
            (lambda: fastattn.attention(), "query"),
            (lambda: fastattn.attention(X, X), "value"),
            (lambda: fastattn.attention(X, None, X), "key"),
            (lambda: fastattn.scaled_dot_product_attention(X, X), "value"),
            (lambda: fastattn.flex_attention(X), "key"),
            (lambda: fastattn.varlen_attention(X[0], X[0], X[0]), "cu_seqlens_q"),
            (lambda: fastattn.attention_backward(X, X, X, X, X), "lse"),
            (lambda: fastattn.rope(X), "cos"),
            (lambda: CACHE.append(X), "value"),
            (lambda: CACHE.step(X), "key"),
            (lambda: CACHE.attend(), "query"),
            (lambda: MultiHeadAttention(W, W, W, W, num_heads=1)(), "query"),
        ],
    )
    def test_nothing(self, call, name):
        with pytest.raises(TypeError, match=rf"^{name} must be an array, got (nothing|NoneType)"):
            call()

    @pytest.mark.parametrize(
        ("call", "said"),
        [
            (lambda: fastattn.rope(X, X, X, X), "rope() takes 3 positional arguments (x, cos, sin), but 4"),
            (lambda: CACHE.append(X, X, [5]), "append() takes 2 positional arguments (key, value), but 3"),
            (
                lambda: CACHE.attend(X, np.ones((5, 5), bool)),
                "2 were given: the others go by name, here mask=",
            ),
            (lambda: CACHE.step(X, X, X, Causal()), "4 were given: the others go by name, here mask="),
        ],
    )
    def test_one_too_many(self, call, said):
        with pytest.raises(TypeError, match=re.escape(said)):
            call()
        assert not CACHE.lengths.any()


class TestNamesOfOtherLibraries:
    @pytest.mark.parametrize("name", fastattn._INSTEAD)
    def test_functions(self, name):
        with pytest.raises(AttributeError) as caught:
            getattr(fastattn, name)
        said = str(caught.value).removeprefix(f"module 'fastattn' has no attribute {name!r}: say ")
        assert callable(eval(said))

    @pytest.mark.parametrize("name", masks._INSTEAD)
    def test_masks(self, name):
        with pytest.raises(AttributeError) as caught:
            getattr(masks, name)
        said = str(caught.value).removeprefix(f"module 'fastattn.masks' has no attribute {name!r}: say ")
        given = {"left": 1, "right": 0, "ids": [0, 0, 1], "lengths": 3}
        assert eval(said, vars(masks) | given).materialize(1, 3, 3).any()


@pytest.mark.parametrize(
    ("module", "name"),
    [("jax", "attention"), ("dask", "attention"), ("dask", "attention_backward"), ("numba", "attention")],
)
class TestIntegrations:
    """Functions that take less than those of the same name here."""

    def test_a_hint_names_what_the_function_takes(self, module, name):
        pytest.importorskip(module)
        function = getattr(import_module(f"fastattn.integrations.{module}"), name)
        parameters = set(inspect.signature(function).parameters)
        for argument in sorted((ANSWERS.keys() | OWN_NAMES) - parameters):
            message = refusal(function, (), [argument])
            assert set(re.findall(r"\b(\w+)=(?!=)", message.replace("!=", ""))) <= parameters, message
            assert "Did you mean" not in message, message
            for other in ("Paged", "Quantized", "scaled_dot_product_attention"):  # which it does not take
                assert other not in message, message

    def test_each_says_it_when_called(self, module, name):
        pytest.importorskip(module)
        function = getattr(import_module(f"fastattn.integrations.{module}"), name)
        parameters = inspect.signature(function).parameters
        arrays = [X] * sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())
        with pytest.raises(TypeError, match=r"'softmax_scale': say scale=$"):
            function(*arrays, softmax_scale=1.0)
        hint = r", here mask=array \(non-zero = may attend\)" if "mask" in parameters else ""
        with pytest.raises(TypeError, match=rf": the others go by name{hint}$"):
            function(*arrays, np.ones((5, 5), bool))


@pytest.mark.parametrize("module", ["torch", "autograd"])
@pytest.mark.parametrize("name", ["attention", "flex_attention"])
def test_integrations_that_hand_options_on(module, name):
    """They take those of `fastattn`'s own, which says what else to say; a mask by position is theirs."""
    pytest.importorskip(module)
    function = getattr(import_module(f"fastattn.integrations.{module}"), name)
    arrays = [X] * 3
    if module == "torch":
        arrays = [import_module("torch").from_numpy(X)] * 3
    function(*arrays, window=(1, 1))
    with pytest.raises(TypeError, match=r"attention\(\) got .* 'softmax_scale': say scale=$"):
        function(*arrays, softmax_scale=1.0)
    with pytest.raises(TypeError, match="window must be a pair"):
        function(*arrays, window=3)
    with pytest.raises(TypeError, match=r"takes 3 positional .*: the others go by name, here bias="):
        function(*arrays, np.full((5, 5), 0.5, np.float32))
    if name == "flex_attention":
        with pytest.raises(TypeError, match=r"the others go by name, here score_mod=\.\.\.$"):
            function(*arrays, lambda score, b, h, q_idx, kv_idx: score)
        with pytest.raises(TypeError, match="'enable_gqa': leave it out"):
            function(*arrays, enable_gqa=True)


def test_a_message_computes_no_graph():
    """Numbers that are not here yet are a bias, or a mask of zeros and ones."""
    da = pytest.importorskip("dask.array")
    graph = da.from_array(X[0, 0]).map_blocks(lambda _: pytest.fail("computed"), dtype="f4", meta=X[0, 0, :0])
    assert message_of("attention", graph).endswith(
        "here bias=..., unless it holds zeros and ones alone: those are a mask, array.astype(bool)"
    )


def option_names(function, overload):
    """What an overload takes by ``**options``, as its module or `_call.options` has it for checkers alone."""
    options = inspect.signature(overload).parameters["options"].annotation
    name = re.fullmatch(r"Unpack\[(\w+)(\[.*\])?\]", options)[1]
    for node in ast.walk(ast.parse(Path(function.__code__.co_filename).read_text())):
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = re.findall(r"\w+Options", ast.unparse(node.bases[0]))
            own = [it.target.id for it in node.body if isinstance(it, ast.AnnAssign)]
            return [*own, *(key for base in bases for key in OPTION_TYPES[base].__annotations__)]
    return [*OPTION_TYPES[name].__annotations__]


OVERLOADED = [
    *(function for function, _, _ in FUNCTIONS.values()),
    *(fastattn.attention_backward, fastattn.varlen_attention_backward),
    *(fastattn.KVCache.attend, fastattn.KVCache.step),
    *(MultiHeadAttention.__call__, fastattn.kernel_regression, fastattn.linear_attention),
]


@pytest.mark.parametrize("function", OVERLOADED, ids=lambda function: function.__qualname__)
class TestSignature:
    def test_shows_the_options_alone(self, function):
        kinds = {p.kind for p in inspect.signature(function).parameters.values()}
        assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}

    def test_overloads_have_the_same_options(self, function):
        """The checker would not see one that is missing there: the definition takes any name."""
        function = inspect.unwrap(function)
        overloads = typing.get_overloads(function)
        assert len(overloads) >= 2
        shown = set(inspect.signature(function).parameters)
        for number, overload in enumerate(overloads):
            parameters = [name for name in inspect.signature(overload).parameters if name != "options"]
            names = [*parameters, *option_names(function, overload)]
            assert len(names) == len(set(names))
            of_default = {"wrt"} if "wrt" in shown and number == 0 else set()
            assert set(names) == shown - of_default


def test_signatures_name_types():
    """What `help` shows is a type, and not "Any"."""
    public = [*CALLABLES.values(), fastattn.KVCache.step, *(getattr(masks, name) for name in masks.__all__)]
    for function in public:
        assert not re.search(r"\bAny\b", str(inspect.signature(function))), function


@pytest.mark.parametrize(
    ("taker", "types"),
    [
        ("A", "AttentionOptions"),
        ("B", "BackwardOptions"),
        ("C", "AttendOptions"),
        ("F", "FlexOptions"),
        ("G", "FlexBackwardOptions"),
        ("L", "LayerOptions"),
        ("R", "ReductionOptions"),
        ("V", "VarlenOptions"),
        ("W", "VarlenBackwardOptions"),
    ],
)
def test_every_option_has_a_type(taker, types):
    of_overload = {"wrt"} if taker in "BGW" else set()
    assert OPTION_TYPES[types].__annotations__.keys() == _options.TAKERS[taker].keys() - of_overload


def test_choices_are_the_contract():
    assert typing.get_args(OPTION_TYPES["BackendName"]) == tuple(registry.MODULES)
    assert typing.get_args(OPTION_TYPES["LayoutName"]) == ("bhsd", "bshd")
    assert typing.get_args(Align) == ("top_left", "bottom_right")
    assert typing.get_args(OPTION_TYPES["CausalRule"]) == (bool, Align)
    for align in typing.get_args(Align):
        fastattn.attention(X, X, X, causal=align, mask=Causal(align))


USES, MISUSES = (ROOT / "tests" / f"typing_{name}.py" for name in ("uses", "misuses"))


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "basedpyright"])
def test_types_as_a_checker_sees_them(checker, tmp_path):
    """Right calls have the right types, and each wrong line is an error."""
    pytest.importorskip(checker)
    options = ["--strict", "--config-file=", f"--cache-dir={tmp_path}", "--follow-imports=silent"]
    options += ["--ignore-missing-imports"]
    if checker == "basedpyright":  # with the rules of pyright
        project = tmp_path / "pyrightconfig.json"
        project.write_text(json.dumps({"typeCheckingMode": "standard", "extraPaths": [str(ROOT)]}))
        options = ["--project", str(project), "--pythonpath", sys.executable]
    command = [sys.executable, "-m", checker, *options, str(USES), str(MISUSES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    found = re.findall(r"(\w+)\.py:(\d+)(?:: |:\d+ - )error", done.stdout)
    lines = MISUSES.read_text().splitlines()
    first = lines.index("# Choices and names.") + 2
    wrong = {str(n) for n, line in enumerate(lines, 1) if n >= first and line and line[0] != "#"}
    assert set(found) == {(MISUSES.stem, n) for n in wrong}, done.stdout + done.stderr


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "functions_of_the_caller" else ())
        for name, it in vars(typing_uses).items()
        if inspect.isfunction(it) and it.__module__ == typing_uses.__name__
    ],
)
def test_typical_uses_run(name):
    """So that what a checker is shown is no mistake."""
    if name == "functions_of_the_caller":
        pytest.importorskip("numba")
    getattr(typing_uses, name)()
