"""How many threads a call uses, whatever `num_threads` is: bounds, limits, threads that do not start."""

from __future__ import annotations

import os
import sys
import threading

import numpy as np
import pytest

import fastattn
from fastattn._machine import host, threads
from tests.process import python

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")

COUNT = """
import os, resource, sys, threading
import numpy as np
import fastattn
x = np.random.default_rng(0).standard_normal((1, 8, 512, 64)).astype(np.float32)
expected = fastattn.attention(x, x, x, num_threads=1)

def threads():
    return len(os.listdir("/proc/self/task"))

def more_threads(x=x, expected=expected, **options):
    before = threads()
    out = fastattn.attention(x, x, x, **options)
    assert (out.view(np.int32) == expected.view(np.int32)).all()  # in little memory
    return threads() - before

def leave_room(n_threads, stack=max(8 << 20, resource.getrlimit(resource.RLIMIT_STACK)[0])):
    # Address space for so many stacks and some memory; what is tried beyond that fails.
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + n_threads * stack + (4 << 20), -1))
"""


def printed(code, backend="cython", **variables):
    output = python(COUNT + code, env={"FASTATTN_BACKEND": backend} | variables)
    return [int(word) for word in output.split()]


@linux_only
@pytest.mark.usefixtures("compiled")
class TestBounds:
    @pytest.mark.parametrize("num_threads", [2_000, 70_000, 2**31 - 1])
    def test_any_number_may_be_requested(self, num_threads):
        """No process ends, and no 2,000 threads are started."""
        code = f"print(more_threads(num_threads={num_threads}), more_threads())"
        more, default = printed(code, FASTATTN_NUM_THREADS=str(num_threads))
        assert 1 < more < threads.MAX_THREADS
        assert more + default < threads.MAX_THREADS

    def test_no_more_threads_than_tasks(self):
        """Tasks are query blocks, or with split-KV key tiles of a head."""
        code = """
from fastattn._machine.constants import FUSED_LANES
from fastattn.backends.cython import backend as cython_cpu
target = cython_cpu.driver.target(4)
lanes = target["lanes"]
rows = FUSED_LANES if target["has_fused"] else lanes * target["max_vectors"]
vectors = -(-512 // lanes)
few = x[:, :3, :2], np.repeat(x[:, :3], 4, axis=2)
before = threads()
fastattn.attention(few[0], few[1], few[1], num_threads=50)
after = threads()
print(after - before, 3 * 2048 // 256)
query = x[:, :3]
more = more_threads(query, fastattn.attention(query, query, query, num_threads=1), num_threads=50)
print(threads() - before, min(50, 3 * -(-vectors // (rows // lanes))))
"""
        few, few_tasks, many, many_tasks = printed(code)
        assert (few + 1, many + 1) == (few_tasks, many_tasks)


@pytest.mark.parametrize("num_threads", [2**31, 2**63, 2**64, np.uint64(2**63)], ids=str)
def test_numbers_that_no_runtime_counts_to(backend, num_threads):
    x = np.ones((1, 2, 300, 8), np.float32)
    with pytest.raises(ValueError, match=r"^num_threads must be a positive integer below 2\*\*31, got "):
        backend.attention(x, x, x, num_threads=num_threads)
    with pytest.raises(ValueError, match=r"^num_threads must be a positive integer below 2\*\*31, got "):
        fastattn.set_num_threads(num_threads)


def test_such_a_number_in_the_environment(monkeypatch):
    monkeypatch.setattr(host, "_num_threads", None)
    monkeypatch.setenv("FASTATTN_NUM_THREADS", str(2**31))
    with pytest.raises(ValueError, match=r"^FASTATTN_NUM_THREADS must be a positive integer below 2\*\*31"):
        fastattn.get_num_threads()


