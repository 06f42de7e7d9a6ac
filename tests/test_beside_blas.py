"""Calls between NumPy's products: threads on cores of their own, and one pool of threads for both."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

import fastattn
from fastattn._api import blas as _blas
from fastattn._machine import host
from fastattn.backends.cython import backend as cython_backend
from tests.conftest import threads_of_products
from tests.process import python

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at threads in /proc")

#: Of a process in which several threads have products and attention, as models have them.
MODEL = """
import faulthandler, os, signal, threading
import numpy as np
import fastattn

faulthandler.dump_traceback_later(100, exit=True)  # a hang
rng = np.random.default_rng(0)
heads = [rng.standard_normal((2, 4, 100 + 20 * n, 32), dtype=np.float32) for n in range(8)]
matrices = [rng.standard_normal((300 + 10 * n, 300)) for n in range(8)]
attended = [fastattn.attention(x, x, x, causal=True, num_threads=1) for x in heads]
products = [m @ m.T for m in matrices]
vectors = [m @ m[0] for m in matrices]

def step(n, num_threads=2):
    assert np.allclose(matrices[n] @ matrices[n].T, products[n])
    out = fastattn.attention(heads[n], heads[n], heads[n], causal=True, num_threads=num_threads)
    assert np.array_equal(out, attended[n])
    assert np.allclose(matrices[n] @ matrices[n][0], vectors[n])

def in_threads(meanwhile, seconds):
    failed, done = [], threading.Event()
    def work(n):
        try:
            while not done.is_set():
                step(n)
        except BaseException as error:
            failed.append(error)
    workers = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for worker in workers:
        worker.start()
    try:
        meanwhile()
        done.wait(seconds)
    finally:
        done.set()
        for worker in workers:
            worker.join()
    assert not failed, failed

def in_child(run):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            run()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def model_in_python(code: str, env: dict[str, str | None] | None = None) -> str:
    """`python`, in which OpenBLAS has all of its threads."""
    return python(code, env={"OPENBLAS_NUM_THREADS": None} | (env or {}))


#: How long threads work side by side: a race shows in a third of a second, and a rare one in a second.
briefly_and_long = pytest.mark.parametrize("seconds", [0.3, pytest.param(1.0, marks=pytest.mark.slow)])


@pytest.fixture(params=["cython", pytest.param("numba", marks=pytest.mark.slow)])
def backend(request):
    if reasons := fastattn.backends.registry.load(request.param).unavailable_reasons():
        pytest.skip(f"{request.param} is not usable here: {reasons}")
    return request.param


@pytest.fixture(autouse=True)
def products_in_all_threads():
    """As they are outside of `tests.conftest.products_in_one_thread`."""
    threadpoolctl = pytest.importorskip("threadpoolctl")
    with threads_of_products(threadpoolctl, host.available_cores()):
        yield


@pytest.fixture
def shareable():
    if reason := _blas.numpy_blas().reason_not_shared():
        pytest.skip(f"NumPy's products cannot be shared here: {reason}")


