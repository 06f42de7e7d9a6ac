"""One case: the call, the oracle's answer, and what else must hold. `check` raises `Failure`, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import lcm
from typing import Any

import ml_dtypes
import numpy as np

import fastattn
from fastattn._call.gradients import ROWS
from fastattn._machine import constants
from fastattn._machine.constants import ISAS, MODEL_ISAS
from fastattn.backends.cython import backend as cython_backend
from tests.fuzz import oracle
from tests.fuzz.build import _NORMAL, BFLOAT16, Array, Case, GuardedOut, integers, numbers
from tests.fuzz.records import Record
from tests.fuzz.spoils import spoil
from tests.naive import allowed_keys, formula
from tests.tolerances import ROUNDINGS, assert_gradients, computes_as_upcast

NAMES = ("out", "lse", "weights")
_SMALL_WORK = constants.SMALL_WORK
SHIFT = 40  #: by this power of two are values near the largest number divided, where they have to be
#: What a call that is refused may raise.
REFUSALS = (ValueError, TypeError, fastattn.BackendError)


class Failure(Exception):
    """A case that is not as it should be: `manner` says in which way, the same for cases of one cause."""

    def __init__(self, manner: str, message: str) -> None:
        super().__init__(f"{manner}: {message}")
        self.manner, self.message = manner, message


class Engine:
    """Chooses a backend, and the instruction set where it has one."""

    def __init__(self, name: str) -> None:
        self.backend, _, self.isa = name.partition("-")
        if self.isa and cython_backend.isa() != self.isa:
            cython_backend.driver.choose_isa(self.isa)

    def attention(self, *arrays: Any, **options: Any) -> Any:
        return fastattn.attention(*arrays, backend=self.backend, **options)


def engines() -> list[str]:
    """All that this machine has, the best first."""
    found = [f"cython-{isa}" for isa in cython_backend.available_isas((*ISAS, *MODEL_ISAS))]
    for backend in ("numba", "reference"):
        try:
            fastattn.attention(*np.ones((3, 1, 1)), backend=backend)
        except fastattn.BackendError:
            continue
        found.append(backend)
    return found


def check(record: Record) -> None:
    """Raises `Failure` where the package does not do as it must; anything else that is raised is one, too."""
    with np.errstate(all="ignore"):
        try:
            constants.SMALL_WORK = 0 if record.get("threaded") else _SMALL_WORK
            _KINDS[record["kind"]](record, Engine(record["engine"]))
        except Failure:
            raise
        except MemoryError:
            raise
        except Exception as error:
            raise Failure(f"raised {type(error).__name__}", str(error)) from error


# ---------------------------------------------------------------- comparing


def same_bits(got: Array, wanted: Array, what: str) -> None:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        raise Failure(f"bits {what}", f"{got.shape} {got.dtype}, expected {wanted.shape} {wanted.dtype}")
    if got.tobytes() == wanted.tobytes():
        return
    unsigned = np.dtype(f"u{got.dtype.itemsize}")
    left, right = (np.ascontiguousarray(array).view(unsigned) for array in (got, wanted))
    # Which NaN it is says nothing.
    differ = (left != right) & ~(np.isnan(got.astype(float)) & np.isnan(wanted.astype(float)))
    if differ.any():
        first = tuple(map(int, np.argwhere(differ)[0]))
        raise Failure(
            f"bits {what}",
            f"{int(differ.sum())} of {got.size} elements differ, first at {first}: "
            f"{got[first]!r} and {wanted[first]!r}",
        )


def results_of(results: Any, names: list[str]) -> dict[str, Array]:
    if len(names) == 1:
        results = (results,)
    if not isinstance(results, tuple) or len(results) != len(names):
        raise Failure("results", f"{len(results)} results for {names}")
    return dict(zip(names, results, strict=True))


def within(
    name: str, got: Array, exact: Array, reach: Array, unclear: Array | None, computed: np.dtype,
    plain: Callable[[], list[Array]], spoilt: Array | None = None, may_exceed: bool = True,
) -> None:  # fmt: skip
    """The budget of `tests.tolerances`; `spoilt` elements are NaN or inf, it is not said which. With
    `may_exceed` an exact one may be larger than all numbers of its type.

    `plain` computes the formula's results, which are only needed where the reach alone does not explain an
    error. A result in a narrower type may be half a unit of its last place away besides.
    """
    if got.shape != exact.shape:
        raise Failure(f"shape {name}", f"{got.shape}, expected {exact.shape}")
    if not got.size:
        return
    limits = np.finfo(computed)
    wide = got.astype(exact.dtype)
    error = np.abs(wide - exact)
    budget = ROUNDINGS * (float(limits.eps) * reach + float(limits.tiny))
    if got.dtype != computed:
        budget = budget + _half_unit(np.abs(exact) + budget, got.dtype)
    wrong = ~(error <= budget)
    if not wrong.any():
        return
    wrong &= ~(np.isnan(wide) & np.isnan(exact)) & ~(wide == exact)
    if may_exceed:
        largest = float(ml_dtypes.finfo(got.dtype).max)
        wrong &= ~(np.isinf(wide) & (np.abs(exact) + budget > largest) & (np.sign(wide) == np.sign(exact)))
    if unclear is not None:
        wrong &= ~unclear
    if spoilt is not None:
        wrong &= ~(spoilt & ~np.isfinite(wide))
        missed = spoilt & np.isfinite(wide)
        if unclear is not None:
            missed &= ~unclear
        if missed.any():
            raise Failure(f"wrong {name}", f"a NaN or inf that is read did not get to {_first(missed)}")
    if not wrong.any():
        return
    worst = 0.0
    for formulas in plain():
        judged = np.isfinite(exact) & np.isfinite(formulas)
        if unclear is not None:
            judged &= ~unclear
        worst = max(worst, float(np.abs(formulas.astype(exact.dtype) - exact)[judged].max(initial=0)))
    wrong &= ~(error <= budget + 2 * worst)
    if wrong.any():
        at = _first(wrong)
        raise Failure(
            f"wrong {name}",
            f"at {at} of {got.shape}: got {got[at]!r}, exact {exact[at]!r}, error {float(error[at]):.3g}"
            f" over the budget {float(budget[at]):.3g} + 2 * {worst:.3g}",
        )


def _first(where: Array) -> tuple[int, ...]:
    return tuple(map(int, np.argwhere(where)[0]))


def _half_unit(size: Array, dtype: np.dtype) -> Array:
    limits = ml_dtypes.finfo(dtype)
    return np.maximum(size * float(limits.eps), float(limits.smallest_subnormal)) / 2


class Expected:
    """The oracle's answer to a case, and the formula's where it is asked for."""

    def __init__(
        self, case: Case, arrays: dict[str, Array] | None = None, allowed: Array | None = None
    ) -> None:
        naturals = case.naturals if arrays is None else arrays
        self.case = case
        self.allowed = case.allowed if allowed is None else allowed
        computed, _ = case.dtypes
        lead = case.lead
        self.arrays = {
            name: x if x.shape[:-3] == lead else np.broadcast_to(x, (*lead, *x.shape[-3:]))
            for name, x in naturals.items()
        }
        self.sinks = None if case.sinks is None else np.asarray(case.sinks).astype(computed)
        self.computed = computed
        keep, share = case.keep
        self.answer = oracle.attention(
            *self.arrays.values(), self.allowed, dtype=computed, bias=case.bias_read, scale=case.scale,
            softcap=case.softcap, sinks=self.sinks, keep=keep, share_kept=share,
            weight_error=case.weight_error,
        )  # fmt: skip
        self._plain: Any = None

    def plain(self) -> Any:
        if self._plain is None:
            finite = {}
            for name, x in self.arrays.items():
                x = x.astype(self.computed)
                finite[name] = np.where(np.isfinite(x), x, 0)
            case = self.case
            # Sums of values that it cannot hold are those of smaller ones.
            most = np.abs(finite["value"]).max(initial=0)
            shift = SHIFT if most > np.ldexp(np.finfo(self.computed).max, -SHIFT) else 0
            finite["value"] = np.ldexp(finite["value"], -shift)
            # Of equal values a sum in order is wrong by more with each, and BLAS may be right by luck.
            found = [
                formula(
                    *finite.values(), mask=self.allowed, bias=case.bias_read, scale=case.scale,
                    softcap=case.softcap, sinks=self.sinks, dropout=case.dropout,
                    seed=case.record.get("dropout_seed", 0), in_order=in_order,
                )
                for in_order in (False, True)
            ]  # fmt: skip
            wide = self.answer.out.dtype
            self._plain = [replace(it, out=np.ldexp(it.out.astype(wide), shift)) for it in found]
        return self._plain

    def compare(self, results: dict[str, Array], times: int = 1) -> None:
        """Holds results of ``(*lead, H, L, ...)`` to the budget, `times` the reach."""
        answer = self.answer
        unclear = {"out": answer.unclear_out, "lse": answer.unclear_rows, "weights": answer.unclear_weights}
        for name, got in results.items():
            within(
                name, got, getattr(answer, name), times * getattr(answer, f"{name}_reach"), unclear[name],
                self.computed, lambda name=name: [getattr(it, name) for it in self.plain()],
                answer.nonfinite_out if name == "out" else None, bool(self.case.dropout),
            )  # fmt: skip


def natural_results(case: Case, results: dict[str, Array]) -> dict[str, Array]:
    """Results as ``(*lead, H, L, ...)``."""
    if case.is_flat:
        return {name: x[None] for name, x in results.items()}
    if case.swapped:
        return {name: x.swapaxes(-3, -2) if name == "out" else x for name, x in results.items()}
    return results


# ---------------------------------------------------------------- attention


def inputs_of(case: Case) -> list[tuple[str, Array]]:
    named = [*case.arrays.items(), *((name, case.options.get(name)) for name in ("bias", "mask", "sinks"))]
    return [(name, x if x.base is None else _base(x)) for name, x in named if isinstance(x, np.ndarray)]


def _base(array: Array) -> Array:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def check_attention(record: Record, engine: Engine) -> None:
    case = Case(record)
    threads = record.get("num_threads")
    names = ["out"] + [name for name in NAMES[1:] if record.get(f"return_{name}")]
    returns = {f"return_{name}": True for name in names[1:]}
    arrays, options = list(case.arrays.values()), case.options
    before = [(name, x, x.tobytes()) for name, x in inputs_of(case)]
    chosen = record.get("out")
    computed, result = case.dtypes
    room = None
    if chosen:
        room = GuardedOut(case.results_shape(), computed if chosen.get("wide") else result, chosen["place"])
        returns["out"] = room.array
    given = engine.attention(*arrays, num_threads=threads, **options, **returns)
    results = results_of(given, names)
    if room is not None:
        if results["out"] is not room.array:
            raise Failure("out", "another array is returned")
        results["out"] = room.take()
        if not room.is_untouched():
            raise Failure("guard", "bytes around `out` changed")
    for name, x, old in before:
        if x.tobytes() != old:
            raise Failure("input", f"{name} changed")
    types = {"out": computed if chosen and chosen.get("wide") else result, "lse": computed, "weights": result}
    for name, x in results.items():
        if x.dtype != types[name]:
            raise Failure(f"dtype {name}", f"{x.dtype}, expected {types[name]}")
    natural = natural_results(case, results)
    Expected(case).compare(natural)
    if "weights" in natural:
        hold_weights(case, natural)
    for variant in record.get("variants", ()):
        _VARIANTS[variant](case, engine, results, natural)


def hold_weights(case: Case, results: dict[str, Array]) -> None:
    """However scores are rounded, weights lie within 0 and 1, add up to 1, and are those that `out` has."""
    weights = results["weights"].astype(np.float64)
    computed, _ = case.dtypes
    _, share = case.keep
    eps, unit = (float(ml_dtypes.finfo(dtype).eps) for dtype in (computed, results["weights"].dtype))
    least = float(ml_dtypes.finfo(results["weights"].dtype).smallest_normal)
    rounding = 8 * eps + unit
    known = ~np.isnan(weights).any(axis=-1)
    wrong = known & ((weights < 0) | (weights > (1 + rounding) / share)).any(axis=-1)
    sums = weights.sum(axis=-1)
    if not case.dropout:
        wrong |= known & (sums > 1 + rounding + case.S * least)
        if case.sinks is None:
            wrong |= known & (sums != 0) & (sums < 1 - rounding - case.S * least)
    if wrong.any():
        at = _first(wrong)
        raise Failure(
            "weights of a row", f"at {at}: {weights[at].min()} to {weights[at].max()}, sum {sums[at]}"
        )
    value = np.broadcast_to(case.naturals["value"], (*case.lead, case.K, case.S, case.E)).astype(np.float64)
    if not case.K or not np.isfinite(value).all():
        return
    value = np.repeat(value, case.H // case.K, axis=-3)
    out = results["out"].astype(np.float64)
    of_out = ml_dtypes.finfo(results["out"].dtype)
    reach = weights @ np.abs(value)
    lost = least * np.abs(value).sum(axis=-2, keepdims=True) + float(of_out.smallest_normal)
    # Half a unit for each key of a partial sum, and for each of those, in outputs and in the sum of a row.
    rounding = eps * (64 + case.S / 64) + unit + float(of_out.eps) + case.weight_error
    budget = rounding * reach + lost / share
    # Products of weights above 1, as dropout has them, and the largest values say nothing.
    judged = known[..., None] & np.isfinite(out) & np.isfinite(reach)
    wrong = judged & ~(np.abs(out - weights @ value) <= budget)
    if wrong.any():
        at = _first(wrong)
        raise Failure("out of other weights", f"at {at}: {out[at]!r}, weights give {(weights @ value)[at]!r}")


def _call(case: Case, engine: Engine, names: Any, **more: Any) -> dict[str, Array]:
    """The results of these names, `out` in the result's type."""
    options = {"num_threads": case.record.get("num_threads"), **case.options, **more}
    returns = {f"return_{name}": True for name in names if name != "out"}
    arrays = [options.pop(name, x) for name, x in case.arrays.items()]
    return results_of(engine.attention(*arrays, **options, **returns), list(names))


