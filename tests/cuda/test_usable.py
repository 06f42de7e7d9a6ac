"""The other files here are collected where the backend is usable."""

from __future__ import annotations

import numpy as np
import pytest

from fastattn.backends.cuda import backend as cuda_backend


def test_one_key(engine):
    if reasons := cuda_backend.backend.unavailable_reasons():
        pytest.skip(f"{'; '.join(reasons)}, nor NUMBA_ENABLE_CUDASIM=1")
    ones = np.ones((1, 3, 4), np.float32)
    np.testing.assert_array_equal(engine.attention(ones, ones[:, :1], ones[:, :1]), ones)
