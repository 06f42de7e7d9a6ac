"""Prepared calls: the record of a call without addresses, and scratch memory kept for the next call."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from fastattn._call.problem import Arrays, Mod, Problem
from fastattn._call.schedule import Schedule, make_schedule
from fastattn._call.schedule import Target as DriverTarget
from fastattn._machine.constants import FEW_ROWS, LOG2E
from fastattn.backends.cpu.record import LINE_NBYTES, address_of, lines
from fastattn.backends.jit.codegen.target import TARGET
from fastattn.backends.jit.loading import loop_of
from fastattn.backends.numba.blocks import PAD
from fastattn.backends.numba.calls import reached, table
from fastattn.backends.numba.layout import (
    ADDRESS,
    BIAS,
    BLOCK,
    COUNTS,
    DENSE,
    KEY,
    LEAD,
    SHAPE,
    STRIDES,
    TILES,
    VALUE,
    VIEWS,
    job_of,
)
from fastattn.backends.numba.threads import on_pool
from fastattn.backends.numba.work import run_on_threads

#: How many prepared calls keep scratch memory for their next call, and the most bytes that each keeps: 32 MB
#: in all. Not measured.
MAX_IDLE, MAX_IDLE_NBYTES = 8, 1 << 22

#: Stages that only some calls reach, by the property that these calls have.
_CONDITIONS = {
    "uses_split_kv": ("run_split_task",),
    "sweeps": ("run_task",),
    "uses_tiles": ("score_keys",),
    "uses_rows": ("score_rows", "accumulate_rows"),
    "has_splits": ("run_merge",),
    "has_starts": ("find_intervals", "mask_intervals"),
    "has_extra": ("mask_tile", "mask_scores"),
    "has_rows": ("mask_rows",),
    "is_adjusted": ("adjust",),
    "has_score_mod": ("call_score_mod", "note_outside", "note_masked"),
    "has_weights": ("write_weights",),
    "has_sinks": ("add_sinks",),
    "is_safe": ("clean_values", "add_nonfinite_values", "leave_headroom", "write_large"),
}

#: The index of each count of the record of a call among its words of 8 bytes.
_INDEX = {name: number for number, name in enumerate(COUNTS)}


class Prepared:
    """A prepared call of this driver: all but the arrays."""

    def __init__(self, problem: Problem, num_threads: int) -> None:
        itemsize = problem.dtype.itemsize
        target = DriverTarget(TARGET.vector_bytes // itemsize, TARGET.block_vectors, TARGET.tile_rows)
        schedule = make_schedule(problem, target, num_threads)
        self.is_small = schedule.is_small
        self.table = table(problem.dtype.name)
        self.sizes = (problem.batch, problem.num_heads, problem.len_q, problem.len_k)
        self.loop = loop_of(problem, target.lanes)
        record = np.zeros(1, job_of(problem.dtype))
        job = record[0]
        _set_problem(job, problem)
        _set_schedule(job, problem, schedule, target)
        job["stages"] = self.table.address
        if self.loop is not None:
            job["score_mod"] = self.loop.address
        self.n_tasks = int(job["n_tasks"]) if problem.num_heads and problem.len_q else 0
        self.n_heads = self.n_tasks // schedule.n_splits if schedule.n_splits > 1 else 0
        self.num_threads = max(1, min(schedule.num_threads, self.n_tasks))

        self.tiles = _tiles(problem, schedule, int(job["rows_ld"]))
        self.partials_nbytes = int(job["n_tasks"] * job["partial_nbytes"]) if schedule.uses_split_kv else 0
        self.nbytes = self.num_threads * sum(self.tiles.values()) + self.partials_nbytes
        self._needed, self.needed_again = (self._stages(job, is_safe) for is_safe in (False, True))
        #: Keys and values whose rows have gaps, which compiled code for few queries cannot read: their shapes
        #: and strides here, as a later call has the arrays as they are given, in any layout.
        self.gaps = {
            number: (array.shape, array.strides)
            for number, array in enumerate(problem.arrays())
            if job["uses_rows"] and number in (KEY, VALUE) and array.strides[-1] != problem.dtype.itemsize
        }
        arrays = _readable(problem.arrays(), problem.dtype, self.gaps)
        #: The words of a call: its record, and the table of views.
        views = _views(problem, arrays)
        self.views = record.nbytes // 8
        self.words = np.concatenate([record.view(np.int64), views.ravel()])
        #: For each array that is not None: its index in `Problem.arrays`, and that of its address in `words`.
        self.addresses = [
            (number, self.views + number * views.shape[1] + ADDRESS)
            for number in VIEWS
            if arrays[number] is not None
        ]
        self.addresses += [
            (number, _INDEX[name])
            for number, name in enumerate(Arrays._fields)
            if name in ("sinks", "mask_bits") and arrays[number] is not None
        ]
        self.dtype = problem.dtype

    def run(self, arrays: tuple[Any, ...], score_mod: Mod | None = None) -> None:
        """Fill the outputs among the arrays, which are those of `Problem.arrays`."""
        if not self.n_tasks:
            return
        self.table.need(self._needed)
        idle = _idle_jobs(self)
        try:
            job = idle.pop()
        except IndexError:
            job = _Job(self)
        job.run(_readable(arrays, self.dtype, self.gaps), score_mod)
        if not idle and self.nbytes <= MAX_IDLE_NBYTES:
            idle.append(job)

    def _stages(self, job: Any, is_safe: bool) -> frozenset[str]:
        """The stages that the call reaches; only these are compiled."""
        holds = {
            "sweeps": not job["uses_split_kv"],
            "uses_tiles": not job["uses_rows"],
            "has_splits": job["n_splits"] > 1,
            "has_starts": job["has_band"] or job["has_intervals"],
            "is_safe": is_safe,
        }
        without = [
            name
            for flag, names in _CONDITIONS.items()
            if not (holds[flag] if flag in holds else job[flag])
            for name in names
        ]
        return reached("run_tasks", frozenset(without))


@lru_cache(maxsize=MAX_IDLE)
def _idle_jobs(prepared: Prepared) -> list[_Job]:
    """The jobs of this prepared call that no call uses at the moment."""
    return []


class _Job:
    """The words of a running call, with its addresses, and every thread's scratch memory."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._words = words = prepared.words.copy()
        address = address_of(words)
        words[_INDEX["views"]] = address + 8 * prepared.views
        self._scratch = _aligned(prepared.nbytes)
        words[_INDEX["partials"]] = at = address_of(self._scratch)
        at += prepared.partials_nbytes
        self._blocks = _aligned(prepared.num_threads * BLOCK.itemsize).view(BLOCK)
        self._addresses = (prepared.table.address_of("run_tasks"), address, address_of(self._blocks))
        for block in self._blocks:
            for name, nbytes in prepared.tiles.items():
                block[name] = at
                at += nbytes

    def run(self, arrays: tuple[Any, ...], score_mod: Mod | None) -> None:
        """Runs every task, on one thread where the pool has no room."""
        words, prepared, loop = self._words, self._prepared, self._prepared.loop
        if loop is not None:
            aux = loop.words(score_mod)
            words[_INDEX["aux"]] = aux.buffer_info()[0]
        for number, at in prepared.addresses:
            words[at] = address_of(arrays[number])
        on_pool(prepared.num_threads, self._run)
        if words[_INDEX["saw_nonfinite"]]:
            # 0 times a masked NaN or inf, or an overflow, may be the cause. The second run avoids both.
            prepared.table.need(prepared.needed_again)
            words[_INDEX["is_safe"]] = 1
            on_pool(prepared.num_threads, self._run)
            words[_INDEX["saw_nonfinite"]] = words[_INDEX["is_safe"]] = 0
        if loop is not None:
            outside, at = (int(words[_INDEX[name]]) for name in ("read_outside", "outside_at"))
            words[_INDEX["read_outside"]] = words[_INDEX["outside_at"]] = 0
            loop.check(outside, prepared.sizes, score_mod, at - 1)

    def _run(self, num_threads: int) -> None:
        words, prepared = self._words, self._prepared
        for merges, n_tasks in enumerate((prepared.n_tasks, prepared.n_heads)):
            if n_tasks:
                words[_INDEX["merges"]], words[_INDEX["n_tasks"]] = merges, n_tasks
                words[_INDEX["next_task"]] = 0
                run_on_threads(*self._addresses, num_threads)


