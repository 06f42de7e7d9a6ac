"""What stands beside attention: `rope`, `linear_attention`, `flex_attention`, and sums of Gaussian kernels.

Sizes, types and places in memory are those of a `Case`; what only these have is under the name of the kind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import fastattn
from tests import test_kernel_methods, test_linear
from tests.fuzz import functions
from tests.fuzz.build import _NORMAL, _UNIFORM, Case, GuardedOut, integers, numbers
from tests.fuzz.checks import Engine, Expected, Failure, natural_results, results_of, same_bits, within
from tests.fuzz.records import Record

Array = np.ndarray


@contextmanager
def _default(engine: Engine) -> Iterator[None]:
    """A backend for functions that take the default one."""
    before = os.environ.get("FASTATTN_BACKEND")
    os.environ["FASTATTN_BACKEND"] = engine.backend
    try:
        yield
    finally:
        if before is None:
            del os.environ["FASTATTN_BACKEND"]
        else:
            os.environ["FASTATTN_BACKEND"] = before


@contextmanager
def _threads(n: int) -> Iterator[None]:
    before = fastattn.get_num_threads()
    fastattn.set_num_threads(n)
    try:
        yield
    finally:
        fastattn.set_num_threads(before)


def _untouched(before: list[tuple[str, Array, bytes]]) -> None:
    for name, array, old in before:
        if array.tobytes() != old:
            raise Failure("input", f"{name} changed")


def check_rope(record: Record, engine: Engine) -> None:
    """The bits of its definition in NumPy, wherever the arrays are."""
    dtype = record.get("dtypes", ["float32"])[0]
    case, chosen = Case(record | {"dtypes": [dtype] * 3}), record["rope"]
    x = case.arrays["query"]
    pairs = min(chosen["pairs"], case.D // 2)
    n = case.L + chosen.get("spare", 0)
    angles = 100 * numbers(_NORMAL, case.data, "other", (n, pairs))
    tables = [case.given("bias", f(angles).astype(chosen.get("dtype", "float32"))) for f in (np.cos, np.sin)]
    positions = None
    if "lead" in chosen:
        lead = case.lead[max(0, len(case.lead) - len(chosen["lead"])) :]
        lead = tuple(k if own else 1 for k, own in zip(lead, chosen["lead"], strict=False))
        positions = integers(case.data, "other", (*lead, case.L), 0, n - 1)
    options = {name: chosen[name] for name in ("interleaved", "inverse") if name in chosen}
    if case.swapped:
        options["layout"] = "bshd"
    before = [(name, array, array.tobytes()) for name, array in (("x", x), ("cos", tables[0]))]
    got = fastattn.rope(x, *tables, positions=positions, **options)
    _untouched(before)
    wanted = _turned(case, *tables, positions, **{k: v for k, v in options.items() if k != "layout"})
    same_bits(got, wanted, "rope")
    room = GuardedOut(got.shape, got.dtype, chosen.get("out", "contiguous"))
    fastattn.rope(x, *tables, positions=positions, out=room.array, **options)
    same_bits(np.ascontiguousarray(room.take()), wanted, "rope out")
    if not room.is_untouched():
        raise Failure("guard", "bytes around `out` changed")
    own = np.array(x, got.dtype, order="K", subok=False)
    fastattn.rope(own, *tables, positions=positions, out=own, **options)
    same_bits(np.ascontiguousarray(own), wanted, "rope in place")


def _turned(
    case: Case,
    cos: Array,
    sin: Array,
    positions: Array | None,
    interleaved: bool = False,
    inverse: bool = False,
) -> Array:
    computed, result = case.dtypes
    x = case.naturals["query"].astype(computed)
    rows = np.arange(case.L) if positions is None else positions
    c, s = (table.astype(computed)[rows][..., None, :, :] for table in (cos, sin))
    half = cos.shape[1]
    one, other = np.s_[..., : 2 * half : 2], np.s_[..., 1 : 2 * half : 2]
    if not interleaved:
        one, other = np.s_[..., :half], np.s_[..., half : 2 * half]
    s = -s if inverse else s
    out = x.copy()
    out[one], out[other] = x[one] * c - x[other] * s, x[other] * c + x[one] * s
    out = out.astype(result)
    return np.ascontiguousarray(out[0] if case.is_flat else out.swapaxes(-3, -2) if case.swapped else out)


def check_linear(record: Record, engine: Engine) -> None:
    """`linear_attention` against the formula over all pairs, whole and cut in two."""
    case, chosen = Case(record), record["linear"]
    name, causal = chosen["map"], chosen.get("causal", False)
    given_map, phi, factor = test_linear.MAPS[name]
    if "power" in chosen:  # a factor common to all features
        given_map = lambda x: phi(x) * x.dtype.type(2.0 ** chosen["power"])  # noqa: E731
    computed, result = case.dtypes
    arrays = list(case.arrays.values())
    wide = [np.broadcast_to(x, (*case.lead, *x.shape[-3:])) for x in case.naturals.values()]
    options: dict[str, Any] = {"causal": causal}
    if case.key_lengths is not None:
        options["key_lengths"] = case.key_lengths
    exact, reach = test_linear.formula(*wide, phi, **options)
    relative = any(style.startswith("low") for style in record.get("styles", {}).values())

    def compare(got: Array, what: str, rows: slice = np.s_[:]) -> None:
        if got.dtype != result:
            raise Failure("dtype out", f"{got.dtype}, expected {result}")
        within(
            what, got[None] if case.is_flat else got, exact[..., rows, :],
            (2 * factor * reach[..., rows, :]).astype(float), None, computed,
            lambda: [form[..., rows, :] for form in (
                test_linear.formula(*wide, phi, dtype=computed, relative=relative, **options)[0],
                test_linear.formula_by_sums(*wide, phi, dtype=computed, **options),
            )],
        )  # fmt: skip

    before = [(name, x, x.tobytes()) for name, x in case.arrays.items()]
    out = fastattn.linear_attention(*arrays, feature_map=given_map, **options)
    _untouched(before)
    compare(out, "linear")
    if name == "elu+1":
        copies = [np.ascontiguousarray(x) for x in arrays]
        with _threads(1 + case.data % 4):
            again = fastattn.linear_attention(*copies, **options)
        same_bits(again, out, "linear of contiguous arrays")
    if case.key_lengths is None:
        at = int(integers(case.data, "other", (), 0, case.S))
        first, rest = np.s_[..., :at, :], np.s_[..., at:, :]
        q, k, v = arrays
        _, state = fastattn.linear_attention(
            q[first] if causal else q, k[first], v[first], feature_map=given_map, return_state=True, **options
        )
        cut = fastattn.linear_attention(
            q[rest] if causal else q, k[rest], v[rest], feature_map=given_map, state=state, **options
        )
        compare(cut, "linear cut", np.s_[at:] if causal else np.s_[:])


def _added(score, b, h, q_idx, kv_idx, table):  # type: ignore[no-untyped-def]
    return score + table[b, h, q_idx, kv_idx]


def _read(b, h, q_idx, kv_idx, table):  # type: ignore[no-untyped-def]
    return table[b, h, q_idx, kv_idx]


def _added_where(score, b, h, q_idx, kv_idx, added, may):  # type: ignore[no-untyped-def]
    return _added(score, b, h, q_idx, kv_idx, added)


def _read_beside(b, h, q_idx, kv_idx, added, may):  # type: ignore[no-untyped-def]
    return may[b, h, q_idx, kv_idx]


def check_flex(record: Record, engine: Engine) -> None:
    """A bias and a mask as functions that read them: the answer is attention's with both. Or functions drawn
    at random."""
    if "function" in record["flex"]:
        functions.check(record, engine)
        return
    case = Case(record)
    options = dict(case.options)
    computed, _ = case.dtypes
    full = (*case.lead, case.H, case.L, case.S)
    flat = (int(np.prod(case.lead, dtype=int)), case.H, case.L, case.S)
    added = may = None
    if case.bias is not None and engine.backend != "reference" and record["flex"].get("score"):
        added = np.broadcast_to(np.asarray(case.bias_read, computed), full).reshape(flat)
        options.pop("bias")
    if record["flex"].get("mask"):
        may = np.ascontiguousarray(np.broadcast_to(case.allowed, full)).reshape(flat)
        options.pop("mask", None)
    elif (mask := options.pop("mask", None)) is not None:
        options["block_mask"] = mask if isinstance(mask, fastattn.masks.Mask) else fastattn.masks.Dense(mask)
    if added is not None and may is not None:
        options |= {"score_mod": _added_where, "mask_mod": _read_beside, "aux": (added, may)}
    elif added is not None:
        options |= {"score_mod": _added, "aux": (added,)}
    elif may is not None:
        options |= {"mask_mod": _read, "aux": (may,)}
    names = ["out"] + [name for name in ("lse", "weights") if record.get(f"return_{name}")]
    returns = {f"return_{name}": True for name in names[1:]}
    calls = [
        results_of(
            fastattn.flex_attention(
                *case.arrays.values(), backend=engine.backend, num_threads=n, **options, **returns
            ),
            names,
        )
        for n in (record.get("num_threads"), 1 + case.data % 3)
    ]
    Expected(case).compare(natural_results(case, calls[0]))
    for name in names:
        same_bits(calls[1][name], calls[0][name], f"flex threads {name}")


def check_kernels(record: Record, engine: Engine) -> None:
    """`kernel_regression` and `kernel_logsumexp` against loops in extended precision."""
    chosen, data = record["kernels"], record.get("data", 0)
    num_keys, dim = record["len_k"], record["head_dim"]
    x = numbers(_NORMAL, data, "key", (num_keys, dim)).astype(float) + chosen.get("shift", 0.0)
    y = numbers(_NORMAL, data, "value", (num_keys, record["value_dim"])).astype(float)
    bandwidth: Any = chosen.get("bandwidth", 1.0)
    if chosen.get("per_dim"):
        bandwidth = bandwidth * (0.5 + numbers(_UNIFORM, data, "bias", (dim,)))
    if chosen.get("pairs"):
        x[1::2] = x[: num_keys - 1 : 2] + bandwidth * x[1::2]
    weights = None
    if chosen.get("weights"):
        uniform = numbers(_UNIFORM, data, "sinks", (num_keys,))
        weights = np.where(uniform < 0.2, 0, uniform.astype(float) ** chosen["weights"])
    leave_one_out = chosen.get("leave_one_out", False)
    points = x
    if not leave_one_out:
        near = integers(data, "query", (record["len_q"],), 0, num_keys - 1)
        away = bandwidth if chosen.get("pairs") and "away" not in chosen else chosen.get("away", 0.3)
        points = x[near] + away * numbers(_NORMAL, data, "other", (record["len_q"], dim))
    try:
        with _default(engine):
            test_kernel_methods.assert_right(points, x, y, bandwidth, weights, leave_one_out)
    except AssertionError as error:
        raise Failure("wrong sums of kernels", str(error)) from error
