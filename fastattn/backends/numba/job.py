"""A `Problem` as the record that compiled code works on, and what must live as long."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._plan import Plan
from fastattn._problem import Problem
from fastattn.backends.numba.calls import table
from fastattn.backends.numba.emit import LOG2E
from fastattn.backends.numba.layout import BLOCK, JOB, LEAD, PART, SCRATCH, WORD
from fastattn.backends.numba.target import TARGET
from fastattn.backends.numba.work import run_work

LINE_NBYTES = 64
MAX_PARTS = 64  #: deeper than the tree over any number of keys

_ALWAYS = frozenset({"work", "find_block", "find_rows", "fill", "start_rows", "finish"})
_LANES = frozenset(
    {
        "run_task",
        "attend",
        "score_tile",
        "score_keys",
        "add_values",
        "pack",
        "score",
        "softmax",
        "accumulate",
        "unpack",
    }
)
_ROWS = frozenset(
    {
        "run_row_task", "attend_leaves", "merge_before", "score_leaf", "add_leaf_values", "leave_part",
        "finish_rows", "take_sinks", "pack_rows", "score_rows", "softmax_rows", "accumulate_rows",
        "merge_rows", "unpack_rows", "copy_rows",
    }
)  # fmt: skip
_MASKS = frozenset({"find_intervals", "mask_tile", "span_words", "words_state"})
_ISOLATED = frozenset({"clean_values", "add_wild_values", "clear_masked"})


class Job:
    """One call: which functions it needs, its arrays and options as a record, and every thread's scratch
    memory."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self._plan = plan
        self._table = table(problem.query.dtype.name)
        self._alive: list[Any] = []
        values: dict[str, Any] = dict.fromkeys(JOB.names or (), 0)
        self._values = values
        values["calls"] = self._table.address
        self._set_arrays(problem)
        self._set_options(problem)
        self._set_tiles(problem)
        if plan.by_rows:
            self._set_rows(problem)
        self._num_threads = max(1, min(plan.num_threads, values["n_tasks"]))
        self._copies = any(a.strides[-1] != a.itemsize for a in (problem.key, problem.value))
        self._lay_out(problem)
        self._record = np.array([tuple(values.values())], dtype=JOB)

    def run(self, num_threads: int) -> None:
        """Every task on num_threads threads, which are no more than the plan's."""
        self._table.need(self._needed())
        self._run_once(num_threads)
        if self._record["saw_nan"][0]:
            # 0 * NaN of a value that the row may not read may be the cause: once more, with such values kept
            # apart.
            self._table.need(_ISOLATED)
            self._record["is_isolated"] = 1
            self._run_once(num_threads)

    @property
    def num_threads(self) -> int:
        """How many threads the tasks are enough for."""
        return self._num_threads

    def _needed(self) -> set[str]:
        """The functions that the call reaches; one that no call ever needed is not compiled."""
        values = self._values
        needed = set(_ALWAYS | (_ROWS if values["by_rows"] else _LANES))
        if values["is_masked"]:
            needed |= _MASKS
        if values["is_masked"] or values["has_bias"] or values["softcap"]:
            needed.add("adjust_rows" if values["by_rows"] else "adjust")
        for flag, names in (
            ("has_dense", ("read_dense", "mask_words")),
            ("has_tiles", ("read_tiles",)),
            ("has_bias", ("find_bias_rows",)),
            ("convert_bias", ("convert_row",)),
            ("has_lse", ("scatter",)),
            ("has_weights", ("write_row_weights" if values["by_rows"] else "write_weights",)),
        ):
            if values[flag]:
                needed |= {*names}
        if self._copies:
            needed.add("copy_rows")
        return needed

    def _run_once(self, num_threads: int) -> None:
        if self._values["left"]:
            self._left[:] = self._values["n_chunks"]
        run_work(self._table["work"], self._record, self._values["n_tasks"], num_threads)

    def _keep(self, array: np.ndarray) -> int:
        """The array's address; it lives as long as the job."""
        self._alive.append(array)
        return array.ctypes.data

    def _set_arrays(self, problem: Problem) -> None:
        values, n_lead = self._values, problem.query.ndim - 3
        bias, tiles = problem.bias, problem.tiles
        arrays = [
            problem.query, problem.key, problem.value, problem.out, problem.lse, problem.weights, bias,
            problem.dense, problem.key_start, problem.key_stop, None if tiles is None else tiles.index,
        ]  # fmt: skip
        absent = [0] * (LEAD + n_lead)
        views = np.array([absent if a is None else _view(a, n_lead) for a in arrays], dtype=np.int64)
        itemsize = problem.query.itemsize
        values.update(
            views=self._keep(views),
            view_size=LEAD + n_lead,
            lead_shape=self._keep(np.array(problem.lead, dtype=np.int64)),
            n_lead=n_lead,
            itemsize=itemsize,
            batch=problem.batch,
            num_kv_heads=problem.num_kv_heads,
            group_size=problem.group_size,
            len_q=problem.len_q,
            len_k=problem.len_k,
            head_dim=problem.head_dim,
            value_dim=problem.value_dim,
            sinks=0 if problem.sinks is None else problem.sinks.ctypes.data,
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
        if tiles is not None:
            values.update(
                has_tiles=True,
                tile_bits=tiles.bits.ctypes.data,
                tile_q=tiles.bits.shape[1],
                tile_k=tiles.bits.shape[2] * WORD,
            )
        values["is_masked"] = values["has_intervals"] or values["has_dense"] or values["has_tiles"]

    def _set_options(self, problem: Problem) -> None:
        """The factor of the packed query, the soft-cap and the factor of the exponents.

        Scores are held times log2(e), with factor 1, unless something given in natural units must stay exact:
        a bias of any finite size must not overflow, and a row with a sink alone has just that as its lse.
        """
        natural = problem.bias is not None or problem.sinks is not None
        unit = 1.0 if natural else LOG2E
        softcap = problem.softcap
        factor = problem.scale / softcap if softcap else problem.scale * unit
        high, low = _in_two(factor, problem.query.dtype)
        self._values.update(
            query_high=high,
            query_low=low,
            softcap=softcap * unit if softcap else 0.0,
            exponent_factor=LOG2E if natural else 1.0,
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
        """How the rows of each key/value head lie in tiles, and which leaves are a task; see
        `fastattn._plan`."""
        values, plan = self._values, self._plan
        itemsize, lanes = values["itemsize"], values["lanes"]
        heads, n_rows = problem.batch * problem.num_kv_heads, problem.len_q * problem.group_size
        most = plan.row_tasks * plan.num_threads
        max_lanes = -(-n_rows // lanes) * lanes
        acc_ld = -(-problem.value_dim // lanes) * lanes
        n_leaves = -(-problem.len_k // values["block_k"])
        chunk_leaves = 1
        while chunk_leaves < n_leaves and (
            plan.num_threads == 1 or heads * -(-n_leaves // chunk_leaves) > most
        ):
            chunk_leaves *= 2
        n_chunks = max(1, -(-n_leaves // chunk_leaves))
        part_nbytes = 2 * _lines(max_lanes * itemsize) + _lines(n_rows * acc_ld * itemsize)
        values.update(
            by_rows=True,
            n_blocks=1,
            max_lanes=max_lanes,
            query_ld=-(-problem.head_dim // lanes) * lanes,
            acc_ld=acc_ld,
            n_leaves=n_leaves,
            chunk_leaves=chunk_leaves,
            n_chunks=n_chunks,
            n_tasks=heads * n_chunks,
            n_parts=2 + max(0, n_leaves - 1).bit_length(),  # the deepest that the stack gets, and the sinks
            part_nbytes=part_nbytes,
        )
        if heads * problem.len_k * (problem.head_dim + problem.value_dim) * itemsize >= plan.fetch_nbytes:
            for name, array in (("key_ahead", problem.key), ("value_ahead", problem.value)):
                row_nbytes = max(1, array.shape[-1] * itemsize)
                values[name] = array.strides[-2] * (plan.ahead_nbytes // row_nbytes + 1)
        if n_chunks > 1:
            parts = np.zeros(heads * n_chunks, PART)
            data = np.empty(heads * n_chunks * part_nbytes + LINE_NBYTES, np.uint8)
            parts["data"] = _on_line(self._keep(data)) + part_nbytes * np.arange(len(parts))
            self._left = np.zeros(heads, np.int64)
            values.update(parts=self._keep(parts), left=self._left.ctypes.data)

    def _lay_out(self, problem: Problem) -> None:
        """Places a thread's tiles in its scratch memory, each from a line of memory on."""
        values = self._values
        ld, block_k, itemsize = values["max_lanes"], values["block_k"], values["itemsize"]
        line, pointers, by_rows = ld * itemsize, ld * 8, values["by_rows"]
        key_tile, value_tile = (block_k * values[name] * itemsize for name in ("head_dim", "value_dim"))
        nbytes = dict.fromkeys(SCRATCH, line) | dict.fromkeys(
            ("rows", "out_rows", "bias_rows", "start", "stop", "stops", "part_stops", "row_i", "row_h"),
            pointers,
        )
        nbytes.update(
            query=(values["query_ld"] if by_rows else values["head_dim"]) * line,
            # Room for whole register tiles of keys.
            scores=(block_k + 2 * TARGET.score_rows) * line,
            acc=values["n_parts"] * values["part_nbytes"] if by_rows else values["acc_columns"] * line,
            inverse=2 * line,
            words=block_k // WORD * ld * 4,
            converted=block_k * line if values["convert_bias"] else 0,
            clean=value_tile if values["is_masked"] or values["has_bias"] else 0,
            key_copy=key_tile if problem.key.strides[-1] != itemsize else 0,
            value_copy=value_tile if problem.value.strides[-1] != itemsize else 0,
            block=BLOCK.itemsize,
            stack=MAX_PARTS * PART.itemsize if by_rows else 0,
        )
        at = 0
        for name in SCRATCH:
            values[f"to_{name}"] = at
            at += _lines(nbytes[name])
        memory = np.empty(self._num_threads * at + LINE_NBYTES, np.uint8)
        values.update(scratch=_on_line(self._keep(memory)), scratch_nbytes=at)


def _view(array: np.ndarray, n_lead: int) -> list[int]:
    """A row of the table; an array with fewer than three axes behind the leading ones lacks the column, then
    the head."""
    strides = array.strides
    behind = array.ndim - n_lead
    head = strides[n_lead] if behind > 1 else 0
    row = strides[n_lead + 1] if behind > 1 else strides[n_lead]
    col = strides[n_lead + 2] if behind > 2 else 0
    return [array.ctypes.data, head, row, col, *strides[:n_lead]]


def _in_two(factor: float, dtype: np.dtype) -> tuple[float, float]:
    """The factor rounded towards 0 to the dtype and what that left, of the same sign and 0 only with it."""
    with np.errstate(over="ignore"):
        high = dtype.type(factor)
    if abs(float(high)) > abs(factor):
        high = np.nextafter(high, dtype.type(0))
    low = dtype.type(factor - float(high)) if np.isfinite(high) else high
    if low == 0:
        low = high * dtype.type(2.0**-60 if dtype.itemsize == 4 else 2.0**-118)
    return float(high), float(low)


def _lines(nbytes: int) -> int:
    """Bytes rounded up to whole lines of memory."""
    return -(-nbytes // LINE_NBYTES) * LINE_NBYTES


def _on_line(address: int) -> int:
    return _lines(address)
