"""One process that holds one library: ``python -m fastattn.bench.worker PEER THREADS``.

It reads one JSON command per line on stdin and answers with one JSON line: ``{"ok": ...}`` or
``{"error": reason}``. `process` is the other end. What the library itself prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from fastattn.bench.case import Case, Inputs, Layer, make_inputs, make_layer
from fastattn.bench.cases import MEMORY_WARM_UP
from fastattn.bench.limits import ON_TILES, Kind
from fastattn.bench.memory import limit_memory, measure_call
from fastattn.bench.peers import Call, Peer, Products, Redundant, Unable, load_peer
from fastattn.bench.peers._base import available_memory
from fastattn.bench.tasks import task_of

#: Names of workers that hold no library: the oracle, and the probe of the machine's limits.
ORACLE, LIMITS = "oracle", "limits"

#: Seconds of calls before each burst, one call at least, as the library's threads were stopped and its data
#: left the caches. A call as long as `LONG_CALL_SECONDS` needs none: warming up is a small part of it.
WARM_UP_SECONDS, LONG_CALL_SECONDS = 0.02, 0.25

#: Seconds between the ways of one library, each of which may have a pool of its own that spins after a call.
#: Among libraries with several ways onnxruntime's pool spins longest, 45 ms.
SETTLE_SECONDS = 0.06

#: How many rows of a product in a model are checked.
PRODUCT_ROWS = 8

#: Calls are timed in blocks of at least this length, so that reading the clock costs below 1 %.
BLOCK_SECONDS = 50e-6

#: A probe of the FMA peak takes about this long. The machine's limit is the best of so many of them.
PROBE_SECONDS, PROBE_TRIES = 0.004, 8

#: The same for the read bandwidth: long beside the call of a millisecond or so that it stands next to.
READ_SECONDS, READ_TRIES = 0.02, 3

#: Cold inputs are so many copies that together they have this many bytes: twice the largest cache that a
#: virtual machine was seen to report (260 MB, shared with unknown neighbours; Xeon, 2026-11-21).
COLD_BYTES = 2**29

#: The copies take no more than this share of the free memory: every library of a run has its own copies, and
#: more of them for each way while its ways are compared.
COLD_SHARE = 1 / 16

#: A way of a library is tried with cold inputs only if, with inputs that the caches may hold, it takes at
#: most this many times as long as the library's fastest way.
COLD_CHANCE = 1.5


def _reason(error: BaseException) -> str:
    """The error in one line that fits a table."""
    text = " ".join(str(error).split())
    if not isinstance(error, Unable):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def _block_size(seconds: float) -> int:
    return max(1, round(BLOCK_SECONDS / max(seconds, 1e-9)))


def _time_blocks(run: Callable[[], object], calls: int, block: int) -> list[float]:
    """Seconds per call, one figure for each block of `block` calls."""
    clock = time.perf_counter
    times = []
    gc.disable()
    for _ in range(max(1, calls // block)):
        start = clock()
        for _ in range(block):
            run()
        times.append((clock() - start) / block)
    gc.enable()
    return times


@dataclass(frozen=True, slots=True)
class _Ready:
    """A case as it is timed: attention alone, or between the products of a model."""

    case: Case
    run: Callable[[], object]
    products: Products | None

    def times(self, calls: int, seconds: float) -> tuple[list[float], list[float]]:
        """Seconds of attention in `calls` calls that take about `seconds` each, and of the products around.

        Alone the calls are timed in blocks, in a model one by one; there are no products alone.
        """
        if self.products is None:
            return _time_blocks(self.run, calls, _block_size(seconds)), []
        return _time_in_model(self.run, self.products, calls)

    def warm_up(self) -> tuple[float, float]:
        """Call for `WARM_UP_SECONDS`; the least seconds of attention, and of the products around it or 0."""
        attention = products = float("inf")
        end = time.perf_counter() + WARM_UP_SECONDS
        while True:
            (took,), around = self.times(1, LONG_CALL_SECONDS)
            attention, products = min(attention, took), min([products, *around])
            if time.perf_counter() >= end:
                return attention, products if self.products is not None else 0.0


def _time_in_model(
    run: Callable[[], object], products: Products, calls: int
) -> tuple[list[float], list[float]]:
    """Seconds of each call, and of the two products around it."""
    clock = time.perf_counter
    attention, around = [], []
    gc.disable()
    for _ in range(calls):
        start = clock()
        products.before()
        before = clock()
        run()
        after = clock()
        products.after()
        end = clock()
        attention.append(after - before)
        around.append(before - start + end - after)
    gc.enable()
    return attention, around


def _in_turn(runs: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """A function that calls the next of `runs` each time, from the first again after the last."""
    if len(runs) == 1:
        return runs[0]
    turn = cycle(runs)
    return lambda: next(turn)()


def _try_in_turn(calls: dict[str, _Ready], ways: dict[str, dict[str, Any]]) -> None:
    """Leave in `ways` the seconds of the fastest of a few calls of each, and of the products around them."""
    for label in calls if len(calls) == 1 else [*calls, *calls]:
        if ways[label].get("seconds", 0.0) >= LONG_CALL_SECONDS:
            continue  # once is enough for these
        time.sleep(SETTLE_SECONDS)
        seconds, products = calls[label].warm_up()
        ways[label]["seconds"] = min(seconds, ways[label].get("seconds", seconds))
        ways[label]["products"] = min(products, ways[label].get("products", products))


def _cold_copies(case: Case, inputs: Inputs) -> list[Inputs]:
    """Copies of `inputs` that fill `COLD_BYTES` together with it, if `case` wants them cold; else none."""
    if not case.cold:
        return []
    count = math.ceil(COLD_BYTES / case.nbytes)
    count = min(count, int(COLD_SHARE * available_memory() / case.nbytes))
    return [copy.deepcopy(inputs).with_views(case) for _ in range(count - 1)]


def _fma_peak(dtype: str) -> Callable[[int, float], float]:
    """FLOP/s of multiply-adds as a function of the threads and of about how many seconds to try."""
    from fastattn.bench.probes import fma_peak

    return partial(fma_peak, dtype)


def _read_bandwidth() -> Callable[[int, float], float]:
    """Bytes/s read from memory, as a function of the same."""
    from fastattn.bench.probes import read_bandwidth

    return read_bandwidth


class LibraryWorker:
    """The commands of a worker that holds a library."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._threads = num_threads
        self._peer: Peer | None = None
        self._ready: dict[str, _Ready] = {}

    def _load(self) -> Peer:
        if self._peer is None:
            self._peer = load_peer(self._name, self._threads)
        return self._peer

    def prepare(self, case: dict[str, Any], expected: str) -> dict[str, Any]:
        """Make `case` ready every way the library has, check each, keep the fastest right one.

        Parameters
        ----------
        case
            Its fields.
        expected
            The `.npy` file with the right answer.

        Returns
        -------
        dict
            ``version`` of the library, ``chosen`` (label or None), ``tolerance``, ``copies`` of the inputs,
            and ``ways``: for each label its ``error`` (largest), ``rms_error``, ``seconds`` and those of the
            ``products`` around it, or the ``reason`` it cannot be used.
        """
        wanted = Case.from_json(case)
        inputs = make_inputs(wanted)
        answer = np.load(expected, mmap_mode="r")
        task = task_of(wanted)
        allowed = task.tolerance(wanted, inputs, answer)
        peer = self._load()
        makers = task.ways(peer)
        layer = make_layer(wanted)
        products, right_products = None, True
        if layer is not None:
            products = peer.products(layer)
            right_products = _is_right(products, layer)
        ways: dict[str, dict[str, Any]] = {}
        calls: dict[str, _Ready] = {}
        for label, make in makers.items():
            try:
                call = make(wanted, inputs)
                if products is not None:  # checked where it is timed
                    products.before()
                ways[label] = _errors(wanted, call.result(), _answer(wanted, inputs, call, answer))
            except Redundant:
                continue
            except Exception as problem:  # whatever a library raises is its reason
                ways[label] = {"reason": _reason(problem)}
                continue
            error = ways[label]["error"]
            if error is None or error > allowed:
                found = "NaN or inf" if error is None else f"largest error {error:.1e}"
                ways[label]["reason"] = f"wrong: {found}, allowed {allowed:.1e}"
            elif not right_products:
                ways[label]["reason"] = "wrong: the product before attention"
            else:
                calls[label] = _Ready(wanted, call.run, products)
        _try_in_turn(calls, ways)
        copies = _cold_copies(wanted, inputs) if calls else []
        if copies:
            # Some libraries take long to make each copy ready: only ways that may be the fastest get them.
            slowest = COLD_CHANCE * min(ways[label]["seconds"] for label in calls)
            calls = {label: it for label, it in calls.items() if ways[label]["seconds"] <= slowest}
            for label, ready in calls.items():
                others = [makers[label](wanted, it).run for it in copies]
                for other in others:
                    other()  # what a library does once for each, it does now
                calls[label] = replace(ready, run=_in_turn([ready.run, *others]))
                del ways[label]["seconds"]
            _try_in_turn(calls, ways)
        chosen = min(calls, key=lambda label: ways[label]["seconds"], default=None)
        if chosen is not None:
            self._ready[wanted.name] = calls[chosen]
        return {
            "version": peer.version,
            "chosen": chosen,
            "tolerance": allowed,
            "copies": 1 + len(copies),
            "ways": ways,
        }

    def time(self, case: str, calls: int, seconds: float) -> dict[str, float | None]:
        """One burst of `case`: warm up, then `calls` calls that take about `seconds` each.

        Of a case in a model the seconds are those of attention alone, and ``products`` those of the products.
        """
        ready = self._ready[case]
        if seconds < LONG_CALL_SECONDS:
            ready.warm_up()
        times, products = ready.times(calls, seconds)
        return {
            "median": float(np.median(times)),
            "min": min(times),
            "products": float(np.median(products)) if products else None,
        }

    def limit_shares(self, case: str, kind: Kind, seconds: float) -> list[tuple[float, float, float]]:
        """The share of the machine's limit that `case` reaches: calls and probes in turn, for `seconds`.

        The machine is shared, so the limit moves: every call is held against the probes just before and just
        after it, of this process and these threads. Beside each share stand the slower of the probes of the
        limit and of the integer peak around it.
        """
        from fastattn.bench.probes import integer_peak

        ready = self._ready[case]
        timed, run = ready.case, ready.run
        if kind == "memory":
            work, limit, length = float(timed.nbytes), _read_bandwidth(), READ_SECONDS
        else:
            work, limit, length = timed.flops, _fma_peak(timed.compute_dtype), PROBE_SECONDS

        def probe() -> tuple[float, float]:
            integer = integer_peak(self._threads, PROBE_SECONDS / 4)
            return limit(self._threads, length), integer

        block = max(1, round(length / ready.warm_up()[0]))
        shares: list[tuple[float, float, float]] = []
        end = time.perf_counter() + seconds
        before = probe()
        while not shares or time.perf_counter() < end:
            (took,) = _time_blocks(run, block, block)
            after = probe()
            share = work / took / ((before[0] + after[0]) / 2)
            shares.append((share, min(before[0], after[0]), min(before[1], after[1])))
            before = after
        return shares

    def release(self) -> None:
        """Forget what was prepared, arrays and all."""
        self._ready.clear()
        gc.collect()

    def memory(self, case: dict[str, Any], warm: bool) -> dict[str, Any]:
        """Peak memory of the first call of `case` over its inputs and its output, in bytes.

        Meant for a fresh process. With `warm` a tiny call comes first, so that what a library loads or
        allocates once, whatever the size, is left out. The first way that works is measured.
        """
        wanted = Case.from_json(case)
        inputs = make_inputs(wanted)
        peer = self._load()
        reasons = []
        for label, make in task_of(wanted).ways(peer).items():
            try:
                if warm:
                    make(MEMORY_WARM_UP, make_inputs(MEMORY_WARM_UP)).run()
                return {"version": peer.version, "way": label, **measure_call(make, wanted, inputs)}
            except Exception as problem:  # whatever a library raises is its reason
                reasons.append(f"{label}: {_reason(problem)}")
        raise MemoryError("; ".join(reasons))


