"""NumPy: the formula as one writes it, in place where that costs no clarity.

What is stored in another way is gathered from its pages and turned into float32 at each call, and a 16-bit
result is rounded at its end: NumPy has no fast products of other types.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn.bench.case import TOPK, Case, Inputs, Stored, numpy_dtype
from fastattn.bench.peers._base import (
    Call,
    Peer,
    Redundant,
    Unable,
    added_mask,
    block_axis,
    blocks,
    check_scores_fit,
    joined,
    take_new,
    with_scores_of,
)

#: Tokens of a chunk of gated linear attention.
CHUNK = 64


def load(num_threads: int) -> NumPyFormula:
    return NumPyFormula()


class NumPyFormula(Peer):
    """Threads come from the BLAS, which reads the worker's environment."""

    version = np.__version__

    def __init__(self) -> None:
        self.ways = {
            "formula": self._formula,
            "formula, block by block": self._by_blocks,
            "keys and values made ready, then the formula": self._made_ready,
        }
        self.recurrent_ways = {"formula, chunk by chunk": self._recurrence}
        self.reduction_ways = {"formula": self._reduction}

    def _recurrence(self, case: Case, inputs: Inputs) -> Call:
        if case.dtype != case.compute_dtype or case.heads != case.kv_heads:
            raise Unable("the formula is written for float32 and float64 without grouped heads")
        arrays: Any = *inputs.bhsd(case), *inputs.gates(case), inputs.state

        def run() -> tuple[np.ndarray, np.ndarray]:
            return gated_linear_attention(*arrays)

        return Call(run, lambda: joined(run()))

    def _reduction(self, case: Case, inputs: Inputs) -> Call:
        check_scores_fit(case)
        mask = inputs.score_mask(case)
        added = None if mask is None else added_mask(case, mask)

        def run() -> Any:
            query, key, _ = (it.astype(case.compute_dtype, copy=False) for it in inputs.bhsd(case))
            return reduced(case, query, key, added)

        if case.reduction == "topk":
            return Call(run, lambda: with_scores_of(case, inputs, *run()))
        return Call(run, run)

    def _formula(self, case: Case, inputs: Inputs) -> Call:
        if _is_made_ready(case):
            raise Redundant
        check_scores_fit(case)
        query, key, value = inputs.bhsd(case)
        mask = inputs.score_mask(case)
        added = None if mask is None else added_mask(case, mask)

        def run() -> np.ndarray:
            return attention(case, query, key, value, added)

        return Call(run, run)

    def _made_ready(self, case: Case, inputs: Inputs) -> Call:
        if not _is_made_ready(case):
            raise Redundant
        caches = [it for it in (inputs.key, inputs.value) if not isinstance(it, Stored)] if case.step else []
        if case.step and not caches:
            raise Unable("no step over int8 or pages")
        check_scores_fit(case)
        mask, dtype = inputs.score_mask(case), numpy_dtype(case.dtype)
        added = None if mask is None else added_mask(case, mask).astype(case.compute_dtype)
        new, new_rows = [take_new(case, it) for it in caches], slice(case.len_k - case.len_q, None)

        def run() -> np.ndarray:
            for cache, rows in zip(caches, new, strict=True):
                cache[..., new_rows, :] = rows
            query, key, value = (it.astype(case.compute_dtype, copy=False) for it in inputs.bhsd(case))
            return attention(case, query, key, value, added).astype(dtype, copy=False)

        return Call(run, run)

    def _by_blocks(self, case: Case, inputs: Inputs) -> Call:
        if _is_made_ready(case):
            raise Redundant
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


def _is_made_ready(case: Case) -> bool:
    """Whether keys and values are not there as NumPy's products want them."""
    return case.dtype != case.compute_dtype or not case.is_plain


def scores_of(case: Case, query: np.ndarray, key: np.ndarray, added: np.ndarray | None) -> np.ndarray:
    """The scores of ``(B, heads, length, dim)`` arrays, ``(B, K, rows, S)``.

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
    return scores


def attention(
    case: Case, query: np.ndarray, key: np.ndarray, value: np.ndarray, added: np.ndarray | None
) -> np.ndarray:
    """Softmax attention of ``(B, heads, length, dim)`` arrays."""
    scores = scores_of(case, query, key, added)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    out = scores @ value
    out /= scores.sum(axis=-1, keepdims=True)
    return out.reshape(*query.shape[:3], -1)


def reduced(case: Case, query: np.ndarray, key: np.ndarray, added: np.ndarray | None) -> Any:
    """What `case` asks of the scores of ``(B, heads, length, dim)`` arrays; of "topk" scores and keys."""
    if case.reduction == "max_similarity":
        products = key.reshape(-1, case.head_dim) @ query[0].reshape(-1, case.head_dim).T
        return products.reshape(case.batch, case.len_k, case.heads, -1).max(axis=1).sum(axis=-1)
    scores = scores_of(case, query, key, added).reshape(case.batch, case.heads, case.len_q, case.len_k)
    if case.reduction == "topk":
        index = np.argpartition(scores, -TOPK, axis=-1)[..., -TOPK:]
        values = np.take_along_axis(scores, index, axis=-1)
        order = np.argsort(-values, axis=-1)
        return tuple(np.take_along_axis(it, order, axis=-1) for it in (values, index))
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores.sum(axis=-2)


def gated_linear_attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    decay: np.ndarray | None,
    beta: np.ndarray | None,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Output and state after of ``(B, heads, length, ...)`` arrays, `CHUNK` tokens at a time.

    Decays become factors of queries and keys, which is the cheapest form. Their sums in a chunk must be in
    the range of exp, as those of the cases are.
    """
    *_, length, dim = query.shape
    out = np.empty_like(value)
    query = query * query.dtype.type(dim**-0.5)
    for start in range(0, length, CHUNK):
        rows = np.s_[:, :, start : start + CHUNK]
        q, k, added = query[rows], key[rows], value[rows]
        asking, last = k, None
        if decay is not None:
            sums = decay[rows].cumsum(axis=-2)
            up = np.exp(sums)
            q, asking, k, last = q * up, k * up, k * np.exp(-sums), up[:, :, -1, :, None]
        if beta is not None:
            added = beta[rows] * (added - asking @ state)
            if added.shape[-2] > 1:
                system = np.tril(beta[rows] * (asking @ k.swapaxes(-1, -2)), -1)
                added = np.linalg.solve(system + np.eye(len(system[0, 0]), dtype=q.dtype), added)
        out[rows] = q @ state + np.tril(q @ k.swapaxes(-1, -2)) @ added
        state = state + k.swapaxes(-1, -2) @ added
        if last is not None:
            state *= last
    return out, state
