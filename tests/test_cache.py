"""`KVCache` against a plain model: the rows of each item in a list, and `attention` on them as arrays."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import fastattn
from fastattn._api import prepared
from fastattn._cache import pages as _cache_pages
from fastattn._cache.pages import PagePool, PageShape
from tests.conftest import USABLE, Engine
from tests.process import python
from tests.refusals import assert_named
from tests.tolerances import assert_attention, assert_same_bits

K, H, D, E = 2, 4, 70, 12
STORAGES = [
    "float32", "float64", "float16", "bfloat16", "int8",
    ("float32", "int8"), ("int8", "bfloat16"), ("float64", "float32"), ("float32", "float16"),
]  # fmt: skip
WINDOWS = {"no_window": {}, "window": {"window": 5}, "kept_first": {"window": 7, "keep_first": 3}}


@pytest.fixture(params=[name for name in USABLE if name != "numba"])  # which refuses keys in pages
def backend(request):
    return Engine(request.param)


@pytest.fixture(params=[True, False], ids=["compiled", "by_numpy"])
def writer(request, monkeypatch):
    """How rows are written to pages."""
    if not request.param:
        monkeypatch.setattr(_cache_pages, "write_page_rows", None)
        monkeypatch.setattr("fastattn._cache.store.IS_COMPILED", False)
    elif not _cache_pages.IS_COMPILED:
        pytest.skip("no extension")


@pytest.fixture
def poison(monkeypatch):
    """Memory that was never written, and pages that are free again, hold NaN."""

    def fill(page):
        for part in page:
            if part is not None:
                part[...] = 99 if part.dtype == np.int8 else np.nan

    def empty(shape, pages):
        slab = new(shape, pages)
        fill(slab)
        return slab

    def release(pool, numbers):
        old = set(pool._free)
        freed(pool, numbers)
        for number in set(pool._free) - old:
            fill(pool.page(number))

    new, freed = PageShape.empty, PagePool._release
    monkeypatch.setattr(PageShape, "empty", empty)
    monkeypatch.setattr(PagePool, "_release", release)


def pair(storage):
    key, value = storage if isinstance(storage, tuple) else (storage, storage)
    return as_dtype(key), as_dtype(value)


def as_dtype(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def decoded(rows, dtype):
    """What a storage makes of rows, of which int8 is worked out number by number."""
    if dtype != np.int8:
        return rows.astype(dtype)
    result = np.empty(rows.shape, np.float32)
    for start in range(0, rows.shape[-1], 64):
        group = rows[..., start : start + 64]
        for at in np.ndindex(group.shape[:-1]):
            scale = np.float32(max(abs(x) for x in group[at]) / group.dtype.type(127))
            for n, x in enumerate(group[at]):
                result[(*at, start + n)] = np.float32(np.rint(x / group.dtype.type(scale))) * scale
    return result


class Model:
    """The tokens of each item, all of them."""

    def __init__(self, batch, storage, window=None, keep_first=0):
        self.dtypes, self.window, self.keep_first = pair(storage), window, keep_first
        dims = (D, E)
        self.items = [
            [
                decoded(np.zeros((K, 0, dim), np.float32), dtype)
                for dim, dtype in zip(dims, self.dtypes, strict=True)
            ]
            for _ in range(batch)
        ]

    def append(self, key, value, lengths):
        for item, *rows, n in zip(range(len(self.items)), key, value, lengths, strict=True):
            for part in range(2):
                new = decoded(rows[part][:, :n], self.dtypes[part])
                self.items[item][part] = np.concatenate([self.items[item][part], new], axis=1)

    def truncate(self, lengths):
        for item, n in zip(self.items, lengths, strict=True):
            item[:] = [rows[:, :n] for rows in item]

    def select(self, items):
        other = copy.copy(self)
        other.items = [list(self.items[item]) for item in items]
        return other

    @property
    def lengths(self):
        return [item[0].shape[1] for item in self.items]

    def allowed(self, item, len_q):
        """Which keys the last queries of an item see."""
        n = self.lengths[item]
        position = np.arange(len_q)[:, None] + n - len_q
        j = np.arange(n)
        seen = j <= position
        if self.window is not None:
            seen &= (j > position - self.window) | (j < self.keep_first)
        return seen

    def check(self, cache, query, backend):
        """All that the cache says, against this."""
        assert cache.lengths.tolist() == self.lengths
        retained = cache.retained
        for b, rows in enumerate(self.items):
            for got, expected in zip((cache.keys(b), cache.values(b)), rows, strict=True):
                if retained[b]:
                    expected = np.concatenate(
                        [expected[:, : self.keep_first], expected[:, retained[b] :]], axis=1
                    )
                assert got.dtype == expected.dtype
                np.testing.assert_array_equal(got, expected)
        if query.size and query.shape[2] > max(self.lengths):
            with pytest.raises(ValueError, match=r"the cache is empty|, the longest, has \d+, got L="):
                cache.attend(query, return_lse=True, backend=backend.backend)
            return
        out, lse = cache.attend(query, return_lse=True, backend=backend.backend)
        for b, (key, value) in enumerate(self.items):
            if self.window is None:
                expected = backend.attention(query[b], key, value, causal="bottom_right", return_lse=True)
                assert out.dtype == expected[0].dtype
                assert_same_bits(np.ascontiguousarray(out[b]), expected[0])
                assert_same_bits(np.ascontiguousarray(lse[b]), expected[1])
            elif query.shape[2]:
                mask = self.allowed(b, query.shape[2])
                wide = (np.float64 if rows.dtype == np.float64 else np.float32 for rows in (key, value))
                arrays = (rows.astype(dtype) for rows, dtype in zip((key, value), wide, strict=True))
                assert_attention((out[b], lse[b]), query[b], *arrays, mask=mask)


def random_rows(rng, batch, T, dtype=np.float32):
    key, value = rng.standard_normal((batch, K, T, D)), rng.standard_normal((batch, K, T, E))
    return key.astype(dtype), value.astype(dtype)


def random_query(rng, batch, L, dtype=np.float32):
    return rng.standard_normal((batch, H, L, D)).astype(dtype)


def program(seed, storage, window, page_size, backend, tmp_path, n_steps):
    """Operations at random on caches that share pages, each checked against its model."""
    rng = np.random.default_rng(seed)
    options = {"window": None, "keep_first": 0, **window}
    rollback = int(rng.integers(0, 9))
    first = fastattn.KVCache(2, K, D, E, dtype=storage, page_size=page_size, rollback=rollback, **window)
    caches = [(first, Model(2, storage, **options), [0, 0])]
    del first
    for _ in range(n_steps):
        at = int(rng.integers(len(caches)))
        cache, model, greatest = caches[at]
        batch = len(model.items)
        operation = rng.choice(
            ["append", "append", "step", "step", "truncate", "fork", "select", "file", "del"]
        )
        if operation in ("append", "step"):
            T = int(rng.choice([0, 1, 1, 1, 2, 3, 9]))
            key, value = random_rows(rng, batch, T)
            lengths = np.full(batch, T)
            given = {}
            if rng.random() < 0.4:
                lengths = rng.integers(0, T + 1, batch)
                given = {"lengths": lengths}
                for b, n in enumerate(lengths):
                    key[b, :, n:] = value[b, :, n:] = np.nan
            if operation == "step":
                L = int(any(model.lengths) or lengths.any())  # without any token there is no query
                cache.step(random_query(rng, batch, L), key, value, **given, backend=backend.backend)
            else:
                cache.append(key, value, **given)
            model.append(key, value, lengths)
            greatest[:] = np.maximum(greatest, model.lengths)
        elif operation == "truncate":
            least = np.zeros(batch, int)
            if model.window is not None:
                least = np.where(cache.retained > 0, cache.retained + model.window, 0)
                assert all(least <= np.maximum(0, np.array(greatest) - rollback))
            lengths = rng.integers(np.minimum(least, model.lengths), np.array(model.lengths) + 1)
            cache.truncate(lengths)
            model.truncate(lengths)
        elif operation == "fork" and len(caches) < 4:
            caches.append((cache.fork(), model.select(range(batch)), list(greatest)))
        elif operation == "select" and len(caches) < 4:
            items = rng.integers(0, batch, int(rng.integers(0, 4))) if batch else []
            caches.append((cache.select(items), model.select(items), [greatest[b] for b in items]))
        elif operation == "file":
            path = tmp_path / f"{seed}.safetensors"
            cache.save(path)
            caches[at] = (fastattn.KVCache.load(path, mmap=bool(rng.integers(2))), model, greatest)
        elif operation == "del" and len(caches) > 1:
            del caches[at]
        del cache
        for cache, model, greatest in caches:
            L = 1 if model.window is not None and rng.random() < 0.7 else int(rng.integers(0, 4))
            query = random_query(rng, len(model.items), L)
            try:
                model.check(cache, query, backend)
            except ValueError as error:
                lasts = np.array(greatest) - rollback  # a query from there on has its whole window
                if model.window is None or "gone" not in str(error) or (cache.lengths - L >= lasts).all():
                    raise


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("page_size", [pytest.param(1, marks=pytest.mark.slow), 3, 64])
def test_random_programs(backend, storage, window, page_size, poison, tmp_path):
    seed = 1000 * page_size + 10 * STORAGES.index(storage) + list(WINDOWS).index(window)
    operations = 12 if backend.backend == "reference" else 25
    program(seed, storage, WINDOWS[window], page_size, backend, tmp_path, operations)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_many_random_programs(backend, seed, poison, tmp_path):
    storage = STORAGES[seed % len(STORAGES)]
    window = WINDOWS[list(WINDOWS)[seed % len(WINDOWS)]]
    operations = 20 if backend.backend == "reference" else 120
    program(10**6 + seed, storage, window, 1 + seed % 7, backend, tmp_path, operations)


# History ------------------------------------------------------------------------------------------


def histories(key, value, settings, tmp_path):
    """The same tokens, which came about in several ways."""
    batch, n = key.shape[0], key.shape[2]

    def new(**others):
        return fastattn.KVCache(batch, K, D, E, **{**settings, **others})

    def in_parts(cache, parts):
        at = 0
        for part in parts:
            cache.append(key[:, :, at : at + part], value[:, :, at : at + part])
            at += part
        return cache

    yield in_parts(new(), [n])
    yield in_parts(new(page_size=64), [1] * n)
    yield in_parts(new(page_size=7), [n // 2, n - n // 2])
    detour = in_parts(new(page_size=16), [n - 3])
    detour.append(-key[:, :, :3], -value[:, :, :3])
    detour.truncate(n - 3)
    detour.append(key[:, :, n - 3 :], value[:, :, n - 3 :])
    yield detour
    base = in_parts(new(page_size=32), [n - 1])
    other = base.fork()
    other.append(-key[:, :, :1], -value[:, :, :1])
    base.append(key[:, :, n - 1 :], value[:, :, n - 1 :])
    yield base
    twice = base.select([*range(batch), *range(batch)][::-1]).select(range(batch - 1, -1, -1))
    yield twice
    base.save(tmp_path / "cache")
    yield fastattn.KVCache.load(tmp_path / "cache")
    yield fastattn.KVCache.load(tmp_path / "cache", mmap=True)


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("window", [{}, {"window": 40}, {"window": 100, "keep_first": 4}], ids=str)
@pytest.mark.parametrize("len_q", [1, 5, 40])
def test_history_changes_no_bit(backend, storage, window, len_q, tmp_path):
    rng = np.random.default_rng(5)
    key, value = random_rows(rng, 2, 700)
    query = random_query(rng, 2, len_q)
    settings = {"dtype": storage, **window}
    results = [
        cache.attend(query, return_lse=True, backend=backend.backend)
        for cache in histories(key, value, settings, tmp_path)
    ]
    for out, lse in results[1:]:
        assert_same_bits(out, results[0][0])
        assert_same_bits(lse, results[0][1])


def test_other_items_change_no_bit(backend):
    rng = np.random.default_rng(6)
    key, value = random_rows(rng, 3, 300)
    query = random_query(rng, 3, 2)
    cache = fastattn.KVCache(3, K, D, E)
    cache.append(key, value, lengths=[300, 3, 0])
    together = cache.attend(query, backend=backend.backend)
    for b, n in enumerate([300, 3, 0]):
        alone = fastattn.KVCache(1, K, D, E)
        alone.append(key[b : b + 1, :, :n], value[b : b + 1, :, :n])
        if not n:
            assert not together[b].any()
            continue
        assert_same_bits(alone.attend(query[b : b + 1], backend=backend.backend)[0], together[b])


def test_steps_are_attention_on_all_so_far(backend):
    """Over the lengths at which prepared calls change."""
    rng = np.random.default_rng(7)
    n_tokens = 120 if backend.backend == "reference" else 300
    key, value = random_rows(rng, 1, n_tokens)
    for window in (None, 30):
        cache = fastattn.KVCache(1, K, D, E, window=window, page_size=16, rollback=2)
        whole = fastattn.KVCache(1, K, D, E, window=window, page_size=300)
        for n in range(n_tokens):
            query = random_query(rng, 1, 1)
            got = cache.step(query, key[:, :, n : n + 1], value[:, :, n : n + 1], backend=backend.backend)
            whole.append(key[:, :, n : n + 1], value[:, :, n : n + 1])
            assert_same_bits(got, whole.attend(query, backend=backend.backend))
            if window is None:
                rows = key[:, :, : n + 1], value[:, :, : n + 1]
                assert_same_bits(got, backend.attention(query, *rows, causal="bottom_right"))


# Options ------------------------------------------------------------------------------------------

OPTIONS = {
    "scale": {"scale": 0.3, "softcap": 5.0},
    "sinks": {"sinks": np.linspace(-1, 1, H, dtype=np.float32)},
    "window": {"window": (9, None)},
    "cross": {"causal": False},
    "mask": {"mask": fastattn.masks.GlobalTokens([0, 3]) | fastattn.masks.Window(4, 4)},
    "bias": {"bias": np.linspace(-2, 2, 21, dtype=np.float32)},
    "weights": {"return_weights": True, "return_lse": True},
    "mean_weights": {"return_weights": "mean", "return_lse": True},
    "threads": {"num_threads": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_options_are_those_of_attention(backend, name, layout):
    rng = np.random.default_rng(8)
    options = OPTIONS[name]
    key, value = random_rows(rng, 2, 21)
    query = random_query(rng, 2, 3)
    expected = backend.attention(
        query, key, value, key_lengths=[21, 8], **{"causal": "bottom_right", **options}
    )
    if layout == "bshd":
        query, key, value = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (query, key, value))
    cache = fastattn.KVCache(2, K, D, E, page_size=8, layout=layout)
    cache.append(key, value, lengths=[21, 8])
    for _ in range(2):  # and as a prepared call
        got = cache.attend(query, backend=backend.backend, **options)
        got, wanted = (x if isinstance(x, tuple) else (x,) for x in (got, expected))
        for n, (a, b) in enumerate(zip(got, wanted, strict=True)):
            assert_same_bits(np.ascontiguousarray(a.swapaxes(1, 2)) if layout == "bshd" and not n else a, b)
    assert got[0].flags.c_contiguous


def test_out(backend):
    rng = np.random.default_rng(9)
    cache = fastattn.KVCache(1, K, D, E)
    cache.append(*random_rows(rng, 1, 9))
    query, out = random_query(rng, 1, 2), np.empty((1, H, 2, E), np.float32)
    assert cache.attend(query, out=out, backend=backend.backend) is out
    assert_same_bits(out, cache.attend(query, backend=backend.backend))


def test_the_narrower_window_holds(backend):
    rng = np.random.default_rng(10)
    key, value = random_rows(rng, 1, 30)
    query = random_query(rng, 1, 2)
    cache = fastattn.KVCache(1, K, D, E, window=9)
    cache.append(key, value)
    for window, left in (((4, 7), 4), ((99, None), 8), ((None, 0), 8)):
        got = cache.attend(query, window=window, backend=backend.backend)
        np.testing.assert_allclose(
            got,
            backend.attention(query, key, value, window=(left, 0), causal="bottom_right"),
            rtol=1e-4,
            atol=1e-5,
        )


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("query_dtype", [np.float64, np.float32, np.float16, np.int32, ">f4"], ids=str)
def test_dtypes_promote_as_in_attention(backend, storage, query_dtype):
    rng = np.random.default_rng(11)
    cache = fastattn.KVCache(1, K, D, E, dtype=storage, page_size=4)
    cache.append(*random_rows(rng, 1, 10))
    query = (random_query(rng, 1, 2) * 3).astype(query_dtype)
    if query_dtype == np.float16 and "bfloat16" in str(storage):
        with pytest.raises(TypeError, match="16-bit"):
            cache.attend(query, backend=backend.backend)
        return
    rows = cache.keys(0), cache.values(0)
    int8 = [dtype == np.int8 for dtype in pair(storage)]
    given = [fastattn.Quantized.encode(x) if q else x for x, q in zip(rows, int8, strict=True)]
    expected = backend.attention(
        query[0][None], *(x if q else x[None] for x, q in zip(given, int8, strict=True))
    )
    got = cache.attend(query, causal=False, backend=backend.backend)
    assert got.dtype == expected.dtype
    if not any(int8):
        assert_same_bits(got, expected)


# Storage ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["float64", "float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize(
    "given",
    [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int64, np.int8, np.bool_, ">f4"],
    ids=str,
)
def test_rows_of_any_dtype_and_strides_are_stored(storage, given, writer):
    rng = np.random.default_rng(12)
    dtype = as_dtype(storage)
    for scale in (1, 1e-45, 1e-38, 1e38, 1e-310, 1e300, 6e4, 1e-7):
        with np.errstate(all="ignore"):
            rows = (rng.standard_normal((1, K, 6, D)) * scale).astype(given)
        wide = rows.astype(
            np.float64 if np.dtype(given).kind in "iu" or np.dtype(given).itemsize == 8 else np.float32
        )
        is_number = np.dtype(given).kind in "iub"
        if not is_number:
            rows[0, 0, 1, 3], rows[0, 1, 2, 5], rows[0, 1, 3, 66] = np.nan, np.inf, -np.inf
            wide[0, 0, 1, 3], wide[0, 1, 2, 5], wide[0, 1, 3, 66] = np.nan, np.inf, -np.inf
        cache = fastattn.KVCache(1, K, D, dtype=storage, page_size=4)
        views = rows, rows[:, ::-1, ::-1, ::-1]
        cache.append(*views)
        cache.append(*views[::-1])
        back = (slice(None), slice(None, None, -1), slice(None, None, -1), slice(None, None, -1))
        with np.errstate(all="ignore"):
            if storage == "int8":
                expected, other = (fastattn.Quantized.encode(x).decode() for x in (wide, wide[back]))
            else:
                expected, other = rounded_once(wide, dtype), rounded_once(wide[back], dtype)
        for got in (cache.keys(0), cache.values(0)):
            wanted = np.concatenate([expected, other], axis=2)[0]
            assert got.dtype == wanted.dtype
            # In float64, for NumPy knows no NaN of bfloat16.
            np.testing.assert_array_equal(got.astype(np.float64), wanted.astype(np.float64))
            expected, other = other, expected


def rounded_once(wide, dtype):
    if dtype.name != "bfloat16" or wide.dtype != np.float64:
        return wide.astype(dtype)
    # Through float32 it would be rounded twice. Scaling by powers of two is exact.
    unit = np.ldexp(1.0, np.maximum(np.frexp(wide)[1], -125) - 8)
    return (np.rint(wide / unit) * unit).astype(dtype)


def test_float64_is_rounded_to_16_bits_once(writer):
    """Not by way of float32, where this is halfway between two numbers of bfloat16, and rounds to even."""
    rows = np.full((1, 1, 1, 1), 1 + 2.0**-8 + 2.0**-40)
    for storage, expected in (("bfloat16", 1 + 2.0**-7), ("float16", 1 + 2.0**-8)):
        cache = fastattn.KVCache(1, 1, 1, dtype=storage)
        cache.append(rows, -rows)
        assert cache.keys(0).item() == expected
        assert cache.values(0).item() == -expected
    cache = fastattn.KVCache(1, 1, 1, dtype="float16")
    cache.append(np.full((1, 1, 1, 1), 1 + 2.0**-11 + 2.0**-40), rows)
    assert cache.keys(0).item() == 1 + 2.0**-10


def test_int8_is_within_half_a_step():
    rng = np.random.default_rng(13)
    key, value = random_rows(rng, 1, 50)
    cache = fastattn.KVCache(1, K, D, E, dtype="int8")
    cache.append(key, value)
    step = np.repeat(np.abs(key[..., :64]).max(-1, keepdims=True), 64, axis=-1) / 127
    assert np.all(np.abs(cache.keys(0) - key[0])[..., :64] <= step[0] * 0.5001)


def test_bytes_of_a_token():
    for storage, nbytes in (("float64", 8), ("float32", 4), ("float16", 2), ("bfloat16", 2)):
        cache = fastattn.KVCache(1, 3, 64, 128, dtype=storage, page_size=16)
        cache.append(np.ones((1, 3, 17, 64)), np.ones((1, 3, 17, 128)))
        assert cache.nbytes == 2 * 16 * 3 * (64 + 128) * nbytes
    cache = fastattn.KVCache(1, 3, 64, 65, dtype="int8", page_size=16)
    cache.append(np.ones((1, 3, 16, 64)), np.ones((1, 3, 16, 65)))
    assert cache.nbytes == 16 * 3 * (64 + 65 + 4 + 8)


# Memory -------------------------------------------------------------------------------------------


def pages_in_use(cache):
    """Pages of its pool that some cache holds, once what is gone is counted."""
    pool = cache._pool
    pool.release(np.array(pool.take(1)))
    return pool._holders.size - 1 - len(pool._free)


def test_growth_copies_nothing():
    """10**5 tokens, and 1000 more one by one."""
    key = np.zeros((1, 1, 10**5, 8), np.float32)
    cache = fastattn.KVCache(1, 1, 8)
    for start in range(0, 10**5, 1000):
        cache.append(key[:, :, start : start + 1000], key[:, :, start : start + 1000])
    held = cache.nbytes
    assert 2 * key.nbytes <= held <= 2 * key.nbytes * 1.01
    slabs = sum(part.nbytes for slab in cache._pool._slabs for part in slab if part is not None)
    assert slabs <= 1.6 * held
    tracemalloc.start()
    try:
        for _ in range(1000):
            cache.append(key[:, :, :1], key[:, :, :1])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # At most one more slab, of half of what there is; tables and odds and ends beside it.
    assert peak <= slabs / 2 + 2**18
    assert cache.lengths.tolist() == [101_000]


def test_a_window_bounds_memory():
    rng = np.random.default_rng(14)
    cache = fastattn.KVCache(2, K, D, E, window=100, keep_first=5, rollback=10, page_size=16)
    key, value = random_rows(rng, 2, 1)
    for _ in range(1000):
        cache.append(key, value)
    # The kept rows' page, and those that hold the window, the rollback and the row after it.
    assert cache.nbytes <= 2 * (1 + (100 + 10) // 16 + 2) * cache._pool.page_nbytes
    assert pages_in_use(cache) * cache._pool.page_nbytes == cache.nbytes
    assert cache.retained.tolist() == [1000 - 10 - 100] * 2


def test_an_item_that_got_nothing_still_shares_its_page():
    rng = np.random.default_rng(22)
    key, value = random_rows(rng, 2, 6)
    cache = fastattn.KVCache(2, K, D, E, page_size=64)
    cache.append(key[:, :, :3], value[:, :, :3])
    fork = cache.fork()
    for it, n in ((cache, 3), (fork, 4)):
        it.append(key[:, :, :1], value[:, :, :1], lengths=[1, 0])
        it.append(key[:, :, n : n + 1], value[:, :, n : n + 1])
    for it, n in ((cache, 3), (fork, 4)):
        np.testing.assert_array_equal(it.keys(1), key[1][:, [0, 1, 2, n]])


@pytest.mark.parametrize("rollback", [0, 9, 40])
def test_a_page_goes_as_soon_as_no_row_of_it_is_held(rollback):
    rng = np.random.default_rng(23)
    key, value = random_rows(rng, 1, 1)
    cache = fastattn.KVCache(1, K, D, E, window=6, rollback=rollback, page_size=8)
    for n in range(1, 120):
        cache.append(key, value)
        first = int(cache.retained[0])
        assert first == max(0, min(n - 1, n - rollback) - 6)
        assert cache.nbytes == (-(-n // 8) - first // 8) * cache._pool.page_nbytes


def test_forks_share_pages_until_one_writes():
    rng = np.random.default_rng(15)
    key, value = random_rows(rng, 2, 40)
    cache = fastattn.KVCache(2, K, D, E, page_size=16)
    cache.append(key, value)
    alone = cache.nbytes
    fork = cache.fork()
    assert fork.nbytes == cache.nbytes == alone
    assert pages_in_use(cache) == 6
    fork.append(key[:, :, :1], value[:, :, :1])  # both items' last pages
    assert pages_in_use(cache) == 8
    cache.append(key[:, :, :1], value[:, :, :1])
    assert pages_in_use(cache) == 8
    twice = cache.select([0, 0, 0])
    assert twice.nbytes == 3 * cache._pool.page_nbytes
    del fork, twice
    gc.collect()
    assert pages_in_use(cache) == 6
    cache.truncate([17, 0])
    assert cache.nbytes == 2 * cache._pool.page_nbytes
    assert pages_in_use(cache) == 2


def test_spare_rows_of_a_shared_page_belong_to_nobody():
    """Appends in place stop at a fork."""
    rng = np.random.default_rng(16)
    key, value = random_rows(rng, 1, 6)
    cache = fastattn.KVCache(1, K, D, E, page_size=64)
    for n in range(3):
        fork = cache.fork()
        cache.append(key[:, :, n : n + 1], value[:, :, n : n + 1])
        assert cache._ids[0, 0] != fork._ids[0, 0]
        fork.append(key[:, :, 4:5], value[:, :, 4:5])
        np.testing.assert_array_equal(cache.keys(0)[:, n], key[0, :, n])
        np.testing.assert_array_equal(fork.keys(0)[:, n], key[0, :, 4])


def test_a_new_cache_holds_nothing_yet():
    rng = np.random.default_rng(16)
    key, value = random_rows(rng, 1, 1)
    cache = fastattn.KVCache(1, K, D, E)
    assert cache.nbytes == 0
    cache.append(key, value)
    assert cache.nbytes == cache._pool.page_nbytes
    cache.truncate(0)
    assert cache.nbytes == pages_in_use(cache) == 0


# All or nothing -----------------------------------------------------------------------------------


def snapshot(cache):
    return (
        cache.lengths.tolist(),
        cache.retained.tolist(),
        cache.nbytes,
        pages_in_use(cache),
        [cache.keys(b).tobytes() + cache.values(b).tobytes() for b in range(len(cache.lengths))],
    )


BAD_STEPS = {
    "query of another head_dim": lambda q, k, v: ((q[..., 1:], k, v), {}),
    "query of another batch": lambda q, k, v: ((q[:1], k, v), {}),
    "query of strings": lambda q, k, v: ((q.astype(str), k, v), {}),
    "key of another head_dim": lambda q, k, v: ((q, k[..., 1:], v), {}),
    "key and value of other lengths": lambda q, k, v: ((q, k, v[:, :, 1:]), {}),
    "complex value": lambda q, k, v: ((q, k, v.astype(complex)), {}),
    "lengths": lambda q, k, v: ((q, k, v), {"lengths": [1, 99]}),
    "mask": lambda q, k, v: ((q, k, v), {"mask": np.ones((3, 3), bool)}),
    "float mask": lambda q, k, v: ((q, k, v), {"mask": np.ones(1)}),
    "option": lambda q, k, v: ((q, k, v), {"softcap": -1.0}),
    "unknown option": lambda q, k, v: ((q, k, v), {"key_lengths": [1, 2]}),
    "causal": lambda q, k, v: ((q, k, v), {"causal": "top_left"}),
    "out": lambda q, k, v: ((q, k, v), {"out": np.empty(3)}),
    "backend": lambda q, k, v: ((q, k, v), {"backend": "abacus"}),
}


@pytest.mark.parametrize("name", BAD_STEPS)
@pytest.mark.parametrize("window", [None, 6])
def test_a_bad_step_appends_nothing(name, window):
    rng = np.random.default_rng(17)
    cache = fastattn.KVCache(2, K, D, E, page_size=4, window=window, rollback=1)
    cache.append(*random_rows(rng, 2, 11))
    fork = cache.fork()
    for T in (1, 2, 9):
        before = snapshot(cache)
        arguments, options = BAD_STEPS[name](random_query(rng, 2, 1), *random_rows(rng, 2, T))
        with pytest.raises((TypeError, ValueError)):
            cache.step(*arguments, **options)
        assert snapshot(cache) == before
    query, (key, value) = random_query(rng, 2, 1), random_rows(rng, 2, 1)
    assert_same_bits(cache.step(query, key, value), fork.step(query, key, value))


def test_an_append_without_memory_appends_nothing(monkeypatch):
    rng = np.random.default_rng(18)
    cache = fastattn.KVCache(2, K, D, E, page_size=4)
    cache.append(*random_rows(rng, 2, 3))
    before = snapshot(cache)

    def full(shape, pages):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(PageShape, "empty", full)
        with pytest.raises(MemoryError):
            cache.append(*random_rows(rng, 2, 999))
    assert snapshot(cache) == before


# Limits -------------------------------------------------------------------------------------------


def test_truncate_reaches_back_rollback_tokens():
    rng = np.random.default_rng(19)
    for rollback in (0, 3, 64):
        cache = fastattn.KVCache(2, K, D, E, window=5, rollback=rollback, page_size=4)
        for _ in range(100):
            cache.append(*random_rows(rng, 2, 1), lengths=[1, 0])
        other = cache.fork()
        cache.truncate([100 - rollback, 0])
        assert cache.lengths.tolist() == [100 - rollback, 0]
        cache.attend(random_query(rng, 2, 1))
        least = int(other.retained[0]) + 5
        with pytest.raises(
            ValueError, match=rf"item 0 can be truncated to {least} at least, got {least - 1}"
        ):
            other.truncate([least - 1, 0])
        assert other.lengths.tolist() == [100, 0]
        other.truncate([least, 0])
        # From the greatest length that there was, not the present one.
        other.append(*random_rows(rng, 2, 1), lengths=[1, 0])
        other.truncate([least, 0])


def test_truncate_beyond_the_length():
    cache = fastattn.KVCache(2, K, D, E)
    cache.append(np.zeros((2, K, 3, D)), np.zeros((2, K, 3, E)))
    for lengths in ([3, 4], 9, [-1, 0]):
        with pytest.raises(ValueError, match=r"lengths: item [01] has 3 tokens"):
            cache.truncate(lengths)
    with pytest.raises(TypeError, match="lengths"):
        cache.truncate(1.5)
    with pytest.raises(ValueError, match=r"lengths of shape \(3,\) does not broadcast"):
        cache.truncate([1, 1, 1])


@pytest.mark.parametrize("rollback", [0, 7])
def test_queries_reach_back_as_far_as_the_last_append(backend, rollback):
    rng = np.random.default_rng(20)
    key, value = random_rows(rng, 1, 90)
    cache = fastattn.KVCache(1, K, D, E, window=10, rollback=rollback, page_size=4)
    for start, stop in ((0, 30), (30, 60), (60, 61), (61, 90)):
        cache.append(key[:, :, start:stop], value[:, :, start:stop])
        L = max(stop - start, min(rollback, stop))
        query = random_query(rng, 1, L)
        seen = np.arange(stop) - np.arange(stop - L, stop)[:, None]
        out = cache.attend(query, backend=backend.backend)
        assert_attention(
            (out[0],), query[0], key[0, :, :stop], value[0, :, :stop], mask=(seen <= 0) & (seen > -10)
        )
    with pytest.raises(
        ValueError, match=r"query: the first of 90 queries .* item 0 .* L can be \d+ at most"
    ) as error:
        cache.attend(random_query(rng, 1, 90))
    most = int(re.findall(r"L can be (\d+)", str(error.value))[0])
    cache.attend(random_query(rng, 1, most))
    with pytest.raises(ValueError, match="at most"):
        cache.attend(random_query(rng, 1, most + 1))


def settings(**given):
    return fastattn.KVCache(**({"batch": 1, "num_kv_heads": 1, "head_dim": 8} | given))


def test_settings_out_of_range():
    below = {"batch": -1, "num_kv_heads": 0, "head_dim": 0, "value_dim": -1, "window": 0, "keep_first": -1,
             "rollback": -1, "page_size": 0}  # fmt: skip
    wrong = {name: [number] for name, number in below.items()}
    assert_named(settings, ValueError, wrong | {"layout": ["sbhd"], "dtype": [("float16",)]})
    assert_named(settings, ValueError, [{"num_kv_heads": 2**30, "page_size": 2**30}])
    with pytest.raises(ValueError, match="two different 16-bit types"):
        settings(dtype=("float16", "bfloat16"))


@pytest.mark.parametrize(
    "dtype", [None, "int32", "complex64", np.longdouble, "no such", ("float32", "uint8")], ids=str
)
def test_no_storage(dtype):
    with pytest.raises(TypeError, match="dtype must be float64, float32, float16, bfloat16 or int8"):
        fastattn.KVCache(1, 1, 8, dtype=dtype)


def test_settings_that_are_no_integers():
    for name in ("batch", "num_kv_heads", "head_dim", "window", "rollback"):
        assert_named(settings, TypeError, {name: [1.5, "1", True, [1]]})


def test_the_number_of_calls_that_are_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(prepared, "MAX_CALLS", 5)
    for kept in (prepared._calls, prepared._tokens):
        kept.clear()
    cache = fastattn.KVCache(1, 1, 8)
    cache.append(*np.ones((2, 1, 1, 8, 8), np.float32))
    for length in range(1, 20):
        cache.attend(np.ones((1, 1, length, 8), np.float32), causal=False)
        assert len(prepared._calls) <= 5 >= len(prepared._tokens)


def test_a_fork_is_of_its_class():
    class Counted(fastattn.KVCache):
        pass

    assert type(Counted(1, 1, 8).fork()) is type(Counted(2, 1, 8).select([0])) is Counted


class TestMoreQueriesThanTokens:
    """Where no item has as many tokens as there are queries, the first ones would read nothing."""

    @pytest.mark.parametrize("window", [None, 4])
    @pytest.mark.parametrize("layout", ["bhsd", "bshd"])
    def test_without_any_token(self, backend, window, layout):
        rng = np.random.default_rng(24)
        cache = fastattn.KVCache(2, K, D, E, window=window, layout=layout)
        key, value = random_rows(rng, 2, 3)
        query = random_query(rng, 2, 2)
        if layout == "bshd":
            query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
        for step in ("new", "of no tokens", "taken back"):
            if step == "of no tokens":
                cache.append(key, value, lengths=0)
            elif step == "taken back":
                cache.append(key, value, lengths=[2, 3])
                cache.truncate(0)
            for held in (cache, cache.fork(), cache.select([1, 0])):
                for causal in (True, False):
                    with pytest.raises(
                        ValueError, match=r"^the cache is empty: append keys and values first"
                    ):
                        held.attend(query, causal=causal, backend=backend.backend)

    def test_of_fewer_tokens(self, backend):
        rng = np.random.default_rng(25)
        cache = fastattn.KVCache(2, K, D, E)
        cache.append(*random_rows(rng, 2, 4), lengths=[2, 3])
        query = random_query(rng, 2, 4)
        said = (
            r"^query must have at most as many rows as there are tokens: item 1, the longest, has 3, got "
            rf"L=4; .* causal=False .*; query \(2, {H}, 4, {D}\)$"
        )
        out = np.full((2, H, 4, E), 7, np.float32)
        for options in ({}, {"causal": "bottom_right"}, {"out": out}, {"mask": np.ones(3, bool)}):
            with pytest.raises(ValueError, match=said):
                cache.attend(query, backend=backend.backend, **options)
        assert (out == 7).all()
        keys = [fastattn.KVCache(1, K, D, E) for _ in range(2)]
        cross = cache.attend(query, causal=False, backend=backend.backend)
        for b, alone in enumerate(keys):
            alone.append(cache.keys(b)[None], cache.values(b)[None])
            one = alone.attend(query[b : b + 1], causal=False, backend=backend.backend)
            assert_same_bits(one[0], cross[b])

    def test_a_shorter_item_is_padding(self, backend):
        """Beside one that has the tokens: its rows before its first token see nothing, as in `attention`."""
        rng = np.random.default_rng(26)
        key, value = random_rows(rng, 3, 4)
        query = random_query(rng, 3, 4)
        cache = fastattn.KVCache(3, K, D, E)
        got, lse = cache.step(query, key, value, lengths=[4, 2, 0], return_lse=True, backend=backend.backend)
        expected = backend.attention(query, key, value, causal="bottom_right", key_lengths=[4, 2, 0])
        assert_same_bits(got, expected)
        assert not got[1, :, :2].any() and not got[2].any()
        assert np.isneginf(lse[1, :, :2]).all()

    def test_a_step_of_them_appends_nothing(self, backend):
        rng = np.random.default_rng(27)
        cache = fastattn.KVCache(2, K, D, E)
        for T, held in ((0, 0), (2, 0), (2, 3)):
            if held:
                cache.append(*random_rows(rng, 2, held))
            with pytest.raises(ValueError, match=r"the cache is empty|got L=6"):
                cache.step(random_query(rng, 2, 6), *random_rows(rng, 2, T), backend=backend.backend)
            assert cache.lengths.tolist() == [held, held]

    def test_no_queries_and_no_items(self, backend):
        for batch, L in ((2, 0), (0, 3)):
            cache = fastattn.KVCache(batch, K, D, E)
            out = cache.attend(np.ones((batch, H, L, D), np.float32), backend=backend.backend)
            assert out.shape == (batch, H, L, E)


def test_queries_that_are_padded_as_keys_are(backend):
    """As the docstring of `step` says, for prompts of different lengths and for what follows them."""
    rng = np.random.default_rng(0)
    cache = fastattn.KVCache(2, 2, 8)
    alone = [fastattn.KVCache(1, 2, 8) for _ in range(2)]
    for counts in ((5, 3), (2, 4), (0, 1)):
        query, key, value = rng.standard_normal((3, 2, 2, 5, 8), dtype=np.float32)
        mask = fastattn.masks.Causal(offset=cache.lengths)
        options = {"causal": False, "mask": mask, "backend": backend.backend}
        out = cache.step(query, key, value, lengths=counts, **options)
        for item, count in enumerate(counts):
            if count:
                rows = [x[item : item + 1, :, :count] for x in (query, key, value)]
                np.testing.assert_allclose(
                    out[item : item + 1, :, :count], alone[item].step(*rows), atol=1e-6
                )


def test_errors_name_what_they_got():
    cache = fastattn.KVCache(2, 3, 8, 4)
    key, value = np.zeros((2, 3, 5, 8)), np.zeros((2, 3, 5, 4))
    with pytest.raises(ValueError, match=r"key must have shape \(2, 3, T, 8\), got \(2, 5, 3, 8\)"):
        cache.append(key.swapaxes(1, 2), value)
    with pytest.raises(ValueError, match=r"value must have shape \(2, 3, T, 4\), got \(2, 3, 5, 8\)"):
        cache.append(key, key)
    with pytest.raises(ValueError, match="as many tokens, got 5 and 4"):
        cache.append(key, value[:, :, 1:])
    with pytest.raises(ValueError, match=r"lengths must be in 0..T=5, got 6 for item 1"):
        cache.append(key, value, lengths=[5, 6])
    with pytest.raises(TypeError, match="key has dtype complex128"):
        cache.append(key.astype(complex), value)
    with pytest.raises(
        ValueError, match=r"query must have shape \(batch, H, L, D\), with batch=2, got \(3, 8\)"
    ):
        cache.attend(np.zeros((3, 8)))
    shapes = r"; query \(2, 3, 1, 8\), key \(2, 3, ..., 8\) in a cache, value \(2, 3, ..., 4\) in a cache$"
    full = cache.fork()
    full.append(key, value)
    with pytest.raises(TypeError, match=r"^return_weights must be False, True or \"mean\", got 1" + shapes):
        full.attend(np.zeros((2, 3, 1, 8)), return_weights=1)
    with pytest.raises(ValueError, match=r"items must be in 0..1, got 2"):
        cache.select([0, 2])
    with pytest.raises(ValueError, match=r"items must have shape \(n,\)"):
        cache.select(0)
    with pytest.raises(TypeError, match="items must be integers"):
        cache.select([0.5])
    with pytest.raises(ValueError, match=r"item must be in 0..1, got -1"):
        cache.keys(-1)
    assert cache.lengths.tolist() == [0, 0]


def test_bfloat16_without_ml_dtypes(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match="ml_dtypes"):
        fastattn.KVCache(1, 1, 8, dtype="bfloat16")


# Others -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(0, 2, 3, 3), (1, 2, 3, 0), (2, 1, 1, 1)], ids=["no_items", "no_columns", "one_column"]
)
def test_empty_sizes(backend, shape):
    batch, heads, head_dim, value_dim = shape
    cache = fastattn.KVCache(batch, heads, head_dim, value_dim)
    for T in (0, 2):
        cache.append(np.ones((batch, heads, T, head_dim)), np.ones((batch, heads, T, value_dim)))
        for L in (0, 1):
            query = np.ones((batch, heads, L, head_dim), np.float32)
            if query.size > 0 == T:
                continue  # without any token it is an error
            out = cache.attend(query, backend=backend.backend)
            assert out.shape == (batch, heads, L, value_dim)
            np.testing.assert_array_equal(out, float(T > 0))
    assert cache.fork().lengths.tolist() == [2] * batch


def test_a_cache_is_not_pickled():
    cache = fastattn.KVCache(1, 1, 8)
    for work in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"fork\(\) it, or save\(\)"):
            work(cache)


def test_what_is_given_out_is_a_copy():
    cache = fastattn.KVCache(1, 1, 8)
    cache.append(np.ones((1, 1, 3, 8)), np.ones((1, 1, 3, 8)))
    for array in (cache.lengths, cache.retained, cache.keys(0), cache.values(0)):
        array[...] = 7
    assert cache.lengths.tolist() == [3]
    assert cache.retained.tolist() == [0]
    np.testing.assert_array_equal(cache.keys(0), 1)


def test_caches_that_come_and_go_leave_nothing():
    cache = fastattn.KVCache(1, K, D, E, page_size=4)
    cache.append(np.ones((1, K, 6, D)), np.ones((1, K, 6, E)))
    for _ in range(100):
        cache.fork()
    assert len(cache._pool._left) <= 1
    # The last page is its own again, and is written in place.
    held = cache._ids.copy()
    cache.append(np.ones((1, K, 1, D)), np.ones((1, K, 1, E)))
    np.testing.assert_array_equal(cache._ids, held)


def test_a_forked_process_goes_on():
    """Also where the parent's other threads are in the middle of something."""
    code = """
import os, threading
import numpy as np
import fastattn

base = fastattn.KVCache(1, 1, 8, page_size=1)
row = np.ones((1, 1, 1, 8), np.float32)

def work():
    while not stop:
        base.fork().append(row, row)

stop = []
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(20):
    child = os.fork()
    if not child:
        base.append(row, row)
        os._exit(int(base.lengths[0]) - 1)
    assert os.waitpid(child, 0)[1] == 0
stop.append(1)
for thread in threads:
    thread.join()
print("ok")
"""
    assert python(code, env={"PYTHONWARNINGS": "ignore"}).split() == ["ok"]


def test_forks_in_threads(backend):
    """Caches that share pages, each in a thread of its own."""
    rng = np.random.default_rng(21)
    key, value = random_rows(rng, 1, 60)
    base = fastattn.KVCache(1, K, D, E, page_size=4)
    base.append(key[:, :, :10], value[:, :, :10])

    def work(number):
        rng = np.random.default_rng(number)
        cache = base.fork()
        for n in range(10, 60):
            new = key[:, :, n : n + 1] + number, value[:, :, n : n + 1] - number
            out = cache.step(random_query(rng, 1, 1), *new, backend=backend.backend)
            if n % 7 == 0:
                cache = cache.select([0])
        return out, cache.keys(0)

    alone = [work(number) for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(work, range(8)))
    for (out, keys), (expected, expected_keys) in zip(together, alone, strict=True):
        assert_same_bits(out, expected)
        np.testing.assert_array_equal(keys, expected_keys)
