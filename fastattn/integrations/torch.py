"""`attention` and `flex_attention` on PyTorch tensors of the CPU, read in place, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np

import fastattn
from fastattn._call.arguments import check_bool
from fastattn._call.gradients import DIFFERENTIABLE
from fastattn._call.options import refusing
from fastattn.integrations._common import check_options, extra
from fastattn.masks import Mask

with extra("torch"):
    import torch
    from torch._C._functorch import is_batchedtensor, is_gradtrackingtensor
    from torch.autograd.forward_ad import unpack_dual


@refusing
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
    Tensors of float32, float64, float16 and bfloat16 are read where they are; results are tensors. A second
    derivative and forward mode are a NotImplementedError. ``torch.func.vmap`` makes a call for each item.
    NumPy arrays among the options must stay as they are until the gradients are computed.

    Returns
    -------
    out : Tensor, shape (..., H, L, E)
    lse : Tensor, shape (..., H, L)
        When asked for; differentiable as well.

    Raises
    ------
    TypeError
        One of the five is no tensor, a tensor is not on the CPU, or an option requires a gradient.
        `fastattn.attention` itself takes tensors of a GPU, without gradients.
    NotImplementedError
        A derivative as above, or tensors without memory, as in ``torch.export``.

    Examples
    --------
    >>> import torch
    >>> from fastattn.integrations.torch import attention
    >>> query, key, value = torch.randn(3, 2, 5, 8, requires_grad=True)
    >>> attention(query, key, value, causal=True).sum().backward()
    """
    of_call = {"query": query, "key": key, "value": value, "bias": bias, "sinks": sinks, "mask": mask}
    return _attend("attention", of_call | {"key_lengths": key_lengths}, return_lse, options)


@refusing
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    score_mod: Callable[..., object] | None = None,
    aux: Sequence[Any] = (),
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    mask: Mask | torch.Tensor | None = None,
    key_lengths: Any = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """`fastattn.flex_attention` of tensors on the CPU, differentiable likewise, and in the tensors of `aux`.

    As `attention` here, with the options and errors of `fastattn.flex_attention`. Its functions compute with
    numbers: those of `math` and `numpy`, not of `torch`. Tensors that they read are given as `aux`, beside
    arrays and numbers; those captured are refused. ``score_grad=`` is that of
    `fastattn.flex_attention_backward`, which also says what of a `score_mod` has a derivative. What a
    `mask_mod` alone reads has no gradient.

    Returns
    -------
    out, lse
        As of `attention` here.

    Raises
    ------
    TypeError
        As of `attention` here and of `fastattn.flex_attention`; in the backward pass, `score_mod` does
        something that has no derivative.
    NotImplementedError
        As of `attention` here.

    Examples
    --------
    A learned bias for each head and distance:

    >>> import torch
    >>> from fastattn.integrations.torch import flex_attention
    >>> def by_distance(score, b, h, q_idx, kv_idx, table):
    ...     return score + table[h, min(abs(q_idx - kv_idx), 15)]
    >>> x = torch.randn(2, 50, 8)
    >>> table = torch.zeros(2, 16, requires_grad=True)
    >>> out = flex_attention(x, x, x, score_mod=by_distance, aux=(table,), causal=True)
    >>> out.square().sum().backward()
    >>> table.grad.shape
    torch.Size([2, 16])
    """
    of_call = {"query": query, "key": key, "value": value, "bias": bias, "sinks": sinks, "mask": mask}
    of_call["key_lengths"] = key_lengths
    if isinstance(aux, Sequence):
        read = {f"aux[{i}]": x for i, x in enumerate(aux) if isinstance(x, torch.Tensor)}
        if score_mod is None:  # a mask has no derivative
            read = {name: x.detach() for name, x in read.items()}
        of_call |= read
        aux = tuple(None if f"aux[{i}]" in read else x for i, x in enumerate(aux))
    return _attend("flex_attention", of_call, return_lse, options | {"score_mod": score_mod, "aux": aux})


def _attend(public: str, given: dict[str, Any], return_lse: bool, options: dict[str, Any]) -> Any:
    """A call of the function of `fastattn` named so. `given` has what may be a tensor to be saved."""
    check_options(options, "out", "return_weights")
    for name in DIFFERENTIABLE:
        x = given[name]
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    for name, x in options.items():
        if name == "aux":  # its tensors are in `given`
            continue
        if isinstance(x, torch.Tensor) and (x.requires_grad or unpack_dual(x).tangent is not None):
            raise TypeError(f"attention is not differentiable in {name}, which requires a gradient")
    options |= {name: x for name, x in given.items() if x is not None and not isinstance(x, torch.Tensor)}
    # A mask is saved, too: PyTorch then notices if it is changed before the gradients are computed.
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    for name, x in tensors.items():
        if x.device.type != "cpu":
            raise TypeError(f"{name} is on {x.device}, and tensors of the CPU are taken; {name}.cpu() is one")
    # Autograd itself takes as long as a small call.
    if not _is_transformed([*tensors.values(), *options.values()]):
        found = _call(public, tensors, options | {"return_lse": return_lse})
        return tuple(map(_tensor, found)) if return_lse else _tensor(found)
    check_bool(return_lse, "return_lse")
    out, lse = _Attention.apply(public, tuple(tensors), options, *tensors.values())
    return (out, lse) if return_lse else out


