"""Files of a `KVCache`: what is saved is loaded, by others too, and a damaged file is a ValueError."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest

import fastattn
from fastattn._cache import files as _cache_files
from fastattn._cache.files import _content, _tensors
from tests.tolerances import assert_same_bits

K, D, E = 2, 16, 24
STORAGES = ["float32", "float64", "float16", "bfloat16", "int8", ("int8", "float64"), ("float16", "int8")]


def _header(settings, state, tensors, checksums):
    return _content(settings, state, tensors).header(checksums)


def filled(storage="float32", *, window=None, keep_first=0, batch=3, seed=0):
    """A cache after some ragged appends."""
    rng = np.random.default_rng(seed)
    cache = fastattn.KVCache(
        batch, K, D, E, dtype=storage, window=window, keep_first=keep_first, rollback=4, page_size=4
    )
    for _ in range(6):
        key, value = rng.standard_normal((batch, K, 9, D)), rng.standard_normal((batch, K, 9, E))
        cache.append(key, value, lengths=rng.integers(0, 10, batch))
    return cache


def assert_same_caches(got, expected):
    assert got.lengths.tolist() == expected.lengths.tolist()
    assert got.retained.tolist() == expected.retained.tolist()
    assert (got.nbytes, got.dtype, repr(got)) == (expected.nbytes, expected.dtype, repr(expected))
    for item in range(len(got.lengths)):
        np.testing.assert_array_equal(got.keys(item), expected.keys(item))
        np.testing.assert_array_equal(got.values(item), expected.values(item))


@pytest.fixture(params=[False, True], ids=["read", "mapped"])
def mmap(request):
    return request.param


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("window", [{}, {"window": 5}, {"window": 7, "keep_first": 6}], ids=str)
def test_what_is_saved_is_loaded(storage, window, mmap, tmp_path):
    cache = filled(storage, **window)
    cache.save(tmp_path / "cache")
    loaded = fastattn.KVCache.load(tmp_path / "cache", mmap=mmap)
    assert_same_caches(loaded, cache)
    content = (tmp_path / "cache").read_bytes()
    # And it goes on as the other does, without writing to the file.
    rng = np.random.default_rng(1)
    for T in (1, 6):
        query = rng.standard_normal((3, 4, 1, D)).astype(np.float32)
        key, value = rng.standard_normal((3, K, T, D)), rng.standard_normal((3, K, T, E))
        assert_same_bits(loaded.step(query, key, value), cache.step(query, key, value))
    fork = loaded.fork()
    for it in (cache, loaded):
        it.truncate(it.lengths - 2)
    assert_same_caches(loaded, cache)
    del loaded
    fork.append(key, value)
    assert (tmp_path / "cache").read_bytes() == content


def test_a_cache_that_was_longer_once(mmap, tmp_path):
    rows = np.ones((1, 1, 1, 2))
    cache = fastattn.KVCache(1, 1, 2, window=5, rollback=9, page_size=64)
    for _ in range(100):
        cache.append(rows, rows)
    cache.truncate(91)
    for _ in range(4):
        cache.append(rows, rows)
    cache.save(tmp_path / "cache")
    loaded = fastattn.KVCache.load(tmp_path / "cache", mmap=mmap)
    assert_same_caches(loaded, cache)
    loaded.truncate(91)
    with pytest.raises(ValueError, match="item 0 can be truncated to 91 at least"):
        loaded.truncate(90)


@pytest.mark.parametrize("batch", [0, 2])
def test_an_empty_cache(batch, mmap, tmp_path):
    cache = fastattn.KVCache(batch, K, D, 0, dtype="int8")
    cache.save(tmp_path / "cache")
    loaded = fastattn.KVCache.load(tmp_path / "cache", mmap=mmap)
    assert_same_caches(loaded, cache)
    loaded.append(np.ones((batch, K, 3, D)), np.ones((batch, K, 3, 0)))
    assert loaded.lengths.tolist() == [3] * batch


def test_a_file_does_not_depend_on_how_it_came_about(tmp_path):
    rng = np.random.default_rng(2)
    key, value = rng.standard_normal((2, 2, K, 30, D))
    files = []
    for number, parts in enumerate(([30], [1] * 30, [7, 23])):
        cache = fastattn.KVCache(2, K, D, page_size=4)
        other = cache.fork()
        at = 0
        for n in parts:
            cache.append(key[:, :, at : at + n], value[:, :, at : at + n])
            other.append(-key[:, :, at : at + n], -value[:, :, at : at + n])
            at += n
        if number:
            cache = cache.select([1, 0]).select([1, 0])
        cache.save(tmp_path / "cache")
        files.append((tmp_path / "cache").read_bytes())
        fastattn.KVCache.load(tmp_path / "cache", mmap=True).save(tmp_path / "cache")  # over itself
        assert (tmp_path / "cache").read_bytes() == files[-1]
    assert files[0] == files[1] == files[2]


def test_memory_that_holds_no_row_is_not_saved(tmp_path):
    cache = fastattn.KVCache(1, 1, 2, page_size=4, window=3, rollback=0)
    rows = np.arange(1.0, 21.0).reshape(1, 1, 10, 2)
    for n in range(10):
        cache.append(rows[:, :, n : n + 1], rows[:, :, n : n + 1])
    cache.truncate(9)
    cache.save(tmp_path / "cache")
    _, tensors = contents(tmp_path / "cache")
    expected = np.zeros((12, 2))
    expected[6:9] = rows[0, 0, 6:9]
    np.testing.assert_array_equal(tensors["keys"].reshape(-1, 2), expected[4:])


def contents(path):
    """The header and the tensors of a file, by the description of the layout alone."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    dtypes = {"F32": np.float32, "F64": np.float64, "F16": np.float16, "BF16": np.uint16, "I8": np.int8}
    tensors, stops = {}, [0]
    for name, tensor in header.items():
        if name != "__metadata__":
            start, stop = tensor["data_offsets"]
            stops.append(stop)
            rows = np.frombuffer(data[8 + length + start : 8 + length + stop], dtypes[tensor["dtype"]])
            tensors[name] = rows.reshape(tensor["shape"])
    assert max(stops) == len(data) - 8 - length
    return header, tensors


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_the_package_safetensors_reads_it(storage, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    from safetensors.numpy import load_file

    cache = filled(storage)
    cache.save(tmp_path / "cache")
    _, expected = contents(tmp_path / "cache")
    got = load_file(tmp_path / "cache")
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert tensor.shape == expected[name].shape
        assert tensor.tobytes() == expected[name].tobytes()
    with safetensors.safe_open(tmp_path / "cache", "np") as file:
        assert json.loads(file.metadata()["settings"])["page_size"] == 4


# Damage -------------------------------------------------------------------------------------------


def damaged(content, rng):
    """A file that differs."""
    kind = rng.integers(6)
    changed = bytearray(content)
    at = int(rng.integers(len(content)))
    if kind == 0:
        changed[at] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        changed[at] = (changed[at] + int(rng.integers(1, 256))) % 256
    elif kind == 2:
        del changed[at:]
    elif kind == 3:
        changed += bytes(rng.integers(0, 256, int(rng.integers(1, 100)), np.uint8))
    elif kind == 4:
        del changed[at : at + int(rng.integers(1, 9))]
    else:  # in the header, where most can go wrong
        length = int.from_bytes(content[:8], "little")
        at = int(rng.integers(8 + length))
        changed[at : at + 2] = bytes(
            rng.choice(list(b'0123456789-.,:"[]{} eE\\\xff\x00'), 2).astype(np.uint8)
        )
    return bytes(changed)


def check_damaged_files(n, tmp_path, seed):
    rng = np.random.default_rng(seed)
    path = tmp_path / "cache"
    for number, storage in enumerate(STORAGES):
        cache = filled(storage, window=(None, 5)[number % 2], keep_first=2, batch=2, seed=seed)
        cache.save(path)
        content = path.read_bytes()
        for _ in range(n // len(STORAGES) + 1):
            changed = damaged(content, rng)
            if changed == content:
                continue
            path.write_bytes(changed)
            with pytest.raises(ValueError, match="is no file of a KVCache, or damaged"):
                fastattn.KVCache.load(path)
            # Where it is mapped, the numbers are not looked at.
            start = 8 + int.from_bytes(content[:8], "little")
            if len(changed) != len(content) or changed[:start] != content[:start]:
                with pytest.raises(ValueError, match="is no file of a KVCache, or damaged"):
                    fastattn.KVCache.load(path, mmap=True)
            else:
                fastattn.KVCache.load(path, mmap=True)


def test_damaged_files(tmp_path):
    check_damaged_files(300, tmp_path, 3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_10000_damaged_files(seed, tmp_path):
    check_damaged_files(10_000 // 4, tmp_path, 4 + seed)


def test_every_byte_of_a_header(tmp_path):
    path = tmp_path / "cache"
    filled(batch=1).save(path)
    content = path.read_bytes()
    for at in range(8 + int.from_bytes(content[:8], "little")):
        changed = bytearray(content)
        changed[at] ^= 1 + at % 127
        path.write_bytes(changed)
        with pytest.raises(ValueError, match="damaged"):
            fastattn.KVCache.load(path, mmap=True)


#: Settings and states of a header that is right in itself, and absurd.
ABSURD = {
    "batch": ({"batch": 2**40}, {}),
    "negative batch": ({"batch": -1}, {}),
    "heads": ({"num_kv_heads": 2**62}, {}),
    "more heads": ({"num_kv_heads": 3}, {}),
    "head_dim": ({"head_dim": 10**30}, {}),
    "no head_dim": ({"head_dim": 0}, {}),
    "a float": ({"head_dim": 16.0}, {}),
    "a bool": ({"num_kv_heads": True}, {}),
    "a string": ({"value_dim": "24"}, {}),
    "no value_dim": ({"value_dim": None}, {}),
    "page_size": ({"page_size": 2**50}, {}),
    "no page_size": ({"page_size": None}, {}),
    "other page_size": ({"page_size": 3}, {}),
    "window": ({"window": 0}, {}),
    "no window": ({"window": None}, {}),
    "keep_first": ({"keep_first": 2**63}, {}),
    "rollback": ({"rollback": 2**63}, {}),
    "longer rollback": ({"rollback": 50}, {}),
    "layout": ({"layout": "shbd"}, {}),
    "a layout that cannot be hashed": ({"layout": ["bhsd"]}, {}),
    "huge lengths": ({}, {"lengths": [2**39, 2**39], "greatest": [2**39, 2**39]}),
    "a length beyond all": ({}, {"lengths": [2**70, 1]}),
    "negative lengths": ({}, {"lengths": [-1, 1]}),
    "lengths of floats": ({}, {"lengths": [1.5, 2]}),
    "lengths of bools": ({}, {"lengths": [True, True]}),
    "fewer lengths": ({}, {"lengths": [3]}),
    "no list": ({}, {"lengths": 3}),
    "greatest below": ({}, {"greatest": [0, 0]}),
    "retained beyond": ({}, {"retained": [10**6, 0]}),
    "negative retained": ({}, {"retained": [-5, 0]}),
    "far away": ({}, {"lengths": [2**39, 2], "greatest": [2**40, 2], "retained": [2**39 - 5, 0]}),
}


@pytest.mark.parametrize("name", ABSURD)
def test_an_absurd_header(name, mmap, tmp_path):
    """Rewritten with checksums that are right."""
    changes, states = ABSURD[name]
    cache = filled(window=5, batch=2)
    path = tmp_path / "cache"
    cache.save(path)
    content = path.read_bytes()
    numbers = content[8 + int.from_bytes(content[:8], "little") :]
    settings = replace(cache._settings, **changes)
    state = cache._settle()._asdict()
    pages = contents(path)[1]["keys"].shape[0]
    checksums = json.loads(contents(path)[0]["__metadata__"]["checksums"])

    class AnyState:
        def _asdict(self):
            return {field: Listed(states.get(field, state[field].tolist())) for field in state}

    class Listed:
        def __init__(self, numbers):
            self.tolist = lambda: numbers

    tensors = _tensors(cache._settings, pages)
    path.write_bytes(_header(settings, AnyState(), tensors, checksums) + numbers)
    with pytest.raises(ValueError, match="is no file of a KVCache, or damaged"):
        fastattn.KVCache.load(path, mmap=mmap)


def test_a_table_far_longer_than_its_pages(mmap, tmp_path):
    """Rows at absurd positions: the file is as long as its header says, and the table would fill memory."""
    cache = filled(window=5, batch=2)
    cache.save(tmp_path / "cache")
    content = (tmp_path / "cache").read_bytes()
    header, tensors = contents(tmp_path / "cache")
    assert cache.retained.all()
    made = _header(
        cache._settings,
        _cache_files.State(*(array + 2**36 for array in cache._settle())),
        _tensors(cache._settings, tensors["keys"].shape[0]),
        json.loads(header["__metadata__"]["checksums"]),
    )
    (tmp_path / "cache").write_bytes(made + content[8 + int.from_bytes(content[:8], "little") :])
    with pytest.raises(ValueError, match=r"damaged: .* pages for a batch of 2 with up to"):
        fastattn.KVCache.load(tmp_path / "cache", mmap=mmap)


def test_the_helper_writes_what_save_does(tmp_path):
    cache = filled(window=5, batch=2)
    cache.save(tmp_path / "cache")
    header, tensors = contents(tmp_path / "cache")
    made = _header(
        cache._settings,
        cache._settle(),
        _tensors(cache._settings, tensors["keys"].shape[0]),
        json.loads(header["__metadata__"]["checksums"]),
    )
    assert (tmp_path / "cache").read_bytes().startswith(made)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[", b"[]", b"{}", b"null", b"[" * 10**5, b'{"__metadata__": 3}', b'{"__metadata__": {}}',
        b"\xff" * 9,
        b'{"__metadata__": {"format": "fastattn.KVCache 1"}}', b"1" * 10**4,
        b'{"__metadata__": {"format": "fastattn.KVCache 1", "settings": "{}", "state": "{}", '
        b'"checksums": "{}"}}',
    ],
    ids=lambda text: f"{len(text)}_bytes",
)  # fmt: skip
def test_another_header(text, mmap, tmp_path):
    (tmp_path / "cache").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ValueError, match="is no file of a KVCache, or damaged"):
        fastattn.KVCache.load(tmp_path / "cache", mmap=mmap)


def test_a_change_of_the_numbers_is_seen_where_they_are_read(tmp_path):
    cache = filled()
    path = tmp_path / "cache"
    cache.save(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="values do not have the checksum"):
        fastattn.KVCache.load(path)
    fastattn.KVCache.load(path, mmap=True)


# Writing ------------------------------------------------------------------------------------------


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    filled().save(path)
    before = path.read_bytes()

    def full(_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        filled(seed=1).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["cache"]


def test_a_table_that_could_not_be_loaded_is_not_saved(tmp_path, monkeypatch):
    """Of one long item among many short ones."""
    monkeypatch.setattr(_cache_files, "_SPARSE", 1000)
    cache = fastattn.KVCache(100, 1, 1, page_size=1)
    rows = np.zeros((100, 1, 50, 1), np.float32)
    cache.append(rows, rows, lengths=[50] + [1] * 99)
    with pytest.raises(ValueError, match=r"^page tables of 100 items with up to 50 tokens have more than"):
        cache.save(tmp_path / "cache")
    assert os.listdir(tmp_path) == []
    cache.select([0, 1]).save(tmp_path / "cache")
    assert fastattn.KVCache.load(tmp_path / "cache").lengths.tolist() == [50, 1]


def test_paths_of_bytes(tmp_path):
    filled().save(os.fsencode(tmp_path / "cache"))
    assert (
        fastattn.KVCache.load(os.fsencode(tmp_path / "cache")).lengths.tolist() == filled().lengths.tolist()
    )


def test_paths_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError):
        fastattn.KVCache.load(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        filled().save(tmp_path / "none" / "cache")
    with pytest.raises(OSError, match="directory"):
        filled().save(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_more_than_2_to_the_31_elements(tmp_path):
    """A sparse file, mapped: zeros but for what is appended."""
    n = 2**31 // 128 + 1000
    settings = fastattn.KVCache(1, 1, 128, dtype="int8")._settings
    lengths = np.array([n])
    state = _cache_files.State(lengths, lengths, np.array([0]))
    tensors = _tensors(settings, -(-n // 256))
    header = _header(settings, state, tensors, {tensor.name: "0" * 64 for tensor in tensors})
    with open(tmp_path / "cache", "wb") as file:
        file.write(header)
        file.truncate(len(header) + tensors[-1].stop)
    cache = fastattn.KVCache.load(tmp_path / "cache", mmap=True)
    assert cache.lengths.tolist() == [n]
    key, value = np.random.default_rng(5).standard_normal((2, 1, 1, 1, 128), dtype=np.float32)
    query = 300 * key
    out, lse = cache.step(query, key, value, return_lse=True)
    # Each of the zeros weighs 1, and the row past them exp(300 |key|^2 / sqrt(128)), which is more than n.
    np.testing.assert_allclose(lse, np.logaddexp(np.log(n), (query * key).sum() / 128**0.5), rtol=1e-2)
    np.testing.assert_allclose(out, value, rtol=0.02, atol=0.02)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a pipe"):
        fastattn.KVCache.load(tmp_path / "pipe")
