# Few query rows over many keys, as when tokens are generated: the work is to read keys and values once. All rows of a
# key/value head stand side by side in row tiles (see kernels.h), and the keys are cut into key tiles. Their partial
# results are merged two by two, as the leaves of a binary tree over all keys: the cut and the tree depend on the position
# of a key alone, so the bits of a result do not depend on how many key tiles a thread takes at a time.
# Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023), with a tree where it has one sum.

cdef enum:
    MAX_PARTIALS = 64  # deeper than the tree over any number of keys


cdef struct Stack:
    # Parts that wait to be merged, in the order of their keys; each stands higher in the tree than the next.
    Partial partials[MAX_PARTIALS]
    int depth


cdef inline char *max_of(const Job *job, const Partial *partial) noexcept nogil:
    return partial.data


cdef inline char *sum_of(const Job *job, const Partial *partial) noexcept nogil:
    return partial.data + padded(job.max_lanes * job.itemsize)


cdef inline char *acc_of(const Job *job, const Partial *partial) noexcept nogil:
    return partial.data + 2 * padded(job.max_lanes * job.itemsize)


cdef inline Py_ssize_t whole_vectors(const Job *job, Py_ssize_t n) noexcept nogil:
    return (n + job.kernels.lanes - 1) // job.kernels.lanes * job.kernels.lanes


cdef inline void merge(const Job *job, Partial *partial, const Partial *other) noexcept nogil:
    job.kernels.merge_rows(acc_of(job, partial), max_of(job, partial), sum_of(job, partial), acc_of(job, other),
                           max_of(job, other), sum_of(job, other), job.len_q * job.group_size, job.acc_ld,
                           job.exponent_factor)
    partial.has_masked |= other.has_masked


cdef inline void merge_before(const Job *job, Stack *stack, Py_ssize_t key_tile) noexcept nogil:
    """Merges what the tree joins before `key_tile` comes in; everything where key_tile is -1.

    Two key tiles meet in the tree at the height of the highest bit in which their numbers differ.
    """
    cdef Partial *last
    cdef Partial *before
    while stack.depth >= 2:
        last = &stack.partials[stack.depth - 1]
        before = last - 1
        if key_tile >= 0 and (before.key_tile ^ last.key_tile) > (last.key_tile ^ key_tile):
            break
        merge(job, before, last)
        stack.depth -= 1


cdef TileState score_key_tile(Job *job, Scratch *w, const Block *block, TileState state, Py_ssize_t key0,
                              Py_ssize_t n_keys, bint notes_masked) noexcept nogil:
    """Scores of the keys key0 .. key0 + n_keys - 1 for all rows, masked, into w.scores; the state of their words.

    notes_masked: the words are to say as well what a score_mod masked.
    """
    cdef double softcap = job.softcap
    cdef int64_t outside
    cdef const char *keys = block.key + key0 * job.key.row
    cdef Py_ssize_t key_row = job.key.row, distance = job.key_prefetch
    if job.key_copy_nbytes > 0:
        key_row = job.head_dim * job.itemsize
        fastattn_copy_rows(w.key_copy, keys, job.key.row, job.key.col, job.itemsize, n_keys, job.head_dim)
        keys = w.key_copy
        distance = 0
    job.kernels.score_rows(w.scores, job.block_k, w.query, job.query_ld, block.n_rows, keys, key_row, n_keys,
                           job.head_dim, distance)
    if job.score_mod != NULL:
        if softcap > 0:
            job.kernels.adjust_rows(w.scores, job.block_k, block.n_rows, n_keys, softcap, NULL, NULL)
            softcap = 0
        outside = job.score_mod(w.scores, NULL, job.block_k, block.n_rows, n_keys, key0, block.item, w.row_h, w.row_i,
                                job.aux)
        if outside != 0:
            job.read_outside = outside
    if job.bias.data != NULL:
        find_bias_rows(job, w, block, key0, n_keys)
    if job.bias.data != NULL or softcap > 0 or state == TILE_PARTIAL:
        job.kernels.adjust_rows(w.scores, job.block_k, block.n_rows, n_keys, softcap, bias_of(job, w),
                                words_of(w, state))
    if job.score_mod != NULL and notes_masked:
        return note_masked(job, w, block.n_rows, job.block_k * job.itemsize, job.itemsize, n_keys, state)
    return state


