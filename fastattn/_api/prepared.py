"""Prepared calls: what the signature of a call decides is worked out once, and kept for the next such call.

The signature is all that validation, selection and schedule look at: dtypes, shapes and strides of the
arrays, and the values of the other options. A mask object is part of it as itself, since what it lowers to
depends on it and on sizes alone. What depends on numbers in arrays is done at each call: `key_lengths` are
checked and copied, so that nobody changes them in between, and `out` must not overlap what is read. A call
without a signature, made of lists or of arrays on a GPU, goes through `fastattn._call.normalize` each time,
and so does one that is wrong.

All are kept in one place by their signatures. A call of the Cython driver on arrays as they are is a
`PlainCall` of compiled code: `recall` goes from the arguments to its results, and asks Python for no more
than the number of threads.
(The C entry keeps copies of records besides, as it looks them up without the GIL.)
"""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn._call import options as _options
from fastattn._call.problem import NO_ARRAYS, mean_over_heads, parts_of_rows
from fastattn._call.storage import Paged, Quantized, Rows, locate_pages, native_scale, signature_of_rows
from fastattn._machine import host
from fastattn.masks import Dense, Mask

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastattn._call.normalize import Request
    from fastattn._call.problem import Mod, Problem
    from fastattn.backends._base import Backend, Prepared

try:
    from fastattn.backends.cython import driver as _driver
    from fastattn.backends.cython.driver import locate_pages as _locate_pages
    from fastattn.backends.cython.driver import recall as recall
    from fastattn.backends.cython.driver import signature as signature
except ImportError:
    from fastattn._api.signature import calls as _calls
    from fastattn._api.signature import recall as recall
    from fastattn._api.signature import signature as signature
    from fastattn._api.signature import tokens as _tokens

    _driver = _locate_pages = None
else:
    _calls, _tokens = _driver.stores()
    _driver.install_options(_options.OPTIONS, _options.PARTS, Mask)

_ROWS = (Paged, Quantized, Rows)
_NO_ROWS = (None,) * 6  #: scales and tables of a call without `Rows`

#: The public functions, as signatures tell them apart.
ATTENTION, SDPA, SDPA_GQA, VARLEN, FLEX, GRADIENTS = range(6)

MAX_CALLS = 512  #: that are kept; the oldest goes first
MAX_HELD_NBYTES = 1 << 16  #: of a mask object's intervals and map, which a call keeps: 32 MB in all

_numbers = count(1)


def token_of(more: Any) -> int:
    """A number for what can be compared and hashed: that of what equals it, for a while."""
    token: int | None = _tokens.get(more)
    if token is None:
        forget_oldest(_tokens)
        token = _tokens[more] = next(_numbers)
    return token


def signature_of(
    function: int,
    query: Any,
    key: Any,
    value: Any,
    options: dict[str, Any],
    more: Any = None,
    token: int = 0,
    others: tuple[Any, ...] = (),
) -> Any:
    """What two calls with the same preparation have in common, to look them up by, or None.

    `function` tells the public functions apart. `others`: arrays, or None, that the call reads as well.
    `more` is what else decides, and can be hashed, or `token` is its number.
    """
    if type(key) in _ROWS or type(value) in _ROWS:
        rows = [signature_of_rows(x) if type(x) in _ROWS else None for x in (key, value)]
        key, value = (None if signature else x for x, signature in zip((key, value), rows, strict=True))
        more = (*rows, more)
    mask = options.get("mask")
    if isinstance(mask, Mask):
        if not mask._is_frozen:
            return None
        token_of(mask)  # by which the signature has it
    if more is not None:
        token = token_of(more)
    return signature(function, query, key, value, options, host.default_backend(), token, others)


def counts(values: Any) -> Any:
    """A list or tuple of numbers, or a number, as an ndarray; anything else as it is."""
    if isinstance(values, (list, tuple, int)):
        with suppress(ValueError, TypeError, OverflowError):
            return np.array(values)
    return values