def _aligned(nbytes: int) -> np.ndarray:
    """Memory from a cache line on. It is 0: tiles have lanes that are computed and never used."""
    memory = np.zeros(nbytes + LINE_NBYTES, np.uint8)
    start = -address_of(memory) % LINE_NBYTES
    return memory[start : start + nbytes]


def _readable(arrays: tuple[Any, ...], dtype: np.dtype, gaps: dict[int, Any]) -> tuple[Any, ...]:
    """The arrays, with converted copies of those that compiled code cannot read in place."""
    bias, dense = arrays[BIAS], arrays[DENSE]
    if (bias is None or bias.dtype == dtype) and (dense is None or dense.itemsize == 1) and not gaps:
        return arrays
    readable = list(arrays)
    for number, (shape, strides) in gaps.items():
        rows = np.lib.stride_tricks.as_strided(readable[number], shape, strides)
        readable[number] = _converted(rows, np.ascontiguousarray, whole_rows=True)
    if bias is not None and bias.dtype != dtype:
        with np.errstate(over="ignore"):  # a bias below the range of the dtype masks
            readable[BIAS] = _converted(bias, lambda x: x.astype(dtype))
    if dense is not None and dense.itemsize != 1:
        readable[DENSE] = _converted(dense, lambda x: x != 0)
    return tuple(readable)


