"""Attention with scores and masks that the caller writes as Python functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from math import prod
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from fastattn._api.attention import attend
from fastattn._api.prepared import FLEX
from fastattn._call.arguments import PLAIN_DTYPES, as_mask, check_places, overlap, readable
from fastattn._call.normalize import naming_shapes, normalize
from fastattn._call.options import complete, public, refusing
from fastattn._call.problem import Mod
from fastattn._machine.device import as_device_array, host_array
from fastattn._machine.host import threads_for
from fastattn._machine.threads import no_fork
from fastattn.backends.jit.loading import reasons_no_compiler
from fastattn.backends.registry import BackendError
from fastattn.masks import BlockMask, Dense, Mask
from fastattn.masks.arguments import whole_number
from fastattn.masks.base import describe
from fastattn.masks.map import Block, MaskMap, Node, build_mask_map

if TYPE_CHECKING:
    from typing import Unpack

    from numpy.typing import ArrayLike

    from fastattn._call.normalize import Request
    from fastattn._call.options import FlexOptions, Mean, No, Pair, RowsLike, Triple, Yes

_SCORE_MOD = ("score", "b", "h", "q_idx", "kv_idx")
_MASK_MOD = ("b", "h", "q_idx", "kv_idx")


@overload
def flex_attention(
    query: ArrayLike, key: RowsLike, value: RowsLike, **options: Unpack[FlexOptions[No, No]]
) -> np.ndarray: ...
@overload
def flex_attention(
    query: ArrayLike, key: RowsLike, value: RowsLike, **options: Unpack[FlexOptions[Yes, No]]
) -> Pair: ...
@overload
def flex_attention(
    query: ArrayLike, key: RowsLike, value: RowsLike, **options: Unpack[FlexOptions[No, Yes | Mean]]
) -> Pair: ...
@overload
def flex_attention(
    query: ArrayLike, key: RowsLike, value: RowsLike, **options: Unpack[FlexOptions[Yes, Yes | Mean]]
) -> Triple: ...
@overload
def flex_attention(
    query: ArrayLike, key: RowsLike, value: RowsLike, **options: Unpack[FlexOptions[bool, bool | Mean]]
) -> np.ndarray | tuple[np.ndarray, ...]: ...
@public("F")
def flex_attention(
    query: ArrayLike, key: RowsLike, value: RowsLike, *extra: Any, **options: Any
) -> np.ndarray | tuple[np.ndarray, ...]:
    """Attention with Python functions that change its scores and make its mask.

    Letters as in `attention`.

    Parameters
    ----------
    score_mod : function, optional
        A Python function, one of `numba.njit`, or a `functools.partial` of either.
        ``score_mod(score, b, h, q_idx, kv_idx, *aux)`` replaces one scaled (and soft-capped) score: `score`
        is of the dtype of the computation, `b` counts the flattened leading axes, `h` the query heads,
        `q_idx` the queries and `kv_idx` the keys, all from 0. ``-inf`` masks. Numba compiles it into the
        loop over a tile of scores.
    mask_mod : function, optional
        ``mask_mod(b, h, q_idx, kv_idx, *aux)``: a bool, whether the query may attend to the key. Each call
        evaluates it for all pairs. If it reads no arrays, a result of up to 64 KB is kept for the next call
        of the same sizes. `create_block_mask` evaluates it once for many calls.
    block_mask : fastattn.masks.Mask, optional
        One more mask beside `mask`: from `create_block_mask`, or any other mask object.
    aux : sequence of array_like, optional
        Further arguments of both functions: arrays and numbers of bool, integer or float dtypes. They are
        read at each call: others of the same dtypes and numbers of axes need no compilation. With a query on
        a GPU arrays must be there, too, and numbers must be Python's.
    query, key, value
    other options
        As in `attention`. `bias` is added after `score_mod`. All masks hold together (AND). On the CPU a
        `score_mod` needs the backend ``"cython"`` or ``"numba"``, and Numba as its compiler; with `dropout`
        it needs ``"cython"``.

    Returns
    -------
    out, lse, weights
        As in `attention`.

    Raises
    ------
    TypeError, ValueError
        As in `attention`. A function that takes other arguments, cannot be compiled, does not return a number
        or a bool, raises, takes the GIL (as ``print`` does), or reads memory unchecked (as ``as_strided``
        does): the message names the function and the line, and is chained to Numba's.
    IndexError
        A function reads outside of an array: the message names both. This is found during the work; `out` is
        untouched. What `score_mod` reads for a masked key is no error.
    BackendError
        As in `attention`, or Numba is not installed.

    Notes
    -----
    The first call with a new function compiles it, in a quarter of a second, and a second more for the first
    in a process. Floats written in a function, or read from its closure or its globals, take the dtype of the
    scores. Such floats and arrays, also those in tuples, are read at each call, as `aux` is; integers and all
    else from outside are compiled in, and compiled again when they change.

    Negative indices count from the end. Each index is checked, unless FASTATTN_CHECK_INDICES=0 is in the
    environment. Cost of compilation and checks, and functions on a GPU: docs/promises.md.

    A masked key is never seen, whatever `score_mod` reads or returns for it; a NaN for another key makes the
    row NaN. A `mask_mod` is evaluated for all pairs, also for those that are masked otherwise.

    References
    ----------
    .. [1] Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels",
       2024.

    Examples
    --------
    Attention with linear biases, its slopes read at run time:

    >>> import numpy as np
    >>> import fastattn
    >>> def alibi(score, b, h, q_idx, kv_idx, slopes):
    ...     return score - slopes[h] * abs(q_idx - kv_idx)
    >>> x = np.random.default_rng(0).standard_normal((2, 4, 100, 16), dtype=np.float32)
    >>> slopes = np.float32([0.5, 0.25, 0.125, 0.0625])
    >>> out = fastattn.flex_attention(x, x, x, score_mod=alibi, aux=(slopes,))
    >>> distance = abs(np.arange(100)[:, None] - np.arange(100))
    >>> bias = -slopes[:, None, None] * distance
    >>> np.allclose(out, fastattn.attention(x, x, x, bias=bias), atol=1e-5)
    True
    """
    options = complete("F", flex_attention, options, extra)
    mask = mask_of(query, key, value, options)
    values = as_aux(options["aux"])
    score, allowed = as_mod(options["score_mod"], values), as_mod(options["mask_mod"], values)
    options["mask"] = mask.array if type(mask) is Dense else mask
    keys: Any = None
    signature: Any = False
    if allowed is None or not allowed.reads_arrays:
        signature = None
        keys = None if score is allowed is None else (score and score.key, allowed and _constant_key(allowed))
    make = partial(_normalize, query, key, value, options, score, allowed, values)
    return attend(
        FLEX, query, key, value, options, signature=signature, more=keys, make=make, score_mod=score
    )  # fmt: skip


@naming_shapes
def mask_of(query: Any, key: Any, value: Any, options: dict[str, Any]) -> Any:
    """`mask` and `block_mask` as one."""
    mask, block_mask = options["mask"], options["block_mask"]
    if block_mask is None:
        return mask
    if not isinstance(block_mask, Mask):
        raise TypeError(f"block_mask must be a fastattn.masks object, got {describe(block_mask)}")
    return block_mask if mask is None else as_mask(mask, np.ndim(query) == 2) & block_mask


def _normalize(
    query: Any, key: Any, value: Any, options: dict[str, Any], score: Any, allowed: Any, aux: list[Any]
) -> Request:
    check_functions(aux, score_mod=score, mask_mod=allowed)
    on_gpu = as_device_array(query, "query")
    if score is not None or allowed is not None:
        arrays = {f"aux[{i}]": x for i, x in enumerate(aux) if x.ndim}
        check_places(query=query if on_gpu is None else on_gpu, **arrays)
    if on_gpu is not None:
        request = normalize(query, key, value, options)
        out = None if options["out"] is None else request.problem.out
        if out is not None and any(x.ndim and overlap(out, x) for x in aux):
            raise ValueError(f"out must not share memory with aux on {out.device}")
        return request._replace(problem=request.problem._replace(score_mod=score, mask_mod=allowed))
    mask = function_mask(allowed, options)
    request = normalize(query, key, value, options, function_mask=mask, may_fail=score is not None)
    return request._replace(problem=request.problem._replace(score_mod=score))


def check_functions(aux: Sequence[Any], **mods: Any) -> None:
    """TypeError unless each function, by the name of its option, takes what it is called with."""
    for kind, mod in mods.items():
        if mod is not None:
            _check_function(kind, mod.function, _MASK_MOD if kind == "mask_mod" else _SCORE_MOD, aux)


def function_mask(allowed: Any, options: dict[str, Any]) -> Mask | None:
    """The mask of a mask_mod, evaluated where it is bound."""
    return None if allowed is None else _FunctionMask(allowed, threads_for(options["num_threads"]))


@refusing
def create_block_mask(
    mask_mod: Callable[..., object],
    B: int | None,
    H: int | None,
    L: int,
    S: int,
    *,
    aux: Sequence[ArrayLike] = (),
    num_threads: int | None = None,
) -> BlockMask:
    """Evaluate a mask function for one problem size, for any number of calls.

    Parameters
    ----------
    mask_mod : function
        ``mask_mod(b, h, q_idx, kv_idx, *aux)`` says as a bool whether the query may attend to the key.
    B : int or None
        Batch items, the product of the leading batch axes. None: the function does not depend on `b`. 1: all
        items have the mask of ``b = 0``.
    H : int or None
        Query heads; None and 1 as for B.
    L, S : int
        Query length and key length.
    aux, num_threads
        As in `flex_attention`.

    Returns
    -------
    fastattn.masks.BlockMask
        For `flex_attention`, or as ``mask=`` of `attention`. It prints as a drawing.

    Raises
    ------
    TypeError, ValueError
        Sizes that are not numbers, or negative; B or H of None for a function that depends on `b` or `h`; for
        the function as in `flex_attention`.
    IndexError
        The function reads outside of an array.
    BackendError
        Numba is not installed.

    Notes
    -----
    Each tile of 64 queries and 128 keys is EMPTY (skipped), FULL (runs unmasked) or PARTIAL (has bits).
    Memory grows with the PARTIAL tiles, time with ``L * S``. One form is known and takes far less: packed
    documents, ``ids[q_idx] == ids[kv_idx]``, alone or with ``& (q_idx >= kv_idx)``, of integers of which
    equal ones follow each other. So do mask objects, as ``masks.Segments(ids)`` for these.

    Examples
    --------
    >>> import fastattn
    >>> def causal_window(b, h, q_idx, kv_idx, width):
    ...     return (kv_idx <= q_idx) & (q_idx - kv_idx <= width)
    >>> print(fastattn.create_block_mask(causal_window, None, None, 512, 512, aux=(128,)))
    BlockMask(B=1, H=1, L=512, S=512: 56.2 % of the tiles are empty)
    +...
    +...
    ++..
    ++..
    .++.
    .++.
    ..++
    ..++
    """
    values = as_aux(aux)
    for i, value in enumerate(values):
        host_array(value, f"aux[{i}]")
    _check_function("mask_mod", mask_mod, _MASK_MOD, values)
    batch, heads = (None if n is None else whole_number(n, name) for n, name in ((B, "B"), (H, "H")))
    len_q, len_k = whole_number(L, "L"), whole_number(S, "S")
    mask_map = _evaluate(as_mod(mask_mod, values), (batch, heads, len_q, len_k), threads_for(num_threads))
    return BlockMask(mask_map, 1 if batch is None else batch, 1 if heads is None else heads, len_q, len_k)


class _FunctionMask(Mask):
    """A mask function that is evaluated when the sizes are known."""

    __slots__ = ("mod", "num_threads")
    mod: Mod
    num_threads: int

    def __init__(self, mod: Mod, num_threads: int) -> None:
        self._set(mod, num_threads)

    def _bind(self, block: Block) -> Node:
        sizes = [prod(block.lead), block.H, block.L, block.S]
        return BlockMask(_evaluate(self.mod, sizes, self.num_threads), *sizes)._bind(block)


def _evaluate(mod: Mod, sizes: Sequence[int | None], num_threads: int) -> MaskMap:
    """The function's mask map; B or H are None where it must not read their index."""
    if reasons := reasons_no_compiler():
        raise BackendError(f"a mask_mod is compiled by Numba, and {'; '.join(reasons)}")
    with no_fork:
        evaluate = import_module("fastattn.backends.jit.mask_map").evaluate
        documents = import_module("fastattn._api.known_masks").documents
    *outer, L, S = (1 if n is None else n for n in sizes)
    if (keys := documents(mod, L, S)) is not None:
        return build_mask_map(keys, tuple(min(n, 1) for n in outer), L, S, None)
    mask_map: MaskMap = evaluate(mod, sizes, num_threads)
    return mask_map


