"""Products by tensor cores, in the simulator in tiles of one warp: other tests there have none."""

from __future__ import annotations

import numpy as np
import pytest

import fastattn
from fastattn.backends.cuda import form
from tests.cases import Case, solve, stored
from tests.cuda.libraries import SIMULATED
from tests.tolerances import assert_answer, assert_same_bits

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


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_storage(engine, storage):
    """Its numbers have no low part."""
    arrays = Case("storage", heads=1, len_q=9, len_k=18, head_dim=16, value_dim=16).arrays()
    arrays = stored(arrays, [storage] * 3)
    wide = [np.asarray(x, np.float64) for x in arrays]
    expected = fastattn.attention(*wide, backend="reference")
    out = engine.attention(*arrays)
    eps = 2.0**-8 if storage == "bfloat16" else 2.0**-11
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=eps, atol=1e-6)


@pytest.mark.parametrize("odd", [np.nan, np.inf, 2.0**127])
def test_odd_numbers_that_are_not_read_change_no_bit(engine, odd):
    arrays = Case("masked", heads=1, len_q=9, len_k=18, head_dim=16, value_dim=16).arrays()
    query, key, value = (x.astype(np.float32) for x in arrays)
    expected = engine.everything(query, key, value, causal="top_left")
    for array in (key, value):
        array[..., 9:, 3] = odd  # beyond the last query, some in the tile that it reads
    for one, other in zip(engine.everything(query, key, value, causal="top_left"), expected, strict=True):
        assert_same_bits(one, other)
