"""``python -m benchmarks.gpu``: all that a machine with an NVIDIA GPU can show, in under ten minutes.

What is installed, twelve cases from small to large, the benchmark beside PyTorch's kernels and CuPy, shapes
of tiles side by side, the tests at a GPU's own sizes, the other tests, and some under NVIDIA's
compute-sanitizer where it is installed.
Each stage has so many seconds, and the next begins whatever came of it, unless nothing can run: no GPU is
usable, or each of the twelve cases fails.
What a stage prints goes to a folder as it comes, beside figures in JSON. The exit status is 1 where a stage
failed. Needs the extra cuda, pytest, pytest-xdist and rich; PyTorch and CuPy take part where they are.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.metadata import distributions, version
from importlib.util import find_spec
from multiprocessing.pool import ThreadPool
from pathlib import Path
from threading import Thread
from typing import IO, Any, NamedTuple

import numpy as np

import fastattn
from fastattn.backends.cuda import backend as cuda_backend
from fastattn.bench.oracle import TOLERANCE_EPS

ROOT = Path(__file__).resolve().parent.parent
SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"

#: Of all stages. After an interrupt one has so many to print what it has.
BUDGET, GRACE = 570, 15

#: Of one of the twelve cases, which is a process of its own: it may crash, or hang. So many run side by side,
#: as most of their time is the compiler's.
CASE_SECONDS, CASE_JOBS = 60, min(12, os.cpu_count() or 1)

#: The exit status of a stage after which no other can run.
NOTHING_RUNS = 10

#: Query heads / key heads, queries, keys, columns; dtype; options, where True stands for a random array.
TWELVE: dict[str, tuple[tuple[int, ...], str, dict[str, Any]]] = {
    "plain-small": ((1, 1, 4, 4, 8), "float32", {}),
    "plain": ((2, 2, 100, 130, 64), "float32", {}),
    "causal": ((2, 2, 200, 200, 64), "float32", {"causal": True}),
    "bfloat16": ((2, 2, 300, 300, 64), "bfloat16", {"window": (40, 3)}),
    "mask": ((2, 2, 150, 300, 64), "float32", {"mask": True}),
    "bias": ((2, 2, 150, 300, 64), "float32", {"bias": True}),
    "weights": ((2, 2, 140, 150, 40), "float32", {"causal": "bottom_right", "return_weights": True}),
    "gqa": ((8, 2, 300, 500, 64), "float32", {"causal": "bottom_right"}),
    "decode": ((32, 8, 1, 4096, 128), "float32", {}),
    "float64": ((2, 2, 500, 500, 64), "float64", {"causal": True}),
    "wide": ((2, 2, 1000, 1000, 128), "float32", {}),
    "large": ((4, 4, 2048, 2048, 128), "float32", {"causal": True}),
}

#: A case of every kind of kernel: under the sanitizer each access is looked at.
SANITIZED = ("tests/cuda/test_real_sizes.py", "-k", "sanitized and (float32 or bfloat16)")

#: What the project wants to know first; all cases take twice as long.
CASES = ("gpu-4096-64", "gpu-4096-64-causal", "gpu-4096-128", "gpu-4096-128-causal", "gpu-decode",
         "gpu-16-rows", "gpu-decode-8-rows", "gpu-decode-4096")  # fmt: skip


class Stage(NamedTuple):
    name: str
    command: list[str]
    seconds: float


def stages(jobs: int, folder: Path) -> list[Stage]:
    """In order; nothing runs beside a stage that measures."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", ""]
    bench = [sys.executable, "-m", "fastattn", "bench", "--gpu", "--cases", *CASES]
    bench += ["--json", str(folder / "benchmark.json")]
    if SIMULATED:  # it has no clock
        bench = [*pytest, "tests/cuda/test_bench_gpu.py"]
    found = [
        Stage("info", _call("info", str(folder)), 60),
        Stage("twelve", _call("twelve", str(folder)), 130),
        Stage("benchmark", bench, 200),
        Stage("real-sizes", [*pytest, "-n", str(jobs), "tests/cuda/test_real_sizes.py"], 120),
        Stage("other-tests", [*pytest, "-n", str(jobs), "tests/cuda", "--ignore", SANITIZED[0]], 150),
    ]
    if find_spec("torch") and not SIMULATED:
        shapes = [sys.executable, "-m", "benchmarks.gpu_shapes", "--json", str(folder / "shapes.json")]
        found.insert(3, Stage("shapes", [*shapes, "--jobs", str(jobs)], 120))
    sanitizer = _tool("compute-sanitizer")
    for tool in ("memcheck", "racecheck") if sanitizer and not SIMULATED else ():
        checked = [str(sanitizer), "--tool", tool, "--error-exitcode", "9", *pytest, *SANITIZED]
        found.append(Stage(tool, checked, 90))
    return found


def _call(function: str, argument: str) -> list[str]:
    """A function of this file in a process of its own."""
    return [sys.executable, "-c", f"from benchmarks import gpu; gpu.{function}({argument!r})"]


