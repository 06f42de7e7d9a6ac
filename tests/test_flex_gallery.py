"""The gallery of scores and masks against the definition and PyTorch, and what it computes with."""

from __future__ import annotations

from types import FunctionType, SimpleNamespace

import numpy as np
import pytest

import fastattn
from tests import naive
from tests.flex_gallery import GALLERY, MASKS, SCORES, B, H, L, S, arrays, aux_of, options_of, oracle_options
from tests.tolerances import assert_answer

pytest.importorskip("numba")


def test_the_gallery_is_whole():
    assert len(SCORES) == 5
    assert len(MASKS) == 8


#: Each function is compiled for each: by default for one of them, in turn.
EITHER_DTYPE = [
    pytest.param(name, dtype, marks=pytest.mark.slow if (place + other) % 2 else ())
    for place, name in enumerate(GALLERY)
    for other, dtype in enumerate((np.float32, np.float64))
]


class TestGallery:
    @pytest.mark.parametrize(("name", "dtype"), EITHER_DTYPE)
    def test_against_the_definition(self, name, dtype):
        results = fastattn.flex_attention(
            *arrays(dtype), **options_of(name, dtype), return_lse=True, return_weights=True
        )
        options = oracle_options(name, dtype)
        assert_answer(
            results, naive.attention(*arrays(dtype), **options), naive.formula(*arrays(dtype), **options)
        )

    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
    @pytest.mark.slow
    @pytest.mark.parametrize("name", GALLERY)
    def test_against_pytorch(self, name):
        torch = pytest.importorskip("torch")
        from torch.nn.attention import flex_attention as theirs

        called = SimpleNamespace(tanh=torch.tanh, maximum=lambda x, y: torch.clamp(x, min=y))
        function = FunctionType(GALLERY[name].__code__, {**GALLERY[name].__globals__, "np": called})
        aux = [torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in aux_of(name)]
        tensors = [torch.from_numpy(array) for array in arrays()]
        with torch.inference_mode():
            if name in SCORES:
                expected = theirs.flex_attention(
                    *tensors, score_mod=lambda score, b, h, i, j: function(score, b, h, i, j, *aux)
                )
            else:
                block_mask = theirs.create_block_mask(
                    lambda b, h, i, j: function(b, h, i, j, *aux), B, H, L, S, device="cpu"
                )
                expected = theirs.flex_attention(*tensors, block_mask=block_mask)
        got = fastattn.flex_attention(*arrays(), **options_of(name, np.float64))
        np.testing.assert_allclose(got, expected.numpy(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["exp", "exp2", "tanh"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_vector_functions_are_exact(name, dtype):
    """Within 2 units in the last place over their whole range, tanh within 4."""
    import numba

    from fastattn.backends.jit import vector_math

    function = vector_math.FUNCTIONS[name]
    compiled = numba.njit(lambda x: function(x))
    limits = np.finfo(dtype)
    top = float(np.log2(limits.max))
    x = np.concatenate(
        [
            np.random.default_rng(0).uniform(-top, top, 20000),
            np.random.default_rng(1).uniform(-1, 1, 20000),
            [0.0, -0.0, 1.0, -1.0, 1e-30, np.inf, -np.inf, np.nan, 1e30, -1e30],
        ]
    ).astype(dtype)
    with np.errstate(over="ignore", under="ignore"):
        exact = getattr(np, name)(x.astype(np.longdouble))
        rounded = exact.astype(dtype)
    got = np.array([compiled(one) for one in x], dtype)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(x))
    infinite = np.isinf(rounded)
    np.testing.assert_array_equal(got[infinite], rounded[infinite])
    judged = np.isfinite(rounded)
    unit = np.spacing(np.maximum(np.abs(rounded[judged]), limits.tiny))
    error = np.abs(got[judged] - exact[judged]) / unit
    assert error.max() <= (4 if name == "tanh" else 2), x[judged][error.argmax()]
