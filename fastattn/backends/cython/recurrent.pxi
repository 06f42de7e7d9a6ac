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
    # A multiple of all lanes. 16 and 48 take 1.09 to 1.13 and 1.04 to 1.07 of the time for 16 heads of 64, 1.05 to 1.10 and 0.99 to
    # 1.00 for 16 of 128: AVX-512, two threads of Zen 5, 2026-11-29, interleaved.
    RECURRENT_TOKENS = 32
    SUMMED_TOKENS = 96    # of a chunk that no query reads
    TOKEN_BLOCK = 16       # rows of scores that are worked on at once: the most of `substitute`
    STATE_ROWS = 32        # of a state, advanced at once: what is added to them stays in L1. Others were not measured.
    # Bytes of a row that are prefetched together: what products with so many rows of results are sure to.
    AHEAD_NBYTES = STATE_ROWS * PREFETCH_PER_COLUMN
    # No sum of decays of a column within a chunk is beyond it: its factors are within 2**+-47.
    DECAY_RANGE = 64
    # A decay beyond it makes every number of a state 0; a token with one begins a chunk, so that sums stay exact.
    DECAY_MOST = 1000
    # Heads beside each other in memory take turns, a chunk of each: rows of several are then read from a page of memory before
    # the next. 4 of 64 take 0.90 of the time of one after another in 16,384 tokens, 1.00 in 1,024, 8 of 32 take 0.92, 4 of 128
    # take 1.00: two threads of Zen 5, "bshd", 2026-11-29, interleaved.
    MOST_HEADS = 8
    HEADS_NBYTES = 1 << 18 # of their states
    FEW_TOKENS = 4         # are added one after another; other numbers were not measured
    RECURRENT_SMALL = 1 << 19  # multiply-adds from which on two threads may be faster than one; an estimate
    # Where there are fewer heads than SEGMENT_HEADS, each is divided into segments, at most MOST_SEGMENTS, of at least
    # SEGMENT_TOKENS, but by the delta rule, which would have to carry a matrix of (features, features). A segment costs a
    # pass over its sums; with `is_causal` its tokens are also added twice. Sizes alone decide, so no bit depends on the
    # number of threads.
    SEGMENT_HEADS = 4
    MOST_SEGMENTS = 64
    SEGMENT_TOKENS = 1024

# Beyond 0 and 2, of beta times a key's product with itself: far more than rounding of keys of norm 1 gives at a rate of 2.
cdef double GROWTH_MARGIN = 0.01

ctypedef enum RecurrentPhase:
    WHOLE_HEADS      # a task is a head, or some columns of its values: all of its tokens
    SUM_SEGMENTS     # a task is a segment of the keys of a head
    FOLD_SEGMENTS    # a task is a head: the sums of its segments become those that queries read
    ATTEND_SEGMENTS  # a task is a segment of the queries of a head


cdef struct ItemRows:
    # Rows (item, head, token, column) of an array.
    char *at
    const int64_t *items  # bytes from `at` to each item
    Py_ssize_t head, row, col
    int storage


cdef struct Recurrent:
    const fastattn_kernels *kernels
    Py_ssize_t itemsize
    ItemRows query, key, value, out, decay, beta
    bint has_beta
    bint has_token_decay, has_columns  # which of the two a decay is
    bint has_elu                # queries and keys are replaced by their features elu(x) + 1
    bint is_normalized          # by the sums of the keys
    bint is_causal              # a query reads the tokens up to its own, not all
    const int64_t *item_of_keys # for each item of the queries, that of its keys; NULL: the same
    const int64_t *stops        # of each item of the keys: so many of its tokens are read; NULL: all
    Py_ssize_t n_items, n_key_items, num_kv_heads, group, length, len_k, features, value_dim
    Py_ssize_t tokens           # of a chunk, at most
    Py_ssize_t ld, values_ld    # features and `columns`, padded to lines of the cache; an odd number, as rows an even number
                                # of lines apart share few sets of L1
    Py_ssize_t columns          # of values, of one task
    Py_ssize_t n_parts          # tasks of one head, by columns of values
    Py_ssize_t heads_at_once    # of one task
    double scale
    const char *earlier         # (item of the keys, head, features, value_dim), or NULL
    char *state                 # likewise: after the last token
    Py_ssize_t state_size       # of one of their numbers
    const double *earlier_keys  # (item of the keys, head, features), or NULL: sums of keys
    double *state_keys
    char *lost                  # (item, head, token) of queries: 1 where the denominator is outside of these two, or a result
                                # is nonfinite
    double least, most
    double *sums                # of each segment of each head: (features, value_dim), and `features` sums of keys, or products
                                # of its decays
    Py_ssize_t n_sums
    Py_ssize_t segment          # tokens
    Py_ssize_t key_segments, query_segments
    RecurrentPhase phase


