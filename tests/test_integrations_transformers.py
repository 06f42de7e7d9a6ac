"""Tiny random models of transformers give the same by fastattn as by transformers' own attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

import fastattn  # noqa: E402
from fastattn.integrations.transformers import RECURRENT, RECURRENT_FUNCTIONS, register  # noqa: E402

register()

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
T5 = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
#: A kind of attention each: its model and its configuration.
MODELS = {
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "grouped_heads": ("LlamaForCausalLM", SIZES),
    "sliding_window": ("MistralForCausalLM", SIZES | {"sliding_window": 5}),
    "softcap": ("Gemma2ForCausalLM", SIZES | {"sliding_window": 5, "attn_logit_softcapping": 0.5}),
    "hybrid": (
        "Gemma3ForCausalLM",
        SIZES | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "sinks": (
        "GptOssForCausalLM",
        SIZES | {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "value_dim": (
        "DeepseekV3ForCausalLM",
        SIZES
        | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 12}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "first_k_dense_replace": 2},
    ),
    "shared_keys": (
        "Gemma4ForCausalLM",
        SIZES
        | {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2, "global_head_dim": 8}
        | {"vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 8},
    ),
    "encoder": ("BertForMaskedLM", {k: SIZES[k] for k in list(SIZES)[:5]} | {"pad_token_id": 0}),
    "position_bias": ("T5ForConditionalGeneration", T5 | {"decoder_start_token_id": 0}),
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
#: Models with recurrent layers.
RECURRENT_MODELS = {
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        SIZES
        | LINEAR
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"shared_expert_intermediate_size": 16},
    ),
    "qwen3_5": ("Qwen3_5ForCausalLM", SIZES | LINEAR),
    "olmo_hybrid": ("OlmoHybridForCausalLM", SIZES | LINEAR | {"linear_num_key_heads": 4}),
}
#: What has a soft-cap or sinks.
NOT_BY_SDPA = (transformers.Gemma2ForCausalLM, transformers.GptOssForCausalLM)
DECODERS = [name for name in MODELS if name not in ("encoder", "position_bias")]


def tiny(name: str, **options: Any) -> Any:
    """A model in evaluation, whose attention is far from that of a mean."""
    kind, sizes = (MODELS | RECURRENT_MODELS)[name]
    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    model = cls(cls.config_class(**sizes | options)).eval()
    for parameter_name, x in model.named_parameters():
        if x.ndim > 1 or "sinks" in parameter_name:
            torch.nn.init.normal_(x, std=0.3)
    return model


def inputs(name: str, padded: str | None) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 61, (2, 13), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids}
    if padded:
        mask = torch.ones_like(ids)
        mask[1, slice(9, None) if padded == "right" else slice(4)] = 0
        given["attention_mask"] = mask
    if name == "position_bias":
        given["decoder_input_ids"] = ids.flip(1)[:, :7]
    return given


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Gets the arguments of each call of `fastattn.attention`."""
    noted: list[dict[str, Any]] = []
    attention = fastattn.attention

    def noting(**given):
        noted.append(given)
        return attention(**given)

    monkeypatch.setattr(fastattn, "attention", noting)
    return noted


def both(model: Any, call: Callable[[], Any]) -> tuple[Any, Any]:
    """What it gives by transformers' own attention, and by fastattn."""
    model.set_attn_implementation("eager" if isinstance(model, NOT_BY_SDPA) else "sdpa")
    expected = call()
    model.set_attn_implementation("fastattn")
    return expected, call()


