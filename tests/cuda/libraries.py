"""Libraries of arrays on a GPU: those that are installed, or in the simulator made-up ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.fake_gpu import DlpackArray, FakeArray, LoneArray

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"


class Library(NamedTuple):
    """A library of arrays on a GPU."""

    name: str
    kind: type  #: of its arrays
    result: type  #: of arrays that calls return
    put: Callable[[np.ndarray], Any]
    get: Callable[[Any], np.ndarray]


def _numba() -> Library:
    from numba import cuda

    array = type(cuda.to_device(np.zeros(1)))
    return Library("numba", array, array, cuda.to_device, lambda x: x.copy_to_host())


def _cupy() -> Library:
    cupy = pytest.importorskip("cupy")
    return Library("cupy", cupy.ndarray, cupy.ndarray, cupy.asarray, cupy.asnumpy)


def _torch() -> Library:
    torch = pytest.importorskip("torch")

    def put(array: np.ndarray) -> Any:
        return torch.from_numpy(np.ascontiguousarray(array)).cuda()

    return Library("torch", torch.Tensor, torch.Tensor, put, lambda x: x.cpu().numpy())


def _fake() -> Library:
    return Library("fake", FakeArray, FakeArray, FakeArray, lambda x: x.hidden)


def _lone() -> Library:
    from numba import cuda

    def get(array: Any) -> np.ndarray:
        return array.hidden if isinstance(array, LoneArray) else array.copy_to_host()

    return Library("lone", LoneArray, type(cuda.to_device(np.zeros(1))), LoneArray, get)


def _dlpack() -> Library:
    return Library("dlpack", DlpackArray, FakeArray, DlpackArray, lambda x: x.hidden)


LIBRARIES = {"numba": _numba, "cupy": _cupy, "torch": _torch}
if SIMULATED:
    LIBRARIES = {"fake": _fake, "lone": _lone, "dlpack": _dlpack}
