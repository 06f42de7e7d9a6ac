"""Tables for people, 110 columns wide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fastattn.bench.case import Case
from fastattn.bench.compare import MIN_CHANGE, Change, Comparison
from fastattn.bench.document import MemoryResults
from fastattn.bench.intervals import ENOUGH, Estimate
from fastattn.bench.outputs import new_table, printable
from fastattn.bench.peers import OURS
from fastattn.bench.quiet import QUIET
from fastattn.bench.records import CaseRun, LibraryRun
from fastattn.bench.summary import (
    CaseSummary,
    Share,
    disturbed_probes,
    error_ratios,
    geometric_means,
    summarise,
)


def time_text(seconds: float) -> str:
    """Three digits in a unit that suits."""
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    unit, size = next((it for it in units if seconds >= it[1]), units[-1])
    value = seconds / size
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


def _interval(estimate: Estimate) -> str:
    return escape(f"[{estimate.low:.2f}, {estimate.high:.2f}]")


def _table(*columns: str, right: Iterable[str] = ()) -> Table:
    return new_table((*columns, *right), left=columns)


def print_case_list(console: Console, cases: Sequence[Case]) -> None:
    """`cases` by name."""
    table = _table("case", "group", "B,H[/K],L,S,D[/E]", "options", right=("GFLOP", "MB"))
    table.add_column("origin", overflow="fold")
    table.columns[0].no_wrap = table.columns[2].no_wrap = not console.is_terminal  # for grep
    for case in cases:
        gflop, megabytes = f"{case.flops / 1e9:.3g}", f"{case.nbytes / 1e6:.3g}"
        name = f"{case.name}{' *' if case.quick else ''}"
        table.add_row(name, case.group, case.shape, case.options, gflop, megabytes, case.origin)
    console.print(table)
    if any(case.quick for case in cases):
        console.print("* part of --quick")


def result_line(run: CaseRun) -> str:
    """What `run` says, in one line."""
    summary = summarise(run)
    parts = [f"[bold]{run.case.name}[/]"]
    if OURS[0] in summary.seconds:
        parts.append(time_text(summary.seconds[OURS[0]]))
    elif OURS[0] in run.libraries:
        parts.append(f"[red]{_why(run, OURS[0])}[/]")
    if summary.best is not None:
        ratio = summary.ratios[summary.best]
        parts.append(f"{summary.best} / ours {ratio.median:.2f} {_interval(ratio)}")
    if summary.limit is not None and summary.limit.share is not None:
        parts.append(f"{summary.limit.share.median:.0%} of the {summary.limit.kind} limit")
    parts.append(f"[dim]{run.rounds} rounds[/]")
    return ", ".join(parts)


def print_speed(console: Console, runs: Sequence[CaseRun], names: Sequence[str]) -> None:
    """The tables of a run: against the best peer and the limit, then every library's time."""
    if not runs:
        console.print("No case was measured.")
        return
    table = _table("case", right=("ours", "best peer", "best / ours", "of limit", "over baseline"))
    for _, group in groupby(runs, key=lambda run: run.case.group):
        for run in group:
            _add_speed_row(table, run)
        table.add_section()
    console.print(table)
    _print_times(console, runs, names)
    _print_products(console, runs, names)
    _print_means(console, runs)
    _print_limits(console, runs)
    _print_ways(console, runs)
    _print_reasons(console, runs)


def _add_speed_row(table: Table, run: CaseRun) -> None:
    summary = summarise(run)
    shape = run.case.shape if run.case.name != run.case.shape else ""
    details = ", ".join(filter(None, (shape, run.case.options)))
    ours = "-"
    if OURS[0] in run.libraries:
        ours = _time_cell(run, summary, OURS[0])
    best, ratio = "-", "-"
    if summary.best is not None:
        best = f"{time_text(summary.seconds[summary.best])}\n[dim]{summary.best}[/]"
        estimate = summary.ratios[summary.best]
        color = "green" if estimate.low > 1 else "red" if estimate.high < 1 else "yellow"
        ratio = f"[{color}]{estimate.median:.2f}[/]\n[dim]{_interval(estimate)}[/]"
    limit = "-"
    if summary.limit is not None and summary.limit.share is not None:
        limit = f"{_share(summary.limit.share)}\n[dim]{summary.limit.kind}[/]"
    table.add_row(
        f"{run.case.name}\n[dim]{details}[/]",
        f"{ours}\n[dim]{run.rounds} rounds[/]",
        best,
        ratio,
        limit,
        _slowdown_cell(run, summary),
    )


