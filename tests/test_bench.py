"""The benchmark's own arithmetic: refusals, intervals, shares of the peak, stopped workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rich")

from fastattn.bench import worker
from fastattn.bench.cases import CASES, GROUPS, Case, Inputs, Targets, make_inputs
from fastattn.bench.cli import main
from fastattn.bench.measure import CaseRun, Crew, LibraryRun
from fastattn.bench.oracle import expected_output
from fastattn.bench.peers import PEERS, Call, Unable
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
