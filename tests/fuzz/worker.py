"""A process that runs cases: what crashes or hangs here is seen by `tests.fuzz.runner`.

It reads ``first stop`` from its input, runs the cases of these seeds and writes a line of JSON for each that
failed, then one that says so. The seed at work stands in a file that both processes map.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import mmap
import os
import struct
import sys
import traceback
import warnings
from collections import Counter
from typing import Any

from fastattn._machine import constants
from tests.fuzz import checks
from tests.fuzz.records import Record, draw
from tests.fuzz.shrink import shrink

SHRINK_PER_MANNER = 2


def manner_of(record: Record) -> tuple[str, str] | None:
    """How a case fails, and what it says; None where it does not."""
    try:
        checks.check(record)
    except checks.Failure as failure:
        return failure.manner, failure.message + _origin(failure)
    except MemoryError:
        return "MemoryError", "no memory"
    return None


def _origin(failure: BaseException) -> str:
    cause = failure.__cause__
    if cause is None:
        return ""
    frames = traceback.extract_tb(cause.__traceback__)[-3:]
    return " at " + ", ".join(f"{os.path.basename(f.filename)}:{f.lineno} {f.name}" for f in frames)


def prepare() -> None:
    """What every process does first that runs cases."""
    # As in tests/conftest.py: the fused sweep computes all that its kernels can, also where it is not faster.
    constants.FUSED_LEAST_GAIN = 0.0
    warnings.simplefilter("ignore")
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)  # cases leave little behind, and a search for it takes as long as a few


class Reporter:
    """Shrinks the first failures of each manner, and says what became of them."""

    def __init__(self, may_shrink: bool = True) -> None:
        self._seen: Counter[str] = Counter()
        self._may_shrink = may_shrink

    def report(self, record: Record, manner: str, message: str) -> dict[str, Any]:
        self._seen[manner] += 1
        smaller = record
        if self._may_shrink and self._seen[manner] <= SHRINK_PER_MANNER:
            smaller = shrink(record, manner, lambda tried: (manner_of(tried) or (None,))[0])
            message = (manner_of(smaller) or (manner, message))[1]
        return {"failed": record.get("seed"), "manner": manner, "message": message[:600], "record": smaller}


def main(path: str, engine_names: list[str], mode: str, kinds: list[str]) -> None:
    faulthandler.enable()
    prepare()
    fail_mallocs = None
    if mode == "malloc":
        from tests.fuzz.mallocs import Mallocs

        fail_mallocs = Mallocs()
    with open(path, "r+b") as file:
        seat = mmap.mmap(file.fileno(), 8)
    reporter = Reporter(may_shrink=mode != "malloc")
    for line in sys.stdin:
        first, stop = map(int, line.split())
        for seed in range(first, stop):
            seat[:] = struct.pack("q", seed)
            record = draw(seed, engine_names, kinds)
            found = (manner_of if fail_mallocs is None else fail_mallocs.manner_of)(record)
            if found is not None:
                print(json.dumps(reporter.report(record, *found)), flush=True)
        more = {} if fail_mallocs is None else fail_mallocs.counts()
        print(json.dumps({"did": stop - first} | more), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","), sys.argv[3], sys.argv[4].split(","))