def use_arrays(options: dict[str, Any], also_masks: bool = True) -> None:
    """Puts arrays in the place of `key_lengths` in a list and, where `also_masks`, of a mask object that
    stands for its array."""
    if type(options.get("key_lengths")) in (list, tuple, int):
        options["key_lengths"] = counts(options["key_lengths"])
    if also_masks and type(options.get("mask")) is Dense:
        options["mask"] = options["mask"].array


def reuse(
    signature: Any, query: Any, key: Any, value: Any, options: dict[str, Any], score_mod: Mod | None = None
) -> Any:
    """The results of a call whose signature is known; None where it must be normalized.

    The key of `score_mod` is part of the signature, which is None or False where there is none.
    """
    call = _calls.get(signature) if signature else None
    return None if call is None else call(score_mod, query, key, value, options)


def known(signature: Any) -> Any:
    """The prepared call of this signature, if there is one."""
    return _calls.get(signature)


def forget_oldest(kept: dict[Any, Any]) -> None:
    """Makes room for one more."""
    if len(kept) >= MAX_CALLS:
        with suppress(RuntimeError):  # another thread keeps one at the same time
            kept.pop(next(iter(kept), None), None)


def run(
    request: Request,
    signature: Any,
    inputs: tuple[Any, Any, Any],
    options: dict[str, Any],
    backend: Backend,
) -> None:
    """Solves the problem of a request on a backend, and keeps the call for others of its signature.

    `inputs` are the caller's query, key and value.
    """
    found = run_once(
        request, () if signature is None else inputs, options, backend, options.get("num_threads")
    )
    if found is None:
        return
    prepared, threads = found

    def make() -> PreparedCall | None:
        call = PreparedCall(request, options, backend, prepared.is_small)
        if call.forgets_mask(options):
            return None
        is_compiled = _driver is not None and type(prepared) is _driver.Prepared
        return call.plain(inputs, options) or call if is_compiled else call

    keep_call(signature, make, threads, prepared)


def keep_call(signature: Any, make: Callable[[], Any], threads: int, prepared: Any) -> None:
    """Adds what was prepared for a number of threads to the call of a signature, which `make` makes if it is
    new, or None where it is not worth keeping."""
    call = _calls.get(signature)
    if call is None:
        call = make()
        if call is None:
            return
        forget_oldest(_calls)
    call.keep(threads, prepared)
    _calls[signature] = call


def run_once(
    request: Request,
    inputs: tuple[Any, ...],
    options: dict[str, Any],
    backend: Backend,
    num_threads: int | None,
) -> tuple[Prepared, int] | None:
    """Solves the problem of a request on a backend. What it prepared and for how many threads, where other
    calls of the same signature could use it: where it reads and writes the memory of `inputs` and options."""
    problem = request.problem
    threads = backend.thread_limit(host.threads_for(num_threads))
    if not any(result.size for result in request.results) and problem.device == "cpu":
        return None  # nothing to do, for any number of rows
    prepared = backend.prepare(problem, threads)
    if prepared is None:
        backend.run(problem, threads)
        return None
    prepared.run(problem.arrays(), problem.score_mod)
    copies_out = request.staged is not None and problem.score_mod is None
    if not inputs or copies_out or not reads_as_given(problem, inputs, options):
        return None
    return prepared, 1 if prepared.is_small else threads


