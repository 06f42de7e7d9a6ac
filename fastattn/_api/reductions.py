"""What scores are reduced to without values: `reduce_scores`, `key_weights` and `max_similarity`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from fastattn._api import prepared
from fastattn._call.arguments import (
    as_array,
    as_dtype,
    check_cu_seqlens,
    computed_in,
    count,
    host_numbers,
    is_stored,
    per_item,
    promote,
)
from fastattn._call.normalize import naming_shapes
from fastattn._call.options import complete, public, refusing
from fastattn._call.problem import FLOAT32, MAX_DIM, MAX_ROWS
from fastattn._call.reductions import ReductionCall, SimilarityCall
from fastattn._call.scores import normalize_key_weights, normalize_scores
from fastattn._call.storage import Quantized, native_scale
from fastattn._machine import host
from fastattn._machine.device import in_library_of
from fastattn.backends.registry import function, select

if TYPE_CHECKING:
    from typing import Literal, Unpack

    from numpy.typing import ArrayLike

    from fastattn._call.gradients import Gradients
    from fastattn._call.normalize import Request
    from fastattn._call.options import BackendName, Pair, ReductionOptions, RowsLike

REDUCTIONS = ("max", "topk", "logsumexp")
_EXACT_DIM = 1024  #: columns of int8 whose products, 2**14 at most, add up exactly in float32


@overload
def reduce_scores(
    query: ArrayLike,
    key: RowsLike,
    *,
    reduction: Literal["logsumexp"],
    k: None = None,
    **options: Unpack[ReductionOptions],
) -> np.ndarray: ...
@overload
def reduce_scores(
    query: ArrayLike,
    key: RowsLike,
    *,
    reduction: Literal["max", "topk"],
    k: int | None = None,
    **options: Unpack[ReductionOptions],
) -> Pair: ...
@public("R")
def reduce_scores(
    query: ArrayLike,
    key: RowsLike,
    *extra: Any,
    reduction: Literal["max", "topk", "logsumexp"],
    k: int | None = None,
    **options: Any,
) -> np.ndarray | Pair:
    """The scores of `attention`, reduced over the keys of each query: no values, and no ``L * S`` memory.

    Letters as in `attention`.

    Parameters
    ----------
    query : array_like, shape (..., H, L, D)
    key : array_like, Quantized or Paged, shape (..., K, S, D)
        As in `attention`, but on the host.
    reduction : {"max", "topk", "logsumexp"}
        The largest score and its key; the `k` largest scores and their keys; or the log-sum-exp, which is the
        `lse` of `attention`.
    k : int, optional
        How many scores "topk" keeps, which needs it; from 1 on. Meant to be small beside ``S``.
    other options
        As in `attention`: masks, `bias`, `scale`, `softcap`, and so on. `sinks` are for "logsumexp" alone.
        "numba" has "logsumexp" alone.

    Returns
    -------
    values : ndarray, shape (..., H, L), or (..., H, L, k) for "topk"
        Scores after scale, soft-cap and bias, in falling order, or the log-sum-exp. In the dtype of the
        computation: float32 for 16-bit types.
    index : ndarray of int64, of the same shape
        The key of each score; of equal scores the lowest comes first. Not for "logsumexp", whose values come
        alone.

    Raises
    ------
    TypeError, ValueError
        As in `attention`; for a `reduction` that is none of these, and a `k` or `sinks` that does not belong
        to it.
    BackendError
        A `backend` that cannot run it.

    Notes
    -----
    In NumPy, with ``L * S`` memory::

        scores = scale * (query @ key.swapaxes(-1, -2)) + np.where(mask, 0, -np.inf)
        index = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
        values = np.take_along_axis(scores, index, axis=-1)

    Where a query may attend to fewer than `k` keys, the values after theirs are ``-inf`` and their index
    ``-1``, as for a query without any; so are keys whose score is ``-inf``. NaN counts as the largest score,
    as in `numpy.argmax`: NaN in a query is at its first allowed keys. A masked key is never seen. A score is
    rounded as in `attention`: which of two that differ by roundings comes first, and no more, may depend on
    the instruction set. The bits depend on neither the number of threads, the layout nor the other items.

    Few scores are among the `k` largest so far, so that the time is that of the product of queries and keys,
    but where scores rise from key to key. The "logsumexp" is `attention` with values of no columns. Threads
    may share the keys of a head.

    Examples
    --------
    >>> import numpy as np
    >>> import fastattn
    >>> query, key = np.random.default_rng(0).standard_normal((2, 8, 100, 64), dtype=np.float32)
    >>> values, index = fastattn.reduce_scores(query, key, reduction="topk", k=3, causal=True)
    >>> values.shape, index[0, :3].tolist()
    ((8, 100, 3), [[0, -1, -1], [0, 1, -1], [0, 2, 1]])
    >>> lse = fastattn.reduce_scores(query, key, reduction="logsumexp")
    >>> bool((lse >= fastattn.reduce_scores(query, key, reduction="max")[0]).all())
    True
    """
    completed = complete("R", reduce_scores, options, extra)
    host.check_threads_of_call(completed["num_threads"])
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")
    if reduction == "topk":
        k = count(k, "k", 1, MAX_ROWS)
    elif k is not None:
        raise ValueError(f'k is for reduction="topk", got k={k!r} with reduction={reduction!r}')
    if reduction == "logsumexp":
        return _logsumexp(query, key, completed)
    if completed["sinks"] is not None:
        raise ValueError(f'sinks are for reduction="logsumexp", and no keys; got reduction={reduction!r}')
    values, index = _largest(query, key, completed, k or 1)
    if reduction == "max":
        values, index = values[..., 0], index[..., 0]
    return in_library_of(query, values), in_library_of(query, index)


def _logsumexp(query: Any, key: Any, options: dict[str, Any]) -> np.ndarray:
    """The lse of attention."""
    request = normalize_scores(query, key, options | {"return_lse": True})
    _attend(request, options)
    return in_library_of(query, request.results[1])


def _attend(request: Request, options: dict[str, Any]) -> None:
    """Fills the lse of a request."""
    backend = select(request.problem, options["backend"])
    prepared.run_once(request, (), options, backend, options["num_threads"])


def _largest(query: Any, key: Any, options: dict[str, Any], k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k largest scores of each query, and their keys."""
    request = normalize_scores(query, key, options)
    problem = request.problem
    shape = (*problem.query.shape[:-1], k)
    values, index = np.full(shape, -np.inf, problem.dtype), np.full(shape, -1, np.int64)
    call = ReductionCall(problem._replace(weights=values), index)
    run = function("reduce_scores", call, options["backend"])
    if values.size and problem.len_k:
        run(call, options["num_threads"])
    return (values[0], index[0]) if request.results[0].ndim == 2 else (values, index)


