"""What a run measured as one JSON document: built, written, and read back.

Times are seconds per call, peaks FLOP/s, bandwidths bytes/s, memory bytes, errors absolute. A figure that
was not measured is null; there is no NaN and no infinity.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastattn._machine import host
from fastattn.bench.case import Case
from fastattn.bench.cases import MEMORY_CASES
from fastattn.bench.limits import medians
from fastattn.bench.records import CaseRun
from fastattn.bench.summary import error_ratios, summarise

#: Version of the layout; `read` knows this one alone.
SCHEMA = 1

#: ``{case: {library: {"first"/"warm": {"extra": bytes, ...}}}}``
MemoryResults = dict[str, dict[str, dict[str, dict[str, Any]]]]


class DocumentError(ValueError):
    """A file is not a result of this benchmark; the message says what is wrong with it."""


def build(num_threads: int, runs: Sequence[CaseRun], memory: MemoryResults) -> dict[str, Any]:
    """Everything that was measured."""
    versions = {"python": platform.python_version()}
    for run in runs:
        versions |= {name: it.version for name, it in run.libraries.items() if it.version is not None}
    for libraries in memory.values():
        for name, found in libraries.items():
            versions.update((name, it["version"]) for it in found.values() if "version" in it)
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": host.cpu_name(),
            "cores": host.available_cores(),
            "caches": host.cache_sizes(),
            "architecture": platform.machine(),
            "system": platform.platform(),
        },
        "versions": versions,
        "threads": num_threads,
        "limits": medians([probe for run in runs for probe in run.limits]),
        "cases": {run.case.name: _case_run(run) for run in runs},
        "memory_cases": {name: _case(MEMORY_CASES[name]) for name in memory},
        "memory": memory,
    }


def _case(case: Case) -> dict[str, Any]:
    """The fields of `case` and what follows from them."""
    derived = {"shape": case.shape, "options": case.options, "flops": case.flops, "nbytes": case.nbytes}
    return asdict(case) | derived


def _case_run(run: CaseRun) -> dict[str, Any]:
    return {
        **asdict(run),
        "case": _case(run.case),
        "errors_over_torch": error_ratios(run.libraries),
        "summary": asdict(summarise(run)),
    }


def write(path: Path, document: dict[str, Any]) -> None:
    """Write `document`; what `path` held before stays until all of it is there."""
    text = json.dumps(_finite(document), indent=1, allow_nan=False)
    part = unfinished(path)
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(part.with_suffix(""))


def unfinished(path: Path) -> Path:
    """Where a document is written before it takes the place of `path`: beside the file that a link names."""
    target = Path(os.path.realpath(path))
    return target.with_name(target.name + ".part")


def _finite(value: Any) -> Any:
    """`value` with None for what is NaN or infinite, which JSON cannot say."""
    if isinstance(value, dict):
        return {key: _finite(it) for key, it in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(it) for it in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read(path: Path) -> dict[str, Any]:
    """A document that `write` wrote.

    Raises
    ------
    DocumentError
        The file cannot be read, is not JSON, is not such a document or is one of another version.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise DocumentError(f"{path} is not a file")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise DocumentError(f"{path} cannot be read: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:  # of the JSON or of its encoding
        raise DocumentError(f"{path} is not JSON: {problem}") from None
    if not isinstance(document, dict) or "schema" not in document:
        raise DocumentError(f'{path} was not written by this benchmark\'s --json: it has no "schema"')
    if document["schema"] != SCHEMA:
        raise DocumentError(f"{path} has schema {document['schema']!r:.60}; this version reads {SCHEMA}")
    try:
        _check(document)
    except DocumentError as problem:
        raise DocumentError(f"{path} is damaged: {problem}") from None
    return document


def _check(document: dict[str, Any]) -> None:
    """What a comparison relies on; raises where it is not so."""
    _object(document, "the document", {"threads": int, "machine": dict, "versions": dict, "cases": dict})
    for name, run in document["cases"].items():
        where = f"cases[{name!r}]"
        _object(run, where, {"case": dict, "threads": int, "rounds": int, "libraries": dict})
        for library, found in run["libraries"].items():
            inside = f"{where}.libraries[{library!r}]"
            _object(found, inside, {"medians": list, "limit_shares": list})
            _numbers(found["medians"], f"{inside}.medians")
            for row in found["limit_shares"]:
                if not isinstance(row, list) or len(row) != 3:
                    raise DocumentError(f"{inside}.limit_shares should hold rows of three numbers")
                _numbers(row, f"{inside}.limit_shares")


def _object(value: object, where: str, fields: dict[str, type]) -> None:
    if not isinstance(value, dict):
        raise DocumentError(f"{where} should be an object")
    for name, kind in fields.items():
        if not isinstance(value.get(name), kind):
            raise DocumentError(f"{where}.{name} should be there and a JSON {_JSON_NAMES[kind]}")


_JSON_NAMES = {int: "number", dict: "object", list: "array"}


def _numbers(values: list[object], where: str) -> None:
    if not all(isinstance(it, int | float) and 0 < it <= sys.float_info.max for it in values):
        raise DocumentError(f"{where} should hold positive numbers")
