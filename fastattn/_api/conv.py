"""`causal_conv1d`: the short convolution that recurrent layers have before their attention."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from fastattn._call.arguments import as_shape, check_bool, computed_in, host_numbers, promote
from fastattn._call.conv import ConvolutionCall
from fastattn._call.normalize import naming_shapes
from fastattn._call.options import refusing
from fastattn._call.problem import FLOAT32, FLOAT64
from fastattn._machine.device import in_library_of
from fastattn._machine.host import check_threads_of_call
from fastattn.backends.registry import function
from fastattn.masks.arguments import broadcasts

if TYPE_CHECKING:
    from typing import Generic, Literal, TypedDict, Unpack

    from numpy.typing import ArrayLike

    from fastattn._call.options import BackendName, Flag, No, Yes

    Activation = Literal["silu", "swish"]

    class _Options(TypedDict, Generic[Flag], total=False):
        activation: Activation | None
        state: ArrayLike | None
        return_state: Flag
        num_threads: int | None
        backend: BackendName | None


@overload
def causal_conv1d(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, **options: Unpack[_Options[No]]
) -> np.ndarray: ...
@overload
def causal_conv1d(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, **options: Unpack[_Options[Yes]]
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def causal_conv1d(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, **options: Unpack[_Options[bool]]
) -> np.ndarray | tuple[np.ndarray, np.ndarray]: ...
@refusing
def causal_conv1d(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation | None = None,
    state: ArrayLike | None = None,
    return_state: bool = False,
    num_threads: int | None = None,
    backend: BackendName | None = None,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """Depthwise convolution over time that reads no later token: of each channel by itself.

    Mamba, Gated DeltaNet and Kimi Linear have it before their recurrent attention. ``C`` channels, ``L``
    tokens, ``W`` the width of the convolution.

    Parameters
    ----------
    x : array_like, shape (..., C, L)
        On the host. Of an array ``(..., L, C)`` give the view ``x.swapaxes(-1, -2)``.
    weight : array_like, shape (C, W)
        The last column is the factor of a token itself. Of the weights ``(C, 1, W)`` of a convolution layer
        give ``weight[:, 0]``.
    bias : array_like, shape (C,), optional
        Added to the products.
    activation : {None, "silu", "swish"}
        "silu" and "swish" are two names of ``y / (1 + exp(-y))``, which each sum ``y`` becomes.
    state : array_like, shape (..., C, W - 1), optional
        The tokens before x, in order; zeros when not given. Leading axes broadcast. It is not changed.
    return_state : bool, default False
        Also return the last ``W - 1`` tokens, with those of `state` where x has fewer.
    num_threads, backend
        As in `attention`; "cython" and "reference" can run it.

    Returns
    -------
    out : ndarray, shape (..., C, L)
        In the dtype that x and weight promote to. Its memory is in the order of x: contiguous as
        ``(..., L, C)`` where the channels of x are closer in memory than its tokens, else as
        ``(..., C, L)``.
    state : ndarray, shape (..., C, W - 1)
        When asked for; in the dtype of `out`.

    Raises
    ------
    TypeError
        A dtype that `attention` does not take; arrays on a GPU.
    ValueError
        Shapes that do not fit; an `activation` that is none of these.
    BackendError
        A `backend` that cannot run it.

    Notes
    -----
    The same in NumPy::

        padded = np.concatenate((state, x), axis=-1)
        y = bias[:, None] + sum(weight[:, j, None] * padded[..., j : j + L] for j in range(W))
        out = y / (1 + np.exp(-y)) if activation else y

    float32 and float64 are computed in their own precision, 16-bit types in float32 with one rounding at the
    end. The sums have a fixed order: cut anywhere, with the state passed on, the bits are the same. They
    depend on neither the number of threads, the other items nor the layout of x. A NaN or inf reaches the
    ``W`` tokens of its own channel that read it. Where the sum is inf or -inf, the activation has its limits,
    inf and -0.

    x is read where it is, without a copy, where its channels or its tokens are contiguous and it has the
    dtype of the result. The names are those of the package causal_conv1d [1]_; the operator
    CausalConvWithState of ONNX is the same with weights ``(C, 1, W)``.

    References
    ----------
    .. [1] Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", COLM 2024,
       figure 3; https://github.com/Dao-AILab/causal-conv1d.

    Examples
    --------
    >>> import numpy as np
    >>> import fastattn
    >>> rng = np.random.default_rng(0)
    >>> tokens = rng.standard_normal((2, 100, 64), dtype=np.float32)  # (batch, tokens, channels)
    >>> weight = rng.standard_normal((64, 4), dtype=np.float32)
    >>> x = tokens.swapaxes(-1, -2)
    >>> out = fastattn.causal_conv1d(x, weight, activation="silu")
    >>> out.shape
    (2, 64, 100)

    The first 60 tokens, and then one at a time with the state:

    >>> def run(x, state=None):
    ...     return fastattn.causal_conv1d(x, weight, activation="silu", state=state, return_state=True)
    >>> first, state = run(x[..., :60])
    >>> for t in range(60, 100):
    ...     one, state = run(x[..., t : t + 1], state)
    >>> np.array_equal(one[..., 0], out[..., -1])
    True
    """
    num_threads = check_threads_of_call(num_threads)
    check_bool(return_state, "return_state")
    call, flat = _checked(x, weight, bias, activation, state)
    function("causal_conv1d", call, backend)(call, num_threads)
    out = in_library_of(x, call.out[0] if flat else call.out)
    if not return_state:
        return out
    after = _last_tokens(call)
    return out, in_library_of(x, after[0] if flat else after)


@partial(naming_shapes, names=("x", "weight"))
def _checked(x: Any, weight: Any, bias: Any, activation: Any, state: Any) -> tuple[ConvolutionCall, bool]:
    """The call, with a leading axis at least, and whether it was added."""
    x, weight = host_numbers(x, "x"), host_numbers(weight, "weight")
    if activation is not None and activation not in ("silu", "swish"):
        raise ValueError(f'activation must be None, "silu" or "swish", got {activation!r}')
    if x.ndim < 2:
        raise ValueError("x must have shape (..., C, L)")
    flat = x.ndim == 2
    x = x[None] if flat else x
    *lead, C, L = x.shape
    if weight.ndim != 2 or weight.shape[0] != C or not weight.shape[1]:
        hint = "; say weight[:, 0]" if weight.ndim == 3 and weight.shape[:2] == (C, 1) else ""
        hint = "; say x.swapaxes(-1, -2)" if weight.ndim == 2 and weight.shape[0] == L else hint
        raise ValueError(f"weight must have shape (C, W) with C = {C} channels of x and W > 0{hint}")
    dtype = x.dtype if x.dtype == weight.dtype in (FLOAT32, FLOAT64) else promote(x=x, weight=weight)
    computed = computed_in(dtype)
    along_channels = C > 1 and (L == 1 or abs(x.strides[-2]) < abs(x.strides[-1]))

    def in_order(array: np.ndarray) -> np.ndarray:
        """An array ``(*lead, C, n)`` with the memory of a call, a view where it has that already."""
        rows = array.swapaxes(-1, -2) if along_channels else array
        if rows.dtype != dtype or (rows.strides[-1] != rows.itemsize and rows.shape[-1] > 1):
            rows = np.ascontiguousarray(rows, dtype)
        return rows.swapaxes(-1, -2) if along_channels else rows

    def empty(n: int) -> np.ndarray:
        """The same, to be filled."""
        if along_channels:
            return np.empty((*lead, n, C), dtype).swapaxes(-1, -2)
        return np.empty((*lead, C, n), dtype)

    own = (*lead, C, weight.shape[1] - 1)
    if state is None:
        earlier = empty(own[-1])
        earlier[...] = 0
    else:
        earlier = host_numbers(state, "state")
        held = earlier[None] if flat else earlier
        if held.shape != own:
            if held.shape[-2:] != own[-2:] or not broadcasts(held.shape, own):
                raise ValueError(f"state must have shape {own[flat:]}, got {earlier.shape}")
            held = np.broadcast_to(held, own).copy()
        earlier = in_order(held)
    if bias is not None:
        bias = as_shape(host_numbers(bias, "bias"), "bias", (C,)).astype(computed, copy=False)
    call = ConvolutionCall(
        in_order(x),
        weight.astype(computed, copy=False),
        bias,
        earlier,
        along_channels,
        activation is not None,
        empty(L),
    )
    return call, flat


def _last_tokens(call: ConvolutionCall) -> np.ndarray:
    """As many as the call has before x."""
    n, length = call.earlier.shape[-1], call.x.shape[-1]
    after = np.empty_like(call.earlier)
    after[..., : max(n - length, 0)] = call.earlier[..., length:]
    after[..., max(n - length, 0) :] = call.x[..., max(length - n, 0) :]
    return after