@public("R")
def key_weights(
    query: ArrayLike, key: ArrayLike, *extra: Any, **options: Unpack[ReductionOptions]
) -> np.ndarray:
    """The weights that each key gets from all queries together: `attention`'s, summed over the queries.

    Letters as in `attention`. They say which keys are read, as those who evict keys from a cache ask (H2O,
    SnapKV), without the memory of ``L * S`` weights.

    Parameters
    ----------
    query : array_like, shape (..., H, L, D)
    key : array_like, shape (..., K, S, D)
        As in `attention`, but on the host.
    other options
        As in `attention`: masks, `bias`, `scale`, `softcap`, `sinks`, and so on. The backends "cython" and
        "reference" can run it.

    Returns
    -------
    ndarray, shape (..., H, S)
        In the dtype of the computation: float32 for 16-bit types.

    Raises
    ------
    TypeError, ValueError
        As in `attention`.
    BackendError
        A `backend` that cannot run it.

    Notes
    -----
    In NumPy, with ``L * S`` memory::

        out, weights = fastattn.attention(query, key, value, return_weights=True)
        summed = weights.sum(axis=-2)

    The sum is the gradient of `attention` with respect to values of one column, where that of its result is 1
    everywhere: it takes the scores twice, once for the lse. A query without any allowed key adds nothing. A
    masked key is never seen; NaN in a query reaches the keys that it may attend to, of its own head. The bits
    depend on neither the number of threads, the layout nor the other items.

    References
    ----------
    .. [1] Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
       Models", NeurIPS 2023.

    Examples
    --------
    >>> import numpy as np
    >>> import fastattn
    >>> query, key = np.random.default_rng(0).standard_normal((2, 8, 100, 64), dtype=np.float32)
    >>> summed = fastattn.key_weights(query, key, causal=True)
    >>> summed.shape, round(float(summed[0].sum()))
    ((8, 100), 100)
    """
    completed = complete("R", key_weights, options, extra)
    threads = host.threads_for(host.check_threads_of_call(completed["num_threads"]))
    request = normalize_scores(query, as_array(key, "key"), completed | {"return_lse": True}, columns=1)
    backward = normalize_key_weights(query, key, completed, request)
    backend = select(backward.problem, completed["backend"], gradients=True)
    _attend(request, completed)
    problem = backward.problem
    summed = np.zeros((*problem.lead, problem.num_heads, problem.len_k), problem.dtype)
    # Each key/value head gives one sum: those of its query heads are asked for one after another.
    for heads in (slice(g, None, problem.group_size) for g in range(problem.group_size)):
        part = backward.of_heads(heads)
        if part.grad_out.size and problem.len_k:
            gradients: Gradients[Any] = backend.differentiate(part, backend.thread_limit(threads))
            summed[..., heads, :] = gradients.value[..., 0]
    return in_library_of(query, summed.reshape(*request.results[1].shape[:-1], problem.len_k))


