"""`gated_linear_attention`: against the recurrence, token by token in extended precision."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

import fastattn
from fastattn import gated_linear_attention
from tests.cases import FLOATS, MEMORY_LAYOUTS, once
from tests.tolerances import assert_same_bits

WIDE = np.longdouble
#: Which gates each rule has: decays of a token ("t") or of columns ("c"), and rates of the delta rule.
RULES = {"linear": "", "retnet": "t", "gla": "c", "delta": "b", "gated_delta": "tb", "kimi": "cb"}


def inputs(rule, lead=(), H=2, K=2, L=40, D=8, E=8, dtype=np.float32, seed=0, decay=0.3, rate=1.0):
    """Arrays and gates, as arguments."""
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((*lead, H, L, D)).astype(dtype)
    key, value = (rng.standard_normal((*lead, K, L, n)).astype(dtype) for n in (D, E))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    gates = {}
    if "t" in RULES[rule]:
        gates["decay"] = -rng.exponential(decay, (*lead, K, L)).astype(dtype)
    if "c" in RULES[rule]:
        gates["decay"] = -rng.exponential(decay, (*lead, K, L, D)).astype(dtype)
    if "b" in RULES[rule]:
        gates["beta"] = rng.uniform(0, rate, (*lead, K, L)).astype(dtype)
    return (query, key, value), gates


@once
def recurrence(arrays, decay=None, beta=None, scale=None, lengths=None, state=None, dtype=WIDE):
    """The results and the state after the last token."""
    q, k, v = (x.astype(dtype) for x in arrays)
    *lead, K, L, D = k.shape
    q = q.reshape(*lead, K, q.shape[-3] // K, L, D)
    S = np.zeros((*lead, K, D, v.shape[-1]), dtype) if state is None else state.astype(dtype)
    out = np.empty((*q.shape[:-1], v.shape[-1]), dtype)
    scale = 1 / np.sqrt(dtype(D)) if scale is None else scale
    for t in range(L):
        new = S
        if decay is not None:
            g = decay.astype(dtype)[..., t] if decay.ndim < k.ndim else decay.astype(dtype)[..., t, :]
            kept = np.exp(g[..., None, None] if decay.ndim < k.ndim else g[..., None])
            new = np.where(kept == 0, 0, kept * new)
        u = v[..., t, :]
        if beta is not None:
            u = beta.astype(dtype)[..., t, None] * (u - (k[..., t, None, :] @ new)[..., 0, :])
        new = new + k[..., t, :, None] * u[..., None, :]
        is_read = True if lengths is None else (t < np.asarray(lengths))[..., None, None, None]
        S = np.where(is_read, new, S)
        out[..., t, :] = scale * (q[..., t, None, :] @ S[..., None, :, :])[..., 0, :]
    return out.reshape(*lead, -1, L, v.shape[-1]), S


def assert_near(got, expected, ulps):
    error = np.abs(got.astype(WIDE) - expected).max(initial=0)
    assert error <= ulps * np.finfo(got.dtype).eps * np.abs(expected).max(initial=1), error


@pytest.fixture
def run(way):
    """The function on a backend and an instruction set."""
    return partial(gated_linear_attention, backend="reference" if way == "numpy" else "cython")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_it_is_the_recurrence(run, rule, dtype):
    sizes = [((), 1, 1, 1, 5, 7), ((2,), 4, 2, 3, 16, 24), ((1,), 6, 2, 49, 8, 8), ((), 2, 2, 150, 40, 70)]
    for n, (lead, H, K, L, D, E) in enumerate(sizes):
        arrays, gates = inputs(rule, lead, H, K, L, D, E, dtype, seed=n)
        state = np.random.default_rng(n).standard_normal((*lead, K, D, E)).astype(dtype)
        for before in (None, state):
            got, after = run(*arrays, **gates, state=before, return_state=True)
            expected, wanted = recurrence(arrays, **gates, state=before)
            assert got.dtype == after.dtype == dtype
            assert_near(got, expected, 30)
            assert_near(after, wanted, 30)
            assert_same_bits(run(*arrays, **gates, state=before), got)


@pytest.mark.parametrize("rule", ["retnet", "gla", "gated_delta", "kimi"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_decays_of_any_size(run, rule, dtype):
    """From none at all to -1e4, in one sequence; sums of them cancel in differences only."""
    for seed, reach in enumerate((1e-3, 1.0, 30.0, 1e4)):
        arrays, gates = inputs(rule, L=130, dtype=dtype, seed=seed)
        gates["decay"] *= dtype_of(dtype)(reach)
        rng = np.random.default_rng(seed)
        gates["decay"][rng.random(gates["decay"].shape) < 0.05] = -np.inf
        gates["decay"][rng.random(gates["decay"].shape) < 0.05] = -1e30
        gates["decay"][rng.random(gates["decay"].shape) < 0.3] = 0
        got, after = run(*arrays, **gates, return_state=True)
        expected, wanted = recurrence(arrays, **gates)
        assert_near(got, expected, 60)
        assert_near(after, wanted, 60)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("reach", [0.3, *(pytest.param(x, marks=pytest.mark.slow) for x in (0.01, 1, 3, 10))])
def test_no_less_exact_than_token_by_token(rule, reach):
    """A chunk rounds a state less than the recurrence in the same type does, whatever the decays;
    and a result at most a quarter more, whose scores are products with decays of columns."""
    arrays, gates = inputs(rule, H=4, K=4, L=200, D=64, E=64, decay=reach)
    got = gated_linear_attention(*arrays, **gates, scale=1.0, return_state=True, backend="cython")
    by_token = recurrence(arrays, **gates, scale=1.0, dtype=np.float32)
    exact = recurrence(arrays, **gates, scale=1.0)
    for ours, theirs, wanted, most in zip(got, by_token, exact, (1.25, 1), strict=True):
        errors = [np.sqrt(np.mean((x - wanted) ** 2)) for x in (ours, theirs)]
        assert errors[0] <= most * errors[1]


@pytest.mark.parametrize("rule", ["delta", "gated_delta", "kimi"])
@pytest.mark.parametrize("backend", ["cython", "reference"])
def test_a_state_that_grows(rule, backend):
    """By long keys, or negative rates, it grows from token to token. Chunks then err as token by token."""
    for rate, norm in ((1, 2.5), (-1, 1)):
        ours, theirs = [], []
        for seed in range(12):
            arrays, gates = inputs(rule, L=24, D=2, E=2, seed=seed, decay=0.05)
            arrays, gates["beta"] = (arrays[0], arrays[1] * norm, arrays[2]), gates["beta"] * rate
            exact = recurrence(arrays, **gates)[0]
            size = np.abs(exact).max(axis=(-2, -1), keepdims=True)
            got = gated_linear_attention(*map(np.float32, arrays), **gates, backend=backend)
            by_token = recurrence(arrays, **gates, dtype=np.float32)[0]
            ours.append((got - exact) / size)
            theirs.append((by_token - exact) / size)
        assert np.sqrt(np.mean(np.square(ours))) <= 2 * np.sqrt(np.mean(np.square(theirs)))


def dtype_of(name):
    return np.dtype(name).type


@pytest.mark.parametrize("rule", RULES)
def test_cut_anywhere(run, rule):
    arrays, gates = inputs(rule, (2,), 4, 2, 120, 16, 20, np.float64, rate=2)
    whole, end = run(*arrays, **gates, return_state=True)
    for cuts in ((0, 1, 120), (0, 31, 32, 33, 120), (0, 60, 61, 62, 63, 120)):
        state, parts = None, []
        for start, stop in pairwise(cuts):
            part = {name: x[:, :, start:stop] for name, x in gates.items()}
            out, state = run(*(x[:, :, start:stop] for x in arrays), **part, state=state, return_state=True)
            parts.append(out)
        assert_near(np.concatenate(parts, axis=-2), whole, 100)
        assert_near(state, end, 100)


@pytest.mark.parametrize("rule", RULES)
def test_the_bits_depend_on_no_thread_and_no_other_item(rule):
    arrays, gates = inputs(rule, (3,), 4, 2, 200, 64, 100)
    out, state = gated_linear_attention(*arrays, **gates, return_state=True, num_threads=1)
    for num_threads in (2, 3, 7):
        again, same = gated_linear_attention(*arrays, **gates, return_state=True, num_threads=num_threads)
        assert_same_bits(again, out)
        assert_same_bits(same, state)
    alone = gated_linear_attention(*(x[1] for x in arrays), **{name: x[1] for name, x in gates.items()})
    assert_same_bits(alone, out[1])
    swapped = [np.ascontiguousarray(x.swapaxes(-3, -2)) for x in arrays]
    laid = {name: np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in gates.items()}
    again = gated_linear_attention(*swapped, **laid, layout="bshd")
    assert_same_bits(again.swapaxes(-3, -2), out)


@pytest.mark.parametrize("rule", RULES)
def test_tokens_past_the_length_are_never_read(run, rule):
    arrays, gates = inputs(rule, (3,), 2, 1, 60, 8, 8)
    lengths = np.array([0, 33, 60])
    expected, wanted = recurrence(arrays, **gates, lengths=lengths)
    spoiled = [x.copy() for x in arrays]
    gates = {name: x.copy() for name, x in gates.items()}
    for item, n in enumerate(lengths):
        for x in (*spoiled[1:], *gates.values()):
            x[item, :, n:] = np.nan
    got, after = run(*spoiled, **gates, key_lengths=lengths, return_state=True)
    assert_near(got, expected, 60)
    assert_near(after, wanted, 60)


@pytest.mark.parametrize("rule", RULES)
def test_nonfinite_numbers_reach_later_tokens_of_their_head_only(run, rule):
    (query, key, value), gates = inputs(rule, (2,), 2, 2, 100, 8, 8)
    clean = run(query, key, value, **gates)
    for bad in (np.nan, np.inf):
        for which in ("key", "value", *gates):
            given = {"key": key.copy(), "value": value.copy(), **{n: x.copy() for n, x in gates.items()}}
            given[which][0, 1, 70] = bad
            out = run(query, given.pop("key"), given.pop("value"), **given)
            np.testing.assert_allclose(out[1], clean[1], atol=1e-5)
            np.testing.assert_allclose(out[0, 0], clean[0, 0], atol=1e-5)
            np.testing.assert_allclose(out[0, 1, :70], clean[0, 1, :70], atol=1e-5)
            assert not np.isfinite(out[0, 1, 70:]).any() or which == "decay"
        one = value.copy()
        one[0, 0, 10, 3] = bad
        out = run(query, key, one, **gates)
        assert np.isfinite(np.delete(out[0, 0], 3, axis=-1)).all()
        assert not np.isfinite(out[0, 0, 10:, 3]).any()
    query[0, 0, 5] = np.nan
    out = run(query, key, value, **gates)
    assert np.isnan(out[0, 0, 5]).all()
    assert np.isfinite(np.delete(out[0, 0], 5, axis=0)).all()


def test_a_system_with_an_infinity_has_a_result(run):
    """LAPACK calls it singular."""
    query = value = np.ones((1, 3, 1), np.float32)
    key = np.array([[[1], [np.inf], [1]]], np.float32)
    out = run(query, key, value, beta=np.full((1, 3), 0.5))
    np.testing.assert_array_equal(out[0, :1], [[0.5]])
    assert not np.isfinite(out[0, 1:]).any()


def test_an_overflow_reaches_no_earlier_token(run):
    """Keys that are not normalised and a rate of 2: the state grows until it is inf."""
    arrays, gates = inputs("delta", L=200)
    arrays[1][:] *= 3
    gates["beta"][:] = 2
    with np.errstate(all="ignore"):
        expected, _ = recurrence([x.astype(np.float64) for x in arrays], beta=gates["beta"])
    out = run(*arrays, **gates)
    fine = (np.abs(expected) < 1e30).all(axis=-1)
    assert not fine.all()
    size = np.abs(expected).max(axis=-1)
    assert (np.abs(out - expected).max(axis=-1)[fine] <= 1e-2 * size[fine]).all()


@pytest.mark.parametrize("backend", ["cython", "reference"])
@pytest.mark.parametrize("rule", ["delta", "gated_delta", "kimi"])
@pytest.mark.parametrize("E", [4, 20])
def test_an_overflow_amid_a_chunk_reaches_no_earlier_token(backend, rule, E):
    """Of finite numbers: the second of two large values, of the same key, adds -6e38."""
    arrays, gates = inputs(rule, H=1, K=1, E=E)
    arrays[1][:] = np.float32(8**-0.5)
    arrays[2][:, 25], arrays[2][:, 26] = 3e38, -3e38
    gates["beta"][:, 25:27] = 1
    if "decay" in gates:
        gates["decay"][:] = 0
    with np.errstate(all="ignore"):
        out = gated_linear_attention(*arrays, **gates, backend=backend)
    before = {name: x[:, :26] for name, x in gates.items()}
    expected = gated_linear_attention(*(x[:, :26] for x in arrays), **before, backend=backend)
    assert np.isfinite(expected).all() and not np.isfinite(out[:, 26]).any()
    assert_near(out[:, :25], expected[:, :25].astype(WIDE), 100)
    assert_near(out[:, :26], expected.astype(WIDE), 100)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bits_are_converted_exactly_and_rounded_once(dtype):
    arrays, gates = inputs("gated_delta", (2,), 4, 2, 70, 16, 16)
    short = [x.astype(dtype) for x in arrays]
    gates = {name: x.astype(dtype) for name, x in gates.items()}
    out, state = gated_linear_attention(*short, **gates, return_state=True)
    wide, same = gated_linear_attention(
        *(x.astype(np.float32) for x in short),
        **{name: x.astype(np.float32) for name, x in gates.items()},
        return_state=True,
    )
    assert (out.dtype, state.dtype) == (dtype, np.float32)
    assert_same_bits(out, wide.astype(dtype))
    assert_same_bits(state, same)


@pytest.mark.parametrize("backend", ["cython", "reference"])
def test_strides_and_broadcasting(backend):
    (query, key, value), gates = inputs("gated_delta", (2,), 2, 2, 50, 8, 12)
    out = gated_linear_attention(query, key, value, **gates, backend=backend)
    strange = [np.asfortranarray(x[..., ::-1])[..., ::-1] for x in (query, key, value)]
    strange[1] = strange[1].astype(">f4")
    assert_same_bits(gated_linear_attention(*strange, **gates, backend=backend), out)
    head = np.array([-0.1, -0.2], np.float32)[:, None]  # one decay a head, as RetNet's
    whole = np.broadcast_to(head, (2, 2, 50))
    assert_same_bits(
        gated_linear_attention(query, key, value, decay=head, backend=backend),
        gated_linear_attention(query, key, value, decay=np.ascontiguousarray(whole), backend=backend),
    )
    flat = [x[0, 0] for x in (query, key, value)]
    one, state = gated_linear_attention(
        *flat, **{name: x[0, 0] for name, x in gates.items()}, return_state=True, backend=backend
    )
    assert_same_bits(one, out[0, 0])
    assert state.shape == (8, 12)


@pytest.mark.parametrize("backend", ["cython", "reference"])
def test_the_bits_do_not_depend_on_the_layout(backend):
    arrays, gates = inputs("gated_delta", (), 4, 1, 50, 8, 1)
    state = np.random.default_rng(0).standard_normal((1, 8, 1), dtype=np.float32)
    out = gated_linear_attention(*arrays, **gates, state=state, backend=backend)
    swapped = [np.ascontiguousarray(x.swapaxes(0, 1)) for x in arrays]
    gates = {name: np.ascontiguousarray(x.swapaxes(0, 1)) for name, x in gates.items()}
    again = gated_linear_attention(*swapped, **gates, state=state, layout="bshd", backend=backend)
    assert_same_bits(again.swapaxes(0, 1), out)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("K, D, E", [(11, 16, 20), (12, 64, 64)])
def test_heads_that_take_turns(rule, K, D, E):
    """Chunks of heads that are beside each other in memory take turns, and may end anywhere."""
    arrays, gates = inputs(rule, (2,), 2 * K, K, 150, D, E)
    _, key, value = arrays
    key[0, 3, 40, 2] = np.inf
    value[0, 4, 70, 1] = np.nan
    key[1, 7, :40] = np.float32(D**-0.5)
    value[1, 7, 25], value[1, 7, 26] = 3e38, -3e38  # with rates of 1 the second adds -6e38
    if "decay" in gates:
        gates["decay"][0, 5, 33] = gates["decay"][0, 9, 90] = -2000
        gates["decay"][1, 2:6] *= 40
        gates["decay"][1, 7, :40] = 0
    if "beta" in gates:
        gates["beta"][0, 1, 17:19] = 5
        gates["beta"][1, 7, 25:27] = 1
    options = {
        "state": np.ones((2, K, D, E), np.float32), "key_lengths": np.array([150, 101]), "return_state": True
    }  # fmt: skip
    expected, state = gated_linear_attention(*arrays, **gates, **options)
    swapped = [np.ascontiguousarray(x.swapaxes(-3, -2)) for x in arrays]
    turned = {name: np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in gates.items()}
    for num_threads in (1, 2):
        out, after = gated_linear_attention(
            *swapped, **turned, **options, layout="bshd", num_threads=num_threads
        )
        assert_same_bits(out.swapaxes(-3, -2), expected)
        assert_same_bits(after, state)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("L", [1, 4, 5, 70])
def test_a_layout_changes_no_bit(rule, dtype, L):
    """Contiguous arrays of either layout, without a state to begin with."""
    arrays, gates = inputs(rule, (3,), 8, 8, L, 16, 16, dtype)
    swapped = [np.ascontiguousarray(x.swapaxes(-3, -2)) for x in arrays]
    turned = {name: np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in gates.items()}
    expected, state = gated_linear_attention(*arrays, **gates, return_state=True)
    out, after = gated_linear_attention(*swapped, **turned, layout="bshd", return_state=True)
    assert_same_bits(out.swapaxes(-3, -2), expected)
    assert_same_bits(after, state)
    assert_same_bits(gated_linear_attention(*swapped, **turned, layout="bshd"), out)


@pytest.mark.parametrize("backend", ["cython", "reference"])
@pytest.mark.parametrize("L", [1, 100])
@pytest.mark.parametrize("memory", MEMORY_LAYOUTS)
def test_out_changes_no_bit(backend, memory, L):
    run = partial(gated_linear_attention, backend=backend)
    arrays, gates = inputs("gated_delta", (2,), 4, 2, L, 8, 20)
    swapped = [x.swapaxes(-3, -2) for x in arrays]
    turned = {name: x.swapaxes(1, 2) for name, x in gates.items()}
    expected, state = run(*arrays, **gates, return_state=True)
    for layout, given, options in (("bhsd", arrays, gates), ("bshd", swapped, turned)):
        wanted = expected if layout == "bhsd" else expected.swapaxes(-3, -2)
        out = MEMORY_LAYOUTS[memory](np.full(wanted.shape, 7, np.float32))
        if out.flags.writeable and out.dtype == np.float32:
            got, after = run(*given, **options, layout=layout, out=out, return_state=True)
            assert got is out
            assert_same_bits(out, wanted)
            assert_same_bits(after, state)
    out = np.empty((L, 20), np.float32)
    alone = [x[0, 0] for x in arrays], {name: x[0, 0] for name, x in gates.items()}
    assert run(*alone[0], **alone[1], out=out) is out
    assert_same_bits(out, run(*alone[0], **alone[1]))


@pytest.mark.parametrize("backend", ["cython", "reference"])
@pytest.mark.parametrize("name", ["query", "value", "decay", "state"])
def test_out_may_overlap_what_is_read(backend, name):
    run = partial(gated_linear_attention, backend=backend)
    arrays, gates = inputs("kimi", (), 2, 2, 64, 64, 64)
    given = dict(zip(("query", "key", "value"), arrays, strict=True)) | gates
    given["state"] = np.ones((2, 64, 64), np.float32)
    expected, state = run(**given, return_state=True)
    out = given[name][::-1]  # so that what a head is given is where another's result goes
    _, after = run(**given, out=out, return_state=True, num_threads=1)
    assert_same_bits(out, expected)
    assert_same_bits(after, state)


@pytest.mark.parametrize(
    "sizes", [(0, 2, 2, 5, 4, 3), (1, 0, 0, 5, 4, 3), (1, 2, 2, 0, 4, 3), (1, 2, 2, 5, 4, 0)]
)
def test_empty_sizes(sizes):
    B, H, K, L, D, E = sizes
    state = np.ones((B, K, D, E), np.float32)
    out, after = gated_linear_attention(
        *(np.ones((B, n, L, d), np.float32) for n, d in ((H, D), (K, D), (K, E))),
        state=state,
        return_state=True,
    )
    assert (out.shape, after.shape) == ((B, H, L, E), state.shape)
    if not L:
        np.testing.assert_array_equal(after, state)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"decay": np.zeros((2, 2, 7))},
            r"decay must broadcast to \(2, 2, 5\) or \(2, 2, 5, 4\), got \(2, 2, 7\)",
        ),
        ({"beta": np.zeros((2, 2, 5, 4))}, r"beta must broadcast to \(2, 2, 5\), got \(2, 2, 5, 4\)"),
        ({"state": np.zeros((2, 2, 3, 4))}, r"state must have shape \(2, 2, 4, 3\), got \(2, 2, 3, 4\)"),
        ({"scale": np.nan}, "scale must be a finite number"),
        ({"key_lengths": [6, 1]}, r"key_lengths must be in 0\.\.S=5"),
        ({"layout": "sbhd"}, "layout must be"),
        ({"backend": "gpu"}, "backend must be one of"),
    ],
)
def test_what_is_refused(options, said):
    x = np.ones((2, 2, 5, 4), np.float32)
    with pytest.raises(ValueError, match=said):
        gated_linear_attention(x, x, x[..., :3], **options)


def test_other_refusals():
    x = np.ones((2, 2, 5, 4), np.float32)
    with pytest.raises(ValueError, match="query, key and value must have the same length, got 4 and 5"):
        gated_linear_attention(x[:, :, :4], x, x)
    with pytest.raises(fastattn.BackendError, match="backend 'numba' cannot run gated_linear_attention"):
        gated_linear_attention(x, x, x, backend="numba")
    with pytest.raises(TypeError, match="decay has dtype complex128"):
        gated_linear_attention(x, x, x, decay=np.zeros((2, 2, 5), complex))
    with pytest.raises(TypeError, match="return_state must be a bool"):
        gated_linear_attention(x, x, x, return_state=1)
    with pytest.raises(ValueError, match=r"out must have shape \(2, 2, 5, 4\), got \(2, 2, 5, 3\)"):
        gated_linear_attention(x, x, x, out=x[..., :3].copy())


def test_a_state_is_not_changed():
    arrays, gates = inputs("gated_delta", (2,))
    state = np.ones((2, 2, 8, 8), np.float32)
    before = state.copy()
    for L in (1, 40):
        gated_linear_attention(
            *(x[:, :, :L] for x in arrays),
            **{n: x[:, :, :L] for n, x in gates.items()},
            state=state,
            return_state=True,
        )
        np.testing.assert_array_equal(state, before)


def test_a_long_sequence():
    """100,000 tokens of one head without decay: errors of the state do not add up."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 100_000, 4), dtype=np.float32)
    out = gated_linear_attention(q, k, v, scale=1.0)
    last = q[-1].astype(WIDE) @ (k.astype(WIDE).T @ v.astype(WIDE))
    np.testing.assert_allclose(out[-1], last.astype(np.float64), rtol=2e-6)


