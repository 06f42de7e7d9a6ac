"""Exact attention on NumPy arrays, without storing the score matrix.

For users. `attention` is the function: ``help(fastattn.attention)`` shows its options, and examples. Arrays
are ``(batch, heads, length, head_dim)``, with ``layout="bshd"`` ``(batch, length, heads, head_dim)``:

>>> import numpy as np
>>> import fastattn
>>> query, key, value = np.random.default_rng(0).standard_normal((3, 2, 8, 100, 64), dtype=np.float32)
>>> fastattn.attention(query, key, value, causal=True).shape
(2, 8, 100, 64)

Beside it are `fastattn.masks`, `attention_backward`, `KVCache`, `varlen_attention`, `flex_attention` and the
other names of ``fastattn.__all__``; ``python -m fastattn info`` says what is in use.

The flow of a call. A call with a known signature skips lines 4 to 8. A small one returns before line 2, by
``_api.prepared.recall``:

1. ``_api.attention.attention`` takes the caller's arguments;
2. ``_api.prepared.signature_of`` makes one key of all that decides how they are worked on;
3. ``_api.prepared.reuse`` runs the prepared call of that key, if there is one;
4. ``_call.normalize.normalize`` turns array_likes into a `Problem`; it and ``arguments`` alone raise on
   them;
5. ``masks.base.lower`` turns masks into a band, key intervals per row, or a mask map;
6. ``backends.registry.select`` takes the first backend that has no reason against the problem;
7. ``_call.schedule.make_schedule`` decides path, blocks, splits, copies, prefetch, domain and threads;
8. ``backends.cpu.record.write_record`` writes all that down for the Cython driver; Numba's has its own;
9. ``backends.numba.prepared.Prepared.run``, or the Cython driver's, fills in addresses and runs all tasks;
10. ``_api.prepared.PreparedCall`` keeps what the signature decided, for the next call of that key.

The wings. A wing imports from those above it alone:

===================  =================================================================================
``_machine``         the process: CPU and environment, threads and forks, arrays of others, constants
`fastattn.masks`     mask objects, and masks bound to a problem: key intervals, or tiles with bits
`fastattn.biases`    bias objects, which are added to scores without an array of all
``_call``            one call as data: options, arguments, storage, `Problem`, `Schedule`; checks are here
``backends``         each gives reasons why it cannot take a problem, and runs those that it can
``_api``             the public functions, each a list of stages; prepared calls; the C entry
``_cache``           `KVCache` and `RecurrentState`: what is kept between calls, and files of it
`fastattn.layers`    `MultiHeadAttention`: projections around `attention`
``integrations``     `attention` inside other libraries, each module imported on its own
``bench``, ``demo``  programs: ``python -m fastattn``
===================  =================================================================================

Kernels know no mask by name: they see one interval of keys per query row (whole tiles outside it are
skipped, whole tiles inside run unmasked), a dense array to stream, or tiles that are empty, full or have
bits. A new mask touches no kernel, a new instruction set touches no mask.

The rules that hold on every backend: types as in `numpy.linalg`; any strides, without copies; a query
without keys gives 0 and lse ``-inf``; a masked key is never seen, not even one that is NaN; masks combine by
AND; empty arrays are legal; the same bits for any number of threads, layout and batch; errors before any
work.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    import fastattn.backends.cython.driver  # noqa: F401
except ImportError:
    from fastattn.backends import registry
    from fastattn.backends.cython import backend as cython_backend

    if cython_backend.is_unbuilt_tree:  # where an installed fastattn may be meant
        registry.warn_without_kernels("fastattn has no compiled kernels", 3)

from fastattn import biases, masks
from fastattn._api.attention import (
    attention,
    dropout_mask,
    merge_attention,
    scaled_dot_product_attention,
    varlen_attention,
)
from fastattn._call.storage import Paged, Quantized
from fastattn._machine.host import get_num_threads, set_num_threads
from fastattn._machine.threads import no_fork
from fastattn._version import __version__
from fastattn.backends.registry import BackendError

if TYPE_CHECKING:
    from fastattn import layers
    from fastattn._api.backward import attention_backward, varlen_attention_backward
    from fastattn._api.blas import share_threads_with_blas
    from fastattn._api.c_entry import get_include
    from fastattn._api.conv import causal_conv1d
    from fastattn._api.flex import create_block_mask, flex_attention
    from fastattn._api.flex_backward import flex_attention_backward
    from fastattn._api.info import show_config
    from fastattn._api.kernel_methods import kernel_logsumexp, kernel_regression
    from fastattn._api.linear import linear_attention, random_features
    from fastattn._api.recurrent import gated_linear_attention, gated_linear_attention_backward
    from fastattn._api.reductions import key_weights, max_similarity, reduce_scores
    from fastattn._api.rope import rope, rope_tables
    from fastattn._cache.cache import KVCache
    from fastattn._cache.recurrent import RecurrentState
    from fastattn._call.gradients import FlexGradients, Gradients
    from fastattn._call.linear import LinearState, RandomFeatures
    from fastattn._call.recurrent import RecurrentGradients

__all__ = [
    "BackendError",
    "FlexGradients",
    "Gradients",
    "KVCache",
    "LinearState",
    "Paged",
    "Quantized",
    "RandomFeatures",
    "RecurrentGradients",
    "RecurrentState",
    "__version__",
    "attention",
    "attention_backward",
    "biases",
    "causal_conv1d",
    "create_block_mask",
    "dropout_mask",
    "flex_attention",
    "flex_attention_backward",
    "gated_linear_attention",
    "gated_linear_attention_backward",
    "get_include",
    "get_num_threads",
    "kernel_logsumexp",
    "kernel_regression",
    "key_weights",
    "layers",
    "linear_attention",
    "masks",
    "max_similarity",
    "merge_attention",
    "random_features",
    "reduce_scores",
    "rope",
    "rope_tables",
    "scaled_dot_product_attention",
    "set_num_threads",
    "share_threads_with_blas",
    "show_config",
    "varlen_attention",
    "varlen_attention_backward",
]


#: Imported when they are first named, and by which module: an import of the package is short.
_ON_FIRST_USE = {
    "FlexGradients": "fastattn._call.gradients",
    "Gradients": "fastattn._call.gradients",
    "KVCache": "fastattn._cache.cache",
    "LinearState": "fastattn._call.linear",
    "RandomFeatures": "fastattn._call.linear",
    "RecurrentGradients": "fastattn._call.recurrent",
    "RecurrentState": "fastattn._cache.recurrent",
    "_capi": "fastattn._capi",
    "attention_backward": "fastattn._api.backward",
    "causal_conv1d": "fastattn._api.conv",
    "create_block_mask": "fastattn._api.flex",
    "flex_attention": "fastattn._api.flex",
    "flex_attention_backward": "fastattn._api.flex_backward",
    "gated_linear_attention": "fastattn._api.recurrent",
    "gated_linear_attention_backward": "fastattn._api.recurrent",
    "get_include": "fastattn._api.c_entry",
    "kernel_logsumexp": "fastattn._api.kernel_methods",
    "kernel_regression": "fastattn._api.kernel_methods",
    "key_weights": "fastattn._api.reductions",
    "layers": "fastattn.layers",
    "linear_attention": "fastattn._api.linear",
    "max_similarity": "fastattn._api.reductions",
    "random_features": "fastattn._api.linear",
    "reduce_scores": "fastattn._api.reductions",
    "rope": "fastattn._api.rope",
    "rope_tables": "fastattn._api.rope",
    "share_threads_with_blas": "fastattn._api.blas",
    "show_config": "fastattn._api.info",
    "varlen_attention_backward": "fastattn._api.backward",
}

#: What stands here in the place of names of other libraries.
_INSTEAD = {
    **dict.fromkeys(
        ("dot_product_attention", "flash_attn_func", "memory_efficient_attention"), "fastattn.attention"
    ),
    **dict.fromkeys(("flash_attn_varlen_func", "varlen_attn"), "fastattn.varlen_attention"),
    "sdpa": "fastattn.scaled_dot_product_attention",
    **dict.fromkeys(("Cache", "DynamicCache", "flash_attn_with_kvcache"), "fastattn.KVCache"),
    **dict.fromkeys(("MultiHeadAttention", "MultiheadAttention"), "fastattn.layers.MultiHeadAttention"),
}


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        hint = f": say {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    with no_fork:
        module = import_module(_ON_FIRST_USE[name])
        found = globals()[name] = module if module.__name__ == f"fastattn.{name}" else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__") and name not in __all__)]
