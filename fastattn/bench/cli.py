"""The command line: ``python -m fastattn bench``."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
except ImportError:
    sys.exit("The benchmark needs rich and the peers: pip install 'fastattn[bench]'")

from fastattn import _host
from fastattn.bench import report
from fastattn.bench.cases import CASES, GROUPS, MEMORY_CASES, Case, possible_cases
from fastattn.bench.measure import CaseRun, Crew, Notify, check, measure
from fastattn.bench.peers import DEFAULT_PEERS, OURS, PEERS
from fastattn.bench.process import Worker, WorkerError

#: Width of the tables when they go to a file or a pipe.
FILE_WIDTH = 240


def _names(text: str) -> list[str]:
    return [name for name in text.replace(",", " ").split() if name]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fastattn bench",
        description="Attention on this CPU, library beside library, against the machine's limit.",
    )
    parser.add_argument("--cases", nargs="+", default=[], metavar="NAME", help="only these cases")
    parser.add_argument("--group", nargs="+", default=[], metavar="GROUP", help=f"of {', '.join(GROUPS)}")
    parser.add_argument(
        "--peers", type=_names, default=list(DEFAULT_PEERS), metavar="A,B", help="libraries; %(default)s"
    )
    parser.add_argument("--threads", type=int, default=min(2, _host.available_cores()), help="%(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds per case, %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument("--errors", action="store_true", help="check only: the largest error of each library")
    parser.add_argument(
        "--memory", action="store_true", help="peak memory at L = S = 32768 instead of the cases"
    )
    options = parser.parse_args(argv)
    for kind, given, valid in (
        ("case", options.cases, CASES),
        ("group", options.group, GROUPS),
        ("peer", options.peers, PEERS),
    ):
        unknown = [name for name in given if name not in valid]
        if unknown:
            parser.error(f"no {kind} called {', '.join(unknown)}; there are: {', '.join(valid)}")
    if not options.peers:
        parser.error(f"--peers names no library; there are: {', '.join(PEERS)}")
    if options.threads < 1 or options.rounds < 1:
        parser.error("--threads and --rounds are at least 1")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: no folder {options.json.absolute().parent}")
    return options


def _selected(options: argparse.Namespace) -> list[Case]:
    """The cases asked for, by name or by group; all of them when neither was given."""
    if not options.cases and not options.group:
        return possible_cases(_host.available_cores())
    return [case for case in CASES.values() if case.name in options.cases or case.group in options.group]


def _run_cases(options: argparse.Namespace, cases: Sequence[Case], console: Console) -> list[CaseRun]:
    """Measure, or only check; Ctrl-C ends it and keeps the cases that were finished."""
    runs: list[CaseRun] = []
    with Crew(options.threads) as crew, _progress(console) as progress:
        task = progress.add_task("", total=len(cases))
        try:
            for case in cases:
                notify = _notifier(progress, task, case.name)
                if options.errors:
                    runs.append(check(case, crew, options.peers, notify))
                    crew.release(options.peers)
                else:
                    runs.append(measure(case, crew, options.peers, options.rounds, notify))
                progress.advance(task)
        except KeyboardInterrupt:
            console.print(f"Interrupted: {len(runs)} of {len(cases)} cases are finished.")
    return runs


def _progress(console: Console) -> Progress:
    """A bar that is drawn only when told to, so that it takes no time from what is measured."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(
        *columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
    )


def _notifier(progress: Progress, task: Any, name: str) -> Notify:
    def notify(text: str) -> None:
        progress.update(task, description=f"{name}: {text}")
        progress.refresh()

    return notify


def _run_memory(options: argparse.Namespace, console: Console) -> dict[str, dict[str, Any]]:
    """Each library in a fresh process, without and with a tiny call before; Ctrl-C keeps what is done."""
    results: dict[str, dict[str, Any]] = {}
    todo = list(itertools.product(MEMORY_CASES, options.peers))
    with _progress(console) as progress:
        task = progress.add_task("", total=len(todo))
        try:
            for case, name in todo:
                _notifier(progress, task, case)(name)
                found = {
                    kind: _memory(options.threads, case, name, kind == "warm") for kind in ("first", "warm")
                }
                results.setdefault(case, {})[name] = found
                progress.advance(task)
        except KeyboardInterrupt:
            console.print("Interrupted.")
    return results


def _memory(num_threads: int, case: str, name: str, warm: bool) -> dict[str, Any]:
    with Worker(name, num_threads) as worker:
        try:
            found: dict[str, Any] = worker.ask("memory", case=case, warm=warm)
        except WorkerError as problem:
            found = {"reason": str(problem)}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 1 when fastattn was wrong or could not run, else 0."""
    options = _arguments(argv)
    console = Console()
    if not console.is_terminal:
        console = Console(width=FILE_WIDTH)
    cases = _selected(options)
    if options.list:
        report.print_case_list(console, cases)
        return 0

    runs: list[CaseRun] = []
    memory = None
    if options.memory:
        memory = _run_memory(options, console)
        report.print_memory(console, memory)
    else:
        runs = _run_cases(options, cases, console)
        if options.errors:
            report.print_errors(console, runs, options.peers)
        else:
            report.print_speed(console, runs, options.peers, options.threads)
    if options.json is not None:
        document = report.as_json(options.threads, runs, memory)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    failed = [
        f"{run.case.name} ({name})"
        for run in runs
        for name, library in run.libraries.items()
        if library.reason is not None and (name == OURS[0] or (name in OURS and library.wrong))
    ]
    if failed:
        console.print(f"[red]fastattn was wrong or could not run on: {', '.join(failed)}[/]")
    return 1 if failed else 0
