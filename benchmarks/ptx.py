"""The CUDA kernels as PTX, without a GPU: what `benchmarks.sass` and tests/test_cuda_ptx.py share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numba.cuda.dispatcher
import numpy as np
from numba import cuda, types

from fastattn._call.problem import Mod
from fastattn.backends.cuda.form import Form
from fastattn.backends.cuda.functions import device_function
from fastattn.backends.cuda.kernel import attend_kernel

SIZES, CUT, VIEW = (types.UniTuple(types.int64, n) for n in (7, 5, 5))

#: An ALiBi and a causal mask.
FUNCTIONS = {
    "score_mod": lambda s, b, h, i, j, slopes: s - 0.5 * slopes[h] * abs(i - j),
    "mask_mod": lambda b, h, i, j, slopes: j <= i + b,
}


def set_device(device: tuple[int, int]) -> None:
    """Makes this process compile for a compute capability, whatever device is here. Device functions are kept
    for one: another needs another process."""
    numba.cuda.dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=device)


def flat(kind: Any) -> types.Array:
    return types.Array(kind, 1, "C")


def to_ptx(kernel: Any, arguments: tuple[Any, ...], **options: Any) -> str:
    device = numba.cuda.dispatcher.get_current_device().compute_capability
    return str(cuda.compile_ptx(kernel.py_func, arguments, cc=device, **options)[0])


def attend_ptx(form: Form, bias: str = "float32") -> str:
    """`attend_kernel` of a specialisation, with a bias of this dtype and the functions of `FUNCTIONS`."""
    real, int32s = flat(getattr(types, form.dtype)), flat(types.int32)
    slopes = np.ones(4, form.dtype)
    functions = {
        kind: device_function(kind, Mod(function, (slopes,)), slopes.dtype)
        for kind, function in FUNCTIONS.items()
        if getattr(form, f"has_{kind}")
    }
    masks = types.Tuple((int32s, int32s, flat(types.uint8), int32s, flat(types.uint32)))
    aux = types.Tuple((types.Array(real.dtype, 1, "A"),) if functions else ())
    arguments = (
        real, real, real, masks, flat(getattr(types, bias)), real, aux, *[real] * 4, SIZES, CUT,
        types.UniTuple(VIEW, 11), real.dtype, real.dtype,
    )  # fmt: skip
    return to_ptx(attend_kernel(form, **functions), arguments)
