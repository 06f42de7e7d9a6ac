"""`reduce_scores`, `key_weights` and `max_similarity`: against their definitions in extended precision."""

from __future__ import annotations

import sys
from itertools import product

import ml_dtypes
import numpy as np
import pytest

import fastattn
from fastattn import masks
from fastattn._call.options import DEFAULTS
from fastattn._call.schedule import Target, make_reduction_schedule
from fastattn._call.scores import normalize_scores
from fastattn.backends.cython import driver
from tests import naive
from tests.cases import FLOATS, MEMORY_LAYOUTS
from tests.conftest import without
from tests.process import python
from tests.test_memory import LIMIT, MEASURE
from tests.tolerances import assert_close, assert_same_bits

WIDE = np.longdouble
HALVES = [np.float16, ml_dtypes.bfloat16]
RNG = np.random.default_rng(5)
L, S = 21, 150
BIAS = RNG.integers(-3, 4, (4, L, S)).astype(np.float32)
BIAS[RNG.random(BIAS.shape) < 0.1] = -np.inf
MASK = RNG.random((2, 1, L, S)) < 0.4
#: Options, and what of them the oracle takes.
OPTIONS = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (30, 0), "causal": "bottom_right"},
    "lengths": {"key_lengths": [S, 3], "window": (8, 8)},
    "no keys": {"key_lengths": [0, 1], "causal": "top_left"},
    "bias": {"bias": BIAS},
    "dense": {"mask": MASK, "causal": "top_left"},
    "map": {"mask": masks.Window(9, 0) | masks.GlobalTokens([0, 77])},
    "softcap": {"softcap": 4.0, "scale": 0.5},
    "scale": {"scale": -2.0},
}
#: So many keys that threads share those of few queries, and options of these.
MANY = 4984
MANY_KEYS = {
    "plain": {},
    "window": {"window": (2000, 0), "causal": "bottom_right"},
    "lengths": {"key_lengths": [MANY, 1500]},
    "no keys": {"key_lengths": [0, 1], "causal": "bottom_right"},
    "bias": {"bias": np.where(RNG.random((4, 3, MANY)) < 0.5, -np.inf, RNG.integers(-3, 4, (4, 3, MANY)))},
    "few": {"mask": RNG.random((2, 1, 3, MANY)) < 0.001},
    "blocks": {"mask": masks.Dense(np.arange(MANY) // 700 % 2 == np.zeros((3, 1), int))},
}


@pytest.fixture(params=["reference", *driver.available_isas()])
def backend(request):
    """A backend, on an instruction set."""
    if request.param == "reference":
        yield "reference"
        return
    before = driver.chosen_isa()
    driver.choose_isa(request.param)
    yield "cython"
    driver.choose_isa(before)


def arrays(dtype=np.float32, integers=False, heads=4, kv_heads=2, seed=0, len_q=L, len_k=S):
    """Query and key; of small integers all scores are exact, and many are equal."""
    rng = np.random.default_rng(seed)
    shapes = (2, heads, len_q, 16), (2, kv_heads, len_k, 16)
    if integers:
        return [rng.integers(-2, 3, shape).astype(dtype) for shape in shapes]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def exact_scores(query, key, *, scale=None, softcap=None, bias=None, **rules):
    """Scores in extended precision, -inf where masked, and the magnitudes that are added up for each."""
    q = query.astype(WIDE)
    k = np.repeat(key.astype(WIDE), query.shape[1] // key.shape[1], axis=1).swapaxes(-1, -2)
    scale = WIDE(query.shape[-1]) ** WIDE(-0.5) if scale is None else WIDE(scale)
    with np.errstate(invalid="ignore"):
        s, size = scale * (q @ k), abs(scale) * (abs(q) @ abs(k))
    if softcap is not None:
        s, size = softcap * np.tanh(s / softcap), size + 2 * softcap
    if bias is not None:
        s, size = s + bias, size + np.where(np.isinf(bias), 0, abs(bias))
    if isinstance(rules.get("mask"), masks.Mask):
        rules["mask"] = rules["mask"].materialize(query.shape[1], *s.shape[-2:])
    allowed = naive.allowed_keys(query.shape[:1], query.shape[1], *s.shape[-2:], bias=bias, **rules)
    return np.where(allowed, s, -np.inf), size


def exact_topk(scores, k):
    """The k largest, NaN first, in the order of keys where equal; -inf and -1 where there are fewer."""
    values, index = np.full((*scores.shape[:-1], k), -np.inf, WIDE), np.full((*scores.shape[:-1], k), -1)
    for at in np.ndindex(scores.shape[:-1]):
        row = scores[at]
        keys = sorted(
            (j for j in range(len(row)) if row[j] != -np.inf),
            key=lambda j: (not np.isnan(row[j]), 0 if np.isnan(row[j]) else -row[j], j),
        )[:k]
        values[at][: len(keys)], index[at][: len(keys)] = row[keys], keys
    return values, index


class TestLargest:
    @pytest.mark.parametrize("dtype", [*FLOATS, *HALVES], ids=lambda dtype: np.dtype(dtype).name)
    @pytest.mark.parametrize("name", [name for name in OPTIONS if name != "softcap"])  # no tanh is exact
    def test_exact_scores(self, backend, name, dtype):
        """Of integers, with a scale that is a power of two: every key is known, and so are ties."""
        options = {"scale": 0.25, **OPTIONS[name]}
        query, key = arrays(dtype, integers=True)
        values, index = exact_topk(exact_scores(query, key, **options)[0], 7)
        got = fastattn.reduce_scores(query, key, reduction="topk", k=7, backend=backend, **options)
        assert got[0].dtype == (np.float64 if dtype == "float64" else np.float32)
        assert got[1].dtype == np.int64
        np.testing.assert_array_equal(got[0], values)
        np.testing.assert_array_equal(got[1], index)
        top, at = fastattn.reduce_scores(query, key, reduction="max", backend=backend, **options)
        assert_same_bits(top, np.ascontiguousarray(got[0][..., 0]))
        assert_same_bits(at, np.ascontiguousarray(got[1][..., 0]))

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("name", OPTIONS)
    def test_rounded_scores(self, backend, name, dtype):
        """Each is within a rounding of each of its products and options, and so is the score of its key."""
        query, key = arrays(dtype)
        scores, size = exact_scores(query, key, **OPTIONS[name])
        values, _ = exact_topk(scores, 9)
        got, index = fastattn.reduce_scores(
            query, key, reduction="topk", k=9, backend=backend, **OPTIONS[name]
        )
        bound = (query.shape[-1] + 8) / 2 * np.finfo(dtype).eps * size.max(axis=-1, keepdims=True)
        np.testing.assert_array_equal(index == -1, np.isinf(values))
        np.testing.assert_array_equal(got == -np.inf, np.isinf(values))
        own = np.where(index < 0, -np.inf, np.take_along_axis(scores, index, axis=-1))
        finite = index >= 0
        limit = np.broadcast_to(bound, got.shape)[finite]
        assert (abs(got[finite] - values[finite]) <= limit).all()
        assert (abs(got[finite] - own[finite]) <= limit).all()
        for row in index.reshape(-1, 9):
            assert len({*row[row >= 0]}) == (row >= 0).sum()

    @pytest.mark.parametrize("k", [1, 3, 200])
    def test_equal_scores(self, backend, k):
        query, key = np.ones((1, 40, 8), np.float32), np.ones((1, 190, 8), np.float32)
        index = fastattn.reduce_scores(
            query, key, reduction="topk", k=k, mask=masks.NotSelf(), backend=backend
        )[1]
        for i in range(40):
            keys = [j for j in range(190) if j != i]
            assert index[0, i].tolist() == (keys + [-1] * k)[:k]

    @pytest.mark.parametrize("rising", [1.0, -1.0])
    def test_scores_in_order(self, backend, rising):
        """Each key is larger than all before, or none is."""
        bias = rising * np.arange(500.0)
        query, key = np.zeros((1, 40, 8)), np.zeros((1, 500, 8))
        values, index = fastattn.reduce_scores(query, key, reduction="topk", k=4, bias=bias, backend=backend)
        expected = [499, 498, 497, 496] if rising > 0 else [0, 1, 2, 3]
        assert (index == expected).all()
        assert (values == bias[expected]).all()

    def test_nan(self, backend):
        """It is the largest; in a masked key it is never seen; in a query it is at the first allowed keys."""
        query, key = arrays(integers=True, heads=2)
        options = {"reduction": "topk", "k": 4, "scale": 1.0, "window": (50, 3), "backend": backend}
        clean = fastattn.reduce_scores(query, key, **options)
        query[1, 1, 5] = np.nan
        key[0, 0, 70] = np.nan
        got = fastattn.reduce_scores(query, key, **options)
        scores, _ = exact_scores(query, key, scale=1.0, window=(50, 3))
        values, index = exact_topk(scores, 4)
        np.testing.assert_array_equal(got[0], values)
        np.testing.assert_array_equal(got[1], index)
        assert np.isnan(got[0][1, 1, 5]).all()
        unread = ~np.isnan(scores).any(axis=-1)
        assert 0 < unread.sum() < unread.size
        for one, other in zip(got, clean, strict=True):
            assert_same_bits(one[unread], other[unread])

    def test_infinite_scores(self, backend):
        """An inf is a number; a score of -inf is as a masked one."""
        query, key = np.ones((1, 3, 4)), np.zeros((1, 5, 4))
        key[0, 1:3, 0] = -np.inf, np.inf
        values, index = fastattn.reduce_scores(query, key, reduction="topk", k=5, backend=backend)
        assert values[0, 0].tolist() == [np.inf, 0, 0, 0, -np.inf]
        assert index[0, 0].tolist() == [2, 0, 3, 4, -1]

    @pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 4)])
    def test_empty(self, backend, shape):
        key = np.ones((*shape[:2], 0, 4))
        for reduction, k in (("max", None), ("topk", 3)):
            values, index = fastattn.reduce_scores(
                np.ones(shape), key, reduction=reduction, k=k, backend=backend
            )
            assert values.shape == index.shape == (shape[:3] if k is None else (*shape[:3], k))
            assert (values == -np.inf).all()
            assert (index == -1).all()

    @pytest.mark.parametrize("layout", MEMORY_LAYOUTS)
    def test_memory_layouts(self, backend, layout):
        query, key = arrays(seed=2)
        options = {"reduction": "topk", "k": 6, "mask": MASK, "backend": backend}
        expected = fastattn.reduce_scores(query, key, **options)
        got = fastattn.reduce_scores(*map(MEMORY_LAYOUTS[layout], (query, key)), **options)
        for one, other in zip(got, expected, strict=True):
            assert_same_bits(one, other)

    def test_axes(self, backend):
        """Layout "bshd", one head without an axis, and leading axes that broadcast."""
        query, key = arrays(seed=3)
        options = {"reduction": "topk", "k": 3, "causal": "bottom_right", "backend": backend}
        values, index = fastattn.reduce_scores(query, key, **options)
        swapped = fastattn.reduce_scores(query.swapaxes(1, 2), key.swapaxes(1, 2), layout="bshd", **options)
        one = fastattn.reduce_scores(query[1, 2], key[1, 1], **options)
        shared = fastattn.reduce_scores(query[None], key[:, None], **options)
        for n, expected in enumerate((values, index)):
            assert_same_bits(swapped[n], expected)
            assert_same_bits(one[n], np.ascontiguousarray(expected[1, 2]))
            assert shared[n].shape == (2, 2, 4, L, 3)
            assert_same_bits(np.ascontiguousarray(shared[n][1, 1]), np.ascontiguousarray(expected[1]))

    def test_threads_and_items(self, backend):
        query, key = arrays(seed=4, len_q=300, len_k=700)
        options = {"reduction": "topk", "k": 5, "window": (100, 20), "backend": backend}
        expected = fastattn.reduce_scores(query, key, num_threads=1, **options)
        many = fastattn.reduce_scores(query, key, num_threads=5, **options)
        alone = fastattn.reduce_scores(query[1], key[1], **options)
        for n in range(2):
            assert_same_bits(many[n], expected[n])
            assert_same_bits(alone[n], np.ascontiguousarray(expected[n][1]))

    def test_stored_keys(self, backend):
        """In int8 and in pages: the bits of the call on the decoded array."""
        query, key = arrays(seed=6, len_q=200)
        quantized = fastattn.Quantized.encode(key)
        pages = fastattn.Paged(
            key.reshape(2, 2, 15, 10, 16).swapaxes(1, 2).reshape(30, 2, 10, 16), np.arange(30).reshape(2, 15)
        )
        for stored, plain in ((quantized, quantized.decode()), (pages, key)):
            for options in ({"reduction": "topk", "k": 4}, {"reduction": "logsumexp"}):
                got, expected = (
                    fastattn.reduce_scores(query, x, key_lengths=[140, 150], backend=backend, **options)
                    for x in (stored, plain)
                )
                for one, other in zip(np.atleast_1d(got), np.atleast_1d(expected), strict=True):
                    assert_same_bits(one, other)

    @without(lambda backend, k: backend == "reference" and k != 9)  # which has no threads
    @pytest.mark.parametrize("k", [1, 9, 20, 500])
    @pytest.mark.parametrize("name", MANY_KEYS)
    def test_threads_share_the_keys_of_few_queries(self, backend, name, k):
        """Of integers: each task keeps scores that others have, too, or has fewer than k keys, or none."""
        options = {"scale": 0.25, **MANY_KEYS[name]}
        query, key = arrays(integers=True, len_q=3, len_k=MANY)
        query[1, 1, 2] = np.nan
        key[0, 0, ::1500], key[0, 1, 2000:2100], key[1, 1, 4100] = np.nan, np.nan, np.inf
        request = normalize_scores(query, key, {**DEFAULTS, **options})
        split = make_reduction_schedule(request.problem, Target(**driver.target(4)), 7, k).n_splits
        assert split == 1 if k == 500 else split > 1
        values, index = exact_topk(exact_scores(query, key, **options)[0], k)
        options |= {"reduction": "topk", "k": k, "backend": backend}
        expected = fastattn.reduce_scores(query, key, num_threads=1, **options)
        np.testing.assert_array_equal(expected[0], values)
        np.testing.assert_array_equal(expected[1], index)
        for num_threads in (2, 3, 7):
            got = fastattn.reduce_scores(query, key, num_threads=num_threads, **options)
            for one, other in zip(got, expected, strict=True):
                assert_same_bits(one, other)

    @pytest.mark.parametrize("storage", ["float16", "bfloat16", "float64", "int8", "pages"])
    def test_threads_share_stored_keys(self, backend, storage):
        query, key = arrays(seed=16, len_q=5, len_k=MANY)
        if storage == "int8":
            key = fastattn.Quantized.encode(key)
        elif storage == "pages":
            pages = key.reshape(2, 2, -1, 14, 16).swapaxes(1, 2).reshape(-1, 2, 14, 16)
            key = fastattn.Paged(pages, np.arange(len(pages)).reshape(2, -1))
        else:
            dtype = ml_dtypes.bfloat16 if storage == "bfloat16" else storage
            query, key = query.astype(dtype), key.astype(dtype)
        options = {"reduction": "topk", "k": 12, "key_lengths": [MANY, 1700], "backend": backend}
        one, few, many = (fastattn.reduce_scores(query, key, num_threads=n, **options) for n in (1, 2, 7))
        for n in range(2):
            assert_same_bits(few[n], one[n])
            assert_same_bits(many[n], one[n])

    @pytest.mark.parametrize("half", HALVES)
    def test_half_keys_of_float32_queries(self, backend, half):
        query, key = arrays(seed=7)
        got = fastattn.reduce_scores(query, key.astype(half), reduction="max", backend=backend)
        expected = fastattn.reduce_scores(
            query, key.astype(half).astype(np.float32), reduction="max", backend=backend
        )
        for one, other in zip(got, expected, strict=True):
            assert_same_bits(one, other)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", [*OPTIONS, "sinks"])
