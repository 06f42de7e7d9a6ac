# What the driver works on: the kernels it may call, the arrays and options of one call (Job), the rows of one task
# (Block) and a thread's own tiles (Scratch). Knows layouts, computes nothing.

cdef extern from "kernels.h" nogil:
    enum: KEY_CHUNK "FASTATTN_KEY_CHUNK"
    ctypedef struct fastattn_values:
        const char *at
        Py_ssize_t row, col, panel
    ctypedef struct fastattn_kernels:
        const char *isa
        int lanes
        int max_vectors
        int panel_cols
        void (*pack)(void *, Py_ssize_t, const char *const *, Py_ssize_t, Py_ssize_t, double) noexcept nogil
        void (*score)(void *, void *, const void *, Py_ssize_t, int, const char *, const Py_ssize_t *, Py_ssize_t,
                      Py_ssize_t, Py_ssize_t, const char *, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*adjust)(void *, void *, Py_ssize_t, const Py_ssize_t *, double, const char *const *,
                       const uint32_t *) noexcept nogil
        void (*softmax)(void *, const void *, void *, void *, void *, Py_ssize_t, const Py_ssize_t *, Py_ssize_t,
                        double) noexcept nogil
        void (*pack_values)(void *, Py_ssize_t, const char *, Py_ssize_t, Py_ssize_t, Py_ssize_t,
                            Py_ssize_t) noexcept nogil
        void (*accumulate)(void *, const void *, const void *, Py_ssize_t, int, const fastattn_values *,
                           const Py_ssize_t *, Py_ssize_t, Py_ssize_t, const char *const *, Py_ssize_t,
                           Py_ssize_t) noexcept nogil
        void (*accumulate_nonfinite)(void *, const void *, const void *, Py_ssize_t, const fastattn_values *,
                                    const Py_ssize_t *, Py_ssize_t, Py_ssize_t, const char *const *,
                                    const uint32_t *, void *) noexcept nogil
        void (*finish)(void *, void *, const void *, const void *, Py_ssize_t, double) noexcept nogil
        int (*unpack)(char *const *, Py_ssize_t, Py_ssize_t, const void *, Py_ssize_t, Py_ssize_t,
                      const void *) noexcept nogil
        void (*mask_words)(uint32_t *, Py_ssize_t, const char *const *, Py_ssize_t, int, Py_ssize_t) noexcept nogil
        void (*pack_rows)(void *, Py_ssize_t, const char *const *, Py_ssize_t, Py_ssize_t, Py_ssize_t,
                          double) noexcept nogil
        void (*score_rows)(void *, Py_ssize_t, const void *, Py_ssize_t, Py_ssize_t, const char *, Py_ssize_t,
                           Py_ssize_t, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*adjust_rows)(void *, Py_ssize_t, Py_ssize_t, Py_ssize_t, double, const char *const *,
                            const uint32_t *) noexcept nogil
        void (*softmax_rows)(void *, Py_ssize_t, void *, void *, Py_ssize_t, Py_ssize_t, double, int) noexcept nogil
        void (*accumulate_rows)(void *, Py_ssize_t, const void *, Py_ssize_t, Py_ssize_t, const char *, Py_ssize_t,
                                Py_ssize_t, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*accumulate_rows_nonfinite)(void *, Py_ssize_t, const void *, Py_ssize_t, Py_ssize_t, const char *,
                                         Py_ssize_t, Py_ssize_t, Py_ssize_t, const char *const *, const uint32_t *,
                                         void *) noexcept nogil
        void (*merge_rows)(void *, void *, void *, const void *, const void *, const void *, Py_ssize_t, Py_ssize_t,
                           double) noexcept nogil
        int (*unpack_rows)(char *const *, Py_ssize_t, Py_ssize_t, const void *, Py_ssize_t, Py_ssize_t, const void *,
                           Py_ssize_t) noexcept nogil
        double (*fma_peak)(long) noexcept nogil
        double (*integer_peak)(long) noexcept nogil
        uint64_t (*read_memory)(const void *, Py_ssize_t) noexcept nogil
    const fastattn_kernels *fastattn_find_kernels(const char *, int)

# Words hold the mask bits of 32 keys; tile maps come in _mask_map.TILE_Q queries by _mask_map.TILE_K keys.
cdef enum:
    WORD = 32
    READ_PIECE = 1 << 20     # bytes that a thread takes at a time from memory that is read to measure it
    KEY_STEP = 4             # a block's keys start at a multiple of this, as `first_chunk` of the kernels wants
    MAX_LEAD = 64
    PREFETCH_PER_COLUMN = 8     # bytes at each address that `accumulate` is sure to ask for, per column of value
    INDEX_FULL = -1
    INDEX_EMPTY = -2

