"""Random functions of a score and a mask, `trees`, against a Python loop over the allowed pairs.

The loop calls the very function, with a score that carries a bound of its error: each operation adds what it
may round, and passes on what it is given by its slope. A score that is compared with a number closer than its
bound leaves its row unclear.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np

import fastattn
from tests.fuzz import trees
from tests.fuzz.build import _NORMAL, Case, integers, numbers
from tests.fuzz.checks import Engine, Failure, natural_results, results_of, same_bits, within
from tests.fuzz.records import Record
from tests.tolerances import ROUNDINGS

Array = np.ndarray

Pair = namedtuple("Pair", "n table")

#: Of a row whose scores may be wrong by more, the first-order budget says nothing.
LARGEST_ERROR = 0.01


class Unclear(Exception):
    """A comparison that rounding decides."""


class Bounded:
    """A number, and how far that of a narrower type may be from it; eps: of its type."""

    __slots__ = ("eps", "error", "value")
    computed = 0.0  #: eps of the computation

    def __init__(self, value: float, error: float = 0.0, eps: float | None = None) -> None:
        self.value, self.error = value, error
        self.eps = self.computed if eps is None else eps

    @staticmethod
    def of(x: Any) -> Bounded:
        return x if isinstance(x, Bounded) else Bounded(float(x))

    def rounded(
        self, value: float, error: float, roundings: float = 2, other: Bounded | None = None
    ) -> Bounded:
        """What an operation gives, in the wider of two types."""
        eps = self.eps if other is None else min(self.eps, other.eps)
        return Bounded(value, error * (1 + 4 * eps) + roundings * eps * abs(value), eps)

    def __add__(self, other: Any) -> Bounded:
        other = Bounded.of(other)
        return self.rounded(self.value + other.value, self.error + other.error, 2, other)

    def __mul__(self, other: Any) -> Bounded:
        other = Bounded.of(other)
        error = abs(self.value) * other.error + (abs(other.value) + other.error) * self.error
        return self.rounded(self.value * other.value, error, 2, other)

    def __truediv__(self, other: Any) -> Bounded:
        other = Bounded.of(other)
        least = abs(other.value) - other.error
        quotient = self.value / other.value
        return self.rounded(quotient, (self.error + abs(quotient) * other.error) / least, 3, other)

    def __neg__(self) -> Bounded:
        return Bounded(-self.value, self.error, self.eps)

    def __abs__(self) -> Bounded:
        return Bounded(abs(self.value), self.error, self.eps)

    def __sub__(self, other: Any) -> Bounded:
        return self + -Bounded.of(other)

    def __rsub__(self, other: Any) -> Bounded:
        return Bounded.of(other) - self

    def __rtruediv__(self, other: Any) -> Bounded:
        return Bounded.of(other) / self

    def __gt__(self, other: float) -> bool:
        if abs(self.value - other) <= self.error:
            raise Unclear
        return self.value > other

    __radd__, __rmul__ = __add__, __mul__


def _smooth(function: Callable[[float], float], roundings: float = 5) -> Callable[[Any], Bounded]:
    """A function of slope 1 at most."""

    def of(x: Any) -> Bounded:
        x = Bounded.of(x)
        return x.rounded(function(x.value), x.error, roundings)

    return of


def _sqrt(x: Any) -> Bounded:
    x = Bounded.of(x)
    root = math.sqrt(x.value)
    error = math.sqrt(x.value + x.error) - math.sqrt(max(x.value - x.error, 0.0))
    return x.rounded(root, error)


def _extreme(choose: Callable[..., float], *, is_numpy: bool = False) -> Callable[[Any, Any], Any]:
    """NumPy's gives what is beside a Python number in its own type, Python's in the wider of two types."""

    def of(x: Any, y: Any) -> Any:
        floats = [z for z in (x, y) if isinstance(z, Bounded)]
        if not floats:
            return choose(x, y)
        weak = floats[0].eps if is_numpy else None
        x, y = (z if isinstance(z, Bounded) else Bounded(float(z), 0.0, weak) for z in (x, y))
        return x.rounded(choose(x.value, y.value), max(x.error, y.error), 2, y)

    return of


_MATH = SimpleNamespace(
    tanh=_smooth(math.tanh), exp=_smooth(lambda x: math.exp(x)), exp2=_smooth(lambda x: 2.0**x),
    log1p=_smooth(math.log1p), sin=_smooth(math.sin), cos=_smooth(math.cos), sqrt=_sqrt, inf=math.inf,
    minimum=_extreme(min, is_numpy=True), maximum=_extreme(max, is_numpy=True),
    where=lambda condition, x, y: x if condition else y,
)  # fmt: skip
_BOUNDED = {"math": _MATH, "np": _MATH, "min": _extreme(min), "max": _extreme(max)}


class Table:
    """An array that gives Python's numbers, as exact ones."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __getitem__(self, index: Any) -> Any:
        found = self._array[index]
        if np.ndim(found):
            return Table(found)
        if found.dtype.kind != "f":
            return found.item()
        eps = float(np.finfo(np.float32).eps) if found.dtype.itemsize < 8 else None
        return Bounded(float(found), 0.0, eps)

    @property
    def flat(self) -> Table:
        return Table(self._array.ravel())

    @property
    def T(self) -> Table:
        return Table(self._array.T)


