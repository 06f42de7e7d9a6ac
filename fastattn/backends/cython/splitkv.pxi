# Split-KV: few query rows over many keys, as in decoding, where reading keys and values takes most of the time. The
# query rows of a key/value head are consecutive rows of row tiles (see kernels.h), and its keys are cut into key tiles.
# The partial results of the key tiles are merged pairwise in a binary tree: tiles and tree depend on the positions of
# the keys alone, so the bits of a result do not depend on the number of key tiles of a task.
# Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023), with a tree where it has one sum.

cdef struct Stack:
    # Partial results to be merged, in the order of their keys; each is the root of a larger subtree than the next.
    Partial partials[MAX_PARTIALS]
    int depth


cdef inline char *max_of(const Job *job, const Partial *partial) noexcept nogil:
    return partial.data


cdef inline char *sum_of(const Job *job, const Partial *partial) noexcept nogil:
    return partial.data + padded(job.max_lanes * job.itemsize)


cdef inline char *acc_of(const Job *job, const Partial *partial) noexcept nogil:
    return partial.data + 2 * padded(job.max_lanes * job.itemsize)


cdef inline void merge_before(const Job *job, Stack *stack, Py_ssize_t key_tile) noexcept nogil:
    """Merges the subtrees that are complete before `key_tile`; the whole stack where key_tile is -1.

    The lowest common ancestor of two key tiles has the height of the highest bit in which their numbers differ.
    """
    cdef Partial *last
    cdef Partial *before
    while stack.depth >= 2:
        last = &stack.partials[stack.depth - 1]
        before = last - 1
        if key_tile >= 0 and (before.key_tile ^ last.key_tile) > (last.key_tile ^ key_tile):
            break
        kernels_of(job).merge_rows(acc_of(job, before), max_of(job, before), sum_of(job, before), acc_of(job, last),
                                   max_of(job, last), sum_of(job, last), job.len_q * job.group_size, job.acc_ld,
                                   job.exponent_factor)
        before.has_masked |= last.has_masked
        stack.depth -= 1


cdef inline fastattn_rows copied_rows(const Job *job, const char *at, Py_ssize_t n_cols) noexcept nogil:
    """Rows of the compute type in the thread's memory, one after another."""
    cdef fastattn_rows rows
    memset(&rows, 0, sizeof(fastattn_rows))
    rows.at = at
    rows.row = n_cols * job.itemsize
    return rows


cdef TileState score_key_tile(Job *job, Scratch *w, const Block *block, TileState state, Py_ssize_t key0,
                              Py_ssize_t n_keys, bint notes_masked) noexcept nogil:
    """Scores of the keys key0 .. key0 + n_keys - 1 for all rows, masked, into w.scores; the state of their words.

    notes_masked: the words include what a score_mod masked.
    """
    cdef ScoreTile scores
    cdef fastattn_rows keys
    cdef Py_ssize_t n, at = 0
    if job.converts_keys:
        load_rows(job, w.key_copy, &block.key, key0, n_keys, job.head_dim)
        keys = copied_rows(job, w.key_copy, job.head_dim)
        kernels_of(job).score_rows[0](w.scores, job.block_k, w.query, job.query_ld, block.n_rows, &keys, n_keys,
                                      job.head_dim)
    else:
        while at < n_keys:
            n = find_rows_to_read(&block.key, key0 + at, n_keys - at, block.high, job.key_prefetch, &keys)
            kernels_of(job).score_rows[job.key_storage](w.scores + at * job.itemsize, job.block_k, w.query, job.query_ld,
                                                        block.n_rows, &keys, n, job.head_dim)
            at += n
    if not job.adjusts_all and state == TILE_FULL:
        return state
    scores = row_tile(job, w, state, key0, n_keys)
    adjust_scores(job, w, block, &scores)
    return note_masked(job, w, block, &scores) if job.has_score_mod and notes_masked else state


