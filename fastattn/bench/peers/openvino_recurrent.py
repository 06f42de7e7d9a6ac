"""OpenVINO's GatedDeltaNet: the operator of its models with the gated delta rule.

It is internal: no Python class makes it, but a model as text may name it. Arrays are ``(B, L, heads, dim)``,
the state ``(B, heads, D, E)``, and results are times ``1 / sqrt(D)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import openvino as ov

from fastattn.bench.case import RULES, Case, Inputs
from fastattn.bench.peers._base import Call, Unable, joined

_ATTRIBUTES = 'fuse_qk_l2norm="false" q_l2_norm_eps="1e-6" k_l2_norm_eps="1e-6"'


def gated_delta_net(core: Any, config: Mapping[str, Any], case: Case, inputs: Inputs) -> Call:
    """The operator in a model of nothing else; a rule without decays has those of 0."""
    decays, has_rates = RULES[case.rule or ""]
    if not has_rates or decays == "column" or case.heads != case.kv_heads or case.dtype != "float32":
        raise Unable("GatedDeltaNet is the delta rule with a decay of each token, in float32, and no more")
    arrays: list[Any] = [it.swapaxes(1, 2) for it in inputs.bhsd(case)]
    gates = [None if it is None else it[..., 0].swapaxes(1, 2) for it in inputs.gates(case)]
    arrays += [inputs.state, *(np.zeros(arrays[0].shape[:3]) if it is None else it for it in gates)]
    core.get_versions("CPU")  # loads the plugin, which tells the reader of the operator
    model = core.read_model(_model([it.shape for it in arrays]).encode(), b"")
    request = core.compile_model(model, "CPU", config).create_infer_request()
    for index, array in enumerate(arrays):
        tensor = ov.Tensor(ov.Type.f32, ov.Shape(array.shape))
        tensor.data[...] = array
        request.set_input_tensor(index, tensor)

    def result() -> np.ndarray:
        request.infer()
        out, state = (request.get_output_tensor(index).data for index in range(2))
        return joined([out.swapaxes(1, 2), state])

    return Call(request.infer, result)


def _model(shapes: list[tuple[int, ...]]) -> str:
    """A model of the operator whose inputs have these shapes, in OpenVINO's own format."""

    def port(number: int, shape: tuple[int, ...]) -> str:
        sizes = "".join(f"<dim>{size}</dim>" for size in shape)
        return f'<port id="{number}" precision="FP32">{sizes}</port>'

    def layer(number: int, kind: str, data: str, given: str, made: str) -> str:
        version = "extension" if kind == "GatedDeltaNet" else "opset1"
        ports = (f"<input>{given}</input>" if given else "") + (f"<output>{made}</output>" if made else "")
        return f'<layer id="{number}" name="{number}" type="{kind}" version="{version}">{data}{ports}</layer>'

    count = len(shapes)
    results = {count: (*shapes[0][:3], shapes[2][3]), count + 1: shapes[3]}
    layers, edges = [], []
    for number, shape in enumerate(shapes):
        data = f'<data shape="{",".join(map(str, shape))}" element_type="f32"/>'
        layers.append(layer(number, "Parameter", data, "", port(0, shape)))
        edges.append(f'<edge from-layer="{number}" from-port="0" to-layer="{count}" to-port="{number}"/>')
    ports = ("".join(port(*it) for it in numbered) for numbered in (enumerate(shapes), results.items()))
    layers.append(layer(count, "GatedDeltaNet", f"<data {_ATTRIBUTES}/>", *ports))
    for number, shape in results.items():
        layers.append(layer(number + 1, "Result", "", port(0, shape), ""))
        edges.append(f'<edge from-layer="{count}" from-port="{number}" to-layer="{number + 1}" to-port="0"/>')
    whole = f"<layers>{''.join(layers)}</layers><edges>{''.join(edges)}</edges>"
    return f'<?xml version="1.0"?><net name="recurrence" version="11">{whole}</net>'
