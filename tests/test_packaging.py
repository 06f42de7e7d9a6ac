"""The source distribution, what each platform gets compiled, and what an install gives without a compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fastattn._machine import constants
from tests.process import ROOT, python

for tool in ("Cython", "setuptools"):
    pytest.importorskip(tool, reason="the dev extra is not installed")

pytestmark = pytest.mark.slow

SOURCES = "fastattn/backends/cython"
GENERATED = (SOURCES, "fastattn/bench/probes")  # the folders in which Cython writes a driver.c
PAPERS = ["LICENSE", "CITATION.cff", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
PAPERS += ["CODE_OF_CONDUCT.md", "SECURITY.md"]
NO_COMPILER = shutil.which("false") or "/bin/false"
IS_FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))

#: Writes down how it was called, and makes the file that it should make.
FAKE_COMPILER = """#!/bin/sh
echo "$@" >>"$COMMANDS"
[ "$1" = -dumpmachine ] && exit
while [ "$1" != -o ]; do shift; done
: >"$2"
"""


def build(kind: str, tree: Path, into: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run setuptools' ``build_sdist`` or ``build_wheel`` on a source tree."""
    env = {name: text for name, text in os.environ.items() if not name.startswith("FASTATTN_")}
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(into)!r})"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env=env | variables,
        timeout=300,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of a tree in which the extension was built."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("fastattn", "tests", "benchmarks", "docs"):
        generated = shutil.ignore_patterns("*.so", "driver.c", "generated", ".*")
        shutil.copytree(ROOT / name, tree / name, ignore=generated)
    for name in (*PAPERS, "MANIFEST.in", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tree)
    for name in ("driver.cpython-311-x86_64-linux-gnu.so", "kernels.o"):
        (tree / SOURCES / name).touch()
    for folder in GENERATED:
        (tree / folder / "driver.c").touch()
    (tree / "build").mkdir()
    (tree / "build" / "junk.py").touch()
    into = tmp_path_factory.mktemp("dist")
    done = build("sdist", tree, into)
    assert done.returncode == 0, done.stdout + done.stderr
    written = {path.name for path in (tree / SOURCES / "generated").iterdir()}
    assert written == {"floats.h", "headers.pxi", "isas.h", "job.pxi"}
    (archive,) = into.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        # Python before 3.11.4 has no filters.
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (tree,) = folder.iterdir()
    return tree


@pytest.fixture(scope="module")
def without_compiler(
    unpacked: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """What building the wheel without a compiler said, and the folder that it installs to."""
    into = tmp_path_factory.mktemp("wheel")
    done = build("wheel", unpacked, into, CC=NO_COMPILER)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = into.glob("*.whl")
    assert IS_FREE_THREADED or "-cp311-abi3-" in wheel.name
    site = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(site)
    return done, site


class TestSourceDistribution:
    def test_holds_every_source(self, unpacked):
        kinds = (
            *(("fastattn", kind) for kind in ("*.[ch]", "*.pyx", "*.pxi", "*.py")),
            ("tests", "*"),
            ("docs", "*.md"),
        )
        present = {
            path.relative_to(ROOT)
            for folder, kind in kinds
            for path in (ROOT / folder).rglob(kind)
            if path.is_file() and path.name != "driver.c" and path.parent.name != "generated"
        }
        wanted = {
            path for path in present if not any(part.startswith((".", "__pycache__")) for part in path.parts)
        }
        wanted |= {Path("fastattn/py.typed"), Path("setup.py"), Path("pyproject.toml"), *map(Path, PAPERS)}
        held = {path.relative_to(unpacked) for path in unpacked.rglob("*")}
        assert not wanted - held

    def test_holds_nothing_that_was_generated(self, sdist):
        with tarfile.open(sdist) as archive:
            names = [Path(name) for name in archive.getnames()]
        assert not [name for name in names if name.suffix in (".so", ".o", ".pyc") or name.name == "driver.c"]
        assert not [name for name in names if {"build", "generated"} & set(name.parts)]


def test_an_editable_install_is_found_from_the_folder_above_a_clone(unpacked, tmp_path):
    """Where a clone named ``fastattn`` would pass for a namespace package of that name."""
    clone, into, site = (tmp_path / name for name in ("fastattn", "wheel", "site"))
    shutil.copytree(unpacked, clone)
    into.mkdir()
    done = build("editable", clone, into, CC=NO_COMPILER)
    assert done.returncode == 0, done.stdout + done.stderr
    zipfile.ZipFile(next(into.glob("*.whl"))).extractall(site)
    # Without the site-packages of this interpreter, in which fastattn may be installed as well.
    code = f"""
import site, sys
site.addsitedir({str(site)!r})
sys.path.append({str(Path(np.__file__).parents[1])!r})
import fastattn
print(fastattn.attention.__module__, fastattn.__file__)
"""
    command = [sys.executable, "-S", "-W", "ignore", "-c", code]
    env = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=env, timeout=60, capture_output=True, text=True)
    found = ["fastattn._api.attention", str(clone / "fastattn" / "__init__.py")]
    assert done.stdout.split() == found, done.stderr