def _is_right(products: Products, layer: Layer) -> bool:
    """Whether the first product is right in some rows; it may run on threads of ours.

    It is held against the same in float64, computed without any BLAS. Each sum may be off by its length in
    eps of its terms' absolute values: no honest error is larger.
    """
    rows = np.linspace(0, len(layer.rows) - 1, PRODUCT_ROWS).round().astype(np.int64)
    exact = layer.rows[rows].astype(np.float64), layer.w_qkv.astype(np.float64)
    expected, largest = (np.einsum("im,mn->in", *map(change, exact)) for change in (np.asarray, np.abs))
    allowed = layer.rows.shape[1] * np.finfo(layer.rows.dtype).eps * largest
    return bool(np.all(np.abs(np.asarray(products.before())[rows] - expected) <= allowed))


def _answer(case: Case, inputs: Inputs, call: Call, answer: np.ndarray) -> np.ndarray:
    """`answer`, or the right one for the numbers that the library holds where those are not the case's."""
    if call.held is None:
        return answer
    key, value = call.held()
    return task_of(case).answer(case, replace(inputs, key=key, value=value))


def _errors(case: Case, result: np.ndarray, answer: np.ndarray) -> dict[str, float | None]:
    """Largest and root-mean-square error; None for what is not finite."""
    found = zip(("error", "rms_error"), task_of(case).errors(case, result, answer), strict=True)
    return {name: error if np.isfinite(error) else None for name, error in found}


