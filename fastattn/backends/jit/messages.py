"""Errors for functions that cannot be compiled, and for those that read outside of an array."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dis import get_instructions
from functools import partial
from itertools import chain, islice, product
from typing import Any

import numpy as np
from numba.core.dispatcher import Dispatcher

from fastattn.backends.jit.checks import OTHER
from fastattn.backends.jit.identity import captured_names, identify, nested, reached

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


def not_compiled(kind: str, function: Any, error: Exception) -> str:
    """Which function, where, and Numba's objection; Numba's error is chained to ours."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    about = [line for line in lines if not line.startswith(("Failed in", "During:", "File ", "<source", "^"))]
    objected = " ".join([*about[:1], *[line for line in about[1:4] if line.startswith(">>>")]])
    places = re.findall(r'File "(.*?)", line (\d+)', text)
    named = [f"{file}, line {line}" for file, line in places if file != WRAPPER]
    return (
        f"{kind} {name_of(function)} cannot be compiled, see above for all that Numba says\n"
        f"at {named[0] if named else location_of(function)}:\n{objected}"
    )


def wrong_result(kind: str, function: Any, returned: Any, arguments: Sequence[Any]) -> str:
    promised = "a bool" if kind == "mask_mod" else "one real number"
    return (
        f"{kind} {name_of(function)} must return {promised}, and returns {returned}\n"
        f"for arguments of the types {', '.join(map(str, arguments))}\nat {location_of(function)}"
    )


def check_raises(kind: str, function: Any) -> None:
    """ValueError where the function may raise: a compiled loop cannot pass an exception on."""
    for called in reached(function):
        for code in nested(called.__code__):
            for instruction in get_instructions(code):
                if instruction.opname == "RAISE_VARARGS":
                    line = getattr(instruction.positions, "lineno", None) or code.co_firstlineno
                    raise ValueError(
                        f"{kind} {name_of(function)} may raise, and there is nobody to raise to\n"
                        f"at {code.co_filename}, line {line}:\nreturn -inf or False where nothing is read"
                    )


def outside(
    kind: str, function: Any, aux: Sequence[Any], dtype: np.dtype, sizes: Sequence[int], bits: int
) -> IndexError:
    """The error of a loop that returned these bits."""
    names = [f"aux[{i}]" for i in range(len(aux))] + captured_names(function)
    arrays = [*aux, *identify(function).captured]
    wrong = [i for i in range(min(len(names), OTHER)) if bits >> i & 1]
    read = " and ".join(f"{names[i]} of shape {arrays[i].shape}" for i in wrong) or "an array"
    where, cause = _first_failure(kind, function, aux, dtype, sizes)
    error = IndexError(
        f"{kind} {name_of(function)} reads outside of {read}{where}\nat {location_of(function)}"
    )
    error.__cause__ = cause
    return error


def _first_failure(
    kind: str, function: Any, aux: Sequence[Any], dtype: np.dtype, sizes: Sequence[int]
) -> tuple[str, Exception | None]:
    """The first indices for which the function fails in Python, of those that are tried."""
    if any(isinstance(value, Dispatcher) for f in reached(function) for value in f.__globals__.values()):
        return "", None  # a compiled callee would read out of bounds again, unchecked
    called = plain(function) if not isinstance(function, partial) else function
    score = (dtype.type(0),) if kind == "score_mod" else ()
    corners = product(*[sorted({0, n - 1}) for n in sizes])
    for indices in islice(chain(corners, product(*map(range, sizes))), MAX_TRIED):
        try:
            with np.errstate(all="ignore"):
                called(*score, *indices, *aux)
        except IndexError as error:
            return f" for (b, h, q_idx, kv_idx) = {indices}", error
        except Exception:  # that Python raises, and compiled code does not
            return "", None
    return "", None
