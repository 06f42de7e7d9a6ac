# Gradients of bfloat16 as products of pairs, see kernels/pairs.h: the weights and the gradients of the scores are rounded to
# bfloat16, as the arrays are, and the instruction that multiplies two pairs computes all five products. Numbers are in
# float32 before they are rounded, whatever the strides of the arrays.

cdef enum:
    ROUNDED_NBYTES = 2   # of a bfloat16


cdef void pair_rows(const Job *job, const Tiles *t, char *words, const char *rows, Py_ssize_t n_rows,
                    Py_ssize_t ld) noexcept nogil:
    """Each two rows as one row of words, the last row beside zeros if it is alone. `words` may be `rows`."""
    cdef Py_ssize_t v
    if words != rows:
        memcpy(words, rows, n_rows * ld * job.itemsize)
    for v in range(ld // job.lanes):
        t.stops[v] = n_rows
    kernels_of(job).pairs.pair_weights(words, ld, t.stops)


cdef uint64_t pack_columns(const Job *job, const Tiles *t, char *to, const char *rows, Py_ssize_t ld, const Block *block,
                           Py_ssize_t n_cols, double factor) noexcept nogil:
    """The rows of a block, times a power of two, as columns of words. Returns the lanes whose products are not those of
    pairs."""
    cdef Py_ssize_t lane
    # Which keeps denormal numbers: `pack` reports their lanes.
    kernels_of(job).store_row(t.rounded, ROUNDED_NBYTES, rows, block.n_rows * ld, BFLOAT16)
    for lane in range(block.ld):
        t.row_at[lane] = t.rounded + min(lane, block.n_rows - 1) * ld * ROUNDED_NBYTES
    return kernels_of(job).pairs.pack(to, block.ld, <const char *const *>t.row_at, (n_cols + 1) // 2, <float>factor)


cdef void pair_keys(const Job *job, const Gradients *g, const Tiles *t, Py_ssize_t n_keys) noexcept nogil:
    """What products read of the keys and values of a task."""
    kernels_of(job).pairs.round_numbers(t.stored_keys, t.keys, n_keys * g.query_ld)
    if g.wants_change:
        kernels_of(job).pairs.round_numbers(t.stored_values, t.values, n_keys * g.value_ld)
    if g.wants_query:
        pair_rows(job, t, t.key_words, t.keys, n_keys, g.query_ld)


cdef void score_pairs(const Job *job, const Scratch *w, const Tiles *t, const Block *block, const Tile *tile, char *scores,
                      const char *columns, const char *stored, const char *tile_columns, const char *rows, Py_ssize_t ld,
                      Py_ssize_t n_cols, uint64_t other_lanes) noexcept nogil:
    """The products of a tile: of `columns` and the `stored` rows of the task, and in the other lanes, of the same in
    float32."""
    cdef Py_ssize_t first = tile.key0 - tile.task_key0, size = job.itemsize, lane, j, at
    kernels_of(job).pairs.score(scores, NULL, columns, block.ld, block.n_vectors, stored + first * ld * ROUNDED_NBYTES, w.stops,
                                (n_cols + 1) // 2, ld * ROUNDED_NBYTES, PAIR_NBYTES, NULL, 0, 0)
    if not other_lanes:
        return
    kernels_of(job).score(t.other_scores, NULL, tile_columns, block.ld, block.n_vectors, rows + first * ld * size, w.stops, n_cols,
                          ld * size, size, NULL, 0, 0)
    for lane in range(block.n_rows):
        for j in range(tile.n_keys if other_lanes >> lane & 1 else 0):
            at = (j * block.ld + lane) * size
            memcpy(scores + at, t.other_scores + at, size)


cdef void add_over_rows(const Job *job, const Gradients *g, const Tiles *t, const Block *block, const Tile *tile, char *acc,
                        const char *rows, const char *words, Py_ssize_t ld, const char *factors) noexcept nogil:
    """acc[key] += the sum over query rows of factors[key][row] times the row; = where nothing was added before. words: of
    two rows."""
    cdef Py_ssize_t j
    if not g.rounds_weights:
        accumulate_rows_of(job, t, acc, rows, ld, factors, 1, block.ld, tile.n_keys, block.n_rows, tile.sets_keys)
        return
    kernels_of(job).pairs.round_numbers(t.rounded, factors, tile.n_keys * block.ld)
    if block.n_rows & 1:
        for j in range(tile.n_keys):   # the lane beside the last row's
            memset(t.rounded + (j * block.ld + block.n_rows) * ROUNDED_NBYTES, 0, ROUNDED_NBYTES)
    kernels_of(job).pairs.accumulate_words(acc, words, ld, t.rounded, PAIR_NBYTES, block.ld * ROUNDED_NBYTES,
                                           (block.n_rows + 1) // 2, tile.n_keys, not tile.sets_keys)


cdef void add_over_keys(const Job *job, const Gradients *g, const Tiles *t, const Block *block, const Tile *tile, char *acc,
                        const char *keys, const char *words, const char *factors) noexcept nogil:
    """acc[row] += the sum over keys of factors[key][row] times the key; = where nothing was added before. Where products are
    of pairs, the factors are words of two keys, as `words` are."""
    if not g.rounds_weights:
        accumulate_rows_of(job, t, acc, keys, g.query_ld, factors, block.ld, 1, block.n_rows, tile.n_keys, tile.sets_queries)
        return
    kernels_of(job).pairs.accumulate_words(acc, words, g.query_ld, factors, block.ld * PAIR_NBYTES, PAIR_NBYTES,
                                           (tile.n_keys + 1) // 2, block.n_rows, not tile.sets_queries)