def _share(share: Share) -> str:
    return f"{share.median:.1%}" if share.enough else f"[yellow]{share.median:.1%} ?[/]"


def _slowdown_cell(run: CaseRun, summary: CaseSummary) -> str:
    """Our time over our time of the baseline, and which that is."""
    if summary.slowdown is None:
        return "-"
    return f"{summary.slowdown.median:.2f}\n[dim]{run.case.baseline}[/]"


def _time_cell(run: CaseRun, summary: CaseSummary, name: str) -> str:
    return time_text(summary.seconds[name]) if name in summary.seconds else _why(run, name)


def _why(run: CaseRun, name: str) -> str:
    if name not in run.libraries:
        return "-"
    return "wrong" if run.libraries[name].wrong else "unable"


def _took_part(names: Sequence[str], found: Iterable[Mapping[str, object]]) -> list[str]:
    """Those of the libraries `names` that are in any of `found`: the columns of a table."""
    there = {name for libraries in found for name in libraries}
    return [name for name in names if name in there]


def _print_times(console: Console, runs: Sequence[CaseRun], names: Sequence[str]) -> None:
    names = _took_part(names, (run.libraries for run in runs))
    table = _table("time of one call", right=names)
    for run in runs:
        summary = summarise(run)
        table.add_row(run.case.name, *(_time_cell(run, summary, name) for name in names))
    console.print(table)


def _print_products(console: Console, runs: Sequence[CaseRun], names: Sequence[str]) -> None:
    """The neighbours of attention in a model: do they suffer from it?"""
    timed = [run for run in runs if any(it.products for it in run.libraries.values())]
    if not timed:
        return
    names = _took_part(names, (run.libraries for run in timed))
    table = _table("time of the products around it", right=names)
    for run in timed:
        products = (run.libraries.get(name, LibraryRun()).products for name in names)
        table.add_row(run.case.name, *(time_text(np.median(it)) if it else "-" for it in products))
    console.print(table)


def _print_means(console: Console, runs: Sequence[CaseRun]) -> None:
    for name, (mean, wins, cases) in geometric_means([summarise(run) for run in runs]).items():
        console.print(
            f"{name} / ours: geometric mean {mean:.2f}; ours is faster on {wins} of {cases}", highlight=False
        )


