# Recurrent attention: the tokens of a head chunk by chunk, tasks on all threads, and the call.

cdef enum:
    SUMMED_TOKENS = 96    # of a chunk that no query reads
    # Heads beside each other in memory take turns, a chunk of each: rows of several are then read from a page of memory before
    # the next. One after another they take, of 64 columns, 1.15 of the time in 16,384 tokens, 1.05 in 4,096, 1.03 in 1,024; of 32
    # columns 1.14: two threads of Zen 5, "bshd", 2026-11-29, interleaved. More than 8 were not measured.
    MOST_HEADS = 8
    # Of their states, a quarter of the L2 of Zen 4 and 5. With heads of 128, whose states are larger, 2 to 8 heads gained nothing.
    HEADS_NBYTES = 1 << 18
    FEW_TOKENS = 4         # are added one after another; other numbers were not measured
    RECURRENT_SMALL = 1 << 19  # multiply-adds from which on two threads may be faster than one; an estimate
    # Multiply-adds below which no sleeping thread is woken: two threads took 1.4 of the time of one at 1.0 million, 1.1 at 2.1
    # and 0.9 at 4.2. Gated rule, (1, 8, L, 64), a call every millisecond, 2 cores of Zen 5, virtual, 2026-11-29.
    RECURRENT_SHORT = 5 << 19
    # Where there are fewer heads than SEGMENT_HEADS, each is divided into segments, at most MOST_SEGMENTS, of at least
    # SEGMENT_TOKENS, but by the delta rule, which would have to carry a matrix of (features, features). A segment costs a
    # pass over its sums; with `is_causal` its tokens are also added twice. Sizes alone decide, so no bit depends on the
    # number of threads.
    SEGMENT_HEADS = 4
    MOST_SEGMENTS = 64
    SEGMENT_TOKENS = 1024


cdef void sum_tokens(const Recurrent *n, RecurrentTiles *t, Py_ssize_t item, Py_ssize_t kv, Py_ssize_t first,
                     Py_ssize_t stop) noexcept nogil:
    """Adds tokens that no query reads in between."""
    stop = stop_of(n, item, stop)
    while first < stop:
        load_tokens(n, t, item, kv, first, min(n.tokens, stop - first))
        if n.has_columns or n.has_token_decay:
            cut_chunk(n, t)
            decay_tokens(n, t)
        add_tokens(n, t)
        first += t.n


cdef void attend_slices(const Recurrent *n, RecurrentTiles *t, Py_ssize_t item, Py_ssize_t kv, Py_ssize_t first,
                        Py_ssize_t stop) noexcept nogil:
    """`attend_positions`, a vector of columns at a time, where what a token adds is nonfinite: chunks then end otherwise than
    where it is not, and which columns do so together may not depend on the task."""
    cdef RecurrentTiles slice
    cdef Py_ssize_t column = 0, lanes = n.kernels.lanes
    memcpy(t.keys_before, t.key_sums, n.ld * sizeof(double))
    while column < t.n_columns:
        slice = t[0]
        memcpy(t.key_sums, t.keys_before, n.ld * sizeof(double))
        convert_numbers(t.rounded_keys, n.itemsize, <char *>t.key_sums, sizeof(double), n.features)
        slice.sums += column
        slice.rounded += column * n.itemsize
        slice.column += column
        slice.n_columns = min(lanes, t.n_columns - column)
        slice.width = lanes
        memset(slice.added, 0, n.tokens * n.values_ld * n.itemsize)
        attend_positions(n, &slice, 1, item, kv, first, stop)
        column += lanes


