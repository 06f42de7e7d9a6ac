# What the driver works on: the kernels it may call, the arrays and options of one call (Job), the rows of one task
# (Block) and a thread's scratch memory (Scratch). Layouts only, no computation.

cdef extern from "fused.h" nogil:
    enum: FUSED_LANES "FASTATTN_FUSED_LANES"
    enum: FUSED_KEYS "FASTATTN_FUSED_KEYS"
    enum: GROUP_NBYTES "FASTATTN_GROUP_NBYTES"
    enum: PART_NBYTES "FASTATTN_PART_NBYTES"
    enum: PREFETCH_NBYTES "FASTATTN_PREFETCH_NBYTES"
    int fastattn_is_split(float)
    ctypedef struct fastattn_unit:
        const char *query
        const char *key
        const char *value
        int n_parts, query_parts
        Py_ssize_t tile_groups, n_keys, plain, plain_stop
        float *row_max
        float *row_sum
        float *acc
        int is_first
        float *scores
        char *weights
        const uint32_t *drop_words
        float tile_max[FUSED_LANES]
        float rescale[FUSED_LANES]
        const char *const *prefetch
        Py_ssize_t n_prefetch
    ctypedef struct fastattn_fused:
        void (*begin)() noexcept nogil
        void (*end)() noexcept nogil
        uint32_t (*split_queries)(char *, const float *, Py_ssize_t, Py_ssize_t) noexcept nogil
        uint32_t (*split_keys)(char *, int, const char *, Py_ssize_t, Py_ssize_t, Py_ssize_t) noexcept nogil
        uint32_t (*split_values)(char *, int, Py_ssize_t, const char *, Py_ssize_t, Py_ssize_t, Py_ssize_t,
                                 Py_ssize_t) noexcept nogil
        void (*score)(float *, Py_ssize_t, const char *, const char *, int, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*step)(fastattn_unit *, fastattn_unit *, fastattn_unit *, Py_ssize_t, Py_ssize_t, float) noexcept nogil
        double (*peak)(long) noexcept nogil

cdef extern from "pairs.h" nogil:
    ctypedef struct fastattn_pairs:
        uint64_t (*pack)(void *, Py_ssize_t, const char *const *, Py_ssize_t, float) noexcept nogil
        void (*score)(void *, void *, const void *, Py_ssize_t, int, const char *, const Py_ssize_t *, Py_ssize_t,
                      Py_ssize_t, Py_ssize_t, const char *, Py_ssize_t, Py_ssize_t) noexcept nogil

