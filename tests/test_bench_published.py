"""What is published says what was measured: the figures of both pages, the pictures, the kept files."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from benchmarks import targets
from benchmarks.publish import (
    PAGE,
    README,
    RESULTS,
    SHORT,
    TELLING,
    as_text,
    compact,
    disagreements,
    figure,
    kept,
    main,
    marks,
    publish,
    replaced,
    section,
    summary,
)
from fastattn.bench import plots
from fastattn.bench.cases import CASES
from fastattn.bench.document import build
from fastattn.bench.plots import Picture, digest
from fastattn.bench.records import LibraryRun
from tests.bench_results import make_document
from tests.bench_runs import case_run
from tests.process import ROOT

#: Where the made-up results are kept.
FILE = RESULTS / "made-up.json"

#: Some of the catalogue and a curve: enough for every picture but the roofline of all.
SOME = [*map(CASES.__getitem__, ("square-512-64", "bert-batch", "llama-decode")), CASES["head-dim-16"]]


@pytest.mark.slow
def test_pages_and_pictures_say_what_the_kept_results_say(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--check"])
    assert (status, capsys.readouterr().out) == (0, "Pages and pictures say what the results say.\n")


def test_the_command_says_what_disagrees(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.publish.disagreements", lambda root: iter([f"{root}: one", "two"]))
    status = main(["--check"])
    assert (status, capsys.readouterr().out) == (1, f"{ROOT}: one\ntwo\n")


def test_rows_of_the_tables_are_cases() -> None:
    assert set(TELLING) | set(SHORT) <= set(CASES)


@pytest.fixture(scope="module", autouse=True)
def drawn_once() -> Iterator[None]:
    """The pictures of the same results are the same: they are drawn again only for files."""
    drawn: dict[str, list[Picture]] = {}

    def pictures(document: dict[str, Any]) -> list[Picture]:
        key = digest(document)
        if key not in drawn:
            drawn[key] = plots.pictures(document)
        return drawn[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.publish.pictures", pictures)
        yield


@pytest.fixture(scope="module")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like this project's, with made-up results published in it."""
    root = tmp_path_factory.mktemp("pattern")
    for file, names in {README: ("Figure", "Speed"), PAGE: ("Speed",)}.items():
        parts = "\n\nBetween.\n\n".join("\nlast year\n".join(marks(name)) for name in names)
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).write_text(f"# Title\n\nBefore.\n\n{parts}\n\nAfter.\n")
    publish(root, compact(make_document(SOME)))
    assert list(disagreements(root)) == []
    return root


