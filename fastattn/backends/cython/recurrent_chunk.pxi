# Recurrent attention: a state (features, columns of values) that tokens are added to, one after another, and that decays in
# between; by the delta rule a token adds only what the state does not answer to its key yet. RECURRENT_TOKENS are worked
# on at once, by products of matrices: Yang et al., "Gated Delta Networks", ICLR 2025, section 3.3, with the triangular
# system solved by substitution. The state is kept in float64 and rounded for the products of each chunk.
#
# Linear attention is the same without decays: its features are those of queries and keys, and a result is divided by the
# query's product with the sums of the keys, which is then kept beside the state. Without `is_causal` all keys are added first.
#
# Decays of a whole token are factors of scores and of rows. Decays of columns are factors of queries and keys,
# exp(sum - m) and exp(m - sum), m about the middle of the sums of a chunk, which ends before they leave their range. A chunk
# also ends before a token with a nonfinite number: no earlier row can read it then. A token by whose delta rule the state may
# grow is worked on alone: of several, results would be differences of much larger numbers.
#
# Queries, and keys that the delta rule asks for, are packed by lanes of tokens, and so are scores. All else is rows of tokens:
# their results have columns of values as lanes, and read the packed tokens a panel at a time.

cdef enum:
    TOKEN_BLOCK = 16       # rows of scores that are worked on at once
    # No sum of decays of a column within a chunk is beyond it: its factors are within 2**+-47.
    DECAY_RANGE = 64
    # A decay beyond it makes every number of a state 0; a token with one begins a chunk, so that sums stay exact.
    DECAY_MOST = 1000

# Beyond 0 and 2, of beta times a key's product with itself: far more than rounding of keys of norm 1 gives at a rate of 2.
cdef double GROWTH_MARGIN = 0.01


# The state -----------------------------------------------------------------------------------------------


cdef void round_state(const Recurrent *n, RecurrentTiles *t) noexcept nogil:
    convert_numbers(t.rounded, n.itemsize, <char *>t.sums, sizeof(double), n.features * n.values_ld)
    convert_numbers(t.rounded_keys, n.itemsize, <char *>t.key_sums, sizeof(double), n.features)


cdef void load_sums(const Recurrent *n, const RecurrentTiles *t, double *sums, const char *at, Py_ssize_t size) noexcept nogil:
    """Columns of a state of one head, (features, value_dim); zeros for NULL."""
    cdef Py_ssize_t d
    memset(sums, 0, n.features * n.values_ld * sizeof(double))
    for d in range(n.features if at != NULL else 0):
        convert_numbers(<char *>(sums + d * n.values_ld), sizeof(double), at + (d * n.value_dim + t.column) * size, size,
                        t.n_columns)


cdef void store_sums(const Recurrent *n, const RecurrentTiles *t, const double *sums, char *at, Py_ssize_t size) noexcept nogil:
    cdef Py_ssize_t d
    for d in range(n.features):
        convert_numbers(at + (d * n.value_dim + t.column) * size, size, <const char *>(sums + d * n.values_ld), sizeof(double),
                        t.n_columns)


cdef void read_state(const Recurrent *n, RecurrentTiles *t, const char *at, Py_ssize_t size, const double *keys) noexcept nogil:
    """Of one head, and its sums of keys, (features); NULL: zeros."""
    t.is_empty = at == NULL
    load_sums(n, t, t.sums, at, size)
    memset(t.key_sums, 0, n.ld * sizeof(double))
    if keys != NULL:
        memcpy(t.key_sums, keys, n.features * sizeof(double))
    round_state(n, t)


cdef void write_state(const Recurrent *n, const RecurrentTiles *t, char *at, Py_ssize_t size, double *keys) noexcept nogil:
    store_sums(n, t, t.sums, at, size)
    if keys != NULL:
        memcpy(keys, t.key_sums, n.features * sizeof(double))


cdef inline void read_earlier(const Recurrent *n, RecurrentTiles *t, Py_ssize_t head) noexcept nogil:
    read_state(n, t, n.earlier + head * n.features * n.value_dim * n.state_size if n.earlier != NULL else NULL, n.state_size,
               n.earlier_keys + head * n.features if n.earlier_keys != NULL else NULL)


cdef inline void write_last(const Recurrent *n, const RecurrentTiles *t, Py_ssize_t head) noexcept nogil:
    if n.state != NULL:
        write_state(n, t, n.state + head * n.features * n.value_dim * n.state_size, n.state_size,
                    n.state_keys + head * n.features if n.state_keys != NULL else NULL)


