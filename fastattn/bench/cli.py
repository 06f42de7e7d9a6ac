"""The command line: ``python -m fastattn bench``."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastattn._machine import host
from fastattn.bench import document
from fastattn.bench.case import RULES, Case, itemsize
from fastattn.bench.cases import CASES, GROUPS, MEMORY_CASES, case_of_shape, check_keys, possible_cases
from fastattn.bench.compare import compare
from fastattn.bench.measure import Notify, Patience, check, measure, measure_memory
from fastattn.bench.outputs import new_console, printable, why_not_writable
from fastattn.bench.peers import DEFAULT_PEERS, OURS, PEERS, taking_part
from fastattn.bench.peers._base import available_memory
from fastattn.bench.process import Crew
from fastattn.bench.records import CaseRun

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

#: Width of the tables when they go to a file or a pipe.
FILE_WIDTH = 120

#: Exit statuses beside 0 and argparse's 2.
WRONG, SLOWER, INTERRUPTED = 1, 3, 130

#: Seconds: the longest that a case takes, and all cases of ``--quick`` together.
CASE_SECONDS, QUICK_SECONDS = 25.0, 80.0

#: Seconds per round of ``--quick`` that are spent on the share of the limit.
QUICK_SHARE_SECONDS = 0.15

#: Every case that can be named, and every group.
_NAMES = {**CASES, **MEMORY_CASES}
_GROUPS = (*GROUPS, *dict.fromkeys(case.group for case in MEMORY_CASES.values()))


#: Fields of `Case` that ``--shape`` may be given with, each by an option of its name.
_SHAPE_FIELDS: dict[str, dict[str, Any]] = {
    "causal": {
        "action": "store_true",
        "help": "no key after a query's own, the last's being the last",
    },
    "window": {
        "nargs": 2,
        "type": int,
        "metavar": ("LEFT", "RIGHT"),
        "help": "so many keys to both sides of a query's own",
    },
    "key_lengths": {"choices": ["ragged"], "help": "items end early, at an eighth of S to all of it"},
    "document_length": {"type": int, "metavar": "N", "help": "texts of N tokens in a row, each for itself"},
    "mask": {"choices": ["random", "padding"], "help": "a bool mask: (L, S), half True, or (B, 1, 1, S)"},
    "bias": {"choices": ["shared", "per_head"], "help": "a float bias (L, S) or (H, L, S)"},
    "softcap": {"type": float, "metavar": "C", "help": "scores become c · tanh(x / c)"},
    "dtype": {"choices": ["float32", "float64", "float16", "bfloat16"], "help": "float32 by default"},
    "storage": {"choices": ["float16", "bfloat16", "int8"], "help": "of keys and values, beside that dtype"},
    "page_size": {"type": int, "metavar": "N", "help": "keys and values in pages of N rows"},
    "backward": {"action": "store_true", "help": "the gradients, of outputs that are there before"},
    "rule": {"choices": [*RULES], "help": "gated linear attention, with a state before and after"},
    "step": {"action": "store_true", "help": "append the last L keys and values first, as a decoder does"},
    "layout": {"choices": ["bhsd", "bshd"], "help": "bshd: arrays (B, L, H, D)"},
    "cold": {"action": "store_true", "help": "keys and values come from memory, not from the caches"},
    "model_dim": {"type": int, "metavar": "N", "help": "between the products of a model with rows of N"},
}


def _names(text: str) -> list[str]:
    return [name for name in text.replace(",", " ").split() if name]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked before any work; ``compare`` becomes the document that it names."""
    parser = argparse.ArgumentParser(
        prog="python -m fastattn bench",
        description="Attention on this CPU, library beside library, against the machine's limit.",
        epilog=f"Exit status: 0; {WRONG}: fastattn was wrong or could not run; 2: bad arguments; {SLOWER}: "
        f"slower than the run that --compare names; {INTERRUPTED}: ended by Ctrl-C or SIGTERM.",
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument("--cases", nargs="+", default=[], metavar="NAME", help="only these cases; see --list")
    what.add_argument("--group", nargs="+", default=[], metavar="GROUP", help=f"of {', '.join(_GROUPS)}")
    what.add_argument(
        "--quick", action="store_true", help="a few cases of every kind and few rounds: two to three minutes"
    )
    what.add_argument(
        "--memory", action="store_true", help="peak memory at growing lengths, too; alone: --group memory"
    )
    what.add_argument("--gpu", action="store_true", help="on an NVIDIA GPU instead; see --gpu --help")
    what.add_argument(
        "--peers",
        type=_names,
        default=list(DEFAULT_PEERS),
        metavar="A,B",
        help=f"of {', '.join(PEERS)}; by default {', '.join(DEFAULT_PEERS)}",
    )
    what.add_argument(
        "--threads",
        type=int,
        default=min(2, host.available_cores()),
        metavar="N",
        help="of every library, %(default)s; some cases have a count of their own",
    )
    what.add_argument(
        "--rounds", type=int, metavar="N", help=f"at most N rounds per case, {Patience(0.0).most}"
    )
    what.add_argument("--errors", action="store_true", help="check only: the largest error of each library")
    own = parser.add_argument_group("a case of your own, with options named like the arguments of attention")
    own.add_argument(
        "--shape", nargs="+", default=[], metavar="B,H[/K],L,S,D[/E]", help="these instead of the catalogue"
    )
    for field_name, settings in _SHAPE_FIELDS.items():
        own.add_argument(f"--{field_name.replace('_', '-')}", **settings)
    result = parser.add_argument_group("what becomes of it")
    result.add_argument(
        "--format",
        choices=["table", "markdown", "csv"],
        default="table",
        help="of the results on stdout, %(default)s by default; with the others all else goes to stderr",
    )
    result.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    result.add_argument("--plots", type=Path, metavar="DIR", help="draw it; needs matplotlib")
    result.add_argument("--compare", type=Path, metavar="OLD.json", help="did fastattn become slower since?")
    result.add_argument("--list", action="store_true", help="list the cases and stop")
    options = parser.parse_args(argv)
    try:
        _check_names(options)
        _check_numbers(options)
        _check_files(options)
        options.shape = _own_cases(options)
        options.then = document.read(options.compare) if options.compare is not None else None
    except ValueError as problem:
        parser.error(printable(problem))
    return options


def _check_names(options: argparse.Namespace) -> None:
    for kind, given, valid in (
        ("case", options.cases, _NAMES),
        ("group", options.group, _GROUPS),
        ("peer", options.peers, PEERS),
    ):
        unknown = [name for name in given if name not in valid]
        if unknown:
            raise ValueError(f"no {kind} called {', '.join(unknown)}; there are: {', '.join(valid)}")
    if not options.peers:
        raise ValueError(f"--peers names no library; there are: {', '.join(PEERS)}")


def _check_numbers(options: argparse.Namespace) -> None:
    for name in ("threads", "rounds", "page_size", "document_length", "model_dim"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is at least 1, got {value}")
    if options.softcap is not None and not 0 < options.softcap < math.inf:
        raise ValueError(f"--softcap is a positive number, got {options.softcap}")
    if options.window is not None and min(options.window) < 0:
        raise ValueError(f"--window is two counts of keys, got {' '.join(map(str, options.window))}")


def _own_cases(options: argparse.Namespace) -> list[Case]:
    """The cases that ``--shape`` and the options beside it describe."""
    fields = {name: getattr(options, name) for name in _SHAPE_FIELDS}
    given = {name: value for name, value in fields.items() if value is not None and value is not False}
    if options.shape and (options.cases or options.group):
        raise ValueError("--shape stands in place of --cases and --group")
    if given and not options.shape:
        raise ValueError(f"--{next(iter(given)).replace('_', '-')} is about a --shape, and none is given")
    if options.window is not None:
        given["window"] = tuple(options.window)
    cases = [case_of_shape(shape, **given) for shape in dict.fromkeys(options.shape)]
    for case in cases:
        _check_fits(case, len(options.peers))
        check_keys(case)
    return cases


def _check_fits(case: Case, libraries: int) -> None:
    """Every library's process has arrays of its own, and the machine shall survive."""
    try:
        free = available_memory()
    except OSError:  # not on Linux: nobody knows how much there is
        return
    rows = case.batch * (case.heads * case.len_q + case.kv_heads * case.len_k)
    pairs = case.len_q * case.len_k
    bias = pairs * {None: 0, "shared": 1, "per_head": case.heads}[case.bias]
    needed = itemsize(case.dtype) * (rows * (case.head_dim + case.value_dim) + bias)
    needed += pairs if case.mask == "random" else 0
    if needed * libraries > free / 2:
        raise ValueError(
            f"--shape: {case.name} has arrays of {needed / 1e9:.1f} GB in each of {libraries} libraries, "
            f"and {free / 1e9:.1f} GB are free"
        )


def _check_files(options: argparse.Namespace) -> None:
    for name in ("json", "plots"):
        path = getattr(options, name)
        if path is None:
            continue
        folder = path.absolute().parent
        is_folder = os.path.isdir(path)  # False for a name that is too long, where Path.is_dir raises
        if not os.path.isdir(folder):
            raise ValueError(f"--{name}: no folder {folder}")
        if name == "json" and os.path.exists(path) and not os.path.isfile(path):
            kind = "folder" if is_folder else "device or a pipe"
            raise ValueError(f"--json: {path} is a {kind}, expected a file")
        if name == "plots" and os.path.exists(path) and not is_folder:
            raise ValueError(f"--plots: {path} is a file, expected a folder")
        # A folder can be made where a file of its name can be written.
        needed = [document.unfinished(path)] if name == "json" else []
        for file in (path / "plot.png" if is_folder else path, *needed):
            if reason := why_not_writable(file):
                raise ValueError(f"--{name}: {path} cannot be written: {reason}")
    for name in ("plots", "compare"):
        if options.errors and getattr(options, name) is not None:
            raise ValueError(f"--{name} needs times, and --errors takes none")
    if options.plots is not None:
        _drawing()


def _drawing() -> Callable[[dict[str, Any], Path], list[Path]]:
    """What draws the pictures; loaded for ``--plots`` alone, because matplotlib is heavy."""
    try:
        draw: Callable[[dict[str, Any], Path], list[Path]]
        draw = importlib.import_module("fastattn.bench.plots").draw_all
    except ImportError as problem:
        raise ValueError(f"--plots needs matplotlib (pip install 'fastattn[bench]'): {problem}") from None
    return draw


def _selected(options: argparse.Namespace) -> tuple[list[Case], list[str]]:
    """The cases to time and those of which to take the memory.

    Those of ``--shape``; else those asked for by name or by group, or else all to time; with ``--quick`` only
    the quick ones of them, and with ``--memory`` all the memory ones.
    """
    possible = {it.name for it in possible_cases(host.available_cores())} | set(MEMORY_CASES)
    named = [
        it
        for it in _NAMES.values()
        if it.name in options.cases or (it.group in options.group and it.name in possible)
    ]
    if options.shape:
        named = options.shape
    elif not options.cases and not options.group:
        named = possible_cases(host.available_cores())
    timed = [it for it in named if it.name not in MEMORY_CASES and (it.quick or not options.quick)]
    return timed, [name for name, it in MEMORY_CASES.items() if options.memory or it in named]


@dataclass(slots=True)
class _Measured:
    """What there is so far."""

    runs: list[CaseRun] = field(default_factory=list)
    memory: document.MemoryResults = field(default_factory=dict)
    interrupted: bool = False


def _measure(options: argparse.Namespace) -> _Measured:
    """Measure what was asked for; Ctrl-C or a SIGTERM ends it and keeps what was finished.

    The results so far are written after every case: a run takes long, and killing it shall not lose them.
    """
    from fastattn.bench import report

    found = _Measured()
    cases, memory = _selected(options)
    earlier = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _progress() as progress:
        memory_peers = {name: taking_part(options.peers, MEMORY_CASES[name]) for name in memory}
        task = progress.add_task("", total=len(cases) + sum(map(len, memory_peers.values())))

        def notifier(name: str) -> Notify:
            return lambda text: _draw(progress, task, f"{name}: {text}")

        def done(run: CaseRun) -> None:
            progress.advance(task)
            if not options.errors:
                progress.console.print(report.result_line(run), soft_wrap=True)
            _write(options, found)

        try:
            _measure_cases(options, cases, found, notifier, done)
            for name, peers in memory_peers.items():
                for peer in peers:
                    notifier(name)(peer)
                    taken = measure_memory(MEMORY_CASES[name], peer, options.threads)
                    found.memory.setdefault(name, {})[peer] = taken
                    progress.advance(task)
                    _write(options, found)
        except KeyboardInterrupt:
            found.interrupted = True
        finally:
            signal.signal(signal.SIGTERM, earlier)
    return found


def _measure_cases(
    options: argparse.Namespace,
    cases: Sequence[Case],
    found: _Measured,
    notifier: Callable[[str], Notify],
    done: Callable[[CaseRun], None],
) -> None:
    patience = Patience(CASE_SECONDS)
    if options.quick:
        patience = replace(patience, share_seconds=QUICK_SHARE_SECONDS)
    if options.rounds is not None:
        patience = replace(patience, most=options.rounds)
    end = time.monotonic() + QUICK_SECONDS
    with Crew(options.threads) as crew:
        for number, case in enumerate(cases):
            if options.quick:  # what is left of the time, in equal parts
                patience = replace(patience, seconds=(end - time.monotonic()) / (len(cases) - number))
            if options.errors:
                run = check(case, crew, options.peers, notifier(case.name))
                crew.release()
            else:
                run = measure(case, crew, options.peers, patience, notifier(case.name))
            if run.rounds or not run.interrupted:
                found.runs.append(run)
                done(run)
            if run.interrupted:
                raise KeyboardInterrupt


def _progress() -> Progress:
    """A bar that is drawn only when told to, so that it takes no time from what is measured."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(
        *columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
    )


def _draw(progress: Progress, task: Any, text: str) -> None:
    progress.update(task, description=text)
    progress.refresh()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is told by ``--help``."""
    argv = sys.argv[1:] if argv is None else argv
    if "--gpu" in argv:
        from fastattn.bench.gpu.cli import main as on_gpu

        return on_gpu([word for word in argv if word != "--gpu"])
    options = _arguments(argv)
    in_tables = options.format == "table"
    console = new_console(FILE_WIDTH, stderr=not in_tables)
    if options.list:
        from fastattn.bench import report

        timed, memory = _selected(options)
        report.print_case_list(console, [*timed, *(MEMORY_CASES[name] for name in memory)])
        return 0

    found = _measure(options)
    if in_tables:
        _print_tables(options, console, found)
    return _finish(options, console, found)


def _print_tables(options: argparse.Namespace, console: Console, found: _Measured) -> None:
    from fastattn.bench import report

    if options.errors:
        report.print_errors(console, found.runs, options.peers)
    elif found.runs or not found.memory:
        report.print_speed(console, found.runs, options.peers)
    if found.memory:
        report.print_memory(console, found.memory, options.peers)


def _write(options: argparse.Namespace, found: _Measured) -> dict[str, Any]:
    """The document of what there is so far, after it was written where ``--json`` says."""
    result = document.build(options.threads, found.runs, found.memory)
    if options.json is not None:
        document.write(options.json, result)
    return result


def _finish(options: argparse.Namespace, console: Console, found: _Measured) -> int:
    """Write, draw and compare; the exit status."""
    from fastattn.bench import flat, report

    result = _write(options, found)
    if options.format != "table":
        print(flat.FORMATS[options.format](result), end="")
    slower: list[str] = []
    if options.then is not None:
        comparison = compare(options.then, result)
        report.print_comparison(console, comparison, printable(options.compare.name))
        slower = comparison.slower
    if options.plots is not None:
        options.plots.mkdir(exist_ok=True)
        for picture in _drawing()(result, options.plots):
            console.print(f"drew {printable(picture)}", markup=False, highlight=False)
    failed = [
        f"{run.case.name} ({name})"
        for run in found.runs
        for name, library in run.libraries.items()
        if library.reason is not None and (name == OURS[0] or (name in OURS and library.wrong))
    ]
    if failed:
        console.print(f"[red]fastattn was wrong or could not run on: {', '.join(failed)}[/]")
    if slower:
        text = f"fastattn is slower than in {printable(options.compare.name)} on: {', '.join(slower)}"
        console.print(text, style="red", markup=False)
    if found.interrupted:
        console.print(f"[yellow]Interrupted: {len(found.runs)} cases have finished rounds.[/]")
        return INTERRUPTED
    return WRONG if failed else SLOWER if slower else 0