@refusing
def max_similarity(
    query: ArrayLike,
    document: ArrayLike | Quantized,
    *,
    query_lengths: ArrayLike | None = None,
    document_lengths: ArrayLike | None = None,
    document_offsets: ArrayLike | None = None,
    num_threads: int | None = None,
    backend: BackendName | None = None,
) -> np.ndarray:
    """Late interaction: for each token of a query the largest product with a token of a document, summed.

    The score of a document for a query in ColBERT and ColPali. ``Q`` queries of ``T`` tokens, ``N`` documents
    of ``S`` tokens, ``D`` columns of a token's embedding.

    Parameters
    ----------
    query : array_like, shape (Q, T, D)
        Embeddings, on the host; of any dtype that `attention` takes. int8 is read as it is.
    document : array_like or Quantized, shape (N, S, D), or (total, D) with `document_offsets`
        Likewise.
    query_lengths : array_like of int, shape (Q,), optional
        So many tokens of each query are read; all when not given. 0 gives 0.
    document_lengths : array_like of int, shape (N,), optional
        So many tokens of each document are read; all when not given.
    document_offsets : array_like of int, shape (N + 1,), optional
        Documents one after another without padding: document ``n`` has the rows ``document_offsets[n]`` up
        to ``document_offsets[n + 1]``, from 0, rising, to ``total``.
    num_threads, backend
        As in `attention`; "cython" and "reference" can run it.

    Returns
    -------
    ndarray, shape (Q, N)
        In the dtype that query and document promote to, but float32 where that is a 16-bit type. A document
        without tokens has ``-inf``.

    Raises
    ------
    TypeError
        A dtype that `attention` does not take; arrays on a GPU.
    ValueError
        Shapes that do not fit, lengths out of their range, or both lengths and offsets of documents.
    BackendError
        A `backend` that cannot run it.

    Notes
    -----
    The same in NumPy, with ``Q * T * N * S`` memory::

        products = np.einsum("qtd,nsd->qtns", query, document)
        out = products.max(axis=-1).sum(axis=1)

    There is no scale. 16-bit types are multiplied in float32, and the sum over a query's tokens is in float64
    and rounded once. int8 with int8 is exact. NaN in a token that is read makes the pair NaN; others change
    nothing. The bits of a pair depend on neither the number of threads nor the other queries and documents.
    Documents are read where they are, and converted some tokens at a time.

    References
    ----------
    .. [1] Khattab and Zaharia, "ColBERT: Efficient and Effective Passage Search via Contextualized Late
       Interaction over BERT", SIGIR 2020, equation 3.

    Examples
    --------
    >>> import numpy as np
    >>> import fastattn
    >>> rng = np.random.default_rng(0)
    >>> query = rng.standard_normal((2, 32, 128), dtype=np.float32)
    >>> document = rng.standard_normal((5, 180, 128), dtype=np.float32)
    >>> scores = fastattn.max_similarity(query, document, document_lengths=[180, 90, 0, 7, 60])
    >>> scores.shape, scores[:, 2].tolist()
    ((2, 5), [-inf, -inf])

    The same without padding:

    >>> packed = np.concatenate([document[0], document[1, :90]])
    >>> np.array_equal(fastattn.max_similarity(query, packed, document_offsets=[0, 180, 270]), scores[:, :2])
    True
    """
    num_threads = host.check_threads_of_call(num_threads)
    call = _similarity(query, document, query_lengths, document_lengths, document_offsets)
    run = function("max_similarity", call, backend)
    if call.out.size:
        run(call, num_threads)
    return in_library_of(query, call.out)