class Functions:
    """What a record's functions are: their tables, their source, and they themselves."""

    def __init__(self, case: Case, allowed: Array) -> None:
        self.chosen, self._data = case.record["flex"]["function"], case.data
        self._whole, self._captured = int(integers(case.data, "other", (), 1, 5)), 0.375
        self._flag = bool(case.data % 2)
        self.number = float(numbers(_NORMAL, case.data, "sinks", ()))
        specs = self.chosen["tables"]
        sizes = self._sizes(allowed)
        self.tables = {number: self._table(number, specs[number], shape) for number, shape in sizes.items()}
        self.of_aux = [number for number in self.tables if specs[number]["place"] == "aux"]
        self._places = {number: specs[number]["place"] for number in self.tables}

    def _sizes(self, allowed: Array) -> dict[int, tuple[int, ...]]:
        """Of each table, as many as the allowed pairs read: the masked ones may read beyond."""
        found = {}
        for of in ("score", "mask"):
            places = np.nonzero(allowed if of == "score" else np.ones_like(allowed))
            values = dict(zip(trees.INDICES, places, strict=True)) | {"whole": self._whole}
            values |= {"min": np.minimum, "max": np.maximum}
            for number, template, indices in trees.reads(self.chosen.get(of)):
                shape = []
                for index in indices:
                    at = np.asarray(eval(trees.source(index, {}), values))
                    shape.append(max(1, int(at.max(initial=-1)) + 1, -int(at.min(initial=0))))
                found[number] = tuple(reversed(shape)) if ".T[" in template else tuple(shape)
        if self.chosen["short"] and found:
            number = max(found)
            found[number] = (max(1, found[number][0] - 1), *found[number][1:])
        return found

    def _table(self, number: int, spec: Record, shape: tuple[int, ...]) -> Array:
        shape = (*shape[:-1], 2 * shape[-1]) if spec["strided"] else shape
        drawn = np.round(2 * numbers(_NORMAL, self._data + number, "bias", shape).astype(float), 2)
        dtype = np.dtype(spec["dtype"])
        array = (
            drawn > 0 if dtype.kind == "b" else (np.abs(drawn) if dtype.kind == "u" else drawn).astype(dtype)
        )
        return array[..., ::2] if spec["strided"] else array

    def names(self) -> dict[str, str]:
        texts = {"aux": "t{}", "global": "t{}", "closure": "t{}", "default": "t{}",
                 "tuple": "t{}[1][0]", "named": "t{}.table"}  # fmt: skip
        return {f"table{number}": texts[place].format(number) for number, place in self._places.items()}

    def make(self, wrap: Callable[[Array], Any] = lambda array: array) -> tuple[Any, Any, list[Any]]:
        """score_mod and mask_mod, None where there is none, and aux. wrap: what stands for each table."""
        tables = {number: wrap(array) for number, array in self.tables.items()}
        held: dict[str, dict[str, Any]] = {place: {} for place in trees.PLACES}
        for number, table in tables.items():
            place = self._places[number]
            value = {"tuple": (2.5, (table, 3)), "named": Pair(2, table)}.get(place, table)
            held[place][f"t{number}"] = value
        own = {"math": math, "np": np, "captured": self._captured, "helper_table": wrap(np.arange(4.0))}
        own |= held["global"] | held["tuple"] | held["named"]
        aux = ["number", "whole", "flag", *held["aux"]]
        made = []
        for of, first in (("score", "score, "), ("mask", "")):
            if of not in self.chosen:
                made.append(None)
                continue
            defaults = "".join(f", {name}={name}" for name in held["default"])
            text = (
                "def helper(x, i):\n    return x + helper_table[i % 4] * 0.25\n"
                f"def outer({', '.join([*held['closure'], *held['default']])}):\n"
                f"  def function({first}{', '.join((*trees.INDICES, *aux))}{defaults}):\n"
                f"    {trees.source(self.chosen[of], self.names())}\n"
                "  return function\n"
            )
            namespace = dict(own)
            exec(compile(text, "<drawn>", "exec"), namespace)
            made.append(namespace["outer"](**held["closure"], **held["default"]))
        return made[0], made[1], [self.number, self._whole, self._flag, *held["aux"].values()]


