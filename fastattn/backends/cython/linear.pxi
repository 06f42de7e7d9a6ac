# Linear attention with features elu(x) + 1. Each key/value head has sums over its keys, in float64: a row of `features`
# for each column of the values, which adds up feature times value, and a last row, which adds up the features. A query's
# products with these rows are its numerators and its denominator: the kernels' scores of query rows, with sums as keys.
# With running sums (causal), keys are added a chunk at a time; the keys of the current chunk are scored, masked and
# accumulated as in attention.

cdef enum:
    LINEAR_KEYS = 256  # of a partial sum that is added in float64
    RUNNING_KEYS = 64  # the same with running sums, where each row is also scored against its own chunk
    # Where there are fewer heads than LINEAR_HEADS, each is divided into segments, at most LINEAR_SEGMENTS, of at least
    # LINEAR_SEGMENT positions. A segment costs a pass over its sums; with running sums, the products of keys are
    # also computed twice. Sizes alone decide, so no bit depends on the number of threads.
    LINEAR_HEADS = 8
    LINEAR_SEGMENTS = 64
    LINEAR_SEGMENT = 1024
    # Multiply-adds from which on two threads may be faster than one.
    LINEAR_SMALL = 1 << 21

ctypedef enum LinearPhase:
    WHOLE_HEADS      # a task is a head: all of its keys and queries
    SUM_SEGMENTS     # a task is a segment of the keys of a head
    FOLD_SEGMENTS    # a task is a head: the sums of its segments become those that queries read
    ATTEND_SEGMENTS  # a task is a segment of the queries of a head


cdef struct ItemRows:
    # Rows (item, head, position, column) of an array.
    char *at
    const int64_t *items  # bytes from `at` to each item
    Py_ssize_t head, row, col
    int storage


cdef struct Linear:
    const fastattn_kernels *kernels
    Py_ssize_t itemsize
    bint is_running  # a position reads the keys up to its own, not all
    ItemRows query, key, value, out
    const int64_t *item_of_keys  # for each item of the queries, that of its keys
    const int64_t *key_stops     # for each item of the keys
    Py_ssize_t n_items, n_key_items, num_kv_heads, group, len_q, len_k, features, value_dim
    Py_ssize_t ld                # features, padded to vectors
    Py_ssize_t n_sums            # of one head: (value_dim + 1) * ld
    double *sums                 # of each head: of earlier keys, and then of all; or NULL
    double *parts                # of each segment of each head
    char *lost                   # (item, head, position) of queries: 1 where the denominator is outside of these two, or
                                 # a result is nonfinite
    double least, most
    Py_ssize_t segment           # positions
    Py_ssize_t key_segments, query_segments
    LinearPhase phase


cdef struct LinearTiles:
    # A thread's own memory.
    double *sums
    char *rounded    # the same in the type of the computation
    char *part
    char *keys       # features of a chunk
    char *values     # of a chunk, converted
    char *query      # features, and then the results of a block of rows
    char *acc
    char *scores
    char *clean
    char *inverse
    char *ones
    char *staged
    char **rows
    char **out_rows
    char **staged_rows
    uint32_t *words
    Py_ssize_t *stops
    # The chunk of keys.
    Py_ssize_t first_key, n_keys
    fastattn_values chunk
    bint nonfinite