cdef void attend_chunk(const Recurrent *n, RecurrentTiles *t, const RecurrentTiles *next, Py_ssize_t next_kv, Py_ssize_t item,
                       Py_ssize_t kv, Py_ssize_t last, Py_ssize_t stop) noexcept nogil:
    """The results of a chunk that begins with t.first and ends before `last`; its keys are added to the state, and t.first becomes
    where the next one begins. Where chunks end otherwise in some columns than in others, the results of all tokens before
    `stop`. `next`: the tiles of the head whose turn is next, if the chunk is not cut."""
    cdef Py_ssize_t key_item = item_of_keys(n, item), first = t.first, overflows
    load_tokens(n, t, key_item, kv, first, min(n.tokens, last - first))
    if t.width > n.kernels.lanes and t.may_be_nonfinite and find_nonfinite(n, t.values, n.values_ld, t.n) < t.n:
        attend_slices(n, t, item, kv, first, stop)
        t.first = stop
        return
    cut_chunk(n, t)
    while True:
        decay_tokens(n, t)
        weigh_chunk(n, t)
        if not n.has_beta:
            break
        look_ahead(n, t, &n.query, item, kv * n.group, first, first + t.n, 0, n.features)
        if not apply_delta_rule(n, t):
            break
        overflows = find_nonfinite(n, t.added, n.values_ld, t.n)
        if overflows == t.n:
            break
        if t.width > n.kernels.lanes:
            attend_slices(n, t, item, kv, first, stop)
            t.first = stop
            return
        # Rows before one that overflows may not read it.
        t.n = overflows
        if n.has_columns:
            n.kernels.sum_decays(t.up, t.down, t.decays, n.ld, t.n, n.ld, DECAY_RANGE)
    t.first += t.n
    look_ahead(n, t, &n.value, key_item, next_kv, next.first, last, t.column, t.n_columns)
    attend_tokens(n, t, item, kv, first, t.first, True)
    look_ahead(n, t, &n.key, key_item, next_kv, next.first, last, 0, n.features)
    add_tokens(n, t)


cdef void attend_positions(const Recurrent *n, RecurrentTiles *tiles, Py_ssize_t n_heads, Py_ssize_t item, Py_ssize_t kv,
                           Py_ssize_t first, Py_ssize_t stop) noexcept nogil:
    """The results of some tokens of heads from kv on, chunks of each in turns. With is_causal the states are those before them,
    and they are added to them."""
    cdef Py_ssize_t last = stop_of(n, item_of_keys(n, item), stop) if n.is_causal else first, begun = first, h, after
    for h in range(n_heads):
        tiles[h].first = first
    while begun < last:
        begun += n.tokens
        for h in range(n_heads):
            after = h + 1 if h + 1 < n_heads else 0
            while tiles[h].first < min(begun, last):
                attend_chunk(n, &tiles[h], &tiles[after], kv + after, item, kv + h, last, stop)
    for h in range(n_heads):
        attend_tokens(n, &tiles[h], item, kv + h, tiles[h].first, stop, False)


cdef void advance_tokens(const Recurrent *n, RecurrentTiles *t, Py_ssize_t item, Py_ssize_t head) noexcept nogil:
    """A few tokens, one after another. The state is in the type of the computation."""
    cdef Py_ssize_t size = n.itemsize, i, g, n_heads, d, row = n.value_dim * size
    cdef Py_ssize_t at = (item * n.num_kv_heads + head) * n.features * row + t.column * size, to_row = row
    cdef Py_ssize_t n_read = stop_of(n, item, n.length)
    cdef const char *state = n.earlier + at if n.earlier != NULL else NULL
    cdef char *to = n.state + at if n.state != NULL else t.rounded
    cdef char *kept = t.after
    cdef char *zeros = t.part
    cdef bint is_read
    if n.state == NULL:
        to_row = n.values_ld * size
    load_tokens(n, t, item, head, 0, n_read)
    for g in range(RECURRENT_TOKENS):
        set_real(t.factors + g * size, n.scale, size)
    memset(zeros, 0, max(n.ld, n.values_ld) * size)
    for i in range(n.length):
        g = 0
        while g < n.group:
            n_heads = min(<Py_ssize_t>RECURRENT_TOKENS, n.group - g)
            for d in range(n_heads):
                load_item_rows(n.kernels, size, t.raised + d * n.ld * size, n.ld, &n.query,
                               item_row(&n.query, item, head * n.group + g + d, i), 1, n.features)
            n.kernels.scale_rows(t.raised, t.raised, t.factors, n.ld, n_heads, n.ld)
            is_read = g == 0 and i < n_read
            if is_read and n.has_columns:
                n.kernels.exponentials(kept, t.decays + i * n.ld * size, zeros, n.ld)
            else:
                for d in range(n.features):
                    set_real(kept + d * size,
                             exp(get_real(t.decays + i * size, size)) if is_read and n.has_token_decay else 1, size)
            n.kernels.advance_token(to, state, to_row, row if state != to else to_row,
                                    t.keys + i * n.ld * size if is_read else zeros,
                                    t.values + i * n.values_ld * size if is_read else zeros, kept,
                                    t.beta + i * size if is_read and n.has_beta else NULL, t.raised, n.ld, n_heads,
                                    n.features, t.n_columns, t.acc, n.values_ld)
            state = to
            store_results(n, t, item_row(&n.out, item, head * n.group + g, i), n.out.head, n_heads)
            g += n_heads


