# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, freethreading_compatible=True, binding=False
"""The driver: it knows tiles, masks and threads; the kernels below it know registers.

Query rows are lanes. The query heads of one key/value head are rows of one list, row = i * group + g, so
that each key and value is read once for all of them. A task is one query block of that list: it packs its query
rows as columns, then goes over the key tiles that any of its rows may attend, each in the stages

    mask words -> score -> adjust (scale, soft-cap, score_mod, bias, mask) -> softmax -> drop (dropout) -> accumulate

and writes the rows out. FlashAttention-2's Algorithm 1 (Dao, 2023) with query rows as lanes: no reduction
crosses lanes, so the bits of a row's result depend on its own keys and on the grid of key tiles alone, not on
its query block, the thread, or the other rows of the batch. Where a key/value head has few query blocks, threads share
its keys; where it has few query rows (split-KV), lanes run along keys and columns instead.

This file is the interface to Python: it selects the instruction set, and fills in and runs the record of a call
(Job). The files that it includes hold the rest. binding=False makes plain built-in functions: with the stable
ABI of Python 3.11, a call of Cython's own type of function builds a tuple of the arguments first.
"""

from libc.float cimport DBL_MAX, FLT_MAX, FLT_MIN
from libc.math cimport INFINITY, NAN, exp, fabs, ilogb, isfinite, isnan, ldexp, log, nextafterf, sqrt
from libc.stdint cimport int8_t, int32_t, int64_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memchr, memcmp, memcpy, memset, strlen

cimport numpy as cnp
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.dict cimport PyDict_Next
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_New

import numpy as np

from fastattn._machine.constants import ISAS, VECTORS

include "generated/headers.pxi"  # what the headers in C declare, see declarations.py
include "record.pxi"     # the records: a call, a query block, a partial result, a thread's scratch memory
include "storage.pxi"    # rows in 16 bits, converted as they are read and written
include "blocks.pxi"     # addresses and key intervals of a query block
include "epilogue.pxi"   # what is done to the scores of a tile: scale, soft-cap, score_mod, bias, mask, dropout
include "mask_tile.pxi"  # one key tile: masks and scores
include "sweep.pxi"      # many query rows: one query block over the key tiles
include "splitkv.pxi"    # few query rows: one key tile
include "partials.pxi"   # a query block, from its queries to its outputs: partial results merged in a tree
include "fused.pxi"      # many query rows on a tile unit: three units of work at once
include "work.pxi"       # all tasks, on all threads
include "gradient_record.pxi"  # gradients: the arrays of a call, a thread's tiles
include "gradient_pairs.pxi"  # gradients of bfloat16: rounded weights, products of pairs
include "gradient_tile.pxi"  # gradients: what one query block adds to those of a key tile
include "backward.pxi"   # gradients: a key tile over the query blocks, all tasks on all threads

cnp.import_array()

cdef const fastattn_kernels *chosen[2]   # for float32 and float64
chosen[0] = chosen[1] = NULL

include "signature.pxi"  # the key by which prepared calls are looked up
include "cache.pxi"      # rows into the pages of a cache
include "rope.pxi"       # rotary position embedding, a pass over rows of its own
include "recurrent_record.pxi"  # linear attention and its relatives: the record of a call, a thread's memory, rows of tokens
include "recurrent_chunk.pxi"   # a state, and tokens that read it and are added to it at once
include "recurrent.pxi"  # all tokens of a head, all tasks on all threads
include "recurrent_gradient.pxi"  # its gradients: chunks of tokens from the last to the first, states computed again
include "conv.pxi"       # the short causal convolution before it
include "reductions.pxi"  # the largest scores of each query, and of each document

def available_isas(names=ISAS):
    """Those of the instruction sets that were built and that this CPU runs, best first."""
    return [name for name in names if fastattn_find_kernels(name.encode(), 4) != NULL]


