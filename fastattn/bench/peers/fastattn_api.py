"""fastattn through its public function, on the backend that FASTATTN_BACKEND names in the worker.

A step writes the new keys and values into the arrays as NumPy does, and calls `attention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import fastattn
from fastattn._machine import host
from fastattn.bench.case import NEIGHBORHOOD, TOPK, Case, Inputs, Stored, document_ids, numpy_dtype
from fastattn.bench.peers._base import Call, Peer, Unable, joined, take_new, with_scores_of

#: The objects of `case.BIAS_OBJECTS`, of a case and the array that each is made of.
BIASES: dict[Any, Callable[[Case, np.ndarray], fastattn.biases.Bias]] = {
    "relative": lambda case, table: fastattn.biases.Relative(table, case.len_q - 1),
    "grid": lambda case, table: fastattn.biases.Grid(*np.split(table, 2, axis=-1)),
}


def _function(options: dict[str, Any]) -> dict[str, Any]:
    """The soft-cap or the bias among the options, which it is taken from, as a function of a score."""
    cap, bias = options.pop("softcap", None), options.pop("bias", None)
    if bias is not None:
        return {"score_mod": lambda score, b, h, i, j, table: score + table[h, i, j], "aux": (bias,)}
    return {"score_mod": lambda score, b, h, i, j, cap: cap * math.tanh(score / cap), "aux": (cap,)}


def load(num_threads: int) -> Fastattn:
    fastattn.set_num_threads(num_threads)
    # A backend that is not usable here says so before anything is timed.
    one = np.zeros((1, 1))
    fastattn.attention(one, one, one)
    return Fastattn()


class Fastattn(Peer):
    """Plain NumPy arrays in; the output new each time, or given as ``out=``."""

    version = fastattn.__version__

    def __init__(self) -> None:
        self.ways = {"attention": self._attention, "attention, out=": self._attention_out}
        self.backward_ways = {"attention_backward": self._backward}
        self.recurrent_ways = {
            "gated_linear_attention": self._recurrence,
            "gated_linear_attention, out=": self._recurrence_out,
        }
        self.reduction_ways = {"reduction": self._reduction}

    def _attention(self, case: Case, inputs: Inputs) -> Call:
        return self._call(case, inputs, self._options(case, inputs))

    def _attention_out(self, case: Case, inputs: Inputs) -> Call:
        options = self._options(case, inputs)
        options["out"] = np.empty((*inputs.query.shape[:-1], case.value_dim), numpy_dtype(case.dtype))
        return self._call(case, inputs, options)

    def _backward(self, case: Case, inputs: Inputs) -> Call:
        options = self._options(case, inputs)
        grad_out: Any = inputs.grad_out
        given: tuple[Any, Any, Any] = inputs.query, inputs.key, inputs.value
        forward: Any = fastattn.attention
        backward: Any = fastattn.attention_backward
        wrt = ["query", "key", "value", *([] if inputs.bias is None else ["aux" if case.flex else "bias"])]
        if case.flex:
            forward, backward = fastattn.flex_attention, fastattn.flex_attention_backward
            options |= _function(options)
        out, lse = forward(*given, return_lse=True, **options)

        def run() -> Any:
            return backward(grad_out, *given, out, lse, wrt=wrt, **options)

        def result() -> np.ndarray:
            found = [gradient for gradient in run() if gradient is not None]
            if case.flex and inputs.bias is not None:
                found[-1] = found[-1][0]
            if case.layout == "bshd":
                found[:3] = [gradient.transpose(0, 2, 1, 3) for gradient in found[:3]]
            return joined(found)

        return Call(run, result)

    def _recurrence_out(self, case: Case, inputs: Inputs) -> Call:
        shape = *inputs.query.shape[:-1], case.value_dim
        return self._recurrence(case, inputs, np.empty(shape, numpy_dtype(case.dtype)))

    def _recurrence(self, case: Case, inputs: Inputs, out: np.ndarray | None = None) -> Call:
        given: tuple[Any, Any, Any] = inputs.query, inputs.key, inputs.value
        options: dict[str, Any] = {"decay": inputs.decay, "beta": inputs.beta, "state": inputs.state}
        options |= {"return_state": True, "layout": case.layout, "out": out}
        options["backend"] = host.default_backend()  # which `attention` alone asks for

        def run() -> tuple[np.ndarray, np.ndarray]:
            return fastattn.gated_linear_attention(*given, **options)

        def result() -> np.ndarray:
            out, state = run()
            return joined([out.transpose(0, 2, 1, 3) if case.layout == "bshd" else out, state])

        return Call(run, result)

    def _reduction(self, case: Case, inputs: Inputs) -> Call:
        query, key, options = inputs.query, _rows(inputs.key), self._options(case, inputs)
        options["backend"] = host.default_backend()
        if case.reduction == "topk":
            find = partial(fastattn.reduce_scores, query, key, reduction="topk", k=TOPK, **options)
            return Call(find, lambda: with_scores_of(case, inputs, *find()))
        if case.reduction == "key_weights":
            run = partial(fastattn.key_weights, query, key, **options)
            return Call(run, run)
        documents = key[:, 0] if case.storage is None else fastattn.Quantized(key.data[:, 0], key.scale[:, 0])
        run = partial(fastattn.max_similarity, query[0], documents, backend=options["backend"])
        return Call(run, lambda: run().T)

    @staticmethod
    def _options(case: Case, inputs: Inputs) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if case.causal:
            options["causal"] = (case.len_q == case.len_k and case.lengths is None) or "bottom_right"
        if case.layout != "bhsd":
            options["layout"] = case.layout
        if inputs.bias is not None:
            options["bias"] = inputs.bias if inputs.table is None else BIASES[case.bias](case, inputs.table)
        if case.mask == "neighborhood":
            side = round(case.len_q**0.5)
            options["mask"] = fastattn.masks.Neighborhood((side, side), NEIGHBORHOOD)
        elif inputs.mask is not None:
            options["mask"] = inputs.mask
        if case.window is not None:
            options["window"] = case.window
        if case.lengths is not None:
            options["key_lengths"] = case.lengths
        if case.softcap is not None:
            options["softcap"] = case.softcap
        if case.document_length is not None:
            documents: fastattn.masks.Mask = fastattn.masks.Segments(document_ids(case))
            if inputs.mask is not None:
                documents &= fastattn.masks.Dense(inputs.mask)
            options["mask"] = documents
        return options

    @staticmethod
    def _call(case: Case, inputs: Inputs, options: dict[str, Any]) -> Call:
        attention = fastattn.attention
        query, key, value = inputs.query, _rows(inputs.key), _rows(inputs.value)

        def run() -> np.ndarray:
            return attention(query, key, value, **options)

        timed = _stepping(case, (key, value), run) if case.step else run

        def result() -> np.ndarray:
            out = timed()
            if case.layout == "bshd":
                return out.transpose(0, 2, 1, 3)
            return out.reshape(case.batch, case.heads, case.len_q, case.value_dim)

        return Call(timed, result)


def _rows(given: np.ndarray | Stored) -> Any:
    """Keys or values as `attention` takes them: an array, `Quantized` or `Paged`; no copy."""
    if not isinstance(given, Stored):
        return given
    rows = given.data if given.scale is None else fastattn.Quantized(given.data, given.scale)
    return rows if given.table is None else fastattn.Paged(rows, given.table)


def _stepping(
    case: Case, rows: tuple[Any, Any], attend: Callable[[], np.ndarray]
) -> Callable[[], np.ndarray]:
    """`attend` after the new keys and values were appended."""
    appends = [_append(case, it) for it in rows]

    def run() -> np.ndarray:
        for append in appends:
            append()
        return attend()

    return run


def _append(case: Case, rows: Any) -> Callable[[], None]:
    """What writes the new rows of a step."""
    if isinstance(rows, fastattn.Paged):
        raise Unable("no step over pages")
    new_rows = slice(case.len_k - case.len_q, None)
    if isinstance(rows, np.ndarray):
        cache, new = rows, take_new(case, rows)

        def append() -> None:
            cache[..., new_rows, :] = new

        return append
    quantized = rows
    given = fastattn.Quantized(take_new(case, rows.data), take_new(case, rows.scale)).decode()

    def encode() -> None:
        encoded = fastattn.Quantized.encode(given)
        quantized.data[..., new_rows, :] = encoded.data
        quantized.scale[..., new_rows, :] = encoded.scale

    return encode
