"""PyTorch: ``torch.nn.functional.scaled_dot_product_attention`` under ``inference_mode``, and the formula.

The operator has a fast path that takes rank 4, E = D and a last axis without gaps, and another one, much
slower, for the rest. Cases that miss the fast path are also tried with their inputs brought into its form
inside the call, and packed and ragged cases with a call for each text: people who know PyTorch do so.

Gradients are autograd's, of a graph that is made beforehand and kept, by each of the operator's kernels.

A decoder in PyTorch appends with ``index_copy_``. There is no operator for pages nor, on the CPU, for int8
keys and values: those are gathered and multiplied with their scales inside the call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastattn.bench.case import INT8_GROUP, TOPK, Case, Inputs, Layer, Stored
from fastattn.bench.peers import torch_recurrent
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
    joined,
    with_scores_of,
)

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

#: Makes a call of the operator ready: of a case, its inputs, its tensors and a bias that is differentiated.
Prepare = Callable[[Case, Inputs, Tensors, torch.Tensor | None], Callable[[], torch.Tensor]]


def load(num_threads: int) -> TorchSDPA:
    torch.set_num_threads(num_threads)
    return TorchSDPA()


def own(array: np.ndarray) -> torch.Tensor:
    """A copy in memory that torch allocated, and so aligned as it likes it."""
    array = np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":  # of ml_dtypes, which torch does not know
        return torch.from_numpy(array.view(np.uint16)).clone().view(torch.bfloat16)
    return torch.from_numpy(array).clone()


def tensors(case: Case, inputs: Inputs) -> Tensors:
    """Query, key and value as the case has them, ``(B, heads, length, dim)`` or of its rank 3."""
    if isinstance(inputs.key, Stored) or isinstance(inputs.value, Stored):
        raise Unable("no keys and values but tensors")
    if case.strided:
        query, key, value = (own(array)[..., ::2] for array in inputs.wide(case))
    else:
        query, key, value = (own(array) for array in (inputs.query, inputs.key, inputs.value))
    if case.value_in_key:
        value = key[..., : case.value_dim]
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
            "scaled_dot_product_attention": partial(_forward, self._sdpa),
            "the same, in its fast path's form": partial(_forward, self._fitted),
            "the same, a group's heads as rows": folded(partial(_forward, self._sdpa)),
            "the same, block by block": partial(_forward, self._by_blocks),
            "formula": self._formula,
            "keys and values made ready, then the operator": partial(self._decoder, "operator"),
            "keys and values made ready, then a group's heads as rows": partial(self._decoder, "rows"),
            "keys and values made ready, then the formula": partial(self._decoder, "formula"),
        }
        flash, math = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH
        self.backward_ways = {
            "flash": partial(_backward, flash, self._sdpa),
            "flash, in the form that it takes": partial(_backward, flash, self._fitted),
            "flash, block by block": partial(_backward, flash, self._by_blocks),
            "math": partial(_backward, math, self._sdpa),
        }
        self.recurrent_ways = {
            "formula, chunk by chunk": lambda *given: _recurrence(torch_recurrent.advance, *given),
            "the same, compiled": lambda *given: _recurrence(torch_recurrent.compiled(given[0]), *given),
        }

        self.reduction_ways = {"formula": self._reduction}

    def products(self, layer: Layer) -> Products:
        return linear_layers(layer)

    @staticmethod
    def _reduction(case: Case, inputs: Inputs) -> Call:
        """16-bit types are multiplied as they are."""
        check_scores_fit(case)
        query, mask, key_of = own(inputs.query), _mask(case, inputs), _made_ready(case, inputs.key)
        computed = getattr(torch, case.compute_dtype)
        tokens, shape = query[0].flatten(0, 1), (case.batch, case.heads, case.len_q, case.len_k)

        def similarity() -> torch.Tensor:
            products = key_of().reshape(-1, case.head_dim) @ tokens.T
            return products.reshape(case.batch, case.len_k, case.heads, -1).amax(1).sum(-1, dtype=computed)

        def scores() -> torch.Tensor:
            rows = (query * case.head_dim**-0.5).reshape(case.batch, case.kv_heads, -1, case.head_dim)
            found = (rows @ key_of().mT).reshape(shape)
            return found if mask is None else found.masked_fill_(~mask, -torch.inf)

        def largest() -> tuple[torch.Tensor, torch.Tensor]:
            values, index = scores().topk(TOPK)
            return values, index

        if case.reduction == "topk":
            return Call(largest, lambda: with_scores_of(case, inputs, *map(as_numpy, largest())))
        if case.reduction == "key_weights":
            return Call(lambda: scores().softmax(-1).sum(-2), lambda: as_numpy(scores().softmax(-1).sum(-2)))
        return Call(similarity, lambda: as_numpy(similarity()))

    @staticmethod
    def _options(case: Case, inputs: Inputs, bias: torch.Tensor | None) -> dict[str, Any]:
        if case.softcap is not None:
            raise Unable("no soft-cap")
        # Its causal starts at the top left, and it takes that flag or a mask, not both.
        flag = case.causal and case.len_q == case.len_k
        flag = flag and inputs.score_mask(case, causal=False) is None
        mask = None if flag else _mask(case, inputs) if bias is None else _masked(bias, case, inputs)
        options: dict[str, Any] = {"is_causal": True} if flag else {}
        if mask is not None:
            options["attn_mask"] = mask
        if case.kv_heads != case.heads:
            options["enable_gqa"] = True
        return options

    def _sdpa(
        self, case: Case, inputs: Inputs, given: Tensors, bias: torch.Tensor | None
    ) -> Callable[[], torch.Tensor]:
        options = self._options(case, inputs, bias)
        if case.rank != 4 or case.strided or case.value_dim != case.head_dim:
            check_scores_fit(case)
        query, key, value = given

        def run() -> torch.Tensor:
            return F.scaled_dot_product_attention(query, key, value, **options)

        return run

    def _fitted(
        self, case: Case, inputs: Inputs, given: Tensors, bias: torch.Tensor | None
    ) -> Callable[[], torch.Tensor]:
        if case.rank == 4 and not case.strided and case.value_dim == case.head_dim:
            raise Redundant
        options = self._options(case, inputs, bias) | {"scale": case.head_dim**-0.5}
        width, value_dim = max(case.head_dim, case.value_dim), case.value_dim

        def fit(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor if tensor.ndim == 4 else tensor[None]
            if tensor.shape[-1] < width:
                return F.pad(tensor, (0, width - tensor.shape[-1]))
            return tensor.contiguous() if case.strided else tensor

        def run() -> torch.Tensor:
            query, key, value = (fit(tensor) for tensor in given)
            return F.scaled_dot_product_attention(query, key, value, **options)[..., :value_dim]

        return run

    def _by_blocks(
        self, case: Case, inputs: Inputs, given: Tensors, bias: torch.Tensor | None
    ) -> Callable[[], torch.Tensor]:
        parts = blocks(case)
        if case.softcap is not None:
            raise Unable("no soft-cap")
        grouped = case.kv_heads != case.heads
        query, key, value = given

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

        return run

    def _formula(self, case: Case, inputs: Inputs) -> Call:
        """What was written before there was an operator; for few rows and for soft-caps, which it has not."""
        if case.rank != 4 or (case.len_q > FEW_ROWS and case.softcap is None) or not case.is_plain:
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

    def _decoder(self, kind: str, case: Case, inputs: Inputs) -> Call:
        """What has to be done with keys and values first, and then attention.

        `kind` is "operator"; "rows", with the query heads of a group as rows of one head; or "formula". The
        last two are for few rows.
        """
        group = case.heads // case.kv_heads
        if case.is_plain or (kind == "rows" and group == 1):
            raise Redundant
        if kind != "operator" and case.len_q > FEW_ROWS:
            raise Redundant
        if case.softcap is not None or inputs.bias is not None:
            raise Unable("no soft-cap and no bias over stored keys and values")
        if kind == "formula":
            check_scores_fit(case)
        dtype = getattr(torch, case.dtype)
        query, mask = own(inputs.query), _mask(case, inputs)
        shape, scale = query.shape, case.head_dim**-0.5
        if kind != "operator":
            query = query.reshape(case.batch, case.kv_heads, -1, case.head_dim)
            mask = None if mask is None else mask.expand(-1, -1, case.len_q, -1).repeat(1, 1, group, 1)
        key_of, value_of = (_made_ready(case, it) for it in (inputs.key, inputs.value))

        def run() -> torch.Tensor:
            key, value = key_of().to(dtype), value_of().to(dtype)
            if kind != "formula":
                out = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=kind == "operator")
                return out.reshape(*shape[:3], -1)
            scores = query * scale @ key.mT
            if mask is not None:
                scores.masked_fill_(~mask, -torch.inf)
            return (scores.softmax(-1) @ value).reshape(*shape[:3], -1)

        return _call(case, run)


def _forward(prepare: Prepare, case: Case, inputs: Inputs) -> Call:
    if not case.is_plain:
        raise Redundant
    return _call(case, prepare(case, inputs, tensors(case, inputs), None))


def _backward(kernel: SDPBackend, prepare: Prepare, case: Case, inputs: Inputs) -> Call:
    """The gradients alone, by one `kernel`: the graph is kept, and with it what they are computed from."""
    if kernel == SDPBackend.MATH:
        check_scores_fit(case)
    with torch.inference_mode(False):
        leaves = [*tensors(case, inputs)] + ([] if inputs.bias is None else [own(inputs.bias)])
        for leaf in leaves:
            leaf.requires_grad_()
        query, key, value, *bias = leaves
        with sdpa_kernel(kernel):
            out = prepare(case, inputs, (query, key, value), *bias or (None,))()
        given = own(inputs.grad_out_bhsd(case)).reshape(out.shape)

    def run() -> tuple[torch.Tensor, ...]:
        with torch.inference_mode(False):
            return torch.autograd.grad(out, leaves, given, retain_graph=True)

    return Call(run, lambda: joined(map(as_numpy, run())))


def _recurrence(step: torch_recurrent.Advance, case: Case, inputs: Inputs) -> Call:
    if case.dtype != case.compute_dtype or case.heads != case.kv_heads or inputs.state is None:
        raise Unable("the formula is written for float32 and float64 without grouped heads")
    gates: Any = (None if it is None else own(it) for it in inputs.gates(case))
    given: Any = (*tensors(case, inputs), *gates, own(inputs.state))

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return torch_recurrent.attend(step, *given)

    return Call(run, lambda: joined(map(as_numpy, run())))


def _made_ready(case: Case, given: np.ndarray | Stored) -> Callable[[], torch.Tensor]:
    """What gives keys or values ``(B, K, S, dim)``: appended to, gathered or decoded at each call."""
    if not isinstance(given, Stored):
        if not case.step:
            array = own(given)
            return lambda: array
        cache, place = own(given), torch.arange(case.len_k - case.len_q, case.len_k)
        new = cache[:, :, place]
        cache[:, :, place] = 0
        return lambda: cache.index_copy_(2, place, new)
    if case.step:
        raise Unable("no step over int8 or pages")
    data = own(given.data)
    scale = None if given.scale is None else own(given.scale)
    table = None if given.table is None else own(given.table)

    def gathered(pages: torch.Tensor) -> torch.Tensor:
        if table is None:
            return pages
        return pages[table].transpose(1, 2).reshape(case.batch, case.kv_heads, case.len_k, -1)

    def ready() -> torch.Tensor:
        rows = gathered(data)
        if scale is None:
            return rows
        each = gathered(scale)
        if rows.shape[-1] % INT8_GROUP:
            return rows * each.repeat_interleave(INT8_GROUP, -1)[..., : rows.shape[-1]]
        return (rows.view(*each.shape, INT8_GROUP) * each[..., None]).flatten(-2)

    return ready


def _mask(case: Case, inputs: Inputs) -> torch.Tensor | None:
    mask = inputs.score_mask(case)
    return None if mask is None else own(mask)


def _masked(bias: torch.Tensor, case: Case, inputs: Inputs) -> torch.Tensor:
    """A bias that is differentiated, as `_mask` gives others."""
    bias = bias.reshape(1, -1, case.len_q, case.len_k)
    allowed = inputs.allowed(case)
    return bias if allowed is None else bias.masked_fill(~own(allowed), -torch.inf)


def _call(case: Case, run: Any) -> Call:
    shape = (case.batch, case.heads, case.len_q, case.value_dim)
    return Call(run, lambda: as_numpy(run()).reshape(shape))


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """`tensor` as an array; NumPy has no bfloat16."""
    return tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
