"""`causal_conv1d`: against the sum of products in extended precision."""

from __future__ import annotations

import tracemalloc
from functools import partial
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

import fastattn
from fastattn import causal_conv1d
from tests.cases import FLOATS, once
from tests.tolerances import assert_same_bits

WIDE = np.longdouble
HALVES = [np.float16, ml_dtypes.bfloat16]
ACTIVATIONS = [None, "silu"]
#: Leading axes, channels, tokens and width.
SIZES = [
    ((), 1, 1, 1),
    ((2,), 5, 40, 4),
    ((3, 2), 33, 70, 3),
    ((1,), 70, 150, 7),
    ((2,), 17, 2, 5),
    ((), 300, 1, 4),
]


def inputs(lead=(), C=5, L=40, W=4, dtype=np.float32, seed=0):
    """x, weight and bias, and a state."""
    rng = np.random.default_rng(seed)
    shapes = (*lead, C, L), (C, W), (C,), (*lead, C, W - 1)
    *arrays, state = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return arrays, state


def channels_last(x):
    """The same numbers with the channels contiguous."""
    return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)


LAYOUTS = {"time": np.ascontiguousarray, "channels": channels_last}


@once
def convolution(x, weight, bias=None, activation=None, state=None):
    """The results, the last tokens, and the sum of the magnitudes that are added up."""
    W, L = weight.shape[1], x.shape[-1]
    before = np.zeros((*x.shape[:-1], W - 1)) if state is None else state
    padded = np.concatenate((before, x), axis=-1).astype(WIDE)
    y = np.zeros(x.shape, WIDE)
    size = np.zeros(x.shape, WIDE)
    if bias is not None:
        y += bias.astype(WIDE)[:, None]
        size += abs(bias.astype(WIDE))[:, None]
    for t in range(L):
        for j in range(W):
            product = weight[:, j].astype(WIDE) * padded[..., t + j]
            y[..., t] += product
            size[..., t] += abs(product)
    return y / (1 + np.exp(-y)) if activation else y, padded[..., L:], size


@pytest.fixture
def run(way):
    """The function on a backend and an instruction set."""
    return partial(causal_conv1d, backend="reference" if way == "numpy" else "cython")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_it_is_the_sum(run, dtype, layout, activation):
    for n, sizes in enumerate(SIZES):
        (x, weight, bias), state = inputs(*sizes, dtype, seed=n)
        for given, before in ((None, None), (bias, state)):
            got, after = run(
                LAYOUTS[layout](x), weight, given, activation=activation, state=before, return_state=True
            )
            expected, last, size = convolution(x, weight, given, activation, before)
            assert got.dtype == after.dtype == dtype
            # A rounding for each product and each sum, and a few of the activation, whose slope is below 1.1.
            bound = np.finfo(dtype).eps * (weight.shape[1] * size * 1.1 + 4 * abs(expected))
            assert (abs(got - expected) <= bound).all()
            assert_same_bits(after, last.astype(dtype))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [*FLOATS, *HALVES])
def test_the_bits_are_the_same_wherever_it_is_cut(run, dtype, layout, activation):
    for W in (1, 2, 3, 4, 7):
        (x, weight, bias), state = inputs((2,), 37, 150, W, dtype)
        x = LAYOUTS[layout](x)
        whole, end = run(x, weight, bias, activation=activation, state=state, return_state=True)
        for cuts in ((0, 1, 2, 3, 150), (0, 64, 64, 97, 150), (0, 147, 148, 149, 150)):
            after, parts = state, []
            for start, stop in pairwise(cuts):
                part = x[..., start:stop]
                out, after = run(part, weight, bias, activation=activation, state=after, return_state=True)
                parts.append(out)
            assert_same_bits(np.concatenate(parts, axis=-1), whole)
            assert_same_bits(after, end)


