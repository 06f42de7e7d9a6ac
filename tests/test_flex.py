"""Scores and masks as Python functions: the README's gallery, what functions are given, and their errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fastattn
from fastattn import masks
from tests import naive
from tests.process import python
from tests.test_docs import blocks
from tests.tolerances import assert_answer, assert_same_bits

pytest.importorskip("numba")

L, S, D, B, H = 70, 70, 16, 2, 3


def gallery() -> dict[str, Callable[..., Any]]:
    """The functions that the README shows."""
    namespace: dict[str, Any] = {"np": np}
    exec(
        compile(next(code for code in blocks("python") if "def alibi" in code), "README.md", "exec"),
        namespace,
    )
    return {name: value for name, value in namespace.items() if isinstance(value, FunctionType)}


GALLERY = gallery()


def aux_of(name: str, dtype: Any = np.float64) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    is_global = np.zeros(S, bool)
    is_global[[0, 40]] = True
    return {
        "alibi": lambda: (2.0 ** -np.arange(1, H + 1, dtype=dtype),),
        "t5_bias": lambda: (
            np.minimum(np.abs(np.arange(-L, S)), 9),
            rng.standard_normal((10, H)).astype(dtype),
            L,
        ),
        "soft_cap": lambda: (2.0,),
        "distance_decay": lambda: (rng.random(S).astype(dtype), 20.0),
        "additive": lambda: tuple(rng.standard_normal(n).astype(dtype) for n in ((L, 4), (S, 4), 4)),
        "sliding_window": lambda: (10,),
        "prefix_lm": lambda: (np.array([5, 33]),),
        "documents": lambda: (np.repeat(np.arange(5), [10, 20, 5, 30, 5]),),
        "longformer": lambda: (7, is_global),
        "big_bird": lambda: (7, is_global, rng.random((9, 9)) < 0.2, 8),
        "dilated_window": lambda: (5, 3),
        "neighbourhood": lambda: (10, 2),
        "tree": lambda: (np.tri(L, 20, dtype=bool) & (rng.random((L, 20)) < 0.6), S - 20),
    }[name]()


SCORES = [name for name, function in GALLERY.items() if function.__code__.co_varnames[0] == "score"]
MASKS = [name for name in GALLERY if name not in SCORES]


def arrays(
    dtype: Any = np.float64, len_q: int = L, kv_heads: int = H, value_dim: int = D
) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(1)
    shapes = ((B, H, len_q, D), (B, kv_heads, S, D), (B, kv_heads, S, value_dim))
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def options_of(name: str, dtype: Any) -> dict[str, Any]:
    kind = "score_mod" if name in SCORES else "mask_mod"
    return {kind: GALLERY[name], "aux": aux_of(name, dtype)}


def oracle_options(name: str, dtype: Any) -> dict[str, Any]:
    function, aux = GALLERY[name], aux_of(name, dtype)
    if name in SCORES:
        return {"score_mod": lambda *arguments: function(*arguments, *aux)}
    return {"mask": in_python(function, aux, B, H, L, S)}


def in_python(function: Any, aux: Any, *shape: int) -> np.ndarray:
    return np.array([bool(function(*place, *aux)) for place in np.ndindex(*shape)]).reshape(shape)


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


def indices(score, b, h, q_idx, kv_idx):
    return score + 1.5 * b - 0.25 * h + 0.125 * q_idx - 0.0625 * kv_idx + 0.001 * q_idx * kv_idx


class TestWhatFunctionsAreGiven:
    @pytest.mark.parametrize("kv_heads", [3, 1])
    @pytest.mark.parametrize("len_q", [1, 2, 5, 8, 17, 70])
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_indices(self, dtype, len_q, kv_heads):
        """Each index, where rows are lanes and where they are few, with heads that share keys."""
        given = arrays(dtype, len_q, kv_heads, value_dim=5)
        results = fastattn.flex_attention(*given, score_mod=indices, return_lse=True, return_weights=True)
        options = {"score_mod": indices}
        assert_answer(results, naive.attention(*given, **options), naive.formula(*given, **options))

    def test_leading_axes_are_counted_flat(self):
        rng = np.random.default_rng(0)
        query = rng.standard_normal((2, 3, 2, 9, 4))
        key = rng.standard_normal((3, 2, 11, 4))
        table = rng.standard_normal(6)

        def by_item(score, b, h, q_idx, kv_idx, table):
            return score * table[b]

        def some(b, h, q_idx, kv_idx, table):
            return (table[b] > 0) | (kv_idx < 5)

        out = fastattn.flex_attention(query, key, key, score_mod=by_item, mask_mod=some, aux=(table,))
        for b, item in enumerate(np.ndindex(2, 3)):
            keys = key[item[1]]
            mask = np.full((9, 11), table[b] > 0) | (np.arange(11) < 5)
            alone = fastattn.attention(query[item], keys, keys, scale=table[b] / 2, mask=mask)
            np.testing.assert_allclose(out[item], alone, rtol=1e-12, atol=1e-13)

    def test_matrices_and_bshd(self):
        query, key, value = arrays()
        one = fastattn.flex_attention(query[0, 0], key[0, 0], value[0, 0], score_mod=indices)
        whole = fastattn.flex_attention(query, key, value, score_mod=indices)
        np.testing.assert_allclose(one, whole[0, 0], rtol=1e-12, atol=1e-13)
        swapped = [np.ascontiguousarray(array.swapaxes(1, 2)) for array in (query, key, value)]
        out = np.empty_like(swapped[0])
        got = fastattn.flex_attention(*swapped, score_mod=indices, layout="bshd", out=out)
        assert got is out
        assert_same_bits(np.ascontiguousarray(out.swapaxes(1, 2)), whole)

    def test_out_may_overlap_aux(self):
        given = arrays()
        table = np.random.default_rng(2).standard_normal((B, H, L, D))

        def shifted(score, b, h, q_idx, kv_idx, table):
            return score + table[b, h, q_idx, kv_idx % 16]

        expected = fastattn.flex_attention(*given, score_mod=shifted, aux=(table,))
        got = fastattn.flex_attention(*given, score_mod=shifted, aux=(table,), out=table)
        assert_same_bits(got, expected)

    @pytest.mark.parametrize(
        "kind", [np.float64, np.float32, np.float16, np.int8, np.uint64, bool, ">f8", ">i4"]
    )
    def test_aux_of_any_dtype(self, kind):
        table = (np.random.default_rng(0).random((H, S)) * 3).astype(kind)

        def added(score, b, h, q_idx, kv_idx, table):
            return score + table[h, kv_idx]

        got = fastattn.flex_attention(*arrays(), score_mod=added, aux=[table])
        expected = fastattn.attention(*arrays(), bias=table.astype(np.float64)[:, None])
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)

    @pytest.mark.parametrize(
        "cut", [(slice(None, None, -1), slice(None)), (slice(None), slice(None, None, 2))]
    )
    def test_strided_aux(self, cut):
        table = np.random.default_rng(0).standard_normal((H, 2 * S))[cut]

        def added(score, b, h, q_idx, kv_idx, table):
            return score + table[h, kv_idx]

        got = fastattn.flex_attention(*arrays(), score_mod=added, aux=[table])
        expected = fastattn.attention(*arrays(), bias=table[:, None, :S])
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)

    def test_aux_is_read_at_each_call(self):
        """Without another compilation, be it changed in place, another array or another number."""
        from fastattn.backends.jit.functions import loops

        table, known = np.zeros(H), None
        for slope in (0.0, 0.5, 3.0):
            table[:] = slope
            for aux in ((table,), (table.copy(),)):
                got = fastattn.flex_attention(*arrays(), score_mod=GALLERY["alibi"], aux=aux)
                known = known or len(loops)
                bias = -slope * np.abs(np.subtract.outer(np.arange(L), np.arange(S)))
                expected = fastattn.attention(*arrays(), bias=bias)
                np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)
                assert len(loops) == known

    def test_functions_that_differ_only_outside(self):
        def by_default(factor):
            def scaled(score, b, h, q_idx, kv_idx, factor=factor):
                return score * factor

            return scaled

        def in_closure(factor):
            def scaled(score, b, h, q_idx, kv_idx):
                return score * factor

            return scaled

        for factor in (2.0, 3.0):
            for function in (by_default(factor), in_closure(factor)):
                got = fastattn.flex_attention(*arrays(), score_mod=function)
                expected = fastattn.attention(*arrays(), scale=factor / 4)
                np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)

    def test_functions_over_arrays_that_are_gone(self):
        """Another array in the place of one that was freed is another array."""

        def over(factor):
            table = np.full(S, factor)
            return lambda score, b, h, q_idx, kv_idx: score * table[kv_idx]

        for factor in (1.0, 2.0, 3.0, 4.0):
            got = fastattn.flex_attention(*arrays(), score_mod=over(factor))
            expected = fastattn.attention(*arrays(), scale=factor / 4)
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)

    def test_compiled_functions(self):
        import numba

        @numba.njit
        def half(x):
            return x / 2

        @numba.njit
        def halved(score, b, h, q_idx, kv_idx):
            return half(score)

        @numba.njit
        def even(b, h, q_idx, kv_idx):
            return kv_idx % 2 == 0

        got = fastattn.flex_attention(*arrays(), score_mod=halved, mask_mod=even)
        expected = fastattn.attention(*arrays(), scale=1 / 8, mask=np.arange(S) % 2 == 0)
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)


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


class TestBlockMask:
    @pytest.mark.parametrize("shape", [(1, 1), (5, 3), (64, 128), (65, 129), (200, 300), (130, 31)])
    def test_says_what_the_function_says(self, shape):
        def odd(b, h, q_idx, kv_idx, far):
            return ((q_idx * 7 + kv_idx * 3 + h) % 5 < 2) & (abs(q_idx - kv_idx) < far) | (b == 1)

        block_mask = fastattn.create_block_mask(odd, 2, 3, *shape, aux=(40,))
        expected = in_python(odd, (40,), 2, 3, *shape)
        np.testing.assert_array_equal(block_mask.materialize(3, *shape), expected)
        np.testing.assert_array_equal((~block_mask).materialize(3, *shape), ~expected)
        tiles = block_mask.mask_map
        assert (tiles.index[1] == -1).all()

    @pytest.mark.parametrize("shape", [(1, 1), (70, 70), (65, 129), (300, 500), (500, 300)])
    @pytest.mark.parametrize("name", ["causal", "window", "documents", "nothing", "all", "by_item"])
    def test_one_interval_for_each_query_is_as_cheap_as_the_mask(self, name, shape):
        """Then it is one, and the bits are those of the mask object."""
        len_q, len_k = shape
        ids = np.arange(max(shape)) // 90
        function, mask = {
            "causal": (lambda b, h, i, j, ids: j <= i, masks.Causal("top_left")),
            "window": (lambda b, h, i, j, ids: abs(i - j) <= 20, masks.Window(20, 20, align="top_left")),
            "documents": (
                lambda b, h, i, j, ids: ids[i] == ids[j],
                masks.Segments(ids[:len_q], ids[:len_k]),
            ),
            "nothing": (lambda b, h, i, j, ids: False, masks.KeyLengths(0)),
            "all": (lambda b, h, i, j, ids: True, masks.KeyLengths(len_k)),
            "by_item": (lambda b, h, i, j, ids: j <= i + 3 * b, masks.Causal(offset=[0, 3])),
        }[name]
        block_mask = fastattn.create_block_mask(function, 2, 3, *shape, aux=(ids,))
        lowered = masks.lower(block_mask, (2,), 3, *shape)
        assert lowered.mask_map is None
        rng = np.random.default_rng(0)
        query, key = rng.standard_normal((2, 3, len_q, 8)), rng.standard_normal((2, 3, len_k, 8))
        got = fastattn.attention(query, key, key, mask=block_mask)
        assert_same_bits(got, fastattn.attention(query, key, key, mask=mask))

    def test_more_than_one_interval_stays_a_map(self):
        for function in (
            lambda b, h, i, j: (j < 3) | (j == i),
            lambda b, h, i, j: (j < 128) | (j >= 256),
            lambda b, h, i, j: j <= i + h,
        ):
            block_mask = fastattn.create_block_mask(function, None, 2, 400, 400)
            assert masks.lower(block_mask, (), 2, 400, 400).mask_map is not None

    def test_same_for_any_number_of_threads(self):
        options = {"aux": aux_of("big_bird")}
        one, three = (
            fastattn.create_block_mask(GALLERY["big_bird"], None, None, L, S, num_threads=n, **options)
            for n in (1, 3)
        )
        assert_same_bits(one.mask_map.index, three.mask_map.index)
        assert_same_bits(one.mask_map.bits, three.mask_map.bits)

    def test_one_plane_for_what_the_function_does_not_look_at(self):
        block_mask = fastattn.create_block_mask(GALLERY["sliding_window"], 4, 8, 300, 300, aux=(9,))
        assert block_mask.mask_map.index.shape[:2] == (1, 1)
        by_item = fastattn.create_block_mask(GALLERY["prefix_lm"], 2, 8, 300, 300, aux=(np.array([1, 2]),))
        assert by_item.mask_map.index.shape[:2] == (2, 1)

    def test_combines(self, backend):
        """With mask objects, and with what else masks, on every backend."""
        window = fastattn.create_block_mask(GALLERY["sliding_window"], None, None, L, S, aux=(9,))
        documents = fastattn.create_block_mask(GALLERY["documents"], B, H, L, S, aux=aux_of("documents"))
        allowed = {
            "window": in_python(GALLERY["sliding_window"], (9,), 1, 1, L, S)[0],
            "documents": in_python(GALLERY["documents"], aux_of("documents"), 1, 1, L, S)[0],
            "tokens": masks.GlobalTokens([0, 3]).materialize(1, L, S),
        }
        query, key, value = arrays()
        for mask, wanted in (
            (window & documents, allowed["window"] & allowed["documents"]),
            (window | masks.GlobalTokens([0, 3]), allowed["window"] | allowed["tokens"]),
            (~(window & documents), ~(allowed["window"] & allowed["documents"])),
            (documents & masks.KeyLengths([30, 60]), None),
        ):
            if wanted is None:
                wanted = allowed["documents"] & (np.arange(S) < np.array([30, 60])[:, None, None, None])
            expected = fastattn.attention(
                query, key, value, mask=wanted, bias=np.zeros(S), backend="reference"
            )
            got = backend.attention(query, key, value, mask=mask, bias=np.zeros(S))
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)
            again = fastattn.flex_attention(query, key, value, block_mask=mask, backend=backend.backend)
            np.testing.assert_allclose(again, expected, rtol=1e-12, atol=1e-13)

    def test_with_a_mask_function_beside(self):
        block_mask = fastattn.create_block_mask(
            GALLERY["documents"], None, None, L, S, aux=aux_of("documents")
        )
        got = fastattn.flex_attention(
            *arrays(), mask_mod=GALLERY["sliding_window"], aux=(9,), block_mask=block_mask, causal=True
        )
        mask = in_python(GALLERY["documents"], aux_of("documents"), 1, 1, L, S)
        expected = fastattn.attention(*arrays(), mask=mask, window=(9, None), causal=True)
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)

    def test_drawing(self):
        block_mask = fastattn.create_block_mask(lambda b, h, i, j: j <= i, None, None, 256, 256)
        assert str(block_mask).splitlines() == [repr(block_mask), "+.", "+.", "#+", "#+"]
        assert "25.0 %" in repr(block_mask)
        large = fastattn.create_block_mask(lambda b, h, i, j: j <= i, None, None, 20000, 20000)
        lines = str(large).splitlines()[1:]
        assert len(lines) <= 32
        assert max(map(len, lines)) <= 64

    def test_other_sizes_are_refused(self):
        block_mask = fastattn.create_block_mask(lambda b, h, i, j: j <= i, 3, None, L, S)
        with pytest.raises(ValueError, match=r"BlockMask\(B=3, .*B=2 batch items"):
            fastattn.attention(*arrays(), mask=block_mask)
        block_mask = fastattn.create_block_mask(lambda b, h, i, j: j <= i, None, None, L, S + 1)
        with pytest.raises(ValueError, match=f"S={S + 1}.*does not fit.*S={S}"):
            fastattn.attention(*arrays(), mask=block_mask)

    @pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
    def test_empty(self, shape):
        block_mask = fastattn.create_block_mask(lambda b, h, i, j: j <= i, None, None, *shape)
        query, key = np.ones((1, 1, shape[0], 4)), np.ones((1, 1, shape[1], 4))
        assert fastattn.attention(query, key, key, mask=block_mask).shape == (1, 1, shape[0], 4)
        assert str(block_mask)


class TestRules:
    """What holds of every call holds here."""

    @pytest.mark.parametrize("len_q", [3, L])
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_same_bits(self, dtype, len_q):
        given = arrays(dtype, len_q)
        options = {"score_mod": indices, "mask_mod": GALLERY["tree"], "aux": aux_of("tree")}

        def both(score, b, h, q_idx, kv_idx, *aux):
            return indices_compiled(score, b, h, q_idx, kv_idx)

        import numba

        indices_compiled = numba.njit(indices)
        options["score_mod"] = both
        expected = fastattn.flex_attention(*given, num_threads=1, **options)
        for num_threads in (2, 3):
            assert_same_bits(fastattn.flex_attention(*given, num_threads=num_threads, **options), expected)
        strided = [np.repeat(array, 2, axis=-1)[..., ::2] for array in given]
        assert_same_bits(fastattn.flex_attention(*strided, **options), expected)

    @pytest.mark.parametrize("len_q", [2, L])
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_what_a_score_masks_is_never_seen(self, dtype, len_q):
        def first_keys(score, b, h, q_idx, kv_idx):
            return score if kv_idx < 20 + q_idx else -math.inf

        query, key, value = arrays(dtype, len_q)
        expected = fastattn.flex_attention(query, key, value, score_mod=first_keys, return_weights=True)
        poisoned = [array.copy() for array in (key, value)]
        for array in poisoned:
            array[:, :, 19 + len_q :] = np.nan
        value_only = value.copy()
        value_only[:, :, 19 + len_q :] = np.inf
        for keys, values in ((poisoned[0], poisoned[1]), (key, value_only)):
            got = fastattn.flex_attention(query, keys, values, score_mod=first_keys, return_weights=True)
            for one, wanted in zip(got, expected, strict=True):
                assert_same_bits(one, wanted)
        # A value that some rows may read reaches those alone.
        value[:, :, 20] = np.nan
        got = fastattn.flex_attention(query, key, value, score_mod=first_keys)
        np.testing.assert_array_equal(
            np.isnan(got).any(-1), np.broadcast_to(np.arange(len_q) > 0, got.shape[:-1])
        )

    def test_rows_without_keys(self):
        def none(score, b, h, q_idx, kv_idx):
            return -math.inf if q_idx == 3 else score

        out, lse, weights = fastattn.flex_attention(
            *arrays(), score_mod=none, return_lse=True, return_weights=True
        )
        assert (out[:, :, 3] == 0).all()
        assert (lse[:, :, 3] == -np.inf).all()
        assert (weights[:, :, 3] == 0).all()
        assert np.isfinite(out).all()

    @pytest.mark.parametrize("len_q", [4, L])
    def test_nan_is_a_nan_score(self, len_q):
        def broken(score, b, h, q_idx, kv_idx):
            return math.nan if (q_idx == 2) & (kv_idx == 7) else score

        given = arrays(len_q=len_q)
        out = fastattn.flex_attention(*given, score_mod=broken)
        assert np.isnan(out[:, :, 2]).all()
        plain = fastattn.attention(*given)
        others = np.arange(len_q) != 2
        np.testing.assert_allclose(out[:, :, others], plain[:, :, others], rtol=1e-12, atol=1e-13)
        masked = fastattn.flex_attention(*given, score_mod=broken, block_mask=masks.Dense(np.arange(S) != 7))
        assert np.isfinite(masked).all()

    def test_with_the_other_options(self):
        rng = np.random.default_rng(3)
        bias, sinks = rng.standard_normal((H, L, S)), rng.standard_normal(H)
        options = {"softcap": 3.0, "bias": bias, "sinks": sinks, "window": (20, 10), "scale": 0.3}
        options["key_lengths"] = np.array([60, 70])
        aux = aux_of("alibi")
        results = fastattn.flex_attention(
            *arrays(), score_mod=GALLERY["alibi"], aux=aux, return_lse=True, return_weights=True, **options
        )
        options["score_mod"] = lambda *arguments: GALLERY["alibi"](*arguments, *aux)
        assert_answer(results, naive.attention(*arrays(), **options), naive.formula(*arrays(), **options))

    def test_memory_does_not_grow_with_scores(self):
        """A window's map over 16384 queries and keys, where one bit for each pair would be 32 MB."""
        block_mask = fastattn.create_block_mask(
            GALLERY["sliding_window"], None, None, 16384, 16384, aux=(256,)
        )
        assert block_mask.mask_map.index.nbytes + block_mask.mask_map.bits.nbytes < 2**21

    @pytest.mark.parametrize("name", ["alibi", "sliding_window"])
    def test_empty_sizes(self, name):
        for shape_q, shape_k in (
            ((2, 3, 0, 4), (2, 3, 5, 4)),
            ((2, 3, 5, 4), (2, 3, 0, 4)),
            ((0, 3, 5, 4),) * 2,
        ):
            out = fastattn.flex_attention(
                np.ones(shape_q), np.ones(shape_k), np.ones(shape_k), **options_of(name, np.float64)
            )
            assert out.shape == shape_q
            assert (out == 0).all()