def _converted(array: np.ndarray, convert: Any, whole_rows: bool = False) -> np.ndarray:
    """The converted array. Elements are converted once, also where axes are broadcast, but the last one with
    whole_rows."""
    steps = (*array.strides[:-1], 1) if whole_rows else array.strides
    once = array[tuple(slice(None if step else 1) for step in steps)]
    return np.broadcast_to(convert(once), array.shape)


def _views(problem: Problem, arrays: tuple[Any, ...]) -> np.ndarray:
    """The table of views, without addresses."""
    n_lead = problem.query.ndim - 3
    views = np.zeros((len(VIEWS) + 1, LEAD + n_lead), np.int64)
    views[-1, LEAD:] = problem.lead[::-1]
    for view, array in zip(views, arrays, strict=False):
        if array is None:
            continue
        # Axes that the array lacks among (head, row, column) have size 1.
        n_own = array.ndim - n_lead
        own = {3: (0, 1, 2), 2: (0, 1), 1: (1,), 0: ()}[n_own]
        view[SHAPE:STRIDES] = 1
        for axis, place in zip(range(n_lead, array.ndim), own, strict=True):
            view[SHAPE + place], view[STRIDES + place] = array.shape[axis], array.strides[axis]
        view[LEAD:] = array.strides[:n_lead][::-1]
    return views


def _set_problem(job: Any, problem: Problem) -> None:
    """Sets sizes, options, and which arrays there are."""
    for name in ("num_kv_heads", "group_size", "len_q", "len_k", "head_dim", "value_dim"):
        job[name] = getattr(problem.sizes, name)
    job["n_lead"], job["itemsize"] = problem.query.ndim - 3, problem.dtype.itemsize
    present = {
        "lse": problem.lse, "weights": problem.weights, "sinks": problem.sinks, "bias": problem.plain_bias,
        "dense": problem.dense, "intervals": problem.key_start, "mask_map": problem.mask_map,
        "band": problem.band, "score_mod": problem.score_mod,
    }  # fmt: skip
    for name, array in present.items():
        job[f"has_{name}"] = array is not None
    job["has_rows"] = job["has_bias"] or job["has_dense"] or job["has_mask_map"]
    job["has_extra"] = job["has_rows"] or job["has_intervals"] or job["has_band"]
    if (band := problem.band) is not None:
        job["band_left"], job["band_right"], job["band_at_end"] = band.left, band.right, band.at_end
        job["has_lengths"] = band.lengths is not None
    if problem.mask_map is not None:
        _, job["tile_q"], words = problem.mask_map.bits.shape
        job["tile_k"] = words * 32