cdef void fold_segments(const Recurrent *n, RecurrentTiles *t, Py_ssize_t head) noexcept nogil:
    """Turns the sums of a head's segments into the state before each; or the first into that of all."""
    cdef double *sums
    cdef double *extra
    cdef double own, kept = 1
    cdef Py_ssize_t s, d, e
    read_earlier(n, t, head)
    for s in range(n.key_segments):
        sums = n.sums + (head * n.key_segments + s) * n.n_sums
        extra = sums + n.features * n.value_dim
        for d in range(n.features):
            if not n.is_normalized:
                kept = extra[d]
            for e in range(n.value_dim):
                own = sums[d * n.value_dim + e]
                sums[d * n.value_dim + e] = t.sums[d * n.values_ld + e]
                t.sums[d * n.values_ld + e] = kept * t.sums[d * n.values_ld + e] + own
            own = extra[d]
            extra[d] = t.key_sums[d]
            t.key_sums[d] += own
    if not n.is_causal:
        sums = n.sums + head * n.key_segments * n.n_sums
        write_state(n, t, <char *>sums, sizeof(double), sums + n.features * n.value_dim)
    write_last(n, t, head)


cdef inline Py_ssize_t head_groups(const Recurrent *n) noexcept nogil:
    return (n.num_kv_heads + n.heads_at_once - 1) // n.heads_at_once


cdef void run_recurrent_task(const Recurrent *n, RecurrentTiles *tiles, Py_ssize_t task) noexcept nogil:
    """`tiles` are those of heads_at_once heads."""
    cdef Py_ssize_t parts = n.n_parts, groups = head_groups(n), part, head, item, kv, n_heads, h, d
    cdef RecurrentTiles *t
    cdef double *sums
    if n.phase == SUM_SEGMENTS:
        parts = n.key_segments
    elif n.phase == ATTEND_SEGMENTS:
        parts = n.query_segments
    part = task % parts
    item = task // parts // groups
    kv = task // parts % groups * n.heads_at_once
    head = item * n.num_kv_heads + kv
    n_heads = min(n.heads_at_once, n.num_kv_heads - kv)
    for h in range(n_heads):
        t = &tiles[h]
        t.column = part * n.columns if n.phase == WHOLE_HEADS else 0
        t.n_columns = min(n.columns, n.value_dim - t.column)
        t.width = padded_lanes(n, t.n_columns)
    t = tiles
    # Columns past those of the task are 0.
    memset(t.added, 0, n.tokens * n.values_ld * n.itemsize)
    memset(t.acc, 0, RECURRENT_TOKENS * n.values_ld * n.itemsize)
    if n.phase == FOLD_SEGMENTS:
        fold_segments(n, t, head)
    elif n.phase == SUM_SEGMENTS:
        read_state(n, t, NULL, 0, NULL)
        for d in range(n.features if not n.is_normalized else 0):
            t.key_sums[d] = 1
        sum_tokens(n, t, item, kv, part * n.segment, min((part + 1) * n.segment, n.len_k))
        sums = n.sums + task * n.n_sums
        write_state(n, t, <char *>sums, sizeof(double), sums + n.features * n.value_dim)
    elif n.phase == ATTEND_SEGMENTS:
        sums = n.sums + ((item_of_keys(n, item) * n.num_kv_heads + kv) * n.key_segments
                         + (min(part, n.key_segments - 1) if n.is_causal else 0)) * n.n_sums
        read_state(n, t, <char *>sums, sizeof(double), sums + n.features * n.value_dim)
        attend_positions(n, t, 1, item, kv, part * n.segment, min((part + 1) * n.segment, n.length))
    elif n.length <= FEW_TOKENS and n.is_causal and not n.is_normalized:
        advance_tokens(n, t, item, kv)
    else:
        for h in range(n_heads):
            read_earlier(n, &tiles[h], head + h)
            if not n.is_causal:
                sum_tokens(n, &tiles[h], item, kv + h, 0, n.len_k)
        attend_positions(n, tiles, n_heads, item, kv, 0, n.length)
        for h in range(n_heads):
            write_last(n, &tiles[h], head + h)


