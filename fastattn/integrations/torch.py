"""`attention` on PyTorch tensors of the CPU, whose memory it reads as it is, with gradients by autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import fastattn
from fastattn.masks import Mask

_DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    mask: Mask | torch.Tensor | None = None,
    key_lengths: Any = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """`fastattn.attention` of tensors on the CPU, differentiable in query, key, value, bias and sinks.

    Shapes, options and errors are those of `fastattn.attention`, but for ``out=`` and ``return_weights``.
    Tensors of float32, float64, float16 and bfloat16 are read where they are; results are tensors.

    Returns
    -------
    out : Tensor, shape (..., H, L, E)
    lse : Tensor, shape (..., H, L)
        When asked for; differentiable as well.

    Examples
    --------
    >>> import torch
    >>> from fastattn.integrations.torch import attention
    >>> query, key, value = torch.randn(3, 2, 5, 8, requires_grad=True)
    >>> attention(query, key, value, causal=True).sum().backward()
    """
    options |= {"mask": _array(mask), "key_lengths": _array(key_lengths)}
    out, lse = _Attention.apply(options, query, key, value, bias, sinks)
    return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: dict[str, Any], *tensors: torch.Tensor | None) -> Any:
        given = dict(zip(_DIFFERENTIABLE, map(_array, tensors), strict=True))
        out, lse = map(_tensor, fastattn.attention(**given, return_lse=True, **options))
        ctx.options = options
        ctx.save_for_backward(*tensors, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> Any:
        *tensors, out, lse = ctx.saved_tensors
        given = dict(zip(_DIFFERENTIABLE, map(_array, tensors), strict=True))
        wrt = [name for name, wanted in zip(_DIFFERENTIABLE, ctx.needs_input_grad[1:], strict=True) if wanted]
        gradients = fastattn.attention_backward(
            _array(torch.zeros_like(out) if grad_out is None else grad_out),
            out=_array(out),
            lse=_array(lse),
            grad_lse=_array(grad_lse),
            wrt=wrt,
            **given,
            **ctx.options,
        )
        return None, *(None if gradient is None else _tensor(gradient) for gradient in gradients)


def _array(given: Any) -> Any:
    """A tensor as an array that shares its memory; anything else as it is."""
    if not isinstance(given, torch.Tensor):
        return given
    tensor = given.detach()
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    import ml_dtypes  # which NumPy's bfloat16 comes from

    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _tensor(array: np.ndarray) -> torch.Tensor:
    """An array as a tensor that shares its memory."""
    if array.dtype.name != "bfloat16":
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
