"""The machine and the environment: cores, CPU, caches and environment variables.

The only reader of ``os.environ``. A bad value of a variable is an error when it is used, never when
`fastattn` is imported.
"""

from __future__ import annotations

import operator
import os
import re
from contextlib import contextmanager
from functools import cache
from math import ceil
from typing import TYPE_CHECKING, Any

from fastattn._machine.constants import ISAS, MODEL_ISAS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_CPUS = "/sys/devices/system/cpu"
_CGROUP_ROOT = "/sys/fs/cgroup"
_CACHES = f"{_CPUS}/cpu0/cache"

_MAX_COUNT = 2**31 - 1  # of threads: OpenMP and Numba count them in 32 bits
_OMP_LIST = r"\s*\+?\d{1,18}\s*(,\s*\+?\d{1,18}\s*)*"

# `os.environ` encodes a name and decodes its value at each access: a microsecond, as some calls take.
_environment: Any = getattr(os.environ, "_data", os.environ)
_BACKEND, _NUM_THREADS, _OMP_NUM_THREADS = (
    name if _environment is os.environ else os.environ.encodekey(name)
    for name in ("FASTATTN_BACKEND", "FASTATTN_NUM_THREADS", "OMP_NUM_THREADS")
)

_num_threads: int | None = None  # set by set_num_threads

#: Called when calls may have another number of threads than before.
on_threads_changed: list[Callable[[], object]] = []


def available_cores() -> int:
    """Cores that this process may use: its affinity, no more than its cgroup's CPU quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        cores = os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, ceil(quota)))


def cores_of_cpus() -> list[int]:
    """The core of each CPU, named by the core's lowest CPU: hyper-threads share one. Empty where the system
    does not tell."""
    try:
        last = int(re.split("[,-]", _read(f"{_CPUS}/possible"))[-1])
    except (OSError, ValueError):
        return []
    return [_core_of(cpu) for cpu in range(last + 1)]


def _core_of(cpu: int) -> int:
    try:
        first = int(re.split("[,-]", _read(f"{_CPUS}/cpu{cpu}/topology/thread_siblings_list"))[0])
        return min(first, cpu)
    except (OSError, ValueError):  # it is offline
        return cpu


@cache
def cpu_quota() -> float | None:
    """The CPU quota of this process's cgroups (v1 or v2) in CPUs, None when unlimited."""
    try:
        memberships = _read("/proc/self/cgroup").splitlines()
    except OSError:
        return None
    quotas = []
    for membership in memberships:
        if membership.count(":") < 2:
            continue  # not a line of hierarchy:controllers:path
        _, controllers, path = membership.split(":", 2)
        if controllers == "":
            for root in ("", "/unified"):
                quotas += _quotas(f"{_CGROUP_ROOT}{root}", path, "cpu.max")
        elif "cpu" in controllers.split(","):
            for root in (controllers, "cpu"):
                quotas += _quotas(f"{_CGROUP_ROOT}/{root}", path, "cpu.cfs_quota_us", "cpu.cfs_period_us")
    return min(quotas, default=None)


def set_num_threads(num_threads: int) -> None:
    """Set how many threads calls use from now on in this process.

    Parameters
    ----------
    num_threads : int
        At least 1. `get_num_threads` says what the default is; ``num_threads=`` of a call overrides both. No
        result depends on it.

    Raises
    ------
    TypeError
        Not an integer.
    ValueError
        Below 1, or not below 2**31.

    Notes
    -----
    A call uses no more threads than it has tasks, than twice the machine's CPUs (or 64, if that is more), or
    than the process can start.

    Examples
    --------
    >>> import fastattn
    >>> before = fastattn.get_num_threads()
    >>> fastattn.set_num_threads(1)
    >>> fastattn.get_num_threads()
    1
    >>> fastattn.set_num_threads(before)
    """
    global _num_threads
    _num_threads = check_num_threads(num_threads, "num_threads")
    threads_changed()


def threads_changed() -> None:
    """Tells those who remember how many threads a call may have."""
    for changed in on_threads_changed:
        changed()


def get_num_threads() -> int:
    """How many threads calls are set to use, where they have no ``num_threads=``.

    A limit of threadpoolctl does not change this number: calls then use no more threads than the limit, and
    `show_config` shows both.

    Returns
    -------
    int
        The first of these that is set: `set_num_threads`; FASTATTN_NUM_THREADS; OMP_NUM_THREADS (of a list
        the first number; a value that OpenMP cannot parse is ignored); the cores that this process may use
        (its affinity, and the CPU quota of its cgroup).

    Raises
    ------
    ValueError
        FASTATTN_NUM_THREADS is not a positive integer.

    Examples
    --------
    >>> import fastattn
    >>> fastattn.get_num_threads() >= 1
    True
    """
    return num_threads_and_source()[0]


def num_threads_and_source() -> tuple[int, str]:
    """What `get_num_threads` gives, and where it comes from."""
    if _num_threads is not None:
        return _num_threads, "set_num_threads"
    if given := _environment.get(_NUM_THREADS):
        return _fastattn_num_threads(given), "FASTATTN_NUM_THREADS"
    given = _environment.get(_OMP_NUM_THREADS)
    count = None if given is None else _omp_num_threads(given)
    return (available_cores(), "the usable cores") if count is None else (count, "OMP_NUM_THREADS")


