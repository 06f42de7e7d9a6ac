"""A made-up document as `report.as_json` writes it, for tests of its readers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from fastattn.bench.case import Case
from fastattn.bench.cases import MEMORY_WARM_UP, possible_cases

#: The made-up machine: FLOP/s, bytes/s.
PEAK, BANDWIDTH = 300e9, 30e9

#: How many times as long as the machine's limit each library takes at least, and the cost of a call.
COSTS = {
    "fastattn": (1.3, 3e-6),
    "fastattn-avx2": (2.1, 3e-6),
    "numpy": (4.5, 12e-6),
    "torch": (1.9, 7e-6),
    "onnxruntime": (1.6, 6e-6),
    "openvino": (1.7, 18e-6),
    "jax": (3.5, 9e-6),
}

#: Every case that runs on two cores.
POSSIBLE = tuple(possible_cases(2))


def limit_seconds(case: Case, threads: int) -> float:
    """The lower bound of the time on the made-up machine."""
    slower = 2 / threads * (2 if case.dtype == "float64" else 1)
    return max(case.flops * slower / PEAK, case.nbytes / BANDWIDTH if case.cold else 0.0)


def make_document(
    cases: Iterable[Case] = POSSIBLE,
    libraries: Iterable[str] = tuple(COSTS),
    *,
    rounds: int = 5,
    memory: bool = True,
) -> dict[str, Any]:
    """Results of `libraries` on `cases`, reproducible, with all fields of a real run."""
    names = tuple(libraries)
    rng = np.random.default_rng(0)
    document: dict[str, Any] = {
        "date": "2026-11-21T14:43:43+00:00",
        "machine": {
            "name": "Made up",
            "cpu": "A made-up CPU",
            "cores": 2,
            "architecture": "x86_64",
            "system": "Linux",
        },
        "versions": {"python": "3.11.7"} | {name: "1.0.0+cpu" for name in names},
        "threads": 2,
        "limits": {
            "fma": {"float32": {"1": PEAK / 2, "2": PEAK}, "float64": {"1": PEAK / 4, "2": PEAK / 2}},
            "read_bandwidth": {"1": BANDWIDTH * 0.9, "2": BANDWIDTH},
        },
        "cases": {case.name: _run(case, names, rounds, rng) for case in cases},
    }
    if memory:
        lengths = (512, 2048, 8192, 32768)
        grown = [replace(MEMORY_WARM_UP, name=f"memory-{n}", len_q=n, len_k=n) for n in lengths]
        document["memory_cases"] = {case.name: _case_json(case) for case in grown}
        document["memory"] = {case.name: {name: _needs(case, name) for name in names} for case in grown}
    return document


def _run(case: Case, names: tuple[str, ...], rounds: int, rng: np.random.Generator) -> dict[str, Any]:
    least = limit_seconds(case, case.threads or 2)
    medians = {
        name: (COSTS[name][1] + least * COSTS[name][0] * rng.uniform(1, 1.5)) * rng.normal(1, 0.02, rounds)
        for name in names
    }
    ours = medians.get("fastattn")
    ratios = {} if ours is None else {n: _estimate(it / ours) for n, it in medians.items() if n != "fastattn"}
    peers = [name for name in ratios if not name.startswith("fastattn")]
    return {
        "case": _case_json(case),
        "rounds": rounds,
        "oracle": "float64",
        "tolerance": 1e-5,
        "libraries": {
            name: {
                "reason": None,
                "wrong": False,
                "version": "1.0.0",
                "chosen": "way",
                "error": 1e-7,
                "rms_error": 1e-8,
                "ways": {"way": {"error": 1e-7, "rms_error": 1e-8, "seconds": float(it.min())}},
                "medians": it.tolist(),
                "mins": it.tolist(),
            }
            for name, it in medians.items()
        },
        "summary": {
            "seconds": {name: float(np.median(it)) for name, it in medians.items()},
            "ratios": ratios,
            "best": min(peers, key=lambda name: ratios[name]["median"], default=None),
            "limit": None
            if ours is None
            else {
                "kind": "memory" if case.cold else "compute",
                "seconds": least,
                "share": _estimate(least / ours),
            },
        },
    }


def _case_json(case: Case) -> dict[str, Any]:
    derived = {"shape": case.shape, "options": case.options, "flops": case.flops, "nbytes": case.nbytes}
    return asdict(case) | derived


def _estimate(values: np.ndarray) -> dict[str, float]:
    return {
        name: float(function(values))
        for name, function in (("median", np.median), ("low", np.min), ("high", np.max))
    }


def _needs(case: Case, name: str) -> dict[str, Any]:
    """numpy stores the scores, and fails where they are 4 GB; the others have tiles."""
    extra = case.heads * case.len_q * case.len_k * 4 if name == "numpy" else 300_000 * (1 + len(name))
    warm: dict[str, Any] = {"extra": extra, "seconds": 0.1} if extra < 2**32 else {"reason": "MemoryError"}
    return {"first": warm, "warm": warm}
