"""Exact attention on NumPy arrays, without storing the score matrix.

The flow of a call; one whose signature is known goes from line 3 to line 9, and a small one of arrays alone
is answered by ``_prepared.recall`` before line 2:

1. ``_api.attention`` takes the caller's arguments;
2. ``_prepared.signature_of`` makes one key of all that decides how they are worked on;
3. ``_prepared.reuse`` runs the prepared call of that key, if there is one;
4. ``_normalize.normalize`` turns array_likes into a `Problem`; it and ``_arguments`` alone raise on them;
5. ``masks.lower`` turns masks into a band, key intervals per row, or a mask map;
6. ``_registry.select`` takes the first backend that has no reason against the problem;
7. ``_schedule.make_schedule`` decides path, blocks, splits, copies, prefetch, domain and threads;
8. ``backends.cpu.record.write_record`` writes all that down for the Cython driver; Numba's has its own;
9. ``backends.numba.prepared.Prepared.run``, or the Cython driver's, fills in addresses and runs all tasks;
10. ``_prepared.PreparedCall`` keeps what the signature decided, for the next call of that key.

The modules, each of which imports only what stands above it:

===================  =================================================================================
``_constants``       numbers that more than one place knows, or that were found by measuring
``_mask_map``        masks bound to a problem size: key intervals per row, or tiles with bits
`fastattn.masks`     mask objects, which lower to those
``_mask_parts``      what a mask leaves of the parts of a problem
``_storage``         `Paged`, `Quantized`, and how keys and values lie in memory
``_options``         the options of the public functions as types, for checkers and editors
``_hints``           what a message says to those who know another library
``_problem``         `Problem`: strided views, sizes and options of one call; validates nothing
``_dropout``         which weights dropout keeps
``_gradients``       `Backward`: the same of a call for gradients
``_host``            cores, CPU, caches and environment variables
``_threads``         how many threads a call may have, whoever asks for how many; forks
``_arguments``       what each argument may be, and the error that says what it is instead
``_normalize``       the caller's arguments to a `Problem`; the two alone raise on them
``_schedule``        problem and host to `Schedule`: every decision on how a call is cut up, once
``backends``         each gives reasons why it cannot take a problem, and runs those that it can
``_registry``        the order of preference among backends, imported when they are first needed
``_prepared``        what the signature of a call decides, kept for the next call of that signature
``_api``             `attention` and its relatives
``_backward``        `attention_backward`: gradients
``_flex``            `flex_attention`: scores and masks as Python functions
``_cache_pages``     pages of keys and values that caches share
``_cache_state``     what a cache is made with and what it holds, checked
``_cache_files``     a cache as a file, in the safetensors layout
``_cache``           `KVCache`: which pages each item of a batch has, and attention over them
``_rope``            `rope` and `rope_tables`: rotary position embedding
``_kernel_methods``  `kernel_regression` and `kernel_logsumexp`: attention by distances
``_linear``          `linear_attention` and `random_features`: kernels in place of the softmax
``_capi``            the C entry: one struct and one function, for C, Cython, Numba and XLA
`fastattn.layers`    `MultiHeadAttention`: projections around `attention`, imported on its own
``integrations``     `attention` inside other libraries, each module imported on its own
``_blas``            NumPy's BLAS, and its products on this package's threads
===================  =================================================================================

Kernels know no mask by name: they see one interval of keys per query row (whole tiles outside it are
skipped, whole tiles inside run unmasked), a dense array to stream, or tiles that are empty, full or have
bits. A new mask touches no kernel, a new instruction set touches no mask.

The rules that hold on every backend: types as in `numpy.linalg`; any strides, without copies; a query
without keys gives 0 and lse ``-inf``; a masked key is never seen, be it NaN; masks combine by AND; empty
arrays are legal; the same bits for any number of threads, layout and batch; errors before any work.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastattn import _host

try:
    with _host.brief_openmp_spin():
        # Loads the OpenMP runtime now, so that a limit of threadpoolctl's holds for the first call already.
        import fastattn.backends.cython.driver  # noqa: F401
except ImportError:
    from fastattn import _registry
    from fastattn.backends import cython_cpu

    if cython_cpu.is_unbuilt_tree:  # where an installed fastattn may be meant
        _registry.warn_without_kernels("fastattn has no compiled kernels", 3)

from fastattn import masks
from fastattn._api import (
    attention,
    dropout_mask,
    merge_attention,
    scaled_dot_product_attention,
    varlen_attention,
)
from fastattn._host import get_num_threads, set_num_threads
from fastattn._registry import BackendError
from fastattn._storage import Paged, Quantized
from fastattn._threads import no_fork
from fastattn._version import __version__

if TYPE_CHECKING:
    from fastattn import layers
    from fastattn._backward import attention_backward
    from fastattn._blas import share_threads_with_blas
    from fastattn._cache import KVCache
    from fastattn._capi import get_include
    from fastattn._flex import create_block_mask, flex_attention
    from fastattn._gradients import Gradients
    from fastattn._info import show_config
    from fastattn._kernel_methods import kernel_logsumexp, kernel_regression
    from fastattn._linear import LinearState, RandomFeatures, linear_attention, random_features
    from fastattn._rope import rope, rope_tables

__all__ = [
    "BackendError",
    "Gradients",
    "KVCache",
    "LinearState",
    "Paged",
    "Quantized",
    "RandomFeatures",
    "__version__",
    "attention",
    "attention_backward",
    "create_block_mask",
    "dropout_mask",
    "flex_attention",
    "get_include",
    "get_num_threads",
    "kernel_logsumexp",
    "kernel_regression",
    "layers",
    "linear_attention",
    "masks",
    "merge_attention",
    "random_features",
    "rope",
    "rope_tables",
    "scaled_dot_product_attention",
    "set_num_threads",
    "share_threads_with_blas",
    "show_config",
    "varlen_attention",
]


#: Imported when they are first named, and by which module: an import of the package is short.
_ON_FIRST_USE = {
    "Gradients": "fastattn._gradients",
    "KVCache": "fastattn._cache",
    "LinearState": "fastattn._linear",
    "RandomFeatures": "fastattn._linear",
    "_capi": "fastattn._capi",
    "attention_backward": "fastattn._backward",
    "create_block_mask": "fastattn._flex",
    "flex_attention": "fastattn._flex",
    "get_include": "fastattn._capi",
    "kernel_logsumexp": "fastattn._kernel_methods",
    "kernel_regression": "fastattn._kernel_methods",
    "layers": "fastattn.layers",
    "linear_attention": "fastattn._linear",
    "random_features": "fastattn._linear",
    "rope": "fastattn._rope",
    "rope_tables": "fastattn._rope",
    "share_threads_with_blas": "fastattn._blas",
    "show_config": "fastattn._info",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with no_fork:
        module = import_module(_ON_FIRST_USE[name])
        found = globals()[name] = module if module.__name__ == f"fastattn.{name}" else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__") and name not in __all__)]