cdef inline Py_ssize_t key_tile_start(const Job *job, const Block *block, Py_ssize_t key_tile) noexcept nogil:
    # In whole chunks of keys, which are summed up together: what is left out in front changes no bit.
    return max(key_tile * job.block_k, block.low // KEY_CHUNK * KEY_CHUNK)


cdef bint attend_key_tile(Job *job, Scratch *w, const Block *block, Py_ssize_t key_tile, Partial *partial,
                      char *clean) noexcept nogil:
    """Softmax and values over one key_tile into partial; whether any row may attend any of its keys. clean: see `attend`."""
    cdef const fastattn_kernels *kernels = job.kernels
    cdef Py_ssize_t plain, plain_stop, value_row = job.value.row, distance = job.value_prefetch
    cdef Py_ssize_t key0 = key_tile_start(job, block, key_tile)
    cdef Py_ssize_t n_keys = min((key_tile + 1) * job.block_k, block.high) - key0
    cdef const char *values = block.value + key0 * value_row
    cdef TileState state = mask_tile(job, w, block, key0, n_keys, True, &plain, &plain_stop)
    if state == TILE_EMPTY:
        return False
    state = score_key_tile(job, w, block, state, key0, n_keys, clean != NULL)
    kernels.softmax_rows(w.scores, job.block_k, max_of(job, partial), sum_of(job, partial), block.n_rows, n_keys,
                         job.exponent_factor, False)
    if job.panels_nbytes > 0:
        fastattn_copy_rows(w.panels, values, value_row, job.value.col, job.itemsize, n_keys, job.value_dim)
        value_row = job.value_dim * job.itemsize
        values = w.panels
        distance = 0
    if clean != NULL:
        kernels.accumulate_rows_nonfinite(acc_of(job, partial), job.acc_ld, w.scores, job.block_k, block.n_rows, values,
                                         value_row, n_keys, job.value_dim, bias_of(job, w), words_of(w, state), clean)
    else:
        kernels.accumulate_rows(acc_of(job, partial), job.acc_ld, w.scores, job.block_k, block.n_rows, values, value_row,
                                n_keys, job.value_dim, distance)
    partial.key_tile = key_tile
    partial.has_masked = state == TILE_PARTIAL or may_mask(job)
    return True


cdef void attend_key_tiles(Job *job, Scratch *w, const Block *block, Py_ssize_t first, Py_ssize_t stop,
                        Stack *stack, char *clean) noexcept nogil:
    """The key tiles first .. stop - 1 into one partial on the stack, or none where no row may attend a key of them."""
    cdef Py_ssize_t key_tile
    stack.depth = 0
    for key_tile in range(max(first, block.low // job.block_k),
                      min(stop, (block.high + job.block_k - 1) // job.block_k)):
        merge_before(job, stack, key_tile)
        stack.partials[stack.depth].data = w.acc + stack.depth * job.partial_nbytes
        if attend_key_tile(job, w, block, key_tile, &stack.partials[stack.depth], clean):
            stack.depth += 1
    merge_before(job, stack, -1)


cdef void add_sinks(const Job *job, const Scratch *w, Stack *stack) noexcept nogil:
    """What is left on the stack, if anything, and the sinks in one partial: a sink is a logit without a value."""
    cdef Partial *partial = &stack.partials[stack.depth]
    cdef Py_ssize_t r
    if stack.depth == 1 and job.sinks == NULL:
        return
    partial.data = w.acc + (job.n_partials - 1) * job.partial_nbytes
    partial.key_tile = 0
    partial.has_masked = False
    memset(partial.data, 0, job.partial_nbytes)
    memcpy(max_of(job, partial), w.empty, job.max_lanes * job.itemsize)
    if job.sinks != NULL:
        for r in range(job.len_q * job.group_size):
            memcpy(max_of(job, partial) + r * job.itemsize, job.sinks + w.row_h[r] * job.itemsize, job.itemsize)
            set_real(sum_of(job, partial) + r * job.itemsize, 1, job.itemsize)
    stack.depth += 1
    merge_before(job, stack, -1)


cdef bint write_rows(const Job *job, Scratch *w, const Block *block, Stack *stack) noexcept nogil:
    """The outputs from all that is on the stack; whether any is NaN."""
    cdef Partial *partial = &stack.partials[0]
    add_sinks(job, w, stack)
    job.kernels.finish(w.inverse, w.lse if job.lse.data != NULL else NULL, max_of(job, partial), sum_of(job, partial),
                       job.max_lanes, job.exponent_factor)
    return job.kernels.unpack_rows(w.out_rows, job.out.col, block.n_rows, acc_of(job, partial), job.acc_ld, job.value_dim,
                                   w.inverse, job.max_lanes)


cdef void write_row_weights(Job *job, Scratch *w, const Block *block, const Partial *partial) noexcept nogil:
    """The weights of all rows: their scores once more, against the row_max and row_sum in partial."""
    cdef Py_ssize_t key0, n_keys, plain, plain_stop, lane, key_tile
    cdef TileState state
    for lane in range(block.n_rows):
        memset(lane_row(w, &job.weights, block.weights, lane), 0, job.len_k * job.itemsize)
    for key_tile in range(block.low // job.block_k, (block.high + job.block_k - 1) // job.block_k):
        key0 = key_tile_start(job, block, key_tile)
        n_keys = min((key_tile + 1) * job.block_k, block.high) - key0
        state = mask_tile(job, w, block, key0, n_keys, True, &plain, &plain_stop)
        if state == TILE_EMPTY:
            continue
        state = score_key_tile(job, w, block, state, key0, n_keys, True)
        job.kernels.softmax_rows(w.scores, job.block_k, max_of(job, partial), w.row_sum, block.n_rows, n_keys,
                                 job.exponent_factor, True)
        for lane in range(block.n_rows):
            w.rows[lane] = lane_row(w, &job.weights, block.weights, lane) + key0 * job.itemsize
        if job.kernels.unpack_rows(w.rows, job.itemsize, block.n_rows, w.scores, job.block_k, n_keys, w.inverse,
                                   job.max_lanes):
            clear_masked(job, w, block, state, n_keys)


cdef void finish_rows(Job *job, Scratch *w, const Block *block, Stack *stack) noexcept nogil:
    """All outputs of one key/value head, from what is on the stack."""
    cdef Py_ssize_t lane
    cdef char *clean
    cdef char *lse_rows = at_item(job, &job.lse, block.item)
    if write_rows(job, w, block, stack) and stack.partials[0].has_masked:
        # NaN came out where some rows may not read every value: 0 * NaN of a masked key may be the cause.
        clean = <char *>malloc(job.block_k * job.value_dim * job.itemsize)
        if clean == NULL:
            job.out_of_memory = True
            return
        attend_key_tiles(job, w, block, 0, job.n_key_tiles, stack, clean)
        free(clean)
        write_rows(job, w, block, stack)
    if job.lse.data != NULL:
        for lane in range(block.n_rows):
            memcpy(lane_row(w, &job.lse, lse_rows, lane), w.lse + lane * job.itemsize, job.itemsize)
    if job.weights.data != NULL:
        write_row_weights(job, w, block, &stack.partials[0])


cdef void run_split_task(Job *job, Scratch *w, Py_ssize_t task) noexcept nogil:
    """Some key tiles of one key/value head of one batch item; who does the last of a head writes its outputs."""
    cdef Block block
    cdef Stack stack
    cdef Partial *partial
    cdef Py_ssize_t lane, head = task // job.n_splits, first = task % job.n_splits * job.split_tiles
    cdef char *query
    cdef char *out
    block.ld = block.n_rows = job.len_q * job.group_size
    block.n_vectors = 0
    find_block(job, w, &block, head // job.num_kv_heads, head % job.num_kv_heads, 0)
    query = at_item(job, &job.query, block.item)
    out = at_item(job, &job.out, block.item)
    for lane in range(block.n_rows):
        w.rows[lane] = lane_row(w, &job.query, query, lane)
        w.out_rows[lane] = lane_row(w, &job.out, out, lane)
    job.kernels.pack_rows(w.query, job.query_ld, <const char *const *>w.rows, block.n_rows, job.query.col,
                          job.head_dim, job.query_factor)
    attend_key_tiles(job, w, &block, first, first + job.split_tiles, &stack, NULL)
    if job.n_splits > 1:
        partial = &job.partials[task]
        partial.key_tile = -1
        if stack.depth > 0:
            memcpy(partial.data, stack.partials[0].data, job.partial_nbytes)
            partial.key_tile = stack.partials[0].key_tile
            partial.has_masked = stack.partials[0].has_masked
        if fetch_sub(&job.left[head], 1, ATOMIC_ACQ_REL) > 1:
            return
        stack.depth = 0
        for task in range(head * job.n_splits, (head + 1) * job.n_splits):
            if job.partials[task].key_tile >= 0:
                merge_before(job, &stack, job.partials[task].key_tile)
                stack.partials[stack.depth] = job.partials[task]
                stack.depth += 1
        merge_before(job, &stack, -1)
    finish_rows(job, w, &block, &stack)


cdef inline Py_ssize_t prefetch_distance(const Job *job, Py_ssize_t row, Py_ssize_t n_cols, Py_ssize_t nbytes) noexcept:
    """The distance in memory of so many rows as have nbytes together."""
    return row * (nbytes // max(<Py_ssize_t>1, n_cols * job.itemsize) + 1)


cdef int set_rows(Job *job, int num_threads, plan) except -1:
    """How the rows of each key/value head lie in tiles, and which key tiles are a task; see `fastattn._schedule`."""
    cdef Py_ssize_t task, heads = job.batch * job.num_kv_heads, most = plan.split_tasks * num_threads
    job.max_lanes = whole_vectors(job, job.len_q * job.group_size)
    job.block_k = whole_vectors(job, job.block_k)
    job.query_ld = whole_vectors(job, job.head_dim)
    job.acc_ld = whole_vectors(job, job.value_dim)
    job.key_copy_nbytes = job.block_k * job.head_dim * job.itemsize if job.key.col != job.itemsize else 0
    job.panels_nbytes = job.block_k * job.value_dim * job.itemsize if job.value.col != job.itemsize else 0
    if heads * job.len_k * (job.head_dim + job.value_dim) * job.itemsize >= plan.uncached_nbytes:
        job.key_prefetch = prefetch_distance(job, job.key.row, job.head_dim, plan.prefetch_distance)
        job.value_prefetch = prefetch_distance(job, job.value.row, job.value_dim, plan.prefetch_distance)
    job.partial_nbytes = (2 * padded(job.max_lanes * job.itemsize)
                       + padded(job.len_q * job.group_size * job.acc_ld * job.itemsize))
    job.n_key_tiles = (job.len_k + job.block_k - 1) // job.block_k
    job.n_partials = 2   # the deepest that the stack gets, and the sinks
    while <Py_ssize_t>1 << (job.n_partials - 2) < job.n_key_tiles:
        job.n_partials += 1
    job.split_tiles = 1
    while job.split_tiles < job.n_key_tiles and (
            num_threads == 1 or heads * ((job.n_key_tiles - 1) // job.split_tiles + 1) > most):
        job.split_tiles *= 2
    job.n_splits = max(<Py_ssize_t>1, (job.n_key_tiles - 1) // job.split_tiles + 1)
    job.n_tasks = heads * job.n_splits
    if job.n_splits == 1:
        return 0
    job.memory = <char *>malloc(64 + job.n_tasks * job.partial_nbytes + job.n_tasks * sizeof(Partial)
                                + heads * sizeof(Py_ssize_t))
    if job.memory == NULL:
        raise MemoryError("no memory for the partials of the key/value heads")
    job.partials = <Partial *>(((<size_t>job.memory + 63) & ~<size_t>63) + job.n_tasks * job.partial_nbytes)
    job.left = <Py_ssize_t *>(job.partials + job.n_tasks)
    for task in range(job.n_tasks):
        job.partials[task].data = <char *>job.partials - (task + 1) * job.partial_nbytes
    for task in range(heads):
        job.left[task] = job.n_splits
    return 0
