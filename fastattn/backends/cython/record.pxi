# What the driver works on: the kernels it may call, the arrays and options of one call (Job), the rows of one task
# (Block) and a thread's scratch memory (Scratch). Layouts only, no computation.

# Of a field that says how an array is stored: which of the kernels' storages, and whether its bytes are swapped.
cdef enum:
    STORAGE = 0xff
    SWAPPED = 0x100

# A word holds the mask bits of 32 keys; a tile of a mask map has masks.map.TILE_Q queries and TILE_K keys, powers of two.
cdef enum:
    WORD = 32
    PREFETCH_STEP = 16       # rows in pages at which the prefetch distance may change, as kernels require
    PAIR_NBYTES = 4          # of two adjacent columns of a key, in 16 bits each
    KEY_STEP = 4             # a block's keys start at a multiple of this, as `first_chunk` of the kernels requires
    PREFETCH_PER_COLUMN = 8     # bytes at each address that `accumulate` is sure to prefetch, per column of value
    INDEX_FULL = -1
    INDEX_EMPTY = -2

cdef enum TileState:
    TILE_EMPTY
    TILE_FULL
    TILE_PARTIAL


cdef struct View:
    # An array with axes (*lead, head, row, column): its address, and strides in bytes.
    int64_t data
    int64_t col, row, head


cdef struct Partial:
    # The softmax and the values of some pieces of the keys, see partials.pxi.
    char *data        # row_max, row_sum and acc, each aligned to a cache line
    int64_t piece     # one of those pieces; -1 where no row may attend any of their keys
    int64_t has_masked  # whether any of their keys is masked for only some rows


ctypedef int64_t (*score_loop)(void *scores, void *tile_max, Py_ssize_t ld, Py_ssize_t n, Py_ssize_t stops,
                               Py_ssize_t key0, Py_ssize_t item, const Py_ssize_t *row_h, const Py_ssize_t *row_i,
                               const char *aux) noexcept nogil


cdef struct Share:
    # The range of tasks that one thread runs before it helps the others. A cache line each, against false sharing.
    Py_ssize_t next
    Py_ssize_t stop
    char rest_of_line[48]


cdef struct HeadRows:
    # The keys or the values of one head of one batch item, in the caller's memory.
    char *at                     # the first row; in pages, its place relative to the page's address
    char *scale                  # its scales, of int8, likewise
    const int64_t *table         # the address of each page
    const int64_t *scale_table
    Py_ssize_t page_size         # keys of a page; 0 where they are not in pages
    Py_ssize_t row, col, scale_row, scale_col
    int64_t storage


cdef struct Seen:
    # The head that a thread last worked on, and the range of its rows that it has seen.
    HeadRows key
    HeadRows value
    Py_ssize_t start
    Py_ssize_t stop


# Job: the record of a call, whose arrays are Views; `run` fills in the addresses. The leading strides of each view
# follow, innermost axis first, then the lengths of the leading axes in that order, then each BiasTerm with the leading
# strides of its array and of its rows. Scratch: one thread's tiles, from `base` on, see kernels.h for their layout; and
# what it has Seen. All fields are those of backends/cpu/fields.py.
include "generated/job.pxi"


cdef struct Block:
    # The query rows of one task, and where its batch item starts in each array.
    Py_ssize_t item, ld, n_rows
    int n_vectors
    uint64_t other_lanes     # those whose scores come from the kernels of float32
    Py_ssize_t low, high     # no lane attends a key outside; low is a multiple of KEY_STEP
    Py_ssize_t all_start, all_stop  # every lane's interval allows the keys inside
    Py_ssize_t hole_start, hole_stop  # no lane may attend the keys inside: those between kept first keys and windows
    Py_ssize_t n_prefetch, prefetch_nbytes
    HeadRows key
    HeadRows value
    char *keys               # the thread's copy of keys: those of the head, or those of a tile
    fastattn_values values   # the thread's copy of values
    char *bias
    char *dense
    char *mask_index
    char *key_start
    char *key_stop
    char *weights


cdef struct TaskRows:
    # Which rows a task works on, and which of their splits over the keys it is.
    Py_ssize_t item, kv, first_row, n_rows, split
    Py_ssize_t block         # counts the query blocks of all heads
    int n_vectors


