"""fastattn with NumPy's matrix products on its own threads: `fastattn.share_threads_with_blas`."""

from __future__ import annotations

import fastattn
from fastattn.bench.peers import fastattn_api
from fastattn.bench.peers._base import Unable


def load(num_threads: int) -> fastattn_api.Fastattn:
    peer = fastattn_api.load(num_threads)
    if not fastattn.share_threads_with_blas():
        raise Unable("share_threads_with_blas() is not possible here: python -m fastattn info says why")
    return peer
