"""`attention` inside other libraries: their gradients are those of `attention_backward`, and of their own
attention where they have one."""

from __future__ import annotations

import numpy as np
import pytest

import fastattn
from fastattn import masks
from tests.cases import random_arrays
from tests.tolerances import assert_same_bits

#: Options, some of them arrays, of problems of 2 items, 4 heads on 2, 13 queries and 21 keys.
OPTIONS = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (3, 1), "key_lengths": np.array([9, 21])},
    "mask": {"mask": np.random.default_rng(1).random((13, 21)) < 0.5},
    "mask_object": {"mask": masks.Window(4, 4) | masks.GlobalTokens([0])},
    "bias": {
        "bias": np.random.default_rng(2).standard_normal((4, 13, 21)).astype(np.float32),
        "softcap": 5.0,
    },
    "bias_of_keys": {"bias": np.random.default_rng(3).standard_normal((2, 1, 1, 21)).astype(np.float32)},
    "sinks": {"sinks": np.linspace(-1, 1, 4, dtype=np.float32), "scale": 0.3},
}
NAMES = ("query", "key", "value", "bias", "sinks")


def problem(name: str) -> tuple[dict[str, np.ndarray], dict, np.ndarray]:
    """What is differentiable, the other options, and the gradient of the outputs."""
    query, key, value = random_arrays(lead=(2,), heads=4, kv_heads=2, len_q=13, len_k=21, head_dim=8)
    options = dict(OPTIONS[name])
    arrays = {"query": query, "key": key, "value": value}
    arrays |= {name: options.pop(name) for name in ("bias", "sinks") if name in options}
    grad_out = np.random.default_rng(4).standard_normal(query.shape).astype(np.float32)
    return arrays, options, grad_out


def expected(arrays: dict[str, np.ndarray], options: dict, grad_out: np.ndarray) -> dict[str, np.ndarray]:
    out, lse = fastattn.attention(**arrays, **options, return_lse=True)
    gradients = fastattn.attention_backward(grad_out, **arrays, **options, out=out, lse=lse, wrt=list(arrays))
    return {"out": out} | {name: getattr(gradients, name) for name in arrays}


@pytest.mark.parametrize("name", OPTIONS)
def test_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    from fastattn.integrations.torch import attention

    arrays, options, grad_out = problem(name)
    tensors = {name: torch.from_numpy(array).requires_grad_() for name, array in arrays.items()}
    given = {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    out = attention(**tensors, **given)
    out.backward(torch.from_numpy(grad_out))
    got = {"out": out.detach().numpy()} | {name: tensor.grad.numpy() for name, tensor in tensors.items()}
    for name, array in expected(arrays, options, grad_out).items():
        assert_same_bits(got[name], array, name)


def test_torch_gradcheck() -> None:
    torch = pytest.importorskip("torch")
    from fastattn.integrations.torch import attention

    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 3, dtype=torch.float64, requires_grad=True).unbind()
    bias = torch.randn(2, 1, 4, dtype=torch.float64, requires_grad=True)

    def call(*tensors):
        return attention(*tensors[:3], bias=tensors[3], causal=True, return_lse=True)

    assert torch.autograd.gradcheck(call, (query, key, value, bias))


def test_torch_shares_memory_and_keeps_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    from fastattn.integrations.torch import attention

    query = torch.randn(2, 5, 8).to(torch.bfloat16).requires_grad_()
    out = attention(query, query, query)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert query.grad.dtype == torch.bfloat16
    wanted = torch.nn.functional.scaled_dot_product_attention(*[query.detach().float()[None]] * 3)[0]
    assert (out.float() - wanted).abs().max() < 0.02


@pytest.mark.parametrize("name", OPTIONS)
def test_autograd(name: str) -> None:
    autograd = pytest.importorskip("autograd")
    from fastattn.integrations.autograd import attention

    arrays, options, grad_out = problem(name)

    def loss(*given):
        return (attention(**dict(zip(arrays, given, strict=True)), **options) * grad_out).sum()

    got = autograd.grad(loss, argnum=tuple(range(len(arrays))))(*arrays.values())
    wanted = expected(arrays, options, grad_out)
    for name, gradient in zip(arrays, got, strict=True):
        assert_same_bits(np.asarray(gradient), wanted[name], name)


def test_autograd_of_one_argument_that_is_all_three() -> None:
    autograd = pytest.importorskip("autograd")
    from autograd.test_util import check_grads

    from fastattn.integrations.autograd import attention

    x = np.random.default_rng(0).standard_normal((2, 4, 3))
    check_grads(lambda x: attention(x, x, x, causal=True), modes=["rev"], order=1)(x)
    assert autograd.grad(lambda x: attention(x, x, x).sum())(x).shape == x.shape


@pytest.mark.parametrize("name", OPTIONS)
def test_jax(name: str) -> None:
    jax = pytest.importorskip("jax")
    from fastattn.integrations.jax import attention

    arrays, options, grad_out = problem(name)

    def loss(given):
        return (attention(**given, **options) * grad_out).sum()

    wanted = expected(arrays, options, grad_out)
    got = jax.jit(jax.grad(loss))(arrays)
    assert_same_bits(np.asarray(attention(**arrays, **options)), wanted["out"], "out")
    for name in arrays:
        assert_same_bits(np.asarray(got[name]), wanted[name], name)


@pytest.mark.parametrize("name", OPTIONS)
def test_jax_vmap(name: str) -> None:
    """Over every array, and over those of queries alone; under `jit` and `grad`."""
    jax = pytest.importorskip("jax")
    from fastattn.integrations.jax import attention

    arrays, options, grad_out = problem(name)
    options = {n: x for n, x in options.items() if n != "key_lengths"}
    several = {name: np.stack([array, array[..., ::-1], -array]) for name, array in arrays.items()}

    def loss(given):
        return (attention(**given, **options) * grad_out).sum()

    got = jax.jit(jax.vmap(jax.grad(loss)))(several)
    for number in range(3):
        one = {name: np.ascontiguousarray(array[number]) for name, array in several.items()}
        for name, array in expected(one, options, grad_out).items():
            if name in got:
                assert_same_bits(np.asarray(got[name][number]), array, name)
    of_queries = {name: 0 if name == "query" else None for name in arrays}
    got = jax.vmap(jax.grad(loss), in_axes=(of_queries,))(arrays | {"query": several["query"]})
    wanted = expected(arrays | {"query": np.ascontiguousarray(several["query"][1])}, options, grad_out)
    assert_same_bits(np.asarray(got["query"][1]), wanted["query"], "query")


def test_jax_one_head() -> None:
    jax = pytest.importorskip("jax")
    from fastattn.integrations.jax import attention

    x = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    assert_same_bits(np.asarray(attention(x, x, x, causal=True)), fastattn.attention(x, x, x, causal=True))
    assert jax.vmap(lambda x: attention(x, x, x, key_lengths=3))(np.stack([x, x])).shape == (2, 5, 8)
