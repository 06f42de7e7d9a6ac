# The epilogues of a tile of scores: all that is done to scores between the product of queries and keys and that of
# weights and values. The sweep, split-KV, the fused sweep and gradients have the same ones, by these names and in this
# order, which is that of EPILOGUES in backends/cpu/fields.py:
#
#     scale, softcap -> score_mod -> bias, mask        adjust_scores, before the softmax
#     dropout                                          find_drop_words, after it
#
# The kernels do scale, softcap, bias and mask in one pass, unless something has to see the scores in between.

cdef struct ScoreTile:
    # The scores of some keys for the rows of a block: tiles of lanes or, of split-KV, of rows, see kernels.h.
    char *at
    char *tile_max           # of each lane, takes in the scores once they are adjusted; rows have none
    const Py_ssize_t *stops  # where each vector's keys end; NULL: a tile of rows
    const uint32_t *words    # the keys that masks allow; NULL: all
    char *capped             # gradients: room for the scores after the soft-cap; else NULL
    Py_ssize_t key0, n_keys, ld
    Py_ssize_t row, key      # bytes from one query row to the next, and from one key to the next


cdef inline ScoreTile lane_tile(const Job *job, const Scratch *w, const Block *block, TileState state, Py_ssize_t key0,
                                Py_ssize_t first, Py_ssize_t n_keys, const Py_ssize_t *stops) noexcept nogil:
    """Of the tile of lanes at key0, the n_keys keys from `first` on, a multiple of 32."""
    cdef ScoreTile s
    s.at = w.scores + first * block.ld * job.itemsize
    s.tile_max = w.tile_max
    s.stops = stops
    s.words = w.words + first // WORD * block.ld if state == TILE_PARTIAL else NULL
    s.capped = NULL
    s.key0 = key0 + first
    s.n_keys = n_keys
    s.ld = block.ld
    s.row = job.itemsize
    s.key = block.ld * job.itemsize
    return s


cdef inline ScoreTile row_tile(const Job *job, const Scratch *w, TileState state, Py_ssize_t key0,
                               Py_ssize_t n_keys) noexcept nogil:
    cdef ScoreTile s
    s.at = w.scores
    s.tile_max = NULL
    s.stops = NULL
    s.words = words_of(w, state)
    s.capped = NULL
    s.key0 = key0
    s.n_keys = n_keys
    s.ld = job.block_k
    s.row = job.block_k * job.itemsize
    s.key = job.itemsize
    return s


cdef inline void adjust(const Job *job, const Block *block, const ScoreTile *s, char *tile_max, double root, double softcap,
                        const char *const *bias, const uint32_t *words) noexcept nogil:
    """One pass of the kernel."""
    if s.stops == NULL:
        kernels_of(job).adjust_rows(s.at, s.ld, block.n_rows, s.n_keys, root, softcap, bias, words)
    else:
        kernels_of(job).adjust(s.at, tile_max, s.ld, s.stops, root, softcap, bias, words)


cdef inline int64_t modify_scores(const Job *job, Scratch *w, const Block *block, const ScoreTile *s,
                                  char *tile_max) noexcept nogil:
    """scale, softcap, score_mod; not 0 if that left marks."""
    cdef Py_ssize_t n = block.n_vectors, stops = <Py_ssize_t>s.stops
    if job.softcap > 0 or job.score_root != 1:
        # w.rescale is free between two steps of the softmax.
        adjust(job, block, s, w.rescale, job.score_root, job.softcap, NULL, NULL)
    if s.capped != NULL:
        memcpy(s.capped, s.at, s.n_keys * s.key)
    if not job.has_score_mod:
        return 0
    if s.stops == NULL:
        n = block.n_rows
        stops = s.n_keys
    return (<score_loop><size_t>job.score_mod)(s.at, tile_max, s.ld, n, stops, s.key0, block.item, w.row_h, w.row_i,
                                               <const char *><size_t>job.aux)


