"""OpenVINO: a model of one ScaledDotProductAttention (opset 13) or PagedAttention on the CPU plugin.

Inputs are copied once into tensors that OpenVINO allocated and the output tensor is reused, so a call is
``request.infer()`` and nothing else. The plugin takes different paths through a model with fixed shapes
and one with open lengths; both are tried. 16-bit cases hint at their own type: what the plugin makes of that
depends on the CPU.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import openvino as ov
from openvino import opset13

from fastattn.bench.case import Case, Inputs, numpy_dtype
from fastattn.bench.peers._base import Call, Peer, Unable, check_plain, check_scores_fit, folded
from fastattn.bench.peers.openvino_paged import paged_attention
from fastattn.bench.peers.openvino_recurrent import gated_delta_net

#: What 16-bit cases change of the configuration.
_HINTS = {
    "float16": {"INFERENCE_PRECISION_HINT": "f16"},
    "bfloat16": {"INFERENCE_PRECISION_HINT": "bf16"},
}


def load(num_threads: int) -> OpenVINO:
    return OpenVINO(num_threads)


class OpenVINO(Peer):
    """One stream of `num_threads` threads, float32 kept float32 (the plugin may choose bfloat16)."""

    version = ov.__version__

    def __init__(self, num_threads: int) -> None:
        self._core = ov.Core()
        self._config = {
            "INFERENCE_NUM_THREADS": num_threads,
            "NUM_STREAMS": 1,
            "INFERENCE_PRECISION_HINT": "f32",
        }
        self.ways = {
            "fixed shapes": partial(self._sdpa, fixed=True),
            "open lengths": partial(self._sdpa, fixed=False),
            "fixed shapes, a group's heads as rows": folded(partial(self._sdpa, fixed=True)),
            "open lengths, a group's heads as rows": folded(partial(self._sdpa, fixed=False)),
            "PagedAttention": partial(paged_attention, self._core, self._config),
        }
        self.recurrent_ways = {"GatedDeltaNet": partial(gated_delta_net, self._core, self._config)}

    def _sdpa(self, case: Case, inputs: Inputs, *, fixed: bool) -> Call:
        check_plain(case)
        if case.softcap is not None:
            raise Unable("no soft-cap")
        # The operator knows (B, heads, length, dim) only; a "bshd" model transposes, as exported ones do.
        arrays = list(inputs.wide(case))
        if case.layout == "bshd":
            arrays = [array.transpose(0, 2, 1, 3) for array in inputs.bhsd(case)]
        # Its causal starts at the top left, and the plugin ignores a mask beside it.
        causal = case.causal and case.len_q == case.len_k and inputs.score_mask(case, causal=False) is None
        if causal:
            # Without the flag it works tile by tile. With it, open lengths store the scores, and fixed shapes
            # had the process killed for lack of memory on 65536 tokens.
            check_scores_fit(case)
        mask = None if causal else inputs.score_mask(case)
        if mask is not None:
            arrays.append(mask)

        length_axis = 1 if case.layout == "bshd" else 2
        parameters = []
        for index, array in enumerate(arrays):
            shape = list(array.shape)
            if not fixed and index < 3:
                shape[length_axis] = -1
            elif not fixed:
                shape[-2:] = [-1, -1]
            parameters.append(opset13.parameter(ov.PartialShape(shape), _element(array)))
        nodes = list(parameters)
        if case.strided:
            nodes[:3] = [_every_second(node) for node in nodes[:3]]
        if case.layout == "bshd":
            nodes[:3] = [opset13.transpose(node, np.array([0, 2, 1, 3])) for node in nodes[:3]]
        if case.kv_heads != case.heads:
            nodes[1:3] = [_repeat_heads(node, case) for node in nodes[1:3]]
        out = opset13.scaled_dot_product_attention(*nodes, causal=causal)
        model = ov.Model([opset13.result(out)], parameters)
        config = self._config | _HINTS.get(case.dtype, {})
        request = self._core.compile_model(model, "CPU", config).create_infer_request()
        for index, array in enumerate(arrays):
            tensor = ov.Tensor(_element(array), ov.Shape(array.shape))
            tensor.data.view(array.dtype)[...] = array
            request.set_input_tensor(index, tensor)

        def result() -> np.ndarray:
            request.infer()
            return request.get_output_tensor(0).data.view(numpy_dtype(case.dtype)).copy()

        return Call(request.infer, result)


def _element(array: np.ndarray) -> ov.Type:
    """The type of a tensor for `array`; the data of a bfloat16 one are said to be float16."""
    return ov.Type.bf16 if array.dtype.name == "bfloat16" else ov.Type(array.dtype)


def _every_second(node: ov.Node) -> ov.Node:
    """Every second element of the last axis."""
    numbers = (np.array([number]) for number in (0, np.iinfo(np.int64).max, 2, -1))
    return opset13.slice(node, *numbers)


def _repeat_heads(node: ov.Node, case: Case) -> ov.Node:
    """Key/value heads repeated for each group: the pattern that the plugin fuses in language models."""
    group = case.heads // case.kv_heads
    split = opset13.unsqueeze(node, np.array(2))
    target = np.array([1, 1, group, 1, 1])
    repeated = opset13.broadcast(split, target, broadcast_spec="BIDIRECTIONAL")
    dim = node.get_output_partial_shape(0)[3].get_length()
    return opset13.reshape(repeated, np.array([0, case.heads, -1, dim]), special_zero=True)
