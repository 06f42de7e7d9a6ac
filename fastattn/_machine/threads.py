"""How many threads a call may have, and forks.

`thread_limit` is the only bound on the number of threads, for every backend. A driver uses fewer where a call
has fewer tasks.
"""

from __future__ import annotations

import _thread  # and not threading, whose import takes a twentieth of the package's
import os
import sys
from collections.abc import Callable
from typing import Any

from fastattn._machine import host
from fastattn._version import __version__

#: A call starts no more threads than this, whatever `num_threads` is. More threads than CPUs gain nothing, as
#: they compute all the time; twice as many are allowed for experiments and for machines that report too few
#: CPUs, and 64 for tests on small machines. Each costs a stack and scratch memory.
MAX_THREADS = max(64, 2 * (os.cpu_count() or 1))

_forked = False
#: What threadpoolctl sees of the package, as one more OpenMP runtime and one more BLAS: a file that is loaded
#: with any backend, and that it has no controller for.
_FILES = {"openmp": "_multiarray_umath", "blas": "_umath_linalg"}
_limits: dict[tuple[str, int], int] = {}  # set by threadpoolctl, by the API and the Python thread that set it


class _NoFork:
    """A lock that is held during work that a forked child cannot continue, and by a thread that forks.

    A thread that waits to fork has priority over later threads: else one that takes the lock repeatedly would
    starve it.
    """

    def __init__(self) -> None:
        self._lock, self._gate = _thread.RLock(), _thread.RLock()
        self._holds: list[tuple[Callable[[], object], Callable[[], object]]] = []
        self._held: list[Callable[[], object]] = []  # releases for the current fork
        self._is_held = False  # by the current fork
        self._watches = False  # whether the fork hooks are registered

    def __enter__(self) -> None:
        if not self._watches:
            self._watch()
        self.let_forks_pass()
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def let_forks_pass(self) -> None:
        """Waits for a pending fork, unless that waits for the calling thread."""
        if not self._lock._is_owned():  # type: ignore[attr-defined]  # as `threading.Condition` asks it
            with self._gate:
                pass

    def hold_at_fork(self, acquire: Callable[[], object], release: Callable[[], object]) -> None:
        """Registers `acquire`, to be called before each fork with this lock held, and `release` after it."""
        self._holds.append((acquire, release))

    def _watch(self) -> None:
        """Registers the fork hooks, on the first use of this lock."""
        import logging  # noqa: F401  # whose own hooks must be added first, to run after ours

        with self._lock:
            if not self._watches and hasattr(os, "register_at_fork"):
                os.register_at_fork(
                    before=self._before_fork,
                    after_in_parent=self._after_fork,
                    after_in_child=self._after_fork,
                )
            self._watches = True

    def _before_fork(self) -> None:
        self._gate.acquire()
        self._lock.acquire()
        for acquire, release in self._holds:
            acquire()
            self._held.append(release)
        self._is_held = True

    def free_in_child(self) -> None:
        """Makes the locks anew where this fork did not hold them: it came before the hooks."""
        if not self._is_held:
            self._lock, self._gate = _thread.RLock(), _thread.RLock()

    def _after_fork(self) -> None:
        if not self._is_held:  # these hooks were registered during the fork
            return
        self._is_held = False
        while self._held:
            self._held.pop()()
        self._lock.release()
        self._gate.release()


#: Held during imports that a call needs, and during compilation: in a child forked then, the lock of a module
#: or of a compiler would never be released.
no_fork = _NoFork()


def thread_limit(wanted: int) -> int:
    """How many threads a call that wants `wanted` may use: no more than MAX_THREADS and than threadpoolctl
    allows. Where fewer can be started, a call gets those."""
    allowed = min(wanted, MAX_THREADS)
    if _limits and (limit := limit_by_threadpoolctl()) is not None:
        allowed = min(allowed, limit)
    return allowed


def is_forked() -> bool:
    """Whether this process was forked from one that had loaded the package, whose threads it does not
    have."""
    return _forked


# threadpoolctl ------------------------------------------------------------------------------------


def limit_by_threadpoolctl() -> int | None:
    """The lower of the limits on OpenMP's and on BLAS's threads, for the calling thread."""
    limits = [limit for api in _FILES if (limit := _limit_of(api)) is not None]
    return min(limits, default=None)


def _limit_of(api: str) -> int | None:
    """The limit that the calling thread has set, or else the smallest of other threads."""
    if (own := _limits.get((api, _thread.get_ident()))) is not None:
        return own
    return min((limit for (limited, _), limit in list(_limits.items()) if limited == api), default=None)


class _Reported(int):
    """A number of threads as reported to threadpoolctl, which passes it back when its limit ends."""

    limit: int | None  #: set by the reporting thread, None: none


def _reported(api: str) -> _Reported:
    try:
        count = min(host.get_num_threads(), MAX_THREADS)
    except ValueError:  # a bad FASTATTN_NUM_THREADS, for which a call raises
        count = host.available_cores()
    limit = _limit_of(api)
    reported = _Reported(count if limit is None else min(count, limit))
    reported.limit = _limits.get((api, _thread.get_ident()))
    return reported


def _set_limit(api: str, limit: int) -> None:
    """Sets a limit for the calling thread, and for all that have set none; or restores a reported state."""
    wanted = limit.limit if isinstance(limit, _Reported) else max(1, limit)
    if wanted is None:
        _limits.pop((api, _thread.get_ident()), None)
    else:
        _limits[api, _thread.get_ident()] = wanted
    host.threads_changed()


def _register(threadpoolctl: Any) -> None:
    """Lets threadpoolctl see and limit the threads of calls: a limit on BLAS alone is one on them, too."""
    if not hasattr(threadpoolctl, "register"):  # before version 3.2
        return

    class Controller(threadpoolctl.LibController):  # type: ignore[misc]
        internal_api = "fastattn"

        def get_num_threads(self) -> int:
            return _reported(self.user_api)

        def set_num_threads(self, num_threads: int) -> None:
            _set_limit(self.user_api, num_threads)

        def get_version(self) -> str:
            return __version__

    for api, file in _FILES.items():
        threadpoolctl.register(type(api, (Controller,), {"user_api": api, "filename_prefixes": (file,)}))


class _Finder:
    """Registers with threadpoolctl when that is imported, as fastattn does not import it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "threadpoolctl":
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec: Any = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                _register(module)

            spec.loader.exec_module = exec_module
        return spec


if "threadpoolctl" in sys.modules:
    _register(sys.modules["threadpoolctl"])
else:
    sys.meta_path.insert(0, _Finder())


# Forks --------------------------------------------------------------------------------------------


def _in_child() -> None:
    global _forked
    _forked = True
    no_fork.free_in_child()
    host.threads_changed()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