def test_logsumexp(backend, name, dtype):
    options = OPTIONS.get(name, {"sinks": np.array([1.0, -2, 0, 3])})
    query, key = arrays(dtype, seed=8)
    plain = dict(options)
    if isinstance(plain.get("mask"), masks.Mask):
        plain["mask"] = plain["mask"].materialize(4, L, S)
    value = np.zeros((2, 2, S, 1), dtype)
    exact, formula = naive.attention(query, key, value, **plain), naive.formula(query, key, value, **plain)
    got = fastattn.reduce_scores(query, key, reduction="logsumexp", backend=backend, **options)
    assert_close("lse", got, exact.lse, exact.lse_reach, formula.lse)


class TestKeyWeights:
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("name", [*OPTIONS, "sinks"])
    def test_they_are_the_sums_of_the_weights(self, backend, name, dtype):
        options = OPTIONS.get(name, {"sinks": np.array([1.0, -2, 0, 3])})
        query, key = arrays(dtype, seed=9)
        plain = dict(options)
        if isinstance(plain.get("mask"), masks.Mask):
            plain["mask"] = plain["mask"].materialize(4, L, S)
        value = np.zeros((2, 2, S, 1), dtype)
        exact, formula = (
            naive.attention(query, key, value, **plain),
            naive.formula(query, key, value, **plain),
        )
        got = fastattn.key_weights(query, key, backend=backend, **options)
        summed = exact.weights.sum(axis=-2)
        # Each weight as attention has it, and L - 1 additions, half a unit each.
        reach = exact.weights_reach.sum(axis=-2) + L / 8 * summed
        assert_close("key weights", got, summed, reach, formula.weights.sum(axis=-2))

    def test_a_mask_of_each_head(self, backend):
        """A map of tiles, an array, sinks and a bias that differ between the heads of a group."""
        query, key = arrays(seed=10)
        of_heads = RNG.random((4, L, S)) < 0.5
        for options in (
            {"mask": of_heads},
            {"mask": masks.Dense(of_heads) | masks.GlobalTokens([3])},
            {"bias": BIAS, "sinks": np.arange(4.0)},
        ):
            got = fastattn.key_weights(query, key, backend=backend, **options)
            for h in range(4):
                own = {name: x[h] for name, x in options.items() if name in ("bias", "sinks")}
                if "sinks" in own:
                    own["sinks"] = own["sinks"][None]
                if "mask" in options:
                    own["mask"] = of_heads[h] | (np.arange(S) == 3) * isinstance(options["mask"], masks.Mask)
                    own["mask"] |= (np.arange(L) + S - L == 3)[:, None] * isinstance(
                        options["mask"], masks.Mask
                    )
                alone = fastattn.key_weights(
                    query[:, h : h + 1], key[:, h // 2, None], backend=backend, **own
                )
                np.testing.assert_allclose(got[:, h], alone[:, 0], rtol=0, atol=1e-5)

    def test_nan_stays_in_its_head_and_its_keys(self, backend):
        query, key = arrays(seed=11)
        clean = fastattn.key_weights(query, key, window=(9, 0), backend=backend)
        query[0, 1, 4] = np.nan
        got = fastattn.key_weights(query, key, window=(9, 0), backend=backend)
        read = np.zeros(got.shape, bool)
        read[0, 1, 4 + S - L - 9 : 4 + S - L + 1] = True
        assert np.isnan(got[read]).all()
        assert_same_bits(got[~read], clean[~read])

    def test_a_masked_key_is_never_seen(self, backend):
        query, key = arrays(seed=12)
        clean = fastattn.key_weights(query, key, key_lengths=[100, 40], backend=backend)
        key[0, :, 100:], key[1, :, 40:] = np.nan, np.inf
        got = fastattn.key_weights(query, key, key_lengths=[100, 40], backend=backend)
        assert_same_bits(got, clean)
        assert (got[0, :, 100:] == 0).all()

    def test_axes_and_dtypes(self, backend):
        query, key = arrays(seed=13)
        expected = fastattn.key_weights(query, key, backend=backend)
        swapped = fastattn.key_weights(
            query.swapaxes(1, 2), key.swapaxes(1, 2), layout="bshd", backend=backend, num_threads=3
        )
        assert_same_bits(swapped, expected)
        one = fastattn.key_weights(query[1, 3], key[1, 1], backend=backend)
        assert one.shape == (S,)
        np.testing.assert_allclose(one, expected[1, 3], rtol=1e-5)
        for half in HALVES:
            stored = query.astype(half), key.astype(half)
            got = fastattn.key_weights(*stored, backend=backend)
            assert got.dtype == np.float32
            upcast = fastattn.key_weights(*(x.astype(np.float32) for x in stored), backend=backend)
            np.testing.assert_allclose(got, upcast, rtol=1e-4)
        assert (
            fastattn.key_weights(np.ones((2, 0, 4)), np.ones((1, 5, 4)), backend=backend).tolist()
            == [[0] * 5] * 2
        )
        assert fastattn.key_weights(np.ones((2, 3, 4)), np.ones((1, 0, 4)), backend=backend).shape == (2, 0)


def exact_similarity(query, document, query_lengths, document_lengths):
    """The sums of the largest products, and of the magnitudes that are added up."""
    out = np.full((2, len(query), len(document)), -np.inf, WIDE)
    for q, n in product(range(len(query)), range(len(document))):
        if document_lengths[n]:
            a, b = query[q, : query_lengths[q]].astype(WIDE), document[n][: document_lengths[n]].astype(WIDE)
            out[0, q, n] = (a @ b.T).max(axis=-1).sum()
            out[1, q, n] = (abs(a) @ abs(b).T).max(axis=-1).sum()
    return out


class TestMaxSimilarity:
    LENGTHS = (70, 0, 1, 63, 64, 65, 33)
    COUNTS = (40, 0, 17)

    def tokens(self, dtype=np.float32, seed=0, dim=50):
        rng = np.random.default_rng(seed)
        shapes = (3, 40, dim), (7, 70, dim)
        if np.dtype(dtype).kind == "i":
            return [rng.integers(-128, 128, shape, dtype) for shape in shapes]
        return [rng.standard_normal(shape).astype(dtype) for shape in shapes]

    @pytest.mark.parametrize("dtype", [*FLOATS, *HALVES], ids=lambda dtype: np.dtype(dtype).name)
    @pytest.mark.parametrize("dim", [1, 50, 300])
    def test_it_is_the_sum_of_the_largest_products(self, backend, dtype, dim):
        query, document = self.tokens(dtype, dim=dim)
        got = fastattn.max_similarity(
            query, document, query_lengths=self.COUNTS, document_lengths=self.LENGTHS, backend=backend
        )
        assert got.dtype == (np.float64 if dtype == "float64" else np.float32)
        exact, size = exact_similarity(query, document, self.COUNTS, self.LENGTHS)
        empty = np.array(self.LENGTHS) == 0
        assert (got[:, empty] == -np.inf).all()
        got, exact, size = (x[:, ~empty] for x in (got, exact, size))
        # A rounding of each product and addition, and one of the sum.
        bound = (dim + 2) / 2 * np.finfo(got.dtype).eps * size
        assert (abs(got - exact) <= bound).all()
        assert (got[1] == 0).all()

    @pytest.mark.parametrize("dim", [50, 1024, 1025])
    def test_int8_is_exact(self, backend, dim):
        query, document = self.tokens(np.int8, dim=dim)
        query[0], document[0] = -128, -128
        query[0, :, -1] = document[0, :, -1] = 1  # of 1025 columns it is beyond float32
        got = fastattn.max_similarity(query, document, document_lengths=self.LENGTHS, backend=backend)
        assert got.dtype == np.float64
        exact, _ = exact_similarity(query, document, (40,) * 3, self.LENGTHS)
        np.testing.assert_array_equal(got, exact)

    def test_integers_beside_floats(self, backend):
        query, document = self.tokens(np.int8, dim=64)
        for other in (np.float32, np.float64, np.int32):
            got = fastattn.max_similarity(query.astype(other), document, backend=backend)
            assert got.dtype == np.float64
            np.testing.assert_array_equal(got, fastattn.max_similarity(query, document, backend=backend))

    @pytest.mark.parametrize("dim", [64, 100, 130])
    def test_quantized_documents(self, backend, dim):
        query, document = self.tokens(dim=dim)
        stored = fastattn.Quantized.encode(document)
        got = fastattn.max_similarity(query, stored, document_lengths=self.LENGTHS, backend=backend)
        decoded = fastattn.max_similarity(
            query, stored.decode(), document_lengths=self.LENGTHS, backend=backend
        )
        assert_same_bits(got, decoded)
        packed = fastattn.Quantized.encode(document.reshape(-1, dim))
        offsets = np.arange(8) * 70
        whole = fastattn.max_similarity(query, stored, backend=backend)
        assert_same_bits(
            fastattn.max_similarity(query, packed, document_offsets=offsets, backend=backend), whole
        )

    @pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8])
    def test_packed_documents(self, backend, dtype):
        query, document = self.tokens(dtype)
        packed = np.concatenate([x[:n] for x, n in zip(document, self.LENGTHS, strict=True)])
        offsets = np.concatenate([[0], np.cumsum(self.LENGTHS)])
        assert_same_bits(
            fastattn.max_similarity(query, packed, document_offsets=offsets, backend=backend),
            fastattn.max_similarity(query, document, document_lengths=self.LENGTHS, backend=backend),
        )

    def test_tokens_past_the_lengths_are_not_read(self, backend):
        query, document = self.tokens()
        options = {"query_lengths": self.COUNTS, "document_lengths": self.LENGTHS, "backend": backend}
        expected = fastattn.max_similarity(query, document, **options)
        for tokens, lengths in ((query, self.COUNTS), (document, self.LENGTHS)):
            for row, n in zip(tokens, lengths, strict=True):
                row[n:] = np.nan
        assert_same_bits(fastattn.max_similarity(query, document, **options), expected)

    @pytest.mark.parametrize("where", [0, 31, 69])
    def test_nan_is_of_its_pair(self, backend, where):
        query, document = self.tokens()
        expected = fastattn.max_similarity(query, document, backend=backend)
        document[4, where, 7] = np.nan
        got = fastattn.max_similarity(query, document, backend=backend)
        assert np.isnan(got[:, 4]).all()
        others = np.arange(7) != 4
        assert_same_bits(got[:, others], expected[:, others])
        query[1, where % 40, 3] = np.nan
        got = fastattn.max_similarity(query, document, backend=backend)
        assert np.isnan(got[1]).all()
        assert_same_bits(got[::2, others], expected[::2, others])

    def test_infinities(self, backend):
        query, document = np.ones((1, 2, 3)), np.zeros((3, 2, 3))
        document[0, 1, 0], document[1, :, 0], document[2, 0, 0] = np.inf, -np.inf, -np.inf
        assert fastattn.max_similarity(query, document, backend=backend).tolist() == [[np.inf, -np.inf, 0]]

    @pytest.mark.parametrize("layout", MEMORY_LAYOUTS)
    @pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8], ids=lambda dtype: dtype.__name__)
    def test_memory_layouts(self, backend, layout, dtype):
        query, document = self.tokens(dtype)
        expected = fastattn.max_similarity(query, document, document_lengths=self.LENGTHS, backend=backend)
        given = (MEMORY_LAYOUTS[layout](x[:, None])[:, 0] for x in (query, document))
        got = fastattn.max_similarity(*given, document_lengths=self.LENGTHS, backend=backend)
        assert_same_bits(got, expected)

    def test_bits_depend_on_neither_threads_nor_others(self, backend):
        """More queries than a task has, and one that is longer."""
        rng = np.random.default_rng(1)
        document = rng.standard_normal((30, 100, 64), dtype=np.float32)
        for shape in ((90, 32, 64), (2, 1500, 64)):
            query = rng.standard_normal(shape, dtype=np.float32)
            counts = rng.integers(0, shape[1] + 1, shape[0])
            expected = fastattn.max_similarity(
                query, document, query_lengths=counts, num_threads=1, backend=backend
            )
            many = fastattn.max_similarity(
                query, document, query_lengths=counts, num_threads=5, backend=backend
            )
            assert_same_bits(many, expected)
            for q, n in ((0, 0), (1, 29), (shape[0] - 1, 7)):
                alone = fastattn.max_similarity(
                    query[q : q + 1, : counts[q]], document[n : n + 1], backend=backend
                )
                assert_same_bits(alone, expected[q : q + 1, n : n + 1])

    @pytest.mark.parametrize("shape", [(0, 4, 3, 5), (2, 0, 3, 5), (2, 4, 0, 5), (2, 4, 3, 0)])
    def test_empty(self, backend, shape):
        Q, T, N, tokens = shape
        got = fastattn.max_similarity(np.ones((Q, T, 6)), np.ones((N, tokens, 6)), backend=backend)
        assert got.shape == (Q, N)
        assert (got == (-np.inf if tokens == 0 else 6 * T)).all()


