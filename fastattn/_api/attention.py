"""The public functions: each is a list of stages, normalise, select, plan, run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from fastattn._api import prepared
from fastattn._api.prepared import (
    ATTENTION,
    SDPA,
    SDPA_GQA,
    VARLEN,
    counts,
    recall,
    reuse,
    signature_of,
    use_arrays,
)
from fastattn._call.arguments import as_pieces, check_dropout, check_shape
from fastattn._call.normalize import Request, normalize, normalize_sdpa
from fastattn._call.options import complete, public, refuse_arguments, refusing
from fastattn._call.varlen import normalize_varlen
from fastattn._machine.device import DeviceArray, in_library_of
from fastattn._machine.host import default_backend
from fastattn.backends.registry import select, usable
from fastattn.masks import Mask

if TYPE_CHECKING:
    from typing import Never, Unpack

    from numpy.typing import ArrayLike

    from fastattn._call.options import (
        AttentionOptions,
        Mean,
        No,
        Pair,
        RowsLike,
        Triple,
        VarlenOptions,
        Yes,
    )
    from fastattn._call.problem import Mod

_MAX_DOCUMENTS = 1000  # whose lengths are part of the signature of a prepared call


@overload
def attention(
    query: ArrayLike, key: RowsLike, value: RowsLike, **options: Unpack[AttentionOptions[No, No]]
) -> np.ndarray: ...
@overload
def attention(
    query: ArrayLike, key: RowsLike, value: RowsLike, **options: Unpack[AttentionOptions[Yes, No]]
) -> Pair: ...
@overload
def attention(
    query: ArrayLike, key: RowsLike, value: RowsLike, **options: Unpack[AttentionOptions[No, Yes | Mean]]
) -> Pair: ...
@overload
def attention(
    query: ArrayLike, key: RowsLike, value: RowsLike, **options: Unpack[AttentionOptions[Yes, Yes | Mean]]
) -> Triple: ...
@overload
def attention(
    query: ArrayLike, key: RowsLike, value: RowsLike, **options: Unpack[AttentionOptions[bool, bool | Mean]]
) -> np.ndarray | tuple[np.ndarray, ...]: ...
@public("A")
def attention(
    query: ArrayLike, key: RowsLike, value: RowsLike, *extra: Any, **options: Any
) -> np.ndarray | tuple[np.ndarray, ...]:
    """Exact attention, ``softmax(scale * Q K^T + bias, over allowed keys) V``, in little memory.

    Letters: ``...`` any leading batch axes, ``H`` query heads, ``K`` key/value heads, ``L`` query length,
    ``S`` key length, ``D`` head_dim, ``E`` value head_dim; ``i`` a query, ``j`` a key. Arrays may be
    float32 or float64, float16 or bfloat16 (storage, computed in float32), or integers (float64); of NumPy or
    of another library, all on the host or all on one NVIDIA GPU.

    Parameters
    ----------
    query : array_like, shape (..., H, L, D)
        ``(L, D)`` is one head.
    key : array_like, Quantized or Paged, shape (..., K, S, D)
        Query head ``h`` reads key/value head ``h // (H // K)``. Leading axes broadcast.
    value : array_like, Quantized or Paged, shape (..., K, S, E)
    mask : fastattn.masks.Mask or array_like of bool or int, optional
        Which keys each query may attend to: a mask object, or an array, non-zero = may attend. It broadcasts
        to ``(..., H, L, S)``: one of shape ``(B, S)`` is given as ``mask[:, None, None, :]``.
    bias : array_like of float, fastattn.biases.Bias, or tuple of both, optional
        Added to the scores, after `softcap`; an array broadcasts as a mask does. ``-inf`` masks. An object
        needs no array of ``L x S``: ``biases.Relative(table, offset)`` has a number for each distance, and
        ``biases.Grid(rows, columns)`` two for keys on a grid. A tuple is added up in its order, in the type
        of the computation: an array for each head beside one for each window needs none of both.
    causal : {False, True, "top_left", "bottom_right"}, default False
        ``"top_left"``: key ``j <= i``. ``"bottom_right"``: key ``j <= i + S_b - L``, where ``S_b`` is the
        item's entry of `key_lengths`, or else ``S``. True: for ``L = S``, where both are the same.
    window : (int or None, int or None), optional
        ``(left, right)``: keys from ``p - left`` to ``p + right``, None = unbounded; ``p = i`` with `causal`
        True or ``"top_left"``, else ``p = i + S_b - L``.
    key_lengths : array_like of int, optional
        Broadcasts to the leading batch axes; keys at or past it are padding, never read.
    scale : float or array_like, shape (H,), optional
        ``1 / sqrt(D)`` when not given. Of an array each query head has its number, by which its queries are
        multiplied first: in the type of the computation, with one rounding.
    softcap : float, optional
        Turns a scaled score ``x`` into ``softcap * tanh(x / softcap)``.
    sinks : array_like, shape (H,), optional
        One more logit per head, in the denominator only.
    precision : {"exact", "storage"}, default "exact"
        ``"storage"`` allows weights to be rounded to the type of query, key and value where all are in 16
        bits, as in PyTorch, OpenVINO and FlashAttention; for gradients, those of the scores as well. It is
        faster where the CPU multiplies that type; elsewhere it changes nothing. docs/promises.md says what
        it costs.
    layout : {"bhsd", "bshd"}, default "bhsd"
        ``"bshd"``: query, key, value and `out` are ``(..., length, heads, dim)``, and nothing else.
    dropout : float, default 0.0
        The probability, in ``[0, 1)``, of a weight to be dropped; see `dropout_mask`.
    seed : int, optional
        In ``[0, 2**128)``; needed with `dropout`, as there is no global random state. One seed drops the same
        places in each call: take another for each layer and each step.
    out : ndarray, optional
        Where to write the result: its shape and dtype, any strides. It may overlap an input.
    return_lse : bool, default False
        Also return the log-sum-exp.
    return_weights : bool or "mean", default False
        Also return the attention weights: True those of each head, ``"mean"`` their mean over the ``H``
        query heads. Either takes the memory of all weights, ``H * L * S`` numbers of each item; for the mean
        they are in the type of the computation, and rounded once.
    num_threads : int, optional
        Threads for this call; see `set_num_threads`.
    backend : {"cython", "numba", "reference", "cuda"}, optional
        When not given: FASTATTN_BACKEND, or the first on the CPU that can take the problem.

    Returns
    -------
    out : ndarray, shape (..., H, L, E)
        In the dtype that query, key and value promote to, in the given layout; of query's library.
    lse : ndarray, shape (..., H, L)
        Natural log of each row's softmax denominator, when asked for.
    weights : ndarray, shape (..., H, L, S), or (..., L, S) for their mean
        The softmax, when asked for. What is asked for comes back as one tuple, in this order.

    Raises
    ------
    TypeError
        A dtype or an option of the wrong kind, or an unknown option: for those of other libraries the message
        says what takes their place.
    ValueError
        Shapes that do not fit, or an option out of its range.
    BackendError
        No backend, or not the one named, can take the problem. All errors come before any work.

    Notes
    -----
    In NumPy, with ``L * S`` memory::

        scores = scale * (query @ key.swapaxes(-1, -2)) + np.where(mask, 0, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = weights / weights.sum(-1, keepdims=True) @ value

    All masks hold together. A query without any allowed key gives 0, and lse ``-inf``. NaN or inf in a masked
    key changes nothing. Accuracy, determinism, memory and dropout: docs/promises.md.

    References
    ----------
    .. [1] Vaswani et al., "Attention Is All You Need", NeurIPS 2017, equation 1.
    .. [2] Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3.
    .. [3] Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023,
       algorithm 1.
    .. [4] Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference", 2023.

    Examples
    --------
    >>> import numpy as np
    >>> import fastattn
    >>> rng = np.random.default_rng(0)
    >>> query = rng.standard_normal((2, 8, 5, 64), dtype=np.float32)  # 2 items, 8 heads, 5 queries
    >>> key, value = rng.standard_normal((2, 2, 2, 9, 64), dtype=np.float32)  # 2 heads, 9 keys
    >>> fastattn.attention(query, key, value, causal="bottom_right", key_lengths=[9, 6]).shape
    (2, 8, 5, 64)
    """
    found = None if extra else recall(ATTENTION, query, key, value, options, default_backend())
    if found is not None:
        results = reuse(found, query, key, value, options) if type(found) is bytes else found
        if results is not None:
            return results
    options = complete("A", attention, options, extra)
    return attend(ATTENTION, query, key, value, options, signature=found)


def attend(
    function: int,
    query: Any,
    key: Any,
    value: Any,
    options: dict[str, Any],
    *,
    signature: Any = None,
    more: Any = None,
    make: Callable[[], Request] | None = None,
    keep_first: int = 0,
    score_mod: Mod | None = None,
) -> Any:
    """The results of a call of a public function, by a prepared call if there is one: else the stages are
    normalize, select, prepare, run.

    `signature`: that of the call where it is known already, False where it has none. `more`: what else the
    call depends on. `make` gives the `Request` of a function other than `attention`. The options are changed.
    """
    use_arrays(options, function in (ATTENTION, VARLEN))
    if signature is None:
        signature = signature_of(function, query, key, value, options, more)
    results = reuse(signature, query, key, value, options, score_mod)
    if results is not None:
        return results
    request = normalize(query, key, value, options, keep_first=keep_first) if make is None else make()
    backend = select(request.problem, options.get("backend"))
    prepared.run(request, signature or None, (query, key, value), options, backend)
    return request.finish(query, options.get("out"))


@public()
def scaled_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **unknown: Never,
) -> np.ndarray:
    """PyTorch's function of that name on NumPy arrays, by its conventions.

    Letters as in `attention`.

    Parameters
    ----------
    query, key, value : array_like, shapes (..., H, L, D), (..., K, S, D) and (..., K, S, E)
    attn_mask : array_like, optional
        Broadcasts to ``(..., H, L, S)``: bool, True = may attend, or float, added to the scores, be they
        zeros and ones.
    dropout_p : float, default 0.0
        Must be 0.
    is_causal : bool, default False
        Key ``j <= i`` for query ``i``, also where ``L != S``. With `attn_mask` both hold.
    scale : float, optional
        ``1 / sqrt(D)`` when not given.
    enable_gqa : bool, default False
        Lets ``H`` be a multiple of ``K``. Without it the numbers of heads must match, or one be 1 and
        broadcast.

    Returns
    -------
    ndarray, shape (..., H, L, E)

    Raises
    ------
    TypeError
        An integer `attn_mask`, or a dtype that `attention` does not take.
    ValueError
        `dropout_p` other than 0, heads that do not match, shapes that do not fit.

    Notes
    -----
    Unlike in PyTorch, a query without any allowed key gives zeros by contract, NaN in masked keys and values
    is never seen, and query, key and value of different dtypes promote.

    Examples
    --------
    >>> import numpy as np
    >>> import fastattn
    >>> x = np.random.default_rng(0).standard_normal((1, 4, 6, 8))
    >>> fastattn.scaled_dot_product_attention(x, x, x, is_causal=True).shape
    (1, 4, 6, 8)
    """
    if unknown:
        refuse_arguments(scaled_dot_product_attention, (), unknown)
    function = SDPA_GQA if enable_gqa else SDPA
    options = {"mask": attn_mask, "causal": "top_left" if is_causal else False, "scale": scale}
    # Numbers that equal a bool, or 0, are for the whole function to judge, as in a first call.
    is_plain = type(is_causal) is type(enable_gqa) is bool and type(dropout_p) in (float, int)
    signature = False
    if is_plain and dropout_p == 0 and (attn_mask is None or not isinstance(attn_mask, Mask)):
        signature = recall(function, query, key, value, options, default_backend())
        if signature is not None and type(signature) is not bytes:
            return signature  # the results
    # No closure, whose variables would take longer to read in each call.
    make = partial(normalize_sdpa, query, key, value, options, dropout_p, is_causal, enable_gqa)
    return attend(function, query, key, value, options, signature=signature, make=make)


@overload
def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None,
    **options: Unpack[VarlenOptions[No, No]],
) -> np.ndarray: ...
@overload
def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None,
    **options: Unpack[VarlenOptions[Yes, No]],
) -> Pair: ...
@overload
def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None,
    **options: Unpack[VarlenOptions[No, Yes]],
) -> Pair: ...
@overload
def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None,
    **options: Unpack[VarlenOptions[Yes, Yes]],
) -> Triple: ...
@overload
def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None,
    **options: Unpack[VarlenOptions[bool, bool]],
) -> np.ndarray | tuple[np.ndarray, ...]: ...
@public("V")
def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None,
    *extra: Any,
    **options: Any,
) -> np.ndarray | tuple[np.ndarray, ...]:
    """Attention within each of several documents that are packed one after another, without padding.

    Letters: ``T`` all queries, ``T_k`` all keys, ``N`` documents, ``H`` query heads, ``K`` key/value heads,
    ``D`` head_dim, ``E`` value head_dim.

    Parameters
    ----------
    query : array_like, shape (T, H, D)
    key : array_like, shape (T_k, K, D)
    value : array_like, shape (T_k, K, E)
    cu_seqlens_q : array_like of int, shape (N + 1,)
        Document ``d`` has the queries ``cu_seqlens_q[d]`` up to ``cu_seqlens_q[d + 1]``: from 0, rising, to
        ``T``. A document may be empty.
    cu_seqlens_k : array_like of int, shape (N + 1,), optional
        The same for the keys; `cu_seqlens_q` when not given.
    mask : fastattn.masks.Mask or array_like of bool or int, optional
        One more limit, beside the documents. An array broadcasts to ``(H, T, T_k)``. An object, too, counts
        packed queries and keys: ``GlobalTokens(cu_seqlens_k[:-1])`` has the first key of each document. What
        aligns queries with keys does so within each document: ``Causal("bottom_right")`` is
        ``causal="bottom_right"``. `KeyLengths` and `PrefixLM`, which count from a first key, are refused, as
        `Neighborhood` is.
    bias : array_like of float, fastattn.biases.Bias, or tuple of both, optional
        As in `attention`; arrays broadcast to ``(H, T, T_k)``. An object counts packed queries and keys, too:
        `Relative` needs as many keys as queries in each document.
    causal : {False, True, "top_left", "bottom_right"}, default False
        As in `attention`, within each document. True needs as many keys as queries in each document.
    window : (int or None, int or None), optional
        As in `attention`, within each document.
    dropout, seed
        As in `attention`. A weight's place is that of its packed query and key, as in ``dropout_mask((H, T,
        T_k), dropout, seed)``: what is dropped in a document depends on where it is packed, and on `T_k`.
    other options
        As in `attention`.
    out : ndarray, shape (T, H, E), optional
        Where to write the result.
    return_lse, return_weights : bool, default False
        Also return the log-sum-exp, and the attention weights (``T * T_k`` numbers per head).

    Returns
    -------
    out : ndarray, shape (T, H, E)
    lse : ndarray, shape (H, T)
        When asked for.
    weights : ndarray, shape (H, T, T_k)
        When asked for: 0 for keys of other documents. As in `attention`, several results are a tuple.

    Raises
    ------
    TypeError, ValueError, BackendError
        As in `attention`; ValueError also where ``cu_seqlens`` do not rise from 0 to the length, or where
        ``causal=True`` or ``Causal()`` meets a document whose numbers of queries and keys differ.

    Notes
    -----
    One call of `attention` in which each query reads one interval of keys, which is the same as ::

        for d in range(N):
            q, k = slice(*cu_seqlens_q[d : d + 2]), slice(*cu_seqlens_k[d : d + 2])
            out[q] = attention(query[q], key[k], value[k], layout="bshd", causal=causal, window=window)

    to rounding; of a `mask` or `bias` array each document has its ``[..., q, k]``. Keys of other documents
    are never seen. `varlen_attention_backward` has the gradients.

    Examples
    --------
    >>> import numpy as np
    >>> import fastattn
    >>> x = np.random.default_rng(0).standard_normal((10, 2, 4))  # three documents: 3, 5 and 2 tokens
    >>> out = fastattn.varlen_attention(x, x, x, [0, 3, 8, 10], causal=True)
    >>> alone = fastattn.attention(x[3:8], x[3:8], x[3:8], layout="bshd", causal=True)
    >>> np.allclose(out[3:8], alone)
    True
    """
    options = complete("V", varlen_attention, options, extra)
    starts_q = counts(cu_seqlens_q)
    starts_k = None if cu_seqlens_k is None else counts(cu_seqlens_k)
    more: Any = None
    signature: Any = False
    both = (starts_q, starts_q if starts_k is None else starts_k)
    if all(type(x) is np.ndarray and x.size <= _MAX_DOCUMENTS for x in both):
        more, signature = tuple((x.dtype.str, x.shape, x.tobytes()) for x in both), None
    make = partial(normalize_varlen, query, key, value, options, starts_q, starts_k)
    return attend(VARLEN, query, key, value, options, signature=signature, more=more, make=make)


@refusing
def merge_attention(outs: Sequence[ArrayLike], lses: Sequence[ArrayLike]) -> tuple[np.ndarray, np.ndarray]:
    """Combine attention over disjoint sets of keys into attention over all of them, exactly.

    Parameters
    ----------
    outs : sequence of array_like, each of shape (..., E)
        The same queries' results over different keys.
    lses : sequence of array_like, each of shape (...)
        The log-sum-exp of each; ``-inf`` where it had no key to read.

    Returns
    -------
    out : ndarray, shape (..., E)
        In the dtype that `outs` promote to.
    lse : ndarray, shape (...)
        In the dtype that `lses` promote to.

    Raises
    ------
    TypeError
        A dtype that `attention` does not take.
    ValueError
        No piece, numbers of outs and lses that differ, shapes that differ.

    Notes
    -----
    With ``w = exp(lses)`` this is ``out = sum(w * outs) / sum(w)`` and ``lse = log(sum(w))``, relative to
    the largest lse and accumulated in float64; on the CPU it is finite where the `outs` are. The order of
    the pieces matters to rounding only. A sink belongs to one piece: given to several it is counted several
    times. Pieces on a GPU are combined there, one after another, into arrays of their library.

    Examples
    --------
    >>> import numpy as np
    >>> import fastattn
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 4, 6, 8))
    >>> first = fastattn.attention(query, key[:, :2], value[:, :2], return_lse=True)
    >>> second = fastattn.attention(query, key[:, 2:], value[:, 2:], return_lse=True)
    >>> out, lse = fastattn.merge_attention(*zip(first, second))
    >>> np.allclose(out, fastattn.attention(query, key, value))
    True
    """
    pieces, out_dtype, lse_dtype = as_pieces(outs, lses)
    first: Any = pieces[0][0]
    if isinstance(first, DeviceArray):
        merged = first.new(first.shape, out_dtype), first.new(first.shape[:-1], lse_dtype)
        usable("cuda", f"the arrays are on {first.device}").combine(pieces, *merged)
        return merged[0].memory.owner, merged[1].memory.owner
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # NaN and inf pass through
        lse_max = np.full(pieces[0][1].shape, -np.inf)
        for _, lse in pieces:
            np.maximum(lse_max, lse, out=lse_max)
        base = np.where(np.isinf(lse_max), 0, lse_max)
        weights = [np.exp(lse - base) for _, lse in pieces]
        total = np.zeros(lse_max.shape)
        for weight in weights:
            total += weight
        # By a power of two they add up to at most 1/2: no sum of finite numbers overflows, and their mean
        # rounds past the largest number at most, which it then is.
        headroom = np.ldexp(0.5, -np.frexp(total)[1])
        acc = np.zeros(pieces[0][0].shape)
        for (out, lse), weight in zip(pieces, weights, strict=True):
            read = lse != -np.inf  # a piece without keys is ignored, whatever its out holds
            weight *= headroom
            acc += np.multiply(out, weight[..., None], where=read[..., None], out=np.zeros(out.shape))
        out = acc / np.where(total == 0, 1, total * headroom)[..., None]
        most = np.finfo(out.dtype).max
        np.clip(out, -most, most, out=out, where=np.isfinite(acc))
        results = out.astype(out_dtype), (base + np.log(total)).astype(lse_dtype)
    return in_library_of(outs[0], results[0]), in_library_of(outs[0], results[1])


@refusing
def dropout_mask(shape: Sequence[int], p: float, seed: int) -> np.ndarray:
    """The weights that `attention` keeps with ``dropout=p, seed=seed``.

    Parameters
    ----------
    shape : sequence of int
        Of the weights, ``(..., H, L, S)``.
    p : float
        The probability, in ``[0, 1)``, of a weight to be dropped; rounded to a multiple of ``2**-16``.
    seed : int
        In ``[0, 2**128)``. What is out of its range is a ValueError, and of the wrong kind a TypeError.

    Returns
    -------
    ndarray of bool
        True where a weight is kept.

    Notes
    -----
    With ``t = round(65536 * p)`` and ``n = ceil(S / 16)``, the definition is NumPy's own stream::

        raw = np.random.Philox(key=seed).random_raw(B * H * L * n * 4)
        keep = raw.astype("<u8").view("<u2").reshape(B, H, L, n * 16)[..., :S] >= t

    Determinism: the same on every machine; a function of the arguments alone.

    References
    ----------
    .. [1] Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", 2014.
    .. [2] Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

    Examples
    --------
    >>> import fastattn
    >>> keep = fastattn.dropout_mask((4, 100, 100), 0.25, seed=0)
    >>> round(float(keep.mean()), 2)
    0.75
    """
    sizes, dropout = check_shape(shape), check_dropout(p, seed, name="p", is_needed=True)
    return np.ones(sizes, bool) if dropout is None else dropout.mask(sizes)