@cache
def _compiler() -> Any:
    """The module that compiles functions of the caller's; None without Numba."""
    if reasons_no_compiler():
        return None
    with no_fork:
        return import_module("fastattn.backends.jit.functions")


def as_mod(function: Any, aux: Sequence[Any]) -> Any:
    """A function of the caller's, with what it reads and what tells it apart from others; None for none."""
    if function is None:
        return None
    compiler = _compiler()  # without one each backend refuses the function
    return Mod(function, tuple(aux)) if compiler is None else compiler.as_mod(function, aux)


def _constant_key(mod: Mod) -> Any:
    """Equal for functions with equal results at the same indices. Only for functions that read no array."""
    numbers = (
        value.tobytes() if isinstance(value, np.generic) else value.hex()
        for value in (*mod.aux, *mod.captured)
    )
    return mod.key, *numbers


def _check_function(kind: str, function: Any, names: tuple[str, ...], aux: Sequence[Any]) -> None:
    """TypeError unless it is a function that takes these arguments."""
    plain = function
    while isinstance(plain, partial):
        plain = plain.func
    plain = getattr(plain, "py_func", plain)
    if not isinstance(plain, FunctionType):
        raise TypeError(
            f"{kind} must be a function, got {_described(plain)} (a Python function, one compiled by "
            f"numba.njit, or a functools.partial of either)"
        )
    code = plain.__code__
    if plain is function and code.co_argcount == len(names) + len(aux) and not code.co_kwonlyargcount:
        return
    try:
        signature = inspect.signature(plain if not isinstance(function, partial) else function)
        signature.bind(*names, *aux)
    except (TypeError, ValueError) as error:
        place = f" ({code.co_filename}, line {code.co_firstlineno})"
        name = plain.__name__
        wanted = ", ".join([*names, *(f"aux[{i}]" for i in range(len(aux)))])
        raise TypeError(
            f"{kind} {name!r}{place}\nis called with {len(names) + len(aux)} arguments, ({wanted}),\n"
            f"which it does not take: {error}"
        ) from error


