"""`attention` on JAX arrays of the CPU, under ``jit``, ``grad`` and ``vmap``.

The forward pass is a custom call of XLA, by the C entry. Gradients and calls with mask objects are callbacks
into NumPy. So are all calls where JAX has an interface that this package does not know.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np

import fastattn
from fastattn._call.arguments import as_mask, check_single, check_window
from fastattn._call.gradients import DIFFERENTIABLE
from fastattn._call.normalize import outline
from fastattn._call.options import refusing
from fastattn.integrations._common import extra, stand_in
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
    scale: Any = None,
    softcap: float | None = None,
    sinks: Any = None,
    precision: str = "exact",
) -> jax.Array:
    """`fastattn.attention`, differentiable in query, key, value, bias and sinks, in reverse mode and once.

    Shapes and options are those of `fastattn.attention`, without its dropout, layout, threads and backend.
    `causal`, `window`, `softcap`, `precision` and a mask object are static under ``jit``: it is a TypeError
    to trace them. A `scale` that is traced, or of heads, is differentiable: the query is multiplied by it.
    Integers count as JAX's default float. Wrong shapes, dtypes and options are errors when the call is
    traced. Errors in numbers, such as key lengths out of range, are raised when it runs. A second derivative
    is a NotImplementedError, and so is a symbolic size of ``jax.export``. It needs
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
    for name, x in {"causal": causal, "window": window, "softcap": softcap}.items():
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x)):
            raise TypeError(
                f"{name} must be known when attention is traced, got {x}; name it in static_argnames"
            )
    check_single(bias, None)
    if np.isscalar(mask):
        as_mask(mask, flat=False)  # raises
    of_mask = mask if isinstance(mask, Mask) else None
    given = {
        "query": query, "key": key, "value": value, "bias": bias, "sinks": sinks,
        "mask": None if of_mask is not None else mask, "key_lengths": key_lengths,
    }  # fmt: skip
    arrays: dict[str, Any] = {name: None if x is None else jnp.asarray(x) for name, x in given.items()}
    for name in ("query", "key", "value"):
        if arrays[name].dtype.kind in "biu":
            arrays[name] = arrays[name].astype(float)
    of_result = jnp.result_type(*(arrays[name] for name in ("query", "key", "value")))
    if isinstance(scale, jax.core.Tracer) or np.ndim(scale):
        arrays["query"], scale = _scaled(arrays["query"], jnp.asarray(scale)), 1.0
    static = _checked(_Static(causal, window, scale, softcap, of_mask, precision), arrays)
    is_one_head = arrays["query"].ndim == 2
    if is_one_head:
        arrays |= {name: arrays[name][None] for name in ("query", "key", "value")}
    # With all axes of the scores, so that an axis which `vmap` adds in front is one more batch axis.
    ndim = arrays["query"].ndim
    for name, axes in {"bias": ndim, "mask": ndim, "key_lengths": ndim - 3}.items():
        arrays[name] = _with_axes(arrays[name], axes)
    out = _attention(static, arrays).astype(of_result)
    return out[0] if is_one_head else out


def _scaled(query: Any, scale: Any) -> Any:
    """The query, each head times its number, in the type of the computation."""
    heads = query.shape[-3] if query.ndim > 2 else 1
    if scale.shape not in ((), (heads,)):
        raise ValueError(f"scale must be a number or have shape (H,) = ({heads},), got {scale.shape}")
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    return query.astype(dtype) * scale.astype(dtype).reshape(-1, *(1,) * (query.ndim > 2) * 2)


class _Static(NamedTuple):
    """The options that are known when a function is traced."""

    causal: bool | str
    window: tuple[int | None, int | None] | None
    scale: float | None
    softcap: float | None
    mask: Mask | None
    precision: str


Arrays = dict[str, Any]  # all those that `attention` takes, by name; None for those not given


def _checked(static: _Static, arrays: Arrays) -> _Static:
    """The options as numbers, after all checks that do not read arrays."""
    for name, x in arrays.items():
        if x is not None and not all(isinstance(n, int) for n in x.shape):
            raise NotImplementedError(f"attention needs sizes that are numbers, got {name} {x.shape}")
    options = _options(static, {name: None if x is None else stand_in(x) for name, x in arrays.items()})
    query, key, value = (options.pop(name) for name in ("query", "key", "value"))
    *_, scale, softcap = outline(query, key, value, options)
    return static._replace(window=check_window(static.window), scale=scale, softcap=softcap)


def _options(static: _Static, arrays: Arrays) -> dict[str, Any]:
    """The arguments of `fastattn.attention`, by name."""
    return static._asdict() | {name: x for name, x in arrays.items() if x is not None}


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
def _attention(static: _Static, arrays: Arrays) -> jax.Array:
    return _forward(static, arrays)[0]


