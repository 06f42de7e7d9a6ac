"""Histories of a `KVCache`: tokens appended, taken back and shared, against the same tokens in lists."""

from __future__ import annotations

import tempfile
from typing import Any

import ml_dtypes  # noqa: F401  (the name "bfloat16")
import numpy as np

import fastattn
from tests.cases import MEMORY_LAYOUTS
from tests.fuzz.build import _NORMAL, _UNIFORM, Array, dtype_of, numbers
from tests.fuzz.records import Record


class Model:
    """Of each item, its keys and values ``(K, n, D)`` as they were appended."""

    def __init__(self, record: Record) -> None:
        self.batch, self.K = record["lead"][0], record["kv_heads"]
        self.dims = record["head_dim"], record["value_dim"]
        self.items = [
            [np.zeros((self.K, 0, dim), np.float32) for dim in self.dims] for _ in range(self.batch)
        ]
        self.greatest = [0] * self.batch

    @property
    def lengths(self) -> list[int]:
        return [item[0].shape[1] for item in self.items]

    def copy(self, items: list[int] | None = None) -> Model:
        other = object.__new__(Model)
        chosen = range(self.batch) if items is None else items
        other.batch, other.K, other.dims = len(chosen), self.K, self.dims
        other.items = [list(self.items[item]) for item in chosen]
        other.greatest = [self.greatest[item] for item in chosen]
        return other

    def append(self, rows: list[Array], lengths: list[int]) -> None:
        for number, (item, n) in enumerate(zip(self.items, lengths, strict=True)):
            item[:] = [
                np.concatenate([old, new[number][:, :n]], axis=1) for old, new in zip(item, rows, strict=True)
            ]
            self.greatest[number] = max(self.greatest[number], item[0].shape[1])

    def padded(self) -> list[Array]:
        """``(batch, K, longest, dim)``, zeros behind each item's length."""
        longest = max(self.lengths, default=0)
        found = [np.zeros((self.batch, self.K, longest, dim), np.float32) for dim in self.dims]
        for number, item in enumerate(self.items):
            for whole, rows in zip(found, item, strict=True):
                whole[number, :, : rows.shape[1]] = rows
        return found


def new_cache(record: Record, batch: int) -> fastattn.KVCache:
    return fastattn.KVCache(
        batch,
        record["kv_heads"],
        record["head_dim"],
        record["value_dim"],
        dtype=tuple(record["stored"]),
        window=record.get("cache_window"),
        keep_first=record.get("keep_first", 0),
        rollback=record.get("rollback", 64),
        page_size=record.get("page_size"),
        layout=record.get("layout", "bhsd"),
    )


def check_history(record: Record, engine: Any) -> None:
    swapped = record.get("layout") == "bshd"
    model, cache = Model(record), new_cache(record, record["lead"][0])
    others: list[tuple[Model, fastattn.KVCache]] = []

    def placed(x: Array) -> Array:
        return np.ascontiguousarray(x.swapaxes(1, 2)) if swapped else x

    for step in record["steps"]:
        do, data, n = step["do"], step.get("data", 0), step.get("n", 0)
        if do in ("append", "step"):
            rows = [
                numbers(_NORMAL, data, 60 + part, (model.batch, model.K, n, dim)).astype(np.float32)
                for part, dim in enumerate(model.dims)
            ]
            lengths, given = [n] * model.batch, {}
            if step.get("ragged"):
                lengths = [(data >> number) % (n + 1) for number in range(model.batch)]
                given["lengths"] = lengths
            place = MEMORY_LAYOUTS.get(step.get("place"), np.asarray)
            arrays = [place(placed(x).astype(step.get("dtype", "float32"))) for x in rows]
            if do == "append":
                cache.append(*arrays, **given)
                model.append(rows, lengths)
            elif n and max(map(sum, zip(model.lengths, lengths, strict=True)), default=0) >= n:
                query = _query(record, model, data, n)
                model.append(rows, lengths)
                options = _options(record, model, step, n)
                got = cache.step(placed(query), *arrays, **given, backend=engine.backend, **options)
                _compare(record, engine, model, query, got, "step", options)
        elif do == "attend":
            n = min(n, max(model.lengths, default=0))  # more queries than tokens are refused
            query = _query(record, model, data, min(n, 1) if record.get("cache_window") else n)
            options = _options(record, model, step, query.shape[2])
            got = cache.attend(placed(query), backend=engine.backend, **options)
            _compare(record, engine, model, query, got, "attend", options)
        elif do == "rows":
            _check_rows(record, model, cache)
        elif do == "reload":
            others.append((model.copy(), cache))
            with tempfile.TemporaryDirectory() as folder:
                cache.save(f"{folder}/cache")
                cache = fastattn.KVCache.load(f"{folder}/cache", mmap=step.get("mmap", False))
        elif do == "truncate":
            back = min(n, record.get("rollback", 64)) if record.get("cache_window") else n
            least = [0] * model.batch
            if record.get("cache_window"):
                least = [max(0, most - record.get("rollback", 64)) for most in model.greatest]
            new = [max(length - back, low, 0) for length, low in zip(model.lengths, least, strict=True)]
            new = [min(a, b) for a, b in zip(new, model.lengths, strict=True)]
            cache.truncate(new)
            for item, length in zip(model.items, new, strict=True):
                item[:] = [rows[:, :length] for rows in item]
        elif do == "refused":
            _refused(record, model, cache, data, placed)
        elif do == "fork":
            others.append((model.copy(), cache.fork()))
        elif model.batch:
            items = [(data >> (2 * number)) % model.batch for number in range(1 + data % 3)]
            others.append((model, cache))
            model, cache = model.copy(items), cache.select(items)
    for its, held in (*others, (model, cache)):
        _final(record, engine, its, held, placed)