@cache
def _fastattn_num_threads(given: Any) -> int:
    text = os.fsdecode(given)
    try:
        return check_num_threads(int(text), "FASTATTN_NUM_THREADS")
    except ValueError:
        raise ValueError(
            f"FASTATTN_NUM_THREADS must be a positive integer below 2**31, got {text!r}"
        ) from None


@cache
def _omp_num_threads(given: Any) -> int | None:
    """OMP_NUM_THREADS; of a list, with a number for each level of nested regions, the first. None where it is
    no list of positive integers: OpenMP's runtimes ignore such a value, too."""
    text = os.fsdecode(given)
    if not re.fullmatch(_OMP_LIST, text, re.ASCII):
        return None
    counts = [int(number) for number in text.split(",")]
    return counts[0] if min(counts) >= 1 and max(counts) <= _MAX_COUNT else None


def threads_for(num_threads: int | None) -> int:
    """How many threads a call with this `num_threads` wants."""
    return get_num_threads() if num_threads is None else check_num_threads(num_threads, "num_threads")


def check_threads_of_call(num_threads: object) -> int | None:
    """The `num_threads` of a call; None where it is not given, see `threads_for`."""
    return None if num_threads is None else check_num_threads(num_threads, "num_threads")


def check_num_threads(value: object, name: str) -> int:
    """`value` as a thread count; raises where it is not one."""
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be a positive integer, got {value!r}") from None
    if not 1 <= count <= _MAX_COUNT:
        raise ValueError(f"{name} must be a positive integer below 2**31, got {value!r}")
    return count


def default_backend() -> str | None:
    """FASTATTN_BACKEND, or None."""
    name = _environment.get(_BACKEND)
    return os.environ["FASTATTN_BACKEND"] if name else None


@cache
def checks_indices() -> bool:
    """Whether reads of the caller's functions are bounds-checked. FASTATTN_CHECK_INDICES=0 at the first call
    of this function says no."""
    return os.environ.get("FASTATTN_CHECK_INDICES") != "0"


def blas_timeout() -> int | None:
    """OPENBLAS_THREAD_TIMEOUT as OpenBLAS interprets it, None where it is not set."""
    try:
        timeout = int(os.environ.get("OPENBLAS_THREAD_TIMEOUT", "0"))
    except ValueError:
        return None
    return min(max(timeout, 4), 30) if timeout > 0 else None


def environment_without(names: Iterable[str]) -> dict[str, str]:
    """This process's environment without these variables, for a child."""
    dropped = set(names)
    return {name: text for name, text in os.environ.items() if name not in dropped}


def forced_isa() -> str | None:
    """FASTATTN_ISA, or None; ValueError when it names no instruction set."""
    isa = os.environ.get("FASTATTN_ISA") or None
    if isa is not None and isa not in (*ISAS, *MODEL_ISAS):
        raise ValueError(f"FASTATTN_ISA must be one of {', '.join(ISAS)}, got {isa!r}")
    return isa


@contextmanager
def brief_openmp_spin() -> Iterator[None]:
    """An OpenMP runtime loaded within this context lets its idle threads sleep after some 30 us.

    By default libgomp's threads spin for about a millisecond, on cores that the threads of NumPy's BLAS need.
    Sleeping threads are also woken before a BLAS thread that spins. With the default a call between matrix
    products took four times as long; consecutive calls take the same time. (2 cores of Zen 4 EPYC,
    2026-11-20, `python -m fastattn demo`.) A setting of the user's is kept. The environment is restored.
    """
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        yield
        return
    os.environ["GOMP_SPINCOUNT"] = "2000"
    try:
        yield
    finally:
        del os.environ["GOMP_SPINCOUNT"]


def cpu_name() -> str:
    """The CPU's model name."""
    try:
        for line in _read("/proc/cpuinfo").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    import platform

    return platform.processor() or platform.machine()


def cache_sizes() -> dict[str, str]:
    """Sizes of the data caches that the first core sees, by level: ``{"L1": "32K", ...}``."""
    sizes = {}
    try:
        caches = sorted(os.listdir(_CACHES))
    except OSError:
        caches = []
    for cache_dir in caches:
        try:
            kind, level, size = (
                _read(f"{_CACHES}/{cache_dir}/{name}").strip() for name in ("type", "level", "size")
            )
        except OSError:
            continue
        if kind != "Instruction":
            sizes[f"L{level}"] = size
    return sizes


def _quotas(root: str, path: str, *files: str) -> list[float]:
    """Quotas, in CPUs, of the cgroup `path` and of all its ancestors. The files hold quota and period.

    In a container the path may be the host's, with only its root mounted.
    """
    parts = [part for part in path.split("/") if part]
    quotas = []
    for depth in range(len(parts), -1, -1):
        group = "/".join([root, *parts[:depth]])
        try:
            quota, period = map(int, " ".join(_read(f"{group}/{file}") for file in files).split())
        except (OSError, ValueError):  # no such file, or no limit: "max"
            continue
        if quota > 0 and period > 0:  # no limit may be -1, too
            quotas.append(quota / period)
    return quotas


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
