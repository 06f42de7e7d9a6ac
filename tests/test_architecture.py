"""The structure of the package: the one-way flow of imports, and the rules that keep it."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import sys
from functools import cache
from importlib import import_module
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastattn
from fastattn import masks
from fastattn._api import prepared
from fastattn.backends import registry
from fastattn.backends.registry import MODULES
from tests.process import ROOT, python

PACKAGE = ROOT / "fastattn"
SOURCES = sorted(PACKAGE.rglob("*.py"))
COMPILED_SOURCES = sorted(
    path
    for folder in ("backends", "include", "integrations")
    for kind in ("*.pyx", "*.pxi", "*.c", "*.h")
    for path in (PACKAGE / folder).rglob(kind)
    if path.parent.name != "generated" and not (path.suffix == ".c" and path.with_suffix(".pyx").exists())
)

#: Each line may import from the lines above it, and from nothing else in the package.
LAYERS = [
    {"_version"},
    # What the process runs on
    {"_machine.constants"},
    {"_machine.device"},
    {"_machine.host"},
    {"_machine.threads"},
    # Mask objects
    {"masks.map"},
    {"masks.arguments"},
    {"masks.base"},
    {"masks.objects"},
    {"masks"},
    {"biases"},
    # One call as data
    {"_call.storage"},
    {"_call.dropout", "_call.hints"},
    {"_call.problem"},
    {"_call.gradients"},
    {"_call.options"},
    {"_call.arguments"},
    {"_call.normalize", "_call.conv", "_call.linear", "_call.recurrent", "_call.reductions", "_call.rope"},
    {"_call.varlen"},
    {"_call.backward"},
    {"_call.scores"},
    {"_call.schedule"},
    # Those that compute
    {"backends._base"},
    {"backends.cpu.fields"},
    {
        "backends.reference.attention",
        "backends.reference.conv",
        "backends.reference.linear",
        "backends.reference.recurrent",
        "backends.reference.rope",
    },
    {"backends.reference.reductions"},
    {"backends.cpu.record", "backends.cpu.backward"},
    {"backends.jit.codegen.target"},
    {"backends.jit.codegen.emit"},
    {"backends.jit.codegen.exponential", "backends.jit.codegen.intrinsics"},
    {
        "backends.jit.compiling",
        "backends.jit.literals",
        "backends.jit.identity",
        "backends.jit.memory",
        "backends.jit.pairs",
    },
    {"backends.jit.lowering"},
    {"backends.jit.vector_math", "backends.jit.checks"},
    {"backends.jit.derivatives"},
    {"backends.jit.frontend", "backends.jit.messages"},
    {"backends.jit.loops"},
    {"backends.jit.functions"},
    {"backends.jit.mask_map", "backends.jit.loading"},
    {"backends.numba.layout", "backends.numba.cache", "backends.numba.vectors"},
    {"backends.numba.calls"},
    {"backends.numba.register_tile"},
    {"backends.numba.blocks"},
    {"backends.numba.epilogue", "backends.numba.row_kernels"},
    {"backends.numba.kernels"},
    {"backends.numba.mask_tile"},
    {"backends.numba.sweep"},
    {"backends.numba.splitkv"},
    {"backends.numba.work", "backends.numba.threads"},
    {"backends.numba.prepared"},
    {"backends.cuda.form"},
    {"backends.cuda.intrinsics", "backends.cuda.cache"},
    {"backends.cuda.functions", "backends.cuda.stream", "backends.cuda.pairs"},
    {"backends.cuda.tiles"},
    {"backends.cuda.tensor", "backends.cuda.launch"},
    {"backends.cuda.blocks", "backends.cuda.epilogue", "backends.cuda.mask_tile", "backends.cuda.stages"},
    {"backends.cuda.kernel"},
    {"backends.cuda.engine", "backends.cuda.combine"},
    {
        "backends.reference",
        "backends.cython",
        "backends.cpu",
        "backends.jit",
        "backends.jit.codegen",
        "backends.numba",
        "backends.cuda",
    },
    {"backends.registry"},
    # The public functions
    {"_api.signature"},
    {"_api.prepared"},
    {"_api.prepared_gradients"},
    {"_api.attention"},
    {"_api.backward"},
    {"_api.known_masks"},
    {"_api.flex", "_api.reductions"},
    {"_api.flex_backward"},
    {"_cache.container"},
    {"_cache.pages"},
    {"_cache.state"},
    {"_cache.store"},
    {"_cache.files"},
    {"_cache.cache"},
    {"_api.rope"},
    {"_api.kernel_methods"},
    {"_api.conv", "_api.linear", "_api.recurrent"},
    {"_cache.recurrent"},
    {"_api.c_entry"},
    {"layers"},
    {"_api.blas"},
    {"_api.info"},
    {""},
    # Where others look for what has moved
    {"_mask_map", "_capi"},
    # What is built on them
    {"integrations._common", "integrations._xla"},
    {
        "integrations.jax",
        "integrations.torch",
        "integrations.onnx._common",
        "integrations.keras._attention",
    },
    {"integrations.onnx.standard", "integrations.onnx._cached", "integrations.keras._models"},
    {"integrations.onnx.microsoft"},
    {"integrations"},
    {"bench.probes"},
    {"bench.quiet", "bench.outputs"},
    {"demo", "bench"},
    {"__main__"},
]
#: In this order, too. "" are the files that are in none.
WINGS = [
    "_version",
    "_machine",
    "masks",
    "biases",
    "_call",
    "backends",
    "_api",
    "_cache",
    "layers",
    "",
    "integrations",
    "bench",
    "demo",
]


def wing_of(module: str) -> str:
    return module.split(".")[0] if module.split(".")[0] in WINGS else ""


def module_name(path: Path) -> str:
    """``fastattn/backends/registry.py`` -> ``backends.registry``; the package itself is ``""``."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> int | None:
    """The line of LAYERS that `module` stands on; a package stands for what is in it."""
    for number, names in enumerate(LAYERS):
        if any(module == name or (name and module.startswith(f"{name}.")) for name in names):
            return number
    # A backend is on one line with the others, unless lines above say in which order its files import.
    return layer("backends.reference") if backend_of(module) in MODULES else None


