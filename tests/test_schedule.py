"""The pure functions that decide how a call is divided."""

from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np
import pytest

from fastattn._call.schedule import (
    Target,
    exact_factors,
    factors_of,
    make_backward_schedule,
    make_schedule,
    score_factors,
)
from fastattn._machine import constants
from fastattn._machine.constants import FUSED_ROWS, LOG2E
from tests.cases import problem_of, random_arrays

BFLOAT16 = ml_dtypes.bfloat16
SCALES = (0.0, 1e-300, 1e-30, 1 / 16, 0.5, 0.7, 1.0, 1.5, 100.0, 1e20, 3e38, 1e300, 1.7e308)
SOFTCAPS = (None, 1e-300, 1e-37, 0.5, 30.0, 1e9, 3e38, 1e300, 1.7e308)


def test_which_calls_wake_no_thread():
    """Short ones: by the products, the exponentials and the bytes; never with a function of the caller's."""
    target = Target(lanes=16, max_vectors=3, panel_columns=32)

    def is_short(heads, rows, keys, dim, **changes):
        problem = problem_of(*random_arrays(heads=heads, len_q=rows, len_k=keys, head_dim=dim))
        return make_schedule(problem._replace(**changes), target, 2).is_short

    assert is_short(1, 1, 1, 8) and is_short(32, 16, 16, 64)
    assert not is_short(64, 16, 16, 64)
    assert not is_short(1, 600, 600, 1)
    assert not is_short(8, 1, 1024, 64)
    assert not is_short(1, 1, 1, 8, score_mod=object())


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


@pytest.mark.parametrize("is_natural", [False, True])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("scale", [0.0, 0.125, -0.125, 80**-0.5, -(80**-0.5), 1.0, 3.7, 1e-30, 1e30])
def test_exact_factors(scale, softcap, is_natural):
    """The query's becomes a power of two; the exponent takes the rest, or the scores where they must."""
    sinks = np.zeros(2, np.float32) if is_natural else None
    problem = problem_of(*random_arrays(), scale=scale, softcap=softcap, sinks=sinks)
    (query, root, cap, exponent), wanted = exact_factors(problem), factors_of(problem)
    assert cap == wanted[2]
    assert (exponent == wanted[3]) if is_natural or softcap else (root == wanted[1])
    assert abs(np.frexp(query)[0]) == (0.5 if scale else 0)
    assert abs(query) <= abs(wanted[0]) and np.sign(query) == np.sign(scale)
    product = query * (root * root * exponent)
    np.testing.assert_allclose(product, wanted[0] * (wanted[1] * wanted[1] * wanted[3]), rtol=1e-15)


class TestPairs:
    """Which calls have scores of bfloat16 by bfloat16, and what they copy."""

    @staticmethod
    def schedule(
        len_q=100, len_k=300, head_dim=64, value_dim=64, dtypes=(BFLOAT16,) * 3, has_pairs=True, **options
    ):
        arrays = random_arrays(heads=1, len_q=len_q, len_k=len_k, head_dim=head_dim, value_dim=value_dim)
        arrays = [array.astype(dtype) for array, dtype in zip(arrays, dtypes, strict=True)]
        return make_schedule(problem_of(*arrays, **options), Target(16, 3, 8, False, has_pairs), 1)

    @pytest.mark.parametrize(
        ("expected", "options"),
        [
            (True, {}),
            (True, {"causal": "bottom_right"}),
            (True, {"head_dim": 30}),
            (True, {"scale": -0.3}),
            (True, {"bias": np.zeros(300, np.float32)}),
            (False, {"has_pairs": False}),
            (False, {"len_q": 5}),
            (False, {"head_dim": 31}),
            (True, {"head_dim": 30, "bias": np.zeros(300, np.float32)}),
            (True, {"softcap": 30.0}),
            (False, {"scale": 0.0}),
            (False, {"scale": 1e30}),
            (False, {"dtypes": (np.float32, BFLOAT16, BFLOAT16)}),
            (False, {"dtypes": (BFLOAT16, BFLOAT16, np.float32)}),
            (False, {"dtypes": (np.float16,) * 3}),
        ],
    )
    def test_which_calls(self, expected, options):
        schedule = self.schedule(**options)
        assert schedule.uses_pairs == expected
        if expected:
            assert not schedule.converts_keys and not schedule.copies_keys

    @pytest.mark.parametrize(
        ("expected", "options"),
        [
            (True, {}),
            (True, {"head_dim": 31, "value_dim": 7}),
            (True, {"scale": -0.3, "softcap": 2.0}),
            (True, {"bias": np.zeros(300, np.float32)}),
            (True, {"len_q": 33}),
            (False, {"len_q": 32}),
            (False, {"precision": "exact"}),
            (False, {"has_pairs": False}),
            (False, {"has_fused": True}),
            (False, {"grad": np.float32}),
            (False, {"grad": np.float16}),
            (False, {"scale": 0.0}),
            (False, {"dtypes": (BFLOAT16, BFLOAT16, np.float32)}),
        ],
    )
    def test_gradients(self, expected, options):
        """Where weights are rounded, blocks have the rows that the kernels of pairs know."""
        options = {"precision": "storage", "dtypes": (BFLOAT16,) * 3, "len_q": 100, "head_dim": 64} | options
        sizes = {name: options.pop(name) for name in ("len_q", "head_dim")}
        dtypes, grad = options.pop("dtypes"), options.pop("grad", BFLOAT16)
        has_fused, has_pairs = options.pop("has_fused", False), options.pop("has_pairs", True)
        arrays = random_arrays(heads=1, len_k=300, value_dim=options.pop("value_dim", 64), **sizes)
        arrays = [array.astype(dtype) for array, dtype in zip(arrays, dtypes, strict=True)]
        problem = problem_of(*arrays, **options)
        problem = problem._replace(out=np.zeros(problem.out.shape, grad))
        schedule = make_backward_schedule(problem, Target(16, 3, 8, has_fused, has_pairs), 2, False)
        assert schedule.rounds_weights == expected
        if expected:
            assert schedule.max_lanes == constants.BACKWARD_PAIR_LANES
            assert schedule.n_vectors * 16 <= schedule.max_lanes

    def test_values_may_take_the_room_of_keys(self):
        """Two copies of 1 MB, or one of 2."""
        sizes = {"len_q": 200, "head_dim": 64}
        for len_k, expected in [
            (4096, (True, True)),
            (4097, (False, True)),
            (8192, (False, True)),
            (8193, (False, False)),
        ]:
            schedule = self.schedule(len_k=len_k, has_pairs=False, **sizes)
            assert (schedule.copies_keys, schedule.packs_values) == expected

    @pytest.mark.parametrize(
        ("expected", "options"),
        [
            ("reads", {"len_q": 200}),
            ("reads", {"len_q": 17}),
            ("packs", {"len_q": 200, "value_dim": 63}),
            ("converts", {"len_q": 17, "value_dim": 63}),
            ("packs", {"len_q": 200, "precision": "storage"}),
        ],
    )
    def test_values(self, expected, options):
        """Read as they are stored where two columns are a word; rounded weights multiply pairs of keys."""
        schedule = self.schedule(**options)
        ways = [way for way in ("reads", "packs", "converts") if getattr(schedule, f"{way}_values")]
        assert ways == [expected]


