"""The CUDA backend: attention on an NVIDIA GPU, in kernels that Numba compiles on first use.

A block of threads takes a tile of query rows of one key/value head and walks over its keys, a tile at a time
(FlashAttention-2, algorithm 1). That is `kernel.attend_kernel`, one function in three stages:

- *score*: columns of queries and keys go through shared memory a few at a time, transposed, and each thread
  sums up the products of its rows and keys in registers;
- *softmax*: mask, running maximum, exponential and sum; the weights go to shared memory;
- *accumulate*: values go through shared memory a few keys at a time, and each thread adds up its rows and
  columns.

Where tensor cores multiply, rows of queries and keys stay rows in shared memory, and the weights stay in
registers.

Tiles that no row may read are skipped. The rows' intervals or the mask map tell, or else the mask array or
function, which is read before the scores.

Few query rows leave most of a GPU idle, so several blocks share their keys (Flash-Decoding).
`kernel.merge_kernel` merges the partial results and divides by the sums of the weights.

`form` chooses a specialisation of the kernels and its tiles for a problem. `blocks` finds the rows and keys
of a block, `mask_tile` the keys that each row may attend to. `stages` has the three stages, `tiles` what they
do with registers and shared memory, `tensor` what they do with tensor cores, `pairs` of two numbers in 16
bits what these multiply at once, `epilogue` what changes scores.
`functions` turns the caller's functions into device functions. `engine` makes of a problem a plan, which it
keeps, with each `launch` of a kernel on a `stream`, which owns the memory; `cache` keeps kernels on disk.
`combine` is `merge_attention`.

Each function of `tiles` (from `place` on), `tensor`, `blocks`, `mask_tile`, `epilogue` and `stages` makes the
device function of its name, for a specialisation or the shape of its tiles; its docstring is that of the
device function. Arguments have one name in all of them. Beside those of `kernel.attend_kernel`:

- thread: the `Thread` that runs, in `tiles` its number; block, rows, keys: its `Block`, `Rows` and `Keys`;
- key0: the first key of a tile;
- s: the scores of a thread, ROWS x KEYS, and then their weights; acc: its sums of weights times values,
  ROWS x COLUMNS; row_max, row_sum: the running state of its rows;
- shared: the shared memory of a block; staged: the registers of a thread for what it has fetched;
- is_partial: some rows may not attend to some keys of the tile.

Multiply-adds are those of the dtype, or products of tensor cores that are together as exact as one of
float32. float16 and bfloat16 arrays are converted to it as they are read, or multiplied as they are, and
results converted to these types as they are written (`intrinsics.read_as`, `write_as`).
"""
