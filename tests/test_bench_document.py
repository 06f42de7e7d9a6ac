"""The JSON document of a run, and the comparison of two."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rich")

from fastattn.bench import document
from fastattn.bench.compare import ALL_CASES, MIN_CHANGE, CaseChange, compare
from fastattn.bench.intervals import ENOUGH
from tests.bench_runs import CASE, case_run, limits

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


def test_a_link_stays_and_its_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to("run.json")
    document.write(tmp_path / "link.json", {})
    assert (tmp_path / "link.json").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "run.json"]


def test_names_in_a_file_command_neither_terminal_nor_markup(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    from rich.console import Console

    from fastattn.bench.report import print_comparison

    now = document.build(2, [case_run(fastattn=[1.0])], {})
    then = json.loads(json.dumps(now))
    then["machine"]["cpu"] = "[/]\x1b[2J"
    then["cases"]["[/red]\x1b"] = then["cases"]["case"]
    then["cases"]["case"]["libraries"]["[/x]\x1b"] = then["cases"]["case"]["libraries"]["fastattn"]
    print_comparison(Console(width=300), compare(then, now), "it")
    shown = capsys.readouterr().out
    assert shown.replace("\n", "").isprintable()
    assert all(text in shown for text in ("[/]\\x1b[2J then", "[/red]\\x1b not", "[/x]\\x1b"))


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
        ("[" * 10**5, "is not JSON"),
        (json.dumps({"schema": "x" * 10**6}), "has schema 'x{59};"),
        (broken(medians=[10**400]), "should hold positive numbers"),
        (broken(medians=[math.inf]), "should hold positive numbers"),
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


@pytest.mark.slow
def test_equal_runs_raise_hardly_an_alarm() -> None:
    assert alarms(1.0) <= 0.01


@pytest.mark.slow
def test_the_slower_the_surer_it_is_caught() -> None:
    caught = [alarms(ours, pairs=40) for ours in (1.03, 1.2, 1.3)]
    assert caught[0] <= 0.05
    assert caught[1] >= 0.7
    assert caught[2] >= 0.98


@pytest.mark.slow
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


def changes(*factors: float, rounds: int = 8) -> list[CaseChange]:
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
    return [*comparison.changes, comparison.overall]


def judgements(*factors: float, rounds: int = 8) -> list[str]:
    return [it.judgement for it in changes(*factors, rounds=rounds)]


def test_a_case_that_stands_out_of_the_scatter_is_judged() -> None:
    assert judgements(1.3, 1.0, 1.01, 0.99) == ["slower", "same", "same", "same", "same"]
    # As many went as far the other way: it is chance.
    assert judgements(1.3, 0.8, 1.2, 0.85) == ["same"] * 5
    assert judgements(0.7, 1.0, 1.01, 0.99)[0] == "faster"


def test_few_rounds_are_no_verdict_but_many_cases_are() -> None:
    assert judgements(1.3, 1.3, rounds=ENOUGH - 1) == ["unsure"] * 3
    many = judgements(*[1.3] * ENOUGH, rounds=ENOUGH - 1)
    assert many == ["unsure"] * ENOUGH + ["slower"]
    assert judgements(1.3, 1.0, 1.0, rounds=ENOUGH)[0] == "slower"


def test_what_decided_is_told_in_words() -> None:
    slower, same, *_ = changes(1.3, 1.0, 1.01)
    assert slower.reason == (
        "our time over that of torch, onnxruntime, openvino: +30%; "
        "our time over the least that the machine allowed: +30%, which agrees"
    )
    assert same.reason == ""
    unsure, _, both = changes(1.3, 1.3, rounds=ENOUGH - 1)
    assert unsure.reason.endswith(f"a verdict takes {ENOUGH} rounds in each run")
    assert both.reason.startswith("our time over that of the peers of each case: +30%")
    assert both.reason.endswith(f"a verdict takes {ENOUGH} cases")


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
    agreed, denied = (compare(then, now).changes[0] for now in (slow, contradicted))
    peers = "our time over that of torch, onnxruntime, openvino: +"
    assert agreed.reason.startswith(peers) and agreed.reason.endswith("which agrees")
    assert denied.reason.startswith(peers) and denied.reason.endswith("which contradicts")
    for run in (then, slow):
        for peer in ("torch", "onnxruntime", "openvino"):
            run["cases"]["case"]["libraries"][peer]["version"] = str(id(run))
    comparison = compare(then, slow)
    assert comparison.slower
    assert comparison.changes[0].peers is None
    assert comparison.changes[0].reason.startswith("the runs share no peer; our time over the least that")
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
