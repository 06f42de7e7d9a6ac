"""The cases under pytest-benchmark, grouped by case: ``pytest benchmarks``.

All libraries share one process here, where their thread pools meet (one spins for a while after a call, and
takes a core from the next) and where everything stays in the caches. ``python -m fastattn bench`` is the
careful comparison of libraries; this one is for a look at single cases, and for holding a change of fastattn
against the state before it with what pytest-benchmark's users know.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from fastattn._machine import host
from fastattn.bench.case import Case, Inputs, make_inputs
from fastattn.bench.cases import CASES
from fastattn.bench.peers import PEERS, Call, Unable, load_peer
from fastattn.bench.tasks import task_of

#: Those that live in one process without harm to each other.
LIBRARIES = ("fastattn", "fastattn-reference", "numpy", "torch")

#: Cases with more work or larger arrays are marked slow: a call of NumPy takes a second, or the arrays a GB.
SLOW_FLOPS, SLOW_BYTES = 3e9, 60e6


def _parameter(case: Case) -> Any:
    slow = case.flops > SLOW_FLOPS or case.nbytes > SLOW_BYTES
    return pytest.param(case.name, marks=pytest.mark.slow if slow else ())


#: Not those with a thread count of their own, as NumPy's is fixed when it is loaded, nor those in a model, as
#: only calls of attention are timed here.
NAMES = [_parameter(case) for case in CASES.values() if case.threads is None and case.model_dim is None]


@lru_cache(maxsize=1)  # the libraries of a case come one after the other
def _inputs_and_answer(name: str) -> tuple[Inputs, np.ndarray]:
    inputs = make_inputs(CASES[name])
    return inputs, task_of(CASES[name]).answer(CASES[name], inputs)


def _first_way(library: str, case: Case, inputs: Inputs) -> tuple[str, Call]:
    """The first way in which `library` can do `case`; the test is skipped where there is none."""
    reasons = []
    try:
        for way, make in task_of(case).ways(load_peer(library, host.available_cores())).items():
            try:
                return way, make(case, inputs)
            except Exception as problem:  # whatever a library raises is its reason
                reasons.append(f"{way}: {problem}")
    except Unable as problem:  # a package is not installed
        reasons.append(str(problem))
    pytest.skip("; ".join(reasons))


def _check(case: Case, inputs: Inputs, result: np.ndarray, answer: np.ndarray) -> None:
    task = task_of(case)
    error, _ = task.errors(case, result, answer)
    allowed = task.tolerance(case, inputs, answer)
    assert error <= allowed, f"{case.name}: largest error {error:.1e}, allowed {allowed:.1e}"


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("case", NAMES)
def test_attention(benchmark: Any, monkeypatch: pytest.MonkeyPatch, case: str, library: str) -> None:
    for name, value in PEERS[library].environment.items():
        monkeypatch.setenv(name, value)
    named = CASES[case]
    inputs, answer = _inputs_and_answer(case)
    way, call = _first_way(library, named, inputs)
    _check(named, inputs, call.result(), answer)

    benchmark.group = case
    benchmark.extra_info |= {
        "way": way,
        "shape": named.shape,
        "options": named.options,
        "flops": named.flops,
        "nbytes": named.nbytes,
    }
    benchmark(call.run)
    if benchmark.stats is not None:  # it is with --benchmark-disable
        benchmark.extra_info["gflops"] = named.flops / benchmark.stats.stats.median / 1e9