def _print_limits(console: Console, runs: Sequence[CaseRun]) -> None:
    """Every limit with its range over the run, and whether the machine was quiet."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for run in runs:
        for probe in run.limits:
            for dtype, peaks in probe["fma"].items():
                for threads, peak in peaks.items():
                    found.setdefault((f"FMA peak, {dtype}", threads, "GFLOP/s"), []).append(peak / 1e9)
            for threads, bandwidth in probe["read_bandwidth"].items():
                found.setdefault(("read bandwidth", threads, "GB/s"), []).append(bandwidth / 1e9)
    for (what, threads, unit), values in found.items():
        plural = "s" if threads != "1" else ""
        console.print(
            f"{what}, {threads} thread{plural}: median {np.median(values):.3g} {unit}, "
            f"{min(values):.3g} to {max(values):.3g} over the run"
        )
    disturbed, total = disturbed_probes(runs)
    if disturbed:
        console.print(
            f"[yellow]{disturbed} of {total} probes of the peak were over {1 - QUIET:.0%} below the best: "
            "something else used the machine, and a figure from such a run says little.[/]"
        )
    shares = [it for run in runs for name, it in summarise(run).shares.items() if name == OURS[0]]
    unsure = sum(not share.enough for share in shares)
    if unsure:
        console.print(
            f"[yellow]{unsure} of {len(shares)} shares of the limit have a “?”: hardly a call was quiet.[/]"
        )
    reasons = dict.fromkeys(item for run in runs for item in run.no_limits.items())
    for limit, reason in reasons:
        console.print(f"{limit.replace('_', ' ')}: not measured: {reason}", markup=False, highlight=False)


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
    names = _took_part(names, (run.libraries for run in runs))
    table = _table("case", "checked in", right=(*names, "allowed", "ours / torch's"))
    table.title = "absolute error, of gradients over each one's largest value: largest / root mean square"
    for run in runs:
        ratios = error_ratios(run.libraries)
        cells = [_error_cell(run, name) for name in names]
        cells.append("-" if run.tolerance is None else f"{run.tolerance:.1e}")
        cells.append("-" if ratios is None else f"{ratios[0]:.2f} / {ratios[1]:.2f}")
        table.add_row(run.case.name, run.oracle, *cells)
    console.print(table)
    _print_reasons(console, runs)


def _error_cell(run: CaseRun, name: str) -> str:
    library = run.libraries.get(name, LibraryRun())
    if library.error is None or library.rms_error is None:
        return _why(run, name)
    return f"{library.error:.1e} / {library.rms_error:.1e}{' wrong' if library.wrong else ''}"


def print_memory(console: Console, results: MemoryResults, names: Sequence[str]) -> None:
    """Peak memory by case and library."""
    names = _took_part(names, results.values())
    table = _table("MiB, first / after a tiny call", right=names)
    reasons: dict[tuple[str, str], list[str]] = {}
    for case, libraries in results.items():
        cells = []
        for name in names:
            found = libraries.get(name, {})
            extras = [it["extra"] for it in found.values() if "extra" in it]
            cells.append(" / ".join(f"{extra / 2**20:.1f}" for extra in extras) or "unable")
            for reason in dict.fromkeys(it["reason"] for it in found.values() if "reason" in it):
                reasons.setdefault((name, reason), []).append(case)
        table.add_row(case, *cells)
    console.print(table)
    console.print("Peak resident memory over inputs and output, each figure from a fresh process.")
    for (name, reason), cases in reasons.items():
        console.print(f"{name} has none on {', '.join(cases)}: {reason}", markup=False, highlight=False)


def print_comparison(console: Console, comparison: Comparison, then: str) -> None:
    """What changed since the run `then`, whose names are those in a file: they may be any text."""

    def say(text: str, style: str | None = None) -> None:
        console.print(printable(text), style=style, markup=False, highlight=False)

    for warning in comparison.warnings:
        say(f"differs from {then}: {warning}", "yellow")
    table = _table("case", right=("ours / peers", "change", "ours / limit", "change by limit"))
    table.add_column("verdict")
    colors = {"slower": "red", "same": "dim", "faster": "green", "unsure": "yellow"}
    rows = list(comparison.changes)
    if comparison.overall is not None:
        rows.append(comparison.overall)
    for change in rows:
        if change is comparison.overall:
            table.add_section()
        judgement = change.judgement
        table.add_row(
            change.name,
            *_change_cells(change.peers),
            *_change_cells(change.limit),
            f"[{colors[judgement]}]{judgement}[/]",
        )
    if comparison.changes:
        console.print(table)
        console.print(
            "Our time in units of the geometric mean of the same peers, and of the least that the machine "
            f"allowed: then → now. A verdict needs {MIN_CHANGE:.0%} beyond the intervals of both runs, more "
            f"than the scatter of the cases, and {ENOUGH} rounds in each.",
            highlight=False,
        )
    for change in rows:
        if change.reason:
            say(f"{change.name}: {change.judgement}: {change.reason}")
    for name, reason in comparison.left_out.items():
        say(f"{name} not compared: {reason}")
    if comparison.peers_left_out:
        say(f"no yardstick in any case: {', '.join(comparison.peers_left_out)}")


def _change_cells(change: Change | None) -> tuple[str, str]:
    if change is None:
        return "-", "-"
    percent = [f"{it - 1:+.0%}" for it in (change.ratio.median, change.ratio.low, change.ratio.high)]
    return (
        f"{change.then:.3g} → {change.now:.3g}",
        f"{percent[0]} [dim]{escape(f'[{percent[1]}, {percent[2]}]')}[/]",
    )
