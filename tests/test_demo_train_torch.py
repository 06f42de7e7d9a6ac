"""The demo of training against PyTorch: the same losses, step by step, from the same weights and batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.nn.functional import cross_entropy, embedding, gelu, rms_norm, scaled_dot_product_attention

from fastattn.demo.train import training
from fastattn.demo.train.model import EPS, Model, Sizes
from fastattn.demo.train.text import load_text
from fastattn.demo.train.training import Trainer

STEPS = 25
ROPE_BASE = 10000.0


def torch_logits(weights: dict[str, torch.Tensor], ids: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """The model of the demo, with all gradients from autograd."""
    dtype = weights["norm"].dtype
    half = sizes.head_dim // 2
    angles = torch.outer(
        torch.arange(ids.shape[1], dtype=torch.float64),
        ROPE_BASE ** (-torch.arange(half, dtype=torch.float64) / half),
    )
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.split(half, dim=-1)
        return torch.cat([cos * first - sin * second, sin * first + cos * second], dim=-1)

    x = embedding(ids, weights["embedding"])
    for layer in range(sizes.num_layers):
        y = rms_norm(x, x.shape[-1:], weights[f"{layer}.attention_norm"], EPS)
        together = (y @ weights[f"{layer}.query_key_value"].T).unflatten(-1, (3, sizes.num_heads, -1))
        query, key, value = together.permute(2, 0, 3, 1, 4)
        out = scaled_dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
        x = x + out.transpose(1, 2).flatten(-2) @ weights[f"{layer}.attention_output"].T
        y = rms_norm(x, x.shape[-1:], weights[f"{layer}.feed_forward_norm"], EPS)
        x = x + gelu(y @ weights[f"{layer}.up"].T, approximate="tanh") @ weights[f"{layer}.down"].T
    return rms_norm(x, x.shape[-1:], weights["norm"], EPS) @ weights["output"].T


def torch_losses(trainer: Trainer, seed: int) -> list[float]:
    """All steps of a trainer that has taken none."""
    weights = {name: torch.tensor(it, requires_grad=True) for name, it in trainer.model.weights.named.items()}
    settings = trainer.settings
    optimizer = torch.optim.AdamW(
        [
            {"params": [it for it in weights.values() if it.ndim > 1], "weight_decay": settings.decay},
            {"params": [it for it in weights.values() if it.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    rng = np.random.default_rng(seed)
    losses = []
    for step in range(trainer.steps):
        ids = torch.from_numpy(trainer.text.batch(trainer.batch_size, trainer.model.sizes.context + 1, rng))
        logits = torch_logits(weights, ids[:, :-1], trainer.model.sizes)
        loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), settings.largest_norm)
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step, trainer.steps)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def new_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training, "CHARACTERS_PER_STEP", 300)
    path = tmp_path / "text"
    words = np.array(["the ", "cat ", "sleeps ", "and ", "a ", "dog ", "runs. "])
    path.write_text("".join(np.random.default_rng(0).choice(words, 2000)), encoding="utf-8")
    text = load_text(path, 75)
    sizes = Sizes(len(text.vocabulary), context=75, num_layers=2, num_heads=3, head_dim=16)
    return lambda dtype: Trainer(Model(sizes, 0, dtype), text, STEPS, seed=5)


def losses_of(trainer: Trainer) -> np.ndarray:
    trainer.run(range(STEPS), lambda done: None)
    return np.array(trainer.progress.losses)


@pytest.mark.slow
def test_float64(new_trainer) -> None:
    expected = torch_losses(new_trainer(np.float64), 5)
    found = losses_of(new_trainer(np.float64))
    assert found[-1] < 0.7 * found[0]
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_float32(new_trainer) -> None:
    """No further from float64 than PyTorch, but for chance: each step makes roundings differ more."""
    trainer = new_trainer(np.float64)
    trainer.model.weights.flat[...] = new_trainer(np.float32).model.weights.flat
    exact = losses_of(trainer)
    found, expected = losses_of(new_trainer(np.float32)), torch_losses(new_trainer(np.float32), 5)
    assert np.abs(found - exact).max() <= 2 * np.abs(expected - exact).max()
