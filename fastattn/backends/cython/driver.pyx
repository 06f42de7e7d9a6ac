# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, freethreading_compatible=True
"""The driver: it knows tiles, masks and threads; the kernels below it know registers.

Query rows are lanes. The query heads of one key/value head are rows of one list, row = i * group + g, so
that each key and value is read once for all of them. A task is one block of that list: it packs its query
rows as columns, then walks the key tiles that any of its rows may attend, each in the stages

    mask words -> score -> adjust (soft-cap, bias, mask) -> softmax -> accumulate

and writes the rows out. FlashAttention-2's Algorithm 1 (Dao, 2023) with the lanes turned: no reduction
ever crosses a lane, so a row's bits depend on its own keys and on the tile grid alone, not on the block it
stands in, the thread that runs it, or the batch around it. Where a key/value head has few query rows, lanes run
along keys and columns instead, and threads share the keys of one head.

This file is the way in from Python: instruction set, threads, and arrays to a Job. The files that it
includes hold the rest.
"""

from cython.parallel cimport parallel, prange, threadid
from libc.math cimport INFINITY, isfinite, sqrt
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

cimport numpy as cnp

import os

import numpy as np

include "record.pxi"     # what is worked on: arrays, options, blocks, a thread's own tiles
include "blocks.pxi"     # where a block of query rows finds everything
include "mask_tile.pxi"  # one tile of keys: masks, bias, scores
include "sweep.pxi"      # tiles of queries: one block of rows over the key tiles
include "splitkv.pxi"    # few query rows: the keys of one head split over threads, partial results merged in a tree
include "work.pxi"       # all tasks, on all threads

cdef extern from *:
    """
    #ifdef _OPENMP
    #include <omp.h>
    #define FASTATTN_HAVE_OPENMP 1
    static int fastattn_openmp_limit(void) { return omp_get_max_threads(); }
    #else
    #define FASTATTN_HAVE_OPENMP 0
    static int fastattn_openmp_limit(void) { return 1; }
    #endif
    """
    int fastattn_openmp_limit() noexcept nogil
    const bint HAVE_OPENMP "FASTATTN_HAVE_OPENMP"

cnp.import_array()

cdef double LOG2E = 1.4426950408889634074

cdef const fastattn_kernels *chosen[2]   # for float32 and float64
chosen[0] = chosen[1] = NULL

ISAS = ("avx512", "avx2", "neon", "portable")  # best first

READ_PIECE_NBYTES = READ_PIECE

cdef bint forked = False


def _in_child():
    # libgomp's worker threads do not exist in a forked child, and a parallel region there would wait for them.
    global forked
    forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)

cdef int openmp_default = fastattn_openmp_limit()


def available_isas():
    """Names of the instruction sets that were built and that this CPU runs, best first."""
    return [name for name in ISAS if fastattn_find_kernels(name.encode(), 4) != NULL]


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


def tile_rows(Py_ssize_t itemsize):
    """Query rows in the widest block of the instruction set in use, and in one vector, for elements of this size."""
    cdef const fastattn_kernels *kernels = chosen[itemsize == 8]
    return kernels.lanes * kernels.max_vectors, kernels.lanes


def set_cores(cores):
    """Which core each CPU belongs to, for threads that move to one of their own; see spread.h."""
    cdef cnp.ndarray numbers = np.asarray(cores, np.int32)
    fastattn_set_cores(<const int32_t *>cnp.PyArray_DATA(numbers), <int>numbers.shape[0])


cdef extern from "blas.h":
    ctypedef struct fastattn_blas:
        void (*set_callback)(void *) noexcept nogil
        int (*num_threads)() noexcept nogil
        void (*set_num_threads)(int) noexcept nogil
        int max_threads
    enum: FASTATTN_BLAS_MAX_THREADS
    int fastattn_blas_is_supported()
    int fastattn_blas_share(const fastattn_blas *) nogil
    int fastattn_blas_is_shared()


def can_share_threads():
    """Whether the products of a BLAS can run on the threads of this extension: it needs OpenMP and POSIX."""
    return bool(fastattn_blas_is_supported())


