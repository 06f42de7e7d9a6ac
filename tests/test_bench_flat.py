"""The results as one flat table: nothing is lost in CSV, Markdown stays a table."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("rich")

from fastattn.bench import document
from fastattn.bench.flat import COLUMNS, as_csv, as_markdown
from fastattn.bench.records import LibraryRun
from tests.bench_runs import CASE, case_run


@pytest.fixture
def measured() -> dict[str, Any]:
    """Two cases, one of them in a model, with a library that is unable, and memory."""
    alone = case_run(fastattn=[1e-3, 2e-3, 3e-3], torch=[2e-3, 4e-3, 6e-3])
    alone.libraries["numpy"] = LibraryRun(reason="no | and\nno")
    in_model = replace(case_run(fastattn=[1e-3], torch=[2e-3]), case=replace(CASE, name="b", model_dim=48))
    in_model.libraries["torch"].products = [3e-3]
    memory: Any = {
        "memory-512": {"numpy": {"first": {"extra": 3 << 20, "way": "w"}, "warm": {"reason": "r"}}}
    }
    return document.build(2, [alone, in_model], memory)


def test_csv_has_a_row_for_each_library_of_each_case(measured: dict[str, Any]) -> None:
    found = list(csv.DictReader(io.StringIO(as_csv(measured))))
    assert [(row["case"], row["library"]) for row in found] == [
        *((name, library) for name, run in measured["cases"].items() for library in run["libraries"]),
        ("memory-512", "numpy"),
    ]
    by_name = {(row["case"], row["library"]): row for row in found}
    torch = by_name["case", "torch"]
    assert (float(torch["seconds"]), float(torch["over_ours"]), torch["rounds"]) == (4e-3, 2.0, "3")
    ours = by_name["case", "fastattn"]
    assert (float(ours["share_of_limit"]), ours["limit"], ours["over_ours"]) == (0.25, "compute", "")
    assert float(by_name["b", "torch"]["products_seconds"]) == 3e-3
    assert (by_name["case", "numpy"]["seconds"], by_name["case", "numpy"]["reason"]) == ("", "no | and\nno")
    memory = by_name["memory-512", "numpy"]
    assert (memory["memory_first"], memory["memory_warm"], memory["reason"]) == (str(3 << 20), "", "r")


def test_csv_has_every_column_in_any_result() -> None:
    assert as_csv({"cases": {}, "memory": {}}) == ",".join(COLUMNS) + "\n"


def test_markdown_is_one_table(measured: dict[str, Any]) -> None:
    lines = as_markdown(measured).splitlines()
    cells = [line.replace("\\|", "").strip("|").split("|") for line in lines]
    assert len(lines) == 2 + 3 + 2 + 1
    assert len({len(row) for row in cells}) == 1
    assert set("".join(cells[1])) <= set("-:")
    table = [
        dict(zip((head.strip() for head in cells[0]), map(str.strip, row), strict=True)) for row in cells
    ]
    assert table[3] | {"library": "torch", "seconds": "4.00 ms", "over_ours": "2"} == table[3]
    assert table[-1]["memory_first"] == "3.0 MiB"


def test_markdown_leaves_out_what_nobody_has() -> None:
    head = as_markdown(document.build(2, [case_run(fastattn=[1.0])], {})).splitlines()[0]
    assert "seconds" in head
    assert "memory" not in head
    assert "products" not in head
