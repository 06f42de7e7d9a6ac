"""The CUDA backend: kernels of Numba on an NVIDIA GPU, float32 and float64, with 16-bit types as storage."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._call.problem import AnyProblem
from fastattn._call.storage import Rows
from fastattn.backends._base import Backend

if TYPE_CHECKING:
    from fastattn._machine.device import DeviceArray


class CudaBackend(Backend):
    """Tiles of query rows, a block of threads each; see `fastattn.backends.cuda`."""

    name = "cuda"

    def unavailable_reasons(self) -> list[str]:
        return _missing()

    def unsupported_reasons(self, problem: AnyProblem) -> list[str]:
        reasons = [] if problem.dropout is None else ["it drops no weights"]
        if problem.mean_dtype is not None:
            reasons.append("it averages no weights: return_weights=True gives those of each head")
        reasons += problem.summed_bias()
        rows = {
            name: "in pages" if rows.page_size else rows.dtype.name
            for name, rows in (("key", problem.key), ("value", problem.value))
            if isinstance(rows, Rows)
        }
        if rows:
            found = ", ".join(f"{name} is {how}" for name, how in rows.items())
            reasons.append(f"it reads keys and values in plain arrays of floats, and {found}")
        return reasons

    def thread_limit(self, num_threads: int) -> int:
        return num_threads

    def run(self, problem: AnyProblem, num_threads: int) -> None:
        _engine().run(problem)

    def combine(
        self, pieces: list[tuple[DeviceArray, DeviceArray]], out: DeviceArray, lse: DeviceArray
    ) -> None:
        """Fill `out` and `lse` with what the pieces, each an out and its lse, are together: `merge_attention`
        of arrays on a GPU."""
        import_module("fastattn.backends.cuda.combine").combine(pieces, out, lse)


backend = CudaBackend()


@cache
def _engine() -> Any:
    return import_module("fastattn.backends.cuda.engine")


@cache
def _missing() -> list[str]:
    if find_spec("numba_cuda") is None:
        return ["numba-cuda is not installed: pip install 'fastattn[cuda]'"]
    try:
        from numba import config, cuda
    except Exception as error:  # not ImportError alone, as in `reasons_no_compiler`
        return [f"numba-cuda does not load ({type(error).__name__}: {error})"]
    if config.ENABLE_CUDASIM:
        return []
    if not cuda.is_available():
        why = " ".join(str(cuda.cuda_error()).split())
        return [f"no NVIDIA GPU can be used: {why or 'none is here'}"]
    if absent := [name for name in ("nvvm", "nvrtc", "nvJitLink") if not _loads(name)]:
        install = "pip install 'fastattn[cuda]', or 'numba-cuda[cu12]' for older drivers"
        return [f"NVIDIA's compiler is not here ({' and '.join(absent)}): {install}"]
    return _unlinkable(cuda.get_current_device().compute_capability)


def _unlinkable(capability: tuple[int, int]) -> list[str]:
    """Why nvJitLink does not link what NVVM compiles: it reads no code of a later CUDA than its own.

    An empty kernel tells, and version numbers do not: NVVM's is 2.0 in all, and PTX 8.8 is of CUDA 12.9.
    """
    from cuda.bindings import nvjitlink
    from cuda.core import Linker, LinkerOptions, ObjectCode
    from numba import cuda

    arch = "sm_{}{}".format(*capability)
    try:
        ptx, _ = cuda.compile_ptx(lambda: None, (), cc=capability)
    except AttributeError as error:  # of NumPy: it has names no more that numba-cuda reads as it is used
        why = f"numba-cuda {version('numba-cuda')} does not fit NumPy {np.__version__} ({_in_a_line(error)})"
        return [f"{why}: pip install 'fastattn[cuda]'"]
    except Exception as error:  # Numba's, and NVVM's own
        return [f"NVVM does not compile for this GPU, {arch} ({_in_a_line(error)})"]
    try:
        Linker(ObjectCode.from_ptx(ptx.encode()), options=LinkerOptions(arch=arch)).link("cubin")
    except Exception as error:  # of cuda.core, and of what it calls
        made = re.search(r"\.version (\S+)", ptx)
        major, minor = nvjitlink.version()
        fits = f"cuda-toolkit[nvjitlink,nvrtc,nvvm]=={major}.{minor}.*" if major > 12 else "fastattn[cuda]"
        return [
            f"NVVM makes PTX {made and made[1]}, which nvJitLink {major}.{minor} does not link "
            f"({_in_a_line(error)}): pip install '{fits}'"
        ]
    return []


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).replace("\0", " ").split())[:300]


def _loads(library: str) -> bool:
    from cuda.pathfinder import load_nvidia_dynamic_lib

    try:
        load_nvidia_dynamic_lib(library)
    except RuntimeError:
        return False
    return True