def _tool(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")


def info(folder: str) -> None:
    """Print and write what is installed; exit status `NOTHING_RUNS` where the backend cannot be used."""
    fastattn.show_config()
    found: dict[str, Any] = {"reasons": cuda_backend.backend.unavailable_reasons()}
    found |= {name: os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES")}
    names = re.compile("(numba|cuda-|nvidia-(nvvm|nvjitlink|cuda-n)|torch$|cupy)")
    found |= {it.name: version(it.name) for it in distributions() if names.match(it.name)}
    for name, ask in {
        "GPU": lambda: subprocess.check_output(["nvidia-smi"], text=True).splitlines(),
        "capability": lambda: import_module("numba.cuda").get_current_device().compute_capability,
        "CUDA of the driver": lambda: import_module("cuda.bindings.driver").cuDriverGetVersion(),
        **{name: partial(_library, name) for name in ("nvvm", "nvrtc", "nvJitLink")},
    }.items():
        try:
            found[name] = ask()
        except Exception as error:  # each has its own
            found[name] = f"{type(error).__name__}: {error}"
    text = json.dumps(found, indent=1, default=str)
    (Path(folder) / "info.json").write_text(text)
    print(text)
    sys.exit(NOTHING_RUNS if found["reasons"] else 0)


def _library(name: str) -> str:
    return import_module("cuda.pathfinder").load_nvidia_dynamic_lib(name).abs_path


def twelve(folder: str) -> None:
    """Run, print and write the twelve cases; exit status 1 where one was wrong or did not run, `NOTHING_RUNS`
    where none was right."""
    found = {}
    with ThreadPool(CASE_JOBS) as pool:
        for name, case in zip(TWELVE, pool.imap(_one_in_a_process, TWELVE), strict=True):
            found[name] = case
            print("{}: {said} {failed} ({seconds:.1f} s)".format(name, **case), flush=True)
            (Path(folder) / "twelve.json").write_text(json.dumps(found, indent=1))
    failed = sum(bool(case["failed"]) for case in found.values())
    sys.exit(NOTHING_RUNS if failed == len(found) else bool(failed))


def _one_in_a_process(name: str) -> dict[str, Any]:
    start, said = time.monotonic(), ""
    try:
        done = subprocess.run(_call("one", name), capture_output=True, text=True, timeout=CASE_SECONDS)
        failed = "" if done.returncode == 0 else f"FAILED, exit status {done.returncode}"
        said = done.stdout.strip() or "\n".join(done.stderr.splitlines()[-15:])
    except subprocess.TimeoutExpired:
        failed = f"FAILED, not done in {CASE_SECONDS} s"
    return {"failed": failed, "said": said, "seconds": time.monotonic() - start}


def one(name: str) -> None:
    """Print the largest errors of a case; exit status 1 where one is too large."""
    sizes, dtype, options = TWELVE[name]
    heads, kv_heads, len_q, len_k, dim = (min(n, 8) for n in sizes) if SIMULATED else sizes
    if dtype == "bfloat16":
        import_module("ml_dtypes")  # which names it
    rng = np.random.default_rng(0)
    shapes = ((heads, len_q, dim), *((kv_heads, len_k, dim),) * 2, (heads, len_q, len_k))
    query, key, value, bias = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    given = {"bias": bias, "mask": bias > 0}
    options = {"return_lse": True, **options}
    options |= {option: array for option, array in given.items() if options.get(option) is True}
    if query.itemsize == 2:
        options["out"] = np.empty(query.shape, np.float32)  # not rounded
    results = fastattn.attention(query, key, value, backend="cuda", **options)
    wide = [array.astype(np.float64) for array in (query, key, value)]
    options.pop("out", None)
    answers = fastattn.attention(*wide, backend="reference", **options)
    is_right = True
    for kind, result, answer in zip(("out", "lse", "weights"), results, answers, strict=False):
        error = float(np.abs(result - answer).max())
        largest = np.abs(value if kind == "out" else answer).max()
        allowed = TOLERANCE_EPS * np.finfo(result.dtype).eps * max(1.0, float(largest))
        is_right &= error <= allowed
        print(f"{kind} {error:.2g} (at most {allowed:.2g})", end="  ")
    sys.exit(not is_right)


def run(stage: Stage, seconds: float, folder: Path) -> str:
    """Run a stage, keeping what it prints; its verdict. One that overruns is interrupted, then killed."""
    print(f"\n==> {stage.name}, {seconds:.0f} s: {shlex.join(stage.command)}", flush=True)
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    home = Path(_tool("nvcc") or "nvcc").resolve().parent.parent
    if not {"CUDA_HOME", "CUDA_PATH"} & environment.keys() and any(home.glob("nvvm/lib64/libnvvm.so*")):
        environment["CUDA_HOME"] = str(home)
    process = subprocess.Popen(
        stage.command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    copier = Thread(target=_copy, args=(process.stdout, folder / f"{stage.name}.log"))
    try:
        copier.start()
        status = process.wait(seconds)
        return "passed" if status == 0 else f"FAILED, exit status {status}"
    except subprocess.TimeoutExpired:
        return f"FAILED, not done in {seconds:.0f} s"
    finally:
        with suppress(ProcessLookupError):  # it and what it started, which is a group
            try:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGINT)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(GRACE)
            finally:
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        copier.join()


def _copy(source: IO[str], path: Path) -> None:
    with open(path, "w", buffering=1) as log:
        for line in source:
            log.write(line)
            print(line, end="", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder for it: %(default)s")
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="of the tests")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds in all: %(default)s")
    options = parser.parse_args(arguments)
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.budget - GRACE
    ended: dict[str, str] = {}
    status = 0
    for stage in stages(options.jobs, folder):
        start = time.monotonic()
        seconds = min(stage.seconds, end - start)
        try:
            verdict = run(stage, seconds, folder) if seconds > 0 else "FAILED, no time was left"
        except KeyboardInterrupt:
            verdict, status = "interrupted", 130
        status = status or int("FAILED" in verdict)
        ended[stage.name] = f"{verdict} ({time.monotonic() - start:.0f} s)"
        if status == 130 or verdict == f"FAILED, exit status {NOTHING_RUNS}":
            break
    summary = "\n".join(f"{name}: {how}" for name, how in ended.items())
    (folder / "summary.txt").write_text(f"{summary}\n")
    print(f"\n{summary}")
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
