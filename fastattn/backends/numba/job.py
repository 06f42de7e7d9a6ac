"""One call: a `Problem` as the words that compiled code works on, and what must live as long."""

from __future__ import annotations

import numpy as np

from fastattn._plan import Plan
from fastattn._problem import Problem
from fastattn.backends.numba.calls import table
from fastattn.backends.numba.form import LINE_NBYTES, PLACE, arrays_of, form_of, lines
from fastattn.backends.numba.layout import PART
from fastattn.backends.numba.work import run_work


class Job:
    """The arrays and options of one call as a record, and every thread's scratch memory."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self._form = form = form_of(problem, plan)
        self._table = table(problem.query.dtype.name)
        self._words = words = form.words.copy()
        self._scratch = np.empty(form.scratch_nbytes, np.uint8)
        self._address: int = words.ctypes.data
        words[PLACE["calls"]] = self._table.address
        words[PLACE["views"]] = self._address + 8 * form.views
        words[PLACE["lead_shape"]] = self._address + 8 * form.lead_shape
        words[PLACE["scratch"]] = lines(self._scratch.ctypes.data)
        arrays = arrays_of(problem)
        for number, place in form.addresses:
            words[place] = arrays[number].ctypes.data  # type: ignore[union-attr]
        if problem.sinks is not None:
            words[PLACE["sinks"]] = problem.sinks.ctypes.data
        if problem.tiles is not None:
            words[PLACE["tile_bits"]] = problem.tiles.bits.ctypes.data
        if problem.score_mod is not None:
            # First of all: it may raise.
            from fastattn.backends.numba.modify import aux_words, score_loop

            words[PLACE["score_mod"]] = score_loop(
                problem.score_mod, problem.query.dtype, plan.by_rows, problem.group_size > 1
            )
            self._aux = aux_words(problem.score_mod.aux)
            words[PLACE["aux"]] = self._aux.ctypes.data
        if form.n_parts:
            self._parts = np.zeros(form.n_parts, PART)
            self._part_data = np.empty(form.n_parts * form.part_nbytes + LINE_NBYTES, np.uint8)
            self._left = np.empty(form.n_parts // form.n_chunks, np.int64)
            self._parts["data"] = np.arange(form.n_parts) * form.part_nbytes + lines(
                self._part_data.ctypes.data
            )
            words[PLACE["parts"]] = self._parts.ctypes.data
            words[PLACE["left"]] = self._left.ctypes.data

    @property
    def num_threads(self) -> int:
        """How many threads there are tasks and memory for."""
        return self._form.num_threads

    def run(self, num_threads: int) -> None:
        """Every task on num_threads threads."""
        self._table.need(self._form.needed)
        self._run_once(num_threads)
        if self._words[PLACE["saw_nan"]]:
            # 0 * NaN of a value that the row may not read may be the cause: again, with such values kept
            # apart.
            self._table.need(self._form.needed_isolated)
            self._words[PLACE["is_isolated"]] = 1
            self._run_once(num_threads)

    def _run_once(self, num_threads: int) -> None:
        if self._form.n_parts:
            self._left[:] = self._form.n_chunks
        self._form.share_out(self._words, num_threads)
        run_work(self._table["work"], self._address, self._address + 8 * self._form.shares, num_threads)