def backend_of(module: str) -> str | None:
    wing, _, rest = module.partition(".")
    return rest.split(".")[0] if wing == "backends" else None


def imported(tree: ast.AST) -> set[str]:
    """Modules of the package that the source imports, wherever in the file, for types too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            # `from fastattn import masks` names a module, `from fastattn.masks import Causal` what is in one.
            for alias in node.names:
                inside = PACKAGE.joinpath(*node.module.split(".")[1:], alias.name)
                is_module = inside.with_suffix(".py").exists() or inside.is_dir()
                found.add(f"{node.module}.{alias.name}" if is_module else node.module)
    return {name.removeprefix("fastattn").lstrip(".") for name in found if name.split(".")[0] == "fastattn"}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def test_every_module_has_its_place():
    homeless = [
        str(path) for path in SOURCES if path.name != "__init__.py" and layer(module_name(path)) is None
    ]
    assert not homeless


def test_imports_flow_one_way():
    for path in SOURCES:
        module = module_name(path)
        own = layer(module)
        for name in imported(parsed(path)):
            other = layer(name)
            same_part = name.split(".")[0] == module.split(".")[0] in ("demo", "bench")
            same_part = same_part or (name.startswith("backends.cython") and "cython" in module)
            same_part = same_part or (own == other and backend_of(name) == backend_of(module) is not None)
            assert other is not None, f"{module} imports {name}, which has no place"
            assert same_part or (own is not None and other < own), (
                f"{module} imports {name}, which stands above it"
            )


def test_no_wing_imports_from_one_above_it():
    for path in SOURCES:
        own = wing_of(module_name(path))
        for name in imported(parsed(path)):
            other = wing_of(name)
            is_program = {own, other} <= {"bench", "demo", ""}  # ``__main__`` starts them
            assert is_program or WINGS.index(other) <= WINGS.index(own), f"{path} imports {name}"


def test_no_two_folders_of_backends_import_each_other():
    arrows = {
        (backend_of(module_name(path)), backend_of(name))
        for path in SOURCES
        for name in imported(parsed(path))
        if backend_of(module_name(path)) and backend_of(name)
    }
    assert [(a, b) for a, b in sorted(arrows) if a < b and (b, a) in arrows] == []


def flow_of_a_call() -> list[str]:
    """The functions that the package's docstring lists, in order."""
    lines = re.findall(r"^(\d+)\. ``([\w.]+)``", fastattn.__doc__ or "", re.MULTILINE)
    assert [int(number) for number, _ in lines] == list(range(1, 11))
    return [name for _, name in lines]


