"""`attention` on Dask arrays: any chunks give what `fastattn.attention` gives of the whole arrays."""

from __future__ import annotations

import pickle
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

import fastattn
from fastattn import masks
from fastattn.masks import base
from tests.cases import mask_pair, random_arrays
from tests.conftest import drawn
from tests.tolerances import assert_all_same, assert_attention, assert_gradients

da = pytest.importorskip("dask.array")
import dask  # noqa: E402
from dask.task_spec import DataNode  # noqa: E402

from fastattn.integrations.dask import attention, attention_backward  # noqa: E402

#: Problems are of 2 items, 4 heads on 2, 5 queries and 7 keys.
LEAD, HEADS, KV_HEADS, LEN_Q, LEN_K, DIM, VALUE_DIM = (2,), 4, 2, 5, 7, 8, 6
SCORES = (*LEAD, HEADS, LEN_Q, LEN_K)
RNG = np.random.default_rng(5)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_left": {"causal": "top_left"},
    "bottom_right": {"causal": "bottom_right"},
    "window": {"window": (2, 0)},
    "window_top_left": {"window": (1, 1), "causal": "top_left"},
    "lengths": {"key_lengths": np.array([3, 7])},
    "lengths_of_nothing": {"key_lengths": np.array([0, 1]), "causal": "bottom_right"},
    "window_and_lengths": {"window": (2, 1), "key_lengths": np.array([4, 6])},
    "causal_window_lengths": {"causal": "bottom_right", "window": (1, None), "key_lengths": [6, 7]},
    "mask": {"mask": RNG.random(SCORES) < 0.4},
    "mask_of_keys": {"mask": RNG.random((LEN_K,)) < 0.5, "causal": "bottom_right"},
    "bias": {"bias": RNG.standard_normal(SCORES).astype(np.float32), "softcap": 3.0},
    "bias_that_masks": {"bias": np.where(RNG.random((HEADS, 1, LEN_K)) < 0.5, -np.inf, 1.0)},
    "sinks": {"sinks": np.linspace(-1, 2, HEADS, dtype=np.float32), "scale": 0.7},
    "sinks_of_empty_rows": {
        "sinks": np.linspace(-1, 2, HEADS, dtype=np.float32),
        "key_lengths": np.array([0, 2]),
        "causal": "bottom_right",
    },
}
#: What may be a Dask array.
LAZY = ("mask", "bias", "key_lengths", "sinks")


def problem(name: str = "plain", **sizes: Any) -> tuple[list[np.ndarray], dict[str, Any]]:
    shape = {
        "lead": LEAD, "heads": HEADS, "kv_heads": KV_HEADS, "len_q": LEN_Q, "len_k": LEN_K,
        "head_dim": DIM, "value_dim": VALUE_DIM,
    }  # fmt: skip
    return list(random_arrays(**(shape | sizes))), OPTIONS[name]


def divided(*arrays: np.ndarray, chunks: Any = (1, 2, 3, -1)) -> list[Any]:
    """Dask arrays with these chunks of the last axes."""
    return [da.from_array(x, chunks[len(chunks) - x.ndim :]) for x in arrays]


def computed(results: Any) -> Any:
    return dask.compute(*results, scheduler="synchronous")


def backward(
    call: Any, grad_out: Any, arrays: Any, wrt: Any = ("query", "key", "value"), **options: Any
) -> Any:
    out, lse = attention(*arrays, return_lse=True, **options)
    return call(grad_out, *arrays, out, lse, wrt=wrt, **options)


def compositions(n: int) -> list[tuple[int, ...]]:
    """Every way to divide an axis."""
    if n == 0:
        return [()]
    return [(first, *rest) for first in range(1, n + 1) for rest in compositions(n - first)]


