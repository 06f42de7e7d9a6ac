# One query block of one key/value head, from its queries to its outputs. The keys are cut into pieces of whole key tiles,
# and the partial results of the pieces are merged pairwise in a binary tree. Where a head has few query blocks, tasks share
# its pieces. Pieces and tree depend on the positions of the keys alone, so the bits of a result do not depend on the number
# of pieces of a task. Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023), with a tree where it has one sum.

cdef struct Stack:
    # Partial results to be merged, in the order of their keys; each is the root of a larger subtree than the next.
    Partial partials[MAX_PARTIALS]
    int depth


cdef inline void merge_before(const Job *job, const Block *block, Stack *stack, Py_ssize_t piece) noexcept nogil:
    """Merges the subtrees that are complete before `piece`; the whole stack where piece is -1.

    The lowest common ancestor of two pieces has the height of the highest bit in which their numbers differ.
    """
    cdef Partial *last
    cdef Partial *before
    while stack.depth >= 2:
        last = &stack.partials[stack.depth - 1]
        before = last - 1
        if piece >= 0 and (before.piece ^ last.piece) > (last.piece ^ piece):
            break
        if job.uses_split_kv:
            kernels_of(job).merge_rows(acc_of(job, before), max_of(job, before), sum_of(job, before), acc_of(job, last),
                                       max_of(job, last), sum_of(job, last), block.n_rows, job.acc_ld,
                                       job.exponent_factor)
        else:
            kernels_of(job).merge(acc_of(job, before), max_of(job, before), sum_of(job, before), acc_of(job, last),
                                  max_of(job, last), sum_of(job, last), block.ld, job.value_dim, job.exponent_factor)
        before.has_masked |= last.has_masked
        stack.depth -= 1


