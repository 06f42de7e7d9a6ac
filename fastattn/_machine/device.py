"""Arrays of other libraries: those on a GPU, as far as validation needs them, and how results become theirs.

Nothing here uses CUDA or reads an element. The description of a caller's array, by the CUDA array interface
or else by DLPack, becomes a `DeviceArray`, which is passed on as an ndarray would be; only the CUDA backend
accesses its memory.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from itertools import accumulate
from math import prod
from operator import mul
from types import SimpleNamespace
from typing import Any

import numpy as np

_CUDA_KINDS = (2, 13)  # DLPack's numbers for device memory and for managed memory


class Memory:
    """Memory of a GPU: of a caller's array, or of a result that the backend is to allocate."""

    # Not a dataclass, here and below: to import these takes a fifth of the work of an import of the package.
    stream: int | None = None  #: the stream that writes the array, where its library tells
    readonly = False
    shape: tuple[int, ...] = ()  #: of a result: what to allocate, C-contiguous
    dtype: np.dtype | None = None
    like: Any = None  #: of a result: an array of the library to return it in

    def __init__(self, device: int, address: int | None = None, owner: Any = None) -> None:
        self.device = device  #: number of the GPU
        self.address = address  #: None until the backend has allocated it
        #: The caller's array; of a result the owner of the memory, in the end what is returned.
        self.owner = owner