@pytest.fixture
def published(pattern: Path, tmp_path: Path) -> Path:
    """A copy of the pattern, to be changed."""
    shutil.copytree(pattern, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.slow
def test_publishing_leaves_the_rest_of_the_pages_alone(published: Path) -> None:
    texts = {file: (published / file).read_text() for file in (README, PAGE)}
    for text in texts.values():
        assert text.startswith("# Title\n\nBefore.\n\n")
        assert text.endswith("\n\nAfter.\n")
        assert "last year" not in text
    assert "\n\nBetween.\n\n" in texts[README]
    publish(published)
    assert {file: (published / file).read_text() for file in texts} == texts


def edit_readme(root: Path) -> None:
    path = root / README
    path.write_text(re.sub(r"(\d)\.(\d\d) \(", r"\g<1>.99 (", path.read_text(), count=1))


def edit_page(root: Path) -> None:
    path = root / PAGE
    path.write_text(re.sub(r"(\d) %", r"\g<1>9 %", path.read_text(), count=1))


def edit_results(root: Path) -> None:
    path = root / FILE
    document = json.loads(path.read_text())
    document["cases"]["bert-batch"]["summary"]["seconds"]["fastattn"] *= 1.01
    path.write_text(json.dumps(document))


def rename_case(root: Path) -> None:
    path = root / FILE
    path.write_text(path.read_text().replace('"bert-batch"', '"bart-batch"'))


def change_case(root: Path) -> None:
    path = root / FILE
    path.write_text(path.read_text().replace("32,12,128,128,64", "32,12,128,128,65"))


def lose_picture(root: Path) -> None:
    (root / RESULTS / "ratios.png").unlink()


def add_picture(root: Path) -> None:
    (root / RESULTS / "extra.png").write_bytes((root / RESULTS / "ratios.png").read_bytes())


CHANGES = {
    edit_readme: ["README.md: the figures"],
    edit_page: ["docs/benchmarks.md: the figures"],
    edit_results: ["docs/benchmarks.md: the figures", "ratios.png: was drawn from other results"],
    rename_case: ["there is no case bart-batch any more"],
    change_case: ["the case bert-batch is another one now"],
    lose_picture: ["ratios.png: is missing"],
    add_picture: ["extra.png: the results have no such picture"],
}
#: The results of these have other pictures, which are drawn.
DRAWN_AGAIN = (edit_results, rename_case, change_case)


@pytest.mark.parametrize(
    "change", [pytest.param(it, marks=pytest.mark.slow) if it in DRAWN_AGAIN else it for it in CHANGES]
)
def test_a_disagreement_is_named(change: Callable[[Path], None], published: Path) -> None:
    change(published)
    found = "\n".join(disagreements(published))
    for text in CHANGES[change]:
        assert text in found


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_publishing_again_makes_it_good(change: Callable[[Path], None], published: Path) -> None:
    """But it cannot bring a case back."""
    change(published)
    publish(published)
    left = [text for text in disagreements(published) if "case" not in text]
    assert left == []


@pytest.mark.parametrize("text", ["nothing", "{0}", "{1}", "{1}\n{0}", "{0}\n{0}\n{1}", "{0}\n{1}\n{1}"])
def test_a_page_without_its_marks_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape("must have these lines once")):
        replaced(text.format(*marks("Speed")), "Speed", "new")


@pytest.mark.slow
def test_the_kept_file_is_small_and_has_a_line_for_each_case() -> None:
    document = make_document(rounds=15)
    text = as_text(compact(document))
    assert len(text) < 3500 * len(document["cases"])
    assert all(
        sum(f'"{name}": {{"case"' in line for line in text.splitlines()) == 1 for name in document["cases"]
    )
    assert json.loads(text) == compact(document)


def test_what_is_kept_is_what_was_measured() -> None:
    document = make_document(SOME)
    kept = compact(document)
    assert compact(kept) == kept
    assert {name for name in document if name != "cases"} == {name for name in kept if name != "cases"}
    for name, run in document["cases"].items():
        assert kept["cases"][name]["summary"]["best"] == run["summary"]["best"]
        for library, found in run["libraries"].items():
            medians = kept["cases"][name]["libraries"][library]["medians"]
            assert medians == pytest.approx(found["medians"], rel=1e-4)
            assert medians != found["medians"]


def rows(document: dict[str, Any]) -> dict[str, list[str]]:
    """The cells of the table by the name of the case."""
    text = section([document], []).partition("The fastest peer")[0]
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_the_table_shows_the_figures() -> None:
    document = make_document(SOME)
    run = document["cases"]["square-512-64"]
    run["summary"] |= {
        "seconds": {"fastattn": 2.6851e-3, "torch": 3.4e-3, "jax": 5e-3},
        "ratios": {
            "torch": {"median": 1.2455, "low": 1.2, "high": 1.3},
            "jax": {"median": 2, "low": 2, "high": 2},
        },
        "best": "torch",
        "limit": {"kind": "compute", "seconds": 2e-3, "share": {"median": 0.744, "low": 0.7, "high": 0.8}},
    }
    found = rows(document)
    assert list(found) == ["square-512-64", "bert-batch", "llama-decode"]
    assert found["square-512-64"] == ["1,8,512,512,64", "", "2.69 ms", "1.25", "74 %"]
    assert found["llama-decode"][-1].endswith(" % (memory)")