cdef void run_recurrent_tasks(void *call, Share *shares, int own, int n_shares) noexcept nogil:
    """Without memory for its tiles a thread runs no task, and the others run its share."""
    cdef const Recurrent *n = <const Recurrent *>call
    cdef RecurrentTiles tiles[MOST_HEADS]
    cdef Py_ssize_t states = set_recurrent_tiles(n, NULL, tiles), nbytes = set_state_tiles(n, NULL, tiles), i, task, stop
    cdef char *memory = <char *>malloc(states + (n.heads_at_once - 1) * nbytes + 64)
    cdef char *base = <char *>((<size_t>memory + 63) & ~<size_t>63)
    cdef int turn = 0
    if memory == NULL:
        return
    set_recurrent_tiles(n, base, tiles)
    for i in range(1, n.heads_at_once):
        tiles[i] = tiles[0]
        set_state_tiles(n, base + states + (i - 1) * nbytes, &tiles[i])
    memset(tiles[0].high, 0, tiles[0].starts - tiles[0].high)
    for i in range(max(<Py_ssize_t>RECURRENT_TOKENS, n.values_ld)):
        set_real(tiles[0].ones + i * n.itemsize, 1, n.itemsize)
    while take_tasks(shares, own, n_shares, 1, &turn, &task, &stop):
        run_recurrent_task(n, tiles, task)
    free(memory)


cdef inline Py_ssize_t work_of(const Recurrent *n) noexcept nogil:
    """Multiply-adds of queries and keys with the states."""
    return (n.num_kv_heads * (n.n_items * n.group * n.length + n.n_key_items * n.len_k * (1 + n.has_beta)) * n.features
            * n.value_dim)


cdef bint run_phase(Recurrent *n, RecurrentPhase phase, Py_ssize_t n_tasks, int num_threads) noexcept nogil:
    n.phase = phase
    return run_on_threads(run_recurrent_tasks, n, n_tasks, <int>min(<Py_ssize_t>num_threads, n_tasks), False,
                          work_of(n) < RECURRENT_SHORT)


