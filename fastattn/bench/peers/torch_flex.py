"""PyTorch: ``flex_attention``, compiled for each case, with a block mask that leaves out what is hidden.

Compiling takes a C++ compiler and about half a minute for each case; it is not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from fastattn.bench.case import Case, Inputs, Layer
from fastattn.bench.peers._base import Call, Peer, Products, Unable, check_plain
from fastattn.bench.peers.torch_sdpa import as_numpy, linear_layers, own, tensors

#: What `flex_attention` calls for each score or pair: batch item, head, query and key as index tensors.
Modifier = Callable[..., Any]


def load(num_threads: int) -> TorchFlex:
    torch.set_num_threads(num_threads)
    return TorchFlex()


class TorchFlex(Peer):
    """Restrictions become a ``mask_mod``, biases and soft-caps a ``score_mod``."""

    version = torch.__version__

    def __init__(self) -> None:
        self._mode = ExitStack()
        self._mode.enter_context(torch.inference_mode())
        self.ways = {"flex_attention, compiled": self._flex}

    def products(self, layer: Layer) -> Products:
        return linear_layers(layer)

    def _flex(self, case: Case, inputs: Inputs) -> Call:
        check_plain(case)
        if case.dtype == "float64":
            raise Unable("flex_attention on the CPU has no float64")
        torch.compiler.reset()  # what was compiled for other cases, and its limit on recompilations
        query, key, value = (it if it.ndim == 4 else it[None] for it in tensors(case, inputs))
        options: dict[str, Any] = {"score_mod": _score_mod(case, inputs), "block_mask": None}
        if case.kv_heads != case.heads:
            options["enable_gqa"] = True
        mask_mod = _mask_mod(case, inputs)
        if mask_mod is not None:
            options["block_mask"] = _block_mask(case, mask_mod)
        compiled = torch.compile(flex_attention, dynamic=False)

        def run() -> torch.Tensor:
            return compiled(query, key, value, **options)

        return Call(run, lambda: as_numpy(run()))


def _mask_mod(case: Case, inputs: Inputs) -> Modifier | None:
    """Whether a query may attend a key; None when every one may."""
    start, stop = case.intervals()
    if not np.any(start) and np.all(stop == case.len_k) and inputs.mask is None:
        return None
    shape = (case.batch, case.len_q)
    first, end = (own(np.broadcast_to(bound, shape).astype(np.int32)) for bound in (start, stop))
    if inputs.mask is None:
        return lambda b, h, i, j: (j >= first[b, i]) & (j < end[b, i])
    if case.mask == "padding":
        kept = own(inputs.mask[:, 0, 0])
        return lambda b, h, i, j: (j >= first[b, i]) & (j < end[b, i]) & kept[b, j]
    pairs = own(inputs.mask)
    return lambda b, h, i, j: (j >= first[b, i]) & (j < end[b, i]) & pairs[i, j]


def _block_mask(case: Case, mask_mod: Modifier) -> BlockMask:
    batch = case.batch if case.lengths is not None or case.mask == "padding" else None
    # Compiled, it does not store a bool for each pair.
    return create_block_mask(
        mask_mod,
        batch,
        None,
        case.len_q,
        case.len_k,
        device="cpu",
        _compile=case.len_q * case.len_k > 1 << 26,
    )


def _score_mod(case: Case, inputs: Inputs) -> Modifier | None:
    softcap = case.softcap
    if inputs.bias is None:
        if softcap is None:
            return None
        return lambda score, b, h, i, j: softcap * torch.tanh(score / softcap)
    bias = own(inputs.bias)
    if softcap is not None:
        raise Unable("a soft-cap and a bias together are not written yet")
    if bias.ndim == 2:
        return lambda score, b, h, i, j: score + bias[i, j]
    return lambda score, b, h, i, j: score + bias[h, i, j]