def _set_schedule(job: Any, problem: Problem, schedule: Schedule, target: DriverTarget) -> None:
    """Sets the fields of the schedule, and numbers of the dtype."""
    lanes = target.lanes
    for name in ("block_k", "n_vectors", "n_blocks", "n_tasks", "uses_split_kv", "split_tiles", "n_splits"):
        job[name] = getattr(schedule, name)
    job["lanes"] = lanes
    dims = (problem.head_dim, problem.value_dim)
    job["uses_rows"] = problem.sizes.rows <= FEW_ROWS and all(dim and dim % lanes == 0 for dim in dims)
    job["n_key_tiles"] = max(1, -(-problem.len_k // schedule.block_k))
    job["rows_ld"] = -(-max(problem.head_dim, problem.value_dim, schedule.block_k) // lanes) * lanes
    job["partial_nbytes"] = sum(_sums(problem, schedule).values())
    for name in ("score_root", "softcap", "exponent_factor"):
        job[name] = getattr(schedule, name)
    job["is_adjusted"] = schedule.softcap > 0 or schedule.score_root != 1
    job["is_natural"] = schedule.exponent_factor == LOG2E
    job["query_high"], job["query_low"] = _high_and_low(schedule.query_factor, problem.dtype)
    number = problem.dtype.type
    job["largest"], job["below_one"] = np.finfo(number).max, np.nextafter(number(1), number(0))
    job["no_low"] = _no_low(problem.dtype)


def _sums(problem: Problem, schedule: Schedule) -> dict[str, int]:
    """Bytes of the running state of a block, each aligned to a cache line."""
    line = lines(schedule.max_lanes * problem.dtype.itemsize)
    return {"row_max": line, "row_sum": line, "acc": (problem.value_dim + PAD) * line}


def _tiles(problem: Problem, schedule: Schedule, rows_ld: int) -> dict[str, int]:
    """Bytes of each tile of a thread, each aligned to a cache line."""
    line, block_k = lines(schedule.max_lanes * problem.dtype.itemsize), schedule.block_k
    n_key_tiles, sums = -(-problem.len_k // block_k), _sums(problem, schedule)
    counts = lines(8 * schedule.max_lanes)
    rows = lines(rows_ld * schedule.max_lanes * problem.dtype.itemsize)
    nbytes = {
        "query": rows, "columns": rows, "scores": (block_k + PAD) * line, "extra": block_k * line,
        "rows": 2 * rows, "flags": lines(block_k),
        "clean": lines(block_k * problem.value_dim * problem.dtype.itemsize), "rescale": line,
        "inverse": 2 * line, "start": counts, "stop": counts, "row_i": counts, "row_h": counts,
        "stops": counts, "tile_max": line, "kept_max": line,
        "stack": (1 + n_key_tiles.bit_length()) * sum(sums.values()) if schedule.uses_split_kv else 0,
    } | sums  # fmt: skip
    return {name: nbytes[name] for name in TILES}


def _no_low(dtype: np.dtype) -> float:
    return 2.0**-60 if dtype.itemsize == 4 else 2.0**-118


def _high_and_low(factor: float, dtype: np.dtype) -> tuple[float, float]:
    """The factor rounded towards 0 to the dtype, and the remainder, of the same sign and 0 only with it."""
    with np.errstate(all="ignore"):  # overflow to inf and underflow to 0 are meant
        high = dtype.type(factor)
        if abs(float(high)) > abs(factor):
            high = np.nextafter(high, dtype.type(0))
        low = dtype.type(factor - float(high)) if np.isfinite(high) else high
        if low == 0:
            low = high * dtype.type(_no_low(dtype))
    return float(high), float(low)