class OracleWorker:
    """The command of the worker that computes the right answers."""

    def expected(self, case: dict[str, Any], path: str) -> dict[str, str]:
        """Save the right answer of `case` at `path`."""
        wanted = Case.from_json(case)
        answer = task_of(wanted).answer(wanted, make_inputs(wanted))
        np.save(path, answer)
        return {"dtype": str(answer.dtype)}


class LimitsWorker:
    """The command of the worker that measures what the machine can do."""

    def __init__(self, num_threads: int) -> None:
        self._threads = num_threads

    def fma(self) -> dict[str, dict[str, float]]:
        """FMA peak in FLOP/s: ``{dtype: {threads: peak}}`` for one thread and for all; a tile unit's, too."""
        # After a stop both threads may wake on one core; they part while this is discarded.
        _fma_peak("float32")(self._threads, WARM_UP_SECONDS)
        from fastattn.bench.probes import has_tile_unit, tile_peak

        peaks = {dtype: _fma_peak(dtype) for dtype in ("float32", "float64")}
        if has_tile_unit():
            peaks[ON_TILES] = tile_peak
        return {dtype: self._best(peak, PROBE_SECONDS, PROBE_TRIES) for dtype, peak in peaks.items()}

    def read_bandwidth(self) -> dict[str, float]:
        """Bytes/s read from memory: ``{threads: bandwidth}`` for one thread and for all."""
        _read_bandwidth()(self._threads, WARM_UP_SECONDS)
        return self._best(_read_bandwidth(), READ_SECONDS, READ_TRIES)

    def _best(self, limit: Callable[[int, float], float], seconds: float, tries: int) -> dict[str, float]:
        return {
            str(threads): max(limit(threads, seconds) for _ in range(tries)) for threads in (1, self._threads)
        }


def _end_with_parent() -> None:
    """Have Linux kill this process when the one that started it dies, also amid a command."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main(name: str, num_threads: int) -> None:
    """Answer commands until stdin closes."""
    _end_with_parent()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    holder: object
    if name == ORACLE:
        holder = OracleWorker()
    elif name == LIMITS:
        holder = LimitsWorker(num_threads)
    else:
        with contextlib.suppress(OSError):  # not on Linux: nobody knows how much there is
            limit_memory()
        holder = LibraryWorker(name, num_threads)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, Any] = {"ok": getattr(holder, request.pop("command"))(**request)}
        except Exception as problem:  # the other end reports it
            answer = {"error": _reason(problem)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
