"""The disk cache of compiled code: found again, never stale, never an error."""

from __future__ import annotations

import shutil

import pytest

from tests.process import ROOT, python

pytest.importorskip("numba")

#: Two stages stand for all, and `found` is whether they were on disk.
LOAD = """
from numba.core.ccallback import CFunc
import fastattn.backends.numba.prepared
from fastattn.backends.numba.calls import table

compiled = []
compile_uncached = CFunc._compile_uncached
CFunc._compile_uncached = lambda self: compiled.append(self.__name__) or compile_uncached(self)
table("float32").need(frozenset({"adjust", "leave_headroom"}))
assert table("float32").address_of("adjust") and table("float32").address_of("leave_headroom")
print("compiled" if compiled else "found")
"""


def load(cache, **options):
    return python(LOAD, env={"NUMBA_CACHE_DIR": str(cache)}, **options).strip()


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A folder in which the two stages are."""
    folder = tmp_path_factory.mktemp("cache")
    assert load(folder) == "compiled"
    return folder


def test_found_again(filled):
    assert load(filled) == "found"


@pytest.mark.slow
def test_every_function_of_a_call_is_found_again(tmp_path):
    """Of all kinds of calls: stages for few rows and for masks, and a mask_mod's mask map."""
    code = """
import numpy as np
from numba.core.ccallback import CFunc
from numba.core.dispatcher import Dispatcher
import fastattn
from fastattn.backends.numba import work
compiled = []
compile_uncached = CFunc._compile_uncached
CFunc._compile_uncached = lambda self: compiled.append(self.__name__) or compile_uncached(self)
rng = np.random.default_rng(0)
for length in (3, 100):
    x, y = rng.standard_normal((1, 2, length, 20)), rng.standard_normal((1, 2, 100, 20))
    y[0, 0, 5] = np.nan
    mask, bias = rng.random((length, 100)) < 0.5, np.ones(100, np.float16)
    options = dict(mask=mask, bias=bias, softcap=2.0, sinks=np.ones(2), return_lse=True, return_weights=True)
    fastattn.attention(x, y, y, backend="numba", num_threads=2, **options)
    tiles = fastattn.masks.Window(5, 5) | fastattn.masks.GlobalTokens([0])
    fastattn.attention(x, y, y, backend="numba", mask=tiles, causal="bottom_right")
fastattn.create_block_mask(lambda b, h, i, j: j <= i, None, None, 100, 100)
compiled = [name for name in compiled if name != "allowed"]  # the user's function, which is not kept
compiled += list(work._run_parallel.stats.cache_misses)
print(len(compiled))
"""
    environment = {"NUMBA_CACHE_DIR": str(tmp_path)}
    assert int(python(code, env=environment)) > 15
    assert int(python(code, env=environment)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jit/codegen/emit.py", "numba/blocks.py"])
def test_a_change_in_any_file_is_seen(tmp_path, name):
    """Numba's own cache compares only the file that defines a function."""
    shutil.copytree(ROOT / "fastattn", tmp_path / "fastattn", ignore=shutil.ignore_patterns("__pycache__"))
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + LOAD
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    assert python(code, env=environment, cwd=tmp_path).strip() == "compiled"
    assert python(code, env=environment, cwd=tmp_path).strip() == "found"
    changed = tmp_path / "fastattn/backends" / name
    changed.write_text(changed.read_text() + "\n# changed\n")
    assert python(code, env=environment, cwd=tmp_path).strip() == "compiled"


@pytest.mark.slow
def test_another_instruction_set_has_its_own(tmp_path):
    assert load(tmp_path) == "compiled"
    environment = {"NUMBA_CACHE_DIR": str(tmp_path), "FASTATTN_ISA": "portable"}
    assert python(LOAD, env=environment).strip() == "compiled"
    assert load(tmp_path) == "found"


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["/dev/null/cache", "/proc/none"])
def test_a_folder_that_cannot_be_there(folder):
    """Then the folder beside the package is used."""
    assert load(folder) in ("compiled", "found")


@pytest.mark.slow
def test_no_folder_to_write_to():
    """Neither the named one nor those beside the package and of the user."""
    code = """
from numba.core import caching

def refuse(self):
    raise OSError("read-only")

caching._CacheLocator.ensure_cache_path = refuse
"""
    assert python(code + LOAD).strip() == "compiled"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [".nbi", ".nbc"])
def test_damaged_files(tmp_path, filled, kind):
    shutil.copytree(filled, tmp_path, dirs_exist_ok=True)
    files = list(tmp_path.rglob(f"*{kind}"))
    assert files
    for number, file in enumerate(files):
        file.write_bytes(b"" if number % 2 else file.read_bytes()[:40])
    assert load(tmp_path) == "compiled"
    assert load(tmp_path) == "found"


@pytest.mark.slow
def test_folder_that_goes_away(tmp_path):
    """Between two functions that are to be kept."""
    code = LOAD.replace(
        "print(",
        f"import shutil; shutil.rmtree({str(tmp_path / 'gone')!r})\n"
        'table("float64").need(frozenset({"adjust"}))\nprint(',
    )
    assert python(code, env={"NUMBA_CACHE_DIR": str(tmp_path / "gone")}).strip() == "compiled"


@pytest.mark.slow
def test_says_what_takes_long(tmp_path):
    """In the log, when it takes more than a second, and not on the standard streams."""
    code = """
import io, logging
import numpy as np
import fastattn
stream = io.StringIO()
logging.getLogger("fastattn").addHandler(logging.StreamHandler(stream))
logging.getLogger("fastattn").setLevel(logging.INFO)
x = np.ones((1, 1, 40, 8))
fastattn.attention(x, x, x, backend="numba")
print("compiling kernels for float64" in stream.getvalue(), "compiled for float64 in" in stream.getvalue())
"""
    assert python(code, env={"NUMBA_CACHE_DIR": str(tmp_path)}).split() == ["True", "True"]
