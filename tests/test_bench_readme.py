"""The examples of benchmarks/README.md do what it says."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from fastattn.bench import cases, peers, worker
from fastattn.bench.case import Case, make_inputs
from fastattn.bench.cases import CASES, GROUPS
from fastattn.bench.oracle import checked_rows, expected_output
from fastattn.bench.peers.numpy_formula import NumPyFormula
from tests.process import ROOT

TEXT = (ROOT / "benchmarks" / "README.md").read_text()

SMALL = replace(CASES["tiny-16"], heads=2, kv_heads=2)

#: What the example of a peer can do, and what it refuses.
ABLE = {
    "plain": SMALL,
    "causal": replace(SMALL, causal=True),
    "mask": replace(SMALL, mask="random"),
    "bias": replace(SMALL, bias="per_head"),
    "bias and window": replace(SMALL, bias="shared", window=(3, 1)),
    "lengths": replace(SMALL, key_lengths="ragged"),
    "float64": replace(SMALL, dtype="float64"),
    "bshd": replace(SMALL, layout="bshd"),
}
UNABLE = {"grouped": replace(SMALL, kv_heads=1), "soft-cap": replace(SMALL, softcap=5.0)}


def example(section: str) -> str:
    """The Python block of a section."""
    found = re.search(rf"^## {section}$.*?^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found.group(1)


def test_both_are_told_in_thirty_lines() -> None:
    for section in ("Adding a case", "Adding a peer"):
        assert len(example(section).splitlines()) <= 32


def test_the_example_of_a_case_can_be_measured() -> None:
    row = eval(example("Adding a case"), vars(cases))
    case: Case = cases._case("batch", *row)
    assert case.group in GROUPS
    assert case.flops > 0 < case.nbytes
    inputs = make_inputs(case)
    make = next(iter(NumPyFormula().ways.values()))
    rows = make(case, inputs).result()[:, :, checked_rows(case)]
    np.testing.assert_allclose(rows, expected_output(case, inputs), rtol=0, atol=1e-5)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> worker.LibraryWorker:
    """A worker's commands, with the example added just as its section says."""
    section = TEXT[TEXT.index("## Adding a peer") :]
    module = re.search(r"here `(\w+\.py)`", section)
    line = re.search(r'^`("(\w+)": PeerSpec\(.*?\)),`', section, re.MULTILINE)
    assert module is not None
    assert line is not None
    (tmp_path / module.group(1)).write_text(example("Adding a peer"))
    monkeypatch.setattr(peers, "__path__", [*peers.__path__, str(tmp_path)])
    for name, spec in eval(f"{{{line.group(1)}}}", vars(peers)).items():
        monkeypatch.setitem(peers.PEERS, name, spec)
    monkeypatch.setattr(worker, "SETTLE_SECONDS", 0.0)
    return worker.LibraryWorker(line.group(2), 1)


def prepared(library: worker.LibraryWorker, name: str, folder: Path) -> dict[str, object]:
    path = folder / "answer.npy"
    case = replace((ABLE | UNABLE)[name], name=name)
    np.save(path, expected_output(case, make_inputs(case)))
    return library.prepare(asdict(case), str(path))


@pytest.mark.parametrize("name", ABLE)
def test_the_example_of_a_peer_is_right_and_timed(
    name: str, library: worker.LibraryWorker, tmp_path: Path
) -> None:
    found = prepared(library, name, tmp_path)
    assert found["chosen"] == "einsum", found["ways"]
    assert found["version"] == np.__version__
    assert library.time(name, calls=2, seconds=1e-3)["median"] > 0


@pytest.mark.parametrize("name", UNABLE)
def test_the_example_of_a_peer_says_what_it_cannot(
    name: str, library: worker.LibraryWorker, tmp_path: Path
) -> None:
    found = prepared(library, name, tmp_path)
    assert found["chosen"] is None
    assert found["ways"] == {"einsum": {"reason": "no grouped heads and no soft-cap"}}
