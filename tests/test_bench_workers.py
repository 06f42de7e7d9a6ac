"""The processes of the benchmark: what a worker times, and that none outlives its use."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rich")

from fastattn.backends.cython import backend as cython_backend
from fastattn.bench import probes, worker
from fastattn.bench.case import Case, Inputs, Layer, make_inputs
from fastattn.bench.cases import CASES
from fastattn.bench.limits import ON_TILES
from fastattn.bench.oracle import expected_output
from fastattn.bench.peers import Call, Peer, Products, Unable
from fastattn.bench.process import ROOT, Crew, Worker, WorkerError
from tests.bench_runs import CASE

needs_kernels = pytest.mark.skipif(
    bool(cython_backend.backend.unavailable_reasons()), reason="the extension is not built"
)
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


class FourWays(Peer):
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
        monkeypatch.setattr(worker, "load_peer", lambda name, num_threads: peer)
        monkeypatch.setattr(worker, "SETTLE_SECONDS", 0.0)
        monkeypatch.setattr(worker, "WARM_UP_SECONDS", 0.0)
        held = worker.LibraryWorker("numpy", 1)
        return held, held.prepare(asdict(case), path)

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


class Coarser(Peer):
    """A library that keeps keys and values in steps of a quarter, and computes well with them."""

    version = "1"

    def __init__(self) -> None:
        self.ways = {
            "told": lambda case, inputs: self._call(case, inputs, tells=True),
            "not told": lambda case, inputs: self._call(case, inputs, tells=False),
            "told, and wrong": lambda case, inputs: self._call(case, inputs, tells=True, factor=1.001),
        }

    @staticmethod
    def _call(case: Case, inputs: Inputs, *, tells: bool, factor: float = 1.0) -> Call:
        _, *given = inputs.bhsd(case)
        key, value = (np.rint(it * 4).astype(np.float32) / 4 for it in given)
        held = replace(inputs, key=key, value=value)
        out = (expected_output(case, held) * factor).astype(np.float32)
        return Call(lambda: None, lambda: out, (lambda: (key, value)) if tells else None)


@pytest.mark.parametrize("stored", [{"storage": "int8"}, {"page_size": 4}])
def test_a_library_is_held_against_what_it_holds(stored: dict[str, Any], prepare: Callable[..., Any]) -> None:
    _, found = prepare(replace(CASE, **stored), Coarser())
    assert found["chosen"] == "told"
    assert found["ways"]["told"]["error"] < found["tolerance"]
    for label in ("not told", "told, and wrong"):
        assert found["ways"][label]["reason"].startswith("wrong: largest error")


class Recording(Peer):
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


class InModel(Peer):
    """A library that notes what it does and moves the clock: 5 s and 2 s of products, 1 s of attention."""

    version = "1"

    def __init__(self) -> None:
        self.done: list[str] = []
        self.seconds = 0.0
        self.error = 0.0  #: of the product before attention
        self.ways = {"way": self._way, "another": self._way}

    def _do(self, what: str, seconds: float) -> None:
        self.done.append(what)
        self.seconds += seconds

    def _way(self, case: Case, inputs: Inputs) -> Call:
        out = expected_output(case, inputs).astype(np.float32)

        def result() -> np.ndarray:
            self._do("result", 1.0)
            return out

        return Call(lambda: self._do("attention", 1.0), result)

    def products(self, layer: Layer) -> Products:
        def before() -> np.ndarray:
            self._do("before", 5.0)
            return layer.rows @ layer.w_qkv + np.float32(self.error)

        return Products(before, lambda: self._do("after", 2.0))


IN_MODEL = replace(CASE, model_dim=48)


def test_in_a_model_attention_alone_is_timed_between_products(
    prepare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = InModel()
    monkeypatch.setattr(worker.time, "perf_counter", lambda: peer.seconds)
    held, found = prepare(IN_MODEL, peer)
    # Every way is checked where it is timed.
    checks = [place for place, what in enumerate(peer.done) if what == "result"]
    assert [peer.done[place - 1] for place in checks] == ["before"] * 2
    assert found["ways"]["way"]["seconds"] == 1.0
    assert found["ways"]["way"]["products"] == 7.0
    peer.done.clear()
    took = held.time(IN_MODEL.name, calls=4, seconds=1e-6)  # so short that alone it would be timed in blocks
    assert took == {"median": 1.0, "min": 1.0, "products": 7.0}
    rounds = len(peer.done) // 3
    assert rounds > 4, "it was not warmed up"
    assert peer.done == ["before", "attention", "after"] * rounds


def test_alone_there_are_no_products(prepare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    peer = InModel()
    monkeypatch.setattr(worker.time, "perf_counter", lambda: peer.seconds)
    held, found = prepare(CASE, peer)
    assert held.time(CASE.name, calls=4, seconds=1.0) == {"median": 1.0, "min": 1.0, "products": None}
    assert found["ways"]["way"]["products"] == 0.0
    assert set(peer.done) == {"result", "attention"}


@pytest.mark.parametrize("error", [1e-2, np.nan])
def test_attention_beside_a_wrong_product_is_not_timed(error: float, prepare: Callable[..., Any]) -> None:
    peer = InModel()
    peer.error = error
    _, found = prepare(IN_MODEL, peer)
    assert found["chosen"] is None
    assert found["ways"]["way"]["reason"] == "wrong: the product before attention"


@pytest.mark.slow
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
    for name, limit in {"fma_peak": "compute", "read_bandwidth": "memory"}.items():
        value = work / 10.0 if limit == kind else 1e-30
        monkeypatch.setattr(probes, name, lambda *_, value=value: value)
    held, _ = prepare(CASE, FourWays())
    monkeypatch.setattr(worker, "_time_blocks", lambda run, calls, block: [20.0])
    shares = held.limit_shares(CASE.name, kind, 0.0)
    assert [share for share, _, _ in shares] == [pytest.approx(0.5)] * len(shares)


@needs_kernels
def test_limits_are_the_best_of_the_probes_for_one_thread_and_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turn = itertools.cycle([1.0, 3.0, 2.0])

    def probe(*arguments: Any) -> float:
        *_, num_threads, _ = arguments
        return num_threads * next(turn)

    monkeypatch.setattr(probes, "fma_peak", probe)
    monkeypatch.setattr(probes, "read_bandwidth", probe)
    monkeypatch.setattr(probes, "tile_peak", probe)
    held = worker.LimitsWorker(4)
    expected = {"1": 3.0, "4": 12.0}
    for has_tiles in (False, True):
        monkeypatch.setattr(probes, "has_tile_unit", lambda has_tiles=has_tiles: has_tiles)
        of_vectors = {"float32": expected, "float64": expected}
        assert held.fma() == (of_vectors | {ON_TILES: expected} if has_tiles else of_vectors)
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
@pytest.mark.parametrize("busy", [pytest.param(False, marks=pytest.mark.slow), True])
def test_no_worker_outlives_a_killed_parent(busy: bool, tmp_path: Path) -> None:
    script = (
        "from dataclasses import asdict\n"
        "from fastattn.bench.cases import CASES\n"
        "from fastattn.bench.process import Worker; import os, signal, threading, time\n"
        "held = Worker('oracle', 1)\n"
        f"work = dict(case=asdict(CASES['long-64k']), path={str(tmp_path / 'answer.npy')!r})\n"
        f"if {busy}: threading.Thread(target=lambda: held.ask('expected', **work), daemon=True).start()\n"
        "else: held.ask('expected', **work | dict(case=asdict(CASES['tiny-4'])))\n"
        "print(held._process.pid, flush=True)\n"
        "time.sleep(0.5)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    pid = int(done.stdout)
    deadline = time.monotonic() + 30  # the work would take minutes
    while process_state(pid) not in ("gone", "Z") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process_state(pid) in ("gone", "Z")