cdef struct RecurrentTiles:
    # A thread's own memory. Rows of keys and queries are `ld` apart, of values `values_ld`.
    double *sums         # (features, values_ld): the state
    char *rounded        # the same in the type of the computation
    char *part           # what the chunk adds to STATE_ROWS rows of it
    double *key_sums     # with is_normalized; else, in a segment, the products of its decays
    double *keys_before  # the same, before the slices of columns that each add the keys
    char *rounded_keys
    char *keys
    char *raised         # rows of queries, or of keys, that are not packed from where they are
    char *lowered        # keys times `down`; `keys` without decays of columns
    char *values
    char *added          # what the tokens add: values, or by the delta rule what is left of them
    char *faded          # the same times `ends`
    char *packed         # (features, lanes) of queries, or of keys that are asked for, times `up` of decays of columns
    char *asked          # the same times `before`; `packed` without decays of columns
    char *scores         # (tokens, lanes)
    char *weights        # of scores: what decays of whole tokens leave
    char *totals         # of lanes: sums of scores
    char *acc            # answers, and then results
    char *decays         # of columns, a row a token
    char *up
    char *down
    char *before         # of each feature
    char *after
    char *high           # of whole tokens: sums of decays after the first
    char *low
    char *rest_high      # likewise: sums of those after a token
    char *rest_low
    char *starts         # exp(sum with the first)
    char *ends           # exp(sum of those after a token)
    char *beta
    char *rates          # -beta
    char *factors        # of rows of results
    char *ones           # by tokens, and by columns of values
    char **rows
    char **ahead         # rows that are read soon: ahead_nbytes of each, then the next of each
    Py_ssize_t *stops
    # The chunk.
    Py_ssize_t first, n
    Py_ssize_t n_lanes   # of the packed tokens, padded to vectors
    bint may_be_nonfinite  # a key or value but those of the first
    bint is_empty        # the state is 0
    Py_ssize_t n_ahead, ahead_rows, ahead_nbytes
    # The task.
    Py_ssize_t column, n_columns, width  # columns of values; their number padded to vectors


