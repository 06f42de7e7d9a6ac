"""Tiny random models of KerasHub give the same by fastattn as by their own attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fastattn

keras = pytest.importorskip("keras")
hub = pytest.importorskip("keras_hub", reason="KerasHub is not installed: pip install --no-deps keras-hub")

from keras_hub.src.models.blip2.blip2_qformer import BLIP2QFormer  # noqa: E402
from keras_hub.src.models.deberta_v3.disentangled_self_attention import DisentangledSelfAttention  # noqa: E402
from keras_hub.src.models.sam.sam_layers import MultiHeadAttentionWithDownsampling  # noqa: E402
from keras_hub.src.models.stable_diffusion_3.mmdit import MMDiT  # noqa: E402

from fastattn.integrations.keras import install, installed, uninstall  # noqa: E402
from fastattn.integrations.keras._models import MODELS  # noqa: E402

TEXT = {"vocabulary_size": 61, "num_layers": 2, "num_heads": 4, "hidden_dim": 32, "intermediate_dim": 48}
GROUPED = {k: v for k, v in TEXT.items() if k != "num_heads"} | {
    "num_query_heads": 4,
    "num_key_value_heads": 2,
}
GEMMA = GROUPED | {"head_dim": 8}
WINDOW = {"use_sliding_window_attention": True, "sliding_window_size": 3}
EXPERTS = {"num_experts": 4, "moe_intermediate_dim": 16}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
IMAGE = {"patch_size": 4, "image_shape": (16, 16, 3)} | {k: v for k, v in TEXT.items() if k[0] != "v"}
T5_GEMMA = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in {
        "hidden_dim": 32,
        "intermediate_dim": 48,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "layer_types": ["full_attention", "sliding_attention"],
    }.items()
} | {
    "vocabulary_size": 61,
    "sliding_window": 3,
    "attn_logit_softcapping": 0.5,
    "cross_attention_hidden_size": 32,
}
GEMMA_IMAGE = {
    "image_size": 16,
    "patch_size": 4,
    "num_heads": 2,
    "hidden_dim": 8,
    "num_layers": 2,
    "intermediate_dim": 16,
    "output_dim": 32,
    "pool_size": 2,
}
VIT_DET = {
    "hidden_size": 32,
    "num_layers": 2,
    "intermediate_dim": 48,
    "num_heads": 4,
    "global_attention_layer_indices": [1],
    "image_shape": (64, 64, 3),
    "num_output_channels": 8,
    "window_size": 3,
}
MIT = {
    "layerwise_depths": [1, 1],
    "num_layers": 2,
    "layerwise_num_heads": [1, 2],
    "layerwise_sr_ratios": [2, 1],
    "max_drop_path_rate": 0.1,
    "layerwise_patch_sizes": [7, 3],
    "layerwise_strides": [4, 2],
    "image_shape": (32, 32, 3),
    "hidden_dims": [16, 32],
}


def renamed(sizes: dict[str, Any], **names: str) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in sizes.items()}


def pair(prefix: str, **more: Any) -> Callable[[], Any]:
    """A model of an encoder of images and one of texts."""

    def build() -> Any:
        vision, text = (getattr(hub.models, f"{prefix}{kind}Encoder") for kind in ("Vision", "Text"))
        texts = text(**TEXT, embedding_dim=32, max_sequence_length=7)
        return getattr(hub.models, f"{prefix}Backbone")(
            vision_encoder=vision(**IMAGE), text_encoder=texts, **more
        )

    return build


def of(name: str, **sizes: Any) -> Callable[[], Any]:
    return lambda: getattr(hub.models, name)(**sizes)


#: A family, and the calls of fastattn in one forward pass of ``install()``, and of ``install(models=True)``.
FAMILIES: dict[str, tuple[Callable[[], Any], int, int]] = {
    "ALBERT": (of("AlbertBackbone", **TEXT, embedding_dim=16), 2, 2),
    "BART": (of("BartBackbone", **TEXT), 6, 6),
    "BERT": (of("BertBackbone", **TEXT), 2, 2),
    "BLIP-2": (
        lambda: BLIP2QFormer(
            **{k: v for k, v in TEXT.items() if k[0] != "v"},
            num_query_tokens=3,
            vision_dim=16,
            cross_attention_frequency=2,
            dropout=0.1,
            layer_norm_epsilon=1e-6,
        ),
        3,
        3,
    ),
    "BLOOM": (of("BloomBackbone", **TEXT), 0, 2),
    "CLIP": (pair("CLIP", projection_dim=16), 4, 4),
    "Swin Transformer": (
        of(
            "SwinTransformerBackbone",
            image_shape=(32, 32, 3),
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
            patch_size=2,
        ),
        0,
        0,
    ),
    "DINOv2": (of("DINOV2Backbone", **IMAGE, position_embedding_shape=(16, 16, 3)), 2, 2),
    "DINOv3": (of("DINOV3Backbone", **IMAGE), 2, 2),
    "DeBERTa": (of("DebertaV3Backbone", **TEXT, bucket_size=4), 0, 2),
    "DeiT": (of("DeiTBackbone", **IMAGE), 2, 2),
    "DistilBERT": (of("DistilBertBackbone", **TEXT), 2, 2),
    "EdRec": (
        of(
            "EdRecBackbone",
            **{k: v for k, v in TEXT.items() if k not in ("vocabulary_size", "num_layers")},
            vocab_size=61,
            num_layers_enc=2,
            num_layers_dec=2,
        ),
        6,
        6,
    ),
    "ELECTRA": (of("ElectraBackbone", **renamed(TEXT, vocabulary_size="vocab_size"), embedding_dim=16), 2, 2),
    "ESM": (of("ESM2Backbone", **TEXT), 2, 2),
    "Falcon": (of("FalconBackbone", **renamed(TEXT, num_heads="num_attention_heads")), 0, 2),
    "Flux": (
        of(
            "FluxBackbone",
            input_channels=24,
            hidden_size=48,
            mlp_ratio=2.0,
            num_heads=2,
            depth=1,
            depth_single_blocks=1,
            axes_dim=[4, 10, 10],
            theta=10000,
            use_bias=True,
            image_shape=(9, 24),
            text_shape=(5, 24),
            image_ids_shape=(9, 3),
            text_ids_shape=(5, 3),
            y_shape=(24,),
        ),
        0,
        2,
    ),
    "GPT-2": (of("GPT2Backbone", **TEXT), 2, 2),
    "GPT-NeoX": (of("GPTNeoXBackbone", **TEXT, dropout=0.1), 0, 2),
    "Gemma": (of("GemmaBackbone", **GEMMA, dropout=0.1), 0, 2),
    "Gemma 2": (of("GemmaBackbone", **GEMMA, **WINDOW, attention_logit_soft_cap=0.5), 0, 2),
    "Gemma 3": (of("Gemma3Backbone", **GEMMA, **WINDOW, image_size=16), 0, 2),
    "Gemma 3, images": (of("Gemma3VisionEncoder", **GEMMA_IMAGE), 0, 2),
    "Gemma 3n": (
        of(
            "Gemma3nBackbone",
            text_vocab_size=61,
            text_hidden_size=32,
            num_hidden_layers=2,
            pad_token_id=0,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=[48, 48],
            hidden_activation="gelu_approximate",
            layer_types=["full_attention", "sliding_attention"],
            sliding_window=4,
            rope_theta=1e4,
            max_position_embeddings=32,
            vocab_size_per_layer_input=61,
            hidden_size_per_layer_input=8,
            altup_num_inputs=2,
            laurel_rank=4,
        ),
        0,
        2,
    ),
    "Gemma 4": (of("Gemma4Backbone", **GEMMA, **WINDOW, image_size=16, sliding_window_pattern=2), 0, 2),
    "Gemma 4, images": (of("Gemma4VisionEncoder", **GEMMA_IMAGE, head_dim=4), 0, 2),
    "gpt-oss": (of("GptOssBackbone", **GROUPED, num_experts=4, sliding_window=3), 0, 2),
    "Llama": (of("LlamaBackbone", **GROUPED), 0, 2),
    "Llama 3": (of("Llama3Backbone", **GROUPED), 0, 2),
    "MetaCLIP 2": (pair("MetaCLIP2", projection_dim=16), 4, 4),
    "MiT (SegFormer)": (of("MiTBackbone", **MIT), 0, 2),
    "Mistral": (of("MistralBackbone", **GROUPED, sliding_window=3), 0, 2),
    "Mixtral": (of("MixtralBackbone", **GROUPED, num_experts=4, sliding_window=3), 0, 2),
    "Moonshine": (
        of(
            "MoonshineBackbone",
            vocabulary_size=61,
            filter_dim=32,
            encoder_num_layers=1,
            decoder_num_layers=1,
            hidden_dim=32,
            intermediate_dim=48,
            encoder_num_heads=2,
            decoder_num_heads=2,
        ),
        3,
        3,
    ),
    "OPT": (of("OPTBackbone", **TEXT), 2, 2),
    "PaliGemma": (
        of(
            "PaliGemmaBackbone",
            **GEMMA,
            image_size=16,
            vit_patch_size=4,
            vit_num_heads=4,
            vit_hidden_dim=16,
            vit_num_layers=2,
            vit_intermediate_dim=24,
        ),
        0,
        4,
    ),
    "PARSeq": (
        lambda: hub.models.PARSeqBackbone(
            image_encoder=hub.models.ViTBackbone(
                **renamed(IMAGE, intermediate_dim="mlp_dim"), use_class_token=False
            ),
            vocabulary_size=61,
            max_label_length=9,
            decoder_hidden_dim=32,
            num_decoder_layers=1,
            num_decoder_heads=2,
            decoder_mlp_dim=24,
        ),
        4,
        4,
    ),
    "Phi-3": (of("Phi3Backbone", **GROUPED), 0, 2),
    "Qwen 2": (of("Qwen2Backbone", **GROUPED, **WINDOW), 0, 2),
    "Qwen MoE": (
        of("QwenMoeBackbone", **GROUPED, **WINDOW, **EXPERTS, shared_expert_intermediate_dim=16),
        0,
        2,
    ),
    "Qwen 3": (of("Qwen3Backbone", **GEMMA, sliding_window_size=3), 0, 2),
    "Qwen 3 MoE": (of("Qwen3MoeBackbone", **GEMMA, **EXPERTS, sliding_window_size=3), 0, 2),
    "Qwen 3.5": (of("Qwen3_5Backbone", **GEMMA, **LINEAR, sliding_window_size=3), 0, 1),
    "Qwen 3.5 MoE": (
        of(
            "Qwen3_5MoeBackbone",
            **{k: v for k, v in GEMMA.items() if k != "intermediate_dim"},
            **EXPERTS,
            **LINEAR,
            shared_expert_intermediate_size=16,
            top_k=2,
        ),
        0,
        1,
    ),
    "RoBERTa": (of("RobertaBackbone", **TEXT), 2, 2),
    "SigLIP": (pair("SigLIP"), 5, 5),
    "SmolLM3": (
        of(
            "SmolLM3Backbone",
            **renamed(GROUPED, num_query_heads="num_attention_heads"),
            attention_bias=False,
            attention_dropout=0.1,
            rope_layer_enabled_list=[True, False],
            layer_types=["full_attention"] * 2,
            mlp_bias=False,
            layer_norm_epsilon=1e-6,
            max_position_embeddings=64,
            rope_theta=1e4,
            partial_rotary_factor=1.0,
        ),
        0,
        2,
    ),
    "Stable Diffusion 3": (
        lambda: MMDiT(
            patch_size=2,
            num_heads=2,
            hidden_dim=16,
            num_layers=2,
            position_size=192,
            mlp_ratio=2.0,
            qk_norm="rms_norm",
            dual_attention_indices=(0,),
            latent_shape=(8, 8, 4),
            context_shape=(5, 16),
            pooled_projection_shape=(16,),
        ),
        0,
        3,
    ),
    "T5": (of("T5Backbone", **TEXT), 0, 6),
    "T5Gemma": (of("T5GemmaBackbone", **T5_GEMMA), 0, 6),
    "T5Gemma 2": (of("T5Gemma2Backbone", **T5_GEMMA), 0, 4),
    "ViT": (of("ViTBackbone", **renamed(IMAGE, intermediate_dim="mlp_dim")), 2, 2),
    "ViTDet": (of("ViTDetBackbone", **VIT_DET), 0, 2),
    "Whisper": (
        of(
            "WhisperBackbone",
            **TEXT,
            max_encoder_sequence_length=16,
            max_decoder_sequence_length=12,
            num_mels=8,
        ),
        6,
        6,
    ),
    "XLM-RoBERTa": (of("XLMRobertaBackbone", **TEXT), 2, 2),
    "XLNet": (of("XLNetBackbone", **TEXT), 0, 2),
}
#: Those of the default run.
QUICK = ("BERT", "Gemma 2", "Qwen 3", "T5", "ViTDet")
DECODERS = {
    "BLOOM": "BloomCausalLM",
    "Falcon": "FalconCausalLM",
    "GPT-NeoX": "GPTNeoXCausalLM",
    "Gemma 2": "GemmaCausalLM",
    "gpt-oss": "GptOssCausalLM",
    "Llama": "LlamaCausalLM",
    "Mistral": "MistralCausalLM",
    "Mixtral": "MixtralCausalLM",
    "Phi-3": "Phi3CausalLM",
    "Qwen 2": "QwenCausalLM",
    "Qwen MoE": "QwenMoeCausalLM",
    "Qwen 3": "Qwen3CausalLM",
    "Qwen 3 MoE": "Qwen3MoeCausalLM",
    "SmolLM3": "SmolLM3CausalLM",
    "T5": "T5Seq2SeqLM",
    "T5Gemma": "T5GemmaSeq2SeqLM",
    "T5Gemma 2": "T5Gemma2Seq2SeqLM",
}


def marked(names: Any) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Gets the shape of the query of each call of `fastattn.attention`."""
    shapes: list[tuple[int, ...]] = []
    attention = fastattn.attention

    def noting(query, *args, **options):
        shapes.append(query.shape)
        return attention(query, *args, **options)

    monkeypatch.setattr(fastattn, "attention", noting)
    return shapes


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    yield
    uninstall()


