"""The benchmark's cases: their arithmetic against counting one by one, and the right answers."""

from __future__ import annotations

import copy
import itertools
import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest

import fastattn
from fastattn.bench import oracle
from fastattn.bench.case import (
    PADDING_KEPT,
    RULES,
    SHORTEST,
    TOPK,
    Case,
    Inputs,
    Stored,
    make_inputs,
    make_layer,
    numpy_dtype,
)
from fastattn.bench.cases import CASES, GROUPS, possible_cases
from fastattn.bench.oracle import (
    checked_rows,
    expected_gradients,
    expected_output,
    expected_recurrence,
    oracle_dtype,
)
from fastattn.bench.peers import Redundant, Unable, fastattn_api
from fastattn.bench.peers._base import joined
from fastattn.bench.peers.numpy_formula import NumPyFormula
from tests import naive
from tests.test_recurrent import recurrence

SMALL = replace(
    CASES["square-512-64"],
    name="small",
    batch=2,
    heads=4,
    kv_heads=4,
    len_q=7,
    len_k=7,
    head_dim=8,
    value_dim=8,
)
DECODE = replace(SMALL, kv_heads=2, len_q=1, len_k=16)

MAXSIM = replace(SMALL, batch=5, heads=3, kv_heads=1, len_k=11, value_dim=1, reduction="max_similarity")

#: One small case for each option that the real ones use, and for options that meet.
KINDS = {
    name: replace(case, name=name)
    for name, case in {
        "plain": SMALL,
        "causal": replace(SMALL, causal=True),
        "random": replace(SMALL, mask="random", len_k=40),
        "padding": replace(SMALL, mask="padding"),
        "shared": replace(SMALL, bias="shared"),
        "per-head": replace(SMALL, bias="per_head"),
        "per-head-causal": replace(SMALL, bias="per_head", causal=True),
        "window": replace(SMALL, window=(2, 1)),
        "window-causal": replace(SMALL, window=(2, 0), causal=True),
        "window-decode": replace(DECODE, window=(4, 0), causal=True),
        "documents": replace(SMALL, document_length=3),
        "documents-causal": replace(SMALL, document_length=3, causal=True),
        "ragged": replace(SMALL, key_lengths="ragged", len_k=16),
        "ragged-causal": replace(SMALL, key_lengths="ragged", causal=True, len_q=1, len_k=16),
        "ragged-decode": replace(DECODE, key_lengths="ragged"),
        "decode": DECODE,
        "decode-some": replace(DECODE, len_q=4, causal=True),
        "float64": replace(SMALL, dtype="float64"),
        "float64-causal": replace(SMALL, dtype="float64", causal=True),
        "rank3": replace(SMALL, batch=1, rank=3),
        "wide-value": replace(SMALL, value_dim=16),
        "narrow-value": replace(SMALL, value_dim=4, causal=True),
        "bshd": replace(SMALL, layout="bshd"),
        "strided": replace(SMALL, strided=True),
        "grouped": replace(SMALL, kv_heads=2, causal=True),
        "cross": replace(SMALL, len_k=3),
        "softcap": replace(SMALL, softcap=2.0, causal=True),
        "in-model": replace(SMALL, kv_heads=2, value_dim=16, model_dim=24),
        "float16": replace(SMALL, dtype="float16"),
        "float16-decode": replace(DECODE, dtype="float16"),
        "bfloat16-causal": replace(SMALL, dtype="bfloat16", causal=True),
        "bfloat16-ragged": replace(DECODE, dtype="bfloat16", key_lengths="ragged"),
        "stored-float16": replace(DECODE, storage="float16"),
        "int8": replace(DECODE, storage="int8"),
        "int8-some": replace(
            DECODE, storage="int8", batch=1, len_q=3, head_dim=80, value_dim=80, causal=True
        ),
        "pages": replace(DECODE, page_size=4),
        "pages-bfloat16": replace(DECODE, page_size=8, dtype="bfloat16"),
        "pages-int8": replace(DECODE, page_size=4, storage="int8", key_lengths="ragged"),
        "step": replace(DECODE, step=True),
        "step-float16": replace(DECODE, step=True, dtype="float16"),
        "step-bfloat16-some": replace(DECODE, step=True, dtype="bfloat16", batch=1, len_q=3, causal=True),
        "step-int8": replace(DECODE, step=True, storage="int8"),
        "backward": replace(SMALL, backward=True),
        "backward-causal": replace(SMALL, backward=True, causal=True, len_q=5),
        "backward-random": replace(SMALL, backward=True, mask="random", len_k=40),
        "backward-shared": replace(SMALL, backward=True, bias="shared", key_lengths="ragged", len_k=16),
        "backward-per-head": replace(SMALL, backward=True, bias="per_head", causal=True),
        "backward-window": replace(SMALL, backward=True, window=(2, 1)),
        "backward-documents": replace(SMALL, backward=True, document_length=3, causal=True),
        "backward-grouped": replace(SMALL, backward=True, kv_heads=2),
        "backward-wide-value": replace(SMALL, backward=True, value_dim=16),
        "backward-narrow-value": replace(SMALL, backward=True, value_dim=4, causal=True),
        "backward-softcap": replace(SMALL, backward=True, softcap=2.0),
        "backward-bshd": replace(SMALL, backward=True, layout="bshd", bias="per_head"),
        "backward-rank3": replace(SMALL, backward=True, batch=1, rank=3),
        "backward-strided": replace(SMALL, backward=True, strided=True),
        "backward-float64": replace(SMALL, backward=True, dtype="float64"),
        "backward-float16": replace(SMALL, backward=True, dtype="float16"),
        **{f"rule-{rule}": replace(SMALL, rule=rule, len_q=70, len_k=70, layout="bshd") for rule in RULES},
        **{f"rule-{rule}-token": replace(SMALL, rule=rule, len_q=1, len_k=1, value_dim=4) for rule in RULES},
        "rule-grouped": replace(SMALL, rule="kimi", kv_heads=2),
        "rule-float64": replace(SMALL, rule="gated_delta", dtype="float64"),
        "rule-float16": replace(SMALL, rule="gated_delta", dtype="float16", layout="bshd"),
        "value-in-key": replace(
            SMALL, kv_heads=1, len_q=2, len_k=9, causal=True, value_dim=6, value_in_key=True
        ),
        "relative": replace(SMALL, bias="relative", len_k=9, causal=True),
        "grid": replace(SMALL, bias="grid", len_k=9),
        "neighborhood": replace(SMALL, batch=1, heads=1, kv_heads=1, len_q=81, len_k=81, mask="neighborhood"),
        **{f"maxsim-{dtype}": replace(MAXSIM, dtype=dtype) for dtype in ("float32", "float16", "float64")},
        "maxsim-int8": replace(MAXSIM, storage="int8"),
        "topk": replace(SMALL, reduction="topk", kv_heads=2, len_k=40, value_dim=1),
        "topk-bfloat16": replace(SMALL, reduction="topk", dtype="bfloat16", len_k=40, value_dim=1),
        "key-weights": replace(SMALL, reduction="key_weights", len_k=16, causal=True, value_dim=1),
    }.items()
}
BACKWARD = tuple(kind for kind, case in KINDS.items() if case.backward)
RECURRENT = tuple(kind for kind, case in KINDS.items() if case.rule is not None)
REDUCTIONS = tuple(kind for kind, case in KINDS.items() if case.reduction is not None)
FORWARD = tuple(kind for kind in KINDS if kind not in (*BACKWARD, *RECURRENT, *REDUCTIONS))


