"""The figures of the benchmark: intervals, limits, ratios, and how many rounds it takes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rich")

from fastattn.bench import measure
from fastattn.bench.case import Case
from fastattn.bench.intervals import (
    COVERAGE,
    ENOUGH,
    change_interval,
    geometric_mean_interval,
    median_interval,
)
from fastattn.bench.limits import bounds, medians
from fastattn.bench.measure import LAGGING, TRIAL_ROUNDS, Patience
from fastattn.bench.process import WorkerError
from fastattn.bench.records import CaseRun, LibraryRun
from fastattn.bench.summary import disturbed_probes, geometric_means, summarise
from fastattn.bench.worker import LIMITS
from tests.bench_runs import CASE, case_run, limits

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


@pytest.mark.slow
def test_enough_rounds_are_the_fewest_that_can_tell_a_change_from_chance() -> None:
    """Equal runs look surely slower no more often than the interval leaves on that side."""
    rng = np.random.default_rng(0)

    def false_alarms(rounds: int) -> float:
        pairs = rng.normal(1.0, 0.05, (1500, 2, rounds))
        return float(np.mean([change_interval(then, now).low > 1 for then, now in pairs]))

    assert false_alarms(ENOUGH) <= (1 - COVERAGE) / 2 < false_alarms(ENOUGH - 1)


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

    def __init__(self, name: str, times: Iterator[float], asked: list[tuple[str, dict[str, Any]]]) -> None:
        self.name, self.times, self.asked = name, times, asked

    def ask(self, command: str, **arguments: Any) -> Any:
        self.asked.append((command, arguments))
        if command == "prepare":
            ways = {"way": {"error": 0.0, "rms_error": 0.0, "seconds": next(self.times), "products": 7e-3}}
            return {"version": "1", "chosen": "way", "tolerance": 1.0, "copies": 1, "ways": ways}
        if command == "time":
            seconds = next(self.times)
            return {"median": seconds, "min": seconds, "products": 7e-3}
        if command == "limit_shares":
            return [[0.5, 1.0, 1.0]]
        return limits()[command]


class FakeCrew:
    """Has a `FakeWorker` for each name."""

    def __init__(self, **times: Iterable[float]) -> None:
        self.times = {LIMITS: iter(()), **{name: iter(it) for name, it in times.items()}}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.released = False

    def threads(self, case: Case) -> int:
        return case.threads or 2

    def worker(self, name: str, num_threads: int) -> FakeWorker:
        return FakeWorker(name, self.times[name], self.asked)

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


def test_the_products_of_a_model_belong_to_a_burst_and_are_kept() -> None:
    crew: Any = FakeCrew(fastattn=itertools.repeat(1e-3), torch=itertools.repeat(1e-3))
    case = replace(CASE, model_dim=48, baseline=None)
    run = measure.measure(case, crew, ["fastattn", "torch"], Patience(seconds=60))
    calls = {arguments["calls"] for command, arguments in crew.asked if command == "time"}
    assert calls == {round(measure.BURST_SECONDS / 8e-3)}
    assert run.libraries["torch"].products == [7e-3] * run.rounds
    # The probes would meet the threads that spin after a product.
    assert not [command for command, _ in crew.asked if command == "limit_shares"]
    limit = summarise(run).limit
    assert limit is not None
    assert limit.share is None


def test_shared_threads_are_not_asked_about_attention_alone() -> None:
    names = ["fastattn", "fastattn-shared"]
    for case, taking_part in ((CASE, names[:1]), (replace(CASE, model_dim=48), names)):
        crew: Any = FakeCrew(**{name: itertools.repeat(1e-3) for name in names})
        run = measure.measure(replace(case, baseline=None), crew, names, Patience(seconds=60))
        assert list(run.libraries) == taking_part


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
    assert ENOUGH < run.rounds <= 12
    clock = itertools.count(step=1000)
    run = run_fake(Patience(seconds=12), fastattn=noisy(1.0, 0.5, 1), torch=noisy(1.0, 0.5, 2))
    assert run.rounds == ENOUGH


def test_a_lagging_peer_is_timed_in_the_first_rounds_only() -> None:
    fixed = {
        name: itertools.repeat(seconds)
        for name, seconds in (("fastattn", 9.0), ("torch", 1.0), ("numpy", 1.1 * LAGGING))
    }
    run = run_fake(Patience(seconds=60), **fixed)
    counts = {name: len(library.medians) for name, library in run.libraries.items()}
    assert counts == {"fastattn": ENOUGH, "torch": ENOUGH, "numpy": TRIAL_ROUNDS}
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