@pytest.mark.parametrize("dtype", [*FLOATS, *HALVES])
def test_the_bits_depend_on_no_layout(run, dtype):
    (x, weight, bias), state = inputs((2, 3), 37, 70, 4, dtype)
    out = run(x, weight, bias, activation="silu", state=state)
    shifted = np.empty(x.nbytes + 1, np.uint8)[1:].view(dtype).reshape(x.shape)
    shifted[...] = x
    strange = [
        channels_last(x),
        np.asfortranarray(x),
        np.repeat(x, 2, axis=-1)[..., ::2],
        np.repeat(channels_last(x), 2, axis=-2)[..., ::2, :],
        np.ascontiguousarray(x[:, ::-1, ::-1, ::-1])[:, ::-1, ::-1, ::-1],
        shifted,
        np.concatenate((x, x), axis=-2)[..., :37, :],  # channels of a larger array
        channels_last(np.concatenate((x, x), axis=-2))[..., 37:, :],
    ]
    if dtype != ml_dtypes.bfloat16:
        strange.append(x.astype(np.dtype(dtype).newbyteorder()))
    for given in strange:
        laid = channels_last(state) if given is strange[0] else state[:, ::-1][:, ::-1]
        again = run(given, np.asfortranarray(weight), bias[::-1][::-1], activation="silu", state=laid)
        assert_same_bits(again, out)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bits_depend_on_no_thread_and_no_other_item(layout):
    (x, weight, bias), state = inputs((3,), 70, 2000)
    x = LAYOUTS[layout](x)
    options = {"activation": "silu", "return_state": True}
    out, after = causal_conv1d(x, weight, bias, state=state, num_threads=1, **options)
    for num_threads in (2, 3, 7):
        again, same = causal_conv1d(x, weight, bias, state=state, num_threads=num_threads, **options)
        assert_same_bits(again, out)
        assert_same_bits(same, after)
    alone, same = causal_conv1d(x[1], weight, bias, state=state[1], **options)
    assert_same_bits(alone, out[1])
    assert_same_bits(same, after[1])
    shared = causal_conv1d(x, weight, bias, state=state[1])  # leading axes broadcast
    assert_same_bits(shared[1], causal_conv1d(x[1], weight, bias, state=state[1]))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_numbers_reach_the_tokens_that_read_them(run, bad, layout, activation):
    (x, weight, bias), state = inputs((2,), 37, 90, 4)
    weight = abs(weight)
    clean = run(LAYOUTS[layout](x), weight, bias, activation=activation, state=state)
    for token in (-3, -1, 0, 1, 40, 89):  # those below 0 are in the state
        given, before = x.copy(), state.copy()
        if token < 0:
            before[0, 5, token] = bad
        else:
            given[0, 5, token] = bad
        out = run(LAYOUTS[layout](given), weight, bias, activation=activation, state=before)
        reads = np.zeros(x.shape, bool)
        reads[0, 5, max(token, 0) : token + 4] = True
        assert not np.isfinite(out[reads]).any()
        assert_same_bits(out[~reads], clean[~reads])


@pytest.mark.parametrize("dtype", FLOATS)
def test_silu_of_any_number(run, dtype):
    largest = np.finfo(dtype).max
    special = np.array([[0.0, -0.0, np.inf, -np.inf, largest, -largest, np.nan]], dtype)
    one = np.ones((1, 1), dtype)
    expected = np.array([[0.0, -0.0, np.inf, -0.0, largest, -0.0, np.nan]], dtype)
    np.testing.assert_array_equal(run(special, one, activation="silu"), expected)
    assert (np.signbit(run(special, one, activation="swish")) == np.signbit(expected))[:, :-1].all()
    np.testing.assert_array_equal(np.signbit(run(special, one)), np.signbit(special))
    # exp(-x) is finite down to this number.
    x = np.linspace(-float(np.log(largest)) * 0.999, 120, 3001).astype(dtype)[None]
    exact = x.astype(WIDE) / (1 + np.exp(-x.astype(WIDE)))
    assert (abs(run(x, one, activation="silu") - exact) <= 4 * np.finfo(dtype).eps * abs(exact)).all()
    overflow = np.full((1, 4), largest)  # sums that leave the range go where the activation does
    for weight, limit in ((2, np.inf), (-2, 0.0)):
        assert (run(overflow, one * weight, activation="silu") == limit).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", HALVES)
def test_16_bits_are_converted_exactly_and_rounded_once(run, dtype, activation, layout):
    (x, weight, bias), state = inputs((2,), 37, 70, 4, dtype)
    x = LAYOUTS[layout](x)
    out, after = run(x, weight, bias, activation=activation, state=state, return_state=True)
    x, weight, bias, state = (array.astype(np.float32) for array in (x, weight, bias, state))
    wide, same = run(x, weight, bias, activation=activation, state=state, return_state=True)
    assert (out.dtype, after.dtype) == (dtype, dtype)
    assert_same_bits(out, wide.astype(dtype))
    assert_same_bits(after, same.astype(dtype))
    mixed = run(x.astype(dtype), weight, bias, activation=activation, state=state.astype(dtype))
    assert_same_bits(mixed, wide)


def test_dtypes():
    x, weight = np.arange(12).reshape(3, 4), np.ones((3, 2), np.float32)
    out, state = causal_conv1d(x, weight, return_state=True)
    assert out.dtype == state.dtype == np.float64
    single = causal_conv1d(x.astype(np.float32), weight, np.ones(3), state=state)  # neither widens
    assert single.dtype == np.float32
    assert causal_conv1d(x.astype(np.float32), weight.astype(np.float64)).dtype == np.float64
    with pytest.raises(TypeError, match="two 16-bit types do not promote"):
        causal_conv1d(x.astype(np.float16), weight.astype(ml_dtypes.bfloat16))


