"""Temporary: `rope_tables`, `rope` and `KVCache` until the package has them."""

from __future__ import annotations

import numpy as np

import fastattn


def rope_tables(n_positions, rotary_dim, *, base=10000.0, scaling=None, dtype=np.float32):
    factor = scaling[1] if scaling and scaling[0] == "linear" else 1.0
    angles = np.arange(n_positions)[:, None] / factor * base ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def rope(x, cos, sin, *, positions=None, interleaved=False, inverse=False, layout="bhsd", out=None):
    assert interleaved and layout == "bshd"
    c, s = cos[positions][..., None, :], sin[positions][..., None, :]
    r = 2 * cos.shape[-1]
    result = x.copy()
    a, b = x[..., 0:r:2], x[..., 1:r:2]
    result[..., 0:r:2] = a * c - b * s
    result[..., 1:r:2] = a * s + b * c
    if out is not None:
        out[...] = result
        return out
    return result


class KVCache:
    def __init__(self, batch, num_kv_heads, head_dim, value_dim=None, *, dtype="float32", layout="bhsd"):
        assert batch == 1 and layout == "bshd"
        import ml_dtypes

        self.name = dtype
        self.kind = np.dtype(
            ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32 if dtype == "int8" else dtype
        )
        self.data = [np.empty((1, 0, num_kv_heads, d), self.kind) for d in (head_dim, value_dim or head_dim)]
        self.lengths = np.zeros(1, np.int64)

    @property
    def nbytes(self):
        return sum(x[:, : self.lengths[0]].nbytes for x in self.data) // (4 if self.name == "int8" else 1)

    def step(self, query, key, value, **options):
        n = self.lengths[0]
        for i, x in enumerate((key, value)):
            if self.name == "int8":
                scale = (np.abs(x).max(axis=-1, keepdims=True) / 127).astype(np.float32)
                x = np.rint(x / np.where(scale == 0, 1, scale)) * scale
            if n + x.shape[1] > self.data[i].shape[1]:
                new = np.empty((1, 2 * (n + x.shape[1]), *x.shape[2:]), self.kind)
                new[:, :n] = self.data[i][:, :n]
                self.data[i] = new
            self.data[i][:, n : n + x.shape[1]] = x
        self.lengths = self.lengths + key.shape[1]
        k, v = (x[:, : self.lengths[0]] for x in self.data)
        return fastattn.attention(query, k, v, causal="bottom_right", layout="bshd", **options)

    def truncate(self, lengths):
        self.lengths = np.broadcast_to(np.asarray(lengths, np.int64), (1,)).copy()

    def keys(self, item):
        return self.data[0][item, : self.lengths[item]].astype(np.float32).transpose(1, 0, 2)

    def values(self, item):
        return self.data[1][item, : self.lengths[item]].astype(np.float32).transpose(1, 0, 2)


for _name in ("rope_tables", "rope", "KVCache"):
    if not hasattr(fastattn, _name):
        setattr(fastattn, _name, globals()[_name])
