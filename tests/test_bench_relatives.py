"""``python -m benchmarks.relatives``: what it measures and says, not how long anything took."""

from __future__ import annotations

import numpy as np
import pytest

import fastattn

pytest.importorskip("rich")

from benchmarks import relatives
from benchmarks.relatives import Pair, Row, apart, compare, lines_of_code, measure


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(relatives, "SETTLE_SECONDS", 0.0)


def one() -> Pair:
    return Pair(lambda: np.ones(3), lambda: np.array([1, 1, 1.5]))


def one_by_a_better_formula() -> Pair:
    return one()._replace(exact=lambda: np.array([1, 1, 1.5]))


def of_a_missing_library() -> Pair:
    raise ImportError("No module named 'missing'")


def test_a_pair():
    found = measure(one, 0)
    assert found.difference == 0.5
    assert found.rounds == relatives.MIN_ROUNDS
    assert found.theirs > 0 and found.ours > 0 and found.ratio > 0
    assert measure(one_by_a_better_formula, 0).difference == 0
    assert compare(one) == 0.5
    for work in (compare, lambda make: measure(make, 0)):
        assert work(of_a_missing_library) == "No module named 'missing'"


@pytest.mark.slow
def test_the_exact_density_is_that_of_the_definition():
    """In three dimensions scikit-learn's is exact."""
    pytest.importorskip("sklearn")
    pair = relatives.density_3()
    np.testing.assert_allclose(pair.exact(), pair.theirs(), rtol=1e-9)


@pytest.mark.slow
def test_the_report(monkeypatch, capsys):
    rows = [
        Row(one, "a sum", "a loop", "keras"),
        Row(one_by_a_better_formula, "the same", "a formula"),
        Row(of_a_missing_library, "nothing", "all"),
    ]
    monkeypatch.setattr(relatives, "ROWS", rows)
    monkeypatch.setattr(relatives, "apart", lambda work, make: measure(make, 0))
    assert relatives.main([]) == 1
    said = capsys.readouterr().out
    assert "one is wrong" in said and "one_by_a_better_formula is wrong" not in said
    assert "of_a_missing_library is left out: No module named 'missing'" in said
    assert relatives.main(["--only", "one_by_a_better_formula"]) == 0
    assert "a loop" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        relatives.main(["--only", "two"])
    assert "--only: no two; there are one, one_by_a_better_formula" in capsys.readouterr().err


def test_lines_of_code_are_without_text(tmp_path, monkeypatch):
    (tmp_path / "integrations").mkdir()
    module = '"""Text."""\n\n# why\ndef f():\n    """More\n    text."""\n    return 1\n'
    (tmp_path / "integrations" / "own.py").write_text(module)
    monkeypatch.setattr(fastattn, "__file__", str(tmp_path / "__init__.py"))
    assert lines_of_code("own") == 2


@pytest.mark.slow
@pytest.mark.parametrize("row", relatives.ROWS, ids=lambda row: row.make.__name__)
def test_each_row_is_right(row):
    difference = apart(compare, row.make)
    if isinstance(difference, str):
        pytest.skip(difference)
    assert difference < relatives.TOLERANCE
