"""`flex_attention` of PyTorch's tensors: its gradients are those of PyTorch's autograd on the plain formula,
and bit for bit those of `flex_attention_backward`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import fastattn
from fastattn import masks
from tests.cases import random_arrays
from tests.tolerances import assert_close, assert_same_bits

pytest.importorskip("numba")
torch = pytest.importorskip("torch")
flex_attention = pytest.importorskip("fastattn.integrations.torch").flex_attention
pytestmark = pytest.mark.usefixtures("compiled")

#: Of 2 items, 4 heads on 2, 13 queries and 21 keys.
SIZES: dict[str, Any] = {
    "lead": (2,), "heads": 4, "kv_heads": 2, "len_q": 13, "len_k": 21, "head_dim": 8, "value_dim": 5,
}  # fmt: skip
RNG = np.random.default_rng(1)
LENGTHS = np.array([9, 21])
ALLOWED = RNG.random((2, 1, 13, 21)) < 0.7
ALLOWED[1, 0, 4] = False  # a query without keys
ITEM, HEAD, QUERY, KEY = (
    index.numpy() for index in torch.meshgrid(*map(torch.arange, (2, 4, 13, 21)), indexing="ij")
)


class Case(NamedTuple):
    function: Callable[..., Any] | None  #: of numbers
    of_tensors: Callable[..., Any]  #: the same of all scores at once
    aux: tuple[Any, ...]
    options: dict[str, Any]
    allowed: Any  #: the mask of the options


def by_distance(score, b, h, q_idx, kv_idx, table, last):
    return score + table[h, min(abs(q_idx - kv_idx), last)]


def gated(score, b, h, q_idx, kv_idx, gate, factor):
    return factor * score / (1 + math.exp(-gate[b, q_idx]))


def warmer(score, b, h, q_idx, kv_idx, factor):
    return score * factor


def near(b, h, q_idx, kv_idx, factor):
    return abs(q_idx - kv_idx) <= 5 + h


CASES = {
    "table": Case(
        by_distance,
        lambda score, table, last: score + table[HEAD, np.minimum(abs(QUERY - KEY), int(last))],
        (RNG.standard_normal((4, 8)), 7),
        {"causal": "bottom_right"},
        KEY <= QUERY + 8,
    ),
    "gate_and_number": Case(
        gated,
        lambda score, gate, factor: factor * score * torch.sigmoid(gate)[:, None, :, None],
        (RNG.standard_normal((2, 13)), np.array(1.25)),
        {"mask": ALLOWED, "key_lengths": LENGTHS, "scale": 0.3},
        ALLOWED & (LENGTHS[:, None, None, None] > KEY),
    ),
    "mask_mod": Case(
        warmer,
        lambda score, factor: score * factor,
        (np.array(0.8),),
        {"mask_mod": near, "block_mask": masks.Window(6, 2)},
        (abs(QUERY - KEY) <= 5 + HEAD) & (QUERY + 8 - 6 <= KEY) & (KEY <= QUERY + 8 + 2),
    ),
    "no_function": Case(
        None, lambda score: score, (), {"block_mask": masks.Causal(offset=8)}, KEY <= QUERY + 8
    ),
}


def tensors_of(name: str, dtype: str) -> tuple[list[Any], list[Any]]:
    """Query, key and value, and aux. All of floats require gradients."""
    arrays = random_arrays(**SIZES, dtype=dtype)
    aux = [x.astype(dtype) if isinstance(x, np.ndarray) else x for x in CASES[name].aux]
    as_tensor = lambda x: torch.tensor(x, requires_grad=True) if isinstance(x, np.ndarray) else x  # noqa: E731
    return [*map(as_tensor, arrays)], [*map(as_tensor, aux)]


def arriving(dtype: str) -> list[Any]:
    rng = np.random.default_rng(5)
    return [torch.tensor(rng.standard_normal(shape).astype(dtype)) for shape in ((2, 4, 13, 5), (2, 4, 13))]


def plain_gradients(name: str, dtype: str, wanted: str) -> list[Any]:
    """Those of PyTorch's autograd on the formula, of numbers of `dtype`, computed in the type `wanted`."""
    case, (arrays, aux) = CASES[name], tensors_of(name, dtype)
    leaves = [x for x in (*arrays, *aux) if isinstance(x, torch.Tensor)]
    with torch.no_grad():
        copies = [x.to(getattr(torch, wanted)).requires_grad_() for x in leaves]
    query, key, value = copies[:3]
    rest = iter(copies[3:])
    aux = [next(rest) if isinstance(x, torch.Tensor) else x for x in aux]
    scores = query @ key.repeat_interleave(2, 1).mT * case.options.get("scale", 8**-0.5)
    allowed = torch.from_numpy(np.array(np.broadcast_to(case.allowed, scores.shape)))
    scores = case.of_tensors(scores, *aux).masked_fill(~allowed, -torch.inf)
    has_keys = allowed.any(-1)
    lse = torch.where(has_keys[..., None], scores, 0).logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ value.repeat_interleave(2, 1)
    grad_out, grad_lse = arriving(dtype)
    ((out * grad_out).sum() + (lse * grad_lse)[has_keys].sum()).backward()
    return [x.grad.numpy() for x in copies]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, dtype: str) -> None:
    """Of query, key, value and aux, from those of out and lse."""
    case, (arrays, aux) = CASES[name], tensors_of(name, dtype)
    of_call = {"score_mod": case.function, **case.options}
    given = {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in of_call.items()}
    out, lse = flex_attention(*arrays, aux=aux, return_lse=True, **given)
    grads = arriving(dtype)
    torch.autograd.backward((out, lse), grads)
    leaves = [x for x in (*arrays, *aux) if isinstance(x, torch.Tensor)]
    got = [x.grad.numpy() for x in leaves]

    exact, plain = (plain_gradients(name, dtype, wanted) for wanted in ("float64", dtype))
    for number, (gradient, one, other) in enumerate(zip(got, exact, plain, strict=True)):
        if dtype == "float64":
            size = float(abs(one).max())
            np.testing.assert_allclose(gradient, one, rtol=1e-10, atol=1e-13 * size)
        else:
            assert_close(f"gradient {number}", gradient, one, np.full(one.shape, abs(one).max()), other)

    plain_arrays = [x.detach().numpy() for x in arrays]
    of_call["aux"] = [x.detach().numpy() if isinstance(x, torch.Tensor) else x for x in aux]
    forward = fastattn.flex_attention(*plain_arrays, return_lse=True, **of_call)
    wrt = ("query", "key", "value", *(["aux"] if aux else []))
    grad_out, grad_lse = (x.numpy() for x in grads)
    wanted = fastattn.flex_attention_backward(
        grad_out, *plain_arrays, *forward, grad_lse=grad_lse, wrt=wrt, **of_call
    )
    for x, expected in zip((out, lse), forward, strict=True):
        assert_same_bits(x.detach().numpy(), expected)
    for x, expected in zip(
        got, [x for x in (*wanted[:3], *(wanted.aux or ())) if x is not None], strict=True
    ):
        assert_same_bits(x, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_types_of_16_bits(dtype: str) -> None:
    """They are read as they are; a float16 of aux has a gradient of its type."""
    arrays, (gate, factor) = tensors_of("gate_and_number", "float32")
    with torch.no_grad():
        arrays = [x.to(getattr(torch, dtype)).requires_grad_() for x in arrays]
        gate = gate.half().requires_grad_()

    def gradients(arrays: list[Any], gate: Any) -> list[Any]:
        out = flex_attention(*arrays, score_mod=gated, aux=(gate, factor))
        assert out.dtype == arrays[0].dtype
        return list(torch.autograd.grad(out.float().square().sum(), (*arrays, gate)))

    got = gradients(arrays, gate)
    assert [x.dtype for x in got] == [x.dtype for x in (*arrays, gate)]
    wanted = gradients(
        [x.detach().float().requires_grad_() for x in arrays], gate.detach().float().requires_grad_()
    )
    for x, expected in zip(got, wanted, strict=True):  # out is rounded on the way
        size = float(expected.abs().max())
        assert (x.float() - expected).abs().max() <= 4 * torch.finfo(x.dtype).eps * size


def test_strides() -> None:
    """Transposed, stepped, expanded and negated tensors are read where they are, and have their gradients."""
    torch.manual_seed(0)
    query = torch.randn(5, 2, 8, dtype=torch.float64).transpose(0, 1)[..., ::2]
    table = torch.randn(16, 4, dtype=torch.float64).T[::2, ::2]
    expanded = torch.randn(8, dtype=torch.float64).expand(2, 8)
    negated = torch.randn(2, 8, dtype=torch.complex128).conj().imag
    assert negated.is_neg()
    for given in (table[:2], expanded, negated):
        leaves = [x.detach().requires_grad_() for x in (query, given)]
        copies = [
            x.detach().resolve_neg().clone(memory_format=torch.contiguous_format) for x in (query, given)
        ]
        results = []
        for q, t in (leaves, [x.requires_grad_() for x in copies]):
            out = flex_attention(q, q, q, score_mod=by_distance, aux=(t, 7))
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, t))))
        for x, y in zip(*results, strict=True):
            assert torch.equal(x, y)


