"""The CUDA kernels as they compile for real devices, without one: to PTX."""

from __future__ import annotations

import re

import pytest

from tests.process import python

COMPILE = """
from types import SimpleNamespace
import numba.cuda.dispatcher
from numba import cuda, types
from fastattn.backends.cuda.form import Form, choose_shape
from fastattn.backends.cuda.kernel import attend_kernel, merge_kernel

major, minor, dtype, head_rows, value_dim, flags, result = PROBLEM
# What a device function is compiled for.
numba.cuda.dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=(major, minor))
real = types.float32 if dtype == "float32" else types.float64
reals, int32s = types.Array(real, 1, "C"), types.Array(types.int32, 1, "C")
uint8s, uint32s = types.Array(types.uint8, 1, "C"), types.Array(types.uint32, 1, "C")
masks = types.Tuple((int32s, int32s, uint8s, int32s, uint32s))
sizes, cut, view = (types.UniTuple(types.int64, n) for n in (7, 4, 5))
form = Form(dtype, choose_shape(dtype, head_rows, value_dim, False), *map(bool, flags), result)
arguments = (reals, reals, reals, masks, *[reals] * 6, sizes, cut, types.UniTuple(view, 11), real, real)
print(cuda.compile_ptx(attend_kernel(form).py_func, arguments, cc=(major, minor))[0])
arguments = (*[reals] * 8, sizes, types.UniTuple(view, 3), types.int64)
print(cuda.compile_ptx(merge_kernel(form).py_func, arguments, cc=(major, minor))[0])
"""

PLAIN = (False, False, False, False, False, True)
EVERYTHING = (True, True, True, True, True, False)
FORMS = [
    ("float32", 4096, 64, PLAIN, "out"),
    ("float32", 4096, 128, PLAIN, "out"),
    ("float32", 1, 128, PLAIN, "parts"),
    ("float32", 4096, 64, EVERYTHING, "out"),
    ("float32", 8, 40, EVERYTHING, "weights"),
    ("float64", 4096, 64, PLAIN, "out"),
    ("float64", 4096, 128, EVERYTHING, "weights"),
    ("float64", 1, 128, PLAIN, "parts"),
]


def can_compile() -> bool:
    """Whether NVIDIA's compiler and its linker for device code are here."""
    pytest.importorskip("numba_cuda")
    code = """
from cuda.pathfinder import load_nvidia_dynamic_lib
try:
    for name in ("nvrtc", "nvvm"):
        load_nvidia_dynamic_lib(name)
    print("yes")
except Exception as error:
    print("no", error)
"""
    return python(code).strip() == "yes"


@pytest.mark.slow
@pytest.mark.parametrize("device", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
def test_compiles(device):
    if not can_compile():
        pytest.skip("nvidia-nvvm and nvidia-cuda-nvrtc are not installed")
    for dtype, *form in FORMS:
        ptx = python(f"PROBLEM = {(*device, dtype, *form)}" + COMPILE, timeout=300)
        assert f".target sm_{device[0]}{device[1]}" in ptx
        width = re.escape("f32" if dtype == "float32" else "f64")
        assert re.search(rf"fma\.rn\.{width}", ptx)
        # Sums stay in registers: an index that is not known when it compiles would put them into memory.
        assert not re.search(r"(ld|st)\.local", ptx)
        assert "mma" not in ptx and "tf32" not in ptx
