"""OpenVINO's PagedAttention: the operator that its language models decode with.

It appends the last L keys and values to a cache of its own, in pages of 32 rows, and then attends, so that
pages and a step are what it always does. Queries and results are float32. Its Python class is called
experimental and has to be given all 28 inputs; those that switch on what no case has are constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13
from openvino.op import _PagedAttentionExtension

from fastattn.bench.case import Case, Inputs, numpy_dtype
from fastattn.bench.peers._base import Call, Unable

#: Rows of a page, on the CPU.
PAGE_SIZE = 32

#: Its inputs after the caches, with their ranks. Off is a scalar 0 or an empty array.
_INPUTS: dict[str, tuple[type, int]] = {
    "past_lens": (np.int32, 1),
    "subsequence_begins": (np.int32, 1),
    "block_indices": (np.int32, 1),
    "block_indices_begins": (np.int32, 1),
    "scale": (np.float32, 0),
    "sliding_window": (np.int32, 0),
    "alibi_slopes": (np.float32, 1),
    "max_context_len": (np.int32, 0),
    "score_aggregation_window": (np.int32, 1),
    "rotated_block_indices": (np.int32, 1),
    "rotation_deltas": (np.int32, 2),
    "rotation_trig_lut": (np.float32, 2),
    "xattention_threshold": (np.float32, 1),
    "xattention_block_size": (np.int32, 0),
    "xattention_stride": (np.int32, 0),
    "sinks": (np.float32, 4),
    "adaptive_rkv_start_size": (np.int32, 0),
    "adaptive_rkv_evictable_sizes": (np.int32, 1),
    "adaptive_rkv_diversity_block_set_indices": (np.int32, 1),
    "adaptive_rkv_diversity_block_set_indices_begins": (np.int32, 1),
    "token_type_ids": (np.int32, 1),
    "qq_bias": (np.uint8, 1),
    "qq_bias_begins": (np.int32, 1),
}

#: What the plugin calls the storage of a cache.
_PRECISIONS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "u8"}


def paged_attention(core: Any, config: Mapping[str, Any], case: Case, inputs: Inputs) -> Call:
    """The operator over a cache that is filled beforehand, in a model of nothing else."""
    window = case.window
    causal = case.causal or case.len_q == 1 or (window is not None and window[1] == 0)
    arrays = inputs.mask is not None or inputs.bias is not None or case.document_length is not None
    if arrays or not causal or case.softcap is not None or case.strided or case.dtype == "float64":
        raise Unable("PagedAttention is causal attention with lengths and a window, and no more")
    lengths = np.full(case.batch, case.len_k) if case.lengths is None else case.lengths
    if case.len_q >= lengths.min():
        raise Unable("PagedAttention is for keys and values that are in its cache")

    query, key, value = (array.astype(np.float32) for array in inputs.bhsd(case))
    table = _table(case)
    used = -(-lengths // PAGE_SIZE)
    given = {
        "query": _tokens(query, np.full(case.batch, case.len_q), case.len_q),
        "key": _tokens(key, lengths, case.len_q),
        "value": _tokens(value, lengths, case.len_q),
        "past_lens": lengths - case.len_q,
        "subsequence_begins": np.arange(case.batch + 1) * case.len_q,
        "block_indices": np.concatenate([pages[:n] for pages, n in zip(table, used, strict=True)]),
        "block_indices_begins": np.concatenate([[0], np.cumsum(used)]),
        "scale": np.array(case.head_dim**-0.5),
        "sliding_window": np.array(0 if window is None else window[0] + 1),
        "max_context_len": np.array(lengths.max()),
    }
    storage = case.storage or case.dtype
    options = {**config, "KV_CACHE_PRECISION": _PRECISIONS[storage]}
    if storage == "bfloat16":
        if "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise Unable("PagedAttention has a bfloat16 cache only where the CPU has bfloat16 products")
        options["INFERENCE_PRECISION_HINT"] = "bf16"
    compiled = core.compile_model(_model(case, given), "CPU", options)
    request = compiled.create_infer_request()
    for port in compiled.inputs:
        if port.any_name in given:
            request.set_tensor(port, ov.Tensor(given[port.any_name].astype(port.element_type.to_dtype())))
    caches = {}
    for name, rows in (("key_cache", key), ("value_cache", value)):
        port = compiled.input(name)
        shape = [size.get_length() if size.is_static else table.size for size in port.partial_shape]
        caches[name] = ov.Tensor(port.element_type, ov.Shape(shape))
        request.set_tensor(port, caches[name])
        _fill(caches[name], name, storage, _paged(rows, table))

    def result() -> np.ndarray:
        request.infer()
        out = request.get_output_tensor(0).data
        return out.reshape(case.batch, case.len_q, case.heads, case.value_dim).transpose(0, 2, 1, 3).copy()

    def held() -> tuple[np.ndarray, np.ndarray]:
        key, value = (_unpaged(case, _decoded(it, name), table) for name, it in caches.items())
        return key, value

    return Call(request.infer, result, held if storage == "int8" else None)


def _table(case: Case) -> np.ndarray:
    """The pages of each item; in no order where the case's own are in none."""
    count = -(-case.len_k // PAGE_SIZE)
    order = np.arange(case.batch * count)
    if case.page_size is not None:
        order = np.random.default_rng(0).permutation(order)
    return order.reshape(case.batch, count)


def _tokens(array: np.ndarray, lengths: np.ndarray, count: int) -> np.ndarray:
    """The last `count` rows before each item's length, ``(B · count, heads · dim)``."""
    rows = [item[:, length - count : length] for item, length in zip(array, lengths, strict=True)]
    return np.stack(rows).transpose(0, 2, 1, 3).reshape(len(array) * count, -1)


def _paged(rows: np.ndarray, table: np.ndarray) -> np.ndarray:
    """``(B, K, S, dim)`` as pages ``(P, K, 32, dim)``; the last one of an item ends with zeros."""
    batch, heads, length, dim = rows.shape
    padded = np.zeros((batch, heads, table.shape[1] * PAGE_SIZE, dim), rows.dtype)
    padded[:, :, :length] = rows
    pages = np.empty((table.size, heads, PAGE_SIZE, dim), rows.dtype)
    pages[table] = padded.reshape(batch, heads, -1, PAGE_SIZE, dim).swapaxes(1, 2)
    return pages


def _unpaged(case: Case, pages: np.ndarray, table: np.ndarray) -> np.ndarray:
    """What `_paged` was given."""
    rows = pages[table].swapaxes(1, 2).reshape(case.batch, case.kv_heads, -1, pages.shape[-1])
    return rows[:, :, : case.len_k]


def _model(case: Case, given: Mapping[str, np.ndarray]) -> Any:
    """A model of the operator; what `given` has is an input, but for the scale and the window."""
    parameters, nodes = [], []

    def parameter(name: str, shape: list[int], element: Any) -> None:
        node = opset13.parameter(ov.PartialShape(shape), element)
        node.output(0).tensor.set_names({name})
        parameters.append(node)
        nodes.append(node)

    for name in ("query", "key", "value"):
        parameter(name, [-1, given[name].shape[1]], np.float32)
    for name in ("key_cache", "value_cache"):
        parameter(name, [-1, -1, -1, -1], ov.Type.dynamic)  # as the plugin wants them
    for name, (element, rank) in _INPUTS.items():
        if name in given and name not in ("scale", "sliding_window"):
            parameter(name, [-1] * rank, element)
        else:
            nodes.append(opset13.constant(np.asarray(given.get(name, np.zeros((0,) * rank)), element)))
    operator = _PagedAttentionExtension([node.output(0) for node in nodes])
    sizes = {"num_k_heads": case.kv_heads, "num_v_heads": case.kv_heads}
    sizes |= {"k_head_size": case.head_dim, "v_head_size": case.value_dim}
    for name, size in sizes.items():
        operator.get_rt_info()[name] = size
    return ov.Model([opset13.result(operator.output(0))], parameters)


def _fill(cache: Any, name: str, storage: str, pages: np.ndarray) -> None:
    """Write `pages` into `cache`.

    In int8 a number is ``(byte - zero) * scale``. Keys have one scale for each column of a page, all of these
    and all zeros before its rows; values have one for each row, the two before its elements.
    """
    if storage != "int8":
        array = pages.astype(numpy_dtype(storage))
        cache.data.view(np.uint8)[...] = array.view(np.uint8)
        return
    least, most = (find(pages, axis=_axis(name), keepdims=True) for find in (np.min, np.max))
    scale = np.maximum(most - least, np.finfo(np.float32).tiny) / np.float32(255)
    zero = -least / scale
    encoded = np.clip(np.rint(pages / scale + zero), 0, 255).astype(np.uint8)
    numbers = np.concatenate([scale, zero], axis=_axis(name))
    packed = np.ascontiguousarray(numbers).view(np.uint8).reshape(*pages.shape[:2], -1)
    if name == "key_cache":
        whole = np.concatenate([packed, encoded.reshape(*packed.shape[:2], -1)], axis=-1)
    else:
        packed = packed.reshape(*pages.shape[:3], -1)
        whole = np.concatenate([packed, encoded], axis=-1)
    cache.data[...] = whole.reshape(cache.data.shape)


def _decoded(cache: Any, name: str) -> np.ndarray:
    """The numbers that an int8 cache holds, in pages."""
    data = cache.data
    count, heads = data.shape[:2]
    if name == "key_cache":
        dim = data.shape[-1]
        numbers, encoded = data[:, :, :-PAGE_SIZE], data[:, :, -PAGE_SIZE:]
        shape: tuple[int, ...] = (count, heads, 2, dim)
    else:
        numbers, encoded = data[..., :8], data[..., 8:]
        shape = (count, heads, PAGE_SIZE, 2)
    scale, zero = np.split(np.ascontiguousarray(numbers).view(np.float32).reshape(shape), 2, _axis(name))
    return (encoded - zero) * scale


def _axis(name: str) -> int:
    """The axis of pages along which numbers in int8 share a scale."""
    return 2 if name == "key_cache" else 3
