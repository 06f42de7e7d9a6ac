"""The benchmark on a GPU, with everything but the GPU's clock."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from tests.cuda.libraries import SIMULATED

pytest.importorskip("rich")

from numba import cuda
from rich.console import Console

from benchmarks import gpu as shot
from fastattn.bench.gpu import cli, libraries, measure, probes
from fastattn.bench.gpu.cases import GPU_CASES, HOST_CASES

pytestmark = pytest.mark.skipif(not SIMULATED, reason="on a GPU it is run itself")

SMALL = replace(
    GPU_CASES["gpu-4096-64-causal"], batch=1, heads=1, kv_heads=1, len_q=5, len_k=5, head_dim=4, value_dim=4
)


@pytest.fixture
def simulated(monkeypatch):
    clock = iter(range(1, 10**6))
    monkeypatch.setattr(measure, "milliseconds", lambda run, calls=1: [run(), float(next(clock))][1])
    monkeypatch.setattr(probes, "fma_peak", lambda dtype: 1e9)
    monkeypatch.setattr(probes, "read_bandwidth", lambda: 1e9)

    def ways():
        import fastattn
        from tests.fake_gpu import FakeArray

        def get(array):
            return array.hidden

        yield libraries._fastattn(FakeArray, get, "fake arrays")

        def wrong(case, inputs):
            return lambda: FakeArray(np.zeros_like(inputs.query))

        def unable(case, inputs):
            raise NotImplementedError("not here")

        yield libraries.Way("other", "wrong", wrong, get)
        yield libraries.Way("other", "unable", unable, get)

        def right(case, inputs):
            arrays = inputs.query, inputs.key, inputs.value
            return lambda: FakeArray(fastattn.attention(*arrays, causal=case.causal))

        yield libraries.Way("other", "right", right, get)

    monkeypatch.setattr(libraries, "ways", ways)
    monkeypatch.setitem(GPU_CASES, SMALL.name, SMALL)
    monkeypatch.setattr(cli, "HOST_CASES", (SMALL,))
    monkeypatch.setattr(measure, "HOST_CALLS", 3)


def test_measures_what_is_right(simulated, tmp_path, capsys):
    path = tmp_path / "gpu.json"
    assert cli.main(["--cases", SMALL.name, "--rounds", "3", "--json", str(path)]) == 0
    found = json.loads(path.read_text())["cases"][SMALL.name]
    assert found["flops"] == SMALL.flops == 2 * 15 * 8
    ways = {way["label"]: way for way in found["ways"]}
    assert len(ways["fake arrays"]["milliseconds"]) == len(ways["right"]["milliseconds"]) == 3
    assert ways["wrong"]["reason"].startswith("wrong: largest error") and not ways["wrong"]["milliseconds"]
    assert ways["unable"]["reason"] == "NotImplementedError: not here"
    # In turns: a round of all comes before the next.
    rounds = zip(ways["fake arrays"]["milliseconds"], ways["right"]["milliseconds"], strict=True)
    assert all(ours < theirs for ours, theirs in rounds)
    assert "fastattn, fake arrays" in capsys.readouterr().out


def test_fails_where_ours_is_wrong(simulated, monkeypatch):
    monkeypatch.setattr(measure, "TOLERANCE_EPS", 0)
    assert cli.run([SMALL], 1, Console())["cases"][SMALL.name]["ways"][0]["reason"].startswith("wrong")
    assert cli.main(["--cases", SMALL.name, "--rounds", "1"]) == cli.WRONG


def test_host_times(simulated, monkeypatch, capsys):
    """Of our ways alone, of calls that return and of calls that are done; an error does not end the rest."""
    waits = []
    monkeypatch.setattr(cuda, "synchronize", lambda: waits.append(1))
    times = cli.run([], 1, Console())["host"]
    (found,) = times.values()
    assert list(times) == [f"{SMALL.name}, fake arrays"] and min(found["returned"], found["done"]) > 0
    assert len(waits) == 2 + measure.HOST_CALLS
    monkeypatch.setattr(cli, "HOST_CASES", (replace(SMALL, layout="none"),))
    (found,) = cli.run([], 1, Console())["host"].values()
    assert found.startswith("ValueError: layout must be")
    assert "fake arrays: ValueError: layout must be" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", shot.TWELVE)
def test_the_twelve(name, monkeypatch, capsys):
    """At the simulator's sizes; and an error is seen."""
    if name in ("mask", "weights"):  # the others alike
        attention = shot.fastattn.attention

        def wrong(*arrays, backend, **options):
            results = attention(*arrays, backend=backend, **options)
            results[-1][..., -1] += backend == "cuda"
            return results

        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(shot.fastattn, "attention", wrong)
            shot.one(name)
        assert ended.value.code == 1
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        shot.one(name)
    assert ended.value.code == 0
    kinds = re.findall(r"(\w+) \S+ \(at most", capsys.readouterr().out)
    assert kinds == ["out", "lse", "weights"][: 3 if name == "weights" else 2]


def test_every_case_can_be_made():
    for case in (*GPU_CASES.values(), *HOST_CASES):
        assert case.flops > 0 and case.nbytes > 0 and case.group == "gpu"