def test_the_table_says_what_it_lacks() -> None:
    document = copy.deepcopy(make_document(SOME, libraries=["fastattn"]))
    document["cases"]["square-512-64"]["summary"]["limit"] = None
    document["cases"]["bert-batch"]["summary"]["limit"]["share"] = None
    found = rows(document)
    assert found["square-512-64"][-2:] == ["-", "-"]
    assert found["bert-batch"][-2:] == ["-", "-"]
    assert "| `bert-batch` | - |" in section([document], [])


def test_another_machine_has_a_column() -> None:
    newest, other = make_document(SOME), make_document(SOME[:2])
    other["machine"]["name"] = "Older (2 cores)"
    other["date"] = "2025-01-01T00:00:00+00:00"
    ratio = {"median": 1.234, "low": 1.1, "high": 1.3}
    other["cases"]["bert-batch"]["summary"] |= {"best": "jax", "ratios": {"jax": ratio}}
    text = section([newest, other], [])
    assert "| fastest peer / ours | Made up | Older (2 cores) |" in text
    assert "Older (2 cores) (A made-up CPU), 2 threads on 2 cores, 2025-01-01" in text
    assert "all in [older-2-cores.json](../benchmarks/results/older-2-cores.json)." in text
    last = {line.split("`")[1]: line.split(" | ")[-1] for line in text.splitlines() if line.startswith("| `")}
    assert (last["bert-batch"], last["llama-decode"]) == ("1.23 (jax) |", "- |")


def with_ratios(ratios: dict[str, tuple[float, float, float]]) -> dict[str, Any]:
    """Made-up results whose one peer has these medians and intervals."""
    document = make_document([CASES[name] for name in ratios], ["fastattn", "torch"])
    for name, (median, low, high) in ratios.items():
        ratio = {"median": median, "low": low, "high": high}
        document["cases"][name]["summary"]["ratios"]["torch"] = ratio
    return document


def test_what_is_equal_or_slower_is_said() -> None:
    ratios = {
        "square-2048-64": (2.0, 1.9, 2.1),
        "bert-batch": (1.04, 0.98, 1.1),
        "tiny-16": (0.5, 0.4, 0.6),
        "square-512-64": (1.0, 1.0, 1.0),
    }
    document = with_ratios(ratios)
    text = summary([document], [])
    assert text.splitlines()[:2] == ["| fastest peer's time / ours | Made up |", "| --- | --- |"]
    assert f"| {SHORT['square-2048-64']} | 2.00 (torch) |" in text
    assert f"| {SHORT['bert-batch']} | 1.04 (torch, equal) |" in text
    assert f"| {SHORT['tiny-16']} | 0.50 (torch) |" in text
    counts = "faster than the fastest peer in 1, equal in 2, slower in 1 of 4 cases"
    said = f"* Made up, 2 threads, 2026-11-21: {counts}. Slower: `tiny-16` 0.50 (torch)"
    assert said in text.splitlines()
    assert said in section([document], []).splitlines()
    assert plots.pictures(document)[0].title == f"Made up: {counts}"


def test_nothing_is_said_of_losses_that_there_are_not() -> None:
    text = summary([with_ratios({"tiny-16": (2.0, 1.9, 2.1)})], [])
    assert text.splitlines()[-1].endswith(": faster than the fastest peer in 1 of 1 cases")


def test_the_figure_is_the_geometric_mean() -> None:
    first = with_ratios({"tiny-16": (4.0, 3.0, 5.0), "bert-batch": (1.0, 0.9, 1.1)})
    second = with_ratios({"tiny-16": (0.5, 0.4, 0.6), "bert-batch": (0.5, 0.4, 0.6)})
    second["machine"]["name"] = "Other"
    assert figure([first, second]) == (
        "**torch takes 2.00 times as long as fastattn on Made up, 0.50 times on Other** "
        "(geometric means over 2 cases: [Speed](#speed))."
    )
    third = with_ratios({"tiny-16": (4.0, 3.0, 5.0)})
    counted = "(geometric means over 2, 2 and 1 cases, in this order: [Speed](#speed))."
    assert figure([first, second, third]).endswith(counted)
    both = make_document(SOME, ["fastattn", "torch", "jax"])
    assert figure([both]).startswith("**The fastest of torch and jax takes ")
    assert figure([make_document(SOME, ["fastattn"])]) == "No other library was timed."