def tiny(build: Callable[[], Any]) -> Any:
    """A model whose attention is far from that of a mean, and whose numbers stay small."""
    model, rng = build(), np.random.default_rng(0)
    for x in model.trainable_weights:
        if x.ndim > 1 or "sinks" in x.path:
            of_tokens = x.ndim == 1 or "embed" in x.path
            scale = 0.3 if of_tokens else x.ndim / np.prod(x.shape[:-1]) ** 0.5
            x.assign(rng.standard_normal(x.shape) * scale)
    return model


def inputs(model: Any) -> Any:
    """What it takes, for 2 items of 7 tokens, of which one has padding."""
    rng = np.random.default_rng(1)

    def random(x: Any) -> np.ndarray:
        length = 4000 if "Moonshine" in type(model).__name__ and "encoder" in x.name else 7  # of sound
        shape = tuple(2 if i == 0 else n or length for i, n in enumerate(x.shape))
        if "mask" in x.name:
            mask = np.ones(shape, x.dtype)
            if "padding" in x.name and x.ndim == 2:
                mask[1, [0, -2, -1]] = 0  # so that the first query of a decoder has no key
            return mask
        if "int" in x.dtype:
            low, high = (0, 2) if "segment" in x.name or "position" in x.name else (1, 60)
            return rng.integers(low, high, shape).astype(x.dtype)
        return (rng.standard_normal(shape) * 0.1).astype(x.dtype)

    return keras.tree.map_structure(random, model.input)