def _options(record: Record, model: Model, step: Record, n: int) -> dict[str, Any]:
    """The options of `attend` for n queries, in arrays."""
    drawn, data = step.get("options", {}), step.get("data", 0)
    shape = (model.batch, 1, n, max(model.lengths, default=0))
    found = {name: drawn[name] for name in ("scale", "softcap", "causal", "num_threads") if name in drawn}
    if "window" in drawn:
        found["window"] = tuple(drawn["window"])
    if "sinks" in drawn:
        found["sinks"] = numbers(_NORMAL, data, 63, (record["heads"],)).astype(np.float32)
    if "bias" in drawn:
        found["bias"] = numbers(_NORMAL, data, 64, shape).astype(np.float32)
    if "mask" in drawn:
        found["mask"] = numbers(_UNIFORM, data, 65, shape) < drawn["mask"]
    for name in ("lse", "weights"):
        if name in drawn:
            found[f"return_{name}"] = True
    return found


def _refused(record: Record, model: Model, cache: Any, data: int, placed: Any) -> None:
    """What is refused changes nothing, which the rest of the history shows."""
    from tests.fuzz.checks import REFUSALS, Failure

    rows = [np.ones((model.batch, model.K, 2, dim), np.float32) for dim in model.dims]
    wider = [placed(np.ones((*x.shape[:3], x.shape[3] + 1), np.float32)) for x in rows]
    query = placed(_query(record, model, data, 2))
    key, value = map(placed, rows)
    calls = {
        "append wider": lambda: cache.append(*wider),
        "append a float mask of lengths": lambda: cache.append(key, value, lengths=[0.5] * model.batch),
        "append more than there are": lambda: cache.append(key, value, lengths=[3] * model.batch),
        "append complex": lambda: cache.append(key, value.astype(complex)),
        "truncate to more": lambda: cache.truncate([n + 1 for n in model.lengths]),
        "truncate below 0": lambda: cache.truncate([-1] * model.batch),
        "step with a wide query": lambda: cache.step(wider[0], key, value),
        "step with a scale of NaN": lambda: cache.step(query, key, value, scale=float("nan")),
        "step with causal": lambda: cache.step(query, key, value, causal="left"),
        "select an item that is not there": lambda: cache.select([model.batch]),
    }
    name = list(calls)[data % len(calls)]
    if not model.batch:
        return
    try:
        calls[name]()
    except (*REFUSALS, IndexError):
        return
    raise Failure(f"not refused {name}", "no error")


def _query(record: Record, model: Model, data: int, n: int) -> Array:
    heads = record["heads"]
    x = numbers(_NORMAL, data, 62, (model.batch, heads, n, record["head_dim"]))
    return x.astype(record.get("query_dtype", "float32"))


