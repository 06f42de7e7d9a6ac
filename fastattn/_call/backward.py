"""The edge for gradients: their arguments to a `Backward`. `import fastattn` does not import this."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._call.arguments import as_array, as_shape, bias_parts, check_wrt, is_swapped, named
from fastattn._call.gradients import DIFFERENTIABLE, Backward
from fastattn._call.normalize import (
    Inputs,
    as_inputs,
    as_problem,
    as_result,
    band_of,
    bias_of_scores,
    both,
    lowered_for,
    mask_given,
    naming_shapes,
    numbers_of,
    result_shapes,
)
from fastattn._call.varlen import packed
from fastattn._machine.device import as_device_array, place
from fastattn.biases import Bias, Sums

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fastattn import masks
    from fastattn._call.problem import Mod
    from fastattn.masks.map import Band


@naming_shapes
def normalize_backward(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    options: dict[str, Any],
    *,
    grad_out: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    cu_seqlens: tuple[ArrayLike, ArrayLike | None] | None = None,
    function_mask: masks.Mask | None = None,
    score_mod: Mod | None = None,
) -> Backward:
    """The arguments of `attention_backward` as a `Backward`, with `cu_seqlens` those of
    `varlen_attention_backward`; see there for what they mean and what is raised.

    With `function_mask`, as of `as_request`, and `score_mod` those of `flex_attention_backward`.
    """
    arrays = [as_array(x, name) for x, name in named(query, key, value)]
    others = {"grad_out": grad_out, "out": out, "lse": lse}
    others |= {name: options[name] for name in ("grad_lse", "sinks")}
    parts = bias_parts(options["bias"])
    others |= {name: part for name, part in parts if not isinstance(part, Bias)}
    for x, name in (*named(*arrays), *((x, name) for name, x in others.items())):
        _check_on_host(x, name)
    band: Band | None = None
    if cu_seqlens is None:
        inputs = as_inputs(*arrays, swapped=is_swapped(options["layout"]))
        band = band_of(inputs, options)
        lowered = lowered_for(both(function_mask, mask_given(inputs, options)), inputs, band)
    else:
        q, k, v = arrays
        inputs, lowered = packed(q, k, v, options, *cu_seqlens)
    _check_on_host(lowered.dense, "mask")
    grad_lse = options["grad_lse"]
    bias = bias_of_scores(options["bias"], inputs)
    numbers = numbers_of(inputs, options)
    _, rows = result_shapes(inputs)

    def sums(given: ArrayLike, name: str) -> np.ndarray:
        array = np.ascontiguousarray(as_shape(given, name, rows), inputs.dtype)
        return array[None] if inputs.flat else array

    results = as_result(out, "out", inputs), None, None
    problem = as_problem(inputs, results, band, lowered, bias, numbers | {"score_mod": score_mod})
    of_aux = ("aux",) if "aux" in options else ()
    names = check_wrt(options["wrt"], DIFFERENTIABLE + of_aux)
    is_given = {"bias": bool(parts), "sinks": problem.sinks is not None, "aux": bool(options.get("aux"))}
    for name in names:
        if not is_given.get(name, True):
            raise ValueError(f"wrt names {name}, which is not given")
    return Backward(
        problem=problem,
        lse=sums(lse, "lse"),
        grad_out=as_result(grad_out, "grad_out", inputs),
        grad_lse=None if grad_lse is None else sums(grad_lse, "grad_lse"),
        wrt=frozenset(names),
        bias=tuple(_sums_of_gradient(part, inputs) for _, part in parts),
        query_factors=numbers["scale"] if isinstance(numbers["scale"], np.ndarray) else None,
    )


def _check_on_host(value: Any, name: str) -> None:
    """TypeError where it is an array on a GPU."""
    if (array := as_device_array(value, name)) is not None:
        raise TypeError(f"{name} is on {place(array)}, and gradients are computed on the host: copy it there")


def _sums_of_gradient(part: ArrayLike | Bias, inputs: Inputs) -> Sums:
    """What the gradient of a part of the bias is made of."""
    if isinstance(part, Bias):
        return part._sums(inputs.sizes)
    shape = np.shape(as_array(part, "bias"))
    return Sums((1,) * (inputs.query.ndim - len(shape)) + shape)
