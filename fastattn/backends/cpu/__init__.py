"""What the CPU drivers, Cython's and Numba's, have in common.

    fields      tables of the fields, arrays and tiles of the record of a call
    record      that record: sizes, strides, options, scratch layout; of the Cython driver
    backward    what a driver fills for gradients, and the gradients made of that

Each knows those above it.
"""
