"""Errors for functions that cannot be compiled, and for those that read outside of an array."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dis import get_instructions
from functools import partial
from itertools import chain, islice, product
from os.path import abspath, dirname, join
from typing import Any

import numba
import numpy as np

from fastattn.backends.jit.checks import OTHER
from fastattn.backends.jit.identity import Walk, identify, nested

#: The file name of the wrapper that `functions` writes around a function.
WRAPPER = "<fastattn>"

#: At most so many calls of the function in Python, to find indices for which it fails.
MAX_TRIED = 100_000


def plain(function: Any) -> Any:
    """The Python function within one of Numba's or a `functools.partial`."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "py_func", function)


def name_of(function: Any) -> str:
    return repr(getattr(plain(function), "__name__", type(function).__name__))


def location_of(function: Any) -> str:
    code = getattr(plain(function), "__code__", None)
    return "an unknown place" if code is None else f"{code.co_filename}, line {code.co_firstlineno}"


def not_compiled(kind: str, function: Any, error: Exception, wrt: str = "") -> str:
    """Which function, where, and Numba's objection; Numba's error is chained to ours. wrt: see
    `functions.Loop`."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    about = [line for line in lines if not line.startswith(("Failed in", "During:", "File ", "<source", "^"))]
    objected = " ".join([*about[:1], *[line for line in about[1:4] if line.startswith(">>>")]])
    places = re.findall(r'File "(.*?)", line (\d+)', text)
    named = [f"{file}, line {line}" for file, line in places if file != WRAPPER and not _is_numbas(file)]
    is_of_another = re.search(r"of type Module\(<module '(?!numpy|math)", objected)  # as torch.tanh is
    hint = "; functions of numpy and of math are compiled" if is_of_another else ""
    what = "cannot be compiled"
    if wrt:
        what = f"cannot be derived in {wrt}" + (
            ", give its derivative as score_grad=" if wrt == "score" else ""
        )
    return (
        f"{kind} {name_of(function)} {what}, see above for all that Numba says\n"
        f"at {named[0] if named else location_of(function)}:\n{objected}{hint}"
    )


def _is_numbas(file: str) -> bool:
    return abspath(file).startswith(join(dirname(numba.__file__), ""))


def wrong_result(kind: str, function: Any, returned: Any, arguments: Sequence[Any]) -> str:
    promised = "a bool" if kind == "mask_mod" else "one real number"
    return (
        f"{kind} {name_of(function)} must return {promised}, and returns {returned}\n"
        f"for arguments of the types {', '.join(map(str, arguments))}\nat {location_of(function)}"
    )


def check_raises(kind: str, function: Any) -> None:
    """ValueError where the function may raise: a compiled loop cannot pass an exception on."""
    for called in Walk(function).functions:
        for code in nested(called.__code__):
            for instruction in get_instructions(code):
                if instruction.opname == "RAISE_VARARGS":
                    line = getattr(instruction.positions, "lineno", None) or code.co_firstlineno
                    raise ValueError(
                        f"{kind} {name_of(function)} may raise, and there is nobody to raise to\n"
                        f"at {code.co_filename}, line {line}:\nreturn -inf or False where nothing is read"
                    )


def needs_size(kind: str, function: Any, name: str) -> str:
    size, what = {"b": ("B", "items, the product of the leading axes"), "h": ("H", "query heads")}[name]
    return (
        f"{kind} {name_of(function)} depends on {name}, and {size} is None: pass {size}, the number of {what}"
        f"\nat {location_of(function)}"
    )


def outside(
    kind: str,
    function: Any,
    aux: Sequence[Any],
    dtype: np.dtype,
    sizes: Sequence[int],
    bits: int,
    at: Sequence[int] | None = None,
) -> IndexError:
    """The error of a loop that returned these bits, for the indices `at` if they are known."""
    names = [f"aux[{i}]" for i in range(len(aux))] + Walk(function).names
    arrays = [*aux, *identify(function).captured]
    wrong = [i for i in range(min(len(names), OTHER)) if bits >> i & 1]
    where, cause = _first_failure(kind, function, aux, dtype, sizes, at)
    unnamed = "an array" if cause else "an array, or raises,"  # Numba's own checks do not tell these apart
    read = " and ".join(f"{names[i]} of shape {arrays[i].shape}" for i in wrong) or unnamed
    error = IndexError(
        f"{kind} {name_of(function)} reads outside of {read}{where}\nat {location_of(function)}"
    )
    error.__cause__ = cause
    return error


def _first_failure(
    kind: str,
    function: Any,
    aux: Sequence[Any],
    dtype: np.dtype,
    sizes: Sequence[int],
    at: Sequence[int] | None,
) -> tuple[str, Exception | None]:
    """The indices `at`, or the first of those tried for which the function fails in Python; and how."""
    known = "" if at is None else _for_indices(at)
    called = plain(function)
    if isinstance(function, partial):
        called = partial(called, *function.args, **function.keywords)
    if Walk(called).calls_compiled:
        return known, None  # it would read out of bounds again, unchecked
    score = () if kind == "mask_mod" else (dtype.type(0),)
    corners = product(*[sorted({0, n - 1}) for n in sizes])
    tried = chain(corners, product(*map(range, sizes))) if at is None else iter([at])
    for indices in islice(tried, MAX_TRIED):
        try:
            with np.errstate(all="ignore"):
                called(*score, *indices, *aux)
        except IndexError as error:
            return _for_indices(indices), error
        except Exception:  # that Python raises, and compiled code does not
            break
    return known, None


def _for_indices(indices: Sequence[int]) -> str:
    return f" for (b, h, q_idx, kv_idx) = {tuple(indices)}"
