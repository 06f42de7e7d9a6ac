"""The edge for functions of scores alone, without values: their arguments to a call with values of zeros."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._call.arguments import as_array, as_rows
from fastattn._call.backward import normalize_backward
from fastattn._call.normalize import Request, as_request, naming_shapes
from fastattn._call.options import DEFAULTS
from fastattn._call.storage import Rows
from fastattn._machine.device import host_array

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from fastattn._call.gradients import Backward
    from fastattn._call.options import RowsLike


@partial(naming_shapes, names=("query", "key"))
def normalize_scores(
    query: ArrayLike, key: RowsLike, options: dict[str, Any], *, columns: int = 0
) -> Request:
    """The arguments of a function of scores alone, as a call with values of so many columns of zeros."""
    return as_request(*_with_zeros(query, key, columns), options)


def _with_zeros(query: ArrayLike, key: RowsLike, columns: int) -> tuple[np.ndarray, Any, np.ndarray]:
    """Query and key on the host, and values of zeros. Their dtype decides nothing: with any other it promotes
    to that of the computation."""
    q, k = host_array(as_array(query, "query"), "query"), as_rows(key, "key")
    if not isinstance(k, Rows):
        key = k = host_array(k, "key")
    return q, key, np.broadcast_to(np.float32(0), (*k.shape[:-1], columns))


def normalize_key_weights(
    query: ArrayLike, key: ArrayLike, options: dict[str, Any], request: Request
) -> Backward:
    """The gradient of values of one column that is the sum of the weights, where `request` gives the lse."""
    out, lse = request.results
    ones, zeros = (np.broadcast_to(np.float32(x), out.shape) for x in (1, 0))
    arrays = _with_zeros(query, key, 1)
    asked = DEFAULTS | options | {"wrt": ("value",)}
    return normalize_backward(*arrays, asked, grad_out=ones, out=zeros, lse=lse)
