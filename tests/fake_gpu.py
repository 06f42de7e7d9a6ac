"""A library of arrays on a GPU for the simulator: host memory whose address only the interfaces for arrays on
GPUs give."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np

from fastattn._machine.device import exported, from_dlpack

CUDA = 2  # DLPack's number for memory of a GPU

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class FakeArray:
    """An array on a GPU; NumPy cannot read it."""

    def __init__(self, array: np.ndarray, device: int = 0) -> None:
        self.hidden = array
        self.device = device
        self.shape, self.dtype = array.shape, array.dtype
        self.stream = 7

    @property
    def __cuda_array_interface__(self) -> dict:
        described = dict(self.hidden.__array_interface__)
        described["strides"] = None if self.hidden.flags.c_contiguous else self.hidden.strides
        return described | {"stream": self.stream, "version": 3}

    def __getitem__(self, index) -> FakeArray:
        return type(self)(self.hidden[index], self.device)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.device

    def __array__(self, dtype=None, copy=None):
        raise TypeError("it is on a GPU")

    def __array_namespace__(self) -> SimpleNamespace:
        """Its `from_dlpack` copies at once, so results must be complete by then."""
        return SimpleNamespace(from_dlpack=lambda other: FakeArray(from_dlpack(other).copy(), self.device))


class LoneArray(FakeArray):
    """An array whose library takes no other library's arrays."""

    __array_namespace__ = None


class DlpackArray(FakeArray):
    """An array that gives its address by DLPack only."""

    @property
    def __cuda_array_interface__(self) -> dict:
        raise AttributeError

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        capsule = exported(self.hidden).__dlpack__()
        device_type = ctypes.sizeof(ctypes.c_void_p)  # after the address
        ctypes.c_int32.from_address(_pointer(capsule, b"dltensor") + device_type).value = CUDA
        return capsule