class TestTarget:
    """What is compiled is for the machine that is built for, whatever machine builds."""

    ISAS = (
        ("linux-x86_64", "", {*constants.ISAS, *constants.MODEL_ISAS} - {"neon"}),
        ("linux-aarch64", "", {"portable", "neon"}),
        ("linux-riscv64", "", {"portable"}),
        ("macosx-11.0-arm64", "", {"portable", "neon"}),
        ("macosx-11.0-universal2", "", {"portable"}),
        ("macosx-11.0-universal2", "-arch arm64", {"portable", "neon"}),
        ("macosx-11.0-arm64", "-arch x86_64 -arch arm64", {"portable"}),
        ("win-arm64", "", {"portable", "neon"}),
        ("emscripten-4.0.9-wasm32", "", {"portable"}),
    )

    @pytest.fixture
    def commands(self, unpacked, tmp_path):
        """The compiler's commands of a build for a platform."""
        folder = tmp_path
        compiler = folder / "cc"
        compiler.write_text(FAKE_COMPILER)
        compiler.chmod(0o755)

        def build_for(platform: str, archflags: str) -> list[str]:
            log = folder / f"{platform} {archflags}"
            env = {
                "CC": str(compiler), "COMMANDS": str(log), "ARCHFLAGS": archflags,
                "_PYTHON_HOST_PLATFORM": platform, "FASTATTN_REQUIRE_EXTENSION": "1",
            }  # fmt: skip
            places = ("--build-lib", folder / "lib", "--build-temp", folder / "temp")
            subprocess.run(
                [sys.executable, "setup.py", "-q", "build_ext", "--force", *places],
                cwd=unpacked, env=os.environ | env, check=True, capture_output=True, timeout=300,
            )  # fmt: skip
            return log.read_text().splitlines()

        return build_for

    @pytest.mark.parametrize(("platform", "archflags", "isas"), ISAS)
    def test_instruction_sets(self, commands, platform, archflags, isas):
        lines = commands(platform, archflags)
        kernels = [line for line in lines if re.search(r"(kernels|fused|pairs)\.c", line)]
        assert {re.search(r"-DFASTATTN_ISA=(\w+)", line)[1] for line in kernels} == isas
        assert all(("-mavx512f" in line) == ("=avx512" in line or "=amx " in line) for line in kernels)
        assert all(("-msimd128" in line) == platform.endswith("wasm32") for line in kernels)

    @pytest.mark.skipif(IS_FREE_THREADED, reason="has no stable ABI")
    @pytest.mark.parametrize("platform", ["linux-x86_64", "win-amd64"])
    def test_the_stable_abi_of_the_oldest_python(self, commands, platform):
        """Two extensions, and on Windows the library of all versions."""
        lines = commands(platform, "")
        drivers = [line for line in lines if "driver.c" in line]
        assert len(drivers) == 2
        assert all("-DPy_LIMITED_API=0x030B0000" in line for line in drivers)
        links = [line for line in lines if "driver.abi3" in line]
        assert len(links) == 2
        assert all(("-lpython3" in line.split()) == (platform == "win-amd64") for line in links)


