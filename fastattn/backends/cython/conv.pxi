# The short causal convolution of each channel by itself: rows and threads. Vectors go over the axis that is contiguous. Over
# channels a row is a token, over time a channel.

cdef enum:
    CONV_NBYTES = 1 << 16  # of the rows of a task, about; other numbers were not measured
    # Elements from which on two threads may be faster than one: they take 0.8 of the time at 65536 elements, with and
    # without the activation. float32 over channels, width 4, 2 cores of Cascade Lake, 2026-11-27.
    CONV_SMALL = 1 << 16
    # Elements up to which no sleeping thread is woken: two threads took 1.4 of the time of one at 65536 elements, and 1.1 at
    # 131072. The same, a call every millisecond, 2 cores of Zen 5, virtual, 2026-11-29.
    CONV_SHORT = 1 << 17


cdef struct Convolution:
    const fastattn_kernels *kernels
    Py_ssize_t itemsize, size # of an element of the computation, and as it is stored
    ItemRows x, out, earlier  # earlier: width - 1 tokens before x
    const char *weight        # (width + 1, ld): the bias is the last row
    Py_ssize_t ld, width, n_rows, n_cols, block, n_blocks
    bint along                # over time
    bint silu


cdef void convolve(const Convolution *n, char *to, char **rows, Py_ssize_t n_rows, Py_ssize_t n_cols,
                   Py_ssize_t channel) noexcept nogil:
    n.kernels.convolve[n.out.storage](to, n.out.row, <const char *const *>rows, n_rows, n_cols,
                                      n.weight + channel * n.itemsize, n.ld, n.width, n.along, n.silu)


cdef void convolve_tokens(const Convolution *n, char **rows, Py_ssize_t item, Py_ssize_t first,
                          Py_ssize_t stop) noexcept nogil:
    cdef Py_ssize_t i, token
    for i in range(stop - first + n.width - 1):
        token = first + i - (n.width - 1)
        rows[i] = item_row(&n.x, item, 0, token) if token >= 0 else item_row(&n.earlier, item, 0, token + n.width - 1)
    convolve(n, item_row(&n.out, item, 0, first), rows, stop - first, n.n_cols, 0)


cdef void convolve_channel(const Convolution *n, char **rows, char *staged, Py_ssize_t item,
                           Py_ssize_t channel) noexcept nogil:
    """The first tokens read a copy of themselves behind the tokens before."""
    cdef Py_ssize_t size = n.size, n_before = n.width - 1, head = min(n_before, n.n_cols), j
    cdef char *x = item_row(&n.x, item, 0, channel)
    cdef char *to = item_row(&n.out, item, 0, channel)
    memcpy(staged, item_row(&n.earlier, item, 0, channel), n_before * size)
    memcpy(staged + n_before * size, x, head * size)
    for j in range(n.width):
        rows[j] = staged + j * size
    convolve(n, to, rows, 1, head, channel)
    for j in range(n.width):
        rows[j] = x + j * size
    convolve(n, to + head * size, rows, 1, n.n_cols - head, channel)


cdef void run_convolution_tasks(void *call, Share *shares, int own, int n_shares) noexcept nogil:
    """Without memory a thread runs no task, and the others run its share."""
    cdef const Convolution *n = <const Convolution *>call
    cdef Py_ssize_t n_pointers = n.block + n.width, task, stop, item, row
    cdef char **rows = <char **>malloc(n_pointers * sizeof(char *) + 2 * n.width * n.size)
    cdef int turn = 0
    if rows == NULL:
        return
    while take_tasks(shares, own, n_shares, 1, &turn, &task, &stop):
        item = task // n.n_blocks
        row = task % n.n_blocks * n.block
        stop = min(row + n.block, n.n_rows)
        if not n.along:
            convolve_tokens(n, rows, item, row, stop)
            continue
        for row in range(row, stop):
            convolve_channel(n, rows, <char *>(rows + n_pointers), item, row)
    free(rows)


def causal_conv1d(tuple arrays, tuple lead, int storage, cnp.ndarray weight, bint along, bint silu, thread_limit):
    """Fills out. arrays: x, out and the tokens before x, (*lead, token, channel), or (*lead, channel, token) where `along`,
    lead not empty, with contiguous rows of one type and native bytes.

    storage: how all three are stored. weight: contiguous and of the computation's type, (width + 1, channels padded to a
    multiple of 16), the bias in the last row.
    """
    cdef Convolution n
    cdef cnp.ndarray x = arrays[0]
    cdef Py_ssize_t n_items = 1
    cdef int64_t *memory
    cdef int64_t *items
    cdef int num_threads = 1
    cdef bint done, is_short = cnp.PyArray_SIZE(x) <= CONV_SHORT
    if cnp.PyArray_SIZE(x) >= CONV_SMALL:
        num_threads = thread_limit()
    for size in lead:
        n_items *= <Py_ssize_t>size
    memory = items = <int64_t *>malloc((3 * n_items + 1) * sizeof(int64_t))
    if items == NULL:
        raise MemoryError("no memory for the addresses of items")
    items = set_item_rows(&n.x, x, storage, lead, items)
    items = set_item_rows(&n.out, arrays[1], storage, lead, items)
    set_item_rows(&n.earlier, arrays[2], storage, lead, items)
    n.itemsize = cnp.PyArray_ITEMSIZE(weight)
    n.size = cnp.PyArray_ITEMSIZE(x)
    n.kernels = chosen[n.itemsize == 8]
    n.weight = <const char *>cnp.PyArray_DATA(weight)
    n.ld = weight.shape[1]
    n.width = weight.shape[0] - 1
    n.n_rows = x.shape[x.ndim - 2]
    n.n_cols = x.shape[x.ndim - 1]
    n.along = along
    n.silu = silu
    # Four rows of tokens are worked on at once.
    n.block = min(n.n_rows, (CONV_NBYTES // max(<Py_ssize_t>1, n.n_cols * n.size) + 3) // 4 * 4)
    n.block = max(<Py_ssize_t>4, n.block)
    n.n_blocks = (n.n_rows + n.block - 1) // n.block
    n_items *= n.n_blocks
    with nogil:
        done = run_on_threads(run_convolution_tasks, &n, n_items, <int>min(<Py_ssize_t>num_threads, n_items), False, is_short)
    free(memory)
    if not done:
        raise MemoryError("no memory for the rows of a thread")
