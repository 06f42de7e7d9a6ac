"""Tables for people and JSON for programs."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fastattn import _host
from fastattn.bench.cases import Case
from fastattn.bench.measure import CaseRun, LibraryRun
from fastattn.bench.peers import OURS
from fastattn.bench.summary import (
    QUIET,
    CaseSummary,
    Estimate,
    PeakShare,
    disturbed_probes,
    error_ratios,
    summarise,
)


def time_text(seconds: float) -> str:
    """Three digits in a unit that suits."""
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    unit, size = next((it for it in units if seconds >= it[1]), units[-1])
    value = seconds / size
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


def _interval(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    return f"{estimate.median:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def _share(share: PeakShare) -> str:
    counts = f"{share.undisturbed} of {share.calls} calls undisturbed"
    return f"{share.estimate.median:.1%}\n[{'dim' if share.enough else 'yellow'}]{counts}[/]"


def _verdict_cell(summary: CaseSummary) -> str:
    """Each target with its bound, green when met."""
    cells = []
    for verdict in summary.verdicts:
        sign = "≥" if verdict.at_least else "≤"
        bound = f"{verdict.bound:.0%}" if verdict.name.startswith("peak") else f"{verdict.bound:g}"
        color, word = ("green", "pass") if verdict.met else ("red", "FAIL")
        if verdict.value is None:
            color, word = "yellow", "none"
        cells.append(f"[{color}]{word}[/] {verdict.name} {sign} {bound}")
    return "\n".join(cells)


def print_case_list(console: Console, cases: Sequence[Case]) -> None:
    """`cases` by name."""
    table = Table("case", "group", escape("B,H[/K],L,S,D[/E]"), "options", "GFLOP", "origin")
    for case in cases:
        table.add_row(case.name, case.group, case.shape, case.options, f"{case.flops / 1e9:.3g}", case.origin)
    console.print(table)


def print_speed(console: Console, runs: Sequence[CaseRun], names: Sequence[str], num_threads: int) -> None:
    """The table of times, ratios and shares of the peak."""
    table = Table(show_lines=True)
    table.add_column("case")
    for name in names:
        table.add_column(name, justify="right")
    for column in ("best peer / ours", "torch / ours", "of FMA peak", "over baseline"):
        table.add_column(column, justify="right")
    table.add_column("targets")
    for run in runs:
        summary = summarise(run)
        best = summary.ratios.get(summary.best) if summary.best else None
        peaks = [
            f"{label}{_share(summary.peak[name])}"
            for label, name in (("", OURS[0]), ("AVX2: ", OURS[1]))
            if name in summary.peak
        ]
        details = "\n".join(filter(None, (run.case.shape, run.case.options)))
        table.add_row(
            f"{run.case.name}\n[dim]{details}[/]",
            *(
                time_text(summary.seconds[name]) if name in summary.seconds else _why(run, name)
                for name in names
            ),
            f"{_interval(best)}\n[dim]{summary.best or ''}[/]",
            _interval(summary.ratios.get("torch")),
            "\n".join(peaks) or "-",
            _interval(summary.slowdown),
            _verdict_cell(summary),
        )
    console.print(table)
    _print_peaks(console, runs, num_threads)
    _print_ways(console, runs)
    _print_reasons(console, runs)


def _why(run: CaseRun, name: str) -> str:
    return "wrong" if run.libraries[name].wrong else "unable"


def _print_peaks(console: Console, runs: Sequence[CaseRun], num_threads: int) -> None:
    probes = [probe for run in runs for probe in run.peaks]
    for dtype in ("float32", "float64") if probes else ():
        for threads in dict.fromkeys(("1", str(num_threads))):
            values = np.array([probe[dtype][threads] for probe in probes]) / 1e9
            console.print(
                f"FMA peak, {dtype}, {threads} thread{'s' if threads != '1' else ''}: median "
                f"{np.median(values):.0f} GFLOP/s, {values.min():.0f} to {values.max():.0f} over the run"
            )
    disturbed, total = disturbed_probes(runs, num_threads)
    if disturbed:
        console.print(
            f"[yellow]{disturbed} of {total} probes of the peak were over {1 - QUIET:.0%} below the best: "
            "something else used the machine, and a figure from such a run says little.[/]"
        )
    for reason in dict.fromkeys(run.no_peaks for run in runs if run.no_peaks):
        console.print(f"FMA peak: not measured: {reason}", markup=False)


def _print_ways(console: Console, runs: Sequence[CaseRun]) -> None:
    """Which way was the fastest, for the libraries that have more than one."""
    ways: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        for name, library in run.libraries.items():
            if library.chosen is not None and len(library.ways) > 1:
                ways.setdefault(name, {}).setdefault(library.chosen, []).append(run.case.name)
    for name, chosen in ways.items():
        for way, cases in chosen.items():
            console.print(f"{name} through “{way}”: {', '.join(cases)}", markup=False, highlight=False)


def _print_reasons(console: Console, runs: Sequence[CaseRun]) -> None:
    """Every library that was not timed and why; the same reason once, with its cases."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        for name, library in run.libraries.items():
            if library.reason is not None:
                reasons.setdefault((name, library.reason), []).append(run.case.name)
    for (name, reason), cases in reasons.items():
        where = "every case" if len(cases) == len(runs) > 1 else ", ".join(cases)
        console.print(f"{name} not timed on {where}: {reason}", markup=False, highlight=False)


