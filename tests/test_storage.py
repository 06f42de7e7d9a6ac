"""16-bit storage: float16 and bfloat16 are read and written, and nothing is computed in them.

Every result is that of the same call on upcast arrays, rounded once: where the result is not in 16 bits, its
bits are the same. Where there are products of bfloat16, calls that have nothing else add them up in another
order, and the accuracy is that of float32.
"""

from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np
import pytest

import fastattn
from fastattn import masks
from tests import naive
from tests.cases import MEMORY_LAYOUTS, random_arrays, stored, upcast
from tests.conftest import READS_STORAGE, without
from tests.tolerances import assert_attention, assert_same_bits, computes_as_upcast

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
STORAGES = [np.dtype(np.float16), BFLOAT16]
SHAPES = {
    "sweep": {"lead": (2,), "heads": 2, "len_q": 40, "len_k": 300, "head_dim": 24, "value_dim": 40},
    "several_blocks": {"heads": 4, "kv_heads": 2, "len_q": 200, "len_k": 70, "head_dim": 33},
    "split_kv": {
        "lead": (2,),
        "heads": 4,
        "kv_heads": 2,
        "len_q": 2,
        "len_k": 700,
        "head_dim": 72,
        "value_dim": 40,
    },
    "one_row": {"heads": 3, "len_q": 1, "len_k": 129, "head_dim": 5, "value_dim": 3},
    "tiny": {"heads": 1, "len_q": 1, "len_k": 1, "head_dim": 1},
}
OPTIONS = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (5, 60), "softcap": 4.0},
    "mask": {"mask": masks.Window(7, 3) | masks.GlobalTokens([0])},
    "bias": {"bias": "bias"},
    "sinks": {"sinks": "sinks"},
}


engines = READS_STORAGE


def options_of(name, arrays, dtype):
    """The options of a name, with operands in this dtype."""
    options = dict(OPTIONS[name])
    rng = np.random.default_rng(9)
    shape = (arrays[0].shape[-3], arrays[0].shape[-2], arrays[1].shape[-2])
    if "bias" in options:
        options["bias"] = rng.standard_normal(shape).astype(dtype)
    if "sinks" in options:
        options["sinks"] = rng.standard_normal(shape[0]).astype(dtype)
    return options


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_result_is_that_of_upcast_arrays_rounded_once(engine, shape, storage, name):
    arrays = stored(random_arrays(**SHAPES[shape]), [storage] * 3)
    options = options_of(name, arrays, storage)
    wide = {
        key: value.astype(np.float32) if key in ("bias", "sinks") else value for key, value in options.items()
    }
    out, lse, weights = engine.everything(*arrays, **options)
    assert out.dtype == weights.dtype == storage and lse.dtype == np.float32
    # Not rounded, for partial results that are to be merged.
    unrounded = np.empty(out.shape, np.float32)
    engine.attention(*arrays, **options, out=unrounded)
    assert_same_bits(out.view(np.uint16), unrounded.astype(storage).view(np.uint16))
    expected = engine.everything(*upcast(arrays), **wide)
    if not computes_as_upcast(engine.isa, storage):
        if isinstance(mask := wide.get("mask"), masks.Mask):
            wide["mask"] = mask.materialize(weights.shape[-3], *weights.shape[-2:])
        assert_attention((unrounded, lse), *upcast(arrays), **wide)
        np.testing.assert_allclose(weights.astype(np.float32), expected[2], rtol=2.0**-8)
    else:
        for got, wanted in zip((unrounded, lse), expected, strict=False):
            assert_same_bits(got, wanted)
        assert_same_bits(weights.view(np.uint16), expected[2].astype(storage).view(np.uint16))


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_mean_of_weights_is_rounded_once(engine, shape, storage):
    arrays = stored(random_arrays(**SHAPES[shape] | {"heads": 6, "kv_heads": 2}), [storage] * 3)
    expected = engine.attention(*upcast(arrays), return_weights="mean")[1]
    for _ in range(2):  # and by a prepared call
        mean = engine.attention(*arrays, return_weights="mean")[1]
        assert mean.dtype == storage and mean.shape == expected.shape
        if computes_as_upcast(engine.isa, storage):
            assert_same_bits(mean.view(np.uint16), expected.astype(storage).view(np.uint16))
        else:
            np.testing.assert_allclose(mean.astype(np.float32), expected, rtol=2.0**-8)
    flat = [array[..., 0, :, :].reshape(-1, array.shape[-2], array.shape[-1])[0] for array in arrays]
    assert_same_bits(
        *(engine.attention(*flat, return_weights=wanted)[1].view(np.uint16) for wanted in ("mean", True))
    )


