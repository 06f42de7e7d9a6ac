"""`gated_linear_attention_backward`: against the recurrence, token by token in extended precision."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import pytest

import fastattn
from fastattn import gated_linear_attention_backward
from tests.cases import FLOATS, once
from tests.test_recurrent import RULES, WIDE, inputs, recurrence
from tests.tolerances import assert_same_bits

NAMES = fastattn.RecurrentGradients._fields


@pytest.fixture
def run(way):
    """The function on a backend and an instruction set."""
    return partial(gated_linear_attention_backward, backend="reference" if way == "numpy" else "cython")


def problem(rule, *args, **options):
    """The gradients with respect to the results and the state, and the arguments by name."""
    (query, key, value), gates = inputs(rule, *args, **options)
    rng = np.random.default_rng(options.get("seed", 0) + 1)
    shape = (*key.shape[:-2], key.shape[-1], value.shape[-1])
    state, grad_state = rng.standard_normal((2, *shape)).astype(key.dtype)
    grad_out = rng.standard_normal((*query.shape[:-1], value.shape[-1])).astype(key.dtype)
    return grad_out, grad_state, {"query": query, "key": key, "value": value, **gates, "state": state}


@once
def naive(grad_out, grad_state, given, scale=None, lengths=None):
    """The gradients by name, from each token's state and the gradient with respect to it."""
    given = {name: x.astype(WIDE) for name, x in given.items()}
    k, v, decay, beta = (given.get(name) for name in ("key", "value", "decay", "beta"))
    *lead, K, L, D = k.shape
    grouped = (*lead, K, grad_out.shape[-3] // K, L)
    q, g = given["query"].reshape(*grouped, D), grad_out.astype(WIDE).reshape(*grouped, v.shape[-1])
    scale = 1 / np.sqrt(WIDE(D)) if scale is None else scale
    is_read = np.arange(L) < np.full((*lead, 1), L if lengths is None else np.asarray(lengths)[..., None])
    kept = np.ones((*lead, K, L, D, 1), WIDE)
    if decay is not None:
        kept = np.exp(decay[..., None, None] if decay.ndim < k.ndim else decay[..., None]) * kept
    kept = np.where(is_read[..., None, :, None, None], kept, 1)
    rate = np.ones((*lead, K, L), WIDE) if beta is None else beta
    states, lefts, S = [], [], given.get("state", np.zeros((*lead, K, D, v.shape[-1]), WIDE))
    for t in range(L):
        decayed = np.where(kept[..., t, :, :] == 0, 0, kept[..., t, :, :] * S)
        answer = 0 if beta is None else (k[..., t, None, :] @ decayed)[..., 0, :]
        left = v[..., t, :] - answer
        S = decayed + k[..., t, :, None] * (rate[..., t, None] * left)[..., None, :]
        S = np.where(is_read[..., None, t, None, None], S, decayed)
        states.append((decayed, S))
        lefts.append(left)
    found = {name: np.zeros_like(x) for name, x in given.items()}
    grad_query = found["query"].reshape(q.shape)
    Z = np.zeros_like(S) if grad_state is None else grad_state.astype(WIDE)
    for t in reversed(range(L)):
        (decayed, S), left, read = states[t], lefts[t], is_read[..., None, t, None]
        Z = Z + scale * np.einsum("...gd,...ge->...de", q[..., t, :], g[..., t, :])
        grad_query[..., t, :] = scale * (g[..., t, :] @ S.swapaxes(-1, -2))
        answer = (k[..., t, None, :] @ Z)[..., 0, :]
        added = rate[..., t, None] * left
        change = rate[..., t, None] * answer
        found["value"][..., t, :] = np.where(read, change, 0)
        grad_key = (Z @ added[..., None])[..., 0]
        if beta is not None:
            found["beta"][..., t] = np.where(read[..., 0], (answer * left).sum(-1), 0)
            grad_key = grad_key - (decayed @ change[..., None])[..., 0]
            Z = np.where(read[..., None], Z - k[..., t, :, None] * change[..., None, :], Z)
        found["key"][..., t, :] = np.where(read, grad_key, 0)
        if decay is not None:
            grad_decay = np.where(read, (Z * decayed).sum(-1), 0)
            if decay.ndim < k.ndim:
                found["decay"][..., t] = grad_decay.sum(-1)
            else:
                found["decay"][..., t, :] = grad_decay
        Z = kept[..., t, :, :] * Z
    found["query"][...] = grad_query.reshape(found["query"].shape)
    if "state" in found:
        found["state"][...] = Z
    return found


def assert_near(found, expected, ulps):
    """Each gradient to within some units of its largest element."""
    for name in NAMES:
        got = getattr(found, name)
        assert (got is not None) == (name in expected), name
        if got is not None:
            error = np.abs(got.astype(WIDE) - expected[name]).max(initial=0)
            size = np.abs(expected[name]).max(initial=np.finfo(got.dtype).tiny)
            assert error <= ulps * np.finfo(got.dtype).eps * size, (name, float(error / size))


def gradients(run, grad_out, grad_state, given, **options):
    return run(grad_out, **given, grad_state=grad_state, wrt=tuple(given), **options)


@pytest.mark.parametrize("rule", RULES)
def test_the_oracle_by_finite_differences(rule):
    grad_out, grad_state, given = problem(rule, (2,), 4, 2, 9, 3, 4, np.float64)
    lengths = [9, 4]
    expected = naive(grad_out, grad_state, given, lengths=lengths)

    def scalar(given):
        given = dict(given)
        arrays = [given.pop(name) for name in ("query", "key", "value")]
        out, state = recurrence(arrays, **given, lengths=lengths)
        return (out * grad_out).sum() + (state * grad_state).sum()

    rng, step = np.random.default_rng(0), WIDE(1e-6)
    for name, x in given.items():
        way = rng.standard_normal(x.shape)
        ends = (scalar({**given, name: x + sign * step * way}) for sign in (1, -1))
        difference = np.subtract(*ends) / (2 * step)
        np.testing.assert_allclose(float((expected[name] * way).sum()), float(difference), rtol=1e-9)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_they_are_those_of_the_recurrence(run, rule, dtype):
    sizes = [((), 1, 1, 1, 5, 7), ((2,), 4, 2, 3, 16, 24), ((), 2, 2, 32, 8, 8), ((1,), 6, 2, 33, 8, 8)]
    sizes += [((), 4, 1, 130, 40, 70), ((), 55, 1, 20, 17, 33)]
    for n, (lead, H, K, L, D, E) in enumerate(sizes):
        grad_out, grad_state, given = problem(rule, lead, H, K, L, D, E, dtype, seed=n)
        expected = naive(grad_out, grad_state, given)
        found = gradients(run, grad_out, grad_state, given)
        assert all(getattr(found, name).dtype == dtype for name in given)
        assert all(getattr(found, name).flags.c_contiguous for name in given)
        assert_near(found, expected, 60)
        del given["state"]
        assert_near(gradients(run, grad_out, None, given), naive(grad_out, None, given), 60)


@pytest.mark.parametrize("rule", RULES)
def test_they_are_those_of_torch(run, rule):
    torch = pytest.importorskip("torch", reason="compares with PyTorch's gradients")
    grad_out, grad_state, given = problem(rule, (), 2, 2, 60, 8, 6, np.float64)
    held = {name: torch.tensor(x, requires_grad=True) for name, x in given.items()}
    q, k, v, S = (held[name] for name in ("query", "key", "value", "state"))
    decay, beta = held.get("decay"), held.get("beta")
    total = 0
    for t in range(60):
        if decay is not None:
            S = S * torch.exp(decay[:, t, None, None] if decay.ndim < 3 else decay[:, t, :, None])
        u = v[:, t]
        if beta is not None:
            u = beta[:, t, None] * (u - (k[:, t, None] @ S)[:, 0])
        S = S + k[:, t, :, None] * u[:, None]
        out = 0.5 * (q[:, t, None] @ S)[:, 0]
        total = total + (out * torch.tensor(grad_out[:, t])).sum()
    (total + (S * torch.tensor(grad_state)).sum()).backward()
    found = gradients(run, grad_out, grad_state, given, scale=0.5)
    assert_near(found, {name: x.grad.numpy() for name, x in held.items()}, 100)


@pytest.mark.parametrize("rule", ["retnet", "gla", "gated_delta", "kimi"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_decays_of_any_size(run, rule, dtype):
    """From none at all to -1e4 in one sequence. What has left the state has the gradient 0."""
    for seed, reach in enumerate((1e-3, 1.0, 30.0, 1e4)):
        grad_out, grad_state, given = problem(rule, L=130, dtype=dtype, seed=seed)
        decay, rng = given["decay"], np.random.default_rng(seed)
        decay *= np.dtype(dtype).type(reach)
        decay[rng.random(decay.shape) < 0.05] = -np.inf
        decay[rng.random(decay.shape) < 0.05] = -1e30
        decay[rng.random(decay.shape) < 0.1] = -1e4
        decay[rng.random(decay.shape) < 0.3] = 0
        expected = naive(grad_out, grad_state, given)
        found = gradients(run, grad_out, grad_state, given)
        assert_near(found, expected, 100)
        assert not found.decay[decay <= -1e4].any()


@pytest.mark.parametrize("rule", ["retnet", "gla", "gated_delta", "kimi"])
def test_strong_decays_cost_no_digits(run, rule):
    """Their gradients are as small as what they leave of a state, far below those of queries."""
    grad_out, grad_state, given = problem(rule, L=100, dtype=np.float32)
    given["decay"] -= np.float32(12)
    expected = naive(grad_out, grad_state, given)
    assert np.abs(expected["decay"]).max() < 1e-3
    assert_near(gradients(run, grad_out, grad_state, given), expected, 60)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [600, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_long_sequence(run, rule, length):
    grad_out, grad_state, given = problem(rule, (), 1, 1, length, 4, 5, np.float32, decay=0.01)
    expected = naive(grad_out, grad_state, given)
    assert_near(gradients(run, grad_out, grad_state, given), expected, 200)


@pytest.mark.parametrize("rule", RULES)
def test_tokens_past_the_length(run, rule):
    grad_out, grad_state, given = problem(rule, (3,), 2, 1, 150, 8, 8)
    lengths = np.array([0, 90, 150])
    expected = naive(grad_out, grad_state, given, lengths=lengths)
    spoiled = {name: x.copy() for name, x in given.items()}
    for name in set(spoiled) - {"query", "state"}:
        for item, n in enumerate(lengths):
            spoiled[name][item, :, n:] = np.nan
    found = gradients(run, grad_out, grad_state, spoiled, key_lengths=lengths)
    assert_near(found, expected, 60)
    for name in set(given) - {"query", "state"}:
        for item, n in enumerate(lengths):
            assert not getattr(found, name)[item, :, n:].any()


@pytest.mark.parametrize("rule", RULES)
def test_rates_of_0(run, rule):
    grad_out, grad_state, given = problem(rule, L=70)
    if "beta" in given:
        given["beta"][:, ::3] = 0
        given["beta"][1] = 0
    assert_near(gradients(run, grad_out, grad_state, given), naive(grad_out, grad_state, given), 60)


@pytest.mark.parametrize("rule", RULES)
def test_nonfinite_numbers_reach_their_head_and_item_only(run, rule):
    grad_out, grad_state, given = problem(rule, (2,), 4, 2, 70, 8, 8)
    clean = gradients(run, grad_out, grad_state, given)
    arrays = {"grad_out": grad_out, "grad_state": grad_state, **given}
    for name, x in arrays.items():
        for bad in (np.nan, np.inf):
            spoiled = x.copy()
            spoiled[1, 1, 3] = bad
            found = run(**{**arrays, name: spoiled}, wrt=tuple(given))
            for which in given:
                got, expected = getattr(found, which), getattr(clean, which)
                per_head = 2 if which == "query" else 1
                own = np.s_[:per_head] if name in ("grad_out", "query") else np.s_[per_head : 2 * per_head]
                keep = np.ones(got.shape[:2], bool)
                keep[1, own] = False
                assert_same_bits(got[keep], expected[keep])
                assert np.isfinite(got[keep]).all()


@pytest.mark.parametrize("rule", RULES)
def test_the_bits_depend_on_no_thread_and_no_other_item(rule):
    grad_out, grad_state, given = problem(rule, (3,), 4, 2, 200, 32, 40)
    options = {"grad_state": grad_state, "wrt": tuple(given)}
    found = gated_linear_attention_backward(grad_out, **given, **options, num_threads=1)
    for num_threads in (2, 3, 7):
        again = gated_linear_attention_backward(grad_out, **given, **options, num_threads=num_threads)
        for name in given:
            assert_same_bits(getattr(again, name), getattr(found, name))
    one = {name: x[1] for name, x in given.items()}
    options["grad_state"] = grad_state[1]
    alone = gated_linear_attention_backward(grad_out[1], **one, **options)
    for name in given:
        assert_same_bits(getattr(alone, name), getattr(found, name)[1])


def swapped(x):
    return np.ascontiguousarray(x.swapaxes(1, 2))


@pytest.mark.parametrize("rule", RULES)
def test_layouts_strides_and_names(run, rule):
    grad_out, grad_state, given = problem(rule, (2,), 4, 2, 60, 8, 12)
    found = gradients(run, grad_out, grad_state, given)
    laid = {name: x if name == "state" else swapped(x) for name, x in given.items()}
    again = gradients(run, swapped(grad_out), grad_state, laid, layout="bshd")
    for name in given:
        got, expected = getattr(again, name), getattr(found, name)
        assert got.shape == laid[name].shape
        assert got.flags.c_contiguous
        assert_same_bits(got if name == "state" else swapped(got), expected)
    strange = {name: np.asfortranarray(x[..., ::-1])[..., ::-1] for name, x in given.items()}
    strange["key"] = strange["key"].astype(">f4")
    assert_same_bits(gradients(run, np.asfortranarray(grad_out), grad_state, strange).key, found.key)
    for name in given:
        one = run(grad_out, **given, grad_state=grad_state, wrt=name)
        assert [n for n, x in one._asdict().items() if x is not None] == [name]
        assert_same_bits(getattr(one, name), getattr(found, name))
    flat = {name: x[0, 0] for name, x in given.items()}
    flat["query"] = given["query"][0, 1]
    alone = run(grad_out[0, 1], **flat, grad_state=grad_state[0, 0], wrt=tuple(flat))
    one_head = {name: x[None] for name, x in flat.items()}
    assert_near(alone, naive(grad_out[:1, 1], grad_state[:1, 0], one_head), 60)
    assert all(getattr(alone, name).shape == x.shape for name, x in flat.items())


def test_broadcast_arguments_have_sums(run):
    grad_out, grad_state, given = problem("gated_delta", (3,), 2, 2, 70, 8, 8, np.float64)
    given["decay"] = np.array([-0.1, -0.2])[:, None]
    given["state"] = given["state"][0]
    given["key"] = given["key"][:1]
    given["beta"] = given["beta"][0, :1]
    shapes = {"decay": (3, 2, 70), "state": (3, 2, 8, 8), "key": (3, 2, 70, 8), "beta": (3, 2, 70)}
    whole = {name: np.array(np.broadcast_to(x, shapes.get(name, x.shape))) for name, x in given.items()}
    found = gradients(run, grad_out, grad_state, given)
    each = gradients(run, grad_out, grad_state, whole)
    axes = {"decay": (0, 2), "state": 0, "key": 0, "beta": (0, 1)}
    for name, axis in axes.items():
        expected = getattr(each, name).sum(axis).reshape(given[name].shape)
        assert getattr(found, name).shape == given[name].shape
        np.testing.assert_allclose(getattr(found, name), expected, rtol=1e-12, atol=1e-12)
    given["decay"] = np.full((2, 70, 1), -0.1)  # with an axis of columns
    assert gradients(run, grad_out, None, {**given, "decay": given["decay"][None]}).decay.shape == (
        1,
        2,
        70,
        1,
    )


def test_strides_of_0_in_the_gradient_of_the_results(run):
    _, grad_state, given = problem("kimi", (2,), 4, 2, 60, 8, 12)
    ones = np.ones((2, 4, 60, 12), np.float32)
    expected = gradients(run, ones, grad_state, given)
    found = gradients(run, np.broadcast_to(np.float32(1), ones.shape), grad_state, given)
    for name in given:
        assert_same_bits(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("rule", ["gated_delta", "kimi"])
def test_16_bits_are_rounded_once(run, rule, dtype):
    grad_out, grad_state, given = problem(rule, (2,), 4, 2, 70, 16, 16)
    short = {name: x if name == "state" else x.astype(dtype) for name, x in given.items()}
    wide = {name: x.astype(np.float32) for name, x in short.items()}
    grad_out = grad_out.astype(dtype)
    found = gradients(run, grad_out, grad_state, short)
    expected = gradients(run, grad_out.astype(np.float32), grad_state, wide)
    for name, x in short.items():
        assert getattr(found, name).dtype == x.dtype
        assert_same_bits(getattr(found, name), getattr(expected, name).astype(x.dtype))


def test_dtypes_are_those_of_the_arguments(run):
    grad_out, grad_state, given = problem("gated_delta", (), 2, 2, 10, 4, 4)
    given["decay"] = np.full((2, 10), -1)
    given["state"] = given["state"].astype(np.float64)
    given["beta"] = given["beta"].astype(np.float16)
    found = gradients(run, grad_out.astype(np.float64), grad_state.tolist(), given)
    dtypes = {"query": "f4", "key": "f4", "value": "f4", "decay": "f8", "beta": "f2", "state": "f8"}
    assert {name: getattr(found, name).dtype for name in NAMES} == dtypes
    lists = {name: x.tolist() for name, x in given.items()}
    assert gradients(run, grad_out.tolist(), None, lists).decay.shape == (2, 10)


@pytest.mark.parametrize(
    "sizes", [(0, 2, 2, 5, 4, 3), (1, 0, 0, 5, 4, 3), (1, 2, 2, 0, 4, 3), (1, 2, 2, 5, 4, 0)]
)
def test_empty_sizes(sizes):
    B, H, K, L, D, E = sizes
    shapes = {"query": (B, H, L, D), "key": (B, K, L, D), "value": (B, K, L, E), "decay": (B, K, L)}
    given = {name: np.ones(s, np.float32) for name, s in {**shapes, "state": (B, K, D, E)}.items()}
    grad_state = np.full((B, K, D, E), 2, np.float32)
    found = gated_linear_attention_backward(
        np.ones((B, H, L, E), np.float32), **given, grad_state=grad_state, wrt=tuple(given)
    )
    for name, x in given.items():
        assert getattr(found, name).shape == x.shape
    if not L:
        np.testing.assert_array_equal(found.state, grad_state)


X = np.ones((2, 2, 5, 4), np.float32)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"grad_out": X},
            r"grad_out must have shape \(2, 2, 5, 3\), got \(2, 2, 5, 4\); query \(2, 2, 5, 4\)",
        ),
        ({"grad_state": X}, r"grad_state must have shape \(2, 2, 4, 3\), got \(2, 2, 5, 4\); query"),
        ({"wrt": ("query", "decay")}, "wrt names decay, which is not given; query"),
        ({"wrt": "state"}, "wrt names state, which is not given"),
        ({"wrt": "bias"}, "wrt must name some of query, key, value, decay, beta, state, got 'bias'"),
        ({"beta": X}, r"beta must broadcast to \(2, 2, 5\)"),
        ({"key_lengths": [6, 1]}, r"key_lengths must be in 0\.\.S=5"),
    ],
)
def test_what_is_refused(options, said):
    given = {"grad_out": X[..., :3], "query": X, "key": X, "value": X[..., :3]}
    with pytest.raises(ValueError, match=said):
        gated_linear_attention_backward(**given | options)


def test_other_refusals():
    with pytest.raises(TypeError, match="wrt must name some of"):
        gated_linear_attention_backward(X, X, X, X, wrt=3)
    with pytest.raises(TypeError, match="grad_out has dtype complex"):
        gated_linear_attention_backward(X.astype(complex), X, X, X)
    with pytest.raises(TypeError, match="return_state"):
        gated_linear_attention_backward(X, X, X, X, return_state=True)
    with pytest.raises(
        fastattn.BackendError, match="backend 'numba' cannot run gated_linear_attention_backward"
    ):
        gated_linear_attention_backward(X, X, X, X, backend="numba")
