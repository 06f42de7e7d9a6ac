"""Types that arrays are stored in and nothing is computed in: float16 and bfloat16.

NumPy has no bfloat16; the package `ml_dtypes` adds one. It is recognised by its name and is never imported
here: whoever has such an array has imported it.
"""

from __future__ import annotations

import numpy as np

#: As the record of a call and the kernels have them: elements of the computation's own type, and these.
REAL, FLOAT16, BFLOAT16 = range(3)
SWAPPED = 1 << 8  #: beside one of them: bytes in the other order

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


def storage_of(dtype: np.dtype) -> int:
    """Which 16-bit type a dtype is, if any, in whichever byte order; REAL for any other."""
    if dtype.itemsize != 2:
        return REAL
    if dtype.kind == "f":
        return FLOAT16
    return BFLOAT16 if dtype.name == "bfloat16" else REAL


def storage_code(dtype: np.dtype) -> int:
    """`storage_of`, with the byte order."""
    storage = storage_of(dtype)
    return storage if storage == REAL or dtype.isnative else storage | SWAPPED
