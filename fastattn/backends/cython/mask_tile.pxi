# One key tile: which of its keys each lane may attend, and their scores. What is done to scores is in epilogue.pxi.

cdef extern from * nogil:
    int trailing_zeros "__builtin_ctzll"(unsigned long long)

cdef uint32_t ALL_BITS = 0xffffffff


cdef inline uint32_t span_word(Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """Bits start..stop-1 of a word; bounds outside 0..32 are clipped."""
    if start < 0:
        start = 0
    if stop > WORD:
        stop = WORD
    if start >= stop:
        return 0
    return (<uint32_t>0xffffffff >> (WORD - (stop - start))) << start


cdef void read_dense(const Job *job, Scratch *w, const Block *block, Py_ssize_t key0, Py_ssize_t n_keys) noexcept nogil:
    """Clears the bits of w.words where the mask array is 0."""
    cdef Py_ssize_t lane
    for lane in range(block.ld):
        w.rows[lane] = lane_row(w, &job.dense, block.dense, lane) + key0 * job.dense.col
    kernels_of(job).mask_words(w.words, block.ld, <const char *const *>w.rows, job.dense.col, job.dense_nbytes, n_keys)


cdef inline const char *map_line(const Job *job, const Scratch *w, const Block *block, Py_ssize_t lane,
                                 int log2_tile_q) noexcept nogil:
    """The entries of the mask map for a lane: the tiles of all keys."""
    return (block.mask_index + w.row_h[lane] * job.mask_index.head
            + (w.row_i[lane] >> log2_tile_q) * job.mask_index.row)


cdef inline TileState map_state(const Job *job, const Scratch *w, const Block *block, Py_ssize_t key0,
                                     Py_ssize_t n_keys) noexcept nogil:
    """What the mask map says of the keys, as far as its tiles say it of all lanes; TILE_PARTIAL otherwise."""
    cdef int log2_tile_q = trailing_zeros(job.tile_q), log2_tile_k = trailing_zeros(job.tile_k)
    cdef Py_ssize_t lane, k, first = key0 >> log2_tile_k, last = (key0 + n_keys - 1) >> log2_tile_k
    cdef const char *line
    cdef const char *before = NULL
    cdef int32_t entry, state = INDEX_FULL
    for lane in range(block.ld):
        line = map_line(job, w, block, lane, log2_tile_q)
        if line == before:
            continue
        for k in range(first, last + 1):
            entry = (<const int32_t *>(line + k * job.mask_index.col))[0]
            if before == NULL and k == first:
                state = entry
            if entry != state or entry >= 0:
                return TILE_PARTIAL
        before = line
    return TILE_FULL if state == INDEX_FULL else TILE_EMPTY


cdef void read_mask_map(const Job *job, Scratch *w, const Block *block, Py_ssize_t key0, Py_ssize_t n_words) noexcept nogil:
    """Clears the bits of w.words that the mask map does not have."""
    cdef int log2_tile_q = trailing_zeros(job.tile_q), log2_tile_k = trailing_zeros(job.tile_k)
    cdef Py_ssize_t lane, j, key, ld = block.ld
    cdef int32_t entry
    cdef const char *line
    for lane in range(ld):
        line = map_line(job, w, block, lane, log2_tile_q)
        for j in range(n_words):
            key = key0 + j * WORD
            entry = (<const int32_t *>(line + (key >> log2_tile_k) * job.mask_index.col))[0]
            if entry == INDEX_EMPTY:
                w.words[j * ld + lane] = 0
            elif entry != INDEX_FULL:
                w.words[j * ld + lane] &= (<const uint32_t *><size_t>job.mask_bits)[
                    ((entry << log2_tile_q) + (w.row_i[lane] & (job.tile_q - 1))) * (job.tile_k // WORD)
                    + (key & (job.tile_k - 1)) // WORD]


cdef TileState mask_tile(const Job *job, Scratch *w, const Block *block, Py_ssize_t key0, Py_ssize_t n_keys,
                         bint whole, Py_ssize_t *plain, Py_ssize_t *plain_stop) noexcept nogil:
    """The state of the n_keys keys from key0 on; where that is TILE_PARTIAL, w.words hold each lane's allowed keys.

    The scores plain .. plain_stop - 1 need no adjusting, and have no words. w.stops is set to where each vector's
    keys end; whole: every vector has all keys of the tile. With a mask map key0 is a multiple of 32, so that no
    word covers two of its tiles.
    """
    cdef Py_ssize_t lane, j, key, ld = block.ld, n_words = (n_keys + WORD - 1) // WORD
    cdef Py_ssize_t first = 0, last = 0   # words of the plain scores
    cdef uint32_t every = ALL_BITS, some = 0, word, valid
    cdef TileState mapped = TILE_FULL   # by the mask map
    cdef bint intervals_only
    cdef bint masks_only = not job.adjusts_all
    plain[0] = 0
    plain_stop[0] = n_keys if masks_only else 0
    for j in range(block.n_vectors):
        w.stops[j] = n_keys
    if not job.is_masked:
        return TILE_FULL
    if block.hole_start <= key0 and key0 + n_keys <= block.hole_stop:
        return TILE_EMPTY
    if job.has_mask_map:
        mapped = map_state(job, w, block, key0, n_keys)
        if mapped == TILE_EMPTY:
            return TILE_EMPTY
    intervals_only = not job.has_dense and mapped == TILE_FULL
    if intervals_only:
        if block.all_start <= key0 and block.all_stop >= key0 + n_keys:
            return TILE_FULL
        if masks_only and not whole:
            first = (max(block.all_start - key0, 0) + WORD - 1) // WORD
            last = min(block.all_stop - key0, n_keys) // WORD
            if first >= last:
                first = last = 0

    for j in range(n_words):
        if first <= j < last:
            continue
        key = key0 + j * WORD
        for lane in range(ld):
            w.words[j * ld + lane] = span_word(w.start[lane] - key, w.stop[lane] - key)
        if key < block.hole_start:
            for lane in range(ld):
                w.words[j * ld + lane] |= span_word(w.kept_start[lane] - key, w.kept_stop[lane] - key)
    if job.has_dense:
        read_dense(job, w, block, key0, n_keys)
    if mapped != TILE_FULL:
        read_mask_map(job, w, block, key0, n_words)
    if first == last:
        for j in range(n_words):
            valid = span_word(0, n_keys - j * WORD)
            for lane in range(ld):
                word = w.words[j * ld + lane] & valid
                some |= word
                every &= word | ~valid
        if some == 0:
            return TILE_EMPTY
        if every == ALL_BITS:
            return TILE_FULL
    plain[0] = first * WORD
    plain_stop[0] = last * WORD
    if not whole:
        # Stops do not decrease from one vector to the next.
        key = 0
        for lane in range(ld):
            key = max(key, w.stop[lane] - key0, w.kept_stop[lane] - key0 if block.hole_start > 0 else 0)
            w.stops[lane // kernels_of(job).lanes] = min(key, n_keys)
    return TILE_PARTIAL


cdef inline bint is_new(Scratch *w, const Block *block, Py_ssize_t *start, Py_ssize_t *stop) noexcept nogil:
    """Whether any of the head's rows start .. stop - 1 are new to this thread; marks them as seen.

    start and stop become the range of the new rows, extended to adjoin the rows seen before.
    """
    if not (same_rows(&w.seen.key, &block.key) and same_rows(&w.seen.value, &block.value)):
        w.seen.key = block.key
        w.seen.value = block.value
        w.seen.start = start[0]
        w.seen.stop = stop[0]
        return True
    if w.seen.start <= start[0]:
        start[0] = w.seen.stop
    elif stop[0] <= w.seen.stop:
        stop[0] = w.seen.start
    w.seen.start = min(w.seen.start, start[0])
    w.seen.stop = max(w.seen.stop, stop[0])
    return start[0] < stop[0]


cdef inline void copy_rows(const Job *job, Scratch *w, const Block *block, Py_ssize_t start,
                           Py_ssize_t stop) noexcept nogil:
    """Copies the head's rows start .. stop - 1 to the thread's copies, where the call uses them."""
    cdef Py_ssize_t n_rows
    cdef char *panels
    if job.copies_keys:
        load_scored_keys(job, block.keys + start * key_nbytes(job), &block.key, start, stop - start)
    if job.pairs_values:
        start -= start % 2   # the last pair of before may have lacked a key
    while job.packs_values and start < stop:
        panels = <char *>block.values.at + start * block.values.row
        if job.pairs_values:
            n_rows = min(stop - start, job.block_k)
            load_value_pairs(job, w, value_pairs(job, block, start), &block.value, start, n_rows)
        elif job.value_storage:
            n_rows = min(stop - start, job.block_k)
            load_rows(job, w.staged, &block.value, start, n_rows, job.value_dim)
            kernels_of(job).pack_values(panels, block.values.panel, w.staged, job.value_dim * job.itemsize, job.itemsize,
                                        n_rows, job.value_dim)
        else:
            n_rows = run_of(&block.value, start, stop - start)
            kernels_of(job).pack_values(panels, block.values.panel, row_at(&block.value, start), block.value.row,
                                        block.value.col, n_rows, job.value_dim)
        start += n_rows


cdef inline void find_part_stops(const Scratch *w, const Block *block, Py_ssize_t first, Py_ssize_t n_keys) noexcept nogil:
    """Sets w.part_stops to the vectors' stops within the n_keys keys from the tile's `first` on."""
    cdef Py_ssize_t j
    for j in range(block.n_vectors):
        w.part_stops[j] = min(max(w.stops[j] - first, 0), n_keys)


cdef inline void score_in_float(const Job *job, Scratch *w, const Block *block, char *tile_max, Py_ssize_t key,
                                Py_ssize_t n_keys) noexcept nogil:
    """w.other_scores become those of the kernels of the compute type, of the keys from `key` on, as far as w.part_stops
    says. For few queries and keys: both are packed and converted each time."""
    pack_block(job, w, block)
    load_rows(job, w.staged, &block.key, key, n_keys, job.head_dim)
    kernels_of(job).score(w.other_scores, tile_max, w.query, block.ld, block.n_vectors, w.staged, w.part_stops,
                          job.head_dim, job.head_dim * job.itemsize, job.itemsize, NULL, 0, 0)


cdef void find_other_scores(const Job *job, Scratch *w, const Block *block, const char *tile_max, Py_ssize_t key,
                            Py_ssize_t n_keys) noexcept nogil:
    """w.other_scores and w.other_max, for the block's other_lanes, before the scores of pairs are computed."""
    if tile_max != NULL:
        memcpy(w.other_max, tile_max, block.ld * job.itemsize)
    score_in_float(job, w, block, NULL if tile_max == NULL else w.other_max, key, n_keys)


cdef void take_other_scores(const Job *job, const Scratch *w, const Block *block, char *scores, char *tile_max,
                            Py_ssize_t n_keys) noexcept nogil:
    """Copies the scores of the block's other_lanes to where those of pairs are."""
    cdef Py_ssize_t lane, j, at
    for lane in range(block.ld):
        if not block.other_lanes >> lane & 1:
            continue
        for j in range(n_keys):
            at = (j * block.ld + lane) * job.itemsize
            memcpy(scores + at, w.other_scores + at, job.itemsize)
        if tile_max != NULL:
            memcpy(tile_max + lane * job.itemsize, w.other_max + lane * job.itemsize, job.itemsize)


cdef inline void score_keys(const Job *job, Scratch *w, const Block *block, char *tile_max, Py_ssize_t key0,
                            Py_ssize_t first, Py_ssize_t n_keys) noexcept nogil:
    """Raw scores of the keys first .. first + n_keys - 1 of the tile at key0, as far as each vector has them.

    Sets w.part_stops to the vectors' stops within these keys. Keys and values that are new to the thread are copied
    first, if the call has copies. Values that are not packed, nor in small pages, are prefetched: `accumulate` reads
    them column by column, and `load_rows` converts them, faster than memory delivers them. That takes 9 % off a batch
    of heads of 128 keys: 2 cores of Emerald Rapids, 2026-11-21, interleaved A/B.
    """
    cdef Py_ssize_t start = key0 + first, new = start, new_stop = start + n_keys, prefetch_nbytes = 0, n = n_keys, at = 0
    cdef Py_ssize_t key_row = key_nbytes(job), key_col = job.itemsize
    cdef bint in_place = not job.copies_keys and not job.converts_keys
    cdef fastattn_score score = kernels_of(job).pairs.score if job.uses_pairs else kernels_of(job).score
    cdef const char *queries = w.query_pairs if job.uses_pairs else w.query
    cdef char *scores
    cdef const char *keys
    cdef const char *values = NULL
    find_part_stops(w, block, first, n_keys)
    if w.part_stops[block.n_vectors - 1] == 0:
        return
    if is_new(w, block, &new, &new_stop):
        copy_rows(job, w, block, new, new_stop)
        if not job.packs_values and block.value.page_size % KEY_CHUNK == 0:
            prefetch_nbytes = stored_nbytes(job, &block.value, job.value_dim)
    if in_place:
        key_row = block.key.row
        key_col = PAIR_NBYTES if job.uses_pairs else block.key.col
    while at < n_keys:
        n = n_keys - at
        if in_place:
            keys = row_at(&block.key, start + at)
            n = run_of(&block.key, start + at, n)
        else:
            # Converted keys are those of the tile, copied ones those of the head.
            keys = block.keys + (at + (first if job.converts_keys else start)) * key_row
        if prefetch_nbytes:
            values = row_at(&block.value, start + at)
            n = run_of(&block.value, start + at, n)
        if n < n_keys:
            find_part_stops(w, block, first + at, n)
        if w.part_stops[block.n_vectors - 1] > 0:
            scores = w.scores + (first + at) * block.ld * job.itemsize
            if job.uses_pairs and block.other_lanes:
                find_other_scores(job, w, block, tile_max, start + at, n)
            score(scores, tile_max, queries, block.ld, block.n_vectors, keys, w.part_stops, key_columns(job), key_row,
                  key_col, values, block.value.row, prefetch_nbytes)
            if job.uses_pairs and block.other_lanes:
                take_other_scores(job, w, block, scores, tile_max, n)
        at += n
    if n < n_keys:
        find_part_stops(w, block, first, n_keys)


cdef inline void adjusted_scores(Job *job, Scratch *w, const Block *block, TileState state, Py_ssize_t key0,
                                 Py_ssize_t first, Py_ssize_t n_keys) noexcept nogil:
    cdef ScoreTile scores
    if n_keys > 0:
        score_keys(job, w, block, NULL, key0, first, n_keys)
        scores = lane_tile(job, w, block, state, key0, first, n_keys, w.part_stops)
        adjust_scores(job, w, block, &scores)


cdef TileState score_tile(Job *job, Scratch *w, const Block *block, Py_ssize_t key0, Py_ssize_t n_keys,
                          bint whole) noexcept nogil:
    """Scores of one key tile, masked, into w.scores; nothing where the tile is empty.

    whole: see `mask_tile`; then the words include what a score_mod masked.
    """
    cdef Py_ssize_t plain, plain_stop
    cdef TileState state = mask_tile(job, w, block, key0, n_keys, whole, &plain, &plain_stop)
    cdef ScoreTile scores
    if state == TILE_EMPTY:
        return state
    memcpy(w.tile_max, w.empty, block.ld * job.itemsize)
    if job.converts_keys:
        load_scored_keys(job, w.key_copy, &block.key, key0, n_keys)
    adjusted_scores(job, w, block, state, key0, 0, plain)
    score_keys(job, w, block, w.tile_max, key0, plain, plain_stop - plain)
    adjusted_scores(job, w, block, state, key0, plain_stop, n_keys - plain_stop)
    if job.has_score_mod and whole:
        scores = lane_tile(job, w, block, state, key0, 0, n_keys, w.stops)
        return note_masked(job, w, block, &scores)
    return state
