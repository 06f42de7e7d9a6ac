"""PyTorch: ``torch.nn.functional.scaled_dot_product_attention`` under ``inference_mode``."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fastattn.bench.cases import Case, Inputs
from fastattn.bench.peers._base import Call


def load(num_threads: int) -> TorchSDPA:
    torch.set_num_threads(num_threads)
    return TorchSDPA()


def _own(array: np.ndarray) -> torch.Tensor:
    """A copy in memory that torch allocated, and so aligned as it likes it."""
    return torch.from_numpy(array).clone()


class TorchSDPA:
    """Gets the case as it stands: rank 3 and transposed inputs are not made easier for it."""

    version = torch.__version__

    def __init__(self) -> None:
        self._mode = ExitStack()  # for as long as the process lives: entering it costs as much as a tiny call
        self._mode.enter_context(torch.inference_mode())
        self.ways = {"scaled_dot_product_attention": self._sdpa}

    def _sdpa(self, case: Case, inputs: Inputs) -> Call:
        query, key, value = _own(inputs.query), _own(inputs.key), _own(inputs.value)
        if case.layout == "bshd":
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        options: dict[str, Any] = {}
        if case.causal:
            options["is_causal"] = True
        if inputs.allowed is not None:
            options["attn_mask"] = _own(inputs.allowed)
        if inputs.bias is not None:
            mask = _own(inputs.bias)
            options["attn_mask"] = (
                mask[None] if mask.ndim == 3 else mask
            )  # rank 3 would cost it its fast path
        if case.kv_heads != case.heads:
            options["enable_gqa"] = True

        def run() -> torch.Tensor:
            return F.scaled_dot_product_attention(query, key, value, **options)

        shape = (case.batch, case.heads, case.len_q, case.value_dim)
        return Call(run, lambda: run().numpy().reshape(shape))
