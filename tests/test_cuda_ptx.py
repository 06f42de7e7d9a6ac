"""The CUDA kernels as they compile for real devices, without one: to PTX."""

from __future__ import annotations

import re

import pytest

from tests.process import python

SETUP = """
import numpy as np
from numba import types
from benchmarks.ptx import SIZES, attend_ptx, flat, set_device, to_ptx, view

set_device(DEVICE)
"""

KERNELS = """
from fastattn.backends.cuda.tensor import COLUMNS, STEP, WEIGHTS, parts_of
from fastattn.backends.cuda.combine import combine_kernel
from fastattn.backends.cuda.form import Form, Stored, choose_shape
from fastattn.backends.cuda.kernel import merge_kernel
from fastattn.backends.cuda.pairs import PARTS

def tensor_products(form):
    "Of tensor cores, for a piece of scores and one of values."
    shape, stored = form.shape, form.stored
    of_queries, of_keys, of_values, of_weights = (
        parts_of(form, kind) - 1 for kind in (stored.q, stored.k, stored.v, WEIGHTS)
    )
    of_scores = shape.depth // STEP * (shape.tile_k // COLUMNS) * (1 + of_queries + of_keys)
    of_values = (shape.tile_columns // COLUMNS) * (1 + of_weights + of_values)
    of_values *= shape.value_keys // shape.pair // STEP
    return shape.is_tensor * shape.rows // 2 * (of_scores + (form.result != "weights") * of_values)


dtype, head_rows, value_dim, flags, result, bias, storage = FORM
changes_scores = flags[5] or flags[8]  # a bias, a function
pairs = storage if dtype == "float32" and storage in PARTS else ""
shape = choose_shape(dtype, head_rows, value_dim, False, DEVICE >= (8, 0), changes_scores, pairs)
read = (dtype if flags[-1] else "uint16") if shape.pairs else storage
stored = Stored(read, read, read, bias, storage, "uint8", storage)
form = Form(dtype, shape, stored, *map(bool, flags), result)
print("PRODUCTS", tensor_products(form))
print(attend_ptx(form))
parts, results = (types.Tuple([view(n) for n in axes]) for axes in ((0, 0, 0), (4, 3, 0, 0)))
merge = merge_kernel(form._replace(keeps_sums=True))
print(to_ptx(merge, (parts, view(1, form.has_sinks), results, SIZES, types.int64)))
views = types.Tuple([view(n) for n in (4, 3) * 3])
kernel = combine_kernel("float64", "float64", storage, dtype, storage, dtype)
print(to_ptx(kernel, (views, types.UniTuple(types.int64, 3), types.int64)))
"""

PROBES = """
from fastattn.bench.gpu import probes

print(to_ptx(probes.fma_kernel("float32"), (flat(types.float32), types.float32, types.float32)))
print(to_ptx(probes.read_kernel(), (flat(types.float32), flat(types.float32))))
"""

FUNCTIONS = """
import numba
from fastattn._call.problem import Mod
from fastattn.backends.cuda.functions import device_function
from fastattn.backends.jit.memory import kind_of
from tests.flex_gallery import GALLERY, SCORES, aux_of

for dtype in (np.dtype(np.float32), np.dtype(np.float64)):
    for name, function in GALLERY.items():
        aux = [np.asarray(x) if np.ndim(x) else np.asarray(x)[()] for x in aux_of(name, dtype)]
        kind, score = ("score_mod", [numba.from_dtype(dtype)]) if name in SCORES else ("mask_mod", [])
        device = device_function(kind, Mod(function, tuple(aux)), dtype)
        print(to_ptx(device, (*score, *[types.int64] * 4, *map(kind_of, aux)), device=True))
        print(name, dtype)

mod = Mod(lambda s, b, h, i, j: 0.5 * s + 1.25, ())
print("NUMBERS IN THE CODE")
numbers = device_function("score_mod", mod, np.dtype(np.float32))
print(to_ptx(numbers, (types.float32, *[types.int64] * 4), device=True))
"""