def _all_same(got: dict[str, Array], wanted: dict[str, Array], what: str) -> None:
    for name, x in got.items():
        if name == "out" and x.dtype != wanted[name].dtype:  # an `out` that is not rounded to 16 bits
            continue
        same_bits(x, wanted[name], f"{what} {name}")


def again(case: Case, engine: Engine, results: dict[str, Array], natural: dict[str, Array]) -> None:
    _all_same(_call(case, engine, results), results, "again")


def threads(case: Case, engine: Engine, results: dict[str, Array], natural: dict[str, Array]) -> None:
    other = 1 if case.record.get("num_threads") != 1 else 2 + case.data % 4
    _all_same(_call(case, engine, results, num_threads=other), results, "threads")


def contiguous(case: Case, engine: Engine, results: dict[str, Array], natural: dict[str, Array]) -> None:
    plain = {name: native(x) for name, x in case.arrays.items()}
    for name in ("bias", "sinks", "mask"):
        if isinstance(case.options.get(name), np.ndarray):
            plain[name] = native(case.options[name])
    _all_same(_call(case, engine, results, **plain), results, "contiguous")


def native(x: Array) -> Array:
    return np.array(x, x.dtype.newbyteorder("=") if x.dtype != BFLOAT16 else x.dtype, order="C")