@pytest.mark.parametrize(
    "storages", [(2, 0, 0), (2, 1, 1), (0, 2, 0), (1, 1, 2), (3, 0, 0), (1, 3, 3)], ids=str
)
@pytest.mark.parametrize("shape", ["sweep", "several_blocks", "split_kv"])
def test_beside_wider_arrays(engine, shape, storages):
    """The decoder's case: keys and values in 16 bits, the query in 32."""
    dtypes = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]
    arrays = stored(random_arrays(**SHAPES[shape]), [dtypes[n] for n in storages])
    wide = dtypes[max(storages)]
    expected = engine.everything(*upcast(arrays, wide), causal="bottom_right")
    for got, wanted in zip(engine.everything(*arrays, causal="bottom_right"), expected, strict=True):
        assert got.dtype == wide
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("shape", ["sweep", "several_blocks", "split_kv"])
@pytest.mark.parametrize("layout", MEMORY_LAYOUTS)
@without(lambda layout, storage: layout == "byte_swapped" and storage == BFLOAT16)  # it has one byte order
def test_any_memory_layout(engine, shape, storage, layout):
    arrays = stored(random_arrays(**SHAPES[shape]), [storage] * 3)
    moved = [MEMORY_LAYOUTS[layout](array) for array in arrays]
    assert_same_bits(engine.attention(*moved).view(np.uint16), engine.attention(*arrays).view(np.uint16))
    room = np.zeros((*arrays[0].shape[:-1], 2 * arrays[2].shape[-1]), storage)[..., ::-2]
    engine.attention(*arrays, out=room)
    assert_same_bits(np.ascontiguousarray(room).view(np.uint16), engine.attention(*arrays).view(np.uint16))


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("len_q", [1, 40])
def test_every_pattern_as_a_value(engine, storage, len_q):
    """One key: the output is its value, subnormals and infinities included."""
    value = np.arange(2**16, dtype=np.uint16).view(storage).reshape(256, 1, 256)
    query, key = np.zeros((256, len_q, 4), storage), np.zeros((256, 1, 4), storage)
    out = engine.attention(query, key, value)
    with np.errstate(invalid="ignore"):  # of signalling NaN
        is_nan = np.isnan(value)
    for row in range(len_q):
        got = out[:, row : row + 1]
        np.testing.assert_array_equal(np.isnan(got), is_nan)
        # A zero is +0, whatever its sign was.
        np.testing.assert_array_equal(got[~is_nan], value[~is_nan])


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("len_q", [1, 64])
def test_outputs_are_correctly_rounded(engine, storage, len_q):
    """99.9 % of them: the error is half an ULP and that of float32. Positive values: no sum cancels."""
    query, key, value = random_arrays(heads=4, len_q=len_q, len_k=400, head_dim=64, value_dim=128)
    arrays = stored((query, key, np.abs(value) + 0.25), [storage] * 3)
    exact = naive.attention(*upcast(arrays, np.float64)).out
    got = engine.attention(*arrays)
    assert np.mean(got == exact.astype(np.float64).astype(storage)) >= 0.999


def test_the_values_of_a_result(engine):
    """Subnormal float16 outputs, and those that float16 cannot hold."""
    value = np.full((1, 2, 3), 6e-8, np.float16)
    assert engine.attention(np.zeros((1, 1, 4), np.float16), np.zeros((1, 2, 4), np.float16), value).max() > 0
    value = np.full((1, 2, 3), 65504, np.float16)
    out = engine.attention(np.zeros((1, 1, 4), np.float16), np.zeros((1, 2, 4), np.float16), value)
    np.testing.assert_array_equal(out, 65504)


@pytest.mark.parametrize("len_q", [1, 40])
@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_masked_keys_are_never_seen(engine, len_q, storage, bad):
    arrays = stored(random_arrays(heads=2, len_q=len_q, len_k=90, head_dim=20), [storage] * 3)
    mask = np.arange(90) % 3 > 0
    clean = engine.everything(*arrays, mask=mask)
    arrays[1][:, ~mask], arrays[2][:, ~mask] = bad, bad
    for got, wanted in zip(engine.everything(*arrays, mask=mask), clean, strict=True):
        assert_same_bits(got.astype(np.float32), wanted.astype(np.float32))
    arrays[2][:, 7, 3] = bad  # read by some rows, not by all
    rows = np.arange(len_q) % 2 == 0
    some = mask & ~((np.arange(90) == 7) & ~rows[:, None])
    out = engine.attention(*arrays, mask=some).astype(np.float32)
    assert not np.isfinite(out[:, rows, 3]).any() and np.isfinite(out[:, ~rows]).all()


