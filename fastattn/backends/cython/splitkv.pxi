# Split-KV: few query rows over many keys, as in decoding, where reading keys and values takes most of the time. The
# query rows of a key/value head are consecutive rows of row tiles (see kernels.h), and a piece of its keys is a key tile.

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


cdef inline Py_ssize_t tile_start(const Block *block, Py_ssize_t key) noexcept nogil:
    # A multiple of KEY_CHUNK, the keys of a partial sum: to skip masked keys in front then changes no bit.
    return max(key, block.low // KEY_CHUNK * KEY_CHUNK)


cdef TileState attend_row_tile(Job *job, Scratch *w, const Block *block, Py_ssize_t low, Py_ssize_t high,
                               Partial *partial, char *clean, bint has_headroom) noexcept nogil:
    """`attend_tiles` of rows of row tiles, over the one key tile of a piece."""
    cdef const fastattn_kernels *kernels = kernels_of(job)
    cdef Py_ssize_t plain, plain_stop, n, at = 0, key0 = tile_start(block, low // job.block_k * job.block_k)
    cdef Py_ssize_t n_keys = high - key0
    cdef fastattn_rows values
    cdef TileState state = mask_tile(job, w, block, key0, n_keys, True, &plain, &plain_stop)
    if state == TILE_EMPTY:
        return TILE_EMPTY
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
    return TILE_PARTIAL if masks_some(job, state) else TILE_FULL


cdef void write_row_weights(Job *job, Scratch *w, const Block *block) noexcept nogil:
    """`write_weights` of rows of row tiles."""
    cdef Py_ssize_t key0, n_keys, plain, plain_stop, key_tile
    cdef TileState state
    clear_weights(job, w, block)
    for key_tile in range(block.low // job.block_k, (block.high + job.block_k - 1) // job.block_k):
        key0 = tile_start(block, key_tile * job.block_k)
        n_keys = min((key_tile + 1) * job.block_k, block.high) - key0
        state = mask_tile(job, w, block, key0, n_keys, True, &plain, &plain_stop)
        if state == TILE_EMPTY:
            continue
        state = score_key_tile(job, w, block, state, key0, n_keys, True)
        kernels_of(job).softmax_rows(w.scores, job.block_k, w.row_max, w.row_sum, block.n_rows, n_keys,
                                 job.exponent_factor, True)
        drop_row_weights(job, w, block, key0, n_keys)
        write_tile_weights(job, w, block, state, key0, n_keys)
