"""The benchmark's own arithmetic: FLOPs, inputs, right answers, refusals, intervals, stopped workers."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rich")

from fastattn.bench import worker
from fastattn.bench.cases import CASES, GROUPS, Case, Inputs, Targets, make_inputs
from fastattn.bench.cli import main
from fastattn.bench.measure import CaseRun, Crew, LibraryRun
from fastattn.bench.oracle import expected_output, oracle_dtype
from fastattn.bench.peers import PEERS, Call, Unable
from fastattn.bench.peers.numpy_formula import NumPyFormula
from fastattn.bench.process import ROOT, Worker, WorkerError
from fastattn.bench.summary import disturbed_probes, median_interval, summarise

SMALL = replace(
    CASES["square-512-64"],
    name="small",
    batch=2,
    heads=4,
    kv_heads=4,
    len_q=7,
    len_k=7,
    head_dim=5,
    value_dim=5,
)

#: One small case for each option that the real ones use.
KINDS = {
    "plain": SMALL,
    "causal": replace(SMALL, causal=True),
    "random": replace(SMALL, mask="random", len_k=40),
    "padding": replace(SMALL, mask="padding"),
    "shared": replace(SMALL, bias="shared"),
    "per_head": replace(SMALL, bias="per_head"),
    "window": replace(SMALL, window=(2, 1)),
    "documents": replace(SMALL, document_length=3),
    "float64": replace(SMALL, dtype="float64"),
    "rank3": replace(SMALL, batch=1, rank=3),
    "wide": replace(SMALL, value_dim=9),
    "bshd": replace(SMALL, layout="bshd"),
    "grouped": replace(SMALL, kv_heads=2, causal=True),
    "cross": replace(SMALL, len_k=3),
}


def loop_attention(case: Case) -> np.ndarray:
    """Attention one score at a time, straight from the options of `case`."""
    inputs = make_inputs(case)
    query, key, value = inputs.bhsd(case)
    out = np.zeros((case.batch, case.heads, case.len_q, case.value_dim))
    for b, h, i in np.ndindex(case.batch, case.heads, case.len_q):
        kv = h // (case.heads // case.kv_heads)
        total = 0.0
        for j in range(case.len_k):
            hidden = case.causal and j > i
            if case.window is not None:
                hidden = hidden or not i - case.window[0] <= j <= i + case.window[1]
            if case.document_length is not None:
                hidden = hidden or i // case.document_length != j // case.document_length
            if case.mask == "random":
                hidden = hidden or not inputs.allowed[i, j]
            if case.mask == "padding":
                hidden = hidden or j >= int(case.len_k * 0.75)
            if hidden:
                continue
            score = sum(float(x) * float(y) for x, y in zip(query[b, h, i], key[b, kv, j], strict=True))
            score /= math.sqrt(case.head_dim)
            if case.bias is not None:
                score += float(inputs.bias[h, i, j] if case.bias == "per_head" else inputs.bias[i, j])
            total += math.exp(score)
            out[b, h, i] += math.exp(score) * value[b, kv, j].astype(float)
        out[b, h, i] /= total
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_oracle_and_numpy_agree_with_a_loop(kind: str) -> None:
    case = KINDS[kind]
    inputs = make_inputs(case)
    expected = loop_attention(case)
    answer = expected_output(case, inputs)
    assert answer.dtype == oracle_dtype(case)
    np.testing.assert_allclose(answer.astype(float), expected, rtol=1e-12, atol=1e-14)
    (make,) = NumPyFormula().ways.values()
    tolerance = 16 * np.finfo(case.dtype).eps * np.abs(inputs.value).max()
    np.testing.assert_allclose(make(case, inputs).result(), expected, rtol=0, atol=tolerance)


def test_oracle_does_not_depend_on_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = expected_output(KINDS["grouped"], make_inputs(KINDS["grouped"]))
    monkeypatch.setattr("fastattn.bench.oracle.ROWS", 2)
    blocks = expected_output(KINDS["grouped"], make_inputs(KINDS["grouped"]))
    np.testing.assert_allclose(blocks, whole, rtol=1e-14)


def test_flops_follow_the_formula() -> None:
    case = replace(SMALL, batch=3, heads=4, len_q=10, len_k=20, head_dim=8, value_dim=8)
    assert case.flops == 4 * 3 * 4 * 10 * 20 * 8
    assert replace(case, value_dim=16).flops == 2 * 3 * 4 * 10 * 20 * (8 + 16)
    assert replace(case, causal=True).flops == case.flops / 2
    assert replace(case, kv_heads=2, mask="random", bias="shared").flops == case.flops


@pytest.mark.parametrize("fields", [{"window": (2, 0)}, {"window": (0, 30)}, {"document_length": 3}])
def test_flops_of_intervals_count_the_allowed_pairs(fields: dict[str, Any]) -> None:
    case = replace(SMALL, len_q=13, len_k=13, **fields)
    assert case.scores == np.count_nonzero(make_inputs(case).allowed)


def test_inputs_depend_on_the_name_alone() -> None:
    first, again = make_inputs(SMALL), make_inputs(SMALL)
    assert first.query.tobytes() == again.query.tobytes()
    assert first.query.tobytes() != make_inputs(replace(SMALL, name="other")).query.tobytes()


def test_cases_are_consistent() -> None:
    for name, case in CASES.items():
        assert case.name == name
        assert case.group in GROUPS
        assert (case.baseline is not None) == (case.targets.slowdown is not None)
        assert case.baseline is None or CASES[case.baseline].shape == case.shape


class FourWays:
    """A library with a slow right way, a fast wrong one, one that refuses and one that gives NaN."""

    version = "1"

    def __init__(self) -> None:
        self.ways = {
            "right": lambda case, inputs: self._call(case, inputs, 1.0),
            "wrong": lambda case, inputs: self._call(case, inputs, 1.0001),
            "nan": lambda case, inputs: self._call(case, inputs, np.nan),
            "refuses": self._refuse,
        }

    @staticmethod
    def _call(case: Case, inputs: Inputs, factor: float) -> Call:
        out = (expected_output(case, inputs) * factor).astype(np.float32)
        return Call(lambda: None, lambda: out)

    @staticmethod
    def _refuse(case: Case, inputs: Inputs) -> Call:
        raise Unable("no such operator")


def test_only_right_ways_are_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = CASES["tiny-16"]
    path = str(tmp_path / "answer.npy")
    np.save(path, expected_output(case, make_inputs(case)))
    monkeypatch.setattr(worker, "load_peer", lambda name, num_threads: FourWays())
    monkeypatch.setattr(worker, "SETTLE_SECONDS", 0.0)
    found = worker.LibraryWorker("numpy", 1).prepare(case.name, path)
    assert found["chosen"] == "right"
    ways = found["ways"]
    assert ways["right"]["error"] < found["tolerance"] < ways["wrong"]["error"]
    assert ways["wrong"]["reason"].startswith("wrong: largest error")
    assert ways["nan"]["reason"].startswith("wrong: NaN or inf")
    assert ways["refuses"]["reason"] == "no such operator"
    assert [label for label, way in ways.items() if "seconds" in way] == ["right"]


def test_interval_holds_the_median_and_narrows() -> None:
    values = np.random.default_rng(1).normal(2.0, 0.1, 400)
    few, many = median_interval(values[:12]), median_interval(values)
    assert few.low < few.median < few.high
    assert many.low < 2.0 < many.high
    assert many.high - many.low < few.high - few.low
    same = median_interval(np.full(5, 3.0))
    assert same.low == same.median == same.high == 3.0


def case_run(**medians: list[float]) -> CaseRun:
    run = CaseRun(replace(SMALL, targets=Targets(best=2.0, torch=2.0, peak=0.5, slowdown=1.2)), 3, "float64")
    run.libraries = {name: LibraryRun(chosen="way", medians=times) for name, times in medians.items()}
    run.libraries["fastattn"].peak_shares = [(0.25, 1.0, 1.0), (0.1, 1.0, 1.0), (0.75, 1.0, 1.0)]
    run.libraries["openvino"] = LibraryRun(reason="wrong: largest error 1", wrong=True)
    run.baseline = LibraryRun(chosen="way", medians=[1.0, 2.0, 4.0])
    flops = run.case.flops
    run.peaks = [{"float32": {"1": 1.0, "2": flops / seconds}} for seconds in (0.5, 0.5, 0.5, 0.5)]
    return run


def test_ratios_do_not_feel_a_drift_that_all_share() -> None:
    drift = (1.0, 2.0, 4.0)
    run = case_run(fastattn=list(drift), torch=[3 * it for it in drift], numpy=[1.5 * it for it in drift])
    summary = summarise(run)
    assert summary.best == "numpy"
    assert summary.ratios["torch"] == median_interval(np.full(3, 3.0))
    assert summary.slowdown == median_interval(np.ones(3))
    assert summary.peak["fastattn"].estimate.median == 0.25
    met = {verdict.name: verdict.met for verdict in summary.verdicts}
    assert met == {"best peer": False, "torch": True, "peak": False, "over baseline": True}


def test_disturbed_calls_do_not_count_in_the_share_of_the_peak() -> None:
    run = case_run(fastattn=[1.0, 1.0, 1.0])
    quiet = [(0.8, 9.0, 100.0), (0.9, 9.0, 97.0), (0.7, 9.0, 99.0)]
    disturbed = [(0.1, 9.0, 60.0)] * 20 + [(1.6, 4.5, 100.0)] * 19 + [(0.2, 8.0, 90.0)]
    run.libraries["fastattn"].peak_shares = 2 * quiet + disturbed
    share = summarise(run).peak["fastattn"]
    assert (share.estimate.median, share.undisturbed, share.calls, share.enough) == (0.8, 6, 46, True)
    # Too few to tell: all of them, and said so.
    run.libraries["fastattn"].peak_shares = quiet + disturbed
    share = summarise(run).peak["fastattn"]
    assert (share.estimate.median, share.undisturbed, share.calls, share.enough) == (0.7, 3, 43, False)


def test_a_disturbed_probe_is_told() -> None:
    run = case_run(fastattn=[1.0, 1.0, 1.0])
    assert disturbed_probes([run], 2) == (0, 4)
    run.peaks[1]["float32"]["2"] *= 0.5
    assert disturbed_probes([run, run], 2) == (2, 8)
    assert disturbed_probes([], 2) == (0, 0)


def test_fastattn_on_another_isa_is_no_peer() -> None:
    run = case_run(**{"fastattn": [1.0] * 3, "fastattn-avx2": [1.1] * 3, "torch": [2.5] * 3})
    assert summarise(run).best == "torch"


def process_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@needs_proc
def test_a_worker_is_stopped_while_it_is_not_asked() -> None:
    with Worker("numpy", 1) as held:
        for _ in range(2):
            held.ask("release")
            assert process_state(held._process.pid) == "T"


def test_a_refusal_names_the_reason_and_the_worker_lives() -> None:
    with Worker("numpy", 1) as held:
        with pytest.raises(WorkerError, match="KeyError: 'tiny-4'"):
            held.ask("time", case="tiny-4", calls=1, seconds=1.0)
        held.ask("release")


def test_a_dead_worker_is_reported_and_replaced() -> None:
    with Crew(1) as crew:
        first = crew.worker("numpy")
        first.ask("release")
        os.kill(first._process.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="SIGKILL"):
            first.ask("release")
        second = crew.worker("numpy")
        assert second is not first
        second.ask("release")


@needs_proc
def test_no_worker_outlives_a_killed_parent() -> None:
    script = (
        "from fastattn.bench.process import Worker; import os, signal, sys\n"
        "held = Worker('numpy', 1); held.ask('release'); print(held._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    pid = int(done.stdout)
    deadline = time.monotonic() + 10
    while process_state(pid) not in ("gone", "Z") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process_state(pid) in ("gone", "Z")


@pytest.mark.parametrize(("argument", "valid"), [("--cases", CASES), ("--group", GROUPS), ("--peers", PEERS)])
def test_bad_names_list_the_valid_ones(
    argument: str, valid: Iterable[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([argument, "nonsense"])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert "nonsense" in message
    assert all(name in message for name in valid)


def test_the_command_line_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    assert main(["--cases", "tiny-4", "--peers", "numpy", "--rounds", "2", "--json", str(file)]) == 0
    assert "tiny-4" in capsys.readouterr().out
    document = json.loads(file.read_text())
    library = document["cases"]["tiny-4"]["libraries"]["numpy"]
    assert document["versions"]["numpy"] == np.__version__
    assert len(library["medians"]) == 2
    assert all(
        0 < low <= median < 0.1 for low, median in zip(library["mins"], library["medians"], strict=True)
    )
