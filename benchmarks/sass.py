"""``python -m benchmarks.sass``: what the CUDA kernels are in machine code, without a GPU.

Numba compiles each kernel to PTX, ptxas to machine code, and nvdisasm shows it; both are found on PATH or in
PyPI's packages. The table has registers, bytes of stack and of shared memory, blocks per multiprocessor, and

- full: instructions that a warp issues for a tile of keys that no mask touches;
- fma: the share of the products' multiply-adds in them, which bounds the share of the peak; of tensor cores,
  from sm_80 on in float32 and 16 bits, that of their products: each of TF32 keeps them busy for about six
  clocks of the processor (H200, `mma.sync`);
- spills: loads and stores of the stack among them;
- partial: instructions for a tile that masks cut;
- TB/s: keys and values per second where accesses to shared memory are the limit, at 132 x 1.755 GHz.

The key loop is the largest backward branch around the most multiply-adds. Of the loops around them in it, the
first has the scores, the others the values; how often each runs follows from the multiply-adds of a tile.
Loops that only read shared memory are those of masks over a thread's rows. Of all paths through a loop, those
with the most multiply-adds, 16-byte loads and stores to shared memory are taken, and of these the shortest
for a full tile, and the longest for a partial one: without innermost loops that branch, which are for
nonfinite values, nor other loops without products of tensor cores, where these multiply. An access to shared
memory counts once, as threads read adjacent or equal elements of float32, but a 16-byte store four times.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.ptx import attend_ptx, set_device
from fastattn.backends.cuda.form import Form, Shape, Stored, choose_shape
from fastattn.backends.cuda.pairs import PARTS

CLOCKS, SHARED = 132 * 1.755e9, {80: 164, 90: 228, 100: 228}  # KiB of a multiprocessor
FLAGS = [name for name in Form._fields if name.startswith("has_") or name == "is_natural"]

# Specialisations: the flags that are set.
NAMES = {
    "plain": "", "causal, window": "has_band", "intervals": "has_intervals", "dense mask": "has_dense",
    "mask map": "has_mask_map", "bias": "has_bias", "soft-cap": "has_softcap is_natural",
    "sinks": "has_sinks", "score_mod": "has_score_mod is_natural", "mask_mod": "has_mask_mod",
    "all options": " ".join(FLAGS), "weights": "", "1 row": "", "2 rows": "", "4 rows": "", "8 rows": "",
}  # fmt: skip


def form_of(name: str, dtype: str, value_dim: int, has_tensor_cores: bool) -> Form:
    """The specialisation of this name, for whole spans and tiles."""
    few = re.match(r"\d", name)
    is_set = {flag: flag in NAMES[name].split() for flag in FLAGS}
    changes_scores = is_set["has_bias"] or is_set["has_score_mod"]
    head_rows = int(name[0]) if few else 4096
    real, pairs = ("float32", dtype) if dtype in PARTS else (dtype, "")
    shape = choose_shape(real, head_rows, value_dim, False, has_tensor_cores, changes_scores, pairs)
    result = "parts" if few else "weights" if name == "weights" else "out"
    read = real if shape.pairs else dtype
    stored = Stored(*[read] * 3, dtype, real, "uint8", real if result == "parts" else dtype)
    return Form(real, shape, stored, **is_set, is_even=True, is_packed=True, result=result)


def call(name: str, *arguments: object) -> tuple[str, str]:
    """What a program of NVIDIA's writes to stdout and stderr."""
    places = [os.environ["PATH"], *(str(Path(path, "nvidia", "cu13", "bin")) for path in sys.path)]
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        raise SystemExit(f"{name} is not here: pip install nvidia-cuda-nvcc nvidia-cuda-nvdisasm")
    done = subprocess.run([found, *map(str, arguments)], capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def machine_code(ptx: str, device: int) -> tuple[str, str]:
    """What ptxas says, and the instructions."""
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(
            re.sub(r"\.version \S+", ".version 8.7", ptx)
        )  # of CUDA 12.8, the first with sm_100
        said = call("ptxas", "-v", f"-arch=sm_{device}", source, "-o", made)[1]
        return said, call("nvdisasm", "-c", made)[0]


class Cost(NamedTuple):
    """Instructions of a warp, by kind."""

    needed: float = 0  #: those that every path of the same work has
    issued: float = 0
    fma: float = 0
    shared: float = 0  #: accesses to shared memory
    spills: float = 0

    def plus(self, other: Cost, times: float = 1) -> Cost:
        return Cost(*(x + times * y for x, y in zip(self, other, strict=True)))


LINE = r"^(?:(\.L_x_\d+):|\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\S+)?\s*(\S+)\s*(.*);)"
COSTS = {  # of an instruction that begins so
    r"[FD]FMA(?!.* RZ,)": Cost(needed=1, fma=1), r"LDG.*\.128": Cost(needed=1), "LDS": Cost(shared=1),
    r"STS.*\.128": Cost(needed=1, shared=4), "STS": Cost(needed=1, shared=1), "(LD|ST)L": Cost(spills=1),
}  # fmt: skip

#: Where tensor cores multiply: a product is 32 multiply-adds of a thread, one of pairs 64.
TENSOR_COSTS = {
    r"HMMA\.1688": Cost(needed=1, fma=32), r"HMMA\.16816": Cost(needed=1, fma=64),
    "LDS": Cost(shared=1), r"STS.*\.128": Cost(shared=4), "STS": Cost(shared=1), "(LD|ST)L": Cost(spills=1),
}  # fmt: skip


def products_of(shape: Shape) -> tuple[int, int]:
    """How many products one of float32 takes, of a score and of a weight."""
    if not shape.is_tensor:
        return 1, 1
    return (1, PARTS[shape.pairs]) if shape.pairs else (3, 3)


class Code:
    """The instructions of a kernel, and the costs of paths through its key loop."""

    def __init__(self, sass: str, form: Form, head_dim: int) -> None:
        self.costs: list[Cost] = []
        self.is_tensor = form.shape.is_tensor
        costs = TENSOR_COSTS if self.is_tensor else COSTS
        self.labels: dict[str, int] = {"": -1}
        self.jumps: dict[int, tuple[str, bool]] = {}  # to a label, and whether always
        for label, guard, name, rest in re.findall(LINE, sass, re.MULTILINE):
            if label:
                self.labels[label] = len(self.costs)
                continue
            if name.startswith(("BRA", "EXIT")) and name != "BRA.DIV":
                target = re.search(r"(\.L_x_\d+)\)", rest)
                self.jumps[len(self.costs)] = target[1] if target else "", not (guard or "P" in rest[:3])
            kind = (cost for begin, cost in costs.items() if re.match(begin, f"{name} {rest}"))
            self.costs.append(next(kind, Cost())._replace(issued=1))
        self.loops: dict[int, int] = {}  # from the first instruction to the last
        for at, (label, _) in self.jumps.items():
            first = self.labels[label]
            if 0 <= first <= at and any(cost.fma or cost.shared for cost in self.costs[first : at + 1]):
                self.loops[first] = max(at, self.loops.get(first, 0))
        self.key_loop = max(self.loops, key=self._size)
        end = self.loops[self.key_loop]
        # What threads of a warp that part do stands behind the loop, and jumps back into it.
        for first in [first for first, last in self.loops.items() if self.key_loop < first <= end < last]:
            del self.loops[first]
        shape, inside = form.shape, range(self.key_loop + 1, end)
        of_scores, of_values = products_of(shape)
        #: Multiply-adds of a line, lines of a tile and of a piece of it.
        self.work = (shape.rows * shape.keys * of_scores, head_dim, shape.depth * shape.pair), (
            shape.rows * shape.columns * of_values, shape.tile_k, shape.value_keys,
        )  # fmt: skip
        with_sums = [at for at in self.loops if at in inside and any(c.fma for c in self._inside(at))]
        self.scores = min(with_sums, default=0)
        self.row_reads = shape.rows * (4 if form.has_dense or form.has_mask_map or form.has_mask_mod else 2)

    def _inside(self, first: int) -> list[Cost]:
        return self.costs[first : self.loops[first] + 1]

    def _size(self, first: int) -> tuple[float, int]:
        """Multiply-adds of a loop, and its length."""
        return sum(cost.fma for cost in self._inside(first)), self.loops[first] - first

    def tile(self, is_full: bool) -> Cost:
        """One pass of the key loop."""
        cost = self._pass(self.key_loop, is_full, 0)
        assert cost is not None
        return cost

    def _pass(self, first: int, is_full: bool, depth: int) -> Cost | None:
        """The best path from `first` back to it; None: there is none."""
        best: dict[int, Cost | None] = {first: Cost()}
        for at in range(self.loops[first], first - 1, -1):
            cost, label = self.costs[at], self.jumps.get(at, ("", False))
            ends = [self.labels[label[0]]] if label[1] else [at + 1, self.labels[label[0]]]
            if at in self.loops and at != first:
                cost, last = self._loop(at, is_full, depth + 1), self.loops[at]
                ends = [self.labels[self.jumps[jump][0]] for jump in range(at, last) if jump in self.jumps]
                ends = [last + 1, *(end for end in ends if end > last)]
            rests = (best.get(end) for end in ends if end > at or end == first)
            found = [cost.plus(rest) for rest in rests if rest is not None and cost is not None]
            best[at] = max(found, key=lambda x: (x.needed, -x.issued if is_full else x.issued), default=None)
        return best[first]

    def _loop(self, first: int, is_full: bool, depth: int) -> Cost | None:
        """All passes of a loop."""
        once = self._pass(first, is_full, depth)
        if self.is_tensor and once and not once.fma and once.shared > self.row_reads:
            return None
        if once is None or not once.fma:
            return once and Cost().plus(once, self.row_reads / max(once.shared, 1))
        if depth > 1 and not is_full and any(first <= at < self.loops[first] for at in self.jumps):
            return None
        per_line, lines, piece = self.work[first >= self.scores and first > self.loops[self.scores]]
        return Cost().plus(once, (lines if depth == 1 else piece) * per_line / once.fma)


def report(case: tuple[str, str, int, int]) -> str:
    """A line of the table."""
    name, dtype, columns, device = case
    set_device(divmod(device, 10))
    form = form_of(name, dtype, columns, device >= 80)
    said, sass = machine_code(attend_ptx(form), device)
    registers, stack, shared = (
        int(found[1]) if (found := re.search(pattern, said)) else 0
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes stack", r"(\d+) bytes smem")
    )
    code, shape, warps = Code(sass, form, columns), form.shape, form.shape.num_threads // 32
    blocks = min(65536 // (-(-registers // 8) * 256 * warps), SHARED[device] * 1024 // (shared + 1024))
    full, partial = code.tile(True), code.tile(False)
    of_scores, of_values = products_of(shape)
    products = shape.rows * (
        shape.keys * columns * of_scores + (name != "weights") * shape.columns * shape.tile_k * of_values
    )
    counted = products / (32 * shape.pair) if shape.is_tensor else products
    nbytes = 2 * shape.tile_k * columns * (2 if dtype in PARTS else np.dtype(dtype).itemsize)
    speed = nbytes / (full.shared * warps) * CLOCKS / 1e12
    return (
        f"{name:15} {dtype:8} {columns:4} {device:4} {registers:5} {stack:6} {shared:7} {blocks:7} "
        f"{full.issued:7.0f} {counted / full.issued:5.1%} {full.spills:6.0f} {partial.issued:8.0f} "
        f"{speed:6.2f}{' ?' * (full.fma < products - 1)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sass", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NAMES), help="specialisations; default: all")
    parser.add_argument("--device", nargs="*", type=int, default=[80, 90, 100], choices=SHARED)
    parser.add_argument("--dtype", nargs="*", default=["float32", "float64"])
    parser.add_argument("--columns", nargs="*", type=int, default=[64, 128])
    asked = parser.parse_args()
    print(f"{'':15} {'dtype':8} {'D':>4} {'sm':>4} {'regs':>5} {'stack':>6} {'shared':>7} {'blocks':>7} "
          f"{'full':>7} {'fma':>5} {'spills':>6} {'partial':>8} {'TB/s':>6}")  # fmt: skip
    # A process for each: device functions are kept for one device.
    with get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        for line in pool.imap(report, product(asked.names, asked.dtype, asked.columns, asked.device)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
