"""The compiled extensions: a Cython driver each, and an object for each instruction set: attention with its
micro-kernels, and the benchmark's probes of the machine. And XLA's way to the C entry, a file of C.

Everything else about the package is in pyproject.toml. One wheel is for CPython 3.11 and all later (abi3),
other than free-threaded builds, which have no stable ABI. Where there is no C compiler the package installs
without them and runs on its NumPy reference backend; FASTATTN_REQUIRE_EXTENSION=1 makes that an
error, as it must be for a wheel.
"""

import os
import runpy
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from textwrap import shorten

import numpy as np
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError, ExecError, PlatformError
from setuptools.modified import newer_group

INCLUDE = Path("fastattn", "include")
SOURCE = Path("fastattn", "backends", "cython")
KERNELS = SOURCE / "kernels"
PROBES = Path("fastattn", "bench", "probes")

ISAS = SOURCE / "generated" / "isas.h"

# What is compiled for each instruction set, with its flags, and linked into the extension: the source, and
# the bits of each dtype that has an object of its own.
PER_ISA = {
    "fastattn.backends.cython.driver": (KERNELS / "kernels.c", (32, 64)),
    "fastattn.bench.probes.driver": (PROBES / "probes.c", (32,)),
}

WITH_EXTENDED = {"fastattn.backends.cython.driver"}

# No -ffast-math: -inf and NaN are data here. The flags about maths only drop errno and the FP status bits.
# Python's own -fwrapv costs `score` up to 4 %: addresses that might wrap around are computed one by one.
# Functions begin with a line of the cache. Otherwise what stands before a function moves its loops: portable
# recurrent attention took 1.1 times as long after a change elsewhere (two threads of Zen 5, 2026-11-29,
# interleaved).
KERNEL_FLAGS = [
    "-O3",
    "-falign-functions=64",
    "-std=gnu11",
    "-fno-wrapv",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
]

# Python's own -g would make four fifths of the wheel.
BUILD_FLAGS = [*KERNEL_FLAGS, "-g0"]

# The instruction sets and their flags, as the package has them.
TABLES = Path("fastattn", "_machine", "constants.py")
CONSTANTS = runpy.run_path(str(TABLES))
FOR_ALL = ["setup.py", str(TABLES)]  # flags
VECTORS, EXTENDED = CONSTANTS["VECTORS"], CONSTANTS["EXTENDED"]

# Windows: MSVC has no vector types, and gcc does not align vectors that it spills to the stack (bug 54412),
# which leaves clang: that of the package ziglang, or CC.
ZIG_TARGETS = {"win-amd64": "x86_64-windows-gnu", "win-arm64": "aarch64-windows-gnu"}

IS_ABI3 = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
ABI_MACROS = [("Py_LIMITED_API", "0x030B0000")] if IS_ABI3 else []

NO_COMPILER = """
*************************************************************************************
fastattn: the compiled kernels were NOT built; only the slow NumPy backend will work.
  What failed: {error}
  They need a C compiler: gcc or clang. When there is one, install again:
  pip install --force-reinstall --no-deps --no-cache-dir fastattn
*************************************************************************************
"""


