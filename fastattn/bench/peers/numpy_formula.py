"""NumPy: the formula as one writes it, in place where that costs no clarity."""

from __future__ import annotations

import numpy as np

from fastattn.bench.cases import Case, Inputs
from fastattn.bench.peers._base import Call, block_axis, blocks, check_scores_fit


def load(num_threads: int) -> NumPyFormula:
    return NumPyFormula()


class NumPyFormula:
    """Threads come from the BLAS, which reads the worker's environment."""

    version = np.__version__

    def __init__(self) -> None:
        self.ways = {"formula": self._formula, "formula, text by text": self._by_blocks}

    def _formula(self, case: Case, inputs: Inputs) -> Call:
        check_scores_fit(case)
        query, key, value = inputs.bhsd(case)
        allowed = inputs.allowed(case)
        blocked = None if allowed is None else ~allowed
        bias = inputs.bias

        def run() -> np.ndarray:
            return attention(case, query, key, value, blocked, bias)

        return Call(run, run)

    def _by_blocks(self, case: Case, inputs: Inputs) -> Call:
        query, key, value = inputs.bhsd(case)
        later = np.triu(np.ones((case.document_length or 0,) * 2, bool), 1)
        parts = [
            (
                it,
                later[: it.keys.stop - it.keys.start, : it.keys.stop - it.keys.start]
                if case.causal
                else None,
            )
            for it in blocks(case)
        ]

        def run() -> np.ndarray:
            out = [
                attention(
                    case,
                    query[it.items, :, it.rows],
                    key[it.items, :, it.keys],
                    value[it.items, :, it.keys],
                    blocked,
                    None,
                )
                for it, blocked in parts
            ]
            return np.concatenate(out, axis=block_axis(case))

        return Call(run, run)


def attention(
    case: Case,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    blocked: np.ndarray | None,
    bias: np.ndarray | None,
) -> np.ndarray:
    """Softmax attention of ``(B, heads, length, dim)`` arrays.

    The query heads of a group are rows of one matrix, so that each key/value head is read once and never
    copied. `blocked` (bool, True = hidden) and `bias` broadcast to ``(B, H, L, S)``.
    """
    batch, heads, len_q, head_dim = query.shape
    len_k = key.shape[2]
    rows = (query * query.dtype.type(head_dim**-0.5)).reshape(batch, case.kv_heads, -1, head_dim)
    scores = rows @ key.swapaxes(-1, -2)
    by_head = scores.reshape(batch, heads, len_q, len_k)  # a view
    if case.softcap is not None:
        scores /= case.softcap
        np.tanh(scores, out=scores)
        scores *= case.softcap
    if bias is not None:
        by_head += bias
    if blocked is not None:
        np.copyto(by_head, -np.inf, where=blocked)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    out = scores @ value
    out /= scores.sum(axis=-1, keepdims=True)
    return out.reshape(batch, heads, len_q, -1)
