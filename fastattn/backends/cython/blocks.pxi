# A query block's addresses, in the caller's arrays and the thread's copies, and the keys each of its rows may attend.

cdef void find_rows(const Job *job, Scratch *w, Block *block, Py_ssize_t kv, Py_ssize_t first_row) noexcept nogil:
    """Each lane's query row, head, and keys by band and intervals; lanes past n_rows repeat the last row."""
    cdef Py_ssize_t lane, i = first_row // job.group_size, g = first_row % job.group_size
    cdef int64_t shift, len_k = job.len_k
    for lane in range(block.ld):
        if 0 < lane < block.n_rows:
            g += 1
            if g == job.group_size:
                g = 0
                i += 1
        w.row_i[lane] = i
        w.row_h[lane] = kv * job.group_size + g
    block.low = block.all_start = 0
    block.high = block.all_stop = job.len_k
    if not job.is_masked:
        return
    if job.has_lengths:
        len_k = (<const int64_t *>at_item(job, &job.key_lengths, block.item))[0]
    shift = len_k - job.len_q if job.band_at_end else 0
    block.low = job.len_k
    block.high = 0
    for lane in range(block.ld):
        i = w.row_i[lane]
        w.start[lane] = max(<int64_t>0, i + shift - job.band_left) if job.has_band else 0
        w.stop[lane] = min(len_k, i + shift + job.band_right + 1) if job.has_band else len_k
        if job.has_intervals:
            w.start[lane] = max(w.start[lane], (<const int64_t *>(block.key_start + i * job.key_start.row))[0])
            w.stop[lane] = min(w.stop[lane], (<const int64_t *>(block.key_stop + i * job.key_stop.row))[0])
        if w.start[lane] < w.stop[lane]:
            block.low = min(block.low, w.start[lane])
            block.high = max(block.high, w.stop[lane])
        block.all_start = max(block.all_start, w.start[lane])
        block.all_stop = min(block.all_stop, w.stop[lane])
    # Rounded down, so that partial sums cover the same keys whichever rows share the block.
    block.low -= block.low % (KEY_STEP if not job.has_mask_map else WORD)


cdef inline void find_head(const Job *job, const Scratch *w, Block *block) noexcept nogil:
    """Where the kernels read the block's keys and values."""
    cdef fastattn_values *values = &block.values
    cdef Py_ssize_t panel_nbytes = kernels_of(job).panel_cols * job.itemsize
    block.keys = block.key
    block.key_row = job.key.row
    block.key_col = job.key.col
    if job.copies_keys or job.converts_keys:
        block.keys = w.key_copy
        block.key_row = job.head_dim * job.itemsize
        block.key_col = job.itemsize
    values.at = block.value
    values.row = job.value.row
    values.col = job.value.col
    values.panel = kernels_of(job).panel_cols * job.value.col
    if job.packs_values or job.converts_values:
        values.at = w.value_copy
        values.row = panel_nbytes if job.packs_values else job.value_dim * job.itemsize
        values.col = job.itemsize
        values.panel = job.panel if job.packs_values else panel_nbytes


cdef void find_block(const Job *job, Scratch *w, Block *block, Py_ssize_t item, Py_ssize_t kv,
                     Py_ssize_t first_row) noexcept nogil:
    """Fills in a block's addresses and key intervals; its numbers of rows and vectors are set already."""
    block.item = item
    block.key = at_item(job, &job.key, item) + kv * job.key.head
    block.value = at_item(job, &job.value, item) + kv * job.value.head
    block.bias = at_item(job, &job.bias, item)
    block.dense = at_item(job, &job.dense, item)
    block.mask_index = at_item(job, &job.mask_index, item)
    block.key_start = at_item(job, &job.key_start, item)
    block.key_stop = at_item(job, &job.key_stop, item)
    block.weights = at_item(job, &job.weights, item)
    find_rows(job, w, block, kv, first_row)


cdef inline TaskRows task_rows(const Job *job, Py_ssize_t task) noexcept nogil:
    cdef TaskRows rows
    cdef Py_ssize_t block = task % job.n_blocks, kv_item = task // job.n_blocks
    cdef Py_ssize_t each = job.n_vectors // job.n_blocks, more = job.n_vectors % job.n_blocks
    rows.kv = kv_item % job.num_kv_heads
    rows.item = kv_item // job.num_kv_heads
    # The last block first: under a causal mask it takes longest, and short tasks at the end balance the threads.
    block = job.n_blocks - 1 - block
    rows.first_row = (block * each + min(block, more)) * job.lanes
    rows.n_vectors = <int>(each + (block < more))
    rows.n_rows = min(rows.n_vectors * job.lanes, job.len_q * job.group_size - rows.first_row)
    return rows


cdef void find_prefetches(const Job *job, Scratch *w, Block *block, Py_ssize_t task) noexcept nogil:
    """The rows to prefetch while the block is computed: its outputs, and the next task's queries.

    Both are far apart and accessed in one burst, in which a core would do nothing but wait for memory.
    """
    cdef TaskRows rows
    cdef Py_ssize_t row, i, g
    cdef char *item
    block.n_prefetch = 0
    block.prefetch_nbytes = max(job.head_dim, job.value_dim) * job.itemsize
    if job.out.col == job.out_nbytes:
        for row in range(block.n_rows):
            w.prefetch[row] = w.out_rows[row]
        block.n_prefetch = block.n_rows
    if job.query.col == job.itemsize and task < job.n_tasks:
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