def assert_close(out: Any, expected: Any) -> None:
    for a, b in zip(keras.tree.flatten(out), keras.tree.flatten(expected), strict=True):
        scale = float(np.abs(b).max())
        assert 0 < scale < 1e6
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * scale)


@pytest.mark.parametrize("name", marked(FAMILIES))
def test_families(name: str, calls: list) -> None:
    build, by_layers, by_models = FAMILIES[name]
    model = tiny(build)
    given = inputs(model)
    expected = model(given)
    for models, number in ((False, by_layers), (True, by_models)):
        calls.clear()
        with installed(models=models):
            assert_close(model(given), expected)
        assert len(calls) == number
    calls.clear()
    model(given)
    assert calls == []


@pytest.mark.parametrize("name", marked(DECODERS))
def test_generate(name: str, calls: list) -> None:
    """Tokens and logits of a cache whose last keys are not filled yet."""
    model = getattr(hub.models, DECODERS[name])(backbone=tiny(FAMILIES[name][0]), preprocessor=None)
    model.compile(sampler="greedy")
    ids = np.random.default_rng(2).integers(1, 60, (2, 12)).astype(np.int32)
    filled = np.broadcast_to(np.arange(12) < [[7], [5]], ids.shape)
    given = {"token_ids": ids * filled, "padding_mask": filled.astype(np.int32)}
    if "Seq2Seq" in DECODERS[name]:
        given = {f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in given.items()}
    expected = model.generate(given, stop_token_ids=None)
    with installed(models=True):
        out = model.generate(given, stop_token_ids=None)
    assert any(shape[1] == 1 for shape in calls)
    assert_equal = np.testing.assert_array_equal
    keras.tree.map_structure(assert_equal, out, expected)


