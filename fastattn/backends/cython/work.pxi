# All tasks of a call, on all its threads.

cdef extern from * nogil:
    enum: ATOMIC_RELAXED "__ATOMIC_RELAXED"
    enum: ATOMIC_ACQ_REL "__ATOMIC_ACQ_REL"
    Py_ssize_t fetch_add "__atomic_fetch_add"(Py_ssize_t *, Py_ssize_t, int)
    int64_t fetch_sub "__atomic_fetch_sub"(int64_t *, int64_t, int)


ctypedef void (*Work)(void *call, Share *shares, int thread, int num_threads) noexcept nogil


cdef inline bint take_tasks(Share *shares, int thread, int num_threads, Py_ssize_t grain, int *turn, Py_ssize_t *first,
                            Py_ssize_t *stop) noexcept nogil:
    """The next `grain` tasks for a thread, from its own share, then from the others'; False when all are taken. turn is 0
    at first."""
    cdef Share *share
    while turn[0] < num_threads:
        share = &shares[(thread + turn[0]) % num_threads]
        first[0] = fetch_add(&share.next, grain, ATOMIC_RELAXED)
        if first[0] < share.stop:
            stop[0] = min(first[0] + grain, share.stop)
            return True
        turn[0] += 1
    return False


cdef bint run_on_threads(Work work, void *call, Py_ssize_t n_tasks, int num_threads) noexcept nogil:
    """Has each of num_threads threads do work(call, ...), which runs the tasks that `take_tasks` gives it. Returns whether
    some were left, as `work` may have no memory. Without memory for shares one thread runs all.

    A thread's share is a range of consecutive tasks: round-robin would bring every head's keys and values into every
    thread's cache. Shares take 6 % off a call at 2048 keys and head_dim 128 and 8 % off layout "bshd" at 1024 and 64:
    2 cores of Emerald Rapids, 2026-11-21, interleaved A/B with round-robin.
    """
    cdef Share alone
    cdef Share *shares = NULL
    cdef fastattn_spread spread
    cdef int thread
    cdef bint left = False
    if num_threads > 1:
        shares = <Share *>malloc(num_threads * sizeof(Share))
    if shares == NULL:
        alone.next = 0
        alone.stop = n_tasks
        work(call, &alone, 0, 1)
        return alone.next < alone.stop
    for thread in range(num_threads):
        shares[thread].next = n_tasks * thread // num_threads
        shares[thread].stop = n_tasks * (thread + 1) // num_threads
    fastattn_spread_start(&spread)
    with parallel(num_threads=num_threads):
        fastattn_spread_enter(&spread, threadid())
        work(call, shares, threadid(), num_threads)
        fastattn_spread_leave(&spread, threadid())
    for thread in range(num_threads):
        left |= shares[thread].next < shares[thread].stop
    free(shares)
    return left


cdef void run_tasks(void *call, Share *shares, int thread, int num_threads) noexcept nogil:
    """Without memory for its tiles a thread runs no task, and the others run its share."""
    cdef Job *job = <Job *>call
    cdef Scratch scratch
    cdef Scratch *w = &scratch
    cdef char *memory = <char *>malloc(job.scratch_nbytes + 64)
    cdef int turn = 0
    cdef Py_ssize_t task, first, stop
    # Small tasks are taken a few at a time.
    cdef Py_ssize_t grain = job.n_tasks if num_threads == 1 else max(<Py_ssize_t>1, job.n_tasks // (num_threads * 32))
    if memory != NULL:
        set_scratch(job, <char *>((<size_t>memory + 63) & ~<size_t>63), w)
        if job.uses_fused:
            fused_of(job).begin()
        while take_tasks(shares, thread, num_threads, grain, &turn, &first, &stop):
            for task in range(first, stop):
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
    """Runs every task, on num_threads threads. The result does not depend on which thread runs which."""
    job.failed |= run_on_threads(run_tasks, job, job.n_tasks, num_threads)
