"""`reduce_scores`, `key_weights` and `max_similarity` against their definitions in a wider type.

Query, key and options are those of a `Case`, whose values are not read. Of `max_similarity` the heads of the
query are queries, and those of the key documents.

A score may be wrong by half a unit for each of its products and options, of the sum of their magnitudes: what
is among the largest has to be so within that, and what is left out must not be larger by more. Of whole
numbers all scores are exact, and so is the order of equal ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import fastattn
from fastattn._call.gradients import LARGE_NORMS, LARGE_SCORE
from tests.fuzz import oracle
from tests.fuzz.build import BFLOAT16, Array, Case, integers
from tests.fuzz.checks import (
    Engine,
    Expected,
    Failure,
    inputs_of,
    into_pages,
    native,
    same_bits,
    within,
    without_unread,
)
from tests.fuzz.records import Record

Results = dict[str, Array]


def check(record: Record, engine: Engine) -> None:
    (_check_similarity if record["reduction"]["of"] == "similarity" else _check_scores)(record, engine)


def _all_same(got: Results, wanted: Results, what: str) -> None:
    for name, x in got.items():
        same_bits(np.ascontiguousarray(x), np.ascontiguousarray(wanted[name]), f"{what} {name}")


def _first(where: Array) -> tuple[int, ...]:
    return tuple(map(int, np.argwhere(where)[0]))


# ---------------------------------------------------------------- scores


def _call(case: Case, engine: Engine, **more: Any) -> Results:
    """Results with an axis of heads."""
    given = case.arrays | {"num_threads": case.record.get("num_threads"), "backend": engine.backend}
    given |= case.options | more
    query, key = given.pop("query"), given.pop("key")
    del given["value"]
    of = case.record["reduction"]["of"]
    if of == "key_weights":
        found: Any = {"key weights": fastattn.key_weights(query, key, **given)}
    elif of == "logsumexp":
        found = {"lse": fastattn.reduce_scores(query, key, reduction=of, **given)}
    else:
        k = {"k": case.record["reduction"]["k"]} if of == "topk" else {}
        found = dict(
            zip(
                ("values", "index"),
                fastattn.reduce_scores(query, key, reduction=of, **k, **given),
                strict=True,
            )
        )
    return {name: x[None] if case.is_flat else x for name, x in found.items()}


def _check_scores(record: Record, engine: Engine) -> None:
    case = Case(record)
    of = record["reduction"]["of"]
    before = [(name, x, x.tobytes()) for name, x in inputs_of(case)]
    results = _call(case, engine)
    for name, x, old in before:
        if x.tobytes() != old:
            raise Failure("input", f"{name} changed")
    for name, x in results.items():
        dtype = np.dtype(np.int64) if name == "index" else case.dtypes[0]
        if x.dtype != dtype:
            raise Failure(f"dtype {name}", f"{x.dtype}, expected {dtype}")
    if of == "logsumexp":
        Expected(case).compare(results)
    elif of == "key_weights":
        hold_key_weights(case, results["key weights"])
    elif of == "max":
        hold_largest(case, *(x[..., None] for x in results.values()))
    else:
        hold_largest(case, *results.values())
    for variant in record.get("variants", ()):
        _all_same(*_again(variant, case, engine, results), f"{of} {variant}")


def _again(variant: str, case: Case, engine: Engine, results: Results) -> tuple[Results, Results]:
    """The results of another call, and what they are to be."""
    record = case.record
    if variant == "threads":
        other = 1 if record.get("num_threads") != 1 else 2 + case.data % 4
        return _call(case, engine, num_threads=other), results
    if variant == "contiguous":
        arrays = case.arrays | {name: case.options.get(name) for name in ("bias", "sinks", "mask")}
        plain = {name: native(x) for name, x in arrays.items() if isinstance(x, np.ndarray)}
        return _call(case, engine, **plain), results
    if variant == "item" and case.lead and 0 not in case.lead:
        place = tuple(case.data // 7 % n for n in case.lead)
        return _call(Case(record, place), engine), {name: x[place] for name, x in results.items()}
    if variant == "layout" and not case.is_flat:
        return _call(Case(record | {"layout": "bhsd" if case.swapped else "bshd"}), engine), results
    if variant == "poison":
        key = case.naturals["key"]
        if key.dtype.kind not in "biu" and case.places.get("key") != "zero_stride":
            hidden = case.poisoned("key", key, ("nan", "inf", "-inf", "all")[case.data % 4])
            return _call(case, engine, key=case.given("key", hidden)), results
    if variant == "stored" and record["reduction"]["of"] != "key_weights":
        return _stored(case, engine, results)
    return _call(case, engine), results


def _stored(case: Case, engine: Engine, results: Results) -> tuple[Results, Results]:
    """Keys in pages, or in int8."""
    key = case.naturals["key"]
    is_float = key.dtype == BFLOAT16 or key.dtype.kind == "f"
    whole = len(case.lead) == 1 and key.shape[:-3] == case.lead and not case.swapped
    if whole and is_float and key.size and case.data % 2:
        page = next(n for n in (7, 5, 3, 2, 1) if case.S % n == 0)
        pages = into_pages(key, page, case.data)
        pages = fastattn.Paged(pages.pages, without_unread(case, pages.table, page))
        return _call(case, engine, key=pages), results
    if (
        key.dtype not in (np.float32, np.float64)
        or not np.isfinite(key).all()
        or abs(key).max(initial=0) > 1e30
    ):
        return results, results
    kept = fastattn.Quantized.encode(native(case.arrays["key"]))
    return _call(case, engine, key=kept), _call(case, engine, key=kept.decode())


def exact_scores(case: Case) -> oracle.Scores:
    query, key = (
        np.broadcast_to(case.naturals[name], (*case.lead, *case.naturals[name].shape[-3:]))
        for name in ("query", "key")
    )
    return oracle.scores(
        query, key, case.allowed, dtype=case.dtypes[0], bias=case.bias_read, scale=case.scale,
        softcap=case.softcap,
    )  # fmt: skip


def _magnitudes(case: Case) -> Array:
    """What is added up for each score, of its magnitudes."""
    query, key = (
        abs(case.naturals[name].astype(oracle.wide_type(case.dtypes[0]))) for name in ("query", "key")
    )
    query, key = (np.where(np.isfinite(x), x, 0) for x in (query, key))
    scale = case.D**-0.5 if case.scale is None else abs(case.scale)
    return scale * (query @ np.repeat(key, case.H // max(case.K, 1), axis=-3).swapaxes(-1, -2))


def hold_largest(case: Case, values: Array, index: Array) -> None:
    """Scores ``(*lead, H, L, k)`` and their keys."""
    found = exact_scores(case)
    scores, k = found.exact, values.shape[-1]
    shape = (*scores.shape[:-1], k)
    if values.shape != shape or index.shape != shape:
        raise Failure("shape largest", f"{values.shape} and {index.shape}, expected {shape}")
    limits = np.finfo(case.dtypes[0])
    bound = (case.D + 8) / 2 * float(limits.eps) * (found.size + _magnitudes(case)) + case.D * float(
        limits.tiny
    )
    if case.record.get("styles", {}) == {"query": "whole", "key": "whole"}:
        bound = np.zeros_like(bound)
    judged = np.ones(shape[:-1], bool) if found.unclear is None else ~found.unclear

    def hold(right: Array, manner: str) -> None:
        wrong = judged & ~right.all(axis=-1)
        if wrong.any():
            at = _first(wrong)
            row = np.argsort(-np.where(np.isnan(scores[at]), np.inf, scores[at]), kind="stable")[:k]
            raise Failure(
                f"largest {manner}",
                f"at {at}: got {values[at]} of {index[at]}, exact {scores[at][row]} of {row}, errors up to "
                f"{float(bound[at].max(initial=0)):.3g}",
            )

    seen = scores != -np.inf  # NaN is
    n_seen = seen.sum(axis=-1)[..., None]
    is_key = np.arange(k) < n_seen
    hold((index == -1) == ~is_key, "without keys")
    hold(is_key | (values == -np.inf), "without keys")
    hold((index >= -1) & (index < max(1, case.S)), "beyond the keys")
    if not case.S:
        return
    place = np.clip(index, 0, case.S - 1)
    own, near, allowed = (np.take_along_axis(x, place, axis=-1) for x in (scores, bound, seen))
    hold(~is_key | allowed, "masked")
    chosen = np.zeros(scores.shape, np.int64)
    np.add.at(chosen, (*np.indices(shape, sparse=True)[:-1], place), is_key)
    hold(chosen <= 1, "twice")
    wide = values.astype(scores.dtype)
    right = (abs(wide - own) <= near) | (wide == own) | (np.isnan(wide) & np.isnan(own))
    hold(~is_key | right, "of another key")
    # NaN comes before all numbers.
    first, second = values[..., :-1], values[..., 1:]
    alike = (first == second) | (np.isnan(first) & np.isnan(second))
    hold(~is_key[..., 1:] | alike | np.isnan(first) | (first > second), "in another order")
    hold(~is_key[..., 1:] | ~alike | (index[..., :-1] < index[..., 1:]), "in another order of equal ones")
    last, last_key = wide[..., -1:], index[..., -1:]
    beyond = seen & (chosen == 0)
    least = np.where(np.isnan(scores), np.inf, scores) - np.where(np.isfinite(scores), bound, 0)
    fits = np.isnan(last) | (~np.isnan(scores) & (least <= last))
    # Of equal ones the first keys are there.
    equal = (np.isnan(last) & np.isnan(scores)) | ((bound == 0) & (scores == last))
    hold(~beyond | (fits & ~(equal & (np.arange(case.S) < last_key))), "without a larger one")


def hold_key_weights(case: Case, got: Array) -> None:
    """Weights of each key ``(*lead, H, S)``, summed over the queries."""
    expected = Expected(case)
    answer, limits = expected.answer, np.finfo(case.dtypes[0])
    exact = answer.weights.sum(axis=-2)
    # Each weight as attention has it, from an lse that was rounded, and L - 1 additions, half a unit each.
    size = np.where(np.isfinite(answer.lse), abs(answer.lse), 0)[..., None]
    weights, scores = np.where(np.isnan(answer.weights), 0, answer.weights), exact_scores(case)
    reach = (answer.weights_reach + weights * size).sum(axis=-2) + case.L / 8 * weights.sum(axis=-2)
    reach = reach + case.L * float(limits.tiny) / float(limits.eps)
    # In a row that is NaN a key of score -inf gets NaN, or as a masked one nothing.
    unclear = (np.isnan(answer.weights) & (scores.exact == -np.inf)).any(axis=-2)
    if answer.unclear_weights is not None:
        unclear |= answer.unclear_weights.any(axis=-2)
    within(
        "key weights", got, exact, reach.astype(np.float64), unclear, case.dtypes[0],
        lambda: [it.weights.sum(axis=-2) for it in expected.plain()], may_exceed=False,
    )  # fmt: skip
    # However large scores are: those of `LARGE_NORMS` on are rounded once for weights and lse.
    rounding = 64 + 4 * np.minimum(scores.size.max(axis=(-2, -1), initial=0), LARGE_SCORE + LARGE_NORMS)
    most = case.allowed.sum(axis=-2) * (1 + float(limits.eps) * rounding[..., None])
    wrong = ~np.isnan(got) & ~((got >= 0) & (got <= most))
    if wrong.any():
        at = _first(wrong)
        raise Failure(
            "key weights beyond 1", f"at {at}: {got[at]!r} of {case.allowed[at[:-1]][..., at[-1]].sum()}"
        )


# ---------------------------------------------------------------- late interaction


def _check_similarity(record: Record, engine: Engine) -> None:
    case, chosen = Case(record), record["reduction"]
    query, document = case.naturals["query"], case.naturals["key"]
    counts = integers(case.data, 71, (case.H,), 0, case.L)
    lengths = integers(case.data, 72, (case.K,), 0, case.S)
    options: dict[str, Any] = {}
    if chosen.get("query_lengths"):
        options["query_lengths"] = counts
    else:
        counts = np.full(case.H, case.L)
    if chosen.get("document_lengths"):
        options["document_lengths"] = lengths
    else:
        lengths = np.full(case.K, case.S)

    def call(query: Any, document: Any, **more: Any) -> Results:
        given = {"num_threads": record.get("num_threads"), "backend": engine.backend} | options | more
        return {"similarity": fastattn.max_similarity(query, document, **given)}

    arrays = [case.arrays[name] for name in ("query", "key")]
    before = [x.tobytes() for x in arrays]
    results = call(*arrays)
    for x, old in zip(arrays, before, strict=True):
        if x.tobytes() != old:
            raise Failure("input", "an array of tokens changed")
    hold_similarity(case, results["similarity"], counts, lengths)
    for variant in record.get("variants", ()):
        got, wanted = results, results
        if variant == "again":
            got = call(*arrays)
        elif variant == "threads":
            got = call(*arrays, num_threads=1 if record.get("num_threads") != 1 else 2 + case.data % 4)
        elif variant == "contiguous":
            got = call(*map(native, arrays))
        elif variant == "pair" and case.H and case.K:
            q, n = case.data % case.H, case.data // 7 % case.K
            alone = query[q : q + 1, : counts[q]], document[n : n + 1, : lengths[n]]
            got = call(*alone, query_lengths=None, document_lengths=None)
            wanted = {name: x[q : q + 1, n : n + 1] for name, x in results.items()}
        elif variant == "packed":
            read = np.arange(case.S) < lengths[:, None]
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            packed = case.given("key", document[read])
            got = call(arrays[0], packed, document_lengths=None, document_offsets=offsets)
        elif variant == "unread":
            got = call(*(_unread(x, n) for x, n in ((query, counts), (document, lengths))))
        elif variant == "quantized" and _can_be_quantized(document):
            kept = fastattn.Quantized.encode(document)
            got, wanted = call(arrays[0], kept), call(arrays[0], kept.decode())
        _all_same(got, wanted, variant)


def _unread(x: Array, lengths: Array) -> Array:
    if x.dtype.kind in "biu":
        return x
    return np.where((np.arange(x.shape[1]) < lengths[:, None])[..., None], x, x.dtype.type(np.nan))


def _can_be_quantized(x: Array) -> bool:
    return x.dtype in (np.float32, np.float64) and np.isfinite(x).all() and abs(x).max(initial=0) < 1e30


def hold_similarity(case: Case, got: Array, counts: Array, lengths: Array) -> None:
    """Scores ``(Q, N)``."""
    computed = case.dtypes[0]
    if got.dtype != computed:
        raise Failure("dtype similarity", f"{got.dtype}, expected {computed}")
    if got.shape != (case.H, case.K):
        raise Failure("shape similarity", f"{got.shape}, expected {(case.H, case.K)}")
    wide, limits = oracle.wide_type(computed), np.finfo(computed)
    query, document = (case.naturals[name].astype(wide) for name in ("query", "key"))
    is_exact = all(case.naturals[name].dtype.kind in "biu" for name in ("query", "key"))
    for q, n in np.ndindex(got.shape):
        tokens, others = query[q, : counts[q]], document[n, : lengths[n]]
        if not lengths[n]:
            if got[q, n] != -np.inf:
                raise Failure("similarity of no tokens", f"{got[q, n]!r} at {q, n}")
            continue
        exact = (tokens @ others.T).max(axis=-1).sum()
        size = abs(tokens) @ abs(others).T
        if (
            float(np.where(np.isfinite(size), size, 0).max(initial=0)) * max(1, counts[q])
            > float(limits.max) / 8
        ):
            continue
        # Half a unit for each product and addition of each token's largest, and in the sum.
        size = np.where(np.isfinite(size), size, 0).max(axis=-1).sum()
        bound = (case.D + 2) / 2 * limits.eps * size + counts[q] * (case.D * limits.tiny + 2.0**-53 * size)
        error = (
            0.0 if got[q, n] == exact or (np.isnan(got[q, n]) and np.isnan(exact)) else abs(got[q, n] - exact)
        )
        if not error <= (0 if is_exact else bound):
            raise Failure(
                "wrong similarity",
                f"at {q, n}: got {got[q, n]!r}, exact {exact!r}, error {error:.3g} over {bound:.3g}",
            )
