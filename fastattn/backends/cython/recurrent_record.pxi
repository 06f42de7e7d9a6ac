# Recurrent attention: the record of a call, the memory of a thread, and rows of tokens.

cdef enum:
    # A multiple of all lanes. 16 and 48 take 1.03 to 1.10 and 1.02 to 1.11 of the time, heads of 64 and 128: AVX-512, two threads
    # of Zen 5, 2026-11-29, interleaved.
    RECURRENT_TOKENS = 32
    STATE_ROWS = 32        # of a state, advanced at once: what is added to them stays in L1. Others were not measured.
    # Bytes of a row that are prefetched together: what products with so many rows of results are sure to.
    AHEAD_NBYTES = STATE_ROWS * PREFETCH_PER_COLUMN

ctypedef enum RecurrentPhase:
    WHOLE_HEADS      # a task is heads_at_once heads, or some columns of the values of one: all of their tokens
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
    Py_ssize_t ld, values_ld    # features and `columns`, padded to lines of the cache
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
    # A thread's own memory. Rows of keys and queries are `ld` apart, of values `values_ld`. Heads that take turns have each the
    # tiles of `set_state_tiles` and its numbers, and share all other tiles.
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
    char *packed         # (features, lanes) of queries, or of keys that are asked for, times `up` of decays of columns
    char *asked          # the same times `before`; `packed` without decays of columns
    char *scores         # (tokens, lanes)
    char *weights        # (tokens, lanes): the decays between tokens, by those of whole tokens
    char *totals         # of lanes: sums of scores
    char *acc            # answers, and then results
    char *decays         # of columns, a row a token
    char *up
    char *down
    char *before         # of each feature
    char *after
    char *high           # of whole tokens: sums of decays after the first
    char *low
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
    Py_ssize_t first, n  # its tokens; `attend_chunk` leaves where the next one begins in `first`
    Py_ssize_t n_lanes   # of the packed tokens, padded to vectors
    bint may_be_nonfinite  # a key or value but those of the first
    bint is_empty        # the state is 0
    Py_ssize_t n_ahead, ahead_rows, ahead_nbytes
    # The task.
    Py_ssize_t column, n_columns, width  # columns of values; their number padded to vectors


cdef inline Py_ssize_t padded_to_lines(Py_ssize_t n, Py_ssize_t itemsize) noexcept nogil:
    """n elements padded to lines of the cache, but not to a multiple of 16: rows so many apart share few sets of L1."""
    cdef Py_ssize_t lines = (n * itemsize + 63) // 64
    return (lines + (lines % 16 == 0)) * (64 // itemsize)


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
    cdef char **to = t.ahead
    cdef Py_ssize_t before = <Py_ssize_t>(<size_t>row & 63), stride = rows.row
    cdef Py_ssize_t n_rows = max(<Py_ssize_t>0, min(n.tokens, stop - first))
    t.ahead_rows = n_rows
    t.n_ahead = 0
    if rows.col != nbytes:
        return
    nbytes = (before + n_cols * nbytes + 63) // 64 * 64
    pieces = (nbytes + AHEAD_NBYTES - 1) // AHEAD_NBYTES
    t.ahead_nbytes = (nbytes // 64 + pieces - 1) // pieces * 64
    for piece in range(pieces):
        at = row - before + min(piece * t.ahead_nbytes, nbytes - t.ahead_nbytes)
        for i in range(n_rows):
            to[i] = at + i * stride
        to += n_rows
    t.n_ahead = pieces * n_rows


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
    n.ld = padded_to_lines(n.features, itemsize)
    n.columns = n.value_dim
    n.values_ld = padded_to_lines(n.columns, itemsize)
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
