"""``pytest benchmarks`` works as users of pytest-benchmark expect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pytest_benchmark")

from benchmarks.test_attention import LIBRARIES, SLOW_FLOPS, _check
from fastattn.bench.case import make_inputs
from fastattn.bench.cases import CASES
from fastattn.bench.oracle import expected_output
from tests.process import ROOT

#: Two cases of a few microseconds in the libraries that are always there.
TINY = ("-k", "(tiny-4 or tiny-16) and not torch")

#: One round of a few calls each: what is measured does not matter here.
BRIEF = ("--benchmark-max-time=0.005", "--benchmark-min-rounds=2", "--benchmark-warmup=off")


def run(*arguments: str) -> str:
    """Run ``pytest benchmarks`` and return what it printed."""
    # Within pytest-xdist nothing is timed: this is a run of its own.
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "benchmarks", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_save_and_compare(tmp_path: Path) -> None:
    storage = f"--benchmark-storage=file://{tmp_path}"
    run(*TINY, *BRIEF, storage, "--benchmark-save=first")
    (file,) = tmp_path.rglob("0001_first.json")
    saved: list[dict[str, Any]] = json.loads(file.read_text())["benchmarks"]
    assert {(it["group"], it["params"]["library"]) for it in saved} == {
        (case, library) for case in ("tiny-4", "tiny-16") for library in LIBRARIES if library != "torch"
    }
    for it in saved:
        case, extra = CASES[it["params"]["case"]], it["extra_info"]
        assert it["group"] == case.name
        assert (extra["shape"], extra["flops"], extra["nbytes"]) == (case.shape, case.flops, case.nbytes)
        assert extra["gflops"] * it["stats"]["median"] * 1e9 == pytest.approx(case.flops)

    compared = run(*TINY, *BRIEF, storage, "--benchmark-compare=0001", "--benchmark-sort=name")
    for name in ("tiny-4", "tiny-16"):
        assert f"benchmark '{name}'" in compared
    for library in ("fastattn", "numpy"):
        assert f"test_attention[tiny-4-{library}] (0001_first)" in compared
        assert f"test_attention[tiny-4-{library}] (NOW)" in compared


@pytest.mark.slow
def test_group_by_library(tmp_path: Path) -> None:
    printed = run(
        *TINY, *BRIEF, f"--benchmark-storage=file://{tmp_path}", "--benchmark-group-by=param:library"
    )
    assert "benchmark \"library='numpy'\"" in printed or "benchmark 'library=numpy'" in printed


def collected(*arguments: str) -> set[str]:
    """Names of the cases that would run."""
    lines = run("--collect-only", "-q", *arguments).splitlines()
    suffix = f"-{LIBRARIES[0]}]"
    return {line.partition("[")[2].removesuffix(suffix) for line in lines if line.endswith(suffix)}


@pytest.mark.slow
def test_long_cases_run_only_when_asked_for() -> None:
    usual, every, slow = collected(), collected("-m", ""), collected("-m", "slow")
    timed = [case for case in CASES.values() if case.threads is None and case.model_dim is None]
    assert every == {case.name for case in timed}
    assert usual | slow == every
    assert not usual & slow
    assert {case.name for case in timed if case.flops > SLOW_FLOPS} <= slow
    assert {"tiny-4", "square-512-64"} <= usual


def test_a_wrong_result_is_not_timed() -> None:
    case = CASES["tiny-16"]
    inputs = make_inputs(case)
    answer = expected_output(case, inputs)
    _check(case, inputs, answer.astype(np.float32), answer)
    with pytest.raises(AssertionError, match="largest error"):
        _check(case, inputs, (answer * 1.0001).astype(np.float32), answer)
    with pytest.raises(AssertionError, match="largest error nan"):
        _check(case, inputs, np.full_like(answer, np.nan), answer)
