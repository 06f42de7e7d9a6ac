"""The Numba backend on every instruction set of this machine, each in a process of its own."""

from __future__ import annotations

import pytest

from tests.process import python

target = pytest.importorskip("fastattn.backends.jit.codegen.target")

CODE = """
import numpy as np
import fastattn
from fastattn.backends.jit.codegen.target import ISA
from tests.tolerances import assert_attention

rng = np.random.default_rng(0)
problems = [  # L, S, D, E, key/value heads, options
    (70, 70, 40, 40, 2, {}),
    (70, 90, 33, 19, 2, {"causal": "bottom_right"}),
    (64, 64, 8, 8, 2, {"window": (5, 5)}),
    (40, 130, 64, 64, 1, {"mask": rng.random((40, 130)) < 0.4}),
    (3, 300, 64, 64, 1, {"key_lengths": np.array([300, 7])}),
    (1, 300, 20, 50, 2, {"softcap": 3.0}),
    (5, 100, 16, 16, 2, {"bias": rng.standard_normal((5, 100)), "sinks": np.ones(2)}),
]
for dtype in (np.float32, np.float64):
    for len_q, len_k, head_dim, value_dim, kv_heads, options in problems:
        shapes = (2, 2, len_q, head_dim), (2, kv_heads, len_k, head_dim), (2, kv_heads, len_k, value_dim)
        arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
        wanted = {"return_lse": True, "return_weights": True}
        results = fastattn.attention(*arrays, backend="numba", **wanted, **options)
        assert_attention(results, *arrays, **options)
        many = fastattn.attention(*arrays, backend="numba", num_threads=3, **wanted, **options)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(results, many, strict=True))
print(ISA)
"""


@pytest.mark.slow
@pytest.mark.parametrize("isa", target.usable_isas())
def test_every_instruction_set(isa):
    assert python(CODE, env={"FASTATTN_ISA": isa}, timeout=600).strip() == isa