cdef extern from "kernels.h" nogil:
    enum: KEY_CHUNK "FASTATTN_KEY_CHUNK"
    enum: FASTATTN_REAL
    enum: FASTATTN_INT8
    enum: FASTATTN_STORAGES
    ctypedef struct fastattn_rows:
        const char *at
        Py_ssize_t row
        const char *scale
        Py_ssize_t scale_row, ahead, scale_ahead, near, far, scale_far
    ctypedef struct fastattn_values:
        const char *at
        Py_ssize_t row, col, panel
    ctypedef struct fastattn_dropout:
        uint64_t key[2]
        uint64_t threshold
    ctypedef struct fastattn_rotation:
        Py_ssize_t dim, n_pairs
        int interleaved, inverse
    ctypedef struct fastattn_kernels:
        const char *isa
        const char *vectors
        const fastattn_fused *fused
        const fastattn_pairs *pairs
        int lanes
        int max_vectors
        int panel_cols
        void (*pack)(void *, Py_ssize_t, const char *const *, Py_ssize_t, Py_ssize_t, double) noexcept nogil
        void (*score)(void *, void *, const void *, Py_ssize_t, int, const char *, const Py_ssize_t *, Py_ssize_t,
                      Py_ssize_t, Py_ssize_t, const char *, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*adjust)(void *, void *, Py_ssize_t, const Py_ssize_t *, double, double, const char *const *,
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
        void (*drop)(void *, Py_ssize_t, const Py_ssize_t *, const uint32_t *) noexcept nogil
        void (*finish)(void *, void *, const void *, const void *, Py_ssize_t, double, double) noexcept nogil
        int (*unpack)(char *const *, Py_ssize_t, Py_ssize_t, const void *, Py_ssize_t, Py_ssize_t,
                      const void *) noexcept nogil
        void (*mask_words)(uint32_t *, Py_ssize_t, const char *const *, Py_ssize_t, int, Py_ssize_t) noexcept nogil
        void (*draw_words)(uint32_t *, Py_ssize_t, const int64_t *, Py_ssize_t, Py_ssize_t, Py_ssize_t,
                           const fastattn_dropout *) noexcept nogil
        void (*load_row)(void *, const char *, Py_ssize_t, Py_ssize_t, int, int, const char *,
                         Py_ssize_t) noexcept nogil
        void (*store_row)(char *, Py_ssize_t, const void *, Py_ssize_t, int) noexcept nogil
        void (*pack_rows)(void *, Py_ssize_t, const char *const *, Py_ssize_t, Py_ssize_t, Py_ssize_t,
                          double) noexcept nogil
        void (*score_rows[FASTATTN_STORAGES])(void *, Py_ssize_t, const void *, Py_ssize_t, Py_ssize_t,
                                              const fastattn_rows *, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*adjust_rows)(void *, Py_ssize_t, Py_ssize_t, Py_ssize_t, double, double, const char *const *,
                            const uint32_t *) noexcept nogil
        void (*softmax_rows)(void *, Py_ssize_t, void *, void *, Py_ssize_t, Py_ssize_t, double, int) noexcept nogil
        void (*accumulate_rows[FASTATTN_STORAGES])(void *, Py_ssize_t, const void *, Py_ssize_t, Py_ssize_t,
                                                   const fastattn_rows *, Py_ssize_t, Py_ssize_t, int) noexcept nogil
        void (*accumulate_rows_nonfinite)(void *, Py_ssize_t, const void *, Py_ssize_t, Py_ssize_t, const char *,
                                         Py_ssize_t, Py_ssize_t, Py_ssize_t, const char *const *, const uint32_t *,
                                         void *) noexcept nogil
        void (*merge_rows)(void *, void *, void *, const void *, const void *, const void *, Py_ssize_t, Py_ssize_t,
                           double) noexcept nogil
        int (*unpack_rows)(char *const *, Py_ssize_t, Py_ssize_t, const void *, Py_ssize_t, Py_ssize_t, const void *,
                           Py_ssize_t) noexcept nogil
        void (*rope[FASTATTN_STORAGES])(char *, Py_ssize_t, const char *, Py_ssize_t, const char *, const char *,
                                        Py_ssize_t, Py_ssize_t, const fastattn_rotation *) noexcept nogil
        void (*elu_plus_one)(void *, Py_ssize_t) noexcept nogil
        void (*add_sums)(double *, const void *, Py_ssize_t) noexcept nogil
        void (*round_sums)(void *, const double *, Py_ssize_t) noexcept nogil
        double (*dot)(const void *, const void *, Py_ssize_t) noexcept nogil
        int (*has_nonfinite)(const void *, Py_ssize_t) noexcept nogil
        void (*differentiate)(void *, void *, const void *, const void *, const void *, Py_ssize_t, Py_ssize_t, double,
                              int, const uint32_t *, double) noexcept nogil
        double (*largest_square)(const void *, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*find_largest)(void *, void *, const void *, const void *, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*add_columns)(char *const *, Py_ssize_t, Py_ssize_t, const void *, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*uncap)(void *, const void *, Py_ssize_t, Py_ssize_t, double) noexcept nogil
    const fastattn_kernels *fastattn_find_kernels(const char *, int)

# Of a field that says how an array is stored: which of the kernels' storages, and whether its bytes are swapped.
cdef enum:
    STORAGE = 0xff
    SWAPPED = 0x100

# A word holds the mask bits of 32 keys; a tile of a mask map has _mask_map.TILE_Q queries and _mask_map.TILE_K keys.
cdef enum:
    WORD = 32
    PREFETCH_STEP = 16       # rows in pages at which the prefetch distance may change, as kernels require
    PAIR_NBYTES = 4          # of two adjacent columns of a key, in 16 bits each
    KEY_STEP = 4             # a block's keys start at a multiple of this, as `first_chunk` of the kernels requires
    N_VIEWS = 18
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
    # Split-KV: the softmax and the values of some key tiles, see splitkv.pxi.
    char *data        # row_max, row_sum and acc, each aligned to a cache line
    int64_t key_tile  # one of those key tiles; -1 where no row may attend any of their keys
    int64_t has_masked  # whether any of their keys is masked for only some rows


ctypedef int64_t (*score_loop)(void *scores, void *tile_max, Py_ssize_t ld, Py_ssize_t n, Py_ssize_t stops,
                               Py_ssize_t key0, Py_ssize_t item, const Py_ssize_t *row_h, const Py_ssize_t *row_i,
                               const char *aux) noexcept nogil


cdef struct Job:
    # The record of a call, written and documented by backends/cpu/record.py; `run` fills in the addresses.
    # The leading strides of each view follow, innermost axis first, then the lengths of the leading axes in that order.
    int64_t kernels
    int64_t n_lead, batch, num_kv_heads, group_size, len_q, len_k, head_dim, value_dim, itemsize
    int64_t sinks, mask_bits, score_mod, aux
    int64_t read_outside, outside_at
    int64_t has_lse, has_weights, has_bias, has_dense, has_intervals, has_mask_map, has_band, has_score_mod
    int64_t is_masked, may_mask, adjusts_all
    int64_t band_left, band_right, band_at_end, has_lengths, keep_first
    int64_t drop_key_low, drop_key_high, drop_threshold
    int64_t query_storage, key_storage, value_storage, out_storage, weights_storage, bias_storage
    int64_t key_page_size, value_page_size
    int64_t out_nbytes, weights_nbytes, bias_nbytes, dense_nbytes
    int64_t bias_swapped, convert_bias
    int64_t tile_q, tile_k
    int64_t lanes, uses_split_kv, block_k, n_vectors, n_blocks, max_lanes, n_tasks
    int64_t query_ld, acc_ld
    int64_t copies_keys, packs_values, converts_keys, converts_values, panel
    int64_t key_prefetch, value_prefetch
    int64_t split_tiles, n_splits, n_key_tiles, n_partials, partial_nbytes
    int64_t uses_pairs, uses_fused, scores_on_tiles, n_parts, query_parts, tile_groups, tile_nbytes, acc_nbytes
    int64_t partials, left
    int64_t failed
    int64_t scratch_nbytes
    int64_t to_query, to_scores, to_acc, to_empty, to_tile_max, to_row_max, to_row_sum, to_rescale, to_inverse, to_lse
    int64_t to_words, to_rows, to_out_rows, to_bias_rows, to_prefetch, to_start, to_stop, to_kept_start, to_kept_stop
    int64_t to_stops, to_part_stops, to_row_i, to_row_h, to_converted, to_clean, to_key_copy, to_value_copy, to_staged, to_staged_rows
    int64_t to_drop_words, to_drop_rows
    int64_t to_query_groups, to_weight_groups, to_key_groups, to_score_tiles, to_other_scores, to_kept_words
    int64_t to_query_pairs, to_other_max
    double query_factor, score_root, softcap, exponent_factor, kept_share
    View query, key, value, out, lse, weights, bias, dense, key_start, key_stop, mask_index, key_lengths
    View key_scale, value_scale, key_table, value_table, key_scale_table, value_scale_table


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


cdef struct Scratch:
    # One thread's tiles; see kernels.h for their layout.
    char *base           # where it begins
    char *query
    char *scores
    char *acc
    char *converted      # bias rows in the compute type
    char *staged         # rows of query, out or weights, or a tile of values, between 16 bits and the compute type
    char **staged_rows   # where those rows begin
    char *clean          # a tile of values with the nonfinite ones set to 0
    char *empty          # -inf in every lane
    char *tile_max
    char *row_max
    char *row_sum
    char *rescale
    char *inverse
    char *lse
    uint32_t *words
    uint32_t *drop_words  # bits of the weights of a tile that dropout keeps
    int64_t *drop_rows    # the number of each lane's row of weights
    char **rows          # addresses of the rows being packed, masked or written
    char **out_rows
    char **bias_rows
    const char **prefetch   # addresses to prefetch
    char *key_copy       # keys without gaps: those of a head; split-KV: of a key tile
    char *value_copy     # values: those of a head, packed; split-KV: of a key tile, without gaps
    char *query_groups   # fused sweep: the groups of a task's query blocks, see kernels/fused.h
    char *weight_groups  # of two tiles of weights
    char *key_groups     # of the keys and values of some key tiles
    char *score_tiles    # two tiles of scores
    char *query_pairs    # the packed queries as pairs, see kernels/pairs.h
    char *other_scores   # a tile of scores by the other kernels, and the largest of each lane
    char *other_max
    uint32_t *kept_words  # which keys of three units each lane may attend
    HeadRows seen_key    # the head last worked on, and the range of its rows seen
    HeadRows seen_value
    Py_ssize_t seen_start
    Py_ssize_t seen_stop
    Py_ssize_t *start
    Py_ssize_t *stop
    Py_ssize_t *kept_start  # the kept first keys of each lane, where the band has some
    Py_ssize_t *kept_stop
    Py_ssize_t *stops    # where each vector's keys end in the current tile, see kernels.h
    Py_ssize_t *part_stops  # the same within the keys being scored
    Py_ssize_t *row_i
    Py_ssize_t *row_h


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
    # Which rows a task works on.
    Py_ssize_t item, kv, first_row, n_rows
    int n_vectors


cdef inline const fastattn_kernels *kernels_of(const Job *job) noexcept nogil:
    return <const fastattn_kernels *><size_t>job.kernels


cdef inline Partial *partials_of(const Job *job) noexcept nogil:
    return <Partial *><size_t>job.partials


cdef inline char *at_item(const Job *job, const View *view, Py_ssize_t item) noexcept nogil:
    """Where a batch item starts in an array; NULL where the call has no such array."""
    cdef char *p = <char *><size_t>view.data
    cdef const int64_t *lead = <const int64_t *>(job + 1) + (view - &job.query) * job.n_lead
    cdef const int64_t *lead_shape = <const int64_t *>(job + 1) + N_VIEWS * job.n_lead
    cdef int64_t axis
    if p == NULL or job.n_lead == 0:
        return p
    for axis in range(job.n_lead - 1):
        p += item % lead_shape[axis] * lead[axis]
        item = item // lead_shape[axis]
    return p + item * lead[job.n_lead - 1]


cdef inline char *lane_row(const Scratch *w, const View *view, char *item, Py_ssize_t lane) noexcept nogil:
    return item + w.row_h[lane] * view.head + w.row_i[lane] * view.row


cdef inline const char *const *bias_of(const Job *job, const Scratch *w) noexcept nogil:
    return <const char *const *>w.bias_rows if job.has_bias else NULL


cdef inline bint may_mask(const Job *job) noexcept nogil:
    """Whether scores may be -inf where no mask word says so."""
    return job.may_mask != 0


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


cdef void set_scratch(const Job *job, char *base, Scratch *w) noexcept nogil:
    """Sets the addresses of a thread's tiles in its scratch memory, which begins at a cache line."""
    cdef Py_ssize_t lane
    w.base = base
    w.query = base + job.to_query
    w.scores = base + job.to_scores
    w.acc = base + job.to_acc
    w.empty = base + job.to_empty
    w.tile_max = base + job.to_tile_max
    w.row_max = base + job.to_row_max
    w.row_sum = base + job.to_row_sum
    w.rescale = base + job.to_rescale
    w.inverse = base + job.to_inverse
    w.lse = base + job.to_lse
    w.words = <uint32_t *>(base + job.to_words)
    w.rows = <char **>(base + job.to_rows)
    w.out_rows = <char **>(base + job.to_out_rows)
    w.bias_rows = <char **>(base + job.to_bias_rows)
    w.prefetch = <const char **>(base + job.to_prefetch)
    w.start = <Py_ssize_t *>(base + job.to_start)
    w.stop = <Py_ssize_t *>(base + job.to_stop)
    w.kept_start = <Py_ssize_t *>(base + job.to_kept_start)
    w.kept_stop = <Py_ssize_t *>(base + job.to_kept_stop)
    w.stops = <Py_ssize_t *>(base + job.to_stops)
    w.part_stops = <Py_ssize_t *>(base + job.to_part_stops)
    w.row_i = <Py_ssize_t *>(base + job.to_row_i)
    w.row_h = <Py_ssize_t *>(base + job.to_row_h)
    w.converted = base + job.to_converted
    w.clean = base + job.to_clean
    w.key_copy = base + job.to_key_copy
    w.value_copy = base + job.to_value_copy
    w.staged = base + job.to_staged
    w.staged_rows = <char **>(base + job.to_staged_rows)
    w.drop_words = <uint32_t *>(base + job.to_drop_words)
    w.drop_rows = <int64_t *>(base + job.to_drop_rows)
    w.query_groups = base + job.to_query_groups
    w.weight_groups = base + job.to_weight_groups
    w.key_groups = base + job.to_key_groups
    w.score_tiles = base + job.to_score_tiles
    w.query_pairs = base + job.to_query_pairs
    w.other_scores = base + job.to_other_scores
    w.other_max = base + job.to_other_max
    w.kept_words = <uint32_t *>(base + job.to_kept_words)
    memset(&w.seen_key, 0, sizeof(HeadRows))
    memset(&w.seen_value, 0, sizeof(HeadRows))
    for lane in range(job.max_lanes):
        set_real(w.empty + lane * job.itemsize, -INFINITY, job.itemsize)
