"""The Numba backend: the compiled kernels' design in code that is compiled on first use.

    codegen       machine code: registers of the host, vectors in LLVM IR, register tiles, calls by address
    layout        a call, a block of rows and a partial result as records
    kernels       the kernel contract over register tiles; row_kernels the same for few query rows
    blocks        where a block of query rows finds everything
    mask_tile     one tile of keys: masks, bias, scores
    sweep         the driver over the key tiles, with query rows as lanes
    splitkv       the driver for few query rows, whose keys are split over threads
    spread        each thread on a core of its own
    work          all tasks on all threads
    prepared      a call ready to run: its record, and scratch memory

Each knows those above it. Nothing is imported here, so that Numba is only loaded with what needs it.
"""
