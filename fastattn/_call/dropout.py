"""Dropout of attention weights: the seed and a weight's place alone decide whether it is dropped.

Not a part of an import of the package.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np

_DRAWN_NBYTES = 2**22  #: of random numbers that `Dropout.mask` holds at once


class Dropout(NamedTuple):
    """Which weights are dropped.

    Each key of a row has 16 bits of the stream of ``numpy.random.Philox(key=seed)``, and is dropped where
    they are less than `threshold`. A row takes whole blocks of 256 bits, and block ``c`` of the stream is a
    function of the seed and of ``c + 1`` alone: any part of the mask can be drawn by itself.
    """

    threshold: int  #: of 65536
    seed: int  #: 128 bits

    @property
    def key(self) -> np.ndarray:
        """The seed as Philox's key of two words, the lower first."""
        return np.array(divmod(self.seed, 2**64)[::-1], np.uint64)

    @property
    def kept_share(self) -> float:
        """By which kept weights are divided."""
        return 1 - self.threshold / 65536

    def keep(self, first_row: int, n_rows: int, len_k: int) -> np.ndarray:
        """Bool ``(n_rows, len_k)``: the weights that are kept, of rows counted over items, heads and
        queries."""
        row_blocks = -(-len_k // 16)
        stream = np.random.Philox(key=self.seed, counter=first_row * row_blocks)
        raw = stream.random_raw(n_rows * row_blocks * 4).astype("<u8", copy=False)
        return raw.view("<u2").reshape(n_rows, row_blocks * 16)[:, :len_k] >= self.threshold

    def mask(self, shape: tuple[int, ...]) -> np.ndarray:
        """The weights of this shape, ``(..., S)``, that are kept."""
        *rows, len_k = shape
        kept = np.empty((prod(rows), len_k), bool)
        step = max(1, _DRAWN_NBYTES // (2 * len_k + 32))
        for first in range(0, len(kept), step):
            n_rows = min(step, len(kept) - first)
            kept[first : first + n_rows] = self.keep(first, n_rows, len_k)
        return kept.reshape(shape)
