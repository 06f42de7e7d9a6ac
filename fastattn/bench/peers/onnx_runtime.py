"""onnxruntime: one-node models with inputs and output bound once to its own memory (IO binding).

Three operators can do attention on the CPU and none is always the fastest, so all that can express the
case are tried. ``Attention`` (ONNX opset 23) gets the case's own layout. ``MultiHeadAttention`` and
``GroupQueryAttention`` (com.microsoft) take ``(B, length, heads · dim)`` only: they get their inputs
stored that way beforehand, which is a favour to them in "bhsd" cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from fastattn.bench.cases import Case, Inputs
from fastattn.bench.peers._base import Call, Unable

#: The highest versions that onnxruntime 1.31 loads and that have the opset-23 ``Attention``.
IR_VERSION, OPSET = 11, 23


def load(num_threads: int) -> OnnxRuntime:
    return OnnxRuntime(num_threads)


def _merge_heads(array: np.ndarray) -> np.ndarray:
    """``(B, heads, length, dim)`` to ``(B, length, heads · dim)``."""
    batch, heads, length, dim = array.shape
    return array.transpose(0, 2, 1, 3).reshape(batch, length, heads * dim)


def _to_rank_4(array: np.ndarray) -> np.ndarray:
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


class OnnxRuntime:
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
        }

    def _attention(self, case: Case, inputs: Inputs) -> Call:
        # As 3-D tensors the operator reads (B, length, heads · dim): that is "bshd".
        if case.layout == "bshd":
            query, key, value = (_merge_heads(array) for array in inputs.bhsd(case))
        else:
            query, key, value = inputs.bhsd(case)
        feeds = {"query": query, "key": key, "value": value}
        if inputs.allowed is not None:
            feeds["mask"] = self._full_mask(case, inputs.allowed)
        if inputs.bias is not None:
            feeds["mask"] = _to_rank_4(inputs.bias)
        attributes: dict[str, Any] = {"is_causal": int(case.causal)}
        if case.layout == "bshd":
            attributes |= {"q_num_heads": case.heads, "kv_num_heads": case.kv_heads}
        return self._call(case, "Attention", "", feeds, attributes, merged=case.layout == "bshd")

    def _multi_head(self, case: Case, inputs: Inputs) -> Call:
        if case.kv_heads != case.heads:
            raise Unable("MultiHeadAttention has no grouped heads")
        query, key, value = (_merge_heads(array) for array in inputs.bhsd(case))
        feeds: dict[str, np.ndarray | None] = {"query": query, "key": key, "value": value}
        feeds |= {"": None, "padding": None, "bias": None}
        if case.mask == "padding" and inputs.allowed is not None:
            feeds["padding"] = inputs.allowed.sum(axis=(1, 2, 3), dtype=np.int32)
        elif inputs.allowed is not None:  # no bool mask: made a float one beforehand, a favour
            zero, infinity = np.zeros((), case.dtype), np.array(-np.inf, case.dtype)
            feeds["bias"] = _to_rank_4(np.where(inputs.allowed, zero, infinity))
        if inputs.bias is not None:
            feeds["bias"] = _to_rank_4(inputs.bias)
        attributes = {"num_heads": case.heads, "unidirectional": int(case.causal)}
        return self._call(case, "MultiHeadAttention", "com.microsoft", feeds, attributes, merged=True)

    def _group_query(self, case: Case, inputs: Inputs) -> Call:
        window = case.window
        if case.len_q != case.len_k or not (case.causal or (window is not None and window[1] == 0)):
            raise Unable("GroupQueryAttention is causal self-attention only")
        query, key, value = (_merge_heads(array) for array in inputs.bhsd(case))
        feeds = {
            "query": query,
            "key": key,
            "value": value,
            "past_key": np.empty((case.batch, case.kv_heads, 0, case.head_dim), case.dtype),
            "past_value": np.empty((case.batch, case.kv_heads, 0, case.value_dim), case.dtype),
            "last": np.full(case.batch, case.len_k - 1, np.int32),
            "total": np.array(case.len_k, np.int32),
        }
        attributes = {"num_heads": case.heads, "kv_num_heads": case.kv_heads}
        if window is not None:
            attributes["local_window_size"] = window[0] + 1
        return self._call(case, "GroupQueryAttention", "com.microsoft", feeds, attributes, merged=True)

    @staticmethod
    def _full_mask(case: Case, allowed: np.ndarray) -> np.ndarray:
        """``Attention`` broadcasts the first two axes of a mask but not the last two."""
        allowed = _to_rank_4(allowed)
        return np.ascontiguousarray(
            np.broadcast_to(allowed, (*allowed.shape[:2], case.len_q, case.len_k)), bool
        )

    def _call(
        self,
        case: Case,
        operator: str,
        domain: str,
        feeds: Mapping[str, np.ndarray | None],
        attributes: dict[str, Any],
        *,
        merged: bool,
    ) -> Call:
        """A session of one `operator` over `feeds` (None = an input left out), bound and ready to run."""
        given = {name: np.ascontiguousarray(array) for name, array in feeds.items() if array is not None}
        names = [name if name in given else "" for name in feeds]
        while not names[-1]:
            names.pop()
        if merged:
            shape: tuple[int, ...] = (case.batch, case.len_q, case.heads * case.value_dim)
        else:
            shape = (case.batch, case.heads, case.len_q, case.value_dim)
        element = helper.np_dtype_to_tensor_dtype(np.dtype(case.dtype))
        outputs = {"out": shape}
        if operator == "GroupQueryAttention":  # its cache outputs are not optional
            outputs["present_key"] = (case.batch, case.kv_heads, case.len_k, case.head_dim)
            outputs["present_value"] = (case.batch, case.kv_heads, case.len_k, case.value_dim)
        graph = helper.make_graph(
            [helper.make_node(operator, names, list(outputs), domain=domain, **attributes)],
            operator,
            [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
                for name, array in given.items()
            ],
            [helper.make_tensor_value_info(name, element, sizes) for name, sizes in outputs.items()],
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        session = ort.InferenceSession(
            onnx.ModelProto.SerializeToString(model), self._options, providers=["CPUExecutionProvider"]
        )

        binding = session.io_binding()
        for name, array in given.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        bound = {
            name: ort.OrtValue.ortvalue_from_shape_and_type(sizes, np.dtype(case.dtype).type)
            for name, sizes in outputs.items()
        }
        for name, array in bound.items():
            binding.bind_ortvalue_output(name, array)

        def result() -> np.ndarray:
            session.run_with_iobinding(binding)
            out = bound["out"].numpy()
            if merged:
                return out.reshape(case.batch, case.len_q, case.heads, -1).transpose(0, 2, 1, 3)
            return out

        return Call(lambda: session.run_with_iobinding(binding), result)
