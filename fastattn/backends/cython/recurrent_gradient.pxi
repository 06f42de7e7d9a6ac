# Gradients of gated linear attention. A task is a key/value head. It goes over the chunks from the last to the first, with the
# gradient with respect to the state after each. Of n chunks about sqrt(n) states are saved on the way forward; those between
# two of them are computed again, a segment at a time. Chunks are those of the forward pass, but for results that overflow.
#
# A token adds what is `added` with its key: its value, or by the delta rule its rate times what is `left` of the value after the
# answer of the state. The gradient with respect to `added` follows from the readers of the state after the token, later keys
# among them: by the delta rule it solves the transposed system, from the last token to the first.
#
# A reader is a query, or by the delta rule a key. It is `given` the gradient with respect to its answer. Its own gradient, and
# what it adds to those of keys, decays and the state, are the same sums for both. The tokens of readers are lanes.

cdef struct RecurrentGradient:
    Recurrent forward    # whose `out` is the gradient with respect to it
    const char *grad_state  # (item, head, features, value_dim), or NULL
    # Gradients, contiguous (item, head, token, column), or NULL where they are not asked for; of the state as grad_state.
    char *query
    char *key
    char *value
    char *decay
    char *beta
    char *state
    bint lacks_memory    # a thread had none for its states


cdef struct GradientTiles:
    RecurrentTiles tiles
    double *change       # (features, columns): the gradient with respect to the state
    # Of the decay of each token: terms within the chunk, from its start to each reader, from each key to its end.
    double *crossed
    double *starts
    double *ends
    char *state          # rounded, times `before`
    char *after          # rounded gradient of the state, times `after`
    char *left           # values minus the answers of the state
    char *weights        # decays between tokens, 0 for those that a lane does not see
    char *weights_before # the same, 0 for a lane's own token
    char *key_scores     # of keys with those before them
    char *system         # -rate * key_scores, of each lane's rate
    char *products       # of what readers are given and what tokens add
    char *raised         # keys times `up`; `keys` without decays of columns
    char *rows           # of a reader
    char *given
    char *faded          # given, times `starts`
    char *packed         # given, by lanes
    char *grad_added
    char *grad_key       # of keys as they are added, before the factor `down`
    char *grad_rows      # of a reader
    char *from_state     # the same, of the state alone
    char *part           # of the gradient of the state
    char *grad_decay     # of columns; the next three as above
    char *start_columns
    char *end_columns
    char *whole
    char *scales
    Py_ssize_t *chunks   # the first token of each, and the end
    double *states       # those saved, then those of a segment
    Py_ssize_t n_states


cdef Py_ssize_t set_gradient_tiles(const Recurrent *n, char *base, GradientTiles *g) noexcept nogil:
    """Sets the addresses from `base` on; the number of bytes."""
    cdef Py_ssize_t size = n.itemsize, tokens = RECURRENT_TOKENS, largest = max(tokens, max(n.values_ld, n.ld))
    cdef Py_ssize_t of_keys = tokens * n.ld * size, of_values = tokens * n.values_ld * size
    cdef Py_ssize_t of_state = n.ld * n.values_ld, of_columns = of_keys if n.has_columns else 0
    cdef char *at = base
    cdef Py_ssize_t nbytes = set_recurrent_tiles(n, base, &g.tiles)
    take(&at, nbytes)
    g.change = <double *>take(&at, of_state * sizeof(double))
    g.crossed = <double *>take(&at, tokens * sizeof(double))
    g.starts = <double *>take(&at, tokens * sizeof(double))
    g.ends = <double *>take(&at, tokens * sizeof(double))
    g.state = take(&at, of_state * size)
    g.after = take(&at, of_state * size)
    g.left = take(&at, of_values)
    g.weights = take(&at, tokens * tokens * size)
    g.weights_before = take(&at, tokens * tokens * size)
    g.key_scores = take(&at, tokens * tokens * size)
    g.system = take(&at, tokens * tokens * size)
    g.products = take(&at, tokens * tokens * size)
    g.raised = take(&at, of_keys) if n.has_columns else g.tiles.keys
    g.rows = take(&at, of_keys)
    g.given = take(&at, of_values)
    g.faded = take(&at, of_values if n.has_token_decay else 0)
    g.packed = take(&at, of_values)
    g.grad_added = take(&at, of_values)
    g.grad_key = take(&at, of_keys)
    g.grad_rows = take(&at, of_keys)
    g.from_state = take(&at, of_keys)
    g.part = take(&at, of_state * size)
    g.grad_decay = take(&at, of_columns)
    g.start_columns = take(&at, of_columns)
    g.end_columns = take(&at, of_columns)
    g.whole = take(&at, n.ld * size)
    g.scales = take(&at, tokens * size)
    # For products by lanes of features, too.
    g.tiles.acc = take(&at, tokens * largest * size)
    g.tiles.ones = take(&at, largest * size)
    g.tiles.factors = take(&at, 2 * tokens * size)
    g.tiles.stops = <Py_ssize_t *>take(&at, largest * sizeof(Py_ssize_t))
    g.chunks = <Py_ssize_t *>take(&at, (n.length + 1) * sizeof(Py_ssize_t))
    return at - base