def reads_as_given(problem: Problem[Any], inputs: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether what is read is the caller's memory, and nothing had to be converted."""
    query, key, value = inputs
    mask, bias = options.get("mask"), options.get("bias")
    if isinstance(mask, Mask):
        mask = None
    used_bias = problem.bias[0] if problem.bias else None  # one array: others have no signature
    if bias is None and used_bias is not None:
        mask, bias = None, mask
    pairs = [
        (query, problem.query), (options.get("sinks"), problem.sinks), (bias, used_bias),
        (mask, problem.dense),
    ]  # fmt: skip
    for x, used in ((key, problem.key), (value, problem.value)):
        pairs += (
            zip(Rows.of(x).memory(), used.memory(), strict=True) if isinstance(used, Rows) else [(x, used)]
        )
    return all(is_same(*pair) for pair in pairs)


def is_same(given: Any, used: Any) -> bool:
    """Whether an array that is read is the caller's memory."""
    return given is used or given.ctypes.data == used.ctypes.data


class KeptCall:
    """What the signature of a call decides: a mask object's arrays, and what was prepared for so many
    threads."""

    __slots__ = (
        "_by_threads", "_dropout", "_held", "_is_small", "_len_k", "_limit", "_mask_is_bias", "_num_threads",
    )  # fmt: skip

    def __init__(
        self, problem: Problem[Any], options: dict[str, Any], backend: Backend, is_small: bool
    ) -> None:
        given, bias = options.get("mask"), options.get("bias")
        self._mask_is_bias = given is not None and bias is None and problem.plain_bias is not None
        mask_map = problem.mask_map
        #: What every call reads of a mask object.
        self._held = NO_ARRAYS._replace(
            key_start=problem.key_start,
            key_stop=problem.key_stop,
            mask_index=None if mask_map is None else mask_map.index,
            mask_bits=None if mask_map is None else mask_map.bits,
        )
        self._len_k, self._dropout = problem.len_k, problem.dropout
        self._limit: Callable[[int], int] = backend.thread_limit
        self._num_threads = options.get("num_threads")
        self._is_small = is_small
        self._by_threads: dict[int, Any] = {}

    def forgets_mask(self, options: dict[str, Any]) -> bool:
        """Whether it holds more than `MAX_HELD_NBYTES` of a mask object, which is then forgotten, too: such a
        call is not kept."""
        nbytes = sum(
            array.base.nbytes if array.base is not None else array.nbytes
            for array in self._held
            if array is not None
        )
        if nbytes <= MAX_HELD_NBYTES:
            return False
        if isinstance(mask := options.get("mask"), Mask):
            _tokens.pop(mask, None)  # it may be as large
        return True

    def keep(self, threads: int, prepared: Any) -> None:
        """Adds what was prepared for a number of threads."""
        self._by_threads[threads] = prepared

    def _threads(self) -> int:
        """How many threads this call may have now."""
        wanted = self._num_threads
        return self._limit(host.get_num_threads() if wanted is None else wanted)

    def _prepared(self) -> Any:
        return self._by_threads.get(1 if self._is_small else self._threads())

    def _lengths(self, given: Any) -> tuple[np.ndarray | None, bool]:
        """`key_lengths` as they are now, whatever their strides, and whether they are in range."""
        if given is None:
            return None, True
        lengths = np.array(given, np.int64, order="C")
        numbers = lengths.ravel().tolist() if lengths.size <= 64 else [int(lengths.min()), int(lengths.max())]
        return lengths, not numbers or 0 <= min(numbers) <= max(numbers) <= self._len_k

    def _masks(self, options: dict[str, Any]) -> tuple[Any, Any]:
        """The bias, and the mask that is an array: what is read of both."""
        mask, bias = options.get("mask"), options.get("bias")
        if mask is not None and isinstance(mask, Mask):
            mask = None
        return (mask, None) if self._mask_is_bias else (bias, mask)

    def _drop_key(self, options: dict[str, Any]) -> Any:
        dropout = self._dropout
        return None if dropout is None else dropout._replace(seed=options["seed"]).key


class PreparedCall(KeptCall):
    """A call of which only the arrays are missing."""

    __slots__ = ("_lead", "_lse", "_may_fail", "_mean_dtype", "_out", "_swapped", "_weights")

    def __init__(self, request: Request, options: dict[str, Any], backend: Backend, is_small: bool) -> None:
        problem = request.problem
        super().__init__(problem, options, backend, is_small)
        # The shape and dtype of each result that the caller wants.
        results = iter([(result.shape, result.dtype) for result in request.results])
        self._out = next(results)
        self._lse = None if problem.lse is None else next(results)
        self._weights = None if problem.weights is None else next(results)
        self._mean_dtype = problem.mean_dtype
        self._lead, self._swapped = problem.lead, request.swapped
        self._may_fail = problem.score_mod is not None

    def __call__(
        self, score_mod: Mod | None, query: Any, key: Any, value: Any, options: dict[str, Any]
    ) -> Any:
        """The results; None where this call must go through `fastattn._call.normalize` after all."""
        prepared = self._prepared()
        (bias, mask), out, sinks = self._masks(options), options.get("out"), options.get("sinks")
        lengths, are_right = self._lengths(options.get("key_lengths"))
        if prepared is None or not are_right:
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
        of_rows = _NO_ROWS
        if type(key) in _ROWS or type(value) in _ROWS:
            try:
                (key, *key_parts), (value, *value_parts) = (self._parts(x, lengths) for x in (key, value))
            except ValueError:  # a page is not one
                return None
            of_rows = parts_of_rows(key_parts, value_parts)
        drop_key = self._drop_key(options)
        results = self._run(
            prepared, score_mod, query, key, value, result, bias, mask, lengths, of_rows, sinks, drop_key
        )
        if out is not None and self._may_fail:
            out[...] = result
            return out if results is result else (out, *results[1:])
        return results

    def on_rows(
        self, query: np.ndarray, rows: tuple[Any, ...], key_lengths: np.ndarray, sinks: np.ndarray | None
    ) -> Any:
        """The results of a call on a cache, without mask, bias, weights or `out`; None as in a call.

        The cache answers for its lengths, int64 and unchanged later, and for its `rows`, see `parts_of_rows`.
        """
        prepared = self._prepared()
        if prepared is None:
            return None
        out = np.empty(*self._out)
        return self._run(prepared, None, query, None, None, out, None, None, key_lengths, rows, sinks)

    def _run(
        self,
        prepared: Prepared,
        score_mod: Mod | None,
        query: Any,
        key: Any,
        value: Any,
        out: Any,
        bias: Any,
        dense: Any,
        lengths: Any,
        rows: tuple[Any, ...],
        sinks: Any,
        drop_key: Any = None,
    ) -> Any:
        """The results, of which `out` is there already."""
        lse = None if self._lse is None else np.empty(*self._lse)
        weights = None if self._weights is None else np.empty(*self._weights)
        held = self._held
        arrays = (  # `Arrays`, which take longer to make
            query, key, value, out, lse, weights, bias, dense, held.key_start, held.key_stop,
            held.mask_index, lengths, *rows, sinks, held.mask_bits, drop_key,
        )  # fmt: skip
        prepared.run(arrays, score_mod)
        if weights is None:
            return out if lse is None else (out, lse)
        if self._mean_dtype is not None:
            weights = mean_over_heads(weights, self._mean_dtype)
        return (out, weights) if lse is None else (out, lse, weights)

    def plain(self, inputs: tuple[Any, Any, Any], options: dict[str, Any]) -> Any:
        """The same as compiled code has it; None where more is left to Python than the number of threads."""
        kinds = {type(x) for x in inputs}
        on_cache = Rows in kinds
        is_plain = kinds <= {np.ndarray, Rows} and self._mean_dtype is None and not self._may_fail
        if on_cache:  # by `on_rows`
            is_plain &= (
                options.get("mask") is options.get("bias") is options.get("out") is self._weights is None
            )
        else:
            is_plain &= options.get("key_lengths") is None
        if not is_plain:
            return None
        (out, result), lacking = self._out, (None, self._out[1])
        (lse, computed), (weights, _) = self._lse or lacking, self._weights or lacking
        threads = None if self._is_small else self._threads
        dtypes = result, computed
        return _driver.PlainCall(threads, self._held, out, lse, weights, dtypes, self._mask_is_bias, on_cache)

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
