"""TabPFN on fastattn: models of random weights, by the classifier and by themselves."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tabpfn")

import tabpfn
import torch
from tabpfn.architectures import ARCHITECTURES
from tabpfn.architectures.shared import attention_backends

from fastattn.integrations.tabpfn import register, unregister


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    yield
    unregister()


def model_of(name: str, **sizes: Any) -> tuple[Any, dict[str, Any]]:
    """A model of random weights, and its configuration."""
    architecture = ARCHITECTURES[name]
    config, _ = architecture.parse_config({"max_num_classes": 10, "num_buckets": 100} | sizes)
    torch.manual_seed(0)
    model = architecture.get_architecture(config)
    with torch.no_grad():  # some start at 0, and would hide what attention gives
        for parameter in model.parameters():
            parameter.copy_(0.05 * torch.randn_like(parameter) + (parameter.ndim == 1))
    return model.eval(), dataclasses.asdict(config)


SIZES: dict[str, dict[str, Any]] = {
    "tabpfn_v2": {"emsize": 48, "nlayers": 2, "nhead": 3, "features_per_group": 2},
    "tabpfn_v2_5": {"emsize": 48, "nlayers": 2, "nhead": 3},
    "tabpfn_v2_6": {"emsize": 48, "nlayers": 2, "nhead": 3},
    "tabpfn_v3": {"embed_dim": 32, "nlayers": 2, "icl_num_kv_heads": 2, "dist_embed_num_inducing_points": 16},
    "tabpfn_v3_5": {"embed_dim": 32, "nlayers": 2, "dist_embed_num_inducing_points": 16},
}


def backends_of(function: Any) -> tuple[Any, set[str | None]]:
    """What it returns, and who computed its attention."""
    with attention_backends.recorded_attention_backends() as calls:
        result = function()
    return result, {None if it is None else it.name for it in calls}


def output_of(model: Any, dtype: torch.dtype) -> tuple[torch.Tensor, set[str | None]]:
    is_of_both_tasks = "task_type" in inspect.signature(model.forward).parameters
    task = {"task_type": "multiclass"} if is_of_both_tasks else {}
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(70, 1, 6, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 3, (50, 1), generator=generator)

    def run() -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = model.to(dtype)(x.to(dtype), y.to(dtype), **task)
            return result.double()

    return backends_of(run)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_models(name: str, dtype: torch.dtype) -> None:
    """As exact as PyTorch's own attention."""
    model, _ = model_of(name, **SIZES[name])
    state = {name: x.to(dtype).double() for name, x in model.state_dict().items()}
    theirs, who = output_of(model, dtype)
    assert who == {None}
    register()
    ours, who = output_of(model, dtype)
    assert who == {"fastattn"}
    model.double().load_state_dict(state)
    exact, _ = output_of(model, torch.float64)
    assert exact.std() > 0.01
    error, allowed = ((it - exact).abs().max() for it in (ours, theirs))
    assert error <= 2 * allowed + 1e-12


def test_gradients() -> None:
    model, _ = model_of("tabpfn_v2_5", **SIZES["tabpfn_v2_5"])
    model = model.double()
    x, y = torch.randn(40, 1, 6, dtype=torch.float64), torch.randint(0, 3, (30, 1)).double()

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(x, y).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    wanted = gradients()
    register()
    got, who = backends_of(gradients)
    assert who == {"fastattn"}
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def test_the_classifier(tmp_path: Any) -> None:
    """From a file of weights to probabilities, as users call it."""
    model, config = model_of("tabpfn_v2_5", **SIZES["tabpfn_v2_5"])
    path = tmp_path / "tabpfn-v2.5-classifier.ckpt"
    torch.save({"state_dict": model.state_dict(), "config": config, "architecture_name": "base"}, path)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((90, 5)), rng.integers(0, 3, 90)

    def predict() -> np.ndarray:
        classifier = tabpfn.TabPFNClassifier(
            model_path=path, device="cpu", n_estimators=2, random_state=0, inference_precision=torch.float32
        )  # "auto" is bfloat16 where the CPU multiplies it
        return classifier.fit(x[:60], y[:60]).predict_proba(x[60:])

    wanted = predict()
    register()
    register()  # as before
    got, who = backends_of(predict)
    assert who == {"fastattn"}
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    unregister()
    assert backends_of(predict)[1] == {None}


def test_who_is_left_alone() -> None:
    spec = attention_backends.AttentionSpec(
        seq_len_q=4, seq_len_kv=4, num_heads=2, num_kv_heads=1, head_dim=8, dtype=torch.float32,
        device=torch.device("cuda"), batch_size=1,
    )  # fmt: skip
    register()
    (ours,) = (it for it in attention_backends.registered_attention_backends() if it.name == "fastattn")
    assert not ours.is_preferred(spec)
    assert not ours.is_preferred(dataclasses.replace(spec, device=torch.device("cpu"), dtype=torch.int8))
    assert ours.is_preferred(dataclasses.replace(spec, device=torch.device("cpu")))