class TestParity:
    @pytest.mark.parametrize("name", OPTIONS)
    @pytest.mark.parametrize(
        "chunks", [(1, 2, 3, -1), (2, 4, 2, -1), (-1, -1, -1, -1), (1, 2, 1, -1)], ids=str
    )
    def test_every_option(self, chunks: Any, name: str) -> None:
        arrays, options = problem(name)
        results = attention(*divided(*arrays, chunks=chunks), return_lse=True, **options)
        assert_attention(computed(results), *arrays, **options)

    @pytest.mark.parametrize("name", [n for n, options in OPTIONS.items() if set(options) & set(LAZY)])
    def test_options_that_are_dask_arrays(self, name: str) -> None:
        arrays, options = problem(name)
        lazy = {n: da.from_array(np.asarray(x), -1) if n in LAZY else x for n, x in options.items()}
        results = attention(*divided(*arrays), return_lse=True, **lazy)
        assert_attention(computed(results), *arrays, **options)

    @pytest.mark.parametrize("name", ["segments_any_order", "dense_integer_per_head", "and_dense", "window"])
    def test_masks_of_many_tiles(self, name: str) -> None:
        """With chunks whose bounds are none of the tiles'; among them a map of tiles itself."""
        arrays = random_arrays(lead=(2,), heads=2, len_q=150, len_k=290, head_dim=4)
        pair = mask_pair(name, 2, 2, 150, 290)
        expected = fastattn.attention(*arrays, mask=pair.allowed)
        tiles = base.lower(masks.Dense(pair.allowed) | masks.Dense(pair.allowed), (2,), 2, 150, 290).mask_map
        for mask in (pair.mask, masks.BlockMask(tiles, 2, 2, 150, 290)):
            out = attention(*divided(*arrays, chunks=(1, 1, 70, -1)), mask=mask)
            np.testing.assert_allclose(out.compute(scheduler="synchronous"), expected, atol=2e-6)

    def test_block_masks_of_fewer_planes(self) -> None:
        """Made for all items and heads, of functions that do not depend on them."""
        pytest.importorskip("numba")
        arrays = random_arrays(lead=(2,), heads=4, len_q=70, len_k=140, head_dim=4)
        for function in (
            lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 3 < 2,
            lambda b, h, q_idx, kv_idx: (q_idx + kv_idx + h) % 3 < 2,
            lambda b, h, q_idx, kv_idx: (q_idx + kv_idx + b) % 3 < 2,
        ):
            mask = fastattn.create_block_mask(function, 2, 4, 70, 140)
            expected = fastattn.attention(*arrays, mask=mask)
            out = attention(*divided(*arrays, chunks=(1, 2, 30, -1)), mask=mask)
            np.testing.assert_allclose(out.compute(scheduler="synchronous"), expected, atol=2e-6)

    @pytest.mark.slow
    def test_every_division_of_queries_and_keys(self) -> None:
        arrays, _ = problem(len_q=4, len_k=5)
        options = {"causal": "bottom_right", "key_lengths": [3, 5], "sinks": np.zeros(HEADS, np.float32)}
        for queries, keys in product(compositions(4), compositions(5)):
            query = da.from_array(arrays[0], (1, 4, queries, -1))
            key, value = (da.from_array(x, (2, 1, keys, -1)) for x in arrays[1:])
            results = attention(query, key, value, return_lse=True, **options)
            assert results[0].chunks[-2] == queries
            assert_attention(computed(results), *arrays, **options)

    @drawn(12, 60, data=st.data())
    def test_any_chunks(self, data: Any) -> None:
        """Of each array its own, also where they do not fit together."""
        name = data.draw(st.sampled_from(sorted(OPTIONS)))
        arrays, options = problem(name)
        chunks = [tuple(data.draw(st.sampled_from(compositions(n))) for n in x.shape) for x in arrays]
        given_arrays = [da.from_array(x, own) for x, own in zip(arrays, chunks, strict=True)]
        results = attention(*given_arrays, return_lse=True, **options)
        assert_attention(computed(results), *arrays, **options)

    @pytest.mark.parametrize("dtype", ["float64", "int32", ">f4"])
    def test_types(self, dtype: str) -> None:
        arrays, _ = problem()
        arrays = [(3 * x).astype(dtype) for x in arrays]
        out, lse = attention(*divided(*arrays), causal="bottom_right", return_lse=True)
        results = computed((out, lse))
        wanted = fastattn.attention(*arrays, causal="bottom_right").dtype
        assert out.dtype == lse.dtype == results[0].dtype == results[1].dtype == wanted
        assert_attention(results, *(x.astype(wanted) for x in arrays), causal="bottom_right")

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_16_bits_are_rounded_once(self, dtype: str) -> None:
        """Merged in float32, so that almost every element is the one nearest to the exact one."""
        ml_dtypes = pytest.importorskip("ml_dtypes")
        dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
        arrays = [x.astype(dtype) for x in random_arrays(len_q=64, len_k=64, head_dim=32)]
        out, lse = attention(*divided(*arrays, chunks=(1, 16, -1)), return_lse=True)
        exact = fastattn.attention(*(x.astype(np.float64) for x in arrays)).astype(dtype)
        found, found_lse = computed((out, lse))
        assert out.dtype == found.dtype == dtype
        assert lse.dtype == found_lse.dtype == np.float32
        assert (found == exact).mean() > 0.995

    def test_one_head_and_no_batch(self) -> None:
        arrays, _ = problem()
        for flat in ([x[0, 0] for x in arrays], [x[0] for x in arrays]):
            results = attention(*divided(*flat, chunks=(2, 3, -1)), return_lse=True, causal="bottom_right")
            assert_attention(computed(results), *flat, causal="bottom_right")

    def test_heads_inside(self) -> None:
        arrays, options = problem("causal_window_lengths")
        swapped = [x.swapaxes(-3, -2) for x in arrays]
        lazy = divided(*swapped, chunks=(1, 3, 2, -1))
        results = attention(*lazy, layout="bshd", return_lse=True, **options)
        assert_attention(computed(results), *swapped, layout="bshd", **options)

    @pytest.mark.parametrize(
        ("heads", "kv_heads", "wanted"),
        [
            ((1, 1, 1, 1), (2,), (2, 2)),
            ((3, 1), (2,), (4,)),
            ((4,), (1, 1), (2, 2)),
            ((1, 3), (1, 1), (2, 2)),
        ],
    )
    def test_heads_are_divided_between_groups(self, heads: Any, kv_heads: Any, wanted: Any) -> None:
        arrays, _ = problem()
        query = da.from_array(arrays[0], (2, heads, 3, -1))
        key, value = (da.from_array(x, (2, kv_heads, 3, -1)) for x in arrays[1:])
        results = attention(query, key, value, return_lse=True)
        assert results[0].chunks[1] == results[1].chunks[1] == wanted
        assert_attention(computed(results), *arrays)

    def test_axes_that_broadcast(self) -> None:
        query, key, value = random_arrays(lead=(2, 3), len_q=5, len_k=6)
        arrays = [query, key[:, :1], value[0]]
        bias = RNG.standard_normal((3, 1, 1, 6)).astype(np.float32)
        lazy = [da.from_array(x, (1,) * (x.ndim - 2) + (2, -1)) for x in arrays]
        results = attention(*lazy, bias=bias, return_lse=True)
        assert_attention(computed(results), *arrays, bias=bias)

    def test_lengths_that_are_dask_arrays_where_only_value_has_the_batch(self) -> None:
        arrays = random_arrays(lead=(2,), len_q=5, len_k=6)
        arrays = [array[:1] for array in arrays[:2]] + [arrays[2]]
        lengths = np.array([2, 6])
        results = attention(
            *divided(*arrays, chunks=(-1, -1, -1, -1)),
            key_lengths=da.from_array(lengths, chunks=-1),
            return_lse=True,
        )
        assert_attention(computed(results), *arrays, key_lengths=lengths)

    @pytest.mark.parametrize("empty", ["lead", "heads", "len_q", "len_k", "value_dim"])
    def test_sizes_of_0(self, empty: str) -> None:
        size: Any = (0,) if empty == "lead" else 0
        sizes = {empty: size} | ({"kv_heads": 0} if empty == "heads" else {})
        arrays, _ = problem(**sizes)
        for chunks in ((1, 2, 3, -1), (-1, -1, -1, -1)):
            results = computed(attention(*divided(*arrays, chunks=chunks), return_lse=True))
            assert_attention(results, *arrays)
            assert results[0].shape == fastattn.attention(*arrays).shape

    def test_chunks_of_size_0(self) -> None:
        arrays, _ = problem("sinks")
        query = da.from_array(arrays[0], ((0, 2), 4, (2, 0, 3), -1))
        key, value = (da.from_array(x, ((0, 2), 2, (0, 3, 4, 0), -1)) for x in arrays[1:])
        for options in ({}, {"causal": "bottom_right"}):
            results = attention(query, key, value, return_lse=True, **options)
            assert tasks(results[0]) == 4
            assert_attention(computed(results), *arrays, **options)

    def test_a_masked_key_is_never_seen(self) -> None:
        arrays, _ = problem()
        expected = attention(*divided(*arrays), key_lengths=[4, 4]).compute(scheduler="synchronous")
        for x in arrays[1:]:
            x[..., 4:, :] = np.nan
        for lengths in (np.array([4, 4]), da.from_array(np.array([4, 4]), 1)):
            found = attention(*divided(*arrays), key_lengths=lengths).compute(scheduler="synchronous")
            np.testing.assert_array_equal(found, expected)

    def test_nan_reaches_the_rows_that_read_it(self) -> None:
        (query, key, value), _ = problem()
        query[0, 1, 2], key[0, 0, 3], value[1, 1, 5, 0] = np.nan, np.nan, np.nan
        results = computed(attention(*divided(query, key, value), causal="bottom_right", return_lse=True))
        assert_attention(results, query, key, value, causal="bottom_right")
        assert 0 < np.isnan(results[1]).sum() < results[1].size / 2


