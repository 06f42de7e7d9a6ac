"""The fuzzer: cases that failed once, on all engines; its oracle against the loops; and that it finds."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import fastattn
from fastattn.biases import Relative
from tests import naive
from tests.fuzz import checks
from tests.fuzz.build import Case
from tests.fuzz.records import draw
from tests.fuzz.runner import Run
from tests.fuzz.shrink import shrink
from tests.fuzz.worker import manner_of
from tests.process import python

CORPUS = [
    pytest.param(record, id=f"{path.stem}-{number}")
    for path in sorted((Path(__file__).parent / "fuzz" / "corpus").glob("*.json"))
    for number, record in enumerate(json.loads(path.read_text()))
]
LONG = "--cases 40 --seed 7 --engines reference --processes 2"
COMPILED = [name for name in checks.engines() if name not in ("numba", "reference")]


@pytest.fixture(autouse=True)
def same_instruction_set():
    from fastattn.backends.cython import backend as cython_backend

    if cython_backend.isa() is None:
        yield
    else:
        with cython_backend.use_isa(cython_backend.isa()):
            yield


@pytest.mark.parametrize("record", CORPUS)
def test_cases_that_failed_once(record):
    """On every engine, whichever it was that failed: those of backends that are not here are left out."""
    for engine in [*COMPILED, "reference"]:
        checks.check(record | {"engine": engine})


@pytest.mark.parametrize("seed", range(0, 400, 8))
def test_the_oracle_is_the_definition(seed):
    """And so is how far a rounding moves each element."""
    record = next(r for n in range(100) if _is_small(r := draw(seed * 100 + n, ["cython"])))
    case = Case(record | {"precision": "exact"})  # `naive` knows no other
    with np.errstate(all="ignore"):
        expected = checks.Expected(case)
        got, arrays = expected.answer, expected.arrays.values()
        options = {
            "bias": case.bias_read,
            "scale": case.scale,
            "softcap": case.softcap,
            "sinks": expected.sinks,
        }
        wanted = naive.attention(
            *arrays, mask=case.allowed, dropout=case.dropout, seed=record.get("dropout_seed", 0), **options
        )
    clear = {
        name: np.ones(getattr(got, name).shape, bool) if unclear is None else ~unclear
        for name, unclear in zip(
            checks.NAMES, (got.unclear_out, got.unclear_rows, got.unclear_weights), strict=True
        )
    }
    if got.nonfinite_out is not None:
        spoilt = got.nonfinite_out & clear["out"]
        assert not np.isfinite(wanted.out[spoilt & ~np.isnan(got.out)].astype(float)).any()
        clear["out"] = clear["out"] & ~got.nonfinite_out
    for name, judged in clear.items():
        mine, theirs = (getattr(answer, name)[judged].astype(float) for answer in (got, wanted))
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-300, err_msg=name)
        mine, theirs = (getattr(answer, f"{name}_reach")[judged].astype(float) for answer in (got, wanted))
        finite = np.isfinite(theirs)
        if name == "lse":  # scores that are wrong by more than `oracle.FIRST_ORDER` have a reach of their own
            beyond = ~clear["weights"].all(axis=-1)[judged]
            assert (mine >= theirs)[beyond & finite].all()
            finite &= ~beyond
        np.testing.assert_allclose(
            mine[finite], theirs[finite], rtol=1e-6, atol=1e-25, err_msg=f"{name}_reach"
        )


def _is_small(record):
    # The loops have no such thing as a score that is lost below all normal numbers.
    plain = (
        not record.get("styles")
        and "nonfinite" not in record
        and record.get("kv_heads")
        and not record.get("flat")
    )
    return (
        record["kind"] == "attention" and plain and record["len_q"] * record["len_k"] * record["heads"] < 2000
    )


def test_a_thousandth_is_found_and_made_small(monkeypatch):
    """A weight that is dropped once in a while, in one case of many."""
    real = fastattn.attention

    def wrong(query, key, value, **options):
        results = real(query, key, value, **options)
        out = results[0] if isinstance(results, tuple) else results
        if out.size and options.get("softcap") and np.isfinite(out.flat[-1].astype(float)):
            out.flat[-1] = out.flat[-1] * 1.01 + 0.001
        return results

    monkeypatch.setattr(fastattn, "attention", wrong)
    records = [
        record
        for record in (draw(seed, ["reference"]) for seed in range(300))
        if record["kind"] == "attention"
    ]
    failing = [(record, found) for record in records if (found := manner_of(record)) is not None]
    assert failing
    record, (manner, _) = failing[0]
    smaller = shrink(record, manner, lambda tried: (manner_of(tried) or (None,))[0], most=300)
    assert "softcap" in smaller
    assert len(json.dumps(smaller)) < len(json.dumps(record))
    assert not smaller.get("places") and not smaller.get("mask")


@pytest.mark.parametrize(
    "seed", [*range(0, 300, 20), *(pytest.param(n, marks=pytest.mark.slow) for n in range(300, 900, 20))]
)
def test_a_few_cases(seed):
    for number in range(seed, seed + 20):
        record = draw(number, [*COMPILED, "reference"])
        assert manner_of(record) is None, record


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 16))]
)
def test_a_few_functions(seed):
    pytest.importorskip("numba")
    record = draw(seed, [*COMPILED, "reference"], ("flex",))
    assert manner_of(record) is None, record


@pytest.mark.parametrize("seed", range(0, 80, 8))
def test_a_few_recurrences(seed):
    for number in range(seed, seed + 8):
        record = draw(number, [*COMPILED, "reference"], ("recurrent",))
        assert manner_of(record) is None, record


@pytest.mark.parametrize("gate", ["decay", "beta"])
def test_gates_that_are_wrong_by_a_hundred_thousandth_are_found(gate, monkeypatch):
    real = fastattn.gated_linear_attention

    def wrong(*arrays, **options):
        if gate in options:
            options[gate] = options[gate] * (1 + 1e-5)
        return real(*arrays, **options)

    monkeypatch.setattr(fastattn, "gated_linear_attention", wrong)
    records = [draw(seed, ["reference"], ("recurrent",)) for seed in range(60)]
    manners = [found[0] for record in records if (found := manner_of(record | {"variants": []})) is not None]
    assert manners
    assert set(manners) <= {"wrong recurrent out", "wrong recurrent state"}


@pytest.mark.parametrize("kind", ["reductions", "biases"])
@pytest.mark.parametrize(
    "seed", [*range(0, 80, 20), *(pytest.param(n, marks=pytest.mark.slow) for n in range(80, 400, 20))]
)
def test_a_few_reductions_and_bias_objects(seed, kind):
    for number in range(seed, seed + 20):
        record = draw(number, [*COMPILED, "reference"], (kind,))
        assert manner_of(record) is None, record


def _manners(kind, seeds=200):
    """In which ways cases fail that have no variants."""
    records = [draw(seed, ["reference"], (kind,)) for seed in range(seeds)]
    return {found[0] for record in records if (found := manner_of(record | {"variants": []})) is not None}


def _turned(values, index):
    """The first two keys of each query in the other order, where their scores are equal."""
    if values.shape[-1] > 1:
        alike = values[..., 0] == values[..., 1]
        first, second = np.where(alike, (index[..., 1], index[..., 0]), (index[..., 0], index[..., 1]))
        index = index.copy()
        index[..., 0], index[..., 1] = first, second
    return values, index


@pytest.mark.parametrize(
    ("name", "wrong", "manners"),
    [
        ("the next key", lambda x, i: (x, np.where(i > 0, i - 1, i)), {"largest of another key"}),
        ("equal ones turned", _turned, {"largest in another order of equal ones"}),
        ("one less", lambda x, i: (x[..., 1:], i[..., 1:]), {"largest without a larger one"}),
    ],
)
def test_scores_that_are_not_the_largest_are_found(name, wrong, manners, monkeypatch):
    real = fastattn.reduce_scores

    def reduce_scores(*arrays, reduction, k=None, **options):
        if k is None:
            return real(*arrays, reduction=reduction, **options)
        more = k + (name == "one less")
        return wrong(*real(*arrays, reduction=reduction, k=more, **options))

    monkeypatch.setattr(fastattn, "reduce_scores", reduce_scores)
    found = _manners("reductions")
    assert found & manners
    assert all(manner.startswith("largest") for manner in found)


@pytest.mark.parametrize(
    ("name", "manner"), [("key_weights", "wrong key weights"), ("max_similarity", "wrong similarity")]
)
def test_sums_that_are_wrong_by_a_thousandth_are_found(name, manner, monkeypatch):
    real = getattr(fastattn, name)
    monkeypatch.setattr(
        fastattn, name, lambda *arrays, **options: real(*arrays, **options) * np.float32(1.001)
    )
    found = _manners("reductions", 60)
    assert manner in found
    assert found <= {manner, f"{manner[6:]} beyond 1", f"dtype {manner[6:]}"}


def test_a_bias_object_that_is_wrong_by_one_entry_is_found(monkeypatch):
    real = Relative._entries
    monkeypatch.setattr(Relative, "_entries", lambda self, *sizes: np.roll(real(self, *sizes), 1))
    assert "wrong out" in _manners("biases", 60)


def _rolled(gradient):
    return tuple(map(_rolled, gradient)) if isinstance(gradient, tuple) else np.roll(gradient, 1, axis=-1)


def test_a_gradient_of_a_bias_object_that_is_wrong_is_found(monkeypatch):
    real = fastattn.attention_backward

    def wrong(*arrays, **options):
        found = real(*arrays, **options)
        return found._replace(bias=_rolled(found.bias))

    monkeypatch.setattr(fastattn, "attention_backward", wrong)
    assert _manners("biases", 60) == {"wrong gradient of the object"}


def test_gradients_of_packed_documents_that_are_wrong_are_found(monkeypatch):
    real = fastattn.varlen_attention_backward

    def wrong(*arrays, **options):
        found = real(*arrays, **options)
        return found._replace(key=found.key * np.float32(1.01))

    monkeypatch.setattr(fastattn, "varlen_attention_backward", wrong)
    assert _manners("varlen") == {"wrong varlen gradient"}


def test_lines_that_a_worker_writes_at_once_are_all_read(monkeypatch):
    """And parts of lines."""
    run, given = Run(0, 500, processes=1, engines=["reference"], timeout=60), []
    monkeypatch.setattr(run, "_next", lambda *_: given.append(run.progress.cases))
    ours, theirs = os.pipe()
    with open(ours, "rb") as stdout:
        worker = SimpleNamespace(process=SimpleNamespace(stdout=stdout), begun=b"", counts=Counter())
        for said in (b'{"failed": 1}\n{"failed": 2}\n{"did": 250}\n{"fai', b'led": 3}\n{"did": 20}\n'):
            os.write(theirs, said)
            run._read(worker, None, None, None)
        os.close(theirs)
    assert given == [250, 270]
    assert [it["failed"] for it in run.progress.failures] == [1, 2, 3]


@pytest.mark.slow
def test_the_long_mode():
    pytest.importorskip("rich")
    printed = python(f"import sys, tests.fuzz.__main__ as f; sys.exit(f.main({LONG!r}.split()))")
    assert "40 cases (seeds 7 to 46 of reference)" in printed
    assert "0 failed" in printed
