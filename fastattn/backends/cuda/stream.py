"""A stream of one GPU, and what is done on it in order: memory made and freed, copies, launches.

Memory comes from the device's pool and goes back to it in the order of the stream: neither waits for the GPU.
Kernels get addresses, so whoever launches one holds the views of what it reads until then.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numba import config, cuda

from fastattn._call.storage import REAL, storage_of
from fastattn._machine.device import (
    DeviceArray,
    Memory,
    c_strides,
    exported,
    from_dlpack_of,
    said_to_be_bfloat16,
)
from fastattn.backends.cuda.intrinsics import BITS

SIMULATED = bool(config.ENABLE_CUDASIM)

#: CUDA's numbers for the two streams that are always there.
LEGACY_DEFAULT, PER_THREAD_DEFAULT = 1, 2


class View(NamedTuple):
    """An array on the device: its memory, and the places of its elements in that."""

    owner: Any  #: must live as long; of a view for many calls the number of its memory, see `Pointer`
    address: int  #: of the memory; of a view for many calls relative to an address that each call gives
    size: int  #: elements in it
    dtype: np.dtype
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  #: in elements

    def at(self, outer: tuple[int, ...]) -> View:
        """The rest of the array at an index on its first axes."""
        start = self.start + sum(n * stride for n, stride in zip(outer, self.strides, strict=False))
        return self._replace(start=start, shape=self.shape[len(outer) :], strides=self.strides[len(outer) :])

    def is_packed(self, dtype: np.dtype, span: int) -> bool:
        """Whether it has this dtype or is in 16 bits, and each row consists of whole spans at addresses that
        are multiples of a span."""
        rows = (self.start, *self.strides[:-1])
        return (
            (self.dtype == dtype or storage_of(self.dtype) != REAL)
            and self.strides[-1] == 1
            and not any(step % span for step in rows)
            and self.address % (span * self.dtype.itemsize) == 0
        )

    def in_pairs(self, is_packed: bool) -> View:
        """Of an array in 16 bits: its `pairs` as elements if it is packed in spans of them, else its bits."""
        if not is_packed:
            return self._replace(dtype=np.dtype(np.uint16))
        *outer, _ = (step // 2 for step in self.strides)
        return self._replace(
            size=self.size // 2, dtype=np.dtype(np.float32), start=self.start // 2,
            shape=(*self.shape[:-1], self.shape[-1] // 2), strides=(*outer, 1),
        )  # fmt: skip

    def with_axes(self, count: int) -> View:
        """With `count` more axes of length 1 in front."""
        return self._replace(shape=(1,) * count + self.shape, strides=(0,) * count + self.strides)

    def words(self) -> tuple[Any, ...]:
        """What kernels read: the address of the first element, and the strides."""
        return Pointer(self), *self.strides


class Pointer:
    """The address of a view's first element, once the addresses of memory are known by their numbers."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.memory = view.owner if type(view.owner) is int else None  #: None where `offset` is the address
        self.offset = view.address + view.start * view.dtype.itemsize


class SimulatedMemory:
    """What an address is in Numba's simulator. Outside of the memory there are none."""

    def __init__(self, view: View, base: int) -> None:
        nbytes = view.size * view.dtype.itemsize
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(base + view.address))
        self._elements, self._start = raw.view(BITS.get(view.dtype.name, view.dtype)), view.start

    def _place(self, index: Any) -> int:
        """Indices are unsigned: those before the first element wrap around. NumPy refuses what is outside."""
        place = self._start + (int(index) + (1 << 63)) % (1 << 64) - (1 << 63)
        return place if place >= 0 else self._elements.size

    def __getitem__(self, index: Any) -> Any:
        return self._elements[self._place(index)]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._elements[self._place(index)] = value


