"""What the CPU drivers, Cython's and Numba's, have in common.

    fields      tables of the fields, arrays and tiles of the record of a call
    record      that record: sizes, strides, options, scratch layout; of the Cython driver
    backward    the arrays that a driver fills for gradients, and the gradients made of them

Each imports only modules above it.
"""