class TestCores:
    @pytest.mark.parametrize(
        ("possible", "siblings", "cores"),
        [
            ("0-3\n", ["0", "1", "2", "3"], [0, 1, 2, 3]),
            ("0-3\n", ["0,2", "1,3", "0,2", "1,3"], [0, 1, 0, 1]),
            ("0-3\n", ["0-1", "0-1", "2-3", "2-3"], [0, 0, 2, 2]),
            ("0\n", ["0"], [0]),
            ("0-2\n", ["0,2", None, "0,2"], [0, 1, 0]),  # the second is offline
        ],
    )
    def test_are_read_from_the_system(self, tmp_path, monkeypatch, possible, siblings, cores):
        (tmp_path / "possible").write_text(possible)
        for cpu, text in enumerate(siblings):
            if text is not None:
                (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
                (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{text}\n")
        monkeypatch.setattr(host, "_CPUS", str(tmp_path))
        assert host.cores_of_cpus() == cores

    def test_nothing_is_known_where_the_system_does_not_say(self, tmp_path, monkeypatch):
        monkeypatch.setattr(host, "_CPUS", str(tmp_path))
        assert host.cores_of_cpus() == []


@linux_only
class TestSpread:
    """The cores of threads are tested in C, on made-up machines (kernels/test_placement.c)."""

    def test_every_thread_may_run_where_it_might_before(self, backend):
        code = (
            MODEL
            + """
def affinities():
    return {thread: os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")}

core = min(os.sched_getaffinity(0))
pinned, leave = [], threading.Event()
def stay():
    os.sched_setaffinity(0, {core})
    pinned.append(threading.get_native_id())
    leave.wait()
other = threading.Thread(target=stay)
other.start()
step(0)
allowed = os.sched_getaffinity(0)
for turn in range(6):
    for n in range(8):
        step(n, num_threads=2 + turn % 3)
after = affinities()
leave.set()
assert after.pop(str(pinned[0])) == {core}
assert all(affinity == allowed for affinity in after.values()), after
print(len(after) > 1)
"""
        )
        assert model_in_python(code, env={"FASTATTN_BACKEND": backend}).strip() == "True"

    def test_on_one_core(self, backend):
        code = (
            MODEL
            + """
core = min(os.sched_getaffinity(0))
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), {core})
for turn in range(5):
    for n in range(8):
        step(n, num_threads=3)
print(all(os.sched_getaffinity(int(thread)) == {core} for thread in os.listdir("/proc/self/task")))
"""
        )
        assert model_in_python(code, env={"FASTATTN_BACKEND": backend}).strip() == "True"

    @briefly_and_long
    def test_many_threads_at_once(self, backend, seconds):
        model_in_python(MODEL + f"in_threads(lambda: None, {seconds})", env={"FASTATTN_BACKEND": backend})

    @briefly_and_long
    def test_forks(self, seconds):
        """During attention in other threads; during products OpenBLAS itself hangs, also without this
        package."""
        model_in_python(
            MODEL
            + f"""
def step(n):
    out = fastattn.attention(heads[n], heads[n], heads[n], causal=True, num_threads=2)
    assert np.array_equal(out, attended[n])
in_threads(lambda: [in_child(lambda: step(n % 8)) for n in range(int(30 * {seconds}))], {seconds})
"""
        )


class TestSharedThreads:
    def test_products_keep_their_bits(self, shareable):
        rng = np.random.default_rng(0)
        factors = []
        for dtype in (np.float32, np.float64, np.complex64, np.complex128):
            for m, k, n in ((3, 4, 5), (200, 300, 400), (700, 20, 700), (1, 3000, 2000), (2000, 3000, 1)):
                factors.append((rng.random((m, k)).astype(dtype), rng.random((k, n)).astype(dtype)))
        own = [a @ b for a, b in factors]
        assert fastattn.share_threads_with_blas() is True
        try:
            shared = [a @ b for a, b in factors]
            inverse = np.linalg.inv(factors[1][0][:200, :200])
        finally:
            assert fastattn.share_threads_with_blas(False) is True
        for before, after in zip(own, shared, strict=True):
            np.testing.assert_array_equal(before, after)
        np.testing.assert_allclose(factors[1][0][:200, :200] @ inverse, np.eye(200), atol=0.05)

    @linux_only
    def test_products_run_on_our_threads(self, shareable):
        """OpenBLAS's own sleep meanwhile: they use no CPU time."""
        code = """
import os, time
import numpy as np
before = set(os.listdir("/proc/self/task"))  # OpenBLAS's, which it starts when it is loaded
import fastattn
assert fastattn.share_threads_with_blas()
def ticks():
    def of(thread):
        return sum(map(int, open(f"/proc/self/task/{thread}/stat").read().rsplit(")")[1].split()[11:13]))
    return {thread: of(thread) for thread in os.listdir("/proc/self/task")}
a = np.ones((1000, 1000))
time.sleep(0.2)  # until they sleep
a @ a
start = ticks()
stop = time.perf_counter() + 0.3
while time.perf_counter() < stop:
    a @ a
end = ticks()
main = str(os.getpid())
print(max((end[t] - start[t] for t in before if t != main), default=0),
      max((end[t] - start[t] for t in end if t not in before), default=0))
"""
        if _blas.numpy_blas().num_threads == 1:
            pytest.skip("its products have one thread here")
        theirs, ours = map(int, model_in_python(code).split())
        assert theirs == 0 < ours

    @briefly_and_long
    def test_many_threads_and_forks_at_once(self, shareable, seconds):
        model_in_python(
            MODEL
            + f"""
assert fastattn.share_threads_with_blas()
in_threads(lambda: [in_child(lambda: step(n % 8)) for n in range(int(30 * {seconds}))], {seconds})
"""
        )

    @briefly_and_long
    def test_on_one_core(self, shareable, seconds):
        model_in_python(
            MODEL
            + f"""
assert fastattn.share_threads_with_blas()
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), {{min(os.sched_getaffinity(0))}})
in_threads(lambda: None, {seconds})
"""
        )

    def test_a_child_has_its_own(self, shareable):
        model_in_python(
            MODEL
            + """
from fastattn._api import blas as _blas
assert fastattn.share_threads_with_blas()
step(0)
def check():
    assert not _blas.is_shared()
    assert not fastattn.share_threads_with_blas()
    assert "forked" in _blas.numpy_blas().reason_not_shared()
    step(1)
in_child(check)
assert _blas.is_shared()
"""
        )

    @linux_only
    def test_a_child_of_several_callers_starts_no_threads_of_openblas(self, shareable):
        """The lock under which OpenBLAS starts them may be held for ever there."""
        model_in_python(
            MODEL
            + """
assert fastattn.share_threads_with_blas()
in_threads(lambda: None, 0.1)
def check():
    step(1)
    assert len(os.listdir("/proc/self/task")) <= 2  # this one and a worker
in_child(check)
step(1)
"""
        )

    def test_again_and_again(self, shareable):
        x = np.ones((300, 300))
        for _ in range(20):
            assert fastattn.share_threads_with_blas()
            assert fastattn.share_threads_with_blas()
            assert (x @ x == 300).all()
            assert fastattn.share_threads_with_blas(False)
            assert fastattn.share_threads_with_blas(False)
            assert (x @ x == 300).all()

    @pytest.mark.parametrize("enable", [None, 1, "yes"])
    def test_enable_is_a_bool(self, enable):
        with pytest.raises(TypeError, match=f"enable must be a bool, got {enable!r}"):
            fastattn.share_threads_with_blas(enable)


def openblas(**answers):
    """An OpenBLAS whose functions return these values."""
    config = b"OpenBLAS 0.3.31  NO_AFFINITY Haswell MAX_THREADS=64"
    given = {"get_config": config, "get_num_threads": 4, "get_parallel": 1, "set_num_threads": None}
    given |= {"set_threads_callback_function": None} | answers
    functions = {name: lambda answer=answer: answer for name, answer in given.items() if answer != "absent"}
    return _blas.Blas("OpenBLAS 0.3.31", functions)


class TestReasons:
    @pytest.mark.parametrize(
        ("blas", "reason"),
        [
            (_blas.Blas("mkl-sdl", {}), r"mkl-sdl does not let .*; OpenBLAS 0\.3\.28 and later does"),
            (openblas(set_threads_callback_function="absent"), r"is older than 0\.3\.28"),
            (openblas(get_parallel=0), "was built without threads"),
            (openblas(get_parallel=2), "runs on OpenMP"),
            (openblas(get_num_threads=33), r"64 threads.* 33 are its own.*OPENBLAS_NUM_THREADS=32"),
        ],
    )
    def test_say_what_is_missing(self, monkeypatch, capsys, blas, reason):
        if cython_backend.driver is None:
            pytest.skip("the compiled backend is not here")
        monkeypatch.setattr(_blas, "numpy_blas", lambda: blas)
        assert not fastattn.share_threads_with_blas()
        fastattn.show_config()
        assert re.search(f"sharing not possible: .*{reason}", capsys.readouterr().out)

    def test_none_without_the_compiled_backend(self, monkeypatch):
        monkeypatch.setattr(cython_backend, "driver", None)
        assert "compiled backend" in openblas().reason_not_shared()
        assert not fastattn.share_threads_with_blas()
        assert fastattn.share_threads_with_blas(False)

    def test_just_as_many_threads_as_leave_room(self):
        if cython_backend.driver is None:
            pytest.skip("the compiled backend is not here")
        assert openblas(get_num_threads=32).reason_not_shared() is None


class TestShowConfig:
    def test_names_the_blas_and_what_helps(self, shareable, capsys):
        fastattn.show_config()
        before = capsys.readouterr().out
        assert fastattn.share_threads_with_blas()
        fastattn.show_config()
        assert fastattn.share_threads_with_blas(False)
        after = capsys.readouterr().out
        blas = _blas.numpy_blas()
        for text in (blas.name, f"{blas.num_threads} threads", "share_threads_with_blas()"):
            assert text in before
        assert "products run on fastattn's threads" in after

    @pytest.mark.parametrize(
        ("text", "timeout"), [("20", 20), ("2", 4), ("99", 30), ("", 26), ("x", 26), ("0", 26)]
    )
    def test_timeout(self, monkeypatch, text, timeout):
        monkeypatch.setenv("OPENBLAS_THREAD_TIMEOUT", text)
        assert openblas().timeout == timeout
        assert openblas(get_parallel=2).timeout is None
        assert _blas.Blas("blis", {}).timeout is None

    def test_a_brief_timeout_needs_no_advice(self, monkeypatch, capsys):
        monkeypatch.setattr(_blas, "numpy_blas", openblas)
        for timeout, helps in (("20", False), ("26", True)):
            monkeypatch.setenv("OPENBLAS_THREAD_TIMEOUT", timeout)
            fastattn.show_config()
            assert ("OPENBLAS_THREAD_TIMEOUT=20" in capsys.readouterr().out) is helps


def test_the_blas_is_that_of_numpy():
    """Not that of another package in the process, such as SciPy's."""
    functions = _blas.numpy_blas().functions
    if not functions:
        pytest.skip("NumPy's BLAS is not OpenBLAS")
    described = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    assert functions["get_config"]().decode().split()[1] in described["openblas configuration"]
