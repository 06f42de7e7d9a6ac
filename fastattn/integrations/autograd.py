"""`attention` for HIPS autograd: NumPy code that uses it is differentiated by ``autograd.grad``."""

from __future__ import annotations

from typing import Any

import fastattn
from fastattn._call.gradients import DIFFERENTIABLE
from fastattn._call.options import refusing
from fastattn.integrations._common import check_options, extra

with extra("autograd"):
    from autograd.extend import defvjp_argnums, primitive


@refusing
def attention(
    query: Any, key: Any, value: Any, *, bias: Any = None, sinks: Any = None, **options: Any
) -> Any:
    """`fastattn.attention`, differentiable in query, key, value, bias and sinks, in reverse mode and once.

    Shapes, options and errors are those of `fastattn.attention`, but for ``out=``, ``return_lse`` and
    ``return_weights``. Second derivatives and forward mode are a NotImplementedError. Arrays must stay as
    they are until the gradients are computed.

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
    check_options(options, "out", "return_lse", "return_weights")
    return _attention(query, key, value, bias, sinks, options, {})


@primitive
def _attention(
    query: Any, key: Any, value: Any, bias: Any, sinks: Any, options: dict[str, Any], kept: dict[str, Any]
) -> Any:
    """The outputs. `kept` receives the lse for the gradients."""
    out, kept["lse"] = fastattn.attention(
        query, key, value, bias=bias, sinks=sinks, return_lse=True, **options
    )
    return out


def _make_vjp(argnums: tuple[int, ...], out: Any, args: tuple[Any, ...], _: dict[str, Any]) -> Any:
    *arrays, options, kept = args
    others = options | {"lse": kept["lse"], "wrt": [DIFFERENTIABLE[number] for number in argnums]}

    def vjp(grad_out: Any) -> tuple[Any, ...]:
        gradients = attention_backward(grad_out, out, *arrays, others)
        return tuple(gradients[number] for number in argnums)

    return vjp


@primitive  # without a derivative of its own, so that autograd names it where one is asked for
def attention_backward(grad_out: Any, out: Any, *arrays_and_options: Any) -> Any:
    """The gradients as `fastattn.attention_backward` gives them."""
    *arrays, options = arrays_and_options
    given = dict(zip(DIFFERENTIABLE, arrays, strict=True))
    return fastattn.attention_backward(grad_out, out=out, **given, **options)


defvjp_argnums(_attention, _make_vjp)