def item(case: Case, engine: Engine, results: dict[str, Array], natural: dict[str, Array]) -> None:
    """One batch item alone. Which weights are dropped depends on its place."""
    if not case.lead or 0 in case.lead or case.dropout:
        return
    place = tuple(case.data // 7 % n for n in case.lead)
    alone = Case(case.record, place)
    got = natural_results(alone, _call(alone, engine, results))
    wanted = {name: x[place] for name, x in natural.items()}
    _all_same(got, wanted, "item")


def layout(case: Case, engine: Engine, results: dict[str, Array], natural: dict[str, Array]) -> None:
    if case.is_flat:
        return
    swapped = {name: x.swapaxes(-3, -2) for name, x in case.arrays.items()}
    got = _call(case, engine, results, **swapped, layout="bhsd" if case.swapped else "bshd")
    got["out"] = np.ascontiguousarray(got["out"].swapaxes(-3, -2))
    _all_same(got, results, "layout")


def parts(case: Case, engine: Engine, results: dict[str, Array], natural: dict[str, Array]) -> None:
    """Fewer results, or more."""
    names = NAMES if len(results) == 1 else ("out",)
    got = _call(case, engine, names)
    _all_same({name: x for name, x in got.items() if name in results}, results, "parts")


def out(case: Case, engine: Engine, results: dict[str, Array], natural: dict[str, Array]) -> None:
    places = ("fortran", "reversed", "padded", "every_other", "unaligned", "last_axis_slow")
    room = GuardedOut(case.results_shape(), case.dtypes[1], places[case.data % len(places)])
    _call(case, engine, ("out",), out=room.array)
    _all_same({"out": room.take()}, results, "out")
    if not room.is_untouched():
        raise Failure("guard", "bytes around `out` changed")


def overlap(case: Case, engine: Engine, results: dict[str, Array], natural: dict[str, Array]) -> None:
    """Written over the query, or beside its beginning."""
    query = case.arrays["query"]
    if query.shape != case.results_shape() or query.dtype != case.dtypes[1]:
        return
    beside = case.data % 4
    room = np.zeros(query.size + beside, query.dtype)
    given, out = (room[at : at + query.size].reshape(query.shape) for at in (0, beside))
    given[...] = query
    _call(case, engine, ("out",), query=given, out=out)
    _all_same({"out": out}, results, "overlap")


def upcast(case: Case, engine: Engine, results: dict[str, Array], natural: dict[str, Array]) -> None:
    """Arrays in the type of the computation give the same, of which a 16-bit result is rounded once."""
    computed, result = case.dtypes
    if not computes_as_upcast(engine.isa, result):
        return
    wide = _call(case, engine, results, **{name: x.astype(computed) for name, x in case.arrays.items()})
    rounded = {name: x if name == "lse" else x.astype(result) for name, x in wide.items()}
    _all_same(rounded, results, "upcast")


def poison(case: Case, engine: Engine, results: dict[str, Array], natural: dict[str, Array]) -> None:
    """Other numbers in all that no query may read."""
    changed = {}
    for name in ("key", "value"):
        x = case.naturals[name]
        if x.dtype.kind not in "biu" and case.places.get(name) != "zero_stride":
            changed[name] = case.given(
                name, case.poisoned(name, x, ("nan", "inf", "-inf", "all")[case.data % 4])
            )
    _all_same(_call(case, engine, results, **changed), results, "poison")


def written(case: Case, engine: Engine, results: dict[str, Array], natural: dict[str, Array]) -> None:
    """Other numbers in the same arrays are seen by the next call. The last variant: it changes the case."""
    record = case.record | {"data": case.data + 1}
    if isinstance(case.mask, np.ndarray):
        record["mask"] = record["mask"] | {"data": record["mask"].get("data", 0) + 1}
    other, copies = Case(record), {}
    for name in ("query", "key", "value", "bias", "sinks", "mask", "key_lengths"):
        mine, new = (its.arrays.get(name, its.options.get(name)) for its in (case, other))
        if isinstance(mine, np.ndarray):
            if mine.flags.writeable and 0 not in mine.strides:
                mine[...] = new
            copies[name] = native(mine)
    _all_same(_call(case, engine, results), _call(case, engine, results, **copies), "written")


_VARIANTS: dict[str, Callable[..., None]] = {
    "again": again, "threads": threads, "contiguous": contiguous, "item": item, "layout": layout,
    "parts": parts, "out": out, "overlap": overlap, "upcast": upcast, "poison": poison,
    "written": written,
}  # fmt: skip


# ---------------------------------------------------------------- refusals


def check_error(record: Record, engine: Engine) -> None:
    """A call with one thing wrong is refused, and writes nothing."""
    case = Case(record)
    chosen = record.get("out") or {"place": "contiguous"}
    room = GuardedOut(case.results_shape(), case.dtypes[1], chosen["place"])
    call = dict(case.arrays) | case.options | {"out": room.array, "backend": engine.backend}
    name, spoilt = spoil(case, call, record["spoil"])
    if spoilt is None:
        return
    arrays = [spoilt.pop(name) for name in ("query", "key", "value")]
    try:
        fastattn.attention(*arrays, **spoilt)
    except REFUSALS as error:
        if not str(error):
            raise Failure("no message", name) from error
    else:
        raise Failure(f"not refused {name}", "no error")
    if not room.is_untouched():
        raise Failure(f"out of a refused call {name}", "changed")


# ---------------------------------------------------------------- relatives


def check_varlen(record: Record, engine: Engine) -> None:
    record = {**record, "lead": []}
    for name in ("leads", "flat", "key_lengths", "layout"):
        record.pop(name, None)
    documents = record.get("documents", 1)
    case = Case(record)

    def starts(total: int, number: int) -> Array:
        inner = np.sort(integers(case.data, number, (documents - 1,), 0, total))
        return np.concatenate([[0], inner, [total]])

    cu_q, cu_k = starts(case.L, 50), starts(case.S, 51)
    if case.causal is True:
        cu_k = cu_q
    if documents == 1 and case.causal is True and case.L != case.S:
        return
    allowed = np.zeros((case.H, case.L, case.S), bool)
    mask = case.mask_read
    whole = allowed_keys((), case.H, case.L, case.S, mask=mask, bias=case.bias_read)
    for d in range(documents):
        q, k = slice(*cu_q[d : d + 2]), slice(*cu_k[d : d + 2])
        allowed[:, q, k] = whole[:, q, k] & allowed_keys(
            (), case.H, q.stop - q.start, k.stop - k.start, causal=case.causal, window=case.window
        )
    case.__dict__["allowed"] = allowed
    packed = [case.given(name, np.ascontiguousarray(x.swapaxes(0, 1))) for name, x in case.naturals.items()]
    options = dict(case.options)
    if mask is not None and not isinstance(case.mask, np.ndarray):
        options["mask"] = mask  # an object aligns each document, tests/test_varlen.py
    call = lambda **more: fastattn.varlen_attention(  # noqa: E731
        *packed,
        cu_q,
        None if cu_k is cu_q else cu_k,
        **options,
        return_lse=True,
        return_weights=True,
        backend=engine.backend,
        **more,
    )
    got, lse, weights = call(num_threads=record.get("num_threads"))
    Expected(case).compare({"out": got.swapaxes(0, 1), "lse": lse, "weights": weights})
    for name, x, y in zip(("out", "lse", "weights"), call(num_threads=3), (got, lse, weights), strict=True):
        same_bits(x, y, f"varlen threads {name}")
    # As in `check_backward`.
    added = [record.get(name, {}) for name in ("bias", "sinks")]
    plain = all(it.get("dtype", "float32") == "float32" for it in added)
    plain &= all(it.get("style", "normal") in ("normal", "masks") for it in added)
    if engine.backend != "numba" and plain and not {"nonfinite", "hidden", "styles"} & set(record):
        _check_varlen_gradients(case, engine, packed, (cu_q, cu_k), options, (got, lse))


def _check_varlen_gradients(
    case: Case, engine: Engine, packed: list[Array], starts: tuple[Array, Array], options: dict[str, Any],
    results: tuple[Array, Array],
) -> None:  # fmt: skip
    """By the oracle's loops, where these are not long; and their bits on other threads."""
    if {x.dtype for x in packed} not in ({np.dtype(np.float32)}, {np.dtype(np.float64)}):
        return
    grad_out, grad_lse = (
        numbers(_NORMAL, case.data, name, x.shape).astype(x.dtype)
        for name, x in zip(("grad_out", "grad_lse"), results, strict=True)
    )
    wrt = ("query", "key", "value", *(name for name in ("bias", "sinks") if name in options))
    call = lambda **more: fastattn.varlen_attention_backward(  # noqa: E731
        grad_out, *packed, *results, *starts, grad_lse=grad_lse, wrt=wrt, backend=engine.backend, **options,
        **more,
    )  # fmt: skip
    got = call(num_threads=case.record.get("num_threads"))
    for name, x in call(num_threads=3)._asdict().items():
        if x is not None:
            same_bits(getattr(got, name), x, f"varlen gradient threads {name}")
    if case.record.get("spread", 1) > 4 or (case.L * case.S * case.H > 600 and case.data % 16):
        return
    theirs = {name: x for name, x in options.items() if name not in ("causal", "window")}
    theirs |= {"mask": case.allowed, "layout": "bshd", "grad_lse": grad_lse}
    try:
        assert_gradients(got, grad_out, *packed, wrt=wrt, **theirs)
    except AssertionError as error:
        raise Failure("wrong varlen gradient", str(error)) from error


def check_sdpa(record: Record, engine: Engine) -> None:
    """PyTorch's function of that name, which is a translation."""
    record = {
        name: x
        for name, x in record.items()
        if name not in ("window", "key_lengths", "softcap", "sinks", "layout")
    }
    if record.get("causal") == "bottom_right":
        record["causal"] = "top_left"
    if record.get("mask") and record.get("bias"):
        del record["mask"]
    case = Case(record)
    attn_mask = case.bias
    if case.mask is not None:
        attn_mask = case.allowed[0] if case.is_flat else case.allowed
    got = fastattn.scaled_dot_product_attention(
        *case.arrays.values(), attn_mask, 0.0, bool(case.causal), case.scale, enable_gqa=True
    )
    if engine.backend == "cython":
        mask = {} if case.mask is None else {"mask": attn_mask}
        same_bits(got, engine.attention(*case.arrays.values(), **(case.options | mask)), "sdpa")
    Expected(case).compare(natural_results(case, {"out": got}))


def check_merge(record: Record, engine: Engine) -> None:
    record = {**record}
    for name in ("nonfinite", "sinks", "dropout", "flat", "layout", "places"):
        record.pop(name, None)
    record["styles"] = {"value": "largest"} if record.get("styles", {}).get("value") == "largest" else {}
    record["dtypes"] = ["float64" if "float64" in record.get("dtypes", ()) else "float32"] * 3
    case = Case(record)
    pieces = record.get("pieces", 1)
    cuts = [0, *np.sort(integers(case.data, 52, (pieces - 1,), 0, case.S)).tolist(), case.S]
    found = []
    for start, stop in pairwise(cuts):
        keys = slice(start, stop)
        bias = case.bias
        if bias is not None and bias.ndim and bias.shape[-1] != 1:
            bias = bias[..., keys]
        found.append(engine.attention(
            case.naturals["query"], case.naturals["key"][..., keys, :], case.naturals["value"][..., keys, :],
            mask=case.allowed[..., keys], bias=bias, scale=case.scale, softcap=case.softcap, return_lse=True,
            num_threads=record.get("num_threads"),
        ))  # fmt: skip
    got, lse = fastattn.merge_attention([x for x, _ in found], [x for _, x in found])
    # Merging adds one more weighted mean on top of the parts: the reach of a row counts once more.
    Expected(case).compare({"out": got, "lse": lse}, times=2)


def check_stored(record: Record, engine: Engine) -> None:
    """Quantised and paged keys and values have the bits of the arrays that they stand for."""
    record = {**record}
    for name in ("leads", "flat", "hidden", "nonfinite", "styles"):
        record.pop(name, None)
    record["lead"] = [max(1, n) for n in record.get("lead", ())][:1] or [1]
    stored, pages = record.get("stored", ["int8", "int8"]), record.get("pages", [0, 0])
    if {"float16", "bfloat16"} == set(stored):
        stored = ["int8", stored[1]]
    if any(pages):
        record.pop("layout", None)
    unit = lcm(*(max(1, page) for page in pages))
    record["len_k"] = -(-max(1, record["len_k"]) // unit) * unit
    if record.get("causal") == "true":
        record["causal"] = "top_left"
    record["kv_heads"] = max(1, record["kv_heads"])
    record["heads"] = max(record["kv_heads"], record["heads"] // record["kv_heads"] * record["kv_heads"])
    dtype = record.get("dtypes", ("float32",))[0]
    record["dtypes"] = [dtype if dtype in ("float32", "float64") else "float32"] * 3
    case = Case(record)
    rows, numbers_of = [], []
    for name, storage, page in zip(("key", "value"), stored, pages, strict=True):
        x = case.naturals[name]
        if x.shape[-1] == 0:
            storage = "float32"
        if storage == "int8":
            kept: Any = fastattn.Quantized.encode(x)
            plain = kept.decode()
        else:
            kept = x.astype(BFLOAT16 if storage == "bfloat16" else storage)
            plain = kept.astype(np.float32)
        numbers_of.append(plain.swapaxes(-3, -2) if case.swapped else plain)
        if page:
            kept = into_pages(kept, page, case.data)
            kept = fastattn.Paged(kept.pages, without_unread(case, kept.table, page))
        elif storage == "int8":
            kept = fastattn.Quantized(case.given(name, kept.data), case.given(name, kept.scale))
        else:
            kept = case.given(name, kept)
        rows.append(kept)
    more = dict(case.options, return_lse=True, return_weights=True, num_threads=record.get("num_threads"))
    wanted = engine.attention(case.arrays["query"], *numbers_of, **more)
    got = engine.attention(case.arrays["query"], *rows, **more)
    for name, x, y in zip(NAMES, got, wanted, strict=True):
        same_bits(x, y, f"stored {name}")


def into_pages(rows: Any, size: int, data: int) -> fastattn.Paged:
    """Keys or values ``(B, K, S, D)`` in pages of `size`, S a multiple of it, in any order among others."""
    if isinstance(rows, fastattn.Quantized):
        parts = [into_pages(part, size, data) for part in (rows.data, rows.scale)]
        return fastattn.Paged(fastattn.Quantized(parts[0].pages, parts[1].pages), parts[0].table)
    batch, heads, length, columns = rows.shape
    n = length // size
    table = np.argsort(numbers(_NORMAL, data, 53, (batch * n + 2,)))[: batch * n].reshape(batch, n)
    pages = np.full((batch * n + 2, heads, size, columns), 99 if rows.dtype == np.int8 else np.nan).astype(
        rows.dtype
    )
    pages[table] = rows.reshape(batch, heads, n, size, columns).swapaxes(1, 2)
    return fastattn.Paged(pages, table)


def without_unread(case: Case, table: Array, page: int) -> Array:
    """The table of pages, with numbers of no page where all of the page is past the item's length."""
    if case.key_lengths is None:
        return table
    lengths = np.broadcast_to(np.asarray(case.key_lengths), case.lead)[:, None].astype(np.int64)
    return np.where(np.arange(table.shape[1]) * page < lengths, table, -(10**6))


def check_backward(record: Record, engine: Engine) -> None:
    """Gradients by the oracle's loops, of small problems, and their bits in another call."""
    record = {**record}
    for name in ("nonfinite", "hidden", "styles", "leads"):
        record.pop(name, None)
    for name, most in (("len_q", 17), ("len_k", 33), ("head_dim", 33), ("value_dim", 33)):
        record[name] = min(record[name], most)
    if record.get("causal") == "true" and record["len_q"] != record["len_k"]:
        record["causal"] = "top_left"
    if "bias" in record:
        record["bias"] = {**record["bias"], "style": "masks", "dtype": "float32"}
    if "sinks" in record:
        record["sinks"] = {"dtype": "float32"}
    record["lead"] = [min(n, 2) for n in record.get("lead", ())]
    dtype = record.get("dtypes", ("float32",))[0]
    record["dtypes"] = [dtype if dtype in ("float32", "float64") else "float32"] * 3
    case = Case(record)
    arrays, options = list(case.arrays.values()), case.options
    threads = {"num_threads": record.get("num_threads")}
    results = engine.attention(*arrays, **options, return_lse=True, **threads)
    outs = {
        name: (numbers(_NORMAL, case.data, name, x.shape)).astype(x.dtype)
        for name, x in zip(("grad_out", "grad_lse"), results, strict=True)
    }
    wrt = ("query", "key", "value", *(name for name in ("bias", "sinks") if name in options))
    call = lambda **more: fastattn.attention_backward(  # noqa: E731
        outs["grad_out"], *arrays, *results, grad_lse=outs["grad_lse"], backend=engine.backend,
        **(options | {"wrt": wrt} | more),
    )  # fmt: skip
    got = call(**threads)
    plain = {name: native(x) for name, x in options.items() if isinstance(x, np.ndarray)}
    others = {
        "again": call(**threads),  # by a prepared call, where there is one
        "threads": call(num_threads=3),
        "contiguous": fastattn.attention_backward(
            outs["grad_out"], *map(native, arrays), *map(native, results), grad_lse=outs["grad_lse"], wrt=wrt,
            backend=engine.backend, **(options | plain),
        ),
    }  # fmt: skip
    for what, gradients in others.items():
        for name in wrt:
            same_bits(getattr(got, name), getattr(gradients, name), f"gradient {what} {name}")
    if wrt != ROWS:  # those have prepared calls
        first, second = (call(wrt=ROWS) for _ in range(2))
        for name in ROWS:
            same_bits(getattr(second, name), getattr(first, name), f"gradient alone {name}")
    hold_gradients(case, outs["grad_out"], got)
    if record.get("spread", 1) > 4:  # what a weight is then depends on how scores are rounded
        return
    if case.L * case.S * case.H > 600 and case.data % 16:  # the loops take longer than all else
        return
    theirs = dict(options)
    if "mask" in theirs:
        theirs["mask"] = case.allowed[0] if case.is_flat else case.allowed
    try:
        assert_gradients(got, outs["grad_out"], *arrays, wrt=wrt, grad_lse=outs["grad_lse"], **theirs)
    except AssertionError as error:
        raise Failure("wrong gradient", str(error)) from error


def hold_gradients(case: Case, grad_out: Array, gradients: Any) -> None:
    """However scores are rounded, a value's gradient is what arrives, times weights of at most 1."""
    eps, (_, share) = float(np.finfo(case.dtypes[0]).eps), case.keep
    arriving = np.abs(natural_results(case, {"out": grad_out})["out"].astype(np.float64))
    got = np.abs(natural_results(case, {"out": gradients.value})["out"].astype(np.float64))
    if not got.size or not arriving.size:
        return
    bound = arriving.sum(axis=-2).reshape(*case.lead, case.K, -1, case.E).sum(axis=-2) / share
    got = got.reshape(-1, *got.shape[-3:])
    items = int(np.prod(case.lead)) // max(len(got), 1)  # whose gradients are added up, at most
    bound = bound.max(axis=tuple(range(len(case.lead))), initial=0)[..., None, :] * items
    wrong = ~(got <= (1 + 64 * eps) * bound + float(np.finfo(np.float32).tiny))
    if wrong.any():
        at = _first(wrong)
        raise Failure("gradient beyond what arrives", f"at {at}: {got[at]!r}")


# ---------------------------------------------------------------- caches


def check_cache(record: Record, engine: Engine) -> None:
    """A history of a `KVCache`, against the tokens in lists, and a cache of the same tokens at once."""
    from tests.fuzz.histories import check_history

    check_history(record, engine)


def check_layers(record: Record, engine: Engine) -> None:
    """`MultiHeadAttention`, alone and with a cache."""
    from tests.fuzz import layers

    layers.check_layers(record, engine)


def check_recurrent(record: Record, engine: Engine) -> None:
    """`gated_linear_attention`."""
    from tests.fuzz import recurrent

    recurrent.check(record, engine)


def check_reductions(record: Record, engine: Engine) -> None:
    """`reduce_scores`, `key_weights` and `max_similarity`."""
    from tests.fuzz import reductions

    reductions.check(record, engine)


def check_biases(record: Record, engine: Engine) -> None:
    """Bias objects."""
    from tests.fuzz import biases

    biases.check(record, engine)


def check_beside(record: Record, engine: Engine) -> None:
    """`flex_attention`, `linear_attention`, `rope`, or sums of Gaussian kernels."""
    from tests.fuzz import beside

    checks = {
        "flex": beside.check_flex,
        "linear": beside.check_linear,
        "rope": beside.check_rope,
        "kernels": beside.check_kernels,
    }
    checks[record["kind"]](record, engine)


_KINDS: dict[str, Callable[[Record, Engine], None]] = {
    "attention": check_attention,
    "error": check_error,
    "varlen": check_varlen,
    "merge": check_merge,
    "sdpa": check_sdpa,
    "stored": check_stored,
    "backward": check_backward,
    "cache": check_cache,
    "flex": check_beside,
    "linear": check_beside,
    "rope": check_beside,
    "kernels": check_beside,
    "layers": check_layers,
    "recurrent": check_recurrent,
    "reductions": check_reductions,
    "biases": check_biases,
}