def _in_python(function: Any) -> Any:
    """The function with operations on numbers that carry a bound."""
    names = dict(function.__globals__) | _BOUNDED
    helper = names["helper"]
    names["helper"] = FunctionType(helper.__code__, names)
    return FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )


def check(record: Record, engine: Engine) -> None:
    """What `flex_attention` gives for drawn functions, beside every kind of mask."""
    case = Case(record)
    full = (*case.lead, case.H, case.L, case.S)
    flat = (math.prod(case.lead), case.H, case.L, case.S)
    allowed = np.broadcast_to(case.allowed, full).reshape(flat)
    if case.bias is not None:
        allowed = allowed & (np.broadcast_to(case.bias_read, full).reshape(flat) != -np.inf)
    functions = Functions(case, allowed)
    score_mod, mask_mod, aux = functions.make()
    if engine.backend == "reference":
        score_mod = None
    if score_mod is None and mask_mod is None:
        return
    wanted = _Expected(case, functions, allowed, has_score=score_mod is not None)
    options = dict(case.options)
    if isinstance(options.get("mask"), fastattn.masks.Mask):
        options["block_mask"] = options.pop("mask")
    options |= {"score_mod": score_mod, "mask_mod": mask_mod, "aux": aux, "backend": engine.backend}

    def call(num_threads: int | None) -> dict[str, Array]:
        given = {"num_threads": num_threads, "return_lse": True, "return_weights": True}
        results = fastattn.flex_attention(*case.arrays.values(), **options, **given)
        return results_of(results, ["out", "lse", "weights"])

    kept = {number: table.copy() for number, table in functions.tables.items()}
    for table in functions.tables.values():  # a first call with other contents, which the second must not see
        table[...] = 0
    try:
        with suppress(IndexError):
            call(record.get("num_threads"))
        for number, table in functions.tables.items():
            table[...] = kept[number]
        results = call(record.get("num_threads"))
    except IndexError as error:
        if not wanted.raises and not wanted.may_raise:
            raise Failure("flex function refused", str(error)) from error
        return
    if wanted.raises:
        raise Failure("flex function not refused", "an allowed pair reads outside of an array")
    wanted.compare(natural_results(case, results))
    again = call(1 + case.data % 3)
    for name in results:
        same_bits(again[name], results[name], f"flex threads {name}")