@pytest.mark.parametrize("backend", ["cython", pytest.param("numba", marks=pytest.mark.slow)])
def test_a_call_flows_as_the_docstring_says(backend):
    pytest.importorskip("numba")
    names: dict[Any, str] = {}
    for name in flow_of_a_call():
        module = max((m for m in map(module_name, SOURCES) if name.startswith(f"{m}.")), key=len)
        found: Any = import_module(f"fastattn.{module}")
        for attribute in name.removeprefix(f"{module}.").split("."):
            found = getattr(found, attribute)
        names[getattr(found, "__code__", None) or found.__init__.__code__] = name
    seen: list[str] = []

    def note(frame, event, _):
        name = names.get(frame.f_code)
        if event == "call" and name is not None and name not in seen:
            seen.append(name)

    def flow():
        seen.clear()
        sys.setprofile(note)
        try:
            fastattn.attention(*x, mask=masks.GlobalTokens([1]), backend=backend)
        finally:
            sys.setprofile(None)
        return list(seen)

    x = np.ones((3, 2, 7, 5))
    other = {"cython": ".numba.", "numba": ".cpu."}[backend]
    lines = [name for name in names.values() if other not in name]
    prepared._calls.clear()
    prepared._tokens.clear()
    assert flow() == lines
    again = lines[:1] if backend == "cython" else [lines[0], lines[2], "backends.numba.prepared.Prepared.run"]
    assert flow() == again


def walk_of_a_call() -> list[str]:
    """The files that a first call goes through, each once for all consecutive calls of its functions.

    From `attention` to the kernels: calls of the package's functions of Python and of the Cython driver's, a
    comprehension being part of the function that it is in. Returns to a caller are not counted.
    """
    walk: list[str] = []

    def note(frame, event, arg):
        if event == "call":
            path, function = Path(frame.f_code.co_filename), frame.f_code.co_name
            inside = path.is_relative_to(PACKAGE) and not function.startswith("<")
            file = path.relative_to(PACKAGE).as_posix() if inside else ""
        elif event == "c_call":
            function = arg.__name__
            owner = getattr(arg, "__module__", None) or type(getattr(arg, "__self__", None)).__module__
            file = DRIVER if owner == "fastattn.backends.cython.driver" else ""
        else:
            return
        if file and walk[-1:] != [file] and walk[-1:] != ["kernels"]:
            walk.append(file)
        if file == DRIVER and function == "run":
            walk.append("kernels")

    x = np.ones((3, 2, 3, 5, 8), np.float32)
    prepared._calls.clear()
    sys.setprofile(note)
    try:
        fastattn.attention(*x)
    finally:
        sys.setprofile(None)
    return walk


DRIVER = "backends/cython/driver.pyx"
STAYS, RETURNS = 37, 22


