"""What the CPU drivers, Cython's and Numba's, have in common.

    record      the record of a call: sizes, strides, options and scratch layout, as the Cython driver reads it
    functions   a score_mod compiled to a loop over a tile

Each knows those above it.
"""
