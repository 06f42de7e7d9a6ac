"""How each library computes a case on the GPU: its ways, made ready on arrays that are there already."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastattn.bench.case import Case, Inputs


@dataclass(frozen=True, slots=True)
class Way:
    """One way of one library; making its call raises what the library raises where it cannot."""

    library: str
    label: str
    make: Callable[[Case, Inputs], Callable[[], Any]]
    get: Callable[[Any], np.ndarray]
    within: Callable[[], AbstractContextManager[Any]] = nullcontext  #: what its calls are made in


def ways() -> Iterator[Way]:
    """Of the libraries that are installed."""
    for make in (_torch, _cupy, _numba):
        try:
            yield from make()
        except ModuleNotFoundError:
            continue


def _fastattn(put: Callable[[np.ndarray], Any], get: Callable[[Any], np.ndarray], label: str) -> Way:
    import fastattn

    def make(case: Case, inputs: Inputs) -> Callable[[], Any]:
        arrays = [put(x) for x in (inputs.query, np.asarray(inputs.key), np.asarray(inputs.value))]
        options: dict[str, Any] = {
            "causal": "bottom_right" if case.causal else False,
            "window": case.window,
            "bias": None if inputs.bias is None else put(inputs.bias),
            "mask": None if inputs.mask is None else put(inputs.mask),
            "softcap": case.softcap,
            "layout": case.layout,
        }
        return lambda: fastattn.attention(*arrays, **options)

    return Way("fastattn", label, make, get)


def _torch() -> Iterator[Way]:
    torch = importlib.import_module("torch")
    attention = importlib.import_module("torch.nn.attention")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False

    placed: dict[int, tuple[np.ndarray, Any]] = {}  # all ways read one copy

    def put(array: np.ndarray) -> Any:
        if id(array) not in placed:
            placed[id(array)] = array, torch.from_numpy(np.ascontiguousarray(array)).cuda()
        return placed[id(array)][1]

    def get(tensor: Any) -> np.ndarray:
        array: np.ndarray = tensor.cpu().numpy()
        return array

    def make(case: Case, inputs: Inputs) -> Callable[[], Any]:
        query, key, value = (put(x) for x in inputs.bhsd(case))
        # It takes its flag or a mask, not both; the flag counts from the top left.
        is_causal = case.causal and case.len_q == case.len_k and inputs.score_mask(case, causal=False) is None
        mask = None if is_causal else inputs.score_mask(case)
        options = {
            "attn_mask": None if mask is None else put(mask),
            "is_causal": is_causal,
            "enable_gqa": case.heads != case.kv_heads,
        }
        if case.softcap is not None:
            raise NotImplementedError("no soft-cap")
        return lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)

    yield _fastattn(put, get, "torch tensors")
    for backend in ("EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "FLASH_ATTENTION", "MATH"):
        chosen = getattr(attention.SDPBackend, backend, None)
        if chosen is not None:

            def within(chosen: Any = chosen) -> AbstractContextManager[Any]:
                context: AbstractContextManager[Any] = attention.sdpa_kernel(chosen)
                return context

            yield Way("torch", backend.lower().removesuffix("_attention"), make, get, within)


def _cupy() -> Iterator[Way]:
    cupy = importlib.import_module("cupy")

    def make(case: Case, inputs: Inputs) -> Callable[[], Any]:
        query, key, value = (cupy.asarray(x) for x in inputs.bhsd(case))
        group = case.heads // case.kv_heads
        mask = inputs.score_mask(case)
        if mask is not None and mask.dtype == bool:
            mask = np.where(mask, np.zeros((), case.dtype), np.array(-np.inf, case.dtype))
        added = None if mask is None else cupy.asarray(mask)
        scale = query.dtype.type(1 / math.sqrt(case.head_dim))

        def run() -> Any:
            keys, values = (x if group == 1 else cupy.repeat(x, group, 1) for x in (key, value))
            scores = cupy.matmul(query * scale, keys.swapaxes(-1, -2))
            if case.softcap is not None:
                scores = case.softcap * cupy.tanh(scores / case.softcap)
            if added is not None:
                scores += added
            scores -= scores.max(-1, keepdims=True)
            cupy.exp(scores, out=scores)
            scores /= scores.sum(-1, keepdims=True)
            return cupy.matmul(scores, values)

        return run

    yield _fastattn(cupy.asarray, cupy.asnumpy, "CuPy arrays")
    yield Way("cupy", "formula", make, cupy.asnumpy)


def _numba() -> Iterator[Way]:
    from numba import cuda

    def put(array: np.ndarray) -> Any:
        return cuda.to_device(np.ascontiguousarray(array))

    yield _fastattn(put, lambda array: array.copy_to_host(), "Numba arrays")