def test_the_walk_of_a_first_call_is_short(monkeypatch):
    """How often who follows a call changes files, and comes back to one. Lower both with the code."""
    monkeypatch.delenv("FASTATTN_BACKEND", raising=False)
    if registry.load("cython").unavailable_reasons():
        pytest.skip("no compiled kernels")
    walk_of_a_call()  # loads what is imported late
    walk = walk_of_a_call()
    assert (walk[0], walk[-1]) == ("_api/attention.py", "kernels")
    stays = walk[:-1]
    assert len(stays) <= STAYS, stays
    assert len(stays) - len(set(stays)) <= RETURNS, stays


def test_relative_imports_are_not_used():
    """They would hide from the test above."""
    relative = [
        str(path)
        for path in SOURCES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative


def test_import_loads_nothing_heavy():
    heavy = [
        "numba",
        "torch",
        "ml_dtypes",
        "scipy",
        "matplotlib",
        "rich",
        "tokenizers",
        "safetensors",
        "numpy.ma",
    ]
    code = f"""
import sys
import numpy
before = set(sys.modules)
import fastattn
loaded = sorted(name for name in {heavy} if name in set(sys.modules) - before)
assert not loaded, loaded
foreign = sorted(name for name in set(sys.modules) - before
                 if name.split(".")[0] not in sys.stdlib_module_names
                 and name.split(".")[0] not in ("fastattn", "numpy", "cython_runtime")
                 and not name.startswith("_"))
print(foreign)
"""
    assert python(code).strip() == "[]"


def test_a_call_loads_nothing_heavy():
    code = """
import sys
import numpy as np
import fastattn
fastattn.attention(np.ones((2, 3)), np.ones((4, 3)), np.ones((4, 2)))
print(sorted({name.split(".")[0] for name in sys.modules} & {"numba", "torch", "ml_dtypes", "scipy"}))
"""
    assert python(code).strip() == "[]"


def test_import_does_little_work():
    """Counted in calls of Python and C functions: a time would depend on the load of the machine.

    An import of 6,800 calls took 10 ms over NumPy's own import, with bytecode on disk (2026-11).
    """
    code = """
import sys
import numpy
calls = 0
def count(frame, event, arg):
    global calls
    calls += event in ("call", "c_call")
sys.setprofile(count)
import fastattn
sys.setprofile(None)
print(calls)
"""
    assert 100 < int(python(code)) < 10_000


def test_numpy_is_the_only_hard_dependency():
    hard = [requirement for requirement in requires("fastattn") or [] if "extra ==" not in requirement]
    assert [re.split(r"[<>=!~ ]", requirement)[0] for requirement in hard] == ["numpy"]


def test_only_the_host_module_reads_the_environment():
    for path in SOURCES:
        reads = []
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv"):
                reads.append(node.lineno)
            elif isinstance(node, ast.ImportFrom) and node.module == "os":
                names = ("environ", "environb", "getenv")
                reads += [node.lineno for alias in node.names if alias.name in names]
        assert not reads or module_name(path) == "_machine.host", f"{path}: lines {reads}"


def test_no_assert_statement():
    """`python -O` removes it, and its message is not for users."""
    for path in SOURCES:
        lines = [node.lineno for node in ast.walk(parsed(path)) if isinstance(node, ast.Assert)]
        assert not lines, f"{path}: lines {lines}"


def test_no_assert_or_environment_in_compiled_sources():
    for path in COMPILED_SOURCES:
        text = path.read_text()
        assert not re.search(r"^\s*assert\b|\bassert\(|<assert\.h>", text, re.MULTILINE), path
        assert not re.search(r"\bgetenv\b|\benviron\b", text), path


def test_backends_name_no_mask():
    """Kernels know intervals, arrays and tiles; a new mask touches none of them."""
    names = [
        name for name, kind in vars(masks).items() if inspect.isclass(kind) and issubclass(kind, masks.Mask)
    ]
    assert {"Causal", "Window", "Segments", "Dense", "Mask"} <= set(names)
    pattern = re.compile(rf"\b({'|'.join(names)})\b")
    for path in [*(PACKAGE / "backends").rglob("*.py"), *COMPILED_SOURCES]:
        if path.suffix == ".py":
            words = {node.id for node in ast.walk(parsed(path)) if isinstance(node, ast.Name)}
            words |= {
                alias.name
                for n in ast.walk(parsed(path))
                if isinstance(n, ast.ImportFrom)
                for alias in n.names
            }
            assert not words & set(names), path
        else:
            assert not pattern.search(path.read_text()), path


#: Where arguments are checked, once: those of calls, those of objects that exist before any call does, those
#: of `rope`, of kernel methods, of features and of weights around attention, those and the files of
#: `KVCache` and `RecurrentState`, and addresses and codes of the C entry, which become arrays.
EDGE = {
    "_api/c_entry.py", "_api/conv.py", "_api/kernel_methods.py", "_api/linear.py", "_api/recurrent.py",
    "_api/reductions.py", "_api/rope.py", "_cache/cache.py", "_cache/container.py",
    "_cache/files.py", "_cache/recurrent.py", "_cache/state.py", "_call/arguments.py", "_call/backward.py",
    "_call/linear.py", "_call/normalize.py", "_call/options.py", "_call/storage.py", "_call/varlen.py",
    "biases.py", "layers.py",
    "masks/arguments.py", "masks/base.py", "masks/objects.py",
}  # fmt: skip
#: Programs: they check words of a command line and files, and raise errors of their own.
PROGRAMS = {"demo", "bench"}
#: What raises outside of the edge, by file and function, and why it has to. There is no other: a check that
#: stands in a second place is a second edge.
RAISES_ELSEWHERE = {
    "__init__.py: __getattr__": "a name that there is not",
    # Settings, which no call gives.
    "_machine/host.py: check_num_threads": "of a call and of set_num_threads",
    "_machine/host.py: _fastattn_num_threads": "FASTATTN_NUM_THREADS",
    "_machine/host.py: forced_isa": "FASTATTN_ISA",
    "backends/cython/signature.pxi: install_options": "more options than there is room for",
    "backends/cython/driver.pyx: choose_isa": "a name that FASTATTN_ISA or a test gives, not a call",
    "backends/jit/codegen/target.py: choose": "the same, at import",
    # Which backend: known when the problem is whole.
    "backends/registry.py: requested": "a name that is none",
    "backends/registry.py: select": "no backend can take the problem",
    "backends/registry.py: usable": "the one backend for this is not usable",
    "backends/cuda/stream.py: checked": "the CUDA driver failed",
    # What kind of array it is: asked by the edge for each argument, and by masks for theirs.
    "_machine/device.py: as_device_array": "no array of plain numbers that may be read as it is",
    "_machine/device.py: _from_interface": "what a library says of its array is not so",
    "_machine/device.py: _from_dlpack": "the same, by the other protocol",
    "masks/__init__.py: __getattr__": "a name that there is not",
    "_machine/device.py: converted": "no array at all",
    "_machine/device.py: host_array": "it is on a GPU, and is read on the host",
    "_machine/device.py: broadcast_to": "a view larger than NumPy's arrays can be",
    "_machine/device.py: __getitem__": "an array on a GPU is no sequence",
    "masks/map.py: __setattr__": "an object that does not change",
    "masks/map.py: __delattr__": "the same",
    "masks/map.py: states": "a mask array on a GPU is not made tiles of",
    # Beside other libraries: what the edge never sees, or would drop without a word.
    "integrations/_common.py: extra": "the library is not installed",
    "integrations/_common.py: check_options": "outputs that are not differentiated",
    "integrations/_common.py: caller_names": "what the edge raised, with other names",
    "integrations/dask.py: __init__": "no Dask array, of unknown size, or results of another shape",
    "integrations/jax.py: attention": "an option that is traced",
    "integrations/jax.py: _scaled": "a scale of other heads, whose numbers are not known",
    "integrations/keras/__init__.py: install": "Keras computes elsewhere",
    "integrations/numba.py: _check_types": "types that compiled code cannot hand to C",
    "integrations/numba.py: _code_of_word": "the codes of the struct have no others",
    "integrations/numba.py: _code_of_bool": "the struct knows no causal=True",
    "integrations/numba.py: _finite": "the struct takes NaN for the default",
    "integrations/numba.py: implementation": "the struct has each size once; or what the C entry said",
    "integrations/onnx/standard.py: _run": "what the operators' texts forbid",
    "integrations/onnx/microsoft.py: _run": "the same of com.microsoft's",
    "integrations/onnx/microsoft.py: _heads": "the same of their axes",
    "integrations/onnx/microsoft.py: _check_packed": "the same of packed inputs",
    "integrations/onnx/microsoft.py: _unpacked": "the same of those that are apart",
    "integrations/onnx/microsoft.py: _attend": "the same of unidirectional",
    "integrations/onnx/_cached.py: lengths_of": "the same of seqlens_k",
    "integrations/onnx/_cached.py: cached": "the same of caches",
    "integrations/onnx/_common.py: bound": "the same of sizes",
    "integrations/onnx/_common.py: check_groups": "the same of numbers of heads",
    "integrations/onnx/_common.py: with_past": "the same of what was before",
    "integrations/onnx/_common.py: heads": "the same of heads",
    "integrations/onnx/_common.py: check_shape": "the same of shapes",
    "integrations/onnx/_common.py: check_choice": "the same of words and codes",
    "integrations/transformers.py: _attention_forward": "what a few models ask beside attention",
    "integrations/torch.py: _attend": "no tensor of the CPU, or a gradient that nobody computes",
    "integrations/torch.py: _array": "a layout or a dtype that NumPy does not have",
    "integrations/scipy.py: integrate_kde": "what SciPy refuses",
    "integrations/scipy.py: _log_density": "the same of points",
    "integrations/sklearn.py: fit": "no bandwidth can be estimated",
    "integrations/sklearn.py: _bandwidth": "no rule for the bandwidth, or no positive numbers",
    "integrations/sklearn.py: _search": "too few samples to leave one out",
    # The edge of functions, beside the compiler that reads them.
    "_api/flex.py: mask_of": "block_mask is no mask",
    "_api/flex.py: _normalize": "out is read as aux is, on a GPU",
    "_api/flex.py: _check_function": "what is given as a function",
    "_api/flex.py: as_aux": "what functions read",
    "_api/flex.py: _evaluate": "there is no compiler",
    "_api/flex_backward.py: flex_attention_backward": "a derivative of no function",
    "backends/reference/linear.py: of": "what a feature map gives",
    "backends/registry.py: function": "the backend that was asked for has no such function",
    # A user's function is read and typed by its compiler, which alone knows what is wrong with it.
    "backends/jit/functions.py: _typed": "the function does not compile, or returns something else",
    "backends/jit/functions.py: check": "the function read outside of an array",
    "backends/jit/functions.py: _read": "what it captures is masked, or no plain numbers",
    "backends/jit/lowering.py: refuse": "the function takes the GIL, or reads what no check covers",
    "backends/jit/frontend.py: run_pass": "the function does what no loop can",
    "backends/jit/mask_map.py: evaluate": "whether the mask depends on b or h, its code says",
    "backends/jit/messages.py: check_raises": "the function has a raise of its own",
    "backends/cuda/functions.py: check_indices": "the function reads outside of an array",
    # Not what a caller gave.
    "backends/cython/driver.pyx: new_job": "the record is not of this driver",
}
#: No memory; a method that a subclass has.
NOT_ABOUT_ARGUMENTS = {"MemoryError", "NotImplementedError"}


def raises_of_python(tree: ast.AST, where: str = "") -> set[tuple[str, str]]:
    """Each raise, as its function and what it raises; a bare one re-raises."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        inner = node.name if isinstance(node, ast.FunctionDef) else where
        if isinstance(node, ast.Raise) and node.exc is not None:
            kind = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            found.add((where, ast.unparse(kind)))
        found |= raises_of_python(node, inner)
    return found


def raises_of_compiled(text: str) -> set[tuple[str, str]]:
    """The same of Cython's sources, and of C that sets an exception."""
    found, where = set(), ""
    for line in text.splitlines():
        if function := re.match(r"(?:cdef|cpdef|\s*def)\b.*?(\w+)\(", line):
            where = function[1]
        for kind in re.findall(r"^\s*raise\s+([\w.]+)|:\s*raise\s+([\w.]+)|\bPyExc_(\w+)", line):
            found.add((where, "".join(kind)))
    return found


def raises_of(path: Path) -> set[tuple[str, str]]:
    return raises_of_python(parsed(path)) if path.suffix == ".py" else raises_of_compiled(path.read_text())


def test_only_the_edge_raises_on_arguments():
    """All other modules, compiled or not, trust what they get."""
    sources = [
        path
        for path in [*SOURCES, *COMPILED_SOURCES]
        if path.relative_to(PACKAGE).as_posix() not in EDGE
        and path.relative_to(PACKAGE).parts[0] not in PROGRAMS
    ]
    assert {".py", ".pyx", ".pxi", ".c", ".h"} == {path.suffix for path in sources}
    raised = {
        f"{path.relative_to(PACKAGE).as_posix()}: {where}"
        for path in sources
        for where, kind in raises_of(path)
        if kind not in NOT_ABOUT_ARGUMENTS
    }
    assert raised == set(RAISES_ELSEWHERE)
    assert all(raises_of(PACKAGE / name) for name in EDGE)


def test_the_test_of_raises_sees_them():
    python_source = """
def outer(x):
    def inner():
        raise errors.ShapeError
    try:
        inner()
    except ValueError:
        raise
    if x: raise TypeError("x")
"""
    assert raises_of_python(ast.parse(python_source)) == {
        ("inner", "errors.ShapeError"),
        ("outer", "TypeError"),
    }
    cython_source = """
cdef int *first(Job *job) except NULL:
    if job == NULL: raise ValueError("job")
    raise  # what came
def second(array):
    # nothing that would raise TypeError
    raise TypeError
    PyErr_SetString(PyExc_IndexError, "i")
"""
    assert raises_of_compiled(cython_source) == {
        ("first", "ValueError"),
        ("second", "TypeError"),
        ("second", "IndexError"),
    }


PUBLIC_FUNCTIONS = sorted(name for name in fastattn.__all__ if inspect.isroutine(getattr(fastattn, name)))


class TestDocstrings:
    @pytest.mark.parametrize("name", PUBLIC_FUNCTIONS)
    def test_sections(self, name):
        function = getattr(fastattn, name)
        text = inspect.getdoc(function)
        summary, _, rest = text.partition("\n\n")
        assert "\n" not in summary
        assert summary.endswith(".")
        sections = re.findall(r"^(\w[\w ]*)\n-{3,}$", rest, re.MULTILINE)
        wanted = ["Examples"]
        if inspect.signature(function).parameters:
            wanted += ["Parameters"]
        if inspect.signature(function).return_annotation not in ("None", None):
            wanted += ["Returns"]
        missing = set(wanted) - set(sections)
        assert not missing

    @pytest.mark.parametrize("name", PUBLIC_FUNCTIONS)
    def test_every_parameter_is_described(self, name):
        function = getattr(fastattn, name)
        text = inspect.getdoc(function)
        parameters = re.split(r"^\w[\w ]*\n-{3,}$", text, flags=re.MULTILINE)
        shared = inspect.signature(fastattn.attention).parameters if "\nother options\n" in text else {}
        for parameter in inspect.signature(function).parameters:
            assert parameter in shared or any(
                re.search(rf"^[\w, ]*\b{parameter}\b[\w, ]*( :|$)", part, re.MULTILINE) for part in parameters
            )

    def test_attention_has_them_all(self):
        text = inspect.getdoc(fastattn.attention)
        for section in ("Parameters", "Returns", "Raises", "Notes", "References", "Examples"):
            assert re.search(rf"^{section}\n-+$", text, re.MULTILINE), section

    @pytest.mark.parametrize("name", [*masks.__all__])
    def test_masks_say_what_they_allow(self, name):
        assert inspect.getdoc(getattr(masks, name)).partition("\n")[0].endswith(".")


def test_public_names():
    wanted = {
        "attention",
        "scaled_dot_product_attention",
        "merge_attention",
        "varlen_attention",
        "varlen_attention_backward",
        "rope",
        "rope_tables",
        "set_num_threads",
        "show_config",
        "masks",
        "BackendError",
    }
    assert wanted <= set(fastattn.__all__)
    for name in fastattn.__all__:
        assert hasattr(fastattn, name)
    assert {"Causal", "Window", "KeyLengths", "Segments", "PrefixLM", "GlobalTokens", "Dense"} <= set(
        masks.__all__
    )


@pytest.mark.parametrize("module", [fastattn, masks], ids=["fastattn", "masks"])
def test_completion_shows_what_is_public(module):
    shown = {name for name in dir(module) if not re.fullmatch(r"__\w+__", name)}
    assert shown == set(module.__all__) - {"__version__"}
    assert {"__name__", "__doc__", "__file__"} <= set(dir(module))


def test_the_signature_is_the_contract():
    parameters = inspect.signature(fastattn.attention).parameters
    options = {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert [name for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY] == [
        "query",
        "key",
        "value",
    ]
    assert options == {
        "mask": None,
        "bias": None,
        "causal": False,
        "window": None,
        "key_lengths": None,
        "scale": None,
        "softcap": None,
        "sinks": None,
        "precision": "exact",
        "layout": "bhsd",
        "dropout": 0.0,
        "seed": None,
        "out": None,
        "return_lse": False,
        "return_weights": False,
        "num_threads": None,
        "backend": None,
    }


def test_gradients_take_the_options_of_their_forward_call():
    """In its order, with `grad_lse` and `wrt`, and without those that say what is returned."""
    for forward, arrays in (
        (fastattn.attention, ["query", "key", "value"]),
        (fastattn.flex_attention, ["query", "key", "value"]),
        (fastattn.varlen_attention, ["query", "key", "value", "cu_seqlens_q", "cu_seqlens_k"]),
    ):
        backward = getattr(fastattn, f"{forward.__name__}_backward")
        options, of_gradients = (
            {
                n: p.default
                for n, p in inspect.signature(function).parameters.items()
                if p.kind is p.KEYWORD_ONLY
            }
            for function in (forward, backward)
        )
        places = [n for n in inspect.signature(backward).parameters if n not in of_gradients]
        assert places == ["grad_out", *arrays[:3], "out", "lse", *arrays[3:]]
        assert of_gradients.pop("grad_lse") is None
        assert of_gradients.pop("wrt") == ("query", "key", "value")
        assert of_gradients.pop("score_grad", None) is None
        kept = {n: x for n, x in options.items() if n not in ("out", "return_lse", "return_weights")}
        assert list(of_gradients.items()) == list(kept.items())


def test_compiled_backend_is_here_wherever_a_compiler_is():
    """Or the tests of the kernels would be skipped silently."""
    from fastattn.backends.cython import backend as cython_backend

    if not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")):
        pytest.skip("no C compiler")
    assert cython_backend.backend.unavailable_reasons() == []


class TestInfo:
    def test_show_config(self, capsys):
        fastattn.show_config()
        printed = capsys.readouterr().out
        for word in (fastattn.__version__, "cython", "reference", "threads"):
            assert word in printed

    def test_command_line(self):
        from fastattn.backends.cython import backend as cython_backend

        printed = python(
            "import runpy, sys\n"
            "sys.argv = ['fastattn', 'info']\n"
            "runpy.run_module('fastattn', run_name='__main__')"
        )
        assert fastattn.__version__ in printed
        assert any(isa in printed for isa in cython_backend.available_isas())
