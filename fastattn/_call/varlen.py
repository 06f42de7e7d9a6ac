"""The edge for packed documents: their arguments to one problem."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fastattn._call.arguments import as_array, bias_parts, check_causal, check_cu_seqlens, check_window, named
from fastattn._call.normalize import (
    Inputs,
    Request,
    as_inputs,
    assemble,
    bias_of_scores,
    mask_given,
    naming_shapes,
    reach,
)
from fastattn._call.options import DEFAULTS
from fastattn.biases import Relative
from fastattn.masks import base
from fastattn.masks.map import Documents, make_intervals

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import ArrayLike


@naming_shapes
def normalize_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    options: dict[str, Any],
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None,
) -> Request:
    """The arguments of `varlen_attention` as a `Request`; see there for what they mean and what is raised."""
    options = DEFAULTS | options
    inputs, lowered = packed(query, key, value, options, cu_seqlens_q, cu_seqlens_k)
    return assemble(inputs, None, lowered, bias_of_scores(options["bias"], inputs), options)


def packed(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    options: dict[str, Any],
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None,
) -> tuple[Inputs, base.Lowered]:
    """Packed documents as one problem, each of whose queries reads keys of its document alone."""
    arrays = [as_array(x, name) for x, name in named(query, key, value)]
    for array, name in named(*arrays):
        if array.ndim != 3:
            raise ValueError(f"{name} must have shape (T, heads, dim), got {array.shape}")
    inputs = as_inputs(*arrays, swapped=True)
    _, _, L, S = inputs.sizes
    starts_q = check_cu_seqlens(cu_seqlens_q, "cu_seqlens_q", L)
    starts_k = starts_q
    if cu_seqlens_k is not None:
        starts_k = check_cu_seqlens(cu_seqlens_k, "cu_seqlens_k", S)
    elif S != L:
        raise ValueError("cu_seqlens_k is needed where key has another length than query")
    if len(starts_q) != len(starts_k):
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must have the same length, "
            f"got {len(starts_q)} and {len(starts_k)}"
        )
    lengths_q, lengths_k = np.diff(starts_q), np.diff(starts_k)
    causal = check_causal(options["causal"])
    if causal is True and (differ := np.flatnonzero(lengths_q != lengths_k)).size:
        d = differ[0]
        raise ValueError(
            f"causal=True needs as many keys as queries in each document, got {lengths_q[d]} queries and "
            f'{lengths_k[d]} keys in document {d}; say causal="top_left" or causal="bottom_right"'
        )
    document = np.repeat(np.arange(len(lengths_q)), lengths_q.astype(np.intp, copy=False))
    first, last = starts_k[document], starts_k[document + 1]
    queries = first + (np.arange(L) - starts_q[document])
    at_end = (lengths_k - lengths_q)[document]
    left, right, is_at_end = reach(causal, check_window(options["window"]))
    position = queries + at_end if is_at_end else queries
    start, stop = np.maximum(position - left, first), np.minimum(position + (right + 1), last)
    keys = make_intervals(start, stop, S)
    has_relative = any(isinstance(part, Relative) for _, part in bias_parts(options["bias"]))
    if has_relative and not np.array_equal(starts_q, starts_k):
        raise ValueError("bias: an object needs as many keys as queries in each document; give an array")
    mask, lowered = mask_given(inputs, options), base.Lowered(keys.start, keys.stop)
    if mask is not None:
        lowered = base.lower(mask, *inputs.sizes, documents=Documents(keys, first, queries, at_end))
    return inputs, lowered