cdef void multiply_rows(const Recurrent *n, RecurrentTiles *t, char *to, const char *a, const char *rescale, Py_ssize_t ld,
                        const char *b, Py_ssize_t b_row, Py_ssize_t b_col, Py_ssize_t n_terms, Py_ssize_t n_rows) noexcept nogil:
    """to[r] = the sum over j < n_terms of b(j, r) * a[j], r < n_rows, rows of ld; added to rescale * to unless that is NULL.

    b_row, b_col: elements from one j to the next, and from one r to the next.
    """
    cdef fastattn_values values
    cdef Py_ssize_t v, size = n.itemsize
    values.at = b
    values.row = b_row * size
    values.col = b_col * size
    values.panel = n.kernels.panel_cols * values.col
    for v in range(ld // n.kernels.lanes):
        t.stops[v] = n_terms
    n.kernels.accumulate(to, a, rescale, ld, <int>(ld // n.kernels.lanes), &values, t.stops, KEY_CHUNK, n_rows, NULL, 0, 0)


cdef void pack_chunk(const Recurrent *n, RecurrentTiles *t, char *to, const char *rows, Py_ssize_t ld,
                      Py_ssize_t n_cols) noexcept nogil:
    """The rows of the chunk's tokens, by lanes."""
    cdef Py_ssize_t lane, lanes = padded_lanes(n, t.n)
    for lane in range(lanes):
        t.rows[lane] = <char *>rows + min(lane, t.n - 1) * ld * n.itemsize
    n.kernels.pack(to, lanes, <const char *const *>t.rows, n.itemsize, n_cols, 1)


cdef void unpack_tokens(const Recurrent *n, RecurrentTiles *t, char *to, Py_ssize_t ld, Py_ssize_t n_cols,
                        const char *factor) noexcept nogil:
    """The rows of t.acc, each times a factor."""
    cdef Py_ssize_t lane, size = n.itemsize, lanes = padded_lanes(n, t.n)
    cdef double high
    for lane in range(lanes):
        t.rows[lane] = to + lane * ld * size
        high = get_real(factor + lane * size, size)
        set_real(t.factors + lane * size, high, size)
        set_real(t.factors + (lanes + lane) * size, high * (2.0 ** -60 if size == 4 else 2.0 ** -118), size)
    n.kernels.unpack(t.rows, size, t.n, t.acc, lanes, n_cols, t.factors)


cdef Py_ssize_t *all_stops(const Recurrent *n, RecurrentTiles *t) noexcept nogil:
    """t.stops, with all tokens of the chunk for each vector."""
    cdef Py_ssize_t v
    for v in range(padded_lanes(n, t.n) // n.kernels.lanes):
        t.stops[v] = t.n
    return t.stops


cdef void gate_all(const Recurrent *n, GradientTiles *g, char *scores, const char *factor) noexcept nogil:
    """Scores times a factor of each lane; 0 for later tokens than that of the lane."""
    n.kernels.gate(scores, padded_lanes(n, g.tiles.n), all_stops(n, &g.tiles), 1, factor, NULL)


cdef void set_weights(const Recurrent *n, GradientTiles *g) noexcept nogil:
    """The decays between tokens of the chunk."""
    cdef RecurrentTiles *t = &g.tiles
    cdef Py_ssize_t i, lanes = padded_lanes(n, t.n), size = n.itemsize
    if n.has_token_decay:
        n.kernels.weigh_tokens(g.weights, lanes, all_stops(n, t), t.high, t.low)
    else:
        for i in range(t.n):
            memcpy(g.weights + i * lanes * size, t.ones, lanes * size)
        gate_all(n, g, g.weights, t.ones)
    memcpy(g.weights_before, g.weights, t.n * lanes * size)
    for i in range(t.n):
        set_real(g.weights_before + (i * lanes + i) * size, 0, size)


cdef void score_lanes(const Recurrent *n, RecurrentTiles *t, char *to, const char *packed, const char *rows, Py_ssize_t ld,
                      Py_ssize_t n_cols) noexcept nogil:
    """to[j][lane] = the product of row j with what is packed in a lane, for the lane's token and those before. For others it is
    any number, which the weights leave out."""
    cdef Py_ssize_t v, lanes = padded_lanes(n, t.n), size = n.itemsize
    for v in range(lanes // n.kernels.lanes):
        t.stops[v] = min(t.n, (v + 1) * n.kernels.lanes)
    n.kernels.score(to, NULL, packed, lanes, <int>(lanes // n.kernels.lanes), rows, t.stops, n_cols, ld * size, size, NULL, 0, 0)


cdef void begin_chunk(const Recurrent *n, RecurrentTiles *t) noexcept nogil:
    """The factors of the decays of a chunk that is loaded."""
    if n.has_columns:
        n.kernels.sum_decays(t.up, t.down, t.decays, n.ld, t.n, n.ld, DECAY_RANGE)
    decay_tokens(n, t)


cdef void advance_chunk(const Recurrent *n, GradientTiles *g, Py_ssize_t item, Py_ssize_t head, Py_ssize_t chunk) noexcept nogil:
    """The state after a chunk, in the place of that before."""
    cdef RecurrentTiles *t = &g.tiles
    load_tokens(n, t, item, head, g.chunks[chunk], g.chunks[chunk + 1] - g.chunks[chunk])
    begin_chunk(n, t)
    if n.has_beta:
        round_state(n, t)
        weigh_chunk(n, t)
        apply_delta_rule(n, t)
    add_tokens(n, t)


cdef Py_ssize_t find_chunks(const Recurrent *n, GradientTiles *g, Py_ssize_t item, Py_ssize_t head) noexcept nogil:
    """Where chunks begin; their number."""
    cdef Py_ssize_t n_chunks = 0, first = 0, stop = stop_of(n, item, n.length)
    while first < stop:
        load_tokens(n, &g.tiles, item, head, first, min(<Py_ssize_t>RECURRENT_TOKENS, stop - first))
        cut_chunk(n, &g.tiles)
        g.chunks[n_chunks] = first
        first += g.tiles.n
        n_chunks += 1
    g.chunks[n_chunks] = stop
    return n_chunks


cdef void round_states(const Recurrent *n, GradientTiles *g) noexcept nogil:
    """The state before the chunk, and the gradient with respect to that after it, as products read them."""
    cdef RecurrentTiles *t = &g.tiles
    convert_numbers(g.state, n.itemsize, <char *>t.sums, sizeof(double), n.features * t.width)
    convert_numbers(g.after, n.itemsize, <char *>g.change, sizeof(double), n.features * t.width)
    if n.has_columns:
        n.kernels.scale_rows(g.state, g.state, t.before, t.width, n.features, t.width)
        n.kernels.scale_rows(g.after, g.after, t.after, t.width, n.features, t.width)


cdef void find_left(const Recurrent *n, GradientTiles *g) noexcept nogil:
    """g.left, what the tokens add, and the system of the gradient with respect to it."""
    cdef RecurrentTiles *t = &g.tiles
    cdef Py_ssize_t size = n.itemsize, lanes = padded_lanes(n, t.n), i
    pack_chunk(n, t, t.packed, g.raised, n.ld, n.features)
    multiply_rows(n, t, t.acc, t.packed, NULL, lanes, g.state, t.width, 1, n.features, t.n_columns)
    for i in range(t.n):
        set_real(t.factors + i * size, -get_real(t.starts + i * size, size) if n.has_token_decay else -1, size)
    unpack_tokens(n, t, g.left, t.width, t.n_columns, t.factors)
    score_lanes(n, t, g.key_scores, t.packed, t.lowered, n.ld, n.features)
    n.kernels.weigh(g.key_scores, g.weights_before, t.n * lanes)
    memcpy(g.system, g.key_scores, t.n * lanes * size)
    for i in range(lanes):
        set_real(t.factors + i * size, -get_real(t.beta + i * size, size) if i < t.n else 0, size)
    gate_all(n, g, g.system, t.factors)
    n.kernels.scale_rows(t.scores, g.key_scores, t.factors, lanes, t.n, lanes)
    n.kernels.substitute(g.left, t.ones, t.values, t.ones, t.width, t.scores, lanes, t.n, t.width)
    n.kernels.scale_rows(t.added, g.left, t.beta, t.width, t.n, t.width)


cdef void begin_gradients(const Recurrent *n, GradientTiles *g, bint with_decays) noexcept nogil:
    """What goes to the end of the chunk, which readers add to."""
    cdef RecurrentTiles *t = &g.tiles
    cdef Py_ssize_t size = n.itemsize, lanes = padded_lanes(n, t.n), i
    cdef const char *ends = t.ends if n.has_token_decay else t.ones
    multiply_rows(n, t, g.grad_added, g.after, NULL, t.width, t.lowered, 1, n.ld, n.features, t.n)
    if n.has_token_decay:
        n.kernels.scale_rows(g.grad_added, g.grad_added, t.ends, t.width, t.n, t.width)
    pack_chunk(n, t, g.packed, t.added, t.width, t.n_columns)
    multiply_rows(n, t, t.acc, g.packed, NULL, lanes, g.after, 1, t.width, t.n_columns, n.features)
    unpack_tokens(n, t, g.grad_key, n.ld, n.features, ends)
    memset(g.part, 0, n.features * t.width * size)
    if not with_decays:
        return
    if n.has_columns:
        n.kernels.multiply(g.end_columns, g.grad_key, t.lowered, t.n * n.ld)
        memset(g.start_columns, 0, t.n * n.ld * size)
        memset(g.grad_decay, 0, t.n * n.ld * size)
    for i in range(t.n):
        g.starts[i] = g.crossed[i] = 0
        if n.has_token_decay:
            g.ends[i] = n.kernels.dot(g.grad_key + i * n.ld * size, t.keys + i * n.ld * size, n.features)


cdef void differentiate_reader(const Recurrent *n, GradientTiles *g, const char *rows, bint is_query, bint has_chunk,
                     bint with_decays) noexcept nogil:
    """One reader: g.grad_rows, and what it adds to the other gradients. `rows` are raised, g.given is by tokens."""
    cdef RecurrentTiles *t = &g.tiles
    cdef Py_ssize_t size = n.itemsize, lanes = padded_lanes(n, t.n), i
    cdef const char *starts = t.starts if n.has_token_decay and has_chunk else t.ones
    cdef const char *weights = g.weights if is_query else g.weights_before
    cdef const char *scores = t.scores if is_query else g.key_scores
    cdef const char *faded = g.given
    pack_chunk(n, t, g.packed, g.given, t.width, t.n_columns)
    multiply_rows(n, t, t.acc, g.packed, NULL, lanes, g.state, 1, t.width, t.n_columns, n.features)
    if not has_chunk:
        unpack_tokens(n, t, g.grad_rows, n.ld, n.features, t.ones)
    else:
        if with_decays:
            unpack_tokens(n, t, g.from_state, n.ld, n.features, starts)
            if n.has_columns:
                n.kernels.multiply(g.from_state, g.from_state, rows, t.n * n.ld)
                n.kernels.add_products(g.start_columns, g.from_state, NULL, t.n * n.ld)
            for i in range(t.n if n.has_token_decay else 0):
                g.starts[i] += n.kernels.dot(g.from_state + i * n.ld * size, rows + i * n.ld * size, n.features)
        if is_query:
            pack_chunk(n, t, t.packed, rows, n.ld, n.features)
            score_lanes(n, t, t.scores, t.packed, t.lowered, n.ld, n.features)
            n.kernels.weigh(t.scores, weights, t.n * lanes)
            multiply_rows(n, t, g.grad_added, g.given, t.ones, t.width, t.scores, 1, lanes, t.n, t.n)
        score_lanes(n, t, g.products, g.packed, t.added, t.width, t.n_columns)
        if with_decays and n.has_token_decay:
            n.kernels.cross_tokens(g.crossed, scores, g.products, lanes, t.n)
        n.kernels.weigh(g.products, weights, t.n * lanes)
        if with_decays and n.has_columns:
            n.kernels.cross_columns(g.grad_decay, rows, t.lowered, n.ld, g.products, lanes, t.n, n.ld)
        multiply_rows(n, t, t.acc, g.products, starts, lanes, t.lowered, n.ld, 1, t.n, n.features)
        unpack_tokens(n, t, g.grad_rows, n.ld, n.features, t.ones)
        multiply_rows(n, t, g.grad_key, rows, t.ones, n.ld, g.products, 1, lanes, t.n, t.n)
        if n.has_token_decay:
            n.kernels.scale_rows(g.faded, g.given, t.starts, t.width, t.n, t.width)
            faded = g.faded
    multiply_rows(n, t, g.part, faded, t.ones, t.width, rows, n.ld, 1, t.n, n.features)


cdef void store_gradient(const Recurrent *n, const RecurrentTiles *t, char *at, Py_ssize_t head, const char *rows, Py_ssize_t ld,
                         Py_ssize_t n_cols) noexcept nogil:
    """The rows of the chunk's tokens in a gradient (head, token, column), unless that is NULL."""
    cdef Py_ssize_t i, nbytes = n_cols * n.itemsize
    if at == NULL:
        return
    at += (head * n.length + t.first) * nbytes
    for i in range(t.n):
        memcpy(at + i * nbytes, rows + i * ld * n.itemsize, nbytes)


cdef void read_queries(const RecurrentGradient *of, GradientTiles *g, Py_ssize_t item, Py_ssize_t kv,
                       bint has_chunk) noexcept nogil:
    """The tokens of the chunk as readers, by all query heads of the group; or without keys, tokens past the last that is read."""
    cdef const Recurrent *n = &of.forward
    cdef RecurrentTiles *t = &g.tiles
    cdef Py_ssize_t size = n.itemsize, h
    for h in range(kv * n.group, (kv + 1) * n.group):
        load_item_rows(n.kernels, size, g.rows, n.ld, &n.query, item_row(&n.query, item, h, t.first), t.n, n.features)
        load_item_rows(n.kernels, size, g.given, t.width, &n.out, item_row(&n.out, item, h, t.first), t.n, n.value_dim)
        n.kernels.scale_rows(g.rows, g.rows, g.scales, n.ld, t.n, n.ld)
        if has_chunk and n.has_columns:
            n.kernels.multiply(g.rows, g.rows, t.up, t.n * n.ld)
        differentiate_reader(n, g, g.rows, True, has_chunk, of.decay != NULL)
        if has_chunk and n.has_columns:
            n.kernels.multiply(g.grad_rows, g.grad_rows, t.up, t.n * n.ld)
        n.kernels.scale_rows(g.grad_rows, g.grad_rows, g.scales, n.ld, t.n, n.ld)
        store_gradient(n, t, of.query, item * n.num_kv_heads * n.group + h, g.grad_rows, n.ld, n.features)


cdef void read_keys(const RecurrentGradient *of, GradientTiles *g, Py_ssize_t head) noexcept nogil:
    """The keys of the chunk as readers, by the delta rule. g.grad_added becomes the gradient of the values."""
    cdef const Recurrent *n = &of.forward
    cdef RecurrentTiles *t = &g.tiles
    cdef Py_ssize_t row = t.width * n.itemsize, i
    n.kernels.substitute_back(g.grad_added, t.width, g.system, padded_lanes(n, t.n), t.n, t.width)
    for i in range(t.n):
        set_real(t.factors + i * n.itemsize, n.kernels.dot(g.grad_added + i * row, g.left + i * row, t.n_columns), n.itemsize)
    store_gradient(n, t, of.beta, head, t.factors, 1, 1)
    n.kernels.scale_rows(g.grad_added, g.grad_added, t.beta, t.width, t.n, t.width)
    for i in range(t.n):
        set_real(t.factors + i * n.itemsize, -1, n.itemsize)
    n.kernels.scale_rows(g.given, g.grad_added, t.factors, t.width, t.n, t.width)
    differentiate_reader(n, g, g.raised, False, True, of.decay != NULL)


cdef void store_decays(const RecurrentGradient *of, GradientTiles *g, Py_ssize_t head) noexcept nogil:
    """The gradients of the decays of the chunk."""
    cdef const Recurrent *n = &of.forward
    cdef RecurrentTiles *t = &g.tiles
    cdef Py_ssize_t size = n.itemsize, row = t.width * size, d, i
    cdef double sum, whole = 0
    for d in range(n.features):
        sum = n.kernels.dot(g.state + d * row, g.after + d * row, t.n_columns)
        set_real(g.whole + d * size, sum, size)
        whole += sum
    if n.has_columns:
        n.kernels.add_outside(g.grad_decay, g.start_columns, g.end_columns, g.whole, n.ld, t.n, n.ld)
        store_gradient(n, t, of.decay, head, g.grad_decay, n.ld, n.features)
        return
    sum = whole * get_real(t.starts + (t.n - 1) * size, size)
    for i in range(t.n):
        g.crossed[i] += sum
        sum += g.ends[i]
    sum = 0
    for i in range(t.n - 1, -1, -1):
        sum += g.starts[i]
        set_real(t.factors + i * size, g.crossed[i] + sum, size)
    store_gradient(n, t, of.decay, head, t.factors, 1, 1)


cdef void differentiate_tokens(const RecurrentGradient *of, GradientTiles *g, Py_ssize_t item, Py_ssize_t kv,
                               Py_ssize_t chunk) noexcept nogil:
    """The gradients of a chunk, from the state before it and the gradient with respect to that after it, which becomes that
    with respect to the state before."""
    cdef const Recurrent *n = &of.forward
    cdef RecurrentTiles *t = &g.tiles
    cdef Py_ssize_t head = item * n.num_kv_heads + kv
    load_tokens(n, t, item, kv, g.chunks[chunk], g.chunks[chunk + 1] - g.chunks[chunk])
    begin_chunk(n, t)
    round_states(n, g)
    set_weights(n, g)
    if n.has_columns:
        n.kernels.multiply(g.raised, t.keys, t.up, t.n * n.ld)
    if n.has_beta:
        find_left(n, g)
    begin_gradients(n, g, of.decay != NULL)
    read_queries(of, g, item, kv, True)
    if n.has_beta:
        read_keys(of, g, head)
    store_gradient(n, t, of.value, head, g.grad_added, t.width, n.value_dim)
    if n.has_columns:
        n.kernels.multiply(g.grad_key, g.grad_key, t.down, t.n * n.ld)
    if n.has_beta:
        n.kernels.add_products(g.grad_key, g.grad_rows, t.up if n.has_columns else NULL, t.n * n.ld)
    store_gradient(n, t, of.key, head, g.grad_key, n.ld, n.features)
    if of.decay != NULL:
        store_decays(of, g, head)
    n.kernels.advance_sums(g.change, g.after, g.part, t.after if n.has_columns else t.before if n.has_token_decay else NULL,
                           t.before if n.has_columns else NULL, t.width, n.features, t.width)


cdef bint reserve_states(GradientTiles *g, Py_ssize_t n_states, Py_ssize_t nbytes) noexcept nogil:
    """Room for states of nbytes each; False without memory."""
    cdef double *memory
    if n_states > g.n_states:
        memory = <double *>realloc(g.states, n_states * nbytes)
        if memory == NULL:
            return False
        g.states = memory
        g.n_states = n_states
    return True


cdef void read_tail(const RecurrentGradient *of, GradientTiles *g, Py_ssize_t item, Py_ssize_t kv, Py_ssize_t first) noexcept nogil:
    """The queries past the last token that is read, of the last state."""
    cdef const Recurrent *n = &of.forward
    cdef RecurrentTiles *t = &g.tiles
    cdef Py_ssize_t n_sums = n.features * t.width
    convert_numbers(g.state, n.itemsize, <char *>t.sums, sizeof(double), n_sums)
    while first < n.length:
        t.first = first
        t.n = min(<Py_ssize_t>RECURRENT_TOKENS, n.length - first)
        memset(g.part, 0, n_sums * n.itemsize)
        read_queries(of, g, item, kv, False)
        n.kernels.advance_sums(g.change, g.after, g.part, NULL, NULL, t.width, n.features, t.width)
        first += t.n


cdef void run_recurrent_gradient(RecurrentGradient *of, GradientTiles *g, Py_ssize_t head) noexcept nogil:
    cdef const Recurrent *n = &of.forward
    cdef RecurrentTiles *t = &g.tiles
    cdef Py_ssize_t item = head // n.num_kv_heads, kv = head % n.num_kv_heads
    cdef Py_ssize_t at = head * n.features * n.value_dim * n.itemsize, n_sums, nbytes, n_chunks, n_saved, chunk, first, stop
    cdef Py_ssize_t per_segment = 1
    cdef double *again  # the states of a segment
    t.column = 0
    t.n_columns = n.value_dim
    t.width = n.values_ld
    t.is_empty = False
    n_sums = n.features * t.width
    nbytes = n_sums * sizeof(double)
    # Columns past n_columns stay 0.
    memset(t.added, 0, RECURRENT_TOKENS * t.width * n.itemsize)
    memset(g.left, 0, RECURRENT_TOKENS * t.width * n.itemsize)
    n_chunks = find_chunks(n, g, item, kv)
    while per_segment * per_segment < n_chunks:
        per_segment += 1
    n_saved = (n_chunks + per_segment - 1) // per_segment
    if not reserve_states(g, n_saved + per_segment, nbytes):
        of.lacks_memory = True
        return
    again = g.states + n_saved * n_sums
    t.sums = again
    load_sums(n, t, t.sums, n.earlier + at if n.earlier != NULL else NULL, n.itemsize)
    for chunk in range(n_chunks):
        if chunk % per_segment == 0:
            memcpy(g.states + chunk // per_segment * n_sums, t.sums, nbytes)
        advance_chunk(n, g, item, kv, chunk)
    load_sums(n, t, g.change, of.grad_state + at if of.grad_state != NULL else NULL, n.itemsize)
    read_tail(of, g, item, kv, g.chunks[n_chunks])
    stop = n_chunks
    while stop > 0:
        first = (stop - 1) // per_segment * per_segment
        memcpy(again, g.states + first // per_segment * n_sums, nbytes)
        for chunk in range(first, stop - 1):
            t.sums = again + (chunk + 1 - first) * n_sums
            memcpy(t.sums, t.sums - n_sums, nbytes)
            advance_chunk(n, g, item, kv, chunk)
        for chunk in range(stop - 1, first - 1, -1):
            t.sums = again + (chunk - first) * n_sums
            differentiate_tokens(of, g, item, kv, chunk)
        stop = first
    if of.state != NULL:
        store_sums(n, t, g.change, of.state + at, n.itemsize)


cdef void run_recurrent_gradients(void *call, Share *shares, int own, int n_shares) noexcept nogil:
    """Without memory for its tiles a thread runs no task, and the others run its share."""
    cdef RecurrentGradient *of = <RecurrentGradient *>call
    cdef const Recurrent *n = &of.forward
    cdef GradientTiles tiles
    cdef Py_ssize_t nbytes = set_gradient_tiles(n, NULL, &tiles), v, task, stop
    cdef char *memory = <char *>malloc(nbytes + 64)
    cdef int turn = 0
    if memory == NULL:
        return
    set_gradient_tiles(n, <char *>((<size_t>memory + 63) & ~<size_t>63), &tiles)
    for v in range(max(<Py_ssize_t>RECURRENT_TOKENS, max(n.values_ld, n.ld))):
        set_real(tiles.tiles.ones + v * n.itemsize, 1, n.itemsize)
    for v in range(RECURRENT_TOKENS):
        set_real(tiles.scales + v * n.itemsize, n.scale, n.itemsize)
    tiles.states = NULL
    tiles.n_states = 0
    while take_tasks(shares, own, n_shares, 1, &turn, &task, &stop):
        run_recurrent_gradient(of, &tiles, task)
    free(tiles.states)
    free(memory)


def gated_linear_attention_backward(tuple arrays, tuple storages, tuple leads, stops, tuple earlier, grad_state, tuple gradients,
                                    double scale, int itemsize, thread_limit):
    """Fills `gradients`, contiguous arrays of the computation's type that are zeros, or None: of query, key, value, decay,
    beta and state, as (*lead, head, token, column), and of the state as `earlier`. out, the fourth array, is the gradient with
    respect to it, and grad_state that to the state after, as `earlier` is. Otherwise as `recurrent_attention`."""
    cdef RecurrentGradient of
    cdef Recurrent *n = &of.forward
    cdef int64_t *items
    cdef int num_threads = 1
    cdef Py_ssize_t heads
    cdef bint done
    memset(&of, 0, sizeof(RecurrentGradient))
    items = set_recurrent(n, arrays, storages, leads, None, stops, earlier, scale, itemsize)
    of.grad_state = <const char *><size_t>address_of(grad_state)
    of.query = <char *><size_t>address_of(gradients[0])
    of.key = <char *><size_t>address_of(gradients[1])
    of.value = <char *><size_t>address_of(gradients[2])
    of.decay = <char *><size_t>address_of(gradients[3])
    of.beta = <char *><size_t>address_of(gradients[4])
    of.state = <char *><size_t>address_of(gradients[5])
    heads = n.n_items * n.num_kv_heads
    if heads > 1 and work_of(n) >= RECURRENT_SMALL:
        num_threads = thread_limit()
    with nogil:
        done = run_on_threads(run_recurrent_gradients, &of, heads, <int>min(<Py_ssize_t>num_threads, heads), False)
    free(items)
    if not done or of.lacks_memory:
        raise MemoryError("no memory for the tiles of a thread")