class TestFused:
    """Where the kernels have a fused sweep, and it is faster."""

    @pytest.fixture(autouse=True)
    def as_users_have_it(self, monkeypatch):
        monkeypatch.setattr(constants, "FUSED_LEAST_GAIN", 1.0)

    @staticmethod
    def uses_fused(len_q, len_k, head_dim, heads=2, lead=(), kv_heads=None, **options):
        arrays = random_arrays(
            lead=lead, heads=heads, kv_heads=kv_heads, len_q=len_q, len_k=len_k, head_dim=head_dim
        )
        problem, target = problem_of(*arrays, **options), Target(16, 3, 48, True)
        fused = make_schedule(problem, target, 2).uses_fused
        assert make_backward_schedule(problem, target, 2, False).scores_on_tiles == fused
        return fused

    @pytest.mark.parametrize(
        ("expected", "sizes", "options"),
        [
            (True, (128, 128, 64), {}),
            (True, (197, 197, 64), {}),
            (True, (2048, 2048, 40), {}),
            (True, (300, 300, 64), {"causal": "top_left"}),
            (True, (2000, 2000, 64), {"window": (256, 0)}),
            (True, (16, 512, 64, 8, (), 1), {}),
            (False, (64, 64, 64), {}),
            (False, (4096, 77, 40), {}),
            (False, (2048, 2048, 16), {}),
            (False, (128, 128, 64), {"causal": "top_left"}),
            (False, (2000, 2000, 64), {"window": (30, 0)}),
            (False, (2000, 100, 64), {"causal": "bottom_right", "window": (0, 0)}),
            (False, (FUSED_ROWS - 1, 5000, 64), {}),
        ],
    )
    def test_where_it_is_faster(self, expected, sizes, options):
        assert self.uses_fused(*sizes, **options) == expected

    @pytest.mark.parametrize(
        ("scale", "softcap", "expected"),
        [
            (2.0**10, None, True),
            (2.0**17, None, False),
            (45000.0, 45000.0, True),
            (45000 * 2.0**4, 45000.0, False),
            (50 * 2.0**6, 50.0, True),
            (50 * 2.0**31, 50.0, False),
        ],
    )
    def test_what_scores_are_multiplied_by(self, scale, softcap, expected):
        """The tile unit takes small products as 0: the factors together, not each, must not raise them."""
        assert self.uses_fused(300, 300, 64, scale=scale, softcap=softcap) == expected

    @pytest.mark.parametrize(("len_q", "expected"), [(70, False), (500, True)])
    @pytest.mark.parametrize("causal", [False, "bottom_right"])
    def test_the_keys_of_the_longest_item(self, len_q, expected, causal):
        """Where items have lengths they do not decide, or the bits of an item would depend on the others."""
        for len_k in (20, 200, 5000):
            lengths = {"lead": (2,), "key_lengths": [1, len_k]}
            assert self.uses_fused(len_q, len_k, 64, causal=causal, **lengths) == expected