cdef inline Py_ssize_t odd_lines(Py_ssize_t n, Py_ssize_t itemsize) noexcept nogil:
    """n elements padded to an odd number of cache lines."""
    return ((n * itemsize + 63) // 64 | 1) * (64 // itemsize)


cdef inline Py_ssize_t padded_lanes(const Recurrent *n, Py_ssize_t n_tokens) noexcept nogil:
    return (n_tokens + n.kernels.lanes - 1) // n.kernels.lanes * n.kernels.lanes


cdef inline Py_ssize_t most_ahead(const Recurrent *n) noexcept nogil:
    """Entries of a row in `ahead`."""
    return (max(n.features, n.columns) * <Py_ssize_t>sizeof(double) + 63) // AHEAD_NBYTES + 1


cdef Py_ssize_t set_state_tiles(const Recurrent *n, char *base, RecurrentTiles *t) noexcept nogil:
    """Sets the addresses of what each head has for itself from `base` on; the number of bytes."""
    cdef char *at = base
    t.sums = <double *>take(&at, n.features * n.values_ld * sizeof(double))
    t.rounded = take(&at, n.features * n.values_ld * n.itemsize)
    t.key_sums = <double *>take(&at, n.ld * sizeof(double))
    t.rounded_keys = take(&at, n.ld * n.itemsize)
    return at - base


cdef Py_ssize_t set_recurrent_tiles(const Recurrent *n, char *base, RecurrentTiles *t) noexcept nogil:
    """Sets the addresses from `base` on; the number of bytes."""
    cdef Py_ssize_t size = n.itemsize, tokens = RECURRENT_TOKENS
    cdef Py_ssize_t of_keys = n.tokens * n.ld * size, of_values = n.tokens * n.values_ld * size
    cdef char *at = base
    t.keys = take(&at, of_keys)
    t.values = take(&at, of_values)
    t.added = take(&at, of_values) if n.has_beta else t.values
    t.part = take(&at, max(n.ld, STATE_ROWS * n.values_ld) * size)
    t.keys_before = <double *>take(&at, n.ld * sizeof(double))
    t.lowered = take(&at, of_keys) if n.has_columns else t.keys
    t.faded = take(&at, of_values) if n.has_token_decay else t.added
    of_keys = tokens * n.ld * size
    t.raised = take(&at, of_keys)
    t.packed = take(&at, n.features * tokens * size)
    t.asked = take(&at, n.features * tokens * size) if n.has_columns else t.packed
    t.scores = take(&at, tokens * tokens * size)
    t.weights = take(&at, tokens * tokens * size) if n.has_token_decay else NULL
    t.totals = take(&at, tokens * size)
    t.acc = take(&at, tokens * n.values_ld * size)
    t.decays = take(&at, of_keys if n.has_columns else tokens * size)
    t.up = take(&at, of_keys) if n.has_columns else NULL
    t.down = take(&at, of_keys) if n.has_columns else NULL
    t.before = take(&at, n.ld * size)
    t.after = take(&at, n.ld * size)
    t.high = take(&at, tokens * size)
    t.low = take(&at, tokens * size)
    t.rest_high = take(&at, tokens * size)
    t.rest_low = take(&at, tokens * size)
    t.starts = take(&at, tokens * size)
    t.ends = take(&at, tokens * size)
    t.beta = take(&at, tokens * size)
    t.rates = take(&at, tokens * size)
    t.factors = take(&at, tokens * size)
    t.ones = take(&at, max(tokens, n.values_ld) * size)
    t.rows = <char **>take(&at, tokens * sizeof(char *))
    t.ahead = <char **>take(&at, n.tokens * most_ahead(n) * sizeof(char *))
    t.stops = <Py_ssize_t *>take(&at, max(tokens, max(n.ld, n.columns)) * sizeof(Py_ssize_t))
    t.n_ahead = t.ahead_rows = t.ahead_nbytes = 0
    return at + set_state_tiles(n, at, t) - base


cdef inline char *item_row(const ItemRows *rows, Py_ssize_t item, Py_ssize_t head, Py_ssize_t token) noexcept nogil:
    return rows.at + rows.items[item] + head * rows.head + token * rows.row


cdef inline Py_ssize_t stop_of(const Recurrent *n, Py_ssize_t item, Py_ssize_t stop) noexcept nogil:
    """`stop` or where the tokens of an item end that are read."""
    return stop if n.stops == NULL else min(stop, <Py_ssize_t>n.stops[item])


cdef inline Py_ssize_t item_of_keys(const Recurrent *n, Py_ssize_t item) noexcept nogil:
    return item if n.item_of_keys == NULL else n.item_of_keys[item]


cdef bint load_item_rows(const fastattn_kernels *kernels, Py_ssize_t itemsize, char *to, Py_ssize_t ld,
                         const ItemRows *rows, const char *at, Py_ssize_t n_rows, Py_ssize_t n_cols) noexcept nogil:
    """to[i * ld + c] = element c of row i in the type of the computation; 0 for the other c < ld. False where none but those of
    row 0 is NaN or inf."""
    cdef Py_ssize_t i
    cdef bint swapped = (rows.storage & SWAPPED) != 0
    if ld == 1 and not rows.storage:
        # load_row reads by vectors what it gathered by elements, and waits for all stores before: 1 to 3 % of a call of 16
        # heads of 64, "bshd" (Zen 5, 2026-11-29).
        for i in range(n_rows):
            set_real(to + i * itemsize, get_real(at + i * rows.row, itemsize), itemsize)
        return True
    if ld == 1:
        kernels.load_row(to, at, rows.row, n_rows, rows.storage & STORAGE, swapped, NULL, 0)
        return True
    if not rows.storage and rows.col == itemsize:
        return kernels.copy_rows(to, ld, at, rows.row, n_rows, n_cols)
    for i in range(n_rows):
        kernels.load_row(to + i * ld * itemsize, at + i * rows.row, rows.col, n_cols, rows.storage & STORAGE, swapped, NULL, 0)
        memset(to + (i * ld + n_cols) * itemsize, 0, (ld - n_cols) * itemsize)
    return True


cdef void store_results(const Recurrent *n, const RecurrentTiles *t, char *to, Py_ssize_t row, Py_ssize_t n_rows) noexcept nogil:
    """Rows of t.acc, of the columns of the task; `to`: the first row of n.out, `row` bytes before the next."""
    cdef Py_ssize_t from_row = n.values_ld * n.itemsize, i, e
    to += t.column * n.out.col
    if not n.out.storage and n.out.col == n.itemsize:
        n.kernels.store_rows(to, row, t.acc, n.values_ld, n_rows, t.n_columns)
        return
    for i in range(n_rows):
        if n.out.storage:
            n.kernels.store_row(to + i * row, n.out.col, t.acc + i * from_row, t.n_columns, n.out.storage & STORAGE)
        else:
            for e in range(t.n_columns):
                memcpy(to + i * row + e * n.out.col, t.acc + i * from_row + e * n.itemsize, n.itemsize)


cdef void convert_numbers(char *to, Py_ssize_t to_size, const char *at, Py_ssize_t size, Py_ssize_t n) noexcept nogil:
    """Floats or doubles by their sizes."""
    cdef Py_ssize_t i
    if to_size == size:
        memcpy(to, at, n * size)
    elif size == 4:
        for i in range(n):
            (<double *>to)[i] = (<const float *>at)[i]
    else:
        for i in range(n):
            (<float *>to)[i] = <float>(<const double *>at)[i]


cdef void look_ahead(const Recurrent *n, RecurrentTiles *t, const ItemRows *rows, Py_ssize_t item, Py_ssize_t head,
                     Py_ssize_t first, Py_ssize_t stop, Py_ssize_t column, Py_ssize_t n_cols) noexcept nogil:
    """Lists columns of rows, n.tokens at most, for the next products to prefetch: whole lines of the cache, as rows seldom begin
    with one, and all pieces as long; the last of a row may overlap that before."""
    cdef Py_ssize_t i, piece, pieces, nbytes = fastattn_stored_size(rows.storage & STORAGE, n.itemsize)
    cdef char *row = item_row(rows, item, head, first) + column * rows.col
    cdef char *at
    cdef Py_ssize_t before = <Py_ssize_t>(<size_t>row & 63)
    t.ahead_rows = max(<Py_ssize_t>0, min(n.tokens, stop - first))
    t.n_ahead = 0
    if rows.col != nbytes:
        return
    nbytes = (before + n_cols * nbytes + 63) // 64 * 64
    pieces = (nbytes + AHEAD_NBYTES - 1) // AHEAD_NBYTES
    t.ahead_nbytes = (nbytes // 64 + pieces - 1) // pieces * 64
    for piece in range(pieces):
        at = row - before + min(piece * t.ahead_nbytes, nbytes - t.ahead_nbytes)
        for i in range(t.ahead_rows):
            t.ahead[t.n_ahead + i] = at + i * rows.row
        t.n_ahead += t.ahead_rows


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
    t.may_be_nonfinite = load_item_rows(n.kernels, n.itemsize, t.keys, n.ld, &n.key, item_row(&n.key, item, head, first), most, n.features)
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


cdef void sum_token_decays(const Recurrent *n, RecurrentTiles *t) noexcept nogil:
    """Sums of the decays of whole tokens, and their factors."""
    cdef Py_ssize_t i, size = n.itemsize, padded = (t.n + n.kernels.lanes - 1) // n.kernels.lanes * n.kernels.lanes
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
    for i in range(t.n):
        added = get_real(t.high + i * size, size)
        other = get_real(t.low + i * size, size)
        set_real(t.rest_high + i * size, total - added, size)
        set_real(t.rest_low + i * size, (total - added) - get_real(t.rest_high + i * size, size) + (rest - other), size)
        set_real(t.starts + i * size, first + added, size)
        more = (first - (get_real(t.starts + i * size, size) - added)) + other
        set_real(t.ends + i * size, more if isfinite(more) else 0, size)
    n.kernels.exponentials(t.starts, t.starts, t.ends, padded)
    n.kernels.exponentials(t.ends, t.rest_high, t.rest_low, padded)
    first = get_real(t.starts + (t.n - 1) * size, size)
    for i in range(n.features):
        set_real(t.before + i * size, first, size)


cdef void decay_tokens(const Recurrent *n, RecurrentTiles *t) noexcept nogil:
    """The factors of the chunk's decays, and what scores are products with."""
    if n.has_columns:
        n.kernels.decay_columns(t.up, t.down, t.before, t.after, t.decays, n.ld, t.n, n.ld)
        n.kernels.multiply(t.lowered, t.keys, t.down, t.n * n.ld)
    elif n.has_token_decay:
        sum_token_decays(n, t)


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


cdef inline void weigh_scores(const Recurrent *n, RecurrentTiles *t) noexcept nogil:
    """What decays of whole tokens leave between those of the chunk."""
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


cdef void add_scored(const Recurrent *n, RecurrentTiles *t, char *to, Py_ssize_t start, Py_ssize_t n_keys) noexcept nogil:
    """Adds to the rows of a block their scores with n_keys tokens times what these add."""
    cdef Py_ssize_t vectors = t.width // n.kernels.lanes, v
    cdef fastattn_values values
    set_values(n, &values, t.scores + start * n.itemsize, t.n_lanes * n.itemsize)
    for v in range(vectors):
        t.stops[v] = n_keys
    n.kernels.accumulate(to + start * n.values_ld * n.itemsize, t.added, t.ones, n.values_ld, <int>vectors, &values, t.stops,
                         KEY_CHUNK, min(<Py_ssize_t>TOKEN_BLOCK, t.n - start), NULL, 0, 0)


cdef bint apply_delta_rule(const Recurrent *n, RecurrentTiles *t) noexcept nogil:
    """t.added = beta times what is left of the values after the answers of the state, which earlier tokens change. The answers are
    added up from the oldest on, and values come last: most of the roundings are then those of small sums. Returns whether one is
    NaN or inf."""
    cdef Py_ssize_t size = n.itemsize, i, start = 0
    cdef bint is_nonfinite = False
    cdef double rate
    cdef const char *keys = t.keys
    if n.has_columns:
        n.kernels.multiply(t.raised, t.keys, t.up, t.n * n.ld)
        keys = t.raised
    for i in range(t.n):
        t.rows[i] = <char *>keys + i * n.ld * size
        rate = -get_real(t.beta + i * size, size)
        set_real(t.rates + i * size, rate, size)
        set_real(t.factors + i * size, rate * get_real(t.starts + i * size, size) if n.has_token_decay else rate, size)
    pack_tokens(n, t, t.n, size, 1)
    score_tokens(n, t, 0, t.rates, NULL, 0, 0)
    ask_state(n, t, t.added, t.n)
    n.kernels.scale_rows(t.added, t.added, t.factors, n.values_ld, t.n, t.width)
    while start < t.n:
        if start > 0:
            add_scored(n, t, t.added, start, start)
        is_nonfinite |= n.kernels.substitute(t.added + start * n.values_ld * size, t.values + start * n.values_ld * size,
                                             t.beta + start * size, n.values_ld,
                                             t.scores + (start * t.n_lanes + start) * size, t.n_lanes,
                                             min(<Py_ssize_t>TOKEN_BLOCK, t.n - start), t.width)
        start += TOKEN_BLOCK
    return is_nonfinite


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
    cdef Py_ssize_t size = n.itemsize, head, row, n_rows, i, start
    cdef bint is_raised = has_chunk and n.has_columns, is_copied = n.query.storage != 0 or is_raised
    for head in range(kv * n.group, (kv + 1) * n.group):
        row = first
        while row < stop:
            n_rows = min(<Py_ssize_t>RECURRENT_TOKENS, stop - row)
            for i in range(n_rows):
                t.rows[i] = t.raised + i * n.ld * size if is_copied else item_row(&n.query, item, head, row + i)
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
                add_scored(n, t, t.acc, start, min(start + TOKEN_BLOCK, t.n))
                start += TOKEN_BLOCK
            if n.is_normalized:
                normalize_rows(n, t, item, head, row, n_rows, has_chunk)
            store_results(n, t, item_row(&n.out, item, head, row), n.out.row, n_rows)
            row += n_rows


cdef void add_tokens(const Recurrent *n, RecurrentTiles *t) noexcept nogil:
    """Adds what the chunk adds to the state."""
    cdef Py_ssize_t size = n.itemsize, vectors = t.width // n.kernels.lanes, v, d = 0, n_rows, at = 0, n_ahead
    cdef fastattn_values values
    if n.has_token_decay:
        n.kernels.scale_rows(t.faded, t.added, t.ends, n.values_ld, t.n, t.width)
    for v in range(max(vectors, n.ld // n.kernels.lanes)):
        t.stops[v] = t.n
    while d < n.features:
        n_rows = min(<Py_ssize_t>STATE_ROWS, n.features - d)
        set_values(n, &values, t.lowered + d * size, n.ld * size)
        n_ahead = min(t.ahead_rows, t.n_ahead - at)
        n.kernels.accumulate(t.part, t.faded, NULL, n.values_ld, <int>vectors, &values, t.stops, KEY_CHUNK, n_rows,
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


# Tasks ---------------------------------------------------------------------------------------------------


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
    """The results of a chunk of the tokens t.first to `last`, whose keys are then in the state. t.first becomes that of the next
    chunk. `next` are the tiles of the head whose chunk comes next."""
    cdef Py_ssize_t key_item = item_of_keys(n, item), first = t.first, overflows
    load_tokens(n, t, key_item, kv, first, min(n.tokens, last - first))
    if t.width > n.kernels.lanes and t.may_be_nonfinite and find_nonfinite(n, t.values, n.values_ld, t.n) < t.n:
        attend_slices(n, t, item, kv, first, stop)
        t.first = stop
        return
    cut_chunk(n, t)
    while True:
        decay_tokens(n, t)
        weigh_scores(n, t)
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
        t.width = (t.n_columns + n.kernels.lanes - 1) // n.kernels.lanes * n.kernels.lanes
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
        for h in range(n_heads):
            advance_tokens(n, t, item, kv + h)
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


cdef bint run_phase(Recurrent *n, RecurrentPhase phase, Py_ssize_t n_tasks, int num_threads) noexcept nogil:
    n.phase = phase
    return run_on_threads(run_recurrent_tasks, n, n_tasks, <int>min(<Py_ssize_t>num_threads, n_tasks), False)


cdef Py_ssize_t choose_heads_at_once(const Recurrent *n, int num_threads) noexcept nogil:
    """No bit depends on it."""
    cdef Py_ssize_t heads = MOST_HEADS, nbytes = n.features * n.values_ld * (<Py_ssize_t>sizeof(double) + n.itemsize)
    if not n.is_causal or fabs(<double>n.key.head) >= fabs(<double>n.key.row):
        return 1
    while heads > 1 and (heads * nbytes > HEADS_NBYTES or n.n_key_items * n.num_kv_heads < 2 * num_threads * heads):
        heads //= 2
    return heads


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
        n.values_ld = odd_lines(n.columns, n.itemsize)
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


cdef int64_t *set_item_rows(ItemRows *rows, cnp.ndarray array, int storage, tuple lead, int64_t *items) except NULL:
    """Sets also the bytes to each item, all of `lead` in C order, from `items` on; returns where they end."""
    cdef Py_ssize_t n_items = 1, axis, n, stride, i
    rows.at = <char *>cnp.PyArray_DATA(array)
    rows.items = items
    rows.head = array.strides[array.ndim - 3]
    rows.row = array.strides[array.ndim - 2]
    rows.col = array.strides[array.ndim - 1]
    rows.storage = storage
    items[0] = 0
    for axis in range(len(lead)):
        n = lead[axis]
        stride = array.strides[axis] if array.shape[axis] > 1 else 0
        for i in range(n_items * n - 1, -1, -1):
            items[i] = items[i // n] + i % n * stride
        n_items *= n
    return items + n_items


cdef int64_t *set_recurrent(Recurrent *n, tuple arrays, tuple storages, tuple leads, item_of_keys, stops, tuple earlier,
                            double scale, int itemsize) except NULL:
    """The record of a call but for its tasks; see `recurrent_attention`. Returns the addresses of items, which the caller frees
    after the call."""
    cdef cnp.ndarray query = arrays[0], key = arrays[1], value = arrays[2]
    cdef ItemRows *rows[6]
    cdef int64_t *items
    cdef int64_t *memory
    cdef int i
    memset(n, 0, sizeof(Recurrent))
    n.kernels = chosen[itemsize == 8]
    n.itemsize = itemsize
    n.scale = scale
    n.is_causal = True
    n.num_kv_heads = key.shape[key.ndim - 3]
    n.group = query.shape[query.ndim - 3] // n.num_kv_heads
    n.length = query.shape[query.ndim - 2]
    n.len_k = key.shape[key.ndim - 2]
    n.tokens = RECURRENT_TOKENS
    n.features = query.shape[query.ndim - 1]
    n.value_dim = value.shape[value.ndim - 1]
    n.ld = odd_lines(n.features, itemsize)
    n.columns = n.value_dim
    n.values_ld = odd_lines(n.columns, itemsize)
    n.n_parts = n.heads_at_once = 1
    n.n_items = n.n_key_items = 1
    for size in leads[0]:
        n.n_items *= <Py_ssize_t>size
    for size in leads[1]:
        n.n_key_items *= <Py_ssize_t>size
    n.has_beta = arrays[5] is not None
    if arrays[4] is not None:
        n.has_columns = (<cnp.ndarray>arrays[4]).shape[(<cnp.ndarray>arrays[4]).ndim - 1] > 1
        n.has_token_decay = not n.has_columns
    if item_of_keys is not None:
        n.item_of_keys = <const int64_t *>cnp.PyArray_DATA(item_of_keys)
    if stops is not None:
        n.stops = <const int64_t *>cnp.PyArray_DATA(stops)
    if earlier is not None:
        n.earlier = <const char *>cnp.PyArray_DATA(earlier[0])
        n.earlier_keys = <const double *>cnp.PyArray_DATA(earlier[1]) if earlier[1] is not None else NULL
        n.state_size = cnp.PyArray_ITEMSIZE(earlier[0])
    rows[0], rows[1], rows[2], rows[3], rows[4], rows[5] = &n.query, &n.key, &n.value, &n.out, &n.decay, &n.beta
    memory = items = <int64_t *>malloc((2 * n.n_items + 4 * n.n_key_items + 1) * sizeof(int64_t))
    if items == NULL:
        raise MemoryError("no memory for the addresses of items")
    for i in range(6):
        if arrays[i] is not None:
            items = set_item_rows(rows[i], arrays[i], storages[i], leads[0] if i == 0 or i == 3 else leads[1], items)
    return memory


cdef bint is_large(const Recurrent *n) noexcept:
    """Whether two threads may be faster than one."""
    return (n.num_kv_heads * (n.n_items * n.group * n.length + n.n_key_items * n.len_k * (1 + n.has_beta)) * n.features
            * n.value_dim >= RECURRENT_SMALL)


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
    if is_large(&n):
        num_threads = thread_limit()
    with nogil:
        done = run_recurrent(&n, num_threads)
    free(items)
    if not done:
        raise MemoryError("no memory for the tiles of a thread, or for the sums of segments")
