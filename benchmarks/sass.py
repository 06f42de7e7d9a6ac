"""``python -m benchmarks.sass``: what the CUDA kernels are in machine code, without a GPU.

Numba compiles each kernel to PTX, ptxas to machine code, and nvdisasm shows it; both are found on PATH or in
PyPI's packages. The table has registers, bytes of stack and of shared memory, blocks per multiprocessor, and
what one tile of keys costs a warp:

- full: instructions issued for a tile that no mask touches;
- fma: the share of multiply-adds in them, which bounds the share of the peak;
- spills: loads and stores of the stack among them;
- partial: instructions issued for a tile that masks cut;
- TB/s: keys and values read per second if shared memory is all that limits, at H100's 132 x 1.755 GHz.

The key loop is the largest backward branch around multiply-adds. The first loop around them in it are the
scores, the others the values: how often they run follows from the multiply-adds of a tile. Other loops count
once. Of all paths through a loop, the one with the most multiply-adds, 16-byte loads and stores to shared
memory is taken; of those, the shortest for a full tile, and the longest for a partial one. Left out of this
are innermost loops with branches, which are for nonfinite values. Each access to shared
memory counts once, as threads of a warp read adjacent or equal elements, but 16-byte stores four times.
"""

from __future__ import annotations

import argparse
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
from fastattn.backends.cuda.form import Form, choose_shape

INSTALL = "pip install nvidia-cuda-nvcc nvidia-cuda-nvdisasm"
SHARED = {80: 164, 90: 228, 100: 228}  #: KiB of a multiprocessor
CLOCKS = 132 * 1.755e9

# Specialisations: query rows of a key/value head, and the flags that are set.
EVERYTHING = Form._fields[2:11]
NAMES: dict[str, tuple[int, tuple[str, ...]]] = {
    "plain": (4096, ()),
    "causal, window": (4096, ("has_intervals",)),
    "dense mask": (4096, ("has_dense",)),
    "mask map": (4096, ("has_mask_map",)),
    "bias": (4096, ("has_bias",)),
    "soft-cap": (4096, ("has_softcap", "is_natural")),
    "sinks": (4096, ("has_sinks",)),
    "score_mod": (4096, ("has_score_mod", "is_natural")),
    "mask_mod": (4096, ("has_mask_mod",)),
    "all options": (4096, EVERYTHING),
    "weights": (4096, ()),
    **{f"{rows} rows": (rows, ()) for rows in (1, 2, 4, 8)},
}


def form_of(name: str, dtype: str, value_dim: int) -> Form:
    """The specialisation of this name, for whole spans and tiles."""
    head_rows, flags = NAMES[name]
    shape = choose_shape(dtype, head_rows, value_dim, False)
    is_set = {field: field in flags for field in Form._fields[2:11]}
    result = "weights" if name == "weights" else "parts" if head_rows <= 8 else "out"
    return Form(dtype, shape, **is_set, is_even=True, is_packed=True, result=result)


def tool(name: str) -> str:
    """A program of NVIDIA's."""
    packaged = [str(Path(path) / "nvidia" / "cu13" / "bin") for path in sys.path]
    found = shutil.which(name) or next(filter(None, (shutil.which(name, path=p) for p in packaged)), None)
    if found is None:
        raise SystemExit(f"{name} is not here: {INSTALL}")
    return found


