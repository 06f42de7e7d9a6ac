"""Prepared calls: the record of a call without addresses, and scratch memory kept for the next call."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np

from fastattn._call.problem import Mod, Problem
from fastattn._call.schedule import Schedule, make_schedule
from fastattn._call.schedule import Target as DriverTarget
from fastattn.backends.cpu.functions import loop_of
from fastattn.backends.cpu.record import LINE_NBYTES, MAX_PARTIALS, VIEWS, address_of, lines, write_record
from fastattn.backends.numba.codegen.calls import reached, table
from fastattn.backends.numba.codegen.target import TARGET
from fastattn.backends.numba.layout import BLOCK, JOB, LEAD, OWN_TILES, PARTIAL, SHARE
from fastattn.backends.numba.spread import CORES, CPU_SET_NBYTES, IS_LINUX, SPREAD_WORDS
from fastattn.backends.numba.threads import caller_takes_part, on_pool
from fastattn.backends.numba.work import run_work

#: Prepared calls whose scratch memory is kept for the next call, and its largest size each; not measured:
#: they bound the memory kept to some 32 MB.
MAX_IDLE, MAX_IDLE_NBYTES = 8, 1 << 22

#: Functions that not every call reaches, by the property of a call that needs them.
_CONDITIONS = {
    "uses_split_kv": ("run_split_task",),
    "sweeps": ("run_task",),
    "is_masked": ("find_intervals", "mask_tile"),
    "is_adjusted": ("adjusted_scores", "adjust_rows"),
    "has_score_mod": ("modify_scores", "note_masked", "note_outside"),
    "has_dense": ("read_dense",),
    "has_mask_map": ("read_mask_map",),
    "has_bias": ("find_bias_rows",),
    "prefetches_rows": ("prefetch_rows",),
    "convert_bias": ("convert_row",),
    "has_lse": ("scatter",),
    "has_weights": ("write_weights", "write_row_weights"),
    "has_copies": ("copy_new",),
    "has_last": ("accumulate_last",),
    "has_sinks": ("end_rows",),
    "is_spread": ("spread_start", "spread_enter", "spread_leave"),
    "runs_again": ("leave_headroom", "write_large"),
    "is_nonfinite_safe": ("clean_values", "add_nonfinite_values", "clear_masked"),
}

#: The index of each field of the record of a call among its words of 8 bytes.
_INDEX = {name: number for number, name in enumerate(JOB.names or ())}

_START = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)


class Prepared:
    """A prepared call of this driver: all but the arrays."""

    def __init__(self, problem: Problem, num_threads: int) -> None:
        itemsize = problem.dtype.itemsize
        target = DriverTarget(TARGET.vector_bytes // itemsize, TARGET.block_vectors, TARGET.tile_rows)
        schedule = make_schedule(problem, target, num_threads)
        self.is_small = schedule.is_small
        self._has_sinks = problem.sinks is not None
        self._table = table(problem.dtype.name)
        fields, views = write_record(problem, schedule, target, **_larger_tiles(problem, schedule))
        record = np.zeros(1, JOB)
        record.view(np.uint8)[: len(fields)] = np.frombuffer(fields, np.uint8)
        job = record[0]
        self.n_tasks = int(job["n_tasks"]) if problem.num_heads and problem.len_q else 0
        self._num_threads = max(1, min(schedule.num_threads, self.n_tasks))
        self.sizes = (problem.batch, problem.num_heads, problem.len_q, problem.len_k)
        self.loop = loop_of(problem, schedule)
        if self.loop is not None:
            job["score_mod"] = self.loop.address
        _set_own(problem, schedule, job)
        job["kernels"], job["cores"], job["n_cpus"] = self._table.address, CORES.ctypes.data, len(CORES)

        self.n_splits, self.partial_nbytes = int(job["n_splits"]), int(job["partial_nbytes"])
        self.scratch_nbytes = self._num_threads * int(job["scratch_nbytes"]) + LINE_NBYTES
        #: Whether a NaN or inf may be hidden from some rows that share a tile with others.
        self.may_hide = bool(job["is_masked"] or job["may_mask"])
        self._needed = self._functions(job, runs_again=False)
        self.needed_again = self._functions(job, runs_again=True)

        # The words of a call: its record, the table of views and the leading axes, the threads' shares, and
        # the record of `spread`.
        words = [record.view(np.int64), np.frombuffer(views, np.int64)]
        self.views = len(words[0])
        self.shares = self.views + len(words[1])
        self.lead_shape = self.shares - len(problem.lead)
        self.spread = self.shares + self._num_threads * SHARE.itemsize // 8
        self.words = np.concatenate([*words, np.zeros(self.spread + SPREAD_WORDS - self.shares, np.int64)])
        #: Of each array that is not None: its number in `Problem.arrays`, and the index of its address.
        self.addresses = [
            (
                number,
                self.views + number * (LEAD + len(problem.lead)) if number < len(VIEWS) else _INDEX[name],
            )
            for number, (name, array) in enumerate(
                zip((*VIEWS, "sinks", "mask_bits"), problem.arrays(), strict=True)
            )
            if array is not None
        ]

    def run(self, arrays: tuple[Any, ...], score_mod: Mod | None = None) -> None:
        """Fill the outputs among the arrays, which are those of `Problem.arrays`."""
        if not self.n_tasks:
            return
        self._table.need(self._needed)
        idle = _idle_jobs(self)
        try:
            job = idle.pop()
        except IndexError:
            job = _Job(self, self._table)
        job.run(arrays, score_mod, self._num_threads)
        if not idle and self.scratch_nbytes <= MAX_IDLE_NBYTES:
            idle.append(job)

    def set_shares(self, words: np.ndarray, num_threads: int) -> None:
        """Sets each thread's share of the tasks, a range of consecutive ones: round-robin would bring every
        head's keys and values into every thread's cache. Clears the record of `spread`."""
        step = SHARE.itemsize // 8
        for thread in range(num_threads):
            at = self.shares + thread * step
            words[at] = self.n_tasks * thread // num_threads
            words[at + 1] = self.n_tasks * (thread + 1) // num_threads
        words[self.spread :] = 0

    def _functions(self, job: Any, runs_again: bool) -> frozenset[str]:
        """The functions that the call reaches; only these are compiled."""
        holds: dict[str, Any] = {
            "sweeps": not job["uses_split_kv"],
            "is_adjusted": job["is_masked"] or job["adjusts_all"],
            "has_copies": job["copies_keys"] or job["packs_values"],
            "has_last": job["value_dim"] % TARGET.tile_rows != 0,
            "has_sinks": self._has_sinks,
            "prefetches_rows": job["has_bias"] or job["has_dense"],
            "runs_again": runs_again,
            "is_nonfinite_safe": runs_again and self.may_hide,
            "is_spread": IS_LINUX and self._num_threads > 1,
        }
        without = [
            name
            for flag, names in _CONDITIONS.items()
            if not (holds[flag] if flag in holds else job[flag])
            for name in names
        ]
        roots = ("spread_start", "work")  # that Python calls
        return frozenset().union(*(reached(root, frozenset(without)) for root in roots))


@lru_cache(maxsize=MAX_IDLE)
def _idle_jobs(prepared: Prepared) -> list[_Job]:
    """The jobs of this prepared call that no call uses at the moment."""
    return []


class _Job:
    """The words of a running call, with its addresses, and every thread's scratch memory."""

    def __init__(self, prepared: Prepared, table: Any) -> None:
        self._prepared, self._table = prepared, table
        self._work = table.address_of("work")
        self._start_spread = _START(table.address_of("spread_start"))
        self.words = words = prepared.words.copy()
        self._scratch = np.empty(prepared.scratch_nbytes, np.uint8)
        self._address = address_of(words)
        self._shares = self._address + 8 * prepared.shares
        for name in ("views", "lead_shape", "spread"):
            words[_INDEX[name]] = self._address + 8 * getattr(prepared, name)
        words[_INDEX["scratch"]] = lines(address_of(self._scratch))
        self._left: np.ndarray | None = None
        if prepared.n_splits > 1:
            n_tasks, nbytes = prepared.n_tasks, prepared.partial_nbytes
            self._partials = np.zeros(n_tasks, PARTIAL)
            self._partial_data = np.empty(n_tasks * nbytes + LINE_NBYTES, np.uint8)
            self._left = np.empty(n_tasks // prepared.n_splits, np.int64)
            self._partials["data"] = np.arange(n_tasks) * nbytes + lines(address_of(self._partial_data))
            words[_INDEX["partials"]] = address_of(self._partials)
            words[_INDEX["left"]] = address_of(self._left)

    def run(self, arrays: tuple[Any, ...], score_mod: Mod | None, num_threads: int) -> None:
        """Every task, on so many threads, or fewer where the pool has no room."""
        words, loop = self.words, self._prepared.loop
        if loop is not None:
            aux = loop.words(score_mod)
            words[_INDEX["aux"]] = aux.buffer_info()[0]
        for number, at in self._prepared.addresses:
            words[at] = address_of(arrays[number])
        on_pool(num_threads, self._run)
        if words[_INDEX["saw_nonfinite"]]:
            # It may be 0 times the NaN or inf of a masked value, or an overflow: once more, without either.
            self._table.need(self._prepared.needed_again)
            words[_INDEX["runs_again"]], words[_INDEX["is_nonfinite_safe"]] = 1, self._prepared.may_hide
            on_pool(num_threads, self._run)
            for name in ("saw_nonfinite", "runs_again", "is_nonfinite_safe"):
                words[_INDEX[name]] = 0
        if loop is not None:
            outside, at = (int(words[_INDEX[name]]) for name in ("read_outside", "outside_at"))
            words[_INDEX["read_outside"]] = words[_INDEX["outside_at"]] = 0
            loop.check(outside, self._prepared.sizes, score_mod, at - 1)

    def _run(self, num_threads: int) -> None:
        if self._left is not None:
            self._left[:] = self._prepared.n_splits
        self._prepared.set_shares(self.words, num_threads)
        if IS_LINUX and num_threads > 1 and caller_takes_part():
            self._start_spread(self._address)
        run_work(self._work, self._address, self._shares, num_threads)


def _larger_tiles(problem: Problem, schedule: Schedule) -> dict[str, int]:
    """Sizes of tiles that are larger in this driver: whole register tiles of keys, and contiguous rows in the
    sweep."""
    itemsize, tile = problem.dtype.itemsize, schedule.block_k * problem.dtype.itemsize
    larger = {"scores": (schedule.block_k + 2 * TARGET.score_rows) * schedule.max_lanes * itemsize}
    if problem.key.strides[-1] != itemsize and not schedule.copies_keys:
        larger["key_copy"] = tile * problem.head_dim
    if problem.value.strides[-1] != itemsize and not schedule.packs_values:
        larger["value_copy"] = tile * problem.value_dim
    return larger


def _set_own(problem: Problem, schedule: Schedule, job: Any) -> None:
    """Sets this driver's own fields: offsets of its own tiles, after the others, and the factor of the
    query."""
    nbytes = {
        "spare": schedule.max_lanes * problem.dtype.itemsize,
        "block": BLOCK.itemsize,
        "stack": MAX_PARTIALS * PARTIAL.itemsize if schedule.uses_split_kv else 0,
        "allowed": CPU_SET_NBYTES,
        "chosen": CPU_SET_NBYTES,
    }
    at = int(job["scratch_nbytes"])
    for name in OWN_TILES:
        job[f"to_{name}"] = at
        at += lines(nbytes[name])
    job["scratch_nbytes"] = at
    job["query_high"], job["query_low"] = _high_and_low(schedule.query_factor, problem.dtype)


def _high_and_low(factor: float, dtype: np.dtype) -> tuple[float, float]:
    """The factor rounded towards 0 to the dtype, and the remainder, of the same sign and 0 only with it."""
    with np.errstate(all="ignore"):  # overflow to inf and underflow to 0 are meant
        high = dtype.type(factor)
        if abs(float(high)) > abs(factor):
            high = np.nextafter(high, dtype.type(0))
        low = dtype.type(factor - float(high)) if np.isfinite(high) else high
        if low == 0:
            low = high * dtype.type(2.0**-60 if dtype.itemsize == 4 else 2.0**-118)
    return float(high), float(low)
