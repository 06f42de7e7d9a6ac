"""`attention` inside functions that Numba compiles, by the C entry.

Importing this module, or having fastattn installed, lets ``@njit`` code call `attention`, and
`fastattn.attention` by the same arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import fastattn
from fastattn._api import c_entry
from fastattn._call.hints import refusal
from fastattn._call.options import refusing
from fastattn.integrations._common import extra

with extra("numba"):
    from llvmlite import binding, ir
    from numba import types
    from numba.core import cgutils
    from numba.core.errors import TypingError
    from numba.core.targetconfig import ConfigStack
    from numba.extending import intrinsic, overload, register_jitable
    from numba.np.arrayobj import make_array

if TYPE_CHECKING:
    from fastattn._call.options import CausalRule

#: Compiled code finds the C entry by this name when it is loaded. Cached code could not hold an address.
_SYMBOL = "fastattn_attention_of_numba"

_ARRAYS = ("query", "key", "value", "out", "lse", "mask", "bias", "key_lengths", "sinks")
#: The fields of ``fastattn_call`` as words of 8 bytes, of which an array has six.
_FIELDS = (
    "abi_version", "struct_size", "batch", "num_heads", "num_kv_heads", "len_q", "len_k", "head_dim",
    "value_dim", *(f"{name}.{n}" for name in _ARRAYS for n in range(6)), "causal", "window_left",
    "window_right", "scale", "softcap", "precision", "num_threads", "message", "message_size",
)  # fmt: skip
_N_FIELDS = len(_FIELDS)
_QUERY, _KEY, _VALUE, _OUT = (_FIELDS.index(f"{name}.0") for name in _ARRAYS[:4])
_CAUSAL, _LEFT, _SCALE, _MESSAGE = (
    _FIELDS.index(name) for name in ("causal", "window_left", "scale", "message")
)
_MESSAGE_WORDS = 64

#: What to do about arguments that compiled code does not take.
_ELSEWHERE = (
    "in compiled code it takes query, key, value, causal and scale alone; a block "
    "`with numba.objmode(out=...):`, which runs as Python, may call it with the others"
)
_DTYPES = {types.float32: c_entry.FLOAT32, types.float64: c_entry.FLOAT64}


@refusing
def attention(
    query: Any, key: Any, value: Any, causal: CausalRule = False, scale: float | None = None
) -> Any:
    """`fastattn.attention` of float32 or float64 arrays with two to four axes, inside ``@njit`` as outside.

    Parameters
    ----------
    query : ndarray, shape (L, D), (H, L, D) or (B, H, L, D)
    key : ndarray, shape (S, D), (K, S, D) or (B, K, S, D)
        ``H % K == 0``. All three have two axes, or all have three or four; the batch axes broadcast.
    value : ndarray, shape (S, E), (K, S, E) or (B, K, S, E)
    causal : bool, "top_left" or "bottom_right", default False
    scale : float, optional
        ``1 / sqrt(D)`` when not given.

    Returns
    -------
    ndarray, shape (L, E), (H, L, E) or (B, H, L, E)
        With the bits of `fastattn.attention`.

    Raises
    ------
    ValueError
        As `fastattn.attention` does, when the compiled code runs.
    numba.core.errors.TypingError
        Other dtypes and ranks; other arguments, which a block ``with numba.objmode`` may pass to
        `fastattn.attention`; a function with ``parallel=True`` that holds the GIL, see Notes; no kernels.

    Notes
    -----
    A call with new sizes or strides takes the GIL for a moment. So code with ``prange`` needs ``nogil=True``:
    else the thread that waits for the loop would hold the GIL for ever. This is checked for the function that
    calls `attention`, not for those that call that one. In ``prange`` each call may use several threads, with
    the same bits.

    Compiled code may be cached on disk. Outside of compiled code this is `fastattn.attention`.

    Examples
    --------
    >>> import numba
    >>> import numpy as np
    >>> from fastattn.integrations.numba import attention
    >>> @numba.njit
    ... def norm(query, key, value):
    ...     return np.linalg.norm(attention(query, key, value, causal=True))
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 5, 8))
    >>> bool(np.isclose(norm(query, key, value), norm.py_func(query, key, value)))
    True
    """
    return fastattn.attention(query, key, value, causal=causal, scale=scale)


def _init() -> None:
    """The entry point ``numba_extensions``. Importing this module does the work."""


@intrinsic
def _attend(typing_context: Any, call: Any) -> Any:
    """The return code of the C entry for a struct in an array, which stays alive during the call."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words = make_array(signature.args[0])(context, builder, arguments[0])
        pointer = cgutils.voidptr_t
        entry = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.IntType(32), [pointer]), _SYMBOL
        )
        return builder.call(entry, [builder.bitcast(words.data, pointer)])

    return types.int32(call), generate


@register_jitable
def _describe(call: Any, at: int, array: Any, dtype: int) -> None:
    """Fills in an array of the struct."""
    call[at] = array.ctypes.data
    call[at + 1] = dtype
    call[at + 4] = array.strides[-2]
    call[at + 5] = array.strides[-1]
    if array.ndim > 2:
        call[at + 3] = array.strides[-3]
    if array.ndim > 3 and array.shape[0] != 1:
        call[at + 2] = array.strides[0]


@register_jitable
def _heads(array: Any) -> int:
    return array.shape[-3] if array.ndim > 2 else 1


@register_jitable
def _items(array: Any) -> int:
    return array.shape[0] if array.ndim > 3 else 1


@register_jitable
def _message(call: Any) -> str:
    """The text that the C entry wrote behind the struct."""
    text = ""
    for byte in call[_N_FIELDS:].view(np.uint8):
        if byte == 0:
            break
        text += chr(byte)
    return text


