"""The package built with AddressSanitizer and UBSan, in a folder of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.process import ROOT

#: As in tests/kernels/run. They come after those of setup.py, of which the last level of optimisation holds.
FLAGS = "-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"


def build(folder: Path) -> None:
    """Copies the package there and builds its extension in place."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "driver.c", "results")
    shutil.copytree(ROOT / "fastattn", folder / "fastattn", ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)
    (folder / "tests").symlink_to(ROOT / "tests")
    compiler = folder / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CC", "gcc")} "$@" {FLAGS}\n')
    compiler.chmod(0o755)
    variables = {"CC": str(compiler), "FASTATTN_REQUIRE_EXTENSION": "1"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=folder, env=os.environ | variables, check=True, capture_output=True)


def environment() -> dict[str, str]:
    """Of a process that loads it: Python itself is not built with the sanitizers' run-time libraries.

    Leaks are those of the interpreter. Python's and NumPy's own memory is asked for block by block, so that
    it is known what lies behind an array.
    """
    compiler = os.environ.get("CC", "gcc")
    libraries = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }
