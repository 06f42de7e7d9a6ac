# Pages: where they are, and rows of keys or values into those of a cache, converted as they are stored.

def locate_pages(cnp.ndarray index, cnp.ndarray pages, scales):
    """The addresses of pages and of their scales, int64 of the shape of `index`, or None.

    None where a number is not that of a page, or `index` is not int64 and C-contiguous, or scales are not float32.
    """
    cdef cnp.ndarray table, scale_table = None
    cdef Py_ssize_t n, size = index.size, n_pages = pages.shape[0], step = pages.strides[0], scale_step = 0
    cdef const int64_t *number
    cdef int64_t *to
    cdef int64_t *scale_to = NULL
    cdef int64_t at = <int64_t><size_t>cnp.PyArray_DATA(pages), scale_at = 0
    if cnp.PyArray_TYPE(index) != cnp.NPY_INT64 or not cnp.PyArray_ISCARRAY_RO(index):
        return None
    table = cnp.PyArray_EMPTY(index.ndim, index.shape, cnp.NPY_INT64, 0)
    if scales is not None:
        scale_step = (<cnp.ndarray>scales).strides[0]
        scale_at = address_of(scales)
        scale_table = cnp.PyArray_EMPTY(index.ndim, index.shape, cnp.NPY_INT64, 0)
        scale_to = <int64_t *>cnp.PyArray_DATA(scale_table)
    number = <const int64_t *>cnp.PyArray_DATA(index)
    to = <int64_t *>cnp.PyArray_DATA(table)
    for n in range(size):
        if not 0 <= number[n] < n_pages:
            return None
        to[n] = at + number[n] * step
        if scale_to != NULL:
            scale_to[n] = scale_at + number[n] * scale_step
    return table, scale_table


def write_page_rows(cnp.ndarray rows, Py_ssize_t itemsize, int storage, cnp.ndarray table, scale_table,
                    Py_ssize_t page_size, cnp.ndarray starts, cnp.ndarray counts):
    """Writes the first counts[b] of the rows (B, K, T, D) of each item from its row starts[b] on.

    rows : native float32 or float64, or of the storage itself; any strides.
    itemsize, storage : of the pages, a storage of `fastattn._call.storage`.
    table, scale_table : (B, n) int64, contiguous: the addresses of pages (K, page_size, D) and of their scales.
    starts, counts : (B,) int64, contiguous.
    """
    cdef Py_ssize_t B = rows.shape[0], K = rows.shape[1], T = rows.shape[2], D = rows.shape[3], n = table.shape[1]
    cdef Py_ssize_t b, kv, t, c, position, row, n_groups = (D + SCALED - 1) // SCALED
    cdef int given = <int>cnp.PyArray_ITEMSIZE(rows)
    cdef Py_ssize_t col = rows.strides[3]
    cdef bint is_same = given == itemsize
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
                    if storage == INT8:
                        fastattn_encode_row(<int8_t *>to, <char *><size_t>scales[b * n + position // page_size]
                                            + row * n_groups * sizeof(float), source, given, D)
                    elif is_same:
                        memcpy(to, source, D * given)
                    elif storage == REAL:
                        fastattn_convert_row(to, <int>itemsize, source, given, False, given, D)
                    else:
                        kernels.store_row(to, itemsize, source, D, storage)
        free(gathered)
