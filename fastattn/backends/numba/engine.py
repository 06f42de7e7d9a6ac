"""What the backend does with a call: cut it up and run it, and a short way for calls without options."""

from __future__ import annotations

from functools import lru_cache
from math import isfinite, prod, sqrt
from typing import Any, NamedTuple

import numpy as np

from fastattn import _host
from fastattn._problem import MAX_DIM, MAX_ROWS, Problem
from fastattn._schedule import Schedule, is_small, make_schedule
from fastattn.backends.numba.codegen.target import TARGET
from fastattn.backends.numba.form import Form, form_of
from fastattn.backends.numba.job import Job, run_job
from fastattn.backends.numba.threads import thread_limit

# Neither bound was measured: they keep what stays between calls below some 32 MB.
MAX_KNOWN = 1024  #: kinds of calls without options that are remembered
MAX_IDLE_NBYTES = 1 << 22  #: scratch memory that a job may keep from one call to the next

_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
_STARTS = np.zeros(1, np.int64)


def plan(problem: Problem, num_threads: int) -> Schedule:
    """The plan of a problem for at most so many threads."""
    lanes = TARGET.vector_bytes // problem.query.itemsize
    return make_schedule(
        problem.batch * problem.num_kv_heads,
        problem.len_q * problem.group_size,
        problem.len_k,
        problem.head_dim + problem.value_dim,
        lanes * TARGET.block_vectors,
        lanes,
        thread_limit(num_threads),
    )


def run(problem: Problem, plan: Schedule) -> None:
    """Fills the problem's outputs."""
    if problem.batch and problem.num_heads and problem.len_q:
        run_job(problem, plan)


class _Known(NamedTuple):
    """What all calls without options on arrays of such dtypes, shapes and strides have in common."""

    shape: tuple[int, ...]  #: of the result
    dtype: np.dtype
    is_small: bool
    forms: dict[int, Form]  #: by the number of threads


_known: dict[Any, _Known] = {}


def plain_attention(query: Any, key: Any, value: Any, causal: Any, scale: Any) -> np.ndarray | None:
    """The result of a call without options beyond causal and scale, or None where it is not plain enough.

    Plain are three ndarrays of one native float dtype, with equal leading axes and nothing empty. Whatever is
    not so, and every error, is left to the general way, which gives the same bits.
    """
    if not (
        type(query) is type(key) is type(value) is np.ndarray
        and (causal is True or causal is False)
        and (scale is None or type(scale) is float)
    ):
        return None
    alike = (
        query.dtype, key.dtype, value.dtype, query.shape, key.shape, value.shape, query.strides, key.strides,
        value.strides, causal, scale,
    )  # fmt: skip
    known = _known.get(alike)
    if known is None:
        if not _is_plain(query, key, value, causal, scale):
            return None
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        shape = (*query.shape[:-1], value.shape[-1])
        heads, group_size = prod(key.shape[:-2]), query.shape[-3] // key.shape[-3]
        columns = key.shape[-1] + value.shape[-1]
        small = is_small(heads, query.shape[-2] * group_size, key.shape[-2], columns)
        known = _known[alike] = _Known(shape, np.dtype(query.dtype.char), small, {})

    num_threads = 1 if known.is_small else thread_limit(_host.get_num_threads())
    out = np.empty(known.shape, known.dtype)
    stop = np.arange(1, query.shape[-2] + 1) if causal else None  # keys [0, i + 1), for every item
    form = known.forms.get(num_threads)
    if form is None:
        problem = _problem(query, key, value, out, stop, scale)
        form = known.forms[num_threads] = form_of(problem, plan(problem, num_threads))
    idle = _idle_jobs(form)
    try:
        job = idle.pop()
    except IndexError:
        job = Job(form)
    job.run((query, key, value, out, None, None, None, None, _STARTS, stop, None))
    if not idle and form.scratch_nbytes <= MAX_IDLE_NBYTES:
        idle.append(job)
    return out


@lru_cache(maxsize=8)
def _idle_jobs(form: Form) -> list[Job]:
    """A job of this form that no call uses at the moment, if there is one."""
    return []


def _is_plain(query: np.ndarray, key: np.ndarray, value: np.ndarray, causal: bool, scale: Any) -> bool:
    n = query.ndim
    return (
        query.dtype == key.dtype == value.dtype in _DTYPES
        and n == key.ndim == value.ndim >= 3
        and query.size > 0 < key.size
        and value.size > 0
        and query.shape[:-3] == key.shape[:-3] == value.shape[:-3]
        and query.shape[-3] % key.shape[-3] == 0
        and key.shape[-3:-1] == value.shape[-3:-1]
        and query.shape[-1] == key.shape[-1]
        and (not causal or query.shape[-2] == key.shape[-2])
        and max(query.shape[-1], value.shape[-1]) <= MAX_DIM
        and max(query.size, key.size) // query.shape[-1] <= MAX_ROWS
        and (scale is None or isfinite(scale))
    )


def _problem(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    out: np.ndarray,
    stop: np.ndarray | None,
    scale: float | None,
) -> Problem:
    rows = (*query.shape[:-3], query.shape[-2])
    return Problem(
        query=query, key=key, value=value, out=out, lse=None, weights=None,
        scale=1 / sqrt(query.shape[-1]) if scale is None else scale,
        softcap=None, bias=None, sinks=None,
        key_start=None if stop is None else np.broadcast_to(_STARTS, rows),
        key_stop=None if stop is None else np.broadcast_to(stop, rows),
        dense=None, mask_map=None,
    )  # fmt: skip
