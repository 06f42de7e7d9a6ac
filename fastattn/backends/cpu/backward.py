"""Calls for gradients: what a driver is told, the arrays that it fills, and the gradients made of them.

A driver sees the query rows of a key/value head as one list, row = i * group_size + g. Rows that it writes
are padded to whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import frexp, ldexp
from typing import Any, NamedTuple

import numpy as np

from fastattn._call.gradients import (
    LARGE_NORMS,
    LARGE_SCORE,
    ROWS,
    Backward,
    Gradients,
    in_one_block,
    score_roundings,
    sum_to,
)
from fastattn._call.problem import FLOAT64, Arrays, Problem
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


class Plan(NamedTuple):
    """The numbers of a call for gradients, see ``struct Gradients`` of a driver's sources."""

    grad_scale: float  #: by which `delta` and the gradients of the weights are multiplied
    scale: float  #: the other factor of the scale, by which gradients of queries and keys are multiplied
    unit: float  #: by which scores of the kernels are multiplied to be natural
    score_rounding: float
    usual_rounding: float
    padded_rows: int
    query_ld: int  #: D rounded up to whole vectors
    value_ld: int  #: E rounded up
    wants: tuple[bool, ...]  #: whether the gradients of query, key and value are asked for
    rounds_weights: bool  #: of the schedule
    large_score: float = LARGE_SCORE
    large_norms: float = LARGE_NORMS


