# Rows of keys or values into the pages of a cache, converted as they are stored.

cdef extern from "encode.h" nogil:
    enum: FASTATTN_SCALED
    void fastattn_store_reals(char *, int, const char *, int, Py_ssize_t)
    void fastattn_encode_row(char *, char *, const char *, int, Py_ssize_t)


def write_page_rows(cnp.ndarray rows, Py_ssize_t itemsize, int storage, cnp.ndarray table, scale_table,
                    Py_ssize_t page_size, cnp.ndarray starts, cnp.ndarray counts):
    """Writes the first counts[b] of the rows (B, K, T, D) of each item from its row starts[b] on.

    rows : native float32 or float64, or of the storage itself; any strides.
    itemsize, storage : of the pages, a storage of `fastattn._storage`.
    table, scale_table : (B, n) int64, contiguous: the addresses of pages (K, page_size, D) and of their scales.
    starts, counts : (B,) int64, contiguous.
    """
    cdef Py_ssize_t B = rows.shape[0], K = rows.shape[1], T = rows.shape[2], D = rows.shape[3], n = table.shape[1]
    cdef Py_ssize_t b, kv, t, c, position, row, n_groups = (D + FASTATTN_SCALED - 1) // FASTATTN_SCALED
    cdef int given = <int>cnp.PyArray_ITEMSIZE(rows)
    cdef Py_ssize_t col = rows.strides[3]
    cdef bint is_same = given == 2
    cdef const fastattn_kernels *kernels = chosen[given == 8]
    cdef const int64_t *pages = <const int64_t *>cnp.PyArray_DATA(table)
    cdef const int64_t *scales = NULL
    cdef const int64_t *first = <const int64_t *>cnp.PyArray_DATA(starts)
    cdef const int64_t *count = <const int64_t *>cnp.PyArray_DATA(counts)
    cdef const char *item
    cdef const char *source
    cdef char *to
    cdef char *gathered = NULL
    if scale_table is not None:
        scales = <const int64_t *>cnp.PyArray_DATA(<cnp.ndarray>scale_table)
    if col != given and D > 1:
        gathered = <char *>malloc(D * given)
        if gathered == NULL:
            raise MemoryError("no memory for a row")
    with nogil:
        for b in range(B):
            for kv in range(K):
                item = <const char *>cnp.PyArray_DATA(rows) + b * rows.strides[0] + kv * rows.strides[1]
                for t in range(count[b]):
                    position = first[b] + t
                    row = kv * page_size + position % page_size
                    to = <char *><size_t>pages[b * n + position // page_size] + row * D * itemsize
                    source = item + t * rows.strides[2]
                    if gathered != NULL:
                        for c in range(D):
                            memcpy(gathered + c * given, source + c * col, given)
                        source = gathered
                    if storage == FASTATTN_INT8:
                        fastattn_encode_row(to, <char *><size_t>scales[b * n + position // page_size]
                                            + row * n_groups * sizeof(float), source, given, D)
                    elif is_same:
                        memcpy(to, source, D * given)
                    elif storage == FASTATTN_REAL:
                        fastattn_store_reals(to, <int>itemsize, source, given, D)
                    else:
                        kernels.store_row(to, itemsize, source, D, storage)
        free(gathered)
