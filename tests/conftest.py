"""Fixtures: every usable backend, on every instruction set of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import fastattn
from tests.process import python

settings.register_profile(
    "fastattn",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("fastattn")

BACKENDS = ("reference", "cython", "numba")
#: The pool "workqueue" is always there; those of TBB and OpenMP want a library.
NUMBA_POOLS = {"tbb": "tbbpool", "omp": "omppool", "workqueue": "workqueue"}


@dataclass(frozen=True)
class Engine:
    """A backend, and the instruction set it is to run on where it has a choice."""

    backend: str
    isa: str | None = None

    @property
    def name(self) -> str:
        return self.backend if self.isa is None else f"{self.backend}-{self.isa}"

    def attention(self, *arrays: Any, **options: Any) -> Any:
        return fastattn.attention(*arrays, backend=self.backend, **options)

    def everything(self, *arrays: Any, **options: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Output, lse and weights."""
        return self.attention(*arrays, return_lse=True, return_weights=True, **options)

    def environment(self) -> dict[str, str]:
        """What makes another process use this backend and instruction set by default."""
        variables = {"FASTATTN_BACKEND": self.backend}
        return variables if self.isa is None else variables | {"FASTATTN_ISA": self.isa}


def _usable(backend: str) -> bool:
    try:
        fastattn.attention(np.ones((1, 1)), np.ones((1, 1)), np.ones((1, 1)), backend=backend)
    except fastattn.BackendError:
        return False
    return True


def _isas() -> list[str]:
    if not _usable("cython"):
        return []
    from fastattn.backends import cython_cpu

    return list(cython_cpu.available_isas())


USABLE = tuple(name for name in BACKENDS if _usable(name))
ISAS = tuple(_isas())
#: Numba compiles for one instruction set in a process: FASTATTN_ISA names another than the best.
ENGINES = (
    Engine("reference"),
    *(Engine("cython", isa) for isa in ISAS),
    *(Engine(name) for name in USABLE if name == "numba"),
)


def pytest_report_header() -> list[str]:
    absent = [name for name in BACKENDS if name not in USABLE]
    return [
        f"backends: {', '.join(USABLE)}" + (f" (not usable: {', '.join(absent)})" if absent else ""),
        f"instruction sets: {', '.join(ISAS) or 'none'}",
    ]


@pytest.fixture(params=USABLE)
def backend(request: pytest.FixtureRequest) -> Engine:
    """Every usable backend, on the instruction set it chose for itself."""
    return Engine(request.param)


@pytest.fixture(params=ENGINES, ids=lambda engine: engine.name)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Every usable backend on every instruction set this machine has."""
    chosen: Engine = request.param
    if chosen.isa is None:
        context: Any = nullcontext()
    else:
        from fastattn.backends import cython_cpu

        context = cython_cpu.use_isa(chosen.isa)
    with context:
        yield chosen


@pytest.fixture
def compiled() -> None:
    """These tests look at the pool of the compiled backend."""
    from fastattn.backends import cython_cpu

    reasons = cython_cpu.backend.unavailable_reasons()
    if reasons:
        pytest.skip(f"cython is not usable here: {reasons}")


@pytest.fixture(params=NUMBA_POOLS)
def pool_environment(request: pytest.FixtureRequest) -> dict[str, str]:
    """What has a process use one of Numba's thread pools, with four threads on any number of cores."""
    # Where pip puts TBB.
    libraries = os.pathsep.join([f"{sys.prefix}/lib", os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(
        os.pathsep
    )
    variables = {
        "NUMBA_THREADING_LAYER": request.param,
        "NUMBA_NUM_THREADS": "4",
        "FASTATTN_NUM_THREADS": "4",
        "FASTATTN_BACKEND": "numba",
        "LD_LIBRARY_PATH": libraries,
    }
    code = f"""
import importlib
try:
    importlib.import_module("numba.np.ufunc.{NUMBA_POOLS[request.param]}")
except ImportError:
    print("absent")
"""
    if python(code, env=variables).strip() == "absent":
        pytest.skip(f"{request.param} is not installed")
    return variables