cdef enum TileState:
    TILE_EMPTY
    TILE_FULL
    TILE_PARTIAL


cdef struct View:
    # An array with axes (*lead, head, row, column), in bytes. data is NULL when the problem has none.
    char *data
    Py_ssize_t lead[MAX_LEAD]
    Py_ssize_t head
    Py_ssize_t row
    Py_ssize_t col


cdef struct Partial:
    # The softmax and the values of some key tiles of keys, see splitkv.pxi.
    char *data               # row_max, row_sum and acc, each from a line of memory on
    Py_ssize_t key_tile          # one of those key tiles; -1 where no row may attend a key of them
    bint has_masked          # whether in any of them only some rows may read a key


ctypedef int64_t (*score_loop)(void *scores, void *tile_max, Py_ssize_t ld, Py_ssize_t n, Py_ssize_t stops,
                               Py_ssize_t key0, Py_ssize_t item, const Py_ssize_t *row_h, const Py_ssize_t *row_i,
                               const char *aux) noexcept nogil


cdef struct Job:
    const fastattn_kernels *kernels
    Py_ssize_t itemsize
    int n_lead
    Py_ssize_t lead_shape[MAX_LEAD]
    Py_ssize_t batch, num_heads, num_kv_heads, group_size, len_q, len_k, head_dim, value_dim
    View query, key, value, out, lse, weights, bias, dense, key_start, key_stop, tile_index
    char *sinks
    const uint32_t *tile_bits
    Py_ssize_t tile_q, tile_k
    int bias_size, dense_size
    bint bias_swapped, convert_bias
    score_loop score_mod     # the caller's function over a tile, see jit/loops.py, or NULL
    const char *aux          # what it reads
    int64_t read_outside     # set by a thread: what it returned, unless 0
    double query_factor      # what the packed query is multiplied by
    double softcap           # 0 when there is none; in the domain of the scores
    double exponent_factor   # see kernels.h: 1 in the log2 domain, log2(e) in the natural one
    Py_ssize_t block_k
    Py_ssize_t n_vectors     # vectors of lanes that the rows of one key/value head fill
    Py_ssize_t n_blocks      # blocks that they are cut into
    Py_ssize_t max_lanes     # lanes of the widest block
    Py_ssize_t n_tasks       # batch items times key/value heads times blocks
    bint is_masked           # by intervals, an array or tiles
    Py_ssize_t key_copy_nbytes  # a thread's copy of keys without gaps, 0 where the kernels read them in place
    Py_ssize_t panels_nbytes    # the same of values: packed, `panel` bytes a panel, or as they are in row tiles
    Py_ssize_t panel
    # Where rows are no lanes, see splitkv.pxi:
    bint uses_split_kv
    Py_ssize_t query_ld, acc_ld
    Py_ssize_t key_prefetch, value_prefetch            # from a row to the one that memory is asked for with it, or 0
    Py_ssize_t n_key_tiles, split_tiles, n_splits  # key tiles of keys, and how many are a task
    Py_ssize_t n_partials, partial_nbytes              # partial results that a thread may have at once
    Partial *partials            # one for each task, where a head has more than one
    Py_ssize_t *left         # tasks of each head that are not done
    char *memory             # behind both
    bint out_of_memory       # set by a thread that could not have its tiles


cdef struct Share:
    # The tasks that one thread takes before it helps the others. A line of memory each: threads count at once.
    Py_ssize_t next
    Py_ssize_t stop
    char rest_of_line[48]


cdef struct Scratch:
    # One thread's tiles; see kernels.h for their layout.
    char *query
    char *scores
    char *acc
    char *converted      # bias rows in the compute type
    char *empty          # -inf in every lane
    char *tile_max
    char *row_max
    char *row_sum
    char *rescale
    char *inverse
    char *lse
    uint32_t *words
    char **rows          # whichever rows are being packed, tested or written
    char **out_rows
    char **bias_rows
    const char **prefetch   # addresses that memory is asked for ahead of their use
    char *key_copy       # one head's keys without gaps, where the job wants that
    char *panels         # one head's values packed, the same
    char *seen_key       # the head that this thread has worked on last, and which of its rows
    char *seen_value
    Py_ssize_t seen_start
    Py_ssize_t seen_stop
    Py_ssize_t *start
    Py_ssize_t *stop
    Py_ssize_t *stops    # keys of the tile at hand for each vector of lanes, see kernels.h
    Py_ssize_t *part_stops  # the same for a part of the tile
    Py_ssize_t *row_i
    Py_ssize_t *row_h