@linux_only
class TestThreadsThatCannotBeStarted:
    """Numba's pools end the process, or wait for ever, where one cannot."""

    @pytest.mark.usefixtures("compiled")
    def test_compiled(self):
        code = """
leave_room(5, stack=2 << 20)
first = more_threads(num_threads=40)
print(first, more_threads(num_threads=40) + first, more_threads(num_threads=2))
"""
        first, second, third = printed(code)
        assert 0 <= first <= 7  # the memory left is that of two stacks more
        assert first <= second <= 7
        assert third == 0

    @pytest.mark.usefixtures("compiled")
    def test_in_another_python_thread(self):
        """Which has the same workers, and starts those that lack."""
        code = """
more_threads(num_threads=4)
leave_room(4, stack=2 << 20)
def call():
    print(more_threads(num_threads=40))
thread = threading.Thread(target=call)
thread.start()
thread.join()
"""
        (more,) = printed(code)
        assert 0 <= more <= 6

    @pytest.mark.slow
    def test_numba(self, pool_environment):
        (more,) = printed(
            "leave_room(2); print(more_threads(num_threads=4))", backend="numba", **pool_environment
        )
        assert more == 0

    @pytest.mark.skipif(
        not hasattr(os, "getuid") or os.getuid() != 0, reason="root may become a user without processes"
    )
    @pytest.mark.parametrize("backend", ["cython", pytest.param("numba", marks=pytest.mark.slow)])
    def test_a_limit_on_the_processes_of_a_user(self, backend):
        """As set by `ulimit -u`; it does not apply to root, so the test runs as another user."""
        pytest.importorskip("fastattn.backends.cython.driver" if backend == "cython" else "numba")
        code = """
resource.setrlimit(resource.RLIMIT_NPROC, (5, 5))
os.setresuid(54321, 54321, 54321)
print(more_threads(num_threads=40), more_threads(num_threads=40), threads())
"""
        *_, after = printed(code, backend=backend, NUMBA_NUM_THREADS="40")
        assert after <= 5

    @pytest.mark.parametrize("started", [0, 1, 6, 7])
    def test_numba_is_tried_once_for_each_python_thread(self, monkeypatch, started):
        numba = pytest.importorskip("numba")
        from fastattn.backends.numba import threads as numba_threads

        tried = []
        monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", 7)
        monkeypatch.setattr(numba_threads, "_tried", threading.local())
        monkeypatch.setattr(
            numba_threads, "_startable", lambda count: tried.append(count) or min(count, started)
        )
        limits = [numba_threads.thread_limit(count) for count in (1, 3, 2, 7, 9)]
        assert limits == ([1, 3, 2, 7, 7] if started == 7 else [1] * 5)
        assert tried == ([7] if started == 7 else [7] * 4)

    def test_the_trial_leaves_no_thread(self):
        pytest.importorskip("numba")
        code = """
from fastattn.backends.numba.threads import _startable
before = threads()
assert _startable(20) == 20
print(threads() - before)
"""
        assert printed(code) == [0]

    def test_no_more_than_the_bound(self):
        assert threads.thread_limit(10**6) == threads.MAX_THREADS


class TestOmpNumThreads:
    """The default where FASTATTN_NUM_THREADS is absent, as job schedulers set it."""

    @pytest.fixture(autouse=True)
    def nothing_set(self, monkeypatch):
        monkeypatch.setattr(host, "_num_threads", None)
        monkeypatch.delenv("FASTATTN_NUM_THREADS", raising=False)

    @pytest.mark.parametrize(
        "text, count", [("1", 1), ("3", 3), (" 3 ", 3), ("4,2", 4), ("7 , 2,1", 7), ("+2", 2), ("0012", 12)]
    )
    def test_it_counts(self, monkeypatch, text, count):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert fastattn.get_num_threads() == count
        assert host.num_threads_and_source() == (count, "OMP_NUM_THREADS")

    @pytest.mark.parametrize(
        "text",
        [
            "",
            " ",
            "two",
            "0",
            "-2",
            "1.5",
            "4,0",
            "4,x",
            "4,",
            ",4",
            "4 2",
            "2**3",
            "9" * 5000,
            str(2**31),
            "٣",
        ],
    )
    def test_nonsense_is_passed_over(self, monkeypatch, text):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert fastattn.get_num_threads() == host.available_cores()

    def test_others_go_before_it(self, monkeypatch):
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        monkeypatch.setenv("FASTATTN_NUM_THREADS", "5")
        assert fastattn.get_num_threads() == 5
        monkeypatch.setattr(host, "_num_threads", 7)
        assert fastattn.get_num_threads() == 7

    @linux_only
    @pytest.mark.usefixtures("compiled")
    @pytest.mark.parametrize("text, more", [("1", 0), ("3", 2), ("4,2", 3)])
    def test_a_call_runs_on_as_many(self, text, more):
        assert printed("print(more_threads())", OMP_NUM_THREADS=text) == [more]

    @linux_only
    @pytest.mark.usefixtures("compiled")
    def test_more_may_be_asked_for(self):
        code = "print(more_threads(num_threads=3))"
        assert printed(code, OMP_NUM_THREADS="1") == [2]
        assert printed("print(more_threads())", OMP_NUM_THREADS="1", FASTATTN_NUM_THREADS="4") == [3]

    @pytest.mark.parametrize(
        "variables, shown",
        [
            ({}, "(from the usable cores)"),
            ({"OMP_NUM_THREADS": "5,2"}, "5 (from OMP_NUM_THREADS)"),
            ({"OMP_NUM_THREADS": "5", "FASTATTN_NUM_THREADS": "6"}, "6 (from FASTATTN_NUM_THREADS)"),
            ({"FASTATTN_NUM_THREADS": "many"}, "error: FASTATTN_NUM_THREADS must be"),
        ],
        ids=str,
    )
    def test_show_config_says_where_it_comes_from(self, monkeypatch, capsys, variables, shown):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        for name, text in variables.items():
            monkeypatch.setenv(name, text)
        fastattn.show_config()
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("threads ")]
        assert shown in line

    def test_show_config_says_so_of_set_num_threads(self, monkeypatch, capsys):
        monkeypatch.setattr(host, "_num_threads", 3)
        fastattn.show_config()
        assert "threads   3 (from set_num_threads)\n" in capsys.readouterr().out


