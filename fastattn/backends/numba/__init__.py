"""The Numba backend: the design of the compiled kernels, compiled on first use.

    codegen       machine code: the host's registers, vectors in LLVM IR, register tiles, calls by address
    layout        a call, a query block and a partial result as records
    kernels       the kernel contract over register tiles; row_kernels the same for few query rows
    blocks        addresses and key intervals of a query block
    mask_tile     one key tile: masks, bias, scores
    sweep         many query rows, as lanes: one query block over the key tiles
    splitkv       few query rows: the keys of one head split over threads
    spread        threads moved to cores of their own
    work          all tasks, on all threads
    prepared      prepared calls: their records and scratch memory

Each knows those above it. Nothing is imported here, so that Numba is only loaded with what needs it.
"""
