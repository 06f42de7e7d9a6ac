# A query block's addresses, in the caller's arrays and the thread's copies, and the keys each of its rows may attend.

cdef void find_rows(const Job *job, Scratch *w, Block *block, Py_ssize_t kv, Py_ssize_t first_row) noexcept nogil:
    """Each lane's query row, head, and keys by band and intervals; lanes past n_rows repeat the last row."""
    cdef Py_ssize_t lane, i = first_row // job.group_size, g = first_row % job.group_size
    cdef int64_t shift, kept_start, len_k = job.len_k
    for lane in range(block.ld):
        if 0 < lane < block.n_rows:
            g += 1
            if g == job.group_size:
                g = 0
                i += 1
        w.row_i[lane] = i
        w.row_h[lane] = kv * job.group_size + g
    block.low = block.all_start = block.hole_start = block.hole_stop = 0
    block.high = block.all_stop = job.len_k
    if not job.is_masked:
        return
    if job.has_lengths:
        len_k = (<const int64_t *>at_item(job, &job.key_lengths, block.item))[0]
    shift = len_k - job.len_q if job.band_at_end else 0
    block.low = kept_start = job.len_k
    block.high = 0
    for lane in range(block.ld):
        i = w.row_i[lane]
        w.start[lane] = max(<int64_t>0, i + shift - job.band_left) if job.has_band else 0
        w.stop[lane] = min(len_k, i + shift + job.band_right + 1) if job.has_band else len_k
        w.kept_start[lane] = 0
        if job.has_intervals:
            w.kept_start[lane] = (<const int64_t *>(block.key_start + i * job.key_start.row))[0]
            w.start[lane] = max(w.start[lane], w.kept_start[lane])
            w.stop[lane] = min(w.stop[lane], (<const int64_t *>(block.key_stop + i * job.key_stop.row))[0])
        if w.start[lane] < w.stop[lane]:
            block.low = min(block.low, w.start[lane])
            block.high = max(block.high, w.stop[lane])
        w.kept_stop[lane] = min(job.keep_first, w.stop[lane], w.start[lane])
        if w.kept_start[lane] < w.kept_stop[lane]:
            kept_start = min(kept_start, w.kept_start[lane])
            block.hole_start = max(block.hole_start, w.kept_stop[lane])
        block.all_start = max(block.all_start, w.start[lane])
        block.all_stop = min(block.all_stop, w.stop[lane])
    if block.hole_start > 0:
        block.hole_stop = block.low
        block.high = max(block.high, block.hole_start)
        block.low = kept_start
    # Rounded down, so that partial sums cover the same keys whichever rows share the block.
    block.low -= block.low % (KEY_STEP if not job.has_mask_map else WORD)


cdef inline void find_rows_of(const Job *job, const Scratch *w, const Block *block, const View *view,
                              char **rows) noexcept nogil:
    """Where the block's rows of an array begin."""
    cdef char *item = at_item(job, view, block.item)
    cdef Py_ssize_t lane
    for lane in range(block.ld):
        rows[lane] = lane_row(w, view, item, lane)


cdef struct SourceRows:
    # The rows of a block in the compute type, and the bytes from one element to the next.
    const char *const *at
    Py_ssize_t col


cdef inline SourceRows read_rows(const Job *job, Scratch *w, const Block *block, const View *view, int64_t storage,
                                 Py_ssize_t n_cols) noexcept nogil:
    """The block's rows of an array: in place, or converted and contiguous."""
    cdef SourceRows rows
    cdef Py_ssize_t lane
    find_rows_of(job, w, block, view, w.rows)
    rows.at = <const char *const *>w.rows
    rows.col = view.col
    if storage:
        rows.at = <const char *const *>w.staged_rows
        rows.col = job.itemsize
        for lane in range(block.ld):
            w.staged_rows[lane] = w.staged + lane * n_cols * job.itemsize
            load_row(job, w.staged_rows[lane], w.rows[lane], view.col, storage, n_cols)
    return rows


