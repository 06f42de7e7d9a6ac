"""The options of the public functions as types: what a type checker checks and an editor completes.

What a function returns depends on its options, so each is declared by overloads, which share the options
here. Its definition names every option once more, with its default, and takes ``*extra`` and ``**unknown``
besides, in order to refuse them with more than Python would say.

Nothing imports this to run: it costs an `import fastattn` nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import ArrayLike

from fastattn._storage import Paged, Quantized
from fastattn.masks import Align, Mask

BackendName = Literal["cython", "numba", "reference", "cuda"]
CausalRule = bool | Align
RowsLike = ArrayLike | Quantized | Paged  #: keys or values
LayoutName = Literal["bhsd", "bshd"]
WindowBounds = tuple[int | None, int | None]


class SharedOptions(TypedDict, total=False):
    """What `varlen_attention` takes, and the others as well."""

    causal: CausalRule
    window: WindowBounds | None
    scale: float | None
    softcap: float | None
    sinks: ArrayLike | None
    out: np.ndarray | None
    num_threads: int | None
    backend: BackendName | None


class BatchOptions(SharedOptions, total=False):
    """What goes with arrays that have batch axes."""

    bias: ArrayLike | None
    key_lengths: ArrayLike | None
    layout: LayoutName


class AttentionOptions(BatchOptions, total=False):
    mask: Mask | ArrayLike | None
    dropout: float
    seed: int | None


class FlexOptions(BatchOptions, total=False):
    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    block_mask: Mask | None
    aux: Sequence[Any]
