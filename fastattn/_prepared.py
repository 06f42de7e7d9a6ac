"""Prepared calls: what the signature of a call decides is worked out once, and kept for the next such call.

The signature is all that validation, selection and schedule look at: dtypes, shapes and strides of the
arrays, and the values of the other options. A mask object is part of it as itself, since what it lowers to
depends on it and on sizes alone. What depends on numbers in arrays is done at each call: `key_lengths` are
checked and copied, so that nobody changes them in between, and `out` must not overlap what is read. A call
without a signature, made of lists or of arrays on a GPU, goes through `fastattn._normalize` each time, and so
does one that is wrong.

A small call of the Cython driver, on arrays alone, is kept a second time, in the driver: `recall` then goes
from the arguments to the results without Python, which would take longer than the work.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn import _host
from fastattn._problem import joined_arrays
from fastattn._storage import Paged, Quantized, Rows, locate_pages, native_scale, signature_of_rows
from fastattn.masks import Dense, Mask

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastattn._normalize import Request
    from fastattn._problem import Mod
    from fastattn.backends._base import Backend, Prepared

try:
    from fastattn.backends.cython import driver as _driver
    from fastattn.backends.cython.driver import locate_pages as _locate_pages
    from fastattn.backends.cython.driver import recall as recall
    from fastattn.backends.cython.driver import signature as _signature
except ImportError:
    from fastattn._signature import recall as recall
    from fastattn._signature import signature as _signature

    _driver = _locate_pages = None

describe = _signature  #: of a call on arrays and options alone

_ROWS = (Paged, Quantized, Rows)
_NO_ROWS = (None,) * 6  #: scales and tables of a call without `Rows`

#: The public functions, as signatures tell them apart.
ATTENTION, SDPA, SDPA_GQA, VARLEN, FLEX = range(5)

MAX_CALLS = 512  #: that are kept; the oldest goes first
MAX_HELD_NBYTES = 1 << 16  #: of a mask object's intervals and map, which a call keeps: 32 MB in all

_calls: dict[Any, PreparedCall] = {}


def signature_of(function: int, *arguments: Any, more: Any = None) -> Any:
    """What two calls with the same preparation have in common, to look them up by, or None.

    `function` tells the public functions apart; `more` is what else decides, and can be hashed.
    """
    query, key, value, mask = arguments[:4]
    if type(key) in _ROWS or type(value) in _ROWS:
        rows = [signature_of_rows(x) if type(x) in _ROWS else None for x in (key, value)]
        key, value = (None if signature else x for x, signature in zip((key, value), rows, strict=True))
        arguments, more = (query, key, value, *arguments[3:]), (*rows, more)
    if isinstance(mask, Mask):
        if not mask._is_frozen:
            if type(mask) is not Dense:
                return None
            mask = mask.array
        else:
            more, mask = (mask if more is None else (mask, more)), None
        arguments = (*arguments[:3], mask, *arguments[4:])
    signature = describe(function, *arguments)
    return signature if more is None or signature is None else (signature, more)


def counts(values: Any) -> Any:
    """A list or tuple of numbers, or a number, as an ndarray; anything else as it is."""
    if isinstance(values, (list, tuple, int)):
        with suppress(ValueError, TypeError, OverflowError):
            return np.array(values)
    return values


def reuse(signature: Any, given: tuple[Any, ...], score_mod: Mod | None = None) -> Any:
    """The results of a call whose signature is known; None where it must go through `fastattn._normalize`.

    `given` are the caller's query, key, value, mask, bias, key_lengths, sinks and out; the key of `score_mod`
    is part of the signature.
    """
    call = None if signature is None else _calls.get(signature)
    return None if call is None else call(score_mod, *given)


def known(signature: Any, more: Any) -> PreparedCall | None:
    """The prepared call of a `signature_of` with `more`, if there is one."""
    return _calls.get((signature, more))


def keep_call(calls: dict[Any, PreparedCall], signature: Any, call: PreparedCall) -> None:
    """Puts a prepared call among others, in the place of the oldest where there are many."""
    if len(calls) >= MAX_CALLS:
        with suppress(RuntimeError):  # another thread keeps a call at the same time
            calls.pop(next(iter(calls), None), None)
    calls[signature] = call


def run(
    request: Request,
    signature: Any,
    given: tuple[Any, ...],
    backend: Backend,
    num_threads: int | None,
) -> None:
    """Solves the problem of a request on a backend, and keeps the call for others of its signature."""
    found = run_once(request, () if signature is None else given, backend, num_threads)
    if found is None:
        return
    prepared, threads = found
    call = _calls.get(signature)
    if call is None:
        call = PreparedCall(request, given, backend, num_threads, prepared.is_small)
        if call.held_nbytes > MAX_HELD_NBYTES:
            return
        keep_call(_calls, signature, call)
    call.by_threads[threads] = prepared
    if type(signature) is bytes and _driver is not None and type(prepared) is _driver.Prepared:
        call.remember(signature, prepared)


def run_once(
    request: Request, given: tuple[Any, ...], backend: Backend, num_threads: int | None
) -> tuple[Prepared, int] | None:
    """Solves the problem of a request on a backend. What it prepared and for how many threads, where other
    calls of the same signature could use it: where it reads and writes the memory that was `given`."""
    problem = request.problem
    if problem.device == "cpu" and not any(result.size for result in request.results):
        return None  # nothing to do, for any number of rows
    threads = backend.thread_limit(_host.get_num_threads() if num_threads is None else num_threads)
    prepared = backend.prepare(problem, threads)
    if prepared is None:
        backend.run(problem, threads)
        return None
    arrays = problem.arrays()
    prepared.run(arrays, problem.score_mod)
    if not given or not _reads_as_given(arrays, given, request):
        return None
    return prepared, 1 if prepared.is_small else threads


def _reads_as_given(arrays: tuple[Any, ...], given: tuple[Any, ...], request: Request) -> bool:
    """Whether what is read and written is the caller's memory, and nothing had to be converted."""
    query, key, value, mask, bias, _, sinks, _ = given
    problem = request.problem
    if isinstance(mask, Mask):
        mask = mask.array if type(mask) is Dense else None
    score_operand = arrays[_DENSE] if arrays[_BIAS] is None else arrays[_BIAS]
    pairs = [(query, arrays[0]), (sinks, arrays[_SINKS])]
    for x, used in ((key, problem.key), (value, problem.value)):
        pairs += (
            zip(Rows.of(x).memory(), used.memory(), strict=True) if isinstance(used, Rows) else [(x, used)]
        )
    pairs += [(mask, score_operand)] if bias is None else [(mask, arrays[_DENSE]), (bias, arrays[_BIAS])]
    return (request.staged is None or problem.score_mod is not None) and all(
        given is used or given.ctypes.data == used.ctypes.data for given, used in pairs
    )


