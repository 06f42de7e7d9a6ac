"""What an adapter is: a version and the ways in which its library can compute a case."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from fastattn.bench.cases import Case, Inputs

#: A library that stores the scores is refused when they would take more than this share of the free memory:
#: most hold them more than once, and the machine shall survive.
SCORES_SHARE = 0.25

#: So few query rows that a library may be quicker without its fused operator (a token or a few of decoding).
FEW_ROWS = 16


class Unable(Exception):
    """A library cannot express a case; the message says why."""


class Redundant(Unable):
    """A way that would do the same as another way of the same library; it is left out without a word."""


@dataclass(frozen=True, slots=True)
class Call:
    """A case made ready in one library."""

    run: Callable[[], object]  #: what is timed; does all of the work, and nothing but it
    result: Callable[[], np.ndarray]  #: runs it and gives the output as ``(B, H, L, E)``; not timed


#: Makes a case ready; raises `Unable`, or its library's own error, when the library cannot do the case.
Way = Callable[[Case, Inputs], Call]


class Peer(Protocol):
    """The interface that `worker` drives. The module has ``load(num_threads) -> Peer``."""

    version: str
    ways: Mapping[str, Way]  #: each by its label; all are checked; the fastest right one is timed


def available_memory() -> int:
    """Bytes that can be had without swapping, as Linux estimates them; elsewhere OSError."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def check_scores_fit(case: Case) -> None:
    """Raise `Unable` for a library that stores the scores when they would fill the memory.

    To be called before anything large is made, a mask among it.
    """
    needed = case.batch * case.heads * case.len_q * case.len_k * np.dtype(case.dtype).itemsize
    try:
        limit = SCORES_SHARE * available_memory()
    except OSError:  # not on Linux: nobody knows
        return
    if needed > limit:
        raise Unable(
            f"needs {needed / 1e9:.1f} GB for the scores, over {SCORES_SHARE:.0%} of the "
            f"{limit / SCORES_SHARE / 1e9:.1f} GB that are free"
        )


def added_mask(case: Case, mask: np.ndarray) -> np.ndarray:
    """`mask` as numbers to be added to the scores: 0 and -inf for a bool one, a float one as it is."""
    if mask.dtype != bool:
        return mask
    zero, infinity = np.zeros((), case.dtype), np.array(-np.inf, case.dtype)
    return np.where(mask, zero, infinity)


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a case that is dense or causal by itself: one text."""

    items: slice  #: of the batch
    rows: slice  #: of the queries
    keys: slice


def blocks(case: Case) -> list[Block]:
    """The texts of a packed or ragged case: a call for each may be quicker than one with a mask.

    Their outputs are concatenated along the rows for documents and along the batch for ragged items.
    Raises `Redundant` where the case does not fall apart, or where other restrictions cross the blocks.
    """
    if case.mask is not None or case.bias is not None or case.window is not None:
        raise Redundant
    if case.document_length is not None and case.lengths is None:
        ends = range(case.document_length, case.len_k + case.document_length, case.document_length)
        parts = [slice(end - case.document_length, min(end, case.len_k)) for end in ends]
        return [Block(slice(None), part, part) for part in parts]
    if case.lengths is not None and case.document_length is None and not case.causal:
        whole = slice(None)
        return [Block(slice(i, i + 1), whole, slice(0, int(n))) for i, n in enumerate(case.lengths)]
    raise Redundant


def block_axis(case: Case) -> int:
    """The axis of ``(B, H, L, E)`` along which the outputs of `blocks` are concatenated."""
    return 0 if case.document_length is None else 2
