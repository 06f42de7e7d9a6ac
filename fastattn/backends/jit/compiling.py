"""Compilation, one at a time, and never during a fork: a child would inherit locks of Numba's or llvmlite's
that no thread of its own releases, or their half-built state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite.binding import ffi as llvm
from numba.core import entrypoints
from numba.core import event as numba_events
from numba.core.compiler_lock import global_compiler_lock

from fastattn._machine.threads import no_fork

_llvm_lock: Any = getattr(llvm.lib, "_lock", None)  # llvmlite has no public name for it


@contextmanager
def compiling() -> Iterator[None]:
    """Held by all that types, lowers or compiles. Numba's lock is taken second, as a forking thread does."""
    with no_fork, global_compiler_lock:
        yield


class _LetForksPass(numba_events.Listener):
    """Lets forks pass also before compilations that other packages start."""

    def on_start(self, event: Any) -> None:
        if not global_compiler_lock.is_locked():  # by this thread
            no_fork.let_forks_pass()

    def on_end(self, event: Any) -> None:
        pass


def _stop_compilers() -> None:
    """Waits until no thread compiles, whoever began it."""
    global_compiler_lock.acquire()
    if _llvm_lock is not None:
        _llvm_lock.__enter__()


def _let_compilers_go_on() -> None:
    if _llvm_lock is not None:
        _llvm_lock.__exit__(None, None, None)
    global_compiler_lock.release()


# Numba imports its extensions, ours among them, in the first compilation and under its own lock. Ours takes
# no_fork, which must be taken before that lock. So extensions are imported now.
entrypoints.init_all()
numba_events.register("numba:compiler_lock", _LetForksPass())
no_fork.hold_at_fork(_stop_compilers, _let_compilers_go_on)
