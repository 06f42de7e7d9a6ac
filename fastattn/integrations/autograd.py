"""`attention` and `flex_attention` for HIPS autograd: ``autograd.grad`` differentiates code with them."""

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
    return _attention(query, key, value, bias, sinks, _Call("attention", options))


@refusing
def flex_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    score_mod: Any = None,
    aux: Any = (),
    bias: Any = None,
    sinks: Any = None,
    **options: Any,
) -> Any:
    """`fastattn.flex_attention`, differentiable likewise, and in the arrays and numbers of `aux`.

    As `attention` here. ``score_grad=`` is that of `fastattn.flex_attention_backward`.

    Examples
    --------
    >>> import autograd
    >>> import numpy as np
    >>> from fastattn.integrations.autograd import flex_attention
    >>> def by_head(score, b, h, q_idx, kv_idx, factor):
    ...     return score * factor[h]
    >>> x = np.random.default_rng(0).standard_normal((2, 5, 8))
    >>> def loss(factor):
    ...     return (flex_attention(x, x, x, score_mod=by_head, aux=(factor,)) ** 2).sum()
    >>> autograd.grad(loss)(np.ones(2)).shape
    (2,)
    """
    options["score_mod"] = score_mod
    return _attention(query, key, value, bias, sinks, _Call("flex_attention", options), *aux)


class _Call:
    """The function of a call, its options, and its lse for the gradients."""

    lse: Any

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        check_options(options, "out", "return_lse", "return_weights")
        self.name, self.options = name, options


#: Arguments of `_attention` before those of `aux`.
_N_BEFORE_AUX = len(DIFFERENTIABLE) + 1


@primitive
def _attention(query: Any, key: Any, value: Any, bias: Any, sinks: Any, call: _Call, *aux: Any) -> Any:
    options = {name: x for name, x in call.options.items() if name != "score_grad"}
    if aux:
        options["aux"] = aux
    out, call.lse = getattr(fastattn, call.name)(
        query, key, value, bias=bias, sinks=sinks, return_lse=True, **options
    )
    return out


def _make_vjp(argnums: tuple[int, ...], out: Any, args: tuple[Any, ...], _: dict[str, Any]) -> Any:
    arrays, call, aux = args[: _N_BEFORE_AUX - 1], args[_N_BEFORE_AUX - 1], args[_N_BEFORE_AUX:]
    places = [number - _N_BEFORE_AUX for number in argnums]
    wrt = [DIFFERENTIABLE[number] for number in argnums if number < len(DIFFERENTIABLE)]
    others = call.options | {"lse": call.lse, "wrt": [*wrt, "aux"] if max(places) >= 0 else wrt}
    if aux:
        others["aux"] = aux

    def vjp(grad_out: Any) -> tuple[Any, ...]:
        gradients = attention_backward(grad_out, out, *arrays, call.name, others)
        return tuple(
            gradients.aux[place] if place >= 0 else gradients[number]
            for number, place in zip(argnums, places, strict=True)
        )

    return vjp


@primitive  # without a derivative of its own, so that autograd names it where one is asked for
def attention_backward(grad_out: Any, out: Any, *arrays_and_options: Any) -> Any:
    """The gradients as `fastattn.attention_backward` or `fastattn.flex_attention_backward` gives them."""
    *arrays, name, options = arrays_and_options
    given = dict(zip(DIFFERENTIABLE, arrays, strict=True))
    return getattr(fastattn, f"{name}_backward")(grad_out, out=out, **given, **options)


defvjp_argnums(_attention, _make_vjp)
