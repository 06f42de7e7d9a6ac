"""The parent's end of a worker: start it, ask it, and keep it stopped while others run."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from fastattn._machine import host
from fastattn.bench.case import Case
from fastattn.bench.peers import PEERS
from fastattn.bench.worker import ORACLE

#: The folder that holds the package `fastattn`; workers start there.
ROOT = Path(__file__).resolve().parents[2]

#: Settings of fastattn that would make a worker measure something else than its name says.
OWN_SETTINGS = ("FASTATTN_BACKEND", "FASTATTN_ISA", "FASTATTN_NUM_THREADS")

#: The longest that a worker may take for one command. The oracle of the largest float64 case takes a tenth.
TIMEOUT_SECONDS = 300.0


class WorkerError(Exception):
    """A worker could not do what it was asked; the message is the reason."""


class Worker:
    """A process that holds one library.

    Thread pools spin for a while after each call, up to 100 ms, and would take the cores of the library
    that runs next. So a worker runs only while it is asked something and is stopped (SIGSTOP) the rest of
    the time, its pool included. It is in a process group of its own: should this process die, the system
    sends the stopped group SIGHUP and SIGCONT, and nothing is left behind.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self.name = name
        count = str(num_threads)
        environment = {
            **host.environment_without(OWN_SETTINGS),
            "OMP_NUM_THREADS": count,
            "OPENBLAS_NUM_THREADS": count,
            "MKL_NUM_THREADS": count,
            "FASTATTN_NUM_THREADS": count,
            "NPROC": count,  # the size of XLA's pool
            **(PEERS[name].environment if name in PEERS else {}),
        }
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed with the worker
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fastattn.bench.worker", name, count],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            cwd=ROOT,
            env=environment,
            process_group=0,
        )
        self._requests = cast(IO[bytes], self._process.stdin)
        self._results = cast(IO[bytes], self._process.stdout)

    def ask(self, command: str, **arguments: Any) -> Any:
        """Wake the worker, have it carry out `command`, stop it again; what it answered.

        Raises
        ------
        WorkerError
            It refused, died, or took longer than `TIMEOUT_SECONDS`; in the last two cases it is gone.
        """
        request = json.dumps({"command": command, **arguments}) + "\n"
        self._send(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # it died; reading says how
            self._requests.write(request.encode())
        answer = json.loads(self._read_line(command))
        self._stop()
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["ok"]

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pipe in (self._requests, self._results, self._stderr):
            pipe.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def _send(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            os.kill(self._process.pid, number)

    def _stop(self) -> None:
        """SIGSTOP, and wait until every thread has stopped."""
        self._send(signal.SIGSTOP)
        if self._process.returncode is None:
            _, status = os.waitpid(self._process.pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                self._process.returncode = os.waitstatus_to_exitcode(status)

    def _read_line(self, command: str) -> bytes:
        pipe = self._results.fileno()
        deadline = time.monotonic() + TIMEOUT_SECONDS
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                self._process.kill()
                self._process.wait()
                raise WorkerError(f"{command} took longer than {TIMEOUT_SECONDS:.0f} s")
            part = os.read(pipe, 65536)
            if not part:
                raise WorkerError(f"its process ended during {command}: {self._last_words()}")
            line += part
        return line

    def _last_words(self) -> str:
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"{how}: {lines[-1]}" if lines else how


class Crew:
    """The workers: started when first needed, started again when they died, ended together.

    A library has one worker for each thread count that it is wanted with.
    """

    def __init__(self, num_threads: int) -> None:
        self._threads = num_threads
        self._workers: dict[tuple[str, int], Worker] = {}
        self._answers = tempfile.TemporaryDirectory(prefix="fastattn-benchmarks-")

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers.values():
            worker.close()
        self._answers.cleanup()

    def threads(self, case: Case) -> int:
        """The thread count of `case`: its own, or else that of the run."""
        return case.threads or self._threads

    def worker(self, name: str, num_threads: int) -> Worker:
        """The worker called `name`, running or new."""
        worker = self._workers.get((name, num_threads))
        if worker is None or not worker.alive:
            if worker is not None:
                worker.close()
            worker = self._workers[name, num_threads] = Worker(name, num_threads)
        return worker

    def expected(self, case: Case) -> tuple[str, str]:
        """The file with the right answer of `case` until the next one's, and the precision it is in."""
        path = str(Path(self._answers.name) / "answer.npy")
        # A worker for each answer: its memory is given back, and the long double ones are few.
        with Worker(ORACLE, self._threads) as oracle:
            return path, oracle.ask("expected", case=asdict(case), path=path)["dtype"]

    def forget(self, path: str) -> None:
        """Delete the right answer at `path`."""
        Path(path).unlink()

    def release(self) -> None:
        """Have the workers that hold a library forget what they prepared."""
        for (name, _), worker in self._workers.items():
            if name in PEERS and worker.alive:
                with contextlib.suppress(WorkerError):  # it died meanwhile, and will be replaced
                    worker.ask("release")
