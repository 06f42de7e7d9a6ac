"""Scores so large that their rounding, or that of an lse, is larger than 1: what holds for them nevertheless.

The oracle can't say what a weight is there, as it rounds scores otherwise. Weights lie within 0 and 1 and
add up to 1, outputs are those of the weights, and gradients are bounded by what arrives.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import fastattn
from tests.conftest import READS_STORAGE, USABLE, computes_gradients, without

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), BFLOAT16]
#: Of query and key; float16 takes what it can.
SIZES = [(1e2, 1e2), (1e4, 1e4), (1e15, 1e15), (1e30, 1.0), (1.0, 1e30)]
#: Rows, keys and head_dim: the sweep, twice, few rows over many keys, one key, and tiles of the fused sweep.
SHAPES = [(70, 130, 24), (200, 300, 64), (3, 700, 40), (2, 1, 8), (160, 520, 33)]
ALL = ("query", "key", "value", "bias", "sinks")


def draw(shape, sizes, dtype, *, heads=2, seed=0):
    """Query, key and value, the last of usual size."""
    (len_q, len_k, head_dim), rng = shape, np.random.default_rng(seed)
    lengths = (len_q, len_k, len_k)
    factors = [min(size, 1e4) if dtype == np.float16 else size for size in (*sizes, 1.0)]
    return [
        (factor * rng.standard_normal((heads, length, head_dim))).astype(dtype)
        for length, factor in zip(lengths, factors, strict=True)
    ]


def options_of(name, shape, sizes, heads=2):
    """Options that move or mask scores, of their size where it makes sense."""
    (len_q, len_k, _), rng = shape, np.random.default_rng(1)
    size = np.float32(min(sizes[0] * sizes[1], 1e30))
    return {
        "plain": {},
        "causal": {"causal": "bottom_right"},
        "mask": {"mask": rng.random((len_q, len_k)) < 0.3},
        "bias": {"bias": size * rng.standard_normal((heads, len_q, len_k)).astype(np.float32)},
        "sinks": {"sinks": size * np.array([0.3, -1.0], np.float32)},
        "softcap": {"softcap": 1e5, "window": (40, 9)},
        "scale": {"scale": -7.5, "key_lengths": np.array(max(1, len_k - 5))},
    }[name]


OPTIONS = ["plain", "causal", "mask", "bias", "sinks", "softcap", "scale"]


def compute_eps(dtype):
    return float(np.finfo(np.float64 if dtype == np.float64 else np.float32).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@without(lambda engine, dtype: engine not in READS_STORAGE and dtype.itemsize == 2)
def test_weights(engine, name, shape, sizes, dtype):
    query, key, value = draw(shape, sizes, dtype)
    options = options_of(name, shape, sizes)
    out, lse, weights = engine.everything(query, key, value, **options)
    wide = weights.astype(np.float64)
    eps, unit = compute_eps(dtype), float(ml_dtypes.finfo(dtype).eps) / 2
    assert not np.isnan(wide).any()
    assert wide.min() >= 0
    assert wide.max() <= 1 + 2 * eps
    sums = wide.sum(axis=-1)
    rounding = 8 * eps + (unit if unit > eps else 0)  # 16-bit weights were rounded once more
    seen = lse > -np.inf
    if name == "sinks":
        assert sums.max() <= 1 + rounding
    else:
        np.testing.assert_allclose(sums[seen], 1, rtol=rounding)
    assert not wide[~seen].any()
    reach = wide @ np.abs(value.astype(np.float64))
    least = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    error = np.abs(out.astype(np.float64) - wide @ value.astype(np.float64))
    assert (error <= (16 * eps + 2 * unit) * reach + 4 * least * shape[1]).all()


@computes_gradients
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("shape", [(16, 16, 8), *SHAPES], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_bounded(engine, name, shape, sizes, dtype):
    """Of the forward call of each backend: the weights of a row add up to 1 at most."""
    query, key, value = draw(shape, sizes, dtype)
    options = options_of(name, shape, sizes)
    grad_out = np.ones(query.shape, dtype)
    eps, unit = compute_eps(dtype), float(ml_dtypes.finfo(dtype).eps)
    for forward in USABLE if dtype.itemsize > 2 else ("cython", "reference"):
        out, lse = fastattn.attention(query, key, value, **options, return_lse=True, backend=forward)
        wrt = tuple(name for name in ALL[2:] if name == "value" or name in options)
        got = engine.backward(grad_out, query, key, value, out, lse, wrt=wrt, **options)
        wide = got.value.astype(np.float64)
        assert wide.min() >= 0
        # What arrives at all keys is what the rows have.
        rows = (lse > -np.inf).sum(axis=-1)
        rounding = 64 * eps + (unit if unit > eps else 0)
        total = wide.sum(axis=-2)
        if name != "sinks":
            np.testing.assert_allclose(total, np.broadcast_to(rows[:, None], total.shape), rtol=rounding)
        assert (wide <= rows[:, None, None] * (1 + rounding)).all()
        if name == "sinks":
            # -sum of (sink's weight) * delta, and delta is rowsum(out): the sink has the rest of each weight.
            shares = (shape[0] - total[:, 0]) / shape[0]
            assert (np.abs(got.sinks) <= np.abs(out.astype(np.float64)).sum(axis=(-1, -2)) * 1.01).all()
            assert (shares >= -rounding).all()


@computes_gradients
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("way", ["bias", "query", "softcap"])
def test_any_difference_of_score_and_lse(engine, way, dtype):
    """With another lse than the forward's a weight is what NumPy's exp gives, inf and 0 included."""
    powers = 10.0 ** np.arange(-3, 31)
    difference = np.concatenate([-powers[::-1], [0], powers, np.linspace(-120, 120, 97)]).astype(dtype)
    n = len(difference)
    query, key = np.zeros((n, 3), dtype), np.ones((1, 3), dtype)
    options = {"scale": 1.0}
    lse = -difference
    if way == "bias":  # the scores are large, and the lse are 0
        options["bias"] = difference[:, None]
        lse = np.zeros(n, dtype)
    elif way == "query":
        query[:, 1] = difference
        lse = np.zeros(n, dtype)
    else:
        options["softcap"] = 2.0
    grad_out, value = np.ones((n, 1), dtype), np.ones((1, 1), dtype)
    for at in range(n):
        row = slice(at, at + 1)
        here = {name: x[row] if name == "bias" else x for name, x in options.items()}
        got = engine.backward(
            grad_out[row], query[row], key, value, np.ones((1, 1), dtype), lse[row], wrt=("value",), **here
        )
        with np.errstate(all="ignore"):
            weight = np.exp(difference[at])
        if weight < np.finfo(dtype).tiny:
            assert 0 <= got.value[0, 0] <= 2 * np.finfo(dtype).tiny
        else:
            # A unit of the exponent's rounding to base 2 is as many units of the weight.
            rtol = np.finfo(dtype).eps * (4 + abs(difference[at]))
            np.testing.assert_allclose(got.value[0, 0], weight, rtol=rtol, err_msg=f"{difference[at]}")


#: Sizes of query and key, and the scale: scores are finite, though products of two of these may not be.
FACTORS = {
    "float32": [
        (1, 1, 1e7), (1, 1, 1e20), (1, 1, 1e37), (300, 300, 1e-4), (1e36, 1e-20, 300), (1e-5, 1e38, 1),
        (1e30, 1e-20, 1e10),
    ],
    "float64": [(1, 1, 1e20), (1, 1, 1e300), (1e300, 1e-200, 1e10), (1e-5, 1e306, 1), (1e100, 1e100, 1e-30)],
}  # fmt: skip


@computes_gradients
@pytest.mark.parametrize("dtype, factors", [(d, f) for d, each in FACTORS.items() for f in each], ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0, 1e5])
def test_equal_keys_share_a_weight(engine, softcap, dtype, factors):
    """However large the factors of a score are."""
    size_q, size_k, scale = factors
    rng = np.random.default_rng(4)
    query = (size_q * rng.uniform(0.5, 1, (1, 40, 16))).astype(dtype)
    key = np.broadcast_to((size_k * rng.uniform(0.2, 1, (1, 1, 16))).astype(dtype), (1, 64, 16))
    ones = np.ones((1, 64, 1), dtype)
    options = {"scale": scale, "softcap": softcap}
    out, lse = engine.attention(query, key, ones, return_lse=True, **options)
    assert np.isfinite(lse).all()
    got = engine.backward(np.ones_like(out), query, key, ones, out, lse, wrt=("value",), **options)
    rtol = 64 * compute_eps(np.dtype(dtype))
    np.testing.assert_allclose(got.value.sum(), 40, rtol=rtol)
    products = query[0] @ np.ascontiguousarray(key[0]).T
    if engine.backend == "reference" and (products != products[:, :1]).any():
        return  # BLAS sums in an order of each column's own here, and the last bit of a large score is all
    np.testing.assert_allclose(got.value, 40 / 64, rtol=rtol)


@computes_gradients
@pytest.mark.parametrize("size", [30.0, 1e3, 1e4])
def test_capped_scores_of_pieces_keep_their_shares(engine, size):
    """Scores at the soft-cap are known to its rounding, whatever they were before."""
    query, key, value = draw((40, 96, 16), (size, size), np.dtype(np.float32))
    out, lse = engine.attention(query, key, value, softcap=30.0, return_lse=True)
    grad_out = np.ones_like(out)
    whole = engine.backward(grad_out, query, key, value, out, lse, softcap=30.0)
    parts = [
        engine.backward(grad_out, query, key[:, part], value[:, part], out, lse, softcap=30.0)
        for part in (slice(0, 48), slice(48, 96))
    ]
    together = np.concatenate([part.value for part in parts], axis=-2)
    np.testing.assert_allclose(together, whole.value, rtol=1e-3, atol=1e-4)


@computes_gradients
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda dtype: dtype.__name__)
def test_an_lse_of_more_keys_keeps_its_share(engine, dtype):
    """The gradients of pieces, with the lse of all of them, add up to those of the whole."""
    shape = (40, 96, 16)
    query, key, value = draw(shape, (30.0, 30.0), dtype)
    grad_out = np.random.default_rng(2).standard_normal(query.shape).astype(dtype)
    out, lse = engine.attention(query, key, value, return_lse=True)
    whole = engine.backward(grad_out, query, key, value, out, lse)
    pieces = [slice(0, 30), slice(30, 64), slice(64, 96)]
    parts = [engine.backward(grad_out, query, key[:, p], value[:, p], out, lse) for p in pieces]
    # The lse is known to half a unit in its last place, and weights with it.
    rtol = 4 * np.finfo(dtype).eps * float(np.abs(lse).max())
    for name in ("key", "value"):
        together = np.concatenate([getattr(part, name) for part in parts], axis=-2)
        expected = getattr(whole, name)
        np.testing.assert_allclose(together, expected, rtol=rtol, atol=rtol * np.abs(expected).max())
    together = sum(part.query.astype(np.float64) for part in parts)
    np.testing.assert_allclose(together, whole.query, rtol=rtol, atol=rtol * np.abs(whole.query).max())


@computes_gradients
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda dtype: dtype.__name__)
def test_masked_keys_do_not_decide(engine, dtype):
    """Which lse a row has depends on what it may attend: huge keys that are masked change no bit."""
    query, key, value = draw((40, 70, 16), (3.0, 1.0), dtype)
    mask = np.random.default_rng(3).random((40, 70)) < 0.5
    mask[:, 20:25] = False
    options = {"mask": mask, "grad_out": np.ones(query.shape, dtype)}

    def gradients(key):
        out, lse = engine.attention(query, key, value, mask=mask, return_lse=True)
        return engine.backward(options["grad_out"], query, key, value, out, lse, mask=mask)

    other = key.copy()
    other[:, 20:25] = 1e30
    for name, got, expected in zip(ALL, gradients(other), gradients(key), strict=False):
        if got is not None:
            assert got.tobytes() == expected.tobytes(), name