def share_threads(size_t set_callback, size_t num_threads, size_t set_num_threads, int max_threads):
    """Has the products of the OpenBLAS with these functions run on this extension's threads; see blas.h."""
    cdef fastattn_blas blas
    cdef int failed
    blas.set_callback = <void (*)(void *) noexcept nogil><void *>set_callback
    blas.num_threads = <int (*)() noexcept nogil><void *>num_threads
    blas.set_num_threads = <void (*)(int) noexcept nogil><void *>set_num_threads
    blas.max_threads = min(max_threads, <int>FASTATTN_BLAS_MAX_THREADS)
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


def thread_limit(int num_threads):
    """num_threads, less where this process may not have so many.

    One in a forked child and without OpenMP. A limit set on OpenMP since the import (threadpoolctl, or
    omp_set_num_threads) holds; OpenMP's own default does not.
    """
    cdef int limit = fastattn_openmp_limit()
    if forked or not HAVE_OPENMP:
        return 1
    return num_threads if limit == openmp_default else min(num_threads, limit)


def peak_operations(Py_ssize_t itemsize, int num_threads, long steps):
    """Operations done by num_threads threads that run at least `steps` steps of one kind in all.

    FLOPs of multiply-adds on elements of this size, or additions of integers where itemsize is 0. Handed out in
    pieces, as the tasks of `run_job` are: a core that is held up does fewer of them.
    """
    cdef const fastattn_kernels *kernels = chosen[itemsize == 8]
    cdef double (*run_steps)(long) noexcept nogil
    cdef double operations = 0
    cdef int piece, pieces = 32 * num_threads
    run_steps = kernels.integer_peak if itemsize == 0 else kernels.fma_peak
    with nogil:
        for piece in prange(pieces, num_threads=num_threads, schedule="dynamic", chunksize=1):
            operations += run_steps(steps // pieces + 1)
    return operations


def read_memory(cnp.ndarray array, Py_ssize_t start, int num_threads, Py_ssize_t pieces):
    """Has num_threads threads read pieces of READ_PIECE bytes each of the array's memory, from byte start on."""
    cdef const char *at = <const char *>cnp.PyArray_DATA(array) + start
    cdef const fastattn_kernels *kernels = chosen[0]
    cdef uint64_t mixed = 0
    cdef Py_ssize_t piece
    with nogil:
        for piece in prange(pieces, num_threads=num_threads, schedule="dynamic", chunksize=1):
            mixed ^= kernels.read_memory(at + piece * READ_PIECE, READ_PIECE)
    return mixed


cdef int set_view(View *view, cnp.ndarray array, int n_lead) except -1:
    """Axes (*lead, head, row, column); an array with fewer than three behind the lead has no head axis."""
    cdef int axis, behind = array.ndim - n_lead
    if n_lead > MAX_LEAD:
        raise ValueError(f"too many leading axes: {n_lead}")
    view.data = <char *>cnp.PyArray_DATA(array)
    for axis in range(n_lead):
        view.lead[axis] = array.strides[axis]
    view.col = array.strides[array.ndim - 1]
    view.row = array.strides[array.ndim - 2] if behind == 3 else view.col
    view.head = array.strides[n_lead] if behind == 3 else 0
    return 0


cdef int set_arrays(Job *job, cnp.ndarray query, cnp.ndarray key, cnp.ndarray value, cnp.ndarray out) except -1:
    """The four arrays that every problem has, and the sizes, into an empty job."""
    cdef int axis, n_lead = query.ndim - 3
    memset(job, 0, sizeof(Job))
    job.n_lead = n_lead
    set_view(&job.query, query, n_lead)
    set_view(&job.key, key, n_lead)
    set_view(&job.value, value, n_lead)
    set_view(&job.out, out, n_lead)
    job.batch = 1
    for axis in range(n_lead):
        job.lead_shape[axis] = query.shape[axis]
        job.batch *= query.shape[axis]
    job.num_heads = query.shape[n_lead]
    job.num_kv_heads = key.shape[n_lead]
    job.group_size = job.num_heads // job.num_kv_heads if job.num_kv_heads else 1
    job.len_q = query.shape[n_lead + 1]
    job.len_k = key.shape[n_lead + 1]
    job.head_dim = query.shape[n_lead + 2]
    job.value_dim = value.shape[n_lead + 2]
    job.itemsize = query.itemsize
    return 0


def run(problem, plan, size_t score_mod=0, size_t aux=0):
    """Fills problem.out, and problem.lse and problem.weights where present; see `fastattn._schedule.Schedule`.

    score_mod and aux are the addresses of the problem's, see `fastattn.backends.jit`. Returns the bits of its loop.
    """
    cdef Job job
    cdef cnp.ndarray bits
    set_arrays(&job, problem.query, problem.key, problem.value, problem.out)
    cdef int n_lead = job.n_lead
    if problem.lse is not None:
        set_view(&job.lse, problem.lse, n_lead)
        # (*lead, H, L): its last axis is the row.
        job.lse.head = (<cnp.ndarray>problem.lse).strides[n_lead]
    if problem.weights is not None:
        set_view(&job.weights, problem.weights, n_lead)
    if problem.bias is not None:
        set_view(&job.bias, problem.bias, n_lead)
        job.bias_size = problem.bias.itemsize
        job.bias_swapped = not problem.bias.dtype.isnative
        job.convert_bias = (job.bias_swapped or job.bias_size != job.itemsize or job.bias.col != job.itemsize)
    if problem.dense is not None:
        set_view(&job.dense, problem.dense, n_lead)
        job.dense_size = problem.dense.itemsize
    if problem.key_start is not None:
        set_view(&job.key_start, problem.key_start, n_lead)
        set_view(&job.key_stop, problem.key_stop, n_lead)
    if problem.mask_map is not None:
        bits = problem.mask_map.bits
        set_view(&job.tile_index, problem.mask_map.index, n_lead)
        job.tile_bits = <const uint32_t *>cnp.PyArray_DATA(bits)
        job.tile_q = bits.shape[1]
        job.tile_k = bits.shape[2] * WORD
    if problem.sinks is not None:
        job.sinks = <char *>cnp.PyArray_DATA(<cnp.ndarray>problem.sinks)
    job.score_mod = <score_loop>score_mod
    job.aux = <const char *>aux
    solve(&job, problem.scale, 0.0 if problem.softcap is None else problem.softcap, plan)
    return job.read_outside


cdef int solve(Job *job, double scale, double softcap, plan) except -1:
    cdef int num_threads = plan.num_threads
    if job.batch == 0 or job.num_heads == 0 or job.len_q == 0:
        return 0
    set_options(job, scale, softcap)
    set_blocks(job, plan.block_q, plan.block_k)
    job.uses_split_kv = plan.uses_split_kv
    if job.uses_split_kv:
        set_rows(job, num_threads, plan)
    elif job.n_blocks > 1:
        set_copies(job, num_threads, plan)
    with nogil:
        run_job(job, num_threads)
        free(job.memory)
    if job.out_of_memory:
        raise MemoryError("no memory for the tiles of a thread")
    return 0


cdef inline bint is_plain(object array) noexcept:
    """An ndarray of native float32 or float64 with at least three axes."""
    if not cnp.PyArray_CheckExact(array):
        return False
    cdef cnp.ndarray a = array
    cdef int typenum = cnp.PyArray_TYPE(a)
    return (typenum == cnp.NPY_FLOAT or typenum == cnp.NPY_DOUBLE) and cnp.PyArray_ISNOTSWAPPED(a) and a.ndim >= 3


def run_plain(query, key, value, causal, scale, plan):
    """The result of a call without options beyond causal and scale, or None where it is not plain enough.

    plan is called with the size of an element, and the arguments of `fastattn._schedule.is_small`. The short way for small
    arrays: three ndarrays of one native float dtype with equal leading axes. Whatever is not so, and every error,
    is left to the general way, which gives the same bits.
    """
    cdef Job job
    cdef double factor
    cdef int axis
    cdef bint triangle = causal is True
    cdef int64_t *stops = NULL
    cdef Py_ssize_t i
    if not (is_plain(query) and is_plain(key) and is_plain(value)) or not (triangle or causal is False):
        return None
    cdef cnp.ndarray q = query, k = key, v = value, out
    cdef int n = q.ndim, typenum = cnp.PyArray_TYPE(q)
    cdef cnp.npy_intp shape[MAX_LEAD]
    if k.ndim != n or v.ndim != n or cnp.PyArray_TYPE(k) != typenum or cnp.PyArray_TYPE(v) != typenum:
        return None
    for axis in range(n - 3):
        if k.shape[axis] != q.shape[axis] or v.shape[axis] != q.shape[axis]:
            return None
    if (k.shape[n - 3] == 0 or q.shape[n - 3] % k.shape[n - 3] != 0 or v.shape[n - 3] != k.shape[n - 3]
            or v.shape[n - 2] != k.shape[n - 2] or k.shape[n - 1] != q.shape[n - 1] or q.shape[n - 1] == 0
            or (triangle and q.shape[n - 2] != k.shape[n - 2])):
        return None
    if scale is None:
        factor = 1 / sqrt(<double>q.shape[n - 1])
    elif type(scale) is float and isfinite(<double>scale):
        factor = scale
    else:
        return None

    for axis in range(n - 1):
        shape[axis] = q.shape[axis]
    shape[n - 1] = v.shape[n - 1]
    out = cnp.PyArray_EMPTY(n, shape, typenum, 0)
    set_arrays(&job, q, k, v, out)
    if triangle:
        # Key intervals [0, i + 1), the same for every item: the zero in front is every row's start.
        stops = <int64_t *>malloc((job.len_q + 1) * sizeof(int64_t))
        if stops == NULL:
            raise MemoryError("no memory for the key intervals")
        for i in range(job.len_q + 1):
            stops[i] = i
        job.key_start.data = <char *>stops
        job.key_stop.data = <char *>(stops + 1)
        job.key_stop.row = sizeof(int64_t)
    try:
        solve(&job, factor, 0.0, plan(job.itemsize, job.batch * job.num_kv_heads, job.len_q * job.group_size,
                                      job.len_k, job.head_dim + job.value_dim))
    finally:
        free(stops)
    return out


cdef void set_options(Job *job, double scale, double softcap) noexcept nogil:
    """Chooses the domain of the scores: times log2(e), unless something given in natural units must stay exact.

    A bias of any finite size must not overflow, a row with a sink alone has just that as its lse, and a score_mod sees
    scores as they are.
    """
    cdef bint natural = may_mask(job) or job.sinks != NULL
    cdef double unit = 1.0 if natural else LOG2E
    job.exponent_factor = LOG2E if natural else 1.0
    if softcap > 0:
        job.query_factor = scale / softcap
        job.softcap = softcap * unit
    else:
        job.query_factor = scale * unit


cdef void set_blocks(Job *job, Py_ssize_t block_q, Py_ssize_t block_k) noexcept nogil:
    job.kernels = chosen[job.itemsize == 8]
    # No more room than the keys need: a small call stays in the small bins of malloc.
    job.block_k = min(block_k, (job.len_k + WORD - 1) // WORD * WORD)
    if job.block_k == 0:
        job.block_k = WORD
    job.n_vectors = (job.len_q * job.group_size + job.kernels.lanes - 1) // job.kernels.lanes
    block_q = min(block_q // job.kernels.lanes, <Py_ssize_t>job.kernels.max_vectors)
    job.n_blocks = (job.n_vectors + block_q - 1) // block_q
    job.is_masked = job.key_start.data != NULL or job.dense.data != NULL or job.tile_index.data != NULL
    job.n_tasks = job.batch * job.num_kv_heads * job.n_blocks
    job.max_lanes = (job.n_vectors + job.n_blocks - 1) // job.n_blocks * job.kernels.lanes


cdef inline bint has_gaps(const Job *job, const View *view, Py_ssize_t n_cols) noexcept:
    """Whether the elements or the rows of one head lie apart."""
    return (n_cols > 1 and view.col != job.itemsize) or max(view.row, -view.row) > n_cols * job.itemsize


cdef int set_copies(Job *job, int num_threads, plan) except -1:
    """Whether threads copy keys and pack values: where that pays, see `fastattn._schedule`."""
    cdef Py_ssize_t blocks = min(job.n_blocks, job.n_tasks // num_threads), nbytes = plan.copy_nbytes
    job.panel = padded(job.len_k * job.kernels.panel_cols * job.itemsize)
    if (blocks >= (plan.gap_blocks if has_gaps(job, &job.value, job.value_dim) else plan.copy_blocks)
            and n_panels(job) * job.panel <= nbytes):
        job.panels_nbytes = n_panels(job) * job.panel
    if (blocks >= plan.copy_blocks and has_gaps(job, &job.key, job.head_dim)
            and job.len_k * job.head_dim * job.itemsize <= nbytes):
        job.key_copy_nbytes = job.len_k * job.head_dim * job.itemsize
    return 0
