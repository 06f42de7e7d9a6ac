# All tasks of a call, on all its threads.

cdef extern from * nogil:
    enum: ATOMIC_RELAXED "__ATOMIC_RELAXED"
    enum: ATOMIC_ACQ_REL "__ATOMIC_ACQ_REL"
    Py_ssize_t fetch_add "__atomic_fetch_add"(Py_ssize_t *, Py_ssize_t, int)
    int64_t fetch_sub "__atomic_fetch_sub"(int64_t *, int64_t, int)


cdef extern from "spread.h" nogil:
    ctypedef struct fastattn_spread:
        pass
    void fastattn_set_cores(const int32_t *, int)
    void fastattn_spread_start(fastattn_spread *)
    void fastattn_spread_enter(fastattn_spread *, int)
    void fastattn_spread_leave(fastattn_spread *, int)


cdef void work(Job *job, Share *shares, int thread, int num_threads) noexcept nogil:
    """Runs the tasks of a thread's own share, then those of the others' shares that have not begun. Without memory for
    its tiles a thread runs none, and the others run its share."""
    cdef Scratch scratch
    cdef Scratch *w = &scratch
    cdef char *memory = <char *>malloc(job.scratch_nbytes + 64)
    cdef Share *share
    cdef int turn
    cdef Py_ssize_t task, first
    # Small tasks are taken a few at a time.
    cdef Py_ssize_t grain = job.n_tasks if num_threads == 1 else max(<Py_ssize_t>1, job.n_tasks // (num_threads * 32))
    if memory != NULL:
        set_scratch(job, <char *>((<size_t>memory + 63) & ~<size_t>63), w)
        if job.uses_fused:
            fused_of(job).begin()
        for turn in range(num_threads):
            share = &shares[(thread + turn) % num_threads]
            while True:
                first = fetch_add(&share.next, grain, ATOMIC_RELAXED)
                if first >= share.stop:
                    break
                for task in range(first, min(first + grain, share.stop)):
                    if job.uses_fused:
                        run_fused_task(job, w, task)
                    elif job.uses_split_kv:
                        run_split_task(job, w, task)
                    else:
                        run_task(job, w, task)
        if job.uses_fused:
            fused_of(job).end()
    free(memory)


cdef void run_job(Job *job, int num_threads) noexcept nogil:
    """Runs every task, on num_threads threads. The result does not depend on which thread runs which.

    A thread's share is a range of consecutive tasks: round-robin would bring every head's keys and values into every
    thread's cache. Shares take 6 % off a call at 2048 keys and head_dim 128 and 8 % off layout "bshd" at 1024 and 64:
    2 cores of Emerald Rapids, 2026-11-21, interleaved A/B with round-robin.
    """
    cdef Share alone
    cdef Share *shares = &alone
    cdef fastattn_spread room
    cdef fastattn_spread *spread = &room
    cdef int thread
    if num_threads > 1:
        shares = <Share *>malloc(num_threads * sizeof(Share))
        if shares == NULL:
            job.failed = 1
            return
    for thread in range(num_threads):
        shares[thread].next = job.n_tasks * thread // num_threads
        shares[thread].stop = job.n_tasks * (thread + 1) // num_threads
    if num_threads > 1:
        fastattn_spread_start(spread)
        with parallel(num_threads=num_threads):
            fastattn_spread_enter(spread, threadid())
            work(job, shares, threadid(), num_threads)
            fastattn_spread_leave(spread, threadid())
    else:
        work(job, shares, 0, 1)
    for thread in range(num_threads):
        job.failed |= shares[thread].next < shares[thread].stop
    if num_threads > 1:
        free(shares)
