"""`attention` inside other libraries: their gradients are those of `attention_backward`, and of their own
attention where they have one."""

from __future__ import annotations

import importlib
import tomllib

import numpy as np
import pytest

import fastattn
from fastattn import masks
from fastattn.backends.cython import backend as cython_backend
from tests.cases import random_arrays
from tests.process import ROOT, python
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
    "dropout": {"dropout": 0.4, "seed": 3},
}
IN_JAX = [name for name in OPTIONS if name != "dropout"]
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


INTEGRATIONS = sorted(
    path.stem
    for path in (ROOT / "fastattn" / "integrations").glob("[!_]*")
    if path.suffix == ".py" or (path / "__init__.py").exists()
)


@pytest.mark.parametrize(
    "fault",
    ["ModuleNotFoundError(f'No module named {name!r}', name=name)", "RuntimeError('too old')", "Odd(1, 2)"],
)
def test_without_the_library_the_pip_line(fault: str) -> None:
    """Of an extra that is there, where all but NumPy and the standard library is missing, or broken."""
    code = f"""
import sys
import fastattn
class Odd(ImportError):
    def __init__(self, *two):
        super().__init__(two)
class Absent:
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] not in {{"fastattn", "numpy", *sys.stdlib_module_names}}:
            raise {fault}
sys.meta_path.insert(0, Absent)
for name in {INTEGRATIONS}:
    try:
        __import__(f"fastattn.integrations.{{name}}")
    except ImportError as error:
        print(type(error).__name__, error)
"""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = python(code).splitlines()
    kind = "ModuleNotFoundError" if fault.startswith("Module") else "ImportError"
    said = {"M": "No module named ", "R": "(too old)", "O": "((1, 2))"}[fault[0]]
    for name, line in zip(INTEGRATIONS, lines, strict=True):
        assert line.startswith(f"{kind} fastattn.integrations.{name} needs packages that are missing")
        assert said in line
        assert f"pip install 'fastattn[{name}]'" in line
        assert name in extras


def refused_by(door: str, query: np.ndarray, key: np.ndarray) -> str:
    """What a door without an argument `layout` says of arrays in the layout that it does not take."""
    if door == "c":
        from tests import c_entry

        return c_entry.attend(query, key, key, np.empty_like(query))[1]
    with pytest.raises(ValueError) as error:
        if door == "jax":
            importlib.import_module("fastattn.integrations.jax").attention(query, key, key)
        elif door == "onnx":
            importlib.import_module("tests.test_integrations_onnx").run_operator(
                "Attention", Q=query, K=key, V=key
            )
        elif door == "keras":
            keras = importlib.import_module("keras")
            with importlib.import_module("fastattn.integrations.keras").installed():
                keras.ops.dot_product_attention(*(x.swapaxes(1, 2) for x in (query, key, key)))
        else:
            import torch

            forward = importlib.import_module("fastattn.integrations.transformers")._attention_forward
            forward(torch.nn.Module(), *map(torch.from_numpy, (query, key, key)), None)
    return str(error.value)


@pytest.mark.parametrize("door", ["c", "jax", "onnx", "keras", "transformers"])
def test_no_hint_at_a_layout_where_there_is_none(door: str) -> None:
    if door != "c":
        pytest.importorskip(door)
    elif cython_backend.backend.unavailable_reasons():
        pytest.skip("the C entry is part of the compiled kernels")
    query, key = np.ones((2, 5, 4, 8), "f4"), np.ones((2, 7, 2, 8), "f4")
    with pytest.raises(ValueError, match="say layout="):
        fastattn.attention(query, key, key)
    message = refused_by(door, query, key)
    assert "must be a multiple of" in message
    assert "(2, 5, 4, 8)" in message or "(2, 4, 5, 8)" in message
    assert "layout" not in message


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


