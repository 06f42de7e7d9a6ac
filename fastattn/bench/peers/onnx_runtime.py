"""onnxruntime: models of one operator with inputs and output bound once to its own memory (IO binding).

Three operators can do attention on the CPU and none is always the fastest, so all that can express the
case are tried. ``Attention`` (ONNX opset 23) gets the case's own layout. ``MultiHeadAttention`` and
``GroupQueryAttention`` (com.microsoft) take ``(B, length, heads · dim)`` only: they get their inputs
stored that way beforehand, which is a favour to them in "bhsd" cases.

``GroupQueryAttention`` is the decoder's: it appends the last L keys and values itself, so that a step is what
it always does. Its cache may be int8, with one scale for all or one for each column of a head: those scales
are found beforehand, and it holds other numbers than the case then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from fastattn.bench.case import INT8_LARGEST, RULES, Case, Inputs, numpy_dtype
from fastattn.bench.peers._base import (
    Call,
    Held,
    Peer,
    Redundant,
    Unable,
    added_mask,
    check_plain,
    check_scores_fit,
    folded,
    joined,
)

#: The highest versions that onnxruntime 1.31 loads and that have the opset-23 ``Attention``.
IR_VERSION, OPSET = 11, 23


def load(num_threads: int) -> OnnxRuntime:
    return OnnxRuntime(num_threads)


def _merge_heads(array: np.ndarray) -> np.ndarray:
    """``(B, heads, length, dim)`` to ``(B, length, heads · dim)``."""
    batch, heads, length, dim = array.shape
    return array.transpose(0, 2, 1, 3).reshape(batch, length, heads * dim)


@dataclass(frozen=True, slots=True)
class Node:
    """One operator with its inputs in their order."""

    operator: str
    domain: str
    feeds: Mapping[str, np.ndarray | None]  #: None = an input left out
    attributes: Mapping[str, Any]
    merged: bool  #: whether the output is (B, L, H · E) rather than (B, H, L, E)
    outputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  #: beside the first one
    in_place: Mapping[str, str] = field(default_factory=dict)  #: outputs that share the memory of an input


class OnnxRuntime(Peer):
    """Sessions with one pool of `num_threads` threads, the calling one included."""

    version = ort.__version__

    def __init__(self, num_threads: int) -> None:
        self._options = ort.SessionOptions()
        self._options.intra_op_num_threads = num_threads
        self._options.inter_op_num_threads = 1
        self._options.log_severity_level = 4  # refused models are reported through the exception
        self.ways = {
            "Attention": self._attention,
            "MultiHeadAttention": self._multi_head,
            "GroupQueryAttention": self._group_query,
            "GroupQueryAttention, a scale per tensor": partial(self._group_query, scales="PER_TENSOR"),
            "GroupQueryAttention, a scale per channel": partial(self._group_query, scales="PER_CHANNEL"),
            "Attention, a group's heads as rows": folded(self._attention),
            "MultiHeadAttention, a group's heads as rows": folded(self._multi_head),
        }
        self.recurrent_ways = {"LinearAttention": self._linear}

    def _linear(self, case: Case, inputs: Inputs) -> Call:
        """Of com.microsoft; it takes ``(B, L, heads · dim)`` alone."""
        feeds = _query_key_value(case, inputs, merged=True) | {"past_state": inputs.state}
        for name, gate in zip(("decay", "beta"), inputs.gates(case), strict=True):
            feeds[name] = None if gate is None else _merge_heads(gate)
        decays, has_rates = RULES[case.rule or ""]
        rule = "_".join(["gated"] * (decays is not None) + ["delta"] * has_rates) or "linear"
        attributes = {"q_num_heads": case.heads, "kv_num_heads": case.kv_heads, "update_rule": rule}
        outputs = {"state": (case.batch, case.kv_heads, case.head_dim, case.value_dim)}
        return self._call(case, Node("LinearAttention", "com.microsoft", feeds, attributes, True, outputs))

    def _attention(self, case: Case, inputs: Inputs) -> Call:
        check_plain(case)
        check_scores_fit(case)
        # As 3-D tensors the operator reads (B, length, heads · dim): that is "bshd".
        merged = case.layout == "bshd"
        feeds = _query_key_value(case, inputs, merged=merged)
        flag = _causal_flag(case, inputs)
        mask = inputs.score_mask(case, causal=False if flag else None)
        if mask is not None:
            feeds["mask"] = _full_rows(case, mask)
        attributes: dict[str, Any] = {"is_causal": int(flag)}
        if case.softcap is not None:
            attributes["softcap"] = case.softcap
        if merged:
            attributes |= {"q_num_heads": case.heads, "kv_num_heads": case.kv_heads}
        return self._call(case, Node("Attention", "", feeds, attributes, merged))

    def _multi_head(self, case: Case, inputs: Inputs) -> Call:
        check_plain(case)
        if case.kv_heads != case.heads:
            raise Unable("MultiHeadAttention has no grouped heads")
        if case.softcap is not None:
            raise Unable("MultiHeadAttention has no soft-cap")
        # Alone it works tile by tile; with any of these it stores the scores.
        flag = _causal_flag(case, inputs)
        lengths = _lengths_alone(case, inputs)
        plain = lengths is None and inputs.bias is None and not case.causal and case.window is None
        if not plain or inputs.mask is not None or case.document_length is not None:
            check_scores_fit(case)
        feeds = _query_key_value(case, inputs, merged=True) | {"": None, "padding": lengths, "bias": None}
        mask = None if lengths is not None else inputs.score_mask(case, causal=False if flag else None)
        if mask is not None:
            # It has no bool mask: made a float one beforehand, a favour.
            feeds["bias"] = _full_rows(case, added_mask(case, mask))
        attributes = {"num_heads": case.heads, "unidirectional": int(flag)}
        return self._call(case, Node("MultiHeadAttention", "com.microsoft", feeds, attributes, merged=True))

    def _group_query(self, case: Case, inputs: Inputs, scales: str | None = None) -> Call:
        """A step with a cache: the last L keys and values are new, those before are in the cache.

        Self-attention without a past has no cache; otherwise cache and updated cache share their memory, as
        in generation loops. `scales` are those of an int8 cache.
        """
        if (scales is None) == (case.storage == "int8"):
            raise Redundant
        if case.storage != "int8" or case.page_size is not None:
            check_plain(replace(case, step=False))
        window = case.window
        causal = case.causal or case.len_q == 1 or (window is not None and window[1] == 0)
        if inputs.mask is not None or inputs.bias is not None or case.document_length is not None:
            raise Unable("GroupQueryAttention is causal attention with lengths and a window, and no more")
        if not causal or case.len_q > case.len_k:
            raise Unable("GroupQueryAttention is causal self-attention only")
        if case.value_dim != case.head_dim:
            raise Unable("GroupQueryAttention has one head_dim for keys and values")
        if case.softcap is not None:  # else it works tile by tile
            check_scores_fit(case)
        lengths = case.lengths if case.lengths is not None else np.full(case.batch, case.len_k)
        feeds = _query_key_value(case, inputs, merged=True)
        cache = (case.batch, case.kv_heads, case.len_k, case.head_dim)
        in_place = {}
        if case.len_q == case.len_k and case.lengths is None:
            if scales is not None:
                raise Unable("GroupQueryAttention over int8 is for a cache that is there")
            empty = np.empty((case.batch, case.kv_heads, 0, case.head_dim), numpy_dtype(case.dtype))
            feeds |= {"past_key": empty, "past_value": empty}
        else:
            if case.strided:
                raise Unable("the cache of GroupQueryAttention has no gaps")
            _, key, value = inputs.bhsd(case)
            rows = lengths[:, None] - case.len_q + np.arange(case.len_q)
            items = np.arange(case.batch)[:, None]
            feeds |= {
                "key": _merge_heads(key.transpose(0, 2, 1, 3)[items, rows].transpose(0, 2, 1, 3)),
                "value": _merge_heads(value.transpose(0, 2, 1, 3)[items, rows].transpose(0, 2, 1, 3)),
                "past_key": key,
                "past_value": value,
            }
            in_place = {"present_key": "past_key", "present_value": "past_value"}
        feeds |= {"last": (lengths - 1).astype(np.int32), "total": np.array(case.len_k, np.int32)}
        attributes: dict[str, Any] = {"num_heads": case.heads, "kv_num_heads": case.kv_heads}
        held = None
        if scales is not None:
            attributes |= {"k_quant_type": scales, "v_quant_type": scales, "kv_cache_bit_width": 8}
            feeds |= dict.fromkeys(("cos", "sin", "positions", "bias", "sinks"))
            pasts = {name: feeds[f"past_{name}"] for name in ("key", "value")}
            stored = {name: _in_int8(past, scales) for name, past in pasts.items() if past is not None}
            feeds |= {f"past_{name}": data for name, (data, _) in stored.items()}
            feeds |= {f"{name}_scale": scale.reshape(-1) for name, (_, scale) in stored.items()}

            def held() -> tuple[np.ndarray, np.ndarray]:
                key, value = (data * scale for data, scale in stored.values())
                return key, value

        if window is not None:
            attributes["local_window_size"] = window[0] + 1
        if case.softcap is not None:
            attributes["softcap"] = case.softcap
        outputs = {"present_key": cache, "present_value": cache}  # it does not leave them out
        return self._call(
            case,
            Node("GroupQueryAttention", "com.microsoft", feeds, attributes, True, outputs, in_place),
            held,
        )

    def _call(self, case: Case, node: Node, held: Held | None = None) -> Call:
        """A session of `node`, bound to its feeds and ready to run."""
        if case.dtype == "bfloat16":
            raise Unable("no bfloat16 operators on the CPU")
        given = {name: np.ascontiguousarray(it) for name, it in node.feeds.items() if it is not None}
        session = ort.InferenceSession(
            _model(case, node, given), self._options, providers=["CPUExecutionProvider"]
        )
        bound = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in given.items()}
        for name, shape in _outputs(case, node).items():
            if name in node.in_place:
                bound[name] = bound[node.in_place[name]]
            else:
                element = numpy_dtype(case.dtype).type
                bound[name] = ort.OrtValue.ortvalue_from_shape_and_type(shape, element)

        binding = session.io_binding()
        for name in given:
            binding.bind_ortvalue_input(name, bound[name])
        for name in _outputs(case, node):
            binding.bind_ortvalue_output(name, bound[name])

        def result() -> np.ndarray:
            session.run_with_iobinding(binding)
            out = bound["out"].numpy()
            if node.merged:
                out = out.reshape(case.batch, case.len_q, case.heads, -1).transpose(0, 2, 1, 3)
            return out if case.rule is None else joined([out, bound["state"].numpy()])

        return Call(lambda: session.run_with_iobinding(binding), result, held)


def _query_key_value(case: Case, inputs: Inputs, *, merged: bool) -> dict[str, np.ndarray | None]:
    """The first three inputs; of strided cases the wider arrays, which the model takes a slice of."""
    arrays = [_merge_heads(array) if merged else array for array in inputs.wide(case)]
    return dict(zip(("query", "key", "value"), arrays, strict=True))


def _in_int8(array: np.ndarray, scales: str) -> tuple[np.ndarray, np.ndarray]:
    """`array` in int8, and what to multiply it with: one scale, or one for each head and element of a row."""
    axes = (0, 2) if scales == "PER_CHANNEL" else None
    scale = np.abs(array).max(axis=axes, keepdims=True) / np.float32(INT8_LARGEST)
    return np.rint(array / scale).astype(np.int8), scale


def _causal_flag(case: Case, inputs: Inputs) -> bool:
    """Whether the operators' causal flag, which starts at the top left, says it all."""
    return case.causal and case.len_q == case.len_k and inputs.score_mask(case, causal=False) is None