def in_interval(case: Case, b: int, i: int, j: int) -> bool:
    """Whether query i of item b may attend key j, as far as no array says otherwise."""
    end = case.len_k if case.lengths is None else int(case.lengths[b])
    position = i + end - case.len_q
    allowed = j < end
    if case.causal:
        allowed = allowed and j <= position
    if case.window is not None:
        allowed = allowed and position - case.window[0] <= j <= position + case.window[1]
    if case.document_length is not None:
        allowed = allowed and i // case.document_length == j // case.document_length
    return allowed


def in_padding(case: Case, j: int) -> bool:
    return case.mask == "padding" and j >= int(case.len_k * PADDING_KEPT)


def loop_attention(case: Case) -> np.ndarray:
    """Attention one score at a time, straight from the options of `case`."""
    inputs = make_inputs(case)
    query, key, value = inputs.bhsd(case)
    out = np.zeros((case.batch, case.heads, case.len_q, case.value_dim))
    for b, h, i in np.ndindex(case.batch, case.heads, case.len_q):
        kv = h // (case.heads // case.kv_heads)
        total = 0.0
        for j in range(case.len_k):
            if not in_interval(case, b, i, j) or in_padding(case, j):
                continue
            if case.mask in ("random", "neighborhood") and not inputs.mask[i, j]:
                continue
            score = sum(float(x) * float(y) for x, y in zip(query[b, h, i], key[b, kv, j], strict=True))
            score /= math.sqrt(case.head_dim)
            if case.softcap is not None:
                score = case.softcap * math.tanh(score / case.softcap)
            if case.bias is not None:
                score += float(inputs.bias[h, i, j] if case.bias != "shared" else inputs.bias[i, j])
            total += math.exp(score)
            out[b, h, i] += math.exp(score) * value[b, kv, j].astype(float)
        out[b, h, i] /= total
    return out


