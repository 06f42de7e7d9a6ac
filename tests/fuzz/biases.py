"""Bias objects: attention by the oracle, the bits that the array they stand for has, and gradients.

The object is under "object" in a record's bias, whose other entries are of the array that it is made of.
`tests.fuzz.build` has the definition of each kind as entries of that array.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import fastattn
from tests.fuzz.build import _NORMAL, Array, Case, bias_entries, numbers, stored_bias
from tests.fuzz.checks import NAMES, Engine, Failure, check_attention, results_of, same_bits, within
from tests.fuzz.records import Record
from tests.tolerances import assert_close, solve_gradients

#: Terms that are added up in the type of the computation at most: those of a diagonal of a tile.
TILE = 64


def check(record: Record, engine: Engine) -> None:
    check_attention(record, engine)
    case = Case(record)
    array = stored_bias(case)
    if len(case.bias_arrays) == 1:
        same_bits(case.bias.materialize(case.H, case.L, case.S), array, "materialize")

    def call(bias: Any) -> dict[str, Array]:
        options = case.options | {"bias": bias, "num_threads": record.get("num_threads")}
        results = engine.attention(*case.arrays.values(), **options, return_lse=True, return_weights=True)
        return results_of(results, list(NAMES))

    wanted = call(array[0] if case.is_flat else array)
    for name, x in call(case.bias).items():
        same_bits(x, wanted[name], f"of the array {name}")
    if engine.backend != "numba":
        _check_gradients(record, engine)


def _arrays(gradient: Any) -> tuple[Array, ...]:
    """That of an object of several arrays has one of each, and so has that of a sum."""
    if isinstance(gradient, tuple):
        return tuple(array for part in gradient for array in _arrays(part))
    return (gradient,)


def _check_gradients(record: Record, engine: Engine) -> None:
    """By the oracle's loops, of small problems; and their bits with an array, and in another call."""
    record = {name: x for name, x in record.items() if name not in ("nonfinite", "hidden", "styles", "leads")}
    for name, most in (("len_q", 40), ("len_k", 70), ("head_dim", 17), ("value_dim", 17)):
        record[name] = min(record[name], most)
    if record.get("causal") == "true" and record["len_q"] != record["len_k"]:
        record["causal"] = "top_left"
    if record["bias"].get("style") != "masks":
        record["bias"] = record["bias"] | {"style": "normal"}
    if "sinks" in record:
        record["sinks"] = {"dtype": "float32"}
    record["lead"] = [min(n, 2) for n in record.get("lead", ())]
    dtype = record.get("dtypes", ("float32",))[0]
    record["dtypes"] = [dtype if dtype in ("float32", "float64") else "float32"] * 3
    case = Case(record)
    arrays, options = list(case.arrays.values()), case.options
    out, lse = engine.attention(*arrays, **options, return_lse=True)
    grad_out, grad_lse = (
        numbers(_NORMAL, case.data, name, x.shape).astype(x.dtype)
        for name, x in (("grad_out", out), ("grad_lse", lse))
    )
    wrt = ("query", "key", "value", "bias", *(["sinks"] if case.sinks is not None else []))

    def call(**more: Any) -> fastattn.Gradients:
        return fastattn.attention_backward(
            grad_out,
            *arrays,
            out,
            lse,
            grad_lse=grad_lse,
            wrt=wrt,
            backend=engine.backend,
            **(options | more),
        )

    got = call(num_threads=record.get("num_threads"))
    again = call(num_threads=3)
    for name in wrt:
        for one, other in zip(*(_arrays(getattr(its, name)) for its in (got, again)), strict=True):
            same_bits(one, other, f"gradient threads {name}")
    full = np.broadcast_to(stored_bias(case), (*case.lead, case.H, case.L, case.S))
    stored = call(bias=full[0] if case.is_flat else full)
    for name in wrt:
        if name != "bias":
            same_bits(getattr(got, name), getattr(stored, name), f"gradient of the array {name}")
    of_arrays = _arrays(got.bias)
    for x, array in zip(of_arrays, case.bias_arrays, strict=True):
        if (x.shape, x.dtype) != (array.shape, array.dtype.newbyteorder("=")):
            raise Failure("dtype gradient", f"{x.shape} {x.dtype} of {array.shape} {array.dtype}")
    if record.get("spread", 1) > 4:  # what a weight is then depends on how scores are rounded
        return
    if case.L * case.S * case.H > 2000 and case.data % 16:  # the loops take longer than all else
        return
    theirs = {name: x for name, x in options.items() if name not in ("causal", "window", "key_lengths")}
    theirs |= {"mask": case.allowed, "bias": full.astype(case.dtypes[0])}
    exact, reach, plain = solve_gradients(grad_out, *arrays, grad_lse=grad_lse, **theirs)
    try:
        for name in wrt:
            if name != "bias":
                of = (getattr(its, name) for its in (exact, reach, plain))
                assert_close(f"gradient of {name}", getattr(got, name), *of)
    except AssertionError as error:
        raise Failure("wrong gradient", str(error)) from error

    entries = bias_entries(record["bias"]["object"], case.H, case.L, case.S)
    for x, at in zip(of_arrays, entries, strict=True):

        def sums(array: Array, at: tuple[Array, ...] = at, shape: tuple[int, ...] = x.shape) -> Array:
            """Of the gradient of each score, those of each entry."""
            found = np.zeros(shape, np.longdouble)
            for item in np.ndindex(case.lead):
                np.add.at(found, at, array[item])
            return found

        spread = min(case.L, case.S, TILE) / 8 * sums(np.abs(exact.bias))
        within(
            "gradient of the object", x, sums(exact.bias), (sums(reach.bias) + spread).astype(float), None,
            case.dtypes[0], lambda sums=sums: [sums(plain.bias)],
        )  # fmt: skip
