"""`gated_linear_attention` against the recurrence, token by token in extended precision.

Sizes, types and places in memory of query, key and value are those of a `Case`; gates, the state and what is
spoilt are under "recurrent".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import fastattn
from tests.fuzz.build import _NORMAL, _UNIFORM, Array, Case, broadcast_item, dtype_of, integers, numbers
from tests.fuzz.checks import Engine, Failure, native, natural_results, results_of, same_bits, within
from tests.fuzz.records import Record

#: Which decays a rule has, of tokens ("t") or of columns ("c"), and whether rates of the delta rule ("b").
RULES = {"linear": "", "gated": "t", "gla": "c", "delta": "b", "gated_delta": "tb", "kimi": "cb"}
#: Results and states beyond it may overflow on the way in the type of the computation.
LARGEST = {4: 1e30, 8: 1e250}


class Exact(NamedTuple):
    """Results ``(*lead, H, L, E)`` or the state after ``(*lead, K, D, E)``."""

    values: Array
    reach: Array  #: how far roundings move them
    beyond: Array  #: bool: what they are made from may overflow
    either: Array  #: bool: from a state that was not finite, and was multiplied by 0, which is NaN or 0


class Problem:
    """The arrays of a case: those of tokens as ``(*lead, heads, L, ...)``, gates with an axis of columns."""

    def __init__(self, record: Record) -> None:
        self.case = case = Case(record | {"len_k": record["len_q"]})
        self.chosen = chosen = record["recurrent"]
        self.computed, self.result = case.dtypes
        self.lengths = np.broadcast_to(
            case.L if case.key_lengths is None else np.asarray(case.key_lengths, np.int64), case.lead
        )
        self.naturals: dict[str, Array] = dict(case.naturals)
        key = self.naturals["key"]
        if "size" in chosen and key.dtype.kind not in "biu":
            wide = key.astype(np.float64)
            norms = np.sqrt((wide**2).sum(-1, keepdims=True))
            self.naturals["key"] = (chosen["size"] * wide / np.where(norms, norms, 1)).astype(key.dtype)
        rule = RULES[chosen["rule"]]
        if "b" in rule:
            rates = numbers(_UNIFORM, case.data, 61, self._gate_shape("beta", 1))
            self.naturals["beta"] = (rates * chosen.get("rate", 1.0)).astype(self._gate_dtype())
        if "t" in rule or "c" in rule:
            self.naturals["decay"] = self._decay(case.D if "c" in rule else 1)
        if chosen.get("state"):
            shape = (*case.lead, case.K, case.D, case.E)
            self.naturals["state"] = numbers(_NORMAL, case.data, 62, shape).astype(dtype_of(chosen["state"]))
        self.clean = dict(self.naturals)
        if chosen.get("hidden"):
            self.naturals = self.hidden(chosen["hidden"])

    def _gate_dtype(self) -> np.dtype:
        return dtype_of(self.chosen.get("gates", "float32"))

    def _gate_shape(self, name: str, columns: int) -> tuple[int, ...]:
        full = (*self.case.lead, self.case.K, self.case.L)
        once = self.chosen.get("once", {}).get(name, ())
        shape = tuple(1 if axis < len(once) and once[axis] else n for axis, n in enumerate(reversed(full)))
        return (*reversed(shape), columns)

    def _decay(self, columns: int) -> Array:
        shape = self._gate_shape("decay", columns)
        chance = numbers(_UNIFORM, self.case.data, 63, shape)
        decay = np.log(np.maximum(numbers(_UNIFORM, self.case.data, 64, shape), 1e-30)) * self.chosen["reach"]
        for share, value in ((0.05, -np.inf), (0.1, -1e4), (0.15, -1e30)) if "breaks" in self.chosen else ():
            decay = np.where((chance < share) & (chance >= share - 0.05), value, decay)
        decay = np.where(chance > 1 - self.chosen.get("none", 0.0), 0, decay)
        return np.maximum(decay, -6e4 if self._gate_dtype() == np.float16 else -np.inf).astype(
            self._gate_dtype()
        )

    def hidden(self, kind: str) -> dict[str, Array]:
        """The arrays with nonfinite numbers in tokens at or past the lengths, which are never read."""
        unread = np.arange(self.case.L) >= self.lengths[..., None]
        found = dict(self.naturals)
        for name, x in self.naturals.items():
            if (
                name in ("query", "state")
                or x.dtype.kind in "biu"
                or self.case.places.get(name) == "zero_stride"
            ):
                continue
            full = (*self.case.lead, self.case.K, self.case.L)
            if name in ("decay", "beta") and x.shape[:-1] != full:  # a number for some tokens that are read
                continue
            where = unread
            missing = len(self.case.lead) - (x.ndim - 3)
            where = where.all(axis=tuple(range(missing))) if missing else where
            spread = tuple(axis for axis, n in enumerate(x.shape[:-3]) if n == 1)
            where = where.all(axis=spread, keepdims=True) if spread else where
            where = np.broadcast_to(where[..., None, :], x.shape[:-1])
            found[name] = x.copy()
            found[name][where] = float(kind)
        return found

    def item(self, place: tuple[int, ...]) -> tuple[Case, dict[str, Array]]:
        """One batch item alone."""
        lead = self.case.lead
        parts = {
            name: np.ascontiguousarray(broadcast_item(x, lead, place, 3)) for name, x in self.naturals.items()
        }
        return Case(self.case.record, place), parts

    def arguments(self, case: Case, naturals: dict[str, Array]) -> tuple[list[Array], dict[str, Any]]:
        """As a caller gives them."""
        arrays = [case.given(name, naturals[name]) for name in ("query", "key", "value")]
        options: dict[str, Any] = {}
        for name in ("decay", "beta"):
            if name not in naturals:
                continue
            x = naturals[name]
            x = x[0] if case.is_flat else x.swapaxes(-3, -2) if case.swapped else x
            # An axis of columns says that the decays are of these; else it is left out.
            of_columns = name == "decay" and "c" in RULES[self.chosen["rule"]]
            options[name] = _placed(case, name, x if of_columns else x[..., 0])
        if "state" in naturals:
            state = naturals["state"][0] if case.is_flat else naturals["state"]
            options["state"] = _placed(case, "state", state)
        if case.key_lengths is not None:
            options["key_lengths"] = case.key_lengths
        if case.scale is not None:
            options["scale"] = case.scale
        return arrays, options | ({"layout": "bshd"} if case.swapped else {})


def _placed(case: Case, name: str, array: Array) -> Array:
    # `Case.given` is of the arrays of attention: of others it knows the place in memory alone.
    if case.places.get(name) == "byte_swapped" and array.dtype.name == "bfloat16":
        return array
    return case.given(name, array) if case.places.get(name) != "zero_stride" else array


def _factor(problem: Problem, decay: Array) -> Array:
    return np.exp(decay.astype(problem.computed))


def _norm(x: Array, axis: int = -1) -> Array:
    """In float64: how far roundings move a result need not be exact."""
    x = x.astype(np.float64)
    return np.sqrt((x * x).sum(axis=axis))


def recurrence(problem: Problem, arrays: dict[str, Array], dtype: Any) -> dict[str, Exact]:
    """The definition, in this type. Each rounding of a token's work is of the size of what it works on."""
    case, lengths = problem.case, problem.lengths
    lead, H, K, L, D, E = case.lead, case.H, case.K, case.L, case.D, case.E
    limits, most = np.finfo(problem.computed), LARGEST[problem.computed.itemsize]
    q, k, v = (
        np.broadcast_to(arrays[name].astype(dtype), (*lead, *arrays[name].shape[-3:]))
        for name in ("query", "key", "value")
    )
    q = q.reshape(*lead, K, H // max(K, 1), L, D)
    decay, beta = (
        np.broadcast_to(arrays[name].astype(problem.computed), (*lead, K, L, arrays[name].shape[-1]))
        if name in arrays
        else None
        for name in ("decay", "beta")
    )
    if decay is not None:
        kept = np.where(_factor(problem, decay) == 0, 0, np.exp(decay.astype(dtype)))
        growths = kept.max(axis=-1, initial=0).astype(np.float64)
    S = np.zeros((*lead, K, D, E), dtype)
    if "state" in arrays:
        S = S + arrays["state"].astype(problem.computed).astype(dtype)
    scale = dtype(1) / np.sqrt(dtype(D)) if case.scale is None else dtype(case.scale)
    key_lengths, query_lengths = _norm(k), abs(float(scale)) * _norm(q)
    moved, largest = np.zeros((2, *lead, K, E))
    forgot = np.zeros((*lead, K, E), bool)
    out, reach = np.zeros((*q.shape[:-1], E), dtype), np.zeros((*q.shape[:-1], E))
    unclear, either = np.zeros((2, *out.shape), bool)
    lost = float(limits.tiny) / float(limits.eps)
    for t in range(L):
        key, added, growth, new = k[..., t, :], v[..., t, :], 1.0, S
        is_read = (t < lengths)[..., None, None]
        if decay is not None:
            factor, growth = kept[..., t, :, None], growths[..., t, None]
            new = factor * S
            if not factor.all():
                new = np.where(factor == 0, 0, new)
                forgot |= is_read & ((factor == 0) & ~np.isfinite(S)).any(axis=-2)
        size, length = _norm(new, -2), key_lengths[..., t, None]
        local = length * abs(added).astype(np.float64)
        if beta is not None:
            rate = beta[..., t, :].astype(dtype)
            rates = abs(rate).astype(np.float64)
            local = size * rates * length**2 + rates * local
            growth = growth * np.maximum(1, abs(1 - rate.astype(np.float64) * length**2))
            added = rate * (added - (key[..., None, :] @ new)[..., 0, :])
        local = local + size
        S = np.where(is_read[..., None], new + key[..., None] * added[..., None, :], S)
        still, peak = (np.where(growth == 0, 0, growth * x) for x in (moved, largest))
        moved = np.where(is_read, np.hypot(still, local + lost), moved)
        largest = np.where(is_read, np.maximum(peak, local), largest)
        out[..., t, :] = scale * (q[..., t, :] @ S)
        of_query = query_lengths[..., t]
        reach[..., t, :] = of_query[..., None] * (moved + _norm(S, -2) + lost)[..., None, :] + lost
        beyond = ~(np.maximum(largest, 1) * np.maximum(of_query.max(axis=-1, initial=1), 1)[..., None] < most)
        unclear[..., t, :], either[..., t, :] = beyond[..., None, :], forgot[..., None, :]
    of_out = (x.reshape(*lead, H, L, E) for x in (out, reach, unclear, either))
    of_state = (
        np.broadcast_to(x, S.shape)
        for x in (S, moved[..., None, :] + abs(S), ~(largest < most)[..., None, :], forgot[..., None, :])
    )
    return {"out": Exact(*of_out), "state": Exact(*of_state)}


def check(record: Record, engine: Engine) -> None:
    problem = Problem(record)
    case = problem.case
    names = ["out", "state"]

    def backend(its: Case) -> str | None:
        has_work = all((*its.lead, its.H, its.L, its.D, its.E))
        return engine.backend if has_work else None  # the compiled one refuses to do nothing

    def call(its: Case, naturals: dict[str, Array], **more: Any) -> dict[str, Array]:
        arrays, options = problem.arguments(its, naturals)
        options = {"num_threads": record.get("num_threads"), "return_state": True} | options | more
        arrays = [options.pop(name, x) for name, x in zip(("query", "key", "value"), arrays, strict=True)]
        results = fastattn.gated_linear_attention(*arrays, **options, backend=backend(its))
        return results_of(results, names if options["return_state"] else names[:1])

    def natural(its: Case, results: dict[str, Array]) -> dict[str, Array]:
        return natural_results(its, results)

    arrays, options = problem.arguments(case, problem.naturals)
    given = dict(zip(("query", "key", "value"), arrays, strict=True)) | options
    before = [(name, x, x.tobytes()) for name, x in given.items() if isinstance(x, np.ndarray)]
    results = results_of(
        fastattn.gated_linear_attention(
            *arrays,
            **options,
            num_threads=record.get("num_threads"),
            return_state=True,
            backend=backend(case),
        ),
        names,
    )
    for name, x, old in before:
        if x.tobytes() != old:
            raise Failure("input", f"{name} changed")
    for name, dtype in (("out", problem.result), ("state", problem.computed)):
        if results[name].dtype != dtype:
            raise Failure(f"dtype {name}", f"{results[name].dtype}, expected {dtype}")
    hold(problem, problem.clean, natural(case, results), "recurrent")
    for variant in record.get("variants", ()):
        if variant == "parts":
            same_bits(call(case, problem.naturals, return_state=False)["out"], results["out"], "parts out")
        elif variant == "threads":
            other = 1 if record.get("num_threads") != 1 else 2 + case.data % 2
            _all_same(call(case, problem.naturals, num_threads=other), results, "threads")
        elif variant == "contiguous":
            plain = {name: native(x) for name, x in given.items() if isinstance(x, np.ndarray)}
            _all_same(call(case, problem.naturals, **plain), results, "contiguous")
        elif variant == "hidden":
            _all_same(call(case, problem.hidden("nan")), results, "hidden")
        else:
            _VARIANTS[variant](problem, engine, call, natural(case, results))


def hold(problem: Problem, arrays: dict[str, Array], results: dict[str, Array], what: str) -> None:
    """Results to the recurrence, within what roundings explain, or twice its error in their own type."""
    exact = recurrence(problem, arrays, np.longdouble)
    plain: dict[str, Exact] = {}

    def plain_of(name: str) -> Array:
        if not plain:
            plain.update(recurrence(problem, arrays, problem.computed.type))
        return plain[name].values

    for name, got in results.items():
        values, reach, beyond, either = exact[name]
        spoilt = ~np.isfinite(values)
        within(
            f"{what} {name}", got, np.where(spoilt, np.nan, values),
            np.where(np.isfinite(reach), reach, 0).astype(float), either | (beyond & ~spoilt),
            problem.computed, lambda name=name: [plain_of(name)], spoilt,
        )  # fmt: skip


def _all_same(got: dict[str, Array], wanted: dict[str, Array], what: str) -> None:
    for name, x in got.items():
        same_bits(x, wanted[name], f"recurrent {what} {name}")


Call = Callable[..., dict[str, Array]]


def again(problem: Problem, engine: Engine, call: Call, results: dict[str, Array]) -> None:
    _all_same(natural_results(problem.case, call(problem.case, problem.naturals)), results, "again")


def item(problem: Problem, engine: Engine, call: Call, results: dict[str, Array]) -> None:
    """One batch item alone."""
    lead = problem.case.lead
    if not lead or 0 in lead:
        return
    place = tuple(problem.case.data // 7 % n for n in lead)
    alone, parts = problem.item(place)
    _all_same(
        natural_results(alone, call(alone, parts)), {name: x[place] for name, x in results.items()}, "item"
    )


def layout(problem: Problem, engine: Engine, call: Call, results: dict[str, Array]) -> None:
    record = problem.case.record
    if not problem.case.is_flat:
        other = Case(record | {"layout": "bhsd" if problem.case.swapped else "bshd"})
        _all_same(natural_results(other, call(other, problem.naturals)), results, "layout")


def cut(problem: Problem, engine: Engine, call: Call, results: dict[str, Array]) -> None:
    """Cut in parts, each with the state of the part before."""
    case = problem.case
    cuts = np.sort(integers(case.data, 66, (1 + case.data % 3,), 0, case.L)).tolist()
    state, parts = None, []
    for start, stop in zip([0, *cuts], [*cuts, case.L], strict=True):
        part = Case(case.record | {"len_q": stop - start, "len_k": stop - start, "places": {}})
        if case.key_lengths is not None:
            lengths = np.asarray(case.key_lengths, np.int64)
            part.__dict__["key_lengths"] = np.clip(lengths - start, 0, stop - start)
        arrays = {
            name: x if name == "state" or x.shape[-2] == 1 != case.L else x[..., start:stop, :]
            for name, x in problem.naturals.items()
        }
        more = {} if state is None else {"state": state}
        found = call(part, arrays, **more)
        state = found["state"]
        parts.append(natural_results(part, found))
    whole = {"out": np.concatenate([it["out"] for it in parts], axis=-2), "state": parts[-1]["state"]}
    hold(problem, problem.clean, whole, "recurrent cut")


def poison(problem: Problem, engine: Engine, call: Call, results: dict[str, Array]) -> None:
    """A nonfinite number of one token, which later tokens of its head and item read, and nobody else."""
    case, data = problem.case, problem.case.data
    if not case.L or not case.K or 0 in case.lead:
        return
    names = [name for name in ("key", "value", "decay", "beta") if name in problem.naturals]
    name = names[data // 3 % len(names)]
    x = problem.naturals[name]
    lead = (*case.lead, case.K, case.L)
    if (
        x.dtype.kind in "biu"
        or x.shape[:-1] != lead
        or not x.shape[-1]
        or case.places.get(name) == "zero_stride"
    ):
        return
    where = tuple(int(integers(data, 67 + axis, (), 0, n - 1)) for axis, n in enumerate(x.shape))
    *place, head, token, _ = where
    if token >= problem.lengths[tuple(place)]:
        return
    if name == "decay" or (
        name == "key" and "beta" in problem.naturals
    ):  # a state that is 0 need not be read
        decay = problem.naturals.get("decay", np.zeros(1))
        decay = np.broadcast_to(decay, (*lead, decay.shape[-1]))[(*place, head, token)]
        if (token == 0 and "state" not in problem.naturals) or not _factor(problem, decay).all():
            return
    number = (np.nan, np.inf, -np.inf)[data // 5 % (2 if name == "decay" else 3)]
    arrays, clean = {**problem.naturals, name: x.copy()}, {**problem.clean, name: problem.clean[name].copy()}
    arrays[name][where] = clean[name][where] = number
    got = natural_results(case, call(case, arrays))
    hold(problem, clean, got, "recurrent poison")
    group, own = case.H // case.K, tuple(place)
    same = {key: np.ones(value.shape, bool) for key, value in got.items()}
    same["out"][(*own, slice(head * group, (head + 1) * group), slice(token, None))] = False
    same["state"][(*own, head)] = False
    if engine.backend == "reference":  # it computes the whole item once more, token by token
        for kept in same.values():
            kept[own] = False
    elif "c" in RULES[problem.chosen["rule"]]:  # factors of a chunk depend on where it ends
        same["out"][(*own, slice(head * group, (head + 1) * group))] = False
    for key, kept in same.items():
        same_bits(got[key][kept], results[key][kept], f"recurrent poison {key} elsewhere")


_VARIANTS: dict[str, Callable[[Problem, Engine, Call, dict[str, Array]], None]] = {
    "again": again, "item": item, "layout": layout, "cut": cut, "poison": poison,
}  # fmt: skip