def test_memory_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors with gaps, too."""
    arrays, (table, last) = tensors_of("table", "float32")
    with torch.no_grad():
        arrays = [torch.stack([x, x], dim=-1)[..., 0].requires_grad_() for x in arrays]
        aux = [table.T.contiguous().T.requires_grad_(), last]
    seen: list[Any] = []

    def noting(function: Any) -> Any:
        def call(**given: Any) -> Any:
            seen.append([*(given[name] for name in ("query", "key", "value")), given["aux"][0]])
            return function(**given)

        return call

    for name in ("flex_attention", "flex_attention_backward"):
        monkeypatch.setattr(fastattn, name, noting(getattr(fastattn, name)))
    flex_attention(*arrays, score_mod=by_distance, aux=aux).sum().backward()
    assert len(seen) == 2
    for given in seen:
        assert [x.ctypes.data for x in given] == [x.data_ptr() for x in (*arrays, aux[0])]


@pytest.mark.parametrize("wrt", [("aux[1]",), ("query",), ("key", "aux[0]")])
def test_the_gradients_that_are_needed(wrt: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    backward = fastattn.flex_attention_backward

    def noting(**given: Any) -> Any:
        asked.append(set(given["wrt"]))
        return backward(**given)

    monkeypatch.setattr(fastattn, "flex_attention_backward", noting)
    arrays, aux = tensors_of("gate_and_number", "float32")
    tensors = dict(zip(("query", "key", "value", "aux[0]", "aux[1]"), (*arrays, *aux), strict=True))
    for name, x in tensors.items():
        x.requires_grad_(name in wrt)
    flex_attention(*arrays, score_mod=gated, aux=aux).square().sum().backward()
    assert asked == [{name.split("[")[0] for name in wrt}]
    assert tuple(name for name, x in tensors.items() if x.grad is not None) == wrt


def test_gradcheck() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 3, dtype=torch.float64, requires_grad=True).unbind()
    bias = torch.randn(2, 1, 4, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    gate = torch.randn(1, 4, dtype=torch.float64, requires_grad=True)
    factor = torch.tensor(1.25, dtype=torch.float64, requires_grad=True)

    def call(query, key, value, bias, sinks, gate, factor):
        return flex_attention(
            query, key, value, score_mod=gated, aux=(gate, factor),
            bias=bias, sinks=sinks, softcap=3.0, causal=True, return_lse=True,
        )  # fmt: skip

    assert torch.autograd.gradcheck(call, (query, key, value, bias, sinks, gate, factor))


def test_score_grad_is_the_derivative() -> None:
    (query, key, value), (factor,) = tensors_of("mask_mod", "float64")

    def gradient(slope: Any) -> Any:
        out = flex_attention(query, key, value, score_mod=warmer, aux=(factor,), score_grad=slope)
        return torch.autograd.grad(out.square().sum(), query)[0]

    def twice(score, b, h, q_idx, kv_idx, factor):
        return 2 * factor

    torch.testing.assert_close(gradient(twice), 2 * gradient(None))


def test_what_a_mask_alone_reads_has_no_gradient() -> None:
    (query, key, value), (factor,) = tensors_of("mask_mod", "float64")
    out = flex_attention(query, key, value, mask_mod=near, aux=(factor,))
    out.sum().backward()
    assert factor.grad is None
    with torch.no_grad():
        assert torch.equal(out, flex_attention(query, key, value, mask_mod=near, aux=(factor,)))
    assert not flex_attention(
        *(x.detach() for x in (query, key, value)), mask_mod=near, aux=(factor,)
    ).requires_grad


def test_aux_that_changed_is_noticed() -> None:
    (query, key, value), (table, last) = tensors_of("table", "float32")
    table = table.detach()
    out = flex_attention(query, key, value, score_mod=by_distance, aux=(table, last))
    table.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_vmap() -> None:
    """Over aux, with gradients inside and around; numbers and arrays among aux stay as they are."""
    (query, key, value), (table, last) = tensors_of("table", "float32")
    query, key, value = (x.detach() for x in (query, key, value))
    tables = torch.stack([table.detach(), 2 * table.detach(), -table.detach()], dim=1)

    def loss(query: Any, table: Any) -> Any:
        out = flex_attention(query, key, value, score_mod=by_distance, aux=(table, last), causal="top_left")
        return out.square().sum()

    of_both = torch.func.grad(loss, argnums=(0, 1))
    got = torch.func.vmap(of_both, in_dims=(None, 1))(query, tables)
    wanted = [of_both(query, x) for x in tables.unbind(1)]
    for x, expected in zip(got, zip(*wanted, strict=True), strict=True):
        assert torch.equal(x, torch.stack(expected))
    around = torch.func.grad(lambda tables: torch.func.vmap(loss, in_dims=(None, 1))(query, tables).sum())(
        tables
    )
    assert torch.equal(around, got[1].movedim(0, 1))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_refuses() -> None:
    (query, key, value), (table, last) = tensors_of("table", "float32")

    def call(*arrays: Any, aux: Any = (table, last), **options: Any) -> Any:
        return flex_attention(*(arrays or (query, key, value)), score_mod=by_distance, aux=aux, **options)

    (gradient,) = torch.autograd.grad(call().sum(), table, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        torch.autograd.grad(gradient.square().sum() + table.sum(), table)
    with pytest.raises(NotImplementedError, match="no jvp"):
        torch.func.jvp(lambda table: call(aux=(table, last)), (table.detach(),), (table.detach(),))
    with pytest.raises(TypeError, match=r"aux\[0\] is on meta"):
        call(aux=(table.to("meta"), last))
    with pytest.raises(TypeError, match="aux must be a tuple or list of arrays and numbers, got Tensor"):
        call(aux=table)
    with pytest.raises(TypeError, match=r"aux\[0\] must be of .* float dtype, got dtype object"):
        call(aux=(None, last))
    with pytest.raises(TypeError, match=r"aux\[0\] must be of .* float dtype, got dtype bfloat16"):
        call(aux=(table.bfloat16(), last))
    with pytest.raises(TypeError, match="value must be a tensor, got ndarray"):
        call(query, key, value.detach().numpy())
    with pytest.raises(TypeError, match="not differentiable in scale"):
        call(scale=torch.tensor(0.3, requires_grad=True))
    with pytest.raises(TypeError, match="no return_weights="):
        call(return_weights=True)
    with pytest.raises(TypeError, match=r"table, from outside of the function, is of .*Tensor"):
        flex_attention(query, key, value, score_mod=lambda score, b, h, q_idx, kv_idx: score + table[h, 0])

    def gamma(score, b, h, q_idx, kv_idx):
        return math.lgamma(abs(score) + 1)

    with pytest.raises(TypeError, match="score_grad="):
        flex_attention(query, key, value, score_mod=gamma).sum().backward()