@pytest.mark.slow
def test_results_of_other_machines_stay(published: Path) -> None:
    old = (published / FILE).read_text()
    newest = compact(make_document(SOME[:2]))
    newest["machine"]["name"], newest["date"] = "Next", "2027-01-01T00:00:00+00:00"
    publish(published, newest)
    assert (published / FILE).read_text() == old
    assert [document["machine"]["name"] for document in kept(published)] == ["Next", "Made up"]
    assert list(disagreements(published)) == []
    (published / RESULTS / "next.json").rename(published / RESULTS / "last.json")
    assert list(disagreements(published)) == ["benchmarks/results/next.json: is kept under another name"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["new.json"], "--machine NAME says what"),
        (["--machine", "Zen 5"], "about RESULTS.json, which is not given"),
        (["new.json", "--check"], "--check compares"),
    ],
)
def test_arguments_that_say_too_little_or_too_much(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_every_picture_is_shown_with_a_text_for_who_cannot_see_it(published: Path) -> None:
    def shown(file: Path) -> list[Path]:
        """The pictures of a page, from its own folder."""
        found = re.findall(r"!\[([^\]]{20,})\]\(([^)]+)\)", (published / file).read_text())
        return sorted((published / file).parent.joinpath(target).resolve() for _, target in found)

    assert shown(PAGE) == sorted(path.resolve() for path in (published / RESULTS).glob("*.png"))
    assert shown(README) == [(published / RESULTS / "ratios.png").resolve()]


def test_a_note_comes_first() -> None:
    document = make_document(SOME) | {"note": "The clock was not steady."}
    text = section([compact(document)], [])
    assert text.startswith(
        "**The clock was not steady.** Made up (A made-up CPU), 2 threads on 2 cores, 2026-11-21"
    )


def test_what_the_project_wants_is_of_cases_that_there_are() -> None:
    assert set(targets.TARGETS) <= set(CASES)
    assert all(CASES[name].baseline for name, wanted in targets.TARGETS.items() if "slowdown" in wanted)
    assert {name for name in targets.TARGETS if CASES[name].backward} == {
        case.name for case in CASES.values() if case.backward
    }


def test_a_missed_target_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run = case_run(fastattn=[1.0] * 5, torch=[1.5] * 5, numpy=[1.2] * 5)
    run.baseline = LibraryRun(chosen="way", medians=[0.5] * 5)
    for name, error in (("fastattn", 1e-7), ("torch", 2e-7)):
        run.libraries[name].error = run.libraries[name].rms_error = error
    measured = build(2, [run], {})

    def missed(**wanted: float) -> list[str]:
        monkeypatch.setattr(targets, "TARGETS", {"case": wanted, "absent": wanted})
        return list(targets.missed(measured))

    assert missed(best=1.2, torch=1.5, peak=0.25, slowdown=2.0, error=0.5) == []
    assert missed(best=1.3, torch=1.6, peak=0.3, peak_avx2=0.1, slowdown=1.9, error=0.4) == [
        "case: best is 1.2, not 1.3",
        "case: torch is 1.5, not 1.6",
        "case: peak is 0.25, not 0.3",
        "case: peak_avx2 was not measured",
        "case: slowdown is 2, not 1.9",
        "case: error is 0.5, not 0.4",
    ]


@pytest.mark.parametrize("arguments", [["--check", "result.json"], ["--note", "Quiet."]])
def test_arguments_that_do_not_fit_together(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "RESULTS.json" in capsys.readouterr().err
