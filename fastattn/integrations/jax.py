"""`attention` on JAX arrays of the CPU, under ``jit``, ``grad`` and ``vmap``.

The forward pass is a custom call of XLA, by the C entry. Gradients and calls with mask objects are callbacks
into NumPy. So are all calls where JAX has an interface that this package does not know.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np

import fastattn
from fastattn._call.arguments import as_mask, check_window
from fastattn._call.gradients import DIFFERENTIABLE
from fastattn._call.normalize import outline
from fastattn._call.options import refusing
from fastattn.integrations._common import extra
from fastattn.masks import Mask

with extra("jax"):
    import jax
    import jax.ffi
    import jax.numpy as jnp

try:
    import fastattn.integrations._xla as xla

    jax.ffi.register_ffi_target("fastattn_attention", xla.handler, platform="cpu")
    _has_custom_call = True
except (ImportError, RuntimeError):  # no kernels, or a JAX with another interface
    _has_custom_call = False


@refusing
def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
) -> jax.Array:
    """`fastattn.attention`, differentiable in query, key, value, bias and sinks, in reverse mode and once.

    Shapes and options are those of `fastattn.attention`, without its dropout, layout, threads and backend.
    `causal`, `window`, `scale`, `softcap` and a mask object are static under ``jit``: it is a TypeError to
    trace them. Integers count as JAX's default float. Wrong shapes, dtypes and options are raised when the
    call is traced. JAX raises what only numbers show, as key lengths out of range, when it runs. A second
    derivative is a NotImplementedError, and so is a symbolic size of ``jax.export``. That function needs
    ``jax.export.DisabledSafetyCheck.custom_call("fastattn_attention")`` among its `disabled_checks`.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from fastattn.integrations.jax import attention
    >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 5, 8))
    >>> loss = jax.jit(lambda query: attention(query, key, value, causal=True).sum())
    >>> jax.grad(loss)(query).shape
    (2, 5, 8)
    """
    for name, x in {"causal": causal, "window": window, "scale": scale, "softcap": softcap}.items():
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x)):
            instead = ", or multiply query by it and let scale be 1.0" if name == "scale" else ""
            raise TypeError(
                f"{name} must be known when attention is traced, got {x}; name it in static_argnames{instead}"
            )
    given = {"query": query, "key": key, "value": value, "bias": bias, "sinks": sinks}
    if isinstance(mask, bool):
        as_mask(mask, flat=False)  # raises
    of_mask = mask if isinstance(mask, Mask) else None
    given |= {"mask": None if of_mask is not None else mask, "key_lengths": key_lengths}
    arrays: dict[str, Any] = {name: None if x is None else jnp.asarray(x) for name, x in given.items()}
    arrays |= {name: _floating(arrays[name]) for name in ("query", "key", "value")}
    static = _checked(_Static(causal, window, scale, softcap, of_mask), arrays)
    query, key, value, bias, sinks, mask, key_lengths = arrays.values()
    is_one_head = query.ndim == 2
    if is_one_head:
        query, key, value = query[None], key[None], value[None]
    # With all axes of the scores, so that an axis which `vmap` adds in front is one more batch axis.
    bias, mask = (_with_axes(x, query.ndim) for x in (bias, mask))
    out = _attention(static, query, key, value, bias, sinks, mask, _with_axes(key_lengths, query.ndim - 3))
    return out[0] if is_one_head else out


class _Static(NamedTuple):
    """The options that are known when a function is traced."""

    causal: bool | str
    window: tuple[int | None, int | None] | None
    scale: float | None
    softcap: float | None
    mask: Mask | None


def _checked(static: _Static, arrays: dict[str, Any]) -> _Static:
    """The options as numbers, after all checks that do not read arrays."""
    for name, x in arrays.items():
        if x is not None and not all(isinstance(n, int) for n in x.shape):
            raise NotImplementedError(f"attention needs sizes that are numbers, got {name} {x.shape}")
    zeros: list[Any] = [
        None if x is None else np.broadcast_to(np.zeros((), x.dtype), x.shape) for x in arrays.values()
    ]
    query, key, value, *others = zeros
    *_, scale, softcap = outline(query, key, value, _options(static, *others))
    return static._replace(window=check_window(static.window), scale=scale, softcap=softcap)


def _floating(array: jax.Array) -> jax.Array:
    return array.astype(float) if array.dtype.kind in "biu" else array


def _with_axes(array: Any, ndim: int) -> Any:
    """An array with axes of 1 in front, `ndim` in all."""
    if array is None:
        return None
    array = jnp.asarray(array)
    return array.reshape((1,) * (ndim - array.ndim) + array.shape)


def _refuse(*_: Any) -> NoReturn:
    raise NotImplementedError("attention is differentiable once, and this asks for a second derivative")


def _not_differentiable(function: Any) -> Any:
    """A callback whose derivative is refused in our words."""
    wrapped = jax.custom_jvp(function, nondiff_argnums=(0,))
    wrapped.defjvp(_refuse)
    return wrapped


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: _Static, *arrays: Any) -> jax.Array:
    out, _ = _forward(static, *arrays)
    return out


@_not_differentiable
def _forward(static: _Static, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    """The output, and lse as integers of its bits, so that jax_debug_infs ignores the -inf of empty rows."""
    query, key, value = arrays[:3]
    lead = jnp.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    rows = (*lead, *query.shape[-3:-1])
    dtype = jnp.result_type(query, key, value)
    results = (
        jax.ShapeDtypeStruct((*rows, value.shape[-1]), dtype),
        jax.ShapeDtypeStruct(rows, jnp.int64 if dtype == jnp.float64 else jnp.int32),
    )
    found: tuple[jax.Array, jax.Array]
    if _has_custom_call and static.mask is None and jax.default_backend() == "cpu":
        found = _custom_call(static, results, *arrays)
    else:
        found = jax.pure_callback(partial(_call, static), results, *arrays, vmap_method="broadcast_all")
    return found


def _custom_call(static: _Static, results: Any, *arrays: Any) -> Any:
    """The call by XLA: see ``_xla.c`` for its arguments."""
    query, key, value, bias, sinks, mask, key_lengths = arrays
    ndim, dtype = len(results[0].shape), jnp.promote_types(results[0].dtype, jnp.float32)
    given = {
        "mask": None if mask is None else _with_axes(mask, ndim).astype(bool),
        "bias": _with_axes(bias, ndim),
        "key_lengths": _with_axes(_lengths(key_lengths), ndim - 3),
        "sinks": None if sinks is None else _with_axes(sinks, ndim - 2).astype(dtype),
    }
    left, right = static.window or (None, None)
    call = jax.ffi.ffi_call("fastattn_attention", results, vmap_method="expand_dims")
    return call(
        *(_with_axes(x, ndim) for x in (query, key, value)),
        *(x for x in given.values() if x is not None),
        given=np.int64(sum((x is not None) << bit for bit, x in enumerate(given.values(), start=5))),
        causal=np.int64({False: 0, True: 1, "top_left": 1, "bottom_right": 2}[static.causal]),
        window_left=_bound(left),
        window_right=_bound(right),
        scale=np.float64(static.scale),
        softcap=np.float64(static.softcap or 0.0),
    )


def _lengths(key_lengths: Any) -> Any:
    """In a dtype that the custom call reads: signed integers of 4 and 8 bytes."""
    if key_lengths is None or key_lengths.dtype in (jnp.int32, jnp.int64):
        return key_lengths
    return key_lengths.astype(int)


def _bound(bound: int | None) -> np.int64:
    return np.int64(-1 if bound is None else min(int(bound), 2**62))


def _forward_saving(static: _Static, *primals: Any) -> tuple[jax.Array, Any]:
    """The output, and what the gradients need; keys of a dict name it, as no transformation changes them."""
    arrays = tuple(None if it is None else it.value for it in primals)
    wanted = [
        name for name, it in zip(DIFFERENTIABLE, primals, strict=False) if it is not None and it.perturbed
    ]
    out, lse = _forward(static, *arrays)
    return out, (dict.fromkeys(wanted), *arrays, out, lse)


def _backward(static: _Static, saved: tuple[Any, ...], grad_out: Any) -> tuple[Any, ...]:
    wanted, *arrays = saved
    gradients = _gradients((static, tuple(wanted)), *arrays, grad_out)
    return *gradients, None, None  # of mask and key_lengths


_attention.defvjp(_forward_saving, _backward, symbolic_zeros=True)


@_not_differentiable
def _gradients(static: tuple[_Static, tuple[str, ...]], *arrays: Any) -> tuple[jax.Array | None, ...]:
    """The gradients that the second of `static` names."""
    results = tuple(
        jax.ShapeDtypeStruct(x.shape, x.dtype) if name in static[1] else None
        for name, x in zip(DIFFERENTIABLE, arrays, strict=False)
    )
    found: tuple[jax.Array | None, ...]
    found = jax.pure_callback(partial(_call_backward, *static), results, *arrays, vmap_method="broadcast_all")
    return found


def _call(static: _Static, *arrays: Any) -> Any:
    """The callback: out and lse as arrays of NumPy."""
    arrays = tuple(None if x is None else np.asarray(x) for x in arrays)
    if (each := _each(arrays)) is not None:
        return tuple(np.stack(parts) for parts in zip(*(_call(static, *one) for one in each), strict=True))
    query, key, value, *others = arrays
    out, lse = fastattn.attention(query, key, value, return_lse=True, **_options(static, *others))
    return out, lse.view(f"i{lse.itemsize}")


def _call_backward(static: _Static, wrt: tuple[str, ...], *arrays: Any) -> Any:
    arrays = tuple(None if x is None else np.asarray(x) for x in arrays)
    if (each := _each(arrays)) is not None:
        parts = [_call_backward(static, wrt, *one) for one in each]
        return tuple(None if of[0] is None else np.stack(of) for of in zip(*parts, strict=True))
    query, key, value, bias, sinks, mask, key_lengths, out, lse, grad_out = arrays
    options = _options(static, bias, sinks, mask, key_lengths)
    lse = lse.view(f"f{lse.itemsize}")
    return tuple(fastattn.attention_backward(grad_out, query, key, value, out, lse, wrt=wrt, **options))


def _each(arrays: tuple[Any, ...]) -> Any:
    """The arrays of each element of an axis that `vmap` added to the sinks, which have one axis in a call;
    None where it added none."""
    sinks = arrays[4]
    if sinks is None or sinks.ndim == 1:
        return None
    return [tuple(None if x is None else x[i] for x in arrays) for i in range(len(sinks))]


def _options(static: _Static, bias: Any, sinks: Any, mask: Any, key_lengths: Any) -> dict[str, Any]:
    return static._asdict() | {
        "bias": bias,
        "sinks": sinks,
        "mask": static.mask if mask is None else mask,
        "key_lengths": key_lengths,
    }
