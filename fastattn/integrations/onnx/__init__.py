"""Operators of ONNX and of onnxruntime, for ONNX's reference evaluator: attention without matrices of scores.

>>> import numpy as np
>>> from onnx import parser
>>> from onnx.reference import ReferenceEvaluator
>>> from fastattn.integrations.onnx import operators
>>> model = parser.parse_model(
...     "<ir_version: 10, opset_import: ['' : 23]> g (float[2,8,100,64] x) => (float[2,8,100,64] y)"
...     "{ y = Attention<is_causal=1>(x, x, x) }".replace("'", '"')
... )
>>> x = np.random.default_rng(0).standard_normal((2, 8, 100, 64), dtype=np.float32)
>>> ours = ReferenceEvaluator(model, new_ops=operators).run(None, {"x": x})
>>> np.allclose(ours, ReferenceEvaluator(model).run(None, {"x": x}), atol=1e-5)
True
"""

from __future__ import annotations

from fastattn.integrations.onnx import microsoft
from fastattn.integrations.onnx.standard import (
    Attention,
    CausalConvWithState,
    FlexAttention,
    LinearAttention,
    RotaryEmbedding,
    TensorScatter,
)

#: For ``onnx.reference.ReferenceEvaluator(model, new_ops=operators)``.
operators = [
    Attention, RotaryEmbedding, TensorScatter, FlexAttention, LinearAttention, CausalConvWithState,
    microsoft.Attention, microsoft.MultiHeadAttention, microsoft.GroupQueryAttention,
]  # fmt: skip
