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

SIZES, CUT = (types.UniTuple(types.int64, n) for n in (7, 4))

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


def view(axes: int, is_present: bool = True) -> Any:
    """The type of an array's view."""
    return types.UniTuple(types.int64, 1 + axes) if is_present else types.Tuple(())


def attend_ptx(form: Form) -> str:
    """`attend_kernel` of a specialisation, with the functions of `FUNCTIONS`."""
    slopes = np.ones(4, form.dtype)
    functions = {
        kind: device_function(kind, Mod(function, (slopes,)), slopes.dtype)
        for kind, function in FUNCTIONS.items()
        if getattr(form, f"has_{kind}")
    }
    real = getattr(types, form.dtype)
    aux = types.Tuple((types.Array(real, 1, "A"),) if functions else ())
    inputs = (view(4), view(4), view(4), view(4, form.has_bias), view(1, form.has_sinks))
    intervals = types.Tuple((view(2), view(2)) if form.has_intervals else ())
    masks = (
        view(2, form.has_band), view(1, form.has_lengths), intervals, view(4, form.has_dense),
        view(4, form.has_mask_map), view(0, form.has_mask_map),
    )  # fmt: skip
    is_out, has_state = form.result == "out", form.keeps_sums or form.result != "out"
    out = view(4 if form.result != "parts" else 0)
    results = (out, view(3, is_out), view(0, has_state), view(0, has_state))
    tuples = (types.Tuple(each) for each in (inputs, masks, results))
    arguments = (*tuples, SIZES, CUT, aux, real, real)
    return to_ptx(attend_kernel(form, **functions), arguments)