class _Expected:
    """The loop over the allowed pairs."""

    def __init__(self, case: Case, functions: Functions, allowed: Array, has_score: bool) -> None:
        self._case = case
        self.computed, _ = case.dtypes
        Bounded.computed = eps = float(np.finfo(self.computed).eps)
        wide = np.longdouble
        full = (*case.lead, case.H, case.L, case.S)
        arrays = {name: np.broadcast_to(x, (*case.lead, *x.shape[-3:])) for name, x in case.naturals.items()}
        q, k, v = (x.reshape(math.prod(case.lead), *x.shape[-3:]).astype(wide) for x in arrays.values())
        repeat = case.H // max(case.K, 1)
        k, v = np.repeat(k, repeat, 1), np.repeat(v, repeat, 1)
        q, k, v = (np.where(np.isfinite(x), x, 0) for x in (q, k, v))
        scale = wide(1 / math.sqrt(case.D) if case.scale is None else case.scale)
        products = scale * (q @ k.swapaxes(-1, -2))
        error = (case.D + ROUNDINGS) * eps * abs(scale) * (abs(q) @ abs(k).swapaxes(-1, -2))
        if case.softcap is not None:
            products = case.softcap * np.tanh(products / case.softcap)
            error = error + 6 * eps * abs(products)
        score_mod, mask_mod, aux = functions.make(Table)
        aux = [Bounded(aux[0]), *aux[1:]]
        self.raises = self.may_raise = False
        allowed = allowed.copy()
        if mask_mod is not None:
            python = _in_python(mask_mod)
            for at in np.ndindex(allowed.shape):
                try:
                    allowed[at] &= bool(python(*at, *aux))
                except IndexError:
                    self.raises = True
        scores = np.where(allowed, products, -np.inf)
        errors = np.where(allowed, error, 0).astype(float)
        unclear = np.zeros(allowed.shape[:-1], bool)
        if has_score:
            python = _in_python(score_mod)
            for at in map(tuple, np.argwhere(allowed).tolist()):
                try:
                    found = Bounded.of(python(Bounded(float(products[at]), float(error[at])), *at, *aux))
                    scores[at], errors[at] = found.value, found.error
                except Unclear:
                    unclear[at[:-1]] = self.may_raise = True
                except IndexError:
                    self.raises = True
        if case.bias is not None:
            bias = np.broadcast_to(case.bias_read, full).reshape(allowed.shape)
            scores = np.where(allowed, scores + bias, -np.inf)
            errors = errors + 2 * eps * abs(np.where(np.isfinite(scores), scores, 0)).astype(float)
        self._answer(scores, errors, unclear, v)

    def _answer(self, scores: Array, errors: Array, unclear: Array, v: Array) -> None:
        case = self._case
        limit = np.finfo(self.computed)
        with np.errstate(all="ignore"):
            sinks = -np.inf if case.sinks is None else np.asarray(case.sinks).astype(self.computed)[:, None]
            top = np.maximum(scores.max(-1, initial=-np.inf), sinks)
            top = np.where(np.isfinite(top), top, 0)
            e = np.exp(scores - top[..., None])
            total = e.sum(-1) + np.exp(sinks - top)
            p = np.where(total[..., None] > 0, e / np.where(total > 0, total, 1)[..., None], 0)
            lse = np.where(total > 0, np.log(total) + top, -np.inf)
        finite = np.where(np.isfinite(scores), scores, 0)
        moved = errors / (ROUNDINGS * float(limit.eps)) + abs(finite) + abs(top)[..., None]
        mean = (p * moved).sum(-1) + case.S / (2 * ROUNDINGS)
        unclear |= (errors.max(-1, initial=0) > LARGEST_ERROR) | (abs(finite).max(-1, initial=0) > 1e30)
        self._unclear = unclear
        reach = (p * (1 + moved)) @ abs(v) + (mean[..., None] + 1) * (p @ abs(v))
        self._exact = {"out": p @ v, "lse": lse, "weights": p}
        self._reach = {
            "out": reach,
            "lse": 1 + mean + abs(np.where(np.isfinite(lse), lse, 0)),
            "weights": p * (1 + moved + mean[..., None]),
        }

    def compare(self, results: dict[str, Array]) -> None:
        for name, got in results.items():
            exact, unclear = self._exact[name], self._unclear
            if name != "lse":
                unclear = np.broadcast_to(unclear[..., None], exact.shape)
            exact, reach, unclear = (x.reshape(got.shape) for x in (exact, self._reach[name], unclear))
            within(
                f"flex function {name}", got, exact, reach.astype(float), unclear, self.computed, lambda: []
            )
