"""A document as one flat table, a row for each library on each case: CSV for programs, Markdown for pages."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastattn.bench.report import time_text

#: The columns of the CSV. Times are seconds per call, memory is bytes; empty is what was not measured.
COLUMNS = (
    "case",
    "shape",
    "options",
    "threads",
    "library",
    "version",
    "way",
    "rounds",
    "seconds",
    "over_ours",  # this library's time over fastattn's, and the 95 % interval of the median
    "over_ours_low",
    "over_ours_high",
    "share_of_limit",
    "limit",  # "compute" or "memory"
    "products_seconds",  # of the products around the call, in a model
    "error",  # largest absolute one
    "memory_first",  # peak over inputs and output in the first call of a process
    "memory_warm",  # and in one after a tiny call
    "reason",  # why there is no time
)


def rows(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of `document`, by the names of `COLUMNS`; what was not measured is None or not there."""
    for name, run in document["cases"].items():
        summary = run["summary"]
        for library, found in run["libraries"].items():
            ratio = summary["ratios"].get(library) or {}
            share = summary["shares"].get(library)
            yield _of_case(name, run["case"], library) | {
                "threads": run["threads"],
                "version": found["version"],
                "way": found["chosen"],
                "rounds": len(found["medians"]),
                "seconds": summary["seconds"].get(library),
                "over_ours": ratio.get("median"),
                "over_ours_low": ratio.get("low"),
                "over_ours_high": ratio.get("high"),
                "share_of_limit": share and share["median"],
                "limit": share and run["kind"],
                "products_seconds": median(found["products"]) if found["products"] else None,
                "error": found["error"],
                "reason": found["reason"],
            }
    for name, libraries in document["memory"].items():
        for library, found in libraries.items():
            reasons = dict.fromkeys(it["reason"] for it in found.values() if "reason" in it)
            done: dict[str, Any] = next((it for it in found.values() if "way" in it), {})
            yield _of_case(name, document["memory_cases"][name], library) | {
                "threads": document["threads"],
                "version": done.get("version"),
                "way": done.get("way"),
                "memory_first": found["first"].get("extra"),
                "memory_warm": found["warm"].get("extra"),
                "reason": "; ".join(reasons) or None,
            }


def _of_case(name: str, case: Mapping[str, Any], library: str) -> dict[str, Any]:
    return {"case": name, "shape": case["shape"], "options": case["options"], "library": library}


def as_csv(document: Mapping[str, Any]) -> str:
    """`document` as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(document))
    return text.getvalue()


def as_markdown(document: Mapping[str, Any]) -> str:
    """`document` as a Markdown table for people: without empty columns, figures short and with units."""
    found = list(rows(document))
    columns = [name for name in COLUMNS if any(row.get(name) not in (None, "") for row in found)]
    table = Table(box=box.MARKDOWN)
    for name in columns:
        numbers = any(isinstance(row.get(name), int | float) for row in found)
        table.add_column(Text(name), justify="right" if numbers else "left", no_wrap=True)
    for row in found:
        table.add_row(*(Text(_cell(name, row.get(name))) for name in columns))
    text = io.StringIO()
    Console(file=text, width=1 << 20, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().strip().splitlines()) + "\n"


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if column in ("seconds", "products_seconds"):
        return time_text(value)
    if column in ("memory_first", "memory_warm"):
        return f"{value / 2**20:.1f} MiB"
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", "\\|")


#: What ``--format`` may name beside the tables of `report`.
FORMATS: dict[str, Callable[[Mapping[str, Any]], str]] = {"markdown": as_markdown, "csv": as_csv}
