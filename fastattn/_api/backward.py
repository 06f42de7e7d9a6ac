"""`attention_backward` and `varlen_attention_backward`: the gradients of the functions of these names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import numpy as np

from fastattn._api.prepared_gradients import keep_gradients, reuse, signature_of_gradients
from fastattn._call.arguments import as_given_bias, bias_parts
from fastattn._call.backward import normalize_backward
from fastattn._call.gradients import Gradients, as_given
from fastattn._call.options import complete, public
from fastattn._machine import host
from fastattn._machine.device import in_library_of, on_host
from fastattn.backends.registry import select
from fastattn.biases import Bias

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Unpack

    from numpy.typing import ArrayLike

    from fastattn._call.gradients import Backward
    from fastattn._call.options import BackwardOptions, VarlenBackwardOptions
    from fastattn.biases import Sums


@overload
def attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    **options: Unpack[BackwardOptions],
) -> Gradients[np.ndarray]: ...
@overload
def attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    wrt: Iterable[str],
    **options: Unpack[BackwardOptions],
) -> Gradients: ...
@public("B")
def attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *extra: Any,
    **options: Any,
) -> Gradients:
    """The gradients of a scalar that depends on `attention`, from its gradient with respect to the outputs.

    Letters as in `attention`.

    Parameters
    ----------
    grad_out : array_like, shape (..., H, L, E)
        The gradient with respect to `out`, in the layout of the call. Any strides, also 0.
    out, lse : array_like, shapes (..., H, L, E) and (..., H, L)
        What the forward call returned with ``return_lse=True``.
    grad_lse : array_like, shape (..., H, L), optional
        The gradient with respect to `lse`, if the scalar depends on it.
    query, key, value
    other options
        As in the forward call. The backends "cython" and "reference" compute gradients.
    wrt : iterable of str, default ("query", "key", "value")
        Which gradients to compute, of ``"query"``, ``"key"``, ``"value"``, ``"bias"`` and ``"sinks"``. That
        of a bias object is of its array, of a `biases.Grid` the pair of its rows and columns; those of a
        tuple, or of a sum of objects, are a tuple in its order.

    Returns
    -------
    Gradients
        A named tuple ``(query, key, value, bias, sinks)``. Each gradient has the shape and dtype of its
        argument (float64 for integers) and is C-contiguous; those that `wrt` does not name are None. A
        gradient is summed over the axes along which its argument was broadcast, and over a group's heads.

    Raises
    ------
    TypeError, ValueError
        As in `attention`; for a `grad_out`, `out`, `lse` or `grad_lse` of another shape; for a name in `wrt`
        that is unknown, or of an argument that is not given.
    BackendError
        No backend, or not the one named, computes these gradients.

    Notes
    -----
    With the weights ``P = exp(scores - lse)``, in NumPy and with its ``L * S`` memory::

        delta = (grad_out * out).sum(-1) - grad_lse
        change = P * (grad_out @ value.swapaxes(-1, -2) - delta[..., None])
        grad_bias = change
        grad_query = scale * change @ key
        grad_key = scale * change.swapaxes(-1, -2) @ query
        grad_value = P.swapaxes(-1, -2) @ grad_out
        grad_sinks = -(np.exp(sinks[:, None] - lse) * delta).sum(-1)

    and with a soft-cap ``change`` times ``1 - tanh(...)**2`` for query and key. With dropout, ``P`` in
    `grad_value` and ``grad_out @ value.swapaxes(-1, -2)`` are multiplied by ``keep / (1 - dropout)``.

    A query without any allowed key contributes 0, whatever its row of `grad_out` or `grad_lse` holds. The
    gradients of a masked key are exactly 0. NaN or inf in it, or in a row of `query` or `grad_out`, reaches
    only what the mask lets read it. 16-bit gradients are rounded once. Large scores, determinism, memory:
    docs/promises.md.

    References
    ----------
    .. [1] Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023,
       algorithm 2.

    Examples
    --------
    >>> import numpy as np
    >>> import fastattn
    >>> query, key, value, target = np.random.default_rng(0).standard_normal((4, 8, 5, 16))
    >>> out, lse = fastattn.attention(query, key, value, causal=True, return_lse=True)
    >>> gradients = fastattn.attention_backward(out - target, query, key, value, out, lse, causal=True)
    >>> gradients
    Gradients(query=<float64 (8, 5, 16)>, key=<float64 (8, 5, 16)>, value=<float64 (8, 5, 16)>,
              bias=None, sinks=None)
    >>> query -= 0.1 * gradients.query
    """
    completed = complete("B", attention_backward, options, extra)
    signature = signature_of_gradients((query, key, value), (grad_out, out, lse), completed)
    found = reuse(signature, (query, key, value), (grad_out, out, lse), completed)
    if found is not None:
        return found
    outputs: dict[str, Any] = {"grad_out": grad_out, "out": out, "lse": lse}
    backward = normalize_backward(query, key, value, completed, **outputs)
    given = completed | outputs | {"query": query, "key": key, "value": value}
    return differentiate(backward, given, completed["layout"] == "bshd", signature)


@overload
def varlen_attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None,
    **options: Unpack[VarlenBackwardOptions],
) -> Gradients[np.ndarray]: ...
@overload
def varlen_attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None,
    *,
    wrt: Iterable[str],
    **options: Unpack[VarlenBackwardOptions],
) -> Gradients: ...
@public("W")
def varlen_attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None,
    *extra: Any,
    **options: Any,
) -> Gradients:
    """The gradients of a scalar that depends on `varlen_attention`: `attention_backward` of packed documents.

    Letters as in `varlen_attention`.

    Parameters
    ----------
    grad_out : array_like, shape (T, H, E)
        The gradient with respect to `out`. Any strides, also 0.
    out, lse : array_like, shapes (T, H, E) and (H, T)
        What the forward call returned with ``return_lse=True``.
    grad_lse : array_like, shape (H, T), optional
        The gradient with respect to `lse`, if the scalar depends on it.
    query, key, value
    cu_seqlens_q, cu_seqlens_k
    other options
        As in the forward call. The backends "cython" and "reference" compute gradients.
    wrt : iterable of str, default ("query", "key", "value")
        As in `attention_backward`.

    Returns
    -------
    Gradients
        As of `attention_backward`: packed, as the arguments are. That of a `bias` or of `sinks` is summed
        over the documents that share it, and is 0 where query and key are of different ones.

    Raises
    ------
    TypeError, ValueError, BackendError
        As in `varlen_attention` and in `attention_backward`.

    Notes
    -----
    One call of `attention_backward` in which each query reads one interval of keys, which is the same as ::

        for d in range(N):
            q, k = slice(*cu_seqlens_q[d : d + 2]), slice(*cu_seqlens_k[d : d + 2])
            arrays = grad_out[q], query[q], key[k], value[k], out[q], lse[:, q]
            found = attention_backward(*arrays, layout="bshd", causal=causal, window=window)
            grad_query[q], grad_key[k], grad_value[k] = found[:3]

    to rounding. What another document holds changes no bit of a document's gradients. Pairs of different
    documents are skipped, by tiles, and nothing of size ``T * T_k`` is stored, unless the bias has it.
    Determinism: the same bits on any number of threads. docs/promises.md says more.

    References
    ----------
    .. [1] Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023,
       algorithm 2.

    Examples
    --------
    >>> import numpy as np
    >>> import fastattn
    >>> x, target = np.random.default_rng(0).standard_normal((2, 10, 2, 4))
    >>> starts = [0, 3, 8, 10]  # three documents: 3, 5 and 2 tokens
    >>> out, lse = fastattn.varlen_attention(x, x, x, starts, causal=True, return_lse=True)
    >>> gradients = fastattn.varlen_attention_backward(out - target, x, x, x, out, lse, starts, causal=True)
    >>> gradients
    Gradients(query=<float64 (10, 2, 4)>, key=<float64 (10, 2, 4)>, value=<float64 (10, 2, 4)>,
              bias=None, sinks=None)
    """
    completed = complete("W", varlen_attention_backward, options, extra)
    outputs: dict[str, Any] = {"grad_out": grad_out, "out": out, "lse": lse}
    starts = cu_seqlens_q, cu_seqlens_k
    backward = normalize_backward(query, key, value, completed, **outputs, cu_seqlens=starts)
    return differentiate(backward, completed | {"query": query, "key": key, "value": value}, True)


def differentiate(
    backward: Backward, given: dict[str, Any], swapped: bool, signature: Any = None
) -> Gradients:
    """The gradients as the caller wants them, who gave these arguments. `swapped`: their length axes stand
    before their head axes. Others of the `signature`, if there is one, are prepared with it."""
    threads = host.threads_for(given["num_threads"])
    chosen = select(backward.problem, given["backend"], gradients=True)
    threads = chosen.thread_limit(threads)
    sizes = backward.problem.sizes
    if not sizes.heads * sizes.rows * sizes.len_k:
        found = backward.zeros()
    elif prepared := None if signature is None else chosen.prepare_gradients(backward, threads):
        found = prepared.run_on(backward)
        keep_gradients(signature, backward, given, chosen, prepared, threads)
    else:
        found = chosen.differentiate(backward, threads)
    if backward.query_factors is not None and found.query is not None:
        with np.errstate(all="ignore"):
            found = found._replace(query=found.query * backward.query_factors[:, None, None])
    rows = ("query", "key", "value") if swapped else ()
    of_sums: Any = found.bias  # by `Sums`, of a backend

    def returned(gradient: np.ndarray | None, array: Any, name: str) -> Any:
        if gradient is None:
            return None
        return in_library_of(given["query"], as_given(gradient, on_host(array), name in rows))

    def of_part(part: Any, sums: Sums) -> Any:
        """The gradient of a part of the bias, or those of its arrays."""
        if not isinstance(part, Bias):
            return returned(of_sums[sums], part, "bias")
        own = part._gradients(of_sums[sums], backward.problem.score_sizes)
        gradients = [returned(*pair, "bias") for pair in zip(own, part._arrays(), strict=True)]
        return gradients[0] if len(gradients) == 1 else tuple(gradients)

    bias = given["bias"]
    of_bias = None
    if of_sums is not None:
        parts = (of_part(part, sums) for (_, part), sums in zip(bias_parts(bias), backward.bias, strict=True))
        of_bias = as_given_bias(bias, parts)
    others = {
        name: returned(getattr(found, name), given[name], name) for name in found._fields if name != "bias"
    }
    return Gradients(**others, bias=of_bias)
