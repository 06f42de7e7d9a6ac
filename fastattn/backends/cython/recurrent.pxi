# Gated linear attention: a state (features, columns of values) that tokens are added to, one after another, and that decays
# in between; by the delta rule a token adds only what the state does not answer to its key yet. RECURRENT_TOKENS are worked
# on at once, by products of matrices: Yang et al., "Gated Delta Networks", ICLR 2025, section 3.3, with the triangular
# system solved by substitution. A state is kept in float64 and rounded for the products of each chunk.
#
# Decays of a whole token are factors of scores and of rows. Decays of columns are factors of queries and keys,
# exp(sum - m) and exp(m - sum), m in the middle of the sums of a chunk, which ends before they leave their range. A chunk
# also ends before a token with a nonfinite number: no earlier row can read it then.

cdef enum:
    RECURRENT_TOKENS = 48  # a multiple of all lanes, and three vectors of AVX-512 in float32; others were not measured
    # No sum of decays of a column within a chunk is beyond it: its factors are within exp(+-32), 2**+-46.
    DECAY_RANGE = 64
    # A decay beyond it makes every number of a state 0; a token with one begins a chunk, so that sums stay exact.
    DECAY_MOST = 1000
    FEW_TOKENS = 4         # are added one after another; other numbers were not measured
    RECURRENT_SMALL = 1 << 19  # multiply-adds from which on two threads may be faster than one; an estimate


cdef struct Recurrent:
    const fastattn_kernels *kernels
    Py_ssize_t itemsize
    ItemRows query, key, value, out, decay, beta
    bint has_decay, has_beta
    bint has_token_decay, has_columns  # which of the two a decay is
    const int64_t *stops        # of each item: so many of its tokens are read
    Py_ssize_t n_items, num_kv_heads, group, length, features, value_dim
    Py_ssize_t ld               # features, padded to vectors
    Py_ssize_t columns          # of values, of one task; a multiple of 16
    Py_ssize_t n_parts          # tasks of one head, by columns of values
    double scale
    const char *earlier         # (item, head, features, value_dim), or NULL
    char *state                 # likewise: after the last token


cdef struct RecurrentTiles:
    # A thread's own memory.
    double *sums         # (features, columns): the state
    char *rounded        # the same times `before`, in panels
    char *part           # what a chunk adds to it
    char *keys           # a row a token
    char *raised         # of decays of columns: keys, or queries, times `up`
    char *lowered        # keys times `down`; `keys` without decays of columns
    char *values
    char *added          # what the tokens add: values, or by the delta rule what is left of them
    char *faded          # the same times `ends`
    char *query          # keys or queries by lanes
    char *scores
    char *acc
    char *decays         # of columns, a row a token
    char *up
    char *down
    char *before         # of each feature; NULL where no decay is of columns
    char *after
    char *high           # of whole tokens: sums of decays after the first
    char *low
    char *starts         # exp(sum with the first), or 1
    char *ends           # exp(sum of those after a token)
    char *beta
    # By lanes.
    char *lane_high
    char *lane_low
    char *lane_starts
    char *seen
    char *factor
    char *ones           # also by columns of values
    char *staged         # rows of queries, or of results
    char **rows
    char **out_rows
    Py_ssize_t *stops
    # The chunk.
    Py_ssize_t first, n
    # The task.
    Py_ssize_t column, n_columns, width  # columns of values; their number padded to vectors