def test_types_that_do_not_mix(engine):
    half, brain = np.ones((2, 3, 4), np.float16), np.ones((2, 3, 4), BFLOAT16)
    single = half.astype(np.float32)
    for arrays in ((half, brain, brain), (half, half, brain), (single, half, brain), (single, brain, half)):
        with pytest.raises(
            TypeError, match=r"two 16-bit types do not promote: .*float16.*; cast one, .*astype\("
        ):
            engine.attention(*arrays)
    with pytest.raises(TypeError, match="out must have the result's dtype float16, or float32, got float64"):
        engine.attention(half, half, half, out=np.empty((2, 3, 4)))
    with pytest.raises(TypeError, match="out must have the result's dtype float32, got float16"):
        engine.attention(single, half, half, out=np.empty((2, 3, 4), np.float16))
    with pytest.raises(TypeError, match="dtype float8_e5m2"):
        engine.attention(*[single.astype(ml_dtypes.float8_e5m2)] * 3)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_beside_integers(engine, storage):
    """They count as float64 here too."""
    query, key, value = stored(random_arrays(), [storage] * 3)
    out = engine.attention(query, np.ones(key.shape, np.int8), value)
    assert out.dtype == np.float64


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_every_function_takes_them(storage):
    rows = random_arrays(heads=3, len_q=20, len_k=20)
    arrays = stored(rows, [storage] * 3)
    wide = upcast(arrays)

    def check(got, wanted):
        assert got.dtype == storage
        assert_same_bits(got.view(np.uint16), wanted.astype(storage).view(np.uint16))

    sdpa = fastattn.scaled_dot_product_attention
    bias = np.random.default_rng(1).standard_normal((20, 20)).astype(storage)
    for given in (None, bias):
        check(sdpa(*arrays, given), sdpa(*wide, None if given is None else given.astype(np.float32)))
    packed, wide_packed = ([array.swapaxes(0, 1) for array in some] for some in (arrays, wide))
    check(
        fastattn.varlen_attention(*packed, [0, 7, 20], causal=True),
        fastattn.varlen_attention(*wide_packed, [0, 7, 20], causal=True),
    )
    pieces = [fastattn.attention(arrays[0], *(x[:, part] for x in arrays[1:]), return_lse=True)
              for part in (slice(0, 8), slice(8, 20))]  # fmt: skip
    merged, lse = fastattn.merge_attention(*zip(*pieces, strict=True))
    assert merged.dtype == storage and lse.dtype == np.float32
    exact = fastattn.merge_attention(
        [out.astype(np.float32) for out, _ in pieces], [lse for _, lse in pieces]
    )[0]
    check(merged, exact)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("len_q", [2, 40])
def test_functions_see_float32(storage, len_q):
    pytest.importorskip("numba")

    def mod(score, b, h, q_idx, kv_idx):
        return np.tanh(score) * 3.0 + 0.1 * (q_idx - kv_idx)

    arrays = stored(random_arrays(heads=3, len_q=len_q, len_k=50), [storage] * 3)
    got = fastattn.flex_attention(*arrays, score_mod=mod)
    wanted = fastattn.flex_attention(*upcast(arrays), score_mod=mod)
    assert_same_bits(got.view(np.uint16), wanted.astype(storage).view(np.uint16))


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_the_next_call_of_a_signature(engine, storage, monkeypatch):
    """Types are part of it: calls of one shape in turn, then again from what is kept."""
    arrays = random_arrays(heads=2, len_q=30, len_k=30)
    kinds = [(storage,) * 3, (np.float32, storage, storage), (np.float32,) * 3]
    calls = [(stored(arrays, kind), {"return_lse": lse}) for kind, lse in product(kinds, (False, True))]
    first = [engine.attention(*given, **options) for given, options in calls]
    for (given, options), wanted in zip(calls, first, strict=True):
        got = engine.attention(*given, **options)
        for one, other in zip(
            *((x,) if isinstance(x, np.ndarray) else x for x in (got, wanted)), strict=True
        ):
            assert one.dtype == other.dtype
            assert_same_bits(one.view(np.uint8), other.view(np.uint8))


def test_backends_that_read_none_say_so():
    pytest.importorskip("numba")
    half = np.ones((2, 3, 4), np.float16)
    with pytest.raises(
        fastattn.BackendError, match="it reads no 16-bit numbers, and key is float16, value is"
    ):
        fastattn.attention(half.astype(np.float32), half, half, backend="numba")
    with pytest.raises(fastattn.BackendError, match="query is bfloat16"):
        fastattn.attention(*[half.astype(BFLOAT16)] * 3, backend="numba")


def test_a_bias_of_8_bits_is_refused():
    """Kernels would read it as numbers of 32 or 64 bits, past its end."""
    x = np.ones((1, 2, 6, 8), np.float32)
    for name in ("float8_e5m2", "float8_e4m3fn"):
        with pytest.raises(TypeError, match="bias must be a float16"):
            fastattn.attention(x, x, x, bias=np.zeros(6, getattr(ml_dtypes, name)))
