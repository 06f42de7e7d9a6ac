"""Products by tensor cores, in the simulator in tiles of one warp: other tests there have none."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import fastattn
from fastattn.backends.cuda import engine as cuda_engine
from fastattn.backends.cuda import form
from fastattn.backends.cuda.pairs import FACTORS, PARTS, pairs_of, split_weights
from fastattn.masks import Mask
from tests.cases import Case, random_arrays, solve, stored, upcast
from tests.conftest import Engine
from tests.cuda.libraries import SIMULATED
from tests.cuda.test_storage import assert_rounded_once, options_of
from tests.fake_gpu import FakeArray
from tests.tolerances import assert_answer, assert_attention, assert_same_bits

pytestmark = pytest.mark.skipif(not SIMULATED, reason="a GPU has them in all tests of float32")


def options(**keywords):
    return tuple(keywords.items())


@pytest.fixture(autouse=True)
def tensor_cores(monkeypatch):
    from fastattn.backends.cuda.stream import SimulatedStream

    init = SimulatedStream.__init__

    def with_tensor_cores(self):
        init(self)
        self.has_tensor_cores = True

    monkeypatch.setattr(SimulatedStream, "__init__", with_tensor_cores)
    monkeypatch.setattr(form, "SIMULATED_SPLIT_KEYS", 2 * form.SIMULATED_TENSOR_SHAPE.tile_k)


CASES = [
    Case("plain", heads=1, len_q=20, len_k=37, head_dim=16, value_dim=32),
    Case("uneven", heads=2, kv_heads=1, len_q=5, len_k=17, head_dim=19, value_dim=35),
    Case("causal", heads=1, len_q=33, len_k=33, head_dim=32, value_dim=8, options=options(causal=True)),
    Case("all", lead=(2,), heads=1, len_q=9, len_k=21, head_dim=5, value_dim=3, bias=(9, 21), sinks=True,
         mask=(2, 1, 9, 21), options=options(causal="bottom_right", key_lengths=(15, 21), softcap=9.0)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(engine, case):
    solved = solve(case.as_dtype(np.float32))
    assert_answer(engine.everything(*solved.arrays, **solved.keywords), solved.exact, solved.plain)


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan, np.finfo(np.float32).max, 2.0**127])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_odd_numbers(engine, which, odd):
    """Nonfinite ones, and those that TF32 rounds to infinity: they reach the rows that read them."""
    arrays = Case("odd", heads=1, len_q=9, len_k=18, head_dim=16, value_dim=16).arrays()
    arrays = [x.astype(np.float32) for x in arrays]
    arrays[which][..., 7, 3] = odd
    if which < 2 and np.isfinite(odd):  # scores of some size
        arrays[1 - which] *= np.float32(1e-38)
    with np.errstate(all="ignore"):
        expected = fastattn.attention(
            *(x.astype(np.float64) for x in arrays), causal="top_left", backend="reference"
        )
        out = engine.attention(*arrays, causal="top_left")
        np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-6)


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
SIZES = {"heads": 2, "kv_heads": 1, "len_q": 5, "len_k": 35, "head_dim": 8, "value_dim": 8}
WIDE = {"heads": 1, "len_q": 5, "len_k": 18, "head_dim": 40, "value_dim": 56}
WHOLE_TILES = {"heads": 1, "len_q": 5, "len_k": 18, "head_dim": 32, "value_dim": 32}
NOT_WHOLE_SPANS = {"heads": 1, "len_q": 5, "len_k": 18, "head_dim": 37, "value_dim": 35}


@pytest.fixture
def forms(monkeypatch):
    """Those of the kernels that are launched."""
    found, make = set(), cuda_engine.attend_kernel

    def attend_kernel(form, **mods):
        found.add(form)
        return make(form, **mods)

    monkeypatch.setattr(cuda_engine, "attend_kernel", attend_kernel)
    monkeypatch.setattr(cuda_engine, "_plans", {})
    return found


@pytest.mark.parametrize(
    ("sizes", "name", "storage"),
    [
        *((SIZES, name, BFLOAT16) for name in ("plain", "window", "dense")),
        (SIZES, "plain", FLOAT16),
        (WIDE, "causal", FLOAT16),
        (NOT_WHOLE_SPANS, "causal", FLOAT16),
        (NOT_WHOLE_SPANS, "plain", BFLOAT16),
        (WHOLE_TILES, "plain", FLOAT16),
    ],
)
def test_storage(engine, forms, monkeypatch, sizes, name, storage):
    """Results are as exact as those of float32 arrays, and rounded once."""
    if sizes is WHOLE_TILES:  # of values, too, as a GPU's for 64 columns
        shape = form.SIMULATED_PAIR_SHAPE
        monkeypatch.setattr(form, "SIMULATED_PAIR_SHAPE", shape._replace(value_keys=shape.tile_k))
    arrays = stored(random_arrays(**sizes), [storage] * 3)
    options, wide = options_of(name, arrays, storage)
    unrounded = np.empty((*arrays[0].shape[:-1], arrays[2].shape[-1]), np.float32)
    out, lse, weights = engine.everything(*arrays, **options)
    engine.attention(*arrays, **options, out=unrounded)
    assert_rounded_once(out, unrounded)
    if isinstance(mask := wide.get("mask"), Mask):
        wide["mask"] = mask.materialize(*weights.shape[-3:])
    assert_attention((unrounded, lse), *upcast(arrays), **wide)
    *_, exact = Engine("reference").everything(*upcast(arrays, np.float64), **wide)
    half_ulp = 2.0**-8 if storage == BFLOAT16 else 2.0**-11
    np.testing.assert_allclose(weights.astype(np.float64), exact, rtol=half_ulp + 1e-5, atol=1e-7)
    assert {each.shape.pairs for each in forms} == {str(storage)}
    assert {each.is_packed for each in forms} == {sizes is not NOT_WHOLE_SPANS}
    assert {each.is_even for each in forms} == {sizes is WHOLE_TILES}


def odd_address(array):
    room = np.zeros(array.size + 1, array.dtype)
    room[1:] = array.reshape(-1)
    return room[1:].reshape(array.shape)


def odd_rows(array):
    room = np.zeros((*array.shape[:-1], array.shape[-1] + 1), array.dtype)
    room[..., :-1] = array
    return room[..., :-1]


def backwards(array):
    return np.ascontiguousarray(array[..., ::-1, :])[..., ::-1, :]


def transposed(array):
    return np.ascontiguousarray(array.swapaxes(-1, -2)).swapaxes(-1, -2)


@pytest.mark.parametrize("layout", [odd_address, odd_rows, backwards, transposed])
def test_pairs_in_memory(forms, layout):
    """The same bits wherever they lie; in whole spans of 16 bytes only at multiples of them."""
    query, key, value = stored(random_arrays(heads=1, len_q=5, len_k=18, head_dim=8), [np.float16] * 3)

    def attention(key):
        return fastattn.attention(*map(FakeArray, (query, key, value))).hidden

    expected = attention(key)
    assert {form.is_packed for form in forms} == {True}
    forms.clear()
    assert_same_bits(attention(layout(key)), expected)
    assert {form.is_packed for form in forms} == {layout == backwards}
    assert {form.shape.pairs for form in forms} == {"float16"}


@pytest.mark.parametrize(("odd", "storage"), [(-np.inf, FLOAT16), (np.nan, FLOAT16), (np.inf, BFLOAT16)])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_odd_numbers_of_pairs(engine, which, odd, storage):
    """They reach the rows that read them, and their neighbours stay what they are."""
    arrays = Case("odd", heads=1, len_q=9, len_k=18, head_dim=16, value_dim=16).arrays()
    arrays = stored(arrays, [storage] * 3)
    arrays[which][..., 7, 3] = odd
    out = np.empty((1, 9, 16), np.float32)
    with np.errstate(all="ignore"):
        wide = [x.astype(np.float64) for x in arrays]
        expected = fastattn.attention(*wide, causal="top_left", backend="reference")
        engine.attention(*arrays, causal="top_left", out=out)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", PARTS)
def test_parts_of_weights(kind):
    """From 1 down to the smallest that matters beside it."""
    rng = np.random.default_rng(0)
    weights = np.exp2(-rng.uniform(0, 24, (2, 64))).astype(np.float32)
    weights[0, :2] = 1, 0
    parts = np.zeros((PARTS[kind], 2, 32), np.float32)
    for row in range(2):
        split_weights(kind, 32)(weights, row, parts)
    first, second = pairs_of(kind)[:2]
    for row, e in np.ndindex(2, 32):
        for pair_of, n in ((first, 2 * e), (second, 2 * e + 1)):
            total = sum(float(pair_of(part[row, e])) for part in parts) / FACTORS[kind]
            assert abs(total - weights[row, n]) <= 2.0**-23 * weights[row, n] + 2.0**-40


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("odd", [np.nan, np.inf, 2.0**127])
def test_odd_numbers_that_are_not_read_change_no_bit(engine, odd, dtype):
    arrays = Case("masked", heads=1, len_q=9, len_k=18, head_dim=16, value_dim=16).arrays()
    query, key, value = (x.astype(dtype) for x in arrays)
    expected = engine.everything(query, key, value, causal="top_left")
    with np.errstate(over="ignore"):  # in float16 it is infinite
        for array in (key, value):
            array[..., 5:, 3] = odd  # some of the tile that all rows read
    with np.errstate(all="ignore"):
        got = engine.everything(query, key, value, causal="top_left")
    for one, other in zip(got, expected, strict=True):
        assert_same_bits(one[:, :5], other[:, :5])
