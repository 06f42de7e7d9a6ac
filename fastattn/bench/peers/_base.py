"""What an adapter is: a version and the ways in which its library can compute a case."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fastattn.bench.cases import Case, Inputs


class Unable(Exception):
    """A library cannot express a case; the message says why."""


@dataclass(frozen=True, slots=True)
class Call:
    """A case made ready in one library."""

    run: Callable[[], object]  #: what is timed; does all of the work, and nothing but it
    result: Callable[[], np.ndarray]  #: runs it and gives the output as ``(B, H, L, E)``; not timed


class Peer(Protocol):
    """The interface that `worker` drives. The module has ``load(num_threads) -> Peer``."""

    version: str
    #: Each way by its label. All are checked; the fastest right one is timed.
    #: A way raises `Unable`, or its library's own error, when the library cannot do the case.
    ways: Mapping[str, Callable[[Case, Inputs], Call]]
