"""``python -m benchmarks.gpu_shapes``: shapes of the tiles of tensor cores, timed in turns on a GPU.

Each is compiled and checked in a process of its own, several side by side, as compiling takes the time; then
all are timed in this one, beside PyTorch's efficient kernel and the tiles without tensor cores. The last two
columns are errors against float64: of values around 0, and around 1, whose sums grow. Needs PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn
from fastattn.backends.cuda import engine, form
from fastattn.backends.cuda.form import SHAPES, TENSOR_SHAPES, Shape
from fastattn.bench.gpu.probes import milliseconds
from fastattn.bench.outputs import new_console, new_table

#: By the columns of the values; what of `TENSOR_SHAPES` is changed.
CANDIDATES: dict[int, dict[str, dict[str, Any]]] = {
    64: {
        "now": {},
        "4 rows": {"rows": 4, "column_vector": 4},
        "8 keys of values": {"value_keys": 8},
        "groups of 2": {"column_vector": 4},
        "256 threads": {"threads_q": 64},
    },
    128: {
        "now": {},
        "16 keys of values": {"value_keys": 16},
        "groups of 2": {"column_vector": 4},
        "tiles of 32 keys": {"keys": 8},
        "tiles of 32 keys, 16 of values": {"keys": 8, "value_keys": 16},
    },
}
WITHOUT = "multiply-adds"

#: Batch, heads, queries and keys.
SIZES = 4, 16, 4096
ROUNDS, BURST_MS = 7, 20.0

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def shapes(columns: int) -> dict[str, Shape]:
    found = {name: TENSOR_SHAPES[columns]._replace(**new) for name, new in CANDIDATES[columns].items()}
    return {**found, WITHOUT: SHAPES["float32", columns]}


def use(columns: int, shape: Shape) -> None:
    """From now on, in this process."""
    form.TENSOR_SHAPES[columns] = shape
    engine._plans.clear()


def tensors(batch: int, heads: int, length: int, columns: int, mean: float = 0) -> Tensors:
    torch.manual_seed(0)
    query, key, value = (torch.randn(batch, heads, length, columns, device="cuda") for _ in range(3))
    return query, key, value + mean


def error(arrays: Tensors) -> float:
    """The largest, of the first head."""
    expected = torch.nn.functional.scaled_dot_product_attention(*(x[:1, :1].double() for x in arrays))
    return float((fastattn.attention(*arrays)[:1, :1] - expected).abs().max())


def compile_one(columns: int, name: str) -> None:
    """To the disk cache."""
    use(columns, shapes(columns)[name])
    print(f"{error(tensors(1, 1, 300, columns)):.2g}")


def _efficient(arrays: Tensors) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(*arrays)


def measure(columns: int, named: dict[str, Shape]) -> dict[str, dict[str, Any]]:
    """Milliseconds of a call in each round, and errors."""
    arrays, around_one = (tensors(*SIZES, columns, mean) for mean in (0, 1))
    found: dict[str, dict[str, Any]] = {name: {"milliseconds": []} for name in ["PyTorch, efficient", *named]}
    calls: dict[str, int] = {}
    for number in range(-1, ROUNDS):
        for name, one in found.items():
            run: Callable[[], Any] = lambda: _efficient(arrays)  # noqa: E731
            if name in named:
                use(columns, named[name])
                run = lambda: fastattn.attention(*arrays)  # noqa: E731
            if number < 0:
                run()
                calls[name] = max(1, round(BURST_MS / milliseconds(run)))
                if name in named:
                    one["errors"] = [error(arrays), error(around_one)]
            else:
                run()  # makes a new plan
                one["milliseconds"].append(milliseconds(run, calls[name]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_shapes", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="that compile: %(default)s")
    parser.add_argument("--compile", nargs=2, metavar=("COLUMNS", "NAME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        compile_one(int(options.compile[0]), options.compile[1])
        return 0
    tasks = [(columns, name) for columns in CANDIDATES for name in shapes(columns)]

    def run(task: tuple[int, str]) -> str:
        command = [sys.executable, "-m", "benchmarks.gpu_shapes", "--compile", *map(str, task)]
        done = subprocess.run(command, capture_output=True, text=True)
        return "" if done.returncode == 0 else (done.stderr.splitlines() or ["?"])[-1]

    with ThreadPool(options.jobs) as pool:
        failed = {task: why for task, why in zip(tasks, pool.map(run, tasks), strict=True) if why}
    console, result = new_console(120), {}
    for columns in CANDIDATES:
        named = {name: shape for name, shape in shapes(columns).items() if (columns, name) not in failed}
        result[columns] = measure(columns, named)
        table = new_table(("shape", "ms", "TFLOP/s", "errors", "around 1"), left=("shape",))
        batch, heads, length = SIZES
        table.title = f"{batch} x {heads} heads, {length} x {length}, {columns} columns"
        flops = 4 * batch * heads * length**2 * columns
        for name, one in result[columns].items():
            ms = median(one["milliseconds"])
            errors = (f"{x:.2g}" for x in one.get("errors", ()))
            table.add_row(name, f"{ms:.3f}", f"{flops / ms / 1e9:.1f}", *errors)
        console.print(table)
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1))
    for task, why in failed.items():
        console.print(f"{task}: {why}", markup=False)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
