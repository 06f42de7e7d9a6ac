"""The cache of GroupQueryAttention: its lengths, new rows in it, and its numbers of 8 or 4 bits."""

from __future__ import annotations

import numpy as np

from fastattn.integrations.onnx._common import check_choice, check_shape


def lengths_of(
    seqlens_k: np.ndarray, total_sequence_length: np.ndarray, B: int, L: int
) -> tuple[int, np.ndarray, np.ndarray]:
    """The largest length, the keys of each item, and where its new ones start."""
    check_shape("seqlens_k", seqlens_k, (B,), (B, 1))
    check_shape("total_sequence_length", total_sequence_length, (), (1,))
    total = int(total_sequence_length.reshape(()))
    lengths = seqlens_k.reshape(-1).astype(np.int64) + 1
    starts = np.zeros(B, np.int64) if total == L else lengths - L
    if total < L or np.any((lengths < 1) | (lengths > total) | (starts < 0)):
        raise ValueError(
            f"seqlens_k must be in {0 if total == L else L - 1}..{total - 1}, for {L} new tokens and a "
            f"total_sequence_length of {total}, got {seqlens_k.tolist()}"
        )
    return total, lengths, starts


def cached(
    side: str,
    new: np.ndarray,
    past: np.ndarray | None,
    scale: np.ndarray | None,
    quant_type: str | None,
    *,
    starts: np.ndarray,
    total: int,
    bits: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The cache with the new rows in it, and its rows up to the largest length as numbers."""
    check_choice(f"{side}_quant_type", quant_type, (None, "NONE", "PER_TENSOR", "PER_CHANNEL"))
    if quant_type in (None, "NONE"):
        scale = None
    elif scale is None:
        raise ValueError(f"{side}_scale must be given for {side}_quant_type {quant_type}")
    else:
        check_choice("kv_cache_bit_width", bits, (4, 8))
        if bits == 4 and new.shape[3] % 2:
            raise ValueError(f"kv_cache_bit_width must be 8 for a head size of {new.shape[3]}, which is odd")
        shape = (1, new.shape[1], 1, new.shape[3]) if quant_type == "PER_CHANNEL" else (1,) * scale.ndim
        check_shape(f"{side}_scale", scale, shape, because=f" for {side}_quant_type {quant_type}")
        new = _quantised(new, scale, bits)
    B, K, L, D = new.shape
    name = "past_key" if side == "k" else "past_value"
    if past is None:
        past = np.empty((B, K, 0, D), new.dtype)
    size = past.shape[2] if past.ndim == 4 else 0
    check_shape(name, past, (B, K, size, D))
    if past.dtype != new.dtype:
        raise ValueError(f"{name} must be of dtype {new.dtype}, got {past.dtype}")
    if starts.max(initial=0) > size:
        raise ValueError(
            f"{name} must hold the {starts.max()} tokens that seqlens_k says are before the {L} new ones, "
            f"got {past.shape}"
        )
    present = np.zeros((B, K, max(total, size), D), new.dtype)
    for cache, before, rows, start in zip(present, past, new, starts.tolist(), strict=True):
        cache[:, :start] = before[:, :start]
        cache[:, start : start + L] = rows
    read = present[:, :, :total]
    return present, read if scale is None else _dequantised(read, scale, bits)


def _quantised(x: np.ndarray, scale: np.ndarray, bits: int) -> np.ndarray:
    """int8, or two numbers of four bits a byte, the first of them low."""
    limit = 1 << (bits - 1)
    rounded = np.rint(x.astype(np.float32) / scale).clip(-limit, limit - 1).astype(np.int8)
    if bits == 8:
        return rounded
    halves = (rounded + limit).astype(np.uint8)
    return halves[..., ::2] | halves[..., 1::2] << 4


def _dequantised(x: np.ndarray, scale: np.ndarray, bits: int) -> np.ndarray:
    if bits == 4:
        halves = np.stack((x & 15, x >> 4), axis=-1).reshape(*x.shape[:-1], 2 * x.shape[-1])
        x = halves.astype(np.int8) - np.int8(8)
    return x * scale