class Stream:
    """A stream of the device that is current, by its number; see `caller_stream`. Threads share them."""

    def __init__(self, device: int, number: int) -> None:
        self.device, self.number = device, number
        self._pool = _pool(device)
        #: Those that multiply TF32.
        self.has_tensor_cores = cuda.gpus[device].compute_capability >= (8, 0)
        self._core_stream = _core_stream(number)

    def room(self, shape: tuple[int, ...], dtype: Any, filled_with_zeros: bool = False) -> View:
        """A new array, C-contiguous."""
        dtype, size = np.dtype(dtype), max(math.prod(shape), 1)
        address, owner = self._allocate(size * dtype.itemsize, filled_with_zeros)
        return View(owner, address, size, dtype, 0, shape, c_strides(shape))

    def upload(self, array: np.ndarray, dtype: Any) -> View:
        """A copy, as large as the array's memory rather than its broadcast shape."""
        stored = array[tuple(slice(None) if stride else slice(0, 1) for stride in array.strides)]
        stored = np.asarray(stored, dtype, order="C")
        stored = stored.view(_kept(stored.dtype))
        strides = tuple(
            step // stored.itemsize if stride else 0
            for step, stride in zip(stored.strides, array.strides, strict=True)
        )
        room = self.room((stored.size,), stored.dtype)
        if stored.size:
            self._copy_to_device(room.address, stored)
        return room._replace(shape=array.shape, strides=strides)

    def download(self, view: View, out: np.ndarray) -> None:
        """Fills `out` from the beginning of a view's memory, after all work on the stream."""
        host = np.empty(out.shape, view.dtype)
        if host.size:
            self._copy_to_host(host, view.address)
        out[...] = host

    def view(self, array: DeviceArray) -> View:
        """The array where it is, which must have been made."""
        itemsize, address, owner = array.stored.itemsize, array.memory.address or 0, array.memory.owner
        steps = tuple(step // itemsize for step in array.strides)
        if not array.size:
            return View(owner, address, 0, _kept(array.stored), 0, array.shape, steps)
        reaches = [step * (n - 1) for n, step in zip(array.shape, steps, strict=True)]
        before = -sum(min(0, reach) for reach in reaches)
        return View(
            owner, address - before * itemsize, sum(map(abs, reaches)) + 1, _kept(array.stored), before,
            array.shape, steps,
        )  # fmt: skip

    def argument(self, value: Any) -> Any:
        """What a caller's function reads: an array on the device with its axes, or a number as it is."""
        if isinstance(value, DeviceArray):
            memory = value.memory
            return self._array(memory.address or 0, value.shape, value.stored, memory.owner, value.strides)
        if isinstance(value, np.ndarray):
            copy = self.upload(np.ascontiguousarray(value), value.dtype)
            return self._array(copy.address, value.shape, copy.dtype, copy.owner)
        return value

    def make(self, memory: Memory, filled_with_zeros: bool = False) -> None:
        """Makes the memory of a result."""
        nbytes = max(math.prod(memory.shape), 1) * np.dtype(memory.dtype).itemsize
        memory.address, memory.owner = self._allocate(nbytes, filled_with_zeros)

    def hand_over(self, memory: Memory) -> None:
        """Turns the memory into the caller's result: an array of the library of ``memory.like`` if that takes
        DLPack, else Numba's. The work that fills it must be on the stream already: the library's own stream
        waits for it."""
        shape, dtype, from_dlpack = memory.shape, np.dtype(memory.dtype), from_dlpack_of(memory.like)
        if from_dlpack is None:
            bound = getattr(memory.like, "__cuda_array_interface__", {}).get("stream")
            memory.owner = self._array(memory.address or 0, shape, dtype, memory.owner, bound=bound)
            return
        made = self._exported(memory.owner, shape, dtype)
        # PyTorch would ask a second time for its current stream, which this is.
        is_of_torch = _torch_of(memory.like) is not None
        memory.owner = from_dlpack(
            made.__dlpack__(stream=self.number, max_version=(1, 0)) if is_of_torch else made
        )

    def wait_for(self, memories: Sequence[Memory]) -> None:
        """Makes the stream wait until the memories' libraries have filled them. The stream is that of the
        first. The host does not wait."""
        of_torch = self.number if memories and _torch_of(memories[0].owner) else None  # its current stream
        waited = {self.number}
        for memory in memories:
            number = memory.stream
            if number is None and _torch_of(memory.owner):
                number = of_torch = of_torch or _current_stream(memory)
            if number is None:
                if hasattr(memory.owner, "__dlpack__"):
                    memory.owner.__dlpack__(stream=self.number)
            elif number not in waited:
                waited.add(number)
                self._core_stream.wait(_core_stream(number))

    def _copy_to_device(self, address: int, array: np.ndarray) -> None:
        """Copies a C-contiguous array, which may change or go as soon as this returns."""
        checked(driver().cuMemcpyHtoDAsync(address, array.ctypes.data, array.nbytes, self.number))

    def _copy_to_host(self, array: np.ndarray, address: int) -> None:
        """Fills a C-contiguous array, and waits until it is filled."""
        checked(driver().cuMemcpyDtoHAsync(array.ctypes.data, address, array.nbytes, self.number))
        checked(driver().cuStreamSynchronize(self.number))

    def _allocate(self, nbytes: int, filled_with_zeros: bool) -> tuple[int, Any]:
        """The address of new memory, and its owner, which must live as long."""
        buffer = self._pool.allocate(nbytes, stream=self._core_stream)
        if filled_with_zeros:
            buffer.fill(0, stream=self._core_stream)
        return int(buffer.handle), buffer

    def _array(
        self,
        address: int,
        shape: tuple[int, ...],
        dtype: np.dtype,
        owner: Any,
        strides: tuple[int, ...] | None = None,
        bound: int | None = None,
    ) -> Any:
        """Numba's array of existing memory, perhaps bound to a stream."""
        bits = np.dtype(BITS.get(dtype.name, dtype))
        description = {
            "shape": shape, "strides": strides, "typestr": bits.str, "data": (address, False),
            "stream": bound, "version": 3,
        }  # fmt: skip
        array = self._adopted(description, owner)
        return array if bits == dtype else array.view(dtype)

    def _adopted(self, description: dict[str, Any], owner: Any) -> Any:
        return cuda.from_cuda_array_interface(description, owner=owner, sync=False)

    def _exported(self, owner: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        from cuda.core.utils import StridedMemoryView

        bits = None if dtype.kind == "f" else BITS.get(dtype.name)
        view = StridedMemoryView.from_buffer(owner, shape, dtype=np.dtype(bits or dtype))
        return _Exported(view, self.number, is_bfloat16=bits is not None)


class _Exported:
    """A new array for DLPack. The consumer's stream waits until it is filled."""

    def __init__(self, view: Any, filled_on: int, is_bfloat16: bool) -> None:
        self._view, self._filled_on, self._is_bfloat16 = view, filled_on, is_bfloat16

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._view.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        stream = stream or LEGACY_DEFAULT
        if stream not in (-1, self._filled_on):
            _core_stream(stream).wait(_core_stream(self._filled_on))
        capsule = self._view.__dlpack__(**options)
        return said_to_be_bfloat16(capsule) if self._is_bfloat16 else capsule


class SimulatedStream(Stream):
    """The same in Numba's simulator, where a GPU's addresses are the host's."""

    def __init__(self) -> None:
        self.device = self.number = 0
        self.has_tensor_cores = False

    def wait_for(self, memories: Sequence[Memory]) -> None:
        pass

    def _copy_to_device(self, address: int, array: np.ndarray) -> None:
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def _copy_to_host(self, array: np.ndarray, address: int) -> None:
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def _allocate(self, nbytes: int, filled_with_zeros: bool) -> tuple[int, Any]:
        room = np.full(
            nbytes + 256, 0 if filled_with_zeros else 255, np.uint8
        )  # floats of such bytes are NaN
        start = -room.ctypes.data % 256  # as on a GPU
        return room.ctypes.data + start, room[start : start + nbytes]

    def _adopted(self, description: dict[str, Any], owner: Any) -> Any:
        from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

        return FakeCUDAArray(np.asarray(SimpleNamespace(__array_interface__=description, owner=owner)))

    def _exported(self, owner: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        return exported(owner[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape))


@contextmanager
def caller_stream(array: Any) -> Iterator[Stream]:
    """The stream of an array's library, with its GPU made current; for an array on the host a stream of the
    calling thread."""
    if SIMULATED:
        yield SimulatedStream()
    elif isinstance(array, DeviceArray):
        device = array.memory.device
        context = cuda.gpus[device].get_primary_context()
        checked(driver().cuCtxPushCurrent(context.handle))
        try:
            context.prepare_for_use()
            yield _stream(device, _number(array.memory))
        finally:
            checked(driver().cuCtxPopCurrent())
    else:
        yield _stream(cuda.current_context().device.id, PER_THREAD_DEFAULT)


def _number(memory: Memory) -> int:
    """The current stream of the array's library, or else Numba's default stream."""
    number = _current_stream(memory) if _torch_of(memory.owner) else memory.stream
    if number is not None:
        return number
    return PER_THREAD_DEFAULT if config.CUDA_PER_THREAD_DEFAULT_STREAM else LEGACY_DEFAULT


def _torch_of(array: Any) -> Any:
    """PyTorch where the array is a tensor, which does not name its stream; else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(array, torch.Tensor) else None


def _current_stream(memory: Memory) -> int:
    """PyTorch's, for the memory of a tensor."""
    return _torch_of(memory.owner).cuda.current_stream(memory.device).cuda_stream or LEGACY_DEFAULT


@cache
def driver() -> Any:
    """The CUDA driver."""
    from cuda.bindings import driver

    return driver


def checked(result: tuple[Any, ...]) -> Any:
    """What a function of the driver returns; RuntimeError where it failed."""
    error = result[0]
    if error:
        said = [
            text.decode()
            for f in ("Name", "String")
            for text in getattr(driver(), f"cuGetError{f}")(error)[1:]
        ]
        raise RuntimeError(f"the CUDA driver reports {': '.join(said)}")
    return result[-1]


def _kept(dtype: np.dtype) -> np.dtype:
    """The dtype that kernels read: bools as bytes."""
    return np.dtype(np.uint8) if dtype.kind == "b" else dtype


@cache
def _pool(device: int) -> Any:
    """The pool of a device's memory, which belongs to the driver."""
    import cuda.core as core

    return core.DeviceMemoryResource(device)


@lru_cache(maxsize=64)
def _stream(device: int, number: int) -> Stream:
    return Stream(device, number)


def _core_stream(number: int) -> Any:
    import cuda.core as core

    known = {LEGACY_DEFAULT: core.LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT: core.PER_THREAD_DEFAULT_STREAM}
    return known.get(number) or core.Stream.from_handle(number)