class TestGradients:
    @pytest.mark.parametrize("name", OPTIONS)
    @pytest.mark.parametrize("chunks", [(1, 2, 3, -1), (2, 4, 2, -1)], ids=str)
    def test_every_option(self, chunks: Any, name: str) -> None:
        arrays, options = problem(name)
        grad_out = RNG.standard_normal((*SCORES[:-1], VALUE_DIM)).astype(np.float32)
        lazy = divided(grad_out, *arrays, chunks=chunks)
        found = backward(attention_backward, lazy[0], lazy[1:], **options)
        found = fastattn.Gradients(*computed(found[:3]), None, None)
        assert_gradients(found, grad_out, *arrays, wrt=("query", "key", "value"), **options)

    @pytest.mark.parametrize("layout", ["bhsd", "bshd"])
    def test_of_lse_and_lengths_that_are_dask_arrays(self, layout: str) -> None:
        arrays, options = problem("window_and_lengths")
        grad_out = RNG.standard_normal((*SCORES[:-1], VALUE_DIM)).astype(np.float32)
        grad_lse = RNG.standard_normal(SCORES[:-1]).astype(np.float32)
        if layout == "bshd":
            grad_out, *arrays = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (grad_out, *arrays))
        options = options | {"layout": layout}
        lazy = divided(grad_out, *arrays, chunks=(1, 2, 2, -1))
        lengths = da.from_array(options["key_lengths"], 1)
        shared = options | {"key_lengths": lengths}
        out, lse = attention(*lazy[1:], return_lse=True, **shared)
        found = attention_backward(*lazy, out, lse, grad_lse=da.from_array(grad_lse), **shared)
        found = fastattn.Gradients(*computed(found[:3]), None, None)
        found = fastattn.Gradients(*(None if x is None else np.ascontiguousarray(x) for x in found))
        assert_gradients(
            found, grad_out, *arrays, grad_lse=grad_lse, wrt=("query", "key", "value"), **options
        )

    def test_axes_that_broadcast(self) -> None:
        query, key, value = random_arrays(lead=(2, 3), len_q=5, len_k=6)
        arrays = [query, key[:, :1], value[0]]
        grad_out = RNG.standard_normal((2, 3, 2, 5, 16)).astype(np.float32)
        lazy = [da.from_array(x, (1,) * (x.ndim - 2) + (2, -1)) for x in (grad_out, *arrays)]
        found = backward(attention_backward, lazy[0], lazy[1:], causal="bottom_right")
        found = fastattn.Gradients(*computed(found[:3]), None, None)
        assert_gradients(found, grad_out, *arrays, wrt=("query", "key", "value"), causal="bottom_right")

    def test_of_one_head(self) -> None:
        arrays = [x[0, 0] for x in problem()[0]]
        grad_out = RNG.standard_normal((LEN_Q, VALUE_DIM)).astype(np.float32)
        lazy = divided(grad_out, *arrays, chunks=(2, -1))
        found = backward(attention_backward, lazy[0], lazy[1:], wrt="key")
        assert found.query is found.value is found.bias is found.sinks is None
        found = fastattn.Gradients(None, *computed([found.key]), None, None, None)
        assert_gradients(found, grad_out, *arrays, wrt=("key",))

    def test_16_bits_are_rounded_once(self) -> None:
        arrays = [x.astype(np.float16) for x in random_arrays(len_q=64, len_k=64)]
        grad_out = RNG.standard_normal((2, 64, 16)).astype(np.float16)
        lazy = divided(grad_out, *arrays, chunks=(1, 8, -1))
        found = backward(attention_backward, lazy[0], lazy[1:])
        wide = [x.astype(np.float64) for x in arrays]
        out, lse = fastattn.attention(*wide, return_lse=True)
        rounded = out.astype(np.float16), lse.astype(np.float32)
        exact = fastattn.attention_backward(grad_out, *wide, *rounded)
        for lazy_one, one, wanted in zip(found[:3], computed(found[:3]), exact[:3], strict=True):
            assert lazy_one.dtype == one.dtype == np.float16
            assert (one == wanted.astype(np.float16)).mean() > 0.98

    def test_of_integers(self) -> None:
        arrays = [(2 * x).astype(np.int32) for x in problem()[0]]
        grad_out = np.ones((*SCORES[:-1], VALUE_DIM))
        lazy = divided(grad_out, *arrays)
        found = backward(attention_backward, lazy[0], lazy[1:])
        assert [x.dtype for x in found[:3]] == [x.dtype for x in computed(found[:3])] == [np.float64] * 3