ON_DISK = """
from types import SimpleNamespace
from numba.cuda import codegen
from numba.cuda.cudadrv import devices
from numba.cuda.dispatcher import _Kernel
from fastattn.backends.cuda.form import Form, Stored, choose_shape
from fastattn.backends.cuda.kernel import merge_kernel

# What asks for a device, and the link that needs one.
devices.get_context = lambda: SimpleNamespace(device=SimpleNamespace(compute_capability=DEVICE))
codegen.JITCUDACodegen.magic_tuple = lambda self: DEVICE
_Kernel.bind = lambda self: self._codelibrary.get_asm_str(DEVICE)
form = Form("float32", choose_shape("float32", 1, 64, False), Stored(*["float32"] * 7), *FLAGS, "parts")
parts, results = types.Tuple([view(0)] * 3), types.Tuple([view(4), view(3), *[view(0, False)] * 2])
kernel = merge_kernel(form)
kernel.compile((parts, view(1, form.has_sinks), results, SIZES, types.int64))
print("found" if sum(kernel.stats.cache_hits.values()) else "compiled")
"""

PLAIN = (False,) * 11 + (True, True)
MASKED = (*PLAIN[:3], True, *PLAIN[4:])
EVERYTHING = (True,) * 11 + (False, False)
FORMS = [
    ("float32", 4096, 64, PLAIN, "out", "float32", "float32"),
    ("float32", 4096, 128, PLAIN, "out", "float32", "float32"),
    ("float32", 1, 128, PLAIN, "parts", "float32", "float32"),
    ("float32", 4096, 64, PLAIN, "out", "float32", "bfloat16"),
    ("float32", 4096, 128, PLAIN, "out", "float32", "float16"),
    ("float32", 4096, 64, MASKED, "out", "float32", "bfloat16"),
    ("float32", 1, 128, PLAIN, "parts", "float32", "float16"),
    ("float32", 4096, 64, EVERYTHING, "out", "float16", "float32"),
    ("float32", 4096, 128, EVERYTHING, "out", "bfloat16", "float16"),
    ("float32", 8, 40, EVERYTHING, "weights", "float64", "float32"),
    ("float32", 8, 40, EVERYTHING, "weights", "bfloat16", "bfloat16"),
    ("float64", 4096, 64, PLAIN, "out", "float64", "float64"),
    ("float64", 4096, 128, EVERYTHING, "weights", "float32", "float64"),
    ("float64", 1, 128, PLAIN, "parts", "float64", "float64"),
    ("float64", 1, 128, PLAIN, "parts", "float64", "bfloat16"),
]


def can_compile() -> bool:
    """Whether NVIDIA's compiler and its linker for device code are here."""
    pytest.importorskip("numba_cuda")
    code = """
from cuda.pathfinder import load_nvidia_dynamic_lib
try:
    for name in ("nvrtc", "nvvm", "nvJitLink"):
        load_nvidia_dynamic_lib(name)
    print("yes")
except Exception as error:
    print("no", error)
"""
    return python(code).strip() == "yes"


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    if not can_compile():
        pytest.skip("NVIDIA's compiler is not installed: pip install 'fastattn[cuda]'")


LINKER = """
import re
from cuda.bindings import nvjitlink
from numba import cuda
from fastattn.backends.cuda.backend import _unlinkable

ptx, _ = cuda.compile_ptx(lambda: None, (), cc=(9, 0))
major, minor = map(int, re.search(r"\\.version (\\d+)\\.(\\d+)", ptx).groups())
reasons, linker = _unlinkable((9, 0)), nvjitlink.version()
print(f"NVVM {major}.{minor}, nvJitLink {linker}: {reasons}")
assert major >= 9, "PTX 9.m is of CUDA 13.m; before, the numbers differ"
assert bool(reasons) == ((major + 4, minor) > linker)
for said in (f"PTX {major}.{minor}", "nvJitLink {}.{}".format(*linker)):
    assert not reasons or said in reasons[0]
assert _unlinkable((1, 0))[0].startswith("NVVM does not compile for this GPU, sm_10 (")
"""


