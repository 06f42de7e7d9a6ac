"""``python -m benchmarks.gpt2``: attention inside a whole model, GPT-2 small in plain NumPy.

A benchmark of single calls does not see what a model does to them: NumPy's products run on threads of
OpenBLAS, which spin for a while after each and hold the cores that attention wants. Here 1024 tokens go
through the model (12 layers of 12 heads, 768 numbers per token, random weights, float32 throughout) with

- the plain formula for causal attention,
- `fastattn.attention`,
- the same after `fastattn.share_threads_with_blas`,

each in a process of its own, with the same weights. The logits of the last token are compared first. Then
each runs once in every round, in an order that rotates. Times are medians over the rounds, and so are ratios,
each of them taken within its round. Between two runs the cores rest until idle threads no longer spin.

The exit status is 1 where a result is wrong. Needs rich, and half a gigabyte of memory for each process.

References
----------
Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import fastattn
from fastattn._machine import host
from fastattn.bench.oracle import TOLERANCE_EPS
from fastattn.bench.quiet import SETTLE_SECONDS, CoreProbes
from fastattn.demo._layers import LayerNorm, Linear, gelu_tanh

HEADS, HIDDEN, INNER, VOCABULARY = 12, 768, 3072, 50257

#: The standard deviation of the model's weights before it was trained.
SPREAD = 0.02

#: ``(query, key, value) -> output``, each ``(tokens, heads, head_dim)``.
Attend = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


# ---- the model


def fast_attention(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    return fastattn.attention(query, key, value, causal=True, layout="bshd")


def plain_attention(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    query, key, value = (x.swapaxes(0, 1) for x in (query, key, value))
    scores = query @ key.swapaxes(-1, -2)
    scores *= 1 / math.sqrt(query.shape[-1])
    np.copyto(scores, -np.inf, where=_later(len(scores[0])))
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return (scores @ value).swapaxes(0, 1)


@cache
def _later(tokens: int) -> np.ndarray:
    """Which keys come after each query."""
    return np.triu(np.ones((tokens, tokens), bool), 1)


@dataclass(frozen=True)
class Layer:
    attention_norm: LayerNorm
    query_key_value: Linear
    attention_output: Linear
    inner_norm: LayerNorm
    inner: Linear
    output: Linear

    def __call__(self, x: np.ndarray, attend: Attend) -> np.ndarray:
        """The next state of ``x``, ``(tokens, HIDDEN)``."""
        # Query, key and value are views into one product: (tokens, heads, head_dim) each.
        together = self.query_key_value(self.attention_norm(x)).reshape(len(x), 3, HEADS, -1)
        x = x + self.attention_output(attend(*together.swapaxes(0, 1)).reshape(x.shape))
        return x + self.output(gelu_tanh(self.inner(self.inner_norm(x))))


class GPT2:
    """GPT-2 small, or the first of its layers, with random weights: the same ones in every process."""

    def __init__(self, num_layers: int, tokens: int) -> None:
        rng = np.random.default_rng(2019)

        def weight(*shape: int) -> np.ndarray:
            drawn = rng.standard_normal(shape, dtype=np.float32)
            drawn *= SPREAD
            return drawn

        def linear(outputs: int, inputs: int) -> Linear:
            return Linear(weight(outputs, inputs), weight(outputs))

        def norm() -> LayerNorm:
            return LayerNorm(1 + weight(HIDDEN), weight(HIDDEN), 1e-5)

        self._words = weight(VOCABULARY, HIDDEN)
        self._positions = weight(tokens, HIDDEN)
        self._layers = [
            Layer(
                attention_norm=norm(),
                query_key_value=linear(3 * HIDDEN, HIDDEN),
                attention_output=linear(HIDDEN, HIDDEN),
                inner_norm=norm(),
                inner=linear(INNER, HIDDEN),
                output=linear(HIDDEN, INNER),
            )
            for _ in range(num_layers)
        ]
        self._last_norm = norm()
        self._ids = rng.integers(VOCABULARY, size=tokens)

    def logits(self, attend: Attend) -> np.ndarray:
        """Of the token that comes next, ``(VOCABULARY,)``."""
        x = self._words[self._ids] + self._positions
        for layer in self._layers:
            x = layer(x, attend)
        return self._words @ self._last_norm(x[-1:])[0]


# ---- a process of its own for each variant


class Variant(NamedTuple):
    attend: Attend
    shares_threads: bool  #: whether NumPy's products run on fastattn's threads


#: The first is what the others are compared with.
VARIANTS = {
    "plain NumPy": Variant(plain_attention, False),
    "fastattn": Variant(fast_attention, False),
    "fastattn, shared threads": Variant(fast_attention, True),
}


class Run(NamedTuple):
    model_seconds: float
    attention_seconds: float
    logits: np.ndarray


_models: list[GPT2] = []  # in the process of a variant: its one model


def _load(num_layers: int, tokens: int, shares_threads: bool) -> bool:
    """Make the model, once in each process; whether the threads are as they should be."""
    _models.append(GPT2(num_layers, tokens))
    return fastattn.share_threads_with_blas() if shares_threads else True


def _run(attend: Attend) -> Run:
    attention_seconds = 0.0

    def timed(*arrays: np.ndarray) -> np.ndarray:
        nonlocal attention_seconds
        start = time.perf_counter()
        out = attend(*arrays)
        attention_seconds += time.perf_counter() - start
        return out

    start = time.perf_counter()
    logits = _models[0].logits(timed)
    return Run(time.perf_counter() - start, attention_seconds, logits)


# ---- the rounds


def measure(num_layers: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Check every variant against the first, then time those that are right; what `--json` writes."""
    context = multiprocessing.get_context("spawn")  # a forked child of a process with threads has but one
    results: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(ProcessPoolExecutor(1, mp_context=context)) for name in VARIANTS
        }
        expected = None
        for name, variant in VARIANTS.items():
            results[name] = {"reason": None}
            if not processes[name].submit(_load, num_layers, tokens, variant.shares_threads).result():
                results[name]["reason"] = "cannot share threads here; python -m fastattn info says why"
                continue
            logits = processes[name].submit(_run, variant.attend).result().logits
            expected = logits if expected is None else expected
            results[name] |= _check(logits, expected, num_layers)

        ready = [name for name, result in results.items() if result["reason"] is None]
        runs: dict[str, list[Run]] = {name: [] for name in ready}
        probes = CoreProbes()
        for number in range(rounds):
            probes.take()
            turn = number % len(ready)
            for name in ready[turn:] + ready[:turn]:
                time.sleep(SETTLE_SECONDS)
                runs[name].append(processes[name].submit(_run, VARIANTS[name].attend).result())
        probes.take()

    first = runs[next(iter(VARIANTS))]
    for name, them in runs.items():
        results[name] |= _summary(them, first)
    return {
        "machine": {"cpu": host.cpu_name(), "cores": host.available_cores()},
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "fastattn": fastattn.__version__,
        },
        "threads": fastattn.get_num_threads(),
        "layers": num_layers,
        "tokens": tokens,
        "rounds": rounds,
        "warning": probes.warning(),
        "variants": results,
    }


