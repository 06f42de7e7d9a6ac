"""The CUDA backend on `fake_cuda.c` in the place of NVIDIA's driver, in a process that loads it.

All is real down to the driver: Numba compiles for sm_90, and launches, copies and memory go through NVIDIA's
libraries for Python. What is linked is not machine code: nothing runs it.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from cuda.core import ObjectCode
from numba import cuda
from numba.cuda import codegen

from fastattn.backends.cuda import backend, engine
from fastattn.backends.cuda.launch import Launch
from tests.fake_gpu import FakeArray

DRIVER: Any = ctypes.CDLL("libcuda.so.1")
SM_90 = (9, 0)
SIZES = {"b64": 8, "u64": 8, "f64": 8, "b32": 4, "u32": 4, "f32": 4, "b16": 2, "u16": 2, "b8": 1, "u8": 1}

_ptx: dict[str | None, str] = {}


class Launched(NamedTuple):
    """What the driver was asked for."""

    name: str
    grid: tuple[int, ...]  #: blocks, threads, and dynamic shared memory
    stream: int
    device: int
    arguments: tuple[bytes, ...]  #: as many and as long as the kernel has in PTX


log: list[Launched] = []
result = SimpleNamespace(code=0, watch=None)  #: of launches, and what is done at each


@ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), *[ctypes.c_void_p] * 2,
    ctypes.POINTER(ctypes.c_void_p),
)  # fmt: skip
def _on_launch(name: Any, grid: Any, stream: Any, context: Any, arguments: Any) -> int:
    name = name.decode()
    sizes = parameters(name)
    read = tuple(ctypes.string_at(arguments[n], size) for n, size in enumerate(sizes))
    device = DRIVER.fake_device(ctypes.c_void_p(context))
    log.append(Launched(name, tuple(grid[:7]), stream or 0, device, read))
    if result.watch is not None:
        result.watch(log[-1])
    return result.code


def parameters(name: str) -> list[int]:
    """The bytes of each parameter of a kernel, from its PTX."""
    listed = re.search(rf"\.entry {re.escape(name)}\((.*?)\)", _ptx[name], re.DOTALL)
    assert listed
    return [SIZES[kind] for kind in re.findall(r"\.param \.(\w+)", listed[1])]


def _not_linked(library: Any, cc: Any = None) -> ObjectCode:
    _ptx[library._entry_name] = library.get_asm_str(SM_90)
    return ObjectCode.from_cubin(b"not linked")


codegen.CUDACodeLibrary.get_cubin = _not_linked
backend._unlinkable = lambda capability: []
DRIVER.fake_on_launch.argtypes = [ctypes.c_void_p]
DRIVER.fake_on_launch(_on_launch)


class TorchLike(FakeArray):
    """Its library takes arrays as PyTorch does, and results stay what the backend exports."""

    def __init__(self, array: np.ndarray, device: int = 0, stream: int = 1) -> None:
        super().__init__(array, device)
        self.stream = stream

    def __array_namespace__(self) -> SimpleNamespace:
        return SimpleNamespace(from_dlpack=lambda other: other.__dlpack__(stream=self.stream))


def fake_torch() -> SimpleNamespace:
    """A PyTorch whose tensors on a GPU are host memory. `asked` are the devices whose stream it was asked
    for."""
    asked: list[int] = []

    class Tensor:
        is_cuda, requires_grad, layout, dtype = True, False, "strided", "torch.float32"

        def __init__(self, array: np.ndarray, device: int = 0) -> None:
            self.hidden, self.shape, self.device = array, array.shape, SimpleNamespace(index=device)
            strides = tuple(step // array.itemsize for step in array.strides)
            address = array.ctypes.data
            self.stride, self.data_ptr = lambda: strides, lambda: address

    def current_stream(device: int) -> SimpleNamespace:
        asked.append(device)
        return SimpleNamespace(cuda_stream=40 + device)

    Tensor.__module__ = "torch"
    torch = SimpleNamespace(
        Tensor=Tensor, strided="strided", cuda=SimpleNamespace(current_stream=current_stream), asked=asked,
        from_dlpack=lambda capsule: capsule,
    )  # fmt: skip
    sys.modules["torch"] = torch  # type: ignore[assignment]
    return torch


def arrays(len_q: int, len_k: int, *, lead: tuple[int, ...] = (1,), **where: Any) -> list[TorchLike]:
    return [TorchLike(np.ones((*lead, 2, n, 64), np.float32), **where) for n in (len_q, len_k, len_k)]


class Twice(Launch):
    """Launches a kernel twice: as the backend does, and as Numba does with the same arguments."""

    def __init__(self, kernel: Any, blocks: int, threads: int, *arguments: Any) -> None:
        super().__init__(kernel, blocks, threads, *arguments)
        self._by_numba = kernel, (blocks, threads), arguments

    def __call__(self, stream: Any, addresses: Any = ()) -> None:
        super().__call__(stream, addresses)
        kernel, grid, arguments = self._by_numba
        kernel[(*grid, cuda.external_stream(stream.number))](*_resolved(arguments, addresses))


def _resolved(value: Any, addresses: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_resolved(each, addresses) for each in value)
    if not hasattr(value, "offset"):
        return value
    return value.offset + (0 if value.memory is None else addresses[value.memory])


def launch_twice() -> None:
    engine.launch_of = Twice


def calls_of(function: Any) -> Counter[str]:
    """The calls of functions that the interpreter makes or sees; launches are not reported."""
    counted: Counter[str] = Counter()

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            counted[frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name] += 1
        elif event == "c_call":
            counted[argument.__qualname__] += 1

    DRIVER.fake_on_launch(None)
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        DRIVER.fake_on_launch(_on_launch)
    return counted
