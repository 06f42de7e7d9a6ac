"""Forks in the middle of work: threads run cases all the time, and so does each child.

NumPy's products are in one thread. By several, OpenBLAS hangs when a process forks while another thread is
within one: eight threads of ``a @ b`` of 128 x 128 and ``os.fork()``, with NumPy alone, do so at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

# A child forked while another thread imports one of these would wait for its lock.
import numpy.testing  # noqa: F401
import threadpoolctl

from fastattn.backends.cython import backend as cython_backend
from tests.conftest import threads_of_products
from tests.fuzz import beside, histories  # noqa: F401
from tests.fuzz.records import Record, draw
from tests.fuzz.worker import manner_of, prepare

#: The instruction set is one for the process, and Numba's pools do not all outlive a fork.
ENGINES = [f"cython-{cython_backend.isa()}", "reference"]
CASES_OF_A_CHILD = 5
SECONDS_OF_A_CHILD = 60


def run(forks: int, threads: int, seed: int, show: Callable[[int, int], None]) -> list[str]:
    """What went wrong; `show` is told the number of children and of cases so far."""
    prepare()
    failures: list[str] = []
    stop = threading.Event()
    done = [0] * threads

    def work(number: int) -> None:
        at = seed + number
        while not stop.is_set():
            record = _case(at)
            try:
                found = manner_of(record)
            except BaseException:
                found = ("raised", traceback.format_exc())
            if found is not None:
                failures.append(f"thread {number}, {found[0]}: {found[1]}: {record}")
            done[number] += 1
            at += threads

    threads_of_products(threadpoolctl, 1)
    workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(threads)]
    for worker in workers:
        worker.start()
    for number in range(forks):
        time.sleep(0.001 * (number % 10))
        first = seed + 10_000_000 + number * CASES_OF_A_CHILD
        pid = os.fork()
        if pid == 0:
            _child(first)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status:
            failures.append(f"child {number}, cases from {first}, ended with {status}")
        show(number + 1, sum(done))
    if not forks:
        began = time.monotonic()
        while time.monotonic() - began < 10:
            time.sleep(0.1)
            show(0, sum(done))
    stop.set()
    for worker in workers:
        worker.join(60)
        if worker.is_alive():
            failures.append("a thread hangs")
    return failures


def _case(seed: int) -> Record:
    record = draw(seed, ENGINES)
    if record["kind"] == "kernels":  # these run on the default backend, which is one for the process
        record["engine"] = ENGINES[0]
    return record


def _child(first: int) -> None:
    signal.alarm(SECONDS_OF_A_CHILD)
    status = 1
    try:
        status = 0
        for seed in range(first, first + CASES_OF_A_CHILD):
            if (found := manner_of(_case(seed))) is not None:
                print(f"child: {found[0]}: {found[1]}: {_case(seed)}", file=sys.stderr, flush=True)
                status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        os._exit(status)
