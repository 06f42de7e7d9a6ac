"""How each library computes a case: one small module per library, loaded only inside its own worker."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from fastattn.bench.case import Case
from fastattn.bench.peers._base import Call, Peer, Products, Redundant, Unable

__all__ = [
    "DEFAULT_PEERS",
    "OURS",
    "PEERS",
    "Call",
    "Peer",
    "PeerSpec",
    "Products",
    "Redundant",
    "Unable",
    "load_peer",
    "taking_part",
]


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """Where the adapter of a library is, and the environment its process needs."""

    module: str
    environment: dict[str, str] = field(default_factory=dict)
    default: bool = True  #: whether it takes part when nobody says which libraries should
    #: The cases in which it differs from another one: beside products of a model, or in bfloat16.
    only: Literal["models", "bfloat16"] | None = None


def _ours(backend: str, *, default: bool = False, **environment: str) -> PeerSpec:
    return PeerSpec("fastattn_api", {"FASTATTN_BACKEND": backend, **environment}, default)


#: Every library by its name on the command line, in the order of the tables.
PEERS: dict[str, PeerSpec] = {
    "fastattn": _ours("cython", default=True),
    "fastattn-avx2": _ours("cython", FASTATTN_ISA="avx2"),
    "fastattn-numba": _ours("numba"),
    "fastattn-reference": _ours("reference"),
    "fastattn-shared": PeerSpec("fastattn_shared", {"FASTATTN_BACKEND": "cython"}, only="models"),
    "fastattn-storage": PeerSpec(
        "fastattn_storage", {"FASTATTN_BACKEND": "cython"}, default=False, only="bfloat16"
    ),
    "numpy": PeerSpec("numpy_formula"),
    "torch": PeerSpec("torch_sdpa"),
    "torch-flex": PeerSpec("torch_flex", default=False),
    "onnxruntime": PeerSpec("onnx_runtime"),
    "openvino": PeerSpec("openvino_sdpa"),
    "jax": PeerSpec("jax_xla"),
}

#: Those that are this project; the ratios are the others' time over the first one's.
OURS: tuple[str, ...] = tuple(name for name, spec in PEERS.items() if spec.module.startswith("fastattn_"))

#: Those that take part when nobody says which libraries should.
DEFAULT_PEERS: tuple[str, ...] = tuple(name for name, spec in PEERS.items() if spec.default)


def taking_part(names: Sequence[str], case: Case) -> list[str]:
    """Those of the libraries `names` that `case` is for."""
    has = {None: True, "models": case.model_dim is not None, "bfloat16": case.dtype == "bfloat16"}
    return [name for name in names if has[PEERS[name].only]]


def load_peer(name: str, num_threads: int) -> Peer:
    """The adapter called `name`; raises whatever its library raises when it cannot be imported.

    Raises
    ------
    Unable
        A package that the adapter needs is not installed.
    """
    try:
        module = importlib.import_module(f"fastattn.bench.peers.{PEERS[name].module}")
    except ModuleNotFoundError as error:
        if error.name is None or "." in error.name:  # a part of a package that is there
            raise
        raise Unable(f"{error.name} is not installed: pip install {error.name}") from error
    return module.load(num_threads)
