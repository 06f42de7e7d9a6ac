"""Python in a clone whose extension is not built, where it finds the clone before an installed package."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.process import ROOT, python


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clones") / "fastattn"
    built = shutil.ignore_patterns("*.so", "*.pyd", "driver.c", "__pycache__", "demo", "bench")
    shutil.copytree(ROOT / "fastattn", folder / "fastattn", ignore=built)
    return folder


CODE = """
import sys, warnings
if {hidden}:
    sys.modules["numba"] = None
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import fastattn
    import numpy as np
    x = np.ones((2, 5, 8))
    if {hidden}:  # else Numba compiles for some seconds
        fastattn.attention(x, x, x)
for it in seen:
    print("warned:", it.category.__name__, it.message)
for call in (lambda: fastattn.attention(x, x, x, backend="cython"), lambda: fastattn._capi.attention):
    try:
        call()
    except fastattn.BackendError as error:
        print("error:", str(error).replace("\\n", " "))
fastattn.show_config()
"""


@pytest.mark.parametrize("chosen", ["", "reference"])
@pytest.mark.parametrize("hidden", [False, True])
def test_every_way_says_where_it_is_and_how_to_leave(clone: Path, hidden: bool, chosen: str) -> None:
    """Once as a warning, with Numba and without, unless the environment names a backend."""
    env = {"PYTHONPATH": None, "FASTATTN_BACKEND": chosen}
    lines = python(CODE.format(hidden=hidden), cwd=clone, env=env).splitlines()
    words = f"imported from the source tree {clone}, which is not built; `pip install -e {clone}` builds it"
    leave = "from another folder Python imports the fastattn that is installed"
    said = [line for line in lines if words in line and leave in line]
    starts = ["warned: RuntimeWarning"] * (not chosen) + ["error"] * 2 + ["NO COMPILED KERNELS", "  cython "]
    assert [line[: len(start)] for line, start in zip(said, starts, strict=True)] == starts
    assert len([line for line in lines if line.startswith("warned")]) == (not chosen)


def test_sources_beside_an_extension_that_loads_are_no_news() -> None:
    assert python("import warnings; warnings.simplefilter('error'); import fastattn") == ""
