"""`gated_linear_attention`, whose state decays and is corrected by the delta rule, and its gradients."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from fastattn._api.prepared import forget_oldest
from fastattn._call.arguments import (
    as_array,
    check_bool,
    check_finite,
    check_key_lengths,
    check_wrt,
    host_numbers,
    is_swapped,
)
from fastattn._call.gradients import as_given
from fastattn._call.normalize import as_inputs, as_result, naming_shapes, room_for_out
from fastattn._call.options import refusing
from fastattn._call.recurrent import DIFFERENTIABLE, RecurrentBackward, RecurrentCall, RecurrentGradients
from fastattn._machine.device import host_array, in_library_of, on_host
from fastattn._machine.host import check_threads_of_call
from fastattn.backends.registry import function
from fastattn.masks.arguments import broadcasts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Generic, TypedDict, Unpack

    from numpy.typing import ArrayLike

    from fastattn._call.options import BackendName, Flag, LayoutName, No, Yes

    class _Options(TypedDict, total=False):
        decay: ArrayLike | None
        beta: ArrayLike | None
        scale: float | None
        key_lengths: ArrayLike | None
        state: ArrayLike | None
        layout: LayoutName
        num_threads: int | None
        backend: BackendName | None

    class _ForwardOptions(_Options, Generic[Flag], total=False):
        return_state: Flag
        out: np.ndarray | None

    class _BackwardOptions(_Options, total=False):
        grad_state: ArrayLike | None


@overload
def gated_linear_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, **options: Unpack[_ForwardOptions[No]]
) -> np.ndarray: ...
@overload
def gated_linear_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, **options: Unpack[_ForwardOptions[Yes]]
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def gated_linear_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, **options: Unpack[_ForwardOptions[bool]]
) -> np.ndarray | tuple[np.ndarray, np.ndarray]: ...
@refusing
def gated_linear_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    decay: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    scale: float | None = None,
    key_lengths: ArrayLike | None = None,
    state: ArrayLike | None = None,
    return_state: bool = False,
    layout: LayoutName = "bhsd",
    out: np.ndarray | None = None,
    num_threads: int | None = None,
    backend: BackendName | None = None,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """Causal linear attention whose state decays or is corrected by the delta rule, in linear time.

    Each token adds the product of its key and its value to a state, which decays before, and each query
    reads the state of its own token. Letters as in `attention`, with ``L`` tokens.

    Parameters
    ----------
    query, key, value : array_like, shapes (..., H, L, D), (..., K, L, D) and (..., K, L, E)
        As in `attention`, but on the host. Query head ``h`` reads key/value head ``h // (H // K)``.
    decay : array_like, shape (..., K, L) or (..., K, L, D), optional
        Natural logarithm of the factor that a token's state, or each of its rows, is multiplied by; at most
        0 for a state that decays, -inf forgets it. None: 1. Broadcasts to its shape; as many axes as `key`
        say that it is one of the rows.
    beta : array_like, shape (..., K, L), optional
        The rate of the delta rule: a token writes so much of the difference between its value and what the
        state answers to its key. None: the value itself is added.
    scale : float, optional
        Of the results; ``1 / sqrt(D)`` when not given.
    key_lengths : array_like of int, optional
        Broadcasts to the leading batch axes; keys, values, decays and rates of tokens at or past it are never
        read, and queries there read the state of the tokens before.
    state : array_like, shape (..., K, D, E), optional
        The state before the first token; zeros when not given. It is not changed.
    return_state : bool, default False
        Also return the state after the last token.
    layout : {"bhsd", "bshd"}, default "bhsd"
        "bshd": query, key, value and the result are ``(..., L, heads, dim)``, `decay` and `beta`
        ``(..., L, K)``, and a `decay` of rows ``(..., L, K, D)``.
    out, num_threads, backend
        As in `attention`; "cython" and "reference" can run it.

    Returns
    -------
    out : ndarray, shape (..., H, L, E)
        In the dtype that query, key and value promote to; C-contiguous, or `out`.
    state : ndarray, shape (..., K, D, E)
        When asked for; in float32, or float64 where that is the dtype of the computation.

    Raises
    ------
    TypeError
        A dtype that `attention` does not take; arrays on a GPU.
    ValueError
        Shapes that do not fit, `key_lengths` outside ``0..L``.
    BackendError
        A `backend` that cannot run it.

    Notes
    -----
    The same in NumPy, for one head, with ``g`` the decays of its tokens, of shape ``(L, 1)`` or ``(L, D)``::

        for t in range(L):
            S = np.exp(g[t])[:, None] * S
            u = v[t] if beta is None else beta[t] * (v[t] - k[t] @ S)
            S = S + np.outer(k[t], u)
            out[t] = scale * (q[t] @ S)

    Models of the family, by their gates: linear attention has none; RetNet [1]_ one `decay` of each head,
    ``(..., K, 1)``; Mamba-2 [2]_ a `decay` ``(..., K, L)``; GLA [3]_ one ``(..., K, L, D)``; DeltaNet [4]_
    `beta` alone; Gated DeltaNet [5]_ `beta` and a `decay` ``(..., K, L)``; Kimi Delta Attention [6]_ `beta`
    and a `decay` ``(..., K, L, D)``.

    Some tokens are worked on at once by products of matrices, [5]_, section 3.3; the triangular system of
    the delta rule is solved by substitution. Cut anywhere, with the state passed on, the result is the same
    to rounding. The bits depend on neither the number of threads nor the other items. A number that is NaN
    or inf reaches later tokens of its own head and item only. Products are in the dtype of the computation,
    and so is the state of a call of up to 4 tokens, or of the reference; of others it is in float64 while the
    call runs. Accuracy, memory: docs/promises.md.

    References
    ----------
    .. [1] Sun et al., "Retentive Network: A Successor to Transformer for Large Language Models", 2023.
    .. [2] Dao and Gu, "Transformers are SSMs", ICML 2024.
    .. [3] Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", ICML 2024.
    .. [4] Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length",
       NeurIPS 2024.
    .. [5] Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", ICLR 2025.
    .. [6] Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025.

    Examples
    --------
    >>> import numpy as np
    >>> import fastattn
    >>> rng = np.random.default_rng(0)
    >>> query, key, value = rng.standard_normal((3, 2, 4, 100, 16), dtype=np.float32)
    >>> key /= np.linalg.norm(key, axis=-1, keepdims=True)
    >>> decay = -rng.random((2, 4, 100), dtype=np.float32)
    >>> beta = rng.random((2, 4, 100), dtype=np.float32)
    >>> out = fastattn.gated_linear_attention(query, key, value, decay=decay, beta=beta)
    >>> out.shape
    (2, 4, 100, 16)

    The first 60 tokens, and then one at a time with the state:

    >>> def run(tokens, state=None):
    ...     q, k, v = (x[:, :, tokens] for x in (query, key, value))
    ...     g, b = (x[:, :, tokens] for x in (decay, beta))
    ...     return fastattn.gated_linear_attention(q, k, v, decay=g, beta=b, state=state, return_state=True)
    >>> first, state = run(np.s_[:60])
    >>> for t in range(60, 100):
    ...     one, state = run(np.s_[t : t + 1], state)
    >>> np.allclose(one[:, :, 0], out[:, :, -1], atol=1e-5)
    True
    """
    num_threads = check_threads_of_call(num_threads)
    arrays = query, key, value, decay, beta, state
    is_usual = key_lengths is None and out is None
    signature = _signature(arrays, scale, layout, return_state, backend) if is_usual else None
    prepared = _prepared.get(signature)
    if prepared is not None:
        call = prepared.call_of(*arrays)
        after = prepared.run(call, num_threads)
        return call.result if after is None else (call.result, after)
    check_bool(return_state, "return_state")
    options = {
        "decay": decay,
        "beta": beta,
        "scale": scale,
        "key_lengths": key_lengths,
        "state": state,
        "return_state": return_state,
        "layout": layout,
        "out": out,
    }
    call, flat = checked_call(query, key, value, options)
    run = function("gated_linear_attention", call, backend)
    if signature is not None and not flat:
        _prepare(signature, call, run, arrays, layout)
    after = run(call, num_threads)
    if call.staged is not None:
        call.result[...] = call.staged
    result = in_library_of(query, call.result) if out is None else out
    if after is None:
        return result
    return result, in_library_of(query, after[0] if flat else after)


# Prepared calls: what the signature of a call decides, kept for the next. One token takes less time than the
# checks.


class _Prepared(NamedTuple):
    run: Callable[[RecurrentCall, int | None], np.ndarray | None]
    swapped: bool
    has_columns: bool
    dtype: np.dtype
    scale: float
    return_state: bool

    def call_of(self, query: Any, key: Any, value: Any, decay: Any, beta: Any, state: Any) -> RecurrentCall:
        out = result = np.empty((*query.shape[:-1], value.shape[-1]), query.dtype)
        decay = decay if decay is None or self.has_columns else decay[..., None]
        beta = beta if beta is None else beta[..., None]
        if self.swapped:
            query, key, value, out = (x.swapaxes(-3, -2) for x in (query, key, value, out))
            decay, beta = (x if x is None else x.swapaxes(-3, -2) for x in (decay, beta))
        _, *_, dtype, scale, return_state = self
        return RecurrentCall(
            query, key, value, decay, beta, None, state, dtype, scale, return_state, out, result
        )


_prepared: dict[Any, _Prepared] = {}


def _signature(
    arrays: tuple[Any, ...], scale: Any, layout: Any, return_state: Any, backend: Any
) -> tuple[Any, ...] | None:
    """What is the same for all calls which are done alike; None for a call with unusual arguments."""
    described: list[Any] = []
    for x in arrays:
        if x is not None and type(x) is not np.ndarray:
            return None
        described.append(None if x is None else (x.dtype, x.shape, x.strides))
    is_usual = (scale is None or type(scale) is float) and type(return_state) is bool and type(layout) is str
    if not is_usual or not (backend is None or type(backend) is str):
        return None
    return (*described, scale, layout, return_state, backend)


def _prepare(
    signature: tuple[Any, ...], call: RecurrentCall, run: Any, arrays: tuple[Any, ...], layout: str
) -> None:
    """Keeps what there is to know of a call, if its arrays were taken as they are."""
    has_columns = call.decay is not None and arrays[3].ndim == arrays[1].ndim
    prepared = _Prepared(run, is_swapped(layout), has_columns, call.dtype, call.scale, call.return_state)
    again = prepared.call_of(*arrays)
    taken: Any = zip(call[:5], again[:5], strict=True)
    are_same = all(
        x is own or (x.__array_interface__ == own.__array_interface__ and x.dtype == own.dtype)
        for x, own in taken
    )
    if are_same and call.earlier is arrays[5] and call.result.dtype == again.result.dtype:
        forget_oldest(_prepared)
        _prepared[signature] = prepared


@overload
def gated_linear_attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    **options: Unpack[_BackwardOptions],
) -> RecurrentGradients[np.ndarray]: ...
@overload
def gated_linear_attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    wrt: Iterable[str],
    **options: Unpack[_BackwardOptions],
) -> RecurrentGradients: ...
@refusing
def gated_linear_attention_backward(
    grad_out: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    grad_state: ArrayLike | None = None,
    decay: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    scale: float | None = None,
    key_lengths: ArrayLike | None = None,
    state: ArrayLike | None = None,
    layout: LayoutName = "bhsd",
    wrt: Iterable[str] = ("query", "key", "value"),
    num_threads: int | None = None,
    backend: BackendName | None = None,
) -> RecurrentGradients:
    """The gradients of a scalar that depends on `gated_linear_attention`.

    From its gradient with respect to what that returns. Letters as there.

    Parameters
    ----------
    grad_out : array_like, shape (..., H, L, E)
        The gradient with respect to `out`, in the layout of the call. Any strides, also 0.
    grad_state : array_like, shape (..., K, D, E), optional
        The gradient with respect to the state after the last token, if the scalar depends on it.
    query, key, value, decay, beta, state
    other options
        As in the forward call.
    wrt : iterable of str, default ("query", "key", "value")
        Which gradients to compute, of ``"query"``, ``"key"``, ``"value"``, ``"decay"``, ``"beta"`` and
        ``"state"``.

    Returns
    -------
    RecurrentGradients
        A named tuple ``(query, key, value, decay, beta, state)``. Each gradient has the shape and dtype of
        its argument (float64 for integers) and is C-contiguous; those that `wrt` does not name are None. A
        gradient is summed over the axes along which its argument was broadcast, and over a group's heads.

    Raises
    ------
    TypeError, ValueError
        As in `gated_linear_attention`; for a `grad_out` or `grad_state` of another shape; for a name in `wrt`
        that is unknown, or of an argument that is not given.
    BackendError
        The backend named does not compute these gradients.

    Notes
    -----
    The same in NumPy, for one head with `beta` and a `decay` of columns, with ``S[t]`` the state after token
    t, ``S[-1]`` that before the first, and ``Z = grad_state``::

        for t in reversed(range(L)):
            decayed = np.exp(g[t])[:, None] * S[t - 1]
            left = v[t] - k[t] @ decayed
            grad_query[t] = scale * S[t] @ grad_out[t]
            Z = Z + scale * np.outer(q[t], grad_out[t])
            answer = k[t] @ Z
            grad_beta[t] = answer @ left
            grad_value[t] = beta[t] * answer
            grad_key[t] = beta[t] * (Z @ left - decayed @ answer)
            Z = Z - np.outer(k[t], beta[t] * answer)
            grad_decay[t] = (Z * decayed).sum(1)
            Z = np.exp(g[t])[:, None] * Z
        grad_state_before = Z

    Some tokens are worked on at once by products of matrices, as in the forward call. Its results are not
    needed: states are computed again, [1]_. Of n chunks of tokens a thread holds about ``2 * sqrt(n)`` states
    at a time. The state and the gradient with respect to it are in float64 while the call runs.

    At or past `key_lengths` the gradients of keys, values, decays and rates are 0. That of a decay of -inf
    is 0. The gradient of a decay is a sum of the terms that its factor is in, and of no others which cancel:
    a strong decay costs no digits. The bits depend on neither the number of threads nor the other items. A
    number that is NaN or inf reaches gradients of its own head and item only. 16-bit gradients are rounded
    once.

    References
    ----------
    .. [1] Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.

    Examples
    --------
    >>> import numpy as np
    >>> import fastattn
    >>> rng = np.random.default_rng(0)
    >>> query, key, value, target = rng.standard_normal((4, 2, 100, 16))
    >>> decay = -rng.random((2, 100))
    >>> out = fastattn.gated_linear_attention(query, key, value, decay=decay)
    >>> gradients = fastattn.gated_linear_attention_backward(
    ...     out - target, query, key, value, decay=decay, wrt=("query", "decay")
    ... )
    >>> gradients
    RecurrentGradients(query=<float64 (2, 100, 16)>, key=None, value=None,
                       decay=<float64 (2, 100)>, beta=None, state=None)
    >>> query -= 0.1 * gradients.query
    """
    num_threads = check_threads_of_call(num_threads)
    options = {
        "decay": decay,
        "beta": beta,
        "scale": scale,
        "key_lengths": key_lengths,
        "state": state,
        "return_state": False,
        "layout": layout,
        "grad_state": grad_state,
        "wrt": wrt,
    }
    backward, flat = _backward(query, key, value, options, grad_out)
    run = function("gated_linear_attention_backward", backward, backend)
    found: RecurrentGradients = run(backward, num_threads)
    given = options | {"query": query, "key": key, "value": value}

    def as_argument(name: str, gradient: np.ndarray) -> np.ndarray:
        argument = on_host(given[name])
        is_gate_of_token = name in ("decay", "beta") and argument.ndim + flat < gradient.ndim
        swapped = layout == "bshd" and not flat and name != "state"
        found = as_given(gradient, argument[..., None] if is_gate_of_token else argument, swapped)
        return in_library_of(query, found.reshape(argument.shape))

    return RecurrentGradients(
        *(None if x is None else as_argument(name, x) for name, x in found._asdict().items())
    )


def _checked(
    query: Any, key: Any, value: Any, options: dict[str, Any], grad_out: Any = None
) -> tuple[RecurrentCall, bool]:
    """The call, whose result is `grad_out` where that is given, and whether the arrays are those of one head
    without an axis."""
    given = ((query, "query"), (key, "key"), (value, "value"))
    arrays: Any = (host_array(as_array(x, name), name) for x, name in given)
    swapped, scale, key_lengths = is_swapped(options["layout"]), options["scale"], options["key_lengths"]
    inputs: Any = as_inputs(*arrays, swapped=swapped)
    lead, _, L, S = inputs.sizes
    if L != S:
        raise ValueError(f"query, key and value must have the same length, got {L} and {S}")
    K, D, E = inputs.key.shape[-3], inputs.key.shape[-1], inputs.value.shape[-1]
    flat, dtype = inputs.flat, inputs.dtype
    swapped = swapped and not flat
    tokens = (*lead, L, K) if swapped else (*lead, K, L)

    def gate(name: str, per_column: bool) -> np.ndarray | None:
        """``(*lead, K, L, 1)`` or ``(*lead, K, L, D)``."""
        if options[name] is None:
            return None
        array = host_numbers(options[name], name)
        has_columns = per_column and array.ndim + flat > len(tokens)
        x, whole = (array, (*tokens, D)) if has_columns else (array[..., None], (*tokens, 1))
        x = x[None] if flat else x
        if not broadcasts(x.shape, whole):
            expected = f"{tokens[flat:]} or {(*tokens, D)[flat:]}" if per_column else tokens[flat:]
            raise ValueError(f"{name} must broadcast to {expected}, got {array.shape}")
        x = _spread(x.astype(dtype, copy=False), whole)
        return x.swapaxes(-3, -2) if swapped else x

    decay, beta = gate("decay", True), gate("beta", False)
    lengths = None if key_lengths is None else _spread(check_key_lengths(key_lengths, lead, L), lead)
    earlier = _state(options["state"], "state", (*lead, K, D, E), flat, dtype)
    staged = None
    if grad_out is None:
        reads = {"decay": decay, "beta": beta, "state": earlier}
        result, staged, out = room_for_out(inputs, options.get("out"), reads)
    else:
        result = out = as_result(host_array(as_array(grad_out, "grad_out"), "grad_out"), "grad_out", inputs)
    call = RecurrentCall(
        inputs.query,
        inputs.key,
        inputs.value,
        decay,
        beta,
        lengths,
        earlier,
        dtype,
        1 / sqrt(D) if scale is None else check_finite(scale, "scale"),
        options["return_state"],
        out,
        result,
        staged,
    )
    return call, flat


checked_call = naming_shapes(_checked)


@naming_shapes
def _backward(
    query: Any, key: Any, value: Any, options: dict[str, Any], grad_out: Any
) -> tuple[RecurrentBackward, bool]:
    """The call for gradients, and whether the arrays are those of one head without an axis."""
    call, flat = _checked(query, key, value, options, grad_out)
    names = check_wrt(options["wrt"], DIFFERENTIABLE)
    for name in names:
        if name in options and options[name] is None:
            raise ValueError(f"wrt names {name}, which is not given")
    shape = (*call.key.shape[:-2], call.key.shape[-1], call.value.shape[-1])
    grad_state = _state(options["grad_state"], "grad_state", shape, flat, call.dtype)
    return RecurrentBackward(call, grad_state, frozenset(names)), flat


def _state(given: Any, name: str, shape: tuple[int, ...], flat: bool, dtype: np.dtype) -> np.ndarray | None:
    """A state, or the gradient with respect to one, for all items."""
    if given is None:
        return None
    array = host_numbers(given, name)
    held = array[None] if flat else array
    if held.shape[-3:] != shape[-3:] or not broadcasts(held.shape, shape):
        raise ValueError(f"{name} must have shape {shape[flat:]}, got {array.shape}")
    return np.ascontiguousarray(_spread(held, shape), dtype)


def _spread(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """`numpy.broadcast_to`, which takes 5 us, where there is anything to do."""
    return array if array.shape == shape else np.broadcast_to(array, shape)