@pytest.mark.parametrize("kind", BACKWARD)
def test_gradients_of_the_oracle_are_those_of_the_definition(kind: str) -> None:
    case = KINDS[kind]
    inputs = make_inputs(case)
    exact, _ = naive.gradients(
        inputs.grad_out_bhsd(case),
        *inputs.bhsd(case),
        mask=inputs.allowed(case),
        bias=inputs.bias,
        softcap=case.softcap,
    )
    wanted = [it for it in (exact.query, exact.key, exact.value, exact.bias) if it is not None]
    answer = expected_gradients(case, inputs)
    assert answer.dtype == oracle_dtype(case)
    np.testing.assert_allclose(answer, joined(wanted).astype(answer.dtype), rtol=1e-10, atol=1e-13)


def test_gradient_errors_are_of_the_worst_gradient() -> None:
    """Over that gradient's largest value, so that none hides behind a larger one."""
    case = KINDS["backward-per-head"]
    answer = expected_gradients(case, make_inputs(case))
    sizes = [it.size for it in make_inputs(case).bhsd(case)]
    bounds = np.cumsum([0, *sizes, answer.size - sum(sizes)])
    for start, stop in itertools.pairwise(bounds):
        found = answer.copy()
        found[start] += 1e-3 * np.abs(answer[start:stop]).max()
        largest, rms = oracle.gradient_errors(case, found, answer)
        assert largest == pytest.approx(1e-3)
        assert rms == pytest.approx(1e-3 / np.sqrt(stop - start))
    assert oracle.gradient_errors(case, answer, answer) == (0, 0)
    with pytest.raises(ValueError, match="elements"):
        oracle.gradient_errors(case, answer[:-1], answer)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gradients_without_a_key_are_not_tolerated(dtype: str) -> None:
    case = replace(SMALL, backward=True, dtype=dtype, len_k=64)
    inputs = make_inputs(case)
    answer = expected_gradients(case, inputs)
    allowed = oracle.relative_tolerance(case, inputs, answer)
    rounded = answer.astype(dtype)
    assert oracle.gradient_errors(case, rounded, answer)[0] <= allowed / 4
    masked = replace(inputs, mask=np.arange(64) < np.full((case.len_q, 1), 63))
    assert oracle.gradient_errors(case, expected_gradients(case, masked), answer)[0] > allowed


def recurrence_of(kind: str) -> tuple[Inputs, list[np.ndarray]]:
    """The inputs, and by a loop in long double the output and the state after."""
    case, inputs = KINDS[kind], make_inputs(KINDS[kind])
    decay, beta = inputs.gates(case)
    if RULES[case.rule or ""][0] == "token":
        decay = decay[..., 0]
    beta = None if beta is None else beta[..., 0]
    return inputs, list(recurrence(inputs.bhsd(case), decay, beta, state=inputs.state))


@pytest.mark.parametrize("kind", RECURRENT)
def test_the_recurrence_of_the_oracle_is_that_of_the_definition(kind: str) -> None:
    inputs, exact = recurrence_of(kind)
    answer = expected_recurrence(KINDS[kind], inputs)
    assert answer.dtype == oracle_dtype(KINDS[kind])
    group = KINDS[kind].heads // KINDS[kind].kv_heads
    wanted = joined([exact[0], np.repeat(exact[1], group, axis=1)])
    np.testing.assert_allclose(answer.astype(float), wanted.astype(float), rtol=1e-12, atol=1e-13)
    assert oracle.recurrence_errors(KINDS[kind], joined(exact), answer)[0] < 1e-12


