"""`MultiHeadAttention` against its formula in a wider type: without a cache, and as calls that fill one.

The error of a projection is bounded by that of its sum of products, and carried to the result: to first
order an output moves with the scores and the values that it is made of.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import fastattn
from fastattn.layers import MultiHeadAttention
from tests.cases import MEMORY_LAYOUTS
from tests.fuzz.build import _NORMAL, Array, Case, GuardedOut, dtype_of, integers, numbers
from tests.fuzz.checks import Engine, Failure, _half_unit, same_bits
from tests.fuzz.oracle import FIRST_ORDER, wide_type
from tests.fuzz.records import Record
from tests.tolerances import ROUNDINGS

HALVES = ("float16", "bfloat16")


class Bounded(NamedTuple):
    """Numbers of a wider type, and how far those of the package may be away."""

    at: Array
    error: Array


class Layer:
    """The layer of a record, and the same by its formula."""

    def __init__(self, record: Record) -> None:
        chosen, self.data = record["layer"], record.get("data", 0)
        self.H, self.K = record["heads"], record["kv_heads"]
        D, E = record["head_dim"], record["value_dim"]
        dims = dict(zip("qkvo", chosen["dims"], strict=True))
        if chosen.get("given", "self") == "self":
            dims["k"] = dims["v"] = dims["q"]
        elif chosen["given"] == "key":
            dims["v"] = dims["k"]
        self.dims = dims
        stored = chosen.get("dtype", "float32")
        shapes = {"q": (dims["q"], self.H * D), "k": (dims["k"], self.K * D), "v": (dims["v"], self.K * E),
                  "o": (self.H * E, dims["o"])}  # fmt: skip
        given: dict[str, Any] = {}
        for n, (name, shape) in enumerate(shapes.items()):
            w = numbers(_NORMAL, self.data, 70 + n, shape) / np.sqrt(max(1, shape[0]))
            given[f"w_{name}"] = _placed(w.astype(dtype_of(stored)), chosen.get("place"))
            if name in chosen.get("biases", ""):
                given[f"b_{name}"] = numbers(_NORMAL, self.data, 74 + n, shape[1:]).astype(dtype_of(stored))
        x = record.get("dtypes", ("float32",))[0]
        self.result = dtype_of(x if x in ("float64", stored) or stored in HALVES else stored)
        self.computed = np.dtype("float32") if x in HALVES and stored in HALVES else np.dtype(self.result)
        self.wide = wide_type(self.computed)
        self.weights = {name: w.astype(self.wide) for name, w in given.items()}
        self.tables = None
        if "rope" in chosen:
            n, pairs = chosen["positions"], min(chosen["rope"], D // 2)
            angles = 10 * numbers(_NORMAL, self.data, 78, (n, pairs))
            # A layer keeps them in the type that its weights are computed in.
            kept = np.float64 if stored == "float64" else np.float32
            self.tables = [f(angles).astype(kept) for f in (np.cos, np.sin)]
        self.layer = MultiHeadAttention(**given, num_heads=self.H, num_kv_heads=self.K, rope=self.tables)

    def projected(self, x: Array, name: str, positions: Array | None = None) -> Bounded:
        """``(..., heads, length, dim)``, rotated where there are tables."""
        heads = self.H if name == "q" else self.K
        y = self._product(Bounded(x.astype(self.wide), np.zeros(x.shape)), name)
        at, error = (z.reshape(*z.shape[:-1], heads, z.shape[-1] // heads).swapaxes(-3, -2) for z in y)
        if self.tables is None or name == "v":
            return Bounded(at, error)
        rows = np.arange(at.shape[-2]) if positions is None else positions
        c, s = (table.astype(self.wide)[rows][..., None, :, :] for table in self.tables)
        half = c.shape[-1]
        a, b = np.s_[..., :half], np.s_[..., half : 2 * half]
        turned, moved = at.copy(), error.copy()
        turned[a], turned[b] = at[a] * c - at[b] * s, at[b] * c + at[a] * s
        rounding = ROUNDINGS * float(np.finfo(self.computed).eps) * (np.abs(at[a]) + np.abs(at[b]))
        moved[a] = moved[b] = error[a] + error[b] + rounding
        return Bounded(turned, moved)

    def _product(self, x: Bounded, name: str) -> Bounded:
        w, b = self.weights[f"w_{name}"], self.weights.get(f"b_{name}", 0)
        # A sum of n products in any order, and the bias: n + 1 roundings of half a unit of all that is added.
        unit = (len(w) / 2 + 1) * float(np.finfo(self.computed).eps)
        size = np.abs(x.at) @ np.abs(w) + np.abs(b)
        tiny = float(np.finfo(self.computed).tiny)
        return Bounded(x.at @ w + b, x.error @ np.abs(w) + unit * size + tiny)

    def attended(
        self, parts: list[Bounded], allowed: Array, options: dict[str, Any], keep: Array | None, share: float
    ) -> dict[str, Bounded]:
        """Out, lse and weights; what no first-order bound holds for is NaN."""
        q, k, v = (x if n == 0 else Bounded(*(np.repeat(y, self.H // self.K, -3) for y in x))
                   for n, x in enumerate(parts))  # fmt: skip
        wide, limits = self.wide, np.finfo(self.computed)
        eps, tiny = float(limits.eps), float(limits.tiny)
        scale = options.get("scale")
        factor = 1 / np.sqrt(wide(q.at.shape[-1])) if scale is None else wide(scale)
        k_t = k.at.swapaxes(-1, -2)
        scores = factor * (q.at @ k_t)
        products = np.abs(factor) * (np.abs(q.at) @ np.abs(k_t))
        moved = np.abs(factor) * (q.error @ np.abs(k_t) + (np.abs(q.at) + q.error) @ k.error.swapaxes(-1, -2))
        if options.get("softcap") is not None:
            scores = options["softcap"] * np.tanh(scores / options["softcap"])
        size = np.abs(scores) + products
        if options.get("bias") is not None:
            bias = np.where(allowed, options["bias"].astype(self.computed), 0).astype(wide)
            scores, size = scores + bias, size + np.abs(bias)
        moved = np.where(allowed, moved + ROUNDINGS * eps * size, 0)
        scores = np.where(allowed, scores, -np.inf)
        sink = options.get("sinks")
        top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        added: Any = 0.0
        if sink is not None:
            sink = sink.astype(self.computed).astype(wide)[:, None, None]
            top = np.maximum(top, sink)
        base = np.where(top == -np.inf, 0, top)
        raised = np.exp(scores - base)
        if sink is not None:
            added = np.exp(sink - base)
        total = raised.sum(axis=-1, keepdims=True) + added
        read = allowed.any(axis=-1)
        p = raised / np.where(total == 0, 1, total)
        wander = (p * moved).sum(axis=-1, keepdims=True)
        if sink is not None:
            wander = wander + ROUNDINGS * eps * np.abs(sink)
        unclear = moved.max(axis=-1, keepdims=True, initial=0) > FIRST_ORDER / 4
        kept = p if keep is None else p * keep / wide(share)
        # A weight below all normal numbers is 0 in kernels.
        changed = 2 * kept * (ROUNDINGS * eps + moved + wander) + ROUNDINGS * tiny / share
        out = kept @ v.at
        heads = changed @ np.abs(v.at) + (kept + changed) @ v.error + tiny
        nothing = -np.inf if sink is None else sink
        lse = np.where(read[..., None], base + np.log(np.where(total == 0, 1, total)), nothing)
        size = 1 + np.abs(np.where(np.isfinite(lse), lse, 0))
        ends = wander + moved.max(axis=-1, keepdims=True, initial=0) + ROUNDINGS * eps * size
        columns = self.H * v.at.shape[-1]
        joined = Bounded(*(
            np.where(unclear, np.nan, x).swapaxes(-3, -2).reshape(*x.shape[:-3], x.shape[-2], columns)
            for x in (out, heads)
        ))  # fmt: skip
        return {
            "out": self._product(joined, "o"),
            "lse": Bounded(lse[..., 0], np.where(unclear, np.nan, ends)[..., 0]),
            "weights": Bounded(kept, np.where(unclear, np.nan, changed)),
        }


def _placed(x: Array, place: str | None) -> Array:
    if place is None or (place == "byte_swapped" and x.dtype.kind == "V") or place == "zero_stride":
        return x
    return MEMORY_LAYOUTS[place](x)


def hold(name: str, got: Array, exact: Bounded, result: np.dtype, computed: np.dtype) -> None:
    """Within the bound, and half a unit of the type where that is narrower; NaN bounds say nothing."""
    if got.shape != exact.at.shape or got.dtype != result:
        raise Failure(f"layer {name}", f"{got.shape} {got.dtype}, expected {exact.at.shape} {result}")
    bound = exact.error
    if result != computed:
        bound = bound + _half_unit(np.abs(exact.at) + bound, result)
    wide = got.astype(exact.at.dtype)
    wrong = ~(np.abs(wide - exact.at) <= bound) & ~np.isnan(bound) & ~(wide == exact.at)
    if wrong.any():
        at = tuple(map(int, np.argwhere(wrong)[0]))
        raise Failure(
            f"wrong layer {name}",
            f"at {at} of {got.shape}: got {got[at]!r}, exact {exact.at[at]!r}, bound {float(bound[at]):.3g}",
        )


def check_layers(record: Record, engine: Engine) -> None:
    (_with_cache if "cache" in record["layer"] else _without_cache)(record, engine)


def _rows(layer: Layer, record: Record, name: str, shape: tuple[int, ...], number: int) -> Array:
    dtype = dtype_of(record.get("dtypes", ("float32",))[0])
    return numbers(_NORMAL, layer.data, number, (*shape, layer.dims[name])).astype(dtype)


def _without_cache(record: Record, engine: Engine) -> None:
    case, chosen, layer = Case(record), record["layer"], Layer(record)
    given = chosen.get("given", "self")
    xs = [_rows(layer, record, "q", (*case.lead, case.L), 80)]
    if given != "self":
        xs.append(_rows(layer, record, "k", (*case.lead, case.S), 81))
    if given == "value":
        xs.append(_rows(layer, record, "v", (*case.lead, case.S), 82))
    options = {name: x for name, x in case.options.items() if name != "layout"}
    positions = None
    lengths = np.broadcast_to(case.S if case.key_lengths is None else np.asarray(case.key_lengths), case.lead)
    if case.causal == "bottom_right":
        positions = np.maximum(lengths.astype(int)[..., None] + np.arange(-case.L, 0), 0)
    whole = [xs[0], xs[min(1, len(xs) - 1)], xs[-1]]
    parts = [
        layer.projected(x, n, positions if n == "q" else None) for x, n in zip(whole, "qkv", strict=True)
    ]
    plain = {name: getattr(case, name) for name in ("scale", "softcap", "sinks")} | {"bias": case.bias}
    exact = layer.attended(parts, case.allowed, plain, *case.keep)
    returns: dict[str, Any] = {"return_lse": True} if chosen.get("lse") else {}
    averaged = chosen.get("weights") == "mean"
    if chosen.get("weights"):
        returns["return_weights"] = chosen["weights"]
        if averaged:
            exact["weights"] = Bounded(*(x.mean(axis=-3) for x in exact["weights"]))
    names = [
        "out",
        *(name for name, it in (("lse", "return_lse"), ("weights", "return_weights")) if it in returns),
    ]
    call = lambda *arrays, **more: layer.layer(*arrays, **options, **returns, backend=engine.backend, **more)  # noqa: E731
    moved = [_placed(x, chosen.get("place")) for x in xs]
    got = call(*moved, num_threads=record.get("num_threads"))
    results = got if isinstance(got, tuple) else (got,)
    types = {"out": layer.result, "lse": layer.computed, "weights": layer.result}
    for name, x in zip(names, results, strict=True):
        hold(name, x, exact[name], types[name], layer.computed)
    room = GuardedOut(results[0].shape, layer.result, chosen.get("out", "contiguous"))
    again = call(*xs, num_threads=3, out=room.array)
    again = again if isinstance(again, tuple) else (again,)
    for name, x, y in zip(names, (room.take(), *again[1:]), results, strict=True):
        same_bits(x, y, f"layer again {name}")
    if not room.is_untouched():
        raise Failure("guard", "bytes around `out` changed")
    if given != "self":  # rows that no query may read
        unread = ~case.allowed.any(axis=(-3, -2))
        spoilt = [xs[0], *(np.where(unread[..., None], np.nan, x).astype(x.dtype) for x in xs[1:])]
        others = call(*spoilt)
        for name, x, y in zip(
            names, others if isinstance(others, tuple) else (others,), results, strict=True
        ):
            same_bits(x, y, f"layer padding {name}")


def _with_cache(record: Record, engine: Engine) -> None:
    """Calls one after another, each with some of every item's tokens, against all tokens at once."""
    chosen, layer = record["layer"], Layer(record)
    program, batch = chosen["cache"], record["lead"][0]
    case = Case(record | {"lead": [], "len_q": 0, "len_k": 0})
    swapped = program.get("layout") == "bshd"
    window, keep_first = program.get("window"), program.get("keep_first", 0)
    cache = fastattn.KVCache(
        batch, layer.K, record["head_dim"], record["value_dim"], dtype=layer.computed.name, window=window,
        keep_first=keep_first, page_size=program.get("page_size"), layout="bshd" if swapped else "bhsd",
    )  # fmt: skip
    plain = {name: getattr(case, name) for name in ("scale", "softcap", "sinks")}
    options = {name: x for name, x in plain.items() if x is not None}
    counts = np.array([
        integers(layer.data, 90 + at, (batch,), 0, n) if program.get("ragged") else np.full(batch, n)
        for at, n in enumerate(program["chunks"])
    ])  # fmt: skip
    counts[0, 0] = program["chunks"][0]
    total = counts.sum(axis=0)
    texts = [_rows(layer, record, "q", (int(n),), 100 + item) for item, n in enumerate(total)]
    exact = []
    for x in texts:
        parts = [layer.projected(x, name) for name in "qkv"]
        n = len(x)
        i, j = np.arange(n)[:, None], np.arange(n)
        seen = (j <= i) & ((j > i - window) | (j < keep_first) if window else True)
        exact.append(layer.attended(parts, np.broadcast_to(seen, (layer.H, n, n)), plain, None, 1.0)["out"])
    starts = np.zeros(batch, int)
    for n, given in zip(program["chunks"], counts, strict=True):
        x = np.full((batch, n, layer.dims["q"]), np.nan).astype(texts[0].dtype)
        for row, text, start, count in zip(x, texts, starts, given, strict=True):
            row[:count] = text[start : start + count]
        more = {"key_lengths": given} if program.get("ragged") else {}
        got = layer.layer(
            x, cache=cache, backend=engine.backend, num_threads=record.get("num_threads"), **options, **more
        )
        for item, (start, count) in enumerate(zip(starts, given, strict=True)):
            rows = np.s_[start : start + count]
            hold(
                "cache",
                got[item, :count],
                Bounded(*(x[rows] for x in exact[item])),
                layer.result,
                layer.computed,
            )
        starts = starts + given
        if cache.lengths.tolist() != starts.tolist():
            raise Failure("layer cache lengths", f"{cache.lengths.tolist()}, expected {starts.tolist()}")
