# The sweep, for many query rows, which are lanes: one query block of one key/value head over the key tiles of a piece of
# its keys, with the online softmax.

cdef void prefetch_rows(const Job *job, Scratch *w, Block *block, const View *view, char *item, Py_ssize_t itemsize,
                     Py_ssize_t key0, Py_ssize_t n_keys, Py_ssize_t step) noexcept nogil:
    """Adds the elements of a bias or mask for the keys key0.. to the block's prefetch list, as far as it has room, with
    an entry for every `step` bytes."""
    cdef Py_ssize_t lane, at, nbytes = n_keys * itemsize
    cdef char *row
    cdef char *last = NULL
    if not view.data or view.col != itemsize or step == 0:
        return
    block.prefetch_nbytes = max(block.prefetch_nbytes, min(step, nbytes))
    for lane in range(block.n_rows):
        row = lane_row(w, view, item, lane) + key0 * itemsize
        if row == last:
            continue
        last = row
        at = 0
        while at < nbytes:
            if block.n_prefetch == job.block_k:
                return
            w.prefetch[block.n_prefetch] = row + at
            block.n_prefetch += 1
            at += step


cdef inline void prefetch_keys(const Job *job, Scratch *w, Block *block, Py_ssize_t key0, Py_ssize_t n_keys) noexcept nogil:
    """Adds keys that are to be converted to the block's prefetch list, as far as it has room.

    Together with the prefetch of values in `score_keys` this saves 12 to 14 % with 32 query rows and 16-bit keys from
    memory: 2 cores of Zen 5, 2026-11-25, interleaved A/B.
    """
    cdef Py_ssize_t key
    block.prefetch_nbytes = max(block.prefetch_nbytes, stored_nbytes(job, &block.key, job.head_dim))
    for key in range(key0, key0 + min(n_keys, job.block_k - block.n_prefetch)):
        w.prefetch[block.n_prefetch] = row_at(&block.key, key)
        block.n_prefetch += 1


cdef inline fastattn_values tile_values(const Job *job, Scratch *w, const Block *block, Py_ssize_t key0,
                                        Py_ssize_t n_keys) noexcept nogil:
    """The values of one key tile, all at one stride: where they are not, they are copied."""
    cdef fastattn_values values = block.values
    if job.packs_values:
        values.at = block.values.at + key0 * values.row
    elif job.value_storage or block.value.page_size:
        load_rows(job, w.value_copy, &block.value, key0, n_keys, job.value_dim)
        values.at = w.value_copy
        values.row = job.value_dim * job.itemsize
        values.col = job.itemsize
        values.panel = kernels_of(job).panel_cols * job.itemsize
    else:
        values.at = row_at(&block.value, key0)
    return values


cdef inline Py_ssize_t find_values(const Job *job, Scratch *w, const Block *block, Py_ssize_t key, Py_ssize_t n_keys,
                                   fastattn_values *values) noexcept nogil:
    """Sets where the next values are, of whole partial sums: in place, or packed; how many of the n_keys there are."""
    cdef Py_ssize_t n = run_of(&block.value, key, n_keys)
    values.at = row_at(&block.value, key)
    if job.packs_chunks:
        n = min(n, KEY_CHUNK - key % KEY_CHUNK)
        values.row = kernels_of(job).panel_cols * job.itemsize
        values.col = job.itemsize
        values.panel = KEY_CHUNK * values.row
        kernels_of(job).pack_values(w.value_copy, values.panel, values.at, block.value.row, block.value.col, n, job.value_dim)
        values.at = w.value_copy
    return n


