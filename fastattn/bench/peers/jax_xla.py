"""JAX: ``jax.nn.dot_product_attention`` and the formula in `jax.numpy`, both jitted, on XLA's CPU backend.

The function takes ``(B, length, heads, dim)`` only and gets its inputs stored that way beforehand; the
formula gets ``(B, heads, length, dim)``. Both are compiled beforehand. In float64 the function takes the
softmax in float32 all the same, so only the formula is right there.

Gradients: ``jax.vjp`` gives a function, which as a pytree holds what it needs of the forward pass. It is made
beforehand by one jitted function, and called by another one that takes it as an argument, and is timed.

XLA's pool has as many threads as
the environment variable NPROC says, which the worker is started with.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fastattn.bench.case import Case, Inputs
from fastattn.bench.peers._base import (
    Block,
    Call,
    Peer,
    Unable,
    block_axis,
    blocks,
    check_plain,
    check_scores_fit,
    folded,
    joined,
)

#: Attention of three arrays in one of the two layouts.
Attention = Callable[..., jax.Array]

#: Makes it ready: of a case, its inputs, the attention, its other arrays and its layout.
Compiled = Callable[[Case, Inputs, Attention, dict[str, np.ndarray], str], Call]


def load(num_threads: int) -> JaxXLA:
    return JaxXLA()


class JaxXLA(Peer):
    """Arrays on the device before the call, and the result waited for inside it."""

    version = jax.__version__

    def __init__(self) -> None:
        self.ways = {
            "dot_product_attention": partial(self._library, _compiled),
            "the same, a group's heads as rows": folded(partial(self._library, _compiled)),
            "formula": partial(self._formula, _compiled),
            "formula, block by block": partial(self._by_blocks, _compiled),
        }
        self.backward_ways = {
            "vjp of dot_product_attention": partial(self._library, _compiled_backward),
            "vjp of the formula": partial(self._formula, _compiled_backward),
            "vjp of the formula, block by block": partial(self._by_blocks, _compiled_backward),
        }

    def _library(self, compiled: Compiled, case: Case, inputs: Inputs) -> Call:
        if case.softcap is not None:
            raise Unable("no soft-cap")
        check_plain(case)
        check_scores_fit(case)
        # Its causal starts at the top left and its window lies around it; lengths would not move them.
        aligned = case.len_q == case.len_k and case.lengths is None
        options: dict[str, Any] = {"is_causal": case.causal and aligned}
        arrays: dict[str, np.ndarray] = {}
        if case.document_length is None and inputs.mask is None and (aligned or not case.causal):
            if case.window is not None:
                options["local_window_size"] = case.window
            if case.lengths is not None:
                arrays["key_value_seq_lengths"] = case.lengths.astype(np.int32)
        else:
            allowed = inputs.allowed(case, causal=False if aligned else None)
            if allowed is not None:
                arrays["mask"] = allowed
        if inputs.bias is not None:
            arrays["bias"] = inputs.bias.reshape(1, -1, case.len_q, case.len_k)

        def attention(query: jax.Array, key: jax.Array, value: jax.Array, **given: Any) -> jax.Array:
            return jax.nn.dot_product_attention(query, key, value, **given, **options)

        return compiled(case, inputs, attention, arrays, "bshd")

    def _formula(self, compiled: Compiled, case: Case, inputs: Inputs) -> Call:
        check_plain(case)
        check_scores_fit(case)
        arrays = {"allowed": inputs.allowed(case), "bias": inputs.bias}
        given = {name: array for name, array in arrays.items() if array is not None}

        def attention(query: jax.Array, key: jax.Array, value: jax.Array, **given: jax.Array) -> jax.Array:
            return _attention(case, query, key, value, **given)

        return compiled(case, inputs, attention, given, "bhsd")

    def _by_blocks(self, compiled: Compiled, case: Case, inputs: Inputs) -> Call:
        check_plain(case)
        parts = blocks(case)

        def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            def one(it: Block) -> jax.Array:
                rows = query[it.items, :, it.rows]
                keys, values = key[it.items, :, it.keys], value[it.items, :, it.keys]
                allowed = jnp.tri(rows.shape[2], dtype=bool) if it.causal else None
                return _attention(case, rows, keys, values, allowed)

            return jnp.concatenate([one(it) for it in parts], axis=block_axis(case))

        return compiled(case, inputs, attention, {}, "bhsd")


def _attention(
    case: Case,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    allowed: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """The formula; the query heads of a group are rows of one matrix, so no key/value head is copied."""
    batch, heads, len_q, head_dim = query.shape
    rows = (query * head_dim**-0.5).reshape(batch, case.kv_heads, -1, head_dim)
    scores = (rows @ key.swapaxes(-1, -2)).reshape(batch, heads, len_q, -1)
    if case.softcap is not None:
        scores = case.softcap * jnp.tanh(scores / case.softcap)
    if bias is not None:
        scores += bias
    if allowed is not None:
        scores = jnp.where(allowed, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).reshape(batch, case.kv_heads, -1, key.shape[2])
    return (weights @ value).reshape(batch, heads, len_q, -1)


def _compiled(
    case: Case, inputs: Inputs, attention: Attention, arrays: dict[str, np.ndarray], layout: str
) -> Call:
    """`attention` compiled for the case, from arrays in `layout`; where it is strided it takes a slice."""

    def whole(query: jax.Array, key: jax.Array, value: jax.Array, **others: jax.Array) -> jax.Array:
        if case.strided:
            query, key, value = query[..., ::2], key[..., ::2], value[..., ::2]
        return attention(query, key, value, **others)

    with jax.enable_x64(case.dtype == "float64"):
        ready = [_in_layout(array, layout) for array in inputs.wide(case)]
        others = {name: jnp.array(array) for name, array in arrays.items()}
        compiled = jax.jit(whole).lower(*ready, **others).compile()

    def run() -> jax.Array:
        return compiled(*ready, **others).block_until_ready()

    return Call(run, lambda: _bhsd(run(), layout))


def _compiled_backward(
    case: Case, inputs: Inputs, attention: Attention, arrays: dict[str, np.ndarray], layout: str
) -> Call:
    """The gradients of `attention`, compiled for the case; what they are computed from is kept."""

    def whole(query: jax.Array, key: jax.Array, value: jax.Array, bias: dict[str, jax.Array]) -> jax.Array:
        return attention(query, key, value, **bias, **others)

    def forward(*given: Any) -> Any:
        _, gradients = jax.vjp(whole, *given)
        return gradients

    def backward(gradients: Any, grad_out: jax.Array) -> Any:
        return gradients(grad_out)

    with jax.enable_x64(case.dtype == "float64"):
        ready = [_in_layout(array, layout) for array in inputs.bhsd(case)]
        grad_out = _in_layout(inputs.grad_out_bhsd(case), layout)
        others = {name: jnp.array(array) for name, array in arrays.items()}
        bias = {"bias": others.pop("bias")} if "bias" in others else {}
        gradients = jax.jit(forward)(*ready, bias)
        compiled = jax.jit(backward).lower(gradients, grad_out).compile()

    def run() -> Any:
        return jax.block_until_ready(compiled(gradients, grad_out))  # type: ignore[no-untyped-call]

    def result() -> np.ndarray:
        *found, by_bias = run()
        return joined([*(_bhsd(array, layout) for array in found), *map(np.asarray, by_bias.values())])

    return Call(run, result)


def _in_layout(array: np.ndarray, layout: str) -> jax.Array:
    """``(B, heads, length, dim)`` as an array on the device in `layout`."""
    return jnp.array(np.ascontiguousarray(array.transpose(0, 2, 1, 3) if layout == "bshd" else array))


def _bhsd(array: jax.Array, layout: str) -> np.ndarray:
    """The same, back."""
    found = np.asarray(array)
    return found.transpose(0, 2, 1, 3) if layout == "bshd" else found
