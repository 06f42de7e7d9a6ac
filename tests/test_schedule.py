"""The pure functions that decide how a call is divided."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from fastattn._constants import LOG2E
from fastattn._schedule import score_factors

SCALES = (0.0, 1e-300, 1e-30, 1 / 16, 0.5, 0.7, 1.0, 1.5, 100.0, 1e20, 3e38, 1e300, 1.7e308)
SOFTCAPS = (None, 1e-300, 1e-37, 0.5, 30.0, 1e9, 3e38, 1e300, 1.7e308)


@pytest.mark.parametrize("itemsize", [4, 8])
@pytest.mark.parametrize("is_natural", [False, True], ids=["log2", "natural"])
def test_score_factors_are_those_of_the_formula(itemsize, is_natural):
    """All together they are, where the formula's are numbers of the dtype; the packed query is no larger than
    the query."""
    limits, wide = np.finfo(f"f{itemsize}"), np.longdouble
    least, most = float(limits.tiny), float(limits.max)
    for scale, softcap, sign in product(SCALES, SOFTCAPS, (1, -1)):
        query, root, cap, exponent = score_factors(sign * scale, softcap, itemsize, is_natural)
        assert abs(query) <= 1
        assert least <= root <= most
        assert np.frexp(root)[0] == 0.5
        assert exponent == LOG2E or not is_natural
        if not (scale == 0 or least < scale < most) or (softcap is not None and not least < softcap < most):
            continue
        score = wide(query) * wide(root) ** 2
        if softcap is None:
            assert cap == 0
            wanted, score = wide(sign * scale) * wide(LOG2E), score * wide(exponent)
        else:
            assert cap <= most
            np.testing.assert_allclose(cap * (exponent / LOG2E), softcap, rtol=1e-15)
            wanted = wide(sign * scale) / wide(softcap)
        assert abs(score - wanted) <= 1e-15 * abs(wanted)


@pytest.mark.parametrize("itemsize", [4, 8])
def test_usual_factors_go_into_the_query(itemsize):
    """So they cost nothing per key."""
    for head_dim in (3, 16, 64, 256):
        scale = head_dim**-0.5
        assert score_factors(scale, None, itemsize, False) == (scale * LOG2E, 1, 0, 1)
        assert score_factors(scale, None, itemsize, True) == (scale, 1, 0, LOG2E)
        assert score_factors(scale, 50.0, itemsize, False) == (scale / 50, 1, 50 * LOG2E, 1)
    # None of these takes a pass over the scores.
    for scale in (1.0, -1.0, 8.0, 100.0):
        assert score_factors(scale, None, itemsize, False)[1] == 1
    for scale in (1.0, -1.0, 1e-9):
        assert score_factors(scale, None, itemsize, True)[1] == 1
