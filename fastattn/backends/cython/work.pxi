# All tasks of a call, on all its threads.

cdef extern from * nogil:
    enum: ATOMIC_RELAXED "__ATOMIC_RELAXED"
    enum: ATOMIC_ACQ_REL "__ATOMIC_ACQ_REL"
    Py_ssize_t fetch_add "__atomic_fetch_add"(Py_ssize_t *, Py_ssize_t, int)
    int64_t fetch_sub "__atomic_fetch_sub"(int64_t *, int64_t, int)
    int64_t fetch_add_64 "__atomic_fetch_add"(int64_t *, int64_t, int)


ctypedef void (*Work)(void *call, Share *shares, int own, int n_shares) noexcept nogil


cdef inline bint take_tasks(Share *shares, int own, int n_shares, Py_ssize_t grain, int *turn, Py_ssize_t *first,
                            Py_ssize_t *stop) noexcept nogil:
    """The next `grain` tasks for a thread, from its own share, then from the others'; False when all are taken. turn is 0
    at first."""
    cdef Share *share
    while turn[0] < n_shares:
        share = &shares[(own + turn[0]) % n_shares]
        first[0] = fetch_add(&share.next, grain, ATOMIC_RELAXED)
        if first[0] < share.stop:
            stop[0] = min(first[0] + grain, share.stop)
            return True
        turn[0] += 1
    return False


ctypedef struct Region:
    Work work
    void *call
    Share *shares
    int n_shares


cdef void run_share(void *region, int thread, int num_threads) noexcept nogil:
    cdef Region *r = <Region *>region
    r.work(r.call, r.shares, thread % r.n_shares, r.n_shares)


cdef bint run_on_threads(Work work, void *call, Py_ssize_t n_tasks, int num_threads, bint in_order,
                         bint is_short=False) noexcept nogil:
    """Has up to num_threads threads do work(call, ...), which runs the tasks that `take_tasks` gives it. False where some
    were left, as `work` may have no memory. in_order: tasks start in their order, whichever threads run them.

    A thread's share is a range of consecutive tasks: round-robin would bring every head's keys and values into every
    thread's cache. Shares take 6 % off a call at 2048 keys and head_dim 128 and 8 % off layout "bshd" at 1024 and 64:
    2 cores of Emerald Rapids, 2026-11-21, interleaved A/B with round-robin.
    """
    cdef Share all_tasks
    cdef Share *shares = &all_tasks
    cdef Region region
    cdef int n, n_shares = 1
    cdef bint done = True
    if num_threads > 1 and not in_order:
        shares = <Share *>malloc(num_threads * sizeof(Share))
        n_shares = num_threads
        if shares == NULL:
            return run_on_threads(work, call, n_tasks, 1, True)
    for n in range(n_shares):
        shares[n].next = n_tasks * n // n_shares
        shares[n].stop = n_tasks * (n + 1) // n_shares
    if num_threads > 1:
        region = Region(work, call, shares, n_shares)
        if is_short:
            fastattn_pool_run_short(run_share, &region, num_threads)
        else:
            fastattn_pool_run(run_share, &region, num_threads)
    else:
        work(call, shares, 0, 1)
    for n in range(n_shares):
        done = done and shares[n].next >= shares[n].stop
    if shares != &all_tasks:
        free(shares)
    return done


cdef void run_tasks(void *call, Share *shares, int own, int n_shares) noexcept nogil:
    """Without memory for its tiles a thread runs no task, and the others run its share."""
    cdef Job *job = <Job *>call
    cdef Scratch scratch
    cdef Scratch *w = &scratch
    cdef char *memory = <char *>malloc(job.scratch_nbytes + 64)
    cdef int turn = 0
    cdef Py_ssize_t task, first, stop
    # Small tasks are taken a few at a time.
    cdef Py_ssize_t grain = job.n_tasks if n_shares == 1 else max(<Py_ssize_t>1, job.n_tasks // (n_shares * 32))
    if memory != NULL:
        set_scratch(job, <char *>((<size_t>memory + 63) & ~<size_t>63), w)
        if job.uses_fused:
            fused_of(job).begin()
        while take_tasks(shares, own, n_shares, grain, &turn, &first, &stop):
            for task in range(first, stop):
                if job.uses_fused:
                    run_fused_task(job, w, task)
                else:
                    run_task(job, w, task)
        if job.uses_fused:
            fused_of(job).end()
    free(memory)


cdef bint run_job(Job *job, int num_threads) noexcept nogil:
    """Runs every task, on num_threads threads; False without memory. The result does not depend on which thread runs
    which."""
    cdef char *partials = NULL
    cdef bint done = False
    if job.n_splits > 1:
        partials = new_partials(job)
    if job.n_splits <= 1 or partials != NULL:
        done = run_on_threads(run_tasks, job, job.n_tasks, num_threads, False, job.is_short)
    free(partials)
    return done
