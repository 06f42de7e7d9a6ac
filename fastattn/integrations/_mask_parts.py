"""What a mask leaves of the parts of a problem, for those who work on it in parts."""

from __future__ import annotations

from functools import reduce
from operator import and_

from fastattn.masks import Causal, KeyLengths, Mask
from fastattn.masks.map import (
    EMPTY,
    FULL,
    TILE_K,
    UNBOUNDED,
    Band,
    Block,
    Grid,
    Intervals,
    Node,
    Part,
    interval_state,
    plane_state,
)


def of_band(band: Band, L: int, S: int) -> Mask | None:
    """What `causal`, `window` and `key_lengths` allow as a mask, None where that is every key."""
    offset = (S if band.lengths is None else band.lengths) - L if band.at_end else 0
    parts: list[Mask] = []
    if band.right != UNBOUNDED:
        parts.append(Causal(offset=offset + band.right))
    if band.left != UNBOUNDED:
        parts.append(~Causal(offset=offset - band.left - 1))
    if band.lengths is not None:
        parts.append(KeyLengths(band.lengths))
    return reduce(and_, parts) if parts else None


def states_of_keys(mask: Mask, part: Part, keys: list[slice]) -> list[int]:
    """EMPTY, PARTIAL or FULL for each block of keys, over all items, heads and queries of a part.

    EMPTY is exact; a block all of whose keys are allowed may be PARTIAL where the mask does not lower to
    intervals.
    """
    *lead, H, L = (cut.stop - cut.start for cut in (*part.items, part.heads, part.queries))

    def bound(cut: slice) -> Node:
        return mask._cut(part.of_keys(cut))._bind(Block(tuple(lead), H, L, cut.stop - cut.start))

    if not keys:
        return []
    first, last = keys[0].start, keys[-1].stop
    node = bound(slice(first, last))
    if isinstance(node, Intervals):
        start, stop = node.start + first, node.stop + first
        return [interval_state(start, stop, cut.start, cut.stop) for cut in keys]
    states = node.states(Grid(L, last - first))

    def state_of(cut: slice) -> int:
        """By the tiles that the block touches where they agree, else by its own."""
        touched = states[..., (cut.start - first) // TILE_K : -((first - cut.stop) // TILE_K)]
        for state in (EMPTY, FULL):
            if (touched == state).all():
                return state
        return plane_state(bound(cut), L, cut.stop - cut.start)

    return [state_of(cut) for cut in keys]