cdef void attend_pieces(Job *job, Scratch *w, Block *block, Py_ssize_t first, Py_ssize_t stop, Stack *stack, char *clean,
                        bint has_headroom) noexcept nogil:
    """One partial result of the pieces first .. stop - 1 on the stack, or none where all their keys are masked.

    clean: scratch for one tile of values where nonfinite ones must not reach rows that may not read them, else NULL.
    has_headroom: w.row_max and w.inverse are those of all keys, and the sums are those of `write_large`.
    """
    cdef Py_ssize_t piece, key0, key_stop, n_keys = job.piece_tiles * job.block_k
    cdef Partial *partial
    cdef TileState state
    stack.depth = 0
    for piece in range(max(first, block.low // n_keys), min(stop, (block.high + n_keys - 1) // n_keys)):
        merge_before(job, block, stack, piece)
        partial = &stack.partials[stack.depth]
        partial.data = w.acc + stack.depth * job.partial_nbytes
        key0 = max(piece * n_keys, block.low)
        key_stop = min((piece + 1) * n_keys, block.high)
        if job.uses_split_kv:
            state = attend_row_tile(job, w, block, key0, key_stop, partial, clean, has_headroom)
        else:
            state = attend_tiles(job, w, block, key0, key_stop, partial, clean, has_headroom)
        if state != TILE_EMPTY:
            partial.piece = piece
            partial.has_masked = state == TILE_PARTIAL
            stack.depth += 1
    merge_before(job, block, stack, -1)


cdef void add_sinks(const Job *job, const Scratch *w, const Block *block, Stack *stack) noexcept nogil:
    """Merges the sinks, which are logits without a value, with the partial result on the stack, if there is one."""
    cdef Partial *partial = &stack.partials[stack.depth]
    if stack.depth == 1 and not job.sinks:
        return
    partial.data = w.acc + (job.n_partials - 1) * job.partial_nbytes
    partial.piece = 0
    partial.has_masked = False
    memset(partial.data, 0, job.partial_nbytes)
    start_rows(job, w, max_of(job, partial), sum_of(job, partial), block.ld)
    stack.depth += 1
    merge_before(job, block, stack, -1)
    end_rows(job, w, max_of(job, stack.partials), sum_of(job, stack.partials), block.ld)


cdef bint write_rows(const Job *job, Scratch *w, const Block *block, Stack *stack) noexcept nogil:
    """Writes the outputs from the stack; whether any is nonfinite."""
    cdef Partial *partial = &stack.partials[0]
    add_sinks(job, w, block, stack)
    kernels_of(job).finish(w.inverse, w.lse if job.has_lse else NULL, max_of(job, partial), sum_of(job, partial),
                           lanes_of(job, block), job.exponent_factor, job.kept_share)
    return write_out(job, w, block, acc_of(job, partial), job.acc_ld if job.uses_split_kv else block.ld)


cdef void finish_rows(Job *job, Scratch *w, Block *block, Stack *stack) noexcept nogil:
    """Outputs, lse and weights of the block, whose partial result is on the stack."""
    cdef Partial *partial = &stack.partials[0]
    cdef Py_ssize_t size = job.itemsize, row = size, col = block.ld * size
    cdef bint nonfinite = write_rows(job, w, block, stack)
    if nonfinite and partial.has_masked:
        # Where some keys are masked for some rows: it may be 0 times the NaN or inf of a masked value.
        attend_pieces(job, w, block, 0, job.n_pieces, stack, w.clean, False)
        nonfinite = write_rows(job, w, block, stack)
    memcpy(w.row_max, max_of(job, partial), job.max_lanes * size)
    memcpy(w.row_sum, sum_of(job, partial), job.max_lanes * size)
    if nonfinite:
        # Sums of finite values may have overflowed.
        attend_pieces(job, w, block, 0, job.n_pieces, stack, w.clean if partial.has_masked else NULL, True)
        if job.uses_split_kv:
            row = job.acc_ld * size
            col = size
        write_large(job, w, block, lanes_of(job, block), acc_of(job, partial), row, col)
    write_lse(job, w, block)
    if job.has_weights and job.uses_split_kv:
        write_row_weights(job, w, block)
    elif job.has_weights:
        write_weights(job, w, block)


cdef inline void load_queries(const Job *job, Scratch *w, Block *block) noexcept nogil:
    cdef SourceRows rows
    if job.uses_split_kv:
        rows = read_rows(job, w, block, &job.query, job.query_storage, job.head_dim)
        kernels_of(job).pack_rows(w.query, job.query_ld, rows.at, block.n_rows, rows.col, job.head_dim, job.query_factor)
    elif job.uses_pairs:
        pack_pairs(job, w, block)
    else:
        pack_block(job, w, block)


cdef inline bint is_last_task(const Job *job, Py_ssize_t number) noexcept nogil:
    """Whether all other tasks of a query block have ended; number: counts the query blocks of all heads."""
    return fetch_sub(<int64_t *><size_t>job.left + number, 1, ATOMIC_ACQ_REL) == 1


cdef bint takes_all(Job *job, const Block *block, Py_ssize_t number, Py_ssize_t split, Stack *stack) noexcept nogil:
    """Hands over the partial result of one of the block's tasks; for the last of them to end, all are merged on the
    stack."""
    cdef Py_ssize_t task = number * job.n_splits + split
    cdef Partial *partial = &partials_of(job)[task]
    partial.piece = -1
    if stack.depth > 0:
        memcpy(partial.data, stack.partials[0].data, job.partial_nbytes)
        partial.piece = stack.partials[0].piece
        partial.has_masked = stack.partials[0].has_masked
    if not is_last_task(job, number):
        return False
    stack.depth = 0
    for task in range(number * job.n_splits, (number + 1) * job.n_splits):
        if partials_of(job)[task].piece >= 0:
            merge_before(job, block, stack, partials_of(job)[task].piece)
            stack.partials[stack.depth] = partials_of(job)[task]
            stack.depth += 1
    merge_before(job, block, stack, -1)
    return True


cdef void run_task(Job *job, Scratch *w, Py_ssize_t task) noexcept nogil:
    """Some pieces of the keys for one query block; the last task of a block to end writes its outputs."""
    cdef Block block
    cdef Stack stack
    cdef TaskRows rows = task_rows(job, task)
    cdef Py_ssize_t n_pieces = job.split_tiles // job.piece_tiles, first = rows.split * n_pieces
    block.n_rows = rows.n_rows
    block.n_vectors = 0 if job.uses_split_kv else rows.n_vectors
    block.ld = rows.n_rows if job.uses_split_kv else rows.n_vectors * job.lanes
    find_block(job, w, &block, rows.item, rows.kv, rows.first_row)
    find_head(job, w, &block)
    load_queries(job, w, &block)
    find_rows_of(job, w, &block, &job.out, w.out_rows)
    if not job.uses_split_kv:
        find_prefetches(job, w, &block, task + 1)
    attend_pieces(job, w, &block, first, first + n_pieces, &stack, NULL, False)
    if job.n_splits == 1 or takes_all(job, &block, rows.block, rows.split, &stack):
        finish_rows(job, w, &block, &stack)


cdef char *new_partials(Job *job) noexcept nogil:
    """Allocates the partial results of all tasks, and a count of unfinished tasks per query block; NULL without memory."""
    cdef int64_t blocks = job.n_tasks // job.n_splits, task
    cdef char *memory = <char *>malloc(64 + job.n_tasks * (job.partial_nbytes + sizeof(Partial)) + blocks * sizeof(int64_t))
    cdef char *data = <char *>((<size_t>memory + 63) & ~<size_t>63)
    if memory == NULL:
        return NULL
    job.partials = <int64_t><size_t>(data + job.n_tasks * job.partial_nbytes)
    job.left = <int64_t><size_t>(partials_of(job) + job.n_tasks)
    for task in range(job.n_tasks):
        partials_of(job)[task].data = data + task * job.partial_nbytes
    for task in range(blocks):
        (<int64_t *><size_t>job.left)[task] = job.n_splits
    return memory
