"""Rotary position embedding in plain NumPy: the definition, and the bits of every other form."""

from __future__ import annotations

import numpy as np

from fastattn._call.rope import Rotation


def rotate(rotation: Rotation) -> None:
    """Fills ``rotation.out``."""
    out, x, cos, sin, positions, interleaved, inverse = rotation
    half = cos.shape[1]
    first, second = slice(0, half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    c, s = cos[positions][..., None, :, :], sin[positions][..., None, :, :]
    if inverse:
        s = -s
    a, b = x[..., first].astype(cos.dtype), x[..., second].astype(cos.dtype)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):  # NaN and inf pass through
        out[..., first] = a * c - b * s
        out[..., second] = b * c + a * s
    out[..., 2 * half :] = x[..., 2 * half :]
