"""The Numba backend: the compiled kernels' design in code that is compiled on first use.

    target        the host's registers and the shapes of the tiles
    emit          vectors in LLVM IR
    intrinsics    what compiled code can say beyond Python: pointers, atomic counting, functions in IR
    tiles         one register tile, or one vector of lanes: score, softmax, accumulate
    rows_tiles    the same for few query rows
    layout        a call, a block of rows and a part of its keys as records
    cache         compiled code on disk
    calls         functions compiled when they are first needed, and called by address
    kernels       the kernel contract over the tiles; rows_kernels the same for few query rows
    blocks        where a block of rows finds everything
    scores        one tile of keys: masks, bias, scores
    sweep, rows   the driver over the key tiles: with rows as lanes, and for few rows
    spread        each thread on a core of its own
    work          all tasks on all threads
    form          all of a call but its addresses, remembered for calls that are alike
    job           a `Problem` as the record of a call

Each knows those above it. Nothing is imported here, so that Numba is only loaded with what needs it.
"""
