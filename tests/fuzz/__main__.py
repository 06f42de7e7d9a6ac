"""``python -m tests.fuzz``: see the docstring of the package."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fuzz import __doc__ as description
from tests.fuzz import checks, forks, mallocs, sanitized
from tests.fuzz.records import KINDS, Record
from tests.fuzz.runner import Progress, Run
from tests.fuzz.worker import manner_of, prepare


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.fuzz", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000, help="how many; default 10,000")
    parser.add_argument("--seed", type=int, default=0, help="the first; a run goes on where another ended")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--engines", help="comma-separated, of those that are here; default all")
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated; default all: %(default)s")
    parser.add_argument("--timeout", type=float, default=60, help="seconds after which a case hangs")
    parser.add_argument("--sanitize", action="store_true", help="on a build with AddressSanitizer and UBSan")
    parser.add_argument("--malloc-failures", action="store_true", help="some malloc of the driver fail")
    parser.add_argument("--forks", type=int, metavar="N", help="N children, while threads work")
    parser.add_argument("--threads", type=int, default=8, help="of --forks; default 8")
    parser.add_argument("--record", help="one case: its JSON, or a file of it")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    given = arguments(argv)
    if given.record is not None:
        text = given.record if given.record.lstrip()[:1] in "{[" else Path(given.record).read_text()
        return replay(json.loads(text))
    if given.forks is not None:
        return fork(given)
    engines = given.engines.split(",") if given.engines else default_engines(given)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {}
        if given.sanitize:
            print("building with sanitizers ...", flush=True)
            sanitized.build(Path(folder))
            options = {"root": Path(folder), "environment": sanitized.environment(), "mode": "sanitize"}
        if given.malloc_failures:
            library = mallocs.build(Path(folder))
            options = {"environment": {"LD_PRELOAD": str(library)}, "mode": "malloc"}
        stop = given.seed + given.cases
        run = Run(
            given.seed, stop, processes=given.processes, engines=engines, kinds=given.kinds.split(","),
            timeout=given.timeout, **options,
        )  # fmt: skip
        began = time.monotonic()
        with Bar(given.cases) as bar:
            progress = run.run(bar.tell)
    return summary(
        progress, time.monotonic() - began, f"seeds {given.seed} to {stop - 1} of {', '.join(engines)}"
    )


def default_engines(given: argparse.Namespace) -> list[str]:
    """Numba's code is compiled by the process, with neither sanitizers nor the driver's malloc."""
    found = checks.engines()
    if given.sanitize or given.malloc_failures:
        return [name for name in found if name.startswith("cython")]
    return found


def replay(records: Record | list[Record]) -> int:
    prepare()
    failed = 0
    for record in records if isinstance(records, list) else [records]:
        found = manner_of(record)
        print("as it should be" if found is None else f"{found[0]}: {found[1]}")
        failed |= found is not None
    return int(failed)


def fork(given: argparse.Namespace) -> int:
    began = time.monotonic()
    cases = 0
    with Bar(given.forks) as bar:

        def show(children: int, done: int) -> None:
            nonlocal cases
            cases = done
            bar.show(children, 0)

        failures = forks.run(given.forks, given.threads, given.seed, show)
    print(
        f"{given.forks} children, {cases} cases in {given.threads} threads, {time.monotonic() - began:.0f} s"
    )
    for failure in failures[:20]:
        print(failure)
    print(f"{len(failures)} failures")
    return int(bool(failures))


def summary(progress: Progress, seconds: float, what: str) -> int:
    rate = progress.cases / max(seconds, 1e-9)
    failed = len(progress.failures)
    print(f"{progress.cases} cases ({what}) in {seconds:.0f} s, {rate:.0f} per second; {failed} failed")
    if progress.counts:
        print(", ".join(f"{name}: {number}" for name, number in progress.counts.items()))
    if progress.ended_at is not None:
        print(f"interrupted; go on with --seed {progress.ended_at}")
    manners = Counter(failure["manner"] for failure in progress.failures)
    for manner, number in manners.most_common():
        print(f"\n{manner}: {number}")
        of_manner = [failure for failure in progress.failures if failure["manner"] == manner]
        of_manner.sort(key=lambda failure: len(json.dumps(failure["record"])))
        for failure in of_manner[:3]:
            print(f"  seed {failure['failed']}: {failure['message']}\n  {json.dumps(failure['record'])}")
    return int(bool(progress.failures))


class Bar:
    """The progress bar; where there is no terminal, a line every half minute."""

    def __init__(self, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._told = 0
        self._total, self._began, self._said = total, time.monotonic(), time.monotonic()
        self._bar = RichProgress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:.0f} per second"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[failures]} failed"),
            refresh_per_second=2,
            disable=not sys.stdout.isatty(),
        )
        self._task = self._bar.add_task("", total=total, rate=0.0, failures=0)

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def tell(self, progress: Progress) -> None:
        """How far a run is, and what has failed since it was last asked."""
        for failure in progress.failures[self._told :]:
            self._bar.console.print(json.dumps(failure), markup=False, highlight=False, soft_wrap=True)
        self._told = len(progress.failures)
        self.show(progress.cases, self._told)

    def show(self, done: int, failures: int) -> None:
        now = time.monotonic()
        rate = done / max(now - self._began, 1e-9)
        self._bar.update(self._task, completed=done, rate=rate, failures=failures)
        if self._bar.disable and now - self._said > 30:
            self._said = now
            print(f"{done} of {self._total}, {rate:.0f} per second, {failures} failed", flush=True)


if __name__ == "__main__":
    sys.exit(main())