cdef inline void adjust_scores(Job *job, Scratch *w, const Block *block, const ScoreTile *s) noexcept nogil:
    """Raw scores become those that the softmax takes: scale, softcap, score_mod, bias, mask."""
    cdef double root = job.score_root, softcap = job.softcap
    cdef bint masks = job.has_bias or s.words != NULL
    cdef int64_t marks = 0
    if job.has_bias:
        find_bias_rows(job, w, block, s.key0, s.n_keys)
    if job.has_score_mod or s.capped != NULL:
        marks = modify_scores(job, w, block, s, w.rescale if masks and s.tile_max != NULL else s.tile_max)
        root = 1
        softcap = 0
    if masks or softcap > 0 or root != 1:
        adjust(job, block, s, s.tile_max, root, softcap, bias_of(job, w), s.words)
    if marks:
        note_outside(job, w, block, s)


cdef void find_bias_rows(const Job *job, Scratch *w, const Block *block, Py_ssize_t key0,
                         Py_ssize_t n_keys) noexcept nogil:
    """The bias of each lane at the tile's keys, in the compute type and without gaps: in place, converted, or added up."""
    cdef Py_ssize_t lane, number
    cdef char *row
    for lane in range(block.ld):
        w.bias_rows[lane] = w.converted + lane * n_keys * job.itemsize
        if job.n_bias_terms:
            continue
        row = lane_row(w, &job.bias, block.bias, lane) + key0 * job.bias.col
        if job.convert_bias:
            convert_bias(job, w.bias_rows[lane], row, job.bias.col, job.bias_storage, job.bias_nbytes, job.bias_swapped,
                         n_keys)
        else:
            w.bias_rows[lane] = row
    for number in range(job.n_bias_terms):
        add_bias_term(job, w, block, number, key0, n_keys)


cdef inline void convert_bias(const Job *job, char *to, const char *row, Py_ssize_t col, int64_t storage, int64_t nbytes,
                              int64_t swapped, Py_ssize_t n_keys) noexcept nogil:
    """Elements of a row, col bytes apart, in the compute type."""
    if storage:
        load_row(job, to, row, col, storage, n_keys)
    else:
        fastattn_convert_row(to, <int>job.itemsize, row, <int>nbytes, swapped, col, n_keys)


cdef void add_bias_term(const Job *job, Scratch *w, const Block *block, Py_ssize_t number, Py_ssize_t key0,
                        Py_ssize_t n_keys) noexcept nogil:
    """Adds a term of the bias to w.bias_rows; the first one sets them."""
    cdef const BiasTerm *term = bias_term(job, number)
    cdef const int64_t *leads = <const int64_t *>(term + 1)
    cdef const char *item = <const char *>term.data + item_offset(job, leads, block.item)
    cdef const char *rows_of_item = NULL
    cdef char *converted = w.converted + block.ld * n_keys * job.itemsize
    cdef const char *at
    cdef const char *rows = NULL
    cdef Py_ssize_t lane, key = 0 if term.converts else key0
    if term.rows_data:
        rows_of_item = <const char *>term.rows_data + item_offset(job, leads + job.n_lead, block.item)
    for lane in range(block.ld):
        at = item + w.row_h[lane] * term.head + w.row_i[lane] * term.row
        if term.converts:
            convert_bias(job, converted, at + key0 * term.col, term.col, term.storage, term.nbytes, term.swapped, n_keys)
            at = converted
        if rows_of_item != NULL:
            rows = rows_of_item + w.row_h[lane] * term.rows_head + w.row_i[lane] * term.rows_row
        kernels_of(job).add_bias(w.bias_rows[lane], at, rows, term.rows_col, term.run, key, n_keys, number > 0)


