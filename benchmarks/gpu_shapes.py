"""``python -m benchmarks.gpu_shapes``: shapes of the tiles of tensor cores, timed in turns on a GPU.

Each is compiled and checked in a process of its own, several side by side, as compiling takes the time; then
all are timed in this one, beside PyTorch's kernel, efficient for float32 and flash for 16 bits, and tiles
without tensor cores. The last two columns are errors against float64: of values around 0, and around 1, whose
sums grow. Needs PyTorch.
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
from fastattn.backends.cuda.form import PAIR_SHAPES, SHAPES, TENSOR_SHAPES, Shape
from fastattn.bench.gpu.probes import milliseconds
from fastattn.bench.outputs import new_console, new_table

#: By dtype and columns of the values; what of `TENSOR_SHAPES`, or of `PAIR_SHAPES`, is changed.
CANDIDATES: dict[tuple[str, int], dict[str, dict[str, Any]]] = {
    ("float32", 64): {
        "now": {},
        "4 rows": {"rows": 4, "group": 2, "column_vector": 4},
        "8 keys of values": {"value_keys": 8},
        "groups of 2": {"group": 2, "column_vector": 4},
        "256 threads": {"threads_q": 64},
    },
    ("float32", 128): {
        "now": {},
        "16 keys of values": {"value_keys": 16},
        "groups of 2": {"group": 2, "column_vector": 4},
        "tiles of 32 keys": {"keys": 8},
        "tiles of 32 keys, 16 of values": {"keys": 8, "value_keys": 16},
    },
    ("bfloat16", 64): {
        "now": {},
        "4 rows": {"rows": 4, "group": 2, "value_keys": 16},
        "32 keys of values": {"value_keys": 32},
        "256 threads": {"threads_q": 64, "value_keys": 32},
    },
    ("bfloat16", 128): {"now": {}, "32 keys of values": {"value_keys": 32}, "tiles of 32 keys": {"keys": 8}},
    ("float16", 64): {"now": {}, "32 keys of values": {"value_keys": 32}},
    ("float16", 128): {"now": {}, "32 keys of values": {"value_keys": 32}, "tiles of 32 keys": {"keys": 8}},
}
WITHOUT = "multiply-adds"

#: Batch, heads, queries and keys.
SIZES = 4, 16, 4096
ROUNDS, BURST_MS = 7, 20.0

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


#: As they are before `use`.
BASES = {(dtype, n): (TENSOR_SHAPES if dtype == "float32" else PAIR_SHAPES)[n] for dtype, n in CANDIDATES}


def shapes(dtype: str, columns: int) -> dict[str, Shape]:
    base = BASES[dtype, columns]
    found = {name: base._replace(**new) for name, new in CANDIDATES[dtype, columns].items()}
    return found | ({WITHOUT: SHAPES[dtype, columns]} if dtype == "float32" else {})


def use(dtype: str, columns: int, shape: Shape) -> None:
    """From now on, in this process."""
    (form.TENSOR_SHAPES if dtype == "float32" else form.PAIR_SHAPES)[columns] = shape
    engine._plans.clear()


def tensors(dtype: str, batch: int, heads: int, length: int, columns: int, mean: float = 0) -> Tensors:
    torch.manual_seed(0)
    query, key, value = (torch.randn(batch, heads, length, columns, device="cuda") for _ in range(3))
    kind = getattr(torch, dtype)
    return query.to(kind), key.to(kind), (value + mean).to(kind)


def error(arrays: Tensors) -> float:
    """The largest, of the first head, not rounded to 16 bits."""
    expected = torch.nn.functional.scaled_dot_product_attention(*(x[:1, :1].double() for x in arrays))
    out = torch.empty(arrays[2].shape, device="cuda")
    fastattn.attention(*arrays, out=out)
    return float((out[:1, :1] - expected).abs().max())


def compile_one(dtype: str, columns: int, name: str) -> None:
    """To the disk cache."""
    use(dtype, columns, shapes(dtype, columns)[name])
    print(f"{error(tensors(dtype, 1, 1, 300, columns)):.2g}")


def _of_pytorch(arrays: Tensors) -> torch.Tensor:
    is_wide = arrays[0].dtype == torch.float32
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION if is_wide else SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(*arrays)


def measure(dtype: str, columns: int, named: dict[str, Shape]) -> dict[str, dict[str, Any]]:
    """Milliseconds of a call in each round, and errors."""
    arrays, around_one = (tensors(dtype, *SIZES, columns, mean) for mean in (0, 1))
    found: dict[str, dict[str, Any]] = {name: {"milliseconds": []} for name in ["PyTorch", *named]}
    calls: dict[str, int] = {}
    for number in range(-1, ROUNDS):
        for name, one in found.items():
            run: Callable[[], Any] = lambda: _of_pytorch(arrays)  # noqa: E731
            if name in named:
                use(dtype, columns, named[name])
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
    parser.add_argument("--compile", nargs=3, metavar=("DTYPE", "COLUMNS", "NAME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        dtype, columns, name = options.compile
        compile_one(dtype, int(columns), name)
        return 0
    tasks = [(*case, name) for case in CANDIDATES for name in shapes(*case)]

    def run(task: tuple[str, int, str]) -> str:
        command = [sys.executable, "-m", "benchmarks.gpu_shapes", "--compile", *map(str, task)]
        done = subprocess.run(command, capture_output=True, text=True)
        return "" if done.returncode == 0 else (done.stderr.splitlines() or ["?"])[-1]

    with ThreadPool(options.jobs) as pool:
        failed = {task: why for task, why in zip(tasks, pool.map(run, tasks), strict=True) if why}
    console, result = new_console(120), {}
    for dtype, columns in CANDIDATES:
        every = shapes(dtype, columns).items()
        named = {name: shape for name, shape in every if (dtype, columns, name) not in failed}
        found = result[f"{dtype}, {columns}"] = measure(dtype, columns, named)
        table = new_table(("shape", "ms", "TFLOP/s", "errors", "around 1"), left=("shape",))
        batch, heads, length = SIZES
        table.title = f"{dtype}, {batch} x {heads} heads, {length} x {length}, {columns} columns"
        flops = 4 * batch * heads * length**2 * columns
        for name, one in found.items():
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