def print_errors(console: Console, runs: Sequence[CaseRun], names: Sequence[str]) -> None:
    """The largest and the root-mean-square absolute error of each library on each case."""
    table = Table("case", "checked in", title="absolute error: largest / root mean square")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("allowed", justify="right")
    table.add_column("ours / torch's", justify="right")
    table.add_column("target")
    for run in runs:
        ratios = error_ratios(run.libraries)
        cells = [_error_cell(run.libraries[name]) for name in names]
        cells.append("-" if run.tolerance is None else f"{run.tolerance:.1e}")
        if ratios is None:
            cells += ["-", "[yellow]none[/]"]
        else:
            verdict = "[green]pass[/]" if ratios[0] <= 1 else "[red]FAIL[/]"
            cells += [f"{ratios[0]:.2f} / {ratios[1]:.2f}", f"{verdict} largest ≤ 1"]
        table.add_row(run.case.name, run.oracle, *cells)
    console.print(table)
    _print_reasons(console, runs)


def _error_cell(library: LibraryRun) -> str:
    if library.error is None or library.rms_error is None:
        return "wrong" if library.wrong else "unable"
    return f"{library.error:.2e} / {library.rms_error:.1e}{' wrong' if library.wrong else ''}"


def print_memory(console: Console, results: dict[str, dict[str, Any]]) -> None:
    """The table of ``--memory``; `results` is ``{case: {library: {"first"/"warm": {...}}}}``."""
    table = Table("case", "library", "way", "first call", "after a tiny call", "time", "reason")
    for case, libraries in results.items():
        for name, found in libraries.items():
            first, warm = found["first"], found["warm"]
            table.add_row(
                case,
                name,
                first.get("way", "-"),
                *(f"{it['extra'] / 2**20:.1f} MiB" if "extra" in it else "-" for it in (first, warm)),
                time_text(warm["seconds"]) if "seconds" in warm else "-",
                first.get("reason") or warm.get("reason") or "",
            )
    console.print(table)
    console.print("Peak resident memory over inputs and output, each figure from a fresh process.")


def as_json(
    num_threads: int, runs: Sequence[CaseRun], memory: dict[str, dict[str, Any]] | None
) -> dict[str, Any]:
    """Everything that was measured; times in seconds, peaks in FLOP/s, memory in bytes."""
    versions = {"python": platform.python_version()}
    for run in runs:
        versions |= {name: it.version for name, it in run.libraries.items() if it.version is not None}
    document: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _host.cpu_name(),
            "cores": _host.available_cores(),
            "architecture": platform.machine(),
            "system": platform.platform(),
        },
        "versions": versions,
        "threads": num_threads,
        "cases": {run.case.name: _case_json(run) for run in runs},
    }
    if memory is not None:
        document["memory"] = memory
    return document


def _case_json(run: CaseRun) -> dict[str, Any]:
    summary = summarise(run)
    return {
        **asdict(run),
        "case": asdict(run.case) | {"flops": run.case.flops},
        "errors_over_torch": error_ratios(run.libraries),
        "summary": asdict(summary) | {"verdicts": [asdict(it) | {"met": it.met} for it in summary.verdicts]},
    }
