"""The caller's functions as device functions, which kernels call for each score."""

from __future__ import annotations

from functools import partial
from itertools import product
from types import CellType, FunctionType
from typing import Any

import numpy as np
from numba import cuda
from numba.core.dispatcher import Dispatcher

from fastattn._call.problem import Mod
from fastattn.backends.jit import messages
from fastattn.backends.jit.functions import MAX_LOOPS, Kept, check_compiles, wrapper
from fastattn.backends.jit.identity import as_function, identify
from fastattn.backends.jit.memory import kind_of

_compiled = Kept(MAX_LOOPS)


def device_function(kind: str, mod: Mod, dtype: np.dtype) -> Any:
    """A score_mod or mask_mod for kernels to call; one for all functions that do the same.

    Floats in the code of a score_mod of float32 are float32. Beside integers Numba computes in float64, as
    NumPy does with arrays. Captured values are compiled in.

    Raises
    ------
    TypeError, ValueError
        The function cannot be compiled, or raises.
    """
    kinds = tuple(map(kind_of, mod.aux))
    of = dtype if kind == "score_mod" else np.dtype(np.int64)
    found = identify(mod.function)

    def compiled() -> Any:
        check_compiles(kind, mod.function, kinds, of)
        function = mod.function
        if isinstance(function, partial):
            function = wrapper(kind, function, len(mod.aux))
        return _on_device(function, of)

    return _compiled.get((kind, found.key, tuple(map(_token, found.captured)), kinds, of.char), compiled)


def _token(captured: Any) -> Any:
    """Equal for equal values: they are compiled in."""
    return captured.hex() if type(captured) is float else (captured.shape, captured.dtype, captured.tobytes())


def check_indices(kind: str, mod: Mod, dtype: np.dtype, sizes: tuple[int, ...]) -> None:
    """IndexError where the function reads outside of `aux` for the first or the last of each index.

    Nothing else is checked, as a kernel cannot raise. The function reads arrays of zeros.
    """
    if not mod.aux or 0 in sizes:
        return
    function = mod.function.py_func if isinstance(mod.function, Dispatcher) else mod.function
    score = (dtype.type(0),) if kind == "score_mod" else ()
    aux = [np.broadcast_to(np.zeros((), x.dtype), x.shape) if x.ndim else x for x in mod.aux]
    for indices in product(*[sorted({0, n - 1}) for n in sizes]):
        try:
            with np.errstate(all="ignore"):
                function(*score, *indices, *aux)
        except IndexError as error:
            raise messages.outside(kind, mod.function, aux, dtype, sizes, 0) from error


def _on_device(function: Any, dtype: np.dtype) -> Any:
    plain = function.py_func if isinstance(function, Dispatcher) else function
    code = plain.__code__

    def found(value: Any) -> Any:
        """Functions that it calls become device functions, too."""
        is_called = as_function(value) is not None and value is not function
        return _on_device(value, dtype) if is_called else value

    names = {name: found(plain.__globals__[name]) for name in code.co_names if name in plain.__globals__}
    cells = tuple(CellType(found(cell.cell_contents)) for cell in plain.__closure__ or ())
    if dtype == np.float32:
        constants = (np.float32(value) if type(value) is float else value for value in code.co_consts)
        code = code.replace(co_consts=tuple(constants))
    copied = FunctionType(code, plain.__globals__ | names, plain.__name__, plain.__defaults__, cells)
    return cuda.jit(device=True)(copied)