def tasks(result: Any, prefix: str = "attention-piece") -> int:
    """How many tasks of a graph compute attention or gradients."""
    graph = result.__dask_graph__()
    return sum(isinstance(key, tuple) and str(key[0]).startswith(prefix) for key in graph)


def long_arrays(n: int = 64, chunk: int = 8, heads: int = 1, **more: Any) -> list[Any]:
    arrays = random_arrays(heads=heads, len_q=n, len_k=n, head_dim=4, **more)
    return divided(*arrays, chunks=(1, 1, chunk, -1))


class TestTasks:
    @pytest.mark.parametrize(
        ("options", "wanted"),
        [
            ({}, 64),
            ({"causal": True}, 36),
            ({"causal": "bottom_right"}, 36),
            ({"window": (0, 0)}, 8),
            ({"window": (8, 0)}, 15),  # the first query of a chunk reads the first key of the one before
            ({"window": (9, 0)}, 8 + 7 + 6),
            ({"causal": True, "window": (8, 0)}, 15),
            ({"key_lengths": 16}, 16),
            ({"key_lengths": 17}, 24),
            ({"causal": "bottom_right", "key_lengths": 16}, 2 + 1),  # the last 16 queries read
            ({"mask": masks.Segments(np.arange(64) // 16)}, 16),
            ({"mask": masks.Window(0, 0) | masks.GlobalTokens([0])}, 8 + 7 + 7),
            ({"mask": np.kron(np.eye(8), np.ones((8, 8))).astype(bool)}, 8),
            ({"mask": masks.Segments(np.tile(np.arange(8), 8))}, 64),
            ({"mask": masks.Segments(np.arange(64) % 2 * 64 + np.arange(64) // 8)}, 8),
            ({"mask": np.zeros(64, bool)}, 0),
        ],
        ids=str,
    )
    def test_only_what_the_mask_leaves(self, options: dict, wanted: int) -> None:
        arrays = long_arrays()
        result = attention(*arrays, **options)
        assert tasks(result) == wanted
        mask = options.get("mask")
        if isinstance(mask, masks.Mask):
            options = {"mask": mask.materialize(1, 64, 64)[0]}
        plain = fastattn.attention(*(x.compute() for x in arrays), **options)
        np.testing.assert_allclose(result.compute(scheduler="synchronous"), plain, atol=2e-6)

    def test_of_each_item(self) -> None:
        arrays = long_arrays(lead=(3,))
        result = attention(*arrays, key_lengths=[0, 8, 64])
        assert tasks(result) == 8 + 64
        assert tasks(attention(*arrays, causal=True)) == 3 * 36

    def test_lengths_that_are_dask_arrays(self) -> None:
        """Only what no lengths leave has no task."""
        arrays = long_arrays()
        lengths = da.from_array(np.array(16))
        assert tasks(attention(*arrays, causal="bottom_right", key_lengths=lengths)) == 36
        assert tasks(attention(*arrays, window=(0, 0), key_lengths=lengths)) == 36
        assert tasks(attention(*arrays, window=(0, 0), causal=True, key_lengths=lengths)) == 8

    def test_of_gradients(self) -> None:
        arrays = long_arrays()
        found = backward(attention_backward, arrays[0], arrays, window=(0, 0))
        assert tasks(found.key, "attention-backward") == 8
        found = backward(attention_backward, arrays[0], arrays, key_lengths=8)
        assert tasks(found.key, "attention-backward") == 8
        assert not computed([found.key])[0][0, 8:].any()

    def test_a_part_of_the_result_needs_its_own_tasks_alone(self) -> None:
        result = attention(*long_arrays(), causal=True)[:, 8:16]
        with dask.config.set({"optimization.fuse.active": False}):
            assert tasks(*dask.optimize(result)) == 2

    def test_a_mask_array_is_cut(self) -> None:
        """No task holds more of it than its own chunk, and heads share one."""
        allowed = RNG.random((1024, 1024)) < 0.5
        arrays = long_arrays(1024, 256, heads=3)
        result = attention(*arrays, mask=allowed)
        graph = result.__dask_graph__()
        held = [x for x in graph.values() if isinstance(x, DataNode) and isinstance(x.value, masks.Mask)]
        assert len(held) == 16
        assert max(len(pickle.dumps(x)) for x in held) < 256 * 256 + 2000
        others = [x for key, x in graph.items() if str(key[0]).startswith("attention-piece")]
        assert max(len(pickle.dumps(x)) for x in others) < 4000

    @pytest.mark.parametrize("name", ["segments_any_order_per_item", "dense_integer_per_head", "and_of_or"])
    def test_mask_objects_are_cut(self, name: str) -> None:
        pair = mask_pair(name, 2, 2, 1024, 1024)
        arrays = random_arrays(lead=(2,), len_q=1024, len_k=1024, head_dim=4)
        graph = attention(*divided(*arrays, chunks=(1, 1, 128, -1)), mask=pair.mask).__dask_graph__()
        ours = [
            x for key, x in graph.items() if str(key[0]).startswith(("attention-piece", "attention-mask"))
        ]
        assert max(len(pickle.dumps(x)) for x in ours) < 128 * 128 * 2 + 4000

    def test_names_are_those_of_the_arguments(self) -> None:
        """Equal calls are computed once, others are not taken for them."""
        arrays = long_arrays()
        one = attention(*arrays, mask=masks.Window(3, 0) & masks.NotSelf())
        assert one.name == attention(*arrays, mask=masks.Window(3, 0) & masks.NotSelf()).name
        others = [
            attention(*arrays, mask=masks.Window(2, 0) & masks.NotSelf()),
            attention(*arrays, mask=masks.Window(3, 0) & masks.NotSelf().shifted(0, 1)),
            attention(*arrays, mask=masks.Window(3, 0) & masks.NotSelf(), scale=2.0),
        ]
        assert len({one.name, *(x.name for x in others)}) == 4


class TestLaziness:
    def test_nothing_is_read_at_build_time(self) -> None:
        read: list[str] = []

        def made(shape: tuple[int, ...], dtype: Any, name: str) -> np.ndarray:
            read.append(name)
            return np.ones(shape, dtype)

        def lazy(name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
            parts = dask.delayed(made)(shape, dtype, name)
            whole = da.from_delayed(parts, shape, dtype)
            return whole.rechunk(
                tuple(min(n, 2) if axis < len(shape) - 1 else -1 for axis, n in enumerate(shape))
            )

        arrays = [lazy(n, x.shape) for n, x in zip(("query", "key", "value"), problem()[0], strict=True)]
        options = {
            "mask": lazy("mask", SCORES, bool),
            "bias": lazy("bias", SCORES),
            "key_lengths": lazy("key_lengths", LEAD, np.int64),
            "sinks": lazy("sinks", (HEADS,)),
            "causal": "bottom_right",
        }
        out, lse = attention(*arrays, return_lse=True, **options)
        gradients = attention_backward(lazy("grad_out", out.shape), *arrays, out, lse, **options)
        assert read == []
        computed(gradients[:3])
        assert set(read) == {"query", "key", "value", "mask", "bias", "key_lengths", "grad_out"} | {"sinks"}

    def test_skipped_chunks_are_never_made(self) -> None:
        def made(block: np.ndarray, block_info: Any = None) -> np.ndarray:
            assert block_info[0]["chunk-location"][-2] < 2, "a chunk that nobody reads"
            return block

        arrays = long_arrays()
        key, value = (x.map_blocks(made, dtype=x.dtype, meta=x) for x in arrays[1:])
        attention(arrays[0], key, value, key_lengths=16).compute(scheduler="synchronous")
        with pytest.raises(AssertionError, match="nobody reads"):
            attention(arrays[0], key, value, key_lengths=17).compute(scheduler="synchronous")


def all_results() -> list[Any]:
    """Outputs and gradients of a problem of several chunks along every axis."""
    arrays = random_arrays(lead=(2,), heads=4, kv_heads=2, len_q=60, len_k=70, head_dim=8)
    lazy = divided(*arrays, chunks=(1, 2, 16, -1))
    options = {
        "mask": masks.Window(30, 4) | masks.Dense(RNG.random((60, 70)) < 0.1),
        "key_lengths": [70, 41],
        "sinks": np.linspace(-1, 1, 4, dtype=np.float32),
    }
    out, lse = attention(*lazy, return_lse=True, **options)
    return [out, lse, *attention_backward(lazy[0], *lazy, out, lse, **options)[:3]]


class TestSchedulers:
    @pytest.mark.slow
    def test_bits_are_those_of_the_chunks(self) -> None:
        lazy = all_results()
        expected = dask.compute(*lazy, scheduler="synchronous")
        others = [
            dask.compute(*lazy, scheduler="threads", num_workers=4),
            [x.compute(scheduler="synchronous") for x in lazy],
            dask.compute(*lazy, scheduler="synchronous", optimize_graph=False),
        ]
        for found in others:
            assert_all_same(found, expected)

    @pytest.mark.slow
    def test_processes(self) -> None:
        lazy = all_results()
        expected = dask.compute(*lazy, scheduler="synchronous")
        found = dask.compute(*lazy, scheduler="processes", num_workers=2)
        assert_all_same(found, expected)

    @pytest.mark.slow
    @pytest.mark.parametrize("workers", [1, 2, 4])
    def test_distributed(self, workers: int) -> None:
        distributed = pytest.importorskip("distributed")
        lazy = all_results()
        expected = dask.compute(*lazy, scheduler="synchronous")
        with (
            distributed.LocalCluster(
                n_workers=workers, threads_per_worker=1, dashboard_address=":0", processes=True
            ) as cluster,
            distributed.Client(cluster) as client,
        ):
            found = client.gather(client.compute(lazy))
        assert_all_same(found, expected)

    def test_tasks_are_pickled(self) -> None:
        graph = dict(all_results()[0].__dask_graph__())
        again = pickle.loads(pickle.dumps(graph))
        assert again.keys() == graph.keys()


class TestRefused:
    @pytest.mark.parametrize(
        ("changed", "error", "words"),
        [
            ({"query": np.ones((2, 4, 5, 8))}, TypeError, "query must be a dask.array.Array, got ndarray"),
            ({"mask": da.ones((5, 7))}, TypeError, "mask must be .* got dtype float64; .* use bias="),
            ({"bias": da.ones((5, 7), dtype=int)}, TypeError, "bias must be a float16"),
            ({"bias": (np.ones((5, 7)),) * 2}, TypeError, "bias must be one array here, got tuple"),
            (
                {"bias": fastattn.biases.Relative([1.0])},
                TypeError,
                "bias must be one array here, got Relative",
            ),
            ({"scale": np.ones(2)}, TypeError, "scale must be one number here"),
            ({"bias": da.ones((5, 8))}, ValueError, r"bias of shape \(5, 8\) does not broadcast"),
            ({"key_lengths": [3, 8]}, ValueError, "key_lengths must be in 0..S=7, got 8"),
            (
                {"key_lengths": da.ones(3, dtype=int)},
                ValueError,
                "key_lengths of shape .* does not broadcast",
            ),
            ({"sinks": da.ones(3)}, ValueError, r"sinks must have shape \(H,\)"),
            ({"causal": True}, ValueError, "causal=True needs L == S, got L=5 and S=7"),
            ({"softcap": -1}, ValueError, "softcap must be positive"),
            ({"window": (1, -1)}, ValueError, "window: right must be a non-negative"),
            ({"mask": masks.Segments(np.arange(4))}, ValueError, "mask Segments.* is for L=4"),
            ({"layout": "bsd"}, ValueError, "layout must be"),
            ({"query": da.ones((2, 3, 5, 8))}, ValueError, "heads of query must be a multiple"),
            ({"dropout": 0.1}, TypeError, "dropout"),
        ],
        ids=str,
    )
    def test_arguments(self, changed: dict, error: type, words: str) -> None:
        arrays = dict(zip(("query", "key", "value"), divided(*problem()[0]), strict=True))
        with pytest.raises(error, match=words) as raised:
            attention(**(arrays | changed))
        if error is ValueError:
            assert "query (2, " in str(raised.value)

    def test_chunks_of_unknown_size(self) -> None:
        arrays = divided(*problem()[0])
        unknown = arrays[1][:, :, da.from_array(np.ones(7, bool))]
        with pytest.raises(ValueError, match="key has chunks of unknown size"):
            attention(arrays[0], unknown, arrays[2])

    def test_lengths_that_are_found_to_be_wrong(self) -> None:
        lengths = da.from_array(np.array([3, 8]))
        with pytest.raises(ValueError, match=r"key_lengths must be in 0\.\.S=7, got 8"):
            attention(*divided(*problem()[0]), key_lengths=lengths).compute(scheduler="synchronous")

    def test_of_gradients(self) -> None:
        arrays = divided(*problem()[0])
        out, lse = attention(*arrays, return_lse=True)
        call = partial(attention_backward, out, *arrays)
        with pytest.raises(ValueError, match="wrt must name some of query, key, value, got 'bias'"):
            call(out, lse, wrt=("query", "bias"))
        with pytest.raises(ValueError, match=r"lse must have shape \(2, 4, 5\), got \(2, 4, 4\)"):
            call(out, lse[..., 1:])
        with pytest.raises(TypeError, match=r"grad_lse must be a dask\.array\.Array, got ndarray"):
            call(out, lse, grad_lse=np.ones(lse.shape))
