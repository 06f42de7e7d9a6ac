"""The pictures of results: what is on them, that nothing overlaps, that what is missing is left out."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

import matplotlib
from matplotlib.text import Text
from PIL import Image

from fastattn.bench.cases import CASES
from fastattn.bench.peers import OURS
from fastattn.bench.plots import DIGEST_KEY, Picture, digest, draw_all, pictures
from fastattn.bench.plots.ratios import OF_GROUPS
from tests.bench_results import COSTS, POSSIBLE, make_document
from tests.process import python

NAMES = ["ratios", "storages", "gradients", "recurrent", "roofline", "time", "memory", "sizes"]

#: Names of the cases that are no points of a curve.
CATALOGUE = [case.name for case in POSSIBLE if not case.group.startswith("scaling-")]

#: Enough for every picture, and drawn sooner.
ONE_OF_EACH = {*CATALOGUE[:6], "decode-8k-int8", "backward-2048-64", "recurrent-decode"}
SOME = [case for case in POSSIBLE if case.name not in CATALOGUE or case.name in ONE_OF_EACH]

LENGTHS = [case for case in POSSIBLE if case.group == "scaling-length"]

#: A README's column is about this many pixels wide; pictures have two for each.
COLUMN = 830


def drawn(document: dict[str, Any]) -> dict[str, Picture]:
    found = {picture.name: picture for picture in pictures(document)}
    for picture in found.values():
        picture.figure.draw_without_rendering()
    return found


@pytest.fixture(scope="module")
def everything() -> dict[str, Picture]:
    """Every picture of a document that lacks nothing."""
    return drawn(make_document())


def many_cases() -> dict[str, Any]:
    """Twice the catalogue, with longer names, and ten libraries."""
    grown = [
        replace(case, name=f"{case.name}-{number}")
        for number in range(2)
        for case in POSSIBLE
        if case.name in CATALOGUE
    ]
    document = make_document((*grown, *POSSIBLE))
    for run in document["cases"].values():
        for name in ("tensorflow", "ggml"):
            run["summary"]["ratios"][name] = {"median": 40.0, "low": 38.0, "high": 50.0}
            run["summary"]["seconds"][name] = 40 * run["summary"]["seconds"]["fastattn"]
    return document


@pytest.mark.slow
def test_every_picture_is_drawn_at_the_width_of_a_readme(tmp_path: Path) -> None:
    document = make_document()
    paths = draw_all(document, tmp_path)
    assert [path.stem for path in paths] == NAMES
    for path in paths:
        assert path.stat().st_size < 150_000
        with Image.open(path) as image:
            assert image.width == 2 * COLUMN
            assert image.info[DIGEST_KEY] == digest(document)
            assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)  # on dark pages too


@pytest.mark.slow
def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    """Whatever the user has set in matplotlib, and however the JSON was laid out."""
    document = make_document(list(CASES.values())[:3], memory=False)
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    first = draw_all(document, folders[0])
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "savefig.dpi": 10}):
        second = draw_all(json.loads(json.dumps(document, indent=3)), folders[1])
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_the_digest_tells_results_apart() -> None:
    document = make_document(list(CASES.values())[:2])
    other = copy.deepcopy(document)
    assert digest(dict(reversed(other.items()))) == digest(document)
    other["cases"]["square-512-64"]["libraries"]["torch"]["medians"][0] *= 1.001
    assert digest(other) != digest(document)


@pytest.fixture(scope="module")
def crowded() -> dict[str, Picture]:
    return drawn(many_cases())


@pytest.mark.slow
@pytest.mark.parametrize("results", ["everything", "crowded"])
@pytest.mark.parametrize("name", NAMES)
def test_no_words_overlap_or_leave_the_page(
    results: str, name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = request.getfixturevalue(results)[name].figure
    texts: list[Text] = []  # ticks outside the axes are there, but they are not drawn
    monkeypatch.setattr(Text, "draw", lambda self, renderer: texts.append(self))
    figure.draw_without_rendering()
    # Turned ones have a box much larger than themselves.
    boxes = {
        it: it.get_window_extent().padded(-1)
        for it in texts
        if it.get_visible() and it.get_text().strip() and it.get_rotation() == 0
    }
    assert len(boxes) > 5
    page = figure.bbox.padded(1)
    for text, box in boxes.items():
        assert page.contains(*box.min), text
        assert page.contains(*box.max), text
    for first, second in combinations(boxes, 2):
        assert not boxes[first].overlaps(boxes[second]), (first, second)


@pytest.mark.slow
def test_ratios_name_every_case_of_the_catalogue_once(everything: dict[str, Picture]) -> None:
    cases, labels = make_document()["cases"], {}
    for picture in (everything[name] for name in ("ratios", *OF_GROUPS)):
        rows = [label.get_text() for axes in picture.figure.axes for label in axes.get_yticklabels()]
        peers = [
            [ratio for name, ratio in cases[row]["summary"]["ratios"].items() if name not in OURS]
            for row in rows
        ]
        best = [min(ratios, key=lambda ratio: ratio["median"]) for ratios in peers]
        faster, slower = sum(it["low"] > 1 for it in best), sum(it["high"] < 1 for it in best)
        equal = len(rows) - faster - slower
        assert f"Made up: faster than the fastest peer in {faster}" in picture.title
        assert f"of {len(rows)} cases" in picture.title
        assert (f"equal in {equal}" in picture.title) == (equal > 0)
        assert (f"slower in {slower}" in picture.title) == (slower > 0)
        labels[picture.name] = rows
    assert sorted(chain.from_iterable(labels.values())) == sorted(CATALOGUE)
    assert {cases[row]["case"]["group"] for row in labels["storages"]} == {"decode-storage"}
    assert {cases[row]["case"]["group"] for row in labels["gradients"]} == {"backward", "flex-backward"}
    assert {cases[row]["case"]["group"] for row in labels["recurrent"]} == {"recurrent"}


def test_ratios_beyond_the_axis_stand_at_its_edge() -> None:
    document = make_document([CASES["window-8192"]])
    document["cases"]["window-8192"]["summary"]["ratios"]["numpy"] = {
        "median": 90.0,
        "low": 80.0,
        "high": 95.0,
    }
    (axes,) = drawn(document)["ratios"].figure.axes
    right = axes.get_xlim()[1]
    points = [line for line in axes.lines if line.get_marker() == ">"]
    assert [0 < line.get_xdata()[0] < right for line in points] == [True]


@pytest.mark.slow
def test_roofline_shows_every_case(everything: dict[str, Picture]) -> None:
    document = make_document()
    (axes,) = everything["roofline"].figure.axes
    floor, top = axes.get_ylim()
    shown = {(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line.get_marker() in "oDv"}
    for name, run in document["cases"].items():
        case = run["case"]
        if case.get("threads") not in (None, 2):
            continue
        speed = case["flops"] / run["summary"]["seconds"]["fastattn"] / 1e9
        assert speed < top
        assert (case["flops"] / case["nbytes"], max(speed, floor)) in shown, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "panel", "size"), [("time", 0, "len_k"), ("sizes", 0, "head_dim"), ("sizes", 2, "threads")]
)
def test_curves_go_through_what_was_measured(
    name: str, panel: int, size: str, everything: dict[str, Picture]
) -> None:
    document = make_document()
    axes = everything[name].figure.axes[panel]
    group = {"len_k": "scaling-length", "head_dim": "scaling-dim", "threads": "scaling-threads"}[size]
    cases = [run for run in document["cases"].values() if run["case"]["group"] == group]
    lines = {line.get_label(): line for line in axes.lines}
    assert "fastattn-avx2" not in lines
    for library in ("fastattn", "torch", "numpy"):
        seconds = np.array([run["summary"]["seconds"][library] for run in cases])
        wanted = 1e3 * seconds
        if name == "sizes":
            wanted = np.array([run["case"]["flops"] for run in cases]) / seconds / 1e9
        np.testing.assert_array_equal(lines[library].get_xdata(), [run["case"][size] for run in cases])
        np.testing.assert_allclose(lines[library].get_ydata(), wanted)


@pytest.mark.slow
def test_memory_ends_where_a_library_fails(everything: dict[str, Picture]) -> None:
    (axes,) = everything["memory"].figure.axes
    lines = {line.get_label(): list(line.get_xdata()) for line in axes.lines}
    assert lines["fastattn"] == [512, 2048, 8192, 32768]
    assert lines["numpy"] == [512, 2048, 8192]


def test_a_curve_holds_one_kind_of_case() -> None:
    """Causal cases among the lengths would be a second curve, not points in the first."""
    causal = [replace(case, name=f"{case.name}-causal", causal=True) for case in LENGTHS[:2]]
    document = make_document((*causal, *LENGTHS))
    axes = drawn(document)["time"].figure.axes[0]
    (line,) = (line for line in axes.lines if line.get_label() == "fastattn")
    assert list(line.get_xdata()) == [case.len_k for case in LENGTHS]


def without(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        for key in keys:
            del document[key]

    return change


def without_shares(document: dict[str, Any]) -> None:
    for run in document["cases"].values():
        run["summary"]["limit"] = None


def as_written_before(document: dict[str, Any]) -> None:
    without("limits", "memory", "memory_cases")(document)
    for run in document["cases"].values():
        del run["summary"]["limit"], run["case"]["nbytes"]


def without_results(document: dict[str, Any]) -> None:
    for libraries in document["memory"].values():
        for name in libraries:
            libraries[name] = {"first": {"reason": "no /proc"}, "warm": {"reason": "no /proc"}}


@pytest.mark.parametrize(
    ("change", "left"),
    [
        pytest.param(lambda document: None, NAMES, marks=pytest.mark.slow),
        (without("limits"), [name for name in NAMES if name != "roofline"]),
        pytest.param(
            lambda document: document.update(limits={"fma": {}, "read_bandwidth": {}}),
            [name for name in NAMES if name != "roofline"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda document: document.update(threads=7),
            [name for name in NAMES if name != "roofline"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            without("memory", "memory_cases"),
            [name for name in NAMES if name != "memory"],
            marks=pytest.mark.slow,
        ),
        pytest.param(without_results, [name for name in NAMES if name != "memory"], marks=pytest.mark.slow),
        pytest.param(without_shares, NAMES, marks=pytest.mark.slow),
        pytest.param(as_written_before, [*NAMES[:4], "time", "sizes"], marks=pytest.mark.slow),
        (lambda document: document["cases"].clear(), ["memory"]),
    ],
)
def test_what_was_not_measured_is_left_out(change: Callable[[dict[str, Any]], None], left: list[str]) -> None:
    document = make_document(SOME)
    change(document)
    assert list(drawn(document)) == left


@pytest.mark.parametrize(
    "case",
    ["tiny-4", *(pytest.param(it, marks=pytest.mark.slow) for it in ("square-512-64", "float64-1024"))],
)
def test_one_case_is_enough(case: str) -> None:
    assert list(drawn(make_document([CASES[case]], memory=False))) == ["ratios", "roofline"]


@pytest.mark.parametrize(
    "libraries",
    [
        *(pytest.param(it, marks=pytest.mark.slow) for it in (["fastattn"], ["fastattn", "fastattn-avx2"])),
        ["torch"],
        [],
    ],
)
def test_libraries_may_be_absent(libraries: list[str]) -> None:
    document = make_document(SOME, libraries)
    wanted = NAMES[4:] if "fastattn" in libraries else []
    assert list(drawn(document)) == wanted


@pytest.mark.slow
def test_a_peer_that_was_timed_on_some_cases_only() -> None:
    document = make_document(SOME)
    for number, run in enumerate(document["cases"].values()):
        gone = list(COSTS)[2 + number % 4]
        del run["summary"]["seconds"][gone], run["summary"]["ratios"][gone]
        rest = {name: it for name, it in run["summary"]["ratios"].items() if name != "fastattn-avx2"}
        run["summary"]["best"] = min(rest, key=lambda name: rest[name]["median"])
    assert list(drawn(document)) == NAMES


@pytest.mark.slow
def test_pyplot_is_left_alone() -> None:
    """It would hold every figure for ever and may want a screen."""
    code = """
import sys
from fastattn.bench.plots import pictures
from tests.bench_results import POSSIBLE, make_document
assert len(pictures(make_document(POSSIBLE[-30:]))) == 5
print("matplotlib.pyplot" in sys.modules)
"""
    assert python(code).strip() == "False"