_BIAS, _DENSE, _KEY_START, _SINKS = 6, 7, 8, 18


class PreparedCall:
    """A call of which only the arrays are missing."""

    __slots__ = (
        "_bits", "_held", "_lead", "_len_k", "_limit", "_lse", "_mask_is_bias", "_may_fail", "_num_threads",
        "_out", "_swapped", "_weights", "by_threads", "held_nbytes", "is_small",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        given: tuple[Any, ...],
        backend: Backend,
        num_threads: int | None,
        is_small: bool,
    ) -> None:
        problem = request.problem
        arrays = problem.arrays()
        # The shape and dtype of each result that the caller wants.
        results = iter([(result.shape, result.dtype) for result in request.results])
        self._out = next(results)
        self._lse = None if problem.lse is None else next(results)
        self._weights = None if problem.weights is None else next(results)
        self._mask_is_bias = given[3] is not None and given[4] is None and problem.bias is not None
        self._held = arrays[_KEY_START : _KEY_START + 3]
        self._bits = arrays[-1]
        self._len_k = problem.len_k
        self._lead, self._swapped = problem.lead, request.swapped
        self._may_fail = problem.score_mod is not None
        self.held_nbytes = sum(
            array.base.nbytes if array.base is not None else array.nbytes
            for array in (*self._held, self._bits)
            if array is not None
        )
        self._limit: Callable[[int], int] = backend.thread_limit
        self._num_threads = num_threads
        self.is_small = is_small
        self.by_threads: dict[int, Prepared] = {}

    def __call__(
        self,
        score_mod: Mod | None,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        bias: Any,
        key_lengths: Any,
        sinks: Any,
        out: Any,
    ) -> Any:
        """The results; None where this call must go through `fastattn._normalize` after all."""
        threads = 1
        if not self.is_small:
            wanted = self._num_threads
            threads = self._limit(_host.get_num_threads() if wanted is None else wanted)
        prepared = self.by_threads.get(threads)
        if prepared is None:
            return None
        if isinstance(mask, Mask):
            mask = mask.array if type(mask) is Dense else None
        lengths = None
        if key_lengths is not None:
            lengths = np.array(key_lengths, np.int64, order="C")  # as at the first call, whatever its strides
            numbers = (
                lengths.ravel().tolist() if lengths.size <= 64 else [int(lengths.min()), int(lengths.max())]
            )
            if numbers and not 0 <= min(numbers) <= max(numbers) <= self._len_k:
                return None
        result = out
        if out is None or self._may_fail:
            result = np.empty(*self._out)
        if out is not None:
            rows = (
                part for x in (key, value) for part in (Rows.of(x).memory() if type(x) in _ROWS else (x,))
            )
            for array in (query, *rows, mask, bias, sinks):
                if array is not None and np.may_share_memory(out, array):
                    return None
        lse = None if self._lse is None else np.empty(*self._lse)
        weights = None if self._weights is None else np.empty(*self._weights)
        if self._mask_is_bias:
            mask, bias = None, mask
        results = (result, lse, weights, bias, mask, *self._held, lengths)
        if type(key) in _ROWS or type(value) in _ROWS:
            try:
                parts = (self._parts(key, lengths), self._parts(value, lengths))
            except ValueError:  # a page is not one
                return None
            arrays = joined_arrays(query, *parts, *results, sinks, self._bits)
        else:
            arrays = (query, key, value, *results, *_NO_ROWS, sinks, self._bits)
        prepared.run(arrays, score_mod)
        if out is not None and self._may_fail:
            out[...] = result
            result = out
        if lse is None:
            return result if weights is None else (result, weights)
        return (result, lse) if weights is None else (result, lse, weights)

    def remember(self, signature: bytes, prepared: Any) -> None:
        """Has a small call recalled from its signature alone, where nothing of it is left to Python."""
        held = (*self._held, self._bits)
        if not self.is_small or self._may_fail or any(array is not None for array in held):
            return
        (out, result), computed = self._out, self._out[1]
        lse = weights = None
        if self._lse is not None:
            lse, computed = self._lse
        if self._weights is not None:
            weights, _ = self._weights
        _driver.remember(
            signature, prepared, out, lse, weights, (result, computed), self._mask_is_bias, MAX_CALLS
        )  # fmt: skip

    def on_rows(
        self, query: np.ndarray, parts: tuple[Any, ...], key_lengths: np.ndarray, sinks: np.ndarray | None
    ) -> Any:
        """The results of a call on a cache, without mask, bias, weights or `out`.

        The cache answers for its lengths, int64 and unchanged later, and for the `parts` of its `Rows`, which
        are those of `call_arrays`.
        """
        threads = 1
        if not self.is_small:
            wanted = self._num_threads
            threads = self._limit(_host.get_num_threads() if wanted is None else wanted)
        prepared = self.by_threads.get(threads)
        if prepared is None:
            return None
        out = np.empty(*self._out)
        lse = None if self._lse is None else np.empty(*self._lse)
        prepared.run(
            (
                query,
                None,
                None,
                out,
                lse,
                None,
                None,
                None,
                *self._held,
                key_lengths,
                *parts,
                sinks,
                self._bits,
            ),
            None,
        )
        return out if lse is None else (out, lse)

    def _parts(self, given: Any, lengths: np.ndarray | None) -> tuple[Any, ...]:
        """Keys or values as `Rows.arrays` gives them, of which a prepared call needs the addresses alone."""
        if type(given) not in _ROWS:
            return given, None, None, None
        if type(given) is Rows:
            return given.arrays()
        pages: Any = given if type(given) is Quantized else given.pages
        data: Any = pages
        scale = None
        if type(pages) is Quantized:
            data, scale = pages.data, native_scale(pages.scale)
        if type(given) is Quantized:
            return data, scale, None, None
        index = given.table
        if index.shape[:-1] != self._lead:
            index = np.broadcast_to(index, (*self._lead, index.shape[-1]))
        tables = None if _locate_pages is None else _locate_pages(index, data, scale)
        if tables is None:
            lengths = None if lengths is None else np.broadcast_to(lengths, self._lead)
            tables = locate_pages(index, data, scale, data.shape[1 if self._swapped else 2], lengths)
        return None, None, *tables
