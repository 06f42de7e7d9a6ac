# One key tile: which of its keys each lane may attend, and their scores. The only file that knows masks and bias.

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
    cdef int32_t entry
    cdef const char *index
    cdef bint intervals_only = not job.has_dense and not job.has_mask_map
    cdef bint masks_only = not job.adjusts_all
    plain[0] = 0
    plain_stop[0] = n_keys if masks_only else 0
    for j in range(block.n_vectors):
        w.stops[j] = n_keys
    if not job.is_masked:
        return TILE_FULL
    if block.hole_start <= key0 and key0 + n_keys <= block.hole_stop:
        return TILE_EMPTY
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
        for lane in range(ld):
            w.rows[lane] = lane_row(w, &job.dense, block.dense, lane) + key0 * job.dense.col
        kernels_of(job).mask_words(w.words, ld, <const char *const *>w.rows, job.dense.col, job.dense_nbytes, n_keys)
    if job.has_mask_map:
        for lane in range(ld):
            index = (block.mask_index + w.row_h[lane] * job.mask_index.head
                     + w.row_i[lane] // job.tile_q * job.mask_index.row)
            for j in range(n_words):
                key = key0 + j * WORD
                entry = (<const int32_t *>(index + key // job.tile_k * job.mask_index.col))[0]
                if entry == INDEX_EMPTY:
                    w.words[j * ld + lane] = 0
                elif entry != INDEX_FULL:
                    w.words[j * ld + lane] &= (<const uint32_t *><size_t>job.mask_bits)[
                        (entry * job.tile_q + w.row_i[lane] % job.tile_q) * (job.tile_k // WORD)
                        + key % job.tile_k // WORD]

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


cdef const uint32_t *find_drop_words(const Job *job, Scratch *w, const Block *block, Py_ssize_t ld, Py_ssize_t key0,
                                     Py_ssize_t n_keys) noexcept nogil:
    """Which weights of a tile dropout keeps, as words of ld lanes; NULL: all."""
    cdef Py_ssize_t lane, first = block.item * job.num_kv_heads * job.group_size
    cdef fastattn_dropout dropout
    if not job.drop_threshold:
        return NULL
    dropout.key[0] = <uint64_t>job.drop_key_low
    dropout.key[1] = <uint64_t>job.drop_key_high
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


cdef void find_bias_rows(const Job *job, Scratch *w, const Block *block, Py_ssize_t key0,
                         Py_ssize_t n_keys) noexcept nogil:
    """The bias of each lane at the tile's keys, in the compute type and without gaps: in place, or converted."""
    cdef Py_ssize_t lane
    cdef char *row
    for lane in range(block.ld):
        row = lane_row(w, &job.bias, block.bias, lane) + key0 * job.bias.col
        w.bias_rows[lane] = row
        if job.convert_bias:
            w.bias_rows[lane] = w.converted + lane * n_keys * job.itemsize
            if job.bias_storage:
                load_row(job, w.bias_rows[lane], row, job.bias.col, job.bias_storage, n_keys)
            else:
                fastattn_convert_row(w.bias_rows[lane], <int>job.itemsize, row, job.bias_nbytes, job.bias_swapped,
                                     job.bias.col, n_keys)


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
    while job.packs_values and start < stop:
        panels = <char *>block.values.at + start * block.values.row
        if job.value_storage:
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
    cdef Py_ssize_t start = key0 + first, new = start, new_stop = start + n_keys, prefetch_nbytes = 0, n, at = 0
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


cdef void note_outside(Job *job, const Scratch *w, const Block *block, Py_ssize_t lane, const char *scores,
                       Py_ssize_t key_nbytes, Py_ssize_t key0, Py_ssize_t n_keys) noexcept nogil:
    """Sets job.read_outside where a score of one lane, masked by now, is still the mark of a score_mod that read out of
    bounds."""
    cdef uint64_t mark = <uint64_t>MARK_FLOAT64 if job.itemsize == 8 else <uint64_t>MARK_FLOAT32
    cdef uint64_t arrays = (<uint64_t>1 << MARK_BITS) - 1, bits
    cdef uint32_t word
    cdef int64_t at
    cdef Py_ssize_t j
    for j in range(n_keys):
        if job.itemsize == 8:
            memcpy(&bits, scores + j * key_nbytes, sizeof(bits))
        else:
            memcpy(&word, scores + j * key_nbytes, sizeof(word))
            bits = word
        if bits & ~arrays != mark:
            continue
        at = block.item * job.num_kv_heads * job.group_size + w.row_h[lane]
        at = (at * job.len_q + w.row_i[lane]) * job.len_k + key0 + j + 1
        if job.outside_at == 0 or at < job.outside_at:
            job.outside_at = at
            job.read_outside = bits & arrays
        return


cdef inline int64_t modify_scores(Job *job, Scratch *w, const Block *block, char *tile_max,
                                  Py_ssize_t key0) noexcept nogil:
    """Applies the score_mod to the scores, after the soft-cap, and updates tile_max; not 0 if it left marks."""
    if job.softcap > 0 or job.score_root != 1:
        # w.rescale is free between two steps of the softmax.
        kernels_of(job).adjust(w.scores, w.rescale, block.ld, w.part_stops, job.score_root, job.softcap, NULL, NULL)
    return (<score_loop><size_t>job.score_mod)(w.scores, tile_max, block.ld, block.n_vectors,
                                               <Py_ssize_t>w.part_stops, key0, block.item, w.row_h, w.row_i,
                                               <const char *><size_t>job.aux)


cdef inline void adjust_scores(Job *job, Scratch *w, const Block *block, TileState state, Py_ssize_t key0,
                               Py_ssize_t first, Py_ssize_t n_keys) noexcept nogil:
    """Adjusts the raw scores of the keys first .. first + n_keys - 1 of the tile, as far as w.part_stops says; first is
    0 where there is a bias or a score_mod."""
    cdef const uint32_t *words = words_of(w, state)
    cdef double root = job.score_root, softcap = job.softcap
    cdef Py_ssize_t lane
    cdef int64_t marks = 0
    cdef bint adjusts = words != NULL or job.has_bias
    if n_keys <= 0:
        return
    if job.has_score_mod:
        marks = modify_scores(job, w, block, w.rescale if adjusts else w.tile_max, key0)
        root = 1
        softcap = 0
    if adjusts or not job.has_score_mod:
        kernels_of(job).adjust(w.scores + first * block.ld * job.itemsize, w.tile_max, block.ld, w.part_stops, root,
                               softcap, bias_of(job, w), NULL if words == NULL else words + first // WORD * block.ld)
    if marks:
        for lane in range(block.n_rows):
            note_outside(job, w, block, lane, w.scores + lane * job.itemsize, block.ld * job.itemsize, key0,
                         w.part_stops[lane // job.lanes])


cdef inline void adjusted_scores(Job *job, Scratch *w, const Block *block, TileState state, Py_ssize_t key0,
                                 Py_ssize_t first, Py_ssize_t n_keys) noexcept nogil:
    """`score_keys`, then `adjust_scores`."""
    if n_keys > 0:
        score_keys(job, w, block, NULL, key0, first, n_keys)
        adjust_scores(job, w, block, state, key0, first, n_keys)


cdef TileState note_masked(const Job *job, Scratch *w, Py_ssize_t n_rows, Py_ssize_t row, Py_ssize_t key,
                           Py_ssize_t n_keys, TileState state) noexcept nogil:
    """Clears the mask bits of scores that a score_mod made -inf; the new state of the tile.

    `row` and `key` are the strides of the scores in bytes.
    """
    cdef Py_ssize_t r, j
    if state != TILE_PARTIAL:
        memset(w.words, 0xff, (n_keys + WORD - 1) // WORD * n_rows * sizeof(uint32_t))
    for j in range(n_keys):
        for r in range(n_rows):
            if get_real(w.scores + r * row + j * key, job.itemsize) == -INFINITY:
                w.words[j // WORD * n_rows + r] &= ~(<uint32_t>1 << (j % WORD))
    return TILE_PARTIAL


cdef TileState score_tile(Job *job, Scratch *w, const Block *block, Py_ssize_t key0, Py_ssize_t n_keys,
                          bint whole) noexcept nogil:
    """Scores of one key tile, masked, into w.scores; nothing where the tile is empty.

    whole: see `mask_tile`; then the words include what a score_mod masked.
    """
    cdef Py_ssize_t plain, plain_stop
    cdef TileState state = mask_tile(job, w, block, key0, n_keys, whole, &plain, &plain_stop)
    if state == TILE_EMPTY:
        return state
    memcpy(w.tile_max, w.empty, block.ld * job.itemsize)
    if job.converts_keys:
        load_scored_keys(job, w.key_copy, &block.key, key0, n_keys)
    if job.has_bias:
        find_bias_rows(job, w, block, key0, n_keys)
    adjusted_scores(job, w, block, state, key0, 0, plain)
    score_keys(job, w, block, w.tile_max, key0, plain, plain_stop - plain)
    adjusted_scores(job, w, block, state, key0, plain_stop, n_keys - plain_stop)
    if job.has_score_mod and whole:
        return note_masked(job, w, block.ld, job.itemsize, block.ld * job.itemsize, n_keys, state)
    return state
