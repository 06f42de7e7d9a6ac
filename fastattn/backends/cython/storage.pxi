# Rows in the caller's memory that are not of the compute type: 16-bit numbers are converted where they are read and
# written, a row or a tile at a time. The kernels of few rows read contiguous 16-bit keys and values as they are.

cdef inline void load_row(const Job *job, char *to, const char *row, Py_ssize_t col, int64_t storage,
                          Py_ssize_t n_cols) noexcept nogil:
    """A row of n_cols 16-bit elements, col bytes apart, in the compute type."""
    kernels_of(job).load_row(to, row, col, n_cols, storage & STORAGE, (storage & SWAPPED) != 0)


cdef inline void load_rows(const Job *job, char *to, const char *rows, const View *view, int64_t storage,
                           Py_ssize_t n_rows, Py_ssize_t n_cols) noexcept nogil:
    """to[i][c] = element (i, c) of a key or value array from `rows` on, in the compute type and contiguous."""
    cdef Py_ssize_t i
    if not storage:
        fastattn_copy_rows(to, rows, view.row, view.col, job.itemsize, n_rows, n_cols)
        return
    for i in range(n_rows):
        load_row(job, to + i * n_cols * job.itemsize, rows + i * view.row, view.col, storage, n_cols)


cdef inline const char *const *query_rows(const Job *job, Scratch *w, Py_ssize_t n_rows) noexcept nogil:
    """The query rows w.rows in the compute type: in place, or converted and contiguous."""
    cdef Py_ssize_t lane
    if not job.query_storage:
        return <const char *const *>w.rows
    for lane in range(n_rows):
        w.staged_rows[lane] = w.staged + lane * job.head_dim * job.itemsize
        load_row(job, w.staged_rows[lane], w.rows[lane], job.query.col, job.query_storage, job.head_dim)
    return <const char *const *>w.staged_rows


cdef inline char *const *rows_to_fill(const Job *job, Scratch *w, char **rows, int64_t storage, Py_ssize_t n_rows,
                                      Py_ssize_t n_cols) noexcept nogil:
    """Where the kernels write results of the compute type: `rows`, or rows that `store_rows` then converts."""
    cdef Py_ssize_t lane
    if not storage:
        return rows
    for lane in range(n_rows):
        w.staged_rows[lane] = w.staged + lane * n_cols * job.itemsize
    return w.staged_rows


cdef inline void store_rows(const Job *job, const Scratch *w, char *const *rows, Py_ssize_t col, int64_t storage,
                            Py_ssize_t n_rows, Py_ssize_t n_cols) noexcept nogil:
    """Rounds what was written to the rows of `rows_to_fill` to 16 bits, where `rows` are so."""
    cdef Py_ssize_t lane
    if storage:
        for lane in range(n_rows):
            kernels_of(job).store_row(rows[lane], col, w.staged_rows[lane], n_cols, storage & STORAGE)
