"""What the CPU drivers, Cython's and Numba's, have in common.

    record      the record of a call: sizes, strides, options and scratch layout, as both drivers read it
    prepared    what a call's signature decides, kept for the next call of that signature

Each knows those above it.
"""
