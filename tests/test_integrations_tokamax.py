"""Tokamax on fastattn, against its own attention by XLA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.naive import attention as naive

pytest.importorskip("tokamax")

import jax
import jax.numpy as jnp
import tokamax
from absl import flags
from tokamax._src.ops.attention import api

from fastattn.integrations import tokamax as integration
from fastattn.integrations.tokamax import register, unregister

flags.FLAGS.mark_as_parsed()  # else Tokamax reads pytest's command line


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register()
    yield
    unregister()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Gets the options of each call that comes here."""
    found: list[dict[str, Any]] = []
    attention = integration.attention

    def noting(*arrays: Any, **options: Any) -> Any:
        found.append(options)
        return attention(*arrays, **options)

    monkeypatch.setattr(integration, "attention", noting)
    return found


def arrays_of(dtype: str = "float32", lead: tuple[int, ...] = (2,), len_q: int = 13, len_k: int = 21) -> list:
    rng = np.random.default_rng(0)
    shapes = [(len_q, 4, 16), (len_k, 2, 16), (len_k, 2, 12)]
    return [jnp.asarray(rng.standard_normal((*lead, *shape)), dtype) for shape in shapes]


RNG = np.random.default_rng(1)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.7},
    "softcap": {"logits_soft_cap": 3.0},
    "bias": {"bias": jnp.asarray(RNG.standard_normal((4, 13, 21)), "float32")},
    "mask": {"mask": jnp.asarray((RNG.random((2, 1, 13, 21)) < 0.5) | (np.arange(21) == 0))},
    "lengths": {"key_value_seq_lengths": jnp.array([5, 40]), "is_causal": True},
    "all": {
        "mask": jnp.asarray((RNG.random((1, 4, 13, 21)) < 0.7) | (np.arange(21) == 0)),
        "key_value_seq_lengths": jnp.array([9, 21]),
        "is_causal": True,
        "scale": 0.5,
        "logits_soft_cap": 9.0,
    },
}


def attend(arrays: list, implementation: str | None = "fastattn", **options: Any) -> jax.Array:
    return tokamax.dot_product_attention(*arrays, **options, implementation=implementation)


@pytest.mark.parametrize("name", OPTIONS)
def test_as_by_xla(name: str, calls: list) -> None:
    arrays = arrays_of()
    wanted = np.asarray(attend(arrays, "xla", **OPTIONS[name]))
    assert not calls
    static = ("scale", "logits_soft_cap", "is_causal")
    for call in (attend, jax.jit(attend, static_argnames=static)):
        got = np.asarray(call(arrays, **OPTIONS[name]))
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert calls
    lengths = "key_value_seq_lengths" in OPTIONS[name]
    assert all((it["key_lengths"] is not None) == lengths for it in calls)
    assert all((it["mask"] is not None) == ("mask" in OPTIONS[name]) for it in calls)


@pytest.mark.parametrize("window", [3, (4, 0), (2, 2)])
def test_windows(window: Any, calls: list) -> None:
    arrays = arrays_of(len_q=21)
    for lengths in (None, jnp.array([21, 20])):
        options = {"local_window_size": window, "key_value_seq_lengths": lengths, "is_causal": window == 3}
        wanted = np.asarray(attend(arrays, "xla", **options))
        got = np.asarray(attend(arrays, **options))
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert len(calls) == 2


def test_padded_queries_are_0(calls: list) -> None:
    arrays = arrays_of()
    options = {"query_seq_lengths": jnp.array([4, 13]), "is_causal": True}
    wanted, got = (np.asarray(attend(arrays, name, **options)) for name in ("xla", "fastattn"))
    is_there = np.arange(13) < np.array([4, 13])[:, None]
    np.testing.assert_allclose(got[is_there], wanted[is_there], rtol=1e-5, atol=1e-6)
    assert (got[~is_there] == 0).all()
    assert calls


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_types_and_leading_axes(dtype: str, lead: tuple[int, ...], calls: list) -> None:
    """As near to the exact result as XLA's, which has no products of float16 on the CPU."""
    with jax.enable_x64(dtype == "float64"):
        arrays = arrays_of(dtype, lead)
        known = [x.astype("float32") for x in arrays] if dtype == "float16" else arrays
        wanted, got = attend(known, "xla", is_causal=True).astype(dtype), attend(arrays, is_causal=True)
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        exact = naive(*(np.asarray(x, np.float64).swapaxes(-3, -2) for x in arrays), causal="top_left").out
        exact = exact.astype(float).swapaxes(-3, -2)
        error, allowed = (np.abs(np.asarray(x, np.float64) - exact).max() for x in (got, wanted))
    assert error <= 2 * allowed + 1e-16
    assert calls


def test_the_query_says_the_type() -> None:
    query, key, value = arrays_of()
    for arrays in ([query.astype("bfloat16"), key, value], [query, key.astype("bfloat16"), value]):
        assert attend(arrays).dtype == attend(arrays, "xla").dtype == arrays[0].dtype


def test_transformations(calls: list) -> None:
    query, key, value = arrays_of(lead=(3, 2))

    def gradients(name: str) -> Any:
        def loss(*arrays: Any) -> Any:
            return (attend(list(arrays), name, is_causal=True) ** 2).sum()

        return jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2))))(query, key, value)

    for got, wanted in zip(gradients("fastattn"), gradients("xla"), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=1e-4, atol=1e-5)
    assert calls


def test_the_default(calls: list) -> None:
    """Ours where it can, and Tokamax's own where it cannot."""
    arrays = arrays_of()
    wanted = np.asarray(attend(arrays, "xla"))
    np.testing.assert_allclose(np.asarray(attend(arrays, None)), wanted, rtol=1e-5, atol=1e-6)
    assert len(calls) == 1
    both = OPTIONS["bias"] | {"logits_soft_cap": 3.0}
    wanted = np.asarray(attend(arrays, "xla", **both))
    np.testing.assert_array_equal(np.asarray(attend(arrays, None, **both)), wanted)
    assert len(calls) == 1
    (n,) = jax.export.symbolic_shape("n")
    described = [jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype) for x in arrays]
    exported = jax.export.export(jax.jit(lambda *x: attend(list(x), None)))(*described)
    wanted = np.asarray(attend(arrays, "xla"))
    np.testing.assert_allclose(np.asarray(exported.call(*arrays)), wanted, rtol=1e-5)


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = arrays_of()
    for said, options in {
        "a bias under a soft-cap": OPTIONS["bias"] | {"logits_soft_cap": 3.0},
        "q_sharding": {"q_sharding": object()},
    }.items():
        with pytest.raises(NotImplementedError, match=f"fastattn does not take {said}"):
            attend(arrays, **options)
    with pytest.raises(NotImplementedError, match="quantized"):
        attend([x.astype("float8_e4m3fn") for x in arrays])
    qwix = pytest.importorskip("qwix")
    with pytest.raises(NotImplementedError, match="quantized"):
        attend([arrays[0], *(qwix.quantize(x, "int8", channelwise_axes=[0]) for x in arrays[1:])])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(NotImplementedError, match="no CPU"):
        attend(arrays)


def test_register_and_unregister(calls: list) -> None:
    own = [name for name in api.IMPLEMENTATIONS if name != "fastattn"]
    register()  # as before
    assert list(api.IMPLEMENTATIONS) == [*own, "fastattn"]
    assert api._DEFAULT_IMPLEMENTATION.count("fastattn") == 1
    unregister()
    assert list(api.IMPLEMENTATIONS) == own
    attend(arrays_of(), None)
    assert not calls
    with pytest.raises(ValueError, match="Unknown implementation: fastattn"):
        attend(arrays_of())
