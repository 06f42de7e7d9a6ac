"""How much memory there is, and the peak of what one call takes, read from /proc: Linux only."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastattn.bench.case import Case, Inputs, itemsize
from fastattn.bench.peers import Call
from fastattn.bench.peers._base import available_memory

#: A library may take this share of the free memory before it fails.
MEMORY_SHARE = 0.8


def limit_memory() -> None:
    """Let a call that needs too much memory raise, before the machine runs out."""
    import resource

    limit = _field("/proc/self/status", "VmSize") + int(MEMORY_SHARE * available_memory())
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def measure_call(make: Callable[[Case, Inputs], Call], case: Case, inputs: Inputs) -> dict[str, Any]:
    """Peak resident bytes of the first call of `case` over its inputs and its output, and its seconds."""
    call = make(case, inputs)
    output = case.batch * case.heads * case.len_q * case.value_dim * itemsize(case.dtype)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is resident now
    before = _field("/proc/self/status", "VmHWM")
    start = time.perf_counter()
    kept = call.run()
    seconds = time.perf_counter() - start
    # A reused output is touched first in this call too.
    extra = _field("/proc/self/status", "VmHWM") - before - output
    del kept
    return {"extra": extra, "seconds": seconds}


def _field(path: str, name: str) -> int:
    """A field of a file of /proc in bytes."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no {name}")
