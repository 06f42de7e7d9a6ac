"""The command line of the benchmark on a GPU."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastattn.backends.cuda import backend as cuda_backend
from fastattn.bench.case import Case
from fastattn.bench.gpu.cases import GPU_CASES, HOST_CASES
from fastattn.bench.outputs import new_console, new_table, printable, why_not_writable

if TYPE_CHECKING:
    from rich.console import Console

WRONG = 1

#: Of each case, where ``--rounds`` says nothing.
ROUNDS = 15

#: Width of the tables when they go to a file or a pipe.
FILE_WIDTH = 140


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; 1 where fastattn was wrong or could not run, or no GPU is here."""
    options = _arguments(argv)
    console = new_console(FILE_WIDTH)
    if reasons := cuda_backend.backend.unavailable_reasons():
        console.print(f"[red]{'; '.join(reasons)}[/]")
        return WRONG
    cases = [GPU_CASES[name] for name in options.cases or GPU_CASES]
    result = run(cases, options.rounds, console, options.json)
    found = (way for case in result["cases"].values() for way in case["ways"])
    return WRONG if any(way["reason"] is not None for way in found if way["library"] == "fastattn") else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fastattn bench --gpu",
        description="Times attention on an NVIDIA GPU beside PyTorch's kernels and CuPy's plain formula.",
    )
    parser.add_argument(
        "--cases", nargs="+", default=[], choices=list(GPU_CASES), metavar="NAME",
        help=f"of {', '.join(GPU_CASES)}",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="%(default)s by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds is at least 1, got {options.rounds}")
    if options.json is not None and (reason := why_not_writable(options.json)):
        parser.error(f"--json: {printable(options.json)} cannot be written: {reason}")
    return options


def run(cases: Sequence[Case], rounds: int, console: Console, path: Path | None = None) -> dict[str, Any]:
    """Measure the cases on the GPU, printing and writing each as it is done; everything, as JSON has it."""
    from fastattn.bench.gpu import libraries, probes
    from fastattn.bench.gpu.measure import measure

    name = _device_name()
    bandwidth = probes.read_bandwidth()
    peaks = {dtype: probes.fma_peak(dtype) for dtype in sorted({case.dtype for case in cases})}
    console.print(f"{name}, {_versions()}")
    for dtype, peak in peaks.items():
        console.print(f"multiply-adds, {dtype}: {peak / 1e12:.1f} TFLOP/s")
    console.print(f"reading memory: {bandwidth / 1e9:.0f} GB/s")
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "device": name, "versions": _versions(),
        "fma_peak": peaks, "read_bandwidth": bandwidth, "host": _host_times(console), "cases": {},
    }  # fmt: skip
    for case in cases:
        # The peak before and after: its clock follows its temperature.
        before = probes.fma_peak(case.dtype)
        with console.status("") as status:
            found = measure(case, list(libraries.ways()), rounds, status.update)
        peak = max(before, probes.fma_peak(case.dtype))
        columns = ("library", "ms", "over the fastest of ours", "of the limit", "largest error", "reason")
        table = new_table(columns, left=("library", "reason"))
        table.title = f"{case.name}: {case.shape} {case.options}"
        right = [way for way in found if way.milliseconds]
        ours = min((way.median for way in right if way.library == "fastattn"), default=None)
        limit = case.nbytes / bandwidth if case.cold else case.flops / peak
        for way in found:
            error = "" if way.error is None else f"{way.error:.2g}"
            cells = ["", "", ""]
            if way.milliseconds:
                share = limit / (way.median / 1e3)
                ratio = "" if ours is None else f"{way.median / ours:.2f}"
                cells = [f"{way.median:.3f}", ratio, f"{share:.0%}"]
            table.add_row(f"{way.library}, {way.label}", *cells, error, way.reason or "")
        console.print(table)
        result["cases"][case.name] = {
            "case": asdict(case), "flops": case.flops, "nbytes": case.nbytes, "fma_peak": peak,
            "limit_milliseconds": 1e3 * limit, "ways": [asdict(way) for way in found],
        }  # fmt: skip
        if path is not None:
            path.write_text(json.dumps(result, indent=1))
    return result


def _host_times(console: Console) -> dict[str, Any]:
    """What a call costs on the host, for each library of arrays."""
    from fastattn.bench.gpu import libraries
    from fastattn.bench.gpu.measure import host_microseconds

    found: dict[str, Any] = {}
    for case, way in product(HOST_CASES, libraries.ways()):
        if way.library == "fastattn":
            name = f"{case.name}, {way.label}"
            try:
                found[name] = host_microseconds(case, way)
                console.print(
                    "{}: returned after {returned:.0f} us, done after {done:.0f} us".format(
                        name, **found[name]
                    )
                )
            except Exception as problem:
                found[name] = f"{type(problem).__name__}: {problem}"
                console.print(f"{name}: {found[name]}", markup=False)
    return found


def _device_name() -> str:
    from numba import cuda

    name = getattr(cuda.get_current_device(), "name", "a simulated device")
    return name.decode() if isinstance(name, bytes) else str(name)


def _versions() -> str:
    found = [f"python {platform.python_version()}"]
    for package in ("fastattn", "numba", "numba-cuda", "torch", "cupy-cuda13x", "cupy-cuda12x"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)
