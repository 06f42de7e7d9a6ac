"""NumPy: the formula as one writes it, in place where that costs no clarity."""

from __future__ import annotations

import numpy as np

from fastattn.bench.cases import Case, Inputs
from fastattn.bench.peers._base import Call


def load(num_threads: int) -> NumPyFormula:
    return NumPyFormula()


class NumPyFormula:
    """Threads come from the BLAS, which reads the worker's environment."""

    version = np.__version__

    def __init__(self) -> None:
        self.ways = {"formula": self._formula}

    def _formula(self, case: Case, inputs: Inputs) -> Call:
        query, key, value = inputs.bhsd(case)
        blocked = None if inputs.allowed is None else ~inputs.allowed
        if case.causal:
            blocked = np.triu(np.ones((case.len_q, case.len_k), bool), 1)
        bias, scale = inputs.bias, case.head_dim**-0.5
        if case.kv_heads != case.heads:
            query = query.reshape(case.batch, case.kv_heads, -1, case.len_q, case.head_dim)
            key, value = key[:, :, None], value[:, :, None]

        def run() -> np.ndarray:
            scores = query @ key.swapaxes(-1, -2)
            scores *= scale
            if bias is not None:
                scores += bias
            if blocked is not None:
                np.copyto(scores, -np.inf, where=blocked)
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(axis=-1, keepdims=True)
            return scores @ value

        shape = (case.batch, case.heads, case.len_q, case.value_dim)
        return Call(run, lambda: run().reshape(shape))