def test_torch_takes_a_lazy_negative() -> None:
    """As the imaginary part of a conjugate is, whose memory holds the other sign."""
    torch = pytest.importorskip("torch")
    from fastattn.integrations.torch import attention

    query = torch.randn(2, 3, 4, dtype=torch.complex64).conj().imag
    assert query.is_neg()
    plain = query.resolve_neg()
    assert torch.equal(attention(query, query, query), attention(plain, plain, plain))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_torch_keeps_16_bits_and_strides(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    from fastattn.integrations.torch import attention

    query = torch.randn(5, 2, 16).to(getattr(torch, dtype)).transpose(0, 1)[..., ::2].requires_grad_()
    out = attention(query, query, query)
    assert out.dtype == query.dtype
    (gradient,) = torch.autograd.grad(out.float().square().sum(), query)
    assert gradient.dtype == query.dtype
    exact = query.detach().double().requires_grad_()
    wanted = torch.nn.functional.scaled_dot_product_attention(*[exact[None]] * 3)[0]
    assert (out.double() - wanted).abs().max() < 0.02
    (wanted_gradient,) = torch.autograd.grad(wanted.square().sum(), exact)
    assert (gradient.double() - wanted_gradient).abs().max() < 0.1


def computed_gradients(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Gets what each call of `attention_backward` is asked for."""
    asked: list[tuple[str, ...]] = []
    backward = fastattn.attention_backward

    def noting(*args, wrt, **options):
        asked.append(tuple(sorted(wrt)))
        return backward(*args, wrt=wrt, **options)

    monkeypatch.setattr(fastattn, "attention_backward", noting)
    return asked


@pytest.mark.parametrize("wrt", [("query",), ("bias",), ("key", "sinks")])
def test_torch_computes_the_gradients_that_are_needed(
    wrt: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from fastattn.integrations.torch import attention

    arrays, options, grad_out = problem("bias")
    arrays["sinks"] = np.linspace(-1, 1, 4, dtype=np.float32)
    wanted = expected(arrays, options, grad_out)
    asked = computed_gradients(monkeypatch)
    tensors = {name: torch.from_numpy(x).requires_grad_(name in wrt) for name, x in arrays.items()}
    attention(**tensors, **options).backward(torch.from_numpy(grad_out))
    assert asked == [wrt]
    for name, tensor in tensors.items():
        if name in wrt:
            assert_same_bits(tensor.grad.numpy(), wanted[name], name)
        else:
            assert tensor.grad is None


def test_torch_takes_no_second_derivative_for_zero() -> None:
    torch = pytest.importorskip("torch")
    from fastattn.integrations.torch import attention

    query = torch.randn(2, 5, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(attention(query, query, query).sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        torch.autograd.grad(gradient.square().sum() + query.sum(), query)


@pytest.mark.parametrize("options", [{}, {"return_lse": True}])
def test_torch_without_gradients(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from fastattn.integrations import torch as integration

    query = torch.randn(2, 5, 8, requires_grad=True)
    expected = integration.attention(query, query, query, **options)
    monkeypatch.setattr(integration, "_Attention", None)  # autograd is not asked
    with torch.no_grad():
        found = integration.attention(query, query, query, **options)
    assert torch.equal(
        torch.cat([x.reshape(-1) for x in found]), torch.cat([x.reshape(-1) for x in expected])
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_torch_refuses_forward_mode() -> None:
    torch = pytest.importorskip("torch")
    from fastattn.integrations.torch import attention

    query = torch.randn(2, 5, 8)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp"):
        attention(torch.autograd.forward_ad.make_dual(query, query), query, query)
    with pytest.raises(RuntimeError):
        torch.func.jvp(lambda query: attention(query, query, query), (query,), (query,))


def test_torch_notices_a_mask_that_changed() -> None:
    torch = pytest.importorskip("torch")
    from fastattn.integrations.torch import attention

    query, mask = torch.randn(2, 5, 8, requires_grad=True), torch.ones(5, 5, dtype=torch.bool)
    out = attention(query, query, query, mask=mask)
    mask.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_torch_func_grad() -> None:
    torch = pytest.importorskip("torch")
    from fastattn.integrations.torch import attention

    query = torch.randn(2, 5, 8, requires_grad=True)

    def loss(query):
        return attention(query, query, query, causal=True).sum()

    (wanted,) = torch.autograd.grad(loss(query), query)
    assert torch.equal(torch.func.grad(loss)(query.detach()), wanted)


@pytest.mark.parametrize("name", OPTIONS)
def test_torch_vmap(name: str) -> None:
    """Over every tensor, and over an axis of queries alone; with gradients inside and around."""
    torch = pytest.importorskip("torch")
    from fastattn.integrations.torch import attention

    arrays, options, grad_out = problem(name)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    several = {name: torch.stack([x, 2 * x, -x]) for name, x in tensors.items()}
    weights = torch.from_numpy(grad_out)

    def loss(given: dict) -> torch.Tensor:
        return (attention(**given, **options) * weights).sum()

    of_queries = {name: 3 if name == "query" else None for name in tensors}
    queries = several["query"].movedim(0, 3)
    ways = [
        ((several, 0), [{name: x[i] for name, x in several.items()} for i in range(3)]),
        ((tensors | {"query": queries}, of_queries), [tensors | {"query": x} for x in several["query"]]),
    ]
    for (given, dims), items in ways:
        got = torch.func.vmap(lambda given: attention(**given, **options), in_dims=(dims,))(given)
        assert torch.equal(got, torch.stack([attention(**item, **options) for item in items]))
        got = torch.func.vmap(torch.func.grad(loss), in_dims=(dims,))(given)
        wanted = [torch.func.grad(loss)(item) for item in items]
        for name in tensors:
            assert torch.equal(got[name], torch.stack([gradients[name] for gradients in wanted])), name
    around = torch.func.grad(lambda given: torch.func.vmap(loss)(given).sum())(several)
    for name, gradient in around.items():
        assert torch.equal(gradient, torch.func.vmap(torch.func.grad(loss))(several)[name]), name


def test_torch_vmap_over_options_and_lse() -> None:
    torch = pytest.importorskip("torch")
    from fastattn.integrations.torch import attention

    query, key, value = torch.randn(3, 2, 4, 5, 8)
    mask, lengths = torch.rand(3, 5, 5) < 0.7, torch.tensor([[5, 0], [1, 2], [3, 3]])

    def call(mask: torch.Tensor, lengths: torch.Tensor, scale: torch.Tensor | float) -> tuple:
        return attention(query, key, value, mask=mask, key_lengths=lengths, scale=scale, return_lse=True)

    scales = torch.tensor([0.25, 0.5, 1.0])
    got = torch.func.vmap(call)(mask, lengths, scales)
    wanted = [call(*given) for given in zip(mask, lengths, scales.tolist(), strict=True)]
    for x, expected in zip(got, zip(*wanted, strict=True), strict=True):
        assert torch.equal(x, torch.stack(expected))
    jacobian = torch.func.jacrev(lambda query: attention(query, key, value).sum((0, 1, 3)))(query)
    _, pull_back = torch.func.vjp(lambda query: attention(query, key, value), query)
    for i, row in enumerate(jacobian):
        grad_out = torch.zeros(2, 4, 5, 8)
        grad_out[:, :, i] = 1
        assert torch.equal(row, pull_back(grad_out)[0])


@pytest.mark.parametrize("way", ["jvp", "jacfwd", "hessian", "batched gradients", "no memory", "no items"])
def test_torch_names_what_it_cannot(way: str) -> None:
    """In its own words, not in those of PyTorch about what it came to in the end."""
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fastattn.integrations.torch import attention

    query = torch.randn(2, 5, 8, requires_grad=True)

    def loss(query: torch.Tensor) -> torch.Tensor:
        return attention(query, query, query).sum()

    def fake() -> torch.Tensor:
        with FakeTensorMode():
            return loss(torch.randn(2, 5, 8))

    def batched() -> tuple:
        out = attention(query, query, query)
        return torch.autograd.grad(out, query, torch.randn(3, 2, 5, 8), is_grads_batched=True)

    calls = {
        "jvp": lambda: torch.func.jvp(loss, (query,), (query,)),
        "jacfwd": lambda: torch.func.jacfwd(loss)(query),
        "hessian": lambda: torch.func.hessian(loss)(query),
        "batched gradients": batched,
        "no memory": fake,
        "no items": lambda: torch.func.vmap(loss)(torch.empty(0, 2, 5, 8)),
    }
    with pytest.raises(NotImplementedError, match=r"^attention "):
        calls[way]()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_torch_options_that_are_transformed() -> None:
    """As query, key and value are: an item after another under `vmap`, refused where they are to be
    differentiated."""
    torch = pytest.importorskip("torch")
    from fastattn.integrations.torch import attention

    query, key, value = torch.randn(3, 2, 4, 5, 8)
    forward_ad = torch.autograd.forward_ad
    for name in ("scale", "softcap"):

        def call(x, name=name):
            return attention(query, key, value, **{name: x})

        numbers = torch.tensor([0.25, 0.5])
        wanted = torch.stack([call(x) for x in numbers.tolist()])
        assert torch.equal(torch.func.vmap(call)(numbers), wanted)
        with pytest.raises(TypeError, match=f"not differentiable in {name}"):
            torch.func.jvp(call, (numbers[0],), (numbers[1],))
        with forward_ad.dual_level(), pytest.raises(TypeError, match=f"not differentiable in {name}"):
            call(forward_ad.make_dual(numbers[0], numbers[1]))


def test_torch_refuses() -> None:
    torch = pytest.importorskip("torch")
    from fastattn.integrations.torch import attention

    query, key, value = torch.randn(3, 2, 5, 8)
    with pytest.raises(TypeError, match="key is on meta"):
        attention(query, key.to("meta"), value)
    with pytest.raises(TypeError, match="mask is on meta"):
        attention(query, key, value, mask=torch.ones(5, 5, dtype=torch.bool, device="meta"))
    with pytest.raises(TypeError, match="value must be a tensor, got ndarray"):
        attention(query, key, value.numpy())
    with pytest.raises(TypeError, match="not differentiable in scale"):
        attention(query, key, value, scale=torch.tensor(0.3, requires_grad=True))
    with pytest.raises(TypeError, match="use bias="):
        attention(query, key, value, mask=torch.zeros(5, 5))
    for name, x in {"float8": key.to(torch.float8_e4m3fn), "sparse": key.to_sparse()}.items():
        with pytest.raises(TypeError, match=f"(?i)key has no array of NumPy's: .*{name}"):
            attention(query, x, value)
    for name, given in {"out": torch.empty(2, 5, 8), "return_weights": True}.items():
        with pytest.raises(TypeError, match=f"no {name}="):
            attention(query, key, value, **{name: given})


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


def test_autograd_of_a_function_of_scores() -> None:
    autograd = pytest.importorskip("autograd")
    pytest.importorskip("numba")
    from fastattn.integrations.autograd import flex_attention

    def function(score, b, h, q_idx, kv_idx, table, whole, number):
        return score * number + table[h, (q_idx - kv_idx) % whole]

    rng = np.random.default_rng(0)
    query, key, value, grad_out = rng.standard_normal((4, 2, 5, 3))
    given = (query, value, rng.standard_normal((2, 4)), 0.5)
    options = {"score_mod": function, "causal": True}

    def loss(query, value, table, number):
        out = flex_attention(query, key, value, aux=(table, 4, number), **options)
        return (out * grad_out).sum()

    got = autograd.grad(loss, argnum=(0, 1, 2, 3))(*given)
    options["aux"] = (given[2], 4, given[3])
    out, lse = fastattn.flex_attention(query, key, value, return_lse=True, **options)
    wrt = ("query", "key", "value", "aux")
    wanted = fastattn.flex_attention_backward(grad_out, query, key, value, out, lse, wrt=wrt, **options)
    for one, other in zip(got, (wanted.query, wanted.value, wanted.aux[0], wanted.aux[2]), strict=True):
        assert_same_bits(np.asarray(one), other)

    def by_half(score, b, h, q_idx, kv_idx, table, whole, number):
        return number

    of_key = autograd.grad(
        lambda key: (flex_attention(query, key, value, score_grad=by_half, **options) * grad_out).sum()
    )(key)
    np.testing.assert_allclose(of_key, wanted.key, rtol=1e-12)


def test_autograd_refuses() -> None:
    autograd = pytest.importorskip("autograd")
    from fastattn.integrations.autograd import attention

    x = np.random.default_rng(0).standard_normal((2, 4, 3))
    gradient = autograd.grad(lambda x: attention(x, x, x).sum())
    with pytest.raises(NotImplementedError, match="VJP of attention_backward"):
        autograd.grad(lambda x: (gradient(x) ** 2).sum())(x)
    for name in ("out", "return_lse", "return_weights"):
        with pytest.raises(TypeError, match=f"no {name}="):
            attention(x, x, x, **{name: x})


@pytest.mark.parametrize("name", IN_JAX)
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


@pytest.mark.parametrize("name", IN_JAX)
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


def test_jax_vmap_over_key_lengths() -> None:
    jax = pytest.importorskip("jax")
    from fastattn.integrations.jax import attention

    arrays, _, _ = problem("plain")
    lengths = np.array([[9, 21], [1, 5], [21, 2]])
    got = jax.vmap(lambda lengths: attention(**arrays, key_lengths=lengths))(lengths)
    for one, of_item in zip(lengths, got, strict=True):
        assert_same_bits(np.asarray(of_item), fastattn.attention(**arrays, key_lengths=one))


def test_jax_computes_the_gradients_that_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax")
    from fastattn.integrations.jax import attention

    asked = computed_gradients(monkeypatch)
    arrays, options, _ = problem("bias")

    def loss(given):
        return attention(**arrays | given, **options).sum()

    for wrt in [("query",), ("bias",), ("key", "value")]:
        given = {name: arrays[name] for name in wrt}
        jax.grad(loss)(given)
        jax.jit(jax.grad(jax.checkpoint(loss)))(given)
        several = {name: np.stack([x, x]) for name, x in given.items()}
        jax.jit(jax.vmap(jax.grad(loss)))(several)["query" if "query" in wrt else wrt[0]].block_until_ready()
        assert asked == [wrt] * 3
        asked.clear()


@pytest.mark.slow
def test_jax_types() -> None:
    jax = pytest.importorskip("jax")
    from fastattn.integrations.jax import attention

    x = np.random.default_rng(0).standard_normal((2, 5, 8))

    def gradient_of(x):
        return jax.grad(lambda x: attention(x, x, x).astype("float32").sum())(x)

    for enabled, widest in ((False, "float32"), (True, "float64")):
        with jax.enable_x64(enabled):
            assert attention(x, x, x).dtype == gradient_of(jax.numpy.asarray(x)).dtype == widest
            assert attention(x.astype(int), x, x).dtype == widest
            for dtype in ("float16", "bfloat16"):
                narrow = jax.numpy.asarray(x, dtype)
                assert attention(narrow, narrow, narrow).dtype == gradient_of(narrow).dtype == dtype


def test_jax_refuses() -> None:
    jax = pytest.importorskip("jax")
    from fastattn.integrations.jax import attention

    x = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)

    def loss(x):
        return attention(x, x, x).sum()

    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, (x,), (x,))
    for second in (jax.hessian(loss), jax.grad(lambda x: jax.grad(loss)(x).sum())):
        for call in (second, jax.jit(second)):
            with pytest.raises(NotImplementedError, match="differentiable once"):
                call(x)
    with pytest.raises(Exception, match="use bias="):
        attention(x, x, x, mask=np.zeros((5, 5), np.float32))


def test_jax_one_head() -> None:
    jax = pytest.importorskip("jax")
    from fastattn.integrations.jax import attention

    x = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    assert_same_bits(np.asarray(attention(x, x, x, causal=True)), fastattn.attention(x, x, x, causal=True))
    assert jax.vmap(lambda x: attention(x, x, x, key_lengths=3))(np.stack([x, x])).shape == (2, 5, 8)