def test_sams_mask_decoder(calls: list) -> None:
    layer = MultiHeadAttentionWithDownsampling(num_heads=2, key_dim=8, downsample_rate=2)
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((2, n, 16), dtype=np.float32) for n in (3, 5, 5))
    layer.build()
    expected = layer(query=query, key=key, value=value)
    with installed(models=True):
        assert_close(layer(query=query, key=key, value=value), expected)
    assert calls == [(2, 3, 2, 4)]


def test_debertas_scores_are_its_own(calls: list) -> None:
    layer = DisentangledSelfAttention(num_heads=2, hidden_dim=16, max_position_embeddings=8, bucket_size=4)
    rng = np.random.default_rng(0)
    x, table = (rng.standard_normal(shape, dtype=np.float32) for shape in ((2, 5, 16), (1, 8, 16)))
    mask = np.ones((2, 5, 5), bool)
    expected, scores = layer(x, table, mask, return_attention_scores=True)
    with installed(models=True):
        assert_close(layer(x, table, mask, return_attention_scores=True), (expected, scores))
        assert calls == []
        assert_close(layer(x, table, mask), expected)
    assert calls == [(2, 5, 2, 8)]


def test_training_and_scores_stay_the_layers_own(calls: list) -> None:
    model = tiny(FAMILIES["T5"][0])
    given = inputs(model)
    layer = keras.layers.MultiHeadAttention(num_heads=4, key_dim=8, dropout=0.1)
    x = np.random.default_rng(0).standard_normal((2, 9, 16), dtype=np.float32)
    install(models=True)
    model(given, training=True)
    layer(x, x, training=True)
    layer(x, x, return_attention_scores=True)
    assert calls == []
    layer(x, x)
    assert calls == [(2, 9, 4, 8)]


def test_uninstall_undoes_models(calls: list) -> None:
    model = tiny(FAMILIES["Gemma 2"][0])
    given = inputs(model)
    functions = [vars(keras.layers.MultiHeadAttention)["_compute_attention"], keras.ops.dot_product_attention]
    install()
    with installed(models=True):
        model(given)
    assert len(calls) == 2
    model(given)
    assert len(calls) == 2
    install(models=True)
    model(given)
    assert len(calls) == 4
    uninstall()
    model(given)
    assert len(calls) == 4
    own = [vars(keras.layers.MultiHeadAttention)["_compute_attention"], keras.ops.dot_product_attention]
    assert own == functions
    install(models=True)
    model(given)
    assert len(calls) == 6


def test_other_classes_are_an_error_that_replaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "llama.llama_attention:Renamed.call", None)
    own = keras.layers.MultiHeadAttention._compute_attention
    with pytest.raises(ImportError, match=r"Renamed.*keras-hub"):
        install(models=True)
    assert keras.layers.MultiHeadAttention._compute_attention is own