@pytest.mark.parametrize("rule", RULES)
def test_long_sequences_of_few_heads(run, rule):
    """Where each head is divided into segments, but by the delta rule."""
    arrays, gates = inputs(rule, H=4, K=2, L=2500, D=8, E=12)
    if "decay" in gates:
        gates["decay"][:, 700] = -np.inf
        gates["decay"][:, 1030:] *= np.float32(1e-3)
    state = np.random.default_rng(1).standard_normal((2, 8, 12)).astype(np.float32)
    options = {"state": state, "return_state": True, "key_lengths": 2400}
    got, after = run(*arrays, **gates, **options, num_threads=1)
    expected, wanted = recurrence(arrays, **gates, state=state, lengths=2400)
    assert_near(got, expected, 60)
    assert_near(after, wanted, 60)
    for n in (2, 3):
        again = run(*arrays, **gates, **options, num_threads=n)
        assert_same_bits(again[0], got)
        assert_same_bits(again[1], after)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("rule", RULES)
def test_calls_of_one_signature(rule, layout):
    """What is kept of a call is right for another one with other numbers."""
    for seed in range(3):
        arrays, gates = inputs(rule, (2,), L=5, seed=seed)
        state = np.random.default_rng(seed).standard_normal((2, 2, 8, 8)).astype(np.float32)
        if layout == "bshd":
            arrays = [x.swapaxes(1, 2) for x in arrays]
            gates = {name: x.swapaxes(1, 2) for name, x in gates.items()}
        options = {"state": state, "return_state": True, "layout": layout}
        got, after = gated_linear_attention(*arrays, **gates, **options)
        # A call with lengths is not kept.
        checked = gated_linear_attention(*arrays, **gates, **options, key_lengths=5)
        assert_same_bits(got, checked[0])
        assert_same_bits(after, checked[1])


@pytest.mark.parametrize("rule", RULES)
def test_nan_in_a_column_of_values_on_several_threads(run, rule):
    """Which columns stand beside it in a task moves no bit of theirs."""
    arrays, gates = inputs(rule, L=150, D=16, E=64)
    arrays[2][0, 20, 3] = np.nan
    one, two = (run(*arrays, **gates, return_state=True, num_threads=n) for n in (1, 2))
    assert np.isfinite(one[0][..., 40:]).any()
    for x, y in zip(one, two, strict=True):
        assert_same_bits(x, y)
