"""What is written in C alone: the micro-kernels on every instruction set, under the sanitizers and as a NEON
build; the pool of threads, threads on cores, and the jobs of a BLAS on threads.

`tests/kernels/run` does the work and can be run by itself.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastattn._machine import constants
from tests.conftest import ISAS

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs bash and mprotect")

on_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="threads have no affinity elsewhere"
)

RUN = Path(__file__).parent / "kernels" / "run"
COMPILER = os.environ.get("CC", "gcc")
CROSS_TOOLS = (os.environ.get("CROSS_CC", "aarch64-linux-gnu-gcc"), os.environ.get("QEMU", "qemu-aarch64"))


def printed(mode: str) -> str:
    """Run a mode of the script; what it prints."""
    done = subprocess.run(
        [RUN, mode],
        env=os.environ | {"PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,  # seconds of work, but a busy machine can take many times that
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def passed(mode: str) -> set[tuple[str, str]]:
    """The instruction sets and float types whose checks in this mode all passed."""
    found = re.findall(r"^(\w+) (float\d+): [1-9]\d* checks, 0 failed", printed(mode), re.MULTILINE)
    return {(isa, dtype) for isa, dtype in found}


def both_types(*isas: str) -> set[tuple[str, str]]:
    return {(isa, dtype) for isa in isas for dtype in ("float32", "float64")}


def of_this_machine() -> set[tuple[str, str]]:
    """What the tests of all kernels must have checked here; those of pairs and tiles are of float32."""
    extended = {isa for isa in ISAS if isa in constants.EXTENDED}
    return both_types("portable", *ISAS) - {(isa, "float64") for isa in extended}


def emulated() -> set[tuple[str, str]]:
    """The kernels of the tile unit, on a CPU with their vectors and without it: see ``tile_emulator.c``."""
    knows = [COMPILER, "-mamx-bf16", "-x", "c", "-c", os.devnull, "-o", os.devnull]
    is_built = "avx512" in ISAS and subprocess.run(knows, capture_output=True).returncode == 0
    return {("amx", "float32")} if is_built and sys.platform == "linux" else set()


def require(*tools: str) -> None:
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")


@pytest.mark.slow
def test_native() -> None:
    require(COMPILER)
    assert passed("native") >= of_this_machine() | emulated()


def require_sanitizers(names: str, folder: Path) -> None:
    program = folder / "program"
    build = [COMPILER, f"-fsanitize={names}", "-x", "c", "-", "-o", program]
    compiled = subprocess.run(build, input="int main(void) { return 0; }", text=True, capture_output=True)
    if compiled.returncode != 0 or subprocess.run([program], capture_output=True).returncode != 0:
        pytest.skip(f"{COMPILER} builds no program that runs with the sanitizers {names}")


@pytest.mark.slow
def test_sanitizers(tmp_path: Path) -> None:
    require(COMPILER)
    require_sanitizers("address,undefined", tmp_path)
    assert passed("sanitize") >= of_this_machine() | emulated()


@pytest.mark.slow
def test_neon_under_qemu() -> None:
    require(*CROSS_TOOLS)
    assert passed("neon") == both_types("neon")


def checked(mode: str) -> list[str]:
    """The programs whose checks in this mode all passed."""
    return re.findall(r"^(\w+): [1-9]\d* checks, 0 failed", printed(mode), re.MULTILINE)


@on_linux
def test_pool() -> None:
    require(COMPILER)
    assert checked("pool") == ["placement", "pool"]


@pytest.mark.slow
@on_linux
def test_threads() -> None:
    require(COMPILER)
    assert checked("threads") == ["placement", "pool", "pool", "blas"]


@pytest.mark.slow
@on_linux
def test_races(tmp_path: Path) -> None:
    require(COMPILER, os.environ.get("VALGRIND", "valgrind"))
    require_sanitizers("thread", tmp_path)
    assert checked("races") == ["pool", "pool"]


@pytest.mark.slow
class TestBuiltByZig:
    """For other systems, by the package ziglang; what runs here is run."""

    @pytest.fixture(autouse=True)
    def _zig(self) -> None:
        pytest.importorskip("ziglang")

    def test_musl(self) -> None:
        if not sys.platform.startswith("linux"):
            pytest.skip("runs on Linux")
        assert passed("musl") >= of_this_machine()

    def test_windows_under_wine(self) -> None:
        require(os.environ.get("WINE", "wine"))
        if platform.machine() != "x86_64":
            pytest.skip("wine runs programs of its own machine")
        assert passed("windows") >= of_this_machine()

    def test_macos_compiles(self) -> None:
        linked = re.findall(r"^(\S+): compiled and linked$", printed("macos"), re.MULTILINE)
        assert linked == ["aarch64-macos", "x86_64-macos"]

    def test_webassembly(self) -> None:
        pytest.importorskip("wasmtime")
        assert passed("wasm") == both_types("portable")
