"""Where Numba is installed but not usable, the backend says why, and the others work."""

from __future__ import annotations

import pytest

from tests.process import python

pytest.importorskip("numba")

CALLS = """
import contextlib, io, sys
import numpy as np
if {hidden}:
    sys.modules["fastattn.backends.cython.driver"] = None  # as installed without a compiler
{before}
import fastattn

x = np.ones((1, 8, 300, 64), np.float32)
config = io.StringIO()
with contextlib.redirect_stdout(config):
    fastattn.show_config()
print([line for line in config.getvalue().splitlines() if line.strip().startswith("numba ")][0])
fastattn.attention(x, x, x)
print("fine")
for call in (
    lambda: fastattn.attention(x, x, x, backend="numba", num_threads=4),
    lambda: fastattn.flex_attention(x, x, x, score_mod=lambda score, b, h, q, k: score),
):
    try:
        call()
    except fastattn.BackendError as error:
        print(*str(error).splitlines())
"""


def reasons(before="", hidden=False, needs=2, **variables):
    """The reason in `show_config`, and in the errors of all that needs Numba.

    `needs`: 2 where its compiler is not usable, and 1 where its threads are not: the compiled driver has its
    own.
    """
    env = {"FASTATTN_NUM_THREADS": "4", "NUMBA_NUM_THREADS": "4"} | variables
    config, fine, *errors = python(CALLS.format(hidden=hidden, before=before), env=env).splitlines()
    assert fine == "fine"
    assert len(errors) == needs
    reason = config.partition("not usable: ")[2]
    assert reason
    assert all(reason in error for error in errors)
    return reason


@pytest.mark.parametrize("hidden", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_its_compiler_is_switched_off(hidden):
    """As for coverage and debugging."""
    assert "NUMBA_DISABLE_JIT" in reasons(hidden=hidden, NUMBA_DISABLE_JIT="1")


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [False, True])
def test_an_unknown_threading_layer(hidden):
    reason = reasons(hidden=hidden, needs=2 if hidden else 1, NUMBA_THREADING_LAYER="pthreads")
    for word in ("NUMBA_THREADING_LAYER", "'pthreads'", "tbb", "omp", "workqueue", "default", "forksafe"):
        assert word in reason


@pytest.mark.parametrize(
    "layer", ["TBB", *(pytest.param(it, marks=pytest.mark.slow) for it in ("safe", "tbb"))]
)
def test_a_threading_layer_that_does_not_load(layer):
    before = 'sys.modules["numba.np.ufunc.tbbpool"] = None'
    reason = reasons(before, needs=1, NUMBA_THREADING_LAYER=layer)
    assert f"NUMBA_THREADING_LAYER={layer.lower()}" in reason
    assert "tbbpool" in reason


@pytest.mark.slow
def test_an_unknown_priority_of_threading_layers():
    assert "NUMBA_THREADING_LAYER_PRIORITY" in reasons(
        needs=1, NUMBA_THREADING_LAYER_PRIORITY="tbb omp pthreads"
    )


@pytest.mark.parametrize("error", ["ImportError", "AttributeError", "SystemError"])
def test_it_does_not_load(error):
    """As beside a NumPy that it was not built for."""
    before = f"""
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "numba.core":
            raise {error}("numpy.core.multiarray failed to import")
sys.meta_path.insert(0, Finder())
"""
    assert reasons(before) == f"numba does not load ({error}: numpy.core.multiarray failed to import)"