cdef struct Block:
    # The query rows of one task, and where its batch item starts in each array.
    Py_ssize_t item, ld, n_rows
    int n_vectors
    Py_ssize_t low, high     # no lane attends a key outside; low is a multiple of KEY_STEP
    Py_ssize_t all_start, all_stop  # every lane's interval allows the keys inside
    Py_ssize_t n_prefetch, prefetch_nbytes
    char *key                # the head's rows in the caller's memory
    char *value
    char *keys               # the same as the kernels read them: there, or the thread's copy
    Py_ssize_t key_row, key_col
    fastattn_values values
    char *bias
    char *dense
    char *tile_index
    char *key_start
    char *key_stop
    char *weights


cdef struct TaskRows:
    # Which rows a task works on.
    Py_ssize_t item, kv, first_row, n_rows
    int n_vectors


cdef inline char *at_item(const Job *job, const View *view, Py_ssize_t item) noexcept nogil:
    cdef char *p = view.data
    cdef int axis
    if p == NULL or job.n_lead == 0:
        return p
    for axis in range(job.n_lead - 1, 0, -1):
        p += item % job.lead_shape[axis] * view.lead[axis]
        item = item // job.lead_shape[axis]
    return p + item * view.lead[0]


cdef inline char *lane_row(const Scratch *w, const View *view, char *item, Py_ssize_t lane) noexcept nogil:
    return item + w.row_h[lane] * view.head + w.row_i[lane] * view.row


cdef inline const char *const *bias_of(const Job *job, const Scratch *w) noexcept nogil:
    return <const char *const *>w.bias_rows if job.bias.data != NULL else NULL


cdef inline bint may_mask(const Job *job) noexcept nogil:
    """Whether scores may be -inf where no mask word says so."""
    return job.bias.data != NULL or job.score_mod != NULL


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


cdef inline Py_ssize_t n_panels(const Job *job) noexcept nogil:
    return (job.value_dim + job.kernels.panel_cols - 1) // job.kernels.panel_cols


cdef Py_ssize_t lay_out(const Job *job, char *base, Scratch *w) noexcept nogil:
    """Places one thread's tiles from base on; returns the bytes they need."""
    cdef Py_ssize_t ld = job.max_lanes
    cdef Py_ssize_t line = padded(ld * job.itemsize)
    cdef Py_ssize_t tile = padded(job.block_k * ld * job.itemsize)
    cdef Py_ssize_t pointers = padded(ld * sizeof(char *))
    cdef char *p = base
    w.query = p; p += padded((job.query_ld if job.uses_split_kv else job.head_dim) * ld * job.itemsize)
    w.scores = p; p += tile
    w.acc = p; p += job.n_partials * job.partial_nbytes if job.uses_split_kv else padded(job.value_dim * ld * job.itemsize)
    w.empty = p; p += line
    w.tile_max = p; p += line
    w.row_max = p; p += line
    w.row_sum = p; p += line
    w.rescale = p; p += line
    w.inverse = p; p += 2 * line
    w.lse = p; p += line
    w.words = <uint32_t *>p; p += padded((job.block_k // WORD) * ld * sizeof(uint32_t))
    w.rows = <char **>p; p += pointers
    w.out_rows = <char **>p; p += pointers
    w.bias_rows = <char **>p; p += pointers
    w.prefetch = <const char **>p; p += 2 * pointers + padded(job.block_k * sizeof(char *))
    w.start = <Py_ssize_t *>p; p += pointers
    w.stop = <Py_ssize_t *>p; p += pointers
    w.stops = <Py_ssize_t *>p; p += pointers
    w.part_stops = <Py_ssize_t *>p; p += pointers
    w.row_i = <Py_ssize_t *>p; p += pointers
    w.row_h = <Py_ssize_t *>p; p += pointers
    w.converted = p
    if job.convert_bias:
        p += tile
    w.key_copy = p; p += padded(job.key_copy_nbytes)
    w.panels = p; p += padded(job.panels_nbytes)
    return p - base


cdef char *new_scratch(const Job *job, Scratch *w) noexcept nogil:
    """The memory behind w, to be freed, or NULL."""
    cdef Py_ssize_t lane
    cdef char *memory = <char *>malloc(lay_out(job, NULL, w) + 64)
    if memory == NULL:
        return NULL
    lay_out(job, <char *>((<size_t>memory + 63) & ~<size_t>63), w)
    w.seen_key = w.seen_value = NULL
    for lane in range(job.max_lanes):
        set_real(w.empty + lane * job.itemsize, -INFINITY, job.itemsize)
    return memory
