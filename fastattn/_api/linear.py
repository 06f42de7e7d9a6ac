"""`linear_attention`: weights that are products of features, not a softmax, in time linear in the length.

What keys add up to is a `LinearState`. The compiled kernels run calls with features ``elu(x) + 1``, NumPy all
others. Rows whose denominators are far from 1, or whose results are nonfinite, are computed again, from
features that are relative to the largest, as random features always are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from fastattn._call.arguments import (
    as_array,
    check_bool,
    check_key_lengths,
    check_number_dtype,
    check_seed,
    count,
    is_swapped,
)
from fastattn._call.linear import LEAST, MOST, LinearCall, LinearState, RandomFeatures, each, elu_plus_one
from fastattn._call.normalize import as_inputs, naming_shapes, room_for_out
from fastattn._call.options import refusing
from fastattn._call.problem import FLOAT64, MAX_DIM
from fastattn._machine.device import host_array, in_library_of
from fastattn._machine.host import check_threads_of_call
from fastattn.backends.reference.linear import attend_again
from fastattn.backends.registry import function
from fastattn.masks.arguments import broadcasts

if TYPE_CHECKING:
    from typing import Generic, Literal, TypeAlias, TypedDict, Unpack

    from numpy.typing import ArrayLike

    from fastattn._call.options import Flag, LayoutName, No, Yes

    FeatureMap: TypeAlias = "Literal['elu+1'] | Callable[[np.ndarray], ArrayLike]"

    class _Options(TypedDict, Generic[Flag], total=False):
        feature_map: FeatureMap
        causal: bool
        key_lengths: ArrayLike | None
        state: LinearState | None
        layout: LayoutName
        out: np.ndarray | None
        return_state: Flag
        num_threads: int | None


@overload
def linear_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, **options: Unpack[_Options[No]]
) -> np.ndarray: ...
@overload
def linear_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, **options: Unpack[_Options[Yes]]
) -> tuple[np.ndarray, LinearState]: ...
@overload
def linear_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, **options: Unpack[_Options[bool]]
) -> np.ndarray | tuple[np.ndarray, LinearState]: ...
@refusing
def linear_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    feature_map: FeatureMap = "elu+1",
    causal: bool = False,
    key_lengths: ArrayLike | None = None,
    state: LinearState | None = None,
    layout: LayoutName = "bhsd",
    out: np.ndarray | None = None,
    return_state: bool = False,
    num_threads: int | None = None,
) -> np.ndarray | tuple[np.ndarray, LinearState]:
    """Attention whose weights are products of features of queries and keys, in time linear in the lengths.

    Letters as in `attention`, and ``M`` features.

    Parameters
    ----------
    query, key, value : array_like, shapes (..., H, L, D), (..., K, S, D) and (..., K, S, E)
        As in `attention`, but on the host.
    feature_map : {"elu+1"} or callable, default "elu+1"
        ``"elu+1"`` is ``x + 1`` above 0 and ``exp(x)`` below [1]_, with ``M = D``. What `random_features`
        gives approximates softmax attention [2]_. Any other callable gets rows ``(..., heads, n, D)`` of
        queries or of keys, in the dtype of the computation and ``n`` at a time, and returns
        ``(..., heads, n, M)``: each row a function of its row alone. It may be called for the same rows
        again. Features are best not negative.
    causal : bool, default False
        Key ``j <= i``, for ``L = S``. The keys of `state` stand before all.
    key_lengths : array_like of int, optional
        Broadcasts to the leading batch axes; keys at or past it are never read.
    state : LinearState, optional
        That of earlier keys, which each query reads as well, with or without `causal`. Its leading axes
        broadcast. It is not changed.
    layout, out, num_threads
        As in `attention`. Rows of a feature map and sums of a state have the same axes in both layouts. Only
        features ``"elu+1"`` are computed on several threads.
    return_state : bool, default False
        Also return the state after all keys.

    Returns
    -------
    out : ndarray, shape (..., H, L, E)
        In the dtype that query, key and value promote to, in the given layout; C-contiguous, or `out`.
    state : LinearState
        When asked for.

    Raises
    ------
    TypeError
        A dtype that `attention` does not take; a feature_map that is no callable, or whose result is no array
        of numbers; a state that is none; arrays on a GPU.
    ValueError
        Shapes that do not fit, ``causal=True`` with ``L != S``, `key_lengths` outside ``0..S``, an unknown
        name of a feature map, features whose shape is not that of their rows, a state of other sizes or of
        another kind of features.

    Notes
    -----
    The same in NumPy::

        weights = phi(query) @ phi(key).swapaxes(-1, -2)
        if causal:
            weights = np.tril(weights)
        out = weights @ value / weights.sum(-1, keepdims=True)

    Without `causal` the products are taken in the order ``phi(query) @ (phi(key).T @ value)``. With it, rows
    are worked on in chunks: within a chunk by the formula above, and with all earlier keys by their sums.
    Cutting a sequence and passing the state on gives the same result to rounding, wherever it is cut. Where
    the denominator and the numerator are 0, as for a query without any key, the result is 0.

    Masks: NaN or inf in a key or value past its item's length changes no bit. With `causal`, NaN in a key or
    value reaches the rows from its own on, and makes all later ones NaN; rows before it keep their bits, but
    of random features.

    Products are in the dtype of the computation, sums over chunks of keys in float64. With ``"elu+1"``, whose
    features compiled kernels compute, the bits are the same on every number of threads, for arrays of these
    sizes. Accuracy, determinism, memory: docs/promises.md.

    References
    ----------
    .. [1] Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers with Linear
       Attention", ICML 2020, equations 5 and 9.
    .. [2] Choromanski et al., "Rethinking Attention with Performers", ICLR 2021.

    Examples
    --------
    >>> import numpy as np
    >>> import fastattn
    >>> rng = np.random.default_rng(0)
    >>> query = rng.standard_normal((2, 8, 300, 16), dtype=np.float32)  # 2 items, 8 heads, 300 queries
    >>> key, value = rng.standard_normal((2, 2, 2, 300, 16), dtype=np.float32)  # 2 heads
    >>> out = fastattn.linear_attention(query, key, value, causal=True)
    >>> out.shape
    (2, 8, 300, 16)

    A recurrent network: 200 tokens, and then the others with what those add up to.

    >>> first, rest = np.s_[..., :200, :], np.s_[..., 200:, :]
    >>> _, state = fastattn.linear_attention(
    ...     query[first], key[first], value[first], causal=True, return_state=True
    ... )
    >>> state
    LinearState(key_value_sum=<float64 (2, 2, 16, 16)>, key_sum=<float64 (2, 2, 16)>, log_scale=None)
    >>> last = fastattn.linear_attention(query[rest], key[rest], value[rest], causal=True, state=state)
    >>> np.allclose(last, out[rest], atol=1e-5)
    True
    """
    features = _checked_map(feature_map)
    num_threads = check_threads_of_call(num_threads)
    options = {"causal": causal, "key_lengths": key_lengths, "layout": layout, "out": out}
    call, flat, result, staged = _checked(query, key, value, options, features, return_state)
    if state is not None:
        call = call._replace(earlier=_checked_state(state, call, flat))
    whole = _run(call, num_threads)
    if call.lengths is not None and call.earlier is None:
        call.out[call.lengths == 0] = 0  # where a query is NaN as well
    if staged is not None:
        result[...] = staged
    result = in_library_of(query, result) if out is None else out
    if whole is None:
        return result
    return result, each(whole, lambda array, _: array[0]) if flat else whole


# The edge ------------------------------------------------------------------------------------------


def _checked_map(feature_map: Any) -> Callable[[np.ndarray], Any]:
    if isinstance(feature_map, str):
        if feature_map != "elu+1":
            raise ValueError(f'feature_map must be "elu+1" or a callable, got {feature_map!r}')
        return elu_plus_one
    if not callable(feature_map):
        raise TypeError(f'feature_map must be "elu+1" or a callable, got {feature_map!r}')
    return feature_map


@naming_shapes
def _checked(
    query: Any,
    key: Any,
    value: Any,
    options: dict[str, Any],
    features: Callable[[np.ndarray], Any],
    return_state: bool,
) -> tuple[LinearCall, bool, np.ndarray, np.ndarray | None]:
    """The call but for its state, whether the arrays are those of one head without an axis, the result, and
    what is filled in its place, see `room_for_out`."""
    given = ((query, "query"), (key, "key"), (value, "value"))
    arrays: Any = (host_array(as_array(x, name), name) for x, name in given)
    inputs: Any = as_inputs(*arrays, swapped=is_swapped(options["layout"]))
    causal, key_lengths = options["causal"], options["key_lengths"]
    lead, _, L, S = inputs.sizes
    if not isinstance(causal, (bool, np.bool_)):
        raise ValueError(f"causal must be True or False, got {causal!r}: earlier keys are in state=")
    if causal and L != S:
        raise ValueError(f"causal=True needs L == S, got L={L} and S={S}: earlier keys are in state=")
    check_bool(return_state, "return_state")
    lengths = None if key_lengths is None else np.broadcast_to(check_key_lengths(key_lengths, lead, S), lead)
    is_ours = features is elu_plus_one or isinstance(features, RandomFeatures)  # and does not raise
    out, staged, target = room_for_out(inputs, options["out"], {}, may_fail=not is_ours)
    call = LinearCall(
        inputs.query,
        inputs.key,
        inputs.value,
        lengths,
        inputs.dtype,
        feature_map=features,
        causal=bool(causal),
        earlier=None,
        return_state=return_state,
        out=target,
        lost=np.zeros(inputs.query.shape[:-1], bool),
    )
    return call, inputs.flat, out, staged


def _checked_state(state: Any, call: LinearCall, flat: bool) -> LinearState:
    """The state in float64, with an axis of heads."""
    if not isinstance(state, LinearState):
        raise TypeError(f"state must be a LinearState, got {type(state).__name__}")
    if state.log_scale is None and isinstance(call.feature_map, RandomFeatures):
        raise ValueError("state must be of random features, as feature_map is, got that of other features")
    K, E = call.key.shape[-3], call.value.shape[-1]
    M = np.shape(state.key_sum)[-1] if np.ndim(state.key_sum) else 0
    if call.feature_map is elu_plus_one:
        M = call.key.shape[-1]

    def checked(given: Any, axes: int) -> np.ndarray:
        name = next(f"state.{name}" for name, array in state._asdict().items() if array is given)
        array = host_array(as_array(given, name), name)
        check_number_dtype(array, name)
        held = array[None] if flat else array
        own = (K, M, E)[:axes]
        if held.shape[-axes:] != own or not broadcasts(held.shape, (*call.key.shape[:-3], *own)):
            expected = own[1:] if flat else (*call.key.shape[:-3], *own)
            raise ValueError(f"{name} must have shape {expected}, got {array.shape}")
        return held.astype(FLOAT64)

    return each(state, checked)


# Features as they are, and relative to the largest where that is not enough -------------------------------


def _run(call: LinearCall, num_threads: int | None) -> LinearState | None:
    """Fills ``call.out``; returns the state if asked to."""
    is_random = isinstance(call.feature_map, RandomFeatures)
    plain = call if call.earlier is None or is_random else call._replace(earlier=_unscaled(call.earlier))
    whole = function("linear_attention", plain)(plain, num_threads)
    lost = call.lost
    if call.lengths is not None and call.earlier is None:
        lost[call.lengths == 0] = False
    if is_random and lost.any():  # relative to the largest already: no denominator is out of range
        lost &= ~np.isfinite(call.out).all(axis=-1)
    lost_sums: Any = np.False_
    if whole is not None:
        lost_sums = ~np.isfinite(whole.key_value_sum).all(axis=(-2, -1))
        if not is_random:
            lost_sums |= _lost_sums(whole.key_sum, call.feature_map is elu_plus_one)
    if not (lost.any() or lost_sums.any()):
        return whole
    return attend_again(call, whole, lost_sums)


def _unscaled(state: LinearState) -> LinearState:
    if state.log_scale is None:
        return state
    with np.errstate(all="ignore"):
        factor = np.exp(state.log_scale)
        return LinearState(state.key_value_sum * factor[..., None], state.key_sum * factor)


def _lost_sums(key_sum: np.ndarray, has_no_zeros: bool) -> np.ndarray:
    """Of which heads, ``(..., K)``, sums of a feature may be made of what has left its range."""
    size = np.abs(key_sum)
    is_lost = ~((size >= LEAST**2) & (size <= MOST**2))
    return (is_lost if has_no_zeros else is_lost & (size != 0)).any(axis=-1)


@refusing
def random_features(
    head_dim: int, num_features: int, *, seed: int, orthogonal: bool = True
) -> RandomFeatures:
    """Positive random features whose products are the exponentials of attention in the mean (FAVOR+).

    Parameters
    ----------
    head_dim : int
        ``D`` of the queries and keys.
    num_features : int
        ``M``: the error falls as ``1 / sqrt(M)``, and time and memory grow with M.
    seed : int
        In ``[0, 2**128)``: the key of a NumPy Philox stream. The same seed gives the same features.
    orthogonal : bool, default True
        Random vectors at right angles to each other, D at a time, of which fewer give the same error.

    Returns
    -------
    RandomFeatures
        A callable for `linear_attention`, which also knows the logarithms of its features: there nothing
        overflows. Of a key its error is relative to ``|k|**2 / (2 * sqrt(D))``; a key for which that is above
        1e30 is not seen.

    Raises
    ------
    TypeError, ValueError
        A number that is not an integer, or out of its range; an `orthogonal` that is no bool.

    Notes
    -----
    With random vectors ``w``, each normally distributed, and ``y = x / D**0.25``::

        phi(x) = np.exp(w @ y - y @ y / 2) / np.sqrt(M)

    and the mean of ``phi(q) @ phi(k)`` over the vectors is ``exp(q @ k / sqrt(D))``: the scale of attention
    is included. The standard deviation is about ``exp(|q + k|**2 / (2 * sqrt(D))) / sqrt(M)`` times that, so
    that attention which is nearly even is approximated well, and sharp attention badly.

    References
    ----------
    .. [1] Choromanski et al., "Rethinking Attention with Performers", ICLR 2021, lemma 1 and section 2.4.

    Examples
    --------
    >>> import numpy as np
    >>> import fastattn
    >>> rng = np.random.default_rng(0)
    >>> query, key, value = rng.standard_normal((3, 4, 500, 16)) * 0.5
    >>> exact = fastattn.attention(query, key, value)
    >>> for num_features in (64, 256, 1024, 4096):
    ...     features = fastattn.random_features(16, num_features, seed=0)
    ...     out = fastattn.linear_attention(query, key, value, feature_map=features)
    ...     print(f"{num_features:4} {np.linalg.norm(out - exact) / np.linalg.norm(exact):.2f}")
      64 0.29
     256 0.15
    1024 0.08
    4096 0.04
    """
    D, M = count(head_dim, "head_dim", 1, MAX_DIM), count(num_features, "num_features", 1, MAX_DIM)
    check_bool(orthogonal, "orthogonal")
    rng = np.random.Generator(np.random.Philox(key=check_seed(seed)))
    if not orthogonal:
        return RandomFeatures(rng.standard_normal((M, D)))
    blocks = []
    for _ in range(-(-M // D)):
        q, r = np.linalg.qr(rng.standard_normal((D, D)))
        directions = (q * np.sign(np.diagonal(r))).T  # so that all are as likely
        blocks.append(directions * np.linalg.norm(rng.standard_normal((D, D)), axis=1)[:, None])
    return RandomFeatures(np.concatenate(blocks)[:M])