def plan_of(backward: Backward, schedule: Schedule, lanes: int) -> Plan:
    """Of a problem's gradients by this schedule."""
    problem = backward.problem
    grad_scale, scale = 1.0, problem.scale
    if not problem.bias and "aux" not in backward.wrt and LEAST_SCALE <= abs(scale) <= 1:
        grad_scale, scale = scale, 1.0  # the whole scale is applied where grad_out is packed
        if schedule.rounds_weights:  # by a power of two alone, which rounds nothing
            grad_scale = ldexp(1.0, frexp(problem.scale)[1] - 1)
            scale = problem.scale / grad_scale
    return Plan(
        grad_scale,
        scale,
        1.0 if schedule.exponent_factor == LOG2E else schedule.exponent_factor * LN2,
        *score_roundings(problem),
        padded_rows=schedule.n_blocks * schedule.n_vectors * lanes + schedule.max_lanes,
        query_ld=-(-problem.head_dim // lanes) * lanes,
        value_ld=-(-problem.value_dim // lanes) * lanes,
        wants=tuple(name in backward.wrt for name in ROWS),
        rounds_weights=schedule.rounds_weights,
    )


@dataclass(slots=True)
class Room:
    """What a driver fills and adds to. query, key and value have no rows where nobody wants them."""

    rows: np.ndarray  #: (3, *lead, K, padded_rows): the base, which is the sum of two numbers, and delta
    seen: np.ndarray | None  #: (*lead, K, padded_rows) bool, 0, where there are sinks to differentiate
    query: np.ndarray  #: (*lead, K, rows, query_ld)
    key: np.ndarray  #: (*lead, K, S, query_ld)
    value: np.ndarray  #: (*lead, K, S, value_ld)
    bias: dict[Sums, np.ndarray] = field(default_factory=dict)  #: 0, as `_room_for_sums` makes them
    #: (sums, 4 + axes of the scores): kind, address, keys of a run, numbers of a row of a grid; the strides
    #: of those that are broadcast to the scores, innermost first
    bias_words: np.ndarray | None = None
    bias_turns: np.ndarray | None = None  #: (key tiles, query blocks), where heads share BIAS_OF_SCORES
    diagonal_turn: np.ndarray | None = None  #: of BIAS_OF_DIAGONALS, the task that adds next


class PreparedGradients:
    """A call for gradients but for its arrays: any of the same dtypes, shapes and strides will do."""

    def __init__(
        self,
        backward: Backward,
        schedule: Schedule,
        plan: Plan,
        records: Any,
        loops_of: Callable[[Backward], Any],
    ) -> None:
        """records: of a driver, see `GradientRecords` of its sources. loops_of: see
        `fastattn.backends.jit.loading.gradient_loops_of`."""
        problem = backward.problem
        self._schedule, self._plan, self._records, self._loops_of = schedule, plan, records, loops_of
        self._sizes, self._dtype, self._wrt = problem.sizes, problem.dtype, backward.wrt
        self._shapes = problem.query.shape, backward.lse.shape
        self._heads = heads = (*problem.lead, problem.num_kv_heads)
        rows = (self._sizes.rows, problem.len_k, problem.len_k)
        lds = (plan.query_ld, plan.query_ld, plan.value_ld)
        self._room = [
            (*heads, n if wanted else 0, ld) for n, ld, wanted in zip(rows, lds, plan.wants, strict=True)
        ]
        self.is_small = schedule.is_small

    def run_on(self, backward: Backward) -> Gradients:
        """The gradients of a call, which may have a score_mod or ask for those of a bias."""
        problem = backward.problem
        arrays = problem._replace(out=backward.grad_out).arrays()
        return self.run(arrays, problem.out, backward.lse, backward.grad_lse, backward)

    def run(
        self,
        arrays: Arrays,
        out: np.ndarray,
        lse: np.ndarray,
        grad_lse: np.ndarray | None,
        backward: Backward | None = None,
    ) -> Gradients:
        """The gradients, of arrays that have that of the outputs as `out`. `backward` is needed where the
        problem has a score_mod, or the gradient of a bias is asked for."""
        num_threads, loops = self._schedule.num_threads, None
        for all_large in (False, True):
            room = self._make_room()
            if backward is not None:
                loops = self._loops_of(backward)
                if "bias" in self._wrt:
                    _make_room_for_bias(room, backward, self._schedule)
            if loops is not None:
                num_threads = min(num_threads, loops.max_threads)
            again = self._records.run(arrays, out, lse, grad_lse, room, loops, num_threads, all_large)
            if not again:
                break
        return self._found(room, arrays.sinks)

    def _make_room(self) -> Room:
        lines = (*self._heads, self._plan.padded_rows)
        query, key, value = in_one_block(np.empty, self._dtype, self._room)
        seen = np.zeros(lines, bool) if "sinks" in self._wrt else None
        return Room(np.empty((3, *lines), self._dtype), seen, query, key, value)

    def _found(self, room: Room, given_sinks: np.ndarray | None) -> Gradients:
        """The gradients in the order of the arguments."""
        sizes, (query_shape, lse_shape) = self._sizes, self._shapes
        wants_query, wants_key, wants_value = self._plan.wants
        sinks = bias = None
        if "bias" in self._wrt:
            bias = {sums: sum_to(array, sums.shape) for sums, array in room.bias.items()}
        if room.seen is not None and given_sinks is not None:
            # A row without keys has its sink alone, which nothing depends on.
            some = self._by_head(room.seen[..., : sizes.rows], lse_shape)
            high, low, delta = (
                self._by_head(x[..., : sizes.rows], lse_shape) for x in room.rows.astype(np.float64)
            )
            with np.errstate(all="ignore"):  # NaN and inf pass through
                # Natural, as scores beside sinks are.
                weights = np.exp(given_sinks[:, None].astype(np.float64) - high - low)
                change = np.where(some, weights * (delta / self._plan.grad_scale), 0)
                sinks = -sum_to(change, (sizes.num_heads, 1))[:, 0]
        return Gradients(
            self._by_head(room.query[..., : sizes.head_dim], query_shape) if wants_query else None,
            room.key[..., : sizes.head_dim] if wants_key else None,
            room.value[..., : sizes.value_dim] if wants_value else None,
            bias,
            sinks,
        )

    def _by_head(self, rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """``(*lead, K, rows, ...)`` as an array ``(*lead, H, L, ...)`` of this shape."""
        sizes, heads = self._sizes, self._heads
        if sizes.group_size == 1:
            return rows
        split = rows.reshape(*heads, sizes.len_q, sizes.group_size, *rows.shape[len(heads) + 1 :])
        return split.swapaxes(len(heads), len(heads) + 1).reshape(shape)


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
