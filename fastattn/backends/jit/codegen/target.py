"""The host's registers, and the register tiles that fill them.

Compiled code depends on all of this, so the disk cache compares it (see ``numba/cache.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import llvmlite.binding as llvm

from fastattn._machine import host
from fastattn._machine.constants import EXTENDED, VECTORS


class Target(NamedTuple):
    """The register blocking of an instruction set, and whether it has fused multiply-adds.

    The C kernels read every field of the blocking. Numba reads `vector_bytes`, `tile_rows`, `tile_vectors`
    and `block_vectors`.
    """

    vector_bytes: int
    tile_rows: int  #: columns of the values in a register tile of `accumulate`
    tile_vectors: int  #: vectors of lanes in it
    wide_rows: int  #: columns of the values in a register tile of `accumulate` with one vector
    score_rows: int  #: keys in a register tile of `score`
    score_vectors: int
    score_chain: int  #: columns that one partial sum of a score runs over
    block_vectors: int  #: vectors of lanes in a query block, at most
    row_sums: int  #: vectors of sums in a register tile of `accumulate_rows`
    has_fma: bool


def usable_isas() -> list[str]:
    """Names of the instruction sets that LLVM may use on this host, best first."""
    architecture = llvm.get_process_triple().partition("-")[0]
    found = llvm.get_host_cpu_features()
    if architecture in ("aarch64", "arm64"):
        return ["neon", "portable"]
    x86 = {isa: own["features"] for isa, own in VECTORS.items() if isa != "neon"}
    return [isa for isa, features in x86.items() if all(found.get(name) for name in features)]


def choose() -> str:
    """The instruction set of this process: FASTATTN_ISA, or the best."""
    usable = usable_isas()
    forced = host.forced_isa()
    if forced in EXTENDED:
        forced = EXTENDED[forced]["vectors"]
    if forced is not None and forced not in usable:
        raise ValueError(f"instruction set {forced!r} is not available here; available: {usable}")
    return forced or usable[0]


ISA = choose()
TARGET = Target(**VECTORS[ISA]["blocking"], has_fma=ISA != "portable")