def choose_isa(str name):
    """Makes every later call use the kernels built for this instruction set."""
    cdef bytes encoded = name.encode()
    cdef const fastattn_kernels *single = fastattn_find_kernels(encoded, 4)
    cdef const fastattn_kernels *double_ = fastattn_find_kernels(encoded, 8)
    if single == NULL or double_ == NULL:
        raise ValueError(f"instruction set {name!r} is not available here; available: {available_isas()}")
    chosen[0] = single
    chosen[1] = double_


def chosen_isa():
    """The name of the instruction set in use."""
    return chosen[0].isa.decode()


def chosen_vectors():
    """The name of the instruction set that its kernels without a tile unit are built for."""
    return chosen[0].vectors.decode()


def target(Py_ssize_t itemsize):
    """The fields of `fastattn._call.schedule.Target` for the kernels in use and elements of this size."""
    cdef const fastattn_kernels *kernels = chosen[itemsize == 8]
    return {"lanes": kernels.lanes, "max_vectors": kernels.max_vectors, "panel_columns": kernels.panel_cols,
            "has_fused": kernels.fused != NULL, "has_pairs": kernels.pairs != NULL, "has_pieces": True,
            "few_rows": VECTORS[kernels.vectors.decode()].get("few_rows", {}).get(itemsize, 0)}


ctypedef struct Peak:
    long steps             # of a piece
    int64_t n_operations   # done so far


cdef void run_peak(void *call, Share *shares, int own, int n_shares) noexcept nogil:
    cdef Peak *peak = <Peak *>call
    cdef int turn = 0
    cdef Py_ssize_t piece, stop
    chosen[0].fused.begin()
    while take_tasks(shares, own, n_shares, 1, &turn, &piece, &stop):
        fetch_add_64(&peak.n_operations, <int64_t>chosen[0].fused.peak(peak.steps), ATOMIC_RELAXED)
    chosen[0].fused.end()