@register_jitable
def _code_of_word(causal: str, len_q: int, len_k: int) -> int:
    if causal == "top_left":
        return 1
    if causal == "bottom_right":
        return 2
    raise ValueError("causal must be False, True, 'top_left' or 'bottom_right', got '" + causal + "'")


@register_jitable
def _code_of_bool(causal: bool, len_q: int, len_k: int) -> int:
    if causal and len_q != len_k:
        raise ValueError(
            "causal=True needs L == S, got L="
            + str(len_q)
            + " and S="
            + str(len_k)
            + "; say causal='top_left' or causal='bottom_right'"
        )
    return 1 if causal else 0


@register_jitable
def _no_scale(scale: None) -> float:
    return np.nan


@register_jitable
def _finite(scale: float) -> float:
    if not np.isfinite(scale):
        raise ValueError("scale must be finite")
    return float(scale)


def _typed(
    query: Any, key: Any, value: Any, causal: Any = False, scale: Any = None, *more: Any, **unknown: Any
) -> Any:
    """The implementation for arguments of these types."""
    _check_types(more, unknown, scale, query=query, key=key, value=value)
    of_word = isinstance(causal, types.UnicodeType | types.StringLiteral)
    code_of_causal = _code_of_word if of_word else _code_of_bool
    has_no_scale = scale is None or isinstance(scale, types.NoneType | types.Omitted)
    number = _no_scale if has_no_scale else _finite
    query_dtype, key_dtype, value_dtype = (_DTYPES[array.dtype] for array in (query, key, value))
    out_dtype = max(query_dtype, key_dtype, value_dtype)
    result = np.float64 if out_dtype == c_entry.FLOAT64 else np.float32
    ndim = max(query.ndim, key.ndim, value.ndim)

    def implementation(query: Any, key: Any, value: Any, causal: Any = False, scale: Any = None) -> Any:
        len_q, head_dim = query.shape[-2], query.shape[-1]
        len_k, value_dim = key.shape[-2], value.shape[-1]
        heads, kv_heads = _heads(query), _heads(key)
        if key.shape[-1] != head_dim or value.shape[-2] != len_k or _heads(value) != kv_heads:
            raise ValueError(
                "query, key and value must have shapes (..., H, L, D), (..., K, S, D) and "
                + "(..., K, S, E), got D " + str(head_dim) + " and " + str(key.shape[-1]) + ", K "
                + str(kv_heads) + " and "
                + str(_heads(value)) + ", S " + str(len_k) + " and " + str(value.shape[-2])
            )  # fmt: skip
        batch = 1
        for items in (_items(query), _items(key), _items(value)):
            if items != 1:
                if batch not in (1, items):
                    raise ValueError("the leading batch axes of query, key and value do not broadcast")
                batch = items
        if ndim == 4:
            out = np.empty((batch, heads, len_q, value_dim), result)
        elif ndim == 3:
            out = np.empty((heads, len_q, value_dim), result)
        else:
            out = np.empty((len_q, value_dim), result)
        call = np.zeros(_N_FIELDS + _MESSAGE_WORDS, np.int64)
        call[0], call[1], call[2], call[3], call[4] = 1, 8 * _N_FIELDS, batch, heads, kv_heads
        call[5], call[6], call[7], call[8] = len_q, len_k, head_dim, value_dim
        _describe(call, _QUERY, query, query_dtype)
        _describe(call, _KEY, key, key_dtype)
        _describe(call, _VALUE, value, value_dtype)
        _describe(call, _OUT, out, out_dtype)
        call[_CAUSAL] = code_of_causal(causal, len_q, len_k)
        call[_LEFT], call[_LEFT + 1] = -1, -1
        call.view(np.float64)[_SCALE] = number(scale)
        call[_MESSAGE] = call.ctypes.data + 8 * _N_FIELDS
        call[_MESSAGE + 1] = 8 * _MESSAGE_WORDS
        code = _attend(call)
        if code == 4:
            raise MemoryError(_message(call))
        if code != 0:
            raise ValueError(_message(call))
        return out

    return implementation


def _check_types(more: tuple[Any, ...], unknown: dict[str, Any], scale: Any, **arrays: Any) -> None:
    """TypingError where compiled code cannot call the C entry with these."""
    if more or unknown:
        raise TypingError(f"{refusal(attention, more, unknown)}; {_ELSEWHERE}")
    if isinstance(scale, types.Array):
        raise TypingError(f"scale must be one number, got {scale}; {_ELSEWHERE}")
    for name, array in arrays.items():
        if not isinstance(array, types.Array) or array.dtype not in _DTYPES:
            raise TypingError(f"{name} must be an array of float32 or float64, got {array}")
        if not 2 <= array.ndim <= 4:
            raise TypingError(f"{name} must have 2, 3 or 4 axes, got {array}")
    ranks = {array.ndim for array in arrays.values()}
    if 2 in ranks and ranks != {2}:
        raise TypingError("two axes stand for one head, and then query, key and value all have two")
    if _missing:
        raise TypingError(_missing)
    flags = ConfigStack.top_or_none()
    if flags is not None and flags.auto_parallel.enabled and not flags.release_gil:
        raise TypingError(
            "attention in a function with parallel=True needs nogil=True there: its threads would wait for "
            "the GIL, which the thread that waits for them holds"
        )


try:
    binding.add_symbol(_SYMBOL, c_entry.address())
    _missing = ""
except fastattn.BackendError as error:
    _missing = str(error)

for _function in (attention, fastattn.attention):
    # Not strict: so `_typed` may take what the implementation does not, to refuse it.
    overload(_function, prefer_literal=True, strict=False)(_typed)