def _lengths_alone(case: Case, inputs: Inputs) -> np.ndarray | None:
    """Keys of each item where nothing but they restricts attention; None elsewhere."""
    if case.causal or case.window is not None or case.document_length is not None or inputs.bias is not None:
        return None
    if case.mask == "padding" and case.lengths is None and inputs.mask is not None:
        return inputs.mask.sum(axis=(1, 2, 3), dtype=np.int32)
    return case.lengths.astype(np.int32) if case.lengths is not None and inputs.mask is None else None


def _full_rows(case: Case, mask: np.ndarray) -> np.ndarray:
    """The operators broadcast the first two axes of a mask but not the last two."""
    return np.broadcast_to(mask, (*mask.shape[:2], case.len_q, case.len_k))


def _outputs(case: Case, node: Node) -> dict[str, tuple[int, ...]]:
    if node.merged:
        return {"out": (case.batch, case.len_q, case.heads * case.value_dim), **node.outputs}
    return {"out": (case.batch, case.heads, case.len_q, case.value_dim), **node.outputs}


def _model(case: Case, node: Node, given: Mapping[str, np.ndarray]) -> bytes:
    """`node`, after slices of query, key and value where the case is strided."""
    names = [name if name in given else "" for name in node.feeds]
    while not names[-1]:
        names.pop()
    nodes, constants = [], []
    if case.strided:
        for name, number in (("first", 0), ("end", np.iinfo(np.int64).max), ("axis", -1), ("step", 2)):
            constants.append(numpy_helper.from_array(np.array([number], np.int64), name))
        for index in range(3):
            inner = f"{names[index]} sliced"
            nodes.append(helper.make_node("Slice", [names[index], "first", "end", "axis", "step"], [inner]))
            names[index] = inner
    outputs = _outputs(case, node)
    nodes.append(helper.make_node(node.operator, names, list(outputs), domain=node.domain, **node.attributes))
    elements = {name: given[node.in_place.get(name, "query")].dtype for name in outputs}
    graph = helper.make_graph(
        nodes,
        node.operator,
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in given.items()
        ],
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(elements[name]), shape)
            for name, shape in outputs.items()
        ],
        constants,
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    return onnx.ModelProto.SerializeToString(model)
