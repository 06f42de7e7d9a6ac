"""What the machine can do at most, and which of its limits binds a case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

import numpy as np

from fastattn.bench.case import Case

#: What a case cannot be faster than: the multiply-adds of its FLOPs, or the reading of its bytes.
Kind = Literal["compute", "memory"]


#: The tile unit's limit stands beside those of the dtypes, and is nobody's: the shares of all libraries are
#: of the multiply-adds of vectors, which float32 on tiles may exceed.
ON_TILES = "float32 on tiles"


class Limits(TypedDict):
    """One probe of the machine; threads are text, as JSON has them."""

    fma: dict[str, dict[str, float]]  #: FLOP/s of multiply-adds in registers: ``{dtype: {threads: peak}}``
    read_bandwidth: dict[str, float]  #: bytes/s read from memory: ``{threads: bandwidth}``


def bounds(case: Case, num_threads: int, limits: Limits) -> dict[Kind, float]:
    """The seconds that each limit alone would take for `case`; the larger one binds.

    The bytes count only where they have to come from memory, in cases with cold inputs: from the caches,
    where other inputs stay from call to call, they may well be read faster than memory gives them. Empty
    where a limit that counts was not measured: nothing can be said then.
    """
    threads = str(num_threads)
    peak = limits["fma"].get(case.compute_dtype, {}).get(threads)
    bandwidth = limits["read_bandwidth"].get(threads)
    if peak is None or (case.cold and bandwidth is None):
        return {}
    found: dict[Kind, float] = {"compute": case.flops / peak}
    if case.cold and bandwidth is not None:
        found["memory"] = case.nbytes / bandwidth
    return found


def medians(probes: Sequence[Limits]) -> Limits:
    """Each limit's median over those of the probes that measured it."""
    fma: dict[str, dict[str, list[float]]] = {}
    read_bandwidth: dict[str, list[float]] = {}
    for probe in probes:
        for dtype, peaks in probe["fma"].items():
            for threads, peak in peaks.items():
                fma.setdefault(dtype, {}).setdefault(threads, []).append(peak)
        for threads, bandwidth in probe["read_bandwidth"].items():
            read_bandwidth.setdefault(threads, []).append(bandwidth)
    return {
        "fma": {dtype: {n: float(np.median(it)) for n, it in peaks.items()} for dtype, peaks in fma.items()},
        "read_bandwidth": {n: float(np.median(it)) for n, it in read_bandwidth.items()},
    }
