"""The command line of the benchmark."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rich")

from fastattn._machine import host
from fastattn.bench import cli, document
from fastattn.bench.case import Case
from fastattn.bench.cases import CASES, GROUPS, MEMORY_CASES, case_of_shape, possible_cases
from fastattn.bench.intervals import ENOUGH
from fastattn.bench.measure import Patience
from fastattn.bench.peers import OURS, PEERS
from fastattn.bench.records import CaseRun, LibraryRun
from tests.bench_runs import case_run


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
        (["--json", os.devnull], "is a device or a pipe, expected a file"),
        (["--json", "x" * 253], "x cannot be written: File name too long"),  # that of what is not finished
        (["--compare", "\x1b[2J"], "\\x1b[2J cannot be read"),
        (["--plots", "absent/plots"], "--plots: no folder"),
        (["--plots", "foreign.json"], "is a file, expected a folder"),
        (["--json", "x" * 300], "x cannot be written: File name too long"),
        (["--plots", "x" * 300], "x cannot be written: File name too long"),
        (["--gpu", "--json", "x" * 300], "x cannot be written: File name too long"),
        (["--compare", "absent.json"], "absent.json cannot be read"),
        (["--compare", "foreign.json"], "was not written by this benchmark"),
        (["--errors", "--compare", "foreign.json"], "--compare needs times"),
        (["--shape", "1,8,512,64"], "a shape is B,H[/K],L,S,D[/E], all of them at least 1, got 1,8,512,64"),
        (["--shape", "1,8,0,4,4"], "all of them at least 1, got 1,8,0,4,4"),
        (["--shape", "1,8/00,4,4,4"], "all of them at least 1, got 1,8/00,4,4,4"),
        (["--shape", "1,8/3,4,4,4"], "8 query heads cannot share 3 key/value heads evenly"),
        (["--shape", "1,1,4,4,4", "--cases", "tiny-4"], "in place of --cases and --group"),
        (["--key-lengths", "ragged"], "--key-lengths is about a --shape, and none is given"),
        (["--shape", "1,1,4,4,4", "--softcap", "0"], "--softcap is a positive number, got 0.0"),
        (["--shape", "1,1,4,4,4", "--window", "-1", "0"], "--window is two counts of keys, got -1 0"),
        (["--shape", "1,1,4,4,4", "--model-dim", "0"], "--model-dim is at least 1, got 0"),
        (["--shape", "1,1,4,8,4", "--document-length", "2"], "as many queries as keys"),
        (["--shape", "1,1,8,4,4", "--causal"], "some query has no key"),
        (["--shape", "1,1,4,4,4", "--page-size", "0"], "--page-size is at least 1, got 0"),
        (["--shape", "1,1,4,4,4", "--page-size", "3"], "the keys fill their pages, got pages of 3"),
        (["--shape", "1,1,4,4,4", "--step", "--page-size", "2"], "no key lengths and no pages"),
        (["--shape", "1,1,8,4,4", "--step"], "a step has L of the S keys"),
        (["--shape", "1,1,4,4,4", "--storage", "int8", "--layout", "bshd"], "in the layout bhsd, got bshd"),
        (["--shape", "1,1,4,4,4", "--backward", "--storage", "int8"], "gradients are timed of plain arrays"),
        (["--shape", "1,1,4,4,4", "--backward", "--model-dim", "8"], "and in no model"),
        (["--shape", "1,1,4,5,4", "--rule", "gla"], "a rule has as many queries as keys"),
        (["--shape", "1,1,4,4,4", "--rule", "gla", "--causal"], "no option but dtype, layout and cold"),
        (["--shape", "1,1,8,8,4", "--mask", "padding", "--window", "0", "0"], "some query has no key"),
        (["--shape", "1,1,1,900000000000,4"], "has arrays of 28800.0 GB in each of 7 libraries"),
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
    every = {case.name for case in possible_cases(host.available_cores())}
    assert chosen() == (every, set())
    assert chosen("--memory") == (every, set(MEMORY_CASES))
    assert chosen("--cases", "threads-64")[0] == {"threads-64"}
    assert chosen("--group", "scaling-threads")[0] <= every
    assert chosen("--group", "memory") == (set(), set(MEMORY_CASES))
    assert chosen("--cases", "tiny-4", "memory-512") == ({"tiny-4"}, {"memory-512"})
    assert chosen("--quick") == (quick, set())
    assert chosen("--quick", "--cases", "tiny-4", "--group", "causal")[0] < quick | {"tiny-4"}


@pytest.mark.parametrize("name", CASES)
def test_a_shape_is_read_as_it_is_printed(name: str) -> None:
    case, sizes = CASES[name], ("batch", "heads", "kv_heads", "len_q", "len_k", "head_dim", "value_dim")
    own = case_of_shape(case.shape)
    assert [getattr(own, size) for size in sizes] == [getattr(case, size) for size in sizes]
    assert own.name == own.shape == case.shape


#: Options of a case of one's own, and what they mean.
OWN = {
    "--causal": {"causal": True},
    "--window 3 0": {"window": (3, 0)},
    "--key-lengths ragged": {"key_lengths": "ragged"},
    "--document-length 4": {"document_length": 4},
    "--mask random": {"mask": "random"},
    "--bias per_head": {"bias": "per_head"},
    "--softcap 2.5": {"softcap": 2.5},
    "--dtype float64": {"dtype": "float64"},
    "--dtype bfloat16": {"dtype": "bfloat16"},
    "--storage int8": {"storage": "int8"},
    "--page-size 4 --key-lengths ragged": {"page_size": 4, "key_lengths": "ragged"},
    "--step --dtype float16": {"step": True, "dtype": "float16"},
    "--backward": {"backward": True},
    "--rule gla --layout bshd": {"rule": "gla", "layout": "bshd"},
    "--layout bshd": {"layout": "bshd"},
    "--cold": {"cold": True},
    "--model-dim 48": {"model_dim": 48},
    "--causal --softcap 3 --bias shared": {"causal": True, "softcap": 3.0, "bias": "shared"},
}


@pytest.mark.parametrize("words", OWN)
def test_options_beside_a_shape_are_fields_of_the_case(words: str) -> None:
    shapes = ["2,4/2,16,16,8", "3,4,16,16,8/4"]
    timed, memory = cli._selected(cli._arguments(["--shape", *shapes, *words.split()]))
    assert timed == [case_of_shape(shape, **OWN[words]) for shape in shapes]
    assert all(getattr(case, field) == value for case in timed for field, value in OWN[words].items())
    assert memory == []


def test_every_option_of_a_shape_is_tried() -> None:
    assert {field for fields in OWN.values() for field in fields} == set(cli._SHAPE_FIELDS)


def fake_runs(monkeypatch: pytest.MonkeyPatch, make: Callable[[Case], CaseRun]) -> None:
    monkeypatch.setattr(cli, "measure", lambda case, *_: make(case))


def test_quick_runs_have_the_rounds_of_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Patience] = []

    def run(case: Case, crew: Any, names: Any, patience: Patience, notify: Any) -> CaseRun:
        asked.append(patience)
        return replace(case_run(fastattn=[1.0]), case=case)

    monkeypatch.setattr(cli, "measure", run)
    monkeypatch.setattr(cli, "QUICK_SECONDS", 0.0)  # there is no time left, as on a slow machine
    assert cli.main(["--quick", "--peers", "fastattn"]) == 0
    assert len(asked) > 5
    assert all(not it.ended(ENOUGH - 1, 100.0, 1000.0, 0.0) for it in asked)
    assert all(it.ended(ENOUGH, 1.0, 10.0, 1.0) for it in asked)


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


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_real_interrupt_in_the_rounds(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def draw(progress: Any, task: Any, text: str) -> None:
        if "round 3" in text:
            signal.raise_signal(number)

    monkeypatch.setattr(cli, "_draw", draw)
    handler = signal.getsignal(signal.SIGTERM)
    path = tmp_path / "run.json"
    arguments = ["--cases", "tiny-4", "tiny-16", "--peers", "numpy", "--json", str(path)]
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    try:
        assert cli.main(arguments) == 130
    finally:
        signal.signal(signal.SIGINT, inherited)
    cases = document.read(path)["cases"]
    assert [(name, case["rounds"]) for name, case in cases.items()] == [("tiny-4", 2)]
    assert signal.getsignal(signal.SIGTERM) is handler


def test_what_is_finished_is_written_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, written = tmp_path / "run.json", []

    def run(case: Case) -> CaseRun:
        written.append(list(document.read(path)["cases"]) if path.exists() else [])
        return replace(case_run(fastattn=[1.0]), case=case)

    fake_runs(monkeypatch, run)
    assert cli.main(["--cases", "tiny-4", "tiny-16", "--peers", "fastattn", "--json", str(path)]) == 0
    assert written == [[], ["tiny-4"]]


@pytest.mark.slow
def test_the_command_line_measures_and_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    fake_runs(monkeypatch, lambda case: replace(case_run(fastattn=[1.0] * 2, numpy=[1.0] * 2), case=case))
    assert cli.main(["--cases", "tiny-4", "--peers", "numpy", "--rounds", "2", "--compare", str(path)]) == 0
    assert "fastattn was not timed in the earlier run" in capsys.readouterr().out


def columns(printed: str, title: str) -> list[str]:
    """The heads of the table whose first column is called `title`; none where there is no such table."""
    heads = [line.split(title)[1].split() for line in printed.splitlines() if line.strip().startswith(title)]
    return heads[0] if heads else []


def test_a_library_has_a_column_where_it_took_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(case: Case) -> CaseRun:
        names = ["fastattn", "torch"] if case.model_dim is None else ["fastattn", "fastattn-shared", "torch"]
        found = replace(case_run(**{name: [1.0] * 5 for name in names}), case=case)
        for library in found.libraries.values():
            library.products = [] if case.model_dim is None else [0.02] * 5
        return found

    fake_runs(monkeypatch, run)
    assert cli.main(["--cases", "tiny-4"]) == 0
    printed = capsys.readouterr().out
    assert columns(printed, "time of one call") == ["fastattn", "torch"]
    assert columns(printed, "time of the products around it") == []
    assert cli.main(["--cases", "tiny-4", "vit-197-in-model"]) == 0
    printed = capsys.readouterr().out
    assert columns(printed, "time of one call") == ["fastattn", "fastattn-shared", "torch"]
    assert columns(printed, "time of the products around it") == ["fastattn", "fastattn-shared", "torch"]
    assert "20.0 ms" in printed


@pytest.mark.slow
def test_a_shape_of_ones_own_goes_to_stdout_as_csv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, shape = tmp_path / "run.json", "2,4/2,5,9,8/4"
    arguments = ["--shape", shape, "--causal", "--softcap", "3", "--peers", "numpy,fastattn-reference"]
    wanted = [*arguments, "--rounds", "2", "--format", "csv", "--json", str(path)]
    assert cli.main(wanted) == 0
    found = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    cases = document.read(path)["cases"]
    assert [(row["case"], row["options"]) for row in found] == [(shape, "causal, soft-cap 3")] * 2
    assert {row["library"]: float(row["seconds"]) for row in found} == cases[shape]["summary"]["seconds"]
    assert {row["reason"] for row in found} == {""}
    assert cli.main([*wanted, "--compare", str(path)]) == 0
    printed = capsys.readouterr()
    assert len(list(csv.DictReader(io.StringIO(printed.out)))) == 2  # and nothing else
    assert "fastattn was not timed" in printed.err


def test_nobody_is_told_what_the_project_wants(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_runs(monkeypatch, lambda case: replace(case_run(fastattn=[1.0] * 5, torch=[0.5] * 5), case=case))
    monkeypatch.setattr(cli, "check", lambda case, *_: replace(case_run(fastattn=[], torch=[]), case=case))
    printed = ""
    for arguments in ([], ["--errors"], ["--list"], ["--format", "markdown"]):
        assert cli.main([*arguments, "--cases", "square-512-64", "mask-random"]) == 0
        printed += capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    printed += capsys.readouterr().out
    assert "square-512-64" in printed
    assert not re.search(r"target|goal|≥|≤|\bpass\b|\bfail", printed, re.IGNORECASE)


@pytest.mark.slow
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