class BuildKernels(build_ext):
    """Compiles an extension's source in `PER_ISA` for each instruction set, then the extension with them."""

    def finalize_options(self):
        super().finalize_options()
        if self.plat_name in ZIG_TARGETS and self.compiler is None:
            self.compiler = "mingw32"  # setuptools' name for whatever takes gcc's options
            if "CC" not in os.environ:
                os.environ["CC"] = zig_cc(ZIG_TARGETS[self.plat_name])

    def get_libraries(self, ext):
        """Python's own on Windows: python3.dll for all versions."""
        if self.plat_name in ZIG_TARGETS and ext.py_limited_api:
            return [*ext.libraries, "python3"]
        return super().get_libraries(ext)

    def run(self):
        self.is_for_source = self.inplace  # setuptools builds elsewhere, and copies
        try:
            super().run()
        except (CCompilerError, ExecError, PlatformError, FileNotFoundError) as error:
            if os.environ.get("FASTATTN_REQUIRE_EXTENSION", "0") not in ("", "0"):
                raise
            print(NO_COMPILER.format(error=shorten(str(error), 68)), file=sys.stderr)
            self.extensions = []

    def build_extension(self, ext):
        target = Path(self.get_ext_fullpath(ext.name))
        present = Path(*ext.name.split(".")[:-1], target.name)
        is_old = self.force or newer_group([*ext.sources, *ext.depends], str(present))
        if self.is_for_source and not is_old:
            # pip gives each editable install a new folder to build in, and a Cython whose files are new: what
            # Cython writes, and what it reads of its own, are not among the sources here.
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(present, target)
            return
        if ext.name in PER_ISA:
            ext.extra_compile_args += BUILD_FLAGS
            if self.plat_name.startswith("linux"):  # before glibc 2.34 threads are a library of their own
                ext.extra_link_args.append("-pthread")
            self.add_objects(ext)
        super().build_extension(ext)

    def add_objects(self, ext):
        """One for each instruction set and dtype, as many at a time as there are cores."""
        isas = flags_of(machine_of(self.plat_name))
        wanted = {isa: (*PER_ISA[ext.name], flags) for isa, flags in isas.items()}
        if ext.name in WITH_EXTENDED and "avx512" in isas:
            wanted |= {
                isa: (KERNELS / own["source"], (32,), [*isas[own["vectors"]], *own["flags"].split()])
                for isa, own in EXTENDED.items()
            }
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = {
                isa: [pool.submit(self.compile, ext, isa, source, bits, flags) for bits in dtypes]
                for isa, (source, dtypes, flags) in wanted.items()
            }
        for isa, objects in compiled.items():
            if isa in EXTENDED and any(isinstance(it.exception(), CompileError) for it in objects):
                continue  # the compiler does not know its instructions: gcc before 11, or 10
            for it in objects:
                ext.extra_objects += it.result()
            ext.define_macros.append((f"FASTATTN_HAVE_{isa.upper()}", "1"))

    def compile(self, ext, isa, source, bits, flags):
        return self.compiler.compile(
            [str(source)],
            output_dir=str(Path(self.build_temp) / f"{isa}-{bits}"),
            macros=[("FASTATTN_ISA", isa), ("REAL_BITS", str(bits))],
            extra_preargs=[*BUILD_FLAGS, *flags],
            depends=ext.depends,
        )


def flags_of(machine):
    """The compiler's flags for each instruction set that a machine has kernels for."""
    return {
        isa: own["flags"].get(machine, "").split()
        for isa, own in VECTORS.items()
        if isa == "portable" or machine in own["flags"]
    }


def machine_of(plat_name):
    """The machine that is built for, not the one that builds: on macOS ARCHFLAGS says it where it is set."""
    flags = os.environ.get("ARCHFLAGS", "").split()
    machines = {arch for flag, arch in pairwise(flags) if flag == "-arch"}
    if plat_name.startswith("macosx") and machines:
        return machines.pop() if len(machines) == 1 else "universal2"
    return plat_name.rpartition("-")[2].lower()


def zig_cc(target):
    """The command of the C compiler in the package ziglang."""
    import ziglang

    program = Path(ziglang.__file__).with_name("zig.exe" if os.name == "nt" else "zig")
    return f'"{program.as_posix()}" cc -target {target}'


runpy.run_path(str(SOURCE / "declarations.py"), run_name="__main__")
setup(
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if IS_ABI3 else {},
    ext_modules=[
        Extension(
            "fastattn.backends.cython.driver",
            [
                *(str(SOURCE / name) for name in ("driver.pyx", "pool.c", "blas.c")),
                str(KERNELS / "dispatch.c"),
            ],
            include_dirs=[np.get_include(), str(INCLUDE), str(SOURCE), str(KERNELS)],
            define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"), *ABI_MACROS],
            libraries=["m"],
            depends=[
                *FOR_ALL,
                str(INCLUDE / "fastattn.h"),
                *sorted(
                    str(path)
                    for path in SOURCE.rglob("*.*")
                    if path.suffix in {".c", ".h", ".pxi"} and path.name != "driver.c"
                ),
            ],
            py_limited_api=IS_ABI3,
        ),
        Extension(
            "fastattn.bench.probes.driver",
            [str(PROBES / "driver.pyx"), str(PROBES / "dispatch.c"), str(SOURCE / "pool.c")],
            include_dirs=[str(SOURCE)],
            depends=[
                *FOR_ALL,
                *(str(SOURCE / name) for name in ("pool.h", "placement.h", "turns.h")),
                *(str(PROBES / name) for name in ("probes.h", "probes.c")),
                str(ISAS),
            ],
            define_macros=[*ABI_MACROS],
            py_limited_api=IS_ABI3,
        ),
        Extension(
            "fastattn.integrations._xla",
            ["fastattn/integrations/_xla.c"],
            include_dirs=[str(INCLUDE)],
            define_macros=[*ABI_MACROS],
            extra_compile_args=["-std=gnu11", "-g0"],
            depends=[*FOR_ALL, str(INCLUDE / "fastattn.h")],
            py_limited_api=IS_ABI3,
        ),
    ],
    cmdclass={"build_ext": BuildKernels},
)
