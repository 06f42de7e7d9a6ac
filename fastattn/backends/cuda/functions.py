"""The caller's functions as device functions, which kernels call for each score."""

from __future__ import annotations

from types import CellType, FunctionType
from typing import Any

import numpy as np
from numba import cuda
from numba.core.dispatcher import Dispatcher

from fastattn._problem import Mod
from fastattn.backends.numba.modify import identity, kind_of, typed

_compiled: dict[Any, Any] = {}


def device_function(kind: str, mod: Mod, dtype: np.dtype) -> Any:
    """A score_mod or mask_mod for kernels to call, the same one for functions that do the same.

    In a score_mod of float32 numbers with a point that stand in the code are float32. Beside integers Numba
    computes in float64, as NumPy does with arrays of them.

    Raises
    ------
    TypeError, ValueError
        The function cannot be compiled, or raises.
    """
    kinds = tuple(map(kind_of, mod.aux))
    of = dtype if kind == "score_mod" else np.dtype(np.int64)
    key = (kind, identity(mod.function), kinds, of.char)
    found = _compiled.get(key)
    if found is None:
        typed(kind, mod.function, kinds, of)
        found = _compiled.setdefault(key, _on_device(mod.function, of))
    return found


def _on_device(function: Any, dtype: np.dtype) -> Any:
    plain = function.py_func if isinstance(function, Dispatcher) else function
    if not isinstance(plain, FunctionType):
        plain = plain.__call__
    code = plain.__code__

    def found(value: Any) -> Any:
        """What it calls must be on the device, too."""
        return _on_device(value, dtype) if isinstance(value, Dispatcher) and value is not function else value

    names = {name: found(plain.__globals__[name]) for name in code.co_names if name in plain.__globals__}
    cells = tuple(CellType(found(cell.cell_contents)) for cell in plain.__closure__ or ())
    if dtype == np.float32:
        constants = (np.float32(value) if type(value) is float else value for value in code.co_consts)
        code = code.replace(co_consts=tuple(constants))
    copied = FunctionType(code, plain.__globals__ | names, plain.__name__, plain.__defaults__, cells)
    return cuda.jit(device=True)(copied)
