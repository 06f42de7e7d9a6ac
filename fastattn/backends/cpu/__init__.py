"""What the CPU drivers, Cython's and Numba's, have in common.

    record      the record of a call: sizes, strides, options, scratch layout; of the Cython driver
    functions   a score_mod compiled to a loop over a tile

Each knows those above it.
"""