class DeviceArray:
    """A view of memory on a GPU, with the attributes of an ndarray that validation uses."""

    def __init__(
        self,
        memory: Memory,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: np.dtype,
        stored: np.dtype | None = None,
    ) -> None:
        self.memory, self.shape, self.strides = memory, shape, strides  #: strides in bytes
        self.dtype = dtype  #: to which elements are converted when read
        self.stored = dtype if stored is None else stored  #: of the elements in memory

    def _view(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> DeviceArray:
        return DeviceArray(self.memory, shape, strides, self.dtype, self.stored)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def device(self) -> str:
        return f"cuda:{self.memory.device}"

    def __repr__(self) -> str:
        return f"<{self.dtype} {self.shape} on {self.device}>"

    def __getitem__(self, index: None) -> DeviceArray:
        """``array[None]``: a view with one more axis in front."""
        if index is not None:
            raise TypeError(f"elements of an array on {self.device} are not read on the host")
        return self._view((1, *self.shape), (0, *self.strides))

    def swapaxes(self, first: int, second: int) -> DeviceArray:
        shape, strides = list(self.shape), list(self.strides)
        for axes in (shape, strides):
            axes[first], axes[second] = axes[second], axes[first]
        return self._view(tuple(shape), tuple(strides))

    def broadcast_to(self, shape: tuple[int, ...]) -> DeviceArray:
        """As `numpy.broadcast_to`; `shape` is one that it broadcasts to."""
        ours = (1,) * (len(shape) - self.ndim) + self.shape
        strides = (0,) * (len(shape) - self.ndim) + self.strides
        spread = (s if n == m else 0 for n, m, s in zip(ours, shape, strides, strict=True))
        return self._view(tuple(shape), tuple(spread))

    def cut(self, axis: int, start: int, length: int) -> DeviceArray:
        """As `cut`."""
        shape, whole = list(self.shape), self.memory
        shape[axis] = length
        memory = Memory(whole.device, (whole.address or 0) + start * self.strides[axis], whole.owner)
        memory.stream, memory.readonly = whole.stream, whole.readonly
        return DeviceArray(memory, tuple(shape), self.strides, self.dtype, self.stored)

    def read_as(self, dtype: np.dtype) -> DeviceArray:
        """The same memory, its elements converted when they are read."""
        return DeviceArray(self.memory, self.shape, self.strides, dtype, self.stored)

    def same_view(self, other: DeviceArray) -> bool:
        """Whether both are the same view of the same memory; libraries describe an array anew each time."""
        same_memory = (self.device, self.memory.address) == (other.device, other.memory.address)
        names = ("shape", "strides", "dtype", "stored")
        return same_memory and all(getattr(self, name) == getattr(other, name) for name in names)

    def new(self, shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
        """A result for the backend to allocate, on this array's GPU and of its library."""
        memory = Memory(self.memory.device)
        memory.shape, memory.dtype, memory.like = shape, dtype, self.memory.owner
        return DeviceArray(memory, shape, c_strides(shape, dtype.itemsize), dtype)

    def addresses(self) -> np.ndarray:
        """An ndarray with the same addresses, for NumPy's functions on memory layout: it has no readable
        elements."""
        return at_address(self.memory.address or 0, self.shape, self.strides, self.stored)


def at_address(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A read-only ndarray of the memory at an address, which it does not own."""
    interface = {
        "version": 3, "data": (address, True), "shape": shape, "strides": strides,
        "typestr": f"|V{dtype.itemsize}",
    }  # fmt: skip
    return np.asarray(SimpleNamespace(__array_interface__=interface)).view(dtype)


def from_dlpack_of(array: Any) -> Any:
    """The function by which the library of an array takes arrays of others; None where it has none."""
    namespace = getattr(array, "__array_namespace__", None)
    module = sys.modules.get(type(array).__module__.partition(".")[0]) if namespace is None else namespace()
    return getattr(module, "from_dlpack", None)


def in_library_of(like: Any, array: np.ndarray) -> Any:
    """A result on the host as an array of the library of `like`, which shares its memory; the result itself
    where that is NumPy, or a library that takes no arrays by DLPack."""
    if isinstance(like, (np.ndarray, np.generic)) or not hasattr(like, "__dlpack__"):
        return array
    from_dlpack = from_dlpack_of(like)
    if from_dlpack is None:
        return array
    return from_dlpack(exported(array))


def from_dlpack(value: Any) -> np.ndarray:
    """A view of the memory of a library's array on the host, of bfloat16 as well."""
    try:
        capsule = value.__dlpack__(max_version=(1, 0))  # without a version it would be read-only
    except TypeError:
        capsule = value.__dlpack__()
    kind = _kind_of_16_bits(capsule)
    if kind is None or kind.value != _BFLOAT:
        return np.from_dlpack(value)
    kind.value = _UINT
    return np.from_dlpack(_Capsule(capsule)).view(_bfloat16())


def _bfloat16() -> np.dtype:
    """NumPy's bfloat16."""
    import ml_dtypes  # which it comes from

    return np.dtype(ml_dtypes.bfloat16)


def exported(array: np.ndarray) -> Any:
    """An array for DLPack: NumPy exports no bfloat16, but its bits."""
    if array.dtype.name != "bfloat16":
        return array
    return _Capsule(said_to_be_bfloat16(array.view(np.uint16).__dlpack__()))


def said_to_be_bfloat16(capsule: Any) -> Any:
    """A DLPack capsule of the bits of bfloat16, which from then on says so."""
    kind: Any = _kind_of_16_bits(capsule)
    kind.value = _BFLOAT
    return capsule


class _Capsule:
    """A DLPack capsule of an array on the host, as libraries ask for it."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule


_UINT, _BFLOAT = 1, 4  # DLPack's numbers for kinds of elements
_POINTER = ctypes.sizeof(ctypes.c_void_p)
_OF_CAPSULE = ctypes.py_object, ctypes.c_char_p
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, *_OF_CAPSULE)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, *_OF_CAPSULE)(("PyCapsule_GetPointer", ctypes.pythonapi))


def _kind_of_16_bits(capsule: Any) -> ctypes.c_uint8 | None:
    """The kind of the elements in a DLPack capsule, to be read or changed there; None unless of 16 bits."""
    # A versioned capsule begins with a version, an owner, a function and flags. Then both have the pointer to
    # the data, the device and the number of axes.
    for name, before in ((b"dltensor", 0), (b"dltensor_versioned", 16 + 2 * _POINTER)):
        if _is_valid(capsule, name):
            at = _pointer(capsule, name) + before + _POINTER + 12
            return (
                ctypes.c_uint8.from_address(at) if ctypes.c_uint8.from_address(at + 1).value == 16 else None
            )
    return None


def host_array(value: Any, name: str) -> np.ndarray:
    """`numpy.asarray` of a value that is read on the host; TypeError where it is on a GPU."""
    if (array := as_device_array(value, name)) is not None:
        raise TypeError(f"{name} is on {array.device}, and is read on the host: pass a NumPy array or a list")
    return converted(value, name)


def converted(value: Any, name: str) -> np.ndarray:
    """`on_host` of a value that may be no array at all: errors name it."""
    try:
        array = on_host(value)
    except (TypeError, BufferError, RuntimeError) as error:
        raise TypeError(f"{name} does not convert to an array: {error}") from error
    except ValueError as error:
        raise ValueError(f"{name} does not convert to an array: {error}") from error
    if array.dtype == object and not array.ndim and not isinstance(value, (np.ndarray, int)):
        hint = f"; say {name}.toarray()" if hasattr(value, "toarray") else ""
        raise TypeError(f"{name} must be an array, got {type(value).__name__}{hint}")
    return array


def on_host(value: Any) -> np.ndarray:
    """`numpy.asarray`, and by DLPack what that does not take."""
    if hasattr(value, "__dlpack__"):
        if not hasattr(value, "__array__"):
            return from_dlpack(value)
        try:
            return np.asarray(value)
        except TypeError:  # as torch says of bfloat16
            return from_dlpack(value)
    return np.asarray(value)


def as_device_array(value: Any, name: str) -> DeviceArray | None:
    """A library's array on a GPU as a `DeviceArray`; None for any other value.

    Raises
    ------
    TypeError
        Its elements are not plain numbers of native byte order, or it is a tensor that records gradients, or
        a masked array, on a GPU or not.
    ValueError
        Its elements are not aligned.
    """
    if isinstance(value, DeviceArray):
        return value
    if isinstance(value, np.ndarray):
        ma = sys.modules.get("numpy.ma")  # not imported here: whoever has a masked array has imported it
        if ma is not None and isinstance(value, ma.MaskedArray):
            raise TypeError(
                f"{name} is a masked array, whose mask would be lost: pass a plain array, and its mask apart"
            )
        return None
    if getattr(value, "requires_grad", False) is True:
        raise TypeError(f"{name} requires grad, and gradients are not computed here: pass {name}.detach()")
    try:
        array = _from_torch(value)
        if array is None:
            where = _where(value)
            if where is None:
                return None
            interface, device = where
            array = _from_dlpack(value) if interface is None else _from_interface(value, interface, device)
    except (TypeError, ValueError, KeyError, BufferError, RuntimeError, ImportError) as error:
        raise TypeError(f"{name} does not convert to an array: {error}") from error
    if array.stored.kind == "V" and array.stored.name != "bfloat16":  # of no dtype that NumPy knows
        kind = getattr(value, "dtype", array.stored)
        raise TypeError(
            f"{name} has elements of {kind} on {array.device}; those read there are float16, bfloat16, "
            "float32, float64, integers and bools: convert it, to float32 say"
        )
    if not array.stored.isnative:
        raise TypeError(f"{name} has dtype {array.stored}: a GPU does not read numbers with swapped bytes")
    itemsize = array.stored.itemsize
    steps = [s for n, s in zip(array.shape, array.strides, strict=True) if n > 1 and s % itemsize]
    if steps or (array.memory.address or 0) % itemsize:
        raise ValueError(
            f"{name} is not aligned: a GPU reads {array.stored} at multiples of {itemsize} bytes"
        )
    return array


def broadcast_to(array: Any, shape: tuple[int, ...], name: str) -> Any:
    """`numpy.broadcast_to` wherever the array is, to a shape that fits it; ValueError where the view would be
    larger than NumPy's arrays can be."""
    if isinstance(array, DeviceArray):
        return array.broadcast_to(shape)
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(f"{name} broadcast to {shape} would have 2**63 bytes or more") from None


def cut(array: Any, axis: int, start: int, length: int) -> Any:
    """A view of the elements ``start .. start + length - 1`` along an axis, wherever the array is; they are
    there."""
    if isinstance(array, DeviceArray):
        return array.cut(axis, start, length)
    return array[(..., slice(start, start + length), *(slice(None),) * (-1 - axis))]


def place(array: Any) -> str:
    """Where an array is: ``"cuda:0"``, or ``"the host"``."""
    return array.device if isinstance(array, DeviceArray) else "the host"


def _where(value: Any) -> tuple[Any, int | None] | None:
    """The CUDA array interface of a value, and its GPU by DLPack; None where it has neither."""
    interface = getattr(value, "__cuda_array_interface__", None)
    ask = getattr(value, "__dlpack_device__", None)
    kind, number = (None, 0) if ask is None else ask()
    device = int(number) if kind in _CUDA_KINDS else None
    return None if interface is None and device is None else (interface, device)


def _from_torch(value: Any) -> DeviceArray | None:
    """A tensor on a GPU of a usual dtype. Its interfaces say the same in several times as long, and are
    for all else."""
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor or not value.is_cuda:
        return None
    if value.layout is not torch.strided or (stored := _dtype_of_torch(value.dtype)) is None:
        return None
    strides = tuple([step * stored.itemsize for step in value.stride()])
    return DeviceArray(
        Memory(value.device.index, value.data_ptr(), value), tuple(value.shape), strides, stored
    )


@cache
def _dtype_of_torch(kind: Any) -> np.dtype | None:
    """The dtype of a tensor's as NumPy has it; None where it has none, or backends do not read it."""
    name = str(kind).removeprefix("torch.")
    if name == "bfloat16":
        return _bfloat16()
    return np.dtype(name) if name in ("float16", "float32", "float64") else None


def _from_interface(value: Any, interface: Any, device: int | None) -> DeviceArray:
    if not isinstance(interface, dict):
        raise TypeError(f"its __cuda_array_interface__ must be a dict, got {interface!r}")
    if interface.get("mask") is not None:
        raise TypeError("it has a mask, which would be lost")
    shape = tuple(map(int, interface["shape"]))
    stored = np.dtype(interface["typestr"])
    if stored.itemsize == 2 and stored.kind in "Vu" and str(value.dtype).rpartition(".")[2] == "bfloat16":
        stored = _bfloat16()
    strides = interface.get("strides")
    strides = c_strides(shape, stored.itemsize) if strides is None else tuple(map(int, strides))
    address, readonly = interface["data"]
    if device is None:
        device = _device_of(address)
    memory = Memory(device, int(address or 0), value)
    memory.stream, memory.readonly = interface.get("stream"), bool(readonly)
    return DeviceArray(memory, shape, strides, stored)


def _from_dlpack(value: Any) -> DeviceArray:
    try:
        from cuda.core.utils import StridedMemoryView
    except ImportError as error:
        raise TypeError(f"it needs cuda.core ({error}): pip install 'fastattn[cuda]'") from None
    view = StridedMemoryView.from_dlpack(value, stream_ptr=-1)
    if view.dtype is None:
        raise TypeError("its elements are of no dtype that NumPy knows")
    shape, stored, steps = tuple(view.shape), view.dtype, view.strides
    strides = c_strides(shape, stored.itemsize)
    if steps is not None:
        strides = tuple(step * stored.itemsize for step in steps)
    memory = Memory(view.device_id, view.ptr, value)
    memory.readonly = view.readonly
    return DeviceArray(memory, shape, strides, stored)


def _device_of(address: int) -> int:
    """The GPU that an address belongs to, according to the CUDA driver; 0 where that cannot tell."""
    try:
        from cuda.bindings import driver

        ordinal = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        error, device = driver.cuPointerGetAttribute(ordinal, address)
    except (ImportError, RuntimeError):
        return 0
    return int(device) if int(error) == 0 else 0


def c_strides(shape: tuple[int, ...], itemsize: int = 1) -> tuple[int, ...]:
    """Of a C-contiguous array, in units of which an element has `itemsize`."""
    return tuple(accumulate((itemsize, *shape[:0:-1]), mul))[::-1] if shape else ()
