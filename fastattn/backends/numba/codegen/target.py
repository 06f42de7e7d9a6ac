"""The host's registers, and the shapes of the tiles that fill them.

Everything here is frozen into the compiled code, so it is part of what the disk cache compares (see `cache`).
"""

from __future__ import annotations

from typing import NamedTuple

import llvmlite.binding as llvm

from fastattn import _host


class Target(NamedTuple):
    """Register blocking, as in the compiled kernels; its source is ``cython/kernels/kernels.c``."""

    vector_bytes: int
    tile_rows: int  #: columns of the values in a tile of `accumulate`
    tile_vectors: int  #: vectors of lanes in it
    wide_rows: int  #: columns of the values in a tile of `accumulate` with one vector
    score_rows: int  #: keys in a tile of `score`
    score_vectors: int
    score_stretch: int  #: columns that one partial sum of a score runs over
    block_vectors: int  #: vectors of lanes in a block of query rows, at most
    row_sums: int  #: vectors of sums in a tile of `accumulate_rows`
    has_fma: bool
    few_registers: bool  #: 16 of x86; see `Emitter._together`


AVX512 = Target(64, 8, 3, 16, 4, 3, 16, 3, 16, True, False)
AVX2 = Target(32, 6, 2, 6, 4, 3, 16, 6, 8, True, True)
NEON = Target(16, 8, 3, 8, 4, 3, 8, 12, 16, True, False)
PORTABLE = Target(16, 4, 2, 4, 4, 2, 4, 6, 8, False, False)

BY_ISA = {"avx512": AVX512, "avx2": AVX2, "neon": NEON, "portable": PORTABLE}


def usable_isas() -> list[str]:
    """Names of the instruction sets that LLVM may use on this host, best first."""
    features = llvm.get_host_cpu_features()
    architecture = llvm.get_process_triple().partition("-")[0]
    names = []
    if all(features.get(name) for name in ("avx512f", "avx512dq", "avx512bw", "avx512vl")):
        names.append("avx512")
    if features.get("avx2") and features.get("fma"):
        names.append("avx2")
    if architecture in ("aarch64", "arm64"):
        names.append("neon")
    return [*names, "portable"]


def choose() -> str:
    """The instruction set of this process: FASTATTN_ISA, or the best."""
    usable = usable_isas()
    forced = _host.forced_isa()
    if forced is not None and forced not in usable:
        raise ValueError(f"instruction set {forced!r} is not available here; available: {usable}")
    return forced or usable[0]


ISA = choose()
TARGET = BY_ISA[ISA]