cdef inline void accumulate_tile(const Job *job, Scratch *w, const Block *block, char *acc, char *rescale,
                                 Py_ssize_t key0, Py_ssize_t n_keys) noexcept nogil:
    """Adds weights times values of one key tile to the accumulators, which rescale multiplies; NULL: sets them.

    Values in pages that are read in place are added page by page, each of whole partial sums.
    """
    cdef const char *weights
    cdef Py_ssize_t first_chunk
    cdef fastattn_values values = block.values
    cdef Py_ssize_t lane, at = 0, n = n_keys, n_prefetch = block.n_prefetch
    if not (job.packs_chunks or job.reads_values or block.value.page_size) or job.packs_values or job.converts_values:
        values = tile_values(job, w, block, key0, n_keys)
    else:
        n = find_values(job, w, block, key0, n_keys, &values)
    find_part_stops(w, block, 0, n)
    while True:
        weights = w.scores + at * block.ld * job.itemsize
        first_chunk = KEY_CHUNK - (key0 + at) % KEY_CHUNK
        if job.reads_values:
            kernels_of(job).pairs.accumulate_stored(acc, weights, rescale, block.ld, block.n_vectors, values.at, block.value.row,
                                                    w.part_stops, first_chunk, job.value_dim, w.prefetch, n_prefetch,
                                                    block.prefetch_nbytes)
        else:
            kernels_of(job).accumulate(acc, weights, rescale, block.ld, block.n_vectors, &values, w.part_stops, first_chunk,
                                       job.value_dim, w.prefetch, n_prefetch, block.prefetch_nbytes)
        if at == 0 and n < n_keys:
            rescale = w.rescale
            for lane in range(block.ld):
                set_real(rescale + lane * job.itemsize, 1, job.itemsize)
        at += n
        if at == n_keys:
            return
        n = find_values(job, w, block, key0 + at, n_keys - at, &values)
        find_part_stops(w, block, at, n)
        n_prefetch = 0


cdef inline void accumulate_pairs(const Job *job, Scratch *w, const Block *block, char *acc, char *rescale, const char *values,
                                  Py_ssize_t key0) noexcept nogil:
    """`accumulate_tile` of pairs of weights and values."""
    kernels_of(job).pairs.accumulate(acc, w.scores, rescale, block.ld, block.n_vectors, values, w.stops,
                                     KEY_CHUNK - key0 % KEY_CHUNK, job.value_dim, w.prefetch, block.n_prefetch,
                                     block.prefetch_nbytes)