@partial(naming_shapes, names=("query", "document"))
def _similarity(query: Any, document: Any, query_lengths: Any, lengths: Any, offsets: Any) -> SimilarityCall:
    """The checked arguments of `max_similarity`."""
    q: Any = host_numbers(query, "query")
    d: Any
    scale = None
    if isinstance(document, Quantized):
        d, scale = document.data, native_scale(document.scale)
        promoted = promote(query=q)
    else:
        d = host_numbers(document, "document")
        promoted = promote(query=q, document=d)
    axes = "(N, S, D)" if offsets is None else "(total, D), with document_offsets,"
    if q.ndim != 3:
        raise ValueError(f"query must have shape (Q, T, D), got {q.shape}")
    if d.ndim != (3 if offsets is None else 2):
        raise ValueError(f"document must have shape {axes} got {d.shape}")
    Q, T, D = q.shape
    if d.shape[-1] != D:
        raise ValueError(f"query and document must have the same last axis, got {D} and {d.shape[-1]}")
    if not 0 < D <= MAX_DIM:
        raise ValueError(f"query and document must have 1 to {MAX_DIM} columns, got {D}")
    if offsets is not None:
        if lengths is not None:
            raise ValueError("document_lengths are for padded documents: leave them out, or document_offsets")
        rows = check_cu_seqlens(offsets, "document_offsets", len(d))
        starts, stops = rows[:-1], np.diff(rows)
    else:
        starts = np.arange(len(d))
        stops = _token_counts(lengths, "document_lengths", len(d), d.shape[1])
    result = computed_in(promoted)
    both_int8 = q.dtype == d.dtype == np.int8 and scale is None
    dtype = FLOAT32 if both_int8 and D <= _EXACT_DIM else result
    q, d = (
        x if is_stored(x) or x.dtype == np.int8 else as_dtype(x, dtype, name)
        for x, name in ((q, "query"), (d, "document"))
    )
    counts = _token_counts(query_lengths, "query_lengths", Q, T)
    return SimilarityCall(q, counts, d, scale, starts, stops, dtype, np.empty((Q, len(starts)), result))


def _token_counts(given: Any, name: str, n: int, most: int) -> np.ndarray:
    """How many tokens are read of each of n sequences."""
    if given is None:
        return np.full(n, most, np.int64)
    lengths = per_item(given, name, (n,), most)
    if lengths.size and (lengths.min() < 0 or lengths.max() > most):
        wrong = lengths[(lengths < 0) | (lengths > most)].flat[0]
        raise ValueError(f"{name} must be in 0..{most}, got {wrong}")
    return np.broadcast_to(lengths, (n,)).copy()
