"""The demo's language model with its real weights against PyTorch: the same logits after every token."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the demo extra is not installed")
pytest.importorskip("jinja2", reason="the demo extra is not installed")
pytest.importorskip("ml_dtypes", reason="the demo extra is not installed")
pytest.importorskip("rich", reason="the demo extra is not installed")
pytest.importorskip("tokenizers", reason="the demo extra is not installed")
pytest.importorskip("torch")

import gguf
import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from fastattn.demo.generate.attention import PlainAttention
from fastattn.demo.generate.clock import Clock
from fastattn.demo.generate.corpus import REQUEST, TEXT
from fastattn.demo.generate.generation import CHUNK, new_cache
from fastattn.demo.generate.loading import GGUFFile, find_model, load_model
from fastattn.demo.generate.tokenizer import TextTokenizer
from tests.demo_generate_models import needs_real_model

pytestmark = [pytest.mark.slow, needs_real_model]

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 9, 3, 64, 30
EPS, ROPE_BASE = 1e-5, 100000.0


def torch_logits(ids: list[int]) -> np.ndarray:
    """LLaMA in float32, the whole prompt at once; neighbours of a rotated head are one complex number."""
    weights = {
        tensor.name.removesuffix(".weight"): torch.from_numpy(
            np.array(gguf.dequantize(tensor.data, tensor.tensor_type))
        )
        for tensor in gguf.GGUFReader(find_model(None)).tensors
    }
    angles = torch.outer(
        torch.arange(len(ids), dtype=torch.float64),
        ROPE_BASE ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM),
    )
    turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)

    def heads(x: torch.Tensor, number: int) -> torch.Tensor:
        return x.view(len(ids), number, HEAD_DIM).transpose(0, 1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2)

    x = weights["token_embd"][torch.tensor(ids)]
    for number in range(LAYERS):
        prefix = f"blk.{number}."
        of_layer = {name.removeprefix(prefix): it for name, it in weights.items() if name.startswith(prefix)}
        y = rms_norm(x, x.shape[-1:], of_layer["attn_norm"], EPS)
        query = rotated(heads(y @ of_layer["attn_q"].T, HEADS))
        key = rotated(heads(y @ of_layer["attn_k"].T, KV_HEADS))
        value = heads(y @ of_layer["attn_v"].T, KV_HEADS)
        out = scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, enable_gqa=True
        )
        x = x + out[0].transpose(0, 1).flatten(-2) @ of_layer["attn_output"].T
        y = rms_norm(x, x.shape[-1:], of_layer["ffn_norm"], EPS)
        x = x + (silu(y @ of_layer["ffn_gate"].T) * (y @ of_layer["ffn_up"].T)) @ of_layer["ffn_down"].T
    return (rms_norm(x, x.shape[-1:], weights["output_norm"], EPS) @ weights["token_embd"].T).numpy()


@pytest.mark.parametrize("way", ["fastattn", "plain"])
def test_logits(way: str) -> None:
    file = GGUFFile(find_model(None))
    model, tokenizer = load_model(file), TextTokenizer(file)
    ids = tokenizer.encode(tokenizer.conversation([{"role": "user", "content": f"{REQUEST}\n\n{TEXT}"}]))
    attention = new_cache(model, "float32") if way == "fastattn" else PlainAttention(LAYERS)
    clock = Clock()
    found = np.concatenate(
        [
            model.logits(model(ids[start : start + CHUNK], attention, clock), clock)
            for start in range(0, len(ids), CHUNK)
        ]
    )
    with torch.no_grad():
        expected = torch_logits(ids)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-3
    assert np.array_equal(found.argmax(axis=-1), expected.argmax(axis=-1))