class TestThreadpoolctl:
    """Its limits hold whatever OpenMP's default is, and for all Python threads."""

    @linux_only
    @pytest.mark.usefixtures("compiled")
    @pytest.mark.parametrize(
        "imports",
        [
            "fastattn, threadpoolctl",
            pytest.param("threadpoolctl, fastattn", marks=pytest.mark.slow),
        ],
    )
    @pytest.mark.parametrize("default", [1, pytest.param(2, marks=pytest.mark.slow), 8])
    def test_whatever_the_default_of_openmp_is(self, default, imports):
        code = f"""
import os, numpy as np, {imports}
x = np.random.default_rng(0).standard_normal((1, 8, 512, 64)).astype(np.float32)

def more_threads():
    before = len(os.listdir("/proc/self/task"))
    fastattn.attention(x, x, x)
    return len(os.listdir("/proc/self/task")) - before

for limit in (1, 2, 3):
    with threadpoolctl.threadpool_limits(limit):
        print(more_threads())
print(more_threads())
"""
        variables = {
            "OMP_NUM_THREADS": str(default),
            "FASTATTN_NUM_THREADS": "8",
            "FASTATTN_BACKEND": "cython",
        }
        assert python(code, env=variables).split() == ["0", "1", "1", "5"]

    @pytest.fixture
    def limits(self):
        threadpoolctl = pytest.importorskip("threadpoolctl")
        return threadpoolctl.threadpool_limits

    @staticmethod
    def in_a_thread(function):
        found = []
        thread = threading.Thread(target=lambda: found.append(function()))
        thread.start()
        thread.join()
        return found[0]

    @pytest.mark.parametrize("user_api", [None, "openmp", "blas"])
    def test_other_threads_see_it(self, limits, user_api):
        wanted = fastattn.get_num_threads()
        with limits(2, user_api=user_api):
            assert fastattn.get_num_threads() == wanted  # not limited, see its docstring
            assert threads.thread_limit(5) == 2
            assert self.in_a_thread(lambda: threads.thread_limit(5)) == 2
        assert threads.thread_limit(5) == 5
        assert self.in_a_thread(lambda: threads.thread_limit(5)) == 5

    def test_a_limit_on_fastattn_alone(self, limits):
        """As docs/promises.md writes it."""
        controller = pytest.importorskip("threadpoolctl").ThreadpoolController()
        others = [it for it in controller.info() if it["internal_api"] != "fastattn"]
        with controller.select(internal_api="fastattn").limit(limits=1):
            assert threads.thread_limit(5) == 1
            assert [it for it in controller.info() if it["internal_api"] != "fastattn"] == others
        assert threads.thread_limit(5) == 5

    def test_a_thread_of_its_own_limit(self, limits):
        def inner():
            with limits(3):
                return threads.thread_limit(5), self.in_a_thread(lambda: threads.thread_limit(5))

        with limits(2):
            assert self.in_a_thread(inner) == (3, 2)
            assert self.in_a_thread(lambda: threads.thread_limit(5)) == 2
        assert threads._limits == {}

    def test_limits_that_end_in_any_order(self, limits):
        """Two threads enter, and the one that came first leaves first."""
        entered, left = threading.Event(), threading.Event()

        def second():
            with limits(1):
                entered.set()
                left.wait(20)

        thread = threading.Thread(target=second)
        with limits(1):
            thread.start()
            entered.wait(20)
        left.set()
        thread.join()
        assert threads.thread_limit(5) == 5

    def test_nested(self, limits):
        with limits(4):
            with limits(2):
                assert threads.thread_limit(5) == 2
            assert threads.thread_limit(5) == 4
        assert threads.thread_limit(5) == 5

    def test_the_lower_of_two_apis(self, limits):
        """A limit on BLAS is one on calls, but raises no limit on OpenMP, nor the other way round."""
        with limits(3, user_api="blas"):
            assert threads.thread_limit(5) == 3
            assert self.in_a_thread(lambda: threads.thread_limit(5)) == 3
            with limits(2, user_api="openmp"):
                assert threads.thread_limit(5) == 2
                with limits(4, user_api="blas"):
                    assert threads.thread_limit(5) == 2
                with limits(4):
                    assert threads.thread_limit(5) == 4
                with limits("sequential_blas_under_openmp"):
                    assert threads.thread_limit(5) == 1
            assert threads.thread_limit(5) == 3
        assert threads.thread_limit(5) == 5
        assert threads._limits == {}

    def test_it_raises_no_number(self, limits):
        with limits(9):
            assert threads.thread_limit(5) == 5

    def test_a_number_set_within_outlives_the_limit(self, limits, monkeypatch):
        monkeypatch.setattr(host, "_num_threads", 3)
        with limits(2):
            fastattn.set_num_threads(6)
        assert threads.thread_limit(fastattn.get_num_threads()) == 6

    @pytest.mark.parametrize("api, listed", [(None, (2, 2)), ("openmp", (2, 3)), ("blas", (3, 2))])
    def test_it_is_listed_once_for_each_api(self, limits, monkeypatch, api, listed):
        import threadpoolctl

        monkeypatch.setattr(host, "_num_threads", 3)
        with limits(2, user_api=api):
            ours = [pool for pool in threadpoolctl.threadpool_info() if pool["internal_api"] == "fastattn"]
            found = {pool["user_api"]: pool["num_threads"] for pool in ours}
            assert len(ours) == 2
            assert (found["openmp"], found["blas"]) == listed

    def test_show_config_shows_it(self, limits, monkeypatch, capsys):
        monkeypatch.setattr(host, "_num_threads", 3)
        with limits(2):
            fastattn.show_config()
        assert "threads   3 (from set_num_threads), at most 2 (threadpoolctl)\n" in capsys.readouterr().out

    @pytest.mark.slow
    def test_numba(self, pool_environment):
        """On each of its pools, whatever OpenMP's default is."""
        code = """
import threadpoolctl
import fastattn
from fastattn.backends.numba.threads import thread_limit
limits = [thread_limit(4)]
for limit in (1, 3, 4):
    with threadpoolctl.threadpool_limits(limits=limit):
        limits.append(thread_limit(4))
print(limits + [thread_limit(4)])
"""
        assert python(code, env=pool_environment | {"OMP_NUM_THREADS": "3"}).strip() == "[4, 1, 3, 4, 4]"

    def test_an_old_version_has_nothing_to_register_with(self):
        code = """
import types, sys
sys.modules["threadpoolctl"] = types.ModuleType("threadpoolctl")
import fastattn
"""
        python(code)

    def test_finding_it_does_not_import_it(self):
        code = """
import importlib.util, sys
import fastattn
spec = importlib.util.find_spec("threadpoolctl")
assert "threadpoolctl" not in sys.modules
import threadpoolctl
assert type(threadpoolctl.__loader__).__module__ != "fastattn._machine.threads"
assert "fastattn" in {pool["internal_api"] for pool in threadpoolctl.threadpool_info()}
"""
        pytest.importorskip("threadpoolctl")
        python(code)