cdef Py_ssize_t choose_heads_at_once(const Recurrent *n, int num_threads) noexcept nogil:
    """As many as leave two tasks to a thread, and no thread much more than its share. No bit depends on it."""
    cdef Py_ssize_t nbytes = n.features * n.values_ld * (<Py_ssize_t>sizeof(double) + n.itemsize), groups, heads, tasks, longest
    cdef Py_ssize_t share = (n.n_key_items * n.num_kv_heads + num_threads - 1) // num_threads
    if not n.is_causal or n.length <= FEW_TOKENS or fabs(<double>n.key.head) >= fabs(<double>n.key.row):
        return 1
    for groups in range((n.num_kv_heads + MOST_HEADS - 1) // MOST_HEADS, n.num_kv_heads):
        heads = (n.num_kv_heads + groups - 1) // groups
        tasks = n.n_key_items * groups
        # Two bounds: all tasks are as large as the largest, or the last one that begins is. A sixteenth is an estimate.
        longest = min((tasks + num_threads - 1) // num_threads * heads, share + heads * (num_threads - 1) // num_threads)
        if heads * nbytes <= HEADS_NBYTES and tasks >= 2 * num_threads and longest <= share * 17 // 16:
            return heads
    return 1


cdef bint run_recurrent(Recurrent *n, int num_threads) noexcept nogil:
    """False without memory."""
    cdef Py_ssize_t heads = n.n_key_items * n.num_kv_heads, tokens = max(n.length, n.len_k), lanes = n.kernels.lanes
    cdef Py_ssize_t vectors = (n.value_dim + lanes - 1) // lanes, parts = 1
    cdef bint done
    n.segment = tokens
    if heads < SEGMENT_HEADS and not n.has_beta:
        n.segment = max(<Py_ssize_t>SEGMENT_TOKENS, (tokens + MOST_SEGMENTS - 1) // MOST_SEGMENTS)
        n.segment = (n.segment + SUMMED_TOKENS - 1) // SUMMED_TOKENS * SUMMED_TOKENS
    n.key_segments = (n.len_k + n.segment - 1) // n.segment
    n.query_segments = (n.length + n.segment - 1) // n.segment
    if n.n_items == n.n_key_items and n.key_segments == 1 and n.query_segments == 1:
        # Columns of values do not depend on each other: where there are few heads, each is divided. No bit depends on it.
        if num_threads > 1:
            parts = max(<Py_ssize_t>1, min(vectors, (2 * num_threads + heads - 1) // heads))
        n.columns = min(n.value_dim, (vectors + parts - 1) // parts * lanes)
        n.n_parts = (n.value_dim + n.columns - 1) // n.columns
        n.values_ld = padded_to_lines(n.columns, n.itemsize)
        n.heads_at_once = choose_heads_at_once(n, num_threads)
        return run_phase(n, WHOLE_HEADS, n.n_key_items * head_groups(n) * n.n_parts, num_threads)
    n.n_sums = n.features * (n.value_dim + 1)
    n.sums = <double *>malloc(heads * n.key_segments * n.n_sums * sizeof(double))
    if n.sums == NULL:
        return False
    done = (run_phase(n, SUM_SEGMENTS, heads * n.key_segments, num_threads)
            and run_phase(n, FOLD_SEGMENTS, heads, num_threads)
            and run_phase(n, ATTEND_SEGMENTS, n.n_items * n.num_kv_heads * n.query_segments, num_threads))
    free(n.sums)
    return done


def recurrent_attention(tuple arrays, tuple storages, tuple leads, item_of_keys, stops, tuple earlier, tuple state, lost,
                        tuple bounds, bint has_elu, bint is_causal, double scale, int itemsize, thread_limit):
    """Fills out, and the states. arrays: query, key, value, out, decay and beta, (*lead, head, token, column), no size of them
    0; decay and beta may be None, and have one column, or decay one for each feature. storages: how each is stored.

    leads: the leading axes of queries and results, and of all else, to which those of the arrays are broadcast. item_of_keys:
    int64, for each item of the queries that of its keys; None where these are the same, as with is_causal. stops: None, or
    int64, of each item of the keys the tokens that are read. earlier, state: None, or a contiguous array (item of the keys,
    head, features, value_dim), float64 or of the computation's type, and sums of keys (item of the keys, head, features),
    float64 or None. lost: bool, contiguous (*lead, head, token) of queries, which becomes True where a result's denominator is
    not within the bounds, or it is nonfinite; None: results are not divided.
    """
    cdef Recurrent n
    cdef int64_t *items
    cdef int num_threads = 1
    cdef bint done
    items = set_recurrent(&n, arrays, storages, leads, item_of_keys, stops, earlier, scale, itemsize)
    n.has_elu = has_elu
    n.is_causal = is_causal
    if not is_causal:
        n.tokens = SUMMED_TOKENS
    if state is not None:
        n.state = <char *>cnp.PyArray_DATA(state[0])
        n.state_keys = <double *>cnp.PyArray_DATA(state[1]) if state[1] is not None else NULL
        n.state_size = cnp.PyArray_ITEMSIZE(state[0])
    if lost is not None:
        n.is_normalized = True
        n.lost = <char *>cnp.PyArray_DATA(lost)
        n.least, n.most = bounds
    if work_of(&n) >= RECURRENT_SMALL:
        num_threads = thread_limit()
    with nogil:
        done = run_recurrent(&n, num_threads)
    free(items)
    if not done:
        raise MemoryError("no memory for the tiles of a thread, or for the sums of segments")
