"""All of a call but its addresses, worked out once for all calls that are alike: sizes, strides, options, and
what they mean for the tiles, for a thread's scratch memory, and for which functions are needed."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._problem import Problem
from fastattn._schedule import Schedule, score_factors
from fastattn.backends.numba.codegen.calls import reached, table
from fastattn.backends.numba.codegen.target import TARGET
from fastattn.backends.numba.layout import ADDRESS, BLOCK, JOB, LEAD, PARTIAL, SCRATCH, SHARE, WORD
from fastattn.backends.numba.spread import CORES, CPU_SET_NBYTES, IS_LINUX, SPREAD_WORDS

LINE_NBYTES = 64
MAX_PARTIALS = 64  #: deeper than the tree over any number of keys
MAX_FORMS = 1024  #: that are remembered

#: Functions that not every call reaches, by what in its record says that it does.
_CONDITIONS = {
    "uses_split_kv": ("run_split_task",),
    "by_lanes": ("run_task",),
    "is_masked": ("find_intervals", "mask_tile"),
    "is_adjusted": ("adjusted_scores", "adjust_rows"),
    "has_score_mod": ("modify_scores", "note_masked"),
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
    "is_nonfinite_safe": ("clean_values", "add_nonfinite_values", "clear_masked"),
}


#: The place of each field of a job among its words of 8 bytes.
PLACE = {name: place for place, name in enumerate(JOB.names or ())}

_forms: dict[Any, Form] = {}


def form_of(problem: Problem, plan: Schedule) -> Form:
    """The form of a call."""
    bias, dense, mask_map = problem.bias, problem.dense, problem.mask_map
    alike = (
        problem.query.dtype.char,
        plan,
        problem.query.shape,
        problem.key.shape,
        problem.value_dim,
        problem.scale,
        problem.softcap,
        problem.sinks is None,
        problem.score_mod is None,
        None if bias is None else bias.dtype.str,
        None if dense is None else dense.itemsize,
        None if mask_map is None else mask_map.bits.shape[1:],
        *[None if array is None else array.strides for array in arrays_of(problem)],
    )
    form = _forms.get(alike)
    if form is None:
        if len(_forms) >= MAX_FORMS:
            _forms.clear()
        form = _forms[alike] = Form(problem, plan)
    return form


def arrays_of(problem: Problem) -> list[np.ndarray | None]:
    """The arrays in the order of the table of views."""
    mask_map = problem.mask_map
    return [
        problem.query, problem.key, problem.value, problem.out, problem.lse, problem.weights, problem.bias,
        problem.dense, problem.key_start, problem.key_stop, None if mask_map is None else mask_map.index,
    ]  # fmt: skip


class Form:
    """What calls that are alike share."""

    def __init__(self, problem: Problem, plan: Schedule) -> None:
        self._plan = plan
        self._has_sinks = problem.sinks is not None
        self.table = table(problem.query.dtype.name)
        self._values: dict[str, Any] = dict.fromkeys(JOB.names or (), 0)
        self._values.update(calls=self.table.address, cores=CORES.ctypes.data, n_cpus=len(CORES))
        self._set_arrays(problem)
        self._set_options(problem)
        self._set_tiles(problem)
        if plan.uses_split_kv:
            self._set_rows(problem)
        else:
            self._set_copies(problem)
        self._lay_out(problem)
        values = self._values
        self.n_tasks: int = values["n_tasks"]
        self.num_threads = max(1, min(plan.num_threads, self.n_tasks))
        self.scratch_nbytes = self.num_threads * values["scratch_nbytes"] + LINE_NBYTES
        self.n_partials: int = self.n_tasks if values["n_splits"] > 1 else 0
        self.n_splits: int = values["n_splits"]
        self.partial_nbytes: int = values["partial_nbytes"]
        self.needed = self._needed(is_nonfinite_safe=False)
        self.needed_nonfinite = self._needed(is_nonfinite_safe=True)

        # The words of a call: its record, the table of views, the leading axes, the threads' shares, and what
        # they have claimed of the cores.
        record = np.array([tuple(values.values())], dtype=JOB).view(np.int64)
        n_lead = values["n_lead"]
        arrays = arrays_of(problem)
        absent = [0] * (LEAD + n_lead)
        views = np.array([absent if a is None else _view(a, n_lead) for a in arrays], dtype=np.int64)
        self.views = len(record)
        self.lead_shape = self.views + views.size
        self.shares = self.lead_shape + n_lead
        shares = np.zeros(self.num_threads * SHARE.itemsize // 8, dtype=np.int64)
        self.spread = self.shares + len(shares)
        spread = np.zeros(SPREAD_WORDS, dtype=np.int64)
        lead_shape = np.array(problem.lead, dtype=np.int64)
        self.words = np.concatenate([record, views.ravel(), lead_shape, shares, spread])
        #: Where the addresses of those arrays go that are there, with their places in `arrays_of`.
        self.addresses = [
            (view, self.views + view * views.shape[1] + ADDRESS)
            for view, a in enumerate(arrays)
            if a is not None
        ]

    def share_out(self, words: np.ndarray, num_threads: int) -> None:
        """Gives each of so many threads its share of the tasks: some that follow each other, so that not
        every thread brings every head's keys and values into its cache. No core is claimed."""
        step = SHARE.itemsize // 8
        for thread in range(num_threads):
            at = self.shares + thread * step
            words[at] = self.n_tasks * thread // num_threads
            words[at + 1] = self.n_tasks * (thread + 1) // num_threads
        words[self.spread :] = 0

    def _needed(self, is_nonfinite_safe: bool) -> frozenset[str]:
        """The functions that the call reaches; one that no call ever needed is not compiled."""
        values = self._values
        holds = values | {
            "by_lanes": not values["uses_split_kv"],
            "is_adjusted": values["is_masked"] or values["adjusts_all"],
            "has_copies": values["copies_keys"] or values["packs_values"],
            "has_last": values["value_dim"] % TARGET.tile_rows != 0,
            "prefetches_rows": values["has_bias"] or values["has_dense"],
            "is_nonfinite_safe": is_nonfinite_safe,
            "has_sinks": self._has_sinks,
            "is_spread": IS_LINUX and self.num_threads > 1,
        }
        without = [name for flag, names in _CONDITIONS.items() if not holds[flag] for name in names]
        roots = ("spread_start", "work")  # that Python calls
        return frozenset().union(*(reached(root, frozenset(without)) for root in roots))

    def _set_arrays(self, problem: Problem) -> None:
        values, bias, mask_map, itemsize = (
            self._values,
            problem.bias,
            problem.mask_map,
            problem.query.itemsize,
        )
        n_lead = len(problem.lead)
        values.update(
            view_size=LEAD + n_lead,
            n_lead=n_lead,
            itemsize=itemsize,
            num_kv_heads=problem.num_kv_heads,
            group_size=problem.group_size,
            len_q=problem.len_q,
            len_k=problem.len_k,
            head_dim=problem.head_dim,
            value_dim=problem.value_dim,
            has_lse=problem.lse is not None,
            has_weights=problem.weights is not None,
            has_intervals=problem.key_start is not None,
        )
        if bias is not None:
            is_swapped = not bias.dtype.isnative
            values.update(
                has_bias=True,
                bias_size=bias.itemsize,
                bias_swapped=is_swapped,
                convert_bias=is_swapped or bias.itemsize != itemsize or bias.strides[-1] != itemsize,
            )
        if problem.dense is not None:
            values.update(has_dense=True, dense_size=problem.dense.itemsize)
        if mask_map is not None:
            values.update(
                has_mask_map=True, tile_q=mask_map.bits.shape[1], tile_k=mask_map.bits.shape[2] * WORD
            )
        values["has_score_mod"] = problem.score_mod is not None
        values["may_mask"] = values["has_bias"] or values["has_score_mod"]
        values["is_masked"] = values["has_intervals"] or values["has_dense"] or values["has_mask_map"]

    def _set_options(self, problem: Problem) -> None:
        """The factor of the packed query, in two parts, and what else is applied to scores."""
        values, query = self._values, problem.query
        is_natural = values["may_mask"] or self._has_sinks
        factor, root, softcap, exponent = score_factors(
            problem.scale, problem.softcap, query.itemsize, is_natural
        )
        high, low = _in_two(factor, query.dtype)
        values.update(
            query_high=high,
            query_low=low,
            score_root=root,
            softcap=softcap,
            exponent_factor=exponent,
            adjusts_all=values["may_mask"] or softcap > 0 or root != 1,
        )

    def _set_tiles(self, problem: Problem) -> None:
        values, plan = self._values, self._plan
        lanes = TARGET.vector_bytes // problem.query.itemsize
        n_vectors = -(-problem.len_q * problem.group_size // lanes)
        n_blocks = -(-n_vectors // min(plan.block_q // lanes, TARGET.block_vectors))
        values.update(
            lanes=lanes,
            block_k=max(WORD, min(plan.block_k, -(-problem.len_k // WORD) * WORD)),
            n_vectors=n_vectors,
            n_blocks=n_blocks,
            n_tasks=problem.batch * problem.num_kv_heads * n_blocks,
            max_lanes=-(-n_vectors // n_blocks) * lanes,
            acc_columns=-(-problem.value_dim // TARGET.tile_rows) * TARGET.tile_rows,
        )

    def _set_rows(self, problem: Problem) -> None:
        """How the rows of each key/value head lie in tiles, and which key tiles are a task; see
        `fastattn._schedule`."""
        values, plan = self._values, self._plan
        itemsize, lanes = values["itemsize"], values["lanes"]
        heads, n_rows = problem.batch * problem.num_kv_heads, problem.len_q * problem.group_size
        most = plan.split_tasks * plan.num_threads
        max_lanes = -(-n_rows // lanes) * lanes
        acc_ld = -(-problem.value_dim // lanes) * lanes
        n_key_tiles = -(-problem.len_k // values["block_k"])
        split_tiles = 1
        while split_tiles < n_key_tiles and (
            plan.num_threads == 1 or heads * -(-n_key_tiles // split_tiles) > most
        ):
            split_tiles *= 2
        n_splits = max(1, -(-n_key_tiles // split_tiles))
        partial_nbytes = 2 * lines(max_lanes * itemsize) + lines(n_rows * acc_ld * itemsize)
        values.update(
            uses_split_kv=True,
            n_blocks=1,
            max_lanes=max_lanes,
            query_ld=-(-problem.head_dim // lanes) * lanes,
            acc_ld=acc_ld,
            split_tiles=split_tiles,
            n_splits=n_splits,
            n_tasks=heads * n_splits,
            n_partials=2 + max(0, n_key_tiles - 1).bit_length(),  # the depth of the stack, and the sinks
            partial_nbytes=partial_nbytes,
        )
        if heads * problem.len_k * (problem.head_dim + problem.value_dim) * itemsize >= plan.uncached_nbytes:
            for name, array in (("key_prefetch", problem.key), ("value_prefetch", problem.value)):
                row_nbytes = max(1, array.shape[-1] * itemsize)
                values[name] = array.strides[-2] * (plan.prefetch_distance // row_nbytes + 1)

    def _set_copies(self, problem: Problem) -> None:
        """Whether threads copy keys and pack values: where that pays, see `fastattn._schedule`."""
        values, plan = self._values, self._plan
        blocks = min(values["n_blocks"], values["n_tasks"] // plan.num_threads)
        panel_columns = values["acc_columns"]
        pays = plan.gap_blocks if _has_gaps(problem.value) else plan.copy_blocks
        value_nbytes = problem.len_k * panel_columns * values["itemsize"]
        key_nbytes = problem.len_k * problem.head_dim * values["itemsize"]
        values["packs_values"] = 1 < blocks >= pays and value_nbytes <= plan.copy_nbytes
        values["copies_keys"] = (
            1 < blocks >= plan.copy_blocks and _has_gaps(problem.key) and key_nbytes <= plan.copy_nbytes
        )

    def _lay_out(self, problem: Problem) -> None:
        """Places a thread's tiles in its scratch memory, each from a line of memory on."""
        values = self._values
        ld, block_k, itemsize = values["max_lanes"], values["block_k"], values["itemsize"]
        line, pointers, uses_split_kv = ld * itemsize, ld * 8, values["uses_split_kv"]
        tile = block_k * itemsize
        # A tile where elements have gaps between them, or the whole head where that pays.
        key_copy = tile * problem.head_dim if problem.key.strides[-1] != itemsize else 0
        value_copy = tile * problem.value_dim if problem.value.strides[-1] != itemsize else 0
        if values["copies_keys"]:
            key_copy = problem.len_k * problem.head_dim * itemsize
        if values["packs_values"]:
            value_copy = problem.len_k * values["acc_columns"] * itemsize
        nbytes = dict.fromkeys(SCRATCH, line) | dict.fromkeys(
            ("rows", "out_rows", "bias_rows", "start", "stop", "stops", "part_stops", "row_i", "row_h"),
            pointers,
        )
        nbytes.update(
            query=(values["query_ld"] if uses_split_kv else values["head_dim"]) * line,
            # Room for whole register tiles of keys.
            scores=(block_k + 2 * TARGET.score_rows) * line,
            acc=values["n_partials"] * values["partial_nbytes"]
            if uses_split_kv
            else values["acc_columns"] * line,
            inverse=2 * line,
            words=block_k // WORD * ld * 4,
            converted=block_k * line if values["convert_bias"] else 0,
            clean=tile * problem.value_dim if values["is_masked"] or values["may_mask"] else 0,
            key_copy=key_copy,
            value_copy=value_copy,
            block=BLOCK.itemsize,
            prefetch=2 * pointers + 8 * block_k,
            stack=MAX_PARTIALS * PARTIAL.itemsize if uses_split_kv else 0,
            allowed=CPU_SET_NBYTES,
            chosen=CPU_SET_NBYTES,
        )
        at = 0
        for name in SCRATCH:
            values[f"to_{name}"] = at
            at += lines(nbytes[name])
        values["scratch_nbytes"] = at


def _view(array: np.ndarray, n_lead: int) -> list[int]:
    """A row of the table; an array with fewer than three axes behind the leading ones lacks the column, then
    the head."""
    strides = array.strides
    behind = array.ndim - n_lead
    head = strides[n_lead] if behind > 1 else 0
    row = strides[n_lead + 1] if behind > 1 else strides[n_lead]
    col = strides[n_lead + 2] if behind > 2 else 0
    return [0, head, row, col, *strides[:n_lead]]


def _has_gaps(array: np.ndarray) -> bool:
    """Whether the elements or the rows of one head lie apart."""
    n_cols, itemsize = array.shape[-1], array.itemsize
    return (n_cols > 1 and array.strides[-1] != itemsize) or abs(array.strides[-2]) > n_cols * itemsize


def _in_two(factor: float, dtype: np.dtype) -> tuple[float, float]:
    """The factor rounded towards 0 to the dtype and what that left, of the same sign and 0 only with it."""
    high = dtype.type(factor)
    if abs(float(high)) > abs(factor):
        high = np.nextafter(high, dtype.type(0))
    low = dtype.type(factor - float(high))
    if low == 0:
        low = high * dtype.type(2.0**-60 if dtype.itemsize == 4 else 2.0**-118)
    return float(high), float(low)


def lines(nbytes: int) -> int:
    """Bytes, or an address, rounded up to whole lines of memory."""
    return -(-nbytes // LINE_NBYTES) * LINE_NBYTES