@_not_differentiable
def _forward(static: _Static, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """The output, and lse as integers of its bits, so that jax_debug_infs ignores the -inf of empty rows."""
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    lead = jnp.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    rows = (*lead, *query.shape[-3:-1])
    dtype = jnp.result_type(query, key, value)
    results = (
        jax.ShapeDtypeStruct((*rows, value.shape[-1]), dtype),
        jax.ShapeDtypeStruct(rows, jnp.int64 if dtype == jnp.float64 else jnp.int32),
    )
    found: tuple[jax.Array, jax.Array]
    if _has_custom_call and static.mask is None and jax.default_backend() == "cpu":
        found = _custom_call(static, results, arrays)
    else:
        found = jax.pure_callback(partial(_call, static), results, arrays, vmap_method="broadcast_all")
    return found


def _custom_call(static: _Static, results: Any, arrays: Arrays) -> Any:
    """The call by XLA: see ``_xla.c`` for its arguments."""
    ndim, dtype = len(results[0].shape), jnp.promote_types(results[0].dtype, jnp.float32)
    mask, sinks, lengths = arrays["mask"], arrays["sinks"], arrays["key_lengths"]
    if lengths is not None and lengths.dtype not in (jnp.int32, jnp.int64):  # those that the call reads
        lengths = lengths.astype(int)
    given = (
        None if mask is None else _with_axes(mask, ndim).astype(bool),
        _with_axes(arrays["bias"], ndim),
        _with_axes(lengths, ndim - 3),
        None if sinks is None else _with_axes(sinks, ndim - 2).astype(dtype),
    )
    left, right = static.window or (None, None)
    call = jax.ffi.ffi_call("fastattn_attention", results, vmap_method="expand_dims")
    return call(
        *(_with_axes(arrays[name], ndim) for name in ("query", "key", "value")),
        *(x for x in given if x is not None),
        given=np.int64(sum((x is not None) << bit for bit, x in enumerate(given, start=5))),
        causal=np.int64({False: 0, True: 1, "top_left": 1, "bottom_right": 2}[static.causal]),
        window_left=_bound(left),
        window_right=_bound(right),
        scale=np.float64(static.scale),
        softcap=np.float64(static.softcap or 0.0),
        precision=np.int64(static.precision == "storage"),
    )


def _bound(bound: int | None) -> np.int64:
    return np.int64(-1 if bound is None else min(int(bound), 2**62))


def _forward_saving(static: _Static, primals: Arrays) -> tuple[jax.Array, Any]:
    """The output, and what the gradients need. Names are keys of dicts, which no transformation changes."""
    arrays = {name: None if it is None else it.value for name, it in primals.items()}
    given = {name: it for name, it in primals.items() if it is not None}
    wanted = [name for name in DIFFERENTIABLE if name in given and given[name].perturbed]
    out, lse = _forward(static, arrays)
    return out, (dict.fromkeys(wanted), arrays, out, lse)


def _backward(static: _Static, saved: tuple[Any, ...], grad_out: Any) -> tuple[Arrays]:
    wanted, arrays, out, lse = saved
    results = {"out": out, "lse": lse, "grad_out": grad_out}
    return (dict.fromkeys(arrays) | _gradients((static, tuple(wanted)), arrays | results),)


_attention.defvjp(_forward_saving, _backward, symbolic_zeros=True)


@_not_differentiable
def _gradients(static: tuple[_Static, tuple[str, ...]], arrays: Arrays) -> Arrays:
    """The gradients that the second of `static` names."""
    results = {name: jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype) for name in static[1]}
    found: Arrays = jax.pure_callback(
        partial(_call_backward, *static), results, arrays, vmap_method="broadcast_all"
    )
    return found


def _call(static: _Static, arrays: Arrays) -> Any:
    """The callback: out and lse as arrays of NumPy."""
    if (each := _each(arrays)) is not None:
        return tuple(np.stack(parts) for parts in zip(*(_call(static, one) for one in each), strict=True))
    out, lse = fastattn.attention(**_options(static, _on_host(arrays)), return_lse=True)
    return out, lse.view(f"i{lse.itemsize}")


def _call_backward(static: _Static, wrt: tuple[str, ...], arrays: Arrays) -> Arrays:
    if (each := _each(arrays)) is not None:
        parts = [_call_backward(static, wrt, one) for one in each]
        return {name: np.stack([part[name] for part in parts]) for name in wrt}
    options = _options(static, _on_host(arrays))
    options["lse"] = options["lse"].view(f"f{options['lse'].itemsize}")
    gradients = fastattn.attention_backward(**options, wrt=wrt)
    return {name: getattr(gradients, name) for name in wrt}


def _on_host(arrays: Arrays) -> Arrays:
    return {name: None if x is None else np.asarray(x) for name, x in arrays.items()}


def _each(arrays: Arrays) -> list[Arrays] | None:
    """The arrays of each call, where `vmap` gave the sinks an axis beside their only one; else None."""
    sinks = arrays["sinks"]
    if sinks is None or sinks.ndim == 1:
        return None
    return [{name: None if x is None else x[i] for name, x in arrays.items()} for i in range(len(sinks))]