def too_few(score, b):
    return score


def text(score, b, h, q_idx, kv_idx):
    return "score"


def nothing(score, b, h, q_idx, kv_idx):
    pass


def unsupported(score, b, h, q_idx, kv_idx):
    with open("file") as file:
        return file


def undefined(score, b, h, q_idx, kv_idx):
    more = score + 1
    return never_defined(more)  # noqa: F821


def raising(score, b, h, q_idx, kv_idx):
    if kv_idx > 3:
        raise ValueError("too far")
    return score


def asserting(score, b, h, q_idx, kv_idx):
    assert kv_idx < 3
    return score


def beyond(score, b, h, q_idx, kv_idx, table):
    return score + table[kv_idx]


class TestErrors:
    @pytest.mark.parametrize(
        ("function", "line", "said"),
        [
            (too_few, 0, "5 arguments"),
            (text, 0, "must return one real number"),
            (nothing, 0, "must return one real number"),
            (unsupported, 0, "not supported"),
            (undefined, None, "never_defined"),
            (raising, 2, "may raise"),
            (asserting, 1, "may raise"),
        ],
    )
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_names_the_function_and_the_line(self, function, line, said, dtype):
        out = np.full((B, H, L, D), 7, dtype)
        with pytest.raises((TypeError, ValueError)) as caught:
            fastattn.flex_attention(*arrays(dtype), score_mod=function, out=out)
        message = str(caught.value)
        assert len(message.splitlines()) == 3, message
        assert repr(function.__name__) in message
        assert said in message
        assert "test_flex.py" in message
        if line is not None:
            assert f"line {function.__code__.co_firstlineno + line}" in message
        assert (out == 7).all()

    @pytest.mark.parametrize(
        "function", [lambda b, h, i, j: i - j, lambda b, h, i, j: 1.0, lambda b, h, i, j: None]
    )
    def test_masks_are_bools(self, function):
        with pytest.raises(TypeError, match="must return a bool") as caught:
            fastattn.create_block_mask(function, None, None, L, S)
        assert len(str(caught.value).splitlines()) == 3
        with pytest.raises(TypeError, match="must return a bool"):
            fastattn.flex_attention(*arrays(), mask_mod=function)

    def test_the_whole_message_is_chained(self):
        with pytest.raises(TypeError) as caught:
            fastattn.flex_attention(*arrays(), score_mod=undefined)
        assert "nopython" in str(caught.value.__cause__)

    def test_an_index_outside_of_aux(self):
        with pytest.raises(
            IndexError, match=r"'beyond' reads outside of aux\[0\] of shape \(69,\)"
        ) as caught:
            fastattn.flex_attention(*arrays(), score_mod=beyond, aux=(np.zeros(S - 1),))
        assert "(b, h, q_idx, kv_idx) = (0, 0, 0, 69)" in str(caught.value)
        assert isinstance(caught.value.__cause__, IndexError)

        def outside(b, h, q_idx, kv_idx, table):
            return table[h, q_idx]

        with pytest.raises(IndexError, match="'outside' reads outside of"):
            fastattn.create_block_mask(outside, None, 4, L, S, aux=(np.zeros((3, L), bool),))

    @pytest.mark.parametrize(
        ("aux", "said"),
        [
            (5, "aux must be a tuple or list"),
            (np.zeros(3), "aux must be a tuple or list"),
            ((1j,), r"aux\[0\] must be .* complex128"),
            ((1, "a"), r"aux\[1\] must be"),
            ((np.zeros(3, object),), r"aux\[0\] must be .* object"),
        ],
    )
    def test_aux(self, aux, said):
        with pytest.raises(TypeError, match=said):
            fastattn.flex_attention(*arrays(), score_mod=GALLERY["alibi"], aux=aux)

    @pytest.mark.parametrize("name", ["score_mod", "mask_mod"])
    def test_not_a_function(self, name):
        with pytest.raises(TypeError, match=f"{name} must be a function, got int"):
            fastattn.flex_attention(*arrays(), **{name: 5})

    def test_not_a_mask(self):
        with pytest.raises(TypeError, match=r"block_mask must be a fastattn\.masks object, got ndarray"):
            fastattn.flex_attention(*arrays(), block_mask=np.ones((L, S), bool))

    @pytest.mark.parametrize(
        ("sizes", "kind"),
        [((1, 1, -1, 5), ValueError), ((1, 1, 5.0, 5), TypeError), ((1, True, 5, 5), TypeError)],
    )
    def test_sizes(self, sizes, kind):
        with pytest.raises(kind, match="must be a non-negative integer"):
            fastattn.create_block_mask(lambda b, h, i, j: j <= i, *sizes)

    def test_shapes_are_named(self):
        query, key, value = arrays()
        with pytest.raises(ValueError, match=r"^query and key must have the same head_dim, got .*; query "):
            fastattn.flex_attention(
                query[..., 1:], key, value, score_mod=GALLERY["alibi"], aux=aux_of("alibi")
            )

    def test_backends_that_cannot(self):
        with pytest.raises(fastattn.BackendError, match="score_mod"):
            fastattn.flex_attention(*arrays(), score_mod=indices, backend="reference")

    def test_without_numba(self):
        code = """
import sys
sys.modules["numba"] = None
import numpy as np, fastattn
x = np.ones((1, 1, 4, 4))
for call in (
    lambda: fastattn.flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: s),
    lambda: fastattn.flex_attention(x, x, x, mask_mod=lambda b, h, i, j: j <= i),
    lambda: fastattn.create_block_mask(lambda b, h, i, j: j <= i, None, None, 4, 4),
    lambda: fastattn.attention(x, x, x, backend="numba"),
):
    try:
        call()
    except fastattn.BackendError as error:
        print("fastattn[numba]" in str(error))
print(fastattn.flex_attention(x, x, x, block_mask=fastattn.masks.Causal()).shape)
"""
        assert python(code).split("\n")[:5] == ["True"] * 4 + ["(1, 1, 4, 4)"]