def test_an_editable_install_compiles_what_changed(unpacked, tmp_path):
    """Each is built in a new folder: what is in the sources and newer than they are is taken."""
    tree, compiler, log = tmp_path / "tree", tmp_path / "cc", tmp_path / "commands"
    shutil.copytree(unpacked, tree)
    compiler.write_text(FAKE_COMPILER)
    compiler.chmod(0o755)

    def compiled() -> set[str]:
        log.write_text("")
        (into := tmp_path / "wheel").mkdir(exist_ok=True)
        done = build(
            "editable", tree, into, CC=str(compiler), COMMANDS=str(log), FASTATTN_REQUIRE_EXTENSION="1"
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return set(re.findall(r"\w+\.c\b", log.read_text()))

    assert compiled() > {"kernels.c", "probes.c", "_xla.c"}
    assert not compiled()
    probes = tree / "fastattn" / "bench" / "probes" / "probes.c"
    os.utime(probes, (time.time() + 10,) * 2)
    assert compiled() >= {"probes.c"}
    os.utime(probes)
    os.utime(tree / "setup.py", (time.time() + 10,) * 2)
    assert compiled() > {"kernels.c", "probes.c", "_xla.c"}


class TestWithoutCompiler:
    def test_the_build_says_so(self, without_compiler):
        """In a frame, each line short enough for a terminal."""
        done, _ = without_compiler
        frame = re.search(r"^\*{60,}\n(.*?)\n\*{60,}$", done.stdout + done.stderr, re.MULTILINE | re.DOTALL)
        assert frame is not None, done.stdout + done.stderr
        assert "kernels were NOT built" in frame[1]
        assert "gcc or clang" in frame[1]
        assert NO_COMPILER in frame[1]
        assert max(map(len, frame[1].splitlines())) <= 90

    def test_only_the_package_is_installed(self, without_compiler):
        _, site = without_compiler
        files = {path.relative_to(site) for path in site.rglob("*") if path.is_file()}
        package = {path for path in files if not path.parts[0].endswith(".dist-info")}
        assert {path.parts[0] for path in package} == {"fastattn"}
        others = {path.as_posix() for path in package if path.suffix != ".py"}
        assert others == {"fastattn/py.typed", "fastattn/include/fastattn.h", "fastattn/__init__.pxd"}

    @pytest.mark.parametrize("backend", ["numba", "reference"])
    def test_attention_runs_on_another_backend(self, without_compiler, backend):
        """On Numba, where that is installed."""
        _, site = without_compiler
        hidden = 'import sys\nsys.modules["numba"] = None\n' if backend == "reference" else ""
        code = f"""{hidden}
import numpy as np
import fastattn
print(fastattn.__file__)
x = np.random.default_rng(0).standard_normal((2, 5, 8))
out = fastattn.attention(x, x, x, causal=True)
np.testing.assert_array_equal(out, fastattn.attention(x, x, x, causal=True, backend={backend!r}))
try:
    fastattn.attention(x, x, x, backend="cython")
except fastattn.BackendError as error:
    print(error)
"""
        printed = python(code, env={"PYTHONPATH": str(site)}, cwd=site)
        assert printed.startswith(str(site))
        assert "not built" in printed
        assert "C compiler" in printed

    @pytest.mark.parametrize("chosen", ["", "reference"])
    def test_the_slow_backend_is_no_secret(self, without_compiler, chosen):
        _, site = without_compiler
        code = """
import sys, warnings
sys.modules["numba"] = None
import numpy as np
import fastattn
x = np.ones((2, 5, 8))
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    fastattn.attention(x, x, x)
    fastattn.attention(x, x, x)
print([(str(it.message), it.category.__name__) for it in seen])
"""
        printed = python(code, env={"PYTHONPATH": str(site), "FASTATTN_BACKEND": chosen}, cwd=site)
        assert printed.count("RuntimeWarning") == (not chosen)
        assert (
            chosen or "many times slower than compiled kernels: its extension module is not built" in printed
        )

    def test_info_says_why(self, without_compiler):
        _, site = without_compiler
        printed = python("import fastattn; fastattn.show_config()", env={"PYTHONPATH": str(site)}, cwd=site)
        assert printed.startswith("NO COMPILED KERNELS: its extension module is not built")
        assert re.search(r"^ *cython +not usable: .*not built.*C compiler", printed, re.MULTILINE)
        assert re.search(r"^ *reference +usable$", printed, re.MULTILINE)

    def test_it_is_an_error_where_the_extension_is_required(self, unpacked, tmp_path):
        done = build("wheel", unpacked, tmp_path, CC=NO_COMPILER, FASTATTN_REQUIRE_EXTENSION="1")
        assert done.returncode != 0
        assert NO_COMPILER in done.stdout + done.stderr
        assert not list(tmp_path.glob("*.whl"))