def _check(logits: np.ndarray, expected: np.ndarray, num_layers: int) -> dict[str, Any]:
    """How far `logits` are from the plain formula's: each layer may add what the benchmark allows a call."""
    difference = float(np.abs(logits - expected).max())
    allowed = num_layers * TOLERANCE_EPS * float(np.finfo(np.float32).eps * np.abs(expected).max())
    right = difference <= allowed
    return {
        "reason": None if right else f"wrong: largest difference {difference:.1e}, allowed {allowed:.1e}",
        "wrong": not right,
        "dtype": str(logits.dtype),
        "largest_difference": difference,
    }


def _summary(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """The times of a variant, and how many times as long the plain formula took."""
    return {
        "model_seconds": [run.model_seconds for run in runs],
        "attention_seconds": [run.attention_seconds for run in runs],
        "model": median(run.model_seconds for run in runs),
        "attention": median(run.attention_seconds for run in runs),
        "attention_share": median(run.attention_seconds / run.model_seconds for run in runs),
        "model_ratio": median(
            theirs.model_seconds / run.model_seconds for run, theirs in zip(runs, plain, strict=True)
        ),
        "attention_ratio": median(
            theirs.attention_seconds / run.attention_seconds for run, theirs in zip(runs, plain, strict=True)
        ),
    }


# ---- the command


def _print(report: Mapping[str, Any]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("variant", no_wrap=True)
    for column in ("whole model", "ratio", "attention", "ratio", "share"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, it in report["variants"].items():
        if it["reason"] is None:
            table.add_row(
                name,
                f"{1000 * it['model']:.0f} ms",
                f"{it['model_ratio']:.2f}",
                f"{1000 * it['attention']:.1f} ms",
                f"{it['attention_ratio']:.2f}",
                f"{it['attention_share']:.1%}",
            )
    print(
        f"GPT-2 small in NumPy: {report['layers']} layers, {report['tokens']} tokens, "
        f"{report['threads']} threads.\n"
        f"Medians of {report['rounds']} rounds; a ratio is the time of plain NumPy over the variant's,\n"
        "the share is that of attention in the whole model."
    )
    Console().print(table)
    for name, it in report["variants"].items():
        if it["reason"] is not None:
            print(f"{name}: {it['reason']}")
    if report["warning"] is not None:
        print(report["warning"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpt2", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    options = parser.parse_args(argv)
    for name in ("tokens", "layers", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be 1 or more")
    report = measure(options.layers, options.tokens, options.rounds)
    _print(report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(any(it.get("wrong", False) for it in report["variants"].values()))


if __name__ == "__main__":
    sys.exit(main())
