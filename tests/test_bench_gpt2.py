"""``python -m benchmarks.gpt2`` on two layers: what its report says, not how long anything took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rich", reason="the bench extra is not installed")

from benchmarks import gpt2
from tests.process import ROOT

ROUNDS = 2

#: Runs when any Python starts, so also in the processes that the script starts.
STARTUP = """
import pathlib, fastattn

def share_threads_with_blas(enable=True):
    with pathlib.Path({log!r}).open("a") as file:
        file.write(f"{{enable}}\\n")
    return {possible}

fastattn.share_threads_with_blas = share_threads_with_blas
right = fastattn.attention
fastattn.attention = lambda *args, **options: {factor} * right(*args, **options)
"""


class Script:
    """Runs the script with a stand-in for `share_threads_with_blas`, and attention times `factor`."""

    def __init__(self, folder: Path, *, possible: bool = True, factor: float = 1.0) -> None:
        log, report = folder / "log", folder / "report.json"
        startup = STARTUP.format(log=str(log), possible=possible, factor=factor)
        (folder / "sitecustomize.py").write_text(startup)
        command = [sys.executable, "-m", "benchmarks.gpt2", "--layers", "2", "--tokens", "20"]
        self.done = subprocess.run(
            [*command, "--rounds", str(ROUNDS), "--json", str(report)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert self.done.stderr == ""
        self.report: dict[str, Any] = json.loads(report.read_text())
        self.variants: dict[str, dict[str, Any]] = self.report["variants"]
        self.shared = log.read_text().split()


@pytest.mark.slow
def test_report(tmp_path: Path) -> None:
    script = Script(tmp_path)
    assert script.done.returncode == 0
    report = script.report
    assert (report["layers"], report["tokens"], report["rounds"]) == (2, 20, ROUNDS)
    assert list(script.variants) == list(gpt2.VARIANTS)
    for name, it in script.variants.items():
        assert it["reason"] is None
        assert it["dtype"] == "float32"
        assert len(it["model_seconds"]) == len(it["attention_seconds"]) == ROUNDS
        for model, attention in zip(it["model_seconds"], it["attention_seconds"], strict=True):
            assert 0 < attention < model
        assert it["model"] == np.median(it["model_seconds"])
        assert it["attention"] == np.median(it["attention_seconds"])
        assert 0 < it["attention_share"] < 1
        assert f"\n {name} " in script.done.stdout
    plain, fast, shared = script.variants.values()
    assert (plain["largest_difference"], plain["model_ratio"], plain["attention_ratio"]) == (0, 1, 1)
    assert 0 < fast["largest_difference"] == shared["largest_difference"] < 1e-5
    ratios = np.array(plain["model_seconds"]) / fast["model_seconds"]
    assert fast["model_ratio"] == pytest.approx(np.median(ratios))
    assert script.shared == ["True"]  # in the process of the third variant, and in no other


@pytest.mark.slow
def test_threads_that_cannot_be_shared_are_told(tmp_path: Path) -> None:
    script = Script(tmp_path, possible=False)
    assert script.done.returncode == 0
    plain, fast, shared = script.variants.values()
    assert plain["reason"] is fast["reason"] is None
    assert "python -m fastattn info" in shared["reason"] and "model" not in shared
    assert shared["reason"] in script.done.stdout


@pytest.mark.slow
def test_a_wrong_result_is_told_and_not_timed(tmp_path: Path) -> None:
    script = Script(tmp_path, factor=1.01)
    assert script.done.returncode == 1
    plain, fast, shared = script.variants.values()
    assert plain["reason"] is None and len(plain["model_seconds"]) == ROUNDS
    for it in (fast, shared):
        assert it["wrong"] and it["reason"] in script.done.stdout
        assert "model" not in it


@pytest.mark.parametrize("attend", [gpt2.plain_attention, gpt2.fast_attention])
def test_attention_is_causal_and_takes_views(attend: gpt2.Attend) -> None:
    tokens, dim = 9, 8
    together = np.random.default_rng(0).standard_normal((tokens, 3, gpt2.HEADS, dim), dtype=np.float32)
    query, key, value = together.swapaxes(0, 1)
    out = attend(query, key, value)
    assert out.shape == query.shape and out.dtype == np.float32
    for head in range(gpt2.HEADS):
        for row in range(tokens):
            scores = key[: row + 1, head].astype(float) @ query[row, head] / np.sqrt(dim)
            weights = np.exp(scores) / np.exp(scores).sum()
            expected = weights @ value[: row + 1, head]
            np.testing.assert_allclose(out[row, head], expected, rtol=0, atol=2e-6)


def test_layers_see_views_of_one_product_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing on the way is float64."""
    monkeypatch.setattr(gpt2, "VOCABULARY", 50)
    seen = []

    def attend(*arrays: np.ndarray) -> np.ndarray:
        seen.append(arrays)
        return gpt2.plain_attention(*arrays)

    assert gpt2.GPT2(2, 5).logits(attend).shape == (50,)
    assert len(seen) == 2
    for arrays in seen:
        assert {it.dtype for it in arrays} == {np.dtype(np.float32)}
        assert {it.shape for it in arrays} == {(5, gpt2.HEADS, gpt2.HIDDEN // gpt2.HEADS)}
        assert {it.strides[0] for it in arrays} == {3 * gpt2.HIDDEN * 4}  # as they lie in the product
