"""How each library computes a case: one small module per library, loaded only inside its own worker."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field

from fastattn.bench.peers._base import Call, Peer, Unable

__all__ = ["DEFAULT_PEERS", "OURS", "PEERS", "Call", "Peer", "PeerSpec", "Unable", "load_peer"]


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """Where the adapter of a library is, and the environment its process needs."""

    module: str
    environment: dict[str, str] = field(default_factory=dict)
    default: bool = True  #: whether it takes part when nobody says which libraries should


#: Every library by its name on the command line, in the order of the tables.
PEERS: dict[str, PeerSpec] = {
    "fastattn": PeerSpec("fastattn_cython"),
    "fastattn-avx2": PeerSpec("fastattn_cython", {"FASTATTN_ISA": "avx2"}, default=False),
    "numpy": PeerSpec("numpy_formula"),
    "torch": PeerSpec("torch_sdpa"),
    "onnxruntime": PeerSpec("onnx_runtime"),
    "openvino": PeerSpec("openvino_sdpa"),
}

#: Those that are this project; the ratios are the others' time over the first one's.
OURS: tuple[str, ...] = ("fastattn", "fastattn-avx2")

#: Those that take part when nobody says which libraries should.
DEFAULT_PEERS: tuple[str, ...] = tuple(name for name, spec in PEERS.items() if spec.default)


def load_peer(name: str, num_threads: int) -> Peer:
    """The adapter called `name`; raises whatever its library raises when it cannot be imported."""
    return importlib.import_module(f"fastattn.bench.peers.{PEERS[name].module}").load(num_threads)