cdef inline void find_head(const Job *job, const Scratch *w, Block *block) noexcept nogil:
    """How the kernels read the block's values, and where the thread has its copies."""
    cdef fastattn_values *values = &block.values
    cdef Py_ssize_t panel_cols = kernels_of(job).panel_cols
    block.keys = w.key_copy
    values.at = w.value_copy
    values.row = job.value_dim * job.itemsize
    values.col = job.itemsize
    values.panel = panel_cols * job.itemsize
    if job.pairs_values:
        return
    if job.packs_values:
        values.row = panel_cols * job.itemsize
        values.panel = job.panel
    elif not job.converts_values:
        values.at = NULL
        values.row = block.value.row
        values.col = block.value.col
        values.panel = panel_cols * block.value.col


cdef inline char *value_pairs(const Job *job, const Block *block, Py_ssize_t key) noexcept nogil:
    """Where the thread has the pairs of a head's values, from an even key on."""
    return <char *>block.values.at + key // 2 * fastattn_pairs_nbytes(job.value_dim)


cdef void find_block(const Job *job, Scratch *w, Block *block, Py_ssize_t item, Py_ssize_t kv,
                     Py_ssize_t first_row) noexcept nogil:
    """Fills in a block's addresses and key intervals; its numbers of rows and vectors are set already."""
    block.item = item
    find_head_rows(job, &block.key, &job.key, job.key_storage, job.key_page_size, &job.key_scale, &job.key_table,
                   &job.key_scale_table, item, kv)
    find_head_rows(job, &block.value, &job.value, job.value_storage, job.value_page_size, &job.value_scale,
                   &job.value_table, &job.value_scale_table, item, kv)
    block.bias = at_item(job, &job.bias, item)
    block.dense = at_item(job, &job.dense, item)
    block.mask_index = at_item(job, &job.mask_index, item)
    block.key_start = at_item(job, &job.key_start, item)
    block.key_stop = at_item(job, &job.key_stop, item)
    block.weights = at_item(job, &job.weights, item)
    find_rows(job, w, block, kv, first_row)


cdef inline TaskRows task_rows(const Job *job, Py_ssize_t task) noexcept nogil:
    """The blocks of a head beside each other, for one split of its keys after another."""
    cdef TaskRows rows
    cdef Py_ssize_t block = task % job.n_blocks, kv_item = task // job.n_blocks // job.n_splits
    cdef Py_ssize_t each = job.n_vectors // job.n_blocks, more = job.n_vectors % job.n_blocks
    rows.kv = kv_item % job.num_kv_heads
    rows.item = kv_item // job.num_kv_heads
    # The last block first: under a causal mask it takes longest, and short tasks at the end balance the threads.
    block = job.n_blocks - 1 - block
    rows.split = task // job.n_blocks % job.n_splits
    rows.block = kv_item * job.n_blocks + block
    rows.first_row = (block * each + min(block, more)) * job.lanes
    rows.n_vectors = <int>(each + (block < more))
    rows.n_rows = min(rows.n_vectors * job.lanes, job.len_q * job.group_size - rows.first_row)
    return rows


cdef void find_prefetches(const Job *job, Scratch *w, Block *block, Py_ssize_t task) noexcept nogil:
    """The rows to prefetch while the block is computed: its outputs, and the next task's queries.

    Both are far apart and accessed in one burst, in which a core would do nothing but wait for memory.
    """
    cdef TaskRows rows
    cdef Py_ssize_t row, i, g, query_nbytes = fastattn_stored_size(job.query_storage & STORAGE, job.itemsize)
    cdef char *item
    block.n_prefetch = 0
    block.prefetch_nbytes = max(job.head_dim * query_nbytes, job.value_dim * job.out_nbytes)
    if job.out.col == job.out_nbytes:
        for row in range(block.n_rows):
            w.prefetch[row] = w.out_rows[row]
        block.n_prefetch = block.n_rows
    if job.query.col == query_nbytes and task < job.n_tasks:
        rows = task_rows(job, task)
        item = at_item(job, &job.query, rows.item) + rows.kv * job.group_size * job.query.head
        i = rows.first_row // job.group_size
        g = rows.first_row % job.group_size
        for row in range(rows.n_rows):
            w.prefetch[block.n_prefetch + row] = item + g * job.query.head + i * job.query.row
            g += 1
            if g == job.group_size:
                g = 0
                i += 1
        block.n_prefetch += rows.n_rows
