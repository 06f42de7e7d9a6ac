"""Which backend takes a problem: order of preference, lazy import, and the reasons when none can."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastattn._machine import host
from fastattn._machine.threads import no_fork

if TYPE_CHECKING:
    from fastattn._call.problem import Problem
    from fastattn.backends._base import Backend

#: backend name -> module that has it as `backend`
MODULES = {
    "cython": "fastattn.backends.cython.backend",
    "numba": "fastattn.backends.numba.backend",
    "reference": "fastattn.backends.reference.backend",
    "cuda": "fastattn.backends.cuda.backend",
}

#: For arrays on the host when no backend is named: the first that can take the problem is used.
PREFERRED = ("cython", "numba", "reference")

_loaded: dict[str, Backend] = {}
_has_warned = False


class BackendError(RuntimeError):
    """No backend, or not the one that was named, can take the problem; the message lists every reason."""


def load(name: str) -> Backend:
    """The backend `name`, imported on first use."""
    backend = _loaded.get(name)
    if backend is None:
        with no_fork:
            backend = _loaded[name] = import_module(MODULES[name]).backend
    return backend


def requested(name: str | None = None) -> str | None:
    """`name`, or else FASTATTN_BACKEND, or None; ValueError when it is not a backend."""
    argument = "backend"
    if name is None:
        name, argument = host.default_backend(), "FASTATTN_BACKEND"
    if name is not None and (not isinstance(name, str) or name not in MODULES):
        raise ValueError(f"{argument} must be one of {', '.join(MODULES)}, got {name!r}")
    return name


def select(problem: Problem[Any], name: str | None = None, *, gradients: bool = False) -> Backend:
    """The backend for `problem`, or for its gradients: the one named, FASTATTN_BACKEND, or the first that can
    take it; for arrays on a GPU only "cuda".

    Raises
    ------
    ValueError
        `name` or FASTATTN_BACKEND is not a backend.
    BackendError
        The backend named cannot take the problem, or none can.
    """
    name = requested(name)
    on_gpu = problem.device != "cpu"
    candidates = ("cuda",) if on_gpu else PREFERRED
    refusals = []
    for candidate in candidates if name is None else (name,):
        backend = load(candidate)
        if on_gpu and candidate != "cuda":
            reasons = [f"the arrays are on {problem.device}, and it computes on the CPU"]
        else:
            reasons = backend.unavailable_reasons() or backend.unsupported_reasons(problem)
            if gradients and not reasons:
                reasons = backend.gradient_reasons()
        if not reasons:
            if name is None and candidate == "reference":
                warn_without_kernels(
                    "attention runs on the NumPy backend, many times slower than compiled kernels", 4
                )
            return backend
        refusals.append(f"{candidate}: {'; '.join(reasons)}")
    who = "no backend can" if name is None else f"backend {name!r} cannot"
    raise BackendError(f"{who} take this problem:\n  " + "\n  ".join(refusals))


def warn_without_kernels(what: str, stacklevel: int) -> None:
    """Once in a process, where nothing was compiled and the environment names no backend."""
    global _has_warned
    reasons = load("cython").unavailable_reasons()
    if reasons and not _has_warned and host.default_backend() is None:
        _has_warned = True
        warnings.warn(
            f"{what}: {'; '.join(reasons)}. FASTATTN_BACKEND=numba or =reference says that this is meant, "
            "and silences it.",
            RuntimeWarning,
            stacklevel=stacklevel,
        )


def function(name: str, call: Any, wanted: str | None = None) -> Any:
    """The function `name`, as "rope", of the first backend that can run it: "reference" always can.

    Or of the backend `wanted`: BackendError where that cannot.
    """
    reasons: list[str] = []
    named = None if wanted is None else requested(wanted)
    for candidate in PREFERRED if named is None else (named,):
        backend = load(candidate)
        reasons = backend.function_reasons(name, call) or backend.unavailable_reasons()
        if not reasons:
            return getattr(backend, name)
    raise BackendError(f"backend {named!r} cannot run {name}: {'; '.join(reasons)}")


def usable(name: str, purpose: str) -> Any:
    """The backend `name`, where no other will do; BackendError, with the purpose, where it is unavailable."""
    backend = load(name)
    if reasons := backend.unavailable_reasons():
        raise BackendError(f"{purpose}, and {'; '.join(reasons)}")
    return backend