cdef void note_outside(Job *job, const Scratch *w, const Block *block, const ScoreTile *s) noexcept nogil:
    """Sets job.read_outside where a score is the mark of a score_mod that read out of bounds and no mask hid it."""
    cdef uint64_t mark = <uint64_t>MARK_FLOAT64 if job.itemsize == 8 else <uint64_t>MARK_FLOAT32
    cdef uint64_t arrays = (<uint64_t>1 << MARK_BITS) - 1, bits
    cdef uint32_t word
    cdef int64_t at
    cdef Py_ssize_t lane, j
    for lane in range(block.n_rows):
        for j in range(s.n_keys if s.stops == NULL else s.stops[lane // job.lanes]):
            if job.itemsize == 8:
                memcpy(&bits, s.at + lane * s.row + j * s.key, sizeof(bits))
            else:
                memcpy(&word, s.at + lane * s.row + j * s.key, sizeof(word))
                bits = word
            if bits & ~arrays != mark:
                continue
            at = block.item * job.num_kv_heads * job.group_size + w.row_h[lane]
            at = (at * job.len_q + w.row_i[lane]) * job.len_k + s.key0 + j + 1
            if job.outside_at == 0 or at < job.outside_at:
                job.outside_at = at
                job.read_outside = bits & arrays
            break


cdef TileState note_masked(const Job *job, const Scratch *w, const Block *block, const ScoreTile *s) noexcept nogil:
    """Clears the mask bits of scores that a score_mod made -inf; the new state of the tile."""
    cdef Py_ssize_t lane, j
    if s.words == NULL:
        memset(w.words, 0xff, (s.n_keys + WORD - 1) // WORD * block.ld * sizeof(uint32_t))
    for j in range(s.n_keys):
        for lane in range(block.ld):
            if get_real(s.at + lane * s.row + j * s.key, job.itemsize) == -INFINITY:
                w.words[j // WORD * block.ld + lane] &= ~(<uint32_t>1 << (j % WORD))
    return TILE_PARTIAL


cdef inline bint masks_any(const Job *job) noexcept nogil:
    """Whether any key of the call may be masked."""
    return job.is_masked or job.may_mask


cdef inline bint masks_some(const Job *job, TileState state) noexcept nogil:
    """Whether a key of a tile that is not empty may be masked."""
    return state == TILE_PARTIAL or job.may_mask


cdef inline bint is_allowed(const Job *job, const Scratch *w, const Block *block, TileState state, Py_ssize_t lane,
                            Py_ssize_t j) noexcept nogil:
    """Whether mask and bias let a row attend to the tile's key j."""
    if state == TILE_PARTIAL and not w.words[j // WORD * block.ld + lane] >> (j % WORD) & 1:
        return False
    return not job.has_bias or get_real(w.bias_rows[lane] + j * job.itemsize, job.itemsize) != -INFINITY


cdef const uint32_t *find_drop_words(const Job *job, Scratch *w, const Block *block, Py_ssize_t ld, Py_ssize_t key0,
                                     Py_ssize_t n_keys) noexcept nogil:
    """Which weights of a tile dropout keeps, as words of ld lanes; NULL: all."""
    cdef Py_ssize_t lane, first = block.item * job.num_kv_heads * job.group_size
    cdef fastattn_dropout dropout
    if not job.drop_threshold:
        return NULL
    memcpy(dropout.key, <const char *><size_t>job.drop_key, sizeof(dropout.key))
    dropout.threshold = <uint64_t>job.drop_threshold
    for lane in range(ld):
        w.drop_rows[lane] = (first + w.row_h[lane]) * job.len_q + w.row_i[lane] if lane < block.n_rows else 0
    kernels_of(job).draw_words(w.drop_words, ld, w.drop_rows, job.len_k, key0, n_keys, &dropout)
    return w.drop_words


cdef inline void drop_weights(const Job *job, Scratch *w, const Block *block, Py_ssize_t key0) noexcept nogil:
    """Sets the weights of the tile from key0 on that dropout drops to 0."""
    cdef const uint32_t *words = find_drop_words(job, w, block, block.ld, key0, w.stops[block.n_vectors - 1])
    if words != NULL:
        kernels_of(job).drop(w.scores, block.ld, w.stops, words)


cdef void drop_row_weights(const Job *job, Scratch *w, const Block *block, Py_ssize_t key0,
                           Py_ssize_t n_keys) noexcept nogil:
    """`drop_weights` of a tile of rows. One by one: dropout is for training, which has many rows."""
    cdef Py_ssize_t lane, j
    cdef const uint32_t *words = find_drop_words(job, w, block, job.max_lanes, key0, n_keys)
    if words == NULL:
        return
    for lane in range(block.n_rows):
        for j in range(n_keys):
            if not words[j // WORD * job.max_lanes + lane] >> (j % WORD) & 1:
                set_real(w.scores + (lane * job.block_k + j) * job.itemsize, 0, job.itemsize)
