"""A child forked while another thread works: it inherits no lock that is never released."""

from __future__ import annotations

import os

import pytest

from tests.process import python

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

WHILE = """
import os, signal, sys, threading, time
import numpy as np
import fastattn

x = np.random.default_rng(0).standard_normal((1, 2, 100, 16)).astype(np.float32)

def make(factor):
    # Code of its own: what is read from outside would be no reason to compile again.
    return eval(f"lambda score, b, h, q, k: score * {{factor}}")

def flex(factor):
    fastattn.flex_attention(x, x, x, score_mod=make(factor))

{start}
stop = threading.Event()
failed = []

def busy():
    try:
        {work}
    except BaseException as error:
        failed.append(error)

worker = threading.Thread(target=busy)
worker.start()
for number in range({forks}):
    time.sleep({pause})
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # ends a child that hangs
        {child}
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != 0:
        stop.set()
        raise SystemExit(f"child {{number}} ended with {{status}}")
stop.set()
worker.join()
assert not failed, failed
print("done")
"""


def run(**code):
    environment = {"PYTHONWARNINGS": "ignore", "NUMBA_NUM_THREADS": "2"}
    assert python(WHILE.format(**code), env=environment, timeout=300).split()[-1] == "done"


@pytest.mark.slow
def test_while_a_function_is_compiled():
    """By Numba's compiler, whose lock would be held forever in the child."""
    pytest.importorskip("numba")
    run(
        start="flex(0.5)",
        work="""count = 1
        while not stop.is_set():
            count += 1
            flex(float(count))""",
        forks=3,
        pause=0.1,
        child="flex(-1.0 - number)",
    )


@pytest.mark.slow
def test_while_somebody_else_compiles():
    """Functions of the caller's own, one after another: a waiting fork is not starved."""
    pytest.importorskip("numba")
    run(
        start="import numba; flex(0.5)",
        work="""while not stop.is_set():
            numba.njit(lambda number: number + 1)(1.0)""",
        forks=3,
        pause=0.05,
        child="flex(-1.0 - number)",
    )


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.05, 0.3])
def test_while_numba_is_imported(pause):
    """By the first call that needs it; the lock of a module would stay held in the child."""
    pytest.importorskip("numba")
    run(
        start="",
        work='fastattn.attention(x, x, x, backend="numba")',
        forks=1,
        pause=pause,
        child='fastattn.attention(x, x, x, backend="numba")',
    )


FIRST_CALLS = {
    "attention": "fastattn.attention(x, x, x)",
    "reference": 'fastattn.attention(x, x, x, backend="reference")',
    "numba": 'fastattn.attention(x, x, x, backend="numba")',
    "dropout": "fastattn.attention(x, x, x, dropout=0.5, seed=0)",
    "gradients": "fastattn.attention_backward(x, x, x, x, x, x[..., 0])",
    "score_mod": "fastattn.flex_attention(x, x, x, score_mod=lambda score, b, h, q, k: score * 0.5)",
    "mask_mod": "fastattn.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 9, 9)",
    "cache": "fastattn.KVCache(1, 2, 16).append(x, x)",
    "rope": "fastattn.rope(x, *fastattn.rope_tables(100, 16))",
    "linear": "fastattn.linear_attention(abs(x), abs(x), x)",
    "refusal": """
try:
    fastattn.attention(x, x, x, attn_mask=None)
except TypeError:
    pass
""",
}


#: Those that import Numba import some hundred modules.
USUAL = ("attention",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in USUAL)) for name in FIRST_CALLS]
)
def test_during_each_import_of_a_first_call(name):
    """The lock of a module that a thread imports would stay held in the child."""
    if name in ("numba", "score_mod", "mask_mod"):
        pytest.importorskip("numba")
    code = f"""
import logging  # the one module that is imported before a fork can wait
import os, signal, sys, threading, time
import numpy as np
import fastattn

x = np.random.default_rng(0).standard_normal((1, 2, 100, 16)).astype(np.float32)
importing = threading.Event()
finished = []

def call():
    exec({FIRST_CALLS[name]!r}, globals())

def work():
    call()
    finished.append(True)
    importing.set()

class Finder:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is worker and not name.startswith(("numba.", "llvmlite.")):
            importing.set()
            time.sleep(0.05)  # in which the fork below begins

sys.meta_path.insert(0, Finder())
worker = threading.Thread(target=work)
worker.start()
children = []
while not finished:
    importing.wait()
    importing.clear()
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # ends a child that hangs
        call()
        os._exit(0)
    children.append(pid)
worker.join()
print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))
"""
    statuses = python(code, env={"PYTHONWARNINGS": "ignore", "NUMBA_NUM_THREADS": "2"}, timeout=300).split()
    assert set(statuses) == {"0"}, statuses


def test_a_fork_waits_for_no_other_lock():
    """Of a thread that holds one of the locks itself."""
    pytest.importorskip("numba")
    code = """
import os
import numpy as np
import fastattn
from numba.core.compiler_lock import global_compiler_lock
from fastattn._machine import threads as _threads
x = np.ones((1, 2, 3, 4))
fastattn.attention(x, x, x, backend="numba")
with global_compiler_lock, _threads.no_fork:
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert python(code, env={"PYTHONWARNINGS": "ignore"}).split() == ["7"]