def machine_code(ptx: str, device: int) -> tuple[str, str]:
    """What ptxas says, and the instructions."""
    ptx = re.sub(r"\.version \S+", ".version 8.7", ptx)  # of CUDA 12.8, the first with sm_100
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [tool("ptxas"), "-v", f"-arch=sm_{device}", str(source), "-o", str(made)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        shown = [tool("nvdisasm"), "-c", str(made)]
        return said, subprocess.run(shown, capture_output=True, text=True, check=True).stdout


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
COSTS = {  # of an instruction whose name begins so
    r"[FD]FMA(?!.* RZ,)": Cost(needed=1, fma=1), r"LDG.*\.128": Cost(needed=1), "LDS": Cost(shared=1),
    r"STS.*\.128": Cost(needed=1, shared=4), "STS": Cost(needed=1, shared=1), "(LD|ST)L": Cost(spills=1),
}  # fmt: skip


class Code:
    """The instructions of a kernel, and the costs of paths through its key loop."""

    def __init__(self, sass: str, form: Form, head_dim: int) -> None:
        self.costs: list[Cost] = []
        self.jumps: dict[int, tuple[str, bool]] = {}  # to a label, and whether always
        self.labels: dict[str, int] = {}
        for label, guard, name, rest in re.findall(LINE, sass, re.MULTILINE):
            if label:
                self.labels[label] = len(self.costs)
                continue
            target = re.search(r"(\.L_x_\d+)\)", rest)
            if name.startswith(("BRA", "EXIT")) and name != "BRA.DIV":
                is_always = not guard and not re.match("!?U?P", rest)
                self.jumps[len(self.costs)] = target[1] if target else "", is_always
            kind = next((cost for begin, cost in COSTS.items() if re.match(begin, f"{name} {rest}")), Cost())
            self.costs.append(kind._replace(issued=1))
        shape = form.shape
        scores = shape.rows * shape.keys, head_dim, shape.depth
        values = shape.rows * shape.columns, shape.tile_k, shape.value_keys
        self.loops: dict[int, int] = {}  # around multiply-adds, from the first to the last instruction
        for at, (label, _) in self.jumps.items():
            first = self.labels.get(label, at + 1)
            if first <= at and any(cost.fma for cost in self.costs[first : at + 1]):
                self.loops[first] = max(at, self.loops.get(first, 0))
        self.key_loop = max(self.loops, key=lambda first: self.loops[first] - first)
        inside = [first for first in self.loops if self.key_loop < first < self.loops[self.key_loop]]
        self.work = {first: values for first in inside} | {min(inside, default=0): scores}

    def tile(self, is_full: bool) -> Cost:
        """One pass of the key loop."""
        cost = self._pass(self.key_loop, is_full, 0)
        assert cost is not None
        return cost

    def _pass(self, first: int, is_full: bool, depth: int) -> Cost | None:
        """The best path from `first` back to it; None: there is none."""
        last = self.loops[first]
        best: dict[int, Cost | None] = {}
        for at in range(last, first - 1, -1):
            cost, ends = self.costs[at], [at + 1]
            if at in self.loops and at != first:
                cost, ends = self._loop(at, is_full, depth + 1), [self.loops[at] + 1]
                for jump in range(at, self.loops[at]):
                    ends.append(self.labels.get(self.jumps.get(jump, ("", False))[0], -1))
                ends = [end for end in ends if end > self.loops[at]]
            elif at in self.jumps:
                label, is_always = self.jumps[at]
                target = self.labels.get(label, -1)
                ends = [target] if is_always else [at + 1, target]
            rests = [Cost() if end == first else best.get(end) for end in ends if end == first or end > at]
            found = [cost.plus(rest) for rest in rests if rest is not None and cost is not None]
            best[at] = max(found, key=lambda x: (x.needed, -x.issued if is_full else x.issued), default=None)
        return best[first]

    def _loop(self, first: int, is_full: bool, depth: int) -> Cost | None:
        """All passes of a loop around multiply-adds."""
        once = self._pass(first, is_full, depth)
        has_branches = any(first <= at < self.loops[first] for at in self.jumps)
        if once is None or not once.fma or (has_branches and depth > 1 and not is_full):
            return None
        per_line, lines, piece = self.work[first]
        return Cost().plus(once, (lines if depth == 1 else piece) * per_line / once.fma)


def report(case: tuple[str, str, int, int]) -> str:
    """A line of the table."""
    name, dtype, columns, device = case
    form = form_of(name, dtype, columns)
    set_device(divmod(device, 10))
    said, sass = machine_code(attend_ptx(form), device)
    registers, stack, shared = (
        int(found[1]) if (found := re.search(pattern, said)) else 0
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes stack", r"(\d+) bytes smem")
    )
    warps = form.shape.num_threads // 32
    blocks = min(65536 // (-(-registers // 8) * 256 * warps), SHARED[device] * 1024 // (shared + 1024))
    code = Code(sass, form, columns)
    full, partial = code.tile(True), code.tile(False)
    expected = form.shape.rows * (form.shape.keys * columns + form.shape.columns * form.shape.tile_k)
    sure = "" if form.result == "weights" or full.fma >= expected else " ?"
    nbytes = 2 * form.shape.tile_k * columns * np.dtype(dtype).itemsize
    speed = nbytes / (full.shared * warps) * CLOCKS / 1e12
    return (
        f"{name:15} {dtype:8} {columns:4} {device:4} {registers:5} {stack:6} {shared:7} {blocks:7}"
        f"{full.issued:8.0f} {full.fma / full.issued:5.1%} {full.spills:6.0f} {partial.issued:8.0f}"
        f"{speed:7.2f}{sure}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sass", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NAMES), help="specialisations; default: all")
    parser.add_argument("--device", nargs="*", type=int, default=[80, 90, 100], choices=SHARED)
    parser.add_argument("--dtype", nargs="*", default=["float32", "float64"])
    parser.add_argument("--columns", nargs="*", type=int, default=[64, 128])
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    print(f"{'':15} {'dtype':8} {'D':>4} {'sm':>4} {'regs':>5} {'stack':>6} {'shared':>7} {'blocks':>7}"
          f"{'full':>8} {'fma':>5} {'spills':>6} {'partial':>8}{'TB/s':>7}")  # fmt: skip
    # A process for each: device functions are kept for one device.
    with get_context("spawn").Pool(asked.jobs, maxtasksperchild=1) as pool:
        for line in pool.imap(report, product(asked.names, asked.dtype, asked.columns, asked.device)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
