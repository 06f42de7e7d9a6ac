"""Numbers at the ends of their types are data: no call warns of them, and under `-W error` none fails."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import fastattn

HUGE = {"float32": 1e39, "float64": 1e308}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", HUGE)
@pytest.mark.parametrize("len_q", [2, 40])
@pytest.mark.parametrize(
    "options",
    [
        {"scale": "huge"},
        {"scale": "-huge"},
        {"scale": 1e-320},
        {"scale": 0.0},
        {"scale": "huge", "softcap": 2.0},
        {"softcap": 1e-30},
        {"softcap": 1e30},
        {"bias": np.float64([1e300, -1e300, np.inf, -np.inf, np.nan] * 8)},
        {"sinks": np.float64([1e300, -np.inf])},
        {"sinks": np.float64([np.nan, np.inf])},
    ],
    ids=str,
)
def test_options(backend, dtype, len_q, options):
    query, key, value = np.random.default_rng(0).standard_normal((3, 1, 2, 40, 8)).astype(dtype)
    named = {"huge": HUGE[dtype], "-huge": -HUGE[dtype]}
    options = {name: named[x] if isinstance(x, str) else x for name, x in options.items()}
    backend.everything(query[:, :, :len_q], key, value, **options)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", HUGE)
@pytest.mark.parametrize("number", [np.inf, np.nan, np.finfo(np.float32).max, 1e-45])
@pytest.mark.parametrize("argument", range(3))
def test_arrays(backend, dtype, number, argument):
    arrays = list(np.random.default_rng(0).standard_normal((3, 1, 2, 40, 8)).astype(dtype))
    arrays[argument][0, 0, :3] = number
    backend.everything(*arrays, causal=True)


def test_merging():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastattn.merge_attention(
            [np.full((2, 3), 1e300), np.full((2, 3), np.inf)],
            [np.float64([1e300, -np.inf]), np.float64([0, np.nan])],
        )


@pytest.mark.filterwarnings("error")
def test_gradients_and_kernels():
    rng = np.random.default_rng(0)
    query, grad_out = rng.standard_normal((2, 2, 2, 5, 3))
    key, value = rng.standard_normal((2, 1, 2, 6, 3))
    grad_out[:, 0, 0, 0] = 1.7e308, -1.7e308
    out, lse = fastattn.attention(query, key, value, return_lse=True)
    for backend in (None, "reference"):
        fastattn.attention_backward(grad_out, query, key, value, out, lse, backend=backend)
    far, near = np.float32([[1e25, 0]]), np.zeros((3, 2), np.float32)
    fastattn.kernel_regression(far, near, near[:, 0], bandwidth=1, return_log_density=True)
    fastattn.kernel_logsumexp(far, near, bandwidth=1)
    nothing = np.zeros((0, 1))
    fastattn.kernel_regression(
        nothing, nothing, nothing[:, 0], bandwidth=1, leave_one_out=True, return_log_density=True
    )
