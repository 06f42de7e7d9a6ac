"""PyTorch: ``torch.nn.functional.scaled_dot_product_attention`` under ``inference_mode``, and the formula.

The operator has a fast path that takes rank 4, E = D and a last axis without gaps, and another one, much
slower, for the rest. Cases that miss the fast path are also tried with their inputs brought into its form
inside the call, and packed and ragged cases with a call for each text: people who know PyTorch do so.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fastattn.bench.case import Case, Inputs, Layer
from fastattn.bench.peers._base import (
    FEW_ROWS,
    Call,
    Peer,
    Products,
    Redundant,
    Unable,
    block_axis,
    blocks,
    check_scores_fit,
    folded,
)

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def load(num_threads: int) -> TorchSDPA:
    torch.set_num_threads(num_threads)
    return TorchSDPA()


def own(array: np.ndarray) -> torch.Tensor:
    """A copy in memory that torch allocated, and so aligned as it likes it."""
    return torch.from_numpy(np.ascontiguousarray(array)).clone()


def tensors(case: Case, inputs: Inputs) -> Tensors:
    """Query, key and value as the case has them, ``(B, heads, length, dim)`` or of its rank 3."""
    if case.strided:
        query, key, value = (own(array)[..., ::2] for array in inputs.wide(case))
    else:
        query, key, value = (own(array) for array in (inputs.query, inputs.key, inputs.value))
    if case.layout == "bshd":
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return query, key, value


def linear_layers(layer: Layer) -> Products:
    """The products as torch's own linear layers, which keep their weights transposed."""
    rows, w_qkv, attended, w_o = map(own, (layer.rows, layer.w_qkv.T, layer.attended, layer.w_o.T))
    return Products(lambda: F.linear(rows, w_qkv), lambda: F.linear(attended, w_o))


class TorchSDPA(Peer):
    """Each way keeps what it needs as tensors of torch's own."""

    version = torch.__version__

    def __init__(self) -> None:
        self._mode = ExitStack()  # for as long as the process lives: entering it costs as much as a tiny call
        self._mode.enter_context(torch.inference_mode())
        self.ways = {
            "scaled_dot_product_attention": self._sdpa,
            "the same, in its fast path's form": self._fitted,
            "the same, a group's heads as rows": folded(self._sdpa),
            "the same, block by block": self._by_blocks,
            "formula": self._formula,
        }

    def products(self, layer: Layer) -> Products:
        return linear_layers(layer)

    @staticmethod
    def _options(case: Case, inputs: Inputs) -> dict[str, Any]:
        if case.softcap is not None:
            raise Unable("no soft-cap")
        # Its causal starts at the top left, and it takes that flag or a mask, not both.
        flag = case.causal and case.len_q == case.len_k
        flag = flag and inputs.score_mask(case, causal=False) is None
        mask = None if flag else _mask(case, inputs)
        options: dict[str, Any] = {"is_causal": True} if flag else {}
        if mask is not None:
            options["attn_mask"] = mask
        if case.kv_heads != case.heads:
            options["enable_gqa"] = True
        return options

    def _sdpa(self, case: Case, inputs: Inputs) -> Call:
        options = self._options(case, inputs)
        if case.rank != 4 or case.strided or case.value_dim != case.head_dim:
            check_scores_fit(case)
        query, key, value = tensors(case, inputs)

        def run() -> torch.Tensor:
            return F.scaled_dot_product_attention(query, key, value, **options)

        return _call(case, run)

    def _fitted(self, case: Case, inputs: Inputs) -> Call:
        if case.rank == 4 and not case.strided and case.value_dim == case.head_dim:
            raise Redundant
        options = self._options(case, inputs) | {"scale": case.head_dim**-0.5}
        given = tensors(case, inputs)
        width, value_dim = max(case.head_dim, case.value_dim), case.value_dim

        def fit(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor if tensor.ndim == 4 else tensor[None]
            if tensor.shape[-1] < width:
                return F.pad(tensor, (0, width - tensor.shape[-1]))
            return tensor.contiguous() if case.strided else tensor

        def run() -> torch.Tensor:
            query, key, value = (fit(tensor) for tensor in given)
            return F.scaled_dot_product_attention(query, key, value, **options)[..., :value_dim]

        return _call(case, run)

    def _by_blocks(self, case: Case, inputs: Inputs) -> Call:
        parts = blocks(case)
        if case.softcap is not None:
            raise Unable("no soft-cap")
        grouped = case.kv_heads != case.heads
        query, key, value = tensors(case, inputs)

        def run() -> torch.Tensor:
            out = [
                F.scaled_dot_product_attention(
                    query[it.items, :, it.rows],
                    key[it.items, :, it.keys],
                    value[it.items, :, it.keys],
                    is_causal=it.causal,
                    enable_gqa=grouped,
                )
                for it in parts
            ]
            return torch.cat(out, dim=block_axis(case))

        return _call(case, run)

    def _formula(self, case: Case, inputs: Inputs) -> Call:
        """What was written before there was an operator; for few rows and for soft-caps, which it has not."""
        if case.rank != 4 or (case.len_q > FEW_ROWS and case.softcap is None):
            raise Redundant
        check_scores_fit(case)
        query, key, value = tensors(case, inputs)
        mask = _mask(case, inputs)
        hidden = ~mask if mask is not None and mask.dtype == torch.bool else None
        bias = mask if hidden is None else None
        scale, softcap, shape = case.head_dim**-0.5, case.softcap, query.shape

        def run() -> torch.Tensor:
            # The query heads of a group are rows of one matrix: each key/value head is read once.
            rows = (query * scale).reshape(shape[0], case.kv_heads, -1, shape[3])
            scores = (rows @ key.mT).reshape(*shape[:3], -1)
            if softcap is not None:
                scores.div_(softcap).tanh_().mul_(softcap)
            if bias is not None:
                scores += bias
            if hidden is not None:
                scores.masked_fill_(hidden, -torch.inf)
            weights = scores.softmax(-1).reshape(shape[0], case.kv_heads, -1, case.len_k)
            return (weights @ value).reshape(*shape[:3], -1)

        return _call(case, run)


def _mask(case: Case, inputs: Inputs) -> torch.Tensor | None:
    mask = inputs.score_mask(case)
    return None if mask is None else own(mask)


def _call(case: Case, run: Any) -> Call:
    shape = (case.batch, case.heads, case.len_q, case.value_dim)
    return Call(run, lambda: run().numpy().reshape(shape))
