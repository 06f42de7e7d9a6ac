"""The CUDA backend, on a GPU or in the simulator: NUMBA_ENABLE_CUDASIM=1 python -m pytest tests/cuda.

The simulator must be chosen before Numba is loaded, and then other tests of Numba mean nothing: these run in
a process of their own.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from fastattn.backends.cuda import backend as cuda_backend
from tests.conftest import Engine
from tests.cuda.libraries import LIBRARIES, SIMULATED, Library


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Where there is neither, `test_usable.py` says so for all of them."""
    unusable = cuda_backend.backend.unavailable_reasons() and collection_path.name != "test_usable.py"
    return True if unusable and collection_path.suffix == ".py" else None


class OneAtATime(dict):
    """Shared arrays by where they are asked for. In the simulator two threads that ask at once may get two;
    here whoever finds none holds the others up until it has set one."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def get(self, key, default=None):
        self._lock.acquire()
        found = super().get(key, default)
        if found is not None:
            self._lock.release()
        return found

    def __setitem__(self, key, value) -> None:
        super().__setitem__(key, value)
        self._lock.release()


@pytest.fixture(autouse=True, scope="session")
def simulator():
    """Makes the simulator safe, and quick: it waits for its threads by asking them in a loop."""
    if not SIMULATED:
        yield
        return
    from numba.cuda.simulator.kernelapi import FakeCUDAShared

    make = FakeCUDAShared.__init__

    def make_safe(self, *arguments):
        make(self, *arguments)
        self._allocations = OneAtATime()

    FakeCUDAShared.__init__ = make_safe
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)
    FakeCUDAShared.__init__ = make


@pytest.fixture
def engine() -> Engine:
    return Engine("cuda")


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Library:
    return LIBRARIES[request.param]()
