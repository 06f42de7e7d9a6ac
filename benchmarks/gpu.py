"""``python -m benchmarks.gpu``: all that a machine with an NVIDIA GPU can show, in some ten minutes.

What is found, the tests of the CUDA backend on the GPU, the same under NVIDIA's compute-sanitizer where it is
installed, and the benchmark beside PyTorch's kernels and CuPy. Each stage has so many seconds, and the next
one begins whatever came of it; the exit status is 1 where one failed. Needs the extras cuda and test, and
rich; PyTorch and CuPy take part where they are.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from fastattn.backends.cuda import backend as cuda_backend

ROOT = Path(__file__).resolve().parent.parent

#: A case of every kind of kernel: under the sanitizer each access is looked at.
SANITIZED = ("tests/cuda/test_real_sizes.py", "-k", "sanitized and float32")

#: What the project wants to know first; all cases take twice as long.
CASES = ("gpu-4096-64", "gpu-4096-64-causal", "gpu-4096-128", "gpu-4096-128-causal", "gpu-decode")


class Stage(NamedTuple):
    name: str
    command: list[str]
    seconds: int


def stages(jobs: int, json: Path) -> list[Stage]:
    """In order; nothing runs beside a stage that measures."""
    pytest = [sys.executable, "-m", "pytest", "-q"]
    found = [
        Stage("what is here", [sys.executable, "-m", "fastattn", "info"], 20),
        Stage("tests", [*pytest, "-n", str(jobs), "tests/cuda"], 210),
    ]
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if sanitizer is None:
        print("compute-sanitizer is not installed: its stages are left out")
    else:
        for tool in ("memcheck", "racecheck"):
            checked = [sanitizer, "--tool", tool, "--error-exitcode", "9", *pytest, *SANITIZED]
            found.append(Stage(tool, checked, 90))
    bench = [sys.executable, "-m", "fastattn", "bench", "--gpu", "--json", str(json), "--cases", *CASES]
    found.append(Stage("benchmark", bench, 180))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="of the benchmark: %(default)s")
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="of the tests")
    options = parser.parse_args()
    if reasons := cuda_backend.backend.unavailable_reasons():
        print("; ".join(reasons))
        return 1
    ended = {}
    for stage in stages(options.jobs, options.json.resolve()):
        print(f"\n==> {stage.name}: {shlex.join(stage.command)}", flush=True)
        start = time.monotonic()
        try:
            status = subprocess.run(stage.command, cwd=ROOT, timeout=stage.seconds, check=False).returncode
            ended[stage.name] = "passed" if status == 0 else f"FAILED, exit status {status}"
        except subprocess.TimeoutExpired:
            ended[stage.name] = f"FAILED, not done in {stage.seconds} s"
        ended[stage.name] += f" ({time.monotonic() - start:.0f} s)"
    print("\n" + "\n".join(f"{name}: {how}" for name, how in ended.items()))
    return int(any("FAILED" in how for how in ended.values()))


if __name__ == "__main__":
    sys.exit(main())
