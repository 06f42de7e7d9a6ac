"""Keys and values in int8 and in pages: the results of the arrays that they stand for, bit for bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import fastattn
from fastattn import Paged, Quantized, masks
from tests.cases import MEMORY_LAYOUTS, random_arrays
from tests.conftest import READS_STORAGE, on_cython
from tests.fake_gpu import FakeArray
from tests.tolerances import assert_all_same, assert_same_bits

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
STORAGES = ["float32", "float64", "float16", "bfloat16", "int8"]
SHAPES = {
    "sweep": {"lead": (2,), "heads": 2, "len_q": 40, "len_k": 512, "head_dim": 24, "value_dim": 40},
    "many_blocks": {"lead": (2,), "heads": 4, "kv_heads": 2, "len_q": 300, "len_k": 256, "head_dim": 33},
    "split_kv": {
        "lead": (2,), "heads": 4, "kv_heads": 2, "len_q": 2, "len_k": 768, "head_dim": 72, "value_dim": 130,
    },
    "one_row": {"lead": (3,), "heads": 3, "len_q": 1, "len_k": 256, "head_dim": 5, "value_dim": 3},
}  # fmt: skip
OPTIONS = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (70, 10), "softcap": 4.0},
    "mask": {"mask": masks.Window(7, 3) | masks.GlobalTokens([0, 64])},
    "bias": {"bias": "bias"},
}


engines = READS_STORAGE


def dtype_of(storage):
    return BFLOAT16 if storage == "bfloat16" else np.dtype(storage)


def stored(array, storage):
    """The array in a storage type, and the numbers that are then in it, upcast."""
    if storage == "int8":
        rows = Quantized.encode(array)
        return rows, rows.decode()
    rows = array.astype(dtype_of(storage))
    return rows, rows.astype(np.float64 if storage == "float64" else np.float32)


def poison(shape, dtype):
    """Pages that no result may depend on."""
    return np.full(shape, 99, dtype) if dtype == np.int8 else np.full(shape, np.nan).astype(dtype)


def into_pages(rows, size, seed=0, spare=3):
    """`Paged` keys or values ``(B, K, S, D)``, in any order among others; S is padded to whole pages."""
    if isinstance(rows, Quantized):
        data, scale = (into_pages(part, size, seed, spare) for part in (rows.data, rows.scale))
        return Paged(Quantized(data.pages, scale.pages), data.table)
    batch, heads, length, columns = rows.shape
    n = -(-length // size)
    table = np.random.default_rng(seed).permutation(batch * n + spare)[: batch * n].reshape(batch, n)
    pages = poison((batch * n + spare, heads, size, columns), rows.dtype)
    for number in np.ndindex(table.shape):
        part = rows[number[0], :, number[1] * size : (number[1] + 1) * size]
        pages[table[number], :, : part.shape[1]] = part
    return Paged(pages, table)


def options_of(name, arrays, dtype):
    options = dict(OPTIONS[name])
    if "bias" in options:
        shape = (arrays[0].shape[-3], arrays[0].shape[-2], arrays[1].shape[-2])
        options["bias"] = np.random.default_rng(9).standard_normal(shape).astype(dtype)
    return options


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_pages_are_the_array_that_they_stand_for(engine, shape, storage, name):
    query, *rows = random_arrays(**SHAPES[shape])
    query = query.astype("float64" if storage == "float64" else "float32")
    (key, key_numbers), (value, value_numbers) = (stored(array, storage) for array in rows)
    options = options_of(name, (query, key), query.dtype)
    expected = engine.everything(query, key_numbers, value_numbers, **options)
    for size in (64, 256) if name != "plain" else (1, 32, 64, 128, 256):
        paged = into_pages(key, size), into_pages(value, size, seed=1)
        assert_all_same(engine.everything(query, *paged, **options), expected)
    if storage == "int8":
        assert_all_same(engine.everything(query, key, value, **options), expected)


@pytest.mark.parametrize("storages", [("int8", "float32"), ("float16", "int8"), ("bfloat16", "float32")])
@pytest.mark.parametrize("shape", ["sweep", "split_kv"])
def test_keys_and_values_may_be_stored_differently(engine, shape, storages):
    query, *rows = random_arrays(**SHAPES[shape])
    (key, key_numbers), (value, value_numbers) = (stored(*pair) for pair in zip(rows, storages, strict=True))
    query = query.astype(np.float32)
    expected = engine.everything(query, key_numbers, value_numbers)
    assert_all_same(engine.everything(query, key, value), expected)
    assert_all_same(engine.everything(query, into_pages(key, 64), value), expected)
    assert_all_same(engine.everything(query, into_pages(key, 128), into_pages(value, 64)), expected)
    assert_all_same(engine.everything(query, into_pages(key, 32), into_pages(value, 128)), expected)


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float64, np.int32], ids=str)
def test_a_quantised_array_leaves_the_dtype_to_others(engine, dtype):
    query, key, value = random_arrays(**SHAPES["sweep"])
    key, value = Quantized.encode(key), Quantized.encode(value)
    query = (4 * query).astype(dtype)
    wide = np.float64 if dtype in (np.float64, np.int32) else np.float32
    expected = engine.attention(query.astype(wide), key.decode().astype(wide), value.decode().astype(wide))
    out = engine.attention(query, key, value)
    assert out.dtype == (np.float64 if wide == np.float64 else dtype)
    assert_same_bits(out.astype(wide), expected.astype(out.dtype).astype(wide))


@pytest.mark.parametrize("storage", ["float32", "float16", "int8"])
@pytest.mark.parametrize("shape", ["sweep", "split_kv", "one_row"])
def test_nothing_past_the_lengths_is_read(engine, shape, storage):
    """Neither rows nor entries of the table."""
    query, *rows = random_arrays(**SHAPES[shape])
    query = query.astype(np.float32)
    (key, key_numbers), (value, value_numbers) = (stored(array, storage) for array in rows)
    lengths = np.array([130, 1, 0])[: len(query)]
    options = {"causal": "bottom_right", "key_lengths": lengths}
    expected = engine.everything(query, key_numbers, value_numbers, **options)
    paged = into_pages(key, 64), into_pages(value, 64, seed=1)
    for b, length in enumerate(lengths):
        for part in paged:
            part.table[b, -(-length // 64) :] = (-1, 10**9, -(2**40))[b]
            arrays = (
                [part.pages] if isinstance(part.pages, np.ndarray) else [part.pages.data, part.pages.scale]
            )
            if length % 64:
                for array in arrays:
                    array[part.table[b, length // 64], :, length % 64 :] = poison((), array.dtype)
    for _ in range(2):  # the second is a prepared call
        assert_all_same(engine.everything(query, *paged, **options), expected)
    paged[0].table[0, 0] = 10**6  # which the prepared call must find out, too
    with pytest.raises(ValueError, match=r"key: table\[0, 0\] must be one of the .* pages, got 1000000"):
        engine.attention(query, *paged, **options)


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
def test_layout_bshd(engine, storage):
    query, *rows = random_arrays(**SHAPES["split_kv"])
    query = query.astype(np.float32)
    key, value = (stored(array, storage)[0] for array in rows)
    expected = engine.attention(query, into_pages(key, 64), into_pages(value, 64))

    def swapped(rows):
        if isinstance(rows, Quantized):
            return Quantized(swapped(rows.data), swapped(rows.scale))
        if isinstance(rows, Paged):
            return Paged(swapped(rows.pages), rows.table)
        return rows.swapaxes(-3, -2)

    for arrays in ((key, value), (into_pages(key, 64), into_pages(value, 64))):
        for _ in range(2):
            out = engine.attention(query.swapaxes(1, 2), *map(swapped, arrays), layout="bshd")
            assert_same_bits(out.swapaxes(1, 2), expected)


@pytest.mark.parametrize("storage", ["float32", "float16", "int8"])
@pytest.mark.parametrize("layout", MEMORY_LAYOUTS)
@pytest.mark.parametrize("shape", ["sweep", "split_kv"])
def test_any_memory_layout(engine, shape, storage, layout):
    query, *rows = random_arrays(**SHAPES[shape])
    query = query.astype(np.float32)
    key, value = (into_pages(stored(array, storage)[0], 64) for array in rows)
    expected = engine.attention(query, key, value)

    def moved(rows):
        if isinstance(rows, Quantized):
            return Quantized(MEMORY_LAYOUTS[layout](rows.data), MEMORY_LAYOUTS[layout](rows.scale))
        return MEMORY_LAYOUTS[layout](rows)

    tables = (np.asarray(part.table, dtype) for part, dtype in ((key, np.int16), (value, np.uint64)))
    paged = [Paged(moved(part.pages), table) for part, table in zip((key, value), tables, strict=True)]
    assert_same_bits(engine.attention(query, *paged), expected)


@pytest.mark.parametrize("shape", ["sweep", "split_kv"])
def test_leading_axes_broadcast(engine, shape):
    """One table for all items, pages that are in it twice, and values that are an array."""
    query, key, value = (array.astype(np.float32) for array in random_arrays(**SHAPES[shape]))
    paged = into_pages(key[:1], 64)
    table = np.concatenate([paged.table[0], paged.table[0, :1]])
    whole = np.concatenate([key[:1], key[:1, :, :64]], axis=2)
    values = np.concatenate([value, value[:, :, :64]], axis=2)
    expected = engine.everything(query, whole, values)
    for given in (table, table[None], table.astype(np.int32)):
        assert_all_same(engine.everything(query, Paged(paged.pages, given), values), expected)
    quantized = Quantized.encode(whole)
    expected = engine.everything(query, quantized.decode(), values)
    assert_all_same(engine.everything(query, quantized, values), expected)


@pytest.mark.parametrize("storage", ["float32", "int8"])
@pytest.mark.parametrize("shape", ["many_blocks", "split_kv"])
def test_nonfinite_values_of_masked_keys(engine, shape, storage):
    query, key, value = (array.astype(np.float32) for array in random_arrays(**SHAPES[shape]))
    value[:, :, 100, 1] = np.nan
    value[:, :, -1, 0] = np.inf
    mask = np.random.default_rng(2).random((query.shape[-2], key.shape[-2])) < 0.5
    mask[0, [100, -1]], mask[-1, [100, -1]] = False, True
    value_rows, numbers = stored(value, storage)
    expected = engine.everything(query, key, numbers, mask=mask)
    assert np.isnan(expected[0]).any() and not np.isnan(expected[0][:, :, 0]).any()
    for given in (into_pages(value_rows, 64), into_pages(value_rows, 32)):
        assert_all_same(engine.everything(query, key, given, mask=mask), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_number_of_threads_changes_nothing(engine, shape):
    query, key, value = (array.astype(np.float32) for array in random_arrays(**SHAPES[shape]))
    arrays = query, into_pages(Quantized.encode(key), 64), into_pages(value, 32)
    expected = engine.attention(*arrays, num_threads=1, key_lengths=key.shape[-2] - 5)
    for threads in (2, 3, 7):
        out = engine.attention(*arrays, num_threads=threads, key_lengths=key.shape[-2] - 5)
        assert_same_bits(out, expected)


def test_out_that_overlaps_the_pages(engine):
    query, key, value = (array.astype(np.float32) for array in random_arrays(**SHAPES["one_row"]))
    key, value = into_pages(key, 64), into_pages(value, 64)
    expected = engine.attention(query, key, value)
    for _ in range(2):
        pages = value.pages.copy()
        out = pages[: query.shape[0], :, :1]
        engine.attention(query, key, Paged(pages, value.table), out=out)
        assert_same_bits(out, expected)


@on_cython  # the only one that reads pages and runs functions
def test_functions_of_scores(engine):
    pytest.importorskip("numba")
    query, key, value = (array.astype(np.float32) for array in random_arrays(**SHAPES["split_kv"]))

    def score_mod(score, b, h, q_idx, kv_idx):
        return score - np.float32(0.01) * kv_idx

    expected = fastattn.flex_attention(query, key, value, score_mod=score_mod, backend=engine.backend)
    paged = into_pages(key, 64), into_pages(value, 64)
    for _ in range(2):
        out = fastattn.flex_attention(query, *paged, score_mod=score_mod, backend=engine.backend)
        assert_same_bits(out, expected)


def test_backends_that_read_none_say_so():
    query, key, value = (array.astype(np.float32) for array in random_arrays(**SHAPES["one_row"]))
    with pytest.raises(fastattn.BackendError, match=r"key is float32 in pages, value is int8|numba is not"):
        fastattn.attention(query, into_pages(key, 64), Quantized.encode(value), backend="numba")


def encoded(array):
    """The definition, one group at a time."""
    data, scale = np.zeros(array.shape, np.int8), []
    for row in np.ndindex(array.shape[:-1]):
        for start in range(0, array.shape[-1], 64):
            group = array[row][start : start + 64].astype(np.float64)
            factor = np.float32(np.abs(group).max() / 127) if np.isfinite(group).all() else np.float32(np.nan)
            scale.append(factor)
            if factor > 0:
                quotient = np.rint((group.astype(array.dtype) / array.dtype.type(factor)).astype(np.float64))
                data[row][start : start + 64] = np.clip(quotient, -127, 127)
    return data, np.array(scale, np.float32).reshape(*array.shape[:-1], -1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("columns", [1, 63, 64, 65, 128, 200])
def test_encoding(columns, dtype):
    array = np.random.default_rng(columns).standard_normal((2, 5, columns)).astype(dtype)
    array[0, 0] = 0
    array[0, 1, -1] = np.nan
    array[0, 2, 0] = -np.inf
    array[0, 3] *= dtype(1e-44)
    array[0, 4] *= dtype(2e38) / np.abs(array[0, 4]).max()
    rows = Quantized.encode(array)
    data, scale = encoded(array)
    assert_same_bits(rows.scale, scale)
    assert_same_bits(rows.data, data)
    decoded = rows.decode()
    finite = np.isfinite(decoded)
    assert np.isnan(decoded[0, 1, -1]) and np.isnan(decoded[0, 2, 0]) and (decoded[0, 0] == 0).all()
    step = np.repeat(scale, 64, axis=-1)[..., :columns]
    assert (np.abs(decoded - array)[1] <= step[1] * 0.5001).all() and finite[1].all()


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: Quantized(np.zeros((2, 64)), np.zeros((2, 1), "f4")), TypeError, "data must be int8"),
        (lambda: Quantized(np.zeros((2, 64), "i1"), np.zeros((2, 1))), TypeError, "scale must be float32"),
        (lambda: Quantized(np.zeros((2, 65), "i1"), np.zeros((2, 1), "f4")), ValueError, r"ceil\(D / 64\)"),
        (lambda: Quantized(np.int8(1), np.float32(1)), ValueError, "data must have shape"),
        (lambda: Quantized.encode(np.zeros(3, complex)), TypeError, "rows must be floats"),
        (lambda: Quantized.encode(3.0), ValueError, r"rows must have shape \(..., n, D\), got \(\)"),
        (lambda: Quantized.encode(FakeArray(np.ones(3))), TypeError, "Quantized.encode: rows is on cuda:0"),
        (lambda: Paged(FakeArray(np.ones((2, 3, 4, 5))), [0]), TypeError, "Paged: pages is on cuda:0"),
        (lambda: Paged(np.zeros((2, 3, 4)), [0]), ValueError, r"pages must have shape \(P, K, page, D\)"),
        (lambda: Paged(np.zeros((2, 3, 0, 4)), [0]), ValueError, "at least one row"),
        (lambda: Paged(np.zeros((2, 3, 4, 5)), [0.0]), TypeError, "table must be of integers"),
        (lambda: Paged(np.zeros((2, 3, 4, 5)), 0), ValueError, r"table must have shape \(..., n\)"),
    ],
)
def test_wrong_parts(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_calls_that_do_not_fit():
    query = np.zeros((1, 2, 3, 8), np.float32)
    pages = Paged(np.zeros((4, 2, 64, 8), np.float32), [[0, 1]])
    with pytest.raises(
        ValueError, match=r"same head_dim.*key Paged\(pages \(4, 2, 64, 8\), table \(1, 2\)\)"
    ):
        fastattn.attention(np.zeros((1, 2, 3, 9), np.float32), pages, pages)
    with pytest.raises(ValueError, match=r"value: table\[0, 1\] must be one of the 4 pages, got 4"):
        fastattn.attention(query, pages, Paged(pages.pages, [[0, 4]]))
    with pytest.raises(ValueError, match=r"key: table\[0, 0\] must be one of the 0 pages, got 0"):
        fastattn.attention(query, Paged(pages.pages[:0], [[0, 1]]), pages)
    with pytest.raises(TypeError, match="key must be an array here"):
        fastattn.varlen_attention(query[0], pages, pages, [0, 2])
    with pytest.raises(TypeError, match="value must be an array here"):
        fastattn.scaled_dot_product_attention(query, query, pages)
    with pytest.raises(ValueError, match="leading batch axes"):
        fastattn.attention(np.zeros((3, 2, 3, 8)), Paged(pages.pages, np.zeros((2, 2), int)), pages)
    with pytest.raises(ValueError, match="all have two"):
        fastattn.attention(query[0, 0], pages, pages)
    half = Paged(pages.pages.astype(np.float16), [[0]])
    with pytest.raises(TypeError, match="two 16-bit types"):
        fastattn.attention(query, half, pages.pages[:1].astype(BFLOAT16))


def test_empty(engine):
    """No keys, no pages, no columns of values."""
    query = np.ones((2, 2, 3, 8), np.float32)
    pages = Paged(np.ones((0, 2, 64, 8), np.float32), np.zeros((2, 3), int))
    out, lse, _ = engine.everything(query, pages, pages, key_lengths=0)
    assert (out == 0).all() and (lse == -np.inf).all()
    none = Paged(np.ones((1, 2, 64, 8), np.float32), np.zeros((2, 0), int))
    assert (engine.attention(query, none, none) == 0).all()
    values = Paged(np.ones((1, 2, 64, 0), np.float32), np.zeros((2, 1), int))
    keys = Paged(np.ones((1, 2, 64, 8), np.float32), np.zeros((2, 1), int))
    assert engine.attention(query, keys, values).shape == (2, 2, 3, 0)