def as_aux(aux: Any) -> list[Any]:
    """Arrays and NumPy scalars of native bool, integer or float dtypes."""
    if type(aux) not in (tuple, list) and (isinstance(aux, (str, bytes)) or not isinstance(aux, Sequence)):
        raise TypeError(f"aux must be a tuple or list of arrays and numbers, got {type(aux).__name__}")
    values = []
    for i, given in enumerate(aux):
        is_array = type(given) is np.ndarray and given.ndim > 0
        if is_array and given.dtype.char in PLAIN_DTYPES and given.dtype.isnative:
            values.append(given)
            continue
        on_gpu = as_device_array(given, f"aux[{i}]")
        value: Any = np.asarray(given) if on_gpu is None else on_gpu
        if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
            raise TypeError(f"aux[{i}] must be of bool, integer or float dtype, got dtype {value.dtype}")
        if on_gpu is not None and (value.dtype == np.float16 or value.ndim == 0):
            what = "float16" if value.ndim else "a number"
            raise TypeError(f"aux[{i}] is {what} on {value.device}: pass float32, or a number of Python's")
        values.append(readable(value) if on_gpu is None else value)
    return values


def _described(value: Any) -> str:
    if isinstance(value, MethodType):
        owner = type(value.__self__).__name__
        return f"the method {value.__name__!r} of a {owner}, whose attributes are not compiled"
    if callable(value) and not isinstance(value, type):
        return f"a callable {type(value).__name__}, whose attributes are not compiled"
    return type(value).__name__
