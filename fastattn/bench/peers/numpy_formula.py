"""NumPy: the formula as one writes it, in place where that costs no clarity."""

from __future__ import annotations

import numpy as np

from fastattn.bench.case import Case, Inputs
from fastattn.bench.peers._base import Call, Peer, added_mask, block_axis, blocks, check_scores_fit


def load(num_threads: int) -> NumPyFormula:
    return NumPyFormula()


class NumPyFormula(Peer):
    """Threads come from the BLAS, which reads the worker's environment."""

    version = np.__version__

    def __init__(self) -> None:
        self.ways = {"formula": self._formula, "formula, block by block": self._by_blocks}

    def _formula(self, case: Case, inputs: Inputs) -> Call:
        check_scores_fit(case)
        query, key, value = inputs.bhsd(case)
        mask = inputs.score_mask(case)
        added = None if mask is None else added_mask(case, mask)

        def run() -> np.ndarray:
            return attention(case, query, key, value, added)

        return Call(run, run)

    def _by_blocks(self, case: Case, inputs: Inputs) -> Call:
        query, key, value = inputs.bhsd(case)
        triangle = added_mask(case, np.tri(case.document_length or 0, dtype=bool))
        parts = []
        for block in blocks(case):
            length = block.keys.stop - block.keys.start
            parts.append((block, triangle[:length, :length] if block.causal else None))

        def run() -> np.ndarray:
            out = [
                attention(
                    case,
                    query[it.items, :, it.rows],
                    key[it.items, :, it.keys],
                    value[it.items, :, it.keys],
                    added,
                )
                for it, added in parts
            ]
            return np.concatenate(out, axis=block_axis(case))

        return Call(run, run)


def attention(
    case: Case, query: np.ndarray, key: np.ndarray, value: np.ndarray, added: np.ndarray | None
) -> np.ndarray:
    """Softmax attention of ``(B, heads, length, dim)`` arrays.

    The query heads of a group are rows of one matrix, so that each key/value head is read once and never
    copied. `added` is a float mask or bias that broadcasts to ``(B, H, L, S)``: to add -inf takes a
    fifteenth of the time that ``np.copyto(..., where=)`` takes for a mask without structure.
    """
    batch, heads, len_q, head_dim = query.shape
    rows = (query * query.dtype.type(head_dim**-0.5)).reshape(batch, case.kv_heads, -1, head_dim)
    scores = rows @ key.swapaxes(-1, -2)
    if case.softcap is not None:
        scores /= case.softcap
        np.tanh(scores, out=scores)
        scores *= case.softcap
    if added is not None:
        by_head = scores.reshape(batch, heads, len_q, -1)  # a view
        by_head += added
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    out = scores @ value
    out /= scores.sum(axis=-1, keepdims=True)
    return out.reshape(batch, heads, len_q, -1)
