"""How the benchmark measures, sums up, writes, reads and compares; no figure here is a real time."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rich")

from fastattn import _host
from fastattn.backends import cython_cpu
from fastattn.bench import cli, document, measure, worker
from fastattn.bench.cases import (
    CASES,
    GROUPS,
    MEMORY_CASES,
    Case,
    Inputs,
    Targets,
    make_inputs,
    possible_cases,
)
from fastattn.bench.compare import ALL_CASES, MIN_CHANGE, compare
from fastattn.bench.intervals import ENOUGH, change_interval, geometric_mean_interval, median_interval
from fastattn.bench.limits import Limits, bounds, medians
from fastattn.bench.measure import LAGGING, Patience
from fastattn.bench.oracle import expected_output
from fastattn.bench.peers import OURS, PEERS, Call, Unable
from fastattn.bench.process import ROOT, Crew, Worker, WorkerError
from fastattn.bench.records import CaseRun, LibraryRun
from fastattn.bench.summary import disturbed_probes, geometric_means, summarise
from fastattn.bench.worker import LIMITS

CASE = replace(CASES["tiny-16"], name="case", targets=Targets(best=2.0, torch=2.0, peak=0.5, slowdown=1.2))

needs_kernels = pytest.mark.skipif(
    bool(cython_cpu.backend.unavailable_reasons()), reason="the extension is not built"
)
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


def limits(peak: float = 1e9, bandwidth: float | None = 1e9) -> Limits:
    """A probe with one and two threads."""
    return {
        "fma": {dtype: {"1": peak / 2, "2": peak} for dtype in ("float32", "float64")},
        "read_bandwidth": {} if bandwidth is None else {"1": bandwidth, "2": bandwidth},
    }


def case_run(**times: list[float]) -> CaseRun:
    """A run of two threads whose libraries took `times`, one figure per round."""
    rounds = max(map(len, times.values()))
    run = CaseRun(CASE, 2, "float64", rounds, kind="compute", limits=[limits()] * (rounds + 1))
    run.libraries = {
        name: LibraryRun(version="1", chosen="way", medians=list(it), mins=list(it))
        for name, it in times.items()
    }
    run.libraries["fastattn"].limit_shares = [(0.25, 1.0, 1.0), (0.1, 1.0, 1.0), (0.75, 1.0, 1.0)]
    return run


# Intervals


def test_interval_holds_the_median_and_narrows() -> None:
    values = np.random.default_rng(1).normal(2.0, 0.1, 400)
    few, many = median_interval(values[:12]), median_interval(values)
    assert few.low < few.median < few.high
    assert many.low < 2.0 < many.high
    assert many.precision < few.precision
    same = median_interval(np.full(5, 3.0))
    assert same.low == same.median == same.high == 3.0
    assert same.precision == 0


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_interval_of_few_values_reaches_all_of_them(count: int) -> None:
    values = np.arange(1.0, count + 1)
    interval = median_interval(values)
    assert (interval.low, interval.high) == (1, count)


def test_interval_of_a_change_covers_it_as_often_as_it_says() -> None:
    rng = np.random.default_rng(2)
    covered = 0
    for _ in range(200):
        then, now = rng.normal(1.0, 0.05, 15), rng.normal(1.3, 0.05, 10)
        change = change_interval(then, now)
        covered += change.low <= 1.3 <= change.high
    assert covered >= 180


def test_interval_of_a_geometric_mean_holds_it_and_narrows() -> None:
    factors = np.exp(np.random.default_rng(3).normal(np.log(1.3), 0.2, 400))
    few, many = geometric_mean_interval(factors[:8]), geometric_mean_interval(factors)
    assert few.low < 1.3 < few.high
    assert many.low < 1.3 < many.high
    assert many.precision < few.precision / 3
    assert geometric_mean_interval(1 / factors).median == pytest.approx(1 / many.median)


# Limits


def test_the_slower_of_the_limits_binds_a_cold_case() -> None:
    cold = replace(CASE, cold=True)
    peak, bandwidth = 1e9, 1e9
    assert bounds(cold, 2, limits(peak, bandwidth)) == {
        "compute": CASE.flops / peak,
        "memory": CASE.nbytes / bandwidth,
    }
    assert bounds(cold, 1, limits(peak, bandwidth))["compute"] == 2 * CASE.flops / peak


def test_bytes_in_the_caches_are_no_limit() -> None:
    assert set(bounds(CASE, 2, limits(1e30, 1.0))) == {"compute"}


def test_a_limit_that_was_not_measured_leaves_nothing_to_say() -> None:
    assert bounds(replace(CASE, cold=True), 2, limits(bandwidth=None)) == {}
    assert bounds(CASE, 3, limits()) == {}
    assert set(bounds(CASE, 2, limits(bandwidth=None))) == {"compute"}


def test_medians_are_over_the_probes_that_have_the_limit() -> None:
    found = medians([limits(1.0, None), limits(5.0, 8.0), limits(3.0, 6.0)])
    assert found["fma"]["float32"] == {"1": 1.5, "2": 3.0}
    assert found["read_bandwidth"] == {"1": 7.0, "2": 7.0}
    assert medians([]) == {"fma": {}, "read_bandwidth": {}}


# Summary


def test_ratios_do_not_feel_a_drift_that_all_share() -> None:
    drift = (1.0, 2.0, 4.0)
    run = case_run(fastattn=[*drift], torch=[3 * it for it in drift], numpy=[1.5 * it for it in drift])
    run.baseline = LibraryRun(chosen="way", medians=list(drift))
    run.libraries["openvino"] = LibraryRun(reason="wrong: largest error 1", wrong=True)
    summary = summarise(run)
    assert summary.best == "numpy"
    assert summary.ratios["torch"] == median_interval(np.full(3, 3.0))
    assert summary.slowdown == median_interval(np.ones(3))
    assert "openvino" not in summary.seconds
    met = {verdict.name: verdict.met for verdict in summary.verdicts}
    assert met == {"best peer": False, "torch": True, "of limit": False, "over baseline": True}


def test_the_limit_says_which_and_how_long_and_how_near() -> None:
    run = case_run(fastattn=[1.0, 1.0, 1.0])
    limit = summarise(run).limit
    assert limit is not None
    assert limit.share is not None
    assert (limit.kind, limit.seconds, limit.share.median) == ("compute", CASE.flops / 1e9, 0.25)
    run.kind = None
    assert summarise(run).limit is None


def test_a_peer_of_the_first_rounds_is_held_against_ours_of_the_same() -> None:
    run = case_run(fastattn=[1.0, 2.0, 8.0, 8.0], torch=[2.0, 4.0, 16.0, 16.0], numpy=[30.0, 60.0])
    summary = summarise(run)
    assert summary.ratios["numpy"] == median_interval(np.full(2, 30.0))
    assert summary.best == "torch"


def test_disturbed_calls_do_not_count_in_the_share_of_the_limit() -> None:
    run = case_run(fastattn=[1.0, 1.0, 1.0])
    quiet = [(0.8, 9.0, 100.0), (0.9, 9.0, 97.0), (0.7, 9.0, 99.0)]
    disturbed = [(0.1, 9.0, 60.0)] * 20 + [(1.6, 4.5, 100.0)] * 19 + [(0.2, 8.0, 90.0)]
    run.libraries["fastattn"].limit_shares = 2 * quiet + disturbed
    share = summarise(run).shares["fastattn"]
    assert (share.median, share.undisturbed, share.calls, share.enough) == (0.8, 6, 46, True)
    # Too few to tell: all of them, and said so.
    run.libraries["fastattn"].limit_shares = quiet + disturbed
    share = summarise(run).shares["fastattn"]
    assert (share.median, share.undisturbed, share.calls, share.enough) == (0.7, 3, 43, False)


def test_a_disturbed_probe_is_told() -> None:
    run = case_run(fastattn=[1.0, 1.0, 1.0])
    assert disturbed_probes([run]) == (0, 4)
    run.limits = [limits(), limits(0.5e9), limits()]
    assert disturbed_probes([run, run]) == (2, 6)
    # One thread reaches half of what two do, and nothing is wrong with that.
    assert disturbed_probes([case_run(fastattn=[1.0]), replace(case_run(fastattn=[1.0]), threads=1)]) == (
        0,
        4,
    )
    assert disturbed_probes([]) == (0, 0)


def test_another_build_of_fastattn_is_no_peer() -> None:
    run = case_run(**{"fastattn": [1.0] * 3, "fastattn-avx2": [1.1] * 3, "torch": [2.5] * 3})
    summary = summarise(run)
    assert summary.best == "torch"
    assert set(geometric_means([summary])) == {"best peer", "torch"}


def test_geometric_means_are_over_the_cases_that_a_peer_can_do() -> None:
    both = summarise(case_run(fastattn=[1.0], torch=[4.0], numpy=[0.5]))
    one = summarise(case_run(fastattn=[1.0], torch=[9.0]))
    means = geometric_means([both, one])
    assert means["torch"] == (pytest.approx(6.0), 2, 2)
    assert means["numpy"] == (pytest.approx(0.5), 0, 1)
    assert means["best peer"] == (pytest.approx(math.sqrt(0.5 * 9)), 1, 2)


# Rounds


def test_patience_ends_as_it_says() -> None:
    patience = Patience(seconds=10, least=3, most=8, precision=0.02)
    wide, narrow = 0.5, 0.01
    assert patience.ended(8, 0.1, 0.8, wide)
    assert not patience.ended(7, 0.1, 0.7, wide)
    assert patience.ended(ENOUGH, 0.1, 0.5, narrow)
    assert not patience.ended(ENOUGH - 1, 0.1, 0.4, narrow)
    assert not patience.ended(2, 100.0, 200.0, wide)
    assert patience.ended(3, 100.0, 300.0, wide)
    assert patience.ended(4, 3.0, 8.0, wide)
    assert not patience.ended(4, 1.0, 8.0, wide)


class FakeWorker:
    """A library whose calls take what `times` yields; nothing is computed and no time passes."""

    def __init__(self, name: str, times: Iterator[float]) -> None:
        self.name, self.times = name, times

    def ask(self, command: str, **_: Any) -> Any:
        if command == "prepare":
            ways = {"way": {"error": 0.0, "rms_error": 0.0, "seconds": next(self.times)}}
            return {"version": "1", "chosen": "way", "tolerance": 1.0, "copies": 1, "ways": ways}
        if command == "time":
            seconds = next(self.times)
            return {"median": seconds, "min": seconds}
        if command == "limit_shares":
            return [[0.5, 1.0, 1.0]]
        return limits()[command]


class FakeCrew:
    """Has a `FakeWorker` for each name."""

    def __init__(self, **times: Iterable[float]) -> None:
        self.times = {LIMITS: iter(()), **{name: iter(it) for name, it in times.items()}}
        self.released = False

    def threads(self, case: Case) -> int:
        return case.threads or 2

    def worker(self, name: str, num_threads: int) -> FakeWorker:
        return FakeWorker(name, self.times[name])

    def expected(self, case: Case) -> tuple[str, str]:
        return "", "float64"

    def forget(self, path: str) -> None:
        pass

    def release(self) -> None:
        self.released = True


def run_fake(patience: Patience, **times: Iterable[float]) -> CaseRun:
    crew: Any = FakeCrew(**times)
    run = measure.measure(CASE, crew, list(times), patience)
    assert crew.released is not run.interrupted
    return run


def noisy(seconds: float, noise: float, seed: int) -> Iterator[float]:
    rng = np.random.default_rng(seed)
    while True:
        yield seconds * float(np.exp(noise * rng.standard_normal()))


def test_rounds_go_on_until_the_ratio_is_known() -> None:
    patience = Patience(seconds=60, most=200)
    steady, shaky = (
        run_fake(patience, fastattn=noisy(1.0, noise, 1), torch=noisy(2.0, noise, 2))
        for noise in (0.001, 0.05)
    )
    assert steady.rounds == ENOUGH
    assert ENOUGH < shaky.rounds < patience.most
    assert summarise(shaky).ratios["torch"].precision <= patience.precision
    assert len(shaky.limits) == shaky.rounds + 1


def test_rounds_end_with_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()  # every look at it takes a second, and so does every round
    monkeypatch.setattr(measure.time, "monotonic", lambda: float(next(clock)))
    run = run_fake(Patience(seconds=12), fastattn=noisy(1.0, 0.5, 1), torch=noisy(1.0, 0.5, 2))
    assert 3 < run.rounds <= 12
    clock = itertools.count(step=1000)
    run = run_fake(Patience(seconds=12), fastattn=noisy(1.0, 0.5, 1), torch=noisy(1.0, 0.5, 2))
    assert run.rounds == 3


def test_a_lagging_peer_is_timed_in_the_first_rounds_only() -> None:
    fixed = {
        name: itertools.repeat(seconds)
        for name, seconds in (("fastattn", 9.0), ("torch", 1.0), ("numpy", 1.1 * LAGGING))
    }
    run = run_fake(Patience(seconds=60), **fixed)
    counts = {name: len(library.medians) for name, library in run.libraries.items()}
    assert counts == {"fastattn": ENOUGH, "torch": ENOUGH, "numpy": 3}
    assert summarise(run).ratios["numpy"].median == pytest.approx(1.1 * LAGGING / 9)


def test_an_interrupt_keeps_the_finished_rounds() -> None:
    def interrupted() -> Iterator[float]:
        yield from [1.0] * 3  # checked, and two rounds; in the third fastattn comes first
        raise KeyboardInterrupt

    run = run_fake(Patience(seconds=60), fastattn=itertools.repeat(1.0), torch=interrupted())
    assert run.interrupted
    assert run.rounds == 2
    assert {len(library.medians) for library in run.libraries.values()} == {2}
    assert summarise(run).ratios["torch"].median == 1.0


def test_a_case_without_libraries_that_are_right_ends() -> None:
    crew: Any = FakeCrew(fastattn=())

    def refuse(*_: Any, **__: Any) -> Any:
        raise WorkerError("no")

    crew.worker = lambda name, num_threads: type("Refusing", (), {"name": name, "ask": refuse})()
    run = measure.measure(CASE, crew, ["fastattn"], Patience(seconds=60))
    assert (run.rounds, run.kind, run.libraries["fastattn"].reason) == (0, None, "no")
    assert set(run.no_limits) == {"fma", "read_bandwidth"}


# Workers


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


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """``prepare(case, peer)`` gives a `LibraryWorker` that has prepared `case`, and what it said."""

    def prepared(case: Case, peer: Any) -> tuple[worker.LibraryWorker, dict[str, Any]]:
        path = str(tmp_path / "answer.npy")
        np.save(path, expected_output(case, make_inputs(case)))
        monkeypatch.setitem(worker.CASES, case.name, case)
        monkeypatch.setattr(worker, "load_peer", lambda name, num_threads: peer)
        monkeypatch.setattr(worker, "SETTLE_SECONDS", 0.0)
        monkeypatch.setattr(worker, "WARM_UP_SECONDS", 0.0)
        held = worker.LibraryWorker("numpy", 1)
        return held, held.prepare(case.name, path)

    return prepared


def test_only_right_ways_are_timed(prepare: Callable[..., Any]) -> None:
    _, found = prepare(CASES["tiny-16"], FourWays())
    assert found["chosen"] == "right"
    assert found["copies"] == 1
    ways = found["ways"]
    assert ways["right"]["error"] < found["tolerance"] < ways["wrong"]["error"]
    assert ways["wrong"]["reason"].startswith("wrong: largest error")
    assert ways["nan"]["reason"].startswith("wrong: NaN or inf")
    assert ways["refuses"]["reason"] == "no such operator"
    assert [label for label, way in ways.items() if "seconds" in way] == ["right"]


class Recording:
    """A library that notes the address of the keys in each call."""

    version = "1"

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.ways = {"way": self._way}

    def _way(self, case: Case, inputs: Inputs) -> Call:
        out = expected_output(case, inputs).astype(np.float32)
        return Call(lambda: self.keys.append(inputs.key.ctypes.data), lambda: out)


@pytest.mark.parametrize("cold", [False, True])
def test_cold_calls_cycle_through_enough_bytes(
    cold: bool, prepare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(CASE, cold=cold)
    monkeypatch.setattr(worker, "COLD_BYTES", 5 * case.nbytes - 1)
    monkeypatch.setattr(worker, "available_memory", lambda: 2**40)
    peer = Recording()
    held, found = prepare(case, peer)
    copies = 5 if cold else 1
    assert found["copies"] == copies
    peer.keys.clear()
    held.time(case.name, calls=3 * copies, seconds=1.0)
    timed = peer.keys
    assert len(set(timed)) == copies
    assert timed[copies:] == timed[:-copies]  # each is used again only after all the others


def test_cold_copies_leave_memory_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASE, cold=True)
    for free in (0, 10 * case.nbytes, 2**40):
        monkeypatch.setattr(worker, "available_memory", lambda free=free: free)
        held = 1 + len(worker._cold_copies(case, make_inputs(case)))
        assert held == 1 or held * case.nbytes <= worker.COLD_SHARE * free


@needs_kernels
@pytest.mark.parametrize("kind", ["compute", "memory"])
def test_a_share_is_of_the_limit_that_binds(
    kind: Any, prepare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = {"compute": CASE.flops, "memory": float(CASE.nbytes)}[kind]
    probes = {"fma_peak": "compute", "read_bandwidth": "memory"}
    for name, limit in probes.items():
        value = work / 10.0 if limit == kind else 1e-30
        monkeypatch.setattr(cython_cpu, name, lambda *_, value=value: value, raising=False)
    held, _ = prepare(CASE, FourWays())
    monkeypatch.setattr(worker, "_time_blocks", lambda run, calls, block: [20.0])
    shares = held.limit_shares(CASE.name, kind, 0.0)
    assert [share for share, _, _ in shares] == [pytest.approx(0.5)] * len(shares)


@needs_kernels
def test_limits_are_the_best_of_the_probes_for_one_thread_and_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probes = itertools.cycle([1.0, 3.0, 2.0])

    def probe(*arguments: Any) -> float:
        *_, num_threads, _ = arguments
        return num_threads * next(probes)

    monkeypatch.setattr(cython_cpu, "fma_peak", probe)
    monkeypatch.setattr(cython_cpu, "read_bandwidth", probe)
    held = worker.LimitsWorker(4)
    expected = {"1": 3.0, "4": 12.0}
    assert held.fma() == {"float32": expected, "float64": expected}
    assert held.read_bandwidth() == expected


def process_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"


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
        first = crew.worker("numpy", 1)
        first.ask("release")
        os.kill(first._process.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="SIGKILL"):
            first.ask("release")
        second = crew.worker("numpy", 1)
        assert second is not first
        second.ask("release")


def test_a_case_with_threads_of_its_own_has_workers_of_its_own() -> None:
    with Crew(2) as crew:
        assert crew.threads(CASE) == 2
        assert crew.threads(replace(CASE, threads=1)) == 1
        workers = {count: crew.worker("numpy", count) for count in (1, 2)}
        assert workers[1] is not workers[2]
        assert all(crew.worker("numpy", count) is it for count, it in workers.items())


@needs_proc
@pytest.mark.parametrize("busy", [False, True])
def test_no_worker_outlives_a_killed_parent(busy: bool, tmp_path: Path) -> None:
    script = (
        "from fastattn.bench.process import Worker; import os, signal, threading, time\n"
        "held = Worker('oracle', 1)\n"
        f"work = dict(case='long-64k', path={str(tmp_path / 'answer.npy')!r})\n"
        f"if {busy}: threading.Thread(target=lambda: held.ask('expected', **work), daemon=True).start()\n"
        "else: held.ask('expected', **work | dict(case='tiny-4'))\n"
        "print(held._process.pid, flush=True)\n"
        "time.sleep(0.5)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    pid = int(done.stdout)
    deadline = time.monotonic() + 2
    while process_state(pid) not in ("gone", "Z") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process_state(pid) in ("gone", "Z")


# The document


def test_a_document_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run = case_run(fastattn=[1.0, 1.1, 1.2], torch=[2.0, 2.1, 2.2])
    memory: document.MemoryResults = {"memory-512": {"numpy": {"first": {"extra": 1, "version": "2"}}}}
    built = document.build(2, [run], memory)
    document.write(path, built)
    assert document.read(path) == json.loads(json.dumps(built))
    entry = built["cases"]["case"]
    assert entry["case"]["flops"] == CASE.flops
    assert entry["case"]["nbytes"] == CASE.nbytes
    assert entry["summary"]["best"] == "torch"
    limit = entry["summary"]["limit"]
    assert limit["kind"] == "compute"
    assert limit["seconds"] == CASE.flops / 1e9
    assert limit["share"]["low"] <= limit["share"]["median"] <= limit["share"]["high"]
    assert built["limits"] == limits()
    assert built["memory_cases"]["memory-512"]["len_k"] == 512
    assert built["versions"] | {"torch": "1", "numpy": "2"} == built["versions"]


def test_json_has_no_nan_and_no_infinity(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run = case_run(fastattn=[1.0], torch=[1.0])
    run.tolerance = math.nan
    run.libraries["torch"].ways = {"way": {"error": math.inf}}
    document.write(path, document.build(2, [run], {}))

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    read = json.loads(path.read_text(), parse_constant=refuse)
    assert read["cases"]["case"]["tolerance"] is None
    assert read["cases"]["case"]["libraries"]["torch"]["ways"] == {"way": {"error": None}}


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    good = document.build(2, [case_run(fastattn=[1.0])], {})

    def broken(**changes: Any) -> str:
        copy = json.loads(json.dumps(good))
        copy["cases"]["case"]["libraries"]["fastattn"].update(changes)
        return json.dumps(copy)

    for text, message in (
        ("", "is not JSON"),
        ("\xff", "is not JSON"),
        ("[1]", "was not written by this benchmark"),
        ('{"schema": 99}', "has schema 99"),
        (json.dumps(good | {"cases": []}), "the document.cases should be"),
        (broken(medians=["1"]), r"libraries\['fastattn'\].medians should hold positive numbers"),
        (broken(limit_shares=[[1, 2]]), "rows of three numbers"),
    ):
        path = tmp_path / "other.json"
        path.write_text(text, encoding="latin-1")
        with pytest.raises(document.DocumentError, match=message):
            document.read(path)
    with pytest.raises(document.DocumentError, match="cannot be read: No such file"):
        document.read(tmp_path / "absent.json")


# Comparing two runs


def synthetic(rng: np.random.Generator, ours: float = 1.0, rounds: int = 6, noise: float = 0.05) -> Any:
    """A document of a run on a busy machine; fastattn takes `ours` times as long as it should.

    Each figure has `noise` of its own, all of one round share a drift of a quarter, and each library is off
    by 2 % for the whole run, as memory and neighbours make it.
    """
    drift = np.exp(0.25 * rng.standard_normal(rounds))
    times = {}
    for name, seconds in {"fastattn": ours, "torch": 1.5, "onnxruntime": 1.3, "openvino": 1.2}.items():
        luck = np.exp(0.02 * rng.standard_normal())
        times[name] = list(seconds * luck * drift * np.exp(noise * rng.standard_normal(rounds)))
    run = case_run(**times)
    luck = np.exp(0.02 * rng.standard_normal())
    shares = 0.8 / ours * luck * np.exp(noise * rng.standard_normal(20 * rounds))
    run.libraries["fastattn"].limit_shares = [(float(share), 1.0, 1.0) for share in shares]
    return document.build(2, [run], {})


def alarms(ours: float, pairs: int = 100) -> float:
    """On which share of pairs of runs the second one is found slower."""
    rng = np.random.default_rng(3)
    return sum(bool(compare(synthetic(rng), synthetic(rng, ours)).slower) for _ in range(pairs)) / pairs


def test_equal_runs_raise_hardly_an_alarm() -> None:
    assert alarms(1.0) <= 0.01


def test_the_slower_the_surer_it_is_caught() -> None:
    caught = [alarms(ours, pairs=40) for ours in (1.03, 1.2, 1.3)]
    assert caught[0] <= 0.05
    assert caught[1] >= 0.7
    assert caught[2] >= 0.98


def test_a_little_slower_everywhere_shows_in_all_cases_together() -> None:
    rng = np.random.default_rng(10)

    def many(ours: float) -> Any:
        runs = [synthetic(rng, ours, rounds=3) for _ in range(12)]
        runs[0]["cases"] = {f"case-{i}": run["cases"]["case"] for i, run in enumerate(runs)}
        return runs[0]

    comparison = compare(many(1.0), many(1.15))
    assert comparison.overall is not None
    assert ALL_CASES in comparison.slower
    assert comparison.overall.peers is not None
    assert comparison.overall.peers.ratio.median == pytest.approx(1.15, abs=0.05)
    assert ALL_CASES not in compare(many(1.0), many(1.0)).slower


def judgements(*factors: float, rounds: int = 8) -> list[str]:
    """Of cases without noise whose times change by these factors, and then of all of them."""
    rng = np.random.default_rng(11)
    before, after = {}, {}
    for number, factor in enumerate(factors):
        then = synthetic(rng, rounds=rounds, noise=0.0)["cases"]["case"]
        now = json.loads(json.dumps(then))
        ours = now["libraries"]["fastattn"]
        ours["medians"] = [factor * it for it in ours["medians"]]
        ours["limit_shares"] = [[share / factor, *probes] for share, *probes in ours["limit_shares"]]
        before[f"case-{number}"], after[f"case-{number}"] = then, now
    document_then = synthetic(rng) | {"cases": before}
    comparison = compare(document_then, document_then | {"cases": after})
    assert comparison.overall is not None
    return [it.judgement for it in (*comparison.changes, comparison.overall)]


def test_a_case_that_stands_out_of_the_scatter_is_judged() -> None:
    assert judgements(1.3, 1.0, 1.01, 0.99) == ["slower", "same", "same", "same", "same"]
    # As many went as far the other way: it is chance.
    assert judgements(1.3, 0.8, 1.2, 0.85) == ["same"] * 5
    assert judgements(0.7, 1.0, 1.01, 0.99)[0] == "faster"


def test_few_rounds_are_no_verdict_but_many_cases_are() -> None:
    assert judgements(1.3, 1.3, rounds=ENOUGH - 1) == ["unsure"] * 3
    many = judgements(*[1.3] * ENOUGH, rounds=ENOUGH - 1)
    assert many == ["unsure"] * ENOUGH + ["slower"]


def test_faster_is_no_alarm() -> None:
    rng = np.random.default_rng(4)
    comparison = compare(synthetic(rng), synthetic(rng, 0.6))
    assert [it.judgement for it in comparison.changes] == ["faster"]
    assert not comparison.slower


def test_a_small_change_is_none_however_sure() -> None:
    rng = np.random.default_rng(5)
    then, now = (synthetic(rng, noise=0.0) for _ in range(2))
    libraries = now["cases"]["case"]["libraries"]
    for name, library in then["cases"]["case"]["libraries"].items():
        factor = 1 + 0.9 * MIN_CHANGE if name == "fastattn" else 1.0
        libraries[name]["medians"] = [factor * it for it in library["medians"]]
    (change,) = compare(then, now).changes
    assert change.peers is not None
    assert change.peers.ratio.low == pytest.approx(1 + 0.9 * MIN_CHANGE)
    assert change.judgement == "same"


def test_the_limit_may_contradict_the_peers_and_judges_without_them() -> None:
    rng = np.random.default_rng(6)
    then, slow, same = synthetic(rng), synthetic(rng, 1.5), synthetic(rng)
    shares = [it["cases"]["case"]["libraries"]["fastattn"]["limit_shares"] for it in (slow, same)]
    contradicted = json.loads(json.dumps(slow))
    contradicted["cases"]["case"]["libraries"]["fastattn"]["limit_shares"] = shares[1]
    assert compare(then, slow).slower
    assert not compare(then, contradicted).slower
    for run in (then, slow):
        for peer in ("torch", "onnxruntime", "openvino"):
            run["cases"]["case"]["libraries"][peer]["version"] = str(id(run))
    comparison = compare(then, slow)
    assert comparison.slower
    assert comparison.changes[0].peers is None
    assert set(comparison.peers_left_out) == {"torch", "onnxruntime", "openvino"}


def test_a_yardstick_is_the_same_in_both_runs() -> None:
    rng = np.random.default_rng(7)
    then, now = synthetic(rng), synthetic(rng)
    libraries = now["cases"]["case"]["libraries"]
    libraries["torch"]["version"] = "2"
    libraries["openvino"]["chosen"] = "another way"
    libraries["onnxruntime"]["medians"].pop()  # it lagged
    assert compare(then, now).changes[0].used == ()
    libraries["torch"]["version"] = "1"
    assert compare(then, now).changes[0].used == ("torch",)


def test_what_cannot_be_compared_is_listed_with_its_reason() -> None:
    rng = np.random.default_rng(8)
    then, now = synthetic(rng), synthetic(rng)
    template = json.dumps(then["cases"]["case"])
    for name in ("old", "changed", "threads", "unable"):
        then["cases"][name] = json.loads(template)
    for name in ("new", "changed", "threads", "unable"):
        now["cases"][name] = json.loads(template)
    now["cases"]["changed"]["case"]["len_q"] += 1
    now["cases"]["threads"]["threads"] = 1
    now["cases"]["unable"]["libraries"]["fastattn"]["reason"] = "wrong"
    comparison = compare(then, now)
    assert [it.name for it in comparison.changes] == ["case"]
    assert comparison.left_out == {
        "old": "only in the earlier run",
        "new": "only in this run",
        "changed": "another case by that name: len_q changed",
        "threads": "2 threads then, 1 now",
        "unable": "fastattn was not timed in this run",
    }


def test_differences_of_the_surroundings_are_warned_about() -> None:
    rng = np.random.default_rng(9)
    then, now = synthetic(rng), synthetic(rng)
    assert compare(then, now).warnings == ()
    now["threads"] = 1
    now["machine"]["cpu"] = "another"
    now["versions"]["torch"] = "2"
    now["versions"]["fastattn"] = "2"  # that is what is compared
    warned = [warning.partition(":")[0] for warning in compare(then, now).warnings]
    assert warned == ["threads", "cpu", "version of torch"]


# The command line


@pytest.mark.parametrize(
    ("argument", "valid"),
    [("--cases", [*CASES, *MEMORY_CASES]), ("--group", [*GROUPS, "memory"]), ("--peers", PEERS)],
)
def test_bad_names_list_the_valid_ones(
    argument: str, valid: Iterable[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([argument, "nonsense"])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert "nonsense" in message
    assert all(name in message for name in valid)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", "0"], "--threads is at least 1, got 0"),
        (["--rounds", "0"], "--rounds is at least 1, got 0"),
        (["--peers", ","], "--peers names no library"),
        (["--json", "absent/run.json"], "--json: no folder"),
        (["--json", "."], "is a folder, expected a file"),
        (["--plots", "absent/plots"], "--plots: no folder"),
        (["--plots", "foreign.json"], "is a file, expected a folder"),
        (["--compare", "absent.json"], "absent.json cannot be read"),
        (["--compare", "foreign.json"], "was not written by this benchmark"),
        (["--errors", "--compare", "foreign.json"], "--compare needs times"),
    ],
)
def test_bad_arguments_end_it_before_any_work(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("foreign.json").write_text("{}")
    monkeypatch.setattr(cli, "Crew", lambda *_: pytest.fail("work began"))
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def chosen(*arguments: str) -> tuple[set[str], set[str]]:
    timed, memory = cli._selected(cli._arguments(arguments))
    return {case.name for case in timed}, set(memory)


def test_cases_are_chosen_by_name_group_speed_and_memory() -> None:
    quick = {name for name, case in CASES.items() if case.quick}
    assert quick
    every = {case.name for case in possible_cases(_host.available_cores())}
    assert chosen() == (every, set())
    assert chosen("--memory") == (every, set(MEMORY_CASES))
    assert chosen("--cases", "threads-64")[0] == {"threads-64"}
    assert chosen("--group", "scaling-threads")[0] <= every
    assert chosen("--group", "memory") == (set(), set(MEMORY_CASES))
    assert chosen("--cases", "tiny-4", "memory-512") == ({"tiny-4"}, {"memory-512"})
    assert chosen("--quick") == (quick, set())
    assert chosen("--quick", "--cases", "tiny-4", "--group", "causal")[0] < quick | {"tiny-4"}


def fake_runs(monkeypatch: pytest.MonkeyPatch, make: Callable[[Case], CaseRun]) -> None:
    monkeypatch.setattr(cli, "measure", lambda case, *_: make(case))


def test_exit_statuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"

    def took(seconds: float) -> Callable[[Case], CaseRun]:
        def run(case: Case) -> CaseRun:
            found = replace(case_run(fastattn=[seconds] * 5, torch=[1.0] * 5), case=case)
            found.libraries["fastattn"].limit_shares = [(0.5 / seconds, 1.0, 1.0)] * 5
            return found

        return run

    def wrong(case: Case) -> CaseRun:
        run = took(1.0)(case)
        run.libraries["fastattn"] = LibraryRun(reason="wrong", wrong=True)
        return run

    arguments = ["--cases", "tiny-4", "--peers", "fastattn,torch"]
    fake_runs(monkeypatch, took(1.0))
    assert cli.main([*arguments, "--json", str(before)]) == 0
    assert cli.main([*arguments, "--compare", str(before)]) == 0
    fake_runs(monkeypatch, took(1.3))
    assert cli.main([*arguments, "--compare", str(before), "--json", str(after)]) == cli.SLOWER
    assert set(json.loads(after.read_text())["cases"]) == {"tiny-4"}
    fake_runs(monkeypatch, wrong)
    assert cli.main(arguments) == cli.WRONG


def test_ctrl_c_keeps_what_is_finished(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(case: Case) -> CaseRun:
        if case.name == "tiny-4":
            return replace(case_run(fastattn=[1.0] * 5), case=case)
        if case.name == "tiny-16":
            return replace(case_run(fastattn=[1.0] * 2), case=case, interrupted=True)
        pytest.fail("it went on")

    fake_runs(monkeypatch, run)
    path, drawn = tmp_path / "run.json", []

    def draw(found: dict[str, Any], folder: Path) -> list[Path]:
        drawn.append(sorted(found["cases"]))
        return []

    monkeypatch.setattr(cli, "_drawing", lambda: draw)
    arguments = ["--cases", "tiny-4", "tiny-16", "dim-40", "--json", str(path), "--plots", str(tmp_path)]
    assert cli.main([*arguments, "--peers", "fastattn", "--memory"]) == 130
    cases = document.read(path)["cases"]
    assert {name: case["rounds"] for name, case in cases.items()} == {"tiny-4": 5, "tiny-16": 2}
    assert drawn == [["tiny-16", "tiny-4"]]
    assert "Interrupted" in capsys.readouterr().out


def test_a_real_ctrl_c_in_the_rounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def draw(progress: Any, task: Any, text: str) -> None:
        if "round 3" in text:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(cli, "_draw", draw)
    path = tmp_path / "run.json"
    arguments = ["--cases", "tiny-4", "tiny-16", "--peers", "numpy", "--json", str(path)]
    assert cli.main(arguments) == 130
    cases = document.read(path)["cases"]
    assert [(name, case["rounds"]) for name, case in cases.items()] == [("tiny-4", 2)]


def test_the_command_line_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    assert cli.main(["--cases", "tiny-4", "--peers", "numpy", "--rounds", "2", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "tiny-4" in printed
    assert max(map(len, printed.splitlines())) <= cli.FILE_WIDTH
    found = document.read(path)
    library = found["cases"]["tiny-4"]["libraries"]["numpy"]
    assert found["versions"]["numpy"] == np.__version__
    assert len(library["medians"]) == 2
    assert all(0 < low <= median for low, median in zip(library["mins"], library["medians"], strict=True))
    assert cli.main(["--cases", "tiny-4", "--peers", "numpy", "--rounds", "2", "--compare", str(path)]) == 0
    assert "fastattn was not timed in the earlier run" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux only")
def test_memory_stands_beside_the_times(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    names = ["memory-512", "memory-2048"]
    arguments = ["--cases", "tiny-4", *names, "--peers", "numpy", "--rounds", "1", "--json", str(path)]
    assert cli.main(arguments) == 0
    found = document.read(path)
    assert set(found["cases"]) == {"tiny-4"}
    extras = [found["memory"][name]["numpy"]["warm"]["extra"] for name in names]
    assert extras[1] > 2048**2 * 4 > extras[0]  # the formula stores the scores
    assert [found["memory_cases"][name]["len_q"] for name in names] == [512, 2048]


def test_ours_come_first_in_the_tables() -> None:
    assert list(PEERS)[: len(OURS)] == list(OURS)
