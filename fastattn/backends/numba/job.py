"""One call: a `Form` with the addresses of its arrays, and what must live as long."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np

from fastattn._problem import Problem
from fastattn._schedule import Schedule
from fastattn.backends.numba.form import LINE_NBYTES, PLACE, Form, arrays_of, form_of, lines
from fastattn.backends.numba.layout import PARTIAL
from fastattn.backends.numba.spread import IS_LINUX
from fastattn.backends.numba.threads import caller_takes_part, on_pool
from fastattn.backends.numba.work import run_work

_VIEWS, _LEAD_SHAPE, _SPREAD, _SCRATCH, _SAW_NAN, _IS_NONFINITE_SAFE = (
    PLACE[name] for name in ("views", "lead_shape", "spread", "scratch", "saw_nan", "is_nonfinite_safe")
)

#: Where an ndarray holds the address of its elements: first behind the head that every object has. It is part
#: of NumPy's binary interface, on which compiled extensions rely.
_AT_DATA = object.__basicsize__


_START = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)


def address_of(array: np.ndarray) -> int:
    """Where the elements begin: ``array.ctypes.data`` in a fifth of its time, which between calls that empty
    the cache is most of a `Job`'s."""
    return ctypes.c_int64.from_address(id(array) + _AT_DATA).value


def run_job(problem: Problem, plan: Schedule) -> None:
    """Fills the outputs of a problem with any options."""
    fields: dict[str, int] = {}
    loop = None
    if problem.score_mod is not None:
        # First of all: it may raise.
        from fastattn.backends.jit.functions import score_loop

        is_grouped = problem.group_size > 1
        loop = score_loop(problem.score_mod, problem.query.dtype, plan.uses_split_kv, is_grouped)
        fields = {"score_mod": loop.address, "aux": loop.aux_address}
    if problem.sinks is not None:
        fields["sinks"] = address_of(problem.sinks)
    if problem.mask_map is not None:
        fields["tile_bits"] = address_of(problem.mask_map.bits)
    job = Job(form_of(problem, plan), fields)
    job.run(arrays_of(problem))
    if loop is not None:
        loop.check(
            int(job.words[PLACE["read_outside"]]),
            (problem.batch, problem.num_heads, problem.len_q, problem.len_k),
        )


class Job:
    """A call's options and arrays as a record, and every thread's scratch memory.

    It may serve one call after another, with arrays of the same form. `fields` are further words of the
    record; what they are the addresses of must live as long.
    """

    def __init__(self, form: Form, fields: Mapping[str, int] | None = None) -> None:
        form.table.need(form.needed)
        self._form = form
        self._work = form.table.address_of("work")
        self._start_spread = _START(form.table.address_of("spread_start"))
        self.words = words = form.words.copy()
        self._scratch = np.empty(form.scratch_nbytes, np.uint8)
        self._address = address_of(words)
        self._shares = self._address + 8 * form.shares
        words[_VIEWS] = self._address + 8 * form.views
        words[_LEAD_SHAPE] = self._address + 8 * form.lead_shape
        words[_SPREAD] = self._address + 8 * form.spread
        words[_SCRATCH] = lines(address_of(self._scratch))
        for name, field in (fields or {}).items():
            words[PLACE[name]] = field
        if form.n_partials:
            self._partials = np.zeros(form.n_partials, PARTIAL)
            self._partial_data = np.empty(form.n_partials * form.partial_nbytes + LINE_NBYTES, np.uint8)
            self._left = np.empty(form.n_partials // form.n_splits, np.int64)
            first = lines(address_of(self._partial_data))
            self._partials["data"] = np.arange(form.n_partials) * form.partial_nbytes + first
            words[PLACE["partials"]] = address_of(self._partials)
            words[PLACE["left"]] = address_of(self._left)

    def run(self, arrays: Sequence[np.ndarray | None]) -> None:
        """Every task, on as many threads as the form says, or fewer where the pool has no room."""
        form, words = self._form, self.words
        for number, place in form.addresses:
            words[place] = address_of(arrays[number])  # type: ignore[arg-type]
        on_pool(form.num_threads, self._run)
        if words[_SAW_NAN]:
            # 0 * NaN of a value that the row may not read may be the cause: again, with such values kept
            # apart.
            form.table.need(form.needed_nonfinite)
            words[_IS_NONFINITE_SAFE] = 1
            on_pool(form.num_threads, self._run)
            words[_IS_NONFINITE_SAFE] = words[_SAW_NAN] = 0

    def _run(self, num_threads: int) -> None:
        form = self._form
        if form.n_partials:
            self._left[:] = form.n_splits
        form.share_out(self.words, num_threads)
        if IS_LINUX and num_threads > 1 and caller_takes_part():
            self._start_spread(self._address)
        run_work(self._work, self._address, self._shares, num_threads)
