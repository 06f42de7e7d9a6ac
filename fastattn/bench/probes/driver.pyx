# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: freethreading_compatible=True
"""The probes on several threads; see probes.h for what each does on one."""

from libc.stdint cimport int64_t, uint64_t

cdef extern from "probes.h" nogil:
    ctypedef struct fastattn_probes:
        double (*fma_peak_float)(long) noexcept nogil
        double (*fma_peak_double)(long) noexcept nogil
        double (*integer_peak)(long) noexcept nogil
        uint64_t (*read_memory)(const void *, Py_ssize_t) noexcept nogil
    const fastattn_probes *fastattn_find_probes(const char *)

cdef extern from "pool.h" nogil:
    int fastattn_pool_run(void (*)(void *, int, int) noexcept nogil, void *, int)

cdef extern from * nogil:
    enum: ATOMIC_RELAXED "__ATOMIC_RELAXED"
    int64_t fetch_add "__atomic_fetch_add"(int64_t *, int64_t, int)
    uint64_t fetch_xor "__atomic_fetch_xor"(uint64_t *, uint64_t, int)

cdef enum:
    READ_PIECE = 1 << 20  # bytes that a thread takes at a time

READ_PIECE_NBYTES = READ_PIECE


cdef const fastattn_probes *find(str isa) except NULL:
    cdef const fastattn_probes *probes = fastattn_find_probes(isa.encode())
    if probes == NULL:
        raise ValueError(f"there are no probes for instruction set {isa!r}")
    return probes


ctypedef struct Pieces:
    int64_t next, stop


cdef inline bint take_piece(Pieces *pieces, int64_t *piece) noexcept nogil:
    piece[0] = fetch_add(&pieces.next, 1, ATOMIC_RELAXED)
    return piece[0] < pieces.stop


ctypedef struct Steps:
    Pieces pieces
    double (*run)(long) noexcept nogil
    long steps             # of a piece
    int64_t n_operations   # done so far


cdef void run_steps(void *call, int thread, int num_threads) noexcept nogil:
    cdef Steps *s = <Steps *>call
    cdef int64_t piece
    while take_piece(&s.pieces, &piece):
        fetch_add(&s.n_operations, <int64_t>s.run(s.steps), ATOMIC_RELAXED)


ctypedef struct Reads:
    Pieces pieces
    const char *at
    const fastattn_probes *probes
    uint64_t mixed         # what was read, so that no compiler leaves it out


cdef void run_reads(void *call, int thread, int num_threads) noexcept nogil:
    cdef Reads *r = <Reads *>call
    cdef int64_t piece
    while take_piece(&r.pieces, &piece):
        fetch_xor(&r.mixed, r.probes.read_memory(r.at + piece * READ_PIECE, READ_PIECE), ATOMIC_RELAXED)


def peak_operations(str isa, Py_ssize_t itemsize, int num_threads, long steps):
    """Operations done by num_threads threads that run at least `steps` steps of one kind in all.

    FLOPs of multiply-adds on elements of this size, or additions of integers where itemsize is 0. Handed out in
    pieces, as the tasks of attention are: a core that is held up does fewer of them.
    """
    cdef const fastattn_probes *probes = find(isa)
    cdef Steps steps_of
    cdef int64_t pieces = 32 * num_threads
    if itemsize == 0:
        steps_of.run = probes.integer_peak
    else:
        steps_of.run = probes.fma_peak_double if itemsize == 8 else probes.fma_peak_float
    steps_of.pieces = Pieces(0, pieces)
    steps_of.steps = steps // pieces + 1
    steps_of.n_operations = 0
    with nogil:
        fastattn_pool_run(run_steps, &steps_of, num_threads)
    return float(steps_of.n_operations)


def read_memory(str isa, size_t address, int num_threads, Py_ssize_t pieces):
    """Has num_threads threads read pieces of READ_PIECE_NBYTES bytes each of the memory at this address."""
    cdef const fastattn_probes *probes = find(isa)
    cdef Reads reads = Reads(Pieces(0, pieces), <const char *>address, probes, 0)
    with nogil:
        fastattn_pool_run(run_reads, &reads, num_threads)
    return reads.mixed
