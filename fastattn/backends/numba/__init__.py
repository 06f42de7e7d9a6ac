"""The Numba backend: the design of the compiled kernels, compiled on first use.

    layout         a call and a query block as records
    cache, calls   stages: functions compiled alone, kept on disk, that call each other by address
    vectors        registers of lanes as values of compiled code
    register_tile  the register tile of both products, in LLVM IR
    blocks         a query block: its rows, arrays, tiles and key intervals
    epilogue       scale, softcap, score_mod, bias and mask of a tile of scores
    kernels        softmax, sums of values, and outputs of a block
    row_kernels    both products for few query rows
    mask_tile      one key tile: its masks and bias, and its scores
    sweep          many query rows, as lanes: one query block over the key tiles
    splitkv        few query rows: the keys of one head split over threads
    work           all tasks, on all threads
    threads        how many threads of Numba's pool a call may use
    prepared       prepared calls: their records and scratch memory

Each imports only modules above it. This file imports nothing, so Numba is loaded only when it is used.
"""
