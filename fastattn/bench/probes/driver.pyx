# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: freethreading_compatible=True
"""The probes on several threads; see probes.h for what each does on one."""

from cython.parallel cimport prange
from libc.stdint cimport uint64_t

cdef extern from "probes.h" nogil:
    ctypedef struct fastattn_probes:
        double (*fma_peak_float)(long) noexcept nogil
        double (*fma_peak_double)(long) noexcept nogil
        double (*integer_peak)(long) noexcept nogil
        uint64_t (*read_memory)(const void *, Py_ssize_t) noexcept nogil
    const fastattn_probes *fastattn_find_probes(const char *)

cdef enum:
    READ_PIECE = 1 << 20  # bytes that a thread takes at a time

READ_PIECE_NBYTES = READ_PIECE


cdef const fastattn_probes *find(str isa) except NULL:
    cdef const fastattn_probes *probes = fastattn_find_probes(isa.encode())
    if probes == NULL:
        raise ValueError(f"there are no probes for instruction set {isa!r}")
    return probes


def peak_operations(str isa, Py_ssize_t itemsize, int num_threads, long steps):
    """Operations done by num_threads threads that run at least `steps` steps of one kind in all.

    FLOPs of multiply-adds on elements of this size, or additions of integers where itemsize is 0. Handed out in
    pieces, as the tasks of attention are: a core that is held up does fewer of them.
    """
    cdef const fastattn_probes *probes = find(isa)
    cdef double (*run_steps)(long) noexcept nogil
    cdef double operations = 0
    cdef int piece, pieces = 32 * num_threads
    if itemsize == 0:
        run_steps = probes.integer_peak
    else:
        run_steps = probes.fma_peak_double if itemsize == 8 else probes.fma_peak_float
    with nogil:
        for piece in prange(pieces, num_threads=num_threads, schedule="dynamic", chunksize=1):
            operations += run_steps(steps // pieces + 1)
    return operations


def read_memory(str isa, size_t address, int num_threads, Py_ssize_t pieces):
    """Has num_threads threads read pieces of READ_PIECE_NBYTES bytes each of the memory at this address."""
    cdef const fastattn_probes *probes = find(isa)
    cdef const char *at = <const char *>address
    cdef uint64_t mixed = 0
    cdef Py_ssize_t piece
    with nogil:
        for piece in prange(pieces, num_threads=num_threads, schedule="dynamic", chunksize=1):
            mixed ^= probes.read_memory(at + piece * READ_PIECE, READ_PIECE)
    return mixed