cdef Py_ssize_t set_recurrent_tiles(const Recurrent *n, char *base, RecurrentTiles *t) noexcept nogil:
    """Sets the addresses from `base` on; the number of bytes."""
    cdef Py_ssize_t size = n.itemsize, tokens = RECURRENT_TOKENS
    cdef Py_ssize_t of_keys = tokens * n.ld * size, of_values = tokens * n.columns * size
    cdef Py_ssize_t panels = n.kernels.panel_cols * ((n.columns + n.kernels.panel_cols - 1) // n.kernels.panel_cols)
    cdef char *at = base
    t.sums = <double *>take(&at, n.ld * n.columns * sizeof(double))
    t.rounded = take(&at, n.ld * panels * size)
    t.part = take(&at, n.ld * n.columns * size)
    t.keys = take(&at, of_keys)
    t.raised = take(&at, of_keys)
    t.lowered = take(&at, of_keys) if n.has_columns else t.keys
    t.values = take(&at, of_values)
    t.added = take(&at, of_values) if n.has_beta else t.values
    t.faded = take(&at, of_values)
    t.query = take(&at, of_keys)
    t.scores = take(&at, tokens * tokens * size)
    t.acc = take(&at, of_values)
    t.decays = take(&at, of_keys if n.has_columns else tokens * size)
    t.up = take(&at, of_keys) if n.has_columns else NULL
    t.down = take(&at, of_keys) if n.has_columns else NULL
    t.before = take(&at, n.ld * size) if n.has_columns else NULL
    t.after = take(&at, n.ld * size)
    t.high = take(&at, tokens * size)
    t.low = take(&at, tokens * size)
    t.starts = take(&at, tokens * size)
    t.ends = take(&at, tokens * size)
    t.beta = take(&at, tokens * size)
    t.lane_high = take(&at, tokens * size)
    t.lane_low = take(&at, tokens * size)
    t.lane_starts = take(&at, tokens * size)
    t.seen = take(&at, tokens * size)
    t.factor = take(&at, 2 * tokens * size)
    t.ones = take(&at, max(tokens, n.columns) * size)
    t.staged = take(&at, of_values)
    t.rows = <char **>take(&at, tokens * sizeof(char *))
    t.out_rows = <char **>take(&at, tokens * sizeof(char *))
    t.stops = <Py_ssize_t *>take(&at, max(tokens, n.columns) * sizeof(Py_ssize_t))
    return at - base


cdef inline Py_ssize_t find_nonfinite(const Recurrent *n, const char *rows, Py_ssize_t ld, Py_ssize_t n_rows) noexcept nogil:
    """The first row but row 0 that holds NaN or inf; n_rows where none does."""
    cdef Py_ssize_t i
    if n_rows <= 1 or not n.kernels.has_nonfinite(rows + ld * n.itemsize, (n_rows - 1) * ld):
        return n_rows
    for i in range(1, n_rows):
        if n.kernels.has_nonfinite(rows + i * ld * n.itemsize, ld):
            return i
    return n_rows


cdef void load_tokens(const Recurrent *n, RecurrentTiles *t, Py_ssize_t item, Py_ssize_t head, Py_ssize_t first,
                      Py_ssize_t most) noexcept nogil:
    """Keys, values, decays and rates of some tokens."""
    t.first = first
    t.n = most
    load_item_rows(n.kernels, n.itemsize, t.keys, n.ld, &n.key, item_row(&n.key, item, head, first), most, n.features)
    load_item_rows(n.kernels, n.itemsize, t.values, t.width, &n.value, item_row(&n.value, item, head, first) + t.column * n.value.col, most,
                    t.n_columns)
    if n.has_beta:
        load_item_rows(n.kernels, n.itemsize, t.beta, 1, &n.beta, item_row(&n.beta, item, head, first), most, 1)
    if n.has_decay:
        load_item_rows(n.kernels, n.itemsize, t.decays, n.ld if n.has_columns else 1, &n.decay, item_row(&n.decay, item, head, first), most,
                        n.features if n.has_columns else 1)


cdef void cut_chunk(const Recurrent *n, RecurrentTiles *t) noexcept nogil:
    """Ends the chunk before a token that has to begin one."""
    cdef Py_ssize_t i, size = n.itemsize
    t.n = find_nonfinite(n, t.keys, n.ld, t.n)
    t.n = find_nonfinite(n, t.values, t.width, t.n)
    if n.has_beta:
        t.n = find_nonfinite(n, t.beta, 1, t.n)
    if n.has_columns:
        t.n = n.kernels.sum_decays(t.up, t.down, t.decays, n.ld, t.n, n.ld, DECAY_RANGE)
    elif n.has_token_decay:
        for i in range(1, t.n):
            if not fabs(get_real(t.decays + i * size, size)) <= DECAY_MOST:
                t.n = i
                break


cdef void sum_token_decays(const Recurrent *n, RecurrentTiles *t) noexcept nogil:
    """Sums of the decays of whole tokens, and their factors."""
    cdef Py_ssize_t i, size = n.itemsize, lanes = n.kernels.lanes
    cdef Py_ssize_t padded = (t.n + lanes - 1) // lanes * lanes
    cdef double total = 0, rest = 0, more, added, other, first = get_real(t.decays, size)
    for i in range(t.n):
        if i > 0:
            # Knuth's TwoSum.
            more = get_real(t.decays + i * size, size)
            added = total + more
            other = added - total
            rest += (total - (added - other)) + (more - other)
            total = added
        set_real(t.high + i * size, total, size)
        set_real(t.low + i * size, (total - get_real(t.high + i * size, size)) + rest, size)
    for i in range(padded):
        added = total if i >= t.n else get_real(t.high + i * size, size)
        other = rest if i >= t.n else get_real(t.low + i * size, size)
        set_real(t.lane_high + i * size, total - added, size)
        set_real(t.lane_low + i * size, (total - added) - get_real(t.lane_high + i * size, size) + (rest - other), size)
        set_real(t.starts + i * size, first + added, size)
        more = (first - (get_real(t.starts + i * size, size) - added)) + other
        set_real(t.ends + i * size, more if isfinite(more) else 0, size)
    n.kernels.exponentials(t.starts, t.starts, t.ends, padded)
    n.kernels.exponentials(t.ends, t.lane_high, t.lane_low, padded)


cdef inline void set_lanes(const Recurrent *n, RecurrentTiles *t, Py_ssize_t lane, Py_ssize_t token,
                           Py_ssize_t seen) noexcept nogil:
    cdef Py_ssize_t size = n.itemsize
    set_real(t.seen + lane * size, <double>seen, size)
    if n.has_token_decay:
        memcpy(t.lane_high + lane * size, t.high + token * size, size)
        memcpy(t.lane_low + lane * size, t.low + token * size, size)
        memcpy(t.lane_starts + lane * size, t.starts + token * size, size)


cdef inline void score_tokens(const Recurrent *n, const RecurrentTiles *t, const char *factor, Py_ssize_t ld,
                              int n_vectors) noexcept nogil:
    """Gated scores of the lanes of t.query with the keys of the chunk."""
    n.kernels.score(t.scores, NULL, t.query, ld, n_vectors, t.lowered, t.stops, n.features, n.ld * n.itemsize, n.itemsize,
                    NULL, 0, 0)
    n.kernels.gate(t.scores, ld, t.stops, t.seen, factor, t.lane_high if n.has_token_decay else NULL, t.lane_low, t.high, t.low)


cdef inline void ask_state(const Recurrent *n, RecurrentTiles *t, Py_ssize_t ld, int n_vectors) noexcept nogil:
    """t.acc = the answers of the rounded state to the lanes of t.query."""
    cdef fastattn_values state
    cdef int v
    state.at = t.rounded
    state.row = n.kernels.panel_cols * n.itemsize
    state.col = n.itemsize
    state.panel = n.features * state.row
    for v in range(n_vectors):
        t.stops[v] = n.features
    n.kernels.accumulate(t.acc, t.query, NULL, ld, n_vectors, &state, t.stops, KEY_CHUNK, t.n_columns, NULL, 0, 0)


cdef inline void set_values(const Recurrent *n, fastattn_values *values, const char *at, Py_ssize_t row) noexcept nogil:
    values.at = at
    values.row = row
    values.col = n.itemsize
    values.panel = n.kernels.panel_cols * n.itemsize


cdef inline void unpack_answers(const Recurrent *n, const RecurrentTiles *t, char **rows, Py_ssize_t stride,
                                Py_ssize_t n_rows, Py_ssize_t ld, const char *factor) noexcept nogil:
    """The rows of t.acc, each times a factor."""
    cdef Py_ssize_t lane, size = n.itemsize
    cdef double high
    for lane in range(ld):
        high = get_real(factor + lane * size, size)
        set_real(t.factor + lane * size, high, size)
        set_real(t.factor + (ld + lane) * size, high * (2.0 ** -60 if size == 4 else 2.0 ** -118), size)
    n.kernels.unpack(rows, stride, n_rows, t.acc, ld, t.n_columns, t.factor)


cdef void apply_delta_rule(const Recurrent *n, RecurrentTiles *t) noexcept nogil:
    """t.added = beta times what is left of the values after the answers of the state, which earlier tokens change."""
    cdef Py_ssize_t size = n.itemsize, lanes = n.kernels.lanes, i, v, start, rows
    cdef Py_ssize_t ld = (t.n + lanes - 1) // lanes * lanes
    cdef int n_vectors = <int>(ld // lanes)
    cdef fastattn_values system
    cdef const char *keys = t.keys
    if n.has_columns:
        n.kernels.multiply(t.raised, t.keys, t.up, t.n * n.ld)
        keys = t.raised
    for i in range(ld):
        t.rows[i] = <char *>keys + min(i, t.n - 1) * n.ld * size
        t.out_rows[i] = t.added + i * t.width * size
        set_lanes(n, t, i, min(i, t.n - 1), min(i, t.n - 1))
    n.kernels.pack(t.query, ld, <const char *const *>t.rows, size, n.features, 1)
    ask_state(n, t, ld, n_vectors)
    unpack_answers(n, t, t.out_rows, size, t.n, ld, t.lane_starts if n.has_token_decay else t.ones)
    n.kernels.correct(t.added, t.values, t.beta, t.width, t.n, t.width)
    for i in range(ld):
        set_real(t.factor + i * size, -get_real(t.beta + min(i, t.n - 1) * size, size), size)
    for v in range(n_vectors):
        t.stops[v] = min(t.n, (v + 1) * lanes)
    score_tokens(n, t, t.factor, ld, n_vectors)
    for start in range(0, t.n, 16):
        rows = min(<Py_ssize_t>16, t.n - start)
        if start > 0:
            set_values(n, &system, t.scores + start * size, ld * size)
            for v in range(t.width // lanes):
                t.stops[v] = start
            n.kernels.accumulate(t.added + start * t.width * size, t.added, t.ones, t.width, <int>(t.width // lanes), &system,
                                 t.stops, KEY_CHUNK, rows, NULL, 0, 0)
        n.kernels.substitute(t.added + start * t.width * size, t.width, t.scores + (start * ld + start) * size, ld, rows,
                             t.width)


cdef void attend_tokens(const Recurrent *n, RecurrentTiles *t, Py_ssize_t item, Py_ssize_t head, Py_ssize_t first,
                        Py_ssize_t stop, bint has_chunk) noexcept nogil:
    """The results of some tokens, all query heads of the group, from the rounded state and the chunk."""
    cdef Py_ssize_t size = n.itemsize, lanes = n.kernels.lanes, row = first * n.group, n_rows, ld, lane, token, v, h, i
    cdef int n_vectors
    cdef fastattn_values values
    cdef char **rows
    cdef bint is_staged = n.query.storage != 0 or n.has_columns
    set_values(n, &values, t.added, t.width * size)
    while row < stop * n.group:
        n_rows = min(<Py_ssize_t>RECURRENT_TOKENS, stop * n.group - row)
        ld = (n_rows + lanes - 1) // lanes * lanes
        n_vectors = <int>(ld // lanes)
        for lane in range(ld):
            h = head * n.group + (row + min(lane, n_rows - 1)) % n.group
            i = (row + min(lane, n_rows - 1)) // n.group
            token = i - t.first
            t.out_rows[lane] = item_row(&n.out, item, h, i) + t.column * n.out.col
            t.rows[lane] = item_row(&n.query, item, h, i)
            if is_staged and lane < n_rows:
                load_item_rows(n.kernels, n.itemsize, t.raised + lane * n.ld * size, n.ld, &n.query, t.rows[lane], 1, n.features)
                if n.has_columns and has_chunk:
                    n.kernels.multiply(t.raised + lane * n.ld * size, t.raised + lane * n.ld * size,
                                       t.up + token * n.ld * size, n.ld)
            if is_staged:
                t.rows[lane] = t.raised + min(lane, n_rows - 1) * n.ld * size
            if has_chunk:
                set_lanes(n, t, lane, token, token + 1)
        n.kernels.pack(t.query, ld, <const char *const *>t.rows, size if is_staged else n.query.col, n.features, n.scale)
        ask_state(n, t, ld, n_vectors)
        if has_chunk:
            for v in range(n_vectors):
                # The last lane of a vector sees the most.
                t.stops[v] = (row + min((v + 1) * lanes, n_rows) - 1) // n.group - t.first + 1
            score_tokens(n, t, t.ones, ld, n_vectors)
            n.kernels.accumulate(t.acc, t.scores, t.lane_starts if n.has_token_decay else t.ones, ld,
                                 n_vectors, &values, t.stops, KEY_CHUNK, t.n_columns, NULL, 0, 0)
        rows = t.out_rows
        if n.out.storage:
            rows = t.rows
            for lane in range(n_rows):
                rows[lane] = t.staged + lane * n.columns * size
        unpack_answers(n, t, rows, size if n.out.storage else n.out.col, n_rows, ld, t.ones)
        for lane in range(n_rows if n.out.storage else 0):
            n.kernels.store_row(t.out_rows[lane], n.out.col, rows[lane], t.n_columns, n.out.storage & STORAGE)
        row += n_rows


cdef void add_tokens(const Recurrent *n, RecurrentTiles *t) noexcept nogil:
    """Adds what the chunk adds to the state."""
    cdef Py_ssize_t size = n.itemsize, lanes = n.kernels.lanes, v
    cdef fastattn_values keys
    if n.has_token_decay:
        n.kernels.scale_rows(t.faded, t.added, t.ends, t.width, t.n)
        for v in range(n.ld):
            memcpy(t.after + v * size, t.starts + (t.n - 1) * size, size)
    set_values(n, &keys, t.lowered, n.ld * size)
    for v in range(t.width // lanes):
        t.stops[v] = t.n
    n.kernels.accumulate(t.part, t.faded if n.has_token_decay else t.added, NULL, t.width, <int>(t.width // lanes), &keys, t.stops,
                         KEY_CHUNK, n.features, NULL, 0, 0)
    if n.has_token_decay:
        n.kernels.advance_sums(t.sums, t.part, t.after, NULL, n.features, t.width)
    else:
        n.kernels.advance_sums(t.sums, t.part, t.before, t.after if n.has_columns else NULL, n.features, t.width)


cdef void store_results(const Recurrent *n, const RecurrentTiles *t, Py_ssize_t item, Py_ssize_t head, Py_ssize_t first,
                        Py_ssize_t n_heads, Py_ssize_t token) noexcept nogil:
    """The rows of t.acc are the results of a token, of heads from `first` of the group on."""
    cdef Py_ssize_t g, e, size = n.itemsize
    cdef char *to
    for g in range(n_heads):
        to = item_row(&n.out, item, head * n.group + first + g, token) + t.column * n.out.col
        if n.out.storage:
            n.kernels.store_row(to, n.out.col, t.acc + g * t.width * size, t.n_columns, n.out.storage & STORAGE)
        else:
            for e in range(t.n_columns):
                memcpy(to + e * n.out.col, t.acc + (g * t.width + e) * size, size)


cdef void advance_tokens(const Recurrent *n, RecurrentTiles *t, Py_ssize_t item, Py_ssize_t head) noexcept nogil:
    """A few tokens, one after another. The state is in the type of the computation."""
    cdef Py_ssize_t size = n.itemsize, i, g, n_heads, d, row = n.value_dim * size
    cdef Py_ssize_t at = (item * n.num_kv_heads + head) * n.features * row + t.column * size, to_row = row
    cdef Py_ssize_t n_read = min(n.length, <Py_ssize_t>n.stops[item])
    cdef const char *state = n.earlier + at if n.earlier != NULL else NULL
    cdef char *to = n.state + at if n.state != NULL else t.part
    cdef char *kept = t.after
    cdef bint is_read
    if n.state == NULL:
        to_row = n.columns * size
    load_tokens(n, t, item, head, 0, n_read)
    for g in range(RECURRENT_TOKENS):
        set_real(t.factor + g * size, n.scale, size)
    memset(t.query, 0, max(n.ld, t.width) * size)
    for i in range(n.length):
        g = 0
        while g < n.group:
            n_heads = min(<Py_ssize_t>RECURRENT_TOKENS, n.group - g)
            for d in range(n_heads):
                load_item_rows(n.kernels, n.itemsize, t.raised + d * n.ld * size, n.ld, &n.query,
                                item_row(&n.query, item, head * n.group + g + d, i), 1, n.features)
            n.kernels.scale_rows(t.raised, t.raised, t.factor, n.ld, n_heads)
            is_read = g == 0 and i < n_read
            if is_read and n.has_columns:
                n.kernels.exponentials(kept, t.decays + i * n.ld * size, t.query, n.ld)
            else:
                for d in range(n.features):
                    set_real(kept + d * size, exp(get_real(t.decays + i * size, size)) if is_read and n.has_decay else 1, size)
            n.kernels.advance_token(to, state, to_row, row if state != to else to_row,
                                    t.keys + i * n.ld * size if is_read else t.query,
                                    t.values + i * t.width * size if is_read else t.query, kept,
                                    t.beta + i * size if is_read and n.has_beta else NULL, t.raised, n.ld, n_heads,
                                    n.features, t.n_columns, t.acc, t.width)
            state = to
            store_results(n, t, item, head, g, n_heads, i)
            g += n_heads


cdef void run_recurrent_task(const Recurrent *n, RecurrentTiles *t, Py_ssize_t task) noexcept nogil:
    cdef Py_ssize_t head = task // n.n_parts, item = head // n.num_kv_heads, kv = head % n.num_kv_heads
    cdef Py_ssize_t first = 0, size = n.itemsize, d, i
    cdef Py_ssize_t stop = n.stops[item], at
    t.column = task % n.n_parts * n.columns
    t.n_columns = min(n.columns, n.value_dim - t.column)
    t.width = (t.n_columns + 15) // 16 * 16
    if n.length <= FEW_TOKENS:
        advance_tokens(n, t, item, kv)
        return
    memset(t.sums, 0, n.features * t.width * sizeof(double))
    memset(t.added, 0, RECURRENT_TOKENS * t.width * size)  # columns past n_columns stay 0
    at = (head * n.features * n.value_dim + t.column) * size
    if n.earlier != NULL:
        memset(t.part, 0, n.features * t.width * size)
        for d in range(n.features):
            memcpy(t.part + d * t.width * size, n.earlier + at + d * n.value_dim * size, t.n_columns * size)
        n.kernels.add_sums(t.sums, t.part, n.features * t.width)
    while first < stop:
        load_tokens(n, t, item, kv, first, min(<Py_ssize_t>RECURRENT_TOKENS, stop - first))
        cut_chunk(n, t)
        while True:
            if n.has_columns:
                n.kernels.decay_columns(t.up, t.down, t.before, t.after, t.decays, n.ld, t.n, n.ld)
                n.kernels.multiply(t.lowered, t.keys, t.down, t.n * n.ld)
            elif n.has_token_decay:
                sum_token_decays(n, t)
            n.kernels.round_panels(t.rounded, t.sums, t.before, n.features, t.width)
            if not n.has_beta:
                break
            apply_delta_rule(n, t)
            # Rows before one that overflows may not read it.
            i = find_nonfinite(n, t.added, t.width, t.n)
            if i == t.n:
                break
            t.n = i
            if n.has_columns:
                n.kernels.sum_decays(t.up, t.down, t.decays, n.ld, t.n, n.ld, DECAY_RANGE)
        attend_tokens(n, t, item, kv, first, first + t.n, True)
        add_tokens(n, t)
        first += t.n
    if first < n.length:
        n.kernels.round_panels(t.rounded, t.sums, NULL, n.features, t.width)
        attend_tokens(n, t, item, kv, first, n.length, False)
    if n.state != NULL:
        n.kernels.round_sums(t.part, t.sums, n.features * t.width)
        for d in range(n.features):
            memcpy(n.state + at + d * n.value_dim * size, t.part + d * t.width * size, t.n_columns * size)


cdef void run_recurrent_tasks(void *call, Share *shares, int own, int n_shares) noexcept nogil:
    """Without memory for its tiles a thread runs no task, and the others run its share."""
    cdef const Recurrent *n = <const Recurrent *>call
    cdef RecurrentTiles tiles
    cdef Py_ssize_t nbytes = set_recurrent_tiles(n, NULL, &tiles), v, task, stop
    cdef char *memory = <char *>malloc(nbytes + 64)
    cdef char *base = <char *>((<size_t>memory + 63) & ~<size_t>63)
    cdef int turn = 0
    if memory == NULL:
        return
    set_recurrent_tiles(n, base, &tiles)
    for v in range(max(<Py_ssize_t>RECURRENT_TOKENS, n.columns)):
        set_real(tiles.ones + v * n.itemsize, 1, n.itemsize)
    while take_tasks(shares, own, n_shares, 1, &turn, &task, &stop):
        run_recurrent_task(n, &tiles, task)
    free(memory)


def gated_linear_attention(tuple arrays, tuple items, tuple storages, cnp.ndarray stops, earlier, state, double scale,
                           int itemsize, thread_limit):
    """Fills out, and `state`. arrays: query, key, value, out, decay and beta, (*lead, head, token, column), no size of them
    0; decay and beta may be None, and have one column, or decay one for each feature.

    items: for each the bytes from its start to each item. storages: how each is stored. stops: int64, of each item the
    tokens that are read. earlier, state: None, or contiguous (item, head, features, value_dim) of the computation's type.
    """
    cdef Recurrent n
    cdef cnp.ndarray query = arrays[0], key = arrays[1], value = arrays[2]
    cdef int num_threads = 1
    cdef Py_ssize_t heads, vectors, parts
    cdef bint done
    memset(&n, 0, sizeof(Recurrent))
    n.kernels = chosen[itemsize == 8]
    n.itemsize = itemsize
    n.scale = scale
    set_item_rows(&n.query, query, items[0], storages[0])
    set_item_rows(&n.key, key, items[1], storages[1])
    set_item_rows(&n.value, value, items[2], storages[2])
    set_item_rows(&n.out, arrays[3], items[3], storages[3])
    n.has_decay = arrays[4] is not None
    n.has_beta = arrays[5] is not None
    if n.has_decay:
        set_item_rows(&n.decay, arrays[4], items[4], storages[4])
        n.has_columns = arrays[4].shape[-1] > 1
        n.has_token_decay = not n.has_columns
    if n.has_beta:
        set_item_rows(&n.beta, arrays[5], items[5], storages[5])
    n.stops = <const int64_t *>cnp.PyArray_DATA(stops)
    n.n_items = cnp.PyArray_SIZE(stops)
    n.num_kv_heads = key.shape[key.ndim - 3]
    n.group = query.shape[query.ndim - 3] // n.num_kv_heads
    n.length = query.shape[query.ndim - 2]
    n.features = query.shape[query.ndim - 1]
    n.value_dim = value.shape[value.ndim - 1]
    n.ld = (n.features + 15) // 16 * 16
    if earlier is not None:
        n.earlier = <const char *>cnp.PyArray_DATA(earlier)
    if state is not None:
        n.state = <char *>cnp.PyArray_DATA(state)
    heads = n.n_items * n.num_kv_heads
    if heads * n.length * n.features * n.value_dim * (2 + n.group) >= RECURRENT_SMALL:
        num_threads = thread_limit()
    # Columns of values do not depend on each other: where there are few heads, each is divided. No bit depends on it.
    vectors = (n.value_dim + 15) // 16
    parts = max(<Py_ssize_t>1, min(vectors, (2 * num_threads + heads - 1) // heads if num_threads > 1 else 1))
    n.columns = 16 * ((vectors + parts - 1) // parts)
    n.n_parts = (n.value_dim + n.columns - 1) // n.columns
    with nogil:
        done = run_on_threads(run_recurrent_tasks, &n, heads * n.n_parts, <int>min(<Py_ssize_t>num_threads, heads * n.n_parts), False)
    if not done:
        raise MemoryError("no memory for the tiles of a thread")
