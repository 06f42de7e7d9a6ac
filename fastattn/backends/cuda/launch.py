"""Launches of compiled kernels, any number of times, with other addresses each time.

Numba compiles kernels and keeps them. Its own launches look at each argument anew, which takes the host
longer than small kernels run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from struct import Struct, calcsize
from typing import Any

from numba import types
from numba.core.typing.typeof import Purpose, typeof

from fastattn.backends.cuda.stream import SIMULATED, Pointer, SimulatedMemory, Stream, checked, driver

#: Numba's types of numbers, by what `struct` calls them.
CODES = {
    types.boolean: "?", types.int8: "b", types.uint8: "B", types.int16: "h", types.uint16: "H",
    types.int32: "i", types.uint32: "I", types.int64: "q", types.uint64: "Q", types.float16: "e",
    types.float32: "f", types.float64: "d",
}  # fmt: skip


class Launch:
    """A launch of a kernel on the current device. Arguments are tuples, numbers, pointers and Numba's arrays;
    a kernel has those in tuples one after another, and of an array seven or more."""

    def __init__(self, kernel: Any, blocks: int, threads: int, *arguments: Any) -> None:
        kinds = tuple(typeof(_with(each, None), Purpose.argument) for each in arguments)
        self._compiled = kernel.compile(kinds)  # which must live as long as its function
        self._function = driver().CUfunction(int(self._compiled.library.get_cufunc().handle))
        self._grid = blocks, 1, 1, threads, 1, 1
        codes = "".join(map(_codes, kinds))
        self._pack = Struct(codes).pack_into
        self._places = [calcsize(codes[: n + 1]) - calcsize(code) for n, code in enumerate(codes)]
        self._nbytes = -(-calcsize(codes) // 8) * 8
        values = list(_flat(arguments))
        self._values = [value.offset if type(value) is Pointer else value for value in values]
        self._pointers = [
            (n, value.memory, value.offset)
            for n, value in enumerate(values)
            if type(value) is Pointer and value.memory is not None
        ]
        self._free: list[tuple[Any, int]] = []  #: arguments in memory that no thread is about to launch with

    def __call__(self, stream: Stream, addresses: Sequence[int] = ()) -> None:
        """addresses: of the memory of pointers, by number.

        Raises
        ------
        RuntimeError
            The driver refuses the launch, or reports what went wrong before.
        """
        values = self._values.copy()
        for n, memory, offset in self._pointers:
            values[n] = addresses[memory] + offset
        try:
            packed = self._free.pop()
        except IndexError:
            packed = self._room()
        self._pack(packed[0], 0, *values)
        result = driver().cuLaunchKernel(self._function, *self._grid, 0, stream.number, packed[1], 0)
        self._free.append(packed)  # the driver has read it
        checked(result)

    def _room(self) -> tuple[Any, int]:
        """Memory for the arguments, with the address of each behind them, and where these addresses are."""
        buffer = ctypes.create_string_buffer(self._nbytes + 8 * len(self._places))
        start = ctypes.addressof(buffer)
        addresses = (start + place for place in self._places)
        Struct(f"{len(self._places)}Q").pack_into(buffer, self._nbytes, *addresses)
        return buffer, start + self._nbytes


class SimulatedLaunch:
    """The same in Numba's simulator, whose kernels take tuples."""

    def __init__(self, kernel: Any, blocks: int, threads: int, *arguments: Any) -> None:
        self._kernel, self._grid, self._arguments = kernel, (blocks, threads), arguments

    def __call__(self, stream: Stream, addresses: Sequence[int] = ()) -> None:
        self._kernel[self._grid](*_with(self._arguments, addresses))


def launch_of(kernel: Any, blocks: int, threads: int, *arguments: Any) -> Launch | SimulatedLaunch:
    return (SimulatedLaunch if SIMULATED else Launch)(kernel, blocks, threads, *arguments)


def _with(value: Any, addresses: Sequence[int] | None) -> Any:
    """Arguments with simulated memory, or with None the number 0, in the place of pointers."""
    if type(value) is tuple:
        return tuple(_with(each, addresses) for each in value)
    if type(value) is not Pointer:
        return value
    if addresses is None:
        return 0
    return SimulatedMemory(value.view, 0 if value.memory is None else addresses[value.memory])


def _flat(value: Any) -> Iterator[Any]:
    """A kernel's own arguments of one of ours."""
    if type(value) is tuple:
        for each in value:
            yield from _flat(each)
    elif hasattr(value, "device_ctypes_pointer"):  # Numba's array: two pointers of its own come first
        address = value.device_ctypes_pointer.value or 0
        yield from (0, 0, value.size, value.dtype.itemsize, address, *value.shape, *value.strides)
    else:
        yield value


def _codes(kind: Any) -> str:
    if isinstance(kind, types.BaseTuple):
        return "".join(map(_codes, kind))
    return "q" * (5 + 2 * kind.ndim) if isinstance(kind, types.Array) else CODES[kind]