cdef inline Py_ssize_t key_tile_start(const Job *job, const Block *block, Py_ssize_t key_tile) noexcept nogil:
    # A multiple of KEY_CHUNK, the keys of a partial sum: to skip masked keys in front then changes no bit.
    return max(key_tile * job.block_k, block.low // KEY_CHUNK * KEY_CHUNK)


cdef bint attend_key_tile(Job *job, Scratch *w, const Block *block, Py_ssize_t key_tile, Partial *partial,
                          char *clean, bint has_headroom) noexcept nogil:
    """The partial result of one key tile; False where no row may attend any of its keys.

    clean, has_headroom: see `attend`; the row_max of all keys is in w.row_max.
    """
    cdef const fastattn_kernels *kernels = kernels_of(job)
    cdef Py_ssize_t plain, plain_stop, n, at = 0
    cdef Py_ssize_t key0 = key_tile_start(job, block, key_tile)
    cdef Py_ssize_t n_keys = min((key_tile + 1) * job.block_k, block.high) - key0
    cdef fastattn_rows values
    cdef TileState state = mask_tile(job, w, block, key0, n_keys, True, &plain, &plain_stop)
    if state == TILE_EMPTY:
        return False
    state = score_key_tile(job, w, block, state, key0, n_keys, clean != NULL)
    if has_headroom:
        memcpy(max_of(job, partial), w.row_max, job.max_lanes * job.itemsize)
    kernels.softmax_rows(w.scores, job.block_k, max_of(job, partial), sum_of(job, partial), block.n_rows, n_keys,
                         job.exponent_factor, has_headroom)
    drop_row_weights(job, w, block, key0, n_keys)
    if has_headroom:
        leave_headroom(job, w, block.n_rows, n_keys, job.block_k * job.itemsize, job.itemsize)
    if job.converts_values or (clean != NULL and (job.value_storage or job.value_page_size)):
        load_rows(job, w.value_copy, &block.value, key0, n_keys, job.value_dim)
        values = copied_rows(job, w.value_copy, job.value_dim)
    else:
        find_rows_to_read(&block.value, key0, n_keys, 0, 0, &values)
    if clean != NULL:
        kernels.accumulate_rows_nonfinite(acc_of(job, partial), job.acc_ld, w.scores, job.block_k, block.n_rows, values.at,
                                         values.row, n_keys, job.value_dim, bias_of(job, w), words_of(w, state), clean)
    elif job.converts_values:
        kernels.accumulate_rows[0](acc_of(job, partial), job.acc_ld, w.scores, job.block_k, block.n_rows, &values, n_keys,
                                   job.value_dim, False)
    else:
        while at < n_keys:
            n = find_rows_to_read(&block.value, key0 + at, n_keys - at, block.high, job.value_prefetch, &values)
            kernels.accumulate_rows[job.value_storage](acc_of(job, partial), job.acc_ld, w.scores + at * job.itemsize,
                                                       job.block_k, block.n_rows, &values, n, job.value_dim, at > 0)
            at += n
    partial.key_tile = key_tile
    partial.has_masked = masks_some(job, state)
    return True


cdef void attend_key_tiles(Job *job, Scratch *w, const Block *block, Py_ssize_t first, Py_ssize_t stop,
                           Stack *stack, char *clean, bint has_headroom) noexcept nogil:
    """One partial result of the key tiles first .. stop - 1 on the stack, or none where all their keys are masked."""
    cdef Py_ssize_t key_tile
    stack.depth = 0
    for key_tile in range(max(first, block.low // job.block_k),
                      min(stop, (block.high + job.block_k - 1) // job.block_k)):
        merge_before(job, stack, key_tile)
        stack.partials[stack.depth].data = w.acc + stack.depth * job.partial_nbytes
        if attend_key_tile(job, w, block, key_tile, &stack.partials[stack.depth], clean, has_headroom):
            stack.depth += 1
    merge_before(job, stack, -1)


cdef void add_sinks(const Job *job, const Scratch *w, Stack *stack) noexcept nogil:
    """Merges the sinks, which are logits without a value, with the partial result on the stack, if there is one."""
    cdef Partial *partial = &stack.partials[stack.depth]
    if stack.depth == 1 and not job.sinks:
        return
    partial.data = w.acc + (job.n_partials - 1) * job.partial_nbytes
    partial.key_tile = 0
    partial.has_masked = False
    memset(partial.data, 0, job.partial_nbytes)
    start_rows(job, w, max_of(job, partial), sum_of(job, partial), job.len_q * job.group_size)
    stack.depth += 1
    merge_before(job, stack, -1)
    end_rows(job, w, max_of(job, stack.partials), sum_of(job, stack.partials), job.len_q * job.group_size)


cdef bint write_rows(const Job *job, Scratch *w, const Block *block, Stack *stack) noexcept nogil:
    """Writes the outputs from the stack; whether any is nonfinite."""
    cdef Partial *partial = &stack.partials[0]
    add_sinks(job, w, stack)
    kernels_of(job).finish(w.inverse, w.lse if job.has_lse else NULL, max_of(job, partial), sum_of(job, partial),
                       job.max_lanes, job.exponent_factor, job.kept_share)
    return write_out(job, w, block, acc_of(job, partial), job.acc_ld)


cdef void write_row_weights(Job *job, Scratch *w, const Block *block, const Partial *partial) noexcept nogil:
    """The weights of all rows, recomputed from their scores with the final row_max and row_sum in partial."""
    cdef Py_ssize_t key0, n_keys, plain, plain_stop, key_tile
    cdef TileState state
    clear_weights(job, w, block)
    for key_tile in range(block.low // job.block_k, (block.high + job.block_k - 1) // job.block_k):
        key0 = key_tile_start(job, block, key_tile)
        n_keys = min((key_tile + 1) * job.block_k, block.high) - key0
        state = mask_tile(job, w, block, key0, n_keys, True, &plain, &plain_stop)
        if state == TILE_EMPTY:
            continue
        state = score_key_tile(job, w, block, state, key0, n_keys, True)
        kernels_of(job).softmax_rows(w.scores, job.block_k, max_of(job, partial), w.row_sum, block.n_rows, n_keys,
                                 job.exponent_factor, True)
        drop_row_weights(job, w, block, key0, n_keys)
        write_tile_weights(job, w, block, state, key0, n_keys)


cdef void finish_rows(Job *job, Scratch *w, const Block *block, Stack *stack) noexcept nogil:
    cdef bint nonfinite = write_rows(job, w, block, stack)
    if nonfinite and stack.partials[0].has_masked:
        # Where some keys are masked for some rows: it may be 0 times the NaN or inf of a masked value.
        attend_key_tiles(job, w, block, 0, job.n_key_tiles, stack, w.clean, False)
        nonfinite = write_rows(job, w, block, stack)
    if nonfinite:
        # Sums of finite values may have overflowed.
        memcpy(w.row_max, max_of(job, stack.partials), job.max_lanes * job.itemsize)
        attend_key_tiles(job, w, block, 0, job.n_key_tiles, stack, w.clean if stack.partials[0].has_masked else NULL, True)
        write_large(job, w, block, job.max_lanes, acc_of(job, stack.partials), job.acc_ld * job.itemsize, job.itemsize)
    write_lse(job, w, block)
    if job.has_weights:
        write_row_weights(job, w, block, &stack.partials[0])


cdef void run_split_task(Job *job, Scratch *w, Py_ssize_t task) noexcept nogil:
    """Some key tiles of one key/value head of one batch item; the last task of a head to end writes its outputs."""
    cdef Block block
    cdef SourceRows rows
    cdef Stack stack
    cdef Partial *partial
    cdef Py_ssize_t head = task // job.n_splits, first = task % job.n_splits * job.split_tiles
    block.ld = block.n_rows = job.len_q * job.group_size
    block.n_vectors = 0
    find_block(job, w, &block, head // job.num_kv_heads, head % job.num_kv_heads, 0)
    rows = read_rows(job, w, &block, &job.query, job.query_storage, job.head_dim)
    find_rows_of(job, w, &block, &job.out, w.out_rows)
    kernels_of(job).pack_rows(w.query, job.query_ld, rows.at, block.n_rows, rows.col, job.head_dim, job.query_factor)
    attend_key_tiles(job, w, &block, first, first + job.split_tiles, &stack, NULL, False)
    if job.n_splits > 1:
        partial = &partials_of(job)[task]
        partial.key_tile = -1
        if stack.depth > 0:
            memcpy(partial.data, stack.partials[0].data, job.partial_nbytes)
            partial.key_tile = stack.partials[0].key_tile
            partial.has_masked = stack.partials[0].has_masked
        if fetch_sub(<int64_t *><size_t>job.left + head, 1, ATOMIC_ACQ_REL) > 1:
            return
        stack.depth = 0
        for task in range(head * job.n_splits, (head + 1) * job.n_splits):
            if partials_of(job)[task].key_tile >= 0:
                merge_before(job, &stack, partials_of(job)[task].key_tile)
                stack.partials[stack.depth] = partials_of(job)[task]
                stack.depth += 1
        merge_before(job, &stack, -1)
    finish_rows(job, w, &block, &stack)


cdef char *new_partials(Job *job) noexcept nogil:
    """Allocates the partial results of all tasks, and a count of unfinished tasks per head; NULL without memory."""
    cdef int64_t heads = job.batch * job.num_kv_heads, task
    cdef char *memory = <char *>malloc(64 + job.n_tasks * (job.partial_nbytes + sizeof(Partial)) + heads * sizeof(int64_t))
    cdef char *data = <char *>((<size_t>memory + 63) & ~<size_t>63)
    if memory == NULL:
        return NULL
    job.partials = <int64_t><size_t>(data + job.n_tasks * job.partial_nbytes)
    job.left = <int64_t><size_t>(partials_of(job) + job.n_tasks)
    for task in range(job.n_tasks):
        partials_of(job)[task].data = data + task * job.partial_nbytes
    for task in range(heads):
        (<int64_t *><size_t>job.left)[task] = job.n_splits
    return memory