cdef inline const fastattn_kernels *kernels_of(const Job *job) noexcept nogil:
    return <const fastattn_kernels *><size_t>job.kernels


cdef inline Partial *partials_of(const Job *job) noexcept nogil:
    return <Partial *><size_t>job.partials


cdef inline char *max_of(const Job *job, const Partial *partial) noexcept nogil:
    return partial.data


cdef inline char *sum_of(const Job *job, const Partial *partial) noexcept nogil:
    return partial.data + padded(job.max_lanes * job.itemsize)


cdef inline char *acc_of(const Job *job, const Partial *partial) noexcept nogil:
    return partial.data + 2 * padded(job.max_lanes * job.itemsize)


cdef inline Py_ssize_t lanes_of(const Job *job, const Block *block) noexcept nogil:
    """How many lanes what there is of each row has, in whole vectors."""
    return job.max_lanes if job.uses_split_kv else block.ld


cdef inline const int64_t *lead_shape_of(const Job *job) noexcept nogil:
    return <const int64_t *>(job + 1) + N_VIEWS * job.n_lead


cdef inline Py_ssize_t item_offset(const Job *job, const int64_t *lead, Py_ssize_t item) noexcept nogil:
    """Where a batch item starts in an array of these leading strides."""
    cdef const int64_t *lead_shape = lead_shape_of(job)
    cdef Py_ssize_t at = 0
    cdef int64_t axis
    if job.n_lead == 0:
        return 0
    for axis in range(job.n_lead - 1):
        at += item % lead_shape[axis] * lead[axis]
        item = item // lead_shape[axis]
    return at + item * lead[job.n_lead - 1]


cdef inline const BiasTerm *bias_term(const Job *job, Py_ssize_t number) noexcept nogil:
    cdef const int64_t *terms = lead_shape_of(job) + job.n_lead
    return <const BiasTerm *>(terms + number * (<Py_ssize_t>sizeof(BiasTerm) // 8 + 2 * job.n_lead))


cdef inline char *at_item(const Job *job, const View *view, Py_ssize_t item) noexcept nogil:
    """Where a batch item starts in an array; NULL where the call has no such array."""
    cdef char *p = <char *><size_t>view.data
    if p == NULL:
        return p
    return p + item_offset(job, <const int64_t *>(job + 1) + (view - &job.query) * job.n_lead, item)


cdef inline char *lane_row(const Scratch *w, const View *view, char *item, Py_ssize_t lane) noexcept nogil:
    return item + w.row_h[lane] * view.head + w.row_i[lane] * view.row


cdef inline const char *const *bias_of(const Job *job, const Scratch *w) noexcept nogil:
    return <const char *const *>w.bias_rows if job.has_bias else NULL


cdef inline const uint32_t *words_of(const Scratch *w, TileState state) noexcept nogil:
    return w.words if state == TILE_PARTIAL else NULL


cdef inline void set_real(char *to, double x, Py_ssize_t itemsize) noexcept nogil:
    """x as a float or double at any address."""
    cdef float single = <float>x
    if itemsize == 4:
        memcpy(to, &single, sizeof(float))
    else:
        memcpy(to, &x, sizeof(double))


cdef inline double get_real(const char *at, Py_ssize_t itemsize) noexcept nogil:
    """The float or double at any address."""
    cdef float single
    cdef double x
    if itemsize == 4:
        memcpy(&single, at, sizeof(float))
        return single
    memcpy(&x, at, sizeof(double))
    return x


cdef inline Py_ssize_t padded(Py_ssize_t nbytes) noexcept nogil:
    return (nbytes + 63) & ~<Py_ssize_t>63


cdef inline char *take(char **at, Py_ssize_t nbytes) noexcept nogil:
    """The next tile of a thread's memory, where `at` is, a cache line; `at` moves past it."""
    cdef char *tile = at[0]
    at[0] += padded(nbytes)
    return tile


cdef void set_scratch(const Job *job, char *base, Scratch *w) noexcept nogil:
    """Sets the addresses of a thread's tiles in its scratch memory, which begins at a cache line."""
    cdef Py_ssize_t lane
    find_scratch_tiles(job, base, w)
    memset(&w.seen.key, 0, sizeof(HeadRows))   # no head's
    for lane in range(job.max_lanes):
        set_real(w.empty + lane * job.itemsize, -INFINITY, job.itemsize)
