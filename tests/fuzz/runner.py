"""Runs many cases in worker processes, and says how far they are and what failed."""

from __future__ import annotations

import json
import mmap
import os
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.records import KINDS, Record, draw
from tests.fuzz.shrink import shrink
from tests.process import ROOT

BLOCK = 250  # seeds that a worker is given at a time
CRASHES_SHRUNK = 3
STARTING = 300  # seconds that a worker has for its imports


@dataclass
class Progress:
    """What a run knows so far."""

    cases: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    ended_at: int | None = None  #: where another run goes on, if this one was interrupted


class _Worker:
    """A process, and the seeds that it is at."""

    def __init__(self, folder: Path, number: int, run: Run) -> None:
        self.path = folder / f"seat-{number}"
        self.path.write_bytes(struct.pack("q", -1))
        with open(self.path, "r+b") as file:
            self._seat = mmap.mmap(file.fileno(), 8)
        self._run = run
        self.block: tuple[int, int] | None = None
        self.start()

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.fuzz.worker",
            str(self.path),
            ",".join(self._run.engines),
            self._run.mode,
            ",".join(self._run.kinds),
        ]
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as the process)
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, cwd=self._run.root,
            env=self._run.environment, text=True, bufsize=1,
        )  # fmt: skip
        self.moved, self._last, self.hangs = time.monotonic(), -1, False
        self.counts: Counter[str] = Counter()
        self.begun = b""  # of a line that is not there in full

    def give(self, block: tuple[int, int]) -> None:
        self.block = block
        self.moved = time.monotonic()
        self.process.stdin.write(f"{block[0]} {block[1]}\n")
        self.process.stdin.flush()

    @property
    def seed(self) -> int:
        return struct.unpack("q", self._seat[:])[0]

    def seconds_at_one_case(self) -> float:
        if self.seed != self._last:
            self._last, self.moved = self.seed, time.monotonic()
        waited = time.monotonic() - self.moved
        has_begun = self.block is not None and self.block[0] <= self._last < self.block[1]
        return waited if has_begun else waited - STARTING

    def end_hanging(self) -> None:
        """Ends the process, which says where it is if it still can."""
        if not self.hangs:
            self.hangs = True
            self.process.send_signal(signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            self.process.kill()

    def last_errors(self) -> str:
        self.errors.seek(0)
        text = self.errors.read().decode(errors="replace").strip()
        found = (text.find(sign) for sign in ("ERROR: ", "runtime error", "Fatal Python error"))
        start = min((at for at in found if at >= 0), default=max(0, len(text) - 2000))
        return text[start : start + 2000]


class Run:
    """The cases of seeds ``first`` to ``stop``, in `processes` workers."""

    def __init__(
        self,
        first: int,
        stop: int,
        *,
        processes: int,
        engines: list[str],
        kinds: Sequence[str] = tuple(KINDS),
        timeout: float,
        mode: str = "plain",
        root: Path = ROOT,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.first, self.stop, self.processes, self.timeout = first, stop, processes, timeout
        self.engines, self.kinds, self.mode, self.root = engines, kinds, mode, root
        variables = {name: text for name, text in os.environ.items() if not name.startswith("FASTATTN_")}
        variables |= {"PYTHONPATH": str(root), "OPENBLAS_NUM_THREADS": "1"} | (environment or {})
        self.environment = variables
        self.progress = Progress()

    def run(self, show: Callable[[Progress], None]) -> Progress:
        blocks = iter([(at, min(at + BLOCK, self.stop)) for at in range(self.first, self.stop, BLOCK)])
        with tempfile.TemporaryDirectory() as folder:
            workers = [_Worker(Path(folder), number, self) for number in range(self.processes)]
            chosen = selectors.DefaultSelector()
            busy = set()
            try:
                for worker in workers:
                    self._next(worker, blocks, busy, chosen)
                while busy:
                    for key, _ in chosen.select(timeout=0.2):
                        self._read(key.data, blocks, busy, chosen)
                    for worker in list(busy):
                        if worker.seconds_at_one_case() > self.timeout:
                            worker.end_hanging()
                    show(self.progress)
            except KeyboardInterrupt:
                self.progress.ended_at = min((worker.block[0] for worker in busy), default=self.stop)
            finally:
                for worker in workers:
                    worker.process.kill()
                    worker.process.wait()
        return self.progress

    def _next(self, worker: _Worker, blocks: Any, busy: set[Any], chosen: Any) -> None:
        block = next(blocks, None)
        if block is None:
            busy.discard(worker)
            return
        if worker not in busy:
            busy.add(worker)
            chosen.register(worker.process.stdout, selectors.EVENT_READ, worker)
        worker.give(block)

    def _read(self, worker: _Worker, blocks: Any, busy: set[Any], chosen: Any) -> None:
        # Not by `readline`, which may take more lines than it gives: nothing would say that these are there.
        found = os.read(worker.process.stdout.fileno(), 1 << 16)
        if not found:
            self._ended(worker, blocks, busy, chosen)
            return
        *lines, worker.begun = (worker.begun + found).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "failed" in said:
                self.progress.failures.append(said)
                continue
            self.progress.cases += said.pop("did")
            self._count(worker, said)
            self._next(worker, blocks, busy, chosen)

    def _count(self, worker: _Worker, said: dict[str, int]) -> None:
        for name, number in said.items():
            self.progress.counts[name] += number - worker.counts[name]
            worker.counts[name] = number

    def _ended(self, worker: _Worker, blocks: Any, busy: set[Any], chosen: Any) -> None:
        """A worker crashed, or was killed as it hung: its case has failed, and another goes on behind it."""
        status = worker.process.wait()
        chosen.unregister(worker.process.stdout)
        busy.discard(worker)
        seed, (first, stop) = worker.seed, worker.block
        if not first <= seed < stop:
            raise RuntimeError(f"a worker does not start:\n{worker.last_errors()}")
        manner = "hangs" if worker.hangs else f"ended with {status}"
        record = draw(seed, self.engines, self.kinds)
        if manner != "hangs" and self.mode == "plain" and len(self.progress.failures) < CRASHES_SHRUNK:
            record = shrink(record, manner, self.alone, most=60)
        self.progress.failures.append(
            {"failed": seed, "manner": manner, "message": worker.last_errors(), "record": record}
        )
        self.progress.cases += seed + 1 - first
        worker.start()
        if seed + 1 < stop:
            busy.add(worker)
            chosen.register(worker.process.stdout, selectors.EVENT_READ, worker)
            worker.give((seed + 1, stop))
        else:
            self._next(worker, blocks, busy, chosen)

    def alone(self, record: Record) -> str | None:
        """How a case fails in a process of its own."""
        command = [sys.executable, "-m", "tests.fuzz", "--record", json.dumps(record)]
        try:
            done = subprocess.run(
                command,
                cwd=self.root,
                env=self.environment,
                capture_output=True,
                timeout=self.timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "hangs"
        return None if done.returncode in (0, 1) else f"ended with {done.returncode}"