def tile_operations(int num_threads, long steps):
    """FLOPs of float32 that num_threads threads do on the tile unit in at least `steps` steps in all, of products alone;
    0 where the kernels in use have none."""
    cdef Py_ssize_t pieces = 32 * num_threads
    cdef Peak peak = Peak(steps // pieces + 1, 0)
    if chosen[0].fused == NULL:
        return 0.0
    with nogil:
        run_on_threads(run_peak, &peak, pieces, num_threads, False)
    return float(peak.n_operations)


def set_cores(cores):
    """Which core each CPU belongs to, for threads that move to one of their own; see pool.h."""
    cdef cnp.ndarray numbers = np.asarray(cores, np.int32)
    fastattn_set_cores(<const int32_t *>cnp.PyArray_DATA(numbers), <int>numbers.shape[0])


def can_share_threads():
    """Whether the products of a BLAS can run on the threads of this extension: not on Windows."""
    return bool(fastattn_blas_is_supported())


def share_threads(size_t set_callback, size_t num_threads, size_t set_num_threads, int max_threads):
    """Runs the products of the OpenBLAS with these functions on this extension's threads; see blas.h."""
    cdef fastattn_blas blas
    cdef int failed
    blas.set_callback = <void (*)(fastattn_blas_callback) noexcept nogil><void *>set_callback
    blas.num_threads = <int (*)() noexcept nogil><void *>num_threads
    blas.set_num_threads = <void (*)(int) noexcept nogil><void *>set_num_threads
    blas.max_threads = min(max_threads, <int>BLAS_MAX_THREADS)
    with nogil:
        failed = fastattn_blas_share(&blas)
    if failed:
        raise MemoryError("no memory for the handlers of forks")


def stop_sharing_threads():
    """Undoes `share_threads`."""
    with nogil:
        fastattn_blas_share(NULL)


def shares_threads():
    """Whether products of a BLAS run on this extension's threads now."""
    return bool(fastattn_blas_is_shared())


cdef Job *new_job(bytes fields, bytes views) except NULL:
    """The record of a call from what `fastattn.backends.cpu.record` wrote, without addresses."""
    cdef const int64_t *view = <const int64_t *><const char *>views
    cdef Py_ssize_t nbytes = len(fields)
    cdef int64_t *leads
    cdef int64_t n_lead
    cdef int number
    cdef Job *job
    if nbytes != <Py_ssize_t>(<size_t>&(<Job *>NULL).query):
        raise ValueError("the record of a call is not what this driver reads")
    job = <Job *>malloc(nbytes + len(views))
    if job == NULL:
        raise MemoryError("no memory for the record of a call")
    memcpy(job, <const char *>fields, nbytes)
    job.kernels = <int64_t><size_t>chosen[job.itemsize == 8]
    n_lead = job.n_lead
    leads = <int64_t *>(job + 1)
    for number in range(N_VIEWS):
        memcpy(&job.query + number, view, sizeof(View))
        memcpy(leads, view + 4, n_lead * sizeof(int64_t))
        view += 4 + n_lead
        leads += n_lead
    memcpy(leads, view, len(views) - (<const char *>view - <const char *>views))
    return job


cdef inline int set_addresses(Job *job, tuple arrays) except -1:
    """Sets where the arrays of a call are, which come in the order of `fastattn._call.problem.Arrays`."""
    cdef int number
    for number in range(N_VIEWS):
        (&job.query)[number].data = address_of(arrays[number])
    job.sinks = address_of(arrays[N_VIEWS])
    job.mask_bits = address_of(arrays[N_VIEWS + 1])
    job.drop_key = address_of(arrays[N_VIEWS + 2])
    return 0


cdef class Prepared:
    """A prepared call of the Cython driver; loop: its compiled score_mod or None, see `fastattn.backends.jit`."""

    cdef char *record
    cdef Py_ssize_t nbytes
    cdef int num_threads
    cdef readonly bint is_small
    cdef object loop
    cdef tuple sizes

    def __cinit__(self, bytes fields, bytes views, int num_threads, bint is_small, loop=None, tuple sizes=None):
        cdef Job *job = new_job(fields, views)
        self.nbytes = len(fields) + len(views)
        self.record = <char *>job
        self.num_threads = num_threads
        self.is_small = is_small
        self.loop = loop
        self.sizes = sizes
        if loop is not None:
            job.score_mod = loop.address

    def __dealloc__(self):
        free(self.record)

    cdef inline bint has_work(self):
        cdef const Job *job = <const Job *>self.record
        return job.n_tasks != 0 and job.n_vectors != 0

    cdef Job *copy(self) except NULL:
        """The record, for the addresses of one call; `solve` frees it."""
        cdef Job *job = <Job *>malloc(self.nbytes)
        if job == NULL:
            raise MemoryError("no memory for the record of a call")
        memcpy(job, self.record, self.nbytes)
        return job

    cdef int solve(self, Job *job, score_mod) except -1:
        """Fills the outputs of a record with addresses."""
        cdef bint done
        cdef int64_t outside, at
        with nogil:
            done = run_job(job, self.num_threads)
            outside = job.read_outside
            at = job.outside_at - 1
            free(job)
        if not done:
            raise MemoryError("no memory for the tiles of a thread")
        if self.loop is not None:
            self.loop.check(outside, self.sizes, score_mod, at)
        return 0

    def run(self, arrays, score_mod=None):
        """Fills the outputs among the arrays, which are those of `fastattn._call.problem.Arrays`; score_mod, if any, reads
        what it holds."""
        cdef Job *job
        cdef object aux = None if self.loop is None else self.loop.words(score_mod)
        if not self.has_work():
            return
        job = self.copy()
        set_addresses(job, tuple(arrays))
        if aux is not None:
            job.aux = aux.buffer_info()[0]
        self.solve(job, score_mod)


cdef inline int64_t address_of(array):
    return 0 if array is None else <int64_t><size_t>cnp.PyArray_DATA(<cnp.ndarray>array)


include "entry.pxi"      # the C entry
include "recall.pxi"     # calls that were made before