cdef void accumulate_clean_pairs(const Job *job, Scratch *w, const Block *block, TileState state, char *acc, char *rescale,
                                 Py_ssize_t key0, Py_ssize_t n_keys) noexcept nogil:
    """`accumulate_nonfinite` of pairs: nonfinite values are 0 in the products, and those that a lane may read are added one
    by one."""
    cdef uint16_t *stored = <uint16_t *>w.staged
    cdef const float *values = <const float *>w.staged
    cdef float *sums = <float *>acc
    cdef float weight
    cdef Py_ssize_t j, e, lane
    copy_stored_rows(w.staged, &block.value, key0, n_keys, job.value_dim)
    for j in range(n_keys * job.value_dim):
        if stored[j] & 0x7f80 == 0x7f80:
            stored[j] = 0
    kernels_of(job).pairs.pair_values(w.clean, w.staged, job.value_dim * (PAIR_NBYTES // 2), n_keys, job.value_dim)
    accumulate_pairs(job, w, block, acc, rescale, w.clean, key0)
    for j in range(n_keys):
        load_rows(job, w.staged, &block.value, key0 + j, 1, job.value_dim)
        for e in range(job.value_dim):
            if isfinite(values[e]):
                continue
            for lane in range(block.ld):
                if is_allowed(job, w, block, state, lane, j):
                    weight = bfloat16_at(w.scores + (j // 2 * block.ld + lane) * PAIR_NBYTES + j % 2 * 2)
                    sums[e * block.ld + lane] += weight * values[e]


cdef inline double headroom(const Job *job, const Scratch *w, Py_ssize_t lane) noexcept nogil:
    """A power of two that makes the weights of a row add up to at most 1/2; w.inverse has the inverse of their sum."""
    return ldexp(0.5, ilogb(job.kept_share * get_real(w.inverse + lane * job.itemsize, job.itemsize)))


cdef void leave_headroom(const Job *job, Scratch *w, Py_ssize_t n_rows, Py_ssize_t n_keys, Py_ssize_t row,
                         Py_ssize_t key) noexcept nogil:
    """Multiplies the weights at w.scores by their row's `headroom`; `row` and `key` are their strides in bytes."""
    cdef Py_ssize_t lane, j
    cdef double factor
    cdef char *at
    for lane in range(n_rows):
        factor = headroom(job, w, lane)
        for j in range(n_keys):
            at = w.scores + lane * row + j * key
            set_real(at, get_real(at, job.itemsize) * factor, job.itemsize)


cdef TileState attend_tiles(Job *job, Scratch *w, Block *block, Py_ssize_t low, Py_ssize_t high, Partial *partial,
                            char *clean, bint has_headroom) noexcept nogil:
    """The online softmax and value accumulation over the key tiles of a piece of the keys, low .. high - 1; whether its
    keys are masked for no lane, for some or for all, and then there is no partial result.

    clean, has_headroom: see `attend_pieces`.
    """
    cdef const fastattn_kernels *kernels = kernels_of(job)
    cdef char *row_max = max_of(job, partial)
    cdef char *row_sum = sum_of(job, partial)
    cdef char *acc = acc_of(job, partial)
    cdef Py_ssize_t key0, n_keys, n_next, first_chunk, tile = low // job.block_k * job.block_k
    cdef TileState state, all_states = TILE_EMPTY
    cdef bint changes_weights = job.drop_threshold or has_headroom
    cdef fastattn_softmax softmax = kernels.pairs.softmax if job.pairs_values and not changes_weights else kernels.softmax
    cdef char *rescale
    cdef fastattn_values values
    memcpy(row_max, w.row_max if has_headroom else w.empty, block.ld * job.itemsize)
    memset(row_sum, 0, block.ld * job.itemsize)
    while tile < high:
        key0 = max(tile, low)
        tile += job.block_k
        n_keys = min(tile, high) - key0
        state = score_tile(job, w, block, key0, n_keys, clean != NULL)
        if state == TILE_EMPTY:
            continue
        first_chunk = KEY_CHUNK - key0 % KEY_CHUNK
        softmax(w.scores, w.tile_max, row_max, row_sum, w.rescale, block.ld, w.stops, first_chunk, job.exponent_factor)
        drop_weights(job, w, block, key0)
        if has_headroom:
            leave_headroom(job, w, block.n_rows, n_keys, job.itemsize, block.ld * job.itemsize)
        if job.pairs_values and changes_weights:
            kernels.pairs.pair_weights(w.scores, block.ld, w.stops)
        rescale = NULL if all_states == TILE_EMPTY else w.rescale
        if all_states != TILE_PARTIAL:
            all_states = TILE_PARTIAL if masks_some(job, state) else TILE_FULL
        if clean != NULL and job.pairs_values:
            accumulate_clean_pairs(job, w, block, state, acc, rescale, key0, n_keys)
        elif clean != NULL:
            values = tile_values(job, w, block, key0, n_keys)
            kernels.accumulate_nonfinite(acc, w.scores, rescale, block.ld, &values, w.stops, first_chunk,
                                        job.value_dim, bias_of(job, w), words_of(w, state), clean)
        else:
            n_next = min(tile + job.block_k, high) - tile
            if n_next > 0:
                if job.converts_keys:
                    prefetch_keys(job, w, block, tile, n_next)
                prefetch_rows(job, w, block, &job.bias, block.bias, job.bias_nbytes, tile, n_next,
                              PREFETCH_PER_COLUMN * job.value_dim)
                prefetch_rows(job, w, block, &job.dense, block.dense, job.dense_nbytes, tile, n_next,
                              PREFETCH_PER_COLUMN * job.value_dim)
            if job.pairs_values:
                if not job.packs_values:
                    load_value_pairs(job, w, w.value_copy, &block.value, key0, n_keys)
                accumulate_pairs(job, w, block, acc, rescale,
                                 value_pairs(job, block, key0 if job.packs_values else 0), key0)
            else:
                accumulate_tile(job, w, block, acc, rescale, key0, n_keys)
            block.n_prefetch = block.prefetch_nbytes = 0
    return all_states


cdef void clear_masked(const Job *job, const Scratch *w, const Block *block, TileState state, char *const *rows,
                       Py_ssize_t n_keys) noexcept nogil:
    """Sets the weights at w.rows to 0 where a key is masked: in a row of NaN they are 0 * NaN."""
    cdef Py_ssize_t lane, j
    for lane in range(block.n_rows):
        for j in range(n_keys):
            if not is_allowed(job, w, block, state, lane, j):
                set_real(rows[lane] + j * job.itemsize, 0, job.itemsize)


cdef inline void limit_rounded(const Job *job, char *row, Py_ssize_t n_cols) noexcept nogil:
    """Before a row becomes bfloat16: means by rounded weights, whose sum is not theirs, may be past the largest value."""
    if job.weight_parts == 1 and job.kept_share == 1:
        kernels_of(job).limit_row(row, n_cols)


cdef bint write_tile(const Job *job, Scratch *w, const Block *block, char **rows, Py_ssize_t col, int64_t storage,
                     const char *tile, Py_ssize_t ld, Py_ssize_t n_cols, const TileState *state) noexcept nogil:
    """Writes a tile, of lanes or of rows, times w.inverse to rows of the caller's; whether any number is nonfinite.

    state: of the tile of weights, which are 0 where a key is masked; else NULL.
    """
    cdef Py_ssize_t lane
    cdef char **to = rows
    cdef Py_ssize_t step = col
    cdef bint nonfinite
    if storage:
        to = w.staged_rows
        step = job.itemsize
        for lane in range(block.n_rows):
            to[lane] = w.staged + lane * n_cols * job.itemsize
    if job.uses_split_kv:
        nonfinite = kernels_of(job).unpack_rows(<char *const *>to, step, block.n_rows, tile, ld, n_cols, w.inverse,
                                                job.max_lanes)
    else:
        nonfinite = kernels_of(job).unpack(<char *const *>to, step, block.n_rows, tile, ld, n_cols, w.inverse)
    if nonfinite and state != NULL:
        clear_masked(job, w, block, state[0], <char *const *>to, n_cols)
    if storage:
        for lane in range(block.n_rows):
            limit_rounded(job, to[lane], n_cols)
            kernels_of(job).store_row(rows[lane], col, to[lane], n_cols, storage & STORAGE)
    return nonfinite


cdef inline void clear_weights(const Job *job, const Scratch *w, const Block *block) noexcept nogil:
    cdef Py_ssize_t lane
    for lane in range(block.n_rows):
        memset(lane_row(w, &job.weights, block.weights, lane), 0, job.len_k * job.weights_nbytes)


cdef void find_weights(const Job *job, Scratch *w, const Block *block, Py_ssize_t key0) noexcept nogil:
    """The scores of a key tile become weights that lack the division by row_sum.

    row_max must be the largest of these very scores and of those of all other keys: no exponent is above 0 then.
    """
    # With a tile_max of -inf row_max does not change. What softmax adds to a copy of row_sum is not used.
    memcpy(w.lse, w.row_sum, block.ld * job.itemsize)
    kernels_of(job).softmax(w.scores, w.empty, w.row_max, w.lse, w.rescale, block.ld, w.stops, KEY_CHUNK,
                            job.exponent_factor)
    drop_weights(job, w, block, key0)


cdef void write_tile_weights(const Job *job, Scratch *w, const Block *block, TileState state, Py_ssize_t key0,
                             Py_ssize_t n_keys) noexcept nogil:
    """Writes the weights of a key tile, by w.inverse; every vector has all keys."""
    cdef Py_ssize_t lane
    for lane in range(block.ld):
        w.rows[lane] = lane_row(w, &job.weights, block.weights, lane) + key0 * job.weights_nbytes
    write_tile(job, w, block, w.rows, job.weights_nbytes, job.weights_storage, w.scores,
               job.block_k if job.uses_split_kv else block.ld, n_keys, &state)


cdef void write_weights(Job *job, Scratch *w, const Block *block) noexcept nogil:
    """The weights of the block's rows, recomputed from their scores with the final row_max and row_sum."""
    cdef Py_ssize_t key0, n_keys, tile = block.low // job.block_k * job.block_k
    cdef TileState state
    clear_weights(job, w, block)
    while tile < block.high:
        key0 = max(tile, block.low)
        tile += job.block_k
        n_keys = min(tile, block.high) - key0
        state = score_tile(job, w, block, key0, n_keys, True)
        if state != TILE_EMPTY:
            find_weights(job, w, block, key0)
            write_tile_weights(job, w, block, state, key0, n_keys)


cdef inline double sink_of(const Job *job, const Scratch *w, Py_ssize_t lane) noexcept nogil:
    return get_real((<const char *><size_t>job.sinks) + w.row_h[lane] * job.itemsize, job.itemsize)


cdef void start_rows(const Job *job, const Scratch *w, char *row_max, char *row_sum, Py_ssize_t n_rows) noexcept nogil:
    """The state before any key; a finite sink is one logit without a value."""
    cdef Py_ssize_t lane, size = job.itemsize
    memcpy(row_max, w.empty, job.max_lanes * size)
    memset(row_sum, 0, n_rows * size)
    if not job.sinks:
        return
    for lane in range(n_rows):
        if isfinite(sink_of(job, w, lane)):
            set_real(row_max + lane * size, sink_of(job, w, lane), size)
            set_real(row_sum + lane * size, 1, size)


cdef void end_rows(const Job *job, const Scratch *w, char *row_max, char *row_sum, Py_ssize_t n_rows) noexcept nogil:
    """The state after all keys, with sinks that are inf or NaN: a row with keys becomes NaN, as inf - inf is; a row
    without has its sink alone. Applied before the keys, they would make a row without keys NaN where another row of
    its block has some."""
    cdef Py_ssize_t lane, size = job.itemsize
    cdef bint empty
    if not job.sinks:
        return
    for lane in range(n_rows):
        if not sink_of(job, w, lane) < INFINITY:
            # No sum of a row with keys is 0: the weight of its largest score is 1.
            empty = get_real(row_sum + lane * size, size) == 0
            set_real(row_max + lane * size, sink_of(job, w, lane), size)
            set_real(row_sum + lane * size, 1 if empty else NAN, size)


cdef inline void write_lse(const Job *job, const Scratch *w, const Block *block) noexcept nogil:
    cdef char *item = at_item(job, &job.lse, block.item)
    cdef Py_ssize_t lane
    if job.has_lse:
        for lane in range(block.n_rows):
            memcpy(lane_row(w, &job.lse, item, lane), w.lse + lane * job.itemsize, job.itemsize)


cdef inline bint write_out(const Job *job, Scratch *w, const Block *block, const char *acc,
                           Py_ssize_t ld) noexcept nogil:
    """The outputs of the block; whether any is nonfinite."""
    return write_tile(job, w, block, w.out_rows, job.out.col, job.out_storage, acc, ld, job.value_dim, NULL)


cdef void write_large(const Job *job, const Scratch *w, const Block *block, Py_ssize_t ld, const char *acc, Py_ssize_t row,
                      Py_ssize_t col) noexcept nogil:
    """Writes the nonfinite outputs again, from sums that have `headroom`. Others stay as they are, so that no bit of them
    depends on the rest of the block.

    A sum of finite values is then finite, and their mean rounds past the largest number at most, which it then is; with
    dropout it may be larger. What stays NaN has read NaN or inf. `ld` is that of w.inverse, `row` and `col` are strides
    of acc in bytes.
    """
    cdef double most = FLT_MAX if job.itemsize == 4 else DBL_MAX, sum, x, real
    cdef Py_ssize_t lane, e, size = job.itemsize
    cdef char *at = <char *>&real
    cdef char *to
    for lane in range(block.n_rows):
        for e in range(job.value_dim):
            to = w.out_rows[lane] + e * job.out.col
            if job.out_storage:
                load_row(job, at, to, 0, job.out_storage, 1)
            else:
                memcpy(at, to, size)
            if isfinite(get_real(at, size)):
                continue
            sum = get_real(acc + lane * row + e * col, size)
            x = sum * get_real(w.inverse + lane * size, size) + sum * get_real(w.inverse + (ld + lane) * size, size)
            x /= headroom(job, w, lane)
            if isnan(x):
                continue
            if isfinite(sum) and job.kept_share == 1:
                x = min(most, max(-most, x))
            set_real(at, x, size)
            if job.out_storage:
                limit_rounded(job, at, 1)
                kernels_of(job).store_row(to, 0, at, 1, job.out_storage & STORAGE)
            else:
                memcpy(to, at, size)


cdef void pack_block(const Job *job, Scratch *w, const Block *block) noexcept nogil:
    cdef SourceRows rows = read_rows(job, w, block, &job.query, job.query_storage, job.head_dim)
    kernels_of(job).pack(w.query, block.ld, rows.at, rows.col, job.head_dim, job.query_factor)


cdef void pack_pairs(const Job *job, Scratch *w, Block *block) noexcept nogil:
    cdef Py_ssize_t lane, nbytes = job.head_dim * (PAIR_NBYTES // 2)
    cdef char **rows = w.rows
    find_rows_of(job, w, block, &job.query, w.rows)
    if job.query.col != PAIR_NBYTES // 2:
        rows = w.staged_rows
        for lane in range(block.ld):
            rows[lane] = w.staged + lane * nbytes
            fastattn_copy_rows(rows[lane], w.rows[lane], 0, job.query.col, PAIR_NBYTES // 2, 1, job.head_dim)
    block.other_lanes = kernels_of(job).pairs.pack(w.query_pairs, block.ld, <const char *const *>rows,
                                                   job.head_dim // 2, <float>job.query_factor)