def test_whether_the_linker_fits_the_compiler():
    """Whichever are installed: the verdict is that of their versions."""
    python(LINKER)


def compiled(device, code):
    ptx = python(f"DEVICE = {device}\n{SETUP}\n{code}", timeout=300)
    assert f".target sm_{device[0]}{device[1]}" in ptx
    return ptx


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "form"),
    [((9, 0), form) for form in FORMS]
    + [(device, form) for device in ((7, 5), (8, 0)) for form in FORMS[:2]],
    ids=lambda x: f"sm_{x[0]}{x[1]}" if len(x) == 2 else f"{x[0]}-{x[1]}-{x[2]}-{x[4]}-{x[6]}",
)
def test_kernels(device, form):
    ptx = compiled(device, f"FORM = {form}\n{KERNELS}")
    expected = int(re.search(r"PRODUCTS (\d+)", ptx)[1])
    assert bool(expected) == (form[0] == "float32" and form[1] > 32 and device >= (8, 0))
    # As many as a pass of both loops takes: written out, ptxas orders them badly.
    kind = {"float16": "f16", "bfloat16": "bf16"}.get(form[6], "tf32")
    assert len(re.findall(rf"mma\.sync\S+\.f32\.{kind}", ptx)) == expected == ptx.count("mma.")
    width = re.escape("f32" if form[0] == "float32" else "f64")
    assert re.search(rf"fma\.rn\.{width}", ptx)
    # Sums stay in registers: an index that is not known when it compiles would put them into memory.
    assert not re.search(r"(ld|st)\.local", ptx)
    if kind != "tf32":
        assert bool(re.search(r"ldmatrix\.sync", ptx)) == bool(expected and form[4] != "weights")
    if form[6].endswith("16") and form[3] == PLAIN and expected:  # a span in one load
        assert re.search(r"ld\.global\.v4\.[bfu]32", ptx)
    elif form[6].endswith("16") and form[3] == PLAIN:
        assert re.search(rf"ld\.global\.v{4 if form[0] == 'float32' else 2}\.[ub]16", ptx)


@pytest.mark.slow
def test_functions_of_the_gallery():
    """Numbers that stand in the code do not make a score of float32 wider."""
    ptx = compiled((8, 0), FUNCTIONS)
    assert len(re.findall(r"^\w+ float(32|64)$", ptx, re.MULTILINE)) == 26
    numbers = ptx.split("NUMBERS IN THE CODE")[1]
    assert ".f32" in numbers and ".f64" not in numbers


@pytest.mark.slow
def test_probes_measure_what_they_say():
    """Multiply-adds in registers alone, and loads of which none waits for another."""
    from fastattn.bench.gpu import probes

    chains, read = compiled((9, 0), PROBES).split(".visible .entry")[1:]
    assert len(re.findall(r"fma\.rn\.f32", chains)) == probes.CHAINS * probes.REPEATS  # of a pass
    assert not re.search(r"(ld|st)\.(local|global)", chains.split("setp")[1])
    assert len(re.findall(r"ld\.global", read)) >= probes.READS


@pytest.mark.slow
def test_kernels_are_kept_on_disk(tmp_path):
    """Another process finds them again, one of another specialisation does not, and damage is no error."""

    def load(flags):
        code = f"DEVICE = (9, 0)\n{SETUP}\nFLAGS = {flags}\n{ON_DISK}"
        return python(code, env={"NUMBA_CACHE_DIR": str(tmp_path)}, timeout=300).strip()

    sinks = (*(n == 7 for n in range(11)), True, True)
    assert [load(flags) for flags in (PLAIN, PLAIN, sinks, sinks)] == ["compiled", "found"] * 2
    for kept in tmp_path.rglob("*.nbc"):
        kept.write_bytes(kept.read_bytes()[:100])
    assert load(PLAIN) == "compiled"