def test_the_memory_of_the_result_is_in_the_order_of_x():
    """And no copy is made of an x with contiguous channels or tokens."""
    (x, weight, bias), _ = inputs((2,), 64, 4000)
    outer = np.concatenate((x, x), axis=-2)
    for given in (x, outer[..., :64, :], channels_last(x), channels_last(outer)[..., 64:, :]):
        causal_conv1d(given, weight, bias)
        tracemalloc.start()
        out, state = causal_conv1d(given, weight, bias, return_state=True)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1.1 * out.nbytes
        by_channels = given.strides[-2] < given.strides[-1]
        assert (out.swapaxes(-1, -2) if by_channels else out).flags.c_contiguous
        assert not np.shares_memory(state, given)


def test_a_state_is_not_changed():
    (x, weight, bias), state = inputs((2,), 70)
    for given in (x, channels_last(x)):
        for L in (1, 40):
            before, copy = given[..., :L], state.copy()
            _, after = causal_conv1d(before, weight, bias, state=state, return_state=True)
            assert not np.shares_memory(after, state)
            np.testing.assert_array_equal(state, copy)


@pytest.mark.parametrize("sizes", [(0, 3, 5, 4), (2, 0, 5, 4), (2, 3, 0, 4), (2, 3, 0, 1)])
def test_empty_sizes(run, sizes):
    B, C, L, W = sizes
    (x, weight, bias), state = inputs((B,), C, L, W)
    for given in (x, channels_last(x)):
        out, after = run(given, weight, bias, state=state, return_state=True)
        assert out.shape == x.shape
        assert after.shape == state.shape
        if not L:
            np.testing.assert_array_equal(after, state)


def test_tensors():
    torch = pytest.importorskip("torch")
    (x, weight, bias), state = inputs((2,), 16, 20)
    expected = causal_conv1d(x, weight, bias, activation="silu", state=state)
    tokens = torch.from_numpy(np.ascontiguousarray(x.swapaxes(-1, -2)))
    out, after = causal_conv1d(
        tokens.transpose(1, 2), *map(torch.from_numpy, (weight, bias)), activation="silu",
        state=torch.from_numpy(state), return_state=True,
    )  # fmt: skip
    assert isinstance(after, torch.Tensor)
    assert out.transpose(1, 2).is_contiguous()
    assert_same_bits(out.numpy(), expected)
    layer = torch.nn.Conv1d(16, 16, 4, groups=16, padding=3)
    given = layer.weight.detach()[:, 0], layer.bias.detach()
    theirs = layer(torch.from_numpy(x))[..., :20].detach().numpy()
    np.testing.assert_allclose(causal_conv1d(x, *given), theirs, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": np.zeros(5)}, r"x must have shape \(\.\.\., C, L\); x \(5,\), weight \(3, 4\)"),
        (
            {"x": np.zeros((2, 5, 3))},
            r"weight must have shape \(C, W\) with C = 5 channels of x and W > 0; say x\.swapaxes\(-1, -2\)",
        ),
        (
            {"weight": np.zeros((3, 1, 4))},
            r"weight must have .*; say weight\[:, 0\]; x \(2, 3, 5\), weight \(3, 1, 4\)",
        ),
        ({"weight": np.zeros((3, 0))}, r"weight must have shape .* W > 0; x"),
        ({"bias": np.zeros((3, 1))}, r"bias must have shape \(3,\), got \(3, 1\)"),
        ({"state": np.zeros((2, 3, 4))}, r"state must have shape \(2, 3, 3\), got \(2, 3, 4\)"),
        ({"state": np.zeros((3, 3, 3))}, r"state must have shape \(2, 3, 3\), got \(3, 3, 3\)"),
        ({"activation": "relu"}, 'activation must be None, "silu" or "swish", got \'relu\''),
        ({"backend": "gpu"}, "backend must be one of"),
    ],
)
def test_what_is_refused(change, said):
    given = {"x": np.ones((2, 3, 5)), "weight": np.ones((3, 4))} | change
    with pytest.raises(ValueError, match=said):
        causal_conv1d(**given)


def test_other_refusals():
    x, weight = np.ones((2, 3, 5)), np.ones((3, 4))
    with pytest.raises(fastattn.BackendError, match="backend 'numba' cannot run causal_conv1d"):
        causal_conv1d(x, weight, backend="numba")
    with pytest.raises(TypeError, match=r"bias has dtype complex128; .*; x \(2, 3, 5\), weight \(3, 4\)"):
        causal_conv1d(x, weight, np.zeros(3, complex))
    with pytest.raises(TypeError, match="return_state must be a bool"):
        causal_conv1d(x, weight, return_state=1)
    with pytest.raises(TypeError, match="'initial_states': say state="):
        causal_conv1d(x, weight, initial_states=None)
    with pytest.raises(ValueError, match="activation must be"):
        causal_conv1d(x, weight, activation=np.tanh)