# A chunk -------------------------------------------------------------------------------------------------


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
    t.may_be_nonfinite = load_item_rows(n.kernels, n.itemsize, t.keys, n.ld, &n.key, item_row(&n.key, item, head, first), most,
                                        n.features)
    t.may_be_nonfinite |= load_item_rows(n.kernels, n.itemsize, t.values, n.values_ld, &n.value,
                                         item_row(&n.value, item, head, first) + t.column * n.value.col, most, t.n_columns)
    if n.has_elu:
        n.kernels.elu_plus_one(t.keys, most * n.ld)
    if n.has_beta:
        load_item_rows(n.kernels, n.itemsize, t.beta, 1, &n.beta, item_row(&n.beta, item, head, first), most, 1)
    if n.has_columns:
        load_item_rows(n.kernels, n.itemsize, t.decays, n.ld, &n.decay, item_row(&n.decay, item, head, first), most, n.features)
    elif n.has_token_decay:
        load_item_rows(n.kernels, n.itemsize, t.decays, 1, &n.decay, item_row(&n.decay, item, head, first), most, 1)


cdef void cut_chunk(const Recurrent *n, RecurrentTiles *t) noexcept nogil:
    """Ends the chunk before a token that has to begin one."""
    cdef Py_ssize_t i, size = n.itemsize
    if t.may_be_nonfinite:
        t.n = find_nonfinite(n, t.keys, n.ld, t.n)
        t.n = find_nonfinite(n, t.values, n.values_ld, t.n)
    if n.has_beta:
        t.n = find_nonfinite(n, t.beta, 1, t.n)
        t.n = max(<Py_ssize_t>1, n.kernels.count_stable(t.keys, t.beta, n.ld, t.n, GROWTH_MARGIN))
    if n.has_columns:
        t.n = n.kernels.sum_decays(t.up, t.down, t.decays, n.ld, t.n, n.ld, DECAY_RANGE)
    elif n.has_token_decay:
        for i in range(1, t.n):
            if not fabs(get_real(t.decays + i * size, size)) <= DECAY_MOST:
                t.n = i
                break


cdef void decay_tokens(const Recurrent *n, RecurrentTiles *t) noexcept nogil:
    """The factors of the chunk's decays, and what scores are products with."""
    cdef Py_ssize_t size = n.itemsize, d
    cdef char *before = t.before
    cdef double whole
    if n.has_columns:
        n.kernels.decay_columns(t.up, t.down, t.before, t.after, t.decays, n.ld, t.n, n.ld)
        n.kernels.multiply(t.lowered, t.keys, t.down, t.n * n.ld)
    elif n.has_token_decay:
        n.kernels.sum_token_decays(t.high, t.low, t.starts, t.ends, t.decays, t.n)
        whole = get_real(t.starts + (t.n - 1) * size, size)
        for d in range(n.features):
            set_real(before + d * size, whole, size)


cdef inline void set_values(const Recurrent *n, fastattn_values *values, const char *at, Py_ssize_t row) noexcept nogil:
    values.at = at
    values.row = row
    values.col = n.itemsize if row > 0 else 0
    values.panel = n.kernels.panel_cols * values.col


cdef void pack_tokens(const Recurrent *n, RecurrentTiles *t, Py_ssize_t n_rows, Py_ssize_t stride, double factor) noexcept nogil:
    """The rows t.rows."""
    cdef Py_ssize_t lane
    t.n_lanes = padded_lanes(n, n_rows)
    for lane in range(n_rows, t.n_lanes):
        t.rows[lane] = t.rows[n_rows - 1]
    n.kernels.pack(t.packed, t.n_lanes, <const char *const *>t.rows, stride, n.features, factor)


cdef void ask_state(const Recurrent *n, RecurrentTiles *t, char *to, Py_ssize_t n_rows) noexcept nogil:
    """What the rounded state answers to the packed tokens."""
    cdef fastattn_values values
    cdef Py_ssize_t vectors = t.width // n.kernels.lanes, v
    if t.is_empty:
        memset(to, 0, n_rows * n.values_ld * n.itemsize)
        return
    set_values(n, &values, t.asked, t.n_lanes * n.itemsize)
    for v in range(vectors):
        t.stops[v] = n.features
    n.kernels.accumulate(to, t.rounded, NULL, n.values_ld, <int>vectors, &values, t.stops, KEY_CHUNK, n_rows,
                         <const char *const *>t.ahead, t.n_ahead, t.ahead_nbytes)