def _decoded(record: Record, model: Model) -> list[Array]:
    found = []
    for x, name in zip(model.padded(), record["stored"], strict=True):
        if name == "int8":
            found.append(fastattn.Quantized.encode(x).decode())
        else:
            found.append(x.astype(dtype_of(name)).astype(np.float64 if name == "float64" else np.float32))
    return found


def _compare(
    record: Record, engine: Any, model: Model, query: Array, got: Any, what: str, options: dict[str, Any]
) -> None:
    """Bit for bit where there is no window, else to rounding."""
    from tests.fuzz.checks import Failure, same_bits

    keys, values = _decoded(record, model)
    rules: dict[str, Any] = {"causal": "bottom_right", "key_lengths": np.array(model.lengths, int)} | options
    window = record.get("cache_window")
    if window is not None:
        i, j = np.arange(query.shape[2])[:, None], np.arange(keys.shape[2])
        at = i + np.array(model.lengths)[:, None, None] - query.shape[2]
        seen = (j > at - window) | (j < record.get("keep_first", 0))
        rules["mask"] = seen[:, None] & options.get("mask", True)
    wanted = engine.attention(query, keys, values, **rules)
    results = [list(x) if isinstance(x, tuple) else [x] for x in (got, wanted)]
    if record.get("layout") == "bshd":
        results[0][0] = results[0][0].swapaxes(1, 2)
    # Both are sums of the same products: scores of at most |q| |k|, values of at most |v|, in any order.
    norms = [np.linalg.norm(x.astype(float), axis=-1).max(initial=0) for x in (query, keys)]
    scale = options.get("scale", 1 / np.sqrt(query.shape[-1]))
    size = 2 + 2 * abs(scale) * norms[0] * norms[1] + 2 * np.abs(options.get("bias", 0)).max(initial=0)
    for n, (x, y) in enumerate(zip(*results, strict=True)):
        if window is None:
            same_bits(np.ascontiguousarray(x), y, f"cache {what}")
        elif x.shape != y.shape or x.dtype != y.dtype:
            raise Failure(f"cache {what}", f"{x.shape} {x.dtype}, expected {y.shape} {y.dtype}")
        else:
            most = 16 * np.finfo(x.dtype).eps * size * (np.abs(values).max(initial=0) if n == 0 else 1)
            if not ((np.abs(x - y) <= most) | (x == y)).all():
                raise Failure(f"cache {what}", f"result {n} differs by {np.nanmax(np.abs(x - y)):.3g}")


def _check_rows(record: Record, model: Model, cache: Any) -> None:
    """The rows that are held, which are those that a query may still read after `truncate`."""
    from tests.fuzz.checks import Failure, same_bits

    window, retained = record.get("cache_window"), cache.retained.tolist()
    for item, (start, most) in enumerate(zip(retained, model.greatest, strict=True)):
        latest = 0 if window is None else max(0, most - record.get("rollback", 64) - window)
        if start > latest:
            raise Failure("cache retained", f"item {item} holds rows from {start} on, {latest} may be read")
    for number, part in enumerate(_decoded(record, model)):
        for item, (start, length) in enumerate(zip(retained, model.lengths, strict=True)):
            held = (cache.keys if number == 0 else cache.values)(item)
            first = np.arange(min(record.get("keep_first", 0), start, length))
            rows = part[item][:, np.concatenate([first, np.arange(start, length)])]
            same_bits(np.asarray(held, part.dtype), np.ascontiguousarray(rows), "cache rows")


def _final(record: Record, engine: Any, model: Model, cache: Any, placed: Any) -> None:
    """The lengths, the rows, and the bits of a cache that was given the same tokens at once."""
    from tests.fuzz.checks import Failure, same_bits

    if cache.lengths.tolist() != model.lengths:
        raise Failure("cache lengths", f"{cache.lengths.tolist()}, expected {model.lengths}")
    query = _query(record, model, 3, min(1, max(model.lengths, default=0)))
    got = cache.attend(placed(query), backend=engine.backend)
    if min(model.lengths, default=0) >= 1:
        _compare(record, engine, model, query, got, "at the end", {})
    fresh = new_cache(record, model.batch)
    fresh.append(*map(placed, model.padded()), lengths=model.lengths)
    at_once = fresh.attend(placed(query), backend=engine.backend)
    same_bits(np.ascontiguousarray(at_once), np.ascontiguousarray(got), "cache history")
    _check_rows(record, model, cache)