def _is_transformed(given: Iterable[Any]) -> bool:
    """Whether autograd or torch.func follows one of the tensors, also in forward mode, which is refused."""
    return any(
        (x.requires_grad and torch.is_grad_enabled())
        or is_batchedtensor(x)
        or is_gradtrackingtensor(x)
        or unpack_dual(x).tangent is not None
        for x in given
        if isinstance(x, torch.Tensor)
    )


def _call(public: str, tensors: dict[str, Any], options: dict[str, Any]) -> Any:
    """What the function of `fastattn` named so returns, with tensors as arrays."""
    given = options | {name: _array(name, x) for name, x in tensors.items()}
    if of_aux := [name for name in tensors if name.startswith("aux[")]:
        read = {name: given.pop(name) for name in of_aux}
        given["aux"] = tuple(read.get(f"aux[{i}]", x) for i, x in enumerate(options["aux"]))
    if public == "flex_attention":
        given.pop("score_grad", None)  # for the gradients alone
    return getattr(fastattn, public)(**given)


def _each(
    function: Any,
    info: Any,
    in_dims: Any,
    public: str,
    names: tuple[str, ...],
    options: dict[str, Any],
    *tensors: Any,
) -> Any:
    """The rule of vmap: `function` of one item after another, so that options keep their meaning."""
    _, _, of_options, *of_tensors = in_dims

    def item(x: Any, dim: Any, number: int) -> Any:
        return x.select(dim, number) if isinstance(dim, int) else x

    if info.batch_size == 0:
        raise NotImplementedError("attention under vmap needs an item at least, got 0")
    found = [
        function.apply(
            public,
            names,
            {name: item(x, of_options[name], number) for name, x in options.items()},
            *(item(x, dim, number) for x, dim in zip(tensors, of_tensors, strict=True)),
        )
        for number in range(info.batch_size)
    ]
    results = tuple(map(torch.stack, zip(*found, strict=True)))
    return results, (0,) * len(results)


class _WithoutForwardMode(torch.autograd.Function):
    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        raise NotImplementedError("attention has gradients, but no jvp: no derivative in forward mode")


class _Attention(_WithoutForwardMode):
    @staticmethod
    def vmap(*given: Any) -> Any:
        return _each(_Attention, *given)

    @staticmethod
    def forward(public: str, names: tuple[str, ...], options: dict[str, Any], *tensors: torch.Tensor) -> Any:
        given = dict(zip(names, tensors, strict=True))
        return tuple(map(_tensor, _call(public, given, options | {"return_lse": True})))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.public, ctx.names, ctx.options, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> Any:
        wanted = ctx.needs_input_grad[3:]
        tensors = dict(zip((*ctx.names, "out", "lse"), ctx.saved_tensors, strict=True))
        tensors["grad_out"] = torch.zeros_like(tensors["out"]) if grad_out is None else grad_out
        if grad_lse is not None:
            tensors["grad_lse"] = grad_lse
        wrt = tuple(name for name, is_wanted in zip(ctx.names, wanted, strict=True) if is_wanted)
        names, options = tuple(tensors), ctx.options | {"wrt": wrt}
        gradients = iter(_AttentionBackward.apply(ctx.public, names, options, *tensors.values()))
        return None, None, None, *(next(gradients) if is_wanted else None for is_wanted in wanted)


class _AttentionBackward(_WithoutForwardMode):
    """The gradients as a function of their own: a second derivative is refused, not taken for 0."""

    @staticmethod
    def vmap(*given: Any) -> Any:
        return _each(_AttentionBackward, *given)

    @staticmethod
    def forward(public: str, names: tuple[str, ...], options: dict[str, Any], *tensors: torch.Tensor) -> Any:
        given, wrt = dict(zip(names, tensors, strict=True)), options["wrt"]
        arguments = {name.split("[")[0] for name in wrt}  # of aux[0]: aux
        found = _call(f"{public}_backward", given, options | {"wrt": arguments})._asdict()
        found |= {f"aux[{i}]": x for i, x in enumerate(found.get("aux") or ())}
        return tuple(_tensor(found[name]) for name in wrt)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise NotImplementedError("attention is differentiable once, and this asks for a second derivative")


def _array(name: str, tensor: torch.Tensor) -> Any:
    """A tensor as an array that shares its memory."""
    is_bfloat16 = tensor.dtype == torch.bfloat16
    try:
        tensor = tensor.detach().resolve_neg()
        array = tensor.view(torch.int16).numpy() if is_bfloat16 else tensor.numpy()
    except RuntimeError as error:  # a tensor without memory, as in a trace of PyTorch
        raise NotImplementedError(
            f"attention reads the memory of tensors, and here is none: {error}"
        ) from None
    except TypeError as error:
        raise TypeError(f"{name} has no array of NumPy's: {error}") from None
    if not is_bfloat16:
        return array
    with extra("torch"):
        import ml_dtypes  # which NumPy's bfloat16 comes from

    return array.view(ml_dtypes.bfloat16)


def _tensor(array: np.ndarray) -> torch.Tensor:
    """An array as a tensor that shares its memory."""
    if array.dtype.name != "bfloat16":
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
