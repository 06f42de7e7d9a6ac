"""`attention` for HIPS autograd: NumPy code that uses it is differentiated by ``autograd.grad``."""

from __future__ import annotations

from typing import Any

from autograd.extend import defvjp_argnums, primitive

import fastattn

_DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")


def attention(
    query: Any, key: Any, value: Any, *, bias: Any = None, sinks: Any = None, **options: Any
) -> Any:
    """`fastattn.attention`, differentiable in query, key, value, bias and sinks, in reverse mode and once.

    Shapes, options and errors are those of `fastattn.attention`, but for ``out=``, ``return_lse`` and
    ``return_weights``.

    Examples
    --------
    >>> import autograd
    >>> import numpy as np
    >>> from fastattn.integrations.autograd import attention
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 2, 5, 8))
    >>> gradient = autograd.grad(lambda query: attention(query, key, value, causal=True).sum())(query)
    >>> gradient.shape
    (2, 5, 8)
    """
    return _attention(query, key, value, bias, sinks, options, {})


@primitive
def _attention(
    query: Any, key: Any, value: Any, bias: Any, sinks: Any, options: dict[str, Any], kept: dict[str, Any]
) -> Any:
    """The outputs; `kept` gets the lse, which the gradients need besides."""
    out, kept["lse"] = fastattn.attention(
        query, key, value, bias=bias, sinks=sinks, return_lse=True, **options
    )
    return out


def _make_vjp(argnums: tuple[int, ...], out: Any, args: tuple[Any, ...], _: dict[str, Any]) -> Any:
    *arrays, options, kept = args
    wrt = [_DIFFERENTIABLE[number] for number in argnums]

    def vjp(grad_out: Any) -> tuple[Any, ...]:
        gradients = fastattn.attention_backward(
            grad_out,
            **dict(zip(_DIFFERENTIABLE, arrays, strict=True)),
            out=out,
            lse=kept["lse"],
            wrt=wrt,
            **options,
        )
        return tuple(gradients[number] for number in argnums)

    return vjp


defvjp_argnums(_attention, _make_vjp)