cdef inline void set_score_stops(const Recurrent *n, RecurrentTiles *t) noexcept nogil:
    """How many keys each vector of packed tokens has scores with."""
    cdef Py_ssize_t v
    for v in range(t.n_lanes // n.kernels.lanes):
        t.stops[v] = min(t.n, (v * n.kernels.lanes // TOKEN_BLOCK + 1) * TOKEN_BLOCK)


cdef inline void weigh_chunk(const Recurrent *n, RecurrentTiles *t) noexcept nogil:
    """The decays between tokens of the chunk, by those of whole tokens."""
    if n.has_token_decay:
        t.n_lanes = padded_lanes(n, t.n)
        set_score_stops(n, t)
        n.kernels.weigh_tokens(t.weights, t.n_lanes, t.stops, t.high, t.low)


cdef void score_tokens(const Recurrent *n, RecurrentTiles *t, Py_ssize_t seen, const char *factor, const char *next,
                       Py_ssize_t next_row, Py_ssize_t nbytes) noexcept nogil:
    """Gated scores of the packed tokens of the chunk with the keys of those before, and with their own where `seen`. Rows that
    are next worked on are prefetched."""
    set_score_stops(n, t)
    if n.has_columns:
        n.kernels.scale_rows(t.asked, t.packed, t.before, t.n_lanes, n.features, t.n_lanes)
    n.kernels.score(t.scores, NULL, t.packed, t.n_lanes, <int>(t.n_lanes // n.kernels.lanes), t.lowered, t.stops, n.features,
                    n.ld * n.itemsize, n.itemsize, next, next_row, nbytes)
    n.kernels.gate(t.scores, t.n_lanes, t.stops, seen, factor, t.weights)


cdef void add_scored(const Recurrent *n, RecurrentTiles *t, Py_ssize_t start, Py_ssize_t n_keys) noexcept nogil:
    """Adds to the results of a block their scores with n_keys tokens times what these add."""
    cdef Py_ssize_t vectors = t.width // n.kernels.lanes, v
    cdef fastattn_values values
    set_values(n, &values, t.scores + start * n.itemsize, t.n_lanes * n.itemsize)
    for v in range(vectors):
        t.stops[v] = n_keys
    n.kernels.accumulate(t.acc + start * n.values_ld * n.itemsize, t.added, t.ones, n.values_ld, <int>vectors, &values, t.stops,
                         KEY_CHUNK, min(<Py_ssize_t>TOKEN_BLOCK, t.n - start), NULL, 0, 0)


cdef bint apply_delta_rule(const Recurrent *n, RecurrentTiles *t) noexcept nogil:
    """t.added = beta times what is left of the values after the answers of the state, which earlier tokens change. The answers are
    added up from the oldest on, and values come last: most of the roundings are then those of small sums. Returns whether one is
    NaN or inf."""
    cdef Py_ssize_t size = n.itemsize, row = n.ld * size, i
    cdef char *keys = t.keys
    cdef char *rates = t.rates
    cdef char *beta = t.beta
    cdef char **rows = t.rows
    cdef const char *factors = rates
    if n.has_columns:
        n.kernels.multiply(t.raised, t.keys, t.up, t.n * n.ld)
        keys = t.raised
    for i in range(t.n):
        rows[i] = keys + i * row
        set_real(rates + i * size, -get_real(beta + i * size, size), size)
    if n.has_token_decay:
        n.kernels.multiply(t.factors, rates, t.starts, padded_lanes(n, t.n))
        factors = t.factors
    pack_tokens(n, t, t.n, size, 1)
    score_tokens(n, t, 0, rates, NULL, 0, 0)
    ask_state(n, t, t.added, t.n)
    return n.kernels.substitute(t.added, factors, t.values, t.beta, n.values_ld, t.scores, t.n_lanes, t.n, t.width)


cdef void normalize_rows(const Recurrent *n, RecurrentTiles *t, Py_ssize_t item, Py_ssize_t head, Py_ssize_t first,
                         Py_ssize_t n_rows, bint has_chunk) noexcept nogil:
    """Divides the rows of t.acc by the sums of their scores."""
    cdef Py_ssize_t size = n.itemsize, vectors = t.n_lanes // n.kernels.lanes, i
    cdef char *lost = n.lost + (item * n.num_kv_heads * n.group + head) * n.length + first
    cdef double total
    cdef fastattn_values values
    for i in range(vectors):
        t.stops[i] = 1
    n.kernels.score(t.totals, NULL, t.packed, t.n_lanes, <int>vectors, t.rounded_keys, t.stops, n.features, 0, size, NULL, 0, 0)
    if has_chunk:
        set_score_stops(n, t)
        set_values(n, &values, t.ones, 0)
        n.kernels.accumulate(t.totals, t.scores, t.ones, t.n_lanes, <int>vectors, &values, t.stops, KEY_CHUNK, 1, NULL, 0, 0)
    for i in range(n_rows):
        total = get_real(t.totals + i * size, size)
        if not n.least <= fabs(total) <= n.most:
            lost[i] = 1
        set_real(t.factors + i * size, 1 / total if total != 0 else 0, size)
    n.kernels.scale_rows(t.acc, t.acc, t.factors, n.values_ld, n_rows, t.width)
    if n.kernels.has_nonfinite(t.acc, n_rows * n.values_ld):
        for i in range(n_rows):
            if n.kernels.has_nonfinite(t.acc + i * n.values_ld * size, t.n_columns):
                lost[i] = 1


cdef void attend_tokens(const Recurrent *n, RecurrentTiles *t, Py_ssize_t item, Py_ssize_t kv, Py_ssize_t first,
                        Py_ssize_t stop, bint has_chunk) noexcept nogil:
    """The results of some tokens, all query heads of the group, from the rounded state and the chunk, which has as many."""
    cdef Py_ssize_t size = n.itemsize, head, row, n_rows, stride, i, start
    cdef char *at
    cdef char **rows = t.rows
    cdef bint is_raised = has_chunk and n.has_columns, is_copied = n.query.storage != 0 or is_raised
    for head in range(kv * n.group, (kv + 1) * n.group):
        row = first
        while row < stop:
            n_rows = min(<Py_ssize_t>RECURRENT_TOKENS, stop - row)
            at = t.raised if is_copied else item_row(&n.query, item, head, row)
            stride = n.ld * size if is_copied else n.query.row
            for i in range(n_rows):
                rows[i] = at + i * stride
            if is_copied:
                load_item_rows(n.kernels, size, t.raised, n.ld, &n.query, item_row(&n.query, item, head, row), n_rows, n.features)
            if is_raised:
                n.kernels.multiply(t.raised, t.raised, t.up, n_rows * n.ld)
            pack_tokens(n, t, n_rows, size if is_copied else n.query.col, n.scale)
            if n.has_elu:
                n.kernels.elu_plus_one(t.packed, n.features * t.n_lanes)
            if has_chunk:
                score_tokens(n, t, 1, NULL, item_row(&n.out, item, head, row) + t.column * n.out.col, n.out.row,
                             t.n_columns * n.out.col)
            elif n.has_columns:
                memcpy(t.asked, t.packed, n.features * t.n_lanes * size)
            ask_state(n, t, t.acc, n_rows)
            if has_chunk and n.has_token_decay:
                n.kernels.scale_rows(t.acc, t.acc, t.starts, n.values_ld, n_rows, t.width)
            start = 0
            while has_chunk and start < n_rows:
                add_scored(n, t, start, min(start + TOKEN_BLOCK, t.n))
                start += TOKEN_BLOCK
            if n.is_normalized:
                normalize_rows(n, t, item, head, row, n_rows, has_chunk)
            store_results(n, t, item_row(&n.out, item, head, row), n.out.row, n_rows)
            row += n_rows


cdef void add_tokens(const Recurrent *n, RecurrentTiles *t) noexcept nogil:
    """Adds to the state what the chunk does: t.added, which becomes that times `ends`."""
    cdef Py_ssize_t size = n.itemsize, vectors = t.width // n.kernels.lanes, v, d = 0, n_rows, at = 0, n_ahead
    cdef fastattn_values values
    if n.has_token_decay:
        n.kernels.scale_rows(t.added, t.added, t.ends, n.values_ld, t.n, t.width)
    for v in range(max(vectors, n.ld // n.kernels.lanes)):
        t.stops[v] = t.n
    while d < n.features:
        n_rows = min(<Py_ssize_t>STATE_ROWS, n.features - d)
        set_values(n, &values, t.lowered + d * size, n.ld * size)
        n_ahead = min(t.ahead_rows, t.n_ahead - at)
        n.kernels.accumulate(t.part, t.added, NULL, n.values_ld, <int>vectors, &values, t.stops, KEY_CHUNK, n_rows,
                             <const char *const *>t.ahead + at, n_ahead, t.ahead_nbytes)
        at += n_ahead
        n.kernels.advance_sums(t.sums + d * n.values_ld, t.rounded + d * n.values_ld * size, t.part,
                               t.before + d * size if n.has_columns or n.has_token_decay else NULL,
                               t.after + d * size if n.has_columns else NULL, n.values_ld, n_rows, t.width)
        d += STATE_ROWS
    t.is_empty = False
    if n.is_normalized:
        set_values(n, &values, t.ones, 0)
        n.kernels.accumulate(t.part, t.keys, NULL, n.ld, <int>(n.ld // n.kernels.lanes), &values, t.stops, KEY_CHUNK, 1, NULL,
                             0, 0)
        for d in range(n.features):
            t.key_sums[d] += get_real(t.part + d * size, size)
        convert_numbers(t.rounded_keys, size, <char *>t.key_sums, sizeof(double), n.features)
    elif n.phase == SUM_SEGMENTS:
        for d in range(n.features):
            if n.has_columns:
                t.key_sums[d] *= get_real(t.before + d * size, size) * get_real(t.after + d * size, size)
            elif n.has_token_decay:
                t.key_sums[d] *= get_real(t.before + d * size, size)