@pytest.mark.parametrize("padded", [None, "right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, padded: str | None, calls: list) -> None:
    model, given = tiny(name), inputs(name, padded)
    with torch.no_grad():
        expected, out = both(model, lambda: model(**given).logits)
    assert len(calls) == (6 if name == "position_bias" else 2)
    of_tokens = slice(None)
    if padded and name != "position_bias":  # what is computed of padding has no meaning
        of_tokens = given["attention_mask"].bool()
    torch.testing.assert_close(out[of_tokens], expected[of_tokens], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [None, "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate(name: str, padded: str | None, cache: str, calls: list) -> None:
    model, given = tiny(name), inputs(name, padded)
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "cache_implementation": cache,
        "disable_compile": True,
    }
    expected, out = both(model, lambda: model.generate(**given, **options))
    assert len(calls) == 2 * 6
    assert calls[-1]["query"].shape[1] == 1
    assert torch.equal(out, expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["grouped_heads", "sliding_window", "softcap", "hybrid", "sinks"])
def test_decoding_in_steps_is_one_call(name: str, cache: str, calls: list) -> None:
    """The logits of a cache that is filled by 7, 3, 2 and 1 tokens are transformers' own of 13 at once."""
    model, ids = tiny(name), inputs(name, None)["input_ids"]
    filled = {
        "dynamic": lambda: transformers.DynamicCache(config=model.config),
        "static": lambda: transformers.StaticCache(config=model.config, max_cache_len=20),
    }[cache]()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(ids).logits
        model.set_attn_implementation("fastattn")
        parts = [model(part, cache=filled).logits for part in ids.split([7, 3, 2, 1], 1)]
    assert len(calls) == 2 * 4
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4)


def test_heads_are_not_repeated_and_causality_has_no_mask(calls: list) -> None:
    model = tiny("grouped_heads")
    model.set_attn_implementation("fastattn")
    model(**inputs("grouped_heads", None))
    assert [call["key"].shape for call in calls] == [(2, 13, 2, 8)] * 2
    assert [(call.get("mask"), call["causal"]) for call in calls] == [(None, "bottom_right")] * 2


@pytest.mark.parametrize("name", ["grouped_heads", "sinks", "position_bias"])
def test_gradients(name: str) -> None:
    model, given = tiny(name), inputs(name, "right")

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        logits = model(**given).logits
        (logits * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum().backward()
        return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}

    expected, out = both(model, gradients)
    assert out.keys() == expected.keys()
    for parameter in out:
        scale = float(expected[parameter].abs().max())
        torch.testing.assert_close(out[parameter], expected[parameter], rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("name", ["grouped_heads", "position_bias"])
def test_bfloat16(name: str) -> None:
    model, given = tiny(name).bfloat16(), inputs(name, "right")
    with torch.no_grad():
        expected, out = both(model, lambda: model(**given).logits)
        exact = model.float()(**given).logits
    tokens = slice(None) if name == "position_bias" else given["attention_mask"].bool()
    errors = [(x.float() - exact)[tokens].abs().max() for x in (out, expected)]
    assert out.dtype == torch.bfloat16
    assert errors[0] < 2 * errors[1]


@pytest.mark.parametrize("name", ["grouped_heads", "position_bias"])
def test_mask_of_floats(name: str) -> None:
    """One with an axis for heads and queries, which is the caller's."""
    model, ids = tiny(name), inputs(name, None)["input_ids"]
    allowed = torch.rand(2, 1, 13, 13, generator=torch.Generator().manual_seed(2)) < 0.5
    mask = torch.where(allowed | torch.eye(13, dtype=torch.bool), 0.0, torch.finfo(torch.float32).min)
    part = model.encoder if name == "position_bias" else model
    with torch.no_grad():
        expected, out = both(model, lambda: part(ids, attention_mask=mask)[0])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def global_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered in the test holds until its end."""
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))


@pytest.mark.parametrize("name", ["grouped_heads", "sliding_window", "sinks"])
def test_continuous_batching(name: str, calls: list, global_names: None) -> None:
    """Sequences of several lengths, by pages and one packed call a layer."""
    model = tiny(name)
    tokens = [list(range(5, 5 + n)) for n in (5, 2, 8)]
    options = transformers.GenerationConfig(
        max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    sizes = transformers.ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=32)

    def generate() -> list[list[int]]:
        out = model.generate_batch(tokens, options, continuous_batching_config=sizes, progress_bar=False)
        return [it.generated_tokens for it in out.values()]

    model.set_attn_implementation("fastattn")
    with pytest.raises(ValueError, match="fastattn is not supported for continuous batching"):
        generate()
    model.set_attn_implementation("paged|eager")
    expected = generate()
    assert calls == []
    register("paged|eager")
    assert generate() == expected
    assert len(calls) == 2 * 6


def modules() -> dict[str, Any]:
    return {name: import_module(f"transformers.models.{name}.modeling_{name}") for name in RECURRENT}


@pytest.fixture
def own_functions(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], Callable[..., Any]]:
    """Transformers' functions of recurrent layers, which it gets back after the test."""
    found = {}
    for name, module in modules().items():
        for function in vars(module).keys() & RECURRENT_FUNCTIONS.keys():
            found[name, function] = getattr(module, function)
            monkeypatch.setattr(module, function, found[name, function])
    register(recurrent=True)
    register(recurrent=True)  # which changes no more
    return found


def test_functions_of_recurrent_layers(own_functions: dict) -> None:
    assert len(own_functions) == 3 * len(RECURRENT)
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    x, weight, bias = normal(2, 6, 70), normal(6, 4), normal(6)
    for (name, function), own in own_functions.items():
        new = getattr(modules()[name], function)
        assert new.args == (own,)
        if "conv" in function:
            for more in ({}, {"bias": bias}, {"activation": "silu"}, {"activation": "gelu"}):
                torch.testing.assert_close(
                    new(x, weight, **more), own(x, weight, **more), rtol=1e-5, atol=1e-5
                )
            continue
        per_column = "kimi" in function
        query, key = normal(2, 2, 70, 4 if per_column else 2, 8).unbind()
        value, beta, state = normal(2, 70, 4, 6), normal(2, 70, 4).sigmoid(), normal(2, 4, 8, 6)
        g = -normal(*(2, 70, 4, 8)[: 3 + per_column]).exp()
        for more in ({"initial_state": state, "use_qk_l2norm_in_kernel": True}, {"initial_state": None}):
            scale = 1 if more["initial_state"] is not None else 0.3
            given = {"g": g, "beta": beta, "output_final_state": True, **more}
            out, expected = (f(query, key * scale, value, **given) for f in (new, own))
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match="packed sequences"):
            new(
                query,
                key,
                value,
                g=g,
                beta=beta,
                initial_state=None,
                output_final_state=False,
                cu_seqlens=[0],
            )
        half = [t.bfloat16() for t in (query, key, value)]
        out, no_state = new(*half, g=g, beta=beta, initial_state=None, output_final_state=False)
        assert out.dtype == torch.bfloat16 and no_state is None


@pytest.fixture
def recurrent_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gets the name of each call of the two functions of recurrent layers."""
    noted: list[str] = []
    for name in ("gated_linear_attention", "causal_conv1d"):

        def noting(name: str, own: Callable[..., Any], *args: Any, **given: Any) -> Any:
            noted.append(name)
            return own(*args, **given)

        monkeypatch.setattr(fastattn, name, partial(noting, name, getattr(fastattn, name)))
    return noted


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [None, "left"])
@pytest.mark.parametrize("name", RECURRENT_MODELS)
def test_recurrent_models(
    name: str,
    padded: str | None,
    cache: str,
    request: pytest.FixtureRequest,
    recurrent_calls: list,
    calls: list,
) -> None:
    """Logits, and tokens of a cache."""
    model, given = tiny(name), inputs(name, padded)
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "disable_compile": True,
        "cache_implementation": cache,
    }

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            return model(**given).logits, model.generate(**given, **options)

    model.set_attn_implementation("eager")
    expected = call()
    assert recurrent_calls == calls == []
    request.getfixturevalue("own_functions")
    model.set_attn_implementation("fastattn")
    out = call()
    assert recurrent_calls.count("gated_linear_attention") == len(calls) == 1 + 6
    assert recurrent_calls.count("causal_conv1d") >= 2
    tokens = given.get("attention_mask", torch.ones(2, 13)).bool()
    torch.testing.assert_close(out[0][tokens], expected[0][tokens], rtol=1e-4, atol=1e-4)
    assert torch.equal(out[1], expected[1])


def test_recurrent_layers_with_gradients_are_transformers_own(
    own_functions: dict, recurrent_calls: list
) -> None:
    model = tiny("qwen3_5")
    model(**inputs("qwen3_5", None)).logits.sum().backward()
    assert recurrent_calls == []
    assert model.model.layers[0].linear_attn.conv1d.weight.grad.abs().max() > 0


@pytest.mark.parametrize("kind", ["MPNet", "Falcon"])
def test_attention_of_a_models_own_keeps_its_masks(kind: str, calls: list) -> None:
    """They add the masks that they are given, and a bool one would hardly mask at all."""
    config = getattr(transformers, f"{kind}Config")(**dict(list(SIZES.items())[:5]))
    torch.manual_seed(0)
    model, given = getattr(transformers, f"{kind}Model")(config).eval(), inputs("encoder", "left")
    hidden = []
    for name in ("eager", "fastattn"):
        model.config._attn_implementation = name
        with torch.no_grad():
            hidden.append(model(**given).last_hidden_state[given["attention_mask"].bool()])
    assert calls == []
    torch.testing.assert_close(*hidden)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_queries_dropped_after_the_mask_was_made(cache: str, calls: list) -> None:
    """Gemma 4 computes its last layer for the logits that are asked for, with the mask of all queries."""
    model, ids = tiny("shared_keys"), inputs("shared_keys", None)["input_ids"]
    caches = {
        "dynamic": lambda: transformers.DynamicCache(config=model.config),
        "static": lambda: transformers.StaticCache(config=model.config, max_cache_len=20),
    }
    with torch.no_grad():
        expected, out = both(model, lambda: model(ids, cache=caches[cache](), logits_to_keep=3).logits)
    assert calls[-1]["query"].shape[1] == 3
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_dropout_takes_its_seed_from_torch() -> None:
    model, given = tiny("grouped_heads", attention_dropout=0.5).train(), inputs("grouped_heads", None)
    model.set_attn_implementation("fastattn")

    def logits(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model(**given).logits

    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))


@pytest.mark.parametrize("name", ["output_attentions", "sinks", "indices", "block_indices"])
def test_what_is_not_there_is_refused(name: str) -> None:
    attention = transformers.AttentionInterface()["fastattn"]
    x = torch.randn(1, 2, 3, 4)
    attention(torch.nn.Module(), x, x, x, None, **{name: None})
    with pytest.raises(ValueError, match=f"^{name} is not supported"):
        attention(torch.nn.Module(), x, x, x, None, **{name: True})


@pytest.mark.parametrize(
    ("message", "given"),
    [
        (r"attention_mask of shape \(3, 5\)", {"attention_mask": torch.ones(3, 5, dtype=torch.bool)}),
        (r"attention_mask of shape \(3, 5\)", {"attention_mask": torch.zeros(3, 5)}),
        (r"position_bias of shape \(3, 5\)", {"attention_mask": None, "position_bias": torch.zeros(3, 5)}),
        ("scaling must be a finite number", {"attention_mask": None, "scaling": float("nan")}),
        ("s_aux of shape|s_aux must have", {"attention_mask": None, "s_aux": torch.zeros(5)}),
    ],
)
def test_errors_name_the_arguments_of_transformers(message: str, given: dict) -> None:
    attention = transformers.AttentionInterface()["fastattn"]
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match=message):
        attention(torch.nn.Module(), x, x, x, **given)


def test_another_name() -> None:
    register("mine")
    model = tiny("grouped_heads")
    model.set_attn_implementation("mine")
    assert model(**inputs("grouped_heads", "left")).logits.isfinite().all()


def test_sentence_transformers(tmp_path: Path, calls: list) -> None:
    """Sentences of many lengths in one batch, by a model and a tokenizer saved here."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *"abcdefgh"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "model_max_length": 32}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(tmp_path)
    tiny("encoder").bert.save_pretrained(tmp_path)
    sentences = ["a", "b c d e f g h a b c", "d h", "c c a b"]
    expected, out = (
        sentence_transformers.SentenceTransformer(
            str(tmp_path), device="cpu", model_kwargs={"attn_implementation": name}
        ).encode(sentences)
        for name in ("sdpa", "fastattn")
    )
    assert len(calls) == 2
    assert len({tuple(row) for row in out.round(2)}) == len(sentences)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow  # compiles
def test_compiled_models_call_it_between_their_graphs(calls: list) -> None:
    model, given = tiny("grouped_heads"), inputs("grouped_heads", None)
    model.set_attn_implementation("fastattn")
    with torch.no_grad():
        expected = model(**given).logits
        out = torch.compile(model, backend="eager")(**given).logits
    assert len(calls) == 4
    torch.testing.assert_close(out, expected)
