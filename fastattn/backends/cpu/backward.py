"""The arrays that a driver fills for gradients, in its own order, and the gradients made of them.

A driver sees the query rows of a key/value head as one list, row = i * group_size + g. Rows that it writes
are padded to whole vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fastattn._call.gradients import (
    LARGE_NORMS,
    LARGE_SCORE,
    Backward,
    Gradients,
    in_one_block,
    score_roundings,
    sum_to,
)
from fastattn._call.problem import FLOAT64, Problem
from fastattn._call.schedule import Schedule
from fastattn._machine.constants import LN2, LOG2E
from fastattn.backends.cpu.fields import (
    BIAS_OF_DIAGONALS,
    BIAS_OF_GRID,
    BIAS_OF_KEYS,
    BIAS_OF_SCORES,
)
from fastattn.backends.cpu.record import address_of
from fastattn.biases import Sums

LEAST_SCALE = 2.0**-20  #: smaller ones might make gradients of weights denormal


@dataclass
class Room:
    """What a driver reads and adds to, see ``struct Gradients`` of its sources."""

    grad_scale: float  #: by which `delta` and the gradients of the weights are multiplied
    scale: float  #: the other factor of the scale, by which gradients of queries and keys are multiplied
    unit: float  #: by which scores of the kernels are multiplied to be natural
    large_score: float  #: see `fastattn._call.gradients`
    large_norms: float
    score_rounding: float
    usual_rounding: float
    base: np.ndarray  #: (2, *lead, K, padded_rows): the lse in the units of the scores, as the sum of two
    delta: np.ndarray  #: (*lead, K, padded_rows): holds grad_lse, 0 without
    seen: np.ndarray | None  #: (*lead, K, padded_rows) bool, where there are sinks to differentiate
    query: np.ndarray  #: (*lead, K, rows, D rounded up to whole vectors)
    key: np.ndarray  #: (*lead, K, S, D rounded up)
    value: np.ndarray  #: (*lead, K, S, E rounded up)
    bias: dict[Sums, np.ndarray]  #: as `_room_for_sums` makes them
    #: (sums, 4 + axes of the scores): kind, address, keys of a run, numbers of a row of a grid; the strides
    #: of those that are broadcast to the scores, innermost first
    bias_words: np.ndarray
    bias_turns: np.ndarray | None  #: (key tiles, query blocks), where heads or items share BIAS_OF_SCORES
    diagonal_turn: np.ndarray | None  #: of BIAS_OF_DIAGONALS, the task that adds next


def make_room(backward: Backward, schedule: Schedule, lanes: int) -> Room:
    """The inputs of a driver, and room for its outputs. bias, seen and turns are 0. query, key and value are
    not set: the driver sets them. Those that nobody wants have no rows."""
    problem = backward.problem
    sizes, dtype = problem.sizes, problem.dtype
    heads = (*problem.lead, sizes.num_kv_heads)
    padded_rows = schedule.n_blocks * schedule.n_vectors * lanes + schedule.max_lanes
    query_ld, value_ld = (-(-dim // lanes) * lanes for dim in (sizes.head_dim, sizes.value_dim))

    def by_row(array: np.ndarray) -> np.ndarray:
        grouped = array.reshape(*heads, sizes.group_size, sizes.len_q)
        rows = np.zeros((*heads, padded_rows), dtype)
        rows[..., : sizes.rows] = grouped.swapaxes(-2, -1).reshape(*heads, sizes.rows)
        return rows

    shapes = {
        "query": (sizes.rows, query_ld),
        "key": (sizes.len_k, query_ld),
        "value": (sizes.len_k, value_ld),
    }
    query, key, value = in_one_block(
        np.empty,
        dtype,
        [(*heads, rows if name in backward.wrt else 0, ld) for name, (rows, ld) in shapes.items()],
    )
    unit = 1.0 if schedule.exponent_factor == LOG2E else schedule.exponent_factor * LN2
    base = backward.lse.astype(np.float64) / unit
    high = base.astype(dtype)
    with np.errstate(invalid="ignore"):
        low = np.where(np.isfinite(high), base - high, 0)
    grad_scale, scale = 1.0, problem.scale
    if not problem.bias and "aux" not in backward.wrt and LEAST_SCALE <= abs(scale) <= 1:
        grad_scale, scale = scale, 1.0  # the whole scale is applied where grad_out is packed
    room = Room(
        grad_scale,
        scale,
        unit,
        LARGE_SCORE,
        LARGE_NORMS,
        *score_roundings(problem),
        base=np.stack([by_row(high), by_row(low)]),
        delta=by_row(np.zeros_like(base) if backward.grad_lse is None else backward.grad_lse),
        seen=np.zeros((*heads, padded_rows), bool) if "sinks" in backward.wrt else None,
        query=query,
        key=key,
        value=value,
        bias={},
        bias_words=np.zeros((0, 4 + problem.query.ndim), np.int64),
        bias_turns=None,
        diagonal_turn=None,
    )
    if "bias" in backward.wrt:
        _make_room_for_bias(room, backward, schedule)
    return room


def _make_room_for_bias(room: Room, backward: Backward, schedule: Schedule) -> None:
    problem = backward.problem
    words = []
    for sums in dict.fromkeys(backward.bias):
        room.bias[sums], *of_sums = _room_for_sums(sums, problem)
        words.append(of_sums)
        shares = of_sums[0] == BIAS_OF_SCORES and sums.shape[:-2] != (*problem.lead, problem.num_heads)
        if shares and room.bias_turns is None:
            room.bias_turns = np.zeros((-(-problem.len_k // schedule.block_k), schedule.n_blocks), np.int64)
        if sums.by_diagonals:
            room.diagonal_turn = np.zeros(1, np.int64)
    room.bias_words = np.array(words, np.int64)


def _room_for_sums(sums: Sums, problem: Problem) -> tuple[Any, ...]:
    """What a driver adds to, and its words of `Room.bias_words`."""
    heads, len_q, len_k = (*problem.lead, problem.num_heads), problem.len_q, problem.len_k
    shape, run, dtype = sums.shape, len_k, FLOAT64
    if sums.by_diagonals:
        kind = BIAS_OF_DIAGONALS
    elif sums.run is not None:
        kind, run = BIAS_OF_GRID, sums.run
    elif shape[-1] < len_k:
        kind, shape = BIAS_OF_GRID, (*heads, len_q, 1)
    elif shape[-2] < len_q:
        kind, shape = BIAS_OF_KEYS, (*heads, 1, len_k)
    else:
        kind, dtype = BIAS_OF_SCORES, problem.dtype
    # np.full writes every page, np.zeros none. Threads that add to unwritten pages interrupt one another.
    array = np.full(shape, 0, dtype)
    strides = (0,) * problem.query.ndim
    if kind == BIAS_OF_SCORES:
        strides = np.broadcast_to(array, (*heads, len_q, len_k)).strides[::-1]
    return array, kind, address_of(array), run, shape[-1], *strides


def gradients_of(backward: Backward, room: Room) -> Gradients:
    """The gradients in the order of the arguments."""
    problem, wrt = backward.problem, backward.wrt
    sizes = problem.sizes
    heads = (*problem.lead, sizes.num_kv_heads)

    def by_head(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """``(*lead, K, rows, ...)`` as an array ``(*lead, H, L, ...)`` of this shape."""
        split = rows.reshape(*heads, sizes.len_q, sizes.group_size, *rows.shape[len(heads) + 1 :])
        return split.swapaxes(len(heads), len(heads) + 1).reshape(shape)

    sinks = None
    bias = {sums: sum_to(array, sums.shape) for sums, array in room.bias.items()} if "bias" in wrt else None
    if room.seen is not None and problem.sinks is not None:
        # A row without keys has its sink alone, which nothing depends on.
        some = by_head(room.seen[..., : sizes.rows], backward.lse.shape)
        delta = by_head(room.delta[..., : sizes.rows], backward.lse.shape) / np.float64(room.grad_scale)
        high, low = (by_head(x[..., : sizes.rows], backward.lse.shape) for x in room.base.astype(np.float64))
        with np.errstate(all="ignore"):  # NaN and inf pass through
            # Natural, as scores beside sinks are.
            weights = np.exp(problem.sinks[:, None].astype(np.float64) - high - low)
            sinks = -sum_to(np.where(some, weights * delta, 0), (sizes.num_heads, 1))[:, 0]
    return Gradients(
        by_head(room.query[..., : sizes.head_dim], problem.query.shape) if "query" in wrt else None,
        room.key[..., : sizes.head_dim] if "key" in wrt else None,
        room.value[..., : sizes.value_dim] if "value" in wrt else None,
        bias,
        sinks,
    )