def test_a_wrong_state_or_token_is_not_tolerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one of a head that is compared, where not all of them are."""
    for updates in (1 << 28, 0):
        monkeypatch.setattr(oracle, "MOST_UPDATES", updates)
        case = KINDS["rule-gated_delta"]
        inputs, exact = recurrence_of(case.name)
        heads = oracle.checked_heads(case)
        assert len(heads) == (2 if updates == 0 else case.batch * case.heads)
        assert (heads[0], heads[-1]) == (0, case.batch * case.heads - 1)
        answer = expected_recurrence(case, inputs)
        allowed = oracle.relative_tolerance(case, inputs, answer)
        rounded = joined(exact).astype(np.float32)
        assert oracle.recurrence_errors(case, rounded, answer)[0] <= allowed / 16
        for at in (0, exact[0].size - 1, exact[0].size, -1):
            found = rounded.copy()
            found[at] += 0.01 * np.abs(answer).max()
            assert oracle.recurrence_errors(case, found, answer)[0] > allowed
    with pytest.raises(ValueError, match="elements"):
        oracle.recurrence_errors(case, rounded[:-1], answer)


@pytest.mark.parametrize("rule", RULES)
def test_multiply_adds_of_a_recurrence(rule: str) -> None:
    """Each token: the state is read, added to and, by the delta rule, asked; so is the half of a chunk."""
    case = replace(SMALL, rule=rule, batch=3, len_q=960, len_k=960, head_dim=8, value_dim=6)
    times = 2 if RULES[rule][1] else 1
    assert case.flops == 2 * 3 * 4 * 960 * (2 * 48 + (times - 1) * 48 + times * 48 / 2 * (8 + 6))
    token = replace(case, len_q=1, len_k=1)
    states = token.nbytes - 3 * 4 * 4 * 2 * (8 + 6)  # but for query, key, value and result
    assert states - 2 * 3 * 4 * 4 * 8 * 6 == 3 * 4 * 4 * sum(
        {None: 0, "token": 1, "column": 8}[it] if not isinstance(it, bool) else it for it in RULES[rule]
    )


@pytest.mark.parametrize("kind", FORWARD)
def test_oracle_and_numpy_agree_with_a_loop(kind: str) -> None:
    case = KINDS[kind]
    inputs = make_inputs(case)
    expected = loop_attention(case)
    answer = expected_output(case, inputs)
    assert answer.dtype == oracle_dtype(case)
    np.testing.assert_allclose(answer.astype(float), expected, rtol=1e-12, atol=1e-14)
    _, _, value = inputs.bhsd(case)
    allowed = 16 * np.finfo(case.compute_dtype).eps * np.abs(value).max()
    allowed += 0.51 * spacing_of_one(case.dtype) * np.abs(expected)  # rounding to 16 bits
    tried = 0
    for make in NumPyFormula().ways.values():
        try:
            result = make(case, inputs).result()
        except Redundant:
            continue
        except Unable:
            assert kind == "step-int8"
            continue
        assert result.dtype == numpy_dtype(case.dtype)
        assert np.all(np.abs(result.astype(float) - expected) <= allowed)
        assert np.abs(result.astype(answer.dtype) - answer).max() <= oracle.tolerance(case, inputs, answer)
        tried += 1
    in_blocks = kind.startswith(("documents", "ragged")) or kind == "window-decode"
    assert tried == (2 if in_blocks else 0 if kind == "step-int8" else 1)


def spacing_of_one(dtype: str) -> float:
    return {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]


@pytest.mark.parametrize("kind", [kind for kind, case in KINDS.items() if not case.is_plain])
def test_what_is_stored_is_of_one_size_and_stands_for_normal_numbers(kind: str) -> None:
    case = KINDS[kind]
    inputs = make_inputs(case)
    _, *decoded = inputs.bhsd(case)
    for rows, array in zip((inputs.key, inputs.value), decoded, strict=True):
        assert array.shape[:3] == (case.batch, case.kv_heads, case.len_k)
        assert 0.7 < array.astype(float).std() < 1.3
        if not isinstance(rows, Stored):
            assert rows is array
            continue
        assert (rows.scale is not None) == (case.storage == "int8")
        assert (rows.table is not None) == (case.page_size is not None)
        if rows.scale is not None:
            assert rows.data.dtype == np.int8
            assert rows.scale.shape == (*rows.data.shape[:-1], -(-rows.data.shape[-1] // 64))
        if rows.table is not None:
            assert sorted(rows.table.reshape(-1)) == [*range(len(rows.data))]
            assert rows.data.shape[2] == case.page_size


def test_int8_rows_are_what_the_library_makes_of_the_same_numbers() -> None:
    rows = np.random.default_rng(0).standard_normal((2, 3, 5, 80), dtype=np.float32)
    ours, theirs = Stored.quantised(rows), fastattn.Quantized.encode(rows)
    assert np.array_equal(ours.data, theirs.data)
    assert np.array_equal(ours.scale, theirs.scale)
    assert np.array_equal(ours.array(), theirs.decode())


def test_pages_stand_for_the_rows_that_were_cut() -> None:
    rows = np.random.default_rng(0).standard_normal((2, 3, 12, 8), dtype=np.float32)
    table = np.array([[3, 0, 4], [5, 1, 2]])
    paged = Stored(rows).paged(4, table)
    assert np.array_equal(paged.array(), rows)
    assert np.array_equal(paged.data[4], rows[0, :, 8:])
    pages = fastattn.Paged(paged.data, table)
    query = rows[:, :, :1]
    expected = fastattn.attention(query, rows, rows, backend="reference")
    assert np.array_equal(fastattn.attention(query, pages, pages, backend="reference"), expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_wrong_by_a_missing_key_or_a_coarser_type_is_not_tolerated(dtype: str) -> None:
    case = replace(DECODE, dtype=dtype, len_k=64)
    inputs = make_inputs(case)
    answer = expected_output(case, inputs)
    allowed = oracle.tolerance(case, inputs, answer)
    assert np.abs(answer.astype(numpy_dtype(dtype)).astype(float) - answer).max() <= allowed / 4
    without = replace(case, len_k=63)
    fewer = replace(inputs, key=inputs.key[:, :, :63], value=inputs.value[:, :, :63])
    assert np.abs(expected_output(without, fewer) - answer).max() > allowed
    coarser = {"float32": np.float16, "float16": numpy_dtype("bfloat16")}.get(dtype)
    if coarser is not None:
        assert np.abs(answer.astype(coarser).astype(float) - answer).max() > allowed / 4


def test_oracle_does_not_depend_on_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = expected_output(KINDS["grouped"], make_inputs(KINDS["grouped"]))
    monkeypatch.setattr(oracle, "ROWS", 2)
    blocks = expected_output(KINDS["grouped"], make_inputs(KINDS["grouped"]))
    np.testing.assert_allclose(blocks, whole, rtol=1e-14)


def test_oracle_of_a_sample_is_the_sample_of_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(KINDS["window-causal"], len_q=90, len_k=90)
    whole = expected_output(case, make_inputs(case))
    monkeypatch.setattr(oracle, "MOST_SCORES", {"float32": 0})
    rows = checked_rows(case)
    assert len(rows) == oracle.FEWEST_ROWS
    np.testing.assert_allclose(expected_output(case, make_inputs(case)), whole[:, :, rows], rtol=1e-14)


@pytest.mark.parametrize("name", CASES)
def test_checked_rows_are_all_or_an_even_sample(name: str) -> None:
    case = CASES[name]
    rows = checked_rows(case)
    assert (rows[0], rows[-1]) == (0, case.len_q - 1)
    steps = np.diff(rows)
    if len(rows) == case.len_q:
        assert np.all(steps == 1)
    else:
        assert oracle.FEWEST_ROWS <= len(rows) <= oracle.MOST_ROWS
        assert 1 <= steps.min() <= steps.max() <= steps.min() + 1
    scores = case.batch * case.heads * case.len_k * len(rows)
    assert scores <= oracle.MOST_SCORES[case.dtype] or len(rows) <= oracle.FEWEST_ROWS


def test_flops_follow_the_formula() -> None:
    case = replace(SMALL, batch=3, heads=4, len_q=10, len_k=20, head_dim=8, value_dim=8)
    assert case.flops == 4 * 3 * 4 * 10 * 20 * 8
    assert replace(case, value_dim=16).flops == 2 * 3 * 4 * 10 * 20 * (8 + 16)
    assert replace(case, kv_heads=2, mask="random", bias="shared").flops == case.flops
    assert replace(case, value_dim=16, backward=True).flops == 2 * 3 * 4 * 10 * 20 * (3 * 8 + 2 * 16)
    square = replace(case, len_k=10)
    assert replace(square, causal=True).flops == square.flops / 2 * (10 + 1) / 10


def reduction_nbytes(case: Case, inputs: Inputs) -> int:
    """Queries, keys, and results of 4 bytes each, but 8 of an index."""
    key = inputs.key
    arrays = [key] if not isinstance(key, Stored) else [it for it in (key.data, key.scale) if it is not None]
    read = sum(it.nbytes for it in arrays)
    if case.reduction == "max_similarity":
        return read + inputs.query[0].nbytes + 4 * case.heads * case.batch
    rows = case.batch * case.heads
    results = (4 + 8) * rows * case.len_q * TOPK if case.reduction == "topk" else 4 * rows * case.len_k
    return read + inputs.query.nbytes + results


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_the_reductions_of_the_oracle_are_those_of_a_loop(kind: str) -> None:
    case = KINDS[kind]
    inputs = make_inputs(case)
    query, key, _ = (it.astype(float) for it in inputs.bhsd(case))
    answer = oracle.expected_reduction(case, inputs)
    group = case.heads // case.kv_heads
    for b, h in np.ndindex(case.batch, case.heads):
        if case.reduction == "max_similarity":
            wanted = sum(max(float(q @ k) for k in key[b, 0]) for q in query[0, h])
            assert answer[b, h] == pytest.approx(wanted)
            continue
        summed = np.zeros(case.len_k)
        for i in range(case.len_q):
            keys = [j for j in range(case.len_k) if in_interval(case, b, i, j)]
            scores = {
                j: float(query[b, h, i] @ key[b, h // group, j]) / math.sqrt(case.head_dim) for j in keys
            }
            if case.reduction == "topk":
                wanted = sorted(scores.values(), reverse=True)[:TOPK]
                np.testing.assert_allclose(answer[:, b, h, i], [wanted, wanted])
            summed[keys] += [math.exp(x) / sum(map(math.exp, scores.values())) for x in scores.values()]
        if case.reduction == "key_weights":
            np.testing.assert_allclose(answer[b, h], summed)


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_a_wrong_score_or_key_is_not_tolerated(kind: str) -> None:
    case, inputs = KINDS[kind], make_inputs(KINDS[kind])
    answer = oracle.expected_reduction(case, inputs)
    allowed = oracle.relative_tolerance(case, inputs, answer)
    assert oracle.reduction_errors(case, answer.astype(np.float32), answer)[0] <= max(allowed, 1e-7)
    for found in (answer * (1 + 2 * allowed), np.roll(answer, 1, axis=-1)):
        assert oracle.reduction_errors(case, found, answer)[0] > allowed
    with pytest.raises(ValueError, match="shape"):
        oracle.reduction_errors(case, answer[:-1], answer)


@pytest.mark.parametrize("kind", ["value-in-key", "mla-decode-16"])
def test_values_are_in_the_key_also_of_copies(kind: str) -> None:
    case = KINDS.get(kind) or CASES[kind]
    inputs = make_inputs(case)
    assert np.shares_memory(inputs.value, inputs.key)
    copied = copy.deepcopy(inputs).with_views(case)
    assert np.shares_memory(copied.value, copied.key)
    assert np.array_equal(copied.value, inputs.value)


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_and_bytes_are_what_counting_gives(kind: str) -> None:
    case = KINDS[kind]
    inputs = make_inputs(case)
    allowed = np.array(
        [
            [[in_interval(case, b, i, j) for j in range(case.len_k)] for i in range(case.len_q)]
            for b in range(case.batch)
        ]
    )
    if case.mask == "neighborhood":
        allowed &= inputs.mask
    assert case.pairs == np.count_nonzero(allowed)
    if case.reduction is not None:
        assert case.nbytes == reduction_nbytes(case, inputs)
        return

    query, key, value = inputs.bhsd(case)
    read = query.size * query.itemsize
    each = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}[case.storage or case.dtype]
    for b, j in np.ndindex(case.batch, case.len_k):
        if allowed[b, :, j].any() and not in_padding(case, j):
            read += each * (key[b, :, j].size + (0 if case.value_in_key else value[b, :, j].size))
            if case.storage == "int8":  # a float32 for every 64 elements of a row, or for what is left of it
                read += 4 * sum(math.ceil(it.shape[3] / 64) * it.shape[1] for it in (key, value))
    mask = None if case.mask == "neighborhood" else inputs.mask
    bias = inputs.bias if inputs.table is None else inputs.table
    read += sum(array.nbytes for array in (mask, bias) if array is not None)
    written = case.batch * case.heads * case.len_q * case.value_dim * query.itemsize
    read += sum(it.nbytes for it in (inputs.decay, inputs.beta, inputs.state) if it is not None)
    written += 0 if inputs.state is None else inputs.state.nbytes
    if case.backward:
        read += written + inputs.grad_out.nbytes  # the output is there already
        read += case.batch * case.heads * case.len_q * np.dtype(case.compute_dtype).itemsize  # lse
        written = sum(it.size for it in (query, key, value)) * query.itemsize
        written += inputs.bias.nbytes if inputs.bias is not None else 0
    assert case.nbytes == read + written
    assert case.intensity == case.flops / case.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_allowed_is_what_the_options_say(kind: str) -> None:
    case = KINDS[kind]
    inputs = make_inputs(case)
    full = (case.batch, case.heads, case.len_q, case.len_k)
    expected = np.empty(full, bool)
    for b, h, i, j in np.ndindex(full):
        expected[b, h, i, j] = in_interval(case, b, i, j) and not in_padding(case, j)
    if case.mask in ("random", "neighborhood"):
        expected &= inputs.mask
    allowed = inputs.allowed(case)
    assert np.array_equal(np.broadcast_to(True if allowed is None else allowed, full), expected)
    assert allowed is None or (allowed.ndim == 4 and not allowed.all())

    added = inputs.score_mask(case)
    if case.bias is None:
        assert (added is None) == (allowed is None)
    else:
        bias = np.broadcast_to(inputs.bias, full)
        assert np.array_equal(np.broadcast_to(added, full), np.where(expected, bias, -np.inf))


def test_a_case_survives_the_pipe_to_a_worker() -> None:
    for case in CASES.values():
        sent = Case.from_json(json.loads(json.dumps(asdict(case))))
        assert sent == case
        assert hash(sent) == hash(case)


def test_ragged_lengths_reach_from_the_shortest_to_all_keys() -> None:
    lengths = CASES["bert-ragged"].lengths
    assert lengths is not None
    assert (lengths.min(), lengths.max()) == (int(SHORTEST * 128), 128)
    assert np.any(np.diff(lengths) > 0)
    assert np.any(np.diff(lengths) < 0)
    assert CASES["bert-batch"].lengths is None


def test_inputs_depend_on_the_name_alone() -> None:
    first, again = make_inputs(SMALL), make_inputs(SMALL)
    assert first.query.tobytes() == again.query.tobytes()
    assert first.query.tobytes() != make_inputs(replace(SMALL, name="other")).query.tobytes()


def test_strided_inputs_are_slices_of_the_wide_ones() -> None:
    case = KINDS["strided"]
    inputs = make_inputs(case)
    for array, wide in zip((inputs.query, inputs.key, inputs.value), inputs.wide(case), strict=True):
        assert array.strides[-1] == 2 * array.itemsize
        assert np.shares_memory(array, wide)
        assert np.array_equal(array, wide[..., ::2])


def test_cases_are_consistent() -> None:
    for name, case in CASES.items():
        assert case.name == name
        assert case.group in GROUPS
        assert case.baseline is None or CASES[case.baseline].shape == case.shape
        assert case.heads % case.kv_heads == 0
        assert case.nbytes < 1e9, "several libraries hold the inputs at the same time"
        start, stop = case.intervals()
        assert np.all(start < stop), "a query without keys is divided by zero in most libraries"
        assert case.document_length is None or (case.len_q == case.len_k and case.lengths is None)
        assert not case.strided or (case.layout == "bhsd" and case.rank == 4)
        assert case.rank == 4 or (case.batch == 1 and case.layout == "bhsd")
        assert case.is_plain or (case.rank == 4 and case.layout == "bhsd" and not case.strided)
        assert case.page_size is None or (case.len_k % case.page_size == 0 and not case.step)
        assert case.backward == (case.group in ("backward", "flex-backward"))
        assert case.flex == case.name.startswith("flex-")
        assert not case.backward or (case.is_plain and case.model_dim is None)
        assert (case.rule is not None) == (case.group == "recurrent")
        assert (case.reduction is not None) == (case.group == "reductions")
        assert case.reduction is None or case.value_dim == 1
        assert not case.value_in_key or (
            case.kv_heads == 1 and case.value_dim <= case.head_dim and case.is_plain
        )
        assert case.rule is None or (case.is_plain and case.rank == 4 and case.len_q == case.len_k)


def test_the_decoder_is_timed_in_each_storage() -> None:
    cases = [case for case in CASES.values() if case.group == "decode-storage"]
    nbytes = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1 + 4 / 64}
    assert [case.storage or case.dtype for case in cases] == [*nbytes] * (len(cases) // 4)
    assert {case.heads // case.kv_heads for case in cases if case.len_q == 1} == {1, 4, 16}
    for case in cases:
        name, _, storage = case.name.rpartition("-")
        how = {"page_size", "step"} if case.page_size or case.step else {"dtype", "storage"}
        if case.name.endswith("-float32") and "dtype" in how:
            assert case.baseline is None
        else:  # it differs from its baseline in nothing else
            base = CASES[case.baseline or ""]
            told = {"name", "group", "origin", "baseline", "quick"}
            assert replace(base, **{field: getattr(case, field) for field in told | how}) == case
            assert base.name == f"{name}-float32" if "dtype" in how else base.name.endswith(storage)
        if case.len_q == 1:  # but for the query and the result
            numbers = 2 * case.kv_heads * case.len_k * case.head_dim
            assert case.nbytes == pytest.approx(numbers * nbytes[storage], rel=0.01)


def test_a_case_in_a_model_differs_from_its_baseline_in_the_products_alone() -> None:
    in_model = [case for case in CASES.values() if case.model_dim is not None]
    assert in_model == [case for case in CASES.values() if case.group == "in-model"]
    for case in in_model:
        alone = CASES[case.baseline or ""]
        named = {field: getattr(case, field) for field in ("name", "group", "origin", "baseline")}
        assert replace(alone, **named, model_dim=case.model_dim) == case
        assert alone.model_dim is None
        assert case.model_dim == case.heads * case.head_dim
        assert (case.flops, case.nbytes) == (alone.flops, alone.nbytes)


def test_a_layer_has_the_shapes_of_the_attention_that_it_is_around() -> None:
    case = KINDS["in-model"]
    layer, again = make_layer(case), make_layer(case)
    assert layer is not None
    assert again is not None
    query, key, value = make_inputs(case).bhsd(case)
    assert (layer.rows @ layer.w_qkv).size == query.size + key.size + value.size
    out = expected_output(case, make_inputs(case))
    assert layer.attended.size == out.size
    assert (layer.attended @ layer.w_o).shape == layer.rows.shape == (case.batch * case.len_q, case.model_dim)
    assert {it.dtype for it in (layer.rows, layer.w_qkv, layer.attended, layer.w_o)} == {np.dtype(case.dtype)}
    assert layer.w_qkv.tobytes() == again.w_qkv.tobytes()
    assert make_layer(KINDS["plain"]) is None


def test_groups_stand_together() -> None:
    """A table by groups shows each once."""
    seen = [case.group for case in CASES.values()]
    changes = [group for group, before in zip(seen, [None, *seen], strict=False) if group != before]
    assert changes == list(GROUPS)


@pytest.mark.parametrize("kind", ["step", "step-float16", "step-int8"])
def test_a_step_appends_before_it_attends(kind: str) -> None:
    """The new rows are not there beforehand, so that a call that left the append out would be wrong."""
    case, inputs = KINDS[kind], make_inputs(KINDS[kind])
    answer = expected_output(case, inputs)
    allowed = oracle.tolerance(case, inputs, answer)
    call = fastattn_api.Fastattn().ways["attention"](case, inputs)
    assert np.abs(expected_output(case, inputs) - answer).max() > allowed
    assert np.abs(call.result() - answer).max() <= allowed
    np.testing.assert_allclose(expected_output(case, inputs), answer, rtol=1e-5, atol=1e-6)


def test_gradients_are_timed_without_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    case, inputs = KINDS["backward"], make_inputs(KINDS["backward"])
    call = fastattn_api.Fastattn().backward_ways["attention_backward"](case, inputs)
    monkeypatch.setattr(fastattn, "attention", lambda *_, **__: pytest.fail("the outputs were there"))
    answer = expected_gradients(case, inputs)
    assert oracle.gradient_errors(case, call.result(), answer)[0] <= oracle.relative_tolerance(
        case, inputs, answer
    )


def test_the_quick_cases_are_few_small_and_of_many_kinds() -> None:
    quick = [case for case in CASES.values() if case.quick]
    assert 8 <= len(quick) <= 12
    assert len({case.group for case in quick}) == len(quick)
    assert all(case.threads is None for case in quick)
    assert max(case.batch * case.heads * case.len_q * case.len_k for case in quick) <= 1 << 26


def test_families_vary_one_thing() -> None:
    def values(group: str, field: str) -> list[int]:
        return [getattr(case, field) for case in CASES.values() if case.group == group]

    assert values("scaling-length", "len_k") == [128 << n for n in range(9)]
    assert values("scaling-batch", "batch") == [1 << n for n in range(7)]
    assert values("scaling-threads", "threads") == [1 << n for n in range(7)]
    assert values("scaling-dim", "head_dim") == [16, 32, 64, 96, 128, 192, 256]
    for group in ("scaling-batch", "scaling-threads", "scaling-dim"):
        assert len(set(values(group, "len_q"))) == len(set(values(group, "heads"))) == 1


def test_cases_for_more_threads_than_cores_are_left_out() -> None:
    names = {case.name for case in possible_cases(2)}
    assert {"threads-1", "threads-2", "long-64k"} <= names
    assert not names & {"threads-4", "threads-64"}
    assert len(possible_cases(64)) == len(CASES)