cdef Py_ssize_t set_linear_tiles(const Linear *n, char *base, LinearTiles *t) noexcept nogil:
    """Sets the addresses from `base` on; the number of bytes."""
    cdef Py_ssize_t lanes = n.kernels.lanes * n.kernels.max_vectors, size = n.itemsize
    cdef char *at = base
    t.sums = <double *>take(&at, n.n_sums * sizeof(double))
    t.rounded = take(&at, n.n_sums * size)
    t.part = take(&at, n.n_sums * size)
    t.keys = take(&at, LINEAR_KEYS * n.ld * size)
    t.values = take(&at, LINEAR_KEYS * n.value_dim * size)
    t.query = take(&at, n.features * lanes * size)
    t.acc = take(&at, (n.value_dim + 1) * lanes * size)
    t.scores = take(&at, RUNNING_KEYS * lanes * size)
    t.clean = take(&at, RUNNING_KEYS * n.value_dim * size)
    t.inverse = take(&at, 2 * lanes * size)
    t.ones = take(&at, lanes * size)
    t.staged = take(&at, lanes * max(n.features, n.value_dim) * size)
    t.rows = <char **>take(&at, lanes * sizeof(char *))
    t.out_rows = <char **>take(&at, lanes * sizeof(char *))
    t.staged_rows = <char **>take(&at, lanes * sizeof(char *))
    t.words = <uint32_t *>take(&at, RUNNING_KEYS // WORD * lanes * sizeof(uint32_t))
    t.stops = <Py_ssize_t *>take(&at, n.kernels.max_vectors * sizeof(Py_ssize_t))
    return at - base


cdef inline char *item_row(const ItemRows *rows, Py_ssize_t item, Py_ssize_t head, Py_ssize_t position) noexcept nogil:
    return rows.at + rows.items[item] + head * rows.head + position * rows.row


cdef void load_item_rows(const fastattn_kernels *kernels, Py_ssize_t itemsize, char *to, Py_ssize_t ld,
                         const ItemRows *rows, const char *at, Py_ssize_t n_rows, Py_ssize_t n_cols) noexcept nogil:
    """to[i * ld + c] = element c of row i in the type of the computation; 0 for the other c < ld."""
    cdef Py_ssize_t i
    if not rows.storage and ld == n_cols:
        fastattn_copy_rows(to, at, rows.row, rows.col, itemsize, n_rows, n_cols)
        return
    for i in range(n_rows):
        kernels.load_row(to + i * ld * itemsize, at + i * rows.row, rows.col, n_cols, rows.storage & STORAGE,
                         (rows.storage & SWAPPED) != 0, NULL, 0)
        if ld > n_cols:
            memset(to + (i * ld + n_cols) * itemsize, 0, (ld - n_cols) * itemsize)


cdef void load_chunk(const Linear *n, LinearTiles *t, Py_ssize_t item, Py_ssize_t head, Py_ssize_t first,
                     Py_ssize_t n_keys) noexcept nogil:
    """The features of some keys, and where their values are."""
    cdef char *values = item_row(&n.value, item, head, first)
    cdef Py_ssize_t j
    t.first_key = first
    t.n_keys = n_keys
    load_item_rows(n.kernels, n.itemsize, t.keys, n.ld, &n.key, item_row(&n.key, item, head, first), n_keys, n.features)
    n.kernels.elu_plus_one(t.keys, n_keys * n.ld)
    t.chunk.at = values
    t.chunk.row = n.value.row
    if n.value.storage or n.value.col != n.itemsize:
        load_item_rows(n.kernels, n.itemsize, t.values, n.value_dim, &n.value, values, n_keys, n.value_dim)
        t.chunk.at = t.values
        t.chunk.row = n.value_dim * n.itemsize
    t.chunk.col = n.itemsize
    t.chunk.panel = n.kernels.panel_cols * n.itemsize
    t.nonfinite = False
    if n.is_running:
        for j in range(n_keys):
            t.nonfinite |= n.kernels.has_nonfinite(t.chunk.at + j * t.chunk.row, n.value_dim)


cdef void accumulate_chunk(const Linear *n, const LinearTiles *t, char *acc, const char *weights, const char *rescale,
                           Py_ssize_t ld, int n_vectors) noexcept nogil:
    """Adds weights times values to the rows of acc, and the weights to its last row; only writes them without rescale."""
    cdef fastattn_values one
    one.at = t.ones
    one.row = one.col = one.panel = 0
    if t.nonfinite and rescale != NULL:
        n.kernels.accumulate_nonfinite(acc, weights, rescale, ld, &t.chunk, t.stops, KEY_CHUNK, n.value_dim, NULL, t.words,
                                       t.clean)
    else:
        n.kernels.accumulate(acc, weights, rescale, ld, n_vectors, &t.chunk, t.stops, KEY_CHUNK, n.value_dim, NULL, 0, 0)
    n.kernels.accumulate(acc + n.value_dim * ld * n.itemsize, weights, rescale, ld, n_vectors, &one, t.stops, KEY_CHUNK, 1,
                         NULL, 0, 0)


cdef void add_chunk(const Linear *n, LinearTiles *t, double *sums) noexcept nogil:
    """Adds the keys of a chunk to sums. Features are lanes."""
    cdef Py_ssize_t first = 0, at, v
    cdef int n_vectors
    while first < n.ld:
        n_vectors = <int>min(<Py_ssize_t>n.kernels.max_vectors, (n.ld - first) // n.kernels.lanes)
        for v in range(n_vectors):
            t.stops[v] = t.n_keys
        at = first * n.itemsize
        accumulate_chunk(n, t, t.part + at, t.keys + at, NULL, n.ld, n_vectors)
        first += n_vectors * n.kernels.lanes
    n.kernels.add_sums(sums, t.part, n.n_sums)


cdef void add_keys(const Linear *n, LinearTiles *t, double *sums, Py_ssize_t item, Py_ssize_t head, Py_ssize_t first,
                   Py_ssize_t stop) noexcept nogil:
    stop = min(stop, <Py_ssize_t>n.key_stops[item])
    while first < stop:
        load_chunk(n, t, item, head, first, min(<Py_ssize_t>LINEAR_KEYS, stop - first))
        add_chunk(n, t, sums)
        first += LINEAR_KEYS


cdef void add_scores(const Linear *n, LinearTiles *t, Py_ssize_t first_row, Py_ssize_t n_rows, Py_ssize_t ld,
                     int n_vectors) noexcept nogil:
    """Adds the keys of the chunk up to each row's own position to the results of a block."""
    cdef Py_ssize_t lane, v, w, seen
    cdef Py_ssize_t n_words = (t.n_keys + 31) // 32
    for lane in range(ld):
        seen = (first_row + min(lane, n_rows - 1)) // n.group - t.first_key + 1
        for w in range(n_words):
            t.words[w * ld + lane] = <uint32_t>((<uint64_t>1 << min(<Py_ssize_t>32, max(<Py_ssize_t>0, seen - 32 * w))) - 1)
        # The last lane of a vector sees the most.
        v = lane // n.kernels.lanes
        t.stops[v] = t.n_keys if t.nonfinite else min(t.n_keys, seen)
    n.kernels.score(t.scores, NULL, t.query, ld, n_vectors, t.keys, t.stops, n.features, n.ld * n.itemsize, n.itemsize,
                    NULL, 0, 0)
    n.kernels.drop(t.scores, ld, t.stops, t.words)
    accumulate_chunk(n, t, t.acc, t.scores, t.ones, ld, n_vectors)


cdef inline void lose_row(const Linear *n, Py_ssize_t item, Py_ssize_t head, Py_ssize_t row) noexcept nogil:
    cdef Py_ssize_t h = head * n.group + row % n.group
    n.lost[(item * n.num_kv_heads * n.group + h) * n.len_q + row // n.group] = 1


cdef void attend_rows(const Linear *n, LinearTiles *t, Py_ssize_t item, Py_ssize_t head, Py_ssize_t first, Py_ssize_t stop,
                      bint has_chunk) noexcept nogil:
    """The results of the queries of some positions, all heads of the group, from the rounded sums and the chunk."""
    cdef Py_ssize_t lanes = n.kernels.lanes, row = first * n.group, n_rows, ld, lane, v, h, i, e, col
    cdef int n_vectors
    cdef bint nonfinite
    cdef char *sums
    cdef char **rows
    cdef double total
    while row < stop * n.group:
        n_rows = min(lanes * n.kernels.max_vectors, stop * n.group - row)
        n_vectors = <int>((n_rows + lanes - 1) // lanes)
        ld = n_vectors * lanes
        h = head * n.group + row % n.group
        i = row // n.group
        for lane in range(n_rows):
            t.out_rows[lane] = item_row(&n.out, item, h, i)
            t.rows[lane] = item_row(&n.query, item, h, i)
            if n.query.storage:
                t.staged_rows[lane] = t.staged + lane * n.features * n.itemsize
                load_item_rows(n.kernels, n.itemsize, t.staged_rows[lane], n.features, &n.query, t.rows[lane], 1, n.features)
                t.rows[lane] = t.staged_rows[lane]
            h += 1
            if h == (head + 1) * n.group:
                h = head * n.group
                i += 1
        for lane in range(n_rows, ld):
            t.rows[lane] = t.rows[n_rows - 1]
        n.kernels.pack(t.query, ld, <const char *const *>t.rows, n.itemsize if n.query.storage else n.query.col,
                       n.features, 1)
        n.kernels.elu_plus_one(t.query, n.features * ld)
        for v in range(n_vectors):
            t.stops[v] = n.value_dim + 1
        n.kernels.score(t.acc, NULL, t.query, ld, n_vectors, t.rounded, t.stops, n.features, n.ld * n.itemsize, n.itemsize,
                        NULL, 0, 0)
        if has_chunk:
            add_scores(n, t, row, n_rows, ld, n_vectors)
        sums = t.acc + n.value_dim * ld * n.itemsize
        for lane in range(n_rows):
            total = get_real(sums + lane * n.itemsize, n.itemsize)
            if not n.least <= total <= n.most:
                lose_row(n, item, head, row + lane)
        n.kernels.finish(t.inverse, NULL, NULL, sums, ld, 1, 1)
        rows = t.out_rows
        col = n.out.col
        if n.out.storage:
            rows = t.staged_rows
            col = n.itemsize
            for lane in range(n_rows):
                rows[lane] = t.staged + lane * n.value_dim * n.itemsize
        nonfinite = n.kernels.unpack(rows, col, n_rows, t.acc, ld, n.value_dim, t.inverse)
        for lane in range(n_rows if n.out.storage else 0):
            n.kernels.store_row(t.out_rows[lane], n.out.col, rows[lane], n.value_dim, n.out.storage & STORAGE)
        for lane in range(n_rows if nonfinite else 0):
            for e in range(n.value_dim):
                if not isfinite(get_real(rows[lane] + e * col, n.itemsize)):
                    lose_row(n, item, head, row + lane)
                    break
        row += n_rows


cdef void attend_positions(const Linear *n, LinearTiles *t, Py_ssize_t item, Py_ssize_t head, Py_ssize_t first,
                           Py_ssize_t stop) noexcept nogil:
    """The results of positions from the sums in t.sums; running ones are of earlier keys, and their own are added."""
    cdef Py_ssize_t key_item = n.item_of_keys[item], n_keys
    if not n.is_running:
        n.kernels.round_sums(t.rounded, t.sums, n.n_sums)
        attend_rows(n, t, item, head, first, stop, False)
        return
    while first < stop:
        n.kernels.round_sums(t.rounded, t.sums, n.n_sums)
        n_keys = min(<Py_ssize_t>RUNNING_KEYS, min(stop, <Py_ssize_t>n.key_stops[key_item]) - first)
        if n_keys > 0:
            load_chunk(n, t, key_item, head, first, n_keys)
        attend_rows(n, t, item, head, first, min(first + RUNNING_KEYS, stop), n_keys > 0)
        if n_keys > 0:
            add_chunk(n, t, t.sums)
        first += RUNNING_KEYS


cdef inline void get_earlier_sums(const Linear *n, LinearTiles *t, Py_ssize_t head) noexcept nogil:
    if n.sums != NULL:
        memcpy(t.sums, n.sums + head * n.n_sums, n.n_sums * sizeof(double))
    else:
        memset(t.sums, 0, n.n_sums * sizeof(double))


cdef void fold_segments(const Linear *n, LinearTiles *t, Py_ssize_t head) noexcept nogil:
    """Turns the sums of a head's segments into running ones, of the keys before each; or the first into that of all."""
    cdef double *parts = n.parts + head * n.key_segments * n.n_sums
    cdef double *part
    cdef double own
    cdef Py_ssize_t s, i
    get_earlier_sums(n, t, head)
    for s in range(n.key_segments):
        part = parts + s * n.n_sums
        for i in range(n.n_sums):
            own = part[i]
            part[i] = t.sums[i]
            t.sums[i] += own
    if not n.is_running:
        memcpy(parts, t.sums, n.n_sums * sizeof(double))
    if n.sums != NULL:
        memcpy(n.sums + head * n.n_sums, t.sums, n.n_sums * sizeof(double))


cdef void run_linear_task(const Linear *n, LinearTiles *t, Py_ssize_t task) noexcept nogil:
    cdef Py_ssize_t segments = n.key_segments if n.phase == SUM_SEGMENTS else n.query_segments
    cdef Py_ssize_t segment = task % segments, head, item, kv, part
    cdef double *sums
    if n.phase == FOLD_SEGMENTS:
        fold_segments(n, t, task)
        return
    head = task if n.phase == WHOLE_HEADS else task // segments
    item = head // n.num_kv_heads
    kv = head % n.num_kv_heads
    if n.phase == SUM_SEGMENTS:
        sums = n.parts + task * n.n_sums
        memset(sums, 0, n.n_sums * sizeof(double))
        add_keys(n, t, sums, item, kv, segment * n.segment, min((segment + 1) * n.segment, n.len_k))
    elif n.phase == ATTEND_SEGMENTS:
        part = (n.item_of_keys[item] * n.num_kv_heads + kv) * n.key_segments + (segment if n.is_running else 0)
        memcpy(t.sums, n.parts + part * n.n_sums, n.n_sums * sizeof(double))
        attend_positions(n, t, item, kv, segment * n.segment, min((segment + 1) * n.segment, n.len_q))
    else:
        get_earlier_sums(n, t, head)
        if not n.is_running:
            add_keys(n, t, t.sums, item, kv, 0, n.len_k)
        attend_positions(n, t, item, kv, 0, n.len_q)
        if n.sums != NULL:
            memcpy(n.sums + head * n.n_sums, t.sums, n.n_sums * sizeof(double))


cdef void run_linear_tasks(void *call, Share *shares, int own, int n_shares) noexcept nogil:
    """Without memory for its tiles a thread runs no task, and the others run its share."""
    cdef const Linear *n = <const Linear *>call
    cdef LinearTiles tiles
    cdef char *memory = <char *>malloc(set_linear_tiles(n, NULL, &tiles) + 64)
    cdef int turn = 0
    cdef Py_ssize_t task, stop, v
    if memory == NULL:
        return
    set_linear_tiles(n, <char *>((<size_t>memory + 63) & ~<size_t>63), &tiles)
    for v in range(n.kernels.lanes * n.kernels.max_vectors):
        set_real(tiles.ones + v * n.itemsize, 1, n.itemsize)
    while take_tasks(shares, own, n_shares, 1, &turn, &task, &stop):
        run_linear_task(n, &tiles, task)
    free(memory)


cdef bint run_phase(Linear *n, LinearPhase phase, Py_ssize_t n_tasks, int num_threads) noexcept nogil:
    n.phase = phase
    return run_on_threads(run_linear_tasks, n, n_tasks, <int>min(<Py_ssize_t>num_threads, n_tasks), False)


cdef bint run_linear(Linear *n, int num_threads) noexcept nogil:
    """False without memory."""
    cdef Py_ssize_t heads = n.n_key_items * n.num_kv_heads, positions = max(n.len_q, n.len_k)
    cdef bint done
    n.segment = positions
    if heads < LINEAR_HEADS:
        n.segment = max(<Py_ssize_t>LINEAR_SEGMENT, (positions + LINEAR_SEGMENTS - 1) // LINEAR_SEGMENTS)
        n.segment = (n.segment + LINEAR_KEYS - 1) // LINEAR_KEYS * LINEAR_KEYS
    n.key_segments = (n.len_k + n.segment - 1) // n.segment
    n.query_segments = (n.len_q + n.segment - 1) // n.segment
    if n.n_items == n.n_key_items and n.key_segments == 1 and n.query_segments == 1:
        return run_phase(n, WHOLE_HEADS, heads, num_threads)
    n.parts = <double *>malloc(heads * n.key_segments * n.n_sums * sizeof(double))
    if n.parts == NULL:
        return False
    done = (run_phase(n, SUM_SEGMENTS, heads * n.key_segments, num_threads)
            and run_phase(n, FOLD_SEGMENTS, heads, num_threads)
            and run_phase(n, ATTEND_SEGMENTS, n.n_items * n.num_kv_heads * n.query_segments, num_threads))
    free(n.parts)
    return done


cdef void set_item_rows(ItemRows *rows, cnp.ndarray array, cnp.ndarray items, int storage) noexcept:
    rows.at = <char *>cnp.PyArray_DATA(array)
    rows.items = <const int64_t *>cnp.PyArray_DATA(items)
    rows.head = array.strides[array.ndim - 3]
    rows.row = array.strides[array.ndim - 2]
    rows.col = array.strides[array.ndim - 1]
    rows.storage = storage


def linear_attention(tuple arrays, tuple items, tuple storages, cnp.ndarray item_of_keys, cnp.ndarray key_stops, sums,
                     cnp.ndarray lost, double least, double most, bint is_running, int itemsize, thread_limit):
    """Fills the last of `arrays`: query, key, value and out, (*lead, head, position, column), no size of them 0.

    items: for each the bytes from its start to each item. storages: how each is stored. item_of_keys and key_stops: see
    `Linear`. sums: None, or float64 (item of keys, head, value_dim + 1, features padded to a multiple of 16), of earlier
    keys, which becomes that of all. All of these are int64 or float64 and contiguous. lost: bool, contiguous, (*lead,
    head, position) of queries, which becomes True where the denominator is not within least and most, or a result is
    nonfinite.
    """
    cdef Linear n
    cdef cnp.ndarray query = arrays[0], key = arrays[1], value = arrays[2]
    cdef int num_threads = 1
    cdef bint done
    memset(&n, 0, sizeof(Linear))
    n.kernels = chosen[itemsize == 8]
    n.itemsize = itemsize
    n.is_running = is_running
    n.lost = <char *>cnp.PyArray_DATA(lost)
    n.least = least
    n.most = most
    set_item_rows(&n.query, query, items[0], storages[0])
    set_item_rows(&n.key, key, items[1], storages[1])
    set_item_rows(&n.value, value, items[2], storages[2])
    set_item_rows(&n.out, arrays[3], items[3], storages[3])
    n.item_of_keys = <const int64_t *>cnp.PyArray_DATA(item_of_keys)
    n.key_stops = <const int64_t *>cnp.PyArray_DATA(key_stops)
    n.n_items = cnp.PyArray_SIZE(item_of_keys)
    n.n_key_items = cnp.PyArray_SIZE(key_stops)
    n.num_kv_heads = key.shape[key.ndim - 3]
    n.group = query.shape[query.ndim - 3] // n.num_kv_heads
    n.len_q = query.shape[query.ndim - 2]
    n.len_k = key.shape[key.ndim - 2]
    n.features = query.shape[query.ndim - 1]
    n.value_dim = value.shape[value.ndim - 1]
    n.ld = (n.features + 15) // 16 * 16
    n.n_sums = (n.value_dim + 1) * n.ld
    if sums is not None:
        n.sums = <double *>cnp.PyArray_DATA(sums)
    if n.num_kv_heads * (n.n_items * n.group * n.len_q + n.n_key_items * n.len_k) * n.n_sums >= LINEAR_SMALL:
        num_threads = thread_limit()
    with nogil:
        done = run_linear(&n, num_threads)
    if not done:
        raise MemoryError("no memory for the tiles of a thread, or for partial sums")
