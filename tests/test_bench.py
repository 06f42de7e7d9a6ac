"""What the benchmark computes: FLOPs, inputs, right answers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastattn.bench.cases import CASES, GROUPS, Case, make_inputs
from fastattn.bench.oracle import expected_output, oracle_dtype
from fastattn.bench.peers.numpy_formula import NumPyFormula

SMALL = replace(
    CASES["square-512-64"],
    name="small",
    batch=2,
    heads=4,
    kv_heads=4,
    len_q=7,
    len_k=7,
    head_dim=5,
    value_dim=5,
)

#: One small case for each option that the real ones use.
KINDS = {
    "plain": SMALL,
    "causal": replace(SMALL, causal=True),
    "random": replace(SMALL, mask="random", len_k=40),
    "padding": replace(SMALL, mask="padding"),
    "shared": replace(SMALL, bias="shared"),
    "per_head": replace(SMALL, bias="per_head"),
    "window": replace(SMALL, window=(2, 1)),
    "documents": replace(SMALL, document_length=3),
    "float64": replace(SMALL, dtype="float64"),
    "rank3": replace(SMALL, batch=1, rank=3),
    "wide": replace(SMALL, value_dim=9),
    "bshd": replace(SMALL, layout="bshd"),
    "grouped": replace(SMALL, kv_heads=2, causal=True),
    "cross": replace(SMALL, len_k=3),
}


def loop_attention(case: Case) -> np.ndarray:
    """Attention one score at a time, straight from the options of `case`."""
    inputs = make_inputs(case)
    query, key, value = inputs.bhsd(case)
    out = np.zeros((case.batch, case.heads, case.len_q, case.value_dim))
    for b, h, i in np.ndindex(case.batch, case.heads, case.len_q):
        kv = h // (case.heads // case.kv_heads)
        total = 0.0
        for j in range(case.len_k):
            hidden = case.causal and j > i
            if case.window is not None:
                hidden = hidden or not i - case.window[0] <= j <= i + case.window[1]
            if case.document_length is not None:
                hidden = hidden or i // case.document_length != j // case.document_length
            if case.mask == "random":
                hidden = hidden or not inputs.allowed[i, j]
            if case.mask == "padding":
                hidden = hidden or j >= int(case.len_k * 0.75)
            if hidden:
                continue
            score = sum(float(x) * float(y) for x, y in zip(query[b, h, i], key[b, kv, j], strict=True))
            score /= math.sqrt(case.head_dim)
            if case.bias is not None:
                score += float(inputs.bias[h, i, j] if case.bias == "per_head" else inputs.bias[i, j])
            total += math.exp(score)
            out[b, h, i] += math.exp(score) * value[b, kv, j].astype(float)
        out[b, h, i] /= total
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_oracle_and_numpy_agree_with_a_loop(kind: str) -> None:
    case = KINDS[kind]
    inputs = make_inputs(case)
    expected = loop_attention(case)
    answer = expected_output(case, inputs)
    assert answer.dtype == oracle_dtype(case)
    np.testing.assert_allclose(answer.astype(float), expected, rtol=1e-12, atol=1e-14)
    (make,) = NumPyFormula().ways.values()
    tolerance = 16 * np.finfo(case.dtype).eps * np.abs(inputs.value).max()
    np.testing.assert_allclose(make(case, inputs).result(), expected, rtol=0, atol=tolerance)


def test_oracle_does_not_depend_on_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = expected_output(KINDS["grouped"], make_inputs(KINDS["grouped"]))
    monkeypatch.setattr("fastattn.bench.oracle.ROWS", 2)
    blocks = expected_output(KINDS["grouped"], make_inputs(KINDS["grouped"]))
    np.testing.assert_allclose(blocks, whole, rtol=1e-14)


def test_flops_follow_the_formula() -> None:
    case = replace(SMALL, batch=3, heads=4, len_q=10, len_k=20, head_dim=8, value_dim=8)
    assert case.flops == 4 * 3 * 4 * 10 * 20 * 8
    assert replace(case, value_dim=16).flops == 2 * 3 * 4 * 10 * 20 * (8 + 16)
    assert replace(case, causal=True).flops == case.flops / 2
    assert replace(case, kv_heads=2, mask="random", bias="shared").flops == case.flops


@pytest.mark.parametrize("fields", [{"window": (2, 0)}, {"window": (0, 30)}, {"document_length": 3}])
def test_flops_of_intervals_count_the_allowed_pairs(fields: dict[str, Any]) -> None:
    case = replace(SMALL, len_q=13, len_k=13, **fields)
    assert case.scores == np.count_nonzero(make_inputs(case).allowed)


def test_inputs_depend_on_the_name_alone() -> None:
    first, again = make_inputs(SMALL), make_inputs(SMALL)
    assert first.query.tobytes() == again.query.tobytes()
    assert first.query.tobytes() != make_inputs(replace(SMALL, name="other")).query.tobytes()


def test_cases_are_consistent() -> None:
    for name, case in CASES.items():
        assert case.name == name
        assert case.group in GROUPS
        assert (case.baseline is not None) == (case.targets.slowdown is not None)
        assert case.baseline is None or CASES[case.baseline].shape == case.shape
