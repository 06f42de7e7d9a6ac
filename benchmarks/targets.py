"""What this project wants of the benchmark's cases: ``python -m benchmarks.targets RUN.json``.

It reads what ``python -m fastattn bench --json RUN.json`` wrote. Users of the benchmark see figures alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

#: Of one token over a cache that is not float32, beside its time over that in float32. Memory is the limit.
_DECODE = {"best": 1.5, "peak": 0.85}

#: Our largest error beside that of torch, of each case of gradients. torch's are by its fastest way.
_GRADIENTS = {"error": 0.7}

#: Of each case: the time of the fastest peer and of torch over ours at least (``best``, ``torch``), our
#: share of the limit and that of ``fastattn-avx2`` at least (``peak``, ``peak_avx2``), our time over that of
#: the case's baseline at most (``slowdown``), our largest error over torch's at most (``error``).
TARGETS: dict[str, dict[str, float]] = {
    "square-512-64": {"best": 1.05, "peak": 0.88, "peak_avx2": 0.82},
    "square-2048-64": {"best": 1.05, "peak": 0.9, "peak_avx2": 0.82},
    "square-2048-128": {"best": 1.08, "peak": 0.93},
    "causal-512-64": {"best": 2.0, "peak": 0.8},
    "causal-2048-64": {"best": 1.5, "peak": 0.87},
    "causal-2048-128": {"best": 1.45, "peak": 0.9},
    "bert-batch": {"best": 1.3},
    "vit-197": {"best": 1.05},
    "tiny-batch": {"best": 1.0},
    "tiny-4": {"torch": 1.4},
    "tiny-16": {"torch": 1.4},
    "dim-40": {"best": 1.05},
    "dim-40-cross": {"best": 1.05},
    "dim-80": {"best": 1.05},
    "dim-96": {"best": 1.05},
    "dim-256": {"best": 1.05},
    "mask-random": {"best": 1.1, "torch": 1.4, "slowdown": 1.12},
    "mask-padding": {"best": 1.1, "torch": 1.4, "slowdown": 1.12},
    "bias-shared": {"best": 1.1, "torch": 1.4, "slowdown": 1.12},
    "bias-per-head": {"best": 1.1, "torch": 1.4, "slowdown": 1.12},
    "window-8192": {"best": 20.0},
    "documents-8192": {"best": 10.0},
    "float64-1024": {"best": 1.5, "peak": 0.85},
    "float64-causal-1024": {"best": 2.0, "peak": 0.85},
    "rank3": {"best": 1.05, "torch": 1.5},
    "wide-value": {"best": 1.05, "torch": 1.5},
    "bshd": {"best": 1.05},
    "bshd-causal": {"best": 1.5},
    "gqa-causal": {"best": 1.5},
    **dict.fromkeys(("decode-8k-float16", "decode-8k-bfloat16"), _DECODE | {"slowdown": 1 / 1.85}),
    "decode-8k-int8": _DECODE | {"slowdown": 1 / 3.2},
    **{
        f"pages-{page_size}-{storage}": {"slowdown": 1.03}
        for page_size in (64, 256)
        for storage in ("float32", "float16", "bfloat16", "int8")
    },
    "backward-2048-64": _GRADIENTS | {"torch": 1.15},
    "backward-causal-2048-64": _GRADIENTS | {"torch": 1.35},
    "backward-2048-128": _GRADIENTS | {"torch": 1.15},
    "backward-bfloat16": _GRADIENTS | {"torch": 1.2},
    "backward-16": _GRADIENTS | {"torch": 1.2},
    "backward-bert-batch": _GRADIENTS | {"torch": 1.3},
    "backward-8192-1-head": _GRADIENTS | {"torch": 1.8},
    "backward-8192-2-heads": _GRADIENTS | {"torch": 1.8},
    "backward-window-8192": _GRADIENTS | {"torch": 20.0},
    "backward-documents-4096": _GRADIENTS,
    "backward-bias-1024": _GRADIENTS | {"torch": 3.0},
    "backward-wide-value": _GRADIENTS | {"torch": 3.0},
    "backward-gqa-1024": _GRADIENTS,
    "backward-softcap-1024": _GRADIENTS,
    "flex-backward-softcap-1024": _GRADIENTS | {"slowdown": 1.5},
    "flex-backward-bias-1024": _GRADIENTS | {"slowdown": 1.5},
}
#: Those that are not to be exceeded.
_AT_MOST = ("slowdown", "error")


def figures(run: Mapping[str, Any]) -> dict[str, float]:
    """What was measured of a case, by the names of `TARGETS`."""
    summary, errors = run["summary"], run["errors_over_torch"]
    best, ratios, shares = summary["best"], summary["ratios"], summary["shares"]
    found = {
        "best": ratios.get(best),
        "torch": ratios.get("torch"),
        "peak": shares.get("fastattn"),
        "peak_avx2": shares.get("fastattn-avx2"),
        "slowdown": summary["slowdown"],
    }
    medians = {name: estimate["median"] for name, estimate in found.items() if estimate is not None}
    return medians if errors is None else medians | {"error": errors[0]}


def missed(document: Mapping[str, Any]) -> Iterator[str]:
    """Each target of a case in `document` that was not reached, or whose figure was not measured."""
    for name in filter(TARGETS.__contains__, document["cases"]):
        found = figures(document["cases"][name])
        for what, bound in TARGETS[name].items():
            value = found.get(what)
            if value is None:
                yield f"{name}: {what} was not measured"
            elif value > bound if what in _AT_MOST else value < bound:
                yield f"{name}: {what} is {value:.3g}, not {bound:g}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 1 when a target was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.targets", description="What was missed?")
    parser.add_argument("results", type=Path, metavar="RUN.json")
    lines = list(missed(json.loads(parser.parse_args(argv).results.read_text("utf-8"))))
    print("\n".join(lines) if lines else "Every target of these cases was reached.")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
