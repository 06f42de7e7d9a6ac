# Rows in the caller's memory. Those that are not of the compute type, 16-bit numbers and int8 with scales, are converted
# where they are read and written, a row or a tile at a time. Keys and values may be in pages, in the order of a table.
# The kernels of few rows read contiguous rows of any storage, and pages of whole partial sums, as they are.

cdef inline void find_head_rows(const Job *job, HeadRows *rows, const View *view, int64_t storage, int64_t page_size,
                                const View *scale, const View *table, const View *scale_table, Py_ssize_t item,
                                Py_ssize_t kv) noexcept nogil:
    """The keys or values of one head, which the views describe."""
    rows.at = at_item(job, view, item) + kv * view.head
    rows.row = view.row
    rows.col = view.col
    rows.storage = storage
    rows.page_size = page_size
    rows.scale = at_item(job, scale, item) + kv * scale.head
    rows.scale_row = scale.row
    rows.scale_col = scale.col
    rows.table = <const int64_t *>at_item(job, table, item)
    rows.scale_table = <const int64_t *>at_item(job, scale_table, item)


cdef inline bint same_rows(const HeadRows *a, const HeadRows *b) noexcept nogil:
    return a.at == b.at and a.table == b.table


cdef inline char *row_at(const HeadRows *rows, Py_ssize_t key) noexcept nogil:
    if rows.page_size == 0:
        return rows.at + key * rows.row
    return rows.at + rows.table[key // rows.page_size] + key % rows.page_size * rows.row


cdef inline char *scale_at(const HeadRows *rows, Py_ssize_t key) noexcept nogil:
    if rows.page_size == 0:
        return rows.scale + key * rows.scale_row
    return rows.scale + rows.scale_table[key // rows.page_size] + key % rows.page_size * rows.scale_row


cdef inline Py_ssize_t stored_nbytes(const Job *job, const HeadRows *rows, Py_ssize_t n_cols) noexcept nogil:
    """Bytes of n_cols elements as they are stored."""
    return n_cols * fastattn_stored_size(rows.storage & STORAGE, job.itemsize)


cdef inline Py_ssize_t key_columns(const Job *job) noexcept nogil:
    """What the columns of a key are to `score`."""
    return job.head_dim // 2 if job.uses_pairs else job.head_dim


cdef inline Py_ssize_t key_nbytes(const Job *job) noexcept nogil:
    """Bytes of a key without gaps, as it is scored."""
    return key_columns(job) * job.itemsize


cdef inline Py_ssize_t run_of(const HeadRows *rows, Py_ssize_t key, Py_ssize_t n) noexcept nogil:
    """How many of n rows from `key` on are one stride apart."""
    return n if rows.page_size == 0 else min(n, rows.page_size - key % rows.page_size)


cdef inline Py_ssize_t find_rows_to_read(const HeadRows *rows, Py_ssize_t key, Py_ssize_t n, Py_ssize_t stop,
                                         Py_ssize_t prefetch, fastattn_rows *to) noexcept nogil:
    """The rows from `key` on that one call of a kernel of few rows reads in place, and how many of n they are.

    It prefetches `prefetch` rows ahead, 0: none; in pages those before `stop`.
    """
    cdef bint scaled = rows.storage == INT8
    cdef Py_ssize_t target, rest = prefetch % PREFETCH_STEP
    to.at = row_at(rows, key)
    to.row = rows.row
    to.scale = scale_at(rows, key) if scaled else NULL
    to.scale_row = rows.scale_row
    to.near = n
    to.far = to.scale_far = 0
    if rows.page_size == 0:
        to.ahead = prefetch * rows.row
        to.scale_ahead = prefetch * rows.scale_row
        return n
    to.ahead = to.scale_ahead = 0
    n = run_of(rows, key, n)
    # Whole steps are looked up in the table, and the rest is added: the last rows of a page lead past its end, where a
    # prefetch is ignored or wasted.
    target = key + prefetch - rest
    if prefetch and target < stop:
        to.ahead = row_at(rows, target) + rest * rows.row - to.at
        to.scale_ahead = scale_at(rows, target) + rest * rows.scale_row - to.scale if scaled else 0
        # The next page is at another distance.
        to.near = rows.page_size - target % rows.page_size
        target += to.near
        if to.near < n and target < stop:
            to.far = row_at(rows, target) + rest * rows.row - row_at(rows, key + to.near)
            to.scale_far = (scale_at(rows, target) + rest * rows.scale_row - scale_at(rows, key + to.near)
                            if scaled else 0)
    return n


cdef inline void load_row(const Job *job, char *to, const char *row, Py_ssize_t col, int64_t storage,
                          Py_ssize_t n_cols) noexcept nogil:
    """A row of n_cols 16-bit elements, col bytes apart, in the compute type."""
    kernels_of(job).load_row(to, row, col, n_cols, storage & STORAGE, (storage & SWAPPED) != 0, NULL, 0)


cdef inline void load_rows(const Job *job, char *to, const HeadRows *rows, Py_ssize_t key, Py_ssize_t n_rows,
                           Py_ssize_t n_cols) noexcept nogil:
    """to[i][c] = element c of row key + i, in the compute type and contiguous."""
    cdef Py_ssize_t i, n
    cdef const char *at
    cdef const char *scale
    while n_rows > 0:
        n = run_of(rows, key, n_rows)
        at = row_at(rows, key)
        if not rows.storage:
            fastattn_copy_rows(to, at, rows.row, rows.col, job.itemsize, n, n_cols)
        else:
            scale = scale_at(rows, key) if rows.storage == INT8 else NULL
            for i in range(n):
                kernels_of(job).load_row(to + i * n_cols * job.itemsize, at + i * rows.row, rows.col, n_cols,
                                         rows.storage & STORAGE, (rows.storage & SWAPPED) != 0,
                                         scale + i * rows.scale_row, rows.scale_col)
        to += n * n_cols * job.itemsize
        key += n
        n_rows -= n


cdef inline float bfloat16_at(const char *at) noexcept nogil:
    cdef uint16_t upper
    cdef uint32_t word
    cdef float x
    memcpy(&upper, at, sizeof(uint16_t))
    word = <uint32_t>upper << 16
    memcpy(&x, &word, sizeof(float))
    return x


cdef inline void copy_stored_rows(char *to, const HeadRows *rows, Py_ssize_t key, Py_ssize_t n_rows,
                                  Py_ssize_t n_cols) noexcept nogil:
    """Rows of bfloat16 as they are stored, contiguous."""
    cdef Py_ssize_t n
    while n_rows > 0:
        n = run_of(rows, key, n_rows)
        fastattn_copy_rows(to, row_at(rows, key), rows.row, rows.col, PAIR_NBYTES // 2, n, n_cols)
        to += n * n_cols * (PAIR_NBYTES // 2)
        key += n
        n_rows -= n


cdef inline void load_scored_keys(const Job *job, char *to, const HeadRows *rows, Py_ssize_t key,
                                  Py_ssize_t n_keys) noexcept nogil:
    """Keys as they are scored, contiguous: in the compute type, or as pairs of what is stored."""
    if job.uses_pairs:
        copy_stored_rows(to, rows, key, n_keys, job.head_dim)
    else:
        load_rows(job, to, rows, key, n_keys, job.head_dim)


cdef inline void load_value_pairs(const Job *job, Scratch *w, char *to, const HeadRows *rows, Py_ssize_t key,
                                  Py_ssize_t n_keys) noexcept nogil:
    """The values of at most a key tile as pairs, see kernels/pairs.h; `key` is even."""
    cdef Py_ssize_t n = n_keys, row = rows.row
    cdef const char *at
    while n_keys > 0:
        if rows.col == PAIR_NBYTES // 2 and rows.page_size % KEY_CHUNK == 0:
            n = run_of(rows, key, n_keys)
            at = row_at(rows, key)
        else:
            copy_stored_rows(w.staged, rows, key, n, job.value_dim)
            at = w.staged
            row = job.value_dim * (PAIR_NBYTES // 2)
        kernels_of(job).pairs.pair_values(to, at, row, n, job.value_dim)
        to += n // 2 * fastattn_pairs_nbytes(job.value_dim)
        key += n
        n_keys -= n
