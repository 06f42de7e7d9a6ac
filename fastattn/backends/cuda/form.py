"""The specialisation of a kernel (`Form`), and the shape of its tiles. Each is compiled once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Shape(NamedTuple):
    """Tiles and threads. A block has threads_q * threads_k threads, not fewer than rows of a tile; each has
    rows * keys scores, 64 at most, and rows * columns sums in registers. Keys of a tile divide `TILE_K` of a
    mask map."""

    rows: int  #: query rows of a thread
    keys: int  #: keys of a thread
    columns: int  #: columns of the values of a thread
    threads_q: int  #: threads along the query rows
    threads_k: int  #: threads along the keys, and along the columns of the values
    depth: int  #: columns of queries and keys in shared memory at a time
    value_keys: int  #: keys whose values are in shared memory at a time
    span: int  #: columns of a row that a thread fetches at once, 16 bytes where not in 16 bits; divides depth
    vector: int  #: adjacent keys of a thread, those that it reads from shared memory at a time; divides keys
    row_vector: int  #: the same of query rows; divides rows
    column_vector: int  #: the same of the columns of the values; divides columns
    buffers: int  #: 2 where a piece is put into shared memory while the one before is multiplied, else 1
    is_tensor: bool = False  #: tensor cores multiply; see `tensor`
    group: int = 0  #: tiles side by side that a warp works on at a time, where tensor cores multiply
    pairs: str = ""  #: the 16-bit type of queries, keys and values, whose elements are `pairs`

    @property
    def num_threads(self) -> int:
        return self.threads_q * self.threads_k

    @property
    def tile_q(self) -> int:
        return self.rows * self.threads_q

    @property
    def tile_k(self) -> int:
        return self.keys * self.threads_k

    @property
    def tile_columns(self) -> int:
        return self.columns * self.threads_k

    @property
    def pair(self) -> int:
        """Numbers of an element."""
        return 2 if self.pairs else 1


class Stored(NamedTuple):
    """The dtypes of arrays in memory; of absent ones any."""

    q: str
    k: str
    v: str
    bias: str
    sinks: str
    dense: str
    out: str  #: of what is written in the end: out, or weights


class Form(NamedTuple):
    """What a kernel is compiled for."""

    dtype: str  #: "float32" or "float64"
    shape: Shape
    stored: Stored
    has_band: bool
    has_lengths: bool  #: of the keys of each item, in a band
    has_intervals: bool
    has_dense: bool
    has_mask_map: bool
    has_bias: bool
    has_softcap: bool
    has_sinks: bool
    has_score_mod: bool
    has_mask_mod: bool
    is_natural: bool  #: scores are held as they are, and not times log2(e)
    is_even: bool  #: depth divides head_dim, and the columns of a tile the value's
    is_packed: bool  #: queries, keys and values lie in whole spans, of pairs where those are multiplied
    result: str = "out"  #: or "parts", of splits for `merge`, or "weights", once the sums are known
    keeps_sums: bool = False  #: for "weights": maxima and sums are stored, as for "parts" always

    @property
    def unit(self) -> int:
        """Elements of memory of one in shared memory, where they are read as the numbers of pairs."""
        return 1 if self.is_packed else self.shape.pair

    @property
    def real(self) -> type[np.floating]:
        return np.float32 if self.dtype == "float32" else np.float64


# For float64, and GPUs without tensor cores. Shared memory gives a warp 32 elements in the time of one
# multiply-add: 8 x 8 sums of a thread take 16 elements for 64 multiply-adds. These sums and those of the
# output fill the 255 registers, so a processor holds two blocks of 128 threads. Static shared memory is 48
# KB. The weights of a tile take most of it, in the place of queries and keys, which are no longer needed; 8
# keys of 128 columns fit into the rest. In machine code for sm_90 (ptxas 13.0, `python -m benchmarks.sass`)
# 79 % of the instructions for a full tile of a plain float32 call are multiply-adds. An H200 issued an
# instruction in 67 % of the clocks: 33 TFLOP/s. Smaller tiles, other depths and one buffer were not faster.
SHAPES = {
    ("float32", 64): Shape(8, 8, 8, 16, 8, 16, 16, 4, 4, 4, 4, 2),
    ("float32", 128): Shape(8, 8, 8, 8, 16, 16, 8, 4, 4, 4, 4, 2),
    ("float64", 64): Shape(4, 4, 8, 16, 8, 8, 8, 2, 2, 2, 2, 2),
    ("float64", 128): Shape(4, 4, 8, 8, 16, 8, 8, 2, 2, 2, 2, 2),
}

# A warp has 8 x 4 threads: so many rows and pairs of columns have the tiles of tensor cores. An H200 needs 25
# clocks from a product to the next one in its sum, and 6 to one in another sum, so several sums are under
# way. ptxas undoes that where a loop over pieces is written out, and such code was slow: 7.7 ms where a tile
# of these has 2.5 times fewer clocks to wait in machine code. These have not been timed.
TENSOR_SHAPES = {
    64: Shape(2, 16, 16, 32, 4, 16, 16, 4, 2, 1, 8, 2, True, 4),
    128: Shape(2, 16, 32, 32, 4, 16, 8, 4, 2, 1, 8, 2, True, 4),
}

# `depth` and `span` count pairs: as many bytes as of TF32, twice as many columns. For float16 with 64
# columns ptxas puts the products of a sum one behind the other where a tile has several pieces of values.
PAIR_SHAPES = {
    64: TENSOR_SHAPES[64]._replace(value_keys=64, column_vector=2),
    128: TENSOR_SHAPES[128]._replace(value_keys=16, column_vector=2),
}

# With few rows memory is the limit: each thread has one key, and a block is one row of threads. Up to
# FEW_TILES of them issue fewer instructions than a tile of `SHAPES`, which would be mostly empty.
FEW_ROWS, FEW_TILES = 8, 4
FEW_SHAPES = {
    "float32": Shape(FEW_ROWS, 1, 1, 1, 128, 32, 32, 4, 1, 4, 1, 1),
    "float64": Shape(FEW_ROWS, 1, 1, 1, 128, 16, 16, 2, 1, 2, 1, 1),
}

# Keys of a split, whole tiles of every shape, for each SPLIT_ROWS query rows of a head. So a head has as many
# blocks as its keys allow, and partial results take at most a tenth of the memory of keys and values. No
# other size of the problem changes bits. An H200 took the same time for 256 to 2048 keys.
SPLIT_KEYS, SPLIT_ROWS = 512, 64

# In the simulator a thread is one of Python's.
SIMULATED_SPLIT_KEYS, SIMULATED_SPLIT_ROWS = 8, 8
SIMULATED_SHAPE = Shape(2, 2, 4, 2, 2, 4, 2, 2, 2, 2, 2, 2)
SIMULATED_FEW_SHAPE = Shape(2, 2, 2, 1, 2, 4, 2, 2, 1, 2, 1, 1)
SIMULATED_TENSOR_SHAPE = Shape(2, 4, 8, 8, 4, 16, 8, 4, 2, 1, 4, 2, True, 2)
SIMULATED_PAIR_SHAPE = SIMULATED_TENSOR_SHAPE._replace(keys=8, value_keys=16, column_vector=2)


def choose_shape(
    dtype: str,
    head_rows: int,
    value_dim: int,
    simulated: bool,
    has_tensor_cores: bool = False,
    changes_scores: bool = False,
    pairs: str = "",
) -> Shape:
    """The tiles for `head_rows` query rows that read one key/value head. has_tensor_cores: the device has
    those that multiply TF32, from compute capability 8.0 on. changes_scores: a bias or a function does.
    pairs: the 16-bit type of queries, keys and values."""
    if simulated and has_tensor_cores:
        return SIMULATED_PAIR_SHAPE._replace(pairs=pairs) if pairs else SIMULATED_TENSOR_SHAPE
    if simulated:
        return SIMULATED_FEW_SHAPE if head_rows <= 2 * SIMULATED_FEW_SHAPE.rows else SIMULATED_SHAPE
    if head_rows <= FEW_ROWS * FEW_TILES:
        shape = FEW_SHAPES[dtype]
        rows = 1
        while rows < min(head_rows, FEW_ROWS):
            rows *= 2
        return shape._replace(rows=rows, row_vector=min(rows, shape.row_vector))
    columns = 64 if value_dim <= 64 else 128
    if not has_tensor_cores or dtype != "float32":
        return SHAPES[dtype, columns]
    shape = PAIR_SHAPES[columns]._replace(pairs=pairs) if pairs else TENSOR_SHAPES[columns]
    # With fewer scores a thread's registers hold all that changes them, too.
    return shape._replace(keys=shape.keys // 2) if changes_scores and columns == 128 else shape


def keys_of_a_split(head_rows: int, simulated: bool) -> int:
    """How many keys a block takes, for `head_rows` query rows that read one key/value head."""
    keys, rows = (SIMULATED_SPLIT_KEYS, SIMULATED_SPLIT_ROWS) if simulated else (SPLIT_KEYS, SPLIT_ROWS)
    return keys * -(-head_rows // rows)
