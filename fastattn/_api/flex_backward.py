"""`flex_attention_backward`: the gradients of `flex_attention`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import numpy as np

from fastattn._api.backward import differentiate
from fastattn._api.flex import as_aux, as_mod, check_functions, function_mask, mask_of
from fastattn._call.backward import normalize_backward
from fastattn._call.gradients import FlexGradients, as_given
from fastattn._call.options import complete, public
from fastattn._machine.device import host_array, in_library_of, on_host

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Unpack

    from numpy.typing import ArrayLike

    from fastattn._call.options import FlexBackwardOptions


@overload
def flex_attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    **options: Unpack[FlexBackwardOptions],
) -> FlexGradients[np.ndarray]: ...
@overload
def flex_attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    wrt: Iterable[str],
    **options: Unpack[FlexBackwardOptions],
) -> FlexGradients: ...
@public("G")
def flex_attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *extra: Any,
    **options: Any,
) -> FlexGradients:
    """The gradients of a scalar that depends on `flex_attention`, from its gradient with respect to `out`.

    Letters as in `attention`.

    Parameters
    ----------
    grad_out : array_like, shape (..., H, L, E)
        The gradient with respect to `out`, in the layout of the call. Any strides, also 0.
    out, lse : array_like, shapes (..., H, L, E) and (..., H, L)
        What the forward call returned with ``return_lse=True``.
    score_mod, mask_mod, block_mask, aux
        As in the forward call. The derivative of `score_mod` is found from its code, see below.
    score_grad : function, optional
        ``score_grad(score, b, h, q_idx, kv_idx, *aux)`` is the derivative of ``score_mod(score, ...)`` in the
        score, in the place of the one found.
    grad_lse : array_like, shape (..., H, L), optional
        The gradient with respect to `lse`, if the scalar depends on it.
    query, key, value
    other options
        As in the forward call. With a `score_mod` the backend "cython" computes gradients.
    wrt : iterable of str, default ("query", "key", "value")
        Which gradients to compute, of ``"query"``, ``"key"``, ``"value"``, ``"bias"``, ``"sinks"`` and
        ``"aux"``.

    Returns
    -------
    FlexGradients
        A named tuple ``(query, key, value, bias, sinks, aux)``, as of `attention_backward`. `aux` is a tuple
        with one for each of `aux`: an array of its shape and dtype, for a number without axes; None for
        integers and bools. What `mask_mod` reads adds nothing.

    Raises
    ------
    TypeError, ValueError, IndexError, BackendError
        As in `flex_attention` and in `attention_backward`.
    TypeError
        `score_mod` does something that has no derivative here: the message names the line. For that in the
        score, `score_grad` is the way out; `aux` needs a `score_mod` that can be derived.

    Notes
    -----
    `score_mod` is compiled again, with numbers that carry a derivative. It may use operators, ``abs``,
    ``min``, ``max``, ``pow``, comparisons, ``if``, loops, conversions, ``np.where``; of `math` and `numpy`
    powers, exponential and trigonometric functions and their inverses, ``erf`` and ``logaddexp``; but not
    ``gamma`` and ``lgamma``, nor sums over a whole array that a gradient is asked for.

    At kinks the derivatives are those of PyTorch: 0 of ``abs(x)`` at 0, a half for each of two equal operands
    of ``min`` and ``max``, inf of ``sqrt(x)`` at 0. ``if``, ``np.where``, ``min`` and ``max`` have that of
    the operand that they choose; a NaN in the other one is not seen. What rounds or compares is constant:
    ``//``, ``floor``, ``int``, ``sign``. Masked keys contribute 0, and so do keys whose weight is 0, whatever
    the functions return for them.

    For `aux` the function is evaluated once for each element of these that it reads, and for each number.
    The sums are in float64, with up to 64 partial sums of each, in 32 MB or twice the size of `aux`; there
    are none for ``bias[b, h, q_idx, kv_idx]``, as no two scores share an element. Captured arrays and numbers
    have no gradient.

    Determinism: the same bits on any number of threads, for `aux` too. docs/promises.md says more.

    References
    ----------
    .. [1] Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels",
       2024.
    .. [2] Griewank and Walther, "Evaluating Derivatives", 2008, chapter 3: forward mode.

    Examples
    --------
    A learned bias for each head and distance, and its gradient:

    >>> import numpy as np
    >>> import fastattn
    >>> def by_distance(score, b, h, q_idx, kv_idx, table):
    ...     return score + table[h, min(abs(q_idx - kv_idx), 15)]
    >>> query, key, value, target = np.random.default_rng(0).standard_normal((4, 2, 50, 8))
    >>> options = {"score_mod": by_distance, "aux": (np.zeros((2, 16)),), "causal": True}
    >>> out, lse = fastattn.flex_attention(query, key, value, return_lse=True, **options)
    >>> gradients = fastattn.flex_attention_backward(
    ...     out - target, query, key, value, out, lse, wrt=("query", "aux"), **options
    ... )
    >>> gradients
    FlexGradients(query=<float64 (2, 50, 8)>, key=None, value=None, bias=None, sinks=None,
                  aux=(<float64 (2, 16)>,))
    """
    completed = complete("G", flex_attention_backward, options, extra)
    arrays = query, key, value
    outputs: dict[str, Any] = {"grad_out": grad_out, "out": out, "lse": lse}
    given = completed | {"query": query, "key": key, "value": value}
    aux = as_aux(completed["aux"])
    for i, x in enumerate(aux):
        host_array(x, f"aux[{i}]")
    score, slope, allowed = (as_mod(completed[name], aux) for name in ("score_mod", "score_grad", "mask_mod"))
    if score is None and slope is not None:
        raise ValueError("score_grad is the derivative of score_mod, which is not given")
    check_functions(aux, score_mod=score, score_grad=slope, mask_mod=allowed)
    completed |= {"mask": mask_of(*arrays, completed), "aux": aux}
    backward = normalize_backward(
        *arrays, completed, **outputs, function_mask=function_mask(allowed, completed), score_mod=score
    )
    if "aux" in backward.wrt and score is None:
        raise ValueError("wrt names aux, which a score_mod reads, and there is none")
    room: tuple[np.ndarray | None, ...] = ()
    read: list[np.ndarray] = []
    if "aux" in backward.wrt:
        read = [np.asarray(on_host(x)) for x in given["aux"]]
        room = tuple(
            np.zeros(x.shape, np.float32 if of.dtype == np.float32 else np.float64)
            if x.dtype.kind == "f"
            else None
            for x, of in zip(aux, read, strict=True)
        )
    backward = backward._replace(score_grad=slope, grad_aux=room)
    found = differentiate(backward, given, completed["layout"] == "bshd")
    of_aux = None
    if "aux" in backward.wrt:
        of_aux = tuple(
            None if x is None else in_library_of(query, as_given(x, of, False))
            for x, of in zip(room, read, strict=True)
        )
    return FlexGradients(*found, of_aux)