X = np.ones((2, 3, 4))
ERRORS = [
    (lambda: fastattn.reduce_scores(X, X, reduction="mean"), ValueError, "reduction must be one of 'max'"),
    (lambda: fastattn.reduce_scores(X, X, reduction="topk"), TypeError, "k must be"),
    (lambda: fastattn.reduce_scores(X, X, reduction="topk", k=0), ValueError, "k must be in 1"),
    (lambda: fastattn.reduce_scores(X, X, reduction="max", k=3), ValueError, 'k is for reduction="topk"'),
    (lambda: fastattn.reduce_scores(X, X, reduction="max", sinks=[1, 2]), ValueError, "sinks are for"),
    (lambda: fastattn.reduce_scores(X, X, X, reduction="max"), TypeError, "reduce_scores"),
    (lambda: fastattn.reduce_scores(X, X, reduction="max", dropout=0.5), TypeError, "dropout"),
    (
        lambda: fastattn.reduce_scores(X, X[..., :2], reduction="max"),
        ValueError,
        r"query \(2, 3, 4\), key \(2, 3, 2\)$",
    ),
    (
        lambda: fastattn.reduce_scores(X.astype(complex), X, reduction="max"),
        TypeError,
        "query has dtype complex",
    ),
    (lambda: fastattn.reduce_scores(X, X, reduction="max", num_threads=0), ValueError, "num_threads"),
    (
        lambda: fastattn.reduce_scores(X, X, reduction="max", backend="numba"),
        fastattn.BackendError,
        "reduce_scores",
    ),
    (lambda: fastattn.key_weights(X, fastattn.Quantized.encode(X)), TypeError, "key must be an array"),
    (lambda: fastattn.key_weights(X, X[:, :, :1]), ValueError, r"query \(2, 3, 4\), key \(2, 3, 1\)$"),
    (lambda: fastattn.key_weights(X, X, backend="numba"), fastattn.BackendError, "gradients"),
    (lambda: fastattn.max_similarity(X[0], X), ValueError, r"query must have shape \(Q, T, D\)"),
    (lambda: fastattn.max_similarity(X, X[0]), ValueError, r"document must have shape \(N, S, D\)"),
    (lambda: fastattn.max_similarity(X, X, document_offsets=[0, 3]), ValueError, r"\(total, D\)"),
    (lambda: fastattn.max_similarity(X, X[0], document_offsets=[0, 2]), ValueError, "must rise from 0"),
    (lambda: fastattn.max_similarity(X, X[..., :3]), ValueError, r"got 4 and 3; query \(2, 3, 4\), document"),
    (lambda: fastattn.max_similarity(X[..., :0], X[..., :0]), ValueError, "columns, got 0"),
    (
        lambda: fastattn.max_similarity(X, X, document_lengths=[1, 4]),
        ValueError,
        "document_lengths must be in 0..3, got 4",
    ),
    (
        lambda: fastattn.max_similarity(X, X, query_lengths=[-1, 3]),
        ValueError,
        "query_lengths must be in 0..3, got -1",
    ),
    (
        lambda: fastattn.max_similarity(X, X, query_lengths=[1.0, 3]),
        TypeError,
        "query_lengths must be integers",
    ),
    (
        lambda: fastattn.max_similarity(X, X, query_lengths=np.ones((2, 3), bool)),
        ValueError,
        r"query_lengths.sum\(-1\)",
    ),
    (
        lambda: fastattn.max_similarity(X, X[0], document_offsets=[0, 3], document_lengths=[3]),
        ValueError,
        "document_lengths are for padded documents",
    ),
    (
        lambda: fastattn.max_similarity(X.astype(np.float16), X.astype(ml_dtypes.bfloat16)),
        TypeError,
        "two 16-bit types",
    ),
    (lambda: fastattn.max_similarity(X, X.astype(str)), TypeError, "document has dtype"),
    (lambda: fastattn.max_similarity(X, X, backend="numba"), fastattn.BackendError, "max_similarity"),
]


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS)
def test_errors(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


MEMORY = (
    MEASURE
    + """
query, key = np.random.default_rng(0).standard_normal((2, 1, LENGTH, 16), dtype=np.float32)
few = np.s_[:, :64]
calls = {
    "topk": lambda q, k: fastattn.reduce_scores(q, k, reduction="topk", k=4, backend="{backend}"),
    "logsumexp": lambda q, k: fastattn.reduce_scores(q, k, reduction="logsumexp", backend="{backend}"),
    "key_weights": lambda q, k: fastattn.key_weights(q, k, backend="{backend}"),
}
call = calls["{name}"]
call(query[few], key[few])
print(extra(lambda: call(query[:, :{len_q}], key)))
"""
)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
@pytest.mark.parametrize("kind", ["cython", pytest.param("reference", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["topk", "logsumexp", "key_weights"])
def test_memory(kind, name):
    """The scores would take 4 GiB. The reference takes its queries in blocks, so the first 512, whose scores
    are 64 MiB, show it all; its gradients copy the keys, in float64 too."""
    script = MEMORY.replace("{backend}", kind).replace("{name}", name)
    extra = int(python(script.replace("{len_q}", "512" if kind == "reference" else "LENGTH")))
    limit = 2 * LIMIT if (kind, name) == ("reference", "key_weights") else LIMIT
    assert extra < limit, f"{extra / 2**20:.1f} MiB"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
@pytest.mark.parametrize("kind", ["cython", "reference"])
def test_documents_are_not_copied(kind):
    """In float32 they would take 64 MiB, and all products as much."""
    script = (
        MEASURE
        + f"""
query = np.ones((4, 32, 128), np.float16)
document = np.ones((512, 256, 128), np.float16)
fastattn.max_similarity(query, document[:2], backend="{kind}")
print(extra(lambda: fastattn.max_similarity(query, document, backend="{kind}")))
"""
    )
    extra = int(python(script))
    assert extra < LIMIT, f"{extra / 2**20:.1f} MiB"
